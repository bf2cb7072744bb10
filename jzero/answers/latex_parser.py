"""Parses an answer in LaTeX or plain text to a tree of `expressions.Node`. Nothing is evaluated.

This is an operator-precedence parser. The table PREFIX maps a token at the start of a value to the
function that reads it. The table INFIX does the same for a token after a value, with its binding
strength. Two adjacent values are multiplied. Text that the grammar does not know, or that exceeds a
limit, has no tree.
"""

import functools
from collections.abc import Callable
from fractions import Fraction
from string import ascii_letters
from typing import NamedTuple

from jzero.answers.applications import argument_start
from jzero.answers.complex_numbers import conjugate_of_name, is_complex
from jzero.answers.dates import date_of
from jzero.answers.evaluation import REGION_KINDS
from jzero.answers.expressions import (
    COMPLEX,
    EMPTY_SET,
    INFINITY,
    MATRIX,
    REAL_LINE,
    TWO,
    VECTOR,
    Node,
    Refused,
    has_unit,
    joined,
    mentions,
    negative,
    symbol,
    unit_names,
)
from jzero.answers.groups import CYCLIC, is_group
from jzero.answers.latex_blocks import Blocks, is_statement, with_moduli
from jzero.answers.latex_lexer import tokenize, with_euler_number
from jzero.answers.latex_reader import (
    CLOSING_BRACKETS,
    DEFAULT_READING,
    DIGITS,
    END,
    MAX_DEPTH,
    MAX_TOKENS,
    NAMED_FUNCTION,
    OPENING_BRACKETS,
    OPERATORS,
    Binding,
    Reading,
    kind_of,
)
from jzero.answers.names import NAMED
from jzero.answers.noncommuting import NABLA, is_noncommuting
from jzero.answers.quantities import measure_the_same, named_unit, unit_of_powers
from jzero.answers.units import MULTIPLIERS, POWERS, REFUSED_WORDS, folded, singular, unit_name
from jzero.answers.vocabulary import BRACKETS, CURRENCIES, FUNCTIONS, GREEK, OPAQUE_FUNCTIONS

__all__ = ["DEFAULT_READING", "MAX_TOKENS", "Reading", "parse"]

MAX_EXPONENT = 1000  # of 1e1000
MAX_UNIT_WORDS = 8

LETTERS = ('"', *ascii_letters)  # first characters of words and symbols
RELATIONS = "=<>≤≥≠≈≡≅∼⊥∥"
GIVEN = "given"  # replaces the token of a bar or colon that means "given"
UNIT_TOKENS = ('"', "%", "/", "^", *CURRENCIES)  # the kinds of tokens in a unit
BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9}
BASES |= {"ten": 10, "eleven": 11, "twelve": 12, "sixteen": 16}


class Parser(Blocks):
    """Reads the tokens of an answer."""

    def expression(self, binding: Binding = Binding.ROWS) -> Node:
        """Reads a value, up to the first operator that binds less tightly than `binding`."""
        self.depth += 1
        # Words can only be a whole item, and never the operand of a tighter operator.
        node = self.words() if binding <= Binding.UNIT else None
        if node is None:
            if self.depth >= MAX_DEPTH:
                raise Refused("too deep")
            prefix = PREFIX.get(self.next_kind())
            if prefix is None:
                raise Refused(f"{self.next_token!r} begins no value")
            self.position += 1
            node = prefix(self, binding)
        while (infix := INFIX.get(self.next_kind())) and infix.binding >= binding:
            self.position += 1
            node = infix.read(self, node)
        self.depth -= 1
        return node

    def words(self) -> Node | None:
        """Reads words that form a whole item. Otherwise reads no token, and returns None.

        Articles do not count: "an ellipse" is "ellipse".
        """
        start = self.position
        while self.next_kind() in LETTERS:
            self.position += 1
        words = [folded(token.lstrip('"')) for token in self.tokens[start : self.position]]
        # Words only form an item if nothing that binds more tightly than a relation follows.
        following = INFIX.get(self.next_kind())
        # Words inside of a formula are units or names of functions.
        item_ends = following is None or following.binding <= Binding.RELATION
        if item_ends and any(len(word) > 1 for word in words):
            text = "".join(word for word in words if word not in ("a", "an", "the"))
            return TEXTS.get(text) or Node("text", name=text)
        self.position = start
        return None

    # The starts of values. Each of these functions is called after its token has been read.

    def number(self, _: Binding) -> Node:
        return number(self.last_token)

    def name(self, _: Binding) -> Node:
        r"""Reads a symbol, or the application of a letter that is a function.

        The symbol may be written as a word, \text{A}.
        """
        token = self.last_token.removeprefix('"')
        start = -1
        if token in self.reading.functions:
            start = argument_start(self.tokens, self.position, token)
        if start < 0:
            return CONSTANTS[token] if token in CONSTANTS else self.symbol(token)
        # Primes and subscripts between a name and its bracket belong to the name.
        decorations = [token for token in self.tokens[self.position : start] if token not in "{}"]
        self.position = start
        return self.application(token + "".join(decorations))

    def symbol(self, name: str) -> Node:
        if name == "i" and self.reading.has_index_i:
            return symbol("index i")
        if name in self.reading.matrices:
            return symbol(MATRIX + name)
        if name in self.reading.complex_letters:
            return symbol(COMPLEX + name)
        # A text that marks no vector writes all of them as plain letters.
        is_vector = name in self.reading.vectors and "\\vec" not in self.tokens
        return symbol(VECTOR + name if is_vector else name)

    def marked_vector(self, binding: Binding) -> Node:
        r"""Reads \vec{a}, which is a symbol a unless products of vectors are compared."""
        node = self.expression(Binding.ATOM)
        if node.kind == "symbol" and node.name.removeprefix("\\") in self.reading.vectors:
            return symbol(VECTOR + node.name.removeprefix("\\"))
        return node

    def ellipsis(self, binding: Binding) -> Node:
        if binding > Binding.CONGRUENCE:
            raise Refused("an ellipsis in a formula")
        return symbol("ldots")

    def nabla(self, _: Binding) -> Node:
        return NABLA

    def written_name(self, _: Binding) -> Node:
        """Reads a name of several letters, which is one token."""
        name = self.last_token.removeprefix(NAMED)
        return conjugate_of_name(name, self.reading.complex_letters) or self.symbol(name)

    def conjugate(self, _: Binding) -> Node:
        r"""Reads \overline{z+1} if letters are complex, and the complement \overline{A \cup B}."""
        inside = self.expression(Binding.ATOM)
        if inside.kind in REGION_KINDS:
            return Node("complement", (inside,))
        if not self.reading.complex_letters:
            raise Refused("a bar above a formula")
        return Node("conjugate", (inside,))

    def word(self, binding: Binding) -> Node:
        r"""Reads a symbol that is written as a word, \text{A}."""
        if len(self.last_token) != 2:
            raise Refused("a word in a formula")
        return self.name(binding)

    def named_function(self, _: Binding) -> Node:
        r"""Reads \text{Var}(X) or \gcd(m, n)."""
        return self.application(self.last_token[1:])

    def application(self, name: str) -> Node:
        """Reads the arguments of a function with unknown values."""
        if name in ("Re", "Im") and self.reading.complex_letters:
            in_brackets = self.next_token in ("(", "{")
            argument = self.expression(Binding.ATOM if in_brackets else Binding.APPLY)
            return Node(name.lower(), (argument,))
        # Operators such as Re z are written like functions, but without brackets they take the
        # next product.
        takes_product = f'"{name}' in OPERATORS or name in _WITHOUT_BRACKETS
        if takes_product and self.next_token != "(":
            return Node("apply", (self.expression(Binding.APPLY),), name=name)
        # \max\{a, b\} has its arguments in braces.
        if name in ("max", "min", "gcd", "lcm", "span") and self.accept("\\{"):
            argument = self.group(Binding.ATOM)
            is_set = argument.kind == "set"
            return Node("apply", argument.parts if is_set else (argument,), name=name)
        if not self.accept("("):
            raise Refused(f"no bracket after {name}")
        self.mark_condition()
        argument = self.group(Binding.ATOM)
        is_list = argument.kind == "tuple" and argument.name == "()"
        return Node("apply", argument.parts if is_list else (argument,), name=name)

    def mark_condition(self) -> None:
        r"""Marks the bar or colon that means "given" in a group that has just been opened.

        This is the first bar if the number of bars is odd: P(A|B), \{x | |x| < 2\}. It is a colon
        in \{x : x > 2\}. The condition that x is real, x ∈ ℝ, is dropped.
        """
        start = self.position
        depth, bars, colons, has_relation = 0, [], [], False
        for index in range(start, len(self.tokens)):
            token = self.tokens[index]
            depth += (token in OPENING_BRACKETS) - (token in CLOSING_BRACKETS)
            if depth < 0:
                break
            if depth == 0 and token == "|":
                bars.append(index)
            elif depth == 0 and (token == ":" or (token == ";" and index == start + 1)):
                colons.append(index)
            is_relation = token == "∈" or (token in RELATIONS and token != END)
            has_relation = has_relation or is_relation
        # An odd number of bars has one that is no absolute value.
        in_braces = self.last_token == "\\{"
        if len(bars) % 2 == 1:
            mark = bars[0]
        elif in_braces and colons and has_relation:
            mark = colons[0]
        else:
            return
        self.tokens[mark] = GIVEN
        if self.tokens[start + 1 : mark] == ["∈", "\\real"]:
            del self.tokens[start + 1 : mark]

    def group(self, binding: Binding) -> Node:
        """Reads the content of two brackets."""
        opening = self.last_token
        if opening == "|" and "|" in self.tokens[self.position :]:
            # A bar opens and closes. The next bar is marked as closing, because it would otherwise
            # open a group.
            self.tokens[self.tokens.index("|", self.position)] = "\\|"
        if opening == "\\{" and self.accept("\\}"):
            return EMPTY_SET
        if opening == "{" and self.accept("}"):
            return self.expression(binding)
        if opening == "\\{":
            self.mark_condition()
        inside = self.expression(Binding.CONDITION)
        brackets = opening + self.next_token
        if brackets not in BRACKETS:
            raise Refused(f"{brackets!r} is not a pair of brackets")
        self.position += 1
        kind = BRACKETS[brackets]
        if inside.kind == "given" and kind == "set":
            family = _family_of_set(inside)
            return _condition_of_set(inside) if family is None else family
        items = inside.parts if inside.kind == "list" else (inside,)
        # Brackets around one value only group it, and brackets around a matrix belong to it.
        if len(items) == 1 and (brackets in ("{}", "()", "[]") or inside.kind == "matrix"):
            return inside
        return Node(kind, items, name=brackets if kind == "tuple" else "")

    def function(self, _: Binding) -> Node:
        r"""Reads sin x, sin^2 x, sin^{-1} x, log_b x.

        Without brackets the argument is the product that follows: \sin 2x is sin(2x).
        """
        name = self.last_token[1:]
        base = ()
        if name == "log" and self.accept("_"):
            self._split_index()
            base = (self.expression(Binding.ATOM),)
        # The exponent stands between the name and the argument: \sin^2 x.
        exponent = self.expression(Binding.POWER) if self.accept("^") else None
        # sin^{-1} is the inverse function.
        if exponent == MINUS_ONE and "a" + name in FUNCTIONS:
            name, exponent = "a" + name, None
        in_brackets = self.next_token in ("(", "{")
        argument = self.expression(Binding.ATOM if in_brackets else Binding.APPLY)
        node = Node(name, (argument, *base))
        return node if exponent is None else Node("power", (node, exponent))

    def _split_index(self) -> None:
        r"""Splits \\log_25 as TeX does, if no argument would follow: the base 2 of 5."""
        token = self.next_token
        following = INFIX.get(kind_of(self.tokens[self.position + 1])) if token else None
        is_argument = following is not None and following.binding >= Binding.APPLY
        if token.isdigit() and len(token) > 1 and token[0] not in "01" and not is_argument:
            self.tokens[self.position : self.position + 1] = [token[0], token[1:]]

    def half_line(self, binding: Binding) -> Node:
        """Reads a relation without a left side, "≥ 5", as the interval from 5 on."""
        if binding > Binding.LIST or self.position > 1:
            raise Refused("an operator without a left side")
        operator = self.last_token
        number = self.expression(Binding.UNIT)
        if operator in ">≥":
            return Node("tuple", (number, INFINITY), name="[)" if operator == "≥" else "()")
        brackets = "(]" if operator == "≤" else "()"
        return Node("tuple", (negative(INFINITY), number), name=brackets)

    def fraction(self, _: Binding) -> Node:
        above = self.expression(Binding.ATOM)
        below = self.expression(Binding.ATOM)
        if above.kind == "unit" and above.name[0] != "_" and not unit_names(below):
            # The unit of the numerator is the unit of the fraction.
            return above._replace(parts=(Node("divide", (above.parts[0], below)),))
        return _derivative(above, below) or Node("divide", (above, below))

    def binomial(self, _: Binding) -> Node:
        above = self.expression(Binding.ATOM)
        below = self.expression(Binding.ATOM)
        return Node("binomial", (above, below))

    def root(self, _: Binding) -> Node:
        degree = TWO
        if self.accept("["):
            degree = self.expression(Binding.ROWS)
            self.require("]")
        # The argument is a group or a single token, as in \sqrt2.
        return Node("root", (degree, self.expression(Binding.ATOM)))

    def money(self, binding: Binding) -> Node:
        name = unit_name(self.last_token)
        amount = self.expression(max(binding, Binding.PRODUCT))
        return Node("unit", (amount,), name=name)

    def plus(self, binding: Binding) -> Node:
        if binding >= Binding.ATOM:
            raise Refused("a sign in front of an argument, as in x^-2")
        return self.expression(max(binding, Binding.PRODUCT))

    def minus(self, binding: Binding) -> Node:
        return negative(self.plus(binding))

    def leading_sign(self, binding: Binding) -> Node:
        """Drops a relation or comma without a left side: "= 5" is 5."""
        if binding > Binding.UNIT:
            raise Refused("an operator without a left side")
        return self.expression(Binding.UNIT)

    # The tokens after a value. Each of these functions is called after its token has been read.

    def factor(self, left: Node) -> Node:
        """Reads a factor without a sign in front of it.

        An integer right before a proper fraction makes a mixed number. Two adjacent numbers have no
        meaning.
        """
        # A product has no operator token: the last token belongs to the factor, and is read again.
        last_of_left, token = self.tokens[self.position - 2 : self.position]
        self.position -= 1
        right = _grouped(self.expression(Binding.POSTFIX))
        left = _grouped(left)
        if left.kind == "compose" and token == "(" and all(map(_is_function_name, left.parts)):
            for function in reversed(left.parts):
                right = Node("apply", (right,), name=function.name)
            return right
        # 2 1/2 and 2\frac12 are mixed numbers; 2(1/2) is a product.
        if last_of_left.isdigit() and left.kind == "number" and token != "(":
            if right.kind == "number" and self.accept("/"):
                right = Node("divide", (right, self.expression(Binding.POSTFIX)))
            if _is_proper_fraction(right):
                return Node("mixed", (left, right))
        if token[0].isdigit() and not _may_precede_number(left, last_of_left, right):
            raise Refused("two numbers side by side")
        if left == NABLA and right.kind == "symbol" and right.name.startswith(VECTOR):
            return Node("outer", (left, right))
        return joined("multiply", left, right)

    def divide(self, left: Node) -> Node:
        return Node("divide", (left, self.expression(Binding.POSTFIX)))

    def subtract(self, left: Node) -> Node:
        right = self.expression(Binding.PRODUCT)
        # A minus between sets is their difference.
        if right.kind == "set":
            return Node("setminus", (left, right))
        return joined("add", left, negative(right))

    def ratio(self, left: Node) -> Node:
        """Reads a side of 3:2, or of the time 4:05."""
        right = self.expression(Binding.UNION)
        written = self.last_token
        # Minutes are written with a leading zero.
        is_time = right.kind == "number" and written.isdigit() and written[0] == "0" != written
        is_time = is_time or (left.kind == "ratio" and left.name == "time")
        return joined("ratio", left, right)._replace(name="time" if is_time else "")

    def condition(self, left: Node) -> Node:
        if left.kind == "given":
            raise Refused("two conditions")
        return Node("given", (left, self.expression(Binding.ROWS)))

    def prime(self, left: Node) -> Node:
        """Reads f', or the feet and inches of 5'10''."""
        if left.kind == "number":
            # 5' is 5 feet, and 5'' is 5 inches.
            quantity = Node("unit", (left,), name="inch" if self.accept("'") else "foot")
            return self.compound(quantity) if self.next_token[:1].isdigit() else quantity
        if left.kind != "symbol":
            raise Refused("a prime after what is not a name")
        return symbol(left.name + "'")

    def choose(self, left: Node) -> Node:
        return Node("binomial", (left, self.expression(Binding.SUM)))

    def power(self, left: Node) -> Node:
        # Towers are read from the right: 2^3^2 is 2^(3^2).
        left = _grouped(left)
        if is_complex(left):
            for star in (["*"], ["{", "*", "}"]):
                if self.tokens[self.position : self.position + len(star)] == star:
                    self.position += len(star)
                    return Node("conjugate", (left,))
        exponent = self.expression(Binding.POWER)
        is_interval = left.kind == "tuple" and len(left.parts) == 2 and "[" in left.name
        if is_interval and exponent.kind == "number" and exponent.value in (2, 3):
            return Node("cartesian", (left,) * int(exponent.value))
        return Node("power", (left, exponent))

    def factorial(self, left: Node) -> Node:
        if left.kind in ("factorial", "degree"):
            raise Refused("a tower of postfix operators")
        return Node("factorial", (left,))

    def degree(self, left: Node) -> Node:
        if left.kind == "degree":
            raise Refused("a tower of postfix operators")
        scale = self.accept("C", "F", '"C', '"F', '"Celsius', '"celsius', '"Fahrenheit')
        scale = scale or self.accept('"fahrenheit')
        if scale:
            is_celsius = scale.lstrip('"').lower().startswith("c")
            return Node("unit", (left,), name="celsius" if is_celsius else "fahrenheit")
        return Node("degree", (left,), name="degree")

    def subscript(self, left: Node) -> Node:
        """Reads x_{12}, which is a name, or 101_2, a number in another base."""
        if self.next_token[:1] == '"':  # v_\\text{max}
            self.position += 1
            below = Node("text", name=folded(self.last_token[1:]))
        else:
            below = self.expression(Binding.ATOM)
        # A base may be written as a word: 101_{two}.
        if below.kind == "text" and below.name in BASES:
            below = number(str(BASES[below.name]))
        if left == CONSTANTS["ℤ"]:
            return Node(CYCLIC, (below,))
        name = f"_{below!r}"
        if left.kind == "number":
            return Node("unit", (left,), name=name)
        if left.kind == "symbol":
            return symbol(left.name + name)
        raise Refused("a subscript of what is not a name")

    def unit(self, left: Node) -> Node:
        """Reads the words after a value, including / and powers.

        The spelling is normalized, and the words are sorted: "square feet" and "ft^2" are "foot 2".
        Numerals multiply the value: "2 thirds" is 2/3, and "5 million dollars" are 5,000,000. A
        second number with a unit belongs to the first: 6 ft 2 in.
        """
        powers: dict[str, int] = {}
        last, sign, next_power, num_words = "", 1, 1, 0
        is_in_brackets = False
        self.position -= 1
        while self.is_unit_token(last != "") or (is_in_brackets and self.next_token == ")"):
            token = self.next_token
            self.position += 1
            num_words += 1
            word = token.lstrip('"')
            noun = singular(word)
            if word.lower() in REFUSED_WORDS or num_words > MAX_UNIT_WORDS:
                raise Refused("prose")
            # The next unit is in the denominator, and so are all units in brackets: J/(mol K).
            if token in ("/", '"per'):
                sign = -1
                is_in_brackets = bool(self.accept("("))
            elif token == ")":
                is_in_brackets = False
            elif token in ("*", "×", "-"):
                continue
            elif token == "^" or (noun in POWERS and last):
                power = self.unit_power() if token == "^" else POWERS[noun]
                if not last:
                    raise Refused("a power of no unit")
                # The unit's own word has already counted 1.
                powers[last] += (power - 1) * (1 if powers[last] > 0 else -1)
            elif noun in POWERS:
                # "3 squared" is the number 9; after a unit, as in "3 feet squared", the unit has
                # the power.
                left = _raised(left, POWERS[noun])
            elif noun in DIMENSIONS and self.is_unit_token(follows_unit=False):
                # "square feet": the power precedes its unit.
                next_power = DIMENSIONS[noun]
            elif noun in MULTIPLIERS and noun not in self.reading.counted:
                if powers:
                    raise Refused("a numeral after a unit")
                left = _scaled(left, noun)
            else:
                last = unit_name(word)
                powers[last] = powers.get(last, 0) + sign * next_power
                sign = -1 if is_in_brackets else 1
                next_power = 1
        if is_in_brackets:
            raise Refused("an open bracket")
        if "percent" in powers and not powers.keys().isdisjoint(("more", "less")):
            raise Refused("a change in percent")
        if not powers:
            return left
        quantity = Node("unit", (left,), name=unit_of_powers(powers))
        return self.compound(quantity) if self.next_token[:1].isdigit() else quantity

    def is_unit_token(self, follows_unit: bool) -> bool:
        """Returns whether the next token belongs to a unit. After a unit, single letters may."""
        kind, token = self.next_kind(), self.next_token
        if kind in ("*", "×", "-"):  # N·m, and kilowatt-hours
            # A * or - before a word joins units; before anything else it is an operation.
            return self.tokens[self.position + 1][:1] == '"'
        is_letter = token != END and token in ascii_letters and named_unit(token) != ""
        may_be_letter = follows_unit or self.last_token == "/"
        return kind in UNIT_TOKENS or (is_letter and may_be_letter)

    def compound(self, first: Node) -> Node:
        """Reads the second number of 6 ft 2 in, which must measure the same quantity."""
        second = self.expression(Binding.UNIT)
        quantities = second.parts if second.kind == "compound" else (second,)
        for quantity in quantities:
            if quantity.kind != "unit" or not measure_the_same(first.name, quantity.name):
                raise Refused("two numbers side by side")
        return Node("compound", (first, *quantities))

    def unit_power(self) -> int:
        node = self.expression(Binding.ATOM)
        sign = 1
        if node.kind == "negative":
            sign, node = -1, node.parts[0]
        if node.kind != "number" or node.value.denominator != 1 or not 0 < node.value < 10:
            raise Refused("prose")
        return sign * int(node.value)

    def relation(self, left: Node) -> Node:
        """Reads a chain of relations. A chain that starts with > or ≥ is reversed."""
        operators = self.last_token
        sides = [left, self.expression(Binding.UNIT)]
        while operator := self.accept(*RELATIONS):
            operators += operator
            sides.append(self.expression(Binding.UNIT))
        # Chains are compared from left to right: 3 > x > 1 is stored as 1 < x < 3.
        if operators[0] in ">≥":
            operators = operators[::-1].translate(str.maketrans("<>≤≥", "><≥≤"))
            sides = sides[::-1]
        return Node("relation", tuple(sides), name=operators)

    def membership(self, left: Node) -> Node:
        """Reads x ∈ [0, 1), or x, y ∈ ℝ."""
        return Node("relation", (left, self.expression(Binding.UNIT)), name="∈")

    def end_of_list(self, left: Node) -> Node:
        """Reads the next item of a list, or no item after a comma at the end of a row."""
        if self.next_token in ("&", "\\\\", "\\endcases", "and", "or", "∧", "∨"):
            return left
        return joined("list", left, self.expression(Binding.CONGRUENCE))

    def word_between(self, left: Node) -> Node:
        """Reads "and" or "or", which make a list of values: 1 and 2; 1, 2 or 3."""
        word = self.last_token
        binding = Binding.CONGRUENCE if word == "and" else Binding.LIST
        right = self.expression(binding)
        are_quantities = word == "and" and left.kind == right.kind == "unit"
        if are_quantities and left.name != right.name and measure_the_same(left.name, right.name):
            return Node("compound", (left, right))  # 2 hours and 30 minutes
        if not is_statement(left) and not is_statement(right):
            items = right.parts if right.kind == "list" else (right,)
            for item in items:
                left = joined("list", left, item)
            return left
        return joined(word, left, right)

    def negation(self, _: Binding) -> Node:
        return Node("not", (self.expression(Binding.POSTFIX),))


def number(token: str) -> Node:
    """Returns the node of a number: 12, 0.25, 1.5e-10, or 0.1¯6 for 0.1666...

    Raises:
        Refused: The exponent exceeds MAX_EXPONENT, or the token has no digits, or too many.
    """
    written, _, repeated = token.lower().partition("¯")
    # The appended e0 gives a number without an exponent the exponent 0; after 1e5 it is a third
    # part, which is ignored.
    mantissa, exponent, *_ = f"{written}e0".split("e")
    num_decimals = len(mantissa.partition(".")[2])
    try:
        if abs(int(exponent)) > MAX_EXPONENT:
            raise Refused("too large")
        value = Fraction(written)
        # The value of the last decimal place.
        # The comparison needs it to accept roundings: 0.50 is given to two places, and 0.5 to
        # one.
        place = Fraction(10) ** (int(exponent) - num_decimals)
        if repeated:
            # n repeating digits d are d / (10^n - 1) of the last place.
            value += place * Fraction(int(repeated), 10 ** len(repeated) - 1)
    except ValueError as error:  # ".¯6" lacks digits in front; int() takes at most 4,300 digits
        raise Refused(str(error)) from None
    is_decimal = num_decimals > 0 and not repeated
    return Node("number", value=value, decimal_place=place if is_decimal else 0)


def _raised(node: Node, exponent: int) -> Node:
    """Returns 3^2 for "3 squared"."""
    if node.kind not in ("number", "symbol"):
        raise Refused("a power of what is not a number")
    return Node("power", (node, number(str(exponent))))


def _scaled(node: Node, numeral: str) -> Node:
    """Returns the value of "5 million"; in "$5 million" the numeral goes inside the unit."""
    if has_unit(node):
        return node._replace(parts=(_scaled(node.parts[0], numeral),))
    return Node("scaled", (node, Node("number", value=MULTIPLIERS[numeral])))


def _family_of_set(conditional: Node) -> Node | None:
    r"""Returns 2k, k \\in Z for \\{2k : k \\in Z\\}; None if the condition is not a declaration."""
    head, condition = conditional.parts
    parts = condition.parts if condition.kind == "list" else (condition,)
    are_declarations = all(part.kind == "relation" and part.name == "∈" for part in parts)
    if not are_declarations or head.kind in ("symbol", "relation"):
        return None
    names = [part.parts[0] for part in parts]
    is_point = head.kind == "tuple" and all(part in names for part in head.parts)
    if is_point or not all(mentions(head, name) for name in names):
        return None
    return Node("list", (head, *parts))


def _condition_of_set(conditional: Node) -> Node:
    """Returns the condition x > 2 of {x | x > 2}, which is compared like any other relation."""
    head, condition = conditional.parts
    domain = None
    # {x ∈ ℤ | x > 2} has its domain in front of the bar.
    if head.kind == "relation" and head.name == "∈":
        head, domain = head.parts[0], head
    if domain is not None and domain.parts[1].kind == "power":  # (x, y) ∈ ℝ²
        base, exponent = domain.parts[1].parts
        is_plane = base == REAL_LINE and head.kind == "tuple" and exponent.value == len(head.parts)
        domain = None if is_plane else domain
    names = head.parts if head.kind == "tuple" else (head,)
    relations = condition.parts if condition.kind == "list" else (condition,)
    relations = tuple(part for part in relations if part != REAL_LINE)
    # x ≠ 1, 2 excludes both values.
    first = relations[0] if relations else condition
    if first.kind == "relation" and first.name == "≠":
        relations = tuple(
            part if is_statement(part) else first._replace(parts=(first.parts[0], part))
            for part in relations
        )
    for name in names:
        if name.kind != "symbol" or not mentions(condition, name):
            raise Refused("a condition on another name")
    if not all(map(is_statement, relations)):
        raise Refused("a condition that is not a relation")
    if domain is not None:
        relations = (*relations, domain)
    return relations[0] if len(relations) == 1 else Node("and", relations)


def _may_precede_number(left: Node, last_of_left: str, right: Node) -> bool:
    """Returns whether a number or its power, `right`, may be a factor after `left`.

    `last_of_left` is the last token of `left`. In x^2 2^n the last digit of x^2 is an exponent.
    """
    last = left.parts[-1] if left.kind == "multiply" else left
    if last_of_left in (")", "!") or (last_of_left == "}" and last.kind == "power"):
        return True
    is_number = last_of_left[0].isdigit() and last.kind not in ("power", "symbol")
    return right.kind == "power" and not is_number


def _is_function_name(node: Node) -> bool:
    return node.kind == "symbol"


def _derivative(above: Node, below: Node) -> Node | None:
    """Returns y' for dy/dx and y'' for d^2y/dx^2, and the dots of derivatives by t."""
    if above.kind != "multiply" or below.kind != "multiply" or len(above.parts) != 2:
        return None
    (operator, function), (d, variable) = above.parts, below.parts[:2]
    order = 1
    if operator.kind == "power" and variable.kind == "power":
        if operator.parts[1] != variable.parts[1] or operator.parts[1] != TWO:
            return None
        operator, variable, order = operator.parts[0], variable.parts[0], 2
    are_letters = operator.name == d.name == "d" and function.kind == variable.kind == "symbol"
    if not are_letters or len(below.parts) != 2 or variable.name not in ("x", "t"):
        return None
    if variable.name == "x":
        return symbol(function.name + "'" * order)
    return symbol(f"{'dot' if order == 1 else 'ddot'} {function.name}")


def _grouped(node: Node) -> Node:
    r"""Returns the only member of a factor \\{x+1\\}, whose braces group like round brackets."""
    return node.parts[0] if node.kind == "set" and len(node.parts) == 1 else node


def _is_proper_fraction(node: Node) -> bool:
    if node.kind != "divide":
        return False
    above, below = node.parts
    return above.kind == below.kind == "number" and above.value < below.value


class Infix(NamedTuple):
    """An operator after a value: its binding strength, and the function that reads it."""

    binding: Binding
    read: Callable[[Parser, Node], Node]


def _joining(kind: str, binding: Binding, right: Binding) -> Infix:
    """Returns an operator that joins any number of values under one node."""

    def read(parser: Parser, left: Node) -> Node:
        return joined(kind, left, parser.expression(right))

    return Infix(binding, read)


def _implication(kind: str) -> Callable[[Parser, Node], Node]:
    def read(parser: Parser, left: Node) -> Node:
        return Node(kind, (left, parser.expression(Binding.IMPLICATION)))

    return read


def _setminus(parser: Parser, left: Node) -> Node:
    return Node("setminus", (left, parser.expression(Binding.SUM)))


def _times(parser: Parser, left: Node) -> Node:
    """Reads a factor after ×: a product, a cross product, or pairs of members of sets."""
    right = parser.expression(Binding.POSTFIX)
    last = left.parts[-1] if left.kind == "multiply" else left
    if _is_set(last) and _is_set(right):
        return joined("cartesian", left, right)
    are_vectors = last.kind == right.kind == "tuple"
    if not are_vectors and not (is_noncommuting(last) and is_noncommuting(right)):
        return joined("multiply", left, right)
    # In q v × B the number is a factor of the cross product.
    cross = Node("cross", (last, right))
    return cross if left is last else Node("multiply", (*left.parts[:-1], cross))


def _is_set(node: Node) -> bool:
    base = node.parts[0] if node.kind in ("power", "cartesian") else node
    return (
        base.kind in ("set", "domain")
        or is_group(node)
        or (base.kind == "tuple" and len(base.parts) == 2)
    )


def _composition(parser: Parser, left: Node) -> Node:
    right = parser.expression(Binding.POSTFIX)
    return Node("compose", (*_composed(left), *_composed(right)))


def _composed(node: Node) -> tuple[Node, ...]:
    return node.parts if node.kind == "compose" else (node,)


_WITHOUT_BRACKETS = ("det", "dim", "deg")
MINUS_ONE = negative(number("1"))
CONSTANTS = {
    "\\infty": INFINITY,
    "\\emptyset": EMPTY_SET,
    "\\real": REAL_LINE,
    **{name: Node("domain", name=name) for name in ("ℤ", "ℕ", "ℚ", "ℂ", "ℤ₊", "ℕ₀")},
    **{f"\\{name}": symbol(name) for name in GREEK},
}
# Words that are not a unit: one answer in several spellings.
_DOES_NOT_EXIST = Node("text", name="doesnotexist")
TEXTS = {
    "allrealnumbers": REAL_LINE,
    "allreals": REAL_LINE,
    "dne": _DOES_NOT_EXIST,
    "undefined": _DOES_NOT_EXIST,
    **dict.fromkeys(
        (
            "nosolution",
            "nosolutions",
            "norealsolution",
            "norealsolutions",
            "therearenosolutions",
            "thereisnosolution",
            "emptyset",
            "none",
        ),
        EMPTY_SET,
    ),
    **dict.fromkeys(("allrealx", "allrealvalues", "allrealvaluesofx", "realnumbers"), REAL_LINE),
    "allintegers": Node("domain", name="ℤ"),
    "infinity": INFINITY,
    **dict.fromkeys(
        ("infinitelymanysolutions", "infinitesolutions", "infinitenumberofsolutions"),
        Node("text", name="infinitelymany"),
    ),
    **dict.fromkeys(
        ("doesnotconverge", "divergent", "itdiverges", "isdivergent"), Node("text", name="diverges")
    ),
}
DIMENSIONS = {"square": 2, "sq": 2, "cubic": 3}
_FUNCTION_COMMANDS = [f"\\{name}" for name in FUNCTIONS]
_OPAQUE_COMMANDS = [f"\\{name}" for name in OPAQUE_FUNCTIONS]

PREFIX: dict[str, Callable[[Parser, Binding], Node]] = {
    **dict.fromkeys(DIGITS, Parser.number),
    **dict.fromkeys(ascii_letters, Parser.name),
    '"': Parser.word,
    NAMED: Parser.written_name,
    **dict.fromkeys(CONSTANTS, Parser.name),
    **dict.fromkeys(("(", "[", "{", "\\{", "|", "⌊", "⌈", "\\begin"), Parser.group),
    **dict.fromkeys(_FUNCTION_COMMANDS, Parser.function),
    **dict.fromkeys((*_OPAQUE_COMMANDS, NAMED_FUNCTION), Parser.named_function),
    "\\ldots": Parser.ellipsis,
    "\\vec": Parser.marked_vector,
    "\\nabla": Parser.nabla,
    **dict.fromkeys(("\\overline", "\\bar"), Parser.conjugate),
    "\\frac": Parser.fraction,
    "\\binom": Parser.binomial,
    "\\sqrt": Parser.root,
    **dict.fromkeys(CURRENCIES, Parser.money),
    **dict.fromkeys(("\\sum", "\\prod"), Parser.binder),
    "\\int": Parser.integral,
    "\\lim": Parser.limit,
    "\\cases": Parser.cases,
    "\\vmatrix": Parser.determinant,
    "_": Parser.index_before,
    "^": Parser.index_before,
    "¬": Parser.negation,
    "-": Parser.minus,
    "+": Parser.plus,
    **dict.fromkeys("=≈∼,;→", Parser.leading_sign),
    **dict.fromkeys("<>≤≥", Parser.half_line),
}

# Later lines replace earlier ones: "-" starts a value, but after a value it subtracts.
INFIX: dict[str, Infix] = {
    # Each token that starts a value is a factor after a value.
    **dict.fromkeys(PREFIX, Infix(Binding.APPLY, Parser.factor)),
    # A bracket or function ends the argument of the previous function: \sin x (y) is sin(x) y.
    **dict.fromkeys(
        ("(", NAMED_FUNCTION, *_FUNCTION_COMMANDS), Infix(Binding.PRODUCT, Parser.factor)
    ),
    **dict.fromkeys(('"', "%", *CURRENCIES), Infix(Binding.UNIT, Parser.unit)),
    **dict.fromkeys(",;", Infix(Binding.LIST, Parser.end_of_list)),
    "and": Infix(Binding.LIST, Parser.word_between),
    "or": Infix(Binding.OR, Parser.word_between),
    "∧": _joining("and", Binding.LIST, Binding.CONGRUENCE),
    "∨": _joining("or", Binding.OR, Binding.LIST),
    "→": Infix(Binding.IMPLICATION, _implication("implies")),
    "↔": Infix(Binding.IMPLICATION, _implication("equivalent")),
    "\\pmod": Infix(Binding.CONGRUENCE, Parser.modulus),
    "\\bmod": Infix(Binding.PRODUCT, Parser.residue),
    "∖": Infix(Binding.UNION, _setminus),
    **dict.fromkeys("×⊕", Infix(Binding.PRODUCT, _times)),
    "∘": Infix(Binding.PRODUCT, _composition),
    "\\\\": _joining("rows", Binding.ROWS, Binding.ROW),
    "&": _joining("row", Binding.ROW, Binding.IMPLICATION),
    **dict.fromkeys(RELATIONS, Infix(Binding.RELATION, Parser.relation)),
    "∈": Infix(Binding.RELATION, Parser.membership),
    ":": Infix(Binding.RATIO, Parser.ratio),
    GIVEN: Infix(Binding.CONDITION, Parser.condition),
    "'": Infix(Binding.POSTFIX, Parser.prime),
    "∪": _joining("union", Binding.UNION, Binding.SUM),
    "∩": _joining("intersection", Binding.UNION, Binding.SUM),
    "+": _joining("add", Binding.SUM, Binding.PRODUCT),
    "-": Infix(Binding.SUM, Parser.subtract),
    "\\choose": Infix(Binding.SUM, Parser.choose),
    "*": _joining("multiply", Binding.PRODUCT, Binding.POSTFIX),
    "/": Infix(Binding.PRODUCT, Parser.divide),
    "^": Infix(Binding.POWER, Parser.power),
    "_": Infix(Binding.POSTFIX, Parser.subscript),
    "!": Infix(Binding.POSTFIX, Parser.factorial),
    "°": Infix(Binding.POSTFIX, Parser.degree),
}


def _parse_tokens(tokens: list[str], reading: Reading) -> Node:
    """Returns the tree of all tokens. Plus-minus gives two items: 1±2 is the list 3, -1."""
    # Parses the tokens once for each sign.
    if "±" in tokens or "∓" in tokens:
        return _parse_both_signs(tokens, reading)
    date = date_of(tokens)
    if date is not None:
        return date
    parser = Parser(with_moduli(tokens), reading)
    node = parser.expression()
    if parser.next_token != END:
        raise Refused("something is left over")
    return node


def _parse_both_signs(tokens: list[str], reading: Reading) -> Node:
    items: dict[Node, None] = {}  # a set that keeps the order
    kind = ""
    # The upper signs are one answer, and the lower signs another.
    for signs in ("+-", "-+"):
        table = str.maketrans("±∓", signs)
        node = _parse_tokens([token.translate(table) for token in tokens], reading)
        # x = 1 ± 2, y = 3 are two solutions, and so is y = ±x.
        if node.kind in ("relation", "congruence") or (node.kind == "list" and is_statement(node)):
            kind = "or"
        # {1 ± 2} is a set of two members.
        kind = kind or ("set" if node.kind == "set" else "list")
        items |= dict.fromkeys(node.parts if node.kind == kind else (node,))
    return Node(kind, tuple(items))


def _with_products(tokens: list[str], reading: Reading) -> list[str]:
    result: list[str] = []
    for index, token in enumerate(tokens):
        letters = token.removeprefix('"')
        # (ABC)^T is a product of matrices, and so is A^TBA.
        are_matrices = set(letters.removeprefix("T")) <= reading.matrices
        is_operand = tokens[index + 1 : index + 2] == [")"] or tokens[:index][-1:] == ["^"]
        is_product = letters in reading.products or (are_matrices and is_operand)
        result += letters if letters != token and is_product else [token]
    return result


@functools.lru_cache(4096)
def parse(text: str, reading: Reading = DEFAULT_READING) -> Node | None:
    """Returns the tree of `text`, None if the grammar or its limits refuse it."""
    tokens = tokenize(text, reading.units)
    if reading.products or reading.matrices:
        tokens = _with_products(tokens, reading)
    if reading.has_euler_number:
        tokens = with_euler_number(tokens)
    try:
        return _parse_tokens(tokens, reading)
    except Refused:
        return None
