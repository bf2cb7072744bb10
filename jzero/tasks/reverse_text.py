"""Write a text backwards, character by character: "tea now" becomes "won aet".

The score is the similarity of the answer to the reversed text, so that a policy that gets a part
right is paid for it. prime-rl publishes a curve of the same task with paragraphs. Here the texts
are words drawn at random, so no data is needed. `configs/reverse_text.py` has the recipes. Imports
no jax: grader processes load this module.
"""

from __future__ import annotations

import random
import re
from difflib import SequenceMatcher
from typing import TYPE_CHECKING

from jzero.errors import UserError
from jzero.fields import Field, record
from jzero.json_values import as_text
from jzero.problems import problem_sets
from jzero.problems.options import read_options
from jzero.problems.prompts import REVERSE_TEXT_TEMPLATES, REVERSED, find_template
from jzero.types import Grade, JsonValue, Problem

if TYPE_CHECKING:
    from jzero.config import TaskConfig

NAME = "reverse_text"
MOST_DRAWS = 200
_WORDS = """
able about above across after again against almost along also always among animal answer apple arm
around ask autumn away back bag ball bank basket beach bear because bed before begin bell below
bench beside better between bird blue board boat book both bottle box branch bread bridge bright
bring brother brown bucket build busy butter button cake call candle car careful carry castle cat
chair change cheese child circle city clean clear climb clock close cloud coat coffee cold color
corner count country cousin cover cross cup dance dark day deep desk dinner door draw dream dress
drink drive drop dry early earth east easy eat edge egg eight empty enough evening every eye face
fall family far farm fast father feather field find finger fire first fish five floor flower fly
follow food foot forest four fox free fresh friend front fruit full garden gate gentle give glass
gold good grass gray great green ground grow half hand happy hard hat hear heart heavy help here
high hill hold home honey hope horse hot hour house ice island jacket join journey jump keep key
kind king kitchen knife know ladder lake lamp large last laugh leaf learn left letter light line
lion listen little long look lost loud low lunch make many map market meadow meet middle milk mind
minute mirror money month moon morning mother mountain mouse mouth move music name narrow near
neighbor never new night nine noise north nose number ocean old only open orange other outside owl
page paint paper park part path pencil people picture piece plant plate play pocket pond poor press
pretty promise pull push quick quiet rain read ready red rest rice ride right ring river road rock
roof room root rope round sail salt sand school sea season second seed seven shadow share sheep ship
shirt shoe shop short shoulder side silver simple sing sister sit six sky sleep slow small smile
snow soft some song soon sound soup south speak spoon spring square stairs stand star station stay
step still stone stop store storm story street strong sugar summer sun sweet swim table talk tall
tea tell ten thank thick thin three ticket time today together tomorrow tooth town train travel tree
true turn two uncle under until valley very village visit voice wait walk wall warm wash watch water
west wheel white wide wild wind window winter with wolf wonder wood word work world write yellow
young
"""
WORDS = _WORDS.split()
_ANSWER = re.compile(rf"<{REVERSED}>\s*(.*?)\s*</{REVERSED}>", re.DOTALL)


@record
class Options:
    """Settings of this task, `task.options=name=value`."""

    words_min: int = Field(default=3, ge=1, le=1000)
    """Least number of words of a text."""
    words_max: int = Field(default=8, ge=1, le=1000)
    """Largest number of words of a text."""


def options_of(task: TaskConfig) -> Options:
    """Returns the options of reverse_text; the defaults if the task of the run is another one."""
    return read_options(Options, task.options)


def check(task: TaskConfig) -> None:
    """Raises UserError if the numbers of words contradict each other."""
    options = options_of(task)
    if options.words_min > options.words_max:
        raise UserError(
            f"task.options=words_min={options.words_min} is above words_max={options.words_max}: "
            "lower words_min or raise words_max"
        )


# Problems.


def text_of(options: Options, split: str, seed: int, index: int) -> str:
    """Returns the text of a problem.

    A text of an evaluation is never asked in training, unless words_max is so small that there are
    hardly any.
    """
    rng = random.Random(f"{NAME}/{split}/{seed}/{index}")
    text = ""
    for _ in range(MOST_DRAWS):
        text = " ".join(rng.choices(WORDS, k=rng.randint(options.words_min, options.words_max)))
        if problem_sets.is_held_out(text) == (split == "eval"):
            break
    return text


def _problems(task: TaskConfig, split: str, seed: int, indices: range) -> list[Problem]:
    template = find_template(task.template, REVERSE_TEXT_TEMPLATES)
    options = options_of(task)
    problems = []
    for index in indices:
        text = text_of(options, split, seed, index)
        prompt = template.render({"text": text}, task.system_prompt)
        problems.append(Problem(f"{NAME}/{split}/{index}", NAME, prompt, text[::-1]))
    return problems


def train_problems(task: TaskConfig, seed: int, step: int, count: int) -> list[Problem]:
    """Returns the problems of one step."""
    return _problems(task, "train", seed, range(step * count, (step + 1) * count))


def eval_problems(task: TaskConfig, count: int) -> list[Problem]:
    """Returns `count` problems, the same in every run."""
    return _problems(task, "eval", problem_sets.EVAL_SEED, range(count))


def grade(response: str, gold: JsonValue, task: TaskConfig) -> Grade:
    """Returns the similarity of the answer to the reversed text, from 0 to 1.

    The similarity is difflib's ratio: twice the number of characters in common blocks, divided by
    the number of characters of both texts. In template plain the whole response is the answer, and
    in chat the last text between the tags is.
    """
    answer = _answer_of(response, task.template)
    if answer is None:
        return Grade(0.0, False, "no answer")
    reversed_text = as_text(gold, "gold")
    # An answer that goes on for ever costs no more than one of twice the length.
    if len(answer) > 2 * len(reversed_text):
        return Grade(0.0, False, "too long")
    score = SequenceMatcher(None, answer, reversed_text, autojunk=False).ratio()
    is_right = answer == reversed_text
    return Grade(score, is_right, "correct" if is_right else "wrong value")


def _answer_of(response: str, template: str) -> str | None:
    """Returns the answer of a response, or None if there is none."""
    if template == "plain":
        return response.strip() or None
    found = _ANSWER.findall(response)
    return found[-1] if found and found[-1] else None


# The warm start.


def example(task: TaskConfig, seed: int, index: int, tries: float) -> tuple[str, str]:
    """Returns the index-th supervised example of template plain: (prompt, response).

    `tries` is unused.
    """
    text = text_of(options_of(task), "warm_start", seed, index)
    return REVERSE_TEXT_TEMPLATES["plain"].prompt.format(text=text), f"{text[::-1]}\n"


def max_tokens(task: TaskConfig, tries: float) -> int:
    """Returns an upper bound on the tokens of a response: its characters, and the end."""
    return options_of(task).words_max * (max(map(len, WORDS)) + 1) + 1
