"""`evaluate`: validation loss of a checkpoint, on its run's data or other data."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ngpt_train.config.conflicts import check_contexts
from ngpt_train.config.schema import Config
from ngpt_train.core.errors import DataError
from ngpt_train.core.files import write_json
from ngpt_train.data import open_dataset
from ngpt_train.data.tokenizers import tokenizer_identity
from ngpt_train.distributed import join_world
from ngpt_train.evaluation import Evaluations
from ngpt_train.evaluation.evaluations import file_name
from ngpt_train.evaluation.restore import find_trained, restore

logger = logging.getLogger(__name__)

ROWS = ("eval.rows", "eval.tokens")  # either says how much text is evaluated


def main(config: Config, overrides: Sequence[str]) -> int:
    """Prints loss (nats per token), perplexity and bits per byte, and writes them to evaluate.out, and the loss of each
    row beside it; returns 0.

    Model and tokenizer are the checkpoint's. The data is the run's own unless the command line names another; of an
    experiment only the data is used. Raises ConfigError for an override that contradicts the checkpoint, DataError
    where checkpoint or data cannot be used, or the data has another tokenizer than the model.
    """
    trained = find_trained("evaluate", config, overrides, also_used=("data", *ROWS, "eval.contexts", "parallel"))
    world = join_world(config)
    restored = restore(trained, config, world)
    combined = combine(config, restored.config, overrides)
    check_contexts(combined)
    dataset = world.on_all_without_timeout(
        lambda: open_dataset(combined, restored.tokenizer, world.on_main_without_timeout)
    )
    if tokenizer_identity(dataset.tokenizer) != tokenizer_identity(restored.tokenizer):
        raise DataError(
            f"evaluate.checkpoint={config.evaluate.checkpoint}: the model was trained with the tokenizer "
            f"{restored.tokenizer.name} with eos {restored.tokenizer.eos}, the tokens at {dataset.path} were made with "
            f"{dataset.tokenizer.name} with eos {dataset.tokenizer.eos}. "
            "Prepare the text with the model's tokenizer (tokenizer.path=CHECKPOINT/tokenizer.model)."
        )
    validation = Evaluations(dataset.validation, dataset.tokenizer.n_bytes, combined)
    for note in validation.notes():
        logger.info(note)
    losses = validation.row_losses(restored.model, world)
    result = {
        "checkpoint": str(restored.path),
        "step": restored.step,
        **({"averaged_steps": list(restored.averaged_steps)} if restored.averaged_steps else {}),
        **({"weights": restored.weights} if restored.weights != "trained" else {}),
        "data": combined.data.path or combined.data.kind,
        "data_fingerprint": dataset.fingerprint,
        **validation.metrics(losses),
    }
    if world.is_main:
        of_what = f" ({restored.of_what})" if restored.of_what else ""
        print(
            f"{result['checkpoint']}{of_what} on {result['data']} ({result['rows']} rows): loss {result['loss']:.6f}  "
            f"ppl {result['ppl']:.4f}  bits/byte {result['bits_per_byte']:.6f}"
        )
        for context in sorted(losses.keys() - {combined.model.context}):
            of_context = losses[context].metrics()
            print(
                f"  at context {context} ({of_context['rows']} rows): loss {of_context['loss']:.6f}  "
                f"ppl {of_context['ppl']:.4f}  bits per byte {of_context['bits_per_byte']:.6f}"
            )
        if config.evaluate.out is not None:
            out = Path(config.evaluate.out).expanduser()
            for context, rows in losses.items():
                rows.write(out.with_name(file_name(out.stem, context, combined.model.context)))
            write_json(out, result)
    return 0


def combine(config: Config, of_run: Config, overrides: Sequence[str]) -> Config:
    """`config` with the model of the run, and with its text, rows and contexts where `overrides` name no others."""
    overridden = {override.split("=")[0].strip() for override in overrides}  # names of keys and groups
    # Each of these names other text. Any other key of data.* changes how the run's own text is read.
    other_text = overridden & {"data", "data.kind", "data.path", "experiment"}
    data = config.data if other_text else replace(of_run.data, **changes(config.data, "data", overridden))
    chosen = config.eval if overridden.intersection(ROWS) else of_run.eval
    contexts = config.eval.contexts if "eval.contexts" in overridden else of_run.eval.contexts
    validation = replace(config.eval, rows=chosen.rows, tokens=chosen.tokens, contexts=contexts)
    return replace(config, model=of_run.model, data=data, eval=validation)


def changes(section: Any, name: str, overridden: set[str]) -> dict[str, Any]:
    """The keys, with their values, of the config section `name` that are in `overridden` as `NAME.KEY`."""
    return {key: value for key, value in vars(section).items() if f"{name}.{key}" in overridden}
