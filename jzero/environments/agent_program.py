"""Runs a function as an agent, in a process of its own.

    python -m jzero.environments.agent_program FILE.py:function

The function gets the problem and the session from the environment variables that every program gets
(`environments.agents`), and its result becomes the reward of the episode.
"""

import json
import os
import sys

from jzero.rewards.user_functions import find_function


def main(name: str) -> None:
    """Calls the function, and writes its result to the file of the reward."""
    function = find_function(name)
    with open(os.environ["JZERO_PROBLEM_FILE"], encoding="utf-8") as file:
        problem = json.load(file)
    reward = function(
        problem,
        os.environ["OPENAI_BASE_URL"],
        os.environ["OPENAI_API_KEY"],
        os.environ["JZERO_MODEL"],
    )
    # Without a reward, the program may have sent one to the endpoint.
    if reward is not None:
        with open(os.environ["JZERO_REWARD_FILE"], "w", encoding="utf-8") as file:
            json.dump(reward, file)


if __name__ == "__main__":
    main(sys.argv[1])
