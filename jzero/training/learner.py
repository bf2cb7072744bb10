"""Score and update: the only places that differentiate, or run a model over packed rows. Everything is [M, B, T].

The gradient of the optimizer step is summed over microbatches inside one program. On a mesh of the data axis alone by
shard_map, with one sum over devices at the end; on any other, rows are split and the rest follows the parameters."""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jzero import algorithms, attention, config
from jzero.distributed import collectives
from jzero.distributed.mesh import ROWS, param_shardings
from jzero.model import qwen
from jzero.model.logprobs import token_logps
from jzero.training.optimizer import optimizer
from jzero.training.packing import PackedBatch
from jzero.types import Batch, RowLayout, State

for _type in (Batch, State):
    jax.tree_util.register_dataclass(_type, [f.name for f in fields(_type)], [])


class Head(NamedTuple):
    """What a model's hidden states become, and the loss of that."""

    outputs: Callable[
        ..., tuple[jax.Array, ...]
    ]  # (params, hidden [B, T, E], targets [B, T]) -> [B, T] each
    loss: Callable[
        ..., tuple[jax.Array, dict]
    ]  # (outputs, Batch [B, T], total, fresh) -> weighted terms, stats [B, T]


class Learner:
    """The jitted programs of one model on one mesh; they share its static settings."""

    def __init__(
        self,
        model: qwen.QwenConfig,
        compute: config.ModelConfig,
        settings: config.OptimizerConfig,
        head: Head,
        mesh: Mesh,
    ):
        self.model, self.compute, self.settings, self.head, self.mesh = (
            model,
            compute,
            settings,
            head,
            mesh,
        )
        self.optimizer = optimizer(settings)
        self.whole, self.rows = NamedSharding(mesh, P()), NamedSharding(mesh, ROWS)
        self.shardings = param_shardings(model, mesh)
        # Only then by shard_map: XLA aborts on a gather where it is over data alone and fsdp or tensor are automatic.
        self.data_parallel = mesh.shape["data"] == mesh.size
        self.packed = attention.choose(compute.attention, mesh).packed
        if not self.data_parallel:
            self.packed = attention.split_over_mesh(
                self.packed, mesh.shape["tensor"], ("data", "fsdp"), mesh
            )
        # As `put` places its rows: else the next call compiles again.
        self.score_program = jax.jit(self._score, static_argnums=3, out_shardings=self.rows)

    def abstract_state(self) -> State:
        """Shapes and shardings, for restoring a checkpoint into."""
        params = qwen.abstract(self.model)
        moments = jax.eval_shape(self.optimizer.init, params)
        state = State(params, moments, jax.ShapeDtypeStruct((), jnp.int32))
        copy = lambda x: jax.tree.structure(x) == jax.tree.structure(params)
        places = jax.tree.map(
            lambda x: self.shardings if copy(x) else self.whole, state, is_leaf=copy
        )  # moments, too
        return jax.tree.map(lambda x, place: x.update(sharding=place), state, places)

    @cached_property
    def state_shardings(self) -> State:
        return jax.tree.map(lambda x: x.sharding, self.abstract_state())

    def init_params(self, seed: int) -> qwen.Params:
        init = lambda seed: qwen.init(self.model, jax.random.key(seed))
        return jax.jit(init, out_shardings=self.shardings)(
            collectives.put_global(np.uint32(seed), self.whole)
        )

    def start(self, params: qwen.Params) -> State:
        """A fresh optimizer around params."""
        opt_state = jax.jit(self.optimizer.init, out_shardings=self.state_shardings.opt_state)(
            params
        )
        return State(params, opt_state, collectives.put_global(np.int32(0), self.whole))

    def put(self, packed: Sequence[PackedBatch]) -> tuple[tuple[Batch, ...], jax.Array]:
        """Batches on the mesh, and how many microbatches of each hold something, i32[layouts]."""
        batches = jax.tree.map(
            lambda x: collectives.put_global(x, self.rows), tuple(p.batch for p in packed)
        )
        return batches, collectives.put_global(
            np.array([p.count for p in packed], np.int32), self.whole
        )

    def update(
        self,
        state: State,
        batches,
        counts,
        layouts: Sequence[RowLayout],
        lr: float,
        fresh: bool = True,
    ) -> tuple[State, dict]:
        """One optimizer step over all microbatches of all layouts. State is donated. fresh: no step was made since the
        scores were, so the old log-probs are the policy's own, and the ratio is exactly 1. Stats are fp32 scalars: sums
        over trained tokens, `tokens` of them; `grad_norm`; `skipped`, 1 where the gradient was too large."""
        numbers = (collectives.put_global(x, self.whole) for x in (np.float32(lr), np.bool_(fresh)))
        return self.update_program(state, batches, counts, *numbers, tuple(layouts))

    def score(self, params, batches, counts, layouts: Sequence[RowLayout]) -> list[jax.Array]:
        """The head's first output (log-prob of every target, or value), f32[M, B, T] a layout (0 beyond counts)."""
        return self.score_program(params, scored(batches), counts, tuple(layouts))

    @cached_property
    def update_program(self):
        place = self.state_shardings, self.whole
        return jax.jit(self._update, static_argnums=5, donate_argnums=0, out_shardings=place)

    def programs(
        self, batches: Sequence[Batch], layouts: Sequence[RowLayout]
    ) -> dict[str, tuple[Any, tuple]]:
        """(jitted, abstract arguments) of `score` and `update` on abstract batches."""
        struct = lambda place, x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
        batches = jax.tree.map(partial(struct, self.rows), tuple(batches))
        numbers = np.zeros(len(layouts), np.int32), np.float32(0), np.bool_(True)
        counts, lr, fresh = map(partial(struct, self.whole), numbers)
        state, layouts = self.abstract_state(), tuple(layouts)
        return {
            "score": (self.score_program, (state.params, scored(batches), counts, layouts)),
            "update": (self.update_program, (state, batches, counts, lr, fresh, layouts)),
        }

    def _outputs(self, params, batch: Batch, layout: RowLayout) -> tuple[jax.Array, ...]:
        """The head's outputs at the body's inputs, f32[B, T - prefix]; the prefix predicts nothing."""
        attend = lambda q, k, v, _, carry: (self.packed(q, k, v, batch.segments, layout), carry)
        dtype, remat = jnp.dtype(self.compute.dtype), self.compute.remat
        hidden, _ = qwen.forward(
            self.model, params, batch.tokens, batch.positions, attend, dtype=dtype, remat=remat
        )
        if not self.data_parallel:
            # By rows. Left alone XLA splits activations as fsdp splits the weights, and sums activations over devices
            # in every layer, instead of gathering the layer's weights.
            hidden = lax.with_sharding_constraint(
                hidden, NamedSharding(self.mesh, P(("data", "fsdp")))
            )
        body = slice(layout.prefix, None)
        return self.head.outputs(params, hidden[:, body], batch.targets[:, body])

    def _loss(self, params, batch: Batch, layout: RowLayout, fresh):
        outputs = self._outputs(params, batch, layout)
        batch = jax.tree.map(lambda x: x[:, layout.prefix :], batch)
        trained = batch.weights > 0
        terms, stats = self.head.loss(
            outputs, batch, sequence_total(batch.segments, trained, layout), fresh
        )
        stats |= {"tokens": jnp.ones_like(terms), "loss": terms}
        sums = {
            name: jnp.where(trained, lax.stop_gradient(x), 0).sum() for name, x in stats.items()
        }
        return jnp.where(trained, terms, 0).sum(), sums

    def _over_data(self, run: Callable, in_specs: tuple, out_specs: P) -> Callable:
        """By shard_map where rows are all that is split; else the rest follows the arguments' shardings."""
        if not self.data_parallel:
            return run
        return jax.shard_map(
            run, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def _gradient(self, params, batches, counts, fresh, layouts):
        """(gradient, stats), summed over every microbatch."""
        total: Any = None
        for i, (batch, layout) in enumerate(zip(batches, layouts, strict=True)):
            one = lambda m, batch=batch, layout=layout: jax.grad(self._loss, has_aux=True)(
                params, jax.tree.map(lambda x: x[m], batch), layout, fresh
            )
            if total is None:
                total = jax.tree.map(
                    lambda x: jnp.zeros(x.shape, jnp.float32), jax.eval_shape(one, 0)
                )
            total = lax.fori_loop(
                0, counts[i], lambda m, t, one=one: jax.tree.map(jnp.add, t, one(m)), total
            )
        return lax.psum(total, "data") if self.data_parallel else total

    def _update(self, state: State, batches, counts, lr, fresh, layouts):
        total = self._over_data(
            partial(self._gradient, layouts=layouts), (P(), P(None, "data"), P(), P()), P()
        )
        gradient, stats = total(state.params, batches, counts, fresh)
        step, opt_state = self.optimizer.update(gradient, state.opt_state, state.params)
        params = jax.tree.map(lambda p, u: p - lr * u, state.params, step)
        new = State(params, opt_state, state.step + 1)
        stats |= {"grad_norm": optax.tree.norm(gradient), "skipped": jnp.float32(0)}
        if self.settings.skip_norm:
            keep = stats["grad_norm"] <= self.settings.skip_norm
            new = jax.tree.map(lambda new, old: jnp.where(keep, new, old), new, state)
            stats["skipped"] = 1 - keep.astype(jnp.float32)
        return new, stats

    def _score(self, params, batches, counts, layouts):
        def one(params, batch, layout, count):
            def body(m, out):
                values, *_ = self._outputs(params, jax.tree.map(lambda x: x[m], batch), layout)
                return out.at[m, :, layout.prefix :].set(values)

            return lax.fori_loop(0, count, body, jnp.zeros(batch.tokens.shape, jnp.float32))

        every = lambda params, batches, counts: [
            one(params, *x) for x in zip(batches, layouts, counts, strict=True)
        ]
        specs, rows = (P(), P(None, "data"), P()), P(None, "data")
        return self._over_data(every, specs, rows)(params, batches, counts)


def scored(batches: Sequence[Batch]) -> tuple[Batch, ...]:
    """The fields that a score needs."""
    return tuple(Batch(b.tokens, b.targets, b.segments, b.positions, None, None) for b in batches)


def policy_learner(model: qwen.QwenConfig, settings: config.Config, mesh: Mesh) -> "Learner":
    """Log-probs of the targets (and entropies), and the policy loss.

    Where fsdp splits the head's weight, it is split by vocabulary here, and every device takes the chunks' tokens of
    all: they are few, and the weight, gathered for every chunk, and its gradient, summed for every chunk, are not."""
    words, dtype = ("fsdp", "tensor"), jnp.dtype(settings.model.dtype)
    name, split = ("embed", P(words)) if model.tie_word_embeddings else ("lm_head", P(None, words))
    algorithm = algorithms.resolve_correction(settings.algorithm, settings.rollout.max_staleness)
    moved = (
        mesh.shape["fsdp"] > 1
        and model.vocab_size % (mesh.shape["fsdp"] * mesh.shape["tensor"]) == 0
    )
    constrain = lambda x, spec: (
        lax.with_sharding_constraint(x, NamedSharding(mesh, spec)) if moved else x
    )
    options: dict[str, Any] = {
        "temperature": settings.rollout.temperature,
        "chunk": settings.model.logit_chunk,
    }
    options["place"] = lambda hidden: constrain(hidden, P("data"))
    if (
        mesh.shape["data"] > 1
    ):  # else XLA splits their gradient by rows, and gathers all of it to undo that
        options["place_logits"] = lambda logits: constrain(logits, P("data", None, words))

    def outputs(params, hidden, targets):
        params = params | {name: constrain(params[name].astype(dtype), split)}
        return token_logps(model, params, hidden, targets, dtype=dtype, **options)

    def loss(outputs, batch: Batch, total, fresh):
        logps, entropy = outputs
        old = now = lax.stop_gradient(logps)
        if batch.old_logps is not None:
            old = jnp.where(fresh, now, batch.old_logps)
        terms, stats = algorithms.policy_loss(
            logps, entropy, replace(batch, old_logps=old), total, algorithm
        )
        return terms, stats | {
            "entropy": entropy,
            "mismatch": jnp.abs(batch.sampler_logps - logps),
            "nll": -logps,
        }

    return Learner(model, settings.model, settings.optimizer, Head(outputs, loss), mesh)


def critic_learner(model: qwen.QwenConfig, settings: config.Config, mesh: Mesh) -> "Learner":
    """Values of the states before the targets, and the value loss."""
    outputs = lambda params, hidden, targets: (
        jnp.einsum("bte,e->bt", hidden.astype(jnp.float32), params["value"]),
    )
    loss = lambda outputs, batch, total, fresh: algorithms.value_loss(
        outputs[0], batch, settings.algorithm
    )
    model = replace(model, value_head=True)
    return Learner(model, settings.model, settings.critic.optimizer, Head(outputs, loss), mesh)


def sequence_total(segments: jax.Array, trained: jax.Array, layout: RowLayout) -> algorithms.SequenceSum:
    """A function from x [B, slots * slot] to its sum over the trained tokens of each token's own sequence."""
    slot = jnp.arange(layout.slots * layout.slot) // layout.slot
    sequence = (
        slot * (layout.slot + 1) + segments
    )  # a segment's number is at most the slot's length

    def total(x):
        one = lambda x, at: jax.ops.segment_sum(x, at, layout.slots * (layout.slot + 1))[at]
        return jax.vmap(one)(jnp.where(trained, x, 0), sequence)

    return total
