"""Supervised examples: which tokens a row becomes, and which of them are trained on."""

from functools import cache
from pathlib import Path

import pytest
from tiny import QWEN25

from jzero.errors import UserError
from jzero.model import end_tokens, tokenizer
from jzero.model.tokenizer import PreTrainedTokenizerFast
from jzero.training.examples import (
    TURNS,
    Example,
    ExampleRow,
    Message,
    encode_completion,
    encode_row,
)

SYSTEM = {"role": "system", "content": "Be brief."}
CONVERSATION = [
    {"role": "user", "content": "2+3?"},
    {"role": "assistant", "content": "<think>\nTwo and three.\n</think>\n\n5"},
    {"role": "user", "content": "Sure?\n"},
    {"role": "assistant", "content": "<think>\nOnce more.\n</think>\n\nYes: \\boxed{5}."},
]
# Leaves out what the assistant thought in earlier turns.
QWEN3 = (
    """{%- set ns = namespace(query=0) %}{%- for message in messages %}
{%- if message.role == 'user' %}{%- set ns.query = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and '</think>' in message.content %}
{%- set thought = message.content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set answer = message.content.split('</think>')[-1].lstrip('\\n') %}
{%- else %}{%- set thought = '' %}{%- set answer = message.content %}{%- endif %}
{%- if message.role == 'assistant' and loop.index0 > ns.query %}
{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{%- endif %}"""
    """{{- answer + '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
)


# -- text ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "completion"),
    [
        ("3 7=4\n", "7-3=4 yes\n<answer>7-3</answer>"),
        ("1 1=2\n", "<answer>1+1</answer>"),
    ],
)
def test_a_completion_and_its_end_are_trained_on(prompt: str, completion: str) -> None:
    tok = tokenizer.countdown()

    example = encode_completion(tok, prompt, completion)

    border = example.trained.index(True)
    assert all(example.trained[border:])
    assert tokenizer.decode(tok, example.tokens[:border]) == prompt
    assert tokenizer.decode(tok, example.tokens[border:]) == completion
    assert example.tokens[-1] == tok.eos_token_id


# -- conversations ---------------------------------------------------------------------------------


@cache
def load_once(directory: Path, chat_template: str) -> PreTrainedTokenizerFast:
    """Loads a tokenizer and gives it a chat template, or leaves it its own where that is empty.

    The tests share it, because it takes half a second to load. None of them changes it.
    """
    tok = tokenizer.load(str(directory))
    if chat_template:
        tok.chat_template = chat_template
    return tok


@pytest.fixture
def tok(shared: Path) -> PreTrainedTokenizerFast:
    """Returns the tokenizer of Qwen2, with the chat template of Qwen2."""
    return load_once(shared / "data/qwen2_tokenizer", "")


@pytest.fixture(params=["", QWEN25, QWEN3], ids=["qwen2", "qwen2.5", "qwen3"])
def chat_tok(shared: Path, request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    """Returns the tokenizer with one of three chat templates."""
    tok = load_once(shared / "data/qwen2_tokenizer", request.param)
    assert end_tokens.end_of_turn(tok) == "<|im_end|>"
    return tok


def scan_chatml(tok: PreTrainedTokenizerFast, messages: list[Message], num_turns: int) -> Example:
    """Returns the example of a conversation, from its tokens alone.

    What stands between <|im_start|>assistant with its newline and <|im_end|> is trained on, in the
    last `num_turns` turns. The tokens end with the last <|im_end|>.
    """
    tokens = tok.encode(tok.apply_chat_template(messages, tokenize=False))
    start_id = tok.convert_tokens_to_ids("<|im_start|>")
    end_id = tok.convert_tokens_to_ids("<|im_end|>")
    while tokens[-1] != end_id:
        tokens.pop()

    header = [start_id, *tok.encode("assistant\n")]
    begins = []
    for place in range(len(tokens)):
        after_header = place + len(header)
        if tokens[place:after_header] == header:
            begins.append(after_header)
    trained = [False] * len(tokens)
    for begin in begins[-num_turns:]:
        end = tokens.index(end_id, begin)
        trained[begin : end + 1] = [True] * (end + 1 - begin)
    return Example(tokens, trained)


conversations = pytest.mark.parametrize(
    "messages",
    [CONVERSATION, CONVERSATION[:2], [SYSTEM, *CONVERSATION]],
    ids=["two turns", "one turn", "system"],
)


@conversations
def test_all_that_the_assistant_says_is_trained_on(
    chat_tok: PreTrainedTokenizerFast, messages: list[Message]
) -> None:
    example = encode_row(chat_tok, {"messages": messages}, "assistant")

    assert example == scan_chatml(chat_tok, messages, num_turns=2)
    assert not all(example.trained)
    assert example.trained[-1]


@conversations
def test_of_messages_as_prompt_and_completion_only_the_completion_is_trained_on(
    chat_tok: PreTrainedTokenizerFast, messages: list[Message]
) -> None:
    row = {"prompt": messages[:-1], "completion": messages[-1:]}

    example = encode_row(chat_tok, row, "assistant")

    assert example == scan_chatml(chat_tok, messages, num_turns=1)


@conversations
def test_loss_all_trains_every_token_but_the_first(
    chat_tok: PreTrainedTokenizerFast, messages: list[Message]
) -> None:
    row = {"prompt": messages[:-1], "completion": messages[-1:]}

    example = encode_row(chat_tok, row, "all")

    # All of the text: the newline after the last end of turn, too.
    text = chat_tok.apply_chat_template(messages, tokenize=False)
    assert chat_tok.decode(example.tokens) == text
    assert example.trained == [False] + [True] * (len(example.tokens) - 1)


def test_loss_all_trains_what_comes_after_the_last_response(
    chat_tok: PreTrainedTokenizerFast,
) -> None:
    messages = CONVERSATION[:3]  # the last message is the user's

    example = encode_row(chat_tok, {"messages": messages}, "all")

    text = chat_tok.apply_chat_template(messages, tokenize=False)
    assert chat_tok.decode(example.tokens) == text
    assert all(example.trained[1:])


@pytest.mark.parametrize("loss", ["assistant", "all"])
def test_a_system_prompt_comes_before_messages_that_have_none(
    chat_tok: PreTrainedTokenizerFast, loss: str
) -> None:
    own = [SYSTEM, *CONVERSATION]
    rows: list[tuple[ExampleRow, ExampleRow]] = [
        ({"messages": CONVERSATION}, {"messages": own}),
        (
            {"prompt": CONVERSATION[:1], "completion": CONVERSATION[1:2]},
            {"prompt": own[:2], "completion": CONVERSATION[1:2]},
        ),
    ]
    for row, row_with_system in rows:
        expected = encode_row(chat_tok, row_with_system, loss)
        assert encode_row(chat_tok, row, loss, "Be brief.") == expected
        assert encode_row(chat_tok, row, loss) != expected
        assert encode_row(chat_tok, row_with_system, loss, "Be long.") == expected


def test_thoughts_that_the_template_leaves_out_are_not_trained_on(
    chat_tok: PreTrainedTokenizerFast,
) -> None:
    example = encode_row(chat_tok, {"messages": [SYSTEM, *CONVERSATION]}, "assistant")

    pairs = zip(example.tokens, example.trained, strict=True)
    trained_text = chat_tok.decode([token for token, is_trained in pairs if is_trained])
    keeps_thoughts = chat_tok.chat_template != QWEN3
    assert ("Two and three" in trained_text) == keeps_thoughts
    assert "Once more" in trained_text


def test_a_message_that_holds_the_end_of_a_turn_is_refused(tok: PreTrainedTokenizerFast) -> None:
    messages = [CONVERSATION[0], {"role": "assistant", "content": "a<|im_end|>b"}]

    with pytest.raises(ValueError, match=r"holds <\|im_end\|>, which ends turns"):
        encode_row(tok, {"messages": messages}, "assistant")


def test_a_template_that_writes_earlier_turns_anew_is_refused(shared: Path) -> None:
    tok = load_once(shared / "data/qwen2_tokenizer", "{{ messages|length }}" + QWEN25)

    with pytest.raises(ValueError, match="renders earlier turns differently"):
        encode_row(tok, {"messages": CONVERSATION}, "assistant")


# Conversations and text


SPEAKERS = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}


@pytest.mark.parametrize("question", ["human", "user"])
@pytest.mark.parametrize("answer", ["gpt", "assistant"])
@pytest.mark.parametrize("loss", ["assistant", "all"])
def test_a_conversation_is_its_messages(
    question: str, answer: str, loss: str, tok: PreTrainedTokenizerFast
) -> None:
    said = [
        ("system", "Be brief."),
        (question, "2 + 2?"),
        (answer, "4"),
        (question, "Why?"),
        (answer, "So."),
    ]
    roles = {"system": "system", **SPEAKERS}
    row = {"conversations": [{"from": speaker, "value": text} for speaker, text in said]}
    messages = [{"role": roles[speaker], "content": text} for speaker, text in said]

    example = encode_row(tok, row, loss)

    assert example == encode_row(tok, {"messages": messages}, loss)
    assert encode_row(tok, {"conversations": messages}, loss) == example
    without = {"conversations": row["conversations"][1:]}
    assert encode_row(tok, without, loss, "Be brief.") == example


@pytest.mark.parametrize("names", TURNS, ids=" ".join)
@pytest.mark.parametrize("loss", ["assistant", "all"])
def test_a_problem_and_its_solution_are_turns_of_a_chat(
    names: tuple[str, str], loss: str, tok: PreTrainedTokenizerFast
) -> None:
    row = dict(zip(names, ("2 + 2?", "It is 4."), strict=True))
    messages = [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "It is 4."},
    ]
    assert encode_row(tok, row, loss) == encode_row(tok, {"messages": messages}, loss)
    system = [{"role": "system", "content": "Be brief."}, *messages]
    assert encode_row(tok, row, loss, "Be brief.") == encode_row(tok, {"messages": system}, loss)


@pytest.mark.parametrize(
    "message",
    [{"from": "narrator", "value": "x"}, {"value": "x"}, {"from": "human", "value": None}],
)
def test_a_speaker_that_is_not_known_is_refused(
    message: dict, tok: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(UserError, match="from one of system, human, user, gpt"):
        encode_row(tok, {"conversations": [message]}, "assistant")


@pytest.mark.parametrize("loss", ["assistant", "all"])
@pytest.mark.parametrize("text", ["one two", "a\nb c", ""])
def test_text_is_trained_on_from_its_second_token(
    text: str, loss: str, tok: PreTrainedTokenizerFast
) -> None:
    example = encode_row(tok, {"text": text}, loss)

    ids = tok(text)["input_ids"]
    assert example.tokens == [*ids, tok.eos_token_id]
    assert example.trained == [False] + [True] * len(ids)
    # The end of sequence is there once, also if the text has it already.
    assert encode_row(tok, {"text": text + str(tok.eos_token)}, loss) == example
