"""Hugging Face checkpoints: config.json and safetensors, read and written without torch.

    directory = huggingface.resolve("Qwen/Qwen2.5-0.5B")       # a local directory or a hub id
    config, hf_config = huggingface.load_config(directory)
    params = huggingface.load(directory, config, shardings)
    huggingface.save(out, config, params, dtype="bfloat16", hf_config_extra=hf_config)

`config_json.py` translates config.json, `tensors.py` maps the tensors of a checkpoint to
parameters, `reading.py` and `writing.py` use both. A checkpoint that cannot be read raises a
UserError of one line.
"""

from jzero.model.huggingface.config_json import config_json, parse_config
from jzero.model.huggingface.reading import load, load_config, read_positions, reader, resolve
from jzero.model.huggingface.tensors import checkpoint_tensors, flatten, unflatten
from jzero.model.huggingface.writing import DTYPES, save
