"""Decodes what agents request: every session becomes a tree of sequences.

An agent (`environments.agents`) requests responses to lists of messages. A request *continues* an
earlier one if its messages begin with the messages of that request and the answer to them. Its
prompt is then the tokens that were shown and sampled, followed by the tokens of the new messages:
text of the policy is never tokenized again.

- The first request to continue an answer is the next turn of its sequence, which keeps its slot and
  its KV pages.
- A further one (a retry, a parallel request, a history that was edited after the answer) begins a
  new sequence, a *branch*, with these tokens as its prompt.
- A request that continues nothing begins a branch as well, from its messages.

Each response is sampled in one sequence, and counts as sampled in no other one. So each token is
trained once, with the log-prob with which it was sampled. Responses that no agent has received are
not trained.

An episode is one `Rollout`: the sequences of its tree, one after the other (`branch_starts`).
Groups consist of episodes, and the advantage of an episode is that of all its sequences
(`CreditSettings.unit`). Weights that count sequences count each sequence of a tree.

With one request at a time, the tokens of an agent do not depend on the other agents: the noise is
keyed by episode, number of the sequence, and position. Requests that an agent sends at the same
time are numbered in the order of their arrival.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import queue
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import jinja2
import numpy as np
from jaxtyping import Int32

from jzero import terminal
from jzero.decoder.driver import Batch
from jzero.decoder.scheduler import Scheduler
from jzero.decoder.sequence import DecodeCounters, Groups, Reply, Sequence
from jzero.environments import agents
from jzero.environments.agents import Call, Ended, Outcome, Session
from jzero.environments.chat_endpoint import (
    Answer,
    Choice,
    Message,
    Request,
    RequestError,
    assistant_message,
)
from jzero.errors import UserError, reason_of, shown
from jzero.hosts import interrupt
from jzero.json_values import as_list, as_object, member, parse
from jzero.model import tokenizer
from jzero.problems.prompts import ENVIRONMENT_TEMPLATES, find_template
from jzero.rollout.turns import longest_token, tokens_after_turn
from jzero.tokens import Tokens
from jzero.types import Grade, JsonValue, Problem, Rollout, Turn, grade_of

if TYPE_CHECKING:
    from jzero.rollout.sampler import Sampler

POLL_SECONDS = 0.1  # between two looks whether the run has to stop, while all agents compute
CONTEXT = "context_length_exceeded"  # the code of OpenAI's API
MESSAGE_FIELDS = ("role", "content", "name", "tool_call_id")  # texts of a message
MAX_NAME = 256  # characters of all of them but the content


@dataclass(eq=False)
class Branch:
    """A sequence of a tree."""

    tree: Tree
    number: int  # in the tree
    sequence: Sequence
    call: PendingCall | None = None  # for which it is decoded
    num_answered: int = 0  # turns that the agent has received
    last_answer: int = 0  # number of the latest of them among the answers of the tree
    answer_ids: list[str] = field(default_factory=list)  # of each answered turn
    # The messages that each turn was shown after those of the turn before it.
    messages: list[list[dict[str, str]]] = field(default_factory=list)
    # The sequence whose first tokens this one shows, and how many tokens they are.
    trunk: tuple[Branch, int] | None = None


@dataclass(frozen=True, eq=False)
class Node:
    """An answer in a tree, which further requests may continue."""

    branch: Branch
    end: int  # tokens of its sequence up to the end of the answer
    num_turns: int  # answers on the way from the first prompt, this one included


@dataclass(eq=False)
class PendingCall:
    """A call, and the choices that have been decoded for it."""

    call: Call
    digest: bytes  # of its tools and messages
    num_turns: int  # answers on the way to it
    choices: dict[int, tuple[Branch, Choice]] = field(default_factory=dict)
    numbers: dict[Branch, int] = field(default_factory=dict)  # of the choice of a branch


@dataclass(eq=False)
class Tree:
    """The sequences of an episode."""

    problem: Problem
    sample_index: int
    first_request_id: int  # of its sequences
    session: Session
    branches: list[Branch] = field(default_factory=list)
    nodes: dict[bytes, list[Node]] = field(default_factory=dict)  # by `digests` with the answer
    num_answers: int = 0
    outcome: Outcome | None = None  # None while the agent runs


@dataclass(frozen=True)
class Place:
    """Where a request goes: its node, if it continues an answer, and the tokens of its prompt."""

    node: Node | None
    tokens: list[int]  # that follow the answer, or the whole prompt
    messages: list[dict[str, str]]  # which these tokens show


class AgentBatch(Batch):
    """The agents of the problems of a phase, `group_size` for each."""

    has_replies = True
    is_whole = False  # agents add sequences

    def __init__(
        self,
        sampler: Sampler,
        problems: list[Problem],
        first_problem: int,
        group_size: int,
        check_stop: interrupt.StopCheck,
    ) -> None:
        """first_problem: index of the first problem among those of all hosts."""
        super().__init__([])
        self.sampler = sampler
        self.task = sampler.task
        self.group_size = group_size
        self.check_stop = check_stop
        self.shown = terminal.Phase("sample")
        self.seconds_waited = 0.0  # for agents, with nothing to decode
        self.host = agents.host_of(sampler.pool)
        self.inbox: agents.Inbox = queue.SimpleQueue()
        self.trees: dict[Session, Tree] = {}
        for number, problem in enumerate(problems):
            for sample_index in range(group_size):
                session = Session(as_object(problem.gold), self.inbox, self.task.agent_requests)
                episode = (first_problem + number) * group_size + sample_index
                first_request_id = episode * self.task.agent_requests
                tree = Tree(problem, sample_index, first_request_id, session)
                self.trees[session] = tree
        self.num_running = len(self.trees)
        self.live: dict[Sequence, Branch] = {}  # that are decoded
        self.new: dict[bytes, list[Sequence]] = {}  # by prompt: to admit
        self.further: Groups = []  # to admit, with the beginning of another sequence
        self.ready: list[Reply] = []
        self.prompt_ids = itertools.count()
        self.problem_of: dict[int, Problem] = {}  # by prompt_id
        self.template = find_template(self.task.template, ENVIRONMENT_TEMPLATES)
        self.run: Scheduler

    # -- the source of the decoder -----------------------------------------------------------------

    def begin(self, run: Scheduler) -> None:
        """See `Source.begin`. Starts all agents."""
        self.run = run
        agent = agents.find_agent(self.task.agent)
        for session in self.trees:
            self.host.start(session, agent, self.task)

    def admit(self, run: Scheduler) -> Groups:
        """See `Source.admit`. Blocks while all agents compute."""
        self.check_stop()
        while not self.inbox.empty():
            self.take(self.inbox.get())
        start = time.perf_counter()
        while self.num_running and not (self.live or self.ready):
            try:
                self.take(self.inbox.get(timeout=POLL_SECONDS))
            except queue.Empty:
                self.check_stop()
                self.sampler.pool.poll()  # raises an error of the agents' event loop
        self.seconds_waited += time.perf_counter() - start

        groups = self.further
        for sequences in self.new.values():
            for first in range(0, len(sequences), self.group_size):
                groups.append(sequences[first : first + self.group_size])
        self.new, self.further = {}, []
        return groups

    def replies(self, wait: bool) -> list[Reply]:
        """See `Source.replies`. `admit` has waited."""
        replies, self.ready = self.ready, []
        return replies

    def turn_ended(self, run: Scheduler, sequence: Sequence) -> None:
        """Answers the request of a turn, once all its choices are there."""
        branch = self.live.pop(sequence)
        self.shown.advance()
        self.shown.tokens = run.counters.decoded_tokens
        pending, branch.call = branch.call, None
        if pending is None or branch.tree.outcome is not None:
            # The agent has ended meanwhile.
            if not sequence.is_finished:
                self.ready.append((sequence, None))
            return
        self.sampler.history.add(self._key_of(sequence), sequence)
        choice = self.choice_of(branch, pending.call.request)
        pending.choices[pending.numbers[branch]] = branch, choice
        if len(pending.choices) == pending.call.request.num_choices:
            self.answer(branch.tree, pending)

    def past_responses(self, sequence: Sequence) -> list[Int32[np.ndarray, " tokens"]]:
        """See `Source.past_responses`."""
        return list(self.sampler.history.of(self._key_of(sequence)))

    def _key_of(self, sequence: Sequence) -> tuple[str, str]:
        problem = self.problem_of[sequence.prompt_id]
        return problem.task, problem.id

    def close(self) -> None:
        """Ends the agents that still run."""
        for session, tree in self.trees.items():
            if tree.outcome is None:
                session.cancel()

    # -- events of the agents ----------------------------------------------------------------------

    def take(self, event: agents.Event) -> None:
        """Begins the responses to a request, or ends the episode of an agent."""
        if isinstance(event, Ended):
            self.end(self.trees[event.session], event.outcome)
            return
        tree = self.trees[event.session]
        try:
            self.check_room(event.request, self.run.settings.longest_episode)
            request_digests = digests(event.request)
            place = self.place_of(tree, event.request, request_digests)
        except (ValueError, TypeError, KeyError) as error:
            event.session.num_refused += 1
            is_reason = isinstance(error, RequestError)
            event.refuse(error if is_reason else RequestError(reason_of(error)))
            return
        num_turns = place.node.num_turns if place.node is not None else 0
        pending = PendingCall(event, request_digests[-1], num_turns)
        for number in range(event.request.num_choices):
            branch = self.begin_turn(tree, event.request, place)
            branch.call = pending
            branch.messages.append(place.messages)
            pending.numbers[branch] = number
            self.live[branch.sequence] = branch

    def end(self, tree: Tree, outcome: Outcome) -> None:
        """Ends an episode: no further turn of its sequences begins."""
        tree.outcome = outcome
        self.num_running -= 1
        for branch in tree.branches:
            if branch.sequence in self.live:
                # The scheduler ends a sequence that has reached its limit.
                branch.sequence.length_limit = 0
            elif not branch.sequence.is_finished:
                self.ready.append((branch.sequence, None))

    def place_of(self, tree: Tree, request: Request, request_digests: list[bytes]) -> Place:
        """Returns where a request goes.

        Raises:
            RequestError: the request has no room, or the chat template cannot write it.
        """
        settings = self.run.settings
        # The longest history that ends with an answer, and after which the policy is asked anew.
        for length in reversed(range(1, len(request.messages))):
            nodes = tree.nodes.get(request_digests[length], [])
            new = request.messages[length:]
            if not nodes or any(message.get("role") == "assistant" for message in new):
                continue
            # If several choices have the same text, one that nobody has continued yet.
            node = next(filter(is_tip, nodes), nodes[0])
            sequence = node.branch.sequence
            if node.num_turns >= settings.max_turns:
                raise RequestError(
                    f"rollout.max_turns={settings.max_turns}: the conversation has had all its "
                    "responses; raise it, or begin another one",
                    code=CONTEXT,
                )
            room = sequence.longest_length(settings) - node.end
            messages = plain_messages(new)
            with naming_template():
                tokens = tokens_after_turn(
                    self.sampler.tokenizer,
                    messages,
                    self.template.reply,
                    self.task.control_tokens,
                    int(sequence.tokens.ids[node.end - 1]),
                    self.run.engine.stop_ids,
                )
            if len(tokens) >= room:
                raise no_room(f"the {len(tokens)} tokens of the new messages", room - 1)
            return Place(node, tokens, messages)

        longest = settings.max_prompt_tokens
        self.check_room(request, longest)
        messages = plain_messages(request.messages)
        with naming_template():
            tokens = self.prompt_tokens(messages, request.tools)
        if len(tokens) > longest:
            raise no_room(f"the {len(tokens)} tokens of the messages", longest)
        return Place(None, tokens, messages)

    def check_room(self, request: Request, most: int) -> None:
        """Raises RequestError if messages have certainly more than `most` tokens.

        To read and to tokenize very long messages would take long.
        """
        texts = list(texts_of(request))
        if sum(map(len, texts)) // longest_token(self.sampler.tokenizer) > most:
            raise no_room(f"{sum(map(len, texts))} characters of messages", most)

    def prompt_tokens(self, messages: list[dict[str, str]], tools: list[JsonValue]) -> list[int]:
        """Returns the tokens of a request that continues nothing."""
        if not self.template.chat:
            # A model from scratch without a chat template reads the contents.
            text = "\n".join(message["content"] for message in messages)
            return tokenizer.prompt_ids(
                self.sampler.tokenizer,
                text,
                keeps_control_tokens=self.task.control_tokens,
                inserted=text,
            )
        return tokenizer.prompt_ids(
            self.sampler.tokenizer,
            messages,
            [as_object(tool, "a tool") for tool in tools],
            keeps_thoughts=self.run.engine.settings.thoughts == "keep",
            keeps_control_tokens=self.task.control_tokens,
        )

    # -- sequences ---------------------------------------------------------------------------------

    def begin_turn(self, tree: Tree, request: Request, place: Place) -> Branch:
        """Begins a response, in the sequence of its node if that is free, or in a new one."""
        node = place.node
        if node is not None and is_tip(node):
            sequence = node.branch.sequence
            set_turn(sequence, request)
            self.ready.append((sequence, place.tokens))
            return node.branch
        settings = self.run.settings
        number = len(tree.branches)
        prompt_id = next(self.prompt_ids)
        request_id = tree.first_request_id + number
        longest = min(settings.max_new_tokens, request.max_tokens or settings.max_new_tokens)
        if node is None:
            prompt = np.array(place.tokens, np.int32)
            same = self.new.setdefault(prompt.tobytes(), [])
            if same:
                # The scheduler shares the prefill of a group.
                prompt_id = same[0].prompt_id
            limit = len(prompt) + min(longest, settings.longest_continuation)
            sequence = Sequence(prompt_id, tree.sample_index, request_id, prompt, limit)
            branch = Branch(tree, number, sequence)
            same.append(sequence)
        else:
            trunk = node.branch.sequence
            history = trunk.tokens.first(node.end).replaced(
                sampled=np.zeros(node.end, bool),
                logps=np.zeros(node.end, np.float32),
                versions=np.full(node.end, -1, np.int32),
            )
            history.append(place.tokens)
            room = trunk.longest_length(settings)
            sequence = Sequence(
                prompt_id,
                tree.sample_index,
                request_id,
                trunk.prompt_tokens,
                min(len(history) + longest, room),
                tokens=history,
                turn_start=len(history),
            )
            branch = Branch(tree, number, sequence, trunk=(node.branch, node.end))
            self.further.append([sequence])
        self.problem_of[sequence.prompt_id] = tree.problem
        set_turn(sequence, request)
        tree.branches.append(branch)
        return branch

    def choice_of(self, branch: Branch, request: Request) -> Choice:
        """Returns the response of the turn that has ended."""
        turn = branch.sequence.turns[-1]
        text = turn.text
        # As in OpenAI's API, a response ends before a stop string of its request.
        ends = [text.find(stop) for stop in request.stop if stop in text]
        if ends and turn.finish_reason == "stop":
            text = text[: min(ends)]
        prefix = f"call_{branch.number}_{len(branch.sequence.turns)}"
        message = assistant_message(text, request.tools, prefix)
        return Choice(message, is_truncated=turn.finish_reason == "length")

    def answer(self, tree: Tree, pending: PendingCall) -> None:
        """Answers a request, and keeps its choices for requests that continue them."""
        chosen = [pending.choices[number] for number in sorted(pending.choices)]
        turns = [branch.sequence.turns[-1] for branch, _ in chosen]
        tree.num_answers += 1
        id = f"chatcmpl-{tree.num_answers}"
        # Nodes first: the agent may ask again at once.
        for number, (branch, choice) in enumerate(chosen):
            end = branch.sequence.turns[-1].end
            node = Node(branch, end, pending.num_turns + 1)
            tree.nodes.setdefault(digest(pending.digest, choice.message), []).append(node)
            branch.num_answered = len(branch.sequence.turns)
            branch.last_answer = tree.num_answers
            branch.answer_ids.append(f"{id}/{number}" if number else id)
        pending.call.finish(
            Answer(
                [choice for _, choice in chosen],
                id,
                prompt_tokens=turns[0].start,
                completion_tokens=sum(turn.end - turn.start for turn in turns),
            )
        )

    # -- the result --------------------------------------------------------------------------------

    def rollouts(self) -> list[Rollout]:
        """Returns the episodes, in the order of the problems."""
        return [self.to_rollout(tree) for tree in self.trees.values()]

    def to_rollout(self, tree: Tree) -> Rollout:
        """Returns an episode: the sequences of its tree, up to their last answered turn."""
        assert tree.outcome is not None, "the agent runs"
        branches = trained_branches(tree, self.task.agent_credit)
        parts: list[Tokens] = []
        starts: list[int] = []
        turns: list[Turn] = []
        start = 0
        for branch in branches:
            answered = branch.sequence.turns[: branch.num_answered]
            parts.append(branch.sequence.tokens.first(answered[-1].end))
            starts.append(start)
            for turn, id, messages in zip(
                answered, branch.answer_ids, branch.messages, strict=False
            ):
                if turns:
                    before = grade_of(turns[-1])
                    turns[-1] = replace(turns[-1], grade=replace(before, reply=messages))
                grade = Grade(tree.outcome.completions.get(id, 0.0), False, "asked")
                if self.task.agent_credit != "branch":
                    grade = replace(grade, score=0.0)
                turns.append(
                    replace(turn, start=turn.start + start, end=turn.end + start, grade=grade)
                )
            start += len(parts[-1])
        if not turns:
            # A rollout has at least one token. Nothing of it is trained.
            parts, starts, turns = [Tokens([0])], [0], [Turn(1, 1, "", "stop")]
        turns[-1] = replace(turns[-1], grade=final_grade(tree, turns[-1]))
        return Rollout(
            tree.problem,
            tree.sample_index,
            Tokens.concatenate(parts),
            tuple(turns),
            branch_starts=tuple(starts),
        )

    def add_counts(self, counters: DecodeCounters) -> None:
        """Adds the counts of the agents."""
        for session, tree in self.trees.items():
            counters.agent_refused += session.num_refused
            counters.agent_branches += len(tree.branches)
            trained = trained_branches(tree, self.task.agent_credit)
            origins = [origin for branch in trained for origin in trained_origins(branch)]
            counters.agent_repeated_tokens += len(origins) - len(set(origins))
            for branch in tree.branches:
                counters.agent_responses += branch.num_answered
                answered = branch.sequence.turns[: branch.num_answered]
                end = answered[-1].end if answered else 0
                counters.agent_unread_tokens += int(branch.sequence.tokens.sampled[end:].sum())


def is_tip(node: Node) -> bool:
    """Returns whether the sequence of a node waits for its next turn there."""
    branch = node.branch
    is_free = branch.call is None and not branch.sequence.is_finished
    return is_free and len(branch.sequence) == node.end


def set_turn(sequence: Sequence, request: Request) -> None:
    """Sets what a request asks for its turn."""
    sequence.turn_tokens = request.max_tokens
    sequence.stop_strings = list(request.stop)


def trained_branches(tree: Tree, credit: str) -> list[Branch]:
    """Returns the branches with an answer, in order; with the credit "last" only the latest."""
    answered = [branch for branch in tree.branches if branch.num_answered]
    if credit == "last" and answered:
        return [max(answered, key=lambda branch: branch.last_answer)]
    return answered


def trained_origins(branch: Branch) -> Iterator[tuple[int, int]]:
    """Yields for each trained token of a branch the sequence that sampled it, and its place."""
    tokens = branch.sequence.tokens
    end = branch.sequence.turns[branch.num_answered - 1].end
    for place in np.flatnonzero(tokens.sampled[:end]).tolist():
        origin = branch
        while origin.trunk is not None and place < origin.trunk[1]:
            origin = origin.trunk[0]
        yield id(origin), place


def final_grade(tree: Tree, turn: Turn) -> Grade:
    """Returns the grade of the last turn of an episode, which has the reward of the agent."""
    outcome = tree.outcome
    assert outcome is not None
    failure = outcome.failure
    if not failure and turn.start == turn.end:
        failure = "error: the agent has ended without a request"
    if failure:
        return Grade(0.0, False, failure, outcome.seconds, failed=True)
    own = turn.grade.score if turn.grade is not None else 0.0
    return Grade(
        outcome.reward.value + own,
        outcome.is_correct,
        "correct" if outcome.is_correct else "ended",
        outcome.seconds,
        parts={f"{agents.NAME}.{name}": part for name, part in outcome.reward.parts.items()},
    )


# Messages.


def digests(request: Request) -> list[bytes]:
    """Returns a digest of the tools, and of the tools with the first messages, for every number."""
    found = [digest(b"", {"tools": request.tools})]
    for message in request.messages:
        found.append(digest(found[-1], message))
    return found


def digest(before: bytes, message: Message) -> bytes:
    """Returns the digest of messages, of which `before` has all but the last one.

    Clients add and leave out fields of the policy's messages, and write the arguments of calls in
    their own way.
    """
    meaning = {name: message[name] for name in (*MESSAGE_FIELDS, "tools") if message.get(name)}
    if calls := message.get("tool_calls"):
        functions = map(meaning_of, as_list(calls, "tool_calls"))
        meaning["tool_calls"] = [[name, arguments] for name, arguments in functions]
    text = json.dumps(meaning, sort_keys=True)
    return hashlib.sha256(before + text.encode()).digest()


def meaning_of(call: JsonValue) -> tuple[str, JsonValue]:
    """Returns the name and the arguments of a tool call. Raises ValueError or TypeError."""
    name = member(call, ("function", "name"), str)
    arguments = member(call, ("function", "arguments"), str)
    with contextlib.suppress(ValueError):  # what is not JSON stays text
        return name, parse(arguments)
    return name, arguments


def plain_messages(messages: list[Message]) -> list[dict[str, str]]:
    """Returns messages for a chat template, without fields that it does not know."""
    kept: list[dict[str, JsonValue]] = []
    for message in messages:
        plain: dict[str, JsonValue] = {"content": ""}
        plain |= {name: message[name] for name in MESSAGE_FIELDS if name in message}
        if calls := message.get("tool_calls"):
            functions = map(meaning_of, as_list(calls, "tool_calls"))
            plain["tool_calls"] = [
                {"type": "function", "function": {"name": name, "arguments": arguments}}
                for name, arguments in functions
            ]
        kept.append(plain)
    return kept  # pyright: ignore[reportReturnType]  (calls of tools are lists)


def texts_of(request: Request) -> Iterator[str]:
    """Yields the texts of a request that a prompt shows. Raises RequestError for long names."""
    if request.tools:
        yield json.dumps(request.tools, ensure_ascii=False, separators=(",", ":"))
    for message in request.messages:
        for name in MESSAGE_FIELDS:
            text = message.get(name, "")
            if not isinstance(text, str):
                raise RequestError(f"the {name} of a message is {shown(text)} and not text")
            if name == "content":
                yield text
            elif len(text) > MAX_NAME:
                raise RequestError(f"the {name} of a message has more than {MAX_NAME} characters")
        if not message.get("role"):
            raise RequestError("a message has no role")
        for call in as_list(message.get("tool_calls") or [], "tool_calls"):
            name, arguments = meaning_of(call)
            yield str(name)
            yield arguments if isinstance(arguments, str) else json.dumps(arguments)


def no_room(what: str, most: int) -> RequestError:
    """Returns the error of a request without room in the context."""
    return RequestError(
        f"{what} do not fit: the context has room for {max(most, 0)} tokens "
        "(rollout.max_prompt_tokens, rollout.max_episode_tokens)",
        code=CONTEXT,
    )


@contextlib.contextmanager
def naming_template() -> Iterator[None]:
    """Turns an error of the chat template into a RequestError."""
    try:
        yield
    except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
        reason = str(error) if isinstance(error, UserError) else reason_of(error)
        raise RequestError(f"the chat template cannot write the messages: {reason}") from error
