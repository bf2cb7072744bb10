"""docs/own_loop.md: its loops are written to files and run, and their losses are DPO's and SFT's.

A comment `<!-- file: NAME -->` above a Python block gives the file that the block is.
"""

import ast
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import tiny

from jzero import algorithms
from jzero.config import Config
from jzero.model import qwen
from jzero.sharding.mesh import train_mesh
from jzero.tokens import Tokens
from jzero.training.examples import Example
from jzero.training.trainer import Trainer, make_trainer
from jzero.types import Rollout

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/own_loop.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"<!-- file: (\S+)\.py -->\n```python\n(.*?)```", PAGE, re.DOTALL))
LOOPS = ("best_of_n", "curriculum", "dpo")
MOST_LINES = 60  # of code in a loop

Load = Callable[[str], ModuleType]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """Returns a function that imports a file of the page."""
    folder = tmp_path_factory.mktemp("loops")
    for name, text in FILES.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        modules = {name: importlib.import_module(name) for name in FILES}
    return modules.__getitem__


def lines_of_code(text: str) -> int:
    """Counts lines without docstrings, comments and empty lines."""
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.FunctionDef) and ast.get_docstring(node):
            docstring = node.body[0]
            left_out |= set(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    lines = [line.strip() for line in text.splitlines()]
    counted = [
        number
        for number, line in enumerate(lines, start=1)
        if line and not line.startswith("#") and number not in left_out
    ]
    return len(counted)


def test_every_python_block_of_the_page_is_a_file() -> None:
    assert list(FILES) == ["answers", *LOOPS]
    assert PAGE.count("```python\n") == len(FILES)


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_has_few_lines(name: str) -> None:
    assert lines_of_code(FILES[name]) < MOST_LINES


def run_settings(name: str, steps: int, lr: float) -> Config:
    config = tiny.countdown_settings(
        algorithm=vars(algorithms.grpo()),
        optimizer={"lr": lr},
        train={"steps": steps},
        eval={"problems": 0},
    )
    if name == "curriculum":
        first, _, *others = config.task.options
        config.task.options = (first, "numbers_max=3", *others)
        # Room for an example of the warm start, and for a row on each of 8 devices.
        config.rollout.max_new_tokens = 40
        config.train.microbatch_tokens = 448
    return config


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.usefixtures("quick_runs", "explicit_transfers")
def test_a_loop_trains(name: str, load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    results = getattr(load(name), name)(run_settings(name, steps=3, lr=1e-3))
    assert len(results) == 3
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert len(printed) == 3
    if name == "curriculum":
        assert all(set(rates) <= {2, 3} for rates in results)
    else:
        assert len(set(results)) > 1  # the policy changes


COMMANDS = re.compile(r"<!-- tested: tests/test_own_loop\.py -->\n```sh\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize("name", LOOPS)
def test_the_command_of_the_page_raises_the_reward(
    name: str, tmp_path: Path, environment: dict[str, str]
) -> None:
    for file, text in FILES.items():
        (tmp_path / f"{file}.py").write_text(text, encoding="utf-8")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    folder = str(Path(sys.executable).parent)
    path = os.pathsep.join([folder, environment["PATH"]])
    environment = environment | {"PYTHONPATH": str(ROOT), "PATH": path}
    [commands] = COMMANDS.findall(PAGE)
    # The flags that all commands share, and one of the commands.
    lines = commands.replace("\\\n", " ").splitlines()
    [command] = [line for line in lines if f" {name}.py " in line]
    script = "\n".join([*(line for line in lines if not line.startswith("python")), command])

    done = subprocess.run(
        ["bash", "-ec", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    # The reward, or the pass rate of the first level.
    curve = [
        float(x) for x in re.findall(r"^step .*?(?:reward|level 2:) (\S+?),? ", done.stdout, re.M)
    ]
    third = len(curve) // 3
    assert third >= 8
    assert np.mean(curve[-third:]) > np.mean(curve[:third]), curve


def test_a_curriculum_prefers_levels_that_are_neither_easy_nor_hard(load: Load) -> None:
    curriculum = load("curriculum")
    drawn = []
    for number in (2, 3, 4):
        gold = {"numbers": [1] * number, "target": number}
        problems = reference.random_rollouts(0, 1, 1)[0].problem
        drawn += [type(problems)(f"{number}/{i}", "countdown", "", gold) for i in range(400)]
    chosen = curriculum.choose(drawn, {2: 0.95, 3: 0.5, 4: 0.01}, (0, 1))
    counts = {number: 0 for number in (2, 3, 4)}
    for problem in chosen:
        counts[curriculum.level(problem)] += 1
    assert len(chosen) == len({problem.id for problem in chosen}) == len(drawn) // 4
    assert counts[3] > counts[2] > counts[4] > 0
    assert chosen == curriculum.choose(drawn, {2: 0.95, 3: 0.5, 4: 0.01}, (0, 1))
    assert chosen != curriculum.choose(drawn, {2: 0.95, 3: 0.5, 4: 0.01}, (0, 2))


# -- the losses, against slow and obvious definitions ----------------------------------------------

BETA = 0.1
PAIRS = 4
# With two slots in a row a pair shares its row, with one it has two rows, and with 0 packs a row
# mixes pairs. The microbatches of the last are of one row.
PACKINGS: dict[str, dict[str, object]] = {
    "a row for a pair": {"packs_per_row": 2, "microbatch_tokens": 240},
    "a row for an answer": {"packs_per_row": 1, "microbatch_tokens": 72},
    "plain rows": {"packs_per_row": 0, "microbatch_tokens": 36},
}


def trainer_of(packing: str, temperature: float = 0.7, devices: int = 1) -> Trainer:
    config = reference.settings(train=PACKINGS[packing], rollout={"temperature": temperature})
    mesh = train_mesh(devices, 1, 1, jax.devices()[:devices])
    return make_trainer(config, reference.MODEL, None, mesh)


def random_pairs() -> list[list[Rollout]]:
    answers = reference.random_rollouts(3, PAIRS, 2)
    return [answers[first : first + 2] for first in range(0, len(answers), 2)]


def slow_dpo_loss(
    params: qwen.Params, ref_logps: np.ndarray, answers: list[Rollout], temperature: float
) -> jax.Array:
    """-log sigmoid(beta (log pi(w) - log ref(w) - log pi(l) + log ref(l))), the mean of pairs."""
    tokens = reference.padded([answer.tokens.ids for answer in answers])
    mask = reference.padded([answer.tokens.sampled for answer in answers])
    logps, _ = reference.rows_logps(reference.MODEL, params, tokens, temperature)
    ratios = (logps * mask).sum(axis=1) - ref_logps
    return -jax.nn.log_sigmoid(BETA * (ratios[0::2] - ratios[1::2])).mean()


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("packing", PACKINGS)
def test_dpo_has_the_loss_and_the_gradient_of_its_formula(packing: str, load: Load) -> None:
    """Differentiated through a model that sees one answer at a time, in float64."""
    dpo, answers_module = load("dpo"), load("answers")
    trainer = trainer_of(packing)
    params, ref_params = reference.random_params(), reference.random_params(scale=0.1)
    pairs = random_pairs()
    answers = [answer for pair in pairs for answer in pair]

    policy = trainer.policy
    state = policy.start(reference.placed(policy, params))
    ones = [[answers_module.sequence(answer, 1.0) for answer in pair] for pair in pairs]
    packed = trainer.pack(ones)
    log_ratios = dpo.answer_logps(trainer, policy.weights(state), packed, answers)
    log_ratios -= dpo.answer_logps(trainer, reference.placed(policy, ref_params), packed, answers)
    loss, slopes = dpo.dpo_loss(log_ratios)
    weights = [
        answers_module.sequence(answer, -slope).weights
        for answer, slope in zip(answers, slopes, strict=True)
    ]
    batches, counts = policy.put([part.with_field("weights", weights) for part in packed])
    gradient, _ = policy.gradient(
        state, batches, counts, trainer.layouts, load("best_of_n").sft_loss
    )

    ref_logps, _ = reference.naive(ref_params, answers, 0.7)
    ref_sums = np.array(
        [x[answer.tokens.sampled].sum() for x, answer in zip(ref_logps, answers, strict=True)]
    )
    with jax.enable_x64(True):
        expected_loss, expected = jax.value_and_grad(slow_dpo_loss)(
            jax.tree.map(jnp.asarray, reference.doubles(params)), ref_sums, answers, 0.7
        )
        expected = jax.device_get(expected)
    assert dpo.BETA == BETA
    assert loss == pytest.approx(float(expected_loss), rel=1e-5)
    reference.assert_same_gradient(jax.device_get(gradient), expected, 1e-5)


def test_dpo_loss_and_slopes_are_those_of_torch(load: Load) -> None:
    torch = pytest.importorskip("torch")
    log_ratios = np.random.default_rng(0).normal(0, 20, 12)
    loss, slopes = load("dpo").dpo_loss(log_ratios)

    ratios = torch.tensor(log_ratios, requires_grad=True)
    theirs = -torch.nn.functional.logsigmoid(BETA * (ratios[0::2] - ratios[1::2])).mean()
    theirs.backward()
    assert loss == pytest.approx(theirs.item(), rel=1e-12)
    np.testing.assert_allclose(slopes, ratios.grad.numpy(), rtol=1e-12)


@pytest.mark.usefixtures("quick_compilation")
def test_best_of_n_has_the_gradient_of_supervised_fine_tuning(load: Load) -> None:
    trainer = trainer_of("a row for a pair", temperature=1.0)
    # Supervised fine-tuning has no replies of an environment within a response.
    best = [pair[0] for pair in random_pairs()]
    params = reference.random_params()

    policy = trainer.policy
    num_tokens = sum(answer.tokens.sampled.sum() for answer in best)
    sequence = load("answers").sequence
    packed = trainer.pack([[sequence(answer, 1 / num_tokens)] for answer in best])
    state = policy.start(reference.placed(policy, params))
    gradient, stats = policy.gradient(
        state, *policy.put(packed), trainer.layouts, load("best_of_n").sft_loss
    )

    examples = [example_of(answer.tokens) for answer in best]
    settings = reference.settings()
    supervised = tiny.supervised_trainer(reference.MODEL, policy.mesh, settings, row_tokens=32)
    learner = supervised.learner
    state = learner.start(reference.placed(learner, params))
    batches, counts = learner.put([supervised.pack(examples)])
    expected, expected_stats = learner.gradient(state, batches, counts, [supervised.layout])
    reference.assert_same_gradient(jax.device_get(gradient), jax.device_get(expected), 1e-5)
    assert float(stats["tokens"]) == float(expected_stats["tokens"]) == num_tokens
    np.testing.assert_allclose(stats["loss"], expected_stats["loss"], rtol=1e-5)


def example_of(tokens: Tokens) -> Example:
    return Example(tokens.ids.tolist(), tokens.sampled.tolist())
