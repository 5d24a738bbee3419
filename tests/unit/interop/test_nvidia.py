"""Checkpoints in the form of NVIDIA's train.py; there is no real one of theirs here, so the tests write them."""

import os
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ngpt_train.config.schema import build
from ngpt_train.core.errors import DataError
from ngpt_train.interop.nvidia import read_nvidia
from ngpt_train.models import Decoder, build_model, load_weights
from ngpt_train.models.gpt.keys import GPTConfig
from ngpt_train.models.ngpt.keys import NGPTConfig
from tests.properties.architectures import error
from tests.reference import nvidia

V = 61
TOKENS = torch.randint(V, (2, 30), generator=torch.Generator().manual_seed(1))


def arguments(use_ngpt: int = 1, **changed: Any) -> dict[str, Any]:
    """model_args of train.py, where base_scale of GPT is 0.02."""
    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 48, "vocab_size": V}
    scale = 1.0 / 32**0.5 if use_ngpt else 0.02
    return {"use_nGPT": use_ngpt, **sizes, "base_scale": scale, "bias": False, "dropout": 0.0, **changed}


def save(path: Path, state: dict[str, Tensor], told: dict[str, Any], **more: Any) -> Path:
    """train.py's checkpoint: weights, the state of an optimizer, counters, and the states of both generators."""
    rest = {"optimizer": {"state": {0: {"step": torch.tensor(1.0)}}}, "iter_num": 7, "config": {"dtype": "bfloat16"}}
    rest |= {"rng_state_pytorch_bytes": b"123", "rng_state_numpy": np.random.get_state()}
    torch.save({"model": state, "model_args": told, **rest, **more}, path)
    return path


def our_model(keys: dict[str, Any], weights: dict[str, Tensor], dtype: torch.dtype) -> Decoder:
    schema = {"gpt": GPTConfig, "ngpt": NGPTConfig}[keys["name"]]
    model = build_model(build({f"model.{name}": x for name, x in keys.items()}, schema).model).to(dtype)
    load_weights(model, weights)
    return model.eval()


@pytest.mark.parametrize("base_scale", [None, 0.11])
@pytest.mark.parametrize("use_ngpt", [0, 1])
@torch.no_grad()
def test_logits(use_ngpt: int, base_scale: float | None, tmp_path: Path) -> None:
    """Caught: u and v swapped, a matrix not transposed, a scale of another start, another layout of RoPE's pairs."""
    told = arguments(use_ngpt) | ({} if base_scale is None else {"base_scale": base_scale})
    state = nvidia.random_state(told, seed=0)
    for dtype, most in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        rounded = {name: x.to(dtype) for name, x in state.items()}
        keys, weights, notes = read_nvidia(save(tmp_path / "ckpt.pt", rounded, told))
        logits = our_model(keys, weights, dtype)(TOKENS)
        rounded = {name: x.double() for name, x in rounded.items()}
        assert error(logits, nvidia.forward(rounded, told, TOKENS, "true")) < most
        apart = error(logits, nvidia.forward(rounded, told, TOKENS, "theirs"))
        assert apart > 0.05
    assert "issue 10" in notes[0]
    assert keys["name"] == ("ngpt" if use_ngpt else "gpt")
    if use_ngpt:
        assert keys["s_z.scale"] == ("1/sqrt(d)" if base_scale is None else 0.11)


def test_stored_as_theirs(tmp_path: Path) -> None:
    """Caught: bits that change on the way; names that torch.compile and DDP prefix; bf16 matrices refused."""
    told = arguments(dropout=0.1)
    state = {
        name: x.to(torch.bfloat16 if ".h." in name and x.ndim == 2 else torch.float32)
        for name, x in nvidia.random_state(told, seed=0).items()
    }
    wrapped = {f"_orig_mod.module.{name}": x for name, x in state.items()}
    _, weights, notes = read_nvidia(save(tmp_path / "ckpt.pt", wrapped, told))
    assert weights["layers.1.w_v"].equal(state["transformer.h.1.c_fc.weight"][128:].float())
    assert weights["layers.1.w_down"].equal(state["transformer.h.1.mlp_c_proj.weight"].float().T)
    assert weights["layers.0.s_u"].equal(state["transformer.h.0.suv"][:128])
    assert weights["layers.0.alpha_mlp"].equal(state["transformer.h.0.mlp_alpha"])
    assert {x.dtype for x in weights.values()} == {torch.float32}
    assert all(x.is_contiguous() for x in weights.values())
    assert [("RoPE" in notes[0]), ("have length 1" in notes[1]), ("dropout=0.1" in notes[2])] == [True] * 3


def test_written_by_numpy_1(tmp_path: Path) -> None:
    """Caught: refused, because the state of numpy's generator has the name that numpy 1 gave its function."""
    told = arguments()
    path = save(tmp_path / "ckpt.pt", nvidia.random_state(told, seed=0), told)
    with zipfile.ZipFile(path) as files, zipfile.ZipFile(tmp_path / "old.pt", "w") as old:
        for name in files.namelist():
            old.writestr(name, files.read(name).replace(b"cnumpy._core.multiarray", b"cnumpy.core.multiarray"))
    assert b"cnumpy.core.multiarray" in (tmp_path / "old.pt").read_bytes()
    assert read_nvidia(tmp_path / "old.pt")[0]["n_layers"] == 2


class Program:
    """Runs when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_refused_files(tmp_path: Path) -> None:
    """Caught: code of a file that runs; a file that cannot be read, which ends in a traceback."""
    told, path = arguments(), tmp_path / "ckpt.pt"
    state = nvidia.random_state(told, seed=0)
    save(path, state, told, extra=Program(tmp_path / "ran"))
    with pytest.raises(DataError, match=r"ckpt\.pt: it names posix\.mkdir, and only tensors"):
        read_nvidia(path)
    assert not (tmp_path / "ran").exists()
    whole = save(path, state, told).read_bytes()
    for n in (0, 100, len(whole) // 2, len(whole) - 30):
        path.write_bytes(whole[:n])
        with pytest.raises(DataError, match=r"ckpt\.pt: it "):
            read_nvidia(path)
    with pytest.raises(DataError, match=r"nowhere\.pt: it cannot be read: .*No such file"):
        read_nvidia(tmp_path / "nowhere.pt")
    for content in ({"model": state}, [state], {"model": state, "model_args": 3}):
        torch.save(content, path)
        with pytest.raises(DataError, match="it has no dict 'model_args'"):
            read_nvidia(path)


@pytest.mark.parametrize("use_ngpt", [0, 1])
def test_refused_contents(use_ngpt: int, tmp_path: Path) -> None:
    """Caught: another model's tensors taken for these, or left out."""
    told, path = arguments(use_ngpt), tmp_path / "ckpt.pt"
    state = nvidia.random_state(told, seed=0)
    for changed, message in [
        ({"bias": True}, "bias=True, and it must be False: neither"),
        ({"use_nGPT": 2}, "use_nGPT=2, and it must be 0 or 1"),
        ({"n_layer": "2"}, "n_layer='2', and it must be an integer"),
    ]:
        with pytest.raises(DataError, match=message):
            read_nvidia(save(path, state, told | changed))
    name = "transformer.h.1.query.weight"
    for other, message in [
        ({x: y for x, y in state.items() if x != name}, f"missing: {name} (32, 32)"),
        (state | {"transformer.h.1.query.bias": torch.ones(32)}, "unknown: transformer.h.1.query.bias (32,)"),
        (state | {name: torch.ones(32, 31)}, f"{name} has shape (32, 31), and should have (32, 32)"),
        (state | {name: state[name] * torch.nan}, "layers.1.wq has values that are not finite"),
        (state | {name: 3}, f"model['{name}'] is no tensor"),
        (state | {f"module.{name}": state[name]}, f"model['{name}'] comes twice"),
    ]:
        with pytest.raises(DataError, match=re.escape(message)):
            read_nvidia(save(path, other, told))
    if use_ngpt:
        with pytest.raises(DataError, match="base_scale=None"):
            read_nvidia(save(path, state, told | {"base_scale": None}))
        with pytest.raises(DataError, match=r"a row of layers.1.wq has a length 0.5 away from 1"):
            read_nvidia(save(path, state | {name: state[name] / 2}, told))
