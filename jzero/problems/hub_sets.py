"""Data sets of the Hugging Face hub, and requests to the hub that end in time.

    splits = load_from_hub("openai/gsm8k", "main", revision=None)
    info = ask_hub(lambda: HfApi().model_info("Qwen/Qwen2.5-0.5B"))

The hub's own client repeats a request for half a minute if nothing answers. A hub that does not
answer one small request within HUB_SECONDS counts as unreachable here, and its cached copies are
used without asking it again. `datasets` and `huggingface_hub` are slow to import, so functions
import them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from jzero.errors import UserError

if TYPE_CHECKING:
    import datasets

T = TypeVar("T")

HUB_SECONDS = 10.0


def ask_hub(request: Callable[[], T]) -> T:
    """Returns the result of one request to the hub.

    Raises what the request raises, and TimeoutError after HUB_SECONDS. The deadline includes the
    lookup of the host's name, for which the hub's client has none.
    """
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(request())
        except Exception as error:
            answer.set_exception(error)

    # A daemon: the process may end while the lookup still waits.
    threading.Thread(target=run, daemon=True).start()
    try:
        return answer.result(timeout=HUB_SECONDS)
    except TimeoutError as error:
        # The request may have raised a TimeoutError with a reason.
        raise TimeoutError(str(error) or f"timed out after {HUB_SECONDS:g} s") from error


def load_from_hub(
    repository: str, config_name: str | None, revision: str | None
) -> datasets.Dataset | datasets.DatasetDict:
    """Returns a data set of the hub: its cached copy if the hub is unreachable.

    Raises UserError if the hub is unreachable and there is no copy, and the errors of `datasets`.
    """
    import datasets
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    def load() -> datasets.Dataset | datasets.DatasetDict:
        return datasets.load_dataset(repository, config_name, revision=revision)

    try:
        ask_hub(lambda: HfApi().dataset_info(repository, revision=revision))
    except HfHubHTTPError:
        # The hub answers: `datasets` reports what is wrong with the name or the token.
        return load()
    except Exception as error:  # anything that the network and the hub's client come up with
        reason = str(error).strip().split("\n")[0] or type(error).__name__
    else:
        return load()

    with offline():
        try:
            return load()
        except Exception:
            raise UserError(
                f"data {repository}: the hub is unreachable ({reason}), and there is no local "
                "copy: give a file or a directory, such as one of `save_to_disk`, or load the data "
                "set once where there is a network"
            ) from None


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Makes the libraries of the hub use local copies only, as HF_HUB_OFFLINE=1 does."""
    from datasets import config
    from huggingface_hub import constants

    # The libraries read the environment variable once, when they are imported.
    before = config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    try:
        config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
        yield
    finally:
        config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before
