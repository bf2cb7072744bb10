"""The programs of the decoder: prefill, insert, start and generate.

They are plain functions of a `ProgramSettings` and arrays; `compile_programs` wraps them in
`shard_map` and `jit`. The mesh has the axes (slots, tensor). A shard of slots is an independent
decoder with its own pages and its own loop; its weights and KV heads are split over the devices of
`tensor`. Each function below therefore sees the slots, the prompts and the pages of one shard.

`engine.py` keeps the host's view of the same slots and pages, and calls the programs.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, Key

from jzero import attention
from jzero.decoder import drafts, rings, sampling, slot_state
from jzero.decoder.caches import KeysAndValues, prompt_cache, slot_cache, split_over_tensor
from jzero.decoder.decode_state import (
    PREFIX_SPECS,
    STATE_SPECS,
    Arrival,
    Choices,
    DecodeState,
    Prefix,
    PromptChoices,
    ResultTokens,
    ResumePoint,
    Start,
)
from jzero.decoder.program_settings import ProgramSettings
from jzero.model import mtp, output_adapter, qwen
from jzero.model.architecture import ATTENTION, SLIDING
from jzero.model.linear import RowAdapters
from jzero.model.quantized import QuantizedWeight
from jzero.model.run_model import ModelInputs, run_model
from jzero.sharding.tpu_options import tpu_options
from jzero.tokens import TRACKS

Seed = Key[Array, ""]


# Number of steps taken, whether another step is due, the state, and the sampled tokens.
LoopCarry = tuple[int | jax.Array, jax.Array, DecodeState[jax.Array], ResultTokens[jax.Array]]


class Programs(NamedTuple):
    """The jitted programs. Shapes cover all shards together."""

    prefill: jax.stages.Wrapped
    insert: jax.stages.Wrapped  # donates the state
    start: jax.stages.Wrapped  # donates the state
    generate: jax.stages.Wrapped  # donates the state


def compile_programs(settings: ProgramSettings, mesh: Mesh) -> Programs:
    """Wraps the functions of this module for a mesh of axes (slots, tensor)."""

    def program(
        function: Callable, in_specs: tuple, out_specs: object, donate: tuple[int, ...] = ()
    ) -> jax.stages.Wrapped:
        return compile_program(settings, mesh, function, in_specs, out_specs, donate)

    by_slot, everywhere = P("slots"), P()
    state_specs = state_specs_of(settings)
    prefix_specs = PREFIX_SPECS._replace(
        slot_state=slot_state.specs_of(settings.model),
        hidden=by_slot if settings.drafts_by_head else None,
    )
    # Resume points and forced tokens, which `generate` takes only if episodes have several turns.
    turn_inputs = (by_slot, by_slot) if settings.max_turns > 1 else ()
    prompt_choices: tuple[P, ...] = ()
    decode: Callable = generate
    if settings.has_choices:
        # Requests to a server have one turn.
        decode, turn_inputs, prompt_choices = generate_as_chosen, (by_slot,), (by_slot,)
    return Programs(
        prefill=program(
            prefill,
            in_specs=(everywhere, everywhere, by_slot, by_slot, by_slot, by_slot, *prompt_choices),
            out_specs=prefix_specs,
        ),
        insert=program(
            insert,
            in_specs=(state_specs, prefix_specs, by_slot, by_slot, by_slot),
            out_specs=state_specs,
            donate=(0,),
        ),
        start=program(
            start,
            in_specs=(state_specs, by_slot, by_slot),
            out_specs=state_specs,
            donate=(0,),
        ),
        generate=program(
            decode,
            in_specs=(everywhere, state_specs, everywhere, by_slot, by_slot, by_slot, *turn_inputs),
            out_specs=(state_specs, by_slot),
            donate=(1,),
        ),
    )


def state_specs_of(settings: ProgramSettings) -> DecodeState[P]:
    """Returns the partition specs of the decode state over the slot shards."""
    return STATE_SPECS._replace(
        slot_state=slot_state.specs_of(settings.model), drafts=drafts.specs_of(settings.drafting)
    )


def compile_program(
    settings: ProgramSettings,
    mesh: Mesh,
    function: Callable,
    in_specs: tuple,
    out_specs: object,
    donate: tuple[int, ...] = (),
) -> jax.stages.Wrapped:
    """Compiles `function(settings, *arrays)`, which sees the arrays of one shard.

    Args:
        in_specs: how the arguments are split over "slots".
        out_specs: how the results are split over "slots".
        donate: indices of the array arguments that the program may overwrite.
    """
    # With one device per shard all axes are manual. With more, XLA's partitioner handles `tensor`,
    # and splits the matrix products in the same way as the weights.
    manual_axes = {"slots"} if settings.tensor > 1 else set(mesh.axis_names)

    # In a loop, XLA for TPU7x prefers bf16 weights in tiles of 16 x 128, but they arrive in tiles
    # of 8 x 128. It would convert all weights in every call (1 GB of temporaries for Qwen2.5-0.5B).
    # This option keeps the tiles. lab/log.md has the measurements.
    options = tpu_options(mesh) | settings.arithmetic.compiler_options
    if mesh.devices.flat[0].device_kind == "TPU7x":
        options |= {"xla_tpu_control_large_2nd_minor_layout_for_x16": False}

    mapped = jax.shard_map(
        partial(function, settings),
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=manual_axes,
        check_vma=False,
    )
    return jax.jit(mapped, donate_argnums=donate, compiler_options=options or None)


def prefill(
    settings: ProgramSettings,
    params: qwen.Params,
    seed: Seed,
    tokens: Int[Array, "prompts T"],
    lengths: Int[Array, " prompts"],
    requests: Int[Array, "prompts G"],
    temperature: Float[Array, " prompts"],
    choices: PromptChoices | None = None,
) -> Prefix[jax.Array]:
    """Computes the keys and values of prompts, and samples the first token of each sample.

    Args:
        tokens: prompts, padded at their end to whole pages.
        lengths: tokens of each prompt, at least 1.
        requests: the number that keys the noise of each sample.
        choices: the filters and the adapters of the prompts, if `settings.has_choices`.
    """
    filters = None if choices is None else choices.filters
    adapters = None if choices is None else choices.adapters
    prompts, width = tokens.shape
    samples = requests.shape[1]
    is_token = jnp.arange(width)[None] < lengths[:, None]
    positions = jnp.broadcast_to(jnp.arange(width), (prompts, width))
    cache = prompt_cache(settings, is_token.astype(jnp.int32))
    outputs = run_model(
        settings.model,
        params,
        ModelInputs(tokens, positions, is_token, adapters=adapters),
        cache,
        settings.arithmetic,
        dtype=settings.dtype,
        placement=settings.experts,
        remembers_routes=settings.remembers_routes,
    )

    def for_each_sample(x: jax.Array) -> jax.Array:
        """[prompts, ...] -> [prompts * G, ...]"""
        return jnp.repeat(x, samples, axis=0)

    # Only the last hidden state of a prompt is needed: it predicts the first token of every sample.
    last_places = (lengths - 1)[:, None, None]
    last_hidden = jnp.take_along_axis(outputs.hidden, last_places, axis=1)[:, 0]
    first_tokens = sample_tokens(
        settings,
        params,
        last_hidden,
        seed,
        requests.ravel(),
        for_each_sample(lengths),
        for_each_sample(temperature),
        jax.tree.map(for_each_sample, filters),
        expand_logits=for_each_sample,
        adapters=adapters,
    )

    arrays = outputs.cache
    if settings.drafts_by_head:
        # The pair of the last token is not known yet: the first step of a sample writes it.
        next_tokens = jnp.roll(tokens, -1, axis=1)
        _, arrays = mtp.forward(
            settings.model,
            params,
            outputs.hidden,
            next_tokens,
            positions,
            cache.attend,
            arrays,
            dtype=settings.dtype,
            arithmetic=settings.arithmetic,
        )

    def split_samples(x: jax.Array) -> jax.Array:
        """[prompts * G, ...] -> [prompts, G, ...]"""
        return x.reshape(*requests.shape, *x.shape[1:])

    def split_prompts(x: jax.Array) -> jax.Array:
        """[prompts * T, ...] -> [prompts, T, ...]"""
        return x.reshape(prompts, width, *x.shape[1:])

    return Prefix(
        k=arrays.k,
        v=arrays.v,
        tracks=jax.tree.map(split_samples, first_tokens),
        input_tracks=jax.tree.map(split_prompts, input_tracks(outputs.routes)),
        slot_state=arrays.slot_state,
        hidden=last_hidden if settings.drafts_by_head else None,
    )


def input_tracks(routes: Int[Array, "N Lk"] | None) -> dict[str, jax.Array]:
    """Returns the recorded tracks of the inputs of a forward pass."""
    return {} if routes is None else {"routes": routes}


def insert(
    settings: ProgramSettings,
    state: DecodeState[jax.Array],
    prefix: Prefix[jax.Array],
    arrivals: Int[Array, "1 fields arrivals"],
    page_copies: Int[Array, "1 2 copies"],
    temperature: Float[Array, "1"],
) -> DecodeState[jax.Array]:
    """Copies prefix pages to the pools and prefix states to the slots, and starts the samples.

    Args:
        arrivals: the fields of `Arrival`, padded with slots that do not exist.
        page_copies: source pages, counted over all rows of the prefix, and target pages of the
            pool; padded with copies to the scratch page.
        temperature: of all arrivals.
    """
    arrival = Arrival(*arrivals[0])
    source_pages, target_pages = page_copies[0]
    k_pool, v_pool = state.k_pool, state.v_pool
    if settings.rings is None:
        # Write the pages of all layers at once: layer l has its pages at l * pages_per_shard.
        first_rows = jnp.arange(len(prefix.k))[:, None] * settings.pages_per_shard
        target_rows = (first_rows + target_pages[None]).ravel()
        k_pool = copy_pages(settings, k_pool, prefix.k, source_pages, target_rows)
        v_pool = copy_pages(settings, v_pool, prefix.v, source_pages, target_rows)
    else:
        copies = source_pages, target_pages
        k_pool, v_pool = insert_with_rings(settings, (k_pool, v_pool), prefix, arrival, copies)

    def set_slots(column: jax.Array, values: jax.Array) -> jax.Array:
        return column.at[arrival.slot].set(values, mode="drop")

    # Padding columns are clipped to an arbitrary sample here, and dropped by `set_slots`.
    first_tokens = (
        prefix.tracks["ids"].at[arrival.prefix_row, arrival.sample_index].get(mode="clip")
    )
    # The sample has one token more than the prefix.
    continues = ~is_stop(settings, first_tokens) & (arrival.length + 1 < arrival.limit)
    temperatures = jnp.broadcast_to(temperature, arrival.slot.shape)
    states = state.slot_state
    if states is not None:
        states = slot_state.copy_rows(prefix.slot_state, arrival.prefix_row, states, arrival.slot)
    draft_state = state.drafts
    if prefix.hidden is not None:
        hidden = prefix.hidden.at[arrival.prefix_row].get(mode="clip")
        draft_state = draft_state._replace(hidden=set_slots(draft_state.hidden, hidden))
    return DecodeState(
        k_pool=k_pool,
        v_pool=v_pool,
        tokens=set_slots(state.tokens, first_tokens),
        positions=set_slots(state.positions, arrival.length),
        limits=set_slots(state.limits, arrival.limit),
        requests=set_slots(state.requests, arrival.request),
        temperature=set_slots(state.temperature, temperatures),
        active=set_slots(state.active, continues),
        slot_state=states,
        drafts=draft_state,
    )


def copy_pages(
    settings: ProgramSettings,
    pool: attention.Pool,
    prompts: Float[Array, "L prompts T K D"],
    source_pages: Int[Array, " copies"],
    target_rows: Int[Array, " L*copies"],
) -> attention.Pool:
    """Returns a pool with pages of prompts written to it.

    source_pages: counted over all prompts. The same ones are taken of every layer.
    """
    layers, num_prompts, width, heads, head_dim = prompts.shape
    page_size = settings.page_size
    pages = prompts.reshape(layers, num_prompts * width // page_size, page_size, heads, head_dim)
    pages = pages[:, source_pages].reshape(-1, page_size, heads, head_dim)
    pool_spec = P(settings.kv_axis)
    pages_spec = P(None, None, settings.kv_axis)
    write_pages = split_over_tensor(
        settings,
        settings.attention.write,
        in_specs=(pool_spec, pages_spec, P()),
        out_specs=pool_spec,
    )
    return write_pages(pool, pages, target_rows)


def insert_with_rings(
    settings: ProgramSettings,
    pools: KeysAndValues,
    prefix: Prefix[jax.Array],
    arrival: Arrival[jax.Array],
    page_copies: tuple[Int[Array, " copies"], Int[Array, " copies"]],
) -> KeysAndValues:
    """Copies prefix pages to the pools, in decoders whose layers with a window have rings.

    page_copies: source and target pages of the layers that keep all pages. In the other layers
        every arrival gets the last pages of its prompt in the ring of its slot.
    """
    sizes, page_size = settings.rings, settings.page_size
    assert sizes is not None
    k_pool, v_pool = pools
    layer_pages = rings.pages_of_layers(settings.model, sizes, settings.pages_per_shard)
    first_rows = rings.first_rows(layer_pages)

    # Layers that keep all pages, all at once.
    source_pages, target_pages = page_copies
    layers = np.array(settings.model.layers_of(ATTENTION))
    target_rows = (jnp.asarray(first_rows[layers])[:, None] + target_pages[None]).ravel()
    k_pool = copy_pages(settings, k_pool, prefix.k[layers], source_pages, target_rows)
    v_pool = copy_pages(settings, v_pool, prefix.v[layers], source_pages, target_rows)

    # One layer with rings at a time: samples share no pages there, so the pages of all layers would
    # be a copy of all rings.
    pages_per_prompt = prefix.k.shape[2] // page_size
    num_pages = -(-arrival.length // page_size)
    page = num_pages[:, None] - 1 - jnp.arange(min(sizes.pages, pages_per_prompt))
    # A padding column has the number of a slot that does not exist, which would be a scoring ring.
    is_kept = (page >= 0) & (arrival.slot < sizes.slots)[:, None]
    ring_pages = rings.ring_rows(sizes, arrival.slot, page, is_kept).ravel()
    ring_sources = (arrival.prefix_row[:, None] * pages_per_prompt + page).ravel()
    ring_sources = jnp.clip(ring_sources, 0, prefix.k.shape[1] * pages_per_prompt - 1)
    return copy_layers(
        settings,
        (k_pool, v_pool),
        (prefix.k, prefix.v),
        jnp.array(settings.model.layers_of(SLIDING)),
        ring_sources,
        lambda layer: jnp.asarray(first_rows)[layer] + ring_pages,
    )


def copy_layers(
    settings: ProgramSettings,
    pools: KeysAndValues,
    prompts: tuple[Float[Array, "L prompts T K D"], Float[Array, "L prompts T K D"]],
    layers: Int[Array, " layers"],
    source_pages: Int[Array, " copies"],
    target_rows_of: Callable[[Int[Array, ""]], Int[Array, " copies"]],
) -> KeysAndValues:
    """Does the same as `copy_pages` for keys and values, one of the `layers` at a time.

    target_rows_of: returns the rows of a layer's pages in the pools.
    """

    def copy_layer(i: jax.Array, pools: KeysAndValues) -> KeysAndValues:
        layer = layers[i]
        k, v = (lax.dynamic_index_in_dim(x, layer) for x in prompts)
        target_rows = target_rows_of(layer)
        return (
            copy_pages(settings, pools[0], k, source_pages, target_rows),
            copy_pages(settings, pools[1], v, source_pages, target_rows),
        )

    return lax.fori_loop(0, len(layers), copy_layer, pools)


def start(
    settings: ProgramSettings,
    state: DecodeState[jax.Array],
    starts: Int[Array, "1 fields starts"],
    temperature: Float[Array, "1 starts"],
) -> DecodeState[jax.Array]:
    """Starts sequences whose keys and values are already in the pages of their slots.

    Args:
        starts: the fields of `Start`, padded with slots that do not exist.
        temperature: of each sequence.
    """
    entry = Start(*starts[0])

    def set_slots(column: jax.Array, values: jax.Array) -> jax.Array:
        return column.at[entry.slot].set(values, mode="drop")

    return state._replace(
        tokens=set_slots(state.tokens, entry.token),
        positions=set_slots(state.positions, entry.position),
        limits=set_slots(state.limits, entry.limit),
        requests=set_slots(state.requests, entry.request),
        temperature=set_slots(state.temperature, temperature[0]),
        active=set_slots(state.active, jnp.ones_like(entry.slot, bool)),
    )


def generate(
    settings: ProgramSettings,
    params: qwen.Params,
    state: DecodeState[jax.Array],
    seed: Seed,
    table: Int[Array, "slots pages_per_slot"],
    keep: Bool[Array, " slots"],
    shared_pages: Int[Array, " blocks"],
    resume_points: Int[Array, "slots 3"] | None = None,
    forced_tokens: Int[Array, "slots decode_steps"] | None = None,
    choices: Choices | None = None,
) -> tuple[DecodeState[jax.Array], ResultTokens[jax.Array]]:
    """Decodes up to `decode_steps` tokens for every active slot.

    Args:
        table: the pages of each slot.
        keep: false for slots that the host has freed or paused since the last call.
        shared_pages: number of leading pages that all slots of a block share; see
            attention.backend.Paged.
        resume_points: the fields of `ResumePoint`, for episodes of several turns.
        forced_tokens: tokens that a slot takes instead of sampled ones, by step; -1 samples. The
            environment's reply enters the sequence this way.
        choices: the filters and the adapters of the slots and the number of steps, if
            `settings.has_choices`.
    """
    # Cast and reshape once per call, outside of the loop over steps and layers.
    params = with_flat_outputs(qwen.cast(params, settings.dtype))
    state = state._replace(active=state.active & keep)
    if resume_points is not None:
        points = ResumePoint(*(resume_points[:, i] for i in range(3)))
        state = resume_slots(state, points)

    def is_step_due(active: jax.Array) -> jax.Array:
        if settings.tensor == 1:
            return active.any()
        # With tensor > 1 every step has collectives, which are one operation of all devices of the
        # mesh. Every shard must therefore take as many steps as the busiest one: a shard that left
        # its loop early would block the others forever.
        return lax.psum(active.any().astype(jnp.int32), "slots") > 0

    num_steps = settings.decode_steps if choices is None else choices.num_steps[0]
    filters = None if choices is None else choices.filters
    adapters = None if choices is None else choices.adapters

    def has_next_step(carry: LoopCarry) -> jax.Array:
        step, is_due, _, _ = carry
        return (step < num_steps) & is_due

    def loop_body(carry: LoopCarry) -> LoopCarry:
        step, _, state, result = carry
        # A slot counts a token for every step that it was active in. Slots end and never restart in
        # a call.
        counts = result.counts + state.active
        forced = None if forced_tokens is None else forced_tokens[:, step]
        state, sampled, _ = decode_step(
            settings, params, state, seed, table, shared_pages, forced, filters, adapters
        )

        def write(column: jax.Array, columns: jax.Array) -> jax.Array:
            return lax.dynamic_update_index_in_dim(columns, column, step, 1)

        result = ResultTokens(jax.tree.map(write, sampled, result.tracks), counts)
        return step + 1, is_step_due(state.active), state, result

    slots, steps = settings.slots_per_shard, settings.decode_steps
    empty_result = ResultTokens(
        tracks={
            name: jnp.zeros((slots, steps, *shape), TRACKS[name].dtype)
            for name, shape in (settings.sampled_shapes | settings.input_shapes).items()
        },
        counts=jnp.zeros(slots, jnp.int32),
    )
    start = (0, is_step_due(state.active), state, empty_result)
    _, _, state, result = lax.while_loop(has_next_step, loop_body, start)
    return state, result


def generate_as_chosen(
    settings: ProgramSettings,
    params: qwen.Params,
    state: DecodeState[jax.Array],
    seed: Seed,
    table: Int[Array, "slots pages_per_slot"],
    keep: Bool[Array, " slots"],
    shared_pages: Int[Array, " blocks"],
    choices: Choices,
) -> tuple[DecodeState[jax.Array], ResultTokens[jax.Array]]:
    """`generate` for requests to a server, whose choices are data."""
    return generate(settings, params, state, seed, table, keep, shared_pages, choices=choices)


def with_flat_outputs(params: qwen.Params) -> qwen.Params:
    """Returns the weights with attention's output weight as [L, H * D, E], not [L, H, D, E]."""
    # In the loop over the layers, where the product follows a kernel, XLA:TPU would copy a layer of
    # four axes before each product: a tenth of a decode step (lab/log.md, 2026-11-23).
    layers = params["layers"]
    if isinstance(layers, tuple):  # apart, where every product has a whole array
        return params
    weight = layers.get("o")
    if isinstance(weight, QuantizedWeight):
        L, H, D, E = weight.values.shape
        values = weight.values.reshape(L, H * D, E)
        scale = weight.scale.reshape(L, 1, E)
        return params | {"layers": layers | {"o": QuantizedWeight(values, scale)}}
    if not isinstance(weight, jax.Array):  # an adapter's weight, or None
        return params
    L, H, D, E = weight.shape
    return params | {"layers": layers | {"o": weight.reshape(L, H * D, E)}}


def resume_slots(
    state: DecodeState[jax.Array], point: ResumePoint[jax.Array]
) -> DecodeState[jax.Array]:
    """Starts the next turn in the slots whose `ResumePoint` has a limit above 0."""
    is_resumed = point.limit > 0
    return state._replace(
        tokens=jnp.where(is_resumed, point.token, state.tokens),
        positions=jnp.where(is_resumed, point.position, state.positions),
        limits=jnp.where(is_resumed, point.limit, state.limits),
        active=state.active | is_resumed,
    )


def decode_step(
    settings: ProgramSettings,
    params: qwen.Params,
    state: DecodeState[jax.Array],
    seed: Seed,
    table: Int[Array, "slots pages_per_slot"],
    shared_pages: Int[Array, " blocks"],
    forced: Int[Array, " slots"] | None,
    filters: sampling.SlotFilters | None,
    adapters: RowAdapters | None = None,
) -> tuple[DecodeState[jax.Array], dict[str, jax.Array], Float[Array, "slots E"]]:
    """Computes one token for every slot, active or not.

    Writes the input's key and value into the pool. Idle slots write to the scratch page, and keep
    their recurrent state. Returns the state, the tracks of the tokens, and the hidden states that
    they were sampled from.
    """
    active, positions = state.active, state.positions
    outputs = run_model(
        settings.model,
        params,
        ModelInputs(state.tokens[:, None], positions[:, None], active[:, None], adapters=adapters),
        slot_cache(settings, state, table, shared_pages),
        settings.arithmetic,
        dtype=settings.dtype,
        placement=settings.experts,
        remembers_routes=settings.remembers_routes,
    )
    hidden = outputs.hidden[:, 0]
    sampled = sample_tokens(
        settings,
        params,
        hidden,
        seed,
        state.requests,
        positions + 1,
        state.temperature,
        filters,
        adapters=adapters,
    )
    token = sampled["ids"]
    stops = is_stop(settings, token)
    if forced is not None:
        # A reply may contain stop tokens (the ends of messages); they do not end the turn.
        token = jnp.where(forced >= 0, forced, token)
        stops = stops & (forced < 0)
    # The input is at `positions` and the new token after it, so the sequence now has positions +
    # 2 tokens.
    state = state._replace(
        k_pool=outputs.cache.k,
        v_pool=outputs.cache.v,
        slot_state=outputs.cache.slot_state,
        tokens=jnp.where(active, token, state.tokens),
        positions=positions + active,
        active=active & ~stops & (positions + 2 < state.limits),
    )
    return state, sampled | {"ids": token} | input_tracks(outputs.routes), hidden


def sample_tokens(
    settings: ProgramSettings,
    params: qwen.Params,
    hidden: Float[Array, "rows E"],
    seed: Seed,
    requests: Int[Array, " slots"],
    positions: Int[Array, " slots"],
    temperature: Float[Array, " slots"],
    filters: sampling.SlotFilters | None = None,
    expand_logits: Callable[[jax.Array], jax.Array] = lambda logits: logits,
    adapters: RowAdapters | None = None,
) -> dict[str, jax.Array]:
    """Samples the token at `positions` of each request.

    Returns the tracks of the tokens, [slots, *shape]: "ids", "logps", and the tracks of
    `settings.tracks` that do not belong to inputs.

    Args:
        filters: of the slots; None: those of the settings.
        expand_logits: maps the logits of `rows` hidden states to the logits of `slots` slots.
        adapters: of the `rows` hidden states, in an adapter bank.
    """
    slot_filters = settings.filters if filters is None else filters
    # Prefill computes the logits of a prompt once and expands them to all of its samples.
    if settings.model.tie_word_embeddings:
        name, weight_spec = "embed", P("tensor")
    else:
        name, weight_spec = "lm_head", P(None, "tensor")
    weights: qwen.Params = {name: params[name]}
    weight_specs: qwen.Params = {name: weight_spec}
    if output_adapter.NAME in params:
        adapter = params[output_adapter.NAME]
        weights[output_adapter.NAME] = adapter
        weight_specs[output_adapter.NAME] = output_adapter.specs(adapter, "tensor")
    # One uniform number for each part: a token of a later part may replace an earlier one.
    noise = sampling.uniforms(seed, requests, positions, len(settings.vocabulary_parts))

    def draw(
        weights: qwen.Params,
        hidden: jax.Array,
        noise: jax.Array,
        temperature: jax.Array,
        adapters: RowAdapters | None,
    ) -> dict[str, jax.Array]:
        def head(hidden: jax.Array, part: slice) -> jax.Array:
            logits = qwen.head(
                settings.model,
                weights,
                hidden,
                settings.dtype,
                part,
                settings.arithmetic,
                adapters,
            )
            return expand_logits(logits)

        tracks: dict[str, jax.Array] = {}
        logits_of: sampling.Head = head
        if settings.measures:
            # `program_settings` keeps the whole vocabulary in one part for these tracks. The logits
            # are computed once, for sampling and for measuring.
            logits = head(hidden, settings.vocabulary_parts[0])
            logits_of = partial(given_logits, logits)
        if settings.records("kept"):
            [part] = settings.vocabulary_parts
            ids, logps, tracks["kept"] = sampling.sample_kept(
                logits_of, part, hidden, noise[:, 0], temperature, settings.filters
            )
        else:
            ids, logps = settings.sample(
                logits_of,
                settings.vocabulary_parts,
                hidden,
                noise,
                temperature,
                slot_filters,
                settings.logits_axis,
            )
        for track, measure in settings.measures.items():
            logits = logits_of(hidden, settings.vocabulary_parts[0])
            tracks[track] = measure(logits, temperature, ids).astype(TRACKS[track].dtype)
        return tracks | {"ids": ids, "logps": logps}

    if settings.logits_axis:
        in_specs = (weight_specs, P(), P(), P(), P())
        draw = split_over_tensor(settings, draw, in_specs=in_specs, out_specs=P())
    return draw(weights, hidden, noise, temperature, adapters)


def given_logits(logits: jax.Array, hidden: jax.Array, part: slice) -> jax.Array:
    """The `sampling.Head` of logits that are computed already."""
    return logits


def is_stop(settings: ProgramSettings, tokens: Int[Array, " slots"]) -> Bool[Array, " slots"]:
    """Returns whether each token ends a response."""
    if not settings.stop_ids:
        return jnp.zeros(tokens.shape, bool)
    return jnp.isin(tokens, jnp.array(settings.stop_ids, jnp.int32))
