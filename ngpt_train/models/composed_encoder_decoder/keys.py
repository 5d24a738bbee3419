"""The keys of model=composed_encoder_decoder."""

from __future__ import annotations

from dataclasses import dataclass, field

from ngpt_train.config.keys import key
from ngpt_train.config.model_keys import InitConfig
from ngpt_train.models.composed.keys import ComposedConfig
from ngpt_train.models.encoder_decoder_keys import EncoderDecoderKeys


@dataclass
class ComposedEncoderDecoderConfig(EncoderDecoderKeys, ComposedConfig):
    """The composed decoder's options in an encoder-decoder. Options of attention hold for cross-attention too."""

    name: str = key("composed_encoder_decoder", "Architecture, chosen with model=NAME.")
    init: InitConfig = field(default_factory=lambda: ComposedConfig().init)
    positions: str = key(
        "rotary",
        "rotary turns q and k of self-attention; sinusoidal is added to both embeddings; none: no positions.",
        choices=("rotary", "sinusoidal", "none"),
    )
