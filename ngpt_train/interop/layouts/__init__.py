"""Layouts: a file for each program that reads a model."""

from ngpt_train.config.keys import AUTO
from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.config.validate import mistake
from ngpt_train.interop.layouts.absorbed import AnGPTLayout
from ngpt_train.interop.layouts.layout import Layout
from ngpt_train.interop.layouts.llama import LlamaLayout, Qwen3Layout
from ngpt_train.interop.layouts.marian import MarianLayout
from ngpt_train.interop.layouts.ngpt import NGPTLayout
from ngpt_train.interop.layouts.roberta import RobertaLayout

# In the order of export.layout=auto: the last one can hold any model.
_TYPES = (LlamaLayout, Qwen3Layout, NGPTLayout, AnGPTLayout, RobertaLayout, MarianLayout, Layout)
LAYOUTS: dict[str, Layout] = {layout.name: layout() for layout in _TYPES}


def chosen_layout(name: str, config: ModelConfig, dtype: str = "fp32") -> Layout:
    """The layout of export.layout=NAME; for auto the first one that can hold the model in export.dtype=DTYPE. Raises
    ConfigError if it cannot."""
    fitting = next(layout for layout in LAYOUTS.values() if refusal(layout, config, dtype) is None)
    if name == AUTO:
        return fitting
    if problem := refusal(LAYOUTS[name], config, dtype):
        raise mistake(f"export.layout={name}: {problem}", f"Set export.layout={fitting.name}, or leave it out")
    return LAYOUTS[name]


def refusal(layout: Layout, config: ModelConfig, dtype: str) -> str | None:
    """The key, and why the layout cannot hold the model in that dtype; None if it can."""
    if layout.for_transformers and config.n_classes:
        return f"model.n_classes={config.n_classes}: this layout has no head for labels"
    if layout.for_transformers and config.bidirectional and layout.objective != "masked":
        return "model.bidirectional=true: this layout is one of causal models"
    if (problem := layout.refusal(config)) or dtype in layout.dtypes:
        return problem
    return f"export.dtype={dtype}: this layout writes export.dtype={layout.dtypes[0]} alone"
