"""The decoder: JetStream's Engine methods over a paged KV cache.

The mesh has axes (slots, tensor). Each slot shard is a decoder of its own, with its own pages, loop and (where tensor
is 1) trip count (`shard_map` over slots); weights and KV heads are split over tensor inside it. S slots and R pages a
shard, C decode steps a call, n prompts and G samples a prefill."""

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jzero import attention
from jzero.config import RolloutConfig as Settings
from jzero.errors import UserError
from jzero.model import qwen
from jzero.rollout import sampling
from jzero.rollout.pages import PageAllocator
from jzero.types import RowLayout


class Prefix(NamedTuple):
    """Prefilled prompts: KV of every prompt token, and each sample's first token. Rows are split over slot shards.
    Holds arrays, or their shardings or specs."""

    k: Any  # [L, n, T, K, D]
    v: Any
    tokens: Any  # i32[n, G]
    logps: Any  # f32[n, G]


class ResultTokens(NamedTuple):
    """What one call sampled: slot s emitted tokens[s, :counts[s]]. On the device, then on the host."""

    tokens: Any  # i32[slots, C]
    logps: Any  # f32[slots, C] fp32, at the sampling temperature, over the full vocabulary
    counts: Any  # i32[slots]


@dataclass
class Placement:
    """One sample of a prefix, put into a slot, and how far it is there."""

    slot: int  # over all shards
    prefix_row: int  # of the prefix
    sample_index: int
    length: int  # tokens the prefix holds for it
    limit: int  # tokens at which it ends
    request: int  # names its noise
    group: Any  # samples of one group share the full pages of
    shared_tokens: int  # their first so many tokens
    reached: int = 0  # tokens whose KV dispatched calls may write
    is_paused: bool = False  # it keeps its pages and does not decode
    resumed: tuple[int, int, int] = (
        0,
        0,
        0,
    )  # of the next call: the next input, its position, limit; 0: as it was
    forced_tokens: list[int] = field(
        default_factory=list
    )  # tokens that its next steps take instead of sampling


SCRATCH = 0  # the page that idle slots write to
RESUMED = ("tokens", "positions", "limits")  # of the state
SLOTS = {  # dtype of the rest of it, a number a slot
    "tokens": jnp.int32,  # the next input
    "positions": jnp.int32,  # where it sits = tokens with KV
    "limits": jnp.int32,
    "requests": jnp.int32,
    "temperature": jnp.float32,
    "active": jnp.bool_,
}
# specs name the manual axis alone; tensor sharding follows the weights
PREFIX = Prefix(P(None, "slots"), P(None, "slots"), P("slots"), P("slots"))
STATE = {"k": P(None, "slots"), "v": P(None, "slots")} | dict.fromkeys(SLOTS, P("slots"))


class Engine:
    """Owns the pages and the host's view of the slots; device state is passed in, donated and handed back."""

    samples_per_slot, colocated_cpus = 1, None  # of JetStream's interface

    def __init__(
        self,
        config: qwen.QwenConfig,
        settings: Settings,
        mesh: Mesh,
        stop_ids: tuple[int, ...],
        dtype: str,
        backend="",
    ):
        """backend: config.Model.attention."""
        self.model, self.settings, self.mesh, self.dtype = config, settings, mesh, jnp.dtype(dtype)
        self.num_shards = mesh.shape["slots"]
        self.slots_per_shard = -(-settings.num_slots // self.num_shards)
        self.max_concurrent_decodes = self.num_shards * self.slots_per_shard
        self.slots_per_block = math.gcd(
            self.slots_per_shard, settings.group_size
        )  # neighbours, where a group's samples tend to sit
        self.max_sequence_tokens = settings.longest_episode
        self.pages_per_slot = -(-self.max_sequence_tokens // settings.page_size)
        self.max_prefill_length = self.pages_per_slot * settings.page_size
        share = (
            -(-settings.num_pages // self.num_shards)
            if settings.num_pages
            else self.slots_per_shard * self.pages_per_slot
        )
        self.pages_per_shard = share + 1
        if share < self.pages_per_slot:
            raise UserError(
                f"rollout.num_pages={settings.num_pages} is too small: one sequence of {self.max_sequence_tokens} tokens takes "
                f"{self.pages_per_slot} pages of {settings.page_size} on each of {self.num_shards} devices"
            )
        divides = config.num_key_value_heads % mesh.shape["tensor"] == 0
        self.kv_axis = (
            "tensor" if divides else None
        )  # as `sharding` leaves weights whole that do not divide
        self.attention = attention.choose(backend, mesh)
        self.kv_storage = attention.kv_storage(settings.kv_dtype, mesh.devices.flat[0].platform)
        tensor, V, kind = mesh.shape["tensor"], config.vocab_size, mesh.devices.flat[0].device_kind
        free = (settings.top_k, settings.top_p, settings.min_p) == (0, 1, 0)
        self.logits_axis = "tensor" if free and tensor > 1 and V % tensor == 0 else ""
        parted = (
            free and tensor == 1 and kind in ("TPU v5", "TPU7x")
        )  # whose VMEM holds no logits of a whole batch
        part = sampling.PART if parted else V
        self.vocabulary = [slice(at, min(at + part, V)) for at in range(0, V, part)]
        self.stop_ids = tuple(stop_ids)
        self.pages = [
            PageAllocator(
                self.pages_per_shard, settings.page_size, self.slots_per_shard, self.pages_per_slot
            )
            for _ in range(self.num_shards)
        ]
        self.placements: dict[int, Placement] = {}  # slot -> what decodes there

    def get_prefix_destination_sharding(self) -> Prefix:
        kv, rest = (
            NamedSharding(self.mesh, P(*axes))
            for axes in ((None, "slots", None, self.kv_axis), ("slots",))
        )
        return Prefix(kv, kv, rest, rest)

    def load_params(self, params: qwen.Params, shardings: qwen.Params) -> qwen.Params:
        """Weights in the decoder's dtype and layout; see `sharding.publish` for the trainer's own."""
        return jax.device_put(jax.tree.map(lambda x: x.astype(self.dtype), params), shardings)

    @cached_property
    def init_decode_state(self):
        """Jitted, without arguments: the state of empty slots."""
        state = self.abstract_state()
        zeros = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state)
        return jax.jit(zeros, out_shardings=jax.tree.map(lambda x: x.sharding, state))

    def abstract_state(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and shardings of the decode state."""
        L, K, D = (
            self.model.num_hidden_layers,
            self.model.num_key_value_heads,
            self.model.head_dim,
        )
        split = self.mesh.shape["tensor"] if self.kv_axis else 1
        rows, width = self.attention.pool_rows(K // split, D)
        shape = (
            split * rows,
            self.num_shards * L * self.pages_per_shard,
            self.settings.page_size,
            width,
        )
        pool = self._abstract(shape, self.kv_storage, P(self.kv_axis, "slots"))
        slot = lambda dtype: self._abstract((self.max_concurrent_decodes,), dtype, P("slots"))
        return {"k": pool, "v": pool} | {name: slot(dtype) for name, dtype in SLOTS.items()}

    def free_slots(self, shard: int) -> list[int]:
        first = shard * self.slots_per_shard
        return [
            slot
            for slot in range(first, first + self.slots_per_shard)
            if slot not in self.placements
        ]

    def place(self, placement: Placement) -> list[tuple[int, int]]:
        """Take pages for a sample and its next call: its group's full pages where a neighbour holds them, its own for
        the rest. Returns (index of the page in the prefix, pool page) of those to write. Raises OutOfPages."""
        assert placement.slot not in self.placements, f"{placement.slot=} is taken"
        shard, slot = divmod(placement.slot, self.slots_per_shard)
        pages, page = self.pages[shard], self.settings.page_size
        near = (
            divmod(p.slot, self.slots_per_shard)
            for p in self.placements.values()
            if p.group == placement.group
        )
        full = next(
            (
                pages.pages_of_slot[s][: placement.shared_tokens // page]
                for other, s in near
                if other == shard
            ),
            [],
        )
        new = pages.reserve(
            slot, min(placement.length + self.settings.decode_steps, placement.limit), full
        )
        self.placements[placement.slot], placement.reached = placement, placement.length
        return list(enumerate(new, start=len(full)))[: -(-placement.length // page) - len(full)]

    def reserve(self, slot: int) -> int:
        """Pages for the slot's next call -> how many tokens it may then have. Raises OutOfPages."""
        shard, local = divmod(slot, self.slots_per_shard)
        reach = min(
            self.placements[slot].reached + self.settings.decode_steps, self.placements[slot].limit
        )
        self.pages[shard].reserve(local, reach)
        return reach

    def free_resource(self, slot: int) -> None:
        shard, local = divmod(slot, self.slots_per_shard)
        self.pages[shard].release(local)
        del self.placements[slot]

    def resume(self, slot: int, position: int, tokens: list[int], limit: int) -> None:
        """Of a paused slot, whose KV before `position` is that of its sequence: go on with tokens from there."""
        placement = self.placements[slot]
        placement.is_paused, placement.limit, placement.reached = False, limit, position
        placement.resumed, placement.forced_tokens = (tokens[0], position, limit), tokens[1:]

    def prefill_multisampling(
        self,
        *,
        params,
        padded_tokens: np.ndarray,
        true_length: np.ndarray,
        requests: np.ndarray,
        temperature,
        seed,
    ) -> Prefix:
        """padded_tokens i32[n, T] (T whole pages, n over all shards), true_length i32[n], requests i32[n, G],
        temperature f32[n], seed a key -> Prefix with G first tokens for each prompt."""
        arrays = self._put(padded_tokens, true_length, requests, temperature)
        return self._programs["prefill"](params, seed, *arrays)

    def prefill(
        self, *, params, padded_tokens, true_length, request=0, temperature=1.0, seed
    ) -> Prefix:
        """JetStream's single request: padded_tokens i32[T], true_length int. It is row 0 of shard 0."""
        one = {"padded_tokens": padded_tokens, "true_length": true_length, "requests": [request]}
        rows = {name: np.array([x] * self.num_shards, np.int32) for name, x in one.items()}
        heat = np.full(self.num_shards, temperature, np.float32)
        return self.prefill_multisampling(params=params, temperature=heat, seed=seed, **rows)

    def insert(self, prefix: Prefix, decode_state, placement: Placement, temperature: float = 1.0):
        return self.bulk_insert(
            prefix, decode_state, [(placement, self.place(placement))], temperature
        )

    def bulk_insert(self, prefix: Prefix, decode_state, placements: list, temperature: float):
        """Write the pages that `place` took, and start the slots. placements: (Placement, its pages to write)."""
        rows, width = (
            prefix.k.shape[1] // self.num_shards,
            prefix.k.shape[2] // self.settings.page_size,
        )
        by_shard = [
            [each for each in placements if each[0].slot // self.slots_per_shard == s]
            for s in range(self.num_shards)
        ]
        count = next_power_of_two(max(map(len, by_shard)), 8)
        slots = np.full(
            (self.num_shards, 6, count), self.slots_per_shard, np.int32
        )  # an absent slot is dropped
        pages = np.zeros((self.num_shards, 2, rows * width + count), np.int32)
        for shard, items in enumerate(by_shard):
            copies = []
            for i, (p, writes) in enumerate(items):
                row = p.prefix_row % rows
                slots[shard, :, i] = (
                    p.slot % self.slots_per_shard,
                    row,
                    p.sample_index,
                    p.length,
                    p.limit,
                    p.request,
                )
                copies += [(row * width + index, page) for index, page in writes]
            pages[shard, :, : len(copies)] = np.array(copies, np.int32).reshape(-1, 2).T
        arguments = self._put(slots, pages, np.full(self.num_shards, temperature, np.float32))
        return self._programs["insert"](decode_state, prefix, *arguments)

    def generate(self, params, decode_state, seed) -> tuple[Any, ResultTokens]:
        """Up to `chunk` tokens for every active slot. Slots freed on the host since the last call stop here.
        Raises OutOfPages, unless `reserve` was called for every slot."""
        running = [slot for slot, placement in self.placements.items() if not placement.is_paused]
        for slot, reach in [(slot, self.reserve(slot)) for slot in running]:
            self.placements[slot].reached = reach
        table = np.concatenate([pages.table for pages in self.pages])
        keep = np.zeros(self.max_concurrent_decodes, np.bool_)
        keep[running] = True
        arguments = self._put(table, keep, self._shared(table, keep), *self._turns())
        return self._programs["generate"](params, decode_state, seed, *arguments)

    def _shared(self, table: np.ndarray, placed: np.ndarray) -> np.ndarray:
        """i32[blocks]: the leading full pages that the placed slots of a block have in common. See attention.backend.Paged."""
        table, placed = (x.reshape(-1, self.slots_per_block, *x.shape[1:]) for x in (table, placed))
        same = ((table == table[:, :1]) | ~placed[..., None]).all(axis=1) & placed[:, :1]
        full = np.full(self.max_concurrent_decodes, self.max_sequence_tokens)
        full[list(self.placements)] = [placement.length for placement in self.placements.values()]
        full = full.reshape(-1, self.slots_per_block).min(axis=1) // self.settings.page_size
        return np.minimum(np.cumprod(same, axis=1).sum(axis=1), full).astype(np.int32)

    def _turns(self) -> list[np.ndarray]:
        """What a call does to slots between turns: i32[slots, 3] `resumed`, or a limit of 0, and the first of `given`
        i32[slots, C], then -1. Nothing where episodes have one turn."""
        if self.settings.max_turns == 1:
            return []
        resumed = np.zeros((self.max_concurrent_decodes, 3), np.int32)
        given = np.full((self.max_concurrent_decodes, self.settings.decode_steps), -1, np.int32)
        for slot, placement in self.placements.items():
            resumed[slot], placement.resumed = placement.resumed, (0, 0, 0)
            now, placement.forced_tokens = (
                placement.forced_tokens[: self.settings.decode_steps],
                placement.forced_tokens[self.settings.decode_steps :],
            )
            given[slot, : len(now)] = now
        return [resumed, given]

    def _put(self, *arrays):
        return [jax.device_put(x, NamedSharding(self.mesh, P("slots"))) for x in arrays]

    def programs(self, params, prefills: list[tuple[int, int]]) -> dict[str, tuple[Any, tuple]]:
        """(jitted, abstract arguments) of every program; prefills: rows a shard and tokens a row of each."""
        shards, count, page = (
            self.num_shards,
            next_power_of_two(self.slots_per_shard, 8),
            self.settings.page_size,
        )
        slots = lambda shape, dtype=jnp.int32: self._abstract(shape, dtype, P("slots"))
        key = jax.eval_shape(lambda: jax.random.key(0))
        key, state = self._abstract((), key.dtype, P()), self.abstract_state()
        L, K, D = (
            self.model.num_hidden_layers,
            self.model.num_key_value_heads,
            self.model.head_dim,
        )
        out: dict[str, tuple[Any, tuple]] = {}
        for rows, T in prefills:
            n, first = rows * shards, (rows * shards, self.settings.group_size)
            inputs = slots((n, T)), slots((n,)), slots(first), slots((n,), jnp.float32)
            out[f"prefill {rows}x{T}"] = self._programs["prefill"], (params, key, *inputs)
            place = self.get_prefix_destination_sharding()
            kv = jax.ShapeDtypeStruct((L, n, T, K, D), self.dtype, sharding=place.k)
            prefix = Prefix(kv, kv, slots(first), slots(first, jnp.float32))
            copies = slots((shards, 2, rows * T // page + count))
            inputs = slots((shards, 6, count)), copies, slots((shards,), jnp.float32)
            out[f"insert {rows}x{T}"] = self._programs["insert"], (state, prefix, *inputs)
        S = self.max_concurrent_decodes
        inputs = (
            slots((S, self.pages_per_slot)),
            slots((S,), jnp.bool_),
            slots((S // self.slots_per_block,)),
        )
        inputs += (
            (slots((S, 3)), slots((S, self.settings.decode_steps)))
            if self.settings.max_turns > 1
            else ()
        )
        return out | {"generate": (self._programs["generate"], (params, state, key, *inputs))}

    def _abstract(self, shape, dtype, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.mesh, spec))

    @cached_property
    def _programs(self) -> dict[str, Any]:
        """Jitted: prefill, insert, generate."""
        manual = {"slots"} if self.mesh.shape["tensor"] > 1 else set(self.mesh.axis_names)
        arrays = lambda count: (P("slots"),) * count

        def program(function, in_specs, out_specs, donate=()):
            specs = {"in_specs": in_specs, "out_specs": out_specs}
            mapped = jax.shard_map(
                function, mesh=self.mesh, **specs, axis_names=manual, check_vma=False
            )
            return jax.jit(mapped, donate_argnums=donate, compiler_options=options)

        seventh = self.mesh.devices.flat[0].device_kind == "TPU7x"
        options = (
            {"xla_tpu_control_large_2nd_minor_layout_for_x16": False} if seventh else None
        )  # or it copies weights
        turns = 2 * (self.settings.max_turns > 1)
        return {
            "prefill": program(self._prefill, (P(), P(), *arrays(4)), PREFIX),
            "insert": program(self._insert, (STATE, PREFIX, *arrays(3)), STATE, donate=0),
            "generate": program(
                self._generate, (P(), STATE, P(), *arrays(3 + turns)), (STATE, P("slots")), donate=1
            ),
        }

    def _over_tensor(self, function, in_specs, out_specs):
        """By shard_map over tensor, inside the programs': nothing else can split a kernel or a write to the pool."""
        if self.mesh.shape["tensor"] == 1:
            return function
        names = {"tensor"}
        return jax.shard_map(
            function, in_specs=in_specs, out_specs=out_specs, axis_names=names, check_vma=False
        )

    def _prefill(self, params, seed, tokens, lengths, requests, temperature):
        L, K, D = (
            self.model.num_hidden_layers,
            self.model.num_key_value_heads,
            self.model.head_dim,
        )
        (n, T), tensor = tokens.shape, self.mesh.shape["tensor"]
        segments = (jnp.arange(T)[None] < lengths[:, None]).astype(jnp.int32)

        def attend(q, k, v, layer, carry):
            # As decoding will read them back from the pool.
            k, v = (
                attention.decode_kv(attention.encode_kv(x, self.kv_storage), self.dtype)
                for x in (k, v)
            )
            put = lambda kv, x: lax.dynamic_update_index_in_dim(kv, x, layer, 0)
            return packed(q, k, v, segments, RowLayout(0, 1, T)), (
                put(carry[0], k),
                put(carry[1], v),
            )

        packed = (
            self.attention.packed
            if tensor == 1
            else attention.split_over_mesh(self.attention.packed, tensor)
        )
        empty = jnp.zeros((L, n, T, K, D), self.dtype)
        positions = jnp.broadcast_to(jnp.arange(T), (n, T))
        hidden, (k, v) = qwen.forward(
            self.model, params, tokens, positions, attend, (empty, empty), dtype=self.dtype
        )
        last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
        each = lambda x: jnp.repeat(x, requests.shape[1], axis=0)
        first, logps = self._sample(
            params, last, seed, requests.ravel(), each(lengths), each(temperature), each
        )
        return Prefix(k, v, first.reshape(requests.shape), logps.reshape(requests.shape))

    def _sample(self, params, hidden, seed, requests, positions, temperature, each=lambda x: x):
        """hidden [n, E], whose logits go through `each` -> tokens, logps."""
        tied, axis = self.model.tie_word_embeddings, self.logits_axis
        name, spec = ("embed", P("tensor")) if tied else ("lm_head", P(None, "tensor"))
        u = sampling.uniforms(seed, requests, positions, len(self.vocabulary))

        def run(weight, hidden, u, temperature):
            head = lambda hidden, part: each(
                qwen.head(self.model, {name: weight}, hidden, self.dtype, part)
            )
            return sampling.sample(
                head, self.vocabulary, hidden, u, temperature, self.settings, axis
            )

        run = self._over_tensor(run, (spec, P(), P(), P()), P()) if axis else run
        return run(params[name], hidden, u, temperature)

    def _insert(self, state, prefix: Prefix, slots, pages, temperature):
        slots, (source, target) = slots[0], pages[0]
        L, n, T, K, D = prefix.k.shape
        page = self.settings.page_size
        layers = (jnp.arange(L)[:, None] * self.pages_per_shard + target[None]).ravel()
        heads = P(self.kv_axis)
        write = self._over_tensor(self.attention.write, (heads, P(None, None, *heads), P()), heads)
        chosen = lambda x: x.reshape(L, n * T // page, page, K, D)[:, source].reshape(
            -1, page, K, D
        )
        slot, row, sample, length, limit, request = slots
        first = prefix.tokens.at[row, sample].get(mode="clip")
        new = {
            "tokens": first,
            "positions": length,
            "limits": limit,
            "requests": request,
            "temperature": jnp.broadcast_to(temperature, slot.shape),
            "active": ~self._stops(first) & (length + 1 < limit),
        }
        pools = {
            name: write(state[name], chosen(x), layers)
            for name, x in (("k", prefix.k), ("v", prefix.v))
        }
        return pools | {name: state[name].at[slot].set(x, mode="drop") for name, x in new.items()}

    def _stops(self, tokens):
        return (
            jnp.isin(tokens, jnp.array(self.stop_ids, jnp.int32))
            if self.stop_ids
            else jnp.zeros(tokens.shape, bool)
        )

    def _generate(self, params, state, seed, table, keep, shared, resumed=None, given=None):
        S, C = self.slots_per_shard, self.settings.decode_steps
        params = jax.tree.map(lambda x: x.astype(self.dtype), params)
        state = state | {"active": state["active"] & keep}
        if resumed is not None:
            now = {
                name: jnp.where(resumed[:, 2] > 0, resumed[:, i], state[name])
                for i, name in enumerate(RESUMED)
            }
            state = state | now | {"active": state["active"] | (resumed[:, 2] > 0)}

        def going(active):
            """Whether another step is due: for this shard, or for any where a step has collectives (of tensor)."""
            if self.mesh.shape["tensor"] == 1:
                return active.any()
            return lax.psum(active.any().astype(jnp.int32), "slots") > 0

        def step(carry):
            c, _, state, out = carry
            counts = out.counts + state["active"]
            now = given if given is None else given[:, c]
            state, token, logp = self._decode(params, state, seed, table, shared, now)
            put = lambda columns, x: lax.dynamic_update_index_in_dim(columns, x, c, 1)
            out = ResultTokens(put(out.tokens, token), put(out.logps, logp), counts)
            return c + 1, going(state["active"]), state, out

        empty = ResultTokens(
            jnp.zeros((S, C), jnp.int32), jnp.zeros((S, C), jnp.float32), jnp.zeros(S, jnp.int32)
        )
        start = (0, going(state["active"]), state, empty)
        return lax.while_loop(lambda carry: (carry[0] < C) & carry[1], step, start)[2:]

    def _decode(self, params, state, seed, table, shared, given):
        """One token for every slot of the shard; idle slots write to the scratch page."""
        active, tokens, positions = (state[name] for name in ("active", "tokens", "positions"))
        page, pools = self.settings.page_size, (state["k"], state["v"])
        at = jnp.take_along_axis(table, (positions // page)[:, None], axis=1)[:, 0]
        at = jnp.where(active, at, SCRATCH)
        lengths = jnp.where(active, positions + 1, 1)

        def attend(q, k, v, layer, pools):
            first = layer * self.pages_per_shard
            out, pools = attend_token(
                q, k, v, pools, first + at, positions % page, first + table, lengths, shared
            )
            return out.astype(q.dtype), pools

        def one_token(q, k, v, pools, at, offsets, *rest):
            pools = tuple(
                self.attention.write(pool, x[:, 0], at, offsets)
                for pool, x in zip(pools, (k, v), strict=True)
            )
            return self.attention.paged(q[:, 0], *pools, *rest, k.shape[2])[:, None], pools

        pool, heads = P(self.kv_axis), P(None, None, self.kv_axis)
        in_specs = (heads, heads, heads, pool, P(), P(), P(), P(), P())
        attend_token = self._over_tensor(one_token, in_specs, (heads, pool))
        inputs = tokens[:, None], positions[:, None]
        hidden, (k, v) = qwen.forward(self.model, params, *inputs, attend, pools, dtype=self.dtype)
        token, logp = self._sample(
            params, hidden[:, 0], seed, state["requests"], positions + 1, state["temperature"]
        )
        stops = self._stops(token)
        if given is not None:
            token, stops = jnp.where(given >= 0, given, token), stops & (given < 0)
        going = active & ~stops & (positions + 2 < state["limits"])
        new = {
            "tokens": jnp.where(active, token, tokens),
            "positions": positions + active,
            "active": going,
        }
        return state | {"k": k, "v": v} | new, token, logp


def next_power_of_two(count: int, smallest: int) -> int:
    """The next power of two, at least `smallest`: few shapes, few programs."""
    return max(smallest, 1 << (count - 1).bit_length())
