"""The whole configuration: its sections, each of which declares and checks its keys in its own file.

The YAML files in `configs/` choose values; `--help` prints the sentences of the keys. Nothing heavy is imported here,
so that a mistake is reported before torch is loaded.
"""

import dataclasses
import operator
import os
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ngpt_train.config.keys import AUTO, Conflict, name_of
from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.config.sections import verbs
from ngpt_train.config.sections.data import DataConfig
from ngpt_train.config.sections.optim import OptimConfig, ScheduleConfig
from ngpt_train.config.sections.records import CheckpointConfig, EvalConfig, GuardsConfig, LoggingConfig
from ngpt_train.config.sections.studies import AuditConfig, CompareConfig, StudyConfig, TransferConfig
from ngpt_train.config.sections.text_to_ids import TokenizerConfig
from ngpt_train.config.sections.training import KernelsConfig, ParallelConfig, RunConfig, ScaleConfig, TrainConfig
from ngpt_train.config.validate import Key, Origin, report_together

_KEYS: dict[type[ModelConfig], dict[str, Key]] = {}  # of schema_keys


@dataclass
class Config:
    """The whole configuration of a run."""

    run: RunConfig = field(default_factory=RunConfig)
    scale: ScaleConfig = field(default_factory=ScaleConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    guards: GuardsConfig = field(default_factory=GuardsConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    generate: verbs.GenerateConfig = field(default_factory=verbs.GenerateConfig)
    evaluate: verbs.EvaluateConfig = field(default_factory=verbs.EvaluateConfig)
    plan: verbs.PlanConfig = field(default_factory=verbs.PlanConfig)
    doctor: verbs.DoctorConfig = field(default_factory=verbs.DoctorConfig)
    study: StudyConfig = field(default_factory=StudyConfig)
    compare: CompareConfig = field(default_factory=CompareConfig)
    audit: AuditConfig = field(default_factory=AuditConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    analyze: verbs.AnalyzeConfig = field(default_factory=verbs.AnalyzeConfig)
    probe: verbs.ProbeConfig = field(default_factory=verbs.ProbeConfig)
    export: verbs.ExportConfig = field(default_factory=verbs.ExportConfig)
    import_: verbs.ImportConfig = field(default_factory=verbs.ImportConfig, metadata={"named": "import"})

    if not TYPE_CHECKING:  # so that a word of Python's, which no field can have, is found by the name of its section

        def __getattr__(self, name: str) -> verbs.ImportConfig:
            if name == "import":
                return self.import_
            raise AttributeError(f"{type(self).__name__} has no section {name}")

    def resolve(self, origins: Mapping[str, Origin], experiment: str | None = None) -> None:
        """Replaces what `auto` and null stand for, in place, where the configuration alone decides it. Raises
        ConfigError where there is nothing to stand for.

        origins: of two keys they say which was set later. experiment: the one that was chosen.
        """
        model, run = self.model, self.run
        model.settle_sizes()
        self.train.resolve(self, origins)
        self.eval.resolve(self, origins)
        self.optim.resolve(self)
        self.schedule.resolve(self, origins)
        if self.data.label_field is not None and model.n_classes is None:
            model.n_classes = len(self.data.labels or [""])
        if self.data.translation_field is not None and hasattr(model, "translates"):
            model.translates = True
        if self.data.objective == AUTO:
            self.data.objective = model.objective
        model.settle_starts(model.measured_starts(self.scale.name))
        model.resolve(self)
        if run.name == AUTO:
            of_what = self.scale.name if self.data.label_field is None else self.data.task or "labels"
            run.name = f"{model.name}-{of_what}-seed{run.seed}"
        self.logging.wandb.resolve(self, experiment)

    def conflicts(self, world_size: int) -> Iterator[Conflict]:
        """Keys whose values exclude each other. The configuration is resolved."""
        yield from self.run.conflicts()
        yield from self.logging.conflicts()
        for name in ("logging.sample_prompt", "eval.tasks"):
            if operator.attrgetter(name)(self) is not None and (problem := self.model.refuses_text()):
                yield f"{name} data.objective", problem, f"Leave {name} out"
        yield from self.model.shape_conflicts()
        yield from self.model.dropout_conflicts(self.kernels.attention)
        yield from self.parallel.conflicts(world_size)
        yield from self.train.conflicts(self, world_size)
        yield from self.schedule.conflicts(self)
        yield from self.model.conflicts(self)
        yield from self.optim.conflicts(self.model)
        yield from self.data.conflicts(self.model, self.tokenizer)
        yield from self.tokenizer.conflicts()
        yield from self.checkpoint.conflicts(self.eval)
        yield from self.eval.context_conflicts(self)
        yield from self.eval.conflicts()
        yield from self.eval.translation_conflicts(self, world_size)
        yield from self.evaluate.length.conflicts(self.eval)


def check(config: Config, world_size: int | None = None, origins: Mapping[str, Origin] | None = None) -> None:
    """Raises ConfigError for values that exclude each other. `config` is resolved; None: torchrun's world_size."""
    for conflict in config.conflicts(world_size or int(os.environ.get("WORLD_SIZE", "1"))):
        raise report_together(config, conflict, origins or {})


def schema_keys(model: type[ModelConfig]) -> dict[str, Key]:
    """All keys of the schema by dotted name, with `model` as the schema of model.*."""
    if model not in _KEYS:
        _KEYS[model] = {key.name: key for key in _walk(Config(model=model()), "")}
    return _KEYS[model]


def _walk(section: Any, prefix: str, may_change: Any = ()) -> Iterator[Key]:
    """section: with the defaults, which differ between architectures for keys of one section, as model.init.
    may_change: what holds for the sections in it."""
    may_change = getattr(section, "may_change", may_change)
    types = typing.get_type_hints(type(section))
    for part in dataclasses.fields(section):
        name, kind, default = prefix + name_of(part), types[part.name], getattr(section, part.name)
        if dataclasses.is_dataclass(default):
            yield from _walk(default, name + ".", may_change)
            continue
        union = typing.get_args(kind) if typing.get_origin(kind) is typing.Union else (kind,)
        items = [item for member in union if typing.get_origin(member) is list for item in typing.get_args(member)]
        members = tuple(typing.get_origin(member) or member for member in union)
        if float in members:
            members = tuple(member for member in members if member is not int)
        or_auto = str in members and not {int, float, bool}.isdisjoint(members)
        limits = {"choices": (AUTO,) if or_auto else None, "items": items[0] if items else float, **part.metadata}
        limits.pop("named", None)
        free = may_change is True or part.name in may_change
        yield Key(name=name, types=members, default=default, field=part.name, may_change=free, **limits)


def build(values: Mapping[str, Any], model: type[ModelConfig]) -> Config:
    """The configuration with these checked values, by dotted names; all other keys have their defaults."""
    config, keys = Config(model=model()), schema_keys(model)
    for name, value in values.items():
        section = operator.attrgetter(name.rpartition(".")[0])(config)
        setattr(section, keys[name].field, keys[name].held(value))
    return config
