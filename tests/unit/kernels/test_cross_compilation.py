"""Every kernel compiles for A100 and H100 on a machine without a GPU, and keeps to its registers."""

import json

import pytest

from tests.unit.kernels.own_process import printed_by


@pytest.mark.parametrize(
    "kernel",
    [
        pytest.param("adam", marks=pytest.mark.slow),
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in ("sphere_step", "swiglu", "rotary", "cross_entropy")
        ),
    ],
)
def test_without_spills(kernel: str) -> None:
    """Caught: code that the interpreter allows and the compiler does not; a block that no longer fits into
    registers."""
    launches = [json.loads(line) for line in printed_by("cross_compile", kernel).splitlines()]
    assert {launch["capability"] for launch in launches} == {80, 90}
    for launch in launches:
        assert launch["stack"] == 0, launch
        if kernel == "adam":  # whose row is held in registers whole
            assert launch["registers"] <= 128, launch
            assert launch["wide"] >= 14, launch
