"""Calls reward functions as TRL does, for `trl_rewards.py`, which starts this file as a process.

    python benchmarks/published/under_trl.py REQUEST ANSWER

REQUEST is a JSON file: `path` of the file of functions, `functions`, and `batches` with `inputs`,
`prompts`, `completions` and `completion_ids`. ANSWER gets the values of each function for each
batch, and `how` they came about. It needs no jzero. With TRL installed the values are those of
`GRPOTrainer._calculate_rewards` on a trainer that has nothing but its reward functions. Without TRL
the functions are called with the arguments that TRL 1.16 passes.
"""

import ast
import asyncio
import functools
import importlib.util
import inspect
import json
import sys
import threading
import types
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any


def load(path: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("rewards_file", path)
    assert spec is not None and spec.loader is not None, f"{path=}"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def find(module: types.ModuleType, name: str) -> Callable[..., Any]:
    """Returns the function of a name, or what the factory "name(x=1)" returns."""
    function, _, arguments = name.partition("(")
    found = getattr(module, function)
    if not arguments:
        return found
    call = ast.parse(name, mode="eval").body
    assert isinstance(call, ast.Call), f"{name=}"
    positional = [ast.literal_eval(item) for item in call.args]
    return found(*positional, **{str(i.arg): ast.literal_eval(i.value) for i in call.keywords})


def call_by_convention(function: Callable[..., Any], name: str, batch: dict) -> list[float | None]:
    """Calls a function with the arguments that TRL 1.16 passes."""
    inputs = batch["inputs"]
    keys = [key for key in inputs[0] if key not in ("prompt", "completion", "completion_ids")]
    columns = {key: [example[key] for example in inputs] for key in keys}
    returned = function(
        prompts=batch["prompts"],
        completions=batch["completions"],
        completion_ids=batch["completion_ids"],
        trainer_state=types.SimpleNamespace(global_step=0),
        **columns,
    )
    return asyncio.run(returned) if inspect.iscoroutine(returned) else returned


@functools.cache
def running_loop() -> asyncio.AbstractEventLoop:
    """Returns an event loop that runs in a thread, as a trainer with async functions has one."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def call_by_trl(function: Callable[..., Any], name: str, batch: dict) -> list[float | None]:
    """Calls TRL's own method, on a trainer of one process."""
    import torch
    from accelerate import PartialState
    from transformers import TrainerState
    from trl.trainer import grpo_trainer

    setattr(grpo_trainer, "gather", lambda values: values)  # noqa: B010
    setattr(grpo_trainer, "profiling_context", lambda *_: nullcontext())  # noqa: B010
    PartialState(cpu=True)  # the logger of TRL asks for it
    trainer = object.__new__(grpo_trainer.GRPOTrainer)
    trainer.accelerator = types.SimpleNamespace(device=torch.device("cpu"))
    trainer.reward_funcs = [function]
    trainer.reward_processing_classes = [None]
    trainer.reward_func_names = [name]
    trainer.state = TrainerState()
    trainer.environments = None
    trainer.async_loop = running_loop()
    # The method without the decorator that measures it.
    calculate = inspect.unwrap(grpo_trainer.GRPOTrainer._calculate_rewards)
    lists = (batch["inputs"], batch["prompts"], batch["completions"], batch["completion_ids"])
    values = calculate(trainer, *lists)[:, 0].tolist()
    return [None if value != value else value for value in values]  # NaN stands for None


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    module = load(request["path"])
    how, call = "TRL's convention of calls", call_by_convention
    if importlib.util.find_spec("trl") is not None:
        import trl

        how, call = f"TRL {trl.__version__}", call_by_trl
    results = {}
    for name in request["functions"]:
        function = find(module, name)
        results[name] = [call(function, name, batch) for batch in request["batches"]]
    answer = json.dumps({"how": how, "results": results})
    Path(sys.argv[2]).write_text(answer, encoding="utf-8")


if __name__ == "__main__":
    main()
