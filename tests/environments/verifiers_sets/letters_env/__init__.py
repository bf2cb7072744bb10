"""A taskset of the package verifiers: words to be written backwards, without a tool."""

import verifiers.v1 as vf

WORDS = ("abc", "hello", "tpu", "zero", "rows", "page", "slot", "mesh", "loss", "gold", "turn")


class LettersData(vf.TaskData):
    word: str


class LettersTask(vf.Task[LettersData]):
    @vf.reward(weight=2.0)
    async def backwards(self, task: LettersData, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == task.word[::-1])

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class LettersTaskset(vf.Taskset[LettersTask]):
    def load(self) -> list[LettersTask]:
        return [
            LettersTask(
                LettersData(
                    prompt=f"Write {word} backwards.", word=word, system_prompt="Be brief."
                ),
                self.config.task,
            )
            for word in WORDS
        ]


__all__ = ["LettersTaskset"]
