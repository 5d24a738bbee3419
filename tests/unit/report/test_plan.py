"""The plan against numbers worked out by hand, and against what a real model holds."""

import json
from pathlib import Path

import pytest
import torch

from ngpt_train.__main__ import main as command
from ngpt_train.config import ConfigError, DataError, load_config
from ngpt_train.models import build_model
from ngpt_train.report.launch_plan import describe_plan, make_plan
from ngpt_train.verbs.plan import main

HALF_B = [
    "model.d_model=1024", "model.n_layers=24", "model.n_heads=16", "model.vocab_size=32000", "model.context=4096",
    "optim.lr=1e-3", "train.batch_rows=512", "train.steps=1000",
]  # fmt: skip


def plan(*overrides: str) -> dict:
    return make_plan(load_config([*HALF_B, *overrides]))


def memory(made: dict) -> dict[str, int]:
    return {item["name"]: item["bytes"] for item in made["memory_per_rank"]["items"]}


@pytest.mark.parametrize(
    ("model", "vectors", "total"), [("gpt", 49 * 1024, 468_239_360), ("ngpt", 24 * 11 * 1024 + 32000, 468_491_520)]
)
def test_parameters_of_the_half_billion_models(model: str, vectors: int, total: int) -> None:
    assert plan(f"model={model}")["parameters"] == {
        "embedding": 32000 * 1024,
        "output": 32000 * 1024,
        "attention": 24 * 4 * 1024**2,
        "mlp": 24 * 12 * 1024**2,
        "vectors": vectors,
        "total": total,
        "non_embedding": total - 2 * 32000 * 1024,
    }


def test_flops_steps_and_hours() -> None:
    made = plan("model=gpt", "plan.world_size=64", "plan.flops_per_s=4e14", "train.micro_rows=2")
    dense = 6 * (24 * 16 * 1024**2 + 32000 * 1024)
    attention = 12 * 24 * 1024 * 4096
    assert made["flops_per_token"] == {"non_causal": dense + attention, "causal": dense + attention // 2}
    assert made["tokens_per_step"] == 512 * 4096
    assert made["accumulation_steps"] == 4
    assert made["total_tokens"] == 1000 * 512 * 4096
    assert made["tokens_per_parameter"] == pytest.approx(made["total_tokens"] / 468_239_360)
    assert made["hours"] == pytest.approx(made["total_tokens"] * (dense + attention) / 64 / 4e14 / 3600)
    assert "hours" not in plan("model=gpt")
    assert plan("model=gpt", "train.stop_at=10")["steps"] == 10


def test_memory_of_each_layout() -> None:
    n = 468_491_520
    single, ddp, fsdp = (
        plan("model=ngpt", f"plan.world_size={size}", f"parallel={kind}", "train.micro_rows=4")
        for size, kind in ((1, "single"), (8, "ddp"), (8, "fsdp"))
    )
    for made in (single, ddp):
        assert memory(made)["weights"] == 4 * n
        assert memory(made)["gradients"] == 4 * n
        assert memory(made)["Adam's moments"] == 8 * n
        assert memory(made)["working copies"] == 2 * 24 * 16 * 1024**2
        assert memory(made)["cast matrices"] == 2 * 32000 * 1024
    vectors = 24 * 11 * 1024 + 32000
    assert memory(fsdp)["Adam's moments"] == (n - vectors) + 8 * vectors  # 8 bytes over 8 ranks
    assert memory(fsdp)["gathered embeddings"] == 4 * 2 * 32000 * 1024
    # h; the products' results qkv, attention's, W_o's, uv and W_down's; their arguments q, k, h and SwiGLU.
    wide = 1 + (3 + 1 + 1 + 8 + 1) + (1 + 1 + 1 + 4)
    assert memory(fsdp)["activations"] == memory(single)["activations"]
    assert memory(single)["activations"] == pytest.approx(4 * 4096 * 24 * 2 * wide * 1024, rel=0.01)
    assert memory(single)["loss"] == 4 * 32000 * 1024 + 2 * 4 * 4096 * 1024
    for made in (single, ddp, fsdp):
        assert made["memory_per_rank"]["total"] == sum(memory(made).values())
    full = plan("model=ngpt", "train.activation_checkpointing=full", "train.micro_rows=4")
    assert memory(full)["activations"] == 4 * 4096 * 24 * 2 * 1024
    selective = plan("model=ngpt", "train.activation_checkpointing=selective", "train.micro_rows=4")
    assert memory(selective)["activations"] == pytest.approx(4 * 4096 * 24 * 2 * 15 * 1024, rel=0.01)


@pytest.mark.parametrize(
    ("overrides", "copies", "cast"),
    [
        ([], 24, 0),
        (["train.activation_checkpointing=full"], 24, 0),
        (["kernels=torch"], 0, 24),
        (["kernels=torch", "train.activation_checkpointing=full"], 0, 1),
        (["train.device=cpu", "train.precision=bf16"], 0, 24),
        (["train.precision=fp16"], 0, 24),
        (["model.constraint=parametrization"], 0, 24),
        (["train.precision=fp32"], 0, 0),
        (["parallel=fsdp"], 0, 0),
    ],
)
def test_blocks_in_bf16(overrides: list[str], copies: int, cast: int) -> None:
    """The optimizer's copies, or what the forward pass casts. Caught: both, or neither."""
    found = memory(plan("model=ngpt", *overrides))
    # Under FSDP2 the peak is in a block's backward pass, where the output's cast is gone.
    output = 0 if {"train.precision=fp32", "parallel=fsdp"} & set(overrides) else 32000 * 1024
    assert found.get("working copies", 0) == 2 * copies * 16 * 1024**2
    assert found.get("cast matrices", 0) == 2 * (cast * 16 * 1024**2 + output)


def test_memory_of_a_moving_average() -> None:
    """As many bytes as the weights, sharded like them. Caught: a copy that plan forgets."""
    for parallel in ("ddp", "fsdp"):
        without, made = (
            memory(plan("model=ngpt", "plan.world_size=8", f"parallel={parallel}", *ema))
            for ema in ([], ["optim.ema_decay=0.999"])
        )
        assert "moving average" not in without
        assert made["moving average"] == made["weights"]
        assert sum(made.values()) == sum(without.values()) + made["weights"]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_memory_of_matrix_optimizers(parallel: str) -> None:
    """Muon has one moment of the blocks' matrices, AdamH two. Caught: bf16 copies, which only Adam's kernel writes."""
    of_blocks, given = 24 * 16 * 1024**2, ["plan.world_size=8", f"parallel={parallel}"]
    adam, muon, adamh = (memory(plan("model=ngpt", *given, f"optim.name={name}")) for name in ("adam", "muon", "adamh"))
    assert muon["momentum"] == 4 * of_blocks // (8 if parallel == "fsdp" else 1)
    assert muon["Adam's moments"] == adam["Adam's moments"] - 2 * muon["momentum"]
    assert adamh["Adam's moments"] == adam["Adam's moments"]
    assert "working copies" not in muon | adamh
    assert muon.get("cast matrices", 0) >= (2 * of_blocks if parallel == "ddp" else 0)


def test_fsdp_rows_that_do_not_divide() -> None:
    given = ["model=gpt", "model.d_model=64", "model.vocab_size=301", "optim.lr=1e-3"]
    made = make_plan(load_config([*given, "plan.world_size=2", "parallel=fsdp", "train.batch_rows=16"]))
    with torch.device("meta"):
        model = build_model(load_config(given).model)
    fullest = sum(p.chunk(2)[0].numel() if p.ndim == 2 else p.numel() for p in model.parameters())
    assert memory(made)["weights"] == 4 * fullest


@pytest.mark.parametrize(
    ("overrides", "kind"),
    [
        (["plan.world_size=1"], "single"),
        (["plan.world_size=8"], "fsdp"),
        (["plan.world_size=8", "train.device=cpu"], "ddp"),
        (["plan.world_size=8", "parallel=ddp"], "ddp"),
    ],
)
def test_layout_for_the_planned_ranks(overrides: list[str], kind: str) -> None:
    assert plan("model=ngpt", *overrides)["parallel"] == kind


@pytest.mark.parametrize("model", ["powernorm", "normformer", "angpt", "composed"])
def test_uncompiled_on_a_gpu(model: str) -> None:
    """Caught: a norm whose call cannot be counted for a GPU; before, PowerNorm's plan ended in a TypeError."""
    small = ["scale=debug", "model.vocab_size=512", "train.device=cuda", "train.compile=false"]
    made = make_plan(load_config([f"model={model}", *small]))
    assert memory(made)["activations"] > made["parameters"]["total"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["plan.world_size=3"], r"train\.batch_rows=512.*3 ranks"),
        (["plan.world_size=8", "parallel=single"], r"parallel\.kind=single.*8 ranks"),
        (["plan.world_size=8", "train.micro_rows=63"], r"train\.micro_rows=63"),
    ],
)
def test_what_does_not_fit(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan("model=ngpt", *overrides)


# The verb


def vocabulary(tmp_path: Path, *overrides: str) -> int:
    config = load_config(["scale=debug", *overrides])
    config.plan.out = str(tmp_path / "plan.json")
    assert main(config, []) == 0
    return json.loads((tmp_path / "plan.json").read_text())["vocab_size"]


def test_vocabulary_without_reading_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert vocabulary(tmp_path, "model.vocab_size=999") == 999
    assert vocabulary(tmp_path, "tokenizer=bytes") == 257
    assert vocabulary(tmp_path, "tokenizer=gpt2") == 50257
    assert vocabulary(tmp_path, "tokenizer.vocab_size=777") == 777
    split = {"tokens": 9, "documents": 1, "sha256": 64 * "0"}
    shard = split | {"file": "a.bin", "index": "a.idx", "index_sha256": 64 * "0"}
    splits = dict.fromkeys(("train", "validation"), split | {"shards": [shard]})
    tokenizer = {"name": "thirty-one", "vocab_size": 31, "eos": 30}
    manifest = {"version": 1, "dtype": "<u2", "tokenizer": tokenizer, "source": {}, "splits": splits}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert vocabulary(tmp_path, "data=tokens", f"data.path={tmp_path}") == 31
    text = capsys.readouterr().out
    assert "exact" in text
    assert "estimate" in text
    assert f"written to {tmp_path / 'plan.json'}" in text


def test_vocabulary_of_a_sentencepiece_file(tmp_path: Path) -> None:
    from ngpt_train.data.tokenizers.sentence_piece import train_sentencepiece

    lines = [f"line {n} of a small corpus, with some words in it" for n in range(400)]
    (tmp_path / "spm.model").write_bytes(train_sentencepiece(lines, 320))
    assert vocabulary(tmp_path, "tokenizer=sentencepiece", f"tokenizer.path={tmp_path / 'spm.model'}") == 320


def test_vocabulary_of_tokens_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.path=.*model\.vocab_size"):
        main(load_config(["data=tokens", f"data.path={tmp_path}/missing"]), [])


@pytest.mark.parametrize(
    ("ranks", "line"),
    [
        (1, "python -m ngpt_train train model=ngpt 'run.name=a b' data=..."),
        (8, "torchrun --standalone --nproc-per-node 8 -m ngpt_train train model=ngpt 'run.name=a b' data=..."),
        (
            64,
            "sbatch --nodes=8 --gpus-per-node=8 scripts/slurm/train.sh model=ngpt 'run.name=a b' data=... run.root=...",
        ),
    ],
)
def test_the_line_that_starts_it(ranks: int, line: str) -> None:
    """Caught: keys of the plan in it, a shell that takes a value apart, a rank for each GPU of one host alone."""
    overrides = ["model=ngpt", f"plan.world_size={ranks}", "run.name=a b"]
    config = load_config([*HALF_B, f"plan.world_size={ranks}"])
    assert make_plan(config, overrides)["launch"] == line
    assert f"  {line}" in describe_plan(make_plan(config, overrides))


@pytest.mark.parametrize(
    ("chosen", "is_read"),
    [
        (["data=embedded"], True),
        (["data=openwebtext", "data.text_gb=0.01"], True),
        (["train.steps=1"], False),
        ([], False),
    ],
)
def test_the_text_of_a_plan(chosen: list[str], is_read: bool) -> None:
    """Caught: a warning that a text is read 18,544 times which nobody chose; a line that trains a large run on it."""
    others = [one for one in HALF_B if one.partition("=")[0] not in {key.partition("=")[0] for key in chosen}]
    made = make_plan(load_config([*others, *chosen]), chosen)
    assert bool(made["epochs"]) == is_read == any("reads the training text" in note for note in made["notes"])
    assert made["launch"].endswith("data=...") == (chosen == [])
    assert ("epochs" in describe_plan(made)) == is_read


def test_the_line_has_the_options(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Caught: a line without the directory whose file it names, or with a password."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data/mine.yaml").write_text("kind: embedded\n")
    url = "https://me:pa55word@host/x"
    assert command(["plan", "--config-dir", str(tmp_path), "data=mine", "scale=debug", f"generate.prompts={url}"]) == 0
    printed = capsys.readouterr().out
    assert f"train --config-dir {tmp_path} data=mine scale=debug" in printed
    assert "pa55word" not in printed


def test_refuses_ranks_that_hosts_do_not_share() -> None:
    """Caught: 12 ranks on hosts of 8 are said to start on one host."""
    twelve = ("model=gpt", "plan.world_size=12", "train.batch_tokens=1966080", "train.micro_rows=4", "parallel=ddp")
    halves = [one for one in HALF_B if not one.startswith("train.batch_rows")]
    with pytest.raises(ConfigError, match=r"plan\.world_size=12: is no multiple of plan\.ranks_per_host=8"):
        make_plan(load_config([*halves, *twelve]))
    assert "--nodes=3" in make_plan(load_config([*halves, *twelve, "plan.ranks_per_host=4"]))["launch"]
