"""The rules of the house that a machine can check: which module may import which, what is never
called, how much an import costs, and how often a type is left open."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "jzero").rglob("*.py"))

# A module imports from the layers above it in this list, and from its own folder. Every folder is
# one layer, and so is every module outside of the folders.
LAYERS = [
    ("errors", "extras", "tokens", "json_types"),
    ("fields", "types", "terminal"),
    ("notation", "json_values"),
    ("algorithms", "answers"),
    ("files", "http", "clock", "cores", "servers"),
    ("websocket", "config"),
    ("hosts", "workers", "sandbox", "problems"),
    ("programming",),
    ("rewards",),
    ("environments",),
    ("cli", "numerics"),
    ("recipe_files", "command_flags"),
    ("attention",),
    ("model",),
    ("sharding",),
    ("decoder", "tasks"),
    ("training",),
    ("distillation",),
    ("blueprint", "rollout"),
    ("planning",),
    ("service",),
    ("run",),
    ("audits", "jobs"),
    ("setup",),
    ("commands", "sample", "loops", "watching"),
    ("main", "generation", "serving"),
    ("sizing",),
    (
        "api",
        "audit",
        "chat",
        "compare",
        "export",
        "filter",
        "generate",
        "grade",
        "plan",
        "play",
        "replay",
        "report",
    ),
    ("opened", "serve", "tinker", "watch"),
    ("__main__",),
]
LAYER = {name: number for number, names in enumerate(LAYERS) for name in names}

MOST_ANY = 39  # uses of `Any` in the package: values that have no type that could be written down

# The one module that runs text of a policy as code: inside of the sandbox, without any rights.
RUNS_PROGRAMS = "sandbox.program"

FORBIDDEN_CALLS = {"eval", "exec"}
FORBIDDEN_NAMES = {"sympify", "parse_expr"}  # both call eval on their argument
FORBIDDEN_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
FORBIDDEN_FLAGS = {"shell", "allow_pickle"}


def module_name(path: Path) -> str:
    """Returns the name below jzero: jzero/workers/pool.py is workers.pool, jzero/__init__.py ''."""
    parts = path.relative_to(ROOT / "jzero").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Returns all nodes of the syntax tree of a file."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))))


@pytest.fixture(scope="module", autouse=True)
def forget_nodes() -> Iterator[None]:
    """The nodes of all modules take hundreds of megabytes."""
    yield
    nodes.cache_clear()


MODULES = {module_name(path) for path in FILES}


def imported_modules(path: Path) -> set[str]:
    """Returns the modules below jzero that a file imports, at its top or inside a function."""
    names = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                names.add(f"{node.module}.{alias.name}")
    inside = {name.removeprefix("jzero.") for name in names if name.startswith("jzero.")}
    # `from jzero.types import Grade` names no module jzero.types.Grade: it imports jzero.types.
    return {name if name in MODULES else name.rpartition(".")[0] for name in inside} - {""}


def layer_name(name: str) -> str:
    """Returns the entry of LAYERS that a module belongs to."""
    return name.split(".")[0]


def test_imports_point_one_way() -> None:
    assert not [line for path in FILES for line in wrong_imports(path)]


def wrong_imports(path: Path) -> list[str]:
    """Returns what is wrong with the imports of a module."""
    name = module_name(path)
    if not name:
        # For type checkers only: the names are imported when they are used.
        is_right = imported_modules(path) == {"api", "opened"}
        return [] if is_right else ["jzero/__init__.py imports nothing"]
    here = layer_name(name)
    if here not in LAYER:
        return [f"give {name} a layer in {__file__}"]
    wrong = []
    for other in sorted(imported_modules(path)):
        there = layer_name(other)
        if there not in LAYER:
            wrong.append(f"{name} imports {other}, which has no layer in {__file__}")
        elif there != here and LAYER[there] >= LAYER[here]:
            wrong.append(f"{name} must not import {other}")
    return wrong


# The modules on the path of a training run whose functions or values hold the whole Config. All
# other modules take the sections or the values that they read. The list may get shorter.
CONFIG_MODULES = {
    # The command line, and the config itself.
    "main",
    "cli",
    "config.checks",
    "config.presets",
    "config.schema",
    "config.serialization",
    # The loops, their set-up, and the files of a run.
    "loops.rl",
    "loops.sft",
    "setup",
    "blueprint",
    "service.resolve",
    "run.session",
    "run.history",  # the settings that differ from the defaults
    "run.model_card",
    # One function each turns settings into the values that the rest of the folder reads.
    "training.trainer",
    # The planner compares settings, and suggests others.
    "planning.planned_run",
    "planning.fitting",
    "planning.remedies",
    "planning.sizing",
    "planning.disk",
    "planning.host_memory",
}
MOST_CONFIG_MODULES = 21


def modules_of_a_run() -> set[str]:
    """Returns the modules that a training run imports, at their top or inside a function."""
    paths = {module_name(path): path for path in FILES}
    reached: set[str] = set()
    remaining = ["main", "train"]
    while remaining:
        name = remaining.pop()
        if name in reached or name not in paths:
            continue
        reached.add(name)
        remaining += imported_modules(paths[name])
        # An import of a module runs the __init__.py of its folders.
        remaining += name.split(".")[:1]
    return reached


def holds_config(node: ast.AST) -> bool:
    """Returns whether a node is a parameter or a field with the type Config, or a type with it."""
    if not isinstance(node, ast.arg | ast.AnnAssign) or node.annotation is None:
        return False
    names = {part.id for part in ast.walk(node.annotation) if isinstance(part, ast.Name)}
    attributes = {
        part.attr for part in ast.walk(node.annotation) if isinstance(part, ast.Attribute)
    }
    return "Config" in names | attributes


def test_a_run_passes_its_config_through_few_modules() -> None:
    run = modules_of_a_run()
    holders = {
        name
        for path in FILES
        if (name := module_name(path)) in run and any(map(holds_config, nodes(path)))
    }
    print(*sorted(holders), sep="\n")
    assert holders == CONFIG_MODULES
    assert len(CONFIG_MODULES) <= MOST_CONFIG_MODULES


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f(settings: config.Config) -> None: ...", True),
        ("def f(make: Callable[[str], Config]) -> None: ...", True),
        ("settings: Config | None = None", True),
        ("def f(rollout: config.RolloutConfig) -> Config: ...", False),
        ("def f(model: QwenConfig) -> None: ...", False),
    ],
)
def test_only_the_whole_config_counts(source: str, expected: bool) -> None:
    assert any(map(holds_config, ast.walk(ast.parse(source)))) == expected


# What makes or drives the devices' share of a model, and the one module outside of its own package
# that calls it. Runs, commands, servers and plans describe what they need (`jzero.blueprint`).
ONE_CALLER = {
    "make_mesh": ("sharding", set()),
    "train_mesh": ("sharding", set()),
    "configured_mesh": ("sharding", {"blueprint"}),
    "Engine": ("decoder", {"blueprint"}),
    "make_trainer": ("training", {"blueprint"}),
    "SupervisedTrainer": ("training", {"blueprint", "setup"}),  # a run, and its warm start
    "Learner": ("training", set()),
    "token_learner": ("training", {"tinker.tenants", "tinker.plan"}),
    "read_base_model": ("model", {"setup", "service.decoders", "export", "tinker.__main__"}),
    "open_decoder": ("service", {"sample"}),
    # The readers of weights: `service.weights` has one `load` for all.
    "huggingface.load": ("model", {"service.weights"}),
    "huggingface.reader": ("model", {"service.weights"}),
    "peft.load": ("model", {"service.weights"}),
    "Scheduler": ("decoder", set()),  # only its driver
}


@pytest.mark.parametrize("name", ONE_CALLER)
def test_a_model_is_opened_in_one_place(name: str) -> None:
    package, expected = ONE_CALLER[name]
    callers = {
        module_name(path) for path in FILES if any(calls(node, name) for node in nodes(path))
    }
    assert {caller for caller in callers if layer_name(caller) != package} == expected


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").rglob("*.py")), ids=str)
def test_benchmarks_decode_with_the_driver(path: Path) -> None:
    assert not any(calls(node, "Scheduler") for node in nodes(path))


def calls(node: ast.AST, name: str) -> bool:
    """Returns whether a node calls a function or a class by its name, or as an attribute.

    A name such as "peft.load" is that of a function of a module.
    """
    if not isinstance(node, ast.Call):
        return False
    module, _, function = name.rpartition(".")
    match node.func:
        case ast.Name(id=called):
            return called == function and not module
        case ast.Attribute(attr=called, value=ast.Name(id=owner)) if module:
            return called == function and owner == module
        case ast.Attribute(attr=called):
            return called == function and not module
    return False


def test_open_types_are_few() -> None:
    uses = {
        module_name(path): sum(
            isinstance(node, ast.Name) and node.id == "Any" for node in nodes(path)
        )
        for path in FILES
    }
    used = {name: count for name, count in uses.items() if count}
    assert sum(used.values()) <= MOST_ANY, used


def forbidden(node: ast.AST) -> str | None:
    """Returns what is wrong with a node of a syntax tree that runs text or bytes as code."""
    match node:
        case ast.Call(func=ast.Name(id=name)) if name in FORBIDDEN_CALLS:
            return name
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name) if (
            name in FORBIDDEN_NAMES
        ):
            return name
        case ast.Import(names=names) if (
            found := {a.name.split(".")[0] for a in names} & FORBIDDEN_MODULES
        ):
            return f"import {found.pop()}"
        case ast.ImportFrom(module=str(name)) if name.split(".")[0] in FORBIDDEN_MODULES:
            return f"import {name}"
        case ast.keyword(arg=str(name), value=value) if name in FORBIDDEN_FLAGS:
            return None if isinstance(value, ast.Constant) and value.value is False else f"{name}="
        case ast.Attribute(value=ast.Name(id="os"), attr="system" | "popen" as name):
            return f"os.{name}"
    return None


def test_nothing_runs_text_as_code() -> None:
    assert not [
        f"{place(path, node)}: {wrong}"
        for path in files_without({RUNS_PROGRAMS})
        for node in nodes(path)
        if (wrong := forbidden(node))
    ]


def files_without(names: set[str]) -> list[Path]:
    """Returns the modules except those with these names."""
    return [path for path in FILES if module_name(path) not in names]


def place(path: Path, node: ast.AST) -> str:
    """Returns the file and the line of a node."""
    return f"{path}:{getattr(node, 'lineno', '?')}"


@pytest.mark.parametrize(
    "source",
    [
        "eval(x)",
        "exec(x)",
        "sympy.sympify(x)",
        "from sympy import sympify",
        "from sympy.parsing.sympy_parser import parse_expr as p",
        "import pickle",
        "from pickle import loads",
        "run(x, shell=True)",
        "run(x, shell=flag)",
        "np.load(x, allow_pickle=True)",
        "os.system(x)",
    ],
)
def test_forbidden_is_found(source) -> None:
    assert any(forbidden(node) for node in ast.walk(ast.parse(source)))


@pytest.mark.parametrize(
    "source", ["jax.eval_shape(f)", "model.eval()", "run(x, shell=False)", "np.load(x)"]
)
def test_allowed_is_not_found(source) -> None:
    assert not any(forbidden(node) for node in ast.walk(ast.parse(source)))


def calls_of(function: str) -> dict[str, int]:
    """Returns how often each module uses a function by name, other than in its definition."""
    uses = {}
    for path in FILES:
        names = [
            node.id if isinstance(node, ast.Name) else node.attr
            for node in nodes(path)
            if isinstance(node, ast.Name | ast.Attribute)
        ]
        uses[module_name(path)] = names.count(function)
    return {name: count for name, count in uses.items() if count}


def test_a_model_runs_in_one_way() -> None:
    """Decoding, scoring, audits and training call `run_model`, which calls `qwen.forward`."""
    assert calls_of("run_model") == {
        "audits.scores": 1,
        "decoder.programs": 2,
        "decoder.score_program": 1,
        "training.learner": 1,
    }
    callers = {
        module_name(path)
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and node.attr == "forward"
        if isinstance(node.value, ast.Name) and node.value.id == "qwen"
    }
    assert callers == {"model.run_model"}


def test_the_arithmetic_is_chosen_once() -> None:
    """Only the choice and facts of a program ask for the mode; layers and caches compute."""
    deciding = {
        "model.arithmetic",  # defines the mode
        "model.logprobs",  # asserts that there are no kept tokens
        "decoder.program_settings",  # logits are in one part
        "decoder.engine",  # no prefill in chunks
        "training.learner",  # the update returns its log-probs
        "training.exactness",  # which families support the mode
        "model.families",
    }
    in_other_meaning = {name for name in MODULES if name.startswith("answers.")}
    assert calls_of("is_exact").keys() - in_other_meaning <= deciding


# Prints the seconds the imports took, then which of the packages after "--" they pulled in.
PROBE = """
import importlib, sys, time
cut = sys.argv.index("--")
start = time.process_time()
for name in sys.argv[1:cut]:
    importlib.import_module(name)
print(time.process_time() - start, *[name for name in sys.argv[cut + 1:] if name in sys.modules])
"""


def test_the_sandbox_imports_the_standard_library_alone() -> None:
    trusted = ("client", "comparison", "levels", "remote", "session")
    for path in (ROOT / "jzero/sandbox").glob("*.py"):
        if path.stem in trusted:
            continue
        inside = imported_modules(path)
        assert all(name.startswith("sandbox") for name in inside), f"{path} imports {inside}"
        assert not {f"sandbox.{name}" for name in trusted} & inside, f"{path} imports {inside}"


def probe(modules: list[str], packages: list[str]) -> tuple[float, list[str]]:
    """Imports modules in a process of their own; returns CPU seconds and the packages loaded."""
    command = [sys.executable, "-c", PROBE, *modules, "--", *packages]
    result = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    seconds, *found = result.stdout.split()
    return float(seconds), found


WITHOUT_JAX = (
    "answers",
    "config",
    "environments",
    "problems",
    "programming",
    "rewards",
    "sandbox",
    "tasks",
    "workers",
)


def test_graders_start_without_jax() -> None:
    modules = [f"jzero.{name}" for name in MODULES if name.split(".")[0] in WITHOUT_JAX]
    _, loaded = probe(modules, ["jax", "flax", "torch", "tensorflow"])
    assert loaded == []


def test_import_is_quick_and_without_torch() -> None:
    runs = [probe(["jzero", "jzero.main"], ["torch", "tensorflow"]) for _ in range(2)]
    assert runs[0][1] == []
    assert min(seconds for seconds, _ in runs) <= 3


# Modules whose lines are not for a terminal: the protocol between two processes, and the page that
# a reader copies into a notebook.
PRINTING = {
    "terminal",
    "hosts.relay",
    "loops.grpo_loop",
    "run.push_process",
    "run.tracker_process",
    "sandbox.program",
}


def prints(node: ast.AST) -> bool:
    """Returns whether a node of a syntax tree writes text to a terminal without escapes."""
    match node:
        case ast.Call(func=ast.Name(id="print")):
            return True
        case ast.Attribute(attr="write", value=ast.Attribute(attr="stdout" | "stderr")):
            return True
        case ast.Attribute(attr="print_exc" | "print_exception"):
            return True
    return False


def test_text_for_a_terminal_goes_through_one_function() -> None:
    assert not [
        f"{place(path, node)}: use terminal.write"
        for path in files_without(PRINTING)
        for node in nodes(path)
        if prints(node)
    ]


# Modules that read only files of this machine or of jzero itself with functions of the library.
OWN_FILES = {
    "hosts.platform",  # /sys
    "hosts.preemption",  # /sys
    "generate",  # its own output
    "jobs.store_server",
    "recipe_files",  # the recipe that is imported
    "planning.host_memory",  # /proc, /sys
    "run.tracker_process",
    "run.trackers",
    "sample",  # /proc
    "tinker.sessions",  # the keys of the server's owner
    "watching.server",  # the page
    "workers.keeper",  # /proc
    "run.model_card",  # the card
}


def reads_whole_file(node: ast.AST) -> bool:
    """Returns whether a node of a syntax tree reads a file without a bound."""
    match node:
        case ast.Call(func=ast.Attribute(attr="read_text" | "read_bytes"), args=[]):
            return True
    return False


def test_foreign_files_are_opened_in_one_place() -> None:
    """`jzero.files` refuses pipes and devices, and bounds the size before it reads."""
    assert not [
        f"{place(path, node)}: use jzero.files.read_text"
        for path in files_without(OWN_FILES)
        for node in nodes(path)
        if reads_whole_file(node)
    ]


def test_no_mark_says_how_long_a_test_takes() -> None:
    """tests/times.txt does, and tests/whole_runs.py names the slow tests that run by default."""
    mark = re.compile(r"pytest\.mark\.(thorough|slow|quick_cases|thorough_cases)\b")
    files = sorted((ROOT / "tests").rglob("*.py"))
    marked = [str(path) for path in files if mark.search(path.read_text(encoding="utf-8"))]

    assert not marked, "remove these marks: see tests/tiers.py"
