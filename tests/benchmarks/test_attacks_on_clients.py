"""benchmarks/attacks/servers.py: no client of jzero breaks, hangs, believes or leaks anything."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "attacks"))
    # Under a name of its own: tests/servers.py is another module.
    path = ROOT / "benchmarks" / "attacks" / "servers.py"
    spec = importlib.util.spec_from_file_location("attacks_on_clients", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "attacks_on_clients", module)
    spec.loader.exec_module(module)
    return module


# A busy machine may hold up a client by seconds; a server that is never given up takes longer.
@pytest.mark.parametrize("stride", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_every_client_holds_against_every_kind_of_server(servers, stride: int) -> None:
    result = servers.attack(seconds=0.5, slack=5.0, times=1, stride=stride)

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
