"""Turns graded rollouts into the next State.

    credit.py      rewards -> advantages and token weights, on the host
    packing.py     ragged sequences -> rows of a few fixed shapes
    heads.py       outputs and losses of the policy and the critic, from a model's hidden states
    optimizer.py   AdamW and its learning rate schedules
    learner.py     the jitted `score` and `update` of one model on one mesh
    trainer.py     the learners and row layouts of a run
    step.py        one RL step: pack, score, credit, optimizer steps, metrics
    supervised.py  steps on examples instead of rollouts
    frozen.py      the frozen base under an adapter
    reference.py   the reference policy, on disk

This package is independent of how rollouts are sampled.
"""

import dataclasses

import jax

from jzero.types import Batch, State

# jzero.types does not import JAX, so its pytrees are registered here, before any module of this
# package uses them.
for _pytree in (Batch, State):
    _names = [field.name for field in dataclasses.fields(_pytree)]
    jax.tree_util.register_dataclass(_pytree, data_fields=_names, meta_fields=[])
