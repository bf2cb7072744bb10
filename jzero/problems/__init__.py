"""Rows of data sets, the loader that selects them, and prompt templates. Imports no jax."""
