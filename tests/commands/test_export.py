"""Export: a checkpoint becomes a model for others, with a card, and can be pushed to the hub."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import reference
from huggingface_hub import ModelCard
from runs import ROOT, Hub, finish, rows

from jzero import algorithms, config, export, setup
from jzero.errors import UserError
from jzero.export import Options
from jzero.model import huggingface, qwen, tokenizer
from jzero.model.base_model import BaseModel, read_base_model
from jzero.run import history
from jzero.run.checkpoint import Checkpoints
from jzero.run.environment import versions
from jzero.run.metrics_writer import MetricsWriter
from jzero.run.model_card import CardOptions, make_card
from jzero.run.workdir import claim_workdir
from jzero.types import Params


def evaluation(accuracy: float) -> dict[str, float]:
    return {"eval/accuracy": accuracy, "eval/length": 7.0, "eval_greedy/accuracy": accuracy / 2}


def params_after(step: int, model: qwen.QwenConfig) -> Params:
    """Returns parameters that are different after every step."""
    return jax.tree.map(lambda x: x + step / 7, reference.random_params(model))


def write_run(workdir: Path, settings: config.Config) -> None:
    """Writes what a run of 4 steps leaves, with checkpoints of steps 2 and 4."""
    claim_workdir(workdir, config.to_json(settings))
    (workdir / "versions.json").write_text(json.dumps(versions()))

    writer = MetricsWriter(workdir, None)
    for step in (1, 2, 3, 4):
        metrics = {"reward/mean": step / 8, "rollout/length": 10.0 + step, "time/sample": 1.0}
        writer.write(step, metrics)
    writer.close()

    policy = setup.build(setup.resolve(settings), None).trainer.policy  # pyright: ignore
    before = {"before": evaluation(0.125)}
    evaluations_until = {2: before, 4: before | {"after": evaluation(0.5)}}
    checkpoints = Checkpoints(workdir, 0)
    for step, evaluations in evaluations_until.items():
        state = policy.start(reference.placed(policy, params_after(step, policy.model)))
        checkpoints.save(step, state, {"eval": evaluations}, wait=True)
    checkpoints.close()


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp("runs") / "run"
    settings = reference.settings(
        task={"template": "plain"},
        rollout={"num_prompts": 4},
        optimizer={"lr": 1e-3},
        train={"microbatch_tokens": 240},
    )
    settings.name = "countdown-tiny"
    write_run(workdir, settings)
    return workdir


@pytest.fixture(scope="module")
def exported(workdir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the export of the newest checkpoint."""
    out = tmp_path_factory.mktemp("exports") / "model"
    export.run(Options(workdir, out, license="apache-2.0"))
    return out


def read_config(workdir: Path) -> config.Config:
    path = workdir / "config.json"
    return config.from_json(path.read_text(), str(path))


def file_names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


# The weights


def saved_params(workdir: Path, step: int) -> Params:
    """Reads the parameters of a checkpoint with Orbax, without jzero."""
    return ocp.StandardCheckpointer().restore(workdir / f"checkpoints/{step}/params")


def are_equal(a: Params, b: Params) -> bool:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    return all(jax.tree.leaves(jax.tree.map(np.array_equal, a, b)))


def rounded_to_bfloat16(params: Params) -> Params:
    def rounded(x: jax.Array) -> jax.Array:
        return jnp.asarray(x).astype(jnp.bfloat16).astype(jnp.float32)

    return jax.tree.map(rounded, params)


# Orbax does not know here that the checkpoint is of one process.
of_one_process = pytest.mark.filterwarnings("ignore:Sharding info not provided")


@of_one_process
def test_weights_are_those_of_the_checkpoint_bit_for_bit(workdir: Path, exported: Path) -> None:
    model, hf_config = huggingface.load_config(exported)

    assert are_equal(huggingface.load(exported, model), saved_params(workdir, 4))
    assert hf_config["dtype"] == "float32"


@of_one_process
def test_step_and_dtype_choose_other_weights(workdir: Path, tmp_path: Path) -> None:
    export.run(Options(workdir, tmp_path / "two", step=2, dtype="bfloat16"))

    model, hf_config = huggingface.load_config(tmp_path / "two")
    expected = rounded_to_bfloat16(saved_params(workdir, 2))
    assert are_equal(huggingface.load(tmp_path / "two", model), expected)
    assert not are_equal(expected, saved_params(workdir, 4))
    assert hf_config["dtype"] == "bfloat16"
    assert file_names(tmp_path) == {"two"}, "something was left beside the export"


def test_an_export_has_the_files_that_transformers_reads(exported: Path) -> None:
    assert file_names(exported) >= {
        "model.safetensors",
        "config.json",
        "generation_config.json",
        "README.md",
        "tokenizer.json",
        history.FILE,
    }
    generation_config = json.loads((exported / "generation_config.json").read_text())
    tok = tokenizer.load(str(exported))
    assert generation_config["eos_token_id"] == [tok.eos_token_id]
    # A run that starts from this export tells of this run in its card.
    [stage] = history.read_history(exported)
    assert (stage.kind, stage.algorithm, stage.steps) == (history.RL, "grpo", 4)


@pytest.mark.peer
def test_transformers_loads_and_generates(exported: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tok = transformers.AutoTokenizer.from_pretrained(exported)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        exported, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.dtype == torch.float32
    assert model.generation_config.eos_token_id in (tok.eos_token_id, [tok.eos_token_id])

    prompt = tok("3 5=8\n", add_special_tokens=False, return_tensors="pt")["input_ids"]
    generated = model.generate(prompt, max_new_tokens=12, do_sample=False)

    assert generated.shape[1] > prompt.shape[1]
    assert tok.decode(generated[0]).startswith("3 5=8\n")


# The card


def test_the_header_of_the_card_is_what_the_hub_reads(exported: Path) -> None:
    card = ModelCard.load(exported / "README.md", ignore_metadata_errors=False)

    header = card.data.to_dict()
    assert header["license"] == "apache-2.0"
    assert header["library_name"] == "transformers"
    assert header["pipeline_tag"] == "text-generation"
    assert {"jzero", "grpo", "countdown"} <= set(header["tags"])
    assert card.data.model_name == "jzero-countdown-grpo-4"
    assert card.data.eval_results is None, "held-out problems are not benchmark"


def test_the_card_says_how_the_model_was_made(exported: Path) -> None:
    text = ModelCard.load(exported / "README.md").text

    lines = text.split("\n")
    assert "| `rollout.num_prompts` | `4` |" in lines
    assert "| `optimizer.lr` | `0.001` |" in lines
    assert f"| jax | {jax.__version__} |" in lines
    assert "| before | 12.5 % | 6.2 % |" in lines
    assert "| after | 50.0 % | 25.0 % |" in lines
    assert (
        "1. 4 of 200 steps of reinforcement learning from random weights: grpo on countdown."
        in lines
    )
    assert "Prompts have the template `plain`." in text
    assert "{{" not in text, "a placeholder is left"
    assert "{%" not in text, "a statement of the template is left"


def test_the_card_has_the_curve_of_the_run(workdir: Path, exported: Path) -> None:
    lines = ModelCard.load(exported / "README.md").text.split("\n")
    section = lines[lines.index("## Training") :]
    _heading, _rule, *table = [line for line in section if line.startswith("|")]
    metrics = rows(workdir / "metrics.jsonl")

    assert len(metrics) == 4
    # The lines of other tables follow those of the curve.
    for row, line in zip(metrics, table, strict=False):
        cells = line.split("|")
        assert int(cells[1]) == row["step"]
        assert float(cells[2]) == pytest.approx(row["reward/mean"], rel=1e-3, abs=1e-4)


def test_the_card_names_the_hubs_and_no_directory(workdir: Path, tmp_path: Path) -> None:
    settings = read_config(workdir)
    base = read_base_model(settings.model)
    settings.model.path = "Qwen/Qwen2.5-3B"
    settings.task.name = "math"
    settings.task.data = f"main@openai/gsm8k,{tmp_path}/data.jsonl"
    settings.rollout.stop = ("a|b",)
    settings.eval.samples, settings.eval.temperature = 2, 0.5
    settings.eval.suites = ("math500", f"gsm8k={tmp_path}/eight.jsonl")
    after = {
        "eval/accuracy": 0.5,
        "eval/length": 3.0,
        "eval/math500/accuracy": 0.25,
        "eval/math500/stderr": 0.0625,
        "eval/math500/problems": 500.0,
        "eval_greedy/gsm8k/accuracy": 0.75,
        "eval_greedy/gsm8k/problems": 8.0,
    }
    evaluations = {"before": {}, "after": after}
    options = CardOptions(workdir, "float32")

    card = make_card(settings, 3, evaluations, base, options)
    card.save(tmp_path / "README.md")

    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.base_model == "Qwen/Qwen2.5-3B"
    assert card.data.datasets == ["openai/gsm8k"]
    assert card.data.license == "unknown"
    assert card.data.model_name == "Qwen2.5-3B-gsm8k-grpo-3"
    [result] = card.data.eval_results
    assert (result.dataset_name, result.dataset_type) == ("math500", "lkevinzc/math-eval")
    assert (result.dataset_split, result.metric_value) == ("math", 0.25)
    assert result.metric_args["problems"] == 500
    assert result.metric_args["standard_error"] == 0.0625
    assert result.metric_args["samples"] == 2
    assert "gsm8k (eight.jsonl): 8 problems, greedy" in card.text
    assert "math500: 500 problems, avg@2 at temperature 0.5" in card.text
    assert "25.0 ± 6.2 %" in card.text
    assert "held-out problems of openai/gsm8k, data.jsonl: avg@2" in card.text
    assert "math" not in card.data.tags, "the sets are not those that the task has by itself"
    assert str(tmp_path) not in card.text
    assert "data.jsonl" in card.text
    assert '| `rollout.stop` | `["a\\|b"]` |' in card.text
    assert "| 3 |" in card.text
    assert "| 4 |" not in card.text, "a later step than that of the checkpoint is not a part of it"


def test_a_card_without_evaluations_has_no_results(workdir: Path, tmp_path: Path) -> None:
    settings = read_config(workdir)
    options = CardOptions(workdir, "float32")

    card = make_card(settings, 3, {}, read_base_model(settings.model), options)

    assert card.data.eval_results is None


# The card of each kind of run


def sft_settings(name: str, data: str) -> config.Config:
    """Returns settings of supervised fine-tuning whose other sections say nothing about it."""
    settings = reference.settings(train={"microbatch_tokens": 240})
    settings.name = name
    settings.sft = config.Sft(data=data, epochs=2.0, loss="all")
    return settings


def card_of(workdir: Path, settings: config.Config, base: BaseModel) -> ModelCard:
    """Returns the card of a run of 4 steps with these settings, as somebody reads it."""
    card = make_card(settings, 4, {}, base, CardOptions(workdir, "float32"))
    return ModelCard(str(card), ignore_metadata_errors=False)


@pytest.fixture
def base(workdir: Path) -> BaseModel:
    return read_base_model(read_config(workdir).model)


def write_generated(path: Path, teacher: str) -> str:
    """Writes a data set as `python -m jzero.generate` leaves it, and returns its path."""
    path.write_text(json.dumps({"prompt": "1+1=", "completion": "2"}) + "\n")
    claim = path.with_name(f".{path.name}")
    claim.mkdir()
    (claim / "config.json").write_text(json.dumps({"config": {"model": {"path": teacher}}}))
    return str(path)


def test_the_card_of_fine_tuning_tells_of_no_reinforcement_learning(
    workdir: Path, base: BaseModel, tmp_path: Path
) -> None:
    data = f"all@open-r1/Mixture-of-Thoughts,{tmp_path}/mine.jsonl"

    card = card_of(workdir, sft_settings("traces", data), base)

    text = card.text
    assert card.data.datasets == ["open-r1/Mixture-of-Thoughts"]
    assert card.data.tags == ["jzero", "jax", "sft"]
    assert (
        "1. 4 steps of supervised fine-tuning from random weights on "
        "open-r1/Mixture-of-Thoughts, mine.jsonl."
    ) in text
    assert '| `sft.loss` | `"all"` |' in text
    assert "Prompts are plain text, without a template." in text
    for word in ("grpo", "countdown", "reinforcement", "algorithm.", str(tmp_path)):
        assert word not in text, word


def test_the_card_of_distillation_names_the_teacher(
    workdir: Path, base: BaseModel, tmp_path: Path
) -> None:
    data = write_generated(tmp_path / "answers.jsonl", "Qwen/Qwen2.5-Math-7B")

    card = card_of(workdir, sft_settings("pupil", data), base)

    assert "on answers.jsonl, which Qwen/Qwen2.5-Math-7B wrote (distillation)." in card.text
    assert "distillation" in card.data.tags


def test_the_card_of_a_run_after_another_tells_of_both(
    workdir: Path, base: BaseModel, tmp_path: Path
) -> None:
    first = tmp_path / "first"
    first.mkdir()
    stages = history.history_of(sft_settings("traces", "open-r1/traces"), 4, None)
    (first / history.FILE).write_text(history.history_json(stages))
    settings = reference.settings(train={"microbatch_tokens": 240})
    settings.model.path = str(first)
    settings.task.name, settings.task.template = "math", "r1"
    settings.task.data = "main@openai/gsm8k"
    settings.algorithm = algorithms.dr_grpo()

    card = card_of(workdir, settings, base._replace(directory=first))

    text = card.text
    assert "1. 4 steps of supervised fine-tuning from random weights on open-r1/traces." in text
    assert (
        "2. 4 of 200 steps of reinforcement learning from first: dr_grpo on openai/gsm8k." in text
    )
    assert (
        "- supervised fine-tuning: open-r1/traces\n- reinforcement learning: openai/gsm8k" in text
    )
    assert text.index("| `sft.epochs` | `2.0` |") < text.index('| `task.name` | `"math"` |')
    assert card.data.datasets == ["open-r1/traces", "openai/gsm8k"]
    assert {"sft", "reinforcement-learning", "dr_grpo"} <= set(card.data.tags)
    assert "math" not in card.data.tags, "its problems are those of GSM8K"


def test_a_damaged_history_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    (tmp_path / history.FILE).write_text('[{"kind": "x"}]')
    with pytest.raises(UserError, match=history.FILE):
        history.read_history(tmp_path)


# Mistakes


def write_broken_runs(directory: Path) -> None:
    """Writes `other`, whose config no version of jzero reads, and `empty`, without checkpoints."""
    for name, steps in {"other": "x", "empty": 3}.items():
        (directory / name / "checkpoints").mkdir(parents=True)
        settings = json.dumps({"train": {"steps": steps}})
        (directory / name / "config.json").write_text(settings)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("--workdir {tmp}/nope --out x", "--workdir {tmp}/nope has no run"),
        ("--out x", "the following arguments are required: --workdir"),
        ("--workdir {run} --out x --step 3", "--step=3: {run} has checkpoints of steps [2, 4]"),
        ("--workdir {run} --out there", "--out there exists: give another, or --force"),
        # With --force, too, because the directory holds no model.
        ("--workdir {run} --out there --force", "--out there holds mine, which no export writes"),
        (
            "--workdir {run} --out x --revision v1",
            "--revision=v1 is a branch on the hub: give --push-to-hub",
        ),
        ("--workdir {run} --out x --dtype float16", "argument --dtype: invalid choice: 'float16'"),
        (
            "--workdir {tmp}/other --out x",
            "other/config.json: train.steps=x must be a whole number",
        ),
        ("--workdir {tmp}/empty --out x", "--step=None: {tmp}/empty has checkpoints of steps []"),
    ],
)
def test_a_mistake_is_one_line(
    command: str,
    message: str,
    workdir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_broken_runs(tmp_path)
    (tmp_path / "there").mkdir()
    (tmp_path / "there/mine").write_text("precious")
    files_before = sorted(tmp_path.rglob("*"))
    command = command.format(run=workdir, tmp=tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["export", *command.split()])

    with pytest.raises(SystemExit) as stop:
        export.main()

    err = capsys.readouterr().err
    assert stop.value.code == 2
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message.format(run=workdir, tmp=tmp_path) in err
    assert sorted(tmp_path.rglob("*")) == files_before


# The directories


def test_force_replaces_an_export(workdir: Path, exported: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(exported, out)
    (out / "model-00001-of-00002.safetensors").write_text("of another export")
    export.run(Options(workdir, tmp_path / "two", step=2))

    export.run(Options(workdir, out, step=2, force=True))

    assert file_names(out) == file_names(exported)
    weights = (out / "model.safetensors").read_bytes()
    assert weights == (tmp_path / "two/model.safetensors").read_bytes()


def modification_times(directory: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in directory.rglob("*")}


def test_an_export_leaves_the_workdir_of_a_live_run_alone(workdir: Path, tmp_path: Path) -> None:
    # A checkpoint that the run may be writing.
    unfinished = workdir / "checkpoints/6.orbax-checkpoint-tmp-7"
    unfinished.mkdir()
    before = modification_times(workdir)

    export.run(Options(workdir, tmp_path / "out"))

    assert modification_times(workdir) == before
    unfinished.rmdir()


# The hub


class Pusher:
    """Starts the command as a process that pushes a run to a hub."""

    def __init__(
        self, hub: Hub, workdir: Path, directory: Path, environment: dict[str, str]
    ) -> None:
        self.workdir = workdir
        self.directory = directory  # of the exports
        self.environment = environment | hub.environment()

    def push(self, out: str, *flags: str, token: str = "hf_secret") -> subprocess.Popen:
        command = [sys.executable, "-m", "jzero.export", "--push-to-hub=me/tiny"]
        command += [f"--workdir={self.workdir}", f"--out={self.directory / out}", *flags]
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=self.environment | {"HF_TOKEN": token},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def exported_files(self, out: str) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (self.directory / out).iterdir()}


def test_a_push_without_the_right_token_is_one_line(
    environment: dict[str, str], workdir: Path, tmp_path: Path
) -> None:
    with Hub() as hub:
        pusher = Pusher(hub, workdir, tmp_path, environment)

        _, err = finish(pusher.push("no", token="hf_other"), code=2)

    assert err.startswith("error: --push-to-hub me/tiny: ")
    assert err.count("\n") == 1
    assert not hub.branches


def test_a_push_to_a_branch_replaces_another_only_by_force(
    environment: dict[str, str], workdir: Path, tmp_path: Path
) -> None:
    with Hub() as hub:
        pusher = Pusher(hub, workdir, tmp_path, environment)

        out, _ = finish(pusher.push("one", "--step=2", "--revision=v1"))
        first = pusher.exported_files("one")
        assert "commit/1111" in out
        assert hub.branches == {"main": {}, "v1": first}

        _, err = finish(pusher.push("two", "--revision=v1"), code=2)
        assert "--revision=v1 exists in me/tiny: give another, or --force" in err
        assert err.count("\n") == 1
        assert hub.branches == {"main": {}, "v1": first}

        hub.branches["v1"]["model-00001-of-00002.safetensors"] = b"of an earlier push"
        finish(pusher.push("two", "--revision=v1", "--force"))
        second = pusher.exported_files("two")
        assert hub.branches["v1"] == second
        assert second != first


def test_no_setting_carries_a_directory_of_the_machine_into_the_card(tmp_path: Path) -> None:
    """Every text, and every text in a list, of all settings."""
    settings = json.loads(config.to_json(config.Config()))
    texts = [f"{tmp_path}/file.jsonl", f"name={tmp_path}/file.jsonl", f"{tmp_path}/code.py:f"]
    texts += [",".join(texts), f"{tmp_path}/file.jsonl:problem=a:answer=b"]
    for name, value in config.flatten(settings).items():
        *sections, field = name.split(".")
        section = settings
        for part in sections:
            section = section[part]
        if isinstance(value, str):
            section[field] = texts[len(name) % len(texts)]
        elif isinstance(value, list):
            section[field] = texts

    values = history.flat_values(settings)

    assert sum("file.jsonl" in value or "code.py:f" in value for value in values.values()) > 50
    assert not [name for name, value in values.items() if str(tmp_path) in value]
