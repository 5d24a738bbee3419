"""The keys of model=gpt_encoder_decoder."""

from dataclasses import dataclass

from ngpt_train.config.keys import key
from ngpt_train.models.encoder_decoder_keys import EncoderDecoderKeys
from ngpt_train.models.gpt.keys import GPTConfig


@dataclass
class GPTEncoderDecoderConfig(EncoderDecoderKeys, GPTConfig):
    """An encoder-decoder with GPT's layers, the baseline of the N-Transformer."""

    name: str = key("gpt_encoder_decoder", "Architecture, chosen with model=NAME.")
