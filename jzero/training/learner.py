"""The jitted programs of one model on one mesh: `score` and `update`.

Training runs and differentiates a model only here. The programs read packed rows, as `types.Batch`
of [M, B, T], one batch for each row layout.

    score     parameters, batches  -> log-probability (or value) of every target
    update    State, batches, loss -> next State, and sums of diagnostics
    gradient  State, batches, loss -> gradient, and the same sums   } `update` in two programs, for
    step      State, gradient      -> next State                    } sums of several gradients

`gradient` and `step` also serve callers that choose the loss and the optimizer's numbers at each
call, with the head of `heads.token_head` and the optimizer of `optimizer.adamw_of_numbers`.

The trained parameters, `State.params`, are the full model or an adapter on the frozen `State.base`
(`model.adapter`). `score` takes the parameters of a full model, which `weights` builds from a State
without a copy. `update` differentiates only with respect to the trained parameters. The loss is the
head's, or any function of the same form (`heads.Loss`). The programs are compiled once for each
function. `jax.tree_util.Partial(function, *numbers)` is a loss whose numbers are data.

`update` makes one optimizer step. Gradient accumulation over all microbatches of all layouts runs
inside one program. The loss is never averaged inside the program: the host normalizes the token
weights as the algorithm requires, over the whole optimizer step. Therefore packing, microbatches
and the mesh cannot change the objective. Diagnostics are sums for the same reason, and the host
divides them.

How rows and parameters are split:
  data only         `shard_map`: every device sums the gradient of its rows, and one psum at the end
                    of the step sums over the devices.
  fsdp, context     rows, or parts of rows (`sharding.context`), are split; the parameters keep
  or tensor         their shardings, and XLA places the collectives. `shard_map` over only the data
                    axis is not possible here: XLA aborts on a gather inside it while the other axes
                    are automatic.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PyTree

from jzero import attention
from jzero.algorithms import Algorithm
from jzero.config import ModelConfig, OptimizerConfig
from jzero.errors import UserError
from jzero.hosts import collectives
from jzero.hosts.platform import platform_of
from jzero.model import adapters, experts, mtp, qwen
from jzero.model.arithmetic import Arithmetic, choose_for_training
from jzero.model.linear import Dropout
from jzero.model.run_model import ModelInputs, run_model
from jzero.sharding import context
from jzero.sharding.mesh import (
    ROW_AXES,
    adapter_shardings,
    context_shards,
    is_data_parallel,
    num_slices,
    over_slices,
    param_shardings,
    row_shards_of_slice,
    rows_spec,
    summed_axes,
    token_axes,
)
from jzero.sharding.tpu_options import tpu_options
from jzero.training import draft_head
from jzero.training.frozen import abstract_base, freeze
from jzero.training.heads import (
    Head,
    Loss,
    Objective,
    Stats,
    combine_stats,
    combine_stats_over,
    critic_head,
    make_sequence_sum,
    policy_head,
    summed_stats,
    token_head,
    tokens_with_loss,
    trained_targets,
)
from jzero.training.optimizer import (
    AdamW,
    DataOptimizer,
    adamw_of_numbers,
    optimizer,
    without_draft_head,
)
from jzero.training.packed_rows import PackedRows
from jzero.training.packing import PackedBatch
from jzero.types import Batch, RowLayout, State

# One batch for each row layout.
Batches = tuple[Batch[jax.Array], ...]
# What a gradient returns for each target of a layout: f32[M, B, T, ...] by name.
#   logps  with model.exact or a head that returns terms: the head's first output
#   terms  with a head that returns terms: the weighted loss
Rows = dict[str, jax.Array]
# A jitted function and its abstract arguments for ahead-of-time compilation.
Program = tuple[jax.stages.Wrapped, tuple]


class UpdateShapes(NamedTuple):
    """The shapes of what an update returns besides the State."""

    stats: dict[str, jax.ShapeDtypeStruct]
    rows: list[dict[str, jax.ShapeDtypeStruct]]


class Learner:
    """The jitted programs of one model on one mesh, and their common settings."""

    def __init__(
        self,
        model: qwen.QwenConfig,
        compute: ModelConfig,
        settings: OptimizerConfig,
        head: Head,
        mesh: Mesh,
        replays_routes: bool = False,
        draft_weight: float = 0.0,
        temperature: float = 1.0,
        seed: int = 0,
        data_optimizer: DataOptimizer | None = None,
    ) -> None:
        """Makes the programs, which are compiled at their first calls.

        replays_routes: router replay, tokens go to the experts in `Batch.routes`.
        draft_weight, temperature: of the loss of the head for drafts (`draft_head.py`).
        seed: of the run, for the dropout on the adapter's inputs.
        data_optimizer: makes the steps instead of the optimizer of `settings`.
        """
        self.model = model
        self.replays_routes = replays_routes
        self.compute = compute
        self.settings = settings
        self.head = head
        self.mesh = mesh
        self.draft_weight = draft_weight if model.mtp else 0.0
        self.temperature = temperature
        self.seed = seed
        self.optimizer = optimizer(settings)
        self.data_optimizer = data_optimizer

        self.replicated = NamedSharding(mesh, P())
        self.row_sharding = NamedSharding(mesh, rows_spec(mesh))
        self.adapter = compute.adapter
        self.model_shardings = param_shardings(model, mesh)
        # Shardings of the trained parameters: the adapter, or the full model without one.
        self.shardings = self.model_shardings
        if self.adapter.rank:
            self.shardings = adapter_shardings(model, self.adapter, mesh)
        self.is_data_parallel = is_data_parallel(mesh)
        self.summed_axes = summed_axes(mesh)
        self.context = context_shards(mesh)
        context.check_context_axis(mesh, model)
        check_experts_of_slices(model, mesh)
        self.expert_placement = experts.training_placement(mesh)

        backend = attention.choose(
            compute.attention,
            mesh,
            exact=compute.exact,
            window=model.sliding_window,
            soft_cap=model.attn_logit_softcapping,
        )
        self.packed_attention = backend.packed
        if not self.is_data_parallel:
            # XLA cannot partition a kernel by itself.
            kernel, parts = self.packed_attention, ()
            if self.context > 1:
                # Context parallelism: devices share the tokens of a row, but attention needs all.
                kernel = context.attend_to_all_tokens(kernel, self.context)
                parts = ("context",)
            self.packed_attention = attention.split_over_mesh(
                kernel, mesh.shape["tensor"], ROW_AXES, mesh, parts
            )
        # A program under shard_map (data parallelism only) sees one shard of the rows.
        shards = 1 if self.is_data_parallel else row_shards_of_slice(mesh)
        self.arithmetic = choose_for_training(compute.exact, mesh, shards)
        # Of updates without a token, by layouts.
        self.shapes_without_tokens: dict[tuple[tuple[RowLayout, ...], Hashable], UpdateShapes] = {}

    # -- state -----------------------------------------------------------------------------------

    def abstract_state(self) -> State:
        """Returns the shapes and shardings of a State, for restoring a checkpoint.

        The State has no base, because checkpoints do not contain the base.
        """
        if self.adapter.rank:
            params = adapters.abstract(self.model, self.adapter)
        else:
            params = qwen.abstract(self.model)
        moments = jax.eval_shape(self._init_optimizer, params)
        step = jax.eval_shape(jnp.int32, 0)
        state = State(params, moments, step)
        params_structure = jax.tree.structure(params)

        def is_like_params(tree: object) -> bool:
            return jax.tree.structure(tree) == params_structure

        def shardings_of(tree: object) -> qwen.Params | NamedSharding:
            # Adam's moments have the parameters' tree structure and shardings.
            return self.shardings if is_like_params(tree) else self.replicated

        def place(x: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
            return x.update(sharding=sharding)

        shardings = jax.tree.map(shardings_of, state, is_leaf=is_like_params)
        return jax.tree.map(place, state, shardings)

    @cached_property
    def state_shardings(self) -> State:
        """Returns the sharding of every leaf of a State."""

        def sharding_of(x: jax.ShapeDtypeStruct) -> NamedSharding:
            return x.sharding

        return jax.tree.map(sharding_of, self.abstract_state())

    def abstract_base(self) -> qwen.Params:
        """Returns the shapes and shardings of the frozen base, or {} without an adapter."""
        if not self.adapter.rank:
            return {}
        compute = self.compute
        return abstract_base(self.model, self.mesh, compute.dtype, compute.is_base_quantized)

    def init_params(self, seed: int) -> qwen.Params:
        """Returns random parameters of the model, drawn on the devices in their final sharding."""

        def init(seed: jax.Array) -> qwen.Params:
            return qwen.init(self.model, jax.random.key(seed))

        # The seed is an argument, so another seed does not recompile.
        draw = jax.jit(init, out_shardings=self.model_shardings)
        return draw(collectives.put_global(np.uint32(seed), self.replicated))

    def init_adapter(self, seed: int) -> qwen.Params:
        """Returns a new adapter, drawn on the devices in its final sharding.

        A critic's adapter includes the value head.
        """
        return self._adapter_program(collectives.put_global(np.uint32(seed), self.replicated))

    @cached_property
    def _adapter_program(self) -> jax.stages.Wrapped:
        def init(seed: jax.Array) -> qwen.Params:
            return adapters.init(self.model, self.adapter, jax.random.key(seed))

        return jax.jit(init, out_shardings=self.shardings)

    def freeze(self, params: qwen.Params) -> qwen.Params:
        """Converts the model's parameters to the base of an adapter. `params` is consumed.

        Without an adapter `params` is returned unchanged.
        """
        if not self.adapter.rank:
            return params
        compute = self.compute
        return freeze(params, self.model, self.mesh, compute.dtype, compute.is_base_quantized)

    def start(self, params: qwen.Params) -> State:
        """Returns a State of `params`, which are not copied, and a new optimizer state."""
        step = collectives.put_global(np.int32(0), self.replicated)
        return State(params, self._moments_program(params), step)

    @cached_property
    def _moments_program(self) -> jax.stages.Wrapped:
        return jax.jit(self._init_optimizer, out_shardings=self.state_shardings.opt_state)

    def _init_optimizer(self, params: qwen.Params) -> optax.OptState:
        return (self.data_optimizer or self.optimizer).init(params)

    def zero_gradient(self) -> qwen.Params:
        """Returns a gradient of zeros, to which `gradient` may add."""
        return self._zeros_program()

    @cached_property
    def _zeros_program(self) -> jax.stages.Wrapped:
        params = self.abstract_state().params

        def zeros() -> qwen.Params:
            return jax.tree.map(zeros_in_fp32, params)

        return jax.jit(zeros, out_shardings=self.shardings)

    def start_on(self, params: qwen.Params, seed: int, adapter: qwen.Params | None = None) -> State:
        """Returns the first State of a run that starts from a model.

        `params` is the return value of `freeze`. The State trains the model itself or an adapter
        on the model: `adapter`, or a new one.
        """
        if not self.adapter.rank:
            return self.start(params)
        return replace(self.start(adapter or self.init_adapter(seed)), base=params)

    def weights(self, state: State) -> qwen.Params:
        """Returns the parameters of the full model. They share the arrays of `state`."""
        return self.whole(state.base, state.params)

    def whole(self, base: qwen.Params, trained: qwen.Params) -> qwen.Params:
        """Returns the parameters of the whole model from an adapter and its base."""
        return adapters.full_params(base, trained, self.adapter.scale)

    # -- running the programs --------------------------------------------------------------------

    def put(self, packed: Sequence[PackedBatch]) -> tuple[Batches, jax.Array]:
        """Copies packed batches to the mesh.

        Returns the batches and i32[layouts], the number of non-empty microbatches.
        """

        counts = [part.num_microbatches for part in packed]
        return self.put_batches([part.batch for part in packed], counts)

    def put_batches(
        self, batches: Sequence[Batch[np.ndarray]], counts: Sequence[int]
    ) -> tuple[Batches, jax.Array]:
        """Copies batches to the mesh, and the number of non-empty microbatches of each."""

        def put_rows(field: np.ndarray) -> jax.Array:
            return collectives.put_global(field, self.row_sharding)

        on_mesh = jax.tree.map(put_rows, tuple(batches))
        return on_mesh, collectives.put_global(np.array(counts, np.int32), self.replicated)

    def put_loss(self, loss: Loss) -> Loss:
        """Copies the numbers of a loss to the mesh."""

        def put_number(number: np.ndarray) -> jax.Array:
            return collectives.put_global(number, self.replicated)

        return jax.tree.map(put_number, as_argument(loss))

    def update(
        self,
        state: State,
        batches: Batches,
        counts: jax.Array,
        layouts: Sequence[RowLayout],
        lr: float,
        is_on_policy: bool = True,
        loss: Loss | None = None,
    ) -> tuple[State, Stats]:
        """Makes one optimizer step over all microbatches of all layouts.

        `state` is donated, except its base: the next State takes its memory, and the caller must
        not use it again.

        `is_on_policy` means that no optimizer step was made since the rollouts were scored. The
        policy is then identical to pi_old, and every ratio is exactly 1, regardless of `old_logps`.

        `loss` replaces the head's loss. The program is compiled once for each function, so pass
        the same function in every step: one that is defined inside the loop is another each time.

        Returns the next State and fp32 scalars, from which `heads.loss_metrics` makes metrics. The
        scalars are sums over trained tokens (`tokens` counts the tokens), except the metrics of the
        loss with another reduction (`algorithms.metrics`) and two others:
        `grad_norm` is the norm of the gradient before clipping, and `skipped` is 1 if that norm was
        above optimizer.skip_norm, in which case the State did not change. An MoE model also has
        `expert_load` f32[L, X], the number of tokens of every expert, including prompt tokens.
        """
        next_state, stats, _ = self.update_with_logps(
            state, batches, counts, layouts, lr, is_on_policy, loss
        )
        return next_state, stats

    def update_with_logps(
        self,
        state: State,
        batches: Batches,
        counts: jax.Array,
        layouts: Sequence[RowLayout],
        lr: float,
        is_on_policy: bool = True,
        loss: Loss | None = None,
    ) -> tuple[State, Stats, list[jax.Array | None]]:
        """Does the same as `update`, and also returns the log-probabilities before the step.

        With model.exact there is one f32[M, B, T] for each layout, as `score` returns them. Without
        model.exact the log-probabilities are None.

        Without a microbatch the model is not computed: every sum is 0, and only the optimizer makes
        its step, by the moments of the steps before.
        """
        if not jax.device_get(counts).any():
            return self._step_without_tokens(state, batches, counts, tuple(layouts), lr, loss)
        # The state is donated, so the base, which must survive, is a separate argument.
        next_state, stats, rows = self.update_program(
            replace(state, base={}),
            batches,
            counts,
            collectives.put_global(np.float32(lr), self.replicated),
            collectives.put_global(np.bool_(is_on_policy), self.replicated),
            state.base,
            as_argument(loss),
            tuple(layouts),
        )
        return replace(next_state, base=state.base), stats, logps_of(rows)

    def _step_without_tokens(
        self,
        state: State,
        batches: Batches,
        counts: jax.Array,
        layouts: tuple[RowLayout, ...],
        lr: float,
        loss: Loss | None,
    ) -> tuple[State, Stats, list[jax.Array | None]]:
        """Does what `update_with_logps` does if no batch has a token."""
        key = layouts, jax.tree.structure(as_argument(loss))
        if key not in self.shapes_without_tokens:
            _, *shapes = jax.eval_shape(
                partial(self._update, layouts=layouts),
                replace(state, base={}),
                batches,
                counts,
                jax.ShapeDtypeStruct((), jnp.float32),
                jax.ShapeDtypeStruct((), jnp.bool_),
                state.base,
                as_argument(loss),
            )
            self.shapes_without_tokens[key] = UpdateShapes(*shapes)
        shapes = self.shapes_without_tokens[key]

        next_state, step_stats = self.program_without_tokens(
            replace(state, base={}), collectives.put_global(np.float32(lr), self.replicated)
        )
        stats = jax.tree.map(partial(put_zeros, sharding=self.replicated), shapes.stats)
        rows = jax.tree.map(partial(put_zeros, sharding=self.row_sharding), shapes.rows)
        return replace(next_state, base=state.base), stats | step_stats, logps_of(rows)

    def gradient(
        self,
        state: State,
        batches: Batches,
        counts: jax.Array,
        layouts: Sequence[RowLayout],
        loss: Loss | None = None,
        into: qwen.Params | None = None,
    ) -> tuple[qwen.Params, Stats]:
        """Returns the gradient of a loss, and stats as `update` without those of the step.

        The gradient is fp32, with the tree and the shardings of `state.params`. `into` is a
        gradient to which this one is added; it is donated. Weights that are normalized in each of
        two calls are another objective than weights that are normalized over both.
        """
        gradient, stats, _ = self.gradient_with_rows(state, batches, counts, layouts, loss, into)
        return gradient, stats

    def gradient_with_rows(
        self,
        state: State,
        batches: Batches,
        counts: jax.Array,
        layouts: Sequence[RowLayout],
        loss: Loss | None = None,
        into: qwen.Params | None = None,
        keeps_into: bool = False,
    ) -> tuple[qwen.Params, Stats, list[Rows]]:
        """Does the same as `gradient`, and also returns the rows of each layout (`Rows`).

        keeps_into: `into` is not donated, so that it is as it was if the program fails.
        """
        program = self.keeping_gradient_program if keeps_into else self.gradient_program
        return program(
            replace(state, opt_state=(), base={}),
            batches,
            counts,
            collectives.put_global(np.bool_(True), self.replicated),
            state.base,
            into,
            as_argument(loss),
            tuple(layouts),
        )

    def compiled(
        self,
        function: Callable,
        places: PyTree,
        donated: int | None = None,
        static: tuple[int, ...] | str | None = None,
    ) -> jax.stages.Wrapped:
        """Returns a jitted program of this learner.

        Args:
            function: what the program computes.
            places: the shardings of its results.
            donated: the number of the argument that is donated.
            static: the numbers of static arguments, or the name of one.
        """
        name = static if isinstance(static, str) else None
        return jax.jit(
            function,
            donate_argnums=donated,
            static_argnums=None if isinstance(static, str) else static,
            static_argnames=name,
            out_shardings=places,
            compiler_options=training_options(self.mesh, self.arithmetic),
        )

    @cached_property
    def gradient_program(self) -> jax.stages.Wrapped:
        return self._compiled_gradient(donated=5)

    @cached_property
    def keeping_gradient_program(self) -> jax.stages.Wrapped:
        return self._compiled_gradient(donated=None)

    def _compiled_gradient(self, donated: int | None) -> jax.stages.Wrapped:
        places = (self.shardings, self.replicated, self.row_sharding)
        return self.compiled(self._add_to_gradient, places, donated, static=(7,))

    def step(
        self, state: State, gradient: qwen.Params, numbers: float | AdamW
    ) -> tuple[State, Stats]:
        """Makes an optimizer step with a gradient. `state` is donated, except its base.

        `numbers` are the learning rate, or those that the data optimizer reads. Returns the next
        State, and `grad_norm` and `skipped` as `update` does, or the data optimizer's stats.
        """
        next_state, stats = self.step_program(
            replace(state, base={}),
            gradient,
            collectives.put_global(np.asarray(numbers, np.float32), self.replicated),
        )
        return replace(next_state, base=state.base), stats

    @cached_property
    def step_program(self) -> jax.stages.Wrapped:
        return self.compiled(self._descend, (self.state_shardings, self.replicated), donated=0)

    @cached_property
    def program_without_tokens(self) -> jax.stages.Wrapped:
        return self.compiled(
            self._update_without_tokens, (self.state_shardings, self.replicated), donated=0
        )

    def score(
        self,
        params: qwen.Params,
        batches: Batches,
        counts: jax.Array,
        layouts: Sequence[RowLayout],
    ) -> list[jax.Array]:
        """Returns the head's first output: the log-probability or the value of every target.

        There is one f32[M, B, T] for each layout, with the further axes that the head's output has.
        It is 0 in microbatches from `counts` on, and in the prefix unless the head reads it.
        """
        if not jax.device_get(counts).any():
            return [put_zeros(batch.tokens, self.row_sharding) for batch in batches]
        return self.score_program(params, scored_fields(batches), counts, tuple(layouts))

    @cached_property
    def score_program(self) -> jax.stages.Wrapped:
        # Scores have the sharding that `put` gives to rows. With another sharding, the program that
        # reads them as a field of a batch would be compiled a second time.
        return self.compiled(self._score, self.row_sharding, static=(3,))

    def entropies(
        self,
        params: qwen.Params,
        batches: Batches,
        counts: jax.Array,
        layouts: Sequence[RowLayout],
    ) -> list[jax.Array]:
        """Returns the entropy at every target: the policy head's second output, as in `score`."""
        if not jax.device_get(counts).any():
            return [put_zeros(batch.tokens, self.row_sharding) for batch in batches]
        return self.entropy_program(params, scored_fields(batches), counts, tuple(layouts))

    @cached_property
    def entropy_program(self) -> jax.stages.Wrapped:
        return self.compiled(partial(self._score, output=1), self.row_sharding, static=(3,))

    def loss_terms(
        self, scores: Sequence[jax.Array], batches: Batches, loss: Loss
    ) -> list[jax.Array]:
        """Returns the weighted loss of every target, f32[M, B, T] for each layout, from its score.

        Only for a head that reads the prefix.
        """
        assert self.head.reads_prefix
        return self.terms_program(list(scores), batches, as_argument(loss))

    @cached_property
    def terms_program(self) -> jax.stages.Wrapped:
        return self.compiled(self._loss_terms, self.row_sharding)

    def _loss_terms(self, scores: list[jax.Array], batches: Batches, loss: Loss) -> list[jax.Array]:
        def terms_of(score: jax.Array, batch: Batch[jax.Array]) -> jax.Array:
            no_sum = make_sequence_sum(batch.segments, trained_targets(batch), RowLayout(0, 0, 0))
            terms, _ = loss((score,), batch, no_sum, jnp.bool_(True))
            return jnp.where(tokens_with_loss(batch), terms, 0)

        by_microbatch = jax.vmap(terms_of)
        return [by_microbatch(*pair) for pair in zip(scores, batches, strict=True)]

    @cached_property
    def update_program(self) -> jax.stages.Wrapped:
        return self.compiled(
            self._update,
            (self.state_shardings, self.replicated, self.row_sharding),
            donated=0,
            static=(7,),
        )

    def programs(
        self,
        batches: Sequence[Batch],
        layouts: Sequence[RowLayout],
    ) -> dict[str, Program]:
        """Returns `score` and `update` with abstract arguments for batches of these shapes."""

        def abstract(
            x: np.ndarray | np.generic | jax.ShapeDtypeStruct,
            place: NamedSharding,
        ) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

        placed = jax.tree.map(partial(abstract, place=self.row_sharding), tuple(batches))
        counts = abstract(np.zeros(len(layouts), np.int32), self.replicated)
        lr = abstract(np.float32(0), self.replicated)
        is_on_policy = abstract(np.bool_(True), self.replicated)
        state = self.abstract_state()
        base = self.abstract_base()
        weights = self.whole(base, state.params)
        static = tuple(layouts)
        return {
            "score": (self.score_program, (weights, scored_fields(placed), counts, static)),
            "update": (
                self.update_program,
                (state, placed, counts, lr, is_on_policy, base, None, static),
            ),
        }

    # -- what the programs compute ---------------------------------------------------------------

    def _outputs(
        self,
        params: qwen.Params,
        batch: Batch[jax.Array],
        layout: RowLayout,
    ) -> tuple[tuple[jax.Array, ...], Stats]:
        """Returns the head's outputs at the targets it reads (`_first_target`), and layer stats.

        The layer stats of an MoE model are the tokens of every expert, f32[L, X].

        """
        hidden, parts, layer_stats = self._hidden(params, batch, layout)
        return self._head_outputs(params, hidden, parts, layout), layer_stats

    def _hidden(
        self,
        params: qwen.Params,
        batch: Batch[jax.Array],
        layout: RowLayout,
        dropout_keys: jax.Array | None = None,
    ) -> tuple[jax.Array, Batch[jax.Array], Stats]:
        """Returns hidden states [B, T, E], the fields that the head reads, and layer stats.

        With context parallelism hidden states and fields have parts of rows, as in `_parts`.

        dropout_keys: one for each of the B rows. None: without dropout.
        """
        # Without router replay the model's router chooses the experts.
        if not self.replays_routes:
            batch = batch.without_track("routes")
        # Only the cache sees complete rows. With context parallelism the rest of the model treats
        # each part of a row as a row.
        parts = self._parts(batch)
        cache = self._cache(batch, layout)
        if num_slices(self.mesh) > 1 and not self.is_data_parallel:
            embedding = SplitEmbedding(params["embed"], self.mesh, self.model_shardings["embed"])
            params = params | {"embed": embedding}
        inputs = ModelInputs(parts.tokens, parts.positions, parts.segments > 0, parts.routes)
        if dropout_keys is not None:
            if self.context > 1:
                # Every part of a row needs a separate key, because the model treats it as a row.
                split = partial(jax.random.split, num=self.context)
                dropout_keys = jax.vmap(split)(dropout_keys).ravel()
            inputs = inputs._replace(dropout=Dropout(dropout_keys, self.adapter.dropout))
        outputs = run_model(
            self.model,
            params,
            inputs,
            cache,
            self.arithmetic,
            dtype=jnp.dtype(self.compute.dtype),
            placement=self.expert_placement,
            remat=self.compute.remat,
        )
        hidden, load = outputs.hidden, outputs.expert_load
        if not self.is_data_parallel:
            # Without this constraint XLA splits the activations as fsdp splits the weights, and
            # sums activations over devices in every layer instead of gathering the layer's weights.
            rows = NamedSharding(self.mesh, P(token_axes(self.mesh)))
            hidden = lax.with_sharding_constraint(hidden, rows)
        layer_stats = {} if load is None else {"expert_load": load.astype(jnp.float32)}
        return hidden, parts, layer_stats

    def _cache(self, batch: Batch[jax.Array], layout: RowLayout) -> PackedRows:
        """Returns how the tokens of packed rows attend to each other."""
        return PackedRows(
            self.model,
            self.packed_attention,
            self.arithmetic.recurrence,
            batch.segments,
            batch.positions,
            layout,
            self.mesh if self.context > 1 else None,
        )

    def _parts(self, batch: Batch[jax.Array]) -> Batch[jax.Array]:
        """Returns the fields that the model and the head read, split for context parallelism.

        Fields [B, T] become [B * context, part].
        """
        (read,) = scored_fields([batch])
        if self.context == 1:
            return read
        return jax.tree.map(partial(context.to_parts, mesh=self.mesh), read)

    def _first_target(self, layout: RowLayout) -> int:
        """Returns the first column of a row whose target the head reads.

        That is the first one after the prefix if no position in the prefix predicts a trained
        token: the prompt's last token is an input of every response.
        """
        return 0 if self.head.reads_prefix else layout.prefix

    def _head_outputs(
        self,
        params: qwen.Params,
        hidden: jax.Array,
        batch: Batch[jax.Array],
        layout: RowLayout,
    ) -> tuple[jax.Array, ...]:
        """Returns the head's outputs from `_first_target` on: f32[B, T - prefix] for most heads.

        With context parallelism `hidden` and `batch` have parts of rows, as `_parts` returns them.
        """
        if self.context == 1:
            body = slice(self._first_target(layout), None)
            kept = None if batch.kept is None else batch.kept[:, body]
            return self.head.outputs(params, hidden[:, body], batch.targets[:, body], kept)
        # With context parallelism, cutting the prefix before the head would move tokens between
        # devices, so it is cut after the head.
        outputs = self.head.outputs(params, hidden, batch.targets, batch.kept)
        rows = (context.to_rows(output, self.mesh, layout.tokens) for output in outputs)
        return tuple(row[:, self._first_target(layout) :] for row in rows)

    def _loss(
        self,
        params: qwen.Params,
        base: qwen.Params,
        batch: Batch[jax.Array],
        layout: RowLayout,
        is_on_policy: jax.Array,
        dropout_keys: jax.Array | None,
        loss_of_terms: Loss | None,
    ) -> tuple[jax.Array, tuple[Stats, Rows]]:
        """Returns the loss of one microbatch, the sums of its metrics, and its rows.

        `params` are the trained parameters: an adapter on `base`, or the full model if `base` is
        empty. The rows f32[B, T - first target, ...] are those of `Rows`.
        """
        weights = self.whole(base, params)
        hidden, parts, layer_stats = self._hidden(weights, batch, layout, dropout_keys)
        outputs = self._head_outputs(weights, hidden, parts, layout)
        # The fields of the loss must start where the head's outputs do.
        body = columns_from(batch, self._first_target(layout))
        sequence_sum = make_sequence_sum(body.segments, trained_targets(body), layout)
        weighted_terms = loss_of_terms or self.head.loss
        terms, metrics = weighted_terms(outputs, body, sequence_sum, is_on_policy)
        # `where` instead of a product: terms of untrained tokens can be infinite or NaN, and
        # 0 * NaN is NaN.
        terms = jnp.where(tokens_with_loss(body), terms, 0)
        loss = terms.sum()
        sums = summed_stats(metrics, body) | lax.stop_gradient(layer_stats)
        sums |= {"loss": lax.stop_gradient(loss)}
        rows: Rows = {}
        if self.arithmetic.is_exact or self.head.returns_terms:
            rows["logps"] = lax.stop_gradient(outputs[0])
        if self.head.returns_terms:
            rows["terms"] = lax.stop_gradient(terms)
        if self.draft_weight:
            draft_loss, draft_sums = draft_head.head_loss(
                self.model,
                weights,
                hidden,
                batch,
                layout,
                self._cache(batch, layout).attend,
                temperature=self.temperature,
                chunk=self.compute.logit_chunk,
                dtype=jnp.dtype(self.compute.dtype),
                remat=self.compute.remat,
                arithmetic=self.arithmetic,
            )
            loss += self.draft_weight * draft_loss
            sums |= draft_sums
        return loss, (sums, rows)

    def _microbatch_gradient(
        self,
        params: qwen.Params,
        base: qwen.Params,
        batch: Batch[jax.Array],
        layout: RowLayout,
        is_on_policy: jax.Array,
        row_keys: jax.Array | None,
        loss: Loss | None,
        index: jax.Array | int,
    ) -> tuple[tuple[qwen.Params, Stats], Rows]:
        loss_gradient = jax.grad(self._loss, has_aux=True)
        microbatch = take_microbatch(batch, index)
        dropout_keys = None
        if row_keys is not None:
            dropout_keys = jax.vmap(jax.random.fold_in, (0, None))(row_keys[0], index)
        gradient, (stats, rows) = loss_gradient(
            params, base, microbatch, layout, is_on_policy, dropout_keys, loss
        )
        return (gradient, stats), rows

    def _gradient(
        self,
        params: qwen.Params,
        base: qwen.Params,
        batches: Batches,
        counts: jax.Array,
        is_on_policy: jax.Array,
        all_row_keys: tuple[jax.Array | None, ...],
        loss: Loss | None,
        layouts: tuple[RowLayout, ...],
    ) -> tuple[tuple[qwen.Params, Stats], list[Rows]]:
        """Returns the gradient and the stats, summed over all microbatches and devices.

        The list has the rows of each layout.

        all_row_keys: of each layout, as `_row_keys` returns them.
        """
        total = None
        all_rows: list[Rows] = []
        of_layouts = zip(batches, layouts, all_row_keys, strict=True)
        for number, (batch, layout, row_keys) in enumerate(of_layouts):
            gradient = partial(
                self._microbatch_gradient, params, base, batch, layout, is_on_policy, row_keys, loss
            )
            # The zeros to start from, shaped like one microbatch's gradient and stats.
            shapes, row_shapes = jax.eval_shape(gradient, 0)
            if total is None:
                total = jax.tree.map(zeros_in_fp32, shapes)
            rows = jax.tree.map(partial(zeros_of_rows, batch), row_shapes)
            # The number of microbatches is an argument, not a constant, so a step with fewer
            # microbatches does not recompile.
            add = partial(add_gradient, gradient, self._first_target(layout))
            total, rows = lax.fori_loop(0, counts[number], add, (total, rows))
            all_rows.append(rows)
        assert total is not None, f"{layouts=}"
        if self.summed_axes:
            gradient, stats = total
            if not self.is_data_parallel:
                # The devices of a slice first sum the shard that each keeps, so that only shards
                # cross slices.
                gradient = lax.with_sharding_constraint(gradient, self.shardings)
            # The devices are summed once, after all microbatches.
            gradient = lax.psum(gradient, self.summed_axes)
            total = gradient, combine_stats_over(stats, self.summed_axes)
        return total, all_rows

    def _row_keys(self, batches: Batches, step: jax.Array) -> tuple[jax.Array | None, ...]:
        """Returns keys [1, B] of the dropout of each layout's rows in this step, or None without.

        Together with the number of the microbatch they determine what is dropped, so a resumed run
        repeats it. A row has its number among the rows of all devices.
        """
        if not self.adapter.dropout:
            return (None,) * len(batches)
        key = jax.random.fold_in(jax.random.key(np.uint32(self.seed)), step)

        def keys_of(layout: int, batch: Batch[jax.Array]) -> jax.Array:
            rows = jnp.arange(batch.tokens.shape[1])
            of_layout = jax.random.fold_in(key, layout)
            return jax.vmap(jax.random.fold_in, (None, 0))(of_layout, rows)[None]

        return tuple(keys_of(layout, batch) for layout, batch in enumerate(batches))

    def _summed_gradient(
        self,
        state: State,
        batches: Batches,
        counts: jax.Array,
        is_on_policy: jax.Array,
        base: qwen.Params,
        loss: Loss | None,
        layouts: tuple[RowLayout, ...],
    ) -> tuple[tuple[qwen.Params, Stats], list[Rows]]:
        """Returns what `_gradient` returns, from rows that are split over the devices."""
        rows = P(None, self.summed_axes)
        summed_gradient = self._over_data(
            partial(self._gradient, layouts=layouts),
            in_specs=(P(), P(), rows, P(), P(), rows, P()),
            out_specs=(P(), rows),
        )
        row_keys = self._row_keys(batches, state.step)
        return summed_gradient(state.params, base, batches, counts, is_on_policy, row_keys, loss)

    def _update(
        self,
        state: State,
        batches: Batches,
        counts: jax.Array,
        lr: jax.Array,
        is_on_policy: jax.Array,
        base: qwen.Params,
        loss: Loss | None,
        layouts: tuple[RowLayout, ...],
    ) -> tuple[State, Stats, list[Rows]]:
        summed, rows = self._summed_gradient(
            state, batches, counts, is_on_policy, base, loss, layouts
        )
        gradient, stats = summed
        next_state, step_stats = self._descend(state, gradient, lr)
        return next_state, stats | step_stats, rows

    def _add_to_gradient(
        self,
        state: State,
        batches: Batches,
        counts: jax.Array,
        is_on_policy: jax.Array,
        base: qwen.Params,
        into: qwen.Params | None,
        loss: Loss | None,
        layouts: tuple[RowLayout, ...],
    ) -> tuple[qwen.Params, Stats, list[Rows]]:
        (gradient, stats), rows = self._summed_gradient(
            state, batches, counts, is_on_policy, base, loss, layouts
        )
        if into is not None:
            # Added after the sum over the devices: it is the same on all of them, and counts once.
            gradient = jax.tree.map(jnp.add, into, gradient)
        return gradient, stats, rows

    def _update_without_tokens(self, state: State, lr: jax.Array) -> tuple[State, Stats]:
        return self._descend(state, jax.tree.map(zeros_in_fp32, state.params), lr)

    def _descend(self, state: State, gradient: qwen.Params, lr: jax.Array) -> tuple[State, Stats]:
        """Makes an optimizer step. Returns the next State, `grad_norm` and `skipped`."""
        if self.data_optimizer is not None:
            return self.data_optimizer.step(state, gradient, lr, self.compute.dtype)

        # The learning rate is an argument instead of a part of the optimizer chain, so a schedule
        # does not recompile the program.
        def descend(param: jax.Array, change: jax.Array) -> jax.Array:
            return param - lr * change

        step, opt_state = self.optimizer.update(gradient, state.opt_state, state.params)
        params = jax.tree.map(descend, state.params, step)
        if self.model.mtp and not self.draft_weight and not self.adapter.rank:
            # Without a loss, weight decay would still change the head.
            params |= {mtp.NAME: state.params[mtp.NAME]}
        next_state = State(params, opt_state, state.step + 1)

        # With optimizer.skip_norm a step with a large gradient keeps the previous state.
        grad_norm = optax.tree.norm(without_draft_head(gradient))
        stats = {"grad_norm": grad_norm, "skipped": jnp.float32(0)}
        if self.settings.skip_norm:
            # A NaN norm makes the comparison false, so a step with a NaN gradient is skipped too.
            is_kept = grad_norm <= self.settings.skip_norm

            def choose(updated: jax.Array, previous: jax.Array) -> jax.Array:
                return jnp.where(is_kept, updated, previous)

            next_state = jax.tree.map(choose, next_state, state)
            stats["skipped"] = 1 - is_kept.astype(jnp.float32)
        return next_state, stats

    def _score(
        self,
        params: qwen.Params,
        batches: Batches,
        counts: jax.Array,
        layouts: tuple[RowLayout, ...],
        output: int = 0,
    ) -> list[jax.Array]:
        """Returns output `output` of the head, as `score` describes the first output."""

        def score_layouts(
            params: qwen.Params,
            batches: Batches,
            counts: jax.Array,
        ) -> list[jax.Array]:
            return [
                self._score_layout(params, batch, layout, count, output)
                for batch, layout, count in zip(batches, layouts, counts, strict=True)
            ]

        score = self._over_data(
            score_layouts,
            in_specs=(P(), P(None, self.summed_axes), P()),
            out_specs=P(None, self.summed_axes),
        )
        return score(params, batches, counts)

    def _score_layout(
        self,
        params: qwen.Params,
        batch: Batch[jax.Array],
        layout: RowLayout,
        count: jax.Array,
        output: int,
    ) -> jax.Array:
        """Scores the first `count` microbatches of one layout, f32[M, B, T, ...]; others are 0."""

        def output_of(index: jax.Array | int) -> jax.Array:
            outputs, _ = self._outputs(params, take_microbatch(batch, index), layout)
            return outputs[output]

        def score_microbatch(index: jax.Array, scores: jax.Array) -> jax.Array:
            return scores.at[index, :, self._first_target(layout) :].set(output_of(index))

        scores = zeros_of_rows(batch, jax.eval_shape(output_of, 0))
        return lax.fori_loop(0, count, score_microbatch, scores)

    def _over_data(
        self,
        function: Callable,
        in_specs: tuple[P, ...],
        out_specs: P | tuple[P, ...],
    ) -> Callable:
        """Maps `function` over the axes that it sums over by itself, if there are any.

        A spec is P(), or P(None, axes) for fields [M, B, ...] with rows that are split.
        """
        if self.is_data_parallel:
            return jax.shard_map(
                function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
            )
        if self.summed_axes:
            return over_slices(function, self.mesh, in_specs, out_specs)
        return function


@dataclass(frozen=True)
class SplitEmbedding:
    """The embedding [V, E] of a slice, whose devices look up all tokens in their own columns.

    Left to itself, XLA looks up over the axis of slices, too, and sends embeddings between them.
    """

    weight: jax.Array
    mesh: Mesh
    place: NamedSharding

    def __getitem__(self, tokens: Int[Array, " N"]) -> Float[Array, "N E"]:
        """Returns the embeddings of tokens, on the devices of their rows."""

        def place(x: jax.Array, *spec: str | tuple[str, ...] | None) -> jax.Array:
            return lax.with_sharding_constraint(x, NamedSharding(self.mesh, P(*spec)))

        columns = self.place.spec[1]
        found = place(self.weight[place(tokens, None)], None, columns)
        return place(found, token_axes(self.mesh))


def check_experts_of_slices(model: qwen.QwenConfig, mesh: Mesh) -> None:
    """Raises UserError if several slices cannot compute the experts of a model."""
    # JAX has no vmap of `lax.ragged_dot` with weights that are the same for all (0.10).
    is_on_cpu = platform_of(mesh) == "cpu"
    if model.num_experts and num_slices(mesh) > 1 and not (is_data_parallel(mesh) or is_on_cpu):
        raise UserError(
            f"mesh.slices={num_slices(mesh)}: with experts every device of a slice needs whole "
            "weights; set mesh.data=-1 mesh.fsdp=1 mesh.tensor=1, or mesh.slices=1"
        )


def policy_learner(
    model: qwen.QwenConfig,
    compute: ModelConfig,
    optimizer: OptimizerConfig,
    objective: Objective,
    mesh: Mesh,
    seed: int = 0,
) -> Learner:
    """Returns the policy's learner. Its `score` returns log-probabilities of the targets.

    seed: of the dropout on the adapter's inputs.
    """
    head = policy_head(model, compute, objective, mesh)
    return Learner(
        model,
        compute,
        optimizer,
        head,
        mesh,
        objective.replays_routes,
        objective.draft_weight,
        objective.temperature,
        seed,
    )


def token_learner(model: qwen.QwenConfig, compute: ModelConfig, mesh: Mesh) -> Learner:
    """Returns a learner of callers that choose the loss and the optimizer's numbers at each call.

    Its batches have K targets of a position (`heads.token_head`), `gradient` takes a loss whose
    kind and numbers are data (`algorithms.token_losses`), and `step` takes an `AdamW`.
    """
    learner = Learner(
        model,
        compute,
        OptimizerConfig(),
        token_head(model, compute, mesh),
        mesh,
        data_optimizer=adamw_of_numbers(),
    )
    assert learner.context == 1, "rows are not split over devices here"
    return learner


def critic_learner(
    model: qwen.QwenConfig,
    compute: ModelConfig,
    optimizer: OptimizerConfig,
    algorithm: Algorithm,
    mesh: Mesh,
    seed: int = 0,
) -> Learner:
    """Returns the critic's learner. Its `score` returns values of the states before targets.

    seed: of the dropout on the adapter's inputs.
    """
    head = critic_head(algorithm)
    # The critic has the policy's architecture with a value head, and drafts no tokens.
    with_value = replace(model, value_head=True, mtp=False)
    # The critic is never sampled, so it need not match a sampler exactly.
    compute = replace(compute, exact=False)
    return Learner(with_value, compute, optimizer, head, mesh, seed=seed)


def training_options(mesh: Mesh, arithmetic: Arithmetic) -> dict[str, bool | str] | None:
    """Returns the XLA options for training programs, or None for XLA's defaults."""
    options = tpu_options(mesh) | arithmetic.compiler_options
    if platform_of(mesh) == "tpu":
        # Where the weights of a product are sharded, XLA:TPU overlaps the product with the
        # transfer of the shards (windowed einsum) and accumulates results of full size in HBM. An
        # update of Qwen2.5-3B on v5e:2x4 then takes twice as many cycles (lab/log.md). No product
        # reaches this threshold in MiB, so weights are always gathered before they are multiplied.
        options["xla_jf_spmd_threshold_for_windowed_einsum_mib"] = "1000000"
    return options or None


def scored_fields(batches: Sequence[Batch]) -> tuple[Batch, ...]:
    """Returns batches with only the fields that a score reads."""
    # The stages of a step set the other fields. As arguments of the score program they would cause
    # a recompilation for each set of fields that are not None.
    return tuple(
        Batch(
            batch.tokens,
            batch.targets,
            batch.segments,
            batch.positions,
            tracks=batch.tracks,
        )
        for batch in batches
    )


def take_microbatch(batch: Batch[jax.Array], index: jax.Array | int) -> Batch[jax.Array]:
    """Returns microbatch `index` of a batch: fields [M, B, T] become [B, T]."""

    def take(field: jax.Array) -> jax.Array:
        return field[index]

    return jax.tree.map(take, batch)


def columns_from(batch: Batch[jax.Array], first: int) -> Batch[jax.Array]:
    """Returns the columns of a microbatch from `first` on: fields [B, T] become [B, T - first]."""

    def cut(field: jax.Array) -> jax.Array:
        return field[:, first:]

    return jax.tree.map(cut, batch)


def as_argument(loss: Loss | None) -> Loss | None:
    """Returns a loss as an argument of a program, which is compiled once for each function."""
    is_argument = loss is None or isinstance(loss, jax.tree_util.Partial)
    return loss if is_argument else jax.tree_util.Partial(loss)


def logps_of(rows: Sequence[Rows]) -> list[jax.Array | None]:
    """Returns the log-probabilities of each layout, if its rows have them."""
    return [of_layout.get("logps") for of_layout in rows]


def fetch_rows(
    packed: Sequence[PackedBatch],
    rows: Sequence[jax.Array],
    values: Sequence[np.ndarray],
) -> None:
    """Copies [M, B, T] on the mesh, one for each layout, into one array [T] for each sequence.

    `rows` are what `score` returns for the batches of `packed`. See `PackedBatch.from_rows`.
    """
    for part, array in zip(packed, rows, strict=True):
        part.from_rows(collectives.fetch_global(array), values)


def put_zeros(
    like: jax.ShapeDtypeStruct | jax.Array,
    sharding: NamedSharding,
) -> jax.Array:
    """Returns fp32 zeros of the shape of `like` on the mesh."""
    return collectives.put_global(np.zeros(like.shape, np.float32), sharding)


def zeros_in_fp32(x: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns fp32 zeros of the shape of `x`."""
    # Gradients are summed in fp32, whatever the parameters' dtype.
    return jnp.zeros(x.shape, jnp.float32)


def zeros_of_rows(batch: Batch[jax.Array], columns: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns fp32 zeros [M, B, T, ...] for columns [B, C, ...] of each microbatch."""
    return jnp.zeros(batch.tokens.shape + columns.shape[2:], jnp.float32)


def add_gradient(
    gradient: Callable[[jax.Array], tuple[tuple[qwen.Params, Stats], Rows]],
    first: int,
    index: jax.Array,
    so_far: tuple[tuple[qwen.Params, Stats], Rows],
) -> tuple[tuple[qwen.Params, Stats], Rows]:
    """Adds the gradient and the stats of microbatch `index` to the totals in `so_far`.

    The rows of the microbatch are written from column `first` on.
    """
    (total_gradient, total_stats), all_rows = so_far
    (microbatch_gradient, stats), rows = gradient(index)
    for name, columns in rows.items():
        all_rows = all_rows | {name: all_rows[name].at[index, :, first:].set(columns)}
    total = (
        jax.tree.map(jnp.add, total_gradient, microbatch_gradient),
        combine_stats(total_stats, stats),
    )
    return total, all_rows
