"""The GPUs: their number, abilities, health and other users, a test calculation, and the run's kernels on them."""

import csv
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ngpt_train.config.schema import Config
from ngpt_train.distributed.first_contact import first_contact
from ngpt_train.distributed.layouts import resolve_precision
from ngpt_train.distributed.world import World, resolve_device
from ngpt_train.doctor.bounded import Report, first_line
from ngpt_train.doctor.findings import (
    CONFIG,
    OK,
    WARNING,
    WRONG,
    Answer,
    Finding,
    Place,
    differences,
    gb,
    of_each,
    unchecked,
)
from ngpt_train.kernels import attention, dispatch, flash
from ngpt_train.kernels.check.kernel_findings import nvidia_smi
from ngpt_train.training.feed import resolve_micro_rows

# nvidia-smi's fields, by our names. They differ between drivers.
FIELDS = {
    "uuid": "uuid",
    "driver": "driver_version",
    "ecc": "ecc.errors.uncorrected.volatile.total",
    "remapping": "remapped_rows.pending",
    "hot": "clocks_event_reasons.hw_thermal_slowdown",
    "hot, by software": "clocks_event_reasons.sw_thermal_slowdown",
    "power brake": "clocks_event_reasons.hw_power_brake_slowdown",
    "temperature": "temperature.gpu",
    "PCIe width": "pcie.link.width.current",
    "PCIe widest": "pcie.link.width.max",
}
SLOWED = {"hot": "the heat of its chip", "hot, by software": "its temperature", "power brake": "the power supply"}
TYPE = "the device type"
ALIKE = dict.fromkeys((TYPE, "the GPU", "the GPU's memory"), "use like machines for one run")
ALIKE["the driver"] = "install the same driver on all hosts"
BF16 = (8, 0)  # compute capability of the oldest GPUs with bf16: Ampere
KERNEL_REMEDY = "update torch, triton or the driver, and tell the authors; until then plain PyTorch runs in its place"
MOST_OF_MEMORY = 0.92  # the share for a plan; driver, NCCL and fragments need the rest


def look(config: Config, local_rank: int, report: Report) -> None:
    """Asks nvidia-smi about all GPUs of the host, then torch about this rank's."""
    report(smi=smi(FIELDS), smi_processes=processes())
    report(cuda_build=torch.version.cuda, visible=os.environ.get("CUDA_VISIBLE_DEVICES"))
    report(available=torch.cuda.is_available(), count=torch.cuda.device_count())
    device = resolve_device(config.train.device, local_rank)  # raises what `train` raises
    report(device=str(device), kernels=dispatch.why_no_triton())
    precision = resolve_precision(config.train.precision, device.type)
    report(precision=str(precision).removeprefix("torch."))
    try:
        dispatch.choose(config.kernels.kind)
        attention.choose(config.kernels.attention, device, config.model.d_head, precision)
    except ValueError as error:
        report(kernels_refused=str(error))
    try:
        report(flash=f"version {flash.find(device, config.model.d_head, precision).version}")
    except flash.NoKernel as error:
        report(no_flash=str(error))
    if device.type == "cuda":
        torch.cuda.set_device(device)
        properties = torch.cuda.get_device_properties(device)
        free, total = torch.cuda.mem_get_info(device)
        report(name=properties.name, capability=[properties.major, properties.minor], free=free, memory=total)
        report(gpu=str(getattr(properties, "uuid", "")))
    report(arithmetic=arithmetic(device, precision))


def smi(fields: Mapping[str, str]) -> list[dict[str, str]] | None:
    """Asks nvidia-smi for all `fields`, or one by one if it refuses. Returns a dict for each GPU of the host; None
    without an answer."""
    if lines := _table(f"--query-gpu={','.join(fields.values())}"):
        return [dict(zip(fields, line, strict=False)) for line in lines]
    gpus: list[dict[str, str]] = []
    for name, field in fields.items() if shutil.which("nvidia-smi") else []:
        for number, line in enumerate(_table(f"--query-gpu={field}")):
            gpus += [{} for _ in range(number + 1 - len(gpus))]
            gpus[number][name] = line[0]
    return gpus or None


def processes() -> list[dict[str, str]]:
    """The processes on the GPUs of this host, each with its GPU's uuid. Names from other containers may be missing."""
    names = ("uuid", "pid", "name", "memory")
    lines = _table("--query-compute-apps=gpu_uuid,pid,process_name,used_memory")
    return [dict(zip(names, line, strict=False)) for line in lines]


def _table(query: str) -> list[list[str]]:
    lines = csv.reader(nvidia_smi(query, "--format=csv,noheader,nounits").splitlines())
    return [[field.strip() for field in line] for line in lines if line]


def arithmetic(device: torch.device, precision: torch.dtype) -> str | None:
    """Multiplies matrices of small integers, which is exact. Returns the error, or None."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-2, 3, (256, 256), generator=generator) for _ in range(2))
    for dtype in (torch.float32, precision):
        found = (a.to(device, dtype) @ b.to(device, dtype)).cpu()
        if not torch.equal(found, (a.double() @ b.double()).to(dtype)):
            return f"a product of matrices in {dtype} is wrong".replace("torch.", "")
    return None


def judge(config: Config, answers: Sequence[Answer], memory_of_a_rank: int | None) -> Iterator[Finding]:
    """The device of each rank and its faults. memory_of_a_rank: in bytes, as `plan` expects."""
    yield from of_each(answers, lambda answer: _device(config, answer))
    yield from of_each(answers, lambda answer: _gpu(answer, memory_of_a_rank))
    yield from _shared(answers)
    yield from of_each(answers, lambda answer: _kernels(config, answer))
    of_all = [Answer(answer.place, dict(_compared(answer.facts))) for answer in answers]
    for name, remedy in ALIKE.items():
        yield from differences(of_all, name, "devices", WRONG if name == TYPE else WARNING, remedy)


def _compared(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The facts for ALIKE."""
    if "device" in facts:
        yield TYPE, facts["device"].partition(":")[0]
    if "name" in facts:
        yield from (("the GPU", facts["name"]), ("the GPU's memory", gb(facts["memory"])))
    if facts.get("smi"):
        yield "the driver", facts["smi"][0].get("driver")


def _device(config: Config, answer: Answer) -> Iterator[Finding]:
    facts, device = answer.facts, answer.facts.get("device")
    gpus = len(facts.get("smi") or [])
    visible, count = facts.get("visible"), facts.get("count", 0)
    hidden = f"CUDA_VISIBLE_DEVICES={visible} hides {gpus - count} of {gpus} GPUs"
    is_hidden = visible is not None and gpus > count
    if answer.refusal:
        found = f"{answer.refusal} ({hidden})" if is_hidden else answer.refusal
        remedy = "unset CUDA_VISIBLE_DEVICES" if is_hidden else "as it says"
        yield Finding("devices", found, WRONG, remedy, code=CONFIG)
    elif answer.problem:
        remedy = "run `nvidia-smi` and `python -c 'import torch; print(torch.zeros(1).cuda())'` there"
        yield unchecked("devices", answer.problem, remedy, WRONG if device is None else WARNING)
    if device is None:
        return
    verdict, remedy = WARNING, ""
    if device.startswith("cuda"):
        verdict, found = OK, f"{device}: {facts.get('name')}, {gb(facts.get('memory', 0))}"
    elif config.train.device == "cpu":
        verdict, found = OK, "the CPU, as train.device=cpu says"
    elif not gpus or count:
        verdict, found = OK, "no GPU, so the run takes the CPU"
    elif visible is not None:
        found, remedy = hidden, "unset CUDA_VISIBLE_DEVICES, or set train.device=cpu"
    elif facts.get("cuda_build") is None:
        found = f"nvidia-smi lists {gpus} GPUs, but this torch is built for CPUs"
        remedy = "install the build of torch for CUDA"
    else:
        found = f"nvidia-smi lists {gpus} GPUs, but torch finds none"
        remedy = f"install a driver for CUDA {facts['cuda_build']}, or another build of torch"
    yield Finding("devices", found if verdict == OK else f"{found}, so the run takes the CPU", verdict, remedy)


def _gpu(answer: Answer, memory_of_a_rank: int | None) -> Iterator[Finding]:
    facts = answer.facts
    if wrong := facts.get("arithmetic"):
        yield Finding("devices", f"{facts['device']}: {wrong}", WRONG, "take this device out of use")
    if "gpu" not in facts:
        return
    capability = tuple(facts["capability"])
    named = f"compute capability {capability[0]}.{capability[1]}"
    if capability < dispatch.OLDEST:
        found = f"{named}, older than Ampere: no Triton kernels, the model runs in plain PyTorch"
        yield Finding("GPU", found, WARNING, "expect a slower run, or use an A100 or newer")
    else:
        yield Finding("GPU", f"{named}: bf16, Triton's kernels")
    if capability < BF16 and facts["precision"] == "bfloat16":
        yield Finding("GPU", f"{named} computes no bf16 in hardware", WARNING, "set train.precision=fp16 or fp32")
    memory, free = facts["memory"], facts["free"]
    if memory_of_a_rank is not None:
        found = f"{gb(memory)}, and `plan` expects {gb(memory_of_a_rank)} of a rank"
        verdict = WARNING if memory_of_a_rank > MOST_OF_MEMORY * memory else OK
        remedy = "smaller train.micro_rows, train.activation_checkpointing=full, parallel=fsdp, or more GPUs"
        yield Finding("GPU memory", found, verdict, remedy)

    def of_this(entries: Sequence[dict[str, str]] | None) -> list[dict[str, str]]:
        return [entry for entry in entries or [] if facts["gpu"] and facts["gpu"] in entry.get("uuid", "")]

    for gpu in of_this(facts.get("smi")):
        yield from _health(gpu)
    if others := of_this(facts.get("smi_processes")):
        who = ", ".join(f"{x.get('name')} (process {x.get('pid')}, {x.get('memory')} MiB)" for x in others[:3])
        yield Finding("GPU", f"others compute on it: {who}", WARNING, "end them, or choose another GPU")
    elif free < 0.9 * memory:
        found = f"{gb(memory - free)} of its {gb(memory)} are taken, by processes that nvidia-smi does not show"
        yield Finding("GPU", found, WARNING, "look on the host, outside of the container")


def _health(gpu: Mapping[str, str]) -> Iterator[Finding]:
    if gpu.get("ecc", "0").isdecimal() and int(gpu.get("ecc", 0)):
        found = f"{gpu['ecc']} uncorrected errors of its memory since the driver was loaded"
        yield Finding("GPU", found, WRONG, "take it out of use: nvidia-smi -r, and a test of the hardware")
    if gpu.get("remapping", "").lower() in ("yes", "1"):
        yield Finding("GPU", "rows of its memory wait to be remapped", WARNING, "reset the GPU: nvidia-smi -r")
    for name, cause in SLOWED.items():
        if gpu.get(name) == "Active":
            found = f"its clock is lowered by {cause}, at {gpu.get('temperature', '?')} degrees"
            yield Finding("GPU", found, WARNING, "look after cooling and power of this host")
    width, widest = gpu.get("PCIe width", ""), gpu.get("PCIe widest", "")
    if width.isdecimal() and widest.isdecimal() and int(width) < int(widest):
        found = f"PCIe has {width} of {widest} lanes"
        yield Finding("GPU", found, WARNING, "look at the slot: a card that sits badly, or a shared slot")


def _shared(answers: Sequence[Answer]) -> Iterator[Finding]:
    """Several ranks of a host on one GPU."""
    by_gpu: dict[tuple[int, str], list[Place]] = {}
    for answer in answers:
        if answer.facts.get("gpu"):
            by_gpu.setdefault((answer.place.node, answer.facts["gpu"]), []).append(answer.place)
    for places in by_gpu.values():
        if len(places) > 1:
            remedy = "start one rank for each GPU, and let torchrun set LOCAL_RANK"
            yield Finding("devices", f"{len(places)} ranks use one GPU", WRONG, remedy, tuple(places))


def _kernels(config: Config, answer: Answer) -> Iterator[Finding]:
    facts = answer.facts
    if refused := facts.get("kernels_refused"):
        yield Finding("kernels", refused, WRONG, "choose what runs here, as it says", code=CONFIG)
    elif "kernels" in facts:
        reason = f" ({facts['kernels']})" if facts["kernels"] else ""
        found = f"plain PyTorch{reason}" if reason or config.kernels.kind == "torch" else "Triton's"
        yield Finding("kernels", f"{found} (kernels={config.kernels.kind})")
    if "flash" in facts:
        yield Finding("flash-attn", facts["flash"])
    elif "no_flash" in facts:
        verdict = WRONG if config.kernels.attention == "flash_attn" else OK
        found = f"not used: {first_line(facts['no_flash'])}"
        yield Finding("flash-attn", found, verdict, "set kernels.attention=auto")


def look_at_kernels(config: Config, place: Place, vocabulary: int, report: Report) -> None:
    """Checks the run's kernels on the model's own shapes, as `train` does before its first step, on the first rank of
    each host. `train` reuses the result, from data.cache."""
    device = resolve_device(config.train.device, place.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    micro_rows = resolve_micro_rows(config, place.size)
    config = replace(config, model=replace(config.model, vocab_size=vocabulary))
    contact = first_contact(config, World(0, 1, place.local_rank, device), micro_rows)
    if contact is not None:
        report(off=contact.off, slower=contact.slower, calls=len(contact.calls), name=contact.device)


def judge_kernels(answer: Answer) -> Iterator[Finding]:
    """The kernels of one host. A kernel that is off here is off on all hosts."""
    facts = answer.facts
    if answer.refusal:
        yield Finding("kernels", answer.refusal, WRONG, "choose what runs here, as it says", code=CONFIG)
    elif answer.problem:
        yield unchecked("kernels", answer.problem, "`train` checks them again; kernels=torch does without them")
    for name, problem in facts.get("off", {}).items():
        yield Finding("kernels", f"{name} is off: {problem}", WARNING, KERNEL_REMEDY)
    if "off" in facts and not facts["off"]:
        slower = f"; plain PyTorch is faster than {', '.join(facts['slower'])}" if facts["slower"] else ""
        yield Finding("kernels", f"right on {facts['name']}, in {facts['calls']} calls of this model{slower}")
