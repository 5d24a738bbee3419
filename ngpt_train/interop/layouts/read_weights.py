"""Reads the weights of this directory with numpy alone: python read_weights.py [DIRECTORY] prints names and shapes.

A safetensors file is the length of a header as 8 bytes, little-endian, then the header, which is JSON, then the bytes
of the tensors. What each name means is written in docs/weights.md of ngpt-train, the sizes are in
ngpt_train_config.yaml.
"""

import json
import sys
from pathlib import Path

import numpy as np

DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "U8": "u1", "BOOL": "?"}


def read_file(path):
    """The tensors of one file by name; bf16, which numpy does not have, as float32."""
    content = np.memmap(path, np.uint8, "r")
    length = int.from_bytes(content[:8].tobytes(), "little")
    header = json.loads(content[8 : 8 + length].tobytes())
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        values = np.frombuffer(content[begin:end].tobytes(), DTYPES[entry["dtype"]])
        if entry["dtype"] == "BF16":  # the upper half of a float32
            values = (values.astype(np.uint32) << 16).view(np.float32)
        tensors[name] = values.reshape(entry["shape"])
    return tensors


def read(directory):
    """All tensors of an exported model by name, from one file or from its shards."""
    directory = Path(directory)
    index = directory / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    return {name: values for file in names for name, values in read_file(directory / file).items()}


if __name__ == "__main__":
    for name, values in read(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent).items():
        print(f"{name:40} {values.dtype!s:8} {values.shape}")
