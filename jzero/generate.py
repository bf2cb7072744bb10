"""`python -m jzero.generate --model DIR --data DATA --n 4 --out FILE.jsonl [--config.section.field=value ...]`

Graded responses to the problems of a set, rollout.num_slots at once, by jzero's engine or an OpenAI-compatible server. Rows
are what SFT reads: prompt and completion, text or, with task.template=chat, messages. They are written in chunks of
rollout.num_prompts problems, each with noise of its own: the same command goes on after a kill."""

import importlib.util
import json
import os
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jzero import cli, config, evaluate, train
from jzero.distributed import processes
from jzero.errors import UserError
from jzero.grading.pool import Pool
from jzero.run.workdir import claim_workdir
from jzero.tasks import find_task, math_problems, rewards
from jzero.tasks.prompts import MATH_TEMPLATES
from jzero.types import Problem, Turn


def remote(given: Any, settings: config.Config, pool: Pool) -> Any:
    """Tries again, ever later, after a 408, 409, 429, 5xx, a timeout or a lost connection."""
    import openai  # an extra

    rollout, heat, key = (
        settings.rollout,
        settings.rollout.temperature,
        os.environ.get("OPENAI_API_KEY", "none"),
    )
    client = openai.OpenAI(
        base_url=given.base_url, api_key=key, timeout=given.timeout, max_retries=8
    )
    told: dict[str, Any] = {
        "model": given.model,
        "max_tokens": rollout.max_new_tokens,
        "stop": list(rollout.stop) or None,
    }

    def respond(problem: Problem, number: int) -> tuple[int, str, str]:
        plain = isinstance(problem.prompt, str)
        api, prompt = (
            (client.completions, "prompt") if plain else (client.chat.completions, "messages")
        )
        seed = zlib.crc32(f"{settings.train.seed}/{problem.id}/{number}".encode()) >> 1
        answer: Any = api.create(
            **told, **{prompt: problem.prompt}, temperature=heat, top_p=rollout.top_p, seed=seed
        )
        choice = answer.choices[0]
        text, cut = (
            choice.text if plain else choice.message.content,
            getattr(choice, "stop_reason", None),
        )
        text = (text or "") + (
            cut if isinstance(cut, str) and rollout.keep_stop else ""
        )  # vLLM says what it cut off
        pool.submit((problem.id, number), problem.task, text, problem.gold, settings.task)
        return answer.usage.completion_tokens if answer.usage else 0, text, choice.finish_reason

    def sample(chunk: list[Problem], _: int) -> list[Turn]:
        every = [(problem, i) for problem in chunk for i in range(given.n)]
        try:
            with ThreadPoolExecutor(rollout.num_slots) as threads:
                said = list(threads.map(respond, *zip(*every, strict=True)))
        except (
            openai.OpenAIError,
            AttributeError,
            LookupError,
            TypeError,
        ) as error:  # it may be another server
            raise UserError(
                f"--base-url {given.base_url}: {error}; the same command goes on from here"
            ) from error
        found, lengths = (
            dict(pool.drain()),
            ([len(text) for _, text, _ in said], [tokens for tokens, *_ in said]),
        )
        grades = rewards.add_batch_rewards(
            [found[problem.id, i] for problem, i in every], *lengths, settings.task.reward
        )
        return [Turn(0, *each, grade) for each, grade in zip(said, grades, strict=True)]

    return sample


def row(problem: Problem, number: int, turn: Turn) -> bytes:
    completion = (
        turn.text
        if isinstance(problem.prompt, str)
        else [{"role": "assistant", "content": turn.text}]
    )
    said = {"id": problem.id, "sample": number, "prompt": problem.prompt, "completion": completion}
    said |= {
        "gold": json.dumps(problem.gold),
        "tokens": turn.end - turn.start,
        "finish": turn.finish_reason,
    }
    said |= {name: getattr(turn.grade, name) for name in ("score", "correct", "reason")}
    return f"{json.dumps(said)}\n".encode()


def run(given: Any, settings: config.Config) -> None:
    train.check_task(settings)
    task, rollout, seed = find_task(settings.task.name), settings.rollout, settings.train.seed
    n, size, out, header = (
        given.n,
        rollout.num_prompts,
        given.out,
        given.out.with_name(f".{given.out.name}"),
    )
    if given.base_url and not importlib.util.find_spec("openai"):
        raise UserError("--base-url needs the package openai: pip install openai")
    if out.exists() and not header.exists():
        raise UserError(f"--out {out} exists, and not from this command: give another")
    sets = math_problems.load_sets(settings.task).train if task.templates is MATH_TEMPLATES else []
    problems = task.train_problems(settings.task, seed, 0, given.limit or sum(map(len, sets)))
    with Pool(settings.task.grade_workers) as pool:
        if given.base_url:
            sample = remote(given, settings, pool)
        else:
            sampler, params = evaluate.load(settings, pool)
            encoded = sampler.encode_problems(problems)
            problems = [item.problem for item in encoded]

            def sample(chunk: list[Problem], index: int) -> list[Turn]:
                first = index * size
                rollouts, _ = sampler.sample_rollouts(
                    params,
                    encoded[first : first + len(chunk)],
                    n,
                    rollout.temperature,
                    (seed, index),
                    version=0,
                )
                return [rollout.turns[-1] for rollout in sampler.gather_rollouts(rollouts)]

        if n < 1 or rollout.max_turns > 1 or not problems:
            raise UserError(
                f"--n={n} and {len(problems)} problems must be 1 or more (--limit), {rollout.max_turns=} 1"
            )
        digest = zlib.crc32(repr(problems).encode())
        asked = {
            "config": vars(settings),
            "n": n,
            "server": bool(given.base_url),
            "problems": digest,
        }
        claim_workdir(header, json.dumps(asked, default=vars))
        lines = out.read_bytes().split(b"\n")[:-1] if out.exists() else []
        done = len(lines) - (len(lines) % (size * n) if len(lines) < len(problems) * n else 0)
        with out.open("ab") as file:
            file.truncate(
                sum(len(line) + 1 for line in lines[:done])
            )  # a chunk that a kill cut short
            for start in range(done // n, len(problems), size):
                chunk, begin = problems[start : start + size], time.perf_counter()
                turns = sample(chunk, start // size)
                rows = [row(chunk[i // n], i % n, turn) for i, turn in enumerate(turns)]
                file.write(b"".join(rows) if processes.is_first_process() else b"")
                file.flush()
                os.fsync(file.fileno())
                rate = sum(turn.end - turn.start for turn in turns) / (time.perf_counter() - begin)
                processes.print_once(
                    f"{start + len(chunk)} of {len(problems)} problems, {rate:.0f} tokens/s"
                )


def main() -> None:
    parser, defaults = cli.make_parser("jzero.generate", __doc__), evaluate.defaults()
    parser.add_argument(
        "--model",
        required=True,
        help="directory or hub id of a model; with --base-url its name there",
    )
    parser.add_argument("--data", default="", help="as task.data")
    parser.add_argument("--n", type=int, default=1, help="responses to a problem")
    parser.add_argument("--limit", type=int, default=0, help="problems, where not all of a set")
    parser.add_argument(
        "--out", required=True, type=Path, help="JSON lines to write, or to go on with"
    )
    parser.add_argument(
        "--base-url", help="of a server: http://HOST:PORT/v1; its key is OPENAI_API_KEY"
    )
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds of a request to it")
    given, rest = parser.parse_known_args(cli.start_jax(sys.argv[1:]))
    defaults.task.name, defaults.task.data, defaults.model.path = "math", given.data, given.model
    with cli.user_errors():
        settings = cli.parse_settings(defaults, rest)
        settings.rollout.stop = (
            settings.rollout.stop or math_problems.math_template(settings.task.template).stop
        )
        run(given, settings)


if __name__ == "__main__":
    main()
