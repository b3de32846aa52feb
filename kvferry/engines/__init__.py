"""kvferry inside engines that schedule by themselves: vLLM, SGLang, and the parts of an adapter for another engine."""

import os

# gRPC's core logs errors to standard error in another format. Its callers receive these errors anyway. It reads this variable
# when it starts.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
