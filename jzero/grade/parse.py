r"""LaTeX or plain text of an answer -> tokens -> a tree of tuples, within limits. Evaluates nothing.

Nodes: (num, Fraction, digits if it has a point) (sym, name) (text, words) (inf,) (add, ...) (mul, ...) (div, a, b)
(neg, a) (pow, a, b) (mixed, a, b) (deg, a) (pm, a, b) (mp, a, b) (sin, x) (log, x, base) and other functions by name,
(unit, a, name) (list, ...) (set, ...) (tuple, brackets, ...) (union, ...) (matrix, (row, ...), ...)
(rel, operators, ...)."""

import re
from fractions import Fraction
from typing import Any, NoReturn

TOKENS, DEPTH, ITEMS, DIGITS, EXPONENT, TOWER = 800, 30, 64, 1200, 1000, 6

Node = Any  # a tuple, hashable; its kind comes first


class Refused(ValueError):
    """Not an answer this grammar knows, or beyond its limits."""


def refuse(why: str) -> NoReturn:
    raise Refused(why)


def spellings(table: str) -> dict[str, str]:
    """The first word for every other one of an entry."""
    return {other: entry.split()[0] for entry in table.replace("\n", " ; ").split(" ; ") for other in entry.split()[1:]}


# Tokens: numbers "1.5" and "0.(6)", letter runs "xy", words '"meters', commands "\frac", single characters

SPELLINGS = spellings(r"""\frac dfrac tfrac cfrac ; \binom dbinom tbinom ; \emptyset varnothing ∅ ; \real R ℝ
\pi π ; \theta θ ; \sqrt √ ; \infty ∞ ; \{ lbrace ; \} rbrace ; * times cdot ast × · ⋅ ; / div ÷ ; - − – ‐ ; ± pm
∓ mp ; ∪ cup ; ∈ in ; : colon {:} ; , {,} ; ≤ le leq leqslant <= ; ≥ ge geq geqslant >= ; < lt ; > gt ; ≠ ne neq !=
≈ approx ; | lvert rvert vert mid \| ; ( langle lparen ⟨ ; ) rangle rparen ⟩ ; % \% percent
^ ** ; ' prime ‘ ’ ; ° circ degree ; \log ln ; \asin arcsin ; \acos arccos ; \atan arctan""")
LISTS = r"""dropped left right displaystyle quad qquad big Big bigl bigr mathbf mathit bm boldsymbol mathsf boxed rm
dropped bf it large Large vec
function sin cos tan cot sec csc sinh cosh tanh exp log ln asin acos atan arcsin arccos arctan
word and or percent percentage pct degree degrees dollar dollars cent cents unit units cm mm km ft inch inches feet foot
word mile miles meter meters kg mg lb lbs oz mph sec hr hour hours min minute minutes second seconds day days or
greek alpha beta gamma delta epsilon varepsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau phi varphi chi
greek psi omega Gamma Delta Theta Lambda Sigma Phi Psi Omega ell angle triangle
hedge or and not if is it are was maybe perhaps but either neither otherwise both no wrong incorrect false answer then
hedge to than mod else possibly also unless when where"""
KIND = {(line.split()[0], name) for line in LISTS.splitlines() for name in line.split()[1:]}
UNITS = spellings("""percent % pct percentage ; foot ft feet ; inch inche in ; centimeter cm ; meter m ; kilometer km
gram g gm ; kilogram kg ; pound lb ; second s sec ; minute min ; hour h hr ; dollar usd ; 2 square sq
3 cubic ; / per""")
NOTHING = spellings("doesnotexist dne undefined does-not-exist")
BARE = {name: SPELLINGS.get(name, "\\" + name) for kind, name in KIND if kind == "function"} | {
    "sqrt": "\\sqrt",
    "pi": "\\pi",
}
LEXER = re.compile(
    r"""(?P<space>[\s~$]+|\\[,!;:>\s()\[\]]|\ban\s+(?=[a-z]{4}))
    |\\(?:text(?:bf|it|rm|normal)?|mbox|(?P<roman>mathrm|operatorname))\s*\{(?P<text>[^{}]*)\}
    |(?P<recurring>[0-9]*\.[0-9]*\\overline\s*\{?[0-9]+\}?)
    |(?P<grouped>[0-9]{1,3}(?:(?:,|\{,\}|\\,|[ ]|,\s*\\!\s*|\\!\s*,\s*|\\[ ])[0-9]{3}(?![0-9]))+(?:\.[0-9]+)?)
    |(?P<number>(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE](?:[0-9]+|[-+][0-9]{2,}))?)
    |(?P<degree>\^\s*\{?\s*\\circ\s*\}?)
    |\\(?P<command>[a-zA-Z]+)
    |(?P<run>[A-Za-z]+)
    |(?P<other>\{[,:]\}|\\\\|\\[{}%&|$]|\*\*|<=|>=|!=|.)""",
    re.VERBOSE | re.DOTALL,
)
WORD = re.compile(r"[A-Za-z]+(?:\.[A-Za-z]+)*\.?|[0-9]+|[^A-Za-z0-9\s~]")
MARKED = re.compile(r"\{,\}|\\[!, ]")  # separators of thousands that cannot be a list's
BRACKETS = (("(", ")"), ("[", "]"), ("\\{", "\\}"))


def lex(match: re.Match[str]) -> list[str]:
    """The tokens of one match."""
    kind, piece, start = match.lastgroup, match[0], match.start()
    if kind == "command":
        name = match["command"]
        return [] if ("dropped", name) in KIND else [SPELLINGS.get(name, "\\" + name)]
    if kind == "run":
        apart = not start or match.string[start - 1] in " \n$"
        word = ("word", piece) in KIND or (apart and len(piece) > 3) or (piece.isupper() and len(piece) > 2)
        return [BARE[piece]] if piece in BARE else ['"' + piece] if word else list(piece)
    if kind == "grouped":
        whole, point, decimals = piece.partition(".")
        before = match.string[:start]
        inside = any(before.count(opening) > before.count(closing) for opening, closing in BRACKETS)
        if inside and not MARKED.search(piece):  # (1,200) is a pair
            return WORD.findall(piece)
        return [re.sub(r"[^0-9]", "", whole) + point + decimals]
    if kind == "recurring":
        fixed, _, repeated = piece.partition("\\overline")
        return [f"{fixed}({repeated.strip('{} ')})"]
    if kind == "text":
        inside = match["text"]
        if inside in ("e", "i") or (match["roman"] and inside in BARE):
            return [BARE.get(inside, inside)]
        return ['"' + word.replace(".", "") if word[0].isalpha() else word for word in WORD.findall(inside)]
    return {"space": [], "degree": ["°"]}.get(kind or "", [SPELLINGS.get(piece, piece)])


def tokens(text: str) -> list[str]:
    if "\\\\" in text and "\\begin" not in text:
        text = text.replace("\\\\", "\\")  # escaped twice
    found = [token for match in LEXER.finditer(text) for token in lex(match)]
    while found and found[-1] in (".", "\\", ",", ";"):
        found.pop()
    return found


def number(token: str) -> Node:
    mantissa, _, exponent = token.lower().partition("e")
    if len(token) > DIGITS or (exponent and abs(int(exponent)) > EXPONENT):
        refuse("too many digits")
    fixed, _, repeated = mantissa.rstrip(")").partition("(")
    whole, _, decimals = fixed.partition(".")
    value = Fraction(int(whole + decimals or "0"), 10 ** len(decimals))
    if repeated:
        value += Fraction(int(repeated), (10 ** len(repeated) - 1) * 10 ** len(decimals))
    digits = len((whole + decimals).lstrip("0")) if decimals and not repeated else 0
    return ("num", value * Fraction(10) ** int(exponent) if exponent else value, digits)


# The grammar

RELATIONS = "=<>≤≥≠≈∈"
SEPARATORS = (",", ";", '"and', '"or')
CLOSERS = {"(": ")]", "[": "])", "{": "}", "|": "|"}
CLOSERS |= {"\\{": ("\\}",), "\\lfloor": ("\\rfloor",), "\\lceil": ("\\rceil",)}
STOPS = {*SEPARATORS, *RELATIONS, *")]}|&:", "\\}", "\\\\", "\\end", "\\rfloor", "\\rceil", "\\over", "\\choose", ""}
ENDS = {*STOPS, *"+-±∓*/∪^!_'°%?#@", "\\$"}  # no factor starts so
MATRICES = ("pmatrix", "bmatrix", "matrix", "array")
BARS = {"|": "abs", "\\lfloor": "floor", "\\lceil": "ceil"}
REAL = ("tuple", "()", ("neg", ("inf",)), ("inf",))


def several(kind: str, parts: list[Node]) -> Node:
    return (kind, *parts) if len(parts) > 1 else parts[0]


class Parser:
    """Recursive descent; `at` moves over `tokens`, which ends in "". Letter runs are split as they are read."""

    def __init__(self, found: list[str]):
        self.tokens = [*found, ""] if len(found) <= TOKENS else refuse("too many tokens")
        self.at = self.depth = self.bars = 0

    def accept(self, *wanted: str) -> str:
        token = self.tokens[self.at]
        self.at += token in wanted
        return token if token in wanted else ""

    def chain(self, part: Any, *operators: str) -> list[Node]:
        parts = [part()]
        while self.accept(*operators):
            parts.append(part())
        return parts if len(parts) <= ITEMS else refuse("too many items")

    def items(self) -> list[Node]:
        return self.chain(self.relation, *SEPARATORS) if self.tokens[self.at] not in SEPARATORS else refuse("no first")

    def relation(self) -> Node:
        while self.accept(*SEPARATORS, "=", "≈"):
            pass
        operands, operators = [self.operand()], ""
        while operator := self.accept(*RELATIONS):
            operators += operator
            operands.append(self.operand())
        if operators in ("", "∈"):
            return operands[-1]
        return ("rel", operators, *operands) if len(operators) < 8 else refuse("a long chain")

    def operand(self) -> Node:
        """Words alone, or a ratio of unions of sums and what decorates it."""
        end = self.at
        while self.tokens[end] not in STOPS and (self.tokens[end][0] == '"' or self.tokens[end].isalpha()):
            end += 1
        found = self.tokens[self.at : end]
        if self.tokens[end] in STOPS and any(len(word) > 2 and word[0] == '"' for word in found):
            self.at = end
            words = [word.lstrip('"').lower() for word in found]
            text = "".join(word for word in words if word not in ("a", "an", "the"))
            return REAL if text == "allrealnumbers" else ("text", NOTHING.get(text, text))
        sign = self.at + (self.tokens[self.at] == "-")
        dollars = "dollar" if self.tokens[sign] == "\\$" and self.tokens.pop(sign) else ""
        first, *others = self.chain(lambda: several("union", self.chain(self.sum, "∪")), ":")
        if others:  # as a fraction, or as the shares of the first
            first = (
                ("tuple", ":", *[("div", other, first) for other in others]) if others[1:] else ("div", first, *others)
            )
        unit = self.unit() or dollars
        return ("unit", first, unit) if unit else first

    def unit(self) -> str:
        """Words after a value and, once there are some, / and powers, in one spelling: "foot 2"."""
        found: list[str] = []
        while (token := self.tokens[self.at]) and token not in SEPARATORS:
            word = token[0] == '"' or (token == "%" and not found)
            if not word and (found in ([], ["percent"]) or not (token in "^/{}" or token.isdigit())):
                break
            name = token.lstrip('"').lower()
            if ("hedge", name) in KIND or len(found) > 5:
                refuse("prose")
            name = name.removesuffix("s") if len(name) > 2 else name
            found += [] if name in "^{}" else [UNITS.get(name, name)]
            self.at += 1
        return " ".join(sorted(found, key=str.isdigit))

    def signs(self) -> bool:
        negative = False
        while sign := self.accept("-", "+"):
            negative ^= sign == "-"
        return negative

    def sum(self) -> Node:
        terms: list[Node] = [] if self.tokens[self.at] in ("±", "∓") else [self.term()]
        while operator := self.accept("+", "-", "±", "∓"):
            term = self.term()
            if operator in "±∓":
                terms = [("pm" if operator == "±" else "mp", several("add", terms or [number("0")]), term)]
            else:
                terms.append(("neg", term) if operator == "-" else term)
        return several("add", terms)

    def term(self) -> Node:
        """A signed product of factors; a / b * c is (a * c) / b."""
        negative = self.signs()
        above: list[Node] = [self.power()]
        below: list[Node] = []
        while True:
            token = self.tokens[self.at]
            if operator := self.accept("*", "/"):
                factor = ("neg", self.power()) if self.signs() else self.power()
                (below if operator == "/" else above).append(factor)
            elif token in ENDS - {"|"} or token[0] == '"' or (token == "|" and self.bars):
                break
            elif token[0] in "0123456789." or token == "\\frac":
                self.fraction(above, token)
            else:
                above.append(self.power())
        node = several("mul", above)
        node = ("div", node, several("mul", below)) if below else node
        return ("neg", node) if negative else node

    def fraction(self, above: list[Node], token: str) -> None:
        """An integer right before a proper fraction makes a mixed number; numbers side by side mean nothing."""
        before = self.tokens[self.at - 1]
        whole = before.isdigit() and len(above) == 1 and above[0][0] == "num"
        node = self.power()
        if whole and node[0] == "num" and self.accept("/"):
            node = ("div", node, self.power())
        integers = node[0] == "div" and all(part[0] == "num" and not part[2] for part in node[1:])
        if whole and integers and node[1][1] < node[2][1]:
            above[0] = ("mixed", above[0], node)
        elif token == "\\frac" or before == ")" or (node[0] == "pow" and before[0] not in "0123456789."):
            above.append(node)
        else:
            refuse("two numbers")

    def power(self) -> Node:
        node, last = self.atom(), ""
        for _ in range(TOWER):
            operator = self.accept(*POSTFIX)
            if not operator:
                return node
            node = POSTFIX[operator](self, node) if operator != last else refuse("a tower")
            last = operator
        refuse("a tower")

    def argument(self, digit: bool = False) -> Node:
        r"""Of ^ or a command: a group, a signed atom or, after \frac, one digit."""
        negative, token = self.accept("-"), self.tokens[self.at]
        if digit and token.isdigit() and len(token) > 1:
            self.tokens[self.at] = token[1:]
            return number(token[0])
        return ("neg", self.atom()) if negative else self.atom()

    def atom(self) -> Node:
        token = self.tokens[self.at]
        if not token or not token.isascii() or self.depth > DEPTH:
            refuse(f"{token!r} is too deep, or not known")
        self.at += 1
        self.depth += 1
        if token[0] in "0123456789.":
            node = number(token)
            if self.accept("_"):
                base = self.raw().rstrip(".")
                node = ("unit", node, "_" + base) if base.isdigit() else refuse("a base")
        elif token[0] == '"' or token.isalpha() or ("greek", token[1:]) in KIND:
            node = self.symbol(token)
        elif token in CLOSERS:
            node = self.group(token)
        elif ("function", token[1:]) in KIND:
            node = self.function(token[1:])
        else:
            node = SPECIAL[token](self) if token in SPECIAL else refuse(token)
        self.depth -= 1
        return node

    def symbol(self, token: str) -> Node:
        if token[0] == '"':
            token = token[1:] if len(token) == 2 else refuse("a word in a formula")
        return ("sym", f"{token}_{self.raw()}" if self.accept("_") else token)

    def raw(self) -> str:
        """The text of a subscript or of an environment's name."""
        end = self.at + 1
        if self.tokens[self.at] == "{":
            end = self.tokens.index("}", self.at) + 1 if "}" in self.tokens[self.at :] else refuse("an open brace")
        found = "".join(self.tokens[self.at : end]).strip("{}").replace('"', "") or refuse("an empty subscript")
        self.at = end
        return found

    def group(self, opening: str) -> Node:
        if opening == "\\{" and self.accept("\\}"):
            return ("set",)
        bars, self.bars = self.bars, opening == "|"
        found = self.items()
        self.bars = bars
        if opening == "{" and (operator := self.accept("\\over", "\\choose")):
            kind = "div" if operator == "\\over" else "binom"
            found = [(kind, found[0], self.sum())]
        end = self.accept(*CLOSERS[opening]) or refuse("no end of a group")
        if opening in BARS:
            return (BARS[opening], found[0]) if len(found) == 1 else refuse("a list inside bars")
        if len(found) == 1 and (opening == "{" or opening + end == "()" or found[0][0] == "matrix"):
            return found[0]
        return ("set", *found) if opening in ("{", "\\{") else ("tuple", opening + end, *found)

    def function(self, name: str) -> Node:
        """sin x, sin^2 x, sin^{-1} x, log_b x; without brackets the argument is the product that follows."""
        base = (self.argument(),) if name == "log" and self.accept("_") else ()
        exponent = self.argument() if self.accept("^") else None
        if exponent == ("neg", number("1")) and name in ("sin", "cos", "tan"):
            name, exponent = "a" + name, None
        bracketed = self.tokens[self.at] in ("(", "{")
        factors = [self.atom() if bracketed else self.power()]
        while not bracketed and (token := self.tokens[self.at]) not in ENDS | {"("} and token[0] != '"':
            if ("function", token[1:]) in KIND:
                break
            factors.append(self.power())
        node = (name, several("mul", factors), *base)
        return ("pow", node, exponent) if exponent else node

    def root(self) -> Node:
        degree = self.sum() if self.accept("[") and self.tokens else number("2")
        self.accept("]")
        return ("root", self.argument(), degree)

    def matrix(self) -> Node:
        name = self.raw()
        if name == "array":
            self.raw()  # how its columns are set
        rows = [("row", *self.chain(self.sum, "&"))] if name in MATRICES else refuse("an environment")
        while self.accept("\\\\") and self.tokens[self.at] != "\\end":
            rows.append(("row", *self.chain(self.sum, "&")))
        return ("matrix", *rows) if self.accept("\\end") and self.raw() == name else refuse("a matrix")


SPECIAL = {
    "\\pi": lambda p: ("sym", "π"),
    "\\infty": lambda p: ("inf",),
    "\\emptyset": lambda p: ("set",),
    "\\real": lambda p: REAL,
    "\\frac": lambda p: ("div", p.argument(digit=True), p.argument(digit=True)),
    "\\binom": lambda p: ("binom", p.argument(digit=True), p.argument(digit=True)),
    "\\mathbb": lambda p: REAL if p.raw() == "R" else refuse("a number set"),
    "\\sqrt": Parser.root,
    "\\begin": Parser.matrix,
}


POSTFIX = {
    "^": lambda p, node: ("pow", node, p.argument()),
    "!": lambda p, node: ("factorial", node),
    "°": lambda p, node: ("deg", node),
    "'": lambda p, node: ("sym", node[1] + "'") if node[0] == "sym" else refuse("a prime"),
}


def parse(found: list[str]) -> Node:
    parser = Parser(found)
    items = parser.items()
    return several("list", items) if not parser.tokens[parser.at] else refuse("something is left over")
