"""`python -m jzero.evaluate --model DIR --suite aime24,math500=FILE,... [--out DIR] [--config.section.field=value ...]`

Rollouts from problems, and how good they are: every problem's responses, a summary, and a table. Greedy alone unless
--config.eval.samples says how many samples, at --config.rollout.temperature."""

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.serialization import msgpack_restore, msgpack_serialize
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jzero import cli, config, hosts, metrics, sharding, tokenizer
from jzero.grade.pool import Pool
from jzero.model import hf, qwen
from jzero.rollout import sample
from jzero.rollout.engine import Engine
from jzero.rollout.sample import Driver
from jzero.rollout.turns import Talk
from jzero.session import Base, read_base
from jzero.tasks import math, rewards, suites
from jzero.types import Grade, Problem, Rollout, Turn


@dataclass
class Sampler:
    """What turns problems into graded rollouts: the engine, the text on both sides of it, and the graders."""

    engine: Engine
    tokenizer: tokenizer.PreTrainedTokenizerFast
    pool: Pool
    task: config.Task
    on_finish: Callable[[], None] = lambda: None  # called for every finished sequence: progress, interruption

    def rollouts(
        self, params, problems: list[Problem], group: int, temperature: float, key: tuple[int, int], version: int
    ) -> tuple[list[Rollout], sample.Counters]:
        """Of this host's share of the problems, in order; the noise follows key (two integers), place and position."""
        share = hosts.share(len(problems))
        problems = problems[share]
        prompts = [np.array(encode(self.tokenizer, problem), np.int32) for problem in problems]
        groups = sample.groups_of(prompts, group, self.engine.settings.max_new, share.start)
        counters = self.decode(params, groups, group, problems.__getitem__, temperature, key, version)
        return [to_rollout(problems[s.prompt], s) for each in groups for s in each], counters

    def decode(
        self,
        params,
        groups: sample.Groups,
        group: int,
        problem: Callable[[int], Problem],
        temperature: float,
        key: tuple[int, int],
        version: int,
        more: sample.More = list,
    ) -> sample.Counters:
        """`Driver.run` with the pool, which gets every turn as it ends; problem: of a sequence's number."""
        driver = Driver(self.engine, params, lambda ids: tokenizer.decode(self.tokenizer, ids))
        talk = Talk(self.pool, self.task, self.engine, self.tokenizer, problem)
        try:
            seed = make_seed(self.engine, key)
            for sequence in driver.run(groups, group, temperature, seed, version, talk.replies, more):
                talk.submit(sequence)
                self.on_finish()
        except hosts.Interrupted as reason:
            hosts.meet(str(reason))  # the others wait in `gathered`
        finally:
            driver.cancel()  # an interruption leaves the engine free
        return replace(driver.counters, grading=talk.waited)

    def gathered(self, rollouts: list[Rollout]) -> list[Rollout]:
        """The rollouts of all hosts, in order, with the rewards that need to see a whole batch."""
        hosts.meet()
        if hosts.joined():
            rollouts = from_bytes(hosts.gather(to_bytes(rollouts)))
        turns = [turn for rollout in rollouts for turn in rollout.turns]
        lengths = [len(turn.text) for turn in turns], [turn.end - turn.start for turn in turns]
        grades = rewards.of_batch([grade_of(turn) for turn in turns], *lengths, self.task.reward)
        if self.engine.settings.turns > 1 and self.task.turn_reward == "success":
            reward = lambda grade: ((grade.correct - 0.5) * 2 - self.task.reward_bias) * self.task.reward_scaling
            grades = [replace(grade, score=reward(grade)) for grade in grades]
        each = iter(grades)
        return [of_turns(rollout, [next(each) for _ in rollout.turns]) for rollout in rollouts]


def of_turns(rollout: Rollout, grades: list[Grade]) -> Rollout:
    """With the grade of every turn; and of the episode: the sum of their scores, and any success."""
    turns = tuple(replace(turn, grade=grade) for turn, grade in zip(rollout.turns, grades, strict=True))
    score, seconds = sum(grade.score for grade in grades), sum(grade.seconds for grade in grades)
    episode = replace(grades[-1], score=score, correct=any(grade.correct for grade in grades), seconds=seconds)
    return replace(rollout, turns=turns, grade=episode)


def make_sampler(
    settings: config.Config, base: Base, mesh: Mesh, pool: Pool
) -> tuple[Sampler, Callable[[qwen.Params], qwen.Params]]:
    """A sampler on the mesh's devices, or those beside it, and `publish`: the trainer's weights -> the sampler's."""
    decode, dtype = sharding.decode_mesh(mesh), settings.model.dtype
    if apart := settings.mesh.decode:
        if apart % (tensor := mesh.shape["tensor"]):
            raise ValueError(f"mesh.tensor={tensor} does not divide mesh.decode={apart}")
        decode = sharding.mesh(sharding.split(apart)[1], {"slots": -1, "tensor": tensor})
    rollout = host_share(settings.rollout, jax.process_count())
    engine = Engine(base.model, rollout, decode, base.stops, dtype, settings.model.attention)
    return Sampler(engine, base.tokenizer, pool, settings.task), sharding.publisher(base.model, mesh, decode, dtype)


def host_share(rollout: config.Rollout, count: int) -> config.Rollout:
    """The slots and pages of one of `count` hosts."""
    return replace(rollout, slots=-(-rollout.slots // count), pages=-(-rollout.pages // count))


def to_bytes(rollouts: list[Rollout]) -> bytes:
    """For other hosts; values are arrays or plain JSON's."""
    return msgpack_serialize([asdict(replace(rollout, turns=list(rollout.turns))) for rollout in rollouts])


def from_bytes(parts: list[bytes]) -> list[Rollout]:
    """What every host gave, in order."""
    rollouts = made(Rollout, [row for part in parts for row in msgpack_restore(part)])
    return [replace(rollout, turns=tuple(rollout.turns)) for rollout in rollouts]


PARTS = {"problem": Problem, "grade": Grade, "turns": Turn, "sequences": sample.Sequence}  # fields that are dataclasses


def made(kind: type, of: Any) -> Any:
    """A dataclass, or a list of them, of what `asdict` made of it."""
    if isinstance(of, list):
        return [made(kind, each) for each in of]
    return of and kind(**{name: made(PARTS[name], x) if name in PARTS else x for name, x in of.items()})


fold = jax.jit(lambda words: jax.random.fold_in(jax.random.key(words[0]), words[1]))


def make_seed(engine: Engine, key: tuple[int, int]) -> jax.Array:
    return fold(jax.device_put(np.array(key, np.uint32), NamedSharding(engine.mesh, P())))


def to_rollout(problem: Problem, sequence: sample.Sequence) -> Rollout:
    prompt = len(sequence.context)
    versions = np.array([-1] * prompt + sequence.versions, np.int32)
    logps = np.array([0.0] * prompt + sequence.logps, np.float32)
    return Rollout(problem, sequence.sample, sequence.full(), versions >= 0, logps, versions, tuple(sequence.turns))


def encode(tok: tokenizer.PreTrainedTokenizerFast, problem: Problem) -> list[int]:
    return tokenizer.encode(tok, tokenizer.render(tok, problem.prompt))


def fitting(problems: list[Problem], sampler: Sampler, name: str = "") -> list[Problem]:
    """Problems whose prompt fits; longer ones are dropped, never cut. Says how many, of problems that have a name."""
    longest = sampler.engine.settings.max_prompt
    fit = [problem for problem in problems if len(encode(sampler.tokenizer, problem)) <= longest]
    if name and len(fit) < len(problems):
        lost = f"{len(problems) - len(fit)} of {len(problems)}"
        hosts.say(f"{name}: {lost} prompts dropped, longer than {longest} tokens")
    return fit


def grade_of(graded: Rollout | Turn) -> Grade:
    assert graded.grade is not None, f"{graded} was not graded"
    return graded.grade


def pass_at(correct: np.ndarray, k: int) -> float:
    """Chance that one of k of n samples is right, correct [P, n]: mean 1 - C(n - c, k) / C(n, k) (arXiv:2107.03374)."""
    n, wrong = correct.shape[1], correct.shape[1] - correct.sum(axis=1)
    return float(np.mean([1 - np.prod([max(w - i, 0) / (n - i) for i in range(k)]) for w in wrong]))


def majority(answers: Sequence[str], correct: Sequence[bool]) -> float:
    """Chance that a most frequent answer is right, ties broken evenly; right ones are one, and none has no vote."""
    votes = Counter("" if right else answer for answer, right in zip(answers, correct, strict=True) if right or answer)
    top = [answer for answer, count in votes.items() if count == max(votes.values())]
    return ("" in top) / len(top) if top else 0.0


def scores(rollouts: list[Rollout], samples: int) -> dict[str, float]:
    """avg@samples accuracy with its standard error over problems, response length, and what several samples allow."""
    correct = np.array([grade_of(rollout).correct for rollout in rollouts], np.float64).reshape(-1, samples)
    values = {
        "accuracy": float(correct.mean()),
        "stderr": float(correct.mean(axis=1).std() / np.sqrt(len(correct))),
        "length": float(np.mean([rollout.response_length for rollout in rollouts])),
        "truncated": float(np.mean([rollout.finish == "length" for rollout in rollouts])),
    }
    if samples > 1:
        ks = [2**i for i in range(1, samples.bit_length()) if 2**i < samples] + [samples]
        values |= {f"pass@{k}": pass_at(correct, k) for k in ks}
        answers = np.array([suites.answer(rollout.text) for rollout in rollouts], object).reshape(-1, samples)
        votes = [majority(*pair) for pair in zip(answers.tolist(), correct.astype(bool).tolist(), strict=True)]
        values[f"maj@{samples}"] = float(np.mean(votes))
    return values


def kinds(settings: config.Eval, temperature: float) -> dict[str, tuple[int, float]]:
    """Samples a problem and their temperature, of each kind of evaluation."""
    every = {"eval": (settings.samples, temperature), "eval_greedy": (int(settings.greedy), 0.0)}
    return {kind: value for kind, value in every.items() if value[0]}


def evaluate(
    sampler: Sampler, params, every: dict[str, list[Problem]], settings: config.Eval, temperature: float
) -> dict[str, float]:
    """Flat metrics of problems by name, "eval/math500/accuracy" or, of those of name "", "eval/accuracy"."""
    values = {}
    for name, problems in every.items():
        for kind, (samples, heat) in kinds(settings, temperature).items():
            rollouts, _ = sampler.rollouts(params, problems, samples, heat, key=(0, 0), version=0)
            found = scores(sampler.gathered(rollouts), samples)
            values |= {f"{kind}/{name}/{metric}" if name else f"{kind}/{metric}": v for metric, v in found.items()}
    return values


def defaults() -> config.Config:
    """As the published tables: greedy, 3,000 new tokens."""
    rollout = config.Rollout(max_prompt=2048, max_new=3000, slots=64)
    return config.Config(task=config.Task(template="qwen_math"), rollout=rollout, eval=config.Eval(samples=0))


def parse(arguments: Sequence[str]) -> tuple[list[str], Path, config.Config]:
    """Suites, where to write, and settings."""
    parser = cli.parser("jzero.evaluate", __doc__)
    parser.add_argument("--model", required=True, help="directory or hub id of a model, as a run exports it")
    parser.add_argument("--suite", required=True, help=f"comma-separated: {', '.join(suites.SUITES)}, or name=FILE")
    parser.add_argument("--out", help="directory to write to; default runs/eval-<date>-<time>")
    given, rest = parser.parse_known_args(arguments)
    settings = cli.settings(defaults(), rest)
    settings.model.path = given.model
    settings.rollout.stop = settings.rollout.stop or math.STOP.get(settings.task.template, ())
    out = Path(given.out or f"runs/eval-{time.strftime('%Y%m%d-%H%M%S')}")
    return suites.split(given.suite), out, settings


def load(settings: config.Config, pool: Pool) -> tuple[Sampler, Any]:
    """A sampler of a Hugging Face directory, and the weights it samples from."""
    base = read_base(settings.model)
    assert base.directory, "--model"
    mesh = sharding.train_mesh(settings.mesh.data, settings.mesh.fsdp, settings.mesh.tensor)
    sampler, publish = make_sampler(settings, base, mesh, pool)
    return sampler, publish(hf.load(base.directory, base.model, sharding.param_shardings(base.model, mesh)))


def problem_rows(rollouts: list[Rollout], samples: int) -> list[dict[str, Any]]:
    """One JSON value a problem, with all of its samples."""
    said = lambda r, grade: {"response": r.text, "correct": grade.correct, "reason": grade.reason}
    whole = lambda r: said(r, grade_of(r)) | {"tokens": r.response_length, "finish": r.finish}
    rows = []
    for i in range(0, len(rollouts), samples):
        problem, responses = rollouts[i].problem, [whole(rollout) for rollout in rollouts[i : i + samples]]
        rate = float(np.mean([each["correct"] for each in responses]))
        row = {"id": problem.id, "prompt": problem.prompt, "gold": problem.gold, "accuracy": rate}
        rows.append(row | {"samples": responses})
    return rows


def table(summary: dict[str, dict[str, Any]]) -> str:
    """A line a suite and kind, and the plain average over suites of every kind."""
    mean = lambda kind: float(np.mean([suite["kinds"][kind]["accuracy"] for suite in summary.values()]))
    kinds = next(iter(summary.values()))["kinds"]
    return metrics.fill("evaluate.txt", suites=summary, averages={kind: mean(kind) for kind in kinds})


def run(specs: list[str], out: Path, settings: config.Config) -> dict[str, Any]:
    """Evaluate and write `out`/<suite>-<kind>.jsonl and `out`/summary.json; returns what that holds."""
    config.validate(settings)
    seed = settings.train.seed
    todo = dict(suites.problems(spec, settings.task, settings.eval.limit, seed) for spec in specs)
    if not todo or len(todo) < len(specs) or not kinds(settings.eval, 1.0):
        raise ValueError(f"--suite {','.join(specs)}: give every suite once, and set eval.samples or eval.greedy")
    summary: dict[str, Any] = {}
    with Pool(settings.task.grade_workers) as pool:
        sampler, params = load(settings, pool)
        for name, problems in todo.items():
            fit = fitting(problems, sampler, name)
            if not fit:
                longest = settings.rollout.max_prompt
                raise ValueError(f"suite {name}: no prompt has at most rollout.max_prompt={longest} tokens")
            summary[name] = {"problems": len(fit), "dropped": len(problems) - len(fit), "kinds": {}}
            for label, (samples, heat) in kinds(settings.eval, settings.rollout.temperature).items():
                rollouts, _ = sampler.rollouts(params, fit, samples, heat, key=(seed, 0), version=0)
                rollouts = sampler.gathered(rollouts)
                kind = "greedy" if label == "eval_greedy" else f"avg@{samples}"
                summary[name]["kinds"][kind] = scores(rollouts, samples)
                lines = [json.dumps(row) + "\n" for row in problem_rows(rollouts, samples)]
                hosts.write(out / f"{name}-{kind}.jsonl", "".join(lines))
    said = {"config": json.loads(config.to_json(settings)), "suites": summary, "versions": metrics.versions()}
    hosts.write(out / "summary.json", json.dumps(said, indent=1))
    return summary


def main() -> None:
    arguments = cli.start(sys.argv[1:])
    with cli.mistakes():
        specs, out, settings = parse(arguments)
        hosts.say(table(run(specs, out, settings)))
        hosts.say(f"written to {out}")


if __name__ == "__main__":
    main()
