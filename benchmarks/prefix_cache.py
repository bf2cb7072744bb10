"""Compares decoding with and without the prefix cache (rollout.prefix_cache).

    python benchmarks/prefix_cache.py DIRECTORY [--workload episodes chat few-shot samples]

DIRECTORY has a model in Hugging Face format with a chat template.

- episodes: five turns of configs/math_multiturn.py, in half as many slots as episodes, so that
  episodes lose their slots while they wait for a reply.
- chat: clients send five messages each, every time with the conversation so far.
- few-shot: questions behind the same eight solved examples, as in lm-eval.
- samples: eight responses to each of some prompts, each with a request of its own.

Every workload runs with `off` and with `on`, first to compile and then --repeat times in turn, so
that the load of a shared machine falls on both. The script prints a Markdown table: tokens to
prefill without the cache and with it, the share of cached ones, the median seconds of a run, and
the share of sequences with the same greedy tokens. `--break-even` measures instead how long it
takes to compute prompts completely, and from cached pages.
"""

import argparse
import statistics
import time
from dataclasses import replace
from typing import NamedTuple

import jax
import measure
import numpy as np

from jzero import cli
from jzero.commands.evaluate import defaults
from jzero.decoder.driver import Batch, Decoder, Phase, Source
from jzero.decoder.engine import Engine, Samples
from jzero.decoder.prefill import prefill_width
from jzero.decoder.scheduler import Scheduler
from jzero.decoder.sequence import DecodeCounters, Groups, Reply, Sequence
from jzero.model import tokenizer
from jzero.model.tokenizer import PreTrainedTokenizerFast
from jzero.service.decoders import load
from jzero.types import Params
from jzero.workers.pool import Pool

EVALUATION = Samples(is_trained=False)
TURNS = 5
SHOTS = 8
GROUP = 8
LONGEST_PROMPT = 1536
SYSTEM = (
    "You are a careful assistant. Read the question twice, reason step by step, check every "
    "calculation, and give the answer of the last step as a number after the words: The answer is."
)
FEEDBACK = (
    "Your answer is either wrong or not parsable to the reward function. You may misunderstand the "
    "original question. Please carefully read the original question, check the previous errors, "
    "and try to answer it again."
)
NAMES = ("Ann", "Bela", "Chen", "Dina", "Emil", "Fay", "Gus", "Hana")
THINGS = ("apples", "books", "coins", "stamps", "marbles", "pencils", "cards", "shells")


class Decoded(NamedTuple):
    """One run of a workload."""

    seconds: float
    responses: list[list[int]]
    counters: DecodeCounters


class Model(NamedTuple):
    """What a workload decodes with."""

    engine: Engine
    params: Params
    tokenizer: PreTrainedTokenizerFast


def question(number: int) -> tuple[str, str]:
    """Returns a word problem of about 60 tokens and its solution of about 60."""
    name, thing = NAMES[number % 8], THINGS[number // 8 % 8]
    a, b, c = 12 + 7 * number % 50, 3 + 5 * number % 30, 2 + number % 4
    text = (
        f"{name} has {a} {thing} in the morning. In the afternoon a neighbor brings {b} more "
        f"{thing}, and in the evening every one of {c} friends brings {b} {thing} as well. How "
        f"many {thing} does {name} have at the end of the day?"
    )
    solution = (
        f"In the afternoon {name} has {a} + {b} = {a + b} {thing}. The {c} friends bring {c} * {b} "
        f"= {c * b} {thing} together. At the end of the day there are {a + b} + {c * b} = "
        f"{a + b + c * b} {thing}. The answer is {a + b + c * b}."
    )
    return text, solution


def chat_tokens(model: Model, text: str) -> np.ndarray:
    """Returns the tokens of a chat with the system prompt and one message."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
    return np.array(tokenizer.prompt_ids(model.tokenizer, messages, []), np.int32)


def message_tokens(model: Model, text: str) -> list[int]:
    """Returns the tokens between two answers: the end of a turn, and the next message."""
    written = f"<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    return tokenizer.encode(model.tokenizer, written)


def few_shot_tokens(model: Model, number: int) -> np.ndarray:
    """Returns the tokens of a question after the examples."""
    examples = [question(100 + shot) for shot in range(SHOTS)]
    text = "".join(f"Question: {asked}\nAnswer: {answer}\n\n" for asked, answer in examples)
    text += f"Question: {question(number)[0]}\nAnswer:"
    return np.array(tokenizer.encode(model.tokenizer, text), np.int32)


def sequence_of(number: int, tokens: np.ndarray, new: int) -> Sequence:
    return Sequence(number, 0, number, tokens, len(tokens) + new)


# -- workloads: each is a source of the decoder with its sequences ---------------------------------


class Workload(Batch):
    """Groups of one sequence each, in the order in which their responses are compared."""

    group_size = 1  # of a prefill; 0: any

    def __init__(self, model: Model, args: argparse.Namespace) -> None:
        self.model = model
        self.args = args
        prompts = self.prompts()
        super().__init__(
            [[sequence_of(number, prompt, args.new)] for number, prompt in enumerate(prompts)]
        )

    def prompts(self) -> list[np.ndarray]:
        """Returns the prompts that arrive first: by default a question of each client."""
        return [chat_tokens(self.model, question(i)[0]) for i in range(self.args.prompts)]


class FewShot(Workload):
    """Questions after the examples."""

    def prompts(self) -> list[np.ndarray]:
        return [few_shot_tokens(self.model, number) for number in range(self.args.questions)]


class Repeated(Workload):
    """Eight responses to each prompt, each with a request of its own."""

    def prompts(self) -> list[np.ndarray]:
        return [prompt for prompt in super().prompts() for _ in range(GROUP)]


class Chat(Workload):
    """Conversations, whose next request comes with the answer to the one before.

    Its groups are sorted by client: they arrive in another order with and without the cache.
    """

    group_size = 0

    def __init__(self, model: Model, args: argparse.Namespace) -> None:
        super().__init__(model, args)
        self.num_begun = len(self.groups)
        # By client: the requests so far.
        self.requests = [[sequence] for [sequence] in self.groups]
        self.arrived: Groups = []

    def more(self) -> Groups:
        arrived, self.arrived = self.arrived, []
        return arrived

    def turn_ended(self, run: Scheduler, sequence: Sequence) -> None:
        requests = next(one for one in self.requests if one[-1] is sequence)
        if len(requests) < TURNS:
            message = message_tokens(self.model, question(len(requests))[0])
            history = np.array([*sequence.tokens.ids.tolist(), *message], np.int32)
            requests.append(sequence_of(self.num_begun, history, self.args.new))
            self.num_begun += 1
            self.arrived.append([requests[-1]])
        self.groups = [[request] for requests in self.requests for request in requests]


class Episodes(Workload):
    """Episodes whose environment asks for another answer four times."""

    has_replies = True

    def __init__(self, model: Model, args: argparse.Namespace) -> None:
        super().__init__(model, args)
        self.in_grading: list[Sequence] = []
        self.feedback = message_tokens(model, FEEDBACK)

    def turn_ended(self, run: Scheduler, sequence: Sequence) -> None:
        self.in_grading.append(sequence)

    def replies(self, wait: bool) -> list[Reply]:
        # Grading takes until all other episodes are waiting, too.
        if not wait:
            return []
        graded, self.in_grading = self.in_grading, []
        return [(one, self.feedback if len(one.turns) < TURNS else None) for one in graded]


WORKLOADS: dict[str, type[Workload]] = {
    "episodes": Episodes,
    "chat": Chat,
    "few-shot": FewShot,
    "samples": Repeated,
}


# -- the measurement -------------------------------------------------------------------------------


def run_source(model: Model, source: Source, group_size: int) -> DecodeCounters:
    """Decodes greedily what a source has."""
    phase = Phase(model.params, (0, 0), group_size, 0.0, samples=EVALUATION)
    return Decoder(model.engine, lambda ids: "").run(phase, source)


def decode(model: Model, name: str, args: argparse.Namespace) -> Decoded:
    """Runs a workload."""
    started = time.perf_counter()
    workload = WORKLOADS[name](model, args)
    counters = run_source(model, workload, workload.group_size)
    seconds = time.perf_counter() - started
    responses = [sequence.new_tokens for [sequence] in workload.groups]
    return Decoded(seconds, responses, counters)


def with_cache(model: Model, name: str, args: argparse.Namespace, choice: str) -> Model:
    """Returns the model with an engine for a workload."""
    is_episode = name == "episodes"
    settings = replace(
        model.engine.settings,
        prefix_cache=choice,
        num_slots=args.prompts // 2 if is_episode else args.slots,
        max_turns=TURNS if is_episode else 1,
        # The rest of the context is for the turns after the prompt.
        max_prompt_tokens=512 if is_episode else LONGEST_PROMPT,
        num_pages=0,
        group_size=1,
    )
    template = model.engine
    engine = Engine(template.model, settings, template.mesh, (), str(template.dtype))
    return model._replace(engine=engine)


def table_row(model: Model, name: str, args: argparse.Namespace) -> list[str]:
    """Measures a workload with and without the cache."""
    models = {choice: with_cache(model, name, args, choice) for choice in ("off", "on")}
    runs: dict[str, list[Decoded]] = {choice: [] for choice in models}
    for _ in range(1 + args.repeat):
        for choice, chosen in models.items():
            runs[choice].append(decode(chosen, name, args))
    off, on = (runs[choice][-1] for choice in ("off", "on"))
    seconds = {
        choice: statistics.median(run.seconds for run in runs[choice][1:]) for choice in runs
    }
    counters = on.counters
    hits = counters.cached_tokens / (counters.cached_tokens + counters.prefill_tokens)
    is_same = [a == b for a, b in zip(off.responses, on.responses, strict=True)]
    return [
        name,
        f"{off.counters.prefill_tokens:,}",
        f"{counters.prefill_tokens:,}",
        f"{hits:.0%}",
        f"{seconds['off']:.1f}",
        f"{seconds['on']:.1f}",
        f"{seconds['off'] / seconds['on']:.2f}",
        f"{np.mean(is_same):.2f}",
    ]


def break_even(model: Model, args: argparse.Namespace) -> list[list[str]]:
    """Measures one prompt at a time: a prefill of all tokens, and chunks after cached pages."""
    rows = []
    rng = np.random.default_rng(0)
    page_size = model.engine.settings.page_size
    chosen = with_cache(model, "few-shot", args, "on")
    plain = with_cache(model, "few-shot", args, "off")
    length = 8 * page_size
    prompts = [rng.integers(0, 1000, length).astype(np.int32) for _ in range(args.repeat + 1)]
    for num_cached in (2, 4, 6, 7):
        beginnings = [prompt[: num_cached * page_size + 1] for prompt in prompts]
        seconds = []
        for one, first in ((plain, []), (chosen, beginnings)):
            times = []
            for begin, prompt in zip(first or prompts, prompts, strict=True):
                second = Second([begin] if first else [], prompt)
                run_source(one, second, 0)
                times.append(time.perf_counter() - second.started)
            seconds.append(statistics.median(times[1:]))
        rest = length - 1 - num_cached * page_size
        share = one.engine.extend_width(rest) / prefill_width(one.engine, length)
        rows.append([f"{share:.2f}", f"{seconds[0]:.3f}", f"{seconds[1]:.3f}"])
    return rows


class Second(Batch):
    """A request for one token, which is timed, after other requests have ended."""

    def __init__(self, first: list[np.ndarray], prompt: np.ndarray) -> None:
        super().__init__([[sequence_of(0, tokens, 1)] for tokens in first])
        self.waiting = [sequence_of(1, prompt, 1)]
        self.num_live = len(first)
        self.started = 0.0

    def admit(self, run: Scheduler) -> Groups | None:
        admitted = super().admit(run) or []
        if not self.num_live and self.waiting:
            jax.block_until_ready(run.state)
            self.started = time.perf_counter()
            self.num_live += 1
            admitted = [[self.waiting.pop()]]
        return admitted

    def turn_ended(self, run: Scheduler, sequence: Sequence) -> None:
        self.num_live -= 1


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="directory of a model with a chat template")
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--break-even", action="store_true", help="measure single prompts")
    parser.add_argument("--prompts", type=int, default=8, help="conversations, and prompts")
    parser.add_argument("--questions", type=int, default=64, help="of few-shot")
    parser.add_argument("--slots", type=int, default=16, help="sequences at the same time")
    parser.add_argument("--new", type=int, default=16, help="tokens of a response")
    parser.add_argument("--repeat", type=int, default=1, help="measured runs")
    parser.add_argument("--dtype", default="float32", help="of the computation")
    return parser


def main() -> None:
    args = make_parser().parse_args()
    cli.start_jax([])
    settings = defaults(args.model)
    settings.model.path = args.model
    settings.model.dtype = args.dtype
    settings.rollout = replace(
        settings.rollout,
        max_prompt_tokens=LONGEST_PROMPT,
        max_new_tokens=args.new,
        decode_steps=min(args.new, settings.rollout.decode_steps),
        kv_dtype=args.dtype,
        max_episode_tokens=LONGEST_PROMPT + args.new,
    )
    sampler, params = load(settings, Pool(0))
    model = Model(sampler.engine, params, sampler.tokenizer)
    if args.break_even:
        headings = ["computed share", "s, all tokens", "s, from cached pages"]
        print(measure.table(headings, break_even(model, args)))
        return
    headings = ["workload", "prefill tokens without", "with", "hits", "s without", "s with"]
    headings += ["ratio", "same responses"]
    rows = []
    for name in args.workload:
        rows.append(table_row(model, name, args))
        print(" | ".join(rows[-1]), flush=True)
    print(measure.table(headings, rows))


if __name__ == "__main__":
    main()
