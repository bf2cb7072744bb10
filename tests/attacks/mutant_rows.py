"""Rows of programming problems for `mutants.py`: reference programs, and data in public layouts.

A row is what a data set has: columns such as `test_list` or `input_output`, in the layouts of MBPP,
APPS, TACO, DeepCoder and LiveCodeBench. The expected outputs are those of the reference program,
which runs in plain Python when the rows are made.
"""

import contextlib
import io
import json
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

Values = list[list[Any]]


class Function(NamedTuple):
    """A function with a right definition. Its name is the first word after `def`."""

    text: str
    arguments: Values

    @property
    def source(self) -> str:
        return self.text.strip()

    @property
    def name(self) -> str:
        return self.source.split("(")[0].split()[-1]


class Script(NamedTuple):
    """A whole program that reads its standard input."""

    text: str
    inputs: list[str]

    @property
    def source(self) -> str:
        return self.text.strip()


class Row(NamedTuple):
    """A row of a data set, with its reference program."""

    layout: str
    columns: dict[str, Any]
    source: str
    function: str  # "" for a whole program
    arguments: Values  # of each test; for a whole program a list with its input
    expected: list[Any]  # of each test: a value, or the text that is printed
    left_sides: list[str]  # of asserts: the expression that is compared; else empty
    setup: str = ""


FUNCTIONS = [
    Function(
        """
def sort_numbers(values):
    return sorted(values)
""",
        [[[3, 1, 2]], [[9, -4, 7, 7]], [[5]], [[]], [[2, 2, 1]]],
    ),
    Function(
        """
def two_sum(values, target):
    seen = {}
    for i, value in enumerate(values):
        if target - value in seen:
            return [seen[target - value], i]
        seen[value] = i
    return []
""",
        [[[2, 7, 11, 15], 9], [[3, 2, 4], 6], [[3, 3], 6], [[1, 2], 9], [[5, 75, 25], 100]],
    ),
    Function(
        """
def digit_sum(n):
    total = 0
    n = abs(n)
    while n > 0:
        total += n % 10
        n //= 10
    return total
""",
        [[0], [7], [1234], [-56], [99999]],
    ),
    Function(
        """
def is_prime(n):
    if n < 2:
        return False
    i = 2
    while i * i <= n:
        if n % i == 0:
            return False
        i += 1
    return True
""",
        [[1], [2], [9], [97], [100], [25]],
    ),
    Function(
        """
def count_vowels(text):
    count = 0
    for letter in text.lower():
        if letter in 'aeiou':
            count += 1
    return count
""",
        [["Programming"], [""], ["AEIOU"], ["xyz"], ["banana bread"]],
    ),
    Function(
        """
def reverse_words(text):
    return ' '.join(reversed(text.split()))
""",
        [["the sky is blue"], ["  hello world  "], ["a"], ["one two three"]],
    ),
    Function(
        """
def fibonacci(n):
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a
""",
        [[0], [1], [2], [10], [50]],
    ),
    Function(
        """
def factorial(n):
    result = 1
    for i in range(2, n + 1):
        result *= i
    return result
""",
        [[0], [1], [5], [12], [25]],
    ),
    Function(
        """
def greatest_common_divisor(a, b):
    while b:
        a, b = b, a % b
    return a
""",
        [[12, 18], [7, 5], [0, 9], [100, 10], [17, 17]],
    ),
    Function(
        """
def run_lengths(text):
    runs = []
    for letter in text:
        if runs and runs[-1][0] == letter:
            runs[-1][1] += 1
        else:
            runs.append([letter, 1])
    return runs
""",
        [["aaabb"], ["abc"], ["zz"], ["aabbaa"]],
    ),
    Function(
        """
def longest_prefix(words):
    prefix = words[0]
    for word in words[1:]:
        while not word.startswith(prefix):
            prefix = prefix[:-1]
    return prefix
""",
        [
            [["flower", "flow", "flight"]],
            [["dog", "car"]],
            [["a"]],
            [["inter", "internet", "interval"]],
        ],
    ),
    Function(
        """
def max_subarray(values):
    best = current = values[0]
    for value in values[1:]:
        current = max(value, current + value)
        best = max(best, current)
    return best
""",
        [[[-2, 1, -3, 4, -1, 2, 1, -5, 4]], [[1]], [[5, 4, -1, 7, 8]], [[-3, -1, -2]]],
    ),
    Function(
        """
def merge_sorted(a, b):
    result = []
    i = j = 0
    while i < len(a) and j < len(b):
        if a[i] <= b[j]:
            result.append(a[i])
            i += 1
        else:
            result.append(b[j])
            j += 1
    return result + a[i:] + b[j:]
""",
        [[[1, 3, 5], [2, 4]], [[], [1, 2]], [[1, 1], [1, 2]], [[7, 8], [1, 2]]],
    ),
    Function(
        """
def is_palindrome(text):
    letters = [c.lower() for c in text if c.isalnum()]
    return letters == letters[::-1]
""",
        [["A man, a plan, a canal: Panama"], ["race a car"], ["x"], ["ab"], ["Noon"]],
    ),
    Function(
        """
def transpose(matrix):
    return [[row[i] for row in matrix] for i in range(len(matrix[0]))]
""",
        [[[[1, 2], [3, 4]]], [[[1, 2, 3]]], [[[1], [2]]], [[[0, 5], [6, 7], [8, 9]]]],
    ),
    Function(
        """
def unique_items(values):
    result = []
    for value in values:
        if value not in result:
            result.append(value)
    return result
""",
        [[[1, 2, 1, 3]], [[5, 5, 5, 6]], [[]], [[4, 3, 4, 3, 2]]],
    ),
    Function(
        """
def mean(values):
    return sum(values) / len(values)
""",
        [[[1, 2, 3, 4]], [[2.5, 3.5]], [[10, 11]], [[1, 0, 0]]],
    ),
    Function(
        """
def median(values):
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2 == 1:
        return float(ordered[middle])
    return (ordered[middle - 1] + ordered[middle]) / 2
""",
        [[[3, 1, 2]], [[4, 1, 3, 2]], [[7]], [[10, 20]]],
    ),
    Function(
        """
def binary_search(values, target):
    low, high = 0, len(values) - 1
    while low <= high:
        middle = (low + high) // 2
        if values[middle] == target:
            return middle
        if values[middle] < target:
            low = middle + 1
        else:
            high = middle - 1
    return -1
""",
        [[[1, 3, 5, 7], 7], [[1, 3, 5, 7], 1], [[1, 3], 2], [[], 5], [[2, 4, 6, 8, 10], 4]],
    ),
    Function(
        """
def letter_counts(text):
    counts = {}
    for letter in text:
        counts[letter] = counts.get(letter, 0) + 1
    return counts
""",
        [["hello"], ["aab"], ["xyzzy"]],
    ),
    Function(
        """
def divisors(n):
    return [i for i in range(1, n + 1) if n % i == 0]
""",
        [[12], [7], [28], [30]],
    ),
    Function(
        """
def caesar(text, shift):
    result = ''
    for letter in text:
        if letter.isalpha():
            result += chr((ord(letter) - 97 + shift) % 26 + 97)
        else:
            result += letter
    return result
""",
        [["abc", 1], ["xyz", 3], ["a b", 25], ["hello", 13]],
    ),
    Function(
        """
def climb_stairs(n):
    ways = [1, 1]
    for i in range(2, n + 1):
        ways.append(ways[i - 1] + ways[i - 2])
    return ways[n]
""",
        [[1], [2], [3], [10], [30]],
    ),
    Function(
        """
def coin_change(coins, amount):
    best = [0] + [amount + 1] * amount
    for value in range(1, amount + 1):
        for coin in coins:
            if coin <= value:
                best[value] = min(best[value], best[value - coin] + 1)
    return best[amount] if best[amount] <= amount else -1
""",
        [[[1, 2, 5], 11], [[2], 3], [[1], 0], [[3, 7], 13], [[2, 5, 10], 27]],
    ),
    Function(
        """
def valid_brackets(text):
    pairs = {')': '(', ']': '[', '}': '{'}
    stack = []
    for letter in text:
        if letter in pairs:
            if not stack or stack.pop() != pairs[letter]:
                return False
        else:
            stack.append(letter)
    return not stack
""",
        [["()"], ["([)]"], ["()[]{}"], ["("], ["{[()]}"], ["]"]],
    ),
    Function(
        """
def rotate(values, k):
    k %= len(values)
    return values[-k:] + values[:-k] if k else list(values)
""",
        [[[1, 2, 3, 4, 5], 2], [[1, 2], 3], [[7, 8, 9], 0], [[4, 5, 6, 7], 1]],
    ),
    Function(
        """
def count_pairs(values, difference):
    count = 0
    for i in range(len(values)):
        for j in range(i + 1, len(values)):
            if abs(values[i] - values[j]) == difference:
                count += 1
    return count
""",
        [[[1, 5, 3, 4, 2], 2], [[1, 2, 3], 1], [[5, 5], 0], [[1, 8], 3]],
    ),
    Function(
        """
def power_set_size(n):
    return 2 ** n
""",
        [[0], [1], [10], [64]],
    ),
    Function(
        """
def roman(n):
    values = [1000, 900, 500, 400, 100, 90, 50, 40, 10, 9, 5, 4, 1]
    letters = 'M CM D CD C XC L XL X IX V IV I'.split()
    result = ''
    for value, symbol in zip(values, letters):
        while n >= value:
            result += symbol
            n -= value
    return result
""",
        [[3], [58], [1994], [444], [2026]],
    ),
    Function(
        """
def min_and_max(values):
    return (min(values), max(values))
""",
        [[[3, 1, 2]], [[5]], [[-1, -9]], [[4, 4, 8]]],
    ),
    Function(
        """
def common_items(a, b):
    return set(a) & set(b)
""",
        [[[1, 2, 3], [2, 3, 4]], [[1], [2]], [[5, 6], [6, 5]]],
    ),
    Function(
        """
def flatten(values):
    result = []
    for value in values:
        if isinstance(value, list):
            result.extend(flatten(value))
        else:
            result.append(value)
    return result
""",
        [[[1, [2, [3, 4]], 5]], [[[[1]], 2]], [[7, [8]]]],
    ),
    Function(
        """
def collatz_steps(n):
    steps = 0
    while n != 1:
        n = n // 2 if n % 2 == 0 else 3 * n + 1
        steps += 1
    return steps
""",
        [[1], [6], [7], [27]],
    ),
    Function(
        """
def hamming(a, b):
    return sum(x != y for x, y in zip(a, b))
""",
        [["karolin", "kathrin"], ["1011101", "1001001"], ["a", "a"], ["ab", "ba"]],
    ),
    Function(
        """
def to_binary(n):
    digits = ''
    while n > 0:
        digits = str(n % 2) + digits
        n //= 2
    return digits or '0'
""",
        [[0], [5], [255], [1024]],
    ),
    Function(
        """
def compound(principal, rate, years):
    total = principal
    for _ in range(years):
        total *= 1 + rate / 100
    return round(total, 2)
""",
        [[1000, 5, 2], [1500, 4.3, 6], [100, 0, 9], [250, 10, 1]],
    ),
    Function(
        """
def triangle_kind(a, b, c):
    if a == b and b == c:
        return 'equilateral'
    if a == b or b == c or a == c:
        return 'isosceles'
    return 'scalene'
""",
        [[3, 3, 3], [3, 3, 4], [3, 4, 3], [4, 3, 3], [3, 4, 5]],
    ),
    Function(
        """
def product_except_self(values):
    result = []
    for i in range(len(values)):
        product = 1
        for j, value in enumerate(values):
            if j != i:
                product *= value
        result.append(product)
    return result
""",
        [[[1, 2, 3, 4]], [[-1, 1, 0, -3, 3]], [[2, 5]]],
    ),
    Function(
        """
def second_largest(values):
    ordered = sorted(set(values), reverse=True)
    return ordered[1] if len(ordered) > 1 else None
""",
        [[[3, 1, 2]], [[5, 5]], [[9, 8, 9, 7]], [[1, 2]]],
    ),
    Function(
        """
def spiral(matrix):
    result = []
    while matrix:
        result += matrix[0]
        matrix = [list(row) for row in zip(*matrix[1:])][::-1]
    return result
""",
        [[[[1, 2, 3], [4, 5, 6], [7, 8, 9]]], [[[1, 2], [3, 4]]], [[[1, 2, 3]]]],
    ),
    Function(
        """
def edit_distance(a, b):
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        previous, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            best = min(row[j] + 1, row[j - 1] + 1, previous + (x != y))
            previous, row[j] = row[j], best
    return row[-1]
""",
        [["horse", "ros"], ["intention", "execution"], ["", "ab"], ["same", "same"]],
    ),
    Function(
        """
def group_by_length(words):
    groups = {}
    for word in words:
        groups.setdefault(str(len(word)), []).append(word)
    return groups
""",
        [[["a", "bb", "c"]], [["one", "two", "three"]], [["xx", "yy"]]],
    ),
]

SCRIPTS = [
    Script(
        """
n = int(input())
print(n * (n + 1) // 2)
""",
        ["5\n", "1\n", "100\n", "12345\n"],
    ),
    Script(
        """
a, b = map(int, input().split())
print(a + b)
""",
        ["1 2\n", "-5 5\n", "1000000007 3\n"],
    ),
    Script(
        """
n = int(input())
values = list(map(int, input().split()))
print(*sorted(values))
""",
        ["3\n3 1 2\n", "1\n7\n", "5\n5 -4 3 2 2\n"],
    ),
    Script(
        """
import sys
values = list(map(int, sys.stdin.read().split()[1:]))
print(max(values) - min(values))
""",
        ["4\n1 9 3 5\n", "2\n7 7\n", "3\n-1 0 1\n"],
    ),
    Script(
        """
t = int(input())
for _ in range(t):
    n = int(input())
    print('YES' if n % 2 == 0 else 'NO')
""",
        ["3\n1\n2\n4\n", "2\n7\n9\n", "1\n10\n"],
    ),
    Script(
        """
word = input().strip()
if word == word[::-1]:
    print('YES')
else:
    print('NO')
""",
        ["abba\n", "abc\n", "a\n"],
    ),
    Script(
        """
n, k = map(int, input().split())
for _ in range(k):
    if n % 10 == 0:
        n //= 10
    else:
        n -= 1
print(n)
""",
        ["512 4\n", "1000000000 9\n", "11 1\n"],
    ),
    Script(
        """
n = int(input())
for i in range(1, n + 1):
    if i % 15 == 0:
        print('FizzBuzz')
    elif i % 3 == 0:
        print('Fizz')
    elif i % 5 == 0:
        print('Buzz')
    else:
        print(i)
""",
        ["15\n", "3\n", "20\n"],
    ),
    Script(
        """
n = int(input())
values = list(map(float, input().split()))
print('%.6f' % (sum(values) / n))
""",
        ["3\n1 2 4\n", "2\n0.5 0.25\n", "4\n1 1 1 2\n"],
    ),
    Script(
        """
import math
r = float(input())
print(math.pi * r * r)
""",
        ["1\n", "2.5\n", "10\n"],
    ),
    Script(
        """
rows, columns = map(int, input().split())
grid = [input() for _ in range(rows)]
print(sum(line.count('#') for line in grid))
""",
        ["2 3\n#.#\n.#.\n", "1 1\n.\n", "3 2\n##\n##\n#.\n"],
    ),
    Script(
        """
n = int(input())
names = {}
for _ in range(n):
    name = input().strip()
    if name in names:
        print(name + str(names[name]))
        names[name] += 1
    else:
        print('OK')
        names[name] = 1
""",
        ["4\nabacaba\nacaba\nabacaba\nacab\n", "6\nfirst\nfirst\nsecond\nsecond\nthird\nthird\n"],
    ),
    Script(
        """
s = input().strip()
result = ''
for letter in s.lower():
    if letter not in 'aeiouy':
        result += '.' + letter
print(result)
""",
        ["tour\n", "Codeforces\n", "aBAcAba\n"],
    ),
    Script(
        """
n = int(input())
a, b = 0, 1
for _ in range(n):
    print(a, end=' ')
    a, b = b, a + b
print()
""",
        ["5\n", "1\n", "10\n"],
    ),
    Script(
        """
n = int(input())
best = 0
count = 0
previous = None
for value in input().split():
    value = int(value)
    if previous is not None and value >= previous:
        count += 1
    else:
        count = 1
    best = max(best, count)
    previous = value
print(best)
""",
        ["6\n2 2 1 3 4 1\n", "3\n2 2 9\n", "1\n5\n"],
    ),
    Script(
        """
a = input().strip()
b = input().strip()
print(''.join('1' if x != y else '0' for x, y in zip(a, b)))
""",
        ["1010100\n0100101\n", "000\n111\n", "1\n1\n"],
    ),
    Script(
        """
n, m = map(int, input().split())
edges = [tuple(map(int, input().split())) for _ in range(m)]
parent = list(range(n + 1))
def find(x):
    while parent[x] != x:
        x = parent[x]
    return x
for x, y in edges:
    parent[find(x)] = find(y)
print(len({find(x) for x in range(1, n + 1)}))
""",
        ["5 3\n1 2\n2 3\n4 5\n", "3 0\n", "4 3\n1 2\n3 4\n1 4\n"],
    ),
    Script(
        """
n = int(input())
primes = []
i = 2
while n > 1:
    while n % i == 0:
        primes.append(i)
        n //= i
    i += 1
print(*primes)
""",
        ["12\n", "97\n", "360\n"],
    ),
    Script(
        """
words = input().split()
print(' '.join(word.capitalize() for word in words))
print(len(words))
""",
        ["hello big world\n", "a\n", "one two\n"],
    ),
    Script(
        """
n = int(input())
total = 0
for _ in range(n):
    kind, amount = input().split()
    if kind == 'D':
        total += int(amount)
    else:
        total -= int(amount)
print(total)
""",
        ["3\nD 300\nW 100\nD 50\n", "1\nW 5\n", "2\nD 1\nW 1\n"],
    ),
    Script(
        """
n, x = map(int, input().split())
values = sorted(map(int, input().split()))
left, right = 0, n - 1
boats = 0
while left <= right:
    if values[left] + values[right] <= x:
        left += 1
    right -= 1
    boats += 1
print(boats)
""",
        ["4 10\n7 2 3 9\n", "3 5\n5 5 5\n", "2 8\n1 2\n"],
    ),
    Script(
        """
n = int(input())
for i in range(n):
    print('*' * (2 * i + 1))
""",
        ["3\n", "1\n", "5\n"],
    ),
    Script(
        r"""
import sys
lines = sys.stdin.read().split('\n')
t = int(lines[0])
for case in range(1, t + 1):
    a, b = map(int, lines[case].split())
    print(f'Case {case}: {a * b}')
""",
        ["2\n2 3\n4 5\n", "1\n0 7\n"],
    ),
    Script(
        """
h, m = map(int, input().split(':'))
m += int(input())
h = (h + m // 60) % 24
print('%02d:%02d' % (h, m % 60))
""",
        ["23:59\n1\n", "00:00\n1439\n", "10:30\n45\n"],
    ),
]


def _load(source: str, name: str) -> Callable[..., Any]:
    values: dict[str, Any] = {}
    exec(compile(source, "<reference>", "exec"), values)
    return values[name]


def _value(function: Function, arguments: list[Any]) -> Any:
    copied = json.loads(json.dumps(arguments))  # a function may change its arguments
    return _load(function.source, function.name)(*copied)


def _is_json(value: Any) -> bool:
    return json.loads(json.dumps(value, default=str)) == value


def _printed(script: Script, text: str) -> str:
    output = io.StringIO()
    before = sys.stdin
    sys.stdin = io.StringIO(text)
    try:
        with contextlib.redirect_stdout(output):
            exec(compile(script.source, "<reference>", "exec"), {"__name__": "__main__"})
    finally:
        sys.stdin = before
    return output.getvalue()


def _as_method(source: str) -> str:
    """Returns a function as a method of a class Solution, as LeetCode has it."""
    lines = source.replace("(", "(self, ", 1).splitlines()
    name = source.split("(")[0].split()[-1]
    text = "\n".join(f"    {line}" for line in lines)
    text = text.replace(f"{name}(value)", f"self.{name}(value)")  # a recursive call
    return f"class Solution:\n{text}"


def _annotation(values: list[Any]) -> str:
    kinds = {type(value).__name__ for value in values}
    [kind] = kinds if len(kinds) == 1 else ["object"]
    return "List[int]" if kind == "list" else kind


def _mbpp(function: Function) -> Row:
    expected = [_value(function, arguments) for arguments in function.arguments]
    left_sides = []
    for arguments in function.arguments:
        left_sides.append(f"{function.name}({', '.join(map(repr, arguments))})")
    asserts = [
        f"assert {left} == {value!r}" for left, value in zip(left_sides, expected, strict=True)
    ]
    columns = {"text": "Write it.", "code": function.source, "test_list": asserts}
    return Row("MBPP", columns, function.source, "", function.arguments, expected, left_sides)


# What an assert may compute of the answer. The setup imports math.
_COMPUTED = ("len({0})", "sorted({0})", "str({0})", "isinstance({0}, list)", "{0}[0]", "{0} + [1]",
             "set({0})", "max({0})")  # fmt: skip


def _mbpp_computed(function: Function, form: str) -> Row:
    setup = "import math"
    reference = _load(function.source, function.name)
    left_sides, expected = [], []
    for arguments in function.arguments:
        left = form.format(f"{function.name}({', '.join(map(repr, arguments))})")
        try:
            value = eval(left, {function.name: reference, "math": __import__("math")})
        except (IndexError, ValueError, TypeError):  # the first of no items, a set of lists
            continue
        left_sides.append(left)
        expected.append(value)
    asserts = [
        f"assert {left} == {value!r}" for left, value in zip(left_sides, expected, strict=True)
    ]
    columns = {"text": "Write it.", "test_list": asserts, "test_imports": [setup]}
    arguments = function.arguments[: len(expected)]
    return Row(
        "MBPP, computed", columns, function.source, "", arguments, expected, left_sides, setup
    )


def _apps(function: Function, is_wrapped: bool) -> Row:
    expected = [_value(function, arguments) for arguments in function.arguments]
    outputs = [[value] for value in expected] if is_wrapped else expected
    found = {"fn_name": function.name, "inputs": function.arguments, "outputs": outputs}
    columns = {"question": "Write it.", "input_output": json.dumps(found)}
    source = function.source
    if not is_wrapped:
        source = _as_method(source)
        head = source.splitlines()[1].rstrip(":")
        columns["starter_code"] = f"class Solution:\n{head} -> {_annotation(expected)}:\n"
    layout = "APPS, in lists" if is_wrapped else "APPS, class Solution"
    return Row(layout, columns, source, function.name, function.arguments, expected, [])


def _deepcoder(function: Function, is_wrapped: bool) -> Row:
    expected = [_value(function, arguments) for arguments in function.arguments]
    cases = []
    for arguments, value in zip(function.arguments, expected, strict=True):
        output = [value] if is_wrapped else value
        case = {"type": "function_call", "fn_name": function.name, "input": arguments}
        cases.append(case | {"output": output})
    columns = {"problem": "Write it.", "tests": json.dumps(cases)}
    layout = "DeepCoder, in lists" if is_wrapped else "DeepCoder, bare"
    return Row(layout, columns, function.source, function.name, function.arguments, expected, [])


def _live_code_bench(function: Function) -> Row:
    expected = [_value(function, arguments) for arguments in function.arguments]
    cases = []
    for arguments, value in zip(function.arguments, expected, strict=True):
        text = "\n".join(json.dumps(argument) for argument in arguments)
        cases.append({"input": text, "output": json.dumps(value), "testtype": "functional"})
    columns = {
        "question_content": "Write it.",
        "public_test_cases": json.dumps(cases),
        "metadata": json.dumps({"func_name": function.name}),
    }
    source = _as_method(function.source)
    return Row("LiveCodeBench", columns, source, function.name, function.arguments, expected, [])


def _taco(script: Script) -> Row:
    expected = [_printed(script, text) for text in script.inputs]
    found = {"inputs": script.inputs, "outputs": expected}
    columns = {"question": "Write it.", "input_output": json.dumps(found)}
    inputs: Values = [[text] for text in script.inputs]
    return Row("TACO, standard input", columns, script.source, "", inputs, expected, [])


def _deepcoder_stdin(script: Script) -> Row:
    expected = [_printed(script, text) for text in script.inputs]
    cases = [
        {"type": "stdin_stdout", "input": text, "output": output}
        for text, output in zip(script.inputs, expected, strict=True)
    ]
    columns = {"problem": "Write it.", "tests": json.dumps(cases)}
    inputs: Values = [[text] for text in script.inputs]
    return Row("DeepCoder, standard input", columns, script.source, "", inputs, expected, [])


def _has_json_values(function: Function) -> bool:
    return all(_is_json(_value(function, arguments)) for arguments in function.arguments)


def _is_ambiguous(row: Row) -> bool:
    """Returns whether every value of a bare row is a list of one item: then no reader can know."""
    return all(isinstance(value, list) and len(value) == 1 for value in row.expected)


def rows() -> list[Row]:
    """Returns all rows: each function in several layouts, each program in one or two."""
    found = [_mbpp(function) for function in FUNCTIONS]
    for number, function in enumerate(FUNCTIONS):
        if isinstance(_value(function, function.arguments[0]), list):
            for step in (0, 3):
                computed = _mbpp_computed(function, _COMPUTED[(number + step) % len(_COMPUTED)])
                if computed.expected:
                    found.append(computed)
        if not _has_json_values(function):
            continue  # sets and tuples have no form in JSON
        choices = [
            _apps(function, is_wrapped=True),
            _apps(function, is_wrapped=False),
            _deepcoder(function, is_wrapped=True),
            _deepcoder(function, is_wrapped=False),
            _live_code_bench(function),
        ]
        # Three of the five layouts for each function.
        chosen = [choices[(number + step) % len(choices)] for step in (0, 1, 3)]
        found += [row for row in chosen if not _is_ambiguous(row)]
    for number, script in enumerate(SCRIPTS):
        found.append(_taco(script) if number % 2 else _deepcoder_stdin(script))
    return found
