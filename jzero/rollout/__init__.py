"""Rollouts: the paged decoder, its scheduler (continuous batching), sampling, and grading."""
