"""Model directories from elsewhere: each damage is one line with the file, in little memory."""

import json
import os
import shutil
import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_qwen import CONFIGS, random_params

from jzero.config import ModelConfig
from jzero.errors import UserError
from jzero.model import chat_template, huggingface, tokenizer
from jzero.model.base_model import read_base_model

MODEL = replace(CONFIGS["qwen2-tied"], vocab_size=112)
NORM = "model.norm.weight"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PART = "model-00001-of-00001.safetensors"

MAX_PEAK_BYTES = 64 << 20  # of what NumPy and Python allocate for a model of 0.5 MB

Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a model directory with weights in one file and a tokenizer. Tests damage copies."""
    path = tmp_path_factory.mktemp("good") / "model"
    huggingface.save(path, MODEL, random_params(MODEL), dtype="float32", hf_config_extra={})
    tokenizer.countdown().save_pretrained(path)
    (path / "generation_config.json").write_text('{"eos_token_id": [0]}')
    return path


@pytest.fixture
def model(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "model"))


def read_all(path: Path) -> None:
    """Reads everything that a run reads of a model directory."""
    base = read_base_model(ModelConfig(path=str(path)))
    assert base.stop_tokens
    tokenizer.encode(base.tokenizer, "1+1")
    huggingface.load(path, base.model)


def assert_refused(path: Path, *words: str) -> None:
    """Asserts that a directory is refused in one line with some words, and in little memory."""
    tracemalloc.start()
    with pytest.raises(UserError) as caught:
        read_all(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 1000
    for word in words:
        assert word in message
    assert peak < MAX_PEAK_BYTES


def test_the_directory_is_whole(model: Path) -> None:
    read_all(model)


# -- config.json -----------------------------------------------------------------------------------


def entries(path: Path, **changes: Any) -> None:
    """Changes entries of config.json."""
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


WRONG_ENTRIES = {
    "a text": {"hidden_size": "64"},
    "a fraction": {"num_hidden_layers": 3.0},
    "true is not a number": {"num_attention_heads": True},
    "null": {"vocab_size": None},
    "no number": {"rms_norm_eps": float("nan")},
    "infinity": {"rope_theta": float("inf"), "rope_parameters": None},
    "a negative size": {"intermediate_size": -96},
    "no layers": {"num_hidden_layers": 0},
    "very many layers": {"num_hidden_layers": 10**9},
    "a very large vocabulary": {"vocab_size": 10**12},
    "a number of 300 digits": {"hidden_size": 10**300},
    "large sizes": {"vocab_size": 2**24, "hidden_size": 2**18, "num_hidden_layers": 1024},
    "a list for a family": {"model_type": ["qwen2"]},
    "another family": {"model_type": "gpt_oss"},
    "a family with line breaks": {"model_type": "qwen2\n\x1b[31m" * 1000},
    "heads that do not divide": {"num_key_value_heads": 3},
    "an odd head": {"head_dim": 15},
    "a text for a flag": {"tie_word_embeddings": "false"},
    "layer types in a text": {"layer_types": "full_attention"},
    "layer types of another depth": {"layer_types": ["full_attention"]},
    "another kind of layer": {"layer_types": ["linear_attention"] * 3},
    "another activation": {"hidden_act": "gelu"},
    "an activation in an object": {"hidden_act": {"a": 1}},
    "a sliding window": {"use_sliding_window": True},
    "a sliding window as a text": {"use_sliding_window": "false"},
    "rotation in a list": {"rope_scaling": [1]},
    "a base in an object": {"rope_parameters": {"rope_theta": {}}},
    "rotation for each kind of layer": {"rope_parameters": {"full_attention": {}}},
    "quantized": {"quantization_config": {"bits": 4}},
    "code": {"auto_map": {"AutoModelForCausalLM": "modeling_mine.Mine"}},
    "settings for each layer": {"per_layer_config": {"0": {"hidden_act": "gelu"}}},
    "a context of no tokens": {"max_position_embeddings": 0},
    "qwen3 without its head size": {"model_type": "qwen3", "head_dim": None},
    "biases in qwen3": {"model_type": "qwen3", "head_dim": 16, "attention_bias": True},
    "the size of another vocabulary": {"vocab_size": 113},
}


@pytest.mark.parametrize("changes", WRONG_ENTRIES.values(), ids=WRONG_ENTRIES.keys())
def test_a_wrong_entry_of_the_config_is_refused(model: Path, changes: dict[str, Any]) -> None:
    entries(model, **changes)

    assert_refused(model, str(model), "config.json")


WRONG_TEXTS = {
    "empty": b"",
    "cut": b'{"model_type": "qw',
    "no object": b"[1, 2]",
    "nothing": b"null",
    "no text": b"\xff\xfe{}",
    "deeply nested": b"[" * 100_000,
    "a number of 10,000 digits": b'{"vocab_size": ' + b"9" * 10_000 + b"}",
    "very long": b'{"a": "' + b"a" * (20 << 20) + b'"}',
}
JSON_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "tokenizer.json",
]


@pytest.mark.parametrize("name", JSON_FILES)
@pytest.mark.parametrize("content", WRONG_TEXTS.values(), ids=WRONG_TEXTS.keys())
def test_a_file_that_is_no_json_object_is_refused(model: Path, name: str, content: bytes) -> None:
    (model / name).write_bytes(content)

    assert_refused(model, str(model / name))


@pytest.mark.parametrize("name", ["config.json", WEIGHTS, "tokenizer.json"])
def test_a_directory_in_place_of_a_file_is_refused(model: Path, name: str) -> None:
    (model / name).unlink()
    (model / name).mkdir()

    assert_refused(model, str(model / name))


def test_a_pipe_in_place_of_a_file_is_refused(model: Path) -> None:
    (model / "config.json").unlink()
    os.mkfifo(model / "config.json")

    assert_refused(model, str(model / "config.json"))


def test_an_adapter_is_refused(model: Path) -> None:
    (model / "adapter_config.json").write_text("{}")

    assert_refused(model, "adapter_config.json", "merge")


# -- safetensors -----------------------------------------------------------------------------------


def write_header(file: Path, header: Any, data: bytes = b"", length: int | None = None) -> None:
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(content) if length is None else length
    file.write_bytes(struct.pack("<Q", length) + content + data)


def read_header(file: Path) -> tuple[dict[str, Any], bytes]:
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def change_entry(**changes: Any) -> Damage:
    """Returns a damage that changes what the header says about one tensor."""

    def damage(path: Path) -> None:
        header, data = read_header(path / WEIGHTS)
        header[NORM] |= changes
        write_header(path / WEIGHTS, header, data)

    return damage


def with_header(header: Any, length: int | None = None) -> Damage:
    def damage(path: Path) -> None:
        write_header(path / WEIGHTS, header, b"0000", length)

    return damage


def share_bytes(path: Path) -> None:
    header, data = read_header(path / WEIGHTS)
    names = [name for name in header if name.endswith("layernorm.weight")]
    header[names[0]]["data_offsets"] = header[names[1]]["data_offsets"]
    write_header(path / WEIGHTS, header, data)


def cut(path: Path) -> None:
    os.truncate(path / WEIGHTS, (path / WEIGHTS).stat().st_size - 100)


def add_bytes(path: Path) -> None:
    with (path / WEIGHTS).open("ab") as file:
        file.write(b"hidden")


def claim_a_large_model(path: Path) -> None:
    """Makes config.json and the header agree on a tensor that the file does not hold."""
    entries(path, vocab_size=2**24, hidden_size=2**18)
    header, data = read_header(path / WEIGHTS)
    header["model.embed_tokens.weight"]["shape"] = [2**24, 2**18]
    write_header(path / WEIGHTS, header, data)


WRONG_WEIGHTS = {
    "empty": lambda path: (path / WEIGHTS).write_bytes(b""),
    "no length": lambda path: (path / WEIGHTS).write_bytes(b"123"),
    "cut": cut,
    "bytes at the end": add_bytes,
    "bytes shared": share_bytes,
    "a header beyond the file": with_header({}, length=10**6),
    "a header of 2^63 bytes": with_header({}, length=2**63),
    "a header that is not a json": with_header(b"{'a': 1}"),
    "a header in a list": with_header([1]),
    "a nested header": with_header(b"[" * 100_000),
    "an entry that is not an object": with_header({"a": 1}),
    "a line break in a name": with_header({"a\nb\x1b[31m" * 1000: {}}),
    "no tensors": with_header({"__metadata__": {}}, None),
    "a shape of texts": change_entry(shape=["64"]),
    "a negative shape": change_entry(shape=[-64]),
    "a shape that is too large": change_entry(shape=[2**62]),
    "a shape beyond 2^64": change_entry(shape=[2**70]),
    "another shape of as many bytes": change_entry(shape=[8, 8]),
    "offsets the wrong way": change_entry(data_offsets=[256, 0]),
    "offsets beyond the file": change_entry(data_offsets=[2**40, 2**40 + 256]),
    "one offset": change_entry(data_offsets=[0]),
    "an unknown type": change_entry(dtype="Q7"),
    "a type in a list": change_entry(dtype=["F32"]),
    "a type of other bytes": change_entry(dtype="F16"),
    "a large model in a small file": claim_a_large_model,
}


@pytest.mark.parametrize("damage", WRONG_WEIGHTS.values(), ids=WRONG_WEIGHTS.keys())
def test_a_damaged_file_of_weights_is_refused(model: Path, damage: Damage) -> None:
    damage(model)

    assert_refused(model, str(model))


def change_weights(path: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    weights = load_file(path / WEIGHTS)
    change(weights)
    save_file(weights, path / WEIGHTS)


TYPES = [np.int8, np.uint8, np.bool_, np.int32, np.float64, np.complex64, ml_dtypes.float8_e4m3fn]


@pytest.mark.parametrize("dtype", TYPES)
def test_weights_of_a_type_that_fp32_does_not_hold_are_refused(model: Path, dtype: type) -> None:
    def cast(weights: dict[str, np.ndarray]) -> None:
        weights[NORM] = weights[NORM].astype(dtype)

    change_weights(model, cast)

    assert_refused(model, str(model / WEIGHTS), NORM)


def test_weights_in_half_precision_are_read(model: Path) -> None:
    def cast(weights: dict[str, np.ndarray]) -> None:
        weights[NORM] = weights[NORM].astype(np.float16)

    change_weights(model, cast)

    np.testing.assert_array_equal(huggingface.load(model, MODEL)["norm"], random_norm(np.float16))


def random_norm(dtype: type) -> np.ndarray:
    return np.asarray(random_params(MODEL)["norm"]).astype(dtype).astype(np.float32)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused_by_name(model: Path, number: float) -> None:
    name = "model.layers.1.mlp.up_proj.weight"

    def spoil(weights: dict[str, np.ndarray]) -> None:
        weights[name][3, 5] = number

    change_weights(model, spoil)

    assert_refused(model, str(model / WEIGHTS), name, "NaN or infinite")


def test_a_head_that_differs_from_the_tied_embedding_is_refused(model: Path) -> None:
    def untie(weights: dict[str, np.ndarray]) -> None:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
        weights["lm_head.weight"][-1, -1] += 1

    change_weights(model, untie)

    assert_refused(model, str(model / WEIGHTS), "lm_head.weight", "tie_word_embeddings")


# -- the index, and links --------------------------------------------------------------------------


def split(path: Path, file: str = PART) -> None:
    """Turns the weights into a file that an index names `file`."""
    weight_map = dict.fromkeys(load_file(path / WEIGHTS), file)
    (path / WEIGHTS).rename(path / PART)
    (path / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def change_index(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    split(path)
    index = json.loads((path / INDEX).read_text())
    change(index)
    (path / INDEX).write_text(json.dumps(index))


def repeat_a_tensor(path: Path) -> None:
    """Writes a second file that the index names for one tensor, with another one of the first."""
    weights = load_file(path / WEIGHTS)
    both = {name: weights[name] for name in (NORM, "model.embed_tokens.weight")}
    save_file(both, path / "second.safetensors")
    change_index(path, lambda index: index["weight_map"].update({NORM: "second.safetensors"}))


def name_another_tensor(path: Path) -> None:
    change_index(path, lambda index: index["weight_map"].update(extra=PART))


def drop_the_map(path: Path) -> None:
    change_index(path, lambda index: index.pop("weight_map"))


def name_a_number(path: Path) -> None:
    change_index(path, lambda index: index["weight_map"].update({NORM: 7}))


def keep_the_single_file(path: Path) -> None:
    shutil.copy(path / WEIGHTS, path / "copy")
    split(path)
    (path / "copy").rename(path / WEIGHTS)


WRONG_INDEXES = {
    "a tensor in two files": repeat_a_tensor,
    "a tensor that no file has": name_another_tensor,
    "no map": drop_the_map,
    "a number for a file": name_a_number,
    "weights beside it": keep_the_single_file,
}


@pytest.mark.parametrize("damage", WRONG_INDEXES.values(), ids=WRONG_INDEXES.keys())
def test_a_wrong_index_is_refused(model: Path, damage: Damage) -> None:
    damage(model)

    assert_refused(model, str(model), INDEX)


@pytest.mark.parametrize(
    "name", ["../outside/" + PART, "/etc/hostname", "..", "", ".", "sub/" + PART, "a\0b", "a" * 999]
)
def test_an_index_names_only_files_of_its_directory(model: Path, name: str) -> None:
    outside = model.parent / "outside"
    outside.mkdir()
    split(model, name)
    shutil.copy(model / PART, outside)
    (model / "sub").symlink_to(outside)

    assert_refused(model, INDEX)


@pytest.mark.parametrize("name", [PART, "config.json", "tokenizer.json", "chat_template.jinja"])
def test_a_link_that_leads_out_of_the_directory_is_refused(model: Path, name: str) -> None:
    outside = model.parent / "outside"
    outside.mkdir()
    (model / "chat_template.jinja").write_text("{{ messages }}")
    split(model)
    (model / name).rename(outside / name)
    (model / name).symlink_to(outside / name)

    assert_refused(model, str(model / name), "link")


@pytest.mark.parametrize("link", ["additional_chat_templates", "additional_chat_templates/a.jinja"])
def test_a_link_of_a_further_template_is_refused(model: Path, link: str) -> None:
    outside = model.parent / "outside"
    outside.mkdir()
    (outside / "a.jinja").write_text("a secret")
    (model / link).parent.mkdir(exist_ok=True)
    (model / link).symlink_to(
        outside if link == "additional_chat_templates" else outside / "a.jinja"
    )

    assert_refused(model, str(model / link), "link")


def test_a_link_in_a_circle_is_refused(model: Path) -> None:
    (model / "config.json").unlink()
    (model / "config.json").symlink_to("config.json")

    assert_refused(model, str(model / "config.json"))


def test_the_links_of_the_hub_cache_are_followed(good: Path, tmp_path: Path) -> None:
    """The cache keeps the files of all revisions of a model as blobs."""
    repository = tmp_path / "models--someone--model"
    snapshot = repository / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number, file in enumerate(sorted(good.iterdir())):
        shutil.copy(file, repository / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")

    read_all(snapshot)

    (tmp_path / "link to the snapshot").symlink_to(snapshot)
    read_all(tmp_path / "link to the snapshot")


# -- tokenizers ------------------------------------------------------------------------------------


def test_a_tokenizer_of_a_larger_vocabulary_is_refused(model: Path, tmp_path: Path) -> None:
    smaller = tmp_path / "smaller"
    config = replace(MODEL, vocab_size=111)
    huggingface.save(smaller, config, random_params(config), dtype="float32", hf_config_extra={})

    with pytest.raises(UserError, match="vocab_size=111, and the tokenizer has ids up to 111"):
        read_base_model(ModelConfig(path=str(smaller), tokenizer=str(model)))


@pytest.mark.parametrize("ids", ["112", "[0, 500]", "-1", "true", '"0"', "[[0]]", "{}"])
def test_an_end_of_sequence_that_is_no_token_is_refused(model: Path, ids: str) -> None:
    (model / "generation_config.json").write_text(f'{{"eos_token_id": {ids}}}')

    assert_refused(model, str(model / "generation_config.json"), "eos_token_id")


def change_tokenizer(change: Callable[[dict[str, Any]], Any]) -> Damage:
    def damage(path: Path) -> None:
        values = json.loads((path / "tokenizer.json").read_text())
        change(values)
        (path / "tokenizer.json").write_text(json.dumps(values))

    return damage


WRONG_TOKENIZERS = {
    "an empty object": change_tokenizer(dict.clear),
    "no model": change_tokenizer(lambda values: values.update(model=None)),
    "an unknown model": change_tokenizer(lambda values: values["model"].update(type="Magic")),
    "a vocabulary of texts": change_tokenizer(
        lambda values: values["model"].update(vocab={"a": "b"})
    ),
    "a negative id": change_tokenizer(lambda values: values["model"].update(vocab={"a": -1})),
    "an id beyond 2^32": change_tokenizer(
        lambda values: values["model"].update(vocab={"a": 2**40})
    ),
    "merges of numbers": change_tokenizer(lambda values: values["model"].update(merges=[[1, 2]])),
    "merges of unknown tokens": change_tokenizer(
        lambda values: values["model"].update(merges=[["é", "ü"]])
    ),
    "added tokens in a text": change_tokenizer(lambda values: values.update(added_tokens="no")),
    "an unknown decoder": change_tokenizer(lambda values: values.update(decoder={"type": "no"})),
    "a pattern that is none": change_tokenizer(
        lambda values: values.update(
            pre_tokenizer={
                "type": "Split",
                "pattern": {"Regex": "(("},
                "behavior": "Isolated",
                "invert": False,
            }
        )
    ),
}


@pytest.mark.parametrize("damage", WRONG_TOKENIZERS.values(), ids=WRONG_TOKENIZERS.keys())
def test_a_malformed_tokenizer_is_refused(model: Path, damage: Damage) -> None:
    damage(model)

    assert_refused(model, str(model / "tokenizer.json"))


@pytest.mark.parametrize(
    "settings",
    [
        {"eos_token": 7},
        {"eos_token": {"content": 7}},
        {"added_tokens_decoder": [1]},
        {"added_tokens_decoder": {"one": {"content": "a"}}},
        {"added_tokens_decoder": {"0": "text"}},
        {"extra_special_tokens": 3},
        {"model_max_length": "long"},
        {"padding_side": "up"},
    ],
    ids=str,
)
def test_malformed_settings_of_a_tokenizer_end_in_no_traceback(
    model: Path, settings: dict[str, Any]
) -> None:
    """What the library reads in spite of them is fine, too."""
    file = model / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))

    try:
        read_all(model)
    except UserError as error:
        assert str(file) in str(error)
        assert str(error).isprintable()


def test_a_vocabulary_without_merges_in_its_lines_is_refused(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 1}')
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b c d\n")

    with pytest.raises(UserError, match=r"vocab.json makes no tokenizer"):
        tokenizer.load(str(tmp_path))


@pytest.mark.parametrize(
    "template",
    [
        "{% for",
        "{{ messages[7].content }}",
        "{{ raise_exception('no system prompt\nhere') }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% for i in range(10**9) %}a{% endfor %}",
    ],
)
def test_a_chat_template_that_fails_is_one_line(model: Path, template: str) -> None:
    (model / "chat_template.jinja").write_text(template)
    tok = tokenizer.load(str(model))

    with pytest.raises(UserError, match="chat template") as caught:
        chat_template.render(tok, [{"role": "user", "content": "hello"}])
    assert str(caught.value).isprintable()
    assert str(model) in str(caught.value)


def test_a_chat_template_without_the_assistant_is_refused(model: Path) -> None:
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}")
    tok = tokenizer.load(str(model))

    with pytest.raises(UserError, match="leaves out the text of the assistant"):
        tokenizer.reply_tokens(tok, "wrong", None)


def test_no_python_file_of_a_model_directory_is_run(model: Path) -> None:
    (model / "mine.py").write_text(f"open({str(model / 'ran')!r}, 'w')")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings["auto_map"] = {"AutoTokenizer": ["mine.Tokenizer", "mine.Tokenizer"]}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))

    read_all(model)
    entries(model, auto_map={"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"})
    assert_refused(model, str(model / "config.json"), "auto_map")

    assert not (model / "ran").exists()


def test_a_name_that_no_repository_can_have_is_one_line() -> None:
    for name in ("a b/c", "a/b--c", "é/ü", "a" * 200 + "/b"):
        with pytest.raises(UserError, match="no such directory") as caught:
            huggingface.resolve(name)
        assert "\n" not in str(caught.value)


# -- bits at random --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(24))
def test_damaged_bytes_end_in_one_line_or_in_a_model(good: Path, model: Path, seed: int) -> None:
    """Damaged weights may be valid weights. Whatever is read has the shapes of the model."""
    rng = np.random.default_rng(seed)
    names = ["config.json", "generation_config.json", "tokenizer.json", WEIGHTS]
    file = model / names[seed % len(names)]
    content = bytearray(file.read_bytes())
    for _ in range(int(rng.integers(1, 5))):
        # Most of the damage hits the beginning, where the header of a file of weights is.
        position = int(rng.integers(min(len(content), 4096)))
        content[position] = int(rng.integers(256))
    file.write_bytes(content[: len(content) - int(rng.integers(2)) * int(rng.integers(64))])

    try:
        read_all(model)
    except UserError as error:
        assert str(error).isprintable()
        assert len(str(error)) < 1000
        assert str(model) in str(error)
