"""The decoder's programs with abstract arguments: shapes, types and shardings without data.

`jzero.plan` compiles them for devices that this machine may not have. The shapes are those of a
full batch in `engine.py`.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jzero.decoder.decode_state import Arrival, Prefix, ResumePoint
from jzero.decoder.engine import SMALLEST_INSERT, Engine
from jzero.decoder.score_program import ScoreInputs
from jzero.model import qwen
from jzero.numerics.sizes import power_of_two
from jzero.tokens import TRACKS

Call = tuple[jax.stages.Wrapped, tuple]  # a program and its arguments


def abstract_calls(
    engine: Engine,
    params: qwen.Params,
    prefill_shapes: list[tuple[int, int]],
) -> dict[str, Call]:
    """Returns a call of every program, by name.

    Args:
        params: abstract weights.
        prefill_shapes: (rows per shard, tokens per row) of each prefill.
    """
    key_type = jax.eval_shape(lambda: jax.random.key(0)).dtype
    # A PRNG key is replicated over all devices.
    seed = engine.abstract_array((), key_type, P())
    state = engine.abstract_state()
    calls: dict[str, Call] = {}
    for rows, width in prefill_shapes:
        inputs = prefill_inputs(engine, rows, width)
        calls[f"prefill {rows}x{width}"] = engine.jitted.prefill, (params, seed, *inputs)
        inputs = insert_inputs(engine, rows, width)
        calls[f"insert {rows}x{width}"] = engine.jitted.insert, (state, *inputs)
    inputs = generate_inputs(engine)
    calls["generate"] = engine.jitted.generate, (params, state, seed, *inputs)
    # Only engines that prefill in chunks run `extend`.
    if engine.longest_prefill() < engine.max_sequence_tokens:
        width = engine.chunk_width
        context = engine.context_pages(engine.max_sequence_tokens - 1)
        chunk = score_inputs(engine, 1, width, context)
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
            (params, state, row_states, score_inputs(engine, rows, width, pages)),
        )
        for rows, pages in ((most_rows, 0), (1, context))
    }


def score_inputs(
    engine: Engine,
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
    )


def prefill_inputs(engine: Engine, rows: int, width: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the arguments of `prefill` after the weights and the seed."""
    prompts = rows * engine.num_shards
    return (
        by_slot(engine, (prompts, width)),
        by_slot(engine, (prompts,)),
        by_slot(engine, (prompts, engine.settings.group_size)),
        by_slot(engine, (prompts,), jnp.float32),
    )


def insert_inputs(engine: Engine, rows: int, width: int) -> tuple:
    """Returns the arguments of `insert` after the state."""
    model, prompts = engine.model, rows * engine.num_shards
    kv = jax.ShapeDtypeStruct(
        (len(model.attention_layers), prompts, width, model.num_key_value_heads, model.head_dim),
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


def generate_inputs(engine: Engine) -> tuple:
    """Returns the arguments of `generate` after the weights, the state and the seed."""
    slots = engine.max_concurrent_decodes
    inputs = (
        by_slot(engine, (slots, engine.pages_per_slot)),
        by_slot(engine, (slots,), jnp.bool_),
        by_slot(engine, (slots // engine.slots_per_block,)),
        *([drafter.abstract_inputs()] if (drafter := engine.paying_drafter) else []),
    )
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
