"""Finding the answer in a response."""

import pytest

from jzero.errors import UserError
from jzero.grading.extract import extract_answer


@pytest.mark.parametrize(
    "template, response, answer",
    [
        ("boxed", r"first \boxed{1}, so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        ("boxed", r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        ("boxed", r"\boxed{1} then \boxed{2", None),
        ("boxed", r"\boxed{1} then \boxed{}", None),
        ("boxed", r"<think> \boxed{1} </think> the answer is 1", None),
        ("boxed", "boxed{1}", None),
        ("boxed", r"\boxed 5.", "5"),
        ("boxed", r"\boxed{" + "1" * 2000 + "}", None),
        ("think_boxed", r"\boxed{1}", None),
        ("think_boxed", r"<think> \boxed{2} </think> \boxed{1}", "1"),
        ("r1", "<think> a </think> <answer> 5 </answer>", "5"),
        ("r1", "a </think>\n<answer>\\boxed{5}</answer><|im_end|>\n", "5"),
        ("r1", "a </think> <answer> 5 </answer> or 6", None),
        ("r1", "a </think> <answer> 5 </answer> <answer> 6 </answer>", None),
        ("r1", "<answer> 5 </answer>", None),
        ("r1", "<think> <answer> 5 </answer> </think> done", None),
        ("gsm8k", "#### 1\n#### 2", "2"),
        ("gsm8k", "so 5\n#### 5 red apples.\nDone", r"5\text{ red apples}"),
        ("gsm8k", "#### 2½ cups", r"2½\text{ cups}"),
        ("gsm8k", "the answer is 5", None),
        ("number", "we get 1,234.5 apples", "1,234.5"),
        ("number", "none", None),
        ("answer", "  5 ", "5"),
        ("final_answer", r"The final answer is $\frac12$. I hope it is right: $y$.", r"\frac12"),
        ("final_answer", r"The answer is: \[x + 1\]", "x + 1"),
        ("final_answer", "ANSWER: $$7$$ and the answer is \\(8\\).", "8"),
        ("final_answer", r"<think>\n</think>\n<answer>\nThe answer is $7$.\n</answer>", "7"),
        ("final_answer", r"the answer is $8$, I mean \boxed{7}", "7"),
        ("final_answer", r"\boxed{7", None),
        ("final_answer", "we get $7$", None),
        ("final_answer", "The answer is 7.", None),
        ("final_answer", "The answer is $7", None),
    ],
)
def test_extract(template, response, answer) -> None:
    assert extract_answer(response, template) == answer


def test_an_unknown_template_is_refused() -> None:
    with pytest.raises(UserError, match="template='none' is not one of"):
        extract_answer("5", "none")
