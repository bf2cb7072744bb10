"""Which settings `jzero train` chooses, for machines that are described and not attached."""

import copy
import importlib.util
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import datasets
import pytest
import tiny
from runs import ROOT

from jzero import config
from jzero.config import Config
from jzero.errors import UserError
from jzero.fields import part_name
from jzero.model import qwen
from jzero.planning.chips import GIB, DescribedDevice, described_devices
from jzero.planning.disk import parts_of_workdir
from jzero.planning.largest import memory_of
from jzero.planning.machines import Machine, plan_on
from jzero.planning.models import KNOWN_MODELS
from jzero.sizing import choices, recipe
from jzero.sizing.choices import Model, Sheet
from jzero.sizing.data import Data, read_data, read_environment
from jzero.sizing.flags import Wishes

DISK = 500e9


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    return read_data(tiny.save_sums(path, 400), config.TaskConfig())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = tiny.save_byte_model(tmp_path_factory.mktemp("model"))
    return choices.read_model(Config(model=config.ModelConfig(path=path)))


def cpu(gib: float, disk: float = DISK) -> Machine:
    devices = [DescribedDevice(i, 0, "cpu", "cpu") for i in range(2)]
    return Machine(devices, (gib - 1) * GIB / 2, disk)


def slice_of(topology: str) -> Machine:
    devices = described_devices(topology)
    return Machine(devices, memory_of(devices[0]), DISK)


def choose(
    data: Data,
    model: Model,
    machine: Machine,
    given: dict[str, object] | None = None,
    **flags: object,
) -> Sheet:
    wishes = Wishes(model=str(model.directory), data=data.source, **flags)  # type: ignore
    settings = Config(name="test")
    for name, value in (given or {}).items():
        section, _, leaf = name.rpartition(".")
        setattr(getattr(settings, section), leaf, value)
    return choices.choose(wishes, settings, frozenset(given or ()), data, model, machine)


def test_every_choice_has_a_reason_and_the_settings_are_valid(data: Data, model: Model) -> None:
    sheet = choose(data, model, cpu(16))

    config.validate(sheet.settings, is_training=True)
    assert all(choice.reason for choice in sheet.choices)
    assert len({choice.name for choice in sheet.choices}) == len(sheet.choices)


def test_lengths_cover_the_data(data: Data, model: Model) -> None:
    sheet = choose(data, model, cpu(16))

    lengths = choices.prompt_lengths(sheet.settings, data, model)
    rollout = sheet.settings.rollout
    assert lengths.max() <= rollout.max_prompt_tokens < lengths.max() + 64
    assert rollout.max_new_tokens == choices.FEWEST_NEW_TOKENS  # the solutions are short
    assert rollout.max_prompt_tokens + rollout.max_new_tokens <= 1024  # the model's positions


def test_settings_of_the_user_are_kept_and_the_others_fit_them(data: Data, model: Model) -> None:
    given = {"rollout.max_new_tokens": 96, "rollout.group_size": 3, "optimizer.lr": 5e-6}
    given["eval.problems"] = 8

    sheet = choose(data, model, cpu(16), given)

    settings = sheet.settings
    assert (settings.rollout.max_new_tokens, settings.rollout.group_size) == (96, 3)
    assert settings.optimizer.lr == 5e-6
    assert settings.rollout.num_slots == 3 * settings.rollout.num_prompts
    assert not {choice.name for choice in sheet.choices} & given.keys()
    row = settings.rollout.max_prompt_tokens + settings.train.packs_per_row * 96
    assert settings.train.microbatch_tokens % (2 * row) == 0


def test_prompts_that_are_all_too_long_are_refused(data: Data, model: Model) -> None:
    message = r"rollout.max_prompt_tokens=8: every prompt of the data is longer, the shortest has"
    with pytest.raises(UserError, match=message):
        choose(data, model, cpu(16), {"rollout.max_prompt_tokens": 8})


def test_a_microbatch_is_never_larger_than_the_step(data: Data, model: Model) -> None:
    given = {"rollout.num_prompts": 2, "rollout.group_size": 2, "rollout.max_new_tokens": 8}
    given["eval.problems"] = 4

    settings = choose(data, model, slice_of("v5e:1x1"), given).settings

    row = settings.rollout.max_prompt_tokens + settings.train.packs_per_row * 8
    assert settings.train.microbatch_tokens <= 4 * row
    assert settings.rollout.num_slots == 4


def test_without_reward_the_grader_scores_and_without_answers_a_reward_is_needed(
    data: Data, model: Model
) -> None:
    bare = replace(data, rows=replace(data.rows, answer=""), has_only_numbers=False)

    assert choose(data, model, cpu(16)).settings.task.reward.functions == ("accuracy",)
    with pytest.raises(UserError, match="has the columns question, answer, and none with answers"):
        choose(bare, model, cpu(16))
    settings = choose(bare, model, cpu(16), rewards=("my.py:f",)).settings
    assert (settings.task.name, settings.task.reward.functions) == ("open", ("my.py:f",))
    assert settings.task.system_prompt == "none"


def test_numbers_are_read_without_a_box(data: Data, model: Model) -> None:
    assert choose(data, model, cpu(16)).settings.task.options == ("answer_mark=number",)
    words = replace(data, has_only_numbers=False)
    assert choose(words, model, cpu(16)).settings.task.options == ()


def with_template(model: Model, template: str | None) -> Model:
    tok = copy.deepcopy(model.tokenizer)
    tok.chat_template = template
    return replace(model, tokenizer=tok)


def test_an_added_system_prompt_has_a_reason_and_an_own_reward_adds_none(
    data: Data, model: Model
) -> None:
    words = replace(data, has_only_numbers=False)

    def system_prompt(data: Data, **flags: object) -> tuple[str, str]:
        sheet = choose(data, model, cpu(16), **flags)
        [reason] = [
            choice.reason for choice in sheet.choices if choice.name == "task.system_prompt"
        ]
        assert "task.system_prompt" in recipe.table(sheet.settings, sheet.choices, ())
        return sheet.settings.task.system_prompt, reason

    for rows in (data, words):
        prompt, reason = system_prompt(rows)
        assert "\\boxed{}" in prompt and "the box" in reason
        assert system_prompt(rows, rewards=("my.py:f",)) == (
            "none",
            "your reward scores the responses: no instruction is added to the prompts",
        )
        assert system_prompt(rows, rewards=("length",))[0] == prompt  # needs the task's verdict
    # Accuracy is reported next to the reward, and nothing has asked for a box.
    options = choose(words, model, cpu(16), rewards=("my.py:f",)).settings.task.options
    assert options == ("answer_mark=stated",)


@pytest.mark.parametrize("has_answers", [True, False])
def test_own_rewards_get_the_prompts_of_the_data(
    data: Data, model: Model, has_answers: bool
) -> None:
    base = with_template(model, None)
    if not has_answers:
        data = replace(data, rows=replace(data.rows, answer=""), has_only_numbers=False)
    assert choose(data, base, cpu(16), rewards=("my.py:f",)).settings.task.template == "no"


@pytest.mark.parametrize("has_answers", [True, False])
@pytest.mark.parametrize("reward", ["", "my.py:f"])
def test_no_system_prompt_is_chosen_for_prompts_of_a_column(
    data: Data, model: Model, has_answers: bool, reward: str
) -> None:
    prompt = [{"role": "user", "content": "What is 3 + 4?"}]
    sample = datasets.Dataset.from_list([{"question": prompt, "answer": "7"}] * 4)
    rows = data.rows if has_answers else replace(data.rows, answer="")
    messages = replace(data, rows=rows, has_messages=True, sample=sample, has_only_numbers=False)
    if not (has_answers or reward):
        return  # nothing could score the responses

    functions = (reward,) if reward else ()
    settings = choose(messages, model, cpu(16), rewards=functions).settings

    assert settings.task.template == "column:question"
    assert settings.task.system_prompt == ""
    config.validate(settings, is_training=True)


def test_a_cpu_computes_in_fp32_and_an_accelerator_in_bf16(data: Data, model: Model) -> None:
    settings = choose(data, model, cpu(16)).settings

    assert (settings.model.dtype, settings.rollout.kv_dtype) == ("float32", "float32")
    assert settings.model.remat == "full"
    assert choose(data, model, slice_of("v5e:1x1")).settings.model.dtype == "bfloat16"


def test_an_adapter_has_its_learning_rate(data: Data, model: Model) -> None:
    settings = choose(data, model, cpu(16), lora=True).settings
    assert settings.model.adapter.rank == 16  # the rank of the tiny model's keys
    large = replace(model, architecture=KNOWN_MODELS["Qwen/Qwen2.5-0.5B"])
    rank = choose(data, large, cpu(999), lora=True).settings.model.adapter.rank
    assert rank == config.ADAPTER_RANK
    assert (settings.mesh.data, settings.mesh.fsdp) == (-1, 1)  # shared with the decoder
    assert settings.optimizer.lr == pytest.approx(10 * choices.FULL_LR)


def test_a_small_disk_keeps_fewer_checkpoints_and_is_never_exceeded(
    data: Data, model: Model
) -> None:
    large = replace(
        model, directory=Path("Qwen/Qwen2.5-0.5B"), architecture=KNOWN_MODELS["Qwen/Qwen2.5-0.5B"]
    )

    def on(disk: float, **flags: object) -> Config:
        machine = replace(slice_of("v5e:2x4"), disk_bytes=disk)
        settings = choose(data, large, machine, {"train.steps": 100}, **flags).settings
        assert sum(parts_of_workdir(settings, large.architecture).values()) <= disk
        return settings

    kept = {disk: on(disk * 1e9).train for disk in (40, 14, 10, 4)}
    assert {disk: (train.keep_checkpoints, train.save) for disk, train in kept.items()} == {
        40: (2, "full"),
        14: (1, "full"),
        10: (2, "no_optimizer"),
        4: (1, "no_optimizer"),
    }
    assert kept[40].checkpoint_every > 0 > kept[4].checkpoint_every
    # A run with an adapter exports the adapter: neither it nor its checkpoints need much disk.
    assert on(2e9, lora=True).train.keep_checkpoints == 2


def test_a_quota_of_the_disk_is_kept(data: Data, model: Model, tmp_path: Path) -> None:
    quota = Config(memory=config.MemoryConfig(disk_gb=3))
    assert choices.this_machine(quota, tmp_path / "run").disk_bytes == 3e9
    assert choices.this_machine(Config(), tmp_path / "run").disk_bytes != 3e9


GAME = """
class Game:
    def reset(self, row, seed):
        self.answer = row.get("question", str(seed % 7))
        return f"{self.answer}: say it"

    def step(self, response):
        return "no", float(self.answer in response), False
"""


@pytest.mark.parametrize("has_rows", [False, True])
def test_an_environment_chooses_turns_and_needs_no_rows(
    data: Data, model: Model, has_rows: bool, tmp_path: Path
) -> None:
    file = tmp_path / "game.py"
    file.write_text(GAME)
    wishes = Wishes(str(model.directory), environment=f"{file}:Game", rewards=("my.py:f",))
    settings = Config(name="test")
    machine = cpu(16)
    choices.choose_environment(Sheet(settings, frozenset()), wishes, model, machine)
    read = read_environment(data.source if has_rows else "", settings.task, 0)

    sheet = choices.choose(wishes, Config(name="test"), frozenset(), read, model, machine)

    config.validate(sheet.settings, is_training=True)
    task, rollout = sheet.settings.task, sheet.settings.rollout
    assert (task.name, task.template) == ("environment", "chat")
    assert task.turn_reward == config.turns.Score()
    assert task.reward.functions == ("accuracy", "my.py:f")
    assert bool(task.data) == has_rows
    longest = choices.prompt_lengths(sheet.settings, read, model).max()
    assert longest <= rollout.max_prompt_tokens < longest + 64
    assert rollout.max_turns == choices.MOST_TURNS[True]
    # All turns fit the 1,024 positions of the model.
    assert rollout.longest_episode <= 1024
    steps = choices.MOST_STEPS if not has_rows else 3 * 400 // rollout.num_prompts
    assert sheet.settings.train.steps == min(choices.MOST_STEPS, steps)


# A model that the planner knows, with the tokenizer of the tiny model.
PAIRS = [
    ("Qwen/Qwen2.5-0.5B", "v5e:1x1"),
    ("Qwen/Qwen2.5-1.5B", "v5e:2x4"),
    ("Qwen/Qwen2.5-3B", "v5e:2x4"),
    ("Qwen/Qwen2.5-7B", "v6e:2x4"),
    ("Qwen/Qwen2.5-1.5B", "v6e:1x1"),
    ("Qwen/Qwen2.5-3B", "h100:1"),
    ("Qwen/Qwen2.5-0.5B", "l4:1"),
]


@pytest.mark.parametrize(("hub_id", "topology"), PAIRS)
def test_what_is_chosen_fits_by_plan(
    data: Data, model: Model, hub_id: str, topology: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = slice_of(topology)
    large = replace(model, directory=Path(hub_id), architecture=KNOWN_MODELS[hub_id])

    settings = choose(data, large, machine).settings

    assert plan_on(choices.planned_settings(settings, hub_id), machine).fits


@pytest.mark.parametrize(
    ("hub_id", "topology", "remat"),
    [
        ("Qwen/Qwen2.5-1.5B", "h100:1", "dots"),
        ("Qwen/Qwen2.5-0.5B", "l4:1", "dots"),
        ("Qwen/Qwen3-4B", "l4:1", "full"),
        ("Qwen/Qwen2.5-0.5B", "v6e:1x1", "full"),  # dots would fit
    ],
)
def test_a_gpu_saves_products_where_they_fit_and_its_microbatches_stay_large(
    data: Data, model: Model, hub_id: str, topology: str, remat: str
) -> None:
    machine = slice_of(topology)
    large = replace(model, directory=Path(hub_id), architecture=KNOWN_MODELS[hub_id])
    given = {"rollout.max_prompt_tokens": 512, "rollout.max_new_tokens": 1024}

    sheet = choose(data, large, machine, given)

    settings = sheet.settings
    assert settings.model.remat == remat
    verdict = plan_on(choices.planned_settings(settings, hub_id), machine)
    assert verdict.memory is not None and verdict.fits
    if remat != "full":
        assert verdict.memory.needed <= choices.DOTS_SHARE * verdict.memory.available
    assert settings.train.microbatch_tokens >= choices.ENOUGH_TOKENS
    [reason] = [choice.reason for choice in sheet.choices if choice.name == "model.remat"]
    assert ("GiB" in reason) == (topology in ("h100:1", "l4:1"))
    kept = choose(data, large, machine, given | {"model.remat": "none"})
    assert kept.settings.model.remat == "none"


def test_a_model_that_does_not_fit_gets_an_adapter(data: Data, model: Model) -> None:
    large = replace(
        model, directory=Path("Qwen/Qwen2.5-3B"), architecture=KNOWN_MODELS["Qwen/Qwen2.5-3B"]
    )
    machine = slice_of("v6e:1x1")

    sheet = choose(data, large, machine)

    assert machine.device_bytes is not None
    assert qwen.num_params(large.architecture) * 12 > machine.device_bytes
    assert sheet.settings.model.adapter.rank
    reasons = recipe.reasons_of(sheet.choices)
    assert "the whole model would need" in reasons["model.adapter.rank"]


def load_recipe(path: Path) -> config.Config:
    """Returns the settings of a recipe."""
    spec = importlib.util.spec_from_file_location("written", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config()


def test_a_recipe_gives_the_same_settings(data: Data, model: Model, tmp_path: Path) -> None:
    sheet = choose(data, model, cpu(16), {"rollout.stop": ("\n", 'a"b')}, rewards=("my.py:f",))
    path = tmp_path / "recipe.py"
    path.write_text(recipe.recipe_source(sheet.settings, sheet.choices, "Title.", path))

    assert load_recipe(path) == sheet.settings
    # Choices that equal a default are written, too.
    assert f"config.rollout.group_size = {choices.GROUP_SIZE}" in path.read_text()


def parts() -> Iterator[tuple[str, str]]:
    """Yields every setting that has parts, with the name of each of its parts."""
    for setting in config.list_settings(config.Config()):
        if not setting.part:
            for part in setting.parts:
                yield setting.name, part_name(part)


@pytest.mark.parametrize(("name", "part"), list(parts()))
def test_a_recipe_has_every_part_with_its_arguments(
    name: str, part: str, data: Data, model: Model, tmp_path: Path
) -> None:
    """As for `jzero train --config.algorithm.weight=constant`."""
    sheet = choose(data, model, cpu(16))
    config.put_value(sheet.settings, name, part)
    path = tmp_path / "recipe.py"
    path.write_text(recipe.recipe_source(sheet.settings, sheet.choices, "Title.", path))

    assert load_recipe(path) == sheet.settings


@pytest.mark.parametrize("flags", [{}, {"rewards": ("my.py:f",)}, {"lora": True}])
def test_the_table_has_twelve_choices_in_80_columns(
    data: Data, model: Model, flags: dict[str, object]
) -> None:
    sheet = choose(data, model, cpu(16), {"train.steps": 7}, **flags)

    text = recipe.table(sheet.settings, sheet.choices, ["train.steps"])

    *lines, last = text.splitlines()
    assert max(map(len, lines)) <= 80
    names = [line.split()[0] for line in lines if not line.startswith(" ")]
    assert len(names) == recipe.TABLE_ROWS
    assert {"task.data", "task.reward.functions", "task.system_prompt", "train.steps"} <= {*names}
    assert last == f"{len(sheet.choices) - 11} more choices with their reasons are in recipe.py"
    assert len(lines) <= 36  # one screen, with a data set in a long path
    assert "given by you" in text


def test_the_folder_of_recipes_is_that_of_the_clone() -> None:
    from jzero import recipe_files

    assert json.dumps(
        sorted(path.stem for path in recipe_files.RECIPES.glob("*.py"))
    ) == json.dumps(sorted(path.stem for path in (ROOT / "configs").glob("*.py")))


# What matters here of the templates of models that think, as their makers publish them.
QWEN3 = (
    "{%- for message in messages %}{{- message.role + ':' + message.content + '\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- 'assistant:' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
)
R1 = (
    "{%- for message in messages %}{%- if message.role == 'assistant' and '</think>' in "
    "message.content %}{{- message.content.split('</think>')[-1] }}{%- else %}"
    "{{- message.role + ':' + message.content }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- 'assistant:<think>\\n' }}{%- endif %}"
)
CLOSED = QWEN3.replace("enable_thinking is defined and enable_thinking is false", "true")


@pytest.mark.parametrize(
    ("name", "template", "is_greedy", "thinks"),
    [
        ("Qwen3-8B", QWEN3, False, True),
        ("Qwen3-8B-Base", QWEN3, False, False),
        ("my-model", QWEN3, True, False),  # a base model with the template of its family
        ("my-model", QWEN3, False, True),
        ("my-model", R1, False, True),
        ("my-model", CLOSED, False, False),
        ("DeepSeek-R1-Distill-Qwen-1.5B", "", False, True),
        ("QwQ-32B", "", False, True),
        ("Qwen3-4B-Thinking-2507", "", False, True),
        ("Qwen2.5-1.5B-Instruct", "", False, False),
    ],
)
def test_a_model_that_thinks_gets_thousands_of_tokens(
    name: str, template: str, is_greedy: bool, thinks: bool, data: Data, model: Model
) -> None:
    long = replace(model, positions=32768, name=f"maker/{name}", is_greedy=is_greedy)
    if template:
        long = with_template(long, template)
    given = {"model.max_position_embeddings": 32768}

    on_cpu = choose(data, long, cpu(999), given).settings.rollout
    on_tpu = choose(data, long, slice_of("v5e:1x1"), given).settings.rollout

    lengths = (on_cpu.max_new_tokens, on_tpu.max_new_tokens)
    assert lengths == ((4096, 8192) if thinks else (256, 256))
