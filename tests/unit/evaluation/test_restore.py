"""`evaluate` and `generate`: keys of the command line, and keys of the checkpoint."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import ngpt_train
from ngpt_train.__main__ import main
from ngpt_train.config import ConfigError, DataError
from ngpt_train.kernels import attention, dispatch
from tests.processes.runs import arguments, write_corpus

OPTIONS = ["model=gpt", "train.steps=1", "scale=debug", "model.n_layers=1", "optim.lr=1e-3", "schedule.warmup_steps=0"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "text.jsonl")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    directory = tmp_path_factory.mktemp("run")
    assert main(["train", *arguments(directory, corpus, *OPTIONS)]) == 0
    return directory / "runs/test"


@pytest.fixture(autouse=True)
def kernels_afterwards() -> Iterator[None]:
    yield
    dispatch.choose("auto")
    attention._choice = "auto"


def start(verb: str, checkpoint: Path, *overrides: str) -> int:
    own = ["generate.max_new_tokens=1"] if verb == "generate" else []
    return main([verb, f"{verb}.checkpoint={checkpoint}", *own, "train.device=cpu", *overrides])


both = pytest.mark.parametrize("verb", ["evaluate", "generate"])


@both
@pytest.mark.parametrize(
    ("override", "decided"),
    [
        ("model=ngpt", "model.name is gpt"),
        ("model.n_layers=3", "model.n_layers is 1"),
        ("scale=tiny", "scale.name is debug"),
        ("tokenizer=gpt2", "tokenizer.kind is bytes"),
        ("optim.lr=0.5", "optim.lr is 0.001"),
        ("optim.z_loss=0.5", "optim.z_loss is 0.0"),
        ("schedule.kind=linear", "schedule.kind is cosine"),
        ("recipe=ngpt", "has decided"),
        ("recipe=gpt", "has decided"),
    ],
)
def test_what_contradicts_the_checkpoint_is_refused(
    verb: str, override: str, decided: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Caught: a key that the verb takes and makes no use of, without a word."""
    capsys.readouterr()
    assert start(verb, checkpoint, override) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert override in said.err
    assert "checkpoint" in said.err
    assert decided in said.err


@both
def test_what_agrees_with_the_checkpoint_is_taken(
    verb: str, checkpoint: Path, corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The command line of the training itself, too; keys that mean nothing here are named."""
    given = arguments(tmp_path, corpus, *OPTIONS, "model.vocab_size=auto", "optim.lr=auto", "run.name=other")
    with caplog.at_level("INFO", logger="ngpt_train"):
        assert start(verb, checkpoint, *given) == 0
    (line,) = [record.getMessage() for record in caplog.records if "makes no use of" in record.getMessage()]
    assert "run.name" in line
    assert "train.steps" in line
    assert "model" not in line
    assert "train.device" not in line
    assert ("data.path" in line) == (verb == "generate")


@both
def test_kernels_are_the_command_lines(
    verb: str, checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert start(verb, checkpoint, "kernels=torch", "kernels.attention=sdpa") == 0
    assert (dispatch._choice, attention._choice) == ("torch", "sdpa")
    assert start(verb, checkpoint, "kernels.attention=flash_attn") == 2
    assert "kernels.attention=flash_attn" in capsys.readouterr().err


def test_load(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In Python as on the command line: the same text, and the logits that its most likely token comes from. Caught:
    dropout, an option that is taken and makes no difference."""
    given = [f"generate.checkpoint={checkpoint}", "train.device=cpu", "generate.max_new_tokens=5", "generate.seed=3"]
    assert main(["generate", *given, "generate.prompt=the"]) == 0
    loaded = ngpt_train.load(checkpoint, device="cpu")
    text = loaded.generate("the", max_new_tokens=5, seed=3)
    assert capsys.readouterr().out == f"the{text}\n"
    logits = loaded.model(loaded.tokens("the")[None])[0]
    assert logits.shape[0] == len("the") + 1
    likeliest = loaded.tokenizer.decode([int(logits[-1].argmax())])
    assert loaded.generate("the", max_new_tokens=1, temperature=0) == likeliest
    for wrong in ({"max_tokens": 5}, {"max_new_tokens": 0}):
        with pytest.raises(ConfigError, match=r"generate\.max_new_tokens"):
            loaded.generate("the", **wrong)
    with pytest.raises(DataError, match="nowhere: does not exist"):
        ngpt_train.load("nowhere")
