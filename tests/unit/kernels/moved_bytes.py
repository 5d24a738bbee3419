"""Counts the bytes of memory that one compiled block moves on a GPU that is not there.

TRITON_INTERPRET=0 python -m tests.unit.kernels.moved_bytes: the tables of docs/benchmarks/bytes.md.
"""

from tests.unit.kernels.fake_gpu import pretended  # isort: skip  # before torch is imported

import argparse
import json
import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch._functorch.config
from torch import Tensor, nn
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import get_fused_kernel_name
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ngpt_train.kernels import attention, dispatch
from ngpt_train.kernels.sphere_step import HiddenState
from ngpt_train.models.gpt.keys import GPTConfig
from ngpt_train.models.gpt.model import GPTBlock
from ngpt_train.models.layers.rope import rope_table
from ngpt_train.models.ngpt.keys import NGPTConfig
from ngpt_train.models.ngpt.model import NGPTBlock

# Rows of a batch: a prime that divides no width, so that a tensor holds something of each token if 7 divides its size.
B, T, D_HEAD = 7, 4096, 64
BLOCKS: dict[str, tuple[Any, type[nn.Module]]] = {"gpt": (GPTConfig, GPTBlock), "ngpt": (NGPTConfig, NGPTBlock)}
# Of the packed product (6 d_model bytes) the rotation's kernels do not read v, and GPT's backward pass none of it.
UNREAD = {
    "gpt": {"ngpt_train::rotary_forward": 2.0, "ngpt_train::rotary_backward": 6.0},
    "ngpt": {"ngpt_train::rotary_forward": 2.0, "ngpt_train::rotary_backward": 2.0},
}


@dataclass(frozen=True)
class Pass:
    """One kernel: its place, its kind, and bytes a token in units of d_model."""

    where: str  # forward, backward; or autograd, between compiled graphs
    kind: str  # product, attention, matrices (of no token), activations
    name: str
    moved: float


def cudnn(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, _: None) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    run = torch.ops.aten._scaled_dot_product_cudnn_attention
    return run(q, k, v, None, True, 0.0, causal, False, scale=scale)[0].transpose(1, 2)


def flash(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, _: None) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    run = torch.ops.aten._scaled_dot_product_flash_attention
    return run(q, k, v, 0.0, causal, False, scale=scale)[0].transpose(1, 2)


# What torch with CUDA takes there; torch without chooses for CPUs.
ATTENTION = {"A100": flash, "H100": cudnn}


class Autograd(TorchDispatchMode):
    """Records autograd's own operations, outside of the compiled graphs."""

    def __init__(self, passes: list[Pass], unit: int) -> None:
        super().__init__()
        self.passes, self.unit, self.inside = passes, unit, False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if not self.inside and function.namespace == "aten" and not function.is_view:
            tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)]
            moved = sum(x.numel() * x.element_size() for x in tensors) / self.unit
            self.passes.append(Pass("autograd", "activations", str(function), moved))
        return out


def scheduled(graph: GraphLowering, name: str, unit: int) -> Iterator[Pass]:
    """The kernels of a compiled graph. Each tensor that one touches counts once: read or written, whole."""
    for node in graph.scheduler.nodes:
        accessed = node.get_read_write_buffer_accesses(include_reads=True, include_writes=True)
        if not accessed:
            continue  # takes an output apart, or only names memory
        moved = sum(accessed.values()) / unit
        operation = getattr(node.node, "op_overload", None)
        title = get_fused_kernel_name(node.get_nodes(), "original_aten") if operation is None else operation.name()
        if title in ("aten::mm", "aten::mm.out"):
            kind = "product"
        elif operation is not None and "attention" in title:
            kind = "attention"
        elif operation is None and not any(of_tokens(graph, buffer) for buffer in accessed):
            kind = "matrices"
        else:
            kind, moved = "activations", moved - UNREAD[name].get(title, 0)
        yield Pass("backward" if graph.is_backward else "forward", kind, title, moved)


def of_tokens(graph: GraphLowering, buffer: str) -> bool:
    found = graph.name_to_buffer.get(buffer) or graph.graph_inputs[buffer]
    return math.prod(int(size) for size in found.get_size()) % B == 0


def passes_of(name: str, kernels: str, d: int, gpu: str) -> list[Pass]:
    """Every kernel of one block's forward and backward pass."""
    passes: list[Pass] = []
    unit = B * T * d
    mode = Autograd(passes, unit)

    def instead_of_loading(graph: GraphLowering, _: Any) -> SimpleNamespace:
        """By now all kernels are chosen and written; the next step would compile and load them."""
        passes.extend(scheduled(graph, name, unit))
        returned = graph.wrapper_code.get_output_refs()

        def call(args: list[Any]) -> list[Any]:
            given = list(args)
            args.clear()  # as compiled graphs do
            mode.inside = True
            shapes = torch.fx.Interpreter(graph.orig_gm).run(*given)
            # As from a compiled graph: no output is a view of another, and a tensor that is returned twice is one
            # tensor.
            made: dict[str, Any] = {}
            for reference, x in zip(returned, shapes, strict=True):
                made.setdefault(reference, x.new_empty_strided(x.shape, x.stride()) if isinstance(x, Tensor) else x)
            mode.inside = False
            return [made[reference] for reference in returned]

        return SimpleNamespace(call=call, runner=None, __file__="")

    config, block_type = BLOCKS[name]
    with ExitStack() as stack:
        stack.enter_context(dispatch.chosen(kernels))
        stack.enter_context(patch.object(attention, "sdpa", ATTENTION[gpu]))
        stack.enter_context(patch.object(GraphLowering, "_compile_to_module_lines", instead_of_loading))
        stack.enter_context(torch._functorch.config.patch(force_non_lazy_backward_lowering=True))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        torch.compiler.reset()
        with torch.device("cuda"):
            block = block_type(config(vocab_size=64, d_model=d, n_layers=24, n_heads=d // D_HEAD, context=T))
            gradients = [torch.empty(B, T, d, dtype=torch.bfloat16) for _ in range(2 if name == "ngpt" else 1)]
        block.compile(dynamic=False)
        inputs = [torch.empty_like(x).requires_grad_() for x in gradients]
        rope = rope_table(T, D_HEAD, 10000.0, False, inputs[0].device, torch.float32)
        out = block(HiddenState(*inputs) if name == "ngpt" else inputs[0], rope, None)
        with mode:
            torch.autograd.grad(out, [*inputs, *block.parameters()], gradients if name == "ngpt" else gradients[0])
    return passes


FORMS = {"GPT": ("gpt", "triton"), "nGPT": ("ngpt", "triton"), "GPT, compile only": ("gpt", "torch"),
         "nGPT, compile only": ("ngpt", "torch")}  # fmt: skip
WIDTHS = (1024, 1280)
COUNTED = ("activations", "matrices")


def count(passes: list[Pass], kind: str, where: str | None = None) -> float:
    return sum(one.moved for one in passes if one.kind == kind and where in (None, one.where))


def table(found: dict[str, list[Pass]]) -> Iterator[str]:
    """Sums by form, then every kernel that moves more than a vector."""
    base = count(found["GPT"], "activations")
    yield "| | forward | backward | between blocks | sum | to GPT's | kernels | matrices |"
    yield "|---|---|---|---|---|---|---|---|"
    for form, passes in found.items():
        parts = [count(passes, "activations", where) for where in ("forward", "backward", "autograd")]
        launched = sum(one.kind in COUNTED for one in passes)
        cells = [*(f"{x:.1f}" for x in (*parts, sum(parts))), f"{sum(parts) / base:.3f}", str(launched)]
        yield f"| {form} | {' | '.join(cells)} | {count(passes, 'matrices'):.1f} |"
    for form, passes in found.items():
        yield f"\n{form}:\n\n```"
        for one in passes:
            if one.kind == "activations" and one.moved >= 0.1:
                yield f"{one.moved:6.1f}  {one.where:8}  {one.name}"
        yield "```"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="H100", choices=list(ATTENTION))
    parser.add_argument("--d-model", type=int, nargs="*", default=WIDTHS)
    parser.add_argument("--json", action="store_true", help="every kernel, products and attention included")
    told = parser.parse_args()
    for d in told.d_model:
        with pretended(told.gpu):
            found = {form: passes_of(*both, d, told.gpu) for form, both in FORMS.items()}
        if told.json:
            print(json.dumps({form: [asdict(one) for one in passes] for form, passes in found.items()}))
        else:
            print(f"\n## {told.gpu}, d_model {d}\n", *table(found), sep="\n")


if __name__ == "__main__":
    main()
