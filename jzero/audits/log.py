"""Logs of rollouts of any stack, as JSON lines.

A row is one response. Its fields, with other names under which they are read:

    prompt_ids     prompt_token_ids    token ids of the prompt
    response_ids   completion_ids, response_token_ids, token_ids
                                       token ids of the response
    logprobs       response_logprobs, sampling_logprobs    optional: one number per response token
    temperature, top_p, top_k          optional: sampling parameters of the row
    version        model_version       optional: name or number of the weights
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeGuard

import numpy as np
from jaxtyping import Float32, Int32

from jzero import json_values
from jzero.errors import UserError, shown
from jzero.files import JsonObject, read_lines

MAX_LINE_BYTES = 1 << 26
LARGEST_FLOAT = 3.4e38  # in float32, the type of log-probs
ROUNDING = 1e-3  # the log-prob of a certain token may be rounded to slightly above 0

FIELDS = {
    "prompt_ids": ("prompt_token_ids",),
    "response_ids": ("completion_ids", "response_token_ids", "token_ids"),
    "logprobs": ("response_logprobs", "sampling_logprobs"),
    "temperature": (),
    "top_p": (),
    "top_k": (),
    "version": ("model_version",),
}


class Sampling(NamedTuple):
    """Sampling parameters. The filters are top-k, then top-p, after the temperature."""

    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0

    @property
    def has_filters(self) -> bool:
        """Whether some tokens cannot be sampled. Greedy decoding is top-1."""
        return self.top_k != 0 or self.top_p < 1 or self.temperature == 0


@dataclass(frozen=True)
class Response:
    """A logged response."""

    line: int  # in the file, from 1
    prompt: Int32[np.ndarray, " prompt"]
    tokens: Int32[np.ndarray, " tokens"]
    logps: Float32[np.ndarray, " tokens"] | None
    sampling: Sampling
    version: str  # "" if the row has none


def read_log(path: Path, vocab_size: int, defaults: Sampling, most: int = 0) -> list[Response]:
    """Returns the responses of a log. Rows with an empty response are left out.

    vocab_size: number of tokens of the model.
    defaults: sampling parameters of rows without them.
    most: read only this many rows; 0: all.

    Raises UserError, which names the row and the field, if a row is damaged.
    """
    try:
        responses = []
        for number, line in _numbered_lines(path):
            if most and len(responses) == most:
                break
            response = _parse(line, f"{path}:{number}", number, vocab_size, defaults)
            # An empty response says nothing about the model.
            if len(response.tokens):
                responses.append(response)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): give a file of rows") from None
    if not responses:
        raise UserError(f"{path} has no responses: give a file with one JSON object per line")
    return responses


def _numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    for number, line in read_lines(path, MAX_LINE_BYTES):
        if line.strip():
            yield number, line


def _parse(line: bytes, where: str, number: int, vocab: int, defaults: Sampling) -> Response:
    try:
        row = json_values.parse(line.decode("utf-8"), allows_nan=True)
    except ValueError as error:
        raise UserError(f"{where}: damaged ({error})") from None
    if not isinstance(row, dict):
        raise UserError(f"{where}: not a JSON object")
    tokens = _token_ids(row, "response_ids", where, vocab)
    prompt = _token_ids(row, "prompt_ids", where, vocab)
    if not len(prompt):
        raise UserError(f"{where}: prompt_ids is empty: the first token of a response needs one")
    return Response(
        line=number,
        prompt=prompt,
        tokens=tokens,
        logps=_logps(row, where, len(tokens)),
        sampling=Sampling(
            _number(row, "temperature", where, defaults.temperature, 0, 100),
            # vLLM writes top_k=-1 for no limit.
            max(0, int(_number(row, "top_k", where, defaults.top_k, -1, 2**31 - 1, whole=True))),
            _number(row, "top_p", where, defaults.top_p, 1e-6, 1),
        ),
        version=_version(row, where),
    )


def _value(row: JsonObject, field: str) -> object:
    """Returns the value of a field, under any of its names; None if it is absent."""
    return next((row[name] for name in (field, *FIELDS[field]) if row.get(name) is not None), None)


def _token_ids(
    row: JsonObject,
    field: str,
    where: str,
    vocab_size: int,
) -> Int32[np.ndarray, " tokens"]:
    values = _value(row, field)
    if values is None:
        raise UserError(f"{where}: {field} is missing: send a list of token ids")
    if not isinstance(values, list):
        raise UserError(f"{where}: {field}={shown(values)} is not a list of token ids")
    for place, token in enumerate(values):
        # `type`, because JSON's true is an int in Python.
        if type(token) is not int or not 0 <= token < vocab_size:
            raise UserError(
                f"{where}: {field}[{place}]={shown(token)} is not a token of the model, which has "
                f"{vocab_size}"
            )
    return np.array(values, np.int32)


def _logps(row: JsonObject, where: str, length: int) -> Float32[np.ndarray, " tokens"] | None:
    values = _value(row, "logprobs")
    if values is None:
        return None
    if not isinstance(values, list):
        raise UserError(f"{where}: logprobs={shown(values)} is not a list of numbers")
    if len(values) != length:
        raise UserError(
            f"{where}: logprobs has {len(values)} numbers, and the response {length} tokens"
        )
    for place, value in enumerate(values):
        if not _is_number(value) or not -LARGEST_FLOAT <= value <= ROUNDING:
            raise UserError(f"{where}: logprobs[{place}]={shown(value)} is not a log-probability")
    return np.array(values, np.float32)


def _number(
    row: JsonObject,
    field: str,
    where: str,
    default: float,
    lowest: float,
    highest: float,
    whole: bool = False,
) -> float:
    value = _value(row, field)
    if value is None:
        return default
    is_float = whole and type(value) is float
    if not _is_number(value) or is_float or not lowest <= value <= highest:
        kind = "a whole number" if whole else "a number"
        raise UserError(
            f"{where}: {field}={shown(value)} must be {kind} from {lowest:g} to {highest:g}"
        )
    return value


def _is_number(value: object) -> TypeGuard[float]:
    """Returns whether a JSON value is a finite number."""
    if type(value) is int:
        # Larger integers are not exact in float64, to which NumPy converts them.
        return abs(value) < 2**53
    return isinstance(value, float) and math.isfinite(value)


def _version(row: JsonObject, where: str) -> str:
    value = _value(row, "version")
    if value is not None and type(value) not in (str, int):
        raise UserError(f"{where}: version={shown(value)} must be a text or a whole number")
    return "" if value is None else str(value)
