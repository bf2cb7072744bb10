"""What the sizing chooses for known models on usual machines exceeds neither memory nor disk."""

import pytest

from jzero.planning.machines import MACHINES, PAIRS, choose, format_table
from jzero.planning.models import hub_id_of

FAST = {("v5e-8", "Qwen2.5-3B"), ("T4", "Qwen2.5-0.5B"), ("8 GB laptop", "Qwen2.5-0.5B")}


@pytest.mark.parametrize(
    "pair",
    [pair if pair in FAST else pytest.param(pair, marks=pytest.mark.thorough) for pair in PAIRS],
)
def test_no_choice_exceeds_memory_or_disk(pair: tuple[str, str]) -> None:
    choice = choose(*pair)

    assert choice.config is not None, f"{pair} does not fit"
    assert 0 < choice.memory[0] <= choice.memory[1]
    assert 0 < choice.disk[0] <= choice.disk[1] == MACHINES[pair[0]].disk_gb * 1e9
    rollout, train = choice.config.rollout, choice.config.train
    assert 1 <= rollout.num_slots <= max(rollout.num_prompts * rollout.group_size, 512 * 4)
    assert train.microbatch_tokens >= rollout.max_prompt_tokens + rollout.max_new_tokens


def test_the_table_has_20_pairs_of_9_machines() -> None:
    assert len(set(PAIRS)) == 20
    assert {machine for machine, _ in PAIRS} == set(MACHINES)
    assert len(MACHINES) == 9
    for _, model in PAIRS:
        assert hub_id_of(model)
    first = format_table([("T4", "Qwen2.5-0.5B")]).splitlines()[-1]
    assert first.startswith("T4            Qwen2.5-0.5B")
