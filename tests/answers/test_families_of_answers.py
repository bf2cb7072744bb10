r"""Families of notation: pairs of answers that are the same, and near misses that are not.

A line is `answer == gold` or `answer != gold`, and may end with `?? question`. Each family has
pairs of both signs, so that a rule that is too wide fails as surely as one that is too narrow.
"""

import pytest
from pairs import pairs_of

from jzero.answers.verdict import grade

FAMILIES = {
    "the letter c beside a and b": r"""
        a+b-c != a+b+c
        2a-c != 2a+c
        a-c != a+c
        a + b - c + 3x != a + b + c + 3x
        a-b+2c != a-b-c
        a+b-c == b-c+a
        x^2-c == x^2+c
        \frac{x^3}{3}+c == \frac13x^3-c
        f(x)=ax-c == f(x)=ax+c
    """,
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
        AB-BA != BA-AB
        AB-BA == -(BA-AB)
        \hat i\times\hat j != \hat j\times\hat i
        \hat i\times\hat j == -\hat j\times\hat i
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
        A,C,B != A,B,C ?? In what order do they finish?
        A,B,C == A,B,C ?? In what order do they finish?
        2,1,3 != 1,2,3 ?? The numbers are given. Arrange them by size.
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
    "square brackets": r"""
        2[x+1] == 2x+2
        \left[\frac{n(n+1)}2\right]^2 == \frac{n^2(n+1)^2}4
        \frac n2[2a+(n-1)d] == \frac{n(2a+(n-1)d)}{2}
        2\{x+1\} == 2x+2
        3\left[(x+1)^2-4\right] == 3(x+1)^2-12
        \left[1+\left(\frac{x}{2}\right)^2\right]^{-1} == \frac{4}{4+x^2}
        e^{-[x+y]} == e^{-x-y}
        \sin\left[\frac{\pi x}{L}\right] == \sin\frac{\pi x}{L}
        \sqrt[3]{8x^3} == 2x
        \sqrt[3]{x} == x^{1/3}
        \sqrt[n]{x} == x^{1/n}
        [x+1] == x+1
        2[x+1] != 2x+1
        \left[\frac{n(n+1)}2\right]^2 != \frac{n^2(n+1)}4
        [0,1] != (0,1)
        [1,2] == [1,2]
        \{2\} == 2
        [2,3) != [2,3]
        [5] == 5
        [ABC]=12 == 12
        2[x+1]-[x-1] == x+3
        2[x+1]-[x-1] != x+1
    """,
    "choices with their text": r"""
        \text{(B) Anna and Ben} == B ?? Who won? (A) Anna (B) Anna and Ben (C) Ben
        \text{(B) Anna and Ben} == B
        \text{C. 3 and 4} == C
        \text{C. 3 and 4} == C ?? Which are roots? A. 1 B. 2 C. 3 and 4 D. 5
        \text{B. It is not zero} == B
        \text{B. It is not zero} == B ?? Which holds? A. It is zero B. It is not zero
        \text{(D) None of the above} == D
        \text{D. 10^{-4} eV} == D ?? A. 10^{-11} eV B. 10^{-8} eV C. 10^{-9} eV D. 10^{-4} eV
        10^{-4} eV == D ?? A. 10^{-11} eV B. 10^{-8} eV C. 10^{-9} eV D. 10^{-4} eV
        10^{-8} eV != D ?? A. 10^{-11} eV B. 10^{-8} eV C. 10^{-9} eV D. 10^{-4} eV
        \text{Anna and Ben} == B ?? Who won? (A) Anna (B) Anna and Ben (C) Ben
        \text{Anna} != B ?? Who won? (A) Anna (B) Anna and Ben (C) Ben
        \text{Ben} == C ?? Who won? (A) Anna (B) Anna and Ben (C) Ben
        \text{(A) Anna and Ben} != B ?? Who won? (A) Anna (B) Anna and Ben (C) Ben
        \text{(B) Anna} != B ?? Who won? (A) Anna (B) Anna and Ben (C) Ben
        \text{(B) or (C)} != B
        \text{B or C} != B
        \text{B and C} != B
        \text{(B) Anna, (C) Ben} != B
        \text{B. Anna or C. Ben} != B
        \text{not B} != B
        \text{Answer: B} == B
        \text{B. a fall} == B ?? Now?\n(A) a rise\n(B) a fall\n(C) none\n(D) both A and B
        \text{a fall} == B ?? Now?\n(A) a rise\n(B) a fall\n(C) none\n(D) both A and B
        \text{a rise} != B ?? Now?\n(A) a rise\n(B) a fall\n(C) none\n(D) both A and B
        \text{both A and B} == D ?? Now?\n(A) a rise\n(B) a fall\n(C) none\n(D) both A and B
        B == \text{B. a fall} ?? Now?\n(A) a rise\n(B) a fall
        C == \text{Ben} ?? Who won? (A) Anna (B) Anna and Ben (C) Ben
        A != \text{Ben} ?? Who won? (A) Anna (B) Anna and Ben (C) Ben
        x^2+1 == A ?? Which is it? A) $x^2+1$ B) $x^2-1$
        1+x^2 == A ?? Which is it? A) $x^2+1$ B) $x^2-1$
        x^2-1 != A ?? Which is it? A) $x^2+1$ B) $x^2-1$
    """,
    "units of physics": r"""
        1.5\ \mu \mathrm{C} == 1.5
        1.5\ \mu\mathrm{C} == 1.5\text{ microcoulombs}
        1.5\ \mu \mathrm{C} == 1.5\ \mu\text{C}
        1.5\ \mu \mathrm{C} != 1.5\text{ nC}
        3.2 \mu m == 3.2\ \mu\text{m}
        100\ \Omega == 100
        100 \Omega == 100\text{ ohms}
        4.7\ \mathrm{k}\Omega == 4.7\text{ kΩ}
        9.8 m/s^2 == 9.8
        9.8\ \text{m}/\text{s}^2 == 9.8\ m/s^2
        9.8\text{ m s}^{-2} == 9.8\text{ m/s}^2
        9.8\text{ m/s} != 9.8\text{ m/s}^2
        154 \mathrm{pm} == 154
        154\text{ pm} == 154\text{ picometers}
        154\text{ pm} != 154\text{ nm}
        3\text{ pm} == 3:00\text{ PM}
        1.54\ \text{Å} == 1.54
        1.54 \AA == 1.54\ \mathrm{Å}
        1.54\ \mathring{A} == 1.54
        5.2\ \mathrm{AU} == 5.2
        12\text{ slugs} == 12
        101\ \mathrm{kPA} == 101
        101\ \mathrm{kPa} == 101\ \mathrm{kPA}
        3\times10^8\text{ m/s} == 3\times10^8
        0.5\text{ kg}\cdot\text{m}^2 == 0.5\text{ kg m}^2
        25^\circ\mathrm{C} == 25\ ^{\circ}\mathrm{C}
        2.5\ \mathrm{mol}^{-1} == 2.5
        8.314\ \mathrm{J\,mol^{-1}\,K^{-1}} == 8.314\text{ J/(mol K)}
        8.314\ \mathrm{J\,mol^{-1}\,K^{-1}} == 8.314
        8.314\ \mathrm{J\,mol^{-1}\,K^{-1}} != 8.314\text{ J/mol}
        13.6\ \mathrm{eV} == 13.6
        13.6 eV == 13.6\text{ eV}
        500\ \mathrm{cm}^{-1} == 500
        500\text{ cm}^{-1} != 500\text{ cm}
        3\ \mathrm{rev/min} == 3
        60\text{ rpm} == 60
        2\ \mathrm{dyn} == 2
        40\ \mathrm{dB} == 40
        7.2\text{ lb/ft}^3 == 7.2
        12\ \mathrm{W/(m^2 K)} == 12
        6\ \mathrm{D} == 6
        2.3\text{ g/mL} == 2.3\text{ g/cm}^3
        2.3\text{ g/mL} != 2.3\text{ kg/cm}^3
        5\text{ light-years} == 5
        1.2\ \mathrm{amu} == 1.2
        3\ \mathrm{ppm} == 3
    """,
    "free constants": r"""
        \frac{x^3}{3}+c == \frac13x^3+C
        \frac{x^3}{3}+K == \frac13x^3+C
        \frac12\sin^2x+C == -\frac14\cos2x+C
        -\frac12\cos^2x+C == \frac12\sin^2x+C
        \ln|2x|+C == \ln|x|+C
        \frac13x^3+C+1 == \frac13x^3+C
        \frac13x^3 != \frac13x^3+C
        \frac13x^3+C != \frac13x^3
        \frac13x^3+Cx != \frac13x^3+C
        \frac14x^3+C != \frac13x^3+C
        \frac13x^3+2C == \frac13x^3+C
        \frac13x^3+C^2 != \frac13x^3+C
        \frac13x^3+e^C != \frac13x^3+C
        y=Ae^{2x}+Be^{3x} == y=C_1e^{2x}+C_2e^{3x}
        y=C_1e^{3x}+C_2e^{2x} == y=C_1e^{2x}+C_2e^{3x}
        y=Ae^{2x}+Be^{4x} != y=C_1e^{2x}+C_2e^{3x}
        y=Ae^{2x}+Ae^{3x} != y=C_1e^{2x}+C_2e^{3x}
        y=e^{2x}+Be^{3x} != y=C_1e^{2x}+C_2e^{3x}
        y=A\cos x+B\sin x == y=c_1\sin x+c_2\cos x
        y=A\cos x+B\sin x == y=C_1\cos x-C_2\sin x
        y=A\cos(x+B) != y=c_1\sin x
        y=Ce^x == y=Ae^{x}
        y=Ce^x == y=2Ce^{x}
        y=Ce^x == y=Ce^{x+1}
        y=Ce^{x} != y=Ce^{2x}
        y=e^{x}+C != y=Ce^{x}
        y=(C_1+C_2x)e^x == y=C_1e^x+C_2xe^x
        y=(C_1+C_2x)e^x == y=Axe^x+Be^x
        y=C_1e^x+C_2e^{-x} == y=A\cosh x+B\sinh x
        y=C_1e^x+C_2e^{-x} != y=A\cosh x+B\cosh x
        y(t)=Ae^{-kt} == y=Ce^{-kt} ?? Solve $y'=-ky$.
        y=Ae^{-kt} != y=Ce^{-mt} ?? Solve $y'=-mt y$ with $k$ given.
        f(x)=cx == f(x)=kx
        f(x)=cx+1 != f(x)=kx
        f(x)=ax+b == f(x)=cx+d ?? Find all functions with f'' = 0.
        f(x)=ax == f(x)=cx ?? Find all continuous f with f(x+y)=f(x)+f(y).
        cx == kx ?? Find all continuous f with f(x+y)=f(x)+f(y).
        f(t)=2t+1 == f(x)=2x+1
        f(n)=n+1 == f(x)=x+1
        f(t)=2t+1 != f(x)=2x-1
        f(y)=yx != f(x)=xy
        f(x)=c != f(x)=cx
        x^2+y^2=C == x^2+y^2=c
        x^2+y^2=C != x^2-y^2=C
        \sqrt{x}+2+C == \sqrt{x}+C
        xe^x-e^x+C == (x-1)e^x+C
        xe^x+e^x+C != (x-1)e^x+C
        \frac{1}{2}\ln|x^2+1|+C == \ln\sqrt{x^2+1}+C
        ax+1 != cx+1
        x+k != x+m
        a+1 != b+1
        2a != 2b
        mx+b != nx+b
        \frac{k}{x} != \frac{c}{x}
        e^{kt} != e^{ct}
        f(x)=e^{-kx} != f(x)=e^{kx}
        f(x)=x-a != f(x)=x+a
        F(x)=-kx != F(x)=kx
        u(x,t)=\sin(x-ct) != u(x,t)=\sin(x+ct)
        u=f(x-ct) != u=f(x+ct)
        y=\frac1{x-C} == y=\frac{1}{x+C}
        y=Ce^{x} == y=-Ce^{x}
        2k != 2D ?? Let $D$ be the determinant of the matrix. Answer in terms of $D$.
        2k != 2D ?? Find the ratio.
        2c != 2d ?? Find the distance.
        k\pi == n\pi ?? Solve $\sin x=0$.
        C+1 != D+1
        A+B != C+D
        AB != CD
        \frac AB != \frac CD
        \alpha+1 != \beta+1
        x+A != x+B
        x+A != x-A
        n^2+A != n^2+B
        x+C != x+D
        y=C_1e^{x} != y=y_0e^{x} ?? Solve $y'=y$, $y(0)=y_0$.
        P(t)=Ce^{rt} != P(t)=P_0e^{rt} ?? The principal is $P_0$ and the rate $r$.
        y=C_1\cos t+C_2\sin t != y=x_0\cos t+v_0\sin t ?? Given are $x_0$ and $v_0$.
    """,
    "parametrized": r"""
        x=2\pi k,\ k\in\mathbb{Z} == x=2n\pi\ (n\in\mathbb{Z})
        x=2\pi k,\ k\in\mathbb{Z} == x=2n\pi
        x=\frac\pi4+k\pi, k\in\mathbb{Z} == x=\frac{\pi}{4}+n\pi\text{ for integer }n
        x=\frac\pi4+k\pi\text{ for any integer }k == x=\frac\pi4+n\pi, n\in\mathbb Z
        \{2\pi k:k\in\mathbb Z\} == x=2\pi k,k\in\mathbb Z
        \{2\pi k\mid k\in\mathbb Z\} == 2\pi n, n\in\mathbb Z
        x=k\pi, k\in\mathbb Z != x=2k\pi, k\in\mathbb Z
        x=\frac\pi4+k\pi, k\in\mathbb Z != x=\frac\pi4+2k\pi, k\in\mathbb Z
        x=\frac\pi4+k\pi, k\in\mathbb Z == x=\frac{5\pi}4+k\pi, k\in\mathbb Z
        x=k\pi\text{ where }k\text{ is an integer} == x=n\pi, n\in\mathbb Z
        x=k\pi\text{ where }k\text{ is an integer} != x=n\pi+1, n\in\mathbb Z
        (k,2k), k\in\mathbb Z == (n,2n), n\in\mathbb Z
        (k,2k) == (n,2n), n\in\mathbb Z
        (k,2k), k\in\mathbb Z != (n,3n), n\in\mathbb Z
        (k,-k), k\in\mathbb Z == (-n,n), n\in\mathbb Z
        (t,2t), t\in\mathbb R == (s,2s), s\in\mathbb R
        (2t,4t), t\in\mathbb R == (s,2s), s\in\mathbb R
        (2k,4k), k\in\mathbb Z != (n,2n), n\in\mathbb Z
        (t,2t+1), t\in\mathbb R != (s,2s), s\in\mathbb R
        (x,y)=(t,2t) == (s,2s)
        x=2\pi k != x=2\pi n+1
        x=k != x=2k, k\in\mathbb Z
        n=3k+1, k\in\mathbb Z == n=3m+1, m\in\mathbb Z
        n=3k+1, k\ge0 == n=3m+1, m\geq 0
        n=3k+1, k\ge0 != n=3m+1, m\in\mathbb Z
        n=3k+1, k\in\mathbb Z == n=3m-2, m\in\mathbb Z
        x=\pm\frac\pi3+2k\pi, k\in\mathbb Z == x=\pm\frac\pi3+2n\pi, n\in\mathbb Z
        x=\pm\frac\pi3+2k\pi, k\in\mathbb Z != x=\frac\pi3+2n\pi, n\in\mathbb Z
        \begin{pmatrix}1\\2\end{pmatrix}t == t\begin{pmatrix}1\\2\end{pmatrix}
        (1,0)+t(1,2) == (1,0)+s(1,2)
        (1,0)+t(1,2) == (2,2)+s(1,2)
        (1,0)+t(1,2) != (1,1)+s(1,2)
        (1+t,2t) == (2+s,2+2s)
        (1+t,2t) != (2+s,2s)
        x=1+2t,y=3t == x=1+2s,y=3s
        x=1+2t,y=3t != x=1+2s,y=4s
        x=2k, k\in\mathbb N != x=2k, k\in\mathbb Z
        n=2^k, k\ge1 != n=2^k, k\ge0
        (a,b) != (c,d) ?? Find the point.
        (a,0) != (c,0) ?? Find the focus.
        (0,k) != (0,m) ?? Find the intercept.
        (r,s) != (t,u)
        (t,t) == (s,s)
        mc^2 != mv^2 ?? What is the energy?
    """,
    "sets in words": r"""
        \text{all real numbers except }2 == x\neq 2
        \text{all real numbers except }2 == \mathbb{R}\setminus\{2\}
        \text{all real numbers except }x=2 == x\ne2
        \text{all real numbers except 1 and 2} == x\neq1,2
        \text{all real numbers except 1 and 2} != x\neq1
        \text{all real numbers except }2 != x\neq 3
        \text{all real }x\neq2 == x\ne 2
        \text{all reals} == \mathbb R
        \text{all real numbers} == (-\infty,\infty)
        x\in\mathbb R == \text{all real numbers}
        \text{every real number} == \mathbb R
        \text{any real number} == \mathbb R
        \text{all positive real numbers} == (0,\infty)
        \text{all positive real numbers} == x>0
        \text{all positive reals} != x\ge0
        \text{all nonnegative real numbers} == [0,\infty)
        \text{all negative numbers} == x<0
        \text{all nonzero real numbers} == x\ne0
        \text{all integers} == \mathbb Z
        \text{all positive integers} == \mathbb{Z}^+
        \text{all positive integers} == \mathbb{N}^+ 
        \text{all positive integers} != \mathbb Z
        \text{all natural numbers} == \mathbb N
        \text{at least 5} == x\ge5
        \text{at least }5 == [5,\infty)
        \text{at most }5 == x\le5
        \text{more than }5 == x>5
        \text{less than }5 == x<5
        \text{greater than or equal to }5 == x\ge5
        \text{less than or equal to }5 == x\leq 5
        \text{at least }5 != x>5
        \text{at least }5 != 5
        \text{at most }5 != x\ge5
        x\text{ is at least }5 == x\ge5
        x\text{ is greater than }2 == x>2
        x\text{ is positive} == x>0
        x\text{ is nonnegative} == x\ge0
        \text{between 2 and 5} == 2<x<5
        \text{between 2 and 5, inclusive} == 2\le x\le5
        \text{between 2 and 5} != 2\le x\le6
        n\text{ is odd} == \text{odd }n
        \text{odd} == n\text{ is odd}
        \text{all odd }n == n\text{ odd}
        \text{all even integers} == n\text{ is even}
        n\text{ is even} != n\text{ is odd}
        \text{all odd numbers} != \text{all even numbers}
        \text{multiples of 3} == n\equiv0\pmod3
        \text{all multiples of }3 == \text{multiples of }3
        \text{all multiples of }3 != n\equiv0\pmod6
        n\text{ is divisible by }3 == n\equiv0\pmod 3
        n\text{ is even} == n\equiv0\pmod2
        \text{all real numbers greater than }3 == x>3
        \text{all real numbers greater than }3 == (3,\infty)
        \text{all real numbers less than }3 != x>3
        \text{all prime numbers} == \text{the primes}
        \text{no real solutions} == \emptyset
        \text{no solution} == \text{There is no solution}
        \mathbb R^+ == (0,\infty)
        \mathbb R_{>0} == (0,\infty)
        \mathbb R^+ != \mathbb R
        \mathbb{R}^- == (-\infty,0)
        \mathbb R_{\ge 0} == [0,\infty)
        \mathbb R^{*} == \mathbb R\setminus\{0\}
    """,
    "conclusions in words": r"""
        \text{Yes, it converges} == \text{Yes}
        \text{Yes, because the series is geometric} == \text{Yes}
        \text{Yes. The limit exists.} == \text{Yes}
        \text{Yes it does} == \text{Yes}
        \text{No, it does not} == \text{No}
        \text{No.} == \text{no}
        No. == no
        \text{YES} == \text{yes}
        \text{No, it diverges} != \text{Yes}
        \text{Yes} != \text{No}
        \text{Yes and no} != \text{Yes}
        \text{Yes or no} != \text{Yes}
        \text{Not yes} != \text{Yes}
        \text{Yes, but no} != \text{Yes}
        \text{Maybe yes} != \text{Yes}
        \text{No, yes} != \text{No}
        \text{True, since } n \text{ is even} == \text{True}
        \text{The statement is true} == \text{True}
        \text{The statement is false} == \text{False}
        \text{The statement is not true} != \text{True}
        \text{It is true} == \text{True}
        \text{It is not true} != \text{True}
        \text{False, the limit is 0} == \text{False}
        \text{The limit does not exist} == \text{DNE}
        \text{does not exist} == \text{DNE}
        \text{The limit exists} != \text{DNE}
        \text{undefined} == \text{does not exist}
        \text{Alice wins} == \text{Alice}
        \text{Alice} == \text{Alice wins}
        \text{Alice loses} != \text{Alice}
        \text{Alice does not win} != \text{Alice}
        \text{Bob wins} != \text{Alice}
        \text{the first player} == \text{first player}
        \text{The first player wins} == \text{first player}
        \text{The second player wins} != \text{first player}
        \text{The series converges} == \text{converges}
        \text{It converges} == \text{converges}
        \text{It diverges} != \text{converges}
        \text{convergent} == \text{converges}
        \text{The series diverges} == \text{divergent}
        \text{absolutely convergent} != \text{conditionally convergent}
        \text{converges conditionally} == \text{conditionally convergent}
        \text{No such function exists} == \text{No such function}
        \text{There are no such integers} == \text{no such integers}
        \text{does not exist} == \text{no such } n
        \text{infinitely many} == \text{There are infinitely many solutions}
        \text{infinitely many} != \text{finitely many}
        \text{Tuesday} == \text{It is Tuesday}
        \text{on Tuesday} == \text{Tuesday}
        \text{not Tuesday} != \text{Tuesday}
        \text{an ellipse} == \text{The curve is an ellipse}
        \text{a hyperbola} != \text{The curve is an ellipse}
        \text{yes, if }n\text{ is even} != \text{yes}
        \text{no, it is only true when }n=2 != \text{no}
        \text{yes, it converges provided }p>1 != \text{yes}
        \text{Yes: it does not} != \text{Yes}
        \text{Yes, it isn't} != \text{Yes}
        \text{Yes, they cannot} != \text{Yes}
        \text{No, it does} != \text{No}
        \text{No, it diverges.} == \text{No}
        \text{No, it cannot} == \text{No}
        \text{Yes, it can} == \text{Yes}
        \text{Yes, the limit does not exist.} == \text{Yes}
    """,
    "other languages": r"""
        x=2\text{ oder }x=3 == x=2,3
        2\text{ oder }3 == 2,3
        x=2\text{ ou }x=3 == x=2,3
        x=2\text{ y }x=3 == x=2,3
        2\text{ und }3 == 2,3
        2\text{ et }3 == 2,3
        2\text{ или }3 == 2,3
        x=2或x=3 == x=2,3
        2和3 == 2,3
        2、3 == 2,3
        2 oder 4 != 2,3
        12个 == 12
        12元 == 12
        12厘米 == 12
        12 см == 12
        12 рублей == 12
        12 Euro == 12
        12 Stück == 12
        13个 != 12
        无解 == \text{no solution}
        keine Lösung == \emptyset
        \text{keine Lösung} == \text{no solution}
        \text{нет решений} == \emptyset
        \text{no hay solución} == \emptyset
        \text{pas de solution} == \emptyset
        \text{sin solución} == \emptyset
        无解 != 0
        Ответ: 5 == 5
        答え：5 == 5
        答案：5 == 5
        答案是5 == 5
        \text{Antwort: }5 == 5
        \text{Die Antwort ist }5 == 5
        \text{La réponse est }5 == 5
        \text{Réponse : }5 == 5
        \text{Respuesta: }5 == 5
        \text{La respuesta es }5 == 5
        Ответ: 6 != 5
        12,5\% == 12.5\%
        12,5\% != 125\%
        3,14 == 3.14
        \text{ja} == \text{Ja}
        是 == \text{Yes}
        \text{Ja} == \text{yes}
        \text{Nein} == \text{no}
        \text{да} == \text{yes}
        \text{нет} == \text{no}
        \text{Sí} == \text{yes}
        \text{Oui} == \text{yes}
        \text{Nein} != \text{yes}
        对 == \text{True}
        \text{wahr} == \text{True}
        \text{falsch} != \text{True}
    """,
    "logarithms": r"""
        \log_25 == \log_2 5
        \log_{2}5 == \log_25
        \log_25 != \log_2 6
        \log_{10}5 == \lg 5
        \log_35+1 == 1+\log_3 5
        \log_2{5} == \log_25
        \log_2(x+1) == \log_2(1+x)
        \frac{\ln5}{\ln2} == \log_25
        \frac{\log 5}{\log 2} == \log_2 5
        \log_{25} x != \log_2 5x
        \ln x^2 != (\ln x)^2
        \ln^2x == (\ln x)^2
        \log^2 x == (\log x)^2
        \log_{\frac12}x == -\log_2x
        \log_ax == \frac{\ln x}{\ln a}
        3\log_24 != 3\log_2 5
        \log_2 3\cdot\log_3 4 == \log_2 4
        \log_{b}a == \frac1{\log_{a}b}
        \ln\ln x != (\ln x)^2
        -\ln\frac1x == \ln x
        a_1b_2 == b_2a_1
    """,
    "chemistry": r"""
        \ce{H2O} == \mathrm{H_2O}
        H_2O == \mathrm{H_2O}
        \text{H}_2\text{O} == \ce{H2O}
        \mathrm{H}_2\mathrm{O} == \text{H}_2\text{O}
        H2O == \text{H}_2\text{O}
        \ce{CO2} != \mathrm{H_2O}
        \ce{H2O2} != \ce{H2O}
        \mathrm{Ca(OH)_2} == \text{Ca(OH)}_2
        \ce{Ca(OH)2} == \text{Ca(OH)}_2
        \ce{CaOH2} != \ce{Ca(OH)2}
        \ce{Fe^3+} == \mathrm{Fe}^{3+}
        \ce{Fe^{3+}} == \mathrm{Fe^{3+}}
        \ce{Fe^2+} != \mathrm{Fe}^{3+}
        \ce{SO4^2-} == \mathrm{SO_4^{2-}}
        \ce{SO4^2-} == \mathrm{SO}_4^{2-}
        \ce{Na+} == \mathrm{Na}^+
        \ce{Na+} != \mathrm{Na}
        \ce{CH3COOH} == \mathrm{CH_3COOH}
        \ce{C6H12O6} == C_6H_{12}O_6
        \ce{C6H12O6} != C_6H_{12}O_5
        \mathrm{CO} != \mathrm{Co}
        \ce{2H2 + O2 -> 2H2O} == 2\mathrm{H_2}+\mathrm{O_2}\rightarrow2\mathrm{H_2O}
        \ce{O2 + 2H2 -> 2H2O} == \ce{2H2 + O2 -> 2H2O}
        \ce{2H2O -> 2H2 + O2} != \ce{2H2 + O2 -> 2H2O}
        \ce{H2 + O2 -> H2O} != \ce{2H2 + O2 -> 2H2O}
        \ce{^{14}C} == {}^{14}\mathrm{C}
        \ce{^{14}C} != {}^{12}\mathrm{C}
        \ce{NH3} == NH_3
        \ce{NH4+} != NH_3
        \ce{H2 + I2 <=> 2HI} != \ce{H2 + I2 -> 2HI}
        \ce{H2 + I2 <=> 2HI} == \mathrm{H_2}+\mathrm{I_2}\rightleftharpoons2\mathrm{HI}
        \ce{CaCO3(s)} != \ce{CaCO3(aq)}
        \ce{H2O(l)} != \ce{H2O(g)}
        \ce{H2O(l)} == \mathrm{H_2O}
        \ce{Na+(aq)} == \mathrm{Na}^+(aq)
    """,
    "groups": r"""
        \mathbb{Z}_2\times\mathbb{Z}_3 == \mathbb{Z}_3\times\mathbb{Z}_2
        \mathbb{Z}/6\mathbb{Z} == \mathbb{Z}_6
        \mathbb{Z}/6 == \mathbb{Z}_6
        C_6 == \mathbb{Z}_6
        C_6 == \mathbb Z/6\mathbb Z
        \mathbb{Z}_2\times\mathbb{Z}_3 == \mathbb{Z}_6
        \mathbb{Z}_2\times\mathbb{Z}_2 != \mathbb{Z}_4
        \mathbb{Z}_2\oplus\mathbb{Z}_4 == \mathbb{Z}_2\times\mathbb{Z}_4
        \mathbb{Z}\oplus\mathbb{Z} == \mathbb{Z}^2
        \mathbb{Z}\times\mathbb{Z} == \mathbb{Z}^2
        \mathbb{Z}\oplus\mathbb{Z}_2 == \mathbb{Z}\times\mathbb{Z}/2\mathbb{Z}
        \mathbb{Z}\oplus\mathbb{Z}_2 != \mathbb{Z}\oplus\mathbb{Z}_3
        \mathbb{Z}^2 != \mathbb{Z}^3
        S_3 == S_3
        S_3 != S_4
        S_3 != A_3
        D_4 != D_8
        G\cong S_3 == S_3
        G\cong\mathbb{Z}_6 == \mathbb Z/6\mathbb Z
        (1\ 2\ 3) == (2\ 3\ 1)
        (123) == (1\ 2\ 3)
        (1\ 2\ 3) != (1\ 3\ 2)
        (1\ 2)(3\ 4) == (3\ 4)(1\ 2)
        (12)(34) == (34)(12)
        (1\ 2)(2\ 3) != (2\ 3)(1\ 2)
        GL_2(\mathbb R) != SL_2(\mathbb R)
        \mathbb{F}_2 == \mathbb{F}_2
        \mathbb{F}_2 != \mathbb{F}_4
        \langle a,b\mid a^2=b^3=1\rangle == \langle a,b | a^2=b^3=1\rangle
        (123)(12) != (12)(123)
        (12)(13) != (13)(12)
        (12)(34) == (34)(12)
    """,
    "relations of geometry": r"""
        AB\perp CD == CD\perp AB
        AB\perp CD == BA\perp DC
        AB\perp CD != AB\parallel CD
        AB\parallel CD == CD\parallel AB
        AB\parallel CD == AB \| CD
        AB\parallel CD != AC\parallel BD
        A(1,2) == (1,2)
        P=(1,2) == (1,2)
        P(1,2) == (1,2)
        A(1,2) != (2,1)
        A(1,2),B(3,4) == A=(1,2),B=(3,4)
        AB=BA == BA=AB
        AB=CD == CD=AB
        AB=CD == BA=CD
        \overline{AB}\cong\overline{CD} == \overline{CD}\cong\overline{AB}
        \triangle ABC\cong\triangle DEF == \triangle DEF\cong\triangle ABC
        \triangle ABC\cong\triangle DEF == \triangle BCA\cong\triangle EFD
        \triangle ABC\cong\triangle DEF != \triangle ABC\cong\triangle DFE
        \triangle ABC\sim\triangle DEF == \triangle DEF\sim\triangle ABC
        \triangle ABC\sim\triangle DEF != \triangle ABC\cong\triangle DEF
        \angle ABC == \angle CBA
        \angle ABC != \angle BAC
        \angle A=60^\circ == 60^\circ
        \triangle ABC == \triangle BCA
        \text{the line }AB == \text{line }AB
        \overrightarrow{AB} == \vec{AB}
        \overrightarrow{AB} != \overrightarrow{BA}
        \overline{AB} == \overline{BA}
        y=\pm\frac34x == 3x\pm4y=0
        y=\pm\frac34x != 4x\pm3y=0
        3x+4y=0 != 3x-4y=0
        l\perp m == m\perp l
        l\perp m != l\parallel m
        |AB| == |BA|
        AB\cdot CD != AC\cdot BD
        AB\cdot CD == DC\cdot AB
        \frac{AB}{CD} != \frac{AC}{BD}\cdot\frac{BB}{CC}
    """,
    "set builder": r"""
        \{2k:k\in\mathbb Z\} == 2\mathbb{Z}
        \{2k\mid k\in\mathbb Z\} == \{2n\mid n\in\mathbb Z\}
        \{2k:k\in\mathbb Z\} == \text{all even integers}
        \{2k+1:k\in\mathbb Z\} == \text{odd integers}
        \{2k+1:k\in\mathbb Z\} == \{2k-1:k\in\mathbb Z\}
        \{2k+1:k\in\mathbb Z\} != 2\mathbb Z
        \{3k:k\in\mathbb Z\} != 2\mathbb Z
        \{x\in\mathbb R:x>2\} == (2,\infty)
        \{x\mid x>2\} == x>2
        \{x:x\ne2\} == \mathbb R\setminus\{2\}
        \{x\in\mathbb R\mid x\neq 1,2\} == \mathbb R\setminus\{1,2\}
        \{x\in\mathbb R:x>2\} != [2,\infty)
        \{x\in\mathbb Z:1\le x\le3\} == \{1,2,3\}
        \{n\in\mathbb N:n\le3,n\ge1\} == \{1,2,3\}
        \{x\in\mathbb Z:1\le x\le3\} != [1,3]
        \{x:x^2=4\} != \{2\}
        \{1,\dots,10\} == \{1,2,\dots,10\}
        \{1,2,\ldots,10\} == \{1,2,3,4,5,6,7,8,9,10\}
        \{1,\dots,10\} != \{1,\dots,9\}
        \{0,1,\ldots,n\} != \{1,\ldots,n\}
        \{1,\ldots,n\} == \{1,2,\ldots,n\}
        \{(x,y):y=x^2\} == \{(x,y)\mid y=x^2\}
        \{(x,y):y=x^2\} == y=x^2
        \{(x,y):y=x^2\} != y=x^3
        \{(t,2t):t\in\mathbb R\} == \{(s,2s):s\in\mathbb R\}
        \{n^2:n\in\mathbb N\} == \{k^2\mid k\in\mathbb N\}
        \{n^2:n\in\mathbb N\} != \{n^3:n\in\mathbb N\}
        \{x|0<x<1\} == (0,1)
        \{x;x>3\} == (3,\infty)
        \{p\text{ prime}\} == \text{primes}
        \mathbb{Z}\setminus\{0\} == \{n\in\mathbb Z:n\neq0\}
    """,
    "linear algebra": r"""
        \begin{bmatrix}1\\2\end{bmatrix} == (1,2)^T
        \begin{bmatrix}1\\2\end{bmatrix} == \begin{pmatrix}1\\2\end{pmatrix}
        \begin{bmatrix}1&2\\3&4\end{bmatrix}^T == \begin{bmatrix}1&3\\2&4\end{bmatrix}
        \begin{bmatrix}1&2\\3&4\end{bmatrix} != \begin{bmatrix}1&3\\2&4\end{bmatrix}
        [[1,2],[3,4]] == \begin{pmatrix}1&2\\3&4\end{pmatrix}
        [[1,2],[3,4]] != \begin{pmatrix}1&3\\2&4\end{pmatrix}
        [1,2,3] == \begin{pmatrix}1\\2\\3\end{pmatrix}
        [1,2,3]^T == \begin{pmatrix}1\\2\\3\end{pmatrix}
        2I == \begin{pmatrix}2&0\\0&2\end{pmatrix}
        2I != \begin{pmatrix}2&1\\0&2\end{pmatrix}
        I_2 == \begin{pmatrix}1&0\\0&1\end{pmatrix}
        \operatorname{diag}(1,2) == \begin{pmatrix}1&0\\0&2\end{pmatrix}
        \operatorname{diag}(1,2) != \begin{pmatrix}2&0\\0&1\end{pmatrix}
        \operatorname{span}\{(1,2)\} == \operatorname{span}\{(2,4)\}
        \text{span}\{(1,2)\} == \text{span}\left\{\begin{pmatrix}1\\2\end{pmatrix}\right\}
        \operatorname{span}\{(1,0),(0,1)\} == \operatorname{span}\{(1,1),(1,-1)\}
        \operatorname{span}\{(1,2)\} != \operatorname{span}\{(2,1)\}
        \operatorname{span}\{(1,0)\} != \operatorname{span}\{(1,0),(0,1)\}
        \{(1,2),(3,4)\} == \{(3,4),(1,2)\}
        \lambda_1=1,\lambda_2=3 == \lambda=1,3
        \lambda=3,1 == \lambda=1,3
        A=\begin{pmatrix}1&2\\3&4\end{pmatrix} == \begin{pmatrix}1&2\\3&4\end{pmatrix}
        \frac12\begin{pmatrix}2&4\\6&8\end{pmatrix} == \begin{pmatrix}1&2\\3&4\end{pmatrix}
        3\hat i+4\hat j == (3,4)
        3\mathbf i+4\mathbf j == \langle3,4\rangle
        3\mathbf i-4\mathbf j != \langle3,4\rangle
        \operatorname{rank}(A)=2 == 2
        \begin{pmatrix}1&2\end{pmatrix} != \begin{pmatrix}1\\2\end{pmatrix}
        \|v\|=5 == 5
        t(1,2) == s(1,2), s\in\mathbb R
    """,
    "floats and letters": r"""
        3.4641016151377544 == 2\sqrt3
        1.4142135623730951 == \sqrt2
        3.141592653589793 == \pi
        0.30000000000000004 == 0.3
        0.3333333333333333 == \frac13
        0.6666666666666666 == \frac23
        0.1 == \frac1{10}
        3.4641016151377999 != 2\sqrt3
        1.41421 == \sqrt2
        1.5 != \sqrt2
        0.30000000000000004 != 0.31
        0.3000000004 != 0.3
        1.0000000000000002 == 1
        1.0000000000000002 != 2
        4.000000001 != 4
        \frac{\sigma}{2\epsilon_0} == \frac{\sigma}{2\varepsilon_0}
        \phi == \varphi
        \frac{q}{4\pi\epsilon_0r^2} == \frac{q}{4\pi\varepsilon_0r^2}
        \phi+\varphi != 2\phi
        \epsilon != \eta
        \vartheta == \theta
        z\bar z != |z|
        \frac{dy}{dx}=2x == y'=2x
        \frac{dy}{dx} == y'
        \frac{d^2y}{dx^2}+y=0 == y''+y=0
        \frac{dy}{dx}=2x != y''=2x
        \dot x == \frac{dx}{dt}
        v_{\rm max}=\sqrt{2gh} == \sqrt{2gh}
        v_{\max}=\sqrt{2gh} == v_{\mathrm{max}}=\sqrt{2gh}
        v_{\max} != v_{\min}
        \hbar\omega == \hbar \omega
        \hslash\omega == \hbar\omega
        x \equiv1\text{ or }4\pmod5 == x\equiv1,4\pmod5
        x\equiv1\text{ or }3\pmod5 != x\equiv1,4\pmod5
    """,
    "mixed": r"""
        y=C_1x+C_2 != y=C_1x
        y=Cx+1 != y=Cx+2
        y=Ce^{-x}+x == y=x+Ce^{-x}
        y=Ce^{-x}+x != y=Ce^{-x}-x
        y=\frac{1}{C-x} == y=\frac{1}{K-x}
        y=\frac{1}{x+C} == y=\frac1{x-C}
        y=\tan(x+C) == y=\tan(x+c)
        y=\tan(x+C) != y=\tan(x)+C
        y^2=x^2+C == x^2-y^2=C
        y^2=x^2+C == y^2-x^2=c
        x=A\cos\omega t+B\sin\omega t == x=C_1\cos\omega t+C_2\sin\omega t
        x=A\cos\omega t+B\sin\omega t != x=C_1\cos t+C_2\sin t
        u(x,t)=f(x-ct)+g(x+ct) == u=f(x-ct)+g(x+ct)
        y=e^{-x}(C_1\cos2x+C_2\sin2x) == y=C_1e^{-x}\cos 2x+C_2e^{-x}\sin2x
        y=e^{-x}(C_1\cos2x+C_2\sin2x) != y=e^{-x}(C_1\cos3x+C_2\sin3x)
        y=C_1+C_2e^{x}-x == y=Ae^{x}+B-x
        y=C_1+C_2e^{x}-x != y=Ae^{x}+B+x
        \frac{1}{3}\ln|3x+1|+C == \frac13\ln|x+\frac13|+C
        \frac{1}{3}\ln|3x+1|+C != \ln|3x+1|+C
        \tan x+C == \frac{\sin x}{\cos x}+C
        -\cos x+C != \cos x+C
        \sec^2x+C == \tan^2 x+C
        e^x\sin x+C != e^x\cos x+C
        x\ln x-x+C == x(\ln x-1)+C
        \frac{(x+1)^2}{2}+C == \frac{x^2}2+x+C
        \frac{(x+1)^2}{2}+C != \frac{x^2}2+C
        x^2+C != x^2
        x^2+C != x^2+x
        C != c
        A != B
        K != C
        a != b
        k != n
        n+1 != k+1
        C_1 != C_2
        f(x)=x != f(x)=-x
        f(x)=x+c == f(x)=x+a
        f(x)=x\text{ or }f(x)=0 == f(x)=0,f(x)=x
        f(x)=0,x == f(x)=0\text{ or }f(x)=x
        f(x)=x^2+c != f(x)=x+c
        f(n)=n == f(x)=x
        f(x)=ax+b != f(x)=ax
        f(x)\equiv0 == f(x)=0
        f(x)=0\text{ for all }x == f(x)=0
        f(x)=x\text{ for all }x\in\mathbb R == f(x)=x
        f(x)=2x\ \forall x == f(x)=2x
        x=n\pi+(-1)^n\frac\pi6, n\in\mathbb Z == x=k\pi+(-1)^k\frac\pi6, k\in\mathbb Z
        x=2k\pi\pm\frac\pi3 (k\in\mathbb Z) == x=\pm\frac\pi3+2n\pi,n\in\mathbb Z
        x=\frac\pi2+k\pi,k\in\mathbb{Z} == x=\frac{(2k+1)\pi}{2},k\in\mathbb{Z}
        x=\frac\pi2+k\pi,k\in\mathbb{Z} != x=\frac{k\pi}{2},k\in\mathbb{Z}
        \frac{k\pi}{2},k\in\mathbb Z == \frac{n\pi}{2}, n \in \mathbb{Z}
        (3k,4k,5k),k\in\mathbb N == (3n,4n,5n),n\in\mathbb N
        (3k,4k,5k),k\in\mathbb N != (3n,4n,6n),n\in\mathbb N
        n=2^k, k\in\mathbb N == n=2^m, m\in\mathbb N
        n=2^k, k\in\mathbb N != n=3^m, m\in\mathbb N
        n=k^2 == n=m^2 ?? Find all n such that n is a square.
        \text{all real numbers except }0 == (-\infty,0)\cup(0,\infty)
        \text{all }x>2 == x>2
        \text{all }x\text{ such that }x>2 == x>2
        \text{all }x\text{ except }2 == x\ne2
        x\text{ can be any real number} == \mathbb R
        x\text{ is any real number} == \mathbb R
        \text{any }x>2 == (2,\infty)
        x\text{ is less than }2 == (-\infty,2)
        x\text{ is not equal to }2 == x\neq2
        \text{the set of all positive real numbers} == (0,\infty)
        \text{positive integers} == \text{all positive integers}
        \text{positive even integers} != \text{even integers}
        \text{all odd primes} != \text{all primes}
        \text{all odd primes} != \text{odd}
        \text{odd function} != \text{odd}
        \text{no integers} != \text{integers}
        \text{not an integer} != \text{integers}
        \text{all real numbers} != \text{all integers}
        \text{Yes, since it is continuous} == \text{Yes}
        \text{Yes, }f\text{ is continuous} == \text{Yes}
        \text{Yes; the map is injective} == \text{yes}
        \text{Yes (it is prime)} == \text{yes}
        \text{No, 5 is not prime} == \text{No}
        \text{No counterexample} != \text{No}
        \text{No solution} != \text{No}
        \text{No real roots} != \text{No}
        \text{True or False} != \text{True}
        \text{It is not the case} != \text{true}
        \text{The answer is yes} == \text{yes}
        \text{The answer is no} == \text{no}
        \text{converges to }2 == 2
        \text{The series converges to }2 == 2
        \text{It converges to }2 != 3
        \text{diverges to }\infty == \infty
        \text{The sequence diverges} == \text{diverges}
        \text{Does not converge} == \text{diverges}
        \text{Bob has a winning strategy} == \text{Bob}
        \text{Bob} == \text{Bob wins}
        \text{neither wins} != \text{Alice}
        \text{both} != \text{Alice}
        12\text{ kg} == 12千克
        12 Personen == 12
        \text{zwölf} != 11
        12 fois != 12 times more
        x=2 oder x=3 == x=2,3
        x = 2 или x = 3 == x=2,3
        答案是 $5$ == 5
        最大值为5 == 5
        5或6 != 5
        5 ou 6 != 5
        \text{5 ou 6} != 5
        5和6 != 5
        \text{5 bis 6} != 5
        5万 != 5
        \ce{NaCl} == \mathrm{NaCl}
        \mathrm{NaCl} == \text{NaCl}
        \mathrm{Na}_2\mathrm{SO}_4 == \ce{Na2SO4}
        \ce{Na2SO3} != \ce{Na2SO4}
        \mathrm{sp^3} != sp^2
        3.2\times10^{-19}\,\mathrm{C} == 3.2\times10^{-19}
        6.63\times10^{-34}\ \mathrm{J\cdot s} == 6.63\times10^{-34}\text{ J s}
        45\ \mathrm{km/h} == 45\text{ km/hr}
        5.0\ \text{N/C} == 5.0
        5.0\ \text{V/m} == 5.0\text{ N/C}
        1.0\ \mathrm{atm} != 1.0\ \mathrm{bar}
        20\ ^\circ\text{C} != 20\ ^\circ\text{F}
        20^{\circ} == 20
        0.25\ \mu\text{m} != 0.25\text{ mm}
        \frac{GMm}{r^2} == G\frac{mM}{r^2}
        \frac{1}{2}mv^2 == \frac{mv^2}{2}
        \frac{1}{2}mv^2 != \frac12 m v
        mgh == hgm
        \sqrt{2gh} == \sqrt{2hg}
        \frac{kg}{m} == \frac{gk}m
        \frac{mV}{t} == \frac{Vm}t
        nRT/V == \frac{nRT}{V}
        PV=nRT == nRT=PV
        V^{-1}nRT == nRTV^{-1}
        E=mc^2 == mc^2
        F=ma != F=mv
        \mu mg == mg\mu
        3\mathbf i+2\mathbf j-\mathbf k == (3,2,-1)
        \mathbf{r}=\mathbf{a}+t\mathbf{b} == \mathbf a+t\mathbf b
        |\mathbf a\times\mathbf b| == |\mathbf b\times\mathbf a|
        |\mathbf a|^2|\mathbf b|^2-(\mathbf a\cdot\mathbf b)^2 == |\mathbf a\times\mathbf b|^2
        \vec a\cdot\vec b=0 == \vec b\cdot\vec a=0
        \nabla^2 f == \nabla\cdot\nabla f
        \nabla f != \nabla g
        A^2B != ABA ?? Let $A$ and $B$ be matrices.
        AB-BA != 0 ?? Let $A$ and $B$ be matrices.
        (A+B)^2 != A^2+2AB+B^2 ?? Let $A$ and $B$ be matrices.
        A^2+AB+BA+B^2 == (A+B)^2 ?? Let $A$ and $B$ be matrices.
        f^{-1}\circ g^{-1} != g^{-1}\circ f^{-1}
        [0,1]^2 == [0,1]\times[0,1]
        [0,1]^2 != [0,1]\times[0,2]
        \{1,2\}\cup\{3\} == \{1,2,3\}
        \{1,2,3\}\setminus\{3\} == \{1,2\}
        \mathbb{Z}_{12} == \mathbb Z_3\times\mathbb Z_4
        \mathbb{Z}_{12} != \mathbb Z_2\times\mathbb Z_6
        S_3\times\mathbb Z_2 == \mathbb Z_2\times S_3
        (1\ 2\ 3\ 4) != (1\ 3\ 2\ 4)
        \angle ABC=\angle DEF == \angle DEF=\angle ABC
        AB=CD != AB=CE
        AB+BC=AC == BC+AB=AC
        AD\parallel BC != AB\parallel BC
        \triangle ABC\sim\triangle DEF != \triangle ABC\sim\triangle DFE
        M(2,3) != (3,2)
        (x-1)^2+(y-2)^2=9 == x^2+y^2-2x-4y-4=0
        y-2=3(x-1) == y=3x-1
        \{1,3,5,\ldots,99\} == \{1,3,\ldots,99\}
        \{1,3,5,\ldots,99\} != \{1,2,3,\ldots,99\}
        \{x\in\mathbb R:|x|<2\} == (-2,2)
        \begin{pmatrix}1\\-1\end{pmatrix} != \begin{pmatrix}-1\\1\end{pmatrix}
        \dim V=3 == 3
        \log_3 9x == \log_3(9x)
        \ln(a)-\ln(b) == \ln\frac ab
        \log_2 8 != 4
        C. 10 m/s == C ?? A. 1 m/s B. 5 m/s C. 10 m/s D. 20 m/s
        10 m/s == C ?? A. 1 m/s B. 5 m/s C. 10 m/s D. 20 m/s
        5 m/s != C ?? A. 1 m/s B. 5 m/s C. 10 m/s D. 20 m/s
        \text{C. 5 m/s} != C ?? A. 1 m/s B. 5 m/s C. 10 m/s D. 20 m/s
        \text{A and C} != C ?? A. 1 B. 5 C. 10 D. 20
        \text{Option C} == C ?? A. 1 B. 5 C. 10 D. 20
        \text{The answer is C} == C ?? A. 1 B. 5 C. 10 D. 20
        \text{C: 10} == C ?? A. 1 B. 5 C. 10 D. 20
        \textbf{C} == C ?? A. 1 B. 5 C. 10 D. 20
        10 == C ?? (A) 1 (B) 5 (C) 10 (D) 20
        1 != C ?? (A) 1 (B) 5 (C) 10 (D) 20
        C != 5 ?? (A) 1 (B) 5 (C) 10 (D) 20
        \text{None of these} == E ?? (A) 1 (B) 5 (C) 10 (D) 20 (E) None of these
        \text{(C) 10} == 10 ?? (A) 1 (B) 5 (C) 10 (D) 20
        C == 10 ?? (A) 1 (B) 5 (C) 10 (D) 20
        2.000000000000000 == 2
        0.7071067811865476 == \frac{\sqrt2}{2}
        0.7071067811865475 == \frac{\sqrt2}{2}
        1.7320508075688772 == \sqrt3
        1.7320508075688772 != \sqrt2
        -1.4142135623730951 == -\sqrt2
        5 apples != 6 apples
        \text{minus 5} != 5
        \text{at most 5 apples} != 5
        \text{nearly 5} != 5
        \text{half of 5} != 5
        \text{Tom has 5 or 6 apples} != 5
        \text{Tom does not have 5 apples} != 5
        \text{Tom had 5 apples but ate 2} != 5
        \text{Each child gets 4 cookies} == 4
        \text{The number of apples is 5} == 5
        \text{There were 12 students in the class} == 12
        \text{The probability is }\frac12 == \frac12
    """,
    "prefixes and the case of units": r"""
        5\text{ nm} != 5\text{ Nm}
        5\text{ Nm} == 5\text{ N m}
        5\text{ N}\cdot\text{m} == 5\text{ Nm}
        5 Nm == 5\text{ Nm}
        5\text{ G} != 5\text{ g}
        5\text{ G} == 5\text{ gauss}
        5\ \mu C == 5\times10^{-6}\text{ C}
        5\,\mu\text{C} == 5e-6\text{ C}
        5\,\mu\text{C} != 5e-3\text{ C}
        12\text{ μm} == 12\times10^{-6}\text{ m}
        1.5\text{ Å} == 1.5\times10^{-10}\text{ m}
        1.5\text{ Å} == 1.5e-10\text{ m}
        1.5\ \AA == 1.5\times10^{-10}\,\mathrm{m}
        0.15\text{ nm} == 1.5\times10^{-10}\text{ m}
        589\text{ nm} == 5.89\times10^{-7}\text{ m}
        1\text{ m} != 100\text{ cm}
        3\text{ kPa} != 3000\text{ Pa}
        2\times10^{-5}\text{ cm} == 2\times 10^{-7}\text{ m}
        6\text{ D} == 6
        5\text{ S} != 5\text{ s}
        589\text{ nm} != 5.89\times10^{-7}\text{ m} ?? Convert 589 nm to meters.
        589\text{ nm} != 5.89\times10^{-7}\text{ m} ?? Convert $589$ nm to meters.
        5.0\times10^{-3}\text{ m} == 5.0\text{ mm}
        3 KM == 3\text{ km}
        3 Ft == 3 ft
        2.5\times10^3\ \Omega == 2.5\text{ k}\Omega
        4.7\times10^{3}\,\Omega == 4.7\ \mathrm{k\Omega}
        3\text{ kPA} == 3\text{ kPa}
        3\text{ KPA} == 3\text{ kPa}
    """,
    "fields and products of matrices": r"""
        \nabla F != \nabla\cdot F
        \nabla F != \nabla\times F
        \nabla\cdot F != \nabla F
        \nabla\times F != \nabla F
        \nabla\cdot F != \nabla\times F
        \nabla\times F == \nabla \times F
        \nabla \mathbf F != \nabla\cdot\mathbf F
        \nabla \vec F != \nabla\times\vec F
        \nabla f == \nabla f
        \nabla f != f
        \operatorname{div}F == \nabla\cdot F
        \operatorname{div}\mathbf F == \nabla\cdot \mathbf F
        \text{div }\mathbf F == \nabla\cdot\mathbf F
        \text{curl }\mathbf F == \nabla\times\mathbf F
        \operatorname{curl}\vec F == \nabla\times\vec F
        \operatorname{rot}\vec F == \nabla\times\vec F
        \text{curl }\mathbf F != \nabla\cdot\mathbf F
        \operatorname{curl} F != \operatorname{div} F
        \operatorname{grad} f == \nabla f
        \operatorname{grad} f != \operatorname{div} f
        \text{grad }f != \nabla\cdot f
        \nabla\cdot(f\mathbf F) == \nabla\cdot(f\mathbf{F})
        \nabla^2 f == \nabla\cdot\nabla f
        \nabla\cdot\mathbf E=\frac{\rho}{\epsilon} == \operatorname{div}\mathbf E=\frac\rho\epsilon
        \nabla\times\mathbf E=0 != \nabla\cdot\mathbf E=0
        \nabla\cdot(\nabla\times\mathbf F)=0 == \nabla\cdot(\nabla\times\mathbf F)=0
        \nabla\cdot F+1 != \nabla\times F+1
        (ABC)^{-1} == C^{-1}B^{-1}A^{-1}
        (ABC)^{-1} != A^{-1}B^{-1}C^{-1}
        (ABC)^T == C^TB^TA^T
        (ABC)^T != A^TB^TC^T
        (ABC)^\top == C^{\top}B^{\top}A^{\top}
        (AB)^\top == B^TA^T
        (ABCD)^{-1} == D^{-1}C^{-1}B^{-1}A^{-1}
        (ABC)^{-1} == (BC)^{-1}A^{-1}
        (PAQ)^{-1} == Q^{-1}A^{-1}P^{-1}
        (PAQ)^{-1} != P^{-1}A^{-1}Q^{-1}
        ((AB)^T)^{-1} == (A^T)^{-1}(B^T)^{-1}
        (A^TBA)^T == A^TB^TA
        C^{-1}B^{-1}A^{-1} == (ABC)^{-1}
        B^{-1}A^{-1} != A^{-1}B^{-1}
        \det(ABC) == \det(A)\det(B)\det(C)
        \operatorname{tr}(ABC) == \operatorname{tr}(BCA)
        \operatorname{tr}(ABC) != \operatorname{tr}(ACB)
        A^\top A != AA^\top
        \text{DNE} == \text{does not exist} ?? Let $A$ be a matrix.
    """,
    "complex numbers": r"""
        z\bar z == |z|^2
        \bar z z == |z|^2
        z\overline{z} == |z|^2
        zz^{*} == |z|^2
        |z|^2 == z\bar{z}
        z\bar z == |z^2|
        z^2 != |z|^2
        \bar z^2 != |z|^2
        z\bar z != |z|
        z\bar z != z^2
        \overline{z+w} == \bar z+\bar w
        \overline{z}\,\overline{w} == \overline{zw}
        \overline{z+w} != \bar z-\bar w
        \overline{z/w} == \frac{\bar z}{\bar w}
        z+\bar z == 2\operatorname{Re}z
        z+\bar z == 2\Re(z)
        z+\bar z == 2\text{Re}(z)
        z-\bar z == 2i\operatorname{Im}(z)
        z-\bar z != 2\operatorname{Im}(z)
        z-\bar z != 2i\operatorname{Re}(z)
        \frac{z+\bar z}2 == \operatorname{Re}(z)
        \frac{1}{z} == \frac{\bar z}{|z|^2}
        \frac{1}{z} != \frac{z}{|z|^2}
        \bar z = 3-4i == 3-4i
        z=3+4i == 3+4i
        z=3+4i == 3+4i ?? Find the complex number $z$.
        z=1\pm i == z=1+i,1-i ?? Find all complex $z$.
        |z|=1 != z^2=1
        |z|<2 != -2<z<2 ?? Describe the complex numbers $z$.
        |z|<2 == |z|<2
        |z-1|=2 == |1-z|=2
        \operatorname{Re}(s)>1 == \Re s>1
        \operatorname{Re}(s)>1 != s>1
        z^2+z+1 == 1+z+z^2 ?? Find the complex polynomial.
        \sqrt{x^2+y^2+z^2} == \sqrt{z^2+y^2+x^2}
        |z|+x == x+|z|
        \bar x=5 == 5
        \bar{x} != x
        \bar x == \bar x
        \bar A\cap\bar B == \overline{A\cup B}
        \operatorname{Re}(z)=3 == 3
        w=\frac{1}{z} == \frac{1}{z} ?? Let $z,w$ be complex.
        \overline{\overline{z}+w} == z+\bar w
        z\bar z != |z|^2 ?? Simplify $z\bar z$.
        (A^TB)^T != B^TA ?? Simplify $(A^TB)^T$.
        z=2,z=-1 == -1,2 ?? Find all complex roots.
    """,
    "groups, bonds and names of substances": r"""
        S_3 == D_3
        D_3 == S_3
        S_3 != D_4
        D_6 != S_3
        S_3 != A_3
        V_4 == \mathbb Z_2\times\mathbb Z_2
        \mathbb Z_2\times\mathbb Z_2 == K_4
        V_4 != \mathbb Z_4
        A_3 == \mathbb Z_3
        S_2 == \mathbb Z/2\mathbb Z
        A_4 != \mathbb{Z}_4
        \text{the symmetric group }S_3 == S_3
        \text{cyclic group of order 6} == \mathbb Z_6
        \text{cyclic group of order 6} != \mathbb Z_5
        \text{Klein four-group} == \mathbb Z_2\times\mathbb Z_2
        \text{the dihedral group }D_4 == D_4
        \text{the dihedral group }D_4 != Q_8
        \text{symmetric group on 4 letters} == S_4
        C_6 == \mathbb Z_6
        \ce{C-C} != \ce{C=C}
        C-C != C=C
        C=C != C-C
        C\equiv C != C=C
        C=C == C=C
        \ce{CH3-CH3} == \ce{CH3CH3}
        \ce{CH2=CH2} == \ce{H2C=CH2}
        \ce{CH2=CH2} != \ce{CH3-CH3}
        \ce{CH2=CH2} != \ce{CH2-CH2}
        \ce{HC#CH} == \mathrm{HC\equiv CH}
        \ce{HC#CH} != \ce{HC=CH}
        \text{N}\equiv\text{N} != \text{N}=\text{N}
        2H_2+O_2\to2H_2O == \ce{2H2 + O2 -> 2H2O}
        \ce{2H2 + O2 = 2H2O} == \ce{2H2 + O2 -> 2H2O}
        \text{sp}^3 == sp^3
        sp^3 != sp^2
        \mathrm{sp}^2 == sp^2
        sp3 == sp^3
        1s^2 2s^2 2p^6 == 1s^22s^22p^6
        1s^2 2s^2 2p^5 != 1s^22s^22p^6
        [\text{Ar}]3d^5 4s^1 == [\mathrm{Ar}]4s^13d^5
        [\text{Ar}]3d^4 4s^2 != [\mathrm{Ar}]4s^13d^5
        {}^{14}_{6}\text{C} == {}^{14}\text{C}
        {}^{14}_{7}\text{C} != {}^{14}\text{C}
        {}_{92}^{238}\text{U} == {}^{238}\mathrm{U}
        {}^{235}_{92}\mathrm{U} != {}^{238}_{92}\mathrm{U}
        \text{2-methylbutane} == \text{2-Methylbutane}
        \text{2-methylbutane} != \text{3-methylbutane}
        \text{(R)-2-butanol} == \text{(R)-2-Butanol}
        \text{(R)-2-butanol} != \text{(S)-2-butanol}
        \text{cis-2-butene} != \text{trans-2-butene}
        \text{N-methylaniline} == \text{N-Methylaniline}
        \text{ethyl 2-methylpropanoate} == \text{Ethyl 2-methylpropanoate}
        5-x != 5-X
        \text{x-axis} == \text{x-axis}
        \text{3-methylhexane} != \text{3-methylhexene}
        \ce{H2O} == \mathrm{H_2O}
        x^2+y^2=C == C=x^2+y^2
    """,
    "implicit solutions and free constants": r"""
        \ln|y|=x+C == y=Ce^{x}
        \ln|y|=x+C == y=Ae^x ?? Solve $y'=y$.
        \ln y = x^2+c == \ln|y|=x^2+C
        \ln|y|=x+C != y=Ce^{2x}
        \ln|y|=x+C != y=e^x+C
        y=Ce^x == \ln|y|=x+C
        y=Ce^x == \ln|y|-x=C
        y=Ae^x == \ln|y|=x+C
        y=Ae^x != \ln|y|=2x+C
        xy=C == y=\frac{k}{x}
        xy=C == y=\frac{C}{x}
        xy=C != y=\frac{k}{x^2}
        y=kx == \frac yx=C
        y=kx == y=Cx
        y=kx != y=mx
        y^2=x^2+C == y^2-x^2=C
        y^2=x^2+C == \frac{y^2}{2}-\frac{x^2}{2}=C
        y^2=2x^2+C != y^2-x^2=C
        x^2+y^2=C == y=\pm\sqrt{C-x^2}
        y=\pm\sqrt{C-x^2} == x^2+y^2=C
        y=\pm\sqrt{x^2+C} == y^2=x^2+C
        y=\pm\sqrt{x^2+C} != y^2=2x^2+C
        y=\pm\sqrt{C-x^2} != x^2-y^2=C
        y=\sqrt{C-x^2} != x^2+y^2=C
        y=\pm\sqrt{e^C-x^2} != x^2+y^2=C
        -\frac1y=x+C == y=-\frac{1}{x+C}
        -\frac1y=x+C != y=\frac{1}{x+C}
        \frac1y=C-x == y=\frac{1}{C-x}
        e^{-y}=C-x != y=\ln(C-x)
        (y-1)=Ce^{-x} == y=1+Ce^{-x}
        \ln|y-1|=-x+C == y=1+Ce^{-x}
        \ln|y-1|=-x+C != y=Ce^{-x}-1
        \frac{y-1}{y+1}=Ce^{2x} == \ln\left|\frac{y-1}{y+1}\right|=2x+C
        x^2y+y^3=C == y^3+x^2y=K
        x^2y+y^3=C != y^3+xy=K
        x^3+y^3=C == y=\sqrt[3]{C-x^3}
        e^{x+C} != Ae^{2x}
        y=Ae^{2x}+Be^{-2x} == y=C_1\cosh 2x+C_2\sinh2x
        y=Ae^{x}+Be^{-2x} != y=C_1\cosh 2x+C_2\sinh2x
        y=2x+B != y=2x+D
        y=2x+B == y=2x+B
        y=2x+B == y=2x+C
        y=Ae^x != y=Be^x
        y=Ae^x == y=Ce^x
        f(x)=ax == f(x)=cx
        y=A\sin(x+\phi) == y=c_1\sin x+c_2\cos x
        x(t)=A\cos(\omega t+\phi) == x(t)=c_1\cos\omega t+c_2\sin\omega t
        x(t)=A\cos(\omega t+\phi) == x=A\cos\omega t+B\sin\omega t
        y=c_1\sin x+c_2\cos x == y=A\sin(x+\phi)
        y=A\sin(2x+\phi) != y=c_1\sin x+c_2\cos x
        y=Ae^{x+\phi} != y=c_1e^x+c_2xe^x
        y=A\sin(x+B) == y=c_1\sin x+c_2\cos x
        y=e^{-x}A\sin(x+\phi) == y=e^{-x}(c_1\sin x+c_2\cos x)
        y=A\sin(x+\phi) != y=c_1\sin x
        \frac13x^3+e^C != \frac13x^3+C
        y=x^3+e^C != y=x^3+C
        x^2+y^2=1 != x^2+y^2=C
        x^2+y^2=r^2 != x^2+y^2=C^2 ?? What is the circle with radius $r$?
        PV=C != P/V=C
        PV=k == PV=C
        V=IR != I=VR
        F=kx != F=kx^2
    """,
    "truth values, coordinates, programs and words": r"""
        F == \text{False} ?? True or false: every prime is odd.
        T == \text{True}
        \text{True} == T
        T != \text{False}
        t != T
        (\text{T},\text{F},\text{T}) == \text{True, False, True}
        (\text{F},\text{T},\text{T}) != \text{True, False, True}
        \text{TFT} == \text{T, F, T}
        \text{TFF} != \text{T, F, T}
        T, F == \text{True, False}
        T != F
        y=2,x=1 == (1,2)
        y=2,x=1 != (2,1)
        z=3,x=1,y=2 == (1,2,3)
        x=1,y=2 == (1,2)
        \text{20 percent more} != 20
        \text{20 percent} == 20\%
        x\equiv2\pmod5 == x=5k+2
        x\equiv2\pmod5 != x=5k+3
        n=7m+1 == n\equiv1\pmod7
        x\equiv 1,4\pmod 5 == x\equiv\pm1\pmod5
        x\equiv\pm2\pmod5 != x\equiv\pm1\pmod5
        x\equiv\pm1\pmod{8} == x\equiv1,7\pmod 8
        2\hat{x}-\hat{y} == (2,-1)
        2\hat{x}-\hat{y} != (-1,2)
        2\hat{x}-\hat{y}+\hat z == 2\hat i-\hat j+\hat k
        f(x)=ax == f(x)=cx\text{ for some constant }c ?? Find all additive $f$.
        f(x)=cx\text{ where }c\text{ is a constant} == f(x)=cx
        f(x)=cx\text{, where }c\text{ is an arbitrary real constant} == f(x)=cx
        y=C_1e^x+C_2e^{-x}\text{ where }C_1,C_2\text{ are constants} == y=C_1e^x+C_2e^{-x}
        x^2+C\text{ (where }C\text{ is a constant)} == x^2+C
        x^2+C\text{, where }C\text{ is the constant of integration} == x^2+C
        f(x)=cx\text{ for some constant }c != f(x)=cx^2
        Fraction(1, 3) == \frac13
        Fraction(1, 3) != \frac31
        Rational(1,2) == 0.5
        Fraction(-1, 3) == -\frac13
        1_000_000 == 1000000
        1_000 != 1
        x_1 == x_1
        np.float64(0.5) == 0.5
        np.float64(0.5) != 0.25
        Decimal('1.50') == 1.5
        math.sqrt(2) == \sqrt2
        np.pi/4 == \frac\pi4
        1+2j == 1+2i
        (1+2j) == 1+2i
        (1-2j) != 1+2i
        inf == \infty
        -inf != \infty
        -inf == -\infty
        math.inf == \infty
        sp.sqrt(3)/2 == \frac{\sqrt3}2
        x大于12 == x>12
        x大于等于12 == x\ge12
        大于12 != 12
        12个苹果 == 12
        12个以上 != 12
        12个左右 != 12
        12个或13个 != 12
        \text{no real numbers} == \emptyset
        \text{one half} == \frac12
        \text{a half} == \frac12
        \text{three quarters} == \frac34
        \text{two thirds} == \frac23
        \text{two thirds} != \frac32
        \text{minus one half} == -\frac12
        \text{a dozen} == 12
        \text{5 to 3} == 5:3
        \text{5 to 3} != 3:5
        \text{5 to 3} != 5
        \text{half of 5} != 5
        \text{diverges to infinity} == \infty
        \text{diverges to negative infinity} != \infty
        \text{The limit diverges to }\infty == \infty
        \text{There are exactly 20 solutions} == 20
        \text{There are 20 solutions} == 20
    """,
    "prose, directions and constants": r"""
        \text{a gene on chromosome 21} == \text{A gene on chromosome 21}
        \text{a gene on chromosome 21} != \text{A gene on chromosome 12}
        \text{hepatitis A virus} != \text{hepatitis virus}
        \text{The electron moves left.} == \text{the electron moves left}
        \text{The electron moves left} != \text{the electron moves right}
        \text{not a gene} != \text{a gene}
        \text{C is correct} == C
        \text{Option C is the correct answer} == C
        \text{C is not correct} != C
        \text{C is incorrect} != C
        \text{B is correct} != C
        x=A^{-1}b != bA^{-1}
        x=A^{-1}b == A^{-1}b
        x=A^{-1}(b+c) == A^{-1}b+A^{-1}c
        (A^TA)^{-1}A^Tb == (A^TA)^{-1}A^Tb
        (A^TA)^{-1}A^Tb != A^T(A^TA)^{-1}b
        A^{-1}b != Ab
        (1,2,3)\cdot(4,5,6) != (1,2,3)\times(4,5,6)
        \text{x must be positive} == x>0
        \text{x must be positive} != x<0
        \text{The only solution is }x=3 == x=3
        \text{The only solution is }x=3 != x=4
        \text{after 5 seconds} == 5\text{ seconds}
        \text{in 5 hours} == 5
        \text{in 5 hours} != 6\text{ hours}
        \text{after 5} != 5
        \text{exactly 5} == 5
        \text{not exactly 5} != 5
        \text{minus 5} != 5
        \text{negative 5} == -5
        \text{one in four} == \frac14
        \text{1 in 4} == \frac14
        1\text{ out of }4 != \frac41
        \text{3 out of 10} == \frac{3}{10}
        \text{1 in 4} != 4
        \text{at }x=2 == x=2
        \text{at }x=2 != x=3
        \text{infinitamente muchas} == \text{infinitely many}
        \text{unendlich viele} == \text{infinitely many}
        无穷多 == \text{infinitely many}
        \text{endlich viele} != \text{infinitely many}
        \text{le maximum est }5 == 5
        \text{le maximum n'est pas }5 != 5
        \text{das Maximum ist }5 == 5
        \text{das Maximum ist nicht }5 != 5
        \text{la respuesta no es }5 != 5
        x的值是5 == 5
        共有12种 == 12
        12平方厘米 == 12\text{ cm}^2
        12平方厘米 != 12\text{ cm}
        12 м/с == 12\text{ m/s}
        12 mètres == 12\text{ m}
        12,50 € == 12.5
        12,50 € != 1250
        f(x)=x+c,\ c\in\mathbb R == f(x)=x+a
        f(x)=ax+b,\ a,b\in\mathbb{R} == f(x)=cx+d
        f(x)=x+c,\ c\in\mathbb R != f(x)=cx
        f(x)=ax+b,\ a,b\in\mathbb{R} != f(x)=ax^2+b
        f(x)=x+c,\ c\in\mathbb Z != f(x)=x+a
        f\equiv0 == f(x)=0
        f: x\mapsto x^2 == f(x)=x^2
        x\mapsto x^2 == f(x)=x^2
        x\mapsto x^2 != f(x)=x^3
        x=\frac\pi6+2k\pi\text{ or }x=\frac{5\pi}6+2k\pi == x=\frac\pi6+2n\pi, \frac{5\pi}6+2n\pi
        x=k\pi == x=n\pi
        x=k\pi != x=2n\pi
        x=k\pi+1 != x=n\pi
        2\pi k != 2\pi n
        c\begin{pmatrix}1\\1\end{pmatrix} == t\begin{pmatrix}1\\1\end{pmatrix}
        c(1,1) != c(1,2)
        \{(1,2)\} == (1,2)
        \{(1,2)\} != (2,1)
        \{1,2\} != (1,2)
        大于等于12 != 12
        约为12 != 12
        不等于12 != 12
        大约为12 != 12
        \text{about 5 Mbar} != \text{about 5 mbar}
        \text{5 Mbar} != \text{5 mbar}
        \frac13\ln|x+\frac13|+C != x^2+C
        \frac{(x+1)^2}{2}+C != \frac13\ln|3x+1|+C
        \ln|3x+1|+C != f(x)=x+a
        \tan^2x+C != \ln|x+\frac12|+C
        |x-2|+C != |x-3|+C
        \lfloor x\rfloor+C != \frac{x}{7}+C
        \triangle ABC != \triangle DEF\cong\triangle ABC
        \overline{AB} != \overline{CD}\cong\overline{AB}
        S_3 == G\cong S_3
        \{k^2\mid k\in\mathbb N\} != y=x^2
        (s,2s) != (k,2k), k\in\mathbb Z
        (m,2m) == (k,2k), k\in\mathbb Z
        z^2 != |z^2|
        |zw| == |z||w|
        A^{-1}b != (A^TA)^{-1}A^Tb
        (A^TA)^{-1}A^Tb != A^{-1}b
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
    p(x)=x^2-1 != (x-1)(x+1) ?? Factor $x^2-1$.
    y=x^2-1 != (x-1)(x+1) ?? Factor $x^2-1$.
    \{x^2-1\} != (x-1)(x+1) ?? Factor $x^2-1$.
    x^2-1, x^2-1 != (x-1)(x+1) ?? Factor $x^2-1$.
    x^2-1=x^2-1 != (x-1)(x+1) ?? Factor $x^2-1$.
    y=(x-1)(x+1) == (x-1)(x+1) ?? Factor $x^2-1$.
    x^2-1=y != (x-1)(x+1) ?? Factor $x^2-1$.
    y=\{x^2-1\} != (x-1)(x+1) ?? Factor $x^2-1$.
    y\in\{x^2-1\} != (x-1)(x+1) ?? Factor $x^2-1$.
    y\approx x^2-1 != (x-1)(x+1) ?? Factor $x^2-1$.
"""


@pytest.mark.parametrize(
    ("family", "is_same", "answer", "gold", "question"), pairs_of({**FAMILIES, "echoes": ECHOES})
)
def test_pairs_of_a_family_are_told_apart(family, is_same, answer, gold, question) -> None:
    question = question.replace(r"\n", "\n")
    graded = grade(answer, gold, template="answer", question=question)
    assert graded.correct == is_same, graded.reason
