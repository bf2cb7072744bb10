"""Moved from jzero.metrics."""

import json
from pathlib import Path
from typing import Any

from jzero.files import fill_template, write_atomic
from jzero.types import Rollout


def trajectory(rollout: Rollout) -> dict[str, Any]:
    """An episode. Lengths are in tokens; head and tail the versions of the first and the last that the policy wrote."""
    versions = rollout.versions[rollout.sampled].tolist()
    of = lambda grade: {"reward": grade.score, "success": grade.correct, "reason": grade.reason}
    turns: list[dict[str, Any]] = []
    for turn, before in zip(rollout.turns, (None, *rollout.turns), strict=False):
        lengths = {
            "prompt_length": turn.start,
            "answer_length": int(rollout.sampled[turn.start : turn.end].sum()),
        }
        reply = {"reply": before.grade.reply} if before and before.grade else {}
        turns.append(
            lengths | of(turn.grade) | {"finish": turn.finish_reason, "answer": turn.text} | reply
        )
    whole = {
        "id": rollout.problem.id,
        "sample": rollout.sample_index,
        "prompt": rollout.problem.prompt,
    }
    whole |= {"prompt_length": rollout.prompt_length, "answer_length": len(versions)} | of(
        rollout.grade
    )
    return whole | {"version_head": versions[0], "version_tail": versions[-1], "turns": turns}


def write_trajectories(workdir: Path, rollouts: list[Rollout]) -> None:
    """`trajectories/<version that began it>/<problem id>.txt` and `.jsonl`: a step that is repeated writes the same."""
    files: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for each in map(trajectory, rollouts):
        files.setdefault((each["version_head"], each["id"].replace("/", "_")), []).append(each)
    for (version, name), rows in files.items():
        directory = workdir / "trajectories" / str(version)
        directory.mkdir(parents=True, exist_ok=True)
        write_atomic(
            directory / f"{name}.txt",
            "\n\n".join(fill_template("episode.txt", **each) for each in rows) + "\n",
        )
        write_atomic(directory / f"{name}.jsonl", "".join(json.dumps(each) + "\n" for each in rows))
