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

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Never, TypeAlias, TypeVar, cast

import numpy as np

if TYPE_CHECKING:
    import jax
    import optax

# A prompt is text that the policy continues, or chat messages: dicts with "role" and "content".
Prompt: TypeAlias = str | list[dict[str, str]]

# A value that JSON can hold: null, a boolean, a number, text, or a list or dict of such values. The
# type checker sees Any, because it lets no code index the recursive union that would say this.
JsonValue: TypeAlias = Any

# The type of the arrays of a `Batch`.
ArrayType = TypeVar("ArrayType")

# None, as the default of the fields of a `Batch` that only some algorithms need. The type lets code
# read such a field without a check: whoever reads the field knows that the field is set.
NOT_SET = cast(Never, None)

# A model's parameters: a nested dict of arrays. `jzero.model.qwen` says which names it has.
Params: TypeAlias = "dict[str, jax.Array | Params]"


@dataclass(frozen=True)
class Problem:
    """One question whose answers can be verified.

    A task computes its problems from (task settings, seed, step) alone, so no run has to save which
    problems it has seen.
    """

    id: str  # unique within a run, such as "countdown/train/17"
    task: str  # a key of tasks.TASKS, or "module:function" of a grader
    prompt: Prompt  # with the task's template applied
    gold: JsonValue  # what the grader of the task compares a response with
    # The columns of the data set's row, where a reward asks for them; None: they are not known.
    row: dict[str, JsonValue] | None = None
    # The schemas of the tools of an environment that answers their calls itself, which the prompt
    # shows; None: it has none. A list, because rollouts go to other hosts as msgpack.
    tools: list[JsonValue] | None = None


@dataclass(frozen=True)
class Grade:
    """A grader's verdict on one response, or on an episode of several responses."""

    score: float  # the reward
    correct: bool  # whether the response counts as right in accuracies
    reason: str  # "correct", "wrong value", "no answer", "timeout", ...
    seconds: float = 0.0  # wall time inside the grader
    # The named rewards of which `score` is the weighted sum; "function.part" is a part of such a
    # reward, where the function names parts.
    parts: dict[str, float] = field(default_factory=dict)
    # The environment's answer to the response: text, or the messages of tools. None ends the
    # episode.
    reply: Prompt | None = None
    # Whether a function of the user's raised, took too long, ended its process or returned no
    # reward. The response then has no score, whatever `score` says, and nothing is trained on it.
    # `correct` is the verdict of the task's grader, if that had come to one.
    failed: bool = False
    # What became of the tools that the response called.
    tool_calls: int = 0
    failed_tool_calls: int = 0
    tool_seconds: float = 0.0

    @property
    def known_score(self) -> float | None:
        """The score as people read it: None where there is none, because a function failed."""
        return None if self.failed else self.score


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
    """One episode as the sampler recorded it, with arrays in host memory. Every rollout has its
    own number of tokens T.

    The tokens are the prompt, then the responses of the policy with the replies of the environment
    between them. A task with a single turn is the case of an environment that never replies.
    """

    problem: Problem
    sample_index: int  # place among the G rollouts of the problem
    tokens: np.ndarray  # i32[T] prompt, responses and replies
    sampled: np.ndarray  # bool[T] True where the policy chose the token
    # f32[T] log-probability under the sampler, at the temperature and over the full vocabulary, or
    # over `kept` where that is set; 0 where the token was not sampled.
    logps: np.ndarray
    versions: np.ndarray  # i32[T] version of the policy that sampled the token; -1 elsewhere
    turns: tuple[Turn, ...]  # at least one; the first starts where the prompt ends
    grade: Grade | None = None  # verdict on the whole episode
    advantage: float = 0.0  # mean over the sampled tokens; set once an update has computed it
    # i32[T, K] the tokens that the sampler's filters kept where the token was sampled, -1 behind
    # them and elsewhere. None: all tokens, or they are not remembered.
    kept: np.ndarray | None = None
    # i16[T, L * k] the experts, in all L layers, that the input which predicted the token went to
    # in the sampler; -1 for the first token. None: they are not remembered.
    routes: np.ndarray | None = None

    @property
    def prompt_length(self) -> int:
        """Number of tokens of the prompt."""
        return self.turns[0].start

    @property
    def response_length(self) -> int:
        """Number of tokens after the prompt, replies of the environment included."""
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
    causally to its own segment of the slot. Slots do not see each other. A prefix of 0 tokens with
    one slot is plain packing.

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
    """Packed rows of one layout, as the programs of `jzero.training.learner` read them.

    `Batch[np.ndarray]` is what packing returns, `Batch[jax.Array]` lies on the mesh, and
    `Batch[jax.ShapeDtypeStruct]` is what programs are compiled for ahead of time.

    Every field but `kept` and `routes` is [M, B, T], or [B, T] inside the loop over microbatches. A
    field that the algorithm does not need is None. The input at position t predicts the target at
    position t.
    """

    tokens: ArrayType  # i32 input ids
    targets: ArrayType  # i32 the id that follows the input in the input's own sequence
    # i32 number of the sequence within its slot, from 1; 0 = padding. A token attends within its
    # segment, and every segment of the row sees the prefix.
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
    # i32[M, B, T, K] the tokens that the sampler's filters kept beside the target; -1: none
    kept: ArrayType | None = None
    # i16[M, B, T, L * k] the experts that the input shall go to; -1: those of the router's choice
    routes: ArrayType | None = None
    ce_weights: ArrayType | None = None  # f32 weight of the cross-entropy; None = `weights`
    old_values: ArrayType = NOT_SET  # f32 the critic's values before the step
    returns: ArrayType = NOT_SET  # f32 the critic's targets


@dataclass(frozen=True)
class State:
    """Everything that training changes: what checkpoints hold, and what updates donate and return.

    The fields are plain nested dicts and Optax states, so a State passes through `jax.jit` and is
    saved leaf by leaf.
    """

    params: Params  # f32 master weights of what is trained: the model, or an adapter on `base`
    opt_state: optax.OptState
    step: jax.Array  # i32[] optimizer steps done, without those that optimizer.skip_norm refused
    critic: State | None = None  # the critic's own State where the algorithm needs a critic
    # The frozen model under `params`, where these are an adapter. The critic's State has the same
    # arrays. Updates pass the base on as it is; checkpoints do not hold it.
    base: Params = field(default_factory=dict)


def grade_of(graded: Rollout | Turn) -> Grade:
    """Returns the grade of a rollout or turn that must have been graded."""
    assert graded.grade is not None, f"{graded} was not graded"
    return graded.grade
