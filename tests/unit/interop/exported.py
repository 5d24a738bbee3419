"""Exports of jittered models, as `export` writes them, and what transformers makes of them."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ngpt_train.interop.layouts.layout import Layout
from ngpt_train.models import Decoder, export_weights


def write(model: Decoder, layout: Layout, folder: Path) -> Path:
    folder.mkdir(parents=True)
    config = {**layout.config_json(model.config), "eos_token_id": None, "bos_token_id": None}
    (folder / "config.json").write_text(json.dumps(config))
    foreign = layout.to_foreign(export_weights(model), model.config)
    save_file(foreign, folder / "model.safetensors", metadata={"format": "pt"})
    for file in layout.files:
        shutil.copy(file, folder)
    return folder


def load(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=dtype, **options).eval()


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
