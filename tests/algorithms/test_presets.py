"""Presets differ from GRPO in what they are named after, and single fields can be changed."""

import pytest
from descriptions import describe

from jzero.algorithms import PRESETS, Clip, needs_critic
from jzero.errors import UserError


def differences(preset: str, other: str) -> dict[str, object]:
    """Returns the fields of `other` that are not as in `preset`, without the name."""
    fields = vars(describe(PRESETS[preset]()))
    return {
        name: value
        for name, value in vars(describe(PRESETS[other]())).items()
        if name != "name" and value != fields[name]
    }


def test_dr_grpo_is_grpo_with_two_changes() -> None:
    both = {"advantage": "group_mean", "weight": "constant"}
    assert differences("grpo", "dr_grpo") == both
    assert differences("grpo", "grpo_no_std") | differences("grpo", "grpo_no_length") == both


def test_gspo_is_grpo_with_another_ratio_and_clip() -> None:
    assert differences("grpo", "gspo") == {"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_its_name_and_takes_changes(name) -> None:
    assert PRESETS[name]().name == name
    assert PRESETS[name](surrogate=Clip(high=0.35)) == PRESETS[name](surrogate=Clip(high=0.35))
    assert PRESETS[name](surrogate=Clip(high=0.35)).surrogate == Clip(high=0.35)
    with pytest.raises(UserError, match="surogate"):
        PRESETS[name](surogate=Clip(high=0.35))


def test_numbers_of_the_papers() -> None:
    assert PRESETS["dapo"]().surrogate == Clip(high=0.28)
    assert [name for name in PRESETS if needs_critic(PRESETS[name]())] == ["ppo", "oat_ppo"]
