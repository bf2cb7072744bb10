"""Data sources of settings: read from their text when they are assigned, and written as it."""

import json
from dataclasses import replace

import pytest

from jzero import cli, config
from jzero.config import Config, Rows, Sft, Sources, TaskConfig
from jzero.errors import UserError

SETTINGS = ("task.data", "task.eval_data", "sft.data", "sft.eval_data")
# A text, and the sets that it names.
TEXTS = {
    "": (),
    "gsm8k": (Rows("gsm8k"),),
    "a.jsonl, b/c.parquet": (Rows("a.jsonl"), Rows("b/c.parquet")),
    "main@openai/gsm8k#v1": (Rows("main@openai/gsm8k#v1"),),
    "rows(split='hard',limit=3)": (Rows(split="hard", limit=3),),
    "rows('a,b.jsonl',weight=1),rows(c,weight=2.5)": (
        Rows("a,b.jsonl", weight=1.0),
        Rows("c", weight=2.5),
    ),
    "a.jsonl:problem=ask:answer=say": (Rows("a.jsonl", problem="ask", answer="say"),),
}
MISTAKES = {
    "rows(a": ": close the bracket",
    "a,rows(b": ": rows(b: close the bracket",
    ",": " names no set: give a file",
    "rows(a,limt=3)": ": there is no limt; did you mean limit",
    "rows(a,limit=-1)": ": limit=-1 must be at least 0",
    "rows(a,limit=x)": ": limit=x must be a whole number",
    "rows(a,weight=1),b": ": some of the sets have a weight",
    "rows(a,level_min=3,level_max=2)": ": level_min=3 is above level_max=2",
    "a:problem=x:problem=y": " names the column problem twice",
    ":answer=y": " names columns and no set",
}


def assign(name: str, value: object) -> object:
    """Assigns a setting as a recipe does, and returns its value."""
    section, _, field = name.partition(".")
    made = TaskConfig() if section == "task" else Sft()
    if section == "task":
        setattr(made, field, value)
    else:
        made = replace(made, **{field: value})
    return getattr(made, field)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_text_is_read_when_it_is_assigned(name: str, text: str) -> None:
    sources = assign(name, text)
    assert isinstance(sources, Sources)
    assert sources == TEXTS[text]
    assert assign(name, str(sources)) == sources
    assert assign(name, sources) == sources
    assert repr(sources) == repr(str(sources))


@pytest.mark.parametrize("text", MISTAKES)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_mistake_is_refused_when_it_is_assigned(name: str, text: str) -> None:
    for put in (
        lambda: assign(name, text),
        lambda: cli.with_flags(Config(), cli.split_flags([f"--config.{name}={text}"])[0]),
        lambda: config.put_value(Config(), name, text),
    ):
        with pytest.raises(UserError) as raised:
            put()
        assert str(raised.value).startswith(f"{name}={text}{MISTAKES[text]}")


@pytest.mark.parametrize("value", [5, None, ["a.jsonl"], (Rows("a.jsonl"),), Rows("a.jsonl")])
def test_a_value_that_is_not_a_text_is_refused(value: object) -> None:
    with pytest.raises(UserError, match=r"task\.data=.* must be text"):
        assign("task.data", value)


@pytest.mark.parametrize("text", TEXTS)
def test_config_json_has_the_text(text: str) -> None:
    settings = Config(sft=Sft(data=text or "x"))
    settings.task.data = text
    written = config.to_json(settings)
    assert json.loads(written)["task"]["data"] == str(settings.task.data)
    assert config.from_json(written, "config.json") == settings
    # As an earlier version has written it.
    values = json.loads(written)
    values["task"]["data"] = text
    assert config.from_json(json.dumps(values), "config.json") == settings


def test_config_json_with_a_wrong_source_names_the_setting() -> None:
    values = json.loads(config.to_json(Config()))
    values["task"]["data"] = "rows(a"
    with pytest.raises(UserError, match=r"config.json: task\.data=rows\(a: close the bracket"):
        config.from_json(json.dumps(values), "config.json")


def test_an_argument_of_rows_that_contradicts_another_is_refused() -> None:
    flags = ["--config.task.data=rows(a,level_max=2)", "--config.task.data.level_min=3"]
    with pytest.raises(UserError, match=r"task\.data=.*: level_min=3 is above level_max=2"):
        cli.with_flags(Config(), cli.split_flags(flags)[0])
