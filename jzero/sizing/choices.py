"""Chooses the settings of a run: prompts, lengths, batch, decoder, memory, learning rate, disk.

    choices = choose(wishes, settings, given, data, machine, held_out)

Every choice has a reason. A setting that the user has given is kept, and the choices after it are
made for it. The lengths come from the data, the counts from the kind of device, and the sizes from
the planner (`jzero.planning.fitting`), which counts the bytes that a run needs. On CPUs the
planner's count is not sufficient, because XLA keeps freed memory: CPU_TOKENS bounds the work of a
microbatch there.
"""

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import jax
import numpy as np

from jzero.config import (
    ADAPTER_LR_FACTOR,
    ADAPTER_RANK,
    Config,
    list_settings,
    positions_of,
    put_value,
)
from jzero.errors import UserError
from jzero.model import adapters, huggingface, qwen, tokenizer
from jzero.planning import host_memory
from jzero.planning.chips import GIB, DescribedDevice
from jzero.planning.fitting import attached_bytes, attached_devices, fit, with_remedies
from jzero.problems.prompts import BOXED, MATH_TEMPLATES, NO_SYSTEM_PROMPT
from jzero.sizing.data import Data
from jzero.types import Prompt

ROUNDED_TO = 64  # tokens; lengths are multiples of it
FEWEST_NEW_TOKENS = 256
NEW_TOKENS = {True: 512, False: 1024}  # without worked solutions, on a CPU and elsewhere
SPARE_LENGTH = 1.5  # a response may be this many times as long as 95 % of the solutions
GROUP_SIZE = 8
CPU_PROMPTS = 4
CPU_TOKENS = 1024  # of a microbatch on all CPU devices, unless a row is longer
DEVICE_TOKENS = 8192  # of a microbatch on an accelerator
MOST_SLOTS = 256
CPU_SLOTS = 16
LOGITS_BYTES = {True: 64 << 20, False: 1 << 30}  # of one chunk in fp32, on a CPU and elsewhere
FULL_LR = 1e-6
PASSES = 3  # over the data, unless 200 steps are fewer
MOST_STEPS = 200
CPU_PROCESS_BYTES = 1.0 * GIB  # Python, JAX and compiled programs
CHECKPOINT_BYTES = 12  # of a parameter: the weights and Adam's two moments in fp32
EXPORT_BYTES = {"bfloat16": 2, "float32": 4}
HELD_OUT = {True: 32, False: 256}  # problems at most, on a CPU and elsewhere


@dataclass(frozen=True)
class Wishes:
    """The flags of `jzero train`."""

    model: str
    data: str
    reward: str = ""
    eval_data: str = ""
    lora: bool = False
    minutes: float = 0.0


@dataclass(frozen=True)
class Machine:
    """The devices of a run, and the room that it has."""

    devices: Sequence[DescribedDevice]
    device_bytes: float | None  # that a run may use on each device; None if unknown
    disk_bytes: float  # that are free where the workdir is

    @property
    def is_cpu(self) -> bool:
        return self.devices[0].platform == "cpu"

    def __str__(self) -> str:
        kind = f"{len(self.devices)} {self.devices[0].device_kind}"
        if self.device_bytes is None:
            return kind
        if self.is_cpu:
            cores = os.cpu_count() or 1
            total = self.device_bytes * len(self.devices)
            return f"{cores} CPU cores, {total / GIB:.1f} GiB free"
        return f"{kind}, {self.device_bytes / GIB:.1f} GiB each"


def this_machine(settings: Config, workdir: Path) -> Machine:
    """Returns the attached devices, and the free memory and disk."""
    available = attached_bytes(settings.memory)
    if available is None and jax.default_backend() == "cpu":
        # CPU devices share the memory of the machine.
        available = host_memory.free_bytes() / len(jax.local_devices())
    # The workdir does not exist before the run, so the free space is read at its nearest parent.
    absolute = workdir.absolute()
    folder = next(path for path in (absolute, *absolute.parents) if path.is_dir())
    return Machine(attached_devices(), available, float(shutil.disk_usage(folder).free))


@dataclass(frozen=True)
class Model:
    """The model to train, as far as the choices depend on it."""

    directory: Path  # with config.json and the tokenizer
    architecture: qwen.QwenConfig
    positions: int | None
    tokenizer: tokenizer.PreTrainedTokenizerFast

    @property
    def num_params(self) -> int:
        return qwen.num_params(self.architecture)


def read_model(settings: Config) -> Model:
    """Reads the configuration and the tokenizer of a model; its weights are not downloaded."""
    source = settings.model.source
    directory = huggingface.resolve(source, ("config.json", *tokenizer.FILES))
    architecture, hf_config = huggingface.load_config(directory)
    positions = settings.model.max_position_embeddings or positions_of(hf_config)
    tok = tokenizer.load(settings.model.tokenizer or str(directory))
    return Model(directory, architecture, positions, tok)


@dataclass(frozen=True)
class Choice:
    """A chosen setting."""

    name: str
    value: object
    reason: str


@dataclass
class Sheet:
    """The settings of a run while they are chosen."""

    settings: Config
    given: frozenset[str]  # names of settings from the command line
    choices: list[Choice] = field(default_factory=list)

    def set(self, name: str, value: object, reason: str) -> None:
        """Chooses a setting, unless the user has given it."""
        if name in self.given:
            return
        put_value(self.settings, name, value)
        # A setting may be chosen again when memory is counted: the last reason counts.
        self.choices = [choice for choice in self.choices if choice.name != name]
        self.choices.append(Choice(name, value, reason))


def choose(
    wishes: Wishes,
    settings: Config,
    given: frozenset[str],
    data: Data,
    model: Model,
    machine: Machine,
    held_out: str = "",
) -> Sheet:
    """Chooses the settings of a run.

    Args:
        wishes: the flags of the command.
        settings: the defaults with the settings from the command line. They are changed in place.
        given: the names of the settings from the command line.
        data: the training set.
        model: the model.
        machine: the devices and the disk.
        held_out: a file of rows that were held out, if the set has no other held-out problems.

    Raises UserError if the data cannot be scored, or has no prompts that fit the model.
    """
    sheet = Sheet(settings, given)
    _choose_task(sheet, wishes, data, held_out)
    _choose_prompts(sheet, data, model)
    _choose_lengths(sheet, data, model, machine)
    _choose_batch(sheet, data, machine)
    _choose_model(sheet, wishes, model, machine)
    _choose_packing(sheet, machine)
    _choose_sizes(sheet, model, machine)
    _choose_disk(sheet, model, machine)
    return sheet


# -- the task --------------------------------------------------------------------------------------


def _choose_task(sheet: Sheet, wishes: Wishes, data: Data, held_out: str) -> None:
    sheet.set("model.path", wishes.model, "--model")
    if data.answer_column:
        sheet.set("task.name", "math", f"questions with answers ({data.answer_column})")
    elif wishes.reward or "task.reward.functions" in sheet.given:
        sheet.set("task.name", "open", "questions without answers: only your reward scores them")
    else:
        raise UserError(
            f"data {data.source} has the columns {', '.join(data.columns)}, and none with answers "
            "that a grader could compare: give --reward FILE.py:FUNCTION, or name the column with "
            f"--data \"rows('{data.source}',answer='COLUMN')\""
        )
    reasons = [f"--data: {data.num_rows:,} rows", f"problem: {data.problem_reason}"]
    if data.answer_column:
        reasons.append(f"answer: {data.answer_reason}")
    sheet.set("task.data", str(data.rows), "; ".join(reasons))
    if wishes.reward:
        sheet.set("task.reward.functions", (wishes.reward,), "--reward")
    else:
        sheet.set("task.reward.functions", ("accuracy",), "no --reward: the grader of answers")
    if wishes.eval_data:
        sheet.set("task.eval_data", wishes.eval_data, "--eval")
    elif held_out:
        sheet.set("task.eval_data", held_out, "rows of --data, which are not trained on")


def _choose_prompts(sheet: Sheet, data: Data, model: Model) -> None:
    if data.has_messages:
        name = f"column:{data.problem_column}"
        sheet.set("task.template", name, "the column holds messages")
    elif model.tokenizer.chat_template:
        sheet.set("task.template", "chat", "the tokenizer has a chat template")
    elif "<|im_start|>" in model.tokenizer.get_vocab():
        sheet.set("task.template", "qwen_math", "a base model with Qwen's tokens")
    else:
        sheet.set("task.template", "r1", "a base model without a chat template")
    if sheet.settings.task.template == "chat" and not takes_system_prompt(model):
        reason = "the chat template takes no system prompt"
        sheet.set("task.system_prompt", NO_SYSTEM_PROMPT, reason)
    elif not data.answer_column:
        reason = "no answers: nothing asks for a box"
        sheet.set("task.system_prompt", NO_SYSTEM_PROMPT, reason)
    # r1 has its answer in tags; the other prompts may ask for a box, or for nothing.
    if data.has_only_numbers and sheet.settings.task.template != "r1":
        reason = "every answer is a number: the last number of a response counts"
        options = (*sheet.settings.task.options, "answer_mark=number")
        sheet.set("task.options", options, reason)


def takes_system_prompt(model: Model) -> bool:
    """Returns whether the chat template of a model accepts a system prompt. Gemma's does not."""
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]
    try:
        tokenizer.prompt_ids(model.tokenizer, messages)
    except UserError:
        return False
    return True


# -- lengths ---------------------------------------------------------------------------------------


def _choose_lengths(sheet: Sheet, data: Data, model: Model, machine: Machine) -> None:
    settings = sheet.settings
    lengths = prompt_lengths(settings, data, model)
    longest, usual = int(lengths.max()), int(np.quantile(lengths, 0.99))
    # One prompt that is much longer than the others would make every row longer.
    covered = longest if longest <= 2 * usual else usual
    reason = f"99 % of prompts have at most {usual} tokens, the longest {longest}"
    sheet.set("rollout.max_prompt_tokens", _rounded(covered), reason)
    limit, shortest = settings.rollout.max_prompt_tokens, int(lengths.min())
    if shortest > limit:
        raise UserError(
            f"rollout.max_prompt_tokens={limit}: every prompt of the data is longer, the shortest "
            f"has {shortest} tokens: {reason}; set {_rounded(covered)}"
        )

    if data.solutions:
        solutions = [len(tokenizer.encode(model.tokenizer, text)) for text in data.solutions]
        typical = int(np.quantile(solutions, 0.95))
        tokens = max(FEWEST_NEW_TOKENS, _rounded(SPARE_LENGTH * typical))
        reason = f"95 % of the solutions have at most {typical} tokens"
    else:
        tokens = NEW_TOKENS[machine.is_cpu]
        reason = "the usual length: the set has no worked solutions"
    if model.positions is not None:
        room = model.positions - settings.rollout.max_prompt_tokens
        if room < 1:
            raise UserError(
                f"rollout.max_prompt_tokens={settings.rollout.max_prompt_tokens}: the model has "
                f"{model.positions} positions, and no room for a response: set fewer"
            )
        if tokens > room:
            tokens, reason = room, f"the model has {model.positions} positions"
    sheet.set("rollout.max_new_tokens", tokens, reason)


def prompt_lengths(settings: Config, data: Data, model: Model) -> np.ndarray:
    """Returns the tokens of each prompt of the data, with the template of the settings."""
    template = settings.task.template
    prompts: list[Prompt] = data.prompts
    if not data.has_messages and template in MATH_TEMPLATES:
        system_prompt = settings.task.system_prompt or BOXED
        prompts = [
            MATH_TEMPLATES[template].render(
                {"question": question, "instruction": BOXED}, system_prompt=system_prompt
            )
            for question in data.prompts
        ]
    return np.array([len(tokenizer.prompt_ids(model.tokenizer, prompt)) for prompt in prompts])


def _rounded(tokens: float) -> int:
    """Returns a length rounded up to a multiple of ROUNDED_TO."""
    return ROUNDED_TO * max(1, -(-int(tokens) // ROUNDED_TO))


# -- the batch -------------------------------------------------------------------------------------


def _choose_batch(sheet: Sheet, data: Data, machine: Machine) -> None:
    settings, num_devices = sheet.settings, len(machine.devices)
    sheet.set("rollout.group_size", GROUP_SIZE, "responses to a prompt, which are compared")
    prompts, reason = CPU_PROMPTS, "few, so that a step takes minutes on a CPU"
    if not machine.is_cpu:
        prompts = min(128, 16 * num_devices)
        reason = f"16 for each of {num_devices} devices, at most 128"
    if prompts > data.num_rows:
        prompts, reason = data.num_rows, f"the set has {data.num_rows} rows"
    sheet.set("rollout.num_prompts", prompts, reason)

    chosen = settings.rollout.num_prompts
    steps = max(1, min(MOST_STEPS, PASSES * data.num_rows // chosen))
    passes = steps * chosen / data.num_rows
    sheet.set("train.steps", steps, f"{passes:.2g} passes over {data.num_rows:,} rows")
    most = HELD_OUT[machine.is_cpu]
    sheet.set("eval.problems", most, "at most, before and after the run")
    sheet.set("eval.samples", 0, "greedy only: one response to each problem")


# -- the model -------------------------------------------------------------------------------------


def _choose_model(sheet: Sheet, wishes: Wishes, model: Model, machine: Machine) -> None:
    settings = sheet.settings
    if wishes.lora:
        rank, reason = ADAPTER_RANK, "--lora"
        while rank > 1 and not allows_rank(model, settings, rank):
            rank, reason = rank // 2, "--lora; a larger rank is above that of a weight"
        sheet.set("model.adapter.rank", rank, reason)
    if settings.model.adapter.rank:
        lr = float(f"{ADAPTER_LR_FACTOR * FULL_LR:g}")
        sheet.set("optimizer.lr", lr, "the rate of jzero's recipes for adapters")
    else:
        sheet.set("optimizer.lr", FULL_LR, "the rate of jzero's recipes for full fine-tuning")
    if machine.is_cpu:
        # XLA:CPU makes an fp32 copy of bf16 weights in every call of the decoder.
        sheet.set("model.dtype", "float32", "takes less memory than bf16 on a CPU")
    else:
        sheet.set("model.dtype", "bfloat16", "half the memory of fp32; trained weights are fp32")
    if machine.is_cpu and settings.model.adapter.rank:
        # With the layout of the decoder, the decoder needs no copy of the frozen model.
        reason = "every device has the frozen model, which the decoder shares"
        sheet.set("mesh.data", -1, reason)
        sheet.set("mesh.fsdp", 1, reason)
    if settings.model.dtype == "float32":
        sheet.set("rollout.kv_dtype", "float32", "as model.dtype, so that log-probs agree")
    if machine.is_cpu and not settings.model.adapter.rank:
        sheet.set("optimizer.mu_dtype", "bfloat16", "a sixth less memory for the optimizer's state")
    chunk = LOGITS_BYTES[machine.is_cpu] // (4 * model.architecture.vocab_size)
    chunk = min(2048, max(64, 1 << (chunk.bit_length() - 1)))
    mebibytes = 4 * chunk * model.architecture.vocab_size / 2**20
    reason = f"their logits over the vocabulary take {mebibytes:.0f} MiB"
    sheet.set("model.logit_chunk", chunk, reason)
    if wishes.minutes:
        sheet.set("train.minutes", wishes.minutes, "--minutes")


def allows_rank(model: Model, settings: Config, rank: int) -> bool:
    """Returns whether an adapter may have this rank."""
    try:
        adapters.check(model.architecture, replace(settings.model.adapter, rank=rank))
    except UserError:
        return False
    return True


# -- packing and sizes -----------------------------------------------------------------------------


def _choose_packing(sheet: Sheet, machine: Machine) -> None:
    settings, num_devices = sheet.settings, len(machine.devices)
    rollout = settings.rollout
    # A row has a prompt and several packs; a microbatch has at least a row on each device.
    most_tokens = CPU_TOKENS // num_devices if machine.is_cpu else DEVICE_TOKENS
    room = (most_tokens - rollout.max_prompt_tokens) // rollout.longest_continuation
    packs = max(1, min(rollout.group_size, room))
    if machine.is_cpu:
        sheet.set("train.pack", "longest", "one length of rows: one program to compile")
    reason = "responses of full length that share a prompt in a row"
    sheet.set("train.packs_per_row", packs, reason)
    row = rollout.max_prompt_tokens + settings.train.packs_per_row * rollout.longest_continuation
    rows = max(1, most_tokens // row)
    # Never more rows than the step has, each with as many responses as it has packs.
    step_rows = -(-rollout.num_prompts * rollout.group_size // max(1, settings.train.packs_per_row))
    rows = min(rows, max(1, step_rows // num_devices))
    reason = f"{rows} row{'s' * (rows > 1)} of {row} tokens on each of {num_devices} devices"
    sheet.set("train.microbatch_tokens", rows * row * num_devices, reason)
    slots = rollout.num_prompts * rollout.group_size
    most = CPU_SLOTS if machine.is_cpu else MOST_SLOTS
    reason = f"the step has {slots} responses"
    if slots > most:
        reason += f", and {most} at a time take less memory"
    sheet.set("rollout.num_slots", min(slots, most), reason)


def _choose_sizes(sheet: Sheet, model: Model, machine: Machine) -> None:
    """Changes the settings until the planner finds that they fit."""
    if machine.device_bytes is None:
        return
    available = usable(machine)
    planned = planned_settings(sheet.settings, model)
    verdict = fit(planned, machine.devices, available)
    if verdict.fits:
        return
    changed = with_remedies(planned, machine.devices, available)
    if changed is None:
        return  # the check of the run says what is missing
    reason = f"fits {available / GIB:.1f} GiB; more would need {verdict.needed / GIB:.1f} GiB"
    before = {setting.name: setting.value for setting in list_settings(planned)}
    for setting in list_settings(changed):
        if setting.value != before[setting.name]:
            sheet.set(setting.name, setting.value, reason)


def planned_settings(settings: Config, model: Model) -> Config:
    """Returns the settings with the local directory of the model, which the planner reads."""
    return replace(settings, model=replace(settings.model, path=str(model.directory), revision=""))


def usable(machine: Machine) -> float:
    """Returns the bytes of a device that the arrays of a run may take."""
    assert machine.device_bytes is not None
    if not machine.is_cpu:
        return machine.device_bytes
    return max(0.0, machine.device_bytes - CPU_PROCESS_BYTES / len(machine.devices))


def needed_bytes(settings: Config, model: Model, machine: Machine) -> float | None:
    """Returns the bytes that a run needs on a device, or on a CPU all together; None if unknown."""
    if machine.device_bytes is None:
        return None
    needed = fit(planned_settings(settings, model), machine.devices, usable(machine)).needed
    return needed * len(machine.devices) + CPU_PROCESS_BYTES if machine.is_cpu else needed


# -- disk ------------------------------------------------------------------------------------------


def checkpoint_bytes(settings: Config, model: Model) -> float:
    """Returns the bytes of one checkpoint."""
    adapter = settings.model.adapter
    if adapter.rank:
        return CHECKPOINT_BYTES * adapters.num_params(model.architecture, adapter)
    return CHECKPOINT_BYTES * model.num_params


def disk_bytes(settings: Config, model: Model) -> float:
    """Returns the bytes on disk at the peak of a run: its checkpoints and its export."""
    train = settings.train
    kept = train.keep_checkpoints + 1  # the next one is written before the oldest is deleted
    if train.checkpoint_every < 0:
        kept = 0
    elif train.checkpoint_every == 0:
        kept = min(kept, 2)  # before the first step and after the last
    export = EXPORT_BYTES[settings.model.dtype] * model.num_params
    return kept * checkpoint_bytes(settings, model) + export


def _choose_disk(sheet: Sheet, model: Model, machine: Machine) -> None:
    settings = sheet.settings
    size = checkpoint_bytes(settings, model)
    sheet.set("train.checkpoint_every", 20, f"a checkpoint has {size / 1e9:.1f} GB")
    free = machine.disk_bytes
    attempts: list[tuple[str, object]] = [
        ("train.keep_checkpoints", 1),
        ("train.checkpoint_every", 0),
        ("train.checkpoint_every", -1),
    ]
    for name, value in attempts:
        needed = disk_bytes(settings, model)
        # The remedies in the order of their cost: fewer checkpoints to go back to, then a run that
        # a kill sends back to its start.
        if needed <= free:
            return
        reason = f"the disk has {free / 1e9:.1f} GB free, and {needed / 1e9:.1f} GB were needed"
        sheet.set(name, value, reason)
