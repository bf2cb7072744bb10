"""Reward functions of TRL's form: what they are called with, in a run and in its evaluations."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import reference
from runs import ROOT, read_jsonl

from jzero import config
from jzero.config import RewardConfig, TaskConfig
from jzero.environments import batched_rewards
from jzero.environments.batched_rewards import Episode
from jzero.errors import UserError
from jzero.loops import rl
from jzero.model.tokenizer import countdown
from jzero.rewards import rewards, user_functions
from jzero.rewards.trl_rewards import TrainerState
from jzero.tasks import evaluated_task
from jzero.types import Grade, JsonValue, Problem
from jzero.workers.pool import Pool

SOURCE = '''
import asyncio
import json
import os


def text_of(completion):
    return completion if isinstance(completion, str) else completion[0]["content"]


def shorter(completions, **kwargs):
    """The longest completion of the batch gets -1/2, and the shortest 1/2."""
    lengths = [len(text_of(completion)) for completion in completions]
    if max(lengths) == min(lengths):
        return [0.0] * len(lengths)
    return [0.5 - (length - min(lengths)) / (max(lengths) - min(lengths)) for length in lengths]


def seen(**kwargs):
    """Writes down what it is called with."""
    state = kwargs.pop("trainer_state")
    kwargs = {name: value for name, value in kwargs.items() if not callable(value)}
    kwargs["state"] = [state.global_step, state.max_steps, state.epoch]
    with open(os.environ["SEEN"], "a") as file:
        file.write(json.dumps(kwargs) + "\\n")
    return [float(i) for i in range(len(kwargs["completions"]))]


def by_level(level):
    return [item / 2 for item in level]


def names(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, **kwargs):
    log_metric("batch", len(prompts))
    log_extra("columns", sorted(kwargs))
    return [len(ids) + 100 * trainer_state.global_step for ids in completion_ids]


async def opinion(completions, level, **kwargs):
    await asyncio.sleep(0)
    return [float(item) if item > 1 else None for item in level]


def scaled(factor: float = 1.0, *, sign: str = "+", steps=(1,)):
    def scaled_reward(completions, **kwargs):
        scale = -factor if sign == "-" else factor
        return [scale * len(text_of(completion)) for completion in completions]
    return scaled_reward


def wants_solution(completions, solution, **kwargs):
    return [float(item == "1") for item in solution]


def wants_instance(environments, **kwargs):
    return [1.0 for _ in environments]


def short(completions, **kwargs):
    return [1.0]


def by_name(solution, **kwargs):
    return [float(len(text_of(item))) for item in kwargs["completions"]]


def hidden(completions, **kwargs):
    return [float(item) for item in kwargs["hidden"]]


async def thinks(completions, completion_ids, solution, **kwargs):
    await asyncio.sleep(0)
    return [len(ids) if item == "$12$" else None for ids, item in zip(completion_ids, solution)]


def number():
    return 7
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("mine") / "trl_file.py"
    path.write_text(SOURCE, encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(1) as pool:
        yield pool


USER = [{"role": "user", "content": "Why?"}]
TEXTS = ("a", "bbb", "cc")
STATE = TrainerState(global_step=4, max_steps=9)


def episodes(*texts: str, prompt: JsonValue = USER, known: bool = True) -> list[Episode]:
    """Returns an episode of one turn for each text, whose row has the level 0, 1, 2, ..."""
    made = []
    for number, text in enumerate(texts):
        row = {"level": number, "prompt": "not this", "solution": "1"}
        problem = Problem(str(number), "math", prompt, {"answer": "1"}, row)
        ids = list(range(len(text))) if known else None
        made.append(Episode(problem, [(text, Grade(1.0, True, "correct"))], ids))
    return made


def graded(
    pool: Pool, name: str, batches: list[list[Episode]], state: TrainerState = STATE
) -> list[list[Grade]]:
    """Returns the grades of each batch, with the rewards of one function."""
    task = TaskConfig(reward=RewardConfig(functions=("accuracy", name)))
    results = batched_rewards.call_all(pool, task, batches, state)
    done = []
    for batch, result in zip(batches, results, strict=True):
        grades = [grade for episode in batch for _, grade in episode.turns]
        grades = batched_rewards.add(grades, result)
        ones = [1] * len(grades)
        done.append(rewards.add_batch_rewards(grades, ones, ones, task.reward))
    return done


def test_a_prefix_requests_the_form_that_names_do_not_show(pool: Pool, file: str) -> None:
    with pytest.raises(UserError, match="has the parameter level"):
        rewards.check_function(f"{file}:by_level")
    name = f"trl:{file}:by_level"
    rewards.check_function(name)
    [grades] = graded(pool, name, [episodes(*TEXTS)])
    assert [grade.parts[name] for grade in grades] == [0.0, 0.5, 1.0]


@pytest.mark.parametrize("prompt", [USER, "Why?"], ids=["messages", "text"])
def test_completions_of_a_batch_are_compared(pool: Pool, file: str, prompt: JsonValue) -> None:
    name = f"{file}:shorter"
    whole, pair = graded(pool, name, [episodes(*TEXTS, prompt=prompt), episodes("aaaa", "a")])
    assert [grade.parts[name] for grade in whole] == [0.5, -0.5, 0.0]
    assert [grade.score for grade in whole] == [1.5, 0.5, 1.0]
    assert [grade.parts[name] for grade in pair] == [-0.5, 0.5]


def test_it_gets_what_trl_passes(pool: Pool, file: str) -> None:
    name = f"{file}:names"
    [grades] = graded(pool, name, [episodes(*TEXTS)])
    assert [grade.parts[name] for grade in grades] == [401, 403, 402]
    assert {grade.parts[f"{name}.batch"] for grade in grades} == {3.0}


def test_where_token_ids_are_not_known_a_function_that_asks_for_them_fails(
    pool: Pool, file: str
) -> None:
    """A server that is not jzero's sends text only."""
    [grades] = graded(pool, f"{file}:names", [episodes(*TEXTS, known=False)])
    assert all(grade.failed and "asks for completion_ids" in grade.reason for grade in grades)


def test_an_async_function_may_have_no_opinion(pool: Pool, file: str) -> None:
    name = f"{file}:opinion"
    [grades] = graded(pool, name, [episodes("a", "b", "c", "d")])
    assert [grade.parts.get(name) for grade in grades] == [None, None, 2.0, 3.0]
    assert [grade.score for grade in grades] == [1.0, 1.0, 3.0, 4.0]
    assert not any(grade.failed for grade in grades)


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ("", [1, 3, 2]),
        ("2.5", [2.5, 7.5, 5.0]),
        ("factor=-2", [-2, -6, -4]),
        ("2, sign='-', steps=[1, (2, 3)]", [-2, -6, -4]),
        ('factor=1e0, steps={"a:b(c)": None}', [1, 3, 2]),
    ],
)
def test_a_factory_is_called_with_its_arguments(
    pool: Pool, file: str, arguments: str, expected: list[float]
) -> None:
    name = f"{file}:scaled({arguments})"
    rewards.check_rewards(RewardConfig(functions=(name,)))
    [grades] = graded(pool, name, [episodes(*TEXTS)])
    assert [grade.parts[name] for grade in grades] == expected


@pytest.mark.parametrize(
    "call, message",
    [
        ("scaled(factor=open('x'))", "the arguments of a factory are numbers, texts in quotes"),
        ("scaled(1)(2)", "the arguments of a factory"),
        ("scaled(**{})", "the arguments of a factory"),
        ("scaled(factor=)", "the arguments of a factory"),
        ("scaled(weight=1)", "TypeError.*unexpected keyword argument 'weight'"),
        ("number()", "TypeError: no function"),
        ("absent(1)", "AttributeError"),
    ],
)
def test_a_factory_that_cannot_be_called_is_refused(file: str, call: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        rewards.check_rewards(RewardConfig(functions=(f"{file}:{call}",)))


def test_a_function_with_its_columns_in_kwargs_has_the_form(pool: Pool, file: str) -> None:
    name = f"{file}:by_name"
    [grades] = graded(pool, name, [episodes(*TEXTS)])
    assert [grade.parts[name] for grade in grades] == [1, 3, 2]


@pytest.mark.parametrize(
    "function, reason",
    [
        ("short", "TypeError: returned 1 rewards for 3 responses"),
        ("hidden", "KeyError: 'hidden'"),
    ],
)
def test_a_function_that_fails_fails_its_batch_alone(
    pool: Pool, file: str, function: str, reason: str
) -> None:
    failed, right = graded(pool, f"{file}:{function}", [episodes(*TEXTS), with_hidden(1)])
    for grade in failed:
        assert grade.failed and grade.failed_function.endswith(function)
        assert reason in grade.reason
    assert not any(grade.failed for grade in right)


def with_hidden(count: int) -> list[Episode]:
    problem = Problem("0", "math", "p", None, {"hidden": 1})
    return [Episode(problem, [("a", Grade(1.0, True, ""))], [1])] * count


def test_an_episode_of_several_turns_is_one_completion(pool: Pool, file: str) -> None:
    """The reward is that of the last turn, and the completion has what was said in between."""
    name = f"{file}:shorter"
    turns = [("ab", Grade(0.0, False, "", reply="no")), ("c", Grade(1.0, True, ""))]
    two = Episode(Problem("0", "guess", "p", None), turns, [1])
    one = Episode(Problem("1", "guess", "p", None), [("abc", Grade(1.0, True, ""))], [1])
    [grades] = graded(pool, name, [[two, one]])
    assert [grade.parts.get(name) for grade in grades] == [None, -0.5, 0.5]


def test_rows_of_several_sets_have_all_columns(pool: Pool, file: str) -> None:
    """As rows of sets that are concatenated: None stands where a row has no such column."""
    name = f"{file}:wants_solution"
    problems = [Problem("0", "math", "p", None, {"solution": "1"}), Problem("1", "math", "p", None)]
    batch = [Episode(problem, [("a", Grade(0.0, False, ""))], [1]) for problem in problems]
    [grades] = graded(pool, name, [batch])
    assert [grade.parts[name] for grade in grades] == [1.0, 0.0]


def test_a_file_of_a_package_imports_its_neighbors(tmp_path: Path) -> None:
    package = tmp_path / "open_rewards"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "lengths.py").write_text("def measure(text):\n    return len(text)\n")
    (package / "all.py").write_text(
        "from .lengths import measure\n\n\ndef mine(response):\n    return measure(response)\n"
    )
    grade = rewards.call_function(f"{package}/all.py:mine", "abc", None, TaskConfig())
    assert grade is not None and grade.value == 3.0


# Which functions an evaluation calls.


def problem(row: JsonValue, task: str = "math") -> Problem:
    return Problem("p", task, "q", None, row)


def test_a_set_without_a_column_leaves_the_function_out(file: str) -> None:
    functions = ("accuracy", f"{file}:wants_solution", f"{file}:shorter", "length")
    reward = RewardConfig(functions=functions, weights=(1.0, 2.0, 3.0, 4.0))
    task, settings = TaskConfig(reward=reward), config.EvalConfig()

    problems = [problem({"solution": "1"}), problem({"solution": "2", "level": 1})]
    assert evaluated_task.left_out(task, problems) == {}
    assert evaluated_task.settings_for(task, settings, problems).reward == reward

    problems.append(problem({"level": 1}))
    reasons = evaluated_task.left_out(task, problems)
    assert reasons == {functions[1]: "whose rows have no column solution"}
    evaluated = evaluated_task.settings_for(task, settings, problems).reward
    assert evaluated.functions == ("accuracy", f"{file}:shorter", "length")
    assert evaluated.weights == (1.0, 3.0, 4.0)

    none = evaluated_task.settings_for(task, config.EvalConfig(rewards=False), problems).reward
    assert (none.functions, none.weights) == (("accuracy",), (1.0,))


def test_instances_are_only_where_an_environment_is(file: str) -> None:
    name = f"{file}:wants_instance"
    task = TaskConfig(reward=RewardConfig(functions=(name,)))
    assert evaluated_task.left_out(task, [problem({}, "environment")]) == {}
    assert evaluated_task.left_out(task, [problem({})]) == {name: "which have no environments"}
    evaluated = evaluated_task.settings_for(task, config.EvalConfig(), [problem({})]).reward
    assert evaluated.functions == ("accuracy",)
    assert user_functions.is_of_each_episode(name)


def test_an_evaluation_has_a_verifier_of_its_own() -> None:
    task = TaskConfig(verifier="open_r1")

    def verifier(settings: config.EvalConfig, kind: str, task: TaskConfig = task) -> str:
        return evaluated_task.settings_for(task, settings, [problem({}, kind)]).verifier

    assert verifier(config.EvalConfig(), "math") == "open_r1"
    assert verifier(config.EvalConfig(verifier="fast"), "math") == "fast"
    assert verifier(config.EvalConfig(verifier="sympy"), "gsm8k") == "sympy"
    # A verifier of mathematics has no verdict on countdown, and the other way round.
    assert verifier(config.EvalConfig(verifier="sympy"), "countdown") == "fast"
    assert verifier(config.EvalConfig(), "math", TaskConfig(verifier="oat_countdown")) == "fast"

    several = config.EvalConfig(verifiers=("fast", "oat_countdown", "sympy"))
    asked = evaluated_task.further_verifiers
    assert asked(several, [problem({}, "math")]) == ["fast", "sympy"]
    assert asked(several, [problem({}, "countdown")]) == ["fast", "oat_countdown"]
    assert asked(several, [problem({}, "jzero.tasks.suites:grade_choice")]) == []


@pytest.mark.parametrize(
    "verifiers, message",
    [(("fats",), "eval.verifiers=fats is not one of fast"), (("fast", "fast"), "twice")],
)
def test_impossible_verifiers_are_refused(verifiers: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        evaluated_task.check_verifiers(config.EvalConfig(verifiers=verifiers))


# The command that compares with TRL.


def compared_with_trl(file: str, environment: dict[str, str]) -> str:
    """Returns what the command prints about functions of the file, for scripted responses."""
    names = ("shorter", "wants_solution", "scaled(factor=2.5)", "thinks")
    script = ROOT / "benchmarks/published/trl_rewards.py"
    done = subprocess.run(
        [sys.executable, script, file, "--functions", *names, "--batches=3", "--no-run"],
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    table = done.stdout.splitlines()[-len(names) :]
    for line, name in zip(table, names, strict=True):
        function, kind, *counts = line.split()
        assert (function, kind, counts[:2]) == (name, "scripted", ["36", "36"])
    assert int(table[0].split()[-1]) > 20  # values of a function that compares are not all 0
    return done.stdout


def test_the_command_compares_with_the_convention_of_trl(
    file: str, environment: dict[str, str]
) -> None:
    assert "trl_file.py under TRL" in compared_with_trl(file, environment)


@pytest.mark.peer
def test_the_command_compares_with_trl(file: str, environment: dict[str, str]) -> None:
    trl = pytest.importorskip("trl")
    assert f"trl_file.py under TRL {trl.__version__}" in compared_with_trl(file, environment)


# A run.

CHAT = (
    "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}> {% endif %}"
)


def math_run(tmp_path: Path, functions: tuple[str, ...], **sections: dict) -> config.Config:
    """Returns a run on four problems with the columns of open-r1, and two suites."""
    tokenizer = countdown()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    rows = [
        {"problem": f"{i}+1?", "answer": str(i + 1), "solution": f"${i + 1}$"} for i in range(4)
    ]
    plain = [{"problem": f"{i}+2?", "answer": str(i + 2)} for i in range(3)]
    for name, content in [("train", rows), ("alike", rows[:3]), ("plain", plain)]:
        lines = "".join(json.dumps(row) + "\n" for row in content)
        (tmp_path / f"{name}.jsonl").write_text(lines)
    defaults: dict[str, dict] = {
        "model": {
            "tokenizer": str(tmp_path / "tokenizer"),
            "arch": config.tiny_arch(
                hidden_size=32, intermediate_size=32, num_hidden_layers=1, head_dim=8
            ),
        },
        "task": {
            "name": "math",
            "data": str(tmp_path / "train.jsonl"),
            "template": "chat",
            "system_prompt": "none",
            "reward": RewardConfig(functions=functions),
        },
        "rollout": {
            "num_prompts": 2,
            "group_size": 4,
            "max_prompt_tokens": 16,
            "max_new_tokens": 12,
            "num_slots": 8,
            "page_size": 8,
            "decode_steps": 4,
            "temperature": 1.0,
        },
        "train": {"steps": 2, "microbatch_tokens": 320, "packs_per_row": 1, "logged_rollouts": 8},
        "eval": {
            "problems": 0,
            "samples": 2,
            "greedy": False,
            "suites": (f"alike={tmp_path}/alike.jsonl", f"plain={tmp_path}/plain.jsonl"),
        },
    }
    merged = {name: defaults.get(name, {}) | sections.get(name, {}) for name in defaults | sections}
    return reference.settings(**merged)


@pytest.mark.usefixtures("quick_runs")
@pytest.mark.parametrize("batch", ["step", "group"])
def test_a_run_and_its_evaluations_compare_completions(
    file: str,
    batch: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SEEN", str(tmp_path / "seen.jsonl"))
    names = ("accuracy", f"{file}:shorter", f"{file}:seen", f"{file}:wants_solution")
    settings = math_run(tmp_path, names)
    settings.task.reward.batch = batch
    settings.eval.verifiers = ("last_number",)
    rl.train(settings, tmp_path / "run")

    # What the functions saw: batches of a step or of a group, of whole groups.
    calls = read_jsonl(tmp_path / "seen.jsonl")
    in_training = [call for call in calls if len(call["completions"]) == 8 or batch == "group"]
    sizes = {"step": [6, 6, 8, 8, 6, 6], "group": [2] * 6 + [4] * 4 + [2] * 6}[batch]
    assert [len(call["completions"]) for call in calls] == sizes
    for call in calls:
        assert all(message["role"] == "assistant" for [message] in call["completions"])
        assert all(prompt[-1]["role"] == "user" for prompt in call["prompts"])
        assert all(0 < len(ids) <= 12 for ids in call["completion_ids"])
        columns = {"problem", "answer", "solution"} & call.keys()
        assert columns >= {"problem", "answer"}
        for prompt, question in zip(call["prompts"], call["problem"], strict=True):
            assert prompt[-1]["content"] == question
    states = [call["state"] for call in calls if len(call["completions"]) in (8, 4)]
    steps = [[0, 2, 0.0], [1, 2, 0.5]]
    assert states == (steps if batch == "step" else [state for state in steps for _ in range(2)])
    assert in_training

    # The values of a slow, independent definition.
    rows = read_jsonl(tmp_path / "run" / "samples.jsonl")
    size = 8 if batch == "step" else 4
    assert len(rows) == 16
    check_values([rows[i : i + size] for i in range(0, 16, size)], names)
    metrics = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    for step, row in enumerate(metrics):
        of_step = [item["rewards"][names[1]] for item in rows[8 * step : 8 * step + 8]]
        metric = f"reward/{names[1].rpartition('/')[2].replace(':', '.')}"
        assert row[metric] == pytest.approx(sum(of_step) / 8, abs=1e-6)

    # The evaluations, before the run and after it.
    evaluations = tmp_path / "run" / "evaluations"
    last = metrics[-1]
    for suite in ("alike", "plain"):
        problems = read_jsonl(evaluations / "after" / f"{suite}-avg@2.jsonl")
        samples = [sample for problem in problems for sample in problem["samples"]]
        size = 6 if batch == "step" else 2
        batches = [samples[i : i + size] for i in range(0, 6, size)]
        check_values(batches, names if suite == "alike" else names[:3])
        values = [sample["rewards"][names[1]] for sample in samples]
        metric = f"eval/{suite}/reward/{names[1].rpartition('/')[2].replace(':', '.')}"
        assert last[metric] == pytest.approx(sum(values) / 6, abs=1e-6)
        assert last[f"eval/{suite}/accuracy_by/last_number"] >= last[f"eval/{suite}/accuracy"]
    assert "eval/alike/score" in last
    missing = [name for name in last if "plain" in name and ("score" in name or "wants" in name)]
    assert not missing
    assert last["eval/average/length"] > 0 and "eval/average/score" not in last
    line = f"plain: {names[3]} is not called in evaluations, whose rows have no column solution"
    assert line in capsys.readouterr().out


def check_values(batches: list[list[JsonValue]], names: tuple[str, ...]) -> None:
    for batch in batches:
        lengths = [len(row["response"]) for row in batch]
        spread = max(lengths) - min(lengths)
        for place, row in enumerate(batch):
            assert row["rewards"].keys() == set(names)
            expected = 0.5 - (len(row["response"]) - min(lengths)) / spread if spread else 0.0
            assert row["rewards"][names[1]] == pytest.approx(expected)
            assert row["rewards"][names[2]] == place


@pytest.mark.usefixtures("quick_runs")
def test_a_function_that_fails_in_an_evaluation_does_not_end_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The suite's rows have no column `solution`, which the function takes from its kwargs."""
    path = tmp_path / "mine.py"
    path.write_text(
        "def mine(completions, **kwargs):\n    return [float(len(x)) for x in kwargs['solution']]\n"
    )
    settings = math_run(tmp_path, ("accuracy", f"{path}:mine"), train={"steps": 1})
    settings.eval.suites = settings.eval.suites[1:]
    rl.train(settings, tmp_path / "run")
    [metrics] = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert metrics["reward/failed"] == 0.0
    assert metrics["eval/plain/failed"] == 1.0
    assert "eval/plain/accuracy" in metrics and "eval/plain/score" not in metrics
    assert "6 of 6 gradings failed" in capsys.readouterr().out
