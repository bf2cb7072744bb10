"""`jzero train` on data sets and rewards in the layouts that other trainers document."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import tiny

from jzero import main
from jzero.algorithms import PRESETS
from jzero.algorithms.algorithm import Mask
from jzero.config import Config, TaskConfig
from jzero.errors import UserError
from jzero.loops.rl import set_up
from jzero.rewards import rewards, trl_rewards, user_functions
from jzero.setup import evaluation_problems, resolve
from jzero.sizing import command
from jzero.sizing import flags as train_flags
from jzero.sizing.recipe import FILE
from jzero.tasks import find_task
from jzero.types import Grade, Problem
from jzero.workers.pool import Pool

pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")  # of a recipe

QUESTIONS = [f"What is {i} + 3?" for i in range(12)]
ANSWERS = [str(i + 3) for i in range(12)]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


SYSTEM = {"role": "system", "content": "Think step by step."}

# Rows by the layout: from a question, its answer and its number.
LAYOUTS: dict[str, Callable[[str, str, int], dict]] = {
    # TRL: prompt-only, standard and conversational; prompt-completion, conversational.
    "trl_text": lambda q, a, i: {"prompt": q},
    "trl_prompt": lambda q, a, i: {"prompt": [user(q)]},
    "trl_conversational": lambda q, a, i: {
        "prompt": [user(q)],
        "completion": [assistant(f"The answer is {a}.")],
    },
    "trl_solution": lambda q, a, i: {"prompt": [SYSTEM, user(q)], "solution": a},
    # verl: a structure with the answer.
    "verl": lambda q, a, i: {
        "data_source": "sums",
        "prompt": [user(q)],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": a},
        "extra_info": {"index": i, "split": "train"},
    },
    "trl_ground_truth": lambda q, a, i: {"prompt": q, "ground_truth": a},
    # open-r1: NuminaMath, and programs with stdin.
    "numina": lambda q, a, i: {
        "problem": q,
        "solution": f"{i} and 3 are ${a}$. So it is \\boxed{{{a}}}.",
        "messages": [user(q), assistant(f"So it is \\boxed{{{a}}}.")],
    },
    "verifiable_code": lambda q, a, i: {
        "task_type": "verifiable_code",
        "prompt": f"Read a number n and print n plus {i}.",
        "gold_standard_solution": f"print(int(input()) + {i})",
        "verification_info": {
            "language": "python",
            "test_cases": [
                {"input": "1\n", "output": f"{1 + i}\n", "type": "stdin_stdout"},
                {"input": "5\n", "output": f"{5 + i}\n", "type": "stdin_stdout"},
            ],
        },
    },
    # OpenRLHF: --input_key and --label_key.
    "openrlhf": lambda q, a, i: {"input": q, "label": a},
    "openrlhf_context": lambda q, a, i: {"context_messages": [user(q)], "answer": a},
    # slime, AReaL, prime-rl, Tulu's RLVR, NeMo.
    "slime": lambda q, a, i: {"prompt": [user(q)], "label": a, "metadata": {"rm_type": "math"}},
    "areal": lambda q, a, i: {
        "prompt": q,
        "task": "math",
        "query_id": str(i),
        "solutions": [f"\\boxed{{{a}}}"],
    },
    "prime": lambda q, a, i: {"prompt": [user(q)], "answer": a, "info": "{}", "task": "sums"},
    "tulu": lambda q, a, i: {"messages": [user(q)], "ground_truth": [a], "dataset": ["sums"]},
    "nemo": lambda q, a, i: {"problem": q, "expected_answer": a},
    # OpenAI: chats for fine-tuning, with answers and with prose.
    "openai": lambda q, a, i: {"messages": [SYSTEM, user(q), assistant(f"Easy.\n#### {a}")]},
    "openai_prose": lambda q, a, i: {
        "messages": [user(f"Tell me about {i}."), assistant("It is a number.\nA fine one indeed.")]
    },
    "openai_asked": lambda q, a, i: {"messages": [SYSTEM, user(q)]},
    # MBPP, full and sanitized.
    "mbpp": lambda q, a, i: {
        "task_id": i,
        "text": f"Write a function plus{i}(x) that adds {i}.",
        "code": f"def plus{i}(x):\n    return x + {i}",
        "test_list": [f"assert plus{i}(1) == {i + 1}", f"assert plus{i}(-1) == {i - 1}"],
        "test_setup_code": "",
    },
    "mbpp_sanitized": lambda q, a, i: {
        "prompt": f"Write a function plus{i}(x) that adds {i}.",
        "test_list": [f"assert plus{i}(2) == {i + 2}"],
        "test_imports": [],
    },
    "gsm8k": lambda q, a, i: {"question": q, "answer": f"{a} = {a}\n#### {a}"},
    "same_question": lambda q, a, i: {"question": "What is 1 + 1?", "answer": "2"},
}
WITHOUT_ANSWERS = ("trl_text", "trl_prompt", "openai_prose", "openai_asked")
WITH_TESTS = ("mbpp", "mbpp_sanitized", "verifiable_code")

REWARDS_FILE = '''
def own(response, gold, task):
    """jzero's form."""
    return 1 / (1 + len(response))

def lengths(completions, **kwargs):
    """TRL's own example."""
    return [-abs(20 - len(c if isinstance(c, str) else c[0]["content"])) for c in completions]

def against_solution(completions, solution, **kwargs):
    """TRL's form, with a column."""
    return [float(s in str(c)) for c, s in zip(completions, solution)]

def against_tests(completions, test_list, **kwargs):
    return [float(len(tests)) for tests in test_list]

def of_environments(environments, **kwargs):
    return [0.0 for _ in environments]
'''
REWARDS = (
    "",
    "my.py:own",
    "my.py:lengths",
    "my.py:against_solution",
    "my.py:against_tests",
    "my.py:of_environments",
    "code",
    "binary_code",
    "code_format",
    "format",
    "accuracy",
    "cosine",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with a model, rewards and a file of each layout."""
    folder = tmp_path_factory.mktemp("layouts")
    tiny.save_byte_model(folder / "model")
    (folder / "my.py").write_text(REWARDS_FILE)
    for name, row in LAYOUTS.items():
        pairs = zip(QUESTIONS, ANSWERS, strict=True)
        rows = [row(question, answer, i) for i, (question, answer) in enumerate(pairs)]
        write(folder / f"{name}.jsonl", rows)
    return folder


def write(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture
def dry_run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Config]:
    """Returns a function that makes a dry run in the folder and returns the settings."""
    monkeypatch.setattr(command.cli, "start_jax", list)  # this process has started it
    monkeypatch.chdir(folder)
    workdir = tmp_path / "run"

    def run(layout: str, *flags: str) -> Config:
        data = layout if "." in layout else f"{layout}.jsonl"
        request = train_flags.parse(["--model=model", f"--data={data}", "--dry-run", *flags])
        command.prepare(request, workdir)
        return main.parse([f"--config={workdir / FILE}"]).settings

    return run


def first_problems(settings: Config) -> list[Problem]:
    """Returns the problems of the first step."""
    draw = find_task(settings.task.name).train_problems
    return draw(settings.task, settings.train.seed, 1, settings.rollout.num_prompts)


def start(settings: Config, workdir: Path) -> None:
    """Sets up a run as the trainer does, and calls its rewards on the problems of a step."""
    resolved = resolve(settings, workdir)
    with Pool(0) as pool:
        run, _ = set_up(resolved, workdir, pool)
        evaluation_problems(run)
        encoded = run.sampler.encode_problems(first_problems(settings))
    problems = [item.problem for item in encoded]
    assert problems
    call_rewards(settings.task, problems)


def call_rewards(task: TaskConfig, problems: list[Problem]) -> None:
    """Calls the user's rewards; asserts that each reward applies to a problem."""
    response = "```python\ndef plus1(x):\n    return x + 1\n```"
    conversations = [
        user_functions.conversation(problem.prompt, response, []) for problem in problems
    ]
    scored = []
    for name in task.reward.functions:
        if rewards.find_built_in(name) is None and user_functions.is_of_trl(name):
            ids = [None] * len(problems)
            lists = trl_rewards.lists_of(problems, conversations, ids, trl_rewards.TrainerState())
            function = user_functions.find_function(name)
            values = function(**trl_rewards.arguments(function, lists, trl_rewards.Logs()))
            assert isinstance(values, list)
            assert len(values) == len(problems)
            scored.append(name)
    if "code" in task.reward.functions or "binary_code" in task.reward.functions:
        assert all(problem.gold["tests"] for problem in problems)
        return
    grade = Grade(0.0, False, "")
    parts = rewards.add_response_rewards(grade, response, problems[0].gold, task).parts
    elsewhere = {"accuracy", "cosine", *scored}
    assert set(task.reward.functions) - elsewhere == set(parts)


def is_fine(layout: str, reward: str) -> bool:
    """Returns whether a reward can score the problems of a layout."""
    needs = {
        "my.py:against_solution": ("trl_solution", "numina"),
        "my.py:against_tests": ("mbpp", "mbpp_sanitized"),  # rows with a column test_list
    }
    needs |= {"code": WITH_TESTS, "binary_code": WITH_TESTS, "my.py:of_environments": ()}
    if reward in needs:
        return layout in needs[reward]
    return layout not in WITHOUT_ANSWERS or reward not in ("", "accuracy", "cosine")


PAIRS = [(layout, reward) for layout in LAYOUTS for reward in REWARDS]


@pytest.mark.parametrize(("layout", "reward"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
def test_a_dry_run_is_fine_if_and_only_if_the_run_can_start(
    layout: str, reward: str, dry_run: Callable[..., Config], tmp_path: Path
) -> None:
    flags = [f"--reward={reward}"] if reward else []

    try:
        settings = dry_run(layout, *flags)
    except UserError as error:
        assert not is_fine(layout, reward), error
        assert "\n" not in str(error)
        assert not (tmp_path / "run").exists()
        return
    assert is_fine(layout, reward)
    start(settings, tmp_path / "started")


@pytest.mark.parametrize(
    ("layout", "task", "answers"),
    [
        ("trl_conversational", "math", ANSWERS),
        ("trl_solution", "math", ANSWERS),
        ("trl_ground_truth", "math", ANSWERS),
        ("openrlhf", "math", ANSWERS),
        ("openrlhf_context", "math", ANSWERS),
        ("slime", "math", ANSWERS),
        ("prime", "math", ANSWERS),
        ("tulu", "math", ANSWERS),
        ("nemo", "math", ANSWERS),
        ("verifiable_code", "code", None),
        ("verl", "math", ANSWERS),
        ("openai", "math", ANSWERS),
        ("gsm8k", "math", ANSWERS),
        ("mbpp", "code", None),
        ("mbpp_sanitized", "code", None),
    ],
)
def test_a_documented_layout_is_read_unmodified(
    layout: str, task: str, answers: list[str] | None, dry_run: Callable[..., Config]
) -> None:
    settings = dry_run(layout)

    assert settings.task.name == task
    assert settings.task.reward.functions == ("accuracy",)
    problems = first_problems(settings)
    assert problems
    for problem in problems:
        assert isinstance(problem.prompt, list)
        assert problem.prompt[-1]["role"] == "user"
        if answers is None:
            assert problem.gold["tests"]
        else:
            answer = problem.gold["answer"]
            assert answer in answers
            assert answer == ANSWERS[QUESTIONS.index(problem.gold["question"])]
            # "3" is a digit of many questions: the answer is in no other message.
            assert all(f"#### {answer}" not in message["content"] for message in problem.prompt)
    if answers is not None:
        assert settings.task.options[-1] == "answer_mark=number"


def test_the_last_message_of_the_assistant_is_measured_as_a_solution(
    dry_run: Callable[..., Config], folder: Path
) -> None:
    long = "Let me see. " * 60 + "\\boxed{x + 1}"
    rows = [{"messages": [user(f"{i}?"), assistant(long)]} for i in range(12)]
    write(folder / "long.jsonl", rows)

    settings = dry_run("long")

    assert settings.rollout.max_prompt_tokens < 100
    assert settings.rollout.max_new_tokens > 800
    assert settings.task.options == ("answer_mark=stated",)
    assert first_problems(settings)[0].gold["answer"] == "x + 1"


def test_conversations_without_final_answers_need_a_reward(dry_run: Callable[..., Config]) -> None:
    with pytest.raises(UserError, match="state no final answer .*: give --reward FILE.py:FUNCTION"):
        dry_run("openai_prose")

    settings = dry_run("openai_prose", "--reward=my.py:own")

    assert settings.task.name == "open"
    problem = first_problems(settings)[0]
    assert problem.gold["answer"] == "It is a number.\nA fine one indeed."
    assert problem.prompt == [user(f"Tell me about {problem.gold['question'].split()[-1]}")]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("code", "functions=code runs programs, and the problems .* have no tests: set"),
        ("my.py:against_tests", "requires the parameter test_list, and the rows have the columns"),
        ("my.py:of_environments", "requires the parameter environments, and task.name=math has no"),
    ],
)
def test_a_reward_that_cannot_apply_is_refused_before_the_first_step(
    reward: str, message: str, dry_run: Callable[..., Config]
) -> None:
    with pytest.raises(UserError, match=message):
        dry_run("gsm8k", f"--reward={reward}")


# -- flags -----------------------------------------------------------------------------------------


def test_rewards_are_added_with_their_weights(dry_run: Callable[..., Config], folder: Path) -> None:
    flags = ["--reward=accuracy", "--reward", "my.py:own", "--reward=my:lengths"]

    settings = dry_run("gsm8k", *flags, "--reward-weights=1,0.5,0.1")

    file = folder / "my.py"
    functions = ("accuracy", f"{file}:own", f"{file}:lengths")
    assert settings.task.reward.functions == functions
    assert settings.task.reward.weights == (1.0, 0.5, 0.1)


def test_a_module_of_the_current_directory_is_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nearby.py").write_text(REWARDS_FILE)
    (tmp_path / "json.py").write_text("")
    monkeypatch.chdir(tmp_path)

    names = ["nearby:own", "trl:nearby:lengths", "nearby:make(x='a:b')", "json:dumps", "none:f"]
    found = [command.with_absolute_file(name) for name in names]
    with pytest.raises(UserError, match="nearby is a file, .*: write nearby.py:own"):
        rewards.check_function("nearby:own")
    monkeypatch.syspath_prepend(tmp_path)  # as with python -m

    file = tmp_path / "nearby.py"
    assert found[:3] == [f"{file}:own", f"trl:{file}:lengths", f"{file}:make(x='a:b')"]
    assert found[3:] == names[3:]
    assert command.with_absolute_file("nearby:own") == f"{file}:own"


def test_weights_need_a_reward_each(
    dry_run: Callable[..., Config], capsys: pytest.CaptureFixture[str]
) -> None:
    for flags, message in (
        (["--reward=my.py:own", "--reward-weights=1,2"], "--reward-weights=1,2: give a weight for"),
        (["--reward=my.py:own", "--reward-weights=high"], "--reward-weights=high: give a number"),
    ):
        with pytest.raises(SystemExit):
            dry_run("gsm8k", *flags)
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", PRESETS)
def test_an_algorithm_of_the_command_line_is_in_the_recipe(
    name: str, dry_run: Callable[..., Config]
) -> None:
    # Some algorithms need settings besides their preset: the message names them.
    try:
        settings = dry_run("gsm8k", f"--algorithm={name}", "--config.algorithm.truncated=mask")
    except UserError as error:
        assert "=" in str(error)
        return
    assert settings.algorithm == replace(PRESETS[name](), truncated=Mask())


def test_an_unknown_algorithm_names_a_similar_one(dry_run: Callable[..., Config]) -> None:
    with pytest.raises(UserError, match="--algorithm=drgrpo: no such .* did you mean dr_grpo"):
        dry_run("gsm8k", "--algorithm=drgrpo")


def test_passes_count_the_rows_that_are_trained_on(dry_run: Callable[..., Config]) -> None:
    settings = dry_run("gsm8k")

    assert find_task("math").num_train_problems(settings.task) == 11  # of 12
    assert settings.rollout.num_prompts * settings.train.steps == 3 * 11 // 4 * 4


def test_a_workdir_by_itself_continues_its_recipe(
    dry_run: Callable[..., Config], tmp_path: Path
) -> None:
    before = dry_run("gsm8k", "--reward=my.py:own", "--algorithm=dr_grpo")
    workdir = tmp_path / "run"
    request = train_flags.parse([f"--workdir={workdir}", "--config.train.steps=7", "--dry-run"])

    settings = command.prepare(request, workdir)

    assert settings == replace(before, train=replace(before.train, steps=7))
    for flag in ("--reward=my.py:lengths", "--algorithm=grpo", "--lora", "--eval=verl.jsonl"):
        with pytest.raises(
            UserError, match=f"{flag.partition('=')[0]}=.* is a run with .* only flag"
        ):
            flags = [f"--workdir={workdir}", "--model=model", "--data=gsm8k.jsonl", flag]
            command.prepare(train_flags.parse(flags), workdir)


def test_a_workdir_without_a_recipe_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command.cli, "start_jax", list)
    with pytest.raises(UserError, match="has no recipe.py of jzero train: continue its run with"):
        command.prepare(train_flags.parse([f"--workdir={tmp_path}"]), tmp_path)
