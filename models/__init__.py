"""Llama and Qwen3 decoders on the paged KV cache."""
