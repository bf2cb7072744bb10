"""Published sets: rows of local files and of the hub, mixed and shuffled by a seed. Imports no jax."""

import functools
import hashlib
import json
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jzero.errors import UserError

if TYPE_CHECKING:
    from jzero.config import TaskConfig as Settings
else:
    Settings = Any  # config imports jax

TEXTS, PUBLISHED = (
    tomllib.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))
    for name in ("templates.toml", "published.toml")
)
EVAL_SEED = 20250124  # not the run's seed: runs are compared on the same held-out problems


class Row(NamedTuple):
    """A problem with its answer: text, a number, or a list of which any is right."""

    problem: str
    answer: Any


@functools.cache
def load(data: str) -> dict[str, Any]:
    """The splits of a local file or directory, or of a hub id (config@id); a file is the split "train"."""
    import datasets

    made = datasets.Dataset
    readers = {
        ".json": _json,
        ".jsonl": _json,
        ".parquet": made.from_parquet,
        ".arrow": made.from_file,
    }
    path, (name, _, repository) = Path(data), data.rpartition("@")
    try:
        if path.is_dir():
            files = {each.stem: each for each in sorted(path.iterdir()) if each.suffix in readers}
            read = {
                name: readers[files[name].suffix](str(files[name]))
                for name in ("train", "test")
                if name in files
            }
            found = read or datasets.load_from_disk(data)
        elif path.exists() and path.suffix in readers:
            found = readers[path.suffix](data)
        elif (
            path.exists()
            or path.suffix in readers
            or repository.count("/") > 1
            or repository.startswith(".")
        ):
            raise FileNotFoundError(f"no such directory, or file ending in {', '.join(readers)}")
        else:
            found = datasets.load_dataset(repository, name or None)
    except Exception as error:  # the network, a foreign file: datasets raises whatever it met
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"data {data} cannot be loaded ({type(error).__name__}: {reason}): give a json, jsonl, parquet or "
            "arrow file, a directory of train and test files or of save_to_disk, or a hub id (config@id) in reach"
        ) from None
    return dict(found) if isinstance(found, dict) else {"train": found}


def load_split(data: str, *wanted: str) -> Any:
    """The Dataset of the first wanted split that there is, or of the only one."""
    splits = load(data)
    names = [name for name in wanted if name in splits] or list(splits)
    if len(splits) > 1 and names[0] not in wanted:
        raise UserError(
            f"task.data={data} has splits {', '.join(splits)}: {wanted[0]} is not among them"
        )
    return splits[names[0]]


def _json(path: str) -> Any:
    """A Dataset of JSON lines or of one array. Where some values of a column are lists, all become lists of text, else
    text where types differ: Dataset.from_json would read "[0, 1)" and "0.50" among others as JSON of their own."""
    import datasets

    text = Path(path).read_text(encoding="utf-8")
    array = text.lstrip().startswith("[")
    table = (
        json.loads(text)
        if array
        else [json.loads(line) for line in text.split("\n") if line.strip()]
    )
    columns = {
        name: [row.get(name) for row in table]
        for name in dict.fromkeys(name for row in table for name in row)
    }
    for name, values in columns.items():
        kinds = {type(value) for value in values if value is not None}
        if len(kinds) > 1 and kinds != {int, float}:
            lists = [value if isinstance(value, list) else [value] for value in values]
            texts = [[str(x) for x in each if x is not None] for each in lists]
            columns[name] = (
                texts if list in kinds else [each[0] if each else None for each in texts]
            )
    return datasets.Dataset.from_dict(columns)


def questions(dataset: Any, data: str) -> list[str]:
    """The problems of a set, without their answers."""
    return list(map(str, dataset[column(dataset, "problem", data)]))


def column(dataset: Any, what: str, data: str, wanted: str = "", advice: str = "") -> str:
    """The column that is asked for or, without a wish, the first of the known ones."""
    there = dataset.column_names
    found = [name for name in ([wanted] if wanted else PUBLISHED["columns"][what]) if name in there]
    if not found:
        advice = advice or f"task.{what}_column"
        raise UserError(f"task.data={data} has columns {', '.join(sorted(there))}: set {advice}")
    return found[0]


def rows(dataset: Any, problem: str, answer: str, data: str) -> list[Row]:
    """Problems and answers; of a worked solution in GSM8K's form, what follows ####."""
    names = [column(dataset, "problem", data, problem), column(dataset, "answer", data, answer)]
    table = dataset.select_columns(names)[:]
    return [Row(str(p), final(a)) for p, a in zip(table[names[0]], table[names[1]], strict=True)]


def final(answer: Any) -> Any:
    answer = answer[0] if isinstance(answer, list) and len(answer) == 1 else answer
    return (
        answer.rpartition("####")[2].strip()
        if isinstance(answer, str) and "####" in answer
        else answer
    )


def of_levels(dataset: Any, low: int, high: int, data: str) -> Any:
    """The rows from level `low` to `high` ("Level 3", 3 or 3.0); 0 = no bound."""
    if not low and not high:
        return dataset
    name = column(dataset, "level", data, advice="task.level_min=0 task.level_max=0")
    levels = [
        float(found[0]) if (found := re.search(r"\d+\.?\d*", str(x))) else 0.0
        for x in dataset[name]
    ]
    return dataset.select([i for i, level in enumerate(levels) if low <= level <= (high or level)])


def digest(problem: str) -> str:
    return hashlib.blake2b(
        "".join(re.findall(r"\w", problem)).lower().encode(), digest_size=6
    ).hexdigest()


def contaminated(problems: Sequence[str]) -> bool:
    """Whether most of the known test questions of GSM8K are among the problems."""
    known = set(PUBLISHED["gsm8k_test"].split())
    return 2 * len(known & set(map(digest, problems))) > len(known)


def grams(text: str, n: int) -> set[tuple[str, ...]]:
    """n-grams of lower-case words; a shorter text is one gram."""
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + n]) for i in range(max(1, len(words) - n + 1))} if words else set()


def stream(sets: Sequence[Sequence[Any]], weights: Sequence[float], seed: int) -> Any:
    """An endless shuffled sequence, anew in each epoch of a set; sets are drawn from by weight or, without, are one."""
    import grain  # here: it imports jax, and grader processes load this module

    if weights and (
        len(weights) != len(sets) or not all(isinstance(w, int | float) and w > 0 for w in weights)
    ):
        raise UserError(f"{weights=} must be a positive number for each of the {len(sets)} sets")
    if not weights and len(sets) > 1:
        sets, weights = [[row for each in sets for row in each]], ()
    mixed = [
        grain.MapDataset.source(each).seed(seed + i).shuffle().repeat()
        for i, each in enumerate(sets)
    ]
    return mixed[0] if len(mixed) == 1 else grain.MapDataset.mix(mixed, weights)
