"""Send prompts to a vLLM instance by its own API, if a decode node requests them and no router sent them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import aiohttp

from transfer.connector.outgoing import Transfer
from transfer.errors import ConfigError, EngineError, PeerUnreachable, TransferError

CONNECT_TIMEOUT_S: Final = 5.0
_SHOWN_CHARS: Final = 300

_KINDS: Final[dict[int, type[TransferError]]] = {
    400: ConfigError,
    422: ConfigError,
    429: PeerUnreachable,  # another prefill node may have room
    503: PeerUnreachable,
}


class ComputeByApi:
    """The `compute` of `OfferedPrompts`.

    Args:
        url: URL of the OpenAI API, without a path.
        api_key: None means that the API needs no key.
        headers: Further headers of each request.
    """

    def __init__(self, url: str, api_key: str | None, *, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        self._url = url.rstrip("/")
        self._headers = dict(headers) | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        self._model = ""

    async def __call__(self, transfer: Transfer) -> None:
        """Have the prompt computed. If cancelled, give it up.

        Raises:
            ConfigError: The engine rejects the prompt.
            PeerUnreachable: The engine does not answer, or is full.
            EngineError: The engine fails, or rejects this caller.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        try:
            async with aiohttp.ClientSession(headers=self._headers, timeout=timeout) as session:
                if not self._model:
                    models = await self._answer(session.get(f"{self._url}/v1/models"))
                    self._model = str(models["data"][0]["id"])
                await self._answer(session.post(f"{self._url}/v1/completions", json=self._question(transfer)))
        except (aiohttp.ClientConnectionError, TimeoutError) as error:
            raise PeerUnreachable(f"the engine's API at {self._url} does not answer: {error}") from error
        except (aiohttp.ClientError, KeyError, IndexError, TypeError) as error:
            raise EngineError(f"the engine's API at {self._url} gave no answer that makes sense: {error!r}") from error

    def _question(self, transfer: Transfer) -> dict[str, Any]:
        sampling = transfer.sampling
        salt = {"cache_salt": transfer.cache_salt} if transfer.cache_salt else {}  # an empty one is refused
        return salt | {
            "model": self._model,
            "prompt": list(transfer.token_ids),
            "max_tokens": 1,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "seed": sampling.seed,
            "repetition_penalty": 1.0,  # otherwise these two may come from the model's generation_config.json
            "min_p": 0.0,
            "kv_transfer_params": {
                "do_remote_decode": True,
                "do_remote_prefill": False,
                "transfer_id": transfer.engine_request,
                "is_whole_prompt": True,  # with recurrent states, decode has left out the last token
            },
        }

    async def _answer(self, request: Any) -> Any:
        async with request as answer:
            if answer.status == 200:
                return await answer.json()
            kind = _KINDS.get(answer.status, EngineError)
            raise kind(f"the engine's API at {self._url} refuses ({answer.status}): {_message_of(await answer.read())}")


def _message_of(content: bytes) -> str:
    text = content.decode(errors="replace")
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        text = str(json.loads(text)["error"]["message"])
    return " ".join(text.split())[:_SHOWN_CHARS] or "without a reason"
