"""What `train` says at the start and at the end of a run."""

from collections.abc import Callable
from typing import Any

import torch

from ngpt_train.config.schema import Config
from ngpt_train.data import Dataset, Tokens, rows_of
from ngpt_train.evaluation import Evaluations, unigram_loss
from ngpt_train.training import TrainState
from ngpt_train.training.checkpoint import list_checkpoints, step_of
from ngpt_train.training.run_directory import RunDirectory


def say_what_starts(
    say: Callable[[str], None], run: RunDirectory, state: TrainState, start: dict[str, Any], resumed: int | None
) -> None:
    """Says the run, model, batch, device and optimizer, the first lines of the log. resumed: the step, None if new."""
    config = state.config
    tokens = config.train.rows_per_step * config.model.context
    accumulation = config.train.rows_per_step // state.micro_rows // state.world.size
    say(f"run {run.path}: {'resumed at step ' + str(resumed) if resumed else 'new'}")
    say(
        f"{config.model.name} with {start['n_params']:,} parameters, vocabulary {config.model.vocab_size} "
        f"({start['tokenizer']}), context {config.model.context}"
    )
    say(
        f"{tokens:,} tokens per step: {state.world.size} rank(s) x {accumulation} x {state.micro_rows} rows, "
        f"{start['parallel']} on {start['device']}, {state.model.compute_dtype or torch.float32}"
    )
    for note in state.model.notes():
        say(f"note: {note}")
    if config.model.uses_dropout:
        say("note: training losses are those with dropout, validation losses those without")
    smoothing = config.optim.label_smoothing
    say(
        f"{config.optim.name}, lr {config.optim.lr:g}, {config.schedule.kind} over {config.train.steps} steps, "
        f"{config.schedule.warmup_steps} of them warmup"
        + (f", z-loss {config.optim.z_loss:g}, which the losses below leave out" if config.optim.z_loss else "")
        + (f", label smoothing {smoothing:g}, which they leave out" if smoothing else "")
        + (f", moving average of the weights with decay {config.optim.ema_decay:g}" if config.optim.ema_decay else "")
    )
    for note in start.get("kernels", {}).get("notes", ()):
        say(note)
    if config.optim.lr_source:
        say(f"lr from {config.optim.lr_source}")
    if source := config.model.source_of_starts(config.scale.name):
        say(f"initialisation from {source}")


def where_it_goes_on(run: RunDirectory, step: int, without: str = "run.overwrite") -> str:
    """What becomes of a run that was stopped after `step`, whose last steps may have been too bad to save."""
    saved = list_checkpoints(run.checkpoints)
    at = step_of(saved[-1]) if saved else 0
    told = f"saved at step {step}" if at == step else f"step {step} is not saved, the last checkpoint is of step {at}"
    return f"{told}; run the same command, without {without}, to continue"


def unigram_note(data: Dataset, validation: Evaluations, config: Config) -> str:
    """The loss of a unigram model on the validation rows, for the log; empty for streamed text, whose ids are not there
    to be counted."""
    if not isinstance(data.train, Tokens):
        return ""
    rows, vocab_size = rows_of(data.train, config), int(config.model.vocab_size)
    return f"a unigram model reaches {unigram_loss(rows, validation.at_training_context, vocab_size):.4f}"
