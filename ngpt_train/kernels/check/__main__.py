"""Checks kernels, in a process of `kernel_findings.py`: a kernel may crash it, hang, or leave its GPU unusable.

Its argument is a request, as JSON. To its standard output it writes lines of JSON: before each piece of work {"at": n,
"doing": "check" or "times"}, and after it {"at": n, ...} with the keys of `Finding`. A timer ends the process if a
piece of work takes too long.
"""

import json
import signal
import sys

if __name__ == "__main__":  # before the imports, which may hang, too
    signal.setitimer(signal.ITIMER_REAL, json.loads(sys.argv[1])["seconds"]["start"])

import contextlib
import logging
import os
import time
from typing import Any

import torch

from ngpt_train.core.errors import in_one_line
from ngpt_train.core.launcher import die_with_parent
from ngpt_train.kernels import attention, dispatch
from ngpt_train.kernels.check.calls import Call
from ngpt_train.kernels.check.cases import OF_ATTENTION, errors_of_call, times_of_call
from ngpt_train.kernels.check.kernel_findings import UNUSABLE


def main() -> int:
    """Returns 0, or UNUSABLE if nothing more runs on the GPU after a kernel."""
    output = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what compilers print goes where errors go
    logging.disable(logging.WARNING)  # the parent tells what runs
    die_with_parent()
    request = json.loads(sys.argv[1])

    def tell(at: int, doing: str | None = None, **found: Any) -> None:
        if doing is not None:
            signal.setitimer(signal.ITIMER_REAL, request["seconds"][doing])
            found["doing"] = doing
        output.write(json.dumps({"at": at, **found}) + "\n")

    device = torch.device(request["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    attention.choose(request["attention"], device, request["d_head"], getattr(torch, request["dtype"]))
    with dispatch.chosen("torch" if dispatch.why_no_triton() else "triton"):
        for number, text in enumerate(request["calls"]):
            call = Call(**json.loads(text))
            tell(number, "check")
            started = time.monotonic()
            found = checked(call, device)
            tell(number, seconds=time.monotonic() - started, **found)
            if unusable(device):
                return UNUSABLE
            if not request["times"] or found["problem"] is not None or call.kernel in OF_ATTENTION:
                continue
            tell(number, "times")
            tell(number, **timed(call, device, request["compiled"]))
            if unusable(device):
                return UNUSABLE
    return 0


def checked(call: Call, device: torch.device) -> dict[str, Any]:
    """The finding of a call: its largest error and its problem."""
    try:
        errors = errors_of_call(call, device)
    except torch.OutOfMemoryError:
        return {"error": None, "problem": "the check had too little memory", "lasting": False}
    except Exception as error:  # compilers and kernels raise anything
        return {"error": None, "problem": f"it fails: {in_one_line(error)}", "lasting": True}
    finally:
        if device.type == "cuda":
            with contextlib.suppress(RuntimeError):
                torch.cuda.empty_cache()
    worst = max(error.relative for error in errors.values())
    wrong = {name: error for name, error in errors.items() if not error.is_small}
    problem = None
    if wrong:
        what = "; ".join(f"{name} is off by {error.relative:.1e}" for name, error in wrong.items())
        nan = any(error.relative != error.relative for error in wrong.values())
        leaves = ", or leaves elements unwritten: NaN" if nan else ""
        problem = f"it is wrong{leaves}: {what}, where {max(e.tolerance for e in wrong.values()):.0e} is rounding"
    return {"error": worst if worst == worst else None, "problem": problem, "lasting": True}


def timed(call: Call, device: torch.device, compiled: bool) -> dict[str, Any]:
    """Both times. If timing fails, the kernel still runs: it is right."""
    try:
        ours, plain = times_of_call(call, device, compiled)
    except Exception as error:
        return {"untimed": in_one_line(error)}
    return {"us": ours, "plain_us": plain}


def unusable(device: torch.device) -> bool:
    """True if a kernel has damaged the GPU's context, for example by an address outside of its memory."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize()
        torch.zeros(1, device=device).add_(1).item()
    except RuntimeError:
        return True
    return False


if __name__ == "__main__":
    sys.exit(main())
