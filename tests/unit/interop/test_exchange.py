"""Whole directories: a checkpoint, its export, the import of it, and refused sources."""

import errno
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ngpt_train.config import load_config
from ngpt_train.config.places import check_free
from ngpt_train.config.sections.data import TokenizerConfig
from ngpt_train.config.sections.exchange import ExportConfig
from ngpt_train.core.errors import ConfigError, DataError
from ngpt_train.data import Tokenizer
from ngpt_train.data.tokenizers.tokenizer import BytesTokenizer
from ngpt_train.distributed.world import World
from ngpt_train.evaluation.restore import Restored, named, restore
from ngpt_train.interop import exporting, verification
from ngpt_train.interop.exporting import export, plain
from ngpt_train.interop.importing import Imported, read_model, write_run
from ngpt_train.interop.layouts import chosen_layout
from ngpt_train.interop.layouts.llama import LlamaLayout, to_half
from ngpt_train.interop.tokenizer_files import write_tokenizers
from ngpt_train.models import build_model, export_weights
from ngpt_train.training.guards import NumericalError
from tests.properties.architectures import error
from tests.reference import nvidia
from tests.stored import stored_tensors
from tests.unit.interop.test_nvidia import arguments, save

CPU = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))


def run_of(out: Path, *overrides: str) -> tuple[Path, dict[str, Tensor]]:
    """A run directory with random weights, and those weights."""
    config = load_config(["scale=debug", "tokenizer=bytes", "model.vocab_size=259", *overrides])
    model = build_model(config.model, seed=3)
    generator = torch.Generator().manual_seed(1)
    tensors = export_weights(model)
    for value in tensors.values():
        if value.ndim == 1:  # gains and scales away from their initial values
            value += 0.1 * torch.rand(value.shape, generator=generator)
    tensors |= {f"statistics.{name}": value.clone() + 0.5 for name, value in model.statistics().items()}
    tokenizer: Tokenizer = BytesTokenizer()
    write_run(Imported(config, tensors, tokenizer, "llama", None, []), "here", out)
    return out, tensors


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
    "overrides",
    [
        ["model=gpt", "model.rope_layout=interleaved", "model.n_kv_heads=1", "model.tied_embeddings=true"],
        ["model=gpt", "model.qk_norm=true", "model.residual_dropout=0.1"],
        ["model=gpt", "model.mlp=plain", "model.activation=relu2"],
        ["model=ngpt", "model.rope_layout=interleaved", "model.n_kv_heads=1", "model.tied_embeddings=true"],
        ["model=ngpt", "model.lr_rule=nugpt", "model.reference.d_model=32", "model.reference.steps=9"],
        ["model=ngpt", "model.constraint=parametrization", "export.layout=safetensors"],
        ["model=powernorm"],
        ["model=gpt_encoder_decoder"],
    ],
    ids=" ".join,
)
def test_round_trip(overrides: list[str], tmp_path: Path) -> None:
    """Caught: a bit, a running statistic or a key of the model that is lost between a checkpoint, its export and the
    run that an import makes of it."""
    plain = any(x in overrides for x in ("model.mlp=plain", "export.layout=safetensors"))
    of_transformers = overrides[0] in ("model=gpt", "model=ngpt") and not plain
    if of_transformers:
        pytest.importorskip("transformers", reason="the extra [hf] is not installed")
    run, tensors = run_of(tmp_path / "run", *(x for x in overrides if x.startswith("model")))
    said: list[str] = []
    out = exported(run, tmp_path / "out", said.append, layout="auto" if of_transformers else "safetensors")
    assert equal(brought_back(out, tmp_path / "back"), tensors)
    before, after = restored_from(run), restored_from(tmp_path / "back")
    assert vars(before.config.model) == vars(after.config.model)
    rows = torch.randint(257, (1, before.config.model.context))
    with torch.no_grad():
        assert torch.equal(before.model(rows), after.model(rows))
    assert f"all {len(tensors)} weights equal, bit for bit" in "\n".join(said)
    if overrides[0] == "model=ngpt" and of_transformers:
        assert any("NGPTForCausalLM and ngpt-train, whose order is another: largest" in sentence for sentence in said)
    elif of_transformers:
        assert any("same order of operations: largest difference of logits 0.0" in sentence for sentence in said)
    else:
        assert f"read_weights.py reads the same {len(tensors)} tensors, bit for bit" in said
    assert not list(tmp_path.glob(".unfinished-*"))


def test_shards_in_bf16(tmp_path: Path) -> None:
    """Caught: shards without an index or above export.max_shard_gb, an index with wrong sizes, weights that are not
    rounded, and the rounding taken for a mistake of the export."""
    pytest.importorskip("transformers", reason="the extra [hf] is not installed")
    run, tensors = run_of(tmp_path / "run", "model=gpt")
    said: list[str] = []
    out = exported(run, tmp_path / "out", said.append, dtype="bf16", max_shard_gb=1e-4)
    shards = sorted(out.glob("model-*.safetensors"))
    assert len(shards) > 2
    assert max(path.stat().st_size for path in shards) < 1e5 + 5000  # and a header
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2 * sum(value.numel() for value in tensors.values())
    assert equal(brought_back(out, tmp_path / "back"), {name: x.bfloat16().float() for name, x in tensors.items()})
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert any("moves a logit by" in sentence for sentence in said)
    assert any("in bfloat16 arithmetic" in sentence for sentence in said)


def test_fp16_is_too_small(tmp_path: Path) -> None:
    """Caught: an infinity in the place of a large weight."""
    with pytest.raises(DataError, match=r"export.dtype=fp16: a has 1e\+06, which fp16 cannot hold"):
        exporting.rounded({"a": torch.tensor([1.0, 1e6])}, "fp16")


def test_card_and_ids(tmp_path: Path) -> None:
    """Caught: a card without the facts of the run, and configs with ids of another tokenizer. pad_token_id is not in
    config.json: transformers would give the embedding of that id no gradient."""
    run, _ = run_of(tmp_path / "run", "model=gpt", "model.mlp=plain")
    (run / "metrics.jsonl").write_text(
        json.dumps({"kind": "eval", "step": 0, "loss": 5.5, "ppl": 244.7, "bits_per_byte": 7.9})
        + "\n"
        + json.dumps({"kind": "eval", "step": 9, "loss": 1.5, "ppl": 4.5, "bits_per_byte": 2.1})
        + "\n"
    )
    card = (exported(run, tmp_path / "out") / "README.md").read_text()
    assert "loss 5.5, ppl 244.7, bits_per_byte 7.9 at step 0" in card
    for part in ("read_weights", "safetensors, fp32", "git commit of the run", "data_hash", "bit for bit"):
        assert part in card
    assert str(tmp_path) not in card


@pytest.mark.parametrize("what", ["file", "link", "file inside"])
def test_nothing_is_overwritten(what: str, tmp_path: Path) -> None:
    """Caught: an export, or an import, into a directory where there is something already."""
    run, _ = run_of(tmp_path / "run", "model=gpt", "model.mlp=plain")
    out = tmp_path / "out"
    if what == "file":
        out.write_text("mine")
    elif what == "link":
        out.symlink_to(tmp_path / "elsewhere")
    else:
        out.mkdir()
        (out / "mine").write_text("mine")
    with pytest.raises(ConfigError, match=r"export.out=.*\n  Name a new directory"):
        exported(run, out)
    with pytest.raises(ConfigError, match=r"import.out=.*\n  Name a new directory"):
        check_free("import.out", out)


@pytest.mark.parametrize("out", [".", "nowhere/.."])
def test_a_path_without_a_name(out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: a traceback, and directories that are left, for the directory that the user stands in."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"export.out=.*: a path without a name at its end\n  Name a new directory"):
        check_free("export.out", Path(out))
    with pytest.raises(ConfigError, match=r"import.out=model"):
        check_free("import.out", Path(out))
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("what", ["weights", "another file"])
def test_a_full_disk(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: a traceback where there is no room; half an export that is left."""
    import safetensors.torch

    def no_room(*_: Any, **__: Any) -> None:
        if what == "weights":
            raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")
        raise OSError(errno.ENOSPC, "No space left on device")

    run, _ = run_of(tmp_path / "run", "model=gpt", "model.mlp=plain")
    if what == "weights":
        monkeypatch.setattr(safetensors.torch, "save_file", no_room)
    else:
        monkeypatch.setattr(exporting, "write_tokenizers", no_room)
    with pytest.raises(DataError, match=r"cannot be written.*No space left on device"):
        exported(run, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_wrong_export_is_no_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: a directory that is left although its model is another one; `from_foreign` undoes the mistake of
    `to_foreign` here, so that the logits alone show it."""
    pytest.importorskip("transformers", reason="the extra [hf] is not installed")
    run, _ = run_of(tmp_path / "run", "model=gpt")
    there, back = LlamaLayout.to_foreign, LlamaLayout.from_foreign

    def swapped(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        a, b = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up"))
        return {**tensors, a: tensors[b], b: tensors[a]}

    monkeypatch.setattr(LlamaLayout, "to_foreign", lambda self, *args: swapped(there(self, *args)))
    monkeypatch.setattr(LlamaLayout, "from_foreign", lambda self, config, w: back(self, config, swapped(w)))
    with pytest.raises(NumericalError, match=r"rounding explains 0\.001 of the largest"):
        exported(run, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_bits_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: a tensor that is not the weight, in an export that no reader of logits checks."""
    run, _ = run_of(tmp_path / "run", "model=gpt", "model.mlp=plain")
    write = exporting.write_tensors

    def with_one_bit_more(directory: Path, tensors: dict[str, Tensor], most: float) -> list[str]:
        tensors["norm_final"] = tensors["norm_final"].nextafter(torch.tensor(9.0))
        return write(directory, tensors, most)

    monkeypatch.setattr(exporting, "write_tensors", with_one_bit_more)
    with pytest.raises(NumericalError, match="norm_final"):
        exported(run, tmp_path / "out")


@pytest.mark.parametrize("how", ["not installed", "too old"])
def test_without_transformers(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: an export that fails, or is silent, where transformers is not installed, too old or broken."""

    def too_old(*_: Any) -> None:
        raise ImportError("cannot import name 'PreTrainedConfig' from 'transformers'")

    monkeypatch.setattr(verification, "find_spec", lambda _: None if how == "not installed" else True)
    monkeypatch.setattr(verification, "loaded", too_old)
    run, tensors = run_of(tmp_path / "run", "model=gpt")
    said: list[str] = []
    out = exported(run, tmp_path / "out", said.append)
    why = {"not installed": "pip install 'ngpt-train[hf]'", "too old": "ImportError: cannot import name"}[how]
    assert any("not compared: transformers" in sentence and why in sentence for sentence in said)
    assert equal(brought_back(out, tmp_path / "back"), tensors)


def test_config_of_others(tmp_path: Path) -> None:
    """Caught: a model of transformers that lacks our files and is refused, or gets another's keys; weights whose
    layout was noted come back in the other layout where the note is gone."""
    pytest.importorskip("transformers", reason="the extra [hf] is not installed")
    run, tensors = run_of(tmp_path / "run", "model=gpt", "model.rope_layout=interleaved")
    out = exported(run, tmp_path / "out")
    (out / "ngpt_train_config.yaml").unlink()
    for path in (out / "ngpt_train_tokenizer").iterdir():
        path.unlink()
    content = json.loads((out / "config.json").read_text())
    del content["ngpt_train"]
    (out / "config.json").write_text(json.dumps(content))
    found = brought_back(out, tmp_path / "back")
    assert torch.equal(found["layers.0.wq"], to_half(tensors["layers.0.wq"], 32))
    config = restored_from(tmp_path / "back").config
    assert (config.model.name, config.model.rope_layout, config.scale.name) == ("gpt", "half", "imported")
    assert config.tokenizer.kind == "hf"
    record = json.loads((tmp_path / "back" / "run.json").read_text())["starts"][0]
    assert record["imported"] == {"source": str(out), "revision": None, "form": "layout llama"}


@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen3"])
def test_saved_by_transformers(kind: str, tmp_path: Path) -> None:
    """Caught: files of save_pretrained, in shards of bf16 and without anything of ours, whose model gives other logits
    here."""
    transformers = pytest.importorskip("transformers", reason="the extra [hf] is not installed")
    torch.manual_seed(0)
    sizes = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "head_dim": 16}
    sizes |= {"sliding_window": None} if kind == "Mistral" else {}
    config = getattr(transformers, f"{kind}Config")(**sizes, rms_norm_eps=1e-5, initializer_range=0.1)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "saved", max_shard_size="50KB")
    write_tokenizers(tmp_path / "saved", BytesTokenizer(), 32, True)
    for path in (tmp_path / "saved" / "ngpt_train_tokenizer").iterdir():
        path.unlink()
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 1
    brought_back(tmp_path / "saved", tmp_path / "back")
    restored = restored_from(tmp_path / "back")
    assert restored.config.model.qk_norm == (kind == "Qwen3")  # type: ignore[attr-defined]
    rows = torch.randint(300, (2, 32))
    # Read again: `to` has rounded the frequencies of RoPE, too.
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    with torch.no_grad():
        found = restored.model(rows)
        torch.testing.assert_close(found, model(rows).logits, rtol=0, atol=1e-4)
    assert found.abs().max() > 1


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def as_pickle(out: Path) -> None:
    (out / "model.safetensors").rename(out / "pytorch_model.bin")


def as_index(weight_map: Any) -> Callable[[Path], object]:
    def write(out: Path) -> None:
        (out / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return write


def with_dtype(out: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(out / "model.safetensors")
    save_file({**tensors, "norm_final": tensors["norm_final"].to(torch.int8)}, out / "model.safetensors")


def with_nan(out: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(out / "model.safetensors")
    tensors["norm_final"][0] = torch.nan
    save_file(tensors, out / "model.safetensors")


def with_note(**changes: Any) -> Callable[[Path], object]:
    def write(out: Path) -> None:
        content = json.loads((out / "config.json").read_text())
        content["ngpt_train"]["model"] |= changes
        (out / "config.json").write_text(json.dumps(content))

    return write


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda out: cut(out / "model.safetensors"), "model.safetensors cannot be read: "),
    "no tensors": (lambda out: (out / "model.safetensors").unlink(), "there is no model.safetensors"),
    "pickle": (as_pickle, "pytorch_model.bin and no model.safetensors. Reading such a file may execute code"),
    "no shard": (as_index({"embedding": "model-00001-of-00002.safetensors"}), "model-00001-of-00002.* is missing"),
    "shard elsewhere": (as_index({"embedding": "../model.safetensors"}), "which is no file beside it"),
    "index of others": (as_index({"embedding": "model.safetensors"}), "only one of them has"),
    "index without names": (as_index([]), "weight_map does not name"),
    "int8": (with_dtype, "norm_final has the dtype int8; weights are in fp32, bf16, fp16. A quantised model"),
    "config cut": (
        lambda out: (out / "config.json").write_text('{"model_type": '),
        "config.json is missing or damaged",
    ),
    "config a list": (lambda out: (out / "config.json").write_text("[]"), "it is no object"),
    "no config": (lambda out: (out / "config.json").unlink(), "has no config.json, so it is no model"),
    "unknown": (lambda out: (out / "config.json").write_text('{"model_type": "bert"}'), "model_type=bert is not"),
    "unknown key": (with_note(d_modell=64), "d_modell"),
    "another width": (with_note(d_model=128), r"embedding has shape \(259, 64\), and should have \(259, 128\)"),
    "not finite": (with_nan, "norm_final has values that are not finite"),
    "no tokenizer": (
        lambda out: [path.unlink() for path in out.rglob("tokenizer*.json")],
        "there is no tokenizer",
    ),
}


@pytest.fixture(scope="module")
def plain_export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("plain")
    run, _ = run_of(base / "run", "model=gpt", "model.mlp=plain")
    return exported(run, base / "out")


@pytest.mark.parametrize("broken", BROKEN)
def test_damaged_sources(broken: str, plain_export: Path, tmp_path: Path) -> None:
    """Caught: a traceback, or half a run, for a source that is damaged or no model."""
    import shutil

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


@pytest.mark.parametrize("use_ngpt", [0, 1])
def test_a_checkpoint_of_nvidia(use_ngpt: int, plain_export: Path, tmp_path: Path) -> None:
    """Caught: no tokenizer, or a second one beside the directory's own; no note about RoPE."""
    told = arguments(use_ngpt, vocab_size=300)
    path = save(tmp_path / "ckpt.pt", nvidia.random_state(told, seed=0), told)
    with pytest.raises(ConfigError, match=r"holds no tokenizer\n  Name the tokenizer .* tokenizer=gpt2"):
        read_model(str(path), None)
    imported = read_model(str(path), None, TokenizerConfig(kind="bytes"))
    assert any("a rotary embedding that does not rotate" in note for note in imported.notes)
    write_run(imported, str(path), tmp_path / "run")
    restored = restored_from(tmp_path / "run")
    row = torch.randint(300, (1, 30))
    with torch.no_grad():
        found = restored.model(row)
    assert error(found, nvidia.forward(nvidia.random_state(told, seed=0), told, row, "true")) < 1e-5
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
    names = [
        "model.safetensors",
        "config.json",
        "tokenizer.model",
        "pytorch_model.bin",
        "modeling.py",
        "a/b.safetensors",
    ]
    taken = huggingface_hub.utils.filter_repo_objects(
        names, allow_patterns=asked["allow_patterns"], ignore_patterns=asked["ignore_patterns"]
    )
    assert list(taken) == names[:3]
    with pytest.raises(DataError, match="owner/model at gone cannot be fetched from the hub"):
        read_model("owner/model", "gone")


@pytest.mark.parametrize("name", ["a|b", "![x](http://y)", "<script>x</script>", "two\n# lines", "`code`"])
def test_a_name_is_no_markdown(name: str) -> None:
    """Caught: a run's name that makes links, tags or cells in the card of an export."""
    said = plain(name)
    assert not re.search(r"(?<!\\)[\[<|`]", said)
    assert "\n" not in said
    assert plain("ngpt-debug_seed0 v1.2+cpu, 5 % (a)") == "ngpt-debug_seed0 v1.2+cpu, 5 % (a)"
