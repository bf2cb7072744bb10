"""Teachers: what they say of sampled tokens, what becomes of it, and which teachers are refused."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from reference import blueprint_of
from scoring_server import ScoringServer, served
from transformers import AddedToken

from jzero.algorithms import Distillation
from jzero.algorithms.presets import distill
from jzero.blueprint import describe_teacher, models_of_run, spec_of_teacher, teacher_settings
from jzero.config import AdapterConfig, Config
from jzero.distillation.build import check_length, check_teacher, make_teacher
from jzero.errors import UserError
from jzero.model import adapters, huggingface, peft, qwen, tokenizer
from jzero.model.base_model import BaseModel
from jzero.service.weights import load_teacher
from jzero.sharding.mesh import train_mesh
from jzero.tokens import Tokens
from jzero.training.step import (
    Minibatch,
    UpdateResult,
    make_minibatches,
    score_and_credit,
    update_on_rollouts,
)
from jzero.training.teacher import Teacher, TeacherScores
from jzero.training.trainer import Trainer, make_trainer
from jzero.types import Rollout, State

pytestmark = pytest.mark.usefixtures("quick_compilation")

TOKENIZER = tokenizer.countdown()
MODEL = replace(reference.MODEL, vocab_size=len(TOKENIZER))
# A teacher of another size, whose vocabulary is padded.
OTHER = qwen.QwenConfig("qwen2", len(TOKENIZER) + 16, 24, 32, 3, 2, 2, 8, True, 1e4, 1e-6)
BASE = BaseModel(None, MODEL, {"max_position_embeddings": 64}, TOKENIZER)
PARAMS = reference.random_params(MODEL)
ADAPTER = AdapterConfig(rank=3, alpha=6.0)

GOLDS = ("12", "the answer is seven and not eight", "5", "1")


def rollouts_of_problems() -> list[Rollout]:
    """Returns ragged rollouts of 4 problems, some with replies of an environment, as text shows."""
    rollouts = []
    for rollout in reference.random_rollouts(1, 4, 4):
        number = int(rollout.problem.id.rpartition("/")[2])
        prompt = tokenizer.decode(TOKENIZER, rollout.tokens.ids[: rollout.prompt_length].tolist())
        problem = replace(rollout.problem, prompt=prompt, gold=GOLDS[number])
        rollouts.append(replace(rollout, problem=problem))
    return rollouts


ROLLOUTS = rollouts_of_problems()


def settings_of(teacher: dict[str, object], **sections: dict[str, object]) -> Config:
    sections = {
        "algorithm": vars(distill(distillation=Distillation(coef=1.0))),
        "rollout": {"temperature": 1.0},
        "teacher": teacher,
        **sections,
    }
    return reference.settings(**sections)


def save_model(directory: Path, model: qwen.QwenConfig, params: qwen.Params) -> str:
    huggingface.save(directory, model, params, dtype="float32", hf_config_extra={})
    TOKENIZER.save_pretrained(directory)
    return str(directory)


def trainer_of(config: Config, sizes: tuple[int, int, int] = (1, 1, 1)) -> Trainer:
    mesh = train_mesh(*sizes, jax.devices()[: np.prod(sizes)])
    return make_trainer(config, MODEL, None, mesh)


def teacher_of(config: Config, trainer: Trainer) -> Teacher | None:
    """Returns the teacher of `config`, with its arrays on the mesh of the trainer."""
    teaching = teacher_settings(config)
    assert teaching is not None

    def read(setting: str, path: str) -> qwen.QwenConfig:
        return huggingface.load_config(huggingface.resolve(path))[0]

    models = models_of_run(config, MODEL, read)
    run = blueprint_of(trainer.policy)
    blueprint = describe_teacher(spec_of_teacher(teaching, config.mesh), models, run)
    return make_teacher(teaching, BASE, trainer, load_teacher(teaching, blueprint))


def first_state(trainer: Trainer) -> State:
    return trainer.policy.start(reference.placed(trainer.policy, PARAMS))


def scores_of(
    config: Config, sizes: tuple[int, int, int] = (1, 1, 1), state: State | None = None
) -> TeacherScores:
    """Returns what the teacher of `config` says of ROLLOUTS."""
    trainer = trainer_of(config, sizes)
    check_teacher(teacher_settings(config), BASE, trainer.policy.mesh)
    teacher = teacher_of(config, trainer)
    assert teacher is not None
    minibatches = make_minibatches(trainer, ROLLOUTS, 1)
    return teacher.score(state or first_state(trainer), None, minibatches, ROLLOUTS)


def assert_scores(scores: TeacherScores, expected: Sequence[np.ndarray]) -> None:
    """Asserts that the log-probs of all sampled tokens are those expected."""
    assert scores.is_scored.all()
    for got, want, rollout in zip(scores.logps, expected, ROLLOUTS, strict=True):
        np.testing.assert_allclose(
            got[rollout.tokens.sampled], want[rollout.tokens.sampled], atol=1e-5
        )


def run_step(config: Config, sizes: tuple[int, int, int] = (1, 1, 1)) -> UpdateResult:
    trainer = trainer_of(config, sizes)
    teacher = teacher_of(config, trainer)
    return update_on_rollouts(trainer, first_state(trainer), ROLLOUTS, 1, None, teacher)


def packed_advantages(config: Config) -> np.ndarray:
    """Returns the advantages of all cells of the packed rows that a step would train on."""
    trainer = trainer_of(config)
    minibatches = make_minibatches(trainer, ROLLOUTS, 1)
    teacher = teacher_of(config, trainer)
    score_and_credit(trainer, first_state(trainer), minibatches, ROLLOUTS, None, teacher)
    advantages = []
    for minibatch in minibatches:
        advantages += [np.ravel(batch.advantages) for batch in minibatch.batches]
    return np.concatenate(advantages)


# -- the policy as its own teacher -----------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 2, 2)], ids=str)
def test_a_teacher_equal_to_the_policy_gives_exactly_no_gradient(
    sizes: tuple[int, int, int], tmp_path: Path
) -> None:
    path = save_model(tmp_path / "teacher", MODEL, PARAMS)
    config = settings_of(
        {"kind": "model", "path": path}, train={"minibatches": 2, "microbatch_tokens": 480}
    )

    result = run_step(config, sizes)

    assert result.metrics["optimizer/grad_norm"] == 0
    assert result.metrics["distill/kl"] == 0
    assert result.metrics["distill/teacher_nll"] > 1
    for batch in result.batches:
        assert not np.any(batch.advantages)
        assert np.any(batch.weights)
    jax.tree.map(np.testing.assert_array_equal, result.state.params, PARAMS)


def test_the_first_policy_as_the_reference_teaches_nothing_in_the_first_step() -> None:
    config = settings_of({"kind": "reference"})
    trainer = trainer_of(config)
    teacher = teacher_of(config, trainer)
    reference_policy = reference.placed(trainer.policy, PARAMS)

    result = update_on_rollouts(
        trainer, first_state(trainer), ROLLOUTS, 1, reference_policy, teacher
    )

    assert result.metrics["optimizer/grad_norm"] == 0


# -- scores against the definition -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("temperature", "packs_per_row", "sizes"),
    [(0.7, 2, (1, 1, 1)), (1.0, 0, (2, 2, 1))],
    ids=str,
)
def test_a_model_of_another_size_scores_at_the_temperature_of_the_rollouts(
    temperature: float, packs_per_row: int, sizes: tuple[int, int, int], tmp_path: Path
) -> None:
    params = reference.random_params(OTHER)
    path = save_model(tmp_path / "teacher", OTHER, params)
    config = settings_of(
        {"kind": "model", "path": path},
        rollout={"temperature": temperature},
        train={"packs_per_row": packs_per_row, "minibatches": 2},
    )

    scores = scores_of(config, sizes)

    expected, _ = reference.naive(params, ROLLOUTS, temperature, OTHER)
    assert_scores(scores, expected)


def random_adapter() -> qwen.Params:
    """Returns an adapter that changes the model."""
    rng = np.random.default_rng(1)

    def random_leaf(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.asarray(0.15 * rng.standard_normal(leaf.shape), jnp.float32)

    return jax.tree.map(random_leaf, adapters.abstract(MODEL, ADAPTER))


@pytest.mark.parametrize("policy_has_adapter", [False, True])
def test_an_adapter_teaches_on_its_base(policy_has_adapter: bool, tmp_path: Path) -> None:
    base, adapter = str(tmp_path / "base"), random_adapter()
    save_model(tmp_path / "base", MODEL, PARAMS)
    peft.save(tmp_path / "adapter", MODEL, ADAPTER, adapter, base=base, dtype="float32")
    own = {"adapter": AdapterConfig(rank=2)} if policy_has_adapter else {}
    config = settings_of(
        {"kind": "model", "adapter": str(tmp_path / "adapter")}, model={"path": base, **own}
    )
    state = None
    if policy_has_adapter:
        policy = trainer_of(config).policy
        params = jax.tree.map(jnp.array, PARAMS)
        state = policy.start_on(policy.freeze(params), seed=0)

    scores = scores_of(config, state=state)

    merged = adapters.merge(MODEL, PARAMS, adapter, ADAPTER.scale)
    expected, _ = reference.naive(merged, ROLLOUTS, 1.0, MODEL)
    assert_scores(scores, expected)


# -- self-distillation -----------------------------------------------------------------------------


@pytest.mark.parametrize("packs_per_row", [2, 0])
def test_self_distillation_is_its_definition(packs_per_row: int) -> None:
    """A_t = log pi(a_t | question and answer, a_<t) - log pi(a_t | question, a_<t)."""
    teacher = {"kind": "policy", "prompt": "{gold}: {prompt}", "max_prompt_tokens": 12}
    config = settings_of(teacher, train={"packs_per_row": packs_per_row, "minibatches": 2})
    trainer = trainer_of(config)
    minibatches = make_minibatches(trainer, ROLLOUTS, 1)

    credit = score_and_credit(
        trainer,
        first_state(trainer),
        minibatches,
        ROLLOUTS,
        None,
        teacher_of(config, trainer),
    )

    got = advantages_of_rollouts(minibatches)
    num_long = 0
    for index, rollout in enumerate(ROLLOUTS):
        prompt = f"{rollout.problem.gold}: {rollout.problem.prompt}"
        longer = tokenizer.encode(TOKENIZER, prompt)
        if len(longer) > 12:
            num_long += 1
            assert not got[index].any()
            continue
        informed = replace(
            rollout,
            tokens=Tokens([*longer, *rollout.tokens.ids[rollout.prompt_length :]]),
        )
        [student, answers], _ = reference.naive(PARAMS, [rollout, informed], 1.0, MODEL)
        for t in range(len(rollout.tokens)):
            t_of_teacher = t - rollout.prompt_length + len(longer)
            want = answers[t_of_teacher] - student[t] if rollout.tokens.sampled[t] else 0.0
            assert got[index][t] == pytest.approx(want, abs=5e-5)
    assert num_long == 4
    assert credit.metrics["distill/dropped"] == pytest.approx(num_long / len(ROLLOUTS))


def advantages_of_rollouts(minibatches: Sequence[Minibatch]) -> list[np.ndarray]:
    """Returns the advantages that the update reads, for each of ROLLOUTS over its tokens."""
    advantages = [np.zeros(len(rollout.tokens), np.float32) for rollout in ROLLOUTS]
    for minibatch in minibatches:
        minibatch.get_values("advantages", advantages)
    return advantages


# -- a server --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_form", "prompt"),
    [
        ("echo", "{gold}: {prompt}"),
        ("echo", ""),
        ("prompt_logprobs", ""),
    ],
)
def test_a_server_gives_the_advantages_of_the_same_model_on_the_mesh(
    request_form: str, prompt: str, tmp_path: Path
) -> None:
    params = reference.random_params(OTHER)
    path = save_model(tmp_path / "teacher", OTHER, params)
    server = ScoringServer(params, OTHER, TOKENIZER)

    on_mesh = packed_advantages(settings_of({"kind": "model", "path": path, "prompt": prompt}))
    with served(server.answer) as url:
        asked = {"kind": "server", "url": url, "request": request_form, "prompt": prompt}
        over_http = packed_advantages(settings_of(asked))

    assert np.abs(on_mesh).max() > 0.1
    np.testing.assert_allclose(over_http, on_mesh, atol=1e-5)


# -- teachers that are refused ---------------------------------------------------------------------


def refused(teacher: dict[str, object], match: str, **sections: dict[str, object]) -> None:
    config = settings_of(teacher, **sections)
    with pytest.raises(UserError, match=match):
        check_teacher(teacher_settings(config), BASE, train_mesh(1, 1, 1, jax.devices()[:1]))


def test_another_vocabulary_is_refused_with_a_token_that_differs(tmp_path: Path) -> None:
    path = save_model(tmp_path / "teacher", MODEL, PARAMS)
    text = (tmp_path / "teacher/tokenizer.json").read_text()
    swapped = text.replace('"A":', '"@@":').replace('"B":', '"A":').replace('"@@":', '"B":')
    assert swapped != text
    (tmp_path / "teacher/tokenizer.json").write_text(swapped)

    refused({"kind": "model", "path": path}, "another vocabulary than the policy: token '[AB]'")


def test_a_teacher_with_more_tokens_is_no_other_vocabulary(tmp_path: Path) -> None:
    path = save_model(tmp_path / "teacher", OTHER, reference.random_params(OTHER))
    larger = tokenizer.countdown()
    larger.add_tokens([AddedToken("<tool>", special=True)])
    larger.save_pretrained(path)

    settings = teacher_settings(settings_of({"kind": "model", "path": path}))
    check_teacher(settings, BASE, train_mesh(1, 1, 1, jax.devices()[:1]))


def test_what_a_teacher_lacks_is_one_line(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    refused({"kind": "model", "path": missing}, "teacher.path=.*missing: no such directory")

    with pytest.raises(UserError, match="up to .* its model has sliding_window=8"):
        check_length(
            teacher_settings(settings_of({"kind": "model", "path": missing})), 64, window=8
        )

    smaller = replace(MODEL, vocab_size=100)
    path = save_model(tmp_path / "smaller", smaller, reference.random_params(smaller))
    refused({"kind": "model", "path": path}, "a vocabulary of 100, the policy one of 112")

    self_taught = {"kind": "policy", "prompt": "{prompt}{gold}"}
    too_long = self_taught | {"max_prompt_tokens": 60}
    refused(too_long, "up to 72 tokens.*max_position_embeddings=64")
    refused(self_taught | {"prompt": "no name"}, "is not a file and holds no {prompt}")
