"""N-Transformer (TnT), nGPT as an encoder-decoder, with cross-attention on the sphere too.

It follows the paper where the authors' code does not: in the code, cross-attention has no QK-norm and its matrices are
not normalised. It follows nGPT (section 2.3.2) in the scale of the scores, sqrt(d_k), where the paper has 1 / sqrt(d_k)
(eq. 7 and 12) and so has the code in the decoder. Cross-attention is eq. 10 to 12 but for that factor.
"""

from dataclasses import replace

from ngpt_train.models.encoder_decoder import EncoderDecoder
from ngpt_train.models.ngpt.model import NGPTBlock, ScaledParameter, Spherical
from ngpt_train.models.ntransformer.keys import NTransformerConfig


class NTransformer(Spherical, EncoderDecoder):
    """Logits = s_z (E_output h). The encoder's blocks are nGPT's without the causal mask."""

    config: NTransformerConfig

    def __init__(self, config: NTransformerConfig) -> None:
        # The L of an init or scale of 1/L is the encoder's own number of layers in the encoder.
        encoder_config = replace(config, n_layers=config.n_encoder_layers or config.n_layers)
        encoder = (NGPTBlock(encoder_config, causal=False) for _ in range(encoder_config.n_layers))
        decoder = (NGPTBlock(config, cross=config.alpha_cross) for _ in range(config.n_layers))
        super().__init__(config, encoder, decoder)
        self.s_z = ScaledParameter(self.n_outputs, config.s_z, config)


Model = NTransformer  # what build_model builds
