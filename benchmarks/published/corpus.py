r"""Makes the corpus that holds jzero's published verifiers to the scores of the original code.

Three commands, in this order:

    python benchmarks/published/corpus.py rows --data DATA --out rows.jsonl
    PYTHON benchmarks/published/corpus.py score --originals FOLDER rows.jsonl --out scored.jsonl
    python benchmarks/published/corpus.py pack scored.jsonl --out tests/answers/published.jsonl.xz \
        --again again.jsonl

`rows` writes responses and golds: the golds of GSM8K, MATH, AIME, AMC and OlympiadBench and the
pairs of the grader's case files under DATA, each in the forms in which models write answers, right
and wrong, and Countdown problems with right, wrong and malformed equations. The rows depend on the
data and on SEED only.

`score` runs the original code on every row. PYTHON is that of the originals' own environment (3.11
with math-verify 0.7.0, sympy 1.13.3, pylatexenc 2.11 and regex) and a FOLDER with

    math_grader.py   understand-r1-zero at 8d31b35, understand_r1_zero/math_grader.py
    countdown.py     oat at 56b9b57, oat/oracles/countdown.py
    gsm8k.py         oat at b966394, oat/oracles/gsm8k.py
    rewards.py       open-r1 at e4ac3ae, src/open_r1/rewards.py

A row on which an original takes longer than SECONDS of processor time has the score null: whether
it is paid depends on the machine. The originals' own limits, which are on the clock, are off.

`pack` compresses the result. It leaves out rows with a null, and rows to which a second run of
`score`, which may have fewer rows and another order, gives other scores: what sympy has cached of
earlier rows decides a few of them.
"""

import argparse
import contextlib
import importlib
import io
import json
import lzma
import os
import random
import re
import signal
import sys
import types
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path

SEED = 35
SECONDS = 2  # of one original on one row
MATH_VERIFIERS = (
    "oat_fast",
    "oat_full",
    "oat_r1",
    "oat_r1_full",
    "open_r1",
    "math_verify",
    "sympy",
    "last_number",
)

Row = dict[str, object]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    rows = commands.add_parser("rows")
    rows.add_argument("--data", type=Path, required=True)
    score = commands.add_parser("score")
    score.add_argument("rows", type=Path)
    score.add_argument("--originals", type=Path, required=True)
    pack = commands.add_parser("pack")
    pack.add_argument("rows", type=Path)
    pack.add_argument("--again", type=Path, help="rows of a second run")
    for command in (rows, score, pack):
        command.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.command == "rows":
        write_lines(args.out, make_rows(args.data))
    elif args.command == "score":
        write_lines(args.out, score_rows(args.rows, args.originals))
    else:
        lines = args.rows.read_text(encoding="utf-8").splitlines(keepends=True)
        again = {} if args.again is None else {key_of(row): row for row in read_lines(args.again)}
        kept = [line for line in lines if is_certain(json.loads(line), again)]
        args.out.write_bytes(lzma.compress("".join(kept).encode(), preset=9))
        print(f"{len(kept)} rows, {len(lines) - len(kept)} left out, {args.out.stat().st_size} B")


def key_of(row: Row) -> str:
    return json.dumps([row["task"], row["response"], row["gold"]])


def is_certain(row: dict, again: dict[str, dict]) -> bool:
    """Returns whether no original was too slow, and a second run gave the same scores."""
    second = again.get(key_of(row), row)
    return None not in row["scores"].values() and second["scores"] == row["scores"]


def write_lines(path: Path, rows: Iterator[Row]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for count, row in enumerate(rows, 1):
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            if count % 500 == 0:
                print(f"{count} rows", file=sys.stderr)


# --- rows -----------------------------------------------------------------------------------------


def make_rows(data: Path) -> Iterator[Row]:
    """Yields the rows of the corpus: {"task", "response", "gold"}."""
    rng = random.Random(SEED)
    for gold in golds(data, rng):
        for response in rng.sample(responses_to(gold, rng), 6):
            yield {"task": "math", "response": response, "gold": dressed_gold(gold, rng)}
    for answer, gold in pairs(data):
        for response in (rf"So \boxed{{{answer}}}.", f"a</think> <answer>{answer}</answer>"):
            yield {"task": "math", "response": response, "gold": gold}
        yield {"task": "math", "response": f"The answer is ${answer}$.", "gold": f"${gold}$"}
    for problem in read_lines(data / "countdown" / "test.jsonl"):
        for response in rng.sample(equations(problem, rng), 5):
            truth = {"numbers": problem["numbers"], "target": problem["target"]}
            yield {"task": "countdown", "response": response, "gold": json.dumps(truth)}


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def golds(data: Path, rng: random.Random) -> list[str]:
    """Returns about 1,500 different golds of the real data sets."""
    found: list[str] = []
    for name, most in (
        ("gsm8k/test.jsonl", 150),
        ("math/math12k_train.jsonl", 700),
        ("math/math500.jsonl", 300),
        ("eval/aime24.jsonl", 10),
        ("eval/amc.jsonl", 30),
        ("eval/olympiadbench.jsonl", 300),
    ):
        answers = [row["answer"] for row in read_lines(data / name)]
        texts = [answer[0] if isinstance(answer, list) else answer for answer in answers]
        distinct = sorted({str(text) for text in texts if text is not None})
        found += rng.sample(distinct, min(most, len(distinct)))
    return list(dict.fromkeys(found))


def dressed_gold(gold: str, rng: random.Random) -> object:
    """Returns the gold as one of the data sets would write it."""
    choice = rng.random()
    if choice < 0.45:
        return gold
    if choice < 0.8:
        return f"${gold}$"
    if choice < 0.9:
        return rf"Adding both gives \boxed{{{gold}}}."
    return [gold, "-17"]


def pairs(data: Path) -> Iterator[tuple[str, str]]:
    """Yields the answers and golds of the grader's public case files."""
    for name in ("hard_cases.jsonl", "public_cases.jsonl"):
        for case in read_lines(data / "grader" / name):
            answer, gold = case.get("pred_answer"), case.get("gold_answer", case.get("gold"))
            if isinstance(answer, str) and isinstance(gold, str):
                yield answer, gold


def answers_to(gold: str, rng: random.Random) -> list[str]:
    """Returns equal and different ways to write the gold."""
    answers = [gold, gold, f" {gold} ", f"{gold}.", rf"\text{{{gold}}}", f"x = {gold}", f"x={gold}"]
    answers += [rf"{gold}\text{{ cm}}", f"{gold} cm", rf"{gold}\%", rf"\${gold}", f"{gold}^\\circ"]
    answers += [gold.replace(r"\frac", r"\dfrac"), gold.replace(r"\frac", r"\tfrac")]
    answers += [gold.replace(r"\left", "").replace(r"\right", ""), gold.replace(" ", "")]
    answers += [gold.replace(",", ", "), gold.replace(r"\sqrt{", r"\sqrt {"), f"{{{gold}}}"]
    answers += [f"{gold}, 1", f"({gold})", f"{gold} or 2", "0", "1", "-1", "x", "", gold[:-1]]
    digits = list(re.finditer(r"\d", gold))
    if digits:
        digit = rng.choice(digits)
        other = str((int(digit[0]) + rng.randint(1, 9)) % 10)
        answers += 3 * [gold[: digit.start()] + other + gold[digit.end() :]]
    if re.fullmatch(r"-?\d+", gold):
        number = int(gold)
        answers += [f"{number:,}", f"{number}.0", f"{number}.00", f"+{number}", f"0{number}"]
        answers += [f"{2 * number}/2", rf"\frac{{{2 * number}}}{{2}}", f"{number - 1}+1"]
        answers += [f"{number} dollars", f"{number} miles", f"{number}^1", f"{number} 1/2"]
    fraction = re.fullmatch(r"(-?)\\d?frac\{(\d+)\}\{(\d+)\}", gold)
    if fraction and int(fraction[3]):
        value = Fraction(int(fraction[1] + fraction[2]), int(fraction[3]))
        answers += [f"{value}", f"{float(value)}", f"{float(value):.2f}", f"{float(value):.6g}"]
        answers += [rf"\frac{{{2 * value.numerator}}}{{{2 * value.denominator}}}"]
    terms = re.fullmatch(r"([^,+=(){}]+)\+([^,+=(){}]+)", gold)
    if terms:
        answers += [f"{terms[2]}+{terms[1]}", f"({gold})*1", f"{gold}+0"]
    items = re.fullmatch(r"([^,(){}]+),([^,(){}]+)", gold)
    if items:
        answers += [f"{items[2]},{items[1]}", f"{items[1]} and {items[2]}"]
    return answers


def responses_to(gold: str, rng: random.Random) -> list[str]:
    """Returns responses in the forms in which models write answers."""

    def answer() -> str:
        return rng.choice(answers_to(gold, rng))

    return [
        rf"We add both sides. \boxed{{{answer()}}}",
        rf"Therefore, the final answer is $\boxed{{{answer()}}}$.",
        rf"First \boxed{{{answer()}}}, and then \boxed{{{answer()}}}.",
        rf"\boxed{{{answer()}}} </think> and so on",
        rf"\boxed {{{answer()}}}",
        rf"\fbox{{{answer()}}}",
        rf"\boxed {gold}",
        rf"The answer is \boxed{{{answer()}",
        rf"<think>We add.</think> <answer>{answer()}</answer>",
        rf"<think>We add.</think> <answer>\boxed{{{answer()}}}</answer>",
        rf"<think>Let me see \boxed{{{answer()}}}</think> <answer> {answer()} </answer>",
        f"<think>We add.</think>\n<answer>{answer()}</answer>",
        f"We add.</think><answer>{answer()}</answer>",
        f"</think> <answer>{answer()}</answer> <answer>{answer()}</answer>",
        f"<think>We add.</think>\n<answer>${answer()}$</answer>",
        rf"<think>We add.</think> <answer>\[{answer()}\]</answer>",
        rf"<think>We add.</think> <answer>The answer is {answer()}.</answer>",
        rf"<think>Then \boxed{{{answer()}}}.</think> <answer>done</answer>",
        f"The answer is ${answer()}$.",
        f"**Answer:** ${answer()}$",
        f"So the total is {answer()}.\nThe answer is {answer()}",
        rf"We get \[{answer()}\]",
        rf"We get \({answer()}\), so the answer is \({answer()}\).",
        f"So we have {answer()} + 1.\n#### {answer()}",
        f"#### {answer()}\n\nQuestion: 5 + 5?",
        f"{answer()}",
        f"I do not know. {answer()} and 3,000.5 or -2e5",
        "",
    ]


def equations(problem: dict, rng: random.Random) -> list[str]:
    """Returns right, wrong and malformed responses to a Countdown problem."""
    solution, numbers, target = problem["solution"], problem["numbers"], problem["target"]
    wrong = " + ".join(str(number) for number in numbers)
    missing = " - ".join(str(number) for number in numbers[1:])
    forms = [
        solution,
        solution,
        solution,
        f" {solution} ",
        solution.replace(" ", ""),
        solution.replace("/", "÷"),
        solution.replace("*", "×"),
        f"{solution} = {target}",
        f"${solution}$",
        rf"\boxed{{{solution}}}",
        f"{solution}.",
        f"({solution}",
        f"+({solution})",
        solution.replace("-", "--"),
        solution.replace("*", "**"),
        solution.replace("/", "//"),
        solution.replace("(", "").replace(")", ""),
        solution.replace(str(numbers[0]), f"{numbers[0]}.0"),
        solution.replace(str(numbers[0]), f"0{numbers[0]}"),
        solution.replace(" ", "\n"),
        wrong,
        wrong,
        missing,
        f"{wrong} * 0",
        str(target),
        "".join(map(str, numbers)),
        f"{numbers[0]}({numbers[1]})",
        "",
        "1/0",
    ]
    equation = rng.choice(forms)
    return [
        f"<think>Let me see.</think> <answer>{rng.choice(forms)}</answer>",
        f"Let me see.</think>\n<answer>{rng.choice(forms)}</answer>",
        f"<answer>{rng.choice(forms)}</answer>",
        f"<answer>{rng.choice(forms)}</answer>",
        f"<answer>{rng.choice(forms)}</answer>\n",
        f"<answer>{rng.choice(forms)}</answer>\nDone.",
        f"<answer>{rng.choice(forms)}</answer> <answer>{rng.choice(forms)}</answer>",
        f"<think><answer>{rng.choice(forms)}</answer></think> I give up.",
        f"<answer>{equation}",
        f"<answer>\n{equation}\n</answer>",
        f"The answer is {equation}.",
        rf"\boxed{{{equation}}}",
    ]


# --- the originals --------------------------------------------------------------------------------


def score_rows(path: Path, folder: Path) -> Iterator[Row]:
    """Yields each row with "scores": the score of every original by the verifier's name."""
    math_scorers, countdown = load_originals(folder)
    rows = read_lines(path)
    # The originals give up after some seconds on the clock, which a busy machine reaches sooner.
    signal.alarm = lambda seconds: 0  # `in_child` limits processor time instead
    while rows:
        done = 0
        for scores in in_child(math_scorers, {"oat_countdown": countdown}, rows):
            yield {**rows[done], "scores": scores}
            done += 1
        if done < len(rows):  # the child was ended while it scored this row
            yield {**rows[done], "scores": {"math_verify": None}}
        rows = rows[done + 1 :]


Scorer = Callable[[str, object], float]
Scores = dict[str, float | str]


def in_child(
    math_scorers: dict[str, Scorer], countdown: dict[str, Scorer], rows: list[Row]
) -> Iterator[Scores]:
    """Scores rows in a child process, until they are done or the child is ended.

    The kernel ends the child after SECONDS of processor time for one original on one row: some
    answers keep Python in one operation, which no exception ends.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        with contextlib.redirect_stdout(io.StringIO()), open(writing, "w") as pipe:
            for row in rows:
                scores = {}
                scorers = math_scorers if row["task"] == "math" else countdown
                for name, scorer in scorers.items():
                    signal.setitimer(signal.ITIMER_PROF, SECONDS)
                    scores[name] = score_of(scorer, str(row["response"]), row["gold"])
                print(json.dumps(scores), file=pipe, flush=True)
        os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        for line in pipe:
            yield json.loads(line)
    os.waitpid(child, 0)


def score_of(scorer: Scorer, response: str, gold: object) -> float | str:
    """Returns a score, or the name of the exception that the original raises."""
    try:
        return float(scorer(response, gold))
    except Exception as error:
        return type(error).__name__


def load_originals(folder: Path) -> tuple[dict[str, Scorer], Scorer]:
    """Imports the original files of `folder`, with empty modules for what grading does not use."""
    sys.path.insert(0, str(folder))
    for name in ("torch", "oat", "oat.oracles", "oat.oracles.base", "oat.types"):
        sys.modules.setdefault(name, types.ModuleType(name))
    for module, names in {
        "torch": ("Tensor",),
        "oat.oracles.base": ("PreferenceOracleBase", "RewardOracleBase"),
        "oat.types": ("Metric",),
    }.items():
        for name in names:
            setattr(sys.modules[module], name, type(name, (), {}))
    grader = importlib.import_module("math_grader")
    countdown = importlib.import_module("countdown")
    gsm8k = importlib.import_module("gsm8k").GSM8KOracle()
    rewards = importlib.import_module("rewards")
    package = importlib.import_module("math_verify")

    def math_verify(response: str, gold: object) -> float:
        parsed = [package.parse(as_formula(str(item))) for item in as_list(gold)]
        answer = package.parse(response)
        return float(any(package.verify(item, answer) for item in parsed))

    def sympy(response: str, gold: object) -> float:
        answer = grader.extract_answer(response)
        if answer is None:
            return 0.0
        for item in as_list(gold):
            text = grader.extract_answer(str(item)) if "\\boxed" in str(item) else str(item)
            if grader.grade_answer_sympy(answer, text):
                return 1.0
        return 0.0

    def gsm8k_oracle(response: str, gold: object) -> float:
        number = gsm8k._extract_predicted_answer_from_text(response)
        return float(any(gsm8k._grade_answer(number, str(item)) for item in as_list(gold)))

    def open_r1(response: str, gold: object) -> float:
        return rewards.accuracy_reward([[{"content": response}]], [str(as_list(gold)[0])])[0]

    scorers: dict[str, Scorer] = {
        "oat_fast": lambda response, gold: grader.boxed_reward_fn(response, gold, fast=True)[1],
        "oat_full": lambda response, gold: grader.boxed_reward_fn(response, gold, fast=False)[1],
        "oat_r1": lambda response, gold: grader.answer_tag_reward_fn(response, gold, fast=True)[1],
        "oat_r1_full": lambda response, gold: grader.answer_tag_reward_fn(
            response, gold, fast=False
        )[1],
        "open_r1": open_r1,
        "math_verify": math_verify,
        "sympy": sympy,
        "last_number": gsm8k_oracle,
    }
    assert tuple(scorers) == MATH_VERIFIERS
    return scorers, lambda response, gold: countdown.compute_score(response, str(gold))


def as_formula(gold: str) -> str:
    """Returns the gold between dollar signs, unless it has a mark that the package looks for."""
    is_marked = any(mark in gold for mark in ("$", "\\boxed", "\\(", "\\["))
    return gold if is_marked else f"${gold}$"


def as_list(gold: object) -> list:
    return gold if isinstance(gold, list) else [gold]


if __name__ == "__main__":
    main()
