"""The composed decoder's options (composed/model.py) in an encoder-decoder, for example NormFormer's.

Cross-attention is a sublayer like self-attention: it has attention's placement, norms and scales. Its queries and keys
have no positions.
"""

from functools import partial

from torch import Tensor

from ngpt_train.models.composed.model import ComposedAttention, ComposedBlock, Composition, layer_scale, res_scale
from ngpt_train.models.composed.norms import NormPass, norm_of
from ngpt_train.models.composed.placement import Around
from ngpt_train.models.composed_encoder_decoder.keys import ComposedEncoderDecoderConfig
from ngpt_train.models.encoder_decoder import EncoderDecoder
from ngpt_train.models.layers.documents import Mask
from ngpt_train.models.layers.dropout import Dropout
from ngpt_train.models.layers.rope import Rope
from ngpt_train.models.powernorm.running_statistics import Output, Running


class ComposedDecoderBlock(ComposedBlock):
    """Attention, cross-attention, MLP."""

    def __init__(self, config: ComposedEncoderDecoderConfig) -> None:
        super().__init__(config)
        self.norm_cross, self.norm_post_cross = self.place_attn.norms(lambda: norm_of(config, config.d_model))
        self.cross = ComposedAttention(config, causal=False)
        self.res_scale_cross, self.layer_scale_cross = res_scale(config, "attn"), layer_scale(config)
        self.drop_cross = Dropout(config.residual_dropout)
        self.number_norms()

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        rope: Rope | None,
        mask: Mask,
        memory: Tensor,
        memory_mask: Mask,
        valid: Tensor | None,
        running: Running,
        seeds: Tensor | None = None,
    ) -> Output:
        """memory `(B, S, d_model)`: what cross-attention reads."""
        norms = NormPass(valid, running)
        x = self.attention_step(x, rope, mask, norms, seeds)
        x = self.cross_step(x, memory, memory_mask, norms, seeds)
        x = self.mlp_step(x, norms, seeds)
        return x, tuple(norms.batches)

    def cross_step(self, x: Tensor, memory: Tensor, memory_mask: Mask, norms: NormPass, seeds: Tensor | None) -> Tensor:
        """For example x + cross(norm(x), memory)."""
        norm_in, norm_out = norms(self.norm_cross), norms(self.norm_post_cross)
        drop = partial(self.drop_cross, seeds=seeds)
        around = Around(norm_in, norm_out, self.res_scale_cross, self.layer_scale_cross, drop)
        return self.place_attn.apply(x, lambda y: self.cross(y, None, memory_mask, memory, seeds), around)


class ComposedEncoderDecoder(Composition, EncoderDecoder):
    """Logits = E_output norm(x). The encoder ends with a norm too, unless its placement is `post`."""

    config: ComposedEncoderDecoderConfig

    def __init__(self, config: ComposedEncoderDecoderConfig) -> None:
        encoder = (ComposedBlock(config, causal=False) for _ in range(config.n_encoder_layers or config.n_layers))
        super().__init__(config, encoder, (ComposedDecoderBlock(config) for _ in range(config.n_layers)))
        self.norm_encoder = self.final_norm()
        self.norm_final = self.final_norm()
        self.positions = None

    def encode(
        self, h: Tensor, rope: Rope | None, mask: Mask, valid: Tensor | None, seeds: Tensor | None = None
    ) -> Tensor:
        return self.run_norm(self.norm_encoder, self.run_blocks(self.encoder, h, rope, mask, valid, seeds=seeds), valid)

    def decode(
        self,
        h: Tensor,
        rope: Rope | None,
        mask: Mask,
        memory: Tensor,
        memory_mask: Mask,
        valid: Tensor | None,
        seeds: Tensor | None = None,
    ) -> Tensor:
        h = self.run_blocks(self.layers, h, rope, mask, memory, memory_mask, valid, seeds=seeds)
        return self.run_norm(self.norm_final, h, valid)


Model = ComposedEncoderDecoder  # what build_model builds
