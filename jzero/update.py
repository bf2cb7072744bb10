"""Score and update: the only places that differentiate, or run the policy over packed rows. Everything is [M, B, T].

The gradient of the whole optimizer step is summed over microbatches inside one program. On a mesh of the data axis
alone that sum is local (shard_map) and crosses devices once, at the end; on any other, rows are split over data and
fsdp, and the rest follows the parameters' shardings."""

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jzero import algorithms, attention, config, sharding
from jzero.batch import Packed
from jzero.model import qwen
from jzero.types import Batch, Layout, State

for _type in (Batch, State):
    jax.tree_util.register_dataclass(_type, [f.name for f in fields(_type)], [])


def optimizer(settings: config.Optimizer) -> optax.GradientTransformation:
    """AdamW without its learning rate, which is an argument of `update`. Only matrices decay: a bias is [H, D], too."""
    decayed = lambda params: jax.tree.map_with_path(lambda path, _: not path[-1].key.endswith(("bias", "norm")), params)
    return optax.chain(
        optax.clip_by_global_norm(settings.clip_norm) if settings.clip_norm else optax.identity(),
        optax.scale_by_adam(settings.b1, settings.b2, settings.eps),
        optax.add_decayed_weights(settings.weight_decay, decayed) if settings.weight_decay else optax.identity(),
    )


def learning_rate(settings: config.Optimizer, step: int, steps: int) -> float:
    """Linear warm-up, then constant, or linear or cosine decay that reaches min_lr_ratio one past the last step."""
    warm = min(1.0, (step + 1) / settings.warmup_steps) if settings.warmup_steps else 1.0
    done = min(1.0, max(0, step - settings.warmup_steps) / max(1, steps - settings.warmup_steps))
    decay = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + np.cos(np.pi * done)) / 2}[settings.schedule]
    return float(settings.lr * warm * (settings.min_lr_ratio + (1 - settings.min_lr_ratio) * decay))


class Policy:
    """The jitted programs of one model on one mesh; they share its static settings."""

    def __init__(self, model: qwen.QwenConfig, settings: config.Config, mesh: Mesh):
        self.model, self.settings, self.mesh = model, settings, mesh
        self.optimizer = optimizer(settings.optimizer)
        self.shardings = sharding.param_shardings(model, mesh)
        self.on_policy = settings.train.minibatches * settings.train.epochs == 1
        # Only then by shard_map: XLA aborts on a gather where it is over data alone and fsdp or tensor are automatic.
        self.data_parallel = mesh.shape["data"] == mesh.size
        self._updates: dict = {}
        self._scores: dict = {}

    # -- state -------------------------------------------------------------------------------------------------

    def state_shardings(self) -> State:
        params = qwen.abstract(self.model)
        moments = jax.eval_shape(self.optimizer.init, params)
        opt = sharding.like_params(moments, params, self.shardings, self.mesh)
        return State(self.shardings, opt, NamedSharding(self.mesh, P()))

    def abstract_state(self) -> State:
        """Shapes and shardings, for restoring a checkpoint into."""
        params = qwen.abstract(self.model)
        state = State(params, jax.eval_shape(self.optimizer.init, params), jax.ShapeDtypeStruct((), jnp.int32))
        place = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
        return jax.tree.map(place, state, self.state_shardings())

    def init_params(self, seed: int) -> qwen.Params:
        key = jax.device_put(jax.random.key(seed), NamedSharding(self.mesh, P()))
        return jax.jit(partial(qwen.init, self.model), out_shardings=self.shardings)(key)

    def start(self, params: qwen.Params) -> State:
        """A fresh optimizer around params."""
        place = self.state_shardings()
        opt_state = jax.jit(self.optimizer.init, out_shardings=place.opt_state)(params)
        return State(params, opt_state, jax.device_put(np.int32(0), place.step))

    # -- programs ----------------------------------------------------------------------------------------------

    def put(self, packed: Sequence[Packed]) -> tuple[tuple[Batch, ...], jax.Array]:
        """Batches on the mesh, and how many microbatches of each hold something, i32[layouts]."""
        place = lambda x, spec: jax.device_put(x, NamedSharding(self.mesh, spec))
        batches = tuple(jax.tree.map(lambda x: place(x, sharding.ROWS), p.batch) for p in packed)
        return batches, place(np.array([p.count for p in packed], np.int32), P())

    def update(self, state: State, batches, counts, layouts: Sequence[Layout], lr: float) -> tuple[State, dict]:
        """One optimizer step over all microbatches of all layouts. State is donated. Stats are fp32 scalars: sums over
        trained tokens, `tokens` of them."""
        key = tuple(layouts)
        if key not in self._updates:
            place, scalar = self.state_shardings(), NamedSharding(self.mesh, P())
            run = partial(self._update, layouts=key)
            self._updates[key] = jax.jit(run, donate_argnums=0, out_shardings=(place, scalar))
        rate = jax.device_put(np.float32(lr), NamedSharding(self.mesh, P()))
        return self._updates[key](state, batches, counts, rate)

    def score(self, params, batches, counts, layouts: Sequence[Layout]) -> list[jax.Array]:
        """log-prob of every target, f32[M, B, T] a layout (0 beyond counts)."""
        key = tuple(layouts)
        if key not in self._scores:
            rows = NamedSharding(self.mesh, sharding.ROWS)  # as `put` places them: else the next call compiles again
            self._scores[key] = jax.jit(partial(self._score, layouts=key), out_shardings=rows)
        return self._scores[key](params, batches, counts)

    def _logps(self, params, batch: Batch, layout: Layout):
        """Log-probs and entropy of the body's targets, f32[B, T - prefix]; the prefix predicts nothing."""
        model, train = self.settings.model, self.settings

        def attend(q, k, v, _, carry):
            q, k, v = (self._by_rows(x, "tensor") for x in (q, k, v))
            return self._by_rows(attention.packed(q, k, v, batch.segments, layout), "tensor"), carry

        hidden, _ = qwen.forward(
            self.model, params, batch.tokens, batch.positions, attend, dtype=jnp.dtype(model.dtype), remat=model.remat
        )
        return qwen.token_logps(
            self.model,
            params,
            self._by_rows(hidden)[:, layout.prefix :],
            batch.targets[:, layout.prefix :],
            temperature=train.rollout.temperature,
            chunk=model.logit_chunk,
            dtype=jnp.dtype(model.dtype),
        )

    def _by_rows(self, x, *rest):
        """x [B, T, ...] split over rows, where XLA has the choice. Left alone it splits activations as fsdp splits the
        weights, and sums activations over devices in every layer, instead of gathering the layer's weights."""
        if self.data_parallel:
            return x
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, P(("data", "fsdp"), None, *rest)))

    def _loss(self, params, batch: Batch, layout: Layout):
        logps, entropy = self._logps(params, batch, layout)
        batch = jax.tree.map(lambda x: x[:, layout.prefix :], batch)
        old = lax.stop_gradient(logps) if self.on_policy else batch.old_logps
        algorithm = self.settings.algorithm
        terms, stats = algorithms.loss_terms(logps, old, batch.ref_logps, batch.advantages, algorithm)
        trained = batch.weights > 0
        gap = jnp.abs(batch.sampler_logps - logps)
        stats = stats | {"tokens": jnp.ones_like(logps), "entropy": entropy, "mismatch": gap, "nll": -logps}
        sums = {name: jnp.where(trained, lax.stop_gradient(x), 0).sum() for name, x in stats.items()}
        loss = jnp.where(trained, batch.weights * terms, 0).sum()
        return loss, sums | {"loss": lax.stop_gradient(loss)}

    def _gradient(self, params, batches, counts, layouts):
        """(gradient, stats), summed over every microbatch."""
        zero = lambda x: jnp.zeros(x.shape, jnp.float32)
        total: Any = None
        for i, (batch, layout) in enumerate(zip(batches, layouts, strict=True)):
            one = lambda m, batch=batch, layout=layout: jax.grad(self._loss, has_aux=True)(
                params, jax.tree.map(lambda x: x[m], batch), layout
            )
            if total is None:
                total = jax.tree.map(zero, jax.eval_shape(one, 0))
            total = lax.fori_loop(0, counts[i], lambda m, t, one=one: jax.tree.map(jnp.add, t, one(m)), total)
        return total

    def _update(self, state: State, batches, counts, lr, *, layouts):
        total = partial(self._gradient, layouts=layouts)
        if self.data_parallel:
            local, specs = total, (P(), P(None, "data"), P())
            summed = lambda *inputs: lax.psum(local(*inputs), "data")
            total = jax.shard_map(summed, mesh=self.mesh, in_specs=specs, out_specs=P(), check_vma=False)
        gradient, stats = total(state.params, batches, counts)
        step, opt_state = self.optimizer.update(gradient, state.opt_state, state.params)
        params = jax.tree.map(lambda p, u: p - lr * u, state.params, step)
        stats |= {"grad_norm": optax.tree.norm(gradient)}
        return State(params, opt_state, state.step + 1), stats

    def _score(self, params, batches, counts, *, layouts):
        def one(batch, layout, count):
            def body(m, out):
                logps, _ = self._logps(params, jax.tree.map(lambda x: x[m], batch), layout)
                return out.at[m, :, layout.prefix :].set(logps)

            return lax.fori_loop(0, count, body, jnp.zeros(batch.tokens.shape, jnp.float32))

        return [one(*x) for x in zip(batches, layouts, counts, strict=True)]


def with_logps(batches: Sequence[Batch], name: str, logps: Sequence[jax.Array]) -> tuple[Batch, ...]:
    """The batches with `old_logps` or `ref_logps` set."""
    return tuple(replace(batch, **{name: x}) for batch, x in zip(batches, logps, strict=True))
