"""Pages of each layer group's pool within a budget, and the page tables that show them."""

from __future__ import annotations

from typing import Final

from planner.plan_inputs import PlanInputs
from planner.plan_values import GroupPlan, PlanLine
from transfer.layer_groups import PAGE_TABLE_COLUMNS, GroupKind, LayerGroup, page_table_tokens
from transfer.layout import Shard

_INDEX_BYTES: Final = 4  # int32


class PoolSizing:
    """Pages of each group, as a function of one number: the pages of the group that keeps every token."""

    def __init__(self, inputs: PlanInputs, shard: Shard) -> None:
        self._inputs = inputs
        self._shard = shard
        self._layout = inputs.layout
        self._groups = inputs.groups
        self._page_bytes = [group.page_bytes(self._layout, shard) for group in self._groups]
        self._needed = [self._needed_pages(group) for group in self._groups]

    def _needed_pages(self, group: LayerGroup) -> int:
        """Return the pages that `max_running_requests` requests of the greatest length can hold at once."""
        inputs = self._inputs
        peak = group.peak_pages(inputs.sequence_tokens, page_size=inputs.page_size, tokens_in_flight=inputs.most_tokens_in_flight)
        return inputs.max_running_requests * peak

    def pages(self, index: int, num_pages: int) -> int:
        """Return the pages of a group: one for each request's state; for windows the peak of all requests, up to `num_pages`."""
        group = self._groups[index]
        if group.kind is GroupKind.FULL:
            return num_pages
        return self._needed[index] if group.kind is GroupKind.STATE else min(self._needed[index], num_pages)

    def cost(self, num_pages: int) -> int:
        return sum(size * self.pages(index, num_pages) for index, size in enumerate(self._page_bytes))

    def most_pages(self, budget: int) -> int:
        """Return the most pages whose pools and page tables fit the budget; 0 if not one page fits."""
        full = [size for group, size in zip(self._groups, self._page_bytes, strict=True) if group.kind is GroupKind.FULL]
        if any(full):
            high = max(0, budget) // sum(full)
        else:  # no group keeps every token: as many as all requests can use
            high = max((self._needed[i] for i, group in enumerate(self._groups) if group.kind is not GroupKind.STATE), default=0)
            high = high or self._inputs.max_running_requests * -(-self._inputs.sequence_tokens // self._inputs.page_size)
        low = 0  # the answer is in [low, high]
        while low < high:
            middle = (low + high + 1) // 2
            if self.cost(middle) + self.page_tables(middle).num_bytes <= budget:
                low = middle
            else:
                high = middle - 1
        return low

    def page_tables(self, num_pages: int) -> PlanLine:
        """Return the line of the page tables on the device, which are no wider than the pool."""
        inputs = self._inputs
        tokens = page_table_tokens(
            self._groups,
            num_pages=num_pages,
            page_size=inputs.page_size,
            max_seq_len=inputs.sequence_tokens,
            has_host_pages=inputs.has_host_pages,
        )
        columns = -(-tokens // PAGE_TABLE_COLUMNS) * PAGE_TABLE_COLUMNS
        num_tables = sum(group.kind is not GroupKind.STATE for group in self._groups) if inputs.has_page_tables else 0
        requests = inputs.max_running_requests
        return PlanLine(
            name="page_tables",
            num_bytes=(requests + 1) * columns * _INDEX_BYTES * num_tables,
            formula=f"({requests} + 1) rows x {columns:,} x {_INDEX_BYTES} B x {num_tables} group(s) with pages",
        )

    def groups(self, num_pages: int) -> tuple[GroupPlan, ...]:
        found = []
        for index, group in enumerate(self._groups):
            pages, page_size = self.pages(index, num_pages), group.page_size(self._inputs.page_size)
            found.append(
                GroupPlan(
                    name=group.name,
                    kind=group.kind,
                    layers=group.layers_of(self._layout, self._shard),
                    cell_bytes=self._page_bytes[index] // page_size,
                    num_tokens=pages * page_size,
                    num_pages=pages,
                    page_size=page_size,
                    num_bytes=pages * self._page_bytes[index],
                )
            )
        return tuple(found)

    def lines(self, groups: tuple[GroupPlan, ...]) -> list[PlanLine]:
        return [
            PlanLine(name=f"pool_{plan.name}", num_bytes=plan.num_bytes, formula=self._formula(group, plan))
            for group, plan in zip(self._groups, groups, strict=True)
        ]

    def _formula(self, group: LayerGroup, plan: GroupPlan) -> str:
        if not plan.layers:
            return "this stage has none of these layers"
        spec = self._layout.layers[plan.layers[0]]
        element = self._shard.layer_dtype(self._layout, plan.layers[0]).num_bytes
        heads = f"{len(self._shard.heads(spec.num_kv_heads))} of {spec.num_kv_heads} heads x " if spec.num_kv_heads > 1 else ""
        dims = f"({spec.k_head_dim} + {spec.v_head_dim})" if spec.v_head_dim else f"{spec.k_head_dim}"
        cell = f"{heads}{dims} x {len(plan.layers)} layers x {element} B = {plan.cell_bytes:,} B"
        if group.kind is GroupKind.STATE:
            return f"{cell} a request, {plan.num_pages:,} requests"
        text = f"{cell} a token, {plan.num_pages:,} pages of {plan.page_size}"
        if group.kind is GroupKind.WINDOW:
            requests = self._inputs.max_running_requests
            text += f"; {requests:,} requests need {requests:,} x {self._needed_pages(group) // requests:,}"
        return text
