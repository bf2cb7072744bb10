"""The tokens that end responses, and the texts without them, are the same as in transformers."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest
import servers
import transformers

from jzero import cli
from jzero.chat import Chat
from jzero.commands import evaluate
from jzero.config import RolloutConfig
from jzero.decoder.driver import make_seed
from jzero.decoder.stop_strings import num_tokens_to_keep
from jzero.model import end_tokens, huggingface, tokenizer
from jzero.model.base_model import read_base_model
from jzero.rollout.sampler import Sampler, warn_of_missing_stop
from jzero.run.export_model import export_model
from jzero.serving.limits import Limits
from jzero.types import Problem
from jzero.workers.pool import Pool

PROMPT = "Say"
LENGTH = 4  # tokens until the model ends its response, at least
LIMIT = 40
GEMMA = """{% for message in messages %}<start_of_turn>\
{{ 'model' if message.role == 'assistant' else message.role }}
{{ message.content }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""
CHATML = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@dataclass(frozen=True)
class Checkpoint:
    """A model directory, and what transformers decodes greedily with it."""

    path: Path
    stops: list[int]
    ids: list[int]  # with the token that ends the response
    text: str


def decode_with_transformers(path: Path) -> tuple[list[int], list[int], str]:
    """Returns the end tokens, and the greedy response to PROMPT as tokens and as text."""
    import torch

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tok = transformers.AutoTokenizer.from_pretrained(path)
    inputs = tok(PROMPT, return_tensors="pt", add_special_tokens=False)
    out = model.generate(**inputs, do_sample=False, max_new_tokens=LIMIT, pad_token_id=0)
    ids = out[0, inputs["input_ids"].shape[1] :].tolist()
    stops = model.generation_config.eos_token_id
    return stops, ids, tok.decode(ids, skip_special_tokens=True)


def save_checkpoint(path: Path, shape: str) -> Checkpoint:
    """Writes a random model whose greedy response ends after LENGTH tokens or a few more.

    gemma: as Gemma-it, whose tokenizer ends at <eos>, and whose chats end at <end_of_turn>, which
        is in generation_config.json.
    qwen: as Qwen's chat models, where both ends are in generation_config.json.
    config: as older checkpoints without generation_config.json; config.json has the end tokens.
    """
    import torch

    torch.manual_seed(2)
    names = ["<|pad|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    if shape == "gemma":
        names = ["<pad>", "<eos>", "<start_of_turn>", "<end_of_turn>"]
    tok = servers.byte_level_tokenizer(names, pad=names[0], eos=names[1])
    tok.chat_template = GEMMA if shape == "gemma" else CHATML
    sizes = {
        "vocab_size": len(tok),
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if shape == "gemma":
        settings = transformers.Gemma3TextConfig(**sizes, tie_word_embeddings=True)
        model = transformers.Gemma3ForCausalLM(settings)
    else:
        settings = transformers.Qwen2Config(**sizes, tie_word_embeddings=False)
        model = transformers.Qwen2ForCausalLM(settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0, 0.4)
            elif "post_" in name:
                parameter.fill_(20)  # otherwise Gemma repeats its first token forever
    prompt = tok(PROMPT, return_tensors="pt", add_special_tokens=False)["input_ids"]
    free = model.generate(prompt, do_sample=False, max_new_tokens=LIMIT, pad_token_id=0)[0].tolist()
    place = prompt.shape[1] + LENGTH
    while free[place] in free[:place]:
        place += 1
    # After the exchange with the token at this place, the response ends there.
    stops = tok.convert_tokens_to_ids([names[1], names[3]])
    places = [stops[1], free[place]]
    with torch.no_grad():
        matrix = model.get_output_embeddings().weight
        matrix[places] = matrix[places[::-1]].clone()
    model.save_pretrained(path)
    tok.save_pretrained(path)
    file = path / "generation_config.json"
    if shape == "config":
        file.unlink()
        file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": stops}))

    read_stops, ids, text = decode_with_transformers(path)
    assert read_stops == stops and ids[-1] == stops[1]
    assert LENGTH < len(ids) < LIMIT
    return Checkpoint(path, stops, ids, text)


@dataclass(frozen=True)
class Loaded:
    """A checkpoint, loaded by jzero."""

    checkpoint: Checkpoint
    sampler: Sampler
    params: dict


@pytest.fixture(scope="module", params=["gemma", "qwen", "config"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory) -> Iterator[Loaded]:
    checkpoint = save_checkpoint(tmp_path_factory.mktemp("stops"), request.param)
    values = cli.parse_settings(evaluate.defaults(), servers.SETTINGS)
    values.model.path = str(checkpoint.path)
    values.task.template = "no"
    values.task.grade_workers = 1
    with Pool(1) as pool:
        sampler, params = evaluate.load(values, pool)
        yield Loaded(checkpoint, sampler, params)


def test_a_reward_gets_the_text_that_transformers_decodes(loaded: Loaded) -> None:
    checkpoint, sampler = loaded.checkpoint, loaded.sampler
    assert list(sampler.engine.stop_ids) == checkpoint.stops
    problem = Problem("0", "gsm8k", PROMPT, "18")

    [rollout], _ = sampler.sample_rollouts(
        loaded.params,
        sampler.encode_problems([problem]),
        group_size=1,
        temperature=0.0,
        key=(0, 0),
        version=0,
    )

    # The tokens keep the end, because it is trained on.
    assert rollout.tokens.ids[rollout.prompt_length :].tolist() == checkpoint.ids
    assert rollout.finish_reason == "stop"
    assert rollout.text == checkpoint.text


def test_a_chat_writes_no_stop_token(loaded: Loaded) -> None:
    sampler = loaded.sampler
    chat = Chat(sampler, loaded.params, 0.0, 0, "", [])
    ids = tokenizer.encode(sampler.tokenizer, PROMPT)
    written: list[str] = []

    assert chat._sample(ids, written.append) == loaded.checkpoint.text
    assert "".join(written) == loaded.checkpoint.text


def test_served_texts_are_those_of_transformers(loaded: Loaded) -> None:
    sampler, text = loaded.sampler, loaded.checkpoint.text
    seed = make_seed(sampler.engine, (0, 0))
    alone = servers.Alone(sampler.engine, sampler.tokenizer, loaded.params, seed)
    body = {"model": "m", "prompt": PROMPT, "temperature": 0, "max_tokens": LIMIT}

    with servers.decoding_server(alone, Limits()) as served, httpx.Client(timeout=60) as client:
        url = f"{served.url}/v1/completions"
        whole = client.post(url, json=body).json()["choices"][0]
        events = client.post(url, json=body | {"stream": True}).text.split("\n\n")
    assert (whole["text"], whole["finish_reason"]) == (text, "stop")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text


def test_an_export_stops_where_the_model_did(loaded: Loaded, tmp_path: Path) -> None:
    checkpoint = loaded.checkpoint
    values = cli.parse_settings(evaluate.defaults(), servers.SETTINGS)
    values.model.path = str(checkpoint.path)
    base = read_base_model(values.model)
    params = huggingface.load(checkpoint.path, base.model)

    export_model(tmp_path / "out", base, RolloutConfig(), params, "float32")

    assert decode_with_transformers(tmp_path / "out") == (
        checkpoint.stops,
        checkpoint.ids,
        checkpoint.text,
    )
    for name in ("config.json", "generation_config.json"):
        written = json.loads((tmp_path / "out" / name).read_text())
        assert written["eos_token_id"] == checkpoint.stops


def test_config_json_counts_only_without_other_end_tokens(tmp_path: Path) -> None:
    def write(name: str, **entries: object) -> None:
        (tmp_path / name).write_text(json.dumps(entries))

    def stops() -> tuple[int, ...]:
        return end_tokens.eos_ids(tokenizer.countdown(), str(tmp_path))

    write("config.json", text_config={"eos_token_id": [7, 8]})
    assert stops() == (0, 7, 8)
    write("config.json", eos_token_id=6, text_config={"eos_token_id": 7})
    assert stops() == (0, 6)
    write("generation_config.json", top_k=3)
    assert stops() == (0, 6)
    write("generation_config.json", eos_token_id=[5])
    assert stops() == (0, 5)


def test_an_end_of_turn_that_is_no_stop_is_a_warning(capsys: pytest.CaptureFixture) -> None:
    tok = servers.byte_level_tokenizer(["<pad>", "<eos>", "<start_of_turn>", "<end_of_turn>"])
    tok.chat_template = GEMMA
    end, eos = tok.convert_tokens_to_ids(["<end_of_turn>", "<eos>"])

    for stop_ids, stop_strings in (((eos, end), ()), ((eos,), ("<end_of_turn>",))):
        warn_of_missing_stop(tok, stop_ids, stop_strings)
    assert not capsys.readouterr().out
    for _ in range(2):
        warn_of_missing_stop(tok, (eos,), ())
    [line] = capsys.readouterr().out.splitlines()
    assert "<end_of_turn>" in line and "rollout.stop=" in line


@pytest.mark.parametrize(
    ("turn_start", "first_new", "kept"),
    [(0, 2, 3), (1, 2, None), (2, 2, None), (3, 3, None), (0, 4, None), (0, 0, 3)],
)
def test_a_stop_string_lies_in_one_turn(turn_start: int, first_new: int, kept: int | None) -> None:
    """The last token of a turn and the first ones of the next make no stop string together."""

    def decode(ids: list[int]) -> str:
        return "".join(map(chr, ids))

    tokens = np.array([*map(ord, "abcx")], np.int32)
    assert num_tokens_to_keep(decode, tokens, turn_start, first_new, ["abc"]) == kept
