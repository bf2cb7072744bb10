"""What a run refuses before it starts, and the State that it starts from."""

import datetime
import json
import os
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
import reference

from jzero import algorithms, setup
from jzero.config import AdapterConfig, Config, Critic, ModelConfig, RewardConfig, turns
from jzero.errors import UserError
from jzero.model import chat_template, huggingface, qwen
from jzero.model.base_model import read_base_model
from jzero.setup import Run
from jzero.types import State

pytestmark = pytest.mark.usefixtures("quick_compilation")

Changes = dict[str, dict[str, object]]

# -- mistakes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"mesh": {"tensor": 8, "data": 1, "fsdp": -1}},
            "mesh.tensor=8 does not divide the model's 2 key-value heads",
        ),
        (
            {"mesh": {"data": 3, "fsdp": 1}},
            "mesh data=3 fsdp=1 tensor=1 does not fill the 8 devices",
        ),
        ({"train": {"microbatch_tokens": 7}}, "train.microbatch_tokens=7 holds less than one row"),
        ({"rollout": {"num_pages": 1, "page_size": 4}}, "rollout.num_pages=1 is too small"),
        ({"model": {"path": "/no/such/directory"}}, "no such directory"),
        (
            {"model": {"adapter": AdapterConfig(rank=2, targets=("query",))}},
            "model.adapter.targets=query: qwen2 has no linear layer query; it has q, k, v, o, gate",
        ),
        (
            {"model": {"adapter": AdapterConfig(rank=65)}},
            "model.adapter.rank=65 is above 64, the rank of the weight k itself",
        ),
        (
            {"model": {"tokenizer": "/no/such/directory"}},
            "no tokenizer in model.tokenizer=/no/such/directory",
        ),
    ],
)
def test_a_run_that_cannot_be_built_is_refused(changes: Changes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        setup.build(setup.resolve(reference.settings(**changes)), None)


def test_functions_that_a_turns_reward_leaves_out_are_named() -> None:
    settings = reference.settings(
        rollout={"max_turns": 3}, task={"reward": RewardConfig(functions=("accuracy", "format"))}
    )
    [note] = setup.notes_on_unpaid_rewards(settings)
    assert note.startswith("task.turn_reward=success pays the verdict of each turn, and no")
    assert "function: format of task.reward.functions is only measured" in note

    settings.task.turn_reward = turns.Score()
    assert setup.notes_on_unpaid_rewards(settings) == []


# -- settings that are computed --------------------------------------------------------------------


@pytest.fixture
def ten_questions(tmp_path: Path) -> str:
    """Returns a set of ten questions."""
    rows = [json.dumps({"problem": f"{i}?", "answer": str(i)}) for i in range(10)]
    (tmp_path / "ten.jsonl").write_text("\n".join(rows))
    return str(tmp_path / "ten.jsonl")


@pytest.mark.parametrize(
    ("train", "steps"),
    [
        ({"steps": 7}, 7),
        ({"steps": 0, "prompt_epochs": 3.0}, 8),  # 30 problems, 4 in a step
        ({"steps": 5, "prompt_epochs": 3.0}, 5),  # train.steps is the most there may be
        ({"steps": 200, "prompt_epochs": 3.0}, 8),
        ({"steps": 0, "prompt_epochs": 0.1}, 1),
    ],
)
def test_the_steps_follow_from_the_passes_over_the_problems(
    train: dict[str, object], steps: int, ten_questions: str
) -> None:
    task = {"name": "math", "template": "no", "data": ten_questions}
    settings = reference.settings(task=task, train=train, rollout={"num_prompts": 4})

    assert setup.with_steps(settings).train.steps == steps


def test_passes_that_drop_their_last_problems_have_whole_steps_only(ten_questions: str) -> None:
    task = {"name": "math", "template": "no", "data": ten_questions, "drop_last": True}
    train = {"steps": 0, "prompt_epochs": 3.0}
    settings = reference.settings(task=task, train=train, rollout={"num_prompts": 4})

    assert setup.with_steps(settings).train.steps == 6  # 2 in each pass of 10


def test_passes_over_problems_without_end_are_refused() -> None:
    settings = reference.settings(train={"prompt_epochs": 3.0})
    with pytest.raises(UserError, match="train.prompt_epochs=3: .*task.name=countdown have no end"):
        setup.with_steps(settings)


@pytest.mark.parametrize(("name", "value"), [("prompt_epochs", 3.0), ("steps", 60)])
def test_lengths_of_rl_are_refused_where_examples_are_learned(name: str, value: float) -> None:
    with pytest.raises(UserError, match=f"train.{name}={value} is the length of RL.*sft.epochs"):
        reference.settings(train={name: value}, sft={"data": "countdown"})


@pytest.mark.parametrize(
    ("template", "stop", "expected"),
    [
        ("r1", (), ("</answer>",)),
        ("r1", ("END",), ("END",)),
        ("qwen_math", (), ()),
    ],
)
def test_training_stops_where_the_template_says(
    template: str, stop: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    task = {"name": "math", "template": template}
    settings = reference.settings(task=task, rollout={"stop": stop})

    assert setup.with_stop_strings(settings).rollout.stop == expected
    assert settings.rollout.stop == stop


# -- workdirs and models ---------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Returns a folder that holds a file, and a folder in which nothing can be written."""
    (tmp_path / "file").write_text("mine")
    (tmp_path / "sealed").mkdir(mode=0o500)
    return tmp_path


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("changes", "workdir", "message"),
    [
        ({"task": {"name": "countup"}}, "new", "task.name='countup' is not one of countdown"),
        ({"task": {"template": "r2"}}, "new", "task.template='r2' is not one of r1, "),
        ({}, "file", "file is not a directory"),
        ({}, "file/new", "file is not a directory"),
        pytest.param(
            {},
            "sealed/new",
            "sealed is not a directory that can be written to",
            marks=pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere"),
        ),
    ],
)
def test_the_check_refuses_a_mistake_and_writes_nothing(
    folder: Path, changes: Changes, workdir: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        setup.check(reference.settings(**changes), folder / workdir)

    assert names_in(folder) == ["file", "sealed"]


def test_the_check_accepts_a_new_workdir_and_writes_nothing(folder: Path) -> None:
    settings = reference.settings(train={"microbatch_tokens": 240})  # a row for each device
    setup.check(settings, folder / "a/b/c")

    assert names_in(folder) == ["file", "sealed"]


# -- the critic at the start -----------------------------------------------------------------------


def ppo_settings(critic_path: Path | None = None) -> Config:
    config = reference.settings(
        algorithm=vars(algorithms.PRESETS["ppo"]()), train={"microbatch_tokens": 240}
    )
    if critic_path is not None:
        config.critic = Critic(path=str(critic_path))
    return config


def initial_state(run: Run) -> State:
    """Returns the State of a run whose policy has random parameters."""
    policy = run.trainer.policy
    params = reference.placed(policy, reference.random_params(policy.model))
    return setup.initial_state(run, params)


def save_model(directory: Path, model: qwen.QwenConfig, params: qwen.Params) -> None:
    huggingface.save(directory, model, params, dtype="float32", hf_config_extra={})


def test_a_critic_starts_from_the_policy() -> None:
    state = initial_state(setup.build(setup.resolve(ppo_settings()), None))

    assert state.critic is not None
    critic_params = state.critic.params
    for name in ("embed", "layers", "norm"):
        jax.tree.map(np.testing.assert_array_equal, critic_params[name], state.params[name])
    assert "lm_head" not in critic_params
    # The head of values is new: its standard deviation is near 1 / (E + 1).
    head = np.asarray(critic_params["value"])
    assert 0.5 < head.std() * (len(head) + 1) < 2


def test_a_critic_has_arrays_of_its_own() -> None:
    state = initial_state(setup.build(setup.resolve(ppo_settings()), None))
    assert state.critic is not None

    # An update of the policy donates, and so deletes, the policy's parameters.
    jax.tree.map(lambda x: x.delete(), state.params)

    assert np.isfinite(np.asarray(state.critic.params["embed"])).all()


def test_a_critic_with_a_window_shorter_than_the_sequences_is_refused(tmp_path: Path) -> None:
    policy_model = setup.build(setup.resolve(ppo_settings()), None).trainer.policy.model
    model = replace(policy_model, model_type="mistral")
    save_model(tmp_path, model, reference.random_params(model))
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"sliding_window": 4}))

    with pytest.raises(UserError, match="critic.path=.* has sliding_window=4"):
        setup.read_others(ppo_settings(tmp_path), policy_model)


def test_a_critic_starts_from_another_model(tmp_path: Path) -> None:
    policy_model = setup.build(setup.resolve(ppo_settings()), None).trainer.policy.model
    other_model = replace(policy_model, hidden_size=48, tie_word_embeddings=False)
    other_params = reference.random_params(other_model)
    save_model(tmp_path, other_model, other_params)
    run = setup.build(setup.resolve(ppo_settings(tmp_path)), None)

    state = initial_state(run)

    assert state.critic is not None
    critic_params = state.critic.params
    jax.tree.map(np.testing.assert_array_equal, critic_params["layers"], other_params["layers"])
    abstract_critic = setup.abstract_state(run).critic
    assert abstract_critic is not None
    shapes = jax.tree.map(np.shape, critic_params)
    assert shapes == jax.tree.map(np.shape, abstract_critic.params)


def test_a_critic_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    small = tmp_path / "small"
    save_model(small, reference.MODEL, reference.random_params())

    message = "small has a vocabulary of 61, the policy one of 112: give a model with"
    with pytest.raises(ValueError, match=message):
        setup.build(setup.resolve(ppo_settings(small)), None)


def test_prompts_keep_the_date_of_the_first_start(tmp_path: Path) -> None:
    model = ModelConfig(arch="tiny-qwen2")
    base = read_base_model(model)
    plain = setup.with_prompt_date(Config(model=model), base)
    assert plain.model.prompt_date == ""  # the chat template writes no date

    base.tokenizer.chat_template = "{{ strftime_now('%Y-%m-%d') }} {{ messages[0].content }}"
    first = setup.with_prompt_date(Config(model=model), base)
    assert first.model.prompt_date == str(datetime.date.today())

    # Resumed on another day, in a new process.
    (tmp_path / "config.json").write_text('{"model": {"prompt_date": "2024-02-29"}}')
    resumed = setup.with_recorded_date(Config(model=model), tmp_path)
    again = read_base_model(resumed.model)
    again.tokenizer.chat_template = base.tokenizer.chat_template
    assert setup.with_prompt_date(resumed, again) == resumed
    messages = [{"role": "user", "content": "q"}]
    assert chat_template.render(again.tokenizer, messages) == "2024-02-29 q"
