"""Gradient and optimizer step as separate programs, for callers that decide when to step.

A `Learner` makes one optimizer step of a whole batch in one program. Here the caller sends examples
in several calls, with its own targets, and steps when it wants to:

    state = learner.begin(seed)
    state, terms, logps = learner.add_gradient(state, base, examples, ...)   # any number of times
    state, norms = learner.adamw(state, AdamW(learning_rate=1e-4))

Only adapters are trained, on a frozen base that several states share. The kind of the loss and the
settings of the optimizer are data: no value of them compiles anything.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Generic, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jzero.algorithms import Algorithm
from jzero.config import ModelConfig, OptimizerConfig
from jzero.hosts import collectives
from jzero.model import adapters, qwen
from jzero.training.heads import Objective, policy_head
from jzero.training.learner import Learner, take_microbatch
from jzero.types import ArrayType, Batch, RowLayout


class Examples(NamedTuple, Generic[ArrayType]):
    """Packed rows with the fields of a token loss. K is the number of targets of a position.

    `rows` has tokens, segments and positions; its targets are not read. Positions of padding have
    weight 0 and segment 0.
    """

    rows: Batch[ArrayType]  # [M, B, T]
    targets: ArrayType  # i32[M, B, T, K]
    weights: ArrayType  # f32[M, B, T, K]
    sampler_logps: ArrayType  # f32[M, B, T]
    advantages: ArrayType  # f32[M, B, T]
    low: ArrayType  # f32[M, B, T] the lower bound of the ratio
    high: ArrayType  # f32[M, B, T] the upper bound of the ratio
    beta: ArrayType  # f32[M, B, T] the weight of a quadratic penalty


# (kind i32[], log-probs f32[B, T, K], examples of one microbatch) -> loss terms f32[B, T]
TokenLoss = Callable[[jax.Array, jax.Array, Examples[jax.Array]], jax.Array]


class AdamW(NamedTuple):
    """The settings of one step (arXiv:1711.05101). clip_norm=0 does not clip."""

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    clip_norm: float = 0.0


class AdapterState(NamedTuple):
    """An adapter, Adam's moments, and the gradient since the last step: trees of one structure.

    The leaves may also be NumPy arrays, while a state waits on the host, or shardings.
    """

    params: qwen.Params
    mu: qwen.Params
    nu: qwen.Params
    gradient: qwen.Params
    step: jax.Array  # i32[] steps done


class AccumulatingLearner(Learner):
    """The programs that train adapters of one shape on a frozen base."""

    def __init__(
        self,
        model: qwen.QwenConfig,
        compute: ModelConfig,
        mesh: Mesh,
        token_loss: TokenLoss,
    ) -> None:
        """`compute.adapter` is the shape of the adapters; log-probs have temperature 1."""
        assert compute.adapter.rank, "only adapters are trained"
        # The head only computes log-probs: the loss is `token_loss`, and the optimizer `adamw`.
        head = policy_head(model, compute, Objective(Algorithm(), temperature=1.0), mesh)
        super().__init__(model, compute, OptimizerConfig(), head, mesh)
        assert self.context == 1, "rows are not split over devices here"
        self.token_loss = token_loss

    # -- states ----------------------------------------------------------------------------------

    def begin(self, seed: int) -> AdapterState:
        """Returns the state of a new adapter."""
        return self.begin_on(self.init_adapter(seed))

    def begin_on(self, params: qwen.Params) -> AdapterState:
        """Returns the state of an adapter that has made no step. `params` are not copied."""
        step = collectives.put_global(np.int32(0), self.replicated)
        return AdapterState(params, self._zeros(), self._zeros(), self._zeros(), step)

    def put_state(self, host: AdapterState) -> AdapterState:
        """Copies a state from the host to the mesh."""
        return jax.tree.map(collectives.put_global, host, self.state_places)

    def abstract_adapter_state(self) -> AdapterState:
        """Returns the shapes, types and shardings of a state."""
        shapes = adapters.abstract(self.model, self.adapter)

        def place(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=sharding)

        tree = jax.tree.map(place, shapes, self.shardings)
        step = jax.ShapeDtypeStruct((), jnp.int32, sharding=self.replicated)
        return AdapterState(tree, tree, tree, tree, step)  # type: ignore[arg-type]

    @cached_property
    def state_places(self) -> AdapterState:
        """The sharding of every leaf of a state."""
        return AdapterState(*[self.shardings] * 4, self.replicated)  # type: ignore[arg-type]

    @cached_property
    def _zeros(self) -> jax.stages.Wrapped:
        shapes = adapters.abstract(self.model, self.adapter)

        def zeros() -> qwen.Params:
            return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), shapes)

        return jax.jit(zeros, out_shardings=self.shardings)

    # -- running the programs --------------------------------------------------------------------

    def put_examples(self, examples: Examples[np.ndarray]) -> Examples[jax.Array]:
        """Copies packed examples to the mesh."""

        def put(field: np.ndarray) -> jax.Array:
            return collectives.put_global(field, self.row_sharding)

        return jax.tree.map(put, examples)

    def add_gradient(
        self,
        state: AdapterState,
        base: qwen.Params,
        examples: Examples[np.ndarray],
        layout: RowLayout,
        microbatches: int,
        kind: int,
    ) -> tuple[AdapterState, np.ndarray, np.ndarray]:
        """Adds the gradient of the summed loss terms of the first `microbatches` microbatches.

        `layout` is that of the rows. The terms of a prefix count once for its row.

        Returns the next state, the terms f32[M, B, T] and the log-probs f32[M, B, T, K]. If the
        program fails, `state` is as it was.
        """
        gradient, terms, logps = self.add_gradient_program(
            state.params,
            base,
            state.gradient,
            self.put_examples(examples),
            collectives.put_global(np.int32(microbatches), self.replicated),
            collectives.put_global(np.int32(kind), self.replicated),
            layout,
        )
        # Read the results first: an error of the device shows here, before the state changes.
        terms, logps = map(collectives.fetch_global, (terms, logps))
        return state._replace(gradient=gradient), terms, logps

    def evaluate(
        self,
        state: AdapterState,
        base: qwen.Params,
        examples: Examples[np.ndarray],
        layout: RowLayout,
        microbatches: int,
        kind: int,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns terms and log-probs as `add_gradient`, without a gradient."""
        terms, logps = self.evaluation_program(
            state.params,
            base,
            self.put_examples(examples),
            collectives.put_global(np.int32(microbatches), self.replicated),
            collectives.put_global(np.int32(kind), self.replicated),
            layout,
        )
        return collectives.fetch_global(terms), collectives.fetch_global(logps)

    def adamw(self, state: AdapterState, settings: AdamW) -> tuple[AdapterState, dict[str, float]]:
        """Makes one AdamW step with the accumulated gradient, and clears it. `state` is donated.

        Without any gradient the step is that of a zero gradient, as in torch. Returns the next
        state, and the norms of the gradient before clipping and of the change of the adapter.

        If the next state or a norm is not finite, the adapter, its moments and the number of steps
        stay as they are, and a norm in the result is not finite. The parameters have to be finite
        in the type that computes, config.model.dtype.
        """
        numbers = np.asarray(settings, np.float32)
        state, norms = self.adamw_program(state, collectives.put_global(numbers, self.replicated))
        return state, {name: float(value) for name, value in jax.device_get(norms).items()}

    @cached_property
    def add_gradient_program(self) -> jax.stages.Wrapped:
        return self.compiled(
            self._add_gradient,
            (self.shardings, self.row_sharding, self.row_sharding),
            static="layout",
        )

    @cached_property
    def evaluation_program(self) -> jax.stages.Wrapped:
        return self.compiled(self._evaluate, self.row_sharding, static="layout")

    @cached_property
    def adamw_program(self) -> jax.stages.Wrapped:
        places = (self.state_places, self.replicated)

        def step(
            state: AdapterState, settings: Float[Array, "6"]
        ) -> tuple[AdapterState, dict[str, jax.Array]]:
            return if_finite(state, *adamw_step(state, settings), self.compute.dtype)

        return jax.jit(step, donate_argnums=0, out_shardings=places)

    # -- what the programs compute ---------------------------------------------------------------

    def _microbatch_loss(
        self,
        params: qwen.Params,
        base: qwen.Params,
        examples: Examples[jax.Array],
        kind: jax.Array,
        layout: RowLayout,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Returns the sum of the terms of one microbatch, its terms [B, T] and logps [B, T, K]."""
        logps = self._logps(self.whole(base, params), examples, layout)
        is_token = examples.rows.segments > 0
        terms = jnp.where(is_token, self.token_loss(kind, logps, examples), 0)
        return terms.sum(), (terms, logps)

    def _logps(
        self, params: qwen.Params, examples: Examples[jax.Array], layout: RowLayout
    ) -> Float[Array, "B T K"]:
        """Returns the log-probabilities of the given targets, also of those in the prefix."""
        hidden, _, _ = self._hidden(params, examples.rows, layout)

        def score(targets: Int[Array, "B T"]) -> Float[Array, "B T"]:
            return self.head.outputs(params, hidden, targets, None)[0]

        by_target = jnp.moveaxis(examples.targets, -1, 0)
        if len(by_target) == 1:
            return score(by_target[0])[..., None]
        # The backward pass recomputes the logits of each target instead of keeping K of them.
        return jnp.moveaxis(lax.map(qwen.keep_nothing(score), by_target), 0, -1)

    def _add_gradient(
        self,
        params: qwen.Params,
        base: qwen.Params,
        accumulated: qwen.Params,
        examples: Examples[jax.Array],
        count: jax.Array,
        kind: jax.Array,
        layout: RowLayout,
    ) -> tuple[qwen.Params, jax.Array, jax.Array]:
        def sum_microbatches(
            params: qwen.Params,
            base: qwen.Params,
            examples: Examples[jax.Array],
            count: jax.Array,
            kind: jax.Array,
        ) -> tuple[qwen.Params, jax.Array, jax.Array]:
            loss = jax.grad(self._microbatch_loss, has_aux=True)

            def add(
                index: jax.Array,
                sums: tuple[qwen.Params, jax.Array, jax.Array],
            ) -> tuple[qwen.Params, jax.Array, jax.Array]:
                total, all_terms, all_logps = sums
                gradient, (terms, logps) = loss(params, base, take(examples, index), kind, layout)
                total = jax.tree.map(jnp.add, total, gradient)
                return total, all_terms.at[index].set(terms), all_logps.at[index].set(logps)

            zeros = jax.tree.map(jnp.zeros_like, params)
            total, terms, logps = lax.fori_loop(0, count, add, (zeros, *empty(examples)))
            # After the loop: one sum over the devices instead of one for each microbatch.
            if self.summed_axes:
                total = lax.psum(total, self.summed_axes)
            return total, terms, logps

        rows = P(None, self.summed_axes)
        over_rows = self._over_data(
            sum_microbatches, in_specs=(P(), P(), rows, P(), P()), out_specs=(P(), rows, rows)
        )
        gradient, terms, logps = over_rows(params, base, examples, count, kind)
        # Added after the sum over the devices: `accumulated` is the same on all of them and must
        # count once.
        return jax.tree.map(jnp.add, accumulated, gradient), terms, logps

    def _evaluate(
        self,
        params: qwen.Params,
        base: qwen.Params,
        examples: Examples[jax.Array],
        count: jax.Array,
        kind: jax.Array,
        layout: RowLayout,
    ) -> tuple[jax.Array, jax.Array]:
        def evaluate(
            params: qwen.Params,
            base: qwen.Params,
            examples: Examples[jax.Array],
            count: jax.Array,
            kind: jax.Array,
        ) -> tuple[jax.Array, jax.Array]:
            def fill(
                index: jax.Array,
                results: tuple[jax.Array, jax.Array],
            ) -> tuple[jax.Array, jax.Array]:
                all_terms, all_logps = results
                _, outputs = self._microbatch_loss(
                    params, base, take(examples, index), kind, layout
                )
                terms, logps = outputs
                return all_terms.at[index].set(terms), all_logps.at[index].set(logps)

            return lax.fori_loop(0, count, fill, empty(examples))

        rows = P(None, self.summed_axes)
        over_rows = self._over_data(
            evaluate, in_specs=(P(), P(), rows, P(), P()), out_specs=(rows, rows)
        )
        return over_rows(params, base, examples, count, kind)


def take(examples: Examples[jax.Array], index: jax.Array) -> Examples[jax.Array]:
    """Returns one microbatch: fields [M, B, ...] become [B, ...]."""
    rows = take_microbatch(examples.rows, index)
    others = jax.tree.map(lambda field: field[index], examples[1:])
    return Examples(rows, *others)


def empty(examples: Examples[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Returns zeros for the terms [M, B, T] and the log-probs [M, B, T, K]."""
    terms = jnp.zeros(examples.rows.tokens.shape, jnp.float32)
    return terms, jnp.zeros(examples.targets.shape, jnp.float32)


def adamw_step(
    state: AdapterState,
    settings: Float[Array, "6"],
) -> tuple[AdapterState, dict[str, jax.Array]]:
    """Makes one step of AdamW in fp32, with the settings of `AdamW` in the order of its fields.

    Decoupled decay: p - lr * (m_hat / (sqrt(v_hat) + eps) + decay * p). All parameters decay.
    """
    lr, beta1, beta2, eps, decay, clip = settings
    norm = optax.tree.norm(state.gradient)
    # `where` instead of a Python branch, because the settings are data of the program.
    is_clipped = (clip > 0) & (norm > clip)
    factor = jnp.where(is_clipped, clip / norm, 1.0)
    gradient = jax.tree.map(lambda g: g * factor, state.gradient)

    # The bias corrections count from 1: at step 0 they would divide by 0.
    step = state.step + 1
    mu = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, state.mu, gradient)
    nu = jax.tree.map(lambda v, g: beta2 * v + (1 - beta2) * g * g, state.nu, gradient)
    correction1, correction2 = 1 - beta1**step, 1 - beta2**step

    def change(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        adam = m / correction1 / (jnp.sqrt(v / correction2) + eps)
        return -lr * (adam + decay * p)

    changes = jax.tree.map(change, state.params, mu, nu)
    params = jax.tree.map(jnp.add, state.params, changes)
    cleared = jax.tree.map(jnp.zeros_like, state.gradient)
    norms = {"grad_norm": norm, "update_norm": optax.tree.norm(changes)}
    return AdapterState(params, mu, nu, cleared, step), norms


def if_finite(
    before: AdapterState, after: AdapterState, norms: dict[str, jax.Array], dtype: DTypeLike
) -> tuple[AdapterState, dict[str, jax.Array]]:
    """Returns the state after a step, or the one before it with the gradient cleared.

    The latter if a value is not finite: of the parameters in `dtype`, the moments or the norms.
    The norm of the update is NaN then.
    """
    in_dtype = jax.tree.map(lambda leaf: leaf.astype(dtype), after.params)
    is_finite = adapters.all_finite((in_dtype, after.mu, after.nu, norms))
    kept = before._replace(gradient=after.gradient)
    state = jax.tree.map(lambda new, old: jnp.where(is_finite, new, old), after, kept)
    return state, norms | {"update_norm": jnp.where(is_finite, norms["update_norm"], jnp.nan)}
