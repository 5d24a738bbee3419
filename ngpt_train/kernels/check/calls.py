"""Records the calls of kernels in a forward and a backward pass: shapes, dtypes and options.

A pass over a model on torch's meta device, which computes nothing, is enough.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from ngpt_train.kernels import attention, dispatch
from ngpt_train.kernels.rotary import QKV, Rope
from ngpt_train.kernels.sphere_step import HiddenState


@dataclass(frozen=True)
class Call:
    """A call of a kernel, without its values. All of it is JSON."""

    kernel: str  # its name in `kernels.dispatch`
    shape: list[int]  # of the first tensor
    dtype: str  # of the first tensor, such as "bfloat16"
    stride: list[int] | None = None  # of the first tensor, None: contiguous
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, kernel: str, first: Tensor, **options: Any) -> Self:
        """A call of `kernel`. first: its first tensor."""
        stride = None if first.is_contiguous() or 0 in first.stride() else list(first.stride())
        return cls(kernel, list(first.shape), name_of(first), stride, dict(sorted(options.items())))

    def json(self) -> str:
        """One line, of the arguments that make this call; equal calls have equal lines."""
        return json.dumps(vars(self), sort_keys=True)

    def __hash__(self) -> int:
        return hash(self.json())

    def __getitem__(self, option: str) -> Any:
        return self.options[option]

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.kernel} {'x'.join(map(str, self.shape))} {self.dtype}{f' ({options})' if options else ''}"


def of_sphere_step(h: HiddenState, x: Tensor, alpha: Tensor, **_: Any) -> Call:
    return Call.of("sphere_step", x, h=name_of(h.to_move), alpha=name_of(alpha))


def of_swiglu(uv: Tensor, s_u: Tensor | None = None, s_v: Tensor | None = None) -> Call:
    return Call.of("swiglu", uv, scaled=s_u is not None)


def of_rotary(qkv: QKV, rope: Rope, normalized: bool = False, scale: Tensor | None = None, *_: Any) -> Call:
    assert qkv.joined is not None
    options = [qkv.q.shape[2], qkv.k.shape[2], rope.interleaved, normalized]
    return Call.of("rotary", qkv.joined, options=options, of_rows=rope.cos.ndim == 4, scaled=scale is not None)


def of_linear_cross_entropy(
    h: Tensor, matrix: Tensor, targets: Tensor, scale: Tensor | None = None, z_loss: float = 0.0,
    label_smoothing: float = 0.0, soft_cap: float = 0.0, *_: Any,
) -> Call:  # fmt: skip
    options = {"scaled": scale is not None, "z_loss": z_loss, "label_smoothing": label_smoothing}
    options |= {"soft_cap": soft_cap} if soft_cap else {}
    return Call.of("linear_cross_entropy", h, vocabulary=len(matrix), matrix=name_of(matrix), **options)


# For each operation: the call of its kernel with the operation's arguments.
DESCRIBE: dict[str, Callable[..., Call]] = {
    "sphere_step": of_sphere_step,
    "swiglu": of_swiglu,
    "rotary": of_rotary,
    "linear_cross_entropy": of_linear_cross_entropy,
}


def of_adam(
    rows: int, d: int, constraint: str, copies: bool, betas: tuple[float, float], eps: float, weight_decay: float
) -> Call:
    """The call of Adam's kernel on an fp32 matrix `(rows, d)`. copies: True if it writes a bf16 copy."""
    options = {"betas": list(betas), "eps": eps, "weight_decay": weight_decay}
    return Call.of("adam", torch.empty(rows, d, device="meta"), constraint=constraint, copies=copies, **options)


@contextmanager
def recorded(documents: bool) -> Iterator[Counter[Call]]:
    """Inside a `with`, counts the calls of Triton kernels and of attention. documents: True if a mask of attention
    separates documents, which may have a kernel of their own. `dispatch` chooses the kernels."""
    calls: Counter[Call] = Counter()

    def see(name: str, on_triton: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if on_triton:
            calls[DESCRIBE[name](*args, **kwargs)] += 1

    def watch(q: Tensor, k: Tensor, scale: float, causal: bool, mask: Tensor | None) -> None:
        of_documents = documents and mask is not None
        shape = None if mask is None else list(mask.shape)
        options = {"keys": list(k.shape[1:3]), "scale": scale, "causal": causal, "mask": shape}
        calls[Call.of("attention of documents" if of_documents else "attention", q, **options)] += 1

    with dispatch.watched(see), attention.watched(watch):
        yield calls


def name_of(tensor: Tensor) -> str:
    """The name of the tensor's dtype, such as float32."""
    return str(tensor.dtype).removeprefix("torch.")
