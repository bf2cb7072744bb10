"""Trains a model with TRL on the problems that a run of jzero has, to compare the two.

    pip install -e '.[peer]'
    python benchmarks/trl_grpo.py MODEL_DIR [--steps 40] [--seed 0] [--cpu]
    python benchmarks/trl_grpo.py MODEL_DIR --task gsm8k --data DIR --problems 4 --answers 8 \
      --longest 64 --steps 3 --cpu

By default the problems are those of configs/sums.py: the problems of every step, the grader, the 16
answers to each of 16 problems, the longest answer, the loss (Dr. GRPO) and the optimizer are those
of the recipe; weights are in fp32, and products in bfloat16 on a GPU. Answers to sums end at a line
break. --task gsm8k asks the questions of DIR/train.jsonl in the model's chat format. --odd rewards
answers of an odd number of characters: a model that solves no problem has something to learn.

The line of JSON has the mean reward of each step, the median seconds and processor seconds of a
step after the first, the seconds of the first, and the peak of the memory: the GPU's, or on a CPU
that of the process. --heldout N adds the accuracy on N held-out problems before and after, from
four samples for each, and every --every steps.
"""

import argparse
import contextlib
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from typing import Any

from jzero.config import TaskConfig
from jzero.tasks import find_task
from jzero.types import JsonValue, Problem

SAMPLES = 4  # for each held-out problem


def task_of(args: argparse.Namespace) -> TaskConfig:
    """Returns the settings of the task, as the recipes have them."""
    if args.task == "sums":
        return TaskConfig(name="sums", template="plain")
    return TaskConfig(name="gsm8k", template="chat", data=args.data)


def row_of(problem: Problem) -> dict[str, JsonValue]:
    # Rows with numbers and rows with objects as golds would have columns of several types.
    return {"prompt": problem.prompt, "gold": json.dumps(problem.gold)}


def text_of(completion: str | list[dict[str, str]]) -> str:
    """Returns the text of a completion: itself, or the message of a chat."""
    return completion if isinstance(completion, str) else completion[0]["content"]


def odd_length(completions: list[Any], **_: object) -> list[float]:
    """A reward in TRL's form, for jzero as well: 1 for an odd number of characters."""
    return [float(len(text_of(completion)) % 2) for completion in completions]


def problems_of_steps(task: TaskConfig, args: argparse.Namespace) -> list[dict[str, JsonValue]]:
    """Returns a row for each problem, in the order in which the recipe trains on them."""
    draw = find_task(task.name).train_problems
    steps = range(args.steps)
    return [
        row_of(problem) for step in steps for problem in draw(task, args.seed, step, args.problems)
    ]


def train(args: argparse.Namespace) -> dict[str, object]:
    """Trains, and returns what the line of JSON has."""
    # Not for jzero itself: PyTorch and TRL.
    import datasets
    import torch
    import trl
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    task = task_of(args)
    grade = find_task(task.name).grade
    tokenizer: Any = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    if args.task == "sums":
        [line_break] = tokenizer.encode("\n", add_special_tokens=False)
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(line_break)
        model.generation_config.eos_token_id = line_break

    rewards: list[float] = []
    seconds: list[float] = []
    processor_seconds: list[float] = []
    heldout: dict[int, float] = {}

    def score(text: str, gold: str) -> float:
        return grade(text, json.loads(gold), task).score

    def reward(completions: list[Any], gold: list[str], **_: object) -> list[float]:
        if args.odd:
            scores = odd_length(completions)
        else:
            texts = map(text_of, completions)
            scores = [score(text, answer) for text, answer in zip(texts, gold, strict=True)]
        rewards.append(statistics.fmean(scores))
        return scores

    def evaluate(step: int) -> None:
        """Samples the answers to held-out problems as the recipe does."""
        problems = find_task(task.name).eval_problems(task, args.heldout)
        scores = []
        for first in range(0, len(problems), args.problems):
            rows = [row_of(problem) for problem in problems[first : first + args.problems]]
            tokens = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True)
            tokens = tokens.to(model.device)
            settings = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
            with torch.no_grad():
                answers = model.generate(
                    **tokens,
                    **settings,
                    num_return_sequences=SAMPLES,
                    max_new_tokens=args.longest,
                    pad_token_id=tokenizer.pad_token_id,
                )
            answers = answers[:, tokens["input_ids"].shape[1] :]
            texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
            golds = [row["gold"] for row in rows for _ in range(SAMPLES)]
            scores += [score(text, str(gold)) for text, gold in zip(texts, golds, strict=True)]
        heldout[step] = round(statistics.fmean(scores), 4)

    class Clock(TrainerCallback):
        """Takes the seconds of every step, and evaluates between them."""

        def start(self) -> None:
            self.last, self.last_processor = time.perf_counter(), time.process_time()

        def on_train_begin(self, *_: object, **__: object) -> None:
            if args.heldout:
                evaluate(0)
            self.start()

        def on_step_end(self, *_: object, **__: object) -> None:
            if not args.cpu:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - self.last)
            processor_seconds.append(time.process_time() - self.last_processor)
            step = len(seconds)
            print(f"step {step}: reward {rewards[-1]:.3f}, {seconds[-1]:.2f} s", file=sys.stderr)
            if args.heldout and (step % args.every == 0 or step == args.steps):
                evaluate(step)
            self.start()

    with tempfile.TemporaryDirectory() as scratch:
        settings = trl.GRPOConfig(
            output_dir=scratch,
            use_cpu=args.cpu,
            bf16=not args.cpu,
            per_device_train_batch_size=args.problems * args.answers // args.parts,
            gradient_accumulation_steps=args.parts,
            steps_per_generation=args.parts,
            num_generations=args.answers,
            max_completion_length=args.longest,
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
            train_dataset=datasets.Dataset.from_list(problems_of_steps(task, args)),
            processing_class=tokenizer,
            callbacks=[Clock()],
        )
        with contextlib.redirect_stdout(sys.stderr):
            trainer.train()

    peak = torch.cuda.max_memory_allocated() if not args.cpu else peak_resident_bytes()
    return {
        "peer": f"trl {trl.__version__}",
        "median_step_s": round(statistics.median(seconds[1:]), 3),
        "median_step_processor_s": round(statistics.median(processor_seconds[1:]), 3),
        "first_step_s": round(seconds[0], 2),
        "peak_gib": round(peak / 2**30, 2),
        "rewards": [round(value, 3) for value in rewards],
        "heldout": heldout,
    }


def peak_resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="directory of a model")
    parser.add_argument("--task", choices=("sums", "gsm8k"), default="sums")
    parser.add_argument("--data", default="", help="folder with train.jsonl, of --task gsm8k")
    parser.add_argument("--odd", action="store_true", help="reward odd numbers of characters")
    parser.add_argument("--problems", type=int, default=16, help="of a step")
    parser.add_argument("--answers", type=int, default=16, help="to each problem")
    parser.add_argument("--longest", type=int, default=8, help="tokens of an answer")
    parser.add_argument("--parts", type=int, default=1, help="forward passes of a step")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--heldout", type=int, default=0, help="problems of an evaluation")
    parser.add_argument("--every", type=int, default=10, help="steps between evaluations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--cpu", action="store_true", help="in fp32 without a GPU")
    args = parser.parse_args()
    os.environ |= {"WANDB_DISABLED": "true", "TOKENIZERS_PARALLELISM": "false"}
    print(json.dumps(train(args)), flush=True)


if __name__ == "__main__":
    main()
