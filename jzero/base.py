"""The model that a run starts from, and directories like its own, which `transformers` loads."""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from jzero import config, hosts, tokenizer, update
from jzero.model import hf, qwen


class Base(NamedTuple):
    directory: Path | None  # of the model to load; None: random init
    model: qwen.QwenConfig
    hf_config: dict[str, Any]  # its config.json
    tokenizer: tokenizer.PreTrainedTokenizerFast

    @property
    def stops(self) -> tuple[int, ...]:
        """Tokens that end a response."""
        return tokenizer.eos_ids(self.tokenizer, str(self.directory or ""))


def read_base(model: config.Model) -> Base:
    directory = hf.resolve(model.path) if model.path else None
    architecture, hf_config = hf.load_config(directory) if directory else (None, {})
    tok = tokenizer.load(model.tokenizer or (str(directory) if directory else ""))
    architecture = architecture or qwen.QwenConfig(vocab_size=len(tok), **vars(model.arch))
    return Base(directory, architecture, hf_config, tok)


def load_params(base: Base, policy: update.Learner, seed: int) -> qwen.Params:
    """Where there is no directory, random ones."""
    return hf.load(base.directory, policy.model, policy.shardings) if base.directory else policy.init_params(seed)


def export(directory: Path, base: Base, rollout: config.Rollout, params: qwen.Params, dtype: str) -> str:
    """A directory that `transformers` loads. One that is whole is of the same weights, and stays."""
    if not hosts.agree((directory / "generation_config.json").exists())[0]:  # the last to be written
        if hosts.first():
            shutil.rmtree(directory, ignore_errors=True)
        stops = list(base.stops)
        extra = {"max_position_embeddings": rollout.total} | base.hf_config | {"eos_token_id": stops[0]}
        hf.save(directory, base.model, params, dtype=dtype, hf_config_extra=extra)
        if hosts.first():
            base.tokenizer.save_pretrained(str(directory))
        generation = {"eos_token_id": stops, "temperature": rollout.temperature, "do_sample": True}
        hosts.write(directory / "generation_config.json", json.dumps(generation, indent=1))
    return str(directory)
