"""Loads models: a blueprint with pages that fit, and weights in it."""
