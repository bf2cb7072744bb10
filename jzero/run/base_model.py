"""Moved from jzero.session."""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from jzero import config
from jzero.distributed import collectives, processes
from jzero.model import huggingface, qwen, tokenizer
from jzero.training import learner


class BaseModel(NamedTuple):
    directory: Path | None  # of the model to load; None: random init
    model: qwen.QwenConfig
    hf_config: dict[str, Any]  # its config.json
    tokenizer: tokenizer.PreTrainedTokenizerFast

    @property
    def stops(self) -> tuple[int, ...]:
        """Tokens that end a response."""
        return tokenizer.eos_ids(self.tokenizer, str(self.directory or ""))


def read_base_model(model: config.ModelConfig) -> BaseModel:
    directory = huggingface.resolve(model.path) if model.path else None
    architecture, hf_config = huggingface.load_config(directory) if directory else (None, {})
    tok = tokenizer.load(model.tokenizer or (str(directory) if directory else ""))
    architecture = architecture or qwen.QwenConfig(vocab_size=len(tok), **vars(model.arch))
    return BaseModel(directory, architecture, hf_config, tok)


def load_params(base: BaseModel, policy: learner.Learner, seed: int) -> qwen.Params:
    """Where there is no directory, random ones."""
    return (
        huggingface.load(base.directory, policy.model, policy.shardings)
        if base.directory
        else policy.init_params(seed)
    )


def export_model(
    directory: Path, base: BaseModel, rollout: config.RolloutConfig, params: qwen.Params, dtype: str
) -> str:
    """A directory that `transformers` loads. One that is whole is of the same weights, and stays."""
    if not collectives.gather_json((directory / "generation_config.json").exists())[
        0
    ]:  # the last to be written
        if processes.is_first_process():
            shutil.rmtree(directory, ignore_errors=True)
        stops = list(base.stops)
        extra = (
            {"max_position_embeddings": rollout.longest_episode}
            | base.hf_config
            | {"eos_token_id": stops[0]}
        )
        huggingface.save(directory, base.model, params, dtype=dtype, hf_config_extra=extra)
        if processes.is_first_process():
            base.tokenizer.save_pretrained(str(directory))
        generation = {"eos_token_id": stops, "temperature": rollout.temperature, "do_sample": True}
        processes.write_once(directory / "generation_config.json", json.dumps(generation, indent=1))
    return str(directory)
