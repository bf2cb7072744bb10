"""Trains a model on the problems of configs/sums.py with TRL, to compare with jzero's run.

    pip install -e '.[peer]'
    python benchmarks/trl_sums.py MODEL_DIR [--steps 40] [--seed 0] [--cpu]

The problems of every step, the grader, the 16 answers to each of 16 problems, the longest answer,
the loss (Dr. GRPO) and the optimizer are those of the recipe; weights are in fp32, and products in
bfloat16 on a GPU. Answers end at a line break. The line of JSON has the mean reward of each step,
the median seconds of a step after the first, the seconds of the first, and the peak of the GPU's
memory.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from typing import Any

from jzero.config import TaskConfig
from jzero.tasks import sums

PROBLEMS = 16  # of a step
ANSWERS = 16  # to each problem
LONGEST = 8  # tokens of an answer
TASK = TaskConfig(name="sums", template="plain")


def problems_of_steps(steps: int, seed: int) -> list[dict[str, object]]:
    """Returns a row for each problem, in the order in which the recipe trains on them."""
    rows: list[dict[str, object]] = []
    for step in range(steps):
        for problem in sums.train_problems(TASK, seed, step, PROBLEMS):
            rows.append({"prompt": problem.prompt, "gold": problem.gold})
    return rows


def train(args: argparse.Namespace) -> dict[str, object]:
    """Trains, and returns what the line of JSON has."""
    # Not for jzero itself: PyTorch and TRL.
    import datasets
    import torch
    import trl
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    tokenizer: Any = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    [line_break] = tokenizer.encode("\n", add_special_tokens=False)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(line_break)
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    model.generation_config.eos_token_id = line_break

    rewards: list[float] = []
    seconds: list[float] = []

    def reward(completions: list[str], gold: list[int], **_: object) -> list[float]:
        scores = [
            sums.grade(text, answer, TASK).score
            for text, answer in zip(completions, gold, strict=True)
        ]
        rewards.append(statistics.fmean(scores))
        return scores

    class Clock(TrainerCallback):
        """Takes the seconds of every step."""

        def on_train_begin(self, *_: object, **__: object) -> None:
            self.last = time.perf_counter()

        def on_step_end(self, *_: object, **__: object) -> None:
            if not args.cpu:
                torch.cuda.synchronize()
            now = time.perf_counter()
            seconds.append(now - self.last)
            self.last = now

    with tempfile.TemporaryDirectory() as scratch:
        settings = trl.GRPOConfig(
            output_dir=scratch,
            use_cpu=args.cpu,
            bf16=not args.cpu,
            per_device_train_batch_size=PROBLEMS * ANSWERS,
            gradient_accumulation_steps=1,
            steps_per_generation=1,
            num_generations=ANSWERS,
            max_completion_length=LONGEST,
            num_iterations=1,
            beta=0.0,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            loss_type="dr_grpo",
            scale_rewards="none",
            epsilon=0.2,
            learning_rate=args.lr,
            weight_decay=0.0,
            adam_beta1=0.9,
            adam_beta2=0.95,
            max_grad_norm=1.0,
            lr_scheduler_type="constant",
            max_steps=args.steps,
            gradient_checkpointing=False,
            shuffle_dataset=False,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=args.seed,
        )
        trainer: Any = trl.GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=settings,
            train_dataset=datasets.Dataset.from_list(problems_of_steps(args.steps, args.seed)),
            processing_class=tokenizer,
            callbacks=[Clock()],
        )
        with contextlib.redirect_stdout(sys.stderr):
            trainer.train()

    peak = None if args.cpu else round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return {
        "peer": f"trl {trl.__version__}",
        "median_step_s": round(statistics.median(seconds[1:]), 3),
        "first_step_s": round(seconds[0], 2),
        "peak_gib": peak,
        "rewards": [round(value, 3) for value in rewards],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="directory of a model")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--cpu", action="store_true", help="in fp32 without a GPU")
    args = parser.parse_args()
    os.environ |= {"WANDB_DISABLED": "true", "TOKENIZERS_PARALLELISM": "false"}
    print(json.dumps(train(args)), flush=True)


if __name__ == "__main__":
    main()
