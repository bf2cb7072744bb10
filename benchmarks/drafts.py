"""Compares decoding with and without drafts (rollout.draft) on real prompts.

    python benchmarks/drafts.py DIRECTORY --problems gsm8k.jsonl [--slots 1 2 4 16 64]

DIRECTORY has a model in Hugging Face format with a chat template. Each line of the file is a JSON
object with the text of a prompt in "problem". Every run decodes --group responses to the same
prompts, once without drafts and once with each --draft, in turn, so that the load of a shared
machine falls on both. The ratio of tokens a second is the median over --repeat pairs. For history
the last epoch is a run with the same weights and other noise.

The script prints a Markdown table with one row for each draft, temperature and number of slots:
tokens a second, the ratio, the seconds of the tail (after three quarters of the responses have
ended, as at the end of an RL step), the share of drafted tokens that were accepted, the tokens of a
slot in a pass of the model, and the share of responses with the same tokens as without drafts. That
share is 1 with model.exact. Otherwise rounding may differ between one and several tokens, and a
token whose probability lies on the edge of its noise may become another one.
"""

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import measure
import numpy as np

from jzero import cli
from jzero.commands.evaluate import defaults
from jzero.config import drafts
from jzero.decoder.driver import Batch, Decoder, Phase
from jzero.decoder.engine import Engine
from jzero.decoder.scheduler import Scheduler
from jzero.decoder.sequence import DecodeCounters, Groups, Sequence, make_groups
from jzero.model import tokenizer
from jzero.notation import read_part
from jzero.rollout.sampler import Sampler
from jzero.service.decoders import load
from jzero.types import Params
from jzero.workers.pool import Pool

DRAFTS = (drafts.Ngram, drafts.Group, drafts.History, drafts.Mtp, None)
MAX_PROMPT = 256  # tokens; longer prompts are left out
HEADINGS = [
    "draft",
    "temperature",
    "slots",
    "tokens/s without",
    "tokens/s",
    "ratio",
    "tail s without",
    "tail s",
    "accepted",
    "tokens a pass",
    "same responses",
]


class Decoded(NamedTuple):
    """One run over all prompts."""

    seconds: float
    tail_seconds: float  # after three quarters of the responses have ended
    responses: list[list[int]]
    counters: DecodeCounters

    @property
    def speed(self) -> float:
        """Returns the tokens a second."""
        return sum(map(len, self.responses)) / self.seconds


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="directory of a model with a chat template")
    parser.add_argument("--problems", type=Path, required=True, help="JSON lines")
    parser.add_argument("--draft", nargs="+", default=["ngram"], help="values of rollout.draft")
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 2, 4, 16, 64])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--group", type=int, default=1, help="responses to a prompt")
    parser.add_argument("--new", type=int, default=200, help="most tokens of a response")
    parser.add_argument("--rounds", type=int, default=1, help="sequences of a slot, on average")
    parser.add_argument("--repeat", type=int, default=1, help="measured pairs of runs")
    parser.add_argument("--dtype", default="float32", help="of the computation")
    return parser


def read_prompts(problems: Path, sampler: Sampler) -> list[np.ndarray]:
    """Returns the prompts of a file, without those of more than MAX_PROMPT tokens."""
    with problems.open(encoding="utf-8") as file:
        texts = [json.loads(line)["problem"] for line in file]
    messages = [[{"role": "user", "content": text}] for text in texts]
    encoded = (tokenizer.prompt_ids(sampler.tokenizer, prompt, []) for prompt in messages)
    return [np.array(ids, np.int32) for ids in encoded if len(ids) <= MAX_PROMPT]


def engine_with(sampler: Sampler, args: argparse.Namespace, slots: int, draft: str) -> Engine:
    """Returns an engine for the sampler's model with other slots and drafts."""
    template = sampler.engine
    settings = replace(
        template.settings,
        num_slots=slots,
        num_pages=0,
        group_size=args.group,
        draft=read_part("rollout.draft", DRAFTS, draft),
    )
    return Engine(
        template.model,
        settings,
        template.mesh,
        template.stop_ids,
        args.dtype,
    )


class Timed(Batch):
    """Groups whose ends are timed, with the responses of an earlier epoch."""

    def __init__(self, groups: Groups, past: Decoded | None) -> None:
        super().__init__(groups)
        self.past = past
        self.ends: list[float] = []

    def turn_ended(self, run: Scheduler, sequence: Sequence) -> None:
        self.ends.append(time.perf_counter())

    def past_responses(self, sequence: Sequence) -> list[np.ndarray]:
        if self.past is None:
            return []
        size = len(self.groups[0])
        first = sequence.prompt_id * size
        responses = self.past.responses[first : first + size]
        return [np.array(response, np.int32) for response in responses]


def decode(
    engine: Engine,
    params: Params,
    prompts: list[np.ndarray],
    args: argparse.Namespace,
    temperature: float,
    seed: int = 0,
    past: Decoded | None = None,
    num_new: int = 0,
) -> Decoded:
    """Decodes all prompts, and returns what was measured.

    past: the last epoch, for history.
    num_new: most tokens of a response; 0: args.new.
    """
    batch = Timed(make_groups(prompts, args.group, num_new or args.new), past)
    started = time.perf_counter()
    phase = Phase(params, (seed, 0), args.group, temperature)
    counters = Decoder(engine, lambda ids: "").run(phase, batch)
    last = time.perf_counter()
    ends = batch.ends
    tail = last - ends[3 * len(ends) // 4 - 1] if len(ends) > 1 else 0.0
    responses = [sequence.new_tokens for group in batch.groups for sequence in group]
    return Decoded(last - started, tail, responses, counters)


def main() -> None:
    args = make_parser().parse_args()
    cli.start_jax([])
    settings = defaults(args.model)
    settings.model.path = args.model
    settings.model.dtype = args.dtype
    settings.rollout = replace(
        settings.rollout, max_prompt_tokens=MAX_PROMPT, max_new_tokens=args.new, kv_dtype=args.dtype
    )
    if any(draft.startswith("mtp") for draft in args.draft):
        settings.rollout.draft = drafts.Mtp()  # so that the head is read
    sampler, params = load(settings, Pool(0))
    prompts = read_prompts(args.problems, sampler)

    rows = []
    for slots in args.slots:
        plain = engine_with(sampler, args, slots, "none")
        with_drafts = {draft: engine_with(sampler, args, slots, draft) for draft in args.draft}
        chosen = prompts[: max(1, slots * args.rounds // args.group)]
        for temperature in args.temperature:
            for draft, engine in with_drafts.items():
                past = None
                if draft.startswith("history"):
                    past = decode(plain, params, chosen, args, temperature, seed=1)
                for compiled in (plain, engine):
                    decode(compiled, params, chosen, args, temperature, num_new=4)
                pairs = []
                for _ in range(args.repeat):
                    without = decode(plain, params, chosen, args, temperature)
                    drafted = decode(engine, params, chosen, args, temperature, past=past)
                    pairs.append((without, drafted))
                rows.append(table_row(draft, temperature, slots, pairs))
                print(" | ".join(rows[-1]), flush=True)
    print(measure.table(HEADINGS, rows))


def table_row(
    draft: str, temperature: float, slots: int, pairs: list[tuple[Decoded, Decoded]]
) -> list[str]:
    """Returns a row of the table from pairs of runs without and with drafts."""
    without, drafted = pairs[-1]
    ratio = statistics.median(pair[1].speed / pair[0].speed for pair in pairs)
    counters = drafted.counters
    emitted = counters.decoded_tokens / counters.draft_passes if counters.draft_passes else 1.0
    accepted = counters.accepted_tokens / max(counters.drafted_tokens, 1)
    equal = [a == b for a, b in zip(without.responses, drafted.responses, strict=True)]
    return [
        draft,
        f"{temperature:g}",
        str(slots),
        f"{without.speed:,.1f}",
        f"{drafted.speed:,.1f}",
        f"{ratio:.2f}",
        f"{without.tail_seconds:.1f}",
        f"{drafted.tail_seconds:.1f}",
        f"{accepted:.2f}",
        f"{emitted:.2f}",
        f"{np.mean(equal):.2f}",
    ]


if __name__ == "__main__":
    main()
