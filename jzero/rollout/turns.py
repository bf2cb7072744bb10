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
from jzero.environments.tools import classes
from jzero.errors import reason_of
from jzero.model import tokenizer
from jzero.rewards import rewards, user_functions
from jzero.tasks import find_task, mixed
from jzero.types import Grade, JsonValue, Problem, Prompt, Turns
from jzero.workers.pipe import TurnRequest
from jzero.workers.pool import Pool


def make_request(
    problem: Problem,
    sample_index: int,
    response: str,
    earlier: Turns,
    task: config.TaskConfig,
    *,
    is_last: bool,
    with_tools: bool = False,
) -> TurnRequest:
    """Returns the request to the pool for a turn of an episode of any task.

    Args:
        problem: the problem of the episode.
        sample_index: its number among the episodes of the problem.
        response: the response of the policy.
        earlier: the earlier turns.
        task: the settings for the problem.
        is_last: no reply is needed, because no further turn fits.
        with_tools: executes the calls of tools in the response, if the settings have tools.
    """
    values: dict[str, JsonValue] = {}
    # The default reward reads nothing besides the response and the gold answer.
    if tuple(task.reward.functions) != rewards.DEFAULT:
        # The earlier turns are part of every request.
        asked = rewards.asked_for(task.reward) - {"turns"}
        values = user_functions.episode_values(problem, response, earlier, asked)
    # Problems of a suite may belong to another task, which has no tools.
    may_call = with_tools and problem.task == task.name
    has_tools = may_call and bool(task.tools.names or classes.is_tool_class(task.environment))
    is_user_environment = problem.task == environment.NAME
    has_state = has_tools or is_user_environment
    return TurnRequest(
        problem.task,
        response,
        problem.gold,
        task,
        tuple(earlier),
        is_last=is_last,
        episode=f"{problem.id}/{sample_index}" if has_state else "",
        has_tools=has_tools,
        in_event_loop=is_user_environment and environment.mode(task) == "asyncio",
        values=values,
    )


def request_of_turn(
    problem: Problem,
    sample_index: int,
    response: str,
    earlier: Turns,
    task: config.TaskConfig,
    max_turns: int,
) -> TurnRequest:
    """Returns the request to the pool for a turn of a rollout.

    Args:
        problem: the problem of the episode.
        sample_index: its number among the episodes of the problem.
        response: the response of the policy.
        earlier: the earlier turns.
        task: the settings of the run.
        max_turns: of an episode of the run.
    """
    # A suite may contain problems of another task. The settings do not belong to that task, so such
    # a problem gets a single turn.
    if task.name == mixed.NAME:
        task = mixed.settings_of(task, problem)
    has_room = problem.task == task.name and len(earlier) + 1 < max_turns
    return make_request(
        problem, sample_index, response, earlier, task, is_last=not has_room, with_tools=True
    )


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
        # A sequence has at most one turn in grading, so its number identifies the turn.
        key = sequence.prompt_id, sequence.sample_index
        self.in_grading[key] = sequence
        past_turns = [(turn.text, turn.grade) for turn in sequence.turns[:-1]]
        request = request_of_turn(
            self.problem_of(sequence.prompt_id),
            sequence.sample_index,
            sequence.turn_text,
            past_turns,
            self.task,
            self.settings.max_turns,
        )
        self.pool.step(key, request)

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
        last = int(sequence.tokens.ids[-1])
        tokens = tokens_after_turn(
            self.tokenizer, grade.reply, plain_template, task.control_tokens, last, self.stop_ids
        )
        return tokens if len(tokens) < room else None


def tokens_after_turn(
    text_tokenizer: tokenizer.PreTrainedTokenizerFast,
    reply: Prompt,
    plain_template: str | None,
    keeps_control_tokens: bool,
    last: int,
    stop_ids: tuple[int, ...],
) -> list[int]:
    """Returns the tokens between a turn, whose last token is `last`, and the next one.

    plain_template, keeps_control_tokens: as in `tokenizer.message_tokens`.
    stop_ids: tokens that end a response.
    """
    if isinstance(reply, str):
        cached = tokenizer.reply_tokens(text_tokenizer, reply, plain_template, keeps_control_tokens)
        tokens = list(cached)
    else:
        tokens = tokenizer.message_tokens(
            text_tokenizer, reply, plain_template, keeps_control_tokens
        )
    # The policy may have sampled the end-of-turn token itself: do not repeat it.
    if tokens[0] in stop_ids and last == tokens[0]:
        del tokens[0]
    return tokens


def least_tokens(reply: Prompt, longest: int) -> int:
    """Returns a lower bound on the tokens of a reply, if a token has at most `longest` bytes."""
    texts = [reply] if isinstance(reply, str) else [message["content"] for message in reply]
    return sum(len(text) for text in texts) // longest


@functools.cache
def longest_token(text_tokenizer: tokenizer.PreTrainedTokenizerFast) -> int:
    """Returns the maximum number of characters of text in one token."""
    # A vocabulary spells a token with at least one character for each byte, or for each character.
    return max(map(len, text_tokenizer.get_vocab()))
