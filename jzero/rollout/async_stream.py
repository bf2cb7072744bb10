"""Asynchronous rollouts: a group may start up to `rollout.max_staleness` policy versions before the step that trains on it.

Every host has a stream of its share of the problems; see docs/async.md. `Stream` decodes and trains in turn on the same
devices, `Ahead` decodes in a thread, on devices of its own."""

import functools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from flax.serialization import msgpack_restore, msgpack_serialize

from jzero import config
from jzero.distributed import collectives, interrupt
from jzero.errors import UserError
from jzero.rollout.sampler import Sampler, encode_prompt, to_rollout
from jzero.rollout.sequence import DecodeCounters, Sequence
from jzero.rollout.serialization import from_plain
from jzero.tasks import TASKS
from jzero.types import Problem, Rollout

POLL = 0.02  # seconds between looks at what a thread has done


def admission_capacity(
    eta: int, version: int, batch: int, most: int, accepted: int, running: int
) -> int:
    """How many groups may start: `most` run at once, none is trained on more than eta versions later (AReaL)."""
    return min(most - running, (eta + version + 1) * batch - (accepted + running))


@dataclass(eq=False)
class EpisodeGroup:
    """The episodes of one problem."""

    number: int  # of the problem, over all steps
    version: int  # of the policy when it was admitted
    sequences: list[Sequence]

    @property
    def over(self) -> bool:
        return all(sequence.over for sequence in self.sequences)

    @property
    def graded(self) -> bool:
        return self.over and all(sequence.turns[-1].grade for sequence in self.sequences)


class RolloutStream:
    """This host's groups between their admission and their training step."""

    ready = staticmethod(
        lambda group: group.over
    )  # grades are waited for afterwards: when they come decides nothing

    def __init__(self, sampler: Sampler, settings: config.Config):
        self.sampler, self.settings, self.rollout = sampler, settings, settings.rollout
        mine = collectives.local_share(self.rollout.num_prompts)
        self.first, self.batch = mine.start, mine.stop - mine.start
        all_hosts = (
            self.rollout.max_running_groups
            or (self.rollout.max_staleness + 1) * self.rollout.num_prompts
        )
        self.most = max(
            1, len(range(all_hosts)[collectives.local_share(all_hosts)])
        )  # groups that run at once
        self.groups: list[EpisodeGroup] = []  # oldest first
        self.taken: int = 0  # groups trained on
        self.cursor: int = 0  # problems looked at: prompts that are too long are passed over
        self.lock = threading.Lock()
        self.saved = self.to_bytes()
        draw = functools.partial(
            TASKS[settings.task.name].train_problems, settings.task, settings.train.seed
        )
        self.problems = functools.lru_cache(self.rollout.max_staleness + 2)(
            lambda step: draw(step, self.rollout.num_prompts)
        )

    def collect(self, weights, version: int) -> tuple[list[Rollout], DecodeCounters]:
        """The rollouts that the step after `version` trains on, and what was decoded for it."""
        counters = self.decode(weights, version, lambda: self.enough(version))
        rollouts = self.take(version)
        self.saved = self.to_bytes()
        return rollouts, counters

    def decode(self, weights, version: int, done: Callable[[], bool]) -> DecodeCounters:
        """Go on with all groups, and new ones as they are admitted, until `done`, or until none may start."""
        more = lambda: None if done() else [group.sequences for group in self.admit(version)]
        going = [[s for s in group.sequences if not s.over] for group in self.groups]
        begun = [[sequence] for group in going for sequence in group if sequence.tokens]
        fresh = [new for group in going if (new := [s for s in group if not s.tokens])]
        heat, key = self.rollout.temperature, (self.settings.train.seed, version + 1)
        return self.sampler.decode(
            weights,
            [*begun, *fresh],
            self.rollout.group_size,
            self.problem,
            heat,
            key,
            version,
            more,
        )

    def problem(self, number: int) -> Problem:
        step, place = divmod(number, self.rollout.num_prompts)
        return self.problems(step + 1)[place]

    def admit(self, version: int) -> list[EpisodeGroup]:
        """New groups, as many as may start; their requests, which name their noise, are no one else's on the way."""
        eta, prompts, G = (
            self.rollout.max_staleness,
            self.rollout.num_prompts,
            self.rollout.group_size,
        )
        new: list[EpisodeGroup] = []
        passed = 0
        with self.lock:
            over = sum(group.over for group in self.groups)
            room = admission_capacity(
                eta, version, self.batch, self.most, self.taken + over, len(self.groups) - over
            )
            while len(new) < room:
                step, place = divmod(self.cursor, self.batch)
                number = step * prompts + self.first + place
                self.cursor += 1
                context = np.array(
                    encode_prompt(self.sampler.tokenizer, self.problem(number)), np.int32
                )
                if len(context) <= self.rollout.max_prompt_tokens:
                    first, limit = (
                        number % ((2 * eta + 1) * prompts) * G,
                        len(context) + self.rollout.max_new_tokens,
                    )
                    sequences = [Sequence(number, j, first + j, context, limit) for j in range(G)]
                    new.append(EpisodeGroup(number, version, sequences))
                elif (passed := passed + 1) > prompts:
                    raise UserError(
                        f"{passed} prompts are longer than rollout.max_prompt_tokens={self.rollout.max_prompt_tokens}"
                    )
            self.groups += new
        return new

    def enough(self, version: int) -> bool:
        """Whether there is what the step after `version` trains on, with all that would be too old for the next."""
        late = any(
            group.version <= version - self.rollout.max_staleness and not self.ready(group)
            for group in self.groups
        )
        return not late and sum(map(self.ready, self.groups)) >= self.batch

    def take(self, version: int) -> list[Rollout]:
        with self.lock:
            chosen = [group for group in self.groups if self.ready(group)][: self.batch]
            self.groups = [group for group in self.groups if group not in chosen]
            self.taken += len(chosen)
        assert len(chosen) == self.batch and all(
            version - group.version <= self.rollout.max_staleness for group in chosen
        )
        return [
            to_rollout(self.problem(group.number), sequence)
            for group in chosen
            for sequence in group.sequences
        ]

    def metrics(
        self, rollouts: list[Rollout], version: int, counters: DecodeCounters
    ) -> dict[str, float]:
        """Of the step after `version`: how many versions old its tokens are, and what is on its way."""
        lags = np.concatenate([version - rollout.versions[rollout.sampled] for rollout in rollouts])
        shares = {
            f"async/staleness_{lag}": float((lags == lag).mean())
            for lag in range(self.rollout.max_staleness + 1)
        }
        carried = sum(len(s.tokens) for group in self.groups for s in group.sequences if not s.over)
        ready = sum(group.over for group in self.groups)
        counts = collectives.sum_over_hosts(
            {"carried_tokens": carried, "ready_groups": ready, "wasted_tokens": counters.wasted}
        )
        return (
            shares
            | {f"async/{name}": value for name, value in counts.items()}
            | {"async/staleness": float(lags.mean())}
        )

    def to_bytes(self) -> bytes:
        groups = [asdict(group) for group in self.groups]
        return msgpack_serialize({"taken": self.taken, "cursor": self.cursor, "groups": groups})

    def state(self) -> bytes:
        """As it was when the last step had its rollouts."""
        return self.saved

    def load(self, data: bytes) -> None:
        values: Any = msgpack_restore(data)
        self.taken, self.cursor, self.groups = (
            values["taken"],
            values["cursor"],
            from_plain(EpisodeGroup, values["groups"]),
        )
        self.saved = data

    def halt(self) -> None:
        """Nothing decodes."""


class ThreadedStream(RolloutStream):
    """Decodes in a thread while the main one trains, and takes new weights between calls; others `halt` it first."""

    ready = staticmethod(lambda group: group.graded)

    def __init__(self, sampler: Sampler, settings: config.Config):
        super().__init__(replace(sampler, on_finish=lambda: None), settings)
        self.main = sampler  # its on_finish raises when the run is to stop
        self.thread = ThreadPoolExecutor(1)
        self.phases: list[
            Future[DecodeCounters]
        ] = []  # the first is running, the others wait for it
        self.cut = threading.Event()  # ends the last one
        self.counters, self.busy, self.waited = (
            DecodeCounters(),
            0.0,
            0.0,
        )  # of the phases that ended; seconds

    def decode(self, weights, version: int, done: Callable[[], bool]) -> DecodeCounters:
        begin = time.perf_counter()
        counters = super().decode(weights, version, done)
        self.busy += time.perf_counter() - begin
        return counters

    def collect(self, weights, version: int) -> tuple[list[Rollout], DecodeCounters]:
        self.cut.set()
        self.cut, begin = threading.Event(), time.perf_counter()
        self.phases.append(self.thread.submit(self.decode, weights, version, self.cut.is_set))
        try:
            while not self.enough(version):
                if self.phases[0].done():
                    self.counters.add(self.phases.pop(0).result())
                self.main.on_finish()
                time.sleep(POLL)
        except interrupt.Interrupted as reason:
            interrupt.raise_if_interrupted(str(reason))
        self.waited += time.perf_counter() - begin
        counters, self.counters = (
            replace(self.counters, grading=0.0),
            DecodeCounters(),
        )  # it was not the main thread's
        return self.take(version), counters

    def metrics(
        self, rollouts: list[Rollout], version: int, counters: DecodeCounters
    ) -> dict[str, float]:
        """overlap: the share of this host's decoding so far that the main thread did not wait for."""
        overlap = max(0.0, 1 - self.waited / self.busy) if self.busy else 0.0
        return super().metrics(rollouts, version, counters) | {"async/overlap": overlap}

    def halt(self) -> None:
        self.cut.set()
        while self.phases:
            self.counters.add(self.phases.pop(0).result())

    def state(self) -> bytes:
        self.halt()
        return self.to_bytes()
