"""Mutants of right programs, graded as a run grades them: none that is wrong may get credit.

    python tests/attacks/mutants.py
    python tests/attacks/mutants.py --most 300            # a quick sample
    python tests/attacks/mutants.py --mbpp mbpp.jsonl     # over the rows of MBPP itself

The rows are in the layouts of MBPP, APPS, TACO, DeepCoder and LiveCodeBench (`mutant_rows`). A
mutant is the reference program with one change to its syntax tree: the first item of an answer, a
constant, a bound that is off by one, another type, a swapped branch, a part of a loop.

Whether a mutant is right is decided without jzero: it runs in plain Python on the inputs of the
row's own tests, and every value is compared strictly. A mutant that is wrong there and gets credit
is a false credit; one that is right there and gets none is a false refusal. Some mutants are right,
because the change makes no difference on these inputs. Every tenth program is graded on all of its
tests, and the number of tests that it passes has to be the oracle's, too.

Prints counts by kind of mutant and by layout. The exit status is 1 if there is a false credit or a
false refusal, or if fewer than 3,000 of the mutants are wrong and --most asks for no smaller
sample.
"""

import argparse
import ast
import contextlib
import copy
import io
import json
import multiprocessing
import random
import resource
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from mutant_rows import Row, rows  # pyright: ignore[reportMissingImports]

from jzero.config import Local, TaskConfig
from jzero.programming import code_runs, code_tests

MIN_WRONG = 3000
DEFAULT_MOST = 5000
REFERENCE = "reference"
ORACLE_SECONDS = 0.3  # of one mutant on one row
SANDBOX_SECONDS = 0.5
_ORACLE_MEMORY = 2 << 30
_EVERY = 10  # of these programs one is graded on all of its tests


class Mutant(NamedTuple):
    kind: str
    source: str


# Mutants.


def _with_change(tree: ast.Module, number: int, node: ast.AST) -> str:
    """Returns the source where the node with a number, in the order of ast.walk, is another one."""
    changed = copy.deepcopy(tree)
    target = list(ast.walk(changed))[number]
    for parent in ast.walk(changed):
        for name, value in ast.iter_fields(parent):
            if value is target:
                setattr(parent, name, node)
            elif isinstance(value, list) and any(item is target for item in value):
                setattr(parent, name, [node if item is target else item for item in value])
    return ast.unparse(ast.fix_missing_locations(changed))


def _call(name: str, *arguments: ast.expr) -> ast.expr:
    return ast.Call(ast.Name(name, ast.Load()), list(arguments), [])


def _expression(text: str, value: ast.expr) -> ast.expr:
    """Returns an expression in which the name VALUE stands for `value`."""
    tree = ast.parse(text, mode="eval").body

    class Filler(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.AST:
            return copy.deepcopy(value) if node.id == "VALUE" else node

    return Filler().visit(tree)


_FIRST_ITEM = (
    "(lambda v: v[0] if isinstance(v, (list, tuple, str)) and v else v)(VALUE)",
    "(lambda v: v[-1] if isinstance(v, (list, tuple, str)) and v else v)(VALUE)",
    "(lambda v: min(v) if isinstance(v, (list, tuple, set)) and v else v)(VALUE)",
    "(lambda v: v[:1] if isinstance(v, (list, tuple, str)) else v)(VALUE)",
    "(lambda v: v[:-1] if isinstance(v, (list, tuple, str)) else v)(VALUE)",
)
_OTHER_TYPES = (
    "str(VALUE)", "[VALUE]", "(VALUE,)", "bool(VALUE)", "repr(VALUE)", "{'value': VALUE}",
    "(lambda v: tuple(v) if isinstance(v, list) else float(v) if isinstance(v, int) else v)(VALUE)",
    "(lambda v: list(v) if isinstance(v, (tuple, set, str)) else v)(VALUE)",
    "(lambda v: iter(v) if isinstance(v, (list, set)) else v)(VALUE)",
    "(lambda v: {x: 1 for x in v} if isinstance(v, (list, set, str)) else v)(VALUE)",
    "(lambda v: complex(v) if isinstance(v, (int, float)) else v)(VALUE)",
    "(lambda v: int(v) if isinstance(v, (bool, float)) else v)(VALUE)",
)  # fmt: skip
_OFF_BY_ONE = (
    "(lambda v: v + 1 if isinstance(v, (int, float)) else v)(VALUE)",
    "(lambda v: v - 1 if isinstance(v, (int, float)) else v)(VALUE)",
    "(lambda v: -v if isinstance(v, (int, float)) else v)(VALUE)",
)
_COMPARISONS: dict[type[ast.cmpop], list[type[ast.cmpop]]] = {
    ast.Lt: [ast.LtE, ast.Gt], ast.LtE: [ast.Lt, ast.GtE], ast.Gt: [ast.GtE, ast.Lt],
    ast.GtE: [ast.Gt, ast.LtE], ast.Eq: [ast.NotEq], ast.NotEq: [ast.Eq],
    ast.In: [ast.NotIn], ast.NotIn: [ast.In],
}  # fmt: skip
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Div: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr,
}  # fmt: skip
_PARTS = ("list(VALUE)[:-1]", "list(VALUE)[1:]", "list(VALUE)[:1]", "list(VALUE)[::2]")


def _changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yields kinds of mutants, and what stands in the place of a node."""
    match node:
        case ast.Return(value=ast.expr() as value):
            for kind, texts in (
                ("first item", _FIRST_ITEM),
                ("another type", _OTHER_TYPES),
                ("off by one", _OFF_BY_ONE),
            ):
                for text in texts:
                    yield kind, ast.Return(_expression(text, value))
            for constant in (None, 0, 1, True, False, "", -1):
                yield "constant", ast.Return(ast.Constant(constant))
            yield "constant", ast.Return(ast.List([], ast.Load()))
        case ast.Call(func=ast.Name(id="print"), args=[ast.expr() as value]):
            for text in _FIRST_ITEM:
                yield "first item", _call("print", _expression(text, value))
            for text in ("[VALUE]", "repr(str(VALUE))", "bool(VALUE)", "(VALUE, 0)"):
                yield "another type", _call("print", _expression(text, value))
            for text in _OFF_BY_ONE:
                yield "off by one", _call("print", _expression(text, value))
            for constant in (0, 1, "YES", "", -1):
                yield "constant", _call("print", ast.Constant(constant))
        case ast.Constant(value=bool() as value):
            yield "constant", ast.Constant(not value)
        case ast.Constant(value=int() as value):
            for other in {value + 1, value - 1, 0, -value} - {value}:
                yield "constant", ast.Constant(other)
        case ast.Constant(value=str() as value):
            for other in {value + "x", value[:-1], value.swapcase(), ""} - {value}:
                yield "constant", ast.Constant(other)
        case ast.Compare(left=left, ops=[operator], comparators=right):
            for other in _COMPARISONS.get(type(operator), []):
                yield "off by one", ast.Compare(left, [other()], right)
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _OPERATORS:
            yield "off by one", ast.BinOp(left, _OPERATORS[type(operator)](), right)
        case ast.Subscript(value=value, slice=ast.expr() as place, ctx=ast.Load()):
            if not isinstance(place, ast.Slice):
                moved = ast.BinOp(place, ast.Sub(), ast.Constant(1))
                yield "off by one", ast.Subscript(value, moved, ast.Load())
        case ast.Call(func=ast.Name(id="range"), args=[*first, last]):
            for change in (1, -1):
                moved = ast.BinOp(last, ast.Add(), ast.Constant(change))
                yield "off by one", _call("range", *first, moved)
        case ast.IfExp(test=test, body=body, orelse=other):
            yield "swapped branch", ast.IfExp(test, other, body)
            yield "swapped branch", body
            yield "swapped branch", other
        case ast.If(test=test, body=body, orelse=other):
            yield "swapped branch", ast.If(ast.UnaryOp(ast.Not(), test), body, other)
            yield "swapped branch", ast.If(ast.Constant(True), body, other)
            yield "swapped branch", ast.If(ast.Constant(False), body, other)
        case ast.BoolOp(op=operator, values=values):
            other = ast.Or() if isinstance(operator, ast.And) else ast.And()
            yield "swapped branch", ast.BoolOp(other, values)
            yield "swapped branch", values[0]
        case ast.For(target=target, iter=items, body=body, orelse=other):
            for text in _PARTS:
                yield "partial loop", ast.For(target, _expression(text, items), body, other)
            yield "partial loop", ast.For(target, items, [*body, ast.Break()], other)
            yield "partial loop", ast.For(target, items, body[:-1] or [ast.Pass()], other)
        case ast.While(test=test, body=body, orelse=other):
            yield "partial loop", ast.While(test, [*body, ast.Break()], other)
            yield "partial loop", ast.If(test, body, other)
            yield "partial loop", ast.While(test, [*body[:-1], ast.Break()], other)
        case ast.comprehension(target=target, iter=items, ifs=ifs, is_async=is_async):
            for text in _PARTS:
                yield (
                    "partial loop",
                    ast.comprehension(target, _expression(text, items), ifs, is_async),
                )
            if ifs:
                yield "swapped branch", ast.comprehension(target, items, [], is_async)


def mutants_of(row: Row) -> list[Mutant]:
    """Returns the mutants of a row's reference, each source once."""
    tree = ast.parse(row.source)
    found: dict[str, Mutant] = {}
    reference = ast.unparse(tree)
    for number, node in enumerate(ast.walk(tree)):
        for kind, other in _changes(node):
            source = _with_change(tree, number, copy.deepcopy(other))
            if source != reference:
                found.setdefault(source, Mutant(kind, source))
    for value in row.expected[:2]:  # the right answer of one test for all of them
        if isinstance(value, str) and not row.function and not row.left_sides:
            mutant = Mutant("constant", f"print({value!r})")
        else:
            name = row.function or row.left_sides[0].partition("(")[0]
            mutant = Mutant("constant", f"def {name}(*_):\n    return {value!r}")
        found.setdefault(mutant.source, mutant)
    return list(found.values())


# The oracle: plain Python, without jzero.


class _TooSlow(BaseException):
    pass


def _stop(*_: object) -> None:
    raise _TooSlow


def _is_same(value: Any, expected: Any, is_python: bool) -> bool:
    """Compares a value with the expected one, as docs/environments.md says that graders should."""
    if isinstance(expected, bool):
        return type(value) in (bool, int) and value == expected
    if isinstance(expected, int):
        return type(value) in (int, float) and value == expected
    if isinstance(expected, float):
        is_number = isinstance(value, int | float)
        return is_number and abs(value - expected) <= 1e-9 * abs(expected) + 1e-15
    if expected is None or isinstance(expected, str):
        return type(value) is type(expected) and value == expected
    if isinstance(expected, list | tuple):
        kinds = (type(expected),) if is_python else (list, tuple)
        if not isinstance(value, kinds) or len(value) != len(expected):
            return False
        return all(_is_same(a, b, is_python) for a, b in zip(value, expected, strict=True))
    if isinstance(expected, set):
        return isinstance(value, set) and value == expected
    assert isinstance(expected, dict), f"{expected=}"
    if not isinstance(value, dict) or value.keys() != expected.keys():
        return False
    return all(_is_same(value[key], expected[key], is_python) for key in expected)


def _has_same_words(printed: str, expected: str) -> bool:
    words, expected_words = printed.split(), expected.split()
    if len(words) != len(expected_words):
        return False
    for word, other in zip(words, expected_words, strict=True):
        if word == other:
            continue
        if "." not in other:
            return False
        try:
            difference = abs(float(word) - float(other))
        except ValueError:
            return False
        if not difference <= 1e-6 * abs(float(other)):
            return False
    return True


def _passed(row: Row, source: str) -> list[bool]:
    """Returns which tests of a row a program passes. Each test has the program run anew."""
    signal.signal(signal.SIGALRM, _stop)
    found = []
    for number, expected in enumerate(row.expected):
        signal.setitimer(signal.ITIMER_REAL, ORACLE_SECONDS)
        try:
            found.append(_passes(row, source, number, expected))
        except (_TooSlow, Exception, SystemExit):
            found.append(False)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    return found


def _passes(row: Row, source: str, number: int, expected: Any) -> bool:
    if not row.function and not row.left_sides:
        printed = io.StringIO()
        sys.stdin = io.StringIO(row.arguments[number][0])
        with contextlib.redirect_stdout(printed):
            exec(compile(source, "<mutant>", "exec"), {"__name__": "__main__"})
        return _has_same_words(printed.getvalue(), expected)
    values: dict[str, Any] = {"__name__": "mutant"}
    exec(compile(f"{row.setup}\n{source}", "<mutant>", "exec"), values)
    if row.left_sides:
        return _is_same(eval(row.left_sides[number], values), expected, is_python=True)
    function = values.get(row.function)
    if function is None:
        function = getattr(values["Solution"](), row.function)
    return _is_same(function(*copy.deepcopy(row.arguments[number])), expected, is_python=False)


def _serve_oracle(pipe: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_ORACLE_MEMORY, _ORACLE_MEMORY))
    with contextlib.suppress(EOFError):
        while True:
            pipe.send(_passed(*pipe.recv()))


class Oracle:
    """Runs programs in a process of their own, which is replaced where one ends it."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self._pipe, its_end = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")  # a fork of threads may lock up
        self._process = context.Process(target=_serve_oracle, args=(its_end,), daemon=True)
        self._process.start()
        its_end.close()

    def passed(self, row: Row, source: str) -> list[bool]:
        self._pipe.send((row, source))
        if self._pipe.poll(5 * ORACLE_SECONDS * len(row.expected) + 5):
            with contextlib.suppress(EOFError):
                return self._pipe.recv()
        self._process.kill()
        self._start()
        return [False] * len(row.expected)

    def close(self) -> None:
        self._pipe.close()
        self._process.kill()


# Grading, and the counts.


class Count(NamedTuple):
    wrong: int  # mutants that the oracle finds wrong
    right: int
    false_credits: list[str]
    false_refusals: list[str]


def mbpp_rows(path: Path) -> Iterator[Row]:
    """Yields the rows of a file of MBPP whose asserts compare a call with a literal."""
    for line in path.read_text(encoding="utf-8").splitlines():
        found = json.loads(line)
        setup = found.get("test_setup_code") or ""
        sides = []
        for text in found["test_list"]:
            comparison = ast.parse(text.strip()).body[0].test  # pyright: ignore[reportAttributeAccessIssue]
            sides.append((ast.unparse(comparison.left), comparison.comparators[0]))
        try:
            expected = [ast.literal_eval(right) for _, right in sides]
        except (ValueError, TypeError):
            continue
        if len(code_tests.read_tests(found)) < len(sides):
            continue  # a complex number, which has no form in JSON
        left_sides = [left for left, _ in sides]
        arguments: list[list[Any]] = [[] for _ in sides]
        yield Row("MBPP itself", found, found["code"], "", arguments, expected, left_sides, setup)


def run(chosen: list[tuple[Row, Mutant]], oracle: Oracle) -> dict[tuple[str, str], Count]:
    """Returns counts by kind of mutant and layout."""
    task = TaskConfig(name="code", sandbox=Local(seconds=SANDBOX_SECONDS))
    counts: dict[tuple[str, str], Count] = defaultdict(lambda: Count(0, 0, [], []))
    golds: dict[int, dict[str, Any]] = {}
    for number, (row, mutant) in enumerate(chosen):
        if id(row) not in golds:
            tests = code_tests.read_tests(row.columns)
            golds[id(row)] = {"tests": tests, "setup": code_tests.setup_code(row.columns)}
            assert len(tests) == len(row.expected), f"{row.columns=}"
        passed = oracle.passed(row, mutant.source)
        run_all = number % _EVERY == 0
        verdict = code_runs.run_tests(mutant.source, golds[id(row)], task, run_all=run_all)
        count = counts[mutant.kind, row.layout]
        is_right = all(passed)
        note = f"{row.columns}\n{mutant.source}\n{verdict}, the oracle: {passed}"
        is_too_many = run_all and verdict.passed > sum(passed)
        is_too_few = run_all and verdict.passed < sum(passed)
        if (verdict.has_passed and not is_right) or is_too_many:
            count.false_credits.append(note)
        if (is_right and not verdict.has_passed) or is_too_few:
            count.false_refusals.append(note)
        counts[mutant.kind, row.layout] = count._replace(
            wrong=count.wrong + (not is_right), right=count.right + is_right
        )
    return counts


def choose(all_rows: list[Row], most: int, seed: int = 0) -> list[tuple[Row, Mutant]]:
    """Returns every row's reference, and its mutants: all of them, or `most` of them."""
    references = [(row, Mutant(REFERENCE, row.source)) for row in all_rows]
    found = [(row, mutant) for row in all_rows for mutant in mutants_of(row)]
    if most < len(found):
        rng = random.Random(seed)
        found = rng.sample(found, most)
        references = rng.sample(references, min(len(references), most))
    return references + found


def table(counts: dict[tuple[str, str], Count], part: int) -> list[str]:
    """Returns the lines of a table by kind (part 0) or by layout (part 1)."""
    sums: dict[str, Counter[str]] = defaultdict(Counter)
    for key, count in counts.items():
        sums[key[part]] += Counter(wrong=count.wrong, right=count.right)
        sums[key[part]]["false credits"] += len(count.false_credits)
        sums[key[part]]["false refusals"] += len(count.false_refusals)
    total: Counter[str] = Counter()
    for each in sums.values():
        total.update(each)
    columns = ("wrong", "right", "false credits", "false refusals")
    heading = ("kind", "layout")[part]
    lines = [f"| {heading} | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    for name, each in [*sorted(sums.items()), ("all", total)]:
        lines.append(f"| {name} | {' | '.join(str(each[column]) for column in columns)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--most", type=int, default=DEFAULT_MOST, help="a random sample of so many mutants"
    )
    parser.add_argument("--mbpp", type=Path, help="a file with MBPP's rows as JSON lines")
    args = parser.parse_args()
    all_rows = rows()
    if args.mbpp:
        all_rows = list(mbpp_rows(args.mbpp))
    chosen = choose(all_rows, args.most)
    start = time.monotonic()
    oracle = Oracle()
    counts = run(chosen, oracle)
    oracle.close()
    print(f"{len(all_rows)} rows, {len(chosen)} programs, {time.monotonic() - start:.0f} s\n")
    for part in (0, 1):
        print("\n".join(table(counts, part)) + "\n")
    credited = [note for count in counts.values() for note in count.false_credits]
    refused = [note for count in counts.values() for note in count.false_refusals]
    for title, notes in (("FALSE CREDIT", credited), ("FALSE REFUSAL", refused)):
        for note in notes[:20]:
            print(f"{title}\n{note}\n")
    wrong = sum(count.wrong for count in counts.values())
    has_enough = wrong >= MIN_WRONG or args.most < DEFAULT_MOST
    print(f"{wrong} wrong mutants, {len(credited)} credited, {len(refused)} right ones refused")
    if credited or refused or not has_enough:
        sys.exit(1)


if __name__ == "__main__":
    main()
