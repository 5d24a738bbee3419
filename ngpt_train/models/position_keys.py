"""The key `positions`, for architectures with several kinds of positions."""

from __future__ import annotations

from collections.abc import Iterator

from ngpt_train.config.model_keys import ModelConfig


class PositionKeys(ModelConfig):
    """An architecture declares `positions` itself, with the kinds that it has."""

    positions: str

    @property
    def uses_rope(self) -> bool:
        return self.positions == "rotary"

    def without_effect(self) -> Iterator[tuple[str, str]]:
        yield from super().without_effect()
        if not self.uses_rope:
            yield from (("positions", name) for name in ("rope_base", "rope_layout"))

    def refuses_rows_of(self, context: int) -> str | None:
        if self.positions == "learned" and context > self.context:
            return f"model.positions=learned knows the positions of {self.context} tokens"
        return super().refuses_rows_of(context)

    def not_in_weights(self) -> set[str]:
        """The learned positions are a weight of shape `(context, d_model)`, so then context must agree."""
        return super().not_in_weights() - ({"context"} if self.positions == "learned" else set())
