"""Hosts of a test's own: a network namespace each, with a name and an address, on a switch that the test can slow down
or cut.

They share this machine's file system, as the hosts of a cluster share one, and its clock and processors. It takes root.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.processes import fork_server

PORT = 29400
# The interface of a host has the same name everywhere, as on most clusters.
INTERFACE = "eth0"
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000


class Host:
    """One host. Its commands run in its network and under its name."""

    def __init__(self, name: str, number: int, names: Path, prefix: str) -> None:
        self.name, self.address = name, f"10.77.0.{number}"
        self._names, self.namespace, self.port = names, f"{prefix}-{name}", f"to-{name}"
        self._switch = f"{prefix}-switch"

    def connect(self) -> None:
        """Makes the host, and its cable to the switch."""
        _ip("netns", "add", self.namespace)
        cable = ("type", "veth", "peer", "name", INTERFACE, "netns", self.namespace)
        _ip("-n", self._switch, "link", "add", self.port, *cable)
        _ip("-n", self.namespace, "addr", "add", f"{self.address}/24", "dev", INTERFACE)
        for interface in ("lo", INTERFACE):
            _ip("-n", self.namespace, "link", "set", interface, "up")
        _ip("-n", self._switch, "link", "set", self.port, "up")
        self.plug()

    def plug(self) -> None:
        _ip("-n", self._switch, "link", "set", self.port, "master", "switch")

    def cut(self) -> None:
        """Packets to and from this host are lost; nobody is told."""
        _ip("-n", self._switch, "link", "set", self.port, "nomaster")

    def slow(self, kilobits: int | None) -> None:
        """So many kilobits a second reach this host; None: as many as can."""
        limit = ["tbf", "rate", f"{kilobits}kbit", "burst", "32kb", "latency", "1s"] if kilobits else []
        command = ["tc", "-n", self._switch, "qdisc", "add" if limit else "del", "dev", self.port, "root", *limit]
        subprocess.run(command, check=True, capture_output=True)

    def start(self, command: Sequence[str], output: Path, **environment: str) -> fork_server.Started:
        """A module that runs on this host; what it prints is added to a file."""
        inside = ["tests.processes.hosts", self.namespace, self.name, str(self._names), *command]
        return fork_server.Started(inside, output, **{"GLOO_SOCKET_IFNAME": INTERFACE} | environment)

    def pids(self) -> list[int]:
        return [int(pid) for pid in _ip("netns", "pids", self.namespace).split()]

    def kill(self, quietly: bool) -> None:
        """Ends all its processes at once. quietly: as a host that loses its power, which closes no connection."""
        if quietly:
            self.cut()
        # Stopped first, so that none can tell of another's death.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in self.pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        while self.pids():
            time.sleep(0.05)


def torchrun(head: Host, program: Sequence[str], ranks: int, restarts: int, name: str) -> list[str]:
    """torchrun of each of two hosts."""
    named = [f"--rdzv-id={name}"] if name else []
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint={head.name}:{PORT}", *named]
    launcher = ["tests.processes.torchrun", "--nnodes=2", f"--nproc-per-node={ranks}"]
    return [*launcher, *rendezvous, f"--max-restarts={restarts}", "-m", *program]


@contextlib.contextmanager
def hosts(directory: Path, *names: str) -> Iterator[list[Host]]:
    """Hosts with these names. Skips the test where this machine does not permit them."""
    import pytest  # not in the processes of the hosts

    prefix = f"ngpt{os.getpid()}"
    file = directory / "hosts"
    made = [Host(name, number, file, prefix) for number, name in enumerate(names, 1)]
    file.write_text("127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in made))
    missing = [tool for tool in ("ip", "tc", "unshare", "mount", "hostname") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"no hosts of our own: {', '.join(missing)} missing")
    try:
        try:
            _ip("netns", "add", f"{prefix}-switch")
            _ip("-n", f"{prefix}-switch", "link", "add", "switch", "type", "bridge")
            _ip("-n", f"{prefix}-switch", "link", "set", "switch", "up")
            for host in made:
                host.connect()
            subprocess.run(["unshare", "--uts", "--mount", "true"], check=True, capture_output=True)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no hosts of our own: {' '.join(error.cmd)}: {error.stderr.decode().strip()}")
        yield made
    finally:
        there = re.findall(rf"^{prefix}-\S+", _ip("netns", "list"), re.MULTILINE)
        for host in made:
            if host.namespace in there:
                host.kill(quietly=False)
        for namespace in there:
            _ip("netns", "del", namespace)


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True).stdout.decode()


def enter(namespace: str, name: str, names: str) -> None:
    """Makes this process one of a host: its network, its name, and the names of the others."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as network:
        if libc.setns(network.fileno(), CLONE_NEWNET) or libc.unshare(CLONE_NEWNS | CLONE_NEWUTS):
            raise OSError(ctypes.get_errno(), f"entering {namespace}")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "--bind", names, "/etc/hosts"], check=True)
    socket.sethostname(name)


if __name__ == "__main__":
    enter(*sys.argv[1:4])
    fork_server.run_main(sys.argv[4:])
