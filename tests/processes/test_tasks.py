"""`evaluate tasks=...`, tasks in training and `evaluate evaluate.length...` as commands."""

import json
from pathlib import Path
from typing import Any

import pytest

from ngpt_train.__main__ import main
from tests.processes.runs import WORDS, arguments, run, train

# More requests than one forward pass takes, so that the ranks have something to share.
ROWS = [
    {"query": " ".join(WORDS[i % 12 :]), "choices": [WORDS[i % 5], "zzz", " ".join(WORDS[: 1 + i % 3])], "gold": i % 3}
    for i in range(90)
]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tasks")
    (directory / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    lines = [{"context": " ".join(WORDS[:i]), "continuation": WORDS[i]} for i in range(1, len(WORDS))]
    (directory / "last.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    return directory


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def printed(capsys: pytest.CaptureFixture[str], given: list[str], ranks: int = 1) -> str:
    """What `evaluate` prints: in this process, or on several ranks."""
    if ranks == 1:
        capsys.readouterr()
        assert main(["evaluate", *given]) == 0
        return capsys.readouterr().out
    return run("evaluate", given, ranks, code=0).stdout


@pytest.mark.slow
def test_in_training_and_afterwards(
    tmp_path: Path, corpus: Path, tasks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The ranks share the forward passes, also of a sharded model, and the scores are those of one process; what the
    last record says, `evaluate` finds on the checkpoint. Caught: a rank's share counted as all, a record at the start,
    a record twice after a resume, training that goes on with other random numbers or another mode. The same of a sample
    of text."""
    asked = ["tasks=[words,last]", f"eval.tasks_path={tasks}", "eval.tasks_every=4", "run.root=" + str(tmp_path)]
    sampled = ["logging.sample_prompt=the model", "generate.max_new_tokens=6", "generate.temperature=1"]
    options = [*asked, *sampled, "logging.tensorboard=true", "train.steps=10"]
    alone = arguments(tmp_path, corpus, *options, "run.name=alone", "checkpoint.every=3")
    for stop in (["train.stop_at=6"], []):
        assert main(["train", *alone, *stop]) == 0
    train(arguments(tmp_path, corpus, *options, "run.name=sharded", "parallel=fsdp"), ranks=2)
    without = arguments(tmp_path, corpus, "run.root=" + str(tmp_path), "run.name=without", "train.steps=10")
    assert main(["train", *without]) == 0
    found = records(tmp_path / "alone")
    of_tasks = [record for record in found if record["kind"] == "tasks"]
    assert [record["step"] for record in of_tasks] == [4, 6, 8, 10]
    last = of_tasks[-1]
    assert last["mean"] == (last["words/acc"] + last["last/acc"]) / 2
    assert 0 < last["words/acc_stderr"] < 0.2
    assert last["words/n"] == len(ROWS)
    assert last["tokens"] == found[-1]["tokens"] > 0

    sharded = [record for record in records(tmp_path / "sharded") if record["kind"] == "tasks"]
    for here, there in zip([of_tasks[0], *of_tasks[2:]], sharded, strict=True):
        for name, value in here.items():
            if "/" in name or name.startswith("mean"):
                assert there[name] == pytest.approx(value, rel=1e-3), name
    samples = [[x for x in records(tmp_path / name) if x["kind"] == "sample"] for name in ("alone", "sharded")]
    assert [[x["step"] for x in of_run] for of_run in samples] == [[0, 6, 10], [0, 10]]
    first, last_text = ({name: x[name] for name in ("prompt", "text")} for x in (samples[0][0], samples[0][-1]))
    assert [first, last_text] == [{name: x[name] for name in first} for x in samples[1]]
    assert first["prompt"] == "the model"
    assert first["text"] != last_text["text"]
    assert f'"the model{last_text["text"]}"' in (tmp_path / "alone/logs/rank_0.log").read_text()
    losses = [record["loss"] for record in found if record["kind"] == "train"]
    assert losses == [x["loss"] for x in records(tmp_path / "without") if x["kind"] == "train"]
    assert losses[-1] < 0.95 * losses[0]

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "alone/tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("tasks/words/acc_stderr")][-1] == 10
    assert [event.step for event in events.Tensors("sample/text/text_summary")] == [0, 6, 10]

    given = [f"evaluate.checkpoint={tmp_path / 'alone'}", *asked[:2], "train.device=cpu"]
    results = []
    for ranks in (1, 2):
        out = tmp_path / f"{ranks}.json"
        said = printed(capsys, [*given, f"evaluate.out={out}"], ranks)
        assert f"mean of 2 tasks  acc {last['mean']:.4f}" in said
        results.append((json.loads(out.read_text()), (tmp_path / f"{ranks}_items.jsonl").read_bytes()))
    assert results[0] == results[1]  # to the bit
    assert results[0][0]["tasks"]["words"]["acc_norm"] == last["words/acc_norm"]
    assert results[0][0]["step"] == 10
    assert len(results[0][1].splitlines()) == len(ROWS) + len(WORDS) - 1

    assert "mean of the weights at steps" in printed(capsys, [*given, "evaluate.average=2"])
    books = tmp_path / "books.jsonl"
    books.write_text("".join(json.dumps({"text": " ".join(WORDS * n)}) + "\n" for n in (5, 9)))
    out = tmp_path / "length.json"
    wanted = ["evaluate.length.contexts=[64,256]", "evaluate.length.rope=[none,ntk]", f"evaluate.out={out}"]
    curves = []
    for ranks in (1, 2):
        printed(capsys, [given[0], *wanted, "data=local", f"data.path={books}", "train.device=cpu"], ranks)
        curves.append(json.loads(out.read_text())["curves"])
    assert [(curve["context"], curve["rope"]) for curve in curves[0]] == [(64, "none"), (256, "none"), (256, "ntk")]
    for alone, shared in zip(*curves, strict=True):
        assert shared["loss"] == pytest.approx(alone["loss"], rel=1e-6)
        assert shared["targets"] == sum(len(" ".join(WORDS * n)) for n in (5, 9))
        assert [p["targets"] for p in shared["positions"]] == [p["targets"] for p in alone["positions"]]
    assert out.with_suffix(".png").exists()


def test_a_directory_that_is_none_is_refused_before_the_first_step(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *arguments(tmp_path, corpus, "tasks=[words]", "eval.tasks_path=/nowhere")]) == 3
    assert "no such directory" in capsys.readouterr().err
