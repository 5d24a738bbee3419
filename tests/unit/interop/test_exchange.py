"""Whole directories: a checkpoint, its export, the import of it, and refused sources."""

import errno
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ngpt_train.config import load_config
from ngpt_train.config.places import check_free
from ngpt_train.config.schema import TokenizerConfig
from ngpt_train.config.sections.verbs import ExportConfig
from ngpt_train.core.errors import ConfigError, DataError
from ngpt_train.data.tokenizers.tokenizer import BytesTokenizer
from ngpt_train.distributed.world import World
from ngpt_train.evaluation.restore import Restored, named, restore
from ngpt_train.interop import exporting, verification
from ngpt_train.interop.exporting import export, plain
from ngpt_train.interop.importing import Imported, read_model, write_run
from ngpt_train.interop.layouts import chosen_layout
from ngpt_train.interop.layouts.llama import LlamaLayout
from ngpt_train.interop.tokenizer_files import write_tokenizers
from ngpt_train.models import build_model, export_weights
from ngpt_train.training.guards import NumericalError
from tests.properties.architectures import error
from tests.reference import nvidia
from tests.stored import stored_tensors
from tests.unit.interop.test_nvidia import arguments, save

CPU = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))


def run_of(out: Path, *overrides: str) -> tuple[Path, dict[str, Tensor]]:
    """A run directory with random weights, and these weights."""
    config = load_config(["scale=debug", "tokenizer=bytes", "model.vocab_size=259", *overrides])
    model = build_model(config.model, seed=3)
    generator = torch.Generator().manual_seed(1)
    tensors = export_weights(model)
    for value in tensors.values():
        if value.ndim == 1:  # gains and scales away from their initial values
            value += 0.1 * torch.rand(value.shape, generator=generator)
    tensors |= {f"statistics.{name}": value.clone() + 0.5 for name, value in model.statistics().items()}
    write_run(Imported(config, tensors, BytesTokenizer(), "llama", None, []), "here", out)
    return out, tensors


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose model transformers does not have, with two eval records, the second of a step that is not saved."""
    run, _ = run_of(tmp_path_factory.mktemp("plain") / "run", "model=gpt", "model.mlp=plain")
    first, later = ({"kind": "eval", "step": step, "loss": 5.5 - step, "ppl": 244.7} for step in (0, 9))
    (run / "metrics.jsonl").write_text(f"{json.dumps(first)}\n{json.dumps(later)}\n")
    return run


@pytest.fixture(scope="module")
def plain_export(plain_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(plain_run, tmp_path_factory.mktemp("exported") / "out")


@pytest.fixture(scope="module")
def gpt_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A run that transformers can read, if it is installed, and its weights."""
    pytest.importorskip("transformers", reason="the extra [hf] is not installed")
    return run_of(tmp_path_factory.mktemp("gpt") / "run", "model=gpt")


def restored_from(run: Path) -> Restored:
    trained = named("export", "checkpoint", str(run), ExportConfig())
    restored = restore(trained, load_config(["train.device=cpu", "train.precision=fp32"]), CPU)
    restored.model.eval()
    return restored


def exported(run: Path, out: Path, say: Callable[[str], object] = lambda _: None, **options: Any) -> Path:
    own = ExportConfig(checkpoint=str(run), out=str(out), rows=2, **options)
    restored = restored_from(run)
    return export(restored, own, chosen_layout(own.layout, restored.config.model), say)


def brought_back(source: Path, out: Path) -> dict[str, Tensor]:
    """Imports a model; the tensors of its checkpoint."""
    write_run(read_model(str(source), None), str(source), out)
    stored = stored_tensors(out / "checkpoints" / "step_00000000")
    statistics = {f"statistics.{name}": value[0] for name, value in stored.get("statistics", {}).items()}
    return stored["model"] | statistics


def equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    ("overrides", "layout"),
    [
        ("model=gpt rope_layout=interleaved n_kv_heads=1 tied_embeddings=true residual_dropout=0.1", "llama"),
        ("model=ngpt n_kv_heads=1 lr_rule=nugpt reference.d_model=32 reference.steps=9", "ngpt"),
        ("model=ngpt constraint=parametrization", "safetensors"),
        ("model=powernorm", "safetensors"),
        ("model=gpt_encoder_decoder", "safetensors"),
    ],
)
def test_round_trip(overrides: str, layout: str, tmp_path: Path) -> None:
    """Caught: a bit, a running statistic or a key of the model that is lost between a checkpoint, its export and the
    run that an import makes of it."""
    if layout != "safetensors":
        pytest.importorskip("transformers", reason="the extra [hf] is not installed")
    name, *keys = overrides.split()
    run, tensors = run_of(tmp_path / "run", name, *(f"model.{key}" for key in keys))
    said: list[str] = []
    out = exported(run, tmp_path / "out", said.append, layout="auto" if layout != "safetensors" else layout)
    assert said[0].startswith(f"{layout}, fp32: ")
    assert equal(brought_back(out, tmp_path / "back"), tensors)
    before, after = restored_from(run), restored_from(tmp_path / "back")
    assert vars(before.config.model) == vars(after.config.model)
    rows = torch.randint(257, (1, before.config.model.context))
    with torch.no_grad():
        assert torch.equal(before.model(rows), after.model(rows))
    proof = {
        "llama": "same order of operations: largest difference of logits 0.0",
        "ngpt": "NGPTForCausalLM and ngpt-train, whose order is another: largest",
        "safetensors": f"read_weights.py reads the same {len(tensors)} tensors, bit for bit",
    }
    for sentence in (f"all {len(tensors)} weights equal, bit for bit", proof[layout]):
        assert sentence in "\n".join(said)
    assert not list(tmp_path.glob(".unfinished-*"))


def test_shards_in_bf16(gpt_run: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    """Caught: shards without an index or above export.max_shard_gb, an index with wrong sizes, weights that are not
    rounded, and the rounding taken for a mistake of the export. pad_token_id in config.json: transformers would give
    the embedding of this id no gradient."""
    run, tensors = gpt_run
    said: list[str] = []
    out = exported(run, tmp_path / "out", said.append, dtype="bf16", max_shard_gb=1e-4)
    shards = sorted(out.glob("model-*.safetensors"))
    assert len(shards) > 2
    assert max(path.stat().st_size for path in shards) < 1e5 + 5000  # and a header
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2 * sum(value.numel() for value in tensors.values())
    assert equal(brought_back(out, tmp_path / "back"), {name: x.bfloat16().float() for name, x in tensors.items()})
    config = json.loads((out / "config.json").read_text())
    assert (config["dtype"], config["eos_token_id"], "pad_token_id" in config) == ("bfloat16", 256, False)
    assert "moves a logit by" in "\n".join(said)
    assert "in bfloat16 arithmetic" in "\n".join(said)


def test_fp16_is_too_small() -> None:
    """Caught: an infinity in the place of a large weight."""
    with pytest.raises(DataError, match=r"export.dtype=fp16: a has 1e\+06.* Use fp32 or bf16"):
        exporting.rounded({"a": torch.tensor([1.0, 1e6])}, "fp16")


def test_card(plain_export: Path) -> None:
    """Caught: a card without the facts of the run, or with numbers of a later step."""
    card = (plain_export / "README.md").read_text()
    assert "loss 5.5, ppl 244.7 at step 0" in card
    for part in ("read_weights", "safetensors, fp32", "git commit of the run", "data_hash", "bit for bit"):
        assert part in card
    assert str(plain_export.parent) not in card


def test_a_name_is_no_markdown() -> None:
    """Caught: a run's name that makes links, tags or cells in the card of an export."""
    for name in ("a|b", "![x](http://y)", "<script>x</script>", "two\n# lines", "`code`"):
        assert not re.search(r"(?<!\\)[\[<|`]|\n", plain(name))
    assert plain("ngpt-debug_seed0 v1.2+cpu, 5 % (a)") == "ngpt-debug_seed0 v1.2+cpu, 5 % (a)"


def test_nothing_is_overwritten(plain_run: Path, plain_export: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Caught: an export, or an import, into a directory where there is something already; a traceback for the directory
    that the user stands in."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine").write_text("mine")
    for out in ("file", "link", "full", ".", "nowhere/.."):
        with pytest.raises(ConfigError, match=r"^import.out=.*\n  Name a new directory"):
            check_free("import.out", Path(out))
    with pytest.raises(ConfigError, match=r"export\.out"):
        exported(plain_run, tmp_path / "full")
    with pytest.raises(ConfigError, match=r"import\.out"):
        brought_back(plain_export, tmp_path / "full")
    assert sorted(x.name for x in tmp_path.rglob("*")) == ["file", "full", "link", "mine"]


@pytest.mark.parametrize("what", ["weights", "another file"])
def test_a_full_disk(what: str, plain_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: a traceback where there is no room; half an export that is left."""
    import safetensors.torch

    def no_room(*_: Any, **__: Any) -> None:
        if what == "weights":
            raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")
        raise OSError(errno.ENOSPC, "No space left on device")

    module, function = (safetensors.torch, "save_file") if what == "weights" else (exporting, "write_tokenizers")
    monkeypatch.setattr(module, function, no_room)
    with pytest.raises(DataError, match=r"cannot be written.*No space left on device"):
        exported(plain_run, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_wrong_export_is_no_export(
    gpt_run: tuple[Path, dict[str, Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Caught: a directory that is left although its model is another one; `from_foreign` undoes the mistake of
    `to_foreign` here, so that the logits alone show it."""
    there, back = LlamaLayout.to_foreign, LlamaLayout.from_foreign

    def swapped(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        a, b = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up"))
        return {**tensors, a: tensors[b], b: tensors[a]}

    monkeypatch.setattr(LlamaLayout, "to_foreign", lambda self, *args: swapped(there(self, *args)))
    monkeypatch.setattr(LlamaLayout, "from_foreign", lambda self, config, w: back(self, config, swapped(w)))
    with pytest.raises(NumericalError, match=r"rounding explains 0\.001 of the largest"):
        exported(gpt_run[0], tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_bits_are_compared(plain_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: a tensor that is not the weight, in an export that no reader of logits checks."""
    write = exporting.write_tensors

    def with_one_bit_more(directory: Path, tensors: dict[str, Tensor], most: float) -> list[str]:
        tensors["norm_final"] = tensors["norm_final"].nextafter(torch.tensor(9.0))
        return write(directory, tensors, most)

    monkeypatch.setattr(exporting, "write_tensors", with_one_bit_more)
    with pytest.raises(NumericalError, match="norm_final"):
        exported(plain_run, tmp_path / "out")


@pytest.mark.parametrize("how", ["not installed", "too old"])
def test_without_transformers(
    how: str, gpt_run: tuple[Path, dict[str, Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Caught: an export that fails, or is silent, where transformers is not installed, too old or broken."""

    def too_old(*_: Any) -> None:
        raise ImportError("cannot import name 'PreTrainedConfig' from 'transformers'")

    monkeypatch.setattr(verification, "find_spec", lambda _: None if how == "not installed" else True)
    monkeypatch.setattr(verification, "loaded", too_old)
    said: list[str] = []
    out = exported(gpt_run[0], tmp_path / "out", said.append)
    why = {"not installed": "pip install 'ngpt-train[hf]'", "too old": "ImportError: cannot import name"}[how]
    assert any("not compared: transformers" in sentence and why in sentence for sentence in said)
    assert (out / "model.safetensors").exists()


@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen3"])
def test_saved_by_transformers(kind: str, tmp_path: Path) -> None:
    """Caught: files of save_pretrained, in shards of bf16 and without anything of ours, whose model gives other logits
    here, or whose run does not say from where it comes."""
    transformers = pytest.importorskip("transformers", reason="the extra [hf] is not installed")
    torch.manual_seed(0)
    sizes = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "head_dim": 16}
    sizes |= {"sliding_window": None} if kind == "Mistral" else {}
    config = getattr(transformers, f"{kind}Config")(**sizes, rms_norm_eps=1e-5, initializer_range=0.1)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.bfloat16)
    saved = tmp_path / "saved"
    model.save_pretrained(saved, max_shard_size="50KB")
    write_tokenizers(saved, BytesTokenizer(), 32, True)
    shutil.rmtree(saved / "ngpt_train_tokenizer")
    assert len(list(saved.glob("*.safetensors"))) > 1
    brought_back(saved, tmp_path / "back")
    restored = restored_from(tmp_path / "back")
    assert restored.config.model.qk_norm == (kind == "Qwen3")  # type: ignore[attr-defined]
    assert (restored.config.scale.name, restored.config.tokenizer.kind) == ("imported", "hf")
    start = json.loads((tmp_path / "back/run.json").read_text())["starts"][0]
    layout = "qwen3" if kind == "Qwen3" else "llama"
    assert start["imported"] == {"source": str(saved), "revision": None, "form": f"layout {layout}"}
    rows = torch.randint(300, (2, 32))
    # Read again: `to` has rounded the frequencies of RoPE, too.
    model = transformers.AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    with torch.no_grad():
        found = restored.model(rows)
        torch.testing.assert_close(found, model(rows).logits, rtol=0, atol=1e-4)
    assert found.abs().max() > 1


def index_of(weight_map: Any) -> Callable[[Path], object]:
    return lambda out: (out / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def config_of(text: str) -> Callable[[Path], object]:
    return lambda out: (out / "config.json").write_text(text)


def norm_of(change: Callable[[Tensor], Tensor]) -> Callable[[Path], object]:
    def write(out: Path) -> None:
        from safetensors.torch import load_file, save_file

        tensors = load_file(out / "model.safetensors")
        save_file({**tensors, "norm_final": change(tensors["norm_final"])}, out / "model.safetensors")

    return write


def with_note(**changes: Any) -> Callable[[Path], object]:
    def write(out: Path) -> None:
        content = json.loads((out / "config.json").read_text())
        content["ngpt_train"]["model"] |= changes
        (out / "config.json").write_text(json.dumps(content))

    return write


def cut(out: Path) -> None:
    (out / "model.safetensors").write_bytes((out / "model.safetensors").read_bytes()[:-1000])


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (cut, "model.safetensors cannot be read: "),
    "no tensors": (lambda out: (out / "model.safetensors").unlink(), "there is no model.safetensors"),
    "pickle": (
        lambda out: (out / "model.safetensors").rename(out / "pytorch_model.bin"),
        "pytorch_model.bin and no model.safetensors. Reading such a file may execute code",
    ),
    "no shard": (index_of({"embedding": "model-00001-of-00002.safetensors"}), "model-00001-of-00002.* is missing"),
    "shard elsewhere": (index_of({"embedding": "../model.safetensors"}), "which is no file beside it"),
    "index of others": (index_of({"embedding": "model.safetensors"}), "only one of them has"),
    "index without names": (index_of([]), "weight_map does not name"),
    "int8": (norm_of(Tensor.char), "norm_final has the dtype int8; weights are in fp32, bf16, fp16. A quantised model"),
    "not finite": (norm_of(lambda x: x * torch.nan), "norm_final has values that are not finite"),
    "config cut": (config_of('{"model_type": '), "config.json is missing or damaged"),
    "config a list": (config_of("[]"), "it is no object"),
    "no config": (lambda out: (out / "config.json").unlink(), "has no config.json, so it is no model"),
    "unknown": (config_of('{"model_type": "bert"}'), "model_type=bert is not"),
    "unknown key": (with_note(d_modell=64), "d_modell"),
    "another width": (with_note(d_model=128), r"embedding has shape \(259, 64\), and should have \(259, 128\)"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_damaged_sources(broken: str, plain_export: Path, tmp_path: Path) -> None:
    """Caught: a traceback, or half a run, for a source that is damaged or no model."""
    damage, message = BROKEN[broken]
    source = tmp_path / "source"
    shutil.copytree(plain_export, source)
    damage(source)
    with pytest.raises(DataError, match=message):
        brought_back(source, tmp_path / "back")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_names_of_sources(plain_export: Path, tmp_path: Path) -> None:
    """Caught: a file or a mistyped path asked of the hub; a revision that has no effect."""
    with pytest.raises(DataError, match="no directory, no file, and no model of the hub, which is OWNER/NAME"):
        read_model(str(tmp_path / "nothing"), None)
    for file in ("config.json", "model.safetensors"):
        with pytest.raises(DataError, match=rf"{file}: one file of a model. Name its directory"):
            read_model(str(plain_export / file), None)
    with pytest.raises(ConfigError, match=r"import.revision=main: .* is on this machine"):
        read_model(str(plain_export), "main")
    with pytest.raises(DataError, match="is a model of transformers; `import` turns it into a run"):
        restored_from(plain_export)


def test_a_checkpoint_of_nvidia(plain_export: Path, tmp_path: Path) -> None:
    """Caught: no tokenizer, or a second one beside the directory's own; no note about RoPE; other logits of the run."""
    told = arguments(vocab_size=300)
    state = nvidia.random_state(told, seed=0)
    path = save(tmp_path / "ckpt.pt", state, told)
    with pytest.raises(ConfigError, match=r"holds no tokenizer\n  Name the tokenizer .* tokenizer=gpt2"):
        read_model(str(path), None)
    imported = read_model(str(path), None, TokenizerConfig(kind="bytes"))
    assert any("a rotary embedding that does not rotate" in note for note in imported.notes)
    write_run(imported, str(path), tmp_path / "run")
    row = torch.randint(300, (1, 30))
    with torch.no_grad():
        found = restored_from(tmp_path / "run").model(row)
    assert error(found, nvidia.forward(state, told, row, "true")) < 1e-5
    with pytest.raises(ConfigError, match="has its own tokenizer"):
        read_model(str(plain_export), None, TokenizerConfig(kind="bytes"))


def test_hub(plain_export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: superfluous files are fetched from the hub; an error of the hub as a traceback."""
    import huggingface_hub

    asked: dict[str, Any] = {}

    def fetched(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        if options["revision"] == "gone":
            raise huggingface_hub.errors.HfHubHTTPError("404 Client Error\nmore", response=None)  # type: ignore[arg-type]
        return str(plain_export)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetched)
    imported = read_model("owner/model", "v1")
    assert (asked["name"], asked["revision"], imported.revision) == ("owner/model", "v1", plain_export.name)
    names = ["model.safetensors", "config.json", "tokenizer.model", "pytorch_model.bin", "modeling.py"]
    names += ["a/b.safetensors"]
    taken = huggingface_hub.utils.filter_repo_objects(
        names, allow_patterns=asked["allow_patterns"], ignore_patterns=asked["ignore_patterns"]
    )
    assert list(taken) == names[:3]
    with pytest.raises(DataError, match="owner/model at gone cannot be fetched from the hub"):
        read_model("owner/model", "gone")
