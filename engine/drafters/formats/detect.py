"""Which packaging a checkpoint is, by a decision list; what it is instead, when it is none that is loaded."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal, TypeAlias

from dspark_tui.engine.drafters.formats.errors import CheckpointError

Kind: TypeAlias = Literal["speculators", "dflash2", "specforge", "liquid", "deepspec", "dflash"]

_FOREIGN_WORDS = (
    ("eagle", "an EAGLE-3 drafter"),
    ("medusa", "a Medusa drafter"),
    ("dfly", "a DFly drafter, which fuses taps layer by layer"),
    ("dflare", "a DFlare drafter"),
    ("domino", "a Domino drafter"),
    ("jetspec", "a JetSpec drafter"),
    ("nanbeige", "a drafter for Nanbeige's looped layers"),
    ("laguna", "a Laguna drafter, whose attention is gated"),
    ("nemotron", "a Nemotron drafter, whose attention has sinks"),
    ("qwen35dspark", "a drafter of the qwen3_5-native fork, whose attention is gated"),
    ("bonsai", "a Bonsai drafter with log-SNR conditioning"),
)
"""Words in architecture or model type of methods and variants that are not loaded."""

_FOREIGN_TENSORS = (
    ("attention_sink", "its attention has sinks (as in NVIDIA's drafters)"),
    (".sinks", "its attention has sinks (as in NVIDIA's drafters)"),
    ("g_proj", "its attention is gated (as in Laguna's drafters)"),
    ("qkv_proj", "its attention is fused (as in Laguna's drafters)"),
    ("aux_hidden_norms", "it norms its taps one by one (as in Laguna's drafters)"),
    ("log_snr", "it is conditioned on a log-SNR (as in Bonsai's drafters)"),
    (".experts.", "it is a mixture of experts"),
    (".mlp.gate.weight", "it is a mixture of experts"),
    ("mask_hidden", "it replaces hidden states of masks (mask_hidden)"),
    ("per_layer_", "it has inputs of every layer's own (per_layer_input)"),
    ("draft_adapter", "it has an adapter before its head (draft_adapter)"),
)
"""Parts of tensor names that change what the network computes."""


def detect(name: str, config: dict[str, Any], tensors: Collection[str]) -> Kind:
    """The packaging of checkpoint `name`, from config.json and the tensors' names.

    Raises `CheckpointError` that says what the checkpoint is when it is none of those that are loaded.
    """
    kind = _packaging(name, config, tensors)
    for part, what in _FOREIGN_TENSORS:
        if any(part in tensor for tensor in tensors):
            raise CheckpointError(f"{name} cannot be used: {what}, which is not supported.")
    nested = _object(config, "dflash_config")
    for key, what in (
        ("attention_sink_bias", "its attention has sinks (as in NVIDIA's drafters)"),
        ("add_swa_attention_sink_bias", "its attention has sinks (as in NVIDIA's drafters)"),
        ("log_snr_conditioning", "it is conditioned on a log-SNR (as in Bonsai's drafters)"),
    ):
        if config.get(key) or nested.get(key):
            raise CheckpointError(f"{name} cannot be used: {what}, which is not supported.")
    return kind


def _packaging(name: str, config: dict[str, Any], tensors: Collection[str]) -> Kind:
    nested = _object(config, "dflash_config")
    architectures = _names(config.get("architectures"))
    bundled = any(key.startswith("dspark_") and key != "dspark_config" for key in config)
    if bundled or any(t.startswith("mtp.") and "markov_head" in t for t in tensors):
        raise CheckpointError(
            f"{name} cannot be used: it is a DeepSeek-V4 model with a bundled DSpark, not a drafter of its "
            "own."
        )
    speculators = config.get("speculators_model_type") or _object(config, "speculators_config").get(
        "algorithm"
    )
    projector = nested.get("projector_type")
    words = " ".join(map(str, (*architectures, speculators, projector, config.get("model_type"))))
    for word, what in _FOREIGN_WORDS:
        if word in words.lower().replace("_", ""):
            raise _foreign(name, what)
    if speculators is not None:
        if speculators in ("dspark", "dflash", "dflash2"):
            return "speculators"
        raise _foreign(name, f"a speculators model of the kind {str(speculators)[:40]}")
    if any("DFlash2" in arch for arch in architectures):
        return "dflash2"
    if projector == "dspark":
        return "specforge"
    if projector not in (None, "dflash"):
        raise _foreign(name, f"a drafter of the kind {str(projector)[:40]}")
    if any("DSpark" in arch for arch in architectures):
        return "liquid" if config.get("target_layer_ids") is None and nested else "deepspec"
    if any("DFlash" in arch for arch in architectures) or nested:
        return "dflash"
    kind = ", ".join(architectures) or config.get("model_type") or "no architecture"
    raise CheckpointError(
        f"{name} is not a drafter that this version can load ({str(kind)[:80]}); it loads DSpark, DFlash and "
        "DFlash 2 checkpoints."
    )


def _foreign(name: str, what: str) -> CheckpointError:
    return CheckpointError(f"{name} cannot be used: it is {what}; DSpark, DFlash and DFlash 2 are loaded.")


def _object(config: dict[str, Any], key: str) -> dict[str, Any]:
    value = config.get(key)
    return value if isinstance(value, dict) else {}


def _names(value: Any) -> list[str]:
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []
