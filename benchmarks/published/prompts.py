r"""Prompts of published runs: makes them with the original code, and compares jzero's with them.

    python benchmarks/published/prompts.py compare [--texts FOLDER] [--tokenizer NAME=DIRECTORY]
    python benchmarks/published/prompts.py check FILE
    python benchmarks/published/prompts.py texts ORIGINALS --out FOLDER
    python benchmarks/published/prompts.py record ORIGINALS [--tokenizer NAME=DIRECTORY]

compare makes the prompts of 20 fixed problems with the preset of each published run, and prints
whether their token ids are the recorded ones of the original code. It exits with 1 if they are not
and the run needs no text, or has its text in FOLDER. check says whether a file is a published text,
or where it begins to differ. It exits with 1 if the file is none. texts writes the published texts
that jzero does not contain, from a copy of their authors' code: `prompt_sources.py` says which.
record runs that code with the 20 problems, and writes prompts.json: the hashes of token ids for
each tokenizer, and the hashes of the texts.
"""

import argparse
import hashlib
import importlib.util
import json
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.published.settings import RUNS
from jzero.config import Config, put_value
from jzero.loops import sft
from jzero.model import tokenizer
from jzero.model.tokenizer import PreTrainedTokenizerFast
from jzero.problems import template_files
from jzero.tasks import TASKS
from jzero.training.examples import ExampleRow, Message

HASHES = Path(__file__).with_name("prompts.json")
ROOT = Path(__file__).resolve().parents[2]
BOS_OF_DISTILLED = "<｜begin▁of▁sentence｜>"
FEEDBACK = "areal_feedback"  # what AReaL's agent adds between two turns
CHARACTERS_OF_A_PREFIX = 4  # of the hash of a text up to a word

# For tokenizers without a chat template. As Qwen's, it writes a system prompt where there is none.
CHAT_TEMPLATE = (
    "{%- if messages[0]['role'] != 'system' %}<|im_start|>system\nYou answer.<|im_end|>\n"
    "{%- endif %}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


class Problem(NamedTuple):
    """A problem in all forms that the runs need."""

    question: str
    answer: str
    response: str  # with thoughts, for supervised examples
    prompt: str  # of sets that hold whole prompts


QUESTIONS = (
    "Nora has 12 pears and gives away 5 of them. How many are left?",
    "Compute $\\frac{3}{4} + \\frac{1}{6}$.",
    "Find all real $x$ with $x^2 - 5x + 6 = 0$.",
    "What is the remainder of $7^{100}$ divided by $13$?",
    "Let $f(x) = \\begin{cases} x & x > 0 \\\\ -x & x \\le 0 \\end{cases}$. What is $f(-4)$?",
    "A set is {1, 2, 3}. How many subsets does it have?",
    "The template says {question} and {instruction}. How many names are in braces?",
    "Evaluate {{ x }} for x = 3.",
    "  A question that begins with blanks: 2 + 2?",
    "A question that ends with a newline: 3 + 3?\n",
    "First line.\n\nSecond paragraph: what is 10 - 3?\n- one\n- two",
    "A\ttab, \"double\" and 'single' quotes, a \\ backslash: 1 + 0?",
    "100% of $250 is how many dollars?",
    "Wie groß ist die Fläche eines Quadrats mit der Seite 3 m? Größe in m².",
    "求 $1 + 2 + \\cdots + 100$ 的值。",
    "How many 🍎 are in 🍎🍎🍎?",
    "What is <b>5</b> & 6 > 4?",
    "User: what is 8 * 7?\nAssistant: I do not know.\nUser: try again.",
    "#### 42 is an answer. Which one?",
    "x" * 300 + "?",
)
PROBLEMS = tuple(
    Problem(
        question=question,
        answer=str(number),
        response=f"<think>\nLet me see.\n\nIt is {number}.\n</think>\n\nSo $\\boxed{{{number}}}$.",
        prompt=f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n<think>\n",
    )
    for number, question in enumerate(QUESTIONS, start=1)
)


# Texts that are not in jzero.


class Text(NamedTuple):
    """A published text, the file that `texts` writes, and the settings that take it."""

    source: str
    file: str


TEXTS = {
    "r1": Text("understand-r1-zero at 8d31b35, template r1", "r1.txt"),
    "open_r1_system": Text("open-r1, system prompt of the GRPO recipes", "open_r1_system.txt"),
    "open_r1_february": Text("open-r1 at e4ac3ae, system prompt", "open_r1_february.txt"),
    "open_r1_distilled": Text(
        "open-r1, prompt of DeepSeek-R1-Distill-Qwen-1.5B", "open_r1_distilled.txt"
    ),
    "open_r1_sft": Text("open-r1, chat template of OpenR1-Distill-7B", "open_r1_sft.jinja"),
    "areal_right": Text("AReaL at 1ec1399f1, feedback to a right answer", "areal_right.txt"),
    "areal_wrong": Text("AReaL at 1ec1399f1, feedback to a wrong answer", "areal_wrong.txt"),
}


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def prefix_digests(text: str) -> list[str]:
    """Returns short hashes of a text up to each of its words: they show where texts part."""
    words = words_of(text)
    prefixes = ["".join(words[: count + 1]) for count in range(len(words))]
    return [digest(prefix)[:CHARACTERS_OF_A_PREFIX] for prefix in prefixes]


def words_of(text: str) -> list[str]:
    """Returns the words of a text with the space before each. Together they are the text."""
    return re.findall(r"\s*\S+|\s+$", text)


def hashes_of_text(text: str) -> dict[str, str]:
    return {"sha256": digest(text), "words": "".join(prefix_digests(text))}


class Verdict(NamedTuple):
    """What `check` says of a file."""

    name: str  # of TEXTS; "" if the file is no published text
    line: str


def check_text(text: str, hashes: dict[str, dict[str, str]]) -> Verdict:
    """Returns whether a text is a published one, or from which word on it differs.

    `hashes` are those of prompts.json. A prompt may be written for Jinja.
    """
    text = re.sub(r"\{\{\s*question\s*\}\}", "{question}", text)
    for name, known in hashes.items():
        if digest(text) == known["sha256"]:
            return Verdict(name, f"this is the published {name} ({TEXTS[name].source})")
    prefixes, words = prefix_digests(text), words_of(text)
    best, best_count = "", 0
    for name, known in hashes.items():
        count = common_words(prefixes, known["words"])
        if count > best_count:
            best, best_count = name, count
    if not best:
        return Verdict("", "this is no published text: not even a first word is the same")
    total = len(hashes[best]["words"]) // CHARACTERS_OF_A_PREFIX
    line = f"this is not the published {best}: {best_count} of its {total} words are the same"
    if best_count == len(words):
        return Verdict("", f"{line}, and the others are missing here")
    return Verdict("", f"{line}, and then comes {words[best_count]!r}")


def common_words(prefixes: Sequence[str], known: str) -> int:
    """Returns the number of first words that two texts have in common, by their hashes."""
    size = CHARACTERS_OF_A_PREFIX
    for count, prefix in enumerate(prefixes):
        if known[count * size : (count + 1) * size] != prefix:
            return count
    return len(prefixes)


# Tokenizers.


def load_tokenizer(path: str, run: str) -> PreTrainedTokenizerFast:
    """Returns a tokenizer with what a run needs: a chat template, or DeepSeek's first token."""
    tok = tokenizer.load(path)
    if not tok.chat_template:
        tok.chat_template = CHAT_TEMPLATE
        tok.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    if run == "open_r1_distilled":
        tok.add_special_tokens({"bos_token": BOS_OF_DISTILLED})
    return tok


def fingerprint(path: str) -> str:
    """Returns a hash of a tokenizer's vocabulary and of its chat template."""
    tok = load_tokenizer(path, "")
    vocabulary = sorted(tok.get_vocab().items(), key=lambda item: item[1])
    return digest(json.dumps([vocabulary, tok.chat_template]))


def digest_of_ids(ids: Sequence[Sequence[int]]) -> str:
    """Returns a hash of prompts in any order: a run shuffles its problems."""
    return digest(json.dumps(sorted(list(map(int, prompt)) for prompt in ids)))


# The prompts of jzero.


class Preset(NamedTuple):
    """A preset whose prompts are compared, and the text that it needs for the published ones."""

    text: str  # a key of TEXTS, or "" if it needs none
    change: Callable[[Config, Path, Path], None]  # takes the file of the text; the last is a folder
    # What a run has to set besides its preset, because the published file has whole prompts.
    settings: str = ""


def take_template(config: Config, path: Path, folder: Path) -> None:
    config.task.template = str(path)


def take_system_prompt(config: Config, path: Path, folder: Path) -> None:
    config.task.system_prompt = template_files.read_template_file(str(path))


def take_prompt_of_code(config: Config, path: Path, folder: Path) -> None:
    """Takes the system prompt, and the problem without jzero's sentence on programs."""
    take_system_prompt(config, path, folder)
    question = folder / "question.txt"
    question.write_text("{question}\n", encoding="utf-8")
    config.task.template = f"chat:{question}"


def take_chat_template(config: Config, path: Path, folder: Path) -> None:
    put_value(config, "sft.chat_template", str(path))


def take_nothing(config: Config, path: Path, folder: Path) -> None:
    return None


PUBLISHED_PROMPTS = {
    "qwen_math": Preset("", take_nothing),
    "r1": Preset("r1", take_template),
    "gsm8k": Preset("", take_nothing),
    "countdown": Preset("", take_nothing),
    "open_r1": Preset("open_r1_system", take_system_prompt),
    "open_r1_february": Preset("open_r1_february", take_system_prompt),
    "open_r1_distilled": Preset("open_r1_distilled", take_template),
    "open_r1_code": Preset("open_r1_system", take_prompt_of_code),
    "open_r1_sft": Preset("open_r1_sft", take_chat_template),
    "areal": Preset("", take_nothing, "task.template=column:prompt task.system_prompt="),
}


def preset_config(run: str) -> Config:
    """Returns the config of the first preset that has the prompts of a run."""
    found = next(item for item in RUNS if item.prompt == run)
    path = ROOT / f"configs/{found.recipe}.py"
    spec = importlib.util.spec_from_file_location(f"{found.recipe}_recipe", path)
    assert spec is not None and spec.loader is not None, f"{path=}"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config(found.preset)


def jzero_ids(
    run: str,
    path: str,
    folder: Path,
    texts: Path | None = None,
    *,
    with_settings: bool = True,
) -> list[list[int]]:
    """Returns the token ids that a preset makes of the 20 problems.

    Args:
        run: a key of PUBLISHED_PROMPTS.
        path: the tokenizer.
        folder: where the problems are written as data sets.
        texts: the folder of published texts, None where the preset's own words are asked for.
        with_settings: False for the preset without `Preset.settings`.
    """
    preset, config = PUBLISHED_PROMPTS[run], preset_config(run)
    if texts is not None and preset.text:
        preset.change(config, texts / TEXTS[preset.text].file, folder)
    for setting in preset.settings.split() if with_settings else ():
        name, _, value = setting.partition("=")
        setattr(config.task, name.removeprefix("task."), value)
    tok = load_tokenizer(path, run)
    if config.sft is not None:
        sft.set_chat_template(tok, config.sft.chat_template)
        rows: list[ExampleRow] = [{"messages": conversation(problem)} for problem in PROBLEMS]
        return [example.tokens for example in sft.encode_rows(tok, rows, config.sft)]
    data = write_problems(config.task.name, folder)
    task = replace(config.task, data=str(data))
    problems = TASKS[task.name].train_problems(task, 0, 1, len(PROBLEMS))
    return [tokenizer.prompt_ids(tok, problem.prompt) for problem in problems]


def jzero_feedback(path: str, texts: Path | None = None) -> list[list[int]]:
    """Returns the tokens between two turns of AReaL's preset, for half of the problems each."""
    task = preset_config("areal").task
    replies = [task.feedback.wrong, task.feedback.right]
    if texts is not None:
        files = [texts / TEXTS[name].file for name in ("areal_wrong", "areal_right")]
        replies = [template_files.read_template_file(str(path)) for path in files]
    tok = load_tokenizer(path, FEEDBACK)
    reply_of = [replies[number % 2] for number in range(len(PROBLEMS))]
    return [tokenizer.reply_tokens(tok, reply, None) for reply in reply_of]


def conversation(problem: Problem) -> list[Message]:
    return [
        {"role": "user", "content": problem.question},
        {"role": "assistant", "content": problem.response},
    ]


def write_problems(task: str, folder: Path) -> Path:
    """Writes the problems as a set of a task, with the columns of the published sets."""
    folder = folder / task
    folder.mkdir(exist_ok=True)
    rows = [row_of(task, number, problem) for number, problem in enumerate(PROBLEMS)]
    write_rows(folder / "train.jsonl", rows)
    if task == "countdown":  # without a split to hold out, it holds out some of the problems
        held_out = {"input": "?", "gt_answer": json.dumps({"numbers": [1, 2], "target": 3})}
        write_rows(folder / "test.jsonl", [held_out])
    return folder


def row_of(task: str, number: int, problem: Problem) -> dict[str, Any]:
    if task == "countdown":
        gold = {"numbers": [number + 10, 50], "target": number + 60}
        return {"input": problem.question, "gt_answer": json.dumps(gold)}
    if task == "code":
        tests = [{"type": "stdin_stdout", "input": problem.answer, "output": problem.answer}]
        info = {"language": "python", "test_cases": tests}
        return {"problem_statement": problem.question, "verification_info": info}
    row = {"level": 5, "prompt": problem.prompt}
    if task == "gsm8k":
        return row | {"question": problem.question, "final_answer": problem.answer}
    # The verifier open_r1 reads only golds with LaTeX.
    return row | {"problem": problem.question, "answer": f"${problem.answer}$"}


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


# The commands.


def compare(tokenizers: dict[str, str], texts: Path | None) -> int:
    """Prints the table of `compare`, and returns the number of runs that should be equal."""
    hashes = json.loads(HASHES.read_text(encoding="utf-8"))
    unequal = 0
    print(f"{'run':20}{'tokenizer':12}{'published':>14}{'jzero':>14}  verdict")
    for name, path in tokenizers.items():
        # A tokenizer is known by its contents, whatever it is called here.
        own = fingerprint(path)
        recorded = hashes["tokenizers"]
        known = next((item for item in recorded.values() if item["fingerprint"] == own), None)
        if known is None:
            print(
                f"{name}: prompts.json has hashes for the tokenizers {', '.join(recorded)}, and "
                "the vocabulary or the chat template of this one is another: make its hashes with "
                "record, from a copy of the original code"
            )
            return 1
        for run, preset in PUBLISHED_PROMPTS.items():
            if run not in known["prompts"]:
                print(f"{run:20}{name:12}{'none':>14}{'':14}  not recorded with this tokenizer")
                continue
            with tempfile.TemporaryDirectory() as folder:
                ours = digest_of_ids(jzero_ids(run, path, Path(folder), texts))
            published = known["prompts"][run]
            is_given = texts is not None or not preset.text
            verdict = "equal" if ours == published else "DIFFERENT"
            if ours == published and preset.settings:
                with tempfile.TemporaryDirectory() as folder:
                    alone = jzero_ids(run, path, Path(folder), texts, with_settings=False)
                if digest_of_ids(alone) != published:
                    verdict = f"equal with {preset.settings}; the preset alone differs"
            if not is_given and ours != published:
                verdict = f"own words; --texts with {TEXTS[preset.text].file} for the published"
            unequal += is_given and ours != published
            print(f"{run:20}{name:12}{published[:12]:>14}{ours[:12]:>14}  {verdict}")
        ours = digest_of_ids(jzero_feedback(path, texts))
        published = known["prompts"][FEEDBACK]
        differs = "differs, as docs/reference/published-runs.md says"
        verdict = "equal" if ours == published else differs
        print(f"{FEEDBACK:20}{name:12}{published[:12]:>14}{ours[:12]:>14}  {verdict}")
    return int(unequal > 0)


def record(originals: Path, tokenizers: dict[str, str]) -> int:
    """Writes prompts.json, and prints its hashes."""
    from prompt_sources import (  # pyright: ignore[reportMissingImports]
        texts as published_texts,
    )

    texts = published_texts(originals, load_tokenizer("", ""))
    hashes: dict[str, Any] = {
        "texts": {name: hashes_of_text(text) for name, text in texts.items()},
        "tokenizers": {},
    }
    for name, path in tokenizers.items():
        prompts = {
            run: digest_of_ids(original_ids(originals, run, path))
            for run in [*PUBLISHED_PROMPTS, FEEDBACK]
        }
        hashes["tokenizers"][name] = {"fingerprint": fingerprint(path), "prompts": prompts}
        for run, value in prompts.items():
            print(f"{run:20}{name:12}{value}")
    HASHES.write_text(json.dumps(hashes, indent=1) + "\n", encoding="utf-8")
    return 0


def original_ids(originals: Path, run: str, path: str) -> list[list[int]]:
    """Returns the token ids that the original code of a run makes of the 20 problems."""
    import prompt_sources as sources  # pyright: ignore[reportMissingImports]

    tok = load_tokenizer(path, run)
    questions = [problem.question for problem in PROBLEMS]
    if run in ("qwen_math", "r1"):
        template = sources.oat_zero_template(originals, run)
        return sources.oat_prompts(originals, tok, list(map(template, questions)), chat=False)
    if run == "gsm8k":
        return sources.oat_prompts(originals, tok, questions, chat=True)
    if run == "countdown":
        return sources.oat_prompts(originals, tok, questions, chat=False)
    if run == "open_r1_sft":
        conversations = [conversation(problem) for problem in PROBLEMS]
        return sources.open_r1_examples(originals, tok, conversations)
    if run == "areal":
        prompts = [problem.prompt for problem in PROBLEMS]
        return sources.areal_prompts(originals, tok, prompts)
    if run == FEEDBACK:
        return [
            sources.areal_feedback(
                originals, tok, problem.prompt, problem.response, is_right=bool(number % 2)
            ).ids
            for number, problem in enumerate(PROBLEMS)
        ]
    return sources.open_r1_prompts(originals, tok, run, questions)


def write_texts(originals: Path, out: Path) -> int:
    """Writes the published texts of the originals as files, and prints their names."""
    from prompt_sources import (  # pyright: ignore[reportMissingImports]
        texts as published_texts,
    )

    out.mkdir(parents=True, exist_ok=True)
    for name, text in published_texts(originals, load_tokenizer("", "")).items():
        path = out / TEXTS[name].file
        path.write_text(text + "\n", encoding="utf-8")
        print(f"{path}: {TEXTS[name].source}")
    return 0


def check(path: Path) -> int:
    """Prints whether a file is a published text, and returns 0 if it is."""
    hashes = json.loads(HASHES.read_text(encoding="utf-8"))["texts"]
    verdict = check_text(template_files.read_template_file(str(path)), hashes)
    print(f"{path}: {verdict.line}")
    return 0 if verdict.name else 1


def named_tokenizers(given: Sequence[str]) -> dict[str, str]:
    """Returns the tokenizers of NAME=DIRECTORY, after jzero's own."""
    named = {"jzero": ""}
    for item in given:
        name, _, path = item.partition("=")
        named[name] = path
    return named


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("compare", "record"):
        command = commands.add_parser(name)
        command.add_argument("--tokenizer", action="append", default=[], metavar="NAME=DIRECTORY")
    commands.choices["compare"].add_argument("--texts", type=Path, help="folder of texts")
    commands.choices["record"].add_argument("originals", type=Path)
    texts = commands.add_parser("texts")
    texts.add_argument("originals", type=Path)
    texts.add_argument("--out", type=Path, required=True)
    commands.add_parser("check").add_argument("file", type=Path)
    args = parser.parse_args()
    if args.command == "check":
        return check(args.file)
    if args.command == "texts":
        return write_texts(args.originals, args.out)
    tokenizers = named_tokenizers(args.tokenizer)
    if args.command == "record":
        return record(args.originals, tokenizers)
    return compare(tokenizers, args.texts)


if __name__ == "__main__":
    sys.exit(main())
