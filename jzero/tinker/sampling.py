"""Snapshots of adapters, and the requests that are sampled from them. Runs in the worker's thread.

A snapshot is a copy of an adapter, which training does not change. Requests for all snapshots are
decoded together (continuous batching), and a request joins at the next call of the device: the
snapshots in use are in the decoder's `AdapterBank`. The KV cache is shared only among requests of
one owner for one snapshot. Adapters of experts cannot be in a bank; models with experts decode the
requests for one snapshot after the other.
"""

import sys
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float32, Int32

from jzero.decoder import inbox
from jzero.decoder.adapter_bank import BASE_MODEL, AdapterBank, HeldAdapter, can_hold
from jzero.decoder.driver import Decoder, Phase
from jzero.decoder.inbox import REQUESTS, Inbox
from jzero.decoder.lockstep import Gather, Lockstep
from jzero.decoder.sampling import Filters
from jzero.decoder.scheduler import Scheduler
from jzero.decoder.score_program import MAX_ALTERNATIVES
from jzero.decoder.scoring import Scoring
from jzero.decoder.sequence import Groups, Sequence
from jzero.errors import UserError
from jzero.hosts import collectives, interrupt
from jzero.model import adapters, qwen
from jzero.sharding.mesh import adapter_shardings
from jzero.tinker import wire
from jzero.tinker.prompt_targets import PromptTargets
from jzero.tinker.tenants import Shape, check_finite

BASE = "base"  # key of the model without an adapter
COALESCE_SECONDS = 0.01  # clients send equal prompts one by one: a group shares one prefill
SWITCH_SECONDS = 1.0  # of decoding one snapshot, if others wait and there is no bank
SESSION_ENDED = "the session has ended"
GONE = "the weights of this sampling client are gone: make a new client"
# The API's value of an empty cell, with token 0.
NO_LOGPROB = -99999.0  # of an empty cell


@dataclass(frozen=True, eq=False)
class Request:
    """One asample call. Two calls with equal fields are different requests."""

    snapshot: str
    prompt: tuple[int, ...]
    num_samples: int
    max_tokens: int
    temperature: float
    top_k: int  # 0: all tokens
    top_p: float
    stop_ids: tuple[int, ...]
    stop_strings: tuple[str, ...]
    noise: tuple[int, ...]  # keys the noise of each sample
    has_prompt_logprobs: bool
    topk_prompt: int
    topk_sampled: int
    owner_session: str
    done: Callable[[bytes | BaseException], None]  # called once, in the worker's thread
    prompt_logprobs_from: int = 1  # the first prompt token that has log-probs
    targets: PromptTargets | None = None
    num_alternatives: int = 0  # tokens to draw in the place of every prompt token
    owner: str = ""  # the name of the key

    @property
    def has_prompt_scores(self) -> bool:
        """Whether tokens of the prompt are scored."""
        return bool(
            self.has_prompt_logprobs or self.topk_prompt or self.targets or self.num_alternatives
        )

    @property
    def first_scored(self) -> int:
        """The first prompt token in whose place something is scored."""
        firsts = []
        if self.has_prompt_logprobs or self.topk_prompt:
            firsts.append(self.prompt_logprobs_from)
        if self.targets is not None:
            firsts.append(self.targets.first)
        if self.num_alternatives:
            firsts.append(1)
        return min(firsts)

    @property
    def filters(self) -> Filters:
        return Filters(self.top_k, self.top_p)


@dataclass(eq=False)
class Snapshot:
    """A copy of an adapter for sampling."""

    shape: Shape
    adapter: qwen.Params | None  # arrays of NumPy; None while the bank has it


class Snapshots:
    """The snapshots of all sessions: those in use are in the bank, the others on the host."""

    def __init__(
        self,
        model: qwen.QwenConfig,
        base: qwen.Params,
        mesh: Mesh,
        dtype: str,
        resident: int,
        exact: bool,
    ) -> None:
        """Makes an empty collection.

        Args:
            base: the decoder's weights of the base model.
            mesh: the decoder's.
            resident: snapshots of one shape in the bank.
            exact: config.model.exact.
        """
        self.model = model
        self.base = base
        self.mesh = mesh
        self.dtype = np.dtype(jnp.dtype(dtype))
        self.bank: AdapterBank | None = None
        if can_hold(model, base, exact):
            self.bank = AdapterBank(
                model,
                base,
                mesh,
                dtype,
                most_slots=resident,
                exact=exact,
                on_evict=self.keep_on_host,
            )
        self.by_key: dict[str, Snapshot] = {}
        # Snapshots of checkpoints are read when they are used. Any thread may add an entry. With
        # several hosts, process 0 reads, and `share` returns its result on all of them.
        self.readers: dict[str, Callable[[], tuple[Shape, qwen.Params]]] = {}
        self.share: Callable[[Callable[[], dict]], dict] = call

    def take(self, key: str, shape: Shape, params: qwen.Params) -> None:
        """Copies an adapter as the snapshot `key`.

        Raises UserError if the adapter is not finite in the decoder's type; there is no snapshot
        `key` then.
        """
        self.evict(key)
        snapshot = Snapshot(shape, None)
        if self.bank is None or not self.bank.add(key, shape.settings, params):
            snapshot.adapter = self.on_host(params)
        self.by_key[key] = snapshot

    def on_host(self, params: qwen.Params) -> qwen.Params:
        """Returns a copy of an adapter on the host, in the decoder's type.

        Raises UserError if a value is not finite in that type.
        """

        def fetch(leaf: jax.Array | np.ndarray) -> np.ndarray:
            return leaf if isinstance(leaf, np.ndarray) else collectives.fetch_global(leaf)

        fetched = jax.tree.map(fetch, params)
        check_finite(fetched, self.dtype)
        return jax.tree.map(lambda leaf: leaf.astype(self.dtype), fetched)

    def keep_on_host(self, key: str, adapter: qwen.Params) -> None:
        """Keeps a snapshot that leaves the bank."""
        self.by_key[key].adapter = adapter

    def evict(self, key: str) -> None:
        """Drops a snapshot. One of a checkpoint is read again if it is used again."""
        self.by_key.pop(key, None)
        if self.bank is not None:
            self.bank.forget(key)

    def drop(self, key: str) -> None:
        """Forgets a snapshot for ever."""
        self.evict(key)
        self.readers.pop(key, None)

    def find(self, key: str) -> Snapshot:
        """Returns a snapshot. Raises UserError if it is gone."""
        if key not in self.by_key:
            self.take(key, *self.read(key))
        return self.by_key[key]

    def read(self, key: str) -> tuple[Shape, qwen.Params]:
        """Reads the snapshot of a checkpoint. Raises UserError if it is gone."""

        def read() -> dict:
            if key not in self.readers:
                raise UserError(GONE)
            shape, params = self.readers[key]()
            return shape._asdict() | {"params": params}

        message = self.share(read)
        return Shape.of(message), message["params"]

    # -- models with a bank ------------------------------------------------------------------------

    def hold(self, key: str) -> HeldAdapter | None:
        """Returns the adapter of a snapshot, which stays in the bank until `release`.

        None if requests hold all slots of the bank. Raises UserError if the snapshot is gone.
        """
        if key == BASE or self.bank is None:
            return BASE_MODEL
        snapshot = self.find(key)
        if snapshot.adapter is not None:
            if not self.bank.add(key, snapshot.shape.settings, snapshot.adapter):
                return None
            snapshot.adapter = None
        return self.bank.hold(key)

    def release(self, held: HeldAdapter) -> None:
        """Undoes one `hold`."""
        if self.bank is not None:
            self.bank.release(held)

    # -- all models --------------------------------------------------------------------------------

    def weights(self, key: str) -> qwen.Params:
        """Returns the decoder's weights: of all snapshots, or without a bank of one.

        Raises UserError if the snapshot is gone.
        """
        if self.bank is not None:
            return self.bank.params
        if key == BASE:
            return self.base
        snapshot = self.find(key)
        settings = snapshot.shape.settings
        places = adapter_shardings(self.model, settings, self.mesh)
        adapter = jax.tree.map(collectives.place, snapshot.adapter, places)
        return adapters.join(self.base, adapter, settings.scale)


def call(compute: Callable[[], dict]) -> dict:
    """The `Snapshots.share` of one host."""
    return compute()


class Live(inbox.Request):
    """A request that waits, is decoded or is scored."""

    def __init__(self, sampling: "Sampling", request: Request) -> None:
        self.sampling = sampling
        self.request = request
        self.owner = request.owner
        self.adapter = BASE_MODEL  # held, once the request has begun
        self.sequences: list[Sequence] = []
        self.num_finished = 0
        self.prompt_scoring: Scoring | None = None
        self.sampled_scorings: list[Scoring] = []
        self.num_to_score = 0
        self.lacks_scores = False  # some were dropped
        self.is_suspect = False  # it was live when a call failed

    @property
    def num_waiting(self) -> int:
        """See `inbox.Request.num_waiting`."""
        return self.num_expected - len(self.sequences)

    @property
    def num_expected(self) -> int:
        """The samples that are answered."""
        return len(self.sequences) if self.is_cancelled else self.request.num_samples

    @property
    def prefill(self) -> Hashable:
        """Equal prompts of one owner share one prefill, whichever requests they are of.

        The time of a sample would tell other owners that the prompt is in use.
        """
        request = self.request
        return self.owner, self.adapter, request.prompt, request.temperature, request.filters

    def begin(self) -> bool:
        """Holds the adapter, and scores the prompt. False if requests hold all slots of the bank.

        Raises UserError if the snapshot is gone.
        """
        snapshots = self.sampling.snapshots
        adapter = snapshots.hold(self.request.snapshot)
        if adapter is None:
            return False
        self.adapter = adapter
        try:
            self.score_prompt()
        except Exception:
            snapshots.release(adapter)
            raise
        return True

    def begin_samples(self, count: int) -> list[Sequence]:
        """See `inbox.Request.begin_samples`."""
        request, first = self.request, len(self.sequences)
        prompt_id = self.sequences[0].prompt_id if first else self.sampling.new_prompt_id()
        begun = [
            Sequence(
                prompt_id=prompt_id,
                sample_index=index,
                request_id=request.noise[index],
                prompt_tokens=np.array(request.prompt, np.int32),
                length_limit=len(request.prompt) + request.max_tokens,
                temperature=request.temperature,
                stop_strings=list(request.stop_strings),
                filters=request.filters,
                stop_ids=request.stop_ids,
                adapter=self.adapter,
                owner=request.owner,
            )
            for index in range(first, first + count)
        ]
        self.sequences += begun
        return begun

    def score_prompt(self) -> None:
        """Submits the prompt to the scorer, if its log-probs are wanted."""
        request = self.request
        if not request.has_prompt_scores:
            return
        first, uniforms = request.first_scored, None
        if request.num_alternatives:
            # Equal seeds draw equal tokens.
            size = len(request.prompt) - first, request.num_alternatives
            uniforms = np.random.default_rng(request.noise[0]).random(size, np.float32)
        self.prompt_scoring = Scoring(
            np.array(request.prompt, np.int32),
            first,
            alternatives=request.topk_prompt,
            adapter=self.adapter,
            given=None if request.targets is None else request.targets.given(first),
            uniforms=uniforms,
            draw_temperature=request.temperature,
            owner=request.owner,
        )
        self.submit_scoring(self.prompt_scoring)

    def submit_scoring(self, scoring: Scoring) -> None:
        """Submits a sequence to the scorer, unless it has nothing to score."""
        if not scoring.is_finished:
            self.num_to_score += 1
            self.sampling.score(self, scoring)

    def sample_ended(self, sequence: Sequence) -> None:
        """Counts a finished sequence, and answers if it was the last one."""
        self.num_finished += 1
        # Decoding reports only the sampled token's log-prob. A forward pass over the finished
        # sequence has the alternatives.
        if self.request.topk_sampled:
            scoring = Scoring(
                sequence.tokens.ids.copy(),
                len(sequence.prompt_tokens),
                alternatives=self.request.topk_sampled,
                adapter=self.adapter,
                owner=self.request.owner,
            )
            self.sampled_scorings.append(scoring)
            self.submit_scoring(scoring)
        self.answer_if_done()

    def scoring_ended(self, scoring: Scoring) -> None:
        """Counts a scored sequence, and answers if it was the last one."""
        self.num_to_score -= 1
        self.answer_if_done()

    def dropped(self) -> None:
        """Answers with the samples that have begun, once they have ended."""
        if self.has_begun:
            self.answer_if_done()
        else:
            self.fail(UserError(SESSION_ENDED))

    def scoring_dropped(self, scoring: Scoring) -> None:
        """Counts a sequence that will not be scored."""
        self.lacks_scores = True
        self.scoring_ended(scoring)

    def answer_if_done(self) -> None:
        """Answers the request once everything it asks for is computed."""
        if self.num_finished < self.num_expected or self.num_to_score:
            return
        if self.lacks_scores:
            self.fail(UserError(SESSION_ENDED))
            return
        self.release()
        self.request.done(response_of(self))

    def release(self) -> None:
        """Gives the adapter back, if the request has one."""
        if self.has_begun:
            self.sampling.snapshots.release(self.adapter)
            self.has_begun = False

    def fail(self, error: BaseException) -> None:
        """Answers the request with an error."""
        self.release()
        self.request.done(error)

    def start_again(self) -> "Live":
        """Returns the request as it was before it began. A sample is the same when repeated."""
        self.release()
        again = Live(self.sampling, self.request)
        again.is_suspect = True
        return again


class Sampling(Inbox[Live]):
    """Decodes the waiting requests."""

    def __init__(self, decoder: Decoder, snapshots: Snapshots, key: tuple[int, int]) -> None:
        """key: of the noise (see `Phase`)."""
        super().__init__(decoder.engine, sys.maxsize)  # the service limits the owners
        self.decoder = decoder
        self.snapshots = snapshots
        self.key = key
        self.num_prompts = 0  # numbers the groups that share pages
        self.prefills = 0
        self.gather: Gather | None = None  # among several hosts, which sample alike
        # Of the current run: see `sample`, the key of its weights, and when it began.
        self.between_calls: Callable[[], None] = interrupt.never_stop
        self.weights_key = BASE
        self.started = 0.0

    def check(self, request: Request) -> None:
        """Raises UserError if a request cannot be served. Any thread may call this."""
        room = self.engine.max_sequence_tokens
        if not request.prompt:
            raise UserError("the prompt is empty: send at least one token")
        if max(request.prompt) >= self.engine.model.vocab_size:
            raise UserError(
                f"the prompt has a token outside of 0 to {self.engine.model.vocab_size - 1}"
            )
        if len(request.prompt) + request.max_tokens > room:
            raise UserError(
                f"the prompt has {len(request.prompt)} tokens and asks for {request.max_tokens} "
                f"more: there is room for {room} in all (--context)"
            )
        if max(request.topk_prompt, request.topk_sampled) > MAX_ALTERNATIVES:
            raise UserError(f"top-k log-probs: k is at most {MAX_ALTERNATIVES}")
        # These become arrays of int32, together with those of other requests.
        if max(request.top_k, *request.stop_ids, *request.noise) >= 2**31:
            raise UserError("top_k, a stop token or a seed does not fit 32 bits")

    def queue(self, request: Request) -> None:
        """Adds a request to those that wait."""
        self.waiting.append(Live(self, request))

    def new_prompt_id(self) -> int:
        """Returns the number of a group that shares pages."""
        self.num_prompts += 1
        return self.num_prompts

    def weights_of(self, live: Live) -> str:
        """Returns the key of the weights that a request needs. Requests of one key are a batch."""
        return live.request.snapshot if self.snapshots.bank is None else BASE

    def sample(self, between_calls: Callable[[], None]) -> None:
        """Decodes the requests that the first waiting one can be with, and those that join them.

        between_calls: is called before every device call, and may add waiting requests and
            snapshots. Of several hosts the first one has it, and `gather` does the same on others.
        """
        self.between_calls = between_calls
        source = self
        if self.gather is not None:
            source = Lockstep(self, self.gather)
            self.clock = source.read_clock
        # RL recipes send num_samples=1 with the same prompt once for each member of a group.
        # Waiting turns these calls into one prefill.
        time.sleep(COALESCE_SECONDS)
        source.receive()
        if not self.waiting:
            return
        key = self.weights_of(self.waiting[0])
        try:
            params = self.snapshots.weights(key)
        except UserError as error:
            self.fail_waiting(key, error)
            return
        self.weights_key, self.started = key, self.clock()
        self.scheduler = None
        try:
            self.decoder.run(Phase(params, self.key, samples=REQUESTS), source)
            # Scoring may outlast the last sequence; the scheduler ends once both are done.
            self.take_scored()
        except Exception as error:
            # Without any live request the failure is not theirs: the next attempt would repeat it.
            if not (self.live or self.scoring):
                self.fail_waiting(key, error)
            self.fail_or_repeat_live(error)
            raise
        finally:
            if self.scheduler is not None:
                self.prefills += self.scheduler.counters.prefills

    def receive(self) -> None:
        """See `Source.receive`."""
        self.between_calls()

    def admit(self, run: Scheduler) -> Groups:
        """Returns the groups of requests that join the others. See `Source.admit`."""
        self.take_scored()
        key = self.weights_key
        others_wait = any(self.weights_of(live) != key for live in self.waiting)
        if others_wait and self.clock() - self.started > SWITCH_SECONDS:
            # Admits nothing more: the run ends with its live sequences, and the next run takes the
            # snapshot of the first waiting request.
            return []
        groups = self.admit_waiting(self.chosen(key))
        if self.snapshots.bank is not None:
            # The bank may have other adapters now.
            run.use_weights(self.snapshots.bank.params)
        return groups

    def chosen(self, key: str) -> list[Live]:
        """Returns the waiting requests of a batch that may begin now."""
        requests = [live for live in self.waiting if self.weights_of(live) == key]
        # After a failure its requests are decoded one by one, to find the one that fails.
        suspects = [live for live in requests if live.is_suspect]
        if not suspects:
            return requests
        return [] if self.live or self.scoring else suspects[:1]

    # -- requests that end early -------------------------------------------------------------------

    def fail_waiting(self, key: str, error: BaseException) -> None:
        """Fails the waiting requests of a batch."""
        failed = [live for live in self.waiting if self.weights_of(live) == key]
        self.waiting = deque(live for live in self.waiting if self.weights_of(live) != key)
        for live in failed:
            live.fail(error)

    def fail_or_repeat_live(self, error: BaseException) -> None:
        """Fails the request that was live in a call that failed, or repeats those that were.

        Several of them wait again, and are decoded one by one, so that only the one that makes the
        call fail is answered with the error. A cancelled request is not repeated.
        """
        # A request with several sequences appears several times, and is answered once.
        stopped = list(dict.fromkeys((*self.live.values(), *self.scoring.values())))
        self.live.clear()
        self.scoring.clear()
        # A request of which only some samples have begun is among those that wait.
        waiting = [live for live in self.waiting if live not in stopped]
        repeated = [live for live in stopped if not live.is_cancelled]
        if len(repeated) == 1:
            repeated = []
        for live in stopped:
            if live not in repeated:
                live.fail(error)
        self.waiting = deque([*(live.start_again() for live in repeated), *waiting])

    def cancel(self, session: str) -> None:
        """Drops the requests of a session: waiting ones at once, live ones at their next token."""
        for live in (*self.waiting, *self.live.values(), *self.scoring.values()):
            if live.request.owner_session == session:
                live.cancel()
        self.drop_cancelled()


# -- answers ---------------------------------------------------------------------------------------


def response_of(live: Live) -> bytes:
    """Returns the SampleResponse of a request."""
    request = live.request
    sequences: list[wire.Value] = []
    by_tokens = {id(scoring): scoring for scoring in live.sampled_scorings}
    for sequence in live.sequences:
        tokens = np.asarray(sequence.new_tokens, "<i4")
        answer: wire.Message = {
            "stop_reason": wire.STOP if sequence.finish_reason == "stop" else wire.LENGTH,
            "tokens": tokens.tobytes(),
            "logprobs": np.asarray(sequence.new_logps, "<f4").tobytes(),
        }
        # Sequences with equal tokens have equal scores, so any match will do.
        scoring = next(
            (one for one in by_tokens.values() if np.array_equal(one.tokens, sequence.tokens.ids)),
            None,
        )
        if scoring is not None:
            answer["topk_sampled_logprobs"] = topk_message(scoring, request.topk_sampled, 0)
        sequences.append(answer)
    response: wire.Message = {"sequences": sequences}
    if live.prompt_scoring is not None:
        response |= prompt_fields(request, live.prompt_scoring)
    return wire.encode("SampleResponse", response)


def prompt_fields(request: Request, scoring: Scoring) -> wire.Message:
    """Returns the fields of a SampleResponse about the tokens of the prompt."""
    fields: wire.Message = {}
    scores, start = scoring.scores, request.prompt_logprobs_from
    if request.has_prompt_logprobs:
        # The first token of a prompt has no log-prob. The API's "no value" is NaN.
        logps = np.full(len(request.prompt), np.nan, np.float32)
        logps[start:] = scores.logps[start - scoring.first :]
        fields["prompt_logprobs"] = logps.astype("<f4").tobytes()
    if request.topk_prompt:
        fields["topk_prompt_logprobs"] = topk_message(scoring, request.topk_prompt, start)
    if request.targets is not None:
        assert scores.given_logps is not None
        fields["target_prompt_logprobs"] = request.targets.answer(scoring.first, scores.given_logps)
    if request.num_alternatives:
        assert scores.drawn_tokens is not None and scores.drawn_logps is not None
        fields["prompt_alt_tokens"] = {
            "tokens": wire.tensor(scores.drawn_tokens),
            "logprobs": wire.tensor(scores.drawn_logps),
        }
    return fields


def topk_message(scoring: Scoring, k: int, num_empty: int) -> wire.Message:
    """Returns the k most probable tokens of the scored ones, in rows after `num_empty` empty ones.

    num_empty: also the first scored token in a row; 0: all scored tokens.
    """
    skipped = max(0, num_empty - scoring.first)
    tokens: Int32[np.ndarray, "scored k"] = scoring.scores.top_tokens[skipped:, :k]
    logps: Float32[np.ndarray, "scored k"] = scoring.scores.top_logps[skipped:, :k]
    empty_tokens = np.zeros((num_empty, k), np.int32)
    empty_logps = np.full((num_empty, k), NO_LOGPROB, np.float32)
    all_tokens = np.concatenate([empty_tokens, tokens])
    return {
        "token_ids": all_tokens.astype("<i4").tobytes(),
        "logprobs": np.concatenate([empty_logps, logps]).astype("<f4").tobytes(),
        "k": k,
        "length": len(all_tokens),
    }
