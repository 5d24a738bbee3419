"""Reads and writes safetensors as transformers does: one file, or shards with an index."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ngpt_train.core.errors import DataError, in_one_line
from ngpt_train.core.files import read_json, write_json

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FLOATS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")  # reading one may execute its code


def write_tensors(directory: Path, tensors: Mapping[str, Tensor], most_bytes: float) -> list[str]:
    """Writes model.safetensors or, above `most_bytes`, shards and their index. Returns the names of the files. A tensor
    is never split, so a shard may be larger. Raises DataError if a file cannot be written, as on a full disk."""
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    split = split_torch_state_dict_into_shards(dict(tensors), max_shard_size=int(min(most_bytes, 2**63)))
    for file, names in split.filename_to_tensors.items():
        try:
            save_file({name: tensors[name] for name in names}, directory / file, metadata={"format": "pt"})
        except (SafetensorError, OSError) as error:
            raise DataError(f"{directory / file} cannot be written: {error}. Is the disk full?") from None
    if split.is_sharded:
        write_json(directory / INDEX, {"metadata": split.metadata, "weight_map": split.tensor_to_filename})
    return list(split.filename_to_tensors)


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """All tensors of a directory, in fp32, which is exact for bf16 and fp16. Executes no code. Raises DataError for
    missing or damaged files, pickles, and other dtypes."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    found: dict[str, Tensor] = {}
    for file, names in _files(directory).items():
        try:
            tensors = load_file(directory / file)
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            raise DataError(f"{directory / file} cannot be read: {in_one_line(error)}. Copy it again") from None
        if names is not None and names != tensors.keys():
            differing = f"only one of them has {min(names ^ tensors.keys())}"
            raise DataError(f"{directory / INDEX} does not fit {file}: {differing}. Copy both again")
        found.update(tensors)
    for name, tensor in found.items():
        if tensor.dtype not in FLOATS:
            dtype, allowed = str(tensor.dtype).removeprefix("torch."), ", ".join(FLOATS.values())
            problem = f"{directory}: {name} has the dtype {dtype}; weights are in {allowed}"
            raise DataError(f"{problem}. A quantised model cannot be imported: take the original model")
    return {name: tensor.float() for name, tensor in found.items()}


def _files(directory: Path) -> Mapping[str, set[str] | None]:
    """The names of tensors by file, from the index; None without an index."""
    if (path := directory / INDEX).exists():
        index = read_json(path)
        places: Any = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(places, dict) or not places:
            raise DataError(f"{path} is damaged: weight_map does not name the file of each tensor. Copy it again")
        files: dict[str, set[str]] = {}
        for name, file in places.items():
            if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
                raise DataError(f"{path} is damaged: {name} is in {file!r}, which is no file beside it")
            files.setdefault(file, set()).add(name)
        if missing := [file for file in files if not (directory / file).is_file()]:
            shards = f"{len(missing)} of {len(files)} shards are"
            raise DataError(f"{directory}: {missing[0]} is missing, which {INDEX} names ({shards}). Copy it again")
        return files
    if (directory / ONE_FILE).is_file():
        return {ONE_FILE: None}
    if pickles := sorted(path.name for pattern in PICKLES for path in directory.glob(pattern)):
        problem = f"{directory}: has {pickles[0]} and no {ONE_FILE}. Reading such a file may execute code in it"
        fix = "Save the model with save_pretrained(DIR) of transformers, which writes safetensors"
        raise DataError(f"{problem}. {fix}")
    raise DataError(f"{directory}: there is no {ONE_FILE} and no {INDEX}")
