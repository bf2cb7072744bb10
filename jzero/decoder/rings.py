"""Rings of pages: the KV cache of layers with a sliding window.

A token sees only the newest W tokens in such a layer, so a slot needs the pages of its window and
no older ones. Each slot has a fixed number R of pages in each of these layers. Page p of the
sequence is page p % R of the slot's ring: a new page replaces the oldest one, which has left the
window of every token that may still be computed. Layers with full attention keep every page of a
sequence, and the host allocates their pages (`pages.py`). Each layer has its own rows of the pool:

    full attention   the scratch page, then the pages of `PageAllocator`
    with a window    the scratch page, then the ring of every slot and of every row for scoring

A ring belongs to one slot. Samples of one prompt share its pages only in layers with full
attention, and no other sequence can start from the pages of a ring: the prefix cache and the prefix
sharing of `scoring.py` need models or settings without rings.

`choose` decides whether a decoder has rings. Without them all layers keep all pages.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jzero.config import RolloutConfig
from jzero.decoder.drafts import Drafting
from jzero.decoder.pages import SCRATCH_PAGE
from jzero.model.architecture import ATTENTION, SLIDING, QwenConfig
from jzero.numerics.sizes import divide_up

# Rows for scoring have rings as well. This share of the slots bounds the memory of these rings.
SLOTS_PER_SCORING_ROW = 8
CALLS_IN_FLIGHT = 2  # decode calls that may run before the host notices the end of a turn


@dataclass(frozen=True)
class Rings:
    """The sizes of the rings of one shard."""

    pages: int  # of one ring
    slots: int
    scoring_rows: int  # their rings follow the rings of the slots

    @property
    def count(self) -> int:
        """The number of rings in a layer."""
        return self.slots + self.scoring_rows

    @property
    def pages_of_layer(self) -> int:
        """The pages of one layer, including the scratch page."""
        return 1 + self.count * self.pages


def choose(
    model: QwenConfig,
    settings: RolloutConfig,
    drafting: Drafting | None,
    slots: int,
    most_scoring_rows: int,
) -> Rings | None:
    """Returns the rings of a shard with `slots` slots; None if all layers keep all pages.

    A pool that is smaller than the rings has none either: see `fits`.
    """
    # The pages of a pool count layers with full attention, so there has to be one.
    has_both_kinds = bool(model.layers_of(SLIDING) and model.layers_of(ATTENTION))
    # A cached prefix needs the pages of its last window in all layers.
    if not has_both_kinds or settings.prefix_cache == "on":
        return None
    pages = pages_of_ring(
        model.sliding_window, settings.page_size, tokens_ahead(settings, drafting)
    )
    scoring_rows = min(most_scoring_rows, max(1, slots // SLOTS_PER_SCORING_ROW))
    return Rings(pages, slots, scoring_rows)


def fits(rings: Rings | None, pages_per_shard: int) -> bool:
    """Returns whether rings take fewer pages of a layer than its share of a pool without rings.

    Rings are sized for sequences that fill their window. In a pool that is small because most
    sequences are shorter, the pages that all slots share serve more sequences.
    """
    return rings is not None and rings.pages_of_layer < pages_per_shard


def tokens_ahead(settings: RolloutConfig, drafting: Drafting | None) -> int:
    """Returns how many tokens may be written after a token that is computed again."""
    # A draft may be rejected from its first token on.
    passed = 1 if drafting is None else drafting.passed
    if settings.max_turns == 1:
        return passed - 1
    # Calls may continue a turn after its stop string. The reply starts at the end of the turn.
    return CALLS_IN_FLIGHT * settings.decode_steps * passed


def pages_of_ring(window: int, page_size: int, ahead: int) -> int:
    """Returns the pages that hold a window and the `ahead` tokens after it, wherever it begins.

    window: tokens that a query sees, including its own.
    """
    return divide_up(window - 1 + ahead, page_size) + 1


def has_ring(model: QwenConfig, layer: Int[Array, ""]) -> Bool[Array, ""]:
    """Returns whether a layer has rings, in a decoder that has some."""
    assert model.layer_types is not None
    return jnp.asarray([kind == SLIDING for kind in model.layer_types])[layer]


# -- rows of the pool ------------------------------------------------------------------------------


def pages_of_layers(model: QwenConfig, rings: Rings | None, pages_per_shard: int) -> list[int]:
    """Returns the pages of every layer in one shard, including the layer's scratch page."""
    if rings is None:
        return [pages_per_shard] * model.num_cached_layers
    assert model.layer_types is not None
    return [
        rings.pages_of_layer if kind == SLIDING else pages_per_shard for kind in model.layer_types
    ]


def first_rows(pages: Sequence[int]) -> Int[np.ndarray, " layers"]:
    """Returns the first row of every layer in the pool of a shard."""
    return np.cumsum([0, *pages[:-1]], dtype=np.int32)


def ring_rows(
    rings: Rings,
    ring: Int[Array, " n"],
    page: Int[Array, "n pages"],
    is_kept: Bool[Array, "n pages"] | bool = True,
) -> Int[Array, "n pages"]:
    """Returns where pages of sequences are in a layer with rings.

    ring: the ring of each sequence. Rings that do not exist, and pages that are not kept, become
        the scratch page.
    page: the number of the page in its sequence.
    """
    ring = ring[:, None]
    row = 1 + ring * rings.pages + page % rings.pages
    return jnp.where(is_kept & (ring < rings.count), row, SCRATCH_PAGE)


def ring_table(rings: Rings, num_rows: int, pages_per_slot: int) -> Int[Array, "rows pages"]:
    """Returns the table of pages of a decode step in layers with rings.

    num_rows: rows of the step; with drafts several neighboring rows for each slot.
    """
    ring = jnp.arange(num_rows, dtype=jnp.int32) // (num_rows // rings.slots)
    page = jnp.arange(pages_per_slot, dtype=jnp.int32)[None]
    return ring_rows(rings, ring, page)


def is_newest(rings: Rings, page: Int[Array, "n pages"], num_pages: Int[Array, " n"]) -> jax.Array:
    """Returns whether each page is among the last pages of its sequence, which a ring holds.

    num_pages: pages of each sequence.
    """
    end = num_pages[:, None]
    return (page >= end - rings.pages) & (page >= 0) & (page < end)
