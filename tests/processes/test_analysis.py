"""`analyze` and `probe` on runs as a user has them."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.processes import runs


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of two runs, `gpt` and `ngpt`, with telemetry, on the same rows."""
    directory = tmp_path_factory.mktemp("analysis")
    corpus = runs.write_corpus(directory / "corpus.jsonl")
    for model in ("gpt", "ngpt"):
        named = (f"model={model}", f"run.name={model}", "logging.telemetry=4", "checkpoint.keep_last=3")
        runs.train(runs.arguments(directory, corpus, *named))
    return directory / "runs"


def analysis(trained: Path, *more: str) -> dict[str, Any]:
    out = trained.parent / "out"
    named = f"analyze.checkpoints=[{trained / 'gpt'},{trained / 'ngpt'}]"
    runs.run("analyze", [named, f"analyze.out={out}", "train.device=cpu", *more], code=0)
    for name in ("page.html", "analysis.parquet", "figures"):
        assert (out / name).exists()
    return dict(json.loads((out / "analysis.json").read_text()))


def curve(content: dict[str, Any], figure: str, panel: str, run: str, name: str = "") -> list[float]:
    (found,) = [
        each["y"]
        for each in content["figures"][figure]["panels"][panel]["curves"]
        if (each["run"], each["name"]) == (run, name)
    ]
    return list(found)


def weights(trained: Path, run: str, step: int = 12) -> dict[str, np.ndarray]:
    """As the checkpoint's files have them, without our code."""
    (file,) = (trained / run / "checkpoints" / f"step_{step:08d}").glob("shard-*.safetensors")
    return load_file(file)


@pytest.mark.slow
def test_numbers_are_those_of_the_checkpoints(trained: Path) -> None:
    """Caught: another run's weights; stored in the place of effective; a record of another step; average as one."""
    content = analysis(trained, "analyze.figures=[ngpt_6,powernorm_6,normformer_3,ngpt_6_live]", "analyze.rows=8")
    of = {run: weights(trained, run) for run in ("gpt", "ngpt")}

    def spectrum(matrix: np.ndarray) -> Any:
        sigma = np.linalg.svd(matrix.astype(np.float64), compute_uv=False)
        return pytest.approx(sigma / sigma[0], rel=1e-5)

    assert [(run["name"], run["step"]) for run in content["runs"]] == [("gpt", 12), ("ngpt", 12)]
    for run in ("gpt", "ngpt"):
        assert curve(content, "powernorm_6", "input", run) == spectrum(of[run]["embedding"])
        assert min(curve(content, "normformer_3", "w_down", run)) > 0
    d_model = of["ngpt"]["embedding"].shape[1]
    effective = np.abs(of["ngpt"]["layers.1.alpha_mlp"].astype(np.float64)) * 0.05 * np.sqrt(d_model)
    assert curve(content, "ngpt_6", "alpha_mlp", "ngpt")[1] == pytest.approx(effective.mean(), rel=1e-6)
    live = curve(content, "ngpt_6_live", "alpha_mlp", "ngpt", "layer 1")
    assert len(live) == 3
    assert live[-1] == pytest.approx(effective.mean(), rel=1e-5), "the last record is of the last step"
    assert {(each["figure"], each["run"]) for each in content["skipped"]} == {("ngpt_6", "gpt"), ("ngpt_6_live", "gpt")}

    averaged = analysis(trained, "analyze.figures=powernorm_6", "analyze.average=2")
    mean = (weights(trained, "gpt", 8)["embedding"].astype(np.float64) + of["gpt"]["embedding"]) / 2
    assert curve(averaged, "powernorm_6", "input", "gpt") == spectrum(mean)
    assert "8, 12" in averaged["runs"][0]["weights"]


def test_live_figures_need_no_checkpoint(trained: Path, tmp_path: Path) -> None:
    """Caught: a run that has just begun refused; a figure of records that loads weights."""
    shutil.copytree(trained / "ngpt", tmp_path / "begun", ignore=shutil.ignore_patterns("checkpoints"))
    given = [f"analyze.checkpoints=[{tmp_path / 'begun'}]", "analyze.figures=live"]
    finished = runs.run("analyze", given, code=0)
    assert "ngpt_6_live: begun" in finished.stdout
    assert "not tnt_3_live, tnt_4_live: begun has no encoder" in finished.stdout
    runs.run("analyze", given[:1], code=3)  # weights need a checkpoint


def test_rows_that_are_gone_are_said(trained: Path, tmp_path: Path) -> None:
    """Caught: no figure at all where the text of a run is elsewhere."""
    given = [f"analyze.checkpoints=[{trained / 'gpt'}]", "analyze.figures=[normformer_3,ngpt_5]", "train.device=cpu"]
    finished = runs.run("analyze", [*given, "data=local", f"data.path={tmp_path / 'gone.txt'}"], code=0)
    assert "ngpt_5: gpt" in finished.stdout
    assert "not normformer_3: gpt has no rows here" in finished.stdout


def test_probe_adds_up_to_the_validation_loss(trained: Path, tmp_path: Path) -> None:
    """Caught: other rows than evaluate's; the models exchanged; classes that leave a target out."""
    given = [f"probe.checkpoints=[{trained / 'gpt'},{trained / 'ngpt'}]", f"probe.out={tmp_path}", "probe.show=3"]
    runs.run("probe", [*given, "train.device=cpu"], code=0)
    content = json.loads((tmp_path / "probe.json").read_text())
    for model in content["models"]:
        out = tmp_path / f"{model['name']}.json"
        one = [f"evaluate.checkpoint={trained / model['name']}", f"evaluate.out={out}", "train.device=cpu"]
        runs.run("evaluate", one, code=0)
        validated = json.loads(out.read_text())
        assert validated["rows_hash"] == content["rows_hash"]
        assert model["loss"] == pytest.approx(validated["loss"], rel=1e-12)
        assert model["targets"] == validated["n_targets"]
        rows = np.load(out.with_suffix(".npz"))["loss_sum"]
        for row in content["rows"]:
            assert row["loss_sum"][model["name"]] == pytest.approx(rows[row["row"]], rel=1e-12)
            assert sum(token["loss"][model["name"]] for token in row["tokens"]) == row["loss_sum"][model["name"]]
        for of in content["classes"]:
            assert sum(each["targets"] for each in of["classes"]) == model["targets"]
    assert len(content["rows"]) == 3
    assert "vector" in content["rows"][0]["text"]
    assert (tmp_path / "page.html").is_file()


def test_probe_by_source(tmp_path: Path) -> None:
    """Caught: a mixture whose sources are exchanged, or left out; one checkpoint refused."""
    text = runs.write_corpus(tmp_path / "a.jsonl")
    digits = tmp_path / "b.jsonl"
    digits.write_text("".join(json.dumps({"text": f"{k:030d}" * 3}) + "\n" for k in range(200)))
    mixed = ["data=mixture", "data.path=null", f"data.mixture=words 1 local {text}; numbers 1 local {digits}"]
    runs.train(runs.arguments(tmp_path, text, *mixed, "model=gpt"))
    given = [f"probe.checkpoints=[{tmp_path / 'runs/test'}]", f"probe.out={tmp_path / 'out'}", "train.device=cpu"]
    runs.run("probe", given, code=0)
    content = json.loads((tmp_path / "out/probe.json").read_text())
    by = {of["kind"]: {each["class"]: each["targets"] for each in of["classes"]} for of in content["classes"]}
    assert set(by["source"]) == {"words", "numbers"}
    ends = by["type"]["end of document"]
    assert by["type"]["digit"] <= by["source"]["numbers"] <= by["type"]["digit"] + ends
    assert by["type"]["digit"] > 50
    hardest = [row["loss"]["test"] for row in content["rows"]]
    assert hardest == sorted(hardest, reverse=True)
