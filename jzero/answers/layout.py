r"""Removes the layout from the LaTeX of an answer, by the arities of TeX.

LaTeX has hundreds of commands that only control the appearance of text. `simplified` returns the
text without them:

- commands that vanish, such as \displaystyle, \large and \limits; spaces become one space;
- commands that keep an argument, such as \underline{12} and \textcolor{red}{12};
- commands that drop all arguments, such as \phantom{0} and \hspace{1em};
- environments that only arrange their rows, such as aligned, and arrays of one cell;
- other spellings: {1\over2} becomes \frac{1}{2}, and \left. becomes empty.

A command that is in no table stays in the text. If its name has the form of a layout command, such
as \medskip and \mathnormal, it is treated as layout. The parser refuses any other command, so that
no answer is credited because a command was dropped.

The text is cut into pieces once, brackets are paired once, and every piece is rendered once.
"""

import re

from jzero.answers.vocabulary import words

MAX_DEPTH = 60  # nested groups; deeper text is returned unchanged, and does not parse

# A command, a control symbol, a special character, spaces, or other text. A lone backslash is
# last, because it matches only at the end of the text.
_PIECE = re.compile(r"\\[A-Za-z]+|\\.|[{}&^_$~]|\s+|[^\\{}&^_$~\s]+|\\", re.DOTALL)

# Commands that vanish.
_NOTHING = words(
    """displaystyle textstyle scriptstyle scriptscriptstyle limits nolimits displaylimits
    tiny scriptsize footnotesize small normalsize large Large LARGE huge Huge
    rm bf it sf tt sc sl em cal mit bfseries itshape rmfamily sffamily ttfamily upshape mdseries
    normalfont normalcolor boldmath unboldmath centering raggedright noindent indent par
    big Big bigg Bigg bigl bigr biggl biggr Bigl Bigr Biggl Biggr bigm Bigm biggm Biggm
    nonumber notag hline toprule midrule bottomrule strut mathstrut null relax protect
    nobreak allowbreak linebreak nolinebreak newline hfill hfil vfill hss
    qed blacksquare qedhere checkmark leavevmode ignorespaces unskip begingroup endgroup selectfont
    middle mathsurround"""
)
# Commands for a space. A wide space separates numbers, and a thin one may group their digits.
_THIN_SPACES = words(
    """thinspace medspace thickspace enspace negthinspace negmedspace negthickspace space
    nobreakspace"""
)
_WIDE_SPACES = words("quad qquad enskip")
_SPACE_CHARACTERS = frozenset(",;:>! \n\t/@-")

# The arguments of a command: "k" keeps one, "d" drops one, and "o" drops an optional one in square
# brackets.
_ARGUMENTS = {
    **dict.fromkeys(
        words(
            """underline uline underbar boxed fbox ensuremath mathord mathop mathbin mathrel
            mathopen mathclose mathpunct mathinner mathrlap mathllap mathclap rlap llap clap
            mathstrut smash mathsmaller mathlarger textnormal num displaylines substack
            mathit mathsf mathtt mathnormal bm boldsymbol pmb mathbold bold symbf symit symup
            symrm overrightarrow overleftarrow vec mathbf vv hl"""
        ),
        "k",
    ),
    **dict.fromkeys(
        words(
            """phantom hphantom vphantom hspace vspace label tag ref eqref footnote mspace
            pagestyle thispagestyle require index cline"""
        ),
        "d",
    ),
    **dict.fromkeys(words("color pagecolor cite"), "od"),
    **dict.fromkeys(words("textcolor mathcolor colorbox"), "odk"),
    **dict.fromkeys(words("href class cssId style"), "dk"),
    **dict.fromkeys(words("makebox framebox Aboxed smashoperator"), "ook"),
    "fcolorbox": "oddk",
    "rule": "odd",
    "parbox": "odk",
    "raisebox": "dook",
    "scalebox": "dok",
    "resizebox": "ddk",
    "rotatebox": "odk",
    "bbox": "ok",
    "setlength": "dd",
}
_STARRED = words("hspace vspace tag operatorname resizebox")
# Commands followed by a length without braces: \hskip 1em, \kern-2pt.
_WITH_LENGTH = words("hskip vskip kern mkern mskip")
_LENGTH = re.compile(
    r"\s*=?\s*-?\s*[0-9]*\.?[0-9]*\s*(?:true)?(?:pt|em|ex|cm|mm|in|mu|bp|pc|dd|sp|cc)"
    r"(?:\s*plus\s*[0-9.]+\s*[a-z]+)?"
)
_PLACEMENT = re.compile(r"\s*\[[tbchpmlr]+\]")
_LENGTH_AFTER_ROW = re.compile(r"\s*\[\s*-?[0-9.]+\s*[a-z]{2}\s*\]")

# Commands with words as their argument.
_TEXT = words(
    """text textbf textit textrm textnormal textsf texttt textup textsc textmd textsl textsuperior
    mbox hbox emph mathrm rmtext intertext shortintertext operatorname operatornamewithlimits"""
)
_WORDS_IN_STYLE = words("mathbf mathit mathsf mathtt boldsymbol bm pmb")

_MARKS_OF_VECTORS = words("vec mathbf bm boldsymbol pmb vv overrightarrow")
_VECTOR = re.compile(r"\s*(?:[A-Za-z]|\\[a-z]+|[A-Z]{2})\s*")
_SEGMENT = re.compile(r"\s*[A-Z]{2}\s*")  # from A to B
_SIGNS_OF_PRODUCTS = ("\\times", "\\cdot", "\\nabla", "×", "·", "⋅")

# Spellings of commands.
_SPELLINGS = {
    **dict.fromkeys(words("nicefrac sfrac flatfrac xfrac ffrac"), "\\frac"),
    **dict.fromkeys(words("Bbb mathds mathbbm"), "\\mathbb"),
    **dict.fromkeys(words("dots cdots dotsc dotsb dotsm dotsi hdots textellipsis"), "\\ldots"),
    "reals": r"\mathbb{R}",
    "R": r"\mathbb{R}",
    "N": r"\mathbb{N}",
    "Z": r"\mathbb{Z}",
    "Q": r"\mathbb{Q}",
    "C": r"\mathbb{C}",
    "natnums": r"\mathbb{N}",
    "cnums": r"\mathbb{C}",
    "Complex": r"\mathbb{C}",
    "textdegree": "°",
    "degree": "°",
    "celsius": "°\\text{C}",
    "textdollar": "\\$",
    "dollar": "\\$",
    "textpercent": "\\%",
    "textbar": "|",
    "slash": "/",
    "lbrack": "[",
    "rbrack": "]",
    "textminus": "-",
    "textquotesingle": "'",
    "textonehalf": r"\frac{1}{2}",
    "textonequarter": r"\frac{1}{4}",
    "textthreequarters": r"\frac{3}{4}",
    **dict.fromkeys(words("measuredangle sphericalangle"), "\\angle"),
    "surd": "\\sqrt",
    "cr": "\\\\",
    "tabularnewline": "\\\\",
    "implies": "\\Rightarrow",
    "Longrightarrow": "\\Rightarrow",
    "iff": "\\Leftrightarrow",
    "rightarrow": "\\to",
    "longrightarrow": "\\to",
}
# Commands that put their only argument between two brackets.
_WRAPPED = {
    "abs": ("|", "|"),
    "floor": (r"\lfloor ", r"\rfloor "),
    "ceil": (r"\lceil ", r"\rceil "),
    "set": (r"\{", r"\}"),
    "paren": ("(", ")"),
    "ang": ("{", "}°"),
    "textsuperscript": ("^{", "}"),
    "textsubscript": ("_{", "}"),
}
# Environments that only arrange formulas in rows. The value is the signature of the arguments after
# their name.
_ARRANGING = {
    **dict.fromkeys(
        words(
            """aligned align gather gathered equation split multline multlined eqnarray displaymath
            math flalign center flushleft flushright subequations document"""
        ),
        "o",
    ),
    **dict.fromkeys(words("alignat alignedat xalignat"), "d"),
}
_MATRICES = {
    **dict.fromkeys(
        words("matrix pmatrix bmatrix Bmatrix smallmatrix psmallmatrix bsmallmatrix"), ""
    ),
    **dict.fromkeys(words("array tabular"), "od"),
}
_DETERMINANTS = words("vmatrix vsmallmatrix")
_BARS = ("|", "\\vert", "\\lvert")
_CASES = words("cases dcases rcases drcases numcases")

# Forms of names that mark a command in no table as layout.
_LIKE_LAYOUT = re.compile("[a-z]*(?:skip|break|size|style|penalty|space)")
_LIKE_KEPT = re.compile("(?:math|sym)(?:bf|it|sf|tt|rm|up|normal|sfit|bfit|bfup)[a-z]*")
_LIKE_TEXT = re.compile("text[a-z]{2}")
_OPERATORS_OF_RELATION = ("=", "<", ">", "\\le", "\\ge", "\\ne", "\\approx", "\\Rightarrow")
# At least two words, one word of four letters, or a choice such as (A). Fewer letters are
# symbols: \mathbf{AB} is a product, and \mathbf{v} a vector.
_WORDS = re.compile(
    r"\s*[A-Za-z]+(?:[\s,.'-]+[A-Za-z]+)+[\s.]*|\s*[A-Za-z]{4,}[\s.]*|\s*\(?[A-Z]\)\s*"
)
_ROW_OR_ENVIRONMENT = re.compile(r"\\begin|\\end(?![a-z])|\\\\|(?<!\\)&|(?<=\\\\)&")
_QUOTED = re.compile(r'"([^"]*)"')

# A text without any of these has no layout. A text in which all matches of _COMMAND are among
# _PLAIN_COMMANDS has none either.
_HAS_LAYOUT = re.compile(r'[\\$~"]|\{\s*\}')
_COMMAND = re.compile(r'\\[A-Za-z]+|\\.|[$~"]|\{\s*\}', re.DOTALL)
_PLAIN_COMMANDS = {
    *(
        f"\\{name}"
        for name in words("frac dfrac tfrac sqrt pi cdot times infty cup cap pm sin cos tan")
    ),
    *(f"\\{name}" for name in words("log ln circ le ge leq geq theta alpha beta")),
    *([r"\{", r"\}", r"\%", r"\$"]),
}


# A square after an answer marks the end of a proof.
_END_OF_PROOF = re.compile(r"(?<=[0-9A-Za-z})\]])\s+\\(?:square|Box)\s*\Z")


def simplified(text: str) -> str:
    """Returns the text of an answer without its layout."""
    if not _HAS_LAYOUT.search(text) or set(_COMMAND.findall(text)) <= _PLAIN_COMMANDS:
        return text
    if '"' in text:
        text = _QUOTED.sub(r" \1 ", text)
    return _Layout(text).render_all()


class _TooDeep(Exception):
    """Nested groups exceed MAX_DEPTH."""


class _Layout:
    """Renders the pieces of a text. Positions are indices of pieces."""

    def __init__(self, text: str) -> None:
        self.text = text
        # Marks of vectors only matter where vectors are multiplied.
        self.has_products = any(sign in text for sign in _SIGNS_OF_PRODUCTS)
        self.pieces: list[str] = _PIECE.findall(text)
        self.closing = _closing_positions(self.pieces)

    def render_all(self) -> str:
        try:
            text = self.rows(0, len(self.pieces), 0)
            return _END_OF_PROOF.sub("", text) if "\\square" in text or "\\Box" in text else text
        except _TooDeep:
            return self.text

    def render(self, start: int, end: int, depth: int) -> str:
        """Returns the pieces from `start` to `end` without layout."""
        if depth > MAX_DEPTH:
            raise _TooDeep
        rendered: list[str] = []
        position = start
        while position < end:
            piece = self.pieces[position]
            if piece[:1] != "\\" or len(piece) == 1:
                position = self.character(piece, position, depth, rendered)
            elif piece[1].isalpha():
                position = self.command(piece[1:], position + 1, end, depth, rendered)
            else:
                position = self.control_symbol(piece, position + 1, rendered)
        return _with_fractions(rendered)

    def character(self, piece: str, position: int, depth: int, rendered: list[str]) -> int:
        if piece == "{" and position in self.closing:
            end = self.closing[position]
            first = self.after_spaces(position + 1, end)
            if self.pieces[first] in ("\\rm", "\\rmfamily"):  # {\rm cm} is \text{cm}
                self.words_inside(first + 1, end, depth + 1, rendered)
                return end + 1
            rendered.append(_group(self.render(position + 1, end, depth + 1)))
            return end + 1
        if piece in ("$", "~"):
            piece = " "
        rendered.append(piece)
        return position + 1

    def control_symbol(self, piece: str, position: int, rendered: list[str]) -> int:
        if len(piece) == 1:  # a backslash at the end of the text
            rendered.append(piece)
        elif piece == "\\\\":
            # The space after a row, as in \\[2pt].
            position = self.skip(_LENGTH_AFTER_ROW, position)
            rendered.append(piece)
        elif piece == "\\!" and self.is_beside_comma(position, rendered):
            position = self.after_spaces(position, len(self.pieces))
        elif piece[1] in _SPACE_CHARACTERS or piece[1] in "()[]":
            rendered.append(" ")
        # "\#3" reads "number 3".
        elif piece == "\\#":
            rendered.append(r"\text{number }")
        else:
            rendered.append(piece)
        return position

    def is_beside_comma(self, position: int, rendered: list[str]) -> bool:
        r"""Returns whether \! only moves a thousands separator: 1,\!000 or 1\!,000."""
        following = self.pieces[position] if position < len(self.pieces) else ""
        return "".join(rendered[-2:]).rstrip().endswith(",") or following.startswith(",")

    def command(self, name: str, position: int, end: int, depth: int, rendered: list[str]) -> int:
        """Renders one command, and returns the position after it and its arguments."""
        # Pieces are shortened in place once a part of them is read, here by the star.
        if name in _STARRED and position < end and self.pieces[position].startswith("*"):
            self.pieces[position] = self.pieces[position][1:]
        if name in ("left", "right"):
            return self.bracket(name, position, end, depth, rendered)
        if name == "begin":
            return self.environment(position, depth, rendered)
        if name == "not":
            return self.negated(position, end, rendered)
        # Plain TeX: \root 3 \of x.
        if name == "root":
            degree, position = self.argument(position, end, depth)
            position = self.after_spaces(position, end)
            if self.pieces[position : position + 1] == ["\\of"]:
                rendered.append(rf"\sqrt[{degree.strip()}]")
                return position + 1
            rendered.append(rf"\root{{{degree}}}")
            return position
        if name in ("overset", "stackrel", "underset"):
            above, position = self.argument(position, end, depth)
            rendered.append(rf"\{name}{{{above}}}" if above.strip() else "")
            return position
        if name in _MATRICES or name == "cases":  # plain TeX: \pmatrix{1&2\cr3&4}
            start = self.after_spaces(position, end)
            if self.pieces[start : start + 1] == ["{"] and start in self.closing:
                closing = self.closing[start]
                rendered.append(self.table(name, start + 1, closing, depth))
                return closing + 1
        # The label of a brace is an explanation, and not part of the value.
        if name in ("underbrace", "overbrace"):
            text, position = self.argument(position, end, depth)
            rendered.append(_group(text))
            return self.skip_script(position, end, depth)
        if name in _TEXT or _LIKE_TEXT.fullmatch(name):
            return self.words(position, end, depth, rendered)
        if name in _NOTHING:
            rendered.append(" ")
            return position
        if name in _THIN_SPACES or name in _WIDE_SPACES:
            rendered.append(" " if name in _THIN_SPACES else "\n")
            return position
        if name in _WITH_LENGTH:
            rendered.append("\n")
            return self.skip(_LENGTH, position)
        if name in _WRAPPED:
            opening, closing = _WRAPPED[name]
            text, position = self.argument(position, end, depth)
            rendered.append(f"{opening}{text}{closing}")
            return position
        if name in _ARGUMENTS:
            return self.arguments(name, _ARGUMENTS[name], position, end, depth, rendered)
        # Commands in no table, recognized as layout by the form of their names.
        if _LIKE_KEPT.fullmatch(name):
            return self.arguments(name, "k", position, end, depth, rendered)
        if _LIKE_LAYOUT.fullmatch(name):
            rendered.append("\n")
            return position
        rendered.append(_spelled(name, self.pieces[position] if position < end else ""))
        return position

    def arguments(
        self,
        name: str,
        signature: str,
        position: int,
        end: int,
        depth: int,
        rendered: list[str],
    ) -> int:
        """Keeps and drops the arguments of a command according to its signature."""
        content = ""
        in_braces = True
        for kind in signature:
            if kind == "o":
                position = self.skip_optional(position, end)
                continue
            start = self.after_spaces(position, end)
            in_braces = self.pieces[start : start + 1] == ["{"]
            text, position = self.argument(position, end, depth)
            content += text if kind == "k" else ""
        # \mathbf{Tuesday} is a word, and \mathbf{x} a symbol.
        if name in _WORDS_IN_STYLE and _WORDS.fullmatch(content):
            rendered.append(rf"\text{{{content}}}")
        elif name in _MARKS_OF_VECTORS and (
            (self.has_products and _VECTOR.fullmatch(content)) or _SEGMENT.fullmatch(content)
        ):
            rendered.append(rf"\vec{{{content.strip()}}}")
        elif "k" in signature:
            rendered.append(_group(content) if in_braces else content)
        else:
            rendered.append("\n")
        return position

    def argument(self, position: int, end: int, depth: int) -> tuple[str, int]:
        """Returns one argument: a group, a command, or one character."""
        position = self.after_spaces(position, end)
        if position >= end:
            return "", position
        piece = self.pieces[position]
        if piece == "{" and position in self.closing:
            closing = self.closing[position]
            return self.rows(position + 1, closing, depth + 1), closing + 1
        if piece[0] == "\\":
            rendered: list[str] = []
            if depth > MAX_DEPTH:
                raise _TooDeep
            if piece[1:2].isalpha():
                position = self.command(piece[1:], position + 1, end, depth + 1, rendered)
            else:
                position = self.control_symbol(piece, position + 1, rendered)
            return "".join(rendered), position
        self.pieces[position] = piece[1:]
        # The argument is one character: \frac12 has the arguments 1 and 2.
        return piece[0], position if len(piece) > 1 else position + 1

    def after_spaces(self, position: int, end: int) -> int:
        while position < end and not self.pieces[position].strip():
            position += 1
        return position

    def skip(self, pattern: re.Pattern[str], position: int) -> int:
        """Drops the match of a pattern at the next few pieces, which have no braces."""
        # The longest length, " 1em plus 2pt", has six pieces. A longer window would make a text
        # of many commands quadratic.
        last = min(position + 6, len(self.pieces))
        following = "".join(self.pieces[position:last])
        match = pattern.match(following)
        if match is None:
            return position
        length = match.end()
        while length >= len(self.pieces[position]):
            length -= len(self.pieces[position])
            position += 1
            if not length:
                return position
        # A match that ends inside of a piece shortens the piece.
        self.pieces[position] = self.pieces[position][length:]
        return position

    def skip_optional(self, position: int, end: int) -> int:
        """Drops an argument in square brackets, if it exists."""
        start = self.after_spaces(position, end)
        if start >= end or not self.pieces[start].startswith("["):
            return position
        # The bound keeps the time linear if many brackets stay open.
        for index in range(start, min(start + 20, end)):
            _, bracket, remainder = self.pieces[index].partition("]")
            if bracket:
                self.pieces[index] = remainder
                return index
        return position

    def skip_script(self, position: int, end: int, depth: int) -> int:
        """Drops the label of a brace, which is a subscript or superscript."""
        start = self.after_spaces(position, end)
        if start < end and self.pieces[start] in ("_", "^"):
            return self.argument(start + 1, end, depth)[1]
        return position

    def negated(self, position: int, end: int, rendered: list[str]) -> int:
        position = self.after_spaces(position, end)
        piece = self.pieces[position] if position < end else ""
        if piece.startswith("="):
            self.pieces[position] = piece[1:]
            rendered.append("\\ne ")
            return position
        if piece == "\\in":
            rendered.append("\\notin ")
            return position + 1
        rendered.append("\\not ")
        return position

    def bracket(self, name: str, position: int, end: int, depth: int, rendered: list[str]) -> int:
        r"""Renders \left( ... \right), which \over treats as a group."""
        closing_position = self.closing.get(position - 1)
        opening, position = self.delimiter(position, end)
        if name == "right" or closing_position is None or closing_position > end:
            rendered.append(opening)
            return position
        inside = self.render(position, closing_position, depth + 1)
        closing, position = self.delimiter(closing_position + 1, end)
        # A left brace without a right one opens a system of cases.
        is_system = opening.strip() == "\\{" and not closing and r"\begin{pmatrix}" in inside
        if is_system:
            rendered.append(inside.replace("{pmatrix}", "{cases}"))
        elif opening.strip() in _BARS and inside.strip().startswith(r"\begin{pmatrix}"):
            rendered.append(inside.replace("{pmatrix}", "{vmatrix}"))
        else:
            rendered.append(f"{opening}{inside}{closing}")
        return position

    def delimiter(self, position: int, end: int) -> tuple[str, int]:
        r"""Returns the bracket after \left or \right; a dot means no bracket."""
        position = self.after_spaces(position, end)
        if position >= end:
            return "", position
        piece = self.pieces[position]
        if piece[0] == "\\":
            return f"{piece} " if piece[1:2].isalpha() else piece, position + 1
        self.pieces[position] = piece[1:]
        bracket = "" if piece[0] == "." else piece[0]
        return bracket, position

    def words(self, position: int, end: int, depth: int, rendered: list[str]) -> int:
        r"""Renders the argument of \text. Formulas inside of it are moved outside."""
        position = self.after_spaces(position, end)
        if position >= end or self.pieces[position] != "{" or position not in self.closing:
            text, position = self.argument(position, end, depth)
            rendered.append(rf"\text{{{text}}}")
            return position
        closing = self.closing[position]
        self.words_inside(position + 1, closing, depth + 1, rendered)
        return closing + 1

    def words_inside(self, start: int, end: int, depth: int, rendered: list[str]) -> None:
        if depth > MAX_DEPTH:
            raise _TooDeep
        text: list[str] = []
        position = start
        while position < end:
            piece = self.pieces[position]
            following = self.pieces[position + 1] if position + 1 < end else ""
            name = piece[1:]
            if piece == "{" and position in self.closing:
                closing = self.closing[position]
                _flush(text, rendered)
                self.words_inside(position + 1, closing, depth + 1, rendered)
                position = closing + 1
            # A formula inside of the text: the words before it are complete.
            elif piece in ("^", "_") or (name[:1].isalpha() and piece[:1] == "\\"):
                _flush(text, rendered)
                if piece in ("^", "_"):
                    argument, position = self.argument(position + 1, end, depth)
                    rendered.append(f"{piece}{{{argument}}}")
                else:
                    position = self.command(name, position + 1, end, depth, rendered)
                    # The groups after a command such as \frac are its arguments and not words.
                    while following == "{" and position < end and self.pieces[position] == "{":
                        position = self.character("{", position, depth, rendered)
            elif piece[:1] == "\\" and name[:1] in _SPACE_CHARACTERS | set("()[]#"):
                text.append("number " if name == "#" else " ")
                position += 1
            else:
                text.append(" " if piece in ("$", "~") else piece)
                position += 1
        _flush(text, rendered)

    def environment(self, position: int, depth: int, rendered: list[str]) -> int:
        r"""Renders \begin{name} ... \end{name}."""
        end = self.closing.get(position - 1)
        name_pieces = self.pieces[position : position + 3]
        if end is None or len(name_pieces) < 3 or name_pieces[0] != "{" or name_pieces[2] != "}":
            rendered.append("\\begin")
            return position
        name = name_pieces[1].rstrip("*")
        # Skips {name} after \end.
        has_name = self.pieces[end + 1 : end + 2] == ["{"]
        next_position = end + 4 if has_name else end + 1
        start = position + 3
        # The arguments after the name: the placement [t], or the columns {lcr} of an array.
        signature = {**_ARRANGING, **_MATRICES}.get(name, "")
        for kind in signature:
            if kind == "o":
                start = self.skip(_PLACEMENT, start)
            elif kind == "d":
                _, start = self.argument(start, end, depth)
        if name in _ARRANGING:
            rendered.append(f" {self.rows(start, end, depth + 1, is_aligned=True)} ")
        elif name in _MATRICES or name in _DETERMINANTS or name in _CASES:
            rendered.append(self.table(name, start, end, depth))
        else:
            inside = self.render(start, end, depth + 1)
            rendered.append(rf"\begin{{{name}}}{inside}\end{{{name}}}")
        return next_position

    def table(self, name: str, start: int, end: int, depth: int) -> str:
        # An array may only align the sides of its equations.
        if name == "array" and self.aligns_relations(start, end):
            return f" {self.rows(start, end, depth + 1, is_aligned=True)} "
        rows = self.render(start, end, depth + 1).strip()
        # A \\ after the last row opens no other row.
        while rows.endswith("\\\\"):
            rows = rows[:-2].rstrip()
        if name in _CASES:
            return rf"\begin{{cases}}{rows}\end{{cases}}"
        if name in _DETERMINANTS:
            return rf"\begin{{vmatrix}}{rows}\end{{vmatrix}}"
        # A matrix of one cell is the cell.
        if "&" not in rows and "\\\\" not in rows:
            return _group(rows)
        return rf"\begin{{pmatrix}}{rows}\end{{pmatrix}}"

    def aligns_relations(self, start: int, end: int) -> bool:
        """Returns whether a column of an array starts with a relation, which is then aligned."""
        for position in range(start, end - 1):
            if self.pieces[position] == "&":
                entry = self.pieces[self.after_spaces(position + 1, end - 1)]
                if entry.startswith(_OPERATORS_OF_RELATION):
                    return True
        return False

    def rows(self, start: int, end: int, depth: int, is_aligned: bool = False) -> str:
        r"""Renders rows, which \\ separates. A row that starts with a relation continues the
        previous row.

        Any other row is another item of a list.
        """
        text = self.render(start, end, depth)
        rows = _rows(text, is_aligned)
        if len(rows) == 1:
            return rows[0]
        rows = [row.strip() for row in rows]
        joined = ""
        for row in rows:
            # A row that starts with a relation continues a calculation.
            separator = "" if not joined or row.startswith(_OPERATORS_OF_RELATION) else ", "
            joined += f"{separator} {row}" if row else ""
        return joined


def _closing_positions(pieces: list[str]) -> dict[int, int]:
    r"""Returns {opening: closing} for braces, \left and \right, and \begin and \end."""
    pairs = {"}": "{", "\\right": "\\left", "\\end": "\\begin"}
    closing = {}
    opened: list[int] = []
    for position, piece in enumerate(pieces):
        if piece in ("{", "\\left", "\\begin"):
            opened.append(position)
        elif piece in pairs and opened and pieces[opened[-1]] == pairs[piece]:
            closing[opened.pop()] = position
    # Unbalanced brackets are in no pair. Callers render them as text, which does not parse.
    return closing


def _rows(text: str, is_aligned: bool) -> list[str]:
    r"""Returns the rows of a text, which \\ separates outside of environments.

    If `is_aligned`, the alignment marks between columns are dropped.
    """
    rows = [""]
    start = depth = 0
    for match in _ROW_OR_ENVIRONMENT.finditer(text):
        if match[0] in ("\\begin", "\\end"):
            depth += 1 if match[0] == "\\begin" else -1
        elif depth == 0 and (match[0] == "\\\\" or is_aligned):
            rows[-1] += text[start : match.start()] + " "
            start = match.end()
            rows += [""] if match[0] == "\\\\" else []
    rows[-1] += text[start:]
    return rows


def _group(text: str) -> str:
    """Returns a group in braces; an empty group becomes empty text."""
    if not text.strip():
        return " " if text else ""
    return f"{{{text}}}"


def _flush(text: list[str], rendered: list[str]) -> None:
    words_of_text = "".join(text)
    if words_of_text.strip():
        rendered.append(rf"\text{{{words_of_text}}}")
    elif words_of_text:
        rendered.append(" ")
    text.clear()


def _spelled(name: str, following: str) -> str:
    """Returns a command in the spelling that the lexer knows."""
    spelled = _SPELLINGS.get(name, f"\\{name}")
    if spelled[-1].isalpha() and following[:1].isalpha():
        spelled += " "  # the previous piece was \not or an argument
    return spelled


def _with_fractions(rendered: list[str]) -> str:
    r"""Joins rendered pieces. {a\over b} becomes \frac{a}{b}."""
    for name, command in (("\\over", "\\frac"), ("\\choose", "\\binom")):
        # TeX allows only one \over in a group.
        if name in rendered and rendered.count(name) == 1:
            index = rendered.index(name)
            start = _last_separator(rendered[:index])
            end = index + _first_separator(rendered[index:])
            above = "".join(rendered[start:index]).strip()
            below = "".join(rendered[index + 1 : end]).strip()
            rendered[start:end] = [f"{command}{{{above}}}{{{below}}}"]
    return "".join(rendered)


def _last_separator(rendered: list[str]) -> int:
    return max(
        (index + 1 for index, piece in enumerate(rendered) if piece in ("&", "\\\\")), default=0
    )


def _first_separator(rendered: list[str]) -> int:
    separators = (index for index, piece in enumerate(rendered) if piece in ("&", "\\\\"))
    return next(separators, len(rendered))
