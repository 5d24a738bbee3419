"""The layouts by name."""

from ngpt_train.config.keys import AUTO
from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.core.errors import ConfigError
from ngpt_train.interop.layouts.layout import Layout
from ngpt_train.interop.layouts.llama import LlamaLayout, Qwen3Layout
from ngpt_train.interop.layouts.ngpt import NGPTLayout
from ngpt_train.interop.layouts.plain import SafetensorsLayout

# auto takes the first that can hold the model.
_LAYOUTS: tuple[Layout, ...] = (
    LlamaLayout(),
    Qwen3Layout(),
    NGPTLayout(),
    SafetensorsLayout(),
)
LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in _LAYOUTS}


def layout_of(config: ModelConfig) -> Layout:
    """The layout of export.layout=auto: that of the readers that most people have."""
    return next(layout for layout in LAYOUTS.values() if layout.refusal(config) is None)


def chosen_layout(name: str, config: ModelConfig) -> Layout:
    """The layout that export.layout names. Raises ConfigError where it cannot hold the model."""
    if name == AUTO:
        return layout_of(config)
    if problem := LAYOUTS[name].refusal(config):
        raise ConfigError(
            f"export.layout={name}: {problem}\n  Set export.layout={layout_of(config).name}, or leave it out"
        )
    return LAYOUTS[name]
