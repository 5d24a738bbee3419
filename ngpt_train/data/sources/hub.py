"""Data sets of the Hugging Face hub: the files of a commit, and the documents of each file.

parquet and jsonl files are fetched as they are. The datasets library reads all other formats.
"""

import json
import logging
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from ngpt_train.config.schema import DataConfig
from ngpt_train.config.sections.data import is_commit
from ngpt_train.core.errors import ConfigError, DataError
from ngpt_train.core.files import write_atomically
from ngpt_train.data.cache_files import canonical_hash
from ngpt_train.data.sources.hub_client import HubClient, HubFile, endpoint
from ngpt_train.data.sources.readers import document_of, read_file
from ngpt_train.data.sources.source import EXTENSIONS, FetchError, Shard, Source, extension, text_size

logger = logging.getLogger(__name__)

# In a repository a .txt file is a licence or a list as often as it is text.
KINDS = tuple(ending for ending in EXTENSIONS if not ending.startswith(".txt"))
USUAL_SPLITS = ("train", "validation", "valid", "val", "dev", "test")


@dataclass(frozen=True)
class HubText:
    """Files of one commit of a data set. Travels to worker processes."""

    repo: str
    commit: str
    files: dict[str, HubFile]
    text_field: str
    fetch_minutes: float

    def documents(self, shard: Shard, scratch: Path) -> Iterator[str]:
        """The documents of a shard in order. Its file is in `scratch` while they are read. Raises FetchError if the
        file cannot be reached within `fetch_minutes`, DataError if it is faulty, OSError if `scratch` is full."""
        client = HubClient(self.repo, self.fetch_minutes)
        for path in shard.files:
            target = scratch / f"file{extension(Path(path))}"
            try:
                client.download(self.commit, path, self.files[path], target)
                yield from self._read(target, f"{self.repo}@{self.commit}:{path}")
            finally:
                target.unlink(missing_ok=True)

    def _read(self, target: Path, name: str) -> Iterator[str]:
        try:
            yield from read_file(target, self.text_field)
        except FetchError:  # of the copy on this machine
            raise
        except DataError as error:
            raise DataError(
                f"{str(error).replace(str(target), name)}. The file is as it is on the hub; "
                "data.on_bad_shard=skip goes on without such files"
            ) from None


def list_hub(data: DataConfig) -> Source:
    """The files of data.repo, data.revision, data.split and data.files, a shard each, in the order of their paths.

    Asks the hub, so only one rank should call it. If the hub fails, a list in data.cache can stand in for a commit.
    Without parquet and jsonl files the split is one shard, which the datasets library reads and `prepare` accepts.
    Raises ConfigError unless data.repo is a name, FetchError if the hub cannot be reached or refuses, and DataError if
    no file matches or can be read.
    """
    if data.repo is None or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", data.repo):
        raise ConfigError(
            f"data.repo={'null' if data.repo is None else data.repo}: expected OWNER/NAME, as in the address "
            f"{endpoint()}/datasets/OWNER/NAME of the data set"
        )
    kept = Path(data.cache).expanduser() / "hub"
    commit, listed = _files(HubClient(data.repo, data.fetch_minutes), data.revision, kept)
    settings = {"repo": data.repo, "split": data.split, "text_field": data.read_field}
    readable = [path for path in sorted(listed) if extension(Path(path)) in KINDS]
    held_out: list[str] = []
    if data.val_files is not None:
        settings["val_files"] = data.val_files
        held_out = _matching(readable, data.val_files, "data.val_files", data.repo)
    if not readable and not data.streamed:
        rows = DatasetsText(data.repo, commit, data.split, data.read_field)
        return Source(data.kind, rows, settings, shards=(rows.shard,), revision=commit)
    if not readable:
        endings = Counter(PurePosixPath(path).suffix or PurePosixPath(path).name for path in sorted(listed))
        found = ", ".join(f"{n} {ending}" for ending, n in endings.most_common(8)) or "nothing"
        raise DataError(
            f"data.repo={data.repo}: none of its files ends in {', '.join(KINDS)} (there are: {found}). `prepare` "
            "reads other formats with the library `datasets`; then train on its tokens with data=tokens"
        )
    paths = [path for path in _chosen(readable, data) if path not in held_out]
    if not paths:
        raise DataError(f"data.val_files={data.val_files}: all files that are read; none is left to train on")
    files = {path: listed[path] for path in [*paths, *held_out]}
    size = sum(file.size for file in files.values())
    logger.info("%s@%s: %d files, %.2f GB", data.repo, commit, len(files), size / 1e9)
    sorts = sorted({f"{PurePosixPath(path).parent}/*{extension(Path(path))}" for path in paths})
    if len(sorts) > 1:
        logger.warning(
            "%s: read as one text are %s%s; data.files=GLOB chooses among them",
            data.repo,
            ", ".join(sorts[:5]),
            f" and {len(sorts) - 5} more" if len(sorts) > 5 else "",
        )
    shards = tuple(
        # Equal files are equal shards under any name, but the extension decides how they are read.
        Shard(
            f"{data.repo}@{commit}:{path}",
            f"{'held out:' if path in held_out else ''}{file.etag}:{file.size}:{extension(Path(path))}",
            (path,),
            held_out=path in held_out,
            size=text_size(Path(path), file.size),
        )
        for path, file in files.items()
    )
    reader = HubText(data.repo, commit, files, data.read_field, data.fetch_minutes)
    return Source(data.kind, reader, settings, shards=shards, revision=commit)


def _files(client: HubClient, revision: str | None, kept: Path) -> tuple[str, dict[str, HubFile]]:
    """The commit of a revision and all its files. The list is kept. A commit never changes, so a resumed run needs no
    hub if its text is on this machine."""

    def place(commit: str) -> Path:
        return kept / f"{client.repo.replace('/', '--')}@{commit}.json"

    try:
        commit = client.commit(revision)
        listed = client.files(commit)
    except FetchError as error:
        known = _read_list(place(revision)) if revision and is_commit(revision) else None
        if revision is None or known is None:
            raise
        logger.warning("%s; going on with the list of files of before", error)
        return revision, known
    try:
        kept.mkdir(parents=True, exist_ok=True)
        write_atomically(place(commit), json.dumps(listed).encode())
    except OSError as error:
        logger.warning("%s: the list of files is not kept (%s)", place(commit), error.strerror)
    return commit, listed


def _read_list(path: Path) -> dict[str, HubFile] | None:
    try:
        return {name: HubFile(int(size), str(etag)) for name, (size, etag) in json.loads(path.read_bytes()).items()}
    except (OSError, ValueError, TypeError, AttributeError):  # absent or damaged
        return None


def _chosen(readable: list[str], data: DataConfig) -> list[str]:
    """The paths of data.files or else of data.split. Raises DataError if there are none.

    A file belongs to a split if the name of the split is a word of its path, as in
    plain_text/train-00000-of-00080.parquet, data/train/1.jsonl or train2.jsonl. Where no path names a usual split, all
    files are the train split.
    """
    if data.files is not None:
        return _matching(readable, data.files, "data.files", str(data.repo))
    if found := [path for path in readable if _names(path, data.split)]:
        return found
    named = [split for split in USUAL_SPLITS if any(_names(path, split) for path in readable)]
    if data.split == "train" and not named:
        return readable
    raise DataError(
        f"data.split={data.split}: no file of {data.repo} has that word in its path (there are: "
        f"{', '.join(named) or 'files without a split, which are train'}; such as {readable[0]}); choose another "
        "data.split, or the files with data.files=GLOB"
    )


def _matching(paths: list[str], pattern: str, key: str, repo: str) -> list[str]:
    """The paths that match `pattern`, the value of `key`. Raises DataError if there are none."""
    if found := [path for path in paths if fnmatchcase(path, pattern)]:
        return found
    such_as = f", such as {paths[0]}" if paths else ""
    raise DataError(f"{key}={pattern}: matches no file of {repo}{such_as}")


def _names(path: str, split: str) -> bool:
    """True if the split is a word of the path. A word ends where its letters or digits end."""
    before, after = (r"\d" if end.isdigit() else r"[^\W\d_]" for end in (split[:1], split[-1:]))
    return re.search(f"(?<!{before}){re.escape(split)}(?!{after})", path, re.IGNORECASE) is not None


@dataclass(frozen=True)
class DatasetsText:
    """One split of a data set, as one shard. Travels to worker processes."""

    repo: str
    revision: str | None
    split: str
    text_field: str

    @property
    def shard(self) -> Shard:
        return Shard(f"{self.repo} ({self.split})", canonical_hash([self.repo, self.revision, self.split]), ())

    def documents(self, shard: Shard, scratch: Path) -> Iterator[str]:
        """The split's rows in order, as they arrive. Raises FetchError or DataError."""
        import datasets

        data_set = f"data.repo={self.repo}"
        number = -1  # rows so far; -1 until the data set is open

        def place() -> str:
            return f"{data_set}, {self.split}, row {number}"

        try:
            rows = datasets.load_dataset(self.repo, revision=self.revision, split=self.split, streaming=True)
            number = 0
            for row in rows:
                number += 1
                yield document_of(row, place, "column", self.text_field)
        except DataError:
            raise
        except Exception as error:  # the library passes on all errors of its readers
            kind = FetchError if isinstance(error, OSError) else DataError
            raise kind(
                f"{data_set if number < 0 else f'{place()} or the next'}: the datasets library cannot read it "
                f"({type(error).__name__}: {error}). Check data.repo, data.revision and data.split, or download the "
                "text and use data=local data.path=PATH"
            ) from error
