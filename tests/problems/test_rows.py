"""The rows of data sets become the same problems, in the same order, as they always did.

The digests are those of the commit before the loaders of the tasks became one.
"""

import ast
import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
from tiny import code_row, math_row, mixed_task

from jzero.config import Config, RewardConfig, Sft, Sources, TaskConfig, WarmStart, turns
from jzero.loops import sft
from jzero.tasks import find_task, math_problems
from jzero.types import JsonValue, Problem

ROOT = Path(__file__).resolve().parents[2]
Row = dict[str, JsonValue]

SOURCE = """
class Board:
    def reset(self, row, seed):
        return f"{sorted(row.items())}, seed {seed}"

    def step(self, response):
        return None, 1.0, True


def row_reward(row):
    return 1.0
"""


def write(folder: Path, name: str, splits: dict[str, list[Row]]) -> str:
    """Writes a set with several splits, or one file if there is one."""
    if len(splits) == 1:
        [rows] = splits.values()
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)
    (folder / name).mkdir()
    for split, rows in splits.items():
        write(folder / name, split, {split: rows})
    return str(folder / name)


def sums(first: int, count: int, **columns: str) -> list[Row]:
    """Rows of a question; some have an answer that no grader understands."""
    names = {"problem": "problem", "answer": "answer"} | columns
    rows: list[Row] = []
    for i in range(first, first + count):
        answer: JsonValue = str(i + 1)
        if i % 7 == 3:
            answer = f"#### {i + 1}"
        if i % 11 == 5:
            answer = ""
        row: Row = {names["problem"]: f"{i}+1?", names["answer"]: answer}
        rows.append(row | {"level": f"Level {i % 5 + 1}", "number": i})
    return rows


def code_rows(first: int, count: int) -> list[Row]:
    rows: list[Row] = []
    for i in range(first, first + count):
        row = dict(code_row(i)) | {"chat": [{"role": "user", "content": f"times {i}, please"}]}
        if i % 6 == 4:
            row["input_output"] = json.dumps({"inputs": [], "outputs": []})
        rows.append(row)
    return rows


@pytest.fixture
def sets(tmp_path: Path) -> dict[str, str]:
    """Returns the sources of small sets by name."""
    mixture = [math_row(i) if i % 3 else code_row(i) for i in range(20)]
    own_prompts = [row | {"chat": f"Add: {row['problem']}"} for row in sums(0, 12)]
    (tmp_path / "board.py").write_text(SOURCE)
    return {
        "one": write(tmp_path, "one", {"train": sums(0, 30)}),
        "two": write(
            tmp_path, "two", {"train": sums(20, 40), "test": sums(50, 25), "hard": sums(90, 9)}
        ),
        "named": write(tmp_path, "named", {"train": sums(5, 14, problem="ask", answer="say")}),
        "prompts": write(tmp_path, "prompts", {"train": own_prompts}),
        "code": write(tmp_path, "code", {"train": code_rows(0, 25), "test": code_rows(20, 9)}),
        "more code": write(tmp_path, "more_code", {"train": code_rows(30, 8)}),
        "mixture": write(tmp_path, "mixture", {"train": mixture, "test": mixture[4:7]}),
        "board": f"{tmp_path}/board.py:Board",
        "row_reward": f"{tmp_path}/board.py:row_reward",
    }


def digest(values: object, sets: dict[str, str]) -> str:
    text = json.dumps(values)
    for name, path in sets.items():
        text = text.replace(path, name)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def fields(problems: list[Problem]) -> list[JsonValue]:
    return [[p.id, p.task, p.row_task, p.prompt, p.gold, p.row, p.tools] for p in problems]


def all_problems(task: TaskConfig) -> list[JsonValue]:
    """Returns all that a run takes from a task."""
    found = find_task(task.name)
    values: list[JsonValue] = [found.num_train_problems(task) if found.num_train_problems else None]
    for seed, step, count in ((0, 1, 16), (0, 2, 16), (7, 10, 5)):
        values.append(fields(found.train_problems(task, seed, step, count)))
    values.append(fields(found.eval_problems(task, 10)))
    values.append(fields(found.eval_problems(task, 1000)))
    return values


LEVELS = "level_min=2,level_max=4,limit=15"
MATH = TaskConfig(name="math")
CODE = TaskConfig(name="code", template="plain")
BOARD = TaskConfig(name="environment", template="plain", turn_reward=turns.Score(), grade_workers=1)

# The settings of a case, and the digest. In texts {NAME} stands for the source of a set.
CASES: dict[str, tuple[TaskConfig, str]] = {
    "one file": (replace(MATH, data="{one}"), "11a8e5856addbb68"),
    "a test split": (replace(MATH, data="{two}"), "e16566412107f219"),
    "several sets": (replace(MATH, data=" {one}, {two},,"), "1a80dc93930a6a44"),
    "weights": (
        replace(MATH, data="rows('{one}',weight=0.25),rows('{two}',weight=0.75)"),
        "4cf0cc1c77ca5a5e",
    ),
    "gsm8k": (replace(MATH, name="gsm8k", data="{two}", template="chat"), "a0bb2f9fdd3d4448"),
    "several turns": (
        replace(MATH, name="math_multiturn", data="rows('{two}',limit=12)"),
        "ec2792d69483bac4",
    ),
    "levels": (
        replace(MATH, data=",".join(f"rows('{name}',{LEVELS})" for name in ("{one}", "{two}"))),
        "339150d79a006ec9",
    ),
    "splits": (
        replace(MATH, data="{two},{one}", eval_data="rows(split='hard')"),
        "94ce98785215edb6",
    ),
    "another split": (replace(MATH, data="rows('{two}',split='hard')"), "8a994483f0ce3532"),
    "eval_data": (
        replace(MATH, data="{two}", eval_data="{named}:problem=ask:answer=say"),
        "25295ac20f9f9020",
    ),
    "columns": (
        replace(MATH, data="rows('{named}',problem='ask',answer='say')"),
        "1a9517a07982553a",
    ),
    "a published verifier": (
        replace(MATH, data="{one}", verifier="last_number"),
        "6a8be5a71d72b1a2",
    ),
    "prompts": (replace(MATH, data="{prompts}", template="column:chat"), "6a5ad0b8147b7178"),
    "drop_last": (replace(MATH, data="{two}", drop_last=True), "e30836f2da688b08"),
    "reward of the row": (
        replace(MATH, data="{two}", reward=RewardConfig(functions=("accuracy", "{row_reward}"))),
        "a0eba696bfdb692f",
    ),
    "code": (replace(CODE, data="{code},{more code}"), "afb63ed993e1a5f0"),
    "code, one test": (
        replace(CODE, data="rows('{code}',limit=11)", options=("max_tests=1",)),
        "605d5561909638ed",
    ),
    "code, eval_data": (replace(CODE, data="{code}", eval_data="{more code}"), "040e1ebc57a48624"),
    "code, prompts": (replace(CODE, data="{code}", template="column:chat"), "76a3540c82998f27"),
    "mixed": (mixed_task(Path("{mixture}")), "a4ae7e85476c8e7d"),
    "mixed, few": (
        mixed_task("rows('{mixture}',limit=9)", eval_data="{mixture}"),
        "168cd37b2e808ed9",
    ),
    "board": (replace(BOARD, environment="{board}", data="{one}, {two}"), "e7ace32d8ee45b1d"),
    "board, levels": (
        replace(BOARD, environment="{board}", data="rows('{two}',level_min=4,limit=6)"),
        "f3fdb33e312ca352",
    ),
    "board, splits": (
        replace(BOARD, environment="{board}", data="{two},{two}", eval_data="rows(split='hard')"),
        "898012d69550fbd9",
    ),
    "board, eval_data": (
        replace(BOARD, environment="{board}", data="rows('{two}',weight=1)", eval_data="{one}"),
        "de487c0646566013",
    ),
}


def fill_in(value: object, sets: dict[str, str]) -> object:
    """Returns a setting with the sources of the sets."""
    if isinstance(value, Sources):
        value = str(value)
    if isinstance(value, str):
        for name, source in sets.items():
            value = value.replace(f"{{{name}}}", source)
    if isinstance(value, RewardConfig):
        return replace(value, functions=fill_in(value.functions, sets))
    if isinstance(value, tuple):
        return tuple(fill_in(item, sets) for item in value)
    return value


@pytest.mark.parametrize("case", CASES)
def test_problems_of_tasks_stay_as_they_are(case: str, sets: dict[str, str]) -> None:
    settings, expected = CASES[case]
    names = ("data", "eval_data", "environment", "reward")
    task = replace(settings, **{name: fill_in(getattr(settings, name), sets) for name in names})

    assert digest(all_problems(task), sets) == expected


@pytest.mark.parametrize(
    ("settings", "with_gold", "expected"),
    [
        (replace(MATH, data="{two},{one}"), True, "17cfc90501033a60"),
        (replace(MATH, data="rows('{two}',level_min=3)"), False, "cad98877c9cfc027"),
        (replace(MATH, data="{prompts}", template="column:chat"), False, "b896ad2506659c06"),
    ],
)
def test_problems_to_generate_responses_to_stay_as_they_are(
    settings: TaskConfig, with_gold: bool, expected: str, sets: dict[str, str]
) -> None:
    task = replace(settings, data=fill_in(settings.data, sets))
    problems = math_problems.split_problems(task, "train", with_gold=with_gold)
    kept = math_problems.train_problems(task, 3, 2, 8, keep_columns=True)
    assert digest([fields(problems), fields(kept)], sets) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"data": "{texts}, {tests}"}, "dbcdabd62aa2397e"),
        (
            {"data": "rows('{tests}',split=early)", "eval_data": "rows(split=late)"},
            "3a3189ff39450b3f",
        ),
        ({"data": "rows('{tests}',weight=1),rows(countdown,weight=1)"}, "74346e3e52f1fd24"),
        ({"data": "{texts}", "eval_data": "{tests}"}, "23a108b522af33ce"),
    ],
)
def test_examples_of_fine_tuning_stay_as_they_are(
    changes: dict[str, object], expected: str, tmp_path: Path
) -> None:
    def examples(first: int) -> list[Row]:
        numbers = range(first, first + 12)
        return [{"prompt": f"{i}?", "completion": None if i % 5 == 4 else str(i)} for i in numbers]

    names = ("train", "test", "early", "late")
    splits = {name: examples(100 * number) for number, name in enumerate(names)}
    sets = {
        "texts": write(tmp_path, "texts", {"train": examples(40)}),
        "tests": write(tmp_path, "tests", splits),
    }
    changes = {name: fill_in(value, sets) for name, value in changes.items()}
    warm_start = WarmStart(steps=2, batch_size=8)  # of the task countdown
    data = sft.read_data(Config(sft=Sft(**changes), warm_start=warm_start))
    rows = [dict(data.rows[index]) for index in range(70)]
    held_out = [dict(row) for row in data.held_out]
    assert digest([rows, data.num_examples, held_out], sets) == expected


# Functions that open a set, and choose its rows.
OPENERS = {"load", "load_split", "load_dataset", "load_from_disk", "select_levels"}


def opened_sets(path: Path) -> set[str]:
    """Returns which of OPENERS a module calls."""
    text = path.read_text(encoding="utf-8")
    calls: set[str] = set()
    if not any(f".{name}(" in text for name in OPENERS):
        return calls
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="problem_sets" | "datasets"), attr=name)
            ) if name in OPENERS:
                calls.add(name)
    return calls


def test_one_module_chooses_the_rows_of_runs() -> None:
    opened = {path.name: opened_sets(path) for path in (ROOT / "jzero").rglob("*.py")}
    users = {name: calls for name, calls in opened.items() if calls}
    assert users == {
        "row_loader.py": {"load", "load_split", "select_levels"},
        "problem_sets.py": {"load_from_disk"},  # where sources are read
        "hub_sets.py": {"load_dataset"},  # those of the hub
        "suites.py": {"load"},  # whether a user-defined set has the usual split
        "play.py": {"load_split"},  # one row for an environment that is played by hand
    }
