"""The directory of a run: the checks whether a start may use it, and the files that each start and end writes.

config.yaml  run.json  metrics.jsonl  evals/  curves.png  checkpoints/  logs/  exit.json  lock
"""

import contextlib
import logging
import os
import platform
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import ngpt_train
from ngpt_train.config.schema import Config
from ngpt_train.config.stored import check_resume, differing_weights, read_yaml, what_differs, write_yaml
from ngpt_train.core.checkout import git_commit
from ngpt_train.core.errors import ConfigError, DataError
from ngpt_train.core.files import DirectoryLock, check_kinds, read_json, remove, text_of, write_json
from ngpt_train.core.launcher import is_same_job, nameless_on_many_hosts, this_job
from ngpt_train.core.log import say_once
from ngpt_train.data.dataset import Dataset
from ngpt_train.distributed.layouts import resolve_kind
from ngpt_train.models.weights import standard_deviations
from ngpt_train.training.checkpoint.catalogue import VALIDATION, find_checkpoint, list_checkpoints, step_of
from ngpt_train.training.state import TrainState

logger = logging.getLogger(__name__)

DONE = "done"  # the reason in exit.json at the planned end
_LEFT_BY_A_KILLED_START = ("lock", "run.json", ".run.json.partial", ".config.yaml.partial")
# The files that run.overwrite deletes, in this order. config.yaml is last, because it marks a run directory.
_RUN_FILES = (
    *("checkpoints", "metrics.jsonl", ".metrics.jsonl.partial", "evals", "curves.png", "logs"),
    *("wandb", "wandb_id", "tensorboard", "profile", "audit.json", "exit.json", "run.json", "config.yaml"),
)
_IDENTITY = ("tokenizer", "tokenizer_fingerprint", "data_fingerprint")
_RUN_DIRECTORIES = ("checkpoints", "evals", "logs", "wandb", "tensorboard", "profile")


class RunDirectory:
    """`<run.root>/<run.name>` of a config whose run.name is no longer auto."""

    def __init__(self, config: Config) -> None:
        self.path = Path(config.run.root).expanduser() / config.run.name
        self._lock = DirectoryLock(self.path)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def used(self) -> bool:
        """True if a run has been started here."""
        return (self.path / "config.yaml").is_file() and (self.path / "run.json").is_file()

    @property
    def done(self) -> bool:
        """True if the last start reached its planned end."""
        end = self.path / "exit.json"
        found = read_json(end) if end.is_file() else None
        return isinstance(found, dict) and found.get("reason") == DONE

    def check(self, config: Config, data: Dataset | None = None) -> Path | None:
        """Checks, without writing, that `config` may use the directory; returns the checkpoint to resume from, if any.
        data: None before it is open. Raises ConfigError or DataError if the directory is in use, has other files than a
        run's, or holds a run with another config or on other data."""
        name = f"run.name={config.run.name}"
        self._check_place(config)
        self._check_entries(name)
        if not self.used:
            if not self._has_other_files():
                return _no_checkpoint(config, self.checkpoints)
            problem = f"{name}: {self.path} exists and is not the directory of a run"
            raise ConfigError(f"{problem}. Choose another run.name or run.root.")
        if self._lock.is_taken():
            problem = f"{name}: {self._lock.holder()} is training in {self.path}"
            raise ConfigError(f"{problem}. Wait for it, stop it, or choose another run.name.")
        stored = read_yaml(self.path / "config.yaml")
        if self._overwrites(config):
            return _no_checkpoint(config, self.checkpoints)
        if config.run.resume == "never":
            problem = f"run.resume=never: {self.path} holds a run"
            raise ConfigError(f"{problem}. Choose another run.name, or run.overwrite=true to delete it.")
        if "imported" in self._last_start():
            problem = f"{name} is an imported model: it has weights, and no training to go on with"
            raise DataError(f"{problem}. Start another run with run.init_from={self.path} run.name=...")
        if data is not None:
            self._check_data(name, data)  # before check_resume, which would report another model.vocab_size instead
        check_resume(stored, config)
        found = self.candidates(config)
        self._check_saved(name, found)
        return found[-1] if found else _no_checkpoint(config, self.checkpoints)

    def candidates(self, config: Config) -> list[Path]:
        """The complete checkpoints for this start, oldest first; with run.resume_step the one of that step alone.
        Raises DataError if it is not there."""
        found, step = {step_of(path): path for path in list_checkpoints(self.checkpoints)}, self._named_step(config)
        if step is None:
            return list(found.values())
        if step not in found:
            raise DataError(
                f"run.resume_step={step}: there is no complete checkpoint of this step in {self.checkpoints} (there "
                f"are: {', '.join(map(str, found)) or 'none'}). Name one of them, or leave it out."
            )
        return [found[step]]

    def _named_step(self, config: Config) -> int | None:
        """run.resume_step for the first start of a job; None for its restarts."""
        step = config.run.resume_step
        begun = [start for start in self._record()["starts"] if start.get("step") == step] if self.used and step else []
        return None if any(is_same_job(start.get("job"), this_job()) for start in begun) else step

    def _left_out(self, checkpoint: Path | None) -> dict[str, str]:
        """{name: problem} for newer checkpoints than `checkpoint` that are incomplete or gone."""
        if checkpoint is None:
            return {}
        found = [path.name for path in list_checkpoints(self.checkpoints)]
        saved = f"step_{self._record().get('saved') or 0:08d}"
        problems = {saved: "it was saved, but it is gone"} if saved > found[-1] else {}
        incomplete = {path.name for path in self.checkpoints.glob("step_*") if path.name > checkpoint.name} - {*found}
        return problems | dict.fromkeys(sorted(incomplete), "it has no MANIFEST.json, so it is not complete")

    def _overwrites(self, config: Config) -> bool:
        """True if this start deletes the run: run.overwrite is for the first start of a job, not for its restarts.
        Raises ConfigError where a restart cannot be told from a new job."""
        if not config.run.overwrite:
            return False
        if nameless_on_many_hosts():
            raise ConfigError(
                f"run.overwrite=true: {self.path} holds a run, and whether torchrun starts this job for the first time "
                "cannot be told: it has no name and several hosts. Give torchrun --rdzv-id=NAME, or delete the run."
            )
        try:
            last = self._last_start()
        except DataError:  # damaged, and to be deleted anyway
            return True
        if not is_same_job(last.get("job"), this_job()):
            return True
        say_once(logging.WARNING, f"run.overwrite=true: this job has begun the run in {self.path} before; it goes on")
        return False

    def _check_saved(self, name: str, found: list[Path]) -> None:
        """Raises DataError if all saved checkpoints are gone. Warns if the last one is, and of incomplete ones."""
        saved = self._record().get("saved")
        complete = list_checkpoints(self.checkpoints)
        for path in sorted(self.checkpoints.glob("step_*")) if self.checkpoints.is_dir() else []:
            if path not in complete:
                logger.warning("%s is left out: it has no MANIFEST.json, so it is not complete", path)
        if saved is not None and not found:
            raise DataError(
                f"{name}: step {saved} was saved, but there is no checkpoint in {self.checkpoints}. Is a file system "
                "not mounted? Restore it, start another run.name, or delete this run with run.overwrite=true."
            )
        if saved is not None and step_of(complete[-1]) < saved:
            logger.warning(
                "%s: step %d was saved, but its checkpoint is gone; the run goes on from step %d",
                *(self.path, saved, step_of(found[-1])),
            )

    def _check_data(self, name: str, data: Dataset) -> None:
        """Raises DataError if data or tokenizer have changed since the run's last start."""
        last = self._last_start()
        if data.tokenizer.fingerprint != last["tokenizer_fingerprint"]:
            raise DataError(
                f"{name}: the tokenizer is {data.tokenizer.name} ({data.tokenizer.fingerprint[:12]}), this run was "
                f"trained with {last['tokenizer']} ({last['tokenizer_fingerprint'][:12]}). Restore it, or start "
                "another run.name."
            )
        if data.fingerprint != last["data_fingerprint"]:
            raise DataError(
                f"{name}: the data is not what this run was trained on (fingerprint {data.fingerprint[:12]} instead "
                f"of {last['data_fingerprint'][:12]}): its text has changed. Restore it, or start another run.name."
            )

    def _check_place(self, config: Config) -> None:
        """Raises ConfigError if the directory cannot be written or created."""
        try:
            nearest = next(path for path in (self.path, *self.path.parents) if path.exists())
            if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
                return
            problem = "cannot be written" if nearest.is_dir() else "is a file, not a directory"
        except OSError as error:  # a name that is too long
            nearest, problem = self.path, f"cannot be used ({error.strerror})"
        keys = f"run.root={config.run.root}, run.name={config.run.name}"
        raise ConfigError(f"{keys}: {nearest} {problem}. Choose another place.")

    def _check_entries(self, name: str) -> None:
        """Raises DataError where a file or directory of the run is a link or of another kind. `checkpoints` may be a
        link, for example to a larger disk, but not into another run."""
        names = [*_RUN_FILES, *_LEFT_BY_A_KILLED_START, ".exit.json.partial"]
        own = [self.path / entry for entry in names if entry != "checkpoints" or not self.checkpoints.is_dir()]
        own += [self.checkpoints / VALIDATION, self.checkpoints / f".{VALIDATION}.partial"]
        inside = [path for part in ("logs", "evals") for path in (self.path / part).glob("*")]
        try:
            check_kinds([*own, *inside], directories=_RUN_DIRECTORIES)
        except DataError as error:
            raise DataError(f"{name}: {error}. Remove it, or choose another run.root.") from None
        there = self.checkpoints.resolve().parent
        if self.checkpoints.is_symlink() and (there / "config.yaml").exists():  # whose checkpoints would be deleted
            raise DataError(f"{name}: {self.checkpoints} is a link into another run, {there}. Remove the link.")

    def open(
        self, config: Config, start: dict[str, Any], checkpoint: Path | None, damaged: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Locks the directory for this process and writes config.yaml and run.json; returns this start's entry in
        run.json, which is `start` and more. Rank 0 calls it, after `check`.

        checkpoint: the newest sound one. damaged: {name: problem} of newer checkpoints, which are renamed. Raises
        ConfigError if the directory cannot be written, or if another process has used it since `check`.
        """
        damaged = damaged or {}
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.create()
        except OSError as error:
            problem = f"run.root={config.run.root}: {self.path} cannot be written ({error.strerror})"
            raise ConfigError(f"{problem}. Choose another run.root.") from None
        try:
            self._lock.take()
        except BlockingIOError:
            problem = f"{self._lock.holder()} has just started in {self.path}."
            raise ConfigError(f"run.name={config.run.name}: {problem}") from None
        except OSError as error:
            logger.warning("%s has no file locks (%s): nothing keeps a second process out", self.path, error.strerror)
        if self.used and self._overwrites(config):
            self._delete()
        elif (step := self._named_step(config)) is not None:
            for path in [path for path in list_checkpoints(self.checkpoints) if step_of(path) > step]:
                logger.warning("run.resume_step: %s is %s now", path, self._put_aside(path.name, "replaced"))
            self.saved(step)
        elif {path.name for path in list_checkpoints(self.checkpoints)[-1 - len(damaged) :]} != {
            *damaged,
            *([checkpoint.name] if checkpoint else []),
        }:
            raise ConfigError(f"run.name={config.run.name}: another process has trained in {self.path}; start again.")
        left_out = self._left_out(checkpoint)
        for name, problem in damaged.items():
            kept = self._put_aside(name, "damaged")
            logger.warning("%s The run goes on from %s; the damaged one is %s now.", problem, checkpoint, kept)
        if damaged or left_out:
            start = start | {"damaged": {**damaged, **left_out}}
        if self.used and config.run.allow_change:
            changed = what_differs(read_yaml(self.path / "config.yaml"), config)
            start = start | {"changed": [{"key": name, "from": old, "to": new} for name, old, new in changed]}
            for name, old, new in changed:
                logger.warning("run.allow_change: %s was %s and is %s from here on", name, old, new)
        start = start | {"job": this_job()}
        before = self._record() if self.used else {"starts": []}
        write_json(self.path / "run.json", before | {"starts": [*before["starts"], start]})
        (self.path / "exit.json").unlink(missing_ok=True)
        write_yaml(config, self.path / "config.yaml")
        return start

    def _put_aside(self, name: str, why: str) -> Path:
        """Renames a checkpoint to WHY-NAME, so that no start takes it and nothing deletes it; returns its path."""
        aside, number = self.checkpoints / f"{why}-{name}", 1
        while aside.exists():
            number += 1
            aside = self.checkpoints / f"{why}-{name}-{number}"
        return (self.checkpoints / name).rename(aside)

    def saved(self, step: int) -> None:
        """Notes in run.json that a checkpoint of `step` is complete, so that its loss is noticed. Rank 0 calls it."""
        path = self.path / "run.json"
        try:
            write_json(path, self._record() | {"saved": step})
        except (OSError, DataError) as error:
            logger.warning("%s could not be written: %s", path, error)

    def _delete(self) -> None:
        for name in _RUN_FILES:
            with contextlib.suppress(FileNotFoundError):
                remove(self.path / name)

    def finish(self, code: int, reason: str, step: int, rank: int) -> None:
        """Writes exit code, reason, step and rank into exit.json, because torchrun hides the exit codes of its workers.
        Of several ranks that fail the first writes: later failures follow from it."""
        if code and (self.path / "exit.json").exists():
            return
        try:
            end = {"code": code, "reason": reason, "step": step, "rank": rank, "host": socket.gethostname()}
            write_json(self.path / "exit.json", end)
        except OSError as error:  # a full disk, for example, which `reason` names already
            logger.warning("%s/exit.json could not be written: %s", self.path, error.strerror)

    def release(self) -> None:
        self._lock.release()

    def _has_other_files(self) -> bool:
        """True if there are files beside the leftovers of a start that was killed at once."""
        return self.path.exists() and any(entry.name not in _LEFT_BY_A_KILLED_START for entry in self.path.iterdir())

    def kernels(self) -> dict[str, Any] | None:
        """The findings about kernels from the last start on a GPU; None if there was no such start."""
        starts = self._record()["starts"]
        return next((start["kernels"] for start in reversed(starts) if start.get("kernels")), None)

    def _record(self) -> dict[str, Any]:
        """The content of run.json. Raises DataError where it is damaged."""
        record = read_json(path := self.path / "run.json")
        starts = record.get("starts") if isinstance(record, dict) else None
        last = starts[-1] if isinstance(starts, list) and starts else None
        known = isinstance(last, dict) and all(isinstance(last.get(name), str) for name in _IDENTITY)
        if known and type(record.get("saved", 0)) is int:
            return record
        problem = f"{path} is damaged: it does not say how the run began"
        raise DataError(f"{problem}. Restore it, or choose another run.name.")

    def _last_start(self) -> dict[str, Any]:
        return self._record()["starts"][-1]


def _no_checkpoint(config: Config, checkpoints: Path) -> Path | None:
    """Returns None. Raises DataError if run.resume=must requires a checkpoint."""
    if config.run.resume == "must":
        problem = f"run.resume=must: there is no checkpoint in {checkpoints}"
        raise DataError(f"{problem}. Check run.name and run.root, or use run.resume=auto to start anew.")
    return None


def describe_start(state: TrainState, data: Dataset) -> dict[str, Any]:
    """The entry of run.json for one start of a run."""
    device = state.world.device
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "step": state.step,
        **origin(device),
        "threads": torch.get_num_threads(),
        "world_size": state.world.size,
        "parallel": resolve_kind(state.config.parallel.kind, state.world.size, device.type, state.world.local_size),
        "n_params": state.model.n_params(),
        "init": standard_deviations(state.model),
        "data_fingerprint": data.fingerprint,
        "tokenizer": data.tokenizer.name,
        "tokenizer_fingerprint": data.tokenizer.fingerprint,
    }


def origin(device: torch.device) -> dict[str, Any]:
    """The code, the versions and the machine. `cpu` names the processor and its instructions in use by torch, because
    sums on another processor are rounded otherwise."""
    lines = text_of(Path("/proc/cpuinfo")).splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    name = next(names, platform.processor() or platform.machine())
    versions = {"ngpt_train": ngpt_train.__version__, "torch": torch.__version__, "python": platform.python_version()}
    return {
        "git_commit": git_commit(),
        "versions": versions,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "cpu": f"{name}, {torch.backends.cpu.get_cpu_capability()}",
    }


def initial_checkpoint(config: Config) -> Path | None:
    """The checkpoint of run.init_from, if that is set. Raises DataError unless it has the config's model."""
    if config.run.init_from is None:
        return None
    checkpoint = find_checkpoint("run.init_from", config.run.init_from)
    if differing := differing_weights(read_yaml(checkpoint / "config.yaml").model, config.model):
        problem = f"run.init_from={config.run.init_from}: the weights are of another model."
        raise DataError("\n  ".join([problem, *differing]))
    return checkpoint
