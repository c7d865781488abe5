"""Configurations of the models that vLLM's own tests name, without weights: configs.py FOLDER MODEL

Laid out as the cache of a model hub, so that the tests run offline. MODEL is a folder with a
tokenizer, which gets the one token more that the picture model needs.
"""

import json
import pathlib
import sys

from tokenizers import Tokenizer

REVISION = "a" * 40
IMAGE = 49152

OPT = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
    "max_position_embeddings": 2048,
    "torch_dtype": "float16",
    "vocab_size": 50272,
}
QWEN = {"bos_token_id": 151643, "hidden_act": "silu", "max_window_layers": 28}
QWEN |= {"vocab_size": 151936, "torch_dtype": "bfloat16", "initializer_range": 0.02}
MODELS = {
    "facebook/opt-125m": OPT
    | {"hidden_size": 768, "ffn_dim": 3072, "num_attention_heads": 12}
    | {"num_hidden_layers": 12, "word_embed_proj_dim": 768, "do_layer_norm_before": True},
    "facebook/opt-350m": OPT
    | {"hidden_size": 1024, "ffn_dim": 4096, "num_attention_heads": 16}
    | {"num_hidden_layers": 24, "word_embed_proj_dim": 512, "do_layer_norm_before": False},
    "Qwen/Qwen3-0.6B": QWEN
    | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "eos_token_id": 151645}
    | {"head_dim": 128, "hidden_size": 1024, "intermediate_size": 3072}
    | {"max_position_embeddings": 40960, "num_attention_heads": 16, "num_hidden_layers": 28}
    | {"num_key_value_heads": 8, "rope_theta": 1000000, "tie_word_embeddings": True},
    "Qwen/Qwen1.5-7B": QWEN
    | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "eos_token_id": 151643}
    | {"hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 32768}
    | {"num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32}
    | {"sliding_window": 32768, "use_sliding_window": False, "rope_theta": 1000000.0},
    "llava-hf/llava-1.5-7b-hf": {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_token_index": IMAGE,
        "pad_token_id": 32001,
        "projector_hidden_act": "gelu",
        "torch_dtype": "float16",
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "vocab_size": 49215,
        "text_config": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-05,
            "torch_dtype": "float16",
            "vocab_size": 49215,
        },
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": 1024,
            "image_size": 336,
            "intermediate_size": 4096,
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "patch_size": 14,
            "projection_dim": 768,
            "vocab_size": 32000,
        },
    },
}
PICTURES = {
    "image_processor_type": "CLIPImageProcessor",
    "crop_size": {"height": 336, "width": 336},
    "size": {"shortest_edge": 336},
    "do_center_crop": True,
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "resample": 3,
    "rescale_factor": 1 / 255,
}
PROCESSOR = {
    "processor_class": "LlavaProcessor",
    "image_token": "<image>",
    "num_additional_image_tokens": 1,
    "patch_size": 14,
    "vision_feature_select_strategy": "default",
}
TOKENIZER = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "processor_class": "LlavaProcessor",
    "bos_token": "<|im_start|>",
    "eos_token": "<|im_end|>",
    "pad_token": "<|im_end|>",
    "unk_token": "<|endoftext|>",
}


def main(folder: str, model: str) -> None:
    hub = pathlib.Path(folder) / "hub"
    for name, config in MODELS.items():
        at = hub / ("models--" + name.replace("/", "--"))
        snapshot = at / "snapshots" / REVISION
        snapshot.mkdir(parents=True, exist_ok=True)
        (at / "refs").mkdir(exist_ok=True)
        (at / "refs" / "main").write_text(REVISION)
        (snapshot / "config.json").write_text(json.dumps(config))
    for name, content in (
        ("preprocessor_config.json", PICTURES),
        ("processor_config.json", PROCESSOR),
        ("tokenizer_config.json", TOKENIZER),
    ):
        (snapshot / name).write_text(json.dumps(content))
    tokenizer = Tokenizer.from_file(str(pathlib.Path(model) / "tokenizer.json"))
    tokenizer.add_special_tokens(["<image>"])
    assert tokenizer.token_to_id("<image>") == IMAGE
    tokenizer.save(str(snapshot / "tokenizer.json"))


if __name__ == "__main__":
    main(*sys.argv[1:])
