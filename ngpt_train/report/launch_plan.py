"""Parameters, memory, FLOPs and hours of a run, computed from its config without running it."""

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ngpt_train.config.model_keys import KINDS
from ngpt_train.config.schema import Config
from ngpt_train.core.errors import ConfigError, DataError
from ngpt_train.core.log import saying_nothing
from ngpt_train.core.secrets import redacted
from ngpt_train.data.epochs import many_epochs, planned_rows
from ngpt_train.data.token_files import MANIFEST, read_manifest
from ngpt_train.data.tokenizers import known_vocabulary, load_tokenizer
from ngpt_train.models import build_model
from ngpt_train.models.decoder import Decoder
from ngpt_train.models.weights import standard_deviations
from ngpt_train.optim.optimizer import TABLES
from ngpt_train.report.choice import choose, planned_layout
from ngpt_train.report.memory import MemoryItem, copies_to_save, memory_per_rank


def launch_line(config: Config, overrides: Sequence[str], options: Sequence[str] = ()) -> str:
    """The command for the planned run, with the user's overrides and options, secrets redacted: for one process, for
    the ranks of a host, or under Slurm for several hosts. Raises ConfigError if the hosts cannot share the ranks
    equally."""
    ranks, per_host = config.plan.world_size, config.plan.ranks_per_host
    kept = [one for one in overrides if not one.startswith("plan.")]
    words = [redacted(one) for one in [*options, *kept]]
    # The embedded text is for first steps. A run that would read it many times still needs a text.
    text = [] if _is_text_chosen(config, kept) or not [*many_epochs(planned_rows(config), config)] else ["data=..."]
    arguments = " ".join([shlex.join(words), *text]).strip()
    if ranks == 1:
        return f"python -m ngpt_train train {arguments}".rstrip()
    if ranks <= per_host:
        return f"torchrun --standalone --nproc-per-node {ranks} -m ngpt_train train {arguments}".rstrip()
    if ranks % per_host:
        less = ranks - ranks % per_host
        problem = f"plan.world_size={ranks}: is no multiple of plan.ranks_per_host={per_host}"
        fix = f"Plan for {less} or {less + per_host} ranks, or set plan.ranks_per_host to a divisor."
        raise ConfigError(f"{problem}, and each host has as many ranks. {fix}")
    hosts = ranks // per_host
    where = f"--nodes={hosts} --gpus-per-node={per_host}"
    run = "".join(f" {key}=..." for key in ("run.root", "run.name") if f"{key}=" not in arguments)
    return f"sbatch {where} scripts/slurm/train.sh {arguments}".rstrip() + run


def _is_text_chosen(config: Config, arguments: Sequence[str]) -> bool:
    names = [one.partition("=")[0].strip().partition(".")[0] for one in arguments]
    return config.data.kind != "embedded" or "data" in names or "experiment" in names


def make_plan(config: Config, overrides: Sequence[str] = (), options: Sequence[str] = ()) -> dict[str, Any]:
    """The plan of a resolved config, for JSON; `model.vocab_size` must be a number. options: other words of the command
    line, such as --config-dir.

    Memory is in bytes. The plan is for GPUs unless train.device=cpu, because most plans are made on another machine.
    With plan.device, `choose` completes the config first, and the launch line has its choice. Raises ConfigError if the
    config does not fit plan.world_size ranks, or plan.device.
    """
    choice = None
    if config.plan.device is not None:
        with saying_nothing():
            choice = choose(config, overrides)
        config, overrides = choice.config, [*overrides, *choice.overrides]
    world_size, context, rows = config.plan.world_size, config.model.context, config.train.rows_per_step
    layout = planned_layout(config)
    with torch.device("meta"):
        model = build_model(config.model)
    with saying_nothing():
        memory = memory_per_rank(config, model, layout)
    in_host_memory: list[MemoryItem] = []
    if config.checkpoint.asynchronous is not False:
        copies = copies_to_save(model, config.optim.ema_decay is not None, world_size)
        (in_host_memory if layout.on_gpu else memory).append(copies)
    flops_per_token = model.flops_per_token(context)
    steps = config.train.stop_at or config.train.steps
    total_tokens = steps * rows * context
    sizes = planned_rows(config) if _is_text_chosen(config, overrides) else {}
    source = config.model.source_of_starts(config.scale.name)
    is_free = model.constraint == "free"
    rules = vars(config.model.init) if is_free else dict.fromkeys(KINDS, "each row is then brought to length 1")
    plan: dict[str, Any] = {
        "model": config.model.name,
        "scale": config.scale.name,
        "vocab_size": config.model.vocab_size,
        "context": context,
        "parameters": count_parameters(model),
        "init": {kind: {"rule": rules[kind], "std": stds} for kind, stds in standard_deviations(model).items()},
        "flops_per_token": {"non_causal": flops_per_token, "causal": model.flops_per_token(context, causal=True)},
        "rows_per_step": rows,
        "tokens_per_step": rows * context,
        "micro_rows": layout.micro_rows,
        "accumulation_steps": layout.micro_batches,
        "steps": steps,
        "total_tokens": total_tokens,
        "tokens_per_parameter": total_tokens / model.n_params(),
        "epochs": {
            name: None if size is None else {"epochs": size.epochs(steps * rows), "exact": size.exact}
            for name, size in sizes.items()
        },
        "lr": config.optim.lr,
        "notes": [
            *([f"lr from {config.optim.lr_source}"] if config.optim.lr_source else []),
            *([f"initialisation from {source}"] if source else []),
            *(f"warning: {warning}" for warning in many_epochs(sizes, config)),
        ],
        "total_flops": total_tokens * flops_per_token,
        "world_size": world_size,
        "parallel": layout.kind,
        "device": "cuda" if layout.on_gpu else "cpu",
        "precision": str(layout.dtype).removeprefix("torch."),
        "compiled": layout.compiled,
        "launch": launch_line(config, overrides, options),
        "memory_per_rank": {
            "total": sum(item.bytes for item in memory),
            "items": [asdict(item) for item in memory],
            "in_host_memory": [asdict(item) for item in in_host_memory],
        },
    }
    if choice is not None:
        plan["choice"] = {"device": config.plan.device, "overrides": choice.overrides}
        plan["choice"] |= {"predicted": choice.predicted, "limit": choice.limit}
    if config.plan.flops_per_s is not None:
        plan["flops_per_s"] = config.plan.flops_per_s
        plan["hours"] = plan["total_flops"] / (config.plan.flops_per_s * world_size) / 3600
    return plan


def planned_vocabulary(config: Config) -> int:
    """The vocabulary size in `train`, without reading text. Raises DataError if a file is missing."""
    return tokenizer_size(config) + config.data.own_ids


def tokenizer_size(config: Config) -> int:
    if config.data.kind == "tokens":
        directory = Path(config.data.path or "").expanduser()
        if not directory.is_dir():
            problem = f"data.path={config.data.path}: not a directory, so the vocabulary of its tokens is unknown"
            raise DataError(f"{problem}. Name the directory, or say the number with model.vocab_size.")
        if (directory / MANIFEST).exists():
            return int(read_manifest(directory)["tokenizer"]["vocab_size"])
    tokenizer = config.tokenizer
    if (known := known_vocabulary(tokenizer.kind)) is not None:  # no download of its file
        return known
    if tokenizer.path is None and config.data.kind != "tokens":
        return tokenizer.vocab_size  # `train` would make a SentencePiece model of this size, or at most so many words
    return load_tokenizer(tokenizer).vocab_size


def count_parameters(model: Decoder) -> dict[str, int]:
    """The number of learned values by part; `non_embedding` leaves out embeddings, output and learned positions."""
    parts = Counter({"embedding": 0, "output": 0, "attention": 0, "mlp": 0, "vectors": 0})
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            parts["vectors"] += parameter.numel()
        else:
            path = name.split(".")  # layers.{i}.PART.{matrix}; outside of the blocks PART is the first word
            parts[path[2] if path[1:2] and path[1].isdigit() else path[0]] += parameter.numel()
    total = model.n_params()
    return {**parts, "total": total, "non_embedding": total - sum(parts[table] for table in TABLES)}


def describe_plan(plan: dict[str, Any]) -> str:
    """The plan as text. Each number is marked as exact or an estimate, with its formula."""
    ranks = f"{plan['world_size']} rank{'s' if plan['world_size'] > 1 else ''}"
    split = f"{ranks} x {plan['accumulation_steps']} accumulated x {plan['micro_rows']} rows x {plan['context']:,}"
    lines = [
        f"{plan['model']} {plan['scale']}, vocabulary {plan['vocab_size']:,}, context {plan['context']:,}",
        "",
        "parameters (exact)",
        *(_row(name.replace("_", "-"), f"{n:,}") for name, n in plan["parameters"].items()),
        "",
        "standard deviations at step 0 (model.init.*, exact)",
        *(_row(kind, ", ".join(f"{std:.4g}" for std in x["std"]), str(x["rule"])) for kind, x in plan["init"].items()),
        "",
        "FLOPs per token, forward and backward (exact count of the matrix products)",
        _row("non-causal", f"{plan['flops_per_token']['non_causal']:,}", "the usual convention; MFU and hours use it"),
        _row("causal", f"{plan['flops_per_token']['causal']:,}", "without the half of attention that is masked"),
        "",
        "steps (exact)",
        _row("tokens per step", f"{plan['tokens_per_step']:,}", split),
        _row("steps", f"{plan['steps']:,}"),
        _row("tokens in all", f"{plan['total_tokens']:,}", f"{plan['tokens_per_parameter']:.3g} per parameter"),
        *(_row(f"epochs{f' of {name}' if name else ''}", *_epochs(known)) for name, known in plan["epochs"].items()),
        _row("learning rate", f"{plan['lr']:g}"),
        "",
        f"memory of a rank: {plan['parallel']} on {ranks}, {plan['device']}, {plan['precision']}, "
        f"{'compiled' if plan['compiled'] else 'eager'} (bytes by the formula)",
    ]
    lines += [_memory_row(item) for item in plan["memory_per_rank"]["items"]]
    total, note = plan["memory_per_rank"]["total"] / 2**30, "driver, NCCL and allocator take 1 to 3 GiB more on GPUs"
    lines.append(_row("in all", f"{total:,.3f} GiB", f"estimate; {note}"))
    lines += [_memory_row(item) + ", in the host's memory" for item in plan["memory_per_rank"]["in_host_memory"]]
    if "choice" in plan:
        lines += ["", *_choice(plan["choice"])]
    if "hours" in plan:
        note = f"estimate: {plan['total_flops']:.3g} FLOPs / ({ranks} x {plan['flops_per_s']:.3g} FLOP/s)"
        lines += ["", "time", _row("hours", f"{plan['hours']:,.2f}", note)]
    else:
        lines += ["", "Set plan.flops_per_s to the FLOP/s that one rank achieves to see the hours."]
    lines += ["", "start it with", f"  {plan['launch']}"]
    if plan["notes"]:
        lines += ["", *plan["notes"]]
    return "\n".join(lines)


def _choice(choice: dict[str, Any]) -> list[str]:
    predicted, limit = (f"{choice[name] / 2**30:,.3f} GiB" for name in ("predicted", "limit"))
    return [
        f"chosen for {choice['device']} (docs/benchmarks/memory.md says how)",
        *(f"  {one}" for one in choice["overrides"] or ["nothing: the arguments say all of it"]),
        _row("memory of a rank", predicted, f"estimate; of {limit} that may be planned"),
    ]


def _memory_row(item: dict[str, Any]) -> str:
    note = f"{'exact' if item['exact'] else 'estimate'}: {item['formula']}"
    return _row(item["name"], f"{item['bytes'] / 2**30:,.3f} GiB", note)


def _epochs(known: dict[str, Any] | None) -> tuple[str, str]:
    if known is None:
        return "unknown", "the size of the text is known when it is opened"
    return f"{known['epochs']:,.3f}", "of the training text" if known["exact"] else "estimate, by the size of the text"


def _row(name: str, value: str, note: str = "") -> str:
    return f"  {name:<20}{value:>20}  {note}".rstrip()
