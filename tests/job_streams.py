"""The trainer's side of separate jobs and a sampler in one process."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import reference
import tiny

from jzero import config, sample, setup
from jzero.config import Config
from jzero.decoder.sequence import Sequence
from jzero.decoder.serialization import restore_all
from jzero.jobs.leases import Leases
from jzero.jobs.requests import Result, unseal
from jzero.jobs.store import FolderStore
from jzero.jobs.stream import STREAMS, JobSettings, JobStream, run_id
from jzero.jobs.weights import Weights
from jzero.model import qwen
from jzero.model.base_model import read_base_model
from jzero.rollout.sampler import Sampler
from jzero.sharding.mesh import param_shardings, train_mesh
from jzero.types import Rollout
from jzero.workers.pool import Pool

STEPS = 6
SINGLE_TURN: dict[str, object] = {"max_turns": 1, "max_new_tokens": 8}

Parts = tuple[Sampler, Callable[[qwen.Params], qwen.Params], list[qwen.Params]]


def settings_of(folder: Path, rollout: dict[str, object], **placement: object) -> Config:
    """Returns settings of a run with 2 requests a step."""
    settings = tiny.tiny_settings(
        rollout=rollout, mesh={"data": 1}, eval={"every": 0, "problems": 0}
    )
    values = {"store": str(folder / "store"), "groups_per_request": 2} | placement
    arguments = ",".join(f"{name}={value!r}" for name, value in values.items())
    config.put_value(settings, "rollout.placement", f"jobs({arguments})")
    config.validate(settings, is_training=True)
    return settings


def make_parts(rollout: dict[str, object]) -> Iterator[Parts]:
    """Yields a decoder with its publisher, and the weights of some versions."""
    settings = tiny.tiny_settings(rollout=rollout)
    mesh = train_mesh(1, 1, 1, jax.devices()[:1])
    base = read_base_model(settings.model)
    places = param_shardings(base.model, mesh)
    # Not `init_params`, which takes half a minute to compile.
    params = []
    for number in range(STEPS):
        params.append(
            jax.device_put(reference.random_params(base.model, 0.1 + number / 50), places)
        )
    with Pool(1) as pool:
        decoder, publish = tiny.sampler_and_publish(settings, base, mesh, pool)
        yield decoder, publish, params


@dataclass
class Jobs:
    """A trainer's stream, and a sampler that works whenever the trainer waits."""

    settings: Config
    workdir: Path
    decoder: Sampler
    publish: Callable[[qwen.Params], qwen.Params]  # to the decoder's layout
    params: list[qwen.Params]  # of each version
    worker: sample.Worker | None = None

    @property
    def placement(self) -> config.Jobs:
        placement = self.settings.rollout.placement
        assert isinstance(placement, config.Jobs)
        return placement

    @property
    def store(self) -> FolderStore:
        return FolderStore(Path(self.placement.store))

    def stream(self) -> JobStream:
        """Returns a new stream of the run, as after a start of the trainer."""
        self.workdir.mkdir(exist_ok=True)
        values = JobSettings(config.to_json(self.settings), self.workdir, "float32", STEPS, None)
        problems = setup.training_problems(self.settings)
        kind = STREAMS[self.placement.schedule]
        return kind(self.decoder, problems, self.settings.rollout, self.placement, values)

    def work(self) -> None:
        """Answers one request, as a sampler does."""
        if self.worker is None:
            self.worker = self.new_worker("s")
        request = self.worker.take()
        if request is not None:
            self.worker.work_on(request)

    def new_worker(self, name: str, check_stop: Callable[[], None] = lambda: None) -> sample.Worker:
        """Returns a sampler, as a new process has it."""
        # The process before it may have ended while responses were graded.
        self.decoder.pool.drain()
        reader = sample.Reader(self.store, run_id(self.workdir))
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.params[0])
        takes_newest = self.placement.schedule == "arrival"
        weights = Weights(reader, self.publish, shardings, None, 0.0, takes_newest)
        leases = Leases(self.store, name, self.placement.lease_seconds)
        return sample.Worker(
            self.store, leases, self.decoder, weights, name, check_stop, self.placement
        )

    def collect(
        self, stream: JobStream, version: int, work: Callable[[], None] | None = None
    ) -> list[Rollout]:
        rollouts, _ = stream.collect(self.params[version], version, work or self.work)
        return rollouts


def bits(rollouts: list[Rollout]) -> list[bytes]:
    """Returns the bytes of all tracks of rollouts."""
    return [values.tobytes() for r in rollouts for values in r.tokens.to_dict().values()]


def versions_of(rollouts: list[Rollout]) -> set[int]:
    """Returns the versions that sampled tokens of rollouts."""
    return {int(v) for r in rollouts for v in r.tokens.versions[r.tokens.sampled]}


def sequences_in(data: bytes) -> list[Sequence]:
    """Returns the sequences in a file that a sampler has handed over."""
    return restore_all(Sequence, unseal(data)["sequences"])


def assert_continued(result: Result, sequences: list[Sequence]) -> None:
    """Asserts that rollouts in groups of 4 begin with the bytes of the sequences handed over."""
    for sequence in sequences:
        rollout = result.rollouts[sequence.prompt_id * 4 + sequence.sample_index]
        begun = rollout.tokens.first(len(sequence)).to_dict()
        for name, values in sequence.tokens.to_dict().items():
            assert begun[name].tobytes() == values.tobytes(), name
