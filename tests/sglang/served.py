"""Two real SGLang engines, KV by kvferry: the tokens are those of the model run alone; see README.md. Not part of `make test`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import pytest

from kvferry.demo.kinds import HEAD_DIM, NUM_KV_HEADS, NUM_LAYERS, WINDOW_TOKENS
from kvferry.demo.model import make_demo_model
from tests.cluster.calls import Reference, prompt
from tests.sglang.models import NUM_FULL_LAYERS, make_windows_model
from tests.sglang.servers import Cut, Pair, alone, post, running

LENGTHS = (10, 17, 33, 64, 100, 128, 129, 200, 256, 300, 333, 400, 450, 511, 513, 550, 599, 600, 31, 77)
NEW_TOKENS = 16
LAYER_ELEMENTS = 2 * NUM_KV_HEADS * HEAD_DIM  # of K and V of a token

pytestmark = pytest.mark.timeout(900)


def http_session() -> aiohttp.ClientSession:
    """Return a session with a connection for each request: the servers close idle ones after 5 s, in which a prompt may end."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_demo_model(tmp_path_factory.mktemp("models") / "demo")


@pytest.fixture(scope="session")
def reference(model: Path) -> Reference:
    return Reference(model)


def tokens_of(answer: dict[str, object]) -> list[int]:
    assert answer["status"] == 200, answer
    found = answer["output_ids"]
    assert isinstance(found, list)
    return found


async def all_right(pair: Pair, reference: Reference, lengths: Sequence[int], *, variant: int = 0) -> None:
    """All at once, and each as the model alone says it."""
    prompts = [prompt(length, variant + index) for index, length in enumerate(lengths)]
    async with http_session() as session:
        answers = await asyncio.gather(*(pair.generate(session, one, NEW_TOKENS) for one in prompts))
    for length, one, answer in zip(lengths, prompts, answers, strict=True):
        assert tokens_of(answer) == list(reference.tokens(one, NEW_TOKENS)), f"prompt of {length} tokens"
    await pair.settled()


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        pytest.param(Cut(tp_size=2), Cut(tp_size=1), id="tp2-tp1"),
        pytest.param(Cut(tp_size=1, page_size=16), Cut(tp_size=2, page_size=1), id="tp1-page16-tp2-page1"),
        pytest.param(Cut(tp_size=2, optimistic_attempts=1), Cut(tp_size=1), id="optimistic"),
    ],
)
async def test_twenty_prompts_at_once_over_different_cuts(
    model: Path, reference: Reference, tmp_path: Path, prefill: Cut, decode: Cut
) -> None:
    with running(model, tmp_path, prefill=prefill, decode=decode) as pair:
        await all_right(pair, reference, LENGTHS)
        before = {engine.role: engine.overhead() for engine in (pair.prefill, pair.decode)}
        await all_right(pair, reference, LENGTHS, variant=100)
        await asyncio.sleep(1.0)  # the schedulers write them twice a second
        for engine in (pair.prefill, pair.decode):
            spent, earlier = engine.overhead(), before[engine.role]
            ours, steps = (spent["seconds"][kind] - earlier["seconds"][kind] for kind in ("kvferry", "steps"))
            calls = spent["numbers"]["kvferry"] - earlier["numbers"]["kvferry"]
            print(f"{engine.role}: {ours:.4f} s in {calls} calls of kvferry, {steps:.3f} s in steps: {ours / steps:.2%}")
            assert ours < 0.03 * steps


async def test_stages_of_prefill(model: Path, reference: Reference, tmp_path: Path) -> None:
    """Each stage sends its layers to the one rank of decode."""
    with running(model, tmp_path, prefill=Cut(pp_size=2, page_size=4), decode=Cut(page_size=16)) as pair:
        await all_right(pair, reference, LENGTHS)
        assert await moved_bytes(pair) == sum(LENGTHS) * NUM_LAYERS * LAYER_ELEMENTS * 4
        await clients_that_leave(pair, reference)


async def test_of_a_window_only_its_tokens_travel(tmp_path: Path) -> None:
    """SGLang keeps one token less than the model's window, which counts the token that is computed."""
    model = make_windows_model(tmp_path / "model")
    prefill = Cut(tp_size=2, page_size=4, is_caching=True)
    with running(model, tmp_path, prefill=prefill, decode=Cut(page_size=16)) as pair:
        await all_right(pair, Reference(model), LENGTHS)
        in_windows = sum(min(length, WINDOW_TOKENS - 1) for length in LENGTHS)
        num_layer_tokens = NUM_FULL_LAYERS * sum(LENGTHS) + (NUM_LAYERS - NUM_FULL_LAYERS) * in_windows
        assert await moved_bytes(pair) == num_layer_tokens * LAYER_ELEMENTS * 4
        await prefixes_of_windows(pair, Reference(model))


async def prefixes_of_windows(pair: Pair, reference: Reference) -> None:
    """Prefill has the beginning of a prompt in both pools."""
    first = prompt(300, 40)
    async with http_session() as session:
        for one in (first, (*first[:250], *prompt(100, 41)), first, first[:289]):
            assert tokens_of(await pair.generate(session, one, NEW_TOKENS)) == reference.tokens(one, NEW_TOKENS)
    await pair.settled()


async def test_eight_bit_floats(model: Path, tmp_path: Path) -> None:
    """One prompt at a time: rounding to 8 bits shows in tokens if a batch adds numbers in another order."""
    cut = Cut(kv_dtype="fp8_e4m3", page_size=16)
    lengths = (10, 33, 64, 129, 300, 513)
    async with http_session() as session:
        with alone(model, tmp_path, cut=cut) as engine:
            expected = [tokens_of(await engine.generate(session, prompt(length), NEW_TOKENS)) for length in lengths]
        with running(model, tmp_path, prefill=Cut(kv_dtype="fp8_e4m3", page_size=4), decode=cut) as pair:
            found = [tokens_of(await pair.generate(session, prompt(length), NEW_TOKENS)) for length in lengths]
            assert found == expected
            assert await moved_bytes(pair) == sum(lengths) * NUM_LAYERS * LAYER_ELEMENTS


async def test_one_pair_through_everything(model: Path, reference: Reference, tmp_path: Path) -> None:
    """Pages of other sizes, prefix caches on both sides, log probabilities, aborts in mid-prefill, prefill killed."""
    prefill, decode = Cut(page_size=4, chunk_tokens=32, is_caching=True), Cut(page_size=16, is_caching=True)
    with running(model, tmp_path, prefill=prefill, decode=decode) as pair:
        await all_right(pair, reference, LENGTHS)
        await prefixes_that_are_there(pair, reference)
        await first_token_has_its_logprob(pair)
        await clients_that_leave(pair, reference)
        await only_decode_is_told_to_stop(pair, reference)
        await prefill_is_killed(pair)


async def prefixes_that_are_there(pair: Pair, reference: Reference) -> None:
    """Decode has kept the beginning of a prompt, or all of it: only the rest moves, and the tokens are the same."""
    first, before = prompt(300, 40), await moved_bytes(pair)
    rest = [first, (*first[:250], *prompt(100, 41)), first, first[:288], first[:289]]
    moved: list[float] = []
    async with http_session() as session:
        for one in rest:
            answer = await pair.generate(session, one, NEW_TOKENS)
            assert tokens_of(answer) == reference.tokens(one, NEW_TOKENS)
            before, last = await moved_bytes(pair), before
            moved.append(before - last)
    per_token = moved[0] / 300
    # Of the second 250 tokens are there in 15 whole pages of 16; of the third, fourth and fifth all but what is in no whole page.
    assert [round(one / per_token) for one in moved] == [300, 110, 12, 16, 1]


async def moved_bytes(pair: Pair) -> float:
    await pair.settled()
    await asyncio.sleep(1.5)  # reports of the ranks
    return pair.prefill.metric("kvferry_transferred_bytes_total")


async def first_token_has_its_logprob(pair: Pair) -> None:
    """What travels beside the KV: the first token comes from prefill, with its log probability."""
    async with http_session() as session:
        body = pair.body(prompt(40), 7, 4) | {"return_logprob": True, "top_logprobs_num": 3}
        first, second = await asyncio.gather(*(post(session, one, body) for one in (pair.prefill, pair.decode)))
    assert first["status"] == second["status"] == 200, second
    rows = second["meta_info"]["output_token_logprobs"]
    assert [row[1] for row in rows] == second["output_ids"] and all(row[0] < 0 for row in rows)
    assert rows[0] == pytest.approx(first["meta_info"]["output_token_logprobs"][0])
    assert len(second["meta_info"]["output_top_logprobs"][0]) == 3


async def clients_that_leave(pair: Pair, reference: Reference) -> None:
    """Connections that end while prefill computes: nothing is left, and others are answered right."""
    async with http_session() as session:
        leaving = [asyncio.ensure_future(pair.generate(session, prompt(600, 50 + index), NEW_TOKENS)) for index in range(6)]
        staying = asyncio.ensure_future(all_right(pair, reference, (600, 20), variant=70))
        await asyncio.sleep(0.4)
        for task in leaving:
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        await staying
    await pair.settled()
    await all_right(pair, reference, (30, 500), variant=80)


async def only_decode_is_told_to_stop(pair: Pair, reference: Reference) -> None:
    """Prefill hears of it from kvferry, and not from its client."""
    async with http_session() as session:
        body = pair.body(prompt(600, 90), 11, NEW_TOKENS)
        prefill = asyncio.ensure_future(post(session, pair.prefill, body))
        decode = asyncio.ensure_future(post(session, pair.decode, body))
        await asyncio.sleep(0.3)
        decode.cancel()
        answer = await prefill
    assert answer["status"] in (200, 500), answer  # 200 where all was sent before the client left
    await pair.settled()
    await all_right(pair, reference, (64,), variant=91)


async def prefill_is_killed(pair: Pair) -> None:
    """Decode fails what it cannot get any more, in seconds, and keeps nothing of it."""
    async with http_session() as session:
        bodies = [pair.body(prompt(600, 100 + index), 1000 + index, NEW_TOKENS) for index in range(4)]
        prefill = [asyncio.ensure_future(post(session, pair.prefill, body)) for body in bodies]
        decode = [asyncio.ensure_future(post(session, pair.decode, body)) for body in bodies]
        await asyncio.sleep(0.3)
        pair.prefill.kill()
        killed_s = time.monotonic()
        answers = await asyncio.gather(*decode)
        took_s = time.monotonic() - killed_s
        await asyncio.gather(*prefill, return_exceptions=True)
    failed = [answer for answer in answers if answer["status"] != 200]
    assert failed and all(answer["status"] == 500 and "Decode transfer failed" in str(answer) for answer in failed), answers
    assert took_s < 20.0
    await pair.settled()
    assert pair.decode.process is not None and pair.decode.process.poll() is None
