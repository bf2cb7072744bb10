"""`jzero evaluate --loglikelihood`: sums of log-probabilities against the whole forward pass."""

import json
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import servers

from jzero.attention import xla
from jzero.commands import evaluate
from jzero.errors import UserError
from jzero.model import qwen
from jzero.rollout import multiple_choice
from jzero.rollout.multiple_choice import MultipleChoice
from jzero.types import RowLayout

QUESTIONS = [
    {"question": "A word ", "choices": ["yes", "a long choice", "é"], "answer": 2},
    {"question": "Two and two is", "choices": ["four", "5"], "answer": 0},
    {"question": "The same beginning, and then", "choices": ["a", "b", "c c c", "d"], "answer": 1},
    {"question": "x" * 90, "choices": ["too long for the context", "b"], "answer": 1},
]

pytestmark = pytest.mark.usefixtures("quick_compilation")


def write_questions(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_each_choice_gets_the_sum_of_its_tokens_log_probs(tmp_path, capsys) -> None:
    model = servers.save_model(tmp_path / "model")
    path = write_questions(tmp_path / "mine.jsonl", QUESTIONS)
    out = tmp_path / "out"
    arguments = ["--model", model, "--loglikelihood", str(path), "--out", str(out)]
    command = evaluate.parse([*arguments, *servers.SETTINGS])
    summaries = evaluate.run_loglikelihood(command.questions, command.out, command.settings)

    text = (out / "mine-loglikelihood.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    assert [row["question"] for row in rows] == [row["question"] for row in QUESTIONS[:3]]
    score = whole_forward(model)
    correct, correct_per_character = [], []
    for row, question in zip(rows, QUESTIONS, strict=False):
        sums = []
        for choice in question["choices"]:
            text, context = f"{question['question']} {choice}", question["question"].rstrip()
            sums.append(score(text.encode(), len(context.encode())))
        np.testing.assert_allclose(row["loglikelihoods"], sums, atol=1e-3)
        per_character = np.array(sums) / [len(choice) for choice in question["choices"]]
        np.testing.assert_allclose(row["loglikelihoods_per_character"], per_character, atol=1e-3)
        correct.append(np.argmax(sums) == question["answer"])
        correct_per_character.append(np.argmax(per_character) == question["answer"])
    summary = json.loads((out / "summary.json").read_text())["loglikelihood"]["mine"]
    assert (summary["problems"], summary["dropped"]) == (3, 1)
    assert summary["accuracy"] == pytest.approx(np.mean(correct))
    assert summary["accuracy_per_character"] == pytest.approx(np.mean(correct_per_character))
    assert summary["stderr"] == pytest.approx(np.std(correct, ddof=1) / 3**0.5)
    assert summaries["mine"] == summary
    printed = capsys.readouterr().out
    assert "mine: 1 of 4 questions dropped, longer than 96 tokens" in printed
    table = evaluate.likelihood_table(summaries)
    assert re.search(rf"mine +3 +{sum(correct)} of 3 ", table)


def whole_forward(model: str):
    """(bytes, number of the context's bytes) -> the sum of the log-probs of the others."""
    alone = servers.load_alone(model)
    arch, params = alone.engine.model, alone.params
    ids_of_byte = [alone.tokenizer.convert_tokens_to_ids(piece) for piece in pieces_of_bytes()]

    def score(text: bytes, num_context: int) -> float:
        ids = [ids_of_byte[byte] for byte in text]
        padded = np.zeros((1, servers.ROOM), np.int32)
        padded[0, : len(ids)] = ids
        segments = jnp.asarray((np.arange(servers.ROOM) < len(ids))[None].astype(np.int32))

        def attend(q, k, v, layer, carry):
            return xla.packed(q, k, v, segments, RowLayout(0, 1, servers.ROOM)), carry

        positions = jnp.arange(servers.ROOM)[None]
        hidden, _ = qwen.forward(
            arch, params, jnp.asarray(padded), positions, attend, dtype=jnp.float32
        )
        logits = np.asarray(qwen.head(arch, params, hidden, jnp.float32), np.float64)[0]
        logps = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
        return sum(logps[i - 1, ids[i]] for i in range(num_context, len(ids)))

    return score


def pieces_of_bytes() -> list[str]:
    """Returns the tokenizer's name of each byte."""
    names = servers.bytes_to_unicode()
    return [names[byte] for byte in range(256)]


def test_a_space_at_the_end_of_a_question_belongs_to_the_choice() -> None:
    tok = servers.byte_tokenizer()
    tokens, num_question = multiple_choice.encode_choice(tok, "ab  ", "c")
    assert (len(tokens), num_question) == (6, 2)


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "line 2 is damaged"),
        ('{"choices": ["a", "b"], "answer": 0}', 'line 2: "question" has to be a text'),
        ('{"question": "a", "choices": ["a"], "answer": 0}', 'line 2: "choices" .* two texts'),
        ('{"question": "a", "choices": ["a", ""], "answer": 0}', "none empty"),
        ('{"question": "a", "choices": "ab", "answer": 0}', '"choices" has to be a list'),
        ('{"question": "a", "choices": ["a", "b"], "answer": 2}', "from 0 to 1"),
        ('{"question": "a", "choices": ["a", "b"], "answer": true}', '"answer" has to be'),
    ],
)
def test_a_damaged_question_is_named_by_its_line(tmp_path, line, message) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps(QUESTIONS[0]) + "\n" + line + "\n", encoding="utf-8")
    with pytest.raises(UserError, match=message):
        multiple_choice.read_questions(path)


def test_files_without_questions_are_refused(tmp_path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    for name, message in (("empty", "no questions"), ("missing", "cannot read")):
        with pytest.raises(UserError, match=message):
            multiple_choice.read_questions(tmp_path / f"{name}.jsonl")


def test_ties_and_lengths_decide_as_defined() -> None:
    problem = MultipleChoice("q", ("a", "bbbb"), 1)
    answered = multiple_choice.AnsweredChoice(problem, (-2.0, -4.0), (-2.0, -1.0))
    assert not answered.is_correct and answered.is_correct_per_character
    summary = multiple_choice.summarize([answered], 0)
    assert (summary["accuracy"], summary["accuracy_per_character"]) == (0, 1)


@pytest.mark.parametrize("arguments", [[], ["--suite", "a", "--loglikelihood", "b"]])
def test_a_command_asks_for_suites_or_for_questions(arguments) -> None:
    with pytest.raises((SystemExit, UserError)):
        evaluate.parse(["--model", "m", *arguments])
