"""Teachers of on-policy distillation: they score the tokens that the policy has sampled.

    teacher = make_teacher(config, base, trainer)       # what config.teacher describes
    scores = teacher.score(state, reference, minibatches, sequences)

`in_process.py` has the teachers that are models on the training mesh: another model, an adapter, or
the policy itself behind another prompt (`prompts.py`). `server.py` asks an OpenAI-compatible
server. `jzero.algorithms.distillation` makes advantages of the scores. docs/distillation.md tells
how all of it is used.
"""
