"""Asynchronous rollouts: a group may start some policy versions before the step that trains on it.

`rollout.placement.max_staleness` bounds this number of versions. Every host has a stream with its
own share of the problems. Groups are admitted to the stream, decode across several steps if they
are long, and leave it as the rollouts of a training step:

    problems --admit--> running groups --finish--> ready groups --take_rollouts--> the training step

`RolloutStream` alternates decoding and training on the same devices. A step ends as soon as it has
enough groups; unfinished groups carry over to the next step and continue under its weights.
`ThreadedStream` decodes in a thread, on separate devices, while the main thread trains.
docs/scale.md is the user guide.

The train loop calls `collect` once a step and `metrics` after it. It calls `halt` before any other
use of the engine, and `state` and `restore` for checkpoints.
"""

import functools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol, TypedDict, cast

import numpy as np
from flax.serialization import msgpack_restore, msgpack_serialize
from jaxtyping import Int32

from jzero import config
from jzero.decoder.driver import Phase
from jzero.decoder.sequence import (
    DecodeCounters,
    EpisodeGroup,
    Groups,
    Sequence,
    groups_to_decode,
)
from jzero.decoder.serialization import restore_all, to_plain
from jzero.errors import UserError
from jzero.hosts import collectives, interrupt
from jzero.model import qwen
from jzero.rollout.sampler import GradedBatch, Sampler, to_rollout
from jzero.tasks import find_task
from jzero.types import Problem, Rollout

POLL_SECONDS = 0.02  # how often the main thread polls the decoding thread


def admission_capacity(
    max_staleness: int,
    version: int,
    groups_per_step: int,
    max_running: int,
    num_accepted: int,
    num_running: int,
) -> int:
    """Returns how many groups may start, by AReaL's staleness control (arXiv:2505.24298, eq. 3).

    The paper admits the N-th trajectory at policy version i while floor((N - 1) / B) <= i + eta. B
    is the number of trajectories in a step, and eta (here `max_staleness`) is the largest
    difference between the version that trains on a trajectory and the version that started it. Here
    N counts groups: all groups so far, finished (`num_accepted`, trained on or not) and running
    (`num_running`). Solved for N, the stream may have admitted at most (i + eta + 1) * B groups. In
    addition, at most `max_running` groups run at once.
    """
    num_allowed = (version + max_staleness + 1) * groups_per_step
    return min(max_running - num_running, num_allowed - (num_accepted + num_running))


class SavedStream(TypedDict):
    """The fields of a stream in a checkpoint."""

    num_trained: int
    num_drawn: int
    groups: object  # a list of each EpisodeGroup as a dictionary


@dataclass(frozen=True)
class TrainingProblems:
    """The problems of a run's steps: a function of the task, the seed and the step."""

    task: config.TaskConfig
    seed: int
    num_prompts: int  # problems of a step

    def draw(self, step: int) -> list[Problem]:
        """Returns the problems of a step."""
        draw = find_task(self.task.name).train_problems
        return draw(self.task, self.seed, step, self.num_prompts)

    @property
    def number(self) -> int | None:
        """The number of problems of one pass; None if the task generates them without an end."""
        return find_task(self.task.name).num_train_problems(self.task)


class Stream(Protocol):
    """Where the rollouts of a run come from, if its steps do not sample them themselves."""

    def collect(
        self,
        weights: qwen.Params,
        version: int,
        check_stop: interrupt.StopCheck = interrupt.never_stop,
    ) -> tuple[list[Rollout], DecodeCounters]:
        """Returns the rollouts for the step after policy `version`, and the decode counters."""
        ...

    def metrics(
        self,
        rollouts: list[Rollout],
        version: int,
        counters: DecodeCounters,
    ) -> dict[str, float]:
        """Returns the metrics of the step after `version`, which trains on `rollouts`."""
        ...

    def halt(self) -> None:
        """Stops decoding and releases the engine."""
        ...

    def state(self) -> bytes:
        """Returns the bytes for a checkpoint."""
        ...

    def restore(self, data: bytes) -> None:
        """Restores the stream from the `state` of a checkpoint."""
        ...


class RolloutStream:
    """This host's groups, from admission to their training step."""

    def __init__(
        self,
        sampler: Sampler,
        problems: TrainingProblems,
        rollout: config.RolloutConfig,
    ) -> None:
        self.sampler = sampler
        self.rollout = rollout
        self.seed = problems.seed
        share = collectives.local_share(self.rollout.num_prompts)
        # Index of this host's first prompt among the prompts of a step
        self.first_prompt = share.start
        self.groups_per_step = share.stop - share.start
        self.max_running = self._max_running_groups()

        self.groups: list[EpisodeGroup] = []  # in the stream, oldest first
        self.num_trained: int = 0  # groups that left the stream for a training step
        self.num_drawn: int = 0  # problems drawn so far, including prompts that were too long
        # Guards groups, num_trained and num_drawn, which two threads of ThreadedStream use.
        self.lock = threading.Lock()

        # Each step's problems are drawn once and cached while any of its groups may be in the
        # stream.
        steps_in_stream = self.rollout.max_staleness + 2
        self._problems_of_step = functools.lru_cache(steps_in_stream)(problems.draw)
        self._saved = self.to_bytes()

    def _max_running_groups(self) -> int:
        # max_running_groups counts the groups of all hosts; this host gets its share.
        default = (self.rollout.max_staleness + 1) * self.rollout.num_prompts
        all_hosts = self.rollout.max_running_groups or default
        share = collectives.local_share(all_hosts)
        return max(1, share.stop - share.start)

    def problem_of(self, number: int) -> Problem:
        """Returns the problem with index `number` among the problems of all steps and hosts."""
        step_index, index = divmod(number, self.rollout.num_prompts)
        return self._problems_of_step(step_index + 1)[index]

    # -- one step ----------------------------------------------------------------------------------

    def collect(
        self,
        weights: qwen.Params,
        version: int,
        check_stop: interrupt.StopCheck = interrupt.never_stop,
    ) -> tuple[list[Rollout], DecodeCounters]:
        """Returns the rollouts for the step after policy `version`, and the decode counters.

        `weights` belong to `version`. If `check_stop` raises Interrupted on one host, all hosts
        raise.
        """
        counters = self.decode(weights, version, lambda: self.has_enough(version), check_stop)
        rollouts = self.take_rollouts(version)
        self._saved = self.to_bytes()
        return rollouts, counters

    def decode(
        self,
        weights: qwen.Params,
        version: int,
        is_done: Callable[[], bool],
        check_stop: interrupt.StopCheck = interrupt.never_stop,
    ) -> DecodeCounters:
        """Decodes unfinished and newly admitted groups until `is_done()`.

        Returns early if all groups are finished and no other group may start.
        """

        groups = groups_to_decode([group.sequences for group in self.groups])
        rollout = self.rollout
        key = self.seed, version + 1
        phase = Phase(weights, key, rollout.group_size, rollout.temperature, version)
        batch = VersionBatch(self, groups, version, is_done, check_stop)
        return self.sampler.decode(phase, batch)

    def admit(self, version: int) -> list[EpisodeGroup]:
        """Admits as many groups as may start at policy `version`, and returns them.

        Skips prompts that are too long. Raises UserError if it skips more than `num_prompts`
        prompts.
        """
        admitted: list[EpisodeGroup] = []
        longest = self.rollout.max_prompt_tokens
        num_too_long = 0
        with self.lock:
            # Finished groups count as accepted, even before a step trains on them.
            num_finished = len([group for group in self.groups if group.is_finished])
            capacity = admission_capacity(
                self.rollout.max_staleness,
                version,
                self.groups_per_step,
                self.max_running,
                num_accepted=self.num_trained + num_finished,
                num_running=len(self.groups) - num_finished,
            )
            while len(admitted) < capacity:
                number = self._next_problem_number()
                prompt_tokens = self.sampler.encode_prompt(self.problem_of(number))
                if len(prompt_tokens) <= longest:
                    admitted.append(self._new_group(number, version, prompt_tokens))
                    continue
                num_too_long += 1
                if num_too_long > self.rollout.num_prompts:
                    raise UserError(
                        f"rollout.max_prompt_tokens={longest}: {num_too_long} prompts are longer; "
                        "raise it, or choose another data set"
                    )
            self.groups += admitted
        return admitted

    def _next_problem_number(self) -> int:
        """Returns the index of this host's next problem, and advances to the one after it."""
        # Hosts take disjoint ranges of every step's problems.
        step_index, index = divmod(self.num_drawn, self.groups_per_step)
        self.num_drawn += 1
        return step_index * self.rollout.num_prompts + self.first_prompt + index

    def _new_group(
        self,
        number: int,
        version: int,
        prompt_tokens: Int32[np.ndarray, " tokens"],
    ) -> EpisodeGroup:
        """Returns a group of sequences without tokens, with request ids unique in the stream."""
        # The noise of a sequence is keyed by its request id, so no two groups in the stream may
        # share one. At version i every group in the stream started at version i - eta or later (eta
        # = max_staleness), so its number is at least (i - eta) * num_prompts, and less than (i +
        # eta + 1) * num_prompts by the rule of admission. Request ids may thus repeat after (2 eta
        # + 1) * num_prompts groups. Without staleness a request id is the index among the step's
        # samples, as in the synchronous loop, so both loops give the same run.
        group_size = self.rollout.group_size
        period = (2 * self.rollout.max_staleness + 1) * self.rollout.num_prompts
        first_request = number % period * group_size
        sequences = [
            Sequence(
                prompt_id=number,
                sample_index=sample_index,
                request_id=first_request + sample_index,
                prompt_tokens=prompt_tokens,
                length_limit=len(prompt_tokens) + self.rollout.max_new_tokens,
            )
            for sample_index in range(group_size)
        ]
        return EpisodeGroup(number, version, sequences)

    def is_ready(self, group: EpisodeGroup) -> bool:
        """Whether a step may train on the group."""
        # Missing grades do not matter here: `Sampler.decode` waits for them once decoding has
        # ended. If they did, the arrival time of a grade would decide which groups a step trains
        # on, and no run could be repeated.
        return group.is_finished

    def has_enough(self, version: int) -> bool:
        """Whether the step after policy `version` can begin.

        It needs `groups_per_step` ready groups, and every group that would be too old for the next
        step must be ready.
        """
        oldest_allowed = version - self.rollout.max_staleness
        for group in self.groups:
            if group.version <= oldest_allowed and not self.is_ready(group):
                return False
        return sum(self.is_ready(group) for group in self.groups) >= self.groups_per_step

    def take_rollouts(self, version: int) -> list[Rollout]:
        """Removes the oldest ready groups from the stream and returns their rollouts."""
        with self.lock:
            ready = [group for group in self.groups if self.is_ready(group)]
            # The oldest first, so that no group becomes too old while younger ones are trained on.
            chosen = ready[: self.groups_per_step]
            self.groups = [group for group in self.groups if group not in chosen]
            self.num_trained += len(chosen)
        assert len(chosen) == self.groups_per_step, f"{len(chosen)=} {self.groups_per_step=}"
        staleness = max((version - group.version for group in chosen), default=0)
        assert staleness <= self.rollout.max_staleness, f"{staleness=}"

        rollouts: list[Rollout] = []
        for group in chosen:
            problem = self.problem_of(group.problem_number)
            rollouts += [to_rollout(problem, sequence) for sequence in group.sequences]
        return rollouts

    def metrics(
        self,
        rollouts: list[Rollout],
        version: int,
        counters: DecodeCounters,
    ) -> dict[str, float]:
        """Returns the async/ metrics of the step after `version`, which trains on `rollouts`.

        `rollouts` are the rollouts of all hosts, and all hosts must call this method together.
        run/metrics.py documents each metric.
        """
        staleness = np.concatenate(
            [version - rollout.tokens.versions[rollout.tokens.sampled] for rollout in rollouts]
        )
        values: dict[str, float] = {}
        for versions_old in range(self.rollout.max_staleness + 1):
            values[f"async/staleness_{versions_old}"] = float((staleness == versions_old).mean())

        carried_tokens = 0
        for group in self.groups:
            carried_tokens += sum(s.num_new for s in group.sequences if not s.is_finished)
        counts = {
            "async/carried_tokens": carried_tokens,
            "async/ready_groups": sum(group.is_finished for group in self.groups),
            "async/wasted_tokens": counters.wasted_tokens,
        }
        values |= collectives.sum_over_hosts(counts)
        values["async/staleness"] = float(staleness.mean())
        return values

    # -- checkpoints -------------------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """Returns the current state of the stream, from which it can continue."""
        saved = SavedStream(
            num_trained=self.num_trained,
            num_drawn=self.num_drawn,
            groups=to_plain(self.groups),
        )
        return msgpack_serialize(saved)

    def state(self) -> bytes:
        """Returns the bytes for a checkpoint: the stream when the last step took its rollouts."""
        # This is the saved state, not the current one. They are equal between two steps, but a
        # signal can stop the run while episodes of the next step decode. The resumed run then
        # decodes that step again from its beginning.
        return self._saved

    def restore(self, data: bytes) -> None:
        """Restores the stream from the `state` of a checkpoint."""
        values = cast(SavedStream, msgpack_restore(data))
        self.num_trained = values["num_trained"]
        self.num_drawn = values["num_drawn"]
        self.groups = restore_all(EpisodeGroup, values["groups"])
        self._saved = data

    def halt(self) -> None:
        """Stops decoding and releases the engine. This class decodes only inside `collect`."""


class VersionBatch(GradedBatch):
    """The groups of a stream that decode with one version of the weights, until it has enough."""

    is_whole = False

    def __init__(
        self,
        stream: RolloutStream,
        groups: Groups,
        version: int,
        is_done: Callable[[], bool],
        check_stop: interrupt.StopCheck,
    ) -> None:
        super().__init__(stream.sampler, groups, stream.problem_of, check_stop)
        self.stream = stream
        self.version = version
        self.is_done = is_done

    def more(self) -> Groups | None:
        """Returns the groups that may start now; None if the step has enough."""
        if self.is_done():
            return None
        return [group.sequences for group in self.stream.admit(self.version)]


class ThreadedStream(RolloutStream):
    """Decodes in a thread, on separate devices, while the main thread trains.

    Every `collect` brings new weights: the thread ends its current phase between two decode calls,
    and starts a phase with the new weights and the same groups. Call `halt` before any other use of
    the engine; the next `collect` resumes decoding.
    """

    def __init__(
        self,
        sampler: Sampler,
        problems: TrainingProblems,
        rollout: config.RolloutConfig,
    ) -> None:
        super().__init__(sampler, problems, rollout)
        self._thread = ThreadPoolExecutor(1)
        # The first is running, the others are queued
        self._phases: list[Future[DecodeCounters]] = []
        self._end_of_phase = threading.Event()  # ends the phase that was submitted last
        self._ended_counters = DecodeCounters()  # of phases that ended since the last `collect`
        self._seconds_decoding = 0.0
        self._seconds_waited = 0.0  # time that the main thread waited for rollouts

    def is_ready(self, group: EpisodeGroup) -> bool:
        """Whether a step may train on the group, whose sequences must all be graded."""
        # The thread decodes continuously, so there is no later point at which to wait for grades.
        return group.is_graded

    def decode(
        self,
        weights: qwen.Params,
        version: int,
        is_done: Callable[[], bool],
        check_stop: interrupt.StopCheck = interrupt.never_stop,
    ) -> DecodeCounters:
        """Runs one phase of the thread: decodes as `RolloutStream.decode` does, and times it."""
        start = time.perf_counter()
        counters = super().decode(weights, version, is_done, check_stop)
        self._seconds_decoding += time.perf_counter() - start
        return counters

    def collect(
        self,
        weights: qwen.Params,
        version: int,
        check_stop: interrupt.StopCheck = interrupt.never_stop,
    ) -> tuple[list[Rollout], DecodeCounters]:
        """Gives the thread new weights, and waits for the rollouts of the step after `version`.

        Returns the counters of the phases that ended during the wait.
        """
        start = time.perf_counter()
        self._end_of_phase.set()
        self._end_of_phase = threading.Event()
        is_done = self._end_of_phase.is_set
        self._phases.append(self._thread.submit(self.decode, weights, version, is_done))

        # Only the main thread checks for a stop: no other thread may communicate with other hosts.
        try:
            while not self.has_enough(version):
                if self._phases[0].done():
                    self._collect_first_phase()
                check_stop()
                time.sleep(POLL_SECONDS)
        except interrupt.Interrupted as reason:
            interrupt.raise_if_any_host_stopped(str(reason))
        self._seconds_waited += time.perf_counter() - start

        # The thread waited for grades, the main thread did not: the step's timing must not include
        # the thread's wait.
        counters = replace(self._ended_counters, grading_seconds=0.0)
        self._ended_counters = DecodeCounters()
        return self.take_rollouts(version), counters

    def _collect_first_phase(self) -> None:
        """Waits for the oldest phase and adds its counters. Raises the phase's exception."""
        self._ended_counters.add(self._phases.pop(0).result())

    def metrics(
        self,
        rollouts: list[Rollout],
        version: int,
        counters: DecodeCounters,
    ) -> dict[str, float]:
        """Adds async/overlap: the share of decoding for which the main thread did not wait."""
        values = super().metrics(rollouts, version, counters)
        overlap = 0.0
        if self._seconds_decoding:
            overlap = max(0.0, 1 - self._seconds_waited / self._seconds_decoding)
        return values | {"async/overlap": overlap}

    def halt(self) -> None:
        """Ends all running and queued phases, and returns when the thread is idle."""
        self._end_of_phase.set()
        while self._phases:
            self._collect_first_phase()

    def state(self) -> bytes:
        """Halts the thread and returns the current state of the stream."""
        # The thread decodes all the time: only a halted stream has a consistent state.
        self.halt()
        return self.to_bytes()
