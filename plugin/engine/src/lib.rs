//! Model runner for GGUF Llama-family models, one engine thread a replica.
