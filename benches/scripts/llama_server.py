"""A llama.cpp server for `rootstock bench agents`: the peer on the same file with the same slots.

    pip install xllamacpp==2026.10.11549
    python3 benches/scripts/llama_server.py MODEL.gguf [--slots 16] [--context 46592] [--threads 2]

The wheel is built for any x86-64 with run-time dispatch. Prompts of all slots share one KV cache of
CONTEXT tokens; a slot keeps its prefix between turns, as the server's default is. Prints the
address and serves until it is ended.
"""

import argparse
import signal

import xllamacpp


def main():
    """Serves."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--context", type=int, default=46592)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--port", type=int, default=8132)
    args = parser.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path = args.model
    params.n_parallel = args.slots
    params.n_ctx = args.context
    params.kv_unified = True
    params.port = args.port
    params.cpuparams.n_threads = args.threads
    params.cpuparams_batch.n_threads = args.threads
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
