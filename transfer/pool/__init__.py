"""Memory that KV lies in: the paged pools, their pages and tables, and staging buffers."""
