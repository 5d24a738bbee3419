"""The validations of a run while it trains: the loss, a sample of text, and the scores of tasks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ngpt_train.config.schema import Config
from ngpt_train.core.constants import TRANSLATED
from ngpt_train.core.errors import DataError
from ngpt_train.core.recorded import Record
from ngpt_train.data.dataset import Dataset, Pairs
from ngpt_train.data.tokenizers.tokenizer import Tokenizer
from ngpt_train.distributed.world import World
from ngpt_train.evaluation.sampling import opened, row_of
from ngpt_train.evaluation.translations import scores, translated_pairs
from ngpt_train.evaluation.validation import Evaluations, RowFiles, evaluating
from ngpt_train.models.encoder_decoder import EncoderDecoder
from ngpt_train.training.guards import explain_out_of_memory
from ngpt_train.training.loop import Hook, TrainingRun, due
from ngpt_train.training.state import TrainState

if TYPE_CHECKING:
    from ngpt_train.evaluation.tasks.run_tasks import Tasks


@dataclass(eq=False)
class Validations(Hook):
    """Logs an eval record at the first and the last step and every eval.every steps, and a sample of text after each.
    Writes the losses of the rows into `directory`/evals."""

    validation: Evaluations
    directory: Path
    validated: Callable[[int, float], None]  # called on rank 0 with the step and the loss
    sample: Callable[[TrainState], dict[str, str]] | None  # from `sampling_of`
    score: Callable[[TrainState], dict[str, float]] | None  # from `translating_of`, called at the end of the schedule
    files: RowFiles | None = None
    last: Record = field(default_factory=dict)  # the metrics of the last validation

    def start(self, run: TrainingRun) -> None:
        if run.state.world.is_main:  # `start` comes after a resume has trimmed metrics.jsonl
            evals, metrics = self.directory / "evals", self.directory / "metrics.jsonl"
            self.files = RowFiles(evals, metrics, run.state.config.model.context)
        # The run may have been stopped between its last checkpoint and the evaluation at that step.
        if run.step == 0 or self._is_due(run):
            self._validate(run)

    def waits(self, run: TrainingRun) -> bool:
        return due(run.step, run.state.config.eval.every)

    def evaluate(self, run: TrainingRun) -> None:
        if self._is_due(run):
            self._validate(run)

    def _is_due(self, run: TrainingRun) -> bool:
        return run.step >= run.last or self.waits(run)

    def _validate(self, run: TrainingRun) -> None:
        state = run.state
        with explain_out_of_memory(state.micro_rows), run.during("the validation at step", run.step):
            losses = self.validation.row_losses(state.model, state.world, last=run.step >= run.last)
            self.last = self.validation.metrics(losses)
            # Not at train.stop_at: an audit, which stops there, would have scores that the run has not.
            if self.score is not None and run.step >= state.config.train.steps:
                self.last |= self.score(state)
            if self.files is not None:
                try:
                    self.files.write(run.step, losses)
                except DataError as error:
                    run.warn(str(error))
                self.validated(run.step, self.validation.comparable_loss(losses))
            text = self.sample(state) if self.sample is not None else None
        run.log(run.record("eval") | self.last)
        if text is not None:
            run.log(run.record("sample") | text)


@dataclass(eq=False)
class TaskScores(Hook):
    """Logs a tasks record at the last step and every eval.tasks_every steps."""

    tasks: Tasks
    tokenizer: Tokenizer

    def start(self, run: TrainingRun) -> None:
        if run.step:
            self.evaluate(run)

    def evaluate(self, run: TrainingRun) -> None:
        state, asked = run.state, run.state.config.eval
        if run.step < run.last and not due(run.step, asked.every if asked.tasks_every is None else asked.tasks_every):
            return
        with explain_out_of_memory(state.micro_rows), run.during("the tasks at step", run.step):
            metrics = self.tasks(state.model, self.tokenizer, state.world).metrics()
        run.log(run.record("tasks") | metrics)


def sampling_of(config: Config, tokenizer: Tokenizer) -> Callable[[TrainState], dict[str, str]] | None:
    """A function that continues logging.sample_prompt, as {"prompt": ..., "text": ...}; None without such a prompt.

    Calling it is collective. It changes nothing of the state, because the row has its own random numbers. If logits are
    not finite it adds no token, and training goes on.
    """
    if (prompt := config.logging.sample_prompt) is None:
        return None
    ids = tokenizer.encode(prompt).tolist()

    def sample(state: TrainState) -> dict[str, str]:
        with evaluating(state.model, state.world):
            row = row_of(state.model, opened(state.model, tokenizer, ids), config.generate.seed)
            # All ranks need the same number of passes, even after the text has ended: FSDP2 gathers weights in each.
            for _ in range(config.generate.most_sampled):
                logits = state.model.next_token_logits(row.prompt, row.prompt.new_tensor(row.new)).cpu()
                if row.end is None and logits.isfinite().all():
                    row.add(logits, config.generate, tokenizer)
        whole, given = tokenizer.decode([*ids, *row.new]), tokenizer.decode(ids)
        return {"prompt": given, "text": whole.removeprefix(given)}

    return sample


def translating_of(config: Config, data: Dataset) -> Callable[[TrainState], dict[str, float]] | None:
    """A function that translates the held-out pairs and scores them; None without eval.beams. Calling it is
    collective."""
    n_beams, tokenizer = config.eval.beams, data.tokenizer
    if n_beams is None:
        return None
    assert isinstance(data.validation, Pairs)
    pairs = data.validation.texts

    def score(state: TrainState) -> dict[str, float]:
        assert isinstance(state.model, EncoderDecoder)
        with evaluating(state.model, state.world):
            found = translated_pairs(state.model, tokenizer, pairs, state.world, n_beams, length_penalty=1.0)
        return {name: value for name, value in scores(*found).items() if name in TRANSLATED}

    return score


def tasks_of(config: Config, world: World) -> Tasks | None:
    """The tasks of eval.tasks with their data; None without any. A collective call. Raises as `Tasks`."""
    if config.eval.tasks is None:
        return None
    from ngpt_train.evaluation.tasks.run_tasks import Tasks

    return Tasks(config.eval, config.model, world)
