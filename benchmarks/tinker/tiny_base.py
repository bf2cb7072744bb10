"""A tiny base model for the recipes of the Tinker cookbook, and its tokenizer.

A Qwen3 of 0.4 million parameters on bytes. It is pretrained for a few minutes to answer sums in the
cookbook's format for base models, half of the time with a wrong sum or without an end, so that RL
has something to improve.
"""

from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

LENGTH, ROWS = 160, 16  # tokens and rows of a pretraining step


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer whose tokens are bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )


def conversation(rng: np.random.Generator) -> str:
    """Returns four sums with answers, half of them wrong and half of them without an end."""
    text = "User: What is 4 + 5?\n\nAssistant: 9\n\n"
    for _ in range(4):
        a, b = rng.integers(0, 101, 2)
        answer = a + b + (rng.integers(-9, 10) if rng.random() < 0.5 else 0)
        end = "" if rng.random() < 0.5 else "".join(map(str, rng.integers(0, 10, 12)))
        text += f"User: What is {a} + {b}?\n\nAssistant: {answer}{end}\n\n"
    return text


def make_base(out: Path, tokenizer: PreTrainedTokenizerFast, steps: int) -> None:
    """Pretrains the base, and writes it with its tokenizer."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    end = tokenizer.eos_token_id
    assert isinstance(end, int)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=96,
            intermediate_size=192,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            tie_word_embeddings=True,
            max_position_embeddings=2048,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            eos_token_id=end,
            bos_token_id=None,
        )
    )
    adam = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(steps):
        adam.param_groups[0]["lr"] = 3e-3 * min(1, step / 20) * (1 - step / steps)
        rows = torch.full((ROWS, LENGTH + 1), -100)
        for row in rows:
            ids = tokenizer.encode(conversation(rng))[: LENGTH + 1]
            row[: len(ids)] = torch.tensor(ids)
        logits = model(rows[:, :-1].clamp_min(0)).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), rows[:, 1:].flatten(), ignore_index=-100
        )
        adam.zero_grad()
        loss.backward()
        adam.step()
        if step == steps - 1:
            print(f"base: {steps} steps, loss {float(loss):.3f}", flush=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
