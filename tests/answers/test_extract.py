"""Finding the answer in a response."""

import time

import pytest

from jzero.answers.extract import TEMPLATES, extract_answer
from jzero.errors import UserError


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
        ("boxed", r"\boxed{5\phantom{\boxed{4}}}", r"5\phantom{\boxed{4}}"),
        ("boxed", r"\boxed{4}\phantom{\boxed{5}}", "4"),
        ("boxed", r"\boxed{\boxed{5}}", r"\boxed{5}"),
        ("boxed", r"\boxed{1 and { \boxed{2}", "2"),
        ("boxed", r"} \boxed{1} { \boxed{2} }", "2"),
        ("boxed", r"\\boxed{5}", "5"),
        ("boxed", r"\boxed{\\{5\\}}", r"\\{5\\}"),
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
        ("gsm8k", "####\n\n18", "18"),
        ("gsm8k", "#### Answer\n18", "18"),
        ("gsm8k", "#### Answer: 18", "Answer: 18"),
        ("gsm8k", "#### 18<|im_end|>", "18"),
        ("gsm8k", "#### 18</s>", "18"),
        ("gsm8k", "#### 18<end_of_utterance>", "18"),
        ("gsm8k", "#### 18<eos><pad><pad>", "18"),
        ("gsm8k", "#### 18<|eot_id|><|start_header_id|>user", "18"),
        ("gsm8k", "#### 18<｜end▁of▁sentence｜>", "18"),
        ("gsm8k", "#### <b>18</b>", "<b>18</b>"),
        ("gsm8k", "#### x<|y|", "x<|y|"),
        ("stated", "The answer is 18.<end_of_turn>", "18"),
        ("stated", "The answer is 18.<|im_end|>", "18"),
        ("r1", "<think>x</think> <answer>18</answer><end_of_turn>", "18"),
        ("r1", "<think>x</think> <answer>18</answer><turn|>", "18"),
        ("r1", "<think>x</think> <answer>18</answer> <eot>\n", "18"),
        ("gsm8k", "#### Janet makes $18 every day.", "$18"),
        ("gsm8k", "#### 18 more eggs than before", "18"),
        ("gsm8k", "#### 18 (eighteen)", "18"),
        ("gsm8k", "####", None),
        ("stated", "So the answer is 18. She had 3 left.", "18"),
        ("stated", "The answer is 18 eggs.", r"18\text{ eggs}"),
        ("stated", "**Answer:** $2.5$.", "$2.5$"),
        ("stated", "The answer is 18. No, the answer is 19.", "19"),
        ("stated", "#### 18", "18"),
        ("stated", r"The answer is 17, \boxed{18}", "18"),
        ("stated", "I got 18", None),
        ("number", "we get 1,234.5 apples", "1,234.5"),
        ("number", "none", None),
        # A prompt that asks for a box is answered in the box.
        ("number", r"\boxed{558}: he mows 16 lawns", "558"),
        ("number", r"16 lawns, \boxed{558 lawns} in 31 days", "558"),
        ("number", r"\boxed{\$1,234.50\text{ in total}}, not 7", "1,234.50"),
        ("number", r"\boxed{\frac{1}{2}} of 7", r"\frac{1}{2}"),
        ("number", r"\boxed{\sqrt{16}} of 7", r"\sqrt{16}"),
        ("number", r"\boxed{16}, no, \boxed{x = 558}", "x = 558"),
        ("number", r"as \boxed{} asks: 558", "558"),
        ("number", r"we get 16, \boxed{558", "558"),
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


@pytest.mark.parametrize("template", sorted(TEMPLATES))
@pytest.mark.parametrize(
    "construct",
    [
        r"\boxed{",
        r"\boxed{5}",
        "{",
        "}",
        "####",
        "#### 5\n",
        "<answer>",
        "</answer>",
        "answer is ",
        "answer: $",
        "The answer is 5. ",
        " ",
        "\n",
        "5",
        "1,",
        "1,111",
        "-",
        ".5",
        "\\",
        r"\phantom{",
        "</think>",
        "<|im_end|>",
        "a",
        "½",
        "is not ",
        "(",
        "*",
        "result = ",
    ],
)
@pytest.mark.parametrize("num_characters", [60_000, 1_000_000])
def test_any_response_is_searched_in_linear_time(template, construct, num_characters) -> None:
    response = construct * (num_characters // len(construct))
    start = time.process_time()
    extract_answer(response, template)
    extract_answer(f"</think>{response}\\boxed{{5}}", template)
    # A megabyte takes at most a second here; a search in square time would take minutes.
    assert time.process_time() - start < (1 if num_characters < 1_000_000 else 5)


def test_an_unknown_template_is_refused() -> None:
    with pytest.raises(UserError, match="template='none' is not one of"):
        extract_answer("5", "none")
