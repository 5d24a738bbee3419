"""Files that somebody has forged, or that are no files: each is one sentence with its exit code, within a bound of
memory and time, and nothing outside of the run's directory is written. Forged checkpoints: test_hostile_checkpoints.py.
"""

import gzip
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
import zstandard

from ngpt_train.__main__ import main
from ngpt_train.core.errors import DataError
from ngpt_train.data.dataset import StoredNumbers
from ngpt_train.data.sources import readers
from ngpt_train.data.sources.readers import read_file
from tests.processes import fork_server
from tests.processes.runs import arguments, forked
from tests.processes.test_hostile_checkpoints import TENSORS, sign

STEP = "runs/test/checkpoints/step_00000004"
ALIASES = "a: &a [1,1,1]\n" + "".join(
    f"{b}: &{b} [{','.join(9 * [f'*{a}'])}]\n" for a, b in zip("abcdefg", "bcdefgh", strict=True)
)
MERGES = "a: &a {x: 1}\n" + "".join(
    f"{b}: &{b} {{<<: [{','.join(30 * [f'*{a}'])}]}}\n" for a, b in zip("abcde", "bcdef", strict=True)
)


def refused(capsys: pytest.CaptureFixture[str], code: int, *command: str) -> str:
    """The one sentence on stderr of a command that ends with this exit code."""
    capsys.readouterr()
    assert main(list(command)) == code
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    return errors[0]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (ALIASES, "more than 20,000 values"),
        (MERGES, "more than 20,000 values"),
        ("a: &a [*a]", "more than 20,000 values"),
        ("a: " + 100_000 * "[", "50 levels"),
        ("a: " + 100_000 * "{a: ", "50 levels"),
        ("a: '" + 2_000_000 * "x" + "'", "more than 1 MB"),
        ("a: !!python/object/apply:os.mkdir ['executed']", "constructor"),
        ("a: 9999-99-99", "month must be in 1..12"),
        ("a: " + 10_000 * "9", "4300 digits"),
    ],
)
def test_hostile_yaml(directory: Path, content: str, problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In a checkpoint, and in a directory of the user's. Caught: aliases that are counted once, a depth without end."""
    (directory / STEP / "config.yaml").write_text(content)
    sign(directory / STEP, "config.yaml")
    assert problem in refused(capsys, 3, "generate", f"generate.checkpoint={directory / STEP}", "train.device=cpu")
    mine = directory / "mine/model/my.yaml"
    mine.parent.mkdir(parents=True)
    mine.write_text(content)
    message = refused(capsys, 2, "plan", "--config-dir", str(directory / "mine"), "model=my")
    assert problem in message or len(content) < 60


def test_usual_aliases_are_read(tmp_path: Path) -> None:
    path = tmp_path / "model" / "my.yaml"
    path.parent.mkdir()
    path.write_text("defaults: [ngpt]\nn_layers: &n 2\nn_heads: *n\n")
    assert main(["plan", "--config-dir", str(tmp_path), "model=my", "scale=debug", "tokenizer=bytes"]) == 0


@pytest.mark.parametrize(
    "change",
    [{"n_layers": 9000}, {"vocab_size": 10_000_000}, {"d_mlp": 10_000_000}],
    ids=lambda change: next(iter(change)),
)
def test_a_model_that_its_checkpoint_cannot_fill(
    directory: Path, change: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    """Caught: a forged config whose model takes all memory before a tensor is compared with it."""
    path = directory / STEP / "config.yaml"
    tree = yaml.safe_load(path.read_text())
    tree["model"].update(change)
    path.write_text(yaml.safe_dump(tree))
    sign(path.parent, path.name)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    message = refused(capsys, 3, "generate", f"generate.checkpoint={directory / STEP}", "train.device=cpu")
    assert re.search(r"config\.yaml: .* but the checkpoint has [\d,]+ tensors of [\d,]+ numbers", message)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # kB


@pytest.mark.parametrize(
    ("place", "code"),
    [
        ("step_00000008", 0),
        (".unfinished-step_00000006", 0),
        ("validation.json", 3),
        (".validation.json.partial", 3),
    ],
)
def test_a_pipe_among_checkpoints(directory: Path, corpus: Path, place: str, code: int) -> None:
    """Caught: a pipe that is opened, and waited for without end: shutil.rmtree does so, too."""
    path = directory / "runs/test/checkpoints" / place
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    given = arguments(directory, corpus, "train.steps=8")
    finished = fork_server.run("ngpt_train", ["train", *given], timeout=60)
    assert finished.returncode == code, finished.stderr
    assert code or not list(path.parent.glob(".*"))


@pytest.mark.parametrize(("verb", "kind"), [("evaluate", "link"), ("generate", "pipe")])
def test_tensors_that_are_no_file(directory: Path, verb: str, kind: str) -> None:
    """Caught: a pipe that is waited for; a link that is followed out of the checkpoint."""
    path = directory / STEP / TENSORS
    path.rename(directory / "tensors")
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(directory / "tensors")
    given = [verb, f"{verb}.checkpoint={directory / STEP}", "train.device=cpu"]
    finished = fork_server.run("ngpt_train", given, timeout=60)
    assert finished.returncode == 3, finished.stderr
    assert f"{path} has to be a file, and is " in finished.stderr


@pytest.mark.parametrize("name", ["metrics.jsonl", "lock", "run.json", "exit.json", "checkpoints", ".run.json.partial"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_nothing_is_written_through_a_link(
    directory: Path, corpus: Path, name: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Caught: a metrics.jsonl, a lock or a partial file that is a link to elsewhere; a pipe that is waited for."""
    outside = directory / "outside"
    outside.write_text("precious")
    path = directory / "runs/test" / name
    if path.is_dir():
        path.rename(directory / "checkpoints")
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(outside)
    message = refused(capsys, 3, "train", *arguments(directory, corpus, "train.steps=4", "train.stop_at=4"))
    assert f"{path} has to be a " in message
    assert outside.read_text() == "precious"


def test_compressed_text_has_a_bound(tmp_path: Path) -> None:
    """2 GB of one line in 200 KB, in a process of its own, whose largest memory is measured. Caught: a line that is
    read whole; a chunk of compressed text that is decompressed at once."""
    compressor = zstandard.ZstdCompressor()
    with (tmp_path / "a.jsonl.zst").open("wb") as file, compressor.stream_writer(file) as writer:
        for _ in range(128):
            writer.write(16 * (1 << 20) * b"a")
    shutil.copy(tmp_path / "a.jsonl.zst", tmp_path / "a.txt.zst")
    program = (
        "import resource, sys; from pathlib import Path\n"
        "from ngpt_train.data.sources.readers import read_file\n"
        "def used(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = used()\n"
        "for name in 'a.jsonl.zst', 'a.txt.zst':\n"
        "    try:\n        list(read_file(Path(sys.argv[1], name), 'text'))\n"
        "    except ValueError as error:\n        print(used() - before, error)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", program, tmp_path], capture_output=True, text=True, timeout=60, check=True
    )
    kilobytes, messages = zip(*(line.split(maxsplit=1) for line in found.stdout.splitlines()), strict=True)
    assert ["a document of more than 256 MB" in message for message in messages] == [True, True]
    assert max(map(int, kilobytes)) < 900_000


def test_large_lines_and_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: a bound that counts a line too many, or cuts a line in two."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    monkeypatch.setattr(readers, "LARGEST_DOCUMENT", 1000)
    fits, large = (json.dumps({"text": n * "x"}) + "\n" for n in (985, 999))
    path = tmp_path / "a.jsonl"
    path.write_text(fits)
    assert [len(text) for text in read_file(path, "text")] == [985]
    path.write_text(fits + large)
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: a document of more than"):
        list(read_file(path, "text"))
    path.write_text(2 * fits + 3 * large)
    with pytest.raises(DataError, match=r"a\.jsonl, line 3: a document of more than"):
        list(read_file(path, "text", (2 * len(fits) + 5, 9999)))
    rows = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [3000 * "x"]}), rows)
    with pytest.raises(DataError, match=r"a\.parquet, row group 0: a document of more than"):
        list(read_file(rows, "text"))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_empty_lines_have_a_bound(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few KB stand for as many as take hours. Caught: no bound; one of all empty lines of a file together."""
    monkeypatch.setattr(readers, "MOST_EMPTY", 1000)
    compress = {"gz": gzip.compress, "zst": zstandard.compress}.get(name.split(".")[-1], bytes)
    document = b'{"text": "x"}\n'
    (tmp_path / name).write_bytes(compress(3 * (1000 * b"\n" + document)))
    assert len(list(read_file(tmp_path / name, "text"))) == 3
    (tmp_path / name).write_bytes(compress(document + 1000 * b"\n" + b" \n" + document))
    with pytest.raises(DataError, match=rf"{name}, line 1002: more than 0 MB of empty lines"):
        list(read_file(tmp_path / name, "text"))


def test_a_file_that_is_cut_while_it_is_read(tmp_path: Path) -> None:
    """Caught: a map into memory, which ends the process with SIGBUS."""
    path = tmp_path / "ids.bin"
    np.arange(100_000, dtype="<u2").tofile(path)
    numbers = StoredNumbers(path, "<u2")
    assert numbers[70:73].tolist() == [70, 71, 72]
    assert numbers.between(50, 60)[-3:].tolist() == [57, 58, 59]
    os.truncate(path, 1000)
    assert numbers[:500].tolist() == list(range(500))
    with pytest.raises(DataError, match=r"ids\.bin: has been cut while it was read"):
        numbers[60_000:60_010]


def test_forged_records(directory: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of metrics.jsonl that are no records are dropped. Caught: a run that ends at the picture of its curves."""
    path = directory / "runs/test/metrics.jsonl"
    lines = ["null", "[" * 5000, '{"kind": "eval", "step": 1e999}', '{"kind": [], "step": 1}', 3_000_000 * "x"]
    lines.append('{"kind": "train", "step": 3, "tokens": "x", "loss": {}, "lr": [], "grad_norm": null}')
    path.write_text("\n".join(lines) + "\n" + path.read_text())
    monkeypatch.setenv("NGPT_TESTS_CURVES", "1")
    finished = forked("train", arguments(directory, corpus, "train.steps=6"))
    assert finished.returncode == 0, finished.stderr
    assert (directory / "runs/test/curves.png").is_file()
    assert len([json.loads(line) for line in path.read_text().splitlines()]) >= 6


@pytest.mark.parametrize("option", ["--config-dir", "--plugin"])
def test_a_directory_that_is_a_link_to_itself(tmp_path: Path, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").symlink_to("mine")
    assert "no such directory" in refused(capsys, 2, "plan", option, str(tmp_path / "mine"), "scale=debug")


def test_a_preparation_writes_nothing_through_a_link(tmp_path: Path, corpus: Path) -> None:
    """Caught: the directory of a preparation that was interrupted, which is a link, and what it leads to is deleted."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("precious")
    (tmp_path / ".prepared.partial").symlink_to(outside)
    assert main(["prepare", *arguments(tmp_path, corpus, f"data.out={tmp_path / 'prepared'}")]) == 0
    assert [path.name for path in outside.iterdir()] == ["precious"]


@pytest.mark.parametrize("model", ["gpt", "gpt_encoder_decoder"])
def test_a_model_larger_than_the_memory(
    tmp_path: Path, corpus: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Caught: a model that is built until the system ends the process; text that is prepared for it first."""
    sizes = ["model.d_model=100000", "model.n_layers=10000", f"model={model}"]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    given = arguments(tmp_path, corpus, *sizes)
    message = refused(capsys, 2, "train", *given)
    assert "model.d_model=100000, model.n_layers=10000" in message
    assert re.search(r"the optimizer's state take [\d,]{10,}\.\d GiB in the memory of this host", message)
    assert not (tmp_path / "cache").exists()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # kB


def test_weights_larger_than_the_memory(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ngpt_train.report.enough_memory.memory_of", lambda _: 100_000)
    given = ["generate", f"generate.checkpoint={directory / STEP}", "train.device=cpu"]
    assert f"the weights of {directory / STEP} take 0.0 GiB in the memory of this host" in refused(capsys, 2, *given)


@pytest.mark.parametrize("start", ["null", "[]", '{"starts": [5]}', '{"starts": [{}]}', '{"starts": 5, "saved": "x"}'])
def test_forged_starts(directory: Path, corpus: Path, start: str, capsys: pytest.CaptureFixture[str]) -> None:
    (directory / "runs/test/run.json").write_text(start)
    message = refused(capsys, 3, "train", *arguments(directory, corpus, "train.steps=4"))
    assert "run.json is damaged: it does not say how the run began" in message


@pytest.mark.parametrize(
    ("override", "code", "problem"),
    [
        ("run.name=" + 300 * "n", 2, "not a directory name"),
        ("run.root=/tmp/" + 300 * "n", 2, "File name too long"),
        ("data.cache=/tmp/" + 300 * "n", 2, "File name too long"),
        ("data.path=/" + 3000 * "n/", 2, "File name too long"),
        ("eval.contexts=[" + 20_000 * "1," + "1]", 2, "40,003 characters"),
        ("run.name=" + 300 * "${oc.env:" + "A" + 300 * "}", 2, "nested without end"),
    ],
)
def test_names_and_values_without_end(
    tmp_path: Path, corpus: Path, override: str, code: int, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refused(capsys, code, "train", *arguments(tmp_path, corpus, override))
    assert problem in message
    assert len(message) < 3000


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ("LOCAL_RANK=-3", "LOCAL_RANK=-3: the environment has it, and it is no number"),
        ("WORLD_SIZE=99999999999 RANK=0", "WORLD_SIZE=99999999999: the environment has it"),
        ("WORLD_SIZE=1 RANK=0", "no address and port"),
        ("WORLD_SIZE=1 RANK=0 MASTER_ADDR=localhost MASTER_PORT=abc", "MASTER_PORT=abc in the environment"),
        ("WORLD_SIZE=1 RANK=0 MASTER_ADDR=localhost MASTER_PORT=99999999", "MASTER_PORT=99999999 in the environment"),
    ],
)
def test_hostile_environment(
    tmp_path: Path,
    corpus: Path,
    variables: str,
    problem: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Caught: a traceback, and a rank whose number is no number and that therefore says nothing."""
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))
    assert problem in refused(capsys, 2, "train", *arguments(tmp_path, corpus))


@pytest.mark.parametrize(
    "override",
    [
        "run.name=${oc.env:SECRET}",
        "train.steps=${oc.env:${oc.env:SECRET}}",
        "model.context=${oc.decode:${oc.env:SECRET}}",
    ],
)
def test_messages_hide_the_environment(
    tmp_path: Path,
    corpus: Path,
    override: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SECRET", "hunter2/hunter2/x")
    assert "hunter2" not in refused(capsys, 2, "train", *arguments(tmp_path, corpus, override))
