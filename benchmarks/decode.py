"""`python benchmarks/decode.py --model Qwen2.5-3B [--slots 64 128 256]`: tokens a second of decoding, random weights.

Every slot holds a prompt of its own and makes exactly --new tokens, through the driver that runs use. The seconds are
those of --new tokens less those of one call, so that prefills do not count. Bytes are the weights once a step and the
keys and values of every token before it: what must be read, however it is read."""

import jax
import measure
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jzero.config import RolloutConfig
from jzero.distributed.mesh import decode_mesh, param_shardings, train_mesh
from jzero.distributed.publish import publisher
from jzero.model import qwen
from jzero.planning.chips import Chip
from jzero.planning.compiling import device_bytes
from jzero.planning.planned_run import kv_bytes_per_token
from jzero.rollout.engine import Engine
from jzero.rollout.scheduler import Scheduler
from jzero.rollout.sequence import make_groups


def row(given, model: qwen.QwenConfig, chip: Chip | None, slots: int) -> list[str]:
    train = train_mesh(1, -1, given.tensor)
    mesh = decode_mesh(train)
    settings = RolloutConfig(
        num_prompts=slots,
        group_size=1,
        max_prompt_tokens=given.prompt,
        max_new_tokens=given.new,
        num_slots=slots,
    )
    engine = Engine(model, settings, mesh, (), given.dtype)
    init = jax.jit(lambda key: qwen.init(model, key), out_shardings=param_shardings(model, train))
    params = publisher(model, train, mesh, engine.dtype)(init(jax.random.key(0)))
    seed = jax.device_put(jax.random.key(0), NamedSharding(mesh, P()))
    prompts = list(
        np.random.default_rng(0)
        .integers(0, model.vocab_size, (slots, given.prompt))
        .astype(np.int32)
    )

    def run(new: int) -> None:
        for sequence in Scheduler(engine, params, lambda ids: "").run(
            make_groups(prompts, 1, new), 1, 1.0, seed
        ):
            assert len(sequence.tokens) == new

    least = settings.decode_steps + 1  # the first is the prefill's
    spent = measure.median_seconds(lambda: run(given.new), given.repeat) - measure.median_seconds(
        lambda: run(least), given.repeat
    )
    steps = given.new - least
    context = given.prompt + (given.new + least) / 2
    moved = device_bytes(
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params)
    )
    moved += engine.slots_per_shard * context * kv_bytes_per_token(engine)
    rate = moved * steps / spent
    of_peak = measure.share(rate, chip and chip.bandwidth)
    numbers = (
        f"{slots * steps / spent:,.0f}",
        f"{1000 * spent / steps:.2f}",
        f"{rate / 1e9:,.0f}",
        of_peak,
    )
    return [given.model.rpartition("/")[2], str(slots), *numbers]


def main() -> None:
    parser = measure.make_parser(__doc__)
    parser.add_argument(
        "--slots", type=int, nargs="+", default=[64, 128, 256], help="sequences at once"
    )
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--new", type=int, default=512, help="tokens")
    parser.add_argument("--tensor", type=int, default=1, help="devices that share a model")
    given, model, chip = measure.start(parser)
    rows = [row(given, model, chip, slots) for slots in given.slots]
    head = ["model", "sequences", "tokens/s", "ms a step", "GB/s a device", "of its bandwidth"]
    print(
        f"{given.prompt} prompt tokens, {given.new} new, {given.dtype}\n{measure.table(head, rows)}"
    )


if __name__ == "__main__":
    main()
