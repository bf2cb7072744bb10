"""Splits by name: which rows are trained on, and which are held out."""

import json
from pathlib import Path

import pytest

from jzero import config
from jzero.errors import UserError
from jzero.loops import sft
from jzero.problems import problem_sets, row_loader
from jzero.tasks import TASKS, countdown, math_problems

SPLITS = ("train", "train_hard", "validation")


@pytest.fixture
def source(tmp_path: Path) -> str:
    """Returns a directory with a file of 3 rows for each of SPLITS, good for every kind of task."""
    for number, name in enumerate(SPLITS):
        lines = []
        for i in range(1, 4):
            sum_ = 10 * number + 2 * i
            row = {
                "prompt": f"{name} {i}+{i + 10 * number}=",
                "completion": str(sum_),
                "answer": str(sum_),
                "numbers": [i, i + 10 * number],
                "target": sum_,
            }
            lines.append(json.dumps(row) + "\n")
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    (tmp_path / "broken.jsonl").write_text("{")  # no split that is asked for
    return str(tmp_path)


def names_of(prompts: list[str]) -> set[str]:
    return {prompt.split()[0] for prompt in prompts}


def data_of(source: str, train: str = "", held_out: str = "") -> dict[str, str]:
    """Returns the settings with these splits of a source; "" for the usual split."""
    eval_data = str(config.Rows(split=held_out))
    return {
        "data": str(config.Rows(source, split=train)),
        "eval_data": eval_data if held_out else "",
    }


def math_prompts(source: str, **splits: str) -> tuple[set[str], set[str]]:
    """Returns the names of the splits that are trained on, and that are held out."""
    task = config.TaskConfig(name="math", template="no", **data_of(source, **splits))
    train = [str(problem.prompt) for problem in math_problems.train_problems(task, 0, 0, 3)]
    held_out = [str(problem.prompt) for problem in math_problems.eval_problems(task, 100)]
    return names_of(train), names_of(held_out)


def sft_prompts(source: str, **splits: str) -> tuple[set[str], set[str]]:
    settings = config.Config(sft=config.Sft(**data_of(source, **splits)))
    data = sft.read_data(settings)
    train = [str(data.rows[i]["prompt"]) for i in range(3)]
    return names_of(train), names_of([str(row["prompt"]) for row in data.held_out])


@pytest.mark.parametrize("prompts_of", [math_prompts, sft_prompts])
def test_splits_are_chosen_by_name(prompts_of, source: str) -> None:
    hard = prompts_of(source, train="train_hard", held_out="validation")
    assert hard == ({"train_hard"}, {"validation"})
    # Without names nothing but the split called test is held out, and this set has none.
    assert prompts_of(source) == ({"train"}, set())


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        (
            {"train": "hard"},
            r"data=rows\(.*split='hard'\): .* has the splits broken, train, tr",
        ),
        (
            {"held_out": "test"},
            r"eval_data=rows\(split='test'\): .* has the splits broken, train, tr",
        ),
        (
            {"held_out": "train"},
            r"eval_data=rows\(split='train'\): train is the split that is trained on",
        ),
    ],
)
@pytest.mark.parametrize("prompts_of", [math_prompts, sft_prompts])
def test_a_split_that_is_not_there_is_refused(
    prompts_of, source: str, splits: dict[str, str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        prompts_of(source, **splits)


def test_splits_of_a_countdown_set_are_chosen_by_name(source: str) -> None:
    task = config.TaskConfig(**data_of(source, "train_hard", "validation"))
    trained = countdown.train_problems(task, 0, 0, 6)
    held_out = countdown.eval_problems(task, 3)
    assert {problem.gold["target"] for problem in trained} == {12, 14, 16}
    assert {problem.gold["target"] for problem in held_out} == {22, 24, 26}


def test_splits_that_nobody_names_are_pointed_out(
    source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sft_prompts(source)
    assert (
        "nothing is held out; its split broken, train_hard, validation" in capsys.readouterr().out
    )
    task = config.TaskConfig(name="math", data=source, template="no")
    assert "is held out with task.eval_data=rows(split='broken')" in math_problems.notes(task)[0]


def test_a_split_that_cannot_be_read_is_an_error_with_its_file(source: str) -> None:
    with pytest.raises(UserError, match=r"broken\.jsonl line 1 is not JSON"):
        row_loader.choose_split(config.Rows(source, split="broken"), "train", "task.data")


# Passes over the problems.


@pytest.fixture(scope="module")
def puzzles(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Returns a set of 11 rows without a split to hold out, good for every kind of task."""
    rows = []
    for i in range(11):
        numbers = [i + 1, i + 50]
        row = {"prompt": f"{i}?", "answer": "1", "numbers": numbers, "target": 2 * i + 51}
        rows.append(json.dumps(row))
    path = tmp_path_factory.mktemp("puzzles") / "eleven.jsonl"
    path.write_text("\n".join(rows))
    return str(path)


def places_of_steps(task: config.TaskConfig, num_rows: int, steps: int) -> list[list[int]]:
    return [list(problem_sets.step_indices(s, 3, num_rows, task)) for s in range(1, steps + 1)]


def test_a_pass_that_drops_its_last_rows_starts_anew_with_a_whole_step() -> None:
    task = config.TaskConfig(drop_last=True)
    expected = []
    for first_of_pass in (0, 11, 22):
        order = list(range(first_of_pass, first_of_pass + 11))
        expected += [order[i : i + 3] for i in range(0, 11 - 2, 3)]
    assert places_of_steps(task, 11, 9) == expected


@pytest.mark.parametrize("name", ["math", "countdown"])
def test_every_pass_that_drops_its_last_problems_has_each_problem_once(
    name: str, puzzles: str
) -> None:
    task = config.TaskConfig(name=name, data=puzzles, template="r1", drop_last=True)
    num_rows = TASKS[name].num_train_problems(task)
    assert num_rows is not None
    count = (num_rows - 1) // 2  # two steps, and one or two rows that fill no step
    for first_step in (1, 3, 5):
        seen: list[str] = []
        for step in (first_step, first_step + 1):
            seen += [str(p.prompt) for p in TASKS[name].train_problems(task, 0, step, count)]
        assert len(set(seen)) == len(seen) == 2 * count


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ((1.0, 2.0), "task.drop_last=True counts passes over all sets"),
        ((), "task.drop_last=True: 2 problems do not fill a step of rollout.num_prompts=3"),
    ],
)
def test_passes_that_cannot_drop_their_last_problems_are_refused(
    weights: tuple[float, ...], message: str
) -> None:
    task = config.TaskConfig(drop_last=True)
    with pytest.raises(UserError, match=message):
        problem_sets.step_indices(1, 3, 2, task, weights)


@pytest.mark.parametrize("data", [",", "rows(limit=3)"])
def test_data_without_a_set_is_refused(data: str) -> None:
    with pytest.raises(UserError, match="names no set"):
        countdown.train_problems(config.TaskConfig(data=data), 0, 0, 1)
