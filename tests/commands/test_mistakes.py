"""Mistakes that people type, each with the one line that it must end in.

The line names the flag, setting, file or column, and what to write. Names of TRL, verl and OpenRLHF
lead to the page that lists them, and close misspellings to the setting that was meant.
"""

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import tiny

from jzero import cli, main, setup
from jzero.config import Config
from jzero.errors import UserError
from jzero.hosts.processes import write_once
from jzero.model import huggingface
from jzero.sizing import command
from jzero.sizing import flags as train_flags
from jzero.tasks import find_task

ROOT = Path(__file__).resolve().parents[2]
TINY = f"--config={ROOT}/configs/gsm8k.py:tiny"


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


START_PAGE = "docs/start.md lists the settings by their names in TRL, oat, verl and others"
# Names of TRL, verl, OpenRLHF, open-r1, oat and AReaL.
FOREIGN = [
    "--num_generations=8",
    "--max_completion_length=512",
    "--max_prompt_length=512",
    "--learning_rate=1e-5",
    "--output_dir=runs/x",
    "--model_name_or_path=gpt2",
    "--actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    "--data.train_batch_size=64",
    "--trainer.total_epochs=2",
    "--save_strategy=epoch",
    "--wandb_project=p",
    "--sync_params_every=2",
    "--save_steps=-1",
    "--eval_input_key=question",
    "--eval_output_key=answer",
    "--critic_max_step_adjustment=8",
    "--oracle_type=reward",
    "--hub_model_revision=main",
    "--config.rollout.num_generations=8",
    "--config.optimizer.learning_rate=1",
    "--config.train.save_steps=5",
    "--config.train.max_grad_norm=1",
    "--config.benchmarks=math_500",
    "--config.overwrite_hub_revision=True",
    "--config.hub_strategy=epoch",
    "--config.wandb_entity=me",
    "--config.load_in_4bit=True",
    "--config.use_peft=True",
    "--config.lora_dropout=0.1",
    "--config.answer_save_path=d",
    "--config.train.wandb_name=x",
]


@pytest.mark.parametrize("flag", FOREIGN)
def test_a_name_of_another_trainer_leads_to_the_page_with_these_names(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = last_line(lambda: main.parse([TINY, flag]), capsys)
    assert line.startswith(f"{flag}: ")
    assert line.endswith(START_PAGE)
    assert len(line) < 300
    assert last_line(lambda: main.check_arguments([TINY, flag]), capsys) == line


FLAGS = [
    ("--config.callbacks=x", "did you mean train.callbacks?"),
    # Settings without `config.`.
    ("--optimizer.lr=1e-5", "write --config.optimizer.lr=1e-5"),
    ("--rollout.group_size=8", "write --config.rollout.group_size=8"),
    ("--model.path=gpt2", "write --config.model.path=gpt2"),
    # Settings without their section.
    ("--lr=1e-5", "write --config.optimizer.lr=1e-5 or --config.critic.lr=1e-5 or"),
    ("--max_new_tokens=100", "write --config.rollout.max_new_tokens=100 or --config.eval.max_new_"),
    ("--steps=5", "--config.train.steps=5"),
    ("--num_pages=5", "write --config.rollout.num_pages=5"),
    # Misspellings: only the right one, if nothing else is close.
    ("--config.rollout.group_sise=4", "did you mean rollout.group_size?"),
    ("--config.rollout.groupsize=4", "did you mean rollout.group_size?"),
    ("--config.group_size=4", "did you mean rollout.group_size?"),
    ("--config.train.group_size=4", "did you mean rollout.group_size?"),
    ("--config.rolout.max_new_tokens=4", "did you mean rollout.max_new_tokens"),
    ("--config.train.microbatch_token=4", "did you mean train.microbatch_tokens?"),
    ("--config.optimizer.weight_deca=0", "did you mean optimizer.weight_decay?"),
    ("--config.task.reward.function=x", "did you mean task.reward.functions?"),
    ("--config.model.adapter.ranks=8", "did you mean model.adapter.rank?"),
    ("--config.algorithm.surrogate.hgih=8", "did you mean algorithm.surrogate.high"),
    ("--config.eval.problem=8", "did you mean eval.problems?"),
    ("--config.train.pack_length=8", "did you mean sft.pack_length?"),
    # Names that nothing is close to, with the help on the place.
    ("--config.zzz=1", "there is no setting zzz; --help lists all"),
    ("--config.train.zzz=1", "there is no setting train.zzz; --help train lists all"),
    ("--config.algorithm.surrogate.zzz=1", "--help algorithm.surrogate lists all"),
    ("--config.model.arch.head_dmi=1", "did you mean model.arch.head_dim?"),
    ("--config.model.arch.zzz=1", "--help model.arch lists all"),
    ("--config.rollout=1", "rollout is a section: write --config.rollout.NAME=VALUE"),
    # Values.
    ("--config.rollout.group_size=many", "rollout.group_size=many must be a whole number"),
    ("--config.rollout.group_size=0", "rollout.group_size=0 must be at least 1"),
    ("--config.rollout.num_slots=-1", "rollout.num_slots=-1 must be at least 0"),
    ("--config.optimizer.lr=-1", "optimizer.lr=-1.0 must be at least 0"),
    ("--config.train.seed=1.5", "train.seed=1.5 must be a whole number"),
    ("--config.rollout.temperature=inf", "rollout.temperature=inf must be a finite number"),
    ("--config.model.dtype=float16", "model.dtype=float16 is not one of bfloat16, float32"),
    ("--config.task.verifier=fastest", "task.verifier=fastest is not one of fast"),
    ("--config.model.base=nf4", "model.base=nf4 is not one of native, int8"),
    ("--config.algorithm.advantage=group", "algorithm.advantage=group is not one of group_mean"),
    ("--config.algorithm.surrogate=clip(hi=3)", "there is no hi; did you mean high?"),
    ("--config.algorithm.surrogate.high=-3", "algorithm.surrogate.high=-3.0 must be at least 0"),
    ("--config.hub.repo=me/x", "did you mean hub.push.repo?"),
    ("--config.rollout.top_k", "give a value, as in --config.rollout.top_k=VALUE"),
    # Flags of the command.
    ("--confg=x", "did you mean --config=x?"),
    ("--work_dir=x", "did you mean --workdir=x?"),
    ("--unfinished_status=300", "--unfinished_status: 300 is not an exit status: give 0 to 255"),
    ("-x", "-x: unknown argument; settings are given as --config.section.field=VALUE"),
    ("stray", "stray: unknown argument"),
]


@pytest.mark.parametrize(("flag", "advice"), FLAGS)
def test_a_wrong_flag_is_one_line(
    flag: str, advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = last_line(lambda: main.parse([TINY, flag]), capsys)
    assert advice in line, line
    assert len(line) < 400
    # The command finds it before the recipe is read and JAX is imported.
    assert last_line(lambda: main.check_arguments([TINY, flag]), capsys) == line


TRAIN = [
    ("--rewards=my.py:f", "--rewards=my.py:f: did you mean --reward=my.py:f?"),
    ("--env=shop.py:Shop", "did you mean --environment=shop.py:Shop?"),
    ("--eval_data=x", "did you mean --eval=x?"),
    ("--use_peft", START_PAGE),
    ("--dataset_name=x", START_PAGE),
    ("--work_dir=x", "did you mean --workdir=x?"),
    ("--lr=1e-5", "write --config.optimizer.lr=1e-5 or"),
    ("--learning_rate=1e-5", START_PAGE),
    ("stray", "stray: unknown argument; settings are given as --config"),
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
        train_flags.parse(["--model=m", "--data=d", flag]).apply(Config())

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
    ("--environment=shop.py:Shp", "shop.py:Shp is not a module:Class .*no Shp; there are Shop"),
    ("--environment=shop.py:Shop", "Shop"),
    ("--machine=v9", "--machine=v9: there are v5e-1, v5e-8"),
    ("--minutes=-1", "^minutes=-1.0 must be at least 0"),
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
        request = train_flags.parse([f"{name}={value}" for name, value in flags.items()])
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


@pytest.mark.parametrize(("flag", "advice"), RECIPES, ids=lambda text: text.replace(f"{ROOT}/", ""))
def test_a_wrong_recipe_is_one_line(
    flag: str, advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert advice in last_line(lambda: main.parse([flag]), capsys)


def test_a_recipe_without_its_function_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text("x = 1\n")
    line = last_line(lambda: main.parse([f"--config={tmp_path}/mine.py"]), capsys)
    assert "no function get_config" in line


MISTAKES_OF_RECIPES = [
    ("settings.rollout.group_sise = 4", "there is no group_sise; did you mean group_size?"),
    ("settings.rollout.group_size = 0", "rollout.group_size=0 must be at least 1"),
    (
        "settings.rollout.group_size = '8'",
        "rollout.group_size='8' must be a whole number, not text",
    ),
    ("settings.algorithm.surrogate = 'clip'", "algorithm.surrogate=clip is text, and a recipe"),
    ("settings.algorithm.surrogate.high = 3.0", "clip.high=3.0: a Clip is a value that cannot be"),
    ("settings.train = config.EvalConfig()", "must be a TrainConfig"),
    ("settings.train = config.TrainConfig(stepz=3)", "train.stepz=3: there is no stepz; did you"),
    ("settings.x()", "'Config' object has no attribute 'x'"),
]


@pytest.mark.parametrize(("line", "advice"), MISTAKES_OF_RECIPES)
def test_a_mistake_in_a_recipe_is_one_line_with_its_place(
    line: str, advice: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "mine.py"
    start = "from jzero import config\n\ndef get_config():\n    settings = config.Config()\n"
    recipe.write_text(f"{start}    {line}\n")
    message = last_line(lambda: main.parse([f"--config={recipe}"]), capsys)
    assert message.startswith(f"--config {recipe}, line 5: ")
    assert advice in message


RECIPES_WITH_MISTAKES = {
    "a wrong preset": ("", "no preset 'tinyy' in this recipe"),
    "a wrong name": (
        "settings.rollout.group_sise = 4",
        "line 5: rollout.group_sise=4: there is no",
    ),
    "a wrong value": ("settings.train.steps = -1", "line 5: train.steps=-1 must be"),
    "a fault": ("settings.x()", "line 5: AttributeError"),
    "a missing package": ("import nowhere_at_all", "line 5: ModuleNotFoundError"),
    "a syntax error": ("settings.x(", "line 5: "),
}
MOST_SECONDS = 1.0  # of the processor, for a command line with a mistake
SECONDS_WITH_TASKS = 2.0  # with the import of the tasks, for a mistake that only a task can know


def refuse_before_jax(module: str, arguments: Sequence[str]) -> tuple[str, float]:
    """Returns the line that a command ends with, and its seconds; asserts that JAX stays out."""
    program = (
        "import resource, runpy, sys\n"
        f"sys.argv = [{module!r}, *{list(arguments)!r}]\n"
        "try:\n"
        f"    runpy.run_module({module!r}, run_name='__main__')\n"
        "finally:\n"
        "    used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "    print('jax' in sys.modules, used.ru_utime + used.ru_stime)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2, done.stderr
    [message] = done.stderr.splitlines()
    has_jax, seconds = done.stdout.split()
    assert has_jax == "False"
    return message, float(seconds)


@pytest.mark.parametrize("mistake", RECIPES_WITH_MISTAKES)
def test_a_mistake_in_a_recipe_takes_less_than_a_second(mistake: str, tmp_path: Path) -> None:
    line, advice = RECIPES_WITH_MISTAKES[mistake]
    recipe = f"{ROOT}/configs/countdown.py:tinyy"
    if line:
        recipe = str(tmp_path / "mine.py")
        start = "from jzero import config\n\ndef get_config():\n    settings = config.Config()\n"
        Path(recipe).write_text(f"{start}    {line}\n    return settings\n")
    message, seconds = refuse_before_jax("jzero.main", [f"--config={recipe}"])
    assert advice in message
    assert seconds < MOST_SECONDS


# The other commands that read a recipe, with the flags that they need.
COMMANDS_WITH_RECIPES = {
    "jzero.plan": ["--topology=v5e:2x4"],
    "jzero.plan for a machine": ["--machine=v5e-8"],
    "jzero.plan for this machine": ["--machine=here"],
    "jzero.loops.grpo_loop": [],
}
MISTAKES_IN_COMMANDS = {
    "configs/countdown.py:tinyy": "no preset 'tinyy' in this recipe",
    "configs/countdwn.py": "did you mean configs/countdown.py?",
    "configs/countdown.py:tiny --config.train.steps=-1": "train.steps=-1 must be at least 0",
    "configs/countdown.py:tiny --config.task.data=rows(x": "task.data=rows(x: close the bracket",
    "configs/countdown.py:tiny --config.task.options=value_max": "task.options=value_max has no",
}


@pytest.mark.parametrize("mistake", MISTAKES_IN_COMMANDS)
@pytest.mark.parametrize("command", COMMANDS_WITH_RECIPES)
def test_every_command_with_a_recipe_reports_a_mistake_in_less_than_a_second(
    command: str, mistake: str
) -> None:
    arguments = [*COMMANDS_WITH_RECIPES[command], "--config", *mistake.split()]
    message, seconds = refuse_before_jax(command.split()[0], arguments)
    assert MISTAKES_IN_COMMANDS[mistake] in message
    assert seconds < MOST_SECONDS


WRONG_COMBINATIONS = {
    "--config.task.options=value_mx=9": "value_mx=9 is not an option of this task; did you mean",
    "--config.task.options=value_max=x": "task.options=value_max=x must be a whole number",
    "--config.task.name=countdwn": "task.name='countdwn' is not one of",
    "--config.train.minibatches=7": "train.minibatches=7 does not divide",
    "--config.eval.every=5 --config.eval.problems=0": "eval.every=5 has no problems",
}


@pytest.mark.parametrize("flags", WRONG_COMBINATIONS)
def test_settings_that_do_not_fit_each_other_or_the_task_are_refused_before_jax(
    flags: str,
) -> None:
    recipe = f"--config={ROOT}/configs/countdown.py:tiny"
    message, seconds = refuse_before_jax("jzero.main", [recipe, *flags.split()])
    assert WRONG_COMBINATIONS[flags] in message
    assert seconds < SECONDS_WITH_TASKS


IMPORTS = {
    "jax itself": "import jax\n",
    "a module that imports jax": "from jzero.model import qwen\n",
    "a choice by a missing package": (
        "try:\n    import jax\nexcept ImportError:\n    raise SystemExit('jax is missing')\n"
    ),
}


@pytest.mark.parametrize("imports", IMPORTS)
def test_a_recipe_may_import_jax(imports: str, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.py"
    recipe.write_text(
        f"{IMPORTS[imports]}import jax\nfrom jzero import config\n\n"
        "def get_config():\n    return config.Config(name=f'on-{jax.device_count()}')\n"
    )
    program = (
        "import sys\n"
        "from jzero import cli, main\n"
        "assert main.check_arguments(sys.argv[1:]) is None\n"
        "print(main.parse(cli.start_jax(sys.argv[1:])).settings.name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, f"--config={recipe}"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"on-\d+\n", done.stdout)


SETTINGS = [
    (["task.name=chess"], "task.name='chess' is not one of countdown, gsm8k"),
    (["task.template=qwen_maths"], "task.template"),
    (["rollout.top_p=2"], "rollout.top_p=2"),
    (["task.reward.functions=acuracy"], "acuracy"),
    (["task.reward.functions=none.py:f"], "none.py"),
    (["task.reward.functions=accuracy,nowhere:f"], "nowhere"),
    (["task.reward.functions=MINE:missing"], "missing"),
    (["task.reward.functions=MINE:wrong_arguments"], "completion_text"),
    (["train.save=adapter"], "train.save=adapter is for a run with an adapter"),
    (["rollout.group_size=1"], "rollout.group_size=1"),
    (["train.minibatches=3"], "train.minibatches=3"),
    (["train.pack=long"], "train.pack=long is not auto, longest or lengths"),
    (["eval.suites=gms8k"], "gms8k"),
    (["hub.push=end"], "hub.push.repo"),
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
    ({"data": GOOD}, ["task.data.problem=questoin"], "did you mean question?"),
    ({"data": GOOD}, ["task.data.answer=gold"], "answer=gold: "),
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


def test_the_flags_of_jzero_train_are_read_without_jax() -> None:
    script = (
        "import sys; from jzero.sizing import flags; sys.argv = ['jzero', '--model=m', '--dta=d']\n"
        "try: flags.main()\nfinally: print({'jax', 'numpy'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout.strip() == "set()"
    assert "did you mean --data" in done.stderr
