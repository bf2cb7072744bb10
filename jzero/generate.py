"""`python -m jzero.generate --model DIR --data DATA --n 4 --out FILE.jsonl [--config.section.field=value ...]`

Samples n responses to every problem of a set, grades them, and writes one JSON line for each. The
rows are what supervised fine-tuning reads: a prompt and a completion, as text or, with
task.template=chat, as messages. Responses come from jzero's engine or, with --base-url, from a
server that speaks the OpenAI API; rollout.num_slots of them are sampled at once.

The file grows by chunks of rollout.num_prompts problems. Each chunk has noise of its own, so the
same command goes on after a kill and ends with the same file.

--no-gold answers problems without gold answers and grades nothing. --split NAME answers a split of
the set in its own order. --push-to-hub USER/NAME uploads the complete file as a data set.
"""  # noqa: E501 (the first line is the usage that --help prints)

import contextlib
import importlib.util
import json
import os
import re
import sys
import time
import urllib.parse
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import pydantic

from jzero import cli, config, evaluate, setup
from jzero.distributed import processes
from jzero.errors import UserError
from jzero.files import JsonObject
from jzero.grading.pool import Pool
from jzero.model import hub
from jzero.model.hub import public_name
from jzero.run.lock import lock_directory
from jzero.run.workdir import claim_workdir
from jzero.tasks import (
    asyncio_environments,
    batched_rewards,
    environment,
    find_task,
    math_problems,
    rewards,
    suites,
)
from jzero.tasks.prompts import MATH_TEMPLATES
from jzero.types import Problem, Turn, grade_of

# Takes the problems of a chunk and its number; returns n graded responses to each, in order.
SampleChunk: TypeAlias = Callable[[list[Problem], int], list[Turn]]

RETRIES = 8  # of a request; the pauses grow from half a second to 8 seconds
HUB_FILE = "train.jsonl"  # of a data set on the hub: `datasets` loads it as the split train


@dataclass(frozen=True)
class Options:
    """The flags of the command that are not settings."""

    model: str
    out: Path
    n: int = 1
    limit: int = 0  # problems; 0 = all of a set
    greedy: bool = False  # the likeliest token each time, in place of samples
    base_url: str | None = None
    timeout: float = 600.0  # seconds
    retries: int = RETRIES
    gold: bool = True  # False: the problems have no answers, and nothing is graded
    split: str | None = None  # None: all that can be trained on, shuffled by the seed
    push_to_hub: str | None = None  # "user/name" of a data set on the hub
    private: bool = False
    force: bool = False


def run(options: Options, settings: config.Config) -> None:
    """Generates what is missing in the file `options.out`."""
    check(options, settings)
    problems = read_problems(options, settings)
    with Pool(settings.task.grade_workers) as pool:
        if options.base_url:
            with contextlib.closing(RemoteSampler(options, settings, pool)) as remote:
                write_chunks(options, settings, problems, remote.sample_chunk)
        else:
            generate_here(options, settings, problems, pool)
    if options.push_to_hub and processes.is_first_process():
        files = {HUB_FILE: options.out, "README.md": describe(options, settings).encode()}
        print(hub.push_dataset(files, options.push_to_hub, options.private, options.force))


def describe(options: Options, settings: config.Config) -> str:
    """Returns the card of the data set. It names no directory of whoever made the set."""
    sources = settings.task.data or settings.task.name
    data = ", ".join(public_name(source) for source in suites.split_commas(sources))
    adapter = settings.model.adapter.path
    model = public_name(options.model)
    if adapter:
        model += f" with the adapter {public_name(adapter)}"
    graded = "graded by jzero" if options.gold else "not graded"
    return (
        f"{options.n} responses of {model} to every problem of {data}, "
        f"{graded}.\n\nSampled with jzero at temperature {settings.rollout.temperature}, top-p "
        f"{settings.rollout.top_p}, with at most {settings.rollout.max_new_tokens} new tokens. The "
        "columns `prompt` and `completion` are those of supervised fine-tuning.\n"
    )


def generate_here(
    options: Options, settings: config.Config, problems: list[Problem], pool: Pool
) -> None:
    """Generates with jzero's engine, on the devices of this process."""
    sampler, params = evaluate.load(settings, pool)
    encoded = sampler.encode_problems(problems)  # without the problems whose prompt is too long
    if not encoded:
        longest = settings.rollout.max_prompt_tokens
        raise UserError(
            f"every prompt is longer than rollout.max_prompt_tokens={longest}: raise it"
        )

    def sample_chunk(chunk: list[Problem], number: int) -> list[Turn]:
        first = number * settings.rollout.num_prompts
        rollouts, _ = sampler.sample_rollouts(
            params,
            encoded[first : first + len(chunk)],
            options.n,
            temperature_of(options, settings),
            (settings.train.seed, number),
            version=0,
        )
        return [rollout.turns[-1] for rollout in sampler.gather_rollouts(rollouts)]

    write_chunks(options, settings, [item.problem for item in encoded], sample_chunk)


def temperature_of(options: Options, settings: config.Config) -> float:
    """Returns the sampling temperature: 0 for the likeliest token."""
    return 0.0 if options.greedy else settings.rollout.temperature


# -- Before sampling -------------------------------------------------------------------------------


def check(options: Options, settings: config.Config) -> None:
    """Raises UserError for options and settings that cannot work."""
    checked = settings
    if options.base_url and settings.model.adapter.path:
        raise UserError(
            f"--adapter {settings.model.adapter.path} is for jzero's own engine: leave it out, and "
            "give the name that the server of --base-url has for the adapter as --model"
        )
    if options.base_url:
        # The name is the server's: a model of this name here says nothing about its lengths.
        checked = replace(settings, model=replace(settings.model, path=""))
    setup.check_task(checked)
    if options.n < 1:
        raise UserError(f"--n={options.n} must be at least 1")
    if options.greedy and options.n > 1:
        raise UserError(
            f"--n={options.n}: all greedy responses to a problem are the same, give --n 1 or no "
            "--greedy"
        )
    if settings.rollout.max_turns > 1:
        raise UserError(
            f"rollout.max_turns={settings.rollout.max_turns}: "
            "only responses of one turn can be generated, set it to 1"
        )
    if not options.gold and settings.task.reward.functions != ("accuracy",):
        raise UserError("--no-gold grades nothing: leave task.reward.functions as it is")
    if options.retries < 0:
        raise UserError(f"--retries={options.retries} must be at least 0")
    if options.push_to_hub and not re.fullmatch(r"[\w.-]+/[\w.-]+", options.push_to_hub):
        raise UserError(f"--push-to-hub {options.push_to_hub}: give USER/NAME of a data set")
    if (options.private or options.force) and not options.push_to_hub:
        raise UserError("--private and --force are about the push: give --push-to-hub, too")
    if options.base_url:
        check_base_url(options.base_url)
        if not importlib.util.find_spec("openai"):
            raise UserError("--base-url needs the package openai: pip install openai")
    if options.out.exists() and not claim_directory(options.out).exists():
        raise UserError(f"--out {options.out} exists, and not from this command: give another")


def check_base_url(base_url: str) -> None:
    """Raises UserError unless the address is http://HOST[:PORT]/... or https://..."""
    try:
        address = urllib.parse.urlsplit(base_url)
        is_valid = address.scheme in ("http", "https") and bool(address.hostname)
        _ = address.port  # raises ValueError if it is no number
    except ValueError:
        is_valid = False
    if not is_valid:
        raise UserError(f"--base-url {base_url}: give an address like http://HOST:PORT/v1")


def read_problems(options: Options, settings: config.Config) -> list[Problem]:
    """Returns the problems to answer: the first `options.limit` of the task, or the whole set."""
    task = find_task(settings.task.name)
    is_a_set = task.templates is MATH_TEMPLATES
    if options.split is not None or not options.gold:
        if not is_a_set:
            raise UserError(
                f"task.name={settings.task.name} makes its own problems: --split and --no-gold are "
                "for sets of questions"
            )
        problems = math_problems.split_problems(
            settings.task, options.split or "train", with_gold=options.gold
        )
        problems = problems[: options.limit or None]
        if not problems:
            raise UserError(f"--data {settings.task.data} has no problems with these settings")
        return problems
    if options.limit:
        count = options.limit
    elif is_a_set:
        count = sum(
            len(problem_set) for problem_set in math_problems.load_sets(settings.task).train
        )
    else:
        raise UserError(
            f"task.name={settings.task.name} makes problems without end: "
            "give their number with --limit"
        )
    problems = task.train_problems(settings.task, settings.train.seed, 0, count)
    if not problems:
        raise UserError(f"--data {settings.task.data} has no problems")
    return problems


# -- The file --------------------------------------------------------------------------------------


def claim_directory(out: Path) -> Path:
    """Returns the hidden directory beside `out` that holds the settings `out` was made with."""
    return out.with_name(f".{out.name}")


def claim_output(options: Options, settings: config.Config, problems: list[Problem]) -> None:
    """Ties the file to the command and its problems; raises UserError if it is tied to others."""
    command = {
        "config": vars(settings),
        "n": options.n,
        "server": bool(options.base_url),
        "problems": zlib.crc32(repr(problems).encode()),
    }
    if options.greedy:
        command["greedy"] = True
    claim_workdir(claim_directory(options.out), json.dumps(command, default=vars))


def write_chunks(
    options: Options,
    settings: config.Config,
    problems: list[Problem],
    sample_chunk: SampleChunk,
) -> None:
    """Appends the rows of all chunks that the file does not hold completely.

    Raises UserError if another command, or other problems, made the rows that are there.
    """
    chunk_size = settings.rollout.num_prompts
    with contextlib.ExitStack() as cleanup:
        if processes.is_first_process():
            lock = lock_directory(claim_directory(options.out), f"--out {options.out}")
            cleanup.enter_context(lock)
        claim_output(options, settings, problems)
        rows_done, bytes_done = count_complete_rows(options, len(problems), chunk_size)
        file = cleanup.enter_context(options.out.open("ab"))
        file.truncate(bytes_done)
        for start in range(rows_done // options.n, len(problems), chunk_size):
            begin = time.perf_counter()
            chunk = problems[start : start + chunk_size]
            turns = sample_chunk(chunk, start // chunk_size)
            if processes.is_first_process():
                rows = []
                for i, turn in enumerate(turns):
                    rows.append(make_row(chunk[i // options.n], i % options.n, turn))
                file.write(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
                file.flush()
                os.fsync(file.fileno())
            tokens = sum(turn.end - turn.start for turn in turns)
            rate = tokens / (time.perf_counter() - begin)
            processes.print_once(
                f"{start + len(chunk)} of {len(problems)} problems, {rate:.0f} tokens/s"
            )


def count_complete_rows(options: Options, num_problems: int, chunk_size: int) -> tuple[int, int]:
    """Returns how many rows of the file stay, and their bytes.

    Only whole chunks stay, because all responses of a chunk share its noise. The last chunk may be
    smaller than the others.
    """
    if not options.out.exists():
        return 0, 0
    lines = options.out.read_bytes().split(b"\n")[:-1]  # without a line that a kill cut short
    rows = len(lines)
    if rows < num_problems * options.n:
        rows -= rows % (chunk_size * options.n)
    return rows, sum(len(line) + 1 for line in lines[:rows])


def make_row(problem: Problem, sample_index: int, turn: Turn) -> JsonObject:
    """Returns the row of a response: its prompt and completion are of the same kind."""
    grade = grade_of(turn)
    is_graded = grade.reason != math_problems.NOT_GRADED
    completion = turn.text
    if not isinstance(problem.prompt, str):
        completion = [{"role": "assistant", "content": turn.text}]
    return {
        "id": problem.id,
        "sample": sample_index,
        "prompt": problem.prompt,
        "completion": completion,
        "gold": json.dumps(problem.gold),  # text: a column of a data set has one type
        "tokens": turn.end - turn.start,
        "finish": turn.finish_reason,
        "score": grade.known_score if is_graded else None,
        "correct": grade.correct if is_graded else None,
        "reason": grade.reason,
    }


# -- A server --------------------------------------------------------------------------------------


class Message(pydantic.BaseModel):
    content: str | None = None


class Choice(pydantic.BaseModel):
    """One response: `text` of a completion, `message` of a chat completion."""

    text: str | None = None
    message: Message | None = None
    finish_reason: str | None = None
    stop_reason: pydantic.JsonValue = None  # vLLM: the stop string that it removed from the text


class Usage(pydantic.BaseModel):
    completion_tokens: int = 0


class Answer(pydantic.BaseModel):
    """What is read of a server's answer to a request."""

    choices: list[Choice] = pydantic.Field(min_length=1)
    usage: Usage | None = None


class RemoteSampler:
    """Samples from an OpenAI-compatible server.

    The client repeats a request `options.retries` times, after growing pauses, on status 408, 409,
    429 and 5xx, on a timeout, and on a lost connection.
    """

    def __init__(self, options: Options, settings: config.Config, pool: Pool) -> None:
        import openai  # an extra

        self.options = options
        self.settings = settings
        self.pool = pool
        self.client_error = openai.OpenAIError
        self.client = openai.OpenAI(
            base_url=options.base_url,
            api_key=os.environ.get("OPENAI_API_KEY", "none"),
            timeout=options.timeout,
            max_retries=options.retries,
        )

    def close(self) -> None:
        """Closes the connections to the server."""
        self.client.close()

    def sample_chunk(self, chunk: list[Problem], number: int) -> list[Turn]:
        """Returns n graded responses to each problem of the chunk, in order.

        Raises UserError if the server cannot be reached, refuses, or answers with something else.
        """
        requests = []
        for problem in chunk:
            requests += [(problem, sample_index) for sample_index in range(self.options.n)]
        with ThreadPoolExecutor(self.settings.rollout.num_slots) as threads:
            turns = list(threads.map(self.respond, *zip(*requests, strict=True)))

        grades_by_key = dict(self.pool.drain())
        task = self.settings.task
        grades = [grades_by_key[problem.id, sample_index] for problem, sample_index in requests]
        if rewards.batched(task.reward):
            episodes = [
                (problem, [(turn.text, grade)])
                for (problem, _), turn, grade in zip(requests, turns, grades, strict=True)
            ]
            results = batched_rewards.call_all(self.pool, task, episodes)
            grades = batched_rewards.add(grades, results)
        grades = rewards.add_batch_rewards(
            grades,
            [len(turn.text) for turn in turns],
            [turn.end for turn in turns],
            task.reward,
        )
        graded = zip(turns, grades, strict=True)
        return [Turn(turn.start, turn.end, turn.text, turn.finish_reason, g) for turn, g in graded]

    def respond(self, problem: Problem, sample_index: int) -> Turn:
        """Asks for one response and submits it for grading. Runs in a thread."""
        answer = self.ask(problem, sample_index)
        choice = answer.choices[0]
        message = choice.message or Message()
        text = choice.text or message.content or ""
        # Every other stop string stays in the text; vLLM reports the one that it removed.
        if isinstance(choice.stop_reason, str) and self.settings.rollout.keep_stop:
            text += choice.stop_reason
        key = (problem.id, sample_index)
        task = self.settings.task
        episode = rewards.episode_values(problem, text, (), task.reward)
        episode |= environment.episode_values(problem, sample_index, ())
        stepping = asyncio_environments.stepping(
            self.pool, problem, sample_index, text, (), task, is_last=True
        )
        self.pool.submit(
            key, problem.task, text, problem.gold, task, episode=episode, stepping=stepping
        )
        num_tokens = answer.usage.completion_tokens if answer.usage else 0
        return Turn(0, num_tokens, text, choice.finish_reason or "stop")

    def ask(self, problem: Problem, sample_index: int) -> Answer:
        """Sends one request, and checks that the answer has the form that the API promises."""
        rollout = self.settings.rollout
        noise = f"{self.settings.train.seed}/{problem.id}/{sample_index}"
        arguments: JsonObject = {
            "model": self.options.model,
            "max_tokens": rollout.max_new_tokens,
            "stop": list(rollout.stop) or None,
            "temperature": temperature_of(self.options, self.settings),
            "top_p": rollout.top_p,
            "seed": zlib.crc32(noise.encode()) >> 1,  # servers want a signed 32-bit integer
        }
        # Only these two steps can fail because of the server. Whatever else raises is our mistake.
        try:
            if isinstance(problem.prompt, str):
                arguments["prompt"] = problem.prompt
                response = self.client.completions.with_raw_response.create(**arguments)
            else:
                arguments["messages"] = problem.prompt
                response = self.client.chat.completions.with_raw_response.create(**arguments)
            return Answer.model_validate_json(response.text)
        except self.client_error as error:
            raise self.server_error(str(error)) from error
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "the answer"
            raise self.server_error(f"{where}: {first['msg']}") from error

    def server_error(self, reason: str) -> UserError:
        return UserError(
            f"--base-url {self.options.base_url}: {reason} (a request is repeated "
            f"--retries={self.options.retries} times); the same command goes on from here"
        )


# -- The command -----------------------------------------------------------------------------------


def main() -> None:
    parser = cli.make_parser("jzero.generate", __doc__)
    parser.add_argument(
        "--model",
        required=True,
        help="directory or hub id of a model; with --base-url the name that the server knows",
    )
    parser.add_argument(
        "--adapter", default="", help="directory or hub id of an adapter of the model, as PEFT's"
    )
    parser.add_argument("--data", default="", help="problems, as in task.data")
    parser.add_argument("--n", type=int, default=1, help="responses to each problem")
    parser.add_argument(
        "--greedy",
        action="store_true",
        help="take the likeliest token each time, whatever rollout.temperature says",
    )
    parser.add_argument("--limit", type=int, default=0, help="number of problems; default all")
    parser.add_argument(
        "--out", required=True, type=Path, help="file of JSON lines to write or to go on with"
    )
    parser.add_argument(
        "--base-url", help="server: http://HOST:PORT/v1; its key is read from OPENAI_API_KEY"
    )
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one request")
    parser.add_argument(
        "--retries",
        type=int,
        default=RETRIES,
        help=f"times that a failed request is repeated, after growing pauses; default {RETRIES}",
    )
    parser.add_argument(
        "--no-gold",
        action="store_true",
        help="the problems need no answers, and responses are not graded",
    )
    parser.add_argument(
        "--split", help="split of the set to answer, in its order; default the training problems"
    )
    parser.add_argument(
        "--push-to-hub",
        metavar="USER/NAME",
        help="data set on the hub that gets the complete file; created if there is none",
    )
    parser.add_argument("--private", action="store_true", help="create a private data set")
    parser.add_argument(
        "--force", action="store_true", help="replace the files that the data set has"
    )
    args, rest = parser.parse_known_args(cli.start_jax(sys.argv[1:]))

    with cli.user_errors():
        defaults = evaluate.defaults("" if args.base_url else args.model)
    defaults.task.name = "math"
    defaults.task.data = args.data
    defaults.model.path = args.model
    defaults.model.adapter.path = args.adapter
    options = Options(
        model=args.model,
        out=args.out,
        n=args.n,
        limit=args.limit,
        greedy=args.greedy,
        base_url=args.base_url,
        timeout=args.timeout,
        retries=args.retries,
        gold=not args.no_gold,
        split=args.split,
        push_to_hub=args.push_to_hub,
        private=args.private,
        force=args.force,
    )
    with cli.user_errors():
        settings = cli.parse_settings(defaults, rest)
        template = math_problems.math_template(settings.task.template)
        run(options, setup.with_stop_strings(settings, template))


if __name__ == "__main__":
    main()
