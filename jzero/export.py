"""`python -m jzero.export --workdir W --out DIR [--step N] [--push-to-hub USER/NAME [--revision BRANCH]]`

A checkpoint as a directory that `transformers` loads, with a model card; no accelerator, also while the run goes on."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from jzero import cli, config
from jzero.errors import UserError
from jzero.files import read_jsonl
from jzero.model import hub, huggingface, qwen
from jzero.run import checkpoint, metrics
from jzero.run.base_model import BaseModel, read_base_model
from jzero.run.export_model import export_model
from jzero.tasks import suites
from jzero.tasks.problem_sets import DEFAULT_SETS


def card(
    run: config.Config, step: int, found: dict[str, dict], base: BaseModel, given: Any
) -> ModelCard:
    """card.md, filled in; found: evaluations by their name, each {"eval/accuracy": ...}."""
    on_hub = lambda name: name.count("/") == 1 and name[0] not in "./~" and not os.path.exists(name)
    short = lambda x: (
        Path(x).name if isinstance(x, str) and "/" in x and not on_hub(x) else x
    )  # no one's directories
    flat = lambda of: {
        n: json.dumps(short(x)) for n, x in config.flatten(json.loads(config.to_json(of))).items()
    }
    sources = suites.split_commas(run.task.data or DEFAULT_SETS.get(run.task.name, ""))
    data = [source.rpartition("@")[2] for source in sources]
    rows = [row for row in read_jsonl(given.workdir / "metrics.jsonl") if row["step"] <= step]
    accuracy = {
        name: x for name, x in [{}, *found.values()][-1].items() if name.endswith("accuracy")
    }
    suite = lambda name: (name.split("/")[1:-1] or [run.task.name])[0]
    result = lambda name, x: EvalResult(
        "text-generation", suite(name), suite(name), "accuracy", x, metric_name=name
    )
    header = ModelCardData(
        model_name=f"{run.name or 'jzero'}-{step}",
        license=given.license,
        library_name="transformers",
        pipeline_tag="text-generation",
        base_model=run.model.path if on_hub(run.model.path) else None,
        datasets=[name for name in data if on_hub(name)] or None,
        tags=["jzero", "jax", "reinforcement-learning", run.algorithm.name, run.task.name],
        eval_results=[result(name, x) for name, x in accuracy.items()] or None,
    )
    recipe = dict(sorted(flat(run).items() - flat(config.Config()).items()))
    columns = {
        name: metrics.METRICS[name].label
        for name in metrics.STEP_LINE
        if any(name in row for row in rows)
    }
    curve = rows[:: -1 - len(rows) // 12][::-1]  # a dozen, the last among them
    parameters, versions = (
        qwen.num_params(base.model),
        json.loads((given.workdir / "versions.json").read_text("utf-8")),
    )
    return ModelCard.from_template(header, str(Path(__file__).with_name("card.md")), **locals())


def run(given: Any) -> str:
    workdir, out, name = given.workdir, given.out, given.push_to_hub
    if out.exists() and not (given.force and (out / "config.json").exists()):
        raise UserError(
            f"--out {out} exists: give another, or --force to replace what was exported there"
        )
    if given.revision and not name:
        raise UserError(
            f"--revision={given.revision} is a branch on the hub: give --push-to-hub, too"
        )
    try:
        path = workdir / "config.json"
        settings = config.from_json(path.read_text("utf-8"), str(path))
        saved = checkpoint.Checkpoints(workdir, None)
    except (OSError, ValueError) as error:
        raise UserError(
            f"--workdir {workdir} has no run of this version of jzero: {error}"
        ) from None
    if not (steps := saved.steps()) or given.step not in (None, *steps):
        raise UserError(f"--step={given.step}: {workdir} has checkpoints of steps {steps}")
    step, base = steps[-1] if given.step is None else given.step, read_base_model(settings.model)
    items, host = saved.read_items(step, {"params": qwen.abstract(base.model)})
    unfinished = out.with_name(f".{out.name}.partial")
    shutil.rmtree(unfinished, ignore_errors=True)
    export_model(unfinished, base, settings.rollout, items["params"], given.dtype)
    card(settings, step, host["eval"], base, given).save(unfinished / "README.md")
    shutil.rmtree(out, ignore_errors=True)
    os.replace(unfinished, out)
    return hub.push(out, name, given.revision, given.force) if name else str(out)


def main() -> None:
    parser = cli.make_parser("jzero.export", __doc__)
    parser.add_argument("--workdir", required=True, type=Path, help="of the run")
    parser.add_argument("--out", required=True, type=Path, help="directory to write")
    parser.add_argument("--step", type=int, help="of a checkpoint; default the newest")
    parser.add_argument(
        "--dtype",
        choices=huggingface.DTYPES,
        default="float32",
        help="of the weights; float32, as trained",
    )
    parser.add_argument(
        "--license", default="unknown", help="of the model, as the hub names it: apache-2.0, ..."
    )
    parser.add_argument(
        "--force", action="store_true", help="replace an earlier export, push to a branch there is"
    )
    parser.add_argument(
        "--push-to-hub", metavar="USER/NAME", help="a model of the hub, made if there is none"
    )
    parser.add_argument("--revision", help="branch to push to, made if there is none; default main")
    given = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    with cli.user_errors():
        print(run(given))


if __name__ == "__main__":
    main()
