"""Downloads from the Hugging Face hub that end, one way or the other."""

from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download

from jzero.errors import UserError

SECONDS = 10  # without an answer, until the hub counts as unreachable


def download(name: str, patterns: Sequence[str]) -> Path:
    """The local copy of a repository's files, also of the cache; OSError with the reason where there is none."""
    try:
        HfApi().model_info(
            name, timeout=SECONDS
        )  # snapshot_download asks the same first, but waits without end
    except Exception as error:  # whatever the network and the hub's client come up with
        try:
            return Path(
                snapshot_download(name, allow_patterns=list(patterns), local_files_only=True)
            )
        except OSError:
            reason = str(error).strip().split("\n")[0] or type(error).__name__
            raise OSError(reason) from error
    return Path(snapshot_download(name, allow_patterns=list(patterns), etag_timeout=SECONDS))


def push(directory: Path, name: str, branch: str | None, replace: bool) -> str:
    """The address of the model that now holds the directory's files, and no weights beside them."""
    api = HfApi()
    try:
        api.create_repo(name, exist_ok=True)
        taken = (
            branch
            and branch != "main"
            and branch in [each.name for each in api.list_repo_refs(name).branches]
        )
        if branch and not taken:
            api.create_branch(name, branch=branch, exist_ok=True)
        if replace or not taken:
            old = ["*.safetensors", "*.index.json"]
            return api.upload_folder(
                repo_id=name, folder_path=directory, revision=branch, delete_patterns=old
            )
    except Exception as error:  # whatever the network and the hub's client come up with
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise UserError(
            f"--push-to-hub {name}: {reason}. {directory} is whole, `hf upload` pushes it"
        ) from error
    raise UserError(f"--revision={branch} exists in {name}: give another, or --force to push to it")
