"""Runs unmodified recipes of the Tinker cookbook against a server on this machine.

    python benchmarks/tinker/cookbook.py --python SDK/bin/python --out DIR [--steps 12] [--recipes sl_loop,math_rl]

--python is an interpreter with `tinker`, `tinker-cookbook` and torch. The base is a Qwen3 of 0.4
million parameters on bytes, which is pretrained for a few minutes to answer sums in the cookbook's
format, half of the time with a wrong sum or without an end. Its tokenizer lies in a Hugging Face
cache under a name that the cookbook knows. The server runs with --exact. Prints each recipe's
metrics per step; the last column, the cookbook's kl_sample_train_v1 and _v2, has to be 0.
"""  # noqa: E501 (the command line)

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

ROOT = Path(__file__).resolve().parents[2]
NAME = "Qwen/Qwen3-8B-Base"
LENGTH, ROWS = 160, 16  # tokens and rows of a pretraining step
SERVER = [
    "--exact",
    "--context=512",
    "--port=0",
    "--config.model.dtype=float32",
    "--config.model.remat=none",
    "--config.rollout.kv_dtype=float32",
    "--config.rollout.page_size=64",
    "--config.rollout.decode_steps=4",
    "--config.train.microbatch_tokens=2048",
]
RECIPES = {
    "sl_loop": "tinker_cookbook.recipes.sl_loop batch_size=16 max_length=256 save_every=0",
    "math_rl": "tinker_cookbook.recipes.math_rl.train env=arithmetic group_size=4 "
    "groups_per_batch=16 max_tokens=16 loss_fn=importance_sampling eval_every=0 save_every=0",
}
COLUMNS = (
    "train_mean_nll",
    "env/all/reward/total",
    "env/all/format",
    "env/all/correct",
    "time/total",
    "optim/kl_sample_train_v1",
    "optim/kl_sample_train_v2",
)


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


def make_cache(home: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Writes the tokenizer into a Hugging Face cache under the name of a known model."""
    repository = home / "hub" / f"models--{NAME.replace('/', '--')}"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True, exist_ok=True)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs/main").write_text("0" * 40)
    tokenizer.save_pretrained(snapshot)
    settings = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    (snapshot / "config.json").write_text(json.dumps(settings))


def make_data(directory: Path) -> None:
    """Writes the data set of sl_loop, with sums in place of conversations."""
    data = directory / "HuggingFaceH4/no_robots"
    data.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", 256), ("test", 32)):
        rows = []
        for i in range(count):
            a, b = i % 50, i * 7 % 50
            messages = [
                {"role": "user", "content": f"What is {a} + {b}?"},
                {"role": "assistant", "content": str(a + b)},
            ]
            rows.append(json.dumps({"messages": messages, "prompt_id": str(i)}) + "\n")
        (data / f"{split}.jsonl").write_text("".join(rows))
    files = [f"  - split: {split}\n    path: {split}.jsonl\n" for split in ("train", "test")]
    header = f"---\nconfigs:\n- config_name: default\n  data_files:\n{''.join(files)}---\n"
    (data / "README.md").write_text(header)


def start_server(model: Path, store: Path) -> tuple[subprocess.Popen[str], str]:
    """Returns the server's process, and its address."""
    command = [sys.executable, "-m", "jzero.tinker", f"--model={model}", f"--name={NAME}"]
    server = subprocess.Popen(
        [*command, f"--store={store}", *SERVER],
        cwd=ROOT,
        env=os.environ | {"JAX_NUM_CPU_DEVICES": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    for line in server.stdout:
        if "TINKER_BASE_URL=" in line:
            return server, line.partition("TINKER_BASE_URL=")[2].split()[0]
    raise SystemExit("error: the server has ended: see its messages above")


def run_recipe(name: str, options: argparse.Namespace, url: str) -> None:
    """Runs one recipe, and prints its metrics."""
    module, *arguments = RECIPES[name].split()
    log = (options.out / f"{name}-{time.time():.0f}").resolve()
    environment = os.environ | {
        "HF_HOME": str((options.out / "hf").resolve()),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TINKER_API_KEY": "tml-local",
        "TINKER_BASE_URL": url,
    }
    common = [f"model_name={NAME}", f"max_steps={options.steps}", f"log_path={log}"]
    common += [f"learning_rate={options.learning_rate}", "lora_rank=8"]
    started = time.monotonic()
    with (options.out / f"{name}.log").open("w") as output:
        status = subprocess.run(
            [options.python, "-W", "ignore", "-m", module, *arguments, *common],
            cwd=options.out / "data",
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode
    print(f"{name}: exit status {status} after {time.monotonic() - started:.0f} s")
    for line in (log / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        shown = [
            f"{column.split('/')[-1]} {row[column]:.4g}" for column in COLUMNS if column in row
        ]
        if shown:
            print("  " + "  ".join(shown), flush=True)


def main() -> None:
    """Makes what is missing, starts the server, and runs the recipes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", required=True, type=Path)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--base-steps", type=int, default=500)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--recipes", default=",".join(RECIPES))
    options = parser.parse_args()
    tokenizer = make_tokenizer()
    base = options.out / "base"
    if not (base / "config.json").exists():
        make_base(base, tokenizer, options.base_steps)
    make_cache(options.out / "hf", tokenizer)
    make_data(options.out / "data")
    server, url = start_server(base.resolve(), options.out.resolve() / "store")
    try:
        for name in options.recipes.split(","):
            run_recipe(name, options, url)
    finally:
        server.terminate()


if __name__ == "__main__":
    main()
