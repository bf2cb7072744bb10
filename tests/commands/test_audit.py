"""`jzero.audit`: logs that torch samples from a model of `transformers`, honest and with faults."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jzero import audit
from jzero.audits.log import Sampling, read_log
from jzero.config import AdapterConfig
from jzero.errors import UserError
from jzero.model import adapters, huggingface, peft, qwen

VOCAB = 96
BOS = 1
ADAPTER = AdapterConfig(rank=4, alpha=8.0, targets=("q", "v", "up", "down"))
ARCHITECTURES = {
    "llama": qwen.QwenConfig("llama", VOCAB, 48, 96, 2, 4, 2, 12, False, 10000.0, 1e-6),
    "qwen2": qwen.QwenConfig("qwen2", VOCAB, 48, 96, 2, 4, 2, 12, True, 10000.0, 1e-6),
}
ROWS, TOKENS = 16, 24
PLAIN = Sampling()
DTYPES = ("float32", "bfloat16")

Row = dict[str, object]
Logits = Callable[[np.ndarray], np.ndarray]  # i32[B, T] -> f32[B, T, V]


def random_params(config: qwen.QwenConfig, seed: int) -> qwen.Params:
    """Returns parameters whose predictions have moderate entropies."""
    rng = np.random.default_rng(seed)

    def random_leaf(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        mean = 1.0 if "norm" in path[-1].key else 0.0
        scale = 0.3 if path[-1].key in ("embed", "lm_head") else 0.15
        return jnp.asarray(mean + scale * rng.standard_normal(leaf.shape), jnp.float32)

    return jax.tree.map_with_path(random_leaf, qwen.abstract(config))


def random_adapter(config: qwen.QwenConfig, seed: int = 2) -> qwen.Params:
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: jnp.asarray(0.12 * rng.standard_normal(leaf.shape), jnp.float32),
        adapters.abstract(config, ADAPTER),
    )


@dataclass(frozen=True)
class Models:
    """Directories of one architecture."""

    config: qwen.QwenConfig
    base: Path
    adapter: Path
    older: Path  # a little different from the base
    other: Path
    merged: Path  # the base with the adapter
    doubled: Path  # with twice the scale


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Models:
    config = ARCHITECTURES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    params, factors = random_params(config, 0), random_adapter(config)
    older = jax.tree.map(lambda x, y: x + 0.1 * (y - x), params, random_params(config, 5))
    weights = {
        "base": params,
        "older": older,
        "other": random_params(config, 7),
        "merged": adapters.merge(config, params, factors, ADAPTER.scale),
        "doubled": adapters.merge(config, params, factors, 2 * ADAPTER.scale),
    }
    extra = {"max_position_embeddings": 512, "bos_token_id": BOS}
    for name, tree in weights.items():
        huggingface.save(folder / name, config, tree, dtype="float32", hf_config_extra=extra)
    peft.save(
        folder / "adapter",
        config,
        ADAPTER,
        factors,
        base=str(folder / "base"),
        dtype="float32",
    )
    return Models(config, adapter=folder / "adapter", **{name: folder / name for name in weights})


@cache
def torch_model(path: Path, dtype: str) -> Logits:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    kind = getattr(torch, dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(path).to(kind)

    def logits(tokens: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            outputs = model(torch.tensor(tokens, dtype=torch.long))
        return outputs.logits.float().numpy()

    return logits


def filtered(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Returns logits [B, V] after temperature and filters, by the code of `transformers`."""
    torch = pytest.importorskip("torch")
    generation = pytest.importorskip("transformers.generation.logits_process")
    scores = torch.tensor(logits)
    processors = [generation.TemperatureLogitsWarper(sampling.temperature or 1.0)]
    if sampling.top_k or not sampling.temperature:
        top_k = sampling.top_k if sampling.temperature else 1
        processors.append(generation.TopKLogitsWarper(top_k))
    if sampling.top_p < 1:
        processors.append(generation.TopPLogitsWarper(sampling.top_p))
    for processor in processors:
        scores = processor(None, scores)
    return torch.log_softmax(scores, dim=-1).numpy()


def prompts(seed: int, length: int, rows: int = ROWS, bos: bool = True) -> np.ndarray:
    tokens = np.random.default_rng(seed).integers(2, VOCAB, (rows, length))
    if bos:
        tokens[:, 0] = BOS
    return tokens


def sample(
    path: Path,
    seed: int,
    sampling: Sampling = PLAIN,
    dtype: str = "float32",
    length: int = 10,
    rows: int = ROWS,
    seen: Callable[[np.ndarray], np.ndarray] = lambda prompt: prompt,
    steps: int = TOKENS,
) -> list[Row]:
    """Samples honest rows, with log-probs after temperature and filters.

    seen: the context that the model gets instead of the prompts.
    """
    logits = torch_model(path, dtype)
    rng = np.random.default_rng([seed, 1])
    prompt = prompts(seed, length, rows)
    context = seen(prompt)
    start = context.shape[1]
    logps = []
    for _ in range(steps):
        log_q = filtered(logits(context)[:, -1], sampling)
        noise = rng.gumbel(size=log_q.shape)
        token = np.argmax(log_q + noise, axis=-1)
        logps.append(np.take_along_axis(log_q, token[:, None], -1)[:, 0])
        context = np.concatenate([context, token[:, None]], axis=1)
    columns = np.stack(logps, axis=1)
    return [
        {
            "prompt_ids": prompt[row].tolist(),
            "response_ids": context[row, start:].tolist(),
            "logprobs": columns[row].tolist(),
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
        }
        for row in range(rows)
    ]


def write(path: Path, rows: list[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def without_logps(rows: list[Row]) -> list[Row]:
    return [{name: value for name, value in row.items() if name != "logprobs"} for row in rows]


def run(folder: Path, rows: list[Row], *flags: str) -> list[tuple[str, int]]:
    """Returns the causes that an audit finds, with the number of rows of each."""
    log = write(folder / "log.jsonl", rows)
    options = audit.parse([str(log), *flags])
    claim, responses = audit.read_claim(options)
    found, findings = audit.audit(claim, responses)
    for finding in findings:
        print(finding.cause, len(finding.places), finding.numbers)
        audit.describe(claim, finding, responses, found)
    return [(finding.cause, len(finding.places)) for finding in findings]


def flags_of(models: Models) -> tuple[str, ...]:
    """Returns the claim that the base with the adapter has sampled."""
    weights = ("--model", str(models.base), "--adapter", str(models.adapter))
    return (*weights, "--also", f"older={models.older}")


# -- honest logs -----------------------------------------------------------------------------------

FILTERS = [
    Sampling(),
    Sampling(0.7, 0, 0.9),
    Sampling(1.3, 12, 1.0),
    Sampling(0.9, 20, 0.95),
    Sampling(0.0),
]


@pytest.mark.peer
# Every filter, both types of numbers and both models, but not each with each.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(len(FILTERS)))
def test_honest_log_is_not_rejected(models: Models, dtype: str, seed: int, tmp_path: Path) -> None:
    sampling = FILTERS[seed]
    rows = sample(models.merged, seed, sampling, dtype)
    if not sampling.temperature:
        rows = without_logps(rows)
    flags = (*flags_of(models), "--dtype", dtype)

    assert run(tmp_path, rows, *flags) == []
    assert run(tmp_path, without_logps(rows), *flags) == []


# -- faults ----------------------------------------------------------------------------------------


def claim(rows: list[Row], sampling: Sampling) -> list[Row]:
    """Returns rows that claim other sampling parameters."""
    return [row | sampling._asdict() for row in rows]


def leaked_rows(path: Path, seed: int) -> list[Row]:
    """Samples every response with the tokens of the row before in its context."""
    rows = sample(path, seed, rows=1)
    for number in range(1, ROWS):
        before = np.array(rows[-1]["prompt_ids"] + rows[-1]["response_ids"])[None]
        rows += sample(
            path,
            seed + number,
            rows=1,
            seen=lambda prompt, before=before: np.concatenate([before, prompt], axis=1),
        )
    return rows


def raw_logps(path: Path, rows: list[Row], temperature: float) -> list[Row]:
    """Returns rows with log-probs at another temperature, without filters."""
    logits = torch_model(path, "float32")
    changed = []
    for row in rows:
        prompt, tokens = row["prompt_ids"], row["response_ids"]
        outputs = logits(np.array([prompt + tokens]))[0, len(prompt) - 1 : -1]
        log_p = filtered(outputs, Sampling(temperature))
        logps = np.take_along_axis(log_p, np.array(tokens)[:, None], -1)[:, 0]
        changed.append(row | {"logprobs": logps.tolist()})
    return changed


def shifted(rows: list[Row]) -> list[Row]:
    return [row | {"logprobs": [-1.0, *row["logprobs"][:-1]]} for row in rows]


def edited(path: Path, rows: list[Row]) -> list[Row]:
    """Replaces a token in the middle of each response."""
    changed = []
    for row in rows:
        tokens = list(row["response_ids"])
        tokens[12] = (tokens[12] + 17) % VOCAB
        changed.append(row | {"response_ids": tokens})
    return changed


def nudged(rows: list[Row]) -> list[Row]:
    """Changes one log-prob of each response."""
    changed = []
    for row in rows:
        logps = list(row["logprobs"])
        logps[5] -= 0.5
        changed.append(row | {"logprobs": logps})
    return changed


COLD = Sampling(0.7)
FAULTS: dict[str, tuple[Callable[[Models], list[Row]], str, bool]] = {
    # name: (rows, start of the cause, whether it is found without log-probs)
    "adapter ignored": (lambda m: sample(m.base, 0), "the adapter was not applied", True),
    "adapter scale": (lambda m: sample(m.doubled, 1), "the adapter was applied at 2 times", True),
    "temperature": (
        lambda m: claim(sample(m.merged, 2, Sampling(1.3)), Sampling(0.8)),
        "sampled at temperature 1.",
        True,
    ),
    "top-k ignored": (
        lambda m: claim(sample(m.merged, 3), Sampling(1.0, 5)),
        "top-k and top-p were not applied",
        True,
    ),
    "top-p ignored": (
        lambda m: claim(sample(m.merged, 3), Sampling(1.0, 0, 0.8)),
        "top-k and top-p were not applied",
        True,
    ),
    "top-k applied": (
        lambda m: claim(sample(m.merged, 4, Sampling(1.0, 20)), Sampling()),
        "top_k=20 was applied",
        True,
    ),
    "top-p applied": (
        lambda m: claim(sample(m.merged, 4, Sampling(1.0, 0, 0.9)), Sampling()),
        "top_p=0.9 was applied",
        True,
    ),
    "greedy": (
        lambda m: claim(sample(m.merged, 4, Sampling(0.0)), Sampling()),
        "decoding was greedy",
        True,
    ),
    "older checkpoint": (lambda m: sample(m.older, 5), "sampled by older", True),
    "first tokens cut": (
        lambda m: sample(m.merged, 6, seen=lambda prompt: prompt[:, 3:]),
        "the prompt was cut",
        True,
    ),
    "BOS missing": (
        lambda m: sample(m.merged, 7, seen=lambda prompt: prompt[:, 1:]),
        "BOS was missing",
        True,
    ),
    "BOS twice": (
        lambda m: sample(
            m.merged, 8, seen=lambda prompt: np.concatenate([prompt[:, :1], prompt], axis=1)
        ),
        "BOS stood twice",
        True,
    ),
    "leak": (lambda m: leaked_rows(m.merged, 100), "the tokens of the row before", True),
    "another model": (lambda m: sample(m.other, 9), "another model", True),
    "dtype": (lambda m: sample(m.merged, 10, dtype="bfloat16"), "computed in bfloat16", False),
    "shift": (lambda m: shifted(sample(m.merged, 11)), "log-probs are shifted", False),
    "raw log-probs": (
        lambda m: raw_logps(m.merged, sample(m.merged, 12, COLD), 1.0),
        "log-probs are at temperature 1",
        False,
    ),
    "unfiltered log-probs": (
        lambda m: raw_logps(m.merged, sample(m.merged, 13, Sampling(0.8, 8)), 0.8),
        "log-probs are before the filters",
        False,
    ),
    "edited": (lambda m: edited(m.merged, sample(m.merged, 14)), "fits up to a position", False),
    "one log-prob": (lambda m: nudged(sample(m.merged, 15)), "single log-probs differ", False),
    "recomputed": (
        lambda m: raw_logps(m.merged, claim(sample(m.merged, 16, Sampling(1.4)), COLD), 0.7),
        "sampled at temperature 1.",
        False,
    ),
}


QUICK = ("adapter ignored", "top-k ignored", "older checkpoint", "shift", "leak", "edited")


@pytest.mark.peer
@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_named(models: Models, name: str, tmp_path: Path) -> None:
    make_rows, cause, is_in_tokens = FAULTS[name]
    rows = make_rows(models)
    logs = [rows, without_logps(rows)] if is_in_tokens else [rows]

    for log in logs:
        found = run(tmp_path, log, *flags_of(models), "--dtype", "float32")

        assert [text[: len(cause)] for text, _ in found] == [cause]
        # The first row has no neighbor, and alone may say too little.
        assert found[0][1] >= ROWS - 2


BFLOAT16_FAULTS: dict[str, tuple[Callable[[Models], list[Row]], str]] = {
    "adapter ignored": (
        lambda m: sample(m.base, 0, dtype="bfloat16"),
        "the adapter was not applied",
    ),
    "temperature": (
        lambda m: claim(sample(m.merged, 2, Sampling(1.3), "bfloat16"), Sampling(0.8)),
        "sampled at temperature 1.3",
    ),
    "older checkpoint": (lambda m: sample(m.older, 5, dtype="bfloat16"), "sampled by older"),
    "BOS missing": (
        lambda m: sample(m.merged, 7, dtype="bfloat16", seen=lambda prompt: prompt[:, 1:]),
        "BOS was missing",
    ),
    "shift": (
        lambda m: shifted(sample(m.merged, 11, dtype="bfloat16")),
        "log-probs are shifted",
    ),
    "another model": (lambda m: sample(m.other, 9, dtype="bfloat16"), "another model"),
}


@pytest.mark.peer
@pytest.mark.parametrize("name", BFLOAT16_FAULTS)
def test_fault_is_named_in_bfloat16(models: Models, name: str, tmp_path: Path) -> None:
    make_rows, cause = BFLOAT16_FAULTS[name]

    found = run(tmp_path, make_rows(models), *flags_of(models))

    assert [text[: len(cause)] for text, _ in found] == [cause]
    assert found[0][1] >= ROWS - 2


@pytest.mark.peer
def test_every_cause_of_a_mixed_log_is_named(models: Models, tmp_path: Path) -> None:
    rows = sample(models.merged, 20, rows=8) + sample(models.older, 21, rows=5)
    rows += shifted(sample(models.merged, 22, rows=4))

    found = run(tmp_path, rows, *flags_of(models), "--dtype", "float32")

    assert [(text.split(":")[0], count) for text, count in found] == [
        ("sampled by older", 5),
        ("log-probs are shifted by one position", 4),
    ]


@pytest.mark.peer
def test_only_the_version_with_other_weights_is_rejected(models: Models, tmp_path: Path) -> None:
    first = [row | {"version": 1} for row in sample(models.merged, 30)]
    second = [row | {"version": 2} for row in sample(models.older, 31)]

    found = run(tmp_path, without_logps(first + second), *flags_of(models))

    [(cause, count)] = found
    assert cause == "sampled by older"
    assert count >= ROWS - 2


# -- logs of TRL's trainer -------------------------------------------------------------------------


def trl_rows(
    path: Path, folder: Path, dtype: str = "float32", steps: int = 1, **options: object
) -> list[Row]:
    """Returns the rollouts of the last step of TRL's GRPO, with the log-probs that TRL computes.

    The rows claim to be sampled as by default, whatever `options` of the trainer say.
    """
    torch = pytest.importorskip("torch")
    trl = pytest.importorskip("trl")
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    datasets = pytest.importorskip("datasets")

    # A token is a word, so that a prompt is its ids.
    words = tokenizers.models.WordLevel({f"w{token}": token for token in range(VOCAB)}, "w0")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    texts = [" ".join(f"w{token}" for token in prompt) for prompt in prompts(3, 10)]

    batches: list[dict] = []

    class LoggingTrainer(trl.GRPOTrainer):
        """TRL logs texts: this trainer keeps the ids and the log-probs that its loss reads."""

        def _generate_and_score_completions(self, inputs: list[dict]) -> dict:
            batches.append(super()._generate_and_score_completions(inputs))
            return batches[-1]

    kind = getattr(torch, dtype)
    trainer = LoggingTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(path, dtype=kind),
        reward_funcs=lambda completion_ids, **_: [float(len(set(ids))) for ids in completion_ids],
        args=trl.GRPOConfig(
            output_dir=str(folder),
            per_device_train_batch_size=ROWS,
            num_generations=2,
            # Two iterations over the rollouts: TRL computes the log-probs of the sampling policy.
            num_iterations=2,
            max_steps=2 * steps,
            max_completion_length=TOKENS,
            use_cpu=True,
            bf16=False,
            report_to=[],
            save_strategy="no",
            **options,
        ),
        train_dataset=datasets.Dataset.from_dict({"prompt": texts}),
        processing_class=transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="w0", eos_token="w2", padding_side="left"
        ),
    )
    trainer.train()
    batch = {name: value.float().numpy() for name, value in batches[-1].items() if name in KEPT}
    rows: list[Row] = []
    for row in range(ROWS):
        seen = batch["prompt_mask"][row] > 0
        sampled = batch["completion_mask"][row] > 0
        rows.append(
            {
                "prompt_ids": batch["prompt_ids"][row, seen].astype(int).tolist(),
                "completion_ids": batch["completion_ids"][row, sampled].astype(int).tolist(),
                "logprobs": batch["old_per_token_logps"][row, sampled].tolist(),
            }
        )
    return rows


KEPT = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "old_per_token_logps")
TRL_FAULTS: dict[str, tuple[Callable[[Models, Path], list[Row]], str]] = {
    "adapter ignored": (lambda m, f: trl_rows(m.base, f), "the adapter was not applied"),
    "older checkpoint": (lambda m, f: trl_rows(m.older, f), "sampled by older"),
    "temperature": (
        lambda m, f: trl_rows(m.merged, f, temperature=1.4),
        "sampled at temperature 1.4",
    ),
    # TRL's log-probs are those before the filter: only the tokens show it.
    "top-k applied": (
        lambda m, f: without_logps(trl_rows(m.merged, f, top_k=5)),
        "top_k=5 was applied",
    ),
    "dtype": (lambda m, f: trl_rows(m.merged, f, "bfloat16"), "computed in bfloat16"),
    # The rollouts of the second step, after an update that the claim does not have.
    "newer weights": (
        lambda m, f: trl_rows(m.merged, f, steps=2, learning_rate=0.02),
        "another model",
    ),
}


@pytest.mark.filterwarnings("ignore")  # of TRL and of what it imports
@pytest.mark.peer
@pytest.mark.parametrize("dtype", DTYPES)
def test_honest_log_of_trl_is_not_rejected(models: Models, dtype: str, tmp_path: Path) -> None:
    rows = trl_rows(models.merged, tmp_path / "trl", dtype)

    assert run(tmp_path, rows, *flags_of(models), "--dtype", dtype) == []
    assert run(tmp_path, without_logps(rows), *flags_of(models), "--dtype", dtype) == []


@pytest.mark.filterwarnings("ignore")  # of TRL and of what it imports
@pytest.mark.peer
@pytest.mark.parametrize("name", TRL_FAULTS)
def test_fault_in_a_log_of_trl_is_named(models: Models, name: str, tmp_path: Path) -> None:
    make_rows, cause = TRL_FAULTS[name]

    found = run(
        tmp_path, make_rows(models, tmp_path / "trl"), *flags_of(models), "--dtype", "float32"
    )

    # A short response may fit another cause as well.
    (text, count), *_ = found
    assert text.startswith(cause)
    assert count >= ROWS - 3


# -- the command -----------------------------------------------------------------------------------


@pytest.mark.peer
def test_command_reports_and_ends_with_a_status(
    models: Models, environment: dict[str, str], tmp_path: Path
) -> None:
    rows = sample(models.base, 40, rows=4)
    log = write(tmp_path / "log.jsonl", rows)
    command = [sys.executable, "-m", "jzero.audit", str(log), "--dtype=float32"]
    report = tmp_path / "report.json"

    flags = [f"--model={models.base}", f"--adapter={models.adapter}", f"--json={report}"]
    rejected = subprocess.run([*command, *flags], capture_output=True, text=True, env=environment)
    honest = subprocess.run([*command, flags[0]], capture_output=True, text=True, env=environment)
    mistaken = subprocess.run([*command, f"--model={tmp_path}"], capture_output=True, text=True)

    assert rejected.returncode == 1, rejected.stderr
    assert "4 of 4 responses: the adapter was not applied" in rejected.stdout
    [finding] = json.loads(report.read_text())["findings"]
    assert finding["lines"] == [1, 2, 3, 4]
    example = finding["example"]
    assert example["logged"] == round(rows[0]["logprobs"][example["position"]], 4)
    assert abs(example["logged"] - example["computed"]) > 0.01
    assert honest.returncode == 0, honest.stderr
    assert "nothing is rejected" in honest.stdout
    assert mistaken.returncode == 2
    assert len(mistaken.stderr.strip().splitlines()) == 1


GOOD: Row = {"prompt_ids": [1, 2], "response_ids": [3, 4], "logprobs": [-1.0, -2]}


def test_other_names_of_fields_are_read(tmp_path: Path) -> None:
    row = {
        "prompt_token_ids": [1, 2],
        "completion_ids": [3],
        "logprobs": None,
        "top_k": -1,
        "top_p": 0.5,
        "model_version": 7,
    }
    empty = GOOD | {"response_ids": [], "logprobs": []}
    log = write(tmp_path / "log.jsonl", [empty, row])

    [response] = read_log(log, VOCAB, Sampling(0.6, 3))

    assert (response.line, response.version, response.logps) == (2, "7", None)
    assert response.sampling == Sampling(0.6, 0, 0.5)
    assert response.prompt.tolist() == [1, 2]
    assert response.tokens.tolist() == [3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": None}, "prompt_ids is missing"),
        ({"prompt_ids": []}, "prompt_ids is empty"),
        ({"response_ids": "ab"}, "response_ids=ab is not a list of token ids"),
        ({"response_ids": [3, 96]}, r"response_ids\[1\]=96 is not a token of the model"),
        ({"response_ids": [True, 4]}, r"response_ids\[0\]=True is not a token"),
        ({"prompt_ids": [-1]}, r"prompt_ids\[0\]=-1 is not a token"),
        ({"logprobs": [-1.0]}, "logprobs has 1 numbers, and the response 2 tokens"),
        ({"logprobs": [-1.0, 0.5]}, r"logprobs\[1\]=0.5 is not a log-probability"),
        ({"logprobs": [float("-inf"), 0]}, r"logprobs\[0\]=-inf is not a log-probability"),
        ({"logprobs": [None, 0]}, r"logprobs\[0\]=None is not a log-probability"),
        ({"temperature": -1}, "temperature=-1 must be a number from 0"),
        ({"temperature": "hot"}, "temperature=hot must be a number"),
        ({"top_k": 1.5}, "top_k=1.5 must be a whole number"),
        ({"top_p": 0}, "top_p=0 must be a number"),
        ({"version": [1]}, "version="),
    ],
)
def test_bad_field_is_named_with_its_row(tmp_path: Path, change: Row, message: str) -> None:
    log = write(tmp_path / "log.jsonl", [GOOD, GOOD | change])

    with pytest.raises(UserError, match=f"log.jsonl:2: {message}") as error:
        read_log(log, VOCAB, PLAIN)

    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"log.jsonl:1: damaged \(not valid JSON: "),
        ("[1]", "log.jsonl:1: not a JSON object"),
        ("[" * 100_000, r"log.jsonl:1: damaged \(nested more than 64 deep"),
        ("\n", "log.jsonl has no responses"),
        ("\xff", r"log.jsonl:1: damaged \(.utf-8. codec"),
    ],
)
def test_file_without_rows_is_a_user_error(tmp_path: Path, text: str, message: str) -> None:
    log = tmp_path / "log.jsonl"
    log.write_bytes(text.encode("latin1"))

    with pytest.raises(UserError, match=message):
        read_log(log, VOCAB, PLAIN)


def test_missing_log_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read_log(tmp_path / "none.jsonl", VOCAB, PLAIN)


@pytest.mark.parametrize("flag", ["older", "=DIR", "older="])
def test_also_without_a_name_is_a_user_error(flag: str) -> None:
    with pytest.raises(UserError, match="--also NAME=DIR"):
        audit.read_also([flag])
