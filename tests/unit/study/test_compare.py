"""`compare` on run directories: planted truth, directories that others wrote, mistakes."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from ngpt_train.__main__ import main
from ngpt_train.config import Config, load_config
from ngpt_train.study.compare import step_times
from ngpt_train.study.compare.comparison import choose_arms, longest_compared, make_report
from ngpt_train.study.compare.given_runs import gather
from ngpt_train.study.compare.output import charts
from ngpt_train.study.compare.output.comparison_page import html
from ngpt_train.study.compare.output.document import document
from ngpt_train.study.compare.output.tables import verdicts
from ngpt_train.study.compare.output.wording import cautions
from ngpt_train.study.compare.runs import Run
from ngpt_train.verbs import compare
from ngpt_train.verbs.compare import compared
from tests.planted_runs import Planted, write_run, write_study

KEYS = {"arms", "budgets", "losses", "differences", "speedups", "referee", "verdicts", "commands"}


def report_of(paths: Sequence[Path], out: Path, *arguments: str) -> dict[str, Any]:
    """As it is written, but for the pictures."""
    config = load_config([*arguments, f"compare.out={out}"])
    config.compare.runs = [str(path) for path in paths]
    report, _ = compared(config, arguments)
    assert report.keys() >= KEYS
    return json.loads(json.dumps(report, allow_nan=False))


def mistake(capsys: pytest.CaptureFixture[str], code: int, *arguments: object) -> str:
    """The message of a mistake. Nothing else is printed."""
    assert main(["compare", *map(str, arguments)]) == code
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert "Traceback" not in told
    return told


def test_planted_truth(tmp_path: Path) -> None:
    planted = Planted(ratio=1.7, n_rows=32, of_row=0.02, of_both=0.02)
    runs = write_study(tmp_path / "runs", planted, lrs=(0.001, 0.002, 0.004, 0.008, 0.016))
    report = report_of(runs, tmp_path / "report")
    assert report["verdicts"] == {"ngpt": "better"}
    assert report["baseline"] == "gpt"
    assert report["budgets"] == [204_800, 409_600, 819_200, 1_638_400]
    assert report["arms"]["ngpt"]["best"] == {"optim.lr": 0.004}
    assert {arm["state"] for arm in report["arms"].values()} == {"bracketed"}
    assert len(report["losses"]) == 2 * 4 * (5 + 2)
    for found in report["differences"]:
        assert found["low"] <= planted.truth(found["budget"]) <= found["high"]
        assert (found["n_seeds"], found["n_rows"], found["needed"]) == (3, 32, None)
    inside = [x for x in report["speedups"] if x["how"] == "annealed" and not x["extrapolated"]]
    truth = {"tokens": 1.7, "flops": 1.7, "seconds": 1.7 / 1.2}
    assert {x["unit"] for x in inside} == set(truth)
    assert all(x["low"] <= truth[x["unit"]] <= x["high"] for x in inside)
    beyond = [x for x in report["speedups"] if x["how"] == "annealed" and x["budget"] == 1_638_400]
    assert all(x["extrapolated"] and "extrapolated" in x["note"] for x in beyond)
    flattering = [x for x in report["speedups"] if x["how"] == "within_schedule"]
    assert flattering
    assert all("flatters" in x["note"] for x in flattering)
    assert sum(curve["best"] for curve in report["curves"]) == 2 * 4 * 3


@pytest.mark.parametrize(("arm", "missing"), [("ngpt", (0.001, 0.002)), ("gpt", (0.008, 0.016))])
def test_an_optimum_at_the_edge_is_untuned(tmp_path: Path, arm: str, missing: Sequence[float]) -> None:
    """The optimum of the arm or of the baseline."""
    for path in write_study(tmp_path / "runs", Planted(ratio=4), lrs=(0.001, 0.002, 0.004, 0.008, 0.016)):
        if path.name.startswith(f"{arm}-") and any(f"lr{lr:g}-" in path.name for lr in missing):
            shutil.rmtree(path)
    report = report_of([tmp_path / "runs"], tmp_path / "report")
    assert report["verdicts"] == {"ngpt": "untuned"}
    assert report["arms"][arm]["state"] == "edge"
    assert all(f"{arm} is untuned at this budget" in x["note"] for x in report["speedups"])


def test_listed_values_that_hardly_differ(tmp_path: Path) -> None:
    """Caught: an arm called untuned because other weight decays of the list are not worse by more than the noise."""
    for arm in ("gpt", "ngpt"):
        tried = [(0.1, lr, 0) for lr in (0.002, 0.004, 0.008)]
        for decay, lr, seed in [*tried, (0.05, 0.004, 0), (0.2, 0.004, 0), (0.1, 0.004, 1)]:
            path = tmp_path / "runs" / f"{arm}-{decay}-{lr}-{seed}"
            loss = 3.0 - 0.01 * seed + 0.1 * abs(math.log2(lr / 0.004)) + 0.001 * abs(math.log2(decay / 0.1))
            write_run(path, arm, 100, seed, loss, lr, config={"optim.weight_decay": decay})
    report = report_of([tmp_path / "runs"], tmp_path / "report", "compare.tuned=[optim.lr,optim.weight_decay]")
    states = {(entry["arm"], entry["key"]): entry["state"] for entry in report["tuning"]}
    assert len(states) == 4
    assert set(states.values()) == {"bracketed"}
    assert [report["arms"][arm]["state"] for arm in ("gpt", "ngpt")] == ["bracketed"] * 2


def test_one_tuned_arm_alone_is_untuned(tmp_path: Path) -> None:
    runs = write_study(tmp_path / "runs", Planted(ratio=4), lrs=(0.001, 0.002, 0.004, 0.008, 0.016))
    for path in runs:
        if path.name.startswith("gpt-") and "lr0.004-" not in path.name:
            shutil.rmtree(path)
    report = report_of([tmp_path / "runs"], tmp_path / "report")
    assert report["verdicts"] == {"ngpt": "untuned"}
    assert report["arms"]["gpt"]["state"] == "not tried"
    assert any("gpt is not tuned" in note for note in report["notes"])


def test_identical_runs(tmp_path: Path) -> None:
    """Two directories with the same config: nothing tells them apart but their names."""
    for seed in (0, 1):
        write_run(tmp_path / f"runs/a-{seed}", "gpt", 400, seed, 3.0 + 0.1 * seed, rows=np.array([0.1, -0.1]))
        shutil.copytree(tmp_path / f"runs/a-{seed}", tmp_path / f"runs/b-{seed}")
    report = report_of(sorted((tmp_path / "runs").iterdir()), tmp_path / "report")
    assert report["verdicts"] == {"b": "not_resolved"}
    (found,) = report["differences"]
    assert (found["estimate"], found["low"], found["high"]) == (0, 0, 0)
    within = [x for x in report["speedups"] if x["how"] == "within_schedule"]
    assert {(x["estimate"], x["low"], x["high"]) for x in within} == {(1, 1, 1)}
    assert [entry for entry in report["referee"] if entry["kind"] == "confound"] == []


def test_a_rate_with_fewer_seeds_is_not_the_best(tmp_path: Path) -> None:
    """Caught: a verdict that hangs on the luck of a single run beside three seeds of the tuned rate."""
    runs = write_study(tmp_path / "runs", Planted(), lrs=(0.001, 0.002, 0.004, 0.008, 0.016))
    runs.append(write_run(tmp_path / "runs/gpt-lucky", "gpt", 3200, 0, 1.0, lr=0.006))
    report = report_of(runs, tmp_path / "report")
    assert report["arms"]["gpt"]["best"] == {"optim.lr": 0.004}
    assert {entry["n_seeds"] for entry in report["differences"]} == {3}
    assert [note for note in report["notes"] if "optim.lr=0.006 has a lower mean loss, but of 1 instead of 3" in note]


def test_one_seed_is_said(tmp_path: Path) -> None:
    runs = write_study(tmp_path / "runs", Planted(ratio=4, n_seeds=1, n_rows=16, of_row=0.001))
    report = report_of(runs, tmp_path / "report")
    assert report["verdicts"] == {"ngpt": "not_resolved"}
    assert any("one seed" in note for note in report["notes"])
    assert report["differences"][0]["noise_seeds"] is None
    matched = [x for x in report["speedups"] if x["how"] == "annealed" and x["low"] is not None]
    assert matched
    assert all("without the noise between seeds" in x["note"] for x in matched)


def test_failed_and_unfinished_runs_are_shown(tmp_path: Path) -> None:
    """A seed diverges at the only tried rate, so the arm has no loss at this budget."""
    runs = write_study(tmp_path / "runs", Planted())
    (runs[0] / "exit.json").write_text(json.dumps({"code": 4, "reason": "the loss is not finite", "step": 61}))
    lines = (runs[1] / "metrics.jsonl").read_text().splitlines()
    (runs[1] / "metrics.jsonl").write_text("\n".join(lines[:9]) + "\n")
    report = report_of(runs, tmp_path / "report")
    assert [(x["run"], x["reason"]) for x in report["failures"]] == [
        (str(runs[0]), "diverged at step 61: the loss is not finite")
    ]
    assert any(str(runs[1]) in note and "not annealed" in note for note in report["notes"])
    (why,) = [note for note in report["notes"] if "has no loss at" in note]
    assert why.startswith("gpt has no loss at 204,800 tokens, and is not compared there: 1 of 2 runs failed")
    assert [said for said in cautions(report) if said.startswith("No comparison of gpt at 205k tokens: 1 of its 2")]
    assert [(x["budget"], x["n_seeds"]) for x in report["differences"]] == [(b, 3) for b in report["budgets"][1:]]


def test_an_arm_of_a_study_whose_runs_all_crashed(tmp_path: Path) -> None:
    """Caught: a report that ends in a traceback, or is silent of the arm on its first page."""
    runs = write_study(tmp_path / "runs", Planted(n_seeds=2))
    report = report_of(runs, tmp_path / "report")
    crashed = {"arm": "powernorm", "budget": None, "seed": None, "values": {}, "reason": "crashed", "run": "x"}
    report["failures"].append(crashed)
    assert "powernorm" in document(report, {})
    assert "powernorm" in html(report)
    assert "No run of powernorm has ended, because runs failed." in cautions(report)


def test_the_rows_of_verdicts_are_of_the_budget_that_both_have(tmp_path: Path) -> None:
    """Caught: in the table of verdicts, at the largest budget, an arm that has no run there."""
    runs = [run for run in write_study(tmp_path / "runs", Planted()) if not run.name.startswith("ngpt-1638400")]
    table = verdicts(report_of(runs, tmp_path / "report"))
    assert [row[2] for row in table.rows] == ["1.64M", "819k"]


def test_what_was_tuned_and_what_was_chosen(tmp_path: Path) -> None:
    """Caught: a value of one's own that counts as the recipe's; a key with one value as tuned; the values of another
    budget; keys of the first weights that an older config lacks."""
    lrs = (0.002, 0.004, 0.008)
    runs = write_study(tmp_path / "runs", Planted(), lrs=lrs)
    for run in runs:
        path = run / "config.yaml"
        config = yaml.safe_load(path.read_text())
        is_ngpt = run.name.startswith("ngpt")
        config["optim"] |= {"clip_norm": 0.3 if is_ngpt else 1.0, "weight_decay": 0.0 if is_ngpt else 0.1}
        config["model"] |= {"s_z": {"init": "sqrt(d)"}} if is_ngpt else {}
        if "204800-lr0.008" in run.name:
            shutil.rmtree(run)
        else:
            path.write_text(yaml.safe_dump(config))
    report = report_of([run for run in runs if run.exists()], tmp_path / "report", "compare.baseline=gpt")
    ngpt, gpt = report["tuning_of_keys"]["ngpt"], report["tuning_of_keys"]["gpt"]
    assert ngpt["budget"] == 1_638_400
    assert ngpt["tuned"] == {"optim.lr": list(lrs)}
    assert ngpt["chosen"] == {"optim.clip_norm": 0.3}
    assert ngpt["not_tuned"].items() >= {"optim.weight_decay": 0.0, "model.s_z.init": "sqrt(d)"}.items()
    assert (gpt["not_tuned"] | gpt["chosen"])["model.init.embedding"] == 0.02
    assert not ngpt["not_tuned"].keys() & {"model.init.embedding", "optim.gate_eps"}  # of no effect there
    assert report["looked_at"]["keys"] > 10
    assert "git_commit" in report["looked_at"]["facts"]
    assert "model.s_z.init" in report["looked_at"]["options"]


def test_step_times_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: a finished study whose seconds change with every repetition; other arms timed again because one cannot
    be timed; a new arm without a time."""
    taken: list[set[str]] = []

    def measure(runs: Mapping[str, Run], own: Config) -> step_times.Times:
        taken.append(set(runs))
        of = {name: {"of": step_times.fingerprint(run)} for name, run in runs.items()}
        of["gpt"] |= {"step_time": 1.0 + len(taken), "seconds_per_token": [1.0, 1.1 + len(taken)], "device": "cpu"}
        return {**of, "ngpt": of["ngpt"] | {"untimed": "The steps of ngpt could not be timed"}}

    monkeypatch.setattr(step_times, "measure", measure)
    monkeypatch.setattr(charts, "write_figures", lambda report, folder: {})  # they take most of the time
    study, out = tmp_path / "runs", tmp_path / "report"
    write_study(study, Planted())

    def again(*arguments: str) -> str:
        config = load_config([f"compare.out={out}", *arguments])
        config.compare.runs = [str(study)]
        assert compare.main(config, [], measures=True) == 0
        return (out / "report.json").read_text()

    first = again()
    assert again() == first
    assert taken == [{"gpt", "ngpt"}]
    assert "The steps of ngpt could not be timed" in first
    assert again("compare.step_times=true") != first
    assert len(taken) == 2
    saved = json.loads((out / "step_times.json").read_text())
    del saved["arms"]["ngpt"]
    (out / "step_times.json").write_text(json.dumps(saved))
    again()
    assert len(taken) == 3


def test_the_step_that_is_timed(tmp_path: Path) -> None:
    """Caught: a step, and a run's clock, of a batch that was tried and not taken."""
    paths = []
    for arm, rows, seed in [("gpt", 8, 0), ("gpt", 8, 1), ("gpt", 4, 0), ("ngpt", 8, 0), ("ngpt", 8, 1)]:
        name, more = f"{arm}-409600-train.batch_rows{rows}-seed{seed}", 8 // rows
        config, loss = {"train.batch_rows": rows}, 3.0 + 0.1 * (rows == 4) + 0.01 * seed
        paths.append(write_run(tmp_path / name, arm, 800 * more, seed, loss, config=config, step_time=more * 0.01))
    given = replace(gather(paths), tuned=["optim.lr", "train.batch_rows"])
    arms, tuned, _ = choose_arms(given)
    timed = longest_compared(given, arms, tuned)
    assert {name: run.config["train.batch_rows"] for name, run in timed.items()} == {"gpt": 8, "ngpt": 8}
    report = make_report(given, arms, tuned, {}, [])
    assert [x["estimate"] for x in report["speedups"] if x["unit"] == "seconds"] == pytest.approx(
        [x["estimate"] for x in report["speedups"] if x["unit"] == "tokens"]
    )


def test_seeds_of_one_budget_that_differ(tmp_path: Path) -> None:
    """Caught: the largest budget of both left out in silence, because its seeds differ and another's do not."""
    paths = [
        write_run(tmp_path / f"{arm}-{steps * 512}-seed{seed}", arm, steps, seed, 4 - steps / 1000 + 0.01 * seed)
        for arm, steps, seeds in [
            ("gpt", 400, (0, 1)),
            ("ngpt", 400, (0, 1)),
            ("gpt", 800, (0, 1)),
            ("ngpt", 800, (2, 3)),
        ]
        for seed in seeds
    ]
    report = report_of(paths, tmp_path / "report")
    assert [x["budget"] for x in report["differences"]] == [204_800, 409_600]
    assert "gpt have no seed in common at 409,600 tokens: their runs are paired" in " ".join(report["notes"])


def test_rows_of_a_seed_that_one_arm_has(tmp_path: Path) -> None:
    """Caught: a run without a counterpart whose rows decide whether the baseline's further budgets count."""
    planted = Planted(n_rows=16, of_row=0.02, n_seeds=2)
    runs = write_study(tmp_path / "runs", planted)
    left_out = ("ngpt-204800-lr0.004-seed0", "ngpt-1638400-lr0.004-seed0", "ngpt-1638400-lr0.004-seed1")
    runs = [run for run in runs if run.name not in left_out]
    (alone,) = (tmp_path / "runs/gpt-204800-lr0.004-seed0/evals").glob("*.npz")
    alone.unlink()
    report = report_of(runs, tmp_path / "report")
    assert not [note for note in report["notes"] if "further budgets" in note], report["notes"]


def test_a_baseline_with_more_budgets(tmp_path: Path) -> None:
    """Caught: a fit without the baseline's budgets beyond the arm's, which is a line then; an untuned budget of the
    baseline in the fit."""
    lrs = (0.001, 0.002, 0.004, 0.008, 0.016)
    runs = write_study(tmp_path / "runs", Planted(ratio=1.7, n_rows=16, of_row=0.02), lrs=lrs)
    runs = [run for run in runs if not run.name.startswith("ngpt-1638400")]

    def largest(runs: Sequence[Path]) -> tuple[dict[str, Any], list[str]]:
        report = report_of(runs, tmp_path / "report")
        annealed = [x for x in report["speedups"] if (x["how"], x["unit"]) == ("annealed", "tokens")]
        (found,) = [x for x in annealed if x["budget"] == 819_200]
        return found, [note for note in report["notes"] if "not part of the fit" in note]

    found, said = largest(runs)
    assert (found["extrapolated"], said) == (False, [])
    assert found["low"] <= 1.7 <= found["high"]
    untuned = ("gpt-1638400-lr0.008", "gpt-1638400-lr0.016")
    found, said = largest([run for run in runs if not run.name.startswith(untuned)])
    assert found["extrapolated"]
    assert len(said) == 1


def test_two_studies_of_the_same_arms(tmp_path: Path) -> None:
    """Caught: an arm for each run, with lost runs among those of one name."""
    runs = write_study(tmp_path / "first/runs", Planted(n_seeds=2))
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    report = report_of([tmp_path / "first", tmp_path / "second"], tmp_path / "report", "compare.baseline=first/gpt")
    assert {name: len(arm["runs"]) for name, arm in report["arms"].items()} == dict.fromkeys(
        ("first/gpt", "second/gpt", "first/ngpt", "second/ngpt"), len(runs) // 2
    )
    assert report["verdicts"]["second/gpt"] == "not_resolved"


def test_damaged_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Caught: lines that are left out silently, numbers without end, a directory in the place of the records; points
    that are there twice."""
    runs = write_study(tmp_path / "runs", Planted())
    records = runs[0] / "metrics.jsonl"
    lines = records.read_text().splitlines(keepends=True)
    records.write_text("".join([*lines[:3], lines[3][:-9] + "\n", *lines[4:]]))
    shutil.copytree(runs[1], tmp_path / "runs/gpt-again")
    (shutil.copytree(runs[2], tmp_path / "runs/gpt-lost") / "config.yaml").unlink()
    report = report_of([tmp_path / "runs"], tmp_path / "report", "compare.arms=[gpt:gpt-*,ngpt:ngpt-*]")
    assert f"{records}: 1 line is cut or damaged, and skipped" in report["notes"]
    lost, again = f"{tmp_path / 'runs/gpt-lost'} is left out: it has records", "it is the same point as"
    assert [sum(said in note for note in report["notes"]) for said in (lost, again)] == [1, 1]
    end = json.loads(lines[-2]) | {"loss": 10**400, "train_seconds": 10**400}
    records.write_text("".join([*lines[:-2], json.dumps(end) + "\n", lines[-1]]))
    assert [x["run"] for x in report_of(runs, tmp_path / "report")["failures"]] == [str(runs[0])]
    (runs[1] / "metrics.jsonl").unlink()
    (runs[1] / "metrics.jsonl").mkdir()
    assert "metrics.jsonl cannot be read" in mistake(capsys, 3, *runs)


def test_arms_from_what_differs(tmp_path: Path) -> None:
    """qk_norm differs, a key that only one architecture has differs, lr alone differs."""
    variants = ({"model.qk_norm": False}, {"model.qk_norm": True}, {"model.alpha": 0.1}, {"model.alpha": 0.2})
    for number, config in enumerate([*variants, *variants]):  # two seeds of each
        arm = "ngpt" if "model.alpha" in config else "gpt"
        write_run(tmp_path / f"runs/r{number}", arm, 400, number // 4, 3.0, config=config)
    assert set(report_of([tmp_path / "runs"], tmp_path / "report")["arms"]) == {
        *("name=gpt,qk_norm=false", "name=gpt,qk_norm=true", "alpha=0.1,name=ngpt", "alpha=0.2,name=ngpt")
    }
    for lr in (0.001, 0.002):
        write_run(tmp_path / f"rates/r-lr{lr}", "gpt", 400, 0, 3.0, lr=lr)
    assert set(report_of([tmp_path / "rates"], tmp_path / "report")["arms"]) == {"lr=0.001", "lr=0.002"}


def test_named_arms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = write_study(tmp_path / "runs", Planted(n_seeds=2))
    report = report_of(runs, tmp_path / "report", "compare.arms=[new:ngpt-*,old:gpt-*]", "compare.baseline=old")
    assert report["baseline"] == "old"
    assert list(report["arms"]) == ["new", "old"]
    assert "no run is named" in mistake(capsys, 2, *runs, "compare.arms=[new:none-*]")
    assert "is in" in mistake(capsys, 2, *runs, "compare.arms=[new:*,old:gpt-*]")
    assert "not NAME:PATTERN" in mistake(capsys, 2, *runs, "compare.arms=[new]")
    assert "compare.arms=[]: there is no arm" in mistake(capsys, 2, *runs, "compare.arms=[]")
    assert "no arm of that name" in mistake(capsys, 2, *runs, "compare.baseline=gtp")
    assert "optim.lrr; did you mean optim.lr?" in mistake(capsys, 2, *runs, "compare.tuned=[optim.lrr]")
    assert "no run has the key modl" in mistake(capsys, 2, *runs, "compare.under_test=[optim,git_commit,modl]")


def test_runs_that_others_wrote(tmp_path: Path) -> None:
    """Configs of a few keys, no run.json, no evals/, no exit.json, other seeds in the arms."""
    runs = write_study(tmp_path / "runs", Planted(n_rows=8, of_row=0.01))
    for path in runs:
        config = yaml.safe_load((path / "config.yaml").read_text())
        is_gpt = config["model"]["name"] == "gpt"
        seed = config["run"]["seed"] + (10 if is_gpt else 0)
        few = {"run": {"seed": seed}, "model": {"name": config["model"]["name"]}, "train": config["train"]}
        few |= {"optim": {"lr": 0.004, **({"eps": 1e-8} if is_gpt else {})}}
        (path / "config.yaml").write_text(yaml.safe_dump(few))
        (path / "run.json").unlink()
        (path / "exit.json").unlink()
        shutil.rmtree(path / "evals")
    report = report_of(runs, tmp_path / "report")
    assert report["verdicts"] == {"ngpt": "better"}
    assert report["differences"][0]["noise_rows"] is None
    assert any("no seed in common" in note for note in report["notes"])
    assert any("without the noise of validation rows" in note for note in report["notes"])


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "runs/a", "gpt", 400, 0, 3.0)
    assert "no run is named" in mistake(capsys, 2)
    assert "not a directory" in mistake(capsys, 3, tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "holds no run" in mistake(capsys, 3, tmp_path / "empty")
    assert "one arm" in mistake(capsys, 2, run)
    other = write_run(tmp_path / "runs/b", "ngpt", 400, 0, 3.0)
    (other / "config.yaml").write_text("train: [")
    assert "not a readable config" in mistake(capsys, 3, run, other)
    (other / "config.yaml").write_text("model: {name: ngpt}\ntrain: {steps: soon}\n")
    assert "train.steps" in mistake(capsys, 3, run, other)
    (other / "metrics.jsonl").unlink()
    (other / "config.yaml").write_text("model: {name: ngpt}\ntrain: {steps: 400}\n")
    assert "one arm" in mistake(capsys, 2, run, other)


def test_what_is_not_ours_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = write_study(tmp_path / "runs", Planted(n_seeds=2))
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    (out / "report.md").write_text("mine")
    assert "not of an earlier compare" in mistake(capsys, 2, *runs, f"compare.out={out}")
    assert (out / "report.md").read_text() == "mine"
    (out / "report.md").unlink()
    (out / "report.json").write_text(json.dumps(report_of(runs, out)))
    report_of(runs, out)
    assert (out / "notes.txt").read_text() == "mine"
    assert "is a file" in mistake(capsys, 2, *runs, f"compare.out={out / 'notes.txt'}")
    assert "directory of a run" in mistake(capsys, 2, *runs, f"compare.out={runs[0]}")
    assert "notes.txt cannot be written" in mistake(capsys, 2, *runs, f"compare.out={out / 'notes.txt' / 'x'}")
    assert "cannot be made" in mistake(capsys, 2, *runs, "compare.out=/proc/x")
    assert "at once" in mistake(capsys, 2, *runs, "-m")
