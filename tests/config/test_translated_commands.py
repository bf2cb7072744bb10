"""docs/start.md: each jzero command that translates a command of another system is run here.

The commands are read from the page, in its blocks and in its text, so that a new one is run, too.
A run has a tiny model under the name of the published one, and a few rows with the columns of the
published data set. Sizes, lengths and the number of steps are lowered by further flags. All other
settings are those of the page.
"""

import importlib
import json
import re
import shlex
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import datasets
import pytest
import tiny
from runs import Hub, read_jsonl, write_jsonl
from settings_by_name import ROOT, get
from start_page import REWARDS, SYSTEMS, section

from jzero import main
from jzero.__main__ import COMMANDS
from jzero.config import Config
from jzero.problems import problem_sets

pytestmark = [
    pytest.mark.usefixtures("quick_runs"),
]

BLOCK = re.compile(r"```sh\n(.*?)```", re.DOTALL)
# A command in the text, and flags that follow it in code of their own.
INLINE = re.compile(
    r"`((?:python -m jzero\.|jzero )[^`]* [^`]*)`((?:(?:,? with| and) `--[^`]*`)*)", re.DOTALL
)
TRAINING = ("main", "train")


class Translation(NamedTuple):
    """A jzero command of the page."""

    program: str  # a key of COMMANDS, or "main"
    arguments: tuple[str, ...]

    def value(self, flag: str) -> str | None:
        """Returns the word after a flag."""
        words = self.arguments
        return words[words.index(flag) + 1] if flag in words else None


def read_command(text: str) -> Translation:
    words = shlex.split(text.replace("\\\n", " "))
    if words[0] == "jzero":
        return Translation(words[1], tuple(words[2:]))
    assert words[:2] == ["python", "-m"], text
    return Translation(words[2].removeprefix("jzero."), tuple(words[3:]))


def translations(system: str) -> list[Translation]:
    """Returns the commands of a section: those of its blocks, and those of its text."""
    text = section(system)
    commands = BLOCK.findall(text)
    for command, flags in INLINE.findall(re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        commands.append(" ".join([command, *re.findall("`(.*?)`", flags)]))
    return [read_command(command) for command in commands]


def named_translations() -> list[object]:
    """Returns the commands of all sections as parameters of a test."""
    found = []
    for system in SYSTEMS:
        for number, translation in enumerate(translations(system)):
            name = f"{system}: {translation.program}" if number else system
            found.append(pytest.param(translation, id=name))
    return found


# -- Stand-ins for what is published: rows with the same columns -----------------------------------

Row = dict[str, object]


def sums(columns: dict[str, str], numbers: range = range(8)) -> list[Row]:
    """Returns rows of sums: the values of `columns` with {problem} and {answer} filled in."""
    rows = []
    for i in numbers:
        values = {"problem": f"What is {i} + 3?", "answer": str(i + 3)}
        rows.append({name: value.format(**values) for name, value in columns.items()})
    return rows


def with_messages(rows: list[Row], column: str = "prompt") -> list[Row]:
    """Returns the rows with messages of the user instead of text in a column."""
    return [row | {column: [{"role": "user", "content": row[column]}]} for row in rows]


MATH = sums({"problem": "{problem}", "solution": "{problem} ${answer}$.", "answer": "{answer}"})
GSM8K = sums({"question": "{problem}", "answer": "{problem}\n#### {answer}"})
OAT_GSM8K = {"question": "{problem}", "answer": "#### {answer}", "final_answer": "{answer}"}
COUNTDOWN = [
    {
        "input": f"User: Using the numbers [{i}, 5], make {i + 5}.\nAssistant: <think>",
        "gt_answer": json.dumps({"numbers": [i, 5], "target": i + 5}),
    }
    for i in range(1, 11)
]
TRACES = [
    {
        "messages": [
            {"role": "user", "content": row["problem"]},
            {"role": "assistant", "content": f"<think>Add.</think>{row['answer']}"},
        ],
        "num_tokens": 20,
        "source": "math",
    }
    for row in MATH
]
AREAL_MATH = [
    {
        "task": "math",
        "query_id": str(i),
        "prompt": f"<user>{row['problem']}\n<assistant>",
        "solutions": [f"\\boxed{{{row['answer']}}}"],
    }
    for i, row in enumerate(MATH)
]
AREAL_CODE = [
    {
        "task": "code",
        "query_id": f"code-{i}",
        "prompt": f"<user>Print the input times {i}.\n<assistant>",
        "input_output": json.dumps({"inputs": ["1\n", "2\n"], "outputs": [f"{i}\n", f"{2 * i}\n"]}),
    }
    for i in range(8)
]
VERL = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"What is {i} + 3?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(i + 3)},
        "extra_info": {"split": "train", "index": i},
    }
    for i in range(10)
]

# Sets of the hub: their splits by name.
HUB_SETS = {
    "lkevinzc/math-12k": {"train": MATH},
    "lkevinzc/math-eval": dict.fromkeys(("aime", "amc", "math", "minerva", "olympiad_bench"), MATH),
    "lkevinzc/gsm8k": {"train": sums(OAT_GSM8K), "test": sums(OAT_GSM8K, range(8, 10))},
    "lkevinzc/CountDownZero": {"train": COUNTDOWN[:8], "test": COUNTDOWN[8:]},
    "open-r1/OpenR1-Math-220k": {"train": MATH},
    "open-r1/Mixture-of-Thoughts": {"train": TRACES},
}
# Files of the user, by the names that the page gives them.
FILES = {
    "my_set/train.jsonl": with_messages(sums({"prompt": "{problem}", "solution": "{answer}"})),
    "my_set.jsonl": GSM8K,
    "train.parquet": VERL[:8],
    "test.parquet": VERL[8:],
    "boba_106k_0319.jsonl": [*AREAL_MATH, *AREAL_CODE],
    "FILE.jsonl": AREAL_MATH,
    "D/train.jsonl": sums({"C": "{problem}"}),
}


def load_stand_in(
    repository: str, config_name: str | None, revision: str | None
) -> datasets.DatasetDict:
    """Returns the rows of HUB_SETS for a set of the hub."""
    assert repository in HUB_SETS, f"{repository}: add rows with its columns to HUB_SETS"
    splits = HUB_SETS[repository].items()
    return datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name, rows in splits})


def write_file(path: Path, rows: list[Row]) -> None:
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
    else:
        write_jsonl(path, rows)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of a tiny model whose tokens are bytes."""
    return tiny.save_byte_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory of a command, with the files that the page names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("jzero.cli.start_jax", list)  # this process has its devices already
    monkeypatch.setattr("jzero.cli.end_quietly_at_ctrl_c", lambda: None)
    monkeypatch.setattr("jzero.problems.hub_sets.load_from_hub", load_stand_in)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    for name in ("rewards.py", "my.py"):
        (tmp_path / name).write_text(REWARDS)
    for name, rows in FILES.items():
        write_file(tmp_path / name, rows)
    problem_sets.load.cache_clear()  # it keeps sets by their relative paths
    yield tmp_path
    problem_sets.load.cache_clear()


# -- Sizes -----------------------------------------------------------------------------------------

# The largest value of each setting in a test. The second dict has settings whose 0 is no limit.
MOST = {
    "rollout.num_prompts": 8,
    "rollout.group_size": 2,
    "rollout.max_prompt_tokens": 512,
    "rollout.max_new_tokens": 8,
    "rollout.max_reply_tokens": 64,
    "train.packs_per_row": 2,
    "train.microbatch_tokens": 9216,  # a row of the longest episodes on each of 8 devices
    "eval.problems": 2,
    "eval.samples": 2,
    "task.grade_workers": 1,
}
MOST_OF_UNLIMITED = {"rollout.num_slots": 16, "eval.limit": 2}


def small(settings: Config) -> list[str]:
    """Returns flags that lower the sizes of settings."""
    changes: dict[str, object] = {"mesh.data": -1, "mesh.fsdp": 1}
    if settings.sft is None:
        changes |= {"train.steps": 1}
    else:
        changes |= {"sft.epochs": 1, "sft.batch_size": 8, "sft.pack_length": 256}
    for name, most in (MOST | MOST_OF_UNLIMITED).items():
        value = get(settings, name)
        assert isinstance(value, int | float), f"{name=} {value=}"
        if value > most or (value == 0 and name in MOST_OF_UNLIMITED):
            changes[name] = most
    if settings.task.name == "mixed":
        changes["task.sandbox.level"] = tiny.BEST  # the machine may not have the default level
    return [f"--config.{name}={value}" for name, value in changes.items()]


# -- Runs ------------------------------------------------------------------------------------------


def run(program: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a command in this process."""
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    path = "jzero.main:run" if program == "main" else COMMANDS[program].function
    module, _, function = path.partition(":")
    getattr(importlib.import_module(module), function)()


def name_model(model: str, hub_id: str) -> None:
    """Makes a tiny model the one with this name, as a relative path."""
    path = Path(hub_id)
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(model)


@pytest.mark.parametrize("translation", named_translations())
def test_a_translated_command_runs(
    translation: Translation, model: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = translation.program
    arguments = [word.replace("USER/NAME", "me/tiny") for word in translation.arguments]
    execute = partial(run, program, monkeypatch=monkeypatch)
    if program == "main":
        settings = main.parse(arguments).settings
        name_model(model, settings.model.path)
        flags = [*arguments, *small(settings), "--workdir", "run"]
        push = settings.hub.push
        if push is None:
            execute(flags)
        else:
            with Hub() as hub:
                for name, value in hub.environment().items():
                    monkeypatch.setenv(name, value)
                execute(flags)
            assert "model.safetensors" in hub.branches[push.revision]
    else:
        hub_id = translation.value("--model")
        assert hub_id is not None
        if out := translation.value("--out"):
            Path(out).unlink(missing_ok=True)  # another command reads a file with this name
        name_model(model, hub_id)
        execute([*arguments, *small(Config())])

    if program in TRAINING:
        [workdir] = {path.parent for path in directory.glob("**/summary.json")}
        assert json.loads((workdir / "summary.json").read_text())["steps"] == 1
        assert len(read_jsonl(workdir / "metrics.jsonl")) == 1
    elif program == "generate":
        assert len(read_jsonl(Path("FILE.jsonl"))) == 8 * 4
    else:
        assert program == "evaluate", f"{program}: compare what it writes, too"
        [out] = directory.glob("runs/eval-*")
        assert {path.name for path in out.iterdir()} >= {
            "math500-greedy.jsonl",
            "aime24-greedy.jsonl",
        }


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_section_has_a_command_in_a_block(system: str) -> None:
    assert len(BLOCK.findall(section(system))) == 1
