"""Pairs of a text and its translation: batches of like length, the same on any number of ranks, and their padding."""

import json
import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ngpt_train.config import ConfigError, load_config
from ngpt_train.config.schema import Config
from ngpt_train.config.stored import differing_weights
from ngpt_train.core.constants import IGNORED, PADDING
from ngpt_train.core.errors import DataError
from ngpt_train.data import TrainLoader, merged, open_dataset, reader_of
from ngpt_train.data.dataset import Pairs
from ngpt_train.data.examples import open_pairs
from ngpt_train.data.pair_rows import WINDOW, PairRows, rows_multiple, window_of
from ngpt_train.data.sources.local_files import text_files
from ngpt_train.models import build_model

OVER_BATCH = ("batch", "pn_v", "pn")
WORDS = ["the", "model", "reads", "a", "row", "of", "tokens", "and", "writes", "another", "language"]


def texts(n: int, seed: int = 0) -> list[dict[str, str]]:
    draw = random.Random(seed)
    return [
        {
            "source": " ".join(draw.choices(WORDS, k=draw.randint(1, 12))),
            "target": f"{k} " + "un mot " * draw.randint(1, 4),
        }
        for k in range(n)
    ]


def config_of(directory: Path, *arguments: str, n: int = 500) -> Config:
    path = directory / "pairs.jsonl"
    if not path.exists():
        path.write_text("".join(json.dumps(pair) + "\n" for pair in texts(n)))
    given = ["model=composed_encoder_decoder", "scale=debug", "data=pairs", f"data.path={path}", "tokenizer=bytes"]
    given += [f"data.cache={directory / 'cache'}", "model.context=192", "train.batch_rows=16", *arguments]
    return load_config([f"{key}={value}" for key, value in dict(word.split("=", 1) for word in given).items()])


@pytest.mark.parametrize(("batch_rows", "multiple"), [(16, 8), (12, 4), (3, 1)])
def test_a_window_is_cut_into_batches_of_like_length(batch_rows: int, multiple: int) -> None:
    """Caught: a pair that is lost or comes twice; a batch with too many tokens, rows that ranks cannot share, or pairs
    of unlike length; batches in the order of their lengths; a window that is the same for another number or seed."""
    draw = random.Random(0)
    lengths = np.array([draw.randint(2, 96) for _ in range(30_000)])
    window = window_of(lengths, 1, batch_rows, batch_rows * 192, seed=3)
    assert rows_multiple(batch_rows) == multiple
    assert len(window.indices) == window.ends[-1] == WINDOW
    assert len(set(window.indices.tolist())) == WINDOW
    sizes = np.diff(window.ends, prepend=0)
    assert (sizes % multiple == 0).all()
    assert (2 * sizes * window.halves <= batch_rows * 192).all()
    parts = np.split(window.indices, window.ends[:-1])
    assert [lengths[part].max() for part in parts] == window.halves.tolist()
    padding = 1 - sum(lengths[part].sum() for part in parts) / (sizes * window.halves).sum()
    assert padding < 0.02
    assert 0.3 < (np.diff(window.halves) > 0).mean() < 0.7
    # A window has many batches, however large they are, and no pair twice, however few there are.
    for n, most_tokens, size in ((30_000, 20_001, 20_000), (30_000, 262_144, 30_000), (77, 3072, 72), (5, 3072, 8)):
        assert window_of(lengths[:n], 0, 16, most_tokens, seed=3).ends[-1] == size
    for other in (
        window_of(lengths, 2, batch_rows, batch_rows * 192, 3),
        window_of(lengths, 1, batch_rows, batch_rows * 192, 4),
    ):
        assert (other.indices != window.indices).mean() > 0.9


def test_batches_are_the_same_on_any_ranks_and_after_a_resume(tmp_path: Path) -> None:
    """Caught: rows, widths or a data_hash that depend on the ranks; a resume that begins another batch; micro batches
    that are not the rank's rows; a batch above train.batch_tokens."""
    config = config_of(tmp_path)
    data = open_dataset(config)

    def steps(world_size: int, n: int, micro_rows: int = 2, state: dict[str, Any] | None = None) -> list[Any]:
        loaders = [
            TrainLoader(reader_of(data, config, rank, world_size, state), 16, micro_rows, rank, world_size, state)
            for rank in range(world_size)
        ]
        found = []
        for _ in range(n):
            ranks = [next(loader) for loader in loaders]
            assert {len(micro) for micro, _ in ranks} == {16 // (world_size * micro_rows)}
            rows = [np.concatenate([batch[part] for batch in micro]) for micro, _ in ranks for part in range(3)]
            tokens = np.stack(rows[::3], axis=1).reshape(-1, rows[0].shape[1])  # row k is on rank k modulo R
            found.append((tokens.tolist(), merged([position for _, position in ranks])))
        return found

    alone = steps(1, 40)
    for tokens, _ in alone:
        assert len(tokens) * len(tokens[0]) <= 16 * 192
    assert len({len(tokens) for tokens, _ in alone}) > 3
    assert steps(4, 40) == steps(8, 40, micro_rows=1) == steps(1, 40, micro_rows=16) == alone
    assert steps(2, 15, state=alone[24][1]) == alone[25:]
    with pytest.raises(ConfigError, match=r"train\.batch_rows=16: .* multiples of 8 rows, which 3 ranks"):
        reader_of(data, config, 0, 3)


def test_a_row_has_two_halves(tmp_path: Path) -> None:
    """Caught: a decoder that does not begin with eos, a target that is not the next token or is missing, padding that
    counts."""
    pairs = Pairs("train", tmp_path, 9, [(np.array([1, 2, 3]), np.array([4, 5]))])
    tokens, targets, doc_ids = (part[0].tolist() for part in PairRows(pairs).batch(np.array([0]), half=5))
    assert tokens == [1, 2, 3, 9, 0, 9, 4, 5, 0, 0]
    assert targets == [IGNORED] * 5 + [4, 5, 9] + [IGNORED] * 2
    assert doc_ids == [0] * 4 + [PADDING] + [0] * 3 + [PADDING] * 2


@pytest.mark.parametrize("norm", ["rms", "layer", "batch", "pn_v", "pn"])
@torch.no_grad()
def test_padding_changes_nothing(norm: str, tmp_path: Path) -> None:
    """Caught: a source that is cut at a fixed place; padding that is attended to, counts in the loss, or enters a
    statistic or gradient of a norm over the batch."""
    config = config_of(
        tmp_path, "model.vocab_size=257", f"model.norm={norm}", *["model.psi_warmup_steps=0"] * (norm == "pn")
    )
    data = open_dataset(config)
    rows = PairRows(data.train)  # type: ignore[arg-type]
    model = build_model(config.model).double().train()
    found = []
    for half in (None, 96):
        copy = build_model(config.model).double().train()
        copy.load_state_dict(model.state_dict())
        batch = [torch.from_numpy(part) for part in rows.batch(np.arange(24), half)]
        with torch.enable_grad():
            loss = copy(*batch).total
            loss.backward()
        state = {name: value.clone() for name, value in copy.statistics().items()} if norm in OVER_BATCH else {}
        found.append((loss, {n: p.grad for n, p in copy.named_parameters()}, state))
    (loss, gradients, state), (padded, of_padded, padded_state) = found
    assert torch.allclose(loss, padded, rtol=1e-12)
    assert gradients.keys() == of_padded.keys()
    for name, gradient in gradients.items():
        assert torch.allclose(gradient, of_padded[name], rtol=1e-9, atol=1e-12), name  # type: ignore[arg-type]
    for name, value in state.items():
        assert torch.allclose(value, padded_state[name], rtol=1e-12), name
    assert bool(state) == (norm in OVER_BATCH)


def test_norms_apart(tmp_path: Path) -> None:
    """Caught: the encoder's norm in the decoder or at its end; group scaling before the decoder's LayerNorm; an
    explicit norm that is not the implicit one; a warm-up without its length."""
    given = ["model.vocab_size=257", "model.norm=pn", "schedule.warmup_steps=7"]
    both, same, apart, turned = (
        config_of(tmp_path, *given, *more).model
        for more in (
            [],
            ["model.decoder_norm=pn"],
            ["model.decoder_norm=layer"],
            ["model.norm=layer", "model.decoder_norm=pn"],
        )
    )
    found = [set(build_model(model).statistics()) for model in (both, same, apart, turned)]
    assert found[0] == found[1] == found[2] | found[3]
    assert {name.split(".")[0] for name in found[2]} == {"encoder", "norm_encoder"}
    assert {name.split(".")[0] for name in found[3]} == {"layers", "norm_final"}
    for model, norms in ((apart, "layers"), (turned, "encoder")):
        assert model.psi_warmup_steps == 7  # type: ignore[attr-defined]
        other = getattr(build_model(model), norms)[0].norm_mlp
        assert (type(other).__name__, getattr(other, "groups", 0)) == ("LayerNorm", 0)


def test_one_matrix_for_all_three(tmp_path: Path) -> None:
    config = config_of(tmp_path, "model.shared_source=true", "model.tied_embeddings=true", "model.vocab_size=300")
    model = build_model(config.model)
    assert [name for name, p in model.named_parameters() if 300 in p.shape] == ["embedding"]


def test_texts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Caught: an empty side; a pair that is cut; a tokenizer of one side; columns of a tsv; a split without pairs."""
    lines = ["a b\tune phrase", "\tvide", f"{'x' * 200}\tlongue"] + [f"w{k} two\tmot {k}" for k in range(60)]
    (tmp_path / "t.tsv").write_text("".join(f"{line}\n" for line in lines))
    of = ["data.text_field=1", "data.translation_field=2", f"data.path={tmp_path / 't.tsv'}", "data.val_fraction=0.2"]
    with caplog.at_level(logging.INFO):
        data = open_dataset(config_of(tmp_path, *of))
    assert len(data.train.pairs) + len(data.validation.pairs) == 61  # type: ignore[union-attr, attr-defined]
    assert sum("left out: a side is empty or longer" in m for m in caplog.messages) in (1, 2)
    trained = config_of(tmp_path, *of, "tokenizer=sentencepiece", "tokenizer.vocab_size=300")
    first, again = open_pairs(trained, None), open_pairs(trained, None)
    assert first.fingerprint == again.fingerprint
    assert first.tokenizer.decode(first.tokenizer.encode("phrase two mot")) == "phrase two mot"
    with pytest.raises(DataError, match="no pair of the train"):
        open_dataset(config_of(tmp_path, *of, "model.context=4"))


def test_aligned_files(tmp_path: Path) -> None:
    """As tools for translation write them; subword-nmt's pieces are the words. Caught: lines that are cut elsewhere
    than at a line feed, sides that are swapped, a file that is shorter unnoticed."""
    for split, n in (("train", 40), ("valid", 6)):
        (tmp_path / f"{split}.de").write_text("".join(f"ein@@ s {split} {k}\u2028x\n" for k in range(n)))
        (tmp_path / f"{split}.en").write_text("".join(f"one {split} {k}\n" for k in range(n)))
    of = ["data.text_field=de", "data.translation_field=en", "tokenizer=words"]
    of += [f"data.path={tmp_path}/train", f"data.val_files={tmp_path}/valid"]
    data = open_dataset(config_of(tmp_path, *of))
    assert isinstance(data.validation, Pairs)
    decode = data.tokenizer.decode
    assert [decode(source) for source, _ in data.validation.pairs] == [f"ein@@ s <unk> {k} x" for k in range(6)]
    assert [decode(translation) for _, translation in data.validation.pairs] == [f"one <unk> {k}" for k in range(6)]
    config = config_of(tmp_path, *of)
    assert [file.name for part in text_files(config.data) for file in part] == ["train.de", "valid.de"]
    with pytest.raises(DataError, match=r"valid: no such file, and no .*valid\.fr"):
        open_dataset(config_of(tmp_path, *of, "data.text_field=fr"))
    with pytest.raises(DataError, match="none is left to train on"):
        open_dataset(config_of(tmp_path, *of, f"data.val_files={tmp_path}/train"))
    for file in ("train.de", "train.en", "valid.de", "valid.en"):
        (tmp_path / f"{file}.txt").write_bytes((tmp_path / file).read_bytes())
    as_text = open_dataset(config_of(tmp_path, *of, "data.text_field=de.txt", "data.translation_field=en.txt"))
    assert as_text.fingerprint == data.fingerprint
    with pytest.raises(DataError, match=r"train\.de\.txt: a text file has no fields de,en"):
        open_dataset(config_of(tmp_path, *of, f"data.path={tmp_path}/train.de.txt"))
    (tmp_path / "valid.en").write_text("one\n")
    with pytest.raises(DataError, match=r"valid\.de has 6 lines and .*valid\.en has 1 line"):
        open_dataset(config_of(tmp_path, *of))
    (tmp_path / "valid.en").unlink()
    with pytest.raises(DataError, match=r"valid\.en: cannot be read"):
        open_dataset(config_of(tmp_path, *of))


def test_a_side_that_is_no_text(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "a.jsonl").write_text('{"source": "a", "target": "b"}\n{"source": "c", "target": null}\n')
    pq.write_table(pa.table({"source": ["a"], "target": [b"b"]}), tmp_path / "b.parquet")
    for file, said in (("a.jsonl", r"a\.jsonl, pair 2: .*NoneType"), ("b.parquet", r"row 1: 'target' holds bytes")):
        with pytest.raises(DataError, match=said):
            open_dataset(config_of(tmp_path, f"data.path={tmp_path / file}"))


def test_the_weights_of_a_translator_are_those_of_a_prefix_model_and_of_a_labelled_one(tmp_path: Path) -> None:
    translator = config_of(tmp_path, "model.vocab_size=300")
    prefix = load_config(["model=composed_encoder_decoder", "scale=debug", "model.context=192", "model.vocab_size=300"])
    labelled = load_config(
        [
            *("model=composed_encoder_decoder", "scale=debug", "model.context=191", "model.translates=true"),
            *("data=local", "data.path=x.jsonl", "data.label_field=y", "data.labels=[a,b]", "model.vocab_size=300"),
        ]
    )
    assert [x.model.objective for x in (translator, prefix, labelled)] == [
        "translation",
        "prefix_continuation",
        "label",
    ]
    for a, b in ((translator, prefix), (prefix, translator), (translator, labelled)):
        assert differing_weights(a.model, b.model) == []


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_field_within_a_field(kind: str, tmp_path: Path) -> None:
    """As translations on the hub have it; and halves of the held-out pairs, which share none."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for split, n in (("train", 20), ("valid", 30)):
        found = [{"translation": {"en": f"{split} {k}", "de": f"Satz {k}"}} for k in range(n)]
        if kind == "parquet":
            pq.write_table(
                pa.table({"translation": [one["translation"] for one in found]}), tmp_path / f"{split}.parquet"
            )
        else:
            (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in found))
    of = ["data.text_field=translation.en", "data.translation_field=translation.de"]
    of += [f"data.path={tmp_path}/train.{kind}", f"data.val_files={tmp_path}/valid.{kind}"]
    parts = [open_dataset(config_of(tmp_path, *of, *part)) for part in ([], ["data.val_range=[0,0.5]"])]
    parts.append(open_dataset(config_of(tmp_path, *of, "data.val_range=[0.5,1]")))
    sides = [{bytes(source) for source, _ in part.validation.pairs} for part in parts]  # type: ignore[union-attr, attr-defined]
    assert sides[0] == {f"valid {k}".encode() for k in range(30)} == sides[1] | sides[2]
    assert not sides[1] & sides[2]
    assert len(sides[1]) > 5 < len(sides[2])
    with pytest.raises(DataError, match=r"no \w+ 'translation\.fr' \(there are: 'translation.en', 'translation\.de'\)"):
        open_dataset(config_of(tmp_path, *of, "data.translation_field=translation.fr"))


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["data.val_files=x", "data.val_range=[0.5]"], ["data.val_range", "low and a higher"]),
        (["eval.beams=2", "data.translation_field=null"], ["eval.beams", "does not translate"]),
        (["model=gpt", "model.vocab_size=300"], ["data.translation_field", "model.name"]),
        (["data.translation_field=other"], ["no field 'other'", "source"]),
        (["data.streaming=true"], ["data.translation_field", "data.streaming"]),
        (["model.context=191"], ["model.context", "even"]),
        (["logging.sample_prompt=x"], ["logging.sample_prompt", "translates"]),
    ],
)
def test_mistakes(arguments: list[str], names: list[str], tmp_path: Path) -> None:
    with pytest.raises((ConfigError, DataError)) as error:
        open_dataset(config_of(tmp_path, *arguments))
    assert all(name in str(error.value) for name in names), str(error.value)
