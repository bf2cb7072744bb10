"""Downloads from the Hugging Face hub and uploads to it, with an end and a reason in every case."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, snapshot_download

from jzero.config.checks import is_hub_id
from jzero.errors import UserError
from jzero.tasks.problem_sets import FILE_TYPES

TIMEOUT_SECONDS = 10  # without an answer the hub counts as unreachable
OLD_WEIGHTS = ["*.safetensors", "*.index.json"]  # deleted by an upload, as shards may be fewer now


def download(name: str, patterns: Sequence[str]) -> Path:
    """Returns the local copy of the files of a repository that match `patterns`.

    Files that are in the cache count where the hub is unreachable. Raises OSError with the reason
    where there is no copy.
    """
    # snapshot_download asks the hub the same question first, but waits for an answer without end.
    try:
        HfApi().model_info(name, timeout=TIMEOUT_SECONDS)
    except Exception as error:  # anything that the network and the hub's client come up with
        return cached_copy(name, patterns, reason=first_line(error))
    try:
        copy = snapshot_download(name, allow_patterns=list(patterns), etag_timeout=TIMEOUT_SECONDS)
    except Exception as error:
        raise OSError(first_line(error)) from error
    return Path(copy)


def cached_copy(name: str, patterns: Sequence[str], reason: str) -> Path:
    """Returns the copy in the cache; raises OSError with `reason` where there is none."""
    try:
        copy = snapshot_download(name, allow_patterns=list(patterns), local_files_only=True)
    except (OSError, ValueError) as error:  # ValueError: the name is no id of a repository
        raise OSError(reason) from error
    return Path(copy)


def push(directory: Path, name: str, branch: str | None, replace: bool) -> str:
    """Uploads the files of a directory to a model repository and returns the address.

    The repository and the branch are created where they do not exist. Weights that the repository
    held before are deleted. Raises UserError where the upload fails, and where the branch exists
    and `replace` is false; the main branch is always replaced.
    """
    api = HfApi()
    try:
        api.create_repo(name, exist_ok=True)
        is_taken = bool(branch) and branch != "main" and branch in branches_of(api, name)
        if branch and not is_taken:
            api.create_branch(name, branch=branch, exist_ok=True)
        if replace or not is_taken:
            return api.upload_folder(
                repo_id=name, folder_path=directory, revision=branch, delete_patterns=OLD_WEIGHTS
            )
    except Exception as error:  # anything that the network and the hub's client come up with
        raise UserError(
            f"--push-to-hub {name}: {first_line(error)}. "
            f"{directory} is complete: upload it with `hf upload`"
        ) from error
    raise UserError(f"--revision={branch} exists in {name}: give another, or --force to push to it")


def push_dataset(files: Mapping[str, Path | bytes], name: str, private: bool, replace: bool) -> str:
    """Uploads files to a data set on the hub in one commit, and returns its address.

    Args:
        files: the path in the data set, and the local file or the content, of each.
        name: "user/name" of the data set, which is created where it does not exist.
        private: whether a data set that is created is private.
        replace: whether files of these names that are there already are replaced.

    Raises:
        UserError: the upload failed, or there are such files and `replace` is false.
    """
    api = HfApi()
    try:
        api.create_repo(name, repo_type="dataset", private=private, exist_ok=True)
        there = set(api.list_repo_files(name, repo_type="dataset"))
        taken = sorted(there & files.keys())
        if replace or not taken:
            operations = [CommitOperationAdd(path, content) for path, content in files.items()]
            commit = api.create_commit(
                name, operations, commit_message="Responses", repo_type="dataset"
            )
            return commit.commit_url
    except Exception as error:  # anything that the network and the hub's client come up with
        raise UserError(
            f"--push-to-hub {name}: {first_line(error)}. The file is complete: the same command "
            "pushes it again"
        ) from error
    raise UserError(
        f"--push-to-hub {name} has {' and '.join(taken)} already: give another name, or --force "
        "to replace"
    )


def is_on_hub(name: str) -> bool:
    """Says whether a name is an id of the hub, like Qwen/Qwen2.5-3B, and no path."""
    return is_hub_id(name) and not name.endswith(FILE_TYPES) and not os.path.exists(name)


def public_name(name: str) -> str:
    """Returns an id of the hub as it is, and the last part of a path."""
    return name if "/" not in name or is_on_hub(name) else Path(name).name


def branches_of(api: HfApi, name: str) -> list[str]:
    return [branch.name for branch in api.list_repo_refs(name).branches]


def first_line(error: Exception) -> str:
    """Returns the first line of an error's message, or the name of its type."""
    return str(error).strip().split("\n")[0] or type(error).__name__
