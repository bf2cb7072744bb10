"""Exports the policy as a directory that `transformers` loads, or an adapter that `peft` loads."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from jzero.config import AdapterConfig, RolloutConfig
from jzero.files import JsonObject
from jzero.hosts import collectives, processes
from jzero.model import huggingface, peft, qwen
from jzero.model.base_model import BaseModel
from jzero.model.directory import file_in, read_json
from jzero.model.end_tokens import CONFIG, GENERATION, eos_ids_in
from jzero.run import history
from jzero.run.history import Stage

# Fields of generation_config.json that change the sampling distribution or the search.
SAMPLING_FIELDS = frozenset(
    {
        "_from_model_config",
        "bad_words_ids",
        "begin_suppress_tokens",
        "constraints",
        "diversity_penalty",
        "do_sample",
        "dola_layers",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "encoder_repetition_penalty",
        "eos_token_id",
        "epsilon_cutoff",
        "eta_cutoff",
        "exponential_decay_length_penalty",
        "force_words_ids",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "frequency_penalty",
        "guidance_scale",
        "length_penalty",
        "min_p",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "penalty_alpha",
        "presence_penalty",
        "renormalize_logits",
        "repetition_penalty",
        "sequence_bias",
        "suppress_tokens",
        "temperature",
        "top_h",
        "top_k",
        "top_p",
        "typical_p",
        "watermarking_config",
    }
)


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

    An adapter in `params` is merged into its base. An int8 base is replaced by the original
    weights, which `read_original` returns (`huggingface.save`). `stages` is the training history of
    the model, for the model cards of this run and of later runs. Every process calls this function.
    generation_config.json is written last: if it exists, an earlier process of this run has
    completed the export of the same weights, and nothing is done.
    """
    last_file = directory / GENERATION
    # The first process decides for all, because they write the weights together.
    if collectives.gather_json(last_file.exists())[0]:
        return str(directory)

    if processes.is_first_process():
        shutil.rmtree(directory, ignore_errors=True)  # an export interrupted by a kill

    hf_config = base.hf_config | {"eos_token_id": end_tokens(base)}
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

    generation = generation_config(base, rollout)
    processes.write_once(last_file, json.dumps(generation, indent=1))
    return str(directory)


def export_adapter(
    directory: Path,
    base: BaseModel,
    settings: AdapterConfig,
    adapter: qwen.Params,
    name_of_base: str,
    dtype: str,
    stages: Sequence[Stage],
) -> str:
    """Exports an adapter in PEFT's format with the tokenizer of `base`; returns the directory.

    `name_of_base` is the hub id or the directory of the base (`InitialWeights.name`). Every process
    calls this function. The training history is written last: if it exists, an earlier
    process of this run has completed the same export, and nothing is done.
    """
    last_file = directory / history.FILE
    # The first process decides for all, because they write the adapter together.
    if collectives.gather_json(last_file.exists())[0]:
        return str(directory)
    if processes.is_first_process():
        shutil.rmtree(directory, ignore_errors=True)  # an export interrupted by a kill
    peft.save(directory, base.model, settings, adapter, base=name_of_base, dtype=dtype)
    if processes.is_first_process():
        base.tokenizer.save_pretrained(str(directory))
    processes.write_once(last_file, history.history_json(stages))
    return str(directory)


def end_tokens(base: BaseModel) -> int | list[int]:
    """Returns eos_token_id of the export's config.json.

    These are the tokens at which training stopped, and those that the model's config.json had.
    """
    ids = [*base.stop_tokens, *eos_ids_in(base.hf_config, CONFIG)]
    [first, *others] = dict.fromkeys(ids)
    return [first, *others] if others else first


def generation_config(base: BaseModel, rollout: RolloutConfig) -> JsonObject:
    """Returns the content of the export's generation_config.json.

    All fields of the base model's file are kept, except the sampling settings, which become the
    settings of training rollouts. The padding and begin-of-sequence tokens may also come from the
    model's config.json or from the tokenizer, in this order, because transformers reads them from
    no other file once generation_config.json exists.
    """
    source: JsonObject = {}
    if base.directory is not None:
        path = file_in(base.directory, GENERATION)
        source = {} if path is None else read_json(path)
    # Fields of the base model that do not affect sampling stay.
    fields = {name: value for name, value in source.items() if name not in SAMPLING_FIELDS}
    for name in ("bos_token_id", "pad_token_id"):
        ids = (fields.get(name), base.hf_config.get(name), getattr(base.tokenizer, name))
        # Compared with None, because 0 is a valid token.
        token = next((token for token in ids if token is not None), None)
        if token is not None:
            fields[name] = token
    # Users of the export should sample as the rollouts of training did.
    return fields | {
        "eos_token_id": list(base.stop_tokens),
        "do_sample": True,
        "temperature": rollout.temperature,
        "top_k": rollout.top_k,  # without it, transformers samples from the top 50 tokens
        "top_p": rollout.top_p,
        "min_p": rollout.min_p,
    }
