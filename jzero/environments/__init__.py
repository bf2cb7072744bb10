"""Environments, tools and the episodes that run in them. Imports no jax."""
