"""The third tier: pages of KV outside of any process, in a directory or an object store that nodes of both tiers share.

`keys` names a page by what is in it, `pages` says how it lies in its bytes, `envelope` proves that they are what was stored,
`base` is what every store can do, `client` puts a store beside an asyncio loop that it must never hold up, and `open` makes all
of it from the settings.
"""
