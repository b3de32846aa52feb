"""The identity of LoRA adapters in a vLLM instance.

An adapter changes the KV of a prompt, so it is part of the prompt's identity. vLLM identifies it by its name and its path.
On another instance, or after a restart, they can stand for other weights.
So kvferry adds a revision: a digest of the files that vLLM loads.

This file imports nothing of vLLM. It reads the attributes of `LoRARequest` in vLLM 0.32 and 0.33.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from transfer.connector.prompt import MAX_CACHE_SALT_CHARS
from transfer.utf8 import is_utf8

CONFIG_NAME: Final = "adapter_config.json"
_WEIGHTS_NAMES: Final = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")  # vLLM loads the first that exists
_REVISION_CHARS: Final = 32
_PREFIX: Final = "lora"
MAX_NAME_CHARS: Final = MAX_CACHE_SALT_CHARS - len(f"{_PREFIX}::") - _REVISION_CHARS

_Stamp = tuple[tuple[str, int, int, int], ...]


@dataclass(slots=True, kw_only=True)
class _Adapter:
    """An adapter that vLLM has loaded."""

    revision: str
    stamp: _Stamp
    has_changed: bool = False  # its files are no longer those of the revision


class VllmAdapters:
    """The adapters of an instance. Owned by the thread of vLLM's scheduler.

    The files of an adapter are read when its first request arrives. vLLM reads them when it loads the adapter, and may read them
    again later. So if they change after that request, requests with the adapter are rejected until it is unloaded and loaded.
    """

    def __init__(self) -> None:
        self._adapters: dict[int, _Adapter] = {}  # by vLLM's id, which is unique for each load

    def problem(self, lora_request: Any) -> str:
        """Return why the KV of a request cannot be moved or stored; empty if it can. None means a request without an adapter."""
        if lora_request is None:
            return ""
        name = str(lora_request.lora_name)
        if len(name) > MAX_NAME_CHARS or not is_utf8(name):
            return f"the name of its LoRA adapter is {name!r:.200}; it must have at most {MAX_NAME_CHARS} characters of UTF-8"
        if lora_request.load_inplace:
            return f"its LoRA adapter {name} was loaded in place, so its revision is unknown; unload it and load it again"
        directory = _directory(str(lora_request.lora_path))
        try:
            stamp = _stamp(directory)
            found = self._adapters.get(lora_request.lora_int_id)
            if found is None:
                revision = _revision(directory, is_3d=bool(lora_request.is_3d_lora_weight))
                found = self._adapters[lora_request.lora_int_id] = _Adapter(revision=revision, stamp=stamp)
        except OSError as error:
            return f"the revision of its LoRA adapter {name} is unknown: {error}"
        found.has_changed = found.has_changed or found.stamp != stamp
        if found.has_changed:
            return f"the files of its LoRA adapter {name} in {directory} have changed; unload it and load it again"
        return ""

    def salt(self, lora_request: Any) -> str:
        """Return the cache salt that stands for a request's adapter: its name and revision. Empty means the model without one.

        The caller has checked the request with `problem`.
        """
        if lora_request is None:
            return ""
        return f"{_PREFIX}:{self._adapters[lora_request.lora_int_id].revision}:{lora_request.lora_name}"


def _directory(lora_path: str) -> Path:
    """Return the local directory of an adapter: the path, or its directory in the hub's cache. Does not use the network."""
    directory = Path(lora_path).expanduser()
    if directory.exists() or directory.is_absolute():
        return directory
    from transformers.utils.hub import cached_file

    try:
        found = cached_file(lora_path, CONFIG_NAME, local_files_only=True)
    except (OSError, ValueError):
        found = None
    return directory if found is None else Path(found).parent


def _files(directory: Path) -> tuple[Path, ...]:
    """Return the files that vLLM loads. Raises FileNotFoundError if there are no weights."""
    for name in _WEIGHTS_NAMES:
        if (directory / name).is_file():
            return directory / CONFIG_NAME, directory / name
    raise FileNotFoundError(f"{directory} has none of {', '.join(_WEIGHTS_NAMES)}")


def _stamp(directory: Path) -> _Stamp:
    """Return values that change if a file is written again or replaced."""
    return tuple((file.name, (found := file.stat()).st_ino, found.st_size, found.st_mtime_ns) for file in _files(directory))


def _revision(directory: Path, *, is_3d: bool) -> str:
    """Return 32 hex digits (SHA-256) of an adapter's files, read whole, and of the way in which vLLM reads them."""
    digest = hashlib.sha256(b"3d" if is_3d else b"")
    for path in _files(directory):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:_REVISION_CHARS]
