"""`jzero.audit` names no wrong cause: small differences, end tokens, and a sliding window."""

import json
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_audit import (
    ARCHITECTURES,
    BOS,
    PLAIN,
    ROWS,
    TOKENS,
    Row,
    filtered,
    prompts,
    random_params,
    run,
    sample,
    torch_model,
    write,
)

from jzero import audit
from jzero.audits.causes import PAST_THE_END, SMALL, SUPPRESSED
from jzero.audits.log import Sampling
from jzero.errors import UserError
from jzero.model import huggingface

pytestmark = [pytest.mark.peer, pytest.mark.usefixtures("quick_compilation")]
END = 5
CONFIG = ARCHITECTURES["llama"]
FLOAT32 = ("--dtype", "float32")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a model whose end token is END."""
    path = tmp_path_factory.mktemp("causes") / "base"
    extra = {"max_position_embeddings": 512, "bos_token_id": BOS, "eos_token_id": END}
    params = random_params(CONFIG, 0)
    huggingface.save(path, CONFIG, params, dtype="float32", hf_config_extra=extra)
    return path


def sample_with(
    path: Path, seed: int, change: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> list[Row]:
    """Samples rows from changed logits: (logits [B, V], tokens [B, T]) -> logits [B, V]."""
    logits = torch_model(path, "float32")
    rng = np.random.default_rng([seed, 1])
    context = prompts(seed, 10)
    logps = []
    for _ in range(TOKENS):
        log_q = filtered(change(logits(context)[:, -1].copy(), context), PLAIN)
        token = np.argmax(log_q + rng.gumbel(size=log_q.shape), axis=-1)
        logps.append(np.take_along_axis(log_q, token[:, None], -1)[:, 0])
        context = np.concatenate([context, token[:, None]], axis=1)
    columns = np.stack(logps, axis=1)
    return [
        {
            "prompt_ids": context[row, :10].tolist(),
            "response_ids": context[row, 10:].tolist(),
            "logprobs": columns[row].tolist(),
        }
        for row in range(ROWS)
    ]


def without_end(logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    logits[:, END] = -1e9
    return logits


def with_penalty(logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    for row, seen in zip(logits, tokens, strict=True):
        chosen = np.unique(seen)
        row[chosen] = np.where(row[chosen] > 0, row[chosen] / 1.005, row[chosen] * 1.005)
    return logits


def rounded(rows: list[Row], decimals: int) -> list[Row]:
    return [row | {"logprobs": np.round(row["logprobs"], decimals).tolist()} for row in rows]


def merged_in_float16(base: Path, folder: Path) -> Path:
    """Writes the base with slightly wrong weights, as an adapter that was merged in fp16 leaves."""
    params = random_params(CONFIG, 0)

    def noisy(leaf: jax.Array) -> jax.Array:
        return leaf + jnp.asarray((leaf * 3).astype(jnp.float16), jnp.float32) - leaf * 3

    extra = {"max_position_embeddings": 512, "bos_token_id": BOS, "eos_token_id": END}
    huggingface.save(
        folder, CONFIG, jax.tree.map(noisy, params), dtype="float32", hf_config_extra=extra
    )
    return folder


def ended(rows: list[Row]) -> list[Row]:
    """Cuts each response after its first end token."""
    cut = []
    for row in rows:
        tokens = row["response_ids"]
        length = tokens.index(END) + 1 if END in tokens else len(tokens)
        short = {"response_ids": tokens[:length], "logprobs": row["logprobs"][:length]}
        cut.append(row | short)
    return cut


def causes_of(base: Path, rows: list[Row], folder: Path) -> dict[str, int]:
    return dict(run(folder, rows, "--model", str(base), *FLOAT32))


def test_bfloat16_is_named_where_its_scores_explain_the_log(base: Path, tmp_path: Path) -> None:
    rows = ended(sample(base, 1, dtype="bfloat16"))
    assert causes_of(base, rows, tmp_path) == {"computed in bfloat16, not in float32": ROWS}


def test_suppressed_ends_are_named(base: Path, tmp_path: Path) -> None:
    rows = sample_with(base, 2, without_end)
    assert causes_of(base, rows, tmp_path) == {SUPPRESSED: ROWS}


@pytest.mark.parametrize("decimals", [1, 2])
def test_rounded_log_probs_are_named(base: Path, decimals: int, tmp_path: Path) -> None:
    rows = rounded(ended(sample(base, 3)), decimals)
    found = causes_of(base, rows, tmp_path)
    long = sum(len(row["logprobs"]) >= 8 for row in rows)
    assert found[f"log-probs are rounded to {decimals} decimals"] >= long
    assert not [cause for cause in found if "bfloat16" in cause]


def test_small_differences_of_other_causes_are_not_called_bfloat16(
    base: Path, tmp_path: Path
) -> None:
    penalized = ended(sample_with(base, 4, with_penalty))
    other_weights = ended(sample(merged_in_float16(base, tmp_path / "other"), 5))

    for rows in (penalized, other_weights):
        found = causes_of(base, rows, tmp_path)
        assert found, "the fault is too small to be seen"
        assert not [cause for cause in found if "bfloat16" in cause]
        assert SMALL in found


def test_rows_that_go_on_after_an_end_token_are_rejected(base: Path, tmp_path: Path) -> None:
    rows = sample(base, 6, Sampling(1.5))
    past = sum(END in row["response_ids"][:-1] for row in rows)
    assert 0 < past < ROWS

    assert causes_of(base, rows, tmp_path) == {PAST_THE_END: past}
    assert causes_of(base, ended(rows), tmp_path) == {}
    flags = ("--model", str(base), *FLOAT32)
    assert run(tmp_path, rows, *flags, "--ends", "none") == []
    with pytest.raises(UserError, match="--ends 5;6: write token ids below 96 with commas"):
        run(tmp_path, rows, *flags, "--ends", "5;6")


def test_a_row_beyond_the_window_of_the_model_is_refused(base: Path, tmp_path: Path) -> None:
    model = tmp_path / "mistral"
    model.mkdir()
    for file in base.iterdir():
        (model / file.name).symlink_to(file)
    entries = json.loads((base / "config.json").read_text())
    entries |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    (model / "config.json").unlink()
    (model / "config.json").write_text(json.dumps(entries | {"sliding_window": 16}))
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").hardlink_to(base / "model.safetensors")
    row = {"prompt_ids": [1, 2, 3], "logprobs": [-1.0] * 14, "response_ids": [7] * 14}
    longer = {"prompt_ids": [1, 2, 3], "logprobs": [-1.0] * 15, "response_ids": [7] * 15}

    def read(rows: list[Row], *flags: str) -> None:
        log = write(tmp_path / "log.jsonl", rows)
        audit.read_claim(audit.parse([str(log), *flags]))

    read([row], "--model", str(model))  # the last token is not read
    message = r"sliding_window=16, and line 2 of the log has 18 tokens: .* at most 17 tokens"
    with pytest.raises(UserError, match=message):
        read([row, longer], "--model", str(model))
    with pytest.raises(UserError, match=f"--also it=.* has {message}"):
        read([row, longer], "--model", str(base), "--also", f"it={model}")
