"""jzero: reasoning RL for Qwen models in JAX, on TPUs, GPUs and laptops."""

__version__ = "0.1.0"
