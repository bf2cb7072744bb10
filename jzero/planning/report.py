"""The report of a plan, as data and as the text that the command prints."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from jzero import config, terminal
from jzero.files import JsonObject
from jzero.planning.chips import GIB
from jzero.planning.compiling import Measurement, compile_only_devices, measure
from jzero.planning.memory import phase_totals, suggestions
from jzero.planning.models import run_title
from jzero.planning.planned_run import PlannedRun, build, with_scores
from jzero.planning.roofline import PhaseCost, roofline, update_by_layout
from jzero.sharding.mesh import SLICES

MAX_ERROR = 120  # characters of a compiler's error in the table


@dataclass(frozen=True)
class Report:
    """The plan of one run. All bytes and FLOPs are per device."""

    config: str
    model: str  # "" for an architecture that the recipe defines
    topology: str
    device_kind: str
    devices: int
    hosts: int
    mesh: dict[str, int]
    hbm_bytes: int
    fits: bool
    parts: dict[str, float]  # bytes
    phases: dict[str, float]  # bytes at the peak
    programs: dict[str, Measurement]
    roofline: dict[str, PhaseCost]  # of a step with responses of maximum length
    step_s: float
    # The update if all rows have one layout, keyed by the tokens of a row. The longest layout is
    # also in `roofline`.
    update_by_layout: dict[int, PhaseCost]
    suggestions: list[str]

    def as_json(self) -> JsonObject:
        programs = {name: program.as_json() for name, program in self.programs.items()}
        return asdict(self) | {"programs": programs}


def make_report(
    settings: config.Config,
    topology: str,
    cache: Path | None,
    with_score: bool = False,
) -> Report:
    """Compiles the programs of a run and reports their memory and time.

    `cache` is a directory with earlier measurements of programs. `with_score` also plans the
    programs with which the engine scores given tokens.

    Raises:
        UserError: The topology is unknown, or the settings do not fit it.
    """
    run = build(settings, compile_only_devices(topology))
    if with_score:
        run = with_scores(run)
    measured = _measure_all(run, topology, cache)
    totals = phase_totals(run, measured)
    costs = roofline(run)
    return Report(
        config=settings.name,
        model=settings.model.path,
        topology=topology,
        device_kind=run.devices[0].device_kind,
        devices=run.mesh.size,
        hosts=run.num_hosts,
        mesh=dict(run.mesh.shape),
        hbm_bytes=run.chip.hbm_bytes,
        fits=all(total <= run.chip.hbm_bytes for total in totals.values()),
        parts=run.parts,
        phases=totals,
        programs=measured,
        roofline=costs,
        step_s=sum(cost.seconds for cost in costs.values()),
        update_by_layout=update_by_layout(run),
        suggestions=suggestions(run, totals, measured),
    )


def _measure_all(run: PlannedRun, topology: str, cache: Path | None) -> dict[str, Measurement]:
    measured = {}
    with terminal.phase("compile", total=len(run.programs), unit="programs") as phase:
        for name, program in run.programs.items():
            terminal.set_note(name)
            measurement = measure(program, topology, cache)
            # These programs take the KV cache as an argument.
            if name.startswith(("insert", "extend", "generate", "engine-score")):
                measurement = replace(measurement, kv_bytes=run.parts["KV pool"])
            measured[name] = measurement
            phase.advance()
    terminal.set_note("")
    return measured


def format_report(report: Report) -> str:
    """Returns the report as tables in plain text."""
    sections = [
        [_heading(report)],
        list(_part_lines(report)),
        list(program_lines(report.programs)),
        *([list(_slice_lines(report))] if SLICES in report.mesh else []),
        list(_phase_lines(report)),
        list(_roofline_lines(report)),
        list(_verdict_lines(report)),
    ]
    return "\n\n".join("\n".join(section) for section in sections)


def _heading(report: Report) -> str:
    mesh = " x ".join(f"{name} {size}" for name, size in report.mesh.items())
    return (
        f"{run_title(report.config, report.model)} on {report.topology}: "
        f"{report.devices} x {report.device_kind} ({mesh}), "
        f"{report.hosts} hosts, {report.hbm_bytes / GIB:.2f} GiB each"
    )


def _part_lines(report: Report) -> Iterator[str]:
    yield "part                       GiB"
    for name, size in report.parts.items():
        yield f"{name:<20}{size / GIB:10.3f}"


def program_lines(programs: Mapping[str, Measurement], width: int = 20) -> Iterator[str]:
    """Yields a table of the memory of compiled programs; names have `width` characters."""
    yield f"{'program':<{width}} arguments      temp      peak  compile s"
    for name, program in programs.items():
        sizes = (program.argument_bytes, program.temp_bytes, program.peak_bytes)
        columns = "".join(f"{size / GIB:10.3f}" for size in sizes)
        error = f"  {program.error[:MAX_ERROR]}" if program.error else ""
        yield f"{name:<{width}}{columns}{program.compile_s:11.1f}{error}"


def _slice_lines(report: Report) -> Iterator[str]:
    yield "between slices, a device       MB once   MB in loops"
    for name, program in report.programs.items():
        columns = f"{program.slice_bytes / 1e6:14.3f}{program.repeated_slice_bytes / 1e6:14.3f}"
        yield f"{name:<24}{columns}"


def _phase_lines(report: Report) -> Iterator[str]:
    yield "phase                      GiB    of HBM"
    for name, size in report.phases.items():
        share = 100 * size / report.hbm_bytes
        verdict = "  DOES NOT FIT" if size > report.hbm_bytes else ""
        yield f"{name:<20}{size / GIB:10.3f}{share:9.0f}%{verdict}"


def _roofline_lines(report: Report) -> Iterator[str]:
    yield "roofline, a device       TFLOP  GB moved   seconds"
    for name, cost in report.roofline.items():
        yield _cost_line(name, cost)
    yield f"{'step':<40}{report.step_s:10.2f}"
    yield "  of the longest responses there can be: the worst case"
    if len(report.update_by_layout) > 1:
        yield ""
        yield "update, if all rows have   TFLOP  GB moved   seconds"
        for tokens, cost in report.update_by_layout.items():
            yield _cost_line(f"{tokens} tokens", cost)


def _cost_line(name: str, cost: PhaseCost) -> str:
    return f"{name:<20}{cost.flops / 1e12:10.1f}{cost.bytes / 1e9:10.1f}{cost.seconds:10.2f}"


def _verdict_lines(report: Report) -> Iterator[str]:
    yield "fits" if report.fits else "does not fit; try"
    for line in report.suggestions:
        yield f"  {line}"
