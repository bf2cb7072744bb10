"""Compares jzero with transformers on generated config.json files of every model family.

    python benchmarks/family_configs.py
    python benchmarks/family_configs.py --families gemma3_text,mistral --pairs 100 --seed 1
    python benchmarks/family_configs.py --families llama --fields rope_scaling,head_dim --all

For each family, the fields come from the config class of transformers, and from entries that older
versions wrote. Each field takes several values, one file per value; further files change two random
fields at once. transformers makes a tiny random model of each file and saves it. Both programs read
the model, and each file is one of

    equal        the logits are equal, and those of jzero's export in transformers, too
    refused      jzero refuses the file, and names a changed field
    unnamed      jzero refuses the file, and names no changed field: a mistake
    different    the logits differ: a mistake
    impossible   transformers itself cannot make the model

The exit status is 1 if there is a mistake. Needs torch.
"""

import argparse
import copy
import json
import logging
import random
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

from jzero.audits.scores import Context, Model, hidden_states
from jzero.errors import UserError
from jzero.files import JsonObject
from jzero.model import huggingface, qwen
from jzero.model.families import window_of

NUM_TOKENS = 21
VOCABULARY = 101
TOLERANCE = 2e-3  # relative, of the logits: fp32 rounding of a hybrid in torch reaches 5e-4
ABSENT = "(absent)"  # the value of an entry that is removed from the file
OUTCOMES = ("equal", "refused", "unnamed", "different", "impossible")

# -- the fields and their values -------------------------------------------------------------------

COMMON: JsonObject = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS: JsonObject = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
HYBRID: JsonObject = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
}
WINDOWS: JsonObject = {"num_hidden_layers": 3, "sliding_window": 6, "query_pre_attn_scalar": 16}
VISION: JsonObject = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_VISION: JsonObject = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}


class Generated(NamedTuple):
    """How the files of a family are made.

    config_class  of transformers; its fields are varied. For a model with a vision tower, the class
                  of its language model.
    entries       of a tiny model.
    vision        entries of the vision tower; None: a text model.
    """

    config_class: str
    entries: JsonObject
    vision: JsonObject | None = None


GENERATED: dict[str, Generated] = {
    "qwen2": Generated("Qwen2Config", COMMON),
    "qwen3": Generated("Qwen3Config", COMMON),
    "qwen3_moe": Generated("Qwen3MoeConfig", COMMON | EXPERTS),
    "llama": Generated("LlamaConfig", COMMON),
    "mistral": Generated("MistralConfig", COMMON | {"sliding_window": None}),
    "gemma2": Generated("Gemma2Config", COMMON | WINDOWS),
    "gemma3_text": Generated("Gemma3TextConfig", COMMON | WINDOWS),
    "gemma3": Generated("Gemma3TextConfig", COMMON | WINDOWS, VISION),
    "qwen3_5_text": Generated("Qwen3_5TextConfig", COMMON | HYBRID),
    "qwen3_5_moe_text": Generated(
        "Qwen3_5MoeTextConfig",
        COMMON | HYBRID | EXPERTS | {"shared_expert_intermediate_size": 16},
    ),
    "qwen3_5": Generated("Qwen3_5TextConfig", COMMON | HYBRID, QWEN_VISION),
}
# Entries that some files have and the class has no field for: older names, and keyword arguments.
OTHER_ENTRIES = (
    "rope_theta",
    "rope_scaling",
    "rope_local_base_freq",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "sliding_window_pattern",
    "_sliding_window_pattern",
    "full_attention_interval",
    "attn_output_gate",
    "num_local_experts",
    "norm_topk_prob",
    "decoder_sparse_step",
    "mlp_only_layers",
    "attention_bias",
    "mlp_bias",
    "qkv_bias",
    "hidden_act",
    "hidden_activation",
    "use_sliding_window",
    "torch_dtype",
    "use_qk_norm",
    "layer_norm_eps",
    "quantization_config",
    "attention_multiplier",
    "mtp_num_hidden_layers",
)

YARN: JsonObject = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LLAMA3: JsonObject = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
ROPES: list[JsonObject] = [
    {"rope_type": "default"},
    {"rope_type": "default", "rope_theta": 500.0},
    {"rope_type": "linear", "factor": 4.0},
    {"type": "linear", "factor": 2.0},
    {"rope_type": "linear"},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    {"rope_type": "made_up"},
    YARN,
    YARN | {"attention_factor": 0.7},
    YARN | {"attn_factor": 0.8782488562869419},
    YARN | {"beta_fast": 16.0, "beta_slow": 2.0},
    YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
    YARN | {"mscale": 0.7},
    YARN | {"truncate": False},
    YARN | {"factor": 0.5},
    {"rope_type": "yarn", "factor": 4.0},
    LLAMA3,
    LLAMA3 | {"high_freq_factor": 1.0},
    {
        "rope_type": "longrope",
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 64,
    },
    {"rope_type": "default", "partial_rotary_factor": 0.5},
    {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True},
]
# Also one object for each kind of layer.
LAYERED: list[JsonObject] = [
    {"full_attention": full, "sliding_attention": local}
    for full, local in (
        ({"rope_type": "default", "rope_theta": 500.0}, {"rope_type": "default"}),
        ({"rope_type": "linear", "factor": 8.0}, {"rope_type": "default", "rope_theta": 700.0}),
        ({"rope_type": "default"}, {"rope_type": "linear", "factor": 8.0, "rope_theta": 700.0}),
        ({"rope_type": "default"}, {"rope_type": "linear", "factor": 8.0}),
        ({"rope_type": "default"}, YARN),
        ({"rope_type": "default"}, LLAMA3),
        ({"rope_type": "default"}, {"rope_type": "dynamic", "factor": 2.0}),
        (YARN | {"rope_theta": 300.0}, {"rope_type": "default"}),
        (YARN, YARN | {"attention_factor": 1.3}),
        (LLAMA3, {"rope_type": "default", "rope_theta": 700.0}),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, {"rope_type": "default"}),
        ({"rope_type": "default"}, {"rope_type": "default", "partial_rotary_factor": 0.5}),
        (None, {"rope_type": "linear", "factor": 8.0}),
        ({"rope_type": "linear", "factor": 8.0}, None),
    )
]
LAYERED += [
    {"sliding_attention": {"rope_type": "linear", "factor": 8.0}},
    {"full_attention": {"rope_type": "linear", "factor": 8.0}},
    {"full_attention": {"rope_theta": 300.0}, "sliding_attention": {"rope_theta": 70.0}},
]

ACTIVATIONS = ["silu", "swish", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu", None]
KINDS = ("full_attention", "sliding_attention", "linear_attention")
VALUES: dict[str, list[object]] = {
    "vocab_size": [97, 128],
    "hidden_size": [64, 48],
    "intermediate_size": [40, 96],
    "num_hidden_layers": [1, 5, 7],
    "num_attention_heads": [2, 8, 3],
    "num_key_value_heads": [1, 4, 3, None],
    "head_dim": [8, 24, 32, 7, None],
    "hidden_act": list(ACTIVATIONS),
    "hidden_activation": list(ACTIVATIONS),
    "max_position_embeddings": [16, 64, 4096],
    "rms_norm_eps": [1e-5, 0.05, 0.0],
    "layer_norm_eps": [0.05],
    "initializer_range": [0.5],
    "tie_word_embeddings": [True, False],
    "rope_parameters": [None, {}, *ROPES, *LAYERED],
    "rope_scaling": [None, {}, *ROPES],
    "rope_theta": [500.0, 1e6, 10000],
    "rope_local_base_freq": [500.0],
    "partial_rotary_factor": [0.5, 0.25, 1.0, None, 0],
    "original_max_position_embeddings": [32],
    "attention_bias": [True, False],
    "mlp_bias": [True],
    "qkv_bias": [True, False],
    "use_qk_norm": [True, False],
    "attention_dropout": [0.5],
    "use_sliding_window": [True, False],
    "sliding_window": [4, 64, 512, None, 0],
    "max_window_layers": [0, 1, 2],
    "sliding_window_pattern": [2, 1, 3],
    "_sliding_window_pattern": [2, 3],
    "full_attention_interval": [2, 3, 1],
    "query_pre_attn_scalar": [7, 64],
    "attn_logit_softcapping": [0.5, 5.0, None, 0.0],
    "final_logit_softcapping": [0.5, 5.0, None, 0.0],
    "use_bidirectional_attention": [True, False, None],
    "attn_output_gate": [True, False],
    "pretraining_tp": [2],
    "chunk_size_feed_forward": [4],
    "is_encoder_decoder": [True],
    "output_hidden_states": [True],
    "return_dict": [False],
    "use_cache": [False],
    "problem_type": ["regression"],
    "id2label": [{"0": "A", "1": "B", "2": "C"}],
    "label2id": [{"A": 0}],
    "dtype": ["float32", "bfloat16", "float16"],
    "torch_dtype": ["bfloat16"],
    "architectures": [["SomethingElse"], None],
    "transformers_version": ["4.30.0"],
    "pad_token_id": [None, 5],
    "bos_token_id": [None, 7],
    "eos_token_id": [None, 7, [7, 8]],
    "num_experts": [2, 8, 1],
    "num_local_experts": [4, 8],
    "num_experts_per_tok": [1, 4, 5],
    "moe_intermediate_size": [8, 24],
    "shared_expert_intermediate_size": [8, 24, 0],
    "norm_topk_prob": [True, False],
    "decoder_sparse_step": [2, 1],
    "mlp_only_layers": [[0], [], None],
    "output_router_logits": [True],
    "router_aux_loss_coef": [0.5],
    "linear_conv_kernel_dim": [2, 3],
    "linear_key_head_dim": [4, 16],
    "linear_value_head_dim": [4, 16],
    "linear_num_key_heads": [1, 4, 3],
    "linear_num_value_heads": [2, 8, 3],
    "quantization_config": [{"quant_method": "made_up"}],
    "attention_multiplier": [0.5],
    "mtp_num_hidden_layers": [0, 1],
}
# Without these entries transformers makes a model of billions of parameters.
SIZES = {
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "num_experts",
}
# An entry that a message may name instead of the changed one.
ALSO_NAMED = {
    "rope_parameters": ("rope", "partial_rotary_factor"),
    "rope_scaling": ("rope", "partial_rotary_factor"),
    "num_local_experts": ("num_experts",),
    "num_experts_per_tok": ("num_experts",),
    "use_sliding_window": ("sliding",),
    "max_window_layers": ("sliding",),
    "head_dim": ("partial_rotary_factor",),
    "linear_num_value_heads": ("linear_num_key_heads", "value heads"),
    "num_hidden_layers": ("layer_types",),
    "full_attention_interval": ("layer_types",),
}


def values_of(family: str, field: str, default: object) -> Iterator[object]:
    """Yields the values of a field in the files of a family."""
    count = GENERATED[family].entries["num_hidden_layers"]
    if field == "layer_types":
        yield from (None, [KINDS[0]] * count, [KINDS[1]] * count, [KINDS[2]] * count)
        yield [KINDS[0]] * (count + 1)
        yield [KINDS[number % 2] for number in range(count)]
        yield [KINDS[(number + 1) % 2] for number in range(count)]
        yield [KINDS[2 * (number % 2)] for number in range(count)]
    elif field in VALUES:
        yield from VALUES[field]
    # A field that this script does not know: other values of its type.
    elif isinstance(default, bool):
        yield not default
    elif isinstance(default, int | float):
        yield from (default + 1, default * 2)
    else:
        yield from (True, 2, "made_up")
    if field not in SIZES:
        yield ABSENT


class File(NamedTuple):
    """A config.json: a family, and the entries that differ from the tiny model of the family."""

    family: str
    changes: tuple[tuple[str, object], ...]

    def __str__(self) -> str:
        listed = ", ".join(f"{name}={json.dumps(value)}" for name, value in self.changes)
        return f"{self.family} {listed or '(unchanged)'}"

    @property
    def entries(self) -> JsonObject:
        generated = GENERATED[self.family]
        text = copy.deepcopy(generated.entries)
        for name, value in self.changes:
            if value == ABSENT:
                text.pop(name, None)
            else:
                text[name] = copy.deepcopy(value)
        if generated.vision is None:
            return {"model_type": self.family, **text}
        text["model_type"] = f"{self.family}_text"
        top = {"model_type": self.family, "vision_config": generated.vision, "text_config": text}
        # transformers ties by the complete file's entry.
        if "tie_word_embeddings" in text:
            top["tie_word_embeddings"] = text["tie_word_embeddings"]
        return top


def single_changes(family: str) -> list[File]:
    """Returns the files of a family with one changed field, and the unchanged one."""
    config_class = getattr(transformers, GENERATED[family].config_class)
    defaults = {field.name: field.default for field in fields(config_class)}
    files = [File(family, ())]
    for name in dict.fromkeys((*defaults, *OTHER_ENTRIES)):
        for value in values_of(family, name, defaults.get(name)):
            files.append(File(family, ((name, value),)))
    return files


def pairs_of_changes(family: str, count: int, seed: int) -> list[File]:
    """Returns files of a family with two random changes."""
    generator = random.Random(f"{seed} {family}")
    singles = [file.changes[0] for file in single_changes(family) if file.changes]
    files = []
    while len(files) < count:
        first, second = generator.sample(singles, 2)
        if first[0] != second[0]:
            files.append(File(family, (first, second)))
    return files


# -- the comparison --------------------------------------------------------------------------------


class Result(NamedTuple):
    outcome: str  # one of OUTCOMES
    note: str = ""


def random_model(directory: Path) -> transformers.PreTrainedModel:
    """Returns transformers' model of the config.json in a directory, with random weights."""
    config = transformers.AutoConfig.from_pretrained(directory)
    config.dtype = "float32"
    auto = transformers.AutoModelForCausalLM
    if hasattr(config, "vision_config"):
        auto = transformers.AutoModelForImageTextToText
    torch.manual_seed(0)
    model = auto.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for weight in model.parameters():
            # Norms stay around their initial values, so that no layer is lost.
            weight.add_(0.2 * torch.randn_like(weight))
    return model


def tokens_of(vocab_size: int) -> np.ndarray:
    """Returns the tokens that are scored; not the token 0, which pads."""
    return np.random.default_rng(0).integers(1, vocab_size, NUM_TOKENS).astype(np.int32)


def logits_of_torch(model: transformers.PreTrainedModel, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        output = model(input_ids=torch.tensor(tokens[None], dtype=torch.long), return_dict=True)
    return output.logits[0].float().numpy()


def logits_of_jzero(config: qwen.QwenConfig, directory: Path, tokens: np.ndarray) -> np.ndarray:
    params = huggingface.load(directory, config)
    # A further token, because the state at the last one predicts nothing that is scored.
    context = Context(np.append(tokens, np.int32(1)), 1)
    hidden = hidden_states(Model(config, params), [context], "float32")
    return np.asarray(qwen.head(config, params, jnp.asarray(hidden), jnp.float32), np.float32)


def read_config(directory: Path) -> tuple[qwen.QwenConfig, JsonObject]:
    """Reads a model as the commands do. Raises UserError if its window is too short."""
    config, hf_config = huggingface.load_config(directory)
    window = window_of(hf_config)
    if window is not None and window < NUM_TOKENS:
        raise UserError(f"sliding_window={window} is shorter than the sequence")
    return config, hf_config


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    """Returns the relative distance of two arrays of logits."""
    if found.shape != expected.shape:
        return float("inf")
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def names_a_change(message: str, file: File) -> bool:
    """Returns whether an error names one of the changed entries of a file."""
    text = message.partition("config.json")[2] or message  # without the path
    return any(
        name in text or any(other in text for other in ALSO_NAMED.get(name, ()))
        for name, _ in file.changes
    )


def compare(file: File, is_exported: bool) -> Result:
    """Compares both programs on a file."""
    with TemporaryDirectory() as temporary:
        return compare_in(Path(temporary), file, is_exported)


def compare_in(directory: Path, file: File, is_exported: bool) -> Result:
    entries = file.entries
    (directory / "config.json").write_text(json.dumps(entries))
    # transformers raises whatever its layers raise.
    try:
        model = random_model(directory)
        tokens = tokens_of(model.config.get_text_config().vocab_size)
        expected = logits_of_torch(model, tokens)
        model.save_pretrained(directory)
    except Exception as error:
        return Result("impossible", f"{type(error).__name__}: {error}")
    if not np.isfinite(expected).all():
        return Result("impossible", "the logits are not finite")

    # The file as it was generated, and as transformers has written it.
    written = json.loads((directory / "config.json").read_text())
    results = []
    for kind, form in (("generated", entries), ("saved", written)):
        (directory / "config.json").write_text(json.dumps(form))
        try:
            config, hf_config = read_config(directory)
            found = logits_of_jzero(config, directory, tokens)
        except UserError as error:
            is_named = names_a_change(str(error), file)
            results.append(Result("refused" if is_named else "unnamed", f"{kind}: {error}"))
            continue
        gap = distance(found, expected)
        if kind == "saved" and not gap < TOLERANCE:
            # transformers may read another model from the file that it has written.
            expected = logits_of_torch(read_model(directory, form), tokens)
            gap = distance(found, expected)
        if not gap < TOLERANCE:
            results.append(Result("different", f"{kind}: {gap:.2g} of the logits"))
            continue
        results.append(Result("equal", f"{gap:.2g}"))
        if is_exported:
            results.append(compare_export(directory, kind, config, hf_config, tokens, expected))
    return max(results, key=lambda result: OUTCOMES.index(result.outcome))


def read_model(directory: Path, hf_config: JsonObject) -> transformers.PreTrainedModel:
    """Returns the model that transformers reads from a directory with this config.json."""
    auto = transformers.AutoModelForCausalLM
    if "vision_config" in hf_config:
        auto = transformers.AutoModelForImageTextToText
    model = auto.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32)
    return model.eval()


def compare_export(
    directory: Path,
    kind: str,
    config: qwen.QwenConfig,
    hf_config: JsonObject,
    tokens: np.ndarray,
    expected: np.ndarray,
) -> Result:
    """Compares jzero's export of a model in transformers with the model itself.

    kind: "generated" or "saved", the form of the file.
    """
    out = directory / f"export of {kind}"
    params = huggingface.load(directory, config)
    huggingface.save(
        out, config, params, dtype="float32", hf_config_extra=hf_config, original=directory
    )
    gap = distance(logits_of_torch(read_model(out, hf_config), tokens), expected)
    if not gap < TOLERANCE:
        return Result("different", f"export of {kind}: {gap:.2g} of the logits")
    return Result("equal")


def run(files: Sequence[File], is_exported: bool = True, says: bool = False) -> list[Result]:
    """Compares all files; prints mistakes, and with `says` everything."""
    transformers.logging.set_verbosity(logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
    results = []
    # Operation by operation: most files differ in one number, and each would compile a program.
    with jax.disable_jit():
        for file in files:
            result = compare(file, is_exported)
            results.append(result)
            if says or result.outcome in ("different", "unnamed"):
                print(f"{result.outcome:10} {file}: {result.note[:300]}", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", default=",".join(GENERATED))
    parser.add_argument("--fields", default="", help="only files that change one of these")
    parser.add_argument("--pairs", type=int, default=40, help="files with two changes, per family")
    parser.add_argument("--seed", type=int, default=0, help="of the pairs")
    parser.add_argument("--no-export", action="store_true", help="do not compare exports")
    parser.add_argument("--all", action="store_true", help="print every file")
    options = parser.parse_args()
    chosen = {name for name in options.fields.split(",") if name}
    counts: dict[str, Counter[str]] = {}
    for family in options.families.split(","):
        files = single_changes(family) + pairs_of_changes(family, options.pairs, options.seed)
        if chosen:
            files = [file for file in files if chosen & {name for name, _ in file.changes}]
        results = run(files, not options.no_export, options.all)
        counts[family] = Counter(result.outcome for result in results)
    print(f"{'':18}" + "".join(f"{outcome:>12}" for outcome in OUTCOMES))
    for family, count in counts.items():
        print(f"{family:18}" + "".join(f"{count[outcome]:12}" for outcome in OUTCOMES))
    sys.exit(any(count["different"] or count["unnamed"] for count in counts.values()))


if __name__ == "__main__":
    main()
