"""The converted demo target against a NumPy reading of the same GGUF bytes."""

from __future__ import annotations

import json
from pathlib import Path

import gguf_file
import mlx.core as mx
import numpy as np
import pytest

from dspark_tui.engine.models.errors import ModelError
from dspark_tui.engine.models.folder import problem
from dspark_tui.engine.models.gguf import convert, half_split_order


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[gguf_file.Reader, Path]:
    folder = tmp_path_factory.mktemp("converted")
    gguf = gguf_file.write(folder / "tiny.gguf")
    out = folder / "out"
    out.mkdir()
    convert(gguf, out, lambda done, total: None)
    return gguf_file.Reader(gguf.read_bytes()), out


def dequantised(folder: Path, name: str) -> np.ndarray:
    weights = mx.load(str(folder / "model.safetensors"))
    config = json.loads((folder / "config.json").read_text())["quantization"]
    if f"{name}.scales" not in weights:
        return np.array(weights[f"{name}.weight"].astype(mx.float32))
    bits = config.get(name, config)["bits"]
    parts = [weights[f"{name}.{leaf}"] for leaf in ("weight", "scales", "biases")]
    parts[1:] = [part.astype(mx.float32) for part in parts[1:]]
    return np.array(mx.dequantize(*parts, group_size=config["group_size"], bits=bits))


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(
    ("gguf_name", "mlx_name", "heads"),
    [
        ("attn_q", "self_attn.q_proj", 4),
        ("attn_k", "self_attn.k_proj", 2),
        ("attn_v", "self_attn.v_proj", None),
        ("attn_output", "self_attn.o_proj", None),
        ("ffn_gate", "mlp.gate_proj", None),
        ("ffn_up", "mlp.up_proj", None),
        ("ffn_down", "mlp.down_proj", None),
        ("attn_norm", "input_layernorm", None),
        ("ffn_norm", "post_attention_layernorm", None),
    ],
)
def test_a_layers_weights(converted, layer, gguf_name, mlx_name, heads) -> None:
    reader, out = converted
    expected = reader.tensor(f"blk.{layer}.{gguf_name}.weight")
    if heads:
        expected = gguf_file.half_split(expected, heads)
    found = dequantised(out, f"model.layers.{layer}.{mlx_name}")
    # A fused multiply-add may differ in the last place of values below 3.
    np.testing.assert_allclose(found, expected, rtol=0, atol=5e-7)


def test_embedding_and_last_norm(converted) -> None:
    reader, out = converted
    # Q8_0 becomes scale and bias -128 scale; the float16 bias is exact, being a power of two times the scale.
    np.testing.assert_allclose(
        dequantised(out, "model.embed_tokens"), reader.tensor("token_embd.weight"), rtol=0, atol=4e-6
    )
    np.testing.assert_array_equal(dequantised(out, "model.norm"), reader.tensor("output_norm.weight"))


def test_rotary_order_by_hand() -> None:
    # Two heads of six rows; GGUF holds each as 0 3 1 4 2 5 of the half-split order.
    assert half_split_order(12, 2) == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]


def test_mlx_lm_loads_it_and_the_tokenizer_round_trips(converted) -> None:
    from mlx_lm import load

    _, out = converted
    assert problem(out) is None
    model, tokenizer = load(str(out))
    assert model(mx.array([[1, 5, 9]])).shape == (1, 3, len(tokenizer.get_vocab()))
    assert tokenizer.decode(tokenizer.encode("hello 42", add_special_tokens=False)) == "hello 42"
    assert tokenizer.encode("he", add_special_tokens=False) == [tokenizer.get_vocab()["he"]]
    assert tokenizer.eos_token_ids == {2}
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert rendered == "user: hi\n"


def test_digits_are_tokens_of_their_own(converted) -> None:
    from tokenizers import Tokenizer

    _, out = converted
    assert Tokenizer.from_file(str(out / "tokenizer.json")).encode("1234").tokens == ["1", "2", "3", "4"]


def test_config_facts(converted) -> None:
    _, out = converted
    config = json.loads((out / "config.json").read_text())
    expected = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert {key: config[key] for key in expected} == expected
    assert config["quantization"] == {
        "group_size": 32,
        "bits": 4,
        "mode": "affine",
        "model.embed_tokens": {"group_size": 32, "bits": 8, "mode": "affine"},
    }


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda data: b"GARBAGE!" + data[8:], "not a GGUF file"),
        (lambda data: data.replace(b"smollm", b"qwen2x"), "splits text as 'qwen2x'"),
        (lambda data: data.replace(b"attn_output", b"attn_mirror"), "attn_mirror"),
        (lambda data: data.replace(b"llama.rope.freq_base", b"llama.rope.freq_bass"), "llama.rope.freq_base"),
    ],
)
def test_another_file_is_one_sentence(tmp_path, damage, said) -> None:
    gguf = tmp_path / "other.gguf"
    gguf.write_bytes(damage(gguf_file.tiny()))
    with pytest.raises(ModelError) as caught:
        convert(gguf, tmp_path, lambda done, total: None)
    assert said in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.demo
def test_rows_of_the_demo_target(demo_target: Path) -> None:
    """Rows decoded from the published GGUF by the reader of `gguf_file` (tools/golden_rows.py)."""
    golden = json.loads((Path(__file__).parent.parent / "data" / "demo_rows.json").read_text())
    assert len(golden) >= 8
    for entry in golden:
        row = dequantised(demo_target, entry["name"])[entry["row"]][: len(entry["values"])]
        np.testing.assert_allclose(row, np.array(entry["values"], np.float32), rtol=0, atol=2e-6)
