"""Prompt templates: the text before a response, and the text between two responses.

`task.template` is the name of a template in the table of the task: `COUNTDOWN_TEMPLATES`,
`MATH_TEMPLATES`, `CODE_TEMPLATES`, `GUESS_TEMPLATES`, `ARITHMETIC_TEMPLATES`, `SUMS_TEMPLATES`,
`REVERSE_TEXT_TEMPLATES`, `ENVIRONMENT_TEMPLATES`. It may also be one of these:

- "FILE": a file with the complete prompt, in plain text or in Jinja (`template_files`)
- "chat:FILE": a file with the user message for the tokenizer's chat template
- "column:NAME": a column of the data set with text or messages, which are the unchanged prompts
- "module:NAME": a `PromptTemplate` in a user-defined module, which must be importable where the
  command runs

To add a template to jzero, add an entry to one of the tables. Imports no jax: grader processes load
this module.
"""

import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jzero.errors import UserError
from jzero.problems import template_files
from jzero.types import Prompt

CHAT_FILE = "chat:"
NO_SYSTEM_PROMPT = "none"  # this text as the system prompt means no system prompt
COLUMN = "column:"


@dataclass(frozen=True)
class PromptTemplate:
    """The text of a prompt, and the text between the responses of an episode.

    The text of a plain template contains the special tokens of the model that it is written for.
    The text of a chat template is a user message: the tokenizer's chat template adds the tokens.
    """

    # The prompt. `render` replaces names in braces by values of the task. All other braces must be
    # doubled.
    prompt: str
    # The text between two responses of a multi-turn episode: the end of the first response, the
    # environment's reply at {}, and the beginning of the second response. None for a chat template:
    # `tokenizer.suffix` cuts the text out of the tokenizer's chat template.
    reply: str | None = None
    # Whether the prompt consists of messages for the tokenizer's chat template.
    chat: bool = False
    # How a response to a math question marks its answer: a key of `extract.TEMPLATES`.
    answer_mark: str = "boxed"
    # The stop strings of training, `evaluate` and `generate` if `rollout.stop` is empty. Without
    # stop strings, responses end with the model's end-of-sequence token.
    stop: tuple[str, ...] = ()
    # The file of `prompt`. `template_files` describes the braces in such a file.
    path: str = ""
    # The column of the data set with the prompts. Such a template has no text.
    column: str = ""

    def render(self, values: Mapping[str, object], system_prompt: str = "") -> Prompt:
        """Returns the prompt with the names in braces replaced by `values`.

        A chat template returns messages. The first message is `system_prompt` unless that is empty
        or NO_SYSTEM_PROMPT. Other templates ignore `system_prompt`.

        Raises:
            UserError: the text has a name in braces that is not a key of `values`, a file has
                none of the keys, or the prompts are in a column of a data set.
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
        if system_prompt and system_prompt != NO_SYSTEM_PROMPT:
            messages.insert(0, {"role": "system", "content": system_prompt})
        return messages

    def check(self, names: Sequence[str]) -> None:
        """Raises UserError if the template is a file that does not fit the values of the task.

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
    """Returns the template for `task.template=name`: see the module's docstring.

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
    """Returns the template "module:NAME". Raises UserError if there is no such template."""
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
    """Returns whether `task.template=name` is a file or a column of the data set."""
    return name.startswith((CHAT_FILE, COLUMN)) or template_files.is_template_file(name)


def is_own_template(name: str) -> bool:
    """Returns whether `task.template=name` is user-defined, in a file, a column or a module."""
    return ":" in name or is_file_or_column(name)


# The texts between two responses. The first is in the chat format of Qwen's models.
QWEN_REPLY = "<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
R1_REPLY = "\nUser: {}\nAssistant: <think>"
PLAIN_REPLY = "<|endoftext|>{}\n"


# Countdown. The values are {question}, which is COUNTDOWN_QUESTION filled in, and for templates
# without words {spaced} (the numbers, separated by spaces) and {target}.

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


# Math questions. The values are {question} and {instruction}, which is BOXED.

# The instruction that Qwen2.5-Math was tuned on.
BOXED = "Please reason step by step, and put your final answer within \\boxed{}."

# Asks for the format that the rewards `format` and `tag_count` check.
TAGS_ON_LINES = (
    "You think about a problem before you answer. Write in this form, with your thoughts in the "
    "first block and the answer for the user in the second: "
    "<think>\n...\n</think>\n<answer>\n...\n</answer>"
)

MATH_TEMPLATES: dict[str, PromptTemplate] = {
    # The format that Qwen2.5-Math was tuned on. It also fits the base models of Qwen2.5-Math.
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
    # Only the question.
    "no": PromptTemplate(prompt="{question}", reply="\n{}\n"),
    # For models distilled from DeepSeek-R1. Their responses begin with thoughts.
    "r1_distill_qwen": PromptTemplate(
        prompt=(
            "<｜begin▁of▁sentence｜><｜User｜>{question} {instruction}\n<｜Assistant｜><think>\n"
        ),
        reply="<｜end▁of▁sentence｜><｜User｜>{}\n<｜Assistant｜><think>\n",
        answer_mark="think_boxed",
    ),
    # For the same models. The prompt does not open the thoughts: the policy must write <think>.
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


# Programming. The values are {question} and {instruction}, which describes the answer's format.

CODE_TEMPLATES: dict[str, PromptTemplate] = {
    # The tokenizer's own chat template.
    "chat": PromptTemplate(prompt="{question}\n\n{instruction}", chat=True),
    "qwen3": PromptTemplate(
        prompt="<|im_start|>user\n{question}\n\n{instruction}<|im_end|>\n<|im_start|>assistant\n",
        reply=QWEN_REPLY,
    ),
    # For models distilled from DeepSeek-R1.
    "r1_distill_qwen": PromptTemplate(
        prompt=(
            "<｜begin▁of▁sentence｜><｜User｜>{question}\n\n{instruction}<｜Assistant｜><think>\n"
        ),
        reply="<｜end▁of▁sentence｜><｜User｜>{}<｜Assistant｜><think>\n",
    ),
    # For models from scratch with jzero's own tokenizer, which has hardly any words.
    "plain": PromptTemplate(prompt="{question}\n", reply=PLAIN_REPLY),
}


# Arithmetic. The value is {question}, such as 12*34.

ARITHMETIC_TEMPLATES: dict[str, PromptTemplate] = {
    "plain": PromptTemplate(prompt="{question}=\n", reply=PLAIN_REPLY),
    "chat": PromptTemplate(prompt="{question}=? Reply with the number alone.", chat=True),
}


# Sums. The values are {examples}, the lines of solved problems, and {question}, such as 35 + 45.

SUMS_TEMPLATES: dict[str, PromptTemplate] = {
    "plain": PromptTemplate(prompt="{examples}{question} =", stop=("\n",)),
    "chat": PromptTemplate(
        prompt="{examples}{question} =\n\nReply with the last number alone.", chat=True
    ),
}


# Texts to write backwards. The value is {text}.

REVERSED = "reversed_text"  # the tag around an answer
REVERSE_TEXT_TEMPLATES: dict[str, PromptTemplate] = {
    "plain": PromptTemplate(prompt="{text}\n", stop=("\n",)),
    "chat": PromptTemplate(
        prompt="Write this text backwards, character by character, between "
        f"<{REVERSED}> and </{REVERSED}>:\n\n{{text}}",
        chat=True,
    ),
}


# User-defined environments. The value is {observation}, the text that `reset` returns.

ENVIRONMENT_TEMPLATES: dict[str, PromptTemplate] = {
    "chat": PromptTemplate(prompt="{observation}", chat=True),
    "plain": PromptTemplate(prompt="{observation}", reply=PLAIN_REPLY),
}


# Guess. The value is {largest}.

GUESS_TEMPLATES: dict[str, PromptTemplate] = {
    "plain": PromptTemplate(prompt="1-{largest}\n", reply=PLAIN_REPLY),
    "chat": PromptTemplate(
        prompt=(
            "I think of a whole number from 1 to {largest}. Guess it: reply with the number alone."
        ),
        chat=True,
    ),
}
