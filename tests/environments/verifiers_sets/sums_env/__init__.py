"""A taskset of the package verifiers: sums, with a tool that adds. Its tasks have no end."""

import itertools
from collections.abc import Iterator

import verifiers.v1 as vf

from sums_env.server import AddToolset


class SumsData(vf.TaskData):
    answer: int


class SumsTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class SumsTask(vf.Task[SumsData, vf.State, SumsTaskConfig]):
    @vf.reward
    async def right(self, task: SumsData, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == str(task.answer))

    @classmethod
    def toolsets(cls, config: SumsTaskConfig) -> list[vf.Toolset]:
        return [AddToolset(config.tools)]


class SumsConfig(vf.TasksetConfig):
    task: SumsTaskConfig = SumsTaskConfig()


class SumsTaskset(vf.Taskset[SumsTask, SumsConfig]):
    INFINITE = True

    def load(self) -> Iterator[SumsTask]:
        for number in itertools.count(1):
            data = SumsData(prompt=f"{number} + {number} = ?", answer=2 * number)
            yield SumsTask(data, self.config.task)


__all__ = ["SumsTaskset"]
