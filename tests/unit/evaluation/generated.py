"""One text from a model, without a tokenizer."""

from torch import Tensor

from ngpt_train.config.sections.generation import GenerateConfig
from ngpt_train.evaluation.sampling import continue_rows, row_of
from ngpt_train.models import Decoder
from ngpt_train.models.decoding import Recomputed, cached


def generate(model: Decoder, prompt: Tensor, config: GenerateConfig, eos: int, vocab_size: int) -> Tensor:
    """Continues `prompt` `(T,)` int64, T >= 1, on the model's device. Returns the new tokens `(n,)`, without eos."""
    model.eval()
    row = row_of(model, prompt, config.seed)
    reader = cached(model) if config.cache else Recomputed(model)
    continue_rows(reader, [row], config, eos, vocab_size)
    return prompt.new_tensor(row.new)
