"""`doctor`: whether a training run would work here, in about a minute, alone or under torchrun."""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from ngpt_train.config.schema import Config
from ngpt_train.core.errors import DataError
from ngpt_train.core.files import write_json
from ngpt_train.core.launcher import end_with_launcher
from ngpt_train.doctor.bounded import first_line
from ngpt_train.doctor.examination import LAST_SECONDS, examine, exit_code, judge
from ngpt_train.doctor.exchange import Exchange, here
from ngpt_train.doctor.findings import MACHINE
from ngpt_train.doctor.table import as_json, as_text

STORE_SECONDS = 45.0  # that other hosts may need to start Python
VERDICT_SECONDS = 60.0  # that rank 0 may need longer than another rank


def main(config: Config, overrides: Sequence[str]) -> int:
    """Rank 0 prints the table, and writes it to doctor.out as JSON. Returns on every rank 0 if a run would work, else
    2 or 3, as `train` would.

    Raises DataError where the store of torchrun cannot be reached.
    """
    end_with_launcher()
    place = here()
    try:
        exchange = Exchange.begun(place, STORE_SECONDS)
        if place.rank == 0:
            print(f"looking at {place.size} rank{'s' if place.size > 1 else ''}, for a minute or so", file=sys.stderr)
        examination = examine(config, place, exchange)
        if examination is None:
            code = int(exchange.gather("verdict", VERDICT_SECONDS, [0]).get(0, MACHINE))
            _end_together(exchange)
            return code
        findings = judge(config, examination)
        code = exit_code(findings)
        report = as_json(examination, findings, code)
        print(as_text(report), flush=True)
        if config.doctor.out is not None:
            out = Path(config.doctor.out).expanduser()
            write_json(out, report)
            print(f"written to {out}")
        exchange.post("verdict", code)
        _end_together(exchange)
        return code
    except RuntimeError as error:  # of torch's store
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise DataError(
            f"rank {place.rank} on {place.host} does not reach the other ranks by way of {address} "
            f"({first_line(error)}). Open that port on the host of rank 0, and check MASTER_ADDR and --rdzv-endpoint"
        ) from None


def _end_together(exchange: Exchange) -> None:
    """Waits for the other ranks, because the store may live in this process. torchrun ends all ranks as soon as one has
    failed; each is to end with its own exit code."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    exchange.meet("end", LAST_SECONDS)
