"""Environments without a model: what is printed, and what is found to be not deterministic."""

import io
from pathlib import Path

import pytest

from jzero.errors import UserError
from jzero.play import Start, play, read_answer, read_answers, read_row

SHOP = '''
import itertools, random

class Shop:
    """The price depends on the seed, the name on the row."""

    def reset(self, row, seed):
        self.price, self.turns = random.Random(seed).randint(1, 9), 0
        return f"{row.get('name', 'A pen')} costs {self.price}. How much are 2?"

    def step(self, response):
        self.turns += 1
        if str(2 * self.price) in response:
            return None, {"correct": 1, "right": 1.0}, True
        return "No.", -0.5, self.turns >= 3

_COUNT = itertools.count()

class Forgetful(Shop):
    def reset(self, row, seed):
        return f"{next(_COUNT)}"

class Moody(Shop):
    def step(self, response):
        return "No.", float(next(_COUNT)), False

class Shaped(Shop):
    """Pays 0.1 for each try, and does not say what success is."""
    def step(self, response):
        return "No.", 0.1, False

class Broken(Shop):
    def step(self, response):
        raise RuntimeError("out of pens")

class Pair(Shop):
    def step(self, response):
        return "No.", 1.0
'''


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    path = tmp_path / "shop.py"
    path.write_text(SHOP)
    return path


def played(name: str, answers: list[str], row: dict | None = None) -> tuple[bool, str]:
    target = io.StringIO()
    is_same = play(name, Start(row or {}, 1), iter(answers), target)
    return is_same, target.getvalue()


def test_an_episode_is_printed_step_by_step(shop: Path) -> None:
    is_same, text = played(f"{shop}:Shop", ["hm", "6"], {"name": "Ink"})

    assert is_same
    assert text.splitlines() == [
        "observation",
        "  | Ink costs 3. How much are 2?",
        "reset twice: the same",
        "",
        'step 1: "hm"',
        "  reward -0.5, done False",
        "  | No.",
        "",
        'step 2: "6"',
        "  reward 1, right 1, correct, done True",
        "",
        "2 steps, total reward 0.5, over",
        "played again: the same",
    ]


def test_shaped_rewards_without_a_verdict_are_named(shop: Path) -> None:
    """A reward above 0 counts as correct, so the accuracy of such an environment is 100 %."""
    _, shaped = played(f"{shop}:Shaped", ["a"])
    _, judged = played(f"{shop}:Shop", ["hm", "6"])

    note = "every step with a reward above 0 counts as correct"
    assert note in shaped and '{"progress": 0.1, "correct": 0}' in shaped
    assert note not in judged


def test_answers_after_the_end_are_not_sent(shop: Path) -> None:
    _, text = played(f"{shop}:Shop", ["6", "never"])
    assert "never" not in text


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Forgetful", "reset is not a function of row and seed"),
        ("Moody", "step 1 is not a function of the responses"),
    ],
)
def test_what_is_not_deterministic_is_found(shop: Path, name: str, reason: str) -> None:
    is_same, text = played(f"{shop}:{name}", ["a"])
    assert not is_same
    assert f"not deterministic: {reason}" in text


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Broken", r"step 1 failed \(RuntimeError: out of pens\)"),
        ("Pair", r"step 1 failed \(TypeError: step returned .* it has to be \(reply, reward, done"),
        ("Absent", "is not a module:Class or FILE.py:Class"),
    ],
)
def test_mistakes_are_one_line(shop: Path, name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        played(f"{shop}:{name}", ["a"])


def test_lines_are_answers_and_json_strings_may_have_line_breaks() -> None:
    source = io.StringIO('one\n"two\\nlines"\n"open\n/quit\nnever\n')
    assert list(read_answers(source, None)) == ["one", "two\nlines", '"open']
    assert read_answer('"a" and "b"') == '"a" and "b"'


def test_rows_come_from_a_data_set(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"name": "Ink"}\n{"name": "Pen"}\n')

    assert read_row(str(path), 1) == {"name": "Pen"}
    with pytest.raises(UserError, match="--row 2: .* has 2 rows, from 0"):
        read_row(str(path), 2)
