"""The reference policy of the KL penalty, saved on disk so that a resumed run has the same one.

The reference is the policy of RL step 0, or with algorithm.reference_every = n the policy of the
last step that is divisible by n. It is saved in `<workdir>/reference/<step>`, in float32 and in
Hugging Face's format.

If an adapter is trained, the reference of step 0 is the frozen base without the adapter, and no
array is copied. The reference of a later step, or of a run with an initial adapter
(model.adapter.path), is the base with the adapter of that step. Only this adapter is saved
(`adapter.safetensors`).
"""

import os
import shutil
from pathlib import Path

from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from jzero.algorithms import Algorithm
from jzero.errors import UserError, reason_of
from jzero.files import naming_full_disk
from jzero.hosts import collectives, processes
from jzero.model import huggingface, qwen
from jzero.training.learner import Learner
from jzero.types import State

ADAPTER = "adapter.safetensors"


def reference_step(algorithm: Algorithm, step: int) -> int:
    """Returns the RL step of the policy that is the reference after RL step `step`."""
    if algorithm.reference_every:
        return step - step % algorithm.reference_every
    return 0


def save_reference(
    workdir: Path,
    policy: Learner,
    algorithm: Algorithm,
    step: int,
    state: State,
    oldest_checkpoint: int,
) -> Path | None:
    """Returns the directory of the reference policy after RL step `step`.

    It holds a model, or only an adapter on the frozen base. None: the base itself is the reference.
    `state` is the policy's State after this step. If its parameters become the reference, they are
    saved first. References that no checkpoint from `oldest_checkpoint` on needs are deleted.
    """
    saved_step = reference_step(algorithm, step)
    has_adapter = bool(state.base)
    is_new_adapter = has_adapter and not policy.adapter.path
    if is_new_adapter and saved_step == 0:
        return None  # a new adapter does not change the model's outputs
    directory = workdir / "reference" / str(saved_step)

    # The directory exists already if the run was killed after saving the reference and before its
    # next checkpoint. All processes must agree, because saving is a collective operation.
    if saved_step == step:
        exists = collectives.gather_json(directory.exists())[0]
        if not exists and has_adapter:
            save_adapter(directory, state.params)
        elif not exists:
            huggingface.save(
                directory, policy.model, state.params, dtype="float32", hf_config_extra={}
            )

    # A run can resume from any checkpoint since `oldest_checkpoint` and needs its reference then.
    if processes.is_first_process():
        oldest_needed = reference_step(algorithm, oldest_checkpoint)
        for saved in directory.parent.iterdir():
            if saved.name.isdigit() and int(saved.name) < oldest_needed:
                shutil.rmtree(saved)
    return directory


def save_adapter(directory: Path, adapter: qwen.Params) -> None:
    """Writes an adapter without conversion. Every process must call this; the first one writes."""
    leaves = huggingface.flatten(adapter)
    host = {name: collectives.fetch_global(leaf) for name, leaf in leaves.items()}
    if processes.is_first_process():
        # Written next to its place and renamed, so that an existing directory is always complete.
        unfinished = directory.with_name(f".{directory.name}.partial")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        with naming_full_disk(directory, sum(array.nbytes for array in host.values())):
            save_file(host, unfinished / ADAPTER)
        os.replace(unfinished, directory)
    # A barrier: no host continues to read the file before it is written.
    collectives.gather_json("written")


def load_adapter(directory: Path, shardings: qwen.Params) -> qwen.Params:
    """Reads an adapter that `save_adapter` wrote, bit for bit."""
    places = huggingface.flatten(shardings)
    path = directory / ADAPTER
    try:
        host = load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path} cannot be read ({reason_of(error)}): it is the reference of this run; bring "
            "it back, or use another workdir"
        ) from None
    leaves = {name: collectives.put_global(host[name], place) for name, place in places.items()}
    return huggingface.unflatten(leaves)
