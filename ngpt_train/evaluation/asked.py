"""Tasks and a sample of text, which a config asks of a model beside its loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.config.schema import Config
from ngpt_train.config.sections.evaluation import EvalConfig
from ngpt_train.data.tokenizers.tokenizer import Tokenizer
from ngpt_train.distributed.world import World
from ngpt_train.evaluation.generation.continued_prompts import Texts
from ngpt_train.evaluation.generation.tokens import row_of
from ngpt_train.evaluation.validation import evaluating
from ngpt_train.training.state import TrainState

if TYPE_CHECKING:
    from ngpt_train.evaluation.tasks.run_tasks import Tasks


def tasks_of(validation: EvalConfig, model: ModelConfig, world: World) -> Tasks | None:
    """The tasks of eval.tasks with their data, for a model of these keys; None where there are none. A collective call.

    Raises ConfigError for what is no task or none of this model, DataError where the data of one cannot be had.
    lm-evaluation-harness is imported where there are some.
    """
    if validation.tasks is None:
        return None
    from ngpt_train.evaluation.tasks.run_tasks import Tasks

    return Tasks(validation, model.source_length(model.context), world)


def sampling_of(config: Config, tokenizer: Tokenizer) -> Callable[[TrainState], dict[str, str]] | None:
    """A function that continues logging.sample_prompt as {"prompt": ..., "text": ...}; None without such a prompt.

    Calling it is collective. It changes nothing of the state: the random numbers are the row's own. Where logits
    are not finite no token is added, and training goes on.
    """
    prompt = config.logging.sample_prompt
    if prompt is None:
        return None
    # Kept keys and values would go past the forward pass of the model, in which FSDP2 gathers weights.
    options = replace(config.generate, cache=False)
    ids = tokenizer.encode(prompt).tolist()

    def sample(state: TrainState) -> dict[str, str]:
        with evaluating(state.model, state.world):
            row = row_of(state.model, Texts(state.model, tokenizer, options).opened(ids), options.seed)
            # As many passes on every rank, also where its own text has ended: each gathers the weights of all.
            for _ in range(options.max_new_tokens):
                logits = state.model.next_token_logits(row.prompt, row.prompt.new_tensor(row.new)).cpu()
                if row.end is None and logits.isfinite().all():
                    row.add(logits, options, tokenizer.eos, tokenizer.vocab_size)
        whole, given = tokenizer.decode([*ids, *row.new]), tokenizer.decode(ids)
        return {"prompt": given, "text": whole.removeprefix(given)}

    return sample
