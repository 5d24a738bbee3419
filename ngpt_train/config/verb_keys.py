"""The keys of validation, in training and by `evaluate`, and of the verbs other than `train`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Union

from ngpt_train.config.keys import COUNT, COUNT_OR_0, ROWS, SEED, key

# The sentences of keys that `evaluate` and `generate` share.
AVERAGE = (
    "Takes the mean of the weights of so many checkpoints: the run's newest ones, up to the one that is named. "
    "checkpoint.keep_last says how many a run keeps."
)
WEIGHTS = "The trained weights, or their moving average, which a run keeps with optim.ema_decay."


@dataclass
class EvalConfig:
    """Validation during training."""

    every: int = key(500, "Steps between validations; 0 validates at the start and at the end only.", **COUNT_OR_0)
    rows: Union[int, None] = key(
        64, "Rows of the fixed validation set (fewer where the data has fewer); set this or tokens.", **ROWS
    )
    tokens: Union[int, None] = key(
        None,
        "Targets of the fixed validation set, at least (fewer where the data has fewer, which the log says); replaces "
        "rows.",
        minimum=1,
        maximum=10_000_000_000,
    )
    budget: Union[float, None] = key(
        None,
        "Share of the compute between two validations that a validation before the last may take: it then has fewer "
        "of the rows, always the same. null: no limit.",
        above=0,
        maximum=1000,
    )
    contexts: Union[list[int], None] = key(
        None,
        "Row lengths that the model is validated at besides model.context, such as [2048,4096], on the same text as "
        "far as whole rows allow: metrics loss_ctx2048 and so on. null: none.",
        **COUNT,
    )


@dataclass
class GenerateConfig:
    """Sampling from a checkpoint (`generate`)."""

    checkpoint: Union[str, None] = key(
        None, "Run directory (its newest checkpoint), checkpoint directory, or RUN/best."
    )
    average: int = key(1, AVERAGE, minimum=1, maximum=1000)
    weights: str = key("trained", WEIGHTS, choices=("trained", "ema"))
    prompt: str = key("", "Text to continue; empty starts a document.")
    max_new_tokens: int = key(200, "Tokens to sample at most.", **COUNT)
    temperature: float = key(0.8, "Divides the logits; 0 takes the most likely token.", minimum=0, maximum=1000)
    top_k: Union[int, None] = key(None, "Sample among the k most likely tokens; null: all.", **COUNT)
    top_p: Union[float, None] = key(
        None, "Sample among the fewest tokens whose probability reaches p; null: all.", above=0, maximum=1
    )
    seed: int = key(0, "Seed of the sampling.", **SEED)


@dataclass
class EvaluateConfig:
    """Validation loss of a checkpoint (`evaluate`) on data.*, eval.rows rows or eval.tokens targets."""

    checkpoint: Union[str, None] = key(
        None, "Run directory (its newest checkpoint), checkpoint directory, or RUN/best."
    )
    average: int = key(1, AVERAGE, minimum=1, maximum=1000)
    weights: str = key("trained", WEIGHTS, choices=("trained", "ema"))
    out: Union[str, None] = key(
        None, "JSON file for the result; the loss of each row goes beside it as .npz. null prints only."
    )


# Memory in GiB that a program sees of a card, rounded down.
CARDS = {"a100_40gb": 39, "a100_80gb": 79, "h100_80gb": 79}


@dataclass
class PlanConfig:
    """Size, memory and time of a run without running it (`plan`)."""

    world_size: int = key(1, "Ranks that the run is planned for.", minimum=1, maximum=10_000_000)
    ranks_per_host: int = key(8, "Ranks of each host, the groups of parallel=hsdp.", minimum=1, maximum=10_000)
    device: Union[str, None] = key(
        None,
        "Card for whose memory micro rows, recomputation and layout are chosen and printed; null keeps those of the "
        "config. The arguments' own are kept.",
        choices=tuple(CARDS),
    )
    flops_per_s: Union[float, None] = key(
        None, "Achieved FLOP/s of one rank, for the hours; null leaves them out.", above=0, maximum=1e30
    )
    out: Union[str, None] = key(None, "JSON file for the plan; null prints only.")


@dataclass
class DoctorConfig:
    """Whether a training run would work here (`doctor`, with the overrides of `train`)."""

    out: Union[str, None] = key(None, "JSON file for what was found, without secrets; null prints only.")


@dataclass
class BenchConfig:
    """Times of the parts of a run, side by side with others' (`bench`)."""

    what: str = key(
        "data",
        "What is measured: data (from text to batches), step (an optimizer step, GPT's beside the model's), kernels "
        "(each fused operation beside plain PyTorch), attention (torch's implementations of it), checkpoint (saving, "
        "loading), communication (what the ranks of torchrun send each other in a step, in each layout). `bench gpu` "
        "takes options of its own: `bench gpu --help`.",
        choices=("data", "step", "kernels", "attention", "checkpoint", "communication"),
    )
    out: Union[str, None] = key(None, "JSON file for the entries; null prints only.")


@dataclass
class AuditConfig:
    """Whether a run's records are what its config, code and data give (`audit RUN`)."""

    run: Union[str, None] = key(None, "The run directory; `audit RUN` sets it. null: none.")
    windows: int = key(3, "Parts of the run that are trained again at most, drawn at random.", minimum=1, maximum=10_000)
    steps: int = key(100, "Steps of each part at most; it begins at step 0 or at a kept checkpoint.", **COUNT)
    seed: Union[int, None] = key(
        None, "Which parts are drawn. null: nobody knows before; the certificate has the number.", **SEED
    )
    tolerance: float = key(
        0.01,
        "On another kind of machine or another torch, losses and norms may differ by this share; else not by a bit.",
        above=0,
        maximum=1,
    )
    out: Union[str, None] = key(None, "JSON file for the certificate; null is audit.json in the run directory.")
