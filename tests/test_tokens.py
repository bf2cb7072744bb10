"""The record of the tokens of a sequence, compared with lists of one dict for each token."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jzero.tokens import TRACKS, Tokens, recorded_tracks

BLANK = {"sampled": False, "logps": 0.0, "versions": -1, "kept": [-1, -1], "routes": [-1]}


def as_rows(tokens: Tokens) -> list[dict[str, object]]:
    """Returns one dict for each token."""
    lists = {name: values.tolist() for name, values in tokens.to_dict().items()}
    return [{name: values[t] for name, values in lists.items()} for t in range(len(tokens))]


@given(st.data())
def test_a_record_is_a_list_of_tokens(data: st.DataObject) -> None:
    """Appending, cutting, filling and slicing in any order, with tracks that begin late."""
    tokens, rows = Tokens(), []
    names = ["ids", "sampled", "logps", "versions"]
    for number in range(data.draw(st.integers(1, 12))):
        action = data.draw(st.sampled_from(["reply", "sample", "sample kept", "cut", "fill"]))
        count = data.draw(st.integers(0, 5))
        ids = list(range(10 * number, 10 * number + count))
        if action == "reply":
            tokens.append(ids)
            rows += [{"ids": i, **BLANK} for i in ids]
        elif action.startswith("sample"):
            values = {"logps": [-0.5 * i for i in ids], "sampled": True, "versions": number}
            added = [{"ids": i, **BLANK, "sampled": True, "logps": -0.5 * i} for i in ids]
            if action == "sample kept":
                values["kept"] = np.array([[i, -1] for i in ids], np.int32).reshape(-1, 2)
                names = [*names, "kept"] if "kept" not in names else names
                added = [row | {"kept": [row["ids"], -1]} for row in added]
            tokens.append(ids, **values)
            rows += [row | {"versions": number} for row in added]
        elif action == "cut":
            length = data.draw(st.integers(0, len(rows)))
            tokens.cut(length)
            del rows[length:]
        else:
            start = data.draw(st.integers(0, len(rows)))
            routes = np.arange(start, start + count, dtype=np.int16)[:, None]
            tokens.fill(start, {"routes": routes})
            names = [*names, "routes"] if "routes" not in names else names
            for t in range(start, min(start + count, len(rows))):
                if rows[t]["routes"] == [-1]:
                    rows[t] = rows[t] | {"routes": [t]}

    expected = [{name: row[name] for name in names} for row in rows]
    assert as_rows(tokens) == expected
    assert all(values.dtype == TRACKS[name].dtype for name, values in tokens.to_dict().items())
    start = data.draw(st.integers(0, len(rows)))
    end = data.draw(st.integers(start, len(rows)))
    parts = [tokens.first(start), tokens.part(start, end), tokens.part(end, len(rows))]
    assert as_rows(parts[1]) == expected[start:end]
    assert as_rows(Tokens.concatenate(parts)) == expected
    assert as_rows(Tokens(**tokens.to_dict())) == expected


def test_a_part_does_not_change_with_its_record() -> None:
    tokens = Tokens([1, 2, 3], sampled=True)

    part = tokens.part(1, 3)
    tokens.cut(1)
    tokens.append([9, 9])

    assert part.ids.tolist() == [2, 3]
    assert part.replaced(sampled=[True, False]).sampled.tolist() == [True, False]
    assert tokens.ids.tolist() == [1, 9, 9]
    assert tokens.sampled.tolist() == [True, False, False]


def test_a_track_of_no_size_is_not_recorded() -> None:
    assert recorded_tracks({"kept": 0, "routes": 0}) == ()
    assert recorded_tracks({"kept": 3, "routes": 8}) == (("kept", (3,)), ("routes", (8,)))


def test_an_undeclared_track_is_refused() -> None:
    with pytest.raises(KeyError, match="colors"):
        Tokens([1], colors=[2])
