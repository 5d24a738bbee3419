"""nGPT, the normalized Transformer on the hypersphere (Loshchilov et al. 2024, arXiv:2410.01131), for transformers.

Every hidden state and every row of every matrix has length 1. Attention and MLP are not added to h: h moves towards
h_A = Norm(ATTN(h)) and h_M = Norm(MLP(h)) by the eigen learning rates alpha_A and alpha_M, one per dimension. The
equations' numbers are the paper's.

Norms, scale vectors, softmax and logits are computed in fp32 where the weights are bf16 or fp16, and scale vectors are
loaded in fp32. The angles of RoPE are computed in fp64.

This file stands alone: it is copied beside config.json, and transformers reads it with trust_remote_code=True. It has
no dropout. Whoever trains it with constraint=projection or ball calls `project_` after each step of the optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel, initialization
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import can_return_tuple

from .configuration_ngpt import NGPTConfig


def at_least_fp32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def norm(x: Tensor, eps: float = 0.0) -> Tensor:
    """Norm(x) = x / ||x||, with eps x / sqrt(||x||^2 + eps); computed and returned in at least fp32."""
    x = at_least_fp32(x)
    if eps:
        return x * (x.square().sum(-1, keepdim=True) + eps).rsqrt()
    return F.normalize(x, dim=-1, eps=1e-12)


class ScaleVector(nn.Module):
    """A learned vector s, stored as s / (init / scale), so that Adam moves s by lr * init / scale a step: section 2.5.

    `stored` is `(size,)`, with kind=scalar `(1,)`. With kind=fixed there is none, and s is `init`.
    """

    def __init__(self, size: int, chosen: dict[str, Any], config: NGPTConfig) -> None:
        super().__init__()
        self.size, self.init = size, config.value_of(chosen["init"])
        self.scale = config.value_of(chosen["scale"])
        self.stored: nn.Parameter | None = None
        if chosen["kind"] != "fixed":
            self.stored = nn.Parameter(torch.full((1 if chosen["kind"] == "scalar" else size,), self.scale))

    def forward(self, h: Tensor) -> Tensor:
        """s `(size,)` on the device of h, in at least fp32."""
        if self.stored is None:
            return torch.full((self.size,), self.init, device=h.device, dtype=torch.promote_types(h.dtype, torch.float))
        return (at_least_fp32(self.stored) * (self.init / self.scale)).expand(self.size)


class EigenLearningRates(ScaleVector):
    """|alpha| `(d_model,)` (section 2.2.2); with alpha_sign=free alpha itself (section A.2)."""

    def __init__(self, chosen: dict[str, Any], config: NGPTConfig) -> None:
        super().__init__(config.hidden_size, chosen, config)
        self.positive = config.alpha_sign == "positive"

    def forward(self, h: Tensor) -> Tensor:
        alpha = super().forward(h)
        return alpha.abs() if self.positive else alpha


class SphereLinear(nn.Linear):
    """y = W x, where W consists of vectors of d_model numbers: rows (along=-1), or columns (along=0) if it writes to h.
    With constraint=projection they are stored with length 1, with ball with at most 1; with parametrization each use
    divides them by it."""

    def __init__(self, n_in: int, n_out: int, along: int, config: NGPTConfig) -> None:
        super().__init__(n_in, n_out, bias=False)
        self.along, self.parametrized = along, config.constraint == "parametrization"

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, unit_vectors(self) if self.parametrized else self.weight)


def unit_vectors(matrix: SphereLinear | nn.Embedding, shortest: float = 1e-12) -> Tensor:
    """The weight with each of its vectors of d_model numbers divided by its length, or by `shortest` if that is more:
    shortest=1 leaves vectors shorter than 1 alone."""
    weight = at_least_fp32(matrix.weight)
    return F.normalize(weight, dim=getattr(matrix, "along", -1), eps=shortest).to(matrix.weight.dtype)


def rope_angles(t: Tensor, config: NGPTConfig, h: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin `(B, 1, T, d_head / 2)` of the angles t * base^(-2i / d_head) at positions t `(B, T)`, in at least
    fp32 on the device of h."""
    t = t.cpu() if t.device.type == "mps" else t  # which has no fp64
    d_head = config.hidden_size // config.num_attention_heads
    pairs = torch.arange(0, d_head, 2, device=t.device, dtype=torch.float64)
    angles = t[:, None, :, None].double() * config.rope_base ** (-pairs / d_head)
    dtype = torch.promote_types(h.dtype, torch.float32)
    return angles.cos().to(h.device, dtype), angles.sin().to(h.device, dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Turns each pair of x `(B, H, T, d_head)` by its position's angle: (2i, 2i + 1), or else (i, i + d_head / 2)."""
    x = at_least_fp32(x)
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    turned = a * cos - b * sin, b * cos + a * sin
    return torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)


def eager_attention(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, scaling: float, **_: Any
) -> tuple[Tensor, Tensor]:
    """softmax(scaling q k^T + mask) v `(B, T, H, d_head)`, eq. 13, and the probabilities; attn_implementation=eager."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = scaling * at_least_fp32(q @ k.mT)  # (B, H, T, S)
    p = (scores if attention_mask is None else scores + attention_mask).softmax(-1).to(v.dtype)
    return (p @ v).transpose(1, 2), p


class NGPTAttention(nn.Module):
    """softmax(sqrt(d_k) q k^T) v W_o, where q and k are normalised per head and scaled by s_qk (section 2.3.2)."""

    is_causal = True  # transformers' attention functions ask for it, and for num_key_value_groups

    def __init__(self, config: NGPTConfig, layer_idx: int) -> None:
        super().__init__()
        d, self.n_heads, n_kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        self.config, self.layer_idx, self.d_head = config, layer_idx, d // self.n_heads
        self.num_key_value_groups = self.n_heads // n_kv_heads
        self.wq = SphereLinear(d, d, -1, config)
        self.wk = SphereLinear(d, n_kv_heads * self.d_head, -1, config)
        self.wv = SphereLinear(d, n_kv_heads * self.d_head, -1, config)
        self.wo = SphereLinear(d, d, 0, config)
        self.s_qk_shared = config.s_qk["shared"]  # by all heads of the layer
        self.s_qk = ScaleVector(self.d_head if self.s_qk_shared else d, config.s_qk, config)
        self.interleaved = config.rope_layout == "interleaved"
        root = math.sqrt(self.d_head)
        self.scaling = {"sqrt(d_k)": root, "1/sqrt(d_k)": 1 / root, "d/sqrt(d_k)": d / root}[config.softmax_scale]

    def forward(
        self, h: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: Cache | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """h `(B, T, d_model)` -> the same shape, and the probabilities `(B, H, T, S)` where the backend has them."""
        q, k, v = (w(h).unflatten(-1, (-1, self.d_head)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, cos, sin, self.interleaved), rotate(k, cos, sin, self.interleaved)  # (B, H, T, d_head)
        if self.config.qk_norm:
            q, k = norm(q, self.config.norm_eps), norm(k, self.config.norm_eps)
        # Eq. 15 and 16 multiply q and k by s_qk. Only the product q k^T counts, so q takes both factors: the same
        # function, also where several query heads, each with its s_qk, share a key.
        s_qk = self.s_qk(h).square()
        q = q * (s_qk.repeat(self.n_heads) if self.s_qk_shared else s_qk).view(self.n_heads, 1, self.d_head)
        q, k = q.to(v.dtype), k.to(v.dtype)
        k, v = (k, v) if cache is None else cache.update(k, v, self.layer_idx)
        chosen = self.config._attn_implementation
        attend: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(chosen, eager_attention)
        heads, probabilities = attend(self, q, k, v, mask, dropout=0.0, scaling=self.scaling, **kwargs)  # eq. 13
        return self.wo(heads.flatten(2)), probabilities  # eq. 14


class NGPTMLP(nn.Module):
    """SwiGLU(u, v) W_oMLP, with u and v rescaled (section 2.4.2)."""

    def __init__(self, config: NGPTConfig) -> None:
        super().__init__()
        d, d_mlp = config.hidden_size, config.intermediate_size
        self.w_u, self.w_v = SphereLinear(d, d_mlp, -1, config), SphereLinear(d, d_mlp, -1, config)
        self.w_down = SphereLinear(d_mlp, d, 0, config)
        self.s_u, self.s_v = ScaleVector(d_mlp, config.s_u, config), ScaleVector(d_mlp, config.s_v, config)
        self.sqrt_d, self.gelu = math.sqrt(d), config.hidden_act == "gelu"

    def forward(self, h: Tensor) -> Tensor:
        """h `(B, T, d_model)` -> the same shape."""
        u = at_least_fp32(self.w_u(h)) * self.s_u(h)  # eq. 20
        v = at_least_fp32(self.w_v(h)) * (self.s_v(h) * self.sqrt_d)  # eq. 21
        return self.w_down((u * (F.gelu(v) if self.gelu else F.silu(v))).to(h.dtype))  # eq. 18 and 19


def lerp(h: Tensor, h_new: Tensor, alpha: Tensor) -> Tensor:
    """h + alpha (h_new - h): eq. 8."""
    return h + alpha * (h_new - h)


def slerp(h: Tensor, h_new: Tensor, alpha: Tensor) -> Tensor:
    """sin((1 - alpha) theta) / sin(theta) h + sin(alpha theta) / sin(theta) h_new: eq. 6."""
    limit = 1 - torch.finfo(h_new.dtype).eps  # arccos has no derivative at +-1
    theta = (h * h_new).sum(-1, keepdim=True).clamp(-limit, limit).arccos()
    return (((1 - alpha) * theta).sin() * h + (alpha * theta).sin() * h_new) / theta.sin()


def riemannian(h: Tensor, h_new: Tensor, alpha: Tensor) -> Tensor:
    """h - alpha (h (h^T h_new) - h_new): eq. 25."""
    return h - alpha * (h * (h * h_new).sum(-1, keepdim=True) - h_new)


MOVES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"lerp": lerp, "slerp": slerp, "riemannian": riemannian}


class NGPTBlock(GradientCheckpointingLayer):
    """Two steps on the sphere. There is no other normalisation of h (Table 1, right column)."""

    def __init__(self, config: NGPTConfig, layer_idx: int) -> None:
        super().__init__()
        self.attention, self.mlp = NGPTAttention(config, layer_idx), NGPTMLP(config)
        self.alpha_attn = EigenLearningRates(config.alpha_attn, config)
        self.alpha_mlp = EigenLearningRates(config.alpha_mlp, config)
        self.move_attn = MOVES[config.update_attn or config.sphere_update]
        self.move_mlp = MOVES[config.update_mlp or config.sphere_update]
        self.eps = config.norm_eps

    def forward(
        self, h: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, past_key_values: Cache | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """h `(B, T, d_model)` -> the same shape and dtype, and the probabilities of attention."""
        x, probabilities = self.attention(h, cos, sin, mask, past_key_values, **kwargs)
        h_A = norm(x, self.eps)
        h = norm(self.move_attn(at_least_fp32(h), h_A, self.alpha_attn(h)), self.eps).to(h.dtype)  # eq. 10
        h_M = norm(self.mlp(h), self.eps)
        h = norm(self.move_mlp(at_least_fp32(h), h_M, self.alpha_mlp(h)), self.eps).to(h.dtype)  # eq. 11
        return h, probabilities


class NGPTPreTrainedModel(PreTrainedModel):
    config: NGPTConfig
    config_class = NGPTConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["NGPTBlock"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _keep_in_fp32_modules_strict = ["alpha_attn", "alpha_mlp", "s_qk", "s_u", "s_v", "s_z"]  # noqa: RUF012
    _supports_sdpa = True
    _can_compile_fullgraph = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Random matrices, with rows of length 1 if constraint=projection or ball; scale vectors at their `scale`."""
        if isinstance(module, (SphereLinear, nn.Embedding)):
            initialization.normal_(module.weight, std=1 / math.sqrt(self.config.hidden_size))
            if self.config.constraint in ("projection", "ball"):
                initialization.copy_(module.weight, unit_vectors(module))
        elif isinstance(module, ScaleVector) and module.stored is not None:
            initialization.constant_(module.stored, module.scale)

    @torch.no_grad()
    def project_(self) -> None:
        """Gives every row length 1, in place, if constraint=projection: section 2.6, item 2. If constraint=ball, only
        longer rows."""
        if self.config.constraint in ("projection", "ball"):
            shortest = 1e-12 if self.config.constraint == "projection" else 1.0
            for module in self.modules():
                if isinstance(module, (SphereLinear, nn.Embedding)):
                    module.weight.copy_(unit_vectors(module, shortest))


class NGPTModel(NGPTPreTrainedModel):
    """Embedding and blocks."""

    def __init__(self, config: NGPTConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(NGPTBlock(config, i) for i in range(config.num_hidden_layers))
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """The last h `(B, T, d_model)` of input_ids `(B, T)`. Positions count the tokens that attention_mask shows."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("nGPT takes either input_ids or inputs_embeds")
        h = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if self.config.constraint == "parametrization":
            h = norm(h).to(h.dtype)
        if past_key_values is None and (self.config.use_cache if use_cache is None else use_cache):
            past_key_values = DynamicCache(config=self.config)
        if position_ids is None:
            position_ids = self.positions(h, attention_mask, past_key_values)
        mask = create_causal_mask(
            self.config, h, attention_mask, past_key_values=past_key_values, position_ids=position_ids
        )
        cos, sin = rope_angles(position_ids, self.config, h)
        states, attentions = [h], []
        for block in self.layers:
            h, probabilities = block(h, cos, sin, mask, past_key_values=past_key_values, **kwargs)
            states.append(h)
            attentions.append(probabilities)
        of_states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        of_attention = self.config.output_attentions if output_attentions is None else output_attentions
        if of_attention and attentions[0] is None:
            raise ValueError("output_attentions=True: only attn_implementation='eager' has the probabilities")
        return BaseModelOutputWithPast(
            last_hidden_state=h,
            past_key_values=past_key_values,
            hidden_states=tuple(states) if of_states else None,
            attentions=tuple(attentions) if of_attention else None,
        )

    def positions(self, h: Tensor, attention_mask: Tensor | None, cache: Cache | None) -> Tensor:
        """`(B, T)`, for those who give none. They do matter, not only their distances: s_qk comes after RoPE."""
        B, T = h.shape[:2]
        if attention_mask is not None and attention_mask.ndim == 2:
            return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -T:]
        seen = 0 if cache is None else cache.get_seq_length()
        return (torch.arange(T, device=h.device) + seen).expand(B, T)


class NGPTForCausalLM(NGPTPreTrainedModel, GenerationMixin):
    """Logits = s_z (E_output h): eq. 1 and 3."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: NGPTConfig) -> None:
        super().__init__(config)
        self.model = NGPTModel(config)
        self.lm_head = SphereLinear(config.hidden_size, config.vocab_size, -1, config)
        self.s_z = ScaleVector(config.vocab_size, config.s_z, config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits `(B, T, V)` in at least fp32, of the last logits_to_keep tokens if that is not 0; with labels the mean
        loss in nats of the next tokens, where a label of -100 does not count. Other arguments as of NGPTModel."""
        n_items = kwargs.pop("num_items_in_batch", None)  # of Trainer's accumulation: what the loss is divided by
        outputs = self.model(input_ids=input_ids, **kwargs)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        h = outputs.last_hidden_state[:, kept]
        logits = at_least_fp32(self.lm_head(h)) * self.s_z(h)  # eq. 1 and 3
        loss, V = None, self.config.vocab_size
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=V, num_items_in_batch=n_items)
        rest = {name: outputs.get(name) for name in ("past_key_values", "hidden_states", "attentions")}
        return CausalLMOutputWithPast(loss=loss, logits=logits, **rest)
