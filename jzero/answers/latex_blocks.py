"""Special forms of the grammar: sums, integrals, limits, cases, combinations.

Each method of `Blocks` is called after its token has been read, like the methods of
`latex_parser.Parser`.
"""

from string import ascii_letters

from jzero.answers.expressions import INFINITY, Node, Refused, negative, replaced, symbol
from jzero.answers.latex_reader import CLOSING_BRACKETS, END, OPENING_BRACKETS, Binding, Reader

DIFFERENTIAL = "differential"  # the token of the d in dx
# Words in front of a condition in a piecewise formula.
_WORDS_OF_CONDITIONS = frozenset(('"if', '"for', '"when', '"where', '"whenever', '"is'))
_OTHERWISE = frozenset(('"otherwise', '"else', '"elsewhere', '"other'))
_PARITIES = {'"even': "0", '"odd': "1"}


class Blocks(Reader):
    """Reads blocks that have a special form."""

    # Sums, products, integrals and limits

    def binder(self, _: Binding) -> Node:
        r"""Reads \sum_{k=1}^{n} and the product that follows; \prod likewise."""
        kind = {"\\sum": "sum", "\\prod": "product"}[self.last_token]
        # The upper limit may come first: \sum^n_{k=1}.
        high: Node = INFINITY
        if self.accept("^"):
            high = self.expression(Binding.ATOM)
        self.require("_")
        self.require("{")
        name = self._bound_symbol()
        # k=1 or k≥1; only k=1 has an upper limit.
        operator = self.require("=", "≥")
        low = self.expression(Binding.SUM)
        if operator == "=" and self.accept("}"):
            if self.accept("^"):
                high = self.expression(Binding.ATOM)
        else:
            self.require("}")
        return self._bound(kind, name, (low, high), self.expression(Binding.PRODUCT))

    def integral(self, _: Binding) -> Node:
        r"""Reads \int_a^b f(x)\,dx. The formula ends at the d."""
        limits: dict[str, Node] = {}
        while side := self.accept("_", "^"):
            limits[side] = self.expression(Binding.ATOM)
        if len(limits) == 1:
            # An integral has two limits, or none if it is an antiderivative.
            raise Refused("an integral with one limit")
        self._mark_differential()
        formula = self.expression(Binding.SUM)
        self.require(DIFFERENTIAL)
        ends = tuple(limits[side] for side in "_^" if side in limits)
        return self._bound("integral", self._bound_symbol(), ends, formula)

    def _mark_differential(self) -> None:
        depth = inner_integrals = 0
        for index in range(self.position, len(self.tokens) - 1):
            token = self.tokens[index]
            depth += (token in OPENING_BRACKETS) - (token in CLOSING_BRACKETS)
            inner_integrals += token == "\\int"
            following = self.tokens[index + 1]
            is_letter = following in ascii_letters or following[0] == "\\"
            if token in ("d", '"d') and depth == 0 and is_letter:
                # The d of an inner integral belongs to the inner integral.
                if inner_integrals == 0:
                    self.tokens[index] = DIFFERENTIAL
                    return
                inner_integrals -= 1
        raise Refused("an integral without its d")

    def limit(self, _: Binding) -> Node:
        r"""Reads \lim_{x\to a} and the product that follows."""
        self.require("_")
        self.require("{")
        name = self._bound_symbol()
        self.require("→")
        place = self.expression(Binding.POSTFIX) if self.next_token != "-" else None
        if place is None:
            place = self.expression(Binding.PRODUCT)
        # x \to 0^+ is a one-sided limit.
        side = ""
        if self.accept("^"):
            side = self.require("+", "-")
        elif self.next_token in ("+", "-") and self.tokens[self.position + 1] == "}":
            side = self.accept("+", "-")
        self.require("}")
        node = self._bound("limit", name, (place,), self.expression(Binding.PRODUCT))
        return node._replace(name=side)

    def _bound_symbol(self) -> str:
        token = self.next_token.removeprefix('"')
        self.position += 1
        is_name = token in ascii_letters or token.startswith("\\")
        if not is_name or token in ("", "\\pi", "\\infty"):
            raise Refused("no symbol")
        return token.removeprefix("\\")

    def _bound(self, kind: str, name: str, limits: tuple[Node, ...], formula: Node) -> Node:
        """Returns a node that binds a symbol.

        The symbol gets another name, which is neither a constant nor the name of a free symbol.
        """
        # No token contains "#".
        bound = symbol(name + "#")
        return Node(kind, (replaced(formula, symbol(name), bound), bound, *limits))

    # Cases

    def cases(self, _: Binding) -> Node:
        r"""Reads \begin{cases}: a piecewise formula, or a system of relations."""
        end = self.closing_position()
        if self.tokens[end] != "\\endcases":
            raise Refused("cases that do not end")
        self._separate_conditions(end)
        # One formula and perhaps one condition; empty cells between them do not count.
        rows = []
        while not self.accept("\\endcases"):
            entries = [self._entry()]
            while self.accept("&"):
                if self.next_token not in ("&", "\\\\", "\\endcases"):
                    entries.append(self._entry())
            if len(entries) > 2:
                raise Refused("a row of three")
            rows.append(Node("case", tuple(entries)))
            if not self.accept("\\\\") and self.next_token != "\\endcases":
                raise Refused("a row that does not end")
        if not rows:
            raise Refused("no cases")
        # Rows without conditions are a system of relations.
        if all(len(row.parts) == 1 for row in rows):
            parts = tuple(row.parts[0] for row in rows)
            if len(parts) > 1 and not all(map(is_statement, parts)):
                raise Refused("cases without conditions")
            return parts[0] if len(parts) == 1 else Node("and", parts)
        if all(row.parts[0].kind == "relation" for row in rows):
            raise Refused("a system with conditions")
        return Node("cases", tuple(rows))

    def _separate_conditions(self, end: int) -> None:
        """Puts one & before the condition of each row, and drops the words in front of it."""
        tokens: list[str] = []
        row: list[str] = []
        for token in [*self.tokens[self.position : end], "\\\\"]:
            if token != "\\\\":
                row.append(token)
                continue
            if row[-1:] in ([","], [";"], ["."]):
                row.pop()
            if "&" in row:
                # The row separates its condition itself: only the words are dropped.
                words_after = row.index("&")
                row = row[:words_after] + [
                    item for item in row[words_after:] if item not in _WORDS_OF_CONDITIONS
                ]
            else:
                row = self._with_separator(row)
            tokens += [*row, "\\\\"] if row else []
            row = []
        self.tokens[self.position : end] = tokens

    def _with_separator(self, row: list[str]) -> list[str]:
        for index, token in enumerate(row):
            if token in _WORDS_OF_CONDITIONS or token in _OTHERWISE:
                condition = [item for item in row[index:] if item not in _WORDS_OF_CONDITIONS]
                return [*row[:index], "&", *condition]
        # Without such a word, the last comma before the first relation separates the condition.
        relations = [index for index, token in enumerate(row) if token in ("<", ">", "≤", "≥")]
        if not relations:
            return row
        commas = [index for index, token in enumerate(row[: relations[0]]) if token == ","]
        if not commas:
            return row
        return [*row[: commas[-1]], "&", *row[commas[-1] + 1 :]]

    def _entry(self) -> Node:
        """Reads the formula or the condition of a row, without a comma at its end."""
        if self.next_token in _OTHERWISE:
            while self.next_token[:1] == '"':
                self.position += 1
            self.accept(",", ".", ";")
            return Node("text", name="otherwise")
        following = self.tokens[self.position + 1 : self.position + 2]
        if following and following[0] in _PARITIES:
            name = self._bound_symbol()
            self.position += 1
            return Node("whole", (symbol(name),), name=_PARITIES[following[0]])
        return self.expression(Binding.IMPLICATION)

    # Matrices

    def determinant(self, _: Binding) -> Node:
        rows = self.expression(Binding.CONDITION)
        self.require("\\endvmatrix")
        return Node("determinant", (Node("matrix", (rows,)),))

    # Congruences

    def modulus(self, left: Node) -> Node:
        """Reads (mod 7) after a congruence, or after a residue."""
        modulus = self.expression(Binding.ATOM)
        if left.kind == "list":
            *first, last = left.parts
            return Node("list", (*first, Node("congruence", (last, modulus))))
        return Node("congruence", (left, modulus))

    def residue(self, left: Node) -> Node:
        return Node("modulo", (left, self.expression(Binding.POSTFIX)))

    # Combinations

    def index_before(self, _: Binding) -> Node:
        """Reads {}_{10}C_3 and {}^{10}C_3, combinations, or P for permutations."""
        above = self.expression(Binding.ATOM)
        letter = self.require("C", '"C', "P", '"P')
        self.require("_")
        below = self.expression(Binding.ATOM)
        if letter[-1] == "C":
            return Node("binomial", (above, below))
        difference = Node("add", (above, negative(below)))
        return Node("divide", (Node("factorial", (above,)), Node("factorial", (difference,))))


def with_moduli(tokens: list[str]) -> list[str]:
    r"""Returns the tokens with one spelling for moduli: (mod 7), \pmod 7 and \bmod are two tokens.

    "\pmod" comes before a modulus in a congruence, and "\bmod" is an operation between numbers.
    """
    if not any(token in _MODULO for token in tokens):
        return tokens
    # In a congruence, "mod" belongs to the whole relation; elsewhere it is an operation.
    is_congruence = "≡" in tokens or "\\pmod" in tokens
    result: list[str] = []
    in_brackets = 0
    for index, token in enumerate(tokens):
        following = tokens[index + 1] if index + 1 < len(tokens) else END
        if token == "(" and following in _MODULO:
            in_brackets += 1
            result += ["\\pmod", "{"]
            is_congruence = True
        elif token in _MODULO:
            if result[-1:] != ["{"] or result[-2:-1] != ["\\pmod"]:
                is_in_congruence = is_congruence or token == "\\pmod"
                result.append("\\pmod" if is_in_congruence else "\\bmod")
        elif token == ")" and in_brackets:
            in_brackets -= 1
            result.append("}")
        else:
            result.append(token)
    return result


_MODULO = frozenset(("\\pmod", "\\mod", "\\bmod", "\\pod", '"mod', '"modulo'))


def is_statement(node: Node) -> bool:
    """Returns whether a tree has relations, which make it a statement about its symbols."""
    if node.kind in ("relation", "congruence"):
        return True
    return node.kind in ("and", "or", "list", "not") and any(map(is_statement, node.parts))
