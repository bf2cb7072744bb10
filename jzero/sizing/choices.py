"""Chooses the settings of a run: prompts, lengths, batch, decoder, memory, learning rate, disk.

    choices = choose(wishes, settings, given, data, machine, held_out)

Every choice has a reason. A setting that the user has given is kept, and the choices after it are
made for it. The lengths come from the data, the counts from the kind of device, and the sizes from
the planner, which counts the bytes that a run needs: `planning.sizing` chooses as for a recipe that
leaves sizes open, and `planning.disk` the checkpoints.
"""

import copy
import difflib
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import jax
import numpy as np

from jzero.algorithms import PRESETS
from jzero.config import (
    ADAPTER_LR_FACTOR,
    ADAPTER_RANK,
    Config,
    RewardConfig,
    TaskConfig,
    list_settings,
    positions_of,
    put_value,
)
from jzero.config.data_sources import Sources
from jzero.errors import UserError
from jzero.model import adapters, huggingface, qwen, tokenizer
from jzero.model.directory import file_in, read_json
from jzero.model.end_tokens import GENERATION
from jzero.planning import sizing
from jzero.planning.chips import GIB
from jzero.planning.disk import (
    GB,
    available_bytes,
    checkpoint_bytes,
    parts_of_workdir,
    smaller_on_disk,
)
from jzero.planning.fitting import (
    Fit,
    attached_bytes,
    attached_devices,
    cpu_bytes,
    fit_run,
    room_for_arrays,
    set_cpu_devices,
    with_remedies,
)
from jzero.planning.machines import Machine
from jzero.planning.planned_run import PlannedRun
from jzero.planning.remedies import (
    QUANTIZE_BASE,
    REMEDIES,
    SHORTER_RESPONSES,
    TRAIN_AN_ADAPTER,
)
from jzero.planning.sizing import most_tokens
from jzero.problems.prompts import BOXED, CHAT_FILE, COLUMN, MATH_TEMPLATES, NO_SYSTEM_PROMPT
from jzero.rewards import rewards
from jzero.sizing.data import NO_ANSWER_STATED, Data, HeldOut
from jzero.sizing.flags import HELD_OUT, Wishes
from jzero.tasks import code, find_task, math_problems
from jzero.tasks.math_problems import OPEN
from jzero.types import Prompt

ROUNDED_TO = 64  # tokens; lengths are multiples of it
FEWEST_NEW_TOKENS = 256
NEW_TOKENS = {True: 512, False: 1024}  # without worked solutions, on a CPU and elsewhere
MOST_TURNS = {True: 4, False: 8}  # of an episode, on a CPU and elsewhere
TURN_TOKENS = {True: 128, False: 512}  # of a response and of a reply, on a CPU and elsewhere
# Of a model that writes its thoughts before the answer, on a CPU and elsewhere.
THINKING_TOKENS = {True: 4096, False: 8192}
THINKING_TURN_TOKENS = 2048  # of one turn of an episode
_THINKING_NAME = re.compile(r"(?<![a-z0-9])(r1|qwq|think(ing|er)?|reason(ing|er)?)(?![a-z0-9])")
SPARE_LENGTH = 1.5  # a response may be this many times as long as 95 % of the solutions
# What is trained.
FULL, ADAPTER, INT8_BASE = "the whole model", "an adapter", "an adapter on an int8 base"
GROUP_SIZE = 8
CPU_PROMPTS = 4
DOTS_SHARE = 0.9  # of a device's memory: more activations are counted less exactly
ENOUGH_TOKENS = 8192  # of a microbatch on a device: with fewer, its products are slower
LOGITS_BYTES = {True: 16 << 20, False: 1 << 30}  # of one chunk in fp32, on a CPU and elsewhere
FULL_LR = 1e-6
PASSES = 3  # over the data, unless 200 steps are fewer
MOST_STEPS = 200


def this_machine(settings: Config, workdir: Path) -> Machine:
    """Returns the attached devices, and the memory and disk that are free."""
    set_cpu_devices(settings.model.path)
    available = attached_bytes(settings.memory)
    if available is None and jax.default_backend() == "cpu":
        available = cpu_bytes()
    return Machine(attached_devices(), available, available_bytes(settings.memory, workdir))


@dataclass(frozen=True)
class Model:
    """The model to train, as far as the choices depend on it."""

    directory: Path  # with config.json and the tokenizer
    architecture: qwen.QwenConfig
    positions: int | None
    tokenizer: tokenizer.PreTrainedTokenizerFast
    name: str = ""  # as --model names it
    is_greedy: bool = False  # generation_config.json turns sampling off

    @property
    def num_params(self) -> int:
        return qwen.num_params(self.architecture)


def read_model(settings: Config) -> Model:
    """Reads the configuration and the tokenizer of a model; its weights are not downloaded."""
    source = settings.model.path
    directory = huggingface.resolve(source, ("config.json", *tokenizer.FILES))
    architecture, hf_config = huggingface.load_config(directory)
    positions = settings.model.max_position_embeddings or positions_of(hf_config)
    tok = tokenizer.load(settings.model.tokenizer or str(directory))
    generation = file_in(directory, GENERATION)
    is_greedy = generation is not None and read_json(generation).get("do_sample") is False
    return Model(directory, architecture, positions, tok, source, is_greedy)


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
    held_out: HeldOut | None = None,
) -> Sheet:
    """Chooses the settings of a run.

    Args:
        wishes: the flags of the command.
        settings: the defaults with the settings from the command line. They are changed in place.
        given: the names of the settings from the command line.
        data: the training set.
        model: the model.
        machine: the devices and the disk.
        held_out: rows of the training set that are held out, if it has no other held-out problems.

    Raises UserError if the data cannot be scored, or has no prompts that fit the model.
    """
    sheet = Sheet(settings, given)
    _choose_algorithm(sheet, wishes)
    if wishes.environment:
        choose_environment(sheet, wishes, model, machine)
        _choose_rows(sheet, wishes, data, held_out)
    else:
        _choose_task(sheet, wishes, data)
        _choose_rows(sheet, wishes, data, held_out)
        _choose_prompts(sheet, data, model)
    _choose_lengths(sheet, data, model, machine)
    num_held_out = len(held_out.rows) if held_out else 0
    choose_batch(sheet, data.num_rows - num_held_out, machine)
    if wishes.minutes:
        sheet.set("train.minutes", wishes.minutes, "--minutes")
    return choose_sizes(sheet, wishes.lora, model.architecture, str(model.directory), machine)


def choose_sizes(
    sheet: Sheet, lora: bool, architecture: qwen.QwenConfig, source: str, machine: Machine
) -> Sheet:
    """Returns the sheet with all choices that depend on the size of the model and of the machine.

    They are the method, the batch of the decoder and of the trainer, and the checkpoints. The first
    method that fits is taken: the whole model, an adapter, and an adapter on an int8 base.

    source: a directory with config.json or the name of a known model, which the planner reads.
    """
    # The user chose an adapter by --lora or by its rank.
    is_adapter = lora or bool(sheet.settings.model.adapter.rank)
    methods = [ADAPTER, INT8_BASE] if is_adapter else [FULL, ADAPTER, INT8_BASE]
    if "model.adapter.rank" in sheet.given:
        methods = methods[:1]
    # Nothing is known about memory, so nothing can be too large.
    if machine.device_bytes is None:
        methods = methods[:1]
    reason = "--lora"
    attempt = sheet
    for method in methods:
        # What a method that does not fit has set must not remain.
        attempt = copy.deepcopy(sheet)
        _choose_method(attempt, method, reason, architecture, machine)
        _choose_packing(attempt, machine)
        is_last = method == methods[-1]
        needed = _choose_counts(attempt, source, machine, is_last)
        if needed is None or is_last:
            break
        reason = f"{method} would need {needed / GIB:.1f} GiB of {machine.memory_name}"
    _choose_disk(attempt, architecture, machine)
    return attempt


# -- the task --------------------------------------------------------------------------------------


def _choose_task(sheet: Sheet, wishes: Wishes, data: Data) -> None:
    sheet.set("model.path", wishes.model, "--model")
    has_reward = bool(wishes.rewards) or "task.reward.functions" in sheet.given
    grader = "the grader of answers"
    if data.tests_column:
        reason = f"programming problems with tests ({data.tests_column})"
        sheet.set("task.name", code.NAME, reason)
        grader = "the share of tests that a program passes"
    elif data.answer_column:
        sheet.set("task.name", "math", f"questions with answers ({data.answer_column})")
    elif has_reward:
        sheet.set("task.name", OPEN, "questions without answers: only your reward scores them")
    elif "task.name" not in sheet.given:
        stated = f" ({data.answer_reason})" if data.answer_reason == NO_ANSWER_STATED else ""
        raise UserError(
            f"data {data.source} has the columns {', '.join(data.columns)}, and none with answers "
            f"that a grader could compare{stated}: give --reward FILE.py:FUNCTION, or name the "
            f"column with --data \"rows('{data.source}',answer='COLUMN')\""
        )
    if wishes.rewards:
        _choose_rewards(sheet, wishes, ())
    else:
        sheet.set("task.reward.functions", ("accuracy",), f"no --reward: {grader}")


def _choose_rewards(sheet: Sheet, wishes: Wishes, graders: tuple[str, ...]) -> None:
    """Chooses `graders` and the functions of --reward, with their weights."""
    reason = "--reward"
    if graders:
        reason = "the reward of the environment" + (", and --reward" if wishes.rewards else "")
    sheet.set("task.reward.functions", (*graders, *wishes.rewards), reason)
    if wishes.reward_weights:
        weights = (*(1.0 for _ in graders), *wishes.reward_weights)
        sheet.set("task.reward.weights", weights, "--reward-weights")


def with_algorithm(settings: Config, wishes: Wishes) -> Config:
    """Returns the settings with the algorithm of --algorithm, which further flags may change.

    Raises UserError if there is no such algorithm.
    """
    if not wishes.algorithm:
        return settings
    if wishes.algorithm not in PRESETS:
        similar = difflib.get_close_matches(wishes.algorithm, PRESETS, 1)
        advice = f"did you mean {similar[0]}? " if similar else ""
        raise UserError(
            f"--algorithm={wishes.algorithm}: no such algorithm; {advice}there are "
            f"{', '.join(PRESETS)}"
        )
    return replace(settings, algorithm=PRESETS[wishes.algorithm]())


def _choose_algorithm(sheet: Sheet, wishes: Wishes) -> None:
    """Notes the settings in which the algorithm of --algorithm differs from the default."""
    if not wishes.algorithm:
        return
    for setting in list_settings(sheet.settings):
        is_of_algorithm = setting.name.startswith("algorithm.") and not setting.part
        if is_of_algorithm and setting.value != setting.default:
            sheet.set(setting.name, setting.value, f"--algorithm {wishes.algorithm}")


def choose_environment(sheet: Sheet, wishes: Wishes, model: Model, machine: Machine) -> None:
    """Chooses the task of an environment, the template of its prompts, and the turns."""
    sheet.set("task.name", "environment", "--environment")
    sheet.set("task.environment", wishes.environment, "--environment")
    sheet.set("task.turn_reward", "score", "every turn has the reward that `step` returns")
    if model.tokenizer.chat_template:
        sheet.set("task.template", "chat", "the tokenizer has a chat template")
    else:
        sheet.set("task.template", "plain", "a base model without a chat template")
    _choose_rewards(sheet, wishes, ("accuracy",))
    sheet.set("rollout.max_turns", MOST_TURNS[machine.is_cpu], "responses of an episode at most")
    tokens = TURN_TOKENS[machine.is_cpu]
    sheet.set("rollout.max_reply_tokens", tokens, "of a reply of the environment, at most")


def _choose_rows(sheet: Sheet, wishes: Wishes, data: Data, held_out: HeldOut | None) -> None:
    if data.source:
        reasons = [f"--data: {data.num_rows:,} rows", f"problem: {data.problem_reason}"]
        if data.answer_column:
            reasons.append(f"answer: {data.answer_reason}")
        sheet.set("task.data", str(data.rows), "; ".join(reasons))
    # Problems for evaluation: the user's, or rows that were taken out of the training set.
    if wishes.eval_data:
        sheet.set("task.eval_data", wishes.eval_data, "--eval")
    elif held_out:
        reason = f"{len(held_out.rows)} rows of --data, which are not trained on"
        sheet.set("task.eval_data", held_out.path, reason)


def _choose_prompts(sheet: Sheet, data: Data, model: Model) -> None:
    """Chooses the template, the system prompt, and where a response has its answer.

    The grader of answers needs a prompt that asks for an answer in a box or in tags. A user-defined
    reward gets the prompt of the data without an addition, as in other trainers.
    """
    reward = sheet.settings.task.reward
    has_own_reward = rewards.users_functions(reward) == list(reward.functions)
    adds_instruction = bool(data.answer_column) and not has_own_reward
    has_qwen_tokens = "<|im_start|>" in model.tokenizer.get_vocab()
    if data.has_messages:
        name = f"column:{data.problem_column}"
        sheet.set("task.template", name, "the column holds messages")
    elif model.tokenizer.chat_template:
        sheet.set("task.template", "chat", "the tokenizer has a chat template")
    # Base models of Qwen have the tokens of the chat format, and were trained on some of it.
    elif sheet.settings.task.name == code.NAME:
        name = "qwen3" if has_qwen_tokens else "plain"
        sheet.set("task.template", name, "a base model without a chat template")
    elif not adds_instruction:
        reason = "a base model without a chat template: only the text of the data"
        sheet.set("task.template", "no", reason)
    elif has_qwen_tokens:
        reason = "a base model with Qwen's tokens; asks for the answer in \\boxed{}"
        sheet.set("task.template", "qwen_math", reason)
    else:
        reason = "a base model without a chat template; asks for the answer in <answer> tags"
        sheet.set("task.template", "r1", reason)
    # The prompts of programming problems describe the answer themselves.
    if sheet.settings.task.template == "chat" and sheet.settings.task.name != code.NAME:
        _choose_system_prompt(sheet, model, bool(data.answer_column), adds_instruction)
    # r1 has its answer in tags; the other prompts may ask for a box, or for nothing.
    if data.has_only_numbers and sheet.settings.task.template != "r1":
        reason = "every answer is a number: the box or, without one, the last number counts"
        _choose_answer_mark(sheet, "number", reason)
    elif has_own_reward and data.answer_column:
        reason = "of accuracy, next to your reward: a box, #### or 'the answer is'"
        _choose_answer_mark(sheet, "stated", reason)
    elif data.has_messages and data.answer_column:
        reason = "the prompts of the data may ask for any of a box, #### or 'the answer is'"
        _choose_answer_mark(sheet, "stated", reason)


def _choose_answer_mark(sheet: Sheet, mark: str, reason: str) -> None:
    options = (*sheet.settings.task.options, f"answer_mark={mark}")
    sheet.set("task.options", options, reason)


def _choose_system_prompt(
    sheet: Sheet, model: Model, has_answers: bool, adds_instruction: bool
) -> None:
    """Chooses the system prompt of the template `chat`, which asks for a box by default."""
    if not has_answers:
        reason = "no answers: nothing asks for a box"
    elif not adds_instruction:
        reason = "your reward scores the responses: no instruction is added to the prompts"
    elif not takes_system_prompt(model):
        reason = "the chat template takes no system prompt"
    else:
        sheet.set("task.system_prompt", BOXED, "the grader of answers reads the box first")
        return
    sheet.set("task.system_prompt", NO_SYSTEM_PROMPT, reason)


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

    if thoughts := reason_for_thoughts(model, settings.task.template):
        has_turns = settings.task.name == "environment"
        tokens = THINKING_TURN_TOKENS if has_turns else THINKING_TOKENS[machine.is_cpu]
        reason = f"{thoughts}: a model that thinks needs thousands of tokens"
    elif data.solutions:
        solutions = [len(tokenizer.encode(model.tokenizer, text)) for text in data.solutions]
        typical = int(np.quantile(solutions, 0.95))
        # A policy thinks longer than the solutions of a data set are.
        tokens = max(FEWEST_NEW_TOKENS, _rounded(SPARE_LENGTH * typical))
        reason = f"95 % of the solutions have at most {typical} tokens"
    elif settings.task.name == "environment":
        tokens = TURN_TOKENS[machine.is_cpu]
        reason = f"of one of {settings.rollout.max_turns} turns"
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
    rollout = settings.rollout
    if model.positions is None or rollout.longest_episode <= model.positions:
        return
    # All turns and replies of an episode share the positions. If one response is too long already,
    # the check of the settings names its length.
    if rollout.max_prompt_tokens + rollout.max_new_tokens <= model.positions:
        reason = f"the model has {model.positions} positions"
        sheet.set("rollout.max_episode_tokens", model.positions, reason)


def reason_for_thoughts(model: Model, template: str) -> str:
    """Returns why a model is expected to write its thoughts before an answer, "" if it is not.

    template: task.template, with which the prompts are made.
    """
    name = Path(model.name or model.directory).name.lower()
    if name.endswith("-base"):
        return ""
    if found := _THINKING_NAME.search(name):
        return f"the name of the model has {found[0]}"
    chat_template = str(model.tokenizer.chat_template or "")
    uses_chat_template = template == "chat" or template.startswith((COLUMN, CHAT_FILE))
    has_thoughts = any(word in chat_template for word in ("enable_thinking", "</think>"))
    # A base model has the chat template of its family. Its generation config decodes greedily.
    if not (uses_chat_template and has_thoughts) or model.is_greedy:
        return ""
    # Without thoughts by default, the template itself closes them.
    messages = [{"role": "user", "content": "x"}]
    prompt = tokenizer.decode(model.tokenizer, tokenizer.prompt_ids(model.tokenizer, messages))
    if prompt.rstrip().endswith("</think>"):
        return ""
    return "the chat template is for thoughts"


def prompt_lengths(settings: Config, data: Data, model: Model) -> np.ndarray:
    """Returns the tokens of each prompt of the data, as the task of the settings makes them."""
    return np.array(
        [
            len(tokenizer.prompt_ids(model.tokenizer, prompt, data.tools))
            for prompt in prompts_of(settings.task, data)
        ]
    )


def prompts_of(task: TaskConfig, data: Data) -> Sequence[Prompt]:
    """Returns the prompts of the sampled rows, as a task makes them.

    Raises UserError if the task cannot read the rows.
    """
    if data.sample is None:
        return data.observations
    # The prompts are the same with any reward, and the reward's own check names its mistakes.
    task = replace(task, data=Sources((data.rows,)), eval_data=Sources(), reward=RewardConfig())
    if task.name == code.NAME:
        read = code.read_set
    elif find_task(task.name).templates is MATH_TEMPLATES:
        read = math_problems.read_set
    else:  # a task of another kind reads the whole set
        problems = find_task(task.name).train_problems(task, 0, 1, len(data.sample))
        return [problem.prompt for problem in problems]
    # As held-out rows, of which none is graded.
    rows = read(task, data.sample, data.rows, True)
    prompts = [row.problem.prompt for row in rows if row is not None]
    if not prompts:
        raise UserError(
            f"data {data.source}: none of its first {len(data.sample)} rows can be trained on"
        )
    return prompts


def _rounded(tokens: float) -> int:
    """Returns a length rounded up to a multiple of ROUNDED_TO."""
    return ROUNDED_TO * max(1, -(-int(tokens) // ROUNDED_TO))


# -- the batch -------------------------------------------------------------------------------------


def choose_batch(sheet: Sheet, num_rows: int, machine: Machine) -> None:
    """Chooses the responses of a step, and the steps, for `num_rows` rows to train on.

    num_rows: 0 for an environment that makes its episodes without rows.
    """
    settings, num_devices = sheet.settings, len(machine.devices)
    sheet.set("rollout.group_size", GROUP_SIZE, "responses to a prompt, which are compared")
    prompts, reason = CPU_PROMPTS, "few, so that a step takes minutes on a CPU"
    if not machine.is_cpu:
        prompts = min(128, 16 * num_devices)
        reason = f"16 for each of {num_devices} devices, at most 128"
    # A step never has the same prompt twice.
    if 0 < num_rows < prompts:
        prompts, reason = num_rows, f"there are {num_rows} training rows"
    sheet.set("rollout.num_prompts", prompts, reason)

    chosen = settings.rollout.num_prompts
    if num_rows:
        steps = max(1, min(MOST_STEPS, PASSES * num_rows // chosen))
        passes = steps * chosen / num_rows
        reason = f"{passes:.2g} passes over {num_rows:,} training rows"
    else:
        steps, reason = MOST_STEPS, "the episodes never end"
    sheet.set("train.steps", steps, reason)
    most = HELD_OUT[machine.is_cpu]
    sheet.set("eval.problems", most, "at most, before and after the run")
    # Sampled responses would take several times as long, before the first step.
    sheet.set("eval.samples", 0, "greedy only: one response to each problem")


# -- the model -------------------------------------------------------------------------------------


def _choose_method(
    sheet: Sheet, method: str, reason: str, architecture: qwen.QwenConfig, machine: Machine
) -> None:
    """Chooses what is trained, with its precision and its learning rate."""
    settings = sheet.settings
    if method != FULL:
        rank, remark = ADAPTER_RANK, reason
        # A tiny model has weights that are narrower than the usual rank.
        while rank > 1 and not allows_rank(architecture, settings, rank):
            rank, remark = rank // 2, f"{reason}; a larger rank is above that of a weight"
        sheet.set("model.adapter.rank", rank, remark)
    if method == INT8_BASE:
        sheet.set("model.base", "int8", reason)
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
        shared = "every device has the frozen model, which the decoder shares"
        sheet.set("mesh.data", -1, shared)
        sheet.set("mesh.fsdp", 1, shared)
    if settings.model.dtype == "float32":
        sheet.set("rollout.kv_dtype", "float32", "as model.dtype, so that log-probs agree")
    if machine.is_cpu:
        sheet.set("optimizer.mu_dtype", "bfloat16", "a sixth less memory for the optimizer's state")
    # A power of two, so that chunks divide the tokens of usual microbatches.
    chunk = LOGITS_BYTES[machine.is_cpu] // (4 * architecture.vocab_size)
    chunk = min(2048, max(64, 1 << (chunk.bit_length() - 1)))
    mebibytes = 4 * chunk * architecture.vocab_size / 2**20
    remark = f"their logits over the vocabulary take {mebibytes:.0f} MiB"
    sheet.set("model.logit_chunk", chunk, remark)


def allows_rank(architecture: qwen.QwenConfig, settings: Config, rank: int) -> bool:
    """Returns whether an adapter may have this rank."""
    try:
        adapters.check(architecture, replace(settings.model.adapter, rank=rank))
    except UserError:
        return False
    return True


# -- packing and sizes -----------------------------------------------------------------------------


def _choose_packing(sheet: Sheet, machine: Machine) -> None:
    rollout, num_devices = sheet.settings.rollout, len(machine.devices)
    # A row has a prompt and several packs; a microbatch has at least a row on each device.
    room = most_tokens(machine.devices) // num_devices - rollout.max_prompt_tokens
    packs = max(1, min(rollout.group_size, room // rollout.longest_continuation))
    if machine.is_cpu:
        sheet.set("train.pack", "longest", "one length of rows: one program to compile")
    reason = "responses of full length that share a prompt in a row"
    sheet.set("train.packs_per_row", packs, reason)


def _choose_counts(sheet: Sheet, source: str, machine: Machine, is_last: bool) -> float | None:
    """Chooses the batches of the decoder and of the trainer, and whatever else makes a run fit.

    Returns None if the run fits, and otherwise the bytes that it needs (`Machine.shown_bytes`).
    is_last: nothing else will be tried, so responses may get shorter.
    """
    devices, available = machine.devices, machine.device_bytes
    _choose_remat(sheet, source, machine)
    planned = planned_settings(sheet.settings, source)
    sized = _with_chosen_sizes(planned, sheet.given, machine)
    _take_sizes(sheet, sized, machine)
    if available is None:
        return None
    verdict = fit_run(sized, devices, available)
    if verdict.fits:
        return None

    needed = machine.shown_bytes(verdict.needed)
    # Methods are tried by the caller. Shorter responses change the task more than they do.
    excluded = {TRAIN_AN_ADAPTER, QUANTIZE_BASE}
    if not is_last:
        excluded.add(SHORTER_RESPONSES)
    remedies = [remedy for remedy in REMEDIES if remedy not in excluded]
    room = room_for_arrays(verdict.run, available)
    fitting = with_remedies(sized, devices, room, remedies)
    if fitting is None:
        return needed  # the check of the run says what is missing
    changed = fitting.settings
    # Another mesh, for example, may leave room for larger sizes than those that were reached before
    # it was tried.
    larger = _with_chosen_sizes(changed, sheet.given, machine)
    if fit_run(larger, devices, available).fits:
        changed = larger
    shown = machine.shown_bytes(available) / GIB
    _take(sheet, sized, changed, f"fits {shown:.1f} GiB; more would need {needed / GIB:.1f} GiB")
    return None


def _choose_remat(sheet: Sheet, source: str, machine: Machine) -> None:
    """Saves matrix products for the backward pass where this saves time and memory allows it.

    On an H200 `dots` was faster than `full` and `none`. On CPUs, and by XLA's own estimate on
    TPUs, neither is faster than `full` (lab/log.md, 2026-11-26).
    """
    platform = machine.devices[0].platform
    if platform != "gpu":
        reason = f"least memory; on a {platform.upper()}, saving products saves no time"
        sheet.set("model.remat", "full", reason)
        return
    available = machine.device_bytes
    if available is None or "model.remat" in sheet.given:
        return  # the default takes the least memory

    def fit_with(remat: Literal["dots", "full"]) -> Fit[PlannedRun]:
        planned = planned_settings(sheet.settings, source)
        planned.model.remat = remat
        sized = _with_chosen_sizes(planned, sheet.given, machine)
        return fit_run(sized, machine.devices, available)

    verdict, usual = fit_with("dots"), fit_with("full").run.microbatch_tokens
    enough = min(usual, ENOUGH_TOKENS * len(machine.devices))
    needed = f"{verdict.needed / GIB:.1f} of {available / GIB:.1f} GiB"
    if verdict.needed <= DOTS_SHARE * available and verdict.run.microbatch_tokens >= enough:
        sheet.set(
            "model.remat",
            "dots",
            f"saves products for the backward pass, faster on a GPU; needs {needed}",
        )
    else:
        sheet.set("model.remat", "full", f"least memory; dots would need {needed}")


def _with_chosen_sizes(settings: Config, given: Collection[str], machine: Machine) -> Config:
    """Returns the settings with the sizes that the planner chooses, unless the user chose them."""
    settings = copy.deepcopy(settings)
    # The planner chooses sizes that are 0.
    if "train.microbatch_tokens" not in given:
        settings.train.microbatch_tokens = 0
    if "rollout.num_slots" not in given:
        settings.rollout.num_slots = 0
    return sizing.choose_sizes(settings, machine.devices, machine.device_bytes)


def _take_sizes(sheet: Sheet, sized: Config, machine: Machine) -> None:
    """Chooses the sizes of a microbatch and of the decoder, with their reasons."""
    train, rollout = sized.train, sized.rollout
    packs = max(1, train.packs_per_row)
    row = rollout.max_prompt_tokens + packs * rollout.longest_continuation
    devices = len(machine.devices)
    rows = max(1, train.microbatch_tokens // (row * devices))
    reason = f"{rows} row{'s' * (rows > 1)} of {row} tokens on each of {devices} devices"
    sheet.set("train.microbatch_tokens", train.microbatch_tokens, reason)
    responses = rollout.num_prompts * rollout.group_size
    reason = f"of the {responses} responses of a step, and of evaluations: as many as fit, or gain"
    sheet.set("rollout.num_slots", rollout.num_slots, f"{reason} speed")


def _take(sheet: Sheet, original: Config, changed: Config, reason: str) -> None:
    """Chooses the settings in which `changed` differs from `original`."""
    values = {setting.name: setting.value for setting in list_settings(original)}
    for setting in list_settings(changed):
        if setting.value != values[setting.name]:
            sheet.set(setting.name, setting.value, reason)


def planned_settings(settings: Config, source: str) -> Config:
    """Returns a copy of the settings with the model that the planner reads."""
    planned = copy.deepcopy(settings)
    planned.model.path = source
    return planned


# -- disk ------------------------------------------------------------------------------------------


def _choose_disk(sheet: Sheet, architecture: qwen.QwenConfig, machine: Machine) -> None:
    size = checkpoint_bytes(sheet.settings, architecture)
    every = sheet.settings.train.checkpoint_every
    sheet.set("train.checkpoint_every", every, f"a checkpoint has {size / GB:.1f} GB")
    needed = sum(parts_of_workdir(sheet.settings, architecture).values())
    # Checkpoints, the export and the logs of the whole run.
    if needed <= machine.disk_bytes:
        return
    smaller = smaller_on_disk(sheet.settings, architecture, machine.disk_bytes)
    if smaller is None:
        return  # the check of the run says what is missing
    reason = f"the disk has {machine.disk_bytes / GB:.1f} GB free, and {needed / GB:.1f} GB "
    _take(sheet, copy.deepcopy(sheet.settings), smaller, reason + "were needed")
