"""SGLang's disaggregation through kvferry: ``--disaggregation-transfer-backend kvferry`` on both engines.

SGLang loads `activate` by the entry point group ``sglang.srt.plugins``, in each of its processes, whatever backend is chosen; it
names the backend and touches nothing else. What SGLang then asks for comes from `kvferry.engines.sglang_classes`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, Final

from transfer.errors import ConfigError

BACKEND: Final = "kvferry"
TESTED_VERSIONS: Final = ("0.5.23",)
ANY_VERSION: Final = "SGLANG_KVFERRY_ANY_VERSION"
"""Environment variable that has any version of SGLang taken, at one's own risk."""

GET_CLASS: Final = "sglang.srt.disaggregation.utils.get_kv_class"
SCHEDULER: Final = {
    # Where a scheduler makes its manager: the queue has the pool's tensors, of which the manager is given only addresses.
    "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue._init_kv_manager": "making_manager",
    "sglang.srt.disaggregation.decode.DecodePreallocQueue._init_kv_manager": "making_manager",
    # Where a scheduler makes a sender or a receiver: the request has the prompt's tokens, of which those are told nothing.
    "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.create_sender": "made_sender",
    "sglang.srt.disaggregation.decode.DecodePreallocQueue._create_receiver_and_enqueue": "made_receiver",
}


def activate() -> None:
    """Add the backend to SGLang's; its entry point."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.disaggregation import utils
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if BACKEND in choices.DISAGG_TRANSFER_BACKEND_CHOICES:
        return
    choices.add_disagg_transfer_backend_choices([BACKEND])
    _add_member(utils.TransferBackend)
    HookRegistry.register(GET_CLASS, _get_kv_class, HookType.AROUND)
    for target, name in SCHEDULER.items():
        # Only a process that has a scheduler has loaded these; for the others they would be seconds of imports.
        if target.rsplit(".", 2)[0] in sys.modules:
            HookRegistry.register(target, _later(name), HookType.AROUND)


def check_version() -> None:
    """Refuse a version of SGLang that this was not tested with.

    Raises:
        ConfigError: It is another one, and the environment does not say that it shall be taken.
    """
    found = version("sglang")
    if found not in TESTED_VERSIONS and not os.environ.get(ANY_VERSION):
        raise ConfigError(
            f"sglang is {found}; kvferry's backend was tested with {', '.join(TESTED_VERSIONS)} ({ANY_VERSION}=1 takes any)"
        )


def _add_member(backends: Any) -> None:
    """SGLang's backends are an enum without a way to add one; the values of its arguments are looked up in it."""
    member = object.__new__(backends)
    member._name_, member._value_, member._sort_order_ = BACKEND.upper(), BACKEND, len(backends)
    member.__objclass__ = backends
    backends._member_map_[member._name_] = member
    backends._value2member_map_[BACKEND] = member
    backends._member_names_.append(member._name_)


def _get_kv_class(original: Callable[[Any, Any], Any], transfer_backend: Any, class_type: Any) -> Any:
    if getattr(transfer_backend, "value", None) != BACKEND or class_type.value == "kvargs":
        return original(transfer_backend, class_type)
    check_version()
    from kvferry.engines import sglang_classes

    return sglang_classes.CLASSES[class_type.value]


def _later(name: str) -> Callable[..., Any]:
    """A hook of `sglang_classes`, which is loaded only where the backend is used."""

    def hook(original: Callable[..., Any], queue: Any, *args: Any, **kwargs: Any) -> Any:
        if queue.transfer_backend.value != BACKEND:
            return original(queue, *args, **kwargs)
        from kvferry.engines import sglang_classes

        return getattr(sglang_classes, name)(original, queue, *args, **kwargs)

    return hook
