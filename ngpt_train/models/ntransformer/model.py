"""N-Transformer (TnT), nGPT as an encoder-decoder, with cross-attention on the sphere too.

It follows the paper where the authors' code does not: in the code, cross-attention has no QK-norm and its matrices are
not normalised. It follows nGPT (section 2.3.2) in the scale of the scores, sqrt(d_k), where the paper has 1 / sqrt(d_k)
(eq. 7 and 12) and so has the code in the decoder.
"""

from dataclasses import replace

from torch import Tensor

from ngpt_train.kernels.sphere_step import HiddenState
from ngpt_train.models.encoder_decoder import EncoderDecoder
from ngpt_train.models.layers.dropout import Dropout
from ngpt_train.models.layers.rope import Rope
from ngpt_train.models.ngpt.model import EigenLearningRates, NGPTAttention, NGPTBlock, Spherical, step_of
from ngpt_train.models.ngpt.scale import ScaledParameter
from ngpt_train.models.ntransformer.keys import NTransformerConfig


class NTransformerBlock(NGPTBlock):
    """The decoder's three steps on the sphere: Table 1 of the paper, right column.

    Cross-attention is eq. 10 to 12, but with the factor sqrt(d_k) instead of eq. 12's division, see above.
    """

    def __init__(self, config: NTransformerConfig) -> None:
        super().__init__(config)
        self.cross = NGPTAttention(config, causal=False)
        self.alpha_cross = EigenLearningRates(config.alpha_cross, config)
        self.drop_cross = Dropout(config.residual_dropout)
        self.step_cross = step_of(config, "update_cross")

    def forward(  # type: ignore[override]
        self,
        h: HiddenState,
        rope: Rope | None,
        mask: Tensor | None,
        memory: Tensor,
        memory_mask: Tensor | None,
        seeds: Tensor | None = None,
    ) -> HiddenState:
        alpha_A, alpha_C, alpha_M = self.alpha_attn(), self.alpha_cross(), self.alpha_mlp()
        x = self.drop_attn(self.attention(h, rope, mask, seeds=seeds), seeds)
        h = self.step_attn(h, x, alpha_A)  # Table 1: h_A
        # Without RoPE: positions in two different sequences have no distance.
        x = self.drop_cross(self.cross(h, None, memory_mask, memory, seeds), seeds)
        h = self.step_cross(h, x, alpha_C)  # Table 1: h_C
        x = self.drop_mlp(self.mlp(h), seeds)
        h = self.step_mlp(h, x, alpha_M)  # Table 1: h_M
        return h  # (B, T, d_model)


class NTransformer(Spherical, EncoderDecoder):
    """Logits = s_z (E_output h). The encoder's blocks are nGPT's without the causal mask."""

    config: NTransformerConfig

    def __init__(self, config: NTransformerConfig) -> None:
        # The L of an init or scale of 1/L is the encoder's own number of layers in the encoder.
        encoder_config = replace(config, n_layers=config.n_encoder_layers or config.n_layers)
        encoder = (NGPTBlock(encoder_config, causal=False) for _ in range(encoder_config.n_layers))
        super().__init__(config, encoder, (NTransformerBlock(config) for _ in range(config.n_layers)))
        self.s_z = ScaledParameter(self.embedding.shape[0], config.s_z, config)


Model = NTransformer  # what build_model builds
