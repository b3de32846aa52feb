"""The embedded engine: a Hugging Face model whose attention reads and writes kvferry's own paged pool.

- `architectures`: the model families that it runs.
- `model_config`, `model_files`: checks of a model directory, before a node starts and before weights are loaded.
- `tensor_parallel`: the process group of one instance, and loading a model sharded over it.
- `dummy_weights`: weights generated from config.json alone.
- `attention`: softmax attention in bounded memory.
- `step_plan`: the interface of a step's plan; `paged_attention`: one step's attention over the pool.
- `latent_attention`, `recurrent_state`: layers without K and V.
- `device_decode`, `tiered_decode`: decode steps by kernels, without and with pages in host memory.
- `compiled_layers`: decoder layers compiled by torch.compile; `opaque_calls`: the operators that it does not trace.
- `step_checks`: checks of a step before it runs; `forward_batch`: a planned step, and its tokens.
- `sampling`: from logits to a token, reproducible on both tiers.
- `engine`: `EmbeddedEngine`, which is a `PrefillEngine` and a `DecodeEngine`; `loading` creates it from a node's settings.

The package imports nothing by itself: only `embedded_engine.engine` loads torch and transformers.
"""
