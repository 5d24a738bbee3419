"""A fake CUDA device: torch's compiler chooses and writes kernels for it as for a real one.

To be imported before torch, which asks once, when it is imported, whether it has a CUDA part. Tensors on the device are
to be fake (torch._subclasses.FakeTensorMode). Nothing runs; of torch without CUDA, and of the version it was made for.
"""

import contextlib
import ctypes
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

# What autograd asks of a device: that it is there, has streams, and orders them by events.
DEVICE = """
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

using namespace c10;

struct CUDAHooks : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
};

struct Guard : impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device getDevice() const override { return {DeviceType::CUDA, 0}; }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, getDevice()); }
  void record(void**, const Stream&, DeviceIndex, EventFlag) const override {}
  void block(void*, const Stream&) const override {}
};

namespace at { REGISTER_CUDA_HOOKS(CUDAHooks) }
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
"""
COMMON: dict[str, Any] = {
    "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048,
    "max_threads_per_block": 1024,
    "warp_size": 32,
    "total_memory": 80 * 2**30,
    "gcnArchName": "",  # of AMD's
}
GPUS = {
    "A100": SimpleNamespace(
        name="A100", major=8, minor=0, multi_processor_count=108, shared_memory_per_block_optin=166912, **COMMON
    ),
    "H100": SimpleNamespace(
        name="H100", major=9, minor=0, multi_processor_count=132, shared_memory_per_block_optin=232448, **COMMON
    ),
}


def register() -> None:
    """Tells torch's C++ part of the device."""
    assert "torch" not in sys.modules, "torch has already asked"
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    torch_at = Path(found.origin).parent
    for library in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(torch_at / "lib" / library), mode=ctypes.RTLD_GLOBAL)
    with tempfile.TemporaryDirectory() as directory:
        source, library = Path(directory, "device.cpp"), Path(directory, "device.so")
        source.write_text(DEVICE)
        compiler = [os.environ.get("CXX", "c++"), "-std=c++20", "-shared", "-fPIC", f"-I{torch_at / 'include'}"]
        subprocess.run([*compiler, str(source), "-o", str(library)], check=True)
        ctypes.CDLL(str(library))


register()


@contextlib.contextmanager
def pretended(gpu: str) -> Iterator[None]:
    """torch's Python part takes the device for this GPU. Once in a process: torch remembers the answers."""
    import torch
    import torch.utils._triton
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import config
    from torch._inductor.fx_passes import fuse_attention, pad_mm

    device, nothing = GPUS[gpu], lambda *_: None
    answers: dict[Any, dict[str, Any]] = {
        torch.cuda: {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "get_device_properties": lambda *_: device,
            "get_device_capability": lambda *_: (device.major, device.minor),
            "is_bf16_supported": lambda *_, **__: True,
            "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
            "set_rng_state": nothing,
            "synchronize": nothing,
            "_lazy_init": nothing,
            "_exchange_device": lambda *_: 0,
            "_maybe_exchange_device": lambda *_: 0,
        },
        CudaInterface: {"get_device_properties": staticmethod(lambda *_: device)},
        CudaInterface.Worker: {
            "get_device_properties": staticmethod(lambda *_: device),
            "current_device": staticmethod(lambda *_: 0),
        },
        # These run operations on the device: patterns of attention written out and of odd widths, which models here
        # do not have, and (below) constants, which are compiled into kernels in any case.
        fuse_attention: {"_sfdp_init": nothing},
        pad_mm: {"_pad_mm_init": nothing},
        torch.utils._triton: {"triton_hash_with_backend": lambda: ""},
    }
    with contextlib.ExitStack() as stack:
        for target, attributes in answers.items():
            for name, answer in attributes.items():
                stack.enter_context(patch.object(target, name, answer))
        stack.enter_context(config.patch(joint_graph_constant_folding=False, fx_graph_cache=False, compile_threads=1))
        yield
