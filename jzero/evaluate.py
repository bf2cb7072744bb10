"""`python -m jzero.evaluate --model DIR --suite aime24,math500=FILE,... [--out DIR] [--config.section.field=value ...]`

Rollouts from problems, and how good they are: every problem's responses, a summary, and a table. Greedy alone unless
--config.eval.samples says how many samples, at --config.rollout.temperature."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jzero import cli, config
from jzero.distributed import processes
from jzero.distributed.mesh import param_shardings, train_mesh
from jzero.errors import UserError
from jzero.files import fill_template
from jzero.grading.pool import Pool
from jzero.model import huggingface
from jzero.rollout.evaluation import accuracy_metrics, evaluation_kinds
from jzero.rollout.sampler import Sampler, drop_long_prompts, make_sampler
from jzero.run.base_model import read_base_model
from jzero.run.environment import versions
from jzero.tasks import math_problems, suites
from jzero.types import Rollout, grade_of


def defaults() -> config.Config:
    """As the published tables: greedy, 3,000 new tokens."""
    rollout = config.RolloutConfig(max_prompt_tokens=2048, max_new_tokens=3000, num_slots=64)
    return config.Config(
        task=config.TaskConfig(template="qwen_math"),
        rollout=rollout,
        eval=config.EvalConfig(samples=0),
    )


def parse(arguments: Sequence[str]) -> tuple[list[str], Path, config.Config]:
    """Suites, where to write, and settings."""
    parser = cli.make_parser("jzero.evaluate", __doc__)
    parser.add_argument(
        "--model", required=True, help="directory or hub id of a model, as a run exports it"
    )
    parser.add_argument(
        "--suite", required=True, help=f"comma-separated: {', '.join(suites.SUITES)}, or name=FILE"
    )
    parser.add_argument("--out", help="directory to write to; default runs/eval-<date>-<time>")
    given, rest = parser.parse_known_args(arguments)
    settings = cli.parse_settings(defaults(), rest)
    settings.model.path = given.model
    settings.rollout.stop = settings.rollout.stop or math_problems.STOP.get(
        settings.task.template, ()
    )
    out = Path(given.out or f"runs/eval-{time.strftime('%Y%m%d-%H%M%S')}")
    return suites.split_commas(given.suite), out, settings


def load(settings: config.Config, pool: Pool) -> tuple[Sampler, Any]:
    """A sampler of a Hugging Face directory, and the weights it samples from."""
    base = read_base_model(settings.model)
    assert base.directory, "--model"
    mesh = train_mesh(settings.mesh.data, settings.mesh.fsdp, settings.mesh.tensor)
    sampler, publish = make_sampler(settings, base, mesh, pool)
    return sampler, publish(
        huggingface.load(base.directory, base.model, param_shardings(base.model, mesh))
    )


def problem_rows(rollouts: list[Rollout], samples: int) -> list[dict[str, Any]]:
    """One JSON value a problem, with all of its samples."""
    said = lambda r, grade: {"response": r.text, "correct": grade.correct, "reason": grade.reason}
    whole = lambda r: said(r, grade_of(r)) | {"tokens": r.response_length, "finish": r.finish_reason}
    rows = []
    for i in range(0, len(rollouts), samples):
        problem, responses = (
            rollouts[i].problem,
            [whole(rollout) for rollout in rollouts[i : i + samples]],
        )
        rate = float(np.mean([each["correct"] for each in responses]))
        row = {"id": problem.id, "prompt": problem.prompt, "gold": problem.gold, "accuracy": rate}
        rows.append(row | {"samples": responses})
    return rows


def table(summary: dict[str, dict[str, Any]]) -> str:
    """A line a suite and kind, and the plain average over suites of every kind."""
    mean = lambda kind: float(
        np.mean([suite["kinds"][kind]["accuracy"] for suite in summary.values()])
    )
    kinds = next(iter(summary.values()))["kinds"]
    return fill_template(
        "evaluate.txt", suites=summary, averages={kind: mean(kind) for kind in kinds}
    )


def run(specs: list[str], out: Path, settings: config.Config) -> dict[str, Any]:
    """Evaluate and write `out`/<suite>-<kind>.jsonl and `out`/summary.json; returns what that holds."""
    config.validate(settings)
    seed = settings.train.seed
    todo = dict(suites.problems(spec, settings.task, settings.eval.limit, seed) for spec in specs)
    if not todo or len(todo) < len(specs) or not evaluation_kinds(settings.eval, 1.0):
        raise UserError(
            f"--suite {','.join(specs)}: give every suite once, and set eval.samples or eval.greedy"
        )
    summary: dict[str, Any] = {}
    with Pool(settings.task.grade_workers) as pool:
        sampler, params = load(settings, pool)
        for name, problems in todo.items():
            fit = drop_long_prompts(problems, sampler, name)
            if not fit:
                longest = settings.rollout.max_prompt_tokens
                raise UserError(
                    f"suite {name}: no prompt has at most rollout.max_prompt_tokens={longest} tokens"
                )
            summary[name] = {"problems": len(fit), "dropped": len(problems) - len(fit), "kinds": {}}
            for label, (samples, heat) in evaluation_kinds(
                settings.eval, settings.rollout.temperature
            ).items():
                rollouts, _ = sampler.rollouts(params, fit, samples, heat, key=(seed, 0), version=0)
                rollouts = sampler.gathered(rollouts)
                kind = "greedy" if label == "eval_greedy" else f"avg@{samples}"
                summary[name]["kinds"][kind] = accuracy_metrics(rollouts, samples)
                lines = [json.dumps(row) + "\n" for row in problem_rows(rollouts, samples)]
                processes.write_once(out / f"{name}-{kind}.jsonl", "".join(lines))
    said = {
        "config": json.loads(config.to_json(settings)),
        "suites": summary,
        "versions": versions(),
    }
    processes.write_once(out / "summary.json", json.dumps(said, indent=1))
    return summary


def main() -> None:
    arguments = cli.start_jax(sys.argv[1:])
    with cli.user_errors():
        specs, out, settings = parse(arguments)
        processes.print_once(table(run(specs, out, settings)))
        processes.print_once(f"written to {out}")


if __name__ == "__main__":
    main()
