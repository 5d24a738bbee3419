"""Times text on its way to batches, beside the `datasets` library with the same tokenizer and beside nanoGPT's reader.

    python -m benchmarks.data [GROUP=OPTION ...] [KEY=VALUE ...] [--out FILE]

Everything runs on one core. Rows have the config's context, batches 8 rows. The text is the config's, by default the
embedded corpus, written as parquet files into a temporary directory.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import WALL, Entry, Run, interleaved, main, quartiles
from ngpt_train.config import load_config
from ngpt_train.config.schema import Config
from ngpt_train.data import TrainLoader, merged, open_dataset, prepare_dataset, reader_of
from ngpt_train.data.sources import open_source
from ngpt_train.data.streamed_text import StreamedText
from ngpt_train.data.tokenizers import Tokenizer
from ngpt_train.data.tokenizers.gpt2 import parse_ranks

BATCH_ROWS = 8
SHARDS = 8
CHARACTERS = 6_000_000  # of text: roughly what a round of streaming reads, so that all sides read the same text
TOKENS = 1_500_000  # that a round of streaming reads
PREPARED_TOKENS = 20_000_000  # that a round reads from prepared shards
ROUNDS = 5


def bench(overrides: Sequence[str]) -> Iterator[Entry]:
    """Entries of streaming, of reading prepared shards, of the time to the first batch, and of streaming's memory."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        with tempfile.TemporaryDirectory() as directory:
            yield from all_of(load_config(overrides, world_size=1), Path(directory))
    finally:
        os.sched_setaffinity(0, cores)


def all_of(config: Config, directory: Path) -> Iterator[Entry]:
    """The entries of `bench`. directory: for files."""
    files = write_parquet(config, directory / "text")
    local = replace(config.data, kind="local", path=str(files), cache=str(directory / "cache"), text_field="text")
    for kind in dict.fromkeys((config.tokenizer.kind, "gpt2")):
        tokenizer = replace(config.tokenizer, kind=kind, path=config.tokenizer.path if kind != "gpt2" else None)
        streamed = replace(
            config, tokenizer=tokenizer, data=replace(local, streaming=True, workers=0, open_shards=SHARDS)
        )
        yield from streaming(streamed, files)
    prepared = replace(config, data=replace(local, streaming=False), tokenizer=tokenizer)
    shards = directory / "shards"
    prepare_dataset(prepared, shards)
    tokens = replace(prepared, data=replace(prepared.data, kind="tokens", path=str(shards)))
    yield from reading(tokens)
    yield from starting(tokens, streamed)
    yield from memory(streamed)


def write_parquet(config: Config, directory: Path) -> Path:
    """Writes every nth document of the config's text to SHARDS parquet files in `directory`, which it returns.

    n is chosen so that about CHARACTERS, at most twice as many, are left. Row groups have 100 documents.
    """
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
    """A function that reads batches until it has at least `n_tokens` tokens, and returns how many it has.

    Each call goes on where the last one stopped.
    """
    loader = batches_from(config)

    def read(n_tokens: float) -> float:
        done = 0
        while done < n_tokens:
            micro_batches, _ = next(loader)
            done += micro_batches[0][0].size
        return done

    return read


def streaming(config: Config, files: Path) -> Iterator[Entry]:
    """Streaming the text beside a loop over the `datasets` library, in tokens/s."""
    read = batches_of(config)
    name = f"streaming, {config.tokenizer.kind}"
    tokenizer = open_dataset(config).tokenizer
    batches = datasets_batches(files, tokenizer, config.model.context)

    def datasets_read() -> float:
        done = 0
        while done < TOKENS:
            done += next(batches)[0].size
        return done

    beside = f"datasets, {config.tokenizer.kind}"
    yield from interleaved({beside: datasets_read, name: lambda: read(TOKENS)}, beside, ROUNDS, "tokens", WALL)


def datasets_batches(files: Path, tokenizer: Tokenizer, context: int) -> Iterator[tuple[NDArray[np.int64], ...]]:
    """Batches as its users write them with the `datasets` library: stream, tokenize, concatenate, cut; without end.

    Each is inputs and targets, `(BATCH_ROWS, context)` int64.
    """
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
    """Text to ids by the tokenizer's own library, called as its documentation says."""
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
    return lambda text: tokenizer.encode(text).tolist()


def reading(config: Config) -> Iterator[Entry]:
    """Reading prepared shards beside nanoGPT's reader on the first of them, in tokens/s."""
    read = batches_of(config)
    shard = min(Path(str(config.data.path)).glob("train-*.bin"))
    ids = np.memmap(shard, "<u2" if open_dataset(config).tokenizer.vocab_size <= 1 << 16 else "<u4", mode="r")
    generator = np.random.default_rng(0)
    context = config.model.context

    def nanogpt_read() -> float:
        """Reads random stretches of the file of ids, as nanoGPT's get_batch does."""
        done = 0
        while done < PREPARED_TOKENS:
            starts = generator.integers(len(ids) - context, size=BATCH_ROWS)
            inputs = np.stack([ids[i : i + context].astype(np.int64) for i in starts])
            targets = np.stack([ids[i + 1 : i + 1 + context].astype(np.int64) for i in starts])
            done += inputs.size + 0 * targets.size
        return done

    runs = {"nanoGPT's reader": nanogpt_read, "prepared shards": lambda: read(PREPARED_TOKENS)}
    yield from interleaved(runs, "nanoGPT's reader", ROUNDS, "tokens", WALL)


def starting(prepared: Config, streamed: Config) -> Iterator[Entry]:
    """The time to open the data and read a batch, at a run's start and after a resume at batch 200; without imports."""
    runs: dict[str, Run] = {}
    for name, config in (("prepared", prepared), ("streamed", streamed)):
        runs[f"{name}: first batch"] = partial(first_batch, config)
        batches = batches_from(config)
        for _ in range(200):
            _, position = next(batches)
        runs[f"{name}: first batch after a resume"] = partial(first_batch, config, merged([position]))
    yield from interleaved(runs, "prepared: first batch", 3, "batches", WALL)


def memory(config: Config) -> Iterator[Entry]:
    """One entry of an epoch of streaming, in tenths: resident memory, and a tenth's time over the first tenth's.

    The tokenizer is `bytes`, which takes almost no time.
    """
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
        more={"memory_mb": (resident[0], resident[-1])},
    )


def resident_mb() -> float:
    """Megabytes of this process's own memory, without the pages of files, which the system can take back (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1e3 for line in lines if line.startswith("RssAnon:"))


def first_batch(config: Config, state: dict[str, Any] | None = None) -> float:
    """A run that opens the data and reads one batch, at the position `state` of a checkpoint; returns 1."""
    next(batches_from(config, state))
    return 1


def batches_from(config: Config, state: dict[str, Any] | None = None) -> TrainLoader:
    return TrainLoader(reader_of(open_dataset(config), config, state=state), BATCH_ROWS, BATCH_ROWS, state=state)


if __name__ == "__main__":
    sys.exit(main(__doc__, bench))
