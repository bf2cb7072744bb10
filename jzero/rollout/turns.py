"""The environment's side of episodes of several turns: grades, replies, and the tokens between one turn and the next,
which are those of the template's text there: history is never tokenised again."""

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace

from jzero import config
from jzero.grading.pool import Pool
from jzero.model import tokenizer
from jzero.rollout.engine import Engine
from jzero.rollout.sequence import Sequence
from jzero.tasks import TASKS
from jzero.types import Grade, Problem


@dataclass
class TurnGrader:
    """With the environment."""

    pool: Pool
    task: config.TaskConfig
    engine: Engine
    tokenizer: tokenizer.PreTrainedTokenizerFast
    problem: Callable[[int], Problem]  # of the sequences' number of the prompt
    waited: float = 0.0  # seconds
    out: dict[Hashable, Sequence] = field(default_factory=dict)  # at the pool

    def submit(self, sequence: Sequence) -> None:
        """The turn that ended; where another may follow the task is asked for a reply."""
        key, problem = (sequence.prompt, sequence.sample), self.problem(sequence.prompt)
        more = len(sequence.turns) < self.engine.settings.max_turns
        earlier = [(turn.text, turn.grade) for turn in sequence.turns[:-1]] if more else None
        self.out[key] = sequence
        self.pool.submit(key, problem.task, sequence.text, problem.gold, self.task, earlier)

    def replies(self, wait: bool) -> list[tuple[Sequence, list[int] | None]]:
        """As `Driver.run` wants them."""
        begin, said = time.perf_counter(), []
        grades = self.pool.poll(wait=wait and bool(self.out))
        self.waited += (time.perf_counter() - begin) * wait
        for key, grade in grades:
            sequence = self.out.pop(key)
            sequence.turns[-1] = replace(sequence.turns[-1], grade=grade)
            said.append((sequence, self.between(sequence, grade)))
        return said

    def between(self, sequence: Sequence, grade: Grade) -> list[int] | None:
        """Tokens from the response to the next, a missing end of turn among them; None where the episode is over."""
        if grade.reply is None or (grade.correct and self.task.stop_on_success):
            return None
        plain = TASKS[self.problem(sequence.prompt).task].replies[self.task.template]
        tokens = list(tokenizer.suffix(self.tokenizer, grade.reply, plain))
        if tokens[0] in self.engine.stop_ids and sequence.tokens[-1] == tokens[0]:
            del tokens[0]
        return tokens if len(sequence) + len(tokens) < sequence.room(self.engine.settings) else None
