"""KV offload of a decode node: device pool, host pool, store, and back.

The leader decides and the ranks carry out (docs/adr/0027-the-leader-decides-about-tiers.md):

- `tiers`: the interface of a decode leader's tiers, and the tiers of a device alone.
- `leader`: orders which pages are saved, given up early, and brought back.
- `page_placement`, `saving`: choose a request's place, and its next save.
- `rules`, `tiered_request`: how many pages of a request lie in each tier; pure.
- `host_tier`: an index of the ranks' host pools, by content; pure.
- `jobs`: work that counts once every rank has done it.
- `store_leader`, `suspect_pages`: ask the store, and have the ranks put pages there, fetch or delete them.
- `rank`: one rank's host pool, copies and store.
- `open`, `open_rank`, `sizes`: make both from the settings.
"""
