"""Kernels on their first contact with a GPU, played by Triton's interpreter: broken kernels are named."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import ngpt_train
from ngpt_train.kernels import attention, dispatch
from ngpt_train.kernels.check import __main__ as child
from ngpt_train.kernels.check import kernel_findings
from ngpt_train.kernels.check.calls import Call, of_adam
from ngpt_train.kernels.check.cases import MOST_ELEMENTS, errors_of_call, fitting, times_of_call
from ngpt_train.kernels.check.kernel_findings import Finding, Request
from ngpt_train.kernels.gpu import adam, cross_entropy, rotary, sphere_step, swiglu

CPU = torch.device("cpu")


def call(kernel: str, *shape: int, dtype: torch.dtype = torch.float32, **options: Any) -> Call:
    return Call.of(kernel, torch.empty(shape, dtype=dtype, device="meta"), **options)


HEAD = {"vocabulary": 11, "matrix": "float32", "scaled": True, "label_smoothing": 0.1}
ATTENTION = {"keys": [6, 1], "scale": 2.0, "causal": True, "mask": None}
CALLS = {
    "sphere_step": call("sphere_step", 3, 2, 8, h="float32", alpha="float32"),
    "swiglu": call("swiglu", 3, 2, 12, scaled=True),
    "rotary": call("rotary", 3, 2, 16, options=[2, 1, False, True], of_rows=False, scaled=True),
    "linear_cross_entropy": call("linear_cross_entropy", 3, 4, 8, z_loss=1e-3, **HEAD),
    "adam": of_adam(5, 8, "ball", True, (0.9, 0.95), 1e-8, 0.1),
    "attention": call("attention", 3, 6, 2, 4, **ATTENTION),
    "attention of documents": call("attention of documents", 3, 6, 2, 4, **ATTENTION | {"mask": [3, 1, 6, 6]}),
}
OTHERS = {
    "swiglu without scales": call("swiglu", 3, 2, 12, scaled=False),
    "swiglu, strided": Call("swiglu", [3, 2, 12], "float32", [40, 20, 1], {"scaled": True}),
    "swiglu, one row": call("swiglu", 1, 1, 12, scaled=True),
    "swiglu in fp16": call("swiglu", 3, 2, 12, dtype=torch.float16, scaled=True),
    "rotary of documents": call("rotary", 3, 2, 16, options=[2, 1, True, False], of_rows=True, scaled=False),
    "a loss in bf16": call("linear_cross_entropy", 2, 40, 8, dtype=torch.bfloat16, z_loss=0.0, **HEAD),
    "a loss with a soft cap": call("linear_cross_entropy", 2, 40, 8, z_loss=1e-3, soft_cap=3.0, **HEAD),
    "cross-attention": call("attention", 2, 3, 2, 4, keys=[5, 2], scale=0.5, causal=False, mask=[2, 1, 1, 5]),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", [*CALLS, *OTHERS])
def test_what_is_right(name: str) -> None:
    """Caught: a formula, an option or a tolerance that is not the kernel's, so that all runs go without it."""
    with dispatch.chosen("triton"):
        found = child.checked((CALLS | OTHERS)[name], CPU)
    assert found["problem"] is None
    assert 0 < found["error"] < 1e-2


def wrong(which: int, factor: float) -> Callable[..., Any]:
    """Multiplies result number `which` of a kernel."""

    def spoilt(right: Callable[..., Any], *given: Any, **more: Any) -> Any:
        found = right(*given, **more)
        several = found if isinstance(found, tuple) else (found,)
        several = tuple(x * factor if number == which else x for number, x in enumerate(several))
        return several if isinstance(found, tuple) else several[0]

    return spoilt


def one_row(right: Callable[..., Any], *given: Any, **more: Any) -> Any:
    """One of many rows is wrong."""
    found = right(*given, **more)
    found[-1, -1] *= 1.01
    return found


def unwritten(right: Callable[..., Any], *given: Any, **more: Any) -> Any:
    """The last row is never written: it is as new memory is."""
    found = right(*given, **more)
    rest = torch.empty_like(found[0][-1:])
    return torch.cat([found[0][:-1], rest]), *found[1:]


def overwriting(right: Callable[..., Any], *given: Any, **more: Any) -> Any:
    """Changes an argument, which the formula must not see."""
    return right(given[0].mul_(2), *given[1:], **more)


def raising(right: Callable[..., Any], *given: Any, **more: Any) -> Any:
    raise RuntimeError("PassManager::run failed\nmore")


def written(name: str, factor: float) -> Callable[..., Any]:
    """Multiplies an argument that the kernel has written to."""

    def spoilt(right: Callable[..., Any], *given: Any) -> None:
        right(*given)
        given[{"logits": 0, "losses": 2, "weight": 0, "exp_avg": 2, "copy": 4}[name]].mul_(factor)

    return spoilt


def written_though_skipped(right: Callable[..., Any], *given: Any) -> None:
    right(*given[:-1], None)


DEFECTS: dict[str, tuple[str, Any, str, Callable[..., Any], str]] = {
    "value": ("swiglu", swiglu, "swiglu_forward", wrong(0, 1.0001), "output 1"),
    "value of one row": ("swiglu", swiglu, "swiglu_forward", one_row, "output 1"),
    "gradient": ("sphere_step", sphere_step, "sphere_step_backward", wrong(1, 1.0001), "gradient 2"),
    "gradient of a scale": ("sphere_step", sphere_step, "sphere_step_backward", wrong(2, 1.0001), "gradient 3"),
    "argument overwritten": ("sphere_step", sphere_step, "sphere_step_forward", overwriting, "output 1"),
    "unwritten": ("rotary", rotary, "rotary_forward", unwritten, "unwritten: NaN"),
    "does not compile": ("rotary", rotary, "rotary_backward", raising, "RuntimeError: PassManager::run failed"),
    "gradient of the loss": (
        "linear_cross_entropy",
        cross_entropy,
        "cross_entropy_",
        written("logits", 1.01),
        "gradient 1",
    ),
    "losses": ("linear_cross_entropy", cross_entropy, "cross_entropy_", written("losses", 1.001), "output 2"),
    "moment": ("adam", adam, "adam_rows_", written("exp_avg", 1.001), "output 2"),
    "copy": ("adam", adam, "adam_rows_", written("copy", 1.1), "output 7"),
    "a step that is skipped": ("adam", adam, "adam_rows_", written_though_skipped, "output 4"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_what_is_wrong(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: a comparison without an output, a gradient, one row, unwritten memory, a skipped step."""
    name, module, function, spoilt, told = DEFECTS[defect]
    right = getattr(module, function)
    monkeypatch.setattr(module, function, lambda *given, **more: spoilt(right, *given, **more))
    with dispatch.chosen("triton"):
        problem = child.checked(CALLS[name], CPU)["problem"]
        assert problem is not None
        assert told in problem
        assert "\n" not in problem
        other = "swiglu" if name != "swiglu" else "sphere_step"
        assert child.checked(CALLS[other], CPU)["problem"] is None


def test_one_element(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: one wrong element, which the norm of a large tensor hides."""
    right = swiglu.swiglu_forward

    def spoilt(*given: Any) -> Tensor:
        y = right(*given)
        y[-1, -1, -1] += 0.5
        return y

    monkeypatch.setattr(swiglu, "swiglu_forward", spoilt)
    many = call("swiglu", 4, 5, 12_288, dtype=torch.bfloat16, scaled=True)  # each row is a program of the interpreter
    with dispatch.chosen("triton"):
        error = errors_of_call(many, CPU)["output 1"]
    assert error.relative < error.tolerance
    assert not error.is_small


@pytest.mark.parametrize("name", ["attention", "attention of documents"])
def test_a_wrong_attention(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: heads, rows or a gradient of attention that nobody compares."""
    right = attention.sdpa

    def off(q: Tensor, k: Tensor, v: Tensor, *more: Any) -> Tensor:
        return right(q, k, v + 1e-3 * (v - v.detach()), *more)

    monkeypatch.setattr(attention, "sdpa", off)
    assert "gradient v" in str(child.checked(CALLS[name], CPU)["problem"])


def test_attention_that_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: a kernel of attention that runs although it is switched off; another result without it."""
    q, k, v = torch.randn(3, 2, 5, 4, 8).unbind()
    k, v = k[:, :, ::2], v[:, :, ::2]
    expected = attention.attention(q, k, v, 0.5, True)
    monkeypatch.setattr(attention, "sdpa", lambda *_: pytest.fail("ran"))
    monkeypatch.setattr(dispatch, "_off", {"attention": "wrong"})
    torch.testing.assert_close(attention.attention(q, k, v, 0.5, True), expected)
    monkeypatch.setattr(dispatch, "_off", {"attention of documents": "wrong"})
    monkeypatch.setattr(attention, "_choice", "flash_attn")
    monkeypatch.setattr(attention, "_flash", SimpleNamespace(version=2, varlen="kernel"))
    assert attention.varlen_kernel(CPU, 8, torch.bfloat16) is None


def test_the_slower_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: times of the one under the name of the other."""

    def slow(right: Callable[..., Any], *given: Any) -> Any:
        end = time.process_time() + 0.2
        while time.process_time() < end:
            pass
        return right(*given)

    right = torch.nn.functional.silu
    monkeypatch.setattr(torch.nn.functional, "silu", lambda *given: slow(right, *given))
    monkeypatch.setattr(swiglu, "swiglu_forward", lambda uv, s_u, s_v: uv[..., :6] + s_u)
    monkeypatch.setattr(swiglu, "swiglu_backward", lambda dy, uv, s_u, s_v: (uv, torch.stack([s_u, s_v])))
    kernel, plain = times_of_call(CALLS["swiglu"], CPU, compiled=False)
    assert kernel < 0.1e6 < 0.2e6 <= plain


def test_rows_that_do_not_fit() -> None:
    """Caught: a width that is cut, which the kernel's launch depends on; memory without a bound."""
    assert fitting((4, 1024, 4096)) == (4, 1024, 4096)
    assert fitting((64, 1024, 8192)) == (16, 1024, 8192)
    assert fitting((2, 32768, 16384)) == (1, MOST_ELEMENTS // 16384, 16384)
    assert fitting((100_000, 4096)) == (MOST_ELEMENTS // 4096, 4096)


def broken_copy(directory: Path, changes: dict[str, tuple[str, str]]) -> SimpleNamespace:
    """A copy of the package with texts of kernels/gpu replaced, which stands for the module ngpt_train."""
    source = Path(ngpt_train.__file__).parent
    shutil.copytree(source, directory / "ngpt_train", ignore=shutil.ignore_patterns("__pycache__"))
    for name, (old, new) in changes.items():
        path = directory / f"ngpt_train/kernels/gpu/{name}.py"
        assert path.read_text().count(old) == 1
        path.write_text(path.read_text().replace(old, new))
    return SimpleNamespace(__file__=str(directory / "ngpt_train/__init__.py"))


REQUEST = Request("cpu", "float32", "auto", 4, compiled=False, times=False)


@pytest.mark.slow
def test_a_process_that_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: a crash that ends the trainer, or takes the blame to another kernel; the rest is not checked then."""
    dies = ("    n_rows, n_vocab = logits.shape\n", "    import os\n    os.kill(os.getpid(), 11)\n")
    monkeypatch.setattr(kernel_findings, "ngpt_train", broken_copy(tmp_path, {"cross_entropy": dies}))
    monkeypatch.chdir(Path(ngpt_train.__file__).parents[1])  # where a process would find the code that is not broken
    names = ["swiglu", "linear_cross_entropy", "adam"]
    right, dead, after = kernel_findings.findings([CALLS[name] for name in names], REQUEST)
    assert right.problem is None
    assert after.problem is None
    assert dead.problem is not None
    assert dead.problem.startswith(f"it ended its process: signal {int(signal.SIGSEGV)} (SIGSEGV)")
    assert dead.lasting


@pytest.mark.exhaustive
def test_a_process_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: a wait without an end, a hang that is remembered for good, a process that is left behind."""
    marker = tmp_path / "pid"
    hangs = (
        "    rows_each, columns, num_warps = geometry(d)\n",
        f"    import os, time\n    open({str(marker)!r}, 'w').write(str(os.getpid()))\n    time.sleep(1000)\n",
    )
    monkeypatch.setattr(kernel_findings, "ngpt_train", broken_copy(tmp_path, {"adam": hangs}))
    monkeypatch.setitem(kernel_findings.WORK_SECONDS, "check", 15.0)
    stuck, after = kernel_findings.findings([CALLS["adam"], CALLS["swiglu"]], REQUEST)
    assert stuck.problem == "it did not end within 15 seconds"
    assert not stuck.lasting
    assert after.problem is None
    with pytest.raises(ProcessLookupError):
        os.kill(int(marker.read_text()), 0)


def test_an_import_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: a start that is timed from its last import on."""
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(1000)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(kernel_findings, "START_SECONDS", 1.0)
    begun = time.monotonic()
    (found,) = kernel_findings.findings([CALLS["adam"]], REQUEST)
    assert found.problem == "the process that checks did not start: too slow"
    assert time.monotonic() - begun < 60


def test_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: a second check of the same, a finding of other versions, code, shapes or without times that is taken."""
    found = Finding(error=1e-6, problem=None, lasting=True)
    one, other = CALLS["swiglu"], OTHERS["swiglu, one row"]
    timed = Request(**vars(REQUEST) | {"times": True})

    def get(asked: Call = one, request: Request = REQUEST) -> Finding | None:
        return kernel_findings.Kept(tmp_path, CPU, request).get(asked)

    assert get() is None
    kernel_findings.Kept(tmp_path, CPU, REQUEST).put(one, found, timeable=True)
    assert get() == found
    assert get(other) is None
    assert get(request=timed) is None
    assert get(request=Request(**vars(REQUEST) | {"compiled": True})) is None
    kernel_findings.Kept(tmp_path, CPU, REQUEST).put(other, Finding(problem="it hung", lasting=False), timeable=True)
    assert get(other) is None
    for name in ("sources", "git_commit", "triton_version"):
        with monkeypatch.context() as patch:
            patch.setattr(kernel_findings, name, lambda: "another")
            assert get() is None
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "2.99")
        assert get() is None
    assert get() == found
    next(tmp_path.rglob("swiglu*.json")).write_text("{")
    assert get() is None


def test_sources_are_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: a changed kernel whose old verdict counts."""
    before = kernel_findings.sources()
    monkeypatch.setattr(kernel_findings, "ngpt_train", broken_copy(tmp_path, {}))
    assert kernel_findings.sources() == before
    path = tmp_path / "ngpt_train/kernels/gpu/swiglu.py"
    path.write_text(path.read_text() + "#")
    assert kernel_findings.sources() != before
