"""Keeps the KV of earlier requests and turns, so that equal prefixes are not computed again.

    cache = PrefixCache(allocator)                   # one for each shard
    cache.insert(weights, page_keys(tokens, 64), pages_of_slot)
    pages = cache.find(weights, page_keys(prompt, 64))   # become the first pages of another slot

The cache is a radix tree, as in SGLang's RadixAttention (arXiv:2312.07104), whose edges are full
pages: a node is a page, and its key is the tokens of that page. Keys and values of a token depend
on all tokens before it and on the weights, so a page is identified by the weights and the path from
their root.

The cache holds one reference to each of its pages. Pages that no slot holds are evicted when a slot
needs them, the least recently used ones first (`PageAllocator.reclaim`). The pool therefore bounds
the cache, and the cache never costs a sequence its place.

Only full pages are cached. A sequence never writes to a page that is full again, so slots and the
cache can share it.
"""

import itertools
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int32

from jzero.decoder.pages import SCRATCH_PAGE, PageAllocator


def page_keys(tokens: Int32[np.ndarray, " tokens"], page_size: int) -> list[bytes]:
    """Returns the tokens of each full page as bytes."""
    data = np.asarray(tokens, np.int32).tobytes()
    width = page_size * np.dtype(np.int32).itemsize
    return [data[i : i + width] for i in range(0, len(data) - width + 1, width)]


def prefix_hashes(weights: Hashable, keys: SequenceOf[bytes]) -> list[int]:
    """Returns a number for every prefix of pages. Equal prefixes have equal numbers."""
    numbers: list[int] = []
    number = hash(weights)
    for key in keys:
        number = hash((number, key))
        numbers.append(number)
    return numbers


@dataclass(eq=False)
class Node:
    """A cached page. The roots have none."""

    weights: Hashable
    key: bytes  # the tokens of the page
    page: int
    parent: "Node | None"
    children: "dict[bytes, Node]" = field(default_factory=dict)


class PrefixCache:
    """The cached pages of one shard.

    `weights` in the methods below identify the weights that computed the pages: equal values only
    for equal weights.
    """

    def __init__(self, allocator: PageAllocator) -> None:
        """Makes an empty cache, whose pages the allocator may reclaim."""
        self.allocator = allocator
        self.roots: dict[Hashable, Node] = {}
        # All nodes but the roots, the least recently used first. A use of a node counts as a later
        # use of its parent, so a node comes before its parent.
        self.nodes: OrderedDict[Node, None] = OrderedDict()
        allocator.reclaim = self.evict

    def __len__(self) -> int:
        """Returns the number of cached pages."""
        return len(self.nodes)

    def find(self, weights: Hashable, keys: SequenceOf[bytes]) -> list[int]:
        """Returns the pages of the longest cached prefix of a sequence."""
        return [node.page for node in self._walk(weights, keys)]

    def insert(self, weights: Hashable, keys: SequenceOf[bytes], pages: SequenceOf[int]) -> None:
        """Caches the full pages of a sequence, and marks the cached ones as used.

        pages: pages with the keys and values of the sequence, at least one for each key. A page
            whose tokens are already cached is not added.
        """
        assert len(pages) >= len(keys), f"{len(pages)=} {len(keys)=}"
        path = list(self._walk(weights, keys))
        new_pages = pages[len(path) : len(keys)]
        self.allocator.hold(new_pages)
        node = path[-1] if path else self.roots.get(weights)
        for key, page in zip(keys[len(path) :], new_pages, strict=True):
            if node is None:
                node = self.roots[weights] = Node(weights, b"", SCRATCH_PAGE, None)
            child = Node(weights, key, page, node)
            node.children[key] = child
            self.nodes[child] = None
            path.append(child)
            node = child
        for node in reversed(path):
            self.nodes.move_to_end(node)

    def evict(self, num_pages: int) -> None:
        """Frees `num_pages` pages that no slot holds, or all of these if there are fewer."""
        counts = self.allocator.reference_counts
        unused = (node for node in self.nodes if counts[node.page] == 1)
        # All chosen before any is removed, which changes `nodes`.
        for node in list(itertools.islice(unused, num_pages)):
            # The node's unused descendants were removed before. The remaining ones are in use: a
            # slot keeps their pages, but nothing can find them without this node.
            self._remove(node)

    def clear(self) -> None:
        """Drops all pages."""
        self.allocator.drop([node.page for node in self.nodes])
        self.nodes.clear()
        self.roots.clear()

    def _walk(self, weights: Hashable, keys: SequenceOf[bytes]) -> Iterator[Node]:
        """Yields the nodes of the longest cached prefix."""
        node = self.roots.get(weights)
        for key in keys:
            node = node.children.get(key) if node is not None else None
            if node is None:
                return
            yield node

    def _remove(self, node: Node) -> None:
        """Removes a node and its descendants."""
        parent = node.parent
        assert parent is not None, f"{node.key=} is a root"
        removed = [node]
        for item in removed:  # grows
            removed.extend(item.children.values())
        for item in removed:
            del self.nodes[item]
        self.allocator.drop([item.page for item in removed])
        del parent.children[node.key]
        # Otherwise the roots of old adapters would stay forever.
        if parent.parent is None and not parent.children:
            del self.roots[parent.weights]
