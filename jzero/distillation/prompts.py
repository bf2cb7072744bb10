"""The teacher's prompt, which replaces the policy's: the template `teacher.prompt`, filled in.

The prompt can give the teacher information that the policy lacks, such as the answer. The names in
the template are {prompt} (the text of the policy's prompt, or of the last message of a chat),
{gold} (the grader's reference answer) and, if the gold answer is an object, the names of its
fields.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from jzero.errors import UserError
from jzero.files import is_file, read_text
from jzero.model import chat_template, tokenizer
from jzero.model.tokenizer import PreTrainedTokenizerFast
from jzero.problems import template_files
from jzero.types import JsonValue, Problem, Prompt, Rollout

NAME_IN_BRACES = re.compile(r"\{[A-Za-z_]+\}")
SHOWN_CHARACTERS = 60  # maximum characters of a prompt in an error message


@dataclass(frozen=True)
class TeacherPrompts:
    """Converts rollouts to the token ids that a teacher reads."""

    template: str  # the text of teacher.prompt
    max_tokens: int  # maximum tokens of a prompt
    tokenizer: PreTrainedTokenizerFast
    # A cache of prompts by problem id: a group has one prompt, and later steps can repeat it.
    cache: dict[str, np.ndarray] = field(default_factory=dict)

    def tokens_of(self, problem: Problem) -> np.ndarray:
        """Returns the token ids of the teacher's prompt for a problem, i32[P].

        Raises UserError if the template has a name without a value in the problem.
        """
        if problem.id not in self.cache:
            prompt = fill_prompt(self.template, problem)
            text = chat_template.render(self.tokenizer, prompt)
            self.cache[problem.id] = np.array(tokenizer.encode(self.tokenizer, text), np.int32)
        return self.cache[problem.id]

    def sequence_of(self, rollout: Rollout) -> tuple[np.ndarray, int] | None:
        """Returns the token ids that the teacher reads, i32[T], and the length of its prompt.

        The rollout's tokens follow the prompt. Returns None if the prompt is longer than
        `max_tokens`.
        """
        prompt = self.tokens_of(rollout.problem)
        if len(prompt) > self.max_tokens:
            return None
        continuation = rollout.tokens.ids[rollout.prompt_length :]
        return np.concatenate([prompt, continuation]), len(prompt)


def read_template(prompt: str) -> str:
    """Returns the template of `teacher.prompt`: the setting, or the text of the file at its path.

    Raises UserError if the setting is neither text with a name in braces nor a file of such text.
    """
    if NAME_IN_BRACES.search(prompt):
        return prompt
    path = Path(prompt).expanduser()
    if not is_file(path):
        raise UserError(
            f"teacher.prompt={prompt[:SHOWN_CHARACTERS]} is not a file and holds no {{prompt}}: "
            "write {prompt} where the question goes, and {gold} where the answer goes"
        )
    try:
        text = read_text(path, name=f"teacher.prompt={prompt}").removesuffix("\n")
    except OSError as error:
        raise UserError(f"teacher.prompt={prompt} cannot be read as text: {error}") from None
    if not NAME_IN_BRACES.search(text):
        raise UserError(
            f"teacher.prompt={prompt} does not hold the question: write {{prompt}} where it goes"
        )
    return text


def fill_prompt(template: str, problem: Problem) -> Prompt:
    """Returns the teacher's prompt: text, or the messages of a chat with another last message.

    Raises UserError if the template has a name without a value in the problem.
    """
    # In a chat the template replaces only the last message.
    messages = problem.prompt if isinstance(problem.prompt, list) else []
    question = problem.prompt if isinstance(problem.prompt, str) else messages[-1]["content"]
    values = prompt_values(question, problem.gold)
    unknown = [name for name in NAME_IN_BRACES.findall(template) if name[1:-1] not in values]
    if unknown:
        names = ", ".join(f"{{{name}}}" for name in values)
        raise UserError(
            f"teacher.prompt has {unknown[0]}, and the problems of this task have {names}: "
            "choose one of these"
        )
    text = template_files.fill_text(template, values)
    if not messages:
        return text
    return [*messages[:-1], {**messages[-1], "content": text}]


def prompt_values(question: str, gold: JsonValue) -> Mapping[str, str]:
    """Returns the values of the names in a teacher's prompt."""
    # "prompt" and "gold" take precedence over fields of these names.
    fields = gold if isinstance(gold, dict) else {}
    values = {name: as_text(value) for name, value in fields.items()}
    return values | {"prompt": question, "gold": as_text(gold)}


def as_text(value: JsonValue) -> str:
    """Returns text unchanged, and any other value as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
