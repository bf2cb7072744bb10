"""gsm8k and math: sets of every kind, mixtures, rows that are dropped, templates, a whole run."""

import collections
import importlib.util
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import datasets
import pytest
from runs import read_jsonl, write_jsonl

from jzero import config, setup
from jzero.commands import evaluate
from jzero.config import Rows
from jzero.errors import UserError
from jzero.files import split_commas
from jzero.loops import rl as train
from jzero.model import chat_template, tokenizer
from jzero.problems import problem_sets
from jzero.problems.prompts import MATH_TEMPLATES
from jzero.tasks import TASKS, countdown, math_problems, suites
from jzero.types import Problem

ROOT = Path(__file__).resolve().parents[2]
ROW = problem_sets.Row("How many?", "1")


def question_rows(count: int, name: str = "p") -> list[dict[str, Any]]:
    rows = []
    for i in range(count):
        rows.append({"problem": f"{name} {i}", "answer": str(i), "level": f"Level {1 + i % 5}"})
    return rows


def math_task(data: str, **changes: Any) -> config.TaskConfig:
    return config.TaskConfig(name="math", data=data, template="no", **changes)


def prompts_of(problems: list[Problem]) -> list[str]:
    return [str(problem.prompt) for problem in problems]


def steps_of_one_problem(
    task: config.TaskConfig, seed: int, start: int, stop: int
) -> list[Problem]:
    """Returns the problems of the steps start..stop - 1, of one problem each."""
    problems = []
    for step in range(start, stop):
        problems += math_problems.train_problems(task, seed, step, 1)
    return problems


# Sets of every kind

TRAIN_ROWS = question_rows(10)
TEST_ROWS = question_rows(13)[10:]


def both_splits() -> datasets.DatasetDict:
    train_set = datasets.Dataset.from_list(TRAIN_ROWS)
    test_set = datasets.Dataset.from_list(TEST_ROWS)
    return datasets.DatasetDict({"train": train_set, "test": test_set})


def as_jsonl(folder: Path) -> str:
    return write_jsonl(folder / "set.jsonl", TRAIN_ROWS)


def as_json(folder: Path) -> str:
    (folder / "set.json").write_text(json.dumps(TRAIN_ROWS))
    return str(folder / "set.json")


def as_parquet(folder: Path) -> str:
    both_splits()["train"].to_parquet(folder / "set.parquet")
    return str(folder / "set.parquet")


def as_saved_dataset(folder: Path) -> str:
    both_splits()["train"].save_to_disk(folder / "saved")
    return str(folder / "saved")


def as_arrow(folder: Path) -> str:
    as_saved_dataset(folder)
    [file] = (folder / "saved").glob("*.arrow")
    return str(file)


def as_saved_splits(folder: Path) -> str:
    both_splits().save_to_disk(folder / "splits")
    return str(folder / "splits")


def as_directory(folder: Path) -> str:
    (folder / "set").mkdir()
    write_jsonl(folder / "set/train.jsonl", TRAIN_ROWS)
    write_jsonl(folder / "set/test.jsonl", TEST_ROWS)
    return str(folder / "set")


@pytest.fixture
def datasets_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps the files that `datasets` writes out of the user's cache."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def check_problems(task: config.TaskConfig, held_out: list[dict[str, Any]]) -> None:
    """Asserts that a task trains on TRAIN_ROWS and is evaluated on the rows `held_out`."""
    trained = math_problems.train_problems(task, 0, 1, 10)
    evaluated = math_problems.eval_problems(task, 100)

    found = {(problem.prompt, problem.gold["answer"]) for problem in trained}
    assert found == {(row["problem"], row["answer"]) for row in TRAIN_ROWS}
    assert prompts_of(evaluated) == [row["problem"] for row in held_out]


@pytest.mark.parametrize(
    ("write", "held_out"),
    [
        (as_jsonl, []),
        (as_json, []),
        (as_parquet, []),
        (as_arrow, []),
        (as_saved_dataset, []),
        (as_saved_splits, TEST_ROWS),
        (as_directory, TEST_ROWS),
    ],
)
def test_a_local_set_of_every_kind_is_read(
    write: Callable[[Path], str],
    held_out: list[dict[str, Any]],
    tmp_path: Path,
    datasets_cache: None,
) -> None:
    source = write(tmp_path)

    check_problems(math_task(source), held_out)


def test_a_set_of_the_hub_is_loaded_by_its_id_and_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_id = f"someone/{tmp_path.name}"  # sets are cached by their name: a name of this test only
    loaded = []

    def load_dataset(*names: str, revision: str | None) -> datasets.DatasetDict:
        assert revision is None
        loaded.append(names)
        return both_splits()

    monkeypatch.setattr("datasets.load_dataset", load_dataset)

    check_problems(math_task(f"main@{set_id}"), TEST_ROWS)

    assert loaded == [(set_id, "main")]


def test_json_answers_keep_their_text(tmp_path: Path) -> None:
    answers = ["0.50", "[0, 1]", "007", ["1", "2"], 3, None]
    rows = [{"problem": str(i), "answer": answer} for i, answer in enumerate(answers)]
    path = write_jsonl(tmp_path / "a.jsonl", rows)

    read = problem_sets.read_rows(problem_sets.load(path)["train"], "", "", path)

    assert [row.answer for row in read] == ["0.50", "[0, 1]", "007", ["1", "2"], "3", []]


# Problems of a step


def test_every_epoch_has_all_problems_in_another_order(tmp_path: Path) -> None:
    task = math_task(write_jsonl(tmp_path / "a.jsonl", question_rows(12)))

    first = math_problems.train_problems(task, 0, 1, 12)
    second = math_problems.train_problems(task, 0, 2, 12)

    assert len(set(prompts_of(first))) == 12
    assert set(prompts_of(first)) == set(prompts_of(second))
    assert prompts_of(first) != prompts_of(second)
    assert len({problem.id for problem in first + second}) == 24
    assert {problem.task for problem in first} == {"math"}


def test_problems_are_a_function_of_seed_and_step(tmp_path: Path) -> None:
    task = math_task(write_jsonl(tmp_path / "a.jsonl", question_rows(12)))

    first = math_problems.train_problems(task, 0, 1, 12)
    second = math_problems.train_problems(task, 0, 2, 12)
    of_another_seed = math_problems.train_problems(task, 1, 1, 12)

    assert first + second == steps_of_one_problem(task, 0, 1, 25)
    assert prompts_of(first) != prompts_of(of_another_seed)


# Mixtures


@pytest.fixture
def two_sets(tmp_path: Path) -> str:
    """Returns task.data of a set "a" of 30 questions and a set "b" of 10."""
    a = write_jsonl(tmp_path / "a.jsonl", question_rows(30, "a"))
    b = write_jsonl(tmp_path / "b.jsonl", question_rows(10, "b"))
    return f"{a},{b}"


def count_by_set(task: config.TaskConfig, count: int) -> collections.Counter[str]:
    """Returns how many of the first problems are from each set."""
    problems = math_problems.train_problems(task, 3, 1, count)
    return collections.Counter(prompt.split()[0] for prompt in prompts_of(problems))


def test_sets_without_weights_are_joined(two_sets: str) -> None:
    assert count_by_set(math_task(two_sets), 40) == {"a": 30, "b": 10}


def test_sets_are_mixed_by_their_weights(two_sets: str) -> None:
    first, second = two_sets.split(",")
    task = math_task(f"rows('{first}',weight=1),rows('{second}',weight=3)")

    assert count_by_set(task, 400) == {"a": 100, "b": 300}
    assert math_problems.train_problems(task, 3, 6, 8) == steps_of_one_problem(task, 3, 41, 49)


def test_every_set_needs_a_weight(two_sets: str) -> None:
    first, second = two_sets.split(",")

    message = "some of the sets have a weight: give each of them one, or none"
    with pytest.raises(ValueError, match=message):
        math_task(f"rows('{first}',weight=1),{second}")


# Columns and dropped rows


@pytest.fixture
def named_otherwise(tmp_path: Path) -> str:
    """Returns a set of 20 questions of levels 1 to 5 whose columns have other names."""
    rows = []
    for i in range(20):
        gold = f"so\n#### {i},000"
        rows.append({"Q": f"q {i}", "gold": gold, "difficulty": float(i % 5 + 1)})
    return write_jsonl(tmp_path / "set.jsonl", rows)


def test_columns_and_levels_are_those_of_the_settings(named_otherwise: str) -> None:
    task = math_task(
        str(Rows(named_otherwise, problem="Q", answer="gold", level_min=4, level_max=5))
    )

    problems = math_problems.train_problems(task, 0, 1, 8)

    found = {(problem.prompt, problem.gold["answer"]) for problem in problems}
    assert found == {(f"q {i}", f"{i},000") for i in range(20) if i % 5 >= 3}


def test_columns_of_another_name_are_an_error(named_otherwise: str) -> None:
    message = r"has columns Q, difficulty, gold: name one, as in rows\(.*,problem='COLUMN'"
    with pytest.raises(ValueError, match=message):
        math_problems.train_problems(math_task(named_otherwise), 0, 0, 1)


def test_levels_of_a_set_without_levels_are_an_error(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "b.jsonl", [{"problem": "p", "answer": "1"}])

    with pytest.raises(ValueError, match="has columns answer, problem: leave level_min and"):
        math_problems.train_problems(math_task(str(Rows(path, level_min=3))), 0, 0, 1)


def three_splits(folder: Path) -> str:
    """Writes a set whose splits train, train_hard and test have 10, 6 and 3 problems."""
    splits = both_splits()
    splits["train_hard"] = datasets.Dataset.from_list(question_rows(6, "hard"))
    splits.save_to_disk(folder / "splits")
    return str(folder / "splits")


def test_the_split_and_the_rows_to_train_on_can_be_chosen(tmp_path: Path) -> None:
    source = three_splits(tmp_path)
    hard = math_task(str(Rows(source, split="train_hard")))
    few = math_task(str(Rows(source, limit=4)))
    few_of_a_level = math_task(str(Rows(source, limit=1, level_min=2, level_max=2)))

    def trained(task: config.TaskConfig) -> set[str]:
        return set(prompts_of(math_problems.train_problems(task, 0, 1, 60)))

    assert trained(hard) == {f"hard {i}" for i in range(6)}
    assert trained(few) == {f"p {i}" for i in range(4)}
    assert trained(few_of_a_level) == {"p 1"}
    assert [math_problems.num_train_problems(task) for task in (hard, few)] == [6, 4]
    # The choice is of the problems to train on alone.
    assert len(math_problems.eval_problems(hard, 100)) == 3


def test_a_split_that_a_set_does_not_have_is_an_error(tmp_path: Path) -> None:
    source = three_splits(tmp_path)
    message = "split='train_easy'.: .* has the splits train, test, train_hard"
    with pytest.raises(UserError, match=message):
        math_problems.train_problems(math_task(str(Rows(source, split="train_easy"))), 0, 0, 1)

    lone_file = write_jsonl(tmp_path / "lone.jsonl", TRAIN_ROWS)
    with pytest.raises(UserError, match="has the splits train"):
        math_problems.train_problems(math_task(str(Rows(lone_file, split="hard"))), 0, 0, 1)


def test_dropped_rows_are_counted(tmp_path: Path) -> None:
    ungradable = [{"problem": "empty", "answer": ""}, {"problem": "none", "answer": None}]
    train_set = write_jsonl(tmp_path / "a.jsonl", [*question_rows(6), *ungradable])
    # The question "p 3" of the train set, written otherwise.
    test_set = write_jsonl(tmp_path / "test.jsonl", [{"problem": "P  3!", "answer": "3"}])
    task = math_task(train_set, eval_data=test_set)

    trained = math_problems.train_problems(task, 0, 1, 50)
    notes = TASKS["math"].notes(task)

    assert len(set(prompts_of(trained))) == 5
    assert [note.partition(": ")[2] for note in notes] == [
        "2 problems dropped: no answer",
        "1 problem dropped: held out",
        "5 problems",
    ]
    assert len(math_problems.eval_problems(task, 512)) == 1


def test_golds_for_which_open_r1_pays_everything_are_counted(tmp_path: Path) -> None:
    plain = write_jsonl(tmp_path / "plain.jsonl", question_rows(6))
    some = [{"problem": f"with LaTeX {i}", "answer": f"${i}$"} for i in range(3)]
    mixed = write_jsonl(tmp_path / "mixed.jsonl", [*question_rows(6), *some])

    task = replace(math_task(mixed), verifier="open_r1")
    line = "6 of 9 golds have no LaTeX: open_r1 pays 1 to every response to them"
    assert TASKS["math"].notes(task)[-1].endswith(line)
    with pytest.raises(ValueError, match="6 of 6 golds have no LaTeX.*open_r1_1416fa0"):
        TASKS["math"].notes(replace(math_task(plain), verifier="open_r1"))
    for verifier in ("fast", "open_r1_1416fa0"):
        assert "LaTeX" not in str(TASKS["math"].notes(replace(math_task(plain), verifier=verifier)))


@pytest.mark.parametrize("name", ["gsm8k", "math"])
def test_the_contaminated_gsm8k_is_refused_by_content(
    shared: Path, tmp_path: Path, name: str
) -> None:
    texts = [(shared / f"data/gsm8k/{split}.jsonl").read_text() for split in ("train", "test")]
    data = tmp_path / "renamed.jsonl"
    data.write_text("".join(texts))
    task = config.TaskConfig(name=name, data=str(data), template="no")

    message = "holds GSM8K's test questions among its 8792 rows: train on the 7,473"
    with pytest.raises(ValueError, match=message):
        math_problems.train_problems(task, 0, 1, 1)


def test_gsm8k_is_whole(shared: Path) -> None:
    task = config.TaskConfig(name="gsm8k", data=str(shared / "data/gsm8k"), template="no")

    assert math_problems.load_sets(task).notes == [f"{task.data}: 7,473 problems"]
    assert len(math_problems.eval_problems(task, 9999)) == 1319


# Templates


def prompt_of(template: str, row: problem_sets.Row = ROW, system_prompt: str = "") -> Any:
    task = config.TaskConfig(name="math", template=template, system_prompt=system_prompt)
    return math_problems.to_problem(task, "math", "x", row).prompt


@pytest.mark.parametrize("template", MATH_TEMPLATES)
def test_a_template_holds_the_question(template: str) -> None:
    prompt = prompt_of(template)

    assert "How many?" in json.dumps(prompt)
    assert isinstance(prompt, str) == (template != "chat")


@pytest.mark.parametrize("template", ["qwen_math", "qwen3", "r1_distill_qwen"])
def test_a_template_may_ask_for_a_box(template: str) -> None:
    prompt = prompt_of(template)

    assert "\\boxed{}" in prompt
    assert not prompt.endswith("How many?")


def test_template_no_is_the_question_alone() -> None:
    assert prompt_of("no") == "How many?"


def test_template_r1_opens_the_thoughts() -> None:
    assert prompt_of("r1").endswith("Assistant: <think>")


def test_the_chat_template_takes_a_system_prompt(shared: Path) -> None:
    tok = tokenizer.load(str(shared / "data/qwen2_tokenizer"))
    prompt = prompt_of("chat", problem_sets.Row("Q?", "1"), "Be brief.")

    text = chat_template.render(tok, prompt)

    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nQ?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_the_chat_template_of_qwen_is_template_qwen_math(shared: Path) -> None:
    tok = tokenizer.load(str(shared / "data/qwen2_tokenizer"))

    assert chat_template.render(tok, prompt_of("chat")) == prompt_of("qwen_math")


def test_a_tokenizer_without_a_chat_template_is_an_error() -> None:
    with pytest.raises(ValueError, match="has no chat template"):
        chat_template.render(tokenizer.countdown(), prompt_of("chat"))


# Suites


@pytest.mark.parametrize(
    ("name", "file", "size"),
    [
        ("math500", "math/math500.jsonl", 500),
        ("gsm8k", "gsm8k", 1319),
        ("countdown", "countdown/test.jsonl", 400),
        ("aime24", "eval/aime24.jsonl", 30),
        ("aime25", "eval/aime25.jsonl", 30),
        ("amc", "eval/amc.jsonl", 83),
        ("olympiad_bench", "eval/olympiadbench.jsonl", 675),
        ("mine", "eval/amc.jsonl", 83),
    ],
)
def test_a_suite_is_whole_and_may_be_cut(shared: Path, name: str, file: str, size: int) -> None:
    spec = f"{name}={shared / 'data' / file}"
    # Template plain is countdown's own; the other suites then have the one of their model.
    plain = config.TaskConfig(template="plain")

    found_name, problems = suites.load_suite(spec, config.TaskConfig(template="qwen_math"), 0, 0)
    _, first_problems = suites.load_suite(spec, plain, 7, 0)

    golds = [problem.gold for problem in problems]
    assert found_name == name
    assert len(problems) == size
    assert len({problem.id for problem in problems}) == size
    assert json.loads(json.dumps(golds)) == golds
    assert [problem.gold for problem in first_problems] == golds[:7]
    prompt = str(first_problems[0].prompt)
    if name == "countdown":
        assert prompt.count("\n") == 1
    else:
        assert "im_start" in prompt


def test_the_suite_countdown_needs_no_file() -> None:
    _, problems = suites.load_suite("countdown", config.TaskConfig(template="no"), 20, 0)

    assert len(problems) == 20


def test_names_of_suites_are_split_at_commas() -> None:
    assert split_commas("amc, aime24=x", "gsm8k") == ["amc", "aime24=x", "gsm8k"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("math501", "no suite 'math501': there are aime24, "),
        ("=x", "no suite ''"),
        ("mine", "or name=FILE for a set"),
        ("mine=:problem=x", "suite mine=:problem=x names columns and no set"),
        ("mine=f:answer=x:answer=y", "names the column answer twice"),
        ("gpqa_diamond=f:answer=x", "rows of gpqa_diamond have other columns"),
        ("countdown=f:problem=x", "rows of countdown have other columns"),
    ],
)
def test_a_suite_that_does_not_exist_is_an_error(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        suites.parse_suite(spec)


EVALUATED_ROWS = [{"input": f"{i}+1?", "output": str(i + 1), "answer": "?"} for i in range(5)]


@pytest.mark.parametrize(
    "source",
    [
        "{}:problem=input:answer=output",
        "{}:answer=output:problem=input",
        "rows('{}',problem='input',answer='output')",
    ],
)
def test_a_suite_may_name_its_own_columns(source: str, tmp_path: Path) -> None:
    """The columns of the training set have other names."""
    file = write_jsonl(tmp_path / "ev:1.jsonl", EVALUATED_ROWS)
    data = str(Rows("train.jsonl", problem="question", answer="solution"))
    task = config.TaskConfig(template="no", data=data)
    spec = f"mine={source.format(file)}"

    name, problems = suites.load_suite(spec, task, 0, 0)

    assert name == "mine"
    golds = [{"question": row["input"], "answer": row["output"]} for row in EVALUATED_ROWS]
    assert [problem.gold for problem in problems] == golds
    assert suites.load_questions(spec) == [gold["question"] for gold in golds]


def test_the_held_out_set_may_name_its_own_columns(tmp_path: Path) -> None:
    train = [{"question": f"Before {i}?", "solution": str(i - 1)} for i in range(4)]
    task = config.TaskConfig(
        name="math",
        template="no",
        data=str(
            Rows(
                write_jsonl(tmp_path / "train.jsonl", train), problem="question", answer="solution"
            )
        ),
        eval_data=str(
            Rows(
                write_jsonl(tmp_path / "ev.jsonl", EVALUATED_ROWS),
                problem="input",
                answer="output",
            )
        ),
    )

    sets = math_problems.load_sets(task)

    assert [row.question for row in sets.held_out] == [row["input"] for row in EVALUATED_ROWS]
    assert [row.answer for row in sets.held_out] == [row["output"] for row in EVALUATED_ROWS]
    assert [row.answer for row in sets.train[0]] == [row["solution"] for row in train]
    with pytest.raises(
        ValueError, match="problem=question: .*ev.jsonl has the columns answer, inp"
    ):
        math_problems.load_sets(replace(task, eval_data=str(tmp_path / "ev.jsonl")))


def test_the_parts_of_aime25_are_suites(tmp_path: Path) -> None:
    parts = {name: suite for name, suite in suites.SUITES.items() if name.startswith("aime25:")}
    assert {name: suite.rows.path for name, suite in parts.items()} == {
        "aime25:part1": "open-r1/aime_2025_1",
        "aime25:part2": "AIME2025-II@opencompass/AIME2025",
    }
    rows = [{"question": f"{i}?", "answer": i} for i in range(15)]
    file = write_jsonl(tmp_path / "part2.jsonl", rows)
    task = config.TaskConfig(template="no")
    name, problems = suites.load_suite(f"aime25:part2={file}", task, 0, 0)
    assert name == "aime25:part2" and len(problems) == 15
    assert suites.check_suites(("aime25:part1,aime25:part2", "aime25")) is None


# Grading


@pytest.mark.parametrize(
    ("name", "template", "response", "correct"),
    [
        ("gsm8k", "qwen_math", "so it is\n#### 1,000", True),
        ("gsm8k", "qwen_math", "so \\boxed{1000}.", True),
        ("gsm8k", "qwen_math", "so \\boxed{1001}.", False),
        ("gsm8k", "qwen_math", "so \\boxed{1000}.\n#### 16 lawns", True),
        ("gsm8k", "qwen_math", "so \\boxed{16}.\n#### 1000", False),
        ("gsm8k", "no", "in \\boxed{}:\n#### 1000", True),
        ("math", "no", "\\boxed{1000}", True),
        ("math", "qwen_math", "no answer", False),
    ],
)
def test_a_response_is_graded(name: str, template: str, response: str, correct: bool) -> None:
    gold = {"answer": "1000", "question": "?"}

    grade = TASKS[name].grade(response, gold, config.TaskConfig(template=template))

    assert grade.correct == correct
    assert grade.score == float(correct)


# Multiple choice

WRONG_CHOICES = {f"Incorrect Answer {i}": f"wrong {i}" for i in (1, 2, 3)}


def gpqa_problems(spec: str, seed: int) -> list[Problem]:
    _, problems = suites.load_suite(spec, config.TaskConfig(template="no"), 0, seed)
    return problems


@pytest.fixture
def gpqa(tmp_path: Path) -> str:
    """Returns the spec of a suite of 60 questions with four choices."""
    rows = []
    for i in range(60):
        right = {"Question": f"question {i}", "Correct Answer": f"right {i}"}
        rows.append(right | WRONG_CHOICES)
    return f"gpqa_diamond={write_jsonl(tmp_path / 'gpqa.jsonl', rows)}"


def test_gpqa_choices_are_shuffled_by_the_seed(gpqa: str) -> None:
    problems = gpqa_problems(gpqa, 0)

    assert gpqa_problems(gpqa, 0) == problems
    assert gpqa_problems(gpqa, 1) != problems
    assert {problem.gold for problem in problems} == set("ABCD")


def test_gpqa_prompts_have_all_choices_and_the_gold_names_the_right_one(gpqa: str) -> None:
    for i, problem in enumerate(gpqa_problems(gpqa, 0)):
        assert f"{problem.gold}) right {i}\n" in problem.prompt
        for text in WRONG_CHOICES.values():
            assert text in problem.prompt
        assert suites.grade_choice(f"so \\boxed{{{problem.gold}}}", problem.gold, None).correct


def test_wrong_choices_of_gpqa_stay_in_their_order(gpqa: str) -> None:
    """As open-r1 and lighteval list them: the right choice is inserted at a random place."""
    places = []
    for problem in [*gpqa_problems(gpqa, 0), *gpqa_problems(gpqa, 1)]:
        listed = [line[3:] for line in str(problem.prompt).split("\n") if line[1:3] == ") "]
        place = "ABCD".index(problem.gold)
        assert [*listed[:place], *listed[place + 1 :]] == list(WRONG_CHOICES.values())
        places.append(place)
    # 120 draws of 4 places: fewer than 15 of one happen once in 2,000 seeds.
    assert all(places.count(place) >= 15 for place in range(4))


def test_gpqa_may_be_asked_for_a_last_line(gpqa: str) -> None:
    spec = gpqa.replace("gpqa_diamond", "gpqa_diamond_line")
    task = config.TaskConfig(template="chat")

    name, problems = suites.load_suite(spec, task, 1, 0)
    _, boxed = suites.load_suite(gpqa, task, 1, 0)

    assert name == "gpqa_diamond_line"
    instruction, question = (message["content"] for message in problems[0].prompt)
    assert "Answer: B" in instruction and "boxed" not in instruction
    assert "boxed" in boxed[0].prompt[0]["content"]
    for letter in "ABCD":
        assert f"\n{letter}) " in question


def test_gpqa_in_a_template_file_is_the_question_and_its_choices(gpqa: str, tmp_path: Path) -> None:
    (tmp_path / "gpqa.txt").write_text("Last line: 'Answer: $LETTER'.\n\n{question}\n")
    task = config.TaskConfig(template=str(tmp_path / "gpqa.txt"))

    _, [problem] = suites.load_suite(gpqa, task, 1, 0)

    lines = str(problem.prompt).split("\n")
    assert lines[:4] == ["Last line: 'Answer: $LETTER'.", "", "question 0", ""]
    assert [line[:3] for line in lines[4:]] == ["A) ", "B) ", "C) ", "D) "]


@pytest.mark.parametrize(
    "response",
    [
        "\\boxed{B}",
        "\\boxed{\\text{(B)}}",
        "A or B. Answer: B",
        "The answer is (B).",
        "<think>\\boxed{A}</think><answer> B </answer>",
        "Answer: A, no, **Answer: B**",
        "Thoughts.\n\nANSWER: B",
        "I think that the option is (B).",
        "**Answer:** B",
        "final_answer: B",
        "**Answer**: (B)",
        "The right choice is: B",
        "The correct answer is option B.",
        "the answer is \\(\\mathrm{B}\\)",
        "Answer: B\n\nOption A is wrong, and so are choice C and option D.",
    ],
)
def test_a_choice_is_read(response: str) -> None:
    grade = suites.grade_choice(response, "B", None)

    assert grade.correct
    assert grade.reason == "correct"
    assert not suites.grade_choice(response, "C", None).correct


@pytest.mark.parametrize(
    "response",
    ["A B C D", "\\boxed{Because}", "Option B looks right", "the option isn't (B)", "ANSWERS: B"],
)
def test_a_response_without_a_choice_has_no_answer(response: str) -> None:
    for gold in ("B", "C"):
        grade = suites.grade_choice(response, gold, None)
        assert not grade.correct
        assert grade.reason == "no answer"


# Recipes


def load_recipe(name: str) -> ModuleType:
    """Imports a file of configs/ as a module."""
    spec = importlib.util.spec_from_file_location(f"{name}_recipe", ROOT / f"configs/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["gsm8k", "math"])
def test_presets_are_possible(name: str, tmp_path: Path) -> None:
    module = load_recipe(name)

    for preset in ("tiny", *module.HUB, "tiny,ppo"):
        settings = module.get_config(preset)
        settings.task.verifier = "fast"  # math-verify may not be installed
        config.validate(settings)
        settings.memory.check = False  # this machine need not hold 7B
        setup.check(settings, tmp_path / "run")
        assert settings.task.name == name
        assert settings.name == f"{name}-{preset.replace(',', '-')}"


@pytest.mark.parametrize("name", ["gsm8k", "math"])
@pytest.mark.parametrize(
    ("preset", "message"),
    [("tyni", "no preset 'tyni'"), ("tiny,gpro", "no algorithm 'gpro'")],
)
def test_a_preset_that_does_not_exist_is_an_error(name: str, preset: str, message: str) -> None:
    module = load_recipe(name)

    with pytest.raises(ValueError, match=message):
        module.get_config(preset)


# A whole run


def tiny_gsm8k(data: Path) -> config.Config:
    """Returns the recipe's settings for a run of two steps of a tiny model."""
    settings = load_recipe("gsm8k").get_config("tiny")
    # The first 8 problems, 4 in a step: a pass over them takes two steps.
    settings.task.data = str(Rows(str(data / "gsm8k"), limit=8))
    settings.model.tokenizer = str(data / "qwen2_tokenizer")
    settings.model.arch = config.tiny_arch(num_hidden_layers=1)
    settings.train = replace(
        settings.train, steps=0, prompt_epochs=1.0, microbatch_tokens=1280, packs_per_row=2
    )
    settings.rollout = replace(
        settings.rollout, max_prompt_tokens=144, max_new_tokens=8, group_size=2
    )
    settings.eval = replace(
        settings.eval,
        problems=8,
        limit=8,
        greedy=False,
        suites=(f"aime24={data / 'eval/aime24.jsonl'}", f"amc={data / 'eval/amc.jsonl'}"),
        # Another distribution than that of training, and all that is said is kept.
        temperature=0.35,
        top_p=0.9,
        save_responses=True,
    )
    return settings


def test_gsm8k_trains_and_is_evaluated_on_math500(
    shared: Path, tmp_path: Path, quick_runs: None
) -> None:
    summary = train.train(tiny_gsm8k(shared / "data"), tmp_path / "run")

    check_run(summary, tmp_path / "run")
    check_evaluation(summary["export"], shared / "data", tmp_path / "eval")


def check_run(summary: dict[str, Any], workdir: Path) -> None:
    """Asserts that a run of `tiny_gsm8k` trained, and wrote what it did."""
    assert summary["steps"] == 2
    assert summary["eval_all"]["after"].keys() >= {"eval/accuracy", "eval/aime24/maj@2"}
    after = summary["eval_all"]["after"]
    accuracies = [after[f"eval/{suite}/accuracy"] for suite in ("aime24", "amc")]
    assert after["eval/average"] == sum(accuracies) / 2
    for name in ("problems", "aime24", "amc"):
        rows = read_jsonl(workdir / f"evaluations/after/{name}-avg@2.jsonl")
        assert len({row["id"] for row in rows}) == len(rows) > 0
        assert all(len(row["samples"]) == 2 for row in rows)
    for metrics in read_jsonl(workdir / "metrics.jsonl"):
        # This model answers nothing right, so its reward is that of the length.
        assert -0.5 <= metrics["reward/length"] == metrics["reward/mean"] <= 0.5
        assert metrics["optimizer/grad_norm"] > 0
    sample = read_jsonl(workdir / "samples.jsonl")[0]
    assert sample["id"].startswith("gsm8k/train/")
    assert "im_start" in sample["prompt"]
    assert sample["gold"]["answer"]


def check_evaluation(model: str, data: Path, out: Path) -> None:
    """Evaluates an exported model on two suites, and asserts what is written."""
    specs = [f"math500={data / 'math/math500.jsonl'}", "countdown"]
    arguments = ["--model", model, "--suite", ",".join(specs), "--out", str(out)]
    changes = [
        "rollout.max_new_tokens=8",
        "rollout.max_prompt_tokens=256",
        "rollout.num_slots=16",
        "rollout.page_size=32",
        "rollout.decode_steps=8",
        "eval.limit=8",
        "eval.samples=2",
        "mesh.data=-1",
        "mesh.fsdp=1",
    ]
    arguments += [f"--config.{change}" for change in changes]

    found_specs, found_out, settings, *_ = evaluate.parse(arguments)
    assert found_specs == specs
    assert settings.rollout.max_new_tokens == 8
    assert settings.task.template == "qwen_math"

    summaries = evaluate.run(found_specs, found_out, settings)
    assert summaries["math500"]["kinds"].keys() == {"avg@2", "greedy"}
    assert summaries["countdown"]["problems"] == 8
    assert summaries["math500"]["graded_by"] == "task.verifier=fast"
    assert summaries["countdown"]["graded_by"] == "countdown"
    table = evaluate.table(summaries)
    assert "math500: graded by task.verifier=fast" in table
    assert 0 <= summaries["math500"]["kinds"]["avg@2"]["maj@2"] <= 1
    for name in ("math500-avg@2", "math500-greedy", "countdown-greedy"):
        rows = read_jsonl(out / f"{name}.jsonl")
        suite = name.partition("-")[0]
        assert len(rows) == summaries[suite]["problems"]
        assert len(rows[0]["samples"]) == (2 if name.endswith("avg@2") else 1)
    written = json.loads((out / "summary.json").read_text())
    assert written["suites"] == json.loads(json.dumps(summaries))

    table = evaluate.table(summaries)
    assert "math500" in table
    assert "average" in table
    # Template qwen_math is none of countdown's, so its problems have countdown's default template.
    beginning = str(countdown.render_prompt("r1", [1, 2], 3))[:20]
    assert beginning in (out / "countdown-greedy.jsonl").read_text()
