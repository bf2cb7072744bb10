"""Tokenizers: that of countdown, real Qwen files, and what is refused."""

import json
import shutil
import string
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jzero.config import TaskConfig
from jzero.model import end_tokens, tokenizer
from jzero.tasks import countdown, countdown_warm_start

TOKENIZER = tokenizer.countdown()
ASCII = string.digits + string.ascii_letters + string.punctuation + " \n"


@pytest.fixture
def qwen(shared: Path) -> Path:
    """Returns a directory with the tokenizer of Qwen2, which has no tokenizer.json."""
    path = shared / "data/qwen2_tokenizer"
    if not path.is_dir():
        pytest.skip(f"{path} does not exist")
    return path


def pieces(text: str) -> list[str]:
    """Returns the text of every token."""
    ids = tokenizer.encode(TOKENIZER, text)
    return [tokenizer.decode(TOKENIZER, [token]) for token in ids]


# -- the countdown tokenizer -----------------------------------------------------------------------


def test_digits_and_words_are_single_tokens() -> None:
    sum_and_answer = ["1", "2", "-", "3", "=", "9", " no", "\n", "<answer>", "9", "</answer>"]

    assert pieces("12-3=9 no\n<answer>9</answer>") == sum_and_answer
    assert pieces("<think> yes</think>") == ["<think>", " yes", "</think>"]


def test_the_vocabulary_is_a_multiple_of_16() -> None:
    assert len(TOKENIZER) == 112
    assert len(TOKENIZER) % 16 == 0


def test_the_end_and_padding_are_different_tokens() -> None:
    assert TOKENIZER.eos_token == "<|endoftext|>"
    assert TOKENIZER.pad_token == "<|pad|>"
    assert TOKENIZER.eos_token_id != TOKENIZER.pad_token_id


@given(st.text(alphabet=ASCII, max_size=80))
def test_ascii_round_trips(text: str) -> None:
    ids = tokenizer.encode(TOKENIZER, text)

    without_special_tokens = text.replace("<|endoftext|>", "").replace("<|pad|>", "")
    assert tokenizer.decode(TOKENIZER, ids) == without_special_tokens
    assert all(token < len(TOKENIZER) for token in ids)


@pytest.mark.parametrize("template", ["r1", "plain"])
def test_the_text_of_the_task_round_trips(template: str) -> None:
    options = TaskConfig(template=template)

    for index in range(50):
        for text in countdown_warm_start.example(options, 0, index, 3):
            ids = tokenizer.encode(TOKENIZER, text)
            assert tokenizer.decode(TOKENIZER, ids) == text


def test_decode_skips_the_end_and_padding_only() -> None:
    ids = tokenizer.encode(TOKENIZER, "<answer>1")
    ends = tokenizer.encode(TOKENIZER, "<|endoftext|><|pad|>")

    assert ends == [TOKENIZER.eos_token_id, TOKENIZER.pad_token_id]
    assert tokenizer.decode(TOKENIZER, ids + ends) == "<answer>1"


# -- saving and loading ----------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", [None, "qwen2", "qwen3"])
def test_a_saved_tokenizer_is_the_same_in_transformers(
    model_type: str | None, tmp_path: Path
) -> None:
    """Beside a Qwen config.json, AutoTokenizer makes a Qwen2 tokenizer of any tokenizer.json."""
    from transformers import AutoTokenizer

    TOKENIZER.save_pretrained(tmp_path)
    if model_type is not None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    prompt = countdown.render_prompt("r1", [3, 7], 10)
    _, response = countdown_warm_start.example(TaskConfig(template="plain"), 0, 1, 3)
    text = prompt + response
    ids = tokenizer.encode(TOKENIZER, text)

    for loaded in (tokenizer.load(str(tmp_path)), AutoTokenizer.from_pretrained(tmp_path)):
        assert tokenizer.encode(loaded, text) == ids
        assert tokenizer.decode(loaded, ids) == text
        assert loaded.decode(ids, skip_special_tokens=True) == text
        assert loaded.eos_token_id == TOKENIZER.eos_token_id
        assert loaded.pad_token_id == TOKENIZER.pad_token_id
        assert len(loaded) == len(TOKENIZER)


def test_eos_ids_are_those_of_the_tokenizer_and_of_generation_config(tmp_path: Path) -> None:
    assert end_tokens.eos_ids(TOKENIZER) == (0,)
    assert end_tokens.eos_ids(TOKENIZER, str(tmp_path)) == (0,)

    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 5}')

    assert end_tokens.eos_ids(TOKENIZER, str(tmp_path)) == (0, 5)


def test_the_tokenizer_of_qwen_has_its_own_ids(qwen: Path, tmp_path: Path) -> None:
    text = "<|im_start|>user\nWhat is 12 × 3?<|im_end|>\n<|im_start|>assistant\n<think>36"

    from_vocabulary = tokenizer.load(str(qwen))
    ids = tokenizer.encode(from_vocabulary, text)
    from_vocabulary.save_pretrained(tmp_path)
    from_json = tokenizer.load(str(tmp_path))

    assert ids[:3] == [151644, 872, 198]
    assert ids[-2:] == [18, 21]
    assert tokenizer.decode(from_vocabulary, ids) == text.replace("<|im_end|>", "")
    assert end_tokens.eos_ids(from_vocabulary, str(qwen)) == (151645, 151643)
    assert tokenizer.encode(from_json, text) == ids


def test_a_missing_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    message = r"no tokenizer in model.tokenizer=.*: give a directory with"

    for path in (str(tmp_path / "absent"), str(tmp_path), "/nowhere"):
        with pytest.raises(ValueError, match=message):
            tokenizer.load(path)


def test_a_sentencepiece_file_alone_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"sentencepiece")

    with pytest.raises(ValueError, match="tokenizer.model is not supported: .*tokenizer.json"):
        tokenizer.load(str(tmp_path))


ENCODE_AND_LOOK_FOR_TORCH = """
import sys
from jzero.model import tokenizer
tokenizer.encode(tokenizer.load(sys.argv[1]), '1+2')
tokenizer.load('')
print('torch:', 'torch' in sys.modules)
"""


def imports_torch(directory: Path) -> bool:
    """Says whether a process that loads the tokenizer of a directory, and uses it, imports torch.

    Fails if the process ends in any other way.
    """
    command = [sys.executable, "-c", ENCODE_AND_LOOK_FOR_TORCH, str(directory)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return {"torch: True": True, "torch: False": False}[output.strip()]


def test_loading_imports_no_torch(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    TOKENIZER.save_pretrained(tmp_path)

    assert not imports_torch(tmp_path)


def test_loading_beside_a_qwen_config_imports_no_torch(qwen: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    TOKENIZER.save_pretrained(tmp_path)
    shutil.copy(qwen / "config.json", tmp_path)

    assert not imports_torch(tmp_path)
