"""anGPT as transformers' Qwen3ForCausalLM, with its constants and alphas absorbed into the weights.

Two things of Qwen3 differ, and each is made the same function:

- h <- nu (h + alpha (x - h)) is Qwen3's g <- g + y where h = D g, with D <- nu (1 - alpha) D in each step and
  y = nu alpha x / D. Matrices that read h take the factor D in their columns; matrices that write to it take
  nu alpha / D.
- RMSNorm becomes a constant factor. Eight more numbers of the hidden state hold a constant so large that they alone
  decide its root mean square. No matrix reads or writes them, and the gain takes the factor back.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.core.errors import DataError
from ngpt_train.interop.layouts.layout import NOTE, Json, Layout, Tensors
from ngpt_train.interop.layouts.llama import EMBEDDING, OF_LAYER, OUTPUT, Qwen3Layout, to_half
from ngpt_train.models.angpt.keys import AnGPTConfig
from ngpt_train.models.angpt.model import nu, root_mean_square_of_silu
from ngpt_train.models.gpt.keys import GPTConfig
from ngpt_train.models.ngpt.keys import ScaleVectorConfig
from ngpt_train.models.ngpt.model import value_of

PADS = 8  # keeps the width of the hidden state a multiple of 8
SMALLEST = 2.0**-8  # share of the first h in the last one, by which matrices that write to it are divided
CONSTANT = 2.0**20  # its square hides |g|^2 < 2^18 in fp32


class AnGPTLayout(Layout):
    """Weights do not come back from it: `import` refuses the directory."""

    name = "angpt"
    for_transformers = True
    files = ()
    dtypes = ("fp32",)  # absorbed weights would be rounded once more than the model's own
    returns = False

    def refusal(self, config: ModelConfig) -> str | None:
        if isinstance(config, AnGPTConfig):
            return None
        return f"model.name={config.name}: this layout writes model.name=angpt alone"

    def config_json(self, config: ModelConfig) -> dict[str, Any]:
        shared = ("d_model", "n_layers", "n_heads", "n_kv_heads", "d_mlp", "vocab_size", "context", "rope_base")
        # An eps that no square of a head's numbers is near: our norm of q and k has none.
        as_gpt = GPTConfig(qk_norm=True, norm_eps=1e-20, **{name: getattr(config, name) for name in shared})
        return {**Qwen3Layout().config_json(as_gpt), "hidden_size": config.d_model + PADS, NOTE: {}}

    def to_foreign(self, weights: Tensors, config: ModelConfig) -> dict[str, Tensor]:
        assert isinstance(config, AnGPTConfig)
        w = {name: weight.double() for name, weight in weights.items()}
        d, d_mlp, d_head = config.d_model, config.d_mlp or 4 * config.d_model, config.d_head
        nu_uv = math.sqrt(d / d_mlp)
        D = torch.ones(d, dtype=torch.float64)
        norm = F.pad(torch.full((d,), CONSTANT * math.sqrt(PADS / (d + PADS)), dtype=torch.float64), (0, PADS))

        def in_use(name: str, chosen: ScaleVectorConfig) -> Tensor:
            init = torch.tensor([value_of(chosen.init, config)], dtype=torch.float64)
            return w[name] * init / value_of(chosen.scale, config) if name in w else init

        def reads(matrix: Tensor, factor: Tensor | float = 1.0) -> Tensor:
            return F.pad(factor * matrix * D, (0, PADS))

        def writes(matrix: Tensor, factor: Tensor) -> Tensor:
            return F.pad((matrix * factor / D).T, (0, 0, 0, PADS))

        found = {EMBEDDING: F.pad(w["embedding"], (0, PADS), value=CONSTANT)}
        for layer in (f"layers.{i}" for i in range(config.n_layers)):
            of_layer: dict[str, Tensor] = {"norm_attn": norm, "norm_mlp": norm}
            of_layer |= dict.fromkeys(("q_norm", "k_norm"), torch.ones(d_head, dtype=torch.float64))
            for name in ("wq", "wk", "wv"):
                of_layer[name] = reads(w[f"{layer}.{name}"])
                if name != "wv" and config.rope_layout == "interleaved":
                    of_layer[name] = to_half(of_layer[name], d_head)
            alpha = in_use(f"{layer}.alpha_attn", config.alpha_attn)
            D = D * nu(alpha) * (1 - alpha)
            of_layer["wo"] = writes(w[f"{layer}.wo"], nu(alpha) * alpha)
            of_layer["w_u"] = reads(w[f"{layer}.w_u"], nu_uv)
            of_layer["w_v"] = reads(w[f"{layer}.w_v"], nu_uv * math.sqrt(d))
            alpha = in_use(f"{layer}.alpha_mlp", config.alpha_mlp)
            D = D * nu(alpha) * (1 - alpha)
            of_layer["w_down"] = writes(w[f"{layer}.w_down"], nu(alpha) * alpha / root_mean_square_of_silu(nu_uv))
            found |= {f"model.{layer}.{OF_LAYER[name]}": x for name, x in of_layer.items()}
        if not bool((D.abs() >= SMALLEST).all()):
            least = f"{D.abs().nan_to_num().min():.2g}"
            problem = f"an alpha near 1 leaves {least} of a coordinate of the first h in the last"
            needed = f"{SMALLEST:.2g} is needed: fp32 would lose the rest"
            raise DataError(f"export.layout=angpt: {problem}, {needed}\n  Set export.layout=safetensors")
        found["model.norm.weight"] = norm
        output = w["embedding" if config.tied_embeddings else "output"]
        found[OUTPUT] = reads(output, in_use("s_z", config.s_z)[:, None])
        return {name: x.contiguous().to(weights["embedding"].dtype, copy=True) for name, x in found.items()}

    def from_foreign(self, config_json: Json, weights: Tensors) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Raises DataError."""
        fix = "Import an export with export.layout=safetensors"
        raise DataError(f"config.json: {NOTE}.layout=angpt: anGPT's factors are absorbed into these weights\n  {fix}")
