"""Results as a lying sampler writes them: mutations of an honest one, and the trainer's side.

    with receiving_stream(tmp_path) as trainer:
        honest = trainer.honest()
        for lie in lies_of(honest, trainer.honest(trainer.older), number=4):
            trainer.check_refused_or_harmless(lie)

There is no model: the tokens of the honest result are the bytes of texts, and the trainer's stream,
its validation, its regrading and its metrics are the real ones.
"""

import contextlib
import hashlib
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple, cast

import numpy as np
import servers
from flax.serialization import msgpack_serialize
from hostile_values import VALUES, Raw, mutations, places, replaced

from jzero.config import Jobs, RewardConfig, RolloutConfig, TaskConfig
from jzero.decoder.sequence import DecodeCounters
from jzero.files import JsonObject
from jzero.jobs.checks import decode_counters
from jzero.jobs.requests import Request, Result, request_of
from jzero.jobs.sealed import seal, unseal
from jzero.jobs.store import FolderStore
from jzero.jobs.stream import FixedStream, JobSettings, JobStream
from jzero.rollout.async_stream import TrainingProblems
from jzero.rollout.collect import host_metrics
from jzero.rollout.rollout_metrics import rollout_metrics
from jzero.rollout.sampler import Sampler
from jzero.run.metrics import nonfinite
from jzero.run.metrics_writer import MetricsWriter
from jzero.tokens import TRACKS, Tokens
from jzero.types import Grade, JsonValue, Problem, Rollout, Turn, grade_of
from jzero.workers.pool import COUNTERS, Pool

RIGHT, WRONG = "<answer> 1 + 2 </answer>", "<answer> 2 - 1 </answer>"
MAX_NEW_TOKENS = 40
GROUP = 2
LIAR = "liar-1"
# Only a replay finds out that other log-probs within the bounds are not the model's.
UNDETECTED = ("logps reversed", "logps zeros")
SNAPSHOT = "5" * 64


class Lie(NamedTuple):
    """A file in the folder of results."""

    name: str  # of the lie
    file: str
    data: bytes


def values_of(result: Result) -> JsonObject:
    """Returns the plain values in the file of a result."""
    return unseal(result.to_bytes())


def file_of(name: str, honest: Result, values: object) -> Lie | None:
    """Returns the file with these values, None if MessagePack cannot hold them."""
    try:
        data = seal(values) if isinstance(values, dict) else sealed_body(msgpack_serialize(values))
        file = Result.parse(data).name
    except (OverflowError, UnicodeEncodeError, TypeError, ValueError, RecursionError):
        return None
    except Exception:  # the receiver has to find out
        file = honest.name
    # A name that no file can have reaches no trainer.
    if "/" in file or "\0" in file or len(file.encode("utf-8", "replace")) > 200:
        file = honest.name
    return Lie(name, file, data)


def sealed_body(body: bytes) -> bytes:
    """Returns the file with a body of any bytes and the right checksum."""
    return hashlib.sha256(body).hexdigest().encode() + body


# -- Mutations -------------------------------------------------------------------------------------


def hostile_arrays(array: np.ndarray) -> dict[str, np.ndarray]:
    """Returns arrays in place of one of a result, by name."""
    other = np.float64 if array.dtype != np.float64 else np.int8
    arrays = {
        "other type": array.astype(other),
        "shorter": array[:-1],
        "longer": np.concatenate([array, array[:1]]),
        "empty": array[:0],
        "no axis": np.array(1, array.dtype),
        "another axis": array[:, None],
        "one value of many": np.zeros((1, 100_000), array.dtype),
        "no values of many": np.zeros((0, 2**30), array.dtype),
        "reversed": array[::-1].copy(),
        "text": np.array(["x"] * len(array)),
        "zeros": np.zeros_like(array),
        "ones": np.ones_like(array),
    }
    if array.dtype.kind == "f":
        for value in (np.nan, np.inf, -np.inf, -3e38, -1e5, 0.5, 3.4e38):
            arrays[f"all {value:g}"] = np.full_like(array, value)
            changed = array.copy()
            changed[-1] = value
            arrays[f"last {value:g}"] = changed
    if array.dtype.kind == "i":
        for value in (-1, -(2**31), 2**31 - 1, 300, 7):
            arrays[f"all {value}"] = np.full_like(array, value)
            changed = array.copy()
            changed[-1] = value
            arrays[f"last {value}"] = changed
    if array.dtype.kind == "b":
        arrays["inverted"] = ~array
    return arrays


def lies_of_arrays(honest: Result) -> Iterator[tuple[str, object]]:
    """Yields the plain values of a result with another array in one place."""
    for number in (0, len(honest.rollouts) - 1):
        for track, array in honest.rollouts[number].tokens.to_dict().items():
            for name, changed in hostile_arrays(array).items():
                values = values_of(honest)
                values["rollouts"][number]["tokens"][track] = changed
                yield f"rollout {number} {track} {name}", values
        for name in ("unknown", "", "routes", "kept"):
            values = values_of(honest)
            values["rollouts"][number]["tokens"][name] = np.zeros((4, 2), np.int32)
            yield f"rollout {number} new track {name}", values


def lies_of_values(honest: Result, number: int = len(VALUES)) -> Iterator[tuple[str, object]]:
    """Yields the plain values of a result with hostile values in each place in turn.

    number: of the values in each place, chosen at random.
    """
    yield from mutated_values(values_of(honest), number)


def mutated_values(original: JsonObject, number: int) -> Iterator[tuple[str, object]]:
    """Yields the plain values of a file with hostile values in each place in turn."""
    rng = random.Random(number)
    document = cast(JsonValue, without_arrays(original))
    for place in places(document):
        chosen = dict(rng.sample(sorted(VALUES.items()), number))
        for name, value in chosen.items():
            values = unraw(replaced(document, place, value))
            yield f"{'.'.join(map(str, place))}={name}", with_arrays(values, original)
    # Members that are missing, and unknown ones.
    for mutation in mutations(document, {}):
        yield str(mutation), with_arrays(unraw(mutation.document), original)


def unraw(value: object) -> object:
    """Returns a document with plain text in place of `Raw`: text that only JSON parses."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        return {name: unraw(item) for name, item in value.items()}
    return [unraw(item) for item in value] if isinstance(value, list) else value


ARRAY = "<array>"


def without_arrays(value: object) -> object:
    """Returns plain values with a text for each array, which JSON tools can walk."""
    if isinstance(value, np.ndarray):
        return ARRAY
    if isinstance(value, dict):
        return {name: without_arrays(item) for name, item in value.items()}
    return [without_arrays(item) for item in value] if isinstance(value, list) else value


def with_arrays(value: object, original: object) -> object:
    """Undoes `without_arrays` wherever the text is still in its place."""
    if value == ARRAY and isinstance(original, np.ndarray):
        return original
    if isinstance(value, dict) and isinstance(original, dict):
        return {name: with_arrays(item, original.get(name)) for name, item in value.items()}
    if isinstance(value, list) and isinstance(original, list):
        padded = [*original, *[None] * len(value)]
        return [with_arrays(item, padded[i]) for i, item in enumerate(value)]
    return value


def changed_rollout(
    honest: Result, number: int, change: Callable[[Rollout], Rollout], **fields: object
) -> Result:
    """Returns a result with another rollout."""
    rollouts = list(honest.rollouts)
    rollouts[number] = change(rollouts[number])
    return replace(honest, rollouts=rollouts, **fields)


def changed_grade(honest: Result, number: int, **fields: object) -> Result:
    """Returns a result whose rollout has another grade for its last turn."""

    def change(rollout: Rollout) -> Rollout:
        last = rollout.turns[-1]
        grade = replace(grade_of(last), **fields)
        return replace(rollout, turns=(*rollout.turns[:-1], replace(last, grade=grade)))

    return changed_rollout(honest, number, change)


def changed_turn(honest: Result, number: int, **fields: object) -> Result:
    """Returns a result whose rollout has another last turn."""

    def change(rollout: Rollout) -> Rollout:
        return replace(rollout, turns=(*rollout.turns[:-1], replace(rollout.turns[-1], **fields)))

    return changed_rollout(honest, number, change)


def whole_lies(honest: Result, older: Result) -> dict[str, Result]:
    """Returns results that are wrong as a whole, each of well-formed values.

    older: the honest result of another request.
    """
    first, second, *others = honest.rollouts
    group = GROUP if len(honest.rollouts) > GROUP else 1
    reordered = [*honest.rollouts[group:], *honest.rollouts[:group]]
    tokens = first.tokens
    text = first.turns[-1].text
    lies = {
        "a replay of an older result": older,
        "an older result under the new request": replace(older, request=honest.request),
        "the new rollouts under the older request": replace(honest, request=older.request),
        "no rollouts": replace(honest, rollouts=[]),
        "a missing rollout": replace(honest, rollouts=honest.rollouts[:-1]),
        "a rollout twice": replace(honest, rollouts=[first, first, *others]),
        "a rollout too many": replace(honest, rollouts=[*honest.rollouts, second]),
        "samples swapped": replace(honest, rollouts=[second, first, *others]),
        "groups reordered": replace(honest, rollouts=reordered),
        "another snapshot": replace(honest, snapshot="6" * 64),
        "no snapshot": replace(honest, snapshot=""),
        "a later version": replace(honest, version=honest.version + 1),
        "version -5": replace(honest, version=-5),
        "version 2**40": replace(honest, version=2**40),
        "later weights": replace(honest, later_weights=((honest.version + 1, "7" * 64),)),
        "continued tokens": replace(honest, continued_tokens=3),
        "continued -1": replace(honest, continued_tokens=-1),
        "another text": changed_turn(honest, 0, text=RIGHT if text != RIGHT else WRONG),
        "a longer text": changed_turn(honest, 0, text=text + " "),
        "an empty text": changed_turn(honest, 0, text=""),
        "a megabyte of text": changed_turn(honest, 0, text="x" * (1 << 20)),
        "other end": changed_turn(
            honest, 0, finish_reason="length" if first.finish_reason == "stop" else "stop"
        ),
        "a turn without its last token": changed_turn(honest, 0, end=first.turns[-1].end - 1),
        "no turns": changed_rollout(honest, 0, lambda r: replace(r, turns=())),
        "a turn twice": changed_rollout(honest, 0, lambda r: replace(r, turns=r.turns * 2)),
        "a grade of the episode": changed_rollout(
            honest, 0, lambda r: replace(r, grade=Grade(77.0, True, "correct"))
        ),
        "an advantage": changed_rollout(honest, 0, lambda r: replace(r, advantage=5.0)),
        "advantages": changed_rollout(
            honest,
            0,
            lambda r: replace(r, advantages=np.full(len(r.tokens), np.nan, np.float32)),
        ),
        "a shorter response": changed_rollout(
            honest, 0, lambda r: replace(r, tokens=tokens.first(len(tokens) - 1))
        ),
        "a sampled prompt": changed_rollout(
            honest,
            0,
            lambda r: replace(r, tokens=tokens.replaced(sampled=np.ones(len(tokens), bool))),
        ),
    }
    forged = {
        "score 1 -> 0.5": {"score": 0.5},
        "score 1e9": {"score": 1e9},
        "score 1e10": {"score": 1e10},
        "score 1e308": {"score": 1e308},
        "score -1e308": {"score": -1e308},
        "score NaN": {"score": float("nan")},
        "wrong verdict": {"correct": None},
        "forged part": {"parts": {"a": 1.0}},
        "part 1e308": {"parts": {"a": 1e308}},
        "part with a line break": {"parts": {"x/y\n": 1.0}},
        "part without a name": {"parts": {"": 1.0}},
        "part of 10,000 characters": {"parts": {"x" * 10_000: 1.0}},
        "part with ESC": {"parts": {"\x1b[31m": 1.0}},
        "3,000 parts": {"parts": {f"p{i}": 1.0 for i in range(3000)}},
        "failed": {"failed": True, "failed_function": "f\n\x1b"},
        "timeout": {"score": 0.0, "correct": False, "reason": "timeout"},
        "5 tool calls less": {"tool_calls": -5, "failed_tool_calls": 10**15},
        "a million tool calls": {"tool_calls": 10**6},
        "seconds -1e308": {"seconds": -1e308},
        "seconds 1e308": {"tool_seconds": 1e308},
        "reply of a dict": {"reply": {"a": 1}},
        "reason of a megabyte": {"reason": "x" * (1 << 20), "score": 0.25},
    }
    for number in (0, len(honest.rollouts) - 1):
        for name, fields in forged.items():
            known = grade_of(honest.rollouts[number].turns[-1])
            if "correct" in fields and fields["correct"] is None:
                fields = {"correct": not known.correct}
            lies[f"rollout {number}: {name}"] = changed_grade(honest, number, **fields)
    for name in vars(DecodeCounters()) | {"steps": 0, "": 0, "x\n\x1b": 0}:
        for value in (-1, -(10**15), 10**18, 2**63, 0.5, 1e300, float("nan")):
            counters = honest.counters | {name: value}
            lies[f"counter {name}={value}"] = replace(honest, counters=counters)
    for name in (*COUNTERS, "other"):
        for value in (-(10**18), 10**18, 0.5, True):
            lies[f"grading {name}={value}"] = replace(honest, grading={name: value})
    for name in ("", ".x", "../../x", "a/b", "\x1b[31mx", "x" * 201, "é" * 150, "a\0b", "a\nb"):
        lies[f"sampler {name[:20]!a}"] = replace(honest, sampler=name)
    for seconds in (-1.0, 1e308, float("inf")):
        lies[f"seconds {seconds}"] = replace(honest, seconds=seconds)
    return lies


def lies_of(honest: Result, older: Result, number: int = len(VALUES)) -> Iterator[Lie]:
    """Yields lies about a request, with the names of files that a liar gives them.

    number: of the hostile values in each field.
    """
    for name, result in whole_lies(honest, older).items():
        lie = file_of(name, honest, values_or_none(result))
        if lie is not None:
            yield lie
    for name, values in (*lies_of_arrays(honest), *lies_of_values(honest, number)):
        lie = file_of(name, honest, values)
        if lie is not None:
            yield lie
    yield from lies_of_bytes(honest)


def values_or_none(result: Result) -> object:
    """Returns the plain values of a result, None if MessagePack cannot hold them."""
    try:
        return values_of(result)
    except (OverflowError, UnicodeEncodeError, TypeError, ValueError):
        return None


def lies_of_bytes(honest: Result) -> Iterator[Lie]:
    """Yields files that are damaged, not MessagePack, or not named after their rollouts."""
    data = honest.to_bytes()
    rng = random.Random(0)
    bodies = {
        "empty": b"",
        "one byte": b"\xc1",
        "a list": b"\x90",
        "many lists": b"\x90" * 100_000,
        "a list that announces 4 billion": b"\xdd\xff\xff\xff\xff",
        "a map that announces 4 billion": b"\xdf\xff\xff\xff\xff",
        "a text that announces 4 GB": b"\xdb\xff\xff\xff\xff",
        "an array that announces 4 GB": b"\xc9\xff\xff\xff\xff\x01",
        "deep lists": b"\x91" * 10_000 + b"\x90",
        "an array of many lists": b"\xc9\x00\x01\x86\xa0\x01" + b"\x90" * 100_000,
        "JSON": b'{"rollouts": []}',
    }
    for name, body in bodies.items():
        yield Lie(f"bytes: {name}", honest.name, sealed_body(body))
    for _ in range(40):
        body = bytearray(data[64:])
        for _ in range(rng.randint(1, 4)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        yield Lie("bytes: changed", honest.name, sealed_body(bytes(body)))
        yield Lie("bytes: torn", honest.name, data[: rng.randrange(len(data))])
    yield Lie("another name", f"{honest.request}-{'0' * 16}", data)


# -- The trainer -----------------------------------------------------------------------------------


@dataclass
class Trainer:
    """A trainer's stream with one open request, and no model."""

    stream: JobStream
    request: Request
    older: Request
    store: FolderStore

    def honest(self, request: Request | None = None) -> Result:
        """Returns an honest result, as a sampler writes it."""
        request = request or self.request
        rollouts = []
        for index, prompt in enumerate(request.prompts):
            for sample in range(request.group_size):
                text = RIGHT if sample % 2 else WRONG
                problem = request.problems[index]
                rollouts.append(honest_rollout(self.stream, problem, prompt, sample, text))
        counters = DecodeCounters(prefills=2, prefill_tokens=10, decoded_tokens=120)
        counters.slot_steps = 200
        return Result(
            request.id,
            0,
            SNAPSHOT,
            LIAR,
            rollouts,
            dict(vars(counters)),
            dict.fromkeys(COUNTERS, 0) | {"graded": len(rollouts)},
            seconds=0.5,
        )

    def honest_file(self) -> Lie:
        """Returns the file of the honest result."""
        honest = self.honest()
        return Lie("honest", honest.name, honest.to_bytes())

    def receive(self, lie: Lie) -> bool:
        """Lets the stream receive a file. Returns whether it is taken."""
        self.reset()
        self.store.write(f"results/{lie.file}", lie.data)
        self.stream._poll()
        assert not self.store.names("results"), "the file is still there"
        return self.request.id in self.stream.ready

    def reset(self) -> None:
        """Opens the request again, as if nothing had been received."""
        stream = self.stream
        stream.open = {self.request.id: self.request}
        stream.ready.clear()
        stream.refusals.clear()
        stream.num_refused = 0
        (stream.settings.workdir / "rollouts" / self.request.id).unlink(missing_ok=True)

    def check_refused_or_harmless(self, lie: Lie) -> None:
        """Asserts that a lie is refused, or that training on it is training on honest rollouts."""
        honest = self.honest()
        if not self.receive(lie):
            # Answers of requests that are not open are removed unread.
            if request_of(lie.file) != self.request.id:
                return
            assert self.stream.num_refused, "neither taken nor refused"
            return
        answer = self.stream.ready[self.request.id]
        expected = [honest_rollout_of(honest, i, self.request) for i in range(len(answer.rollouts))]
        for taken, rollout in zip(answer.rollouts, expected, strict=True):
            assert_same_training(taken, rollout)
        assert_bounded_metrics(answer.rollouts, answer.result)


def honest_rollout(
    stream: JobStream, problem: Problem, prompt: tuple[int, ...], sample: int, text: str
) -> Rollout:
    """Returns a rollout whose tokens are the bytes of a text, with the grade of the real grader."""
    tokenizer = stream.sampler.tokenizer
    ids = [*tokenizer.encode(text), tokenizer.eos_token_id]
    tokens = Tokens(prompt)
    logps = -np.linspace(0.1, 3.0, len(ids), dtype=np.float32)
    tokens.append(ids, sampled=True, logps=logps, versions=0)
    grade = Grade(1.0, True, "correct") if text == RIGHT else Grade(0.1, False, "wrong value")
    turn = Turn(len(prompt), len(tokens), text, "stop", grade)
    return Rollout(problem, sample, tokens, (turn,))


def honest_rollout_of(honest: Result, number: int, request: Request) -> Rollout:
    """Returns a rollout of a result with its problem."""
    problem = request.problems[number // request.group_size]
    return replace(honest.rollouts[number], problem=problem)


def assert_same_training(taken: Rollout, honest: Rollout) -> None:
    """Asserts that two rollouts train the same, except for log-probs within their bounds.

    That a log-prob is the model's, only a replay can find out.
    """
    assert taken.problem == honest.problem
    for name, values in honest.tokens.to_dict().items():
        if name == "logps":
            assert np.isfinite(taken.tokens.logps).all() and (taken.tokens.logps >= -1e4).all()
            assert (taken.tokens.logps <= 1e-3).all()
            continue
        assert taken.tokens[name].tobytes() == values.tobytes(), name
        assert taken.tokens[name].dtype == TRACKS[name].dtype
    assert len(taken.turns) == len(honest.turns)
    for ours, theirs in zip(taken.turns, honest.turns, strict=True):
        for name in ("start", "end", "text", "finish_reason"):
            assert getattr(ours, name) == getattr(theirs, name), name
        for name in ("score", "correct", "failed", "parts"):
            assert getattr(grade_of(ours), name) == getattr(grade_of(theirs), name), name
    assert taken.advantages is None and taken.advantage == 0.0


def assert_bounded_metrics(rollouts: list[Rollout], result: Result) -> None:
    """Asserts that the metrics of a step with these rollouts can be written, and have a sense."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        metrics = rollout_metrics(rollouts, GROUP)
        counters = decode_counters(result.counters)
        grading = {f"grade/{name}": number for name, number in result.grading.items()}
        metrics |= host_metrics(counters, grading)
    assert not nonfinite(metrics), metrics
    assert all(0 <= value <= 1e9 for value in metrics.values()), metrics
    assert metrics["rollout/slot_utilization"] <= 1
    MetricsWriter(None, None).write(1, metrics)


@contextlib.contextmanager
def receiving_stream(
    folder: Path, regrade_share: float = 1.0, functions: tuple[str, ...] = ("accuracy",)
) -> Iterator[Trainer]:
    """Yields a trainer that waits for the answer to a request of 2 prompts."""
    tokenizer = servers.byte_tokenizer()
    rollout = RolloutConfig(
        num_prompts=2, group_size=GROUP, max_new_tokens=MAX_NEW_TOKENS, max_prompt_tokens=8
    )
    engine = SimpleNamespace(
        model=SimpleNamespace(vocab_size=len(tokenizer), num_experts=0),
        settings=rollout,
        program_settings=SimpleNamespace(tracks=()),
        stop_ids=(tokenizer.eos_token_id,),
        max_concurrent_decodes=4,
    )
    task = TaskConfig(name="countdown", reward=RewardConfig(functions=functions))
    placement = Jobs(store=str(folder / "store"), regrade_share=regrade_share)
    workdir = folder / "run"
    workdir.mkdir(parents=True)
    with Pool(1) as pool:
        sampler = Sampler(cast("object", engine), tokenizer, pool, task)  # type: ignore[arg-type]
        stream = FixedStream(
            sampler,
            TrainingProblems(task, 0, 2),
            rollout,
            placement,
            JobSettings("{}", workdir, "float32", 3, None),
        )
        problems = tuple(
            Problem(f"p{i}", "countdown", "q", {"numbers": [1, 2], "target": 3}) for i in range(2)
        )
        older = Request("r", 1, 0, 0, 0, GROUP, 1.0, 0, SNAPSHOT, problems, ((1, 2, 3), (4, 5)))
        request = replace(older, step=2)
        yield Trainer(stream, request, older, FolderStore(folder / "store"))
