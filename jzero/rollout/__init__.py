"""Rollouts: the paged engine, its page allocator, sampling, and the driver that keeps the slots busy."""
