"""Flags of settings: their forms, and lists, every one of which can be emptied and filled."""

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import jzero
from jzero import cli, config, main
from jzero.config.flags import put_value, split_flags, value_of
from jzero.config.schema import Setting
from jzero.errors import UserError
from jzero.fields import item_kind_of, kind_of

LISTS = [item for item in config.list_settings(config.Config()) if item_kind_of(item.field)]
ITEMS: dict[type | None, tuple[object, ...]] = {
    str: ("one=1", "two=2"),
    int: (64, 32),
    float: (1.0, 0.5),
}
ROOT = Path(__file__).resolve().parents[2]


def parsed(*arguments: str) -> config.Config:
    return cli.parse_settings(config.Config(), arguments)


# -- Forms of flags --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "flags", "others"),
    [
        (["--config.rollout.top_k=3"], ["rollout.top_k=3"], []),
        (["--config.rollout.top_k", "3"], ["rollout.top_k=3"], []),
        (["-config.rollout.top_k=3"], ["rollout.top_k=3"], []),
        (["--config.model.path=a=b"], ["model.path=a=b"], []),
        (["--config.rollout.keep_stop"], ["rollout.keep_stop=True"], []),
        (["--config.rollout.keep_stop", "x"], ["rollout.keep_stop=True"], ["x"]),
        (["--noconfig.rollout.keep_stop"], ["rollout.keep_stop=False"], []),
        (["--config.rollout.stop=\n"], ["rollout.stop=\n"], []),
        (["--config.warm_start", "none"], ["warm_start=none"], []),
        (["--config=a.py", "--workdir", "x"], [], ["--config=a.py", "--workdir", "x"]),
    ],
    ids=str,
)
def test_flags_of_settings_are_separated_from_other_arguments(
    arguments: list[str], flags: list[str], others: list[str]
) -> None:
    found, remaining = split_flags(arguments)
    assert [f"{flag.name}={flag.text}" for flag in found] == flags
    assert remaining == others


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config.rollout.top_k"], "--config.rollout.top_k: give a value, as in --config.roll"),
        (["--config.rollout=3"], "rollout is a section: write --config.rollout.NAME=VALUE"),
        (["--config.=3"], "there is no setting ''"),
        (
            ["--config.rollout.top_k.x=3"],
            "there is no setting rollout.top_k.x; --help rollout.top_k lists all",
        ),
    ],
)
def test_a_flag_that_names_no_setting_is_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError) as raised:
        split_flags(arguments)
    assert message in str(raised.value)


def test_the_last_flag_of_a_setting_counts() -> None:
    assert parsed("--config.rollout.top_k=3", "--config.rollout.top_k=4").rollout.top_k == 4


def test_parts_are_chosen_before_their_arguments_change() -> None:
    flags = ["--config.algorithm.surrogate.high=3", "--config.algorithm.surrogate=cispo"]
    for order in (flags, flags[::-1]):
        assert value_of(parsed(*order), "algorithm.surrogate.high") == 3.0


@pytest.mark.parametrize("text", ["none", "none "])
def test_none_empties_an_optional_part(text: str) -> None:
    settings = config.Config()
    put_value(settings, "warm_start", "warm_start(steps=3)")
    changed = cli.parse_settings(settings, [f"--config.warm_start={text}"])
    assert changed.warm_start is None
    assert settings.warm_start is not None  # the recipe's settings are copied


def test_another_task_has_no_options_of_the_recipe() -> None:
    settings = config.Config()
    settings.task.options = ("value_max=9",)
    flag = "--config.task.name"
    assert cli.parse_settings(settings, [f"{flag}=countdown"]).task.options == ("value_max=9",)
    assert cli.parse_settings(settings, [f"{flag}=gsm8k"]).task.options == ()
    changed = cli.parse_settings(settings, [f"{flag}=gsm8k", "--config.task.options=a=1"])
    assert changed.task.options == ("a=1",)


def test_an_argument_of_rows_changes_every_set() -> None:
    settings = parsed("--config.task.data=a.jsonl,b.jsonl", "--config.task.data.limit=3")
    assert str(settings.task.data) == "rows('a.jsonl',limit=3),rows('b.jsonl',limit=3)"
    with_default = parsed("--config.task.eval_data.split=validation")
    assert str(with_default.task.eval_data) == "rows(split='validation')"


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("task.data.limit=x", "task.data.limit=x must be a whole number"),
        ("task.data.limit=-1", "limit=-1 must be at least 0"),
        (
            "task.data.columns=x",
            "there is no setting task.data.columns; --help task.data lists all",
        ),
    ],
)
def test_a_wrong_argument_of_rows_is_refused(
    flag: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parsed(f"--config.{flag}")
    assert message in capsys.readouterr().err


def test_a_mistake_is_reported_without_jax_and_numpy() -> None:
    """With a recipe: such a mistake costs a fraction of a second."""
    script = (
        "import sys; from jzero import main\n"
        "try: main.run_arguments(sys.argv[1:])\n"
        "finally: print(sorted({'jax', 'numpy'} & sys.modules.keys()))"
    )
    recipe = f"--config={ROOT}/configs/countdown.py:tiny"
    for flag in ("--config.rollout.group_sise=8", "--config.rollout.group_size=0", "--lr=1"):
        command = [sys.executable, "-c", script, recipe, flag]
        done = subprocess.run(command, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (2, "[]\n"), done.stderr
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


# -- Lists -----------------------------------------------------------------------------------------


def with_items(item: Setting) -> config.Config:
    """Returns settings in which a list has two items."""
    settings = config.Config()
    put_value(settings, item.name, ITEMS[item_kind_of(item.field)])
    return settings


@pytest.mark.parametrize("item", LISTS, ids=lambda item: item.name)
def test_every_list_can_be_emptied_and_filled_by_flags(item: Setting) -> None:
    items = ITEMS[item_kind_of(item.field)]
    empty = [
        [f"--config.{item.name}="],
        [f"--config.{item.name}", ""],
        [f"--config.{item.name}=()"],
    ]
    for arguments in empty:
        assert value_of(cli.parse_settings(with_items(item), arguments), item.name) == ()
    once_for_each = [f"--config.{item.name}={value}" for value in items]
    assert value_of(parsed(*once_for_each), item.name) == items
    literal = ",".join(map(str, items))
    for text in (literal, f"({literal})"):
        assert item_kind_of(item.field) is str or (
            value_of(parsed(f"--config.{item.name}={text}"), item.name) == items
        )
    # An empty flag removes the items of earlier flags, such as one that a script adds to a command.
    arguments = [*once_for_each, f"--config.{item.name}="]
    assert value_of(cli.parse_settings(with_items(item), arguments), item.name) == ()
    # A flag replaces the items of the recipe, and an empty one before it changes nothing.
    arguments = [f"--config.{item.name}=", f"--config.{item.name}={items[1]}"]
    assert value_of(cli.parse_settings(with_items(item), arguments), item.name) == items[1:]


TEXTS = [
    "tasks=math,code",
    "code.feedback.wrong=No, that is wrong.",
    "a b",
    "a, 'b",
    "</answer>",
    "\n\nQuestion",
    "1 +",
    "f(x)",
    "it's",
    "\\boxed{}",
    "5",
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_that_is_not_a_literal_is_one_item(text: str) -> None:
    for name, item in (("task.options", f"name={text}"), ("rollout.stop", text)):
        flag = f"--config.{name}={item}"
        assert value_of(parsed(flag), name) == (item,)
        assert value_of(parsed(flag, flag), name) == (item, item)


@pytest.mark.parametrize("text", ["('a', 'b')", "'a','b'", '["a", "b"]', "'a b',", '"a, b"'])
def test_literals_are_read_as_lists(text: str) -> None:
    value = ast.literal_eval(text)
    expected = (value,) if isinstance(value, str) else tuple(value)
    assert parsed(f"--config.rollout.stop={text}").rollout.stop == expected


def test_the_weights_of_a_recipe_can_be_emptied() -> None:
    """configs/open_r1.py has three weights for three functions."""
    recipe = f"--config={ROOT}/configs/open_r1.py:qwen2.5-1.5b-instruct"
    command = main.parse(
        [recipe, "--config.task.reward.weights=", "--config.task.reward.functions=accuracy"]
    )
    assert command.settings.task.reward.weights == ()
    assert command.settings.task.reward.functions == ("accuracy",)
    config.validate(command.settings)


# -- Values in Python ------------------------------------------------------------------------------


def number_settings() -> list[str]:
    """Returns the settings and arguments of parts that are numbers, booleans or lists."""
    kinds = (bool, int, float, tuple)
    return [
        name
        for name, fields in config.known_names().items()
        if all(kind_of(field) in kinds for field in fields)
    ]


@pytest.mark.parametrize("text", ["2", "-0.5", "1e-3", "True", "[1]"])
def test_a_text_is_no_number_in_python(text: str) -> None:
    # A recipe and `jzero.train(settings=...)` give values; only flags are texts.
    for name in number_settings():
        settings = config.Config()
        with pytest.raises(UserError) as raised:
            put_value(settings, name, text)
        assert settings == config.Config()
        if " has no " not in str(raised.value):  # an argument of a part that is not chosen
            assert str(raised.value).startswith(f"{name}={text!r} must be ")
            assert str(raised.value).endswith(", not text")
            with pytest.raises(UserError, match="=fast must be "):
                put_value(settings, name, "fast")


def test_an_assignment_of_a_text_names_the_setting() -> None:
    settings = config.Config()
    with pytest.raises(UserError, match=r"^train\.steps='2' must be a whole number, not text$"):
        settings.train.steps = "2"  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(UserError, match=r"^optimizer\.lr='1e-3' must be a number, not text$"):
        config.OptimizerConfig(lr="1e-3")  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match=r"has the item '1', which must be a number, not text"):
        config.RewardConfig(weights=("1",))  # pyright: ignore[reportArgumentType]


def test_a_part_may_be_given_by_its_notation() -> None:
    settings = config.Config()
    put_value(settings, "algorithm.surrogate", "clip(high=0.3)")
    assert value_of(settings, "algorithm.surrogate.high") == 0.3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"minutes": "2"}, "minutes='2' must be a number, not text"),
        ({"lora": "True"}, "lora='True' must be True or False, not text"),
        ({"lora": 1}, "lora=1 must be True or False"),
        ({"reward_weights": ("1",)}, "reward_weights has the item '1', which must be a number"),
        ({"algorithm": None}, "algorithm=None must be text"),
        ({"minutes": -1}, "minutes=-1 must be at least 0"),
    ],
)
def test_an_argument_of_jzero_train_has_its_type(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        jzero.train(model="M", data="D", workdir="W", **arguments)
