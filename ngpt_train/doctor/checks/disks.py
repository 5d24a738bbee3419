"""run.root and data.cache: are they shared, writable, lockable, large and fast enough?"""

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ngpt_train.config.schema import Config
from ngpt_train.core.errors import ConfigError, DataError
from ngpt_train.core.files import text_of
from ngpt_train.distributed.compilation import machine, why_unusable
from ngpt_train.doctor.bounded import Report
from ngpt_train.doctor.findings import (
    CONFIG,
    MACHINE,
    OK,
    WARNING,
    WRONG,
    Answer,
    Finding,
    Place,
    gb,
    of_each,
    unchecked,
)
from ngpt_train.doctor.rank_store import connection, places_told, tell, told
from ngpt_train.training.checkpoint.catalogue import list_checkpoints
from ngpt_train.training.run_directory import RunDirectory

BLOCK = 1 << 22
MOST_WRITTEN, WRITING_SECONDS = 1 << 28, 3.0  # limits of a measurement
SHOWS_SECONDS = 5.0  # until another host sees a new file: NFS caches directories
LEAST_INODES = 1000
LARGEST_FACTOR = 12  # bytes of a checkpoint for each weight: the weight and Adam's two moments, in fp32
SLOW_SAVE = 120.0  # seconds for a checkpoint; more is a warning
OWN_CLOCK = 2.0  # seconds between a file's time and this host's clock; more is a warning


def look(config: Config, place: Place, token: str, checkpoint_bytes: int, report: Report) -> None:
    """On the first rank of each host. token: a new name, equal on all ranks."""
    run = RunDirectory(config)
    try:
        report(checkpoint=str(run.check(config) or ""), holder=text_of(run.path / "lock"))
    except (ConfigError, DataError) as error:
        report(refused=str(error), code=error.exit_code)
    root = Path(config.run.root).expanduser().absolute()
    report(root=str(root), shared=_see(root, place, token))
    nearest = _existing(root)
    report(space=_space(nearest), kept=len(list_checkpoints(run.checkpoints)))
    cache = Path(config.data.cache).expanduser().absolute()
    problem = _unwritable(_existing(cache))
    report(cache=str(cache), cache_space=_space(_existing(cache)), cache_problem=problem)
    if problem is None:
        report(compile_cache=why_unusable(cache / "compiled" / machine()))
    if place.rank == 0 and _unwritable(nearest) is None:
        # The others would share the disk's time.
        n_bytes = min(MOST_WRITTEN, max(BLOCK, checkpoint_bytes), _space(nearest)["free"] // 2)
        report(speed=_speed(nearest, n_bytes))


def _existing(path: Path) -> Path:
    return next(found for found in (path, *path.parents) if found.exists())


def _unwritable(directory: Path) -> str | None:
    """Writes a file there. Returns the error, or None."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"written")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.strerror or str(error)
    return None


def _see(root: Path, place: Place, token: str) -> dict[str, Any]:
    """Rank 0 writes and locks a file in run.root; every other host looks for it."""
    store = connection(place)
    marker = root / f".ngpt-train-doctor-{token}"
    try:
        return _write_marker(marker, place, store) if place.rank == 0 else _find_marker(marker, store)
    except OSError as error:
        return {"writable": False, "problem": error.strerror or str(error)}
    finally:
        tell(store, place, "marker seen", True)


def _write_marker(marker: Path, place: Place, store: dist.Store) -> dict[str, Any]:
    root = marker.parent
    made = [path for path in (root, *root.parents) if not path.exists()]
    try:
        root.mkdir(parents=True, exist_ok=True)
        with marker.open("w") as file:
            file.write(marker.name)
            file.flush()
            os.fsync(file.fileno())
            seen = {"writable": True, "lock": _lock(file.fileno(), marker), "ahead": _ahead_of_files(marker)}
            tell(store, place, "marker", True)
            first_ranks = [other.rank for other in places_told(store, place.size) if other.speaks_for_host]
            told(store, "marker seen", first_ranks[1:], 2 * SHOWS_SECONDS)
        return seen
    finally:
        with contextlib.suppress(OSError):
            marker.unlink(missing_ok=True)
            for path in made:
                path.rmdir()


def _find_marker(marker: Path, store: dist.Store) -> dict[str, Any]:
    if not told(store, "marker", [0], 2 * SHOWS_SECONDS):
        return {"problem": "rank 0 could not write there"}
    deadline = time.monotonic() + SHOWS_SECONDS
    while not marker.exists() and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            os.listdir(marker.parent)  # makes NFS ask its server again
        time.sleep(0.1)
    if not marker.exists():
        return {"seen": False, "problem": _unwritable(_existing(marker.parent)) or ""}
    problem = _unwritable(marker.parent)
    seen = marker.read_text() == marker.name
    return {"seen": seen, "lock": _lock(None, marker), "writable": problem is None, "problem": problem or ""}


def _lock(own: int | None, marker: Path) -> str:
    """Tries a second lock on rank 0's locked file; it should be refused, as `held`."""
    try:
        if own is not None:
            fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with marker.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return "held"
    except OSError as error:
        return f"no locks ({error.strerror})"
    return "not seen"


def _ahead_of_files(marker: Path) -> float:
    """This host's clock minus the file system's, in seconds."""
    before = time.time()
    os.utime(marker)
    return (before + time.time()) / 2 - marker.stat().st_mtime


def _space(directory: Path) -> dict[str, Any]:
    found = os.statvfs(directory)
    return {
        "free": found.f_bavail * found.f_frsize,
        "inodes": found.f_favail if found.f_files else None,  # some file systems have no limit
        "directory": str(directory),
    }


def _speed(directory: Path, n_bytes: int) -> dict[str, float]:
    """Bytes a second of writing with fsync, and of reading from the disk."""
    block = os.urandom(min(BLOCK, n_bytes))
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".ngpt-train-doctor-") as file:
        begin, written = time.monotonic(), 0
        while written + len(block) <= n_bytes and len(block) and time.monotonic() - begin < WRITING_SECONDS:
            written += file.write(block)
        file.flush()
        os.fsync(file.fileno())
        writing = time.monotonic() - begin
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        begin, read = time.monotonic(), 0
        with open(file.name, "rb", buffering=0) as again:
            while (part := len(again.read(BLOCK))) and time.monotonic() - begin < WRITING_SECONDS:
                read += part
        return {"bytes": written, "write": written / writing, "read": read / max(1e-9, time.monotonic() - begin)}


def judge(config: Config, answers: Sequence[Answer], checkpoint_bytes: int, said: str) -> Iterator[Finding]:
    """said: `checkpoint_bytes` in words."""
    seen_by_all = len(answers) > 1 and all(answer.facts.get("shared", {}).get("seen") for answer in answers[1:])
    yield from of_each(answers, lambda answer: _run(config, answer))
    yield from of_each(answers, lambda answer: _shared(config, answer, seen_by_all))
    yield from of_each(answers, lambda answer: _room(config, answer, checkpoint_bytes, said))
    yield from of_each(answers, lambda answer: _speed_of_saves(answer, checkpoint_bytes))
    yield from of_each(answers, lambda answer: _cache(config, answer))
    for answer in answers:
        if answer.problem:
            remedy = "look whether the file system answers: ls and touch in run.root, on this host"
            verdict = WARNING if "space" in answer.facts else WRONG
            yield unchecked("run.root", answer.problem, remedy, verdict, (answer.place,))


def _run(config: Config, answer: Answer) -> Iterator[Finding]:
    facts = answer.facts
    if refused := facts.get("refused"):
        by_a_lock = "; if that process and its host are gone, delete the file `lock` there"
        remedy = f"as it says{by_a_lock if ' is training in ' in refused else ''}"
        yield Finding("run", refused, WRONG, remedy, code=facts["code"])
    elif "checkpoint" in facts:
        step = Path(facts["checkpoint"]).name
        found = f"goes on from {step}" if step else "begins anew"
        if facts["holder"] and not step:
            found += f"; its lock file names {facts['holder']}, but nobody holds the lock"
        yield Finding("run", f"{config.run.name}: {found}")


def _shared(config: Config, answer: Answer, seen_by_all: bool) -> Iterator[Finding]:
    if (shared := answer.facts.get("shared")) is None:
        return
    name, root = f"run.root={config.run.root}", answer.facts["root"]
    if shared.get("seen") is False:
        found = f"{name}: this host does not see what rank 0 writes there ({root} here)"
        found += f", and cannot write: {shared['problem']}" if shared["problem"] else ""
        remedy = "mount one file system at the same path on all hosts, and name it by its whole path"
        yield Finding("run.root", found, WRONG, remedy, code=CONFIG if shared["problem"] else MACHINE)
    elif not shared.get("writable"):
        found = f"{name}: {root} cannot be written ({shared.get('problem')})"
        remedy = "choose a run.root where this user may write, or mount it read-write"
        yield Finding("run.root", found, WRONG, remedy, code=CONFIG)
    else:
        yield Finding("run.root", f"{root}: can be written" + (", seen by all hosts" if seen_by_all else ""))
    lock = shared.get("lock")
    if lock == "held":
        yield Finding("locks", "a lock keeps a second run out" + (", on other hosts too" if seen_by_all else ""))
    elif lock is not None and shared.get("seen") is not False:
        found = "a lock of rank 0 is not seen here" if lock == "not seen" else f"the file system has {lock}"
        remedy = "mount with locks (NFS without nolock, Lustre with -o flock); until then start no run twice"
        yield Finding("locks", f"{name}: {found}", WARNING, remedy)
    ahead = shared.get("ahead", 0.0)
    if abs(ahead) > OWN_CLOCK:
        which = "ahead of" if ahead > 0 else "behind"
        found = f"this host's clock is {abs(ahead):.1f} s {which} the clock of the file system of run.root"
        yield Finding("clock", found, WARNING, "run NTP on both (chronyc tracking, timedatectl)")


def _room(config: Config, answer: Answer, checkpoint_bytes: int, said: str) -> Iterator[Finding]:
    if "space" not in answer.facts:
        return
    space, checkpoint = answer.facts["space"], config.checkpoint
    # The older checkpoints are kept until the new one is complete.
    more = max(1, checkpoint.keep_last + 1 - answer.facts.get("kept", 0))
    for_good = (config.train.stop_at or config.train.steps) // checkpoint.keep_every if checkpoint.keep_every else 0
    needed, in_the_end = more * checkpoint_bytes, (more + for_good) * checkpoint_bytes
    found = f"{gb(space['free'])} free in {space['directory']}, checkpoints need {gb(needed)} ({more} of {said})"
    verdict, remedy = OK, "make room, lower checkpoint.keep_last, or choose another run.root"
    if space["free"] < needed:
        verdict = WRONG
    elif space["free"] < in_the_end:
        found += f", and checkpoint.keep_every={checkpoint.keep_every} {gb(in_the_end)} by the end"
        verdict, remedy = WARNING, "make room, or raise checkpoint.keep_every"
    yield Finding("free space", found, verdict, remedy)
    if space["inodes"] is not None and space["inodes"] < LEAST_INODES:
        found = f"{space['inodes']} files may still be made in {space['directory']}"
        yield Finding("free space", found, WRONG, "delete small files (df -i), or choose another run.root")


def _speed_of_saves(answer: Answer, checkpoint_bytes: int) -> Iterator[Finding]:
    speed = answer.facts.get("speed")
    if not speed or not speed["bytes"]:
        return
    seconds = checkpoint_bytes / speed["write"]
    found = f"writes {gb(speed['write'])}/s, reads {gb(speed['read'])}/s (on one rank)"
    found += f": {seconds:.3g} s for a checkpoint of {gb(checkpoint_bytes)}"
    remedy = "take a faster file system for run.root, or raise checkpoint.every"
    yield Finding("disk speed", found, WARNING if seconds > SLOW_SAVE else OK, remedy)


def _cache(config: Config, answer: Answer) -> Iterator[Finding]:
    if "cache" not in answer.facts:
        return
    cache, problem = answer.facts["cache"], answer.facts["cache_problem"]
    remedy = "set data.cache to a directory that can be written, with room, on a disk that is not mounted noexec"
    if problem:
        # Prepared tokens are read in place. All other text needs the cache.
        verdict = WARNING if config.data.kind == "tokens" else WRONG
        yield Finding("data.cache", f"{cache}: cannot be written ({problem})", verdict, remedy)
        return
    yield Finding("data.cache", f"{cache}: {gb(answer.facts['cache_space']['free'])} free")
    if unusable := answer.facts.get("compile_cache"):
        found = f"{cache}/compiled {unusable}; torch.compile would use torch's own cache directory"
        yield Finding("compile cache", found, WARNING, remedy)
    elif "compile_cache" in answer.facts:
        yield Finding("compile cache", f"{cache}/compiled can be used")
