"""jzero's engine against the interface that JetStream's package defines for engines.

`.ci/jetstream` runs this file, and the test of JetStream's orchestrator and gRPC server in
tests/commands/test_serve.py, in a venv with the package.
"""

import inspect
import os

import jax
import pytest
import reference
from jax.sharding import NamedSharding, PartitionSpec

from jzero.config import RolloutConfig
from jzero.decoder.engine import Engine
from jzero.model import tokenizer
from jzero.serving.jetstream import JetStreamEngine
from jzero.sharding.mesh import make_mesh, param_shardings

if os.environ.get("JZERO_NEEDS_JETSTREAM"):
    from jetstream.engine import engine_api
else:
    engine_api = pytest.importorskip("jetstream.engine.engine_api")

ABSTRACT = sorted(engine_api.Engine.__abstractmethods__)
METHODS = [name for name in ABSTRACT if not isinstance(vars(engine_api.Engine)[name], property)]


def parameters(method: object) -> list[tuple[str, object, object]]:
    """Returns name, kind and default of every parameter, without self."""
    signature = inspect.signature(method)  # pyright: ignore[reportArgumentType]
    found = [(p.name, p.kind, p.default) for p in signature.parameters.values()]
    return found[1:]


def test_the_interface_has_the_methods_that_these_tests_know() -> None:
    assert set(METHODS) >= {"prefill", "insert", "generate", "load_params", "init_decode_state"}
    assert set(ABSTRACT) - set(METHODS) >= {"max_concurrent_decodes", "mesh", "samples_per_slot"}


@pytest.mark.parametrize("name", [*METHODS, "build_tokenizer"])
def test_a_jetstream_method_has_the_parameters_of_the_interface(name: str) -> None:
    ours = parameters(getattr(JetStreamEngine, name))

    assert ours == parameters(getattr(engine_api.Engine, name))


def test_jetstream_finds_every_property_of_the_interface() -> None:
    engine = make_engine()

    for name in set(ABSTRACT) - set(METHODS):
        assert not inspect.ismethod(getattr(engine, name)), name
    assert isinstance(engine.mesh, jax.sharding.Mesh)
    assert engine.max_concurrent_decodes == 4
    assert engine.samples_per_slot == 1
    assert engine.colocated_cpus is None


def test_the_jetstream_engine_is_registered_as_an_engine_of_the_package() -> None:
    engine_api.Engine.register(JetStreamEngine)

    assert isinstance(make_engine(), engine_api.Engine)


def make_engine() -> JetStreamEngine:
    model = reference.MODEL
    mesh = make_mesh(jax.devices()[:1], {"slots": 1, "tensor": 1})
    settings = RolloutConfig(
        num_slots=4, page_size=8, max_prompt_tokens=16, max_new_tokens=16, num_pages=32
    )
    text_tokenizer = tokenizer.load("")
    engine = Engine(model, settings, mesh, (0,), "float32")
    params = engine.load_params(
        reference.random_params(model), param_shardings(engine.model, engine.mesh)
    )
    seed = jax.device_put(jax.random.key(0), NamedSharding(mesh, PartitionSpec()))
    return JetStreamEngine(engine, text_tokenizer, params, seed)
