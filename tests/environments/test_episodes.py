"""The store of running episodes: what is kept, what is built again, and what is closed."""

import ast
import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from jzero.environments.environment import Episodes, closed_on_error, run

ROOT = Path(__file__).resolve().parents[2]
CLOSED: list[str] = []


@dataclass
class Counting:
    """An episode that counts its steps."""

    name: str
    responses: list[str] = field(default_factory=list)
    fails_to_close: bool = False

    async def step(self, response: str) -> int:
        await asyncio.sleep(0)
        if response == "fail":
            raise ValueError("no such step")
        self.responses.append(response)
        return len(self.responses)

    async def close(self) -> None:
        await asyncio.sleep(0)
        CLOSED.append(self.name)
        if self.fails_to_close:
            raise OSError("cannot be closed")


@pytest.fixture(autouse=True)
def nothing_closed() -> None:
    CLOSED.clear()


def step(
    episodes: Episodes[Counting],
    name: str,
    earlier: list[str],
    response: str,
    built: list[str] | None = None,
    fails_to_close: bool = False,
) -> int:
    async def build() -> Counting:
        if built is not None:
            built.append(name)
        episode = Counting(name, fails_to_close=fails_to_close)
        async with closed_on_error(episode):
            for text in earlier:
                await episode.step(text)
        return episode

    return run(episodes.step(name, earlier, build, lambda episode: episode.step(response)))


def test_an_episode_stays_until_it_ends() -> None:
    episodes: Episodes[Counting] = Episodes(10)
    built: list[str] = []
    assert step(episodes, "a", [], "1", built) == 1
    assert step(episodes, "b", [], "1", built) == 1
    assert step(episodes, "a", ["1"], "2", built) == 2
    assert built == ["a", "b"] and CLOSED == []
    run(episodes.end("a"))
    run(episodes.end("a"))
    assert CLOSED == ["a"]
    assert step(episodes, "a", ["1", "2"], "3", built) == 3
    assert built == ["a", "b", "a"]


@pytest.mark.parametrize("earlier", [[], ["2"], ["1", "2"]])
def test_an_episode_that_went_another_way_is_closed_and_built_again(earlier: list[str]) -> None:
    episodes: Episodes[Counting] = Episodes(10)
    built: list[str] = []
    step(episodes, "a", [], "1", built, fails_to_close=True)
    assert step(episodes, "a", earlier, "3", built) == len(earlier) + 1
    assert built == ["a", "a"] and CLOSED == ["a"]


def test_a_step_that_fails_closes_the_episode_and_tells_its_own_error() -> None:
    episodes: Episodes[Counting] = Episodes(10)
    step(episodes, "a", [], "1", fails_to_close=True)
    with pytest.raises(ValueError, match="no such step"):
        step(episodes, "a", ["1"], "fail")
    assert CLOSED == ["a"] and episodes.get("a") is None


def test_an_episode_that_cannot_be_built_again_is_closed() -> None:
    episodes: Episodes[Counting] = Episodes(10)
    with pytest.raises(ValueError, match="no such step"):
        step(episodes, "a", ["fail"], "1", fails_to_close=True)
    assert CLOSED == ["a"] and episodes.get("a") is None


def test_the_oldest_of_too_many_is_closed_and_no_other_episode_fails_for_it() -> None:
    episodes: Episodes[Counting] = Episodes(2)
    step(episodes, "a", [], "1", fails_to_close=True)
    step(episodes, "b", [], "1", fails_to_close=True)
    step(episodes, "a", ["1"], "2")
    assert step(episodes, "c", [], "1") == 1
    assert CLOSED == ["b"]
    assert step(episodes, "b", ["1"], "2") == 2
    assert CLOSED == ["b", "a"]


def test_what_has_long_been_idle_is_closed() -> None:
    episodes: Episodes[Counting] = Episodes(10, idle_seconds=0.05)
    step(episodes, "a", [], "1")
    time.sleep(0.1)
    step(episodes, "b", [], "1")
    assert CLOSED == ["a"]


def test_all_are_closed_at_the_end() -> None:
    episodes: Episodes[Counting] = Episodes(10)
    for name in "abc":
        step(episodes, name, [], "1", fails_to_close=True)
    run(episodes.close())
    assert CLOSED == ["c", "b", "a"] and episodes.get("a") is None


def test_no_other_module_of_the_tasks_stores_episodes() -> None:
    """They would need `OrderedDict` to close the oldest, or `Turns` of their own."""
    orders, names = set(), set()
    for path in (ROOT / "jzero").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if "OrderedDict" not in text and "Turns" not in text:
            continue
        module = path.relative_to(ROOT / "jzero").as_posix()
        for node in ast.walk(ast.parse(text)):
            match node:
                case ast.alias(name="OrderedDict") if module.startswith(
                    ("tasks", "environments", "rewards", "workers")
                ):
                    orders.add(module)
                case (
                    ast.Assign(targets=[ast.Name(id="Turns")])
                    | ast.AnnAssign(target=ast.Name(id="Turns"))
                ):
                    names.add(module)
    assert orders == {"environments/environment.py"}
    assert names == {"types.py"}


def test_one_module_of_the_tasks_drives_an_event_loop_of_its_own() -> None:
    """`run` and `call` decide what is awaited, and no generator drives coroutines by `throw`.

    Async reward functions have a loop for each call.
    """
    driving: dict[str, set[str]] = {}
    for path in (ROOT / "jzero").rglob("*.py"):
        module = path.relative_to(ROOT / "jzero").as_posix()
        if not module.startswith(("tasks", "environments", "rewards", "workers", "rollout")):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Attribute(attr="run_until_complete" | "throw" as name):
                    driving.setdefault(module, set()).add(name)
                case ast.Attribute(value=ast.Name(id="asyncio"), attr="run" as name):
                    driving.setdefault(module, set()).add(name)
    assert driving == {
        "environments/environment.py": {"run_until_complete"},
        "workers/event_loop.py": {"run_until_complete"},
        "rewards/user_functions.py": {"run"},
        "environments/batched_rewards.py": {"run"},
    }
