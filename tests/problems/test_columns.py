"""The column of questions holds text; whatever else it holds is refused, and not made text."""

import json
from pathlib import Path

import datasets
import pytest

from jzero.errors import UserError
from jzero.problems import problem_sets

MESSAGES = [{"role": "user", "content": "What is 1 + 1?"}]


@pytest.mark.parametrize(
    ("prompt", "kind"), [(MESSAGES, "a list of messages"), (None, "None"), (5, "5")]
)
def test_a_question_that_is_no_text_is_refused(prompt: object, kind: str) -> None:
    dataset = datasets.Dataset.from_list([{"prompt": prompt, "answer": "2"}])
    with pytest.raises(UserError, match=f"task.data=DATA row 0: the column prompt holds {kind}"):
        problem_sets.read_rows(dataset, "", "", "DATA")
    with pytest.raises(UserError, match=f"row 0: the column prompt holds {kind}"):
        problem_sets.read_questions(dataset, "DATA")


def test_a_question_of_text_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "What is 1 + 1?", "answer": 2}) + "\n")
    dataset = problem_sets.load_split(str(path), "train")
    [row] = problem_sets.read_rows(dataset, "", "", str(path))
    assert row == problem_sets.Row("What is 1 + 1?", 2)
