"""Every field can be set by a flag, and impossible settings are refused by name."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest
from absl import flags
from ml_collections import config_flags

from jzero import algorithms, config
from jzero.main import fields

# ml_collections loads a recipe that way
pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")

RECIPE = Path(__file__).resolve().parents[2] / "configs/countdown.py"
FIELDS = {name: value for name, value, _ in fields()}


def get(settings, name):
    for part in name.split("."):
        settings = getattr(settings, part)
    return settings


def put(settings, name, value):
    *path, last = name.split(".")
    setattr(get(settings, ".".join(path)) if path else settings, last, value)


def recipe():
    spec = importlib.util.spec_from_file_location("countdown_recipe", RECIPE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parse(*arguments, default="tiny"):
    """What the command line makes of a recipe."""
    argv = ["main", f"--config={RECIPE}:{default}", *arguments]
    values = flags.FlagValues()
    holder = config_flags.DEFINE_config_file("config", None, "", values, sys_argv=argv)
    values(argv)
    return holder.value


def walk(settings, prefix=""):
    """Every field, generically."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            yield from walk(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, value


def test_help_knows_every_field():
    assert dict(walk(config.Config())) == FIELDS


OTHER = {
    bool: lambda x: not x,
    int: lambda x: x + 3,
    float: lambda x: x / 2 + 0.125,
    str: lambda x: x + "other/one 2",
}


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_is_set_by_its_flag(name):
    base = parse()
    old = get(base, name)
    if isinstance(old, tuple):
        for argument, want in (
            ("</answer>", ("</answer>",)),
            ("('a', 'b c')", ("a", "b c")),
            ("()", ()),
        ):
            assert get(parse(f"--config.{name}={argument}"), name) == want
        assert get(parse(f"--config.{name}=a", f"--config.{name}=<b>"), name) == ("a", "<b>")
        return
    new = OTHER[type(old)](old)
    changed = parse(f"--config.{name}={new}")
    assert get(changed, name) == new and type(get(changed, name)) is type(old)
    put(changed, name, old)
    assert changed == base  # and nothing else
    if isinstance(old, bool):
        assert [get(parse(f"--{no}config.{name}"), name) for no in ("", "no")] == [True, False]


def test_field_types_can_be_parsed():
    kinds = {name: type(value) for name, value in walk(config.Config())}
    assert set(kinds.values()) <= {bool, int, float, str, tuple}
    for section, value in vars(config.Config()).items():
        for field in dataclasses.fields(value) if dataclasses.is_dataclass(value) else ():
            at = getattr(value, field.name)
            is_float = field.type in (float, "float")
            assert not is_float or isinstance(at, float), (
                f"{section}.{field.name}={at!r} should be a float"
            )


@pytest.mark.parametrize("preset", ["tiny", *recipe().HUB, "tiny,dr_grpo", "qwen2.5-3b,grpo"])
def test_presets_are_possible_and_fresh(preset):
    settings = recipe().get_config(preset)
    config.validate(settings)
    assert (
        json.loads(config.to_json(settings))["rollout"]["group_size"] == settings.rollout.group_size
    )
    assert settings.name.startswith("countdown-")
    settings.model.arch.hidden_size = -1
    assert recipe().get_config(preset).model.arch.hidden_size > 0
    kinds = {name: type(value) for name, value in FIELDS.items()}
    wrong = {
        name: value
        for name, value in walk(recipe().get_config(preset))
        if type(value) is not kinds[name]
    }
    assert not wrong  # an int where a float belongs could not be overridden by 0.5


@pytest.mark.parametrize("preset", algorithms.PRESETS)
def test_algorithm_presets(preset):
    settings = recipe().get_config(f"tiny,{preset}")
    assert settings.algorithm == algorithms.PRESETS[preset]() and settings.algorithm.name == preset


def test_unknown_presets():
    cases = {
        "tyni": "no preset 'tyni'.*tiny, qwen2.5-0.5b",
        "tiny,gpro": "no algorithm 'gpro'.*grpo, dr_grpo",
    }
    for preset, message in cases.items():
        with pytest.raises(ValueError, match=message):
            recipe().get_config(preset)


def test_sections_are_not_shared_between_configs():
    config.Config().rollout.group_size = 99
    assert config.Config().rollout.group_size != 99


IMPOSSIBLE = [
    ({"model.dtype": "float16"}, "model.dtype='float16' is not one of bfloat16, float32"),
    ({"model.remat": "some"}, "model.remat='some'"),
    ({"model.attention": "splash"}, "model.attention='splash'"),
    (
        {"model.arch.model_type": "llama"},
        "model.arch.model_type='llama' is not one of qwen2, qwen3",
    ),
    (
        {"model.arch.num_key_value_heads": 3},
        "model.arch.num_key_value_heads=3 does not divide model.arch.num_attention_heads=4",
    ),
    ({"model.arch.head_dim": 31}, "head_dim=31 must be even"),
    ({"model.arch.hidden_size": 0}, "model.arch.hidden_size=0 must be at least 1"),
    ({"model.logit_chunk": 0}, "model.logit_chunk=0 must be at least 1"),
    ({"task.grade_workers": 0}, "task.grade_workers=0 must be at least 1"),
    ({"rollout.kv_dtype": "int8"}, "rollout.kv_dtype='int8'"),
    (
        {"rollout.group_size": 1},
        "rollout.group_size=1: the group_mean_std baseline needs a group of at least 2",
    ),
    ({"rollout.group_size": 0}, "rollout.group_size=0 must be at least 1"),
    ({"rollout.decode_steps": 0}, "rollout.decode_steps=0 must be at least 1"),
    ({"rollout.temperature": 0.0}, "rollout.temperature=0.0 must be positive"),
    ({"rollout.top_p": 0.0}, "rollout.top_p=0.0 must be in (0, 1]"),
    ({"rollout.top_k": -1}, "rollout.top_k=-1 must be at least 0"),
    ({"rollout.min_p": 1.5}, "rollout.min_p=1.5 must be in [0, 1)"),
    ({"rollout.num_pages": -1}, "rollout.num_pages=-1 must be at least 0"),
    ({"rollout.stop": ("",)}, "rollout.stop=('',) must hold non-empty strings"),
    ({"rollout.stop": (5,)}, "rollout.stop=(5,) must hold non-empty strings"),
    (
        {"algorithm.advantage": "gae2"},
        "algorithm.advantage='gae2' is not one of group_mean, group_mean_std",
    ),
    ({"algorithm.truncated": "drop"}, "algorithm.truncated='drop'"),
    ({"algorithm.clip_low": -0.1}, "algorithm.clip_low=-0.1 must be at least 0"),
    (
        {"algorithm.correction": "tis"},
        "algorithm.correction='tis' is not one of '', none, token_truncate, token_mask",
    ),
    (
        {"algorithm.correction": "token_mask", "rollout.top_p": 0.9},
        "algorithm.correction=token_mask divides by the sampler's prob",
    ),
    (
        {"algorithm.old_policy": "sampler", "rollout.top_k": 20},
        "algorithm.old_policy=sampler divides by the sampler's probabilities",
    ),
    (
        {"algorithm.old_policy": "sampler", "algorithm.correction": "token_mask"},
        "correction=token_mask is always 1 with",
    ),
    (
        {"rollout.max_staleness": 1, "rollout.top_p": 0.9},
        "algorithm.correction=token_truncate divides by the sampler's prob",
    ),
    (
        {"rollout.max_staleness": 1, "algorithm.dynamic_sampling_rounds": 2},
        "rollout.max_staleness=1 trains on groups as they come",
    ),
    (
        {"mesh.decode_devices": 1},
        "mesh.decode_devices=1 would wait for every update: set rollout.max_staleness=1",
    ),
    (
        {"algorithm.correction_low": 3.0},
        "algorithm.correction_low=3.0 is above algorithm.correction_high=2.0",
    ),
    ({"algorithm.dual_clip": 1.1}, "algorithm.dual_clip=1.1 must be above 1 + clip_high=1.2, or 0"),
    (
        {"algorithm.overlong_share": 1.5},
        "algorithm.overlong_share=1.5 is a share of rollout.max_new_tokens: at most 1",
    ),
    (
        {"algorithm.advantage": "leave_one_out", "rollout.group_size": 1},
        "the leave_one_out baseline needs a group of at",
    ),
    ({"critic.optimizer.schedule": "step"}, "critic.optimizer.schedule='step'"),
    ({"optimizer.schedule": "step"}, "optimizer.schedule='step'"),
    ({"optimizer.clip_norm": -1.0}, "optimizer.clip_norm=-1.0 must be at least 0"),
    (
        {"warm_start.steps": 5, "warm_start.batch_size": 0},
        "warm_start.batch_size=0 must be at least 1",
    ),
    (
        {"train.pack_length": 100},
        "train.pack_length=100 is shorter than what may follow a prompt: set it to 1024 or 0",
    ),
    ({"train.pack_length": -1}, "train.pack_length=-1 must be at least 0"),
    ({"train.packs_per_row": -1}, "train.packs_per_row=-1 must be at least 0"),
    (
        {"train.pack_buckets": 12},
        "train.pack_buckets=12 halves a pack of 1024 tokens to nothing: set it to at most 11",
    ),
    ({"train.microbatch_tokens": 0}, "train.microbatch_tokens=0 must be at least 1"),
    ({"train.minibatches": 3}, "train.minibatches=3 does not divide rollout.num_prompts=128"),
    ({"train.steps": -1}, "train.steps=-1 must be at least 0"),
    ({"train.checkpoint_every": 0}, "train.checkpoint_every=0 must be at least 1"),
    ({"eval.samples": -1}, "eval.samples=-1 must be at least 0"),
    ({"task.reward.unit": "words"}, "task.reward.unit='words' is not one of characters, tokens"),
    ({"task.reward.repetition_ngram": 0}, "task.reward.repetition_ngram=0 must be at least 1"),
    (
        {"eval.every": 5, "eval.problems": 0},
        "eval.every=5 has no problems to evaluate on: set eval.problems to at least 1, or eval.suites",
    ),
    ({"eval.every": -1}, "eval.every=-1 must be at least 0"),
]


@pytest.mark.parametrize("changes, message", IMPOSSIBLE, ids=[" ".join(c) for c, _ in IMPOSSIBLE])
def test_impossible_settings_are_refused(changes, message):
    settings = config.Config()
    for name, value in changes.items():
        put(settings, name, value)
    with pytest.raises(ValueError) as caught:
        config.validate(settings)
    assert message in str(caught.value) and "\n" not in str(caught.value)


GROUP_OF_ONE = {"rollout.group_size": 1, "algorithm.advantage": "gae"}


@pytest.mark.parametrize(
    ("name", "value", "package"),
    [("task.verifier", "math_verify", "math-verify"), ("train.wandb_project", "jzero", "wandb")],
)
def test_what_is_no_dependency_needs_its_package(name, value, package, monkeypatch):
    settings = config.Config()
    put(settings, name, value)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=f"{name}={value} needs the package: pip install {package}"
    ):
        config.validate(settings)


def test_all_of_them_are_named_at_once():
    settings = config.Config()
    settings.rollout.group_size, settings.model.dtype = 1, "f16"
    with pytest.raises(ValueError, match=r"model.dtype='f16'.*; .*rollout.group_size=1"):
        config.validate(settings)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"train.pack_length": 1024},
        {"train.pack_buckets": 11},
        {"eval.problems": 0},
        GROUP_OF_ONE,
    ],
)
def test_possible_settings_pass(changes):
    settings = config.Config()
    for name, value in changes.items():
        put(settings, name, value)
    config.validate(settings)
