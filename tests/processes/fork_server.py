"""Processes of the trainer that need not import it: forked from one that has.

Importing the trainer costs two seconds of CPU, more than most runs of the tests need. The server imports it once for a
pytest process, then forks for every request: a fresh process with its own arguments, environment, directory, stdout
and stderr, which ends as `python -m ngpt_train` does. The server itself composes configurations and runs nothing, so
no test sees another.

torchrun and its ranks are forks as well (torchrun.py). A fork cannot show everything. These need a real process
(test_command_line.py, test_slurm.py): what an import does and which variables it reads, and what depends on the seed of
Python's hashes, which all forks share. Nor is the picture of a run's curves drawn, which takes a third of a short run's
time, unless NGPT_TESTS_CURVES is set.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ngpt_train.config import load_config

ROOT = Path(__file__).parents[2]
# Not pyarrow: its import starts a thread, and a fork would have that thread's locks without the thread.
IMPORTED = (
    *(f"ngpt_train.verbs.{verb}" for verb in ("train", "evaluate", "generate", "prepare", "plan")),
    "matplotlib.pyplot",
    "rich.progress",
    "sentencepiece",
    "torch._dynamo",  # which DistributedDataParallel and FSDP2 import at their first use
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "tests.processes.test_equality",  # and with it all that the ranks of `on_ranks` need
)
# They read environment variables while they are imported, and tests set those.
NOT_IMPORTED = ("datasets", "huggingface_hub", "wandb")
NUMBER = struct.Struct("q")  # what the server answers: the process id, then, at the end, the exit code


def main() -> None:
    """The server: requests come over the socket whose descriptor is argv[1], until the other end is closed."""
    control = socket.socket(fileno=int(sys.argv[1]))
    for module in IMPORTED:
        importlib.import_module(module)
    # Hydra looks for its plug-ins once, and words and groups of these arguments are not read again in each fork.
    for more in ([], ["parallel=ddp"], ["parallel=fsdp"]):
        load_config(["model=ngpt", "scale=debug", "data=local", "data.path=x", "tokenizer=bytes", *more])
    assert not set(NOT_IMPORTED) & set(sys.modules)
    threads = [Path(f"/proc/self/task/{task}/comm").read_text() for task in os.listdir("/proc/self/task")]
    assert len(threads) == 1, threads
    serve(control)()


def serve(control: socket.socket) -> Callable[[], None]:
    """Forks for each request. Returns in the forked processes alone, with what they are to do."""
    child_ended, on_child = os.pipe()
    os.set_blocking(on_child, False)
    signal.set_wakeup_fd(on_child)  # not by the handler, which may run after the next `select`
    signal.signal(signal.SIGCHLD, lambda *_: None)
    answers: dict[int, int] = {}  # process id -> where its exit code is awaited
    gc.collect()
    gc.freeze()  # a collection in a fork would otherwise copy every page
    while True:
        ready, _, _ = select.select([control, child_ended], [], [])
        if child_ended in ready:
            os.read(child_ended, 4096)
            while answers and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                answer = answers.pop(ended[0])
                os.write(answer, NUMBER.pack(os.waitstatus_to_exitcode(ended[1])))
                os.close(answer)
        if control in ready:
            header, descriptors, _, _ = socket.recv_fds(control, NUMBER.size, 3)
            if not header:
                os._exit(0)
            request = json.loads(control.recv(NUMBER.unpack(header)[0], socket.MSG_WAITALL))
            answer, *outputs = descriptors
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for descriptor in (child_ended, on_child, answer, *answers.values()):
                    os.close(descriptor)
                control.close()
                return functools.partial(become, request, outputs)
            answers[pid] = answer
            os.write(answer, NUMBER.pack(pid))
            for descriptor in outputs:
                os.close(descriptor)


def become(request: dict[str, Any], outputs: Sequence[int]) -> None:
    """Does in this process what `python -m MODULE ARGUMENTS` does."""
    for target, descriptor in zip((1, 2), outputs, strict=True):
        os.dup2(descriptor, target)
        os.close(descriptor)
    # New ones, because what the old ones have found out about their files holds no longer.
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.chdir(request["directory"])
    execute([request["module"], *request["arguments"]], request["environment"])


def execute(command: Sequence[str], variables: Mapping[str, str]) -> None:
    """Runs a module in a session of its own, and ends this process."""
    os.setsid()
    os.environ.clear()
    os.environ.update(variables)
    if "NGPT_TESTS_CURVES" not in os.environ:
        sys.modules["ngpt_train.verbs.train"].plot_run = lambda directory: None  # type: ignore[attr-defined]
    code = 1
    try:
        run_main(command)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    # The interpreter's end, but for taking down every module, which costs more than most of the runs.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_main(command: Sequence[str]) -> None:
    sys.argv = list(command)
    runpy.run_module(command[0], run_name="__main__", alter_sys=True)


def environment() -> dict[str, str]:
    """That of all processes of the tests: one thread and no GPU, Triton in its interpreter."""
    return os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}


@functools.cache
def server() -> socket.socket:
    """The socket to the server of this pytest process, which is started by the first test that asks."""
    control, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.processes.fork_server", str(theirs.fileno())],
            cwd=ROOT,
            env=environment(),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
    atexit.register(lambda: (control.close(), process.wait()))
    return control


class Forked:
    """A process that the server has forked. `code` is None while it runs."""

    def __init__(
        self, module: str, arguments: Sequence[str], variables: dict[str, str], output: int, errors: int
    ) -> None:
        request = {"module": module, "arguments": list(arguments), "directory": os.getcwd()}
        request["environment"] = environment() | variables
        content = json.dumps(request).encode()
        self.answer, theirs = os.pipe()
        control = server()
        socket.send_fds(control, [NUMBER.pack(len(content))], [theirs, output, errors])
        control.sendall(content)
        os.close(theirs)
        self.code: int | None = None
        self.pid = self._read()

    def _read(self) -> int:
        number = os.read(self.answer, NUMBER.size)
        assert number, "the fork server is gone"
        return int(NUMBER.unpack(number)[0])

    def wait(self, seconds: float) -> int | None:
        """The exit code, or None where it still runs after so many seconds."""
        if self.code is None and select.select([self.answer], [], [], max(0.0, seconds))[0]:
            self.code = self._read()
            os.close(self.answer)
        return self.code

    def end(self) -> None:
        """SIGTERM, and what does not heed it is killed."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.wait(0) is None:
                os.kill(self.pid, number)
                self.wait(10)


class Started(Forked):
    """A process that goes on beside the test, with what a test needs of subprocess.Popen."""

    def __init__(self, command: Sequence[str], file: Path | None = None, **variables: str) -> None:
        """file: to which its output is added, in the place of a pipe."""
        reader, writer = os.pipe()
        self.stdout = open(reader, "rb", buffering=0)  # noqa: SIM115
        with open(writer, "wb") if file is None else file.open("ab") as output:
            super().__init__(command[0], command[1:], variables, output.fileno(), output.fileno())

    def poll(self) -> int | None:
        return super().wait(0)

    returncode = property(poll)

    def wait(self, timeout: float = 600) -> int:
        if (code := super().wait(timeout)) is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return code

    def communicate(self, timeout: float = 600) -> tuple[str, None]:
        """What it and the processes that it has started have not yet printed, until their end."""
        deadline, content = time.monotonic() + timeout, b""
        while select.select([self.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
            if not (more := self.stdout.read(65536)):
                self.wait(max(0.0, deadline - time.monotonic()))
                return content.decode(errors="replace"), None
            content += more
        raise subprocess.TimeoutExpired(str(self.pid), timeout, content)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    terminate = functools.partialmethod(send_signal, signal.SIGTERM)
    kill = functools.partialmethod(send_signal, signal.SIGKILL)


def run(
    module: str, arguments: Sequence[str], ranks: int | None = None, timeout: float = 600
) -> subprocess.CompletedProcess[str]:
    """`python -m MODULE ARGUMENTS` to its end; with `ranks`, as under torchrun: so many processes with its variables,
    and where one fails the others are ended."""
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        running = [
            Forked(module, arguments, variables, output.fileno(), errors.fileno())
            for variables in (rank_variables(ranks) if ranks else [{}])
        ]
        processes = list(running)
        try:
            while running and not any(process.code for process in processes):
                left = deadline - time.monotonic()
                if not select.select([process.answer for process in running], [], [], max(0.0, left))[0]:
                    raise subprocess.TimeoutExpired([module, *arguments], timeout)
                running = [process for process in running if process.wait(0) is None]
        finally:
            code = next((process.code for process in processes if process.code), 0)
            for process in running:
                process.end()
        output.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess([module, *arguments], code, output.read(), errors.read())


def rank_variables(ranks: int) -> list[dict[str, str]]:
    """What torchrun puts into the environment of each rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    common |= {"TORCHELASTIC_RUN_ID": "tests", "GROUP_RANK": 0}
    return [{key: str(x) for key, x in (common | {"RANK": n, "LOCAL_RANK": n}).items()} for n in range(ranks)]


if __name__ == "__main__":
    main()
