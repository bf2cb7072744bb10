"""Asserts as tests: `assert len(f(2)) == 3`, the form of MBPP.

The program under test must not run the assert's own code: a program that rebinds `len` would pass
`len(f(2)) == 3` for any result of `f`. An assert is therefore split into three parts:

    expression   evaluated by the program, gives the answer    f(2)
    check        computed from the answer by the assert        len(_answer)
    expected     the value that the check must have            3

The expression runs in the program's process, and only its value leaves that process. The check runs
in another process of the sandbox, which never sees the program's code (`code_runs`). If the assert
compares the answer directly, there is no check. Imports no jax: grader processes load this module.
"""

import ast
import builtins
from collections.abc import Collection

from jzero.types import JsonValue

ANSWER = "_answer"  # the name of the program's answer in a check
Assert = dict[str, JsonValue]  # a test with the keys of the module's docstring

_BUILTIN_NAMES = frozenset(dir(builtins))
_BUILTIN_TYPES = (str, bytes, int, float, complex, bool, list, tuple, dict, set, frozenset)
_METHODS = frozenset(name for kind in _BUILTIN_TYPES for name in dir(kind))


def read_asserts(texts: Collection[str], setup: str) -> list[Assert]:
    """Returns the asserts that can run as tests.

    Skips asserts that do not compare with a literal value, and the rare asserts that call the
    program with a variable of the assert, such as the variable of a comprehension.

    Args:
        texts: statements.
        setup: code that runs before the program. The names that it imports and defines belong to
            the asserts.

    Raises:
        SyntaxError: one of the texts is not a statement.
    """
    names_of_setup = _bound_names(setup)
    tests = [_read_assert(text, names_of_setup) for text in texts]
    return [test for test in tests if test is not None]


def _read_assert(text: str, names_of_setup: frozenset[str]) -> Assert | None:
    [statement] = ast.parse(text.strip()).body
    if not isinstance(statement, ast.Assert):
        return None
    comparison = statement.test
    if not isinstance(comparison, ast.Compare) or len(comparison.ops) != 1:
        return None
    # Other comparisons accept many answers, and a test stores only values that are right.
    if not isinstance(comparison.ops[0], ast.Eq | ast.Is):
        return None
    try:
        expected = _value_of(comparison.comparators[0])
    except (ValueError, TypeError):  # the right side is not a literal
        return None
    splitter = _Splitter(comparison.left, names_of_setup)
    try:
        check = splitter.visit(comparison.left)
    except _CannotSplitError:
        return None
    if not splitter.asked:  # the assert does not use the program
        return None
    if len(splitter.asked) == 1:
        [asked] = splitter.asked
        check = _OnlyAnswer().visit(check)
    else:
        # The program computes all answers in one expression; the check reads _answer[0], ...
        asked = ast.Tuple(splitter.asked, ast.Load())
    test: Assert = {"expression": ast.unparse(asked), "expected": [expected]}
    # The check is the answer itself: the values are compared without a second process.
    if not isinstance(check, ast.Name):
        test["check"] = ast.unparse(check)
    return test


class _CannotSplitError(ValueError):
    """A call of the program uses a variable of the assert."""


class _Splitter(ast.NodeTransformer):
    """Turns an expression into its check and collects the program's part in `asked`.

    The program evaluates the calls of its functions, with their arguments. Operations on the values
    of these calls belong to the assert: built-in functions, methods of built-in types, operators,
    subscripts, and names that the setup imports and defines.
    """

    def __init__(self, expression: ast.expr, names_of_setup: frozenset[str]) -> None:
        self.asked: list[ast.expr] = []
        self._variables = _variables_of(expression)
        others = _BUILTIN_NAMES | names_of_setup | self._variables
        self._names_of_assert = others - _tested_builtin(expression, others)

    def visit(self, node: ast.AST) -> ast.AST:
        if not self._mentions_program(node):
            return node
        match node:
            case ast.Name():
                return self._ask(node)
            case ast.Attribute():  # an attribute of one of the program's objects
                return self._ask(node)
            case ast.Call(func=function) if self._is_programs(function):
                return self._ask(node)
            case ast.Call(func=ast.Attribute() as method):
                # A method of a built-in type: the program computes only the object.
                method = ast.Attribute(self._visited(method.value), method.attr, method.ctx)
                arguments = [self._visited(argument) for argument in node.args]
                keywords = [
                    ast.keyword(each.arg, self._visited(each.value)) for each in node.keywords
                ]
                return ast.Call(method, arguments, keywords)
            case ast.ListComp(elt=ast.Call(func=function)) if self._is_programs(function):
                # The program evaluates the complete comprehension, and so its calls may use the
                # comprehension's variable.
                return self._ask(node)
        return self.generic_visit(node)

    def _visited(self, node: ast.expr) -> ast.expr:
        visited = self.visit(node)
        assert isinstance(visited, ast.expr), f"{visited=}"
        return visited

    def _mentions_program(self, node: ast.AST) -> bool:
        names = [child.id for child in ast.walk(node) if isinstance(child, ast.Name)]
        return not self._names_of_assert.issuperset(names)

    def _is_programs(self, function: ast.expr) -> bool:
        """Returns whether a called function belongs to the program."""
        if not self._mentions_program(function):
            return False
        if isinstance(function, ast.Attribute):
            # f(2).strip() calls a built-in method of a value, Stack().pop() the program's method.
            is_builtin = function.attr in _METHODS and not _is_construction(function.value)
            return not is_builtin
        return True

    def _ask(self, node: ast.expr) -> ast.expr:
        # Variables that are bound outside of the node do not exist in the program's process.
        outside = self._variables - _variables_of(node)
        names = {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}
        if names & outside:
            raise _CannotSplitError
        self.asked.append(node)
        place = ast.Constant(len(self.asked) - 1)
        return ast.Subscript(ast.Name(ANSWER, ast.Load()), place, ast.Load())


class _OnlyAnswer(ast.NodeTransformer):
    """Replaces _answer[0] by _answer: a single answer is not in a tuple."""

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        match node:
            case ast.Subscript(value=ast.Name(id=name)) if name == ANSWER:
                return node.value
        return self.generic_visit(node)


def _is_construction(node: ast.expr) -> bool:
    """Returns whether an expression constructs an object: class names start with a capital."""
    match node:
        case ast.Call(func=ast.Name(id=name)):
            return name[:1].isupper()
    return False


def _variables_of(expression: ast.AST) -> frozenset[str]:
    """Returns the variables of the comprehensions and lambdas of an expression."""
    names = set()
    for node in ast.walk(expression):
        match node:
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.arg(arg=name):
                names.add(name)
    return frozenset(names)


def _tested_builtin(expression: ast.expr, names_of_assert: frozenset[str]) -> frozenset[str]:
    """Returns the function under test if it is named like a built-in function: `sum(10, 15)`.

    Returns an empty set if the assert uses other names. Otherwise the innermost call is the call
    under test.
    """
    names = [node.id for node in ast.walk(expression) if isinstance(node, ast.Name)]
    if not names_of_assert.issuperset(names):
        return frozenset()
    calls = [node for node in ast.walk(expression) if isinstance(node, ast.Call)]
    functions = [node.func.id for node in calls if isinstance(node.func, ast.Name)]
    return frozenset(functions[-1:])  # ast.walk goes from the outermost to the innermost


def _bound_names(source: str) -> frozenset[str]:
    """Returns the names that code imports and defines at its top level."""
    names: set[str] = set()
    try:
        statements = ast.parse(source).body
    except (SyntaxError, ValueError):  # the code will also fail in the sandbox
        return frozenset()
    for statement in statements:
        match statement:
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names |= {(alias.asname or alias.name).partition(".")[0] for alias in aliases}
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Assign(targets=targets):
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return frozenset(names)


def _value_of(node: ast.expr) -> JsonValue:
    """Returns a literal, or a set made from a literal, in the form of `program.encode`."""
    match node:
        case ast.Call(func=ast.Name(id="set" | "frozenset"), args=[items]):
            return _marked(set(ast.literal_eval(items)))
    return _marked(ast.literal_eval(node))


def _marked(value: object) -> JsonValue:
    if isinstance(value, list):
        return [_marked(item) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [_marked(item) for item in value]}
    if isinstance(value, set | frozenset):
        return {"set": [_marked(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[_marked(key), _marked(item)] for key, item in value.items()]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"{value!r:.80} has no form in JSON")
