"""The keys export.* and import.*: models for other programs, and of other programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Union

from ngpt_train.config.keys import AUTO, CheckpointKeys, Conflict, VerbKeys, key

if TYPE_CHECKING:
    from ngpt_train.config.schema import Config

# The names of interop/layouts/, which cannot be imported before torch; a test compares them.
LAYOUTS = ("llama", "qwen3", "ngpt", "safetensors")


@dataclass
class ExportConfig(CheckpointKeys):
    """A checkpoint for other programs (`export`)."""

    verb = "export"

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

    def refused(self, config: Config) -> Iterator[Conflict]:
        yield from super().refused(config)
        if self.out is None:
            yield "export.out", "no directory is named", "For example export.out=exported/model"


@dataclass
class ImportConfig(VerbKeys):
    """A model of another program as a run (`import`)."""

    verb = "import"

    source: Union[str, None] = key(
        None,
        "Directory of a model that `export` or save_pretrained of transformers wrote; OWNER/NAME on the hub; or the "
        "ckpt.pt of NVIDIA's public nGPT code, with tokenizer=NAME.",
    )
    revision: Union[str, None] = key(None, "Branch, tag or commit of a model on the hub; null: its main branch.")
    out: Union[str, None] = key(None, "Run directory to make, which must not exist or be empty.")

    def refused(self, config: Config) -> Iterator[Conflict]:
        if self.source is None:
            fix = "For example import.source=exported/model, or import.source=HuggingFaceTB/SmolLM2-135M"
            yield "import.source", "no model is named", fix
        if self.out is None:
            yield "import.out", "no directory is named", "For example import.out=runs/imported"
