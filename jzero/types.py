"""The values that flow through a step, as frozen dataclasses.

    Problem -> Rollout (its turns and tokens) -> the same Rollout with a Grade -> Batch -> State

A task makes `Problem`s. The sampler answers each problem several times and returns one `Rollout`
for each answer. Graders add a `Grade` to every turn and to the rollout. `jzero.training` packs
rollouts into `Batch`es and computes the next `State` from them.

Shapes are written with these letters: P prompts, G rollouts of one prompt (group), N = P * G
rollouts, M microbatches, B packed rows, T tokens. i32[T] is an array of T 32-bit integers.

Processes that grade responses import this module and must start quickly, so it imports no JAX.
`jzero.training` registers `Batch` and `State` with JAX as pytrees when it is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Generic, NamedTuple, Never, TypeAlias, TypeVar, cast

import numpy as np

from jzero.json_types import JsonValue as JsonValue
from jzero.json_types import Prompt as Prompt
from jzero.tokens import Tokens

if TYPE_CHECKING:
    import jax
    import optax

# The type of the arrays of a `Batch`.
ArrayType = TypeVar("ArrayType")

# None, as the default of the fields of a `Batch` that only some algorithms need. The type Never
# lets code read such a field without a check for None: only algorithms that set it read it.
NOT_SET = cast(Never, None)

# A model's parameters: a nested dict of arrays. `jzero.model.qwen` defines the names.
Params: TypeAlias = "dict[str, jax.Array | Params]"


@dataclass(frozen=True)
class Problem:
    """One question with verifiable answers.

    A task computes its problems only from (task settings, seed, step), so a run does not have to
    save which problems it has seen.
    """

    id: str  # unique within a run, such as "countdown/train/17"
    task: str  # a key of tasks.TASKS, or "module:function" of a grader
    prompt: Prompt  # with the task's template applied
    gold: JsonValue  # the reference that the grader of the task compares a response with
    # The columns of the data set's row, if a reward reads them; None: not available.
    row: dict[str, JsonValue] | None = None
    # The tool schemas in the prompt, if the environment answers tool calls itself; None: no such
    # tools. A list, because rollouts go to other hosts as msgpack.
    tools: list[JsonValue] | None = None
    # The task name in the data set's row if task.name=mixed, such as "code"; "" otherwise.
    row_task: str = ""
    # The text that a plain template has inserted into `prompt`, whose control tokens are text. ""
    # for messages, and for prompts that the data set has as a whole.
    inserted: str = ""
    # The row of a data set that the problem is: the path or hub id of the set, and the number of
    # the row in its split, from 0. `id` has the place in the run's order of problems instead. ""
    # and None: no data set has the problem.
    data: str = ""
    data_row: int | None = None


@dataclass(frozen=True)
class Grade:
    """A grader's verdict on one response, or on an episode of several responses."""

    score: float  # the reward
    correct: bool  # whether the response counts as right in accuracies
    reason: str  # "correct", "wrong value", "no answer", "timeout", ...
    seconds: float = 0.0  # wall time inside the grader
    # The named rewards of which `score` is the weighted sum. If a reward function returns named
    # parts, these are "function.part".
    parts: dict[str, float] = field(default_factory=dict)
    # The environment's answer to the response: text, or the messages of tools. None ends the
    # episode.
    reply: Prompt | None = None
    # Whether a user-defined function raised, timed out, ended its process or returned no reward.
    # The response then has no score (`score` is ignored) and is not trained on. `correct` is the
    # verdict of the task's grader, if the grader had finished.
    failed: bool = False
    # The reward function, or the environment, that failed; "" for a grader.
    failed_function: str = ""
    # Counts and seconds of the tool calls in the response.
    tool_calls: int = 0
    failed_tool_calls: int = 0
    tool_seconds: float = 0.0

    @property
    def known_score(self) -> float | None:
        """The score, or None if a function failed and there is no score."""
        return None if self.failed else self.score


# The response and the grade of each turn of an episode so far, the oldest first. A grade may be
# missing: a turn that no grader has seen has none.
Turns: TypeAlias = "Sequence[tuple[str, Grade | None]]"


@dataclass(frozen=True)
class Turn:
    """One response of an episode: `tokens[start:end]` of its rollout.

    The end-of-turn tokens and the reply that the environment puts after a response are not part of
    the turn.
    """

    start: int
    end: int
    text: str  # the response as the grader sees it
    finish_reason: str  # "stop": the policy ended it; "length": it reached rollout.max_new_tokens
    grade: Grade | None = None  # its score is the reward of this turn


@dataclass(frozen=True)
class Rollout:
    """One episode as the sampler recorded it, with arrays in host memory.

    Every rollout has its own number of tokens T.
    """

    problem: Problem
    sample_index: int  # place among the G rollouts of the problem
    # The prompt, then the responses of the policy with the replies of the environment between them.
    # In a single-turn task the environment never replies.
    tokens: Tokens
    turns: tuple[Turn, ...]  # at least one; the first starts where the prompt ends
    grade: Grade | None = None  # verdict on the whole episode
    advantage: float = 0.0  # mean over the sampled tokens; set once an update has computed it
    advantages: np.ndarray | None = None  # f32[T] of the tokens; None before the update
    # Where the sequences of the episode begin in `tokens`. An episode is one sequence, unless its
    # agent has branched off (`rollout.agents`): the sequences of its tree then follow each other,
    # each with its own prompt. A later sequence repeats no sampled token of an earlier one as
    # sampled.
    branch_starts: tuple[int, ...] = (0,)

    @property
    def prompt_length(self) -> int:
        """Number of tokens of the prompt."""
        return self.turns[0].start

    @property
    def branches(self) -> list[slice]:
        """The tokens of each sequence of the episode."""
        ends = (*self.branch_starts[1:], len(self.tokens))
        return [slice(start, end) for start, end in zip(self.branch_starts, ends, strict=True)]

    @property
    def response_length(self) -> int:
        """Number of tokens after the prompt, replies of the environment included.

        Further sequences of the episode count with their prompts.
        """
        return len(self.tokens) - self.prompt_length

    @property
    def text(self) -> str:
        """The text of the last response."""
        return self.turns[-1].text

    @property
    def finish_reason(self) -> str:
        """The finish reason of the last response."""
        return self.turns[-1].finish_reason


class RowLayout(NamedTuple):
    """The shape of a packed row: a prefix of `prefix` tokens, then `slots` slots of `slot` tokens.

    The prefix holds the prompt of a group. Every token of a slot attends to the prefix, and
    causally to its segment of the slot. Slots do not attend to each other. A prefix of 0 tokens
    with one slot is plain packing.

    A layout is a static argument of the jitted programs, and every layout is compiled once.
    """

    prefix: int  # tokens
    slots: int  # number of slots
    slot: int  # tokens

    @property
    def tokens(self) -> int:
        """Number of tokens of a row: T = prefix + slots * slot."""
        return self.prefix + self.slots * self.slot


@dataclass(frozen=True)
class Batch(Generic[ArrayType]):
    """Packed rows of one layout, the input of the programs of `jzero.training.learner`.

    Packing returns `Batch[np.ndarray]`, `Batch[jax.Array]` is on the mesh, and programs are
    compiled ahead of time for `Batch[jax.ShapeDtypeStruct]`.

    Every field is [M, B, T], or [B, T] inside the loop over microbatches, and so are the first axes
    of `tracks`. A field that the algorithm does not need is None. The input at position t predicts
    the target at position t. With a head of several targets (`heads.token_head`) `targets` and
    `weights` are [M, B, T, K].
    """

    tokens: ArrayType  # i32 input ids
    targets: ArrayType  # i32 the id that follows the input in its sequence
    # i32 number of the sequence within its slot, from 1; 0 = padding. A token attends to its
    # segment and to the prefix of the row.
    segments: ArrayType
    positions: ArrayType  # i32 position within the sequence, for RoPE
    # f32 weight of the target's loss term, normalized over the whole optimizer step. 0 means that
    # the target is not trained.
    weights: ArrayType = NOT_SET
    sampler_logps: ArrayType = NOT_SET  # f32 log-probability of the target under the sampler
    advantages: ArrayType = NOT_SET  # f32
    old_logps: ArrayType = NOT_SET  # f32 under pi_old, the denominator of the ratio
    ref_logps: ArrayType = NOT_SET  # f32 under the reference policy
    kl_weights: ArrayType | None = None  # f32 weight of the KL term; None = `weights`
    # f32 weight of the cross-entropy on targets that the environment replied; 0 elsewhere
    environment_weights: ArrayType | None = None
    # The optional tracks (`tokens.TRACKS`) of the targets, [M, B, T, *shape]; blank in padding
    tracks: dict[str, ArrayType] = field(default_factory=dict)
    ce_weights: ArrayType | None = None  # f32 weight of the cross-entropy; None = `weights`
    old_values: ArrayType = NOT_SET  # f32 the critic's values before the step
    returns: ArrayType = NOT_SET  # f32 the critic's targets
    # f32 bounds of the ratio that a token has for itself (`algorithms.token_losses`)
    ratio_low: ArrayType = NOT_SET
    ratio_high: ArrayType = NOT_SET

    def without_track(self, name: str) -> Batch[ArrayType]:
        """Returns the batch without an optional track."""
        tracks = {other: rows for other, rows in self.tracks.items() if other != name}
        return replace(self, tracks=tracks)

    @property
    def kept(self) -> ArrayType | None:
        """i32[M, B, T, K] the ids, including the target, that the sampler's filters kept."""
        return self.tracks.get("kept")

    @property
    def routes(self) -> ArrayType | None:
        """i16[M, B, T, L * k] router replay: the experts of the input; -1: not prescribed."""
        return self.tracks.get("routes")


@dataclass(frozen=True)
class State:
    """The complete training state: checkpoints store it, and updates donate and return it.

    The fields are plain nested dicts and Optax states, so a State passes through `jax.jit` and is
    saved leaf by leaf.
    """

    params: Params  # f32 master weights that are trained: the model, or an adapter on `base`
    opt_state: optax.OptState
    step: jax.Array  # i32[] optimizer steps done, without the ones that optimizer.skip_norm skipped
    critic: State | None = None  # the critic's State, if the algorithm needs a critic
    # The frozen base model, if `params` are an adapter; else empty. The critic's State shares the
    # arrays. Updates return the base unchanged; checkpoints do not store it.
    base: Params = field(default_factory=dict)


def grade_of(graded: Rollout | Turn) -> Grade:
    """Returns the grade of a rollout or turn that must have been graded."""
    assert graded.grade is not None, f"{graded} was not graded"
    return graded.grade
