r"""Families of notation: pairs of answers that are the same, and near misses that are not.

A line is `answer == gold` or `answer != gold`, and may end with `?? question`. Each family has
pairs of both signs, so that a rule that is too wide fails as surely as one that is too narrow.
"""

import pytest

from jzero.answers.verdict import grade

FAMILIES = {
    "letters that spell units": r"""
        \frac12 != \frac{1}{2}mg
        2 != 2nm
        \frac13 != \frac13ml^2
        2\pi != 2\pi hr
        -2 != -2mg
        2\text{ milligrams} != 2mg
        3 != 3kg
        5 != 5cm^2
        \frac{3}{4} != \frac34 kW
        2 != 2mg ?? A block of weight $mg$ hangs from two strings. Find the tension.
        2nm+1 == 1+2mn
        nm(n-m) == mn(n-m)
        2\pi rh == 2\pi hr
        mg\sin\theta == m g\sin\theta
        \frac{1}{2}mL^2 == \frac{mL^2}2
        km^2 == m^2k
        m_1g == gm_1
        \cos(2\pi ft) == \cos(2\pi tf)
        \frac km == k/m
        \frac nm == \frac{n}{m}
        \frac{mg}{k} == \frac{gm}{k}
        \sqrt{\frac{2gh}{m}} == \sqrt{2hg/m}
        2mg == 2\cdot m\cdot g
        5 cm == 5
        5cm == 5
        5 == 5 cm
        5\text{ cm} == 5 cm
        5 cm == 5\text{ cm}
        5 km/h == 5\text{ km/h}
        12 kg == 12\mathrm{kg}
        2\text{ mg} == 2mg
        5\text{ km} != 5\text{ cm}
        5 km != 5\text{ cm}
        6 cm != 5 cm
    """,
    "products that do not commute": r"""
        A^{-1}B^{-1} != (AB)^{-1}
        B^{-1}A^{-1} == (AB)^{-1}
        A^TB^T != (AB)^T
        B^TA^T == (AB)^T
        (A^T)^{-1} == (A^{-1})^T
        P^{-1}AP != PAP^{-1}
        P^{-1}AP != A
        ABA^{-1} != B
        \det(A)\det(B) == \det(AB)
        \det(A^T) == \det A
        \det(A)+\det(B) != \det(A+B)
        \det(2A) != 2\det(A)
        (A+B)^T == A^T+B^T
        (A+B)^{-1} != A^{-1}+B^{-1}
        X=A^{-1}B != X=BA^{-1}
        A^{-1}B+A^{-1}C == A^{-1}(B+C)
        g\circ f != f\circ g
        f\circ g == f\circ g
        f\circ(g\circ h) == (f\circ g)\circ h
        f(g(x)) == (f\circ g)(x)
        \mathbf a\cdot\mathbf b != \mathbf a\times\mathbf b
        \mathbf b\times\mathbf a != \mathbf a\times\mathbf b
        -\mathbf b\times\mathbf a == \mathbf a\times\mathbf b
        \mathbf b\cdot\mathbf a == \mathbf a\cdot\mathbf b
        \vec b\cdot\vec a == \vec a\cdot\vec b
        \vec v\times\vec B != \vec B\times\vec v
        q\vec v\times\vec B == q\mathbf v\times\mathbf B
        q(\mathbf v\times\mathbf B) == q\mathbf v\times\mathbf B
        q\mathbf{E}+q\mathbf v\times\mathbf B == q(\mathbf E+\mathbf v\times\mathbf B)
        q\mathbf{E}+q\mathbf v\times\mathbf B != q(\mathbf E-\mathbf v\times\mathbf B)
        \mathbf a\times(\mathbf b\times\mathbf c) != (\mathbf a\times\mathbf b)\times\mathbf c
        \vec b(\vec a\cdot\vec c)-\vec c(\vec a\cdot\vec b) == \vec a\times(\vec b\times\vec c)
        \mathbf a\cdot(\mathbf b\times\mathbf c) == \mathbf c\cdot(\mathbf a\times\mathbf b)
        \mathbf a\cdot(\mathbf b\times\mathbf c) != \mathbf b\cdot(\mathbf a\times\mathbf c)
        \nabla\cdot\mathbf F != \nabla\times\mathbf F
        \nabla\times\mathbf F == \nabla\times\mathbf F
        \nabla\times(\nabla f) != \nabla\cdot(\nabla f)
        [0,2]\times[0,1] != [0,1]\times[0,2]
        [0,1]\times[0,2] == [0,1]\times[0,2]
        [0,1]\times[0,2] == \left[0,1\right]\times\left[0,\frac42\right]
        \mathbb R\times\mathbb Z != \mathbb Z\times\mathbb R
        \mathbb R\times\mathbb Z == \mathbb{R}\times\mathbb{Z}
        \{1,2\}\times\{3\} != \{3\}\times\{1,2\}
        2\times3x == 6x
        3\times10^8 == 300000000
        a\times b == ba
        AB+BA == BA+AB
        5\times 4\text{ cm}^2 != 20\text{ m}^2
    """,
    "ordered lists": r"""
        T, T, F != T, F, T
        T, F, T == T, F, T
        \text{T, F, T} == T,F,T
        \text{True, False} != \text{False, True}
        \text{true, false} == \text{True, False}
        \text{No and Yes} != \text{Yes and No}
        \text{No, Yes} != \text{Yes, No}
        \text{Yes, No} == \text{Yes},\text{No}
        \text{True, True, False} != \text{True, False, True}
        \text{Bob, Alice, Carol} != \text{Alice, Bob, Carol} ?? Name them from shortest to tallest
        \text{Alice, Bob, Carol} == \text{Alice, Bob, Carol} ?? Name them from shortest to tallest
        \text{Bob, Alice} == \text{Alice, Bob} ?? Who are the children?
        6, 10, 12 != 12, 10, 6 ?? List the numbers in decreasing order.
        12, 10, 6 == 12,10,6 ?? List the numbers in decreasing order.
        3, 2, 1 != 1, 2, 3 ?? Write the numbers in order from least to greatest.
        1, 2, 3 == 1,2,3 ?? Write the numbers in order from least to greatest.
        3, 2 == 2, 3 ?? Find all solutions.
        2, 3 == 3, 2 ?? Find all solutions. Enter them in any order.
        2, 3 == 3, 2 ?? Find all solutions in order to finish the proof.
        \text{C, B, A} != \text{A, B, C} ?? Rank the three planets from hottest to coldest.
        C,B,A != A,B,C ?? Order the letters from smallest to largest.
        A,B,C == A,B,C ?? Order the letters from smallest to largest.
        B<A != A<B ?? Which is larger?
        3,1,2 != 1,2,3 ?? Find $a$, $b$, $c$, respectively.
    """,
    "numbers in prose": r"""
        5 less than x != 5
        5 more than x != 5
        \text{logarithm of }5 != 5
        \text{derivative of }5 != 5
        \text{different from }5 != 5
        \text{the next prime after }5 != 5
        \text{all integers from }5\text{ onwards} != 5
        \text{we reject the value }5 != 5
        \text{the answer cannot be }5 != 5
        \text{a multiple of }5 != 5
        \text{the value lies near }5 != 5
        \text{It is false that there are 5 apples} != 5
        \text{the sum of the digits of }5 != 5
        \text{x years after }5 != 5
        \text{She has fewer than 5 apples} != 5
        \text{no more than 5 apples are left} != 5
        \text{there are at least 5 cats} != 5
        \text{Janet makes 5 dollars less} != 5
        \text{any number but }5 != 5
        \text{5 is not the answer} != 5
        \text{there were 5 apples before} != 6
        \text{There are 5 apples.} == 5
        \text{Janet makes } \$18 \text{ every day} == 18
        \text{She has 5 apples left.} == 5
        \text{John needs 12 eggs.} == 12
        \text{It takes 5 hours} == 5
        \text{The total cost is \$20} == 20
        \text{The train travels 60 miles per hour} == 60
        \text{They sold 14 tickets} == 14
        \text{The area is }12 == 12
        \text{Tom will have 30 dollars} == 30
        \text{She earned \$45 in total} == 45
        \text{The answer is 7 days} == 7
        \text{Maria spent 25 minutes} == 25
        \text{There will be 8 students left} == 8
    """,
    "pieces": r"""
        \max(x,-20) != x
        \min(n,500) != n
        \min(x,10^7) != x
        \max(a,b,-500) != \max(a,b)
        \max(a,b) == \max(b,a)
        \max(a,b) == \frac{a+b+|a-b|}{2}
        \max(x,-x) == |x|
        \min(a,b)+\max(a,b) == a+b
        \min(a,b) != \max(a,b)
        |x-1000|+1000 != 2000-x
        \max(a,\max(b,c)) == \max(a,b,c)
    """,
    "members and multiplicity": r"""
        \{\{1\},\{2\}\} != \{1,2\}
        \{\{2\},\{1\}\} == \{\{1\},\{2\}\}
        \{\{1,2\}\} != \{1,2\}
        \{\emptyset\} != \emptyset
        \{1,\{2\}\} != \{1,2\}
        2,3 != \lambda=2,2,3
        2,2,3 == \lambda=2,2,3
        3,2,2 == \lambda=2,2,3
        \lambda=2,3 != \lambda=2,2,3
        2,3 != 2,2,3
        \lambda_1=3,\lambda_2=2 == 2,3
        \lambda_1=3,\lambda_2=2 == 3,2
        x_1=1,x_2=2 == x=1,2
        x_1=1,x_2=3 != x=1,2
        i-1 != i^2+i ?? Find the sum over all indices $1\le i\le n$ in terms of the index $i$.
    """,
}
ECHOES = r"""
    (x^2-1) != (x-1)(x+1) ?? Factor $x^2-1$.
    -1+x^2 != (x-1)(x+1) ?? Factor $x^2-1$.
    1\cdot(x^2-1) != (x-1)(x+1) ?? Factor $x^2-1$.
    x\cdot x-1 != (x-1)(x+1) ?? Factor $x^2-1$.
    x^2-1+0 != (x-1)(x+1) ?? Factor $x^2-1$.
    \frac{x^2-1}{1} != (x-1)(x+1) ?? Factor $x^2-1$.
    -(1-x^2) != (x-1)(x+1) ?? Factor $x^2-1$.
    (x^2-1)^1 != (x-1)(x+1) ?? Factor $x^2-1$.
    [x^2-1] != (x-1)(x+1) ?? Factor $x^2-1$.
    x^2-x+x-1 != (x-1)(x+1) ?? Factor $x^2-1$.
    x^2-1 != (x-1)(x+1) ?? Factor x^2-1.
    (x+1)(x-1) == (x-1)(x+1) ?? Factor $x^2-1$.
    (x+1)(-1+x) == (x-1)(x+1) ?? Factor $x^2-1$.
    (1+x)^3 != x^3+3x^2+3x+1 ?? Expand $(x+1)^3$.
    (x+1)(x+1)(x+1) != x^3+3x^2+3x+1 ?? Expand $(x+1)^3$.
    1+3x+3x^2+x^3 == x^3+3x^2+3x+1 ?? Expand $(x+1)^3$.
    (\sqrt{242}) != 11\sqrt2 ?? Simplify $\sqrt{242}$.
    \sqrt{121\cdot2} != 11\sqrt2 ?? Simplify $\sqrt{242}$.
    \sqrt2\cdot11 == 11\sqrt2 ?? Simplify $\sqrt{242}$.
    \cos15^\circ != \frac{\sqrt2+\sqrt6}{4} ?? Compute $\cos 15^\circ$.
    \cos(15^\circ) != \frac{\sqrt2+\sqrt6}{4} ?? Compute $\cos 15^\circ$.
    \frac{\sqrt6}4+\frac{\sqrt2}4 == \frac{\sqrt2+\sqrt6}{4} ?? Compute $\cos 15^\circ$.
    0.\overline{5} != \frac59 ?? Express $0.\overline{5}$ as a common fraction.
    \frac{5}{9} == \frac59 ?? Express $0.\overline{5}$ as a common fraction.
    0.5 == \frac12 ?? What is the probability of heads?
    \frac{11}{125} != 0.088 ?? Find the decimal expansion of $\frac{11}{125}$.
    95^2 != 9025 ?? Compute $95^2$ in your head.
    x=4 != 4 ?? Evaluate both when $x=4$. What is $m$?
    m=4 == 4 ?? Evaluate both when $x=4$. What is $m$?
    (x = 3) == x=3 ?? Is the axis $x=3$ or $y=3$?
    \frac{x}{2} == 0.5x ?? Which is half? (A) $\frac x2$ (B) $x$
"""


def _pairs() -> list[tuple[str, bool, str, str, str]]:
    pairs = []
    for family, text in {**FAMILIES, "echoes": ECHOES}.items():
        for line in filter(None, map(str.strip, text.splitlines())):
            pair, _, question = line.partition(" ?? ")
            is_same = " == " in pair
            answer, gold = pair.split(" == " if is_same else " != ")
            pairs.append((family, is_same, answer.strip(), gold.strip(), question.strip()))
    return pairs


@pytest.mark.parametrize(("family", "is_same", "answer", "gold", "question"), _pairs())
def test_pairs_of_a_family_are_told_apart(family, is_same, answer, gold, question) -> None:
    question = question.replace(r"\n", "\n")
    graded = grade(answer, gold, template="answer", question=question)
    assert graded.correct == is_same, graded.reason
