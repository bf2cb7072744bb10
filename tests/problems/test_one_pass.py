"""One pass over N rows sees every row once: for each task, on one and two hosts, and resumed."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import cast

import jax
import pytest
from tiny import mixed_task

from jzero import setup
from jzero.config import Config, RolloutConfig, Sft, TaskConfig
from jzero.loops import sft
from jzero.problems import problem_sets
from jzero.problems.problem_sets import PassEnd
from jzero.rollout.async_stream import RolloutStream, TrainingProblems
from jzero.rollout.sampler import Sampler

NUM_ROWS = 7
# num_prompts, and whether the last rows of a pass are dropped. 4, 2 and 3 do not divide 7.
SIZES = list(product((1, 2, 3, 4, 7), (False, True)))

ENVIRONMENT = '''
class Ask:
    """Asks the question of its row."""

    def reset(self, row, seed):
        return row["problem"]

    def step(self, text):
        return None, 1.0, True


def length(response):
    return float(len(response))
'''


def steps_of_passes(passes: int, count: int, num_rows: int, end: PassEnd) -> Iterator[range]:
    for step in range(1, problem_sets.num_steps(passes, count, num_rows, end) + 1):
        yield problem_sets.rows_of_step(step, count, num_rows, end)


@pytest.mark.parametrize("num_rows", range(1, 13))
@pytest.mark.parametrize("count", range(1, 9))
@pytest.mark.parametrize("passes", [1, 2, 3])
def test_every_pass_has_every_index_once(num_rows: int, count: int, passes: int) -> None:
    expected = list(range(passes * num_rows))

    short = [i for indices in steps_of_passes(passes, count, num_rows, "short") for i in indices]
    assert short == expected

    complete = list(steps_of_passes(passes, count, num_rows, "complete"))
    order = [i for indices in complete for i in indices]
    # Rows of the next pass complete the last step, and no further step.
    assert order[: len(expected)] == expected
    assert len(order) - len(expected) < count
    assert {len(indices) for indices in complete} == {count}

    if num_rows >= count:
        steps = list(steps_of_passes(passes, count, num_rows, "drop"))
        order = [i for indices in steps for i in indices]
        by_pass = Counter(i // num_rows for i in order)
        assert len(set(order)) == len(order)
        assert by_pass == {number: num_rows // count * count for number in range(passes)}


# Rows that every task reads: all columns of all of them, a task that has no split of its own.


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    for split, first in (("train", 0), ("test", 50)):
        lines = []
        for i in range(first, first + NUM_ROWS):
            row = {
                "problem": f"{i}+1?",
                "answer": str(i + 1),
                "numbers": [i + 1, i + 60],
                "target": 2 * i + 61,
                "input_output": json.dumps({"inputs": ["1"], "outputs": [str(i)]}),
                "task": "math",
            }
            lines.append(json.dumps(row) + "\n")
        (folder / f"{split}.jsonl").write_text("".join(lines))
    (folder / "ask.py").write_text(ENVIRONMENT)
    return folder


def task_of(name: str, folder: Path) -> TaskConfig:
    task = TaskConfig(name=name, data=str(folder))
    match name:
        case "environment":
            return replace(task, environment=f"{folder}/ask.py:Ask", template="plain")
        case "code":
            return replace(task, template="plain")
        case "mixed":
            return mixed_task(folder)
        case "open":
            reward = replace(task.reward, functions=(f"{folder}/ask.py:length",))
            return replace(task, template="no", reward=reward)
    return task


def rows_seen(task: TaskConfig, num_prompts: int, num_hosts: int) -> list[list[str]]:
    """Returns the prompts of each step of a run of one pass, which starts anew before each step."""
    settings = Config(task=task, rollout=RolloutConfig(num_prompts=num_prompts))
    settings.train = replace(settings.train, prompt_epochs=1.0, steps=0)
    steps = []
    for step in range(1, setup.with_steps(settings).train.steps + 1):
        prompts: list[str] = []
        for host in range(num_hosts):
            drawn = TrainingProblems(task, 5, num_prompts).draw(step)
            share = slice(
                num_prompts * host // num_hosts,
                num_prompts * (host + 1) // num_hosts,
            )
            prompts += [str(problem.prompt) for problem in drawn[share]]
        steps.append(prompts)
    return steps


NAMES = ("math", "gsm8k", "math_multiturn", "countdown", "code", "open", "environment", "mixed")


@pytest.mark.parametrize("num_hosts", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_one_pass_of_a_task_has_every_row_once(name: str, num_hosts: int, rows: Path) -> None:
    for num_prompts, drop_last in SIZES:
        task = replace(task_of(name, rows), drop_last=drop_last)
        steps = rows_seen(task, num_prompts, num_hosts)
        seen = [prompt for prompts in steps for prompt in prompts]

        if drop_last:
            assert len(set(seen)) == len(seen) == NUM_ROWS // num_prompts * num_prompts
        else:
            assert len(set(seen[:NUM_ROWS])) == NUM_ROWS
            assert set(seen) == set(seen[:NUM_ROWS])
            assert len(seen) - NUM_ROWS < num_prompts


@pytest.mark.parametrize("num_hosts", [1, 2])
def test_one_pass_of_an_asynchronous_stream_has_every_row_once(
    num_hosts: int, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each host continues with the state of its stream before every group."""
    monkeypatch.setattr(jax, "process_count", lambda: num_hosts)
    for num_prompts in (2, 3, 4):
        rollout = RolloutConfig(num_prompts=num_prompts)
        problems = TrainingProblems(task_of("math", rows), 5, num_prompts)
        seen = []
        for host in range(num_hosts):
            monkeypatch.setattr(jax, "process_index", lambda host=host: host)
            numbers: list[int] = []
            # The stream of a host ends at the last step that has rows of the first pass.
            steps = problem_sets.num_steps(1.0, num_prompts, NUM_ROWS, "complete")
            saved: bytes | None = None
            while True:
                stream = RolloutStream(cast(Sampler, None), problems, rollout)
                if saved is not None:
                    stream.restore(saved)
                number = stream._next_problem_number()
                if number >= steps * num_prompts:
                    break
                numbers.append(number)
                saved = stream.to_bytes()
            seen += [(number, str(stream.problem_of(number).prompt)) for number in numbers]
        order = [prompt for _, prompt in sorted(seen)]
        assert len(set(order[:NUM_ROWS])) == NUM_ROWS
        assert len(order) == steps * num_prompts


def test_epochs_of_fine_tuning_have_every_example_once(tmp_path: Path) -> None:
    path = tmp_path / "examples.jsonl"
    lines = [json.dumps({"prompt": f"{i}?", "completion": str(i)}) for i in range(NUM_ROWS)]
    path.write_text("\n".join(lines))
    data = sft.read_data(Config(sft=Sft(data=str(path), eval_data="")))

    for count in range(1, 10):
        for epochs in (1, 2):
            seen = []
            for indices in steps_of_passes(epochs, count, data.num_examples, data.epoch_end):
                seen += [data.rows[index]["prompt"] for index in indices]
            assert Counter(seen) == {f"{i}?": epochs for i in range(NUM_ROWS)}
