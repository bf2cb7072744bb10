"""Files of a store as a checksum and MessagePack, with bounds that hold before a file is parsed.

    data = seal({"request": "...", "rollouts": rows})
    values = unseal(data, most_items=1000)

Any process that can write to the store may have written a file. Parsing takes up to 200 bytes of
memory for an item of one byte, so the items of a file are counted first.
"""

import hashlib
import re
import struct
from collections.abc import Mapping
from typing import cast

from flax.serialization import msgpack_restore, msgpack_serialize

from jzero.decoder.serialization import to_plain
from jzero.errors import reason_of
from jzero.files import JsonObject

HEX_DIGITS = 64  # of a SHA-256
MAX_ITEMS = 1 << 19  # of a file, for readers that do not know its request
MAX_ARRAY_ITEMS = 64  # of the MessagePack in an array: its type, its shape and its bytes

# The formats of MessagePack by their first byte: the number of bytes that follow, or the `struct`
# format of the size that follows. A map has two items for each entry.
_FIXED = {0xCA: 4, 0xCB: 8}  # floats
_FIXED |= {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}  # integers
_SIZED = {0xC4: ">B", 0xC5: ">H", 0xC6: ">I", 0xD9: ">B", 0xDA: ">H", 0xDB: ">I"}  # bytes, text
_EXTENSIONS = {0xC7: ">B", 0xC8: ">H", 0xC9: ">I"}
_FIXED_EXTENSIONS = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
# Items of one byte: small integers, and whatever is empty.
_SINGLE_BYTES = re.compile(rb"[\x00-\x80\x90\xa0\xc0\xc2\xc3\xe0-\xff]+")
_CONTAINERS = {0xDC: (">H", 1), 0xDD: (">I", 1), 0xDE: (">H", 2), 0xDF: (">I", 2)}


class BadResultError(Exception):
    """A result, or a part of one, that fails validation."""

    sampler: str = ""  # the name in the file, if it can be read but the rollouts cannot


def seal(values: Mapping[str, object]) -> bytes:
    """Returns the content of a file: the SHA-256 of the rest, then MessagePack."""
    body = msgpack_serialize(to_plain(dict(values)))
    return hashlib.sha256(body).hexdigest().encode() + body


def unseal(data: bytes, most_items: int = MAX_ITEMS) -> JsonObject:
    """Reads the content of a file.

    Raises BadResultError if the file is damaged, or has more than `most_items` items.
    """
    # A view: a copy of the body would take as much memory as the file.
    checksum, body = data[:HEX_DIGITS], memoryview(data)[HEX_DIGITS:]
    if checksum != hashlib.sha256(body).hexdigest().encode():
        raise BadResultError("the file is torn")
    try:
        check_items(body, most_items)
        values = msgpack_restore(cast(bytes, body))  # it takes every buffer
    except BadResultError:
        raise
    except Exception as error:  # any bytes may have the right checksum
        raise BadResultError(f"the file cannot be read ({reason_of(error)})") from None
    if not isinstance(values, dict):
        raise BadResultError("the file cannot be read (no fields)")
    return values


def check_items(body: memoryview, most: int) -> None:
    """Raises BadResultError if MessagePack has more than `most` items, arrays' own ones included.

    Reads the first bytes of the items and builds nothing.

    Raises:
        IndexError, struct.error, ValueError: the bytes are not MessagePack.
    """
    counted, position, left = 0, 0, 1  # `left`: items that the containers so far announce
    while left:
        run = _SINGLE_BYTES.match(body, position, position + left)
        if run is not None:
            # Without this line a file of such items would take a second for a million of them.
            left -= run.end() - position
            counted += run.end() - position
            position = run.end()
            continue
        left -= 1
        counted += 1
        first = body[position]
        position += 1
        children, extension = 0, 0
        if first < 0x90:  # a small map
            children = 2 * (first & 0x0F)
        elif first < 0xA0:  # a small array
            children = first & 0x0F
        elif first < 0xC0:  # a short text
            position += first & 0x1F
        elif first in _FIXED:
            position += _FIXED[first]
        elif first in _SIZED:
            size, position = _number(body, position, _SIZED[first])
            position += size
        elif first in _CONTAINERS:
            kind, items_per_entry = _CONTAINERS[first]
            entries, position = _number(body, position, kind)
            children = entries * items_per_entry
        elif first in _FIXED_EXTENSIONS:
            extension = 1 + _FIXED_EXTENSIONS[first]
        elif first in _EXTENSIONS:
            size, position = _number(body, position, _EXTENSIONS[first])
            extension = 1 + size
        else:
            raise ValueError("an unknown format")
        if extension:
            # An array: a byte that names its kind, and MessagePack.
            content = body[position + 1 : position + extension]
            if most >= MAX_ARRAY_ITEMS:
                check_items(content, MAX_ARRAY_ITEMS - 1)
            position += extension
        left += children
        if counted + left > most:
            raise BadResultError(f"the file has more than {most:,} items")


def _number(body: memoryview, position: int, kind: str) -> tuple[int, int]:
    """Returns a number in the bytes, and the position after it."""
    (number,) = struct.unpack_from(kind, body, position)
    return number, position + struct.calcsize(kind)
