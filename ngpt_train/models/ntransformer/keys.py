"""The keys of model=ntransformer."""

from dataclasses import dataclass, field
from typing import Union

from ngpt_train.config.keys import key
from ngpt_train.config.model_keys import InitConfig
from ngpt_train.models.encoder_decoder_keys import EncoderDecoderKeys
from ngpt_train.models.ngpt.keys import UPDATES, AlphaConfig, NGPTConfig, starts_of


@dataclass
class NTransformerConfig(EncoderDecoderKeys, NGPTConfig):
    """nGPT as an encoder-decoder (TnT), with cross-attention on the sphere; the options are nGPT's."""

    name: str = key("ntransformer", "Architecture, chosen with model=NAME.")
    init: InitConfig = field(default_factory=lambda: NGPTConfig().init)
    alpha_cross: AlphaConfig = field(default_factory=AlphaConfig)
    starts = NGPTConfig.starts + starts_of("alpha_cross")
    update_cross: Union[str, None] = key(None, "How cross-attention moves h; null is model.update.", choices=UPDATES)
