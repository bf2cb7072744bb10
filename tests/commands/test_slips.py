"""A slip of the hand in a flag of any command: one line, at once, with the flag that was meant."""

import os
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jzero import cli, command_flags
from jzero.__main__ import COMMANDS
from jzero.audits import evidence
from jzero.config import known_names
from jzero.config.flags import check_name
from jzero.errors import UserError, slips
from jzero.model import huggingface
from jzero.tasks.suites import SUITES

ROOT = Path(__file__).resolve().parents[2]
MOST_SECONDS = 1.0  # of the processor, for a command line with a mistake


def parser_of(command: str) -> cli.Parser:
    if command == "main":
        return command_flags.recipe()
    return pkgutil.resolve_name(COMMANDS[command].parser or "jzero.sizing.flags:make_parser")()


def with_slip(name: str, start: int) -> Iterator[str]:
    """Yields a name with one letter dropped, doubled, or swapped with the next one.

    start: the index of the first letter that changes.
    """
    for place in range(start, len(name)):
        before, letter, after = name[:place], name[place], name[place + 1 :]
        yield before + after
        yield before + letter * 2 + after
        yield before + after[:1] + letter + after[1:]


FLAGS = [
    (command, flag)
    for command in (*COMMANDS, "main")
    for flag in parser_of(command).flags()
    if flag.startswith("--")
]


@pytest.mark.parametrize(("command", "flag"), FLAGS)
def test_a_slip_in_a_flag_proposes_the_flag(
    command: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = parser_of(command)
    for wrong in set(with_slip(flag, 2)) - {*parser.flags(), "--"}:
        with pytest.raises(SystemExit, match="2"):
            parser.parse_known_args([f"{wrong}=3"])
        [line] = capsys.readouterr().err.splitlines()
        proposals = line.removeprefix(f"error: {wrong}=3: did you mean ").split(" or ")
        assert flag in [proposal.removesuffix("?").removesuffix("=3") for proposal in proposals]


def test_a_slip_in_a_setting_proposes_the_setting() -> None:
    for name in known_names():
        # In the last part: a slip in a section is seen there, too, and has more proposals.
        for wrong in set(with_slip(name, name.rfind(".") + 1)) - {*known_names()}:
            try:
                check_name(wrong, f"--config.{wrong}=3")
            except UserError as error:
                assert name in str(error), wrong
            else:  # an argument of a part that several settings have
                pytest.fail(f"{wrong} was accepted")


def test_a_slip_in_a_command_proposes_the_command() -> None:
    for command in COMMANDS:
        for wrong in set(with_slip(command, 0)) - {*COMMANDS}:
            assert command in slips(wrong, COMMANDS)


# Processes that find each other by themselves: under SLURM, Open MPI and on a Cloud TPU slice.
CLUSTERS = {
    "slurm": {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"},
    "open-mpi": {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_MCA_orte_hnp_uri": "1.0;tcp://127.0.0.1:1"},
    "tpu": {"TPU_WORKER_HOSTNAMES": "127.0.0.1,127.0.0.2", "TPU_SKIP_MDS_QUERY": "1"},
}


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize(
    "arguments",
    [
        ["-m", "jzero", "train", "--modle=x", "--data=y"],
        ["-m", "jzero", "train", "countdown:tiny", "--config.train.stpes=3"],
        ["-m", "jzero", "evaluate", "--modle=x"],
        ["-m", "jzero.main", "--config=configs/countdown.py:tiny", "--config.train.steps=x"],
    ],
    ids=" ".join,
)
def test_every_host_reports_a_mistake_before_the_hosts_join(
    cluster: str, arguments: list[str]
) -> None:
    hosts = []
    for host in ("0", "1"):
        numbers = {"SLURM_PROCID": host, "SLURM_LOCALID": "0", "OMPI_COMM_WORLD_RANK": host}
        variables = os.environ | CLUSTERS[cluster] | numbers | {"TPU_WORKER_ID": host}
        command = [sys.executable, *arguments]
        hosts.append(
            subprocess.Popen(
                command, env=variables, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        )
    for process in hosts:
        out, error = process.communicate(timeout=60)
        assert process.returncode == 2
        assert not out
        assert error.startswith(b"error: ")
        assert error.count(b"\n") == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_a_mistake_in_a_flag_takes_less_than_a_second(command: str) -> None:
    program = (
        "import resource, runpy, sys\n"
        f"sys.argv = ['jzero', {command!r}, '--oot=x']\n"
        "try:\n"
        "    runpy.run_module('jzero', run_name='__main__')\n"
        "except SystemExit as ended:\n"
        "    used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "    print(ended.code, 'jax' in sys.modules, used.ru_utime + used.ru_stime)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    [line] = done.stderr.splitlines()
    assert line.startswith("error: --oot=x: ")
    status, has_jax, seconds = done.stdout.split()
    assert (status, has_jax) == ("2", "False")
    assert float(seconds) < MOST_SECONDS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate"], "the following arguments are required: --out"),
        (["serve", "--port=x", "M"], "argument --port: invalid int value: 'x'"),
        (["chat", "M", "--config.rollout.group_size=x"], "rollout.group_size=x must be a whole"),
        (["export", "--config.train.steps=2"], "--config.train.steps=2: unknown flag; "),
        (["plan", "--confgi=x"], "--confgi=x: did you mean --config=x?"),
        (["compare", "A", "B", "--num_proceses=2"], "did you mean --num_processes=2?"),
        (["train", "--model=M", "--data=D", "stray"], "stray: unknown argument; settings are"),
        (["evaluate", "RUN", "stray"], "stray: unknown argument; settings are given as"),
        (["export", "-x"], "-x: unknown flag; "),
        (["export", "-out=x"], "-out=x: did you mean --out=x?"),
        (["grade", "--config.train.steps=2"], "--config.train.steps=2: unknown flag; "),
    ],
)
def test_other_mistakes_in_flags_are_reported_without_jax(
    arguments: list[str], message: str
) -> None:
    program = (
        "import runpy, sys\n"
        "try:\n"
        "    runpy.run_module('jzero', run_name='__main__')\n"
        "finally:\n"
        "    print('jax' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60
    )
    [line] = done.stderr.splitlines()
    assert message in line
    assert done.stdout.split() == ["False"]


def test_a_value_may_look_like_a_flag() -> None:
    parser = command_flags.chat()
    given, others = parser.parse_known_args(
        ["runs/x", "--system", "--be short", "--config.eval.samples", "2", "--temperature=0"]
    )
    assert (given.model, given.system, given.temperature) == ("runs/x", "--be short", 0.0)
    assert others == ["--config.eval.samples=2"]


def test_choices_of_flags_are_those_of_their_commands() -> None:
    assert tuple(huggingface.DTYPES) == command_flags.EXPORT_DTYPES
    assert tuple(evidence.ROUNDOFF) == command_flags.AUDIT_DTYPES
    assert command_flags.LOGPROB_CONVENTIONS == evidence.CONVENTIONS
    assert command_flags.LOGPROB_CONVENTIONS[0] == evidence.SAMPLED
    for name in ("aime24", "math500"):
        assert name in SUITES
        assert name in command_flags.evaluate().format_help()
