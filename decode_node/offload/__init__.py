"""KV offload of a decode node: device pool, host pool, store, and back.

The leader decides and the ranks carry out (docs/adr/0027-the-leader-decides-about-tiers.md):

- `host_tier`: which page of the ranks' host pools holds what, by content; pure.
- `rules`: how much of a request lies where; pure.
- `tiered_request`: what the leader remembers of one request's pages.
- `jobs`: work that every rank has to finish before the leader goes by it.
- `leader`: orders what is saved, given back early, and brought back.
- `store_leader`: what the leader asks of the store, and has the ranks put there.
- `rank`: one rank's host pool, copies and store.
"""
