"""The tokens that a sample names in a prompt, and their log-probs: `target_prompt_logprobs`.

    targets = read_targets(body, prompt_length, vocabulary, most)   # int64 [prompt - 1, K]
    Scoring(..., first=first, given=targets.given(first))
    message = targets.answer(first, scores.given_logps)    # float32 of the same layout

Row i of the matrix is at prompt token i + 1. The cell -1 names nothing, and its answer is 0. A
sparse matrix has only the listed cells, in the request and in the answer.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Int32, Int64, Shaped

from jzero.errors import UserError, shown
from jzero.tinker import wire
from jzero.tinker.bodies import TensorBody

NAME = "target_prompt_logprobs"


@dataclass(frozen=True, eq=False)  # a request with targets can be compared and hashed
class PromptTargets:
    """The named tokens of every row, and where their log-probs are in the answer."""

    shape: tuple[int, int]
    sparse: tuple[np.ndarray, np.ndarray] | None  # CSR: the starts of the rows, and the columns
    num_cells: int  # of the request
    cells: Int64[np.ndarray, " named"]  # of the request, which name a token
    rows: Int64[np.ndarray, " named"]
    places: Int64[np.ndarray, " named"]  # among the named tokens of the row
    ids: Int32[np.ndarray, " named"]

    @property
    def first(self) -> int:
        """The first prompt token in whose place a token is named."""
        return 1 + int(self.rows[0])

    def given(self, first: int) -> Int32[np.ndarray, "scored width"]:
        """Returns the named tokens in the place of each prompt token from `first` on."""
        packed = np.full((self.shape[0], 1 + int(self.places.max())), -1, np.int32)
        packed[self.rows, self.places] = self.ids
        return packed[first - 1 :]

    def answer(self, first: int, logps: Float32[np.ndarray, "scored width"]) -> wire.Message:
        """Returns the log-probs of `given(first)` as a Tensor."""
        values = np.zeros(self.num_cells, "<f4")
        values[self.cells] = logps[self.rows - (first - 1), self.places]
        if self.sparse is None:
            return wire.tensor(values.reshape(self.shape))
        starts, columns = self.sparse
        csr: wire.Message = {
            "values": values.tobytes(),
            "crow_indices": starts.astype("<i8").tobytes(),
            "col_indices": columns.astype("<i8").tobytes(),
        }
        return {"sparse_csr": csr, "dtype": wire.FLOAT32, "shape": [*self.shape]}


def read_targets(body: TensorBody, prompt_length: int, vocabulary: int, most: int) -> PromptTargets:
    """Returns the named tokens of a request. Raises UserError if they do not fit the prompt.

    most: named tokens of one row.
    """
    if body.dtype != "int64":
        raise UserError(f"{NAME}: dtype {shown(body.dtype)} is not served: send int64")
    shape = body.shape
    if shape is None or len(shape) != 2 or shape[0] != prompt_length - 1:
        raise UserError(f"{NAME}: the shape is {shape}, and not [{prompt_length - 1}, K]")
    # A list with one float is read as floats, and would be cut off to integers.
    if any(isinstance(item, float) for item in body.data):
        raise UserError(f"{NAME}: a token is a float: send integers")
    try:
        ids = np.array(body.data, np.int64)
    except OverflowError:
        raise UserError(f"{NAME}: a token is not an int64") from None
    if body.sparse_crow_indices is None:
        sparse = None
        if shape[1] < 0 or len(ids) != shape[0] * shape[1]:
            raise UserError(f"{NAME}: {len(ids)} cells do not fill the shape {shape}")
        all_rows = np.repeat(np.arange(shape[0]), shape[1])
    else:
        starts, columns = body.sparse_crow_indices, body.sparse_col_indices or []
        sparse, all_rows = read_csr(starts, columns, ids, (shape[0], shape[1]))
    if ids.size and (ids.min() < -1 or ids.max() >= vocabulary):
        raise UserError(f"{NAME} has a token outside of -1 to {vocabulary - 1}")
    (cells,) = np.nonzero(ids >= 0)
    if not len(cells):
        raise UserError(f"{NAME} names no token: every cell is -1")
    rows = all_rows[cells]
    # The cells are in the order of their rows, so the first one of a row has the place 0.
    places = np.arange(len(rows)) - np.searchsorted(rows, rows)
    if places.max() >= most:
        raise UserError(
            f"{NAME} names {places.max() + 1} tokens in a row: at most {most} (--max-targets)"
        )
    return PromptTargets(
        (shape[0], shape[1]), sparse, len(ids), cells, rows, places, ids[cells].astype(np.int32)
    )


def read_csr(
    starts: list[int], columns: list[int], ids: Shaped[np.ndarray, " cells"], shape: tuple[int, int]
) -> tuple[tuple[np.ndarray, np.ndarray], Int64[np.ndarray, " cells"]]:
    """Returns the indices of a matrix in CSR, and the row of every cell."""
    try:
        indices = np.array(starts, np.int64), np.array(columns, np.int64)
    except OverflowError:
        raise UserError(f"{NAME}: an index is not an int64") from None
    if not wire.is_csr(*indices, len(ids), shape):
        raise UserError(f"{NAME}: the indices do not fit the shape {[*shape]}")
    return indices, np.repeat(np.arange(shape[0]), np.diff(indices[0]))
