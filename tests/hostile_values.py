"""Hostile JSON values and files, which tests send to every field of a body and to every reader.

    for path, name, document in mutations(valid_document):
        body = to_json(document)                     # JSON text, also of NaN and 1e400
    for name, path in hostile_files(tmp_path, "metrics.jsonl"):
        read(path)                                   # a FIFO, a device, a deep nest, ...

A mutation replaces one value of a valid document with one of `VALUES`, removes it, or adds a key to
an object. Mutations come in a fixed order; `sampled` takes a seeded share of them.
"""

import copy
import json
import math
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from jzero.types import JsonValue

Place = tuple[str | int, ...]  # keys and indices from the top of a document


class Raw(str):
    """JSON text that no Python value is written as. `to_json` writes the text without quotes."""

    __slots__ = ()


def nested(depth: int) -> Raw:
    """Returns the text of lists within each other."""
    return Raw("[" * depth + "]" * depth)


NUMBERS: dict[str, JsonValue] = {
    "NaN": math.nan,
    "inf": math.inf,
    "-inf": -math.inf,
    "1e400": Raw("1e400"),
    "-1e400": Raw("-1e400"),
    "10**400": 10**400,
    "-10**400": -(10**400),
    "10**4000": 10**4000,
    "10**5000": Raw("1" + "0" * 5000),  # more digits than int() reads
    "10**30": 10**30,
    "2**31": 2**31,
    "2**32": 2**32,
    "2**53+1": 2**53 + 1,
    "2**62": 2**62,
    "2**63": 2**63,
    "2**64": 2**64,
    "-2**31-1": -(2**31) - 1,
    "-2**63-1": -(2**63) - 1,
    "-1": -1,
    "0": 0,
    "-0.0": -0.0,
    "0.5": 0.5,
    "1e308": 1e308,
    "-1e308": -1e308,
    "3.4e38": 3.4e38,  # finite in float32, infinite in bfloat16
    "1e39": 1e39,  # infinite in float32
    "5e-324": 5e-324,
}
OTHER_TYPES: dict[str, JsonValue] = {
    "null": None,
    "true": True,
    "false": False,
    "number as text": "1",
    "NaN as text": "NaN",
    "1e999 as text": "1e999",
    "list of a number": [1],
    "list of nulls": [None, None],
    "list of NaN": [math.nan],
    "object": {"a": 1},
    "empty text": "",
    "empty list": [],
    "empty object": {},
    "object of empty key": {"": {"": None}},
}
TEXTS: dict[str, JsonValue] = {
    "lone high surrogate": "a\ud800",
    "lone low surrogate": "\udfffb",
    "NUL": "a\0b",
    "ESC": "\x1b[2J\x1b]0;owned\x07\x1b[31mX",
    "C1": "\x9b31mX\x90q\x9c",
    "BEL": "\x07",
    "CR": "honest\roverwritten",
    "line breaks": "a\nb\u2028c\x85d",
    "bidi override": "a\u202eb\u2066c\u200f",
    "combining": "e" + "\u0301" * 200,
    "path": "../../../../etc/passwd",
    "format": "%s%n{0}{0.__class__}$(id)`id`",
    "markup": "</script><img src=x onerror=alert(1)>",
    "1 MiB": "a" * (1 << 20),
}
NESTS: dict[str, JsonValue] = {
    "nested 100": nested(100),
    "nested 900": nested(900),
    "nested 100,000": nested(100_000),
    "nested objects": Raw('{"a":' * 5_000 + "1" + "}" * 5_000),
    "100,000 lists": Raw("[" + ",".join(["[]"] * 100_000) + "]"),
}
VALUES: dict[str, JsonValue] = NUMBERS | OTHER_TYPES | TEXTS | NESTS
KEYS = ("", "unknown", "a\x1b[2Jb", "\ud800", "a/b\n", "__proto__", "k" * 10_000)

# Characters that a terminal obeys instead of showing: C0, C1, DEL, and overrides of direction.
CONTROLS = "".join(
    map(chr, [*range(32), 127, *range(128, 160), 0x200E, 0x200F, *range(0x202A, 0x202F)])
) + "".join(map(chr, range(0x2066, 0x206A)))


@dataclass(frozen=True)
class Mutation:
    """A document that differs from a valid one in one place. It can be unpacked into three values.

    The document is made when it is read, so that many mutations cost little.
    """

    path: Place
    name: str  # of the value, such as "NaN"
    _original: JsonValue = field(repr=False)
    _change: tuple[Place, JsonValue] | None = field(repr=False)  # None: the member is removed

    @property
    def document(self) -> JsonValue:
        if self._change is None:
            return _without(self._original, self.path)
        return replaced(self._original, *self._change)

    def __iter__(self) -> Iterator[object]:
        yield from (self.path, self.name, self.document)

    def __str__(self) -> str:
        return f"{'.'.join(map(str, self.path)) or 'top'}={self.name}"


def places(document: JsonValue, path: Place = ()) -> Iterator[Place]:
    """Yields the path of every value, from the top. Of a long list only the ends are yielded."""
    yield path
    if isinstance(document, dict):
        for key, value in document.items():
            yield from places(value, (*path, key))
    elif isinstance(document, list):
        for index in sorted({0, 1, len(document) - 1} & set(range(len(document)))):
            yield from places(document[index], (*path, index))


def mutations(
    document: JsonValue,
    values: dict[str, JsonValue] | None = None,
) -> Iterator[Mutation]:
    """Yields the document with each value in each place, without each member, with each new key.

    The document itself is not changed. Values of `Raw` need `to_json`.
    """
    for path in places(document):
        for name, value in (VALUES if values is None else values).items():
            yield Mutation(path, name, document, (path, value))
        if path and isinstance(path[-1], str):
            yield Mutation(path, "missing", document, None)
        if isinstance(_at(document, path), dict):
            for key in KEYS:
                yield Mutation(path, f"key {key[:20]!a}", document, ((*path, key), 1))


def sampled(all_mutations: Iterator[Mutation], most: int, seed: int = 0) -> list[Mutation]:
    """Returns `most` mutations in their order, the same ones for the same seed."""
    listed = list(all_mutations)
    if len(listed) <= most:
        return listed
    chosen = random.Random(seed).sample(range(len(listed)), most)
    return [listed[index] for index in sorted(chosen)]


def replaced(document: JsonValue, path: Place, value: JsonValue) -> JsonValue:
    """Returns a copy of the document with another value at a path. The value is not copied."""
    if not path:
        return value
    changed = copy.deepcopy(document)
    parent = _at(changed, path[:-1])
    assert isinstance(parent, dict | list), f"{path=}"
    parent[path[-1]] = value  # type: ignore[index]  # the key has the parent's type
    return changed


def _without(document: JsonValue, path: Place) -> JsonValue:
    changed = copy.deepcopy(document)
    parent = _at(changed, path[:-1])
    assert isinstance(parent, dict), f"{path=}"
    del parent[str(path[-1])]
    return changed


def _at(document: JsonValue, path: Place) -> JsonValue:
    for step in path:
        document = document[step]  # type: ignore[index, call-overload]
    return document


def to_json(document: JsonValue) -> str:
    """Returns the JSON text of a document with any of `VALUES`: ASCII, on one line.

    NaN and infinities are written as Python writes them, surrogates as escapes.
    """
    raw_texts: list[str] = []

    def marked(value: JsonValue) -> JsonValue:
        if isinstance(value, Raw):
            raw_texts.append(str(value))
            return f"<<raw {len(raw_texts) - 1}>>"
        if isinstance(value, dict):
            return {key: marked(item) for key, item in value.items()}
        return [marked(item) for item in value] if isinstance(value, list) else value

    text = json.dumps(marked(document))
    for number, raw in enumerate(raw_texts):
        text = text.replace(f'"<<raw {number}>>"', raw)
    return text


# -- Files -----------------------------------------------------------------------------------------

LONG_LINE = 64 << 20
DEVICES = {"/dev/zero": "/dev/zero", "/dev/null": "/dev/null", "/dev/full": "/dev/full"}
CONTENTS: dict[str, bytes] = {
    "empty": b"",
    "newlines": b"\n" * 10_000,
    "truncated": b'{"step": 1, "a": [1, 2',
    "invalid UTF-8": b'{"step": 1, "a": "\xff\xfe\x80"}\n',
    "UTF-16": '{"step": 1}\n'.encode("utf-16"),
    "byte order mark": b'\xef\xbb\xbf{"step": 1}\n',
    "NULs": b"\0" * 10_000,
    "null": b"null\n",
    "a number": b"5\n",
    "a list": b"[1]\n",
    "a text": b'"text"\n',
    "nested lists": (nested(100_000) + "\n").encode(),
    "nested objects": b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"\n",
    "a million lists": b'{"a":[' + b"[]," * (1 << 20) + b"[]]}\n",
    "10**400": b'{"step": 1' + b"0" * 400 + b"}\n",
    "1e400": b'{"step": 1e400}\n',
    "NaN": b'{"step": NaN}\n',
    "repeated key": b'{"step": 1, "step": 2}\n',
    "lone surrogate": b'{"step": 1, "a": "\\ud800"}\n',
    "not JSON": b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 8,
}


class HostileFile(NamedTuple):
    """A file that a reader must survive, such as a FIFO."""

    name: str
    path: Path


def hostile_files(folder: Path, filename: str = "file.json") -> Iterator[HostileFile]:
    """Creates hostile files, each called `filename` and in a folder of its own, and yields them.

    A file exists only until the next one is requested. Together with the contents above: a FIFO
    that nobody writes, a folder, links to devices, to themselves and to nothing, a line of 64 MiB
    and a sparse file of 10 GiB.
    """

    def fresh(name: str) -> Path:
        place = folder / f"hostile {name}".replace("/", "_")
        place.mkdir(parents=True)
        return place / filename

    for name, content in CONTENTS.items():
        path = fresh(name)
        path.write_bytes(content)
        yield HostileFile(name, path)
        path.unlink(missing_ok=True)

    path = fresh("FIFO")
    os.mkfifo(path)
    yield HostileFile("FIFO", path)
    path.unlink()

    path = fresh("folder")
    path.mkdir()
    yield HostileFile("folder", path)
    path.rmdir()

    links = DEVICES | {"link to itself": filename, "link to nothing": "nowhere"}
    for name, target in links.items():
        path = fresh(f"link {name}")
        path.symlink_to(target)
        yield HostileFile(name, path)
        path.unlink()

    path = fresh("long line")
    with path.open("wb") as file:
        file.write(b'{"a": "')
        for _ in range(LONG_LINE >> 20):
            file.write(b"a" * (1 << 20))
        file.write(b'"}\n')
    yield HostileFile("a line of 64 MiB", path)
    path.unlink()

    path = fresh("sparse")
    with path.open("wb") as file:
        file.truncate(10 << 30)
    yield HostileFile("10 GiB without a line", path)
    path.unlink()
