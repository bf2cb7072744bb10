"""Training loops to read from top to bottom. `grpo_loop` is GRPO on one page."""
