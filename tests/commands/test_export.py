"""A checkpoint as a model for others: the same weights bit for bit, its card, and the hub it is pushed to."""

import base64
import json
import shutil
import subprocess
import sys
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import reference
from huggingface_hub import ModelCard
from runs import ROOT, Stand, finish, rows

from jzero import config, export, setup
from jzero.export import Options
from jzero.model import huggingface, tokenizer
from jzero.run import checkpoint
from jzero.run.base_model import read_base_model
from jzero.run.environment import versions
from jzero.run.metrics_writer import MetricsWriter
from jzero.run.workdir import claim_workdir


@pytest.fixture(scope="module")
def workdir(tmp_path_factory) -> Path:
    """As a run of 4 steps leaves it, with checkpoints of 2 and 4."""
    workdir = tmp_path_factory.mktemp("runs") / "run"
    settings = reference.settings(
        rollout={"num_prompts": 4}, optimizer={"lr": 1e-3}, train={"microbatch_tokens": 240}
    )
    settings.name, settings.task.template = "countdown-tiny", "plain"
    policy = setup.build(settings, None).trainer.policy  # pyright: ignore
    saved, writer = checkpoint.Checkpoints(workdir, 0), MetricsWriter(workdir, None, "")
    claim_workdir(workdir, config.to_json(settings))
    (workdir / "versions.json").write_text(json.dumps(versions()))
    accuracy = lambda x: {"eval/accuracy": x, "eval/length": 7.0, "eval_greedy/accuracy": x / 2}
    host: dict = {"eval": {"before": accuracy(0.125)}}
    for step in (1, 2, 3, 4):
        host["eval"] |= {"after": accuracy(0.5)} if step == 4 else {}
        writer.write(
            step, {"reward/mean": step / 8, "rollout/length": 10.0 + step, "time/sample": 1.0}
        )
        if step % 2 == 0:
            params = jax.tree.map(lambda x: x + step / 7, reference.random_params(policy.model))  # noqa: B023
            saved.save(step, policy.start(reference.placed(policy, params)), host, wait=True)
    saved.close()
    writer.close()
    return workdir


@pytest.fixture(scope="module")
def exported(workdir, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("exports") / "model"
    export.run(Options(workdir, out, license="apache-2.0"))
    return out


def read_config(workdir: Path) -> config.Config:
    path = workdir / "config.json"
    return config.from_json(path.read_text(), str(path))


def params_of(workdir: Path, step: int):
    """As Orbax has them, without jzero."""
    return ocp.StandardCheckpointer().restore(workdir / f"checkpoints/{step}/params")


def same(a, b) -> bool:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    return all(
        np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


@pytest.mark.filterwarnings("ignore:Sharding info not provided")  # of Orbax: this is one process
def test_weights_are_the_checkpoints_bit_for_bit(workdir, exported, tmp_path):
    model, hf_config = huggingface.load_config(exported)
    assert (
        same(huggingface.load(exported, model), params_of(workdir, 4))
        and hf_config["dtype"] == "float32"
    )
    export.run(Options(workdir, tmp_path / "two", step=2, dtype="bfloat16"))
    half = jax.tree.map(
        lambda x: jnp.asarray(x).astype(jnp.bfloat16).astype(jnp.float32), params_of(workdir, 2)
    )
    assert same(huggingface.load(tmp_path / "two", model), half) and not same(
        half, params_of(workdir, 4)
    )
    assert huggingface.load_config(tmp_path / "two")[1]["dtype"] == "bfloat16"
    names = {
        "model.safetensors",
        "config.json",
        "generation_config.json",
        "README.md",
        "tokenizer.json",
    }
    assert names <= {path.name for path in exported.iterdir()}
    tok = tokenizer.load(str(exported))
    assert json.loads((exported / "generation_config.json").read_text())["eos_token_id"] == [
        tok.eos_token_id
    ]
    assert {path.name for path in tmp_path.iterdir()} == {"two"}


def test_the_card_says_how_it_was_made(workdir, exported):
    card = ModelCard.load(exported / "README.md", ignore_metadata_errors=False)
    values = card.data.to_dict()
    assert values["license"] == "apache-2.0" and values["library_name"] == "transformers"
    assert values["pipeline_tag"] == "text-generation" and {"jzero", "grpo", "countdown"} <= set(
        values["tags"]
    )
    assert card.data.model_name == "countdown-tiny-4"
    found = {result.metric_name: result.metric_value for result in card.data.eval_results}
    assert found == {"eval/accuracy": 0.5, "eval_greedy/accuracy": 0.25}
    lines = card.text.split("\n")
    table = [
        line.split("|") for line in lines[lines.index("## Training") :] if line.startswith("|")
    ][2:]
    for row, cells in zip(rows(workdir / "metrics.jsonl"), table, strict=False):
        assert int(cells[1]) == row["step"] and float(cells[2]) == pytest.approx(
            row["reward/mean"], rel=1e-3, abs=1e-4
        )
    assert "| `rollout.num_prompts` | `4` |" in lines and "| `optimizer.lr` | `0.001` |" in lines
    assert (
        f"| jax | {jax.__version__} |" in lines and "{{" not in card.text and "{%" not in card.text
    )
    assert "| before | 0.125 | 0.062 |" in lines and "| after | 0.500 | 0.250 |" in lines
    assert "from\nrandom weights, after 4 of 200 steps" in card.text


def test_the_card_names_the_hubs_and_no_directory(workdir, tmp_path):
    options, run = Options(workdir, tmp_path / "x"), read_config(workdir)
    run.model.path, run.task.name, run.task.data = (
        "Qwen/Qwen2.5-3B",
        "math",
        f"main@openai/gsm8k,{tmp_path}/data.jsonl",
    )
    run.rollout.stop = ("a|b",)
    base = read_base_model(read_config(workdir).model)
    found = {
        "before": {},
        "after": {"eval/accuracy": 0.5, "eval/math500/accuracy": 0.25, "eval/length": 3.0},
    }
    card = export.make_card(run, 3, found, base, options)
    card.save(tmp_path / "README.md")
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.base_model == "Qwen/Qwen2.5-3B" and card.data.datasets == ["openai/gsm8k"]
    assert [(r.dataset_name, r.metric_value) for r in card.data.eval_results] == [
        ("math", 0.5),
        ("math500", 0.25),
    ]
    assert (
        str(tmp_path) not in card.text
        and "data.jsonl" in card.text
        and card.data.license == "unknown"
    )
    assert '| `rollout.stop` | `["a\\|b"]` |' in card.text
    assert (
        "| 3 |" in card.text and "| 4 |" not in card.text
    )  # what came after that step is not of this model
    assert export.make_card(run, 3, {}, base, options).data.eval_results is None


@pytest.mark.parametrize(
    "command, message",
    [
        ("--workdir {tmp}/nope --out x", "--workdir {tmp}/nope has no run"),
        ("--out x", "the following arguments are required: --workdir"),
        ("--workdir {run} --out x --step 3", "--step=3: {run} has checkpoints of steps [2, 4]"),
        ("--workdir {run} --out there", "--out there exists: give another, or --force"),
        (
            "--workdir {run} --out there --force",
            "--out there exists: give another, or --force",
        ),  # holds no model
        (
            "--workdir {run} --out x --revision v1",
            "--revision=v1 is a branch on the hub: give --push-to-hub",
        ),
        ("--workdir {run} --out x --dtype float16", "argument --dtype: invalid choice: 'float16'"),
        ("--workdir {tmp}/other --out x", "train.steps Input should be a valid integer"),
        ("--workdir {tmp}/empty --out x", "--step=None: {tmp}/empty has checkpoints of steps []"),
    ],
)
def test_a_mistake_is_one_line(command, message, workdir, tmp_path, monkeypatch, capsys):
    for name, steps in (("other", '"x"'), ("empty", "3")):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
        (tmp_path / name / "config.json").write_text(f'{{"train": {{"steps": {steps}}}}}')
    (tmp_path / "there").mkdir()
    (tmp_path / "there/mine").write_text("precious")
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    fill = lambda text: text.replace("{run}", str(workdir)).replace("{tmp}", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["export", *fill(command).split()])
    with pytest.raises(SystemExit) as stop:
        export.main()
    err = capsys.readouterr().err
    assert (
        stop.value.code == 2
        and err.startswith("error: ")
        and err.count("\n") == 1
        and fill(message) in err
    )
    assert sorted(tmp_path.rglob("*")) == before


def test_force_replaces_an_export(workdir, exported, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(exported, out)
    (out / "model-00001-of-00002.safetensors").write_text("of another")
    export.run(Options(workdir, tmp_path / "two", step=2))
    weights = (tmp_path / "two/model.safetensors").read_bytes()
    export.run(Options(workdir, out, step=2, force=True))
    assert {path.name for path in out.iterdir()} == {path.name for path in exported.iterdir()}
    assert (out / "model.safetensors").read_bytes() == weights


def test_reading_leaves_the_workdir_of_a_live_run_alone(workdir, tmp_path):
    unfinished = workdir / "checkpoints/6.orbax-checkpoint-tmp-7"  # which a run may be writing
    unfinished.mkdir()
    before = {path: path.stat().st_mtime_ns for path in workdir.rglob("*")}
    export.run(Options(workdir, tmp_path / "out"))
    assert {path: path.stat().st_mtime_ns for path in workdir.rglob("*")} == before
    unfinished.rmdir()


@pytest.mark.peer
def test_transformers_loads_and_generates(workdir, exported):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    tok = transformers.AutoTokenizer.from_pretrained(exported)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        exported, output_loading_info=True
    )
    assert (
        not report["missing_keys"]
        and not report["unexpected_keys"]
        and theirs.dtype == torch.float32
    )
    ids = tok("3 5=8\n", add_special_tokens=False, return_tensors="pt")["input_ids"]
    said = theirs.generate(ids, max_new_tokens=12, do_sample=False)
    assert said.shape[1] > ids.shape[1] and tok.decode(said[0]).startswith("3 5=8\n")
    assert theirs.generation_config.eos_token_id in (tok.eos_token_id, [tok.eos_token_id])


# -- the hub -------------------------------------------------------------------------------------------------------


class Hub(Stand):
    """What of the hub's API a push needs: branches are dicts from a file's path to its bytes."""

    def __init__(self):
        super().__init__(Handler)
        self.branches: dict[str, dict[str, bytes]] = {}

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, object]:
        parts, branches = path.partition("?")[0].strip("/").split("/"), self.branches
        address = f"http://127.0.0.1:{self.server_port}/me/tiny"
        if parts == ["api", "repos", "create"]:
            return (409 if branches else 200), (branches.setdefault("main", {}) and {}) or {
                "url": address
            }
        if parts == ["api", "validate-yaml"]:
            return 200, {"errors": [], "warnings": []}
        if parts[:4] != ["api", "models", "me", "tiny"]:
            return 404, {"error": f"no {path}"}
        match method, *parts[4:]:
            case "GET", "refs":
                refs = [
                    {"name": n, "ref": f"refs/heads/{n}", "targetCommit": "0" * 40}
                    for n in branches
                ]
                return 200, {"branches": refs, "converts": [], "tags": []}
            case "POST", "branch", name:
                branches[name] = dict(branches["main"])
                return 200, {}
            case "GET", "tree", name:
                files = branches[name].items()
                return 200, [
                    {"type": "file", "path": p, "size": len(x), "oid": "0" * 40} for p, x in files
                ]
            case "POST", "preupload", _:
                asked = json.loads(body)["files"]
                return 200, {
                    "files": [
                        {"path": x["path"], "uploadMode": "regular", "shouldIgnore": False}
                        for x in asked
                    ]
                }
            case "POST", "commit", name:
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "file":
                        branches[name][line["value"]["path"]] = base64.b64decode(
                            line["value"]["content"]
                        )
                    elif line["key"] == "deletedFile":
                        del branches[name][line["value"]["path"]]
                return 200, {"commitUrl": f"{address}/commit/{'1' * 40}", "commitOid": "1" * 40}
        return 200, {"id": "me/tiny", "sha": "0" * 40}


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_):
        pass

    def do_GET(self):
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        status, value = 401, {"error": "who are you?"}
        if self.headers.get("authorization") == "Bearer hf_secret":
            status, value = self.server.answer(self.command, self.path, body)
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(data)

    do_POST = do_GET


def test_push_to_a_branch_of_the_hub(environment, workdir, tmp_path):
    def command(hub: Hub, out: str, *more: str, token: str = "hf_secret") -> subprocess.Popen:
        asked = [
            sys.executable,
            "-m",
            "jzero.export",
            f"--workdir={workdir}",
            f"--out={tmp_path / out}",
        ]
        asked += ["--push-to-hub=me/tiny", *more]
        address = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_TOKEN": token}
        env = environment | address | {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        return subprocess.Popen(
            asked, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    held = lambda out: {path.name: path.read_bytes() for path in (tmp_path / out).iterdir()}
    with Hub() as hub:
        _, err = finish(command(hub, "no", token="hf_other"), code=2)
        assert (
            err.startswith("error: --push-to-hub me/tiny: ")
            and err.count("\n") == 1
            and not hub.branches
        )
        out, _ = finish(command(hub, "one", "--step=2", "--revision=v1"))
        assert "commit/1111" in out and hub.branches == {"main": {}, "v1": held("one")}
        hub.branches["v1"]["model-00001-of-00002.safetensors"] = b"of an earlier push"
        _, err = finish(command(hub, "two", "--revision=v1"), code=2)
        assert (
            "--revision=v1 exists in me/tiny: give another, or --force" in err
            and err.count("\n") == 1
        )
        finish(command(hub, "two", "--revision=v1", "--force"))
        assert hub.branches["v1"] == held("two") != held("one")
