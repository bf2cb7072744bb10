"""Opens a model that only samples, for every command, server and job that trains nothing.

    decoder = open_decoder(settings, pool)      a decoder on the attached devices, without weights
    sampler, weights = load(settings, pool)     the same with the weights of a model
    load_with_adapters(settings, named, pool)   one base, and several adapters of it

A decoder has as many pages as fit into memory.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import jax

from jzero import config
from jzero.blueprint import (
    Blueprint,
    attached_topology,
    describe,
    models_of,
    spec_of_decoder,
    without_training,
)
from jzero.errors import UserError
from jzero.hosts import collectives
from jzero.model import adapters, peft, qwen
from jzero.model.base_model import BaseModel, read_base_model
from jzero.planning.fitting import set_cpu_devices
from jzero.planning.host_memory import check_host_memory, parts_of_engine
from jzero.planning.kv_pool import room_of_decoder, with_full_pool, with_pages
from jzero.rollout.sampler import Sampler, make_sampler
from jzero.service import weights
from jzero.service.resolve import check_context, with_given_adapter
from jzero.types import Problem
from jzero.workers.pool import Pool


@dataclass(frozen=True)
class OpenDecoder:
    """A decoder on the attached devices, without weights."""

    settings: config.Config  # with the rank and the targets of a given adapter
    base: BaseModel
    blueprint: Blueprint[None]
    sampler: Sampler
    publish: Callable[[qwen.Params], qwen.Params]  # the parameters of a file -> the decoder's

    @property
    def directory(self) -> Path:
        """The directory with the model's weights."""
        assert self.base.directory, "settings.model.path is empty"
        return self.base.directory

    def load_model(self) -> qwen.Params:
        """Loads the model as a training run has it: in fp32, or as the frozen base of adapters."""
        return weights.load(self.blueprint, self.directory)

    def load_adapter(self) -> qwen.Params:
        """Loads the factors of the adapter at `settings.model.adapter.path`, in float32.

        Raises UserError if they are not finite in the decoder's type.
        """
        adapter = self.settings.model.adapter
        directory = peft.resolve(adapter.path)
        factors = weights.load_adapter(self.blueprint, adapter, directory, self.directory)
        # The file is finite in float32, and the decoder computes in another type.
        dtype = self.settings.model.dtype
        in_dtype = jax.tree.map(lambda leaf: leaf.astype(dtype), factors)
        if not collectives.fetch_global(jax.jit(adapters.all_finite)(in_dtype)):
            raise UserError(f"--adapter {adapter.path}: {adapters.not_finite_message(dtype)}")
        return factors

    def load_weights(self) -> qwen.Params:
        """Loads the decoder's weights: a model, or a base with an adapter."""
        adapter = self.settings.model.adapter
        if not adapter.rank:
            return self.publish(self.load_model())
        # As in training: the decoder multiplies by a frozen base and by the factors of the adapter.
        factors = self.load_adapter()
        return self.publish(adapters.join(self.load_model(), factors, adapter.scale))


def open_decoder(
    settings: config.Config,
    pool: Pool,
    has_full_cache: bool = False,
    problems: Sequence[Problem] = (),
    *,
    caches_prefixes: bool = True,
) -> OpenDecoder:
    """Opens a decoder for the model at `settings.model.path`. Reads no weights.

    The KV cache has as many pages as fit into memory, or, with `has_full_cache`, enough for every
    slot at full length.

    Args:
        settings: of a run, an evaluation or a server.
        pool: grades responses.
        has_full_cache: whether no sequence is ever preempted.
        problems: all that will be decoded, if that is known. The KV cache is no larger than they
            need.
        caches_prefixes: whether rollout.prefix_cache=auto is on, because nothing is trained on the
            samples.

    Raises:
        UserError: the settings do not fit the model, or the model does not fit the machine.
    """
    set_cpu_devices(settings.model.path)
    # Check memory before the weights are read: a process that runs out of memory is killed without
    # a message.
    check_host_memory(settings, parts_of_engine(settings.rollout))
    base = read_base_model(settings.model, settings.rollout.draft)
    check_context(settings, base)
    spec = spec_of_decoder(
        settings.model, settings.mesh, settings.rollout, settings.algorithm, settings.eval
    )
    if caches_prefixes:
        spec = without_training(spec)
    blueprint = describe(spec, models_of(base), attached_topology())
    if has_full_cache:
        blueprint = with_full_pool(blueprint)
    longest = 0
    if problems:
        encoder = Sampler(blueprint.decoder, base.tokenizer, pool, settings.task)
        encoded = encoder.encode_problems(problems)
        prompt = max((len(item.prompt_tokens) for item in encoded), default=0)
        shorter = settings.rollout.max_prompt_tokens - prompt
        longest = settings.eval.longest_episode(settings.rollout) - shorter
    room = room_of_decoder(settings.memory, blueprint.decoder, settings.model)
    blueprint = with_pages(blueprint, room, longest=longest)
    sampler = make_sampler(blueprint.decoder, base, settings.task, pool)
    return OpenDecoder(settings, base, blueprint, sampler, blueprint.publisher())


def load(
    settings: config.Config,
    pool: Pool,
    has_full_cache: bool = False,
    problems: Sequence[Problem] = (),
) -> tuple[Sampler, qwen.Params]:
    """Returns a sampler for the model at `settings.model.path`, and its decoder weights.

    With an adapter at `settings.model.adapter.path` the weights are a base with an adapter. The
    arguments and errors are those of `open_decoder`.
    """
    check_given_model(settings.model)
    decoder = open_decoder(with_given_adapter(settings), pool, has_full_cache, problems)
    return decoder.sampler, decoder.load_weights()


def check_given_model(model: config.ModelConfig) -> None:
    """Raises UserError for settings that only a training run has."""
    if model.adapter.rank and not model.adapter.path:
        raise UserError(
            f"model.adapter.rank={model.adapter.rank} is a setting of training runs: "
            "remove it. An exported model has its adapter merged; --adapter loads one that is "
            "not merged"
        )
    if model.is_base_quantized and not model.adapter.path:
        raise UserError(
            f"model.base={model.base} applies to the frozen model under an adapter: give "
            "--adapter, or remove it"
        )


class NamedAdapter(NamedTuple):
    """An adapter in the decoder's layout."""

    name: str
    settings: config.AdapterConfig  # with its path
    factors: qwen.Params


class BaseWithAdapters(NamedTuple):
    """A decoder, the weights of a frozen base, and several adapters of it."""

    sampler: Sampler
    base: qwen.Params
    adapters: Iterator[NamedAdapter]  # reads an adapter when it is asked for


def load_with_adapters(
    settings: config.Config, named: Mapping[str, str], pool: Pool, problems: Sequence[Problem] = ()
) -> BaseWithAdapters:
    """Loads a model once, and its adapters one after the other.

    named: the directory or hub id of every adapter. problems: as in `open_decoder`. Raises
    UserError if an adapter does not fit the model; the files of all adapters are looked for before
    the model is loaded.
    """
    directories = {name: peft.resolve(path) for name, path in named.items()}
    first, *_ = named.values()
    # With the settings of an adapter, the decoder has a frozen base without fused weights, and room
    # for an adapter.
    model = replace(settings.model, adapter=config.AdapterConfig(path=first))
    check_given_model(model)
    settings = with_given_adapter(replace(settings, model=model))
    decoder = open_decoder(settings, pool, problems=problems)
    base = decoder.base
    # The factors go to the decoder as they are, in its type.
    on_decoder = replace(decoder.blueprint, mesh=decoder.blueprint.decoder_mesh)
    shapes = {name: peft.read_settings(path, base.model) for name, path in directories.items()}

    def read_all() -> Iterator[NamedAdapter]:
        for name, adapter in shapes.items():
            dtype = settings.model.dtype
            factors = weights.load_adapter(
                on_decoder, adapter, directories[name], base.directory, dtype
            )
            yield NamedAdapter(name, replace(adapter, path=named[name]), factors)

    return BaseWithAdapters(decoder.sampler, decoder.publish(decoder.load_model()), read_all())
