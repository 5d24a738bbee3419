"""What sphere_step, swiglu and rotary keep alike: compilation, recomputation, memory, fp64, torch's operators.

linear_cross_entropy, which is one operator whatever computes it, has the same tests in test_cross_entropy.py.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ngpt_train.kernels import dispatch
from ngpt_train.kernels.gpu import rotary as gpu_rotary
from ngpt_train.kernels.gpu import sphere_step as gpu_sphere_step
from ngpt_train.kernels.gpu import swiglu as gpu_swiglu
from ngpt_train.kernels.rotary import QKV, rotary
from ngpt_train.kernels.sphere_step import HiddenState, sphere_step
from ngpt_train.kernels.swiglu import swiglu
from ngpt_train.models.layers.rope import rope_table
from tests.unit.kernels.looks import error

Run = Callable[..., tuple[Tensor, ...]]
SCALED = ["sphere_step", "swiglu", "rotary"]  # with nGPT's vectors
ALL = [*SCALED, "swiglu of GPT", "rotary of GPT"]


def example(name: str, dtype: torch.dtype) -> tuple[Run, Run, list[Tensor], list[Tensor]]:
    """The operation and its formula as functions of tensors, which get gradients, and tables that they read."""
    torch.manual_seed(0)
    wide = torch.promote_types(dtype, torch.float32)
    x = torch.randn(2, 3, 64)
    vector = torch.rand(32, dtype=wide) + 0.5
    tables: list[Tensor] = []
    if name == "sphere_step":
        given = [torch.nn.functional.normalize(x[..., :32], dim=-1).to(dtype), x[..., 32:].to(dtype), vector]
        run, formula = (
            lambda h, x, alpha, f=f: f(HiddenState(h, h), x, alpha) for f in (sphere_step, sphere_step.formula)
        )
    elif name.startswith("swiglu"):
        given = [x.to(dtype), vector, vector.flip(0)]
        run, formula = (lambda *uv, f=f: (f(*uv),) for f in (swiglu, swiglu.formula))
    else:  # 2 heads of q and one of k and v, of 16
        rope = rope_table(3, 16, 100.0, False, torch.device("cpu"), wide)
        given, tables = [x.to(dtype), vector], [rope.cos, rope.sin]
        run, formula = (
            lambda qkv, scale=None, f=f: f(QKV.of(qkv, 2, 1), rope, scale is not None, scale)
            for f in (rotary, rotary.formula)
        )
    given = given[:1] if name.endswith("of GPT") else given
    return run, formula, [t.requires_grad_() for t in given], tables


def results(run: Run, given: list[Tensor]) -> list[Tensor]:
    """Outputs and gradients."""
    torch.manual_seed(1)
    out = run(*given)
    return [*out, *torch.autograd.grad(out, given, [torch.randn_like(y) for y in out])]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", SCALED)
def test_compiled_and_recomputed(kernels: str, name: str) -> None:
    """Caught: a graph break, a fake kernel of another shape, activations kept beside autograd's saved tensors."""
    run, _, given, _ = example(name, torch.float32)
    computed = []

    def counted(*inputs: Tensor) -> tuple[Tensor, ...]:
        computed.append(inputs)
        return run(*inputs)

    torch.compiler.reset()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    eager = results(run, given)
    for other in (compiled, lambda *inputs: checkpoint(counted, *inputs, use_reentrant=False)):
        found = results(other, given)
        torch.testing.assert_close(found, eager)
        if kernels == "triton" and name != "sphere_step":
            assert all(map(torch.equal, found, eager))
    assert len(computed) == 2  # anew for the backward pass


@pytest.mark.parametrize("name", [name for name in ALL if name != "sphere_step"])
@pytest.mark.usefixtures("kernels")
def test_saves_its_inputs_only(name: str) -> None:
    """Caught: an activation that is kept for the backward pass."""
    run, _, given, tables = example(name, torch.bfloat16)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        run(*given)
    assert {x.data_ptr() for x in saved} == {x.data_ptr() for x in (*given, *tables)}


@pytest.mark.parametrize("name", SCALED)
def test_fp64_is_computed_in_fp64(name: str) -> None:
    """Also where kernels=triton. Caught: an fp64 model that is computed in less."""
    run, formula, given, _ = example(name, torch.float64)
    with dispatch.chosen("triton"):
        found = results(run, given)
        assert all(error(one, other) < 1e-13 for one, other in zip(found, results(formula, given), strict=True))
        assert torch.autograd.gradcheck(run, given)
    assert {one.dtype for one in found} == {torch.float64}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ALL)
def test_operators_are_registered_as_torch_asks(name: str) -> None:
    """Caught: a schema or a fake kernel that differs from the operator, and an output that is an input."""
    _, _, given, tables = example(name, torch.bfloat16)
    given = [t.detach() for t in given]
    if name == "sphere_step":
        torch.library.opcheck(gpu_sphere_step.sphere_step_forward, given)
        out, *reciprocals = gpu_sphere_step.sphere_step_forward(*given)
        for too in (None, out):
            torch.library.opcheck(gpu_sphere_step.sphere_step_backward, (out, too, *given, *reciprocals))
        return
    scaled = not name.endswith("of GPT")
    if name.startswith("swiglu"):
        given += [] if scaled else [None, None]
        torch.library.opcheck(gpu_swiglu.swiglu_forward, given)
        torch.library.opcheck(gpu_swiglu.swiglu_backward, (given[0][..., :32], *given))
        return
    arguments = (given[0], *tables, given[1] if scaled else None, 2, 1, False, scaled)
    dy = [torch.randn(2, heads, 3, 16).bfloat16().transpose(1, 2) for heads in (2, 1, 1)]  # as attention leaves them
    torch.library.opcheck(gpu_rotary.rotary_forward, arguments)
    torch.library.opcheck(gpu_rotary.rotary_backward, (*dy, *arguments))
