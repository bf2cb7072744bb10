"""jzero: reasoning RL for Qwen models in JAX, on TPUs, GPUs and laptops."""

import os

os.environ.setdefault(
    "TRANSFORMERS_NO_ADVISORY_WARNINGS", "1"
)  # that PyTorch was not found is as intended

__version__ = "0.2.0"
