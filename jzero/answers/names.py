r"""Names of more than one token: \angle ABC, \bar{z}, \mathcal{L}, "the area of ABC".

`with_names` replaces each name by one token, NAMED and the name, which the parser reads as a
symbol. The left side of the first "=" of an item is such a name if it is written in words, or with
capitals in brackets, such as [ABC] for an area. Then "area = 12" is a statement about one name,
like "x = 12".
"""

from collections.abc import Sequence
from string import ascii_letters, ascii_uppercase

from jzero.answers.units import REFUSED_WORDS
from jzero.answers.vocabulary import GREEK, words

NAMED = "\\named "  # followed by the name

ACCENTS = {
    **{f"\\{name}": name for name in words("bar hat tilde dot ddot check breve acute grave")},
    "\\overline": "bar",
    **{f"\\{name}": name for name in words("mathcal mathfrak mathscr mathbb")},
    "\\widehat": "hat",
    "\\widetilde": "tilde",
}
_FIGURES = ("\\angle", "\\triangle")
_DECORATIONS = frozenset((*ACCENTS, *_FIGURES, "\\vec"))
# Expectation, probability and orders of growth are also named without a style.
_CALLED_WITHOUT = {"\\mathbb": "EP", "\\mathcal": "O"}
_LETTERS = frozenset(ascii_letters) | {f"\\{name}" for name in GREEK if f"\\{name}" not in _FIGURES}
_WORDS_BELOW = frozenset(f"\\{name}" for name in words("min max inf sup lim"))
_CAPITALS = frozenset(ascii_uppercase)
_IN_NAMES = frozenset(("'", "_", *"0123456789"))
_LINKS = frozenset(("=", "≈"))
_ITEM_STARTS = frozenset((",", ";", "\\lor", "\\land", "or", "and", '"and', '"or'))
_UNSPOKEN = words("the of a an is measure length triangle angle value to in for segment m")
_CALLED = frozenset(f"\\{name}" for name in words("Pr deg det dim lim max min gcd ker"))
_NO_LABEL = words("if when where for not no all any real")
_DIRECTIONS = frozenset("⊥∥")
MAX_LABEL = 12  # tokens


def with_names(tokens: list[str]) -> list[str]:
    """Returns the tokens with one token for each name."""
    if "_" in tokens:
        tokens = _with_words_below(tokens)
    if not _DECORATIONS.isdisjoint(tokens):
        tokens = _with_decorated_names(tokens)
    return _with_labels(tokens) if not _LINKS.isdisjoint(tokens) else tokens


def _with_words_below(tokens: list[str]) -> list[str]:
    r"""Returns x_{\text{max}} for x_{\max}: in a subscript, such a command is a word."""
    result = list(tokens)
    for index, token in enumerate(tokens):
        # A negative start would count from the end of the list.
        preceding = tokens[index - 2 : index] if index > 1 else tokens[:index]
        if token in _WORDS_BELOW and (preceding[-1:] == ["_"] or preceding == ["_", "{"]):
            result[index] = f'"{token[1:]}'
    return result


def _with_decorated_names(tokens: list[str]) -> list[str]:
    result = []
    position = 0
    while position < len(tokens):
        token = tokens[position]
        if token in ACCENTS:
            name, end = _argument(tokens, position + 1)
            # \mathbb{E} and E are the same expectation.
            if name and name in _CALLED_WITHOUT.get(token, ""):
                result.append(name)
                position = end
                continue
            if name:
                is_segment = token == "\\overline" and len(name) == 2 and set(name) <= _CAPITALS
                if is_segment and not _DIRECTIONS.isdisjoint(tokens):
                    result += name  # the lines AB and CD are perpendicular
                    position = end
                    continue
                name = "".join(sorted(name)) if is_segment else name
                result.append(f"{NAMED}{ACCENTS[token]} {name}")
                position = end
                continue
        elif token == "\\vec":
            name, end = _argument(tokens, position + 1)
            if len(name) == 2 and set(name) <= _CAPITALS:
                result.append(f"{NAMED}arrow {name}")
                position = end
                continue
        elif token in _FIGURES:
            name, end = _vertices(tokens, position + 1)
            if token == "\\angle" and len(name) == 3:
                name = min(name, name[::-1])  # ABC and CBA are the same angle
            if name:
                result.append(f"{NAMED}{token[1:]} {name}")
                position = end
                continue
        result.append(token)
        position += 1
    return result


def _argument(tokens: Sequence[str], position: int) -> tuple[str, int]:
    """Returns the letters below an accent, "" if the accent is above anything else."""
    if position < len(tokens) and tokens[position] in _LETTERS:
        return tokens[position], position + 1
    if position >= len(tokens) or tokens[position] != "{":
        return "", position
    # The bound keeps the time linear if many groups stay open.
    for end in range(position + 1, min(position + MAX_LABEL, len(tokens))):
        token = tokens[end]
        if token == "}":
            letters = (letter.lstrip('"') for letter in tokens[position + 1 : end])
            return "".join(letters), end + 1
        is_name = token in _LETTERS or token in _IN_NAMES or token[0] == '"'
        # A name begins with a letter.
        if not is_name or (end == position + 1 and token in _IN_NAMES):
            break
    return "", position


def _vertices(tokens: Sequence[str], position: int) -> tuple[str, int]:
    """Returns the letters after the sign of an angle or triangle: ABC, or one Greek letter."""
    start = position
    # \angle{ABC} is \angle ABC.
    opened = position < len(tokens) and tokens[position] == "{"
    position += opened
    name = ""
    while position < len(tokens) and len(name) < 8:
        token = tokens[position].lstrip('"')
        if not token or not set(token) <= _CAPITALS:
            break
        name += token
        position += 1
    if opened:
        is_closed = position < len(tokens) and tokens[position] == "}"
        return (name, position + 1) if is_closed and name else ("", start)
    return (name, position) if name else ("", start)


def _with_labels(tokens: list[str]) -> list[str]:
    """Replaces the words on one side of a relation by one token: area = 12, 12 = area."""
    result = []
    start = 0
    while start < len(tokens):
        end = start
        while end < len(tokens) and tokens[end] not in _ITEM_STARTS:
            end += 1
        result += _labeled_item(tokens[start:end])
        result += tokens[end : end + 1]
        start = end + 1
    return result


def _labeled_item(item: list[str]) -> list[str]:
    links = [index for index, token in enumerate(item) if token in _LINKS]
    if not links:
        return item
    first, last = links[0], links[-1]
    if _is_label(item[:first]):
        return _label(item[:first]) + item[first:]
    # On the right side, words are a label only after a number: 12 = area.
    has_number = any(token[0].isdigit() for token in item[:last])
    if has_number and _is_label(item[last + 1 :]):
        return item[: last + 1] + _label(item[last + 1 :])
    return item


def _is_label(tokens: Sequence[str]) -> bool:
    has_name = False
    if len(tokens) > MAX_LABEL:
        return False
    for token in tokens:
        word = token[1:].lower() if token[0] == '"' else ""
        is_name = len(word) > 1 or token.startswith(NAMED) or token in _CALLED
        if word in REFUSED_WORDS - {"is", "to"} or word in _NO_LABEL:
            return False
        if not (is_name or token in _LETTERS or token in "[]|" or word):
            return False
        has_name = has_name or is_name
    return has_name


def _label(tokens: Sequence[str]) -> list[str]:
    words_of_label = []
    is_area = list(tokens[:1]) == ["["] and tokens[-1] == "]"
    for token in tokens:
        if token.startswith(NAMED):
            figure, _, name = token[len(NAMED) :].partition(" ")
            is_segment = figure in ("overline", "bar") and len(name) == 2 and set(name) <= _CAPITALS
            # \overline{AB} = 5 is read like AB = 5.
            if is_segment and len(tokens) == 1:
                return list(name)
            words_of_label.append(name if is_segment or figure == "triangle" else token)
            continue
        word = token.lstrip('\\"')
        if word not in "[]|" and word.lower() not in _UNSPOKEN:
            words_of_label.append(word if word.isupper() else word.lower())
    if not words_of_label:
        return list(tokens)
    if words_of_label[0].startswith(NAMED) and len(words_of_label) == 1:
        return words_of_label
    prefix = "area" if is_area else ""
    return [f"{NAMED}{prefix}{''.join(words_of_label)}"]
