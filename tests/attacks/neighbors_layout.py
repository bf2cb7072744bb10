r"""Generated neighbors of right answers, in how they are written: layout, characters, numerals.

    python tests/attacks/neighbors_layout.py [--golds 200] [--data ../shared/data]

Each gold is written in other ways that are the same answer (in layout that means nothing, in
Unicode, with other separators of thousands, as a choice, after a label or in a sentence), and each
way is applied to another answer, too, which must not be credited. Numbers come from a random
generator with a fixed seed and their values from Python's fractions, so that the grader's own code
decides nothing about the labels. With `--data`, golds of MATH-500 are used as well.

Messy responses to word problems are made in the same way, by template.

Prints for every kind how many of the same answers were credited, and how many different ones, and
lists the refused ones. Exits with 1 if a different answer is credited, or if more than 3 % of the
same answers are refused.
"""

import argparse
import itertools
import json
import random
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from jzero.answers.verdict import grade

SEED = 34
MOST_REFUSED = 0.03  # of the same answers
LISTED = 40  # refused answers that are printed


class Pair(NamedTuple):
    """An answer and a gold, and whether they are the same."""

    kind: str
    answer: str
    gold: str
    is_same: bool


class Response(NamedTuple):
    """A response, which marks its answer as a template asks, and whether the answer is the gold."""

    kind: str
    answer: str
    gold: str
    is_same: bool
    template: str


# Golds of every kind that boxes hold. The second of each pair is another answer of the same form.
GOLDS = [
    ("12", "13"),
    ("-7", "-8"),
    ("0", "1"),
    ("3.25", "3.26"),
    (r"\frac{3}{4}", r"\frac{3}{5}"),
    (r"-\frac{7}{12}", r"\frac{7}{12}"),
    (r"2\sqrt{3}", r"3\sqrt{2}"),
    (r"\frac{\sqrt{5}-1}{2}", r"\frac{\sqrt{5}+1}{2}"),
    (r"12\pi", r"13\pi"),
    ("x^2+3x-1", "x^2+3x+1"),
    (r"\frac{x+1}{x-2}", r"\frac{x+1}{x+2}"),
    ("(2,-3)", "(-3,2)"),
    (r"[0,\infty)", r"(0,\infty)"),
    (r"(-\infty,2)\cup(3,\infty)", r"(-\infty,2)\cup[3,\infty)"),
    (r"\{1,2,5\}", r"\{1,2,6\}"),
    ("1,3,9", "1,3,8"),
    ("x=4", "x=5"),
    ("y=2x+1", "y=2x-1"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&5\end{pmatrix}"),
    (r"e^{2x}\sin x", r"e^{2x}\cos x"),
    (r"\log_2 9", r"\log_3 9"),
    (r"3+4i", r"4+3i"),
    (r"\text{Tuesday}", r"\text{Thursday}"),
    (r"\text{even}", r"\text{odd}"),
    ("3:2", "2:3"),
    (r"60^\circ", r"61^\circ"),
    (r"25\%", r"26\%"),
]

# Layout that means nothing, with {} for the answer.
WRAPPERS = [
    r"\underline{{{}}}",
    r"\boxed{{{}}}",
    r"\fbox{{{}}}",
    r"\color{{red}}{{{}}}",
    r"\textcolor{{blue}}{{{}}}",
    r"\textcolor[rgb]{{1,0,0}}{{{}}}",
    r"\colorbox{{yellow}}{{{}}}",
    r"\displaystyle {}",
    r"\textstyle {}",
    r"\scriptstyle{{{}}}",
    r"{{\large {}}}",
    r"{{\bf {}}}",
    r"\Large {}",
    r"\ensuremath{{{}}}",
    r"\phantom{{0}}{}",
    r"{}\phantom{{\text{{or }}7}}",
    r"{}\vphantom{{\frac12}}",
    r"\hspace{{1em}}{}",
    r"\hspace*{{-2pt}}{}",
    r"{}\vspace{{3mm}}",
    r"\kern1em {}",
    r"\mskip 3mu {}",
    r"\quad {}",
    r"{}\qquad",
    r"\,{}\;",
    r"\;\!{}\:",
    "{{}}{}",
    "{{{}}}{{}}",
    r"{}\label{{eq:5}}",
    r"{}\tag{{7}}",
    r"{}\tag*{{8}}",
    r"{}\nonumber",
    r"\begin{{aligned}}{}\end{{aligned}}",
    r"\begin{{aligned}}&{}\\\end{{aligned}}",
    r"\begin{{equation}}{}\end{{equation}}",
    r"\begin{{align*}}{}\end{{align*}}",
    r"\begin{{gather}}{}\end{{gather}}",
    r"\begin{{array}}{{c}}{}\end{{array}}",
    r"\begin{{split}}{}\\[4pt]\end{{split}}",
    "${}$",
    "$${}$$",
    r"\({}\)",
    r"\[{}\]",
    "**{}**",
    "`{}`",
    "{}.",
    "{},",
    "{};",
    "{}。",
    "{}．",
    "{} ۔",
    r"{}\text{{.}}",
    r"\therefore {}",
    r"\Rightarrow {}",
    r"\implies {}",
    r"\text{{Answer: }}{}",
    r"\text{{Answer: }}${}$",
    "Answer: {}",
    "**Answer:** {}",
    r"\text{{The answer is }}{}",
    "The answer is {}.",
    "the final answer is: {}",
    r"\text{{Thus, }}{}",
    r"\text{{Therefore }}{}",
    r"\text{{So, }} {}",
    r"\text{{We get }}{}",
    r"\mathstrut {}",
    r"\left.{}\right.",
    r"\mathop{{{}}}",
    r"\underbrace{{{}}}_{{\text{{answer}}}}",
    r"\normalsize{{{}}}",
    r"\rule{{0pt}}{{3ex}}{}",
    r"\raisebox{{2pt}}{{{}}}",
    r"\scalebox{{1.5}}{{{}}}",
    r"\smash{{{}}}",
    r"\medskip {}",
    r"\boldmath {}",
    r"\blacksquare".join(["{}\\ ", ""]),
    "\u200b{}",
    "\u200e{}\u200f",
    "\ufeff{}",
    "\u2003{}\u00a0",
    "“{}”",
]

_SUPERSCRIPTS = dict(zip("0123456789+-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", strict=True))
_FULL_WIDTH = {ord(c): chr(ord(c) + 0xFEE0) for c in "0123456789()[]=,:;+"}
_ITALIC = {ord(c): chr(0x1D44E + ord(c) - ord("a")) for c in "xyab"}  # h is no such letter
_BOLD_DIGITS = {ord(str(d)): chr(0x1D7CE + d) for d in range(10)}
_SANS_DIGITS = {ord(str(d)): chr(0x1D7E2 + d) for d in range(10)}
_CHARACTERS = [
    [("-", "−")],
    [("-", "‑")],
    [(r"\pi", "π")],
    [(r"\infty", "∞"), (r"\cup", "∪")],
    [("^2", "²"), ("^{2x}", "²ˣ")],
    [(r"\sqrt{3}", "√3"), (r"\sqrt{2}", "√2"), (r"\sqrt{5}", "√5")],
    [(r"\frac{3}{4}", "¾"), (r"\frac{3}{5}", "⅗")],
    [(r"\frac{3}{4}", "³⁄₄"), (r"\frac{7}{12}", "⁷⁄₁₂"), (r"\frac{3}{5}", "³⁄₅")],
    [(r"^\circ", "°")],
    [(r"^\circ", "º")],
    [(r"\%", "％")],
    [("_2", "₂"), ("_3", "₃")],
    [(r"\{", "｛"), (r"\}", "｝")],
    [(":", "∶")],
    [("+", "＋"), ("=", "＝")],
]


def layout(golds: Sequence[tuple[str, str]]) -> Iterator[Pair]:
    """Yields every gold in every wrapper, and another answer in the same wrapper."""
    for wrapper in WRAPPERS:
        for gold, other in golds:
            if "\\text{" in gold and wrapper.startswith((r"\scriptstyle", r"\mathop")):
                continue
            yield Pair("layout", wrapper.format(gold), gold, True)
            yield Pair("layout", wrapper.format(other), gold, False)


def characters(golds: Sequence[tuple[str, str]]) -> Iterator[Pair]:
    """Yields golds in Unicode."""
    tables = (_FULL_WIDTH, _ITALIC, _BOLD_DIGITS, _SANS_DIGITS)
    for gold, other in golds:
        for table in tables:
            if "\\" in gold:  # arguments of commands would change
                continue
            yield from _if_changed("characters", gold, gold.translate(table), True)
            yield from _if_changed("characters", gold, other.translate(table), False)
        for replacements in _CHARACTERS:
            written, another = gold, other
            for plain, character in replacements:
                written = written.replace(plain, character)
                another = another.replace(plain, character)
            yield from _if_changed("characters", gold, written, True)
            if written != gold:
                yield Pair("characters", another, gold, False)


def _if_changed(kind: str, gold: str, answer: str, is_same: bool) -> Iterator[Pair]:
    if answer != gold:
        yield Pair(kind, answer, gold, is_same)


def _grouped(digits: str, separator: str) -> str:
    first = len(digits) % 3 or 3
    groups = [digits[:first]] + [digits[i : i + 3] for i in range(first, len(digits), 3)]
    return separator.join(groups)


def _indian(digits: str) -> str:
    head, tail = digits[:-3], digits[-3:]
    first = len(head) % 2 or 2
    groups = [head[:first]] + [head[i : i + 2] for i in range(first, len(head), 2)]
    return ",".join([*groups, tail])


SEPARATORS = [",", "{,}", " ", r"\,", r"\ ", "~", r"\;", "\u00a0", "\u2009", "\u202f", "'", "’"]


def numerals(rng: random.Random, count: int) -> Iterator[Pair]:
    """Yields random numbers in the forms in which numbers are written."""
    for _ in range(count):
        number = rng.randint(10**3, 10**9)
        near = number + rng.choice((1, -1, 10, 1000))
        for separator in SEPARATORS:
            yield Pair("thousands", _grouped(str(number), separator), str(number), True)
            yield Pair("thousands", _grouped(str(near), separator), str(number), False)
        if number > 10**6:
            yield Pair("thousands", _grouped(str(number), "."), str(number), True)
            yield Pair("thousands", _grouped(str(near), "."), str(number), False)
        if number >= 10**5:
            yield Pair("thousands", _indian(str(number)), str(number), True)
            yield Pair("thousands", _indian(str(near)), str(number), False)
        # A group of two or four digits is none.
        yield Pair("thousands", f"{str(number)[:-2]},{str(number)[-2:]}", str(number), False)
        if number < 10**6:  # 123.456 is a decimal
            yield Pair("thousands", _grouped(str(number), "."), str(number), False)

        whole, cents = rng.randint(1000, 99999), f"{rng.randint(1, 99):02d}"
        gold = f"{whole}.{cents}"
        for written in (
            f"{_grouped(str(whole), '.')},{cents}",
            f"{_grouped(str(whole), ',')}.{cents}",
            f"{_grouped(str(whole), ' ')}.{cents}",
            f"{_grouped(str(whole), ' ')},{cents}",
            f"{whole}{{,}}{cents}",
            f"0{gold}",
            f"+{gold}",
            f"{gold}0",
        ):
            yield Pair("decimals", written, gold, True)
            yield Pair("decimals", written, f"{whole + 1}.{cents}", False)
            yield Pair("decimals", written, f"{whole}{cents}", False)
        small = f"{rng.randint(1, 999):03d}"
        yield Pair("decimals", f".{small}", f"0.{small}", True)
        yield Pair("decimals", f".{small}", f"1.{small}", False)
        yield from _recurring(rng)
        yield from _scientific(rng)


def _recurring(rng: random.Random) -> Iterator[Pair]:
    before = "".join(rng.choice("0123456789") for _ in range(rng.randint(0, 2)))
    period = "".join(rng.choice("0123456789") for _ in range(rng.randint(1, 3)))
    if set(period) <= {"9", "0"}:
        period = "27"
    value = Fraction(int(before or 0), 10 ** len(before))
    value += Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(before))
    gold = rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
    other = rf"\frac{{{value.numerator + 1}}}{{{value.denominator}}}"
    forms = [
        rf"0.{before}\overline{{{period}}}",
        rf"0.{before}\bar{{{period}}}",
        rf"0.{before}({period})",
        rf"0.{before}\overline{{{period}}}\ldots",
        f"0.{before}" + "".join(digit + "\u0305" for digit in period),
        f"0.{before}{period * 3}...",
        rf"0.{before}{period * 3}\ldots",
        rf".{before}\overline{{{period}}}",
    ]
    if len(period) == 1:
        forms.append(rf"0.{before}\dot{{{period}}}")
        forms.append(rf"0.{before}\dot{period}")
    else:
        forms.append(rf"0.{before}\dot{{{period[0]}}}{period[1:-1]}\dot{{{period[-1]}}}")
    for form in forms:
        yield Pair("recurring", form, gold, True)
        yield Pair("recurring", form, other, False)


def _scientific(rng: random.Random) -> Iterator[Pair]:
    tenths, exponent = rng.randint(11, 99), rng.randint(2, 9)
    mantissa = f"{tenths // 10}.{tenths % 10}"
    gold = str(tenths * 10 ** (exponent - 1))
    for form in (
        rf"{mantissa}\times10^{{{exponent}}}",
        rf"{mantissa} \cdot 10^{exponent}",
        f"{mantissa} x 10^{exponent}",
        f"{mantissa}e{exponent}",
        f"{mantissa}E+0{exponent}",
        f"{mantissa}×10{_SUPERSCRIPTS[str(exponent)]}",
        f"{mantissa}*10**{exponent}",
    ):
        yield Pair("scientific", form, gold, True)
        yield Pair("scientific", form, gold + "0", False)


CHOICES = [
    "{l}",
    "({l})",
    "{l})",
    "{l}.",
    "[{l}]",
    r"\text{{{l}}}",
    r"\text{{({l})}}",
    r"\textbf{{({l})}}",
    r"\textbf{{({l}) }}{v}",
    r"\textbf{{({l})}}\ {v}",
    r"\textbf{{({l})}}\quad {v}",
    r"\mathrm{{({l})}}\ {v}",
    r"\text{{({l}) }}{v}",
    "({l}) {v}",
    "{l}) {v}",
    "{l}. {v}",
    "{l}: {v}",
    "Option {l}",
    "option ({l})",
    r"\text{{Option {l}}}",
    "choice {l}",
    r"\text{{Choice }}({l})",
    "the answer is {l}",
    "The correct answer is ({l})",
    "Answer: {l}",
    "Answer: ({l}) {v}",
    "Option {l}: {v}",
    r"\boxed{{{l}}}",
]
VALUES = [
    ("7", "8"),
    (r"\frac{1}{2}", r"\frac{1}{3}"),
    (r"2\sqrt{3}", r"3\sqrt{2}"),
    ("12\\pi", "6\\pi"),
]


def choices(rng: random.Random) -> Iterator[Pair]:
    """Yields choices for golds that are a letter, a value, or both."""
    for form in CHOICES:
        for value, other_value in VALUES:
            letter, other = rng.sample("ABCDE", 2)
            answer = form.format(l=letter, v=value)
            both = rf"\textbf{{({letter}) }}{value}"
            yield Pair("choices", answer, letter, True)
            yield Pair("choices", answer, f"({letter})", True)
            yield Pair("choices", answer, both, True)
            yield Pair("choices", answer, other, False)
            yield Pair("choices", answer, rf"\textbf{{({other}) }}{value}", False)
            yield Pair("choices", answer, value, "{v}" in form)
            yield Pair("choices", answer, other_value, False)
            two = f"{answer} or {form.format(l=other, v=other_value)}"
            yield Pair("choices", two, letter, False)
            yield Pair("choices", two, value, False)
            yield Pair("choices", f"not {answer}", letter, False)


LABELS = [
    (r"\angle ABC", r"\angle ABD"),
    (r"m\angle A", r"m\angle B"),
    ("[ABC]", "[ABD]"),
    ("ABC", "ABD"),
    ("AB", "AC"),
    (r"\overline{AB}", r"\overline{AC}"),
    ("|AB|", "|AC|"),
    (r"\text{Area}", r"\text{Perimeter}"),
    ("area", "volume"),
    (r"\text{Area of }ABC", r"\text{Area of }ABD"),
    (r"\text{Total cost}", r"\text{Total weight}"),
    ("x", "y"),
    (r"x_1", "x_2"),
    (r"\theta", r"\phi"),
    (r"\bar{x}", r"\bar{y}"),
    (r"\text{Probability}", r"\text{Odds}"),
]
LABELED = ["{l}={v}", "{l} = {v}", "{v}={l}"]
WORD_LABELS = [
    "The area is {v}",
    r"\text{{Area: }}{v}",
    "Area: {v}",
    r"\text{{The total number of ways is }}{v}",
    "The perimeter equals {v}",
    r"\text{{The volume of the cone is }}{v}",
]


def labels(golds: Sequence[tuple[str, str]]) -> Iterator[Pair]:
    """Yields named quantities."""
    for gold, other in golds:
        for label, other_label in LABELS:
            for form in LABELED:
                answer = form.format(l=label, v=gold)
                yield Pair("labels", answer, gold, True)
                yield Pair("labels", form.format(l=label, v=other), gold, False)
                yield Pair("labels", answer, f"{other_label}={gold}", False)
                yield Pair("labels", answer, f"{label}={gold}", True)
        for form in WORD_LABELS:
            yield Pair("labels", form.format(v=gold), gold, True)
            yield Pair("labels", form.format(v=other), gold, False)
            yield Pair("labels", f"{form.format(v=gold)} or {other}", gold, False)


# Layout that hides or refuses the gold, and hedges.
TRAPS = [
    r"\phantom{{{g}}}",
    r"{o}\phantom{{{g}}}",
    r"\boxed{{{o}\phantom{{\boxed{{{g}}}}}}}",
    r"\hspace{{{g}}}{o}",
    r"{o}\label{{{g}}}",
    r"{o}\tag{{{g}}}",
    r"\cancel{{{g}}}",
    r"\xcancel{{{g}}}{o}",
    r"\unknown{{{g}}}",
    r"\text{{not }}{g}",
    r"{g}\text{{ is wrong}}",
    r"{g}\text{{ or }}{o}",
    r"\text{{either }}{g}\text{{ or }}{o}",
    "{g} {o}",
    "{g}; {o}",
    r"{g}\quad {o}",
    r"\begin{{array}}{{c}}{g}\\{o}\end{{array}}",
    r"\begin{{aligned}}{g}\\{o}\end{{aligned}}",
    "Answer: {g} or {o}",
    r"\text{{Answer: }}{o}\text{{, not }}{g}",
    r"\text{{The area is not }}{g}",
    r"\frac{{{g}}}{{{o}}}",
    r"\sqrt{{{g}}}",
    r"{{{g}\over {o}}}",
    r"\overline{{{g}}}",
    r"{g}^{{{o}}}",
    r"{g}_{{{o}}}",
    r"\not={g}",
    r"\ne {g}",
    r"{g}\Rightarrow {o}",
]
TRAPPED = [("12", "13"), ("27", "5"), ("3.25", "7"), ("250", "40"), ("17", "90")]


def traps() -> Iterator[Pair]:
    """Yields answers that hold the gold, and do not give it."""
    for trap in TRAPS:
        for gold, other in TRAPPED:
            yield Pair("traps", trap.format(g=gold, o=other), gold, False)


# Messy responses to word problems, with {n} for the gold and {o} for another number.
MARKED = [
    "{n}",
    "Answer: {n}",
    "The answer is {n}.",
    "Janet makes ${n} every day",
    "{n} more eggs than before",
    "There are {n} eggs in total.",
    "\n{n}",
    "Final Answer\n**{n}**",
    "{n}<|im_end|>",
    "{n}</s>\n",
    "${n}$",
    "\\boxed{{{n}}}",
    "{n} red eggs.",
    "${n}.00",
    "x = {n}",
    "Total: {n}",
    "She has {n} eggs left!",
]
MARKED_WRONGLY = [
    "{o}",
    "not {n}",
    "{n} or {o}",
    "between {n} and {o}",
    "She has more than {n} eggs",
    "She does not have {n} eggs left",
    "There are {n} dozen eggs in total",
    "half of the {n} eggs",
    "{n} ({o})",
    "{n}\n#### {o}",
    "minus {n} eggs in the basket",
    "{n} thousand eggs in the basket",
    "{o}, and not {n}",
    "{n}{o}",
    "{n} is the wrong number",
]
STATED = [
    "So the answer is {n}. She had 3 left before.",
    "The final answer is: **{n}**.",
    "Answer: ${n}$",
    "The answer is {n} eggs.\nThe hens are 4.",
    "the answer is {o}. Wait, the answer is {n}.",
]
STATED_WRONGLY = [
    "The answer is {o}. There were {n} at first.",
    "{n}",
    "There are {n}.",
    "The answer is not {n}.",
    "The answer is {n} or {o}.",
    "The answer is {n}. Wait, the answer is {o}.",
]
BOXED = [
    "\\boxed{{\\text{{Janet makes }}\\${n}\\text{{ every day}}}}",
    "\\boxed{{\\boxed{{{n}}}}}",
    "\\boxed{{{n}\\phantom{{\\boxed{{{o}}}}}}}",
    "\\boxed{{{n}}}\\phantom{{\\boxed{{{o}}}}}",
    "\\boxed{{{o}}} no, \\boxed{{{n}}}",
    "\\boxed{{The answer is {n}.}}",
]
BOXED_WRONGLY = [
    "\\boxed{{{o}\\phantom{{\\boxed{{{n}}}}}}}",
    "\\boxed{{{o}}}\\phantom{{\\boxed{{{n}}}}}",
    "\\boxed{{{n}}} no, \\boxed{{{o}}}",
    "\\boxed{{{n} \\boxed{{{o}}}}}",
    "\\boxed{{{o} \\boxed{{{n}}}}}",
    "\\boxed{{{n}}} \\boxed{{",
    "\\boxed{{Janet does not make {n} dollars}}",
]


def responses(rng: random.Random, count: int) -> Iterator[Response]:
    """Yields messy responses to word problems, by template."""
    forms = [
        *(("gsm8k", f"So it is 7.\n#### {form}", True) for form in MARKED),
        *(("gsm8k", f"So it is 7.\n#### {form}", False) for form in MARKED_WRONGLY),
        *(("stated", form, True) for form in STATED),
        *(("stated", form, False) for form in STATED_WRONGLY),
        *(("boxed", form, True) for form in BOXED),
        *(("boxed", form, False) for form in BOXED_WRONGLY),
    ]
    for _ in range(count):
        number = rng.randint(20, 5000)
        other = number + rng.choice((1, 2, 10))
        for template, form, is_same in forms:
            text = form.format(n=number, o=other)
            yield Response(f"by {template}", text, str(number), is_same, template)


def neighbors(golds: Sequence[tuple[str, str]], count: int, seed: int = SEED) -> Iterator[Pair]:
    """Yields pairs of all kinds; `count` is how many random numbers there are."""
    rng = random.Random(seed)
    yield from layout(golds)
    yield from characters(golds)
    yield from numerals(rng, count)
    yield from choices(rng)
    yield from labels([("12", "13"), (r"\frac{3}{4}", r"\frac{3}{5}"), (r"12\pi", r"11\pi")])
    yield from traps()


def real_golds(data: Path, count: int) -> list[tuple[str, str]]:
    """Returns golds of MATH-500 that end in a digit or brace, with their last digit changed."""
    rows = (data / "math/math500.jsonl").read_text(encoding="utf-8").splitlines()
    golds = []
    for row in rows:
        gold = json.loads(row)["answer"]
        digits = [index for index, character in enumerate(gold) if character in "12345678"]
        if digits:
            last = digits[-1]
            changed = f"{gold[:last]}{int(gold[last]) + 1}{gold[last + 1 :]}"
            golds.append((gold, changed))
    return random.Random(SEED).sample(golds, min(count, len(golds)))


def graded(
    pairs: Iterable[Pair | Response],
) -> tuple[Counter[tuple[str, bool, bool]], list[Pair | Response]]:
    """Returns {(kind, is_same, credited): count}, and the pairs that were graded wrongly."""
    counts: Counter[tuple[str, bool, bool]] = Counter()
    wrong: list[Pair | Response] = []
    for pair in pairs:
        template = pair.template if isinstance(pair, Response) else "answer"
        is_credited = grade(pair.answer, pair.gold, template=template).correct
        counts[pair.kind, pair.is_same, is_credited] += 1
        if is_credited != pair.is_same:
            wrong.append(pair)
    return counts, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--golds", type=int, default=60, help="golds of MATH-500")
    parser.add_argument("--numbers", type=int, default=40, help="random numbers")
    parser.add_argument(
        "--data", type=Path, default=Path(__file__).resolve().parents[3] / "shared/data"
    )
    arguments = parser.parse_args()
    golds = list(GOLDS)
    if arguments.data.is_dir():
        golds += real_golds(arguments.data, arguments.golds)
    messy = responses(random.Random(SEED), arguments.numbers)
    counts, wrong = graded(itertools.chain(neighbors(golds, arguments.numbers), messy))

    print(f"{'kind':12} {'same: credited':>16} {'different: credited':>20}")
    for kind in sorted({kind for kind, *_ in counts}):
        same = [counts[kind, True, credited] for credited in (True, False)]
        different = [counts[kind, False, credited] for credited in (True, False)]
        print(f"{kind:12} {same[0]:>8} / {sum(same):5} {different[0]:>12} / {sum(different):5}")
    num_same = sum(count for (_, is_same, _), count in counts.items() if is_same)
    refused = [pair for pair in wrong if pair.is_same]
    credited = [pair for pair in wrong if not pair.is_same]
    print(f"{sum(counts.values())} pairs: {len(credited)} different answers credited, ", end="")
    print(f"{len(refused)} of {num_same} same answers refused")
    for pair in credited:
        print("CREDITED", pair)
    for pair in refused[:LISTED]:
        print("refused ", pair)
    return 1 if credited or len(refused) > MOST_REFUSED * num_same else 0


if __name__ == "__main__":
    sys.exit(main())
