"""The model that the tests of the server's parts share."""

import pytest
from servers import Alone, load_alone, save_model


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """A tiny model in this process. Loading it is most of the time of these tests."""
    return load_alone(save_model(tmp_path_factory.mktemp("serving") / "model"))
