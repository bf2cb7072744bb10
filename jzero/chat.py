"""Talks to a model in the terminal: `jzero chat RUN`, or `jzero chat DIR_OR_ID`.

    jzero chat RUN [--adapter DIR] [--system TEXT] [--temperature T] [--config.section.field=value ...]

RUN is the workdir of a run: its newest export answers with the run's system prompt and lengths. The
answer is printed while it is sampled. A model without a chat template continues each line as text.

/new starts a new conversation, /system TEXT another one with this system prompt, /help lists the
commands, and /quit or Ctrl-D ends the command. If the input is not a terminal, every line of it is
one message. Only the answers are printed on stdout, unless both are a terminal.
"""  # noqa: E501 (the usage that --help prints)

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TextIO

import numpy as np

from jzero import cli, command_flags, config, terminal
from jzero.commands.evaluate import defaults, settings_of_run
from jzero.decoder import sequence as sequences
from jzero.decoder.driver import Batch, Phase
from jzero.decoder.scheduler import Scheduler
from jzero.decoder.sequence import Groups, make_groups
from jzero.errors import UserError
from jzero.model import qwen
from jzero.problems.prompts import BOXED, NO_SYSTEM_PROMPT
from jzero.rollout.sampler import Sampler
from jzero.run.finished import FoundModel, find_model
from jzero.service.decoders import load
from jzero.workers.pool import Pool

LONGEST_PROMPT = 2048  # tokens of the conversation, where the model has as many positions
STREAMED_TOKENS = 4  # tokens of one call of the device, and so of one piece of output
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # the end of a text that ends within a character
RESET, SYSTEM, QUIT, HELP = "/new", "/system", "/quit", "/help"
COMMANDS = f"{RESET} starts again, {SYSTEM} TEXT with a system prompt, {QUIT} or Ctrl-D ends"
_COMMAND = re.compile(r"/[a-z]+")  # "/usr/bin is ..." is a message

Message = dict[str, str]  # {"role": ..., "content": ...}


@dataclass
class Chat:
    """A conversation with a model. Its messages grow with every answer."""

    sampler: Sampler
    params: qwen.Params
    temperature: float
    seed: int
    system_prompt: str  # "": none
    messages: list[Message]
    num_answers: int = 0

    @property
    def is_chat(self) -> bool:
        """Whether the model has a chat template. Otherwise it continues text."""
        return bool(self.sampler.tokenizer.chat_template)

    def start_again(self, system_prompt: str) -> None:
        """Forgets the conversation."""
        self.system_prompt = system_prompt
        self.messages = []

    def answer(self, text: str, write: Callable[[str], None]) -> str:
        """Returns the answer to a message, and adds both to the conversation.

        `write` gets the pieces of the answer while it is sampled. Raises UserError if the message
        alone is too long.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        tokens, messages = self._fitting(messages)
        answer = self._sample(tokens, write)
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        return answer

    def _fitting(self, messages: list[Message]) -> tuple[list[int], list[Message]]:
        """Returns the tokens of a conversation, without its oldest messages if it is too long."""
        longest = self.sampler.engine.settings.max_prompt_tokens
        # Without a template there is no format for earlier turns.
        if not self.is_chat:
            messages = messages[-1:]
        while True:
            if self.is_chat:
                system = {"role": "system", "content": self.system_prompt}
                shown = [system, *messages] if self.system_prompt else messages
                tokens = self.sampler.prompt_ids(shown)
            else:
                tokens = self.sampler.prompt_ids(messages[0]["content"])
            if len(tokens) <= longest:
                return tokens, messages
            if len(messages) == 1:
                raise UserError(
                    f"the message has {len(tokens)} tokens, and rollout.max_prompt_tokens="
                    f"{longest}: raise it, or write less"
                )
            # A question goes together with its answer.
            messages = messages[2:]

    def _sample(self, tokens: Sequence[int], write: Callable[[str], None]) -> str:
        """Returns the response to a prompt, and writes its pieces."""
        engine = self.sampler.engine
        groups = make_groups([np.array(tokens, np.int32)], 1, engine.settings.max_new_tokens)
        [[sequence]] = groups
        key = self.seed, self.num_answers
        self.num_answers += 1
        written = Written(groups, self.sampler.text_of, write)
        self.sampler.decoder.run(Phase(self.params, key, 1, self.temperature), written)
        return sequence.turn_text


class Written(Batch):
    """An answer that is written while it is sampled."""

    def __init__(
        self,
        groups: Groups,
        text_of: Callable[[Sequence[int]], str],
        write: Callable[[str], None],
    ) -> None:
        super().__init__(groups)
        self.text_of = text_of
        self.write = write
        self.written = ""

    def more(self) -> Groups:
        """Writes what is new, before every call of the device."""
        [[sequence]] = self.groups
        # The tokens of a finished answer include the one that ended it.
        if not sequence.finish_reason:
            text = self.text_of(sequence.new_tokens)
            if not text.endswith(INCOMPLETE):
                self.write_news(text)
        return []

    def turn_ended(self, run: Scheduler, sequence: sequences.Sequence) -> None:
        """Writes the rest."""
        self.write_news(sequence.turn_text)

    def write_news(self, text: str) -> None:
        """Writes what follows the written text."""
        # The last characters of a text may change when more tokens follow, but written text stays.
        if text.startswith(self.written):
            self.write(text[len(self.written) :])
            self.written = text


# -- the command -----------------------------------------------------------------------------------


def parse(arguments: Sequence[str]) -> tuple[config.Config, float, str]:
    """Returns the settings, the temperature and the system prompt.

    Raises UserError, or exits, if the command line has a mistake.
    """
    args, config_flags = command_flags.chat(__doc__).parse_known_args(arguments)
    found = find_model(args.model)
    if args.adapter:
        found = replace(found, adapter=args.adapter)
    settings = cli.parse_settings(chat_settings(found), config_flags)
    temperature = args.temperature
    if temperature is None:
        temperature = settings.rollout.temperature
    system_prompt = args.system
    if system_prompt is None:
        system_prompt = system_prompt_of(found)
    return settings, temperature, system_prompt


def chat_settings(found: FoundModel) -> config.Config:
    """Returns settings that answer one message at a time."""
    settings = dialogue_settings(found)
    settings.rollout.num_slots = 1
    settings.rollout.decode_steps = STREAMED_TOKENS
    return settings


def dialogue_settings(found: FoundModel) -> config.Config:
    """Returns settings that answer messages: of the run that trained the model, if there is one.

    Prompts may be longer than those of the run, because a conversation grows. Texts end before the
    stop string.
    """
    settings = defaults(found.path)
    if found.settings is not None:
        run = settings_of_run(found, found.settings)
        rollout = replace(
            run.rollout,
            max_prompt_tokens=min(settings.rollout.max_prompt_tokens, LONGEST_PROMPT),
            num_slots=settings.rollout.num_slots,
            max_turns=1,
            max_episode_tokens=0,
        )
        settings = replace(run, rollout=rollout)
    settings.rollout.keep_stop = False
    settings.eval.max_new_tokens = 0
    return found.with_model(settings)


def system_prompt_of(found: FoundModel) -> str:
    """Returns the system prompt with which a run trained; "" without one."""
    if found.settings is None or found.settings.task.template != "chat":
        return ""
    given = found.settings.task.system_prompt
    if given == NO_SYSTEM_PROMPT:
        return ""
    # The default of questions with an answer (`math_problems.to_problem`).
    is_question = found.settings.task.name in ("gsm8k", "math", "math_multiturn")
    return given or (BOXED if is_question else "")


@terminal.keep_stdout_for_answers()
def main() -> None:
    """Runs the command."""
    arguments = cli.start_jax(sys.argv[1:])
    with cli.user_errors(), Pool(0) as pool:
        settings, temperature, system_prompt = parse(arguments)
        config.validate(settings)
        sampler, params = load(settings, pool)
        sampler.warn_of_missing_stop()
        chat = Chat(sampler, params, temperature, settings.train.seed, system_prompt, [])
        is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        talk(chat, sys.stdin, sys.stdout, is_terminal=is_terminal)


def talk(chat: Chat, source: TextIO, target: TextIO, *, is_terminal: bool) -> None:
    """Answers the lines of `source` until it ends."""

    def write(piece: str) -> None:
        terminal.write(piece, target, end="")

    def tell(line: str) -> None:
        # Only answers go to a pipe.
        terminal.write(line, target if is_terminal else sys.stderr)

    if chat.is_chat and chat.system_prompt:
        tell(f"system prompt: {chat.system_prompt}")
    if not chat.is_chat:
        tell("the model has no chat template: it continues each line")
    if is_terminal:
        tell(COMMANDS)
    while True:
        if is_terminal:
            write("> ")
        line = source.readline()
        if not line or line.strip() == QUIT:
            return
        text = line.rstrip("\n")
        command, _, argument = text.partition(" ")
        if command == RESET:
            chat.start_again(chat.system_prompt)
        elif command == SYSTEM:
            chat.start_again(argument)
        elif _COMMAND.fullmatch(text.strip()):
            found = "" if command == HELP else f"there is no command {text.strip()}: "
            tell(found + COMMANDS)
        elif text.strip():
            try:
                chat.answer(text, write)
            except UserError as error:
                tell(f"error: {error}")
            write("\n")


if __name__ == "__main__":
    terminal.run_command(main)
