"""Writes the default model as a folder that transformers reads: model.py FILE.gguf FOLDER"""

import os
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.quantization_config import GgufConfig


def main(gguf: str, folder: str) -> None:
    where, name = os.path.split(os.path.abspath(gguf))
    tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(
        where,
        gguf_file=name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    staging = folder + ".part"
    model.save_pretrained(staging)
    tokenizer.save_pretrained(staging)
    os.rename(staging, folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
