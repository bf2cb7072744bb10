"""The decoder: a paged KV cache, compiled programs, sampling, and the scheduler of sequences."""
