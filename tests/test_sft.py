"""Whole runs of supervised fine-tuning: killed and resumed, on mixed sets, and with mistakes."""

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import reference
from runs import PROGRAM, ROOT, finish, read_jsonl, timeless, write_jsonl

from jzero.config import Checkpoint, Config, put_value, tiny_arch
from jzero.loops import sft
from jzero.model import tokenizer
from jzero.types import JsonValue

pytestmark = pytest.mark.usefixtures("quick_runs", "explicit_transfers")


# -- runs that are processes -----------------------------------------------------------------------

ARCH = tiny_arch(
    num_hidden_layers=1,
    hidden_size=32,
    intermediate_size=64,
    head_dim=16,
    num_attention_heads=2,
    num_key_value_heads=1,
)
TINY = (
    f"model.arch={ARCH}",
    "model.logit_chunk=4096",
    "sft.batch_size=8",
    "sft.pack_length=128",
    "train.microbatch_tokens=256",
    "train.checkpoint_every=4",
    "eval.every=5",
    "eval.problems=12",
    "optimizer.lr=1e-2",
)
# Examples of the task itself: 28 steps of 8 examples.
COUNTDOWN = ("sft.data=countdown", "warm_start.steps=28", "warm_start.batch_size=8")


def start(environment: Mapping[str, str], workdir: Path, *settings: str) -> subprocess.Popen[str]:
    """Starts a run as a process."""
    command = [
        sys.executable,
        *PROGRAM,
        f"--config={ROOT}/configs/sft.py:tiny",
        f"--workdir={workdir}",
        *[f"--config.{setting}" for setting in (*TINY, *settings)],
    ]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@dataclass(frozen=True)
class FinishedRun:
    """A run that has ended well."""

    workdir: Path
    output: str

    @property
    def metrics(self) -> list[dict[str, JsonValue]]:
        """Its metrics but for times."""
        return timeless(self.workdir / "metrics.jsonl")

    @property
    def evaluations(self) -> dict[str, dict[str, float]]:
        """Its evaluations, in their order."""
        return json.loads((self.workdir / "summary.json").read_text())["eval_all"]

    @property
    def exported_weights(self) -> bytes:
        return (self.workdir / "export-28/model.safetensors").read_bytes()


def run_to_the_end(environment: Mapping[str, str], workdir: Path, *settings: str) -> FinishedRun:
    output, _ = finish(start(environment, workdir, *settings))
    return FinishedRun(workdir, output)


@pytest.fixture(scope="module")
def whole_run(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """Returns a run on COUNTDOWN that nothing has interrupted."""
    return run_to_the_end(environment, tmp_path_factory.mktemp("whole"), *COUNTDOWN)


def test_a_run_trains_on_the_examples_of_a_task(whole_run: FinishedRun) -> None:
    assert "224 examples, 12 held out; 28 steps of 8" in whole_run.output
    assert len(whole_run.metrics) == 28
    names = ["before", *(f"step_{step}" for step in range(5, 28, 5)), "after"]
    assert list(whole_run.evaluations) == names
    loss_before = whole_run.evaluations["before"]["eval/loss"]
    assert whole_run.evaluations["after"]["eval/loss"] < 0.7 * loss_before


def test_a_killed_run_resumes_to_the_same_numbers(
    whole_run: FinishedRun, environment: dict[str, str], tmp_path: Path
) -> None:
    process = start(environment, tmp_path, *COUNTDOWN)
    while not (tmp_path / "checkpoints/4").exists() and process.poll() is None:
        time.sleep(0.005)
    process.kill()
    process.communicate()

    resumed_run = run_to_the_end(environment, tmp_path, *COUNTDOWN)

    assert "resumed" in resumed_run.output
    assert resumed_run.metrics == whole_run.metrics
    assert list(resumed_run.evaluations.items()) == list(whole_run.evaluations.items())
    assert resumed_run.exported_weights == whole_run.exported_weights


def test_an_export_starts_another_run(
    whole_run: FinishedRun, environment: dict[str, str], tmp_path: Path
) -> None:
    model = f"model.path={whole_run.workdir}/export-28"

    next_run = run_to_the_end(environment, tmp_path, model, *COUNTDOWN, "warm_start.steps=1")

    loss_at_start = next_run.evaluations["before"]["eval/loss"]
    loss_at_end = whole_run.evaluations["after"]["eval/loss"]
    assert loss_at_start == pytest.approx(loss_at_end, abs=1e-4)


# -- runs on files of examples ---------------------------------------------------------------------

CHAT_TEMPLATE = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"


def conversation_row(i: int) -> dict[str, JsonValue]:
    question = {"role": "user", "content": f"{i}+1="}
    answer = {"role": "assistant", "content": f"{i + 1}"}
    return {"messages": [question, answer], "source": "x"}


def completion_row(i: int) -> dict[str, JsonValue]:
    return {"prompt": f"{i}-1=", "completion": str(i - 1)}


def change_sft(config: Config, **changes: object) -> None:
    """Changes settings of supervised fine-tuning."""
    config.sft = replace(sft.settings_of(config), **changes)


def mixed_sets(folder: Path, **changes: object) -> Config:
    """Returns settings of a run on 20 conversations and 10 completions, in steps of 6 examples.

    The chat template is a file, too.
    """
    messages = write_jsonl(folder / "one.jsonl", [conversation_row(i) for i in range(20)])
    completions = write_jsonl(folder / "two.jsonl", [completion_row(i) for i in range(10)])
    template = folder / "chat.jinja"
    template.write_text(CHAT_TEMPLATE)
    arch = tiny_arch(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    data = {
        "data": f"{messages},{completions}",
        "eval_data": messages,
        "chat_template": str(template),
        "batch_size": 6,
        "pack_length": 16,
    }
    return reference.settings(model={"arch": arch}, sft=data | changes, eval={"problems": 4})


def read_metrics(workdir: Path) -> list[dict[str, JsonValue]]:
    return read_jsonl(workdir / "metrics.jsonl")


def test_the_last_step_of_an_epoch_is_shorter(tmp_path: Path) -> None:
    """Also if all its examples are too long: it changes nothing then."""
    rows = [{"prompt": f"{i}?", "completion": "1"} for i in range(5)]
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    settings = mixed_sets(tmp_path, data=data, eval_data="", batch_size=2)
    # The epoch ends with one row.
    read = sft.read_data(settings)
    last = read.rows[4]["prompt"]
    sft.train(settings, tmp_path / "run")

    for row in rows:
        if row["prompt"] == last:
            row["completion"] = "1" * 40
    change_sft(settings, data=write_jsonl(tmp_path / "with_a_long_row.jsonl", rows))
    sft.train(settings, tmp_path / "long")

    metrics = read_metrics(tmp_path / "run")
    assert [row["sft/epoch"] for row in metrics] == [0.4, 0.8, 1.0]
    assert [row["sft/dropped"] for row in metrics] == [0, 0, 0]
    skipped = read_metrics(tmp_path / "long")
    assert [row["sft/dropped"] for row in skipped] == [0, 0, 1]
    assert "sft/loss" not in skipped[-1]
    assert skipped[1]["sft/loss"] == metrics[1]["sft/loss"]


def test_an_epoch_sees_every_example_of_all_sets_once(tmp_path: Path) -> None:
    summary = sft.train(mixed_sets(tmp_path, epochs=2), tmp_path / "run")

    rows = read_metrics(tmp_path / "run")
    assert len(rows) == 10
    assert rows[4]["sft/epoch"] == 1
    assert rows[-1]["sft/epoch"] == 2
    assert summary["eval_all"]["after"]["eval/loss"] == rows[-1]["eval/loss"]
    # Answers and their ends are trained on, and every character is a token.
    answers = [str(i + 1) for i in range(20)] + [str(i - 1) for i in range(10)]
    tokens_of_epoch = sum(len(answer) + 1 for answer in answers)
    assert sum(row["sft/tokens"] for row in rows) == 2 * tokens_of_epoch
    exported = tokenizer.load(summary["export"])
    assert exported.chat_template == CHAT_TEMPLATE


def test_a_run_that_is_done_is_not_done_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = mixed_sets(tmp_path, epochs=2)
    first = sft.train(config, tmp_path / "run")
    capsys.readouterr()

    second = sft.train(mixed_sets(tmp_path, epochs=2), tmp_path / "run")

    assert second["eval_all"] == first["eval_all"]
    assert "resumed" in capsys.readouterr().out


def test_weights_say_how_often_examples_of_each_set_are_drawn(tmp_path: Path) -> None:
    """Three of four examples are of the second set, whose answers are shorter."""
    config = mixed_sets(tmp_path, epochs=2)
    first, second = sft.settings_of(config).data.split(",")
    change_sft(config, data=f"rows('{first}',weight=1),rows('{second}',weight=3)")
    sft.train(config, tmp_path / "run")

    num_tokens = sum(row["sft/tokens"] for row in read_metrics(tmp_path / "run"))
    num_examples = 2 * 30
    assert num_tokens < num_examples * 2.4


def test_a_run_goes_back_to_a_chosen_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def train_in_run(**changes: object) -> list[dict[str, JsonValue]]:
        config = mixed_sets(tmp_path, epochs=2)
        config.train.checkpoint_every = 3
        config.train.keep_checkpoints = 0
        for name, value in changes.items():
            put_value(config, f"train.{name}", value)
        sft.train(config, tmp_path / "run")
        return timeless(tmp_path / "run/metrics.jsonl")

    whole = train_in_run()
    with pytest.raises(ValueError, match="resume_from.step=3: .* has steps up to 10, which would"):
        train_in_run(resume_from=Checkpoint(3))
    with pytest.raises(ValueError, match="no checkpoint of this step, it has 3, 6, 9, 10"):
        train_in_run(resume_from=Checkpoint(4))
    assert timeless(tmp_path / "run/metrics.jsonl") == whole

    capsys.readouterr()
    assert train_in_run(resume_from=Checkpoint(3, discard_later=True)) == whole
    assert "resumed" in (out := capsys.readouterr().out) and "at step 3" in out

    # The command may be repeated, as after a kill: nothing is discarded again.
    assert train_in_run(resume_from=Checkpoint(3, discard_later=True)) == whole
    assert "at step 10" in capsys.readouterr().out


def test_the_suites_are_answered_at_every_evaluation(tmp_path: Path) -> None:
    settings = mixed_sets(tmp_path, epochs=0.4)  # 2 steps
    settings.eval.suites = ("countdown",)
    settings.eval.limit = 3
    settings.eval.samples = 0
    settings.task.template = "plain"
    settings.rollout.max_prompt_tokens = 20

    summary = sft.train(settings, tmp_path / "run")

    for name in ("before", "after"):
        evaluation = summary["eval_all"][name]
        assert 0 <= evaluation["eval_greedy/countdown/accuracy"] <= 1
        assert evaluation["eval/loss"] > 0
    row = read_metrics(tmp_path / "run")[-1]
    assert row["eval_greedy/countdown/accuracy"] == pytest.approx(
        summary["eval_all"]["after"]["eval_greedy/countdown/accuracy"]
    )


@pytest.mark.parametrize(
    ("suites", "message"),
    [
        (("no_such_suite",), "no suite 'no_such_suite'"),
        (("countdown", "countdown"), "names countdown 2 times"),
    ],
)
def test_suites_that_cannot_work_are_refused_before_anything_is_written(
    suites: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    settings = mixed_sets(tmp_path)
    settings.eval.suites = suites

    with pytest.raises(ValueError, match=message):
        sft.train(settings, tmp_path / "run")

    assert not (tmp_path / "run").exists()


# -- mistakes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("data", "nowhere.jsonl", "nowhere.jsonl cannot be loaded"),
        ("data", "rows(a.jsonl,weight=1),b.jsonl", "some of the sets have a weight"),
        ("data", "rows(a.jsonl,limit=-1)", "limit=-1 must be at least 0"),
        ("chat_template", "nowhere.jinja", "sft.chat_template=nowhere.jinja"),
        ("loss", "user", "sft.loss=user is not one of assistant, all"),
        ("system_prompt", "Be brief.", "sft.system_prompt='Be brief.' is for messages, and .*two"),
    ],
)
def test_a_mistake_is_refused_before_anything_is_written(
    tmp_path: Path, setting: str, value: object, message: str
) -> None:
    config = mixed_sets(tmp_path)

    with pytest.raises(ValueError, match=message):
        change_sft(config, **{setting: value})
        sft.train(config, tmp_path / "run")

    assert not (tmp_path / "run").exists()


def test_rows_without_examples_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    config = mixed_sets(tmp_path)
    change_sft(config, data=write_jsonl(tmp_path / "three.jsonl", [{"source": "x"}]))

    with pytest.raises(ValueError, match="it needs messages, prompt and completion, problem and"):
        sft.train(config, tmp_path / "run")

    assert not (tmp_path / "run").exists()


def test_long_examples_are_left_out_or_cut_off(tmp_path: Path) -> None:
    config = mixed_sets(tmp_path)
    tok = tokenizer.load("")
    rows = [{"prompt": "1+1=", "completion": "2"}, {"prompt": "1+1=", "completion": "2" * 9}]
    [short, long] = sft.encode_rows(tok, rows, sft.settings_of(config))

    change_sft(config, pack_length=8)
    assert sft.encode_rows(tok, rows, sft.settings_of(config)) == [short]

    change_sft(config, long_examples="cut")
    [same, cut] = sft.encode_rows(tok, rows, sft.settings_of(config))
    assert same == short
    assert (cut.tokens, cut.trained) == (long.tokens[:8], long.trained[:8])

    change_sft(config, pack_length=4)  # the prompts alone: nothing to train on is left
    assert sft.encode_rows(tok, rows, sft.settings_of(config)) == []


def test_examples_that_are_all_too_long_are_refused(tmp_path: Path) -> None:
    config = mixed_sets(tmp_path)
    change_sft(config, pack_length=3)

    with pytest.raises(ValueError, match="every example is longer than sft.pack_length=3"):
        sft.train(config, tmp_path / "run")


def test_rows_without_a_completion_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": f"{i}", "completion": None if i % 3 else f"{i}"} for i in range(9)]
    config = mixed_sets(tmp_path)
    change_sft(config, data=write_jsonl(tmp_path / "four.jsonl", rows))

    data = sft.read_data(config)

    assert data.num_examples == 3
    assert {data.rows[i]["completion"] for i in range(3)} == {"0", "3", "6"}
    assert "four.jsonl: 6 rows without completion are left out" in capsys.readouterr().out


def test_sets_of_text_and_of_conversations_are_read(tmp_path: Path) -> None:
    config = mixed_sets(tmp_path)
    texts = write_jsonl(tmp_path / "text.jsonl", [{"text": f"{i} + 1", "id": i} for i in range(4)])
    said = [{"from": "human", "value": "1+1="}, {"from": "gpt", "value": "2"}]
    talks = write_jsonl(tmp_path / "talks.jsonl", [{"conversations": said}] * 3)
    change_sft(config, data=f"{texts},{talks}")

    data = sft.read_data(config)

    assert data.num_examples == 7
    kinds = [next(iter(data.rows[i])) for i in range(7)]
    assert kinds.count("text") == 4 and kinds.count("conversations") == 3
    change_sft(config, data=texts, system_prompt="Be brief.")
    with pytest.raises(ValueError, match="is for messages, and sft.data=.*text.jsonl"):
        sft.read_data(config)
