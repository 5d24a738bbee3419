"""The keys of what training does between steps: eval.*, checkpoint.*, guards.* and logging.*."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar, Union

from ngpt_train.config.keys import AUTO, BEAMS, COUNT, COUNT_OR_0, ROWS, SECONDS, BoolOrAuto, Conflict, key
from ngpt_train.config.validate import Origin, keep_later, report_together

if TYPE_CHECKING:
    from ngpt_train.config.schema import Config

OLDEST_HARNESS = (0, 4, 12)  # version of lm-evaluation-harness


@dataclass
class EvalConfig:
    """Validation during training."""

    may_change: ClassVar = True

    every: int = key(500, "Steps between validations; 0 validates at the start and at the end only.", **COUNT_OR_0)
    rows: Union[int, None] = key(
        64, "Rows of the fixed validation set (fewer where the data has fewer); set this or tokens.", **ROWS
    )
    tokens: Union[int, None] = key(
        None,
        "Targets of the fixed validation set, at least (fewer where the data has fewer, which the log says); of masked "
        "rows about as many; replaces rows.",
        minimum=1,
        maximum=10_000_000_000,
    )
    budget: Union[float, None] = key(
        None,
        "Share of the compute between two validations that a validation before the last may take: it then has fewer "
        "of the rows, always the same. null: no limit.",
        above=0,
        maximum=1000,
    )
    contexts: Union[list[int], None] = key(
        None,
        "Row lengths that the model is validated at besides model.context, such as [2048,4096], on the same text as "
        "far as whole rows allow: metrics loss_ctx2048 and so on. null: none.",
        **COUNT,
    )
    beams: Union[int, None] = key(
        None,
        "Of a model that translates: the last validation translates the held-out pairs too, by beam search with so "
        "many hypotheses and a length penalty of 1, for BLEU and chrF. null: the loss alone.",
        **BEAMS,
    )
    tasks: Union[list[str], None] = key(
        None,
        "Tasks of lm-evaluation-harness, such as [arc_easy,piqa], or of tasks_path; tasks=NAME names a list of them. "
        "`evaluate` runs them in place of the validation.",
    )
    tasks_every: Union[int, None] = key(
        None,
        "Steps between evaluations of the tasks in training, which come at the end too; 0: at the end only; null: as "
        "eval.every.",
        **COUNT_OR_0,
    )
    tasks_path: Union[str, None] = key(
        None, "Directory of task files, YAML of lm-evaluation-harness or JSONL, in which a task is looked up first."
    )

    def resolve(self, config: Config, origins: Mapping[str, Origin]) -> None:
        """Keeps the one of eval.rows and eval.tokens that was set last. Raises ConfigError."""
        names = "eval.rows eval.tokens"
        if self.rows is None and self.tokens is None:
            raise report_together(config, (names, "no validation set", "Set one, for example eval.rows=64"), origins)
        keep_later(config, names, "both set the validation set", origins)

    def conflicts(self) -> Iterator[Conflict]:
        """Keys of tasks that exclude each other."""
        if self.tasks == []:
            yield "eval.tasks", "no task", "Name one, as in tasks=[arc_easy], or leave it out"
        if any("/" in name or name in ("", ".", "..") for name in self.tasks or []):
            fix = "and here its files without their endings, as in tasks=[NAME]"
            yield "eval.tasks", "a path where names stand", f"Name the directory with eval.tasks_path=DIR, {fix}"
        if self.tasks and find_spec("lm_eval") is None:
            yield "eval.tasks", "the package lm-eval is not installed", "pip install 'ngpt-train[eval]'"
        elif self.tasks and tuple(map(int, re.findall(r"\d+", found := version("lm_eval"))[:3])) < OLDEST_HARNESS:
            yield "eval.tasks", f"lm-eval {found} is too old", "pip install 'ngpt-train[eval]', for 0.4.12 or later"

    def context_conflicts(self, config: Config) -> Iterator[Conflict]:
        """Contexts at which config.model, which may be a checkpoint's, cannot be validated."""
        for context in self.contexts or []:
            problem = config.model.refuses_rows_of(context) if context != config.model.context else None
            if problem:
                yield "eval.contexts model.name model.context", problem, f"Leave {context} out of eval.contexts"
        if self.contexts and config.data.pack == "best_fit":
            problem = "documents that fit together in one context are others in another"
            fix = "Leave eval.contexts out, or `evaluate` with data.pack=concat"
            yield "eval.contexts data.pack", f"{problem}, so the text would not be the same", fix

    def translation_conflicts(self, config: Config, world_size: int) -> Iterator[Conflict]:
        """What eval.beams cannot translate with."""
        if self.beams is None:
            return
        if config.model.objective != "translation":
            yield "eval.beams data.objective", "the model does not translate", "Leave eval.beams out"
        if find_spec("sacrebleu") is None:
            yield "eval.beams", "the package sacrebleu is not installed", "pip install 'ngpt-train[eval]'"
        if world_size > 1 and config.parallel.kind != "ddp":
            fix = "Set parallel=ddp, or translate afterwards: ngpt-train evaluate evaluate.beams=5"
            yield "eval.beams parallel.kind", "the search needs whole weights on each rank", fix


def check_contexts(config: Config) -> None:
    """Raises ConfigError unless config.model, which may be a checkpoint's, can be validated at eval.contexts."""
    for conflict in config.eval.context_conflicts(config):
        raise report_together(config, conflict, {})


@dataclass
class CheckpointConfig:
    """Checkpoints: when they are written, and how long they are kept. The last step is always saved."""

    may_change: ClassVar = True

    every: int = key(1000, "Steps between checkpoints; 0 saves at the end only.", **COUNT_OR_0)
    keep_last: int = key(2, "Newest checkpoints that are kept.", **COUNT)
    keep_every: Union[int, None] = key(None, "Checkpoints at multiples of this step are kept for good.", **COUNT)
    keep_best: int = key(0, "Checkpoints of the lowest validation loss that are kept; RUN/best is one.", **COUNT_OR_0)
    asynchronous: BoolOrAuto = key(
        AUTO,
        "Copy the state in memory and write the checkpoint beside training. auto: where half of the host's free memory "
        "holds the copies of its ranks.",
        named="async",
    )
    checksum: str = key(
        "xxh3",
        "By which damaged files are noticed: xxh3 sums as fast as memory is read, sha256 at 1 to 2 GB/s.",
        choices=("xxh3", "sha256"),
    )

    def conflicts(self, validation: EvalConfig) -> Iterator[Conflict]:
        """Keys that exclude each other."""
        if self.keep_best and self.every and (not validation.every or self.every % validation.every):
            fix = f"Set eval.every to {self.every}, or to a divisor of it"
            yield "checkpoint.keep_best checkpoint.every eval.every", "not every checkpoint is validated", fix
        if self.keep_every is not None and (self.every == 0 or self.keep_every % self.every):
            fix = f"Set checkpoint.keep_every to a multiple of {self.every}" if self.every else "Set checkpoint.every"
            yield "checkpoint.keep_every checkpoint.every", "no checkpoint is written at these steps", fix


@dataclass
class GuardsConfig:
    """Guards against losses and gradients that go wrong."""

    rollback: bool = key(
        False,
        "Where the loss spikes, or ten gradients in a row are not finite, go back to the last good checkpoint and "
        "leave out the rows since then. It changes the data, so run.json, metrics.jsonl and wandb say it.",
    )
    spike_height: float = key(
        10.0,
        "A loss spikes that exceeds the median of the recent ones by so many of their deviations (at least 1 % each).",
        above=0,
        maximum=1e6,
    )
    spike_window: int = key(64, "Steps whose losses are recent; a quarter must be known.", minimum=4, maximum=10_000)
    most_rollbacks: int = key(3, "Rollbacks to one checkpoint; a further one ends the run with code 4.", **COUNT)


@dataclass
class WandbConfig:
    """Weights & Biases. A failure here never stops a run."""

    mode: str = key(
        AUTO,
        "auto: as WANDB_MODE in the environment says; else online where a project or entity is named, and off where "
        "none is. Online without a key is offline.",
        choices=(AUTO, "online", "offline", "disabled"),
    )
    project: Union[str, None] = key(None, "wandb project; null is ngpt-train.")
    entity: Union[str, None] = key(None, "wandb team or user; null is the account's default.")
    name: Union[str, None] = key(None, "Name of the run in wandb; null is run.name.")
    group: Union[str, None] = key(None, "Runs that wandb shows together; null is the experiment, or else the scale.")
    tags: Union[list[str], None] = key(
        None, "Words to find the run by; null is architecture, scale and, of an experiment, its name or table."
    )
    notes: Union[str, None] = key(None, "A text about the run, for wandb's page of it.")
    timeout: float = key(
        20.0, "Seconds for wandb to start, else it goes offline, and to finish; the run trains meanwhile.", **SECONDS
    )

    @property
    def used_mode(self) -> str:
        """online, offline or disabled. What leaves the machine does so because somebody asked: `auto` is online only
        where WANDB_MODE is set, or a project or team is named; a key alone asks for nothing."""
        if self.mode != AUTO:
            return self.mode
        if asked := os.environ.get("WANDB_MODE"):
            return {"disabled": "disabled", "offline": "offline", "dryrun": "offline"}.get(asked, "online")
        return "online" if self.project or self.entity else "disabled"

    def resolve(self, config: Config, experiment: str | None) -> None:
        """Fills in the name, group and tags that are null. The table of an experiment's row is a tag."""
        model, scale = config.model.name, config.scale.name
        self.name = config.run.name if self.name is None else self.name
        self.group = (experiment or scale) if self.group is None else self.group
        if self.tags is None:
            table = [experiment.rpartition("/")[0] or experiment] if experiment else []
            self.tags = [model, scale, *table]


@dataclass
class LoggingConfig:
    """Records that are written while training."""

    may_change: ClassVar = True

    every: int = key(10, "Steps between lines of metrics.jsonl and of the console.", **COUNT)
    telemetry: int = key(
        0,
        "Steps between telemetry records (docs/telemetry.md): norms, updates, scales and attention of each layer; 0: "
        "none. 100 costs less than 1 % of the time.",
        **COUNT_OR_0,
    )
    sample_prompt: Union[str, None] = key(
        None,
        "A prompt that the model continues at each validation, by generate.max_new_tokens, temperature and their like; "
        "the text goes into the log and metrics.jsonl. null: none.",
    )
    tensorboard: bool = key(False, "Write TensorBoard event files into the run directory as well.")
    wandb: WandbConfig = field(default_factory=WandbConfig)

    def conflicts(self) -> Iterator[Conflict]:
        """A package that is missing."""
        if self.tensorboard and find_spec("tensorboard") is None:
            fix = "pip install 'ngpt-train[tensorboard]', or set logging.tensorboard=false"
            yield "logging.tensorboard", "the package tensorboard is not installed", fix
