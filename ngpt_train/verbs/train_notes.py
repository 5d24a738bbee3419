"""The lines that `train` says at the start and at the end of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ngpt_train.config.schema import Config
from ngpt_train.data.dataset import Dataset, Tokens
from ngpt_train.data.rows import rows_of
from ngpt_train.evaluation.in_training import Validations
from ngpt_train.evaluation.validation import Evaluations, unigram_loss
from ngpt_train.training.checkpoint.catalogue import list_checkpoints, step_of
from ngpt_train.training.hooks.bad_steps import record_of
from ngpt_train.training.loop import Hook, TrainingRun
from ngpt_train.training.run_directory import RunDirectory
from ngpt_train.training.state import TrainState


@dataclass(eq=False)
class Notes(Hook):
    """Says what starts and what has come out."""

    directory: RunDirectory
    entry: Mapping[str, Any]  # of this start in run.json
    data: Dataset
    evaluations: Evaluations
    validations: Validations
    notes: Sequence[str]  # sentences about the rows
    unigram: str = ""

    def start(self, run: TrainingRun) -> None:
        begins = f"resumed at step {run.step}" if run.step else "new"
        run.say(f"run {self.directory.path}: {begins}")
        for text in what_starts(run.state, self.entry):
            run.say(text)
        if (went_back := record_of(run.state)) is not None:
            run.log(went_back)
        for text in self.notes:
            run.say(text)
        if run.state.world.is_main:
            self.unigram = unigram_note(self.data, self.evaluations, run.state.config)
        if self.unigram:
            run.say(f"validation loss: {self.unigram}")

    def finish(self, run: TrainingRun) -> None:
        if run.reason:
            run.say(f"{run.reason}: {where_it_goes_on(self.directory, run.step)}")
            return
        run.say("; ".join(filter(None, [f"validation loss {self.validations.last['loss']:.4f}", self.unigram])))
        if stopped := stopped_before_the_end(run.state.config):
            goes_on = where_it_goes_on(self.directory, run.step, without="train.stop_at and run.overwrite")
            run.say(f"{stopped}, before the last of {run.state.config.train.steps} steps: {goes_on}")


def what_starts(state: TrainState, start: Mapping[str, Any]) -> list[str]:
    """Model, batch, device and optimizer, the first lines of the log."""
    config = state.config
    tokens = config.train.rows_per_step * config.model.context
    accumulation = config.train.rows_per_step // state.micro_rows // state.world.size
    optim, smoothing = config.optim, config.optim.label_smoothing
    found = [
        f"{config.model.name} with {start['n_params']:,} parameters, vocabulary {config.model.vocab_size} "
        f"({start['tokenizer']}), context {config.model.context}",
        f"{tokens:,} tokens per step: {state.world.size} rank(s) x {accumulation} x {state.micro_rows} rows, "
        f"{start['parallel']} on {start['device']}, {state.model.compute_dtype or torch.float32}",
        *(f"note: {note}" for note in state.model.notes()),
    ]
    if config.model.uses_dropout:
        found.append("note: training losses are those with dropout, validation losses those without")
    found.append(
        f"{optim.name}, lr {optim.lr:g}, {config.schedule.kind} over {config.train.steps} steps, "
        f"{config.schedule.warmup_steps} of them warmup"
        + (f", z-loss {optim.z_loss:g}, which the losses below leave out" if optim.z_loss else "")
        + (f", label smoothing {smoothing:g}, which they leave out" if smoothing else "")
        + (f", moving average of the weights with decay {optim.ema_decay:g}" if optim.ema_decay else "")
    )
    found += start.get("kernels", {}).get("notes", ())
    if optim.lr_source:
        found.append(f"lr from {optim.lr_source}")
    if source := config.model.source_of_starts(config.scale.name):
        found.append(f"initialisation from {source}")
    return found


def stopped_before_the_end(config: Config) -> str:
    """Why this start ends before train.steps, if that is planned."""
    last = config.train.stop_at or config.train.steps
    return "" if last == config.train.steps else f"stopped by train.stop_at={last}"


def where_it_goes_on(directory: RunDirectory, step: int, without: str = "run.overwrite") -> str:
    """The way on for a run that was stopped after `step`, whose last steps may have been too bad to save."""
    saved = list_checkpoints(directory.checkpoints)
    at = step_of(saved[-1]) if saved else 0
    told = f"saved at step {step}" if at == step else f"step {step} is not saved, the last checkpoint is of step {at}"
    return f"{told}; run the same command, without {without}, to continue"


def unigram_note(data: Dataset, validation: Evaluations, config: Config) -> str:
    """The loss of a unigram model on the validation rows, for the log; empty for streamed text, whose ids are not there
    to be counted."""
    if not isinstance(data.train, Tokens) or config.model.n_classes:
        return ""
    rows, vocab_size = rows_of(data.train, config), int(config.model.vocab_size)
    return f"a unigram model reaches {unigram_loss(rows, validation.at_training_context, vocab_size):.4f}"
