"""A GGUF file of the llama family to a folder that mlx-lm loads, without loss.

MLX reads Q4_1 (w = d q + m) and Q8_0 (w = d q) as its own affine triplets, 32 weights a group, scales in
float16, so the packed numbers stay as they are. GGUF keeps the rows of q_proj and k_proj in the order of
interleaved rotary embeddings; mlx-lm wants the half-split order. Groups run along a row, hence moving
whole rows costs no precision.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dspark_tui.engine.models.errors import ModelError

GROUP = 32
_CONTROL = 3
"""`tokenizer.ggml.token_type` of special tokens."""

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(gguf: Path, folder: Path, progress: Callable[[int, int], None]) -> None:
    """Write config, weights and tokenizer of `gguf` into the existing `folder`.

    `progress` gets (tensors done, tensors in all). Raises ModelError for a file of another architecture
    or a damaged one, OSError or RuntimeError when writing fails.
    """
    import mlx.core as mx

    with mx.stream(mx.cpu):
        try:
            loaded: Any = mx.load(str(gguf), format="gguf", return_metadata=True)
            raw: dict[str, mx.array] = loaded[0]
            facts: dict[str, Any] = loaded[1]
        except RuntimeError as error:
            raise ModelError(f"{gguf.name} is not a GGUF file that MLX reads ({error}).") from None
        meta = _Facts({key: _plain(value) for key, value in facts.items()})
        if meta.get("general.architecture") != "llama" or meta.get("tokenizer.ggml.model") != "gpt2":
            raise ModelError(
                f"{gguf.name} holds a {meta.get('general.architecture')} model with a "
                f"{meta.get('tokenizer.ggml.model')} tokenizer; only llama with gpt2 is converted."
            )
        heads = {
            "attn_q": meta["llama.attention.head_count"],
            "attn_k": meta["llama.attention.head_count_kv"],
        }
        weights: dict[str, mx.array] = {}
        for done, (name, array) in enumerate(raw.items(), start=1):
            part = name.split(".")[-2]
            if part in heads:
                array = array[mx.array(half_split_order(array.shape[0], heads[part]))]
            if array.dtype != mx.uint32:
                array = array.astype(mx.float16)
            mx.eval(array)
            weights[_mlx_name(name)] = array
            progress(done, len(raw))
        mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
        bits = {
            name.removesuffix(".scales"): weights[name.removesuffix("scales") + "weight"].shape[-1]
            // scales.shape[-1]
            for name, scales in weights.items()
            if name.endswith(".scales")
        }
    tokens = _write_tokenizer(meta, folder)
    _write_json(folder / "config.json", _config(meta, tokens, bits, tied="lm_head.weight" not in weights))
    _write_json(folder / "generation_config.json", {"eos_token_id": [tokens["eos"]]})


def half_split_order(rows: int, heads: int) -> list[int]:
    """For each row in half-split order, its place in GGUF's interleaved order.

    GGUF holds a head's rows as pairs (0, half), (1, half + 1), ...: row 2 i + s of a head is row
    s * half + i of the original.
    """
    size = rows // heads
    half = size // 2
    return [head * size + 2 * i + side for head in range(heads) for side in (0, 1) for i in range(half)]


class _Facts(dict[str, Any]):
    """The file's metadata; a missing entry is a sentence."""

    def __missing__(self, key: str) -> Any:
        raise ModelError(f"The GGUF file does not say {key}, which a llama model needs.")


def _plain(value: Any) -> Any:
    """Python's own numbers and lists instead of MLX arrays."""
    return value.tolist() if hasattr(value, "tolist") else value


def _mlx_name(name: str) -> str:
    parts = name.split(".")
    try:
        if parts[0] == "blk":
            return f"model.layers.{parts[1]}.{_IN_LAYER[parts[2]]}.{parts[3]}"
        return f"{_TOP[parts[0]]}.{parts[1]}"
    except (KeyError, IndexError):
        raise ModelError(f"The GGUF file holds a tensor {name!r} that llama models do not have.") from None


def _config(
    meta: dict[str, Any], tokens: dict[str, int], bits: dict[str, int], *, tied: bool
) -> dict[str, Any]:
    def fact(name: str) -> Any:
        return meta[f"llama.{name}"]

    quantization: dict[str, Any] = {"group_size": GROUP, "bits": 4, "mode": "affine"}
    quantization |= {
        path: {"group_size": GROUP, "bits": width, "mode": "affine"}
        for path, width in bits.items()
        if width != 4
    }
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": fact("embedding_length"),
        "num_hidden_layers": fact("block_count"),
        "intermediate_size": fact("feed_forward_length"),
        "num_attention_heads": fact("attention.head_count"),
        "num_key_value_heads": fact("attention.head_count_kv"),
        "head_dim": fact("rope.dimension_count"),
        # Stored as float32; the shortest decimal that rounds to it is what was meant.
        "rms_norm_eps": float(f"{fact('attention.layer_norm_rms_epsilon'):.7g}"),
        "vocab_size": fact("vocab_size"),
        "max_position_embeddings": fact("context_length"),
        "rope_theta": fact("rope.freq_base"),
        "rope_traditional": False,
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float16",
        **{
            f"{kind}_token_id": tokens[key]
            for kind, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
        },
        "quantization": quantization,
        "quantization_config": quantization,
    }


def _write_tokenizer(meta: dict[str, Any], folder: Path) -> dict[str, int]:
    """Write tokenizer.json and tokenizer_config.json; returns the ids of bos, eos, unknown and padding."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    words: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    splits = [pre_tokenizers.Digits(individual_digits=True), byte_level]
    # The kind `smollm` splits digits one by one before GPT-2's pattern, `gpt-2` is the pattern alone.
    kind = meta.get("tokenizer.ggml.pre", "gpt-2")
    if kind not in ("smollm", "gpt-2"):
        raise ModelError(
            f"The GGUF file's tokenizer splits text as {kind!r}; only smollm and gpt-2 are known."
        )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits if kind == "smollm" else [byte_level])
    tokenizer.decoder = decoders.ByteLevel(add_prefix_space=False)  # type: ignore[call-arg]
    types = meta["tokenizer.ggml.token_type"]
    special = [word for word, type_ in zip(words, types, strict=True) if type_ == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {
        kind: int(meta[f"tokenizer.ggml.{kind}_token_id"]) for kind in ("bos", "eos", "unknown", "padding")
    }
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": words[ids["bos"]],
            "eos_token": words[ids["eos"]],
            "unk_token": words[ids["unknown"]],
            "pad_token": words[ids["padding"]],
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": meta["llama.context_length"],
            "chat_template": meta["tokenizer.chat_template"],
        },
    )
    return ids


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
