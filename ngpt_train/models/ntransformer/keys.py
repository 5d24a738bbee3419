"""The keys of model=ntransformer."""

from __future__ import annotations

from dataclasses import dataclass, field

from ngpt_train.config.keys import key
from ngpt_train.models.encoder_decoder_keys import EncoderDecoderKeys
from ngpt_train.models.ngpt.keys import AlphaConfig, NGPTConfig


@dataclass
class NTransformerConfig(EncoderDecoderKeys, NGPTConfig):
    """nGPT as an encoder-decoder (TnT), with cross-attention on the sphere; the options are nGPT's."""

    name: str = key("ntransformer", "Architecture, chosen with model=NAME.")
    alpha_cross: AlphaConfig = field(default_factory=AlphaConfig)
