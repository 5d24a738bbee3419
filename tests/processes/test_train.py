"""One run, and everything it leaves behind."""

import json
import math
import re
import shutil
import socket
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ngpt_train import load
from ngpt_train.__main__ import main
from ngpt_train.core import log
from ngpt_train.training.checkpoint import save
from tests.processes.runs import arguments, checkpoints, end_of, records, starts


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    root = tmp_path_factory.mktemp("run")
    options = ["train.steps=20", "logging.every=5", "eval.every=8", "checkpoint.every=3", "checkpoint.keep_every=9"]
    assert main(["train", *arguments(root, corpus, *options, "train.profile=true")]) == 0
    return root / "runs/test"


def test_records(directory: Path) -> None:
    train, evaluations = records(directory), records(directory, "eval")
    assert sorted(train) == [5, 10, 15, 20]
    assert sorted(evaluations) == [0, 8, 16, 20]
    assert train[20]["tokens"] == 20 * 8 * 64
    assert train[20]["mfu"] is None
    assert all("z_loss" not in record for record in train.values())
    assert {"loss", "lr", "grad_norm", "tokens_per_s", "step_time", "data_time", "memory_gb", "skipped"} <= set(
        train[5]
    )
    last = evaluations[20]
    assert last["loss"] < 0.95 * evaluations[0]["loss"]
    assert last["ppl"] == pytest.approx(math.exp(last["loss"]))
    # Every byte is a token here, and one in some 250 tokens ends a document and stands for none.
    assert last["bits_per_byte"] == pytest.approx(last["loss"] / math.log(2), rel=0.02)
    assert last["bits_per_byte"] > last["loss"] / math.log(2)


def test_files(directory: Path) -> None:
    end = {"code": 0, "reason": "done", "step": 20, "rank": 0, "host": socket.gethostname()}
    assert end_of(directory) == end
    assert checkpoints(directory) == ["step_00000009", "step_00000018", "step_00000020"]
    assert (directory / "curves.png").stat().st_size > 10_000
    assert json.loads((directory / "profile/rank_0.json").read_text())["traceEvents"]
    (start,) = starts(directory)
    assert start["world_size"] == 1
    assert len(start["data_fingerprint"]) == 64
    log = (directory / "logs/rank_0.log").read_text()
    assert "unigram" in log


def test_evaluate_agrees_with_training(directory: Path, corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    given = arguments(tmp_path, corpus, f"evaluate.checkpoint={directory}", f"evaluate.out={out}")
    assert main(["evaluate", *given]) == 0
    result = json.loads(out.read_text())
    assert result["loss"] == records(directory, "eval")[20]["loss"]
    assert result["step"] == 20


def test_generate(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def text(*overrides: str) -> str:
        capsys.readouterr()
        given = [f"generate.checkpoint={directory}", "generate.prompt=the model", "generate.max_new_tokens=40"]
        assert main(["generate", *given, *overrides]) == 0
        return capsys.readouterr().out

    assert text().startswith("the model")
    assert text() == text()
    assert text() != text("generate.seed=1")
    assert text("generate.temperature=0") == text("generate.top_k=1", "generate.seed=5")
    assert text("generate.temperature=0") == text("generate.top_p=1e-6", "generate.seed=5")
    assert text("generate.seed=1") == text("generate.seed=1", "generate.cache=false")
    both = text("generate.samples=2")
    assert both == f"--- generate.seed=0\n{text()}--- generate.seed=1\n{text('generate.seed=1')}"
    scored = text("generate.logprobs=true").removeprefix(text()).splitlines()
    assert 0 < len(scored) <= 40
    assert all(float(line.split()[0]) < 0 for line in scored)


def test_a_text_is_printed_without_notes(
    directory: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Caught: a note on the attention that was chosen, in the middle of the text on the terminal."""
    monkeypatch.setattr(log, "_said", set())
    given = [f"generate.checkpoint={directory}", "generate.max_new_tokens=3"]
    with caplog.at_level("INFO", "ngpt_train"):
        assert main(["generate", *given]) == 0
    assert "kernels: " in caplog.text  # notes are logged, before the text
    assert "attention: " not in caplog.text


def test_another_text_is_evaluated_in_part(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Caught: nothing tells a user who names a file that only its held-out share is evaluated."""
    text = tmp_path / "other.txt"
    text.write_text("the model reads a line of this text\n" * 200)
    given = [f"evaluate.checkpoint={directory}", "data=local", f"data.path={text}", f"data.cache={tmp_path}"]
    with caplog.at_level("INFO", "ngpt_train"):
        assert main(["evaluate", *given]) == 0
        assert "hold out of this text is evaluated, data.val_fraction=0.02;" in caplog.text
    (targets,) = re.findall(r"rows with ([\d,]+) targets", caplog.text)
    bytes_of_text = len(text.read_bytes())
    assert 0.01 * bytes_of_text < int(targets.replace(",", "")) < 0.03 * bytes_of_text


def test_all_of_a_text_is_evaluated(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The loss on all documents against one forward pass after the other. Caught: a document left out, the end of the
    text left out or counted twice, the rows of training alone, the first shards of streamed text alone."""
    documents = [f"line {n} of this text is read" + " once more" * (n % 7) for n in range(121)]
    text = tmp_path / "other.jsonl"
    text.write_text("".join(json.dumps({"text": x}) + "\n" for x in ["", *documents]))
    given = [f"evaluate.checkpoint={directory}", "data=local", f"data.path={text}", f"data.cache={tmp_path / 'cache'}"]
    given = ["evaluate", *given, f"evaluate.out={tmp_path / 'loss.json'}"]
    assert main([*given, "data.val_fraction=0.001"]) == 3
    assert "to `evaluate` all of a text, set it to 1" in capsys.readouterr().err

    def found(*overrides: str) -> dict[str, Any]:
        assert main([*given, "data.val_fraction=1", *overrides]) == 0
        return json.loads((tmp_path / "loss.json").read_text())

    with caplog.at_level("INFO", "ngpt_train"):
        result = found()
        assert "all of the text is evaluated" in caplog.text
    trained = load(directory)
    eos, context = trained.tokenizer.eos, trained.config.model.context
    ids = torch.tensor([eos, *(i for x in documents for i in [*x.encode(), eos])])
    n = len(ids) - 1
    total = 0.0
    for first in range(0, n, context):
        start = min(first, n - context)  # the last row reads what the one before has read
        with torch.no_grad():
            log_p = trained.model(ids[None, start : start + context])[0].double().log_softmax(-1)
        total -= sum(float(log_p[i - start, ids[i + 1]]) for i in range(first, min(first + context, n)))
    assert n > 64 * context, "more than eval.rows of the run"
    assert result["n_targets"] == n
    assert result["loss"] == pytest.approx(total / n, rel=1e-5)
    assert result["bits_per_byte"] == pytest.approx(total / math.log(2) / sum(map(len, documents)), rel=1e-5)
    assert found("data.streaming=true")["rows_hash"] == result["rows_hash"]
    assert found("eval.rows=3")["rows"] == 3
    assert "and of it eval.rows=3" in caplog.text

    text.write_text(json.dumps({"text": documents[0] * 9}) + "\n")
    assert found()["n_targets"] == 9 * len(documents[0]) + 1, "all of a single document"
    text.write_text(json.dumps({"text": "too short"}) + "\n")
    assert main([*given, "data.val_fraction=1"]) == 3
    assert "has 10 tokens, less than one row" in capsys.readouterr().err


def test_no_text_is_left_to_train_on(
    directory: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Caught: a run that waits for rows, or an error about an empty split; a file whose own split is ignored."""
    assert main(["train", *arguments(tmp_path, corpus, "data.val_fraction=1")]) == 2
    assert "data.val_fraction=1: all of the text would validate, and none is left to" in capsys.readouterr().err
    given = ["evaluate", f"evaluate.checkpoint={directory}", "data.val_fraction=1", "data=local", f"data.path={corpus}"]
    assert main([*given, f"data.val_files={corpus}"]) == 2
    assert "has a validation split of its own" in capsys.readouterr().err


def test_generate_from_a_file_and_from_stdin(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same texts as one by one. Caught: an existing file that is overwritten; Ctrl-C that shows a traceback; a
    conversation that ends with a prompt that is too long."""
    given = ["generate", f"generate.checkpoint={directory}", "generate.max_new_tokens=9", "generate.temperature=0"]
    prompts = ["the model", "a", "of"]

    def printed(*overrides: str) -> str:
        capsys.readouterr()
        assert main([*given, *overrides]) == 0
        return capsys.readouterr().out

    texts = [printed(f"generate.prompt={prompt}") for prompt in prompts]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts))
    file, out = f"generate.prompts={tmp_path / 'prompts.txt'}", tmp_path / "texts.jsonl"
    lines = printed(file, "generate.batch_rows=2", "generate.logprobs=true")
    assert printed(file, "generate.batch_rows=2", "generate.logprobs=true", f"generate.out={out}") == ""
    assert out.read_text() == lines
    found = [json.loads(line) for line in lines.splitlines()]
    assert [f"{text['prompt']}{text['text']}\n" for text in found] == texts
    assert [text["prompt"] for text in found] == prompts
    assert all(len(text["logprobs"]) == len(text["tokens"]) for text in found)
    assert main([*given, file, f"generate.out={out}"]) == 2
    assert out.read_text() == lines

    def stdin(lines: Iterable[bytes]) -> None:
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=lines, isatty=lambda: False))

    stdin([b"the model\n", b"\xff\n", b"a\n", b"of"])
    assert printed("generate.interactive=true") == "".join(texts)

    def interrupted() -> Iterator[bytes]:
        yield b"x" * 200
        yield b"a\n"
        raise KeyboardInterrupt

    stdin(interrupted())
    assert printed("generate.interactive=true", "generate.overflow=refuse") == f"{texts[1]}\n"


def test_init_from_takes_the_weights_alone(directory: Path, corpus: Path, tmp_path: Path) -> None:
    given = arguments(tmp_path, corpus, f"run.init_from={directory}", "train.steps=2", "optim.lr=1e-9")
    assert main(["train", *given]) == 0
    first = records(tmp_path / "runs/test", "eval")[0]
    assert first["loss"] == pytest.approx(records(directory, "eval")[20]["loss"], rel=1e-6)
    assert records(tmp_path / "runs/test")[1]["tokens"] == 8 * 64


@pytest.mark.parametrize(
    ("model", "code"),
    [(["model=ntransformer"], 0), (["model=normformer"], 0), (["model=normformer", "model.positions=learned"], 3)],
    ids=["source_context", "sinusoidal", "learned"],
)
def test_init_from_goes_on_at_another_length(
    model: list[str], code: int, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless the length is one of the weights. Caught: source_context compared, learned positions cut by torch."""
    given = arguments(tmp_path, corpus, "train.steps=1", *model)
    assert main(["train", *given]) == 0
    more = ["run.name=longer", f"run.init_from={tmp_path / 'runs/test'}", "model.context=96"]
    assert main(["train", *arguments(tmp_path, corpus, "train.steps=1", *model, *more)]) == code
    assert (code == 0) != ("model.context: 64 in the checkpoint, 96 here" in capsys.readouterr().err)


def test_saved_before_evaluated(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation that fails at the end must not cost the run."""
    from ngpt_train.evaluation.validation import RowLosses, Validation

    evaluate = Validation.row_losses

    def fail_later(self: Validation, model: object, world: object) -> RowLosses:
        if (tmp_path / "runs/test/checkpoints/step_00000012").exists():
            raise MemoryError("the evaluation needs too much")
        return evaluate(self, model, world)  # type: ignore[arg-type]

    monkeypatch.setattr(Validation, "row_losses", fail_later)
    assert main(["train", *arguments(tmp_path, corpus)]) == 1
    directory = tmp_path / "runs/test"
    assert end_of(directory)["code"] == 1
    assert checkpoints(directory)[-1] == "step_00000012"
    # The same command does what is left.
    monkeypatch.undo()
    assert main(["train", *arguments(tmp_path, corpus)]) == 0
    assert sorted(records(directory, "eval")) == [0, 12]
    assert end_of(directory)["reason"] == "done"


def test_failed_save_does_not_stop_the_run(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write = save.write_tensors

    def fail_once(*given: Any) -> object:
        monkeypatch.setattr(save, "write_tensors", write)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(save, "write_tensors", fail_once)
    assert main(["train", *arguments(tmp_path, corpus)]) == 0
    assert "could not be written" in capsys.readouterr().out
    assert checkpoints(tmp_path / "runs/test") == ["step_00000008", "step_00000012"]


def row_files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((directory / "evals").iterdir())}


def test_row_losses_are_those_of_the_records(tmp_path: Path, corpus: Path) -> None:
    """After a resume that cuts records off, after run.overwrite, and of a run that went on. Caught: files of steps that
    the run has not reached again, files of another run, losses that a resume changes."""
    every = ["eval.every=3", "eval.contexts=[32]", "eval.tokens=1000", "eval.budget=0.25"]
    shape = [*every, "train.steps=9", "checkpoint.every=3"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"

    def train(root: Path, *options: str) -> None:
        given = [option for option in arguments(root, corpus, *shape, *options) if option != "eval.rows=8"]
        assert main(["train", *given]) == 0

    train(whole)
    train(cut)
    directory = cut / "runs/test"
    expected = row_files(whole / "runs/test")
    assert list(expected) == [f"step_{step:08d}{name}.npz" for step in (0, 3, 6, 9) for name in ("", "_context_32")]
    assert row_files(directory) == expected
    for step, record in records(directory, "eval").items():
        stored = np.load(directory / f"evals/step_{step:08d}.npz")
        assert record["loss"] == stored["loss_sum"].sum() / stored["n_targets"].sum()
        assert (record["rows"], record["rows_hash"]) == (len(stored["loss_sum"]), str(stored["rows_hash"]))
        assert record["rows"] == (9 if step < 9 else 16)  # 0.25 of 3 steps of 8 rows, thrice, for each of 2 contexts

    shutil.rmtree(directory / "checkpoints/step_00000009")
    train(cut, "train.stop_at=7", "eval.every=0")
    assert [name for name in row_files(directory) if "context" not in name] == [
        f"step_{step:08d}.npz" for step in (0, 3, 6, 7)
    ]
    assert sorted(records(directory, "eval")) == [0, 3, 6, 7]
    train(cut)
    found = row_files(directory)
    assert {name: found[name] for name in expected} == expected

    assert main(["train", *arguments(cut, corpus, "train.steps=2", "run.overwrite=true")]) == 0
    assert list(row_files(directory)) == ["step_00000000.npz", "step_00000002.npz"]


def test_a_learned_position_is_not_evaluated_beyond(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checkpoint's model decides, not the command line's. Caught: a traceback of the model."""
    given = arguments(tmp_path, corpus, "model=normformer", "model.positions=learned", "train.steps=1")
    assert main(["train", *given]) == 0
    evaluate = ["evaluate", f"evaluate.checkpoint={tmp_path / 'runs/test'}", "train.device=cpu"]
    assert main([*evaluate, "eval.contexts=[128]"]) == 2
    assert "positions of 64 tokens" in capsys.readouterr().err
    assert main([*evaluate, "eval.contexts=[32]"]) == 0
    assert "at context 32 (16 rows): loss" in capsys.readouterr().out


def test_the_best_checkpoint_is_kept_and_evaluated(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loss rises after step 2, because of another learning rate. Caught: one that is deleted as too old; `best`
    that stands for the newest, or for another loss than its record's; a stop by train.stop_at that looks like the end
    of the schedule."""
    kept = ("checkpoint.every=2", "checkpoint.keep_last=1", "checkpoint.keep_best=1", "eval.every=2")
    given = arguments(tmp_path, corpus, "model=gpt", "train.steps=6", *kept)
    assert main(["train", *given, "train.stop_at=2"]) == 0
    said = capsys.readouterr().out
    for line in (
        "eval 2/6 ",
        "stopped by train.stop_at=2, before the last of 6 steps: ",
        "end: stopped by train.stop_at",
    ):
        assert f"\n{line}" in said
    assert main(["train", *given, "optim.lr=3", "run.allow_change=[optim.lr]"]) == 0
    run = tmp_path / "runs/test"
    losses = {step: record["loss"] for step, record in records(run, "eval").items() if step}
    assert min(losses, key=lambda step: losses[step]) == 2
    assert checkpoints(run) == ["step_00000002", "step_00000006"]
    out = tmp_path / "best.json"
    assert main(["evaluate", f"evaluate.checkpoint={run / 'best'}", f"evaluate.out={out}", "train.device=cpu"]) == 0
    found = json.loads(out.read_text())
    assert (found["step"], found["loss"]) == (2, pytest.approx(losses[2], rel=1e-6))
