"""N-Transformer (TnT), nGPT's encoder-decoder, as its paper describes it: cross-attention on the sphere as well.

The corrected model: the authors' code leaves cross-attention without QK-norm and its matrices off the sphere,
and divides the decoder's scores by sqrt(d_k) where unit vectors want the factor (nGPT, section 2.3.2).
"""

from dataclasses import replace

from torch import Tensor

from ngpt_train.kernels.sphere_step import HiddenState
from ngpt_train.models.encoder_decoder import EncoderDecoder
from ngpt_train.models.layers.rope import Rope
from ngpt_train.models.layers.scale import ScaledParameter
from ngpt_train.models.ngpt.model import EigenLearningRates, NGPTAttention, NGPTBlock, Spherical
from ngpt_train.models.ntransformer.keys import NTransformerConfig


class NTransformerBlock(NGPTBlock):
    """The decoder's three steps on the sphere: Table 1 of the paper, right column.

    Cross-attention is eq. 10 to 12, but for eq. 12's division by sqrt(d_k), see above.
    """

    def __init__(self, config: NTransformerConfig) -> None:
        super().__init__(config)
        self.cross = NGPTAttention(config, causal=False)
        self.alpha_cross = EigenLearningRates(config.alpha_cross, config)

    def forward(  # type: ignore[override]
        self, h: HiddenState, rope: Rope | None, mask: Tensor | None, memory: Tensor, memory_mask: Tensor | None
    ) -> HiddenState:
        step = self.step
        alpha_attn, alpha_cross, alpha_mlp = self.alpha_attn(), self.alpha_cross(), self.alpha_mlp()
        h = step(h, self.attention(h, rope, mask), alpha_attn)  # h_A
        # Positions of two sequences have no distance, so no rotation here.
        h = step(h, self.cross(h, None, memory_mask, memory), alpha_cross)  # h_C
        h = step(h, self.mlp(h), alpha_mlp)  # h_M
        return h  # (B, T, d_model)


class NTransformer(Spherical, EncoderDecoder):
    """Logits = s_z W_output h. The encoder's blocks are nGPT's, attending in both directions."""

    config: NTransformerConfig

    def __init__(self, config: NTransformerConfig) -> None:
        # To the encoder its own depth is the L of an init or scale of 1/L.
        of_encoder = replace(config, n_layers=config.n_encoder_layers or config.n_layers)
        encoder = (NGPTBlock(of_encoder, causal=False) for _ in range(of_encoder.n_layers))
        super().__init__(config, encoder, (NTransformerBlock(config) for _ in range(config.n_layers)))
        self.s_z = ScaledParameter(self.embedding.shape[0], config.s_z, config)


Model = NTransformer  # what build_model builds
