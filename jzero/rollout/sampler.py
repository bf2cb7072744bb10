"""Problems in, graded rollouts out: the engine, the tokenizer on both sides of it, and the graders.

    problems -> Sampler.encode_problems    prompts as token ids; problems whose prompt is too long
    are dropped
             -> Sampler.sample_rollouts    this host's share of the problems, decoded and graded
             turn by turn -> Sampler.gather_rollouts    the rollouts of all hosts, with the rewards
             that need a whole batch

The synchronous train loop, `jzero.evaluate` and `jzero.generate` call these three methods.
Asynchronous rollouts (`async_stream.py`) call `Sampler.decode`, which the second step is made of.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Int32

from jzero import config
from jzero.distributed import collectives, interrupt, peers, processes
from jzero.distributed.mesh import decode_mesh, make_mesh, split_devices
from jzero.distributed.publish import publisher
from jzero.distributed.side_by_side import joins_weights
from jzero.errors import UserError
from jzero.grading.pool import Pool
from jzero.model import qwen, tokenizer
from jzero.rollout.engine import Engine
from jzero.rollout.scheduler import Scheduler
from jzero.rollout.sequence import (
    AdmitMore,
    DecodeCounters,
    Groups,
    Sequence,
    admit_none,
    make_groups,
)
from jzero.rollout.serialization import rollouts_from_bytes, rollouts_to_bytes
from jzero.rollout.turns import TurnGrader
from jzero.run.base_model import BaseModel
from jzero.tasks import batched_rewards, rewards
from jzero.tasks.tools import episodes as tool_episodes
from jzero.tasks.tools import parsing
from jzero.types import Grade, JsonValue, Problem, Rollout, grade_of


@dataclass(frozen=True)
class EncodedProblem:
    """A problem and the token ids of its prompt, which is tokenized once and not again."""

    problem: Problem
    prompt_tokens: Int32[np.ndarray, " tokens"]


@dataclass
class Sampler:
    """Samples and grades responses on this host's decode devices."""

    engine: Engine
    tokenizer: tokenizer.PreTrainedTokenizerFast
    pool: Pool
    task: config.TaskConfig

    def encode_prompt(self, problem: Problem) -> Int32[np.ndarray, " tokens"]:
        """Returns the token ids of the problem's prompt, chat template applied."""
        tools = list(problem.tools or [])
        if problem.task == self.task.name:
            tools += tool_episodes.schemas(self.task)
        return np.array(tokenizer.prompt_ids(self.tokenizer, problem.prompt, tools), np.int32)

    def encode_problems(self, problems: list[Problem], name: str = "") -> list[EncodedProblem]:
        """Tokenizes prompts, and drops those longer than rollout.max_prompt_tokens.

        A long prompt is dropped and not cut, because a cut question is another question. If `name`
        is given, prints how many problems of the set of that name were dropped.
        """
        longest = self.engine.settings.max_prompt_tokens
        encoded = [EncodedProblem(problem, self.encode_prompt(problem)) for problem in problems]
        fitting = [item for item in encoded if len(item.prompt_tokens) <= longest]
        dropped = len(encoded) - len(fitting)
        if name and dropped:
            processes.print_once(
                f"{name}: {dropped} of {len(encoded)} prompts dropped, longer than {longest} tokens"
            )
        return fitting

    def sample_rollouts(
        self,
        params: qwen.Params,
        problems: list[EncodedProblem],
        group_size: int,
        temperature: float,
        key: tuple[int, int],
        version: int,
        check_stop: interrupt.StopCheck = interrupt.never_stop,
        top_p: float = 0.0,
        max_new_tokens: int = 0,
        is_trained: bool = True,
    ) -> tuple[list[Rollout], DecodeCounters]:
        """Samples `group_size` graded rollouts of each problem in this host's share of `problems`.

        The rollouts come in the order of the problems. The noise of a token is a function of `key`
        (two integers), the problem's place in `problems`, the sample's index in its group, and the
        token's position: so it depends neither on the number of hosts nor on what else is decoded.
        `version` is the policy version of `params`. `top_p` and `max_new_tokens` replace those of
        the rollout unless they are 0. Rollouts that are not trained on remember neither the tokens
        that the filters kept nor the experts of tokens.
        """
        share = collectives.local_share(len(problems))
        mine = problems[share]
        groups = make_groups(
            [item.prompt_tokens for item in mine],
            group_size,
            max_new_tokens or self.engine.settings.max_new_tokens,
            first_prompt=share.start,
        )

        def problem_of(prompt_id: int) -> Problem:
            return mine[prompt_id].problem

        with self.engine.sampling_with(top_p, max_new_tokens, is_trained):
            counters = self.decode(
                params,
                groups,
                group_size,
                problem_of,
                temperature,
                key,
                version,
                check_stop=check_stop,
            )
        sequences = [sequence for group in groups for sequence in group]
        rollouts = [to_rollout(problem_of(s.prompt_id), s) for s in sequences]
        return rollouts, counters

    def decode(
        self,
        params: qwen.Params,
        groups: Groups,
        group_size: int,
        problem_of: Callable[[int], Problem],
        temperature: float,
        key: tuple[int, int],
        version: int,
        admit_more: AdmitMore = admit_none,
        check_stop: interrupt.StopCheck = interrupt.never_stop,
    ) -> DecodeCounters:
        """Decodes `groups` in place, and gives every turn to the graders as the turn ends.

        `problem_of` returns the problem of a `Sequence.prompt_id`; `admit_more` is explained at
        `Scheduler.run`. `check_stop` is called after every turn. If it raises Interrupted, so do
        all hosts.
        """
        scheduler = Scheduler(self.engine, params, self._text_of)
        grader = TurnGrader(self.pool, self.task, self.engine, self.tokenizer, problem_of)
        try:
            for sequence in scheduler.run(
                groups,
                group_size,
                temperature,
                make_seed(self.engine, key),
                version,
                grader.poll_replies,
                admit_more,
            ):
                grader.submit(sequence)
                check_stop()
        except interrupt.Interrupted as reason:
            # The other hosts decode their shares to the end and then wait in `gather_rollouts`:
            # meet them there.
            interrupt.raise_if_any_host_stopped(str(reason))
        finally:
            scheduler.cancel()  # after an interruption the engine must be free for an evaluation
        return replace(scheduler.counters, grading_seconds=grader.seconds_waited)

    def gather_rollouts(self, rollouts: list[Rollout]) -> list[Rollout]:
        """Returns the rollouts of all hosts, in order, with their final rewards.

        All hosts must call this method together.
        """
        interrupt.raise_if_any_host_stopped()
        if peers.has_peers():
            rollouts = rollouts_from_bytes(collectives.gather_bytes(rollouts_to_bytes(rollouts)))
        return self._add_batch_rewards(rollouts)

    def _text_of(self, tokens: list[int]) -> str:
        return tokenizer.decode(self.tokenizer, tokens)

    def _add_batch_rewards(self, rollouts: list[Rollout]) -> list[Rollout]:
        """Applies the rewards that depend on the whole batch, and sums the turns of episodes."""
        turns = [turn for rollout in rollouts for turn in rollout.turns]
        grades = [grade_of(turn) for turn in turns]
        if rewards.batched(self.task.reward):
            grades = batched_rewards.add(grades, self._call_batched_rewards(rollouts))
        grades = rewards.add_batch_rewards(
            grades,
            [len(turn.text) for turn in turns],
            [turn.end - turn.start for turn in turns],
            self.task.reward,
        )
        if self.engine.settings.max_turns > 1 and self.task.turn_reward == "success":
            grades = [replace(grade, score=self._success_reward(grade)) for grade in grades]
        remaining = iter(grades)
        return [_take_turn_grades(rollout, remaining) for rollout in rollouts]

    def _call_batched_rewards(self, rollouts: list[Rollout]) -> JsonValue:
        """Calls the user's functions on one host, and tells the others what they said."""
        results = None
        if jax.process_index() == 0:
            episodes = [
                (rollout.problem, [(turn.text, grade_of(turn)) for turn in rollout.turns])
                for rollout in rollouts
            ]
            results = batched_rewards.call_all(self.pool, self.task, episodes)
        return collectives.gather_json(results)[0]

    def _success_reward(self, grade: Grade) -> float:
        """Returns AReaL's reward of a turn (realhf/impl/agent/math_multi_turn_agent.py)."""
        success = (grade.correct - 0.5) * 2
        return (success - self.task.reward_bias) * self.task.reward_scaling


def _take_turn_grades(rollout: Rollout, grades: Iterator[Grade]) -> Rollout:
    return with_turn_grades(rollout, [next(grades) for _ in rollout.turns])


def with_turn_grades(rollout: Rollout, grades: list[Grade]) -> Rollout:
    """Returns `rollout` with one grade for each turn, and the episode's grade made from them.

    The episode's score is the sum of its turns' scores. It is correct if any turn is. Its reason
    and named rewards are those of the last turn. An episode has failed if a turn has.
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


def make_sampler(
    settings: config.Config, base: BaseModel, mesh: Mesh, pool: Pool
) -> tuple[Sampler, Callable[[qwen.Params], qwen.Params]]:
    """Returns a sampler and `publish`, which turns the trainer's weights into the sampler's.

    The sampler decodes on the devices of the training mesh `mesh`, or, if mesh.decode_devices is
    set, on the devices of this host that the training mesh leaves free.
    """
    mesh_for_decoding = decode_mesh(mesh)
    if num_devices := settings.mesh.decode_devices:
        tensor = mesh.shape["tensor"]
        if num_devices % tensor:
            raise UserError(
                f"mesh.tensor={tensor} does not divide mesh.decode_devices={num_devices}: "
                "set mesh.decode_devices to a multiple of mesh.tensor"
            )
        _, free_devices = split_devices(num_devices)
        mesh_for_decoding = make_mesh(free_devices, {"slots": -1, "tensor": tensor})
    engine = Engine(
        base.model,
        per_host_settings(settings.rollout, jax.process_count()),
        mesh_for_decoding,
        base.stop_tokens,
        settings.model.dtype,
        settings.model.kernels,
        settings.eval.longest_episode(settings.rollout),
        config.remembers_kept(settings),
        settings.model.exact,
        settings.rollout.routing_replay,
    )
    syntax = settings.task.tools.syntax or parsing.syntax_of(base.tokenizer.chat_template)
    task = replace(settings.task, tools=replace(settings.task.tools, syntax=syntax))
    sampler = Sampler(engine, base.tokenizer, pool, task)
    publish = publisher(
        base.model,
        mesh,
        mesh_for_decoding,
        settings.model.dtype,
        settings.model.adapter,
        settings.rollout.quantizes_weights,
        joins_weights(settings.model, mesh_for_decoding),
    )
    return sampler, publish


def per_host_settings(rollout: config.RolloutConfig, num_hosts: int) -> config.RolloutConfig:
    """Returns one host's settings: rollout.num_slots and num_pages count those of all hosts."""
    return replace(
        rollout,
        num_slots=-(-rollout.num_slots // num_hosts),
        num_pages=-(-rollout.num_pages // num_hosts),
    )


@jax.jit
def _fold_key(words: jax.Array) -> jax.Array:
    return jax.random.fold_in(jax.random.key(words[0]), words[1])


def make_seed(engine: Engine, key: tuple[int, int]) -> jax.Array:
    """Returns the random key of two integers, replicated over the engine's devices."""
    replicated = NamedSharding(engine.mesh, P())
    return _fold_key(jax.device_put(np.array(key, np.uint32), replicated))


def to_rollout(problem: Problem, sequence: Sequence) -> Rollout:
    """Returns the finished `sequence` as a rollout. Its turns hold the grades that have arrived."""
    prompt_length = len(sequence.prompt_tokens)
    versions = np.array([-1] * prompt_length + sequence.versions, np.int32)
    logps = np.array([0.0] * prompt_length + sequence.logps, np.float32)
    kept = None
    if sequence.kept:
        of_prompt = np.full((prompt_length, len(sequence.kept[0])), -1, np.int32)
        kept = np.concatenate([of_prompt, np.stack(sequence.kept)])
    return Rollout(
        problem=problem,
        sample_index=sequence.sample_index,
        tokens=sequence.all_tokens(),
        sampled=versions >= 0,
        logps=logps,
        versions=versions,
        turns=tuple(sequence.turns),
        kept=kept,
        routes=np.stack(sequence.routes) if sequence.routes else None,
    )
