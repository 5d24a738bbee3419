"""The keys of `export` and `import`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Union

from ngpt_train.config.keys import AUTO, key
from ngpt_train.config.sections.verbs import AVERAGE, WEIGHTS

# The names of interop/layouts/layout.py, which cannot be imported before torch; a test compares them.
LAYOUTS = ("llama", "qwen3", "ngpt", "safetensors")


@dataclass
class ExportConfig:
    """A checkpoint for other programs (`export`)."""

    checkpoint: Union[str, None] = key(
        None, "Run directory (its newest checkpoint), checkpoint directory, or RUN/best."
    )
    average: int = key(1, AVERAGE, minimum=1, maximum=1000)
    weights: str = key("trained", WEIGHTS, choices=("trained", "ema"))
    out: Union[str, None] = key(None, "Directory for the model, which must not exist or be empty.")
    layout: str = key(
        AUTO,
        "How the model is written. llama: LlamaForCausalLM of transformers, for GPT; qwen3: Qwen3ForCausalLM, for GPT "
        "with model.qk_norm; ngpt: nGPT, with a file of its own that transformers runs; safetensors: any model, under "
        "the names of docs/weights.md; auto: the first that can.",
        choices=(AUTO, *LAYOUTS),
    )
    dtype: str = key("fp32", "Of the written weights, to which they are rounded.", choices=("fp32", "bf16", "fp16"))
    max_shard_gb: float = key(
        5.0, "A file of weights has at most so many GB (1e9 bytes); more are split.", above=0, maximum=1e6
    )
    rows: int = key(
        4, "Rows of random ids by which the written model is compared with the checkpoint.", minimum=1, maximum=1000
    )


@dataclass
class ImportConfig:
    """A model of another program as a run (`import`)."""

    source: Union[str, None] = key(
        None,
        "Directory of a model that `export` or save_pretrained of transformers wrote; OWNER/NAME on the hub; or the "
        "ckpt.pt of NVIDIA's public nGPT code, with tokenizer=NAME.",
    )
    revision: Union[str, None] = key(None, "Branch, tag or commit of a model on the hub; null: its main branch.")
    out: Union[str, None] = key(None, "Run directory to make, which must not exist or be empty.")
