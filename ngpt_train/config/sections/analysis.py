"""The keys analyze.* and probe.*: verbs that look into checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Union

from ngpt_train.config.keys import AVERAGE, COUNT, ROWS, WEIGHTS, Conflict, VerbKeys, average_of_averages, key

if TYPE_CHECKING:
    from ngpt_train.config.schema import Config

# The names of analysis/paper_figures.py, which cannot be imported before torch; a test compares them.
FIGURES = (
    "ngpt_4",
    "ngpt_5",
    "ngpt_6",
    "ngpt_10",
    "ngpt_11",
    "ngpt_12",
    "ngpt_14",
    "normformer_3",
    "normformer_4",
    "normformer_6",
    "normformer_7",
    "powernorm_2",
    "powernorm_3",
    "powernorm_4",
    "powernorm_6",
    "tnt_3",
    "tnt_4",
)
LIVE_FIGURES = (
    "ngpt_6_live",
    "normformer_3_live",
    "normformer_4_live",
    "normformer_6_live",
    "normformer_7_live",
    "powernorm_2_live",
    "powernorm_4_live",
    "tnt_3_live",
    "tnt_4_live",
)


class _Checkpoints(VerbKeys):
    """The checks that `analyze` and `probe` share."""

    numbers: ClassVar[str]  # the file beside page.html
    most: ClassVar[float] = float("inf")  # checkpoints
    checkpoints: Union[list[str], None]
    average: int
    weights: str
    out: Union[str, None]

    def refused(self, config: Config) -> Iterator[Conflict]:
        key, checkpoints = f"{self.verb}.checkpoints", self.checkpoints or []
        if not checkpoints:
            yield key, "no checkpoint is named", f"For example {key}=[runs/gpt,runs/ngpt]"
        if len(set(checkpoints)) < len(checkpoints):
            yield key, "one is named twice", "Leave it out"
        if len(checkpoints) > self.most:
            yield key, f"{len(checkpoints)} models, and two can be beside each other", "Name one or two"
        yield from average_of_averages(self.verb, self.average, self.weights)
        out = None if self.out is None else Path(self.out).expanduser()
        if out is not None and (out / "page.html").exists() and not (out / self.numbers).exists():
            problem = f"{out / 'page.html'} is not of an earlier {self.verb}"
            yield f"{self.verb}.out", problem, "Name another directory, or remove it"


@dataclass
class AnalyzeConfig(_Checkpoints):
    """The papers' measurements and figures, from checkpoints and telemetry (`analyze`)."""

    verb, numbers = "analyze", "analysis.json"

    checkpoints: Union[list[str], None] = key(
        None,
        "Run directories (their newest checkpoints), checkpoint directories or RUN/best, such as [runs/gpt,runs/ngpt]. "
        "Ratios are to the first. null: none.",
    )
    figures: list[str] = key(
        ["all"],
        "The figures, by paper and number. all: every one; live: those over steps, which need telemetry records "
        "(logging.telemetry) and no checkpoint.",
        choices=("all", "live", *FIGURES, *LIVE_FIGURES),
    )
    out: Union[str, None] = key(
        None, "Directory for analysis.json, analysis.parquet, figures and page.html; null prints a summary only."
    )
    average: int = key(1, AVERAGE, minimum=1, maximum=1000)
    weights: str = key("trained", WEIGHTS, choices=("trained", "ema"))
    rows: int = key(
        64, "Validation rows of a run's own data that gradients and statistics of batches are measured on.", **ROWS
    )
    batch_rows: int = key(8, "Rows of each batch whose statistics are compared with the running ones.", **ROWS)


@dataclass
class ProbeConfig(_Checkpoints):
    """Where the validation loss of one or two checkpoints is (`probe`), on data.* and eval.rows."""

    verb, numbers, most = "probe", "probe.json", 2

    checkpoints: Union[list[str], None] = key(
        None,
        "One or two run directories, checkpoint directories or RUN/best, such as [runs/gpt,runs/ngpt]. null: none.",
    )
    out: Union[str, None] = key(None, "Directory for probe.json and page.html; null prints a summary only.")
    average: int = key(1, AVERAGE, minimum=1, maximum=1000)
    weights: str = key("trained", WEIGHTS, choices=("trained", "ema"))
    show: int = key(
        10, "Rows to show: those where two models differ most, or with one model those it finds hardest.", **COUNT
    )
