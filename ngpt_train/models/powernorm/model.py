"""PowerNorm (Shen, Yao, Gholami, Mahoney and Keutzer 2020): the baseline's decoder with a norm over the batch.

gpt.py with every RMSNorm replaced by one of the paper's four norms, and nothing else, so that the norms are
compared and not the decoders.

In training PN-V and BatchNorm are not causal, nor is PowerNorm in its warm-up: the statistics of a batch
contain its later tokens, and the training loss is too low by what leaks. Evaluation uses running statistics,
which are known before the first token, and is causal always.
"""

import math
from collections.abc import Iterable
from typing import cast

from torch import Tensor, nn

from ngpt_train.models.decoder import Decoder, Head
from ngpt_train.models.layers.attention import Attention
from ngpt_train.models.layers.documents import Mask
from ngpt_train.models.layers.mlp import MLP
from ngpt_train.models.layers.rope import Rope
from ngpt_train.models.powernorm.keys import PowerNormConfig
from ngpt_train.models.powernorm.norms import (
    Batch,
    BatchNorm,
    BatchStatisticNorm,
    Before,
    PerToken,
    PowerNorm,
    PowerNormV,
)

NORMS: dict[str, type[BatchStatisticNorm]] = {
    "pn": PowerNorm,
    "pn_v": PowerNormV,
    "batch": BatchNorm,
    "layer": PerToken,
}


class PowerNormBlock(nn.Module):
    """h + attention(norm(h)), then h + mlp(norm(h)). `before` and what is returned beside h: see batch_norms.py."""

    def __init__(self, config: PowerNormConfig) -> None:
        super().__init__()
        self.norm_attn = NORMS[config.norm](config.d_model, config)
        self.attention = Attention(config, softmax_scale=1 / math.sqrt(config.d_model // config.n_heads))
        self.norm_mlp = NORMS[config.norm](config.d_model, config)
        self.mlp = MLP(config)

    def norms(self) -> tuple[BatchStatisticNorm, BatchStatisticNorm]:
        return self.norm_attn, self.norm_mlp

    def forward(
        self,
        h: Tensor,
        rope: Rope | None,
        mask: Mask,
        valid: Tensor | None,
        before: tuple[Before | None, Before | None],
    ) -> tuple[Tensor, tuple[Batch | None, Batch | None]]:
        x, batch_attn = self.norm_attn(h, valid, before[0])
        h = h + self.attention(x, rope, mask)
        x, batch_mlp = self.norm_mlp(h, valid, before[1])
        h = h + self.mlp(x)
        return h, (batch_attn, batch_mlp)  # h (B, T, d_model)


class PowerNormDecoder(Decoder):
    """Logits = W_output norm(h), where `stack` ends with the norm. Padding, doc_ids below 0, counts in no statistic."""

    def __init__(self, config: PowerNormConfig) -> None:
        super().__init__(config, (PowerNormBlock(config) for _ in range(config.n_layers)))
        self.norm_final = NORMS[config.norm](config.d_model, config)
        self.norm, self.warmup_steps = config.norm, int(config.psi_warmup_steps)
        self.step = 0
        self.loss_scale: Tensor | float = 1.0

    def begin_step_(self, step: int, loss_scale: Tensor) -> None:
        self.step, self.loss_scale = step, loss_scale
        if step == 0:  # also of weights that another run has trained: their warm-up is not this one's
            for norm in self.modules():
                if isinstance(norm, PowerNorm):
                    norm.n_warmup.zero_()

    def stack(self, h: Tensor, rope: Rope | None, mask: Mask, doc_ids: Tensor | None) -> Tensor:
        """The blocks and the last norm; advances the running statistics in training."""
        valid = None if doc_ids is None else doc_ids >= 0
        warming_up = self.step < self.warmup_steps
        for block in cast(Iterable[PowerNormBlock], self.layers):
            attn, mlp = (norm.before(warming_up, self.loss_scale) for norm in block.norms())
            h, batches = block(h, rope, mask, valid, (attn, mlp))
            for norm, before, batch in zip(block.norms(), (attn, mlp), batches, strict=True):
                norm.remember_(before, batch, self.loss_scale)
        before = self.norm_final.before(warming_up, self.loss_scale)
        h, batch = self.norm_final(h, valid, before)
        self.norm_final.remember_(before, batch, self.loss_scale)
        return h

    def head(self, h: Tensor) -> Head:
        return Head(h, self.unembedding)

    def statistics(self) -> dict[str, Tensor]:
        return {
            f"{place}.{name}": value
            for place, module in self.named_modules()
            if isinstance(module, BatchStatisticNorm)
            for name, value in module.statistics().items()
        }

    def notes(self) -> list[str]:
        if self.norm == "layer" or (self.norm == "pn" and self.warmup_steps == 0):
            return []
        when = f"in the first {self.warmup_steps} steps" if self.norm == "pn" else "in training"
        return [
            f"model.norm={self.norm} uses the statistics of the batch {when}, later tokens included: the training "
            "loss is too low there. Validation uses running statistics and is causal."
        ]


Model = PowerNormDecoder  # what build_model builds
