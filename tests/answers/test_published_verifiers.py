"""Verifiers that pay what published runs were paid, against the scores of the original code."""

import importlib.metadata
import itertools
import subprocess
import sys

import pytest

from benchmarks.published.agreement import CORPUS, differing_rows, read_corpus
from jzero.answers import published
from jzero.answers.published import hendrycks, oat, packages, two_stage
from jzero.errors import UserError
from jzero.grade import row_settings
from jzero.workers.pipe import TurnRequest
from jzero.workers.pool import Pool

pytest.importorskip("pylatexenc")
pytest.importorskip("math_verify")

ORIGINAL_MATH_VERIFY = "0.7.0"  # the scores of the corpus were made with this version
STEP = 25  # the default suite compares one row in so many


def scored_rows(verifier: str, step: int) -> list[dict]:
    rows = [row for row in read_corpus(CORPUS) if verifier in row["scores"]]
    return rows[::step]


def skip_for_other_version(verifier: str) -> None:
    uses_package = "math_verify" in published.VERIFIERS[verifier].packages
    if uses_package and importlib.metadata.version("math-verify") != ORIGINAL_MATH_VERIFY:
        pytest.skip("the scores were made with math-verify 0.7.0")


# open_r1_1416fa0 differs from open_r1 by its golds only, and has tests of its own.
RECORDED = [name for name in published.VERIFIERS if name != "open_r1_1416fa0"]


@pytest.mark.parametrize("verifier", RECORDED)
def test_scores_are_the_original_scores(verifier):
    skip_for_other_version(verifier)
    published.load(verifier)
    rows = scored_rows(verifier, STEP)
    assert len(rows) > 70
    assert differing_rows(verifier, rows) == []


@pytest.mark.parametrize("verifier", RECORDED)
def test_all_scores_are_the_original_scores(verifier):
    skip_for_other_version(verifier)
    published.load(verifier)
    assert differing_rows(verifier, scored_rows(verifier, 1)) == []


def test_corpus_has_both_signs_for_each_verifier():
    rows = list(read_corpus(CORPUS))
    assert len(rows) > 10_000
    for verifier in RECORDED:
        scores = [row["scores"][verifier] for row in rows if verifier in row["scores"]]
        assert len(scores) >= 2_000
        assert 0.1 < scores.count(1.0) / len(scores) < 0.7, verifier


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "open('{}','w')",
        "().__class__",
        "e.e",
        "[e for e in e]",
        "(lambda: e)()",
        "'e'*9",
        "f'{{e}}'",
        "exec",
        "e:=5",
    ],
)
def test_an_answer_is_never_evaluated_as_python(text, tmp_path):
    sentinel = tmp_path / "made"
    answer = text.replace("{}", str(sentinel))
    assert not two_stage.is_equal(answer, "5")
    assert not two_stage._is_zero(f"({answer})-(5)")
    assert not sentinel.exists()


def test_each_name_that_sympy_knows_is_refused_or_harmless():
    """Names of two letters reach sympy's parser; none of them may call anything but a function."""
    for name in two_stage._sympy_names():
        for text in (name, f"{name}(2)", f"{name}(e)", f"2{name}"):
            two_stage._is_zero(f"({text.lower()})-(2)")


@pytest.mark.parametrize(
    ("text", "seconds"), [("9**9**9**9", 1), ("(" * 5000, 2), ("9!" + "!" * 60, 1), ("8^8^8", 1)]
)
def test_large_numbers_are_refused_at_once(text, seconds):
    program = f"from jzero.answers.published import two_stage; two_stage.is_equal({text!r}, '5')"
    subprocess.run([sys.executable, "-c", program], timeout=30 + seconds, check=True)


def test_two_commits_of_open_r1_agree_on_golds_of_latex():
    skip_for_other_version("open_r1")
    rows = [row for row in scored_rows("open_r1", STEP) if packages.has_formula(row["gold"])]
    assert len(rows) > 70
    for row in rows:
        grade = packages.grade_open_r1_1416fa0(row["response"], row["gold"])
        assert grade.score == row["scores"]["open_r1"], row


@pytest.mark.parametrize(
    ("gold", "response", "score"),
    [
        ("72", r"\boxed{72}", 1.0),
        ("72", "The answer is $72$.", 1.0),
        ("72", "I do not know", 0.0),
        ("72", r"\boxed{71}", 0.0),
        ("0.5", r"\boxed{\frac{1}{2}}", 1.0),
        ("$72$", r"\boxed{72}", 1.0),
        ("By symmetry, done.", r"\boxed{72}", 0.0),
    ],
)
def test_the_recipes_commit_of_open_r1_reads_plain_golds(gold, response, score):
    """The later commit pays 1 to everything for a gold without LaTeX."""
    published.load("open_r1_1416fa0")
    assert packages.grade_open_r1_1416fa0(response, gold).score == score
    if "$" not in gold:
        assert packages.grade_open_r1("I do not know", gold).score == 1.0


@pytest.mark.parametrize("grade", [oat.grade_r1, oat.grade_r1_full])
@pytest.mark.parametrize("answer", [r"\boxed202", r"\boxed{202", r"so \boxed"])
def test_tags_around_a_box_without_an_end_have_the_form_of_an_answer(grade, answer):
    grade = grade(f"Hm.</think> <answer>{answer} </answer>", "202")
    assert (grade.score, grade.reason) == (0.0, "wrong value")


def brute_force_repetitive(text: str) -> bool:
    suffixes = sorted(text[start:] for start in range(len(text)))
    total = 0
    for first, second in itertools.pairwise(suffixes):
        while first and second and first[0] == second[0]:
            first, second, total = first[1:], second[1:], total + 1
    return 2 * total > 0.2 * len(text) * (len(text) + 1)


@pytest.mark.parametrize("period", [1, 2, 3, 7, 20, 60, 100, 130])
@pytest.mark.parametrize("length", [2, 3, 17, 129, 200])
def test_repetitive_is_its_definition(period, length):
    text = "".join(chr(97 + (i * i) % 23) for i in range(period)) * length
    text = text[:length]
    assert oat.is_repetitive(text) == brute_force_repetitive(text)


@pytest.mark.parametrize("verifier", ["oat_full", "open_r1"])
def test_a_worker_loads_packages_outside_of_the_limit_of_an_item(verifier):
    """Imports take more than the second that the originals give a response."""
    settings = row_settings("boxed", verifier, grade_seconds=0.5)
    gold = {"answer": r"$\frac{3}{4}$", "question": ""}
    with Pool(1) as pool:
        pool.step("right", TurnRequest("math", r"\boxed{\frac{1}{2}+\frac{1}{4}}", gold, settings))
        grades = dict(pool.drain())
    assert grades["right"].correct
    assert pool.counters["restarted"] == 0


HOSTILE = (
    r"\boxed{9^{9^{9^{9^{9}}}}}",
    r"\boxed{" + "(" * 3000 + "x" + ")" * 3000 + "}",
    r"\boxed{" + "x^" * 400 + "2}",
    r"\boxed{(x+1)^9*(y+2)^9*(x-y)^9*(x+y)^9}",
    r"\boxed{" + "9!" * 200 + "}",
    r"\boxed{\sqrt{" + r"\sqrt{" * 200 + "2" + "}" * 201 + "}",
    r"\boxed{" + r"\frac{1}{" * 300 + "x" + "}" * 300 + "}",
    "<answer>" * 3000 + "</think> <answer>" + "1+" * 3000 + "1</answer>",
    r"\boxed{[" + "1," * 5000 + "1]}",
    r"\boxed{\begin{pmatrix}" + "1&" * 500 + r"1\end{pmatrix}}",
)


@pytest.mark.parametrize("verifier", published.VERIFIERS)
def test_hostile_answers_are_bounded_and_honest_ones_stay_right(verifier):
    settings = row_settings("boxed", verifier, grade_seconds=1.0)
    gold: dict = {"answer": "$7$", "question": ""}
    task, right = "math", r"</think> <answer>\boxed{7}</answer>"
    if verifier == "oat_countdown":
        task, gold = "countdown", {"numbers": [8, 1], "target": 7}
        right = "<answer>8-1</answer>"
    elif verifier == "last_number":
        gold["answer"] = "7"
    with Pool(1) as pool:
        for index, response in enumerate(HOSTILE):
            pool.step(("hostile", index), TurnRequest(task, response, gold, settings))
            pool.step(("honest", index), TurnRequest(task, right, gold, settings))
        grades = dict(pool.drain())
    assert len(grades) == 2 * len(HOSTILE)
    for (kind, index), grade in grades.items():
        assert grade.correct == (kind == "honest"), (kind, index, grade)


def test_normal_form_keeps_an_answer_on_which_a_rule_fails():
    assert hendrycks.normal_form(r" \sqrt ") == r"\sqrt"
    assert hendrycks.normal_form(r"3\text{ a}\text{ b} c") == r"3\text{ a}\text{ b} c"


@pytest.mark.parametrize("module", ["antlr4", "pylatexenc", "math_verify"])
def test_a_missing_or_broken_package_is_an_error_and_no_score(module):
    """A right answer must never score 0 because a package is missing."""
    verifiers = [
        name for name, verifier in published.VERIFIERS.items() if module in verifier.packages
    ]
    assert verifiers
    program = f"""
import sys
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {module!r}:
            raise ImportError("broken on purpose")
sys.meta_path.insert(0, Broken())
from jzero.errors import UserError
from jzero.answers import published
for verifier in {verifiers!r}:
    try:
        published.load(verifier)
    except (UserError, ImportError) as error:
        print(type(error).__name__)
    else:
        print("no error")
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.split() == ["UserError"] * len(verifiers)


def test_unknown_packages_are_named():
    broken = published.Verifier(oat.grade_fast, "none", ("no_such_package",))
    published.VERIFIERS["test_only"] = broken
    try:
        with pytest.raises(UserError, match="needs no_such_package: pip install"):
            published.load("test_only")
    finally:
        del published.VERIFIERS["test_only"]
