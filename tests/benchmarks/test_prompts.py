"""Prompts of published runs: jzero's token ids against the recorded ones of the original code."""

import json
from pathlib import Path

import pytest

from benchmarks.published import prompts
from benchmarks.published.prompt_sources import take
from benchmarks.published.settings import RUNS
from jzero.problems.prompts import MATH_TEMPLATES

HASHES = json.loads(prompts.HASHES.read_text(encoding="utf-8"))
NEED_NO_TEXT = [run for run, preset in prompts.PUBLISHED_PROMPTS.items() if not preset.text]
NEED_A_TEXT = [run for run, preset in prompts.PUBLISHED_PROMPTS.items() if preset.text]
SENTENCE = "Think first. {question} Then answer in <answer> tags."


def published(run: str, tokenizer: str = "jzero") -> str:
    return HASHES["tokenizers"][tokenizer]["prompts"][run]


def ours(run: str, folder: Path, path: str = "", texts: Path | None = None) -> str:
    return prompts.digest_of_ids(prompts.jzero_ids(run, path, folder, texts))


@pytest.mark.parametrize("run", NEED_NO_TEXT)
def test_a_preset_makes_the_published_prompts(run: str, tmp_path: Path) -> None:
    assert HASHES["tokenizers"]["jzero"]["fingerprint"] == prompts.fingerprint("")
    assert ours(run, tmp_path) == published(run)


def test_settings_besides_the_preset_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """AReaL's file has whole prompts: the preset alone makes others."""
    alone = prompts.jzero_ids("areal", "", tmp_path, with_settings=False)
    assert prompts.digest_of_ids(alone) != published("areal")
    kept = {run: prompts.PUBLISHED_PROMPTS[run] for run in ("areal", "countdown")}
    monkeypatch.setattr(prompts, "PUBLISHED_PROMPTS", kept)

    # A tokenizer is known by its contents, not by the name that it has here.
    assert prompts.compare({"mine": ""}, None) == 0

    areal, countdown = capsys.readouterr().out.splitlines()[1:3]
    assert areal.endswith(
        "equal with task.template=column:prompt task.system_prompt=; the preset alone differs"
    )
    assert countdown.startswith("countdown") and countdown.endswith("equal")


def test_an_unknown_tokenizer_is_an_error_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prompts, "fingerprint", lambda path: "another")
    assert prompts.compare({"mine": ""}, None) == 1
    assert "mine: prompts.json has hashes for the tokenizers jzero" in capsys.readouterr().out


@pytest.mark.parametrize("run", NEED_NO_TEXT)
def test_a_preset_makes_the_published_prompts_with_the_tokenizer_of_qwen(
    run: str, tmp_path: Path, shared: Path
) -> None:
    path = str(shared / "data/qwen2_tokenizer")
    assert HASHES["tokenizers"]["qwen2"]["fingerprint"] == prompts.fingerprint(path)
    assert ours(run, tmp_path, path) == published(run, "qwen2")


@pytest.mark.parametrize("run", NEED_A_TEXT)
def test_own_words_and_an_invented_text_are_not_taken_for_published(
    run: str, tmp_path: Path
) -> None:
    name = prompts.PUBLISHED_PROMPTS[run].text
    template = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    text = template if run == "open_r1_sft" else SENTENCE
    (tmp_path / prompts.TEXTS[name].file).write_text(text, encoding="utf-8")

    hashes = {ours(run, tmp_path), ours(run, tmp_path, texts=tmp_path), published(run)}

    assert len(hashes) == 3  # the text of a file is in the prompts


def test_a_system_prompt_changes_the_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault that the hashes are there to find: a message that the original never sent."""
    config = prompts.preset_config("gsm8k")
    config.task.system_prompt = ""
    monkeypatch.setattr(prompts, "preset_config", lambda _: config)
    assert ours("gsm8k", tmp_path) != published("gsm8k")


def test_every_run_of_the_tables_has_recorded_prompts() -> None:
    for run in RUNS:
        if not run.prompt:  # the text of the data
            continue
        assert run.prompt in HASHES["tokenizers"]["jzero"]["prompts"]
        preset = prompts.PUBLISHED_PROMPTS[run.prompt]
        is_own = any(row.differs and row.topic == "prompt" for row in run.rows)
        assert is_own or not preset.text, f"{run.preset}: its words are not the published ones"


# The check of a file.


def hashes_of(text: str) -> dict[str, dict[str, str]]:
    return {"r1": prompts.hashes_of_text(text)}


def test_a_published_text_is_known_in_both_forms_of_a_template() -> None:
    for text in (SENTENCE, SENTENCE.replace("{question}", "{{ question }}")):
        verdict = prompts.check_text(text, hashes_of(SENTENCE))
        assert verdict.name == "r1"
        assert verdict.line.startswith("this is the published r1")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (SENTENCE.replace("Then", "And"), "3 of its 8 words are the same, and then comes ' And'"),
        (SENTENCE.replace(" {q", "\n{q"), "2 of its 8 words are the same, and then comes"),
        (SENTENCE.removesuffix(" tags."), "7 of its 8 words are the same, and the others are"),
        (SENTENCE + " Now.", "8 of its 8 words are the same, and then comes ' Now.'"),
        (SENTENCE + "\n", "8 of its 8 words are the same, and then comes '\\n'"),
        ("Another text.", "not even a first word is the same"),
    ],
)
def test_another_text_is_refused_with_its_first_difference(text: str, words: str) -> None:
    verdict = prompts.check_text(text, hashes_of(SENTENCE))
    assert not verdict.name
    assert words in verdict.line


def test_the_command_checks_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "own.txt"
    path.write_text(str(MATH_TEMPLATES["r1"].prompt), encoding="utf-8")
    assert prompts.check(path) == 1
    assert capsys.readouterr().out.startswith(f"{path}: this is no")


# Original code is taken out of its file.


def test_a_nested_function_runs_without_the_imports_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "original.py"
    path.write_text(
        "import no_such_module\n"
        "def main(settings):\n"
        "    def make(example: no_such_module.Example, column: str = settings.column):\n"
        "        return settings.before + example[column]\n"
    )

    class Settings:
        column = "q"
        before = ">"

    make = take(path, ["make"], {"settings": Settings})["make"]

    assert make({"q": "1 + 1"}) == ">1 + 1"
