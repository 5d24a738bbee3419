"""A sixth architecture, from outside: the folder of docs/add_an_architecture.md, taken from that page, does all that
ours do, and what needs it says so where it is not given."""

import itertools
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ngpt_train.__main__ import main
from ngpt_train.config import load_config
from ngpt_train.config.architectures import architectures, use_plugins
from ngpt_train.distributed.world import World
from ngpt_train.evaluation.restore import find_trained, restore
from ngpt_train.models import export_weights
from tests.processes.runs import arguments, numbers, records, run
from tests.properties import test_contract
from tests.properties.architectures import ARCHITECTURES, Architecture
from tests.reference import gpt
from tests.reference.attention import attention, rope, silu, split_heads
from tests.unit.models import test_models

PAGE = Path(__file__).parents[2] / "docs" / "add_an_architecture.md"
SCALE = 1.5


@pytest.fixture(scope="module")
def postln(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plug-in's folder: each block of the page that a file's name stands above."""
    directory = tmp_path_factory.mktemp("mine")
    block = re.compile(r"^`(postln/\S+)`\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    for name, content in block.findall(PAGE.read_text()):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(content)
    return directory / "postln"


@pytest.fixture
def in_use(postln: Path) -> Iterator[None]:
    use_plugins([str(postln)])
    yield
    use_plugins([])


@pytest.fixture(scope="module")
def trained(postln: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of 12 steps."""
    directory = tmp_path_factory.mktemp("trained")
    assert main(["train", *of_run(postln, directory, corpus)]) == 0
    return directory


def of_run(postln: Path, directory: Path, corpus: Path, *overrides: str) -> list[str]:
    return [*arguments(directory, corpus, "model=postln", *overrides), "--plugin", str(postln)]


def shapes(*size: int, **rest: int) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, shape in gpt.shapes(*size, **rest).items() if name != "norm_final"}


def forward(w: dict[str, Tensor], tokens: Tensor, *, n_heads: int, doc_ids: Tensor | None = None) -> Tensor:
    """The model once more, from its equations."""

    def norm(x: Tensor, gain: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * gain

    h = w["embedding"][tokens]
    d_k = h.shape[-1] // n_heads
    for i in range(sum(name.endswith(".wq") for name in w)):
        q, k, v = (split_heads(h @ w[f"layers.{i}.{name}"].T, d_k) for name in ("wq", "wk", "wv"))
        q, k = (rope(x, 10000.0, "half", doc_ids) for x in (q, k))
        k, v = (x.repeat_interleave(n_heads // k.shape[1], dim=1) for x in (k, v))
        h = SCALE * h + attention(q, k, v, d_k**-0.5, doc_ids) @ w[f"layers.{i}.wo"]
        h = norm(h, w[f"layers.{i}.norm_attn"])
        hidden = h @ w[f"layers.{i}.w_u"].T * silu(h @ w[f"layers.{i}.w_v"].T)
        h = norm(SCALE * h + hidden @ w[f"layers.{i}.w_down"], w[f"layers.{i}.norm_mlp"])
    return h @ w["output"].T


def n_params(model: Any) -> int:
    d = model.d_model
    return 2 * model.vocab_size * d + model.n_layers * (4 * d * d + 3 * d * model.d_mlp + 2 * d)


def of_debug() -> dict[str, tuple[int, ...]]:
    """The weights of scale=debug with a vocabulary of bytes."""
    model = load_config(["model=gpt", "scale=debug"]).model
    heads, width = model.n_heads, model.d_model
    return shapes(width, model.n_layers, heads, 257, n_kv_heads=heads, d_mlp=model.d_mlp or 4 * width)


def of_page() -> Architecture:
    options = {"residual_scale": SCALE}
    return Architecture(architectures()["postln"], shapes, gpt.random_weights, forward, n_params, options)


def contract() -> list[Any]:
    """Every check of the contract that is made of each architecture, with the rest of its parameters."""
    cases = []
    for test in vars(test_contract).values():
        axes = {mark.args[0]: mark.args[1] for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"}
        if axes.pop("name", None) is not ARCHITECTURES:
            continue
        marks = [mark for mark in test.pytestmark if mark.name not in ("parametrize", "sampled")]
        for values in itertools.product(*axes.values()):
            given: dict[str, Any] = {}
            for names, value in zip(axes, values, strict=True):
                several = isinstance(names, tuple) or "," in names
                given |= dict(zip(names, value, strict=True)) if several else {names: value}
            cases.append(pytest.param(test, given, marks=marks, id=f"{test.__name__} {len(cases)}"))
    return cases


@pytest.mark.parametrize(("check", "given"), contract())
def test_keeps_the_contract(
    check: Callable[..., None], given: dict[str, Any], in_use: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ARCHITECTURES, "postln", of_page())
    check(name="postln", **given)


def test_the_contract_has_been_found() -> None:
    names = {case.values[0].__name__ for case in contract()}
    assert {"test_initial_loss", "test_one_batch_can_be_overfitted", "test_flops_are_what_is_counted"} <= names
    assert len(names) > 10


@pytest.mark.parametrize("case", ["usual", "grouped queries"])
def test_logits_loss_and_gradients(case: str, in_use: None) -> None:
    test_models.check(of_page(), case, torch.float64, packed=True)


def test_trains_and_resumes_exactly(postln: Path, trained: Path, corpus: Path, tmp_path: Path) -> None:
    """And its hook records each step. Caught: a resume that forgets what `auto` was; a hook that is not called."""
    for stop in ("train.stop_at=5", "train.stop_at=null"):
        assert main(["train", *of_run(postln, tmp_path, corpus, stop)]) == 0
    uninterrupted = trained / "runs" / "test"
    assert numbers(tmp_path / "runs" / "test") == numbers(uninterrupted)
    losses = [record["loss"] for record in records(uninterrupted).values()]
    assert losses[-1] < 0.95 * losses[0]
    gains = [records(path, "gains") for path in (uninterrupted, tmp_path / "runs/test")]
    assert {name: x["largest"] for name, x in gains[0].items()} == {name: x["largest"] for name, x in gains[1].items()}
    assert len(gains[0]) == 12
    assert all(x["largest"] > 0 for x in gains[0].values())
    assert "gains: see metrics.jsonl" in (uninterrupted / "logs/rank_0.log").read_text()
    stored = (uninterrupted / "config.yaml").read_text()
    assert "  residual_scale: 1.414" in stored  # 2 layers: 4^(1/4)


def test_worker_processes_ranks_and_multirun_know_it(
    postln: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streamed by a worker process, on two ranks; and a sweep's job. Caught: a plug-in that only its process knows."""
    short = ["train.steps=2", "optim.lr=1e-3", "schedule.warmup_steps=1"]
    streamed = ["data.streaming=true", "data.streams=2", "data.workers=1", "run.name=streamed"]
    for ranks, options in ((1, streamed), (2, ["parallel=ddp", "run.name=ranks"])):
        done = run("train", of_run(postln, tmp_path, corpus, *short, *options), ranks)
        assert done.returncode == 0, done.stderr
    assert [sorted(records(tmp_path / "runs" / name)) for name in ("streamed", "ranks")] == [[1, 2], [1, 2]]

    def job(command: list[str]) -> tuple[int, bool]:
        return main(command[command.index("ngpt_train") + 1 :]), False

    monkeypatch.setattr("ngpt_train.__main__._run_job", job)
    out = f"plan.out={tmp_path / 'plan.json'}"
    assert main(["plan", "-m", "model=postln", "scale=debug", "tokenizer=bytes", out, "--plugin", str(postln)]) == 0
    assert json.loads((tmp_path / "plan.json").read_text())["model"] == "postln"


def test_generates_evaluates_and_is_planned(
    postln: Path, trained: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, given = trained / "runs" / "test", of_run(postln, trained, corpus)
    prompt = ["generate.prompt=the model", "generate.max_new_tokens=5"]
    assert main(["generate", *given, f"generate.checkpoint={checkpoint}", *prompt]) == 0
    assert capsys.readouterr().out.startswith("the model")
    out = tmp_path / "out.json"
    assert main(["evaluate", *given, f"evaluate.checkpoint={checkpoint}", f"evaluate.out={out}"]) == 0
    assert 0 < json.loads(out.read_text())["loss"] < math.log(257)
    assert main(["plan", *given, f"plan.out={out}"]) == 0
    model = load_config(["model=gpt", "scale=debug", "model.vocab_size=257"]).model
    total = json.loads(out.read_text())["parameters"]["total"]
    assert total == n_params(model) == sum(math.prod(shape) for shape in of_debug().values())


def test_its_weights_are_exported_and_taken_on(
    postln: Path, trained: Path, corpus: Path, in_use: None, tmp_path: Path
) -> None:
    """Under the names of docs/weights.md; and a run begins with them."""
    checkpoint = str(trained / "runs" / "test")
    world = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
    config = load_config(["model=postln", "scale=debug", f"generate.checkpoint={checkpoint}"])
    weights = export_weights(restore(find_trained("generate", config, []), config, world).model)
    assert {name: tuple(x.shape) for name, x in weights.items()} == of_debug()
    given = of_run(postln, tmp_path, corpus, f"run.init_from={checkpoint}", "train.stop_at=1")
    assert main(["train", *given]) == 0
    first = records(trained / "runs" / "test")[1]["loss"]
    assert records(tmp_path / "runs" / "test")[1]["loss"] < 0.95 * first


def test_help_and_mistakes_are_like_everyones(postln: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def says(*given: str) -> str:
        assert main(["train", *given, "--plugin", str(postln), "--cfg", "job"]) == 2
        return capsys.readouterr().err

    assert main(["train", "--help", "--plugin", str(postln)]) == 0
    text = capsys.readouterr().out
    assert "model=postln: GPT with its norms after the sums (post-LN)." in text
    assert "  model.residual_scale=auto    (a number > 0 and <= 100 or auto)" in text
    assert re.search(r"  model +angpt [^A-Z]*normformer [^A-Z]*postln\s+powernorm", text)
    assert main(["train", "--help"]) == 0
    assert "postln" not in capsys.readouterr().out
    assert "model.residual_scale=big: must be a number > 0" in says("model=postln", "model.residual_scale=big")
    assert "did you mean model.residual_scale" in says("model=postln", "model.residual_scal=2")
    assert "It belongs to model=postln" in says("model=gpt", "model.residual_scale=2")
    assert "schedule.warmup_steps=0, model.name=postln: post-LN diverges" in says("model=postln", "train.steps=5")
    assert "did you mean postln?" in says("model=postnl")
    refused = "model.residual_dropout=0.1, model.name=postln: the blocks of this architecture drop nothing"
    assert refused in says("model=postln", "model.residual_dropout=0.1")


def test_what_needs_it_says_so(postln: Path, trained: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Caught: a stored config of an architecture that is not there, read as the config of no run."""
    checkpoint = trained / "runs" / "test"
    missing = "--plugin .../postln"
    without = of_run(postln, trained, corpus)[:-2]
    assert main(["train", *without]) == 2
    assert missing in capsys.readouterr().err
    others = ["model=gpt" if word == "model=postln" else word for word in without]
    for command in (
        ["train", *others],
        ["generate", f"generate.checkpoint={checkpoint}"],
        ["evaluate", *others, f"evaluate.checkpoint={checkpoint}"],
    ):
        assert main(command) == 3
        assert missing in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("model.py",), "holds no model.py\n"),
        (("configs/model/postln.yaml", "keys.py"), "holds no keys.py and no configs/model/postln.yaml\n"),
        (("from dataclasses", "import nosuch\nfrom dataclasses"), "keys.py cannot be used: ModuleNotFoundError"),
        (('key("postln"', 'key("other"'), "its name is other"),
        (("@dataclass\n", ""), "One @dataclass of ModelConfig"),
        (('key(1e-6, "Added to the mean square in RMSNorm.", above=0)', "1e-6"), "every key made by key("),
        (('"Added to the mean square in RMSNorm."', '""'), "a key without a sentence"),
        (("above=0)", "above=1)"), "the default of model.norm_eps, 1e-06: must be a number > 1"),
    ],
)
def test_a_folder_of_another_form(
    change: tuple[str, ...], says: str, postln: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`change`: files that are missing, or a text of keys.py and what stands there instead."""
    folder = Path(shutil.copytree(postln, tmp_path / "postln"))
    text = (folder / "keys.py").read_text()
    if change[0] in text:
        (folder / "keys.py").write_text(text.replace(*change))
    else:
        for name in change:
            (folder / name).unlink()
    assert main(["train", "--plugin", str(folder), "--cfg", "job"]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"error: --plugin={folder}: ")
    assert says in message
    assert main(["train", "--cfg", "job"]) == 0  # and is forgotten


def test_a_model_file_without_its_model(postln: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Caught: an AttributeError from deep inside."""
    folder = Path(shutil.copytree(postln, tmp_path / "postln"))
    model = folder / "model.py"
    model.write_text(re.sub(r"\bModel\b", "Postln", model.read_text()))
    assert main(["plan", "--plugin", str(folder), "model=postln", "scale=debug", "tokenizer=bytes"]) == 2
    assert f"model.name=postln: {model} has no class Model" in capsys.readouterr().err


def test_hooks_without_their_function(
    postln: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of another model's run. Caught: an AttributeError from deep inside, a hook that is left out silently."""
    folder = Path(shutil.copytree(postln, tmp_path / "postln"))
    (folder / "hooks.py").write_text("")
    given = [word.replace("model=postln", "model=gpt") for word in of_run(folder, tmp_path, corpus)]
    assert main(["train", *given]) == 2
    assert f"{folder}/hooks.py has no function hooks(config)" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["gpt", "layers", "decoder", "post-ln"])
def test_a_name_that_cannot_be(name: str, postln: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--plugin", str(tmp_path / "nosuch")]) == 2
    assert f"--plugin={tmp_path / 'nosuch'}: no such directory" in capsys.readouterr().err
    folder = Path(shutil.copytree(postln, tmp_path / name))
    for group in ("model", "recipe"):
        (folder / "configs" / group / "postln.yaml").rename(folder / "configs" / group / f"{name}.yaml")
    assert main(["train", "--plugin", str(folder), "--cfg", "job"]) == 2
    assert f"--plugin={folder}: the name is " in capsys.readouterr().err
    assert main(["train", "--plugin"]) == 2
    assert "--plugin DIR" in capsys.readouterr().err
