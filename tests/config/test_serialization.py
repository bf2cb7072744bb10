"""A config is read from config.json as it was written; a file with a mistake is refused."""

import json

import pytest
from settings_by_name import changed_config

from jzero import config
from jzero.errors import UserError
from jzero.fields import is_part


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "rollout.stop": ("</answer>",),
            "eval.suites": ("aime24", "math500"),
            "task.reward.weights": (1.0, 2.0),
            "optimizer.lr": 1.0,
        },
        {"critic.lr": 1e-4, "critic": "critic(warmup_steps=3)", "warm_start.steps": 3},
        {"algorithm.kl.weight": "constant(length=3)", "algorithm.surrogate": "cispo"},
        {"teacher": "server(url='http://h/v1')", "sft": "sft(data='rows.jsonl')"},
        {"rollout.draft": "ngram", "rollout.placement": "apart(devices=2)"},
        {"task.system_prompt": "Zeile 1\nZeile 2 \u2028 é"},
    ],
    ids=" ".join,
)
def test_a_config_is_read_as_it_was_written(changes: dict[str, object]) -> None:
    settings = changed_config(changes)
    assert config.from_json(config.to_json(settings), "config.json") == settings


def test_a_setting_that_is_not_in_the_file_has_its_default() -> None:
    settings = config.from_json('{"train": {"steps": 3}}', "config.json")
    assert settings == changed_config({"train.steps": 3})


def test_a_number_without_a_fraction_is_read_as_a_float() -> None:
    read = config.from_json('{"optimizer": {"lr": 1}}', "config.json")
    assert type(read.optimizer.lr) is float


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON: Expecting"),
        ("[" * 10**5, "nested more than"),
        ("[]", "a config is .* and not an object"),
        ('{"train": {"steps": "x"}}', "train.steps=x must be a whole number"),
        ('{"train": {"steps": -1}}', "train.steps=-1 must be at least 0"),
        ('{"train": {"steps": true}}', "train.steps=True must be a whole number"),
        ('{"train": 3}', "train=3 must be a TrainConfig"),
        ('{"optimizer": {"lr": NaN}}', "optimizer.lr=nan must be a finite number"),
        ('{"model": {"dtype": "f16"}}', "model.dtype=f16 is not one of bfloat16, float32"),
        (
            '{"algorithm": {"surrogate": {"kind": "clip", "low": -1}}}',
            "algorithm.surrogate=.*low=-1 must be at least 0",
        ),
        ('{"algorithm": {"surrogate": {"name": "clip"}}}', "algorithm.surrogate=.* one of clip"),
        ('{"train": {"stepz": 3}}', "train.stepz=3: there is no stepz; did you mean steps"),
        ('{"trian": {"steps": 3}}', "there is no trian; did you mean train"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(text: str, message: str) -> None:
    with pytest.raises(
        UserError, match=f"^runs/a/config.json: .*{message}.*Correct the file"
    ) as raised:
        config.from_json(text, "runs/a/config.json")
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 400


def test_flatten_keeps_values_and_order() -> None:
    tree = {"b": {"y": (1, 2), "x": None}, "a": 3}
    assert list(config.flatten(tree).items()) == [("b.y", (1, 2)), ("b.x", None), ("a", 3)]


def test_to_json_has_every_setting() -> None:
    settings = config.Config()
    names = set()
    for setting in config.list_settings(settings):
        names.add(f"{setting.name}.kind" if is_part(setting.value) else setting.name)
    assert set(config.flatten(json.loads(config.to_json(settings)))) == names


def test_a_section_is_read_from_its_fields_in_json() -> None:
    task = config.TaskConfig(options=("a=1", "b=2"))
    task.reward.functions = ("accuracy", "format")
    task.reward.judge = config.JudgeServer(url="http://localhost:1/v1")
    written = json.loads(config.to_json(config.Config(task=task)))["task"]
    assert config.read_section(config.TaskConfig, written) == task


@pytest.mark.parametrize("name", ["a/b\n", "\x1b[31m", "x" * 10_000, "\ud800"])
def test_a_foreign_name_is_one_short_line(name: str) -> None:
    for values in (
        {name: 1},
        {"train": {name: 1}},
        {"rollout": {"placement": {"kind": "together", name: 1}}},
    ):
        with pytest.raises(UserError) as raised:
            config.from_json(json.dumps(values), "config.json")
        assert str(raised.value).isprintable()
        assert len(str(raised.value)) < 1500
