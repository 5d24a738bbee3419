"""The keys study.*, compare.*, audit.* and transfer.*: the verbs around a study."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Union

from ngpt_train.config.keys import AUTO, COUNT, SEED, Conflict, IntOrAuto, Table, VerbKeys, key
from ngpt_train.core.constants import METRICS

if TYPE_CHECKING:
    from ngpt_train.config.schema import Config

# As part of a run's name.
_ARM = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,59}")


def _problem_of_arms(arms: Mapping[Any, Any]) -> str | None:
    for name, row in arms.items():
        if not isinstance(name, str) or not _ARM.fullmatch(name):
            rule = "letters, digits, '.', '_' and '-', at most 60, not beginning with '.' or '-'; a number in quotes"
            return f"{name!r} is no name for an arm: {rule}"
        if not isinstance(row, Mapping):
            return f"{name}: {row!r} is not what an arm says, such as {{model: gpt, model.qk_norm: true}}"
    return None


def _problem_of_tuned(tuned: Mapping[Any, Any], arm: str = "") -> str | None:
    for name, grid in tuned.items():
        place = f"{arm}: {name}" if arm else name
        if arm and name == "optim.lr":
            return f"{place}: the factor of optim.lr is the same for all arms"
        if isinstance(grid, Mapping) and not arm:
            if problem := _problem_of_tuned(grid, name):
                return problem
            continue
        factor = "a factor from 1.05 to 100 between neighbours of its grid, such as 2"
        is_factor = type(grid) in (int, float)
        if (is_factor and not 1.05 <= grid <= 100) or (name == "optim.lr" and not is_factor):
            return f"{place}: {grid!r} is not {factor}"
        if not is_factor and not (isinstance(grid, list) and len(grid) > 1):
            return f"{place}: {grid!r} is not {factor}, nor a list of two values or more to try, such as [0.03, 0.1]"
    return None


def _problem_of_interactions(asked: Mapping[Any, Any]) -> str | None:
    for name, four in asked.items():
        is_list = isinstance(four, list) and all(isinstance(arm, str) for arm in four)
        if not is_list or len({*four}) != 4 or len(four) != 4:
            return f"{name}: {four!r} is not a list of four arms [a, b, c, d], for (a less b) less (c less d)"
    return None


_IN_YAML = "Write a study in YAML, DIR/study/my.yaml, and choose it with --config-dir DIR study=my"


@dataclass
class SlurmConfig:
    """The jobs of a study on a Slurm cluster (study.engine=slurm): one for each run, on one node."""

    partition: Union[str, None] = key(None, "Partition of the jobs; null is the cluster's own choice.")
    account: Union[str, None] = key(None, "Account that pays; null is the user's own.")
    time: int = key(
        240, "Minutes of a job. A run that needs more saves, and its job is queued again.", minimum=15, maximum=100_000
    )
    gpus: int = key(1, "GPUs of a run; 0 trains on CPUs.", minimum=0, maximum=64)
    cpus: int = key(8, "CPU cores of a run.", minimum=1, maximum=10_000)
    memory: Union[int, None] = key(None, "GiB of memory; null: the cluster's own choice.", minimum=1, maximum=100_000)
    arguments: list[str] = key(
        [], "Further options of sbatch without the dashes, such as [qos=high,constraint=a100,exclusive]."
    )


@dataclass
class StudyConfig(VerbKeys):
    """A comparison of arms at several budgets (`study`), chosen with study=NAME."""

    name: Union[str, None] = key(None, "Directory below study.root; null is the option that study=NAME chose.")
    root: str = key("studies", "Directory that holds all studies. Those in it share the runs that they have in common.")
    arms: dict[str, Any] = key(
        {},
        "What is compared: by the name of each arm the groups and keys in which it differs.",
        table=Table(_problem_of_arms, "{gpt: {model: gpt}, ngpt: {model: ngpt}}", _IN_YAML),
    )
    baseline: Union[str, None] = key(None, "The arm that the others are compared with; null is the first.")
    shared: dict[str, Any] = key(
        {},
        "Groups and keys of all arms. Arguments of the command line that are not study.* count as more of them.",
        # What it says is checked as a row of an experiment's table is, with every option known.
        table=Table(lambda row: None, "{scale: tiny, data: embedded}", _IN_YAML),
    )
    budgets: list[int] = key(
        [],
        "Tokens of a run, such as [409600,819200]. Each budget has runs of its own, whose schedules end with it.",
        minimum=1,
        maximum=10**16,
    )
    tune: dict[str, Any] = key(
        {"optim.lr": 2},
        "What is tuned for each arm. optim.lr, always and at each budget: the factor between neighbours of its grid, "
        "which has the recipe's value in it. Further keys, one after the other: such a factor around the arm's own "
        "number, or the values to try. By the name of an arm: keys that it alone is tuned for.",
        table=Table(_problem_of_tuned, "{optim.lr: 2, optim.betas: [[0.9, 0.95], [0.9, 0.99]]}", _IN_YAML),
    )
    descent_budget: Union[int, None] = key(
        None,
        "The budget at which the further keys are tuned; the others take their values over. null: each budget, from "
        "the best values of the smaller ones on.",
        **COUNT,
    )
    descent_runs: Union[int, None] = key(
        None,
        "Runs of an arm at a budget after which no further key is tried; the learning rate is tuned to its end all the "
        "same. null: until no key gains more than the noise between seeds.",
        **COUNT,
    )
    interactions: dict[str, Any] = key(
        {},
        "By name four arms [a, b, c, d]: the comparison has (a less b) less (c less d) with its interval, such as what "
        "nGPT gains with Muon less what it gains with AdamW.",
        table=Table(_problem_of_interactions, "{muon: [ngpt_muon, gpt_muon, ngpt_adam, gpt_adamw]}", _IN_YAML),
    )
    max_points: int = key(9, "Most values of a key an arm tries at a budget. 1: no tuning.", minimum=1, maximum=1000)
    refine: Union[bool, None] = key(
        None,
        "Also try the rates of the factor's root around the best one: where the parabola through the losses has its "
        "vertex, else on both sides. null: as the study began; true for a new one.",
    )
    seeds: list[int] = key([0, 1, 2], "run.seed of the runs, the same for all arms.", **SEED)
    metric: str = key(
        "loss",
        "What is compared: the validation loss at a run's end; bits per byte, which other tokenizers may share; of "
        "labels also the share of wrong answers, or 1 less another metric; of translations 100 less a score, with "
        "eval.beams.",
        choices=tuple(METRICS),
    )
    confidence: float = key(0.95, "Confidence of the intervals; 0.99 asks for p < 0.01.", minimum=0.5, maximum=0.9999)
    engine: str = key(
        "local",
        "Where the runs go: local is this machine; slurm gives each to a Slurm cluster as a job (study.slurm.*).",
        choices=("local", "slurm"),
    )
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    jobs: IntOrAuto = key(
        AUTO,
        "Runs side by side; auto: one a GPU, or without GPUs one a core, at most 8. On a cluster jobs in the queue; "
        "auto: 100.",
        minimum=1,
        maximum=10_000,
    )
    threads: IntOrAuto = key(
        AUTO,
        "Threads of each run (OMP_NUM_THREADS); auto: as the study's runs so far, at first cores over jobs.",
        minimum=1,
        maximum=10_000,
    )
    retries: int = key(
        2,
        "So often a run is started again that was killed or crashed, at each start of the study. A run that diverges, "
        "or that needs more memory than the GPU has, is not.",
        minimum=0,
        maximum=1000,
    )
    prompt: Union[str, None] = key(None, "Text that each arm's best run continues at the study's end; null: none.")
    dry_run: bool = key(False, "Only print the table of runs, tokens, FLOPs and hours.")


@dataclass
class CompareConfig(VerbKeys):
    """Which of several arms is better, by how much and how sure (`compare RUN...`)."""

    runs: Union[list[str], None] = key(
        None, "Directories of runs, of studies, or that hold runs: `compare runs/a runs/b` sets them."
    )
    out: Union[str, None] = key(None, "Directory for the report; null prints only.")
    arms: Union[list[str], None] = key(
        None,
        "What belongs together, each as NAME:PATTERN of the runs' names, such as [gpt:gpt-*,ngpt:ngpt-*]. null: runs "
        "whose configs differ in nothing but seed, budget and tuned keys.",
    )
    baseline: Union[str, None] = key(
        None, "The arm, or a run of it, that the others are compared with; null: gpt, else the first run's arm."
    )
    tuned: Union[list[str], None] = key(
        None,
        "Keys whose best value is taken for each arm and budget. null: the study's, else optim.lr unless "
        "nothing else differs; []: none.",
    )
    under_test: Union[list[str], None] = key(
        None,
        "Keys or groups, such as [model], whose difference is the question; all others that differ are confounds, but "
        "for what follows from these. null: the study's, else the architecture.",
    )
    metric: Union[str, None] = key(
        None,
        "The metric compared. null: the study's, else the loss, or bits per byte where tokenizers differ.",
        choices=tuple(METRICS),
    )
    confidence: Union[float, None] = key(
        None, "Confidence of the intervals; null: the study's, else 0.95.", minimum=0.5, maximum=0.9999
    )
    step_times: bool = key(
        False,
        "Measure optimizer steps of all arms here, in turn in one process, and take seconds from them instead of the "
        "runs' own clocks. A report keeps what was measured.",
    )


@dataclass
class AuditConfig(VerbKeys):
    """Whether a run's records are what its config, code and data give (`audit RUN`)."""

    run: Union[str, None] = key(None, "The run directory; `audit RUN` sets it. null: none.")
    windows: int = key(3, "Most parts of the run that are trained again, drawn at random.", minimum=1, maximum=10_000)
    steps: int = key(100, "Steps of each part at most; it begins at step 0 or at a kept checkpoint.", **COUNT)
    seed: Union[int, None] = key(
        None, "Which parts are drawn. null: nobody knows before; the certificate has the number.", **SEED
    )
    tolerance: float = key(
        0.01,
        "On another kind of machine or another torch, losses and norms may differ by this share; else not by a bit.",
        above=0,
        maximum=1,
    )
    out: Union[str, None] = key(None, "JSON file for the certificate; null is audit.json in the run directory.")

    def refused(self, config: Config) -> Iterator[Conflict]:
        if self.run is None:
            yield "audit.run", "no run is named", f"For example: ngpt-train audit {config.run.example()}"


@dataclass
class TransferConfig(VerbKeys):
    """How the best learning rate changes with width, depth and the length of a run (`transfer`)."""

    studies: Union[list[str], None] = key(None, "Directories to look at instead of a study: `transfer studies/a`.")
    widths: list[int] = key([], "d_model of the arms, such as [64,128]; heads keep their width.", **COUNT)
    depths: list[int] = key([], "n_layers of the arms, such as [2,4,8].", **COUNT)
    within: float = key(0.5, "Octaves of drift, +-, within which a rate transfers.", above=0, maximum=10)
    out: Union[str, None] = key(None, "Directory for transfer.json and figure; null: the study's transfer/.")
