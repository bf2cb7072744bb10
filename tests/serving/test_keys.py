"""The API key: where it comes from, and what a request without it meets."""

import hmac
from collections.abc import Iterator

import httpx
import pytest
from servers import Threaded, threaded_server

from jzero.errors import UserError
from jzero.serving.keys import KEY_VARIABLE, read_key
from jzero.serving.limits import Limits

KEY = "sk-a-key"
RIGHT = {"Authorization": f"Bearer {KEY}"}


def test_the_flag_comes_before_the_environment(monkeypatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert read_key(None) is None
    assert read_key("a") == "a"
    monkeypatch.setenv(KEY_VARIABLE, "b")
    assert read_key(None) == "b"
    assert read_key("a") == "a"


@pytest.mark.parametrize("key", ["", " ", "a b", "a\n", "\u00e4"])
def test_a_key_that_no_request_can_have_is_refused(monkeypatch, key) -> None:
    """An empty variable would otherwise open the server to everybody."""
    with pytest.raises(UserError, match="--api-key: the key has to be printable ASCII"):
        read_key(key)
    monkeypatch.setenv(KEY_VARIABLE, key)
    with pytest.raises(UserError, match=f"{KEY_VARIABLE}: the key has to be"):
        read_key(None)


@pytest.fixture(scope="module")
def threaded(alone) -> Iterator[Threaded]:
    with threaded_server(alone.new_server(Limits()), Limits(), key=KEY) as running:
        yield running


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": KEY},
        {"Authorization": "Bearer"},
        {"Authorization": f"Bearer {KEY}x"},
        {"Authorization": f"Bearer {KEY[:-1]}"},
        {"Authorization": f"Basic {KEY}"},
        {"Authorization": "Bearer \u00e4".encode()},
    ],
    ids=str,
)
@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions", "/health/", "/v1/nothing"])
def test_other_requests_are_refused(threaded, path, headers) -> None:
    body = b"{" if path == "/v1/completions" else None
    method = "POST" if body else "GET"
    headers = headers | {"Content-Type": "application/json"}
    answer = httpx.request(method, threaded.url + path, headers=headers, content=body)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    error = answer.json()["error"]
    assert error["code"] == "invalid_api_key" and "Authorization: Bearer KEY" in error["message"]


@pytest.mark.parametrize("host", ["a/health?", "a/health#"])
def test_a_host_does_not_make_an_address_an_open_path(threaded, host) -> None:
    assert httpx.get(f"{threaded.url}/v1/models", headers={"Host": host}).status_code == 403


def test_a_request_with_the_key_is_answered(threaded) -> None:
    assert httpx.get(f"{threaded.url}/v1/models", headers=RIGHT).status_code == 200
    lower = {"Authorization": f"bearer {KEY}"}
    assert httpx.get(f"{threaded.url}/v1/models", headers=lower).status_code == 200
    assert httpx.post(f"{threaded.url}/v1/completions", headers=RIGHT).status_code == 400


def test_health_is_open_and_says_nothing_of_the_model(threaded) -> None:
    assert threaded.is_healthy()
    assert httpx.get(f"{threaded.url}/health").json() == {"status": "ok"}


def test_keys_are_compared_in_constant_time(threaded, monkeypatch) -> None:
    """Through the library's own comparison, which a shortcut before it would spare."""
    compared: list[bytes] = []

    def compare(sent: bytes, key: bytes) -> bool:
        compared.append(sent)
        return original(sent, key)

    original = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", compare)
    for sent in ("x", KEY):
        httpx.get(f"{threaded.url}/v1/models", headers={"Authorization": f"Bearer {sent}"})
    assert compared == [b"x", KEY.encode()]
