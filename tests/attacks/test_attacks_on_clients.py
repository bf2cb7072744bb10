"""The clients that hostile_servers.py attacks: none breaks, hangs, believes or leaks anything."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest

from tests.attacks.conftest import Tries


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return importlib.import_module("hostile_servers")


# A busy machine may hold up a client by seconds; a server that is never given up takes longer.
@pytest.mark.parametrize("stride", [9, 1])
def test_every_client_holds_against_every_kind_of_server(
    servers: ModuleType, stride: int, tries: Tries
) -> None:
    result = servers.attack(seconds=0.5, slack=5.0, times=1, stride=stride)

    tries.count("clients", sum(result.counts.values()), result.failures)
    assert result.failures == []
    assert result.standstill <= servers.MOST_STANDSTILL
    assert result.counts["ok"] > 360
    kinds = {kind for kind, _ in result.cells}
    assert set(servers.HTTP_KINDS) | set(servers.HANDSHAKES) < kinds
    table = servers.table(result)
    assert "| redirect with the key | ok | ok | ok | ok | ok |" in table


def test_a_client_that_believes_or_breaks_is_counted(servers) -> None:
    case = servers.Case("a list", "judge", "http://x", servers.REFUSED, 0.5, 1.0)
    ends = {
        "ok": servers.JudgeError("no score"),
        "traceback": KeyError("choices"),
        "accepted": 0.7,
        "leaked": servers.JudgeError(f"wrong key {servers.KEY}"),
    }
    for outcome, value in ends.items():
        assert servers.judge_end(case, value, 0.7, 0.1)[0] == outcome
    assert servers.judge_end(case, ends["ok"], 0.7, 99.0)[0] == "hang"

    result = servers.Result()
    result.add(case, "accepted", "0.7")
    assert not result.has_held
