"""What `jzero train` finds in a data set: columns, numbers, solutions, held-out rows."""

import json
from pathlib import Path

import pytest

from jzero.config import TaskConfig
from jzero.errors import UserError
from jzero.sizing.choices import prompts_of
from jzero.sizing.data import held_out_rows, is_number, read_data


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_columns_are_found_by_their_names_with_a_reason(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"id": 1, "input": "1+1?", "gold": "2"}])

    data = read_data(path, TaskConfig())

    assert (data.problem_column, data.answer_column) == ("input", "gold")
    assert data.problem_reason == "the set has a column of this name, among id, input, gold"


def test_given_columns_take_precedence(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"question": "x", "q2": "1+1?", "answer": "2", "a2": "3"}])

    data = read_data(path, TaskConfig(data="rows(problem=q2,answer=a2)"))

    assert (data.problem_column, data.answer_column) == ("q2", "a2")


def test_a_set_without_questions_is_refused_with_its_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "x", "label": "y"}])

    with pytest.raises(UserError, match=r"has the columns text, label, and none of problem"):
        read_data(path, TaskConfig())
    with pytest.raises(UserError, match=r"answer=no: data .* columns text, label"):
        read_data(path, TaskConfig(data="rows(problem=text,answer=no)"))


@pytest.mark.parametrize("answer", ["72", "-3.5", "$1,200", "10%", 7, 2.5, " 4 "])
def test_numbers(answer: object) -> None:
    assert is_number(answer)


@pytest.mark.parametrize("answer", ["", "x", "1/2", "5 apples", None, True, [1]])
def test_no_numbers(answer: object) -> None:
    assert not is_number(answer)


def test_solutions_in_the_answers_are_measured_and_their_last_line_is_the_answer(
    tmp_path: Path,
) -> None:
    path = write(tmp_path / "a.jsonl", [{"question": "1+1?", "answer": "1+1=2\n#### 2"}])

    data = read_data(path, TaskConfig())

    assert data.has_only_numbers
    assert data.solutions == ["1+1=2\n#### 2"]


def test_messages_are_prompts(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "1+1?"}]
    path = write(tmp_path / "a.jsonl", [{"prompt": messages, "answer": "2"}])

    data = read_data(path, TaskConfig())

    assert data.has_messages
    task = TaskConfig(name="math", template="column:prompt")
    assert prompts_of(task, data) == [messages]


def test_a_tenth_is_held_out_and_always_the_same(tmp_path: Path) -> None:
    rows = [{"question": f"{i}?", "answer": str(i)} for i in range(50)]
    data = read_data(write(tmp_path / "a.jsonl", rows), TaskConfig())

    held_out = held_out_rows(data, 100)

    assert len(held_out) == 5
    assert held_out == held_out_rows(data, 100)
    assert all(row in rows for row in held_out)
    assert len(held_out_rows(data, 3)) == 3
