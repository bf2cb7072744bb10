"""jzero: reasoning RL for language models in JAX, on TPUs, GPUs and laptops.

    import jzero

    run = jzero.train(model="Qwen/Qwen2.5-0.5B-Instruct", data="problems.jsonl", reward=my_reward)
    jzero.evaluate(run.workdir)
    with jzero.open(run.workdir) as model:
        model.generate(["What is 2 + 3?"], n=4)

Importing jzero loads nothing else: its functions are imported when they are used.
"""

import importlib
import os
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jzero.api import evaluate as evaluate
    from jzero.api import train as train
    from jzero.opened import open_model as open

os.environ.setdefault(
    "TRANSFORMERS_NO_ADVISORY_WARNINGS", "1"
)  # that PyTorch was not found is as intended


def _end_imports_at_once() -> None:
    """Lets Ctrl-C end `python -m jzero.NAME` without a traceback, until `terminal.run_command`.

    An exception in the middle of an import of a C extension would end in a traceback of it.
    """
    arguments = sys.orig_argv
    name = arguments[arguments.index("-m") + 1] if "-m" in arguments[:-1] else ""
    # The first argument is "-m" while Python looks for the module. Modules of subpackages are
    # programs for other processes.
    is_command = sys.argv[0] == "-m" and name.startswith("jzero.") and name.count(".") == 1
    # A handler that a parent has set, such as nohup's, stays.
    if is_command and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


_end_imports_at_once()

__version__ = "0.2.0"
# The functions of the package, each with its module. No module has the name of a function: Python
# would set the attribute of the package to a module when that is imported.
_FUNCTIONS = {
    "train": ("jzero.api", "train"),
    "evaluate": ("jzero.api", "evaluate"),
    "open": ("jzero.opened", "open_model"),
}


def __getattr__(name: str) -> object:
    """Imports jzero.train, jzero.evaluate or jzero.open when it is first used."""
    if name not in _FUNCTIONS:
        raise AttributeError(f"module 'jzero' has no attribute {name!r}")
    module, function = _FUNCTIONS[name]
    return getattr(importlib.import_module(module), function)
