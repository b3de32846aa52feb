"""SGLang's staging calls, from its wheel at run time; nothing of SGLang is in this repository.

Only two of its files are loaded, its staging buffer and its pointer table; what they import from the rest of SGLang (settings,
stream helpers) is stood in for here, so that no engine has to be installed. The calls are those that its prefill and decode nodes
make: `gather` launches its kernel on a stream of its own and waits for that stream, `scatter` launches on the current stream.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
import types
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

VERSION = "0.5.23"
_STAGING = "sglang.srt.disaggregation.common.staging_buffer"
_POINTERS = "sglang.kernels.ops.memory.ptr_table"


class NoSglang(Exception):
    """SGLang's staging calls cannot be had; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangStaging:
    """SGLang's two calls and the kernels in them.

    Attributes:
        module: Its staging module, for what is not named here (the bare kernels).
    """

    module: Any

    def buffer(self, num_bytes: int, device: torch.device) -> Any:
        """Its staging memory; `.buffer` is the uint8 tensor."""
        return self.module.StagingBuffer(num_bytes, str(device), device.index)

    def gather(
        self,
        k_buffers: Sequence[Tensor],
        v_buffers: Sequence[Tensor],
        pages: np.ndarray,
        out: Any,
        *,
        num_heads: int,
        page_size: int,
    ) -> int:
        """Its whole gather call: the first `num_heads` heads of these pages, K of every layer, then V; returns the bytes.

        Args:
            k_buffers, v_buffers: A layer each, [slots, heads, head_dim], on the device.
            pages: int32 [n] on the host, as SGLang keeps them.
            out: From `buffer`.
        """
        num_bytes: int = self.module.gather_all_layers_to_staging(k_buffers, v_buffers, pages, out, 0, num_heads, page_size)
        return num_bytes

    def scatter(
        self,
        source: Tensor,
        k_buffers: Sequence[Tensor],
        v_buffers: Sequence[Tensor],
        pages: Tensor,
        *,
        num_heads: int,
        page_size: int,
    ) -> None:
        """Its whole scatter call, for one writer's bytes into the first `num_heads` heads.

        Args:
            source: uint8, on the device.
            pages: int64 [n] on the device, as SGLang slices them from its table.
        """
        # Equal degrees make it one writer; that many heads in all, over one rank, make it the slice that this writer has.
        self.module.scatter_staging_to_kv(source, k_buffers, v_buffers, pages, page_size, 1, 1, 0, num_heads)


def load(wheel: Path | None = None) -> SglangStaging:
    """SGLang's staging calls.

    Args:
        wheel: Its wheel, or a directory that has the files as the wheel has them; None: pip downloads it.

    Raises:
        NoSglang: There are no such files, they cannot be downloaded, or they do not load.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="kvferry-sglang-download-") as downloaded:
            folder = _unpacked(wheel if wheel is not None else _download(Path(downloaded)))
        with _stood_in():
            _load(_POINTERS, folder)
            return SglangStaging(module=_load(_STAGING, folder))
    except (OSError, KeyError, ImportError, AttributeError, zipfile.BadZipFile, subprocess.SubprocessError) as error:
        source = "the wheel that pip downloads" if wheel is None else str(wheel)
        raise NoSglang(f"SGLang's staging calls cannot be had from {source}: {type(error).__name__}: {error}") from error


def _download(folder: Path) -> Path:
    options = ["--quiet", "--no-deps", "--retries", "1", "--timeout", "10", "--dest", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "download", *options, f"sglang=={VERSION}"], check=True, timeout=300)
    return next(folder.glob("sglang-*.whl"))


def _unpacked(wheel: Path) -> Path:
    """A directory with the two files; Triton reads a kernel's source from its file, so it stays for as long as the process."""
    if wheel.is_dir():
        return wheel
    kept = tempfile.TemporaryDirectory(prefix="kvferry-sglang-")
    _KEPT.append(kept)
    with zipfile.ZipFile(wheel) as archive:
        for name in (_STAGING, _POINTERS):
            archive.extract(_file_of(name), kept.name)
    return Path(kept.name)


_KEPT: list[tempfile.TemporaryDirectory[str]] = []


def _file_of(module: str) -> str:
    return module.replace(".", "/") + ".py"


def _load(name: str, folder: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, folder / _file_of(name))
    if spec is None or spec.loader is None:
        raise ImportError(f"{folder / _file_of(name)} is no module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and Triton look their module up by name
    spec.loader.exec_module(module)
    return module


@contextmanager
def _stood_in() -> Iterator[None]:
    """The modules that SGLang's two files import, for as long as they are being loaded; what the environment has is put back."""
    setting = types.SimpleNamespace(get=lambda: False)
    parts: dict[str, dict[str, Callable[..., Any] | Any]] = {
        "sglang.srt.environ": {"envs": types.SimpleNamespace(SGLANG_STAGING_USE_TORCH=setting)},
        "sglang.srt.utils": {
            "create_device_stream": lambda device: torch.cuda.Stream(device=device),
            "device_stream_context": torch.cuda.stream,
        },
    }
    packages = {name.rsplit(".", depth)[0] for name in (_STAGING, _POINTERS, *parts) for depth in range(1, name.count(".") + 1)}
    before = {name: sys.modules.get(name) for name in (*packages, *parts)}
    for name in sorted(packages):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = []
    for name, members in parts.items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(members)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
