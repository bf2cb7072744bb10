"""Turns problems into graded rollouts: combines the engine, the tokenizer and the graders.

    problems
      -> Sampler.encode_problems   tokenizes prompts, drops problems whose prompt is too long
      -> Sampler.sample_rollouts   decodes the shares of this host's decoder, grades every turn
      -> Sampler.gather_rollouts   collects the rollouts of all hosts, adds whole-batch rewards

The synchronous train loop calls these methods one by one, because it measures them. `Sampling` has
the three of them for a policy, as in `with run.sampling(params, version) as sampler`.

Asynchronous rollouts (`async_stream.py`) and a job's request (`jzero sample`) decode other batches
with `Sampler.decode`, the core of the second step.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from typing import ClassVar

import jax
import jinja2
import numpy as np
from jaxtyping import Int32

from jzero import config, terminal
from jzero.decoder.driver import Batch, Decoder, Phase
from jzero.decoder.engine import ROLLOUTS, Engine, Samples
from jzero.decoder.lockstep import Lockstep, gather_over
from jzero.decoder.references import History
from jzero.decoder.scheduler import Scheduler
from jzero.decoder.sequence import DecodeCounters, Groups, Reply, Sequence, make_groups
from jzero.decoder.serialization import rollouts_from_bytes, rollouts_to_bytes
from jzero.environments import agents, batched_rewards
from jzero.environments.tools import episodes as tool_episodes
from jzero.environments.tools import parsing
from jzero.errors import UserError, reason_of
from jzero.hosts import collectives, interrupt, peers, processes
from jzero.json_values import as_object
from jzero.model import end_tokens, qwen, tokenizer
from jzero.model.base_model import BaseModel
from jzero.problems.prompts import COLUMN
from jzero.rewards import rewards
from jzero.rewards.trl_rewards import TrainerState
from jzero.rollout.agents import AgentBatch
from jzero.rollout.turns import TurnGrader, least_tokens, longest_token
from jzero.sharding.mesh import hosts_of
from jzero.tasks import mixed
from jzero.types import Grade, JsonValue, Problem, Prompt, Rollout, grade_of
from jzero.workers.pool import Pool

_NOT_TRAINING = TrainerState()


@functools.cache
def warn_of_missing_stop(
    text_tokenizer: tokenizer.PreTrainedTokenizerFast,
    stop_ids: tuple[int, ...],
    stop_strings: tuple[str, ...],
) -> None:
    """Prints `end_tokens.missing_stop`, the first time that it is asked for a tokenizer."""
    if warning := end_tokens.missing_stop(text_tokenizer, stop_ids, stop_strings):
        processes.print_once(warning)


@dataclass(frozen=True)
class EncodedProblem:
    """A problem and the token ids of its prompt, so that the prompt is tokenized only once."""

    problem: Problem
    prompt_tokens: Int32[np.ndarray, " tokens"]


@dataclass
class Sampler:
    """Samples and grades responses on the devices of this host's decoder."""

    engine: Engine
    tokenizer: tokenizer.PreTrainedTokenizerFast
    pool: Pool
    task: config.TaskConfig
    history: History = field(default_factory=lambda: History(None, 0))  # of rollout.draft
    # With the other hosts of the decoder; None if this host decodes by itself.
    exchange: collectives.Exchange | None = None

    def encode_prompt(self, problem: Problem) -> Int32[np.ndarray, " tokens"]:
        """Returns the token ids of the problem's prompt, with the chat template applied."""
        tools = [as_object(tool, "a tool") for tool in problem.tools or []]
        if problem.task == self.task.name:
            # The task's tools belong to its prompts only: a suite may contain problems of another
            # task.
            tools += tool_episodes.schemas(self.task)
        # The prompts of a column are as their author wrote them, with the control tokens.
        keeps_control_tokens = self.task.control_tokens or self.task.template.startswith(COLUMN)
        if problem.task == agents.NAME:
            return np.zeros(0, np.int32)  # an agent writes its own prompts
        try:
            ids = tokenizer.prompt_ids(
                self.tokenizer,
                problem.prompt,
                tools,
                keeps_thoughts=self.engine.settings.thoughts == "keep",
                keeps_control_tokens=keeps_control_tokens,
                inserted=problem.inserted,
            )
        except UserError:
            raise
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            # The template belongs to the model, and the messages to a row or an environment.
            raise UserError(
                f"problem {problem.id}: the chat template cannot write its prompt "
                f"({reason_of(error)}): change the messages, or choose another task.template"
            ) from None
        return np.array(ids, np.int32)

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Returns the token ids of a prompt that belongs to no problem, as the settings show it."""
        return tokenizer.prompt_ids(
            self.tokenizer,
            prompt,
            keeps_thoughts=self.engine.settings.thoughts == "keep",
            keeps_control_tokens=self.task.control_tokens,
        )

    def text_of(self, tokens: SequenceOf[int]) -> str:
        """Returns the text of token ids."""
        return tokenizer.decode(self.tokenizer, tokens)

    def encode_problems(
        self, problems: SequenceOf[Problem], name: str = ""
    ) -> list[EncodedProblem]:
        """Tokenizes prompts, and drops prompts longer than rollout.max_prompt_tokens.

        If `name` is given, prints how many problems of the problem set `name` were dropped.
        """
        # A long prompt is dropped rather than cut, because a cut question is a different question.
        longest = self.engine.settings.max_prompt_tokens
        # Tokenizing megabytes of text takes seconds, so drop prompts that are certainly too long
        # first.
        characters = longest_token(self.tokenizer)
        candidates = [
            problem
            for problem in problems
            if problem.task == agents.NAME or least_tokens(problem.prompt, characters) <= longest
        ]
        encoded = [EncodedProblem(problem, self.encode_prompt(problem)) for problem in candidates]
        fitting = [item for item in encoded if len(item.prompt_tokens) <= longest]
        if any(not isinstance(item.problem.prompt, str) for item in fitting):
            self.warn_of_missing_stop()
        dropped = len(problems) - len(fitting)
        if name and dropped:
            processes.print_once(
                f"{name}: {dropped} of {len(problems)} prompts dropped, "
                f"longer than {longest} tokens"
            )
        return fitting

    def warn_of_missing_stop(self) -> None:
        """Prints a warning if the end of turn of the chat template ends no response."""
        warn_of_missing_stop(self.tokenizer, self.engine.stop_ids, self.engine.settings.stop)

    def sample_rollouts(
        self,
        params: qwen.Params,
        problems: list[EncodedProblem],
        *,
        group_size: int,
        temperature: float,
        key: tuple[int, int],
        version: int,
        check_stop: interrupt.StopCheck = interrupt.never_stop,
        samples: Samples = ROLLOUTS,
    ) -> tuple[list[Rollout], DecodeCounters]:
        """Samples `group_size` graded rollouts of each problem in this host's share of `problems`.

        Returns the rollouts in the order of the problems, and the decode counters. `version` is the
        policy version of `params`.

        The noise of a token is a function of `key` (two integers), the problem's index in
        `problems`, the sample's index in its group, and the token's position. It depends neither on
        the number of hosts nor on the other sequences in the batch.
        """
        # Every host has a contiguous share, so that the gathered rollouts are in order. The hosts
        # of a decoder decode their shares together, and each grades and returns its own.
        share = collectives.local_share(len(problems))
        if problems and problems[0].problem.task == agents.NAME:
            # An agent adds groups of any size, and at most as many sequences as a group has.
            phase = Phase(params, key, group_size, temperature, version, samples)
            own = [item.problem for item in problems[share]]
            return self.run_agents(phase, own, share.start, check_stop)
        decoded = self.decoded_share(len(problems))
        decoded_problems = problems[decoded]
        groups = make_groups(
            [item.prompt_tokens for item in decoded_problems],
            group_size,
            samples.settings(self.engine.settings).max_new_tokens,
            first_prompt=decoded.start,
        )
        own_prompts = range(share.start - decoded.start, share.stop - decoded.start)

        def problem_of(prompt_id: int) -> Problem:
            return decoded_problems[prompt_id].problem

        phase = Phase(params, key, group_size, temperature, version, samples)
        batch = GradedBatch(self, groups, problem_of, check_stop, own_prompts)
        counters = self.decode(phase, batch)
        own_groups = groups[own_prompts.start : own_prompts.stop]
        sequences = [sequence for group in own_groups for sequence in group]
        rollouts = [to_rollout(problem_of(s.prompt_id), s) for s in sequences]
        return rollouts, counters

    def run_agents(
        self,
        phase: Phase,
        problems: list[Problem],
        first_problem: int,
        check_stop: interrupt.StopCheck,
    ) -> tuple[list[Rollout], DecodeCounters]:
        """Runs an agent for each sample of each problem, and returns their episodes.

        first_problem: index of the first problem among those of all hosts.
        """
        batch = AgentBatch(self, problems, first_problem, phase.group_size, check_stop)
        with contextlib.closing(batch):
            counters = self.decode(phase, batch)
        batch.add_counts(counters)
        return batch.rollouts(), counters

    def decoded_share(self, count: int) -> slice:
        """Returns the shares of `count` items of all hosts of this host's decoder."""
        if self.exchange is None:
            return collectives.local_share(count)
        first, last = self.exchange.hosts[0], self.exchange.hosts[-1]
        start = collectives.share_of(count, first).start
        return slice(start, collectives.share_of(count, last).stop)

    @property
    def decoder(self) -> Decoder:
        """The decoder of this host's engine, which reads tokens with this tokenizer."""
        return Decoder(self.engine, self.text_of)

    def decode(self, phase: Phase, batch: "GradedBatch | AgentBatch") -> DecodeCounters:
        """Decodes a batch in place. If `batch.check_stop` raises on one host, all hosts raise.

        Of a decoder of several hosts, the first one alone returns the counts.
        """
        has_turns = self.engine.settings.max_turns > 1
        # The number of an episode's turns is unknown, and so are the groups that a batch adds.
        total = None
        if not has_turns and batch.is_whole:
            total = sum(map(len, batch.groups))
        lockstep = None
        if self.exchange is not None:
            assert isinstance(batch, GradedBatch), "config.checks: agents ask one host"
            assert batch.own_prompts is not None and batch.is_whole
            lockstep = Lockstep(batch, gather_over(self.exchange))
        try:
            with terminal.phase("sample", total, unit="turns" if has_turns else "") as shown:
                batch.shown = shown
                counters = self.decoder.run(phase, lockstep or batch)
        except interrupt.Interrupted as reason:
            # The other hosts decode their shares to the end and then wait in `gather_rollouts`:
            # join them there.
            interrupt.raise_if_any_host_stopped(str(reason))
            raise
        if self.exchange is not None and jax.process_index() != self.exchange.hosts[0]:
            counters = DecodeCounters()  # counted by the first host
        waiting = lockstep or batch
        return replace(counters, grading_seconds=waiting.seconds_waited)

    def gather_rollouts(
        self,
        rollouts: list[Rollout],
        group_size: int,
        state: TrainerState = _NOT_TRAINING,
    ) -> list[Rollout]:
        """Returns the rollouts of all hosts, in order, with their final rewards.

        All hosts must call this method together. `rollouts` are complete groups of `group_size`.
        For rewards that compare responses, rollout.num_prompts groups (one step) form a batch, and
        so do the last groups of an evaluation. `state` is passed to reward functions in TRL's form.
        """
        interrupt.raise_if_any_host_stopped()
        if peers.has_peers():
            rollouts = rollouts_from_bytes(collectives.gather_bytes(rollouts_to_bytes(rollouts)))
        # Unless task.name=mixed, no row names a task, and all rollouts have the same settings.
        names = list(dict.fromkeys(rollout.problem.row_task for rollout in rollouts))
        if names == [""]:
            return self._add_rewards(rollouts, group_size, state)
        # Rows of different tasks are rewarded separately: their lengths and answers are not
        # comparable.
        rewarded: list[Rollout | None] = [None] * len(rollouts)
        for name in names:
            places = [i for i, one in enumerate(rollouts) if one.problem.row_task == name]
            task_sampler = replace(
                self, task=mixed.settings_of(self.task, rollouts[places[0]].problem)
            )
            task_rollouts = task_sampler._add_rewards(
                [rollouts[i] for i in places], group_size, state
            )
            for place, rollout in zip(places, task_rollouts, strict=True):
                rewarded[place] = rollout
        return [rollout for rollout in rewarded if rollout is not None]

    def _add_rewards(
        self,
        rollouts: list[Rollout],
        group_size: int,
        state: TrainerState,
    ) -> list[Rollout]:
        """Adds the rewards of rollouts whose problems use the settings of this sampler's task."""
        task = self.task
        # An evaluation has groups of another size: its batches have as many responses as a step.
        limit = self.engine.settings.num_prompts * self.engine.settings.group_size // group_size
        batches = batched_rewards.split(rollouts, group_size, task.reward.batch, limit)
        results = None
        if rewards.batched(task.reward):
            results = self._call_batched_rewards(batches, state)
        done: list[Rollout] = []
        for number, batch in enumerate(batches):
            done += self._add_batch_rewards(batch, results[number] if results else {})
        return done

    def _add_batch_rewards(
        self,
        rollouts: list[Rollout],
        results: dict[str, JsonValue],
    ) -> list[Rollout]:
        """Applies the rewards that depend on the whole batch, and sums the turns of episodes.

        `results` are the values that the user-defined functions returned for this batch.
        """
        # Rewards are computed per turn; an episode sums its turns at the end.
        turns = [turn for rollout in rollouts for turn in rollout.turns]
        grades = batched_rewards.add([grade_of(turn) for turn in turns], results)
        grades = rewards.add_batch_rewards(
            grades,
            [len(turn.text) for turn in turns],
            [turn.end - turn.start for turn in turns],
            self.task.reward,
        )
        if self.engine.settings.max_turns > 1 and isinstance(
            self.task.turn_reward, config.turns.Success
        ):
            reward = self.task.turn_reward
            grades = [replace(grade, score=_success_reward(grade, reward)) for grade in grades]
        remaining = iter(grades)
        return [self._take_turn_grades(rollout, remaining) for rollout in rollouts]

    def _take_turn_grades(self, rollout: Rollout, grades: Iterator[Grade]) -> Rollout:
        """Returns a rollout with the next grades, one for each of its turns."""
        turn_grades = [next(grades) for _ in rollout.turns]
        if batched_rewards.decided_by_rewards(rollout.problem, self.task):
            turn_grades[-1] = batched_rewards.with_verdict(turn_grades[-1], self.task)
        return with_turn_grades(rollout, turn_grades)

    def _call_batched_rewards(
        self,
        batches: list[list[Rollout]],
        state: TrainerState,
    ) -> list[dict[str, JsonValue]]:
        """Calls the user-defined functions on one host, and returns their results on all hosts."""
        # One call for all hosts: a user-defined function sees the whole batch.
        results: list[dict[str, JsonValue]] = []  # of other hosts
        if jax.process_index() == 0:
            with_tokens = rewards.need_tokens(self.task.reward)
            episodes = [
                [batched_rewards.to_episode(item, with_tokens=with_tokens) for item in batch]
                for batch in batches
            ]
            results = batched_rewards.call_all(self.pool, self.task, episodes, state)
        return collectives.gather_json(results)[0]


@dataclass
class Sampling:
    """A policy that samples: a sampler, and the decoder's weights of one policy version."""

    sampler: Sampler
    weights: qwen.Params | None  # None once it is closed
    version: int = 0

    def close(self) -> None:
        """Releases the weights."""
        self.weights = None

    def rollouts(self, problems: SequenceOf[Problem], key: tuple[int, int]) -> list[Rollout]:
        """Returns rollout.group_size graded rollouts of each problem, in order, on all hosts.

        All hosts call this method together, with the problems of all of them. A problem whose
        prompt is too long has no rollouts.

        key: of the noise, such as the seed and the step (see `Sampler.sample_rollouts`).
        """
        settings = self.sampler.engine.settings
        encoded = self.sampler.encode_problems(problems)
        return self.rollouts_of(encoded, key, settings.group_size, settings.temperature)

    def rollouts_of(
        self,
        problems: list[EncodedProblem],
        key: tuple[int, int],
        group_size: int,
        temperature: float,
        *,
        check_stop: interrupt.StopCheck = interrupt.never_stop,
        samples: Samples = ROLLOUTS,
        state: TrainerState = _NOT_TRAINING,
    ) -> list[Rollout]:
        """Returns what `rollouts` does, with other settings than those of training.

        The arguments are those of `Sampler.sample_rollouts` and `Sampler.gather_rollouts`.
        """
        assert self.weights is not None, "the weights were released"
        rollouts, _ = self.sampler.sample_rollouts(
            self.weights,
            problems,
            group_size=group_size,
            temperature=temperature,
            key=key,
            version=self.version,
            check_stop=check_stop,
            samples=samples,
        )
        return self.sampler.gather_rollouts(rollouts, group_size, state)


class GradedBatch(Batch):
    """Groups of problems: every turn is graded while others decode, and replies begin new turns.

    A subclass may add groups (`more`) and end turns (`drains`).
    """

    has_replies = True
    is_whole: ClassVar[bool] = True  # whether no group is added

    def __init__(
        self,
        sampler: Sampler,
        groups: Groups,
        problem_of: Callable[[int], Problem],
        check_stop: interrupt.StopCheck = interrupt.never_stop,
        own_prompts: range | None = None,
        in_grading: SequenceOf[Sequence] = (),
    ) -> None:
        """Makes a batch that is decoded once.

        Args:
            sampler: grades the turns.
            groups: the groups that are decoded first.
            problem_of: returns the problem of a `Sequence.prompt_id`.
            check_stop: called after every turn and before every look for replies; may raise
                Interrupted.
            own_prompts: the prompts whose turns this host grades; None: all. A decoder of several
                hosts requires them, and no further groups.
            in_grading: further sequences, whose last turn ended earlier and has no grade yet.
        """
        super().__init__(groups)
        self.sampler = sampler
        self.problem_of = problem_of
        self.check_stop = check_stop
        self.own_prompts = own_prompts
        self.in_grading = in_grading
        self.shown = terminal.Phase("sample")
        self.grader: TurnGrader  # of the run

    @property
    def seconds_waited(self) -> float:
        """Seconds of waiting for grades with nothing to decode."""
        return self.grader.seconds_waited

    def begin(self, run: Scheduler) -> None:
        """See `Source.begin`."""
        sampler = self.sampler
        self.grader = TurnGrader(
            pool=sampler.pool,
            task=sampler.task,
            settings=run.settings,
            stop_ids=run.engine.stop_ids,
            tokenizer=sampler.tokenizer,
            problem_of=self.problem_of,
        )
        for sequence in self.in_grading:
            self.grader.submit(sequence)

    def turn_ended(self, run: Scheduler, sequence: Sequence) -> None:
        """Submits a turn for grading, on the host that grades it."""
        self.sampler.history.add(self._key_of(sequence), sequence)
        if self.own_prompts is None or sequence.prompt_id in self.own_prompts:
            self.grader.submit(sequence)
        self.shown.advance()
        self.shown.tokens = run.counters.decoded_tokens
        self.check_stop()

    def replies(self, wait: bool) -> list[Reply]:
        """Returns the replies that have arrived at this host."""
        # At the end of a run, the scheduler may wait for many replies and decode nothing.
        self.check_stop()
        return self.grader.poll_replies(wait)

    def past_responses(self, sequence: Sequence) -> Iterable[Int32[np.ndarray, " tokens"]]:
        """Returns the earlier responses to the problem of a sequence, for rollout.draft=history."""
        return self.sampler.history.of(self._key_of(sequence))

    def _key_of(self, sequence: Sequence) -> tuple[str, str]:
        problem = self.problem_of(sequence.prompt_id)
        return problem.task, problem.id


def _success_reward(grade: Grade, reward: config.turns.Success) -> float:
    """Returns AReaL's reward of a turn (realhf/impl/agent/math_multi_turn_agent.py)."""
    success = (grade.correct - 0.5) * 2
    return (success - reward.bias) * reward.scaling


def with_turn_grades(rollout: Rollout, grades: list[Grade]) -> Rollout:
    """Returns `rollout` with one grade for each turn, and the episode's grade derived from them.

    The episode's score is the sum of its turns' scores. The episode is correct if any turn is
    correct, and has failed if any turn has failed. Its reason and named rewards come from the last
    turn.
    """
    turns = tuple(
        replace(turn, grade=grade) for turn, grade in zip(rollout.turns, grades, strict=True)
    )
    episode = replace(
        grades[-1],
        score=sum(grade.score for grade in grades),
        correct=any(grade.correct for grade in grades),
        seconds=sum(grade.seconds for grade in grades),
        tool_calls=sum(grade.tool_calls for grade in grades),
        failed_tool_calls=sum(grade.failed_tool_calls for grade in grades),
        tool_seconds=sum(grade.tool_seconds for grade in grades),
        failed=any(grade.failed for grade in grades),
    )
    return replace(rollout, turns=turns, grade=episode)


def make_sampler(engine: Engine, base: BaseModel, task: config.TaskConfig, pool: Pool) -> Sampler:
    """Returns the sampler of this host's decoder."""
    # The chat template determines how the model writes tool calls, unless the task sets a syntax.
    syntax = task.tools.syntax or parsing.syntax_of(base.tokenizer.chat_template)
    task = replace(task, tools=replace(task.tools, syntax=syntax))
    rollout = engine.settings
    history = History(rollout.draft, rollout.group_size * rollout.max_turns)
    hosts = hosts_of(engine.mesh)
    exchange = collectives.Exchange(hosts) if len(hosts) > 1 else None
    return Sampler(engine, base.tokenizer, pool, task, history, exchange)


def to_rollout(problem: Problem, sequence: Sequence) -> Rollout:
    """Returns the finished `sequence` as a rollout. Its turns hold the grades that have arrived."""
    return Rollout(
        problem=problem,
        sample_index=sequence.sample_index,
        tokens=sequence.tokens,
        turns=tuple(sequence.turns),
    )
