"""Measures the host memory that loading a checkpoint takes besides the arrays on the devices.

    python benchmarks/loading.py --model google/gemma-3-1b-pt --dtype float32
    python benchmarks/loading.py --model google/gemma-3-4b-pt --dtype bfloat16 --directory DIR

The checkpoint has random weights in bfloat16 and the sizes of a known model. It is written to
DIR, or to a temporary directory. Every parameter is read as a run reads it and then dropped:
on a CPU the devices share the memory of the host. Linux only.
"""

import argparse
import json
import tempfile
import threading
import time
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from jzero.model import huggingface
from jzero.model.architecture import QwenConfig
from jzero.model.huggingface.reading import reader
from jzero.model.huggingface.tensors import checkpoint_tensors
from jzero.planning.models import architecture

FILE_BYTES = 2e9
SAMPLE_SECONDS = 0.002


def write_checkpoint(model: QwenConfig, directory: Path) -> None:
    """Writes random weights in bfloat16, as config.json, files of FILE_BYTES and their index."""
    rng = np.random.default_rng(0)
    files: dict[str, str] = {}  # tensor -> file
    waiting: dict[str, np.ndarray] = {}

    def write() -> None:
        name = f"model-{len(set(files.values())):05d}.safetensors"
        save_file(waiting, directory / name)
        files.update(dict.fromkeys(waiting, name))
        waiting.clear()

    for tensors in checkpoint_tensors(model, {}).values():
        for tensor in tensors:
            values = rng.standard_normal(tensor.stored_shape, np.float32)
            waiting[tensor.name] = values.astype(ml_dtypes.bfloat16)
            if sum(array.nbytes for array in waiting.values()) > FILE_BYTES:
                write()
    if waiting:
        write()
    index = json.dumps({"metadata": {}, "weight_map": files})
    (directory / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    entries = json.dumps(huggingface.config_json(model, "bfloat16"))
    (directory / "config.json").write_text(entries, encoding="utf-8")


def private_bytes() -> int:
    """Returns the memory of this process without mapped files."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    [line] = [line for line in lines if line.startswith("RssAnon")]
    return int(line.split()[1]) << 10


class Peak:
    """Samples the memory of the process in a thread, until `stop`."""

    def __init__(self) -> None:
        self.bytes = private_bytes()
        self._is_running = True
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()

    def _sample(self) -> None:
        while self._is_running:
            self.bytes = max(self.bytes, private_bytes())
            time.sleep(SAMPLE_SECONDS)

    def stop(self) -> int:
        """Returns the largest sample in bytes."""
        self._is_running = False
        self._thread.join()
        return self.bytes


def measure(directory: Path, dtype: str) -> None:
    """Prints the peak of reading every parameter of a checkpoint."""
    model, _ = huggingface.load_config(directory)
    read = reader(directory, model, dtype)
    names = list(checkpoint_tensors(model, {}))
    before, largest, total = private_bytes(), 0, 0
    start, peak = time.perf_counter(), Peak()
    for name in names:
        values = read(name)
        largest, total = max(largest, values.nbytes), total + values.nbytes
        del values
    needed = peak.stop() - before
    print(f"{total / 1e9:.2f} GB of {dtype} parameters in {time.perf_counter() - start:.0f} s")
    print(
        f"the largest parameter has {largest / 1e9:.2f} GB; reading takes "
        f"{needed / 1e9:.2f} GB of host memory, {needed / largest:.2f} times as much"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="google/gemma-3-1b-pt")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--directory", metavar="DIR", help="is kept, and read if it exists")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(args.directory or temporary)
        if not (directory / "config.json").exists():
            directory.mkdir(parents=True, exist_ok=True)
            write_checkpoint(architecture(args.model), directory)
        measure(directory, args.dtype)


if __name__ == "__main__":
    main()
