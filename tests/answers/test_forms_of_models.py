r"""Forms in which models write right answers, beside near misses in the same form.

A line is `answer == gold` or `answer != gold`, and may end with `?? question`.
"""

import itertools
import time

import pytest
from pairs import pairs_of

from jzero.answers.verdict import grade

FORMS = {
    "restrictions after a formula": r"""
        a_n=3\cdot2^{n-1} (n\ge1) == a_n=3\cdot2^{n-1}
        a_n=3\cdot2^{n-1}\text{ for }n\ge1 == a_n=3\cdot2^{n-1}
        a_n=3\cdot2^{n-1}\ (n=1,2,3,\ldots) == a_n=3\cdot2^{n-1}
        a_n=3\cdot2^{n}\text{ for }n\ge1 != a_n=3\cdot2^{n-1}
        f(n)=2n\text{ for all integers }n\ge0 == f(n)=2n
        f(n)=3n\text{ for all integers }n\ge0 != f(n)=2n
        \text{f(x) = 2x for all real x} == f(x)=2x
        \text{f(x) = 3x for all real x} != f(x)=2x
        \frac{x+1}{x-1},\ x\neq1 == \frac{x+1}{x-1}
        \frac{x+1}{x-1}\text{ for }x\ne1 == \frac{x+1}{x-1}
        \frac{x+1}{x-1} == \frac{x+1}{x-1}, x\neq1
        \frac{x-1}{x+1},\ x\neq1 != \frac{x+1}{x-1}
        y=\frac1{x-1}, x\ne2 != y=\frac1{x-1}, x\ne1
        x>2, x\ne3 != x>2
        x=3, y\ne2 != x=3
        xy=1, x\ne0 != xy=1
        x>2\text{ for }x\ne3 != x>2
    """,
    "names with one value": r"""
        x=y=z=1 == (1,1,1)
        x=y=z=1 == x=1,y=1,z=1
        x=y=z=1 == (x,y,z)=(1,1,1)
        a=b=2 == (a,b)=(2,2)
        x=y=1 != (1,1,1)
        x=y=z=1 != (1,1,2)
        a=b=2 != (2,3)
        AB=CD=5 == 5
        (m,n)\in\{(1,1),(2,3)\} == (1,1),(2,3)
        (m,n)\in\{(1,1),(2,3)\} == (m,n)=(2,3)\text{ or }(m,n)=(1,1)
        (m,n)\in\{(1,1),(3,2)\} != (1,1),(2,3)
        (m,n)\in\{(1,1)\} != (1,1),(2,3)
    """,
    "whole numbers in words": r"""
        \text{all integers greater than }5 == n>5, n\in\mathbb Z
        \text{all integers at least }6 == n>5, n\in\mathbb Z
        \text{all integers greater than or equal to }5 != n>5, n\in\mathbb Z
        \text{all integers }n\ge2 == n\in\mathbb{Z},n\ge2
        1\le n\le4 == \{1,2,3,4\}
        1\le n\le5 != \{1,2,3,4\}
        1\le x\le4 != \{1,2,3,4\}
        \text{all integers }n\ge3 != n\ge2
        \text{all integers }n\ge2 != x\ge2
        \text{all real }x\ge2 == x\ge2
        (5,\infty)\cap\mathbb{Z} == n>5, n\in\mathbb Z
        (6,\infty)\cap\mathbb{Z} != n>5, n\in\mathbb Z
        \text{odd integers} == \text{all odd integers }n
        \text{even integers} != \text{all odd integers }n
        \text{all primes} == p\text{ prime}
        n\text{ is divisible by }3 == 3\mid n
        n\text{ is divisible by }6 != 3\mid n
        n\mid3 != 3\mid n
        \text{all }n\text{ not divisible by }3 == n\not\equiv0\pmod3
        \text{all }n\text{ not divisible by }3 == n\equiv1,2\pmod3
        3\nmid n == n\not\equiv0\pmod3
        3\nmid n != n\not\equiv1\pmod3
        n=4k\text{ or }n=4k+1 == n\equiv0,1\pmod4
        n=6k\pm1 == n\equiv1,5\pmod6
        n=6k\pm1 != n\equiv1,4\pmod6
        n=6k+1 != n\equiv1,5\pmod6
        3\bmod7 == 3
        3\pmod7 == 3
        10\pmod7 != 3
        3 != 3\pmod7
        x=\pm\frac\pi3+2\pi n == x=2k\pi\pm\frac\pi3, k\in\mathbb Z
        x=\pm\frac\pi4+2\pi n != x=2k\pi\pm\frac\pi3, k\in\mathbb Z
        x=\frac\pi3+2\pi n != x=2k\pi\pm\frac\pi3, k\in\mathbb Z
    """,
    "conclusions": r"""
        \text{isosceles triangle} == \text{isosceles}
        \text{an isosceles right triangle} != \text{isosceles}
        \text{The function is odd} == \text{odd}
        \text{The function is even} != \text{odd}
        \text{neither even nor odd} == \text{neither}
        \text{neither even nor odd} != \text{neither increasing nor decreasing}
        \text{both} != \text{neither}
        \text{infinitely many} == \infty
        \text{no solution} != \infty
        \text{circle with center }(1,2)\text{ and radius }3 == (x-1)^2+(y-2)^2=9
        \text{circle with center }(2,1)\text{ and radius }3 != (x-1)^2+(y-2)^2=9
        \text{circle with center }(1,2)\text{ and radius }9 != (x-1)^2+(y-2)^2=9
        \int e^{2x}dx=\frac12e^{2x}+C == \frac{e^{2x}}2+C
        \int e^{2x}dx=e^{2x}+C != \frac{e^{2x}}2+C
        -\cos x+\text{constant} == -\cos x+C
        \cos x+\text{constant} != -\cos x+C
        O(n\log n) == \mathcal{O}(n\log n)
        O(n^2) != \mathcal{O}(n\log n)
        \sim2.7 == 2.7
        \sim\frac{n^2}2 == \frac{n^2}2
        \sim n^2 != \frac{n^2}2
    """,
    "predicates": r"""
        \text{The matrix is not invertible} == \text{not invertible}
        \text{The matrix is invertible} != \text{not invertible}
        \text{They are equal} == \text{equal}
        \text{They are not equal} != \text{equal}
        \text{trigonal planar geometry} == \text{Trigonal planar}
        \text{trigonal pyramidal geometry} != \text{trigonal planar}
        \text{the second one} == \text{second}
        \text{the first one} != \text{second}
        \text{Alice is the winner} == \text{Alice}
        \text{Alice is not the winner} != \text{Alice}
        \text{fail to reject }H_0 == \text{do not reject the null hypothesis}
        \text{reject }H_0 != \text{do not reject the null hypothesis}
        \text{increasing on }(0,2) == (0,2)
        \text{increasing on }(0,2) != \text{decreasing on }(0,2)
        \text{All solutions are }x=1, x=3 == x=1,3
        \text{The inverse is }f^{-1}(x)=\frac{x+1}{2} == f^{-1}(x)=\frac{x+1}{2}
        \text{The inverse is }f^{-1}(x)=\frac{x-1}{2} != f^{-1}(x)=\frac{x+1}{2}
        \text{His average speed was }60\text{ km/h} == 60\text{ km/h}
        \text{His average speed was not }60\text{ km/h} != 60\text{ km/h}
        \text{all }n\text{ of the form }3k+1 == n\equiv1\pmod3
        \text{all }n\text{ of the form }3k+2 != n\equiv1\pmod3
        2^k\text{ for nonnegative integers }k == n=2^k,\ k\ge0
        2^k\text{ for positive integers }k != n=2^k,\ k\ge0
        X\sim N(5,4) == N(5,4)
        X\sim N(4,5) != N(5,4)
        P(X>2)=0.32 == 0.32
        P(X>2)=0.68 != 0.32
        P(X>2)=0.32 != P(X>3)=0.32
    """,
    "values of Python and other notation": r"""
        (-oo, 2) == (-\infty,2)
        (-oo, 2] != (-\infty,2)
        floor(n/2) == \lfloor n/2\rfloor
        ceil(n/2) != \lfloor n/2\rfloor
        Abs(x) == |x|
        binomial(n,2) == \binom n2
        -1/2 + sqrt(3)*I/2 == \frac{-1+i\sqrt3}{2}
        1/2 + sqrt(3)*I/2 != \frac{-1+i\sqrt3}{2}
        [1, 2, 3] == 1,2,3
        [2, 1, 3] != 1,2,3
        \ge5 == x\ge5
        >5 != x\ge5
        \ge5 != 5
        y^{\prime\prime}+4y=0 == y''+4y=0
        y^{\prime\prime}+4y=0 != y'+4y=0
        3\hat{i}-4\hat{j} == 3\hat{\imath}-4\hat{\jmath}
        3\hat{i}+4\hat{j} != 3\hat{\imath}-4\hat{\jmath}
        -\frac{13.6\text{ eV}}{n^2} == -\frac{13.6}{n^2}\text{ eV}
        -\frac{13.6\text{ keV}}{n^2} != -\frac{13.6}{n^2}\text{ eV}
        50\text{ dollars per hour} == \$50
        50\text{ dollars per hour} != 50\text{ dollars per day}
        60\text{ km/h} != 60\text{ km}
        x=-1\text{ (double root)}, x=2 == -1,2
        x=-1\text{ (double root)}, x=3 != -1,2
        \text{approximately }\$4200 == \$4200
        \text{approximately }\$4300 != \$4200
    """,
    "lines and constants": r"""
        \frac{x-1}2=\frac y3=\frac{z+1}{-1} == (x,y,z)=(1+2t,3t,-1-t)
        \frac{x-1}2=\frac y3=\frac{z-1}{-1} != (x,y,z)=(1+2t,3t,-1-t)
        \frac{x-1}2=\frac y3=\frac{z+1}{-1} == \frac{x+1}2=\frac{y+3}3=\frac z{-1}
        \frac{x-1}2=\frac y3=\frac{z+1}{-1} != \frac{x+1}2=\frac{y+3}3=\frac{z+1}{-1}
        x^2+y^2=Cy == x^2+y^2=cy
        x^2+y^2=Cy != x^2+y^2=cx
        C_1+C_2e^{-x}+C_3xe^{-x} == y=c_1+c_2e^{-x}+c_3xe^{-x}
        C_1+C_2e^{-x}+C_3xe^{x} != y=c_1+c_2e^{-x}+c_3xe^{-x}
        \text{a circle of radius 3 centered at the origin} == x^2+y^2=9
        \text{a circle of radius 9 centered at the origin} != x^2+y^2=9
    """,
    "reasons and equal values": r"""
        x=2\text{ since }x>0 == 2
        5\text{ because it is not }6 != 6
        12\text{, because there are 3 rows of 4} == 12
        \text{True, because }f(0)=0 == \text{True}
        \text{No, since }5\text{ is prime} != 5
        x>2\text{ since }y<1 == x>2
        x>2\text{ since }y<1 != x>1
        \frac12\text{ or equivalently }0.5 == \frac12
        \frac12\text{ or equivalently }0.6 != \frac12
        \frac12\text{, i.e., }50\% == \frac12
        \sqrt{10}\ (\approx 3.16) == \sqrt{10}
        \sqrt{10}\ (\approx 3.26) != \sqrt{10}
        \text{either }x=1\text{ or }x=2 == 1,2
        \text{either }1\text{ or }2 != 1
        \text{It falls on a Tuesday} == \text{Tuesday}
        \text{It does not fall on a Tuesday} != \text{Tuesday}
        \text{The graph must be a hyperbola} == \text{hyperbola}
        \text{The graph must not be a hyperbola} != \text{hyperbola}
        \text{The winner is not Alice} != \text{Alice}
    """,
    "lists of letters": r"""
        A, B, D != B, D
        B, D != A, B, D
        a, b, c != b, c
        A, C != C
        A, B, D == D, A, B
        A, B, D == \text{A, B, D}
        \text{a large sphere} == \text{the large sphere}
    """,
    "sets and functions in words": r"""
        \text{all positive even integers} == \{2,4,6,\ldots\}
        \text{all positive odd integers} != \{2,4,6,\ldots\}
        \{2,4,6,8,\ldots\} == \{2,4,6,\ldots\}
        \{2,4,8,\ldots\} != \{2,4,6,\ldots\}
        \{1,2,3,\ldots\} == \text{all positive integers}
        \{0,1,2,3,\ldots\} != \text{all positive integers}
        \text{all negative integers} == \{-1,-2,-3,\ldots\}
        \text{the interval from 2 to 5, inclusive} == [2,5]
        \text{the interval from 2 to 5, inclusive} != (2,5)
        \text{numbers less than }-3\text{ or greater than }3 == |x|>3
        \text{numbers less than }-3\text{ or greater than }2 != |x|>3
        x\text{ can be any real number except }2 == x\ne2
        x\text{ can be any real number except }3 != x\ne2
        \text{all }x\text{ with }x>3 == x>3
        \text{no values of }x == \emptyset
        \{(x,y)\in\mathbb{R}^2:x^2+y^2=1\} == x^2+y^2=1
        \{(x,y)\in\mathbb{R}^2:x^2+y^2=2\} != x^2+y^2=1
        \text{the identity function} == f(x)=x
        \text{the identity function} != f(x)=1
        \text{The zero function} == f(x)=0
        f\equiv0\text{ and }f(x)=x == f(x)=0, f(x)=x
        f(n)=n+1\text{ for all }n\in\mathbb N == f(n)=n+1
        f(x)=ax+b\ (a,b\in\mathbb R) == f(x)=mx+c
        f(x)=ax^2+b\ (a,b\in\mathbb R) != f(x)=mx+c
        \text{only }f(x)=x == f(x)=x
        f(x)=x\text{ is the only solution} == f(x)=x
        f(x)=2x\text{ is the only solution} != f(x)=x
        x=30^\circ+360^\circ n == x=30^{\circ}+360^{\circ}k
        x=30^\circ+180^\circ n != x=30^{\circ}+360^{\circ}k
        x=\frac\pi2+\pi k,\ k\text{ an integer} == \frac\pi2+n\pi
        x=\frac\pi2+2\pi k,\ k\text{ an integer} != \frac\pi2+n\pi
    """,
    "matrices, groups, figures and atoms": r"""
        \begin{pmatrix}x\\y\end{pmatrix}=s\begin{pmatrix}1\\2\end{pmatrix} == (t,2t)
        \begin{pmatrix}x\\y\end{pmatrix}=s\begin{pmatrix}2\\1\end{pmatrix} != (t,2t)
        A^{-1}=\frac12\begin{pmatrix}4&-2\\-3&1\end{pmatrix} == [[2,-1],[-3/2,1/2]]
        A^{-1}=\begin{pmatrix}4&-2\\-3&1\end{pmatrix} != [[2,-1],[-3/2,1/2]]
        N^{-1}=5 != 5
        PDP^{-1} == P D P^{-1}
        P^{-1}DP != P D P^{-1}
        \text{identity matrix} == \begin{pmatrix}1&0\\0&1\end{pmatrix}
        \text{identity matrix} != \begin{pmatrix}1&0\\0&2\end{pmatrix}
        \text{isomorphic to }S_3 == S_3
        \text{isomorphic to }S_4 != S_3
        GL_2(\mathbb{F}_3) == \mathrm{GL}(2,\mathbb{F}_3)
        GL_2(\mathbb{F}_2) != \mathrm{GL}(2,\mathbb{F}_3)
        \text{quaternion group} == Q_8
        AB\perp AC == \overline{AB}\perp\overline{AC}
        AB\parallel AC != \overline{AB}\perp\overline{AC}
        AB\perp AD != \overline{AB}\perp\overline{AC}
        ABCD\text{ is a square} == \text{square}
        ABCD\text{ is not a square} != \text{square}
        \text{first order} == \text{first-order}
        i != -i
        \text{sp}^2\text{ hybridized} == sp^2
        \text{sp}^3\text{ hybridized} != sp^2
        \text{oxidation state }+6 == +6
        \text{oxidation state }-6 != +6
        E^\circ=+1.10\text{ V} == 1.10\text{ V}
        E^\circ=-1.10\text{ V} != 1.10\text{ V}
    """,
    "numbers and figures in other languages": r"""
        \text{等腰三角形} == \text{isosceles triangle}
        \text{等边三角形} != \text{isosceles triangle}
        \text{偶数} == \text{even}
        \text{奇数} != \text{even}
        25\text{ Prozent} == 25\%
        5\text{ единиц} == 5
        x=3\text{（舍去 }x=-1\text{）} == 3
        x=3\text{（舍去 }x=-1\text{）} != -1
    """,
    "remarks and units": r"""
        x=7\text{ (the only solution)} == 7
        x=8\text{ (the only solution)} != 7
        5.2\text{ (to 2 s.f.)} == 5.2
        5.2\text{ (approx.)} == 5.2
        5.3\text{ (approx.)} != 5.2
        5\text{ (m/s)} == 5\text{ m/s}
        5\text{ (m)} != 5\text{ m/s}
        12\text{ (units}^2) == 12
        5\text{ only if }x>2 != 5
        \text{exactly }2\text{ solutions} == 2
        \text{exactly }2\text{ solutions} != 3
        \text{a total of }12\text{ ways} == 12
        \text{more than }2\text{ solutions} != 2
        \text{USD }50 == \$50
        US\$50 == \$50
        US\$50 != 50\text{ euros}
        \SI{12}{\newton} == 12\text{ N}
        \SI{9.8}{\metre\per\second\squared} == 9.8\text{ m/s}^2
        \SI{9.8}{\metre\per\second} != 9.8\text{ m/s}^2
        \SI{3}{\kilo\gram} == 3\text{ kg}
        \SI{3}{\kilo\gram} != 3\text{ g}
    """,
    "matrices": r"""
        I_2 == \begin{pmatrix}1&0\\0&1\end{pmatrix}
        I_3 != \begin{pmatrix}1&0\\0&1\end{pmatrix}
        I == \begin{pmatrix}1&0\\0&1\end{pmatrix}
        2I_2 == \begin{pmatrix}2&0\\0&2\end{pmatrix}
        2I_3 != \begin{pmatrix}2&0\\0&2\end{pmatrix}
        (1,0,0)+t(0,1,1) == (1,t,t)
        (1,0,0)+t(0,1,2) != (1,t,t)
        (1,0,0)+t(0,1,1) != (t,t,t)
        \begin{cases}n/2,&n\text{ even},\\(n-1)/2,&n\text{ odd}\end{cases} == \lfloor n/2\rfloor
        \begin{cases}n/2,&n\text{ even},\\(n+1)/2,&n\text{ odd}\end{cases} != \lfloor n/2\rfloor
    """,
    "sets in other languages": r"""
        \text{所有实数} == \mathbb{R}
        \text{所有整数} != \mathbb{R}
        \text{alle reellen Zahlen} == \mathbb{R}
        \text{все действительные числа} == \mathbb{R}
        \text{пустое множество} == \emptyset
        \text{空集} == \emptyset
        \text{空集} != \mathbb{R}
        \text{no existe} == \text{DNE}
    """,
    "with the question": r"""
        a+b=17 == 17 ?? Find $a+b$ if $ab=12$.
        a+b=18 != 17 ?? Find $a+b$ if $ab=12$.
        a-b=17 != 17 ?? Find $a+b$.
        x+3=17 != 17 ?? Solve $x+3=20$.
        a+b=17 != 17 ?? Find $x$.
        x^2-1=x^2-1 != (x-1)(x+1) ?? Factor $x^2-1$.
        ABD == A, B, D ?? Select all that apply. A. one B. two C. three D. four
        A, B and D == ABD ?? Select all that apply. A. one B. two C. three D. four
        AB != A, B, D ?? Select all that apply. A. one B. two C. three D. four
        ABCD != A, B, D ?? Select all that apply. A. one B. two C. three D. four
        ABD != A, B, D ?? Find the area.
        3.14 == 3.142 ?? Round to two decimal places.
        3.15 != 3.142 ?? Round to two decimal places.
        3.1 != 3.142 ?? Round to two decimal places.
        3.14 != 3.142 ?? Find the area.
        24 == 23.7 ?? Give the mass to the nearest whole number.
        23 != 23.7 ?? Give the mass to the nearest whole number.
    """,
}


@pytest.mark.parametrize(("form", "is_same", "answer", "gold", "question"), pairs_of(FORMS))
def test_a_form_is_credited_for_its_own_value(form, is_same, answer, gold, question) -> None:
    assert grade(answer, gold, template="answer", question=question).correct == is_same


@pytest.mark.parametrize("modulus", range(2, 12))
def test_numbers_that_are_not_divisible_are_all_other_residues(modulus) -> None:
    residues = ",".join(map(str, range(1, modulus)))
    gold = rf"n\equiv {residues}\pmod{{{modulus}}}"
    for answer in (rf"{modulus}\nmid n", rf"n\text{{ is not divisible by }}{modulus}"):
        assert grade(answer, gold, template="answer").correct
        other = rf"n\equiv 0\pmod{{{modulus}}}"
        assert not grade(answer, other, template="answer").correct


@pytest.mark.parametrize("count", [2, 3, 4])
def test_letters_of_choices_are_a_set(count) -> None:
    question = "Which of the following are true? (A) one (B) two (C) three (D) four (E) five"
    for letters in itertools.combinations("ABCDE", count):
        gold = ", ".join(letters)
        for answer in ("".join(letters), " and ".join(letters), "(" + "), (".join(letters) + ")"):
            assert grade(answer, gold, template="answer", question=question).correct, answer
            others = ", ".join(sorted({*"ABCDE"} - {*letters}))
            assert not grade(answer, others, template="answer", question=question).correct


@pytest.mark.parametrize("end", ["-1", "}", r"\infty", " 5(", "!", "''"])
def test_prose_is_graded_in_linear_time(end) -> None:
    # A pattern with nested repetitions took 2 seconds for eight words, and twice that for nine.
    for num_words in (10, 40, 400):
        prose = "all real numbers less than or equal to something " * num_words
        answer = rf"\text{{{prose}}}" + end
        start = time.process_time()
        grade(answer, r"(-\infty,-1]", template="answer")
        grade("5", answer, template="answer", question=answer)
        assert time.process_time() - start < 1
