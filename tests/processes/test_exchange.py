"""`export` and `import` as a user starts them, and transformers in a process of its own, without a network."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import runs

PROMPT = "the model reads"
# What the model cards say, with greedy decoding, where this package and a network are not.
READER = f"""
import sys
sys.modules["ngpt_train"] = None
from transformers import AutoModelForCausalLM, AutoTokenizer
found = []
for path in sys.argv[1:]:
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)
    ids = tokenizer({PROMPT!r}, return_tensors="pt")
    found.append(model.generate(**ids, max_new_tokens=24, do_sample=False)[0, ids.input_ids.shape[1]:].tolist())
print(found)
"""
TEXT_PIECES = ("tokenizer=sentencepiece", "tokenizer.vocab_size=300", "train.steps=30")


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of GPT whose pairs of RoPE and heads are not Llama's usual ones."""
    directory = tmp_path_factory.mktemp("exchange")
    options = ["model=gpt", "model.rope_layout=interleaved", "model.n_kv_heads=1", "optim.lr=0.01"]
    runs.train(runs.arguments(directory, corpus, *options, *TEXT_PIECES))
    return directory / "runs" / "test"


def loss_of(run: Path) -> str:
    finished = runs.run("evaluate", [f"evaluate.checkpoint={run}", "train.device=cpu"], code=0)
    return finished.stdout.partition("rows): ")[2]


@pytest.mark.slow
def test_there_and_back(trained: Path, corpus: Path, tmp_path: Path) -> None:
    """Caught: an export that generates other tokens in transformers than the checkpoint does here, its tokenizer
    included, and an import whose loss is not the same; a modeling file that needs this package or a network, and one
    whose cache gives other tokens."""
    pytest.importorskip("transformers", reason="the extra [hf] is not installed")
    runs.train(runs.arguments(tmp_path, corpus, "model=ngpt", "optim.lr=0.02", *TEXT_PIECES))
    of = [trained, tmp_path / "runs/test"]
    outs, texts = [tmp_path / "exported", tmp_path / "exported_ngpt"], tmp_path / "texts.jsonl"
    for run, out in zip(of, outs, strict=True):
        runs.run("export", [f"export.checkpoint={run}", f"export.out={out}", "export.rows=2"], code=0)
    out = outs[0]
    metrics = runs.records(trained, "eval")[30]
    card = (out / "README.md").read_text()
    assert f"loss {metrics['loss']:.6g}" in card
    assert json.loads((trained / "checkpoints/step_00000030/state.json").read_text())["data"]["data_hash"] in card

    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-c", READER, *map(str, outs)]
    read = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert read.returncode == 0, read.stderr
    for run, by_transformers in zip(of, json.loads(read.stdout.splitlines()[-1]), strict=True):
        greedy = [f"generate.prompt={PROMPT}", "generate.temperature=0", "generate.max_new_tokens=24"]
        runs.run("generate", [f"generate.checkpoint={run}", *greedy, f"generate.out={texts}"], code=0)
        ours = json.loads(texts.read_text())["tokens"]
        texts.unlink()
        assert len(ours) > 5
        assert by_transformers[: len(ours)] == ours

    back = tmp_path / "back"
    runs.run("import", [f"import.source={out}", f"import.out={back}"], code=0)
    assert loss_of(back) == loss_of(trained)
    options = ["model=gpt", "model.rope_layout=interleaved", "model.n_kv_heads=1", "tokenizer=sentencepiece"]
    path = back / "checkpoints/step_00000000/tokenizer.model"
    begun = [*options, f"run.init_from={back}", f"tokenizer.path={path}", "run.name=begun", "train.steps=1"]
    runs.train(runs.arguments(tmp_path, trained.parents[1] / "none", *begun, *data_of(trained)))
    first = runs.records(tmp_path / "runs/begun", "eval")[0]["loss"]
    assert first == pytest.approx(metrics["loss"], abs=1e-6)
    goes_on = [*options, f"run.root={tmp_path}", "run.name=back", f"tokenizer.path={path}", "train.steps=1"]
    given = runs.arguments(tmp_path, trained.parents[1] / "none", *goes_on, *data_of(trained))
    resumed = runs.run("train", given, code=3)
    assert "back is an imported model" in resumed.stderr


def data_of(run: Path) -> list[str]:
    """The text and the validation rows of a run."""
    text = (run / "config.yaml").read_text()
    found = re.search(r"^data:\n(?:  .*\n)*?  path: (.*)$", text, re.MULTILINE)
    assert found
    return [f"data.path={found[1]}"]


def test_any_model_with_numpy(corpus: Path, tmp_path: Path) -> None:
    """Caught: a reader that needs more than numpy, or that a user's shell cannot start."""
    runs.train(runs.arguments(tmp_path, corpus, "model=ngpt", "train.steps=2", "checkpoint.every=2"))
    out = tmp_path / "exported"
    options = [f"export.checkpoint={tmp_path / 'runs/test'}", f"export.out={out}", "export.layout=safetensors"]
    runs.run("export", [*options, "export.dtype=bf16"], code=0)
    program = (
        "import sys, runpy; runpy.run_path(sys.argv.pop(1), run_name='__main__'); assert 'torch' not in sys.modules"
    )
    read = subprocess.run(
        [sys.executable, "-c", program, str(out / "read_weights.py")], capture_output=True, text=True, check=False
    )
    assert read.returncode == 0, read.stderr
    assert re.search(r"layers\.0\.wq +float32 +\(64, 64\)", read.stdout)
    assert len((out / "read_weights.py").read_text().splitlines()) <= 60


@pytest.mark.parametrize(
    ("verb", "given", "code", "message"),
    [
        ("export", ["export.out=x"], 2, "export.checkpoint=null: no checkpoint is named"),
        ("export", ["export.checkpoint=x"], 2, "export.out=null: no directory is named"),
        ("export", ["export.checkpoint=x", "export.out=x", "export.layout=gguf"], 2, "export.layout=gguf"),
        ("export", ["export.checkpoint=nowhere", "export.out=x"], 3, "export.checkpoint=nowhere: does not exist"),
        ("import", ["import.out=x"], 2, "import.source=null: no model is named"),
        ("import", ["import.source=x"], 2, "import.out=null: no directory is named"),
        ("import", ["import.source=./nowhere", "import.out=nowhere_too"], 3, "import.source=./nowhere: no directory"),
    ],
)
def test_refusals(verb: str, given: list[str], code: int, message: str) -> None:
    """Caught: a traceback, or a wrong exit code, for what `export` and `import` cannot do."""
    assert message in runs.run(verb, given, code=code).stderr


def test_a_layout_that_does_not_fit(trained: Path, tmp_path: Path) -> None:
    """Caught: weights that are read before the layout is refused, and a directory that is left."""
    out = tmp_path / "out"
    given = [f"export.checkpoint={trained}", f"export.out={out}", "export.layout=qwen3"]
    finished = runs.run("export", given, code=2)
    assert "export.layout=qwen3: model.qk_norm=false" in finished.stderr
    assert "Set export.layout=llama" in finished.stderr
    assert not out.exists()
