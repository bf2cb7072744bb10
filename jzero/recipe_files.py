"""Recipes: files with a function get_config, which returns the config of a run. Imports no jax."""

import argparse
import ast
import contextlib
import difflib
import importlib.util
import sys
import traceback
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path

from jzero import cli, config
from jzero.config.flags import Flag, split_flags
from jzero.errors import UserError, reason_of

# A wheel has the recipes as jzero.recipes, a clone in the folder configs.
PACKAGED_RECIPES = Path(__file__).resolve().with_name("recipes")
CLONE_RECIPES = Path(__file__).resolve().parents[1] / "configs"
RECIPES = PACKAGED_RECIPES if PACKAGED_RECIPES.is_dir() else CLONE_RECIPES
NO_RECIPE = "give a recipe: --config configs/countdown.py"


def recipe_files() -> list[Path]:
    """Returns the recipes of jzero, by name."""
    return sorted(RECIPES.glob("[!_]*.py"))


def recipe_path(name: str) -> Path:
    """Returns the file of a recipe: a path as it is, or a recipe of jzero such as "gsm8k".

    Raises UserError if there is no such file.
    """
    path = Path(name)
    if not path.suffix and path.parent == Path():
        path = RECIPES / f"{name}.py"
    if not path.is_file():
        names = ", ".join(recipe.stem for recipe in recipe_files())
        raise UserError(f"no recipe {name}: give a file that exists, or one of {names}")
    return path


def read_flags(
    parser: argparse.ArgumentParser, arguments: Sequence[str]
) -> tuple[argparse.Namespace, list[Flag]]:
    """Returns the values of a parser with the flag --config, and the flags of settings.

    Raises UserError at an argument that is neither, and without a recipe.
    """
    given, others = split_flags(arguments)
    options, unknown = parser.parse_known_args(others)
    cli.check_others(unknown, [*parser._option_string_actions])
    if not options.config:
        raise UserError(NO_RECIPE)
    return options, given


def settings_of(arguments: Sequence[str]) -> config.Config:
    """Returns the config of a command line: --config FILE[:preset] --config.section.field=value ...

    A mistake ends the process.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", default="")
    with cli.user_errors():
        options, given = read_flags(parser, arguments)
        return cli.with_flags(load_recipe(options.config), given)


def check_arguments(arguments: Sequence[str]) -> None:
    """Ends the process at a mistake in a command line of `settings_of` that is seen without JAX.

    A process that others wait for has to join them first, so that they hear of its mistake.
    """
    joining, own_arguments = cli.split_process_flags(arguments)
    if not joining.coordinator:
        with contextlib.suppress(ImportsJaxError), without_jax():
            settings_of(own_arguments)


def load_recipe(text: str) -> config.Config:
    """Returns the config of a recipe: FILE, FILE:preset or FILE:preset,algorithm.

    Raises:
        UserError: there is no such file, or it has a mistake. The message names its line.
    """
    path, argument = split_recipe(text)
    spec = importlib.util.spec_from_file_location(f"recipe_{path.stem}", path.resolve())
    assert spec is not None, f"{path=}"
    assert spec.loader is not None, f"{path=}"
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        make = getattr(module, "get_config", None)
        if make is None:
            raise UserError("the recipe has no function get_config, which returns its Config")
        settings = make(argument) if argument else make()
    except Exception as error:
        raise UserError(f"--config {path}{recipe_line(error, path)}: {_mistake(error)}") from error
    if not isinstance(settings, config.Config):
        raise UserError(
            f"--config {path}: get_config returns {type(settings).__name__}, not a Config"
        )
    return settings


class ImportsJaxError(BaseException):
    """A block of `without_jax` imports JAX.

    Not an Exception: `except ImportError` in a recipe would take JAX for a missing package.
    """


class _RefuseJax(MetaPathFinder):
    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname in ("jax", "jaxlib"):
            raise ImportsJaxError


@contextlib.contextmanager
def without_jax() -> Iterator[None]:
    """A block that reads a recipe before JAX is set up and the processes of a run have joined.

    Raises ImportsJaxError where the block imports JAX, and before the block if JAX is imported
    already. A recipe that uses devices would start them without the settings of `cli.start_jax`.
    """
    if "jax" in sys.modules:
        raise ImportsJaxError
    finder = _RefuseJax()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def recipe_line(error: Exception, path: Path) -> str:
    """Returns ", line 12" for the line of a recipe that raised an error, "" for no line."""
    file = str(path.resolve())
    if isinstance(error, SyntaxError) and error.filename == file:
        return f", line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == file]
    return f", line {lines[-1]}" if lines else ""


def _mistake(error: Exception) -> str:
    is_mistake = isinstance(error, UserError)
    return str(error) if is_mistake else f"{type(error).__name__}: {reason_of(error)}"


def recipe_help(path: Path) -> str:
    """Returns the docstring of a recipe."""
    # Parsed instead of imported: only the docstring is needed.
    return str(ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))))


def split_recipe(text: str) -> tuple[Path, str]:
    """Returns the file of a recipe, and the argument after the colon.

    A recipe of jzero is found outside of a clone, too: configs/countdown.py.

    Raises UserError if there is no such file, with the recipes that exist.
    """
    name, _, argument = text.partition(":")
    path = Path(name)
    if path.is_file():
        return path, argument
    packaged = RECIPES / path.name
    if path.parent == Path("configs") and packaged.is_file():
        return packaged, argument
    recipes = [recipe.stem for recipe in recipe_files()]
    similar = difflib.get_close_matches(path.stem, recipes, 1)
    advice = f"did you mean {path.with_name(f'{similar[0]}.py')}? " if similar else ""
    raise UserError(
        f"--config {name}: no such file. {advice}Recipes are {', '.join(recipes)}, as in "
        "--config configs/gsm8k.py"
    )
