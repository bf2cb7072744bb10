"""Decodes many sequences with drafts and without, and counts the tokens and bits that differ.

    JAX_NUM_CPU_DEVICES=8 python benchmarks/same_tokens.py [--sequences 10000] [--only qwen3 gemma2]
    python benchmarks/same_tokens.py --model DIRECTORY --problems gsm8k.jsonl --sequences 200

Without --model: tiny models with random weights of every family, each with its share of the
sequences, half of them as requests and half as episodes. With --model: that model, with requests
that are problems of the file, as drafts.py reads it.

    requests    each with filters (top-p, top-k, min-p), a temperature and a length of its own, and
                stop strings; the sequences of a group have the same prompt
    episodes    of up to three turns, with replies that depend on what was said, and stop strings

Everything decodes with model.exact, once without drafts on one device, then with each kind of draft
in another arrangement: 8 shards, 2 shards and small pages, too few pages, so that sequences are
preempted, other slots and pages. Past responses (rollout.draft=history) are those of the first run,
every fifth token changed. A line of the table is a family and a kind of draft:

    sequences, tokens      that were compared
    accepted               share of the drafted tokens that were accepted
    preempted              sequences that lost their slot
    other tokens, bits     sequences with another token, or with another bit in a log-prob

The exit status is 1 if a sequence differs, or if no draft was accepted somewhere.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import drafts
import jax
import measure
import numpy as np

from jzero import cli
from jzero.commands.evaluate import defaults
from jzero.config import RolloutConfig
from jzero.config.architecture import tiny_arch
from jzero.config.drafts import Draft, Group, History, Mtp, Ngram
from jzero.decoder.driver import Batch, Decoder, Phase
from jzero.decoder.engine import ROLLOUTS, Engine, Samples
from jzero.decoder.sampling import Filters
from jzero.decoder.scheduler import Scheduler
from jzero.decoder.sequence import DecodeCounters, Groups, Reply, Sequence, make_groups
from jzero.model import qwen
from jzero.model.new_model import new_model
from jzero.service.decoders import load
from jzero.sharding.mesh import make_mesh, param_shardings
from jzero.types import Params
from jzero.workers.pool import Pool

VOCAB = 96  # of a tiny model: token i is the character "!" + i
STOP_IDS = (3, 50)
STOP_STRINGS = ("Ak", "Z", "5!")
GROUP = 4
TEMPERATURE = 0.8
FILTERS = (Filters(), Filters(top_k=5), Filters(top_p=0.7), Filters(min_p=0.1))
TEMPERATURES = (0.0, 0.7, 1.0, 1.3)
REQUESTS = Samples(has_choices=True)
SMALL = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
# By family: entries of a tiny model beside SMALL. Windows are shorter than a sequence.
FAMILIES: dict[str, dict[str, int]] = {
    "qwen2": {"num_hidden_layers": 2},
    "qwen3": {"num_hidden_layers": 3},
    "llama": {"num_hidden_layers": 2},
    "gemma2": {"num_hidden_layers": 3, "sliding_window": 12},
    "gemma3": {"num_hidden_layers": 3, "sliding_window": 12},
    "qwen3-moe": {"num_hidden_layers": 2, "moe_intermediate_size": 32},
    "qwen3.5": {"full_attention_interval": 2},
    "qwen3.5-moe": {"full_attention_interval": 2, "moe_intermediate_size": 24},
}
DELTA_NETS = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
# At these costs every draft is tried.
KINDS: dict[str, Draft] = {
    "ngram": Ngram(tokens=3, cost=1.0),
    "group": Group(tokens=4, reach=64, cost=1.0),
    "history": History(tokens=5, reach=64, cost=1.0),
    "mtp": Mtp(tokens=2, cost=1.0),
}
TURNS = {
    "max_new_tokens": 8,
    "max_turns": 3,
    "max_reply_tokens": 12,
    "max_episode_tokens": 72,
}


@dataclass(frozen=True)
class Arrangement:
    """Devices, slots and pages of a decoder."""

    shards: int = 1
    settings: dict[str, int] = field(default_factory=dict)


WITHOUT_DRAFTS = Arrangement()
ARRANGEMENTS = {
    "ngram": Arrangement(shards=8),
    "group": Arrangement(shards=2, settings={"page_size": 4}),
    "history": Arrangement(settings={"num_slots": 12, "page_size": 4, "num_pages": 60}),
    "mtp": Arrangement(settings={"num_slots": 24, "page_size": 8}),
}


@dataclass(frozen=True)
class Workload:
    """What is decoded."""

    is_episodes: bool
    prompts: list[np.ndarray]
    new_tokens: int

    @property
    def samples(self) -> Samples:
        return ROLLOUTS if self.is_episodes else REQUESTS

    def groups(self) -> Groups:
        """Returns the sequences, each with its own filters and temperature if it is a request."""
        groups = make_groups(self.prompts, GROUP, self.new_tokens)
        if self.is_episodes:
            return groups
        rng = np.random.default_rng(2)
        for sequence in (sequence for group in groups for sequence in group):
            sequence.filters = FILTERS[rng.integers(len(FILTERS))]
            sequence.temperature = TEMPERATURES[rng.integers(len(TEMPERATURES))]
            sequence.length_limit -= int(rng.integers(self.new_tokens))
        return groups


@dataclass(frozen=True)
class Decoded:
    """The sequences of a run by (prompt, sample), and what it counted."""

    sequences: dict[tuple[int, int], Sequence]
    counters: DecodeCounters


# -- decoding --------------------------------------------------------------------------------------


def text_of(tokens: list[int]) -> str:
    return "".join(chr(ord("!") + token) for token in tokens)


def scripted_reply(sequence: Sequence) -> list[int] | None:
    """Returns a reply of 2 to 12 tokens that depends on what was said, or None after the end."""
    number = int(np.sum(sequence.new_tokens)) + 7 * sequence.prompt_id + sequence.sample_index
    if number % 5 == 0 or len(sequence.turns) >= TURNS["max_turns"]:
        return None
    return [4 + (number + i) % 40 for i in range(2 + number % 11)]


class Scripted(Batch):
    """The groups of a workload. The turns of episodes get scripted replies."""

    def __init__(self, work: Workload, past: Decoded | None, stop: tuple[str, ...]) -> None:
        super().__init__(work.groups())
        self.has_replies = work.is_episodes
        self.past = past
        self.stop = stop
        self.asked: list[Sequence] = []
        self.vocab_size = 0  # of the run

    def begin(self, run: Scheduler) -> None:
        run.settings = replace(run.settings, stop=self.stop)
        self.vocab_size = run.engine.model.vocab_size

    def turn_ended(self, run: Scheduler, sequence: Sequence) -> None:
        self.asked.append(sequence)

    def replies(self, wait: bool) -> list[Reply]:
        replies = [(sequence, scripted_reply(sequence)) for sequence in self.asked]
        self.asked.clear()
        return replies

    def past_responses(self, sequence: Sequence) -> list[np.ndarray]:
        if self.past is None:
            return []
        earlier = self.past.sequences[sequence.prompt_id, sequence.sample_index]
        tokens = np.array(earlier.new_tokens, np.int32)
        tokens[4::5] = (tokens[4::5] + 1) % self.vocab_size
        return [tokens]


def decode(
    engine: Engine, params: Params, work: Workload, past: Decoded | None, stop: tuple[str, ...]
) -> Decoded:
    """Decodes a workload. past: the run whose responses rollout.draft=history knows."""
    batch = Scripted(work, past, stop)
    size = GROUP if work.is_episodes else 0
    phase = Phase(params, (0, 0), size, TEMPERATURE, samples=work.samples)
    counters = Decoder(engine, text_of).run(phase, batch)
    sequences = [sequence for group in batch.groups for sequence in group]
    return Decoded({(one.prompt_id, one.sample_index): one for one in sequences}, counters)


def compare(got: Decoded, want: Decoded) -> tuple[int, int]:
    """Returns how many sequences have another token, and how many another bit in a log-prob."""
    assert got.sequences.keys() == want.sequences.keys()
    other_tokens = other_bits = 0
    for key, sequence in want.sequences.items():
        found = got.sequences[key]
        if found.new_tokens != sequence.new_tokens or found.turns != sequence.turns:
            other_tokens += 1
        elif not np.array_equal(found.new_logps, sequence.new_logps):
            other_bits += 1
    return other_tokens, other_bits


# -- tiny models -----------------------------------------------------------------------------------


def tiny_model(name: str) -> qwen.QwenConfig:
    """Returns the architecture of a tiny model, with a head for drafts if its family has one."""
    is_hybrid = name.startswith("qwen3.5")
    entries = SMALL | FAMILIES[name] | (DELTA_NETS if is_hybrid else {})
    return replace(new_model(VOCAB, tiny_arch(f"tiny-{name}", **entries)), mtp=is_hybrid)


def random_params(model: qwen.QwenConfig) -> Params:
    """Returns weights so large that the next token depends on the ones before."""
    adds_one = model.model_type.startswith(("gemma", "qwen3_5"))  # norms multiply by 1 + weight
    centers = {"delta_norm": 1.0, "delta_decay": -3.0}
    rng = np.random.default_rng(1)

    def random_leaf(path: tuple, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        name = path[-1].key
        center = centers.get(name, 1.0 if "norm" in name and not adds_one else 0.0)
        return (center + 0.15 * rng.standard_normal(leaf.shape)).astype(np.float32)

    return jax.tree_util.tree_map_with_path(random_leaf, qwen.abstract(model))


def random_prompts(count: int) -> list[np.ndarray]:
    """Returns prompts of 4 to 24 tokens that repeat a part of themselves."""
    rng = np.random.default_rng(3)
    prompts = []
    for _ in range(count):
        part = rng.integers(4, VOCAB, rng.integers(2, 9))
        prompts.append(np.resize(part, rng.integers(4, 25)).astype(np.int32))
    return prompts


def tiny_engine(
    model: qwen.QwenConfig, work: Workload, draft: Draft | None, arrangement: Arrangement
) -> Engine:
    rollout = RolloutConfig(
        max_prompt_tokens=24,
        max_new_tokens=work.new_tokens,
        num_slots=64,
        page_size=16,
        decode_steps=8,
        kv_dtype="float32",
        group_size=GROUP,
        draft=draft,
    )
    if work.is_episodes:
        rollout = replace(rollout, top_p=0.9, **TURNS)
    rollout = replace(rollout, **arrangement.settings)
    shards = arrangement.shards
    mesh = make_mesh(jax.devices()[:shards], {"slots": shards, "tensor": 1})
    return Engine(model, rollout, mesh, STOP_IDS, "float32", exact=True)


def decode_tiny(
    model: qwen.QwenConfig, params: Params, work: Workload, kind: str, past: Decoded | None
) -> Decoded:
    arrangement = ARRANGEMENTS.get(kind, WITHOUT_DRAFTS)
    engine = tiny_engine(model, work, KINDS.get(kind), arrangement)
    placed = engine.load_params(params, param_shardings(model, engine.mesh))
    return decode(engine, placed, work, past, STOP_STRINGS)


def run_tiny(name: str, sequences: int) -> Iterator[list[str]]:
    """Yields a row for every kind of draft and workload of a family."""
    model = tiny_model(name)
    params = random_params(model)
    prompts = random_prompts(max(1, sequences // GROUP // 2))
    kinds = [kind for kind in KINDS if kind != "mtp" or model.mtp]
    requests = Workload(False, prompts, 24)
    episodes = Workload(True, prompts, TURNS["max_new_tokens"])
    for label, work in (("requests", requests), ("episodes", episodes)):
        yield from rows_of(f"{name}, {label}", kinds, partial(decode_tiny, model, params, work))


# -- a model in a directory ------------------------------------------------------------------------


def run_model(directory: str, problems: Path, sequences: int, new: int) -> Iterator[list[str]]:
    """Yields a row for every kind of draft that the model has."""
    settings = defaults(directory)
    settings.model.path, settings.model.dtype, settings.model.exact = directory, "float32", True
    settings.rollout = replace(
        settings.rollout,
        max_prompt_tokens=drafts.MAX_PROMPT,
        max_new_tokens=new,
        kv_dtype="float32",
        group_size=GROUP,
    )
    sampler, params = load(settings, Pool(0))
    template = sampler.engine
    work = Workload(False, drafts.read_prompts(problems, sampler)[: sequences // GROUP], new)

    def run(kind: str, past: Decoded | None) -> Decoded:
        slots = 8 if kind else 16
        draft = KINDS.get(kind)
        rollout = replace(template.settings, draft=draft, num_pages=0, num_slots=slots)
        engine = Engine(
            template.model, rollout, template.mesh, template.stop_ids, "float32", exact=True
        )
        return decode(engine, params, work, past, ())

    yield from rows_of(Path(directory).name, ["ngram", "group", "history"], run)


# -- the table -------------------------------------------------------------------------------------

HEADINGS = [
    "model",
    "draft",
    "sequences",
    "tokens",
    "accepted",
    "preempted",
    "other tokens",
    "other bits",
    "seconds",
]


def rows_of(
    name: str, kinds: list[str], run: Callable[[str, Decoded | None], Decoded]
) -> Iterator[list[str]]:
    """Yields a row for each kind of draft. run(kind, past) decodes; "" is without drafts."""
    want = run("", None)
    for kind in kinds:
        start = time.perf_counter()
        got = run(kind, want)
        yield table_row(name, kind, got, want, time.perf_counter() - start)


def table_row(name: str, kind: str, got: Decoded, want: Decoded, seconds: float) -> list[str]:
    counters = got.counters
    other_tokens, other_bits = compare(got, want)
    tokens = sum(len(sequence.new_tokens) for sequence in got.sequences.values())
    accepted = counters.accepted_tokens / max(counters.drafted_tokens, 1)
    return [
        name,
        kind,
        f"{len(got.sequences):,}",
        f"{tokens:,}",
        f"{accepted:.3f}",
        f"{counters.preempted:,}",
        f"{other_tokens:,}",
        f"{other_bits:,}",
        f"{seconds:.0f}",
    ]


def is_as_it_should(row: list[str]) -> bool:
    """Whether drafts were accepted, and no sequence differs."""
    values = dict(zip(HEADINGS, row, strict=True))
    same = values["other tokens"] == values["other bits"] == "0"
    return same and float(values["accepted"]) > 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=int, default=10_000, help="in all, of each draft")
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=[*FAMILIES])
    parser.add_argument("--model", default="", help="directory of a model with a chat template")
    parser.add_argument("--problems", type=Path, help="JSON lines, for --model")
    parser.add_argument("--new", type=int, default=48, help="most tokens of a response of --model")
    args = parser.parse_args()
    if args.model and not args.problems:
        parser.error("--model needs --problems")
    cli.start_jax([])
    if not args.model and len(jax.devices()) < 8:
        parser.error("tiny models decode on 8 devices: set JAX_NUM_CPU_DEVICES=8")

    def rows() -> Iterator[list[str]]:
        if args.model:
            yield from run_model(args.model, args.problems, args.sequences, args.new)
        else:
            for name in args.only:
                yield from run_tiny(name, args.sequences // len(args.only))

    table = []
    for row in rows():
        table.append(row)
        print(" | ".join(row), flush=True)
    print(measure.table(HEADINGS, table))
    if not all(map(is_as_it_should, table)):
        sys.exit(1)


if __name__ == "__main__":
    main()
