"""Chat templates that build long texts: they end with one line, before the memory is allocated."""

import json
import subprocess
import sys

from jzero.model import chat_template, tokenizer

BIG = 10**10  # bytes
GROW = "{% set ns = namespace(x=%s) %}{% for i in range(60) %}{% set ns.x = %s %}{% endfor %}"
LIST = GROW.replace("%s", "['ab']", 1).replace("%s", "[ns.x, ns.x]", 1)
ROWS = "{% set rows = ['a' * 99999] * 99999 %}"

BOMBS = {
    "*": "{{ 'a' * 99999 * 99999 }}",
    "* of a list": "{{ ([0] * 99999 * 99999) | length }}",
    "* of integers": GROW.replace("%s", "10", 1).replace("%s", "ns.x * ns.x", 1),
    "**": "{{ (9 ** (9 ** 9)) | string | length }}",
    "+": GROW.replace("%s", "'a'", 1).replace("%s", "ns.x + ns.x", 1),
    "+ of lists": GROW.replace("%s", "['a']", 1).replace("%s", "ns.x + ns.x", 1),
    "~": GROW.replace("%s", "'a'", 1).replace("%s", "ns.x ~ ns.x", 1),
    "~ of a list": LIST + "{{ '' ~ ns.x }}",
    "%": f"{{{{ '%{BIG - 1}d' % 1 }}}}",
    "% of an argument": "{{ '%*d' % (9999999999, 1) }}",
    "output of a list": LIST + "{{ ns.x }}",
    "output": ROWS + "{% for row in rows %}{{ row }}{% endfor %}",
    "text of a template": "{% for a in range(99999) %}" + "a" * 99999 + "{% endfor %}",
    "block": ROWS + "{% set x %}{% for row in rows %}{{ row }}{% endfor %}{% endset %}{{ x[:1] }}",
    "macro": "{% macro m() %}{% for a in range(99999) %}" + "a" * 99999 + "{% endfor %}"
    "{% endmacro %}{{ m()[:1] }}",
    "kept texts": GROW.replace("60", "99999")
    .replace("%s", "[]", 1)
    .replace("%s", "ns.x + ['a' * 99999]", 1),
    ".center": f"{{{{ 'a'.center({BIG}) }}}}",
    ".ljust": f"{{{{ 'a'.ljust({BIG}) }}}}",
    ".rjust": f"{{{{ 'a'.rjust({BIG}) }}}}",
    ".zfill": f"{{{{ 'a'.zfill({BIG}) }}}}",
    ".expandtabs": f"{{{{ '\t'.expandtabs({BIG // 8}) }}}}",
    ".replace": "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
    ".join": ROWS + "{{ ','.join(rows) }}",
    ".join of a generator": ROWS + "{{ ','.join(rows | map('upper')) }}",
    ".format": "{{ '{:999999999}'.format(1) }}",
    ".format of an argument": "{{ '{:{}}'.format(1, 9999999999) }}",
    ".format of a list": LIST + "{{ '{}'.format(ns.x) }}",
    ".format_map": "{{ '{a:999999999}'.format_map({'a': 1}) }}",
    ".translate": "{{ ('a' * 99999).translate({97: 'b' * 99999}) }}",
    ".to_bytes": f"{{{{ (1).to_bytes({BIG}, 'big') | length }}}}",
    ".split": "{{ ('a ' * 9999999).split(' ') | length }}",
    "a method of a list": f"{{{{ (['a'] | map(attribute='ljust') | first)({BIG}) }}}}",
    "|center": f"{{{{ 'a' | center({BIG}) }}}}",
    "|indent": f"{{{{ 'a\n' | indent({BIG}) }}}}",
    "|format": "{{ '%999999999d' | format(1) }}",
    "|join": ROWS + "{{ rows | join }}",
    "|join of a text": "{{ ('a' * 99999) | join('b' * 99999) }}",
    "|join of a named text": "{{ ('a' * 99999) | join(d='b' * 99999) }}",
    "|map": ROWS + f"{{{{ rows | map('center', {BIG}) | first }}}}",
    "|map of joins": ROWS + "{{ [rows] | map('join') | first }}",
    "|replace": "{{ ('a' * 99999) | replace('a', 'b' * 99999) }}",
    "|batch": f"{{{{ [1] | batch({BIG}, 'a') | first | length }}}}",
    "|list": "{{ ('é' * 50000000) | list | length }}",
    "|string": LIST + "{{ ns.x | string | length }}",
    "|pprint": LIST + "{{ ns.x | pprint | length }}",
    "|tojson": LIST + "{{ ns.x | tojson | length }}",
    "|tojson with an indent": f"{{{{ [[1]] | tojson(indent={BIG}) }}}}",
    "|tojson with separators": "{{ ([1] * 99999) | tojson(separators=('b' * 99999, ':')) }}",
    "|wordwrap": "{{ ('a ' * 99999) | wordwrap(1, wrapstring='b' * 99999) }}",
    "|urlize": "{{ ('http://a.b ' * 9999) | urlize(rel='b' * 999999) }}",
    "|round": f"{{{{ 1.5 | round({BIG}, 'ceil') }}}}",
    "|sum": "{{ ([[0] * 99999] * 99999) | sum(start=[]) | length }}",
    "{% filter %}": f"{{% filter center({BIG}) %}}a{{% endfilter %}}",
}

# Run in a process of its own: a bomb that is not found ends it, and not the tests.
CHILD = """
import json, resource, sys
from jzero.errors import UserError
from jzero.model import chat_template, tokenizer

chat_template.TEMPLATE_BYTES = 32 << 20
with open("/proc/self/statm") as file:
    mapped = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (mapped + (400 << 20),) * 2)
tok = tokenizer.countdown()
for name, template in json.load(sys.stdin).items():
    tok.chat_template = template
    try:
        text = chat_template.render(tok, [{"role": "user", "content": "hello"}])
        print(name, "wrote", len(text))
    except UserError as error:
        if "MemoryError" in str(error) or "Timeout" in str(error) or "\\n" in str(error):
            print(name, str(error)[:300])
        elif "SecurityError" not in str(error):
            print(name, str(error)[:300])
"""


def test_templates_that_build_long_texts_end_before_they_allocate() -> None:
    child = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=json.dumps(BOMBS),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert child.returncode == 0, child.stderr[-2000:]
    assert child.stdout == ""


HEALTHY = {
    "{{ '-' * 3 ~ 2 ** 3 ~ [1, 'a'] ~ none ~ (7 % 4 + 1) }}": "---8[1, 'a']None4",
    "{{ '%3d|%s' % (1, 'a') }}{{ '%s' | format('b') }}{{ '{:>3}'.format(2) }}": "  1|ab  2",
    "{{ 'a b'.split() }}{{ 'a,b'.split(',', 1)[1] }}{{ ' a '.strip() }}": "['a', 'b']ba",
    "{{ ['a', 'b'] | join(', ') }}{{ '-'.join(['c'] | map('upper')) }}": "a, bC",
    "{{ {'a': [1]} | tojson(indent=2) }}": '{\n  "a": [\n    1\n  ]\n}',
    "{{ {'é': 1} | tojson }}": '{"é": 1}',
    "{{ 'a\nb' | indent(2) }}{{ 'a' | center(3) }}{{ 'aa' | replace('a', 'b') }}": "a\n  b a bb",
    "{{ [1, 2] | sum }}{{ [{'n': 2}] | sum(attribute='n') }}{{ 1.256 | round(2) }}": "321.26",
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}": "1",
    "{{ messages[0] }}": "{'role': 'user', 'content': 'hello'}",
    "{{ 5 | default(10 ** 12) }}{{ missing | default(10 ** 12) }}": f"5{10**12}",
    "{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m('a') }}{{ m(none) }}{{ range(3) | list }}": (
        "<a><None>[0, 1, 2]"
    ),
    "{% set x %}a{{ 1 }}{% endset %}{{ x | upper }}{{ missing }}{{ '<' | e }}": "A1&lt;",
}


def test_healthy_templates_are_unchanged() -> None:
    tok = tokenizer.countdown()
    for template, text in HEALTHY.items():
        tok.chat_template = template + "{{ messages[0].content }}"
        assert chat_template.render(tok, [{"role": "user", "content": "hello"}]) == text + "hello"


def test_a_long_conversation_has_enough_memory() -> None:
    tok = tokenizer.countdown()
    # The text of all messages so far, at each message, as some templates have it.
    tok.chat_template = (
        "{% set ns = namespace(x='') %}{% for m in messages %}"
        "{% set ns.x = ns.x + m.content.split('</think>')[-1].strip() %}{% endfor %}{{ ns.x }}"
    )
    messages = [{"role": "user", "content": "a" * 10_000}] * 200
    assert len(chat_template.render(tok, messages)) == 2_000_000
