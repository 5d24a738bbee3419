"""One process = DDP = FSDP2 = HSDP: the same batch in other pieces gives the same run.

Caught: gradients summed for averaged, a loss divided per rank or per micro batch, accumulation without no_sync,
vectors not averaged, a projection of shards' columns, weights drawn per shard, a wrapper whose hooks do not run;
dropout's masks that depend on ranks or micro batches; PowerNorm's statistics of a rank's own rows, or that a
recomputation advances again.
"""

import dataclasses
import functools
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ngpt_train.core.constants import IGNORED
from ngpt_train.data.dataset import Pairs
from ngpt_train.data.masks import Masks
from ngpt_train.data.pair_rows import PairRows
from ngpt_train.models import export_weights
from ngpt_train.models.rank_rows import replicas
from ngpt_train.training import build_state, train_step
from tests.processes.launch import on_ranks
from tests.properties.architectures import ARCHITECTURES, SMALL
from tests.properties.runs import padded_rows, run_config, text_like_rows
from tests.reference.training import Recipe

ROWS, CONTEXT = 8, 32
SIZE = dataclasses.replace(SMALL, source_context=10)
RECIPES = {
    "angpt": Recipe(8, 2e-2, 0.9, 0.95, 1e-8, weight_decay=0.0, clip_norm=0.5, warmup_steps=0),
    "gpt": Recipe(8, 1e-2, 0.9, 0.95, 1e-8, weight_decay=0.1, clip_norm=1.0, warmup_steps=4),
    "normformer": Recipe(24, 6e-3, 0.9, 0.95, 1e-8, weight_decay=0.1, clip_norm=1.0, warmup_steps=4),
    "ngpt": Recipe(8, 2e-2, 0.9, 0.95, 1e-8, weight_decay=0.0, clip_norm=0.5, warmup_steps=0),
    "gpt_encoder_decoder": Recipe(12, 5e-3, 0.9, 0.95, 1e-8, weight_decay=0.1, clip_norm=1.0, warmup_steps=2),
    "composed": Recipe(12, 5e-3, 0.9, 0.95, 1e-8, weight_decay=0.1, clip_norm=0.5, warmup_steps=2),
    "composed_encoder_decoder": Recipe(12, 5e-3, 0.9, 0.95, 1e-8, weight_decay=0.1, clip_norm=1.0, warmup_steps=2),
    "ntransformer": Recipe(8, 2e-2, 0.9, 0.95, 1e-8, weight_decay=0.0, clip_norm=0.5, warmup_steps=0),
    "powernorm": Recipe(8, 6e-3, 0.9, 0.95, 1e-8, weight_decay=0.1, clip_norm=1.0, warmup_steps=4),
}
OPTIONS = {
    "gpt": ["optim.z_loss=0.01"],
    # Sinusoids outweigh so narrow an embedding at first; with rotary positions the model learns within the run.
    "normformer": ["model.positions=rotary"],
    "powernorm": ["model.statistics=synchronised", "model.psi_warmup_steps=4"],
    "composed": [
        *("model.norm=layer", "model.norm_placement=post", "model.ffn_norm=norm", "model.res_scale=both"),
        *("model.bias=true", "model.layer_scale=0.5", "model.embedding_gradient=0.5", "model.tied_embeddings=true"),
    ],
    "composed_encoder_decoder with pairs": [],
    "composed_encoder_decoder": [
        *("model.head_scale=before", "model.ffn_norm=norm", "model.bias=true"),
        *("model.separate_gains=true", "model.input_gain_decay=true"),
    ],
}
RECIPES |= {f"{name} with dropout": RECIPES[name] for name in ("gpt", "ntransformer")}
RECIPES["gpt with normuon"] = RECIPES["gpt"]
RECIPES["gpt with labels"] = dataclasses.replace(RECIPES["gpt"], steps=12)
RECIPES["ngpt with masks"] = dataclasses.replace(RECIPES["ngpt"], steps=12)
# A higher rate doubles a rounding from step to step.
RECIPES["composed_encoder_decoder with pairs"] = dataclasses.replace(
    RECIPES["composed_encoder_decoder"], steps=12, lr=2.5e-3
)
RECIPES["gpt with muonh"] = dataclasses.replace(RECIPES["gpt"], weight_decay=0.0)
RECIPES["ngpt with muon"] = RECIPES["ngpt"]
RECIPES["ngpt with adamh"] = RECIPES["ngpt"]
RECIPES["ngpt with nugpt"] = dataclasses.replace(RECIPES["ngpt"], lr=4e-3, eps=1e-16)
RECIPES["ngpt with training_ngpt"] = dataclasses.replace(RECIPES["ngpt"], eps=1e-16, clip_norm=0.25)
WITH = {
    "": [],
    "dropout": [
        *(f"model.{place}_dropout=0.05" for place in ("embedding", "residual", "attention")),
        "optim.label_smoothing=0.05",
    ],
    "labels": ["data=local", "data.path=x", "data.label_field=label", "data.labels=['a','b','c']"],
    "masks": ["objective=masked", "model.mask_share=0.5"],
    "pairs": [
        *("data=pairs", "data.path=x", "model.norm=pn", "model.statistics=synchronised", "model.psi_warmup_steps=4"),
        *("model.shared_source=true", "model.tied_embeddings=true"),
    ],
    "training_ngpt": ["recipe=training_ngpt", "optim.gate_eps=1e-4", "optim.angle_cap=0.03"],
    **{name: [f"optim.name={name}", "optim.groups.embedding=3e-2"] for name in ("muon", "normuon", "adamh", "muonh")},
    "nugpt": ["recipe=nugpt", *(f"model.reference.{key}={n}" for key, n in (("d_model", 8), ("steps", 100)))],
}
LAYOUTS = {  # ranks, parallel, micro batches per rank and step
    "ddp(2)": (2, "ddp", 2),
    "ddp(4)": (4, "ddp", 1),
    "fsdp(2)": (2, "fsdp", 4),
    "fsdp(4)": (4, "fsdp", 2),
    "hsdp(2x2)": (4, "hsdp", 2),
}
Cell = tuple[str, str, str]  # recipe, layout, recomputation
# By ranks, in the fast tier and in the slow one; the other recipes and cells are in the exhaustive tier.
FAST: dict[int, list[Cell]] = {
    2: [
        ("gpt", "ddp(2)", "none"),
        ("ngpt", "ddp(2)", "selective"),
        ("ngpt", "fsdp(2)", "none"),
        ("gpt with labels", "fsdp(2)", "none"),
        ("ngpt with training_ngpt", "fsdp(2)", "none"),
        ("ntransformer with dropout", "fsdp(2)", "full"),
        ("composed_encoder_decoder with pairs", "ddp(2)", "none"),
        ("gpt with muonh", "ddp(2)", "none"),
        ("ngpt with muon", "fsdp(2)", "none"),
    ],
    4: [
        ("gpt", "fsdp(4)", "none"),
        ("ngpt", "hsdp(2x2)", "none"),
        ("powernorm", "hsdp(2x2)", "full"),
    ],
}
SLOW: dict[int, list[Cell]] = {
    2: [
        ("angpt", "fsdp(2)", "none"),
        ("ngpt with masks", "fsdp(2)", "none"),
        ("gpt with labels", "ddp(2)", "none"),
        ("ngpt with nugpt", "ddp(2)", "none"),
        ("ngpt with nugpt", "fsdp(2)", "none"),
        ("composed_encoder_decoder", "fsdp(2)", "none"),
        ("composed_encoder_decoder with pairs", "fsdp(2)", "none"),
        ("gpt with normuon", "fsdp(2)", "none"),
        ("powernorm", "ddp(2)", "none"),
    ],
    4: [
        ("gpt", "hsdp(2x2)", "selective"),
        ("ngpt", "ddp(4)", "none"),
        ("ngpt with nugpt", "hsdp(2x2)", "none"),
        ("gpt with muonh", "hsdp(2x2)", "none"),
        ("ngpt with adamh", "fsdp(4)", "none"),
    ],
}
Report = dict[str, Any]


def digest(weights: dict[str, Tensor]) -> str:
    return hashlib.sha256(b"".join(weights[key].numpy().tobytes() for key in sorted(weights))).hexdigest()


def batch(name: str, step: int, what: str) -> tuple[Tensor, ...]:
    """The rows of a step, the same for every layout; the last ones count far fewer targets than the first."""
    if what == "labels":
        tokens, targets, *doc_ids = text_like_rows(ROWS, CONTEXT, SIZE.vocab_size, seed=step)
        targets = torch.full_like(targets, IGNORED)
        targets[:, -1] = tokens[:, -1] % 3
        targets[-1] = IGNORED
        return tokens, targets, *doc_ids
    if what == "masks":
        rows = [part.numpy() for part in text_like_rows(ROWS, CONTEXT, SIZE.vocab_size, seed=step)]
        masks = Masks(0.5, 0.6, 0.1, mask_id=SIZE.vocab_size - 1, eos=0, begins_word=None)
        return tuple(torch.from_numpy(part) for part in masks.of(tuple(rows), np.arange(ROWS) + step * ROWS, seed=0))
    if what == "pairs":
        draw = np.random.default_rng(step)
        sides = [[draw.integers(1, SIZE.vocab_size, draw.integers(1, 14)) for _ in range(ROWS)] for _ in range(2)]
        rows = PairRows(Pairs("train", Path(), 0, list(zip(*sides, strict=True)))).batch(np.arange(ROWS))
        return tuple(torch.from_numpy(part) for part in rows)
    if ARCHITECTURES[name].has_encoder:
        return padded_rows(ROWS, CONTEXT, SIZE, seed=step)
    return text_like_rows(ROWS, CONTEXT, SIZE.vocab_size, seed=step)


def one_run(recipe: str, parallel: str, recomputation: str, accumulation: int) -> Report:
    """What this rank reports of a run."""
    name, _, what = recipe.partition(" with ")
    options = [
        *OPTIONS.get(recipe, OPTIONS.get(name, [])),
        *WITH[what],
        f"train.activation_checkpointing={recomputation}",
    ]
    config = run_config(
        name, SIZE, RECIPES[recipe], rows=ROWS, context=CONTEXT, micro_rows=1, parallel=parallel, options=options
    )
    if parallel == "hsdp":
        config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, shard=2))
    state = build_state(config)
    rank, size = state.world.rank, state.world.size
    rows = torch.arange(rank, ROWS, size)  # as TrainLoader: so a micro batch of all ranks is a run of rows
    # PowerNorm's statistics advance with each micro batch: so it is given the same ones in every layout.
    accumulation = 2 if name == "powernorm" or what == "pairs" else accumulation
    initial = export_weights(state.model)
    losses, z_losses, norms, rates, tokens = [], [], [], [], []
    for step in range(config.train.steps):
        mine = [part[rows].chunk(accumulation) for part in batch(name, step, what)]
        result = train_step(state, list(zip(*mine, strict=True)), rows=rows)
        losses.append(result.loss.item())
        if result.z_loss is not None:
            z_losses.append(result.z_loss.item())
        norms.append(result.grad_norm.item())
        rates.append(float(result.lr))
        tokens.append(int(result.n_tokens))
    final = export_weights(state.model)
    # Not through the framework: what this rank itself holds.
    parameters = {key: p.detach() for key, p in state.model.named_parameters()}
    held = digest({key: p.full_tensor() if isinstance(p, DTensor) else p for key, p in parameters.items()})
    return {
        "initial": digest(initial),
        "held": held,
        "losses": losses,
        "z_losses": z_losses,
        "norms": norms,
        "rates": rates,
        "tokens": tokens,
        "statistics": {key: x.double().norm().item() for key, x in state.model.statistics().items()},
        "unmoved": [key for key, x in final.items() if torch.equal(x, initial[key])],
        "off_sphere": max((x.norm(dim=-1) - 1).abs().max().item() for x in final.values() if x.ndim == 2),
        "replicas": max(map(replicas, parameters.values())),
        "sharded": any(isinstance(p, DTensor) for p in parameters.values()),
    }


def all_runs(cells: list[Cell]) -> list[Report]:
    """Reports of this rank, of one run after the other."""
    return [one_run(recipe, LAYOUTS[layout][1], again, LAYOUTS[layout][2]) for recipe, layout, again in cells]


@functools.cache
def single(recipe: str) -> Report:
    return one_run(recipe, "single", "none", 1)


def assert_equal(recipe: str, layout: str, ranks: list[Report]) -> None:
    expected = single(recipe)
    name = recipe.partition(" with ")[0]
    for report in ranks:
        assert report["sharded"] == ("sdp" in layout)
        assert report["replicas"] == (2 if "hsdp" in layout else 1)
        assert report["initial"] == expected["initial"]
        assert report["held"] == ranks[0]["held"]
        assert report["tokens"] == expected["tokens"]
        assert report["rates"] == expected["rates"]
        assert report["losses"] == pytest.approx(expected["losses"], rel=1e-6)
        assert report["z_losses"] == pytest.approx(expected["z_losses"], rel=1e-5)
        # Of one gradient in other pieces 8 roundings of fp32. Later ones are at weights that Adam, which divides a
        # gradient by its own size, has moved by their roundings as well: in one process, with each operation moved by
        # one (tests/rounding.py), up to 115 were seen.
        assert report["norms"][0] == pytest.approx(expected["norms"][0], rel=1e-6)
        assert report["norms"] == pytest.approx(expected["norms"], rel=512 * 2**-23)
        assert report["statistics"] == pytest.approx(expected["statistics"], rel=1e-4)
        assert report["unmoved"] == expected["unmoved"] == []
        assert not ARCHITECTURES[name].on_sphere or report["off_sphere"] < 1e-6
    assert len(expected["z_losses"]) == (len(expected["losses"]) if name == "gpt" else 0)
    assert bool(expected["statistics"]) == (name == "powernorm" or recipe.endswith("pairs"))
    assert expected["losses"][-1] < 0.95 * expected["losses"][0]
    assert max(expected["norms"]) > RECIPES[recipe].clip_norm
    assert min(expected["rates"]) > 0


@pytest.mark.parametrize("tier", [FAST, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["fast", "slow"])
@pytest.mark.parametrize("n_ranks", [2, 4])
def test_layouts_agree(n_ranks: int, tier: dict[int, list[Cell]]) -> None:
    cells = tier[n_ranks]
    for (recipe, layout, _), *ranks in zip(cells, *on_ranks(all_runs, n_ranks, cells), strict=True):
        assert_equal(recipe, layout, ranks)


@pytest.mark.exhaustive
@pytest.mark.parametrize("n_ranks", [2, 4])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_cell(recipe: str, n_ranks: int) -> None:
    """All layouts of as many ranks, with nothing, some and all of it recomputed, one after the other in one launch."""
    layouts = [layout for layout, (ranks, _, _) in LAYOUTS.items() if ranks == n_ranks]
    cells = [(recipe, layout, again) for layout in layouts for again in ("none", "selective", "full")]
    for (_, layout, _), *ranks in zip(cells, *on_ranks(all_runs, n_ranks, cells), strict=True):
        assert_equal(recipe, layout, ranks)
