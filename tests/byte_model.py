"""A model of random weights with a chat template, and a file of problems, for the front door."""

import json
from pathlib import Path

import reference
import servers

from jzero.model import huggingface, qwen

TEMPLATE = """{% for message in messages %}<{{ message.role }}>{{ message.content }}
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""


def save_model(path: Path) -> str:
    """Writes a tiny model whose tokens are bytes. Returns its directory."""
    tok = servers.byte_tokenizer()
    arch = qwen.QwenConfig("qwen2", len(tok), 32, 64, 2, 2, 1, 16, True, 10000.0, 1e-6)
    extra = {"max_position_embeddings": 1024}
    params = reference.random_params(arch)
    huggingface.save(path, arch, params, dtype="float32", hf_config_extra=extra)
    tok.save_pretrained(path)
    (path / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return str(path)


def save_problems(path: Path, count: int = 20) -> str:
    """Writes sums with worked solutions. Returns the file."""
    rows = []
    for i in range(count):
        rows.append({"question": f"What is {i} + 3?", "answer": f"{i}+3\n#### {i + 3}"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)
