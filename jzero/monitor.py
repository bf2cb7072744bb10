"""Episodes to read: `trajectories/<version>/<problem id>.txt` and `.jsonl` of a workdir, by the policy version that
began them. A turn's prompt is all that it follows, its answer what the policy wrote; rewards are not discounted."""

import json
from pathlib import Path
from typing import Any

from jzero import metrics
from jzero.types import Rollout


def row(rollout: Rollout) -> dict[str, Any]:
    """Lengths are in tokens; head and tail are the versions of the first and the last token that the policy wrote."""
    versions = rollout.versions[rollout.sampled].tolist()
    of = lambda grade: {"reward": grade.score, "success": grade.correct, "reason": grade.reason}
    turns: list[dict[str, Any]] = []
    for turn, before in zip(rollout.turns, (None, *rollout.turns), strict=False):
        lengths = {"prompt_length": turn.start, "answer_length": int(rollout.sampled[turn.start : turn.end].sum())}
        reply = {"reply": before.grade.reply} if before and before.grade else {}
        turns.append(lengths | of(turn.grade) | {"finish": turn.finish, "answer": turn.text} | reply)
    whole = {"id": rollout.problem.id, "sample": rollout.sample, "prompt": rollout.problem.prompt}
    whole |= {"prompt_length": rollout.prompt_length, "answer_length": len(versions)} | of(rollout.grade)
    return whole | {"version_head": versions[0], "version_tail": versions[-1], "turns": turns}


def text(row: dict[str, Any]) -> str:
    """The same for the eye."""
    out = "=== {id}, sample {sample}, versions {version_head} to {version_tail}, reward {reward:g}\n".format(**row)
    out += "--- prompt, {prompt_length} tokens\n{prompt}\n".format(**row)
    head = "--- turn {}: {answer_length} tokens after {prompt_length} ({finish}), reward {reward:g}, {reason}\n"
    for number, turn in enumerate(row["turns"], start=1):
        out += f"--- reply\n{turn['reply']}\n" if "reply" in turn else ""
        out += head.format(number, **turn) + turn["answer"] + "\n"
    return out


def write(workdir: Path, rollouts: list[Rollout]) -> None:
    """All there is of a problem and a version at once: a step that is repeated writes the same."""
    files: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for each in map(row, rollouts):
        files.setdefault((each["version_head"], each["id"].replace("/", "_")), []).append(each)
    for (version, name), rows in files.items():
        directory = workdir / "trajectories" / str(version)
        directory.mkdir(parents=True, exist_ok=True)
        metrics.write_atomic(directory / f"{name}.txt", "\n".join(map(text, rows)))
        metrics.write_atomic(directory / f"{name}.jsonl", "".join(json.dumps(each) + "\n" for each in rows))
