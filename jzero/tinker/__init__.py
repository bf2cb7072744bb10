"""Tinker's API over HTTP: clients write the training loop, this package computes it.

python -m jzero.tinker --model DIR --name Qwen/Qwen3-8B-Base

http.py       routes, authentication, bounded bodies; computes nothing
bodies.py     JSON requests; wire.py has the protobuf messages
sessions.py   sessions, heartbeats and what they own
commands.py   the ordered commands of a model, and futures of their results
worker.py     the one thread that trains and samples
datums.py     training examples -> packed rows; `training.learner` differentiates them
tenants.py    the trained adapters and their optimizer states
sampling.py   snapshots of adapters, and the requests that are sampled from them
store.py      checkpoints on disk
"""
