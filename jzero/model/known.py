"""The shapes of the models that recipes name, from their config.json: what is compiled without the weights."""

from pathlib import Path

from jzero.model import hf
from jzero.model.qwen import QwenConfig

# hub id: vocabulary, hidden, intermediate, layers, heads, kv heads, head dim, tied, rope theta: as QwenConfig has them
KNOWN: dict[str, tuple] = {
    "Qwen/Qwen2.5-0.5B": (151936, 896, 4864, 24, 14, 2, 64, True, 1e6),
    "Qwen/Qwen2.5-1.5B": (151936, 1536, 8960, 28, 12, 2, 128, True, 1e6),
    "Qwen/Qwen2.5-3B": (151936, 2048, 11008, 36, 16, 2, 128, True, 1e6),
    "Qwen/Qwen2.5-7B": (152064, 3584, 18944, 28, 28, 4, 128, False, 1e6),
    "Qwen/Qwen2.5-Math-1.5B": (151936, 1536, 8960, 28, 12, 2, 128, True, 1e4),
    "Qwen/Qwen2.5-Math-7B": (152064, 3584, 18944, 28, 28, 4, 128, False, 1e4),
    "Qwen/Qwen3-0.6B": (151936, 1024, 3072, 28, 16, 8, 128, True, 1e6),
    "Qwen/Qwen3-1.7B": (151936, 2048, 6144, 28, 16, 8, 128, True, 1e6),
    "Qwen/Qwen3-4B": (151936, 2560, 9728, 36, 32, 8, 128, True, 1e6),
    "Qwen/Qwen3-8B": (151936, 4096, 12288, 36, 32, 8, 128, False, 1e6),
}


def named(name: str) -> str:
    """The hub id of "qwen2.5-3b", "Qwen2.5-3B" or "Qwen/Qwen2.5-3B"."""
    ids = {key: hub for hub in KNOWN for key in (hub.lower(), hub.split("/")[1].lower())}
    if name.lower() not in ids:
        raise ValueError(f"no known model {name!r}; there are {', '.join(hub.split('/')[1] for hub in KNOWN)}")
    return ids[name.lower()]


def architecture(path: str) -> QwenConfig:
    """Of a local directory, or of a hub id above; nothing is downloaded."""
    if Path(path).expanduser().is_dir():
        return hf.load_config(Path(path).expanduser())[0]
    hub = named(path)
    return QwenConfig("qwen2" if "Qwen2" in hub else "qwen3", *KNOWN[hub], rms_norm_eps=1e-6)
