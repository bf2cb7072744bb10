"""The requests that cross the pipe to a grader process are records with typed settings."""

import json

import pytest

from jzero.config import JudgeServer, Local, RewardConfig, TaskConfig, ToolsConfig
from jzero.types import Grade
from jzero.workers.pipe import CallRequest, TurnRequest, read_request, write_request

TASK = TaskConfig(
    name="math",
    options=("a=1",),
    tools=ToolsConfig(names=("calculator",), seconds=2.5),
    sandbox=Local(level="none", packages=("numpy",)),
    reward=RewardConfig(
        ("accuracy", "judge"), weights=(0.5, 1.5), judge=JudgeServer(url="http://here", model="m")
    ),
)
EARLIER = (("a", Grade(0.5, True, "stepped", parts={"x": 1.0}, reply="on")), ("b", None))
REQUESTS = [
    TurnRequest("math", "7", {"answer": "7", "question": ""}, TaskConfig()),
    TurnRequest(
        "environment",
        "\u00e9\n",
        {"row": {"x": [1, None]}, "seed": 3},
        TASK,
        EARLIER,
        is_last=False,
        episode="1/2",
        has_tools=True,
        values={"messages": [{"role": "user", "content": "?"}]},
        step=Grade(1.0, True, "correct", reply=[{"role": "user", "content": "!"}]),
        called=("mine:reward",),
    ),
    CallRequest("jzero.tasks.votes:compare_in_worker", ["1", {"x": 2}], TASK, "mine:f"),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: type(request).__name__)
def test_a_request_is_the_same_on_both_sides(request_: TurnRequest | CallRequest) -> None:
    number, kind, fields = json.loads(write_request(17, request_))
    read = read_request(kind, fields)
    assert number == 17
    assert read == request_
    assert isinstance(read.task, TaskConfig) and isinstance(read.task.reward, RewardConfig)


def test_settings_that_have_changed_are_written_anew() -> None:
    task = TaskConfig(reward=RewardConfig(("accuracy", "length")))
    for seconds in (1.0, 2.0):
        task.grade_seconds = seconds
        task.reward.weights = (seconds, 1.0)
        message = write_request(0, TurnRequest("math", "7", "7", task))
        _, kind, fields = json.loads(message)
        assert read_request(kind, fields).task == task
        assert read_request(kind, fields, may_share_task=True).task == task


def test_settings_are_shared_only_where_they_may_be() -> None:
    _, kind, fields = json.loads(write_request(0, TurnRequest("math", "7", "7", TASK)))
    own = [read_request(kind, dict(fields)).task for _ in range(2)]
    shared = [read_request(kind, dict(fields), may_share_task=True).task for _ in range(2)]
    assert own[0] is not own[1] and own[0].tools is not own[1].tools
    assert shared[0] is shared[1] is not own[0]
