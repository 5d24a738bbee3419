"""The command line as a user meets it: real processes, exit codes, and nothing heavy before a mistake is found."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from ngpt_train.__main__ import VERBS, _run_job, main
from ngpt_train.config import DataError
from ngpt_train.config.stored import read_yaml
from ngpt_train.config.yaml_files import GROUPS
from tests.processes.runs import arguments

COMMANDS = {
    "module": [sys.executable, "-m", "ngpt_train"],
    "script": [str(Path(sys.executable).with_name("ngpt-train"))],
}
PLAN = ["plan", "scale=debug", "tokenizer=bytes"]


def run(*arguments: str, command: str = "module", cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    # A user's Python buffers what it writes into a pipe, whatever the environment of the tests says.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(
        [*COMMANDS[command], *arguments],
        capture_output=True, text=True, check=False, timeout=120, cwd=cwd, env=environment,
    )  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_a_mistake_is_one_message_and_exit_code_2(command: str, tmp_path: Path) -> None:
    done = run("train", "model=ngtp", command=command, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: model=ngtp: no such option; did you mean ngpt or angpt?")
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_is_found_before_anything_heavy_is_imported() -> None:
    # The last mistake that is looked for, in CPU time, which other processes do not change.
    code = """
import resource, sys
from ngpt_train.__main__ import main
assert main(["train", "train.stop_at=5", "train.steps=4", "schedule.warmup_steps=0"]) == 2
heavy = {"torch", "numpy", "datasets", "wandb", "matplotlib", "sentencepiece", "tiktoken", "pyarrow", "rich"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
used = resource.getrusage(resource.RUSAGE_SELF)
assert used.ru_utime + used.ru_stime < 2, used
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "train.stop_at=5" in done.stderr


def test_models_do_not_import_the_compiler() -> None:
    """It takes as long as torch itself."""
    code = "import ngpt_train.verbs.evaluate, ngpt_train.verbs.generate, sys; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_a_run_of_one_process_does_not_import_the_compiler(tmp_path: Path, corpus: Path) -> None:
    """DTensor takes half as long. Caught: an optimizer, a checkpoint or an operation that imports one of them."""
    given = arguments(tmp_path, corpus, "model=ngpt", "train.steps=1", "train.batch_rows=2", "optim.ema_decay=0.9")
    code = f"""
import sys
from ngpt_train.__main__ import main
assert main(["train", *{given!r}]) == 0
assert not {{"torch._dynamo", "torch.distributed.tensor"}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_verbs_in_processes_of_their_own(tmp_path: Path, corpus: Path) -> None:
    """Other tests fork them from a process that has imported everything (`plan` is below).
    Caught: an import that only another one makes possible, an end that hangs, fails, or loses what was printed."""
    prepared, checkpoint = tmp_path / "prepared", tmp_path / "runs/test"
    given = arguments(tmp_path, corpus, "train.steps=2", "train.batch_rows=2")
    for verb, more in {
        "prepare": [f"data.out={prepared}"],
        "train": ["parallel=ddp"],  # a process group of one, with which a process ends otherwise
        "evaluate": [f"evaluate.checkpoint={checkpoint}", f"evaluate.out={tmp_path / 'result.json'}"],
        "generate": [f"generate.checkpoint={checkpoint}", "generate.max_new_tokens=3"],
    }.items():
        done = run(verb, *given, *more, cwd=tmp_path)
        assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
        assert done.stdout
        assert verb != "train" or done.stdout.splitlines()[-1].startswith("curves: ")
    assert list(prepared.glob("*.bin"))
    assert (checkpoint / "checkpoints/step_00000002/MANIFEST.json").is_file()
    assert json.loads((tmp_path / "result.json").read_text())["step"] == 2


def test_help_names_the_verbs() -> None:
    for given in ([], ["--help"]):
        done = run(*given)
        assert done.returncode == 0
        assert all(f"  {verb}" in done.stdout and doc in done.stdout for verb, doc in VERBS.items())


@pytest.mark.parametrize("verb", ["train", "import"])
def test_help_of_a_verb_shows_every_group(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help", "model=gpt", "train.steps=7"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for group in GROUPS:
        assert f" {group} " in text
    assert "train.steps=7 (an integer >= 1)" in text
    assert "[gpt] gpt_encoder_decoder ngpt" in text


def unread(command: list[str], **variables: str) -> int:
    """The exit code of a command whose output nobody reads, and which says nothing of it."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | variables) as job:
        assert job.stdout
        assert job.stderr
        job.stdout.close()
        assert job.stderr.read() == b""
    return job.returncode


def test_help_into_a_closed_pipe() -> None:
    assert unread([*COMMANDS["module"], "train", "--help"]) == 0


@pytest.mark.parametrize("unbuffered", ["1", ""], ids=["while it prints", "at its end"])
def test_a_verb_whose_output_nobody_reads(unbuffered: str) -> None:
    """Caught: a traceback on stderr, of `print` or of the interpreter's last flush; an exit that tells of success."""
    code = """
import sys, types
def main(config, overrides, **more):
    print("a table")
    return 0
sys.modules["ngpt_train.verbs.plan"] = types.SimpleNamespace(main=main)
from ngpt_train import __main__
__main__.run()
"""
    assert unread([sys.executable, "-c", code, *PLAN], PYTHONUNBUFFERED=unbuffered) == 128 + signal.SIGPIPE


def test_a_broken_pipe_that_is_not_the_output_is_a_fault() -> None:
    """Caught: the fault of a worker's pipe that ends the command without a word."""
    code = """
import os
from ngpt_train import __main__

def main():
    reader, writer = os.pipe()
    os.close(reader)
    os.write(writer, b"x")

__main__.main = main
__main__.run()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert "BrokenPipeError" in done.stderr


def test_cfg_job_prints_a_config_that_can_be_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "do-not-print")
    done = run("train", "model=gpt", "run.root=x/do-not-print", "--cfg", "job", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "do-not-print" not in done.stdout
    (tmp_path / "config.yaml").write_text(done.stdout)
    assert read_yaml(tmp_path / "config.yaml").run.name == "gpt-tiny-seed0"
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_exit_codes_of_errors(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class NumericalStop(Exception):
        exit_code = 4

    def fails_with(error: Exception) -> None:
        def verb(config: object, overrides: object) -> int:
            raise error

        monkeypatch.setitem(sys.modules, "ngpt_train.verbs.train", SimpleNamespace(main=verb))

    fails_with(DataError("train.txt: empty"))
    assert main(["train"]) == 3
    assert capsys.readouterr().err == "error: train.txt: empty\n"
    fails_with(NumericalStop("step 5: loss is nan"))
    assert main(["train"]) == 4
    fails_with(ValueError("a fault of the program"))
    with pytest.raises(ValueError, match="a fault of the program"):
        main(["train"])


def test_multirun_runs_every_combination_also_after_a_failed_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Caught: jobs that end with the first failure, an exit code that hides it, two jobs of one name."""
    done = run(*PLAN, "-m", "model=gpt", "run.name=both", "plan.out=no/such/plan.json,plan.json", cwd=tmp_path)
    assert done.returncode == 2
    assert "jobs [0] of 2 failed" in done.stderr
    first = "job 0 of 2: scale=debug tokenizer=bytes model=gpt plan.out=no/such/plan.json run.name=both/0"
    assert first in done.stdout
    assert "run.name=both/1" in done.stdout
    assert json.loads((tmp_path / "plan.json").read_text())["model"] == "gpt"
    assert main([*PLAN, "-m", "run.seed=range(0,3)", "--cfg", "job"]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("  name: ngpt-")] == [
        f"  name: ngpt-debug-seed{k}/{k}" for k in range(3)
    ]


def test_the_table_of_a_multirun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Jobs that end, diverge, are refused over an earlier run, and are not started. Caught: the first records in the
    place of the last; losses of another start; a job that is left out of the table; overrides that all jobs have."""
    monkeypatch.chdir(tmp_path)
    ends = iter([(0, "done"), (4, "NumericalError: nan"), (2, "done"), (3, "done"), (0, "stopped by SIGINT")])

    def job(command: list[str]) -> tuple[int, bool]:
        code, reason = next(ends)
        run = tmp_path / "runs" / command[-1].removeprefix("run.name=")
        run.mkdir(parents=True)
        records = [{"kind": "train", "step": n, "tokens": 4096 * n, "loss_mean": 8.0 / n} for n in (1, 2)]
        records += [{"kind": "eval", "step": 2, "loss": 5.0}] if code == 0 else []
        (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        (run / "exit.json").write_text(json.dumps({"code": code, "reason": reason, "step": 2}))
        return code, "SIGINT" in reason

    monkeypatch.setattr("ngpt_train.__main__._run_job", job)
    assert main(["train", "-m", "scale=debug", "model=gpt", "optim.lr=1,2,3,4,5,6", "run.name=s"]) == 4
    table = [re.split(" {2,}", line) for line in capsys.readouterr().out.splitlines()[-6:]]
    assert table == [
        ["0", "4.0000", "5.0000", "8.19k", "done", "optim.lr=1"],
        ["1", "4.0000", "-", "8.19k", "failed, exit code 4", "optim.lr=2"],
        ["2", "-", "-", "-", "failed, exit code 2", "optim.lr=3"],
        ["3", "-", "-", "-", "failed, exit code 3", "optim.lr=4"],
        ["4", "4.0000", "5.0000", "8.19k", "stopped by SIGINT", "optim.lr=5"],
        ["5", "-", "-", "-", "not started", "optim.lr=6"],
    ]


def test_interrupted_multirun_lets_its_job_save(tmp_path: Path) -> None:
    # As a training job does: the first signal saves, a second one would kill.
    job = """
import pathlib, signal, sys, time
def save(*_):
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    time.sleep(0.3)
    pathlib.Path("saved").touch()
    sys.exit(0)
signal.signal(signal.SIGINT, save)
pathlib.Path("started").touch()
time.sleep(60)
"""

    def interrupt() -> None:
        while not (tmp_path / "started").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=interrupt)
    thread.start()
    script = tmp_path / "job.py"
    script.write_text(job.replace('Path("', f'Path("{tmp_path}/'))
    assert _run_job([sys.executable, str(script)]) == (0, True)
    thread.join()
    assert (tmp_path / "saved").exists()
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_signal_that_comes_before_a_job_has_begun_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = subprocess.Popen

    def interrupted(command: list[str], process_group: int) -> subprocess.Popen[bytes]:
        signal.raise_signal(signal.SIGINT)
        return begin(command, process_group=process_group)

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    assert _run_job(["sleep", "60"]) == (-signal.SIGINT, True)
