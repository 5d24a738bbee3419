"""The CPUs that this process may use."""

import os
from pathlib import Path

from ngpt_train.core.files import text_of


def usable_cpus() -> float:
    """The CPUs of this process, by its affinity and its container's quota. A quota may leave a part of a CPU."""
    cpus = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    quota, _, period = text_of(Path("/sys/fs/cgroup/cpu.max")).partition(" ")
    return min(cpus, int(quota) / int(period)) if quota.isdecimal() and period.isdecimal() else cpus


def whole_cpus() -> int:
    """The number of processes that keep the usable CPUs busy, at least 1."""
    return max(1, int(usable_cpus()))
