"""`kvferry demo` and `kvferry demo-cluster`: both tiers on this machine, and proof that the tokens are right."""
