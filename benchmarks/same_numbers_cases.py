"""The runs that `same_numbers.py` makes in two checkouts, and the event that each has to show.

A case is a recipe with settings that make it small. Its events are what the case is there for: a
case about preemption in which no sequence is preempted fails, whatever its numbers are.

In settings, `{export}` is the exported model of the case that `needs` names, `{rows}` and
`{held_out}` files of sums, `{tokenizer}` a tokenizer of bytes, and `{store}` the store of separate
sampler jobs.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors.numpy import load_file

from jzero.files import JsonObject

# -- Events ----------------------------------------------------------------------------------------


class Event(NamedTuple):
    """Something that has to happen in a run for its numbers to say anything about it."""

    name: str
    measure: Callable[[Path], float]  # workdir -> a number that is above 0 if it happened


def read_lines(path: Path) -> list[JsonObject]:
    """Returns the objects of a file of JSON lines; none if there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def metric(name: str, above: float = 0.0) -> Event:
    """Returns the event that a metric of some step is above a number."""

    def measure(workdir: Path) -> float:
        lines = read_lines(workdir / "metrics.jsonl")
        return max((line[name] - above for line in lines if name in line), default=0.0)

    return Event(f"{name} > {above:g}", measure)


def longest_evaluated(tokens: int) -> Event:
    """Returns the event that a response of an evaluation has more tokens than this."""

    def measure(workdir: Path) -> float:
        lengths = [
            sample["tokens"] - tokens
            for path in (workdir / "evaluations").rglob("*.jsonl")
            for line in read_lines(path)
            for sample in line["samples"]
        ]
        return float(max(lengths, default=0))

    return Event(f"a response of an evaluation > {tokens} tokens", measure)


def adapter_norm(workdir: Path) -> float:
    """Returns the norm of the second factors of the exported adapter, which are 0 at first."""
    squares = 0.0
    for path in workdir.glob("export-*/adapter_model.safetensors"):
        for name, values in load_file(path).items():
            if "lora_B" in name:
                squares += float(np.square(values.astype(np.float64)).sum())
    return squares**0.5


def differs_from(case: str) -> Event:
    """Returns the event that the numbers are not those of another case of the same checkout."""
    name = "policy/entropy"

    def values(workdir: Path) -> list[float]:
        return [line[name] for line in read_lines(workdir / "metrics.jsonl")]

    def measure(workdir: Path) -> float:
        others = values(workdir.with_name(folder_of(case)))
        return float(sum(a != b for a, b in zip(values(workdir), others, strict=False)))

    return Event(f"another {name} than in the case {case!r}", measure)


def second_host(workdir: Path) -> float:
    """Returns the number of checkpoints that have a part of the second host."""
    return float(len(list(workdir.glob("checkpoints/*/params/ocdbt.process_1"))))


def folder_of(case: str) -> str:
    """Returns the name of a case's workdir."""
    return case.replace(" ", "-").replace(",", "")


TRAINED = metric("optimizer/grad_norm")
ADAPTER = Event("norm of the trained adapter > 0", adapter_norm)

# -- Settings --------------------------------------------------------------------------------------

SHAPE = (
    "num_hidden_layers=2,hidden_size=32,intermediate_size=64,num_attention_heads=2,"
    "num_key_value_heads=1,head_dim=16"
)
ARCH = f"tiny-qwen2({SHAPE})"
SMALL = f"""
model.arch={ARCH} task.grade_workers=1
rollout.num_prompts=4 rollout.group_size=4 rollout.num_slots=32 rollout.page_size=8
warm_start.lr=2e-2 warm_start.batch_size=8 warm_start.tries=1 warm_start.steps=40
train.steps=3 train.logged_rollouts=4 optimizer.lr=1e-3
eval.problems=16 eval.samples=2 eval.every=2
task.options=numbers_min=2 task.options=numbers_max=2 task.options=value_max=9
task.options=target_max=60 task.options=format_score=0.3
rollout.max_prompt_tokens=16 rollout.max_new_tokens=24 train.microbatch_tokens=256
"""
NO_EVALUATION = "eval.problems=0 eval.every=0 "
# Calls of two tokens and few slots: when four groups have ended, others are in the middle.
STALE = f"""
{NO_EVALUATION} rollout.placement.max_staleness=2 rollout.placement.max_running_groups=6
rollout.decode_steps=2 rollout.num_slots=16 train.steps=5
"""
# Pages for about half of what the slots may hold.
FEW_PAGES = f"{NO_EVALUATION} rollout.num_pages=30 rollout.decode_steps=4"
FILTERS = """
rollout.top_k=12 rollout.top_p=0.95 rollout.min_p=0.01
eval.max_new_tokens=40 eval.temperature=0.6 eval.top_p=0.7
"""
LORA = f"""
{NO_EVALUATION} model.adapter.rank=2 model.adapter.alpha=4 optimizer.lr=1e-2
"""
JOBS = (
    f"{NO_EVALUATION} rollout.placement=jobs(store='{{store}}',schedule='fixed',max_staleness=1,"
    "groups_per_request=2,lease_seconds=300.0)"
)
# Exact mode wants a KV cache that rounds nothing.
EXACT = "model.exact=True rollout.kv_dtype=float32"
# Other models, as small as the first one.
EXPERTS = f"model.arch=tiny-qwen3-moe({SHAPE},moe_intermediate_size=16) "
HYBRID = (
    f"model.arch=tiny-qwen3.5({SHAPE},full_attention_interval=2,linear_num_key_heads=2,"
    "linear_num_value_heads=2,linear_key_head_dim=16,linear_value_head_dim=16)"
)
# Recipes that keep their model and their lengths. The slots are set, because two checkouts may
# choose other numbers, and arrays of another shape are summed in another order.
OWN_MODEL = """
rollout.num_prompts=4 rollout.group_size=4 rollout.num_slots=16 task.grade_workers=1
warm_start.steps=20 warm_start.tries=1 train.steps=3
train.logged_rollouts=4 eval.problems=16 eval.every=0
"""
# No answer is right after so few steps, but their lengths differ.
LENGTHS = "task.reward.functions=accuracy task.reward.functions=length "
# So many steps until some responses are calls, which have 79 tokens.
CALLS = f"{OWN_MODEL} {LENGTHS} warm_start.steps=300 warm_start.batch_size=16 warm_start.lr=6e-3"
ROWS = """
train.steps=2 rollout.num_prompts=2 rollout.num_slots=16 eval.every=0 task.grade_workers=1
task.data={rows} model.tokenizer={tokenizer}
"""
# Random bytes are a turn that ends at one of these letters. The reply has many tokens of one byte.
STOPS = " ".join(f"rollout.stop={letter}" for letter in "abcdefghijklmnopqrst")
TURNS = f"""
{ROWS} {LENGTHS} {STOPS} eval.suites= task.data.level_min=1 task.data.level_max=5
task.turn_reward=score rollout.max_reply_tokens=256
"""
WORD_PROBLEMS = f"{ROWS} task.eval_data={{held_out}} eval.problems=4"
# Several prompts on each of two devices, which begin with the same system prompt.
PREFIXES = f"""
{WORD_PROBLEMS} rollout.prefix_cache=on rollout.page_size=8 rollout.num_prompts=6 eval.every=1
"""
FINE_TUNING = f"""
model.arch={ARCH} sft.batch_size=8 warm_start.steps=6 warm_start.batch_size=8
eval.problems=16 eval.every=3 train.microbatch_tokens=768 task.grade_workers=1
"""

# -- The cases -------------------------------------------------------------------------------------

TINKER = "tinker"  # the recipe of a server, whose client is tinker/scripted_loop.py


@dataclass(frozen=True)
class Case:
    """A recipe, the settings that make it small, and what has to happen in it."""

    recipe: str  # FILE.py:PRESET of configs/, or TINKER
    settings: str
    events: tuple[Event, ...] = (TRAINED,)
    num_processes: int = 1
    num_samplers: int = 0  # further processes of `python -m jzero.sample`
    needs: str = ""  # the case that has to end before, whose model is `{export}`
    is_short: bool = False  # part of --short
    is_optimized: bool = False  # compiled at XLA's default optimization


# One process takes cases from the front and one from the back. Neighbors share compiled programs.
CASES = {
    "countdown": Case("countdown.py:tiny", SMALL, is_short=True),
    "asynchronous": Case(
        "countdown.py:tiny",
        SMALL + STALE,
        (TRAINED, metric("async/carried_tokens"), metric("async/staleness_2")),
        is_short=True,
    ),
    "preemption": Case(
        "countdown.py:tiny", SMALL + FEW_PAGES, (TRAINED, metric("rollout/preempted"))
    ),
    "jobs": Case(
        "countdown.py:tiny",
        SMALL + JOBS,
        (TRAINED, metric("jobs/snapshot_bytes"), metric("async/staleness_1")),
        num_samplers=1,
    ),
    "two hosts": Case(
        "countdown.py:tiny",
        SMALL,
        (TRAINED, Event("the second host has a part of the checkpoint", second_host)),
        num_processes=2,
    ),
    "ppo": Case(
        "countdown.py:tiny,ppo",
        SMALL + NO_EVALUATION,
        (TRAINED, metric("critic/loss")),
        is_short=True,
    ),
    "adapter": Case("countdown.py:tiny", SMALL + LORA, (TRAINED, ADAPTER), is_short=True),
    "int8 base": Case(
        "countdown.py:tiny",
        SMALL + LORA + "model.base=int8",
        (TRAINED, ADAPTER, differs_from("adapter")),
        needs="adapter",
    ),
    "filters": Case(
        "countdown.py:tiny",
        SMALL + FILTERS,
        (TRAINED, longest_evaluated(24), differs_from("countdown")),
        needs="countdown",
        is_short=True,
    ),
    "tinker": Case(
        TINKER,
        "--model={export}",
        (metric("tinker/sampled_tokens"), metric("tinker/moved")),
        needs="countdown",
        is_short=True,
    ),
    "distill": Case(
        "distill.py:tiny",
        SMALL + NO_EVALUATION + "teacher.path={export}",
        (TRAINED, metric("distill/teacher_nll"), metric("distill/kl")),
        needs="countdown",
    ),
    "optimized": Case(
        "countdown.py:tiny",
        SMALL + NO_EVALUATION,
        (TRAINED, differs_from("countdown")),
        needs="countdown",
        is_optimized=True,
    ),
    "exact": Case("countdown.py:tiny", SMALL + EXACT, (TRAINED, metric("policy/exact_tokens"))),
    "exact, experts": Case(
        "countdown.py:tiny-moe",
        SMALL + NO_EVALUATION + EXPERTS + EXACT,
        (TRAINED, metric("policy/exact_tokens")),
    ),
    "experts": Case(
        "countdown.py:tiny-moe", SMALL + EXPERTS, (TRAINED, metric("experts/largest_load"))
    ),
    "hybrid": Case("countdown.py:tiny-hybrid", SMALL + HYBRID),
    "code": Case("code.py:tiny", OWN_MODEL + LENGTHS, (TRAINED, metric("sandbox/seconds"))),
    "calculator": Case("calculator.py:tiny", CALLS, (TRAINED, metric("tools/calls"))),
    "guess": Case("guess.py:tiny", OWN_MODEL, (TRAINED, metric("turns/mean", above=1.0))),
    "math with turns": Case(
        "math_multiturn.py:tiny", TURNS, (TRAINED, metric("turns/mean", above=1.0))
    ),
    "prefix cache": Case("gsm8k.py:tiny", PREFIXES, (TRAINED, metric("rollout/prefix_cache_hits"))),
    "gsm8k": Case("gsm8k.py:tiny", WORD_PROBLEMS),
    "sft": Case(
        "sft.py:tiny", FINE_TUNING, (metric("sft/loss"), metric("eval/loss")), is_short=True
    ),
}
