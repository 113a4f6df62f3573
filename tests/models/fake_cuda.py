"""CUDA as a device of torch's fake tensors: places are checked, nothing is computed.

A build of torch without CUDA refuses to set the current device before any operator; a guard that
does nothing is registered in its place, from one line of C++ that is compiled here.
"""

import ctypes
import inspect
import shutil
import subprocess
import sysconfig
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from tandem.kernels.cpu.experts import NativeExperts
from tandem.models.families import open_checkpoint
from tandem.models.loading import loader
from tandem.models.loading.skeleton import build_skeleton
from tandem.models.sources import gguf, safetensors

GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>)
"""


def register_guard(folder: Path) -> None:
    """Let operators set a current CUDA device, of which there is none."""
    if torch.cuda.is_available():
        pytest.skip("torch has CUDA: its guard is the real one")
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler for the guard of a CUDA device")
    base = Path(torch.__file__).parent
    source, library = (
        folder / "guard.cc",
        folder / f"guard{sysconfig.get_config_var('SHLIB_SUFFIX')}",
    )
    source.write_text(GUARD)
    subprocess.run(
        [
            compiler, "-std=c++20", "-shared", "-fPIC", f"-I{base / 'include'}", str(source),
            "-o", str(library), f"-L{base / 'lib'}", "-lc10",
        ],
        check=True,
        timeout=120,
    )  # fmt: skip
    ctypes.CDLL(str(library))


class FakeCuda:
    """A ``Device`` whose tensors are torch's fake ones."""

    torch_device = torch.device("cuda:0")
    is_host = False
    has_native_kernels = False

    def name_arithmetic(self):
        return "fake"

    def allocate(self, size_bytes):
        return torch.zeros(size_bytes, dtype=torch.uint8, device=self.torch_device)

    def allocate_staging(self, size_bytes):
        return torch.zeros(size_bytes, dtype=torch.uint8)

    def copy(self, source, target, stream=None):
        target.copy_(source)


def decode_really(out, shard, decode):
    """Decode a weight in real host memory, as decoders look at its bytes, and copy it."""
    shape = tuple(out.shape)
    with unset_fake_temporarily():
        whole = torch.empty(shape if shard is None else shard.widen(shape), dtype=out.dtype)
        decode(whole)
    if shard is not None:
        whole = whole.narrow(shard.axis, shard.start, shard.stop - shard.start)
    out.copy_(whole)


@contextmanager
def load_fake(plan, pool, monkeypatch):
    """Load a plan for ``cuda`` and give the model; fake tensors are on until the end."""
    monkeypatch.setattr(loader, "open_device", lambda _name: FakeCuda())
    # The skeleton is made of real tensors, and whether weights are finite needs values.
    skeleton = build_skeleton(open_checkpoint(plan.folder).config)
    monkeypatch.setattr(loader, "build_skeleton", lambda _config: skeleton)
    for source in (safetensors, gguf):
        monkeypatch.setattr(source, "require_finite", lambda *_: None)
        monkeypatch.setattr(source, "decode_into", decode_really)
    # Native kernels would read fake tensors; these experts are the host's own matter.
    monkeypatch.setattr(NativeExperts, "load", lambda _self, reader, name: reader.skip(f"{name}."))
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        yield loader.load_model(plan, pool)


def run_without_inference(method, *args):
    """Call a method without ``inference_mode``, in which fake tensors of a device fail."""
    return inspect.unwrap(method.__func__)(method.__self__, *args)
