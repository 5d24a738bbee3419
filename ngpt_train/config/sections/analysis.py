"""The keys of `analyze` and `probe`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Union

from ngpt_train.config.keys import COUNT, ROWS, key
from ngpt_train.config.sections.verbs import AVERAGE, WEIGHTS

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


@dataclass
class AnalyzeConfig:
    """The papers' measurements and figures, from checkpoints and telemetry (`analyze`)."""

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
class ProbeConfig:
    """Where the validation loss of one or two checkpoints is (`probe`), on data.* and eval.rows."""

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
