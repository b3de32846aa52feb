"""KV offload of a decode node: device pool, host pool, store, and back.

The leader decides and the ranks carry out (docs/adr/0027-the-leader-decides-about-tiers.md):

- `tiers`: what a decode leader asks of its tiers, and the answers with a device alone.
- `leader`: orders which pages are saved, given up early, and brought back.
- `page_placement`, `saving`: choose a request's place, and its next save.
- `rules`, `tiered_request`: how much of a request lies where; pure.
- `host_tier`: which page of the ranks' host pools holds what, by content; pure.
- `jobs`: work that counts once every rank has done it.
- `store_leader`, `suspect_pages`: what the leader asks of the store, and has the ranks put there, fetch or delete.
- `rank`: one rank's host pool, copies and store.
- `open`, `open_rank`, `sizes`: from the settings to both.
"""
