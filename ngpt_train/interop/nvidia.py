"""Reads checkpoints of NVIDIA's public code (github.com/NVIDIA/ngpt, train.py): its nGPT and its baseline GPT.

Their nGPT differs from ours in two things. They multiply u by sqrt(d_model), as well as v; Norm(MLP(h)) cancels this.
And their rotary embedding does not rotate (issue 10 there): each dimension gets only one of a rotation's two products.
"""

import math
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.core.errors import DataError
from ngpt_train.interop.layouts.layout import Tensors, check_layers, check_tensors, checked_config, turned
from ngpt_train.models.gpt.keys import GPTConfig
from ngpt_train.models.ngpt.keys import NGPTConfig

# Prefixes of torch.compile and DDP.
WRAPPERS = ("_orig_mod.", "module.")
SIZES = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")
# train.py stores the state of numpy's generator, an array of uint32. weights_only=True allows it with this list, which
# runs no code of the file. numpy 1 and numpy 2 have different names for _reconstruct.
_RECONSTRUCT = np.zeros(1).__reduce__()[0]
OF_NUMPY: list[Any] = [np.ndarray, np.dtype, type(np.dtype(np.uint32)), _RECONSTRUCT]
OF_NUMPY += [(_RECONSTRUCT, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")]
LONGEST = 1e-2  # largest |length - 1| of a row; bf16 rounds it by up to 4e-3
ROTATION = (
    "these weights were trained with a rotary embedding that does not rotate (github.com/NVIDIA/ngpt, issue 10). Our "
    "model has RoPE, so its logits differ from those of their code. Train on before you use the model or compare it"
)


class Part(NamedTuple):
    """One of our weights: `rows` of their tensor `theirs`, which has `shape`."""

    theirs: str
    shape: tuple[int, ...]
    ours: str
    rows: slice = slice(None)


def read_nvidia(path: Path) -> tuple[dict[str, Any], dict[str, Tensor], list[str]]:
    """model.* keys by dotted names, canonical weights in at least fp32, and sentences for the log.

    Raises DataError if torch.load refuses the file with weights_only=True, if train.py would not write such contents,
    or if our models lack them, such as biases.
    """
    checkpoint = load(path)
    arguments, state = checkpoint["model_args"], without_wrappers(checkpoint["model"], path)
    check_arguments(arguments, path)
    keys = model_keys(arguments)
    schema: type[ModelConfig] = NGPTConfig if arguments["use_nGPT"] else GPTConfig
    config = checked_config(keys, schema, f"in model_args of {path}")
    check_layers(config.n_layers, state)
    table = list(parts(arguments))
    check_tensors(state, {part.theirs: part.shape for part in table}, str(path))
    weights = {}
    for theirs, _, name, rows in table:
        x = state[theirs][rows]
        x = weights[name] = turned(name, x.to(torch.promote_types(x.dtype, torch.float32))).clone()
        if not x.isfinite().all():
            raise DataError(f"{path}: {name} has values that are not finite. Take an earlier checkpoint")
    notes = [f"{path}: {ROTATION}"]
    if arguments["use_nGPT"]:
        notes.append(checked_lengths(weights, path))
    if arguments.get("dropout"):
        notes.append(f"{path}: dropout={arguments['dropout']} in model_args has no effect in their code; left out")
    return keys, weights, notes


def load(path: Path) -> Mapping[str, Any]:
    """train.py's dict. No code of the file runs."""
    fix = "Give the ckpt.pt that train.py of github.com/NVIDIA/ngpt writes"
    if path.is_file() and not zipfile.is_zipfile(path):
        raise DataError(f"{path}: it is no file that torch.save writes, or is cut off\n  {fix}")
    try:
        with torch.serialization.safe_globals(OF_NUMPY):
            checkpoint = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
    except (pickle.UnpicklingError, OSError, RuntimeError, EOFError, ValueError, KeyError) as error:
        if called := re.search(r"GLOBAL (\S+)", str(error)):
            problem = f"it names {called[1]}, and only tensors and numbers are read, because others may run code"
        else:
            problem = f"it cannot be read: {(str(error).splitlines() or [type(error).__name__])[0]}"
        raise DataError(f"{path}: {problem}\n  {fix}") from error
    for name in ("model_args", "model"):
        if not isinstance(checkpoint, Mapping) or not isinstance(checkpoint.get(name), Mapping):
            raise DataError(f"{path}: it has no dict {name!r}\n  {fix}")
    return checkpoint


def without_wrappers(state: Mapping[str, Any], path: Path) -> dict[str, Tensor]:
    """The tensors, by their names in model.py."""
    plain: dict[str, Tensor] = {}
    for name, x in state.items():
        while name.startswith(WRAPPERS):
            name = name.split(".", 1)[1]
        if name in plain or not isinstance(x, Tensor):
            raise DataError(f"{path}: model[{name!r}] {'comes twice' if name in plain else 'is no tensor'}")
        plain[name] = x
    return plain


def check_arguments(arguments: Mapping[str, Any], path: Path) -> None:
    def refuse(name: str, allowed: str) -> None:
        raise DataError(f"{path}: model_args has {name}={arguments.get(name)!r}, and it must be {allowed}")

    if arguments.get("use_nGPT") not in (0, 1):
        refuse("use_nGPT", "0 or 1")
    for name in SIZES:
        if type(arguments.get(name)) is not int or arguments[name] < 1:
            refuse(name, "an integer >= 1")
    if arguments.get("bias"):
        refuse("bias", "False: neither model=ngpt nor model=gpt has biases")
    scale = arguments.get("base_scale")
    if arguments["use_nGPT"] and not (isinstance(scale, float) and 0 < scale < math.inf):
        refuse("base_scale", "a number > 0: nGPT divides its scale vectors by it")


def model_keys(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """model.* keys by dotted names, with the constants of their Block."""
    layers, heads, d, context, vocabulary = (arguments[name] for name in SIZES)
    keys: dict[str, Any] = {"d_model": d, "n_layers": layers, "n_heads": heads, "n_kv_heads": heads, "d_mlp": 4 * d}
    keys |= {"vocab_size": vocabulary, "context": context, "tied_embeddings": False, "activation": "silu"}
    keys |= {"rope_base": 10000.0, "rope_layout": "interleaved"}  # their code pairs neighbours too
    if not arguments["use_nGPT"]:
        return {"name": "gpt", **keys, "norm_eps": 1e-6, "qk_norm": False, "mlp": "gated"}
    keys = {"name": "ngpt", **keys, "constraint": "projection", "alpha_sign": "positive"}
    scale = arguments["base_scale"]
    base = "1/sqrt(d)" if scale == 1 / math.sqrt(d) else scale
    # A scale vector is stored * init_value / init_scaling, as in ours.
    for name in ("alpha_attn", "alpha_mlp", "s_qk", "s_u", "s_v", "s_z"):
        keys |= {f"{name}.kind": "vector", f"{name}.init": 0.05 if name.startswith("alpha") else 1.0}
        keys[f"{name}.scale"] = 1.0 if name in ("s_u", "s_v") else base
    return keys


def parts(arguments: Mapping[str, Any]) -> Iterator[Part]:
    """All of our weights. `turned` then transposes W_o and W_down: they apply matrices from the left."""
    d, V, is_ngpt = arguments["n_embd"], arguments["vocab_size"], arguments["use_nGPT"] == 1
    first, second = slice(4 * d), slice(4 * d, None)
    yield Part("transformer.wte.weight", (V, d), "embedding")
    yield Part("lm_head.weight", (V, d), "output")
    yield Part("sz", (V,), "s_z") if is_ngpt else Part("rmsnorm_f.weight", (d,), "norm_final")
    for i in range(arguments["n_layer"]):
        theirs, ours = f"transformer.h.{i}.", f"layers.{i}."
        for name, own in (("query", "wq"), ("key", "wk"), ("value", "wv"), ("att_c_proj", "wo")):
            yield Part(f"{theirs}{name}.weight", (d, d), ours + own)
        yield Part(f"{theirs}c_fc.weight", (8 * d, d), f"{ours}w_u", first)
        yield Part(f"{theirs}c_fc.weight", (8 * d, d), f"{ours}w_v", second)
        yield Part(f"{theirs}mlp_c_proj.weight", (d, 4 * d), f"{ours}w_down")
        if is_ngpt:
            for name, own in (("attn_alpha", "alpha_attn"), ("mlp_alpha", "alpha_mlp"), ("sqk", "s_qk")):
                yield Part(theirs + name, (d,), ours + own)
            yield Part(f"{theirs}suv", (8 * d,), f"{ours}s_u", first)
            yield Part(f"{theirs}suv", (8 * d,), f"{ours}s_v", second)
        else:
            for name, own in (("rmsnorm_att", "norm_attn"), ("rmsnorm_mlp", "norm_mlp")):
                yield Part(f"{theirs}{name}.weight", (d,), ours + own)


def checked_lengths(weights: Tensors, path: Path) -> str:
    """A sentence about the lengths of rows. train.py normalises rows after each step, mostly in bf16. Raises DataError
    if a length is not 1."""
    most, name = max((x.norm(dim=-1).sub(1).abs().max().item(), name) for name, x in weights.items() if x.ndim == 2)
    if not most < LONGEST:
        why = "train.py gives every row of nGPT length 1 before it saves, so this is no checkpoint of it"
        raise DataError(f"{path}: a row of {name} has a length {most:.2g} away from 1. {why}")
    return f"{path}: rows have length 1 to {most:.1e}, as stored; the first step of training makes it exact"
