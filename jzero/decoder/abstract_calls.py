"""The decoder's programs with abstract arguments: shapes, types and shardings without data.

`jzero.plan` compiles them for devices that this machine may not have. The shapes are those of a
full batch in `engine.py`.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jzero.decoder.adapter_bank import has_bank
from jzero.decoder.decode_state import Arrival, Choices, Prefix, PromptChoices, ResumePoint
from jzero.decoder.engine import ROLLOUTS, SMALLEST_INSERT, Engine, Samples
from jzero.decoder.sampling import SlotFilters
from jzero.decoder.score_program import ScoreInputs
from jzero.model import qwen
from jzero.model.linear import RowAdapters
from jzero.numerics.sizes import power_of_two
from jzero.tokens import TRACKS

Call = tuple[jax.stages.Wrapped, tuple]  # a program and its arguments


def abstract_calls(
    engine: Engine,
    params: qwen.Params,
    prefill_shapes: list[tuple[int, int]],
    samples: Samples = ROLLOUTS,
) -> dict[str, Call]:
    """Returns a call of every program, by name.

    Args:
        params: abstract weights, perhaps with an adapter bank if `samples` has choices.
        prefill_shapes: (rows per shard, tokens per row) of each prefill.
    """
    key_type = jax.eval_shape(lambda: jax.random.key(0)).dtype
    # A PRNG key is replicated over all devices.
    seed = engine.abstract_array((), key_type, P())
    state = engine.abstract_state()
    programs = engine.programs(samples)
    calls: dict[str, Call] = {}
    for rows, width in prefill_shapes:
        inputs = prefill_inputs(engine, rows, width, params, samples)
        calls[f"prefill {rows}x{width}"] = programs.prefill, (params, seed, *inputs)
        inputs = insert_inputs(engine, rows, width)
        calls[f"insert {rows}x{width}"] = programs.insert, (state, *inputs)
    inputs = generate_inputs(engine, params, samples)
    calls["generate"] = programs.generate, (params, state, seed, *inputs)
    # Only engines that prefill in chunks run `extend`.
    if engine.longest_prefill() < engine.max_sequence_tokens:
        width = engine.chunk_width
        context = engine.context_pages(engine.max_sequence_tokens - 1)
        chunk = score_inputs(engine, params, 1, width, context)
        chunk = chunk._replace(targets=None, temperature=None)
        name = f"extend 1x{width}+{context * engine.settings.page_size}"
        calls[name] = engine.extend_program, (params, state, chunk)
    return calls


def score_calls(engine: Engine, params: qwen.Params, alternatives: int) -> dict[str, Call]:
    """Returns the two largest calls of `score`, by name.

    One has the maximum number of first chunks, the other the last chunk of one sequence of full
    length on each shard.
    """
    width = engine.score_width(engine.max_sequence_tokens)
    most_rows = max(1, engine.score_tokens // width)
    context = engine.context_pages(engine.max_sequence_tokens - 1)
    state, row_states = engine.abstract_state(), engine.abstract_row_states()
    program = engine.score_program(alternatives)
    return {
        f"engine-score {rows}x{width}+{pages * engine.settings.page_size}": (
            program,
            (params, state, row_states, score_inputs(engine, params, rows, width, pages)),
        )
        for rows, pages in ((most_rows, 0), (1, context))
    }


def score_inputs(
    engine: Engine,
    params: qwen.Params,
    rows: int,
    width: int,
    context_pages: int,
) -> ScoreInputs[jax.ShapeDtypeStruct]:
    """Returns the arguments of `score` after the weights and the state. `rows` counts one shard."""
    all_rows = rows * engine.num_shards
    return ScoreInputs(
        tokens=by_slot(engine, (all_rows, width)),
        targets=by_slot(engine, (all_rows, width)),
        temperature=by_slot(engine, (all_rows, width), jnp.float32),
        starts=by_slot(engine, (all_rows,)),
        lengths=by_slot(engine, (all_rows,)),
        context_pages=by_slot(engine, (all_rows, context_pages)),
        write_pages=by_slot(engine, (all_rows, width // engine.settings.page_size)),
        state_rows=by_slot(engine, (all_rows,)) if engine.has_slot_state else None,
        adapters=slot_choices(engine, all_rows, params)[1],
        row_rings=by_slot(engine, (all_rows,)) if engine.has_rings else None,
    )


def slot_choices(
    engine: Engine, count: int, params: qwen.Params
) -> tuple[SlotFilters, RowAdapters | None]:
    """Returns the filters and the adapters of `count` prompts or slots."""
    numbers, floats = by_slot(engine, (count,)), by_slot(engine, (count,), jnp.float32)
    filters = SlotFilters(numbers, floats, floats)  # type: ignore[arg-type]
    return filters, RowAdapters(numbers, floats) if has_bank(params) else None


def prefill_inputs(
    engine: Engine, rows: int, width: int, params: qwen.Params, samples: Samples
) -> tuple:
    """Returns the arguments of `prefill` after the weights and the seed."""
    prompts = rows * engine.num_shards
    choices = ()
    if samples.has_choices:
        choices = (PromptChoices(*slot_choices(engine, prompts, params)),)
    return (
        by_slot(engine, (prompts, width)),
        by_slot(engine, (prompts,)),
        by_slot(engine, (prompts, engine.settings.group_size)),
        by_slot(engine, (prompts,), jnp.float32),
        *choices,
    )


def insert_inputs(engine: Engine, rows: int, width: int) -> tuple:
    """Returns the arguments of `insert` after the state."""
    model, prompts = engine.model, rows * engine.num_shards
    kv_heads = engine.program_settings.kv_heads
    kv = jax.ShapeDtypeStruct(
        (model.num_cached_layers, prompts, width, kv_heads, model.head_dim),
        engine.dtype,
        sharding=engine.get_prefix_destination_sharding().k,
    )
    first_tokens = (prompts, engine.settings.group_size)
    settings = engine.program_settings

    def abstract_tracks(
        shapes: dict[str, tuple[int, ...]],
        place: tuple[int, ...],
    ) -> dict[str, jax.ShapeDtypeStruct]:
        return {
            name: by_slot(engine, (*place, *shape), TRACKS[name].dtype)
            for name, shape in shapes.items()
        }

    prefix = Prefix(
        k=kv,
        v=kv,
        tracks=abstract_tracks(settings.sampled_shapes, first_tokens),
        input_tracks=abstract_tracks(settings.input_shapes, (prompts, width)),
        slot_state=engine.abstract_slot_state(rows),
        hidden=by_slot(engine, (prompts, model.hidden_size), engine.dtype)
        if settings.drafts_by_head
        else None,
    )
    # The largest insert fills every slot of a shard at once.
    arrivals = power_of_two(engine.slots_per_shard, SMALLEST_INSERT)
    copies = rows * width // engine.settings.page_size + arrivals
    return (
        prefix,
        by_slot(engine, (engine.num_shards, len(Arrival._fields), arrivals)),
        by_slot(engine, (engine.num_shards, 2, copies)),
        by_slot(engine, (engine.num_shards,), jnp.float32),
    )


def generate_inputs(engine: Engine, params: qwen.Params, samples: Samples) -> tuple:
    """Returns the arguments of `generate` after the weights, the state and the seed."""
    slots = engine.max_concurrent_decodes
    inputs = (
        by_slot(engine, (slots, engine.pages_per_slot)),
        by_slot(engine, (slots,), jnp.bool_),
        by_slot(engine, (slots // engine.slots_per_block,)),
        *([drafter.abstract_inputs()] if (drafter := engine.paying_drafter) else []),
    )
    if samples.has_choices:
        filters, row_adapters = slot_choices(engine, slots, params)
        num_steps = by_slot(engine, (engine.num_shards,))
        return *inputs, Choices(filters, num_steps, row_adapters)  # type: ignore[arg-type]
    # As in Engine.generate: only episodes of several turns have resume points and forced tokens.
    if engine.settings.max_turns == 1:
        return inputs
    return (
        *inputs,
        by_slot(engine, (slots, len(ResumePoint._fields))),
        by_slot(engine, (slots, engine.settings.decode_steps)),
    )


def by_slot(
    engine: Engine,
    shape: tuple[int, ...],
    dtype: DTypeLike = jnp.int32,
) -> jax.ShapeDtypeStruct:
    """Returns an array whose first axis is split over the shards."""
    return engine.abstract_array(shape, dtype, P("slots"))
