"""gsm8k and math: sets of every kind, mixtures, rows that are dropped, templates, a whole run."""

import collections
import importlib.util
import json
from pathlib import Path

import datasets
import pytest

from jzero import config, evaluate, setup, train
from jzero.model import tokenizer
from jzero.tasks import TASKS, countdown, math_problems, problem_sets, suites
from jzero.tasks.prompts import MATH_TEMPLATES
from jzero.types import Problem

ROOT = Path(__file__).resolve().parents[2]


def rows(count: int, name: str = "p") -> list[dict]:
    return [
        {"problem": f"{name} {i}", "answer": str(i), "level": f"Level {1 + i % 5}"}
        for i in range(count)
    ]


def write(path: Path, table: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in table))
    return str(path)


def task(data: str, **changes) -> config.TaskConfig:
    return config.TaskConfig(name="math", data=data, template="no", **changes)


@pytest.mark.parametrize(
    "kind", ["jsonl", "json", "parquet", "arrow", "saved", "splits", "directory", "hub"]
)
def test_sets_of_every_kind(kind, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    path, test, dataset = (
        tmp_path / f"set.{kind}",
        rows(13)[10:],
        datasets.Dataset.from_list(rows(10)),
    )
    both = datasets.DatasetDict({"train": dataset, "test": datasets.Dataset.from_list(test)})
    source = str(path)
    if kind == "jsonl":
        write(path, rows(10))
    elif kind == "json":
        path.write_text(json.dumps(rows(10)))
    elif kind == "parquet":
        dataset.to_parquet(path)
    elif kind == "saved":
        dataset.save_to_disk(path)
    elif kind == "arrow":
        dataset.save_to_disk(tmp_path / "saved")
        source = str(next((tmp_path / "saved").glob("*.arrow")))
    elif kind == "splits":
        both.save_to_disk(path)
    elif kind == "directory":
        path.mkdir()
        write(path / "train.jsonl", rows(10))
        write(path / "test.jsonl", test)
    else:
        source = f"main@someone/{tmp_path.name}"
        asked = []
        monkeypatch.setattr("datasets.load_dataset", lambda *names: asked.append(names) or both)
    problems = math_problems.train_problems(task(source), 0, 0, 10)
    assert {(p.prompt, p.gold["answer"]) for p in problems} == {
        (row["problem"], row["answer"]) for row in rows(10)
    }
    held_out = math_problems.eval_problems(task(source), 100)
    assert [p.prompt for p in held_out] == (
        [r["problem"] for r in test] if kind in ("splits", "directory", "hub") else []
    )
    assert kind != "hub" or asked == [(f"someone/{tmp_path.name}", "main")]


def test_problems_are_a_function_of_seed_and_step(tmp_path):
    one = task(write(tmp_path / "a.jsonl", rows(12)))
    first, second = (math_problems.train_problems(one, 0, step, 12) for step in (0, 1))
    assert {p.prompt for p in first} == {p.prompt for p in second} and len(
        {p.prompt for p in first}
    ) == 12
    assert [p.prompt for p in first] != [p.prompt for p in second]
    assert first + second == [math_problems.train_problems(one, 0, i, 1)[0] for i in range(24)]
    assert [p.prompt for p in first] != [
        p.prompt for p in math_problems.train_problems(one, 1, 0, 12)
    ]
    assert len({p.id for p in first + second}) == 24 and all(p.task == "math" for p in first)


def test_mixtures(tmp_path):
    sources = [
        write(tmp_path / f"{name}.jsonl", rows(count, name))
        for name, count in (("a", 30), ("b", 10))
    ]

    def named(one: config.TaskConfig, count: int) -> list[str]:
        """Returns the name of the set that each of `count` problems is from."""
        problems = math_problems.train_problems(one, 3, 0, count)
        return [problem.prompt.split()[0] for problem in problems]

    joined = task(",".join(sources))
    assert collections.Counter(named(joined, 40)) == {"a": 30, "b": 10}
    mixed = task(",".join(sources), weights=(0.25, 0.75))
    assert collections.Counter(named(mixed, 400)) == {"a": 100, "b": 300}
    assert math_problems.train_problems(mixed, 3, 5, 8) == [
        math_problems.train_problems(mixed, 3, i, 1)[0] for i in range(40, 48)
    ]
    with pytest.raises(
        ValueError, match=r"weights=\(1.0,\) must be a positive number for each of the 2 sets"
    ):
        named(task(",".join(sources), weights=(1.0,)), 1)


def test_columns_levels_and_answers(tmp_path):
    table = [
        {"Q": f"q {i}", "gold": f"so\n#### {i},000", "difficulty": float(i % 5 + 1)}
        for i in range(20)
    ]
    path = write(tmp_path / "set.jsonl", table)
    with pytest.raises(
        ValueError, match="has columns Q, difficulty, gold: set task.problem_column"
    ):
        math_problems.train_problems(task(path), 0, 0, 1)
    columns = {"problem_column": "Q", "answer_column": "gold"}
    made = math_problems.train_problems(task(path, level_min=4, level_max=5, **columns), 0, 0, 8)
    assert {(p.prompt, p.gold["answer"]) for p in made} == {
        (f"q {i}", f"{i},000") for i in range(20) if i % 5 >= 3
    }
    with pytest.raises(ValueError, match="has columns answer, problem: set task.level_min=0"):
        math_problems.train_problems(
            task(write(tmp_path / "b.jsonl", [{"problem": "p", "answer": "1"}]), level_min=3),
            0,
            0,
            1,
        )


def test_json_answers_keep_their_text(tmp_path):
    answers = ["0.50", "[0, 1]", "007", ["1", "2"], 3, None]
    path = write(
        tmp_path / "a.jsonl",
        [{"problem": str(i), "answer": answer} for i, answer in enumerate(answers)],
    )
    golds = [
        row.answer for row in problem_sets.read_rows(problem_sets.load(path)["train"], "", "", path)
    ]
    assert golds == ["0.50", "[0, 1]", "007", ["1", "2"], "3", []]


def test_what_is_dropped_is_counted(tmp_path):
    table = [*rows(6), {"problem": "empty", "answer": ""}, {"problem": "none", "answer": None}]
    test = write(tmp_path / "test.jsonl", [{"problem": "P  3!", "answer": "3"}])
    one = task(write(tmp_path / "a.jsonl", table), eval_data=test)
    assert len({p.prompt for p in math_problems.train_problems(one, 0, 0, 50)}) == 5
    assert [note.partition(": ")[2] for note in TASKS["math"].notes(one)] == [
        "1 problems dropped, they are held out",
        "2 problems dropped, their answer does not grade 1 against itself",
        "5 problems",
    ]
    assert len(math_problems.eval_problems(one, 512)) == 1


def test_the_contaminated_gsm8k_is_refused_by_content(shared, tmp_path):
    lines = [(shared / f"data/gsm8k/{split}.jsonl").read_text() for split in ("train", "test")]
    (tmp_path / "renamed.jsonl").write_text("".join(lines))
    for name in ("gsm8k", "math"):
        one = config.TaskConfig(name=name, data=str(tmp_path / "renamed.jsonl"), template="no")
        with pytest.raises(
            ValueError, match="holds GSM8K's test questions among its 8792 rows: train on the 7,473"
        ):
            math_problems.train_problems(one, 0, 0, 1)
    one = config.TaskConfig(name="gsm8k", data=str(shared / "data/gsm8k"), template="no")
    assert (
        math_problems.load_sets(one).notes == [f"{one.data}: 7473 problems"]
        and len(math_problems.eval_problems(one, 9999)) == 1319
    )


def test_templates_hold_the_question():
    for name in MATH_TEMPLATES:
        one = config.TaskConfig(name="math", template=name)
        prompt = math_problems.to_problem(
            one, "math", "x", problem_sets.Row("How many?", "1")
        ).prompt
        assert "How many?" in json.dumps(prompt)
        assert isinstance(prompt, str) == (name != "chat")
        if name in ("qwen_math", "qwen3", "r1_distill_qwen"):
            assert "\\boxed{}" in prompt and not prompt.endswith("How many?")
    assert (
        math_problems.to_problem(
            config.TaskConfig(template="no"), "math", "x", problem_sets.Row("Q", "1")
        ).prompt
        == "Q"
    )
    assert math_problems.to_problem(
        config.TaskConfig(template="r1"), "math", "x", problem_sets.Row("Q", "1")
    ).prompt.endswith("Assistant: <think>")


def test_chat_template_with_a_system_prompt(shared):
    tok = tokenizer.load(str(shared / "data/qwen2_tokenizer"))
    row = problem_sets.Row("Q?", "1")

    def make(system_prompt: str) -> Problem:
        task = config.TaskConfig(template="chat", system_prompt=system_prompt)
        return math_problems.to_problem(task, "math", "x", row)

    text = tokenizer.render(tok, make("Be brief.").prompt)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nQ?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert (
        tokenizer.render(tok, make("").prompt)
        == math_problems.to_problem(
            config.TaskConfig(template="qwen_math"), "math", "x", row
        ).prompt
    )
    with pytest.raises(ValueError, match="has no chat template"):
        tokenizer.render(tokenizer.countdown(), make("").prompt)


def test_suites(shared):
    files = {"math500": "math/math500.jsonl", "gsm8k": "gsm8k", "countdown": "countdown/test.jsonl"}
    files |= {"aime24": "eval/aime24.jsonl", "aime25": "eval/aime25.jsonl", "amc": "eval/amc.jsonl"}
    files |= {"olympiad_bench": "eval/olympiadbench.jsonl", "mine": "eval/amc.jsonl"}
    sizes = {
        "math500": 500,
        "gsm8k": 1319,
        "countdown": 400,
        "aime24": 30,
        "aime25": 30,
        "amc": 83,
        "mine": 83,
    }
    for name, file in files.items():
        got, problems = suites.load_suite(
            f"{name}={shared / 'data' / file}", config.TaskConfig(template="qwen_math"), 0, 0
        )
        assert got == name and len(problems) == sizes.get(name, 675) == len(
            {p.id for p in problems}
        )
        assert json.loads(json.dumps([p.gold for p in problems])) == [p.gold for p in problems]
        plain = config.TaskConfig(template="plain")  # countdown's own
        few = suites.load_suite(f"{name}={shared / 'data' / file}", plain, 7, 0)[1]
        assert [p.gold for p in few] == [p.gold for p in problems[:7]]
        assert (
            few[0].prompt.count("\n") == 1 if name == "countdown" else "im_start" in few[0].prompt
        )
    assert len(suites.load_suite("countdown", config.TaskConfig(template="no"), 20, 0)[1]) == 20
    assert suites.split_commas("amc, aime24=x", "gsm8k") == ["amc", "aime24=x", "gsm8k"]


@pytest.mark.parametrize(
    "name, template, response, correct",
    [
        ("gsm8k", "qwen_math", "so it is\n#### 1,000", True),
        ("gsm8k", "qwen_math", "so \\boxed{1000}.", True),
        ("gsm8k", "qwen_math", "so \\boxed{1001}.", False),
        ("math", "no", "\\boxed{1000}", True),
        ("math", "qwen_math", "no answer", False),
    ],
)
def test_grading(name, template, response, correct):
    grade = TASKS[name].grade(
        response, {"answer": "1000", "question": "?"}, config.TaskConfig(template=template)
    )
    assert (grade.score, grade.correct) == (float(correct), correct)


@pytest.mark.parametrize(
    "spec, message",
    [
        ("math501", "no suite 'math501': there are aime24, "),
        ("=x", "no suite ''"),
        ("mine", "or name=FILE for a set"),
    ],
)
def test_suite_mistakes(spec, message):
    with pytest.raises(ValueError, match=message):
        suites.parse_suite(spec)


def test_gpqa_choices_are_shuffled_by_the_seed(tmp_path):
    wrong = {f"Incorrect Answer {i}": f"wrong {i}" for i in (1, 2, 3)}
    table = [
        {"Question": f"question {i}", "Correct Answer": f"right {i}"} | wrong for i in range(60)
    ]
    spec = f"gpqa_diamond={write(tmp_path / 'gpqa.jsonl', table)}"
    made = [
        suites.load_suite(spec, config.TaskConfig(template="no"), 0, seed)[1] for seed in (0, 0, 1)
    ]
    assert made[0] == made[1] != made[2] and {p.gold for p in made[0]} == set("ABCD")
    for i, problem in enumerate(made[0]):
        assert f"{problem.gold}) right {i}\n" in problem.prompt and all(
            text in problem.prompt for text in wrong.values()
        )
        assert suites.grade_choice(f"so \\boxed{{{problem.gold}}}", problem.gold, None).correct


@pytest.mark.parametrize(
    "response, answer",
    [
        ("\\boxed{B}", "B"),
        ("\\boxed{\\text{(B)}}", "B"),
        ("A or B. Answer: B", "B"),
        ("The answer is (B).", "B"),
        ("<think>\\boxed{A}</think><answer> B </answer>", "B"),
        ("Answer: A, no, **Answer: B**", "B"),
        ("A B C D", ""),
        ("\\boxed{Because}", ""),
    ],
)
def test_choices_are_read(response, answer):
    grade = suites.grade_choice(response, "B", None)
    assert (grade.correct, grade.reason) == ((True, "correct") if answer else (False, "no answer"))
    assert not suites.grade_choice(response, "C", None).correct


def recipe(name: str):
    spec = importlib.util.spec_from_file_location(f"{name}_recipe", ROOT / f"configs/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["gsm8k", "math"])
def test_presets_are_possible(name, tmp_path):
    module = recipe(name)
    for preset in ("tiny", *module.HUB, "tiny,ppo"):
        settings = module.get_config(preset)
        config.validate(settings)
        setup.check(settings, tmp_path / "run")
        assert settings.task.name == name and settings.name == f"{name}-{preset.replace(',', '-')}"
    for preset, message in {"tyni": "no preset 'tyni'", "tiny,gpro": "no algorithm 'gpro'"}.items():
        with pytest.raises(ValueError, match=message):
            module.get_config(preset)


def test_gsm8k_trains_and_is_evaluated_on_math500(shared, tmp_path, quick_runs):
    settings = recipe("gsm8k").get_config("tiny")
    settings.task.data, settings.model.tokenizer = (
        str(shared / "data/gsm8k"),
        str(shared / "data/qwen2_tokenizer"),
    )
    (
        settings.train.steps,
        settings.train.microbatch_tokens,
        settings.eval.problems,
        settings.eval.limit,
    ) = 2, 1280, 8, 8
    (
        settings.rollout.max_prompt_tokens,
        settings.rollout.max_new_tokens,
        settings.rollout.group_size,
    ) = 144, 8, 2
    settings.train.packs_per_row = 2
    settings.eval.greedy, settings.eval.suites = (
        False,
        (f"aime24={shared / 'data/eval/aime24.jsonl'}",),
    )
    settings.model.arch.num_hidden_layers = 1
    summary = train.train(settings, tmp_path / "run")
    assert summary["steps"] == 2 and summary["eval_all"]["after"].keys() >= {
        "eval/accuracy",
        "eval/aime24/maj@2",
    }
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert all(-0.5 <= line["reward/length"] == line["reward/mean"] <= 0.5 for line in lines)
    assert all(line["optimizer/grad_norm"] > 0 for line in lines)
    sample = json.loads((tmp_path / "run/samples.jsonl").read_text().splitlines()[0])
    assert (
        sample["id"].startswith("gsm8k/train/")
        and "im_start" in sample["prompt"]
        and sample["gold"]["answer"]
    )
    spec = [f"math500={shared / 'data/math/math500.jsonl'}", "countdown"]
    command = [
        "--model",
        summary["export"],
        "--suite",
        ",".join(spec),
        "--out",
        str(tmp_path / "eval"),
    ]
    sizes = (
        "rollout.max_new_tokens=8 rollout.max_prompt_tokens=256 rollout.num_slots=16 "
        "rollout.page_size=32 rollout.decode_steps=8 eval.limit=8"
    )
    changes = [
        f"--config.{each}" for each in f"{sizes} eval.samples=2 mesh.data=-1 mesh.fsdp=1".split()
    ]
    specs, out, chosen = evaluate.parse([*command, *changes])
    assert (
        specs == spec and chosen.rollout.max_new_tokens == 8 and chosen.task.template == "qwen_math"
    )
    found = evaluate.run(specs, out, chosen)
    assert (
        found["math500"]["kinds"].keys() == {"avg@2", "greedy"}
        and found["countdown"]["problems"] == 8
    )
    for name in ("math500-avg@2", "math500-greedy", "countdown-greedy"):
        written = [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]
        assert len(written) == found[name.partition("-")[0]]["problems"] and len(
            written[0]["samples"]
        ) in (1, 2)
    assert json.loads((out / "summary.json").read_text())["suites"] == json.loads(json.dumps(found))
    assert "math500" in evaluate.table(found) and "average" in evaluate.table(found)
    assert (
        countdown.render_prompt("r1", [1, 2], 3)[:20]
        in (out / "countdown-greedy.jsonl").read_text()
    )
