"""Downloads from the Hugging Face hub that end, one way or the other."""

from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download

SECONDS = 10  # without an answer, until the hub counts as unreachable


def download(name: str, patterns: Sequence[str]) -> Path:
    """The local copy of a hub repository's files; what is in the cache serves when the hub is out of reach.
    Raises OSError with the reason when neither has it."""
    try:
        HfApi().model_info(name, timeout=SECONDS)  # snapshot_download asks the same first, but waits without end
    except Exception as error:  # whatever the network and the hub's client come up with
        try:
            return Path(snapshot_download(name, allow_patterns=list(patterns), local_files_only=True))
        except OSError:
            reason = str(error).strip().split("\n")[0] or type(error).__name__
            raise OSError(reason) from error
    return Path(snapshot_download(name, allow_patterns=list(patterns), etag_timeout=SECONDS))
