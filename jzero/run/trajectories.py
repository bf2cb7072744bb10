"""Episodes of several turns as files that a person reads: `trajectories/<version>/<problem>.txt`.

The folder is the version of the policy that sampled the first token. The `.jsonl` file beside each
text holds the same episodes as JSON objects. A step that is repeated after a kill writes the same
files again.
"""

import json
from pathlib import Path

from jzero.files import JsonObject, write_atomic
from jzero.types import Grade, Prompt, Rollout, Turn, grade_of


def write_trajectories(workdir: Path, rollouts: list[Rollout]) -> None:
    """Writes the episodes of each problem to one text file and one file of JSON lines."""
    episodes_by_file: dict[Path, list[JsonObject]] = {}
    for rollout in rollouts:
        episode = describe_episode(rollout)
        directory = workdir / "trajectories" / str(episode["version_head"])
        path = directory / episode["id"].replace("/", "_")
        episodes_by_file.setdefault(path, []).append(episode)

    for path, episodes in episodes_by_file.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        texts = [format_episode(episode) for episode in episodes]
        lines = [json.dumps(episode) + "\n" for episode in episodes]
        # Not `with_suffix`: the id of a problem may hold a dot.
        write_atomic(path.with_name(f"{path.name}.txt"), "\n\n".join(texts) + "\n")
        write_atomic(path.with_name(f"{path.name}.jsonl"), "".join(lines))


def describe_episode(rollout: Rollout) -> JsonObject:
    """Returns the JSON object of a graded rollout.

    Lengths are in tokens. `version_head` and `version_tail` are the versions of the policy that
    sampled the first and the last token, of the episode and of each turn.
    """
    versions = rollout.versions[rollout.sampled].tolist()
    episode = {
        "id": rollout.problem.id,
        "sample": rollout.sample_index,
        "prompt": rollout.problem.prompt,
        "prompt_length": rollout.prompt_length,
        "answer_length": len(versions),
        **_describe_grade(grade_of(rollout)),
        "version_head": versions[0],
        "version_tail": versions[-1],
        "turns": [],
    }
    previous: Turn | None = None
    for turn in rollout.turns:
        episode["turns"].append(_describe_turn(rollout, turn, previous))
        previous = turn
    return episode


def _describe_turn(rollout: Rollout, turn: Turn, previous: Turn | None) -> JsonObject:
    """Returns the JSON object of a turn, with the environment's reply that came before it."""
    sampled = rollout.sampled[turn.start : turn.end]
    versions = rollout.versions[turn.start : turn.end][sampled].tolist()
    row = {
        "prompt_length": turn.start,
        "answer_length": len(versions),
        "version_head": versions[0],
        "version_tail": versions[-1],
        **_describe_grade(grade_of(turn)),
        "finish": turn.finish_reason,
        "answer": turn.text,
    }
    if previous is not None:
        row["reply"] = grade_of(previous).reply
    return row


def _describe_grade(grade: Grade) -> JsonObject:
    return {"reward": grade.known_score, "success": grade.correct, "reason": grade.reason}


def _reply_text(reply: Prompt) -> str:
    """Returns a reply as text, with the answers of tools on lines of their own."""
    if isinstance(reply, str):
        return reply
    return "\n".join(f"[{message['name']}] {message['content']}" for message in reply)


def format_episode(episode: JsonObject) -> str:
    """Returns the text of an episode: the prompt, then each reply and each answer under a rule."""
    lines = [
        f"=== {episode['id']}, sample {episode['sample']}, "
        f"versions {episode['version_head']} to {episode['version_tail']}, "
        f"reward {_format_reward(episode['reward'])}",
        f"--- prompt, {episode['prompt_length']} tokens",
        str(episode["prompt"]),
    ]
    for number, turn in enumerate(episode["turns"], start=1):
        if "reply" in turn:
            lines += ["--- reply", _reply_text(turn["reply"])]
        lines += [
            f"--- turn {number}: {turn['answer_length']} tokens after {turn['prompt_length']} "
            f"({turn['finish']}), versions {turn['version_head']} to {turn['version_tail']}, "
            f"reward {_format_reward(turn['reward'])}, {turn['reason']}",
            turn["answer"],
        ]
    return "\n".join(lines).rstrip("\n")


def _format_reward(reward: float | None) -> str:
    """Returns the reward as text; it is None where a function of the user's failed."""
    return "none" if reward is None else f"{reward:g}"
