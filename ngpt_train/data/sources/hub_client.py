"""Requests to the hub, each with a deadline. Passing errors are tried again until then, and content is verified.

huggingface_hub gives the session, the token, the addresses of files and the reading of rate limits. Its own listings
and downloads have no deadline and do not verify content (docs/decisions/0010-the-hub-with-a-deadline.md).
"""

from __future__ import annotations

import contextlib
import email.utils
import hashlib
import itertools
import json
import logging
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TypeVar
from urllib.parse import quote, urlsplit

from ngpt_train.core.errors import DataError
from ngpt_train.data.sources.source import FetchError

if TYPE_CHECKING:
    import httpx2

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Seconds. A wait is drawn at random below a limit, so that ranks do not return together. The limit is FIRST_WAIT at
# first, doubles with each attempt, and ends at LONGEST_WAIT.
FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0
# Not random's own generator: ranks with the same seed would return at the same moment.
JITTER = random.SystemRandom()
ELSEWHERE = "text that is on this machine needs no network: data=local, data=tokens, data=embedded"


class HubFile(NamedTuple):
    """A file as listed. etag: sha256 of a large file, git's blob id (SHA-1) of a small file."""

    size: int
    etag: str


class _PassingProblem(Exception):
    """A problem that may be gone at the next attempt.
    wait: seconds asked for by the server. reached: True if a hub has answered."""

    def __init__(self, problem: str, wait: float = 0.0, reached: bool = True) -> None:
        super().__init__(problem)
        self.wait, self.reached = wait, reached


def endpoint() -> str:
    """The hub's address: HF_ENDPOINT as it is now. huggingface_hub reads it only once. Raises DataError."""
    address = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    if urlsplit(address).scheme not in ("http", "https"):
        raise DataError(f"HF_ENDPOINT={address}: no address; it begins with https://, or unset it for the public hub")
    return address


@dataclass(frozen=True)
class HubClient:
    """One data set of the hub. fetch_minutes: the time limit of each listing and each file, retries included."""

    repo: str
    fetch_minutes: float

    def commit(self, revision: str | None) -> str:
        """The commit of a branch, tag or commit. None is the newest commit. Raises FetchError, at once without a
        network."""
        path = f"/revision/{quote(revision, safe='')}" if revision is not None else ""
        url = f"{endpoint()}/api/datasets/{self.repo}{path}"
        what = f"data.revision={revision or 'null'}"
        return self._json(url, what, lambda info: str(info["sha"]), at_start=True)[0]

    def files(self, commit: str) -> dict[str, HubFile]:
        """All files of a commit by path. Raises FetchError."""
        found: dict[str, HubFile] = {}
        url: str | None = f"{endpoint()}/api/datasets/{self.repo}/tree/{commit}?recursive=true"
        while url is not None:
            files, url = self._json(url, "the list of its files", _files)
            found |= files
        return found

    def download(self, commit: str, path: str, file: HubFile, target: Path) -> None:
        """Writes a file of a commit to `target`. A broken transfer goes on where it stopped. Raises FetchError if the
        file cannot be reached or differs from the list, OSError if `target` cannot be written."""
        name, url = self._file(commit, path)
        logger.info("fetching %s (%.0f MB)", name, file.size / 1e6)
        with target.open("wb") as out:
            partial = _Partial(out, file)
            self._persist(name, lambda deadline: self._receive(name, url, partial, deadline))

    def try_file(self, commit: str, path: str) -> None:
        """Reads the first piece of a file. Files come from other servers than lists, and a firewall may block them
        alone. Raises FetchError."""
        name, url = self._file(commit, path)

        def attempt(deadline: float) -> None:
            with self._request(name, url, deadline, {}) as response:
                next(_chunks(response, deadline), None)

        self._persist(name, attempt, at_start=True)

    def _file(self, commit: str, path: str) -> tuple[str, str]:
        """The name of a file, for messages, and its address."""
        from huggingface_hub import hf_hub_url

        url = hf_hub_url(self.repo, path, repo_type="dataset", revision=commit, endpoint=endpoint())
        return f"{self.repo}@{commit}:{path}", url

    def _receive(self, name: str, url: str, partial: _Partial, deadline: float) -> None:
        if partial.received < partial.file.size:
            headers = {"Range": f"bytes={partial.received}-"} if partial.received else {}
            with self._request(name, url, deadline, headers) as response:
                if headers and response.status_code != 206:
                    partial.restart()
                if response.status_code == 416:
                    raise _PassingProblem("HTTP 416, the rest of the file cannot be had alone")
                for chunk in _chunks(response, deadline):
                    partial.write(chunk)
        partial.check()

    def _json(self, url: str, what: str, parse: Callable[[Any], T], at_start: bool = False) -> tuple[T, str | None]:
        """The parsed answer and the address of the next page. Raises FetchError."""

        def attempt(deadline: float) -> tuple[T, str | None]:
            with self._request(f"{self.repo}, {what}", url, deadline, {}) as response:
                body = b"".join(_chunks(response, deadline))
            try:
                following = response.links.get("next", {}).get("url")
                return parse(json.loads(body)), following and _at_endpoint(following)
            except (ValueError, LookupError, TypeError, AttributeError):
                raise _PassingProblem(f"what answers at {endpoint()} is no hub", reached=False) from None

        return self._persist(f"{self.repo}, {what}", attempt, at_start)

    def _persist(self, name: str, attempt: Callable[[float], T], at_start: bool = False) -> T:
        """The result of `attempt(deadline)`, which is tried again until the deadline.
        at_start: True does not wait for a hub that cannot be reached. Raises FetchError."""
        seconds = 60 * self.fetch_minutes
        start = time.monotonic()
        before = ""
        for n in itertools.count(1):
            try:
                return attempt(start + seconds)
            except _PassingProblem as problem:
                # At most a tenth of the time limit, so that the last wait does not waste much of it.
                longest = min(FIRST_WAIT * 2 ** min(n - 1, 10), LONGEST_WAIT, seconds / 10)
                wait = problem.wait + JITTER.uniform(0, longest)
                patience = seconds if problem.reached or not at_start else 0.0
                passed = time.monotonic() - start
                if passed + wait >= patience:
                    history = f" (before: {before})" if before not in ("", str(problem)) else ""
                    asked = f", and the hub asks for {problem.wait:.0f} s more" if problem.wait else ""
                    attempts = f"{n} attempt{'s' if n > 1 else ''}"
                    slow = f" if it is only slow, set data.fetch_minutes above {self.fetch_minutes:g};"
                    raise FetchError(
                        f"{name}: {problem}{history}; given up after {attempts} in {passed:.0f} s{asked}. "
                        f"Check the network and {endpoint()};{slow if patience == seconds else ''} {ELSEWHERE}"
                    ) from None
                before = str(problem)
                logger.warning("%s: %s; attempt %d failed, the next one in %.1f s", name, problem, n, wait)
                time.sleep(wait)
        raise AssertionError("counts for ever")

    @contextlib.contextmanager
    def _request(self, name: str, url: str, deadline: float, headers: dict[str, str]) -> Iterator[httpx2.Response]:
        """A response to read from. Raises _PassingProblem, also during the reading, or FetchError."""
        import httpx2
        from huggingface_hub import constants, get_session
        from huggingface_hub.errors import OfflineModeIsEnabled

        timeout = min(constants.HF_HUB_DOWNLOAD_TIMEOUT, max(deadline - time.monotonic(), 0.1))
        try:
            with get_session().stream(
                "GET", url, headers=_headers() | headers, timeout=timeout, follow_redirects=True
            ) as response:
                if response.status_code >= 400 and response.status_code != 416:
                    self._refused(name, response)
                yield response
        except OfflineModeIsEnabled:
            raise FetchError(
                f"{name}: HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE) forbids requests to the hub; unset it; {ELSEWHERE}"
            ) from None
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.ProxyError) as error:
            raise _PassingProblem(f"no connection to {endpoint()} ({error})", reached=False) from None
        except httpx2.TimeoutException:
            raise _PassingProblem(f"nothing arrived for {timeout:.3g} s") from None
        except httpx2.HTTPError as error:
            raise _PassingProblem(f"the connection broke ({error or type(error).__name__})") from None

    def _refused(self, name: str, response: httpx2.Response) -> None:
        """Raises the error of a status. Messages name no address, because addresses of redirects are signed."""
        status, code = response.status_code, response.headers.get("X-Error-Code")
        said = f"HTTP {status} {response.headers.get('X-Error-Message') or response.reason_phrase}".rstrip()
        if status in (408, 425, 429) or status >= 500:
            raise _PassingProblem(said, wait=_wait_asked_for(response))
        page = f"{endpoint()}/datasets/{self.repo}"
        token = "the token that was sent gives no access" if "authorization" in _headers() else "no token was sent"
        if code == "RevisionNotFound":
            fix = f"no such commit, branch or tag; check data.revision at {page}"
        elif code == "EntryNotFound":
            fix = "the file is gone; a new run can take another data.revision"
        elif code == "GatedRepo" or status == 403:
            fix = f"{token}; accept the terms at {page} and set HF_TOKEN to a token of that account"
        elif status == 401:
            fix = f"{token}; check data.repo, and set HF_TOKEN if the data set is private or gated"
        else:
            fix = f"check data.repo, whose page would be {page}"
        raise FetchError(f"{name}: {said}; {fix}")


class _Partial:
    """A file that arrives, and the hash of its bytes so far."""

    def __init__(self, out: BinaryIO, file: HubFile) -> None:
        self.file, self._out = file, out
        self._begin()

    def restart(self) -> None:
        self._out.seek(0)
        self._out.truncate()
        self._begin()

    def _begin(self) -> None:
        self.received = 0
        self._digest = hashlib.sha256()
        if len(self.file.etag) == 40:
            self._digest = hashlib.sha1(b"blob %d\0" % self.file.size, usedforsecurity=False)

    def write(self, chunk: bytes) -> None:
        self.received += len(chunk)
        if self.received > self.file.size:  # an endless body would fill the disk
            self.restart()
            raise _PassingProblem(f"more than the {self.file.size} bytes of the file arrived")
        self._out.write(chunk)
        self._digest.update(chunk)

    def check(self) -> None:
        self._out.flush()
        if self.received < self.file.size:
            raise _PassingProblem(f"the connection ended after {self.received} of {self.file.size} bytes")
        if (found := self._digest.hexdigest()) != self.file.etag:
            self.restart()
            raise _PassingProblem(f"what arrived has the hash {found}, not {self.file.etag}")


def _files(entries: list[dict[str, Any]]) -> dict[str, HubFile]:
    """The files on a page of a tree, without its directories."""
    stored = {entry["path"]: entry.get("lfs") or entry for entry in entries if entry["type"] == "file"}
    return {path: HubFile(int(file["size"]), str(file["oid"])) for path, file in stored.items()}


def _chunks(response: httpx2.Response, deadline: float) -> Iterator[bytes]:
    """The body as it arrives, until the deadline. A trickling connection never exceeds the time limit of a read."""
    n = 0
    for chunk in response.iter_bytes():
        if time.monotonic() > deadline:
            raise _PassingProblem(f"slow: the time was up after {n} bytes")
        yield chunk
        n += len(chunk)


def _headers() -> dict[str, str]:
    """Not huggingface_hub's own headers: to build them it asks the hub for a list, and keeps the list in HF_HOME."""
    from huggingface_hub import constants, get_token

    # identity, because a compressed body could not be continued in the middle.
    headers = {"accept-encoding": "identity", "user-agent": "ngpt-train"}
    if not constants.HF_HUB_DISABLE_IMPLICIT_TOKEN and (token := get_token()):
        headers["authorization"] = f"Bearer {token}"
    return headers


def _wait_asked_for(response: httpx2.Response) -> float:
    """Seconds of a Retry-After header or, at the hub's rate limit, of a RateLimit header. 0 without either."""
    from huggingface_hub.utils import parse_ratelimit_headers

    value = response.headers.get("Retry-After", "").strip()
    if value.isdecimal():
        return float(value)
    with contextlib.suppress(ValueError, TypeError):
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    limit = parse_ratelimit_headers(response.headers) if response.status_code == 429 else None
    return float(limit.reset_in_seconds) if limit is not None and limit.remaining == 0 else 0.0


def _at_endpoint(url: str) -> str:
    """The address of the next page at our endpoint. A mirror may name the hub itself, which must not see its token."""
    parts = urlsplit(url)
    return url if url.startswith(f"{endpoint()}/") else f"{endpoint()}{parts.path}?{parts.query}"
