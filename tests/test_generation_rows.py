"""Rows of generated responses: their columns, their file after kills, and the line of progress."""

import json
import random
from datetime import date
from pathlib import Path

import datasets
import pytest

from jzero import http
from jzero.generation import rows
from jzero.generation.progress import Progress
from jzero.generation.rows import Response, RowFile
from jzero.generation.servers import is_about_prompt, with_thoughts
from jzero.problems import problem_sets
from jzero.types import Grade, Problem, Turn

IDS = [f"math/train/{i}" for i in range(5)]
N = 3


def make_row(number: int, sample_index: int, error: str | None = None) -> dict:
    columns = {"uuid": f"u{number}", "level": number}
    problem = Problem(IDS[number], "math", f"{number}?", {"answer": "1", "question": "?"}, columns)
    turn = Turn(0, 4, f"text {number} {sample_index}", "stop", Grade(1.0, True, "correct"))
    response = Response(error=error) if error else Response(turn, "thoughts")
    return rows.make_row(problem, sample_index, response, "m")


def all_rows(is_grouped: bool) -> list[dict]:
    made = []
    for number in range(len(IDS)):
        of_problem = [make_row(number, k, "lost" if k == number else None) for k in range(N)]
        made += [rows.group(of_problem)] if is_grouped else of_problem
    return made


def open_file(path: Path, is_grouped: bool) -> RowFile:
    return RowFile(path, IDS, N, is_grouped, path.with_suffix(".tmp"))


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("is_grouped", [False, True], ids=["flat", "grouped"])
def test_a_file_that_is_cut_at_any_byte_keeps_its_complete_rows(
    is_grouped: bool, tmp_path: Path
) -> None:
    path = tmp_path / "out.jsonl"
    made = all_rows(is_grouped)
    with open_file(path, is_grouped) as file:
        file.append(made)
    content = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(content) if byte == 10]

    for size in {*range(0, len(content), 37), *ends, *[end - 1 for end in ends]}:
        path.write_bytes(content[:size])
        count = sum(end <= size for end in ends)
        with open_file(path, is_grouped) as file:
            assert len(file.places) == count
            file.append(made[count:])
        assert path.read_bytes() == content, size


@pytest.mark.parametrize("is_grouped", [False, True], ids=["flat", "grouped"])
def test_rows_in_any_order_among_other_lines_end_in_order_and_once(
    is_grouped: bool, tmp_path: Path
) -> None:
    path = tmp_path / "out.jsonl"
    made = all_rows(is_grouped)
    junk = [b"\0" * 40, b"{}", b"[]", b'{"id": "math/train/9", "sample": 0}', b"{", b"\xff", b""]
    rng = random.Random(0)
    for _ in range(50):
        lines = [json.dumps(row).encode() for row in made]
        shuffled = lines + rng.sample(lines, 3) + rng.sample(junk, 4)
        rng.shuffle(shuffled)
        path.write_bytes(b"\n".join(shuffled) + b"\n")
        with open_file(path, is_grouped) as file:
            file.sort()
            assert file.num_errors == N
            assert file.read((2, 0)) == made[2 if is_grouped else 2 * N]
        assert lines_of(path) == made


def test_an_answer_replaces_the_error_of_an_earlier_row(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with open_file(path, False) as file:
        file.append([make_row(1, 1, "lost"), make_row(0, 0), make_row(1, 1)])
        assert file.num_errors == 0
        file.sort()
    assert lines_of(path) == [make_row(0, 0), make_row(1, 1)]
    # The same if the command ends before it has sorted.
    path.write_bytes(
        b"".join(
            json.dumps(row).encode() + b"\n" for row in (make_row(1, 1), make_row(1, 1, "lost"))
        )
    )
    with open_file(path, False) as file:
        assert file.num_errors == 0


def test_a_grouped_row_is_its_flat_rows() -> None:
    flat_rows = [make_row(1, 0), make_row(1, 1, "lost"), make_row(1, 2)]
    grouped = rows.group(flat_rows)
    assert grouped["completions"] == ["text 1 0", None, "text 1 2"]
    assert grouped["error"] == [None, "lost", None]
    assert grouped["uuid"] == "u1" and "sample" not in grouped and "completion" not in grouped
    assert rows.ungroup(grouped) == flat_rows


def test_columns_of_the_set_keep_their_names_unless_one_of_ours_has_it() -> None:
    columns = {"id": 7, "source_id": 8, "score": 0.5, "level": "x", "completions": [1]}
    problem = Problem("p", "math", "?", {"answer": "1"}, columns)
    row = rows.make_row(problem, 0, Response(error="lost"), "m")
    assert row["id"] == "p" and row["score"] is None
    assert row["source_source_id"] == 7 and row["source_id"] == 8
    assert row["source_score"] == 0.5 and row["level"] == "x" and row["source_completions"] == [1]


def test_columns_that_json_cannot_hold_are_text_or_left_out() -> None:
    dataset = datasets.Dataset.from_dict(
        {
            "day": [date(2025, 1, 2), None],
            "share": [0.5, float("nan")],
            "bytes": [b"\0", b"\1"],
            "nested": [{"a": [1.5]}, {"a": [float("inf")]}],
        }
    )
    assert problem_sets.read_readable_columns(dataset) == [
        {"day": "2025-01-02", "share": 0.5, "nested": {"a": [1.5]}},
        {"day": None, "share": None, "nested": {"a": [None]}},
    ]


@pytest.mark.parametrize(
    ("reasoning", "content", "is_cut", "text"),
    [
        (None, "a", False, "a"),
        ("", "a", False, "a"),
        ("\nt\n", "\n\na", False, "<think>\nt\n</think>\n\na"),
        ("t", "", True, "<think>\nt"),
        ("t", "a", True, "<think>\nt\n</think>\n\na"),
        ("t", "", False, "<think>\nt\n</think>\n\n"),
    ],
)
def test_thoughts_stand_before_the_answer(
    reasoning: str | None, content: str, is_cut: bool, text: str
) -> None:
    assert with_thoughts(reasoning, content, is_cut) == text


def test_a_refusal_is_about_the_prompt_or_about_the_server() -> None:
    about_server = {0, 401, 402, 403, 404, 405, 407, *range(300, 400)}
    for status in (0, *range(300, 500)):
        refusal = http.Refused("no", status)
        assert is_about_prompt(refusal) == (status not in about_server)


def test_the_line_of_progress_has_a_rate_and_the_time_that_is_left(
    capsys: pytest.CaptureFixture[str],
) -> None:
    progress = Progress("responses", total=5000, done=1000, seconds=1e9)
    progress.add(30, tokens=6000)
    progress.add(10, tokens=2000, errors=2)
    assert progress.line(20.0) == (
        "1,040 of 5,000 responses, 2 errors, 2.0 responses/s, 400 tokens/s, 0:33:00 left"
    )
    assert capsys.readouterr().out == ""
    progress.add(3960, tokens=0)
    assert "5,000 of 5,000 responses, 2 errors" in capsys.readouterr().out
