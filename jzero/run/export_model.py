"""Writes the policy as a directory that `transformers` loads."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from jzero.config import RolloutConfig
from jzero.distributed import collectives, processes
from jzero.model import huggingface, qwen
from jzero.run import history
from jzero.run.base_model import BaseModel
from jzero.run.history import Stage


def export_model(
    directory: Path,
    base: BaseModel,
    rollout: RolloutConfig,
    params: qwen.Params,
    dtype: str,
    stages: Sequence[Stage] = (),
    read_original: Callable[[str], np.ndarray] | None = None,
) -> str:
    """Exports `params` with the tokenizer and configuration of `base`; returns the directory.

    An adapter in `params` is merged into its base: into what `read_original` returns where that is
    in 8 bits (`huggingface.save`).
    `stages` is how the model came to be, for the model cards of this run and of later ones.
    Every process calls this function. generation_config.json is written last: where it exists, an
    earlier process of this run has exported the same weights completely, and nothing is done.
    """
    last_file = directory / "generation_config.json"
    # The first process decides for all, because they write the weights together.
    if collectives.gather_json(last_file.exists())[0]:
        return str(directory)

    if processes.is_first_process():
        shutil.rmtree(directory, ignore_errors=True)  # an export that a kill cut short

    stop_tokens = list(base.stop_tokens)
    hf_config = base.hf_config | {"eos_token_id": stop_tokens[0]}
    huggingface.save(
        directory,
        base.model,
        params,
        dtype=dtype,
        hf_config_extra=hf_config,
        read_original=read_original,
        original=base.directory,
    )
    if processes.is_first_process():
        base.tokenizer.save_pretrained(str(directory))
    processes.write_once(directory / history.FILE, history.history_json(stages))

    generation = {
        "eos_token_id": stop_tokens,
        "temperature": rollout.temperature,
        "do_sample": True,
    }
    processes.write_once(last_file, json.dumps(generation, indent=1))
    return str(directory)
