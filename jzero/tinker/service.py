"""What the API's calls do, in the event loop: it checks, numbers and promises; the worker computes.

Every method takes the owner of the key and returns a JSON answer at once. It raises UserError for
a call that is not served (400), NotFoundError for what does not exist or belongs to another owner
(404), and TooBusyError for what has to come again later (429).
"""

import asyncio
import itertools
import secrets
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from jzero.errors import UserError, shown
from jzero.tinker import bodies, wire
from jzero.tinker.bodies import Metadata
from jzero.tinker.commands import (
    Command,
    CommandLog,
    Failure,
    Future,
    Futures,
    Result,
    failure_of,
)
from jzero.tinker.datums import FwdBwd, read_batch
from jzero.tinker.devices import Devices
from jzero.tinker.limits import TinkerLimits
from jzero.tinker.prompt_targets import read_targets
from jzero.tinker.sampling import BASE, GONE, Request
from jzero.tinker.sessions import Model, SamplerSession, Session, Sessions
from jzero.tinker.shares import Counts, Recent, Shares, share_of
from jzero.tinker.store import Record, Store, iso_time
from jzero.tinker.tenants import FwdBwdResult, Shape, part_of
from jzero.tinker.worker import Job, Worker
from jzero.training.optimizer import AdamW
from jzero.types import JsonValue

Answer = dict[str, JsonValue]
# The SDK submits a sample anew if its promise is gone (410), but treats 404 as fatal, so the route
# that polls has to see from the id whether an unknown promise belonged to a sample.
SAMPLE_PREFIX = "sample-"  # of the promises of samples, which a client may send anew
LINK_SECONDS = 3600  # for which the links of a download work
MOST_LINKS = 256  # of one owner; beyond it the oldest ones end
MOST_CREATED = 4096  # models that one session may ask for, in all


class NotFoundError(Exception):
    """There is no such thing, or it belongs to another key."""


@dataclass(frozen=True)
class Served:
    """The model that is served."""

    name: str  # the name that clients use
    arch: str
    stop_ids: tuple[int, ...]  # end a sample unless the request has other stops


@dataclass(frozen=True)
class Link:
    """A download that anyone with its secret may read."""

    directory: Path
    expires: float


class Service:
    """The state of the server that is not on the device."""

    def __init__(
        self,
        served: Served,
        devices: Devices,
        worker: Worker,
        store: Store,
        limits: TinkerLimits,
    ) -> None:
        self.served = served
        self.devices = devices
        # Used here only for what touches no device.
        self.tenants = devices.tenants
        self.sampling = devices.sampling
        self.worker = worker
        self.store = store
        self.limits = limits
        self.sessions = Sessions(limits.max_sessions, limits.session_seconds)
        self.futures = Futures(limits.max_futures, limits.max_result_bytes, limits.result_seconds)
        self.shares = Shares(limits)
        self.snapshots: Recent[None] = Recent()  # by the id of their sampling session
        self.samplers: Recent[Session] = Recent()  # the sessions of sampling sessions, by their id
        self.links: Recent[Link] = Recent()  # by secret
        self.sampling.most_reserved = limits.max_waiting_sequences
        # Requests that are answered, and bytes that arrive or wait.
        self.requests = Counts("requests are answered", "max_requests", self.shares)
        self.held = Counts("bytes of bodies and commands wait", "max_held_bytes", self.shares)
        self.num_samples = itertools.count()
        self.loop: asyncio.AbstractEventLoop | None = None  # set at the first call

    def divide(self, num_owners: int) -> None:
        """Gives each of the owners an equal share of every limit."""
        self.shares.num_owners = num_owners
        self.sampling.most_reserved = self.shares.of("max_waiting_sequences")
        self.sessions.most_of_owner = self.shares.of("max_sessions")
        self.futures.most = self.shares.of("max_futures")
        self.futures.most_bytes = self.shares.of("max_result_bytes")

    # -- results of the worker -------------------------------------------------------------------

    def post(self, call: Callable[[], None]) -> None:
        """Runs a call in the event loop. For the worker's thread."""
        assert self.loop is not None, "a call comes before any result"
        # If the server has ended, no request waits for the result.
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(call)

    def finish(self, future: Future, result: Result) -> None:
        """Sets a result from the worker's thread."""
        self.post(lambda: self.futures.finish(future, result))

    def job(
        self,
        model_id: str,
        future: Future,
        compute: Callable[[], Result],
        undo: Callable[[], None] = lambda: None,
    ) -> Job:
        """Returns a job that computes the result of a promise. `undo` runs here if it fails."""

        def run() -> None:
            self.finish(future, compute())

        def fail(error: BaseException) -> None:
            def fail_here() -> None:
                undo()
                self.futures.finish(future, failure_of(error))

            # The service's state belongs to the event loop, and jobs fail in the worker's thread.
            self.post(fail_here)

        return Job(model_id, run, fail, future.owner)

    # -- sessions --------------------------------------------------------------------------------

    def create_session(self, owner: str, body: bodies.CreateSession) -> Answer:
        session = self.sessions.create(owner, body.user_metadata)
        return {"type": "create_session", "session_id": session.session_id}

    def session(self, owner: str, session_id: str) -> Session:
        """Returns an open session of `owner`."""
        session = self.sessions.find(owner, session_id)
        if session is None:
            raise NotFoundError(f"there is no session {shown(session_id)}")
        return session

    def model(self, owner: str, model_id: str) -> Model:
        """Returns a model of `owner`."""
        model = self.sessions.model(owner, model_id)
        if model is None:
            raise NotFoundError(f"there is no model {shown(model_id)}")
        return model

    def check_open(self, session: Session) -> None:
        """Raises UserError if a session has ended. Called by the worker before it adds to one.

        What a job adds before the session ends is freed by the job of `end_session`.
        """
        if session.session_id not in self.sessions.by_id:
            raise UserError("the session has ended")

    def end_session(self, session: Session) -> None:
        """Frees everything that belongs to a session. Checkpoints stay."""
        self.sessions.by_id.pop(session.session_id, None)
        models, samplers = list(session.models), list(session.samplers)
        for sampler in samplers:
            self.snapshots.drop(session.owner, sampler)
            self.samplers.drop(session.owner, sampler)

        def free() -> None:
            self.devices.end_session(session.session_id, models, samplers)

        # The worker frees what the session holds: a job of this session may be in progress, and the
        # adapters belong to the worker's thread.
        self.worker.submit(Job(session.session_id, free, lambda error: None, session.owner))

    def keep_house(self) -> None:
        """Ends silent sessions, gives up holes, and drops what is too old."""
        for session in self.sessions.expired():
            self.end_session(session)
        for session in self.sessions.by_id.values():
            # A refused or lost command leaves a hole in the numbers, and every command after it
            # would wait forever.
            for model in session.models.values():
                for future in model.log.fail_after_hole(self.limits.hole_seconds):
                    reason = "a command before this one never arrived: send both again"
                    self.futures.finish(future, Failure(reason))
        self.futures.expire()

    # -- models ----------------------------------------------------------------------------------

    def create_model(self, owner: str, body: bodies.CreateModel) -> Answer:
        session = self.session(owner, body.session_id)
        if (answer := self.promised_model(session, body.model_seq_id)) is not None:
            return answer
        if body.base_model != self.served.name:
            raise UserError(
                f"base_model={shown(body.base_model)} is not served: "
                f"this server has {self.served.name}"
            )
        if body.optimizer_config.type != "adamw":
            raise UserError(
                f"optimizer {shown(body.optimizer_config.type)} is not served: use adamw"
            )
        if body.lora_config is None:
            raise UserError("full fine-tuning is not served: send a lora_config")
        lora = body.lora_config
        shape = self.tenants.shape_of(lora.rank, lora.parts)
        # Without a seed every model differs, as two runs of a client should.
        seed = lora.seed if lora.seed is not None else secrets.randbits(31)
        model_id = f"{session.session_id}:train:{body.model_seq_id}"

        def compute() -> Result:
            self.check_open(session)
            self.devices.create(model_id, shape, seed % 2**32)
            return {"type": "create_model", "model_id": model_id}

        return self.begin_model(
            session, body.model_seq_id, shape, seed % 2**32, body.user_metadata, compute
        )

    def promised_model(self, session: Session, number: int) -> Answer | None:
        """Returns the answer to a call that comes for the second time."""
        if number not in session.created:
            return None
        future, model_id = session.created[number]
        return {"request_id": future.request_id, "model_id": model_id}

    def begin_model(
        self,
        session: Session,
        number: int,
        shape: Shape,
        seed: int,
        user_metadata: Metadata | None,
        compute: Callable[[], Result],
    ) -> Answer:
        """Adds a model to a session, and promises what `compute` returns."""
        num_models = sum(len(one.models) for one in self.sessions.of(session.owner))
        most = share_of(self.tenants.most, self.shares.num_owners)
        if num_models >= most:
            raise self.shares.refusal("adapters are trained already", "--adapters", most)
        if len(session.created) >= MOST_CREATED:
            raise UserError(f"{MOST_CREATED} models of this session: begin another session")
        # The SDK computes this id itself for a model that is created by loading, so the form is
        # fixed.
        model_id = f"{session.session_id}:train:{number}"
        future = self.futures.new(session.owner)
        log = CommandLog(self.limits.max_pending_commands)
        session.models[model_id] = Model(
            model_id, session.owner, shape.rank, shape.targets, seed, log, user_metadata
        )
        # Registered before the worker creates the model: the client may send commands for it as
        # soon as it has this answer.
        session.created[number] = future, model_id

        def undo() -> None:
            session.models.pop(model_id, None)

        self.worker.submit(self.job(model_id, future, compute, undo))
        return {"request_id": future.request_id, "model_id": model_id}

    def get_info(self, owner: str, body: bodies.ModelId) -> Answer:
        model = self.model(owner, body.model_id)
        return {
            "type": "get_info",
            "model_id": model.model_id,
            "is_lora": True,
            "lora_rank": model.rank,
            "model_name": self.served.name,
            "optimizer_config": {"type": "adamw"},
            "model_data": {
                "arch": self.served.arch,
                "model_name": self.served.name,
                "tokenizer_id": self.served.name,
            },
        }

    # -- commands --------------------------------------------------------------------------------

    def command(
        self,
        model: Model,
        number: int,
        compute: Callable[[], Result],
        undo: Callable[[], None] = lambda: None,
        size: int = 0,
    ) -> Answer:
        """Promises the result of a numbered command. A repeated number has the first promise.

        undo: runs here if the command fails. size: bytes that the command holds until it is done.
        """
        future = model.log.promised(number)
        if future is None:
            model.log.check(number)
            self.held.check(model.owner, size)
            future = self.futures.new(model.owner)
            self.held.take(model.owner, size)
            future.when_done = partial(self.held.give_back, model.owner, size)
            job = self.job(model.model_id, future, compute, undo)
            # The log starts the command, now or after the commands with smaller numbers.
            model.log.add(number, Command(future, lambda: self.worker.submit(job)))
        return {"request_id": future.request_id, "model_id": model.model_id}

    def refuse(self, owner: str, model_id: str, number: int) -> None:
        """Counts the number of a refused command as used: the client goes on to the next."""
        model = self.sessions.model(owner, model_id)
        if model is not None and model.log.promised(number) is None:
            model.log.consume(number)

    def promised(self, owner: str, model_id: str, number: int) -> Answer | None:
        """Returns the answer to a command of a model that comes for the second time."""
        future = self.model(owner, model_id).log.promised(number)
        return None if future is None else {"request_id": future.request_id, "model_id": model_id}

    def read_batch(self, message: wire.Message) -> FwdBwd:
        """Returns the call of a decoded body. Any thread may call this.

        A body is read here and not by the worker: a mistake has to be a status of this call, and
        the device should not wait for parsing. Raises UserError or WireError.
        """
        return read_batch(
            message,
            vocabulary=self.tenants.base.model.vocab_size,
            longest=self.tenants.longest,
            limits=self.limits,
        )

    def forward_backward(self, owner: str, call: FwdBwd, size: int) -> Answer:
        """size: bytes of the body."""
        model = self.model(owner, call.model_id)

        def compute() -> Result:
            return result_of(call, self.devices.forward_backward(call))

        return self.command(model, call.seq_id, compute, size=size)

    def optim_step(self, owner: str, body: bodies.OptimStep) -> Answer:
        model = self.model(owner, body.model_id)
        # The other form of the body, optimizer_params, has the settings of optimizers that are not
        # served.
        params = body.adam_params
        if params is None:
            raise UserError("optim_step: only adam_params are served")
        settings = AdamW(
            params.learning_rate,
            params.beta1,
            params.beta2,
            params.eps,
            params.weight_decay,
            params.grad_clip_norm,
        )

        def compute() -> Result:
            return {"metrics": self.devices.optim_step(model.model_id, settings)}

        return self.command(model, body.seq_id, compute)

    # -- checkpoints -----------------------------------------------------------------------------

    def record(
        self, model: Model, kind: str, name: str, ttl: int | None, metadata: Metadata | None
    ) -> Record:
        """Returns the record of a checkpoint that is about to be written."""
        created = time.time()
        return Record(
            run=model.model_id,
            kind=kind,
            name=name,
            owner=model.owner,
            base_model=self.served.name,
            base_hash="",  # set by the worker, which reads the model's files once
            rank=model.rank,
            targets=model.targets,
            seed=model.seed,
            step=0,
            created=created,
            expires=None if ttl is None else created + ttl,
            user_metadata=metadata,
            run_metadata=model.user_metadata,
        )

    def write(self, record: Record, overwrite: bool) -> Record:
        """Writes a checkpoint. Runs in the worker's thread."""
        # Only checkpoints of kind weights resume training. The moments would triple the size of the
        # others.
        has_optimizer = record.kind == "weights"
        with self.store.writing(record, overwrite) as temporary:
            checkpoint = self.devices.fetch(record.run, has_optimizer)
            self.tenants.write(checkpoint, temporary, self.served.name)
            complete = replace(record, step=checkpoint.step, base_hash=self.tenants.base_hash)
            return self.store.commit(temporary, complete, overwrite)

    def save_weights(self, owner: str, body: bodies.SaveWeights, kind: str) -> Answer:
        model = self.model(owner, body.model_id)

        def compute() -> Result:
            record = self.record(model, kind, body.path, body.ttl_seconds, body.user_metadata)
            written = self.write(record, body.overwrite)
            if kind == "external_weights":
                return {"path": written.path, "size_bytes": written.size}
            return {"type": "save_weights", "path": written.path}

        return self.command(model, body.seq_id, compute)

    def save_for_sampler(self, owner: str, body: bodies.SaveForSampler) -> Answer:
        model = self.model(owner, body.model_id)
        if body.path is not None:
            name = body.path

            def write() -> Result:
                kind = "sampler_weights"
                record = self.record(model, kind, name, body.ttl_seconds, body.user_metadata)
                written = self.write(record, overwrite=False)
                return {"type": "save_weights_for_sampler", "path": written.path}

            return self.command(model, body.seq_id, write)
        if body.sampling_session_seq_id is None:
            raise UserError("save_weights_for_sampler: send a path or a sampling_session_seq_id")
        session = self.session(owner, model.model_id.partition(":")[0])
        sampler = f"{session.session_id}:sample:{body.sampling_session_seq_id}"

        def take() -> Result:
            self.check_open(session)
            self.devices.take_snapshot(sampler, model.model_id)
            return {"type": "save_weights_for_sampler", "sampling_session_id": sampler}

        def undo() -> None:
            self.snapshots.drop(owner, sampler)

        answer = self.command(model, body.seq_id, take, undo)
        if sampler not in session.samplers:
            self.add_sampler(session, SamplerSession(sampler, owner, sampler))
            self.use_snapshot(sampler, owner)
        return answer

    def add_sampler(self, session: Session, sampler: SamplerSession) -> None:
        """Adds a sampling session. Beyond her share, the owner's oldest one in use is dropped."""
        owner, number = session.owner, sampler.sampler_id
        session.samplers[number] = sampler
        self.samplers.use(owner, number, session)
        for oldest, its_session in self.samplers.take_oldest(owner, self.shares.of("max_samplers")):
            its_session.samplers.pop(oldest, None)
            self.snapshots.drop(owner, oldest)
            self.sampling.snapshots.readers.pop(oldest, None)
            self.evict_snapshot(oldest, owner)

    def use_snapshot(self, key: str, owner: str) -> None:
        """Counts a snapshot, as used now. The owner's oldest ones are dropped beyond her share."""
        self.snapshots.use(owner, key, None)
        for oldest, _ in self.snapshots.take_oldest(owner, self.shares.of("max_snapshots")):
            self.evict_snapshot(oldest, owner)

    def evict_snapshot(self, key: str, owner: str) -> None:
        """Frees the memory of a snapshot. One of a checkpoint is read again when it is used."""
        evict = partial(self.devices.evict_snapshot, key)
        self.worker.submit(Job(key, evict, lambda error: None, owner))

    def load_weights(self, owner: str, body: bodies.LoadWeights) -> Answer:
        record = self.find_record(owner, body.path)
        directory = self.store.directory(record.path)
        if body.model_id is not None and body.seq_id is not None:
            model = self.model(owner, body.model_id)
            if (model.rank, model.targets) != (record.rank, record.targets):
                raise UserError(
                    f"{record.path} has rank {record.rank} on {','.join(record.targets)}, and the "
                    f"model rank {model.rank} on {','.join(model.targets)}"
                )

            def replace_state() -> Result:
                # Read first: a damaged checkpoint leaves the model as it is.
                checkpoint = self.tenants.read(record, directory, body.optimizer)
                self.devices.load(model.model_id, checkpoint)
                return {"type": "load_weights", "path": record.path, "model_id": model.model_id}

            return self.command(model, body.seq_id, replace_state)
        if body.session_id is None or body.model_seq_id is None:
            raise UserError("load_weights: send model_id and seq_id, or session_id, model_seq_id")
        session = self.session(owner, body.session_id)
        if (answer := self.promised_model(session, body.model_seq_id)) is not None:
            return answer
        model_id = f"{session.session_id}:train:{body.model_seq_id}"

        def load() -> Result:
            self.check_open(session)
            self.devices.load(model_id, self.tenants.read(record, directory, body.optimizer))
            return {"type": "load_weights", "path": record.path, "model_id": model_id}

        shape = Shape(record.rank, record.targets)
        metadata = body.user_metadata or record.run_metadata
        return self.begin_model(session, body.model_seq_id, shape, record.seed, metadata, load)

    def find_record(self, owner: str, path: str) -> Record:
        """Returns the record of a checkpoint of `owner`."""
        record = self.store.find(path, owner)
        if record is None:
            raise NotFoundError(f"there is no checkpoint {shown(path)}")
        return record

    def weights_info(self, owner: str, body: bodies.TinkerPath) -> Answer:
        record = self.find_record(owner, body.tinker_path)
        parts = {part_of(name) for name in record.targets}
        return {
            "base_model": record.base_model,
            "is_lora": True,
            "lora_rank": record.rank,
            "train_unembed": "unembed" in parts,
            "train_mlp": "mlp" in parts,
            "train_attn": "attn" in parts,
        }

    def set_lifetime(self, owner: str, path: str, body: bodies.Lifetime) -> Answer:
        self.store.set_lifetime(self.find_record(owner, path), body.ttl_seconds)
        return {}

    def delete(self, owner: str, path: str) -> None:
        self.store.delete(self.find_record(owner, path).path)

    def links_of(self, owner: str, path: str, base_url: str) -> Answer:
        """Returns links to the files of a checkpoint, which work without a key for an hour."""
        record = self.find_record(owner, path)
        directory = self.store.directory(record.path)
        secret = secrets.token_urlsafe(32)
        self.links.use(owner, secret, Link(directory, time.monotonic() + LINK_SECONDS))
        self.links.take_oldest(owner, MOST_LINKS)
        # Only the adapter: a link must not expose the optimizer state and the record.
        names = sorted(file.name for file in directory.iterdir() if file.name.startswith("adapter"))
        return {
            "urls": {name: f"{base_url}api/v1/files/{secret}/{name}" for name in names},
            "expires": iso_time(time.time() + LINK_SECONDS),
        }

    def linked_file(self, secret: str, name: str) -> Path:
        """Returns the file of a link."""
        found = (links.get(secret) for links in self.links.by_owner.values())
        link = next(filter(None, found), None)
        if link is None or link.expires < time.monotonic():
            raise NotFoundError("the link has expired: ask for new ones")
        # Looking the name up among the existing files keeps "../" out of the path.
        files = {file.name: file for file in link.directory.glob("adapter*")}
        if name not in files:
            raise NotFoundError(f"there is no file {shown(name)}")
        return files[name]

    # -- listing ---------------------------------------------------------------------------------

    def run_body(self, owner: str, run: str, records: Sequence[Record]) -> Answer:
        """Returns a training run as the API describes it, from its model and its checkpoints."""
        model = self.sessions.model(owner, run)
        if model is None and not records:
            raise NotFoundError(f"there is no training run {shown(run)}")
        last = {record.kind: record.body for record in records}
        rank = model.rank if model else records[-1].rank
        metadata = model.user_metadata if model else records[-1].run_metadata
        when = model.last_request if model else records[-1].created
        return {
            "training_run_id": run,
            "base_model": self.served.name if model else records[-1].base_model,
            "model_owner": owner,
            "is_lora": True,
            "lora_rank": rank,
            "corrupted": False,
            "last_request_time": iso_time(when),
            "last_checkpoint": last.get("weights"),
            "last_sampler_checkpoint": last.get("sampler_weights"),
            "user_metadata": metadata,
        }

    def training_run(self, owner: str, run: str) -> Answer:
        return self.run_body(owner, run, self.store.records(owner, safe_run(run)))

    def training_runs(self, owner: str, offset: int, limit: int) -> Answer:
        by_run: dict[str, list[Record]] = {}
        for record in self.store.records(owner):
            by_run.setdefault(record.run, []).append(record)
        for session in self.sessions.by_id.values():
            if session.owner == owner:
                for model_id in session.models:
                    by_run.setdefault(model_id, [])
        runs = [self.run_body(owner, run, records) for run, records in by_run.items()]
        runs.sort(key=lambda run: str(run["last_request_time"]), reverse=True)
        cursor = {"offset": offset, "limit": limit, "total_count": len(runs)}
        return {"training_runs": runs[offset : offset + limit], "cursor": cursor}

    def checkpoints(self, owner: str, run: str, offset: int, limit: int) -> Answer:
        records = self.store.records(owner, safe_run(run) if run else "")
        cursor = {"offset": offset, "limit": limit, "total_count": len(records)}
        shown = records[offset : offset + limit]
        return {"checkpoints": [record.body for record in shown], "cursor": cursor}

    def list_sessions(self, owner: str, offset: int, limit: int) -> Answer:
        names = [name for name, one in self.sessions.by_id.items() if one.owner == owner]
        return {"sessions": names[offset : offset + limit]}

    def get_session(self, owner: str, session_id: str) -> Answer:
        session = self.session(owner, session_id)
        return {
            "training_run_ids": list(session.models),
            "sampler_ids": list(session.samplers),
            "user_metadata": session.user_metadata,
        }

    def capabilities(self) -> Answer:
        model = {
            "model_name": self.served.name,
            "max_context_length": self.sampling.engine.max_sequence_tokens,
            "trainable": True,
            "sampleable": True,
        }
        return {"supported_models": [model]}

    # -- sampling --------------------------------------------------------------------------------

    def create_sampler(self, owner: str, body: bodies.CreateSampler) -> Answer:
        session = self.session(owner, body.session_id)
        sampler = f"{session.session_id}:sample:{body.sampling_session_seq_id}"
        answer: Answer = {"type": "create_sampling_session", "sampling_session_id": sampler}
        if sampler in session.samplers:
            return answer
        key = BASE
        if body.model_path is None:
            if body.base_model != self.served.name:
                raise UserError(
                    f"base_model={shown(body.base_model)} is not served: "
                    f"this server has {self.served.name}"
                )
        else:
            record = self.find_record(owner, body.model_path)
            key = sampler
            directory = self.store.directory(record.path)
            # The checkpoint is read at its first sample. Reading it here would block the event
            # loop.
            self.sampling.snapshots.readers[key] = partial(
                self.tenants.read_adapter, record, directory
            )
            self.use_snapshot(key, owner)
        self.add_sampler(session, SamplerSession(sampler, owner, key, body.model_path))
        return answer

    def get_sampler(self, owner: str, sampler_id: str) -> Answer:
        sampler = self.sampler(owner, sampler_id)
        return {
            "sampler_id": sampler_id,
            "base_model": self.served.name,
            "model_path": sampler.model_path,
        }

    def sampler(self, owner: str, sampler_id: str) -> SamplerSession:
        """Returns a sampling session of `owner`."""
        sampler = self.sessions.sampler(owner, sampler_id)
        if sampler is None:
            raise NotFoundError(f"there is no sampling session {shown(sampler_id)}")
        return sampler

    def sample(self, owner: str, body: bodies.Sample) -> Answer:
        sampler = self.sampler(owner, body.sampling_session_id)
        if body.seq_id in sampler.requests:
            future, num_samples = sampler.requests[body.seq_id]
            return promised_samples(sampler, body.seq_id, future, num_samples)
        if body.num_samples > self.limits.max_samples:
            raise UserError(
                f"num_samples={body.num_samples}: at most {self.limits.max_samples} (--max-samples)"
            )
        count = body.num_samples
        if not self.sampling.reserve(count, owner):
            most = self.sampling.most_reserved
            raise self.shares.refusal("samples wait", "--max-waiting-sequences", most)
        try:
            future = self.promise_sample(owner, body, sampler)
        except BaseException:
            self.sampling.release(count, owner)
            raise
        return promised_samples(sampler, body.seq_id, future, count)

    def promise_sample(self, owner: str, body: bodies.Sample, sampler: SamplerSession) -> Future:
        """Hands a request to the worker. Its room is released when the promise has a result."""
        self.use_sampler(owner, sampler)
        future = self.futures.new(owner, SAMPLE_PREFIX)

        def done(result: bytes | BaseException) -> None:
            def finish() -> None:
                outcome = result if isinstance(result, bytes) else failure_of(result)
                self.futures.finish(future, outcome)

            self.post(finish)

        try:
            request = self.read_sample(body, sampler, done)
            self.sampling.check(request)
        except UserError:
            self.futures.drop(future)
            raise
        # A repeated seq_id must get the first promise, as long as it is kept.
        for number in list(itertools.takewhile(self.is_dropped(sampler), sampler.requests)):
            del sampler.requests[number]
        sampler.requests[body.seq_id] = future, body.num_samples
        future.when_done = partial(self.sampling.release, body.num_samples, owner)
        self.worker.sample(request)
        return future

    def use_sampler(self, owner: str, sampler: SamplerSession) -> None:
        """Marks a sampling session and its snapshot as used. Raises UserError if that is gone."""
        session = self.session(owner, sampler.sampler_id.partition(":")[0])
        self.samplers.use(owner, sampler.sampler_id, session)
        # The base is never evicted.
        if sampler.snapshot == BASE:
            return
        if sampler.model_path is None and not self.snapshots.has(owner, sampler.snapshot):
            raise UserError(GONE)
        self.use_snapshot(sampler.snapshot, owner)

    def is_dropped(self, sampler: SamplerSession) -> Callable[[int], bool]:
        """Returns whether the promise of a request, by its seq_id, is forgotten."""
        return lambda number: sampler.requests[number][0].request_id not in self.futures.by_id

    def read_sample(
        self,
        body: bodies.Sample,
        sampler: SamplerSession,
        done: Callable[[bytes | BaseException], None],
    ) -> Request:
        """Returns what the worker has to do. Raises UserError for what is not served."""
        if any(chunk.type != "encoded_text" for chunk in body.prompt.chunks):
            raise UserError("only encoded_text is served: no images, no sound")
        params = body.sampling_params
        prompt = tuple(token for chunk in body.prompt.chunks for token in chunk.tokens)
        targets = None
        if body.target_prompt_logprobs is not None:
            targets = read_targets(
                body.target_prompt_logprobs,
                len(prompt),
                vocabulary=self.tenants.base.model.vocab_size,
                most=self.limits.max_targets,
            )
        if body.prompt_alt_tokens_k > self.limits.max_targets:
            raise UserError(
                f"prompt_alt_tokens_k={body.prompt_alt_tokens_k}: at most "
                f"{self.limits.max_targets} (--max-targets)"
            )
        last_n = body.prompt_logprobs_last_n
        if last_n is not None and not (body.prompt_logprobs and last_n < len(prompt)):
            raise UserError(
                f"prompt_logprobs_last_n={last_n}: it needs prompt_logprobs and a prompt of more "
                "tokens"
            )
        room = self.sampling.engine.max_sequence_tokens - len(prompt)
        stop = params.stop
        if isinstance(stop, str):
            stop = [stop]
        # In the API stop=None means the end token, and stop=[] means that not even the end token
        # stops.
        stop_ids = self.served.stop_ids if stop is None else ()
        strings: tuple[str, ...] = ()
        if stop is not None:
            stop_ids = tuple(item for item in stop if isinstance(item, int))
            strings = tuple(item for item in stop if isinstance(item, str) and item)
        number = next(self.num_samples)
        return Request(
            snapshot=sampler.snapshot,
            prompt=prompt,
            num_samples=body.num_samples,
            # At least 1, so that a prompt that fills the context is refused by `Sampling.check`,
            # with its reason.
            max_tokens=max(room, 1) if params.max_tokens is None else params.max_tokens,
            temperature=params.temperature,
            # The API writes "all tokens" as -1, the decoder as 0.
            top_k=max(params.top_k, 0),
            top_p=params.top_p,
            stop_ids=stop_ids,
            stop_strings=strings,
            noise=tuple(noise_of(params.seed, number, index) for index in range(body.num_samples)),
            has_prompt_logprobs=bool(body.prompt_logprobs),
            topk_prompt=body.topk_prompt_logprobs,
            topk_sampled=body.topk_sample_logprobs,
            prompt_logprobs_from=1 if last_n is None else len(prompt) - last_n,
            targets=targets,
            num_alternatives=body.prompt_alt_tokens_k,
            owner_session=sampler.sampler_id.partition(":")[0],
            done=done,
            owner=sampler.owner,
        )


def promised_samples(
    sampler: SamplerSession, number: int, future: Future, num_samples: int
) -> Answer:
    """Returns the answer to the request `number` of a sampling session."""
    names = [f"{sampler.sampler_id}:{number}:{index}" for index in range(num_samples)]
    return {"request_id": future.request_id, "sample_sequence_ids": names}


def noise_of(seed: int | None, number: int, index: int) -> int:
    """Returns the number that keys the noise of a sample, as in `serving.requests.noise_number`.

    With a seed, sample i has the same noise in every request; these numbers are in the upper half
    of the 31 bits. Without a seed the numbers are consecutive.
    """
    if seed is not None:
        return 2**30 + zlib.crc32(f"{seed}/{index}".encode()) % 2**30
    return zlib.crc32(f"{number}/{index}".encode()) % 2**30


def safe_run(run: str) -> str:
    """Returns the id of a run, which is the name of a directory. Raises NotFoundError if not."""
    if bodies.RUN_ID.fullmatch(run) is None:
        raise NotFoundError(f"there is no training run {shown(run)}")
    return run


def result_of(call: FwdBwd, result: FwdBwdResult) -> bytes:
    """Returns a ForwardBackwardOutput. Data with targets [N] and [N, K] are separate records."""
    records: list[wire.Value] = []
    start = 0
    # Consecutive data of one shape are one record, because a record has one trailing shape.
    shapes = [values.shape[1:] for values in result.logprobs]
    for end in range(1, len(shapes) + 1):
        if end < len(shapes) and shapes[end] == shapes[start]:
            continue
        tensor = wire.ragged(result.logprobs[start:end], shapes[start])
        records.append({"fields": {"logprobs": tensor}, "num_datums": end - start})
        start = end
    return wire.encode(
        "ForwardBackwardOutput",
        {
            "loss_fn_output_type": "TorchLossReturn",
            "loss_fn_outputs": records,
            "metrics": {"loss:sum": result.loss},
        },
    )
