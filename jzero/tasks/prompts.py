"""Prompt templates: what the policy reads before a response, and between one response and the next.

`task.template` chooses a template by its name in the table of the task: `COUNTDOWN_TEMPLATES`,
`MATH_TEMPLATES`, `CODE_TEMPLATES`, `GUESS_TEMPLATES`, `ENVIRONMENT_TEMPLATES`. It may also be one
of these:

- "FILE": a file with the whole prompt, in plain text or in Jinja (`template_files`)
- "chat:FILE": a file with the message of a user, for the tokenizer's chat template
- "column:NAME": a column of the data set, whose text or messages are the prompt, unchanged
- "module:NAME": a `PromptTemplate` in a module of the user's own, which has to be importable where
  the command runs

To add a template to jzero, add an entry to one of the tables. Imports no jax: grader processes load
this module.
"""

import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jzero.errors import UserError
from jzero.tasks import template_files
from jzero.types import Prompt

CHAT_FILE = "chat:"
COLUMN = "column:"


@dataclass(frozen=True)
class PromptTemplate:
    """The text of a prompt, and how an episode goes on after it.

    The text of a plain template holds the special tokens of the model that it is made for. The text
    of a chat template is the message of a user: the tokenizer's chat template adds the tokens.
    """

    # The prompt. Names in braces are replaced by values that the task passes to `render`; every
    # other brace has to be doubled.
    prompt: str
    # The text between a response and the next in episodes of several turns: the end of the response
    # that ended, the environment's reply in place of {}, and the beginning of the next response.
    # None for a chat template: `tokenizer.suffix` cuts the text out of the tokenizer's own.
    reply: str | None = None
    # Whether the prompt is messages for the tokenizer's chat template.
    chat: bool = False
    # How a response to a question of mathematics marks its answer, a key of `extract.TEMPLATES`.
    answer_mark: str = "boxed"
    # Training, `evaluate` and `generate` stop at these strings where `rollout.stop` is empty.
    # Responses to a template without stop strings end with the model's end-of-sequence token.
    stop: tuple[str, ...] = ()
    # The file that `prompt` was read from. Its braces are those of `template_files`.
    path: str = ""
    # The column of the data set that holds the prompts. Such a template has no text of its own.
    column: str = ""

    def render(self, values: Mapping[str, object], system_prompt: str = "") -> Prompt:
        """Returns the prompt with `values` in place of the names in braces.

        The prompt of a chat template is messages, the first of them `system_prompt` unless that is
        empty. Other templates ignore `system_prompt`.

        Raises:
            UserError: the text has a name in braces that is not a key of `values`, a file has
                none of them, or the prompts are in a data set.
        """
        if self.column:
            raise UserError(
                f"task.template={COLUMN}{self.column} takes prompts from a column of a data set, "
                f"and these problems have none: choose another template"
            )
        text = self._fill(values)
        if not self.chat:
            return text
        messages = [{"role": "user", "content": text}]
        if system_prompt:
            messages.insert(0, {"role": "system", "content": system_prompt})
        return messages

    def check(self, names: Sequence[str]) -> None:
        """Raises UserError if the template is a file that does not fit prompts with these values.

        `names` are the keys of the values that the task passes to `render`.
        """
        if self.path:
            template_files.check_template_file(self.path, tuple(names))

    def _fill(self, values: Mapping[str, object]) -> str:
        if self.path:
            self.check(list(values))
            if template_files.is_jinja(self.path):
                return template_files.fill_jinja(self.path, self.prompt, values)
            return template_files.fill_text(self.prompt, values)
        try:
            return self.prompt.format(**values)
        except (KeyError, IndexError, ValueError) as error:
            names = ", ".join(f"{{{name}}}" for name in values)
            raise UserError(
                f"a prompt template cannot be filled in ({error!r}): this task has {names}; "
                f"write every other brace twice. The template is {self.prompt!r}"
            ) from None


def find_template(name: str, templates: Mapping[str, PromptTemplate]) -> PromptTemplate:
    """Returns the template that `task.template=name` chooses: see the top of this module.

    Raises:
        UserError: there is no such template.
    """
    if name in templates:
        return templates[name]
    if name.startswith(COLUMN):
        column = name.removeprefix(COLUMN)
        if not column:
            raise UserError(f"task.template={name!r} names no column: give {COLUMN}NAME")
        return PromptTemplate(prompt="", column=column)
    path = name.removeprefix(CHAT_FILE)
    is_chat = path != name
    if is_chat or template_files.is_template_file(path):
        text = template_files.read_template_file(path)
        return PromptTemplate(prompt=text, chat=is_chat, path=path)
    return _find_in_module(name, templates)


def _find_in_module(name: str, templates: Mapping[str, PromptTemplate]) -> PromptTemplate:
    """Returns the template "module:NAME"; raises UserError if there is none."""
    known = (
        f"{', '.join(templates)}, or a file (a path with a slash, or ending in "
        f"{', '.join(template_files.SUFFIXES)}), {CHAT_FILE}FILE, {COLUMN}NAME of a data set's "
        "column, or module:NAME of a PromptTemplate"
    )
    if ":" not in name:
        raise UserError(f"task.template={name!r} is not one of {known}")
    try:
        template = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"task.template={name!r} is not one of {known}: {error}") from error
    if not isinstance(template, PromptTemplate):
        raise UserError(f"task.template={name!r} is not a PromptTemplate but {template!r}")
    return template


def is_file_or_column(name: str) -> bool:
    """Returns whether `task.template=name` takes prompts from a file, or from the data set."""
    return name.startswith((CHAT_FILE, COLUMN)) or template_files.is_template_file(name)


def is_own_template(name: str) -> bool:
    """Returns whether `task.template=name` is a template of the user's, and in none of the tables.

    It is a file, a column of a data set, or in a module.
    """
    return ":" in name or is_file_or_column(name)


# The end of a user's turn and the beginning of the assistant's in the format of Qwen's models.
QWEN_REPLY = "<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
R1_REPLY = "\nUser: {}\nAssistant: <think>"
PLAIN_REPLY = "<|endoftext|>{}\n"


# Countdown. The values are {question}, which is COUNTDOWN_QUESTION filled in, and for templates
# without words {spaced} (the numbers with spaces between) and {target}.

COUNTDOWN_QUESTION = (
    "Write an equation that equals {target}, using each of the numbers {numbers} exactly once. "
    "Only + - * / and parentheses are allowed. "
    "Put your reasoning between <think> and </think>, then the equation alone between <answer> and "
    "</answer>, for example <answer>(1 + 2) / 3</answer>."
)

COUNTDOWN_TEMPLATES: dict[str, PromptTemplate] = {
    # For base models.
    "r1": PromptTemplate(
        prompt=(
            "This is a conversation between User and Assistant. "
            "User asks a question; Assistant first thinks it through, then replies with the answer."
            "\n"
            "User: {question}\n"
            "Assistant: Let me solve this step by step.\n"
            "<think>"
        ),
        reply=R1_REPLY,
    ),
    # For Qwen's instruction-tuned models.
    "qwen_chat": PromptTemplate(
        prompt=(
            "<|im_start|>system\n"
            "You are a helpful assistant. You think before you answer.<|im_end|>\n"
            "<|im_start|>user\n"
            "{question}<|im_end|>\n"
            "<|im_start|>assistant\n"
            "Let me solve this step by step.\n"
            "<think>"
        ),
        reply=QWEN_REPLY,
    ),
    # For models from scratch with jzero's own tokenizer, which has hardly any words.
    "plain": PromptTemplate(prompt="{spaced}={target}\n", reply=PLAIN_REPLY),
}


# Questions of mathematics. The values are {question} and {instruction}, which is BOXED.

# The sentence that Qwen2.5-Math was tuned on.
BOXED = "Please reason step by step, and put your final answer within \\boxed{}."

# The form that the rewards format and tag_count want.
TAGS_ON_LINES = (
    "You think about a problem before you answer. Write in this form, with your thoughts in the "
    "first block and the answer for the user in the second: "
    "<think>\n...\n</think>\n<answer>\n...\n</answer>"
)

MATH_TEMPLATES: dict[str, PromptTemplate] = {
    # What Qwen2.5-Math was tuned on, for its base models as well.
    "qwen_math": PromptTemplate(
        prompt=(
            "<|im_start|>system\n"
            "{instruction}<|im_end|>\n"
            "<|im_start|>user\n"
            "{question}<|im_end|>\n"
            "<|im_start|>assistant\n"
        ),
        reply=QWEN_REPLY,
    ),
    # For base models: thoughts and answer in tags.
    "r1": PromptTemplate(
        prompt=(
            "The following is a dialogue. "
            "User poses a problem; Assistant works it out in the mind first and then replies. "
            "The thoughts stand between <think> and </think>, the reply between <answer> and "
            "</answer>, that is: <think> thoughts </think> <answer> reply </answer>.\n"
            "User: {question}\n"
            "Assistant: <think>"
        ),
        reply=R1_REPLY,
        answer_mark="r1",
        stop=("</answer>",),
    ),
    # The question alone.
    "no": PromptTemplate(prompt="{question}", reply="\n{}\n"),
    # For the models that were distilled from DeepSeek-R1, whose responses begin with thoughts.
    "r1_distill_qwen": PromptTemplate(
        prompt=(
            "<｜begin▁of▁sentence｜><｜User｜>{question} {instruction}\n<｜Assistant｜><think>\n"
        ),
        reply="<｜end▁of▁sentence｜><｜User｜>{}\n<｜Assistant｜><think>\n",
        answer_mark="think_boxed",
    ),
    # The same models without the beginning of the thoughts, which the policy has to write itself.
    "r1_distill_tags": PromptTemplate(
        prompt=f"<｜begin▁of▁sentence｜>{TAGS_ON_LINES}<｜User｜>{{question}}<｜Assistant｜>",
        reply="<｜end▁of▁sentence｜><｜User｜>{}<｜Assistant｜>",
        answer_mark="final_answer",
    ),
    "qwen3": PromptTemplate(
        prompt=("<|im_start|>user\n{question}\n{instruction}<|im_end|>\n<|im_start|>assistant\n"),
        reply=QWEN_REPLY,
    ),
    # The tokenizer's own chat template. The system prompt is `task.system_prompt` or BOXED.
    "chat": PromptTemplate(prompt="{question}", chat=True),
}
DEFAULT_MATH_TEMPLATE = "qwen_math"


# Programming. The values are {question} and {instruction}, which says what form the answer has.

CODE_TEMPLATES: dict[str, PromptTemplate] = {
    # The tokenizer's own chat template.
    "chat": PromptTemplate(prompt="{question}\n\n{instruction}", chat=True),
    "qwen3": PromptTemplate(
        prompt="<|im_start|>user\n{question}\n\n{instruction}<|im_end|>\n<|im_start|>assistant\n"
    ),
    # For the models that were distilled from DeepSeek-R1.
    "r1_distill_qwen": PromptTemplate(
        prompt=(
            "<｜begin▁of▁sentence｜><｜User｜>{question}\n\n{instruction}<｜Assistant｜><think>\n"
        )
    ),
    # For models from scratch with jzero's own tokenizer, which has hardly any words.
    "plain": PromptTemplate(prompt="{question}\n"),
}


# Arithmetic. The value is {question}, such as 12*34.

ARITHMETIC_TEMPLATES: dict[str, PromptTemplate] = {
    "plain": PromptTemplate(prompt="{question}=\n", reply=PLAIN_REPLY),
    "chat": PromptTemplate(prompt="{question}=? Reply with the number alone.", chat=True),
}


# Guess. The value is {largest}.

# Environments of the user's. The value is {observation}, the text that `reset` returns.
ENVIRONMENT_TEMPLATES: dict[str, PromptTemplate] = {
    "chat": PromptTemplate(prompt="{observation}", chat=True),
    "plain": PromptTemplate(prompt="{observation}", reply=PLAIN_REPLY),
}

GUESS_TEMPLATES: dict[str, PromptTemplate] = {
    "plain": PromptTemplate(prompt="1-{largest}\n", reply=PLAIN_REPLY),
    "chat": PromptTemplate(
        prompt=(
            "I think of a whole number from 1 to {largest}. Guess it: reply with the number alone."
        ),
        chat=True,
    ),
}
