"""Mistakes that people type, each with the one line that it must end in.

The line names the flag, setting, file or column, and what to write. Names of TRL, verl and OpenRLHF
lead to the settings, and close misspellings to the setting that was meant.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny

from jzero import cli, main, setup
from jzero.config import Config, known_names, unknown_names
from jzero.config.other_names import OTHER_NAMES
from jzero.config.schema import list_settings
from jzero.errors import UserError
from jzero.hosts.processes import write_once
from jzero.model import huggingface
from jzero.sizing import command
from jzero.tasks import find_task

ROOT = Path(__file__).resolve().parents[2]
TINY = f"--config={ROOT}/configs/gsm8k.py:tiny"

# ml_collections loads a recipe so.
pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")


def last_line(run: Callable[[], object], capsys: pytest.CaptureFixture[str]) -> str:
    """Returns the one line of an error, from a command that ends or from a UserError."""
    try:
        run()
    except SystemExit as ended:
        assert ended.code == 2
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ")
        return line.removeprefix("error: ")
    except UserError as error:
        assert "\n" not in str(error)
        return str(error)
    raise AssertionError("the mistake was accepted")


FLAGS = [
    # Names of TRL, verl and OpenRLHF, with and without a section.
    ("--num_generations=8", "write --config.rollout.group_size=8"),
    ("--max_completion_length=512", "write --config.rollout.max_new_tokens=512"),
    ("--max_prompt_length=512", "write --config.rollout.max_prompt_tokens=512"),
    ("--learning_rate=1e-5", "write --config.optimizer.lr=1e-5"),
    ("--output_dir=runs/x", "write --workdir=runs/x"),
    ("--model_name_or_path=gpt2", "write --config.model.path=gpt2"),
    ("--actor_rollout_ref.rollout.tensor_model_parallel_size=2", "--config.mesh.tensor=2"),
    ("--data.train_batch_size=64", "write --config.rollout.num_prompts=64"),
    ("--trainer.total_epochs=2", "write --config.train.prompt_epochs=2"),
    ("--config.rollout.num_generations=8", "it is rollout.group_size here"),
    ("--config.optimizer.learning_rate=1", "it is optimizer.lr here"),
    ("--config.train.save_steps=5", "it is train.checkpoint_every here"),
    ("--config.train.max_grad_norm=1", "it is optimizer.clip_norm here"),
    # Names of open-r1, oat and AReaL.
    ("--config.benchmarks=math_500", "it is eval.suites here"),
    ("--config.callbacks=x", "did you mean train.callbacks?"),
    ("--config.overwrite_hub_revision=True", "adds a commit to the branch hub.push.revision"),
    ("--config.hub_strategy=epoch", "hub.push=every_checkpoint pushes each checkpoint"),
    ("--save_strategy=epoch", "train.checkpoint_epochs passes over the data"),
    ("--config.wandb_entity=me", "set the environment variable WANDB_ENTITY"),
    ("--wandb_project=p", "set train.trackers=wandb(project=NAME)"),
    ("--config.load_in_4bit=True", "model.base=int8 holds the frozen base"),
    ("--config.use_peft=True", "model.adapter.rank=32 trains an adapter"),
    ("--config.lora_dropout=0.1", "it is model.adapter.dropout here"),
    ("--sync_params_every=2", "N times as many rollout.num_prompts, in N times as many train.mini"),
    ("--save_steps=-1", "write --config.train.checkpoint_every=-1"),
    ("--eval_input_key=question", "task.eval_data=rows(FILE, problem=COLUMN)"),
    ("--eval_output_key=answer", "task.eval_data=rows(FILE, answer=COLUMN)"),
    ("--critic_max_step_adjustment=8", "counts optimizer steps by itself"),
    ("--oracle_type=reward", "task.verifier chooses the grader"),
    ("--hub_model_revision=main", "write --config.hub.push.revision=main"),
    ("--config.answer_save_path=d", "it is train.trajectories here"),
    # Settings without `config.`.
    ("--optimizer.lr=1e-5", "write --config.optimizer.lr=1e-5"),
    ("--rollout.group_size=8", "write --config.rollout.group_size=8"),
    ("--model.path=gpt2", "write --config.model.path=gpt2"),
    # Settings without their section.
    ("--lr=1e-5", "or --config.optimizer.lr=1e-5"),
    ("--max_new_tokens=100", "write --config.eval.max_new_tokens=100 or --config.rollout.max_new_"),
    ("--steps=5", "--config.train.steps=5"),
    # Misspellings: the right one first, and alone if nothing else is close.
    ("--config.rollout.group_sise=4", "did you mean rollout.group_size?"),
    ("--config.rollout.groupsize=4", "did you mean rollout.group_size?"),
    ("--config.group_size=4", "did you mean rollout.group_size?"),
    ("--config.train.group_size=4", "did you mean rollout.group_size?"),
    ("--config.rolout.max_new_tokens=4", "did you mean rollout.max_new_tokens"),
    ("--config.train.microbatch_token=4", "did you mean train.microbatch_tokens?"),
    ("--config.optimizer.weight_deca=0", "did you mean optimizer.weight_decay?"),
    ("--config.task.reward.function=x", "did you mean task.reward.functions?"),
    ("--config.model.adapter.ranks=8", "did you mean model.adapter.rank?"),
    ("--config.eval.problem=8", "did you mean eval.problems?"),
    ("--config.zzz=1", "no field zzz; --help lists them"),
    # Removed settings.
    ("--config.train.pack_length=8", "set train.pack"),
    ("--config.train.wandb_name=x", "set the environment variable WANDB_NAME"),
    # Values.
    ("--config.rollout.group_size=many", "group_size"),
    ("--config.rollout.group_size=0", "rollout.group_size=0"),
    ("--config.rollout.num_slots=-1", "rollout.num_slots=-1"),
    ("--config.optimizer.lr=-1", "optimizer.lr=-1"),
    ("--config.train.seed=1.5", "seed"),
    ("--config.rollout.temperature=inf", "rollout.temperature=inf"),
    ("--confg=x", "unknown arguments|Unknown command line flag 'confg'"),
    ("-x", "x"),
]


@pytest.mark.parametrize(("flag", "advice"), FLAGS)
def test_a_wrong_flag_is_one_line(
    flag: str, advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = last_line(lambda: main.parse([TINY, flag]), capsys)
    assert any(part in line for part in advice.split("|")), line


TRAIN = [
    ("--rewards=my.py:f", "--rewards=my.py:f: did you mean --reward=my.py:f?"),
    ("--env=shop.py:Shop", "did you mean --environment=shop.py:Shop?"),
    ("--eval_data=x", "did you mean --eval=x?"),
    ("--use_peft", "did you mean --lora?"),
    ("--dataset_name=x", "did you mean --data=x?"),
    ("--work_dir=x", "--work_dir=x"),
    ("--lr=1e-5", "or --config.optimizer.lr=1e-5"),
    ("--learning_rate=1e-5", "write --config.optimizer.lr=1e-5"),
    ("stray", "unknown arguments stray"),
]


@pytest.mark.parametrize(("flag", "advice"), TRAIN)
def test_a_wrong_flag_of_jzero_train_is_one_line(
    flag: str,
    advice: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cli, "start_jax", list)  # this process has started it

    def parse() -> None:
        command.parse(["--model=m", "--data=d", flag]).apply(Config())

    assert advice in last_line(parse, capsys)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with a model, problems, a reward and an environment that work."""
    folder = tmp_path_factory.mktemp("files")
    tiny.save_byte_model(folder / "model")
    tiny.save_sums(folder / "sums.jsonl", 40)
    (folder / "mine.py").write_text("def f(response, gold, task):\n    return 1.0\n")
    (folder / "broken.py").write_text("x = 1\nimport nowhere_at_all\n")
    (folder / "shop.py").write_text("class Shop:\n    pass\n")
    (folder / "sums.txt").write_text("question,answer\n1+1?,2\n")
    return folder


VALUES = [
    ("--reward=mine.py:g", "mine.py:g: no such .* no g; there are f"),
    ("--reward=none.py:f", "none.py:f: no such .* No such file"),
    ("--reward=broken.py:f", "broken.py:f: .*line 2: No module named 'nowhere_at_all'"),
    ("--reward=acuracy", "'acuracy' is not one of accuracy"),
    ("--data=none.jsonl", "data .*none.jsonl cannot be loaded .*no such directory, or file"),
    ("--data=sums.txt", "sums.txt ends in .txt: convert it"),
    ("--data=rows('sums.jsonl',answer=gold)", "answer=gold: .*sums.jsonl has the columns"),
    ("--eval=held.jsonl", "data .*held.jsonl cannot be loaded .*no such directory, or file"),
    ("--eval=sums.txt", "sums.txt ends in .txt: convert it"),
    ("--model=mine.py", "mine.py is a file: give the directory that holds config.json"),
    ("--model=none", "no such directory: .*none"),
    ("--environment=shop.py:Shp", "shop.py:Shp is no module:Class .*no Shp; there are Shop"),
    ("--environment=shop.py:Shop", "Shop"),
    ("--machine=v9", "--machine=v9: there are v5e-1, v5e-8"),
    ("--minutes=-1", "train.minutes=-1.0 must be at least 0"),
    ("--config.rollout.max_prompt_tokens=8", "rollout.max_prompt_tokens=8: every prompt .* set"),
    ("--config.rollout.max_new_tokens=5000", "max_new_tokens=5000 .*=1024: set rollout.max"),
    ("--config.model.adapter.rank=9999", "model.adapter.rank=9999"),
]


@pytest.mark.parametrize(("flag", "advice"), VALUES)
def test_a_wrong_value_of_jzero_train_is_one_line_and_leaves_no_recipe(
    flag: str,
    advice: str,
    files: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cli, "start_jax", list)  # this process has started it
    monkeypatch.chdir(files)
    flags = {"--model": "model", "--data": "sums.jsonl"}
    name, _, value = flag.partition("=")
    flags[name] = value

    def prepare() -> None:
        request = command.parse([f"{name}={value}" for name, value in flags.items()])
        command.prepare(request, tmp_path / "run")

    line = last_line(prepare, capsys)
    assert re.search(advice, line), line
    assert not (tmp_path / "run").exists()  # the same command with a right value starts afresh


def test_a_folder_that_cannot_be_created_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file/run cannot be created: Not a directory: give"):
        write_once(tmp_path / "file/run/recipe.py", "x")


RECIPES = [
    ("--config=configs/gsm9k.py:tiny", "did you mean configs/gsm8k.py? Recipes are calculator, "),
    ("--config=none.py", "--config none.py: no such file. Recipes are "),
    (f"{TINY},grppo", "no algorithm 'grppo'; there are "),
    (f"--config={ROOT}/configs/gsm8k.py:qwen-7b", "no preset 'qwen-7b' in this recipe; there are"),
    ("--config.train.steps=3", "give a recipe: --config configs/countdown.py"),
]


@pytest.mark.parametrize(("flag", "advice"), RECIPES)
def test_a_wrong_recipe_is_one_line(
    flag: str, advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert advice in last_line(lambda: main.parse([flag]), capsys)


def test_a_recipe_without_its_function_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # ml_collections runs every recipe in one module, which keeps the functions of the last one.
    monkeypatch.delitem(sys.modules, "config_config", raising=False)
    (tmp_path / "mine.py").write_text("x = 1\n")
    line = last_line(lambda: main.parse([f"--config={tmp_path}/mine.py"]), capsys)
    assert "no function get_config" in line


SETTINGS = [
    (["task.name=chess"], "task.name='chess' is not one of countdown, gsm8k"),
    (["task.template=qwen_maths"], "task.template"),
    (["rollout.top_p=2"], "rollout.top_p=2"),
    (["task.verifier=fastest"], "task.verifier='fastest' is not one of"),
    (["model.dtype=float16"], "model.dtype='float16' is not one of"),
    (["task.reward.functions=acuracy"], "acuracy"),
    (["task.reward.functions=none.py:f"], "none.py"),
    (["task.reward.functions=accuracy,nowhere:f"], "nowhere"),
    (["task.reward.functions=MINE:missing"], "missing"),
    (["task.reward.functions=MINE:wrong_arguments"], "completion_text"),
    (["algorithm.advantage=group"], "algorithm.advantage=group is not one of"),
    (["train.save=adapter"], "train.save=adapter is for a run with an adapter"),
    (["model.base=nf4", "model.adapter.rank=8"], "nf4 is a format of bitsandbytes"),
    (["rollout.group_size=1"], "rollout.group_size=1"),
    (["train.minibatches=3"], "train.minibatches=3"),
    (["train.pack=long"], "train.pack=long is not auto, longest or lengths"),
    (["eval.suites=gms8k"], "gms8k"),
    (["hub.push=end"], "hub.push.repo"),
    (["hub.repo=me/x"], "hub.push=none has no repo: end, every_checkpoint have it"),
    (["model.adapter.targets=q"], "has no effect without model.adapter.rank"),
]


@pytest.mark.parametrize(("flags", "advice"), SETTINGS)
def test_settings_that_cannot_work_are_one_line(
    flags: list[str], advice: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("def wrong_arguments(completion_text):\n    return 1.0\n")
    arguments = [f"--config.{flag}".replace("MINE", str(mine)) for flag in flags]

    def check() -> None:
        setup.check(main.parse([TINY, *arguments]).settings, tmp_path / "run")

    line = last_line(check, capsys)
    assert advice in line, line
    assert not (tmp_path / "run").exists()


GOOD = '{"question": "1+1?", "answer": "2"}\n'
DATA = [
    ({"data": GOOD}, ["task.problem_column=questoin"], "did you mean question?"),
    ({"data": GOOD}, ["task.answer_column=gold"], "answer=gold: "),
    ({"data": ""}, [], "train.jsonl is empty: it needs a row"),
    ({"data": GOOD + GOOD + "{\n"}, [], "line 3"),
    ({"data": '{"text": "a"}\n'}, [], "has columns text: name one, as in rows("),
    ({"data": GOOD, "eval": GOOD}, [], "all of its 1 problems are held out"),
    ({"txt": "question,answer\n1,2\n"}, [], "train.txt ends in .txt: convert it to one of .json"),
    ({}, [], "train.jsonl"),
]


@pytest.mark.parametrize(("files", "flags", "advice"), DATA)
def test_data_that_cannot_be_used_are_one_line(
    files: dict[str, str],
    flags: list[str],
    advice: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = {"data": "train.jsonl", "eval": "held.jsonl", "txt": "train.txt"}
    for name, text in files.items():
        (tmp_path / names[name]).write_text(text)
    source = tmp_path / names["txt" if "txt" in files else "data"]
    arguments = [f"--config.{flag}" for flag in flags] + [f"--config.task.data={source}"]
    if "eval" in files:
        arguments.append(f"--config.task.eval_data={tmp_path / names['eval']}")

    def load() -> None:
        task = main.parse([TINY, *arguments]).settings.task
        find_task(task.name).num_train_problems(task)

    line = last_line(load, capsys)
    assert advice in line, line
    assert str(tmp_path) in line


def test_a_workdir_is_no_model(tmp_path: Path) -> None:
    for name in ("config.json", "versions.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(UserError, match="is the workdir of a run, and no model: export it first"):
        huggingface.load_config(tmp_path)
    (tmp_path / "export-4").mkdir()
    with pytest.raises(UserError, match="give its newest export, .*export-4"):
        huggingface.load_config(tmp_path)


def test_a_workdir_of_another_run_names_few_settings(tmp_path: Path) -> None:
    from jzero.config import to_json
    from jzero.run.workdir import check_workdir

    other = Config()
    other.rollout.num_prompts, other.rollout.group_size, other.rollout.top_k = 3, 3, 3
    other.rollout.max_new_tokens, other.optimizer.lr, other.train.epochs = 3, 3.0, 3
    (tmp_path / "config.json").write_text(to_json(other))
    with pytest.raises(UserError, match="and 3 more settings") as refused:
        check_workdir(tmp_path, to_json(Config()))
    assert len(str(refused.value)) < 400


def test_every_other_name_leads_to_a_setting() -> None:
    settings = {setting.name for setting in list_settings(Config())}
    last_parts = {name.rpartition(".")[2] for name in settings}
    for name, setting in OTHER_NAMES.items():
        assert setting == "--workdir" or setting in known_names(), name
        assert name not in last_parts, name  # it would hide the setting
    assert unknown_names(["num_generations"]) == (
        "no field num_generations; it is rollout.group_size here"
    )


def test_show_prints_where_each_value_comes_from(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [TINY, "--config.rollout.group_size=8", "--config.train.microbatch_tokens=0"]
    with pytest.raises(SystemExit) as ended:
        main.parse([*arguments, "--show", "--price=2.5"])
    assert ended.value.code == 0
    origins = {}
    for line in capsys.readouterr().out.splitlines():
        value, _, origin = line.rpartition("  # ")
        origins[value.strip()] = origin
    assert origins["rollout.group_size=8"] == "flag"
    assert origins["train.price=2.5"] == "flag"
    assert origins["task.name=gsm8k"] == "recipe"
    assert origins["model.remat=full"] == "default"
    assert len(origins) > 150
