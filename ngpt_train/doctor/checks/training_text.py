"""Can the text or the tokens be read, and do they fit the tokenizer and the model?"""

import hashlib
import logging
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ngpt_train.config.keys import AUTO
from ngpt_train.config.schema import Config, DataConfig
from ngpt_train.config.sections.data import sources_of
from ngpt_train.core.errors import ConfigError, DataError
from ngpt_train.data import open_dataset
from ngpt_train.data.dataset import Tokens
from ngpt_train.data.sources import open_source
from ngpt_train.data.sources.hub import HubText
from ngpt_train.data.sources.hub_client import HubClient
from ngpt_train.data.sources.source import Shard, Source
from ngpt_train.data.tokenizers import load_tokenizer
from ngpt_train.doctor.bounded import Report, first_line
from ngpt_train.doctor.findings import OK, WARNING, WRONG, Answer, Finding, differences, gb, of_each, unchecked
from ngpt_train.training.run_directory import initial_checkpoint

MOST_OPENED = 500  # files, spread over all of them
HUB_SECONDS = 9.0  # limit of each request to the hub
DAMAGED = "restore the named file from its origin"


def look(config: Config, report: Report) -> None:
    """Looks at each source of text, then at the tokenizer, on the first rank of each host. Prepares nothing."""
    logging.disable(logging.WARNING)  # the hub's client logs each attempt
    vocabulary: dict[str, Any] = {}
    for name, _, data in sources_of(config.data):
        report(begun=name or data.kind)
        found: dict[str, Any] = {}
        try:
            if data.kind == "tokens":
                report(**{f"size of {name}": _size(data)})
                dataset = open_dataset(replace(config, data=data))
                vocabulary = {"name": dataset.tokenizer.name, "size": dataset.tokenizer.vocab_size}
                assert isinstance(dataset.train, Tokens)
                numbers = f"{len(dataset.train):,} tokens to train, {len(dataset.validation):,} to validate"
                found = {"said": f"{numbers}, checksums right", "identity": dataset.fingerprint}
            else:
                found = _text(data)
        except (ConfigError, DataError) as error:
            # HUB_SECONDS is the doctor's limit, not the config's.
            said = re.sub(r" if it is only slow, set data.fetch_minutes above [\d.]+;", "", str(error))
            found = {"refused": said, "code": error.exit_code}
        report(**{f"source {name}": found})
    if config.run.init_from is not None:
        try:
            report(init_from=str(initial_checkpoint(config)))
        except (ConfigError, DataError) as error:
            report(init_from_refused=(str(error), error.exit_code))
    if vocabulary:
        report(tokenizer=vocabulary)
    elif config.tokenizer.from_text:
        words = f"{config.tokenizer.kind}, made of the text by `train`"
        report(tokenizer={"name": words, "size": config.tokenizer.vocab_size, "at_most": True})
    elif config.data.kind != "tokens":
        report(begun="the tokenizer")
        try:
            tokenizer = load_tokenizer(config.tokenizer)
            report(tokenizer={"name": tokenizer.name, "size": tokenizer.vocab_size})
        except (ConfigError, DataError) as error:
            report(tokenizer_refused=(str(error), error.exit_code))


def _size(data: DataConfig) -> int:
    """Bytes of prepared tokens."""
    files = Path(data.path or "").expanduser().glob("*.bin")
    return sum(file.stat().st_size for file in files if file.exists())


def _text(data: DataConfig) -> dict[str, Any]:
    """Opens a text. Raises the errors of `train`."""
    source = open_source(replace(data, fetch_minutes=min(data.fetch_minutes, HUB_SECONDS / 60)))
    if data.on_hub:
        found = f"{data.repo or data.kind}@{(source.revision or '')[:12]}: {len(source.shards)} files on the hub"
        if isinstance(source.reader, HubText) and source.shards:
            reader = source.reader
            HubClient(reader.repo, HUB_SECONDS / 60).try_file(reader.commit, source.shards[0].files[0])
            found += ", the first one can be read"
        return {"said": found, "identity": source.revision}
    files = [*source.files, *source.val_files]
    _open_some(files)
    listing = hashlib.sha256(repr([(file.name, file.stat().st_size) for file in files]).encode()).hexdigest()[:12]
    _read_first(source, files[0])
    n_bytes = sum(file.stat().st_size for file in files)
    return {"said": f"{len(files)} files, {gb(n_bytes)}, the first one read", "identity": listing}


def _open_some(files: Sequence[Path]) -> None:
    for file in files[:: max(1, len(files) // MOST_OPENED)]:
        try:
            with file.open("rb") as content:
                content.read(1)
        except OSError as error:
            raise DataError(f"{file}: cannot be read ({error.strerror})") from None


def _read_first(source: Source, file: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        documents = source.reader.documents(Shard(str(file), "", (str(file),)), Path(scratch))
        if next(iter(documents), None) is None:
            raise DataError(f"{file}: holds no document")


def judge(config: Config, answers: Sequence[Answer]) -> Iterator[Finding]:
    """Each source, the initial checkpoint and the tokenizer."""
    yield from of_each(answers, lambda answer: _data(config, answer))
    for name, *_ in sources_of(config.data):
        identity = f"{_named(name)}: the identity of its files"
        there = [answer for answer in answers if "identity" in answer.facts.get(f"source {name}", {})]
        having = [Answer(answer.place, {identity: answer.facts[f"source {name}"]["identity"]}) for answer in there]
        remedy = "name files that all hosts see, the same Python for data=embedded, or data=tokens with a path"
        yield from differences(having, identity, "data", WRONG, remedy)
    yield from of_each(answers, lambda answer: _tokenizer(config, answer))


def _named(name: str) -> str:
    return f"data.mixture, source {name}" if name else "data"


def _data(config: Config, answer: Answer) -> Iterator[Finding]:
    facts = answer.facts
    for name, _, data in sources_of(config.data):
        found = facts.get(f"source {name}")
        where = f"data={data.kind}" if not name else _named(name)
        if found is None:
            size = facts.get(f"size of {name}", 0)
            if size and answer.timed_out:
                said = f"{where}: {gb(size)} of tokens are there; their checksums take too long for this check"
                yield Finding("data", said, WARNING, "nothing: `train` computes them once, before the first step")
            elif answer.problem:
                remedy = "try the source that data.* names: ls, or curl to the hub"
                yield unchecked("data", answer.problem, remedy, WRONG)
        elif "refused" in found:
            remedy = "as it says"
            if data.on_hub:
                remedy = "connect to the hub (a proxy: https_proxy), set HF_ENDPOINT to a mirror, or bring the text"
            elif "manifest" in found["refused"] or "damaged" in found["refused"]:
                remedy = DAMAGED
            yield Finding("data", found["refused"], WRONG, remedy, code=found["code"])
        else:
            yield Finding("data", f"{where}: {found['said']}")
    if refused := facts.get("init_from_refused"):
        yield Finding("run.init_from", refused[0], WRONG, "as it says", code=refused[1])
    elif "init_from" in facts:
        yield Finding("run.init_from", facts["init_from"])


def _tokenizer(config: Config, answer: Answer) -> Iterator[Finding]:
    facts = answer.facts
    if refused := facts.get("tokenizer_refused"):
        remedy = "copy the file where all hosts see it, and set tokenizer.path to it"
        yield Finding("tokenizer", first_line(refused[0]), WRONG, remedy, code=refused[1])
    elif facts.get("begun") == "the tokenizer" and "tokenizer" not in facts and answer.problem:
        remedy = "copy its file here and set tokenizer.path=FILE"
        yield unchecked("tokenizer", answer.problem, remedy, WRONG)
    if "tokenizer" not in facts:
        return
    name, size = facts["tokenizer"]["name"], facts["tokenizer"]["size"] + config.data.own_ids
    at_most = "at most " if facts["tokenizer"].get("at_most") else ""
    vocabulary = config.model.vocab_size
    verdict = WRONG if vocabulary != AUTO and int(vocabulary) < size else OK
    found = f"model.vocab_size={vocabulary}: with {name} there are {at_most}{size} ids"
    yield Finding("tokenizer", found, verdict, f"set model.vocab_size=auto, or at least {size}")
