"""The hooks of `train`, in the order in which the loop calls them."""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ngpt_train.config.architectures import plugins
from ngpt_train.config.schema import Config
from ngpt_train.config.stored import write_yaml
from ngpt_train.config.validate import mistake
from ngpt_train.core.files import write_json
from ngpt_train.data.dataset import Dataset
from ngpt_train.data.epochs import epoch_rows, many_epochs
from ngpt_train.data.tokenizers import write_tokenizer
from ngpt_train.evaluation.in_training import TaskScores, Validations, sampling_of, translating_of
from ngpt_train.evaluation.validation import Evaluations
from ngpt_train.observe.meters import Meter, Profiler
from ngpt_train.observe.telemetry.collector import ObservedSteps, Telemetry
from ngpt_train.observe.train_records import TrainRecords
from ngpt_train.training.checkpoint.catalogue import step_of
from ngpt_train.training.checkpoint.save import Checkpoints
from ngpt_train.training.hooks.bad_steps import Rollback, SkippedSteps, go_back_every
from ngpt_train.training.hooks.replicas import Replicas
from ngpt_train.training.hooks.saving import SaveCheckpoints
from ngpt_train.training.hooks.stopping import StopTogether
from ngpt_train.training.hooks.watchdog import Watchdog
from ngpt_train.training.loop import Hook, TrainingRun
from ngpt_train.training.run_directory import RunDirectory
from ngpt_train.verbs.train_notes import Notes

if TYPE_CHECKING:
    from ngpt_train.evaluation.tasks.run_tasks import Tasks


def add_hooks(
    directory: RunDirectory,
    data: Dataset,
    start: dict[str, Any],
    evaluations: Evaluations,
    tasks: Tasks | None,
    telemetry: Telemetry | None,
    run: TrainingRun,
) -> None:
    """Adds the hooks to `run`, whose sinks are open; a collective call. start: this start's entry in run.json."""
    config, world = run.state.config, run.state.world

    def hung(reason: str) -> None:
        directory.finish(1, f"hung: {reason}", run.step, world.rank)

    def add_files(checkpoint: Path) -> None:
        write_yaml(config, checkpoint / "config.yaml")
        write_json(checkpoint / "tokenizer.json", write_tokenizer(data.tokenizer, checkpoint))

    kept, back_every = config.checkpoint, go_back_every(config) if config.guards.rollback else 1
    checkpoints = Checkpoints(
        directory.checkpoints, world, kept.keep_last, kept.keep_every, kept.checksum, kept.keep_best, back_every
    )
    advice = partial(checkpoints.advice, float(config.optim.lr))
    run.hooks.append(Watchdog(world, config.parallel.hang_seconds, hung))  # at once: it ends the job if the rest fails
    saves = SaveCheckpoints(run, checkpoints, lambda checkpoint: directory.saved(step_of(checkpoint)), add_files)
    sample = sampling_of(config, data.tokenizer)
    score = translating_of(config, data)
    validations = Validations(evaluations, directory.path, checkpoints.validated, sample, score)
    sizes = epoch_rows(data, config) if world.is_main else {}
    notes = [*evaluations.notes(), *(tasks.notes() if tasks else [])]
    notes += [f"warning: {warning}" for warning in many_epochs(sizes, config)]
    flops = run.state.model.flops_per_token(config.model.context)
    dtype = run.state.model.compute_dtype or run.state.model.embedding.dtype
    run.hooks += [
        Notes(directory, start, data, evaluations, validations, notes),
        TrainRecords(Meter(flops, world.size, world.device, dtype), {name: size.rows for name, size in sizes.items()}),
        *([Profiler(directory.path / "profile")] if config.train.profile else []),
        StopTogether(run.stop, world, run.step, news=saves.has_failed, hear=saves.settle),
        saves,
        *([ObservedSteps(telemetry, config.logging.telemetry)] if telemetry else []),
        *([Rollback(directory, saves, advice)] if config.guards.rollback else []),
        SkippedSteps(advice),
        Replicas(),
        validations,
        *([TaskScores(tasks, data.tokenizer)] if tasks else []),
        *hooks_of_plugins(config),
    ]


def hooks_of_plugins(config: Config) -> list[Hook]:
    """The hooks of each plug-in in use that has a hooks.py. Raises ConfigError where that has no function `hooks`."""
    found: list[Hook] = []
    for folder in plugins():
        path = folder / "hooks.py"
        if path.is_file():
            module = importlib.import_module(f"ngpt_train.models.{folder.name}.hooks")
            if not hasattr(module, "hooks"):
                raise mistake(f"--plugin={folder}: {path} has no function hooks(config)", "Add one, or remove the file")
            found += module.hooks(config)
    return found
