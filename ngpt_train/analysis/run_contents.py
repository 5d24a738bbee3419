"""The data of each run: its weights, the gradients and statistics of its own rows, its records."""

import copy
import logging
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ngpt_train.analysis.measures.batch_statistics import batch_gaps
from ngpt_train.analysis.measures.gradient_norms import gradient_l1, on_device
from ngpt_train.analysis.measures.matrices import renormalized
from ngpt_train.analysis.measures.of_run import OfRun
from ngpt_train.config.stored import read_yaml
from ngpt_train.core.errors import DataError
from ngpt_train.core.recorded import Record, read_records
from ngpt_train.evaluation.restore import Restored
from ngpt_train.models.decoder import Decoder
from ngpt_train.models.weights import canonical, export_weights
from ngpt_train.observe.telemetry.weight_numbers import vectors_in_use

logger = logging.getLogger(__name__)

TOKENS_AT_ONCE = 8_192  # in a pass for gradients


def names_of(paths: Sequence[Path], steps: Sequence[int | None]) -> list[str]:
    """A name for each of several checkpoints: its run's directory. Equal names get the step, and if they are still
    equal all names are paths."""
    runs = [run_directory(path).absolute() for path in paths]
    found = [run.name for run in runs]
    if len(set(found)) < len(found):
        twice = {name for name in found if found.count(name) > 1}
        found = [f"{name} step {step}" if name in twice else name for name, step in zip(found, steps, strict=True)]
    if len(set(found)) < len(found):
        found = [str(path) for path in paths]
    return found


def run_directory(path: Path) -> Path:
    """The directory of a run, or of the run of a checkpoint in `RUN/checkpoints/step_*`; another path itself."""
    path = path.absolute()
    return path.parent.parent if path.parent.name == "checkpoints" else path


def records(path: Path) -> dict[str, list[Record]]:
    """The train and telemetry records of a run; none without metrics.jsonl. path: the run or one of its checkpoints.
    Raises DataError where a field is not of its kind."""
    kinds, metrics = ("train", "telemetry"), run_directory(path) / "metrics.jsonl"
    return read_records(metrics, kinds)[0] if metrics.is_file() else {kind: [] for kind in kinds}


def live_run(key: str, value: str) -> tuple[Path, OfRun]:
    """The records of a run without its weights; it may have no checkpoint yet. key, value: the user's argument. Raises
    DataError if `value` is no run, or has no records."""
    path = Path(value).expanduser()
    run = run_directory(path)
    if not (run / "metrics.jsonl").is_file() or not (run / "config.yaml").is_file():
        raise DataError(f"{key}={value}: {run} is no run directory with config.yaml and metrics.jsonl. Name one.")
    model, of_run = read_yaml(run / "config.yaml").model, records(path)
    return path, OfRun(run.name, model, telemetry=of_run["telemetry"], train=of_run["train"])


def gathered(
    name: str, restored: Restored, needs: Collection[str], rows: Callable[[], Sequence[Tensor]], batch_rows: int
) -> OfRun:
    """The data of a run for its figures. needs: of the figures: weights, rows, telemetry.

    rows: opens the run's data and returns its validation rows: tokens, targets and optionally document ids, `(N, T)`.
    If it raises DataError, the log has the reason, and figures that need rows are left out.
    """
    model = restored.model
    device = next(model.parameters()).device
    weights, in_use = weights_of(model), in_use_of(model)
    over_batch = any(hasattr(module, "on_batch") for module in model.modules()) and bool(model.statistics())
    found: dict[str, Any] = {**records(restored.path)}
    if "rows" in needs:
        try:
            batch = rows()
        except DataError as error:
            logger.warning("%s: its rows cannot be had, so no gradients: %s", name, error)
            found["no_rows"] = f"has no rows here: {str(error).splitlines()[0]}"
        else:
            pieces = on_device(batch, max(1, TOKENS_AT_ONCE // batch[0].shape[1]), device)
            found["gradient_l1"], found["loss"] = gradient_l1(model, pieces)
            if over_batch:
                found["batches"] = batch_gaps(model, on_device(batch, batch_rows, device), restored.step)
    return OfRun(name, restored.config.model, model.on_sphere, over_batch, weights, in_use, **found)


@torch.no_grad()
def weights_of(model: Decoder) -> dict[str, Tensor]:
    """All weights by canonical name, matrices as the model uses them: with model.constraint=parametrization their rows
    are normalised."""
    weights = export_weights(model)
    if getattr(model.config, "constraint", "") != "parametrization":
        return weights
    return {name: renormalized(W) if W.ndim == 2 else W for name, W in weights.items()}


@torch.no_grad()
def in_use_of(model: Decoder) -> dict[str, Tensor]:
    """Vectors as the model uses them. Vectors that are stored in another form, such as nGPT's alpha, are in fp64."""
    scaled = {
        canonical(place): copy.deepcopy(module).double()()
        for place, module in model.named_modules()
        if hasattr(module, "stored")
    }
    return {name: scaled.get(name, vector.detach()).clone() for name, vector in vectors_in_use(model)}
