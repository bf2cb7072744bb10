"""Plans with real compilations for TPUs that are not there, and what they say."""

import importlib.util
import json
import re
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import jax
import numpy as np
import pytest
from runs import ROOT
from tiny import TOPOLOGY, needs_libtpu, small_settings

from jzero import plan
from jzero.planning import chips
from jzero.planning.arithmetic import bytes_of_phases, totals
from jzero.planning.compiling import compile_only_devices, measure
from jzero.planning.memory import phase_totals, suggestions
from jzero.planning.planned_run import build, with_scores
from jzero.planning.report import Report, format_report, make_report

CHIP = "TPU v5 lite"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory):
    return tmp_path_factory.mktemp("plan")


@pytest.fixture(scope="module")
def report(cache):
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed")
    return make_report(small_settings(), TOPOLOGY, cache)


@pytest.fixture(scope="module")
def planned_run(report):
    return build(small_settings(), compile_only_devices(TOPOLOGY))


def with_hbm(monkeypatch, hbm_bytes: float) -> None:
    """Gives the chip of TOPOLOGY another amount of memory."""
    chip = replace(chips.CHIPS[CHIP], hbm_bytes=int(hbm_bytes))
    monkeypatch.setitem(chips.CHIPS, CHIP, chip)


def test_a_run_compiles_for_a_slice_that_is_not_there(report) -> None:
    assert report.fits
    assert report.suggestions == []
    assert (report.device_kind, report.devices, report.hosts) == (CHIP, 8, 1)
    names = {name.split()[0] for name in report.programs}
    assert names == {"publish", "prefill", "insert", "generate", "update"}
    for program in report.programs.values():
        assert program.peak_bytes > 0


def test_a_report_is_json(report) -> None:
    values = json.loads(json.dumps(report.as_json()))
    assert set(values) == {field.name for field in fields(Report)}
    for program in values["programs"].values():
        assert set(program) == {
            "compile_s",
            "argument_bytes",
            "temp_bytes",
            "peak_bytes",
            "kv_bytes",
            "slice_bytes",
            "repeated_slice_bytes",
        }


def test_decoding_writes_its_pages_in_place(report) -> None:
    generate = report.programs["generate"]
    assert generate.kv_bytes > 2**27
    assert generate.temp_bytes < 0.02 * generate.kv_bytes


@needs_libtpu
def test_scoring_given_tokens_compiles_and_writes_its_pages_in_place() -> None:
    """Of sequences that take several chunks, and of many that take one."""
    settings = small_settings(num_rows=256, max_prompt_tokens=4096)
    run = with_scores(build(settings, compile_only_devices(TOPOLOGY)))
    names = [name for name in run.programs if name.startswith("engine-score")]
    assert names == ["engine-score 1x2048+0", "engine-score 1x2048+4096"]
    program = measure(run.programs[names[1]], TOPOLOGY, None)
    assert program.error is None
    assert program.temp_bytes < 0.5 * run.parts["KV pool"]
    assert program.argument_bytes > run.parts["KV pool"]


def test_parts_are_what_programs_take(report) -> None:
    parts, programs = report.parts, report.programs
    arguments_of_update = parts["weights"] + parts["optimizer"] + parts["batches"]
    arguments_of_generate = parts["decoder weights"] + parts["KV pool"]
    assert programs["publish"].argument_bytes == pytest.approx(parts["weights"], rel=0.02)
    assert programs["update"].argument_bytes == pytest.approx(arguments_of_update, rel=0.05)
    assert programs["generate"].argument_bytes == pytest.approx(arguments_of_generate, rel=0.05)


def test_the_arithmetic_is_near_what_is_compiled(report, planned_run) -> None:
    """Larger models are compared in tests/planning/test_arithmetic.py: for a model as small as this
    one, tiles that are not full take some MiB that nobody counts.
    """
    counted = totals(bytes_of_phases(planned_run))
    assert counted.keys() == report.phases.keys()
    for phase, compiled in report.phases.items():
        assert counted[phase] == pytest.approx(compiled, rel=0.1, abs=2**25), phase


def test_the_table_names_every_program_and_phase(report) -> None:
    text = format_report(report)
    assert text.startswith(
        "small: a model from scratch on v5e:2x4: 8 x TPU v5 lite (data 1 x fsdp 8 x tensor 1), "
        "1 hosts, 15.75 GiB each"
    )
    for name in (*report.programs, *report.parts, *report.phases, *report.roofline):
        assert f"\n{name} " in text
    assert text.endswith("\nfits")


def test_fewer_pages_are_suggested_that_fit(
    report, planned_run, cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    hbm_bytes = report.phases["rollout"] - report.parts["KV pool"] / 4
    with_hbm(monkeypatch, hbm_bytes)

    lines = suggestions(planned_run, report.phases, report.programs)

    [line] = [line for line in lines if "rollout.num_pages=" in line]
    num_pages = int(re.search(r"num_pages=(\d+)", line)[1])
    fewer = build(small_settings(num_pages=num_pages), planned_run.devices)
    generate = measure(fewer.programs["generate"], TOPOLOGY, cache)
    assert phase_totals(fewer, {"generate": generate})["rollout"] <= hbm_bytes


def test_where_nothing_fits_every_remedy_is_suggested(
    report, planned_run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_hbm(monkeypatch, 2**20)
    lines = suggestions(planned_run, report.phases, report.programs)
    changes = (
        "mesh.tensor=2",
        "optimizer.offload=True",
        "train.packs_per_row=2",
        "twice the devices",
    )
    for change in changes:
        assert any(change in line for line in lines), lines


@needs_libtpu
def test_what_the_compiler_refuses_is_a_figure() -> None:
    mesh = jax.sharding.Mesh(np.array(compile_only_devices("v5e:1x1")), ("x",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    x = jax.ShapeDtypeStruct((2**16, 2**16), np.float32, sharding=place)  # 16 GiB
    program = (jax.jit(lambda x: (x @ x) @ x), (x,))

    refused = measure(program, "v5e:1x1", None)

    assert "RESOURCE_EXHAUSTED" in refused.error
    assert refused.peak_bytes > 16 * chips.GIB


@needs_libtpu
def test_the_command(
    report,
    cache,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text(
        "from tiny import small_settings\n\n\ndef get_config():\n    return small_settings()\n"
    )
    out = tmp_path / "plan.json"
    (tmp_path / "home" / "jzero").mkdir(parents=True)
    (tmp_path / "home" / "jzero" / "plan").symlink_to(cache)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    flags = [f"--config={recipe}", f"--topology={TOPOLOGY}", f"--json={out}"]
    monkeypatch.setattr(sys, "argv", ["jzero.plan", *flags])

    with pytest.raises(SystemExit) as fits:
        plan.command()
    assert fits.value.code == 0
    # Lines longer than 80 columns go on in the next line.
    printed = capsys.readouterr().out
    assert printed.split() == format_report(report).split()
    assert max(map(len, printed.splitlines())) <= 80
    assert json.loads(out.read_text()) == json.loads(json.dumps(report.as_json()))

    with_hbm(monkeypatch, 2**20)
    with pytest.raises(SystemExit) as too_large:
        plan.command()
    assert too_large.value.code == 1
    printed = capsys.readouterr().out
    assert "DOES NOT FIT" in printed
    assert "does not fit; try" in printed


@needs_libtpu
def test_a_host_of_several_decodes_with_split_heads(cache) -> None:
    """The compiler refuses a part of a slice whose devices talk to each other."""
    settings = small_settings(num_rows=16, num_slots=256)
    settings.mesh.tensor = 2
    generate = build(settings, compile_only_devices("v5e:4x4")).programs["generate"]
    assert measure(generate, "v5e:4x4", cache).peak_bytes > 0


@needs_libtpu
@pytest.mark.parametrize("topology", ["2xv5e:2x4", "2xv6e:2x4"])
def test_only_gradients_cross_slices(cache, topology: str) -> None:
    """The compilers of TPUs sum over the devices of a slice first, and send a part of it on."""
    settings = small_settings(num_rows=16, num_slots=256)
    settings.mesh.slices, settings.mesh.data, settings.mesh.fsdp = 2, 1, -1
    run = build(settings, compile_only_devices(topology))
    update = measure(run.programs["update"], topology, cache)
    part = run.parts["weights"]
    # The compiler pads arrays to its tiles.
    assert part <= update.slice_bytes < 2 * part
    assert update.repeated_slice_bytes == 0
    publish = measure(run.programs["publish"], topology, cache)
    assert publish.slice_bytes == publish.repeated_slice_bytes == 0


def test_the_plan_of_this_machine_has_the_sizes_of_the_run(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """A run chooses its sizes itself, and the plan of the attached devices chooses the same."""
    flags = ["--config", "configs/countdown.py:tiny", "--config.train.microbatch_tokens=0"]
    flags += ["--config.rollout.num_slots=0", "--config.warm_start=none"]
    flags += ["--config.eval.problems=4"]
    run = ["-m", "jzero.main", *flags, "--config.train.steps=1", "--config.eval.every=0"]
    commands = [
        ["-m", "jzero.plan", "--machine=here", *flags],
        [*run, f"--workdir={tmp_path / 'run'}"],
    ]
    lines = []
    for command in commands:
        done = subprocess.run(
            [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-2000:]
        lines.append(re.findall(r"^sizes: .*|^KV cache: [^(\n]*", done.stdout, re.MULTILINE))
    assert len(lines[0]) == 2
    assert lines[0] == lines[1]
