"""The composed decoder's options (composed/model.py) in an encoder-decoder, for example NormFormer's."""

from torch import Tensor

from ngpt_train.models.composed.model import ComposedBlock, Composition, final_norm
from ngpt_train.models.composed_encoder_decoder.keys import ComposedEncoderDecoderConfig
from ngpt_train.models.encoder_decoder import EncoderDecoder
from ngpt_train.models.layers.documents import Mask
from ngpt_train.models.layers.rope import Rope
from ngpt_train.models.powernorm.running_statistics import notes_of


class ComposedEncoderDecoder(Composition, EncoderDecoder):
    """Logits = E_output norm(x). The encoder ends with a norm too, unless its placement is `post`."""

    config: ComposedEncoderDecoderConfig

    def __init__(self, config: ComposedEncoderDecoderConfig) -> None:
        of_encoder, of_decoder = config.parts()
        encoder = (ComposedBlock(of_encoder, causal=False) for _ in range(config.n_encoder_layers or config.n_layers))
        super().__init__(config, encoder, (ComposedBlock(of_decoder, cross=True) for _ in range(config.n_layers)))
        self.norm_encoder, self.norm_final = final_norm(of_encoder), final_norm(of_decoder)
        self.positions = None

    def notes(self) -> list[str]:
        return notes_of(self.config.parts()[1])  # tokens of the source see later ones anyway

    def encode(self, h: Tensor, rope: Rope | None, mask: Mask, valid: Tensor | None) -> Tensor:
        return self.run_norm(self.norm_encoder, self.run_blocks(self.encoder, h, rope, mask, valid), valid)

    def decode(
        self, h: Tensor, rope: Rope | None, mask: Mask, memory: Tensor, memory_mask: Mask, valid: Tensor | None
    ) -> Tensor:
        h = self.run_blocks(self.layers, h, rope, mask, memory, memory_mask, valid)
        return self.run_norm(self.norm_final, h, valid)


Model = ComposedEncoderDecoder  # what build_model builds
