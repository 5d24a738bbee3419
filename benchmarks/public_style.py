"""nGPT written as public code writes it: benchmarks/paper_steps.py times our step beside it.

This is our own program in the style of NVIDIA's public code. None of that code is here, and no time of this program is
a measurement of that code. Both do the same things that cost time:

- eager mode and autocast; bf16 matrices in the blocks, without fp32 masters; fp32 embeddings and scales;
- q, k and v by three products; scales of q, k, u, v and of the logits in passes of their own;
- every Norm is a division by a norm, in fp32, also that of h, which has unit length already;
- all logits at once, and torch's cross-entropy of them;
- torch's fused AdamW, after which each matrix is divided by its norms in fp32 and copied back.

Two things are not as in that code: the rotation is a true one, and attention is torch's instead of flash-attn with its
deterministic backward pass. With weights on the sphere the loss is that of models/ngpt with default keys. So are the
gradients, except that an embedding's gradient has no part along the embedding
(tests/unit/benchmarks/test_public_style.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.common import WrongResultError
from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.kernels.rotary import rotate
from ngpt_train.models.layers.rope import Rope, rope_table

ALPHA = 0.05  # initial value of alpha_A and alpha_M; every other scale starts at 1


def unit(x: Tensor, dim: int = -1) -> Tensor:
    """Norm(x) along `dim`."""
    return x / x.norm(p=2, dim=dim, keepdim=True)


class Block(nn.Module):
    """h `(B, T, d_model)` -> the same. Matrices are nn.Linear's, `(out, in)`."""

    def __init__(self, d: int, n_heads: int, m: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.n_heads, self.sqrt_d = n_heads, math.sqrt(d)
        self.q, self.k, self.v, self.out = (nn.Linear(d, d, bias=False, dtype=dtype) for _ in range(4))
        self.up = nn.Linear(d, 2 * m, bias=False, dtype=dtype)  # u, then v
        self.down = nn.Linear(m, d, bias=False, dtype=dtype)
        # s_qk and both alpha are stored as 1 / sqrt(d_model) at initialisation, s_uv as 1.
        self.s_qk, self.alpha_attn, self.alpha_mlp = (nn.Parameter(torch.empty(d)) for _ in range(3))
        self.s_uv = nn.Parameter(torch.empty(2 * m))

    def forward(self, h: Tensor, rope: Rope) -> Tensor:
        q, k, v = (project(h).unflatten(-1, (self.n_heads, -1)) for project in (self.q, self.k, self.v))
        s_qk = (self.s_qk * self.sqrt_d).view(self.n_heads, -1)
        q, k = (s_qk * unit(rotate(x, rope)) for x in (q, k))
        q, k, v = (x.to(v.dtype).transpose(1, 2) for x in (q, k, v))  # (B, H, T, D)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=math.sqrt(q.shape[-1]))
        h = self.step(h, self.out(y.transpose(1, 2).contiguous().flatten(2)), self.alpha_attn)

        # In the paper sqrt(d_model) scales v alone. On u it only changes the length of a vector that `step` normalises.
        u, v = (self.s_uv * self.sqrt_d * self.up(h)).chunk(2, dim=-1)
        return self.step(h, self.down(u * F.silu(v)), self.alpha_mlp)

    def step(self, h: Tensor, suggestion: Tensor, alpha: Tensor) -> Tensor:
        """Equations 10 and 11 of nGPT, with Norm(h) in h's place: Norm(h + alpha (Norm(suggestion) - h))."""
        share = (alpha * (ALPHA * self.sqrt_d)).abs()
        h, suggestion = unit(h), unit(suggestion)
        return unit(h + share * (suggestion - h))


class PublicStyle(nn.Module):
    """The whole model. dtype: of the blocks' matrices; embeddings and scales are fp32.

    Weights come from `load_state_dict`: the scales are not initialised.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        assert isinstance(config.vocab_size, int)
        d, m = config.d_model, config.d_mlp or 4 * config.d_model
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, d)
        self.blocks = nn.ModuleList(Block(d, config.n_heads, m, dtype) for _ in range(config.n_layers))
        self.head = nn.Linear(d, config.vocab_size, bias=False)
        self.s_z = nn.Parameter(torch.empty(config.vocab_size))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy in nats. tokens, targets: ids `(B, T)`."""
        config = self.config
        rope = rope_table(
            tokens.shape[1], config.d_model // config.n_heads, config.rope_base, False, tokens.device, self.s_z.dtype
        )
        h = self.embedding(tokens)
        for block in self.blocks:
            h = block(h, rope)
        logits = self.s_z * math.sqrt(config.d_model) * self.head(h)  # (B, T, V)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def normalize_(self) -> None:
        """Divides every matrix, in place, by its norms along d_model, which are computed in fp32 at least."""
        weights: list[tuple[Tensor, int]] = [(self.embedding.weight, 1), (self.head.weight, 1)]
        for block in self.blocks:
            assert isinstance(block, Block)
            weights += [(matrix.weight, 1) for matrix in (block.q, block.k, block.v, block.up)]
            weights += [(block.out.weight, 0), (block.down.weight, 0)]
        for weight, dim in weights:
            weight.copy_(unit(weight.to(torch.promote_types(weight.dtype, torch.float32)), dim))


class PublicSteps:
    """Optimizer steps of a `PublicStyle` on the same micro batches each time; a call is a step.

    micro_batches: tokens and targets, each `(micro_rows, context)`. losses: of the steps so far, 0-dim, nats per token.
    """

    def __init__(self, model: PublicStyle, lr: float, micro_batches: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.model, self.micro_batches = model, micro_batches
        self.on_gpu = model.s_z.is_cuda
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr, betas=(0.9, 0.95), weight_decay=0.0, fused=self.on_gpu
        )
        self.losses: list[Tensor] = []

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy, on a GPU under autocast to bf16."""
        with torch.autocast("cuda", torch.bfloat16, enabled=self.on_gpu):
            return self.model(tokens, targets)

    def __call__(self) -> float:
        """Forward, backward, clipping, AdamW and the norms of the matrices; returns the number of tokens."""
        total = torch.zeros((), device=self.model.s_z.device)
        for tokens, targets in self.micro_batches:
            loss = self.loss(tokens, targets) / len(self.micro_batches)
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.model.normalize_()
        self.losses.append(total)
        return float(sum(tokens.numel() for tokens, _ in self.micro_batches))

    def check(self) -> None:
        """Raises WrongResultError where the loss did not fall."""
        if not self.losses[-1] < self.losses[0]:
            raise WrongResultError(f"the loss of public code's way did not fall: {[float(x) for x in self.losses]}")


def as_public(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights or gradients of models/ngpt, by canonical name, under the names and in the shapes of `PublicStyle`."""
    found = {"embedding.weight": weights["embedding"], "head.weight": weights["output"], "s_z": weights["s_z"]}
    n_layers = sum(name.endswith(".wq") for name in weights)
    for index in range(n_layers):
        ours, theirs = f"layers.{index}.", f"blocks.{index}."
        for name in ("q", "k", "v"):
            found[f"{theirs}{name}.weight"] = weights[f"{ours}w{name}"]
        found[f"{theirs}out.weight"] = weights[f"{ours}wo"].t()
        found[f"{theirs}up.weight"] = torch.cat([weights[f"{ours}w_u"], weights[f"{ours}w_v"]])
        found[f"{theirs}down.weight"] = weights[f"{ours}w_down"].t()
        found[f"{theirs}s_uv"] = torch.cat([weights[f"{ours}s_u"], weights[f"{ours}s_v"]])
        for name in ("s_qk", "alpha_attn", "alpha_mlp"):
            found[theirs + name] = weights[ours + name]
    return found
