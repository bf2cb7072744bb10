"""The environment's side of episodes of several turns: grades, replies, tokens between turns.

`Scheduler.run` yields a sequence at the end of every turn and later asks for the tokens that
precede the next turn. `TurnGrader` is between the scheduler and the grader pool: it submits every
turn, and turns the pool's grades into those tokens. They are what the chat template (or the task's
plain template) writes between two responses: the reply of an environment, or the answers of the
tools that the response has called. The tokens that the model has seen and sampled are
kept as they are and never tokenized again, because decoding and encoding a response does not always
give back its tokens.
"""

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace

from jzero import config
from jzero.grading.pool import Pool
from jzero.model import tokenizer
from jzero.rollout.engine import Engine
from jzero.rollout.sequence import Reply, Sequence
from jzero.tasks import asyncio_environments, environment, find_task, rewards
from jzero.tasks.tools import episodes as tool_episodes
from jzero.types import Grade, Problem


@dataclass
class TurnGrader:
    """Grades the turns of one run of the scheduler, and replies to them."""

    pool: Pool
    task: config.TaskConfig
    engine: Engine
    tokenizer: tokenizer.PreTrainedTokenizerFast
    problem_of: Callable[[int], Problem]  # from a Sequence.prompt_id
    seconds_waited: float = 0.0  # for grades, while there was nothing to decode
    in_grading: dict[Hashable, Sequence] = field(default_factory=dict)  # by pool key

    def submit(self, sequence: Sequence) -> None:
        """Submits the turn that just ended, for a grade and, if a turn may follow, for a reply."""
        problem = self.problem_of(sequence.prompt_id)
        turns_before = [(turn.text, turn.grade) for turn in sequence.turns[:-1]]
        earlier_turns = None
        # A suite may ask problems of another task. The settings are not that task's, so it is
        # answered in one turn.
        is_own_problem = problem.task == self.task.name
        if is_own_problem and len(sequence.turns) < self.engine.settings.max_turns:
            earlier_turns = turns_before
        key = sequence.prompt_id, sequence.sample_index
        self.in_grading[key] = sequence
        text = sequence.turn_text
        episode = rewards.episode_values(problem, text, turns_before, self.task.reward)
        episode |= environment.episode_values(problem, sequence.sample_index, turns_before)
        episode |= tool_episodes.episode_values(
            problem, sequence.sample_index, turns_before, self.task
        )
        stepping = asyncio_environments.stepping(
            self.pool,
            problem,
            sequence.sample_index,
            text,
            turns_before,
            self.task,
            is_last=earlier_turns is None,
        )
        self.pool.submit(
            key, problem.task, text, problem.gold, self.task, earlier_turns, episode, stepping
        )

    def poll_replies(self, wait: bool) -> list[Reply]:
        """Stores the grades that have arrived, and returns the replies as `Scheduler.run` asks."""
        start = time.perf_counter()
        grades = self.pool.poll(wait=wait and bool(self.in_grading))
        if wait:
            self.seconds_waited += time.perf_counter() - start

        replies: list[Reply] = []
        for key, grade in grades:
            sequence = self.in_grading.pop(key)
            sequence.turns[-1] = replace(sequence.turns[-1], grade=grade)
            tokens = self.tokens_before_next_turn(sequence, grade)
            if tokens is None and grade.reply is not None:
                problem = self.problem_of(sequence.prompt_id)
                asyncio_environments.forget(self.pool, problem, sequence.sample_index, self.task)
            replies.append((sequence, tokens))
        return replies

    def tokens_before_next_turn(self, sequence: Sequence, grade: Grade) -> list[int] | None:
        """Returns the tokens between the turn that was graded and the next turn.

        They start with the end of the turn, unless the policy sampled it. Returns None if the
        episode is over: the task has no reply, the turn solved the problem and task.stop_on_success
        is set, or no token of another turn would fit into the episode. An environment of the user's
        ends its episodes itself, whatever task.stop_on_success says.
        """
        if grade.reply is None:
            return None
        # An environment says for itself when an episode is over.
        stops_on_success = self.task.stop_on_success and not self.task.environment
        if grade.correct and stops_on_success:
            return None
        task = find_task(self.problem_of(sequence.prompt_id).task)
        plain_template = task.find_template(self.task.template).reply
        if isinstance(grade.reply, str):
            tokens = list(tokenizer.reply_tokens(self.tokenizer, grade.reply, plain_template))
        else:
            tokens = tokenizer.message_tokens(self.tokenizer, grade.reply, plain_template)
        if tokens[0] in self.engine.stop_ids and sequence.tokens[-1] == tokens[0]:
            del tokens[0]
        room = sequence.longest_length(self.engine.settings)
        return tokens if len(sequence) + len(tokens) < room else None
