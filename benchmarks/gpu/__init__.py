"""Measurements on a machine with NVIDIA GPUs, in stages of at most ten minutes.

    python -m benchmarks.gpu STAGE

`stages.py` says what each stage runs, and `running.py` how.
"""
