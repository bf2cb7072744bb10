"""Many adapters of one frozen base in one decoder: a batch mixes sequences of all of them.

    bank = AdapterBank(model, base, mesh, dtype, most_slots=8, exact=False)
    bank.add("math", settings, adapter)      # copies the adapter; False: sequences hold all slots
    sequence.adapter = bank.hold("math")     # the adapter stays until `release`
    phase = Phase(bank.params, key)          # weights with all adapters

The bank replaces the weights of linear layers by `linear.BankedWeight`, and gives the output layer
an `output_adapter.BankedOutputAdapters`: the factors of all adapters are stacked, and every row of
a program has the number of its slot. Adapters of one shape (rank and targets) are one group. Its
number of slots doubles when sequences hold all of them: every slot costs arithmetic, and every
number of slots compiles its own programs. Adding an adapter compiles nothing else, unless its shape
is new. Ranks are padded with zeros to powers of two. With `exact` they are not: a padded product
has other bits on some devices.

An adapter in the bank never changes: a newer version of it is another adapter with another number.
It stays in its slot as long as sequences hold it. The least recently used one of the others makes
room for an adapter that is added.

The rows of all adapters go through the factors of every slot, multiplied by zeros, and 0 * NaN is
NaN: one value that is not finite would change the rows of everybody. So the slots only ever hold
values that are finite in the decoder's type, and a slot that its adapter leaves becomes zeros.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import PyTree

from jzero.config import AdapterConfig
from jzero.errors import UserError
from jzero.hosts import collectives
from jzero.model import adapters, output_adapter, qwen
from jzero.model.linear import BankedFactors, BankedWeight, RowAdapters
from jzero.model.output_adapter import BankedOutputAdapters
from jzero.numerics.sizes import power_of_two
from jzero.sharding.mesh import adapter_shardings
from jzero.sharding.publish import has_quantized

SMALLEST_RANK = 8  # smaller ranks are padded to it
FIRST_SLOTS = 2  # of a new group: an adapter that is sampled, and the next one
MOST_SHAPES = 4  # groups that may exist at a time; every combination compiles its own programs


@dataclass(frozen=True)
class HeldAdapter:
    """The weights that a sequence is computed with. Equal only if the weights are the same."""

    slot: int  # in the bank
    scale: float  # alpha / R
    number: int  # of all adapters that the bank has ever had


BASE_MODEL = HeldAdapter(slot=-1, scale=0.0, number=0)  # the base without an adapter


def row_adapters(held: Sequence[HeldAdapter]) -> RowAdapters[np.ndarray]:
    """Returns the adapters of sequences as arrays of NumPy."""
    slots = [adapter.slot for adapter in held]
    scales = [adapter.scale for adapter in held]
    return RowAdapters(np.array(slots, np.int32), np.array(scales, np.float32))


def has_bank(params: qwen.Params) -> bool:
    """Returns whether weights have adapters for every row."""
    if isinstance(params.get(output_adapter.NAME), BankedOutputAdapters):
        return True
    layers = params["layers"]
    # The layers of a decoder without adapters may be apart (`sharding.side_by_side`).
    if isinstance(layers, tuple):
        return False
    return any(isinstance(leaf, BankedWeight) for leaf in layers.values())


@dataclass(frozen=True)
class GroupShape:
    """The shape of the adapters of a group. The rank includes its padding."""

    rank: int
    targets: tuple[str, ...]

    @property
    def settings(self) -> AdapterConfig:
        return AdapterConfig(rank=self.rank, targets=self.targets)


@dataclass(eq=False)
class Occupant:
    """An adapter in a slot."""

    key: str
    held: HeldAdapter
    rank: int  # without padding
    num_holders: int = 0
    last_use: int = 0
    is_forgotten: bool = False  # its slot becomes free with its last holder


@dataclass(eq=False)
class Group:
    """The stacked factors of adapters of one shape.

    The factors of the output layer have no axis of layers.
    """

    shape: GroupShape
    first: int  # the bank's number of its first slot
    factors: qwen.Params  # {"q": {"a": [L, *inputs, n, R], "b": [L, n, R, *outputs]}, ...}
    occupants: list[Occupant | None] = field(default_factory=list)  # by slot
    left: set[int] = field(default_factory=set)  # slots whose adapters left, not zeros yet

    @property
    def is_idle(self) -> bool:
        return not any(one.num_holders for one in self.occupants if one is not None)

    @property
    def last_use(self) -> int:
        return max((one.last_use for one in self.occupants if one is not None), default=0)


# (key, adapter as arrays of NumPy, in the decoder's dtype): see `AdapterBank.on_evict`.
OnEvict = Callable[[str, qwen.Params], None]


def drop_evicted(key: str, adapter: qwen.Params) -> None:
    """The `OnEvict` of an owner that does not need evicted adapters."""


class AdapterBank:
    """The adapters on the device, and the number of sequences that hold each of them."""

    def __init__(
        self,
        model: qwen.QwenConfig,
        base: qwen.Params,
        mesh: Mesh,
        dtype: DTypeLike,
        *,
        most_slots: int,
        exact: bool = False,
        on_evict: OnEvict = drop_evicted,
    ) -> None:
        """Makes an empty bank.

        Args:
            base: the decoder's weights of the base, plain or int8, without fused weights.
            mesh: the decoder's.
            most_slots: adapters of one shape on the device at a time.
            on_evict: gets an adapter that leaves the bank to make room for another one.
        """
        if exact and has_quantized(base):
            raise UserError(
                "with model.exact, several adapters of an int8 base have other bits in one batch: "
                "serve one adapter, or set model.base=native or model.exact=False"
            )
        self.model = model
        self.base = base
        self.mesh = mesh
        self.dtype = jnp.dtype(dtype)
        self.most_slots = most_slots
        self.exact = exact
        self.on_evict = on_evict
        self.groups: list[Group] = []
        self.by_key: dict[str, Occupant] = {}
        self.num_added = 0
        self.clock = 0  # counts the uses

    @property
    def params(self) -> qwen.Params:
        """The decoder's weights with all adapters. `add` and `forget` make earlier ones invalid."""
        factors: dict[str, tuple[BankedFactors, ...]] = {}
        for group in self.groups:
            self._clear_left(group)
            for name, pair in group.factors.items():
                banked = BankedFactors(**pair, first=group.first)
                factors[name] = (*factors.get(name, ()), banked)
        return with_bank(self.base, factors)

    def shape_of(self, settings: AdapterConfig) -> GroupShape:
        """Returns the shape of the group of an adapter. Raises UserError if it has none."""
        return group_shape(self.model, settings, self.exact)

    # -- sequences ---------------------------------------------------------------------------------

    def hold(self, key: str) -> HeldAdapter | None:
        """Returns an adapter, which stays until `release`. None if the bank does not have it."""
        occupant = self.by_key.get(key)
        if occupant is None:
            return None
        occupant.num_holders += 1
        self._use(occupant)
        return occupant.held

    def release(self, held: HeldAdapter) -> None:
        """Undoes one `hold`."""
        if held == BASE_MODEL:
            return
        group, index = self._place_of(held)
        occupant = group.occupants[index]
        assert occupant is not None and occupant.held == held, f"{held=} is not in the bank"
        assert occupant.num_holders > 0, f"{held=} is not held"
        occupant.num_holders -= 1
        if occupant.is_forgotten and not occupant.num_holders:
            group.occupants[index] = None
            # Cleared later: the caller may be in the middle of calls with the weights of now.
            group.left.add(index)

    # -- adapters ----------------------------------------------------------------------------------

    def add(self, key: str, settings: AdapterConfig, adapter: qwen.Params) -> bool:
        """Copies an adapter into a slot. Returns False if sequences hold all slots.

        The copy has the decoder's type, and later changes of `adapter` do not affect it. The shape
        of an adapter that is added for the first time compiles programs at their next call. Raises
        UserError if a value is not finite in the decoder's type; then nothing is copied.
        """
        assert key not in self.by_key, f"{key=} is in the bank"
        group = self._group_of(self.shape_of(settings))
        index = None if group is None else self._free_slot(group)
        if group is None or index is None:
            return False
        places = adapter_shardings(self.model, settings, self.mesh)
        factors = adapters.factors_of(jax.tree.map(collectives.place, adapter, places))
        group.factors, is_finite = write_slot(group.factors, factors, self._on_device(index))
        if not collectives.fetch_global(is_finite):
            raise UserError(adapters.not_finite_message(self.dtype))
        group.left.discard(index)
        self.num_added += 1
        held = HeldAdapter(group.first + index, settings.scale, self.num_added)
        occupant = Occupant(key, held, settings.rank)
        group.occupants[index] = self.by_key[key] = occupant
        self._use(occupant)
        return True

    def forget(self, key: str) -> None:
        """Removes an adapter, if it is in the bank. Sequences that hold it finish with it."""
        occupant = self.by_key.pop(key, None)
        if occupant is None:
            return
        occupant.is_forgotten = True
        if not occupant.num_holders:
            group, index = self._place_of(occupant.held)
            group.occupants[index] = None
            group.left.add(index)
            self._clear_left(group)

    def read(self, key: str) -> qwen.Params:
        """Returns an adapter of the bank as arrays of NumPy, without padding."""
        occupant = self.by_key[key]
        group, index = self._place_of(occupant.held)
        factors = read_slot(group.factors, self._on_device(index))
        host = jax.tree.map(collectives.fetch_global, factors)
        ranks = np.arange(occupant.rank)
        unpadded = {
            name: {"a": pair["a"][..., ranks], "b": pair["b"].take(ranks, slot_axis_of_b(name))}
            for name, pair in host.items()
        }
        return adapters.tree_of(unpadded)

    def _clear_left(self, group: Group) -> None:
        """Writes zeros to the slots that adapters have left."""
        for index in sorted(group.left):
            group.factors = clear_slot(group.factors, self._on_device(index))
        group.left.clear()

    def _on_device(self, index: int) -> jax.Array:
        return collectives.put(np.array(index, np.int32), NamedSharding(self.mesh, P()))

    # -- slots -------------------------------------------------------------------------------------

    def _use(self, occupant: Occupant) -> None:
        self.clock += 1
        occupant.last_use = self.clock

    def _place_of(self, held: HeldAdapter) -> tuple[Group, int]:
        """Returns the group of an adapter, and its slot there."""
        for group in self.groups:
            if 0 <= held.slot - group.first < self.most_slots:
                return group, held.slot - group.first
        raise AssertionError(f"{held=} is in no group")

    def _free_slot(self, group: Group) -> int | None:
        """Returns a free slot, after an eviction if necessary; None if all are held."""
        if None in group.occupants:
            return group.occupants.index(None)
        unheld = [one for one in group.occupants if one is not None and not one.num_holders]
        num_slots = len(group.occupants)
        if unheld:
            self._evict(min(unheld, key=last_use_of))
        elif num_slots < self.most_slots:
            num_more = min(num_slots, self.most_slots - num_slots)
            group.factors = add_slots(group.factors, num_more)
            group.occupants += [None] * num_more
        else:
            return None
        return group.occupants.index(None)

    def _evict(self, occupant: Occupant) -> None:
        self.on_evict(occupant.key, self.read(occupant.key))
        self.forget(occupant.key)

    def _group_of(self, shape: GroupShape) -> Group | None:
        """Returns the group of a shape, perhaps a new one; None if sequences hold all groups."""
        for group in self.groups:
            if group.shape == shape:
                return group
        if len(self.groups) == MOST_SHAPES:
            idle = [group for group in self.groups if group.is_idle]
            if not idle:
                return None
            oldest = min(idle, key=last_use_of)
            for occupant in oldest.occupants:
                if occupant is not None:
                    self._evict(occupant)
            self.groups.remove(oldest)
        # Slots keep their numbers as long as their group exists, however many it will have.
        taken = {group.first for group in self.groups}
        firsts = range(0, MOST_SHAPES * self.most_slots, self.most_slots)
        first = next(number for number in firsts if number not in taken)
        num_slots = min(FIRST_SLOTS, self.most_slots)
        group = Group(shape, first, self._empty_factors(shape, num_slots), [None] * num_slots)
        self.groups.append(group)
        return group

    def _empty_factors(self, shape: GroupShape, slots: int) -> qwen.Params:
        """Returns zeros for the slots of a group."""
        factors = abstract_factors(self.model, shape, slots, self.mesh, self.dtype)

        def zeros() -> qwen.Params:
            return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), factors)

        return jax.jit(zeros, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, factors))()


def abstract_factors(
    model: qwen.QwenConfig, shape: GroupShape, slots: int, mesh: Mesh, dtype: DTypeLike
) -> qwen.Params:
    """Returns the shapes, types and shardings of a group of `slots` adapters."""
    one = adapters.factors_of(adapters.abstract(model, shape.settings))
    places = adapters.factors_of(adapter_shardings(model, shape.settings, mesh))

    def stack(
        factor: jax.ShapeDtypeStruct, place: NamedSharding, slot_axis: int
    ) -> jax.ShapeDtypeStruct:
        lengths, spec = list(factor.shape), [*place.spec, None]
        lengths.insert(slot_axis, slots)
        spec.insert(slot_axis, None)
        stacked_place = NamedSharding(mesh, P(*spec[: len(lengths)]))
        return jax.ShapeDtypeStruct(tuple(lengths), dtype, sharding=stacked_place)

    return {
        name: {
            "a": stack(pair["a"], places[name]["a"], pair["a"].ndim - 1),
            "b": stack(pair["b"], places[name]["b"], slot_axis_of_b(name)),
        }
        for name, pair in one.items()
    }


def slot_axis_of_b(name: str) -> int:
    """Returns the axis of the slots in the stacked B of a target: before the ranks."""
    return 0 if name == adapters.OUTPUT else 1


def slot_axes(factors: qwen.Params) -> PyTree[int]:
    """Returns the axis of the slots in every stacked factor of a group."""
    return {
        name: {"a": pair["a"].ndim - 2, "b": slot_axis_of_b(name)} for name, pair in factors.items()
    }


def with_bank(base: qwen.Params, factors: Mapping[str, tuple[BankedFactors, ...]]) -> qwen.Params:
    """Returns the weights of the base with the adapters of a bank, by target."""
    layers, outside_of_layers = dict(base["layers"]), {}
    for name, groups in factors.items():
        if name == adapters.OUTPUT:
            outside_of_layers[output_adapter.NAME] = BankedOutputAdapters(groups)
        else:
            layers[name] = BankedWeight(layers[name], groups)
    return base | outside_of_layers | {"layers": layers}


def abstract_bank(
    model: qwen.QwenConfig,
    base: qwen.Params,
    settings: AdapterConfig,
    slots: int,
    mesh: Mesh,
    dtype: DTypeLike,
    exact: bool,
) -> qwen.Params:
    """Returns the decoder's weights with one full group of adapters, for a plan.

    base: the decoder's abstract weights.
    """
    shape = group_shape(model, settings, exact)
    factors = abstract_factors(model, shape, slots, mesh, dtype)
    groups = {name: (BankedFactors(**pair, first=0),) for name, pair in factors.items()}
    return with_bank(base, groups)


def last_use_of(item: Occupant | Group) -> int:
    return item.last_use


def group_shape(model: qwen.QwenConfig, settings: AdapterConfig, exact: bool) -> GroupShape:
    """Returns the shape of the group of an adapter. Raises UserError if it has none."""
    check_targets(model, settings)
    rank = settings.rank if exact else power_of_two(settings.rank, SMALLEST_RANK)
    return GroupShape(rank, tuple(adapters.targets(model, settings)))


def check_targets(model: qwen.QwenConfig, settings: AdapterConfig) -> None:
    """Raises UserError for an adapter that cannot be in a bank."""
    for name, target in adapters.targets(model, settings).items():
        if target.is_of_experts:
            raise UserError(
                f"the adapter has factors for the experts' weight {name}, which cannot be sampled "
                "next to other adapters: use one adapter at a time, or adapters without targets "
                "in experts"
            )


def can_hold(model: qwen.QwenConfig, base: qwen.Params, exact: bool) -> bool:
    """Returns whether a bank can hold adapters on all linear layers of a model.

    It cannot hold adapters of experts. With `exact` it cannot hold any of an int8 base: the
    products by the scales would have other bits than with one adapter.
    """
    has_experts = any(target.is_of_experts for target in adapters.linear_layers(model).values())
    return not has_experts and not (exact and has_quantized(base))


@partial(jax.jit, donate_argnums=0)
def write_slot(
    factors: qwen.Params, adapter: qwen.Params, index: jax.Array
) -> tuple[qwen.Params, jax.Array]:
    """Writes an adapter into a slot of a group, padded with zeros.

    Returns the factors, and whether the adapter is finite in their type. If not, the slot gets
    zeros.
    """
    cast = jax.tree.map(lambda stacked, factor: factor.astype(stacked.dtype), factors, adapter)
    is_finite = adapters.all_finite(cast)

    def write(stacked: jax.Array, factor: jax.Array, slot_axis: int) -> jax.Array:
        rank_axis = slot_axis + 1
        widened = jnp.expand_dims(jnp.where(is_finite, factor, 0), slot_axis)
        padding = [(0, 0)] * widened.ndim
        padding[rank_axis] = (0, stacked.shape[rank_axis] - widened.shape[rank_axis])
        padded = jnp.pad(widened, padding)
        return jax.lax.dynamic_update_slice_in_dim(stacked, padded, index, slot_axis)

    return jax.tree.map(write, factors, cast, slot_axes(factors)), is_finite


@partial(jax.jit, donate_argnums=0)
def clear_slot(factors: qwen.Params, index: jax.Array) -> qwen.Params:
    """Writes zeros to a slot of a group."""

    def clear(stacked: jax.Array, slot_axis: int) -> jax.Array:
        shape = list(stacked.shape)
        shape[slot_axis] = 1
        zeros = jnp.zeros(shape, stacked.dtype)
        return jax.lax.dynamic_update_slice_in_dim(stacked, zeros, index, slot_axis)

    return jax.tree.map(clear, factors, slot_axes(factors))


@partial(jax.jit, static_argnums=1)
def add_slots(factors: qwen.Params, count: int) -> qwen.Params:
    """Appends empty slots to a group."""

    def widen(stacked: jax.Array, slot_axis: int) -> jax.Array:
        padding = [(0, 0)] * stacked.ndim
        padding[slot_axis] = (0, count)
        return jnp.pad(stacked, padding)

    return jax.tree.map(widen, factors, slot_axes(factors))


@jax.jit
def read_slot(factors: qwen.Params, index: jax.Array) -> qwen.Params:
    """Returns the padded factors in a slot of a group."""

    def take(stacked: jax.Array, slot_axis: int) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(stacked, index, slot_axis, keepdims=False)

    return jax.tree.map(take, factors, slot_axes(factors))
