"""The keys of model=composed_encoder_decoder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Union

from ngpt_train.config.keys import AUTO, Conflict, key
from ngpt_train.config.model_keys import InitConfig
from ngpt_train.config.schema import Config
from ngpt_train.models.composed.keys import NORMS, ComposedConfig
from ngpt_train.models.encoder_decoder_keys import EncoderDecoderKeys
from ngpt_train.models.powernorm.keys import OVER_BATCH


@dataclass
class ComposedEncoderDecoderConfig(EncoderDecoderKeys, ComposedConfig):
    """The composed decoder's options in an encoder-decoder. Options of attention hold for cross-attention too."""

    name: str = key("composed_encoder_decoder", "Architecture, chosen with model=NAME.")
    decoder_norm: Union[str, None] = key(
        None,
        "As norm, for the decoder alone; null is norm (PowerNorm's paper translates with norm=pn decoder_norm=layer). "
        "Where the two differ, group_scaling stands before norms over the batch alone.",
        choices=NORMS,
    )
    init: InitConfig = field(default_factory=lambda: ComposedConfig().init)
    positions: str = key(
        "rotary",
        "rotary turns q and k of self-attention; sinusoidal is added to both embeddings; none: no positions.",
        choices=("rotary", "sinusoidal", "none"),
    )

    @property
    def norms(self) -> tuple[str, str]:
        """Of encoder and decoder."""
        return self.norm, self.decoder_norm or self.norm

    @property
    def norm_over_batch(self) -> bool:
        return any(norm in OVER_BATCH for norm in self.norms)

    def parts(self) -> tuple[ComposedEncoderDecoderConfig, ComposedEncoderDecoderConfig]:
        """The configs of encoder and decoder, each with one norm."""
        scaled = [norm in OVER_BATCH or len(set(self.norms)) == 1 for norm in self.norms]
        encoder, decoder = (
            replace(self, norm=norm, decoder_norm=None, group_scaling=self.group_scaling if there else 0)
            for norm, there in zip(self.norms, scaled, strict=True)
        )
        return encoder, decoder

    def resolve(self, config: Config) -> None:
        if self.psi_warmup_steps == AUTO and "pn" in self.norms:
            self.psi_warmup_steps = config.schedule.warmup_steps
        super().resolve(config)

    def without_effect(self) -> Iterator[tuple[str, str]]:
        """A key has no effect that has none in encoder and decoder."""
        if len(set(self.norms)) == 1:
            yield from super().without_effect()
        else:
            encoder, decoder = (list(part.without_effect()) for part in self.parts())
            yield from (pair for pair in encoder if pair in decoder)

    def conflicts(self, config: Config) -> Iterator[Conflict]:
        yield from super().conflicts(config)
        if self.separate_gains and self.norms[1] != "rms":
            yield "model.separate_gains model.decoder_norm", "only RMSNorm's gain is separated", "Set both norms to rms"
