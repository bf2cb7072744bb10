r"""Chemical formulas, equations and names: \ce{H2O}, \mathrm{H_2O}, \text{Ca(OH)}_2, \ce{SO4^2-}.

All spellings of a substance have one form. The order of its atoms counts, and the order of the
substances on a side of an equation does not. The arrow of an equilibrium differs from that of a
reaction. The phases (s), (l), (g) and (aq) count if both answers have them. A single bond may be
left out, and a double or triple bond may not: CH3-CH3 is CH3CH3, and CH2=CH2 is not CH2CH2.
"""

import functools
import itertools
import re
from typing import NamedTuple

# In the order of their atomic numbers.
_SYMBOLS = """
    H He Li Be B C N O F Ne Na Mg Al Si P S Cl Ar K Ca Sc Ti V Cr Mn Fe Co Ni Cu Zn Ga Ge As Se
    Br Kr Rb Sr Y Zr Nb Mo Tc Ru Rh Pd Ag Cd In Sn Sb Te I Xe Cs Ba La Ce Pr Nd Pm Sm Eu Gd Tb Dy
    Ho Er Tm Yb Lu Hf Ta W Re Os Ir Pt Au Hg Tl Pb Bi Po At Rn Fr Ra Ac Th Pa U Np Pu Am Cm
"""
_ELEMENTS = _SYMBOLS.split()
_MARKS = re.compile(r"\\ce\b|\\(?:mathrm|text|rm|mathsf)\b|_")
_TYPE = re.compile(r"\\(?:ce|mathrm|text|rm|mathsf)\s*|[{}$]|\\[,;! ]")
_ARROW = re.compile(
    r"\\(?:long)?rightarrow|\\to(?![A-Za-z])|\\rightleftharpoons|⇌|→|<=>|->|(?<=\s)=(?=\s)"
)
_TRIPLE_BOND = re.compile(r"\\equiv|#")
# The atomic number of an isotope, below or above which its mass stands.
_ATOMIC_NUMBER = re.compile(
    r"(?P<mass>\^\s*\{?\s*[0-9]+\s*\}?)?\s*_\s*\{?\s*(?P<number>[0-9]+)\s*\}?"
    r"\s*(?P<after>\^\s*\{?\s*[0-9]+\s*\}?)?"
    r"(?=[\s{]*(?:\\(?:mathrm|text|rm|mathsf)[\s{]*)?(?P<element>[A-Z][a-z]?))"
)
_REVERSIBLE = ("\\rightleftharpoons", "⇌", "<=>")
_SUBSCRIPT = re.compile(r"_\s*\{?\s*([0-9]+)\s*\}?")
_CHARGE = re.compile(r"\^\s*\{?\s*([0-9]*)\s*([+-])\s*\}?")
_ISOTOPE = re.compile(r"\^\s*\{?\s*([0-9]+)\s*\}?")
# In \ce a sign right after a substance is its charge.
_BARE_CHARGE = re.compile(r"(?<=[A-Za-z0-9)\]])([+-])(?=\s|$|\}|\((?:s|l|g|aq)\))")
_SUBSTANCE = re.compile(
    r"(?P<count>[0-9]*)\s*(?P<isotope>(?:<[0-9]+>)?)"
    r"(?P<atoms>(?:[-=≡]?(?:[A-Z][a-z]?[0-9]*|[(\[](?:[-=≡]?[A-Z][a-z]?[0-9]*)+[)\]][0-9]*))+)"
    r"(?P<charge>(?:«[0-9]*[+-]»)?)(?P<phase>(?:\((?:s|l|g|aq)\))?)"
)
_ATOM = re.compile("[A-Z][a-z]?")
# Atoms of hydrogen in front of the first carbon: H2C=CH2 is CH2=CH2.
_HYDROGEN_FIRST = re.compile(r"^(H[0-9]?)C(?=[-=≡])")
_ORBITALS = re.compile(r"(?:\[(?P<core>[A-Z][a-z])\])?(?P<orbitals>(?:[1-7][spdf]\^[0-9]+)+)")
_ORBITAL = re.compile(r"([1-7][spdf])\^([0-9]+?)(?=[1-7][spdf]|$)")
_HYBRID = re.compile(r"(?:d\^?[1-3]?)?sp(?:\^?[23])?(?:d(?:\^?[1-3])?)?")
_LAYOUT = re.compile(r"\\(?:ce|mathrm|text|rm|mathsf|textit|mathit)\s*|\\[,;! ]|[{}$\s]")
# 2-methylbutane, (R)-2-butanol, N,N-dimethylaniline: words that are joined by places.
_SYSTEMATIC_NAME = re.compile(
    # One character at a time, so that the time is linear.
    r"(?=.*[a-z]{4})(?:[A-Za-z0-9()\[\],+-]|(?<=[0-9])'| (?=[a-z0-9]))+"
)
_CAPITALIZED = re.compile(r"(?<![A-Za-z])[A-Z](?=[a-z]{3})")
LONGEST = 200  # characters


class Equation(NamedTuple):
    """The substances of each side of an equation in order, with their phases, "" for none."""

    arrow: str
    sides: tuple[tuple[tuple[str, str], ...], ...]


def same_substance(answer: str, gold: str) -> bool:
    """Returns whether two texts are the same chemical formula, equation or name."""
    if "^" in gold and _same_configuration(answer, gold):
        return True
    if "-" in gold and _same_name(answer, gold):
        return True
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


def _same_configuration(answer: str, gold: str) -> bool:
    """Returns whether two texts have the same electrons in the same orbitals, as 1s^2 2s^1."""
    texts = [_LAYOUT.sub("", text) for text in (answer, gold)]
    if all(map(_HYBRID.fullmatch, texts)):
        return texts[0].replace("^", "") == texts[1].replace("^", "")
    matches = [_ORBITALS.fullmatch(text) for text in texts]
    configurations = [
        (match["core"], sorted(_ORBITAL.findall(match["orbitals"]))) for match in matches if match
    ]
    return len(configurations) == 2 and configurations[0] == configurations[1]


def _same_name(answer: str, gold: str) -> bool:
    """Returns whether two systematic names differ in capitals at the start of words only."""
    names = [re.sub(r"\\text\s*|[{}$]", "", text).strip(" .") for text in (answer, gold)]
    if max(map(len, names)) > LONGEST or not all(map(_SYSTEMATIC_NAME.fullmatch, names)):
        return False
    # "N" and "R" in a name have their case.
    lowered = [_CAPITALIZED.sub(lambda letter: letter[0].lower(), name) for name in names]
    return lowered[0] == lowered[1]


@functools.lru_cache(1024)
def _equation(text: str) -> Equation | None:
    """Returns the sides of an equation, one side for a formula; None if there is none."""
    if len(text) > LONGEST:
        return None
    is_marked = "\\ce" in text
    text = _ATOMIC_NUMBER.sub(_without_atomic_number, _TRIPLE_BOND.sub("≡", text))
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


def _without_atomic_number(match: re.Match[str]) -> str:
    """Returns an isotope without its atomic number, if that is the element's own."""
    mass, index = match["mass"] or match["after"], int(match["number"]) - 1
    is_own = mass and 0 <= index < len(_ELEMENTS) and _ELEMENTS[index] == match["element"]
    return mass if is_own else match[0]


def _substance(text: str) -> tuple[str, str] | None:
    """Returns a substance without spaces and its phase, None for any other text."""
    text = "".join(text.split())
    match = _SUBSTANCE.fullmatch(text)
    if match is None or not set(_ATOM.findall(match["atoms"])) <= {*_ELEMENTS}:
        return None
    atoms = _HYDROGEN_FIRST.sub(r"C\1", match["atoms"].replace("-", ""))
    count = "" if match["count"] == "1" else match["count"]
    charge = match["charge"].replace("«1", "«")
    return f"{count}{match['isotope']}{atoms}{charge}", match["phase"]
