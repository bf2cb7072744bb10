"""Tiny models and runs by name: a game, mixed rows, a hybrid model, a plan for a slice, a model on
disk whose tokens are bytes, and chat templates."""

import importlib.util
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
import reference
import servers
from jax.sharding import Mesh
from safetensors.numpy import load_file

from jzero import config
from jzero.attention import xla
from jzero.blueprint import (
    Blueprint,
    Spec,
    Topology,
    attached_topology,
    describe,
    models_of,
    spec_of_decoder,
)
from jzero.config import (
    Config,
    Local,
    MeshConfig,
    ModelConfig,
    RolloutConfig,
    TaskConfig,
    TrainConfig,
    tiny_arch,
)
from jzero.hosts.interrupt import never_stop
from jzero.model import delta_net, huggingface, qwen
from jzero.model.architecture import QwenConfig
from jzero.model.base_model import BaseModel, read_base_model
from jzero.model.tokenizer import PreTrainedTokenizerFast
from jzero.rollout.async_stream import RolloutStream
from jzero.rollout.sampler import Sampler, make_sampler
from jzero.sandbox import levels
from jzero.setup import WARM_START_ROWS, training_problems, warm_started
from jzero.sharding.mesh import train_mesh
from jzero.training import learner
from jzero.training.heads import rl_objective
from jzero.training.supervised import SupervisedTrainer
from jzero.types import RowLayout
from jzero.workers.pool import Pool

# -- A run on countdown ----------------------------------------------------------------------------


def changed_settings(
    defaults: dict[str, dict[str, object]], sections: dict[str, dict[str, object]]
) -> config.Config:
    """Returns settings of tiny shapes with `defaults`, of which `sections` replaces fields."""
    merged = {name: defaults.get(name, {}) | sections.get(name, {}) for name in defaults | sections}
    return reference.settings(**merged)


def countdown_settings(**sections: dict[str, object]) -> config.Config:
    """Returns settings of a run on countdown that takes seconds to compile, and then milliseconds.

    The warm start makes the rewards of a group differ.
    """
    architecture = config.tiny_arch(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, head_dim=8
    )
    defaults: dict[str, dict[str, object]] = {
        "model": {"arch": architecture},
        "task": {
            "template": "plain",
            "options": ("numbers_min=2", "numbers_max=2", "value_max=9", "format_score=0.3"),
        },
        "rollout": {
            "max_prompt_tokens": 16,
            "max_new_tokens": 24,
            "num_slots": 16,
            "page_size": 8,
            "decode_steps": 8,
            "temperature": 1.0,
        },
        "warm_start": {"steps": 30, "batch_size": 8, "lr": 2e-2, "tries": 1},
        "train": {"microbatch_tokens": 320, "packs_per_row": 1},
    }
    return changed_settings(defaults, sections)


# -- The game of jzero/tasks/guess.py: whole episodes ----------------------------------------------


def tiny_settings(**sections: dict[str, object]) -> config.Config:
    """Returns settings of a run on the game: tiny_settings(train={"steps": 2}) changes a field."""
    architecture = config.tiny_arch(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, head_dim=8
    )
    defaults: dict[str, dict[str, object]] = {
        "model": {"arch": architecture},
        "task": {"name": "guess", "template": "plain", "options": ("value_max=7",)},
        "rollout": {
            "max_prompt_tokens": 8,
            "max_new_tokens": 2,
            "max_turns": 3,
            "max_reply_tokens": 12,
            "num_slots": 16,
            "page_size": 8,
            "decode_steps": 4,
            "temperature": 1.0,
        },
        "warm_start": {"steps": 30, "batch_size": 8, "lr": 2e-2, "tries": 3.0},
        "optimizer": {"lr": 1e-3},
        "train": {"microbatch_tokens": 512, "packs_per_row": 1, "checkpoint_every": 2},
        # As many samples as a group has, so that evaluations run the programs of training.
        "eval": {"problems": 7, "samples": 4, "greedy": False},
    }
    return changed_settings(defaults, sections)


def policy_learner(model: qwen.QwenConfig, settings: Config, mesh: Mesh) -> learner.Learner:
    """Returns the policy's learner of a run with these settings."""
    objective = rl_objective(settings.algorithm, settings.rollout)
    return learner.policy_learner(model, settings.model, settings.optimizer, objective, mesh)


def critic_learner(model: qwen.QwenConfig, settings: Config, mesh: Mesh) -> learner.Learner:
    """Returns the critic's learner of a run with these settings."""
    optimizer = settings.critic_optimizer
    return learner.critic_learner(model, settings.model, optimizer, settings.algorithm, mesh)


def supervised_trainer(
    model: qwen.QwenConfig, mesh: Mesh, settings: Config, row_tokens: int
) -> SupervisedTrainer:
    """Returns the trainer of supervised steps with these settings."""
    return SupervisedTrainer(
        model,
        mesh,
        settings.model,
        settings.optimizer,
        settings.train,
        row_tokens,
        settings.sft.batch_size if settings.sft else WARM_START_ROWS,
    )


def spec_of(settings: Config) -> Spec[None]:
    """Returns what a program that only samples with these settings has on its devices."""
    return spec_of_decoder(
        settings.model, settings.mesh, settings.rollout, settings.algorithm, settings.eval
    )


def blueprint_on(settings: Config, base: BaseModel, mesh: Mesh) -> Blueprint[None]:
    """Returns the decoder of a run on a mesh, with the slots and pages of the settings."""
    spec = replace(spec_of(settings), mesh=MeshConfig(**mesh.shape))
    topology = Topology(list(mesh.devices.flat), jax.process_index())
    if settings.rollout.decode_devices:
        topology = attached_topology()
    return describe(spec, models_of(base), topology)


def sampler_and_publish(
    settings: Config, base: BaseModel, mesh: Mesh, pool: Pool
) -> tuple[Sampler, Callable[[qwen.Params], qwen.Params]]:
    """Returns a sampler on a mesh, with the number of slots and pages in the settings."""
    blueprint = blueprint_on(settings, base, mesh)
    sampler = make_sampler(blueprint.decoder, base, settings.task, pool)
    return sampler, blueprint.publisher()


def stream_of(sampler: Sampler, settings: Config) -> RolloutStream:
    """Returns the asynchronous stream of a run with these settings."""
    return RolloutStream(sampler, training_problems(settings), settings.rollout)


def make_untrained_sampler(settings: config.Config, pool: Pool | None = None) -> Sampler:
    """Returns a sampler on one device. Nothing is compiled before it samples."""
    mesh = train_mesh(1, 1, 1, jax.devices()[:1])
    base = read_base_model(settings.model)
    sampler, _ = sampler_and_publish(settings, base, mesh, pool or Pool(0))
    return sampler


class Player(NamedTuple):
    """A model that has just learned what an episode looks like."""

    tokenizer: PreTrainedTokenizerFast
    sampler: Sampler  # its pool has no workers
    params: qwen.Params


@cache
def trained_player() -> Player:
    """Returns a player after the warm start, which guesses in the right format but not well."""
    settings = tiny_settings()
    base = read_base_model(settings.model)
    mesh = train_mesh(1, 1, 1, jax.devices()[:1])
    sampler, publish = sampler_and_publish(settings, base, mesh, Pool(0))
    policy = policy_learner(base.model, settings, mesh)
    params = warm_started(settings, policy, base.tokenizer, policy.init_params(0), never_stop)
    return Player(base.tokenizer, sampler, publish(params))


# -- Rows of mathematics and of code: task.name=mixed ----------------------------------------------

BEST = next(level for level in reversed(levels.LEVELS) if not levels.failure(level))

Row = dict[str, object]


def math_row(number: int) -> Row:
    return {"task": "math", "problem": f"{number}+1=", "answer": str(number + 1)}


def code_row(number: int) -> Row:
    """A program has to print its input times a number."""
    tests = {"inputs": ["1", "2"], "outputs": [str(number), str(2 * number)]}
    return {"task": "code", "problem": f"times {number}", "input_output": json.dumps(tests)}


def write_rows(path: Path, rows: list[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_set(folder: Path) -> Path:
    """Writes 4 + 3 rows to train on, the tasks in turn, and 2 + 2 that are held out."""
    rows = [math_row(1), code_row(3), math_row(2), code_row(4), math_row(3), code_row(5)]
    write_rows(folder / "train.jsonl", [*rows, math_row(4)])
    write_rows(folder / "test.jsonl", [math_row(5), code_row(7), code_row(8), math_row(6)])
    return folder


def mixed_task(data: Path | str, *options: str, **changes: object) -> TaskConfig:
    """Returns settings with a plain template for each task."""
    return TaskConfig(
        name="mixed",
        data=str(data),
        options=("math.template=no", "code.template=plain", *options),
        sandbox=Local(level=BEST, seconds=1.0),
        **changes,
    )


# -- Qwen3.5: the entries of its config.json, its forward pass over rows, and its files ------------

HYBRID_ENTRIES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    },
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "max_position_embeddings": 128,
}


def shaken(model: Any) -> Any:
    """Returns a model of transformers none of whose norms and gates is what it was made as."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "dt_bias" in name or "conv1d" in name:
                parameter += 0.3 * torch.randn_like(parameter)
            elif parameter.ndim >= 2:
                parameter *= 4
    return model


@partial(jax.jit, static_argnums=0, static_argnames="remat")
def hybrid_forward(
    config: QwenConfig,
    params: qwen.Params,
    tokens: jax.Array,
    segments: jax.Array,
    remat: str = "none",
):
    """Returns the logits of plain rows."""
    layout = RowLayout(0, 1, tokens.shape[1])

    def attend(q, k, v, layer, carry):
        return xla.packed(q, k, v, segments, layout), carry

    def recur(inputs, layer, carry):
        return delta_net.recur_packed(inputs, segments, layout), carry

    is_first = jnp.diff(segments, axis=1, prepend=-1) != 0
    columns = jnp.arange(tokens.shape[1])
    positions = columns - jax.lax.cummax(jnp.where(is_first, columns, 0), axis=1)
    hidden, _ = qwen.forward(
        config, params, tokens, positions, attend, dtype=jnp.float32, remat=remat, recur=recur
    )
    return qwen.head(config, params, hidden, jnp.float32)


def assert_same_tensors(exported: Path, original: Path) -> None:
    """The files of tensors of two models have the same names, types and bytes."""
    before = load_file(original / "model.safetensors")
    after = load_file(exported / "model.safetensors")
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype, name
        assert after[name].tobytes() == tensor.tobytes(), name


# -- A run that is small enough to be compiled for a TPU slice in a test ---------------------------

TOPOLOGY = "v5e:2x4"
ROW_TOKENS = 160  # a prompt of 32 tokens and 4 responses of 32
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)


def small_settings(num_rows: int = 8, **rollout) -> Config:
    """Returns settings of few shapes and many pages: two layers with the heads of Qwen2.5-3B.

    A microbatch has `num_rows` rows; `rollout` replaces fields of that section.
    """
    arch = tiny_arch(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=128,
    )
    sizes = {
        "num_prompts": 16,
        "group_size": 4,
        "max_prompt_tokens": 32,
        "max_new_tokens": 32,
        "num_slots": 128,
        "page_size": 64,
        "num_pages": 16384,
    }
    return Config(
        name="small",
        model=ModelConfig(arch=arch),
        rollout=RolloutConfig(**sizes | rollout),
        train=TrainConfig(microbatch_tokens=num_rows * ROW_TOKENS, pack="longest", packs_per_row=4),
    )


# -- A model on disk whose tokens are bytes, and a file of problems --------------------------------

BYTE_TEMPLATE = """{% for message in messages %}<{{ message.role }}>{{ message.content }}
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""


def save_byte_model(path: Path) -> str:
    """Writes a tiny model whose tokens are bytes. Returns its directory."""
    tok = servers.byte_tokenizer()
    arch = qwen.QwenConfig("qwen2", len(tok), 32, 64, 2, 2, 1, 16, True, 10000.0, 1e-6)
    extra = {"max_position_embeddings": 1024}
    params = reference.random_params(arch)
    huggingface.save(path, arch, params, dtype="float32", hf_config_extra=extra)
    tok.save_pretrained(path)
    (path / "chat_template.jinja").write_text(BYTE_TEMPLATE, encoding="utf-8")
    return str(path)


def save_sums(path: Path, count: int = 20) -> str:
    """Writes sums with worked solutions. Returns the file."""
    rows = []
    for i in range(count):
        rows.append({"question": f"What is {i} + 3?", "answer": f"{i}+3\n#### {i + 3}"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


# -- Chat templates of published models ------------------------------------------------------------

# Qwen2.5-Instruct without tools.
QWEN25 = """{%- if messages[0]['role'] == 'system' %}{%- set _ = 0 %}
{%- else %}{{- '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud.<|im_end|>\\n' }}
{%- endif %}{%- for message in messages %}{%- if not (message.role == 'system' and loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# What matters here of Qwen2.5's template with tools: where the tools and their answers are.
QWEN25_TOOLS = """{%- if tools %}{{- '<|im_start|>system\\n' }}
{%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] }}
{%- else %}{{- 'You are Qwen.' }}{%- endif %}
{{- '\\n\\n# Tools\\n\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools>\\n\\n<tool_call>\\n{"name": <function-name>, "arguments": <args>}\\n' }}
{{- '</tool_call>' }}
{{- '<|im_end|>\\n' }}
{%- elif messages[0]['role'] == 'system' %}
{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- endif %}{%- for message in messages %}
{%- if message.role == 'user' or message.role == 'assistant' %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}
{%- endif %}{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# The same of Qwen3-Coder's, which explains calls in tags and ends each answer with a newline.
QWEN3_CODER = """{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n\\n<tools>' }}
{%- for tool in tools %}{{- '\\n<function>\\n<name>' + tool.function.name + '</name>' }}
{%- for name, field in tool.function.parameters.properties | items %}
{{- '\\n<parameter>' + name + ': ' + field.description + '</parameter>' }}{%- endfor %}
{{- '\\n</function>' }}{%- endfor %}
{{- '\\n</tools>\\n\\n<tool_call>\\n<function=example_function_name>\\n</function>\\n' }}
{{- '</tool_call>' }}
{{- '<|im_end|>\\n' }}{%- endif %}{%- for message in messages %}
{%- if message.role == 'user' or message.role == 'assistant' %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.previtem and loop.previtem.role != 'tool' %}{{- '<|im_start|>user\\n' }}{%- endif %}
{{- '<tool_response>\\n' + message.content + '\\n</tool_response>\\n' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
