"""`analyze`: the papers' measurements and figures, from checkpoints and from the telemetry of runs."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ngpt_train.analysis.analysis_files import as_json, html, write_parquet, write_pictures
from ngpt_train.analysis.measures.of_run import OfRun
from ngpt_train.analysis.paper_figures import FIGURES, Measured, chosen, measure
from ngpt_train.analysis.run_contents import gathered, live_run, names_of
from ngpt_train.config.places import make_directory
from ngpt_train.config.schema import Config
from ngpt_train.core.errors import DataError
from ngpt_train.core.files import write_atomically, write_json
from ngpt_train.core.secrets import command_of, redacted
from ngpt_train.data import open_dataset
from ngpt_train.distributed.world import World, join_world
from ngpt_train.evaluation.restore import Trained, check_overrides, named, restore
from ngpt_train.evaluation.validation import Evaluations
from ngpt_train.training.checkpoint.catalogue import step_of
from ngpt_train.verbs.evaluate import combine

logger = logging.getLogger(__name__)

Said = dict[str, Any]  # what analysis.json says of a run


def main(config: Config, overrides: Sequence[str]) -> int:
    """Prints a summary and writes numbers, figures and a page into analyze.out; returns 0.

    Raises ConfigError for an override that contradicts a checkpoint, DataError where a checkpoint cannot be read, or
    where none of the figures has a meaning for one of the runs.
    """
    names = chosen(config.analyze.figures)
    needs = {FIGURES[name].needs for name in names}
    said: list[Said] = []
    runs = _live(config, said) if needs == {"telemetry"} else _restored(config, overrides, needs, said)
    measured = measure(runs, names)
    content = redacted(as_json(measured, said, command_of("analyze", overrides)))
    print(summary(measured))
    if not measured.curves:
        raise DataError("analyze: none of the figures can be shown, for the reasons above")
    if config.analyze.out is not None:
        out = Path(config.analyze.out).expanduser()
        make_directory(f"analyze.out={out}", out)
        write_json(out / "analysis.json", content, indent=None)
        write_parquet(measured, out / "analysis.parquet")
        write_pictures(measured, [str(run["name"]) for run in content["runs"]], out / "figures")
        write_atomically(out / "page.html", html(measured, content).encode())
        print(f"written to {out}: page.html, analysis.json, analysis.parquet, figures/")
    return 0


def _live(config: Config, said: list[Said]) -> Iterator[OfRun]:
    """Runs whose records alone are needed. What is said of each is added to `said`."""
    found = [live_run("analyze.checkpoints", value) for value in config.analyze.checkpoints or []]
    names = names_of([path for path, _ in found], [None] * len(found))
    for name, (path, run) in zip(names, found, strict=True):
        said.append({"name": name, "run": str(path), "architecture": run.model.name})
        yield replace(run, name=name)


def _restored(config: Config, overrides: Sequence[str], needs: set[str], said: list[Said]) -> Iterator[OfRun]:
    """One run after the other, so that one model at a time is in memory; all are found before the first is loaded."""
    own = config.analyze
    trained = [named("analyze", "checkpoints", value, own) for value in own.checkpoints or []]
    check_overrides("analyze", trained, config, overrides, also_used=("data",))
    names = names_of([each.path for each in trained], [step_of(each.path) for each in trained])
    world = join_world(config)
    for name, each in zip(names, trained, strict=True):
        logger.info("%s: %s", name, each.path)
        run, entry = _one(name, each, config, overrides, needs, world)
        said.append(entry)
        yield run


def _one(
    name: str, trained: Trained, config: Config, overrides: Sequence[str], needs: set[str], world: World
) -> tuple[OfRun, Said]:
    restored = restore(trained, config, world)
    rows_hash = None

    def rows() -> list[Tensor]:
        """The first analyze.rows validation rows of the run's own data, as `evaluate eval.rows=N` takes them."""
        nonlocal rows_hash
        combined = combine(config, restored.config, overrides)
        rows_alone = replace(combined.eval, rows=config.analyze.rows, tokens=None, contexts=None, budget=None)
        combined = replace(combined, eval=rows_alone)
        dataset = open_dataset(combined, restored.tokenizer)
        validation = Evaluations(dataset.validation, dataset.tokenizer, combined).at_training_context
        rows_hash = validation.rows_hash
        return validation.batch

    run = gathered(name, restored, needs, rows, config.analyze.batch_rows)
    entry: Said = {
        "name": name,
        "checkpoint": str(restored.path),
        "step": restored.step,
        "architecture": restored.config.model.name,
        "parameters": restored.model.n_params(),
        "layers": restored.config.model.n_layers,
        "d_model": restored.config.model.d_model,
        "weights": restored.of_what or "trained",
    }
    if run.loss is not None:
        entry |= {"rows": config.analyze.rows, "rows_hash": rows_hash, "loss": run.loss}
    return run, entry


def summary(measured: Measured) -> str:
    """The measures that are shown, and why others are not."""
    lines = [f"{name}: {', '.join(curves)}" for name, curves in measured.curves.items()]
    by_reason: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for each in measured.skipped:
        runs, figures = by_reason.setdefault(each.why, ({}, {}))
        runs[each.run] = figures[each.figure] = None
    for why, (runs, figures) in by_reason.items():
        each_of = "each of " if len(runs) > 1 else ""
        lines.append(f"not {', '.join(figures)}: {each_of}{', '.join(runs)} {why}")
    return "\n".join(lines)
