r"""Labels beside the values of an answer: "center (2,-1) and radius 3", "the line y=2x".

`with_labels` writes each labeled value as an equation, \text{center}=(2,-1), which is compared like
x=3: the label may be missing in one of the answers, and two labels must agree. A curve's equation
needs no label, so "the line y=2x" is y=2x. The labels of values without a colon or a verb are a
closed list, because any other word may change the value: "half 5", "not 5".
"""

import re

from jzero.answers.phrases import with_relation

LONGEST = 300  # characters
_KINDS = r"(?:(?:global|absolute|local|relative) )?"
_LABEL = (
    rf"(?:{_KINDS}(?:maximum|minimum|max|min)(?: value| point)?"
    r"|(?:common )?(?:vertex|center|centre|focus|point|midpoint|centroid|orthocenter|radius"
    r"|diameter)"
    r"|(?:saddle|critical|stationary|inflection|fixed|intersection) point"
    r"|point of (?:intersection|inflection|tangency)"
    r"|[xy][- ]?intercept|slope|gradient|area|perimeter|circumference|volume|surface area"
    r"|mean|median|mode|range|domain|variance|standard deviation|expected value|probability"
    r"|eigenvalues?|determinant|rank|trace|dimension|quotient|remainder|sum|product|difference"
    r"|length|width|height|amplitude|frequency|period|phase shift|real part|imaginary part"
    r"|(?:strictly |monotonically )?(?:increasing|decreasing) (?:on|for)|concave (?:up|down)"
    r"(?:ward)? on"
    r"|oxidation (?:state|number)|charge|bond order"
    r"|foci|vertices|asymptotes?|directrix|common ratio|common difference|first term)"
)
_CURVE = (
    r"(?:(?:tangent |normal |straight |perpendicular )?line|circle|parabola|ellipse|hyperbola"
    r"|plane|sphere|curve|surface|equation|function|inequality)"
)
_VALUE = r"(?=[-+(0-9\[]|\\frac|\\sqrt|\\pi|\\left|\\langle|\\begin|\\infty)"
_COMMA_IN_TEXT = re.compile(r"\\text\s*\{\s*([,;])\s*(?:(?:and|with)\s+)?(?=[^}\s])")
_CONNECTIVE = re.compile(
    rf"(?<=[0-9)}}\]])\s*(?P<text>\\text\s*\{{)?\s*(?:and|with)\s+(?=(?:an? |the )?{_LABEL}\b)",
    re.IGNORECASE,
)
_LABELED = re.compile(
    rf"\s*(?:\\text\s*\{{)?\s*(?:(?:an? |the |it has (?:an? )?)\s*)?(?P<label>{_LABEL})"
    rf"(?:\s*(?:is |occurs |lies |located )*(?:at|is|are|:|=))?\s*(?P<closed>\}})?\s*"
    rf"(?:(?P<point>(?-i:[A-Z])\s*\()|{_VALUE})",
    re.IGNORECASE,
)
_INTERCEPT = re.compile(r"\$?\b([xy])\$?\s*\\text\s*\{\s*-?\s*(?=intercept)")
# (0,0) is a saddle point.
_LABEL_AFTER = re.compile(
    rf"\s*(?P<value>\([^()]*\))\s*(?:\\text\s*\{{)?\s*is (?:an? |the )"
    rf"(?P<label>{_LABEL})\s*\}}?\s*",
    re.IGNORECASE,
)
_OF_A_CURVE = re.compile(
    rf"\s*(?:\\text\s*\{{)?\s*(?:(?:an? |the )\s*)?{_CURVE}(?:\s+with (?:the )?equation)?"
    r"(?:\s+(?:is|of the form))?\s*:?\s*(?P<closed>\})?\s*(?=[^=]*[=<>≤≥])",
    re.IGNORECASE,
)
# l: 3x-4y+5=0 names a curve.
_NAMED_CURVE = re.compile(
    r"\s*(?:[lLCEDP]|\\ell|\\Gamma|\\Pi|\\alpha)\s*:\s*(?=[^:=]*[xyr][^:]*=[^:]*\Z)"
)
_HAS_LABEL = re.compile(r"[A-Za-z]{3}|\A\s*(?:[lLCEDP]|\\ell)\s*:")
# The solutions are x=1 and x=2.
_STATEMENT_AFTER_LABEL = re.compile(
    r"\A\s*\\text\{[A-Za-z ]{3,60}\}=(?=[^=]*[A-Za-z)}]\s*(?:[=<>≤≥]|\\[gl]eq?(?![a-z])|\\in"
    r"(?![a-z])))"
)
_DEPTHS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}


_CIRCLE = re.compile(
    r"\s*(?:\\text\s*\{)?\s*(?:an? |the )?circle (?:with |of )?(?:center|centered at|centre)"
    r"(?: at)?\s*\}?"
    r"\s*\((?P<x>[^(),]+),(?P<y>[^(),]+)\)\s*,?\s*(?:\\text\s*\{)?\s*(?:,|and|with|of"
    r"|\s)*radius(?: of)?"
    r"\s*\}?\s*(?P<radius>[^=]+)",
    re.IGNORECASE,
)
_CIRCLE_AROUND = re.compile(
    r"\s*(?:\\text\s*\{)?\s*(?:an? |the )?circle (?:of|with) radius\s*\}?\s*(?P<radius>[^=,a-z]+?)"
    r"\s*,?\s*(?:\\text\s*\{)?\s*(?:centered at|with center|and center|about)(?: at)?\s*(?:\}\s*)?"
    r"(?:the origin|\(?(?P<x>[^(),]+),(?P<y>[^(),]+)\))\s*\}?\s*",
    re.IGNORECASE,
)


def with_labels(text: str) -> str:
    r"""Returns a text without layout with "=" between each label and its value.

    "The area is 12" is \text{The area}=12, and "vertex (1,2)" is \text{vertex}=(1,2).
    """
    if len(text) > LONGEST or not _HAS_LABEL.search(text):
        return with_relation(text) if len(text) > LONGEST else text
    circle = _CIRCLE.fullmatch(text) or _CIRCLE_AROUND.fullmatch(text)
    if circle is not None:
        x, y, radius = circle["x"] or "0", circle["y"] or "0", circle["radius"]
        return rf"(x-({x}))^2+(y-({y}))^2=({radius})^2"
    curve = _OF_A_CURVE.match(text) or _NAMED_CURVE.match(text)
    if curve is not None and not _opens_text(curve[0]):
        return text[curve.end() :]
    text = _INTERCEPT.sub(r"\\text{\1-", text)
    separated = _COMMA_IN_TEXT.sub(r"\1\\text{", text)
    separated = _CONNECTIVE.sub(lambda match: "," + (match["text"] or ""), separated)
    return "".join(map(_labeled, _items(separated)))


def _opens_text(text: str) -> bool:
    return text.count("{") != text.count("}")


def _items(text: str) -> list[str]:
    """Returns the items of a list, each but the first one with the comma before it."""
    items, start, depth = [], 0, 0
    for position, character in enumerate(text):
        depth += _DEPTHS.get(character, 0)
        if depth == 0 and character in ",;" and position:
            items.append(text[start:position])
            start = position
    return [*items, text[start:]]


def _labeled(item: str) -> str:
    comma = item[:1] if item[:1] in (",", ";") else ""
    item = item.removeprefix(comma)
    after = _LABEL_AFTER.fullmatch(item)
    if after is not None:
        return rf"{comma}\text{{{_spelling(after['label'])}}}={after['value']}"
    match = _LABELED.match(item)
    if match is None or _opens_text(match[0]):
        return comma + _STATEMENT_AFTER_LABEL.sub("", with_relation(item))
    if match["point"]:  # the focus F(0,1) has a name
        return comma + item[match.start("point") :]
    label, value = match["label"], item[match.end() :]
    return rf"{comma}\text{{{_spelling(label)}}}={value}"


def _spelling(label: str) -> str:
    label = label.lower().replace("maximum", "max").replace("minimum", "min")
    label = label.replace("centre", "center").replace("-", "").replace("absolute", "global")
    return (
        label.removesuffix(" value").replace(" point", "") if label[:3] in ("max", "min") else label
    )
