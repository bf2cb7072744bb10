"""`python -m jzero.generate --model DIR --data DATA --n 4 --out FILE.jsonl [--config.section.field=value ...]`

Samples n responses to every problem of a set, grades them, and writes one JSON line for each. The
rows are in the format of supervised fine-tuning: a prompt and a completion, as text or, with
task.template=chat, as messages. They keep the columns of the set. With --group there is one line
for each problem, with lists.

Responses come from jzero's engine or, with --base-url, from servers with the OpenAI API. Each
server gets rollout.num_slots requests at once. It samples with its default temperature and top-p
unless the command gives rollout.temperature, rollout.top_p, rollout.top_k or rollout.min_p.

The same command continues after a kill. With the engine, the file grows by chunks of
rollout.num_prompts problems, and each chunk has different noise. With servers, the file grows by
rows, in the order of completion; at the end they are sorted. If servers refuse a request or never
answer it, its row has an error. Only --retry-errors repeats such a request.

--no-gold answers problems without gold answers and grades nothing. --split NAME answers a split of
the set in the order of its rows. --push-to-hub USER/NAME uploads the complete file as a data set.
"""  # noqa: E501 (the first line is the usage that --help prints)

import contextlib
import json
import os
import re
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import jax

from jzero import cli, command_flags, config, http, setup, terminal
from jzero.commands.evaluate import defaults as model_defaults
from jzero.errors import UserError
from jzero.files import naming_full_disk, split_commas
from jzero.generation import rows
from jzero.generation.progress import Progress
from jzero.generation.rows import Response, RowFile
from jzero.generation.servers import SAMPLING, Server, ServerOptions
from jzero.generation.sharing import Generation, Plan
from jzero.hosts import processes
from jzero.model import hub
from jzero.model.hub import public_name
from jzero.planning.host_memory import (
    check_host_memory,
    graders_part,
    parts_of_engine,
    rollouts_part,
)
from jzero.problems.prompts import MATH_TEMPLATES
from jzero.rewards import rewards
from jzero.rollout.sampler import Sampling
from jzero.run.lock import lock_directory
from jzero.run.workdir import claim_workdir
from jzero.service.decoders import load
from jzero.tasks import find_task, math_problems, mixed
from jzero.types import Problem, Turn
from jzero.workers.pool import Pool

# Maps the problems of a chunk and its index to n graded responses to each, in order.
SampleChunk: TypeAlias = Callable[[list[Problem], int], list[Turn]]

MAX_TIMEOUT = 86_400.0  # seconds
# File name in a data set on the hub: `datasets` loads it as the split train.
HUB_FILE = "train.jsonl"


@dataclass(frozen=True)
class Options:
    """The flags of the command that are not settings."""

    model: str
    out: Path
    n: int = 1
    limit: int = 0  # problems; 0 = all of a set
    greedy: bool = False  # the most probable token each time, instead of sampling
    group: bool = False  # one row for each problem, with lists
    base_url: str | None = None  # of one server, or of several, separated by commas
    model_name: str = ""  # the name that the servers use; "": `model`
    timeout: float = 600.0  # seconds
    retries: int = command_flags.RETRIES
    max_refused: int = command_flags.MAX_REFUSED
    retry_errors: bool = False  # whether rows with an error are generated again
    given: frozenset[str] = frozenset()  # names of the settings that the user has set
    gold: bool = True  # False: the problems have no answers, and nothing is graded
    split: str | None = None  # None: all training problems, shuffled by the seed
    push_to_hub: str | None = None  # "user/name" of a data set on the hub
    private: bool = False
    force: bool = False

    @property
    def urls(self) -> list[str]:
        """The addresses of the servers; empty for jzero's engine."""
        return split_commas(self.base_url or "")

    @property
    def shown_name(self) -> str:
        """The name of the model in rows."""
        # Rows may be published: a local directory is reduced to its public name.
        return self.model_name or public_name(self.model)


def run(options: Options, settings: config.Config) -> None:
    """Generates the rows that are missing in the file `options.out`."""
    check(options, settings)
    problems = read_problems(options, settings)
    # The pool grades in worker processes while the engine or the servers generate.
    with Pool(settings.task.grade_workers) as pool:
        if options.urls:
            generate_on_servers(options, settings, problems, pool)
        else:
            generate_here(options, settings, problems, pool)
    if options.push_to_hub and processes.is_first_process():
        files = {HUB_FILE: options.out, "README.md": describe(options, settings).encode()}
        terminal.write(hub.push_dataset(files, options.push_to_hub, options.private, options.force))


def describe(options: Options, settings: config.Config) -> str:
    """Returns the card of the data set, which reveals no local directory."""
    sources = [rows.path for rows in settings.task.data] or [settings.task.name]
    data = ", ".join(map(public_name, sources))
    adapter = settings.model.adapter.path
    model = options.shown_name
    if adapter:
        model += f" with the adapter {public_name(adapter)}"
    graded = "graded by jzero" if options.gold else "not graded"
    sampling = {
        "temperature": sampling_temperature(options, settings),
        "top-p": settings.rollout.top_p,
    }
    # Servers may use defaults that jzero does not know, so the card lists only the given settings.
    if options.urls:
        sampling = {
            name.replace("_", "-"): getattr(settings.rollout, name)
            for name, setting in SAMPLING.items()
            if setting in options.given
        }
        if options.greedy:
            sampling["temperature"] = 0.0
    values = ", ".join(f"{name} {value}" for name, value in sampling.items())
    completion = rows.COMPLETIONS if options.group else "completion"
    purpose = "" if options.group else " They are those of supervised fine-tuning."
    return (
        f"{options.n} responses of {model} to every problem of {data}, "
        f"{graded}.\n\nSampled with jzero at {values or 'the defaults of the server'}, with at "
        f"most {settings.rollout.max_new_tokens} new tokens. The columns `prompt` and "
        f"`{completion}` hold what was asked and answered.{purpose}\n"
    )


def generate_here(
    options: Options,
    settings: config.Config,
    problems: list[Problem],
    pool: Pool,
) -> None:
    """Generates with jzero's engine, on the devices of this process."""
    sampler, params = load(settings, pool)
    encoded = sampler.encode_problems(problems)  # drops problems with a prompt that is too long
    if not encoded:
        longest = settings.rollout.max_prompt_tokens
        raise UserError(
            f"every prompt is longer than rollout.max_prompt_tokens={longest}: raise it"
        )

    policy = Sampling(sampler, params)

    def sample_chunk(chunk: list[Problem], number: int) -> list[Turn]:
        first = number * settings.rollout.num_prompts
        rollouts = policy.rollouts_of(
            encoded[first : first + len(chunk)],
            (settings.train.seed, number),
            options.n,
            sampling_temperature(options, settings),
        )
        return [rollout.turns[-1] for rollout in rollouts]

    write_chunks(options, settings, [item.problem for item in encoded], sample_chunk)


def generate_on_servers(
    options: Options,
    settings: config.Config,
    problems: list[Problem],
    pool: Pool,
) -> None:
    """Generates with the servers of --base-url."""
    directory = claim_directory(options.out)
    server_options = ServerOptions(
        options.model_name or options.model,
        options.timeout,
        options.retries,
        options.greedy,
        options.given,
    )
    servers = [Server(url, server_options, settings) for url in options.urls]
    plan = Plan(problems, options.n, options.shown_name, options.max_refused, options.retry_errors)
    ids = [problem.id for problem in problems]
    # Two commands must not write to the same file.
    with lock_directory(directory, f"--out {options.out}"):
        claim_output(options, settings, problems)
        scratch = directory / "sorted.jsonl"
        with RowFile(options.out, ids, options.n, options.group, scratch) as file:
            generation = Generation(plan, settings, pool, servers, file)
            generation.run()
            file.sort()
            num_rows = len(file.places)
            terminal.write(f"{options.out}: {num_rows:,} rows{errors_note(file)}")


def errors_note(file: RowFile) -> str:
    """Returns a note on failed responses, and on how to repeat them; "" if there are none."""
    if not file.num_errors:
        return ""
    count = "1 response is" if file.num_errors == 1 else f"{file.num_errors:,} responses are"
    return f"; {count} an error (--retry-errors asks for them again)"


def sampling_temperature(options: Options, settings: config.Config) -> float:
    """Returns the sampling temperature; 0 for the most probable token."""
    return 0.0 if options.greedy else settings.rollout.temperature


# -- Before sampling -------------------------------------------------------------------------------


def check(options: Options, settings: config.Config) -> None:
    """Raises UserError for options and settings that cannot work."""
    checked = settings
    if options.base_url and settings.model.adapter.path:
        raise UserError(
            f"--adapter {settings.model.adapter.path} is for jzero's own engine: remove it, and "
            "give the name that the server of --base-url has for the adapter as --model"
        )
    if options.base_url:
        # The name belongs to the server: a local model of the same name has no bearing on its
        # lengths.
        checked = replace(settings, model=replace(settings.model, path=""))
    setup.check_task(checked)
    # The rows of task.name=mixed may have different rewards. Servers' responses are all graded with
    # the task's rewards.
    for name, row_settings in mixed.all_settings(settings.task).items():
        if options.base_url and row_settings.reward != settings.task.reward:
            raise UserError(
                f"task.options={name}.reward...: responses of --base-url have the same rewards in "
                "all rows, remove it"
            )
    if options.n < 1:
        raise UserError(f"--n={options.n} must be at least 1")
    # Estimate the memory of the host: graders, responses that are held together, and the engine.
    parts = [graders_part(settings.task)]
    if not options.urls or rewards.compare_responses(settings.task.reward):
        counts = {"rollout.num_prompts": settings.rollout.num_prompts, "--n": options.n}
        longest = settings.rollout.longest_episode
        kept = config.num_kept(settings.algorithm, settings.rollout)
        label = f"the responses of a chunk with --n={options.n}"
        parts.append(rollouts_part(counts, longest, label, kept))
    if not options.urls:
        parts += parts_of_engine(settings.rollout)
    check_host_memory(settings, parts)
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
    check_server_options(options)
    if options.push_to_hub and not re.fullmatch(r"[\w.-]+/[\w.-]+", options.push_to_hub):
        raise UserError(f"--push-to-hub {options.push_to_hub}: give USER/NAME of a data set")
    if (options.private or options.force) and not options.push_to_hub:
        raise UserError("--private and --force are about the push: give --push-to-hub, too")
    # A file without a claim directory was not written by this command and must not be changed.
    if options.out.exists() and not claim_directory(options.out).exists():
        raise UserError(f"--out {options.out} exists, and not from this command: give another")


def check_server_options(options: Options) -> None:
    """Raises UserError for options about servers that cannot work."""
    if options.retries < 0:
        raise UserError(f"--retries={options.retries} must be at least 0")
    if options.max_refused < 0:
        raise UserError(f"--max-refused={options.max_refused} must be at least 0")
    if not 0 < options.timeout <= MAX_TIMEOUT:
        raise UserError(f"--timeout={options.timeout:g} must be from 0 to {MAX_TIMEOUT:g} seconds")
    for url in options.urls:
        http.check_url("--base-url", url)
    if len(set(options.urls)) < len(options.urls):
        raise UserError(
            f"--base-url {options.base_url} names a server twice: raise rollout.num_slots to send "
            "it more requests at once"
        )
    if (options.model_name or options.retry_errors) and not options.urls:
        raise UserError("--model-name and --retry-errors are about servers: give --base-url, too")
    if options.urls and jax.process_count() > 1:
        raise UserError("--base-url: one process asks the servers, start only one")


def read_problems(options: Options, settings: config.Config) -> list[Problem]:
    """Returns the problems to answer: the first `options.limit` of the task, or all of a set."""
    task = find_task(settings.task.name)
    is_a_set = task.templates is MATH_TEMPLATES
    # A split is answered in the order of its rows, without the shuffle of training problems.
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
        # Without --limit, every training problem is answered once.
        sets = math_problems.load_sets(settings.task, keep_columns=True)
        count = sum(len(problem_set) for problem_set in sets.train)
    elif settings.task.name == mixed.NAME:
        count = mixed.num_train_problems(settings.task)
    else:
        raise UserError(
            f"task.name={settings.task.name} makes problems without end: "
            "give their number with --limit"
        )
    seed = settings.train.seed
    if task.train_problems is math_problems.train_problems:
        problems = math_problems.train_problems(settings.task, seed, 0, count, keep_columns=True)
    else:
        problems = task.train_problems(settings.task, seed, 0, count)
    if not problems:
        raise UserError(f"--data {settings.task.data} has no problems")
    return problems


# -- The file --------------------------------------------------------------------------------------


def claim_directory(out: Path) -> Path:
    """Returns the hidden directory next to `out` that stores the settings of its rows."""
    return out.with_name(f".{out.name}")


def claim_output(options: Options, settings: config.Config, problems: list[Problem]) -> None:
    """Ties the file to the command and its problems. Raises UserError if it belongs to others."""
    if options.urls:  # the number of concurrent requests changes no row
        settings = replace(settings, rollout=replace(settings.rollout, num_slots=1))
    # Everything that changes rows is part of the claim; only then may a later command continue the
    # file.
    command = {
        "config": vars(settings),
        "n": options.n,
        "server": bool(options.urls),
        # A checksum, because the text of all problems may have megabytes.
        "problems": zlib.crc32(repr(problems).encode()),
    }
    if options.greedy:
        command["greedy"] = True
    if options.group:
        command["group"] = True
    if options.model_name:
        command["model_name"] = options.model_name
    if options.urls:
        command["sampling"] = sorted(options.given & set(SAMPLING.values()))
    claim_workdir(claim_directory(options.out), json.dumps(command, default=vars))


def write_chunks(
    options: Options,
    settings: config.Config,
    problems: list[Problem],
    sample_chunk: SampleChunk,
) -> None:
    """Appends the rows of all chunks that the file does not hold completely.

    Raises UserError if the existing rows belong to another command or to other problems.
    """
    chunk_size = settings.rollout.num_prompts
    per_problem = 1 if options.group else options.n
    with contextlib.ExitStack() as cleanup:
        if processes.is_first_process():
            lock = lock_directory(claim_directory(options.out), f"--out {options.out}")
            cleanup.enter_context(lock)
        claim_output(options, settings, problems)
        rows_done, bytes_done = count_complete_rows(
            options.out, len(problems) * per_problem, chunk_size * per_problem
        )
        # Every process computes the position; only the first one appends rows.
        file = cleanup.enter_context(options.out.open("ab"))
        # A kill may have cut a chunk: its complete rows are dropped and the chunk is sampled again.
        file.truncate(bytes_done)
        first = rows_done // per_problem
        progress = Progress("problems", len(problems), first, seconds=0.0)
        for start in range(first, len(problems), chunk_size):
            chunk = problems[start : start + chunk_size]
            turns = sample_chunk(chunk, start // chunk_size)
            if processes.is_first_process():
                lines = [
                    json.dumps(row).encode() + b"\n" for row in chunk_rows(options, chunk, turns)
                ]
                with naming_full_disk(options.out, sum(map(len, lines))):
                    file.write(b"".join(lines))
                    file.flush()
                    # Flush to the disk, so that a finished chunk survives a crash of the machine.
                    os.fsync(file.fileno())
            num_tokens = sum(turn.end - turn.start for turn in turns)
            progress.add(len(chunk), num_tokens)


def chunk_rows(options: Options, chunk: list[Problem], turns: list[Turn]) -> list[rows.JsonObject]:
    """Returns the rows of n turns for each problem of a chunk, in order."""
    flat_rows = []
    for i, turn in enumerate(turns):
        problem, sample_index = chunk[i // options.n], i % options.n
        row = rows.make_row(problem, sample_index, Response(turn), options.shown_name)
        flat_rows.append(row)
    if not options.group:
        return flat_rows
    starts = range(0, len(flat_rows), options.n)
    return [rows.group(flat_rows[start : start + options.n]) for start in starts]


def count_complete_rows(out: Path, num_rows: int, chunk_rows: int) -> tuple[int, int]:
    """Returns how many rows of the file are kept, and their size in bytes.

    Args:
        out: the file, which may not exist yet.
        num_rows: rows of the complete file.
        chunk_rows: rows of a chunk.
    """
    if not out.exists():
        return 0, 0
    lines = out.read_bytes().split(b"\n")[:-1]  # drops a last line that a kill cut short
    count = len(lines)
    # Only complete chunks are kept, because all responses of a chunk share its noise. The last
    # chunk may be smaller than the others.
    if count < num_rows:
        count -= count % chunk_rows
    return count, sum(len(line) + 1 for line in lines[:count])


# -- The command -----------------------------------------------------------------------------------


@terminal.keep_stdout_for_answers()
def main() -> None:
    """Runs the command."""
    parser = command_flags.generate(__doc__)
    args, config_flags = parser.parse_known_args(cli.start_jax(sys.argv[1:]))
    if not args.model and not (args.base_url and args.model_name):
        cli.exit_with_error("the following arguments are required: --model")

    with cli.user_errors():
        # With servers the name may not exist here, so there is no model whose lengths could be
        # read.
        defaults = model_defaults("" if args.base_url else args.model)
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
        group=args.group,
        base_url=args.base_url,
        model_name=args.model_name,
        timeout=args.timeout,
        retries=args.retries,
        max_refused=args.max_refused,
        retry_errors=args.retry_errors,
        given=frozenset(cli.given_settings(config_flags)),
        gold=not args.no_gold,
        split=args.split,
        push_to_hub=args.push_to_hub,
        private=args.private,
        force=args.force,
    )
    with cli.user_errors():
        settings = cli.parse_settings(defaults, config_flags)
        template = None
        if settings.task.name != mixed.NAME:
            template = math_problems.math_template(settings.task.template)
        run(options, setup.with_stop_strings(settings, template))


if __name__ == "__main__":
    terminal.run_command(main)
