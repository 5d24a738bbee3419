"""The keys eval.* and evaluate.*: validation and tasks, in training and of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Union

from ngpt_train.config.keys import COUNT, COUNT_OR_0, ROWS, CheckpointKeys, Conflict, key
from ngpt_train.config.validate import Origin, keep_later, report_together

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ngpt_train.config.schema import Config

OLDEST_HARNESS = (0, 4, 12)  # version of lm-evaluation-harness


@dataclass
class EvalConfig:
    """Validation during training."""

    every: int = key(500, "Steps between validations; 0 validates at the start and at the end only.", **COUNT_OR_0)
    rows: Union[int, None] = key(
        64, "Rows of the fixed validation set (fewer where the data has fewer); set this or tokens.", **ROWS
    )
    tokens: Union[int, None] = key(
        None,
        "Targets of the fixed validation set, at least (fewer where the data has fewer, which the log says); replaces "
        "rows.",
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
        """eval.rows and eval.tokens both set the size of a validation: keeps the key that was set last. Raises
        ConfigError."""
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


@dataclass
class LengthConfig:
    """The loss by context and by position on whole documents of data.* (`evaluate`, in place of the validation)."""

    contexts: Union[list[int], None] = key(
        None,
        "Tokens that the model reads at most, such as [1024,2048,4096,8192,16384,32768]; null: no such evaluation.",
        **COUNT,
    )
    stride: Union[int, None] = key(
        None,
        "Tokens by which the window moves along a document: the targets that it adds to the loss; null: half of "
        "the context.",
        **COUNT,
    )
    documents: Union[int, None] = key(None, "Documents of the text, the first ones; null: all.", **COUNT)
    rope: list[str] = key(
        ["none"],
        "Angles of RoPE beyond model.context, each of which is evaluated: none (as trained), linear (positions divided "
        "by context / model.context), ntk (a larger base).",
    )

    def conflicts(self, validation: EvalConfig) -> Iterator[Conflict]:
        """Keys that exclude each other."""
        if self.contexts == []:
            yield "evaluate.length.contexts", "no context", "Name one, as in [1024], or leave it out"
        if self.contexts is not None and validation.tasks is not None:
            yield "evaluate.length.contexts eval.tasks", "two evaluations", "Start one after the other"
        if not self.rope or not set(self.rope) <= {"none", "linear", "ntk"}:
            yield "evaluate.length.rope", "not a list of none, linear and ntk", "For example [none,ntk]"
        if self.contexts is not None and self.stride is not None and self.stride > min(self.contexts):
            problem = "the window would leave tokens out"
            yield "evaluate.length.stride evaluate.length.contexts", problem, f"At most {min(self.contexts)}"


@dataclass
class EvaluateConfig(CheckpointKeys):
    """Validation loss of a checkpoint (`evaluate`) on data.*, eval.rows rows or eval.tokens targets."""

    verb = "evaluate"

    out: Union[str, None] = key(
        None, "JSON file for the result; the loss of each row goes beside it as .npz. null prints only."
    )
    length: LengthConfig = field(default_factory=LengthConfig)

    def refused(self, config: Config) -> Iterator[Conflict]:
        yield from super().refused(config)
        if self.out is not None and self.out.endswith(".npz"):
            fix = f"For example evaluate.out={self.out.removesuffix('.npz')}.json"
            yield "evaluate.out", "the losses of rows take this name, the result is JSON", fix


def check_contexts(config: Config) -> None:
    """Raises ConfigError unless config.model, which may be a checkpoint's, can be validated at eval.contexts."""
    for conflict in config.eval.context_conflicts(config):
        raise report_together(config, conflict, {})
