"""Examples with a label: their rows, the answers of a model, and fine-tuning from another run."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml

from ngpt_train import load
from ngpt_train.__main__ import main
from ngpt_train.config import load_config
from ngpt_train.config.stored import read_yaml, to_yaml
from ngpt_train.core.constants import IGNORED, MILLION
from ngpt_train.core.errors import ConfigError, DataError
from ngpt_train.data import open_dataset
from ngpt_train.data.dataset import Examples
from ngpt_train.data.epochs import planned_rows
from ngpt_train.data.examples import label_of
from ngpt_train.data.rows import LabelRows, joined
from ngpt_train.data.tokenizers import load_tokenizer
from ngpt_train.distributed.world import World
from ngpt_train.evaluation.answers import Answers
from ngpt_train.models import build_model, export_weights
from ngpt_train.training.checkpoint import taken_over
from ngpt_train.training.checkpoint.load import load_model
from ngpt_train.training.checkpoint.taken_over import with_trained_model
from tests.processes.runs import arguments, records, write_corpus

EOS = 256
LABELLED = ["data.label_field=label", "data.text_field=a,b"]
FILE = ["data=local", "data.path=x"]


def ids(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8)


def examples() -> Examples:
    return Examples("train", Path("x"), EOS, [[ids("ab"), ids("cde")], [ids("f"), ids("g")]], np.array([1, 0]))


@pytest.mark.parametrize(
    ("options", "places"),
    [
        (["model=gpt"], (7, 4)),
        (["model=gpt", "model.bidirectional=true"], (0, 0)),
        (["model=gpt_encoder_decoder", "model.source_context=9"], (9, 9)),
    ],
)
def test_rows(options: list[str], places: tuple[int, int]) -> None:
    """Caught: a place that has not read the whole example, padding that counts as a token, a lost eos."""
    size = ["model.context=32", "tokenizer=bytes"]
    config = load_config([*options, *FILE, *LABELLED, "data.labels=['no','yes']", *size])
    assert (config.data.objective, config.model.n_classes) == ("label", 2)
    tokens, targets, doc_ids = LabelRows(examples(), config).batch(np.array([0, 1]))
    assert tokens.shape == targets.shape == doc_ids.shape == (2, 32)
    assert tokens[0, :8].tolist() == [EOS, *b"ab", EOS, *b"cde", EOS]
    assert tokens[1, :5].tolist() == [EOS, *b"f", EOS, *b"g", EOS]
    read = [[*range(8), *places[:1]], [*range(5), *places[1:]]]
    for row, label in ((0, 1), (1, 0)):
        assert np.flatnonzero(targets[row] != IGNORED).tolist() == [places[row]]
        assert targets[row, places[row]] == label
        assert np.flatnonzero(doc_ids[row] == 0).tolist() == sorted(set(read[row]))


def test_long_examples_are_cut_where_they_are_longest() -> None:
    for a, b, most, expected in (("abcdefgh", "xyz", 10, b"\0abcd\0xyz\0"), ("abcdef", "uvwxyz", 7, b"\0ab\0uv\0")):
        assert joined([ids(a), ids(b)], 0, most).astype(np.uint8).tobytes() == expected


def test_labels() -> None:
    assert [label_of(x, ["0", "1"], Path()) for x in (0, "1", 1)] == [0, 1, 1]
    assert label_of(True, ["false", "true"], Path()) == 1
    assert label_of("3.75", None, Path()) == 3_750_000
    with pytest.raises(DataError, match=r"'maybe' is none of data\.labels=\['no', 'yes'\]"):
        label_of("maybe", ["no", "yes"], Path())
    with pytest.raises(DataError, match=r"no number; name the classes with data\.labels"):
        label_of("yes", None, Path())


def test_metrics() -> None:
    """By hand: 3 right of 4, F1 of class 1 with one false positive, Matthews' phi; correlations of three numbers."""
    found = Answers(np.array([1, 1, 0, 0]), np.array([1.0, 1.0, 1.0, 0.0]), 2).metrics()
    assert found == pytest.approx({"accuracy": 0.75, "f1": 0.8, "matthews": 1 / np.sqrt(3)})
    numbers = Answers(np.array([1, 2, 4]) * MILLION, np.array([1.0, 3.0, 2.0]), 1).metrics()
    assert numbers == pytest.approx({"pearson": 0.5 / np.sqrt(7 / 3), "spearman": 0.5})
    assert Answers(np.array([1, 2]) * MILLION, np.ones(2), 1).metrics() == {"pearson": 0.0, "spearman": 0.0}


@pytest.mark.parametrize("name", ["gpt", "ngpt", "normformer", "gpt_encoder_decoder", "ntransformer"])
@pytest.mark.parametrize("labels", ["['a','b','c']", "null"])
def test_the_loss_of_a_label(name: str, labels: str) -> None:
    """The cross-entropy of the classes, or the squared error of the number, at the label's place; gradients too."""
    options = [f"model={name}", *FILE, *LABELLED, f"data.labels={labels}", "model.context=12", "model.vocab_size=257"]
    config = load_config([*options, "scale=debug", "model.d_model=16", "model.n_heads=2", "model.n_layers=1"])
    model = build_model(config.model).double().eval()
    n_classes = 1 if labels == "null" else 3
    gold = torch.tensor([2, 1]) if n_classes > 1 else torch.tensor([2_500_000, 500_000])
    given = Examples("train", Path("x"), EOS, examples().texts, gold.numpy())
    tokens, targets, doc_ids = (torch.from_numpy(part) for part in LabelRows(given, config).batch(np.array([0, 1])))
    source = config.model.source_length(config.model.context)
    logits = model(tokens, doc_ids=doc_ids)
    at = logits[torch.arange(2), (targets[:, source:] != IGNORED).int().argmax(1)]
    assert at.shape == (2, n_classes)
    expected = (
        F.cross_entropy(at, gold, reduction="sum") if n_classes > 1 else (at[:, 0] - gold / MILLION).square().sum()
    )
    total, n = model.loss(tokens, targets, doc_ids)
    assert n == 2
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=0)
    wanted = torch.autograd.grad(expected, [model.output, model.embedding])
    torch.testing.assert_close(torch.autograd.grad(total, [model.output, model.embedding]), wanted)
    with torch.no_grad():
        answers = model(tokens, targets, doc_ids).answers
    torch.testing.assert_close(answers[:, 0], at.argmax(1) if n_classes > 1 else at[:, 0])


def write_examples(path: Path, n: int) -> None:
    """A task that a small model learns: whether both texts have the same first letter."""
    draw = np.random.default_rng(0)
    with path.open("w") as file:
        for i in range(n):
            a, b = draw.choice(list("ab"), 2)
            file.write(json.dumps({"a": f"{a} one {i}", "b": f"{b} two", "label": bool(a == b)}) + "\n")


def test_fine_tuning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From a run of masks: its weights but the head's, its tokenizer, its sphere; a resume; written answers."""
    text = write_corpus(tmp_path / "text.txt")
    pretrained = arguments(tmp_path, text, "model=ngpt", "objective=masked", "train.steps=4", "run.name=first")
    assert main(["train", *pretrained]) == 0
    write_examples(tmp_path / "task.jsonl", 400)
    task = [
        *("finetune", f"run.init_from={tmp_path}/runs/first", "data=local", f"data.path={tmp_path}/task.jsonl"),
        *(*LABELLED, "data.labels=['false','true']", "data.val_fraction=0.2", "eval.rows=1000", "eval.every=20"),
        *(
            "train.steps=40",
            "train.batch_rows=16",
            "optim.lr=2e-2",
            "model.context=40",
            f"run.root={tmp_path}/runs",
            "run.name=second",
        ),
        *(f"data.cache={tmp_path}/cache", "logging.wandb.mode=disabled"),
    ]
    of_all = [word for word in task if not word.startswith(("run.name", "optim.lr", "data.text_field"))]
    capsys.readouterr()
    assert main([*of_all, "data.text_field='a,b'", "-m", "optim.lr=1e-2,2e-2", "--cfg", "job"]) == 0
    jobs = [yaml.safe_load(job) for job in capsys.readouterr().out.split("---\n")]
    assert [(job["model"]["name"], job["run"]["name"]) for job in jobs] == [
        ("ngpt", f"ngpt-labels-seed0/{k}") for k in range(2)
    ]
    assert main([*task, "train.stop_at=20"]) == main(task) == 0
    last = records(tmp_path / "runs" / "second", "eval")[40]
    lines = (tmp_path / "runs" / "second" / "evals" / "step_00000040_answers.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert np.mean([x["label"] == x["answer"] for x in found]) == pytest.approx(last["accuracy"])
    assert {x["label"] for x in found} == {0, 1}
    assert last["accuracy"] > 0.7
    matrices = [w for w in export_weights(load(tmp_path / "runs/second").model).values() if w.ndim == 2]
    assert matrices
    assert all(min((w.norm(dim=k) - 1).abs().max() for k in (0, 1)) < 1e-6 for w in matrices)  # the head's rows too
    assert "accuracy" in capsys.readouterr().out
    assert main(["generate", f"generate.checkpoint={tmp_path}/runs/second"]) == 2
    assert "answers labels, and continues no text" in capsys.readouterr().err
    assert main(["probe", f"probe.checkpoints=[{tmp_path}/runs/first]"]) == 2
    assert "fills in masks, and continues no text" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="fills in masks"):
        load(tmp_path / "runs/first").generate("a")
    out = tmp_path / "found.json"
    assert main(["evaluate", f"evaluate.checkpoint={tmp_path}/runs/second", f"evaluate.out={out}"]) == 0
    again = json.loads(out.read_text(), parse_constant=pytest.fail)  # JSON has no NaN
    assert again["matthews"] == pytest.approx(last["matthews"])
    assert again["bits_per_byte"] is None


def test_psi_warms_up_with_the_schedule_of_the_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretrained = load_config(["model=powernorm", "scale=debug", "train.steps=9000", "schedule.warmup_steps=8000"])
    assert pretrained.model.psi_warmup_steps == 8000  # type: ignore[attr-defined]
    (tmp_path / "config.yaml").write_text(to_yaml(pretrained))
    monkeypatch.setattr(taken_over, "find_checkpoint", lambda key, path: tmp_path)
    given = with_trained_model(["run.init_from=x", *FILE, *LABELLED, "data.labels=['0','1']", "train.steps=50"])
    model = load_config([*given, "schedule.warmup_steps=5"]).model
    assert (model.name, model.psi_warmup_steps) == ("powernorm", 5)  # type: ignore[attr-defined]


def test_what_is_taken_over(tmp_path: Path) -> None:
    text = write_corpus(tmp_path / "text.txt")
    assert main(["train", *arguments(tmp_path, text, "model=ngpt", "train.steps=2", "run.name=first")]) == 0
    (checkpoint,) = (tmp_path / "runs/first/checkpoints").glob("step_00000002")
    config = read_yaml(checkpoint / "config.yaml").model
    whole = build_model(config)
    world = World(0, 1, 0, torch.device("cpu"))
    load_model(checkpoint, whole, world)
    config.n_classes = 3
    model = build_model(config, seed=5)
    before = export_weights(model)
    load_model(checkpoint, model, world, new_head=True)
    after, trained = export_weights(model), export_weights(whole)
    for name, weight in after.items():
        assert torch.equal(weight, before[name] if name in ("output", "s_z") else trained[name]), name
    torch.testing.assert_close(after["output"].norm(dim=1), torch.ones(3))


@pytest.mark.slow
def test_a_study_fine_tunes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Caught: an arm with another model than its run's, a step whose cost cannot be measured for labels."""
    text = write_corpus(tmp_path / "text.txt")
    pretrained = arguments(tmp_path, text, "model=gpt", "model.d_mlp=48", "train.steps=1", "run.name=first")
    assert main(["train", *pretrained]) == 0
    write_examples(tmp_path / "task.jsonl", 60)
    shared = {
        "data": "local",
        "data.path": f"{tmp_path}/task.jsonl",
        "data.text_field": "a,b",
        "data.label_field": "label",
    }
    shared |= {"data.labels": ["false", "true"], "train.batch_rows": 8, "data.cache": f"{tmp_path}/cache"}
    arms = {"a": {"run.init_from": f"{tmp_path}/runs/first"}, "b": {"run.init_from": f"{tmp_path}/runs/first"}}
    arms["b"]["model.residual_dropout"] = 0.1
    study = {"arms": arms, "shared": shared, "budgets": [20_000], "seeds": [0], "metric": "error"}
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "mine.yaml").write_text(json.dumps(study))
    given = ["study", "--config-dir", str(tmp_path), "study=mine", f"study.root={tmp_path}/studies"]
    capsys.readouterr()
    assert main([*given, "study.dry_run=true"]) == 0
    said = capsys.readouterr().out
    assert "Hours of" not in said
    config = read_yaml(tmp_path / "runs/first/config.yaml").model
    config.n_classes, config.tied_embeddings = 2, False
    n_params = build_model(config).n_params()
    assert len(re.findall(rf"^[ab] +{n_params / 1e3:.3g}k ", said, re.MULTILINE)) == 2, said


def test_files(tmp_path: Path) -> None:
    """tsv by columns' names and numbers, parquet, and a split of their own."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "x.tsv").write_text("id\ta\tb\tlabel\n1\tp q\tr\t0\n2\ts\tt\t1\n")
    (tmp_path / "w.tsv").write_text("4\tm\tn\t0\n")
    (tmp_path / "y.tsv").write_text('3\t"u\tv\t1\n')
    pq.write_table(pa.table({"a": ["w"], "b": ["x"], "label": [0]}), tmp_path / "z.parquet")
    base = ["model=gpt", "tokenizer=bytes", "data=local", "data.labels=['0','1']"]

    def opened(path: str, held_out: str, *options: str) -> list[list[bytes]]:
        files = [f"data.path={tmp_path}/{path}", f"data.val_files={tmp_path}/{held_out}"]
        config = load_config([*base, *files, *(options or LABELLED)])
        data = open_dataset(config, load_tokenizer(config.tokenizer))
        assert isinstance(data.train, Examples)
        assert isinstance(data.validation, Examples)
        assert len(data.validation.labels) == 1
        return [[bytes(text) for text in texts] for texts in data.train.texts]

    assert opened("x.tsv", "z.parquet") == [[b"p q", b"r"], [b"s", b"t"]]
    assert opened("y.tsv", "w.tsv", "data.text_field=2,3", "data.label_field=4") == [[b'"u', b"v"]]
    with pytest.raises(DataError, match="no column 'a'"):
        opened("y.tsv", "z.parquet")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["train", *LABELLED, "data.streaming=true", "data=local", "data.path=x"], r"data\.streaming"),
        (["train", "model.n_classes=2"], r"data\.label_field"),
        (["train", *LABELLED, "data.labels=[]"], r"data\.labels"),
        (["train", *FILE, *LABELLED, "data.labels=['0','1']", "eval.contexts=[64]"], r"eval\.contexts"),
        (
            ["train", *FILE, *LABELLED, "data.labels=['0','1']", "data.val_range=[0,0.5]"],
            r"(?s)data\.val_range.*data\.val_files",
        ),
        (["prepare", *FILE, *LABELLED, "data.labels=['0','1']"], "are no running text"),
        (["finetune", "task=rte"], r"run\.init_from names no trained model"),
    ],
)
def test_refusals(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(options) == 2
    assert re.search(said, capsys.readouterr().err)


def test_conflicts_name_the_keys() -> None:
    with pytest.raises(ConfigError, match=r"model\.n_classes"):
        load_config([*LABELLED, "data.labels=['a','b']", "model.n_classes=3"])


def test_examples_of_another_file_all_validate(tmp_path: Path) -> None:
    (tmp_path / "other.tsv").write_text("".join(f"{k % 2}\ttext {k}\n" for k in range(9)))
    given = ["model=gpt", "scale=debug", "tokenizer=bytes", "data=local", f"data.path={tmp_path}/other.tsv"]
    given += ["data.text_field=2", "data.label_field=1", "data.labels=['0','1']", f"data.cache={tmp_path}/cache"]
    data = open_dataset(load_config([*given, "data.val_fraction=1"]))
    assert isinstance(data.validation, Examples)
    assert data.validation.labels.tolist() == [0, 1] * 4 + [0]
    assert planned_rows(load_config([*given, "model.vocab_size=300"])) == {"": None}
