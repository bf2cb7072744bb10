"""Measures how much longer passes with drafts take than a pass without."""

import time
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jzero.decoder.decode_state import Start
from jzero.decoder.engine import Engine, Samples
from jzero.hosts import processes
from jzero.model import qwen

PASSES = 2  # of each kind, in one run
RUNS = 6  # the fastest counts; the first one compiles
NEVER, ALWAYS = 1e9, -1e9  # costs with which no pass has drafts of a length, or every pass


def measure(engine: Engine, params: qwen.Params, samples: Samples) -> None:
    """Measures the cost of passes with drafts, once for an engine, and prints it.

    The passes decode all slots of an engine without sequences, on the scratch page.
    """
    drafter = engine.drafter
    if drafter is None or drafter.costs:
        return
    lengths = drafter.drafting.lengths
    kinds = [[ALWAYS if n == chosen else NEVER for n in lengths] for chosen in (0, *lengths)]
    # In turn, so that all kinds see the same load of a shared machine.
    runs = [[seconds_of_pass(engine, params, samples, kind) for kind in kinds] for _ in range(RUNS)]
    without, *with_drafts = (min(column) for column in zip(*runs, strict=True))
    # A longer draft is never cheaper: on a busy machine a measurement may say so.
    costs = [seconds / without for seconds in with_drafts]
    drafter.costs = [float(cost) for cost in np.maximum.accumulate([1.0, *costs])[1:]]
    verdict = "" if drafter.pays else ": more than drafts can save, so there are none"
    times = ", ".join(f"{cost:.2f}" for cost in drafter.costs)
    processes.print_once(
        f"drafts of {', '.join(map(str, lengths))} tokens: a pass takes {times} times as "
        f"long with {engine.slots_per_shard} slots a device{verdict}"
    )


def seconds_of_pass(
    engine: Engine, params: qwen.Params, samples: Samples, costs: Sequence[float]
) -> float:
    """Returns the seconds of a pass of all slots; `costs` are NEVER or ALWAYS."""
    assert engine.drafter is not None
    limit = min(2 + PASSES, engine.max_sequence_tokens)
    starts = [
        (Start(slot=slot, token=0, position=1, limit=limit, request=slot), 1.0)
        for slot in range(engine.max_concurrent_decodes)
    ]
    state = engine.start(engine.init_decode_state(), starts, samples)
    words = jax.device_put(np.zeros(2, np.uint32), NamedSharding(engine.mesh, P()))
    inputs = engine.idle_inputs(params, engine.drafter.inputs_at(costs, {}), samples)
    seed = jax.jit(jax.random.wrap_key_data)(words)
    jax.block_until_ready((state, seed, inputs))
    started = time.perf_counter()
    _, result = engine.programs(samples).generate(params, state, seed, *inputs)
    num_passes = int(jax.device_get(result.drafts)[:, 0].max())
    return (time.perf_counter() - started) / max(num_passes, 1)
