"""The environment's side of episodes of several turns: grades, replies, tokens between turns.

`Scheduler.run` yields a sequence at the end of every turn and later polls for the tokens that
precede the next turn. `TurnGrader` connects the scheduler and the grader pool: it submits every
turn, and converts the pool's grades into those tokens. The tokens are the text that the chat
template (or the task's plain template) puts between two responses: the reply of an environment, or
the results of the tools that the response has called. The prompt and the sampled tokens are never
tokenized again, because decoding and encoding a response does not always reproduce its tokens.

A reply that cannot fit into its episode is not tokenized; the episode ends. A reply that the chat
template rejects, such as messages with an unknown role, fails its episode.
"""

import functools
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace

import jinja2

from jzero import config
from jzero.decoder.sequence import Reply, Sequence
from jzero.environments import asyncio_environments, environment
from jzero.environments.tools import episodes as tool_episodes
from jzero.errors import reason_of
from jzero.model import tokenizer
from jzero.rewards import rewards
from jzero.tasks import find_task, mixed
from jzero.types import Grade, Problem, Prompt
from jzero.workers.pool import Pool


@dataclass
class TurnGrader:
    """Grades the turns of one run of the scheduler, and replies to them."""

    pool: Pool
    task: config.TaskConfig
    settings: config.RolloutConfig  # of the episodes
    stop_ids: tuple[int, ...]  # tokens that end a response
    tokenizer: tokenizer.PreTrainedTokenizerFast
    problem_of: Callable[[int], Problem]  # maps a Sequence.prompt_id to its problem
    seconds_waited: float = 0.0  # waiting for grades with nothing to decode
    in_grading: dict[Hashable, Sequence] = field(default_factory=dict)  # by pool key

    def submit(self, sequence: Sequence) -> None:
        """Submits the turn that just ended, for a grade and, if a turn may follow, for a reply."""
        problem = self.problem_of(sequence.prompt_id)
        past_turns = [(turn.text, turn.grade) for turn in sequence.turns[:-1]]
        earlier_turns = None
        # A suite may contain problems of another task. The settings do not belong to that task, so
        # such a problem gets a single turn.
        task = mixed.settings_of(self.task, problem)
        is_own_problem = problem.task == task.name
        if is_own_problem and len(sequence.turns) < self.settings.max_turns:
            earlier_turns = past_turns
        # A sequence has at most one turn in grading, so its number identifies the turn.
        key = sequence.prompt_id, sequence.sample_index
        self.in_grading[key] = sequence
        text = sequence.turn_text
        episode = rewards.episode_values(problem, text, past_turns, task.reward)
        episode |= environment.episode_values(problem, sequence.sample_index, past_turns)
        episode |= tool_episodes.episode_values(problem, sequence.sample_index, past_turns, task)
        stepping = asyncio_environments.stepping(
            self.pool,
            problem,
            sequence.sample_index,
            text,
            past_turns,
            task,
            is_last=earlier_turns is None,
        )
        self.pool.submit(
            key, problem.task, text, problem.gold, task, earlier_turns, episode, stepping
        )

    def poll_replies(self, wait: bool) -> list[Reply]:
        """Stores the grades that have arrived, and returns the replies (see `Scheduler.run`)."""
        start = time.perf_counter()
        grades = self.pool.poll(wait=wait and bool(self.in_grading))
        if wait:
            self.seconds_waited += time.perf_counter() - start

        replies: list[Reply] = []
        for key, grade in grades:
            sequence = self.in_grading.pop(key)
            try:
                tokens = self.tokens_before_next_turn(sequence, grade)
            except (jinja2.TemplateError, TypeError, ValueError) as error:
                # The template belongs to the model, and the messages come from an environment.
                self.pool.count("errors")
                reason = f"error: the chat template cannot write the reply: {reason_of(error)}"
                grade = replace(grade, reason=reason, failed=True)
                tokens = None
            sequence.turns[-1] = replace(sequence.turns[-1], grade=grade)
            if tokens is None and grade.reply is not None:
                problem = self.problem_of(sequence.prompt_id)
                asyncio_environments.forget(self.pool, problem, sequence.sample_index, self.task)
            replies.append((sequence, tokens))
        return replies

    def tokens_before_next_turn(self, sequence: Sequence, grade: Grade) -> list[int] | None:
        """Returns the tokens between the turn that was graded and the next turn.

        They start with the end of the turn, unless the policy sampled it. Returns None if the
        episode is over: the task has no reply, the turn solved the problem and task.stop_on_success
        is set, or no token of another turn would fit into the episode.
        """
        if grade.reply is None:
            return None
        problem = self.problem_of(sequence.prompt_id)
        task = mixed.settings_of(self.task, problem)
        # A user-defined environment ends its episodes itself, regardless of task.stop_on_success.
        stops_on_success = task.stop_on_success and not task.environment
        if grade.correct and stops_on_success:
            return None
        room = sequence.longest_length(self.settings) - len(sequence)
        # Tokenizing a very long reply would take long; this lower bound avoids it.
        if least_tokens(grade.reply, longest_token(self.tokenizer)) >= room:
            return None
        plain_template = find_task(problem.task).find_template(task.template).reply
        if isinstance(grade.reply, str):
            tokens = list(tokenizer.reply_tokens(self.tokenizer, grade.reply, plain_template))
        else:
            tokens = tokenizer.message_tokens(self.tokenizer, grade.reply, plain_template)
        # The policy may have sampled the end-of-turn token itself: do not repeat it.
        if tokens[0] in self.stop_ids and sequence.tokens.ids[-1] == tokens[0]:
            del tokens[0]
        return tokens if len(tokens) < room else None


def least_tokens(reply: Prompt, longest: int) -> int:
    """Returns a lower bound on the tokens of a reply, if a token has at most `longest` bytes."""
    texts = [reply] if isinstance(reply, str) else [message["content"] for message in reply]
    return sum(len(text) for text in texts) // longest


@functools.cache
def longest_token(text_tokenizer: tokenizer.PreTrainedTokenizerFast) -> int:
    """Returns the maximum number of characters of text in one token."""
    # A vocabulary spells a token with at least one character for each byte, or for each character.
    return max(map(len, text_tokenizer.get_vocab()))
