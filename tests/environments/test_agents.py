"""Agents: programs that speak OpenAI's API, whose requests become trees of sequences."""

import copy
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import pytest
import tiny
from runs import read_jsonl
from servers import TEMPLATE, byte_tokenizer

from jzero import algorithms
from jzero.config import Config, tiny_arch, turns
from jzero.decoder.sequence import DecodeCounters
from jzero.decoder.serialization import rollouts_from_bytes, rollouts_to_bytes
from jzero.loops import rl
from jzero.model import qwen, tokenizer
from jzero.model.base_model import read_base_model
from jzero.rollout.sampler import Sampler, with_turn_grades
from jzero.sharding.mesh import train_mesh
from jzero.tasks import find_task
from jzero.tokens import Tokens
from jzero.training.credit import (
    CreditSettings,
    compute_credit,
    training_sequences,
    zeros_like_tokens,
)
from jzero.training.step import join_sequences, split_rollouts
from jzero.types import Grade, Problem, Rollout, Turn, grade_of
from jzero.workers.pool import Pool

HERE = Path(__file__).parent
PROGRAMS = HERE / "agent_programs.py"


def settings(tokenizer_path: Path, agent: str, **sections: dict[str, object]) -> Config:
    """Returns settings of a tiny model whose tokens are bytes, and which chats."""
    architecture = tiny_arch(hidden_size=32, intermediate_size=32, num_hidden_layers=1, head_dim=8)
    defaults: dict[str, dict[str, object]] = {
        "model": {"arch": architecture, "tokenizer": str(tokenizer_path)},
        "task": {
            "name": "agent",
            "agent": agent if ":" in agent else f"{PROGRAMS}:{agent}",
            "template": "chat",
            "turn_reward": turns.Score(),
        },
        "rollout": {
            "num_prompts": 2,
            "group_size": 4,
            "max_prompt_tokens": 96,
            "max_new_tokens": 6,
            "max_turns": 4,
            "max_episode_tokens": 192,
            "num_slots": 16,
            "page_size": 8,
            "decode_steps": 4,
            "temperature": 1.0,
        },
        "optimizer": {"lr": 1e-3},
        "train": {"microbatch_tokens": 8 * 192, "packs_per_row": 0, "checkpoint_every": 2},
        "eval": {"problems": 2, "samples": 2, "greedy": False},
    }
    return tiny.changed_settings(defaults, sections)


@pytest.fixture(scope="module")
def chat_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    shows_tools = copy.deepcopy(byte_tokenizer())
    shows_tools.chat_template = "{% if tools %}{{ tools | tojson }}{% endif %}" + TEMPLATE
    shows_tools.save_pretrained(path)
    return path


class Player(NamedTuple):
    config: Config
    sampler: Sampler
    params: qwen.Params


@pytest.fixture(scope="module")
def player(chat_tokenizer: Path) -> Iterator[Player]:
    config = settings(chat_tokenizer, "talk")
    base = read_base_model(config.model)
    mesh = train_mesh(1, 1, 1, jax.devices()[:1])
    with Pool(0) as pool:
        sampler, publish = tiny.sampler_and_publish(config, base, mesh, pool)
        params = tiny.policy_learner(base.model, config, mesh).init_params(0)
        yield Player(config, sampler, publish(params))


def play(
    player: Player, agent: str, key: int = 0, **changes: Any
) -> tuple[list[Rollout], DecodeCounters]:
    """Returns the episodes of an agent, and the counts."""
    name = agent if ":" in agent else f"{PROGRAMS}:{agent}"
    task = replace(player.config.task, agent=name, **changes)
    problems = find_task("agent").train_problems(task, 0, 0, player.config.rollout.num_prompts)
    sampler = replace(player.sampler, task=task)
    encoded = sampler.encode_problems(problems)
    rollouts, counters = sampler.sample_rollouts(
        player.params,
        encoded,
        group_size=player.config.rollout.group_size,
        temperature=1.0,
        key=(0, key),
        version=3,
    )
    return sampler.gather_rollouts(rollouts, player.config.rollout.group_size), counters


def test_requests_that_continue_one_another_are_the_turns_of_one_sequence(player: Player) -> None:
    rollouts, counters = play(player, "talk")
    tok = player.sampler.tokenizer
    assert len(rollouts) == 8
    for rollout in rollouts:
        assert len(rollout.turns) == 3 and rollout.branch_starts == (0,)
        sampled = np.zeros(len(rollout.tokens), bool)
        for turn in rollout.turns:
            sampled[turn.start : turn.end] = True
        np.testing.assert_array_equal(rollout.tokens.sampled, sampled)
        assert (rollout.tokens.versions[sampled] == 3).all()
        text = "".join(turn.text for turn in rollout.turns)
        assert grade_of(rollout).score == text.count("a")
        prompt = tokenizer.decode(tok, rollout.tokens.ids[: rollout.prompt_length].tolist())
        assert prompt == "<user>say a\n<assistant>"
        reply = tokenizer.decode(
            tok, rollout.tokens.ids[rollout.turns[0].end : rollout.turns[1].start].tolist()
        )
        assert reply.endswith("<user>again\n<assistant>")
    assert (counters.agent_responses, counters.agent_branches) == (24, 8)
    assert counters.agent_repeated_tokens == counters.agent_refused == 0

    # One request at a time: the same key gives the same tokens.
    again, _ = play(player, "talk")
    for first, second in zip(rollouts, again, strict=True):
        np.testing.assert_array_equal(first.tokens.ids, second.tokens.ids)
        np.testing.assert_array_equal(first.tokens.logps, second.tokens.logps)


def test_openais_client_works_unmodified(player: Player) -> None:
    rollouts, counters = play(player, "with_openai")
    for rollout in rollouts:
        assert not grade_of(rollout).failed, grade_of(rollout).reason
        assert grade_of(rollout).parts["agent.choices"] == 2
        # The second choice is a branch, whose prompt is the tokens of the first three turns.
        assert len(rollout.branch_starts) == 2 and len(rollout.turns) == 4
        trunk, branch = rollout.branches
        start = rollout.turns[2].start
        np.testing.assert_array_equal(
            rollout.tokens.ids[trunk][:start], rollout.tokens.ids[branch][:start]
        )
        assert not rollout.tokens.sampled[branch][:start].any()
    assert counters.agent_repeated_tokens == 0


@pytest.mark.parametrize("credit", ["tree", "last", "branch"])
def test_a_tree_trains_every_token_once(player: Player, credit: str) -> None:
    rollouts, counters = play(player, "explore", agent_credit=credit)
    sequences, sources = training_sequences(rollouts, sequence_per_turn=False)
    for rollout in rollouts:
        assert not grade_of(rollout).failed, grade_of(rollout).reason
    assert counters.agent_branches > 8 and counters.agent_repeated_tokens == 0
    num_sampled = sum(int(rollout.tokens.sampled.sum()) for rollout in rollouts)
    assert sum(int(sequence.tokens.sampled.sum()) for sequence in sequences) == num_sampled
    responses = sum(len(sequence.turns) for sequence in sequences)
    if credit == "last":
        assert len(sequences) == 8
    else:
        assert len(sequences) == counters.agent_branches
        assert responses == counters.agent_responses
    for sequence, source in zip(sequences, sources, strict=True):
        of_turns = sum(turn.end - turn.start for turn in sequence.turns)
        assert int(sequence.tokens.sampled.sum()) == of_turns
        assert sequence.problem is rollouts[source.rollout].problem


def test_a_function_and_a_command_run_in_processes(player: Player, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"bonus": 100}\n{"bonus": 200}\n')
    rollouts, _ = play(player, "plainly", data=str(data))
    for rollout in rollouts:
        assert not grade_of(rollout).failed, grade_of(rollout).reason
        bonus = rollout.problem.row["bonus"]
        assert grade_of(rollout).score == len(rollout.text) + bonus

    script = tmp_path / "agent.sh"
    script.write_text(
        'curl -sf "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" '
        """-H 'Content-Type: application/json' -d '{"messages": [{"role": "user", "content": """
        """"hi"}]}' > /dev/null && """
        'curl -sf "$OPENAI_BASE_URL/reward" -H "Authorization: Bearer $OPENAI_API_KEY" '
        """-H 'Content-Type: application/json' -d '{"score": 0.5, "lines": 2}'"""
    )
    rollouts, _ = play(player, f"command:sh {script}")
    for rollout in rollouts:
        grade = grade_of(rollout)
        assert (grade.score, grade.parts) == (0.5, {"agent.score": 0.5, "agent.lines": 2.0})


FAILURES = {
    "raises": "error: .*ZeroDivisionError: of the agent",
    "sleeps": "timeout: .*took more than task.agent_seconds=1",
    "stubborn": "timeout: .*took more than task.agent_seconds=1",
    "returns_nothing": "error: .*ended without a reward",
    "returns_text": "error: .*a reward is a number",
    "silent": "error: the agent has ended without a request",
    "exits": "error: .*SystemExit",
    "hangs": "timeout: .*took more than task.agent_seconds=1",
    "dies": "killed: .*status was 9",
    "command:sh -c 'echo no >&2; exit 4'": "killed: .*status was 4: no",
}


@pytest.mark.parametrize("agent", FAILURES)
def test_an_agent_that_fails_is_an_episode_without_a_score(player: Player, agent: str) -> None:
    seconds = 1.0 if FAILURES[agent].startswith("timeout") else 60.0
    rollouts, _ = play(player, agent, agent_seconds=seconds, agent_processes=8)
    assert len(rollouts) == 8
    for rollout in rollouts:
        grade = grade_of(rollout)
        assert grade.failed and re.match(FAILURES[agent], grade.reason), grade.reason
    # Nothing stays in the decoder.
    assert not player.sampler.engine.placements


def test_what_no_agent_has_received_is_not_trained(player: Player) -> None:
    rollouts, _ = play(player, "leaves")
    assert len(rollouts) == 8 and not player.sampler.engine.placements
    for rollout in rollouts:
        assert rollout.tokens.sampled.sum() == sum(t.end - t.start for t in rollout.turns)


@pytest.mark.parametrize("key", range(2))
def test_agents_that_attack_reach_no_other_session(player: Player, key: int) -> None:
    """Honest episodes have the tokens that they have without any attack."""
    honest, _ = play(player, "talk", key, agent_requests=24)
    rollouts, counters = play(player, "every_second_attacks", key, agent_requests=24)
    for number, (alone, rollout) in enumerate(zip(honest, rollouts, strict=True)):
        grade = grade_of(rollout)
        if number % 2:
            # An assertion of the attacker is an episode that fails.
            assert not grade.failed or "without a request" in grade.reason, grade.reason
            assert grade.score == 0
            continue
        assert grade.score == grade_of(alone).score
        np.testing.assert_array_equal(rollout.tokens.ids, alone.tokens.ids)
        np.testing.assert_array_equal(rollout.tokens.sampled, alone.tokens.sampled)
        # Others may take the slot between two turns: a prefill rounds otherwise.
        np.testing.assert_allclose(rollout.tokens.logps, alone.tokens.logps, atol=1e-5)
    assert counters.agent_refused > 0 and counters.agent_repeated_tokens == 0
    assert not player.sampler.engine.placements


def tree_of(starts: tuple[int, ...], turns: list[tuple[int, int, float]]) -> Rollout:
    """Returns an episode; a turn is (start, end, reward), and all of its tokens are sampled."""
    sampled = np.zeros(turns[-1][1], bool)
    for start, end, _ in turns:
        sampled[start:end] = True
    tokens = Tokens(np.arange(len(sampled)), sampled=sampled, versions=np.where(sampled, 0, -1))
    graded = [
        Turn(start, end, "", "stop", Grade(reward, False, "asked")) for start, end, reward in turns
    ]
    rollout = Rollout(Problem("1", "agent", "", {}), 0, tokens, tuple(graded), branch_starts=starts)
    return with_turn_grades(rollout, [grade_of(turn) for turn in graded])


# Two episodes of a group: one of two sequences with three turns, and one of a single turn.
GROUP = [
    tree_of((0, 8), [(2, 4, 0.0), (6, 8, 1.0), (11, 12, 3.0)]),
    tree_of((0,), [(1, 3, 2.0)]),
]


@pytest.mark.parametrize(
    ("unit", "expected"),
    [
        # The rewards 4 and 2 of the episodes, minus their mean 3.
        ("episode", [[1, 1, 1, 1, 1], [-1, -1]]),
        # The first sequences have the rewards 1 and 2; no other episode has a second one.
        ("branch", [[-0.5, -0.5, -0.5, -0.5, 0], [0.5, 0.5]]),
    ],
)
def test_the_advantage_of_a_token_is_that_of_its_unit(
    unit: Literal["episode", "branch"], expected: list[list[float]]
) -> None:
    credit = CreditSettings(
        algorithms.dr_grpo(), group_size=2, max_turns=3, max_new_tokens=4, unit=unit
    )
    zeros = zeros_like_tokens(GROUP)
    advantages, _ = compute_credit(GROUP, credit, zeros, zeros)
    for rollout, values, wanted in zip(GROUP, advantages, expected, strict=True):
        np.testing.assert_allclose(values[rollout.tokens.sampled], wanted)

    sequences, sources = training_sequences(GROUP, sequence_per_turn=False)
    parts = split_rollouts(advantages, sequences, sources)
    assert [len(part) for part in parts] == [8, 4, 3]
    for joined, whole in zip(
        join_sequences(parts, sequences, sources, GROUP), advantages, strict=True
    ):
        np.testing.assert_array_equal(joined, whole)
    # Every sequence has its own turns, from its own first token on.
    assert [[turn.start for turn in one.turns] for one in sequences] == [[2, 6], [3], [1]]


def test_the_tree_of_an_episode_survives_its_serialization() -> None:
    [read, _] = rollouts_from_bytes([rollouts_to_bytes(GROUP)])
    assert read.branch_starts == (0, 8) and len(read.turns) == 3


@pytest.mark.usefixtures("quick_runs")
def test_a_run_trains_on_trees_without_a_bit_of_difference(
    chat_tokenizer: Path, tmp_path: Path
) -> None:
    config = settings(
        chat_tokenizer,
        "explore",
        model={
            "arch": tiny_arch(
                hidden_size=32, intermediate_size=32, num_hidden_layers=1, head_dim=8
            ),
            "tokenizer": str(chat_tokenizer),
            "exact": True,
        },
        algorithm=vars(algorithms.grpo(entropy_coef=1e-3)),  # then no response is left out
        rollout={"kv_dtype": "float32"},
        train={"steps": 3},
    )
    rl.train(config, tmp_path)
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert len(rows) == 3
    for row in rows:
        assert row["agent/repeated_tokens"] == 0 and row["agent/branches"] > 8
        assert row["policy/exact_tokens"] > 0
