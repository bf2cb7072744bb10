"""A task for each row: prompts, settings and refusals of `task.name=mixed`."""

import json
import re
import shlex
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from tiny import code_row, math_row, mixed_task, write_rows, write_set

from jzero import main
from jzero.commands import evaluate
from jzero.config import RewardConfig, TaskConfig
from jzero.errors import UserError
from jzero.tasks import check_task_settings, find_task, mixed, stop_strings, suites
from jzero.types import Problem

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_set(tmp_path)


# Problems


def test_each_row_is_a_problem_of_its_own_task(data: Path) -> None:
    task = mixed_task(data)
    check_task_settings(task, 3)

    problems = find_task("mixed").train_problems(task, 0, 0, 7)

    assert Counter(problem.row_task for problem in problems) == {"math": 4, "code": 3}
    assert [problem.id for problem in problems] == [f"mixed/train/{i}" for i in range(7)]
    for problem in problems:
        words = str(problem.prompt)
        if problem.row_task == "math":
            assert problem.task == "math_multiturn"
            assert problem.gold["answer"] == str(int(words.partition("+")[0]) + 1)
        else:
            assert problem.task == "code"
            assert words.startswith("times ")
            assert words.endswith("\n")
            number = int(words.split()[1])
            assert [test["expected"] for test in problem.gold["tests"]] == [
                str(number),
                str(2 * number),
            ]


def test_the_problems_of_a_step_are_a_function_of_seed_and_step(data: Path) -> None:
    task = mixed_task(data)
    draw = find_task("mixed").train_problems
    whole = draw(task, 5, 1, 12)
    assert [*draw(task, 5, 1, 4), *draw(task, 5, 2, 4), *draw(task, 5, 3, 4)] == whole
    assert draw(task, 6, 0, 12) != whole


def test_held_out_rows_are_those_of_the_test_split_and_are_not_trained_on(tmp_path: Path) -> None:
    write_set(tmp_path)
    rows = [math_row(5), code_row(7), math_row(1), code_row(3)]
    write_rows(tmp_path / "train.jsonl", rows)
    task = mixed_task(tmp_path)

    held_out = find_task("mixed").eval_problems(task, 10)

    assert [problem.row_task for problem in held_out] == ["math", "code", "code", "math"]
    assert find_task("mixed").num_train_problems(task) == 2
    assert find_task("mixed").notes(task) == [
        f"{tmp_path}: 1 problem of math dropped: held out",
        f"{tmp_path}: 1 problem of math",
        f"{tmp_path}: 1 problem of code dropped: held out",
        f"{tmp_path}: 1 problem of code",
    ]


def test_rows_that_cannot_be_used_are_counted_by_task(tmp_path: Path) -> None:
    no_test = code_row(3) | {"input_output": json.dumps({"inputs": [], "outputs": []})}
    rows = [math_row(1), math_row(2) | {"answer": "By symmetry, done."}, no_test, code_row(4)]
    task = mixed_task(write_rows(tmp_path / "rows.jsonl", rows))
    assert find_task("mixed").num_train_problems(task) == 3  # text equals itself
    [note] = [note for note in find_task("mixed").notes(task) if "dropped" in note]
    assert note.startswith(f"{task.data}: 1 problem of code dropped")


def test_the_layout_of_areal_is_read_as_it_is(tmp_path: Path) -> None:
    """Its rows have `prompt`, `solutions` or `input_output`, `query_id` and `task`."""
    tests = json.dumps({"inputs": ["1"], "outputs": ["2"]})
    rows = [
        {"task": "math", "query_id": "a", "prompt": "<u>1+1?<a>", "solutions": ["\\boxed{2}"]},
        {"task": "code", "query_id": "b", "prompt": "<u>Add 1.<a>", "input_output": tests},
        {"task": "stem", "query_id": "c", "prompt": "<u>2+1?<a>", "solutions": ["3", "III"]},
    ]
    task = TaskConfig(
        name="mixed",
        data=str(write_rows(tmp_path / "rows.jsonl", rows)),
        template="column:prompt",
        options=(
            "tasks=math,stem,code",
            "math.data=rows(answer='solutions')",
            "stem.data=rows(answer='solutions')",
            "code.options=feedback=words",
        ),
    )
    check_task_settings(task, 5)

    problems = {
        problem.row_task: problem for problem in find_task("mixed").train_problems(task, 0, 0, 3)
    }

    assert {name: problem.prompt for name, problem in problems.items()} == {
        row["task"]: row["prompt"] for row in rows
    }
    for name, response in (("math", "\\boxed{2}"), ("stem", "\\boxed{3}")):
        own = mixed.settings_of(task, problems[name])
        grade = find_task(problems[name].task).grade(response, problems[name].gold, own)
        assert grade.correct, name


def test_a_file_of_such_rows_is_a_suite_with_the_same_problems(data: Path) -> None:
    task = mixed_task(data)
    name, problems = suites.load_suite(f"mine={data / 'test.jsonl'}", task, 3, 0)
    own = find_task("mixed").eval_problems(task, 10)[:3]
    assert name == "mine"
    # The suite names the file, and the run the folder.
    file = str(data / "test.jsonl")
    assert problems == [
        replace(problem, id=f"mine/{i}", data=file) for i, problem in enumerate(own)
    ]


def test_questions_of_a_suite_have_the_settings_of_mathematics(tmp_path: Path) -> None:
    row = {"problem": "1+1=", "answer": "2"}
    path = write_rows(tmp_path / "suite.jsonl", [row])
    task = mixed_task(tmp_path, "math.verifier=oat_fast")
    _, [problem] = suites.load_suite(f"mine={path}", task, 0, 0)
    assert (problem.task, problem.prompt, problem.row_task) == ("math", "1+1=", "")
    assert mixed.settings_of(task, problem).verifier == "oat_fast"


# Settings


def test_an_option_is_for_the_rows_of_one_task(data: Path) -> None:
    task = mixed_task(
        data,
        "code.reward.functions=code",
        "code.reward.functions=code_format",
        "code.reward.weights=1",
        "code.reward.weights=0.5",
        "code.options=reward=all",
        "code.options=max_tests=3",
        "code.feedback.wrong=No, = wrong.",
        "math.verifier=oat_fast",
        "math.stop_on_success=false",
        "code.sandbox.seconds=2.5",
        reward=RewardConfig(functions=("accuracy", "format"), weights=(1.0, 2.0)),
    )
    check_task_settings(task, 3)
    found = mixed.all_settings(task)

    code, math = found["code"], found["math"]
    assert (code.reward.functions, code.reward.weights) == (("code", "code_format"), (1.0, 0.5))
    assert code.options == ("reward=all", "max_tests=3")
    assert code.feedback.wrong == "No, = wrong."
    assert (code.sandbox.seconds, math.sandbox.seconds) == (2.5, 1.0)
    assert math.reward == task.reward
    assert (math.verifier, code.verifier) == ("oat_fast", "fast")
    assert (math.stop_on_success, code.stop_on_success) == (False, True)
    # Everything else is as it was given, also in the settings that were copied.
    assert task == mixed_task(data, *task.options[2:], reward=task.reward)
    for own in (code, math):
        for name in ("grade_workers", "tools", "turn_reward", "max_reply_bytes"):
            assert getattr(own, name) == getattr(task, name)


def test_an_option_without_items_empties_a_tuple(data: Path) -> None:
    reward = RewardConfig(functions=("accuracy",), weights=(2.0,))
    task = mixed_task(data, "code.reward.weights=", reward=reward)
    assert mixed.all_settings(task)["code"].reward.weights == ()
    assert mixed.all_settings(task)["math"].reward.weights == (2.0,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("tasks=math,art",), "'art' is not one of math, stem, gsm8k, code"),
        (("tasks=math,math",), "names math 2 times"),
        (("tasks=",), "names no task"),
        (("stem.template=no",), "stem is not one of the tasks that rows may name, math, code"),
        (("code.tempalte=no",), "code.tempalte=no: there is no tempalte; did you mean template"),
        (("code.reward=x",), "code.reward=x: reward is a section: set one of its settings"),
        (("code.template.x=no",), "template has no settings of its own: set template"),
        (("code.sandbox.seconds=fast",), "sandbox.seconds=fast must be a number"),
        (("code.sandbox.level=best",), r"sandbox\.level=best is not one of auto"),
        (("code.sandbox.seconds=-1",), r"sandbox\.seconds=-1.* must be above 0"),
        (("math.verifier=oat",), "task.verifier=oat is not one of"),
        (("code.grade_workers=9",), "task.grade_workers holds for all rows"),
        (("math.turn_discount=0.5",), "task.turn_discount holds for all rows"),
        (("code.tools.names=python",), "task.tools.names holds for all rows"),
        (("template=no",), "is not an option of this task; use column=str, tasks=str"),
        (("code.template=r1",), "task.template='r1' is not one of.*of the rows of code"),
        (("math.system_prompt=Hi",), "is not used by task.template=no.*of the rows of math"),
        (("code.options=reward=most",), "is not one of fraction, all.*of the rows of code"),
        (("tasks=gsm8k,code", "gsm8k.template=no"), "task.name=gsm8k has no replies"),
    ],
)
def test_options_that_cannot_work_are_refused_before_data_is_read(
    data: Path, options: tuple[str, ...], message: str
) -> None:
    task = mixed_task(data)
    kept = [option for option in task.options if not any("tasks=" in one for one in options)]
    task.options = (*kept, "code.template=plain", *options)
    task.data = "nonexistent.jsonl"
    with pytest.raises(UserError, match=message):
        check_task_settings(task, 3)


def test_tools_and_missing_data_are_refused(data: Path) -> None:
    task = mixed_task(data)
    task.tools.names = ("calculator",)
    with pytest.raises(UserError, match="task.name=mixed has no tools"):
        check_task_settings(task, 3)
    with pytest.raises(UserError, match="set task.data"):
        check_task_settings(TaskConfig(name="mixed", template="chat"), 1)


@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.parametrize(
    ("value", "shown"), [("art", "'art'"), (None, "None"), ("", "''"), ("Math", "'Math'")]
)
def test_a_row_of_an_unknown_task_is_refused_with_its_number(
    tmp_path: Path, number: int, value: str | None, shown: str
) -> None:
    rows = [math_row(1), code_row(2), math_row(3)]
    rows[number]["task"] = value
    task = mixed_task(write_rows(tmp_path / "rows.jsonl", rows))
    with pytest.raises(UserError) as error:
        find_task("mixed").notes(task)
    assert f"row {number}: the column task holds {shown}" in str(error.value)
    assert "is not one of math, code" in str(error.value)


def test_another_column_may_name_the_task(tmp_path: Path) -> None:
    rows = [{"kind": row.pop("task"), **row} for row in (math_row(1), code_row(2))]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    with pytest.raises(UserError, match="needs one that names the task of each row"):
        find_task("mixed").notes(mixed_task(path))
    task = mixed_task(path, "column=kind")
    assert find_task("mixed").num_train_problems(task) == 2


def test_a_broken_row_is_named_among_the_rows_of_its_task(tmp_path: Path) -> None:
    rows = [code_row(1), math_row(1), math_row(2) | {"answer": "1" * 70_000}]
    task = mixed_task(write_rows(tmp_path / "rows.jsonl", rows))
    with pytest.raises(UserError, match=r"rows.jsonl \(rows of math\) row 1: the column answer"):
        find_task("mixed").notes(task)


def test_templates_that_stop_at_different_strings_need_stop_strings(data: Path) -> None:
    task = mixed_task(data)
    assert stop_strings(task) == ()
    task.options = ("math.template=r1", "code.template=plain")
    with pytest.raises(UserError, match=r"differ \(math: </answer>; code: none\): set rollout"):
        stop_strings(task)


def test_the_rows_and_the_command_of_the_page_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs/data-and-rewards.md").read_text(encoding="utf-8")
    section = page.partition("### A task for each row\n")[2].partition("\n## ")[0]
    [rows] = re.findall(r"```json\n(.*?)```", section, re.DOTALL)
    [command] = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    rows_file = tmp_path / "rows.jsonl"
    rows_file.write_text(rows)
    monkeypatch.chdir(ROOT)

    command = command.replace("\\\n", "").replace("rows.jsonl", str(rows_file))
    settings = main.parse(shlex.split(command)[3:]).settings
    check_task_settings(settings.task, settings.rollout.max_turns)
    problems = find_task("mixed").train_problems(settings.task, 0, 0, 2)

    code, math = sorted(problems, key=lambda problem: problem.row_task)
    assert (math.prompt, math.gold["answer"]) == ("What is 12 * 12?", "144")
    assert code.gold["tests"] == [{"stdin": "3", "expected": "9"}]
    assert mixed.settings_of(settings.task, code).options == ("reward=all",)


def test_the_evaluation_of_mixed_rows_stops_where_their_templates_say() -> None:
    arguments = ["--model", "m", "--suite", "mine=rows.jsonl", "--config.task.name=mixed"]
    options = [
        f"--config.task.options={name}.template=r1_distill_qwen" for name in ("math", "code")
    ]
    assert evaluate.parse([*arguments, *options]).settings.rollout.stop == ()
    options[0] = "--config.task.options=math.template=r1"
    with pytest.raises(UserError, match="set rollout.stop, or templates with the same end"):
        evaluate.parse([*arguments, *options])
    settings = evaluate.parse([*arguments, *options, "--config.rollout.stop=</answer>"]).settings
    assert settings.rollout.stop == ("</answer>",)
    with pytest.raises(UserError, match="there is no tempalte; did you mean template"):
        evaluate.parse([*arguments, "--config.task.options=math.tempalte=r1"])


def test_settings_of_other_tasks_are_the_run_s_own() -> None:
    task = TaskConfig(name="math")
    problem = Problem("0", "math", "", "")
    assert mixed.settings_of(task, problem) is task
    assert mixed.all_settings(task) == {"": task}
