"""Tokenizers: the countdown one, real Qwen files, and what is refused."""

import json
import shutil
import string
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jzero import config
from jzero.model import tokenizer
from jzero.tasks import countdown, countdown_warm_start

QWEN = Path(__file__).resolve().parents[3] / "shared/data/qwen2_tokenizer"
TOKENIZER = tokenizer.countdown()


def pieces(text):
    return [tokenizer.decode(TOKENIZER, [i]) for i in tokenizer.encode(TOKENIZER, text)]


def test_digits_and_words_are_single_tokens():
    assert pieces("12-3=9 no\n<answer>9</answer>") == [
        *"12-3=9",
        " no",
        "\n",
        "<answer>",
        "9",
        "</answer>",
    ]
    assert pieces("<think> yes</think>") == ["<think>", " yes", "</think>"]
    assert len(TOKENIZER) == 112 and len(TOKENIZER) % 16 == 0
    assert (TOKENIZER.eos_token, TOKENIZER.pad_token) == ("<|endoftext|>", "<|pad|>")
    assert TOKENIZER.eos_token_id != TOKENIZER.pad_token_id


@given(
    st.text(alphabet=string.digits + string.ascii_letters + string.punctuation + " \n", max_size=80)
)
def test_ascii_round_trips(text):
    ids = tokenizer.encode(TOKENIZER, text)
    assert tokenizer.decode(TOKENIZER, ids) == text.replace("<|endoftext|>", "").replace(
        "<|pad|>", ""
    )
    assert all(i < len(TOKENIZER) for i in ids)


@pytest.mark.parametrize("template", ["r1", "plain"])
def test_the_task_s_own_text_round_trips(template):
    for i in range(50):
        for text in countdown_warm_start.example(config.TaskConfig(template=template), 0, i, 3):
            assert tokenizer.decode(TOKENIZER, tokenizer.encode(TOKENIZER, text)) == text


def test_decode_skips_the_end_and_padding_only():
    ids = tokenizer.encode(TOKENIZER, "<answer>1")
    ends = tokenizer.encode(TOKENIZER, "<|endoftext|><|pad|>")
    assert ends == [TOKENIZER.eos_token_id, TOKENIZER.pad_token_id]
    assert tokenizer.decode(TOKENIZER, ids + ends) == "<answer>1"


@pytest.mark.parametrize("beside", [None, "qwen2", "qwen3"])
def test_saved_tokenizer_is_the_same_in_transformers(beside, tmp_path):
    """Also beside a Qwen config.json, where AutoTokenizer builds a Qwen2 tokenizer whatever tokenizer.json says."""
    from transformers import AutoTokenizer

    TOKENIZER.save_pretrained(tmp_path)
    if beside:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": beside}))
    text = (
        countdown.render_prompt("r1", [3, 7], 10)
        + countdown_warm_start.example(config.TaskConfig(template="plain"), 0, 1, 3)[1]
    )
    ids = tokenizer.encode(TOKENIZER, text)
    for loaded in (tokenizer.load(str(tmp_path)), AutoTokenizer.from_pretrained(tmp_path)):
        assert tokenizer.encode(loaded, text) == ids and tokenizer.decode(loaded, ids) == text
        assert loaded.decode(ids, skip_special_tokens=True) == text
        assert (loaded.eos_token_id, loaded.pad_token_id) == (
            TOKENIZER.eos_token_id,
            TOKENIZER.pad_token_id,
        )
        assert len(loaded) == len(TOKENIZER)


def test_eos_ids(tmp_path):
    assert tokenizer.eos_ids(TOKENIZER) == tokenizer.eos_ids(TOKENIZER, str(tmp_path)) == (0,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 5}')
    assert tokenizer.eos_ids(TOKENIZER, str(tmp_path)) == (0, 5)


def test_qwen(tmp_path):
    if not QWEN.exists():
        pytest.skip(f"{QWEN} is not on this machine")
    tok = tokenizer.load(str(QWEN))
    text = "<|im_start|>user\nWhat is 12 × 3?<|im_end|>\n<|im_start|>assistant\n<think>36"
    ids = tokenizer.encode(tok, text)
    assert ids[:3] == [151644, 872, 198] and ids[-2:] == [18, 21]
    assert tokenizer.decode(tok, ids) == text.replace("<|im_end|>", "")
    assert tokenizer.eos_ids(tok, str(QWEN)) == (151645, 151643)
    tok.save_pretrained(tmp_path)  # as tokenizer.json
    assert tokenizer.encode(tokenizer.load(str(tmp_path)), text) == ids


def test_a_missing_tokenizer_says_what_to_do(tmp_path):
    for path in (str(tmp_path / "absent"), str(tmp_path), "/nowhere"):
        with pytest.raises(
            ValueError, match=r"no tokenizer in model.tokenizer=.*: give a directory with"
        ):
            tokenizer.load(path)


def test_loading_imports_no_torch(tmp_path):
    pytest.importorskip("torch")
    TOKENIZER.save_pretrained(tmp_path)
    code = (
        "import sys; from jzero.model import tokenizer as t; t.encode(t.load(sys.argv[1]), '1+2'); t.load(''); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)]).returncode == 0
    if QWEN.exists():
        shutil.copy(QWEN / "config.json", tmp_path)
        assert subprocess.run([sys.executable, "-c", code, str(tmp_path)]).returncode == 0
