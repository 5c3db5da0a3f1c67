"""Tiny random targets: on disk (an mlx-lm architecture, a byte-level tokenizer and a chat template), or in
memory, one for each family of targets."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import _get_classes
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from dspark_tui.engine.loader import load_target
from dspark_tui.engine.models.resolve import ResolvedModel
from dspark_tui.engine.protocol import ModelInfo
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


# ---------------------------------------------------------------------------- every family, in memory

WINDOW = 16
"""Positions that the sliding layers of `TARGETS` see."""

_WIDTHS = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
}
_DENSE = {**_WIDTHS, "num_hidden_layers": 4, "intermediate_size": 96}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
_HALF_ROPE = {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
_CONV = {
    **_DENSE,
    "norm_eps": 1e-5,
    "conv_bias": False,
    "conv_L_cache": 3,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
}

TARGETS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_DENSE},
    "llama_sliding": {"model_type": "llama", **_DENSE, **_SLIDING},
    "qwen3": {"model_type": "qwen3", **_DENSE, "tie_word_embeddings": True},
    "qwen3_moe": {"model_type": "qwen3_moe", **_DENSE, **_EXPERTS, "tie_word_embeddings": False},
    "qwen3_5": {
        "model_type": "qwen3_5",
        "text_config": {
            "model_type": "qwen3_5_text",
            **_DENSE,
            **_DELTA,
            "full_attention_interval": 4,
            "tie_word_embeddings": True,
            "rope_parameters": _HALF_ROPE,
        },
    },
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe",
        "text_config": {
            "model_type": "qwen3_5_moe_text",
            **_DENSE,
            **_DELTA,
            **_EXPERTS,
            "shared_expert_intermediate_size": 32,
            "tie_word_embeddings": False,
            "rope_parameters": _HALF_ROPE,
        },
    },
    "qwen3_next": {
        "model_type": "qwen3_next",
        **_DENSE,
        **_DELTA,
        **_EXPERTS,
        "shared_expert_intermediate_size": 32,
        "partial_rotary_factor": 0.5,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        **_DENSE,
        "query_pre_attn_scalar": 16,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
    },
    # As E2B and E4B: the upper layers share keys and values, every layer has inputs of its own.
    "gemma4_e": {
        "model_type": "gemma4",
        "text_config": {
            "model_type": "gemma4_text",
            **_DENSE,
            "num_hidden_layers": 6,
            "num_key_value_heads": 1,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 8,
            "num_kv_shared_layers": 2,
            "sliding_window": WINDOW,
            "sliding_window_pattern": 2,
        },
    },
    # As 12B and 31B: nothing shared, keys are values on the global layers.
    "gemma4": {
        "model_type": "gemma4_unified",
        "text_config": {
            "model_type": "gemma4_unified_text",
            **_DENSE,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "use_double_wide_mlp": False,
            "sliding_window": WINDOW,
            "sliding_window_pattern": 2,
        },
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        **_DENSE,
        **_SLIDING,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "lfm2": {
        "model_type": "lfm2",
        **_CONV,
        "block_dim": 64,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [1],
    },
    "lfm2_moe": {
        "model_type": "lfm2_moe",
        **_CONV,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "use_expert_bias": True,
        "num_dense_layers": 1,
    },
    "nemotron_h": {
        "model_type": "nemotron_h",
        **_DENSE,
        "attention_bias": False,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "mamba_proj_bias": False,
        "ssm_state_size": 32,
        "conv_kernel": 4,
        "n_groups": 2,
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
        "hybrid_override_pattern": ["M", "-", "M", "*", "M", "-"],
    },
    "deepseek_v41": {
        "model_type": "deepseek_v41",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "head_dim": 32,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "o_groups": 2,
        "o_lora_rank": 16,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "compress_ratios": [0, 4, 4, 4],
        "kv_source_layer_ids": [1],
        "index_source_layer_ids": [1],
        "index_n_heads": 2,
        "index_head_dim": 32,
        "index_topk": 4,
        "max_position_embeddings": 4096,
    },
}
"""One small config.json for each family of targets, without `vocab_size`."""


_LAST_NORMS = ("model.norm.weight", "embedding_norm.weight", "norm_f.weight")


def with_vocabulary(config: dict[str, Any], vocabulary: int) -> dict[str, Any]:
    """A config of `TARGETS` for so many tokens."""
    sized = {**config, "vocab_size": vocabulary, "vocab_size_per_layer_input": vocabulary}
    if "text_config" in config:
        sized["text_config"] = with_vocabulary(config["text_config"], vocabulary)
    return sized


def _draw(name: str, shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    """Weights that keep activations near one and states remembered over dozens of tokens."""
    noise = random.standard_normal(shape).astype(np.float32)
    last = name.split(".")[-1]
    if last == "A_log":
        return np.log(random.uniform(0.02, 0.6, shape)).astype(np.float32)
    if "norm" in name or last in ("D", "layer_scalar"):
        return 1 + 0.1 * noise
    if len(shape) < 2 or "bias" in last:
        return 0.3 * noise
    if "conv" in name and len(shape) == 3:
        return noise / shape[1] ** 0.5
    gain = 0.5 if "embed" in name else 2.0 if "lm_head" in name else 2.5 if "o_proj" in name else 1.3
    return noise * (gain / shape[-1] ** 0.5)


def build_target(
    name: str,
    vocabulary: int = 64,
    seed: int = 0,
    tokenizer: Any = None,
    *,
    config: dict[str, Any] | None = None,
    kv_bits: int | None = None,
) -> Target:
    """The family `name` of `TARGETS` in memory: random float32 weights whose logits lie well apart. `config`
    stands in for the one in the table."""
    config = with_vocabulary(config or TARGETS[name], vocabulary)
    classes = _get_classes(config)
    model = classes[0](classes[1].from_dict(config))
    if name == "gemma3":
        model.sanitize({})  # ties the head, as loading a checkpoint without one does
    model.eval()
    random = np.random.default_rng(seed)
    parameters = tree_flatten(model.parameters())
    tied = not any("lm_head" in path for path, _ in parameters)
    fresh = []
    for path, value in parameters:
        weight = _draw(path, value.shape, random)
        if tied and path.endswith(_LAST_NORMS) and "layers." not in path:
            # A table that is the head as well is small, so that a token does not only repeat itself.
            weight *= 4
        fresh.append((path, mx.array(weight - ("norm" in path and name == "gemma3"))))
    model.update(tree_unflatten(fresh))
    mx.eval(model.parameters())
    tokenizer = tokenizer or SimpleNamespace(eos_token_ids=set(), has_chat_template=True)
    info = ModelInfo(name, "", str(config["model_type"]), "float32", 4096, 0)
    return Target(model, tokenizer, info, kv_bits)
