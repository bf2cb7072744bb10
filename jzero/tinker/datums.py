"""Training examples: from the protobuf of forward_backward to packed rows, and results back.

    batch = read_batch(request, vocabulary=V, longest=2048, limits=limits)   # UserError if refused
    packed = pack(batch, row_lengths, microbatch_tokens, shards)
    results = packed.from_rows(logps)                                        # one array per datum

Unlike the sequences of jzero's own runs, a datum has its own targets: position t of the input
predicts `target_tokens[t]`, which need not be the next token, or K targets with weights.

Consecutive datums that begin alike, as the samples of one prompt do, share their prefix: a row has
it once, and its log-probs are copied to all of them. Positions with a loss are never shared.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Int32

from jzero.errors import UserError, shown
from jzero.numerics.sizes import divide_up, power_of_two
from jzero.tinker import losses, wire
from jzero.tinker.limits import TinkerLimits
from jzero.training.packing import best_fit, num_rows
from jzero.types import Batch, RowLayout

# The fields of a position's loss besides its target: read if the loss has them.
RATIO_FIELDS = ("logprobs", "advantages")
INPUTS: Mapping[str, tuple[str, ...]] = {
    "cross_entropy": ("weights",),
    "importance_sampling": RATIO_FIELDS,
    "ppo": (*RATIO_FIELDS, "clip_low_threshold", "clip_high_threshold"),
    "cispo": (*RATIO_FIELDS, "clip_low_threshold", "clip_high_threshold"),
    "dro": RATIO_FIELDS,
}
CONFIG: Mapping[str, tuple[str, ...]] = {
    "ppo": ("clip_low_threshold", "clip_high_threshold"),
    "cispo": ("clip_low_threshold", "clip_high_threshold"),
    "dro": ("beta",),
}
LARGEST_SETTING = 1e30  # of loss_fn_config, in size
ROWS_MOST = 512  # rows of a microbatch
LEAST_SHARED = 32  # tokens: shorter prefixes are not worth another layout
LEAST_GAIN = 0.8  # of the tokens of plain rows: with more, rows are plain and compile less


@dataclass(frozen=True)
class Datum:
    """One sequence of N inputs, with K targets for each."""

    tokens: Int32[np.ndarray, " N"]
    targets: Int32[np.ndarray, "N K"]
    weights: Float32[np.ndarray, "N K"]
    logprobs: Float32[np.ndarray, " N"]
    advantages: Float32[np.ndarray, " N"]
    low: Float32[np.ndarray, " N"]
    high: Float32[np.ndarray, " N"]
    is_matrix: bool  # whether the targets were sent as [N, K], so that the answer is [N, K]
    num_without_loss: int = 0  # inputs at the beginning whose loss is 0 by weight or advantage


@dataclass(frozen=True)
class FwdBwd:
    """A forward_backward call."""

    model_id: str
    seq_id: int
    kind: int  # index of losses.KINDS
    beta: float
    is_forward_only: bool
    data: list[Datum]


def read_batch(
    request: wire.Message, *, vocabulary: int, longest: int, limits: TinkerLimits
) -> FwdBwd:
    """Returns the call that a decoded ForwardBackwardRequest describes.

    longest: the maximum number of inputs of a datum.
    Raises UserError or WireError for whatever is not served, by name.
    """
    loss = text_of(request, "loss_fn")
    if loss in losses.REFUSED:
        raise UserError(f"loss_fn={loss} is not served: {losses.REFUSED[loss]}")
    if loss not in losses.KINDS:
        raise UserError(
            f"loss_fn={shown(loss)} is not served: choose one of {', '.join(losses.KINDS)}"
        )
    config = read_config(request, loss)
    sent = request.get("data", [])
    assert isinstance(sent, list)
    if not 1 <= len(sent) <= limits.max_datums:
        raise UserError(f"{len(sent)} datums in one call: send 1 to {limits.max_datums}")
    data = []
    for index, datum in enumerate(sent):
        assert isinstance(datum, dict)
        name = f"datum {index}"
        tokens = read_tokens(name, datum, longest)
        data.append(read_datum(name, datum, tokens, loss, config, limits.max_targets))
        check_tokens(name, data[-1], vocabulary)
    return FwdBwd(
        model_id=text_of(request, "model_id"),
        seq_id=number_of(request, "seq_id"),
        kind=losses.KINDS.index(loss),
        beta=config.get("beta", losses.DEFAULT_BETA),
        is_forward_only=bool(request.get("forward_only", False)),
        data=data,
    )


def text_of(message: wire.Message, name: str) -> str:
    """Returns a text field."""
    value = message.get(name, "")
    assert isinstance(value, str)
    return value


def number_of(message: wire.Message, name: str) -> int:
    """Returns an integer field."""
    value = message.get(name, 0)
    assert isinstance(value, int)
    return value


def read_config(request: wire.Message, loss: str) -> dict[str, float]:
    """Returns the numbers of loss_fn_config. Raises UserError for a name the loss does not have."""
    config: dict[str, float] = {}
    # Newer SDKs send the second field, in which a value may also be a text; older SDKs the first.
    for field in ("loss_fn_config", "loss_fn_config_v2"):
        entries = request.get(field, {})
        assert isinstance(entries, dict)
        for name, value in entries.items():
            number = value.get("number") if isinstance(value, dict) else value
            if name not in CONFIG.get(loss, ()):
                raise UserError(f"loss_fn_config.{shown(name)} is not served with loss_fn={loss}")
            # The device computes in float32, where 1e39 is infinite.
            if not isinstance(number, float) or not abs(number) <= LARGEST_SETTING:
                raise UserError(
                    f"loss_fn_config.{name}={number}: send a number of at most {LARGEST_SETTING:g} "
                    "in size"
                )
            config[name] = number
    return config


def read_datum(
    name: str,
    datum: wire.Message,
    tokens: Int32[np.ndarray, " N"],
    loss: str,
    config: Mapping[str, float],
    max_targets: int,
) -> Datum:
    """Returns one datum. Raises UserError or WireError for an input that the loss does not have."""
    sent = datum.get("loss_fn_inputs", {})
    assert isinstance(sent, dict)
    inputs = {}
    for field, tensor in sent.items():
        if field != "target_tokens" and field not in INPUTS[loss]:
            raise UserError(f"{name}: loss_fn_inputs.{shown(field)} is not an input of {loss}")
        assert isinstance(tensor, dict)
        inputs[field] = wire.dense(f"{name}.{field}", tensor, len(tokens) * max_targets)
    targets = inputs.pop("target_tokens", None)
    if targets is None:
        raise UserError(f"{name}: loss_fn_inputs.target_tokens is missing")
    is_matrix = targets.ndim == 2
    if targets.ndim not in (1, 2) or len(targets) != len(tokens):
        raise UserError(
            f"{name}: target_tokens has shape {targets.shape} and the input {len(tokens)} tokens"
        )
    if is_matrix and (loss != "cross_entropy" or not 1 <= targets.shape[1] <= max_targets):
        raise UserError(
            f"{name}: target_tokens of shape {targets.shape}: several targets of a position are "
            f"served with loss_fn=cross_entropy, up to {max_targets}"
        )
    for field, values in inputs.items():
        shape = targets.shape if field == "weights" else targets.shape[:1]
        if values.shape != shape or values.dtype != np.float32:
            raise UserError(
                f"{name}: {field} is {values.dtype.name}{list(values.shape)}, and float32"
                f"{list(shape)} is needed"
            )
        if not np.isfinite(values).all():
            raise UserError(f"{name}: {field} has a value that is not finite")
    missing = [field for field in RATIO_FIELDS if field in INPUTS[loss] and field not in inputs]
    if missing:
        raise UserError(f"{name}: loss_fn={loss} needs loss_fn_inputs.{missing[0]}")

    def full(value: float) -> np.ndarray:
        return np.full(len(tokens), value, np.float32)

    def field_or(field: str, value: float) -> np.ndarray:
        return inputs.get(field, full(value))

    # [N] or [N, K] -> [N, K]
    ids = targets.reshape(len(tokens), -1)
    if ids.dtype == np.float32:
        raise UserError(f"{name}: target_tokens are float32: send integers")
    weights = inputs.get("weights", np.ones(targets.shape, np.float32)).reshape(ids.shape)
    advantages = field_or("advantages", 0)
    if loss == "dro":
        # The penalty does not vanish with the advantage, so prompts need a mask.
        is_prompt = (advantages == 0) & (field_or("logprobs", 0) == 0)
        weights = np.where(is_prompt[:, None], np.float32(0), weights)
    by_weight = loss in ("cross_entropy", "dro")
    has_loss = (weights != 0).any(axis=1) if by_weight else advantages != 0
    return Datum(
        tokens=tokens,
        targets=ids,
        weights=weights,
        logprobs=field_or("logprobs", 0),
        advantages=advantages,
        # A threshold for each token, if sent, takes precedence over the threshold of the call.
        low=field_or("clip_low_threshold", config.get("clip_low_threshold", losses.DEFAULT_LOW)),
        high=field_or(
            "clip_high_threshold", config.get("clip_high_threshold", losses.DEFAULT_HIGH)
        ),
        is_matrix=is_matrix,
        num_without_loss=int(has_loss.argmax()) if has_loss.any() else len(tokens),
    )


def read_tokens(name: str, datum: wire.Message, longest: int) -> Int32[np.ndarray, " N"]:
    """Returns the input of a datum, whose chunks are concatenated.

    Raises UserError if it is empty or longer than `longest`.
    """
    chunks = datum.get("model_input", [])
    assert isinstance(chunks, list)
    parts = []
    for chunk in chunks:
        assert isinstance(chunk, dict)
        text = chunk.get("encoded_text")
        if not isinstance(text, dict):
            raise UserError(f"{name}: only encoded_text is served: no images, no sound")
        parts.append(wire.integers(name, text.get("tokens")))
    tokens = np.concatenate(parts) if parts else np.zeros(0, np.int32)
    if not 1 <= len(tokens) <= longest:
        raise UserError(f"{name} has {len(tokens)} tokens: send 1 to {longest}")
    return tokens


def check_tokens(name: str, datum: Datum, vocabulary: int) -> None:
    """Raises UserError for a token outside of the vocabulary."""
    for field, ids in (("model_input", datum.tokens), ("target_tokens", datum.targets)):
        if ids.min() < 0 or ids.max() >= vocabulary:
            raise UserError(f"{name}: {field} has a token outside of 0 to {vocabulary - 1}")


# -- packing ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where a datum is in the rows."""

    row: int
    column: int  # of the first input that is not shared
    shared: int  # inputs at the beginning of the row, before those at `column`


@dataclass(frozen=True)
class Plan:
    """The rows of a call: their layout, and the data in each slot of each row."""

    layout: RowLayout
    rows: list[list[list[int]]]
    shared: list[int]  # by datum: the inputs that are in the prefix of its row


@dataclass(frozen=True)
class Packed:
    """The rows of a call."""

    batch: Batch[np.ndarray]  # targets and weights are [M, B, T, K]
    layout: RowLayout
    microbatches: int  # those that are not empty
    places: list[Place]  # of each datum
    data: list[Datum]

    def from_rows(self, rows: Float32[np.ndarray, "M B T K"]) -> list[np.ndarray]:
        """Returns the values of each datum, f32[N] or f32[N, K], as its targets were sent."""
        # [M, B, T, K] -> [M * B, T, K]
        flat = rows.reshape(-1, *rows.shape[2:])
        results = []
        for place, datum in zip(self.places, self.data, strict=True):
            # The columns of other datums with more targets are padding.
            count = datum.targets.shape[1]
            end = place.column + len(datum.tokens) - place.shared
            values = np.concatenate(
                [flat[place.row, : place.shared], flat[place.row, place.column : end]]
            )[:, :count]
            results.append(values if datum.is_matrix else values[:, 0])
        return results


def row_lengths(longest: int, shortest: int = 256) -> list[int]:
    """Returns the lengths of rows, one of which a call uses: powers of two, and the longest."""
    lengths = []
    while shortest < longest:
        lengths.append(shortest)
        shortest *= 2
    return [*lengths, longest]


def plan_plain(data: Sequence[Datum], lengths: Sequence[int]) -> Plan:
    """Returns rows of one of `lengths`, in which every datum has all its inputs."""
    sizes = [len(datum.tokens) for datum in data]
    longest, total = max(sizes), sum(sizes)
    # The shortest rows that hold the longest datum, or longer ones if many data share them.
    wanted = max(longest, min(total, lengths[min(1, len(lengths) - 1)]))
    width = next((length for length in lengths if length >= wanted), lengths[-1])
    rows = [[members] for members in best_fit(sizes, width)]
    return Plan(RowLayout(0, 1, width), rows, [0] * len(data))


def num_shareable(first: Datum, second: Datum) -> int:
    """Returns how many inputs at the beginning are equal, have equal targets, and have no loss."""
    count = min(first.num_without_loss, second.num_without_loss)
    if first.targets.shape[1] != second.targets.shape[1]:
        return 0
    is_equal = (first.tokens[:count] == second.tokens[:count]) & (
        first.targets[:count] == second.targets[:count]
    ).all(axis=1)
    return count if is_equal.all() else int(is_equal.argmin())


def find_groups(data: Sequence[Datum]) -> list[tuple[list[int], int]]:
    """Returns groups of consecutive data, each with the number of inputs that its members share.

    A datum that shares too little with its neighbors is a group of its own, which shares nothing.
    """
    groups: list[tuple[list[int], int]] = []
    for index, datum in enumerate(data):
        if groups:
            members, shared = groups[-1]
            common = num_shareable(data[members[0]], datum)
            if len(members) > 1:
                # A few tokens less are fine, another prompt with the same first words is not.
                is_member, common = 2 * common >= shared, min(common, shared)
            else:
                is_member = True
            if is_member and common >= LEAST_SHARED:
                groups[-1] = [*members, index], common
                continue
        groups.append(([index], 0))
    return groups


def plan_shared(data: Sequence[Datum], longest: int) -> Plan | None:
    """Returns rows with a prefix that several data share; None if there are none.

    longest: tokens of a row.
    """
    groups = find_groups(data)
    most_shared = max(shared for _, shared in groups)
    if not most_shared:
        return None
    prefix = power_of_two(most_shared, LEAST_SHARED)
    shared = [0] * len(data)
    for members, count in groups:
        for index in members:
            # A datum that is alone may use the prefix of its row as well, also with a loss.
            alone = min(prefix, len(data[index].tokens) - 1)
            shared[index] = count if len(members) > 1 else alone
    bodies = [len(datum.tokens) - count for datum, count in zip(data, shared, strict=True)]
    slot = power_of_two(max(bodies), LEAST_SHARED)
    if prefix + slot > longest:
        return None  # the rounding needs more than a row
    slots_of_groups = []
    for members, _ in groups:
        bins = best_fit([bodies[index] for index in members], slot)
        slots_of_groups.append([[members[item] for item in items] for items in bins])
    room = (longest - prefix) // slot
    wanted = power_of_two(max(map(len, slots_of_groups)))
    layout = RowLayout(prefix, min(wanted, room), slot)
    rows = [
        slots[start : start + layout.slots]
        for slots in slots_of_groups
        for start in range(0, num_rows(len(slots), layout) * layout.slots, layout.slots)
    ]
    return Plan(layout, rows, shared)


def plan_rows(data: Sequence[Datum], lengths: Sequence[int]) -> Plan:
    """Returns the rows with the fewest tokens."""
    plain = plan_plain(data, lengths)
    shared = plan_shared(data, lengths[-1])
    if shared is None or computed_tokens(shared) > LEAST_GAIN * computed_tokens(plain):
        return plain
    return shared


def computed_tokens(plan: Plan) -> int:
    """Returns the tokens of all rows, with padding."""
    return len(plan.rows) * plan.layout.tokens


def rows_of_microbatch(rows: int, most: int) -> int:
    """Returns how many of `rows` rows are in a microbatch, at most `most`.

    Empty rows are computed, too; a multiple of an eighth of `most` has few of them, and there are
    only eight such shapes.
    """
    step = max(1, most // 8)
    per_microbatch = divide_up(rows, divide_up(rows, most))
    return min(most, divide_up(per_microbatch, step) * step)


def pack(call: FwdBwd, lengths: Sequence[int], microbatch_tokens: int, shards: int) -> Packed:
    """Packs the data of a call into rows, in microbatches of at most `microbatch_tokens`.

    A plain row has one of `lengths`. A microbatch has at least one row for each of the `shards`
    devices that split its rows. The numbers of microbatches and targets are rounded up to powers
    of two, so that few shapes are compiled.
    """
    data, plan = call.data, plan_rows(call.data, lengths)
    layout = plan.layout
    width = layout.tokens
    most = min(max(1, microbatch_tokens // (width * shards)), ROWS_MOST)
    per_microbatch = rows_of_microbatch(divide_up(len(plan.rows), shards), most) * shards
    # Only these microbatches are computed. The number of rows is padded further, for the shape.
    used = divide_up(len(plan.rows), per_microbatch)
    targets = power_of_two(max(datum.targets.shape[1] for datum in data))
    shape = (power_of_two(used), per_microbatch, width)

    def zeros(dtype: type[np.generic], *trailing: int) -> np.ndarray:
        return np.zeros((shape[0] * shape[1], width, *trailing), dtype)

    fields = {name: zeros(np.int32) for name in ("tokens", "segments", "positions")}
    ids, weights = zeros(np.int32, targets), zeros(np.float32, targets)
    logps, advantages, low, high = (zeros(np.float32) for _ in range(4))

    def write(datum: Datum, row: int, column: int, segment: int, first: int, end: int) -> None:
        """Writes inputs first..end of a datum to a row, from `column` on."""
        span, part = (row, slice(column, column + end - first)), slice(first, end)
        fields["tokens"][span] = datum.tokens[part]
        fields["segments"][span] = segment
        fields["positions"][span] = np.arange(first, end)
        width_of_targets = slice(datum.targets.shape[1])
        ids[(*span, width_of_targets)] = datum.targets[part]
        weights[(*span, width_of_targets)] = datum.weights[part]
        logps[span], advantages[span] = datum.logprobs[part], datum.advantages[part]
        low[span], high[span] = datum.low[part], datum.high[part]

    places: dict[int, Place] = {}
    for row, slots in enumerate(plan.rows):
        owner = slots[0][0]
        write(data[owner], row, 0, 1, 0, plan.shared[owner])
        for number, members in enumerate(slots):
            column = layout.prefix + number * layout.slot
            # Segment 0 is padding.
            for segment, index in enumerate(members, start=1):
                shared, end = plan.shared[index], len(data[index].tokens)
                write(data[index], row, column, segment, shared, end)
                places[index] = Place(row, column, shared)
                column += end - shared

    def split(rows: np.ndarray) -> np.ndarray:
        # [M * B, T, ...] -> [M, B, T, ...]
        return rows.reshape(*shape[:2], *rows.shape[1:])

    batch = Batch(
        tokens=split(fields["tokens"]),
        targets=split(ids),
        segments=split(fields["segments"]),
        positions=split(fields["positions"]),
        weights=split(weights),
        sampler_logps=split(logps),
        advantages=split(advantages),
        ratio_low=split(low),
        ratio_high=split(high),
    )
    in_order = [places[index] for index in range(len(data))]
    return Packed(batch, layout, used, in_order, list(data))
