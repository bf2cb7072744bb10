"""Sessions of clients, who owns what, and the keys of the API."""

import hmac
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from jzero.errors import UserError
from jzero.tinker.bodies import Metadata
from jzero.tinker.commands import CommandLog, Future, TooBusyError

LOCAL = "local"  # the owner of everything on a server without keys
KEY_PREFIX = "tml-"  # the SDK refuses other keys before it sends them


@dataclass(eq=False)
class Model:
    """A training run: one adapter of a session."""

    model_id: str
    owner: str
    rank: int
    targets: tuple[str, ...]
    seed: int
    log: CommandLog
    user_metadata: Metadata | None = None
    last_request: float = field(default_factory=time.time)


@dataclass(eq=False)
class SamplerSession:
    """A sampling session: the snapshot that it samples from."""

    sampler_id: str
    owner: str
    snapshot: str  # key of the snapshot
    model_path: str | None = None
    # By seq_id: the promise of every request, and how many samples it has.
    requests: dict[int, tuple[Future, int]] = field(default_factory=dict)


@dataclass(eq=False)
class Session:
    """A client's session. Its models and samplers end with it."""

    session_id: str
    owner: str
    user_metadata: Metadata | None = None
    last_heartbeat: float = field(default_factory=time.monotonic)
    models: dict[str, Model] = field(default_factory=dict)
    samplers: dict[str, SamplerSession] = field(default_factory=dict)
    # By model_seq_id: the promise of every model that was asked for, and the model's id.
    created: dict[int, tuple[Future, str]] = field(default_factory=dict)


class Sessions:
    """All open sessions."""

    def __init__(self, most: int, seconds: float) -> None:
        self.most = most
        self.most_of_owner = most
        self.seconds = seconds
        self.by_id: dict[str, Session] = {}

    def of(self, owner: str) -> list[Session]:
        """Returns the open sessions of `owner`."""
        return [session for session in self.by_id.values() if session.owner == owner]

    def create(self, owner: str, user_metadata: Metadata | None) -> Session:
        """Returns a new session. Raises TooBusyError if there are too many, or of one owner."""
        if len(self.of(owner)) >= self.most_of_owner:
            raise TooBusyError(
                f"{self.most_of_owner} sessions of this key are open: end one, or --max-sessions "
                "allows more"
            )
        if len(self.by_id) >= self.most:
            raise TooBusyError(f"{self.most} sessions are open: --max-sessions allows more")
        session = Session(str(uuid.uuid4()), owner, user_metadata)
        self.by_id[session.session_id] = session
        return session

    def find(self, owner: str, session_id: str) -> Session | None:
        """Returns a session of `owner`, and counts the call as a sign of life."""
        session = self.by_id.get(session_id)
        if session is None or session.owner != owner:
            return None
        # Any call counts, because a client in a long call may be late with its heartbeat.
        session.last_heartbeat = time.monotonic()
        return session

    def model(self, owner: str, model_id: str) -> Model | None:
        """Returns a model of `owner`."""
        session = self.find(owner, model_id.partition(":")[0])
        model = session.models.get(model_id) if session else None
        if model is not None:
            model.last_request = time.time()
        return model

    def sampler(self, owner: str, sampler_id: str) -> SamplerSession | None:
        """Returns a sampling session of `owner`."""
        session = self.find(owner, sampler_id.partition(":")[0])
        return session.samplers.get(sampler_id) if session else None

    def expired(self) -> list[Session]:
        """Returns the sessions whose clients have been silent for too long."""
        horizon = time.monotonic() - self.seconds
        return [one for one in self.by_id.values() if one.last_heartbeat < horizon]


class Keys:
    """The keys of the clients. Without any, everybody is the owner `local`."""

    def __init__(self, owners: dict[str, str]) -> None:
        """owners: key -> name."""
        self.owners = {key.encode(): name for key, name in owners.items()}

    @property
    def num_owners(self) -> int:
        """The number of names, at least 1: everybody is one owner without keys."""
        return max(1, len(set(self.owners.values())))

    def owner_of(self, key: str) -> str | None:
        """Returns the name that a key belongs to, or None if it is unknown."""
        if not self.owners:
            return LOCAL
        owner = None
        # Every key is compared, in constant time, so that the duration reveals nothing.
        for known, name in self.owners.items():
            if hmac.compare_digest(known, key.encode()):
                owner = name
        return owner


def read_keys(path: str) -> Keys:
    """Returns the keys of a file with a line `NAME KEY` for each client; no keys for "".

    Raises UserError if the file cannot be read, or has a line of another form.
    """
    if not path:
        return Keys({})
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--keys={path}: the file cannot be read ({error})") from None
    owners: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#"):
            continue
        parts = line.split()
        is_key = len(parts) == 2 and parts[1].startswith(KEY_PREFIX) and parts[1].isascii()
        if not is_key or parts[1] in owners:
            raise UserError(
                f"--keys={path}, line {number}: write NAME KEY, where every KEY is different and "
                f"begins with {KEY_PREFIX}"
            )
        # Several keys may have one name: a client can then change its key without losing its
        # checkpoints.
        owners[parts[1]] = parts[0]
    if not owners:
        raise UserError(f"--keys={path}: the file has no key: write lines of NAME KEY")
    return Keys(owners)
