"""`python -m jzero.generate --base-url`: whatever servers do, every row is there once.

The stand-in of `benchmarks/stand_in_server.py` refuses, stalls, cuts replies and sends thoughts,
depending on the prompt, so a test knows every row that a generation has to end with.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import reference
from runs import ROOT, rows

from jzero import generate
from jzero.config import tiny_arch
from jzero.loops import sft
from jzero.model import tokenizer

SAMPLES = 2


@pytest.fixture
def attack(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module benchmarks/generation.py, whose counts say what a file holds."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.delitem(sys.modules, "generation", raising=False)
    import generation

    monkeypatch.setattr("jzero.cli.start_jax", list)
    yield generation


def call(monkeypatch: pytest.MonkeyPatch, argv: list[str]) -> None:
    """Runs a command of `generation.command` in this process."""
    monkeypatch.setattr(sys, "argv", ["generate", *argv[3:]])
    generate.main()


def command(attack: ModuleType, out: Path, urls: list[str], *more: str) -> list[str]:
    quick = ["--timeout=0.5", "--retries=2"]
    data = out.with_name("data.jsonl")
    return attack.command(data, out, urls, SAMPLES, *quick, *more)


@pytest.mark.usefixtures("quick_retries")
@pytest.mark.parametrize("shape", ["flat", "grouped"])
def test_every_row_is_there_once_after_two_stops(
    shape: str, attack: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The servers die in the middle of the first two commands, and the file's end is torn."""
    from stand_in_server import StandIn

    if shape == "grouped":  # without requests that stall, which take the most time
        kinds = ("plain", "reasoning", "too long", "cut JSON")
        monkeypatch.setattr("stand_in_server.KINDS", kinds)
    problems, out = 30, tmp_path / "out.jsonl"
    attack.write_problems(tmp_path / "data.jsonl", problems)
    more = ["--group"] if shape == "grouped" else []
    for stop_after in (40, 40):
        there = set()
        if out.exists():
            attack.tear(out)
            there = {(attack.number_of(row), row["sample"]) for row in attack.flat_rows(out)}
        with StandIn(1.0) as server:
            server.dies_after = stop_after
            with pytest.raises(SystemExit):
                call(monkeypatch, command(attack, out, [server.url], *more))
        assert len(attack.flat_rows(out)) > len(there)

    there = {(attack.number_of(row), row["sample"]) for row in attack.flat_rows(out)}
    with StandIn(1.0) as steady, StandIn(1.0) as dying:
        dying.dies_after = 5
        # More requests at once than before: that is not another command.
        more.append("--config.rollout.num_slots=16")
        call(monkeypatch, command(attack, out, [steady.url, dying.url], *more))
        seeds = attack.seeds_of(problems, SAMPLES)
        asked = {(number, seed) for number, seed in steady.log}
    assert not asked & {(number, seeds[number, sample]) for number, sample in there}
    counts = attack.count_rows(out, problems, SAMPLES, seeds)
    counts.retried = 1  # it is the whole command that counts them
    assert attack.failures(counts, problems, SAMPLES) == []


@pytest.mark.parametrize("is_grouped", [False, True], ids=["flat", "grouped"])
def test_a_command_that_is_killed_twice_has_every_row_once(
    is_grouped: bool, attack: ModuleType, tmp_path: Path
) -> None:
    counts = attack.attack(tmp_path, 60, SAMPLES, is_grouped)

    assert attack.failures(counts, 60, SAMPLES) == []


def test_a_refused_prompt_is_a_row_that_is_tried_again_only_on_request(
    attack: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from stand_in_server import REFUSALS, StandIn, kind_of

    monkeypatch.setattr("stand_in_server.KINDS", ("plain", "too long", "teapot"))
    out = tmp_path / "out.jsonl"
    attack.write_problems(tmp_path / "data.jsonl", 9)
    with StandIn(1.0) as server:
        call(monkeypatch, command(attack, out, [server.url]))
    assert (
        "12 responses are an error (--retry-errors asks for them again)" in capsys.readouterr().out
    )
    for row in rows(out):
        kind = kind_of(attack.number_of(row))
        expected = None
        if kind in REFUSALS:
            said = f'{{"error": {{"message": "This prompt is {kind}."}}}}'
            expected = f"the server refuses a request (status {REFUSALS[kind]}: {said})"
        assert row["error"] == expected
        assert (row["completion"] is None) == (row["score"] is None) == (expected is not None)

    before = out.read_bytes()
    with StandIn(1.0, heals=True) as server:
        call(monkeypatch, command(attack, out, [server.url]))
        assert not server.log and out.read_bytes() == before
        call(monkeypatch, command(attack, out, [server.url], "--retry-errors"))
        assert len(server.log) == sum(
            row["error"] is not None for row in map(json.loads, before.splitlines())
        )
    assert [row["error"] for row in rows(out)] == [None] * 18


def test_refusals_before_any_answer_end_the_command(
    attack: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """If every prompt is refused, the fault is the command's: its model, say, has another name."""
    from stand_in_server import StandIn

    monkeypatch.setattr("stand_in_server.KINDS", ("too long",))
    out = tmp_path / "out.jsonl"
    attack.write_problems(tmp_path / "data.jsonl", 9)
    with StandIn(1.0) as server:
        with pytest.raises(SystemExit):
            call(monkeypatch, command(attack, out, [server.url], "--max-refused=5"))
        error = capsys.readouterr().err
        assert "error: the first 5 requests were refused, and nothing was answered: " in error
        assert "This prompt is too long." in error and error.count("\n") == 1
        assert rows(out) == []
        call(monkeypatch, command(attack, out, [server.url], "--max-refused=0"))
    assert len(rows(out)) == 9 * SAMPLES


def test_sampling_settings_are_sent_only_if_they_are_given(
    attack: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stand_in_server import StandIn

    monkeypatch.setattr("stand_in_server.KINDS", ("plain",))
    attack.write_problems(tmp_path / "data.jsonl", 2)
    own = {"model", "max_tokens", "seed", "messages"}
    cases = [
        ([], {}),
        (
            [
                "--config.rollout.temperature=1.0",  # also if it is the default
                "--config.rollout.top_p=0.95",
                "--config.rollout.top_k=20",
                "--config.rollout.min_p=0.1",
                "--config.rollout.stop=x",
            ],
            {"temperature": 1.0, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "stop": ["x"]},
        ),
    ]
    for number, (flags, expected) in enumerate(cases):
        with StandIn(1.0) as server:
            out = tmp_path / f"{number}.jsonl"
            call(monkeypatch, command(attack, out, [server.url], *flags))
        assert len({body["seed"] for body in server.bodies}) == len(server.bodies) > 0
        for body in server.bodies:
            assert {name: body[name] for name in body.keys() - own} == expected
            assert own <= body.keys() and body["model"] == "m"


def test_a_server_that_is_gone_does_not_stop_the_others(
    attack: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from stand_in_server import StandIn

    monkeypatch.setattr("stand_in_server.KINDS", ("plain",))
    out = tmp_path / "out.jsonl"
    attack.write_problems(tmp_path / "data.jsonl", 40)
    with StandIn(1.0) as first, StandIn(1.0) as second, StandIn(1.0) as gone:
        gone.die()
        urls = [first.url, gone.url, second.url]
        call(monkeypatch, command(attack, out, urls, "--config.rollout.num_slots=2"))
    assert f"{gone.url} has not answered in 3 tries" in capsys.readouterr().err
    assert len(rows(out)) == 80 and all(row["error"] is None for row in rows(out))
    # The servers share the work, and no request goes to both.
    counts = [sum(server.log.values()) for server in (first, second)]
    assert sum(counts) == 80 and min(counts) >= 10


def test_rewards_that_compare_responses_see_whole_chunks(
    attack: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reward `length` of a response depends on all others of its chunk, refused ones aside."""
    from stand_in_server import StandIn

    monkeypatch.setattr("stand_in_server.KINDS", ("plain", "reasoning", "too long"))
    out = tmp_path / "out.jsonl"
    attack.write_problems(tmp_path / "data.jsonl", 8)
    flags = ["--config.task.reward.functions=length", "--config.rollout.num_prompts=4"]
    with StandIn(1.0) as server:
        call(monkeypatch, command(attack, out, [server.url], *flags))
        written = out.read_bytes()
        lines = written.splitlines(keepends=True)
        out.write_bytes(b"".join(lines[:5]))
        call(monkeypatch, command(attack, out, [server.url], *flags))
    assert out.read_bytes() == written
    for chunk in (rows(out)[:8], rows(out)[8:]):
        answered = [row for row in chunk if row["error"] is None]
        lengths = [len(row["completion"][0]["content"]) for row in answered]
        for row, length in zip(answered, lengths, strict=True):
            reward = 0.5 - (length - min(lengths)) / (max(lengths) - min(lengths))
            assert row["score"] == pytest.approx(reward if row["correct"] else min(0.0, reward))


COUNT = """
def count(responses, golds):
    return [len(responses)] * len(responses)
"""


@pytest.mark.parametrize(("batch", "count"), [("group", 2), ("step", 8)])
def test_a_batched_function_sees_the_responses_of_its_batch(
    attack: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: str, count: int
) -> None:
    from stand_in_server import StandIn

    monkeypatch.setattr("stand_in_server.KINDS", ("plain",))
    out = tmp_path / "out.jsonl"
    attack.write_problems(tmp_path / "data.jsonl", 8)
    (tmp_path / "count.py").write_text(COUNT)
    flags = [
        f"--config.task.reward.functions={tmp_path / 'count.py'}:count",
        f"--config.task.reward.batch={batch}",
        "--config.rollout.num_prompts=4",
    ]
    with StandIn(1.0) as server:
        call(monkeypatch, command(attack, out, [server.url], *flags))
    assert [row["score"] for row in rows(out)] == [count] * 16


@pytest.mark.parametrize("trains", [False, True], ids=["encoded", "trained"])
def test_what_is_generated_trains(
    trains: bool,
    attack: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    quick_runs: None,
) -> None:
    """Thoughts that a server sends apart are trained on; rows with an error are left out."""
    from stand_in_server import StandIn

    monkeypatch.setattr("stand_in_server.KINDS", ("reasoning_content", "too long", "plain"))
    out, template = tmp_path / "out.jsonl", tmp_path / "chat.jinja"
    attack.write_problems(tmp_path / "data.jsonl", 6)
    with StandIn(1.0) as server:
        call(monkeypatch, command(attack, out, [server.url]))
    template.write_text("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}")
    arch = tiny_arch(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    settings = {
        "data": str(out),
        "chat_template": str(template),
        "batch_size": 8,
        "pack_length": 256,
    }

    config = reference.settings(
        model={"arch": arch}, sft=settings, train={"microbatch_tokens": 8 * 256}
    )
    data = sft.read_data(config)
    assert data.num_examples == 8  # of 12 rows; 4 have an error
    texts = [data.rows[i]["completion"][0]["content"] for i in range(8)]
    assert sum(text.startswith("<think>\nLet me see, ") for text in texts) == 4
    tok = tokenizer.countdown()
    sft.set_chat_template(tok, str(template))
    examples = sft.encode_rows(tok, [data.rows[i] for i in range(8)], sft.settings_of(config))
    for example, text in zip(examples, texts, strict=True):
        ids = np.array(example.tokens)[example.trained]
        assert ids.tolist() == [*tokenizer.encode(tok, text), tok.eos_token_id]
    if trains:
        summary = sft.train(config, tmp_path / "run")
        metrics = rows(tmp_path / "run/metrics.jsonl")
        count = sum(example.num_trained for example in examples)
        assert sum(row["sft/tokens"] for row in metrics) == count
        assert summary["export"]
