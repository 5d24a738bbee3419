"""`probe`: where the validation loss of one or two checkpoints is."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ngpt_train.analysis import token_classes
from ngpt_train.analysis.probe_losses import report
from ngpt_train.analysis.probe_page import class_rows, html, sign
from ngpt_train.analysis.run_contents import names_of
from ngpt_train.config.places import make_directory
from ngpt_train.config.schema import Config
from ngpt_train.config.sections.data import sources_of
from ngpt_train.config.validate import mistake
from ngpt_train.core.errors import DataError
from ngpt_train.core.files import write_atomically
from ngpt_train.core.secrets import command_of, redacted
from ngpt_train.data import open_dataset
from ngpt_train.data.dataset import Dataset, Tokens
from ngpt_train.data.rows import rows_of
from ngpt_train.data.tokenizers.tokenizer import pieces_of, tokenizer_identity
from ngpt_train.distributed.world import World, join_world
from ngpt_train.evaluation.restore import Restored, check_overrides, named, restore
from ngpt_train.evaluation.validation import Evaluations, Validation, target_counts
from ngpt_train.training.checkpoint.catalogue import step_of
from ngpt_train.verbs.evaluate import ROWS, combine

logger = logging.getLogger(__name__)


def main(config: Config, overrides: Sequence[str]) -> int:
    """Prints losses by class and writes probe.json and page.html into probe.out; returns 0.

    The rows are those of the first checkpoint's data, as `evaluate` takes them. Raises ConfigError for an override that
    contradicts a checkpoint, and for a model that continues no text; DataError where a checkpoint or its data cannot be
    read, or the second model cannot take the same rows.
    """
    own = config.probe
    trained = [named("probe", "checkpoints", value, own) for value in own.checkpoints or []]
    check_overrides("probe", trained, config, overrides, also_used=("data", *ROWS))
    names = names_of([each.path for each in trained], [step_of(each.path) for each in trained])
    world = join_world(config)
    first = restore(trained[0], config, world)
    if problem := first.config.model.refuses_text():
        raise mistake(f"probe: {problem}", "Choose the checkpoint of a model that continues text")
    combined = combine(config, first.config, overrides)
    combined = replace(combined, eval=replace(combined.eval, contexts=None, budget=None))
    dataset = open_dataset(combined, first.tokenizer)
    validation, losses = _measured(dataset, combined, first, world)
    models = [_said(names[0], first)]
    all_losses = {names[0]: losses}
    if len(trained) == 2:
        second = restore(trained[1], config, world)
        _check_same(names, first, second)
        there, all_losses[names[1]] = _measured(dataset, replace(combined, model=second.config.model), second, world)
        if there.rows_hash != validation.rows_hash:
            a, b = first.config.model, second.config.model
            problem = f"probe: {names[1]} does not take the same rows as {names[0]}"
            forms = f"one is {a.name} with {a.context} tokens, the other {b.name} with {b.context}"
            raise DataError(f"{problem}: {forms}. Probe them one by one")
        models.append(_said(names[1], second))
    tokens, targets, *_ = (part.numpy() for part in validation.batch)
    pieces = pieces_of(dataset.tokenizer)
    classes = _classes(dataset, combined, validation, pieces)
    about = {
        "command": command_of("probe", overrides),
        "data": redacted(combined.data.path or combined.data.kind),
        "data_fingerprint": dataset.fingerprint,
        "rows_hash": validation.rows_hash,
        "rows_evaluated": validation.n_rows,
    }
    content = report(models, all_losses, (tokens, targets), validation.numbers, classes, pieces, own.show, about)
    print(summary(content))
    if own.out is not None:
        out = Path(own.out).expanduser()
        make_directory(f"probe.out={out}", out)
        write_atomically(out / "probe.json", (json.dumps(content, ensure_ascii=False) + "\n").encode())
        write_atomically(out / "page.html", html(content).encode())
        print(f"written to {out}: page.html, probe.json")
    return 0


def _measured(
    dataset: Dataset, config: Config, restored: Restored, world: World
) -> tuple[Validation, NDArray[np.float64]]:
    """The validation at the model's context, and the loss of each target."""
    validation = Evaluations(dataset.validation, dataset.tokenizer, config).at_training_context
    return validation, validation.token_losses(restored.model, world)


def _check_same(names: Sequence[str], first: Restored, second: Restored) -> None:
    """Raises DataError unless both models take the same ids and rows."""
    if tokenizer_identity(first.tokenizer) != tokenizer_identity(second.tokenizer):
        problem = f"{names[0]} has the tokenizer {first.tokenizer.name}, {names[1]} has {second.tokenizer.name}"
        why = "the losses of their tokens cannot be put beside each other"
        raise DataError(f"probe: {problem}; {why}. Probe them one by one")
    if first.config.model.context != second.config.model.context:
        problem = f"{names[0]} has model.context={first.config.model.context}, {names[1]} {second.config.model.context}"
        raise DataError(f"probe: {problem}; rows of one length are needed. Probe them one by one")


def _said(name: str, restored: Restored) -> dict[str, Any]:
    return {
        "name": name,
        "checkpoint": str(restored.path),
        "step": restored.step,
        "architecture": restored.config.model.name,
        "weights": restored.of_what or "trained",
    }


def _classes(
    dataset: Dataset, config: Config, validation: Validation, pieces: list[str]
) -> list[token_classes.Classes]:
    tokens, targets, *_ = (part.numpy() for part in validation.batch)
    vocab_size = int(config.model.vocab_size)
    # Streamed text is not there to be counted, nor is a mixture's training text in one place.
    text, counted = dataset.validation, "the held-out text"
    if isinstance(dataset.train, Tokens):
        text, counted = dataset.train, "the training text"
    counts = target_counts(rows_of(text, config), vocab_size)
    found = [
        token_classes.of_frequency(targets, counts, counted),
        token_classes.of_position(targets),
        token_classes.of_type(tokens, targets, pieces, dataset.tokenizer.eos),
    ]
    if config.data.kind == "mixture":
        names = [source.name for source in sources_of(config.data)]
        found.append(token_classes.of_source(dataset.validation, names, config, validation.numbers))
    return found


def summary(content: Mapping[str, Any]) -> str:
    """Losses by class, for a terminal."""
    names = [model["name"] for model in content["models"]]
    lines = [
        f"{model['name']}: loss {model['loss']:.6f} on {model['targets']:,} targets" for model in content["models"]
    ]
    lines += [sign(names)] if len(names) == 2 else []
    for each in content["classes"]:
        rows = class_rows(each, names)
        columns = list(rows[0])
        table = [columns, *([str(row[column]) for column in columns] for row in rows)]
        widths = [max(len(line[k]) for line in table) for k in range(len(columns))]
        lines.append("")
        lines += ["  ".join(x.ljust(w) for x, w in zip(line, widths, strict=True)).rstrip() for line in table]
    return "\n".join(lines)
