"""One-line faults, each of which the comparison of two checkouts has to see.

`python benchmarks/same_numbers.py --faults` plants them one after the other in copies of a
checkout. A fault names the case of `same_numbers_cases.py` that sees it.
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Fault:
    """A replacement of text that stands exactly once in a file of jzero/."""

    case: str
    path: str
    text: str
    replacement: str


FAULTS = {
    # Carried episodes continue with the keys and values of the weights that first prefilled one.
    "KV kept across versions": Fault(
        "asynchronous",
        "jzero/decoder/scheduler.py",
        "            params=self.params,\n",
        "            params=vars(self.engine).setdefault('kept', self.params)"
        " if batch.rows[0].group[0].num_new else self.params,\n",
    ),
    "key unchanged": Fault(
        "countdown",
        "jzero/rollout/collect.py",
        "key=(settings.problems.seed, source),",
        "key=(settings.problems.seed, 1),",
    ),
    "weights of half a batch": Fault(
        "countdown",
        "jzero/algorithms/weights.py",
        "return 1.0 / (len(lengths) * np.maximum(lengths, 1.0))",
        "return 1.0 / (len(lengths) // 2 * np.maximum(lengths, 1.0))",
    ),
    "filter ignored": Fault(
        "filters",
        "jzero/rollout/evaluation.py",
        'top_p=settings.top_p if kind == "eval" else 0.0,',
        "top_p=0.0,",
    ),
    "off-by-one position": Fault(
        "countdown",
        "jzero/decoder/programs.py",
        "ModelInputs(state.tokens[:, None], positions[:, None], active[:, None]",
        "ModelInputs(state.tokens[:, None], positions[:, None] + 1, active[:, None]",
    ),
    "adapter dropped": Fault(
        "adapter",
        "jzero/sharding/publish.py",
        "        return adapters.join(weights, published, adapters.scale_of(params))\n",
        "        return weights\n",
    ),
    # Evaluations of all policies have the same version: only this line keeps their prefixes apart.
    "stale prefix": Fault(
        "prefix cache",
        "jzero/decoder/engine.py",
        "            cache.clear()\n",
        "            pass\n",
    ),
    "wrong mask": Fault(
        "countdown",
        "jzero/attention/xla.py",
        "return is_allowed & (key <= last_key)",
        "return is_allowed & (key <= last_key + 1)",
    ),
}


def plant(fault: Fault, checkout: Path) -> None:
    """Plants a fault in a checkout.

    Raises ValueError unless its text stands exactly once in the file.
    """
    path = checkout / fault.path
    source = path.read_text(encoding="utf-8")
    count = source.count(fault.text)
    if count != 1:
        raise ValueError(
            f"{fault.path}: {fault.text.strip()!r} stands {count} times, and has to stand once: "
            "change the fault in benchmarks/same_numbers_faults.py"
        )
    path.write_text(source.replace(fault.text, fault.replacement), encoding="utf-8")
