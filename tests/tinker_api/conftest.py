"""One server for the tests of this folder."""

from collections.abc import Iterator

import pytest
import servers
from tinker_client import OWNERS, Client, load_service, serving

from jzero.tinker.service import Service
from jzero.tinker.sessions import Keys


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return servers.save_model(tmp_path_factory.mktemp("tinker") / "model")


@pytest.fixture(scope="session")
def service(model: str, tmp_path_factory: pytest.TempPathFactory) -> Service:
    return load_service(model, tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="session")
def url(service: Service) -> Iterator[str]:
    with serving(service, Keys(OWNERS)) as address:
        yield address


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    """A client with a model of rank 4. Its session ends with the test."""
    opened = Client(url).begin()
    yield opened
    opened.http.post(f"sessions/{opened.session}/finish", json={})
