"""Teachers of on-policy distillation: they score the tokens that the policy sampled.

    teacher = make_teacher(settings, base, trainer, arrays)     # arrays: of teacher=model
    scores = teacher.score(state, reference, minibatches, sequences)

`in_process.py` has teachers on the training mesh: another model, an adapter, or the policy itself
with another prompt (`prompts.py`). `server.py` has teachers on an OpenAI-compatible server.
`jzero.algorithms.distillation` converts the scores to advantages. docs/algorithms.md is the user
guide.
"""
