"""What a plan counts for a teacher: the weights that it holds, and the program that scores."""

from dataclasses import replace
from pathlib import Path

import jax
import pytest
import reference
from tiny import small_settings

from jzero import config
from jzero.algorithms.presets import distill
from jzero.blueprint import Models, Topology, describe, spec_of_run
from jzero.config import AdapterConfig, Config, teachers
from jzero.model import adapters, huggingface, peft, qwen
from jzero.planning import chips
from jzero.planning.arithmetic import bytes_of_phases, totals
from jzero.planning.compiling import device_bytes
from jzero.planning.planned_run import PlannedRun, build
from jzero.service.weights import load

TEACHER = replace(reference.MODEL, num_hidden_layers=3)


def settings_with(teacher: teachers.Teacher | None) -> Config:
    settings = replace(small_settings(num_rows=16), teacher=teacher)
    if teacher is not None:
        settings.algorithm = distill()
    return settings


def planned(settings: Config) -> PlannedRun:
    return build(settings, chips.described_devices("v5e:2x4"))


def save_model(directory: Path, model: qwen.QwenConfig) -> str:
    params = reference.random_params(model)
    huggingface.save(directory, model, params, dtype="float32", hf_config_extra={})
    return str(directory)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rank", [0, 2])
def test_planned_weights_equal_loaded_weights(rank: int, dtype: str, tmp_path: Path) -> None:
    mesh = config.MeshConfig(data=2, fsdp=2, tensor=2)
    path = save_model(tmp_path / "teacher", TEACHER)
    settings = replace(settings_with(teachers.Model(path=path)), mesh=mesh)
    settings.model.dtype = dtype
    models = Models(reference.MODEL, teacher=TEACHER, teacher_adapter=AdapterConfig(rank=rank))
    run = describe(spec_of_run(settings), models, Topology(jax.devices()[:8], 0))
    assert run.teacher is not None

    loaded = load(run.teacher, Path(path))

    def described(leaf: jax.Array | jax.ShapeDtypeStruct) -> tuple[object, ...]:
        return leaf.shape, leaf.dtype, leaf.sharding

    assert jax.tree.map(described, loaded) == jax.tree.map(described, run.teacher.abstract_model())


def test_a_model_that_teaches_takes_its_weights_in_every_phase(tmp_path: Path) -> None:
    path = save_model(tmp_path / "teacher", TEACHER)
    alone = totals(bytes_of_phases(planned(settings_with(None))))

    run = planned(settings_with(teachers.Model(path=path)))

    # Two bytes for each parameter, split over 8 devices; norms are not split.
    assert run.parts["teacher"] >= 2 * qwen.num_params(TEACHER) / 8
    assert run.parts["teacher"] <= 4 * qwen.num_params(TEACHER) / 8
    with_teacher = totals(bytes_of_phases(run))
    for phase in ("publish", "rollout"):
        assert with_teacher[phase] == pytest.approx(alone[phase] + run.parts["teacher"])
    assert with_teacher["score"] > run.parts["teacher"]
    assert "teacher-score" in run.programs


def test_the_policy_and_a_server_hold_no_weights_of_their_own() -> None:
    myself = planned(settings_with(teachers.Policy(prompt="{prompt}{gold}")))
    server = planned(settings_with(teachers.Server(url="http://localhost/v1")))
    first = planned(settings_with(teachers.Reference()))

    assert "teacher" not in {*myself.parts, *server.parts, *first.parts}
    assert "reference" not in {*myself.parts, *server.parts}
    assert first.parts["reference"] == first.parts["weights"]
    assert "teacher-score" not in server.programs
    # Its prompts may be twice as long as the policy's: 64 tokens before 4 responses of 32.
    assert myself.teacher is not None
    assert [layout.tokens for layout in myself.teacher.shapes.layouts] == [64 + 4 * 32]
    assert device_bytes(myself.teacher.own_rows) > 0


def test_an_adapter_on_the_base_of_the_policy_takes_its_own_weights_alone(tmp_path: Path) -> None:
    adapter = AdapterConfig(rank=3)
    path = save_model(tmp_path / "base", TEACHER)
    params = adapters.init(TEACHER, adapter, jax.random.key(0))
    peft.save(tmp_path / "adapter", TEACHER, adapter, params, base=path, dtype="float32")
    settings = settings_with(teachers.Model(adapter=str(tmp_path / "adapter")))

    settings.model.path = path
    of_whole_model = planned(settings)
    settings.model.adapter = AdapterConfig(rank=2)
    of_adapter = planned(settings)

    base_bytes = of_whole_model.parts["teacher"] - of_adapter.parts["teacher"]
    assert base_bytes >= 2 * qwen.num_params(TEACHER) / 8
    assert of_adapter.parts["teacher"] >= 4 * adapters.num_params(TEACHER, adapter) / 8
