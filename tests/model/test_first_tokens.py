"""Tokenizers as Llama's: a first token that the tokenizer adds by itself, and a space."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from jzero.model import chat_template, tokenizer
from jzero.training import examples

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789:?!"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
MESSAGES = [{"role": "user", "content": "1?"}]


def finish(raw: Tokenizer, bos: str, eos: str, directory: Path, **settings: object) -> str:
    """Writes a tokenizer that puts `bos` before every text, and returns the directory."""
    raw.add_special_tokens([AddedToken(bos, special=True), AddedToken(eos, special=True)])
    raw.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A",
        pair=f"{bos} $A {bos} $B",
        special_tokens=[(bos, raw.token_to_id(bos))],
    )
    directory.mkdir()
    raw.save(str(directory / "tokenizer.json"))
    entries = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "chat_template": CHAT_TEMPLATE,
        **settings,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(entries))
    return str(directory)


def like_llama_2(directory: Path) -> str:
    """A SentencePiece tokenizer: letters, unknown ones as bytes, a space before every text."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *LETTERS, "[", "]", "▁1"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    model = BPE(vocabulary, [("▁", "1")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    raw = Tokenizer(model)
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return finish(raw, "<s>", "</s>", directory)


def like_llama_3(directory: Path) -> str:
    """A byte-level tokenizer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(BPE({token: index for index, token in enumerate(alphabet)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return finish(raw, "<|begin_of_text|>", "<|end_of_text|>", directory)


def like_qwen(directory: Path) -> str:
    """A tokenizer that adds nothing."""
    tokenizer.countdown().save_pretrained(directory)
    return str(directory)


@pytest.fixture(params=[like_llama_2, like_llama_3], ids=["llama 2", "llama 3"])
def llama(request: pytest.FixtureRequest, tmp_path: Path) -> PreTrainedTokenizerFast:
    return tokenizer.load(request.param(tmp_path / "tokenizer"))


def of_transformers(tok: PreTrainedTokenizerFast, prompt: chat_template.Prompt) -> list[int]:
    """Returns what transformers makes of a prompt."""
    if isinstance(prompt, str):
        return tok(prompt)["input_ids"]
    messages = [dict(message) for message in prompt]
    return tok.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]


@pytest.mark.parametrize("prompt", ["ab 1?", "", " a", "1\n2", MESSAGES], ids=repr)
@pytest.mark.parametrize("make", [like_llama_2, like_llama_3, like_qwen])
def test_a_prompt_has_the_tokens_that_transformers_gives_it(
    make: Callable[[Path], str], prompt: chat_template.Prompt, tmp_path: Path
) -> None:
    tok = tokenizer.load(make(tmp_path / "tokenizer"))
    if make is like_qwen and prompt is MESSAGES:
        tok.chat_template = CHAT_TEMPLATE.replace("{{ bos_token }}", "")

    ids = tokenizer.prompt_ids(tok, prompt)

    assert ids == of_transformers(tok, prompt)
    num_first = 0 if make is like_qwen else 1
    assert ids.count(tok.bos_token_id) == num_first


def test_a_text_that_spells_the_first_token_has_it_once(llama: PreTrainedTokenizerFast) -> None:
    ids = tokenizer.prompt_ids(llama, f"{llama.bos_token}ab")

    assert ids[0] == llama.bos_token_id
    assert ids.count(llama.bos_token_id) == 1


def test_a_rendered_chat_has_the_first_token_once(llama: PreTrainedTokenizerFast) -> None:
    text = chat_template.render(llama, MESSAGES)

    assert tokenizer.prompt_ids(llama, text) == tokenizer.prompt_ids(llama, MESSAGES)


def test_a_chat_template_without_a_first_token_gets_none(llama: PreTrainedTokenizerFast) -> None:
    llama.chat_template = CHAT_TEMPLATE.replace("{{ bos_token }}", "")

    assert llama.bos_token_id not in tokenizer.prompt_ids(llama, MESSAGES)


def test_an_example_begins_with_the_first_token_and_has_no_second(
    llama: PreTrainedTokenizerFast,
) -> None:
    example = examples.encode_row(llama, {"prompt": "ab?", "completion": "1"}, "assistant")

    assert example.tokens == [*llama("ab?1")["input_ids"], llama.eos_token_id]
    assert example.trained == [False] * (len(example.tokens) - 2) + [True] * 2


@pytest.mark.parametrize("text", ["1", " 1", "ab", "\n"], ids=repr)
def test_a_continuation_has_no_space_of_its_own(llama: PreTrainedTokenizerFast, text: str) -> None:
    before = tokenizer.prompt_ids(llama, "?")

    ids = [*before, *tokenizer.continuation_ids(llama, text)]

    assert ids == llama("?" + text)["input_ids"]


def test_a_conversation_is_encoded_as_its_text(llama: PreTrainedTokenizerFast) -> None:
    conversation = [*MESSAGES, {"role": "assistant", "content": "1"}, *MESSAGES]
    conversation.append({"role": "assistant", "content": "ab"})

    example = examples.encode_conversation(llama, conversation, first_trained=0)

    text = chat_template.render(llama, conversation, generate=False)
    assert example.tokens == tokenizer.encode(llama, text)
    assert example.tokens.count(llama.bos_token_id) == 1


def test_the_response_of_a_prompt_decodes_without_its_end(llama: PreTrainedTokenizerFast) -> None:
    ids = [*tokenizer.continuation_ids(llama, "ab 1"), llama.eos_token_id]

    assert tokenizer.decode(llama, ids) == "ab 1"
