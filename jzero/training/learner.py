"""The jitted programs of one model on one mesh: `score` and `update`.

These are the only places of training that run a model or differentiate. They read packed rows, as
`types.Batch` of [M, B, T], one batch for each row layout.

    score   parameters, batches -> log-probability (or value) of every target
    update  State, batches      -> next State, and sums of diagnostics

What is trained, `State.params`, is the whole model or an adapter on the frozen `State.base`
(`model.adapter`). `score` takes the parameters of a whole model, which `weights` makes of a State
without a copy. `update` differentiates by what is trained alone.

`update` makes one optimizer step. The gradient is summed over all microbatches of all layouts in
one program. The loss is never averaged inside the program: the host has divided the weights of
tokens by whatever the algorithm asks for, over the whole optimizer step. Therefore packing,
microbatches and the mesh cannot change what is optimized. Diagnostics are sums for the same reason,
and the host divides them.

How rows and parameters are split:
  data only         `shard_map`: every device sums the gradient of its own rows, and the devices are
                    summed once, at the end of the step.
  fsdp, context     rows are split, or their parts (`distributed.context`), the parameters keep
  or tensor         their shardings, and XLA places the collectives. `shard_map` over the data axis
                    alone is not possible here: XLA aborts on a gather inside it while the other
                    axes are automatic.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jzero import attention
from jzero.config import Config, ModelConfig, OptimizerConfig
from jzero.distributed import collectives, context
from jzero.distributed.mesh import (
    ROW_AXES,
    ROWS,
    adapter_shardings,
    context_shards,
    param_shardings,
    row_shards,
    token_axes,
)
from jzero.distributed.tpu_options import tpu_options
from jzero.model import adapters, experts, huggingface, peft, qwen
from jzero.model.delta_net import DeltaInputs, recur_packed
from jzero.model.exact import ExactRows, compiler_options, exact_rows
from jzero.model.exact_delta_net import recurrence
from jzero.training.frozen import abstract_base, freeze, load_base
from jzero.training.heads import (
    Head,
    Stats,
    combine_stats,
    combine_stats_over,
    critic_head,
    make_sequence_sum,
    policy_head,
    summed_stats,
    tokens_with_loss,
)
from jzero.training.optimizer import optimizer
from jzero.training.packing import PackedBatch
from jzero.types import Batch, RowLayout, State

# One batch for each row layout.
Batches = tuple[Batch[jax.Array], ...]
# A jitted function and the abstract arguments that it is compiled for ahead of time.
Program = tuple[jax.stages.Wrapped, tuple]


class Learner:
    """The jitted programs of one model on one mesh, with the settings that they share."""

    def __init__(
        self,
        model: qwen.QwenConfig,
        compute: ModelConfig,
        settings: OptimizerConfig,
        head: Head,
        mesh: Mesh,
        replays_routes: bool = False,
    ) -> None:
        """replays_routes: sends tokens to the experts that `Batch.routes` names."""
        self.model = model
        self.replays_routes = replays_routes
        self.compute = compute
        self.settings = settings
        self.head = head
        self.mesh = mesh
        self.optimizer = optimizer(settings)

        self.replicated = NamedSharding(mesh, P())
        self.row_sharding = NamedSharding(mesh, ROWS)
        self.adapter = compute.adapter
        self.model_shardings = param_shardings(model, mesh)
        # Of what is trained: the whole model without an adapter.
        self.shardings = self.model_shardings
        if self.adapter.rank:
            self.shardings = adapter_shardings(model, self.adapter, mesh)
        self.is_data_parallel = mesh.shape["data"] == mesh.size
        self.context = context_shards(mesh)
        context.check_context_axis(mesh, model)
        placement = experts.training_placement(mesh)
        self.expert_placement = replace(placement, is_exact=compute.exact)

        self.packed_attention = attention.choose(compute.kernels, mesh).packed
        if not self.is_data_parallel:
            # XLA cannot split a kernel by itself.
            kernel, parts = self.packed_attention, ()
            if self.context > 1:
                kernel = context.attend_to_all_tokens(kernel, self.context)
                parts = ("context",)
            self.packed_attention = attention.split_over_mesh(
                kernel, mesh.shape["tensor"], ROW_AXES, mesh, parts
            )
        self.exact = None
        if compute.exact:
            self.exact = exact_rows(mesh, 1 if self.is_data_parallel else row_shards(mesh))

    # -- state -----------------------------------------------------------------------------------

    def abstract_state(self) -> State:
        """Returns the shapes and shardings of a State, as restoring a checkpoint needs them.

        A checkpoint does not hold the base, so the State has none.
        """
        if self.adapter.rank:
            params = adapters.abstract(self.model, self.adapter)
        else:
            params = qwen.abstract(self.model)
        moments = jax.eval_shape(self.optimizer.init, params)
        step = jax.eval_shape(jnp.int32, 0)
        state = State(params, moments, step)
        params_structure = jax.tree.structure(params)

        def is_like_params(tree: object) -> bool:
            return jax.tree.structure(tree) == params_structure

        def shardings_of(tree: object) -> qwen.Params | NamedSharding:
            # Adam's moments are trees like the parameters, and are split like them.
            return self.shardings if is_like_params(tree) else self.replicated

        def place(x: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
            return x.update(sharding=sharding)

        shardings = jax.tree.map(shardings_of, state, is_leaf=is_like_params)
        return jax.tree.map(place, state, shardings)

    @cached_property
    def state_shardings(self) -> State:
        """The sharding of every leaf of a State."""

        def sharding_of(x: jax.ShapeDtypeStruct) -> NamedSharding:
            return x.sharding

        return jax.tree.map(sharding_of, self.abstract_state())

    def abstract_base(self) -> qwen.Params:
        """Returns the shapes and shardings of the frozen base; empty without an adapter."""
        if not self.adapter.rank:
            return {}
        compute = self.compute
        return abstract_base(self.model, self.mesh, compute.dtype, compute.is_base_quantized)

    def init_params(self, seed: int) -> qwen.Params:
        """Returns random parameters of the model, drawn where they will lie."""

        def init(seed: jax.Array) -> qwen.Params:
            return qwen.init(self.model, jax.random.key(seed))

        draw = jax.jit(init, out_shardings=self.model_shardings)
        return draw(collectives.put_global(np.uint32(seed), self.replicated))

    def init_adapter(self, seed: int) -> qwen.Params:
        """Returns a new adapter, for a critic with its head, drawn where it will lie."""

        def init(seed: jax.Array) -> qwen.Params:
            return adapters.init(self.model, self.adapter, jax.random.key(seed))

        draw = jax.jit(init, out_shardings=self.shardings)
        return draw(collectives.put_global(np.uint32(seed), self.replicated))

    def first_adapter(self, seed: int) -> qwen.Params:
        """Returns the adapter that a run starts from: a new one, or that of model.adapter.path.

        A critic always has a new one, for the adapter that is given is a policy's.
        """
        if not self.adapter.path or self.model.value_head:
            return self.init_adapter(seed)
        directory = peft.resolve(self.adapter.path)
        return peft.load(directory, self.model, self.adapter, self.shardings)

    def load_params(self, directory: Path | None, seed: int) -> qwen.Params:
        """Returns the model's parameters in a Hugging Face directory, or random ones if it is None.

        They are fp32.
        """
        if directory is None:
            return self.init_params(seed)
        return huggingface.load(directory, self.model, self.model_shardings)

    def load_base(self, directory: Path) -> qwen.Params:
        """Returns the model in a Hugging Face directory as the base of an adapter."""
        return load_base(directory, self.model, self.mesh, self.compute)

    def freeze(self, params: qwen.Params) -> qwen.Params:
        """Returns the model's parameters as the base of an adapter. They are consumed.

        Without an adapter nothing is frozen, and `params` are returned as they are.
        """
        if not self.adapter.rank:
            return params
        compute = self.compute
        return freeze(params, self.model, self.mesh, compute.dtype, compute.is_base_quantized)

    def start(self, params: qwen.Params) -> State:
        """Returns a State with a fresh optimizer around `params`, which are not copied."""
        init = jax.jit(self.optimizer.init, out_shardings=self.state_shardings.opt_state)
        step = collectives.put_global(np.int32(0), self.replicated)
        return State(params, init(params), step)

    def start_on(self, params: qwen.Params, seed: int) -> State:
        """Returns the first State of a run that starts from a model, as `freeze` returned it.

        It trains the model, or an adapter on the model.
        """
        if not self.adapter.rank:
            return self.start(params)
        return replace(self.start(self.first_adapter(seed)), base=params)

    def weights(self, state: State) -> qwen.Params:
        """Returns the parameters of the whole model. Its arrays are those of `state`."""
        return self.whole(state.base, state.params)

    def whole(self, base: qwen.Params, trained: qwen.Params) -> qwen.Params:
        """Returns the parameters of the whole model from an adapter and its base."""
        return adapters.whole(base, trained, self.adapter.scale)

    # -- running the programs --------------------------------------------------------------------

    def put(self, packed: Sequence[PackedBatch]) -> tuple[Batches, jax.Array]:
        """Copies packed batches to the mesh.

        Returns the batches, and i32[layouts] with the number of microbatches that hold something.
        """

        def put_rows(field: np.ndarray) -> jax.Array:
            return collectives.put_global(field, self.row_sharding)

        batches = jax.tree.map(put_rows, tuple(part.batch for part in packed))
        counts = np.array([part.num_microbatches for part in packed], np.int32)
        return batches, collectives.put_global(counts, self.replicated)

    def update(
        self,
        state: State,
        batches: Batches,
        counts: jax.Array,
        layouts: Sequence[RowLayout],
        lr: float,
        fresh: bool = True,
    ) -> tuple[State, Stats]:
        """Makes one optimizer step over all microbatches of all layouts.

        `state` is donated, but for its base: the next State takes its memory, and the caller must
        not use it again.

        `fresh` says that no optimizer step has been made since the rollouts were scored. The policy
        is then its own pi_old, and every ratio is exactly 1 whatever `old_logps` holds.

        Returns the next State and fp32 scalars. They are sums over trained tokens (`tokens` counts
        the tokens), but for those that `heads.summed_stats` names and two more: `grad_norm` is the
        norm of the gradient before clipping, and `skipped` is 1 if that norm was above
        optimizer.skip_norm, so that the State did not change. A model with experts has
        `expert_load` f32[L, X] as well, the tokens of every expert, prompts too.
        """
        next_state, stats, _ = self.update_with_logps(state, batches, counts, layouts, lr, fresh)
        return next_state, stats

    def update_with_logps(
        self,
        state: State,
        batches: Batches,
        counts: jax.Array,
        layouts: Sequence[RowLayout],
        lr: float,
        fresh: bool = True,
    ) -> tuple[State, Stats, list[jax.Array | None]]:
        """Does the same as `update`; also returns the log-probabilities before the step.

        With model.exact they are one f32[M, B, T] for each layout, as those of `score`, and
        otherwise None.
        """
        next_state, stats, logps = self.update_program(
            replace(state, base={}),
            batches,
            counts,
            collectives.put_global(np.float32(lr), self.replicated),
            collectives.put_global(np.bool_(fresh), self.replicated),
            state.base,
            tuple(layouts),
        )
        return replace(next_state, base=state.base), stats, logps

    def score(
        self,
        params: qwen.Params,
        batches: Batches,
        counts: jax.Array,
        layouts: Sequence[RowLayout],
    ) -> list[jax.Array]:
        """Returns the head's first output: the log-probability of every target, or its value.

        One f32[M, B, T] for each layout; 0 in microbatches beyond `counts` and in the prefix.
        """
        return self.score_program(params, scored_fields(batches), counts, tuple(layouts))

    @cached_property
    def score_program(self) -> jax.stages.Wrapped:
        # Scores lie as `put` places rows. If they lay elsewhere, the program that reads them as a
        # field of a batch would be compiled once more.
        return jax.jit(
            self._score,
            static_argnums=3,
            out_shardings=self.row_sharding,
            compiler_options=options_of_training(self.mesh, self.exact),
        )

    @cached_property
    def update_program(self) -> jax.stages.Wrapped:
        return jax.jit(
            self._update,
            static_argnums=6,
            donate_argnums=0,
            out_shardings=(self.state_shardings, self.replicated, self.row_sharding),
            compiler_options=options_of_training(self.mesh, self.exact),
        )

    def programs(
        self, batches: Sequence[Batch], layouts: Sequence[RowLayout]
    ) -> dict[str, Program]:
        """Returns `score` and `update` with abstract arguments for batches of these shapes."""

        def abstract(
            x: np.ndarray | np.generic | jax.ShapeDtypeStruct, place: NamedSharding
        ) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

        placed = jax.tree.map(partial(abstract, place=self.row_sharding), tuple(batches))
        counts = abstract(np.zeros(len(layouts), np.int32), self.replicated)
        lr = abstract(np.float32(0), self.replicated)
        fresh = abstract(np.bool_(True), self.replicated)
        state = self.abstract_state()
        base = self.abstract_base()
        weights = self.whole(base, state.params)
        static = tuple(layouts)
        return {
            "score": (self.score_program, (weights, scored_fields(placed), counts, static)),
            "update": (self.update_program, (state, placed, counts, lr, fresh, base, static)),
        }

    # -- what the programs compute ---------------------------------------------------------------

    def _outputs(
        self, params: qwen.Params, batch: Batch[jax.Array], layout: RowLayout
    ) -> tuple[tuple[jax.Array, ...], Stats]:
        """Returns the head's outputs at the inputs after the prefix, f32[B, T - prefix] each.

        Returns stats of the layers as well: the tokens of every expert f32[L, X], if there are any.

        The prefix is left out because nothing in it predicts a trained token: the prompt's last
        token is an input of every response.
        """

        def attend(
            q: jax.Array, k: jax.Array, v: jax.Array, _: jax.Array, carry: object
        ) -> tuple[jax.Array, object]:
            return self.packed_attention(q, k, v, batch.segments, layout), carry

        def recur(inputs: DeltaInputs, _: jax.Array, carry: object) -> tuple[jax.Array, object]:
            if self.context > 1:
                return context.recur_over_all_tokens(
                    inputs, batch.segments, layout, self.mesh
                ), carry
            of_rows = recurrence(self.compute.exact).rows
            return recur_packed(inputs, batch.segments, layout, of_rows), carry

        if not self.replays_routes:
            batch = replace(batch, routes=None)
        # What attention alone sees whole. To everything else the parts of rows are rows.
        own = self._parts(batch)
        is_token = own.segments > 0
        carry = experts.start(self.model, None, is_token, self.expert_placement, own.routes)
        hidden, carry = qwen.forward(
            self.model,
            params,
            own.tokens,
            own.positions,
            attend,
            carry,
            dtype=jnp.dtype(self.compute.dtype),
            remat=self.compute.remat,
            recur=recur,
            exact=self.exact,
            rotates_by_product=self.mesh.devices.flat[0].platform == "tpu",
        )
        if not self.is_data_parallel:
            # Left alone, XLA splits the activations as fsdp splits the weights, and sums
            # activations over devices in every layer instead of gathering the layer's weights.
            rows = NamedSharding(self.mesh, P(token_axes(self.mesh)))
            hidden = lax.with_sharding_constraint(hidden, rows)
        outputs = self._head_outputs(params, hidden, own, layout)
        _, load = experts.finish(carry)
        return outputs, {} if load is None else {"expert_load": load.astype(jnp.float32)}

    def _parts(self, batch: Batch[jax.Array]) -> Batch[jax.Array]:
        """Returns what the model and the head read of a microbatch, cut where devices share rows.

        Fields [B, T] become [B * context, part].
        """
        (read,) = scored_fields([batch])
        if self.context == 1:
            return read
        return jax.tree.map(partial(context.to_parts, mesh=self.mesh), read)

    def _head_outputs(
        self,
        params: qwen.Params,
        hidden: jax.Array,
        batch: Batch[jax.Array],
        layout: RowLayout,
    ) -> tuple[jax.Array, ...]:
        """Returns the head's outputs at the inputs after the prefix, f32[B, T - prefix] each.

        `hidden` and `batch` are those of parts of rows, where devices share them.
        """
        if self.context == 1:
            body = slice(layout.prefix, None)
            kept = None if batch.kept is None else batch.kept[:, body]
            return self.head.outputs(params, hidden[:, body], batch.targets[:, body], kept)
        # To cut the prefix off here would move tokens between devices.
        outputs = self.head.outputs(params, hidden, batch.targets, batch.kept)
        rows = (context.to_rows(output, self.mesh, layout.tokens) for output in outputs)
        return tuple(row[:, layout.prefix :] for row in rows)

    def _loss(
        self,
        params: qwen.Params,
        base: qwen.Params,
        batch: Batch[jax.Array],
        layout: RowLayout,
        fresh: jax.Array,
    ) -> tuple[jax.Array, tuple[Stats, jax.Array | None]]:
        """Returns the loss of one microbatch, the sums of its diagnostics, and its log-probs.

        `params` are what is trained, on `base` if that is not empty. Log-probabilities are
        returned with model.exact alone, f32[B, T - prefix].
        """
        outputs, layer_stats = self._outputs(self.whole(base, params), batch, layout)
        # The head's outputs have no prefix, so the fields that the loss reads have none either.
        body = without_prefix(batch, layout)
        is_trained = body.weights > 0
        sequence_sum = make_sequence_sum(body.segments, is_trained, layout)
        terms, stats = self.head.loss(outputs, body, sequence_sum, fresh)
        stats |= {"tokens": jnp.ones_like(terms)}
        # `where` and not a product: what is not trained may be infinite or NaN, and 0 * NaN is NaN.
        loss = jnp.where(tokens_with_loss(body), terms, 0).sum()
        sums = summed_stats(stats, body) | lax.stop_gradient(layer_stats)
        sums |= {"loss": lax.stop_gradient(loss)}
        logps = lax.stop_gradient(outputs[0]) if self.exact is not None else None
        return loss, (sums, logps)

    def _microbatch_gradient(
        self,
        params: qwen.Params,
        base: qwen.Params,
        batch: Batch[jax.Array],
        layout: RowLayout,
        fresh: jax.Array,
        index: jax.Array | int,
    ) -> tuple[tuple[qwen.Params, Stats], jax.Array | None]:
        """Returns the gradient and the stats of microbatch `index` of a batch, and its log-probs
        as `_loss` returns them.
        """
        gradient_of_loss = jax.grad(self._loss, has_aux=True)
        microbatch = take_microbatch(batch, index)
        gradient, (stats, logps) = gradient_of_loss(params, base, microbatch, layout, fresh)
        return (gradient, stats), logps

    def _gradient(
        self,
        params: qwen.Params,
        base: qwen.Params,
        batches: Batches,
        counts: jax.Array,
        fresh: jax.Array,
        layouts: tuple[RowLayout, ...],
    ) -> tuple[tuple[qwen.Params, Stats], list[jax.Array | None]]:
        """Returns the gradient and the stats, summed over every microbatch and every data shard.

        The list has the log-probabilities of each layout with model.exact, and otherwise None.
        """
        total = None
        all_logps: list[jax.Array | None] = []
        for number, (batch, layout) in enumerate(zip(batches, layouts, strict=True)):
            gradient = partial(self._microbatch_gradient, params, base, batch, layout, fresh)
            if total is None:
                total = jax.tree.map(zeros_in_fp32, jax.eval_shape(gradient, 0)[0])
            logps = None if self.exact is None else jnp.zeros(batch.tokens.shape, jnp.float32)
            # The number of microbatches is data: a step with fewer of them does not compile anew.
            add = partial(add_gradient, gradient, layout.prefix)
            total, logps = lax.fori_loop(0, counts[number], add, (total, logps))
            all_logps.append(logps)
        assert total is not None, f"{layouts=}"
        if self.is_data_parallel:
            gradient, stats = total
            total = lax.psum(gradient, "data"), combine_stats_over(stats, "data")
        return total, all_logps

    def _update(
        self,
        state: State,
        batches: Batches,
        counts: jax.Array,
        lr: jax.Array,
        fresh: jax.Array,
        base: qwen.Params,
        layouts: tuple[RowLayout, ...],
    ) -> tuple[State, Stats, list[jax.Array | None]]:
        """Computes what `update_with_logps` returns.

        `state` has no base, and the layouts are static.
        """
        summed_gradient = self._over_data(
            partial(self._gradient, layouts=layouts),
            in_specs=(P(), P(), P(None, "data"), P(), P()),
            out_specs=(P(), P(None, "data")),
        )
        summed, logps = summed_gradient(state.params, base, batches, counts, fresh)
        gradient, stats = summed

        def descend(param: jax.Array, change: jax.Array) -> jax.Array:
            return param - lr * change

        step, opt_state = self.optimizer.update(gradient, state.opt_state, state.params)
        params = jax.tree.map(descend, state.params, step)
        next_state = State(params, opt_state, state.step + 1)

        grad_norm = optax.tree.norm(gradient)
        stats |= {"grad_norm": grad_norm, "skipped": jnp.float32(0)}
        if self.settings.skip_norm:
            # The comparison is false if the norm is NaN, so such a step is skipped as well.
            is_kept = grad_norm <= self.settings.skip_norm

            def choose(after: jax.Array, before: jax.Array) -> jax.Array:
                return jnp.where(is_kept, after, before)

            next_state = jax.tree.map(choose, next_state, state)
            stats["skipped"] = 1 - is_kept.astype(jnp.float32)
        return next_state, stats, logps

    def _score(
        self,
        params: qwen.Params,
        batches: Batches,
        counts: jax.Array,
        layouts: tuple[RowLayout, ...],
    ) -> list[jax.Array]:
        """Computes what `score` returns. The layouts are static."""

        def score_layouts(
            params: qwen.Params, batches: Batches, counts: jax.Array
        ) -> list[jax.Array]:
            return [
                self._score_layout(params, batch, layout, count)
                for batch, layout, count in zip(batches, layouts, counts, strict=True)
            ]

        score = self._over_data(
            score_layouts,
            in_specs=(P(), P(None, "data"), P()),
            out_specs=P(None, "data"),
        )
        return score(params, batches, counts)

    def _score_layout(
        self,
        params: qwen.Params,
        batch: Batch[jax.Array],
        layout: RowLayout,
        count: jax.Array,
    ) -> jax.Array:
        """Returns the scores of the first `count` microbatches of one layout, f32[M, B, T]."""

        def score_microbatch(index: jax.Array, scores: jax.Array) -> jax.Array:
            (values, *_), _ = self._outputs(params, take_microbatch(batch, index), layout)
            return scores.at[index, :, layout.prefix :].set(values)

        scores = jnp.zeros(batch.tokens.shape, jnp.float32)
        return lax.fori_loop(0, count, score_microbatch, scores)

    def _over_data(
        self, function: Callable, in_specs: tuple[P, ...], out_specs: P | tuple[P, ...]
    ) -> Callable:
        """Returns `function` under shard_map if rows are all that is split, else unchanged."""
        if not self.is_data_parallel:
            return function
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )


def policy_learner(model: qwen.QwenConfig, config: Config, mesh: Mesh) -> Learner:
    """Returns the learner of the policy. `score` returns log-probabilities of the targets."""
    head = policy_head(model, config, mesh)
    replays_routes = config.rollout.routing_replay
    return Learner(model, config.model, config.optimizer, head, mesh, replays_routes)


def critic_learner(model: qwen.QwenConfig, config: Config, mesh: Mesh) -> Learner:
    """Returns the learner of the critic. `score` returns values of the states before targets."""
    head = critic_head(config.algorithm)
    with_value = replace(model, value_head=True)
    # Nobody samples from a critic.
    compute = replace(config.model, exact=False)
    return Learner(with_value, compute, config.critic.optimizer, head, mesh)


def options_of_training(mesh: Mesh, exact: ExactRows | None) -> dict[str, bool | str] | None:
    """Returns XLA's options for programs of training, or None for those that XLA has anyway."""
    options = tpu_options(mesh) | (compiler_options(exact) or {})
    if mesh.devices.flat[0].platform == "tpu":
        # Where the weights of a product are split, XLA:TPU would multiply by one part after the
        # other while the next part arrives, and add up results of whole size in HBM. An update of
        # Qwen2.5-3B on v5e:2x4 then has twice as many cycles (docs/log.md). No product is as large
        # as this number of MiB, so weights are gathered before they are multiplied by.
        options["xla_jf_spmd_threshold_for_windowed_einsum_mib"] = "1000000"
    return options or None


def scored_fields(batches: Sequence[Batch]) -> tuple[Batch, ...]:
    """Returns batches with only the fields that a score reads.

    The other fields are set as a step goes on. If they were arguments of the score program, the
    program would be compiled again for each set of fields that are not None.
    """
    return tuple(
        Batch(
            batch.tokens,
            batch.targets,
            batch.segments,
            batch.positions,
            kept=batch.kept,
            routes=batch.routes,
        )
        for batch in batches
    )


def take_microbatch(batch: Batch[jax.Array], index: jax.Array | int) -> Batch[jax.Array]:
    """Returns microbatch `index` of a batch: fields [M, B, T] become [B, T]."""

    def take(field: jax.Array) -> jax.Array:
        return field[index]

    return jax.tree.map(take, batch)


def without_prefix(batch: Batch[jax.Array], layout: RowLayout) -> Batch[jax.Array]:
    """Returns the slots of a microbatch: fields [B, T] become [B, T - prefix]."""

    def cut(field: jax.Array) -> jax.Array:
        return field[:, layout.prefix :]

    return jax.tree.map(cut, batch)


def zeros_in_fp32(x: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns zeros of the shape of `x`, whatever its type: gradients are summed in fp32."""
    return jnp.zeros(x.shape, jnp.float32)


def add_gradient(
    gradient: Callable[[jax.Array], tuple[tuple[qwen.Params, Stats], jax.Array | None]],
    prefix: int,
    index: jax.Array,
    so_far: tuple[tuple[qwen.Params, Stats], jax.Array | None],
) -> tuple[tuple[qwen.Params, Stats], jax.Array | None]:
    """Adds the gradient and the stats of microbatch `index` to those so far.

    The log-probabilities of the microbatch, if there are any, are written behind the prefix.
    """
    (total_gradient, total_stats), all_logps = so_far
    (microbatch_gradient, stats), logps = gradient(index)
    if all_logps is not None:
        all_logps = all_logps.at[index, :, prefix:].set(logps)
    total = (
        jax.tree.map(jnp.add, total_gradient, microbatch_gradient),
        combine_stats(total_stats, stats),
    )
    return total, all_logps
