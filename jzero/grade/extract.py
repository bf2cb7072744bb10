"""The answer in a response, by the template the policy was asked to follow: linear time, and never a guess. None is an
unclosed or empty last box, two answer blocks, a box in the thoughts alone, or what is longer than LONGEST."""

import re

LONGEST = 1200  # characters of an answer
BLOCK = re.compile(r"\s*<answer>(.*)</answer>(?:\s|<\|(?:im_end|endoftext)\|>|</s>)*", re.DOTALL)
BOX = re.compile(r"\\(?:boxed|fbox)\s*")
BRACE = re.compile(r"\\[\\{}]|[{}]")
BARE_BOX = re.compile(r"(-?[0-9][0-9.,]*[0-9]|-?[0-9]|[A-Za-z])(?![A-Za-z0-9])")
WORDS = re.compile(r"(?<=[0-9])[ ]+([A-Za-z]+(?:[ ][A-Za-z]+){0,5})[ .]*\Z")
NUMBER = re.compile(r"-?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?")


def last_box(text: str) -> str | None:
    r"""The argument of the last \boxed or \fbox; escaped braces do not count."""
    *before, rest = BOX.split(text)
    if not before or rest[:1] != "{":
        bare = BARE_BOX.match(rest) if before else None
        return bare and bare[1]
    depth = 0
    for brace in BRACE.finditer(rest):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if not depth:
            return rest[1 : brace.start()]
    return None


def answer_block(text: str) -> str | None:
    """The one <answer> block that directly follows the thoughts and ends the response."""
    found = BLOCK.fullmatch(text)
    return found[1] if found and "answer>" not in found[1] else None


def marked_line(text: str) -> str | None:
    """The rest of the line of the last ####; words that end it are a unit."""
    _, marker, after = text.rpartition("####")
    line = after.partition("\n")[0].lstrip(" :") if marker else ""
    return WORDS.sub(r"\\text{ \1}", line[: 2 * LONGEST])


def last_number(text: str) -> str | None:
    return [None, *NUMBER.findall(text)][-1]


TEMPLATES = dict(
    boxed=last_box, think_boxed=last_box, r1=answer_block, gsm8k=marked_line, number=last_number, answer=str
)


def extract(response: str, template: str) -> str | None:
    if template not in TEMPLATES:
        raise ValueError(f"template={template!r} is not one of {', '.join(TEMPLATES)}")
    _, thought, text = response.rpartition("</think>")
    answer = TEMPLATES[template](text) if thought or template not in ("think_boxed", "r1") else None
    answer = last_box(answer) if answer and "\\boxed" in answer else answer
    answer = (answer or "").strip().strip("*`").strip()
    return answer if answer and len(answer) <= LONGEST else None
