"""Measures how much longer a pass with drafts takes than a pass without."""

import time

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jzero.decoder.decode_state import Start
from jzero.decoder.engine import Engine, Samples
from jzero.hosts import processes
from jzero.model import qwen

PASSES = 8  # of each kind, in one run
RUNS = 4  # the fastest counts; the first one compiles
NEVER, ALWAYS = 1e9, -1e9  # costs with which no pass has drafts, or every pass


def measure(engine: Engine, params: qwen.Params, samples: Samples) -> None:
    """Measures the cost of a pass with drafts, once for an engine, and prints it.

    The passes decode all slots of an engine without sequences, on the scratch page.
    """
    drafter = engine.drafter
    if drafter is None or drafter.cost:
        return
    # Alternately, so that both kinds see the same load of a shared machine.
    pairs = [
        (
            seconds_of_pass(engine, params, samples, NEVER),
            seconds_of_pass(engine, params, samples, ALWAYS),
        )
        for _ in range(RUNS)
    ]
    without, with_drafts = (min(column) for column in zip(*pairs, strict=True))
    drafter.cost = max(with_drafts / without, 1.0)
    verdict = "" if drafter.pays else ": more than drafts can save, so there are none"
    processes.print_once(
        f"drafts of {drafter.drafting.tokens} tokens: a pass takes {drafter.cost:.2f} times as "
        f"long with {engine.slots_per_shard} slots a device{verdict}"
    )


def seconds_of_pass(engine: Engine, params: qwen.Params, samples: Samples, kind: float) -> float:
    """Returns the seconds of a pass of all slots; `kind` is NEVER or ALWAYS."""
    assert engine.drafter is not None
    limit = min(2 + PASSES, engine.max_sequence_tokens)
    starts = [
        (Start(slot=slot, token=0, position=1, limit=limit, request=slot), 1.0)
        for slot in range(engine.max_concurrent_decodes)
    ]
    state = engine.start(engine.init_decode_state(), starts, samples)
    words = jax.device_put(np.zeros(2, np.uint32), NamedSharding(engine.mesh, P()))
    inputs = engine.idle_inputs(params, engine.drafter.inputs_at(kind, {}), samples)
    seed = jax.jit(jax.random.wrap_key_data)(words)
    jax.block_until_ready((state, seed, inputs))
    started = time.perf_counter()
    _, result = engine.programs(samples).generate(params, state, seed, *inputs)
    num_passes = int(jax.device_get(result.drafts)[:, 0].max())
    return (time.perf_counter() - started) / max(num_passes, 1)
