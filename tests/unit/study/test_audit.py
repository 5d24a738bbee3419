"""An audit names every false record. Training again is here a replay of an honest run, which takes no time;
tests/processes/test_audit.py trains."""

import json
import math
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from ngpt_train.__main__ import main
from ngpt_train.config.sections.studies import AuditConfig
from ngpt_train.core.errors import DataError
from ngpt_train.core.files import write_json
from ngpt_train.study.audit.auditing import audit, windows
from ngpt_train.study.audit.certificate import CERTIFICATE, METRICS, read_certificates
from ngpt_train.study.compare.runs import read_run
from tests.processes.runs import arguments, train, write_corpus

# Writes what training the window of the config in argv[2] again gives, out of the run in argv[1].
REPLAY = """
import json, re, shutil, sys
from pathlib import Path
honest, config = map(Path, sys.argv[1:])
there, end = config.with_name("again"), int(re.search(r"stop_at: (\\d+)", config.read_text())[1])
found = sorted((there / "checkpoints").glob("step_*"))
begin = int(found[0].name[5:]) if found else 0
lines = [json.loads(line) for line in (honest / "metrics.jsonl").read_text().splitlines()]
kept = [x for x in lines if begin <= x["step"] - (x["kind"] == "train") and x["step"] <= end]
for x in kept:
    x["step_time"] = 1e-9
shutil.copytree(honest / "evals", there / "evals", dirs_exist_ok=True)
shutil.copytree(honest / f"checkpoints/step_{end:08d}", there / f"checkpoints/step_{end:08d}", dirs_exist_ok=True)
shutil.copy(honest / "run.json", there)
shutil.copy(config, there / "config.yaml")
(there / "metrics.jsonl").write_text("".join(json.dumps(x) + "\\n" for x in kept))
(there / "exit.json").write_text(json.dumps({"code": 0, "reason": "done", "step": end}))
"""
# What a training that diverges at its last step does after this.
DIVERGES = """
if end == 12:
    (there / "exit.json").write_text(json.dumps({"code": 4, "reason": "NumericalError: nan", "step": 12}))
    sys.exit(4)
"""


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve steps with checkpoints and validations at 4, 8 and 12, more than an epoch, whose last row counts in part;
    beside it a run of another seed."""
    root = tmp_path_factory.mktemp("audit")
    corpus = write_corpus(root / "text.jsonl", documents=30)
    for name, seed in (("test", 0), ("other", 1)):
        train(arguments(root, corpus, "eval.every=4", "checkpoint.keep_last=9", f"run.seed={seed}", f"run.name={name}"))
    facts(git_commit="1" * 40)(root / "runs/test")  # where there is no checkout, none is known
    return root / "runs/test"


@pytest.fixture
def run(honest: Path, tmp_path: Path) -> Path:
    """A copy to tamper with."""
    return Path(shutil.copytree(honest, tmp_path / "runs/test"))


def here(run: Path) -> dict[str, Any]:
    start = json.loads((run / "run.json").read_text())["starts"][-1]
    return {name: start[name] for name in ("git_commit", "versions", "device", "cpu")}


def audited(
    run: Path, honest: Path, machine: Mapping[str, Any] | None = None, program: str = REPLAY, **options: Any
) -> dict[str, Any]:
    """The certificate of `run`. program: trains a window again, from the paths of `honest` and of its config."""
    command = [sys.executable, "-S", "-c", program, str(honest)]  # -S: it needs no packages, and begins sooner
    chosen = AuditConfig(run=str(run), **{"seed": 0} | options)
    return audit(run, chosen, lambda ranks: command, machine or here(honest), lambda config: config)


def sentences(certificate: Mapping[str, Any]) -> str:
    return "\n".join(finding["says"] for finding in certificate["found"])


def spans(certificate: Mapping[str, Any]) -> list[tuple[int, int]]:
    return [(window["start"], window["end"]) for window in certificate["windows"]]


def edit(change: Callable[[list[dict[str, Any]]], Any]) -> Callable[[Path], None]:
    def tamper(run: Path) -> None:
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        changed = change(lines)
        text = "".join(json.dumps(line) + "\n" for line in (lines if changed is None else changed))
        (run / "metrics.jsonl").write_text(text)

    return tamper


def nudge(kind: str, step: int, *fields: str) -> Callable[[Path], None]:
    """Changes the last digit of numbers of one record."""

    def change(lines: list[dict[str, Any]]) -> None:
        (record,) = [line for line in lines if line["kind"] == kind and line["step"] == step]
        for name in fields:
            old = record[name]
            record[name] = float(np.nextafter(old, np.inf)) if isinstance(old, float) else old + 1

    return edit(change)


def without(kind: str, step: int) -> Callable[[Path], None]:
    return edit(lambda lines: [x for x in lines if (x["kind"], x["step"]) != (kind, step)])


def move(lines: list[dict[str, Any]], first: int, second: int) -> list[dict[str, Any]]:
    lines[first], lines[second] = lines[second], lines[first]
    return lines


def in_text(old: str, new: str, *names: str) -> Callable[[Path], None]:
    def tamper(run: Path) -> None:
        for name in names or ("config.yaml",):
            text = (run / name).read_text()
            assert old in text
            (run / name).write_text(text.replace(old, new))

    return tamper


def swap(run: Path) -> None:
    one, other = run / "checkpoints/step_00000004", run / "checkpoints/step_00000008"
    one.rename(run / "aside")
    other.rename(one)
    (run / "aside").rename(other)


def change_rows(path: Path, change: Callable[[np.ndarray], np.ndarray]) -> float:
    """Changes the losses of the rows of a validation; returns their sum."""
    with np.load(path) as file:
        arrays = dict(file)
    arrays["loss_sum"] = change(arrays["loss_sum"])
    with path.open("wb") as file:
        np.savez(file, **arrays)
    return float(arrays["loss_sum"].sum())


def rows_too(run: Path) -> None:
    """A better validation, with the losses of its rows."""
    total = change_rows(run / "evals/step_00000012.npz", lambda losses: losses * 0.99)

    def change(lines: list[dict[str, Any]]) -> None:
        record = lines[-1]
        n_bytes = record["loss"] * record["n_targets"] / record["bits_per_byte"]
        record["loss"] = total / record["n_targets"]
        record["ppl"] = float(np.exp(record["loss"]))
        record["bits_per_byte"] = record["loss"] * record["n_targets"] / n_bytes

    edit(change)(run)


def rows_swapped(run: Path) -> None:
    """The losses of two rows, whose sum stays."""
    change_rows(run / "evals/step_00000008.npz", lambda losses: losses[[1, 0, *range(2, len(losses))]])


def another_lr(run: Path) -> None:
    """In config.yaml of the run and of its last checkpoint, whose manifest then contradicts it."""
    for path in (run, run / "checkpoints/step_00000012"):
        tree = yaml.safe_load((path / "config.yaml").read_text())
        tree["optim"]["lr"] *= 1.001
        (path / "config.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))


def done_early(run: Path) -> None:
    """A run that stopped at step 8 of 12, and claims that it has ended."""
    edit(lambda lines: [x for x in lines if x["step"] <= 8])(run)
    shutil.rmtree(run / "checkpoints/step_00000012")
    (run / "evals/step_00000012.npz").unlink()
    in_text('"step": 12', '"step": 8', "exit.json")(run)


def ended(**changed: Any) -> Callable[[Path], None]:
    def tamper(run: Path) -> None:
        write_json(run / "exit.json", json.loads((run / "exit.json").read_text()) | changed)

    return tamper


def facts(**changed: Any) -> Callable[[Path], None]:
    def tamper(run: Path) -> None:
        record = json.loads((run / "run.json").read_text())
        record["starts"][-1].update(changed)
        write_json(run / "run.json", record)

    return tamper


def test_an_honest_run_is_equal(run: Path, honest: Path) -> None:
    """Caught: a comparison of seconds; a run that is changed; windows that are not trained; a certificate of records
    that were edited after the audit."""
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    certificate = audited(run, honest)
    assert (certificate["found"], certificate["equal"], certificate["how"]) == ([], True, "to the bit")
    assert spans(certificate) == [(0, 4), (4, 8), (8, 12)]
    compared = [(x["train_records"], x["eval_records"], x["checkpoint"]) for x in certificate["windows"]]
    assert compared == [(4, 2, True)] * 3
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before

    write_json(run / CERTIFICATE, certificate)
    (found,) = read_certificates([read_run(run), read_run(honest)])
    assert (found["equal"], found["valid"], found["found"], found["steps_compared"]) == (True, True, 0, 12)
    assert found["windows"] == [[0, 4], [4, 8], [8, 12]]
    nudge("train", 6, "loss")(run)
    assert not read_certificates([read_run(run)])[0]["valid"]
    (run / CERTIFICATE).write_text("{}")
    (found,) = read_certificates([read_run(run)])
    assert not found["valid"]
    assert "cannot be read" in found["note"]


# By case: the changes of a run, each with fragments of the audit's sentences. They do not hide one another.
TAMPERED: dict[str, list[tuple[Callable[[Path], None], Sequence[str]]]] = {
    "last digits": [
        (nudge("train", 6, "loss", "loss_mean"), ["train record of step 6 says loss"]),
        (nudge("train", 7, "grad_norm"), ["train record of step 7 says grad_norm"]),
        (nudge("train", 5, "lr"), ["train record of step 5 says lr"]),
        (nudge("train", 5, "tokens"), ["train record of step 5 says tokens"]),
        (nudge("eval", 8, "loss"), ["eval record of step 8 says loss"]),
        (nudge("eval", 8, "bits_per_byte"), ["eval record of step 8 says bits_per_byte"]),
        (facts(n_params=7), ["run.json says n_params 7, training again"]),
        (facts(git_commit="0" * 40), [f"commit {'0' * 40} trained"]),
        (facts(data_fingerprint="0" * 64), [f"run.json says data_fingerprint {'0' * 64}"]),
    ],
    "records that are gone": [
        (without("train", 7), ["no train record of step 7"]),
        (without("eval", 8), ["no eval record of step 8"]),
        (edit(lambda lines: lines[:-3]), ["no train record of step 11", "no eval record of step 12"]),
    ],
    "records in another order": [
        (edit(lambda lines: move(lines, 2, 3)), ["stands after a later one"]),
        (edit(lambda lines: [*lines[:8], lines[7], *lines[8:]]), ["is there twice"]),
        (in_text('"step": 10,', '"step":  10,', "metrics.jsonl"), ["(train, step 10) is not as the program writes it"]),
    ],
    "the config": [
        (in_text("eps: 1.0e-08", "eps: 1.0e-07"), ["config.yaml says optim.eps=1e-07, checkpoint step_00000004"]),
        (in_text("steps: 12", "steps: 13"), ["config.yaml says train.steps=13, checkpoint step_00000012"]),
        (in_text("seed: 0", "seed: 3"), ["config.yaml says run.seed=3"]),
        (in_text("rows: 8", "rows: 4"), ["config.yaml says eval.rows=4, checkpoint step_00000012 was trained with 8"]),
    ],
    "the learning rate everywhere": [
        (another_lr, ["the config's schedule gives", "checkpoint step_00000012: config.yaml has "])
    ],
    "losses of rows": [
        (rows_swapped, ["evals/step_00000008.npz has other losses of rows than training again"]),
        (rows_too, ["eval record of step 12 says loss", "evals/step_00000012.npz has other losses"]),
        (ended(code=4, reason="NumericalError: nan"), ["the run diverged at step 12, training again does not"]),
    ],
    "checkpoints": [
        (swap, ["is of step 8, its directory of another"]),
        (in_text('"step": 12', '"step": 10', "exit.json"), ["the run ended at step 10, and there are records"]),
    ],
    "an early end": [(done_early, ["exit.json says that the run reached its planned end at step 8, which is 12"])],
}


@pytest.mark.parametrize("case", TAMPERED)
def test_tampering_is_named(run: Path, honest: Path, case: str) -> None:
    """Caught: numbers compared within a tolerance; records that are not compared at all."""
    for tamper, _ in TAMPERED[case]:
        tamper(run)
    certificate = audited(run, honest)
    assert not certificate["equal"]
    said = sentences(certificate)
    assert not [words for _, named in TAMPERED[case] for words in named if words not in said], said


@pytest.mark.parametrize("content", ['{"4": 1}', '{"4": 5.5'])
def test_a_damaged_list_of_validations_hides_nothing(run: Path, honest: Path, content: str) -> None:
    """Caught: a file of the whole run that makes each checkpoint damaged, so that one window alone is trained again."""
    (run / "checkpoints/validation.json").write_text(content)
    nudge("train", 8, "lr")(run)
    certificate = audited(run, honest)
    assert [x["where"] for x in certificate["found"]][:2] == [METRICS, "validation.json"]
    assert spans(certificate) == [(0, 4), (4, 8), (8, 12)]


def no_rows(run: Path) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["train"] |= {"batch_rows": None, "batch_tokens": None}
    (run / "config.yaml").write_text(yaml.safe_dump(config))


@pytest.mark.parametrize(
    ("tamper", "said"),
    [
        (facts(threads=-3), r"run\.json: starts\[0\]: threads="),
        (facts(threads=10**6), "room for"),
        (facts(step=4), "does not say how the run began"),
        (edit(lambda lines: [*lines, {"kind": "train", "loss": 5.5}]), "step=null is not"),
        (no_rows, r"train\.batch_rows=null"),
        (lambda run: (run / "exit.json").write_text("[]"), r"exit\.json: "),
        (lambda run: (run / "exit.json").write_text("{}"), r"exit\.json: "),
    ],
)
def test_files_that_no_run_has(run: Path, honest: Path, tamper: Callable[[Path], Any], said: str) -> None:
    """Caught: edits that end the audit with a traceback."""
    tamper(run)
    with pytest.raises(DataError, match=said):
        audited(run, honest)


def test_wrong_use(honest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for given, said in (
        ([], "audit.run=null"),
        ([str(tmp_path)], "it has no config.yaml"),
        ([str(tmp_path), str(honest)], "one run at a time"),
        ([str(honest), f"audit.out={tmp_path}"], "is a directory"),
        ([str(honest), "audit.windows=0"], "audit.windows=0: must be"),
    ):
        assert main(["audit", *given]) == 2
        assert said in capsys.readouterr().err


def test_what_is_not_looked_at_is_said(run: Path, honest: Path) -> None:
    """Caught: a certificate without a word on the unchecked files; a traceback for numbers of steps that no run has."""
    (run / "checkpoints/validation.json").write_text(json.dumps({"²": 5.5, "9" * 5000: 5.5}))
    certificate = audited(run, honest, windows=1)
    assert spans(certificate) == [(4, 8)]
    assert (certificate["equal"], certificate["steps_compared"], certificate["steps"]) == (True, 4, 12)
    nudge("train", 11, "loss", "loss_mean")(run)
    ended(code=4, reason="NumericalError: nan")(run)
    shutil.rmtree(run / "evals")
    certificate = audited(run, honest, windows=1)
    assert certificate["equal"]
    assert "steps outside of the windows" in certificate["not_checked"]
    assert certificate["notes"] == [
        "no window begins at the weights of step_00000012, or compared them at its end",
        "the run has no evals/: the losses of single rows were compared with nothing",
        "exit.json says that the run diverged at step 12, where no window ends",
    ]


def test_a_run_that_diverged_is_equal(run: Path, honest: Path, tmp_path: Path) -> None:
    """Caught: an accusation because training again diverges too, or because NaN is not equal to itself."""

    def diverge(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        lines[7]["grad_norm"] = math.nan
        assert (lines[-2]["kind"], lines[-1]["kind"]) == ("train", "eval")
        return lines[:-1]

    other = Path(shutil.copytree(honest, tmp_path / "other"))
    for each in (run, other):
        edit(diverge)(each)
        (each / "evals/step_00000012.npz").unlink()
        write_json(each / "exit.json", {"code": 4, "reason": "NumericalError: nan", "step": 12})

    assert audited(run, other, program=REPLAY + DIVERGES)["found"] == []
    write_json(run / "exit.json", {"code": 1, "reason": "killed", "step": 12})
    assert "steps 9 to 12 cannot be trained again" in sentences(audited(run, other, program=REPLAY + DIVERGES))


def test_weights_of_another_run(run: Path, honest: Path) -> None:
    """Caught: checkpoints whose checksums are right by themselves, and are compared with nothing."""
    shutil.rmtree(run / "checkpoints/step_00000008")
    shutil.copytree(honest.parent / "other/checkpoints/step_00000008", run / "checkpoints/step_00000008")
    said = sentences(audited(run, honest))
    assert "run.seed=0, checkpoint step_00000008 was trained with 1" in said
    assert "the weights or moments of checkpoint step_00000008 are not those" in said


def test_damaged_checkpoints_are_no_beginnings(run: Path, honest: Path) -> None:
    path = next((run / "checkpoints/step_00000004").glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-8] + b"tampered")
    certificate = audited(run, honest)
    assert "another xxh3" in certificate["found"][0]["says"]
    assert spans(certificate) == [(0, 8), (8, 12)]


def test_another_machine_is_said(run: Path, honest: Path) -> None:
    """Caught: another processor that counts as tampering; a tolerance for everything."""
    machine = here(honest) | {"cpu": "another processor"}
    nudge("train", 6, "loss", "loss_mean", "grad_norm")(run)
    certificate = audited(run, honest, machine)
    assert certificate["equal"]
    assert certificate["how"] == "within 0.01"
    assert "another processor" in certificate["why_not_to_the_bit"][0]
    assert 0 < max(x["largest_difference"] for x in certificate["windows"]) < 1e-12

    def half(lines: list[dict[str, Any]]) -> None:
        lines[6] |= {"loss": lines[6]["loss"] / 2, "loss_mean": lines[6]["loss"] / 2}

    edit(half)(run)
    assert not audited(run, honest, machine)["equal"]


def test_training_goes_on_from_a_copy_of_the_checkpoint(run: Path, honest: Path) -> None:
    """Caught: a window from step 0, whose records are the same and whose checkpoint nobody looks at; a training that
    fails, and counts as equal."""
    program = """if True:
        import sys; from pathlib import Path
        there = Path(sys.argv[2]).with_name("again")
        print("error: at", sorted(x.parent.name for x in there.glob("checkpoints/*/state.json")))
        sys.exit(3)"""
    found = audited(run, honest, program=program)["found"]
    begun = [x["says"].partition("cannot be trained again: ")[2] for x in found]
    assert begun == ["at []", "at ['step_00000004']", "at ['step_00000008']"]


def test_windows() -> None:
    """Caught: windows beyond the end, longer than asked for, or over a cut."""
    assert windows([25, 50], 50, 100) == [(0, 25), (25, 50)]
    assert windows([200, 300], 300, 100) == [(0, 100), (200, 300)]
    assert windows([300], 300, 50, cuts=[30]) == [(0, 30)]
    assert windows([], 7, 100) == [(0, 7)]
    assert windows(range(10, 100, 10), 95, 5) == [(start, start + 5) for start in range(0, 100, 10)]
    assert windows([10], 20, 100) == [(0, 10), (10, 20)]


def test_the_seed_chooses_windows(run: Path, honest: Path) -> None:
    """Caught: the same windows for every seed, so that a cheater knows them."""
    audits = [audited(run, honest, program="raise SystemExit(1)", windows=1, seed=seed) for seed in range(6)]
    assert len({x["windows"][0]["start"] for x in audits}) > 1


def test_a_killed_run(run: Path, honest: Path) -> None:
    """Caught: a validation that a killed run did not come to; checkpoints and records that were deleted together."""
    for name in ("exit.json", "evals/step_00000012.npz"):
        (run / name).unlink()
    shutil.rmtree(run / "checkpoints/step_00000012")
    without("eval", 12)(run)
    assert audited(run, honest)["found"] == []
    shutil.copy(honest / "exit.json", run)
    assert "there is no eval record of step 12" in sentences(audited(run, honest)).splitlines()
