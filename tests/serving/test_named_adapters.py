"""`jzero serve --adapter NAME=DIR`: requests choose among adapters, and one batch has them all."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import openai
import pytest
import servers
from servers import Alone, free_port, save_model, server_process, wait_until_healthy

from jzero import cli, serve
from jzero.commands import evaluate
from jzero.config import AdapterConfig
from jzero.errors import UserError
from jzero.model import adapters, huggingface, peft, qwen
from jzero.workers.pool import Pool

pytestmark = pytest.mark.usefixtures("quick_compilation")

PROMPT = "3 + 4 ="
SHAPES = {
    "large": AdapterConfig(rank=6, alpha=12.0),
    "small": AdapterConfig(rank=2, alpha=3.0, targets=("q", "down")),
}


def random_adapter(model: qwen.QwenConfig, settings: AdapterConfig) -> qwen.Params:
    rng = np.random.default_rng(settings.rank)
    shapes = adapters.abstract(model, settings)["layers"]
    return {
        "layers": {
            name: {
                factor: jnp.asarray(0.3 * rng.standard_normal(leaf.shape), jnp.float32)
                for factor, leaf in pair.items()
            }
            for name, pair in shapes.items()
        }
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny model, with adapters next to it."""
    path = tmp_path_factory.mktemp("named") / "model"
    save_model(path)
    config, _ = huggingface.load_config(path)
    for name, settings in SHAPES.items():
        factors = random_adapter(config, settings)
        peft.save(path.parent / name, config, settings, factors, base=str(path), dtype="float32")
    return path


def alone(model: Path, adapter: str) -> Alone:
    """Returns the model in this process, with one adapter or without."""
    values = cli.parse_settings(evaluate.defaults(), servers.SETTINGS)
    values.model.path = str(model)
    values.model.adapter.path = adapter
    sampler, params = evaluate.load(values, Pool(0))
    return Alone(sampler.engine, sampler.tokenizer, params, (0, 0))


@pytest.fixture(scope="module")
def client(model: Path, environment: dict[str, str]) -> Iterator[openai.OpenAI]:
    port = free_port()
    flags = [f"--adapter={name}={model.parent / name}" for name in SHAPES]
    arguments = [f"--port={port}", "--served-model-name=base", *flags]
    with server_process(str(model), environment, *arguments) as server:
        wait_until_healthy(server, f"http://127.0.0.1:{port}")
        url = f"http://127.0.0.1:{port}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as openai_client:
            yield openai_client


def test_every_name_answers_with_its_weights_in_one_batch(client, model) -> None:
    paths = {"base": "", **{name: str(model.parent / name) for name in SHAPES}}
    expected = {name: alone(model, path).complete(PROMPT, 24) for name, path in paths.items()}
    assert len({sequence.turn_text for sequence in expected.values()}) == 3

    def ask(name: str):
        options = {"temperature": 0, "max_tokens": 24, "logprobs": 2}
        return client.completions.create(model=name, prompt=PROMPT, **options)

    names = [*paths] * 3
    with ThreadPoolExecutor(len(names)) as threads:
        answers = list(threads.map(ask, names))

    for name, answer in zip(names, answers, strict=True):
        choice = answer.choices[0]
        assert answer.model == name
        assert choice.text == expected[name].turn_text, name
        # The scores of the alternatives come from the scorer, with the same adapter.
        np.testing.assert_allclose(
            choice.logprobs.token_logprobs, expected[name].new_logps, atol=1e-4
        )


def test_the_names_are_listed_and_others_are_not_found(client) -> None:
    listed = client.models.list().data
    assert [item.id for item in listed] == ["base", *SHAPES]
    assert [getattr(item, "parent", None) for item in listed] == [None, "base", "base"]
    with pytest.raises(openai.NotFoundError, match="only base, large, small"):
        client.completions.create(model="other", prompt=PROMPT)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--served-model-name a --adapter a=x", "the name of the base"),
        ("--adapter a=x --jetstream 9000", "name no model"),
        ("--adapter a=x --config.model.adapter.path=y", "remove it"),
    ],
)
def test_what_cannot_be_with_names_is_refused(model: Path, flags: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        serve.parse([str(model), *flags.split()])
