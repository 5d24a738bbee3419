"""Every kernel compiles for A100 and H100 on a machine without a GPU, and keeps to its registers."""

import re

import pytest

from tests.unit.kernels.own_process import printed_by


@pytest.mark.exhaustive
@pytest.mark.parametrize("kernel", ["sphere_step", "swiglu", "rotary", "cross_entropy", "adam"])
def test_without_spills(kernel: str) -> None:
    """Caught: what the interpreter allows and the compiler does not; a block that no longer fits into registers."""
    widths = ["1024", "1280"] if kernel == "adam" else []
    lines = printed_by(f"cross_compile_{kernel}", *widths).splitlines()
    assert any(re.search(r"sm_90|\"capability\": 90", line) for line in lines)
    assert any(re.search(r"sm_80|\"capability\": 80", line) for line in lines)
    for line in lines:
        stack = re.search(r"(\d+) bytes of stack|stack (\d+)|\"spills\": (\d+)|(\d+) spill", line)
        assert stack is not None, line
        assert next(int(number) for number in stack.groups() if number) == 0, line
