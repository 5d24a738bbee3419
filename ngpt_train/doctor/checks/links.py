"""Measures collectives between ranks, and compares them with the speed of the links."""

import fcntl
import os
import re
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ngpt_train.config.schema import Config
from ngpt_train.core.files import text_of
from ngpt_train.distributed.world import resolve_device
from ngpt_train.doctor.bounded import Report
from ngpt_train.doctor.findings import OK, WARNING, WRONG, Answer, Finding, Place, gb, unchecked
from ngpt_train.doctor.rank_store import connection, join, places_told, tell, told
from ngpt_train.kernels.check.kernel_findings import nvidia_smi

GATHER_SECONDS, CONNECT_SECONDS = 5.0, 3.0
SMALL, LARGE_ON_CPU, LARGE_ON_GPU = 1 << 20, 1 << 24, 1 << 28  # bytes of a measurement
MEASURED_SECONDS = 1.0  # limit of one measurement
ENOUGH = 0.3  # a smaller share of the link's speed is a warning
PCIE_LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.97e9, 5: 3.94e9, 6: 7.56e9}  # bytes a second, by generation
BLOCKED = (
    "open the ports between the hosts (gloo and NCCL use any above 1024), and set GLOO_SOCKET_IFNAME and "
    "NCCL_SOCKET_IFNAME to the interface of their common network"
)


def look(config: Config, place: Place, seconds: float, report: Report) -> None:
    """Reads the speed of the links, then measures collectives over them. A collective call."""
    if place.size == 1:
        return
    device = resolve_device(config.train.device, place.local_rank)
    store = connection(place)
    report(device=device.type, links=link_speeds(device))
    places = places_told(store, place.size)
    first_ranks = [other.rank for other in places if other.speaks_for_host]
    if place.speaks_for_host and len(first_ranks) > 1:
        report(unreachable=unreachable(place, store, first_ranks))
    join(place, "links", device, seconds / 2)
    report(joined=True)
    if len(first_ranks) > 1:
        between = dist.new_group(first_ranks)
        if place.rank in first_ranks:
            report(between=bandwidths(device, between))
    for node in sorted({other.node for other in places}):
        of_node = [other.rank for other in places if other.node == node]
        if len(of_node) > 1:
            group = dist.new_group(of_node)
            if place.rank in of_node:
                report(within=bandwidths(device, group))
    if 1 < len(first_ranks) < place.size:
        report(all=bandwidths(device, dist.group.WORLD))


def bandwidths(device: torch.device, group: Any) -> dict[str, float]:
    """The bus bandwidth of all-reduce and all-gather in bytes a second, as nccl-tests defines it: 2 (n - 1) / n and
    (n - 1) / n of the bytes, divided by the seconds."""
    n = dist.get_world_size(group)
    most = LARGE_ON_GPU if device.type == "cuda" else LARGE_ON_CPU
    found = {}
    for name, share in (("all-reduce", 2 * (n - 1) / n), ("all-gather", (n - 1) / n)):
        _seconds(name, SMALL, device, group)  # connects
        slow = _seconds(name, SMALL, device, group)
        # The bytes that fit into a third of the time at the speed of the small message.
        n_bytes = max(SMALL, min(most, int(SMALL * MEASURED_SECONDS / 3 / slow)))
        found[name] = share * n_bytes / min(_seconds(name, n_bytes, device, group) for _ in range(3))
    return found


def _seconds(name: str, n_bytes: int, device: torch.device, group: Any) -> float:
    """The seconds of one collective on the slowest rank."""
    n = dist.get_world_size(group)
    part = torch.zeros(n_bytes // 4 // n, device=device)
    whole = torch.zeros(n * len(part), device=device)
    _wait(device)
    begin = time.perf_counter()
    if name == "all-reduce":
        dist.all_reduce(whole, group=group)
    else:
        dist.all_gather_into_tensor(whole, part, group=group)
    _wait(device)
    taken = torch.tensor([time.perf_counter() - begin], device=device)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX, group=group)
    return max(1e-9, taken.item())


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# Connections between hosts


def unreachable(place: Place, store: dist.Store, first_ranks: Sequence[int]) -> dict[str, str]:
    """Tries to connect to every other host. Returns the error by the first rank of the host, as text."""
    with socket.create_server(("", 0), backlog=1024) as server:
        tell(store, place, "listens", [own_address(), server.getsockname()[1]])
        others = told(store, "listens", [rank for rank in first_ranks if rank != place.rank], GATHER_SECONDS)

        def attempt(at: tuple[str, int]) -> str:
            address, port = at
            try:
                socket.create_connection((address, port), timeout=CONNECT_SECONDS).close()
            except OSError as error:
                own_name = ", to which it resolves its own name" if address.startswith("127.") else ""
                return f"{address}{own_name}: {error.strerror or error}"
            return ""

        with ThreadPoolExecutor(max_workers=64) as pool:
            problems = list(pool.map(attempt, others.values()))
        tell(store, place, "connected", True)
        told(store, "connected", first_ranks, 2 * CONNECT_SECONDS)  # the others may still need this server
    return {str(other): problem for other, problem in zip(others, problems, strict=True) if problem}


def own_address() -> str:
    """gloo's address for other hosts: of the interface GLOO_SOCKET_IFNAME, or else of the host's name."""
    if interface := os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0].removeprefix("="):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            answer = fcntl.ioctl(asking.fileno(), 0x8915, struct.pack("256s", interface[:15].encode()))  # SIOCGIFADDR
        return socket.inet_ntoa(answer[20:24])
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:  # gloo then takes the loopback interface
        return "127.0.0.1"


# Nominal speeds of links, in bytes a second and one direction; None if the system does not tell


def link_speeds(device: torch.device) -> dict[str, float | None]:
    """The nominal speeds of this rank's GPU links and of this host's networks."""
    found = {"InfiniBand": infiniband(), "Ethernet": ethernet()}
    if device.type == "cuda":
        found |= {"NVLink": nvlink(device), "PCIe": pcie(device)}
    return found


def infiniband(system: Path = Path("/sys")) -> float | None:
    """The sum of all active InfiniBand or RoCE ports."""
    ports = system.glob("class/infiniband/*/ports/*")
    rates = [text_of(port / "rate") for port in ports if "ACTIVE" in text_of(port / "state")]
    return sum(float(rate.split()[0]) for rate in rates if rate) * 1e9 / 8 or None


def ethernet(system: Path = Path("/sys")) -> float | None:
    """The fastest active interface."""
    up = [text_of(at / "speed") for at in system.glob("class/net/*") if text_of(at / "operstate") == "up"]
    return max((int(speed) for speed in up if speed.isdecimal()), default=0) * 1e6 / 8 or None  # -1: unknown


def nvlink(device: torch.device) -> float | None:
    """The sum of a GPU's links, from nvidia-smi."""
    lines = nvidia_smi("nvlink", "--status", "--id", _uuid(device))
    return sum(float(speed) * 1e9 for speed in re.findall(r"Link \d+: ([\d.]+) GB/s", lines)) or None


def pcie(device: torch.device) -> float | None:
    """The speed of a GPU's slot."""
    query = ("--query-gpu=pcie.link.gen.max,pcie.link.width.current", "--format=csv,noheader,nounits")
    numbers = re.findall(r"\d+", nvidia_smi(*query, "--id", _uuid(device)))
    return PCIE_LANE.get(int(numbers[0]), 0) * int(numbers[1]) or None if len(numbers) == 2 else None


def _uuid(device: torch.device) -> str:
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


# Verdicts


def judge(answers: Sequence[Answer]) -> Iterator[Finding]:
    """Hosts without a connection, and collectives much slower than their links."""
    if len(answers) <= 1:
        yield Finding("links", "one rank, which talks to nobody")
        return
    places = {answer.place.rank: answer.place for answer in answers}
    for answer in answers:
        for other, problem in answer.facts.get("unreachable", {}).items():
            found = f"cannot connect to {places[int(other)].host} ({problem})"
            yield Finding("links", found, WRONG, BLOCKED, (answer.place,))
    if failed := [answer for answer in answers if answer.problem]:
        stage = "" if failed[0].facts.get("joined") else "the ranks do not come together: "
        where = tuple(answer.place for answer in failed)
        yield unchecked("links", f"{stage}{failed[0].problem}", BLOCKED, WRONG, where)
    for node in sorted({answer.place.node for answer in answers}):
        of_node = [answer for answer in answers if answer.place.node == node]
        yield from _bandwidth("within", "within a host", of_node)
    yield from _bandwidth("between", "between hosts", answers)
    yield from _bandwidth("all", "all ranks", answers)


def _bandwidth(name: str, words: str, answers: Sequence[Answer]) -> Iterator[Finding]:
    answers = [answer for answer in answers if name in answer.facts]
    if not answers:
        return
    kind, should = _expected(name, answers)
    slowest = {key: min(answer.facts[name][key] for answer in answers) for key in answers[0].facts[name]}
    found = ", ".join(f"{key} {gb(speed)}/s" for key, speed in slowest.items())
    found += f" over {len(answers)} ranks; " + (f"{kind} should give {gb(should)}/s" if should else kind)
    places = tuple(answer.place for answer in answers) if name == "within" else ()
    remedy = "NCCL_DEBUG=INFO says which network NCCL takes: set NCCL_SOCKET_IFNAME and NCCL_IB_HCA"
    if name == "within":
        remedy = "look at `nvidia-smi topo -m`, and at NCCL_P2P_DISABLE and NCCL_SHM_DISABLE"
    verdict = WARNING if should and slowest["all-reduce"] < ENOUGH * should else OK
    yield Finding(f"links {words}", found, verdict, remedy, places)


def _expected(name: str, answers: Sequence[Answer]) -> tuple[str, float | None]:
    """The name of the fastest kind of link that all ranks have, and the slowest of these links."""
    on_gpu = all(answer.facts["device"] == "cuda" for answer in answers)
    if name == "within":
        kinds: tuple[str, ...] = ("NVLink", "PCIe") if on_gpu else ()
        unknown = "the speed of the links is unknown" if on_gpu else "through the memory of the host"
    else:
        kinds = ("InfiniBand", "Ethernet") if on_gpu else ("Ethernet",)
        unknown = "the speed of the network is unknown"
    for kind in kinds:
        speeds = [answer.facts["links"].get(kind) for answer in answers]
        if all(speeds):
            return kind, min(speed for speed in speeds if speed)
    return unknown, None
