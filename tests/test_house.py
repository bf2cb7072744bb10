"""The house rules a machine can check: sizes, import direction, what is never called, what an import may cost."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "jzero").rglob("*.py"))

# A module imports from lower levels and from its own package.
LEVELS = [
    ("types", "algorithms", "hub"),
    ("metrics",),
    ("config", "hosts"),
    ("attention", "batch", "grade", "tokenizer", "cli"),
    ("model", "tasks"),
    ("sharding",),
    ("rollout", "update", "checkpoint"),
    ("session",),
    ("evaluate",),
    ("stream",),
    ("learn",),
    ("sft",),
    ("train",),
    ("main", "generate", "export", "report", "serve", "filter"),
    ("plan",),
]
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}
ALLOWED = {("grade.pool", "tasks")}  # a worker looks its task's grader up

FILE_LINES, FUNCTION_LINES, ALL_LINES = 500, 60, 8000
LONG_FUNCTIONS = {("train", "train"), ("sft", "train")}  # the loops, readable top to bottom

FORBIDDEN_CALLS = {"eval", "exec"}
FORBIDDEN_NAMES = {"sympify", "parse_expr"}  # both eval their argument
FORBIDDEN_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
FORBIDDEN_FLAGS = {"shell", "allow_pickle"}


def module(path: Path) -> str:
    """jzero/grade/pool.py -> grade.pool; jzero/__init__.py -> ''."""
    parts = path.relative_to(ROOT / "jzero").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports(path: Path) -> set[str]:
    """Top-level names below jzero that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = (
                ["jzero", *path.relative_to(ROOT / "jzero").parts][: -node.level]
                if node.level
                else []
            )
            base = ".".join([*package, *([node.module] if node.module else [])])
            names |= {f"{base}.{alias.name}" for alias in node.names}
    inside = {name.split(".")[1] for name in names if name.startswith("jzero.")}
    return {name for name in inside if not name.startswith("__")}


@pytest.mark.parametrize("path", FILES, ids=module)
def test_imports_point_one_way(path):
    name = module(path)
    own = name.split(".")[0]
    if not name:
        assert not imports(path), "jzero/__init__.py imports nothing of jzero"
        return
    assert own in LEVEL, f"give {own} a level in {__file__}"
    for other in imports(path) - {own}:
        assert other in LEVEL, f"{name} imports {other}, which has no level in {__file__}"
        assert LEVEL[other] < LEVEL[own] or (name, other) in ALLOWED, (
            f"{name} must not import {other}"
        )


@pytest.mark.parametrize("path", FILES, ids=module)
def test_sizes(path):
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= FILE_LINES, f"{path} has {lines} lines"
    for node in ast.walk(tree(path)):
        if (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and (module(path), node.name) not in LONG_FUNCTIONS
        ):
            length = node.end_lineno - node.lineno + 1
            assert length <= FUNCTION_LINES, f"{path}:{node.lineno} {node.name} has {length} lines"


def test_size_of_all():
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in FILES) <= ALL_LINES


def forbidden(node: ast.AST) -> str | None:
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


@pytest.mark.parametrize("path", FILES, ids=module)
def test_nothing_runs_text_as_code(path):
    for node in ast.walk(tree(path)):
        assert forbidden(node) is None, f"{path}:{getattr(node, 'lineno', '?')} {forbidden(node)}"


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
def test_forbidden_is_found(source):
    assert any(forbidden(node) for node in ast.walk(ast.parse(source)))


@pytest.mark.parametrize(
    "source", ["jax.eval_shape(f)", "model.eval()", "run(x, shell=False)", "np.load(x)"]
)
def test_allowed_is_not_found(source):
    assert not any(forbidden(node) for node in ast.walk(ast.parse(source)))


# Prints the seconds the imports took, then which of the packages after "--" they pulled in.
PROBE = """
import importlib, sys, time
cut = sys.argv.index("--")
start = time.process_time()
for name in sys.argv[1:cut]:
    importlib.import_module(name)
print(time.process_time() - start, *[name for name in sys.argv[cut + 1:] if name in sys.modules])
"""


def probe(modules: list[str], packages: list[str]) -> tuple[float, list[str]]:
    command = [sys.executable, "-c", PROBE, *modules, "--", *packages]
    seconds, *found = subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    return float(seconds), found


def test_graders_start_without_jax():
    modules = [
        f"jzero.{name}" for name in map(module, FILES) if name.split(".")[0] in ("tasks", "grade")
    ]
    if not modules:
        pytest.skip("jzero.tasks and jzero.grade do not exist yet")
    assert probe(modules, ["jax", "flax", "torch", "tensorflow"])[1] == []


def test_import_is_quick_and_without_torch():
    if not (ROOT / "jzero/main.py").exists():
        pytest.skip("jzero.main does not exist yet")
    runs = [probe(["jzero", "jzero.main"], ["torch", "tensorflow"]) for _ in range(2)]
    assert runs[0][1] == []
    assert min(seconds for seconds, _ in runs) <= 3
