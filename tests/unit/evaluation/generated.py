"""One text from a model, without a tokenizer."""

from torch import Tensor

from ngpt_train.config.sections.generation import GenerateConfig
from ngpt_train.evaluation.generation.tokens import continue_rows, reader_of, row_of
from ngpt_train.models import Decoder


def generate(model: Decoder, prompt: Tensor, config: GenerateConfig, eos: int, vocab_size: int) -> Tensor:
    """The tokens `(n,)` int64 with which `model` continues `prompt`: n <= max_new_tokens, without eos, where they end.

    prompt: `(T,)` int64, T >= 1, on the model's device. The model sees the last `context` tokens. Else as of
    `continue_rows`. The same seed gives the same tokens, on every device up to rounding of the logits.
    """
    model.eval()
    row = row_of(model, prompt, config.seed)
    continue_rows(reader_of(model, config), [row], config, eos, vocab_size)
    return prompt.new_tensor(row.new)
