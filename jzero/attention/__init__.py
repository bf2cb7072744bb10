"""Attention behind one interface: `packed` for training, scoring and prefill, `paged` for decoding.

Backends by platform are a table read by `jax.lax.platform_dependent`; callers never branch. XLA is the definition
that every kernel is tested against, and the CPU path."""

from jzero.attention.xla import decode_kv, encode_kv, kv_storage, packed, paged, write_pages, write_tokens

__all__ = ["decode_kv", "encode_kv", "kv_storage", "packed", "paged", "write_pages", "write_tokens"]
