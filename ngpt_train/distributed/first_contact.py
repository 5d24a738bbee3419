"""Checks every kernel of a run on the model's own shapes, before the first step on a GPU.

A pass over the model on torch's meta device records the kernels and their shapes (`kernels/check/calls.py`). On each
host a separate process compares the kernels with their formulas and times them against plain PyTorch (`__main__.py`
there). `data.cache`/kernels keeps the findings (`kernel_findings.py`). A kernel that is wrong on one host is off on all
ranks, so that all run the same program.
"""

from __future__ import annotations

import logging
import socket
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ngpt_train.core.constants import Constraint
from ngpt_train.core.errors import ConfigError
from ngpt_train.distributed import layouts
from ngpt_train.distributed.compilation import keep_compiled
from ngpt_train.kernels import dispatch
from ngpt_train.kernels.adam import unsupported
from ngpt_train.kernels.check.calls import DESCRIBE, Call, of_adam, recorded
from ngpt_train.kernels.check.cases import OF_ATTENTION
from ngpt_train.kernels.check.kernel_findings import Finding, Kept, Request, as_json, findings
from ngpt_train.models import build_model
from ngpt_train.models.layers.linear import cast_linears

if TYPE_CHECKING:
    from ngpt_train.config.schema import Config
    from ngpt_train.distributed.world import World
    from ngpt_train.models.decoder import Decoder

logger = logging.getLogger(__name__)

Stored = Mapping[str, Any] | None  # `vars` of the run's last Contact
TIE = 0.02  # A kernel stays unless plain PyTorch needs this much less time: ties would change numbers for nothing.


@dataclass
class Contact:
    """The kernels that are off, and the findings. The same on all ranks. Its `vars` are an entry of run.json."""

    device: str
    choose: str  # kernels.choose
    off: dict[str, str] = field(default_factory=dict)  # off[kernel]: its fault on this machine
    slower: dict[str, str] = field(default_factory=dict)  # slower[kernel]: times, now or at the start of the run
    calls: list[dict[str, Any]] = field(default_factory=list)  # each call with its finding
    notes: list[str] = field(default_factory=list)  # lines for the log


def first_contact(config: Config, world: World, micro_rows: int, stored: Stored = None) -> Contact | None:
    """Checks the kernels, once, on all ranks, before the model is built, and switches off faulty and slow ones. None
    without a GPU. stored: `vars` of the run's last Contact; a resume keeps its choices by speed. Raises ConfigError if
    a kernel required by the config is faulty."""
    dispatch.switch_off({})
    if not on_gpu(world.device):
        return None
    precision = layouts.resolve_precision(config.train.precision, world.device.type)
    layouts.choose_kernels(config, world.device, precision)
    compiled = layouts.resolve_compile(config.train.compile, world.device.type)
    if compiled:
        keep_compiled(config)
    contact = Contact(device_name(world.device), config.kernels.choose)
    try:
        calls = calls_of(config, world, micro_rows, precision)
    except Exception as error:  # a plug-in's model may do anything
        logger.debug("the model could not be traced", exc_info=True)
        problem = f"the model's calls could not be recorded ({type(error).__name__}: {error}), so it was not checked"
        contact.off = dict.fromkeys([*DESCRIBE, "adam"], problem)
        calls = Counter()
    request = Request(
        device=str(world.device),
        dtype=str(precision).removeprefix("torch."),
        attention=config.kernels.attention,
        d_head=config.model.d_head,
        compiled=compiled,
        times=config.kernels.kind == "auto" and config.kernels.choose == "measured",
    )
    found = on_all_hosts(world, list(calls), request, Path(config.data.cache).expanduser() / "kernels")
    judge(contact, calls, found, request.times, stored)
    insist(config, contact)
    dispatch.switch_off(contact.off | contact.slower)
    return contact


def on_gpu(device: torch.device) -> bool:
    """True if the kernels run on this device. Tests replace it, to take Triton's interpreter for a GPU."""
    return device.type == "cuda"


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def calls_of(config: Config, world: World, micro_rows: int, precision: torch.dtype) -> Counter[Call]:
    """The kernel calls in a step of this run, and their number in a micro batch."""
    meta = torch.device("meta")
    with meta:
        model = build_model(config.model)
    model.compute_dtype = None if precision == torch.float32 else precision
    model.z_loss, model.label_smoothing = config.optim.z_loss, config.optim.label_smoothing
    model.train()
    tokens = torch.zeros(micro_rows, config.model.context, dtype=torch.int64, device=meta)
    doc_ids = tokens if config.data.document_mask else None
    seeds = tokens[:, 0] if config.model.uses_dropout else None
    has_encoder = config.model.source_length(config.model.context) > 0
    kernels = "torch" if config.kernels.kind == "torch" or dispatch.why_no_triton() else "triton"
    with dispatch.chosen(kernels), recorded(documents=not has_encoder) as calls:
        model(tokens, tokens, doc_ids, seeds)
    return calls + adam_calls(config, world, model) if kernels == "triton" else calls


def adam_calls(config: Config, world: World, model: Decoder) -> Counter[Call]:
    """The calls of Adam's kernel, one for each width and kind of matrix, with the most rows."""
    kind = layouts.resolve_kind(config.parallel.kind, world.size, world.device.type, world.local_size)
    shards = layouts.resolve_shard(config.parallel, kind, world.size, world.local_size) or 1
    parameters = dict(model.named_parameters())
    matrices = [parameter for parameter in parameters.values() if parameter.ndim == 2]
    others = config.optim.matrix_step is not None or config.optim.gate_power is not None
    if others or any(unsupported(matrix) for matrix in matrices):
        return Counter()
    casts = model.compute_dtype == torch.bfloat16 and kind not in ("fsdp", "hsdp")
    copied = {id(linear.matrix) for linear in cast_linears(model) if casts}
    rows: dict[tuple[int, Constraint, bool, float], int] = {}
    for group in model.parameter_groups():
        decay = config.optim.weight_decay if group.decay else 0.0
        for name in group.names:
            matrix = parameters[name]
            if matrix.ndim == 2:
                key = (matrix.shape[1], group.constraint, id(matrix) in copied, decay)
                rows[key] = max(rows.get(key, 0), -(-matrix.shape[0] // shards))
    beta1, beta2 = config.optim.betas
    return Counter(
        of_adam(n, d, constraint, copies, (beta1, beta2), config.optim.eps, decay)
        for (d, constraint, copies, decay), n in rows.items()
    )


def on_all_hosts(world: World, calls: list[Call], request: Request, cache: Path) -> list[Finding]:
    """The finding of each call. A problem on any host counts. Times are of rank 0's host."""

    def of_host() -> list[Finding] | None:
        return with_cache(calls, request, cache, world.device) if world.local_rank == 0 else None

    here = world.on_all_without_timeout(of_host)
    hosts = [(host, found) for host, found in world.gather((socket.gethostname(), here)) if found is not None]
    merged = hosts[0][1]
    for host, found in hosts[1:]:
        for one, other in zip(merged, found, strict=True):
            if one.problem is None and other.problem is not None:
                one.problem = f"on {host}: {other.problem}"
    return merged


def with_cache(calls: list[Call], request: Request, cache: Path, device: torch.device) -> list[Finding]:
    """The findings of this host. A process checks the calls without a kept finding."""
    kept = Kept(cache, device, request)
    known = {call: found for call in calls if (found := kept.get(call)) is not None}
    new = [call for call in calls if call not in known]
    if new:
        logger.info("kernels: %d of %d calls are checked, once for this machine and these shapes", len(new), len(calls))
        for call, found in zip(new, findings(new, request), strict=True):
            known[call] = found
            kept.put(call, found, timeable=call.kernel not in OF_ATTENTION)
    return [known[call] for call in calls]


def judge(contact: Contact, calls: Counter[Call], found: list[Finding], timed: bool, stored: Stored) -> None:
    """Fills in `off`, `slower`, `calls` and `notes` of `contact`. timed: True if the calls were timed."""
    by_kernel: dict[str, list[tuple[Call, int, Finding]]] = {}
    for (call, count), finding in zip(calls.items(), found, strict=True):
        by_kernel.setdefault(call.kernel, []).append((call, count, finding))
        contact.calls.append({"call": str(call), "count": count} | as_json(finding))
    before = stored or {}
    keeps = timed and before.get("choose") == "measured"
    for name, members in by_kernel.items():
        if wrong := [f"{finding.problem} ({call})" for call, _, finding in members if finding.problem is not None]:
            contact.off[name] = wrong[0]
            continue
        times = [(count, finding.us, finding.plain_us) for _, count, finding in members]
        measured = all(us is not None and plain is not None for _, us, plain in times)
        us, plain = (sum(n * (pair[which] or 0.0) for n, *pair in times) for which in (0, 1))
        beside = f"{us:.0f} us, plain PyTorch {plain:.0f} us" if measured else "not timed"
        if keeps:
            if name in before.get("slower", {}):
                contact.slower[name] = f"plain PyTorch was faster as this run began (now: {beside})"
        elif timed and measured and plain < (1 - TIE) * us:
            contact.slower[name] = beside
        error = max(finding.error or 0.0 for _, _, finding in members)
        runs = "plain PyTorch" if name in contact.slower else "the kernel"
        told = f", {beside}: {runs} runs" if timed and name not in OF_ATTENTION else ""
        contact.notes.append(f"kernel {name} is right (error {error:.0e}){told}")
    if keeps and before.get("device") != contact.device:
        contact.notes.append(
            f"warning: kernels were chosen on {before.get('device')}, and this is {contact.device}; the run keeps its "
            "choice, so that its numbers go on as they began"
        )
    for name, problem in contact.off.items():
        contact.notes.append(f"warning: KERNEL {name} IS OFF, plain PyTorch runs instead: {problem}")


def insist(config: Config, contact: Contact) -> None:
    """Raises ConfigError if a kernel required by the config is off."""
    fused = [name for name in contact.off if name not in OF_ATTENTION]
    if config.kernels.kind == "triton" and fused:
        raise ConfigError(
            f"kernels=triton: on {contact.device} the kernel {fused[0]} must not run: {contact.off[fused[0]]}. "
            "Use kernels=auto, which replaces a faulty kernel by plain PyTorch, or kernels=torch"
        )
    of_attention = [name for name in contact.off if name in OF_ATTENTION]
    if config.kernels.attention in ("flash_attn", "flex") and of_attention:
        raise ConfigError(
            f"kernels.attention={config.kernels.attention}: on {contact.device} it must not run: "
            f"{contact.off[of_attention[0]]}. Use kernels.attention=auto"
        )
