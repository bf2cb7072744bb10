"""Through which modules a turn passes, between the rollout's request and the environment's reply.

A profiler records the functions that run in the process of the run, from `TurnGrader.submit` until
`Pool.poll` has returned the grade with the reply, and in the grader process. It records the second
turn of an episode, when modules are imported and caches filled, without reward functions.

On the way are all modules of jzero that run outside of the environment's own code: the grader of a
task, the tools, or the user-defined class. What this code calls is the environment's own business;
`pytest -s` prints both. Not counted are the values that are handed on, with their conversion to and
from JSON (VALUES): no decision about a turn is taken there.
"""

import importlib.util
import json
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import cast

import numpy as np
import pytest

from jzero.config import RolloutConfig, TaskConfig, ToolsConfig, turns
from jzero.decoder.sequence import Sequence
from jzero.model.tokenizer import PreTrainedTokenizerFast
from jzero.rollout.turns import TurnGrader
from jzero.types import Grade, Problem, Turn
from jzero.workers.pool import Pool

MOST_MODULES = 6
# Records: a problem and a grade, settings, a sequence of tokens, and errors.
VALUES = ("types", "tokens", "errors", "setting", "config", "json_values", "decoder.sequence")

# Runs in the process of the run, and as `sitecustomize` in the grader process.
RECORDER = """
import json
import os
import socket
import sys
import threading

ON_THE_WAY, INSIDE = set(), set()
depths = {}


def profile(frame, event, argument):
    if event not in ("call", "return"):
        return
    thread = threading.get_ident()
    name = frame.f_globals.get("__name__", "")
    is_own = name in OWN or name.startswith("jzero_user_file")
    if event == "return":
        depths[thread] = max(depths.get(thread, 0) - is_own, 0)
        return
    # A constructor that `dataclass` generates only makes a record.
    if name.startswith("jzero.") and frame.f_code.co_filename != "<string>":
        (INSIDE if depths.get(thread, 0) or is_own else ON_THE_WAY).add(name[len("jzero."):])
    depths[thread] = depths.get(thread, 0) + is_own
    if name == "jzero.tasks.worker" and frame.f_code.co_name == "receive":
        # The answer has been sent.
        SOCKET.sendto(json.dumps([sorted(ON_THE_WAY), sorted(INSIDE)]).encode(), TARGET)
        clear()


def clear():
    ON_THE_WAY.clear()
    INSIDE.clear()


OWN = os.environ.get("RECORDED_OWN", "").split(",")
TARGET = os.environ.get("RECORDED_TARGET")
if TARGET and __name__ == "sitecustomize":
    # A grader process may write no files.
    SOCKET = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sys.setprofile(profile)
"""

STAIRS = """
class Stairs:
    async def reset(self, row, seed):
        self.floor = 0
        return "floor 0"

    async def step(self, response):
        self.floor += int(response)
        return f"floor {self.floor}", {"height": self.floor / 10}, self.floor == 9
"""


def countdown() -> tuple[TaskConfig, Problem, str]:
    task = TaskConfig(name="countdown", template="plain")
    gold = {"numbers": [1, 2], "target": 3}
    return task, Problem("1", "countdown", "1 2 = 3", gold), "<answer>2 - 1</answer>"


def tool() -> tuple[TaskConfig, Problem, str]:
    tools = ToolsConfig(names=("calculator",))
    task = TaskConfig(name="gsm8k", template="chat", tools=tools, turn_reward=turns.Score())
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>'
    return task, Problem("1", "gsm8k", "6*7?", {"answer": "42", "question": ""}), call


def stairs() -> tuple[TaskConfig, Problem, str]:
    task = TaskConfig(name="environment", template="plain", turn_reward=turns.Score())
    task.environment = "stairs.py:Stairs"
    task.environment_mode = "asyncio"
    gold = {"row": {}, "seed": 0, "observation": "floor 0"}
    return task, Problem("1", "environment", "floor 0", gold), "1"


CASES = {
    # Countdown's replies are `tasks.task.feedback`.
    "countdown": (countdown, "jzero.tasks.countdown,jzero.tasks.task"),
    "a tool": (tool, "jzero.environments.tools.episodes"),
    "a user-defined async environment": (stairs, "-"),
}


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "listener"))
        listener.settimeout(60)
        yield listener


def load_recorder(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("recorder", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("case", CASES)
def test_a_turn_passes_through_few_modules(
    case: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    listener: socket.socket,
) -> None:
    make, own = CASES[case]
    (tmp_path / "sitecustomize.py").write_text(RECORDER)
    (tmp_path / "stairs.py").write_text(STAIRS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("RECORDED_OWN", own)
    monkeypatch.setenv("RECORDED_TARGET", str(tmp_path / "listener"))
    recorder = load_recorder(tmp_path / "sitecustomize.py")
    task, problem, response = make()
    needs_process = case != "a user-defined async environment"

    threading.setprofile(recorder.profile)
    try:
        with Pool(int(needs_process)) as pool:
            first = play_turn(pool, task, problem, response, [])
            if needs_process:
                listener.recv(1 << 16)  # at its first receive
                listener.recv(1 << 16)  # the first turn
            recorder.clear()
            second = play_turn(pool, task, problem, response, [first], recorder)
            on_the_way, inside = set(recorder.ON_THE_WAY), set(recorder.INSIDE)
            if needs_process:
                worker_way, worker_inside = json.loads(listener.recv(1 << 16))
                on_the_way |= set(worker_way)
                inside |= set(worker_inside)
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]

    counted = sorted(name for name in on_the_way if not is_value(name))
    inside = {name for name in inside if not is_value(name)} - set(counted)
    print(f"\n{case}: {len(counted)} modules on the way: {', '.join(counted)}")
    print(f"    in the environment's own code: {', '.join(sorted(inside)) or 'none'}")
    assert second.reply is not None and not second.failed
    assert {"rollout.turns", "workers.pool"} <= set(counted)
    assert ("tasks.worker" in counted) == needs_process
    assert len(counted) <= MOST_MODULES


def is_value(name: str) -> bool:
    return name in VALUES or name.split(".")[0] in VALUES


def play_turn(
    pool: Pool,
    task: TaskConfig,
    problem: Problem,
    response: str,
    earlier: list[Grade],
    recorder: ModuleType | None = None,
) -> Grade:
    """Plays one turn as a rollout does, and returns its grade."""
    # Tokens and their tokenizer have no part in the request.
    no_tokenizer = cast(PreTrainedTokenizerFast, None)
    settings = RolloutConfig(max_turns=4)
    grader = TurnGrader(pool, task, settings, (), no_tokenizer, lambda _: problem)
    sequence = Sequence(0, 0, 0, np.zeros(4, np.int32), 64)
    sequence.turns = [Turn(0, 1, response, "stop", grade) for grade in earlier]
    sequence.turns.append(Turn(0, 1, response, "stop"))
    sequence.turn_text = response
    if recorder is not None:
        sys.setprofile(recorder.profile)
    try:
        grader.submit(sequence)
        [(_, grade)] = pool.poll(wait=True)
    finally:
        sys.setprofile(None)
    return grade
