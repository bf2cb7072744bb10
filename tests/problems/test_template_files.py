"""Prompts from files and from columns: word for word, and one line for every mistake."""

import json
from pathlib import Path
from typing import Any

import pytest

from jzero import config, setup
from jzero.errors import UserError
from jzero.problems import problem_sets
from jzero.problems.prompts import MATH_TEMPLATES, find_template
from jzero.tasks import TASKS, check_task_settings, math_problems, suites
from jzero.types import Problem

QUESTION = "What is {x} in \\frac{1}{2}x = 1? {question}"
PUBLISHED = "Solve {this}, in \\boxed{}.\n\nProblem: {question}\n\nAssistant: <think>"


def template_file(folder: Path, text: str, name: str = "prompt.txt") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def prompt_of(template: str, system_prompt: str = "") -> Any:
    task = config.TaskConfig(name="math", template=template, system_prompt=system_prompt)
    return math_problems.to_problem(task, "math", "x", problem_sets.Row(QUESTION, "2")).prompt


def check_problem(task: config.TaskConfig, max_turns: int = 1) -> None:
    """Does what a run does: checks the settings, and makes a prompt."""
    check_task_settings(task, max_turns)
    math_problems.to_problem(task, "math", "x", problem_sets.Row(QUESTION, "2"))


# Files


@pytest.mark.parametrize("end", ["", "\n"])
def test_a_text_file_is_the_prompt_word_for_word(tmp_path: Path, end: str) -> None:
    path = template_file(tmp_path, PUBLISHED + end)

    before, _, after = PUBLISHED.partition("{question}")
    assert prompt_of(path) == before + QUESTION + after


def test_a_second_newline_at_the_end_belongs_to_the_prompt(tmp_path: Path) -> None:
    assert prompt_of(template_file(tmp_path, "{question}\n\n")) == f"{QUESTION}\n"


@pytest.mark.parametrize("ending", ["jinja", "j2", "jinja2"])
def test_a_jinja_file_is_rendered(tmp_path: Path, ending: str) -> None:
    text = "{% for word in ['a', 'b'] %}{{ word }} {% endfor %}{question} {{ question }}\n"

    prompt = prompt_of(template_file(tmp_path, text, f"prompt.{ending}"))

    assert prompt == "a b {question} " + QUESTION


def test_a_file_may_be_the_message_of_a_user(tmp_path: Path) -> None:
    path = "chat:" + template_file(tmp_path, "Q: {question}")
    message = {"role": "user", "content": f"Q: {QUESTION}"}

    assert prompt_of(path) == [message]
    assert prompt_of(path, "Be brief.") == [{"role": "system", "content": "Be brief."}, message]


def test_a_file_in_the_current_folder_needs_no_slash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template_file(tmp_path, "In this folder: {question}", "here.txt")
    monkeypatch.chdir(tmp_path)

    assert str(prompt_of("here.txt")).startswith("In this folder: What")


def test_countdown_has_its_numbers_and_its_target(tmp_path: Path) -> None:
    path = template_file(tmp_path, "Use {numbers} to make {target}, as in {1 + 2}.")
    task = config.TaskConfig(template=path)

    [problem] = TASKS["countdown"].train_problems(task, 0, 0, 1)

    numbers, target = problem.gold["numbers"], problem.gold["target"]
    assert problem.prompt == f"Use {numbers} to make {target}, as in {{1 + 2}}."


def test_a_file_comes_before_the_prompts_of_a_countdown_set(tmp_path: Path) -> None:
    rows = [{"input": "own", "gt_answer": {"numbers": [i, 3], "target": i + 3}} for i in range(9)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def prompt(template: str) -> Any:
        task = config.TaskConfig(data=str(data), template=template)
        return TASKS["countdown"].train_problems(task, 0, 0, 1)[0].prompt

    assert prompt("r1") == "own"
    assert str(prompt(template_file(tmp_path, "{numbers}: make {target}"))).startswith("[")


def test_suites_are_asked_with_the_file(tmp_path: Path) -> None:
    data = tmp_path / "set.jsonl"
    data.write_text(json.dumps({"problem": "1 + 1?", "answer": "2"}) + "\n")
    task = config.TaskConfig(template=template_file(tmp_path, "Q: {question}"))

    _, [problem] = suites.load_suite(f"mine={data}", task, 0, 0)

    assert problem.prompt == "Q: 1 + 1?"


MISTAKES = {
    "none.txt": (None, "none.txt: No such file or directory"),
    "folder.txt": ("folder", "folder.txt is a folder, a pipe or a device"),
    "bytes.txt": (b"\xff\xfe{question}", "bytes.txt is not in UTF-8"),
    "empty.txt": (b"", "empty.txt does not hold the question: write {question} where it goes"),
    "other.txt": (b"Solve {problem}!", "other.txt does not hold the question"),
    "no.jinja": (b"Solve {question}!", "does not hold the question: write {{ question }} where"),
    "name.jinja": (b"{{ question }} {{ problem }}", "has the name problem, and this task has"),
    "open.jinja": (b"{{ question }}\n{% if x %}", "open.jinja line 2: TemplateSyntaxError: "),
    "filter.jinja": (b"{{ question | shout }}", "filter.jinja line 1: TemplateAssertionError"),
    "zero.jinja": (b"{{ question }}{{ 1 // 0 }}", "zero.jinja: ZeroDivisionError: "),
    "attr.jinja": (b"{{ question.x }}", "attr.jinja: UndefinedError: "),
    "read.jinja": (b"{{ question }}{% include '/etc/passwd' %}", "read.jinja: TypeError: "),
    "code.jinja": (
        b"{{ question.__class__.__mro__[1].__subclasses__() }}",
        "code.jinja: SecurityError: ",
    ),
    "method.jinja": (b"{{ question }}{{ [].append(1) }}", "method.jinja: SecurityError: "),
}


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.parametrize("prefix", ["", "chat:"])
def test_a_mistake_in_a_file_is_one_line(tmp_path: Path, name: str, prefix: str) -> None:
    content, message = MISTAKES[name]
    path = tmp_path / name
    if content == "folder":
        path.mkdir()
    elif isinstance(content, bytes):
        path.write_bytes(content)

    with pytest.raises(UserError) as error:
        check_problem(config.TaskConfig(name="math", template=f"{prefix}{path}"))

    assert str(error.value).startswith(f"task.template={path}")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["no name", "Make {target}."])
def test_a_file_is_checked_before_a_run_begins(tmp_path: Path, text: str) -> None:
    settings = config.Config(task=config.TaskConfig(template=template_file(tmp_path, text)))

    with pytest.raises(UserError, match="{question}, or its parts {numbers}, {spaced}, {target},"):
        setup.check(settings, tmp_path / "run")


def test_a_file_of_text_has_no_replies_and_a_chat_file_has(tmp_path: Path) -> None:
    path = template_file(tmp_path, "{question}")
    task = config.TaskConfig(name="math_multiturn", template=path)

    with pytest.raises(UserError, match="task.name=math_multiturn has no replies in template"):
        check_problem(task, max_turns=2)
    check_problem(config.TaskConfig(name="math_multiturn", template=f"chat:{path}"), max_turns=2)


def test_a_system_prompt_without_a_place_is_a_mistake(tmp_path: Path) -> None:
    path = template_file(tmp_path, "{question}")
    task = config.TaskConfig(name="math", template=path, system_prompt="Be brief.")

    with pytest.raises(UserError, match=r"task.system_prompt='Be brief.' is not used by"):
        check_problem(task)


def test_a_name_that_is_nothing_lists_what_there_is() -> None:
    with pytest.raises(UserError, match="'r2' is not one of qwen_math.*a file.*chat:FILE.*column:"):
        find_template("r2", MATH_TEMPLATES)


# The mark of an answer


def correct(response: str, answer_mark: str = "") -> bool:
    """Grades a response to the prompt of a file, as a process that cannot read the file."""
    task = config.TaskConfig(
        name="math", template="gone.txt", options=(f"answer_mark={answer_mark}",)
    )
    return TASKS["math"].grade(response, {"answer": "7", "question": "?"}, task).correct


def test_a_box_marks_the_answer_unless_the_setting_says_otherwise() -> None:
    assert correct("\\boxed{7}")
    assert not correct("thoughts</think> <answer>7</answer>")
    assert correct("thoughts</think> <answer>7</answer>", answer_mark="r1")
    assert correct("it is 7", answer_mark="number")


def test_a_mark_is_for_sets_of_questions() -> None:
    with pytest.raises(UserError, match="answer_mark=number is not an option of this task"):
        check_task_settings(config.TaskConfig(options=("answer_mark=number",)), 1)


# Columns

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 3 + 4?"},
]


def data_set(folder: Path, rows: list[dict[str, Any]]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def column_problems(data: str, column: str, **changes: Any) -> list[Problem]:
    rows = str(config.Rows(data, **changes))
    task = config.TaskConfig(name="math", data=rows, template=f"column:{column}")
    check_task_settings(task, 1)
    return math_problems.train_problems(task, 0, 0, 1)


@pytest.mark.parametrize("prompt", [PUBLISHED, MESSAGES])
def test_a_prompt_of_the_set_is_unchanged(tmp_path: Path, prompt: Any) -> None:
    data = data_set(tmp_path, [{"prompt": prompt, "answer": "7"}])

    [problem] = column_problems(data, "prompt")

    assert problem.prompt == prompt
    words = prompt if isinstance(prompt, str) else "What is 3 + 4?"
    assert problem.gold == {"answer": "7", "question": words}


def test_the_question_is_in_its_own_column_where_there_is_one(tmp_path: Path) -> None:
    data = data_set(tmp_path, [{"input": PUBLISHED, "problem": "Q?", "answer": "7"}])

    [problem] = column_problems(data, "input")

    assert problem.prompt == PUBLISHED
    assert problem.gold["question"] == "Q?"


def test_the_answer_of_a_set_in_verls_layout_is_read(tmp_path: Path) -> None:
    answer = {"ground_truth": "7", "style": "rule"}
    data = data_set(tmp_path, [{"prompt": MESSAGES, "reward_model": answer}])

    [problem] = column_problems(data, "prompt", answer="reward_model.ground_truth")

    assert problem.prompt == MESSAGES
    assert problem.gold["answer"] == "7"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input": "x", "answer": "7"}, "has columns answer, input: task.template=column:prompt"),
        ({"prompt": 5, "answer": "7"}, "row 0: the column prompt holds 5, and neither text nor"),
        ({"prompt": "", "answer": "7"}, "row 0: the column prompt holds '', and neither text"),
        ({"prompt": [{"role": "user"}], "answer": "7"}, "neither text nor messages with role"),
    ],
)
def test_a_column_without_prompts_is_one_line(
    tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as error:
        column_problems(data_set(tmp_path, [row]), "prompt")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_messages_for_another_template_are_told_of_the_column(tmp_path: Path) -> None:
    data = data_set(tmp_path, [{"prompt": MESSAGES, "answer": "7"}])
    task = config.TaskConfig(name="math", data=data, template="qwen_math")

    with pytest.raises(UserError, match="a list of messages.*task.template=column:prompt"):
        math_problems.train_problems(task, 0, 0, 1)


def test_a_suite_without_the_column_is_refused(tmp_path: Path) -> None:
    data = data_set(tmp_path, [{"problem": "Q?", "answer": "7"}])
    task = config.TaskConfig(name="math", template="column:prompt")

    with pytest.raises(UserError, match="takes prompts from a column prompt"):
        suites.load_suite(f"mine={data}", task, 0, 0)


@pytest.mark.parametrize(
    ("name", "template", "message"),
    [
        ("countdown", "column:prompt", "task.name=countdown makes its own prompts"),
        ("math", "column:", "'column:' names no column"),
    ],
)
def test_a_column_that_cannot_be_is_refused(name: str, template: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_task_settings(config.TaskConfig(name=name, template=template), 1)
