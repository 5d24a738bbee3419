"""nGPT for transformers: config.json, the names of its weights, and a modeling file that needs nothing of ngpt-train.

Every option of model=ngpt can be written. Weights are written as they are stored, so an import returns the same bits.
With model.constraint=parametrization the modeling file normalises the rows at each use, as ngpt-train does.
"""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.core.errors import DataError
from ngpt_train.interop.layouts.layout import Layout, Tensors, check_tensors, checked_config, turned, turned_shapes
from ngpt_train.models.ngpt.keys import NGPTConfig

MODEL_TYPE = "ngpt_train_ngpt"
# Ours -> config.json's.
NAMES = {
    "vocab_size": "vocab_size",
    "d_model": "hidden_size",
    "d_mlp": "intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "context": "max_position_embeddings",
    "tied_embeddings": "tie_word_embeddings",
    "activation": "hidden_act",
    "update": "sphere_update",
}
SAME = ("rope_base", "rope_layout", "alpha_sign", "qk_norm", "softmax_scale", "update_attn", "update_mlp", "norm_eps")
NAMES |= {name: name for name in (*SAME, "constraint")}
SCALES = ("alpha_attn", "alpha_mlp", "s_qk", "s_u", "s_v", "s_z")
REFERENCE = {"d_model": "d_ref", "n_layers": "L_ref"}  # key of model.reference: its name in the words of a scale
# The modeling file's names, in a block and outside of blocks.
PLACES = {name: f"attention.{name}.weight" for name in ("wq", "wk", "wv", "wo")}
PLACES |= {name: f"mlp.{name}.weight" for name in ("w_u", "w_v", "w_down")}
PLACES |= {"s_qk": "attention.s_qk.stored", "s_u": "mlp.s_u.stored", "s_v": "mlp.s_v.stored"}
PLACES |= {"alpha_attn": "alpha_attn.stored", "alpha_mlp": "alpha_mlp.stored"}
OUTSIDE = {"embedding": "model.embed_tokens.weight", "output": "lm_head.weight", "s_z": "s_z.stored"}


class NGPTLayout(Layout):
    name = "ngpt"
    for_transformers = True
    files = tuple(Path(__file__).with_name(f"{name}_ngpt.py") for name in ("configuration", "modeling"))

    def refusal(self, config: ModelConfig) -> str | None:
        if isinstance(config, NGPTConfig) and config.name == "ngpt":
            return None
        return f"model.name={config.name}: this layout writes model.name=ngpt alone"

    def config_json(self, config: ModelConfig) -> dict[str, Any]:
        assert isinstance(config, NGPTConfig)
        written = {theirs: getattr(config, ours) for ours, theirs in NAMES.items()}
        written["num_key_value_heads"] = config.n_kv_heads or config.n_heads
        written["intermediate_size"] = config.d_mlp or 4 * config.d_model
        scales = {name: asdict(getattr(config, name)) for name in SCALES}
        words = " ".join(f"{scale['init']} {scale['scale']}" for scale in scales.values())
        return {
            "architectures": ["NGPTForCausalLM"],
            "model_type": MODEL_TYPE,
            "auto_map": {
                "AutoConfig": "configuration_ngpt.NGPTConfig",
                "AutoModel": "modeling_ngpt.NGPTModel",
                "AutoModelForCausalLM": "modeling_ngpt.NGPTForCausalLM",
            },
            **written,
            **scales,
            # Other keys of model.reference act on learning rates alone, which are no part of the model.
            "reference": {name: getattr(config.reference, name) for name, size in REFERENCE.items() if size in words},
        }

    def to_foreign(self, weights: Tensors, config: ModelConfig) -> dict[str, Tensor]:
        return {foreign(name): turned(name, x) for name, x in weights.items()}

    def from_foreign(
        self, config_json: Mapping[str, Any], weights: Tensors
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        keys = keys_of(config_json)
        config = checked_config(keys, NGPTConfig, "in config.json")
        shapes = turned_shapes(config, weights)
        # Some programs write both matrices of a tied pair.
        given = dict(weights)
        copy, table = given.get(OUTSIDE["output"]), given.get(OUTSIDE["embedding"])
        if config.tied_embeddings and copy is not None and table is not None and copy.equal(table):
            del given[OUTSIDE["output"]]
        check_tensors(given, {foreign(name): shape for name, shape in shapes.items()})
        return keys, {name: turned(name, given[foreign(name)]) for name in shapes}


def foreign(name: str) -> str:
    """The modeling file's name for a canonical name."""
    if name in OUTSIDE:
        return OUTSIDE[name]
    *block, weight = name.split(".")
    return ".".join(["model", *block, PLACES[weight]])


def keys_of(config_json: Mapping[str, Any]) -> dict[str, Any]:
    """model.* keys, by dotted names. Raises DataError if config.json is another model's or lacks a key."""
    if (found := config_json.get("model_type")) != MODEL_TYPE:
        raise DataError(f"config.json: model_type={found!r} is not {MODEL_TYPE!r}, which export.layout=ngpt writes")
    tied = {"tie_word_embeddings": False, **config_json}  # transformers may leave out its own default
    keys = {"name": "ngpt"} | {ours: read(tied, theirs) for ours, theirs in NAMES.items()}
    for name in SCALES:
        leaves = ("kind", "init", "scale", "shared") if name == "s_qk" else ("kind", "init", "scale")
        keys |= {f"{name}.{leaf}": read(tied, name, leaf) for leaf in leaves}
    reference = read(tied, "reference")
    given = [x for x in REFERENCE if not isinstance(reference, Mapping) or reference.get(x) is not None]
    return keys | {f"reference.{x}": read(tied, "reference", x) for x in given}


def read(tree: Any, *path: str) -> Any:
    """The entry at this path. Raises DataError if there is none."""
    for depth, name in enumerate(path):
        if not isinstance(tree, Mapping) or name not in tree:
            raise DataError(f"config.json: {'.'.join(path[: depth + 1])} is missing, which export.layout=ngpt writes")
        tree = tree[name]
    return tree
