"""Episodes of several turns: the parts of the settings `task.turn_reward` and `task.feedback`."""

from dataclasses import dataclass

from jzero.setting import setting


@dataclass(frozen=True)
class Success:
    """((correct - 1/2) * 2 - bias) * scaling, where correct is 0 or 1."""

    bias: float = setting(0.0, "Subtracted from the reward before scaling.", at_least=None)
    scaling: float = setting(1.0, "Factor of the reward.")


@dataclass(frozen=True)
class Score:
    """The grader's score."""


@dataclass(frozen=True)
class Feedback:
    """One reply to correct answers, and one to wrong answers."""

    right: str = setting(
        "Yes, that is the right answer.", "Reply to a correct answer.", is_text=True
    )
    wrong: str = setting(
        "No, that is not the right answer. Look for the mistake and try once more.",
        "Reply to a wrong answer.",
        is_text=True,
    )
