"""What `jzero train` chooses for known models on usual machines: `jzero plan --table`.

Every run has 512 + 1,024 tokens, and the batch that `jzero train` chooses for a large set. The
settings, and whether they fit, come from the same functions as for a run (`choices.choose_sizes`,
`planning.machines.plan_on`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jzero import terminal
from jzero.config import Config
from jzero.planning.announcement import SECONDS_OF_HOUR, planned_hours
from jzero.planning.chips import GIB
from jzero.planning.disk import GB
from jzero.planning.machines import MACHINES, Verdict, plan_on
from jzero.planning.models import architecture, hub_id_of
from jzero.sizing.choices import Sheet, choose_batch, choose_sizes

PROMPT_TOKENS, RESPONSE_TOKENS, ROWS = 512, 1024, 10_000

PAIRS = (
    ("v5e-1", "Qwen2.5-0.5B"),
    ("v5e-1", "Qwen2.5-1.5B"),
    ("v5e-1", "Qwen3-4B"),
    ("v5e-8", "Qwen2.5-1.5B"),
    ("v5e-8", "Qwen2.5-3B"),
    ("v5e-8", "Qwen2.5-7B"),
    ("v6e-1", "Qwen2.5-1.5B"),
    ("v6e-1", "Qwen3-8B"),
    ("v6e-8", "Qwen2.5-7B"),
    ("v6e-8", "Qwen3-8B"),
    ("H100", "Qwen2.5-1.5B"),
    ("H100", "Qwen2.5-3B"),
    ("H100", "Qwen2.5-7B"),
    ("L4", "Qwen2.5-0.5B"),
    ("L4", "Qwen3-4B"),
    ("T4", "Qwen2.5-0.5B"),
    ("T4", "Qwen2.5-1.5B"),
    ("laptop-24gb", "Qwen2.5-0.5B"),
    ("laptop-24gb", "Qwen2.5-1.5B"),
    ("laptop-8gb", "Qwen2.5-0.5B"),
)


@dataclass(frozen=True)
class Row:
    """What `jzero train` chooses for a model on a machine, and whether it fits."""

    machine: str
    model: str
    sheet: Sheet
    verdict: Verdict

    @property
    def method(self) -> str:
        settings = self.sheet.settings.model
        if not settings.adapter.rank:
            return "full"
        base = ", int8" if settings.is_base_quantized else ""
        return f"LoRA {settings.adapter.rank}{base}"


def choose_row(machine_name: str, model_name: str) -> Row:
    """Returns what `jzero train` chooses for a known model on a machine of MACHINES."""
    machine, hub_id = MACHINES[machine_name], hub_id_of(model_name)
    settings = Config(name=f"{model_name} on {machine_name}")
    settings.rollout.max_prompt_tokens = PROMPT_TOKENS
    settings.rollout.max_new_tokens = RESPONSE_TOKENS
    sheet = Sheet(settings, frozenset())
    sheet.set("model.path", hub_id, "--model")
    choose_batch(sheet, ROWS, machine)
    sheet = choose_sizes(sheet, False, architecture(hub_id), hub_id, machine)
    return Row(machine_name, model_name, sheet, plan_on(sheet.settings, machine))


LEGEND = f"""By arithmetic: {PROMPT_TOKENS} prompt tokens, and {RESPONSE_TOKENS} of a response.
For other lengths: jzero train ... --machine NAME --dry-run

  batch       problems x responses of a step
  micro       rows of a microbatch of the update, over all devices
  slots       responses that are decoded at a time; few slots decode slowly
  GiB         memory of each device, needed and there
  disk        GB of the workdir
  s/step      seconds of a step, estimated: 200 steps of 18 s are an hour
"""


def format_table(pairs: Sequence[tuple[str, str]] = PAIRS) -> str:
    """Returns the table, in 80 columns: one line for each pair of a machine and a model."""
    lines = [
        LEGEND,
        f"{'machine':<12}{'model':<13}{'method':<14}{'batch':>7}{'micro':>6}{'slots':>6}"
        f"{'GiB':>10}{'disk':>5}{'s/step':>7}",
    ]
    with terminal.phase("plan", total=len(pairs)) as phase:
        for machine, model in pairs:
            lines.append(f"{machine:<12}{model:<13}{_format_row(choose_row(machine, model))}")
            phase.advance()
    return "\n".join(lines)


def _format_row(row: Row) -> str:
    verdict, settings = row.verdict, row.sheet.settings
    if not verdict.fits or verdict.memory is None:
        return "does not fit"
    train, rollout = settings.train, settings.rollout
    batch = f"{rollout.num_prompts}x{rollout.group_size}"
    row_tokens = rollout.max_prompt_tokens + train.packs_per_row * rollout.max_new_tokens
    rows = train.microbatch_tokens // row_tokens
    memory = f"{verdict.memory.needed / GIB:.1f}/{verdict.memory.available / GIB:.1f}"
    disk = f"{verdict.disk.needed / GB:.0f}"
    hours = planned_hours(verdict.memory.run, steps=1)
    seconds = "" if hours is None else f"{hours * SECONDS_OF_HOUR:,.0f}"
    return (
        f"{row.method:<14}{batch:>7}{rows:>6}{rollout.num_slots:>6}{memory:>10}{disk:>5}"
        f"{seconds:>7}"
    )
