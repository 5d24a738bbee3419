"""`audit RUN`: trains parts of a run again and says whether its records follow from its config, code and data."""

import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ngpt_train.config.schema import Config
from ngpt_train.config.stored import read_yaml
from ngpt_train.config.validate import mistake
from ngpt_train.core.errors import ConfigError, DataError
from ngpt_train.core.files import DirectoryLock, check_kinds, write_json
from ngpt_train.distributed.world import resolve_device
from ngpt_train.evaluation.trust import taken
from ngpt_train.study.audit.auditing import audit
from ngpt_train.study.audit.certificate import CERTIFICATE
from ngpt_train.study.engines.child import launcher
from ngpt_train.training.guards import NumericalError
from ngpt_train.training.run_directory import origin

FOUND = 3  # the exit code of a run whose records are not what training again gives: its data cannot be relied on


def main(config: Config, overrides: Sequence[str]) -> int:
    """Returns 0 where all that was trained again is equal, 3 where something was found. Writes the certificate.

    `config` decides what the run's config may not decide here. Raises ConfigError where there is no run to audit, or
    no place for the certificate, DataError where the run's files cannot be read, or name a text that is not known to be
    ours.
    """
    # So that the training of a window ends too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    path, out = _run_directory(config.audit.run), config.audit.out
    target = Path(out).expanduser() if out is not None else path / CERTIFICATE
    if out is None and not os.access(path, os.W_OK):
        raise mistake(f"audit.run={path}: cannot be written", "Name a file for the certificate: audit.out=FILE")
    if out is None:
        check_kinds([target], directories=())
    of_run = partial(taken, own=config, overrides=overrides, opens=("run", "data", "tokenizer"))
    certificate = audit(
        path, config.audit, lambda ranks: [*launcher(ranks), "ngpt_train.verbs.audit"], _here(path), of_run
    )
    write_json(target, certificate)
    print("\n".join([*_summary(certificate), f"certificate: {target}"]), flush=True)
    return 0 if certificate["equal"] else FOUND


def _run_directory(run: str | None) -> Path:
    """The directory of audit.run. Raises ConfigError unless it has a run that nobody trains."""
    assert run is not None  # check_verb refuses null
    path = Path(run).expanduser()
    if missing := [name for name in ("config.yaml", "run.json", "metrics.jsonl") if not (path / name).is_file()]:
        raise mistake(f"audit.run={run}: not a run directory, it has no {missing[0]}", "For example runs/quickstart")
    lock = DirectoryLock(path)
    if lock.is_taken():
        raise mistake(f"audit.run={run}: {lock.holder()} is training in it", "Wait for it, or stop it")
    return path


def _here(path: Path) -> dict[str, Any]:
    """This machine and this code, as run.json names them."""
    config = read_yaml(path / "config.yaml")
    try:
        device = resolve_device(config.train.device, 0)
    except ConfigError:  # it was trained on a GPU, and there is none: then the training says so
        device = torch.device("cpu")
    return {**origin(device), "repeats_bits": config.train.deterministic or device.type != "cuda"}


def _summary(certificate: dict[str, Any]) -> list[str]:
    lines = [f"note: {note}" for note in certificate["notes"]]
    steps, of = certificate["steps_compared"], certificate["steps"]
    windows, found = len(certificate["windows"]), certificate["found"]
    lines.append(f"{steps:,} of {of:,} steps were trained again in {windows} window{'s' * (windows != 1)}")
    if certificate["equal"]:
        lines.append(f"equal {certificate['how']}: losses, norms, rates, data, validations and checkpoints in them")
    else:
        things = "one thing is" if len(found) == 1 else f"{len(found)} things are"
        lines.append(f"{things} not as the records say{'; the first:' if len(found) > 10 else ':'}")
        lines += [f"  {finding['says']}" for finding in found[:10]]
    return lines


def _train_again(path: str) -> int:
    """Trains a run from its config.yaml alone, as `train` does: the process that an audit starts."""
    from ngpt_train.verbs import train

    try:
        return train.main(read_yaml(path), [])
    except (ConfigError, DataError, NumericalError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(_train_again(sys.argv[1]))
