"""The GPUs: which there are, what they can, who else uses them, and whether they calculate."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ngpt_train.config.schema import Config
from ngpt_train.distributed import resolve_device, resolve_precision
from ngpt_train.doctor.bounded import Report, first_line
from ngpt_train.doctor.findings import (
    CONFIG,
    OK,
    WARNING,
    WRONG,
    Answer,
    Finding,
    different,
    gb,
    in_words,
    of_each,
    unchecked,
)
from ngpt_train.kernels import attention, dispatch, flash

SMI_SECONDS = 10
# What nvidia-smi is asked, one by one where it does not know all of them: its fields differ between drivers.
FIELDS = {
    "uuid": "uuid",
    "driver": "driver_version",
    "ecc": "ecc.errors.uncorrected.volatile.total",
    "remapping": "remapped_rows.pending",
    "hot": "clocks_event_reasons.hw_thermal_slowdown",
    "hot, by software": "clocks_event_reasons.sw_thermal_slowdown",
    "power brake": "clocks_event_reasons.hw_power_brake_slowdown",
    "temperature": "temperature.gpu",
    "PCIe generation": "pcie.link.gen.max",
    "PCIe width": "pcie.link.width.current",
    "PCIe widest": "pcie.link.width.max",
}
SLOWED = {"hot": "the heat of its chip", "hot, by software": "its temperature", "power brake": "the power supply"}
BF16 = (8, 0)  # compute capability of the oldest GPUs with bf16: Ampere
MOST_OF_MEMORY = 0.92  # that a plan may take: driver, NCCL and fragments need the rest


def look(config: Config, local_rank: int, report: Report) -> None:
    """What nvidia-smi says of all GPUs of the host, then what torch says of this rank's."""
    report(smi=smi(list(FIELDS.values()), list(FIELDS)), smi_processes=processes())
    report(cuda_build=torch.version.cuda, visible=os.environ.get("CUDA_VISIBLE_DEVICES"))
    report(available=torch.cuda.is_available(), count=torch.cuda.device_count())
    device = resolve_device(config.train.device, local_rank)  # raises what `train` raises
    report(device=str(device), kernels=dispatch.why_no_triton())
    precision = resolve_precision(config.train.precision, device.type)
    d_head = config.model.d_model // config.model.n_heads
    report(precision=str(precision).removeprefix("torch."))
    try:
        dispatch.choose(config.kernels.kind)
        attention.choose(config.kernels.attention, device, d_head, precision)
    except ValueError as error:
        report(kernels_refused=str(error))
    try:
        report(flash=f"version {flash.find(device, d_head, precision).version}")
    except flash.NoKernel as error:
        report(no_flash=str(error))
    if device.type == "cuda":
        torch.cuda.set_device(device)
        properties = torch.cuda.get_device_properties(device)
        free, total = torch.cuda.mem_get_info(device)
        report(name=properties.name, capability=[properties.major, properties.minor], free=free, memory=total)
        report(gpu=str(getattr(properties, "uuid", "")))
    report(arithmetic=arithmetic(device, precision))


def smi(fields: Sequence[str], names: Sequence[str]) -> list[dict[str, str]] | None:
    """What nvidia-smi answers for each GPU of the host, by name; None without nvidia-smi or where it fails."""
    if shutil.which("nvidia-smi") is None:
        return None
    lines = _smi(f"--query-gpu={','.join(fields)}")
    if lines is not None:
        return [dict(zip(names, line, strict=False)) for line in lines]
    gpus: list[dict[str, str]] = []
    for field, name in zip(fields, names, strict=True):
        for number, line in enumerate(_smi(f"--query-gpu={field}") or []):
            gpus += [{} for _ in range(number + 1 - len(gpus))]
            gpus[number][name] = line[0]
    return gpus or None


def processes() -> list[dict[str, str]]:
    """Who computes on the GPUs of this host, by uuid; of other containers nvidia-smi may not know the names."""
    lines = _smi("--query-compute-apps=gpu_uuid,pid,process_name,used_memory") if shutil.which("nvidia-smi") else None
    return [dict(zip(("uuid", "pid", "name", "memory"), line, strict=False)) for line in lines or []]


def _smi(query: str) -> list[list[str]] | None:
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=SMI_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return None
    return [[field.strip() for field in line] for line in csv.reader(done.stdout.splitlines()) if line]


def arithmetic(device: torch.device, precision: torch.dtype) -> str | None:
    """What is wrong with a product of matrices of whole numbers, which has no rounding; None: nothing."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-2, 3, (256, 256), generator=generator) for _ in range(2))
    expected = (a.double() @ b.double()).float()
    found = (a.to(device, torch.float32) @ b.to(device, torch.float32)).cpu()
    if not torch.equal(found, expected):
        return "a product of matrices in fp32 is wrong"
    if precision != torch.float32:
        rounded = (a.to(device, precision) @ b.to(device, precision)).cpu()
        if not torch.equal(rounded, expected.to(precision)):
            return f"a product of matrices in {precision} is wrong".replace("torch.", "")
    return None


def judge(config: Config, answers: Sequence[Answer], memory_of_a_rank: int | None) -> Iterator[Finding]:
    """The device of each rank and what it may lack. memory_of_a_rank: bytes that `plan` expects."""
    yield from of_each(answers, lambda answer: _device(config, answer))
    yield from of_each(answers, lambda answer: _gpu(answer, memory_of_a_rank))
    yield from _shared(answers)
    yield from of_each(answers, lambda answer: _kernels(config, answer))
    everybody = [answer.place for answer in answers]
    for name in ("device type", "name", "memory", "driver"):
        facts = [Answer(a.place, {name: _said(a.facts, name)}) for a in answers if _said(a.facts, name) is not None]
        usual, others = different(facts, name)
        for value, places in others.items():
            rest = in_words([place for place in everybody if place not in places], everybody)
            grave = name == "device type"
            remedy = "use like machines for one run" if name != "driver" else "install the same driver on all hosts"
            words = {"name": "the GPU", "memory": "the GPU's memory"}.get(name, f"the {name}")
            found = f"{words} is {value} here, and {usual} on {rest}"
            yield Finding("devices", found, WRONG if grave else WARNING, remedy, tuple(places))


def _said(facts: dict[str, Any], name: str) -> Any:
    if name == "device type":
        return facts["device"].partition(":")[0] if "device" in facts else None
    if name == "driver":
        return facts["smi"][0].get("driver") if facts.get("smi") else None
    value = facts.get(name)
    return gb(value) if name == "memory" and value is not None else value


def _device(config: Config, answer: Answer) -> Iterator[Finding]:
    facts = answer.facts
    gpus = len(facts.get("smi") or [])
    visible, count = facts.get("visible"), facts.get("count", 0)
    hidden = f"CUDA_VISIBLE_DEVICES={visible} hides {gpus - count} of {gpus} GPUs"
    if answer.problem:
        grave = answer.problem.startswith("ConfigError") or "device" not in facts
        if answer.problem.startswith("ConfigError"):
            found = answer.problem.removeprefix("ConfigError: ")
            found += f" ({hidden})" if visible is not None and gpus > count else ""
            remedy = "unset CUDA_VISIBLE_DEVICES" if visible is not None and gpus > count else "see what is found"
            yield Finding("devices", found, WRONG, remedy, code=CONFIG)
        else:
            remedy = "run `nvidia-smi` and `python -c 'import torch; print(torch.zeros(1).cuda())'` there"
            yield unchecked("devices", answer.problem, remedy, WRONG if grave else WARNING)
    device = facts.get("device")
    if device is None:
        return
    if device.startswith("cuda"):
        yield Finding("devices", f"{device}: {facts.get('name')}, {gb(facts.get('memory', 0))}")
        if visible is not None and gpus > count and config.parallel.kind != "single" and answer.place.size > 1:
            yield Finding("devices", hidden, OK)
    elif config.train.device == "cpu":
        yield Finding("devices", "the CPU, as train.device=cpu says")
    elif gpus and count == 0:
        if visible is not None:
            found, remedy = f"{hidden}, so the run takes the CPU", "unset CUDA_VISIBLE_DEVICES, or set train.device=cpu"
        elif facts.get("cuda_build") is None:
            found = f"nvidia-smi lists {gpus} GPUs, but this torch is built for CPUs, so the run takes the CPU"
            remedy = "install the build of torch for CUDA"
        else:
            found = f"nvidia-smi lists {gpus} GPUs, but torch finds none, so the run takes the CPU"
            remedy = f"install a driver for CUDA {facts['cuda_build']}, or another build of torch"
        yield Finding("devices", found, WARNING, remedy)
    else:
        yield Finding("devices", "no GPU, so the run takes the CPU")


def _gpu(answer: Answer, memory_of_a_rank: int | None) -> Iterator[Finding]:
    facts = answer.facts
    if wrong := facts.get("arithmetic"):
        yield Finding("devices", f"{facts.get('device')}: {wrong}", WRONG, "take this device out of use")
    if "capability" not in facts:
        return
    capability = tuple(facts["capability"])
    named = f"compute capability {capability[0]}.{capability[1]}"
    if capability < dispatch.OLDEST:
        found = f"{named}, older than Ampere: no Triton kernels, the model runs in plain PyTorch"
        yield Finding("GPU", found, WARNING, "expect a slower run, or use an A100 or newer")
    if capability < BF16 and facts.get("precision") == "bfloat16":
        yield Finding("GPU", f"{named} computes no bf16 in hardware", WARNING, "set train.precision=fp16 or fp32")
    if capability >= dispatch.OLDEST:
        yield Finding("GPU", f"{named}: bf16, Triton's kernels")
    memory, free = facts.get("memory", 0), facts.get("free", 0)
    if memory_of_a_rank is not None and memory_of_a_rank > MOST_OF_MEMORY * memory:
        found = f"{gb(memory)}, and `plan` expects {gb(memory_of_a_rank)} of a rank"
        remedy = "smaller train.micro_rows, train.activation_checkpointing=full, parallel=fsdp, or more GPUs"
        yield Finding("GPU memory", found, WARNING, remedy)
    elif memory_of_a_rank is not None:
        yield Finding("GPU memory", f"{gb(memory)}, `plan` expects {gb(memory_of_a_rank)} of a rank")
    own = [gpu for gpu in facts.get("smi") or [] if facts.get("gpu") and facts["gpu"] in gpu.get("uuid", "")]
    for gpu in own:
        yield from _health(gpu)
    others = [x for x in facts.get("smi_processes", []) if facts.get("gpu") and facts["gpu"] in x.get("uuid", "")]
    if others:
        who = ", ".join(f"{x.get('name')} (process {x.get('pid')}, {x.get('memory')} MiB)" for x in others[:3])
        yield Finding("GPU", f"others compute on it: {who}", WARNING, "end them, or choose another GPU")
    elif memory and free < 0.9 * memory:
        found = f"{gb(memory - free)} of its {gb(memory)} are taken, by processes that nvidia-smi does not show"
        yield Finding("GPU", found, WARNING, "look on the host, outside of the container")


def _health(gpu: dict[str, str]) -> Iterator[Finding]:
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
    """Two ranks of a host on one GPU."""
    by_gpu: dict[tuple[int, str], list[Answer]] = {}
    for answer in answers:
        if answer.facts.get("gpu"):
            by_gpu.setdefault((answer.place.node, answer.facts["gpu"]), []).append(answer)
    for sharing in by_gpu.values():
        if len(sharing) > 1:
            found = f"{len(sharing)} ranks use one GPU"
            remedy = "start one rank for each GPU, and let torchrun set LOCAL_RANK"
            yield Finding("devices", found, WRONG, remedy, tuple(answer.place for answer in sharing))


def _kernels(config: Config, answer: Answer) -> Iterator[Finding]:
    """Which kernels the run takes."""
    facts = answer.facts
    if refused := facts.get("kernels_refused"):
        yield Finding("kernels", refused, WRONG, "choose what runs here, as it says", code=CONFIG)
    elif "kernels" in facts:
        reason = facts["kernels"]
        found = f"plain PyTorch ({reason})" if reason or config.kernels.kind == "torch" else "Triton's"
        yield Finding("kernels", f"{found} (kernels={config.kernels.kind})".replace("(None) ", ""))
    if "flash" in facts:
        yield Finding("flash-attn", facts["flash"])
    elif "no_flash" in facts:
        needed = config.kernels.attention == "flash_attn"
        found = f"not used: {first_line(ValueError(facts['no_flash']))}"
        yield Finding("flash-attn", found, WRONG if needed else OK, "set kernels.attention=auto" if needed else "")
