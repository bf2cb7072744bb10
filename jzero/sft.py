"""Supervised fine-tuning: on conversations or prompts with completions, and as the warm start of RL. The packing,
update and optimizer are RL's: with advantage and ratio 1 the policy gradient is the log-likelihood's."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from jzero import config
from jzero.algorithms import grpo
from jzero.config import to_json, validate
from jzero.distributed import collectives, interrupt, processes
from jzero.distributed.mesh import train_mesh
from jzero.errors import UserError
from jzero.model import qwen, tokenizer
from jzero.run.base_model import load_params, read_base_model
from jzero.run.clock import Clock
from jzero.run.session import RunSession
from jzero.run.workdir import check_workdir
from jzero.tasks import TASKS, find_task, problem_sets, suites
from jzero.training import learner
from jzero.training.optimizer import learning_rate
from jzero.training.packing import PackedBatch, TrainingSequence, best_fit, pack
from jzero.training.step import microbatch_rows
from jzero.types import RowLayout, State

Example = tuple[list[int], list[bool]]  # token ids, and which of them are trained on


class SupervisedTrainer:
    """Steps of one model on rows of `length` tokens."""

    def __init__(self, model: qwen.QwenConfig, mesh: Mesh, settings: config.Config, length: int):
        objective = replace(
            settings, algorithm=grpo(name="sft"), rollout=replace(settings.rollout, temperature=1.0)
        )
        self.learner = learner.policy_learner(model, objective, mesh)
        self.layout = RowLayout(0, 1, length)
        self.rows = microbatch_rows(settings, mesh, self.layout)

    def pack(self, examples: Sequence[Example]) -> PackedBatch:
        """Of at least one trained token. Microbatches are a power of two, so that few programs are compiled."""
        weight = 1.0 / sum(sum(trained) for _, trained in examples)
        weights = [np.array(trained, np.float32) * np.float32(weight) for _, trained in examples]
        tokens = [np.array(tokens, np.int32) for tokens, _ in examples]
        prompts = [trained.index(True) for _, trained in examples]
        items = list(map(TrainingSequence, tokens, prompts, weights, map(np.zeros_like, weights)))
        needed = -(
            -len(best_fit([len(item.tokens) - 1 for item in items], self.layout.slot)) // self.rows
        )
        [packed] = pack([items], [self.layout], [self.rows], [1 << (needed - 1).bit_length()])
        return packed

    def step(self, state: State, packed: PackedBatch, lr: float) -> tuple[State, dict[str, Any]]:
        batch = replace(packed.batch, advantages=np.ones_like(packed.batch.weights))
        return self.learner.update(
            state, *self.learner.put([replace(packed, batch=batch)]), [self.layout], lr
        )

    def loss(self, params: qwen.Params, packed: PackedBatch) -> float:
        """Mean negative log-likelihood of the trained tokens."""
        [logps] = self.learner.score(params, *self.learner.put([packed]), [self.layout])
        return -float(np.vdot(packed.batch.weights, collectives.fetch_global(logps)))


def warm_start(
    policy: learner.Learner,
    settings: config.Config,
    tok: tokenizer.PreTrainedTokenizerFast,
    params: qwen.Params,
    interrupted: Callable[[], None],
) -> qwen.Params:
    """`warm_start.steps` supervised steps on the task's own examples; every step draws new ones."""
    warm, example = settings.warm_start, find_task(settings.task.name).warm_start
    if example is None:
        raise UserError(
            f"task.name={settings.task.name} has no warm-start examples; set warm_start.steps=0"
        )
    optimizer = replace(
        settings.optimizer, lr=warm.lr, warmup_steps=warm.warmup_steps, schedule="cosine"
    )
    fitter = SupervisedTrainer(
        policy.model, policy.mesh, settings, settings.rollout.longest_episode
    )
    state = fitter.learner.start(params)
    for step in (
        progress := tqdm(
            range(warm.steps),
            desc="warm start",
            mininterval=1,
            disable=not processes.is_first_process(),
        )
    ):
        interrupted()
        indices = range(step * warm.batch_size, (step + 1) * warm.batch_size)
        pairs = [example(settings.task, settings.train.seed, i, warm.tries) for i in indices]
        packed = fitter.pack([encode_completion(tok, *pair) for pair in pairs])
        state, stats = fitter.step(state, packed, learning_rate(optimizer, step, warm.steps))
        if step % 20 == 0:
            progress.set_postfix(
                nll=f"{float(stats['nll']) / float(stats['tokens']):.3f}", refresh=False
            )
    return state.params


def encode_completion(
    tok: tokenizer.PreTrainedTokenizerFast, prompt: str, completion: str
) -> Example:
    """The completion is trained on, and the end-of-sequence token after it."""
    before, after = (
        tokenizer.encode(tok, prompt),
        [*tokenizer.encode(tok, completion), tok.eos_token_id],
    )
    return before + after, [False] * len(before) + [True] * len(after)


def encode_conversation(
    tok: tokenizer.PreTrainedTokenizerFast, messages: Sequence[Mapping[str, Any]], first: int
) -> Example:
    """Messages through the chat template; what the assistant says from message `first` on is trained on, its end of
    turn included. Encoded piece by piece, as what decoding would have sampled after the generation prompt."""
    whole, end = tokenizer.render(tok, messages, generate=False), tokenizer.end_of_turn(tok)
    if any(end in str(message["content"]) for message in messages):
        raise UserError(
            f"a message of sft.data holds {end}, which ends turns in this chat template: remove it"
        )
    pieces, at = [], 0
    for i, message in enumerate(messages):
        if message["role"] == "assistant" and i >= first:
            before = tokenizer.render(tok, messages[:i])
            if not whole.startswith(before):
                raise UserError(
                    "the chat template writes earlier turns anew when later ones come: set sft.chat_template"
                )
            begin, stop = len(before), whole.index(end, len(before)) + len(end)
            pieces += [(whole[at:begin], False), (whole[begin:stop], True)]
            at = stop
    encoded = [(tokenizer.encode(tok, text), trained) for text, trained in pieces]
    return [i for ids, _ in encoded for i in ids], [
        trained for ids, trained in encoded for _ in ids
    ]


def encode_row(
    tok: tokenizer.PreTrainedTokenizerFast, row: Mapping[str, Any], loss: str
) -> Example:
    """A row with messages, or with a prompt and a completion, which are text or messages."""
    if "messages" in row:
        tokens, trained = encode_conversation(tok, row["messages"], 0)
    elif isinstance(row["prompt"], str):
        tokens, trained = encode_completion(tok, row["prompt"], row["completion"])
    else:
        tokens, trained = encode_conversation(
            tok, [*row["prompt"], *row["completion"]], len(row["prompt"])
        )
    return tokens, trained if loss == "assistant" else [False] + [True] * (len(tokens) - 1)


def read_examples(source: str, name: str, settings: config.Config) -> Any:
    """The Dataset of a set's split, with the columns that are used; of a task, its warm-start examples."""
    if source in TASKS and (example := TASKS[source].warm_start):
        warm, seed = settings.warm_start, settings.train.seed
        seed, count = (
            (seed, warm.steps * warm.batch_size)
            if name == "train"
            else (seed + 1, settings.eval.problems)
        )
        pairs = [example(settings.task, seed, i, warm.tries) for i in range(count)]
        return [{"prompt": prompt, "completion": completion} for prompt, completion in pairs]
    dataset = problem_sets.load_split(source, name)
    for columns in (["messages"], ["prompt", "completion"]):
        if set(columns) <= set(dataset.column_names):
            return dataset.select_columns(columns)
    there = ", ".join(dataset.column_names)
    raise UserError(
        f"sft.data={source} has columns {there}: it needs messages, or prompt and completion"
    )


def train(settings: config.Config, workdir: Path) -> dict[str, Any]:
    """Run or resume `settings` in `workdir`; returns what summary.json holds."""
    validate(settings)
    check_workdir(workdir, to_json(settings))
    sft, clock = settings.sft, Clock()
    sources = suites.split_commas(sft.data)
    tested = (
        [sft.eval_data]
        if sft.eval_data
        else [x for x in sources if x in TASKS or "test" in problem_sets.load(x)]
    )
    sets = [read_examples(each, "train", settings) for each in sources]
    held_out = [row for each in tested for row in read_examples(each, "test", settings)]
    rows, count = problem_sets.stream(sets, sft.weights, settings.train.seed), sum(map(len, sets))
    last = max(1, int(sft.epochs * count) // sft.batch_size)
    base = read_base_model(settings.model)
    if sft.chat_template:
        if not Path(sft.chat_template).is_file():
            raise UserError(
                f"sft.chat_template={sft.chat_template} is no file: give one with a chat template in Jinja"
            )
        base.tokenizer.chat_template = Path(sft.chat_template).read_text(encoding="utf-8")
    if base.tokenizer.chat_template:
        base.tokenizer.eos_token = tokenizer.end_of_turn(base.tokenizer)  # in exports, too
    mesh = train_mesh(settings.mesh.data, settings.mesh.fsdp, settings.mesh.tensor)
    fitter = SupervisedTrainer(base.model, mesh, settings, sft.pack_length)

    def fitting(rows: Sequence[Mapping[str, Any]]) -> list[Example]:
        examples = [encode_row(base.tokenizer, row, sft.loss) for row in rows]
        return [each for each in examples if len(each[0]) <= sft.pack_length and any(each[1])]

    with (
        interrupt.StopSignal() as stop,
        closing(RunSession(settings, workdir, base, clock, last)) as run,
    ):
        processes.print_once(
            f"{count} examples, {len(held_out)} held out; {last} steps of {sft.batch_size}"
        )
        tests = fitting(held_out[: settings.eval.problems])
        test = fitter.pack(tests) if tests else None

        def assess(name: str, params: qwen.Params) -> dict[str, float]:
            if test is None:
                return {}
            with clock("eval"):
                values = {"eval/loss": fitter.loss(params, test)}
            run.record_evaluation(name, values)
            return values

        if run.resume_step is None:
            state = fitter.learner.start(load_params(base, fitter.learner, settings.train.seed))
            assess("before", state.params)
        else:
            state = run.restore(fitter.learner.abstract_state())
        try:
            progress = run.progress("SFT")
            for step in progress:
                with clock("pack"):
                    wanted = range((step - 1) * sft.batch_size, step * sft.batch_size)
                    examples = fitting([rows[i] for i in wanted])
                    if not examples:
                        raise UserError(
                            f"step {step}: every example is longer than sft.pack_length={sft.pack_length} tokens"
                        )
                    packed = fitter.pack(examples)
                lr = learning_rate(settings.optimizer, step - 1, last)
                with clock("update"):
                    state, sums = fitter.step(state, packed, lr)
                    stats = {
                        name: float(sums[name])
                        for name in ("nll", "tokens", "grad_norm", "skipped")
                    }
                values = {
                    "sft/loss": stats["nll"] / stats["tokens"],
                    "sft/tokens": stats["tokens"],
                    "optimizer/lr": lr,
                }
                values |= {f"optimizer/{name}": stats[name] for name in ("grad_norm", "skipped")}
                values |= {
                    "sft/epoch": step * sft.batch_size / count,
                    "sft/dropped": sft.batch_size - len(examples),
                }
                values |= {
                    "update/padding": 1 - packed.real / (packed.count * packed.batch.tokens[0].size)
                }
                values |= progress.step_metrics()
                values["update/tokens_per_second"] = packed.real / values["time/update"]
                if label := run.schedule.evaluation_after(step):
                    values |= assess(label, state.params)
                run.end_step(step, values, state)
                stop.raise_if_stopped_anywhere()
        except interrupt.Interrupted as reason:
            processes.print_once(
                f"{reason}: stopped after step {run.record.step}; the same command resumes"
            )
        return run.finish(state)
