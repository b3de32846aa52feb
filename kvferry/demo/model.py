"""Small models for demos and tests: a normal Hugging Face directory, with the same bytes every time.

The weights are random, but scaled such that attention decides the next token: damage to one KV head, one page or one position of
the cache changes the tokens of a greedy decoder. Its output is nonsense made of readable words.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from kvferry.demo.kinds import (
    EMBEDDING_SCALE,
    HEAD_DIM,
    HIDDEN_SIZE,
    INTERMEDIATE_SIZE,
    KINDS,
    LAYER_GROWTH,
    LOGIT_SCALE,
    MAX_CONTEXT_TOKENS,
    NUM_KV_HEADS,
    NUM_LAYERS,
    NUM_QUERY_HEADS,
    VOCAB_SIZE,
    DemoKind,
    ModelKind,
)
from transfer.errors import ConfigError

SPECIAL_TOKENS = ("<s>", "</s>", "<pad>")
DECAYS = ("A_log", "dt_bias")
DECAY_RANGE = (-3.0, -0.5)
"""Range of both. A state forgets within some to some hundred tokens; otherwise the chunk before would not matter."""

TRAINING_TEXT = """
A prompt arrives, and the first machine reads all of it at once. For every word it keeps a key and a value in each layer of the
model, so that later words can look back without reading everything again. This memory is called the cache, and it grows with
every token. The second machine writes the answer, one word after another, and for each of them it needs the whole cache. So the
cache must travel from where it was made to where it will be used, quickly, completely, and in the right order.

A ferry crosses the river with many small parcels on board. If every parcel had a boat of its own the harbour would be full and
nothing would move. Better to gather what belongs together, load it once, cross once, and carry each piece to its place on the
other side. The captain never leaves before the quay has room, the crew counts what was loaded, and the people on the far shore
check what came. When a crate is damaged they say so aloud; nobody pretends that it is fine.

Some days a storm comes. A ship is late, a light goes out, a message gets lost in the wind and another one arrives twice. A good
harbour does not stop because one boat is slow. It keeps a place free for those who are still under way, gives that place to
nobody else until it is certain that they will never come, and tells the waiting passengers the truth.

The engineers drew a map of the two cities. On the left four towers share the work, each with three floors; on the right there
are only two, taller and wider, with six floors each. Every floor of the left has a matching floor on the right, and between them
runs exactly one bridge. No floor is served twice, none is forgotten. The pages of the books are larger here and smaller there,
yet each line finds its page, because both sides number the lines and not the pages.

At night the tide falls and the water shows a mark on the wall: below it everything is dry again and can be used. The keeper
writes the mark into his book, sends a copy across the sea every half second, and never moves it back. In the morning the sun
rises over quiet docks, green hills, old stone houses and a long white road. Children run down to see the silver fish, a dog
sleeps near the door, somebody plays a slow song, and the baker opens early. Coffee, bread, salt, honey. Far away a bell rings
seven times. Then the first ferry whistles, the ropes are thrown, and a new day of carrying small things safely begins again.
"""


def make_demo_model(directory: Path | str, *, kind: ModelKind | DemoKind = ModelKind.LLAMA, seed: int = 0) -> Path:
    """Write the demo model, its configuration and its tokenizer as a Hugging Face directory.

    The same kind and seed give the same bytes. Takes a few seconds, needs no network, 25 to 35 MB of disk.

    Args:
        directory: New or empty directory, or one with an earlier demo model.
        kind: A kind, or a `DemoKind`, which can also set other sizes.

    Raises:
        ConfigError: The directory contains other files.
    """
    directory = Path(directory)
    if directory.exists() and (not directory.is_dir() or _foreign_files(directory)):
        raise ConfigError(f"directory is {str(directory)!r}, which holds something else; must be a new or empty directory")
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _train_tokenizer()
    model = _make_weights(tokenizer, KINDS[kind] if isinstance(kind, ModelKind) else kind, seed)
    disable_progress_bar()  # for one small file, in the midst of the demo's own lines
    tokenizer.save_pretrained(directory)
    model.save_pretrained(directory)
    return directory


def _foreign_files(directory: Path) -> list[str]:
    own = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    return sorted(path.name for path in directory.iterdir() if path.name not in own)


def _train_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING_TEXT.split("\n"), trainer)
    bos, eos, pad = SPECIAL_TOKENS
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    wrapper: Any = PreTrainedTokenizerFast  # its constructor carries no types
    wrapped: PreTrainedTokenizerFast = wrapper(
        tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, pad_token=pad, model_max_length=MAX_CONTEXT_TOKENS
    )
    return wrapped


def _make_weights(tokenizer: PreTrainedTokenizerFast, kind: DemoKind, seed: int) -> PreTrainedModel:
    config = _config(tokenizer, kind)
    model_class: Any = getattr(transformers, f"{kind.family}ForCausalLM")
    with torch.device("meta"):
        model: Any = model_class(config)
    model.to_empty(device="cpu")
    # Its own generator on the CPU gives the same numbers everywhere, and does not change the caller's random state.
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            module = name.split(".")[-2]
            if name.endswith(DECAYS):
                parameter.uniform_(*DECAY_RANGE, generator=generator)
            elif parameter.ndim == 1:
                weights = [weight for end, weight in kind.norms.items() if name.endswith(f".{end}.weight")]
                parameter.fill_(weights[0] if weights else kind.norm)
            elif module == "embed_tokens":
                # Gemma multiplies embeddings by the root of the hidden size.
                scale = EMBEDDING_SCALE / float(getattr(model.model.embed_tokens, "scalar_embed_scale", 1.0))
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
            elif module == "lm_head":
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * LOGIT_SCALE)
            else:
                gain = kind.gains.get(module, 1.0)
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * (gain / math.sqrt(parameter.shape[-1])))
        _grow(model, kind)
        model.lm_head.weight.mul_(_token_weights(tokenizer).unsqueeze(1) / math.sqrt(config.hidden_size))
    made: PreTrainedModel = model
    return made


def _grow(model: Any, kind: DemoKind) -> None:
    for index, layer in enumerate(model.model.layers):
        for name, module in layer.named_modules():
            if name.split(".")[-1] in kind.grown:
                factor = LAYER_GROWTH**index
                if module.weight.ndim == 1:
                    module.weight.add_(1 - kind.norm).mul_(factor).sub_(1 - kind.norm)
                else:
                    module.weight.mul_(factor)


def _config(tokenizer: PreTrainedTokenizerFast, kind: DemoKind) -> PretrainedConfig:
    config_class: type[PretrainedConfig] = getattr(transformers, kind.config_class)
    shared: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": INTERMEDIATE_SIZE,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_QUERY_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": MAX_CONTEXT_TOKENS,
        "tie_word_embeddings": False,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": "float32",
    }
    return config_class(**{**shared, **kind.config})


def _token_weights(tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """Return the factor of each token's logit, [vocab]: highest for words, lower for pieces, 0 for unprintable tokens.

    A logit of 0 is almost never the largest of hundreds, so generation neither ends at once nor shows half characters.
    """
    weights = torch.zeros(VOCAB_SIZE)
    for text, token in tokenizer.get_vocab().items():
        shown = text.removeprefix("\u0120")  # how a byte-level vocabulary writes a leading space
        if text in SPECIAL_TOKENS or not shown.isascii() or not shown:
            continue
        if shown.isalpha():
            weights[token] = 1.0 if text != shown and len(shown) > 2 else 0.7
        else:
            weights[token] = 0.5
    return weights
