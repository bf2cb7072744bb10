"""A hub that does not answer: the error comes in seconds, and cached copies are used."""

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import datasets
import pytest
from datasets.arrow_writer import ArrowWriter

from jzero.errors import UserError
from jzero.model import huggingface
from jzero.problems import hub_sets, problem_sets


@pytest.fixture(autouse=True)
def caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Returns an empty cache of data sets, with the hub's client not offline."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "sets"))
    return tmp_path / "sets"


def use_port(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    address = f"http://127.0.0.1:{port}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    monkeypatch.setattr("datasets.config.HF_ENDPOINT", address)


@pytest.fixture
def closed_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Directs the hub's client to a port of this machine that refuses connections."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        use_port(monkeypatch, unused.getsockname()[1])


@pytest.fixture
def silent_port(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Directs the hub's client to a port that accepts connections and never answers."""
    monkeypatch.setattr(hub_sets, "HUB_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        use_port(monkeypatch, silent.getsockname()[1])
        yield


@pytest.mark.parametrize(
    ("port", "reason"), [("closed_port", "refused"), ("silent_port", "timed out")]
)
def test_an_unreachable_hub_is_one_line_within_seconds(
    port: str, reason: str, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(port)
    start = time.monotonic()

    with pytest.raises(UserError, match=f"the hub is unreachable .*{reason}") as of_data:
        problem_sets.load("nobody/none")
    with pytest.raises(UserError, match=f"the hub is unreachable .*{reason}") as of_model:
        huggingface.resolve("nobody/none")

    # The retries of the hub's client alone would take 23 seconds.
    assert time.monotonic() - start < 10
    assert "give a file or a directory" in str(of_data.value)
    assert "give its directory" in str(of_model.value)
    assert "\n" not in str(of_data.value) + str(of_model.value)


def test_a_cached_copy_is_used_while_the_hub_is_unreachable(
    closed_port: None, caches: Path
) -> None:
    folder = caches / "nobody___copied/default/0.0.0/5eedc0de"
    folder.mkdir(parents=True)
    with ArrowWriter(path=str(folder / "copied-train.arrow")) as writer:
        writer.write({"question": "1 + 1?", "answer": "2"})
        num_examples, num_bytes = writer.finalize()
    datasets.DatasetInfo(
        features=datasets.Features(
            {"question": datasets.Value("string"), "answer": datasets.Value("string")}
        ),
        dataset_name="copied",
        config_name="default",
        builder_name="parquet",
        version="0.0.0",
        splits={"train": {"name": "train", "num_bytes": num_bytes, "num_examples": num_examples}},
    ).write_to_directory(str(folder))

    loaded = problem_sets.load_split("nobody/copied", "train")

    assert loaded["question"] == ["1 + 1?"]
    # Later requests are not offline.
    assert not datasets.config.HF_HUB_OFFLINE
