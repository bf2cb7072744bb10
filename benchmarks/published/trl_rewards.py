r"""Compares the values of reward functions of TRL's form in jzero with those under TRL.

    python benchmarks/published/trl_rewards.py REWARDS_FILE
        [--functions accuracy_reward len_reward] [--trl PYTHON] [--batches 40] [--no-run]

REWARDS_FILE is any file of such functions, unmodified: open-r1's `src/open_r1/rewards.py` at
e4ac3ae, or at 6befe85, the first commit with `len_reward`. Rows have the columns `problem`,
`answer`, `solution` and `solutions` (open-r1's first `len_reward` has that name).

Without `--functions` all functions of FUNCTIONS that the file has are compared, and factories with
their arguments. Three things are compared, value by value in float32, as TRL keeps them:

- batches of scripted responses, right, wrong and without an answer, through a grader process
- the responses of a tiny run of jzero, of each of its steps (`samples.jsonl`)
- the responses of its evaluations (`evaluations/`)

The values under TRL are those of `GRPOTrainer._calculate_rewards`, called in the interpreter
`--trl`, which has TRL installed (default: this interpreter). Without TRL there, `under_trl.py`
calls the functions as TRL 1.16 does, and the table says so. Prints for each function the values,
how many are equal, how many are not 0, and exits with 1 if one differs.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jzero.config import RewardConfig, Rows, TaskConfig, tiny_arch
from jzero.environments import batched_rewards
from jzero.environments.batched_rewards import Episode
from jzero.errors import UserError
from jzero.files import JsonObject
from jzero.json_values import as_text, member
from jzero.rewards import rewards
from jzero.rewards.trl_rewards import TrainerState
from jzero.types import Grade, JsonValue, Problem, Prompt
from jzero.workers.pool import Pool

FUNCTIONS = (
    "accuracy_reward",
    "len_reward",
    "format_reward",
    "reasoning_steps_reward",
    "get_cosine_scaled_reward(min_value_wrong=-1.0, max_len=200)",
    "get_repetition_penalty_reward(ngram_size=2, max_penalty=-0.5)",
)
UNDER_TRL = Path(__file__).with_name("under_trl.py")
GROUP_SIZE = 4
PROMPTS_PER_BATCH = 3
# Each has a gold that open-r1 can parse, or prose, which it pays 1.
GOLDS = (
    "$\\frac{3}{4}$",
    "$12$",
    "$x^2+1$",
    "$\\boxed{7}$",
    "By symmetry, we are done.",
    "$(1,2)$",
)
WRAPPERS = (
    "<think>\nFirst, we add.\nNext, we stop.\n</think>\n<answer>\n{}\n</answer>",
    "<think>so</think> <answer>{}</answer>",
    "The answer is {}.",
    "so \\boxed{{{}}}, and so on and so on and so on",
    "{} perhaps",
    "I do not know, I do not know.",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--functions", nargs="+", default=[])
    parser.add_argument("--trl", default=sys.executable, help="an interpreter that has TRL")
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--no-run", action="store_true", help="scripted responses only")
    args = parser.parse_args()
    names = choose_functions(args.file, args.functions)
    with tempfile.TemporaryDirectory() as directory:
        batches = {"scripted": scripted(args.file, names, args.batches)}
        if not args.no_run:
            batches |= run(args.file, names, Path(directory))
        return report(args.file, names, batches, args.trl, Path(directory))


def choose_functions(file: Path, asked: Sequence[str]) -> list[str]:
    """Returns the functions to compare: those that are asked for, or all that the file has."""
    names = list(asked)
    for name in () if asked else FUNCTIONS:
        try:
            rewards.check_function(f"{file}:{name}")
        except UserError:
            continue
        names.append(name)
    if not names:
        raise SystemExit(f"{file} has none of {', '.join(FUNCTIONS)}: give --functions")
    return names


# A batch: the lists of a call, and the values of each function in jzero.
Batch = dict[str, JsonValue]


def scripted(file: Path, names: Sequence[str], count: int) -> list[Batch]:
    """Returns batches of scripted responses with the values that jzero's graders give them."""
    rng = random.Random(0)
    episodes = [episodes_of_batch(rng, number) for number in range(count)]
    functions = tuple(f"{file}:{name}" for name in names)
    task = TaskConfig(reward=RewardConfig(functions=functions))
    with Pool(1) as pool:
        results = batched_rewards.call_all(pool, task, episodes, TrainerState(0, count))
    batches = []
    for batch, result in zip(episodes, results, strict=True):
        graded = batched_rewards.add([episode.turns[0][1] for episode in batch], result)
        for grade in graded:
            if grade.failed:
                raise SystemExit(grade.reason)
        values = {
            name: [grade.parts.get(function) for grade in graded]
            for name, function in zip(names, functions, strict=True)
        }
        batches.append(to_batch(batch, values))
    return batches


def episodes_of_batch(rng: random.Random, number: int) -> list[Episode]:
    """Returns GROUP_SIZE responses to each of PROMPTS_PER_BATCH problems."""
    made = []
    for place in range(PROMPTS_PER_BATCH):
        gold = rng.choice(GOLDS)
        row = columns(f"Problem {number}/{place}?", gold)
        prompt = [{"role": "user", "content": row["problem"]}]
        problem = Problem(f"{number}/{place}", "math", prompt, None, row)
        for _ in range(GROUP_SIZE):
            answer = gold if rng.random() < 0.5 else rng.choice(GOLDS)
            text = rng.choice(WRAPPERS).format(answer) + " more" * rng.randrange(4)
            made.append(Episode(problem, [(text, Grade(0.0, False, ""))], list(text.encode())))
    return made


def columns(problem: str, gold: str) -> dict[str, JsonValue]:
    return {"problem": problem, "answer": gold, "solution": gold, "solutions": gold}


def to_batch(episodes: Sequence[Episode], values: dict[str, list[float | None]]) -> Batch:
    """Returns what TRL is called with, and jzero's values."""
    return {
        "inputs": [episode.problem.row for episode in episodes],
        "prompts": [episode.problem.prompt for episode in episodes],
        "completions": [
            [{"role": "assistant", "content": episode.turns[0][0]}] for episode in episodes
        ],
        "completion_ids": [episode.completion_ids for episode in episodes],
        "values": values,
    }


def run(file: Path, names: Sequence[str], directory: Path) -> dict[str, list[Batch]]:
    """Returns the batches of a tiny run: of its steps, and of its evaluations."""
    # Not at the top: grading alone needs no JAX.
    from jzero.config import Config, EvalConfig, MeshConfig, ModelConfig, RolloutConfig, TrainConfig
    from jzero.loops.rl import train
    from jzero.model.tokenizer import countdown

    tokenizer = countdown()
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['content'] }}\n{% endfor %}> "
    )
    tokenizer.save_pretrained(directory / "tokenizer")
    rows = [columns(f"Problem {i}?", gold) for i, gold in enumerate(GOLDS)]
    for part in ("train", "suite"):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (directory / f"{part}.jsonl").write_text(text, encoding="utf-8")
    functions = tuple(f"{file}:{name}" for name in names)
    settings = Config(
        model=ModelConfig(
            tokenizer=str(directory / "tokenizer"),
            dtype="float32",
            arch=tiny_arch(hidden_size=32, intermediate_size=32, num_hidden_layers=1, head_dim=8),
        ),
        task=TaskConfig(
            name="math",
            data=str(Rows(str(directory / "train.jsonl"), answer="solution")),
            template="chat",
            system_prompt="none",
            verifier="open_r1",
            reward=RewardConfig(functions=functions),
        ),
        rollout=RolloutConfig(
            num_prompts=PROMPTS_PER_BATCH,
            group_size=GROUP_SIZE,
            max_prompt_tokens=32,
            max_new_tokens=24,
            num_slots=12,
            page_size=8,
        ),
        train=TrainConfig(
            steps=2, microbatch_tokens=1024, logged_rollouts=PROMPTS_PER_BATCH * GROUP_SIZE
        ),
        eval=EvalConfig(
            problems=0,
            samples=2,
            greedy=False,
            suites=(f"suite={directory}/suite.jsonl",),
            verifier="fast",
        ),
        mesh=MeshConfig(data=-1, fsdp=1),
    )
    train(settings, directory / "run")
    size = PROMPTS_PER_BATCH * GROUP_SIZE
    samples = read_lines(directory / "run" / "samples.jsonl")
    steps = [(row["prompt"], row["gold"]["question"], row) for row in samples]
    evaluated: list[tuple[Prompt, str, JsonObject]] = []
    for when in ("before", "after"):
        for row in read_lines(directory / "run" / "evaluations" / when / "suite-avg@2.jsonl"):
            for sample in row["samples"]:
                evaluated.append((row["prompt"], row["gold"]["question"], sample))
    gold_of = {as_text(row["problem"]): as_text(row["solution"]) for row in rows}
    return {
        "steps": [
            to_recorded(steps[i : i + size], names, functions, gold_of)
            for i in range(0, len(steps), size)
        ],
        "evaluations": [
            to_recorded(evaluated[i : i + size], names, functions, gold_of)
            for i in range(0, len(evaluated), size)
        ],
    }


def read_lines(path: Path) -> list[JsonObject]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def to_recorded(
    recorded: Sequence[tuple[Prompt, str, JsonObject]],
    names: Sequence[str],
    functions: Sequence[str],
    gold_of: dict[str, str],
) -> Batch:
    """Returns a batch of responses that a run has recorded, with the values that they got."""
    values = {
        name: [sample["rewards"].get(function) for _, _, sample in recorded]
        for name, function in zip(names, functions, strict=True)
    }
    episodes = []
    for prompt, question, sample in recorded:
        problem = Problem("", "math", prompt, None, columns(question, gold_of[question]))
        episodes.append(Episode(problem, [(sample["response"], Grade(0.0, False, ""))], []))
    return to_batch(episodes, values)


def report(
    file: Path,
    names: Sequence[str],
    batches: dict[str, list[Batch]],
    interpreter: str,
    directory: Path,
) -> int:
    """Prints how many values are equal, and returns 1 if one differs."""
    request, answer = directory / "request.json", directory / "answer.json"
    flat = [batch for kind in batches.values() for batch in kind]
    content = {"path": str(file.resolve()), "functions": list(names), "batches": flat}
    request.write_text(json.dumps(content), encoding="utf-8")
    command = [interpreter, str(UNDER_TRL), str(request), str(answer)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    said = json.loads(answer.read_text(encoding="utf-8"))
    print(f"{file.name} under {said['how']}")
    print(f"{'function':60}{'in':>12}{'values':>8}{'equal':>8}{'not 0':>8}")
    differing = 0
    for name in names:
        theirs = iter(said["results"][name])
        for kind, of_kind in batches.items():
            pairs: list[tuple[float | None, float | None]] = []
            for batch in of_kind:
                pairs += zip(member(batch, ("values", name), list), next(theirs), strict=True)
            equal = sum(is_equal(ours, other) for ours, other in pairs)
            nonzero = sum(bool(ours) for ours, _ in pairs)
            print(f"{name:60}{kind:>12}{len(pairs):8}{equal:8}{nonzero:8}")
            differing += len(pairs) - equal
    return int(differing > 0)


def is_equal(ours: float | None, theirs: float | None) -> bool:
    """Returns whether two rewards are the same number in float32, or both none."""
    if ours is None or theirs is None:
        return ours is theirs
    return math.isclose(np.float32(ours), np.float32(theirs), rel_tol=0, abs_tol=0)


if __name__ == "__main__":
    sys.exit(main())
