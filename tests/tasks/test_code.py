"""The task code: data in public layouts, scores of right, wrong and cheating programs, rewards."""

import json
import sys
from pathlib import Path

import pytest

from configs import code as recipes
from jzero.config import Local, Remote, RewardConfig, TaskConfig
from jzero.errors import UserError
from jzero.programming import code_runs, code_tests
from jzero.rewards import rewards
from jzero.sandbox import levels
from jzero.tasks import check_task_settings, code, code_toy, find_task
from jzero.workers.pipe import TurnRequest
from jzero.workers.pool import Pool

BEST = next(level for level in reversed(levels.LEVELS) if not levels.failure(level))
SANDBOX = Local(level=BEST, seconds=1.0)
SQUARES = {
    "tests": [{"stdin": str(n), "expected": str(n * n)} for n in (3, 4, 5, 6)],
    "setup": "",
}


def fenced(source: str) -> str:
    return f"Here it is:\n```python\n{source}\n```\n"


def make_task(**changes: object) -> TaskConfig:
    return TaskConfig(name="code", template="plain", **({"sandbox": SANDBOX} | changes))


# Scores

PROGRAMS = [
    ("right", "print(int(input()) ** 2)", 1.0, "correct"),
    ("half", "n = int(input())\nprint(n * n if n < 5 else 0)", 0.5, "test 3 of 4: wrong output"),
    ("wrong", "print(0)", 0.0, "test 1 of 4: wrong output"),
    ("crash", "print(9)\n1 / 0", 0.0, "test 1 of 4: crashed with 1 ZeroDivisionError"),
    ("no syntax", "def (", 0.0, "test 1 of 4: crashed with 1 SyntaxError"),
    ("exits", "import os\nos._exit(0)", 0.0, "test 1 of 4: wrong output"),
    ("prints all", "print(9, 16, 25, 36)", 0.0, "test 1 of 4: wrong output"),
    ("reads the tests", "import sys\nprint(sys._getframe(1).f_locals)", 0.0, "test 1 of 4: wrong"),
    ("forges", "print('{\"passed\": 4}')", 0.0, "test 1 of 4: wrong output"),
    ("kills", "import os, signal\nos.kill(os.getppid(), 9)", 0.0, "test 1 of 4: "),
]


def test_programs_score_what_they_are_worth_and_the_pool_stays_whole() -> None:
    task = make_task(reward=RewardConfig(functions=("code", "binary_code")))
    with Pool(1) as pool:
        for name, source, _, _ in PROGRAMS:
            pool.step(name, TurnRequest("code", fenced(source), SQUARES, task))
        pool.step("no program", TurnRequest("code", "print(int(input()) ** 2)", SQUARES, task))
        grades = dict(pool.drain())
        assert pool.counters["restarted"] == 0

    assert grades["no program"].reason == "no answer"
    assert grades["no program"].parts == {"code": 0.0, "binary_code": 0.0}
    for name, _, score, reason in PROGRAMS:
        grade = grades[name]
        assert grade.score == score, name
        assert grade.reason.startswith(reason), name
        assert grade.correct == (score == 1)
        assert grade.parts == {"code": score, "binary_code": float(score == 1)}
        assert not grade.failed


def test_a_slow_program_scores_0_within_its_time() -> None:
    task = make_task()
    task.sandbox = Local(level=BEST, seconds=0.2)
    grade = code.grade(fenced("while True: pass"), SQUARES, task)
    assert (grade.score, grade.reason) == (0.0, "test 1 of 4: too slow")


def test_only_all_tests_count_if_the_options_say_so() -> None:
    half = fenced(PROGRAMS[1][1])
    assert code.grade(half, SQUARES, make_task()).score == 0.5
    assert code.grade(half, SQUARES, make_task(options=("reward=all",))).score == 0.0
    verdict = code_runs.run_tests(PROGRAMS[2][1], SQUARES, make_task(), run_all=False)
    assert (verdict.passed, verdict.run, verdict.all) == (0, 1, 4)  # the first failure is enough


def test_a_sandbox_that_fails_is_no_score_of_0() -> None:
    task = make_task(reward=RewardConfig(functions=("code",)))
    task.sandbox = Remote(url="http://127.0.0.1:9", protocol="piston")
    grade = code.grade(fenced("print(1)"), SQUARES, task)
    assert grade.failed
    assert grade.reason.startswith(
        "error: task.sandbox.url=http://127.0.0.1:9 has not answered in 3 tries"
    )
    assert rewards.add_response_rewards(grade, fenced("print(1)"), SQUARES, task).failed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"options": ("reward=most",)}, "is not one of fraction, all"),
        ({"options": ("max_tests=-1",)}, "max_tests=-1"),
        ({"options": ("language=c",)}, "is not an option of this task"),
        ({"sandbox": Remote(url="localhost:2000")}, r"task\.sandbox\.url=localhost:2000"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_the_run(changes, message) -> None:
    task = make_task(**changes)
    with pytest.raises(UserError, match=message):
        check_task_settings(task, 1)


def test_the_run_says_which_level_it_reached() -> None:
    task = make_task()
    assert find_task("code").notes(task) == [f"sandbox: level {BEST}"]
    assert find_task("code").metrics(task, [])["sandbox/level"] == levels.LEVELS.index(BEST)
    task.sandbox = Local(level="none")
    [line] = find_task("code").notes(task)
    assert line == "sandbox: level none: nothing keeps programs from what this user may do"


# open-r1's rewards, on the cases of its own tests

THOUGHT = "<think>\nAnalysis\n</think>\n<answer>\n"
FORMAT_CASES = [
    (THOUGHT + "```python\ndef hello():\n    print('world')\n```\n</answer>", "python", 1.0),
    ("```python\ndef hello():\n    print('world')\n```", "python", 0.0),
    ("<think>Some thinking</think><answer>Just plain text</answer>", "python", 0.0),
    ("<think>A</think><answer>```javascript\nconsole.log('hello');\n```</answer>", "python", 0.0),
    ("<think>A</think><answer>```\ndef hello(): pass\n```</answer>", "python", 0.0),
    ("<answer>```python\ndef hello(): pass\n```</answer><think>A</think>", "python", 0.0),
    (
        "<think>\nHere:\n```python\nx = 1\n```\nNow:\n</think>\n<answer>\n"
        "```python\ndef solution():\n    return 42\n```\n</answer>",
        "python",
        1.0,
    ),
    (THOUGHT + "```javascript\nconsole.log('hello');\n```\n</answer>", "javascript", 1.0),
    (THOUGHT + "```javascript\nconsole.log('hello');\n```\n</answer>", "python", 0.0),
    (
        THOUGHT + "```python\nclass A:\n    def f(self):\n        pass\n```\n</answer>",
        "python",
        1.0,
    ),
]


@pytest.mark.parametrize(("response", "language", "reward"), FORMAT_CASES)
def test_code_format_has_open_r1s_values(response: str, language: str, reward: float) -> None:
    gold = {"language": language}
    assert rewards.PROBLEM_REWARDS["code_format"](response, gold, make_task()) == reward


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\na\n```", "a\n"),
        ("```python\na\n``` then ```python\nb\n```", "b\n"),
        ("```\na\n```", ""),
        ("```py\na\n```", "a\n"),
        ("```Python\na\n```", "a\n"),
        ("```python3 \t\na\n```", "a\n"),
        ("```python\r\na\r\n```", "a\r\n"),
        ("```python\na\n```\n```PY\nb\n```", "b\n"),
        ("```pyx\na\n```", ""),
        ("```python a\n```", ""),
        ("```python\nunfinished", ""),
        ("no block", ""),
    ],
)
def test_the_program_is_the_last_block_of_python(response: str, program: str) -> None:
    assert code_runs.extract_program(response) == program


def test_rewards_of_code_do_not_apply_where_there_are_no_tests() -> None:
    for name in ("code", "binary_code"):
        assert rewards.PROBLEM_REWARDS[name]("x", {"answer": "5"}, make_task()) is None


# Layouts. Every row asks for the square of a number.

STDIN = [{"stdin": "3\n", "expected": "9\n"}, {"stdin": "4\n", "expected": "16\n"}]
CALL = [{"function": "square", "arguments": [3], "expected": [9]}]
ROWS = {
    "open-r1": (
        {
            "verification_info": {
                "language": "python",
                "test_cases": [
                    {"fn_name": None, "input": "3\n", "output": "9\n", "type": "stdin_stdout"},
                    {"fn_name": None, "input": "4\n", "output": "16\n", "type": "stdin_stdout"},
                ],
            }
        },
        STDIN,
    ),
    "another language": ({"verification_info": {"language": "cpp", "test_cases": []}}, []),
    "taco": (
        {"input_output": json.dumps({"inputs": ["3\n", "4\n"], "outputs": ["9\n", "16\n"]})},
        STDIN,
    ),
    "apps with a function": (
        {"input_output": json.dumps({"fn_name": "square", "inputs": [[3]], "outputs": [[9]]})},
        [{"function": "square", "arguments": [3], "expected": [9]}],
    ),
    "deepcoder, taco": (
        {"tests": json.dumps({"inputs": ["3\n", "4\n"], "outputs": ["9\n", "16\n"]})},
        STDIN,
    ),
    "deepcoder, lcb": (
        {
            "tests": json.dumps(
                [
                    {
                        "input": "3",
                        "output": "9",
                        "testtype": "functional",
                        "metadata": {"func_name": "square"},
                    }
                ]
            )
        },
        CALL,
    ),
    "live code bench": (
        {
            "public_test_cases": json.dumps(
                [{"input": "3", "output": "9", "testtype": "functional"}]
            ),
            "private_test_cases": "eJxrYJ0qwgABGmIA",  # pickled
            "metadata": json.dumps({"func_name": "square"}),
        },
        [test | {"public": True} for test in CALL],
    ),
    "mbpp": (
        {
            "test_list": [
                "assert square(3) == 9",
                "assert set(f(1)) == set((1, 2))",
                "assert g(1)",
                "assert h(1) == other(1)",
            ]
        },
        [
            {"expression": "square(3)", "expected": [9]},
            {"expression": "f(1)", "check": "set(_answer)", "expected": [{"set": [1, 2]}]},
        ],
    ),
    "nothing to print": ({"tests": json.dumps({"inputs": ["3"], "outputs": ["\n"]})}, []),
    "broken": ({"tests": "{", "input_output": "[1]", "test_list": ["assert ("]}, []),
}


# What a function returns, and the outputs of its row: they are in lists of their own, or not.
OUTPUTS = {
    "each in a list": ([[9], [16]], [9, 16]),
    "lists": ([[1, 2, 3], [4, 7, 9]], [[1, 2, 3], [4, 7, 9]]),
    "a list of one item among others": ([[1], [1, 2]], [[1], [1, 2]]),
    "an empty list among others": ([[1], []], [[1], []]),
    "lists in lists": ([[[1]], [[1, 2]]], [[1], [1, 2]]),
    "bare": ([9, 16], [9, 16]),
    "texts of JSON": (["[1]", "[1, 2]"], [[1], [1, 2]]),
    "plain texts": (["1", "x"], ["1", "x"]),
    "truth values": ([[True, False], [True, True]], [[True, False], [True, True]]),
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_a_row_says_whether_its_outputs_are_in_lists(kind: str) -> None:
    outputs, expected = OUTPUTS[kind]
    inputs = [[index] for index in range(len(outputs))]
    rows = [
        {"input_output": json.dumps({"fn_name": "f", "inputs": inputs, "outputs": outputs})},
        {"tests": json.dumps({"fn_name": "f", "inputs": inputs, "outputs": outputs})},
    ]
    cases = [
        {"type": "function_call", "fn_name": "f", "input": given, "output": output}
        for given, output in zip(inputs, outputs, strict=True)
    ]
    rows += [{"tests": json.dumps(cases)}, {"verification_info": {"test_cases": cases}}]
    for row in rows:
        assert [test["expected"] for test in code_tests.read_tests(row)] == [[e] for e in expected]


@pytest.mark.parametrize(
    ("annotation", "output", "expected"),
    [
        ("List[int]", [9], [9]),
        ("list", [9], [9]),
        ("Optional[List[int]]", [9], [9]),
        ("int", [9], 9),
        ("Listing", [9], 9),
        ("List[int]", [[9, 1]], [9, 1]),  # in a list of its own
        ("List[List[int]]", [[9, 1]], [[9, 1]]),  # a matrix of one row
        ("List[List[int]]", [[[9, 1]]], [[9, 1]]),
    ],
)
def test_starter_code_says_that_a_function_returns_a_list(
    annotation: str, output: list, expected: object
) -> None:
    found = {"fn_name": "f", "inputs": [[1]], "outputs": [output]}
    starter = f"class Solution:\n    def f(self, n: List[str]) -> {annotation}:\n        "
    row = {"input_output": json.dumps(found), "starter_code": starter}
    assert code_tests.read_tests(row)[0]["expected"] == [expected]


def test_a_first_item_is_no_list() -> None:
    found = {"fn_name": "sort", "inputs": [[[3, 1, 2]], [[9, 4, 7]]]}
    found["outputs"] = [[1, 2, 3], [4, 7, 9]]
    gold = {"tests": code_tests.read_tests({"input_output": json.dumps(found)}), "setup": ""}
    assert code.grade(fenced("def sort(a): return sorted(a)"), gold, make_task()).score == 1.0
    for body in ("min(a)", "sorted(a)[0]", "[min(a)]", "sorted(a)[:2]", "iter(sorted(a))"):
        assert code.grade(fenced(f"def sort(a): return {body}"), gold, make_task()).score == 0.0


@pytest.mark.parametrize("name", ROWS)
def test_layouts_of_public_sets_are_read(name: str) -> None:
    row, tests = ROWS[name]
    assert code_tests.read_tests(row) == tests


@pytest.mark.parametrize("name", [name for name, (_, tests) in ROWS.items() if tests])
def test_a_right_program_passes_the_tests_of_every_layout(name: str) -> None:
    source = (
        "def square(n): return n * n\ndef f(n): return [1, 2]\n"
        "if __name__ == '__main__': print(square(int(input())))"
    )
    gold = {"tests": code_tests.read_tests(ROWS[name][0]), "setup": "import math"}
    assert code.grade(fenced(source), gold, make_task()).score == 1.0
    assert code.grade(fenced("def square(n): return n"), gold, make_task()).score < 1.0


def test_the_longest_tests_are_kept() -> None:
    tests = [{"stdin": "x" * size, "expected": "1"} for size in (5, 1, 9, 3)]
    assert code_tests.longest(tests, 2) == [tests[0], tests[2]]


def test_a_set_becomes_problems_and_rows_without_tests_are_counted(tmp_path: Path) -> None:
    rows = [
        {"problem": f"Square {n}.", "tests": json.dumps({"inputs": [str(n)], "outputs": ["9"]})}
        for n in range(6)
    ]
    rows.append({"problem": "Nothing.", "tests": "[]"})
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "test.jsonl").write_text(json.dumps(rows[0]))
    task = make_task(data=str(tmp_path))

    problems = find_task("code").train_problems(task, 0, 0, 5)
    assert len({problem.prompt for problem in problems}) == 5  # each once, and not the held-out one
    assert not any(problem.prompt.startswith("Square 0.") for problem in problems)
    assert find_task("code").num_train_problems(task) == 5
    notes = find_task("code").notes(task)
    assert "1 problem dropped: no test that can be run" in notes[0]
    assert "1 problem dropped: held out" in notes[1]


def test_a_set_without_tests_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"problem": "x", "answer": "1"}')
    with pytest.raises(UserError, match="needs a column of problems .* and one of tests"):
        find_task("code").train_problems(make_task(data=str(tmp_path)), 0, 0, 1)


# Toy problems


def test_the_program_of_a_formula_passes_its_tests_and_no_other_formulas() -> None:
    task = make_task(options=("reward=all",))
    [problem] = code_toy.train_problems(task, 0, 0, 1)
    [formula] = [item for item in code_toy.FORMULAS if f"{item.prefix}\n" == problem.prompt]
    other = next(item for item in code_toy.FORMULAS if item.outer != formula.outer)
    assert code.grade(code_toy.response_of(formula), problem.gold, task).correct
    assert not code.grade(code_toy.response_of(other), problem.gold, task).correct


def test_held_out_formulas_are_never_trained_on() -> None:
    task = make_task()
    held_out = {problem.prompt for problem in code_toy.eval_problems(task, 99)}
    trained = {problem.prompt for problem in code_toy.train_problems(task, 0, 0, 500)}
    shown = {code_toy.example(task, 0, index, 1.0)[0] for index in range(500)}
    assert len(held_out) == 27
    assert not held_out & (trained | shown)


def test_the_recipe_of_tiny_fits_its_own_limits() -> None:
    recipe = recipes.get_config("tiny")
    task = find_task("code")
    assert task.warm_start_tokens(recipe.task, 1.0) <= recipe.rollout.max_new_tokens
    check_task_settings(recipe.task, 1)


def test_the_server_of_a_grader_starts_without_packages_of_the_user() -> None:
    source = "import sys\nprint(any('site-packages' in path for path in sys.path), len(sys.argv))"
    gold = {"tests": [{"stdin": "", "expected": "False 1"}], "setup": ""}
    assert code.grade(fenced(source), gold, make_task()).correct, sys.path
