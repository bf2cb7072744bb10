"""config.json files made from transformers' own classes: equal logits, or refused by name.

`python benchmarks/family_configs.py` compares all of them; here are a few of each family.
"""

import importlib
import random
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.peer
ROOT = Path(__file__).resolve().parents[2]
FAMILIES = (
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "llama",
    "mistral",
    "gemma2",
    "gemma3_text",
    "gemma3",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "qwen3_5",
)


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("family_configs")


def assert_no_mistakes(benchmark: ModuleType, files: list) -> None:
    results = benchmark.run(files)
    mistakes = [
        f"{result.outcome} {file}: {result.note}"
        for file, result in zip(files, results, strict=True)
        if result.outcome in ("different", "unnamed")
    ]
    assert not mistakes


def test_every_field_of_the_classes_is_changed(benchmark: ModuleType) -> None:
    transformers = pytest.importorskip("transformers")
    assert set(benchmark.GENERATED) == set(FAMILIES)
    for family, generated in benchmark.GENERATED.items():
        changed = {name for file in benchmark.single_changes(family) for name, _ in file.changes}
        config_class = getattr(transformers, generated.config_class)
        assert {field.name for field in fields(config_class)} <= changed


LINEAR = {"rope_type": "linear", "factor": 8.0}
WITH_FAULTS = [
    ("gemma3_text", "rope_parameters", {"full_attention": None, "sliding_attention": LINEAR}),
    ("gemma3_text", "_sliding_window_pattern", 2),
    ("gemma2", "attn_logit_softcapping", 0.0),
    ("mistral", "sliding_window", 8),
]


def test_files_that_were_another_model_without_a_word(benchmark: ModuleType) -> None:
    files = [benchmark.File(family, ((name, value),)) for family, name, value in WITH_FAULTS]
    assert_no_mistakes(benchmark, files)


def test_both_programs_read_a_file_alike(benchmark: ModuleType) -> None:
    files = []
    for family in ("qwen3_moe", "gemma3_text", "qwen3_5_text"):
        files += benchmark.pairs_of_changes(family, 1, seed=1)
    assert_no_mistakes(benchmark, files)


@pytest.mark.parametrize("family", FAMILIES)
def test_both_programs_read_many_files_of_a_family_alike(
    benchmark: ModuleType, family: str
) -> None:
    files = random.Random(family).sample(benchmark.single_changes(family), 10)
    assert_no_mistakes(benchmark, files + benchmark.pairs_of_changes(family, 10, seed=2))
