"""What `jzero train` chooses for known models on usual machines: `jzero plan --table`.

Every run has 512 + 1,024 tokens, and the batch that `jzero train` chooses for a large set. The
settings, and whether they fit, come from the same functions as for a run (`choices.choose_sizes`,
`planning.machines.plan_on`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jzero.config import Config
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
        base = ", int8 base" if settings.is_base_quantized else ""
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


def format_table(pairs: Sequence[tuple[str, str]] = PAIRS) -> str:
    """Returns the table with one line for each pair of a machine and a model."""
    lines = [
        f"{PROMPT_TOKENS} + {RESPONSE_TOKENS} tokens; GiB on each device and GB of disk, by "
        "arithmetic",
        f"{'machine':<13}{'model':<14}{'method':<19}{'batch':>9}{'row':>6}{'microbatch':>11}"
        f"{'slots':>6}{'memory':>14}{'disk':>12}  checkpoints",
    ]
    for machine, model in pairs:
        row = choose_row(machine, model)
        verdict, settings = row.verdict, row.sheet.settings
        if not verdict.fits or verdict.memory is None:
            lines.append(f"{machine:<13}{model:<14}does not fit")
            continue
        train, rollout = settings.train, settings.rollout
        batch = f"{rollout.num_prompts} x {rollout.group_size}"
        tokens = rollout.max_prompt_tokens + train.packs_per_row * rollout.max_new_tokens
        memory = f"{verdict.memory.needed / GIB:.1f} of {verdict.memory.available / GIB:.1f}"
        disk = f"{verdict.disk.needed / GB:.0f} of {verdict.disk.available / GB:.0f}"
        kept = f"{train.save}, {train.keep_checkpoints} kept"
        lines.append(
            f"{machine:<13}{model:<14}{row.method:<19}{batch:>9}{tokens:>6}"
            f"{train.microbatch_tokens:>11}{rollout.num_slots:>6}{memory:>14}{disk:>12}  {kept}"
        )
    return "\n".join(lines)
