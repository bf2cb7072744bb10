"""Moved from jzero.evaluate."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jzero import config
from jzero.distributed import collectives, interrupt, processes
from jzero.distributed.mesh import decode_mesh, make_mesh, split_devices
from jzero.distributed.publish import publisher
from jzero.errors import UserError
from jzero.grading.pool import Pool
from jzero.model import qwen, tokenizer
from jzero.rollout.engine import Engine
from jzero.rollout.scheduler import Scheduler
from jzero.rollout.sequence import DecodeCounters, Groups, More, Sequence, make_groups
from jzero.rollout.serialization import rollouts_from_bytes, rollouts_to_bytes
from jzero.rollout.turns import TurnGrader
from jzero.run.base_model import BaseModel
from jzero.tasks import rewards
from jzero.types import Grade, Problem, Rollout, grade_of


@dataclass
class Sampler:
    """What turns problems into graded rollouts: the engine, the text on both sides of it, and the graders."""

    engine: Engine
    tokenizer: tokenizer.PreTrainedTokenizerFast
    pool: Pool
    task: config.TaskConfig
    on_finish: Callable[[], None] = lambda: (
        None
    )  # called for every finished sequence: progress, interruption

    def rollouts(
        self,
        params,
        problems: list[Problem],
        group: int,
        temperature: float,
        key: tuple[int, int],
        version: int,
    ) -> tuple[list[Rollout], DecodeCounters]:
        """Of this host's share of the problems, in order; the noise follows key (two integers), place and position."""
        share = collectives.local_share(len(problems))
        problems = problems[share]
        prompts = [
            np.array(encode_prompt(self.tokenizer, problem), np.int32) for problem in problems
        ]
        groups = make_groups(prompts, group, self.engine.settings.max_new_tokens, share.start)
        counters = self.decode(
            params, groups, group, problems.__getitem__, temperature, key, version
        )
        return [to_rollout(problems[s.prompt], s) for each in groups for s in each], counters

    def decode(
        self,
        params,
        groups: Groups,
        group: int,
        problem: Callable[[int], Problem],
        temperature: float,
        key: tuple[int, int],
        version: int,
        more: More = list,
    ) -> DecodeCounters:
        """`Driver.run` with the pool, which gets every turn as it ends; problem: of a sequence's number."""
        driver = Scheduler(self.engine, params, lambda ids: tokenizer.decode(self.tokenizer, ids))
        talk = TurnGrader(self.pool, self.task, self.engine, self.tokenizer, problem)
        try:
            seed = make_seed(self.engine, key)
            for sequence in driver.run(
                groups, group, temperature, seed, version, talk.replies, more
            ):
                talk.submit(sequence)
                self.on_finish()
        except interrupt.Interrupted as reason:
            interrupt.raise_if_interrupted(str(reason))  # the others wait in `gathered`
        finally:
            driver.cancel()  # an interruption leaves the engine free
        return replace(driver.counters, grading=talk.waited)

    def gathered(self, rollouts: list[Rollout]) -> list[Rollout]:
        """The rollouts of all hosts, in order, with the rewards that need to see a whole batch."""
        interrupt.raise_if_interrupted()
        if processes.has_peers():
            rollouts = rollouts_from_bytes(collectives.gather_bytes(rollouts_to_bytes(rollouts)))
        turns = [turn for rollout in rollouts for turn in rollout.turns]
        lengths = [len(turn.text) for turn in turns], [turn.end - turn.start for turn in turns]
        grades = rewards.of_batch([grade_of(turn) for turn in turns], *lengths, self.task.reward)
        if self.engine.settings.max_turns > 1 and self.task.turn_reward == "success":
            reward = lambda grade: (
                ((grade.correct - 0.5) * 2 - self.task.reward_bias) * self.task.reward_scaling
            )
            grades = [replace(grade, score=reward(grade)) for grade in grades]
        each = iter(grades)
        return [
            with_turn_grades(rollout, [next(each) for _ in rollout.turns]) for rollout in rollouts
        ]


def with_turn_grades(rollout: Rollout, grades: list[Grade]) -> Rollout:
    """With the grade of every turn; and of the episode: the sum of their scores, and any success."""
    turns = tuple(
        replace(turn, grade=grade) for turn, grade in zip(rollout.turns, grades, strict=True)
    )
    score, seconds = sum(grade.score for grade in grades), sum(grade.seconds for grade in grades)
    episode = replace(
        grades[-1], score=score, correct=any(grade.correct for grade in grades), seconds=seconds
    )
    return replace(rollout, turns=turns, grade=episode)


def make_sampler(
    settings: config.Config, base: BaseModel, mesh: Mesh, pool: Pool
) -> tuple[Sampler, Callable[[qwen.Params], qwen.Params]]:
    """A sampler on the mesh's devices, or those beside it, and `publish`: the trainer's weights -> the sampler's."""
    decode, dtype = decode_mesh(mesh), settings.model.dtype
    if apart := settings.mesh.decode_devices:
        if apart % (tensor := mesh.shape["tensor"]):
            raise UserError(f"mesh.tensor={tensor} does not divide mesh.decode_devices={apart}")
        decode = make_mesh(split_devices(apart)[1], {"slots": -1, "tensor": tensor})
    rollout = per_host_settings(settings.rollout, jax.process_count())
    engine = Engine(base.model, rollout, decode, base.stop_tokens, dtype, settings.model.attention)
    return Sampler(engine, base.tokenizer, pool, settings.task), publisher(
        base.model, mesh, decode, dtype
    )


def per_host_settings(rollout: config.RolloutConfig, count: int) -> config.RolloutConfig:
    """The slots and pages of one of `count` hosts."""
    return replace(
        rollout, num_slots=-(-rollout.num_slots // count), num_pages=-(-rollout.num_pages // count)
    )


fold_key = jax.jit(lambda words: jax.random.fold_in(jax.random.key(words[0]), words[1]))


def make_seed(engine: Engine, key: tuple[int, int]) -> jax.Array:
    return fold_key(jax.device_put(np.array(key, np.uint32), NamedSharding(engine.mesh, P())))


def to_rollout(problem: Problem, sequence: Sequence) -> Rollout:
    prompt = len(sequence.context)
    versions = np.array([-1] * prompt + sequence.versions, np.int32)
    logps = np.array([0.0] * prompt + sequence.logps, np.float32)
    return Rollout(
        problem,
        sequence.sample,
        sequence.full(),
        versions >= 0,
        logps,
        versions,
        tuple(sequence.turns),
    )


def encode_prompt(tok: tokenizer.PreTrainedTokenizerFast, problem: Problem) -> list[int]:
    return tokenizer.encode(tok, tokenizer.render(tok, problem.prompt))


def drop_long_prompts(problems: list[Problem], sampler: Sampler, name: str = "") -> list[Problem]:
    """Problems whose prompt fits; longer ones are dropped, never cut. Says how many, of problems that have a name."""
    longest = sampler.engine.settings.max_prompt_tokens
    fit = [
        problem for problem in problems if len(encode_prompt(sampler.tokenizer, problem)) <= longest
    ]
    if name and len(fit) < len(problems):
        lost = f"{len(problems) - len(fit)} of {len(problems)}"
        processes.print_once(f"{name}: {lost} prompts dropped, longer than {longest} tokens")
    return fit
