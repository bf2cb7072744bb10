"""The table of tasks, the templates of a task, and the mistakes in their settings."""

import sys
from pathlib import Path

import pytest

from jzero import config
from jzero.problems.prompts import BOXED, MATH_TEMPLATES, find_template
from jzero.tasks import TASKS, PromptTemplate, check_task_settings, find_task

MINE = PromptTemplate(prompt="{question} {{}} {instruction}", reply="\n{}\n")
NO_TEMPLATE = "text"


def test_a_module_with_a_task_needs_no_line_in_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "from jzero.tasks import TASKS\nTASK = TASKS['guess']._replace(templates={})\n"
    (tmp_path / "my_task_module.py").write_text(text)
    (tmp_path / "my_empty_module.py").write_text("")
    (tmp_path / "my_wrong_module.py").write_text("TASK = 3\n")
    monkeypatch.syspath_prepend(tmp_path)

    assert find_task("my_task_module").reply is TASKS["guess"].reply
    assert find_task("guess") is TASKS["guess"]
    with pytest.raises(ValueError, match="task.name='no_such' is not one of countdown"):
        find_task("no_such")
    with pytest.raises(ValueError, match="nor a module with a TASK"):
        find_task("my_empty_module")
    with pytest.raises(ValueError, match="my_wrong_module.TASK is not a Task but 3"):
        find_task("my_wrong_module")


def test_a_template_of_a_module_is_filled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "test_task", sys.modules[__name__])

    template = find_template("test_task:MINE", MATH_TEMPLATES)

    values = {"question": "Why {not}?", "instruction": BOXED}
    assert template.render(values) == f"Why {{not}}? {{}} {BOXED}"


def test_a_name_that_is_no_template_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "test_task", sys.modules[__name__])

    for name in ("r2", "test_task:NO_TEMPLATE", "test_task:MISSING", "no_such_module:MINE"):
        with pytest.raises(ValueError, match=f"task.template='{name}' is not"):
            find_template(name, MATH_TEMPLATES)


def test_a_chat_template_gives_messages() -> None:
    template = PromptTemplate(prompt="{question}", chat=True)

    messages = template.render({"question": "Q"}, system_prompt="S")

    assert messages == [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}]
    assert template.render({"question": "Q"}) == [{"role": "user", "content": "Q"}]


@pytest.mark.parametrize("text", ["{questoin}", "{}", "{question", "\\boxed{x}"])
def test_a_name_in_braces_that_the_task_lacks_is_a_mistake(text) -> None:
    with pytest.raises(ValueError, match=r"cannot be filled in .*this task has \{question\}"):
        PromptTemplate(text).render({"question": "Q"})


@pytest.mark.parametrize(
    "changes, max_turns, message",
    [
        ({"template": "qwen_math"}, 1, "task.template='qwen_math' is not one of r1, qwen_chat"),
        (
            {"options": ("a=1",)},
            1,
            "task.options=a=1 is not an option of this task; use numbers_min",
        ),
        ({"name": "gsm8k"}, 2, "task.name=gsm8k has no replies in template r1; .* countdown"),
    ],
)
def test_mistakes_in_the_settings_of_a_task(changes, max_turns, message) -> None:
    with pytest.raises(ValueError, match=message):
        check_task_settings(config.TaskConfig(**changes), max_turns)
