"""Impossible settings are refused by name, all of them at once; possible ones pass."""

import math

import pytest
from settings_by_name import changed_config

from jzero import config
from jzero.errors import UserError

AGENT = {"task.name": "agent", "task.agent": "my:play", "task.turn_reward": "score"}

# The settings changed, and what the message says.
IMPOSSIBLE: list[tuple[dict[str, object], str]] = [
    ({"model.dtype": "float16"}, "model.dtype=float16 is not one of bfloat16, float32"),
    ({"model.remat": "some"}, "model.remat=some is not one of none, dots, full"),
    (
        {"model.arch": "tiny-qwen2(num_key_value_heads=3)"},
        "model.arch.num_key_value_heads=3 does not divide model.arch.num_attention_heads=4",
    ),
    ({"model.arch": "tiny-qwen2(head_dim=31)"}, "head_dim=31 must be even"),
    (
        {"model.arch": "tiny-qwen2(hidden_size=0)"},
        "model.arch=tiny-qwen2(hidden_size=0): hidden_size=0 must be at least 1",
    ),
    ({"model.adapter.rank": -1}, "model.adapter.rank=-1 must be at least 0"),
    (
        {"model.adapter.rank": 8, "model.adapter.alpha": 0.0},
        "model.adapter.alpha=0.0 must be above",
    ),
    ({"model.adapter.targets": ("q",)}, "model.adapter.targets=q has no effect without model.adap"),
    (
        {"model.adapter.dropout": 0.1},
        "model.adapter.dropout=0.1 has no effect without model.adapter.rank: set both",
    ),
    (
        {"model.adapter.rank": 8, "model.adapter.dropout": 1.0},
        "model.adapter.dropout=1.0 must be below 1",
    ),
    (
        {"model.adapter.rank": 8, "model.adapter.dropout": -0.1},
        "model.adapter.dropout=-0.1 must be at least 0",
    ),
    ({"model.base": "int4"}, "model.base=int4 is not one of native, int8"),
    (
        {"model.base": "int8"},
        "model.base=int8 needs a frozen model, and without an adapter nothing is frozen: set model",
    ),
    (
        {"model.adapter.rank": 8, "critic.path": "/a/critic"},
        "critic.path=/a/critic is a model of its own, and with model.adapter.rank=8 the critic is",
    ),
    (
        {"model.adapter.path": "/an/adapter"},
        "model.adapter.path=/an/adapter was trained on a different base model: set model.path to "
        "that model",
    ),
    (
        {"model.adapter.path": "/a", "model.path": "/b", "warm_start.steps": 3},
        "changes the base model of model.adapter.path=/a: set warm_start=none",
    ),
    (
        {"model.adapter.path": "/a", "model.path": "/b", "critic.path": "/a/critic"},
        "critic.path=/a/critic is a model of its own, and with model.adapter.path the critic is",
    ),
    ({"model.logit_chunk": 0}, "model.logit_chunk=0 must be at least 1"),
    ({"task.grade_workers": 0}, "task.grade_workers=0 must be at least 1"),
    ({"task.grade_seconds": 0.0}, "task.grade_seconds=0.0 must be above 0"),
    ({"optimizer.lr": math.nan}, "optimizer.lr=nan must be a finite number"),
    ({"optimizer.clip_norm": math.inf}, "optimizer.clip_norm=inf must be a finite number"),
    ({"optimizer.b1": 2.0}, "optimizer.b1=2.0 must be below 1"),
    ({"optimizer.b2": 1.0}, "optimizer.b2=1.0 must be below 1"),
    ({"optimizer.nu_dtype": "bfloat16", "optimizer.b2": 0.999}, "set optimizer.b2 to at most 0.98"),
    ({"train.seed": 2**32}, "train.seed=4294967296 must be at most 4294967295"),
    (
        {"algorithm.advantage": "gae", "algorithm.advantage.gamma": 1.1},
        "algorithm.advantage.gamma=1.1 must be at most 1",
    ),
    ({"rollout.kv_dtype": "int4"}, "rollout.kv_dtype=int4 is not one of bfloat16"),
    ({"rollout.weights": "int4"}, "rollout.weights=int4 is not one of native"),
    (
        {
            "rollout.weights": "int8",
            "algorithm.correction": "token_truncate",
            "model.adapter.rank": 4,
        },
        "rollout.weights=int8 quantizes a model that is trained as a whole: with an adapter set "
        "model.base=int8",
    ),
    (
        {
            "rollout.kv_dtype": "int8",
            "algorithm.correction": "token_truncate",
            "model.exact": True,
        },
        "rollout.kv_dtype=int8: what the sampler rounds to 8 bits the trainer does not",
    ),
    (
        {
            "rollout.weights": "fp8",
            "algorithm.correction": "token_truncate",
            "model.exact": True,
            "rollout.kv_dtype": "fp8",
        },
        "rollout.weights=fp8 rollout.kv_dtype=fp8: what the sampler rounds to 8 bits the trainer",
    ),
    (
        {"rollout.group_size": 1},
        "rollout.group_size=1: the group_mean_std baseline needs a group of at least 2",
    ),
    ({"rollout.group_size": 0}, "rollout.group_size=0 must be at least 1"),
    ({"rollout.decode_steps": 0}, "rollout.decode_steps=0 must be at least 1"),
    ({"rollout.temperature": 0.0}, "rollout.temperature=0.0 must be above 0"),
    ({"rollout.top_p": 0.0}, "rollout.top_p=0.0 must be above 0"),
    ({"rollout.top_k": -1}, "rollout.top_k=-1 must be at least 0"),
    ({"rollout.min_p": 1.5}, "rollout.min_p=1.5 must be below 1"),
    ({"rollout.num_pages": -1}, "rollout.num_pages=-1 must be at least 0"),
    ({"rollout.stop": ("",)}, "rollout.stop='' is an empty text: remove it"),
    ({"rollout.stop": (5,)}, "rollout.stop has the item 5, which must be text"),
    (
        {"algorithm.advantage": "gae2"},
        "algorithm.advantage=gae2 is not one of group_mean, group_mean_std",
    ),
    ({"algorithm.truncated": "drop"}, "algorithm.truncated=drop is not one of grade"),
    ({"algorithm.surrogate.low": -0.1}, "algorithm.surrogate.low=-0.1 must be at least 0"),
    (
        {"algorithm.correction": "tis"},
        "algorithm.correction=tis is not one of auto, token_truncate, token_mask",
    ),
    (
        {"algorithm.correction": "token_mask", "rollout.top_p": 0.9},
        "algorithm.correction=token_mask divides by the sampler's prob",
    ),
    (
        {"algorithm.off_policy_bound": 0.5, "rollout.top_p": 0.9},
        "algorithm.off_policy_bound=0.5 compares with the sampler's prob",
    ),
    ({"algorithm.top_entropy": 0.0}, "algorithm.top_entropy=0.0 must be above 0"),
    ({"algorithm.top_entropy": 1.5}, "algorithm.top_entropy=1.5 must be at most 1"),
    (
        {"algorithm.surrogate": "sapo(tau_positive=0.0)"},
        "sapo.tau_positive=0.0 must be at least 0.01",
    ),
    (
        {"algorithm.surrogate": "vespo", "algorithm.surrogate.k_negative": 20.0},
        "algorithm.surrogate.k_negative=20.0 must be at most 10",
    ),
    (
        {"algorithm.old_policy": "sampler", "rollout.min_p": 0.1},
        "keep: bound their number with rollout.top_k, such as 512",
    ),
    (
        {"algorithm.correction": "token_mask", "rollout.top_k": 20, "algorithm.kl_reward": 0.1},
        "algorithm.kl_reward=0.1 compares with a reference policy over the full vocabulary",
    ),
    (
        {"algorithm.old_policy": "sampler", "algorithm.correction": "token_mask"},
        "correction=token_mask is always 1 with",
    ),
    (
        {"rollout.placement.max_staleness": 1, "rollout.top_p": 0.9},
        "algorithm.correction=token_truncate divides by the sampler's prob",
    ),
    (
        {"rollout.placement.max_staleness": 1, "algorithm.dynamic_sampling_rounds": 2},
        "rollout.placement.max_staleness=1 trains on groups as they come",
    ),
    (
        {"rollout.placement": "apart(max_staleness=0)"},
        "rollout.placement=apart(max_staleness=0): apart.max_staleness=0 must be at least 1",
    ),
    (
        {"rollout.placement": "jobs"},
        "rollout.placement=jobs has no store: set rollout.placement.store to a directory",
    ),
    (
        {"rollout.placement": "jobs(store='s')", "sft.data": "examples.jsonl"},
        "rollout.placement=jobs places the rollouts of RL, and sft has none: set "
        "rollout.placement=together",
    ),
    (
        {"rollout.placement": "apart", "sft.data": "examples.jsonl"},
        "rollout.placement=apart places the rollouts of RL, and sft has none",
    ),
    (
        {"rollout.placement": "jobs(store='s')", "algorithm.dynamic_sampling_rounds": 2},
        "rollout.placement=jobs does not support algorithm.dynamic_sampling_rounds",
    ),
    (
        {"rollout.placement": "jobs(store='s')", "model.adapter.rank": 4, "warm_start.steps": 3},
        "samplers load the base from model.path: set it, and warm_start=none",
    ),
    (
        {"rollout.placement": "jobs(store='s',switch='tokens')"},
        "rollout.placement.switch=tokens with schedule=fixed: rollouts would depend on the time",
    ),
    (
        {"rollout.placement": "jobs(store='s',groups_per_request=7)"},
        "rollout.placement.groups_per_request=7 does not divide rollout.num_prompts=128",
    ),
    (
        {"model.exact": True, "model.attention": "xla"},
        "model.attention=xla is not the attention of model.exact",
    ),
    (
        {"model.exact": True, "model.dtype": "float32"},
        "rollout.kv_dtype=bfloat16 rounds the keys that the trainer does not round",
    ),
    (
        {"model.exact": True, "rollout.routing_replay": True},
        "rollout.routing_replay=True: with model.exact the trainer's router chooses",
    ),
    (
        {"model.exact": True, "rollout.page_size": 48},
        "rollout.page_size=48: model.exact reads keys in blocks of 64",
    ),
    (
        {"model.exact": True, "model.adapter.rank": 8, "model.adapter.dropout": 0.1},
        "model.adapter.dropout=0.1: the sampler has no dropout",
    ),
    (
        {"model.exact": True, "model.base": "int8"},
        "model.base=int8: products with weights in 8 bits are not exact",
    ),
    (
        {"model.exact": True, "rollout.top_k": 20, "algorithm.old_policy": "sampler"},
        "rollout.top_k=20: ratios over the tokens that it keeps are not exact",
    ),
    (
        {"model.exact": True, "sft.data": "chats"},
        "model.exact=True compares the trainer with a sampler",
    ),
    (
        {"algorithm.correction": "token_mask(low=3.0)"},
        "algorithm.correction.low=3.0 is above algorithm.correction.high=2.0",
    ),
    (
        {"algorithm.surrogate": "dppo_tv", "algorithm.ratio": "sequence"},
        "algorithm.ratio=sequence is not the ratio of one token's probabilities",
    ),
    (
        {"algorithm.environment_coef": 0.1},
        "trains on an environment's replies, and rollout.max_turns=1 has none",
    ),
    (
        {"algorithm.advantage": "each_group_mean_std", "algorithm.overlong_share": 0.2},
        "algorithm.overlong_share=0.2 is in no function of task.reward.functions",
    ),
    (
        {"algorithm.advantage": "each_group_mean_std", "algorithm.kl_reward": 0.1},
        "algorithm.kl_reward=0.1 is in no function of task.reward.functions",
    ),
    (
        {"algorithm.advantage": "each_group_mean_std", "rollout.max_turns": 2},
        "task.turn_reward=success replaces a score, and algorithm.advantage=each_group_mean_std",
    ),
    (
        {"rollout.thoughts": "drop", "rollout.max_turns": 2, "task.name": "guess"},
        "keeps the thoughts of earlier turns: set rollout.thoughts=keep, or rollout.max_turns=1",
    ),
    (
        {"eval.max_new_tokens": 2000, "rollout.max_episode_tokens": 1500},
        "rollout.max_episode_tokens=1500 is shorter than a prompt and eval.max_new_tokens=2000",
    ),
    (
        {"algorithm.surrogate.dual": 1.1},
        "algorithm.surrogate.dual=1.1 must be above 1 + high=1.2, or 0",
    ),
    (
        {"algorithm.overlong_share": 1.5},
        "algorithm.overlong_share=1.5 must be at most 1",
    ),
    (
        {"algorithm.advantage": "leave_one_out", "rollout.group_size": 1},
        "the leave_one_out baseline needs a group of at",
    ),
    (
        AGENT | {"train.packs_per_row": 2},
        "task.agent=my:play have different prompts, and cannot share one in a row",
    ),
    (
        AGENT | {"train.sequence_per_turn": True},
        "the sequences of task.agent=my:play are those of its requests; set",
    ),
    (
        AGENT | {"rollout.hosts_per_decoder": 2},
        "the requests of task.agent=my:play reach one host; set rollout.hosts_per_decoder=1",
    ),
    (
        AGENT | {"rollout.placement.max_staleness": 1},
        "task.agent=my:play requests responses within a step; set rollout.placement=together",
    ),
    ({"critic.lr": -1.0}, "critic.lr=-1.0 must be at least 0"),
    ({"optimizer.schedule": "step"}, "optimizer.schedule=step is not one of constant, linear"),
    ({"optimizer.clip_norm": -1.0}, "optimizer.clip_norm=-1.0 must be at least 0"),
    (
        {"warm_start.steps": 5, "warm_start.batch_size": 0},
        "warm_start.batch_size=0 must be at least 1",
    ),
    (
        {"train.pack": "512,256"},
        "train.pack=512,256 has no room for the 1024 tokens that may follow a prompt: begin with "
        "1024 or more",
    ),
    ({"train.pack": "100"}, "train.pack=100 has no room for the 1024 tokens"),
    ({"train.pack": "1024,64,256"}, "train.pack=1024,64,256: give lengths above 0, the longest"),
    ({"train.pack": "1024,0"}, "train.pack=1024,0: give lengths above 0, the longest first"),
    ({"train.pack": "half"}, "train.pack=half is not auto, longest or lengths in tokens: give"),
    ({"train.pack": "-1"}, "train.pack=-1 is not auto, longest or lengths in tokens"),
    ({"train.pack": ""}, "train.pack= is not auto, longest or lengths in tokens"),
    ({"train.packs_per_row": -1}, "train.packs_per_row=-1 must be at least 0"),
    ({"train.microbatch_tokens": -1}, "train.microbatch_tokens=-1 must be at least 0"),
    ({"train.minibatches": 3}, "train.minibatches=3 does not divide rollout.num_prompts=128"),
    ({"train.steps": -1}, "train.steps=-1 must be at least 0"),
    ({"train.checkpoint_every": -2}, "train.checkpoint_every=-2 must be at least -1"),
    ({"eval.samples": -1}, "eval.samples=-1 must be at least 0"),
    ({"task.reward.unit": "words"}, "task.reward.unit=words is not one of characters, tokens"),
    (
        {"eval.every": 5, "eval.problems": 0},
        "eval.every=5 has no problems to evaluate on: set eval.problems to at least 1, or "
        "eval.suites",
    ),
    ({"eval.every": -1}, "eval.every=-1 must be at least 0"),
    (
        {"rollout.placement": "apart", "rollout.placement.devices": -1},
        "rollout.placement.devices=-1 must be at least 1",
    ),
    (
        {"rollout.max_episode_tokens": 100},
        "rollout.max_episode_tokens=100 is shorter than a prompt and a response, 1280",
    ),
]


@pytest.mark.parametrize(
    ("changes", "message"), IMPOSSIBLE, ids=[" ".join(changes) for changes, _ in IMPOSSIBLE]
)
def test_impossible_settings_are_refused(changes, message) -> None:
    with pytest.raises(UserError) as caught:  # a single value is refused where it is assigned
        config.validate(changed_config(changes))

    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"train.pack": "longest"},
        {"train.pack": "2048"},
        {"train.pack": "1024,320"},
        {"eval.problems": 0},
        {"mesh.data": -1, "mesh.fsdp": 1},
        {"rollout.group_size": 1, "algorithm.advantage": "gae"},
        {"rollout.max_episode_tokens": 1280},
    ],
    ids=" ".join,
)
def test_possible_settings_pass(changes) -> None:
    config.validate(changed_config(changes))


def test_all_combinations_that_cannot_work_are_named_at_once() -> None:
    settings = changed_config({"rollout.group_size": 1, "train.pack": "half"})
    with pytest.raises(UserError, match=r"rollout.group_size=1.*; .*train.pack=half"):
        config.validate(settings)


def test_all_wrong_values_of_a_section_are_named_at_once() -> None:
    with pytest.raises(UserError) as caught:
        config.TrainConfig(minibatches=0, seed=-1)
    assert str(caught.value) == (
        "train.minibatches=0 must be at least 1; train.seed=-1 must be at least 0"
    )


@pytest.mark.parametrize("precision", ["int8", "fp8"])
@pytest.mark.parametrize("name", ["rollout.weights", "rollout.kv_dtype"])
def test_only_training_must_correct_for_a_sampler_in_8_bits(name: str, precision: str) -> None:
    settings = changed_config({name: precision})
    config.validate(settings)
    message = f"{name}={precision} samples from another distribution than the trainer's: set "
    with pytest.raises(UserError, match=f"{message}algorithm.correction=token_truncate"):
        config.validate(settings, is_training=True)

    for name_of_remedy, value in (("correction", "token_truncate"), ("old_policy", "sampler")):
        corrected = {name: precision, f"algorithm.{name_of_remedy}": value}
        config.validate(changed_config(corrected), is_training=True)
