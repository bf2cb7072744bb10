"""The reference policy of the KL penalty, kept on disk so that a resumed run has the same one.

The reference is the policy of RL step 0, or with algorithm.reference_every = n the policy of the
last step that n divides. It lies in `<workdir>/reference/<step>`, in float32 and in Hugging Face's
format.
"""

import shutil
from pathlib import Path

from jzero.algorithms import Algorithm
from jzero.distributed import collectives, processes
from jzero.model import huggingface, qwen
from jzero.training.learner import Learner


def reference_step(algorithm: Algorithm, step: int) -> int:
    """Returns the RL step whose policy is the reference once RL step `step` is done."""
    if algorithm.reference_every:
        return step - step % algorithm.reference_every
    return 0


def load_reference(
    workdir: Path,
    policy: Learner,
    algorithm: Algorithm,
    step: int,
    params: qwen.Params,
    oldest_checkpoint: int,
) -> qwen.Params:
    """Returns the reference policy after RL step `step`, sharded as the policy is.

    `params` are the policy's after that step. If they are to become the reference, they are saved
    first. References that no checkpoint from `oldest_checkpoint` on needs are deleted.
    """
    wanted = reference_step(algorithm, step)
    directory = workdir / "reference" / str(wanted)

    # The directory exists already if the run was killed after saving the reference and before its
    # next checkpoint. All processes must agree, because saving is a collective operation.
    if wanted == step:
        exists = collectives.gather_json(directory.exists())[0]
        if not exists:
            huggingface.save(directory, policy.model, params, dtype="float32", hf_config_extra={})

    if processes.is_first_process():
        oldest_needed = reference_step(algorithm, oldest_checkpoint)
        for saved in directory.parent.iterdir():
            if saved.name.isdigit() and int(saved.name) < oldest_needed:
                shutil.rmtree(saved)
    return huggingface.load(directory, policy.model, policy.shardings)
