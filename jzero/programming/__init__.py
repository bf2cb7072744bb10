"""Programs that a policy wrote: how they are run, tested and rewarded. Imports no jax."""
