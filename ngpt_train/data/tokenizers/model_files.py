"""Model files, from a path, an installed package, or a download with a deadline.

Well-known SentencePiece models are identified by the sha256 of their files.
"""

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

from ngpt_train.core.errors import DataError
from ngpt_train.core.files import read_whole

DOWNLOAD_SECONDS = 30.0
Result = TypeVar("Result")


def read_file(path: str) -> bytes:
    """The content of tokenizer.path. Raises DataError."""
    try:
        return read_whole(Path(path).expanduser())
    except OSError as error:
        raise DataError(f"tokenizer.path={path}: cannot be read ({error.strerror})") from None


def package_file(package: str, name: str) -> Path | None:
    """A file of an installed package, without its import; None if it is not installed."""
    spec = find_spec(package)
    for place in spec.submodule_search_locations or [] if spec is not None else []:
        if (path := Path(place, name)).is_file():
            return path
    return None


def within_deadline(download: Callable[[], Result], message: Callable[[str], str]) -> Result:
    """The result of `download`. If it fails or takes longer than DOWNLOAD_SECONDS, raises DataError(message(reason)).
    tiktoken's requests and the hub's retries would go on for longer than a user waits."""
    result: list[Result] = []
    problem = f"no answer in {DOWNLOAD_SECONDS:g} s"

    def run() -> None:
        nonlocal problem
        try:
            result.append(download())
        except Exception as error:
            problem = type(error).__name__

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(DOWNLOAD_SECONDS)
    if not result:
        raise DataError(message(problem))
    return result[0]


@dataclass(frozen=True)
class Pinned:
    """A well-known model file."""

    name: str
    sha256: str
    vocab_size: int  # may exceed the file's pieces: T5's 100 sentinels come after them
    fetch: Callable[[], bytes]

    def read(self, path: str | None) -> bytes:
        """The file, from `path` if given. Raises DataError if it is not available or is another file."""
        model, where = (self.fetch(), f"tokenizer={self.name}") if path is None else (read_file(path), f"{path}")
        if (found := hashlib.sha256(model).hexdigest()) != self.sha256:
            raise DataError(
                f"{where}: not the model file that tokenizer={self.name} stands for: sha256 {found}, expected "
                f"{self.sha256}. Another SentencePiece model is tokenizer=sentencepiece tokenizer.path=FILE"
            )
        return model


# A copy that needs no account, at a fixed commit.
LLAMA2_COPY = ("NousResearch/Llama-2-7b-chat-hf", "tokenizer.model", "351844e75ed0bcbbe3f10671b3c808d2b83894ee")
# All sizes of T5 have the same file. This is T5's own repository of the smallest size.
T5_COPY = ("google-t5/t5-small", "spiece.model", "df1b051c49625cf57a3d0d8d3863ed4d13564fe4")
MISTRAL_FILE = ("mistral_common", "data/tokenizer.model.v1")


def _download(kind: str, copy: tuple[str, str, str], otherwise: str) -> bytes:
    """A file of the hub. copy: (repository, name, revision); otherwise: what else to choose, for the message. Raises
    DataError."""
    repository, name, revision = copy

    def download() -> bytes:
        from huggingface_hub import get_session, hf_hub_download, hf_hub_url, try_to_load_from_cache

        if not isinstance(try_to_load_from_cache(repository, name, revision=revision), str):
            # Without a network this fails at once, while hf_hub_download tries again and again.
            get_session().head(hf_hub_url(repository, name, revision=revision))
        return Path(hf_hub_download(repository, name, revision=revision)).read_bytes()

    return within_deadline(
        download,
        lambda reason: (
            f"tokenizer={kind}: {name} cannot be downloaded from the hub ({repository}: {reason}). Copy the file here "
            f"and set tokenizer.path=FILE, or choose {otherwise}"
        ),
    )


def _mistral32k() -> bytes:
    path = package_file(*MISTRAL_FILE)
    if path is None:
        raise DataError(
            "tokenizer=mistral32k: the package mistral-common, which holds the model, is not installed or has it no "
            "more. pip install 'ngpt-train[tokenizers]', or set tokenizer.path=FILE"
        )
    return path.read_bytes()


_llama2 = partial(
    _download, "llama2", LLAMA2_COPY, "tokenizer=mistral32k, or tokenizer=sentencepiece, which is trained on your text"
)
_t5 = partial(_download, "t5", T5_COPY, "another tokenizer")
PINNED = {
    pinned.name: pinned
    for pinned in (
        Pinned("llama2", "9e556afd44213b6bd1be2b850ebbbd98f5481437a8021afaf58ee7fb1818d347", 32000, _llama2),
        Pinned("mistral32k", "dadfd56d766715c61d2ef780a525ab43b8e6da4de6865bda3d95fdef5e134055", 32000, _mistral32k),
        Pinned("t5", "d60acb128cf7b7f2536e8f38a5b18a05535c9e14c7a355904270e15b0945ea86", 32100, _t5),
    )
}
