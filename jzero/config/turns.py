"""Episodes of several turns: the parts of the settings `task.turn_reward` and `task.feedback`."""

from jzero.fields import LARGEST_FLOAT, Field, Text, part


@part
class Success:
    """((correct - 1/2) * 2 - bias) * scaling, where correct is 0 or 1."""

    bias: float = Field(default=0.0, ge=-LARGEST_FLOAT)
    """Subtracted from the reward before scaling."""
    scaling: float = 1.0
    """Factor of the reward."""


@part
class Score:
    """The grader's score."""


@part
class Feedback:
    """One reply to correct answers, and one to wrong answers."""

    right: Text = "Yes, that is the right answer."
    """Reply to a correct answer."""
    wrong: Text = "No, that is not the right answer. Look for the mistake and try once more."
    """Reply to a wrong answer."""
