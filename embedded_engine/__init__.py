"""The embedded engine: a Hugging Face model whose attention reads and writes kvferry's own paged pool.

- `architectures`: the model families that it runs, and what is special about each.
- `model_config`: what config.json alone already forbids, for a node that has not started yet.
- `model_files`: what a local model directory says about itself, checked before anything is loaded.
- `tensor_parallel`: the process group of one instance, and loading a model cut over it.
- `dummy_weights`: a model out of config.json alone.
- `attention`: softmax attention in bounded memory.
- `paged_attention`: one step's attention over the pool; `latent_attention` and `recurrent_state`: layers that keep something else
  than K and V.
- `step_checks`: what a step must fulfil before it runs.
- `sampling`: from logits to a token, reproducible wherever it is done.
- `engine`: `EmbeddedEngine`, which is both a `PrefillEngine` and a `DecodeEngine`.

This package imports nothing by itself: `embedded_engine.engine` is the one that pulls in torch and transformers.
"""
