"""Stores the size of a run's KV cache, which a resumed run keeps: WORKDIR/kv_pool.json.

A sequence that is preempted because pages run out continues from a prefill, and the keys and values
of a prefill may differ from decoding in the last bit. With the original number of pages, a resumed
run computes the same numbers as an uninterrupted run.
"""

import json
from pathlib import Path

from jzero.errors import UserError, shown
from jzero.files import parse_json, read_text
from jzero.hosts import processes

NAME = "kv_pool.json"
PAGES = "pages_per_shard"  # without the page for idle slots


def read_pages(workdir: Path) -> int:
    """Returns the pages per shard with which the run in `workdir` started; 0 for a new run.

    Raises UserError if the file is damaged.
    """
    path = workdir / NAME
    if not path.exists():
        return 0
    pages = parse_json(read_text(path), path).get(PAGES)
    # In Python, True is an int as well.
    if not isinstance(pages, int) or isinstance(pages, bool) or pages < 1:
        raise UserError(f"{path} has {PAGES}={shown(pages)}: restore or remove it")
    return pages


def write_pages(workdir: Path, pages: int) -> None:
    """Stores the pages per shard. Every process has to call this function."""
    path = workdir / NAME
    if not path.exists():
        # A resumed run keeps the first size.
        processes.write_once(path, json.dumps({PAGES: pages}) + "\n")
