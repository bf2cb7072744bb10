"""The lengths of packs that are chosen from a run's responses."""

import json
import sys
from itertools import combinations
from pathlib import Path
from subprocess import CompletedProcess, run

import jax
import numpy as np
import pytest
import reference

from jzero import config
from jzero.planning import packs
from jzero.sharding.mesh import train_mesh
from jzero.training.packing import layouts_of_lengths
from jzero.training.trainer import row_shapes

MOST, PROMPT = 640, 32


def random_groups(seed: int) -> list[list[int]]:
    """Returns lengths of which most are short, as those of a model that answers briefly."""
    rng = np.random.default_rng(seed)
    scale = rng.choice([40, 150], size=(12, 1))
    return np.clip(rng.exponential(scale, (12, 6)).astype(int), 1, MOST).tolist()


@pytest.mark.parametrize("packs_per_row", [0, 1, 4])
@pytest.mark.parametrize("seed", [0, 1])
def test_what_is_chosen_is_about_as_good_as_the_best_of_all(packs_per_row: int, seed: int) -> None:
    groups = random_groups(seed)

    def cost(lengths: tuple[int, ...]) -> int:
        layouts = layouts_of_lengths(PROMPT, lengths, packs_per_row)
        return packs.tokens_of_groups(groups, layouts)

    chosen = packs.choose(groups, MOST, 3, PROMPT, packs_per_row)

    assert chosen[0] == MOST
    assert list(chosen) == sorted(set(chosen), reverse=True)
    every_choice = combinations(range(packs.STEP, MOST, packs.STEP), 2)
    best = min(cost((MOST, *sorted(others, reverse=True))) for others in every_choice)
    assert cost(tuple(chosen)) <= 1.02 * best
    assert cost(tuple(chosen)) <= cost((MOST, MOST // 2, MOST // 4))
    assert cost(tuple(chosen)) < 0.8 * cost((MOST,))


def test_training_has_rows_of_the_lengths_that_are_set() -> None:
    settings = reference.settings(
        train={"pack": "96,40", "packs_per_row": 2, "microbatch_tokens": 208}
    )
    mesh = train_mesh(1, 1, 1, jax.devices()[:1])

    shapes = row_shapes(settings.train, settings.rollout, mesh, 16)

    assert [(layout.prefix, layout.slots, layout.slot) for layout in shapes.layouts] == [
        (16, 2, 96),
        (16, 2, 40),
    ]


def test_the_command_compares_values_of_the_setting(tmp_path: Path) -> None:
    settings = config.Config()
    (tmp_path / "config.json").write_text(config.to_json(settings))
    rows = [
        {"step": step, "id": f"problem/{step}", "tokens": 30 + step * sample}
        for step in range(1, 9)
        for sample in range(8)
    ]
    (tmp_path / "samples.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")

    done = run_plan("--packs", str(tmp_path))

    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("64 responses to 8 prompts, ")
    filled = {}
    for line in lines[4:]:
        value, _, share = line.strip("| ").split(" | ")
        filled[value] = int(share.removesuffix("%"))
        settings.train.pack = value
        config.validate(settings)
    assert list(filled)[:2] == ["auto", "longest"]
    two, three = list(filled)[2:]
    assert two.count(",") == 1 and three.count(",") == 2
    assert filled[three] >= filled[two] > filled["auto"] > filled["longest"]


def test_a_directory_of_no_run_is_refused(tmp_path: Path) -> None:
    done = run_plan("--packs", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.strip().endswith("has no samples.jsonl: give the --workdir of a run")


def run_plan(*arguments: str) -> CompletedProcess[str]:
    return run([sys.executable, "-m", "jzero.plan", *arguments], capture_output=True, text=True)
