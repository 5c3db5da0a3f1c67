"""Drafter checkpoints: the bundled ones are recognised, what will not work is refused in one sentence."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy_drafters import NumpyTables, Shape, tensor_shapes, write_drafter
from numpy_drafters import settings as drafter_settings

from dspark_tui.engine.drafters import checkpoint
from dspark_tui.engine.drafters.checkpoint import CheckpointError

BUNDLED = Path(checkpoint.__file__).parent.parent / "demo_drafters"
METHODS = ["dspark", "dflash", "dflash2"]
SHAPE = Shape()


def refusal(call: Callable[[], object]) -> str:
    """The sentence with which `call` refuses."""
    with pytest.raises(CheckpointError) as caught:
        call()
    sentence = str(caught.value)
    assert sentence.endswith(".")
    assert "\n" not in sentence
    assert len(sentence) < 500
    return sentence


def load(folder: Path, shape: Shape = SHAPE) -> object:
    tables = NumpyTables(shape.vocabulary, shape.hidden)
    return checkpoint.load(checkpoint.inspect(folder), "it", tables)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "some-drafter"


# ---------------------------------------------------------------------------- recognised


@pytest.mark.parametrize(
    ("name", "method", "block", "drafts"),
    [
        ("SmolLM2-135M-Instruct-DSpark-b7", "dspark", 7, 7),
        ("SmolLM2-135M-Instruct-DFlash-b8", "dflash", 8, 7),
        ("SmolLM2-135M-Instruct-DFlash2-b8", "dflash2", 8, 7),
    ],
)
def test_bundled_drafters_are_recognised(name: str, method: str, block: int, drafts: int) -> None:
    found = checkpoint.inspect(BUNDLED / name)
    config = found.config
    assert (found.method, config.block_size, found.drafts) == (method, block, drafts)
    assert config.taps == (1, 8, 14, 20, 27)
    assert config.mask_token == 16
    assert (config.hidden_size, config.vocabulary, config.layers, found.target_layers) == (576, 49152, 3, 30)
    assert (config.heads, config.kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.eps, config.rope.theta) == (1e-5, 1e5)
    assert found.head.markov_rank == (64 if method == "dspark" else 0)
    selector = (64, 16, 2, 16) if method == "dflash2" else (0, 0, 0, 16)
    assert (
        found.head.selector_rank,
        found.head.selector_top_k,
        config.conv_taps,
        config.conv_group,
    ) == selector
    file = BUNDLED / name / "model.safetensors"
    (header,) = struct.unpack("<Q", file.read_bytes()[:8])
    assert sum(tensor.bytes for tensor in found.tensors.values()) == file.stat().st_size - header - 8
    assert found.packaging == ("DeepSpec" if method == "dspark" else "z-lab")


@pytest.mark.parametrize("method", METHODS)
def test_published_schema_is_read(folder: Path, method: str) -> None:
    write_drafter(folder, method)
    found = checkpoint.inspect(folder)
    assert found.method == method
    assert found.config.taps == SHAPE.taps
    assert found.config.rope.theta == SHAPE.theta
    assert found.config.mask_token == SHAPE.mask
    assert found.config.block_size == SHAPE.block
    assert found.drafts == (SHAPE.block if method == "dspark" else SHAPE.block - 1)
    assert {tensor.name: tensor.shape for tensor in found.tensors.values()} == tensor_shapes(method, SHAPE)
    assert found.quantization is None


def test_mask_token_zero_is_a_token(folder: Path) -> None:
    write_drafter(folder, "dspark", Shape(mask=0))
    assert checkpoint.inspect(folder).config.mask_token == 0
    load(folder)


def test_weights_may_be_spread_over_files(folder: Path) -> None:
    write_drafter(folder, "dflash")
    weights = mx.load(str(folder / "model.safetensors"))
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    for i, part in enumerate((names[:9], names[9:])):
        mx.save_safetensors(str(folder / f"part-{i}.safetensors"), {name: weights[name] for name in part})
    load(folder)


# ---------------------------------------------------------------------------- files


def test_missing_config(folder: Path) -> None:
    folder.mkdir()
    assert "has no config.json" in refusal(lambda: checkpoint.inspect(folder))


@pytest.mark.parametrize("text", ["{", "", "\xff\xfe", "[" * 5])
def test_config_that_is_not_json(folder: Path, text: str) -> None:
    write_drafter(folder, "dflash")
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    assert "config.json cannot be read as JSON" in refusal(lambda: checkpoint.inspect(folder))


@pytest.mark.parametrize("text", ["[]", "3", '"DFlash"', "null"])
def test_config_that_is_no_object(folder: Path, text: str) -> None:
    write_drafter(folder, "dflash")
    (folder / "config.json").write_text(text)
    assert "holds no JSON object" in refusal(lambda: checkpoint.inspect(folder))


def test_missing_weights(folder: Path) -> None:
    write_drafter(folder, "dflash")
    (folder / "model.safetensors").unlink()
    assert "no .safetensors file" in refusal(lambda: checkpoint.inspect(folder))


@pytest.mark.parametrize("keep", [0, 5, 8, 100, -1])
def test_truncated_weights(folder: Path, keep: int) -> None:
    write_drafter(folder, "dflash")
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:keep])
    sentence = refusal(lambda: checkpoint.inspect(folder))
    if keep == -1:
        assert f"is cut off ({len(whole) - 1} of {len(whole)} bytes)" in sentence
    else:
        assert "is not a safetensors file" in sentence


@pytest.mark.parametrize(
    "header",
    [
        b"garbage!",
        b"[]",
        b"3",
        b'{"a": 3}',
        b'{"a": {}}',
        b'{"a": {"shape": 3, "data_offsets": [0, 4]}}',
        b'{"a": {"shape": [1], "data_offsets": [0]}}',
        b'{"a": {"shape": [1], "data_offsets": ["0", "four"]}}',
        b'{"a": {"shape": ["x"], "data_offsets": [0, 4]}, "b": {"shape": [1], "data_offsets": null}}',
        b"\xff" * 16,
    ],
)
def test_header_garbage(folder: Path, header: bytes) -> None:
    write_drafter(folder, "dflash")
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 64)
    assert "is not a safetensors file" in refusal(lambda: checkpoint.inspect(folder))


def test_header_longer_than_the_file(folder: Path) -> None:
    write_drafter(folder, "dflash")
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2**62) + b"{}")
    assert "is not a safetensors file" in refusal(lambda: checkpoint.inspect(folder))


def test_weights_that_are_a_folder(folder: Path) -> None:
    write_drafter(folder, "dflash")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    assert "cannot be read" in refusal(lambda: checkpoint.inspect(folder))


# ---------------------------------------------------------------------------- kinds


@pytest.mark.parametrize(
    ("method", "changes", "words"),
    [
        ("dspark", {"model_type": "mamba"}, "backbone is mamba; qwen3, lfm2 and gemma4 are supported"),
        ("dflash", {"layer_types": ["full_attention", "linear_attention"]}, "layer_types"),
        ("dflash", {"layer_types": ["full_attention"]}, "layer_types"),
        ("dflash", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window"),
        ("dspark", {"markov_head_type": "lstm"}, "Markov head is lstm; vanilla, gated and rnn"),
        ("dspark", {"markov_rank": 0}, "its confidence head reads a Markov head"),
        ("dspark", {"rope_scaling": {"type": "llama3", "factor": 8.0}}, "of the kind llama3, only yarn"),
        ("dspark", {"rope_scaling": {"type": "yarn", "factor": 0.5}}, "factor"),
        ("dspark", {"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": False}}, "not truncated"),
        ("dspark", {"attention_bias": "yes"}, "attention_bias"),
        ("dspark", {"hidden_act": "relu"}, "its activation is relu, only silu"),
        ("dspark", {"final_logit_softcapping": -3.0}, "final_logit_softcapping"),
        ("dspark", {"draft_vocab_size": 81}, "draft_vocab_size"),
        ("dspark", {"draft_vocab_size": 40}, "a reduced vocabulary, but no lm_head.weight"),
        ("dflash2", {"draft_vocab_size": 40}, "a DFlash 2 drafter with a reduced vocabulary"),
        ("dspark", {"target_layer_ids": [-2, 3]}, "target_layer_ids"),
        ("dspark", {"target_layer_ids": []}, "target_layer_ids"),
        ("dspark", {"target_layer_ids": None}, "target_layer_ids"),
        ("dspark", {"target_layer_ids": [1.5]}, "target_layer_ids"),
        ("dspark", {"mask_token_id": 80}, "mask_token_id"),
        ("dspark", {"mask_token_id": -1}, "mask_token_id"),
        ("dspark", {"hidden_size": None}, "hidden_size"),
        ("dspark", {"hidden_size": "64"}, "hidden_size"),
        ("dspark", {"num_hidden_layers": 0}, "num_hidden_layers"),
        ("dspark", {"num_key_value_heads": 3}, "num_key_value_heads"),
        ("dspark", {"head_dim": 23}, "head_dim"),
        ("dflash", {"block_size": 1}, "block_size"),
        ("dflash", {"block_size": 100_000}, "block_size"),
        ("dspark", {"rms_norm_eps": "small"}, "rms_norm_eps"),
        ("dspark", {"rope_theta": "big"}, "rope_theta"),
        ("dspark", {"rope_theta": 10**400}, "rope_theta"),
        ("dspark", {"is_causal": "no"}, "is_causal"),
    ],
)
def test_unsupported_configurations(folder: Path, method: str, changes: dict[str, Any], words: str) -> None:
    write_drafter(folder, method, **changes)
    sentence = refusal(lambda: checkpoint.inspect(folder))
    assert folder.name in sentence
    assert words in sentence


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_swa": True}, "sliding_window"),
        ({"output_multiplier": 0}, "output_multiplier"),
        ({"output_multiplier": 1e9}, "output_multiplier"),
        ({"input_embedding_scale": -8.0}, "input_embedding_scale"),
        ({"final_logit_softcapping": "20"}, "final_logit_softcapping"),
        ({"selector_top_k": 81}, "selector_top_k"),
        ({"conv_group_size": 24}, "conv_group_size"),
        ({"selector_rank": 0}, "selector_rank"),
        ({"conv_kernel_size": True}, "conv_kernel_size"),
        ({"target_layer_ids": "all"}, "target_layer_ids"),
    ],
)
def test_wrong_nested_values(folder: Path, changes: dict[str, Any], words: str) -> None:
    nested = drafter_settings("dflash2", SHAPE)["dflash_config"]
    write_drafter(folder, "dflash2", dflash_config=nested | changes)
    assert words in refusal(lambda: checkpoint.inspect(folder))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"architectures": ["Qwen3ForCausalLM"]},
            "not a drafter that this version can load (Qwen3ForCausalLM)",
        ),
        ({"architectures": None}, "not a drafter that this version can load (qwen3)"),
        ({"architectures": []}, "not a drafter that this version can load (qwen3)"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "it is an EAGLE-3 drafter"),
        ({"speculators_model_type": "eagle3"}, "it is an EAGLE-3 drafter"),
        ({"speculators_model_type": "peagle"}, "it is an EAGLE-3 drafter"),
        ({"speculators_model_type": "mlp"}, "it is a speculators model of the kind mlp"),
        ({"architectures": ["Qwen3DFlyModel"]}, "it is a DFly drafter"),
        ({"dflash_config": {"projector_type": "dfly"}}, "it is a DFly drafter"),
        ({"dflash_config": {"projector_type": "domino"}}, "it is a Domino drafter"),
        ({"dflash_config": {"projector_type": "spark9"}}, "it is a drafter of the kind spark9"),
        ({"dflash_config": {"projector_type": "dspark", "attention_mode": "mla"}}, "of the kind mla"),
        ({"architectures": ["Qwen35DSparkModel"], "model_type": "qwen3_5"}, "of the qwen3_5-native fork"),
        ({"architectures": ["LagunaDSparkModel"]}, "it is a Laguna drafter"),
        ({"architectures": ["NanbeigeDSparkModel"]}, "it is a drafter for Nanbeige's looped layers"),
        ({"architectures": ["NemotronHDSparkModel"]}, "it is a Nemotron drafter"),
        ({"attention_sink_bias": True}, "its attention has sinks"),
        ({"log_snr_conditioning": True}, "it is conditioned on a log-SNR"),
        ({"dspark_block_size": 5, "architectures": ["DeepseekV4ForCausalLM"]}, "DeepSeek-V4"),
    ],
)
def test_what_is_not_loaded_is_named(folder: Path, config: dict[str, Any], words: str) -> None:
    write_drafter(folder, "dspark", **config)
    sentence = refusal(lambda: checkpoint.inspect(folder))
    assert folder.name in sentence
    assert words in sentence


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        ("layers.0.self_attn.attention_sink_bias", "its attention has sinks"),
        ("layers.0.self_attn.g_proj.weight", "its attention is gated"),
        ("layers.0.self_attn.qkv_proj.weight", "its attention is fused"),
        ("aux_hidden_norms.0.weight", "norms its taps one by one"),
        ("log_snr_mlp.0.weight", "conditioned on a log-SNR"),
        ("layers.1.mlp.experts.3.up_proj.weight", "a mixture of experts"),
        ("layers.1.mlp.gate.weight", "a mixture of experts"),
        ("mask_hidden", "mask_hidden"),
        ("mtp.0.markov_head.markov_w1.weight", "DeepSeek-V4"),
        ("layers.0.self_attn.q_proj.bias", "layers.0.self_attn.q_proj.bias is not part of such a drafter"),
        ("layers.2.input_layernorm.weight", "layers.2.input_layernorm.weight is not part"),
        ("markov_head.gate_proj.weight", "markov_head.gate_proj.weight is not part"),
    ],
)
def test_tensors_that_would_compute_something_else(folder: Path, tensor: str, words: str) -> None:
    write_drafter(folder, "dspark")
    rewrite(folder, lambda weights: weights.update({tensor: mx.zeros(3)}))
    assert words in refusal(lambda: checkpoint.inspect(folder))


def test_gated_attention_is_seen_by_its_shape(folder: Path) -> None:
    write_drafter(folder, "dspark")
    name = "layers.0.self_attn.q_proj.weight"
    rewrite(folder, lambda weights: weights.update({name: mx.tile(weights[name], (2, 1))}))
    assert "its attention is gated" in refusal(lambda: checkpoint.inspect(folder))


@pytest.mark.parametrize("with_config", [True, False])
def test_gguf_alone(folder: Path, with_config: bool) -> None:
    write_drafter(folder, "dspark")
    (folder / "model.safetensors").unlink()
    (folder / "model-q8.gguf").write_bytes(b"GGUF")
    if not with_config:
        (folder / "config.json").unlink()
    assert "it holds a GGUF file only" in refusal(lambda: checkpoint.inspect(folder))


def test_weights_in_a_format_that_mlx_does_not_compute_in(folder: Path) -> None:
    write_drafter(folder, "dspark")
    name = "layers.0.mlp.up_proj.weight"
    rewrite(folder, lambda weights: weights.update({name: weights[name].astype(mx.int8)}))
    assert f"it stores {name} as I8" in refusal(lambda: checkpoint.inspect(folder))


def test_neutral_values_are_accepted(folder: Path) -> None:
    nested = drafter_settings("dflash2", SHAPE)["dflash_config"]
    neutral = {"output_multiplier": 1.0, "input_embedding_scale": 1, "causal": False, "use_swa": False}
    neutral |= {"final_logit_softcapping": None}
    write_drafter(folder, "dflash2", dflash_config=nested | neutral, rope_scaling=None, layer_types=None)
    load(folder)


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 200),
    st.floats(allow_nan=False, width=32),
    st.text(max_size=3),
    st.lists(st.integers(-1, 6) | st.text(max_size=2), max_size=3),
    st.dictionaries(
        st.sampled_from(["rope_theta", "bits", "group_size", "block_size"]), st.integers(), max_size=2
    ),
)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {method: tmp_path_factory.mktemp(method) for method in METHODS}
    for method, at in folders.items():
        write_drafter(at, method)
    return folders


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_any_value_anywhere_is_loaded_or_refused(written: dict[str, Path], data: st.DataObject) -> None:
    method = data.draw(st.sampled_from(METHODS))
    config = drafter_settings(method, SHAPE)
    places: list[tuple[dict[str, Any], str]] = [
        (config, key) for key in (*config, "quantization", "rope_scaling")
    ]
    if nested := config.get("dflash_config"):
        places += [(nested, key) for key in nested]
    if method == "dspark":
        places.append((config, "dflash_config"))
    place, key = data.draw(st.sampled_from(places))
    place[key] = data.draw(ODD)
    (written[method] / "config.json").write_text(json.dumps(config))
    # Anything else than a refusal fails the test.
    with contextlib.suppress(CheckpointError):
        load(written[method])


# ---------------------------------------------------------------------------- tensors


def rewrite(folder: Path, change: Callable[[dict[str, mx.array]], None]) -> None:
    """Change the stored tensors."""
    file = folder / "model.safetensors"
    weights = dict(mx.load(str(file)))
    mx.eval(weights)
    change(weights)
    file.unlink()
    mx.save_safetensors(str(file), weights)


@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("dspark", "fc.weight"),
        ("dspark", "markov_head.markov_w2.weight"),
        ("dspark", "confidence_head.proj.bias"),
        ("dflash", "layers.1.self_attn.k_norm.weight"),
        ("dflash2", "candidate_selector.successor_codebook"),
        ("dflash2", "layers.0.mlp_conv.base_kernel"),
    ],
)
def test_missing_and_misshapen_tensors(folder: Path, method: str, name: str) -> None:
    write_drafter(folder, method)
    renamed = f"{name}.weight" if name.endswith("codebook") else name
    rewrite(folder, lambda weights: weights.update({name: weights[name][..., :-1]}))
    sentence = refusal(lambda: checkpoint.inspect(folder))
    assert renamed in sentence
    assert "config.json" in sentence
    rewrite(folder, lambda weights: weights.pop(name))
    assert f"{renamed} is missing" in refusal(lambda: checkpoint.inspect(folder))


def test_tables_of_the_target_are_borrowed(folder: Path) -> None:
    """Published DSpark checkpoints repeat the target's embedding and head."""
    write_drafter(folder, "dspark")
    tables = {name: mx.zeros((SHAPE.vocabulary, SHAPE.hidden)) for name in ("embed_tokens", "lm_head")}
    rewrite(folder, lambda weights: weights.update({f"{n}.weight": t for n, t in tables.items()}))
    load(folder)


def test_convolution_projections_may_lack_a_suffix(folder: Path) -> None:
    write_drafter(folder, "dflash2")
    name = "layers.0.mlp_conv.kernel_projection"
    rewrite(folder, lambda weights: weights.update({name: weights.pop(f"{name}.weight")}))
    load(folder)


@pytest.mark.parametrize("key", ["layers", "hidden"])
def test_config_that_contradicts_the_tensors(folder: Path, key: str) -> None:
    changes = {"layers": {"num_hidden_layers": 3, "layer_types": None}, "hidden": {"hidden_size": 128}}[key]
    write_drafter(folder, "dflash", **changes)
    assert "does not hold what its config.json says" in refusal(lambda: checkpoint.inspect(folder))


def test_quantisation_that_does_not_divide(folder: Path) -> None:
    write_drafter(folder, "dflash", bits=4)
    config = json.loads((folder / "config.json").read_text())
    for quantization in ({"group_size": 128, "bits": 4}, {"bits": 4}, {"group_size": 32, "bits": 7}, "4bit"):
        (folder / "config.json").write_text(json.dumps(config | {"quantization": quantization}))
        assert folder.name in refusal(lambda: load(folder))


@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("dspark", "norm.weight"),
        ("dspark", "fc.weight"),
        ("dspark", "markov_head.markov_w1.weight"),
        ("dspark", "confidence_head.proj.bias"),
        ("dflash", "layers.1.mlp.down_proj.weight"),
        ("dflash2", "layers.0.attention_conv.base_kernel"),
        ("dflash2", "candidate_selector.predecessor_codebook"),
    ],
)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_numbers_that_are_not_finite(folder: Path, method: str, name: str, value: float) -> None:
    write_drafter(folder, method)

    def spoil(weights: dict[str, mx.array]) -> None:
        spoilt = np.array(weights[name])
        spoilt.flat[0] = value
        weights[name] = mx.array(spoilt)

    rewrite(folder, spoil)
    assert "not finite" in refusal(lambda: load(folder))


# ---------------------------------------------------------------------------- fit


def test_fitting_target_has_no_misfit(folder: Path) -> None:
    write_drafter(folder, "dspark")
    found = checkpoint.inspect(folder)
    assert checkpoint.misfit(found, NumpyTables(80, 64), 5) is None


@pytest.mark.parametrize(
    ("vocabulary", "hidden", "layers", "words"),
    [
        (80, 128, 5, "(hidden size 64, not 128)"),
        (96, 64, 5, "(vocabulary 80, not 96)"),
        (80, 64, 6, "(5 layers, not 6)"),
        (80, 64, 3, "(5 layers, not 3)"),
    ],
)
def test_misfits(folder: Path, vocabulary: int, hidden: int, layers: int, words: str) -> None:
    write_drafter(folder, "dflash")
    reason = checkpoint.misfit(checkpoint.inspect(folder), NumpyTables(vocabulary, hidden), layers)
    assert reason == f"drafter is for another target {words}"


def test_taps_beyond_the_target(folder: Path) -> None:
    write_drafter(folder, "dflash", num_target_layers=None)
    found = checkpoint.inspect(folder)
    assert checkpoint.misfit(found, NumpyTables(80, 64), 4) is None
    reason = checkpoint.misfit(found, NumpyTables(80, 64), 3)
    assert reason == "drafter is for another target (4 layers, not 3)"


def test_code_in_the_folder_is_never_run(folder: Path) -> None:
    write_drafter(folder, "dflash", auto_map={"AutoModel": "dflash.DFlashDraftModel"})
    (folder / "dflash.py").write_text("raise SystemExit('this must not run')")
    load(folder)
    shutil.rmtree(folder)


def test_loading_leaves_nothing_behind_in_the_random_state(folder: Path) -> None:
    """Modules draw their first parameters; a state that nobody asks for a number keeps all those draws."""

    def waiting() -> int:
        graph = io.StringIO()
        mx.export_to_dot(graph, mx.random.uniform())
        return len(graph.getvalue())

    write_drafter(folder, "dflash")
    load(folder)
    before = waiting()
    mx.eval(mx.random.uniform())
    for _ in range(5):
        load(folder)
    assert waiting() <= before + 100
