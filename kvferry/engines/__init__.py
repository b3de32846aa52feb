"""kvferry inside engines that schedule by themselves: vLLM, SGLang, and what an adapter for another one is made of."""

import os

# gRPC's core writes lines of its own form to standard error, of what its callers are told anyway; it reads this when it starts.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
