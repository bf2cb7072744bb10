"""What a run reports: files, trackers, one readable line a step, clocks, versions. Names are flat, `group/name`."""

import functools
import importlib.metadata
import json
import math
import os
import platform
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

import jinja2

import jzero
from jzero.types import Rollout

# metric -> [label, format] on the step line, in this order; a metric the step does not have is left out.
LINE = json.loads(Path(__file__).with_name("line.json").read_text())


def line(step: int, steps: int, values: Mapping[str, float]) -> str:
    """`step  12/200  reward 0.312  accuracy 0.250 ...`"""
    shown = [f"{label} {values[name]:{form}}" for name, (label, form) in LINE.items() if name in values]
    return "  ".join([f"step {step:>{len(str(steps))}}/{steps}", *shown])


def fill(template: str, **values: Any) -> str:
    """A text file of this package, filled in (Jinja)."""
    text = Path(__file__).with_name(template).read_text(encoding="utf-8")
    return jinja2.Environment(trim_blocks=True).from_string(text).render(values).rstrip("\n")


def write_atomic(path: str | os.PathLike, text: str) -> None:
    """The file holds either what it held or all of `text`, whenever the process or the machine dies."""
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


class Writer:
    """Appends to `metrics.jsonl`, `samples.jsonl` and `tensorboard/` of a workdir; a line survives a kill once written.

    Without a workdir (a host that is not the first) nothing is written, and a bad value still raises.
    `resume_step` is the checkpoint the run goes on from: what was written of later steps is dropped, so that a killed
    and resumed run leaves the same lines as one that was not. None is a run from its start: everything is dropped."""

    def __init__(self, workdir: str | os.PathLike | None, resume_step: int | None, project: str):
        from tensorboardX import SummaryWriter  # 1 s to import

        self._files, self._tensorboard, self._wandb, self._ends = [], None, None, ExitStack()
        if workdir is None:
            return
        workdir = Path(workdir)
        workdir.mkdir(parents=True, exist_ok=True)
        last = -1 if resume_step is None else resume_step
        keep = self._ends.enter_context
        self._files = [keep(_open_after(workdir / f"{name}.jsonl", last)) for name in ("metrics", "samples")]
        # purge_step: TensorBoard hides the events of this step and later that are already in the directory.
        self._tensorboard = keep(SummaryWriter(str(workdir / "tensorboard"), purge_step=last + 1))
        if project:
            import wandb

            settings, name = json.loads((workdir / "config.json").read_text()), workdir / "wandb_id"
            if not name.exists():
                write_atomic(name, os.urandom(8).hex())
            of = {"id": name.read_text(), "resume": "allow", "name": workdir.name, "dir": workdir, "config": settings}
            try:
                self._wandb = keep(wandb.init(project=project, **of))
            except wandb.Error as error:
                raise ValueError(f"train.wandb={project}: {error} Or set WANDB_MODE=offline") from error

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """One line {"step": step, name: number, ...}. A value that is not finite stops the run."""
        numbers = {name: float(value) for name, value in values.items()}
        if bad := [f"{name}={number}" for name, number in numbers.items() if not math.isfinite(number)]:
            raise ValueError(f"step {step}: not finite: {', '.join(bad)}")
        _append(self._files[:1], step, [numbers])
        if self._tensorboard:
            for name, number in numbers.items():
                self._tensorboard.add_scalar(name, number, step)
            self._tensorboard.flush()
        if self._wandb:  # which keeps the first of a step that was repeated: the same numbers
            self._wandb.log(numbers, step=step)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """One line {"step": step, **row} a row; rows are plain JSON values."""
        _append(self._files[1:], step, rows)

    def close(self) -> None:
        self._ends.close()


def _append(files: Sequence[TextIO], step: int, rows: Sequence[Mapping[str, Any]]) -> None:
    for file in files:
        lines = [json.dumps({"step": step, **row}, ensure_ascii=False, allow_nan=False) + "\n" for row in rows]
        file.write("".join(lines))
        file.flush()


def rows(path: Path) -> list[dict[str, Any]]:
    """Of a .jsonl that may still be written: a last line that is not whole (yet) is left out."""
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        return [json.loads(line) for line in file if line.endswith("\n")]


def _open_after(path: Path, last: int):
    """Opens for appending, without the lines of steps > last and without a line that a kill cut short."""
    if path.exists():
        # errors: the cut may fall within a character. newline: a response may hold a lone "\r".
        with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
            kept = [row for row in file if row.endswith("\n") and json.loads(row)["step"] <= last]
        write_atomic(path, "".join(kept))
    return path.open("a", encoding="utf-8", newline="\n")


def trajectory(rollout: Rollout) -> dict[str, Any]:
    """An episode. Lengths are in tokens; head and tail the versions of the first and the last that the policy wrote."""
    versions = rollout.versions[rollout.sampled].tolist()
    of = lambda grade: {"reward": grade.score, "success": grade.correct, "reason": grade.reason}
    turns: list[dict[str, Any]] = []
    for turn, before in zip(rollout.turns, (None, *rollout.turns), strict=False):
        lengths = {"prompt_length": turn.start, "answer_length": int(rollout.sampled[turn.start : turn.end].sum())}
        reply = {"reply": before.grade.reply} if before and before.grade else {}
        turns.append(lengths | of(turn.grade) | {"finish": turn.finish, "answer": turn.text} | reply)
    whole = {"id": rollout.problem.id, "sample": rollout.sample, "prompt": rollout.problem.prompt}
    whole |= {"prompt_length": rollout.prompt_length, "answer_length": len(versions)} | of(rollout.grade)
    return whole | {"version_head": versions[0], "version_tail": versions[-1], "turns": turns}


def write_trajectories(workdir: Path, rollouts: list[Rollout]) -> None:
    """`trajectories/<version that began it>/<problem id>.txt` and `.jsonl`: a step that is repeated writes the same."""
    files: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for each in map(trajectory, rollouts):
        files.setdefault((each["version_head"], each["id"].replace("/", "_")), []).append(each)
    for (version, name), rows in files.items():
        directory = workdir / "trajectories" / str(version)
        directory.mkdir(parents=True, exist_ok=True)
        write_atomic(directory / f"{name}.txt", "\n\n".join(fill("episode.txt", **each) for each in rows) + "\n")
        write_atomic(directory / f"{name}.jsonl", "".join(json.dumps(each) + "\n" for each in rows))


class Clock:
    """Wall seconds per phase: `with clock("sample"): ...`. Phases do not nest."""

    def __init__(self):
        self.totals: dict[str, float] = defaultdict(float)  # phase -> seconds since the start of the run
        self._step: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            self._step[phase] += seconds
            self.totals[phase] += seconds

    def move(self, seconds: float, phase: str, other: str) -> None:
        for sums in (self._step, self.totals):
            sums[phase] -= seconds
            sums[other] += seconds

    def pop(self) -> dict[str, float]:
        """{"time/<phase>": seconds} since the last pop."""
        values = {f"time/{phase}": seconds for phase, seconds in self._step.items()}
        self._step.clear()
        return values


@functools.cache
def compilations() -> Callable[[], dict[str, float]]:
    """A function: programs compiled since its last call, and the seconds that took. A steady run compiles none."""
    import jax

    seconds: list[float] = []

    def hear(event: str, duration_secs: float, **_: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seconds.append(duration_secs)

    def pop() -> dict[str, float]:
        values = {"compile/programs": float(len(seconds)), "compile/seconds": sum(seconds)}
        seconds.clear()
        return values

    jax.monitoring.register_event_duration_secs_listener(hear)
    return pop


def peak_rss_bytes() -> int:
    """Peak resident bytes of this process plus those of its largest child that has ended (live children: not seen)."""
    unit = 1 if platform.system() == "Darwin" else 1024  # ru_maxrss: bytes on macOS, KiB on Linux
    return unit * sum(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def versions() -> dict[str, str]:
    """What ran: package versions, Python, operating system, devices."""
    import jax  # this module is imported by processes that hold no device

    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    return {
        "jzero": jzero.__version__,
        **{name: importlib.metadata.version(name) for name in packages},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
    }
