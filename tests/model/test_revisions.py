"""Revisions of models and data sets on the hub: which commit is read, and what notes it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import reference
from runs import ROOT

from jzero.config import ModelConfig
from jzero.errors import UserError
from jzero.files import split_revision
from jzero.model import huggingface
from jzero.model.base_model import read_base_model
from jzero.model.hub import commit_of, is_on_hub
from jzero.planning.models import is_known
from jzero.problems import problem_sets
from jzero.run.history import history_of
from jzero.run.model_card import CardOptions, make_card

MAIN, OLDER = "1" * 40, "2" * 40


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Qwen/Qwen2.5-3B", ("Qwen/Qwen2.5-3B", None)),
        ("Qwen/Qwen2.5-3B#v1", ("Qwen/Qwen2.5-3B", "v1")),
        ("Qwen/Qwen2.5-3B#refs/pr/1", ("Qwen/Qwen2.5-3B", "refs/pr/1")),
        ("main@openai/gsm8k#e53f048", ("main@openai/gsm8k", "e53f048")),
        ("Qwen/Qwen2.5-3B#", ("Qwen/Qwen2.5-3B#", None)),
        ("runs/a/b#c", ("runs/a/b#c", None)),
        ("#c", ("#c", None)),
    ],
)
def test_a_name_is_split_into_id_and_revision(name: str, expected: tuple[str, str | None]) -> None:
    assert split_revision(name) == expected


def test_a_path_that_exists_has_no_revision(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/set#1.jsonl").write_text('{"problem": "1+1?", "answer": "2"}\n')
    monkeypatch.chdir(tmp_path)

    assert split_revision("data/set#1.jsonl") == ("data/set#1.jsonl", None)
    assert len(problem_sets.load_split("data/set#1.jsonl", "train")) == 1


READ = """
import json
from jzero.config import Config, ModelConfig
from jzero.config.checks import read_positions
from jzero.model import huggingface
from jzero.model.hub import commit_of

found = {}
for name in ("me/tiny", "me/tiny#v1"):
    directory = huggingface.resolve(name, ("config.json",))
    found.setdefault(name, [commit_of(directory), read_positions(name)])
print(json.dumps(found))
"""


def test_the_revision_that_is_named_is_read(tmp_path: Path, environment: dict[str, str]) -> None:
    """A cache of the hub, as its client lays it out, holds two commits of a model."""
    repository = tmp_path / "hub/models--me--tiny"
    model = {"model_type": "qwen2"}
    for commit, positions, ref in ((MAIN, 512, "main"), (OLDER, 256, "v1")):
        snapshot = repository / "snapshots" / commit
        snapshot.mkdir(parents=True)
        config = model | {"max_position_embeddings": positions}
        (snapshot / "config.json").write_text(json.dumps(config))
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / ref).write_text(commit)

    done = subprocess.run(
        [sys.executable, "-c", READ],
        cwd=ROOT,
        env=environment | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )

    assert json.loads(done.stdout) == {"me/tiny": [MAIN, 512], "me/tiny#v1": [OLDER, 256]}


def test_a_data_set_is_asked_for_at_its_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked = []

    def load_dataset(*arguments: object, **options: object) -> dict[str, object]:
        asked.append((*arguments, options["revision"]))
        return {}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    problem_sets.load.cache_clear()

    problem_sets.load("main@me/sums#v1")
    problem_sets.load("me/sums")

    assert asked == [("me/sums", "main", "v1"), ("me/sums", None, None)]
    problem_sets.load.cache_clear()


def test_what_is_written_keeps_the_revision_and_the_card_links_to_the_model(
    tmp_path: Path,
) -> None:
    settings = reference.settings(train={"microbatch_tokens": 240})
    settings.model = ModelConfig(path="Qwen/Qwen2.5-0.5B#v1")
    settings.task.data = "main@openai/gsm8k#e53f048"
    (tmp_path / "versions.json").write_text("{}")
    base = read_base_model(reference.settings().model)

    [stage] = history_of(settings, 3, None)
    card = make_card(settings, 3, {}, base, CardOptions(tmp_path, "float32"))

    assert stage.start == "Qwen/Qwen2.5-0.5B#v1"
    assert stage.data == ["openai/gsm8k#e53f048"]
    assert card.data.base_model == "Qwen/Qwen2.5-0.5B"
    assert card.data.datasets == ["openai/gsm8k"]
    assert '| `model.path` | `"Qwen/Qwen2.5-0.5B#v1"` |' in card.text


def test_a_known_model_with_a_revision_can_be_planned() -> None:
    assert is_known("Qwen/Qwen2.5-3B#v1")
    assert is_on_hub("Qwen/Qwen2.5-3B#v1")
    assert commit_of(Path("runs/model")) == ""
    with pytest.raises(UserError, match="no such directory"):
        huggingface.resolve("./nowhere#v1")
