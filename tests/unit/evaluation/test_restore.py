"""What `evaluate` and `generate` take from a checkpoint: its keys, and its weights, their moving average or their mean
over checkpoints, against what numpy makes of the files."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import ngpt_train
from ngpt_train.__main__ import main
from ngpt_train.config import load_config
from ngpt_train.core.errors import ConfigError, DataError
from ngpt_train.evaluation.restore import Restored, find_trained, restore
from ngpt_train.kernels import attention, dispatch
from ngpt_train.models import export_weights
from tests.processes.runs import arguments, write_corpus
from tests.stored import stored_tensors
from tests.unit.evaluation.large import ALONE

DECAY, STEPS = 0.8, (2, 4, 6)
NAMES = ["gpt", "ngpt", "powernorm"]
OPTIONS = ["scale=debug", "model.n_layers=1", "optim.lr=1e-2", "schedule.warmup_steps=0", "train.steps=6"]
OPTIONS += ["checkpoint.every=2", "checkpoint.keep_last=3"]
Arrays = dict[str, NDArray[np.float32]]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "text.jsonl")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> dict[str, Path]:
    """A run of each architecture with a moving average, and `plain`, GPT without one: three checkpoints each."""
    found = {}
    for name in [*NAMES, "plain"]:
        directory = tmp_path_factory.mktemp(name)
        model, ema = ("gpt", []) if name == "plain" else (name, [f"optim.ema_decay={DECAY}"])
        assert main(["train", *arguments(directory, corpus, f"model={model}", *OPTIONS, *ema)]) == 0
        found[name] = directory / "runs/test"
    return found


@pytest.fixture(autouse=True)
def kernels_afterwards() -> Iterator[None]:
    yield
    dispatch.choose("auto")
    attention._choice = "auto"


def stored(run: Path, step: int, part: str) -> Arrays:
    """A part of a checkpoint by name."""
    tensors = stored_tensors(run / f"checkpoints/step_{step:08d}")[part]
    return {name: value.numpy() for name, value in tensors.items()}


def restored(run: Path, *overrides: str, verb: str = "evaluate") -> Restored:
    config = load_config([f"{verb}.checkpoint={run}", "train.device=cpu", *(f"{verb}.{key}" for key in overrides)])
    return restore(find_trained(verb, config, []), config, ALONE)


def arrays(found: Restored) -> Arrays:
    return {name: weight.numpy() for name, weight in export_weights(found.model).items()}


def assert_projected(actual: Arrays, expected: Arrays, on_sphere: bool) -> None:
    """Off the sphere bit for bit; on it with every row of a matrix divided by its length, to fp32's rounding."""
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        if on_sphere and x.ndim == 2:
            length = np.linalg.norm(x.astype(np.float64), axis=1, keepdims=True)
            assert length.min() < 1 - 1e-5, "a mean that is projected already would not show"
            np.testing.assert_allclose(actual[name], x / length, rtol=0, atol=1.2e-7)
        else:
            np.testing.assert_array_equal(actual[name], x, err_msg=name)


@pytest.mark.parametrize(("name", "verb"), [("gpt", "evaluate"), ("ngpt", "generate"), ("powernorm", "evaluate")])
def test_the_mean_of_checkpoints_is_numpys(name: str, verb: str, runs: dict[str, Path], tmp_path: Path) -> None:
    """Caught: a sum in fp32, a mean off the sphere, checkpoints after the named one, the oldest ones."""
    run = runs[name]
    for last, k in ((6, 2), (4, 2)):
        steps = [step for step in STEPS if step <= last][-k:]
        parts = [stored(run, step, "model") for step in steps]
        mean = {key: np.mean([x[key].astype(np.float64) for x in parts], axis=0) for key in parts[0]}
        found = restored(run / f"checkpoints/step_{last:08d}", f"average={k}", verb=verb)
        assert found.averaged_steps == tuple(steps)
        expected = {key: x.astype(np.float32) for key, x in mean.items()}
        assert_projected(arrays(found), expected, on_sphere=name == "ngpt")
    if name == "powernorm":
        statistics = [stored(run, step, "statistics") for step in (2, 4)]
        for key, value in found.model.statistics().items():  # (ranks, ...) in the files
            expected_value = np.mean([x[key][0].astype(np.float64) for x in statistics], axis=0)
            np.testing.assert_array_equal(value.numpy(), expected_value.astype(np.float32), err_msg=key)
        assert any(key.endswith("psi_squared") for key in found.model.statistics())


@pytest.mark.parametrize("name", NAMES)
def test_the_moving_average_is_used_as_it_is_stored(name: str, runs: dict[str, Path], tmp_path: Path) -> None:
    """Projected for nGPT, with the statistics of training. Caught: the trained weights in its place."""
    found = restored(runs[name], "weights=ema")
    ema, trained = stored(runs[name], 6, "ema"), stored(runs[name], 6, "model")
    assert all(not np.array_equal(x, trained[key]) for key, x in ema.items())
    assert_projected(arrays(found), ema, on_sphere=name == "ngpt")
    statistics = stored(runs[name], 6, "statistics") if name == "powernorm" else {}
    for key, value in found.model.statistics().items():
        np.testing.assert_array_equal(value.numpy(), statistics[key][0])


def test_a_resumed_run_has_the_same_average(runs: dict[str, Path], corpus: Path, tmp_path: Path) -> None:
    """Bit for bit. Caught: an average that begins anew with the process."""
    given = arguments(tmp_path, corpus, "model=ngpt", *OPTIONS, f"optim.ema_decay={DECAY}")
    assert main(["train", *given, "train.stop_at=3"]) == 0
    assert main(["train", *given]) == 0
    expected, actual = (stored(run, 6, "ema") for run in (runs["ngpt"], tmp_path / "runs/test"))
    assert actual.keys() == expected.keys()
    for key, x in expected.items():
        np.testing.assert_array_equal(actual[key], x, err_msg=key)


def test_an_average_is_not_begun_in_the_middle(
    runs: dict[str, Path], corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor ended: it would no longer be the average of the formula."""
    for name, ema in (("plain", "0.9"), ("gpt", "null")):
        given = arguments(runs[name].parents[1], corpus, "model=gpt", *OPTIONS, "train.steps=8")
        assert main(["train", *given, f"optim.ema_decay={ema}"]) == 2
        assert "optim.ema_decay" in capsys.readouterr().err


def test_what_evaluate_says(runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Caught: a result without the kind of its weights; the trained weights evaluated as the moving average."""
    results = {}
    for key in ("average=3", "weights=ema", "average=1"):
        out = tmp_path / "result.json"
        given = [f"evaluate.checkpoint={runs['ngpt']}", f"evaluate.{key}", f"evaluate.out={out}", "train.device=cpu"]
        assert main(["evaluate", *given]) == 0
        results[key] = json.loads(out.read_text()) | {"said": capsys.readouterr().out}
    assert results["average=3"]["averaged_steps"] == [2, 4, 6]
    assert "(mean of the weights at steps 2, 4, 6)" in results["average=3"]["said"]
    assert results["weights=ema"]["weights"] == "ema"
    assert "(moving average of the weights)" in results["weights=ema"]["said"]
    assert not {"averaged_steps", "weights"} & results["average=1"].keys()
    assert "average" not in results["average=1"]["said"]
    assert len({result["loss"] for result in results.values()}) == 3


def test_what_cannot_be_averaged(runs: dict[str, Path], tmp_path: Path) -> None:
    """Too few checkpoints, no moving average, both at once, two runs: each is refused in words."""
    with pytest.raises(DataError, match=r"evaluate.average=4: .* has 3 up to step 6 \(2, 4, 6\).*keep_last=3"):
        restored(runs["gpt"], "average=4")
    with pytest.raises(DataError, match=r"has 1 up to step 2 \(2\)"):
        restored(runs["gpt"] / "checkpoints/step_00000002", "average=2")
    with pytest.raises(ConfigError, match=r"evaluate.weights=ema: .*optim.ema_decay=null"):
        restored(runs["plain"], "weights=ema")
    assert main(["evaluate", f"evaluate.checkpoint={runs['gpt']}", "evaluate.average=2", "evaluate.weights=ema"]) == 2
    mixed = tmp_path / "mixed/checkpoints"
    shutil.copytree(runs["gpt"] / "checkpoints/step_00000002", mixed / "step_00000002")
    shutil.copytree(runs["plain"] / "checkpoints/step_00000004", mixed / "step_00000004")
    with pytest.raises(
        DataError, match=r"holds several runs.\n  optim.ema_decay: 0.8 in step_00000002, null in step_0"
    ):
        restored(tmp_path / "mixed", "average=2")
    shutil.rmtree(mixed / "step_00000004")
    shutil.copytree(runs["gpt"] / "checkpoints/step_00000004", mixed / "step_00000004")
    tokenizer = mixed / "step_00000002/tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"eos": 256', '"eos": 255'))
    with pytest.raises(DataError, match="another tokenizer"):
        restored(tmp_path / "mixed", "average=2")
    tokenizer.write_text(tokenizer.read_text().replace('"eos": 255', '"eos": 256'))
    (weights,) = (mixed / "step_00000002").glob("shard-00001-model-00001-of-00001.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(DataError, match=r"step_00000002 is damaged"):
        restored(tmp_path / "mixed", "average=2")


def start(verb: str, runs: dict[str, Path], *overrides: str) -> int:
    own = ["generate.max_new_tokens=1"] if verb == "generate" else []
    return main([verb, f"{verb}.checkpoint={runs['plain']}", *own, "train.device=cpu", *overrides])


both = pytest.mark.parametrize("verb", ["evaluate", "generate"])


@pytest.mark.parametrize(
    ("verb", "override", "decided"),
    [
        ("evaluate", "model=ngpt", "model.name is gpt"),
        ("generate", "model.n_layers=3", "model.n_layers is 1"),
        ("evaluate", "scale=tiny", "scale.name is debug"),
        ("generate", "tokenizer=gpt2", "tokenizer.kind is bytes"),
        ("evaluate", "optim.lr=0.5", "optim.lr is 0.01"),
        ("evaluate", "schedule.kind=linear", "schedule.kind is cosine"),
        ("evaluate", "recipe=ngpt", "has decided"),
        ("generate", "recipe=gpt", "has decided"),
    ],
)
def test_what_contradicts_the_checkpoint_is_refused(
    verb: str, override: str, decided: str, runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Caught: a key that the verb takes and makes no use of, without a word."""
    capsys.readouterr()
    assert start(verb, runs, override) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert override in said.err
    assert "checkpoint" in said.err
    assert decided in said.err


@both
def test_what_agrees_with_the_checkpoint_is_taken(
    verb: str, runs: dict[str, Path], corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The command line of the training itself, too; keys that mean nothing here are named."""
    auto = ["model.vocab_size=auto", "optim.lr=auto", "run.name=other"]
    given = arguments(tmp_path, corpus, "model=gpt", *OPTIONS, *auto)
    with caplog.at_level("INFO", logger="ngpt_train"):
        assert start(verb, runs, *given) == 0
    (line,) = [record.getMessage() for record in caplog.records if "makes no use of" in record.getMessage()]
    assert "run.name" in line
    assert "train.steps" in line
    assert "model" not in line
    assert "train.device" not in line
    assert ("data.path" in line) == (verb == "generate")


@both
def test_kernels_are_the_command_lines(verb: str, runs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert start(verb, runs, "kernels=torch", "kernels.attention=sdpa") == 0
    assert (dispatch._choice, attention._choice) == ("torch", "sdpa")
    assert start(verb, runs, "kernels.attention=flash_attn") == 2
    assert "kernels.attention=flash_attn" in capsys.readouterr().err


def test_load(runs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """In Python as on the command line: the same text, and the logits that its most likely token comes from. Caught:
    dropout, an option that is taken and makes no difference."""
    given = [f"generate.checkpoint={runs['plain']}", "train.device=cpu", "generate.max_new_tokens=5", "generate.seed=3"]
    assert main(["generate", *given, "generate.prompt=the"]) == 0
    loaded = ngpt_train.load(runs["plain"], device="cpu")
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
