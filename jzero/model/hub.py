"""Downloads from the Hugging Face hub and uploads to it, with time-outs and readable errors."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import CommitOperationAdd, HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError

from jzero.errors import UserError
from jzero.files import is_hub_id, split_revision
from jzero.problems.hub_sets import HUB_SECONDS, ask_hub
from jzero.problems.problem_sets import FILE_TYPES

REFUSALS = (400, 401, 403, 404, 422)  # HTTP statuses of a wrong token or name
OLD_WEIGHTS = ["*.safetensors", "*.index.json"]  # deleted by an upload, which may have fewer shards


def download(name: str, patterns: Sequence[str]) -> Path:
    """Returns the local copy of the files of a repository that match `patterns`.

    `name` is "USER/NAME" or "USER/NAME#REVISION". If the hub is unreachable, files in the cache are
    used. Raises OSError with the reason if there is no copy.
    """
    name, revision = split_revision(name)
    # snapshot_download sends the same request first, but without a time-out.
    try:
        ask_hub(lambda: HfApi().model_info(name, revision=revision, timeout=HUB_SECONDS))
    except Exception as error:  # anything that the network and the hub's client come up with
        return cached_copy(name, patterns, revision, reason=first_line(error))
    try:
        copy = snapshot_download(
            name,
            revision=revision,
            allow_patterns=list(patterns),
            etag_timeout=HUB_SECONDS,
        )
    except Exception as error:
        raise OSError(first_line(error)) from error
    return Path(copy)


def cached_copy(name: str, patterns: Sequence[str], revision: str | None, reason: str) -> Path:
    """Returns the copy in the cache; raises OSError with `reason` if there is none."""
    try:
        copy = snapshot_download(
            name, revision=revision, allow_patterns=list(patterns), local_files_only=True
        )
    except (OSError, ValueError) as error:  # ValueError: the name is no id of a repository
        raise OSError(reason) from error
    return Path(copy)


class Target(NamedTuple):
    """Where a model is uploaded on the hub."""

    name: str  # "user/name" of a model, created if it does not exist
    branch: str = ""  # created if it does not exist; empty: main
    is_private: bool = True  # create the model as private, and refuse a public one


class Refused(Exception):
    """An upload was refused, for a reason that another attempt does not change."""


class PublicRepository(Refused):
    """The repository is public, and the target is private."""


class BranchExists(Refused):
    """The branch exists, and may not be replaced."""


def push(
    directory: Path,
    target: Target,
    replace: bool,
    before_branch: Callable[[], None] | None = None,
) -> str:
    """Uploads the files of a directory to a model repository in one commit; returns its address.

    Weights that were on the branch before are deleted. The main branch is always replaced.

    Args:
        directory: the directory of the files.
        target: the repository and its branch.
        replace: whether an existing branch is replaced.
        before_branch: called before a branch is created, after checking that its name is free.

    Raises:
        Refused: the repository or the branch may not be used, or the hub refuses the token.
        OSError: the upload failed, with the reason in one line.
    """
    api = HfApi()
    name, branch = target.name, target.branch or "main"
    try:
        api.create_repo(name, private=target.is_private, exist_ok=True)
        # An existing repository keeps its visibility.
        if target.is_private and not api.model_info(name, timeout=HUB_SECONDS).private:
            raise PublicRepository(f"{name} is public")
        if branch != "main":
            # Only main is replaced without `replace`; another branch must be free.
            is_taken = branch in branches_of(api, name)
            if is_taken and not replace:
                raise BranchExists(f"the branch {branch} of {name} exists")
            if not is_taken:
                if before_branch is not None:
                    before_branch()
                api.create_branch(name, branch=branch, exist_ok=True)
        # One commit uploads the new files and deletes old shards.
        return api.upload_folder(
            repo_id=name, folder_path=directory, revision=branch, delete_patterns=OLD_WEIGHTS
        )
    except Refused:
        raise
    except Exception as error:  # anything that the network and the hub's client come up with
        kind = Refused if is_refusal(error) else OSError
        raise kind(first_line(error)) from error


def is_refusal(error: Exception) -> bool:
    """Returns whether the hub answered and refused the request, as for a wrong token or name."""
    return isinstance(error, HfHubHTTPError) and error.response.status_code in REFUSALS


def push_dataset(files: Mapping[str, Path | bytes], name: str, private: bool, replace: bool) -> str:
    """Uploads files to a data set on the hub in one commit, and returns its address.

    Args:
        files: the path in the data set -> the local file or the content.
        name: "user/name" of the data set, which is created if it does not exist.
        private: whether a new data set is private.
        replace: whether existing files of the same names are replaced.

    Raises:
        UserError: the upload failed, or such files exist and `replace` is false.
    """
    api = HfApi()
    try:
        api.create_repo(name, repo_type="dataset", private=private, exist_ok=True)
        # Check for existing files before uploading any.
        existing = set(api.list_repo_files(name, repo_type="dataset"))
        taken = sorted(existing & files.keys())
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
    """Returns whether a name is an id of the hub, like Qwen/Qwen2.5-3B, and not a path."""
    return is_hub_id(name) and not name.endswith(FILE_TYPES) and not os.path.exists(name)


def public_name(name: str) -> str:
    """Returns an id of the hub unchanged, and only the last part of a path."""
    return name if "/" not in name or is_on_hub(name) else Path(name).name


def commit_of(directory: Path | None) -> str:
    """Returns the commit of a local copy from `download`, and "" for any other directory."""
    # The hub's cache keeps every copy in a directory snapshots/COMMIT.
    is_copy = directory is not None and directory.parent.name == "snapshots"
    return directory.name if directory is not None and is_copy else ""


def branches_of(api: HfApi, name: str) -> list[str]:
    return [branch.name for branch in api.list_repo_refs(name).branches]


def first_line(error: Exception) -> str:
    """Returns the first line of an error's message, or the name of its type."""
    return str(error).strip().split("\n")[0] or type(error).__name__
