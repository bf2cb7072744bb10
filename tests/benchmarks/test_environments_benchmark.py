"""Whole episodes of environments that are slow, lose their connections and hang."""

from pathlib import Path

import pytest

from jzero.workers.pool import Pool


def test_no_episode_is_lost_and_no_token_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).resolve().parents[2]
    monkeypatch.syspath_prepend(str(root / "benchmarks"))
    monkeypatch.setenv("CAVE_TROUBLE", "")  # taken back at the end
    import environments as benchmark

    settings = benchmark.make_settings("asyncio", episodes=32, slots=8, workers=1)
    with Pool(0) as pool:
        sampler, params = benchmark.make_player(settings, pool)
    trouble = benchmark.Trouble(delay=0.02, crashes=0.05)

    free = benchmark.play(sampler, params, settings, benchmark.Trouble(), 48)
    rough = benchmark.play(sampler, params, settings, trouble, 48)

    assert free.num_failed == free.num_lost == 0
    assert rough.counts["killed"] > 0
    assert rough.num_lost == 0
    assert rough.num_different(free) == 0
    assert sum(episode.is_finished for episode in rough.episodes) >= 48
