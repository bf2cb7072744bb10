"""Snapshots: differences are exact, and no reader uses weights other than those it asked for."""

import json
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
from hypothesis.extra import numpy as arrays

from jzero.files import JsonObject
from jzero.jobs.snapshots import (
    FOLDER,
    Manifest,
    Publisher,
    Reader,
    SnapshotError,
    Tensors,
    bytes_of,
    decode,
    digest,
    encode,
    manifest_name,
)
from jzero.jobs.store import FolderStore

SHAPES = arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Two tensors of one shape and type with any bits: NaN, infinities and subnormals too."""
    shape = draw(SHAPES)
    bits, dtype = draw(
        st.sampled_from(
            [(np.uint16, ml_dtypes.bfloat16), (np.uint32, np.float32), (np.uint8, np.int8)]
        )
    )
    first, second = (draw(arrays.arrays(bits, shape)).view(dtype) for _ in range(2))
    return first, second


@hypothesis.given(pairs())
def test_a_tensor_survives_its_difference(pair: tuple[np.ndarray, np.ndarray]) -> None:
    tensor, previous = pair
    full = decode(encode(tensor), str(tensor.dtype), tensor.shape)
    changed = decode(encode(tensor, previous), str(tensor.dtype), tensor.shape, previous)
    for result in (full, changed):
        assert (result.dtype, result.shape) == (tensor.dtype, tensor.shape)
        assert result.tobytes() == tensor.tobytes()
    # A difference leads back, too.
    back = decode(encode(tensor, previous), str(tensor.dtype), tensor.shape, tensor)
    assert back.tobytes() == previous.tobytes()


@hypothesis.given(pairs(), st.data())
def test_damaged_data_are_an_error_or_another_hash(
    pair: tuple[np.ndarray, np.ndarray], data: st.DataObject
) -> None:
    tensor, _ = pair
    encoded = bytearray(encode(tensor))
    if data.draw(st.booleans()):
        del encoded[data.draw(st.integers(0, len(encoded) - 1)) :]
    else:
        encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        result = decode(bytes(encoded), str(tensor.dtype), tensor.shape)
    except SnapshotError:
        return
    assert result.tobytes() == tensor.tobytes() or digest(result) != digest(tensor)


def test_data_that_grow_without_an_end_are_not_unpacked() -> None:
    bomb = encode(np.zeros(10**7, np.float32))
    with pytest.raises(SnapshotError, match="has 5 bytes instead of 4"):
        decode(bomb, "float32", (1,))


def version(number: int) -> Tensors:
    """Returns weights that a few optimizer steps have changed a little."""
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((40, 50)).astype(np.float32)
    for step in range(number):
        weights = weights + 1e-3 * np.random.default_rng(step).standard_normal((40, 50))
    return {
        "layers/q": weights.astype(ml_dtypes.bfloat16),
        "norm": weights[0].astype(np.float32),
        "frozen": np.ones(64, np.float32),
    }


def equal(first: Tensors | None, second: Tensors) -> bool:
    return first is not None and {n: digest(t) for n, t in first.items()} == {
        n: digest(t) for n, t in second.items()
    }


def publisher(folder: Path, **changes: int | str) -> Publisher:
    settings: JsonObject = {"run": "r", "base": "", "every": 4, "keep": 2, "window": 2}
    return Publisher(FolderStore(folder), **settings | changes)


def reader(folder: Path, run: str = "r") -> Reader:
    return Reader(FolderStore(folder), run)


def test_readers_get_every_version_from_any_start(tmp_path: Path) -> None:
    source = publisher(tmp_path, keep=0)
    identities = [source.publish(number, version(number)) for number in range(10)]
    assert reader(tmp_path).newest() == (9, identities[9])
    follower = reader(tmp_path)
    for number in [3, 4, 5, 9, 2, 2, 8, 0]:
        assert equal(follower.load(number, identities[number]), version(number))
        assert equal(reader(tmp_path).load(number, identities[number]), version(number))


def test_differences_are_smaller_and_full_snapshots_regular(tmp_path: Path) -> None:
    source = publisher(tmp_path)
    sizes = []
    for number in range(9):
        source.publish(number, version(number))
        sizes.append(source.bytes_written)
    manifests = [reader(tmp_path).manifest(number) for number in range(9)]
    assert [m.previous is None for m in manifests] == [n % 4 == 0 for n in range(9)]
    assert max(sizes[1:4]) < 0.7 * sizes[0]


def damage_manifest(folder: Path) -> None:
    path = folder / manifest_name(2)
    path.write_bytes(path.read_bytes()[:-20])


def damage_tensor(folder: Path) -> None:
    path = max((folder / FOLDER).glob("00000002-0000-*"))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def lose_tensor(folder: Path) -> None:
    max((folder / FOLDER).glob("00000001-0001-*")).unlink()


def exchange_tensors(folder: Path) -> None:
    """A file of the version before, which has the right size."""
    newer = max((folder / FOLDER).glob("00000002-0000-*"))
    newer.write_bytes(max((folder / FOLDER).glob("00000001-0000-*")).read_bytes())


def bring_older_version(folder: Path) -> None:
    (folder / manifest_name(2)).write_bytes((folder / manifest_name(1)).read_bytes())


def bring_foreign_version(folder: Path) -> None:
    publisher(folder, run="other").publish(2, version(2))


def name_another_folder(folder: Path) -> None:
    values = json.loads((folder / manifest_name(2)).read_text())
    values["entries"][0]["file"] = "../secret"
    (folder / manifest_name(2)).write_text(json.dumps(values))


DAMAGES = (
    damage_manifest,
    damage_tensor,
    lose_tensor,
    exchange_tensors,
    bring_older_version,
    bring_foreign_version,
    name_another_folder,
)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_snapshot_is_refused_and_repaired(tmp_path: Path, damage) -> None:
    source = publisher(tmp_path)
    identities = [source.publish(number, version(number)) for number in range(4)]
    damage(tmp_path)
    asked = reader(tmp_path)
    with pytest.raises(SnapshotError):
        asked.load(2, identities[2])
    # The same reader still reads the other versions.
    assert equal(asked.load(0, identities[0]), version(0))
    assert source.repair(2)
    assert equal(asked.load(2, identities[2]), version(2))


def test_only_versions_of_the_window_are_repaired(tmp_path: Path) -> None:
    source = publisher(tmp_path)
    for number in range(8):
        source.publish(number, version(number))
    for number in (5, 6, 7):
        assert equal(source.tensors_of(number), version(number))
    assert source.tensors_of(4) is None
    assert not source.repair(4)


def test_a_trainer_that_starts_again_writes_the_same_identity(tmp_path: Path) -> None:
    first = publisher(tmp_path)
    identities = [first.publish(number, version(number)) for number in range(7)]
    second = publisher(tmp_path)
    assert [second.publish(number, version(number)) for number in (5, 6, 7)][:2] == identities[5:]
    assert equal(reader(tmp_path).load(5, identities[5]), version(5))
    # What is in the store already is not written again.
    second = publisher(tmp_path)
    second.publish(5, version(5))
    assert second.bytes_written == 0


def test_old_snapshots_are_removed_and_the_others_readable(tmp_path: Path) -> None:
    source = publisher(tmp_path)
    identities = []
    for number in range(14):
        identities.append(source.publish(number, version(number)))
        source.remove_old()
    assert source.remove_old() == 8
    for number in range(8, 14):
        assert equal(reader(tmp_path).load(number, identities[number]), version(number))
    with pytest.raises(SnapshotError, match="version 7 is not in the store"):
        reader(tmp_path).load(7, identities[7])


def test_remove_old_ignores_files_of_other_programs(tmp_path: Path) -> None:
    source = publisher(tmp_path)
    source.publish(0, version(0))
    for name in ("\u00b2" * 8, "\u0663" * 8, "notes", "1"):
        (tmp_path / "snapshots" / name).touch()
    assert source.remove_old() == 0


def test_the_identity_is_of_the_values_only(tmp_path: Path) -> None:
    often, seldom = publisher(tmp_path / "a", every=1), publisher(tmp_path / "b", every=100)
    for number in range(3):
        assert often.publish(number, version(number)) == seldom.publish(number, version(number))
    changed = version(3)
    bytes_of(changed["norm"])[0] ^= 1
    assert often.publish(3, changed) != seldom.publish(3, version(3))


def test_a_manifest_of_wrong_types_is_refused() -> None:
    for text in (b"", b"[]", b"{}", b'{"entries": 3}', b'{"entries": [{"name": 1}]}', b"\xff"):
        with pytest.raises(SnapshotError):
            Manifest.parse(text)
