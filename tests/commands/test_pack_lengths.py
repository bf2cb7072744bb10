"""The lengths of packs that are chosen from a run's responses."""

import json
import sys
from itertools import combinations
from pathlib import Path
from subprocess import run

import jax
import numpy as np
import pytest
import reference

from jzero import config, pack_lengths
from jzero.distributed.mesh import train_mesh
from jzero.training.packing import layouts_of_lengths
from jzero.training.trainer import row_shapes

MOST, PROMPT = 640, 32


def random_groups(seed: int) -> list[list[int]]:
    """Returns lengths of which most are short, as those of a model that answers briefly."""
    rng = np.random.default_rng(seed)
    scale = rng.choice([40, 150], size=(12, 1))
    return np.clip(rng.exponential(scale, (12, 6)).astype(int), 1, MOST).tolist()


@pytest.mark.parametrize("packs", [0, 1, 4])
@pytest.mark.parametrize("seed", [0, 1])
def test_what_is_chosen_is_about_as_good_as_the_best_of_all(packs: int, seed: int) -> None:
    groups = random_groups(seed)

    def cost(lengths: tuple[int, ...]) -> int:
        layouts = layouts_of_lengths(PROMPT, lengths, packs)
        return pack_lengths.tokens_of_groups(groups, layouts)

    chosen = pack_lengths.choose(groups, MOST, 3, PROMPT, packs)

    assert chosen[0] == MOST
    assert list(chosen) == sorted(set(chosen), reverse=True)
    every_choice = combinations(range(pack_lengths.STEP, MOST, pack_lengths.STEP), 2)
    best = min(cost((MOST, *sorted(others, reverse=True))) for others in every_choice)
    assert cost(tuple(chosen)) <= 1.02 * best
    assert cost(tuple(chosen)) <= cost((MOST, MOST // 2, MOST // 4))
    assert cost(tuple(chosen)) < 0.8 * cost((MOST,))


def test_training_has_rows_of_the_lengths_that_are_set() -> None:
    settings = reference.settings(
        train={"pack_lengths": (96, 40), "packs_per_row": 2, "microbatch_tokens": 208}
    )
    mesh = train_mesh(1, 1, 1, jax.devices()[:1])

    shapes = row_shapes(settings, mesh, 16)

    assert [(layout.prefix, layout.slots, layout.slot) for layout in shapes.layouts] == [
        (16, 2, 96),
        (16, 2, 40),
    ]


def test_the_command_prints_flags_that_are_valid(tmp_path: Path) -> None:
    settings = config.Config()
    (tmp_path / "config.json").write_text(config.to_json(settings))
    rows = [
        {"step": step, "id": f"problem/{step}", "tokens": 30 + step * sample}
        for step in range(1, 9)
        for sample in range(8)
    ]
    (tmp_path / "samples.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")

    command = [sys.executable, "-m", "jzero.pack_lengths", str(tmp_path), "--steps", "4"]
    printed = run(command, capture_output=True, text=True, check=True).stdout

    lines = printed.splitlines()
    assert lines[0].startswith("32 responses to 4 prompts, ")
    filled = [int(line.split("|")[-2].strip(" %")) for line in lines[4:7]]
    assert filled[2] >= filled[1] and filled[2] >= filled[0]
    lengths = lines[-1].split()[0].removeprefix("--config.train.pack_lengths=")
    settings.train.pack_lengths = tuple(map(int, lengths.split(",")))
    assert settings.train.pack_lengths[0] == settings.rollout.longest_continuation
    config.validate(settings)


def test_a_directory_of_no_run_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "jzero.pack_lengths", str(tmp_path)]
    done = run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.strip().endswith("has no samples.jsonl: give the --workdir of a run")
