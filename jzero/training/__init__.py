"""Turns graded rollouts into the next State.

    credit.py      rewards -> advantages and token weights, on the host
    packing.py     ragged sequences -> rows of a few fixed shapes
    heads.py       what a model's hidden states become, and the loss of that: policy and critic
    optimizer.py   AdamW and the schedules of its learning rate
    learner.py     the jitted `score` and `update` of one model on one mesh
    trainer.py     the learners and row layouts of a run
    step.py        one RL step: pack, score, credit, optimizer steps, metrics
    supervised.py  steps on examples instead of rollouts
    frozen.py      the frozen base under an adapter
    reference.py   the reference policy, on disk

Nothing in this package knows how rollouts are sampled.
"""

import dataclasses

import jax

from jzero.types import Batch, State

# jzero.types imports no JAX, so its pytrees are registered here, before any module of this package
# can use them.
for _pytree in (Batch, State):
    _names = [field.name for field in dataclasses.fields(_pytree)]
    jax.tree_util.register_dataclass(_pytree, data_fields=_names, meta_fields=[])
