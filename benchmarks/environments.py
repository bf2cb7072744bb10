"""Prints what slow and crashing environments cost: episodes that are lost, and use of the slots.

    python benchmarks/environments.py              # 256 episodes at once, in an event loop
    python benchmarks/environments.py --mode processes --workers 16 --episodes 64

A tiny model with random weights walks through a cave: an environment with state, in which an
episode has ten turns and every reply depends on all responses before. `--episodes` run at once:
another begins where one ends, until `--walks` have ended. Each row of the table is such a run. In
the first nothing waits. In the others a step takes `--delay` seconds on average, and some lose
their connection (or end their process) or hang until the limit ends them.

"slot use" is the share of the decoder's work that made tokens of an episode, and "of free" compares
it with the first row. An episode whose second try fails, too, has "failed": it has no score, and
its reason names the environment. A "lost" one would have ended without a reason. "different" are
episodes whose tokens are not those of the first row, as far as both have come: the noise is keyed,
so that nothing that waits or is built again may change a token.
"""

import argparse
import asyncio
import os
import random
import time
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import jax

from jzero import cli
from jzero.blueprint import Topology, describe, models_of, spec_of_decoder
from jzero.config import (
    Config,
    MeshConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    TaskConfig,
    tiny_arch,
    turns,
)
from jzero.decoder.driver import Phase
from jzero.decoder.sequence import DecodeCounters, Groups, Sequence, make_groups
from jzero.model import qwen
from jzero.model.base_model import read_base_model
from jzero.rollout.sampler import GradedBatch, Sampler, make_sampler
from jzero.tasks import find_task
from jzero.training import learner
from jzero.training.heads import rl_objective
from jzero.types import Problem
from jzero.workers.pool import Pool

TURNS = 10
GROUP_SIZE = 8
LIMIT_SECONDS = 5.0  # of a call
HEADINGS = (
    "environments",
    "seconds",
    "slot use",
    "of free",
    "crashes",
    "time-outs",
    "failed",
    "lost",
    "different",
)


@dataclass(frozen=True)
class Trouble:
    """What happens in the steps of a run. The environments read it from CAVE_TROUBLE."""

    delay: float = 0.0  # seconds on average
    crashes: float = 0.0  # share of the steps
    hangs: float = 0.0  # share of the steps

    def to_text(self) -> str:
        return f"{self.delay} {self.crashes} {self.hangs}"

    @classmethod
    def from_text(cls, text: str) -> "Trouble":
        return cls(*map(float, text.split()))


class Cave:
    """A walk of TURNS steps. Where a step leads depends on the response and on the place."""

    async def reset(self, row: dict[str, object], seed: int) -> str:
        self.place = seed % 100
        self.steps = 0
        self.trouble = Trouble.from_text(os.environ["CAVE_TROUBLE"])
        return f"{self.place}\n"

    async def step(self, response: str) -> tuple[str, float, bool]:
        delay = random.expovariate(1 / self.trouble.delay) if self.trouble.delay else 0.0
        await asyncio.sleep(delay)
        chance = random.random()
        if chance < self.trouble.crashes:
            raise ConnectionResetError("the cave has fallen in")
        if chance < self.trouble.crashes + self.trouble.hangs:
            await asyncio.sleep(1000)
        self.place = zlib.crc32(f"{self.place} {response}".encode()) % 100
        self.steps += 1
        return f"{self.place}\n", float(self.place > 50), self.steps == TURNS


class KilledCave(Cave):
    """The same for a process, which ends where the other loses its connection."""

    async def step(self, response: str) -> tuple[str, float, bool]:
        try:
            return await super().step(response)
        except ConnectionResetError:
            os._exit(3)


def make_settings(
    mode: Literal["processes", "asyncio"], episodes: int, slots: int, workers: int
) -> Config:
    """Returns the settings of a tiny model in the cave."""
    name = "Cave" if mode == "asyncio" else "KilledCave"
    return Config(
        name="cave",
        model=ModelConfig(
            arch=tiny_arch(hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=8),
            dtype="float32",
        ),
        task=TaskConfig(
            name="environment",
            environment=f"{Path(__file__).resolve()}:{name}",
            environment_mode=mode,
            template="plain",
            turn_reward=turns.Score(),
            grade_workers=workers,
            reward=RewardConfig(seconds=LIMIT_SECONDS),
        ),
        rollout=RolloutConfig(
            num_prompts=episodes // GROUP_SIZE,
            group_size=GROUP_SIZE,
            max_prompt_tokens=8,
            max_new_tokens=32,
            max_turns=TURNS,
            max_reply_tokens=8,
            num_slots=slots,
            page_size=16,
            decode_steps=4,
        ),
    )


def make_player(settings: Config, pool: Pool) -> tuple[Sampler, qwen.Params]:
    """Returns a sampler of a model with random weights, and the weights."""
    base = read_base_model(settings.model)
    spec = spec_of_decoder(
        settings.model, MeshConfig(), settings.rollout, settings.algorithm, settings.eval
    )
    topology = Topology(jax.devices()[:1], jax.process_index())
    blueprint = describe(spec, models_of(base), topology)
    sampler, publish = (
        make_sampler(blueprint.decoder, base, settings.task, pool),
        blueprint.publisher(),
    )
    mesh = blueprint.mesh
    objective = rl_objective(settings.algorithm, settings.rollout)
    policy = learner.policy_learner(base.model, settings.model, settings.optimizer, objective, mesh)
    return sampler, publish(policy.init_params(0))


@dataclass
class Walks:
    """The episodes of one run."""

    episodes: list[Sequence]  # all that have begun
    counters: DecodeCounters
    counts: dict[str, int]  # of the pool
    seconds: float

    @property
    def slot_use(self) -> float:
        useful = self.counters.decoded_tokens - self.counters.wasted_tokens
        return useful / self.counters.slot_steps

    @property
    def num_failed(self) -> int:
        return sum(has_failed(episode) for episode in self.episodes)

    @property
    def num_lost(self) -> int:
        """Episodes that have ended before their last turn, and not because they failed."""
        ended = [episode for episode in self.episodes if episode.is_finished]
        return sum(len(episode.turns) < TURNS and not has_failed(episode) for episode in ended)

    def num_different(self, other: "Walks") -> int:
        """Episodes whose tokens are not those of `other`, as far as both have come."""
        tokens = {(e.prompt_id, e.sample_index): e.new_tokens for e in other.episodes}
        count = 0
        for episode in self.episodes:
            others = tokens.get((episode.prompt_id, episode.sample_index), [])
            tokens_so_far = episode.new_tokens
            length = min(len(tokens_so_far), len(others))
            count += tokens_so_far[:length] != others[:length]
        return count


def has_failed(episode: Sequence) -> bool:
    return any(turn.grade is not None and turn.grade.failed for turn in episode.turns)


class Walking(GradedBatch):
    """Keeps `running` episodes going until `num_walks` have ended."""

    is_whole = False

    def __init__(
        self,
        sampler: Sampler,
        waiting: Groups,
        problems: list[Problem],
        num_walks: int,
        running: int,
    ) -> None:
        super().__init__(sampler, [], problems.__getitem__)
        self.waiting = waiting  # the next one last
        self.num_walks = num_walks
        self.running = running
        self.begun: list[Sequence] = []

    def more(self) -> Groups | None:
        """Returns as many groups as have ended; None once enough have."""
        num_ended = sum(episode.is_finished for episode in self.begun)
        if num_ended >= self.num_walks:
            return None
        admitted: Groups = []
        while self.waiting and len(self.begun) - num_ended <= self.running - GROUP_SIZE:
            admitted.append(self.waiting.pop())
            self.begun.extend(admitted[-1])
        return admitted


def play(
    sampler: Sampler, params: qwen.Params, settings: Config, trouble: Trouble, num_walks: int
) -> Walks:
    """Plays until `num_walks` episodes have ended. As many as a step has run all the time."""
    running = settings.rollout.num_prompts * GROUP_SIZE
    os.environ["CAVE_TROUBLE"] = Trouble().to_text()  # prompts are made before
    draw = find_task(settings.task.name).train_problems
    problems = draw(settings.task, 0, 0, (num_walks + running) // GROUP_SIZE)
    os.environ["CAVE_TROUBLE"] = trouble.to_text()
    prompts = [sampler.encode_prompt(problem) for problem in problems]
    waiting = make_groups(prompts, GROUP_SIZE, settings.rollout.max_new_tokens)[::-1]

    workers = 0 if settings.task.environment_mode == "asyncio" else settings.task.grade_workers
    with Pool(workers) as pool:
        start = time.perf_counter()
        walker = Walking(replace(sampler, pool=pool), waiting, problems, num_walks, running)
        counters = walker.sampler.decode(Phase(params, (0, 0), GROUP_SIZE), walker)
        seconds = time.perf_counter() - start
        return Walks(walker.begun, counters, dict(pool.counters), seconds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mode", choices=("asyncio", "processes"), default="asyncio")
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--walks", type=int, default=0, help="0: twice as many as --episodes")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--workers", type=int, default=16, help="processes of --mode processes")
    parser.add_argument("--delay", type=float, default=0.02, help="seconds of a step on average")
    args = parser.parse_args()
    cli.start_jax([])

    settings = make_settings(args.mode, args.episodes, args.slots, args.workers)
    with Pool(0) as pool:
        sampler, params = make_player(settings, pool)
    num_walks = args.walks or 2 * args.episodes
    play(sampler, params, settings, Trouble(), args.episodes)  # compiles

    kinds = {
        "free": Trouble(),
        "slow": Trouble(args.delay),
        "slow, crashing": Trouble(args.delay, crashes=0.01),
        "slow, crashing, hanging": Trouble(args.delay, crashes=0.01, hangs=0.002),
    }
    free: Walks | None = None
    print(f"| {' | '.join(HEADINGS)} |", "|---" * len(HEADINGS) + "|", sep="\n")
    for name, trouble in kinds.items():
        walks = play(sampler, params, settings, trouble, num_walks)
        free = free or walks
        cells = (
            name,
            f"{walks.seconds:.1f}",
            f"{100 * walks.slot_use:.1f} %",
            f"{100 * walks.slot_use / free.slot_use:.1f} %",
            walks.counts["killed"],
            walks.counts["timeouts"],
            walks.num_failed,
            walks.num_lost,
            walks.num_different(free),
        )
        print(f"| {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    main()
