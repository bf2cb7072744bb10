"""Parts: choices with numbers of their own, in flags, in JSON, in recipes and in the help."""

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from dataclasses import field as default
from typing import Literal

import pytest

from jzero import cli, config
from jzero.config import describe, flags, schema
from jzero.errors import UserError
from jzero.fields import (
    Field,
    fields_of,
    part,
    part_from_json,
    part_name,
    parts_of,
    section,
    show_part,
)
from jzero.notation import change_argument, read_part


@part
class Mean:
    """The mean."""


@part
class FixedLength:
    """A fixed divisor."""

    length: int = 0
    """Length."""


@part
class Clip:
    """A clipped ratio."""

    low: float = 0.2
    """Lower bound."""
    high: float = Field(default=0.2, gt=0, le=9)
    """Upper bound."""
    weight: Mean | FixedLength = Mean()
    """Weight."""


@part
class SoftGate:
    """A soft gate."""

    shape: Literal["round", "flat"] = "round"
    """Shape."""
    is_strict: bool = False
    """Strictness."""
    names: tuple[str, ...] = ()
    """Names."""
    low: float = 0.5
    """Lower bound."""


@section
class Section:
    """A section with parts."""

    size: int = 3
    """Size."""
    objective: Clip | SoftGate | None = Clip()
    """Objective."""


@section
class Whole:
    """A config with a section."""

    inner: Section = default(default_factory=Section)


PARTS = parts_of(fields_of(Section)["objective"])


def parsed(text: str, current: object = None) -> object:
    return read_part("objective", PARTS, text, current)


def changed(part: object, path: str, value: object) -> object:
    return change_argument("objective", PARTS, part, path, value, is_text=isinstance(value, str))


def one_line(raised: pytest.ExceptionInfo[UserError]) -> str:
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_the_name_of_a_part_is_its_class_in_lowercase() -> None:
    assert [part_name(part) for part in PARTS] == ["clip", "soft_gate", "none"]
    assert Clip().kind == "clip"  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("clip", Clip()),
        ("soft_gate", SoftGate()),
        ("none", None),
        ("clip()", Clip()),
        ("clip(low=0.1, high=1)", Clip(0.1, 1.0)),
        ("soft_gate(shape='flat',is_strict=True,names=['a'])", SoftGate("flat", True, ("a",))),
        ("soft_gate(shape=flat,is_strict=true)", SoftGate("flat", True)),
        ("clip(weight='fixed_length(length=7)')", Clip(weight=FixedLength(7))),
        ("clip(weight=fixed_length)", Clip(weight=FixedLength())),
    ],
)
def test_a_text_chooses_a_part(text: str, part: object) -> None:
    assert parsed(text) == part
    assert parsed(show_part(part)) == part


def test_the_name_of_the_current_part_keeps_its_numbers() -> None:
    assert parsed("clip", Clip(0.3)) == Clip(0.3)
    assert parsed("clip()", Clip(0.3)) == Clip()
    assert parsed("soft_gate", Clip(0.3)) == SoftGate()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("clap", "objective=clap is not one of clip, soft_gate, none; did you mean clip"),
        ("clip(1)", "write each argument as NAME=VALUE"),
        ("clip(low=0.1", "close the bracket"),
        ("clip(low=open)", "low=open must be a number"),
        ("clip(lo=1)", "objective=clip(lo=1): there is no lo; did you mean low?"),
        ("clip(low='a')", "low=a must be a number"),
        ("clip(low=-1)", "clip.low=-1 must be at least 0"),
        ("clip(low=nan)", "must be a finite number"),
        ("clip(high=10)", "clip.high=10 must be at most 9"),
        ("soft_gate(shape=square)", "soft_gate.shape=square is not one of round, flat"),
        ("soft_gate(names=3)", "soft_gate.names=3 must be a list"),
        ("none(low=1)", "write objective=none without brackets"),
        ("clip(weight='sum')", "weight=sum is not one of mean, fixed_length"),
        ("clip(weight=3)", "clip.weight=3 is not one of the parts of this setting: write Mean"),
        ("clip(weight=fixed_length(length=7))", "texts with commas or brackets in quotes"),
        ("", "objective='' is not one of clip, soft_gate, none"),
    ],
)
def test_a_text_that_does_not_choose_a_part_is_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)) as raised:
        parsed(text)
    assert one_line(raised).startswith("objective=")


@pytest.mark.parametrize(
    ("part", "path", "value", "result"),
    [
        (Clip(), "high", "0.28", Clip(high=0.28)),
        (Clip(), "high", 1, Clip(high=1.0)),
        (Clip(), "weight", "fixed_length", Clip(weight=FixedLength())),
        (Clip(), "weight", FixedLength(2), Clip(weight=FixedLength(2))),
        (Clip(weight=FixedLength()), "weight.length", "9", Clip(weight=FixedLength(9))),
        (SoftGate(), "is_strict", "true", SoftGate(is_strict=True)),
        (SoftGate(), "names", "a,b", SoftGate(names=("a", "b"))),
        (SoftGate(), "names", "('a', 'b c')", SoftGate(names=("a", "b c"))),
        (SoftGate(names=("a",)), "names", "", SoftGate()),
        (SoftGate(), "shape", "flat", SoftGate("flat")),
        (None, "high", "3", Clip(high=3.0)),  # the only part that has it
    ],
)
def test_one_argument_is_changed(part: object, path: str, value: object, result: object) -> None:
    assert changed(part, path, value) == result


@pytest.mark.parametrize(
    ("part", "path", "value", "message"),
    [
        (SoftGate(), "high", "1", "objective=soft_gate has no high: clip has it"),
        (None, "low", "1", "objective=none has no low: clip, soft_gate have it"),
        (Clip(), "size", "1", "objective=clip has no size: no part has it"),
        (Clip(), "weight.length", "1", "objective.weight=mean has no length: fixed_length has it"),
        (Clip(), "high", "x", "objective.high=x must be a number"),
        (Clip(), "high", "0", "objective.high=0.0 must be above 0"),
        (Clip(), "high", True, "objective.high=True must be a number"),
        (Clip(), "weight", "sum", "objective.weight=sum is not one of mean, fixed_length"),
        (
            Clip(weight=FixedLength()),
            "weight.length",
            "-1",
            "objective.weight.length=-1 must be at least 0",
        ),
        (SoftGate(), "is_strict", "perhaps", "objective.is_strict=perhaps must be True or False"),
        (SoftGate(), "shape", "square", "objective.shape=square is not one of round, flat"),
    ],
)
def test_an_argument_that_cannot_be_changed_is_refused(
    part: object, path: str, value: object, message: str
) -> None:
    with pytest.raises(UserError, match=message) as raised:
        changed(part, path, value)
    one_line(raised)


@pytest.mark.parametrize(
    "part",
    [None, Clip(0.1, weight=FixedLength(3)), SoftGate("flat", True, ("a", "b"))],
)
def test_a_part_is_read_as_it_was_written(part: Clip | SoftGate | None) -> None:
    section = Section(objective=part)
    values = json.loads(json.dumps(asdict(section)))  # pyright: ignore[reportArgumentType]
    assert config.read_section(Section, values) == section


def test_the_json_of_a_part_has_its_name() -> None:
    assert asdict(Section()) == {  # pyright: ignore[reportArgumentType]
        "size": 3,
        "objective": {"low": 0.2, "high": 0.2, "weight": {"kind": "mean"}, "kind": "clip"},
    }


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"low": 0.1}, 'write {"kind": NAME} with one of clip, soft_gate, none'),
        ({"kind": "clap"}, 'write {"kind": NAME} with one of clip, soft_gate, none'),
        ({"kind": "clip", "low": True}, "clip.low=True must be a number"),
        ({"kind": "clip", "low": -1}, "clip.low=-1 must be at least 0"),
        ({"kind": "clip", "lo": 0.1}, "clip.lo=0.1: there is no lo; did you mean low"),
        ({"kind": "clip", "weight": {"kind": "sum"}}, "with one of mean, fixed_length"),
    ],
)
def test_json_that_is_not_a_part_is_refused(value: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        part_from_json(value, PARTS)
    with pytest.raises(UserError, match=re.escape(message)) as raised:
        Section(objective=value)  # pyright: ignore[reportArgumentType]
    assert one_line(raised).startswith("objective=")


def test_arguments_are_listed_after_their_part() -> None:
    listed = list(schema.walk(Whole(), ""))
    assert [(item.name, item.part) for item in listed] == [
        ("inner.size", ""),
        ("inner.objective", ""),
        ("inner.objective.low", "inner.objective"),
        ("inner.objective.high", "inner.objective"),
        ("inner.objective.weight", "inner.objective"),
    ]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (Mean(), r"is not one of the parts of this setting: write Clip\(\) .* or None"),
        (3, r"objective=3 is not one of the parts of this setting: write Clip\(\) .* or None"),
        (Clip, r"is a class, .* write Clip\(\)"),
        ("clip", r"objective=clip is text, .* write Clip\(\)"),
        ("clip(high=3)", r"objective=clip\(high=3\) is text, .* write Clip\(high=3\)"),
        ("none", "objective=none is text, .* write None"),
        ("clop", r"objective=clop is not one of the parts of this setting: write Clip\(\)"),
    ],
)
def test_a_recipe_with_another_value_than_a_part_is_told_what_to_write(
    part: object, message: str
) -> None:
    section = Section()
    with pytest.raises(UserError, match=message) as raised:
        section.objective = part  # pyright: ignore[reportAttributeAccessIssue]
    assert one_line(raised).startswith("objective=")
    assert section == Section()  # the mistake has changed nothing
    with pytest.raises(UserError, match=message):
        Section(objective=part)  # pyright: ignore[reportArgumentType]


def test_a_part_cannot_be_changed_in_place() -> None:
    with pytest.raises(UserError, match=r"clip.low=0.1: .* assign another one, such as Clip\(low="):
        Clip().low = 0.1  # pyright: ignore[reportAttributeAccessIssue]


def test_the_help_on_a_setting_lists_its_parts_and_their_arguments() -> None:
    [item] = [item for item in schema.walk(Section(), "") if item.name == "objective"]
    assert describe.describe_setting(item).splitlines() == [
        "--config.objective=clip(low=0.2,high=0.2,weight='mean')",
        "    Objective. One of: clip, soft_gate, none.",
        "  clip                                  A clipped ratio.",
        "    low=0.2                             Lower bound. (at least 0)",
        "    high=0.2                            Upper bound. (above 0, at most 9)",
        "    weight=mean                         Weight. One of: mean, fixed_length.",
        "  soft_gate                             A soft gate.",
        "    shape=round                         Shape. One of: round, flat.",
        "    is_strict=False                     Strictness.",
        "    names=                              Names.",
        "    low=0.5                             Lower bound. (at least 0)",
        "  none                                  No part.",
        "",
        "--config.objective.NAME=VALUE changes an argument of the chosen part.",
    ]


def test_arguments_of_all_parts_are_counted() -> None:
    assert len(list(describe.arguments_of(PARTS))) == 8  # the length of the weight included


# -- Parts of all settings -------------------------------------------------------------------------

SETTINGS_WITH_PARTS = {
    item.name: item.parts
    for item in config.list_settings(config.Config())
    if item.parts and not item.part
}
CHOICES = [(name, part) for name, parts in SETTINGS_WITH_PARTS.items() for part in parts]


@pytest.mark.parametrize(("name", "part"), CHOICES, ids=str)
def test_a_recipe_with_the_name_of_a_part_is_told_what_code_makes_it(
    name: str, part: type | None
) -> None:
    """The advice is code that runs, and makes the part."""
    place = flags.find_place(config.Config(), name)
    with pytest.raises(UserError) as raised:
        setattr(place.section, place.field, part_name(part))

    message = one_line(raised)
    assert message.startswith(f"{name}={part_name(part)} is text")
    written = re.fullmatch(r".* write (\S+?)(?: \((from \S+ import \S+)\))?", message)
    assert written is not None, message
    names: dict[str, object] = {}
    exec(written[2] or "", names)
    assert eval(written[1], names) == (None if part is None else part())


# The step of a checkpoint has to be given.
@pytest.mark.parametrize(
    ("name", "part"), [choice for choice in CHOICES if choice[1] is not config.Checkpoint], ids=str
)
def test_the_shown_part_is_the_flag_that_chooses_it(name: str, part: type | None) -> None:
    chosen = None if part is None else part()
    settings = cli.parse_settings(config.Config(), [f"--config.{name}={show_part(chosen)}"])
    assert flags.value_of(settings, name) == chosen


def contradictions() -> Iterator[tuple[str, str]]:
    """Yields a flag that chooses a part, and one with an argument that only other parts have."""
    for name, parts in SETTINGS_WITH_PARTS.items():
        arguments = {argument: part for part in parts if part for argument in fields_of(part)}
        for chosen, (argument, owner) in itertools.product(parts, arguments.items()):
            if chosen is None or argument not in fields_of(chosen):
                value = getattr(owner(), argument)
                text = show_part(value) if parts_of(fields_of(owner)[argument]) else str(value)
                yield f"--config.{name}={part_name(chosen)}", f"--config.{name}.{argument}={text}"


CONTRADICTIONS = list(contradictions())


@pytest.mark.parametrize("pair", CONTRADICTIONS, ids=" ".join)
def test_flags_that_contradict_each_other_are_one_error(
    pair: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    messages = set()
    for order in (pair, pair[::-1]):
        with pytest.raises(SystemExit):
            cli.parse_settings(config.Config(), list(order))
        messages.add(capsys.readouterr().err)

    [message] = messages
    assert message.startswith(f"error: {pair[0]} and {pair[1].partition('=')[0]}=")
    assert "contradict each other" in message
    assert message.count("\n") == 1
