"""Prints what slow and crashing environments cost: episodes that are lost, and use of the slots.

    python benchmarks/environments.py              # 256 episodes at once, in an event loop
    python benchmarks/environments.py --mode processes --workers 16 --episodes 64

A tiny model with random weights walks through a cave: an environment with state, in which an
episode has ten turns and every reply depends on all responses before. Each row of the table is a
run with the same tokens to sample. In the first nothing waits. In the others a step takes
`--delay` seconds on average, and some lose their connection or hang until the limit ends them.

"slot use" is the share of the decoder's work that made tokens of an episode. "of free" compares
it with the first row. "different" counts episodes whose tokens are not those of the first row; the
noise is keyed, so they have to be the same. Episodes whose second try fails as well are "failed":
they have no score, and their reason names the environment.
"""

import argparse
import asyncio
import os
import random
import sys
import time
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

import jax

from jzero import cli
from jzero.config import (
    ArchitectureConfig,
    Config,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    TaskConfig,
)
from jzero.distributed.mesh import train_mesh
from jzero.grading.pool import Pool
from jzero.model import qwen
from jzero.rollout.sampler import Sampler, make_sampler
from jzero.rollout.sequence import DecodeCounters
from jzero.run.base_model import read_base_model
from jzero.tasks import find_task
from jzero.training import learner
from jzero.types import Rollout, grade_of

TURNS = 10
GROUP_SIZE = 8
LIMIT_SECONDS = 5.0  # of a call
HEADINGS = ("environments", "seconds", "slot use", "of free", "lost", "failed", "different")


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


def make_settings(mode: str, episodes: int, slots: int, workers: int) -> Config:
    """Returns the settings of a tiny model in the cave."""
    name = "Cave" if mode == "asyncio" else "KilledCave"
    return Config(
        name="cave",
        model=ModelConfig(
            arch=ArchitectureConfig(
                hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=8
            ),
            dtype="float32",
        ),
        task=TaskConfig(
            name="environment",
            environment=f"{Path(__file__).resolve()}:{name}",
            environment_mode=mode,
            template="plain",
            turn_reward="score",
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
    mesh = train_mesh(1, 1, 1, jax.devices()[:1])
    sampler, publish = make_sampler(settings, base, mesh, pool)
    policy = learner.policy_learner(base.model, settings, mesh)
    return sampler, publish(policy.init_params(0))


def play(
    sampler: Sampler, params: qwen.Params, settings: Config, trouble: Trouble
) -> tuple[list[Rollout], DecodeCounters, float]:
    """Returns the episodes of one step, what was decoded, and the seconds that it took."""
    os.environ["CAVE_TROUBLE"] = Trouble().to_text()  # prompts are made before
    draw = find_task(settings.task.name).train_problems
    problems = draw(settings.task, 0, 0, settings.rollout.num_prompts)
    os.environ["CAVE_TROUBLE"] = trouble.to_text()
    with Pool(
        settings.task.grade_workers if settings.task.environment_mode != "asyncio" else 0
    ) as p:
        sampler = replace(sampler, pool=p)
        start = time.perf_counter()
        rollouts, counters = sampler.sample_rollouts(
            params, sampler.encode_problems(problems), GROUP_SIZE, 1.0, (0, 0), version=0
        )
        seconds = time.perf_counter() - start
        print(trouble, {name: n for name, n in p.counters.items() if n}, file=sys.stderr)
        return sampler.gather_rollouts(rollouts), counters, seconds


def slot_use(counters: DecodeCounters) -> float:
    useful = counters.decoded_tokens - counters.wasted_tokens
    return useful / counters.slot_steps


def num_different(rollouts: list[Rollout], others: list[Rollout]) -> int:
    """Returns how many episodes have other tokens; those that failed have a part of the tokens."""
    count = 0
    for rollout, other in zip(rollouts, others, strict=True):
        length = len(rollout.tokens) if grade_of(rollout).failed else None
        count += rollout.tokens.tolist() != other.tokens[:length].tolist()
    return count


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mode", choices=("asyncio", "processes"), default="asyncio")
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--workers", type=int, default=16, help="processes of --mode processes")
    parser.add_argument("--delay", type=float, default=0.02, help="seconds of a step on average")
    args = parser.parse_args()
    cli.start_jax([])

    settings = make_settings(args.mode, args.episodes, args.slots, args.workers)
    with Pool(0) as pool:
        sampler, params = make_player(settings, pool)
    play(sampler, params, settings, Trouble())  # compiles

    kinds = {
        "free": Trouble(),
        "slow": Trouble(args.delay),
        "slow, crashing": Trouble(args.delay, crashes=0.01),
        "slow, crashing, hanging": Trouble(args.delay, crashes=0.01, hangs=0.002),
    }
    free: list[Rollout] = []
    use_of_free = 0.0
    print(f"| {' | '.join(HEADINGS)} |", "|---" * len(HEADINGS) + "|", sep="\n")
    for name, trouble in kinds.items():
        rollouts, counters, seconds = play(sampler, params, settings, trouble)
        use = slot_use(counters)
        if not free:
            free, use_of_free = rollouts, use
        cells = (
            name,
            f"{seconds:.1f}",
            f"{100 * use:.1f} %",
            f"{100 * use / use_of_free:.1f} %",
            args.episodes - len(rollouts),
            sum(grade_of(rollout).failed for rollout in rollouts),
            num_different(rollouts, free),
        )
        print(f"| {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    main()
