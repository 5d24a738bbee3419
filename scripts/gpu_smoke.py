"""Does the framework train on this GPU, and how fast? Needs torch alone.

    python scripts/gpu_smoke.py                          # 125m in bf16, a few minutes on one GPU
    python scripts/gpu_smoke.py --device cpu --scale debug --steps 10

GPT and nGPT, eager and compiled, on a single device and under FSDP2, 30 steps each on synthetic
tokens. Fails unless the loss falls, nGPT's rows stay on the unit sphere and every vector stays fp32.
"""

import argparse
import gc
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # from a checkout, without installing

from ngpt_train.config.model_keys import ModelConfig
from ngpt_train.config.schema import Config
from ngpt_train.models.gpt.keys import GPTConfig
from ngpt_train.models.layers.norms import RMSNorm
from ngpt_train.models.ngpt.keys import NGPTConfig
from ngpt_train.models.ngpt.model import ScaledParameter
from ngpt_train.observe.meters import peak_flops
from ngpt_train.training import TrainState, build_state, train_step

# (d_model, n_layers, n_heads, d_mlp, context, vocabulary, rows per step)
SCALES = {"125m": (768, 12, 12, 2048, 1024, 32000, 32), "debug": (64, 2, 2, 256, 64, 512, 8)}
ARCHITECTURES: dict[str, tuple[type[ModelConfig], str]] = {"gpt": (GPTConfig, "adamw"), "ngpt": (NGPTConfig, "adam")}
# Rates that move both within 30 steps; an nGPT step turns a row by about lr * sqrt(d_model) radians.
LR = {"gpt": lambda d_model: 1e-3, "ngpt": lambda d_model: 0.25 / d_model**0.5}
UNTIMED_STEPS = 5  # compilation and warm-up


@dataclass
class Result:
    tokens_per_s: float
    mfu: float | None
    memory_gb: float
    first_loss: float
    last_loss: float


def make_config(architecture: str, scale: str, layout: str, compiled: bool, arguments: argparse.Namespace) -> Config:
    d_model, n_layers, n_heads, d_mlp, context, vocab_size, rows = SCALES[scale]
    model, optimizer = ARCHITECTURES[architecture]
    config = Config(model=model(architecture, d_model, n_layers, n_heads, None, d_mlp, vocab_size, context))
    config.train.steps, config.train.batch_rows = arguments.steps, rows
    config.train.device, config.train.precision, config.train.compile = arguments.device, "bf16", compiled
    config.optim.name, config.optim.lr, config.optim.weight_decay = optimizer, LR[architecture](d_model), 0.0
    config.schedule.warmup_steps = 0
    config.parallel.kind = layout
    return config


def synthetic_rows(config: Config, device: torch.device) -> torch.Tensor:
    """Rows `(rows, context + 1)` of ids as unequal in frequency as words are, so that there is something to learn."""
    assert isinstance(config.model.vocab_size, int)
    frequency = 1 / torch.arange(1, config.model.vocab_size + 1, device=device)
    shape = (config.train.rows_per_step, config.model.context + 1)
    return torch.multinomial(frequency, shape[0] * shape[1], replacement=True).view(shape)


def vectors_in_forward(state: TrainState, tokens: torch.Tensor) -> set[torch.dtype]:
    """dtypes of gains and scale vectors while the model runs: FSDP2 casts what it gathers, unless told not to."""
    seen: set[torch.dtype] = set()
    hooks = []
    for module in state.model.modules():
        if isinstance(module, ScaledParameter):
            hooks.append(module.register_forward_hook(lambda _module, _inputs, output: seen.add(output.dtype)))
        elif isinstance(module, RMSNorm):
            hooks.append(module.register_forward_pre_hook(lambda module, _inputs: seen.add(module.gain.dtype)))
    with torch.no_grad():
        state.forward(tokens)
    for hook in hooks:
        hook.remove()
    return seen


def check(state: TrainState, first_loss: float, last_loss: float, tokens: torch.Tensor) -> list[str]:
    problems = [] if last_loss < 0.98 * first_loss else [f"the loss did not fall: {first_loss:.4f} -> {last_loss:.4f}"]
    # Hooks would break the graphs of a compiled block, which has the same parameters.
    if not state.config.train.compile and (seen := vectors_in_forward(state, tokens)) != {torch.float32}:
        problems.append(f"vectors are {seen} in the forward pass")
    for name, parameter in state.model.named_parameters():
        if parameter.dtype != torch.float32:
            problems.append(f"{name} is {parameter.dtype}")
        elif state.config.model.name == "ngpt" and parameter.ndim == 2:
            rows = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            if (off := float((rows.detach().norm(dim=-1) - 1).abs().max())) > 1e-5:
                problems.append(f"rows of {name} are off the sphere by {off:.1e}")
    return problems


def run(config: Config) -> tuple[Result, list[str]]:
    state = build_state(config)
    device = state.world.device
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    torch.manual_seed(0)
    losses, seconds = [], []
    for _ in range(config.train.steps):
        rows = synthetic_rows(config, device)
        batch = [(part[:, :-1], part[:, 1:]) for part in rows.split(state.micro_rows)]
        started = time.perf_counter()
        losses.append(float(train_step(state, batch).loss))  # waits for the loss, not for the whole step
        if on_gpu:
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    tokens_per_s = config.train.rows_per_step * config.model.context / statistics.median(seconds[UNTIMED_STEPS:])
    peak = peak_flops(torch.cuda.get_device_name(device), torch.bfloat16) if on_gpu else None
    flops = state.model.flops_per_token(config.model.context)
    result = Result(
        tokens_per_s=tokens_per_s,
        mfu=flops * tokens_per_s / peak if peak else None,
        memory_gb=torch.cuda.max_memory_allocated(device) / 1e9 if on_gpu else float("nan"),
        first_loss=losses[0],
        last_loss=losses[-1],
    )
    return result, check(state, losses[0], losses[-1], batch[0][0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--scale", default="125m", choices=tuple(SCALES))
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()
    if arguments.steps <= UNTIMED_STEPS:
        parser.error(f"--steps must be above {UNTIMED_STEPS}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU here; --device cpu --scale debug tries the same on a CPU")
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu"
    print(f"{name}, torch {torch.__version__}, {arguments.scale}, {arguments.steps} steps, bf16", flush=True)
    print(f"{'':24}{'tokens/s':>10}{'MFU':>8}{'memory':>10}{'loss':>18}   nGPT/GPT time", flush=True)
    failed = False
    for layout in ("single", "fsdp"):
        for compiled in (False, True):
            reference = 0.0
            for architecture in ARCHITECTURES:
                config = make_config(architecture, arguments.scale, layout, compiled, arguments)
                result, problems = run(config)
                gc.collect()
                label = f"{architecture} {layout} {'compiled' if compiled else 'eager'}"
                mfu = "n/a" if result.mfu is None else f"{100 * result.mfu:.1f}%"
                ratio = f"{reference / result.tokens_per_s:13.3f}" if reference else ""
                reference = result.tokens_per_s
                losses = f"{result.first_loss:.3f} -> {result.last_loss:.3f}"
                line = f"{label:24}{result.tokens_per_s:10.0f}{mfu:>8}{result.memory_gb:8.1f}GB{losses:>18}{ratio}"
                print(line, flush=True)
                for problem in problems:
                    print(f"  FAILED: {problem}", flush=True)
                    failed = True
    if dist.is_initialized():
        dist.destroy_process_group()
    print("FAILED" if failed else "all checks passed")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
