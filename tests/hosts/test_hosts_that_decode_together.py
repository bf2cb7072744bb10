"""Decoders of several hosts: their meshes, and runs of processes that share a tensor axis."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import pytest
from runs import finish, launch, launch_hosts, rows, timeless, wait_for

from jzero import config
from jzero.config import Apart, Config, Jobs, RolloutConfig, Together, drafts
from jzero.errors import UserError
from jzero.hosts import collectives
from jzero.sharding.mesh import check_decoders, decode_mesh, hosts_of, num_decoders, train_mesh

# -- one process -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class FakeDevice:
    """What a mesh looks at of a device."""

    id: int
    process_index: int
    platform: str = "cpu"


def devices_of(hosts: Sequence[int]) -> list[FakeDevice]:
    """Returns one device for every number of a host."""
    return [FakeDevice(i, host) for i, host in enumerate(hosts)]


@pytest.mark.parametrize(
    ("hosts", "tensor", "together", "message"),
    [
        ([0, 0, 1, 1], 4, 1, "mesh.tensor=4 must divide the 2 devices of a host"),
        ([0, 0, 1, 1], 4, 3, "rollout.hosts_per_decoder=3 does not divide the number of hosts, 2"),
        ([0, 0, 1, 1], 2, 2, "over all 4 devices of these hosts: set mesh.tensor=4, not 2"),
        ([0, 0], 2, 2, "does not divide the number of hosts, 1"),
        ([0, 0, 2, 2, 1, 1, 3, 3], 4, 2, "hosts 0, 2 would decode together"),
        ([0, 0, 1, 2, 2, 2, 3, 3], 4, 2, "hosts 0, 1, 2 would decode together"),
    ],
)
def test_hosts_that_cannot_decode_together_are_refused(
    hosts: list[int], tensor: int, together: int, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        check_decoders(devices_of(hosts), tensor, together)


@pytest.mark.parametrize(
    ("hosts", "tensor", "together"),
    [([0, 0, 0, 0, 1, 1, 1, 1], 2, 1), ([0, 0, 1, 1], 4, 2), ([2, 3, 0, 1], 2, 2)],
)
def test_hosts_that_can_decode_together_are_accepted(
    hosts: list[int], tensor: int, together: int
) -> None:
    check_decoders(devices_of(hosts), tensor, together)


def test_a_decoder_has_the_devices_of_its_host() -> None:
    mesh = decode_mesh(train_mesh(1, -1, 2))
    assert dict(mesh.shape) == {"slots": len(jax.devices()) // 2, "tensor": 2}
    assert hosts_of(mesh) == [0]
    assert num_decoders(mesh) == 1


def test_the_shares_of_neighboring_hosts_are_neighbors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jax.process_count", lambda: 4)
    shares = [collectives.share_of(7, host) for host in range(4)]
    assert [share.stop for share in shares[:-1]] == [share.start for share in shares[1:]]
    assert (shares[0].start, shares[-1].stop) == (0, 7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"placement": Together(max_staleness=1)}, "samples synchronously"),
        ({"placement": Apart()}, "samples synchronously"),
        ({"placement": Jobs(store="store")}, "samples synchronously"),
        ({"draft": drafts.Ngram()}, "needs rollout.draft.cost"),
    ],
)
def test_what_hosts_could_not_agree_on_is_refused(changes: dict, message: str) -> None:
    settings = Config(rollout=RolloutConfig(hosts_per_decoder=2, **changes))
    with pytest.raises(UserError, match=f"rollout.hosts_per_decoder=2 {message}"):
        config.validate(settings)


# -- runs of several processes ---------------------------------------------------------------------

NUM_STEPS = 6

# The numbers of prompts and of evaluation problems are no multiples of the number of hosts.
CHANGES = [
    f"--config.train.steps={NUM_STEPS}",
    "--config.train.checkpoint_every=1",
    "--config.eval.problems=5",
    "--config.eval.every=3",
    "--config.eval.samples=4",
    "--config.rollout.num_prompts=5",
    "--config.rollout.kv_dtype=float32",
    "--config.model.dtype=float32",
    "--config.model.exact=True",
    "--config.mesh.data=-1",
    "--config.mesh.fsdp=1",
    "--config.mesh.tensor=2",
    # A warm start that changes nothing: all runs begin with the same bits.
    "--config.warm_start.steps=1",
    "--config.warm_start.lr=0",
    "--config.task.reward.functions=('accuracy', 'length')",
]
TWO_TURNS = [
    "--config.rollout.max_turns=2",
    "--config.rollout.max_reply_tokens=96",
    "--config.train.microbatch_tokens=1280",
    "--config.task.turn_reward=score",
]
TOGETHER = "--config.rollout.hosts_per_decoder=2"


def check_equal_runs(got: Path, want: Path) -> None:
    """Checks that two runs sampled the same tokens, and have the same metrics up to rounding.

    Updates sum in another order, so only the rollouts of the first weights have the same bits.
    """
    got_rows, want_rows = (timeless(folder / "metrics.jsonl") for folder in (got, want))
    assert len(want_rows) == NUM_STEPS
    assert any(row["optimizer/grad_norm"] > 0 for row in want_rows)
    for got_row, want_row in zip(got_rows, want_rows, strict=True):
        assert got_row["policy/exact_tokens"] > 0
        for row in (got_row, want_row):
            del row["rollout/slot_utilization"]  # of episodes, it depends on when replies arrive
        assert got_row == pytest.approx(want_row, rel=1e-3, abs=1e-6)
    got_samples, want_samples = (rows(folder / "samples.jsonl") for folder in (got, want))
    assert len(want_samples) > 0
    for got_sample, want_sample in zip(got_samples, want_samples, strict=True):
        near = 0 if want_sample["step"] == 1 else 2e-3
        got_logps, want_logps = (
            [logp for logp in sample.pop("logps") if logp is not None]  # None: of a reply
            for sample in (got_sample, want_sample)
        )
        assert got_logps == pytest.approx(want_logps, rel=0, abs=near)
        assert got_sample == want_sample


def test_two_hosts_are_one_decoder_also_when_stopped(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """Two hosts of one device, stopped and resumed, have the bits of one host with both."""
    first, second = launch_hosts(environment, tmp_path / "two", *CHANGES, TOGETHER, devices=1)
    wait_for(first, tmp_path / "two/metrics.jsonl", 2)
    second.send_signal(signal.SIGTERM)
    assert "SIGTERM on host 1: stopped after step" in finish(first)[0]
    finish(second)
    for process in launch_hosts(environment, tmp_path / "two", *CHANGES, TOGETHER, devices=1):
        finish(process)
    alone = environment | {"JAX_NUM_CPU_DEVICES": "2"}
    finish(launch(alone, tmp_path / "one", *CHANGES))
    check_equal_runs(tmp_path / "two", tmp_path / "one")


@pytest.mark.parametrize(
    "changes", [["--config.model.adapter.rank=2"], TWO_TURNS], ids=["adapter", "two turns"]
)
def test_two_decoders_of_two_hosts_are_two_hosts_also_when_killed(
    changes: list[str], environment: dict[str, str], tmp_path: Path
) -> None:
    """Each of two decoders samples its half of the prompts, on two hosts or on one."""
    flags = [*CHANGES, *changes]
    four = launch_hosts(environment, tmp_path / "four", *flags, TOGETHER, number=4, devices=1)
    wait_for(four[0], tmp_path / "four/metrics.jsonl", 2)
    four[3].kill()
    for process in four[:3]:
        _, errors = finish(process, code=1)
        assert "host 3 of 4 (" in errors
    four[3].communicate()
    for process in launch_hosts(
        environment, tmp_path / "four", *flags, TOGETHER, number=4, devices=1
    ):
        finish(process)
    for process in launch_hosts(environment, tmp_path / "two", *flags, devices=2):
        finish(process)
    check_equal_runs(tmp_path / "four", tmp_path / "two")
