"""Writes multi-turn episodes as readable files: `trajectories/<version>/<problem>.txt`.

train.trajectories names another folder.

The folder is the policy version that sampled the first token. A `.jsonl` file next to each text
file holds the same episodes as JSON objects. A step that is repeated after a kill writes the same
files again.
"""

import json
from pathlib import Path

from jzero.files import JsonObject, write_atomic
from jzero.run.samples import place_of
from jzero.types import Grade, Prompt, Rollout, Turn, grade_of


def write_trajectories(folder: Path, rollouts: list[Rollout], lines_are: str = "episode") -> None:
    """Writes the episodes of each problem to one text file and one JSON Lines file in `folder`.

    lines_are: "episode" or "turn", the content of a line (train.trajectory_lines).
    """
    episodes_by_file: dict[Path, list[JsonObject]] = {}
    for rollout in rollouts:
        episode = describe_episode(rollout)
        directory = folder / str(episode["version_head"])
        # A slash in a problem id would create a folder.
        path = directory / episode["id"].replace("/", "_")
        episodes_by_file.setdefault(path, []).append(episode)

    for path, episodes in episodes_by_file.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        texts = [format_episode(episode) for episode in episodes]
        rows = episodes
        if lines_are == "turn":
            rows = [row for episode in episodes for row in turn_rows(episode)]
        lines = [json.dumps(row) + "\n" for row in rows]
        # Not `with_suffix`: a problem id may contain a dot.
        write_atomic(path.with_name(f"{path.name}.txt"), "\n\n".join(texts) + "\n")
        write_atomic(path.with_name(f"{path.name}.jsonl"), "".join(lines))


def turn_rows(episode: JsonObject) -> list[JsonObject]:
    """Returns a row for each turn of an episode, with the episode's id, sample and prompt."""
    shared = {name: episode[name] for name in ("id", "sample", "prompt")}
    if "task" in episode:
        shared["task"] = episode["task"]
    turns = episode["turns"]
    return [
        {**shared, "turn": number, "turns": len(turns), **turn}
        for number, turn in enumerate(turns, start=1)
    ]


def describe_episode(rollout: Rollout) -> JsonObject:
    """Returns the JSON object of a graded rollout.

    Lengths are in tokens. `version_head` and `version_tail` are the policy versions that sampled
    the first and the last token, for the episode and for each turn.
    """
    versions = rollout.tokens.versions[rollout.tokens.sampled].tolist()
    episode = {
        "id": rollout.problem.id,
        **place_of(rollout.problem),
        "sample": rollout.sample_index,
        "prompt": rollout.problem.prompt,
        "prompt_length": rollout.prompt_length,
        "answer_length": len(versions),
        "advantage": rollout.advantage,
        **_describe_grade(grade_of(rollout)),
        **version_range(versions),
        "turns": [],
    }
    if rollout.problem.row_task:
        episode["task"] = rollout.problem.row_task
    previous: Turn | None = None
    for turn in rollout.turns:
        episode["turns"].append(_describe_turn(rollout, turn, previous))
        previous = turn
    return episode


def _describe_turn(rollout: Rollout, turn: Turn, previous: Turn | None) -> JsonObject:
    """Returns the JSON object of a turn, with the environment's reply that preceded it."""
    sampled = rollout.tokens.sampled[turn.start : turn.end]
    versions = rollout.tokens.versions[turn.start : turn.end][sampled].tolist()
    row = {
        "prompt_length": turn.start,
        "answer_length": len(versions),
        **version_range(versions),
        **_describe_grade(grade_of(turn)),
        "finish": turn.finish_reason,
        "answer": turn.text,
    }
    if previous is not None:
        row["reply"] = grade_of(previous).reply
    return row


def version_range(versions: list[int]) -> JsonObject:
    """Returns the first and the last version; -1 if an agent has failed without a response."""
    first, last = (versions[0], versions[-1]) if versions else (-1, -1)
    return {"version_head": first, "version_tail": last}


def _describe_grade(grade: Grade) -> JsonObject:
    row = {"reward": grade.known_score, "success": grade.correct, "reason": grade.reason}
    if grade.parts:
        row["rewards"] = grade.parts
    return row


def _reply_text(reply: Prompt) -> str:
    """Returns a reply as text: one line per message, prefixed with the tool's name or the role."""
    if isinstance(reply, str):
        return reply
    lines = []
    for message in reply:
        sender = message.get("name") or message["role"]
        lines.append(f"[{sender}] {message['content']}")
    return "\n".join(lines)


def format_episode(episode: JsonObject) -> str:
    """Returns the text of an episode: the prompt, then each reply and answer under a heading."""
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
    """Returns the reward as text; the reward is None if a user-defined function failed."""
    return "none" if reward is None else f"{reward:g}"
