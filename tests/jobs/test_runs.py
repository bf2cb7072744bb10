"""Whole runs with separate samplers: bit for bit the run that samples by itself."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import reference
import runs
import tiny
from job_streams import assert_continued, sequences_in
from lying_samplers import UNDETECTED, Lie, lies_of
from scoring_server import ScoringServer, served
from servers import free_port

from jzero.config import ModelConfig
from jzero.jobs.requests import Result
from jzero.jobs.store import FolderStore
from jzero.jobs.store_server import KEY_VARIABLE
from jzero.model import huggingface
from jzero.model.base_model import read_base_model

STEPS = 4
CHANGES = (
    f"--config.train.steps={STEPS}",
    "--config.warm_start.steps=10",
    "--config.eval.every=0",
    "--config.eval.problems=0",
    "--config.task.grade_workers=1",
)


def jobs(store: Path, **settings: object) -> str:
    """Returns the flag of separate jobs."""
    values = {
        "store": str(store),
        "lease_seconds": 3.0,
        "groups_per_request": 2,
        "max_staleness": 0,
    } | settings
    arguments = ",".join(f"{name}={value!r}" for name, value in values.items())
    return f"--config.rollout.placement=jobs({arguments})"


def launch_recipe(environment: dict[str, str], workdir: Path, *arguments: str) -> subprocess.Popen:
    """Starts a trainer, whose recipe is among the arguments."""
    return subprocess.Popen(
        [sys.executable, *runs.PROGRAM, *arguments, f"--workdir={workdir}"],
        cwd=runs.ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def start_sampler(environment: dict[str, str], store: Path | str, *flags: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "jzero.sample", f"--join={store}", *flags],
        cwd=runs.ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# A sampler that pauses twice before every decode call, and looks for new weights as often. Its
# pauses are counted in a file.
SLOWLY = """
import os
import time

from jzero import sample
from jzero.jobs import leases, prefetch

seconds = float(os.environ["PAUSE_SECONDS"])
renew = leases.Leases.renew


def renew_slowly(self, request):
    time.sleep(seconds)
    renew(self, request)
    with open(os.environ["CALLS"], "a") as file:
        file.write(".")


prefetch.LOOKS = 0.5
leases.Leases.renew = renew_slowly
sample.main()
"""


def start_slow_sampler(
    environment: dict[str, str], store: Path, calls: Path, seconds: float, *flags: str
) -> subprocess.Popen:
    calls.touch()
    return subprocess.Popen(
        [sys.executable, "-c", SLOWLY, f"--join={store}", *flags],
        cwd=runs.ROOT,
        env=environment | {"PAUSE_SECONDS": str(seconds), "CALLS": str(calls)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_until(is_done: Callable[[], bool], *processes: subprocess.Popen) -> None:
    """Waits while the processes run."""
    while not is_done():
        for process in processes:
            assert process.poll() is None, process.communicate()
        time.sleep(0.005)


def finish(
    process: subprocess.Popen, *others: subprocess.Popen, code: int = 0, seconds: float = 300
) -> tuple[str, str]:
    """Waits for a process as `runs.finish` does; fails at once if another process fails.

    A sampler waits for ever for a trainer that ended with an error, and a trainer for its samplers.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            out, err = process.communicate(timeout=0.2)
            break
        except subprocess.TimeoutExpired:
            assert time.monotonic() < deadline, f"still runs after {seconds} s: {process.args}"
        for other in others:
            # A process that has done its part may end before the one that the test waits for.
            assert other.poll() in (None, 0), other.communicate()
    assert process.returncode == code, err[-3000:]
    return out, err


def metrics_of(workdir: Path) -> list[dict]:
    """Returns the metrics that do not depend on who samples."""
    groups = ("jobs/", "async/", "publish/")
    rows = runs.timeless(workdir / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith(groups)} for row in rows]


def weights_of(workdir: Path) -> bytes:
    return max(workdir.glob("export-*/model.safetensors")).read_bytes()


def test_a_run_whose_sampler_is_killed_is_the_synchronous_run(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    """The lost lease goes to a sampler that joins over HTTP; a replay gives the same bytes."""
    store, workdir = tmp_path / "store", tmp_path / "jobs"
    environment = environment | {KEY_VARIABLE: "secret"}
    address = f"127.0.0.1:{free_port()}"
    runs.finish(runs.launch(environment, tmp_path / "synchronous", *CHANGES))

    # One request a step, which is decoded as the synchronous run decodes the step.
    whole_steps = jobs(store, groups_per_request=4, serve=address)
    trainer = runs.launch(environment, workdir, *CHANGES, whole_steps)
    lost = start_sampler(environment, store, "--name=lost")
    wait_until(lambda: leased(store), trainer, lost)
    lost.kill()
    lost.communicate()
    other = start_sampler(environment, f"http://{address}", "--name=other")
    finish(trainer, other)
    out, _ = finish(other)

    assert "the run has all of its rollouts" in out
    assert metrics_of(workdir) == metrics_of(tmp_path / "synchronous")
    assert weights_of(workdir) == weights_of(tmp_path / "synchronous")
    log = runs.rows(workdir / "jobs.jsonl")
    assert [row["step"] for row in log] == list(range(1, STEPS + 1))
    assert all(row["version"] == row["step"] - 1 for row in log)
    assert not list((store / "requests").iterdir())

    replayed = run_replay(environment, workdir, "--requests=2")
    assert replayed.returncode == 0, replayed.stderr
    assert "2 requests sampled again" in replayed.stdout
    change_a_log_prob(workdir, log[-1]["request"])
    replayed = run_replay(environment, workdir, "--requests=1")
    assert replayed.returncode == 1
    assert "its file does not hold the logged rollouts" in replayed.stdout


def test_a_liar_beside_a_sampler_changes_no_number(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    """Every lie about every request is told while the trainer waits for the honest sampler."""
    settings: dict[str, object] = {"regrade_share": 1.0}
    trainer = runs.launch(
        environment, tmp_path / "quiet", *CHANGES, jobs(tmp_path / "quiet-store", **settings)
    )
    sampler = start_sampler(environment, tmp_path / "quiet-store")
    finish(trainer, sampler)
    finish(sampler)
    honest: dict[str, Result] = {}
    for path in (tmp_path / "quiet" / "rollouts").iterdir():
        if not path.suffix:
            honest[path.name] = Result.parse(path.read_bytes())
    older = honest[min(honest)]
    # Counters within their bounds only describe the work of a sampler.
    lies: dict[str, list[Lie]] = {}
    for request, result in honest.items():
        told = [lie for lie in lies_of(result, older, 1) if not lie.name.endswith(UNDETECTED)]
        lies[request] = [lie for lie in told if not lie.name.startswith(("counter", "grading"))]

    store, workdir = tmp_path / "store", tmp_path / "lied"
    workdir.mkdir()
    # The same run, so that its requests are those of the quiet one.
    shutil.copy(tmp_path / "quiet" / "jobs.json", workdir)
    trainer = runs.launch(environment, workdir, *CHANGES, jobs(store, **settings))
    sampler = start_sampler(environment, store)
    num_told = 0
    liar = FolderStore(store)
    while trainer.poll() is None:
        for request in liar.names("requests"):
            for lie in lies[request][:10]:
                liar.write(f"results/{lie.file}", lie.data)
                num_told += 1
            lies[request] = lies[request][10:] + lies[request][:10]
        time.sleep(0.02)
    out, _ = finish(trainer, sampler)
    finish(sampler)
    assert num_told > 100 and "refused a result of" in out
    assert metrics_of(workdir) == metrics_of(tmp_path / "quiet")
    assert weights_of(workdir) == weights_of(tmp_path / "quiet")
    replayed = run_replay(environment, workdir, "--requests=1")
    assert replayed.returncode == 0, replayed.stdout


def leased(store: Path) -> bool:
    """Whether a sampler works on a request."""
    return any((store / "leases").glob("[!.]*"))


def run_replay(
    environment: dict[str, str], workdir: Path, *flags: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "jzero.replay", str(workdir), *flags],
        cwd=runs.ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def change_a_log_prob(workdir: Path, request: str) -> None:
    path = workdir / "rollouts" / request
    result = Result.parse(path.read_bytes())
    first, *others = result.rollouts
    changed = replace(first, tokens=first.tokens.replaced(logps=first.tokens.logps * 2))
    path.write_bytes(replace(result, rollouts=[changed, *others]).to_bytes())


# Each with random weights: what the episodes are about does not matter, only that they have turns.
GUESS = (
    f"--config={runs.ROOT}/configs/guess.py:tiny",
    "--config.warm_start=none",
    "--config.rollout.num_prompts=8",
    "--config.rollout.group_size=4",
    "--config.train.minibatches=1",
    "--config.train.microbatch_tokens=464",
    "--config.train.steps=3",
    "--config.train.checkpoint_every=3",
    "--config.eval.every=0",
    "--config.eval.problems=0",
    "--config.task.grade_workers=1",
)
ENVIRONMENT = (
    *GUESS,
    "--config.task.options=",
    "--config.task.name=environment",
    "--config.task.turn_reward=score",
)
FP8 = (
    "--config.rollout.weights=fp8",
    "--config.rollout.kv_dtype=fp8",
    "--config.algorithm.correction=token_truncate",
)
# The warm start shows calls of the calculator, so that some responses have them.
TOOLS = (
    f"--config={runs.ROOT}/configs/calculator.py:tiny",
    "--config.warm_start.steps=300",
    "--config.rollout.num_prompts=4",
    "--config.rollout.group_size=4",
    "--config.train.microbatch_tokens=1936",
    *GUESS[6:],
)

COUNTER = '''
class Counter:
    """Says how many responses it has had: a reply depends on all turns of its episode."""

    def reset(self, row, seed):
        self.number = seed % 7
        self.responses = 0
        return "1-7\\n"

    def step(self, response):
        self.responses += 1
        score = (self.number + sum(response.encode())) % 5
        return f"{self.responses}", {"score": score / 4, "correct": score == 4}, False
'''


@pytest.mark.parametrize("kind", ["environment", "tools", "turns in fp8"])
def test_episodes_are_those_of_the_synchronous_run(
    tmp_path: Path, environment: dict[str, str], kind: str
) -> None:
    """Environments, tools and graders run beside the sampler, and a killed one loses nothing.

    A sampler rounds the weights as the synchronous run does, and both export the trainer's.
    """
    store = tmp_path / "store"
    (tmp_path / "counter.py").write_text(COUNTER)
    recipes = {
        "environment": (*ENVIRONMENT, f"--config.task.environment={tmp_path}/counter.py:Counter"),
        "tools": TOOLS,
        "turns in fp8": (*GUESS, *FP8),
    }

    def launch(workdir: Path, *changes: str) -> subprocess.Popen:
        return launch_recipe(environment, workdir, *recipes[kind], *changes)

    runs.finish(launch(tmp_path / "synchronous"))
    trainer = launch(tmp_path / "jobs", jobs(store, groups_per_request=8 if kind != "tools" else 4))
    lost = start_sampler(environment, store)
    wait_until(lambda: leased(store), trainer, lost)
    lost.kill()
    lost.communicate()
    sampler = start_sampler(environment, store)
    finish(trainer, sampler)
    finish(sampler)

    metrics, expected = metrics_of(tmp_path / "jobs"), metrics_of(tmp_path / "synchronous")
    for row in (*metrics, *expected):
        del row["rollout/slot_utilization"]  # slots wait for replies for as long as these take
    assert metrics == expected
    assert weights_of(tmp_path / "jobs") == weights_of(tmp_path / "synchronous")
    assert max(row["turns/mean"] for row in metrics if "turns/mean" in row) > 1
    replayed = run_replay(environment, tmp_path / "jobs", "--requests=1")
    assert replayed.returncode == 0, replayed.stdout


def save_model_of_runs(path: Path) -> Path:
    """Writes a model with the architecture and the tokenizer of `runs.RUN`, and other weights."""
    base = read_base_model(ModelConfig(arch=runs.ARCH))
    params = reference.random_params(base.model)
    huggingface.save(path, base.model, params, dtype="float32", hf_config_extra={})
    base.tokenizer.save_pretrained(path)
    return path


# Parts of the trainer that samplers do not have: an algorithm, its flags, and a metric of the part.
TRAINER_PARTS = {
    "critic": ("ppo", (), "critic/loss"),
    "critic in a first phase": ("ppo", ("critic.warmup_steps=2",), "critic/loss"),
    "model": ("distill_grpo", ("teacher=model(path={model})",), "distill/kl"),
    "policy": ("distill_grpo", ("teacher=policy(prompt=7{{prompt}})",), "distill/kl"),
    "reference": ("distill_grpo", ("teacher=reference",), "distill/kl"),
    "reference with a prompt": (
        "distill_grpo",
        ("teacher=reference(prompt=7{{prompt}})", "algorithm.reference_every=2"),
        "distill/kl",
    ),
    "server": ("distill_grpo", ("teacher=server(url={url})",), "distill/kl"),
}


@pytest.mark.parametrize("part", TRAINER_PARTS)
def test_critic_and_teacher_score_what_separate_jobs_sample(
    tmp_path: Path, environment: dict[str, str], part: str
) -> None:
    """Bit for bit the run that samples by itself."""
    algorithm, settings, metric = TRAINER_PARTS[part]
    model = save_model_of_runs(tmp_path / "model")
    recipe = f"--config={runs.ROOT}/configs/countdown.py:tiny,{algorithm}"
    base = read_base_model(ModelConfig(path=str(model)))
    server = ScoringServer(reference.random_params(base.model), base.model, base.tokenizer)
    with served(server.answer) as url:
        flags = [f"--config.{item.format(model=model, url=url)}" for item in settings]
        arguments = [recipe, *runs.RUN[1:], *CHANGES, *flags]
        runs.finish(launch_recipe(environment, tmp_path / "synchronous", *arguments))
        store = jobs(tmp_path / "store", groups_per_request=4)
        trainer = launch_recipe(environment, tmp_path / "jobs", *arguments, store)
        sampler = start_sampler(environment, tmp_path / "store")
        finish(trainer, sampler)
        finish(sampler)

    metrics = metrics_of(tmp_path / "jobs")
    assert metrics == metrics_of(tmp_path / "synchronous")
    assert weights_of(tmp_path / "jobs") == weights_of(tmp_path / "synchronous")
    assert [row["step"] for row in metrics if metric in row] == list(range(1, STEPS + 1))
    assert any(row[metric] for row in metrics)  # the first policy is its own reference


def test_a_terminated_sampler_hands_its_request_back(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    """Its lease would last for an hour, and the next sampler gets the request at once."""
    store = tmp_path / "store"
    trainer = runs.launch(environment, tmp_path / "run", *CHANGES, jobs(store, lease_seconds=3600))
    first = start_sampler(environment, store)
    wait_until(lambda: leased(store), trainer, first)
    first.send_signal(signal.SIGTERM)
    out, _ = finish(first, trainer)
    assert "SIGTERM" in out
    second = start_sampler(environment, store)
    finish(trainer, second)
    finish(second)


def test_a_killed_trainer_continues_to_the_same_numbers(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    """With stale weights: step n is sampled by version n - 2, also after a resume."""
    changes = (*CHANGES, "--config.train.checkpoint_every=1")
    for name in ("whole", "killed"):
        store, workdir = tmp_path / f"{name}-store", tmp_path / name
        trainer = runs.launch(environment, workdir, *changes, jobs(store, max_staleness=1))
        sampler = start_sampler(environment, store)
        if name == "killed":
            runs.wait_for(trainer, workdir / "metrics.jsonl", 2)
            trainer.kill()
            trainer.communicate()
            trainer = runs.launch(environment, workdir, *changes, jobs(store, max_staleness=1))
        finish(trainer, sampler)
        finish(sampler)
    assert metrics_of(tmp_path / "killed") == metrics_of(tmp_path / "whole")
    assert weights_of(tmp_path / "killed") == weights_of(tmp_path / "whole")
    versions = [row["version"] for row in runs.rows(tmp_path / "whole" / "jobs.jsonl")]
    assert versions == [0, 0, 0, 0, 1, 1, 2, 2]


def test_requests_of_any_weights_stay_within_the_bound(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    """schedule=arrival: the log says which weights each request had."""
    store, workdir = tmp_path / "store", tmp_path / "run"
    settings = {"schedule": "arrival", "groups_per_request": 1}
    trainer = runs.launch(environment, workdir, *CHANGES, jobs(store, max_staleness=2, **settings))
    samplers = [start_sampler(environment, store) for _ in range(2)]
    finish(trainer, *samplers)
    for sampler in samplers:
        finish(sampler)
    log = runs.rows(workdir / "jobs.jsonl")
    assert len({row["request"] for row in log}) == len(log) == 4 * STEPS
    assert all(row["step"] - 3 <= row["version"] < row["step"] for row in log)
    for row in runs.rows(workdir / "metrics.jsonl"):
        assert sum(row[f"async/staleness_{n}"] for n in range(3)) == pytest.approx(1)


# 12 calls for the longest response.
SMALL_CALLS = "--config.rollout.decode_steps=2"


def test_samplers_switch_their_weights_between_two_tokens(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    """The log has all versions of a request, no token is too old, and a replay names the rest."""
    store, workdir = tmp_path / "store", tmp_path / "run"
    settings = {"schedule": "arrival", "switch": "tokens", "groups_per_request": 1}
    changes = (
        *CHANGES,
        SMALL_CALLS,
        "--config.train.steps=8",
        jobs(store, max_staleness=2, **settings),
    )
    trainer = runs.launch(environment, workdir, *changes)
    samplers = [
        start_slow_sampler(environment, store, tmp_path / f"calls-{number}", 0.05)
        for number in range(2)
    ]
    finish(trainer, *samplers)
    for sampler in samplers:
        finish(sampler)

    log = runs.rows(workdir / "jobs.jsonl")
    assert len({row["request"] for row in log}) == len(log) == 4 * 8
    num_mixed_rollouts = 0
    for row in log:
        versions = [row["version"], *(version for version, _ in row["later_weights"])]
        assert row["step"] - 3 <= versions[0] and versions[-1] < row["step"]
        result = Result.parse((workdir / "rollouts" / row["request"]).read_bytes())
        by_rollout = [set(r.tokens.versions[r.tokens.sampled].tolist()) for r in result.rollouts]
        assert set().union(*by_rollout) == set(versions)
        num_mixed_rollouts += sum(len(found) > 1 for found in by_rollout)
    assert num_mixed_rollouts
    for row in runs.rows(workdir / "metrics.jsonl"):
        assert sum(row[f"async/staleness_{n}"] for n in range(3)) == pytest.approx(1)

    num_mixed = sum(bool(row["later_weights"]) for row in log)
    replayed = run_replay(environment, workdir)
    assert replayed.returncode == 0, replayed.stdout
    assert f"{len(log) - num_mixed} requests sampled again" in replayed.stdout
    assert replayed.stdout.count("several versions sampled it") == num_mixed
    assert f"and {num_mixed} cannot be sampled again" in replayed.stdout


@pytest.mark.parametrize("reason", ["SIGTERM", "preemption notice"])
def test_the_tokens_of_a_stopped_sampler_are_not_sampled_again(
    tmp_path: Path, environment: dict[str, str], reason: str
) -> None:
    store, workdir, calls = tmp_path / "store", tmp_path / "run", tmp_path / "calls"
    settings = {"schedule": "arrival", "groups_per_request": 4, "lease_seconds": 3600}
    trainer = runs.launch(environment, workdir, *CHANGES, SMALL_CALLS, jobs(store, **settings))
    with runs.Metadata() as metadata:
        # Only the sampler is on a spot machine.
        on_spot = environment | {"GCE_METADATA_HOST": metadata.host}
        notices = "--config.train.preemption_notice=gce"
        first = start_slow_sampler(on_spot, store, calls, 0.3, notices)
        wait_until(lambda: calls.stat().st_size >= 9, trainer, first)
        if reason == "SIGTERM":
            first.send_signal(signal.SIGTERM)
        else:
            metadata.answer = "TRUE"
        out, _ = finish(first, trainer)
    assert f"{reason}: " in out and "holds no request" in out
    assert not leased(store)
    [partial] = (store / "partials").glob("[!.]*")
    sequences = sequences_in(partial.read_bytes())
    num_tokens = sum(int(sequence.tokens.sampled.sum()) for sequence in sequences)

    second = start_sampler(environment, store)
    finish(trainer, second)
    out, _ = finish(second)
    assert f"continues {num_tokens} tokens of another sampler" in out
    [row, *others] = runs.rows(workdir / "jobs.jsonl")
    assert row["request"] == partial.name
    assert row["continued_tokens"] == num_tokens > 0
    assert not any(other["continued_tokens"] for other in others)
    result = Result.parse((workdir / "rollouts" / partial.name).read_bytes())
    assert_continued(result, sequences)
    num_sampled = sum(int(rollout.tokens.sampled.sum()) for rollout in result.rollouts)
    num_decoded = result.counters["decoded_tokens"] - result.counters["wasted_tokens"]
    assert num_decoded <= num_sampled - num_tokens
    assert not list((store / "partials").glob("[!.]*"))
    [first_step, *_] = runs.rows(workdir / "metrics.jsonl")
    assert first_step["jobs/continued_tokens"] == num_tokens

    replayed = run_replay(environment, workdir)
    assert replayed.returncode == 0, replayed.stdout
    assert replayed.stdout.count("a second sampler continued it") == 1


@pytest.mark.parametrize("base", ["native", "int8"])
def test_with_an_adapter_only_the_adapter_is_sent(
    tmp_path: Path, environment: dict[str, str], base: str
) -> None:
    """Samplers load the base themselves, round it as the trainer does, and refuse another one."""
    model, store = tiny.save_byte_model(tmp_path / "model"), tmp_path / "store"
    changes = (
        *(flag for flag in (*runs.RUN, *CHANGES) if "warm_start" not in flag),
        f"--config.model.path={model}",
        "--config.model.adapter.rank=2",
        f"--config.model.base={base}",
        "--config.warm_start=none",
        "--config.rollout.max_prompt_tokens=300",
        "--config.train.microbatch_tokens=2048",
        "--config.train.steps=2",
    )
    runs.finish(launch_recipe(environment, tmp_path / "synchronous", *changes))
    whole_steps = jobs(store, groups_per_request=4)
    trainer = launch_recipe(environment, tmp_path / "jobs", *changes, whole_steps)
    shutil.copytree(model, tmp_path / "other")
    weights = tmp_path / "other" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    other = start_sampler(environment, store, f"--config.model.path={tmp_path / 'other'}")
    _, err = finish(other, trainer, code=2)
    assert "holds other weights than the trainer's base" in err
    sampler = start_sampler(environment, store)
    finish(trainer, sampler)
    finish(sampler)

    assert metrics_of(tmp_path / "jobs") == metrics_of(tmp_path / "synchronous")
    manifest = json.loads((store / "snapshots" / "00000000.json").read_text())
    assert all(entry["name"].endswith(("/a", "/b")) for entry in manifest["entries"])


def test_mistakes_are_one_line(tmp_path: Path, environment: dict[str, str]) -> None:
    store = tmp_path / "store"
    store.mkdir()
    (store / "run.json").write_text(json.dumps({"run": "another", "config": {}}))
    _, err = runs.finish(runs.launch(environment, tmp_path / "run", *CHANGES, jobs(store)), 2)
    assert "has the files of another run: give a store of its own to every run" in err
    shutil.rmtree(store)

    workdir = tmp_path / "other"
    trainer = runs.launch(environment, workdir, *CHANGES, jobs(store))
    try:
        wait_until((store / "run.json").exists, trainer)
        changed = start_sampler(environment, store, "--config.rollout.temperature=0.5")
        _, err = finish(changed, trainer, code=2)
        assert "rollout.temperature=0.5: the trainer has 1.0: remove it" in err
        (store / "decoder.json").write_text(json.dumps({"device": "TPU v9"}))
        _, err = finish(start_sampler(environment, store), trainer, code=2)
        assert "device: cpu instead of TPU v9" in err
    finally:
        trainer.kill()
        trainer.communicate()
