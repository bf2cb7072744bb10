"""The values that flow through a step. Dimensions: P prompts, G group, N = P*G, B rows, T tokens, M microbatches."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np


@dataclass(frozen=True)
class Problem:
    """One verifiable question, a pure function of (task, split, seed, index)."""

    id: str  # unique within a run: "countdown/train/17"
    task: str  # key of tasks.TASKS, or module:function of the grader
    prompt: Any  # what the policy continues, template applied: text, or messages for the tokenizer's chat template
    gold: Any  # what the task's grader needs; plain JSON values


@dataclass(frozen=True)
class Grade:
    """What a grader says of one response."""

    score: float  # the reward
    correct: bool  # counted as accuracy
    reason: str  # "correct", "wrong value", "no answer", "timeout", ...
    seconds: float = 0.0  # wall time inside the grader
    parts: dict[str, float] = field(
        default_factory=dict
    )  # named rewards that the score is the weighted sum of
    reply: str | None = (
        None  # what the environment says to the response, where it was asked; None ends the episode
    )


@dataclass(frozen=True)
class Turn:
    """One response of an episode: tokens[start:end], before the environment's end of turn and reply."""

    start: int
    end: int
    text: str  # as the grader sees it
    finish: str  # "stop" or "length"
    grade: Grade | None = None  # its score is the turn's reward


@dataclass(frozen=True)
class Rollout:
    """One episode, ragged host values: prompt tokens, then sampled (and, multi-turn, environment) tokens."""

    problem: Problem
    sample: int  # index in the problem's group
    tokens: np.ndarray  # i32[T] prompt and response
    sampled: np.ndarray  # bool[T] True where the policy chose the token
    logps: (
        np.ndarray
    )  # f32[T] log-prob under the sampler at the sampling temperature; 0 where not sampled
    versions: np.ndarray  # i32[T] policy version that sampled the token; -1 where not sampled
    turns: tuple[Turn, ...]  # the first begins where the prompt ends
    grade: Grade | None = None  # of the episode
    advantage: float = 0.0  # mean over the sampled tokens, once an update has scored it

    @property
    def prompt_length(self) -> int:
        return self.turns[0].start

    @property
    def response_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def text(self) -> str:
        return self.turns[-1].text

    @property
    def finish(self) -> str:
        return self.turns[-1].finish


class RowLayout(NamedTuple):
    """Shape of a packed row: a prefix, then `slots` independent slots. T = prefix + slots * slot. Every token of a slot
    sees the prefix, a group's prompt, and causally its own segment. prefix = 0 and slots = 1 is plain packing."""

    prefix: int
    slots: int
    slot: int

    @property
    def tokens(self) -> int:
        return self.prefix + self.slots * self.slot


@dataclass(frozen=True)
class Batch:
    """Packed rows of one layout; every field [M, B, T], or [B, T] inside the loop. What a step does not use is None."""

    tokens: Any  # i32 input ids
    targets: Any  # i32 id that follows the input in its own sequence
    segments: Any  # i32 0 = padding; tokens attend within their segment (prefix: visible to the whole row)
    positions: Any  # i32 position in the sequence (RoPE)
    weights: Any  # f32 weight of the target's loss term, normalised over the whole optimizer step; 0 = not trained
    sampler_logps: Any  # f32 log-prob of the target under the sampler
    advantages: Any = None  # f32
    old_logps: Any = None  # f32 of the ratio; None: of the policy as it is
    ref_logps: Any = None  # f32 under the reference policy
    kl_weights: Any = None  # f32 as weights, of the KL
    old_values: Any = None  # f32 the critic's, before the step
    returns: Any = None  # f32 what it should have said


@dataclass(frozen=True)
class State:
    """What training changes. Plain nested dicts and Optax state: crosses jit, is donated, is checkpointed."""

    params: Any  # fp32 master weights
    opt_state: Any
    step: Any  # i32[] optimizer steps done
    critic: "State | None" = None


def grade_of(graded: Rollout | Turn) -> Grade:
    assert graded.grade is not None, f"{graded} was not graded"
    return graded.grade
