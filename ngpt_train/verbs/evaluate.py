"""`evaluate`: validation loss of a checkpoint on named data."""

from collections.abc import Sequence
from dataclasses import replace

from ngpt_train.config.schema import Config, DataError
from ngpt_train.data import open_dataset
from ngpt_train.distributed import join_world
from ngpt_train.evaluation import Validation
from ngpt_train.evaluation.restore import restore
from ngpt_train.training.checkpoint import write_json


def main(config: Config, overrides: Sequence[str]) -> int:
    """Prints loss, perplexity and bits per byte; writes them to evaluate.out.

    The data is the run's own unless the command line names another; the tokenizer is the checkpoint's.
    """
    world = join_world(config)
    restored = restore("evaluate.checkpoint", config.evaluate.checkpoint, config.train.precision, world)
    named = any(override.split("=")[0].split(".")[0] == "data" for override in overrides)
    model_file = restored.path / "tokenizer.model"
    data_config = replace(
        config,
        model=restored.config.model,
        data=config.data if named else restored.config.data,
        tokenizer=replace(
            restored.config.tokenizer,
            kind=restored.tokenizer.kind,
            path=str(model_file) if model_file.is_file() else None,
        ),
    )
    data = open_dataset(data_config)
    if data.tokenizer.fingerprint != restored.tokenizer.fingerprint:
        raise DataError(
            f"evaluate.checkpoint={config.evaluate.checkpoint}: the model was trained with the tokenizer "
            f"{restored.tokenizer.name}, the tokens at {data.path} were made with {data.tokenizer.name}. "
            "Prepare the text with the model's tokenizer (tokenizer.path=CHECKPOINT/tokenizer.model)."
        )
    validation = Validation(data.validation, data.tokenizer.n_bytes, restored.config.model.context, config.eval.rows)
    result = {
        "checkpoint": str(restored.path),
        "step": restored.step,
        "data": data_config.data.path or data_config.data.kind,
        "data_fingerprint": data.fingerprint,
        "rows": len(validation.rows),
        **validation(restored.model, world),
    }
    if world.is_main:
        print(
            f"{result['checkpoint']} on {result['data']} ({result['rows']} rows): loss {result['loss']:.6f}  "
            f"ppl {result['ppl']:.4f}  bits/byte {result['bits_per_byte']:.6f}"
        )
        if config.evaluate.out:
            from pathlib import Path

            write_json(Path(config.evaluate.out), result)
    return 0
