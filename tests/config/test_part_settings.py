"""Parts: choices with numbers of their own, in flags, in JSON, in the checks and in the help."""

import itertools
import json
import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from jzero import cli, config
from jzero.config import describe, schema
from jzero.config.checks import check_bounds, check_choice, check_type
from jzero.errors import UserError
from jzero.setting import (
    field_types,
    parse_part,
    part_from_json,
    part_name,
    replace_argument,
    setting,
    show_part,
    to_values,
)


@dataclass(frozen=True)
class Mean:
    """The mean."""


@dataclass(frozen=True)
class FixedLength:
    """A fixed divisor."""

    length: int = setting(0, "Length.")


@dataclass(frozen=True)
class Clip:
    """A clipped ratio."""

    low: float = setting(0.2, "Lower bound.")
    high: float = setting(0.2, "Upper bound.", above=0, at_most=9)
    weight: Mean | FixedLength = setting(Mean(), "Weight.")


@dataclass(frozen=True)
class SoftGate:
    """A soft gate."""

    shape: str = setting("round", "Shape.", choices=("round", "flat"))
    is_strict: bool = setting(False, "Strictness.")
    names: tuple[str, ...] = setting((), "Names.")
    low: float = setting(0.5, "Lower bound.")


@dataclass
class Section:
    """A section with parts."""

    size: int = setting(3, "Size.")
    objective: Clip | SoftGate | None = setting(Clip(), "Objective.")


@dataclass
class Whole:
    """A config with a section."""

    inner: Section = field(default_factory=Section)


PARTS = field_types(Section)["objective"].parts


def parsed(text: str, current: object = None) -> object:
    return parse_part("objective", PARTS, text, current)


def changed(part: object, path: str, value: object) -> object:
    return replace_argument("objective", PARTS, part, path, value)


def test_the_name_of_a_part_is_its_class_in_lowercase() -> None:
    assert [part_name(part) for part in PARTS] == ["clip", "soft_gate", "none"]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("clip", Clip()),
        ("soft_gate", SoftGate()),
        ("none", None),
        ("clip()", Clip()),
        ("clip(low=0.1, high=1)", Clip(0.1, 1.0)),
        ("soft_gate(shape='flat',is_strict=True,names=['a'])", SoftGate("flat", True, ("a",))),
        ("clip(weight='fixed_length(length=7)')", Clip(weight=FixedLength(7))),
    ],
)
def test_a_text_chooses_a_part(text: str, part: object) -> None:
    assert parsed(text) == part
    if part is not None:
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
        ("clip(low=open)", "the arguments are numbers, texts in quotes"),
        ("clip(lo=1)", "objective=clip has no lo: its arguments are low, high, weight"),
        ("clip(low='a')", "objective.low=a must be a number"),
        ("soft_gate(names=3)", "objective.names=3 must be a list"),
        ("none(low=1)", "objective=none has no low: leave it out"),
        ("clip(weight='sum')", "objective.weight=sum is not one of mean, fixed_length"),
        ("clip(weight=3)", "objective.weight=3 is no part: write its name"),
        ("", "objective='' is not one of"),
    ],
)
def test_a_text_that_chooses_nothing_is_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        parsed(text)


@pytest.mark.parametrize(
    ("part", "path", "value", "result"),
    [
        (Clip(), "high", "0.28", Clip(high=0.28)),
        (Clip(), "high", 1, Clip(high=1.0)),
        (Clip(), "weight", "fixed_length", Clip(weight=FixedLength())),
        (Clip(weight=FixedLength()), "weight.length", "9", Clip(weight=FixedLength(9))),
        (SoftGate(), "is_strict", "true", SoftGate(is_strict=True)),
        (SoftGate(), "names", "a,b", SoftGate(names=("a", "b"))),
        (SoftGate(), "names", "('a', 'b c')", SoftGate(names=("a", "b c"))),
        (SoftGate(names=("a",)), "names", "", SoftGate()),
        (SoftGate(), "shape", "flat", SoftGate("flat")),
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
        (SoftGate(), "is_strict", "perhaps", "objective.is_strict=perhaps must be True or False"),
    ],
)
def test_an_argument_of_another_part_is_refused(
    part: object, path: str, value: object, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        changed(part, path, value)


@pytest.mark.parametrize(
    "part",
    [None, Clip(0.1, weight=FixedLength(3)), SoftGate("flat", True, ("a", "b"))],
)
def test_a_part_is_read_as_it_was_written(part: object) -> None:
    section = Section(objective=part)  # pyright: ignore[reportArgumentType]
    values = json.loads(json.dumps(to_values(section)))
    assert config.read_section(Section, values) == section


def test_the_json_of_a_part_begins_with_its_name() -> None:
    assert to_values(Section()) == {
        "size": 3,
        "objective": {"name": "clip", "low": 0.2, "high": 0.2, "weight": {"name": "mean"}},
    }


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("clip", 'objective=clip is no part: write {"name": "clip"}'),
        ({"low": 0.1}, "is no part"),
        ({"name": "clap"}, "objective=clap is not one of"),
        ({"name": "clip", "low": True}, "objective.low=True must be a number"),
        ({"name": "clip", "lo": 0.1}, "objective=clip has no lo"),
    ],
)
def test_json_that_is_no_part_is_refused(value: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        part_from_json("objective", PARTS, value)


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
        (Clip(high=10.0), "objective.high=10.0 must be at most 9"),
        (Clip(high=0.0), "objective.high=0.0 must be above 0"),
        (Clip(low=float("nan")), "objective.low=nan is not a number"),
        (Clip(weight=FixedLength(-1)), "objective.weight.length=-1 must be at least 0"),
        (SoftGate("square"), "objective.shape='square' is not one of round, flat"),
        (Mean(), r"objective=Mean\(\) is no part: write Clip\(\) .* or SoftGate\(\) .* or None"),
        (Clip, r"objective=<class .*Clip'> is a class, .* write Clip\(\)"),
        ("clip", r"objective='clip' is text, .* write Clip\(\)"),
        ("clip(high=3)", r"objective='clip\(high=3\)' is text, .* write Clip\(high=3\)"),
        ("none", "objective='none' is text, .* write None"),
        ("clop", r"objective='clop' is no part: write Clip\(\)"),
    ],
)
def test_the_rules_of_arguments_are_checked(part: object, message: str) -> None:
    section = Section(objective=part)  # pyright: ignore[reportArgumentType]
    mistakes = []
    for item in schema.walk(section, ""):
        mistakes += [*check_type(item), *check_bounds(item), *check_choice(item)]
    assert len(mistakes) == 1
    with pytest.raises(UserError, match=message):
        raise UserError(mistakes[0])


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
    [item] = [item for item in schema.walk(Section(), "") if item.name == "objective"]
    assert len(list(describe.arguments_of(item.type))) == 8  # the length of the weight included


# -- Parts of all settings -------------------------------------------------------------------------

SETTINGS_WITH_PARTS = {
    item.name: item.type.parts
    for item in schema.list_settings(config.Config())
    if item.type.parts and not item.part
}
CHOICES = [(name, part) for name, parts in SETTINGS_WITH_PARTS.items() for part in parts]


@pytest.mark.parametrize(("name", "part"), CHOICES, ids=str)
def test_a_recipe_with_the_name_of_a_part_is_told_what_to_write(
    name: str, part: type | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """The advice is code that runs, and makes the part."""
    settings = config.Config()
    section, _, field_name = name.rpartition(".")
    owner = operator.attrgetter(section)(settings) if section else settings
    setattr(owner, field_name, part_name(part))

    with pytest.raises(SystemExit):
        cli.parse_settings(settings, [f"--config.{name}={part_name(part)}"])

    message = capsys.readouterr().err.strip()
    written = re.fullmatch(r".* write (\S+?)(?: \((from \S+ import \S+)\))?", message)
    assert written is not None, message
    names: dict[str, object] = {}
    exec(written[2] or "", names)
    assert eval(written[1], names) == (None if part is None else part())


def contradictions() -> Iterator[tuple[str, str]]:
    """Yields a flag that chooses a part, and one with an argument that only other parts have."""
    for name, parts in SETTINGS_WITH_PARTS.items():
        arguments = {argument: part for part in parts if part for argument in field_types(part)}
        for chosen, (argument, owner) in itertools.product(parts, arguments.items()):
            if chosen is None or argument not in field_types(chosen):
                value = getattr(owner(), argument)
                text = show_part(value) if field_types(owner)[argument].parts else str(value)
                yield f"--config.{name}={part_name(chosen)}", f"--config.{name}.{argument}={text}"


CONTRADICTIONS = list(contradictions())


@pytest.mark.parametrize("flags", CONTRADICTIONS, ids=" ".join)
def test_flags_that_contradict_each_other_are_one_error(
    flags: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    messages = set()
    for order in (flags, flags[::-1]):
        with pytest.raises(SystemExit):
            cli.parse_settings(config.Config(), list(order))
        messages.add(capsys.readouterr().err)

    [message] = messages
    assert message.startswith(f"error: {flags[0]} and {flags[1].partition('=')[0]}=")
    assert "contradict each other" in message
    assert message.count("\n") == 1
