"""`doctor`: would a training run work here? In about a minute, alone or under torchrun."""

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
from ngpt_train.doctor.findings import MACHINE
from ngpt_train.doctor.outcome import as_json, as_text
from ngpt_train.doctor.rank_store import absent, connection, here, tell, told

STORE_SECONDS = 45.0  # for Python to start on other hosts
VERDICT_SECONDS = 60.0  # by which rank 0 may end later than another rank


def main(config: Config, overrides: Sequence[str]) -> int:
    """Rank 0 prints the table, and writes it to doctor.out as JSON. Returns on every rank 0 if a run would work, else
    2 or 3, as `train` would.

    Raises DataError where the store of torchrun cannot be reached.
    """
    end_with_launcher()
    place = here()
    try:
        by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store = connection(place, STORE_SECONDS, holds_store=place.rank == 0 and not by_torchrun)
        if place.rank == 0:
            print(f"looking at {place.size} rank{'s' if place.size > 1 else ''}, for a minute or so", file=sys.stderr)
        examination = examine(config, place, store)
        if examination is None:
            code = int(told(store, "verdict", [0], VERDICT_SECONDS).get(0, MACHINE))
        else:
            findings = judge(config, examination)
            code = exit_code(findings)
            report = as_json(examination, findings, code)
            print(as_text(report), flush=True)
            if config.doctor.out is not None:
                out = Path(config.doctor.out).expanduser()
                write_json(out, report)
                print(f"written to {out}")
            tell(store, place, "verdict", code)
        # The store may live in this process. torchrun ends all ranks as soon as one has failed; each is to end with its
        # own exit code.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        absent(store, place, "end", LAST_SECONDS)
        return code
    except RuntimeError as error:  # of torch's store
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise DataError(
            f"rank {place.rank} on {place.host} does not reach the other ranks by way of {address} "
            f"({first_line(error)}). Open that port on the host of rank 0, and check MASTER_ADDR and --rdzv-endpoint"
        ) from None
