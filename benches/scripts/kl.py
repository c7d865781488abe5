"""What 8-bit activations and 16-bit KV change: KL divergence and top-1 against 32-bit floats.

    pip install gguf==0.19.0 numpy
    python3 benches/scripts/kl.py LOGITS REFERENCE MODEL.gguf [MODEL.gguf ...]

LOGITS is the example `logits` of rootstock-engine, REFERENCE a file whose tokens are used
(`tests/reference/smollm2.ref`). Each model runs as it is, with f16 KV, and once more with every
tensor dequantized to F32 and f32 KV: the same weights without our rounding. Prints CSV, over all
positions and the whole vocabulary.
"""

import argparse
import pathlib
import subprocess
import tempfile

import gguf
import numpy

CHUNK = 64


def dequantized(model, out):
    """Writes `model` with all tensors as F32, its metadata unchanged."""
    reader = gguf.GGUFReader(model)
    arch = reader.get_field("general.architecture").contents()
    writer = gguf.GGUFWriter(out, arch)
    for field in reader.fields.values():
        own = field.name.startswith("GGUF.") or field.name == "general.architecture"
        if not own:
            kind = field.types[0]
            sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, sub_type=sub)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, values.astype(numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def types(model):
    """How many tensors of each type a file has."""
    counts = {}
    for tensor in gguf.GGUFReader(model).tensors:
        counts[tensor.tensor_type.name] = counts.get(tensor.tensor_type.name, 0) + 1
    return " ".join(f"{name}:{count}" for name, count in sorted(counts.items()))


def log_softmax(logits):
    """Log-probabilities in 64 bits."""
    logits = logits.astype(numpy.float64)
    logits -= logits.max(axis=1, keepdims=True)
    return logits - numpy.log(numpy.exp(logits).sum(axis=1, keepdims=True))


def compare(exact, found, vocab):
    """KL of each position, and whether the best token is the same."""
    exact = numpy.memmap(exact, numpy.float32).reshape(-1, vocab)
    found = numpy.memmap(found, numpy.float32).reshape(-1, vocab)
    assert exact.shape == found.shape
    divergences, same = [], []
    for start in range(0, len(exact), CHUNK):
        want = log_softmax(exact[start : start + CHUNK])
        got = log_softmax(found[start : start + CHUNK])
        divergences.append((numpy.exp(want) * (want - got)).sum(axis=1))
        same.append(want.argmax(axis=1) == got.argmax(axis=1))
    return numpy.concatenate(divergences), numpy.concatenate(same)


def main():
    """Compares each model with itself in floats."""
    parser = argparse.ArgumentParser()
    parser.add_argument("logits")
    parser.add_argument("reference")
    parser.add_argument("models", nargs="+")
    args = parser.parse_args()
    print("model,tensors,positions,KL mean,KL p99,KL max,top-1 same")
    for model in args.models:
        vocab = len(gguf.GGUFReader(model).get_field("tokenizer.ggml.tokens").data)
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            plain, exact, found = folder / "f32.gguf", folder / "exact", folder / "found"
            dequantized(model, plain)
            for file, out, kv in ((plain, exact, "f32"), (model, found, "f16")):
                command = [args.logits, str(file), args.reference, str(out), "auto", kv]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            divergence, same = compare(exact, found, vocab)
        p99 = numpy.quantile(divergence, 0.99)
        figures = f"{divergence.mean():.2e},{p99:.2e},{divergence.max():.2e},{same.mean():.4f}"
        print(f"{pathlib.Path(model).name},{types(model)},{len(same)},{figures}", flush=True)


if __name__ == "__main__":
    main()
