"""Set-up of all tests."""

import logging
import os
import tempfile
from collections import Counter
from collections.abc import Iterator

# The models here are tiny: a second thread gains nothing, and where the machine is busy the threads of one process,
# waiting for each other, make it slower by an order of magnitude. Inherited by the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

# What tests compile is not the user's.
for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
    os.environ.setdefault(variable, os.path.join(tempfile.gettempdir(), f"ngpt_train_tests_{os.getuid()}", variable))

# Nor is what trainings of tests name: those of one session alone know it.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="ngpt_train_tests_state_")

# transformers copies an export's modeling file before it imports it, so that of two processes that load exports of one
# name, one may import half a file. So each worker has its own place.
worker = os.environ.get("PYTEST_XDIST_WORKER", "alone")
modules = os.path.join(tempfile.gettempdir(), f"ngpt_train_tests_{os.getuid()}", "HF_MODULES_CACHE", worker)
os.environ["HF_MODULES_CACHE"] = modules

# Without a GPU, Triton runs kernels in its interpreter, if it is told to before it is imported; torch does that late.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """`-n auto`: one more than there are cores, because tests of processes wait for them; at most 8, because each holds
    torch and a fork server, some 1 GB."""
    return min(8, 1 + (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`@pytest.mark.sampled(n)`: the first case of a test and every n-th after it are fast, the others slow."""
    seen: Counter[str] = Counter()
    for item in items:
        marker = item.get_closest_marker("sampled")
        if marker is None or any(map(item.get_closest_marker, ("slow", "exhaustive"))):
            continue
        test = item.nodeid.partition("[")[0]
        if seen[test] % marker.args[0]:
            item.add_marker(pytest.mark.slow)
        seen[test] += 1


@pytest.fixture(autouse=True)
def logging_is_on() -> Iterator[None]:
    """Afterwards, too: some tests call what turns it off in a process of its own."""
    yield
    logging.disable(logging.NOTSET)


if os.environ.get("NGPT_TESTS_ROUNDING"):
    from tests.rounding import Rounding

    @pytest.fixture(scope="session", autouse=True)
    def another_rounding() -> Iterator[None]:
        """Of the session, so that what fixtures of modules compute is rounded as the tests are."""
        with pytest.MonkeyPatch.context() as patch, Rounding():
            for owner in (torch, torch.nn.Module):
                patch.setattr(owner, "compile", lambda *_, **__: pytest.skip("no compiled code goes through the mode"))
            yield
