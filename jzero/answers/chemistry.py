r"""Chemical formulas and equations: \ce{H2O}, \mathrm{H_2O}, \text{Ca(OH)}_2, \ce{SO4^2-}.

All spellings of a substance have one form. The order of its atoms counts, and the order of the
substances on a side of an equation does not. The arrow of an equilibrium differs from that of a
reaction. The phases (s), (l), (g) and (aq) count if both answers have them.
"""

import functools
import itertools
import re
from typing import NamedTuple

from jzero.answers.vocabulary import words

_ELEMENTS = words(
    """H He Li Be B C N O F Ne Na Mg Al Si P S Cl Ar K Ca Sc Ti V Cr Mn Fe Co Ni Cu Zn Ga Ge As Se
    Br Kr Rb Sr Y Zr Nb Mo Tc Ru Rh Pd Ag Cd In Sn Sb Te I Xe Cs Ba La Ce Pr Nd Pm Sm Eu Gd Tb Dy
    Ho Er Tm Yb Lu Hf Ta W Re Os Ir Pt Au Hg Tl Pb Bi Po At Rn Fr Ra Ac Th Pa U Np Pu Am Cm"""
)
_MARKS = re.compile(r"\\ce\b|\\(?:mathrm|text|rm|mathsf)\b|_")
_TYPE = re.compile(r"\\(?:ce|mathrm|text|rm|mathsf)\s*|[{}$]|\\[,;! ]")
_ARROW = re.compile(r"\\(?:long)?rightarrow|\\to\b|\\rightleftharpoons|⇌|→|<=>|->")
_REVERSIBLE = ("\\rightleftharpoons", "⇌", "<=>")
_SUBSCRIPT = re.compile(r"_\s*\{?\s*([0-9]+)\s*\}?")
_CHARGE = re.compile(r"\^\s*\{?\s*([0-9]*)\s*([+-])\s*\}?")
_ISOTOPE = re.compile(r"\^\s*\{?\s*([0-9]+)\s*\}?")
# In \ce a sign right after a substance is its charge.
_BARE_CHARGE = re.compile(r"(?<=[A-Za-z0-9)\]])([+-])(?=\s|$|\}|\((?:s|l|g|aq)\))")
_SUBSTANCE = re.compile(
    r"(?P<count>[0-9]*)\s*(?P<isotope>(?:<[0-9]+>)?)"
    r"(?P<atoms>(?:[A-Z][a-z]?[0-9]*|[(\[](?:[A-Z][a-z]?[0-9]*)+[)\]][0-9]*)+)"
    r"(?P<charge>(?:«[0-9]*[+-]»)?)(?P<phase>(?:\((?:s|l|g|aq)\))?)"
)
_ATOM = re.compile("[A-Z][a-z]?")
LONGEST = 200  # characters


class Equation(NamedTuple):
    """The substances of each side of an equation in order, with their phases, "" for none."""

    arrow: str
    sides: tuple[tuple[tuple[str, str], ...], ...]


def same_substance(answer: str, gold: str) -> bool:
    """Returns whether two texts are the same chemical formula or equation."""
    if not _MARKS.search(answer) and not _MARKS.search(gold):
        return False
    equation, other = _equation(gold), _equation(answer)
    if equation is None or other is None or equation.arrow != other.arrow:
        return False
    if [len(side) for side in equation.sides] != [len(side) for side in other.sides]:
        return False
    pairs = zip(itertools.chain(*equation.sides), itertools.chain(*other.sides), strict=True)
    return all(
        name == other_name and (phase == other_phase or "" in (phase, other_phase))
        for (name, phase), (other_name, other_phase) in pairs
    )


@functools.lru_cache(1024)
def _equation(text: str) -> Equation | None:
    """Returns the sides of an equation, one side for a formula; None if there is none."""
    if len(text) > LONGEST:
        return None
    is_marked = "\\ce" in text
    # Charges and isotopes get brackets of their own, so that signs and digits stay apart.
    text = _CHARGE.sub(r"«\1\2»", _SUBSCRIPT.sub(r"\1", text))
    if is_marked:
        text = _BARE_CHARGE.sub(r"«\1»", text)
    text = _ISOTOPE.sub(r"<\1>", text)
    arrows = _ARROW.findall(text)
    if len(arrows) > 1:
        return None
    sides = []
    for side in _ARROW.split(text):
        written = re.split(r"\+(?![^«]*»)", _TYPE.sub(" ", side))
        substances = [_substance(part) for part in written]
        if None in substances:
            return None
        sides.append(tuple(sorted(filter(None, substances))))
    arrow = "⇌" if arrows and arrows[0] in _REVERSIBLE else "→" if arrows else ""
    return Equation(arrow, tuple(sides))


def _substance(text: str) -> tuple[str, str] | None:
    """Returns a substance without spaces and its phase, None for any other text."""
    text = "".join(text.split())
    match = _SUBSTANCE.fullmatch(text)
    if match is None or not set(_ATOM.findall(match["atoms"])) <= _ELEMENTS:
        return None
    count = "" if match["count"] == "1" else match["count"]
    charge = match["charge"].replace("«1", "«")
    return f"{count}{match['isotope']}{match['atoms']}{charge}", match["phase"]
