"""The checks of a decode step: what they refuse, whatever passed before."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from embedded_engine.step_checks import StepChecks
from transfer.engine_types import DecodeItem
from transfer.errors import EngineError
from transfer.layer_groups import NO_PAGE, GroupKind, LayerGroup

FULL = LayerGroup(kind=GroupKind.FULL, layers=(0,))
WINDOW = LayerGroup(kind=GroupKind.WINDOW, layers=(1,), window_tokens=4)
STATE = LayerGroup(kind=GroupKind.STATE, layers=(2,))
NUM_PAGES = 5000


def checks_of(*groups: LayerGroup, page_size: int = 1) -> StepChecks:
    return StepChecks(
        groups=groups,
        num_pages=[NUM_PAGES] * len(groups),
        page_size=page_size,
        max_context_tokens=4096,
        vocab_size=100,
    )


def item(position: int, *tables: Sequence[int], request_id: str = "a") -> DecodeItem:
    return DecodeItem(request_id=request_id, token_id=5, position=position, page_tables=tables)


def tables_of(checks: StepChecks, one: DecodeItem) -> tuple[Sequence[int], ...]:
    (checked,) = checks.check_decode([one])
    return checked.page_tables


@pytest.mark.parametrize("wrong", [NO_PAGE, NUM_PAGES, 2**70])
@pytest.mark.parametrize("at", [0, 5, 9, 10])
def test_a_table_that_changed_behind_its_request_is_refused(at: int, wrong: int) -> None:
    checks = checks_of(FULL)
    pages = list(range(11))
    checks.check_decode([item(9, tuple(pages))])
    changed = list(pages)
    changed[at] = wrong
    for table in (tuple(changed), changed):
        with pytest.raises(EngineError, match=rf"request 'a' has pages -?\d+ to \d+; the pool's are in \[0, {NUM_PAGES}\)"):
            checks.check_decode([item(10, table)])
    assert tables_of(checks, item(10, tuple(pages))) == (tuple(pages),)


def test_a_list_that_is_changed_in_place_is_refused() -> None:
    checks = checks_of(FULL)
    pages = list(range(11))
    (kept,) = tables_of(checks, item(9, pages))
    pages[3] = -5
    assert kept[3] == 3, "what was handed on stays as it was checked"
    with pytest.raises(EngineError, match="has pages -5 to 10"):
        checks.check_decode([item(10, pages)])


def test_entries_behind_a_window_do_not_reach_the_engine() -> None:
    checks = checks_of(WINDOW)
    pages = (2**70, -7, 2, 3, 4, 5, 2**70)
    assert tables_of(checks, item(5, pages)) == ((NO_PAGE, NO_PAGE, 2, 3, 4, 5),)
    with pytest.raises(EngineError, match="has pages -7 to 4"):
        checks.check_decode([item(4, pages)])
    assert tables_of(checks, item(5, pages)) == ((NO_PAGE, NO_PAGE, 2, 3, 4, 5),)
    moved = (NO_PAGE, NO_PAGE, NO_PAGE, 3, 4, 5, 6)
    assert tables_of(checks, item(6, moved)) == (moved,)
    with pytest.raises(EngineError, match="has 7 pages of 1 tokens; 8 tokens need 8"):
        checks.check_decode([item(7, moved)])


def test_a_state_has_one_owner_also_when_nothing_changes() -> None:
    checks = checks_of(STATE)
    own, other = (1,), (2,)
    checks.check_decode([item(3, own), item(3, other, request_id="b")])
    with pytest.raises(EngineError, match="requests 'a' and 'b' both have the state in row 1"):
        checks.check_decode([item(4, own), item(4, own, request_id="b")])


def test_a_token_and_a_length_are_checked_in_every_step() -> None:
    checks = checks_of(FULL)
    pages = tuple(range(4096))
    checks.check_decode([item(4095, pages)])
    with pytest.raises(EngineError, match="ends at token 4097; the model's context is 4096"):
        checks.check_decode([item(4096, pages)])
    for token in (-1, 100, 2**70):
        wrong = DecodeItem(request_id="a", token_id=token, position=3, page_tables=(pages,))
        with pytest.raises(EngineError, match=rf"has token {token}; the model's token ids are in \[0, 100\)"):
            checks.check_decode([wrong])
