"""Reference logits of the default model (SmolLM2-135M-Instruct Q4_1), and the comparison.

    python3 -m venv V && V/bin/pip install numpy gguf tokenizers
    V/bin/python tests/reference/make_reference.py make MODEL.gguf FULL.npy
        tokenizes corpus.txt, computes float32 logits with llama_ref.py, keeps all of them in
        FULL.npy (outside the repository) and the fixture smollm2.ref beside this file
    V/bin/python tests/reference/make_reference.py compare FULL.npy LOGITS.f32 [LOGITS.f32 ...]
        compares dumps of `cargo run --release -p rootstock-engine --example logits`
    V/bin/python tests/reference/make_reference.py hf MODEL.gguf FULL.npy
        the same logits by transformers on the dequantized weights (needs torch, transformers,
        accelerate), compared with FULL.npy: a check of the reference itself

smollm2.ref, little endian: magic "RSREF1\\0\\0", u32 sequences, u32 top; then a sequence: u32
tokens n, n * u16 token; then a position: f32 log-sum-exp of the row, `top` * (u16 token, f32
logit), largest first.
"""

import pathlib
import struct
import sys

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import llama_ref  # noqa: E402

TOP = 8


def tokenizer(path):
    """The tokenizer of the file (pre-tokenizer smollm), built from its own tokens and merges."""
    import gguf
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    r = gguf.GGUFReader(path)

    def field(k):
        return r.get_field("tokenizer.ggml." + k).contents()

    words, kinds = field("tokens"), field("token_type")
    merges = [tuple(m.split(" ")) for m in field("merges")]
    tok = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, merges))
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tok.decoder = decoders.ByteLevel()
    special = [w for w, k in zip(words, kinds) if k == 3]
    tok.add_special_tokens([AddedToken(w, special=True, normalized=False) for w in special])
    return tok


def sequences(path):
    tok = tokenizer(path)
    return [tok.encode(t).ids for t in (HERE / "corpus.txt").read_text().split("\n=====\n")]


def log_sum_exp(x):
    top = x.max(axis=-1, keepdims=True)
    return (np.log(np.exp(x - top).sum(axis=-1, keepdims=True)) + top)[..., 0]


def make(path, full):
    cfg, w = llama_ref.load_gguf(path)
    seqs = sequences(path)
    out = [struct.pack("<8sII", b"RSREF1\0\0", len(seqs), TOP)]
    rows = []
    for ids in seqs:
        logits = llama_ref.forward(cfg, w, ids, np.float32)
        rows.append(logits)
        out.append(struct.pack("<I", len(ids)) + np.asarray(ids, "<u2").tobytes())
        lse = log_sum_exp(logits.astype(np.float64))
        order = np.argsort(-logits, axis=-1, kind="stable")[:, :TOP]
        for p in range(len(ids)):
            out.append(struct.pack("<f", lse[p]))
            out.extend(struct.pack("<Hf", t, logits[p, t]) for t in order[p])
        print(len(ids), "tokens", flush=True)
    (HERE / "smollm2.ref").write_bytes(b"".join(out))
    np.save(full, np.concatenate(rows))
    print("positions", sum(map(len, seqs)))


def report(name, ref, got):
    same = ref.argmax(-1) == got.argmax(-1)
    kl, largest = [], 0.0
    for a, b in zip(np.array_split(ref, 32), np.array_split(got, 32)):
        a, b = a.astype(np.float64), b.astype(np.float64)
        largest = max(largest, np.abs(a - b).max())
        la, lb = a - log_sum_exp(a)[:, None], b - log_sum_exp(b)[:, None]
        kl.append((np.exp(la) * (la - lb)).sum(-1))
    kl = np.concatenate(kl)
    print(
        f"{name}: positions {len(ref)}, top-1 agreement {same.mean() * 100:.3f} % "
        f"({(~same).sum()} differ), largest logit difference {largest:.3g}, "
        f"mean KL {kl.mean():.3e}, median KL {np.median(kl):.3e}, largest KL {kl.max():.3e}"
    )
    ref2 = np.sort(np.partition(ref, -2, axis=-1)[:, -2:], axis=-1)
    for p in np.nonzero(~same)[0][:5]:
        print(f"  position {p}: the reference's two best are {ref2[p, 1] - ref2[p, 0]:.2g} apart")


def compare(full, dumps):
    ref = np.load(full)
    for dump in dumps:
        report(dump, ref, np.fromfile(dump, "<f4").reshape(ref.shape))


def hf(path, full):
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.quantization_config import GgufConfig

    path = pathlib.Path(path)
    model = AutoModelForCausalLM.from_pretrained(
        str(path.parent),
        gguf_file=path.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    ).eval()
    with torch.no_grad():
        rows = [model(torch.tensor([ids])).logits[0].numpy() for ids in sequences(path)]
    report("transformers float32", np.load(full), np.concatenate(rows))


if __name__ == "__main__":
    command, args = sys.argv[1], sys.argv[2:]
    if command == "compare":
        compare(args[0], args[1:])
    else:
        {"make": make, "hf": hf}[command](*args)
