r"""Words around an answer: announcements, labels, choices, sentences, and echoes of a question."""

import pytest

from jzero.answers.phrases import number_in_words, number_of_sentence, read_choice
from jzero.answers.verdict import grade


def reason(answer: str, gold: str, template: str = "answer", question: str = "") -> str:
    return grade(answer, gold, template=template, question=question).reason


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        (r"\text{Answer: }5", "5"),
        ("The final answer is $5$.", "5"),
        (r"\therefore x=5", "5"),
        (r"\Rightarrow 5", "5"),
        (r"\text{Ans. }5", "5"),
        ("Hence, x=5", "x=5"),
        (r"\textbf{Answer}: x=5", "5"),
        (r"\text{So the answer is }\frac12", r"\frac12"),
        (r"\angle ABC=90^\circ", "90^\\circ"),
        (r"m\angle A=30", r"\angle A=30^\circ"),
        ("[ABC]=12", "12"),
        (r"\text{Area of }ABC=12", "[ABC]=12"),
        (r"\overline{AB}=12", "AB=12"),
        ("The area is 12", "12"),
        ("Area: 12", r"\text{Area}=12"),
        (r"12=\text{Area}", "12"),
        (r"\deg f=3", "3"),
        (r"x_{\min}=5", "5"),
        (r"\bar{z}+1", r"1+\bar z"),
    ],
)
def test_words_that_name_or_announce_a_value_may_be_left_out(answer, gold) -> None:
    assert reason(answer, gold) == "correct"


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        (r"\text{Answer: }5\text{ or }6", "5"),
        (r"\text{The answer is not }5", "5"),
        (r"\text{Area}=12", r"\text{Perimeter}=12"),
        (r"\angle ABC=90", r"\angle ABD=90"),
        ("The area is not 12", "12"),
        ("It is either 12 or 13", "12"),
        (r"\bar{z}", "z"),
        (r"\mathcal{L}", "L"),
        (r"\overline{12}", "12"),
        (r"2\angle ABC", r"\angle ABC"),
    ],
)
def test_words_that_change_an_answer_may_not(answer, gold) -> None:
    assert reason(answer, gold) != "correct"


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        (r"\text{(B) }7", ("B", r"\text{}7")),
        ("B", ("B", "")),
        ("(B)", ("B", "")),
        ("B)", ("B", "")),
        ("B: 7", ("B", "7")),
        ("Option B", ("B", "")),
        (r"\text{Choice }(C)", ("C", "")),
    ],
)
def test_choices(text, choice) -> None:
    read = read_choice(text)
    assert read is not None
    assert (read.letter, read.value.replace(r"\text{}", "")) == (
        choice[0],
        choice[1].replace(r"\text{}", ""),
    )


@pytest.mark.parametrize(
    "text",
    ["A or B", "(A) 5 (B) 7", "A and B", "(A),(B)", "B) not A", "7", "AB", "x", "K) 7", "(B) C"],
)
def test_no_choice_or_more_than_one(text) -> None:
    assert read_choice(text) is None


@pytest.mark.parametrize(
    ("answer", "gold", "is_right"),
    [
        (r"\textbf{(B) }7", "B", True),
        (r"\textbf{(B) }7", "7", True),
        (r"\textbf{(B) }7", r"\textbf{(B)}\ 7", True),
        ("7", r"\textbf{(B) }7", True),
        ("B", r"\textbf{(B) }7", True),
        ("The correct answer is (B)", "B", True),
        ("B) Paris", "B", True),
        ("(B) 8", "7", False),
        ("(A) 7", "B", False),
        ("(A) 7", r"\textbf{(B) }7", False),
        ("(B) 8", r"\textbf{(B) }7", False),
        ("B", "7", False),
        ("A or B", "B", False),
        ("(A) 5 or (B) 7", "7", False),
        ("Option A: 7", r"\textbf{(B) }7", False),
    ],
)
def test_letters_and_values_of_choices(answer, gold, is_right) -> None:
    assert (reason(answer, gold) == "correct") == is_right


@pytest.mark.parametrize(
    ("sentence", "number"),
    [
        ("Janet makes $18 every day", "$18"),
        (r"\text{Janet makes }\$18\text{ every day.}", r"\$18"),
        ("18 more eggs than before", "18"),
        ("18 (eighteen)", "18"),
        ("There are 1,800 eggs in total.", "1,800"),
        ("18 (nineteen)", ""),
        ("Janet makes 18 or 19 dollars", ""),
        ("Janet does not make 18 dollars", ""),
        ("Janet makes more than 18", ""),
        ("She has 18 dozen eggs there", ""),
        ("the square root of 18", ""),
        ("half of the 18 eggs", ""),
        ("18 eggs", ""),
        ("blorks 18", ""),
        ("about 18 eggs are left", ""),
        ("the 18th egg of them", ""),
        ("it is 18 - 2 eggs", ""),
    ],
)
def test_the_number_of_a_sentence(sentence, number) -> None:
    assert number_of_sentence(sentence) == number


CHOICES_NAMED = r"Which is half of x? (A) $\frac x2$ (B) $x$"


@pytest.mark.parametrize(
    ("answer", "gold", "question", "expected"),
    [
        (r"\frac{x}{2}", "0.5x", CHOICES_NAMED, "correct"),
        (r"\frac32", "3:2", r"Is the ratio $\frac32$ or $\frac23$?", "correct"),
        ("y=2x+1", "2x-y+1=0", "Which line is steeper, $y=2x+1$ or $y=x$?", "correct"),
        ("x^2-1", "(x-1)(x+1)", "Factor $x^2-1$.", "echo"),
        ("x^2-1", "(x-1)(x+1)", "Write $x^2-1$ as a product.", "echo"),
        (r"\frac{6}{8}", r"\frac34", r"What is $\frac{6}{8}$ in lowest terms?", "echo"),
        (r"\frac{6}{8}", r"\frac34", r"What is $\frac{6}{8}$?", "echo"),
        (r"\frac{3}{\sqrt{27}}", r"\frac{\sqrt3}{3}", r"Find $\frac{3}{\sqrt{27}}$.", "echo"),
        ("(x+1)^2-x^2", "2x+1", "What is $(x+1)^2-x^2$?", "echo"),
    ],
)
def test_a_formula_of_the_question_is_an_echo_where_work_was_left(
    answer, gold, question, expected
) -> None:
    assert reason(answer, gold, question=question) == expected


@pytest.mark.parametrize(
    ("answer", "gold", "is_right"),
    [
        ("3,14", "3.14", True),
        ("1000,99", "1000.99", True),
        ("3.14", "3,14", False),
        ("3,14", "314", False),
        ("3,14", "3", False),
        ("3,14", r"\{3,14\}", True),
        ("1,234", "1.234", False),
        ("1.234", "1234", False),
        ("1.234,50", "1234.5", True),
        ("12,34,567", "1234567", True),
        ("12,34,567", "12, 34, 567", True),
        ("1234567", "12, 34, 567", False),
    ],
)
def test_an_ambiguous_numeral_is_read_as_the_gold_can_be(answer, gold, is_right) -> None:
    assert (reason(answer, gold) == "correct") == is_right


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("five", "5"),
        (r"\text{Twelve}", "12"),
        ("twenty-one", "21"),
        ("zero", "0"),
        ("minus forty", "-40"),
        ("one thousand two hundred and five", "1205"),
        ("three million", "3000000"),
        ("two hundred thousand", "200000"),
        ("one two", ""),
        ("twenty eleven", ""),
        ("five twenty", ""),
        ("five and six", ""),
        ("hundred", ""),
        ("five cm", ""),
        ("five thousand million", ""),
        ("and", ""),
        ("one and", ""),
        ("", ""),
    ],
)
def test_numbers_in_words(text, number) -> None:
    assert number_in_words(text) == number


@pytest.mark.parametrize(
    ("answer", "gold", "is_right"),
    [
        (r"\text{five}", "5", True),
        ("5", r"\text{five}", True),
        ("five", "6", False),
        ("five or six", "5", False),
        ("twenty-five", "205", False),
    ],
)
def test_a_number_in_words_is_the_number(answer, gold, is_right) -> None:
    assert (reason(answer, gold) == "correct") == is_right
