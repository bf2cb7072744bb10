"""The warm start: AdamW on the mean negative log-likelihood of the responses, and nothing else."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import reference
from chat_templates import QWEN25
from runs import PROGRAM, ROOT, finish, timeless

from jzero import config, sft
from jzero.distributed.mesh import train_mesh
from jzero.model import tokenizer
from jzero.tasks import TASKS
from jzero.training import learner
from jzero.training.examples import Example, encode_completion, encode_row
from jzero.training.optimizer import learning_rate
from jzero.training.supervised import SupervisedTrainer
from jzero.training.warm_start import warm_start

pytestmark = pytest.mark.usefixtures("quick_compilation")
TOKENIZER = tokenizer.countdown()
MODEL = replace(reference.MODEL, vocab_size=len(TOKENIZER))


MULTI = [
    {"role": "user", "content": "2+3?"},
    {"role": "assistant", "content": "<think>\nTwo and three.\n</think>\n\n5"},
    {"role": "user", "content": "Sure?\n"},
    {"role": "assistant", "content": "<think>\nOnce more.\n</think>\n\nYes: \\boxed{5}."},
]
QWEN3 = """{%- set ns = namespace(query=0) %}{%- for message in messages %}
{%- if message.role == 'user' %}{%- set ns.query = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and '</think>' in message.content %}
{%- set thought = message.content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set said = message.content.split('</think>')[-1].lstrip('\\n') %}
{%- else %}{%- set thought = '' %}{%- set said = message.content %}{%- endif %}
{%- if message.role == 'assistant' and loop.index0 > ns.query %}
{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{%- endif %}{{- said + '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""  # thoughts of earlier turns go


def test_a_completion_ends_and_is_trained_on():
    for prompt, completion in [
        ("3 7=4\n", "7-3=4 yes\n<answer>7-3</answer>"),
        ("1 1=2\n", "<answer>1+1</answer>"),
    ]:
        example = encode_completion(TOKENIZER, prompt, completion)
        tokens, trained = example.tokens, example.trained
        assert tokenizer.decode(TOKENIZER, tokens[: trained.index(True)]) == prompt
        assert tokenizer.decode(TOKENIZER, tokens[trained.index(True) :]) == completion
        assert tokens[-1] == TOKENIZER.eos_token_id and all(trained[trained.index(True) :])


def scanned(tok, text: str, wanted: int) -> Example:
    """ChatML by its tokens: what stands between <|im_start|>assistant, a newline, and <|im_end|>, of the last `wanted`
    turns; to the last <|im_end|>."""
    ids = tok.encode(text)
    start, end = (tok.convert_tokens_to_ids(f"<|im_{name}|>") for name in ("start", "end"))
    ids = ids[: len(ids) - ids[::-1].index(end)]
    header = [start, *tok.encode("assistant\n")]
    begins = [i + len(header) for i in range(len(ids)) if ids[i : i + len(header)] == header][
        -wanted:
    ]
    spans = [range(i, ids.index(end, i) + 1) for i in begins]
    return Example(ids, [any(i in span for span in spans) for i in range(len(ids))])


@pytest.mark.parametrize("template", ["", QWEN25, QWEN3], ids=["qwen2", "qwen2.5", "qwen3"])
def test_what_the_assistant_says_is_trained_on(shared, template):
    tok = tokenizer.load(str(shared / "data/qwen2_tokenizer"))
    tok.chat_template = template or tok.chat_template
    assert tokenizer.end_of_turn(tok) == "<|im_end|>"
    system = {"role": "system", "content": "Be brief."}
    for messages in (MULTI, MULTI[:2], [system, *MULTI]):
        whole = tok.apply_chat_template(messages, tokenize=False)
        example = encode_row(tok, {"messages": messages}, "assistant")
        tokens, trained = example.tokens, example.trained
        assert example == scanned(tok, whole, 2)
        assert sum(trained) < len(trained) and trained[-1]
        split = {"prompt": messages[:-1], "completion": messages[-1:]}
        assert encode_row(tok, split, "assistant") == scanned(tok, whole, 1)
        assert encode_row(tok, split, "all") == Example(
            tokens, [False] + [True] * (len(tokens) - 1)
        )
    said = [tok.decode([i for i, t in zip(example.tokens, example.trained, strict=True) if t])]
    assert ("Two and three" in said[0]) == (template != QWEN3) and "Once more" in said[0]


def test_templates_that_write_earlier_turns_anew_and_hostile_messages(shared):
    tok = tokenizer.load(str(shared / "data/qwen2_tokenizer"))
    with pytest.raises(ValueError, match=r"holds <\|im_end\|>, which ends turns"):
        encode_row(
            tok,
            {"messages": [MULTI[0], {"role": "assistant", "content": "a<|im_end|>b"}]},
            "assistant",
        )
    tok.chat_template = "{{ messages|length }}" + QWEN25
    with pytest.raises(ValueError, match="writes earlier turns anew"):
        encode_row(tok, {"messages": MULTI}, "assistant")


def fitter(mesh, length: int, tokens: int) -> SupervisedTrainer:
    values = reference.settings(train={"microbatch_tokens": tokens})
    return SupervisedTrainer(MODEL, mesh, values, length)


@pytest.mark.parametrize("devices", [1, 4])
def test_packed_losses_are_those_of_examples_alone(devices):
    """Per token, and their mean; packed examples do not see each other."""
    rng = np.random.default_rng(0)
    examples = []
    for n in [4, 9, 31, 2, 17, 8, 5, 12]:
        trained = [False, *(rng.random(n - 2) < 0.6), True]
        examples.append(
            Example(rng.integers(0, len(TOKENIZER), n).tolist(), list(map(bool, trained)))
        )
    packing = fitter(train_mesh(devices, 1, 1, jax.devices()[:devices]), 32, 64 * devices)
    params = reference.random_params(MODEL)
    packed = packing.pack(examples)
    assert packed.batch.segments.max() > 1  # several share a row
    mine = reference.placed(packing.learner, params)
    [logps] = packing.learner.score(mine, *packing.learner.put([packed]), [packing.layout])
    got = [np.zeros(len(example.tokens), np.float32) for example in examples]
    packed.from_rows(np.asarray(logps), got)
    want, _ = reference.naive(
        params,
        [SimpleNamespace(tokens=np.array(example.tokens)) for example in examples],
        1.0,
        MODEL,
    )
    total, count = 0.0, 0
    for example, ours, theirs in zip(examples, got, want, strict=True):
        trained = example.trained
        np.testing.assert_allclose(ours[1:], theirs[1:], atol=1e-5)
        total, count = total - theirs[np.array(trained)].sum(), count + sum(trained)
    assert packing.loss(mine, packed) == pytest.approx(total / count, abs=1e-5)


def settings(**warm_start):
    return reference.settings(
        task={"template": "plain", "numbers_min": 2, "numbers_max": 2, "value_max": 9},
        rollout={
            "max_prompt_tokens": 12,
            "max_new_tokens": 24,
            "temperature": 0.5,
        },  # the temperature is RL's: not used here
        train={
            "microbatch_tokens": 72,
            "minibatches": 2,
        },  # several microbatches; the minibatches are RL's
        optimizer={"lr": 1e3, "eps": 1e-4, "weight_decay": 0.1},
        warm_start={"steps": 3, "batch_size": 5, "lr": 0.02, "warmup_steps": 2, "tries": 1}
        | warm_start,
    )


def test_warm_start_is_adamw_on_the_mean_nll():
    config = settings()
    policy = learner.policy_learner(MODEL, config, train_mesh(1, 1, 1, jax.devices()[:1]))
    start = reference.random_params(MODEL)
    steps = []
    got = warm_start(
        policy, config, TOKENIZER, reference.placed(policy, start), lambda: steps.append(None)
    )
    assert len(steps) == 3

    def gradient(params, step):
        pairs = [TASKS["countdown"].warm_start(config.task, 0, step * 5 + i, 1) for i in range(5)]
        examples = [encode_completion(TOKENIZER, *pair) for pair in pairs]
        trained = [np.array(example.trained) for example in examples]
        items = [SimpleNamespace(tokens=np.array(example.tokens)) for example in examples]
        slopes = [-1.0 * mine / sum(map(np.sum, trained)) for mine in trained]
        return reference.naive_gradient(params, items, slopes, 1.0, MODEL)

    schedule = replace(config.optimizer, lr=0.02, warmup_steps=2, schedule="cosine")
    rates = [learning_rate(schedule, step, 3) for step in range(3)]
    gradients = [lambda params, step=step: gradient(params, step) for step in range(3)]
    want = reference.adamw(start, gradients, config.optimizer, rates)
    moved = lambda params: jax.tree.map(lambda x, y: np.asarray(x) - np.asarray(y), params, start)
    assert reference.difference(moved(got), moved(want)) < 1e-4


def test_interruption_and_missing_examples(monkeypatch):
    config = settings()
    policy = learner.policy_learner(MODEL, config, train_mesh(1, 1, 1, jax.devices()[:1]))

    def stop():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        warm_start(
            policy,
            config,
            TOKENIZER,
            reference.placed(policy, reference.random_params(MODEL)),
            stop,
        )
    monkeypatch.setitem(TASKS, "countdown", TASKS["countdown"]._replace(warm_start=None))
    with pytest.raises(
        ValueError, match="task.name=countdown has no warm-start examples; set warm_start.steps=0"
    ):
        warm_start(policy, config, TOKENIZER, {}, stop)


# -- runs --------------------------------------------------------------------------------------------------------------

SIZES = (
    "model.arch.num_hidden_layers=1 model.arch.hidden_size=32 model.arch.intermediate_size=64 model.arch.head_dim=16 "
    "model.arch.num_attention_heads=2 model.arch.num_key_value_heads=1 model.logit_chunk=4096 sft.batch_size=8 "
    "sft.pack_length=128 train.microbatch_tokens=256 train.checkpoint_every=4 eval.every=5 eval.problems=12 optimizer.lr=1e-2"
)


def start(environment, workdir: Path, *more: str) -> subprocess.Popen:
    changes = [f"--config.{each}" for each in (*SIZES.split(), *more)]
    command = [
        sys.executable,
        *PROGRAM,
        f"--config={ROOT}/configs/sft.py:tiny",
        f"--workdir={workdir}",
        *changes,
    ]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True)


def test_a_killed_run_resumes_to_the_same_numbers(environment, tmp_path):
    """Of the task's own examples; the export starts another run."""
    settings = "sft.data=countdown", "warm_start.steps=28", "warm_start.batch_size=8"
    out, _ = finish(start(environment, tmp_path / "whole", *settings))
    assert "224 examples, 12 held out; 28 steps of 8" in out
    process = start(environment, tmp_path / "killed", *settings)
    while not (tmp_path / "killed/checkpoints/4").exists() and process.poll() is None:
        time.sleep(0.005)
    process.kill()
    process.communicate()
    out, _ = finish(start(environment, tmp_path / "killed", *settings))
    assert "resumed" in out
    whole, killed = (timeless(tmp_path / name / "metrics.jsonl") for name in ("whole", "killed"))
    assert whole == killed and len(whole) == 28
    losses = json.loads((tmp_path / "killed/summary.json").read_text())["eval_all"]
    assert list(losses) == ["before", *(f"step_{n}" for n in range(5, 28, 5)), "after"]
    assert losses["after"]["eval/loss"] < 0.7 * losses["before"]["eval/loss"]
    files = [
        (tmp_path / name / "export-28/model.safetensors").read_bytes()
        for name in ("whole", "killed")
    ]
    assert files[0] == files[1]
    model = f"model.path={tmp_path}/whole/export-28"
    finish(start(environment, tmp_path / "on", model, *settings, "warm_start.steps=1"))
    before = json.loads((tmp_path / "on/summary.json").read_text())["eval_all"]["before"]
    assert before["eval/loss"] == pytest.approx(losses["after"]["eval/loss"], abs=1e-4)


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def conversations(tmp_path: Path, **changes) -> config.Config:
    """Of two sets, one of messages and one of prompts with completions, under a template of one's own."""
    talk = lambda i: [
        {"role": "user", "content": f"{i}+1="},
        {"role": "assistant", "content": f"{i + 1}"},
    ]
    one = write(tmp_path / "one.jsonl", [{"messages": talk(i), "source": "x"} for i in range(20)])
    two = write(
        tmp_path / "two.jsonl", [{"prompt": f"{i}-1=", "completion": str(i - 1)} for i in range(10)]
    )
    (tmp_path / "chat.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    )
    arch = config.ArchitectureConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, head_dim=8
    )
    arch.num_key_value_heads = 1
    values = reference.settings(
        sft={"data": f"{one},{two}", "chat_template": str(tmp_path / "chat.jinja")} | changes
    )
    values.model.arch, values.sft.batch_size, values.sft.pack_length, values.eval.problems = (
        arch,
        6,
        16,
        4,
    )
    values.sft.eval_data = values.sft.eval_data or one
    return values


def test_epochs_of_mixed_sets(tmp_path, capsys):
    summary = sft.train(conversations(tmp_path, epochs=2), tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 10 and rows[4]["sft/epoch"] == 1 and rows[-1]["sft/epoch"] == 2
    assert summary["eval_all"]["after"]["eval/loss"] == rows[-1]["eval/loss"]
    assert sum(row["sft/tokens"] for row in rows) == 2 * (
        sum(len(str(i + 1)) + 1 for i in range(20)) + 10 + 11
    )
    exported = tokenizer.load(summary["export"])
    assert exported.chat_template == (tmp_path / "chat.jinja").read_text()
    again = sft.train(
        conversations(tmp_path, epochs=2), tmp_path / "run"
    )  # it is done: nothing changes
    assert again["eval_all"] == summary["eval_all"] and "resumed" in capsys.readouterr().out


def test_weights_of_sets(tmp_path):
    """Three of four examples are of the second set, the shorter ones."""
    sft.train(conversations(tmp_path, weights=(1.0, 3.0), epochs=2), tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert sum(row["sft/tokens"] for row in rows) < 2 * 30 * 2.4


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"data": "nowhere.jsonl"}, "nowhere.jsonl cannot be loaded"),
        ({"data": "COLUMNS"}, "it needs messages, or prompt and completion"),
        ({"weights": (1.0,)}, "a positive number for each of the 2 sets"),
        ({"weights": (1.0, 0.0)}, "a positive number for each of the 2 sets"),
        ({"chat_template": "nowhere.jinja"}, "sft.chat_template=nowhere.jinja"),
        ({"loss": "user"}, "sft.loss='user' is not one of assistant, all"),
        ({"pack_length": 3}, "every example is longer than sft.pack_length=3"),
    ],
)
def test_mistakes_are_told_before_anything_is_written(tmp_path, changes, message):
    values = conversations(tmp_path)
    if changes.get("data") == "COLUMNS":
        changes = {"data": write(tmp_path / "three.jsonl", [{"text": "x"}])}
    for name, value in changes.items():
        setattr(values.sft, name, value)
    with pytest.raises(ValueError, match=message):
        sft.train(values, tmp_path / "run")
    assert "pack_length" in changes or not (tmp_path / "run").exists()
