"""Tiny random targets on disk: an mlx-lm architecture, a byte-level tokenizer and a chat template."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from dspark_tui.engine.loader import load_target
from dspark_tui.engine.models.resolve import ResolvedModel
from dspark_tui.engine.target import Target

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<unk>", "<|im_start|>", "<|im_end|>")
UNKNOWN, IM_START, IM_END = range(3)

_FIRST = b"abcdefghijklmnopqrstuvwxyz \n0123456789.,:;!?'-\"()" + "é€😀ABC".encode()
"""Bytes that small vocabularies hold; the last characters take several tokens each."""


def byte_characters() -> list[str]:
    """The printable character that stands for each of the 256 bytes in byte-level vocabularies."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    spare = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(spare)) for b in range(256)]


def byte_vocabulary(vocab: int) -> list[bytes]:
    """What each token id is in bytes; the special tokens are empty."""
    order = [*_FIRST, *(b for b in range(256) if b not in _FIRST)]
    held = [b"" for _ in SPECIAL] + [bytes([b]) for b in order]
    return held[:vocab]


def encode(text: str, vocab: int = 64) -> list[int]:
    """Token ids of `text` without special tokens."""
    ids = {piece: i for i, piece in enumerate(byte_vocabulary(vocab)) if piece}
    return [ids[bytes([b])] for b in text.encode()]


def write_tokenizer(folder: Path, vocab: int, template: str | None) -> None:
    """One token a byte, so that text and tokens convert both ways without loss."""
    characters = byte_characters()
    words = list(SPECIAL) + [characters[piece[0]] for piece in byte_vocabulary(vocab) if piece]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[IM_END],
        "unk_token": SPECIAL[UNKNOWN],
        "clean_up_tokenization_spaces": False,
    }
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def tiny_llama(
    folder: Path,
    vocab: int = 64,
    layers: int = 4,
    *,
    architecture: str = "llama",
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    context: int = 512,
    tied: bool = False,
    gain: float = 1.5,
    seed: int = 0,
    template: str | None = CHAT_TEMPLATE,
    **config: Any,
) -> Path:
    """Write a random model of `architecture` (a module of mlx_lm.models) and return its folder.

    Matrices have standard deviation `gain / sqrt(inputs)`, embedding and head `3 / sqrt(hidden)`: logits
    then spread by about 3. `config` adds to config.json or overrides it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {
        "model_type": architecture,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": 2 * hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": 1e-5,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied,
        "torch_dtype": "float32",
        "eos_token_id": IM_END,
        **config,
    }
    module = importlib.import_module(f"mlx_lm.models.{architecture}")
    model = module.Model(module.ModelArgs.from_dict(settings))
    random = np.random.default_rng(seed)
    weights = {}
    for name, value in tree_flatten(model.parameters()):
        draw = random.standard_normal(value.shape, dtype=np.float32)
        if "norm" in name:
            draw = 0.1 * draw + (0.0 if architecture.startswith("gemma") else 1.0)
        else:
            table = "embed_tokens" in name or "lm_head" in name
            draw *= (3.0 if table else gain) / value.shape[-1] ** 0.5
        weights[name] = mx.array(draw.astype(np.float32))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(settings))
    write_tokenizer(folder, vocab, template)
    return folder


def load_tiny(folder: Path) -> tuple[Target, dict[str, Any]]:
    """Load what `tiny_llama` wrote, as the engine does: the target and its config."""
    return load_target(ResolvedModel(folder.name, folder), lambda stage, done, total, unit: None)
