"""Flags and config.json of earlier versions mean the same as before."""

import json
from pathlib import Path

import pytest

from jzero import algorithms, cli, config
from jzero.config import (
    Apart,
    Checkpoint,
    Config,
    Local,
    Remote,
    Rows,
    Together,
    describe,
    old_settings,
    read_sources,
    schedules,
    turns,
    unknown_names,
)
from jzero.config.old_settings import Merged, Moved, Removed
from jzero.errors import UserError
from jzero.run import workdir
from jzero.run.finished import find_model
from jzero.tasks import countdown, math_problems, mixed

# config.json of runs of earlier versions: of version 0.2, and of the commit before data sources.
OLD_CONFIGS = Path(__file__).with_name("old_configs")


def parse(*flags: str) -> config.Config:
    """Returns the default settings with the changes of flags "NAME=VALUE"."""
    return cli.parse_settings(config.Config(), [f"--config.{flag}" for flag in flags])


def test_entries_of_the_architecture_are_changed_one_by_one() -> None:
    flags = ("model.arch.model_type=qwen3", "model.arch=tiny-llama(head_dim=16)")
    settings = parse(*flags, "model.arch.hidden_size=64")
    arch = config.read_architecture(settings.model.arch)
    assert (arch.model_type, arch.head_dim, arch.hidden_size) == ("qwen3", 16, 64)


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        (["task.name=math", "task.units=convert"], ("units=convert",)),
        (["task.name=mixed", "task.answer_mark=r1"], ("math.options=answer_mark=r1",)),
        (
            ["task.name=mixed", "task.options=tasks=stem,code", "task.answer_mark=r1"],
            ("tasks=stem,code", "stem.options=answer_mark=r1"),
        ),
        (["task.name=mixed", "task.options=math.units=convert"], ("math.options=units=convert",)),
    ],
)
def test_settings_of_mathematics_are_options(flags: list[str], options: tuple[str, ...]) -> None:
    task = parse(*flags).task
    assert task.options == options
    for settings in mixed.all_settings(task).values():
        if settings.name != "code":
            assert math_problems.options_of(settings) != math_problems.Options()


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


def test_a_warm_start_of_0_steps_is_none() -> None:
    defaults = config.Config(warm_start=config.WarmStart(steps=9, tries=1.5))
    flags = ["--config.warm_start.steps=0", "--config.warm_start.lr=0.1"]
    assert cli.parse_settings(defaults, flags).warm_start is None
    settings = parse("warm_start.lr=0.1", "warm_start.steps=60")
    assert settings.warm_start == config.WarmStart(steps=60, lr=0.1)


@pytest.mark.parametrize(
    ("flags", "placement"),
    [
        (["rollout.max_staleness=2"], Together(2)),
        (["rollout.max_running_groups=9", "rollout.max_staleness=2"], Together(2, 9)),
        (["mesh.decode_devices=3"], Apart(1, devices=3)),
        (["mesh.decode_devices=3", "rollout.max_staleness=4"], Apart(4, devices=3)),
    ],
)
def test_staleness_and_decoding_devices_are_a_placement(
    flags: list[str], placement: Together | Apart
) -> None:
    assert parse(*flags).rollout.placement == placement


def test_0_decoding_devices_end_the_placement_of_a_recipe() -> None:
    defaults = config.Config()
    defaults.rollout.placement = Apart(max_staleness=4)
    settings = cli.parse_settings(defaults, ["--config.mesh.decode_devices=0"])
    assert settings.rollout.placement == Together(4)


@pytest.mark.parametrize(
    ("flags", "checkpoint"),
    [
        (["train.resume_from=40"], Checkpoint(40)),
        (["train.resume_from=-1"], None),
        (["train.discard_later_steps=True", "train.resume_from=0"], Checkpoint(0, True)),
        (["train.resume_from.step=7"], Checkpoint(7)),
        (["train.resume_from=checkpoint(step=7,discard_later=True)"], Checkpoint(7, True)),
    ],
)
def test_a_number_is_the_step_to_resume_from(
    flags: list[str], checkpoint: Checkpoint | None
) -> None:
    assert parse(*flags).train.resume_from == checkpoint


def test_rewards_and_replies_of_turns_are_parts() -> None:
    settings = parse(
        "task.reward_bias=0.5", "task.reward_scaling=2", "task.feedback_wrong=No.", "sft.loss=all"
    )
    assert settings.task.turn_reward == turns.Success(0.5, 2.0)
    assert settings.task.feedback == turns.Feedback(wrong="No.")
    assert settings.sft == config.Sft(loss="all")
    assert parse("task.turn_reward=score").task.turn_reward == turns.Score()


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("model.arch.width=3", "has no entry width"),
        ("model.arch.head_dim=x", "head_dim=x is not of type int"),
        ("task.tools.corpus=a.txt", "is of the tool search: add it to task.tools.names"),
        ("task.reward.judge.shade=3", "no field task.reward.judge.shade"),
        ("optimizer.warmup_from_zero=True", "optimizer.warmup=none has no from_zero"),
        ("optimizer.warmup_ratio=x", "optimizer.warmup=share(ratio=x): the arguments are numbers"),
        ("algorithm=dapo", "no field algorithm; choose a preset in a recipe"),
        ("hub.wait_minutes=3", "no field hub.wait_minutes; set hub.push.minutes"),
    ],
)
def test_a_wrong_flag_is_one_line(
    flag: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit), cli.user_errors():
        config.validate(parse(flag))
    assert message in capsys.readouterr().err


def test_the_rows_of_all_sets_are_chosen_by_old_flags() -> None:
    settings = parse(
        "task.data=a.jsonl,b.jsonl",
        "task.weights=(0.25, 0.75)",
        "task.train_split=hard",
        "task.eval_split=validation",
        "task.problem_column=ask",
        "task.max_train=12",
        "task.level_min=3",
    )
    sources = read_sources("task.data", settings.task.data)
    wanted = Rows("", "hard", problem="ask", limit=12, level_min=3)
    assert [(rows.path, rows.weight) for rows in sources] == [("a.jsonl", 0.25), ("b.jsonl", 0.75)]
    for rows in sources:
        assert (rows.split, rows.problem, rows.limit, rows.level_min) == (
            wanted.split,
            wanted.problem,
            wanted.limit,
            wanted.level_min,
        )
    assert settings.task.eval_data == "rows(split='validation')"


def test_one_argument_of_all_sets_is_changed_by_its_flag() -> None:
    settings = parse("sft.data=rows('a',limit=3),b", "sft.data.limit=5", "task.data.level_max=4")
    assert settings.sft.data == "rows('a',limit=5),rows('b',limit=5)"
    assert settings.task.data == "rows(level_max=4)"


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("task.weights=1,2", "must be a positive number for each of the 1 sets"),
        ("task.level_min=many", "task.level_min=many must be a whole number"),
        ("task.data=rows(a,b)", "write it as rows("),
        ("task.data=rows(a,limit=-1)", "limit=-1 must be at least 0"),
        ("sft.eval_data=rows(a,size=1)", "sft.eval_data=rows has no size: its arguments are path"),
    ],
)
def test_a_wrong_data_source_is_one_line(
    flag: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit), cli.user_errors():
        config.validate(parse("task.data=a", flag))
    assert message in capsys.readouterr().err


def test_the_table_names_settings_that_exist() -> None:
    known = {*config.schema.known_names(), *old_settings.OLD_SETTINGS, *describe.list_sections()}
    for name, entry in old_settings.OLD_SETTINGS.items():
        match entry:
            case Moved(to=to) | Merged(to=to):
                assert to in known, name
                assert unknown_names([name]) in ("", f"no field {name}; set {to}")
            case Removed(advice=advice):
                assert unknown_names([name]) == f"no field {name}; {advice}"
                is_setting = advice.startswith("set ") and "variable" not in advice
                assert not is_setting or advice.removeprefix("set ").partition("=")[0] in known


# -- config.json -----------------------------------------------------------------------------------


def read(name: str) -> Config:
    """Returns the config of a file of OLD_CONFIGS, which is valid today."""
    path = OLD_CONFIGS / f"{name}.json"
    settings = config.from_json(path.read_text(encoding="utf-8"), str(path))
    config.validate(settings)
    assert config.from_json(config.to_json(settings), "today") == settings
    return settings


def test_the_data_sets_of_an_old_run_are_read() -> None:
    task = read("math").task
    columns = {"problem": "problem", "answer": "answer", "limit": 100}
    levels = {"level_min": 3, "level_max": 5}
    assert read_sources("task.data", task.data) == (
        Rows("RLAIF/math", **columns, **levels, weight=0.25),
        Rows("two.jsonl", **columns, **levels, weight=0.75),
    )
    assert task.eval_data == "rows(split='validation')"


def test_the_options_of_an_old_mixed_run_are_read() -> None:
    options = read("mixed").task.options
    assert "math.data=rows(answer='solutions')" in options
    assert not any("answer_column" in option for option in options)


def test_a_run_of_version_0_2_is_read() -> None:
    settings = read("version_0_2")
    assert settings.task.data.startswith("rows('RLAIF/math',")
    assert settings.algorithm.weight == algorithms.Constant(length=3000)
    assert settings.algorithm.kl == algorithms.KL(coef=0.0)
    assert settings.teacher is None
    assert settings.task.reward.judge is None
    assert settings.critic == config.Critic()
    assert settings.rollout.placement == Together()
    assert (settings.warm_start, settings.sft, settings.train.resume_from) == (None, None, None)
    assert settings.task.turn_reward == turns.Success()


def test_a_first_rate_of_an_old_run_without_a_warm_up_had_no_effect() -> None:
    optimizer = {"warmup_steps": 0, "warmup_ratio": 0.0, "warmup_from_zero": True}
    settings = config.from_json(json.dumps({"optimizer": optimizer}), "config.json")
    assert settings.optimizer.warmup is None
    optimizer["warmup_ratio"] = 0.1
    settings = config.from_json(json.dumps({"optimizer": optimizer}), "config.json")
    assert settings.optimizer.warmup == schedules.Share(0.1, from_zero=True)


@pytest.mark.parametrize("name", sorted(path.stem for path in OLD_CONFIGS.glob("*.json")))
def test_an_old_run_continues_with_the_settings_of_today(name: str, tmp_path: Path) -> None:
    written = (OLD_CONFIGS / f"{name}.json").read_text(encoding="utf-8")
    (tmp_path / "config.json").write_text(written)
    settings = read(name)

    workdir.claim_workdir(tmp_path, config.to_json(settings))

    assert (tmp_path / "config.json").read_text() == written
    (tmp_path / "export-3").mkdir()
    assert find_model(str(tmp_path)).settings == settings
    settings.optimizer.lr *= 2
    with pytest.raises(UserError, match="belongs to a run with other settings"):
        workdir.check_workdir(tmp_path, config.to_json(settings))


# -- The task --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        ((), ("value_max=15",)),
        (("task.name=countdown",), ("value_max=15",)),
        (("task.name=guess",), ()),
        (("task.name=guess", "task.options=largest=9"), ("largest=9",)),
    ],
)
def test_options_of_a_recipe_go_with_its_task(flags, options) -> None:
    recipe = Config(task=config.TaskConfig(options=("value_max=15",)))
    settings = cli.parse_settings(recipe, [f"--config.{flag}" for flag in flags])
    assert settings.task.options == options


def test_old_options_of_mixed_rows_have_the_names_of_today() -> None:
    settings = parse("task.name=mixed", "task.options=math.feedback_wrong=No, = wrong.")
    assert settings.task.options == ("math.feedback.wrong=No, = wrong.",)


def test_old_options_of_mixed_rows_are_columns_of_their_data() -> None:
    settings = parse(
        "task.name=mixed", "task.options=math.answer_column=out", "task.options=math.level_min=2"
    )
    assert settings.task.options == ("math.data=rows(answer='out',level_min=2)",)


def test_the_address_of_a_sandbox_chooses_a_remote_one() -> None:
    flags = ("task.sandbox.protocol=e2b", "task.sandbox.url=http://x:1", "task.sandbox.seconds=2")
    assert parse(*flags).task.sandbox == Remote(seconds=2.0, url="http://x:1", protocol="e2b")
    assert parse("task.sandbox.level=none").task.sandbox == Local(level="none")
    assert read("math").task.sandbox == Remote(url="http://localhost:1", protocol="e2b")
