"""Rows of an epoch, counted by reading one, and the warning for a run that reads its text many times."""

import json
from pathlib import Path

import numpy as np
import pytest

from ngpt_train.config import Config, load_config
from ngpt_train.data import TrainLoader, open_dataset, prepare_dataset, reader_of
from ngpt_train.data.dataset import Tokens
from ngpt_train.data.epochs import EpochRows, epoch_rows, many_epochs, planned_rows

WORDS = ("the", "of", "and", "to", "in", "that", "it", "was", "for", "on", "with", "as", "his", "they", "at", "be")


def text(number: int) -> str:
    """A document of 60 to 200 words."""
    random = np.random.default_rng(number)
    return " ".join(random.choice(WORDS, int(random.integers(60, 200))))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six files of jsonl with 50 documents each."""
    directory = tmp_path_factory.mktemp("corpus")
    for file in range(6):
        lines = [json.dumps({"text": text(50 * file + line)}) for line in range(50)]
        (directory / f"{file}.jsonl").write_text("\n".join(lines) + "\n")
    return directory


def config_of(corpus: Path, *options: str) -> Config:
    own = ["scale=debug", "model=gpt", "data=local", f"data.path={corpus}", f"data.cache={corpus.parent / 'cache'}"]
    own += ["tokenizer=bytes", "data.prepare_workers=1", "data.workers=0", "data.streams=4", "data.val_fraction=0.1"]
    # A later argument takes the place of an earlier one.
    chosen = dict(argument.split("=", 1) for argument in [*own, "model.vocab_size=257", *options])
    return load_config([f"{name}={value}" for name, value in chosen.items()])


@pytest.mark.parametrize("pack", ["concat", "best_fit"])
def test_prepared_rows_are_exact(corpus: Path, pack: str) -> None:
    """Caught: tokens / context, where the last row is not full, or rows are padded."""
    config = config_of(corpus, f"data.pack={pack}")
    data = open_dataset(config)
    size = epoch_rows(data, config)[""]
    assert (size.share, size.exact) == (1.0, True)
    assert isinstance(data.train, Tokens)
    tokens = len(data.train)
    if pack == "concat":
        assert size.rows == -(-tokens // 64)
    # Every id is a target once: so the epoch is over with this row.
    loader = TrainLoader(reader_of(data, config), batch_rows=1, micro_rows=1)
    targets = sum(int((batch[0][1] >= 0).sum()) for (batch, _), _ in zip(loader, range(int(size.rows)), strict=False))
    assert targets == tokens


@pytest.mark.parametrize("options", [[], ["model=ntransformer"]], ids=["rows", "documents"])
def test_streamed_rows_are_near(corpus: Path, tmp_path: Path, options: list[str]) -> None:
    """Caught: an estimate from file sizes alone, without the opened shards and the held-out text."""
    own = [f"data.cache={tmp_path}", "data.streaming=true", "data.open_shards=2", *options]
    streamed = config_of(corpus, *own)
    data = open_dataset(streamed)
    estimated = epoch_rows(data, streamed)[""]
    exact = epoch_rows(open_dataset(config_of(corpus, *options)), streamed)[""].rows
    assert not estimated.exact
    assert estimated.rows == pytest.approx(exact, rel=0.1)


def test_sizes_of_shards_that_are_not_here(corpus: Path, tmp_path: Path) -> None:
    """Half of each line is a field that nobody reads: the ratio of the shards that are decoded tells."""
    wide = tmp_path / "wide"
    wide.mkdir()
    for file in range(6):
        lines = [json.dumps({"text": text(50 * file + line), "other": text(line)}) for line in range(50)]
        (wide / f"{file}.jsonl").write_text("\n".join(lines) + "\n")
    config = config_of(wide, f"data.cache={tmp_path / 'cache'}", "data.streaming=true", "data.open_shards=1")
    data = open_dataset(config)
    assert sum(1 for _ in (tmp_path / "cache" / "documents").glob("*/header.json")) < 6, "all are here"
    exact = epoch_rows(open_dataset(config_of(corpus)), config)[""].rows
    assert epoch_rows(data, config)[""].rows == pytest.approx(exact, rel=0.15)


def test_a_mixture_has_the_rows_of_each_source(corpus: Path) -> None:
    """Caught: all rows of the run counted for each source."""
    mixture = f"data.mixture=web 3 local {corpus / '[012].jsonl'}; rest 1 local {corpus / '[345].jsonl'}"
    config = config_of(corpus, "data=mixture", "data.path=null", "tokenizer=bytes", mixture, "data.streaming=false")
    sizes = epoch_rows(open_dataset(config), config)
    assert {name: size.share for name, size in sizes.items()} == {"web": 0.75, "rest": 0.25}
    assert sizes["web"].epochs(100) == 75 / sizes["web"].rows
    assert {name: size and size.share for name, size in planned_rows(config).items()} == {"web": 0.75, "rest": 0.25}


def test_planned_rows(corpus: Path, tmp_path: Path) -> None:
    """Exact for tokens on disk, near for text, unknown without a word where only the hub knows."""
    config = config_of(corpus)
    prepared = prepare_dataset(config, tmp_path / "tokens")
    exact = epoch_rows(prepared, config)[""]
    on_disk = load_config(["scale=debug", "model=gpt", "data=tokens", f"data.path={tmp_path / 'tokens'}"])
    assert planned_rows(on_disk) == {"": exact}
    near = planned_rows(config)[""]
    assert near is not None
    assert not near.exact
    assert near.rows == pytest.approx(exact.rows, rel=0.15)

    nanogpt = tmp_path / "nanogpt"
    nanogpt.mkdir()
    for name, n in {"train": 6400, "val": 640}.items():
        (nanogpt / f"{name}.bin").write_bytes(b"\0\0" * n)
    foreign = load_config(["scale=debug", "model=gpt", "data=tokens", f"data.path={nanogpt}", "model.vocab_size=9"])
    assert planned_rows(foreign) == {"": EpochRows(100, 1.0, exact=True)}

    assert planned_rows(config_of(tmp_path / "missing")) == {"": None}
    hub = ["scale=debug", "model=gpt", "data=hf", "data.repo=a/b", "tokenizer=gpt2", "model.vocab_size=50257"]
    assert planned_rows(load_config(hub)) == {"": None}
    known = planned_rows(load_config([*hub, "data.text_gb=1", "data.val_fraction=0.5"]))[""]
    assert known is not None
    assert known.rows == pytest.approx(0.5e9 / 4.42 / 64, rel=0.05)
    for name, words in {"ptb": 929_589, "wikitext103": 103_227_021}.items():
        counted = planned_rows(load_config([f"data={name}", "scale=tiny", "model.vocab_size=10000"]))[""]
        assert counted is not None
        assert counted.rows * 256 == pytest.approx(words, rel=0.05)
    of_paper = load_config(["data=openwebtext", "tokenizer=gpt2", "model.vocab_size=50257", "scale=0.5b"])
    rows = planned_rows(of_paper)[""]
    assert rows is not None
    assert rows.rows * 1024 == pytest.approx(0.995 * 9_040_017_095, rel=0.05)  # nanoGPT's count


@pytest.mark.parametrize(
    ("epochs", "exact", "says"),
    [
        (4.0, True, ""),
        (4.1, True, "train.steps=410 reads the training text 4.1 times: it has 51,200 tokens, and the run asks for "),
        (30.0, False, "the training text about 30 times: it has about 51,200 tokens"),
    ],
)
def test_warning(epochs: float, exact: bool, says: str) -> None:
    """Caught: a warning at four times, none above, or an estimate that is not called one."""
    config = load_config(["scale=debug", "model=gpt", "train.batch_rows=8", f"train.steps={round(100 * epochs)}"])
    warnings = list(many_epochs({"": EpochRows(800, 1.0, exact), "unknown": None}, config))
    assert len(warnings) == bool(says)
    for warning in warnings:
        assert says in warning
        assert "Take more text, or set train.steps to 400 or less" in warning


def test_warning_of_a_source() -> None:
    """Each is counted by itself: a small one may be read often where the whole mixture is not."""
    config = load_config(["scale=debug", "model=gpt", "train.batch_rows=8", "train.steps=1000"])
    (warning,) = many_epochs({"web": EpochRows(8000, 0.75, True), "rest": EpochRows(400, 0.25, True)}, config)
    for part in ("text of rest 5.0 times", "set train.steps to 800 or less", "weight in data.mixture"):
        assert part in warning
