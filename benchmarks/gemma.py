"""Compares a real Gemma 3 with transformers: logits beyond the window, and greedy continuations.

    python benchmarks/gemma.py DIR [--tokens 2000] [--prompts 32] [--new 128]

DIR is a checkpoint such as google/gemma-3-270m. The text of the prompts is the documentation of
jzero. A continuation that differs is a tie if, at the first different token, the two logits of
transformers differ by less than TIE.
"""

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jzero.attention import xla
from jzero.config import RolloutConfig
from jzero.decoder.driver import Batch, Decoder, Phase
from jzero.decoder.engine import Engine
from jzero.decoder.sequence import make_groups
from jzero.model import huggingface, qwen
from jzero.model.layers import window_in_rows
from jzero.sharding.mesh import make_mesh, param_shardings
from jzero.types import RowLayout

ROOT = Path(__file__).resolve().parents[1]
TIE = 1e-3  # logits, which are up to 40
NEVER = (2**31 - 1,)  # no token ends a continuation


def logits_of(config: qwen.QwenConfig, params: qwen.Params, tokens: jax.Array) -> jax.Array:
    """Returns the logits [T, V] of one sequence [1, T]."""
    positions = jnp.arange(tokens.shape[1])[None]
    segments = jnp.ones_like(tokens)
    layout = RowLayout(0, 1, tokens.shape[1])

    def attend(
        q: jax.Array, k: jax.Array, v: jax.Array, layer: jax.Array, carry: None
    ) -> tuple[jax.Array, None]:
        window = window_in_rows(config, layer, positions)
        return xla.packed(q, k, v, segments, layout, window), carry

    hidden, _ = qwen.forward(config, params, tokens, positions, attend, dtype=jnp.float32)
    return qwen.head(config, params, hidden, jnp.float32)[0]


def continue_prompts(
    config: qwen.QwenConfig, params: qwen.Params, prompts: list[np.ndarray], new_tokens: int
) -> list[list[int]]:
    """Returns the greedy continuation of every prompt by the decoder."""
    mesh = make_mesh(jax.devices()[:1], {"slots": 1, "tensor": 1})
    longest = max(len(prompt) for prompt in prompts)
    settings = RolloutConfig(
        max_prompt_tokens=longest, max_new_tokens=new_tokens, num_slots=8, kv_dtype="float32"
    )
    engine = Engine(config, settings, mesh, NEVER, "float32")
    weights = engine.load_params(params, param_shardings(config, mesh))
    groups = make_groups(prompts, 1, new_tokens)
    Decoder(engine, lambda ids: "").run(Phase(weights, (0, 0), 1, 0.0), Batch(groups))
    return [sequence.new_tokens for [sequence] in groups]


def compare_logits(config: qwen.QwenConfig, params: qwen.Params, peer: Any, ids: list[int]) -> None:
    import torch

    with torch.no_grad():
        expected = peer(torch.tensor([ids])).logits[0].numpy()
    ours = np.asarray(jax.jit(logits_of, static_argnums=0)(config, params, jnp.asarray([ids])))
    error = np.linalg.norm(ours - expected) / np.linalg.norm(expected)
    print(f"logits of {len(ids)} tokens, window {config.sliding_window}: relative {error:.1e}")


def compare_continuations(
    config: qwen.QwenConfig,
    params: qwen.Params,
    peer: Any,
    prompts: list[np.ndarray],
    new_tokens: int,
) -> None:
    import torch

    equal = ties = 0
    ours = continue_prompts(config, params, prompts, new_tokens)
    for prompt, tokens in zip(prompts, ours, strict=True):
        # One pass over our continuation shows the greedy choices of the peer after the same tokens.
        sequence = torch.tensor([[*prompt.tolist(), *tokens]])
        with torch.no_grad():
            logits = peer(sequence).logits[0, len(prompt) - 1 : -1].numpy()
        best = logits.argmax(-1)
        different = np.flatnonzero(best != np.asarray(tokens))
        gaps = [logits[i, best[i]] - logits[i, tokens[i]] for i in different]
        equal += not gaps
        ties += bool(gaps) and max(gaps) < TIE
    print(f"greedy continuations of {new_tokens} tokens: {equal} of {len(prompts)} equal, "
          f"{ties} explained by ties below {TIE}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", metavar="DIR")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--new", type=int, default=128)
    args = parser.parse_args()

    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(args.directory)
    peer = transformers.AutoModelForCausalLM.from_pretrained(args.directory, dtype=torch.float32)
    config, _ = huggingface.load_config(args.directory)
    params = huggingface.load(args.directory, config)

    pages = sorted((ROOT / "docs").glob("*.md"))
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    ids = tokenizer(text)["input_ids"]
    compare_logits(config, params, peer, ids[: args.tokens])
    # Prompts of 20 to 640 tokens: shorter and longer than the window.
    lengths = np.linspace(20, 640, args.prompts).astype(int)
    starts = np.linspace(0, len(ids) - 700, args.prompts).astype(int)
    prompts = [
        np.asarray(ids[start : start + length], np.int32)
        for start, length in zip(starts, lengths, strict=True)
    ]
    compare_continuations(config, params, peer, prompts, args.new)


if __name__ == "__main__":
    main()
