"""wandb may be missing, fail or hang at any moment: the run neither stops nor waits, and loses no number."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ngpt_train.config.schema import Config
from ngpt_train.config.sections.records import WandbConfig
from ngpt_train.core.recorded import Sink
from ngpt_train.observe.sinks import JsonlSink, build_sinks
from ngpt_train.observe.wandb_sink import WandbSink

# A stand-in for wandb: writes down what it is told, and misbehaves where FAKE_WANDB says so.
FAKE = """
import atexit, json, os, time

def event(kind, **values):
    with open(os.environ["FAKE_WANDB_EVENTS"], "a") as file:
        file.write(json.dumps({"event": kind, **values}) + "\\n")

def misbehave(moment):
    for rule in os.environ.get("FAKE_WANDB", "").split():
        when, how = rule.split(":")
        if when == moment:
            if how == "hang":
                time.sleep(600)
            raise {"raise": RuntimeError, "exit": SystemExit}[how](f"{moment} failed")

class Settings:
    def __init__(self, **settings): self.settings = settings

class Run:
    url = "https://example.org/run"
    summary = {}
    def define_metric(self, name, step_metric=None): event("define_metric", name=name, step_metric=step_metric)
    def log(self, values):
        misbehave("log")
        event("log", values=values)
    def alert(self, title, text, level): event("alert", text=text, level=level)
    def finish(self, exit_code):
        misbehave("finish")
        event("finish", exit_code=exit_code, summary=self.summary)

def init(**arguments):
    event("init", **{name: value for name, value in arguments.items() if name != "settings"})
    event("settings", **arguments["settings"].settings)
    misbehave("init")
    misbehave("init_" + arguments["mode"])
    atexit.register(misbehave, "exit")
    return Run()

misbehave("import")
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Puts the stand-in before the real wandb; the file it writes its events to."""
    module = tmp_path / "fake" / "wandb.py"
    module.parent.mkdir()
    module.write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(module.parent))
    monkeypatch.setenv("FAKE_WANDB_EVENTS", str(tmp_path / "events"))
    return tmp_path / "events"


def events(path: Path, name: str) -> list[dict]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [event for event in map(json.loads, lines) if event["event"] == name]


class Trial:
    """A short run that logs to wandb."""

    def __init__(self, run_dir: Path, mode: str = "online", timeout: float = 30.0, resume_step: int | None = None):
        run_dir.mkdir(exist_ok=True)
        self.said: list[str] = []
        self.jsonl = JsonlSink(run_dir / "metrics.jsonl", resume_step)
        settings = WandbConfig(mode=mode, timeout=timeout)
        shown = {"config": {"optim": {"lr": 0.1}}, "summary": {}}
        self.wandb = self.timed(lambda: WandbSink(settings, mode == "online", run_dir, shown, self.said.append))
        self.first_step = (resume_step or 0) + 1

    def timed(self, call):
        """No call may take longer than a step of training notices."""
        started = time.perf_counter()
        result = call()
        assert time.perf_counter() - started < 0.5
        return result

    def log(self, n_steps: int) -> None:
        for step in range(self.first_step, self.first_step + n_steps):
            record = {"kind": "train", "step": step, "loss": 1 / step, "tokens": 100 * step, "mfu": None}
            self.jsonl.log(record)
            self.timed(lambda record=record: self.wandb.log(record))
        self.first_step += n_steps

    def close(self, at_most: float) -> None:
        started = time.perf_counter()
        self.jsonl.close("done")
        self.wandb.close("done")
        assert time.perf_counter() - started < at_most
        assert self.wandb._process is None


def wait_for(condition, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_follower_starts_without_torch() -> None:
    """Caught: seconds, and hundreds of megabytes, beside each run."""
    code = "import ngpt_train.observe.wandb_follower, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_records_reach_wandb(tmp_path: Path, fake: Path) -> None:
    trial = Trial(tmp_path / "run")
    trial.log(3)
    spent = {"train_seconds": 1.5, "flops": 1e6}
    eval_record = {"kind": "eval", "step": 3, "tokens": 300, **spent, "loss": 2.0, "ppl": 7.4, "loss_ctx64": 2.5}
    trial.jsonl.log(eval_record)
    trial.close(at_most=30)
    assert trial.said == ["wandb: online, https://example.org/run"]
    assert [event["values"] for event in events(fake, "log")] == [
        *({"tokens": 100 * n, "step": n, "train/loss": 1 / n} for n in (1, 2, 3)),
        {"tokens": 300, "step": 3, **spent, "eval/loss": 2.0, "eval/ppl": 7.4, "eval/loss_ctx64": 2.5},
    ]
    (init,) = events(fake, "init")
    run_id = (tmp_path / "run" / "wandb_id").read_text().strip()
    assert init["mode"] == "online"
    assert init["id"] == run_id
    assert init["resume"] == "allow"
    assert init["dir"] == str(tmp_path / "run")
    assert init["config"] == {"optim": {"lr": 0.1}}
    (settings,) = events(fake, "settings")
    assert settings["x_disable_meta"]
    assert settings["disable_git"]
    assert settings["disable_code"]
    assert {event["name"]: event["step_metric"] for event in events(fake, "define_metric")} == {
        **dict.fromkeys(["tokens", "step", "flops", "train_seconds"]),
        "*": "tokens",
    }
    summary = {"final/eval_loss": 2.0, "final/eval_ppl": 7.4, "final/eval_loss_ctx64": 2.5, "end": "done"}
    assert events(fake, "finish") == [{"event": "finish", "exit_code": 0, "summary": summary}]

    resumed = Trial(tmp_path / "run", resume_step=2)
    resumed.jsonl.log({"kind": "eval", "step": 2, "tokens": 200, "loss": 2.5})
    resumed.log(2)
    resumed.close(at_most=30)
    assert [init["id"] for init in events(fake, "init")] == [run_id, run_id]
    assert [event["values"]["step"] for event in events(fake, "log")] == [1, 2, 3, 3, 2, 3, 4]
    assert [event["values"]["tokens"] for event in events(fake, "log")] == [100, 200, 300, 300, 200, 300, 400]


def test_an_alarm_reaches_people(tmp_path: Path, fake: Path) -> None:
    """Caught: an alarm that wandb takes for the end of the run; a warning that is an alert."""
    trial = Trial(tmp_path / "run")
    for text in ("alarm: no room", "warning: nothing"):
        trial.timed(lambda text=text: trial.wandb.message(text))
    wait_for(lambda: events(fake, "alert"))
    trial.log(2)
    trial.close(at_most=30)
    assert events(fake, "alert") == [{"event": "alert", "text": "no room", "level": "ERROR"}]
    assert len(events(fake, "log")) == 2
    assert events(fake, "finish")[0]["summary"]["end"] == "done"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        ("import:raise", ["wandb is off (RuntimeError: import failed)"]),
        ("init_online:raise", ["wandb: offline (RuntimeError: init_online failed)"]),
        ("init_online:hang", ["wandb: offline (no connection within 2 s)"]),
        ("log:hang", ["wandb: online", "wandb stopped (no answer)"]),
        ("finish:hang", ["wandb: online", "wandb stopped (no answer)"]),
        ("exit:hang", ["wandb: online", "wandb stopped (no answer)"]),
    ],
)
def test_a_failing_or_hanging_wandb_stops_nothing(
    tmp_path: Path, fake: Path, monkeypatch: pytest.MonkeyPatch, behaviour: str, said: list[str]
) -> None:
    monkeypatch.setenv("FAKE_WANDB", behaviour)
    trial = Trial(tmp_path / "run", timeout=2.0)
    trial.log(20)
    trial.close(at_most=20)
    assert len(trial.said) == len(said)
    assert all(line.startswith(start) for line, start in zip(trial.said, said, strict=True))
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 20
    if behaviour.startswith("init_online"):  # the offline run starts where the online one should have
        assert [event["values"]["step"] for event in events(fake, "log")] == list(range(1, 21))


def test_wandb_that_hangs_while_it_is_imported(tmp_path: Path, fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_WANDB", "import:hang")
    monkeypatch.setattr("ngpt_train.observe.wandb_sink.OFFLINE_START_SECONDS", 2.0)
    trial = Trial(tmp_path / "run", timeout=1.0)
    wait_for(lambda: trial.log(1) or trial.said)  # two starts of Python on a busy machine have no upper bound
    trial.close(at_most=15)
    assert trial.said[0].startswith("wandb is off (it does not start)")


def test_failures_are_told_while_the_run_goes_on(tmp_path: Path, fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_WANDB", "log:raise")
    trial = Trial(tmp_path / "run")
    wait_for(lambda: trial.log(1) or len(trial.said) == 2)
    trial.log(5)  # and the rest goes by as if it had never been
    trial.close(at_most=0.5)
    assert len(trial.said) == 2


def test_a_stopped_follower_is_left_behind(tmp_path: Path, fake: Path) -> None:
    trial = Trial(tmp_path / "run", timeout=0.5)
    assert trial.wandb._process is not None
    pid = trial.wandb._process.pid
    os.kill(pid, signal.SIGSTOP)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ngpt_train.observe.wandb_sink.OFFLINE_START_SECONDS", 0.5)
        trial.close(at_most=5)
    assert trial.said[0].startswith("wandb did not finish")
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_follower_ends_with_a_killed_run(tmp_path: Path, fake: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path\n"
        "sys.path.insert(0, sys.argv[2]); from test_observe_wandb import Trial\n"
        "trial = Trial(Path(sys.argv[1])); trial.log(5); print(trial.wandb._process.pid, flush=True); time.sleep(600)\n"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", program, tmp_path / "run", Path(__file__).parent], stdout=subprocess.PIPE, text=True
    )
    assert run.stdout is not None
    follower = int(run.stdout.readline())
    wait_for(lambda: events(fake, "init"))
    run.kill()
    run.communicate()

    def gone() -> bool:
        with contextlib.suppress(ProcessLookupError):
            os.kill(follower, 0)
            return False
        return True

    wait_for(gone)
    assert len(events(fake, "log")) == 5
    assert events(fake, "finish")[0]["exit_code"] == 1


def test_the_run_is_described(tmp_path: Path, fake: Path) -> None:
    """In the config and in the summary, by which runs are compared. Caught: a run with rollbacks or a fallback that
    looks like one without."""
    cfg = Config()
    cfg.logging.wandb = WandbConfig(mode="online", name="a", group="b", tags=["c", "d"], notes="e")
    info = {"world_size": 8, "step": 4, "damaged": {"step_00000006": "state.json is missing"}}
    rollbacks = [{"number": 1, "step": 4, "why": "the loss of step 6 is 9, after a median of 2"}]
    for sink in build_sinks(cfg, tmp_path, info, resume_step=4, rollbacks=rollbacks):
        sink.close("done")
    (init,), (finish,) = events(fake, "init"), events(fake, "finish")
    assert init["config"]["run_info"] == info
    assert init["config"]["rollbacks"] == rollbacks
    assert init["config"]["model"]["context"] == 256
    assert [init[name] for name in ("name", "group", "tags", "notes")] == ["a", "b", ["c", "d"], "e"]
    assert finish["summary"]["rollbacks"] == 1
    assert finish["summary"]["fallback"] == "the run goes on from step 4; step_00000006: state.json is missing"


@pytest.mark.parametrize(
    ("mode", "asked", "project", "means"),
    [
        ("auto", None, None, "disabled"),
        ("auto", "online", None, "online"),
        ("auto", "offline", "p", "offline"),
        ("auto", None, "p", "online"),
        ("offline", "online", "p", "offline"),
    ],
)
def test_wandb_is_off_unless_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, asked: str | None, project: str | None, means: str
) -> None:
    """Caught: a toy run that is uploaded because there is a key; a run that does not say how to turn it on."""
    begun: list[bool] = []

    class Begun(Sink):
        def __init__(self, settings: WandbConfig, online: bool, *_: object) -> None:
            begun.append(online)

    monkeypatch.setattr("ngpt_train.observe.sinks.WandbSink", Begun)
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123456789abcdef01234567")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    if asked:
        monkeypatch.setenv("WANDB_MODE", asked)
    cfg = Config()
    cfg.logging.wandb = WandbConfig(mode=mode, project=project)
    for sink in build_sinks(cfg, tmp_path, {}, resume_step=None):
        sink.close("done")
    assert begun == ([] if means == "disabled" else [means == "online"])
    told = "wandb: off (logging.wandb.mode=online" in (tmp_path / "logs" / "rank_0.log").read_text()
    assert told == (means == "disabled")


# The real wandb, without a network


@pytest.fixture
def no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


@pytest.fixture
def silent_server() -> Iterator[str]:
    """The address of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.usefixtures("no_key")
def test_real_wandb_without_a_key_is_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    run_dir = tmp_path / "run"
    trial = Trial(run_dir)
    trial.log(5)
    trial.close(at_most=90)
    (said,) = trial.said
    assert said.startswith("wandb: offline (")
    assert "API key" in said
    assert "Traceback" not in (run_dir / "logs" / "wandb.log").read_text()
    assert f"wandb sync {run_dir}" in said
    run_id = (run_dir / "wandb_id").read_text().strip()
    (stored,) = run_dir.glob("wandb/offline-run-*/*.wandb")
    assert stored.name == f"run-{run_id}.wandb"
    content = stored.read_bytes()
    assert b"train/loss" in content
    assert b"pytest" not in content.replace(str(tmp_path).encode(), b"")  # this command line
    assert not list(run_dir.glob("wandb/**/wandb-metadata.json"))


@pytest.mark.slow
@pytest.mark.usefixtures("no_key")
def test_real_wandb_with_a_key_and_a_silent_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent_server: str
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123456789abcdef01234567")
    monkeypatch.setenv("WANDB_BASE_URL", silent_server)
    trial = Trial(tmp_path / "run", timeout=4.0)
    trial.log(5)
    trial.close(at_most=60)
    assert trial.said[0].startswith("wandb: offline (")
    (stored,) = (tmp_path / "run").glob("wandb/offline-run-*/*.wandb")
    assert b"train/loss" in stored.read_bytes()
    assert b"0123456789abcdef" not in stored.read_bytes()
