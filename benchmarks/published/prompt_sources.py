"""The prompts of published runs, made by the code of their authors: for prompts.py beside it.

ORIGINALS is a directory with the clones oat (at 59eb01b), understand-r1-zero (8d31b35), open-r1
(1416fa0), open-r1-february (open-r1 at e4ac3ae), AReaL (1ec1399f1) and trl (0.18.0, as a clone or
as the unpacked package). Their modules import torch, vLLM and more, none of which makes a prompt.
So the functions and classes that do are taken out of the files one by one, unchanged, and run with
small objects in the place of the rest.
"""

import ast
import asyncio
import functools
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from jzero.model.chat_template import Message
from jzero.model.tokenizer import PreTrainedTokenizerFast

Ids = list[list[int]]  # the token ids of each prompt
FUTURE_ANNOTATIONS = 0x1000000  # `from __future__ import annotations`: types are not evaluated
PLACE = "{question}"

FEBRUARY = "open-r1-february/src/open_r1/grpo.py"
BOS_OF_DISTILLED = "<｜begin▁of▁sentence｜>"
RECIPES = {
    "open_r1": "Qwen2.5-1.5B-Instruct/grpo/config_demo.yaml",
    "open_r1_distilled": "DeepSeek-R1-Distill-Qwen-1.5B/grpo/config_demo.yaml",
    "open_r1_code": "Qwen2.5-1.5B-Instruct/grpo/config_demo_code.yaml",
    "open_r1_sft": "OpenR1-Distill-7B/sft/config_distill.yaml",
}


# Taking code out of files.


def take(path: Path, names: Sequence[str], values: dict[str, Any]) -> dict[str, Any]:
    """Runs the definitions of these names in a file, nested ones too, and returns the namespace.

    `values` are what the definitions read from their module, and from the function around them.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    found = {node.name: node for node in ast.walk(tree) if isinstance(node, kinds)}
    missing = [name for name in names if name not in found]
    assert not missing, f"{path} has no {missing}: is it the version that is named above?"
    module = ast.Module([found[name] for name in names], type_ignores=[])
    namespace = dict(values)
    code = compile(module, str(path), "exec", flags=FUTURE_ANNOTATIONS, dont_inherit=True)
    exec(code, namespace)
    return namespace


def recipe(originals: Path, run: str) -> dict[str, Any]:
    """Returns the settings of a recipe of open-r1."""
    path = originals / "open-r1" / "recipes" / RECIPES[run]
    return yaml.safe_load(path.read_text(encoding="utf-8"))


# understand-r1-zero and oat.


def oat_prompts(
    originals: Path, tok: PreTrainedTokenizerFast, questions: list[str], *, chat: bool
) -> Ids:
    """Returns the ids of oat's PromptDataset. vLLM encodes its texts as that class does."""
    values = {"Dataset": object, "tqdm": lambda rows, **_: rows}
    namespace = take(originals / "oat/oat/utils/data.py", ["PromptDataset"], values)
    strategy = types.SimpleNamespace(
        args=types.SimpleNamespace(prompt_max_length=1 << 20), is_rank_0=lambda: False
    )
    rows = [{"input": question, "output": "1"} for question in questions]
    dataset = namespace["PromptDataset"](
        rows,
        tok,
        strategy,
        input_key="input",
        output_key="output",
        apply_chat_template=chat,
        get_reference=True,
    )
    return [tok(dataset[place][0])["input_ids"] for place in range(len(rows))]


def oat_zero_template(originals: Path, name: str) -> Callable[[str], str]:
    """Returns the function of a prompt template of understand-r1-zero."""
    function = f"apply_{name}_template"
    path = originals / "understand-r1-zero/train_zero_math.py"
    return take(path, [function], {})[function]


# open-r1.


def open_r1_prompts(
    originals: Path, tok: PreTrainedTokenizerFast, run: str, questions: list[str]
) -> Ids:
    """Returns the ids of TRL's GRPOTrainer for the conversations of open-r1's grpo.py."""
    if run == "open_r1_february":
        column = "problem"
        path = originals / FEBRUARY
        values: dict[str, Any] = {"SYSTEM_PROMPT": system_prompt_of_february(originals)}
    else:
        settings = recipe(originals, run)
        column = settings["dataset_prompt_column"]
        values = {
            "script_args": types.SimpleNamespace(dataset_prompt_column=column),
            "training_args": types.SimpleNamespace(system_prompt=settings["system_prompt"]),
        }
        path = originals / "open-r1/src/open_r1/grpo.py"
        if "chat_template" in settings:  # as get_tokenizer of open_r1/utils/model_utils.py
            tok.chat_template = settings["chat_template"]
    make_conversation = take(path, ["make_conversation"], values)["make_conversation"]
    names = ["is_conversational", "apply_chat_template", "maybe_apply_chat_template"]
    trl = take(originals / "trl/trl/data_utils.py", names, {})
    ids = []
    for question in questions:
        text = trl["maybe_apply_chat_template"](make_conversation({column: question}), tok)
        ids.append(tok(text["prompt"], add_special_tokens=False)["input_ids"])
    return ids


def system_prompt_of_february(originals: Path) -> str:
    """Returns the constant SYSTEM_PROMPT of open-r1's grpo.py at e4ac3ae."""
    tree = ast.parse((originals / FEBRUARY).read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SYSTEM_PROMPT":
            return ast.literal_eval(node.value)
    raise AssertionError(f"{FEBRUARY} has no SYSTEM_PROMPT: is it the version named above?")


def open_r1_examples(
    originals: Path, tok: PreTrainedTokenizerFast, conversations: Sequence[Sequence[Message]]
) -> Ids:
    """Returns the ids of TRL's SFTTrainer for conversations of open-r1's supervised recipe."""
    settings = recipe(originals, "open_r1_sft")
    tok.chat_template = settings["chat_template"]
    names = ["is_conversational", "apply_chat_template"]
    apply = take(originals / "trl/trl/data_utils.py", names, {})["apply_chat_template"]
    path = originals / "trl/trl/trainer/sft_trainer.py"
    tokenize = take(path, ["tokenize"], {})["tokenize"]
    ids = []
    for messages in conversations:
        example = apply({"messages": messages}, tok)
        ids.append(tokenize(example, tok, "text", add_special_tokens=False)["input_ids"])
    return ids


# AReaL.


def areal_prompts(originals: Path, tok: PreTrainedTokenizerFast, prompts: list[str]) -> Ids:
    """Returns the ids of AReaL's data set of mathematics and code."""
    rows = [{"prompt": text, "query_id": str(i), "task": "math"} for i, text in enumerate(prompts)]
    silent = types.SimpleNamespace(info=lambda *_: None)
    values = {
        "torch": types.SimpleNamespace(
            utils=types.SimpleNamespace(data=types.SimpleNamespace(Dataset=object))
        ),
        "data_api": types.SimpleNamespace(
            load_shuffle_split_dataset=lambda *_: rows, RL_TASKS=["math", "code"]
        ),
        "load_metadata": lambda _: ({}, {"math": len(rows), "code": 0}),
        "logger": silent,
    }
    path = originals / "AReaL/realhf/impl/dataset/math_code_dataset.py"
    dataset = take(path, ["MATHCodePromptDataset"], values)["MATHCodePromptDataset"]
    util = types.SimpleNamespace(tokenizer=tok, dp_rank=0)
    return dataset(util, max_length=1 << 20, dataset_path="rows.jsonl").prompts


class Feedback(NamedTuple):
    """What AReaL's agent adds after a turn."""

    ids: list[int]
    text: str  # of the message


def areal_feedback(
    originals: Path, tok: PreTrainedTokenizerFast, prompt: str, answer: str, *, is_right: bool
) -> Feedback:
    """Returns what AReaL's multi-turn agent adds to the tokens of its first turn."""
    agent, texts = areal_agent(originals, tok)
    sequence = tok(prompt + answer)["input_ids"]
    prompt_length = len(tok(prompt)["input_ids"])
    act = types.SimpleNamespace(
        seqs=[sequence],
        prompt_ids=sequence[:prompt_length],
        logprobs=[[0.0] * (len(sequence) - 1)],
        no_eos=[False],
        prompt_len=prompt_length,
        seqlens=[len(sequence)],
        version_start=[0],
        version_end=[0],
    )

    async def reset() -> None:
        return None

    async def step(_: object) -> tuple[None, list[bool]]:
        return None, [is_right]

    async def collect() -> list[tuple]:
        observed, acts = asyncio.Queue(), asyncio.Queue()
        for _ in range(2):
            await acts.put(act)
        prompt_ids = Array(sequence[:prompt_length])
        given = types.SimpleNamespace(bs=1, ids=["0"], data={"packed_prompts": prompt_ids}, keys=())
        env = types.SimpleNamespace(reset=reset, step=step)
        await agent.collect_trajectory(given, env, observed, acts)
        return [await observed.get() for _ in range(2)]

    first, second = asyncio.run(collect())
    assert first[1] == sequence[:prompt_length], "the first turn begins with the prompt"
    assert second[1][: len(sequence)] == sequence, "the second turn begins with the first"
    return Feedback(second[1][len(sequence) :], texts[0])


class Array(list):
    """A list with the methods of a tensor that the agent calls."""

    def cpu(self) -> "Array":
        return self

    def numpy(self) -> "Array":
        return self

    def tolist(self) -> list[int]:
        return list(self)


def areal_agent(originals: Path, tok: PreTrainedTokenizerFast) -> tuple[Any, list[str]]:
    """Returns AReaL's agent with two turns, and the list to which it adds its feedback's texts."""
    values = {
        "Agent": object,
        "asyncio": asyncio,
        "datetime": types.SimpleNamespace(now=lambda: types.SimpleNamespace(timestamp=lambda: 0.0)),
        "load_hf_tokenizer": lambda _: tok,
        "SequenceSample": lambda **_: None,
        "torch": types.SimpleNamespace(
            tensor=lambda values, **_: Array(values),
            Tensor=Array,
            long=None,
            int=None,
            bool=None,
            float32=None,
        ),
    }
    path = originals / "AReaL/realhf/impl/agent/math_multi_turn_agent.py"
    kind = take(path, ["MathMultiTurnAgent"], values)["MathMultiTurnAgent"]
    config = types.SimpleNamespace(n=1)
    config.new = lambda n: config
    agent = kind(config, "", "", num_turns=2)
    agent.log_rewards_to_file = lambda *_, **__: None
    texts: list[str] = []

    def render(messages: list[dict[str, str]], **options: Any) -> str:
        texts.append(messages[0]["content"])
        return str(tok.apply_chat_template(messages, **options))

    agent.tokenizer = Recorded(tok, render)
    return agent, texts


class Recorded:
    """A tokenizer whose chat template is rendered by another function."""

    def __init__(self, tok: PreTrainedTokenizerFast, render: Callable[..., str]) -> None:
        self._tok = tok
        self.batch_decode = tok.batch_decode
        self.apply_chat_template = render

    def __call__(self, text: str) -> Any:
        return self._tok(text)


# The texts that jzero does not contain.


def texts(originals: Path, tok: PreTrainedTokenizerFast) -> dict[str, str]:
    """Returns the published texts by name: see TEXTS in prompts.py."""
    distilled = recipe(originals, "open_r1_distilled")
    system = recipe(originals, "open_r1")["system_prompt"]
    assert (
        distilled["system_prompt"] == system == recipe(originals, "open_r1_code")["system_prompt"]
    )
    tok.chat_template = distilled["chat_template"]
    tok.bos_token = BOS_OF_DISTILLED
    messages = [{"role": "system", "content": system}, {"role": "user", "content": PLACE}]
    prompt = tok.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    feedback = functools.partial(areal_feedback, originals, tok, "1 + 1 = ", "2")
    return {
        "r1": oat_zero_template(originals, "r1")(PLACE),
        "open_r1_system": system,
        "open_r1_february": system_prompt_of_february(originals),
        "open_r1_distilled": str(prompt),
        "open_r1_sft": recipe(originals, "open_r1_sft")["chat_template"],
        "areal_right": feedback(is_right=True).text,
        "areal_wrong": feedback(is_right=False).text,
    }
