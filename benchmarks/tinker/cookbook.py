"""Runs unmodified recipes of the Tinker cookbook against a server on this machine.

    python benchmarks/tinker/cookbook.py --python SDK/bin/python --out DIR [--steps 12]
    python benchmarks/tinker/cookbook.py --python SDK/bin/python --out DIR --model MODEL \\
        --groups 4 --group-size 8 --max-tokens 6 --learning-rate 3e-4 --seeds 0,1,2

--python is an interpreter with `tinker` and `tinker-cookbook[math-rl]`. --model is the directory of
a chat model whose turns stand between <|im_start|> and <|im_end|>, such as SmolLM2-135M-Instruct.
Without it the base is a tiny model that is pretrained first (tiny_base.py). The tokenizer lies in a
Hugging Face cache under the name of a model that the cookbook knows, which determines the format of
the prompts. The server runs with --exact.

Two recipes train an adapter: sl_loop on sums with answers, and math_rl on the sums of the
cookbook's environment `arithmetic`, once for each seed. That environment asks the same sums in
every run and ignores the seed: the runs differ in the adapter's first weights, which the SDK leaves
to the server, and in the samples.

Prints each recipe's metrics per step, and writes those of math_rl to OUT/math_rl-seedN. The exit
status is 1 if a recipe fails, or if the cookbook's kl_sample_train_v1 or _v2 is not 0.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from tiny_base import make_base, make_tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

ROOT = Path(__file__).resolve().parents[2]
BASE_NAME = "Qwen/Qwen3-8B-Base"  # prompts of "User:" and "Assistant:"
CHAT_NAME = "Qwen/Qwen3-4B-Instruct-2507"  # prompts between <|im_start|> and <|im_end|>
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
SL_LOOP, MATH_RL = "sl_loop", "math_rl"
KL_COLUMNS = ("optim/kl_sample_train_v1", "optim/kl_sample_train_v2")
COLUMNS = (
    "train_mean_nll",
    "env/all/reward/total",
    "env/all/format",
    "env/all/correct",
    "time/total",
    *KL_COLUMNS,
)


class Run(NamedTuple):
    """One run of a recipe."""

    name: str  # of its directory
    arguments: list[str]  # of the interpreter


def make_cache(home: Path, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Writes the tokenizer into a Hugging Face cache under the name of a known model."""
    repository = home / "hub" / f"models--{name.replace('/', '--')}"
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


def start_server(
    model: Path, name: str, store: Path, rank: int
) -> tuple[subprocess.Popen[str], str]:
    """Returns the server's process, and its address."""
    command = [sys.executable, "-m", "jzero.tinker", f"--model={model}", f"--name={name}"]
    server = subprocess.Popen(
        [*command, f"--store={store}", f"--max-rank={rank}", *SERVER],
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


def make_runs(recipe: str, options: argparse.Namespace, name: str) -> list[Run]:
    """Returns the runs of one recipe with the model called `name`."""
    common = [
        f"model_name={name}",
        f"max_steps={options.steps}",
        f"lora_rank={options.rank}",
        "save_every=0",
    ]
    if recipe == SL_LOOP:
        module = ["-m", "tinker_cookbook.recipes.sl_loop", "batch_size=16", "max_length=256"]
        return [Run(recipe, [*module, *common, f"learning_rate={options.sl_learning_rate}"])]
    assert recipe == MATH_RL, f"{recipe=}"
    module = [
        "-m",
        "tinker_cookbook.recipes.math_rl.train",
        "env=arithmetic",
        f"groups_per_batch={options.groups}",
        f"group_size={options.group_size}",
        f"max_tokens={options.max_tokens}",
        f"learning_rate={options.learning_rate}",
        "loss_fn=importance_sampling",
        "eval_every=0",
    ]
    return [
        Run(f"{recipe}-seed{seed}", [*module, *common, f"seed={seed}"])
        for seed in options.seeds.split(",")
    ]


def is_healthy_run(run: Run, options: argparse.Namespace, url: str) -> bool:
    """Runs a recipe, and prints its metrics. Returns whether it succeeded with a KL of 0."""
    log = (options.out / run.name).resolve()
    shutil.rmtree(log, ignore_errors=True)  # the recipe would resume
    environment = os.environ | {
        "HF_HOME": str((options.out / "hf").resolve()),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TINKER_API_KEY": "tml-local",
        "TINKER_BASE_URL": url,
    }
    started = time.monotonic()
    printed = options.out / f"{run.name}.log"
    with printed.open("w") as output:
        status = subprocess.run(
            [options.python, "-W", "ignore", *run.arguments, f"log_path={log}"],
            cwd=options.out / "data",
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode
    print(f"{run.name}: exit status {status} after {time.monotonic() - started:.0f} s")
    if status:
        print(f"  its output is in {printed}")
        return False
    metrics = log / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    is_exact = True
    for row in rows:
        present = [column for column in COLUMNS if column in row]
        is_exact &= all(row[column] == 0 for column in present if column in KL_COLUMNS)
        if present:
            shown = [f"{column.split('/')[-1]} {row[column]:.4g}" for column in present]
            print("  " + "  ".join(shown), flush=True)
    return is_exact


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", required=True, type=Path)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--model", type=Path, help="default: a tiny base, made in OUT")
    parser.add_argument("--base-steps", type=int, default=500, help="of the tiny base")
    parser.add_argument("--recipes", default=f"{SL_LOOP},{MATH_RL}")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--sl-learning-rate", type=float, default=1e-3, help="of sl_loop")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="of math_rl")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--groups", type=int, default=16, help="sums of a step of math_rl")
    parser.add_argument("--group-size", type=int, default=4, help="samples of a sum")
    parser.add_argument("--max-tokens", type=int, default=16, help="of a sample")
    parser.add_argument("--seeds", default="0", help="of math_rl, such as 0,1,2")
    return parser.parse_args()


def main() -> None:
    """Makes what is missing, starts the server, and runs the recipes."""
    options = parse()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.model is None:
        name, model = BASE_NAME, options.out / "base"
        tokenizer = make_tokenizer()
        if not (model / "config.json").exists():
            make_base(model, tokenizer, options.base_steps)
    else:
        name, model = CHAT_NAME, options.model
        tokenizer = AutoTokenizer.from_pretrained(model)
    make_cache(options.out / "hf", tokenizer, name)
    make_data(options.out / "data")
    server, url = start_server(model.resolve(), name, options.out.resolve() / "store", options.rank)
    failed: list[str] = []
    try:
        for recipe in options.recipes.split(","):
            for run in make_runs(recipe, options, name):
                if not is_healthy_run(run, options, url):
                    failed.append(run.name)
    finally:
        server.terminate()
    if failed:
        raise SystemExit(f"error: no success, or a KL that is not 0: {', '.join(failed)}")


if __name__ == "__main__":
    main()
