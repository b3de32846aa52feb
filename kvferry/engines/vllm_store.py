"""Pages of a vLLM instance in kvferry's store: their keys, lookups, and jobs that save and load them.

This file imports nothing of vLLM. `kvferry.engines.vllm_store_connector` connects it with vLLM's offloading.

A page is a chunk of vLLM's offloading: the KV of consecutive whole blocks in all layers of a group, of all workers. Its name is
vLLM's hash of all tokens up to its end. It contains the bytes of vLLM's blocks, so the fingerprint covers everything that
determines them (`fingerprint`). Pages of kvferry's nodes have another format.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import hashlib
import itertools
import queue
import secrets
import time
from collections.abc import Collection, Coroutine, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Final

import structlog
from torch import Tensor

from kvferry.engines.vllm_facts import LayerFacts, VllmFacts
from node_runtime.loop_thread import LoopThread
from transfer.config import StorageConfig
from transfer.config.storage import ANSWER_S
from transfer.errors import LayoutError, LocalProtocolError
from transfer.metrics import StoreMetrics
from transfer.storage.base import USED_STEP_NS
from transfer.storage.client import StoreClient
from transfer.storage.halving import first_false
from transfer.storage.keys import chain_seed, fields_fingerprint
from transfer.storage.open import check_store, open_store_client

PAGE_FORMAT: Final = 1
"""Version of the fields of a fingerprint. Increase it if the fields or their meaning change."""

BATCH_BYTES: Final = 32 << 20
"""Bytes that are saved or loaded at once. The client allocates the same amount in addition."""

_LATER_FIELDS: Final = ("row_format", "is_draft", "state")
"""Fields of a layer that earlier releases do not have."""

_OTHER_FIELDS: Final = frozenset({"is_dcp_sharded"})
"""Fields of a layer that do not matter: the store refuses context parallelism."""

LOOP_TIMEOUT_S: Final = 30.0
"""Longest wait for kvferry's loop at start and at end. The loop has deadlines of its own."""

_GROUP_BYTES: Final = 4
"""Length of the group's index at the end of vLLM's name of a chunk."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPages:
    """One worker's description of its pages.

    Args:
        fields: All values besides model and tokens that determine the bytes that the worker reads and writes.
        page_bytes: Bytes of a page of all workers.
        is_portable: Whether the bytes of a page are independent of the number of workers. Then `fields` are, too.
    """

    fields: Mapping[str, object]
    page_bytes: int
    is_portable: bool


def rank_fields(facts: VllmFacts, caches: Mapping[str, Tensor], *, is_portable: bool) -> dict[str, object]:
    """Return the fields of a worker. See `RankPages`.

    Args:
        facts: Of the worker.
        caches: vLLM's tensors by layer, ``[blocks, ...]``.
    """
    named: dict[str, object] = {
        "model_dtype": facts.model_dtype,
        "cache_layout": facts.cache_layout,
        "total_num_kv_heads": facts.total_num_kv_heads,
        "layers": [_layer_fields(layer) for layer in facts.layers],
    }
    if is_portable:
        # vLLM has checked that these tensors differ only in their number of heads.
        named["layers"] = [{**_layer_fields(layer), "num_kv_heads": None} for layer in facts.layers]
        return named
    ranks = ("tp_size", "tp_rank", "pp_size", "pp_rank", "stage_layers")
    tensors = {name: (list(cache.shape[1:]), list(cache.stride()[1:])) for name, cache in caches.items()}
    return named | {name: getattr(facts, name) for name in ranks} | {"tensors": tensors}


def _layer_fields(layer: LayerFacts) -> dict[str, object]:
    """Return the fields of a layer. Later fields are left out if empty, so pages of earlier releases stay valid."""
    fields = asdict(layer).items()
    return {name: value for name, value in fields if (value or name not in _LATER_FIELDS) and name not in _OTHER_FIELDS}


def fingerprint(ranks: Sequence[RankPages], *, model: Mapping[str, str], chunks: Mapping[str, object]) -> str:
    """Return the fingerprint of an instance's pages, 32 hex digits. Instances with the same fingerprint can share pages.

    Args:
        ranks: Pages of all workers, by rank.
        model: Fields of the model with the digest of its weights, see `kvferry.engines.vllm_facts.model_fields`.
        chunks: Settings of vLLM that determine how prompts are divided into chunks and hashed.

    Raises:
        LayoutError: The workers do not agree on the size of a page.
    """
    sizes = {rank.page_bytes for rank in ranks}
    if len(sizes) != 1:
        raise LayoutError(f"the workers have pages of {', '.join(map(str, sorted(sizes)))} bytes; they must be equal")
    fields = [rank.fields for rank in ranks]
    if all(rank.is_portable for rank in ranks) and all(one == fields[0] for one in fields):
        fields = fields[:1]
    named = {"vllm_format": PAGE_FORMAT, "model": dict(model), "ranks": fields, "chunks": dict(chunks)}
    return fields_fingerprint(named | {"page_bytes": sizes.pop()})


class PageKeys:
    """Keys of an instance's pages.

    Args:
        fingerprint: See `fingerprint`.
        salt: `storage.salt`.
    """

    def __init__(self, fingerprint: str, salt: str) -> None:
        self.fingerprint: Final = fingerprint
        self._seed = chain_seed(fingerprint, salt, "")

    def key(self, name: bytes) -> str:
        """Return the key of a page. `name` is vLLM's: the hash of the tokens, followed by the group."""
        return f"{self.fingerprint}/{hashlib.sha256(self._seed + name).hexdigest()}-vllm"


@dataclass(slots=True, kw_only=True)
class _Found:
    """Whether a page is stored; None until the store has answered."""

    is_stored: bool | None = None
    request_ids: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    name: bytes
    position: int
    found: _Found


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedJob:
    """A job that has ended.

    Args:
        names: Pages that were saved, or loaded.
        is_whole: Whether these are all pages of the job.
        num_bytes: Their bytes.
    """

    job_id: int
    is_load: bool
    names: tuple[bytes, ...]
    is_whole: bool
    num_bytes: int
    seconds: float


class VllmStore:
    """The store of a vLLM instance. Owned by the thread of vLLM's scheduler. After creation, only `drain` and `close` block.

    Before `start`, lookups find nothing, and nothing is saved.

    Args:
        config: The settings. A lookup or a load ends after `get_timeout_s`, a save after `put_timeout_s`.
        memory: vLLM's host memory, [chunks, bytes of a chunk].
        observer: Counts the store's calls, on kvferry's loop.

    Raises:
        ConfigError: The store cannot be opened.
    """

    def __init__(self, config: StorageConfig, *, memory: memoryview, observer: StoreMetrics) -> None:
        check_store(config)
        self._config = config
        self._chunk_bytes = memory.nbytes // len(memory)
        self._memory = memory.cast("B")
        self._page_bytes = 0
        self._keys: PageKeys | None = None
        self._found: dict[bytes, _Found] = {}
        self._names_of: dict[str, set[bytes]] = {}
        self._questions: dict[str, list[_Question]] = {}
        self._answers: queue.SimpleQueue[Sequence[tuple[_Found, bool]]] = queue.SimpleQueue()
        self._jobs: dict[int, tuple[tuple[bytes, ...], concurrent.futures.Future[None]]] = {}
        self._finished: queue.SimpleQueue[FinishedJob] = queue.SimpleQueue()
        self._turns = {is_load: asyncio.Lock() for is_load in (False, True)}
        self._is_closed = False
        self._thread = LoopThread.shared()
        try:
            self._client = self._thread.start(self._opened(observer)).result(LOOP_TIMEOUT_S)
        except BaseException:
            self._thread.release()
            raise

    def start(self, keys: PageKeys, *, page_bytes: int) -> None:
        """Begin to use the store.

        Args:
            page_bytes: Bytes of a page. A page is at the beginning of a chunk of host memory.
        """
        self._keys, self._page_bytes = keys, page_bytes

    def separate(self) -> None:
        """From now on, use keys that no other instance has. Pages that were stored before are not found any more."""
        if self._keys is not None:
            self._keys = PageKeys(self._keys.fingerprint, secrets.token_hex(16))
            log.warning("store_separated", store=self._client.name, reason="vLLM's caches were reset; restart it to share pages")

    # Lookups

    def is_stored(self, name: bytes, request_id: str, *, position: int) -> bool | None:
        """Return whether a page is stored; None means that the answer is not known yet. `ask` sends the question to the store.

        The answer is kept until `forget` was called for all requests that looked up the page.

        Args:
            name: vLLM's name of the page.
            position: Tokens up to its end. If a request looks up pages of a group in ascending order, a page counts as stored
                only if all pages before it are stored.
        """
        if self._keys is None:
            return False
        self._take_answers()
        found = self._found.get(name)
        if found is None:
            found = self._found[name] = _Found()
            self._questions.setdefault(request_id, []).append(_Question(name=name, position=position, found=found))
        found.request_ids.add(request_id)
        self._names_of.setdefault(request_id, set()).add(name)
        return found.is_stored

    def ask(self) -> None:
        """Ask the store about the pages that were looked up since the last call."""
        self._take_answers()
        questions, self._questions = self._questions, {}
        for of_request in questions.values():
            self._start(self._ask(of_request))

    def forget(self, request_id: str) -> None:
        """Forget the answers for a request, except those that other requests also looked up."""
        for name in self._names_of.pop(request_id, ()):
            found = self._found[name]
            found.request_ids.discard(request_id)
            if not found.request_ids:
                del self._found[name]

    def _take_answers(self) -> None:
        while not self._answers.empty():
            for found, is_stored in self._answers.get():
                found.is_stored = is_stored

    # Jobs

    def save(self, job_id: int, names: Collection[bytes], chunks: Sequence[int]) -> None:
        """Save pages from chunks of host memory, which must not change until the job has ended."""
        self._begin(job_id, names, chunks, is_load=False)

    def load(self, job_id: int, names: Collection[bytes], chunks: Sequence[int]) -> None:
        """Load pages into chunks of host memory. Chunks of pages that were not loaded do not change."""
        self._begin(job_id, names, chunks, is_load=True)

    def finished(self) -> list[FinishedJob]:
        """Return jobs that have ended since the last call. From then on, pages that could not be loaded count as not stored."""
        jobs = []
        while not self._finished.empty():
            job = self._finished.get()
            names, _ = self._jobs.pop(job.job_id)
            if job.is_load and not job.is_whole:
                log.warning("stored_pages_not_loaded", wanted=len(names), loaded=len(job.names), store=self._client.name)
                for name in set(names).difference(job.names):
                    if name in self._found:
                        self._found[name].is_stored = False
            jobs.append(job)
        return jobs

    def drain(self) -> None:
        """Wait until all jobs have ended. Their deadlines bound the wait.

        Raises:
            LocalProtocolError: A job has not ended, so host memory may still be in use.
        """
        # A save whose last batch begins at its deadline takes twice the time.
        longest_s = 2 * max(self._timeout_s(is_load=is_load) for is_load in (False, True)) + ANSWER_S
        if concurrent.futures.wait([future for _, future in self._jobs.values()], longest_s).not_done:
            raise LocalProtocolError(f"a job of the store has not ended after {longest_s:g} s; host memory may be in use")

    def close(self) -> None:
        """Abort all jobs, and wait a bounded time for the store. Afterwards, host memory is not used. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._thread.start(self._client.close()).result(LOOP_TIMEOUT_S)
            self.drain()
        finally:
            self._thread.release()
            self._memory.release()

    def _begin(self, job_id: int, names: Collection[bytes], chunks: Sequence[int], *, is_load: bool) -> None:
        names = tuple(names)
        pages = []
        if self._keys is not None:
            for name, chunk in zip(names, chunks, strict=True):
                begin = int(chunk) * self._chunk_bytes
                pages.append((self._keys.key(name), self._memory[begin : begin + self._page_bytes]))
        self._jobs[job_id] = names, self._start(self._run(job_id, names, pages, is_load=is_load))

    def _start(self, work: Coroutine[Any, Any, None]) -> concurrent.futures.Future[None]:
        future = self._thread.start(work)
        future.add_done_callback(_log_failure)
        return future

    def _timeout_s(self, *, is_load: bool) -> float:
        return self._config.get_timeout_s if is_load else self._config.put_timeout_s

    # On the loop

    async def _opened(self, observer: StoreMetrics) -> StoreClient:
        client = open_store_client(self._config, loop=asyncio.get_running_loop(), observer=observer)
        assert client is not None, "the settings name a store"
        return client

    async def _ask(self, questions: Sequence[_Question]) -> None:
        """Ask about the pages of one request, by group."""
        deadline_s = asyncio.get_running_loop().time() + self._config.get_timeout_s
        stored: set[bytes] = set()
        try:
            for group in {question.name[-_GROUP_BYTES:] for question in questions}:
                of_group = [question for question in questions if question.name[-_GROUP_BYTES:] == group]
                stored.update(await self._stored(of_group, deadline_s))
        finally:
            self._answers.put([(question.found, question.name in stored) for question in questions])

    async def _stored(self, questions: Sequence[_Question], deadline_s: float) -> list[bytes]:
        """Return the names of the stored pages."""
        assert self._keys is not None
        names = [question.name for question in questions]
        keys = [self._keys.key(name) for name in names]
        positions = [question.position for question in questions]
        if all(before < after for before, after in itertools.pairwise(positions)):
            return names[: await first_false(partial(self._has, keys, deadline_s), len(keys))]
        answers = await self._client.exists(keys, timeout_s=max(0.0, deadline_s - asyncio.get_running_loop().time()))
        return [name for name, is_there in zip(names, answers, strict=True) if is_there]

    async def _has(self, keys: Sequence[str], deadline_s: float, index: int) -> bool:
        left_s = deadline_s - asyncio.get_running_loop().time()
        return left_s > 0 and (await self._client.exists([keys[index]], timeout_s=left_s))[0]

    async def _run(
        self, job_id: int, names: tuple[bytes, ...], pages: Sequence[tuple[str, memoryview]], *, is_load: bool
    ) -> None:
        """Run a job. Jobs of one kind run one after another, so that together they do not exceed `queue_bytes`. Waiting counts
        towards a job's deadline.
        """
        begun_s = time.monotonic()
        deadline_s = asyncio.get_running_loop().time() + self._timeout_s(is_load=is_load)
        done: list[bytes] = []
        try:
            async with asyncio.timeout_at(deadline_s):
                await self._turns[is_load].acquire()
            try:
                await self._move(names, pages, deadline_s, done, is_load=is_load)
            finally:
                self._turns[is_load].release()
        except TimeoutError:
            log.warning("store_turn_timed_out", is_load=is_load, pages=len(pages), store=self._client.name)
        finally:
            self._finished.put(
                FinishedJob(
                    job_id=job_id,
                    is_load=is_load,
                    names=tuple(done),
                    is_whole=len(done) == len(names),
                    num_bytes=len(done) * self._page_bytes,
                    seconds=time.monotonic() - begun_s,
                )
            )

    async def _move(
        self,
        names: Sequence[bytes],
        pages: Sequence[tuple[str, memoryview]],
        deadline_s: float,
        done: list[bytes],
        *,
        is_load: bool,
    ) -> None:
        """Save or load pages in batches, and add the successful ones to `done`. Stop after a batch in which a page failed."""
        used_ns = time.time_ns()
        for first, batch in _batches(pages, min(BATCH_BYTES, self._config.queue_bytes)):
            left_s = deadline_s - asyncio.get_running_loop().time()
            if left_s <= 0:
                return
            batch_used_ns = used_ns - first * USED_STEP_NS
            if is_load:
                answers = await self._client.get(batch, timeout_s=left_s, used_ns=batch_used_ns)
            else:
                answers = await self._client.put(batch, used_ns=batch_used_ns)
            done += [name for name, is_moved in zip(names[first:], answers, strict=False) if is_moved]
            if not all(answers):
                return


def _batches(pages: Sequence[tuple[str, memoryview]], most_bytes: int) -> Iterator[tuple[int, Sequence[tuple[str, memoryview]]]]:
    """Yield batches of at most `most_bytes`, but at least one page, each with the index of its first page."""
    at_once = max(1, most_bytes // pages[0][1].nbytes) if pages else 1
    for first in range(0, len(pages), at_once):
        yield first, pages[first : first + at_once]


def _log_failure(future: concurrent.futures.Future[None]) -> None:
    """Log an unexpected error. The pages of the failed call count as not stored, saved or loaded, so the engine computes them."""
    if not future.cancelled() and (error := future.exception()) is not None:
        log.error("store_task_failed", error=repr(error), exc_info=error)
