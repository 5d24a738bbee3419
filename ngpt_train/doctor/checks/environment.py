"""Limits of the operating system and the environment: files, shared memory, CPUs, memory, variables."""

import os
import re
import resource
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from ngpt_train.config.schema import Config
from ngpt_train.core.cpus import usable_cpus
from ngpt_train.core.files import text_of
from ngpt_train.doctor.bounded import Report
from ngpt_train.doctor.findings import OK, WARNING, WRONG, Answer, Finding, differences, gb, of_each, unchecked
from ngpt_train.training.hooks.saving import available_memory

LIMITS = {"open files": resource.RLIMIT_NOFILE, "processes": resource.RLIMIT_NPROC, "memlock": resource.RLIMIT_MEMLOCK}
UNLIMITED = "unlimited"
# Open files of a run: at the start (17 to 24 were measured on a CPU), for CUDA, for each rank, for each data worker.
FILES_AT_START, FILES_OF_CUDA, FILES_OF_A_RANK, FILES_OF_A_WORKER = 24, 64, 4, 8
COMFORTABLE_FILES, COMFORTABLE_PROCESSES = 4096, 4096
# NVIDIA asks for --shm-size=1g in containers; Docker's default is 64 MB.
COMFORTABLE_SHM, LEAST_SHM = 10**9, 70 * 10**6
LOCKED = 2**30  # bytes for InfiniBand; most systems have 64 kB to 8 MB by default
SHOWN = re.compile(
    r"^(OMP_|MKL_|KMP_|NCCL_|GLOO_|TORCH|PYTORCH_|CUDA_|TRITON_|MASTER_|UCX_|FI_|HF_(HOME|ENDPOINT|HUB_OFFLINE)|WANDB_"
    r"(MODE|BASE_URL)|WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_WORLD_SIZE|LD_PRELOAD|TMPDIR|.*_proxy$)",
    re.IGNORECASE,
)
OF_ONE_HOST = re.compile(r"ERROR_FILE|CUDA_VISIBLE_DEVICES|TMPDIR|RUN_ID|RESTART|GROUP_RANK|SOCKET_IFNAME|_HCA")
# Harmful variables: a pattern of the value, and the effect.
HARMFUL = {
    "CUDA_LAUNCH_BLOCKING": ("[^0]", "every kernel is waited for, which costs much of the speed"),
    "NCCL_P2P_DISABLE": ("[^0]", "GPUs of a host talk by way of its memory, not by NVLink"),
    "NCCL_SHM_DISABLE": ("[^0]", "GPUs of a host talk by way of the network"),
    "NCCL_IB_DISABLE": ("[^0]", "hosts talk by Ethernet, although there may be InfiniBand"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "every collective is compared among all ranks, which is slow"),
    "TORCH_COMPILE_DISABLE": ("[^0]", "nothing is compiled, whatever train.compile says"),
    "TORCHDYNAMO_DISABLE": ("[^0]", "nothing is compiled, whatever train.compile says"),
    "TRITON_INTERPRET": ("1", "Triton's kernels run in Python, which is for tests"),
    "LD_PRELOAD": (".", "another library is loaded before Python's own"),
}


def look(report: Report) -> None:
    """Limits, CPUs, memory and variables of this rank."""
    limits = {name: resource.getrlimit(kind)[0] for name, kind in LIMITS.items()}
    report(limits={name: UNLIMITED if n == resource.RLIM_INFINITY else n for name, n in limits.items()})
    tasks = text_of(Path("/sys/fs/cgroup/pids.max"))
    report(cpus=usable_cpus(), memory=available_memory(), tasks=int(tasks) if tasks.isdecimal() else None)
    try:
        shm = os.statvfs("/dev/shm")
        report(shm=shm.f_frsize * shm.f_blocks, shm_free=shm.f_frsize * shm.f_bavail)
    except OSError as error:
        report(shm=None, shm_problem=error.strerror)
    report(variables={name: value for name, value in sorted(os.environ.items()) if SHOWN.search(name)})
    report(interfaces=[name for _, name in socket.if_nameindex()], infiniband=Path("/sys/class/infiniband").is_dir())


def judge(config: Config, answers: Sequence[Answer], on_gpus: bool, memory_of_a_rank: int | None) -> Iterator[Finding]:
    """Limits of each rank, and different variables. memory_of_a_rank: in bytes, as `plan` expects; None: unknown."""
    known = [answer for answer in answers if "interfaces" in answer.facts]  # the last fact of the look
    yield from of_each(known, lambda answer: _limits(config, answer, on_gpus))
    yield from of_each(known, lambda answer: _shared_memory(answer, on_gpus))
    yield from of_each(known, lambda answer: _cpus(config, answer, on_gpus))
    if not on_gpus and memory_of_a_rank is not None:
        yield from of_each(known, lambda answer: _memory(answer, memory_of_a_rank))
    yield from of_each(known, _variables)
    yield from _different_variables(known)
    for answer in answers:
        if answer.problem:
            yield unchecked("environment", answer.problem, "look at the load of this host", where=(answer.place,))


def data_workers(config: Config) -> int:
    return config.data.workers if config.data.streamed else 0


def _limits(config: Config, answer: Answer, on_gpus: bool) -> Iterator[Finding]:
    limits = answer.facts["limits"]
    files, needed = limits["open files"], FILES_AT_START + (FILES_OF_CUDA if on_gpus else 0)
    needed += FILES_OF_A_RANK * answer.place.size + FILES_OF_A_WORKER * data_workers(config)
    verdict = OK if files == UNLIMITED or files >= COMFORTABLE_FILES else WRONG if files < needed else WARNING
    remedy = "ulimit -n 65536 before the start; in a container --ulimit nofile=65536; under Slurm in slurmd's unit"
    yield Finding("open files", f"at most {files} in a process, this run needs some {needed}", verdict, remedy)
    most = min([n for n in (limits["processes"], answer.facts["tasks"]) if isinstance(n, int)], default=UNLIMITED)
    verdict = WARNING if isinstance(most, int) and most < COMFORTABLE_PROCESSES else OK
    remedy = "ulimit -u unlimited; in a container --pids-limit=-1: threads count as processes"
    yield Finding("processes", f"at most {most}, threads included", verdict, remedy)
    locked, infiniband = limits["memlock"], answer.facts["infiniband"]
    limit = locked if locked == UNLIMITED else gb(locked)
    verdict = WRONG if on_gpus and infiniband and locked != UNLIMITED and locked < LOCKED else OK
    remedy = "ulimit -l unlimited; in a container --ulimit memlock=-1: NCCL fails to register memory otherwise"
    found = f"at most {limit}, and there is {'' if infiniband else 'no '}InfiniBand"
    yield Finding("memlock", found, verdict, remedy)


def _shared_memory(answer: Answer, on_gpus: bool) -> Iterator[Finding]:
    shm, free = answer.facts["shm"], answer.facts.get("shm_free", 0)
    is_used = on_gpus and answer.place.local_size > 1
    verdict = WRONG if is_used and free < LEAST_SHM else WARNING if min(shm or 0, free) < COMFORTABLE_SHM else OK
    found = f"cannot be used ({answer.facts.get('shm_problem')})"
    if shm is not None:
        found = f"{gb(shm)}, {gb(free)} of it free; NCCL and PyTorch share memory there"
    remedy = "in a container --shm-size=1g or --ipc=host; else mount -o remount,size=8g /dev/shm"
    yield Finding("/dev/shm", found, verdict, remedy)


def _cpus(config: Config, answer: Answer, on_gpus: bool) -> Iterator[Finding]:
    cpus, ranks, workers = answer.facts["cpus"], answer.place.local_size, data_workers(config)
    found = f"{cpus:g} for {ranks} rank{'s' if ranks > 1 else ''} of this host"
    found += f" with {workers} data worker{'s' if workers > 1 else ''} each" if workers else ""
    if (processes := ranks * (1 + workers)) > cpus:
        remedy = "ask for more CPUs (--cpus-per-task), start fewer ranks, or set data.workers"
        yield Finding("CPUs", f"{found}: {processes} processes share them", WARNING, remedy)
    else:
        yield Finding("CPUs", found)
    threads = answer.facts["variables"].get("OMP_NUM_THREADS")
    share = max(1, int(cpus / ranks) - workers)
    verdict = WARNING
    if threads is None:
        found = f"not set, so each process starts {cpus:g} thread{'s' if cpus > 1 else ''}"
        verdict = OK if ranks == 1 and not workers else WARNING
    elif not (threads.isdecimal() and int(threads)):
        found = f"{threads}: not a number of threads"
    elif int(threads) * ranks > max(cpus, ranks):
        found = f"{threads} threads in each of {ranks} ranks, for {cpus:g} CPUs"
    elif int(threads) == 1 and share > 1 and not on_gpus:
        found = f"1, torchrun's default, although each rank has {share} CPUs"
    else:
        verdict, found = OK, threads
    yield Finding("OMP_NUM_THREADS", found, verdict, f"export OMP_NUM_THREADS={share}")


def _memory(answer: Answer, memory_of_a_rank: int) -> Iterator[Finding]:
    free, ranks = answer.facts["memory"], answer.place.local_size
    if free is None:
        return
    needed = ranks * memory_of_a_rank
    who = f"{ranks} ranks need" if ranks > 1 else "the rank needs"
    found = f"{gb(free)} free on this host, {who} some {gb(needed)} (`plan`)"
    remedy = "a smaller scale or train.micro_rows, parallel=fsdp over more hosts, or a larger machine"
    yield Finding("memory", found, WARNING if needed > free else OK, remedy)


def _variables(answer: Answer) -> Iterator[Finding]:
    variables, there = answer.facts["variables"], answer.facts["interfaces"]
    for name, (pattern, effect) in HARMFUL.items():
        if re.match(pattern, variables.get(name, "")):
            yield Finding("variables", f"{name}={variables[name]}: {effect}", WARNING, f"unset {name}")
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        value = variables.get(name, "")
        if value and not value.startswith("^") and not names_interface(value, there):
            remedy = f"set {name} to an interface of this host: {', '.join(there)}"
            yield Finding("variables", f"{name}={value}: this host has no such network interface", WRONG, remedy)


def names_interface(value: str, there: Sequence[str]) -> bool:
    """True if `value` names an interface of the host, as NCCL and gloo read it: a list of beginnings of names, or after
    `=` a list of whole names."""
    is_exact = value.startswith("=")
    names = value.removeprefix("=").split(",")
    return any(found == name if is_exact else found.startswith(name) for name in names for found in there)


def _different_variables(answers: Sequence[Answer]) -> Iterator[Finding]:
    names = sorted({name for answer in answers for name in answer.facts["variables"]})
    settings = [Answer(a.place, {name: a.facts["variables"].get(name, "not set") for name in names}) for a in answers]
    rows: list[Finding] = []
    for name in names:
        if not OF_ONE_HOST.search(name):
            rows += differences(settings, name, "variables", WARNING, f"set {name} alike on all ranks")
    yield from rows
    if not rows:
        shown = [f"{n}={v}" for a in settings[:1] for n, v in a.facts.items() if n.startswith(("NCCL_", "GLOO_"))]
        yield Finding("variables", ", ".join(shown) or "none of NCCL_*, GLOO_* is set")
