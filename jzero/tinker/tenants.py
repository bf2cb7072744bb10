"""The trained adapters of all clients over one frozen base. Only the worker's thread uses them.

A tenant is an adapter with its optimizer state. The base is an argument of every program, so it is
in memory once. The programs depend only on the shape of the adapter: its rank and its targets. As
many states as `resident` are on the device; the least recently used others wait on the host.
"""

import itertools
import math
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.tree_util import Partial
from jax.typing import DTypeLike

from jzero.config import AdapterConfig, ModelConfig
from jzero.errors import UserError
from jzero.hosts import collectives
from jzero.model import adapters, peft, qwen
from jzero.model.base_model import BaseModel
from jzero.model.huggingface.tensors import flatten, unflatten
from jzero.tinker import datums, losses, store
from jzero.tinker.bodies import Part
from jzero.tinker.datums import FwdBwd
from jzero.training.learner import Learner, token_learner
from jzero.training.optimizer import AdamW, Moments
from jzero.types import State

ALPHA = 32.0  # as the API's own adapters: the output is multiplied by 32 / rank
MOMENTS = ("mu", "nu")  # prefixes of the names of Adam's moments
MLP_PARTS = ("gate", "up", "down")  # the other linear layers mix tokens


def part_of(target: str) -> Part:
    """Returns the part of the model to which the target of an adapter belongs."""
    if target == adapters.OUTPUT:
        return "unembed"
    return "mlp" if target.rpartition("_")[2] in MLP_PARTS else "attn"


class Shape(NamedTuple):
    """The shape of an adapter. Each compiles its own programs."""

    rank: int
    targets: tuple[str, ...]

    @classmethod
    def of(cls, message: Mapping) -> "Shape":
        """Returns the shape of a message, which is `_asdict` with a list for the tuple."""
        return cls(message["rank"], tuple(message["targets"]))

    @property
    def settings(self) -> AdapterConfig:
        """Returns the settings of such an adapter."""
        return AdapterConfig(rank=self.rank, alpha=ALPHA, targets=self.targets)


@dataclass(eq=False)
class Tenant:
    """One trained adapter."""

    shape: Shape
    seed: int
    # Arrays of the device, or of NumPy while the tenant waits on the host. The state has no base.
    state: State
    gradient: qwen.Params  # the sum since the last step
    is_resident: bool = True
    has_gradient: bool = False


@dataclass(frozen=True)
class Checkpoint:
    """A tenant on the host, as arrays of NumPy."""

    shape: Shape
    seed: int
    step: int
    params: qwen.Params
    moments: dict[str, np.ndarray] | None  # by name; None: the optimizer begins anew


@dataclass(frozen=True)
class FwdBwdResult:
    """The results of forward_backward, one array for each datum."""

    logprobs: list[np.ndarray]
    loss: float


@dataclass(eq=False)
class Tenants:
    """All tenants, and the programs that train them."""

    compute: ModelConfig
    microbatch_tokens: int
    base: BaseModel
    mesh: Mesh
    frozen: qwen.Params  # the base
    longest: int  # inputs of a datum
    most: int  # tenants
    max_rank: int
    resident: int  # tenants on the device
    by_id: OrderedDict[str, Tenant] = field(default_factory=OrderedDict)  # by their last use
    learners: dict[Shape, Learner] = field(default_factory=dict)

    @cached_property
    def base_hash(self) -> str:
        """The SHA-256 of the base."""
        assert self.base.directory is not None, "a server loads its model"
        return store.hash_of_model(self.base.directory)

    def shape_of(self, rank: int, parts: Collection[Part]) -> Shape:
        """Returns the shape that a client asks for. Raises UserError if it is not served."""
        if rank > self.max_rank:
            raise UserError(f"lora_config.rank={rank}: this server has --max-rank={self.max_rank}")
        wanted = [name for name in adapters.adaptable(self.base.model) if part_of(name) in parts]
        if not wanted:
            raise UserError(
                "lora_config trains nothing: set train_mlp, train_attn or train_unembed"
            )
        shape = Shape(rank, tuple(wanted))
        try:
            adapters.check(self.base.model, shape.settings)
        except UserError as error:
            raise UserError(f"lora_config.rank={rank} does not fit the model: {error}") from None
        return shape

    def learner(self, shape: Shape) -> Learner:
        """Returns the programs of a shape."""
        if shape not in self.learners:
            compute = replace(self.compute, adapter=shape.settings)
            self.learners[shape] = token_learner(self.base.model, compute, self.mesh)
        return self.learners[shape]

    # -- tenants ---------------------------------------------------------------------------------

    def create(self, model_id: str, shape: Shape, seed: int) -> None:
        """Adds a tenant with a new adapter. Raises UserError if there are too many."""
        learner = self.learner(shape)
        state = learner.start(learner.init_adapter(seed))
        self._add(model_id, Tenant(shape, seed, state, learner.zero_gradient()))

    def _add(self, model_id: str, tenant: Tenant) -> None:
        if len(self.by_id) >= self.most and model_id not in self.by_id:
            raise UserError(
                f"{self.most} adapters are trained already: end a session, or start the server "
                "with a larger --adapters"
            )
        self.by_id[model_id] = tenant
        self._make_room(tenant)

    def remove(self, model_id: str) -> None:
        """Forgets a tenant."""
        self.by_id.pop(model_id, None)

    def tenant(self, model_id: str) -> Tenant:
        """Returns a tenant, with its state on the device. Raises UserError if it is gone."""
        if model_id not in self.by_id:
            raise UserError(f"the model {model_id} does not exist any more: its session has ended")
        tenant = self.by_id[model_id]
        self.by_id.move_to_end(model_id)
        if not tenant.is_resident:
            learner = self.learner(tenant.shape)
            put = collectives.put_global
            tenant.state = jax.tree.map(put, tenant.state, learner.state_shardings)
            tenant.gradient = jax.tree.map(put, tenant.gradient, learner.shardings)
            tenant.is_resident = True
        self._make_room(tenant)
        return tenant

    def _make_room(self, used: Tenant) -> None:
        """Moves the least recently used states to the host."""
        resident = [tenant for tenant in self.by_id.values() if tenant.is_resident]
        for tenant in resident[: max(0, len(resident) - self.resident)]:
            if tenant is not used:
                fetched = jax.tree.map(collectives.fetch_global, (tenant.state, tenant.gradient))
                tenant.state, tenant.gradient = fetched
                tenant.is_resident = False

    # -- training --------------------------------------------------------------------------------

    def forward_backward(self, call: FwdBwd) -> FwdBwdResult:
        """Adds the gradient of a call's loss, unless it is only a forward pass."""
        tenant = self.tenant(call.model_id)
        learner = self.learner(tenant.shape)
        # Devices of the tensor axis hold the same rows. All other axes split them.
        shards = self.mesh.size // self.mesh.shape["tensor"]
        lengths = datums.row_lengths(self.longest)
        packed = datums.pack(call, lengths, self.microbatch_tokens, shards)
        loss = losses.loss_of(call.kind, call.beta)
        if call.is_forward_only:
            terms, logps = forward(learner, tenant.state, self.frozen, packed, loss)
        else:
            tenant.gradient, terms, logps = add_gradient(
                learner, tenant.state, self.frozen, packed, loss, tenant.gradient
            )
            tenant.has_gradient = True
        # The padding has terms of 0. The host sums in float64.
        return FwdBwdResult(packed.from_rows(logps), float(terms.sum(dtype=np.float64)))

    def optim_step(self, model_id: str, settings: AdamW) -> dict[str, float]:
        """Makes one optimizer step. Returns its metrics, which are finite.

        Raises UserError if the step would make the adapter or its moments infinite or NaN. The
        adapter then is as before the step, and the gradient is cleared: a gradient that is not
        finite would make every later step fail.
        """
        tenant = self.tenant(model_id)
        learner = self.learner(tenant.shape)
        # Without any gradient the step is that of a zero gradient, as in torch.
        tenant.state, stats = learner.step(tenant.state, tenant.gradient, settings)
        tenant.gradient = learner.zero_gradient()
        tenant.has_gradient = False
        norms = {name: float(value) for name, value in jax.device_get(stats).items()}
        if not all(map(math.isfinite, norms.values())):
            raise UserError(not_finite_step(settings, norms["grad_norm"]))
        # The SDK reads the reduction over chunks from a metric's name, and raises for a name
        # without one.
        return {f"{name}:mean": value for name, value in norms.items()}

    # -- checkpoints -----------------------------------------------------------------------------

    def fetch(self, model_id: str, has_optimizer: bool) -> Checkpoint:
        """Copies a tenant to the host, with or without the state of its optimizer."""
        tenant = self.tenant(model_id)
        moments = None
        if has_optimizer:
            moments = {}
            trees = cast(Moments, tenant.state.opt_state)
            for prefix, tree in zip(MOMENTS, trees, strict=True):
                for name, leaf in flatten(tree).items():
                    moments[f"{prefix}.{name}"] = collectives.fetch_global(leaf)
        return Checkpoint(
            shape=tenant.shape,
            seed=tenant.seed,
            step=int(collectives.fetch_global(tenant.state.step)),
            params=jax.tree.map(collectives.fetch_global, tenant.state.params),
            moments=moments,
        )

    def write(self, checkpoint: Checkpoint, directory: Path, base_name: str) -> None:
        """Writes the files of a checkpoint into an existing directory. Uses no device."""
        peft.write(
            directory,
            self.base.model,
            checkpoint.shape.settings,
            checkpoint.params,
            base=base_name,
            dtype="float32",
        )
        if checkpoint.moments is not None:
            store.write_moments(directory, checkpoint.moments)

    def read(self, record: store.Record, directory: Path, has_optimizer: bool) -> Checkpoint:
        """Reads a checkpoint. Uses no device.

        Without the optimizer, the moments and the step count begin at 0. Raises UserError if the
        checkpoint is damaged or of another base.
        """
        shape, params = self.read_adapter(record, directory)
        moments = None
        if has_optimizer:
            moments = store.read_moments(directory)
            check_moments(moments, flatten(params))
        step = record.step if has_optimizer else 0
        return Checkpoint(shape, record.seed, step, params, moments)

    def load(self, model_id: str, checkpoint: Checkpoint) -> None:
        """Replaces or adds a tenant with a checkpoint.

        Raises UserError if the adapter is not finite in the type that computes.
        """
        learner = self.learner(checkpoint.shape)
        check_finite(checkpoint.params, jnp.dtype(self.compute.dtype))
        params = jax.tree.map(collectives.put_global, checkpoint.params, learner.shardings)
        state = learner.start(params)
        if checkpoint.moments is not None:
            mu, nu = (put_moments(checkpoint.moments, name, learner) for name in MOMENTS)
            step = collectives.put_global(np.int32(checkpoint.step), learner.replicated)
            state = replace(state, opt_state=Moments(mu, nu), step=step)
        gradient = learner.zero_gradient()
        self._add(model_id, Tenant(checkpoint.shape, checkpoint.seed, state, gradient))

    def read_adapter(self, record: store.Record, directory: Path) -> tuple[Shape, qwen.Params]:
        """Returns the adapter of a checkpoint as arrays of NumPy.

        Raises UserError if the adapter is damaged or of another base.
        """
        self.check_base(record)
        if record.digest and store.digest_of(directory / peft.WEIGHTS) != record.digest:
            raise UserError(
                f"{record.path}: {peft.WEIGHTS} was changed or damaged after it was saved: load "
                "another checkpoint"
            )
        shape = Shape(record.rank, record.targets)
        return shape, peft.load_to_host(directory, self.base.model, shape.settings)

    def check_base(self, record: store.Record) -> None:
        """Raises UserError if a checkpoint has another base model."""
        if record.base_hash != self.base_hash:
            raise UserError(
                f"{record.path} is an adapter of {record.base_model} with other weights than this "
                "server's: start the server with that model"
            )


def add_gradient(
    learner: Learner,
    state: State,
    base: qwen.Params,
    packed: datums.Packed,
    loss: Partial,
    gradient: qwen.Params,
) -> tuple[qwen.Params, np.ndarray, np.ndarray]:
    """Adds the gradient of a call's loss to `gradient`, which is as it was if this fails.

    Returns the sum, the loss terms f32[M, B, T] and the log-probs f32[M, B, T, K]. The terms of a
    prefix count once for its row.
    """
    batches, counts = learner.put_batches([packed.batch], [packed.microbatches])
    total, _, [rows] = learner.gradient_with_rows(
        replace(state, base=base),
        batches,
        counts,
        [packed.layout],
        learner.put_loss(loss),
        into=gradient,
        keeps_into=True,
    )
    # Read the results first: an error of the device shows here, before the caller's state changes.
    terms, logps = (collectives.fetch_global(rows[name]) for name in ("terms", "logps"))
    return total, terms, logps


def forward(
    learner: Learner, state: State, base: qwen.Params, packed: datums.Packed, loss: Partial
) -> tuple[np.ndarray, np.ndarray]:
    """Returns loss terms and log-probs as `add_gradient` does, without a gradient."""
    batches, counts = learner.put_batches([packed.batch], [packed.microbatches])
    weights = learner.weights(replace(state, base=base))
    scores = learner.score(weights, batches, counts, [packed.layout])
    [terms] = learner.loss_terms(scores, batches, learner.put_loss(loss))
    return collectives.fetch_global(terms), collectives.fetch_global(scores[0])


def not_finite_step(settings: AdamW, grad_norm: float) -> str:
    """Returns why an optimizer step was refused."""
    used = ", ".join(f"{name}={value:g}" for name, value in settings._asdict().items())
    return (
        f"optim_step: the step with {used} and a gradient of norm {grad_norm:g} makes the adapter "
        "or its moments infinite or NaN. The adapter is as before the step, and the gradient is "
        "cleared: lower learning_rate, or the weights and advantages of the data"
    )


def check_finite(params: qwen.Params, dtype: DTypeLike) -> None:
    """Raises UserError unless all values of an adapter on the host are finite in `dtype`."""
    for leaf in jax.tree.leaves(params):
        with np.errstate(over="ignore"):
            is_finite = np.isfinite(leaf.astype(dtype).astype(np.float32)).all()
        if not is_finite:
            raise UserError(adapters.not_finite_message(dtype))


def check_moments(moments: Mapping[str, np.ndarray], factors: Mapping[str, np.ndarray]) -> None:
    """Raises UserError unless a checkpoint has finite moments of every factor, by name."""
    for prefix, (name, factor) in itertools.product(MOMENTS, factors.items()):
        moment = moments.get(f"{prefix}.{name}")
        if moment is None:
            problem = "is missing"
        elif moment.shape != factor.shape or moment.dtype != np.float32:
            problem = f"is {moment.dtype}{list(moment.shape)}, not float32{list(factor.shape)}"
        elif not np.isfinite(moment).all():
            problem = "has values that are not finite"
        else:
            continue
        raise UserError(f"{store.OPTIMIZER}: {prefix}.{name} {problem}: the checkpoint is damaged")


def put_moments(moments: Mapping[str, np.ndarray], prefix: str, learner: Learner) -> qwen.Params:
    """Returns the moments of a checkpoint on the mesh."""
    names = flatten(learner.shardings)
    return unflatten(
        {
            name: collectives.put_global(moments[f"{prefix}.{name}"], sharding)
            for name, sharding in names.items()
        }
    )
