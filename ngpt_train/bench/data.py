"""How fast text becomes batches: beside the `datasets` library with the same tokenizer, and nanoGPT's way of reading.

All on one core, rows of the config's context, in batches of 8. The text is `data.path`, or the embedded corpus, as
parquet files in a temporary directory.
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ngpt_train.bench.interleaved import Entry, interleaved, quartiles
from ngpt_train.config.schema import Config
from ngpt_train.data import TrainLoader, merged, open_dataset, prepare_dataset, reader_of
from ngpt_train.data.sources import open_source
from ngpt_train.data.streamed.workers import StreamedText
from ngpt_train.data.tokenizers import Tokenizer
from ngpt_train.data.tokenizers.gpt2 import parse_ranks

BATCH_ROWS = 8
SHARDS = 8
CHARACTERS = 6_000_000  # of the text that is read: every side passes through all of it in a round, or almost
TOKENS = 1_500_000  # of streamed text a round
PREPARED_TOKENS = 20_000_000
ROUNDS = 5


def bench(config: Config) -> Iterator[Entry]:
    """Entries of streaming, prepared shards, and the time to the first batch."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        with tempfile.TemporaryDirectory() as directory:
            yield from _bench(config, Path(directory))
    finally:
        os.sched_setaffinity(0, cores)


def _bench(config: Config, directory: Path) -> Iterator[Entry]:
    files = write_parquet(config, directory / "text")
    local = replace(config.data, kind="local", path=str(files), cache=str(directory / "cache"), text_field="text")
    for kind in dict.fromkeys((config.tokenizer.kind, "gpt2")):
        described = replace(config.tokenizer, kind=kind, path=config.tokenizer.path if kind != "gpt2" else None)
        streamed = replace(
            config, tokenizer=described, data=replace(local, streaming=True, workers=0, open_shards=SHARDS)
        )
        yield from streaming(streamed, files)
    prepared = replace(config, data=replace(local, streaming=False), tokenizer=described)
    shards = directory / "shards"
    prepare_dataset(prepared, shards)
    tokens = replace(prepared, data=replace(prepared.data, kind="tokens", path=str(shards)))
    yield from reading(tokens)
    yield from starting(tokens, streamed)
    yield from memory(streamed)


def write_parquet(config: Config, directory: Path) -> Path:
    """CHARACTERS or less of the config's text as SHARDS parquet files in row groups of 100."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    documents = [text for text in open_source(config.data).documents() if text]
    documents = documents[:: max(1, sum(map(len, documents)) // CHARACTERS)]
    directory.mkdir()
    for number in range(SHARDS):
        table = pa.table({"text": pa.array(documents[number::SHARDS], pa.large_string())})
        pq.write_table(table, directory / f"train-{number}.parquet", row_group_size=100)
    return directory


def batches_of(config: Config) -> Callable[[float], float]:
    """Reads batches of the config's data until so many tokens are there; goes on where the last call stopped."""
    data = open_dataset(config)
    loader = TrainLoader(reader_of(data, config), BATCH_ROWS, BATCH_ROWS)

    def read(n_tokens: float) -> float:
        done = 0
        while done < n_tokens:
            micro_batches, _ = next(loader)
            done += micro_batches[0][0].size
        return done

    return read


def streaming(config: Config, files: Path) -> Iterator[Entry]:
    read = batches_of(config)
    name = f"streaming, {config.tokenizer.kind}"
    tokenizer = open_dataset(config).tokenizer
    theirs = datasets_batches(files, tokenizer, config.model.context)

    def datasets_read() -> float:
        done = 0
        while done < TOKENS:
            done += next(theirs)[0].size
        return done

    beside = f"datasets, {config.tokenizer.kind}"
    yield from interleaved({beside: datasets_read, name: lambda: read(TOKENS)}, beside, ROUNDS, "tokens")


def datasets_batches(files: Path, tokenizer: Tokenizer, context: int) -> Iterator[tuple[NDArray[np.int64], ...]]:
    """Batches as one writes them with the `datasets` library: stream, tokenize, concatenate, cut."""
    import datasets

    encode = plain_encoder(tokenizer)
    datasets.disable_progress_bars()
    shards = sorted(map(str, files.glob("*.parquet")))
    rows: list[list[int]] = []
    buffer: list[int] = []
    while True:
        for example in datasets.load_dataset("parquet", data_files=shards, split="train", streaming=True):
            buffer += encode(example["text"])
            buffer.append(tokenizer.eos)
            while len(buffer) > context:
                rows.append(buffer[: context + 1])
                del buffer[:context]
                if len(rows) == BATCH_ROWS:
                    batch = np.array(rows, np.int64)
                    yield batch[:, :-1], batch[:, 1:]
                    rows = []


def plain_encoder(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    """The tokenizer's own library, called as its documentation says."""
    if tokenizer.kind == "sentencepiece":
        import sentencepiece

        return sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model).encode
    if tokenizer.kind == "gpt2":
        import tiktoken
        from tiktoken_ext.openai_public import r50k_pat_str

        encoding = tiktoken.Encoding(
            "gpt2",
            pat_str=r50k_pat_str,
            mergeable_ranks=parse_ranks(tokenizer.model),
            special_tokens={"<|endoftext|>": tokenizer.eos},
        )
        return encoding.encode_ordinary
    return lambda text: tokenizer.encode_batch([text])[0].tolist()


def reading(config: Config) -> Iterator[Entry]:
    read = batches_of(config)
    [shard] = itertools.islice(sorted(Path(str(config.data.path)).glob("train-*.bin")), 1)
    ids = np.memmap(shard, "<u2" if open_dataset(config).tokenizer.vocab_size <= 1 << 16 else "<u4", mode="r")
    generator = np.random.default_rng(0)
    context = config.model.context

    def nanogpt_read() -> float:
        """Random stretches of a file of ids, as nanoGPT's get_batch takes them."""
        done = 0
        while done < PREPARED_TOKENS:
            starts = generator.integers(len(ids) - context, size=BATCH_ROWS)
            inputs = np.stack([ids[i : i + context].astype(np.int64) for i in starts])
            targets = np.stack([ids[i + 1 : i + 1 + context].astype(np.int64) for i in starts])
            done += inputs.size + 0 * targets.size
        return done

    runs = {"nanoGPT's reader": nanogpt_read, "prepared shards": lambda: read(PREPARED_TOKENS)}
    yield from interleaved(runs, "nanoGPT's reader", ROUNDS, "tokens")


def starting(prepared: Config, streamed: Config) -> Iterator[Entry]:
    """Opening and the first batch, at the beginning and deep in the run; the imports of a new process apart."""
    runs: dict[str, Callable[[], float]] = {}
    for name, config in (("prepared", prepared), ("streamed", streamed)):
        runs[f"{name}: first batch"] = partial(first_batch, config)
        batches = batches_from(config)
        for _ in range(200):
            _, position = next(batches)
        runs[f"{name}: first batch after a resume"] = partial(first_batch, config, merged([position]))
    yield from interleaved(runs, "prepared: first batch", 3, "batches")


def memory(config: Config) -> Iterator[Entry]:
    """Resident memory, and time beside the first tenth's, while an epoch of the text is streamed, by a tokenizer that
    costs no time."""
    quick = replace(config, tokenizer=replace(config.tokenizer, kind="bytes", path=None))
    data = open_dataset(quick)
    assert isinstance(data.train, StreamedText)
    text = data.train.open()
    n_bytes = sum(text.documents(shard).header["bytes"] for shard in range(text.n_shards))
    read = batches_of(quick)
    resident, taken = [], []
    for _ in range(10):
        started = time.perf_counter()
        read(n_bytes / 10)
        taken.append(1e3 * (time.perf_counter() - started))
        resident.append(resident_mb())
    ratios = [tenth / taken[0] for tenth in taken[1:]]
    yield Entry(
        "streaming, tenths of an epoch, bytes",
        statistics.median(taken),
        quartiles(ratios),
        statistics.median(ratios),
        "the first of them",
        memory_mb=(resident[0], resident[-1]),
    )


def resident_mb() -> float:
    """Without the pages of files, which the system takes back as it likes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1e3 for line in lines if line.startswith("RssAnon:"))


def first_batch(config: Config, state: dict[str, Any] | None = None) -> float:
    next(batches_from(config, state))
    return 1


def batches_from(config: Config, state: dict[str, Any] | None = None) -> TrainLoader:
    return TrainLoader(reader_of(open_dataset(config), config, state=state), BATCH_ROWS, BATCH_ROWS, state=state)
