"""The memory that `plan` predicts, against what whole training steps hold. Within 10 %."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from ngpt_train.config import load_config
from ngpt_train.config.schema import Config
from ngpt_train.distributed.world import World
from ngpt_train.models import build_model
from ngpt_train.report import enough_memory
from ngpt_train.report.launch_plan import make_plan
from tests.unit.report.whole_steps import LAYOUTS, config_of, counted_peak, peak_of_steps

ARCHITECTURES = [
    "gpt",
    "ngpt",
    "normformer",
    "powernorm",
    "ntransformer",
    "gpt_encoder_decoder",
    "composed model.norm_placement=peri model.ffn_norm=norm model.norm=layer",
    "composed_encoder_decoder model.mlp=plain",
    "angpt",
    "ngpt model.constraint=parametrization",
    "gpt model.attention_dropout=0.1 model.residual_dropout=0.1 model.embedding_dropout=0.1",
]
KINDS = ("none", "selective", "full")


@pytest.mark.parametrize("model", ARCHITECTURES)
def test_of_blocks_that_are_not_built(model: str) -> None:
    """What a run is refused by counts models of few blocks alone. Caught: blocks, or encoder blocks, that are
    counted wrongly."""
    shape = config_of(model, "single", "none", layers=5).model
    if hasattr(shape, "n_encoder_layers"):
        shape = replace(shape, n_encoder_layers=3)
    with torch.device("meta"):
        whole = build_model(shape).n_params()
    assert enough_memory.without_memory(shape, lambda made: made.n_params()) == whole


def planned(config: Config) -> int:
    total = make_plan(config)["memory_per_rank"]["total"]
    assert isinstance(total, int)
    return total


FAST = [
    ("gpt", "single", "none", "bf16", 1),
    ("ngpt", "fsdp", "full", "bf16", 2),
    ("normformer", "hsdp", "selective", "fp32", 2),
]
# Each model in each layout and with each kind of recomputation, but not in all pairs of them, which take an hour.
EXHAUSTIVE = [
    (model, layout, recompute, "fp32" if recompute == "selective" else "bf16", 1 + (layout != "single"))
    for m, model in enumerate(ARCHITECTURES)
    for n, layout in enumerate(LAYOUTS)
    for recompute in [KINDS[(m + n) % 3]]
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("model", "layout", "recompute", "precision", "micro_batches"),
    [*FAST, *(pytest.param(*cell, marks=pytest.mark.exhaustive) for cell in EXHAUSTIVE if cell not in FAST)],
)
def test_of_whole_steps(model: str, layout: str, recompute: str, precision: str, micro_batches: int) -> None:
    """Caught: activations, gradients, gathered or cast matrices that plan forgets, counts twice or shards wrongly."""
    config = config_of(model, layout, recompute, f"train.precision={precision}", micro_batches=micro_batches)
    counted = counted_peak(config, *LAYOUTS[layout])
    assert planned(config) == pytest.approx(counted, rel=0.1)


EXCHANGES = [(gather, scatter) for gather in ("pass", "micro_batch", "step") for scatter in ("micro_batch", "step")]
FAST_EXCHANGES = [
    ("gpt", "fsdp", "full", "fp32", "step", "step", 2),
    ("ngpt", "hsdp", "none", "bf16", "pass", "step", 3),
    ("gpt", "fsdp", "full", "fp32", "pass", "micro_batch", 1),
    ("composed_encoder_decoder model.mlp=plain", "fsdp", "full", "bf16", "step", "micro_batch", 2),
]
# Each model with each choice of both keys, and of all else in turn.
ALL_EXCHANGES = [
    (model, ("fsdp", "hsdp")[(m + n) % 2], KINDS[(m + n // 2) % 3], ("bf16", "fp32")[n % 2], *exchange, 1 + (m + n) % 3)
    for m, model in enumerate(ARCHITECTURES)
    for n, exchange in enumerate(EXCHANGES)
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("model", "layout", "recompute", "precision", "gather", "scatter", "micro_batches"),
    [
        *FAST_EXCHANGES,
        pytest.param("gpt_encoder_decoder", "fsdp", "full", "bf16", "step", "step", 2, marks=pytest.mark.slow),
        *(pytest.param(*cell, marks=pytest.mark.exhaustive) for cell in ALL_EXCHANGES if cell not in FAST_EXCHANGES),
    ],
)
def test_of_exchanges(
    model: str, layout: str, recompute: str, precision: str, gather: str, scatter: str, micro_batches: int
) -> None:
    """Caught: matrices or gradients that parallel.gather and scatter keep whole and plan takes for shards; those that
    plan counts where they have gone; FSDP2's buffer; an encoder that plan takes for the decoder. Within 5 %."""
    options = (f"parallel.gather={gather}", f"parallel.scatter={scatter}", f"train.precision={precision}")
    layers = 2 if "encoder" in model else 4  # an encoder-decoder has as many again
    config = config_of(model, layout, recompute, *options, micro_batches=micro_batches, layers=layers)
    assert planned(config) == pytest.approx(counted_peak(config, *LAYOUTS[layout]), rel=0.05)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("scale", "recompute", "layout"),
    [("125m", "none", "hsdp"), ("0.5b", "selective", "fsdp"), ("1b", "full", "fsdp"), ("0.5b", "none", "single")],
)
@pytest.mark.parametrize("model", ["gpt", "ngpt", "normformer", "powernorm", "ntransformer"])
def test_of_whole_steps_at_scale(model: str, scale: str, recompute: str, layout: str) -> None:
    ranks, local_size = LAYOUTS[layout]
    config = load_config(
        [
            *(f"model={model}", f"scale={scale}", "model.vocab_size=32000", "train.device=cpu", "train.compile=false"),
            *(f"parallel={layout}", "train.precision=bf16", "train.micro_rows=4", f"train.batch_rows={8 * ranks}"),
            *(f"train.activation_checkpointing={recompute}", "optim.lr=1e-3"),
            *(f"plan.world_size={ranks}", f"plan.ranks_per_host={local_size}", "checkpoint.async=false"),
            *([f"parallel.shard={local_size}"] if layout == "hsdp" else []),
        ],
        world_size=ranks,
    )
    assert planned(config) == pytest.approx(counted_peak(config, ranks, local_size), rel=0.1)


@pytest.mark.parametrize("recompute", ["none", pytest.param("selective", marks=pytest.mark.slow), "full"])
def test_of_whole_steps_under_ddp(recompute: str) -> None:
    """On real tensors, in a group of one: DDP's reducer, in C++, knows no fake ones. Caught: gradients counted twice,
    as DDP's buckets and as the parameters', or for a while alone."""
    config = config_of("gpt", "ddp", recompute, micro_batches=1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        counted = peak_of_steps(config, World(0, 1, 0, torch.device("cpu")))
    finally:
        dist.destroy_process_group()
    assert planned(config) == pytest.approx(counted, rel=0.1)
    single = replace(config, parallel=replace(config.parallel, kind="single"))
    assert planned(single) <= planned(config)
