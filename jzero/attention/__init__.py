"""Attention behind one interface: `packed` for training, scoring and prefill, `paged` for decoding.

XLA is the definition and runs on every platform. A kernel joins here, by `jax.lax.platform_dependent`, once it has been
tested against the definition; callers never branch."""

from jzero.attention.xla import decode_kv, encode_kv, kv_storage, packed, paged, write_pages, write_tokens

__all__ = ["decode_kv", "encode_kv", "kv_storage", "packed", "paged", "write_pages", "write_tokens"]
