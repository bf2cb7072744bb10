"""Rewards: built-in and user-defined functions, and the adapter for TRL's. Imports no jax."""
