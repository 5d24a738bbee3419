"""Keys of all encoder-decoders."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Union

from ngpt_train.config.keys import Conflict, key
from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.config.schema import Config


@dataclass
class EncoderDecoderKeys(ModelConfig):
    """Keys of an encoder-decoder besides a decoder's. It continues the beginning of a document, or translates."""

    n_encoder_layers: Union[int, None] = key(
        None, "Number of encoder blocks; null is n_layers, the decoder's.", minimum=1, maximum=100_000
    )
    source_context: Union[int, None] = key(
        None, "Tokens of a row, of its model.context, for the encoder; null is two thirds.", minimum=1
    )
    translates: bool = key(
        False, "Half of a row is the source. data.translation_field sets it, data.label_field unsets it."
    )
    shared_source: bool = key(
        False, "The encoder reads with the decoder's input embedding; with tied_embeddings all three are one matrix."
    )

    @property
    def objective(self) -> str:
        return "label" if self.n_classes else "translation" if self.translates else "prefix_continuation"

    def source_length(self, context: int) -> int:
        """Tokens of a row of `context` that the encoder reads: half if it translates, else source_context or 2/3."""
        if self.translates:
            return context // 2
        return self.source_context or max(1, 2 * context // 3)

    def resolve(self, config: Config) -> None:
        super().resolve(config)
        self.translates = self.translates and not self.n_classes
        self.n_encoder_layers = self.n_encoder_layers or self.n_layers
        self.source_context = self.source_length(self.context)

    def conflicts(self, config: Config) -> Iterator[Conflict]:
        yield from super().conflicts(config)
        if self.source_length(self.context) >= self.context:
            problem = "the source takes the whole row, nothing is left to decode"
            yield "model.source_context model.context", problem, f"Set model.source_context below {self.context}"
        if self.translates and self.context % 2:
            problem = "a row is a source and its translation, each in half of it"
            yield "data.translation_field model.context", problem, "Set model.context to an even number"
        if self.bidirectional:
            problem = "an encoder-decoder reads both ways in its encoder, and its decoder cannot"
            yield "model.bidirectional model.name", problem, "Leave model.bidirectional out, or choose a decoder"

    def refuses_rows_of(self, context: int) -> str | None:
        source = self.source_length(self.context)
        return f"an encoder-decoder's rows are {source} tokens to read and {self.context - source} to continue them"

    def not_in_weights(self) -> set[str]:
        return super().not_in_weights() | {"source_context", "translates"}
