"""lm-eval against the server, and lm-eval on transformers with the same weights.

    pip install -c constraints.txt -e '.[dev,peer]' && pytest -m peer tests/serving/test_lm_eval.py

The harness runs as a process, as its users run it, on tasks that are defined here by files.
"""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from servers import ROOM, SETTINGS, free_port, save_model, server_process, wait_until_healthy

from jzero.commands import evaluate

# The request has room for one more token, which lm-eval always asks for. Of a long text it scores
# windows of one token less.
WINDOW = ROOM - 2
QUESTIONS = [
    {
        "question": f"Which word comes after {i}?",
        "choices": [f"word {i * 3}", "no", f"the {'long ' * (i % 4)}one", "étoile"],
        "answer": i % 4,
    }
    for i in range(12)
]
# No two windows of these texts are the same: lm-eval's transformers model mixes up their scores.
LETTERS = random.Random(0)
TEXTS = [{"text": "".join(LETTERS.choices("abc de é.", k=30 * i))} for i in range(1, 8)]


# A process of lm-eval: model, its arguments, the folder of the tasks, the file to write.
RUN_LM_EVAL = """
import json, sys
import lm_eval
from lm_eval.tasks import TaskManager
model, arguments, tasks, out = sys.argv[1:]
results = lm_eval.simple_evaluate(
    model=model, model_args=arguments, tasks=["choices", "texts"], batch_size=4, bootstrap_iters=0,
    task_manager=TaskManager(include_path=tasks, include_defaults=False), log_samples=True,
)
samples = {
    task: [sample["filtered_resps"] for sample in sorted(rows, key=lambda row: row["doc_id"])]
    for task, rows in results["samples"].items()
}
with open(out, "w") as file:
    json.dump({"results": results["results"], "samples": samples}, file, default=str)
"""

CHOICES = """
task: choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/choices.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
PERPLEXITY = """
task: texts
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/texts.jsonl}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: word_perplexity}}, {{metric: byte_perplexity}}, {{metric: bits_per_byte}}]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("lm_eval") / "model")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two tasks of lm-eval and their data."""
    folder = tmp_path_factory.mktemp("tasks")
    for name, rows in (("choices", QUESTIONS), ("texts", TEXTS)):
        lines = [json.dumps(row) for row in rows]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "choices.yaml").write_text(CHOICES.format(folder=folder), encoding="utf-8")
    (folder / "texts.yaml").write_text(PERPLEXITY.format(folder=folder), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def url(model: str, environment: dict[str, str]) -> Iterator[str]:
    port = free_port()
    with server_process(model, environment, "--port", str(port)) as server:
        address = f"http://127.0.0.1:{port}"
        wait_until_healthy(server, address)
        yield f"{address}/v1/completions"


def run_lm_eval(folder: Path, tasks: Path, kind: str, **arguments: object) -> dict:
    """Returns what the harness says of both tasks, by a model of this kind."""
    out = folder / f"{kind}.json"
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder)}
    model_arguments = ",".join(f"{name}={value}" for name, value in arguments.items())
    command = [sys.executable, "-c", RUN_LM_EVAL, kind, model_arguments, str(tasks), str(out)]
    done = subprocess.run(
        command, env={**os.environ, **offline}, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text(encoding="utf-8"))


@pytest.mark.peer
def test_the_harness_gets_from_the_server_what_it_gets_from_transformers(
    model, tasks, url, tmp_path
) -> None:
    pytest.importorskip("lm_eval")
    served = run_lm_eval(
        tmp_path,
        tasks,
        "local-completions",
        model=model,
        base_url=url,
        tokenizer=model,
        tokenizer_backend="huggingface",
        max_length=ROOM,
        num_concurrent=2,
    )
    wanted = run_lm_eval(
        tmp_path, tasks, "hf", pretrained=model, dtype="float32", device="cpu", max_length=WINDOW
    )

    for task, rows in (("choices", QUESTIONS), ("texts", TEXTS)):
        got_samples, want_samples = served["samples"][task], wanted["samples"][task]
        assert len(got_samples) == len(want_samples) == len(rows)
        np.testing.assert_allclose(
            log_likelihoods(got_samples), log_likelihoods(want_samples), atol=1e-3
        )
    assert greedy_of(served["samples"]["choices"]) == greedy_of(wanted["samples"]["choices"])
    assert max(len(row["text"]) for row in TEXTS) > WINDOW, "a text has several windows"
    for metric in ("acc,none", "acc_norm,none"):
        got, want = (run["results"]["choices"][metric] for run in (served, wanted))
        assert round(got * len(QUESTIONS)) == round(want * len(QUESTIONS))
    for metric in ("word_perplexity,none", "byte_perplexity,none", "bits_per_byte,none"):
        got, want = (run["results"]["texts"][metric] for run in (served, wanted))
        assert got == pytest.approx(want, rel=1e-3)

    # `jzero evaluate --loglikelihood` answers the same questions.
    arguments = ["--model", model, "--loglikelihood", str(tasks / "choices.jsonl")]
    arguments += ["--out", str(tmp_path / "out"), *SETTINGS]
    command = evaluate.parse(arguments)
    own = evaluate.run_loglikelihood(command.questions, command.out, command.settings)["choices"]
    results = wanted["results"]["choices"]
    assert own["accuracy"] == pytest.approx(results["acc,none"])
    assert own["accuracy_per_character"] == pytest.approx(results["acc_norm,none"])
    lines = (tmp_path / "out" / "choices-loglikelihood.jsonl").read_text().splitlines()
    sums = [json.loads(line)["loglikelihoods"] for line in lines]
    np.testing.assert_allclose(sums, log_likelihoods(wanted["samples"]["choices"]), atol=1e-3)


def log_likelihoods(samples: list) -> np.ndarray:
    """Returns the log-likelihoods of all requests of a task, which come as text or numbers."""
    return np.array(
        [
            [float(item[0]) if isinstance(item, list) else float(item) for item in sample]
            for sample in samples
        ]
    )


def greedy_of(samples: list) -> list[list[bool]]:
    """Returns which choices greedy decoding would have given."""
    return [[str(item[1]) == "True" for item in sample] for sample in samples]
