"""Prefix rows, the beginning of a document and its continuation, in the verbs, too."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ngpt_train.__main__ import main
from ngpt_train.config import load_config
from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.config.schema import Config
from ngpt_train.core.errors import ConfigError, DataError
from ngpt_train.data import Dataset, TrainLoader, open_dataset
from ngpt_train.data.dataset import Tokens
from ngpt_train.data.loader import PreparedReader
from ngpt_train.data.rows import Batch, NextToken, PrefixContinuation, RowFormat, Rows, rows_of
from ngpt_train.distributed.world import World
from ngpt_train.evaluation import validation
from ngpt_train.evaluation.validation import Validation
from ngpt_train.models import build_model
from ngpt_train.models.gpt.keys import GPTConfig
from ngpt_train.models.ntransformer.keys import NTransformerConfig
from tests.processes.runs import arguments, numbers, records, write_corpus

SOURCE, CONTEXT, EOS = 4, 9, 0
Builder = Callable[[list[list[NDArray[np.uint16]]]], Tokens]
LENGTHS = [[12, 5, 6, 1], [2, 10, 3], [11, 7, 9]]  # of the documents of three shards


def documents(lengths: Sequence[Sequence[int]] = LENGTHS) -> list[list[NDArray[np.uint16]]]:
    """Documents whose tokens are all different, each with EOS at its end, by shard."""
    ids = 0
    shards: list[list[NDArray[np.uint16]]] = []
    for shard in lengths:
        shards.append([])
        for length in shard:
            shards[-1].append(np.r_[np.arange(ids + 1, ids + length), EOS].astype(np.uint16))
            ids += length
    return shards


def indexed(shards: list[list[NDArray[np.uint16]]]) -> Tokens:
    """With the index of each shard, as `prepare` writes it."""
    offsets = [np.cumsum([0, *map(len, shard)]).astype("<u8") for shard in shards]
    return Tokens("train", Path("tokens"), [np.concatenate(shard) for shard in shards], EOS, offsets)


def searched(shards: list[list[NDArray[np.uint16]]]) -> Tokens:
    """Without, as nanoGPT's files are."""
    return Tokens("train", Path("tokens"), [np.concatenate(shard) for shard in shards], eos=EOS)


def beginnings(tokens: Tokens, context: int = CONTEXT, source: int = SOURCE) -> PrefixContinuation:
    return PrefixContinuation(tokens, RowFormat(context, EOS, source_context=source))


@pytest.mark.parametrize("build", [indexed, searched])
def test_documents_of_every_shard(build: Builder) -> None:
    shards = documents()
    data = build(shards)
    starts, lengths = data.documents
    assert starts.dtype == lengths.dtype == np.int64
    assert lengths.tolist() == [length for shard in LENGTHS for length in shard]
    for start, expected in zip(starts.tolist(), [document for shard in shards for document in shard], strict=True):
        found = np.empty(len(expected), np.int64)
        data.read(start, found)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([1, 2, 0, 3, 0], [3, 2]),
        ([1, 2, 0, 3, 4], [3, 2]),  # the last document is cut off
        ([1, 2, 3], [3]),  # no eos at all
        ([0, 0, 1, 0], [1, 1, 2]),  # empty documents
        ([0], [1]),
    ],
)
def test_documents_found_by_eos(ids: list[int], expected: list[int]) -> None:
    data = Tokens("train", Path("tokens"), [np.array(ids, np.uint16), np.array([7, 0, 8], np.uint16)], eos=0)
    starts, lengths = data.documents
    assert lengths.tolist() == [*expected, 2, 1]
    assert starts.tolist() == np.cumsum([0, *expected, 2]).tolist()


@pytest.mark.parametrize("build", [indexed, searched])
def test_rows_are_beginnings_of_documents(build: Builder) -> None:
    rows = beginnings(build(documents()))
    expected = [x for shard in documents() for x in shard if len(x) >= SOURCE + 2]
    assert [len(x) for x in expected] == [12, 6, 10, 11, 7, 9]  # longer than a row, and with one target
    assert len(rows) == len(expected)
    order = np.array([5, 0, 3, 1, 1, 4, 2])
    tokens, targets, doc_ids = rows.batch(order)
    assert tokens.shape == targets.shape == doc_ids.shape == (7, CONTEXT)
    assert {x.dtype for x in (tokens, targets, doc_ids)} == {np.dtype(np.int64)}
    for row, index in enumerate(order):
        document = expected[index].tolist()
        n = min(len(document), CONTEXT)
        assert tokens[row, :n].tolist() == document[:n]
        assert doc_ids[row].tolist() == [0] * n + [-1] * (CONTEXT - n)
        # Token SOURCE is the decoder's first input, what follows it the first target; the last target may lie
        # behind the row, and is eos where the document ends.
        continuation = document[SOURCE + 1 : CONTEXT + 1]
        assert targets[row].tolist() == [-100] * SOURCE + continuation + [-100] * (CONTEXT - SOURCE - len(continuation))
        assert (continuation[-1] == EOS) == (len(document) <= CONTEXT + 1)
    assert (targets != -100).any(1).all()


def test_no_document_is_long_enough() -> None:
    data = indexed(documents())
    assert len(beginnings(data, 20, 10)) == 1
    with pytest.raises(DataError, match=r"train split.*model\.source_context \+ 2 = 13.*longest of 10 has 12"):
        beginnings(data, 20, 11)


def test_the_architecture_decides() -> None:
    def found(model: ModelConfig) -> Rows:
        return rows_of(indexed(documents()), Config(model=model))

    assert isinstance(found(GPTConfig(context=CONTEXT)), NextToken)
    assert len(found(NTransformerConfig(context=CONTEXT, source_context=8))) == 3
    assert len(found(NTransformerConfig(context=CONTEXT))) == 4  # 6, two thirds of the row
    model = load_config(["model=ntransformer", "scale=debug"]).model
    assert isinstance(model, NTransformerConfig)
    assert (model.context, model.source_context, model.n_encoder_layers) == (64, 42, 2)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model=ntransformer", "data.objective=next_token"], r"data\.objective"),
        (["model=ngpt", "data.objective=prefix_continuation"], r"data\.objective"),
        (["model=ntransformer", "model.source_context=64"], r"model\.source_context"),
        (["model=ntransformer", "optim.weight_decay=0.1"], r"optim\.weight_decay"),
    ],
)
def test_what_does_not_go_together(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config([*overrides, "scale=debug"])


def test_batches_carry_the_padding() -> None:
    """Micro batches of all three parts, every document once an epoch, the same for any number of ranks."""
    rows = beginnings(indexed(documents()))
    loader = TrainLoader(PreparedReader(rows, seed=1), batch_rows=6, micro_rows=2)
    micro_batches, position = next(loader)
    assert position.rows == 6
    whole = [np.concatenate(parts) for parts in zip(*micro_batches, strict=True)]
    assert [len(batch) for batch in micro_batches] == [3, 3, 3]
    assert all(part.flags.c_contiguous for batch in micro_batches for part in batch)
    everything = rows.batch(np.arange(6))
    place = {first: row for row, first in enumerate(everything[0][:, 0].tolist())}
    order = [place[first] for first in whole[0][:, 0].tolist()]
    assert sorted(order) == list(range(6))
    for got, want in zip(whole, everything, strict=True):
        np.testing.assert_array_equal(got, want[order])
    second = next(TrainLoader(PreparedReader(rows, seed=1), 6, 1, rank=1, world_size=2))[0]
    for got, want in zip((np.concatenate(parts) for parts in zip(*second, strict=True)), whole, strict=True):
        np.testing.assert_array_equal(got, want[1::2])


class PaddedSources:
    """Rows with padding in the source, which unlike that at the end the decoder would see."""

    def __len__(self) -> int:
        return 7

    def batch(self, indices: NDArray[np.int64]) -> Batch:
        generator = np.random.default_rng(0)
        tokens, targets = (generator.integers(11, size=(len(self), CONTEXT))[indices] for _ in range(2))
        doc_ids = np.zeros_like(tokens)
        doc_ids[:, 1] = -1
        targets[:, :SOURCE] = -100
        targets[::2, -3:] = -100
        return tokens, targets, doc_ids


def test_validation_knows_the_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 3 rows for 7 rows, and the mean over the targets that count."""
    monkeypatch.setattr(validation, "CHUNK_TOKENS", 3 * CONTEXT)
    model = build_model(
        NTransformerConfig(vocab_size=11, d_model=16, n_layers=1, context=CONTEXT, source_context=SOURCE)
    )
    check = Validation(PaddedSources(), np.full(11, 2), np.arange(7))
    result = check.row_losses(model, World(0, 1, 0, torch.device("cpu"))).metrics()
    tokens, targets, doc_ids = map(torch.from_numpy, PaddedSources().batch(np.arange(7)))
    loss_sum, n_tokens = model.loss(tokens, targets, doc_ids)
    unpadded, _ = model.loss(tokens, targets)
    assert int(n_tokens) == 7 * 5 - 4 * 3
    assert result["loss"] == pytest.approx(loss_sum.item() / int(n_tokens), rel=1e-6)
    assert result["loss"] != pytest.approx(unpadded.item() / int(n_tokens), rel=1e-5)
    assert result["bits_per_byte"] == pytest.approx(result["loss"] / math.log(2) / 2, rel=1e-6)


# Through the verbs. Of the corpus's documents some are too short for a source, some are padded and some cut.
RUN = ["model=ntransformer", "model.context=192", "model.source_context=96", "model.n_encoder_layers=1"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "text.jsonl")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    root = tmp_path_factory.mktemp("run")
    assert main(["train", *arguments(root, corpus, *RUN)]) == 0
    return root / "runs/test"


def dataset(directory: Path, corpus: Path) -> Dataset:
    given = load_config(arguments(directory.parents[1], corpus, *RUN))
    return open_dataset(given)


def test_run(directory: Path, corpus: Path) -> None:
    train, evaluations = records(directory), records(directory, "eval")
    assert sorted(evaluations) == [0, 12]
    assert evaluations[12]["loss"] < 0.9 * evaluations[0]["loss"]
    assert evaluations[12]["ppl"] == pytest.approx(math.exp(evaluations[12]["loss"]))
    assert evaluations[0]["loss"] == pytest.approx(math.log(257), abs=0.7)  # logits of variance 1 add half a nat
    # What counts as a token is a target: at most the 96 of a row's continuation.
    data = dataset(directory, corpus)
    assert isinstance(data.train, Tokens)
    lengths = data.train.documents[1]
    assert lengths.min() < 98 < 193 < lengths.max()
    steps = np.diff([0, *(train[step]["tokens"] for step in sorted(train))])
    assert (steps <= 8 * 96).all()
    assert (steps < 8 * 96).any()
    loader = TrainLoader(PreparedReader(beginnings(data.train, 192, 96), seed=load_config([]).run.seed), 8, 2)
    expected = [sum(int((targets != -100).sum()) for _, targets, _ in next(loader)[0]) for _ in range(12)]
    assert steps.tolist() == expected


def test_evaluate_agrees_with_training(directory: Path, corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    given = arguments(tmp_path, corpus, *RUN, f"evaluate.checkpoint={directory}", f"evaluate.out={out}")
    assert main(["evaluate", *given]) == 0
    result = json.loads(out.read_text())
    last = records(directory, "eval")[12]
    assert {key: result[key] for key in ("loss", "ppl", "bits_per_byte")} == {
        key: last[key] for key in ("loss", "ppl", "bits_per_byte")
    }


def test_resumes_bit_for_bit(directory: Path, corpus: Path, tmp_path: Path) -> None:
    for stop in ("train.stop_at=5", ""):
        assert main(["train", *arguments(tmp_path, corpus, *RUN, *([stop] if stop else []))]) == 0
    assert numbers(tmp_path / "runs/test") == numbers(directory)
    assert records(tmp_path / "runs/test", "eval")[12]["loss"] == records(directory, "eval")[12]["loss"]


def test_generate(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def text(prompt: str, *overrides: str) -> str:
        capsys.readouterr()
        given = [f"generate.checkpoint={directory}", f"generate.prompt={prompt}", "generate.max_new_tokens=30"]
        assert main(["generate", *given, *overrides]) == 0
        return capsys.readouterr().out

    long = "the model reads a row of tokens and moves every vector " * 3
    for prompt in ("the model", long.strip()):
        assert text(prompt, "generate.seed=2").startswith(prompt)
        assert len(text(prompt, "generate.temperature=0")) > len(prompt) + 5
    assert text(prompt, "generate.seed=2") == text(prompt, "generate.seed=2") != text(prompt)
