"""Flags of settings that have moved mean the same as before."""

import pytest

from jzero import cli, config
from jzero.config import schedules
from jzero.tasks import countdown


def parse(*flags: str) -> config.Config:
    """Returns the default settings with the changes of flags "NAME=VALUE"."""
    return cli.parse_settings(config.Config(), [f"--config.{flag}" for flag in flags])


def test_entries_of_the_architecture_are_changed_one_by_one() -> None:
    flags = ("model.arch.model_type=qwen3", "model.arch=tiny-llama(head_dim=16)")
    settings = parse(*flags, "model.arch.hidden_size=64")
    arch = config.read_architecture(settings.model.arch)
    assert (arch.model_type, arch.head_dim, arch.hidden_size) == ("qwen3", 16, 64)


def test_numbers_of_countdown_are_options() -> None:
    settings = parse("task.options=value_max=20", "task.value_max=15", "task.format_score=0.3")
    options = countdown.options_of(settings.task)
    assert (options.value_max, options.format_score, options.numbers_max) == (15, 0.3, 4)


def test_arguments_of_a_judge_choose_it() -> None:
    settings = parse("task.reward.judge.url=http://here", "task.reward.judge.model=m")
    assert settings.task.reward.judge == config.JudgeServer(url="http://here", model="m")


def test_arguments_of_search_are_written_into_the_tool() -> None:
    flags = ("task.tools.search_results=5", "task.tools.corpus=a/b.txt")
    settings = parse("task.tools.names=search", "task.tools.names=calculator", *flags)
    assert settings.task.tools.names == ("search(results=5,corpus='a/b.txt')", "calculator")


@pytest.mark.parametrize(
    ("flags", "warmup"),
    [
        (["optimizer.warmup_steps=5"], schedules.Steps(5)),
        (["optimizer.warmup_ratio=0.1"], schedules.Share(0.1)),
        (
            ["optimizer.warmup_ratio=0.1", "optimizer.warmup_from_zero=True"],
            schedules.Share(0.1, from_zero=True),
        ),
        (["optimizer.warmup_ratio=0.1", "optimizer.warmup_steps=0"], None),
    ],
)
def test_the_warm_up_is_a_number_of_steps_or_a_share(
    flags: list[str], warmup: schedules.Warmup | None
) -> None:
    assert parse(*flags).optimizer.warmup == warmup


def test_another_length_of_the_warm_up_keeps_its_first_rate() -> None:
    defaults = config.Config()
    defaults.optimizer.warmup = schedules.Share(0.1, from_zero=True)
    settings = cli.parse_settings(defaults, ["--config.optimizer.warmup_steps=5"])
    assert settings.optimizer.warmup == schedules.Steps(5, from_zero=True)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("model.arch.width=3", "has no entry width"),
        ("model.arch.head_dim=x", "head_dim=x is not of type int"),
        ("task.tools.corpus=a.txt", "is of the tool search: add it to task.tools.names"),
        ("task.reward.judge.shade=3", "has no shade"),
        ("optimizer.warmup_from_zero=True", "optimizer.warmup=none has no from_zero"),
        ("optimizer.warmup_ratio=x", "optimizer.warmup=share(ratio=x): the arguments are numbers"),
        ("hub.wait_minutes=3", "no field hub.wait_minutes; set hub.minutes"),
    ],
)
def test_a_wrong_flag_is_one_line(
    flag: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit), cli.user_errors():
        config.validate(parse(flag))
    assert message in capsys.readouterr().err
