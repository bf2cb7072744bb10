"""`python -m jzero.main`: whole runs, killed and resumed, and one clear line for every mistake.

Runs that receive signals are processes of their own. All other commands are forks of one process
that has imported jzero: they do what a shell would see, without the seconds of an import each.
"""

import hashlib
import json
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import reference
from runs import ROOT, RUN, STEPS, finish, launch, rows, timeless, wait_for

from jzero.run import metrics

CHECKPOINT_BEFORE_THE_LAST = STEPS - STEPS % 4  # RUN saves every 4 steps, and after the last

# Takes the arguments of a command; returns its exit status, stdout and stderr.
Command = Callable[..., tuple[int, str, str]]

FORKS = """
import json, os, sys, traceback
from jzero import main
from jzero.loops import rl

for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if not child:
        for number, path in ((1, job["out"]), (2, job["err"])):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.argv, code = ["jzero.main", *job["argv"]], 0
        try:
            main.run()
        except SystemExit as exit:
            code = exit.code or 0
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def command(
    environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Command]:
    """Returns a function that runs `python -m jzero.main` in a fork of a process."""
    streams = tmp_path_factory.mktemp("streams")
    out, err = streams / "out", streams / "err"
    process = subprocess.Popen(
        [sys.executable, "-c", FORKS],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin and process.stdout and process.stderr

    def call(*argv: str) -> tuple[int, str, str]:
        process.stdin.write(json.dumps({"argv": argv, "out": str(out), "err": str(err)}) + "\n")
        process.stdin.flush()
        code = process.stdout.readline()
        assert code, process.stderr.read()
        return int(code), out.read_text(), err.read_text()

    yield call
    process.communicate()


@pytest.fixture(scope="module")
def finished(command, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the workdir of a run that nothing interrupted."""
    workdir = tmp_path_factory.mktemp("runs") / "whole"
    code, out, err = command(*RUN, f"--workdir={workdir}")
    assert code == 0, err[-3000:]
    assert f"step {STEPS}/{STEPS} " in out
    # A log is plain text.
    assert "\r" not in out + err and "\x1b" not in out + err
    assert f"\u2500 countdown-tiny: {STEPS} steps in" in out
    return workdir


def digests(directory: Path) -> dict[str, str]:
    """Returns the hash of every file below a directory."""
    hashes = {}
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            name = str(path.relative_to(directory))
            hashes[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return hashes


def read_json(path: Path) -> dict:
    return json.loads(path.read_text())


# -- Whole runs ------------------------------------------------------------------------------------


def test_a_run_leaves_its_files(finished) -> None:
    files = {
        "config.json",
        "evaluations.json",
        "kv_pool.json",
        "lock",
        "metrics.jsonl",
        "samples.jsonl",
        "summary.json",
        "versions.json",
    }
    directories = {"checkpoints", "evaluations", "tensorboard", f"export-{STEPS}"}
    assert {path.name for path in finished.iterdir()} == files | directories


def test_the_summary_has_what_scripts_rely_on(finished) -> None:
    summary = read_json(finished / "summary.json")
    assert summary.keys() >= {
        "config",
        "steps",
        "seconds",
        "seconds_by_phase",
        "peak_rss_bytes",
        "eval",
        "eval_greedy",
        "export",
        "versions",
    }
    assert summary["config"] == read_json(finished / "config.json")
    assert summary["steps"] == STEPS
    assert summary["export"] == str(finished / f"export-{STEPS}")
    assert summary["versions"] == read_json(finished / "versions.json")
    assert summary["versions"]["jax"]
    for name in ("eval", "eval_greedy"):
        assert summary[name].keys() == {"countdown"}
        assert summary[name]["countdown"].keys() == {"before", "after_warm_start", "after"}
        assert all(0 <= value <= 1 for value in summary[name]["countdown"].values())
    phases = summary["seconds_by_phase"]
    in_order = ("sample", "grade", "update", "eval", "warm_start", "checkpoint", "export")
    assert phases.keys() >= set(in_order)
    assert 0.5 * summary["seconds"] < sum(phases.values()) <= summary["seconds"]
    assert 10**8 < summary["peak_rss_bytes"] < 10**11


def test_metrics_have_a_line_for_every_step(finished) -> None:
    lines = rows(finished / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    trained = [line for line in lines if line["update/left_out"] < 1]
    of_other_runs = {"sft/loss", "eval/loss", "distill/kl", "policy/kl"}
    assert set(metrics.STEP_LINE) - of_other_runs <= trained[0].keys()
    evaluated = [line["step"] for line in lines if "eval/accuracy" in line]
    assert evaluated == list(range(2, STEPS + 1, 2))
    names = {frozenset(name for name in line if not name.startswith("eval")) for line in trained}
    assert len(names) <= 2  # "time/checkpoint" is only in some
    assert all(np.isfinite(list(line.values())).all() for line in lines)
    assert len({line["reward/mean"] for line in lines}) > 3
    assert any(line["optimizer/grad_norm"] for line in lines)
    assert max(line["policy/mismatch"] for line in trained) < 0.1
    assert lines[0]["compile/programs"] > 1
    assert lines[-1]["compile/programs"] == 0 == lines[-1]["compile/seconds"]
    assert all(line["publish/bytes"] > 10**4 for line in lines)
    # One optimizer step a step is on policy: nothing is clipped.
    assert all(line["policy/clip_fraction"] == 0 for line in trained)


def test_samples_of_every_step_have_the_documented_columns(finished) -> None:
    samples = rows(finished / "samples.jsonl")
    assert [row["step"] for row in samples] == [
        step for step in range(1, STEPS + 1) for _ in range(2)
    ]
    documented = {
        "id",
        "sample",
        "prompt",
        "response",
        "gold",
        "score",
        "advantage",
        "reason",
        "tokens",
        "finish",
    }
    assert all(row.keys() >= documented for row in samples)
    assert len({row["advantage"] for row in samples}) > 3
    assert len({row["id"] for row in samples}) == STEPS


@pytest.mark.peer
def test_export_loads_in_transformers_and_says_the_same(finished) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    import jax
    import jax.numpy as jnp

    from jzero.model import huggingface

    export = finished / f"export-{STEPS}"
    tokenizer = transformers.AutoTokenizer.from_pretrained(export)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(export).eval()
    end = tokenizer.eos_token_id
    assert theirs.generation_config.eos_token_id in (end, [end])
    model, _ = huggingface.load_config(export)
    params = huggingface.load(export, model)

    prompt = tokenizer("3 5=8\n", add_special_tokens=False)["input_ids"]
    greedy = theirs.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0].tolist()
    with torch.no_grad():
        logits = theirs(torch.tensor([greedy])).logits[0].numpy()
    ours = jax.jit(reference.forward, static_argnums=0)(model, params, jnp.array([greedy]))[0]

    np.testing.assert_allclose(ours, logits, atol=2e-4, rtol=0)
    continuation = np.asarray(ours)[len(prompt) - 1 : -1].argmax(-1).tolist()
    assert continuation == greedy[len(prompt) :]
    assert len(continuation) > 3


def test_a_run_stopped_three_times_equals_one_that_was_not(
    environment: dict[str, str], finished, tmp_path: Path
) -> None:
    """kill -9 at a random moment, SIGTERM, SIGINT: each time the same command goes on."""
    workdir = tmp_path / "run"
    log = workdir / "metrics.jsonl"
    process = launch(environment, workdir)
    wait_for(process, log, 4)
    time.sleep(random.random() * 0.2)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (workdir / "summary.json").exists()

    reached, seconds = 0, 0.0
    for number, least in ((signal.SIGTERM, STEPS // 2), (signal.SIGINT, STEPS - 5)):
        process = launch(environment, workdir)
        wait_for(process, log, least)
        process.send_signal(number)
        out, err = finish(process)
        summary = read_json(workdir / "summary.json")
        steps = summary["steps"]
        assert least <= steps < STEPS and steps > reached
        assert summary["export"] is None
        assert f"{number.name}: stopped after step {steps}; the same command resumes" in out
        assert f"{number.name}: saving a checkpoint; again to stop at once" in err
        assert f"resumed {workdir} at step" in out
        # Nothing is done twice.
        assert "after warm start" not in out
        assert [row["step"] for row in rows(log)] == list(range(1, steps + 1))
        assert summary["seconds"] > seconds  # the sum of all processes so far
        reached, seconds = steps, summary["seconds"]

    finish(launch(environment, workdir))
    assert timeless(log) == timeless(finished / "metrics.jsonl")
    for name in (
        "samples.jsonl",
        f"export-{STEPS}/model.safetensors",
        f"export-{STEPS}/config.json",
        "config.json",
    ):
        assert (workdir / name).read_bytes() == (finished / name).read_bytes(), name
    # The sums of bits of all arrays, those of the optimizer's moments among them.
    host = f"checkpoints/{STEPS}/host/metadata"
    assert read_json(workdir / host)["leaves"] == read_json(finished / host)["leaves"]
    summary = read_json(workdir / "summary.json")
    expected = read_json(finished / "summary.json")
    for name in ("config", "steps", "eval", "eval_greedy", "eval_all"):
        assert summary[name] == expected[name]
    assert summary["seconds"] > seconds


def test_a_finished_run_may_be_run_again(command, finished, tmp_path: Path) -> None:
    workdir = tmp_path / "again"
    shutil.copytree(finished, workdir)
    before = digests(workdir)

    code, out, err = command(*RUN, f"--workdir={workdir}")

    assert code == 0, err[-3000:]
    assert f"resumed {workdir} at step {STEPS}" in out and "error" not in err
    changed = {name for name, digest in digests(workdir).items() if before.get(name) != digest}
    changed.discard("lock")  # names the process that holds it
    assert all(name == "summary.json" or name.startswith("tensorboard/") for name in changed)
    summary = read_json(workdir / "summary.json")
    assert summary["eval"] == read_json(finished / "summary.json")["eval"]
    assert summary["steps"] == STEPS and summary["export"]


def test_an_export_is_a_model_to_train_and_export_again(command, finished, tmp_path: Path) -> None:
    source, workdir = finished / f"export-{STEPS}", tmp_path / "run"
    code, _, err = command(
        *(flag for flag in RUN if ".warm_start." not in flag),
        f"--workdir={workdir}",
        f"--config.model.path={source}",
        "--config.warm_start=none",
        "--config.train.steps=1",
        "--config.eval.every=0",
        "--config.train.minibatches=2",
    )
    assert code == 0, err[-3000:]
    before = read_json(finished / "summary.json")["eval"]["countdown"]
    after = read_json(workdir / "summary.json")["eval"]["countdown"]
    assert after["before"] == before["after"]
    assert read_json(source / "config.json") == read_json(workdir / "export-1/config.json")


# -- Mistakes --------------------------------------------------------------------------------------


def refused(command: Command, *argv: str) -> str:
    """Runs a command that is refused; returns the one line that it prints, without `error: `."""
    code, _, err = command(*argv)
    lines = [line for line in err.split("\n") if line.strip()]
    assert code == 2 and len(lines) == 1 and lines[0].startswith("error: "), f"{code} {err}"
    return lines[0].removeprefix("error: ")


TINY = RUN[0]
# The flags of options replace those of the recipe.
OPTIONS = [f"--config.task.options=numbers_{bound}=2" for bound in ("min", "max")]
MISTAKES = {
    "missing model directory": (
        ["--config.model.path=tests/no/such/model"],
        "no such directory: tests/no/such/model",
    ),
    "empty model directory": (
        ["--config.model.path=tests"],
        "no config.json in tests: it is not a Hugging Face model",
    ),
    "model is a file": (
        ["--config.model.path=README.md"],
        "README.md is a file: give the directory",
    ),
    "unreachable hub": (
        ["--config.model.path=Qwen/Qwen2.5-0.5B", "--config.memory.check=False"],
        "the hub is unreachable or has no such model: Q",
    ),
    "missing tokenizer": (
        ["--config.model.tokenizer=/no/such"],
        "no tokenizer in model.tokenizer=/no/such",
    ),
    "missing data": (["--config.task.data=/no/such.json"], "data /no/such.json cannot be loaded"),
    "wrong dtype": (
        ["--config.model.dtype=float16"],
        "model.dtype=float16 is not one of bfloat16, float32",
    ),
    "unknown field": (
        ["--config.rollout.group_sise=4"],
        "there is no setting rollout.group_sise; did you mean rollout.group_size?",
    ),
    "unknown section": (
        ["--config.optimiser.lr=1"],
        "there is no setting optimiser.lr; did you mean optimizer.lr",
    ),
    "too deep": (
        ["--config.optimizer.lr.x=1"],
        "there is no setting optimizer.lr.x; --help optimizer.lr lists all",
    ),
    "nothing like it": (["--config.zzz=1"], "there is no setting zzz; --help lists all"),
    "a section": (
        ["--config.rollout=1"],
        "rollout is a section: write --config.rollout.NAME=VALUE",
    ),
    "wrong type": (
        ["--config.optimizer.lr=abc"],
        "optimizer.lr=abc must be a number",
    ),
    "not an integer": (
        ["--config.rollout.num_slots=1.5"],
        "rollout.num_slots=1.5 must be a whole number",
    ),
    "not a boolean": (["--config.eval.greedy=maybe"], "eval.greedy=maybe must be True or False"),
    "no value": (["--config.rollout.num_slots"], "rollout.num_slots"),
    "unknown flag": (["--wrokdir=x"], "--wrokdir=x: did you mean --workdir=x?"),
    "argument": (
        ["train"],
        "train: unknown argument; settings are given as --config.section.field=VALUE",
    ),
    "group of one": (
        ["--config.rollout.group_size=1"],
        "rollout.group_size=1: the group_mean_std baseline needs a group of at",
    ),
    "short slot": (
        ["--config.train.pack=8"],
        "train.pack=8 has no room for the 96 tokens that may follow a prompt",
    ),
    "few tokens": (
        ["--config.train.microbatch_tokens=8"],
        "train.microbatch_tokens=8 holds less than one row of ",
    ),
    "unknown task": (["--config.task.name=countup"], "task.name='countup' is not one of countdown"),
    "unknown template": (
        ["--config.task.template=r2"],
        "task.template='r2' is not one of r1, qwen_chat, plain",
    ),
    "long examples": (["--config.rollout.max_new_tokens=15"], "a warm-start example may have "),
    "mesh": (["--config.mesh.data=3"], "mesh data=3 fsdp=1 tensor=1 does not fill the 2 devices"),
    "tensor": (
        [
            "--config.mesh.data=1",
            "--config.mesh.tensor=2",
            "--config.model.arch=tiny-qwen2(num_attention_heads=3,num_key_value_heads=1)",
        ],
        "mesh.tensor=2 does not divide the model's 1 key-value heads",
    ),
    "few pages": (["--config.rollout.num_pages=1"], "rollout.num_pages=1 is too small"),
    "few problems": (
        [
            "--config.eval.problems=99999999",
            "--config.rollout.max_new_tokens=176",
            "--config.memory.check=False",
        ],
        "eval.problems=99999999 is",
    ),
    "no problems": ([*OPTIONS, "--config.task.options=target_max=0"], "no countdown problem found"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line(command, tmp_path: Path, mistake) -> None:
    arguments, message = MISTAKES[mistake]
    workdir = tmp_path / "run"
    assert message in refused(command, TINY, f"--workdir={workdir}", *arguments)
    assert not workdir.exists()


@pytest.mark.parametrize(
    "recipe, message",
    [
        ([], "give a recipe: --config configs/countdown.py"),
        (["--config=configs/no.py"], "--config configs/no.py: no such file. Recipes are calc"),
        (
            ["--config=configs/no.py", "--config.train.steps=3"],
            "--config configs/no.py: no such file. Recipes are calc",
        ),
        (["--config=configs"], "configs"),
        (["--config="], "give a recipe: --config configs/countdown.py"),
        (
            ["--config=configs/countdown.py:tyni"],
            "no preset 'tyni' in this recipe; there are tiny, qwen2.5",
        ),
        (
            ["--config=configs/countdown.py:tiny,gpro"],
            "no algorithm 'gpro'; there are grpo, dr_grpo",
        ),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_a_mistake_in_the_recipe_is_one_line(command, tmp_path: Path, recipe, message) -> None:
    assert message in refused(command, *recipe, f"--workdir={tmp_path / 'run'}")
    assert not list(tmp_path.iterdir())


def test_a_workdir_that_cannot_be_used(command, finished, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    assert "file is not a directory that can be written to" in refused(
        command, TINY, f"--workdir={tmp_path}/file"
    )
    assert "file is not a directory that can be written to" in refused(
        command, TINY, f"--workdir={tmp_path}/file/run"
    )
    assert (tmp_path / "file").read_text() == "mine"
    before = digests(finished)
    message = refused(
        command,
        *RUN,
        f"--workdir={finished}",
        "--config.train.seed=5",
        "--config.rollout.group_size=8",
    )
    assert (
        "belongs to a run with other settings (rollout.group_size: 4 -> 8; train.seed: 0 -> 5)"
        in message
        and "another --workdir" in message
    )
    assert digests(finished) == before


def test_a_corrupt_checkpoint_is_one_line_and_nothing_is_lost(
    command, finished, tmp_path: Path
) -> None:
    workdir = tmp_path / "run"
    shutil.copytree(finished, workdir)
    (workdir / f"checkpoints/{STEPS}/host/metadata").write_text('{"host": {"st')
    before = digests(workdir)
    code, _, err = command(*RUN, f"--workdir={workdir}")
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1
    assert f"checkpoint {workdir}/checkpoints/{STEPS} cannot be read" in err
    assert f"to resume from step {CHECKPOINT_BEFORE_THE_LAST}" in err
    unchanged = {name for name, digest in digests(workdir).items() if before.get(name) == digest}
    unchanged.add("lock")  # names the process that holds it
    assert {name for name in before if not name.startswith("tensorboard/")} <= unchanged


def test_help(command) -> None:
    code, out, err = command("--help")
    assert code == 0 and not err
    for text in (
        "--config configs/countdown.py",
        "--workdir DIR",
        "Presets: tiny, qwen2.5-0.5b",
        "tiny,dr_grpo",
    ):
        assert text in out
    for text in (
        "--config.rollout.group_size=8",
        "Number of rollouts of each prompt (G).",
        "--config.mesh.tensor=1",
    ):
        assert text in out


def test_help_on_a_section_has_only_its_settings(command) -> None:
    code, out, err = command("--help", "rollout")
    assert code == 0 and not err
    assert "group_size=8" in out and "tensor=1" not in out
    assert command("--help=rollout") == (code, out, err)
    assert "no such section or setting; there are rollout" in refused(command, "--help=rolout")


@pytest.mark.parametrize("field", ["path", "tokenizer"])
def test_a_hub_that_never_answers_does_not_hang(
    environment: dict[str, str], tmp_path: Path, field
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        network = environment | {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": address}
        process = launch(network, tmp_path / "run", f"--config.model.{field}=Qwen/Qwen2.5-0.5B")
        try:
            _, err = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise
    assert process.returncode == 2 and "Qwen/Qwen2.5-0.5B" in err and "timed out" in err
    assert [line for line in err.split("\n") if line][-1].startswith("error: ")


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_its_batch(
    environment: dict[str, str], tmp_path: Path
) -> None:
    workdir = tmp_path / "run"
    changes = ("optimizer.lr=1e9", "optimizer.weight_decay=10", "algorithm.entropy_coef=0.1")
    flags = [f"--config.{change}" for change in (*changes, "eval.every=0")]
    process = launch(environment, workdir, *flags)
    _, err = finish(process, code=2)
    path = workdir / "nonfinite_step_2.npz"
    message = [line for line in err.split("\n") if line][-1]
    assert message.startswith("error: step 2: ") and f"its batch is in {path}" in message
    assert "Traceback" not in err
    with np.load(path) as batch:
        assert batch["tokens_0"].shape == batch["weights_0"].shape and batch["weights_0"].any()
    assert [row["step"] for row in rows(workdir / "metrics.jsonl")] == [1]
