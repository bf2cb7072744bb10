"""Meshes of devices, and the weights and tokens that are sharded over them."""
