"""Every published packaging, on tiny twins: read as what it is, loaded, and drafting."""

from __future__ import annotations

import contextlib
import copy
import json
import math
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from numpy_drafters import NumpyTables
from numpy_reference import Reference
from twins import HIDDEN, TARGET, TWINS, VOCAB, Twin, engine_names, write_twin

from dspark_tui.engine.drafters import checkpoint
from dspark_tui.engine.drafters.checkpoint import CheckpointError
from dspark_tui.engine.drafters.modules import build
from dspark_tui.engine.protocol import Sampling
from dspark_tui.engine.sampling import Sampler


@pytest.fixture(params=sorted(TWINS))
def twin(request: pytest.FixtureRequest) -> Twin:
    return TWINS[request.param]


def test_it_is_read_as_what_it_is(twin: Twin, tmp_path: Path) -> None:
    write_twin(tmp_path, twin)
    found = checkpoint.inspect(tmp_path)
    assert (found.method, found.packaging) == (twin.method, twin.packaging)
    assert found.config == twin.backbone
    assert found.head == twin.head
    assert found.drafts == twin.backbone.block_size - twin.head.first_row
    assert (found.target_layers, found.scaled_by_target) == (twin.target_layers, twin.scaled_by_target)
    assert found.notes == ()
    layers = twin.target_layers or TARGET
    assert checkpoint.misfit(found, NumpyTables(VOCAB, HIDDEN), layers) is None


def test_its_modules_are_its_tensors(twin: Twin, tmp_path: Path) -> None:
    """Names and shapes of the modules are those of the stored tensors, no more and no fewer."""
    write_twin(tmp_path, twin)
    found = checkpoint.inspect(tmp_path)
    made = {
        name: tuple(value.shape) for name, value in tree_flatten(build(found.config, found.head).parameters())
    }
    aside = ("verifier_", "d2t", "t2d")
    stored = {name: t.shape for name, t in found.tensors.items() if not name.startswith(aside)}
    assert made == stored


def test_its_weights_arrive_under_their_places(twin: Twin, tmp_path: Path) -> None:
    stored = write_twin(tmp_path, twin)
    found = checkpoint.inspect(tmp_path)
    tables = NumpyTables(VOCAB, HIDDEN, embedding_scale=3.0)
    drafter = checkpoint.load(found, "it", tables)
    assert (drafter.name, drafter.method, drafter.drafts) == ("it", twin.method, found.drafts)
    assert drafter.taps == twin.backbone.taps
    scale = 3.0 if twin.scaled_by_target else twin.backbone.embedding_scale
    assert drafter.config.embedding_scale == scale
    # Every weight arrived under its place, unchanged.
    held = dict(tree_flatten(drafter.model.parameters()))
    for name, tensor in found.tensors.items():
        if name in held:
            np.testing.assert_array_equal(np.array(held[name]), stored[tensor.name], err_msg=name)
    assert sum(math.prod(v.shape) for v in held.values()) * 4 == checkpoint.memory_bytes(found, tables)


@pytest.mark.parametrize("table_bits", [16, 4])
def test_it_drafts_as_the_formulas_say(twin: Twin, tmp_path: Path, table_bits: int) -> None:
    """From the files to the proposal. The target's tables serve if precise, else its own."""
    weights = engine_names(write_twin(tmp_path, twin))
    tables = NumpyTables(VOCAB, HIDDEN, embedding_scale=3.0)
    drafter = checkpoint.load(checkpoint.inspect(tmp_path), "it", tables, table_bits=table_bits)
    config, head = twin.backbone, twin.head
    if twin.scaled_by_target:
        config = replace(config, embedding_scale=3.0)
    if table_bits == 16:
        reduced = head.draft_vocabulary is not None
        head = replace(head, own_embedding=False, own_head=reduced)
    reference = Reference(config, head, weights, tables, twin.integers.get("d2t"))
    rows = np.random.default_rng(2).standard_normal((31, len(config.taps) * HIDDEN), dtype=np.float32)
    for length in (6, 31):
        drafter.reset()
        drafter.extend(mx.array(rows[:length]), 0)
        proposal = drafter.propose(3, 99, Sampler(Sampling(), 0))
        hidden = reference.hidden(rows[:length], 3)
        drafts = reference.greedy(hidden, 3)
        assert proposal.tokens.tolist() == drafts
        assert len(drafts) == drafter.drafts
        if head.confidence is None:
            assert proposal.confidence is None
            continue
        wanted = [reference.confidence(hidden, at, before) for at, before in enumerate([3, *drafts[:-1]])]
        np.testing.assert_allclose(np.array(proposal.confidence), wanted, atol=1e-4)


def test_shards_with_an_index(tmp_path: Path) -> None:
    twin = TWINS["deepspec vanilla"]
    write_twin(tmp_path, twin)
    whole = dict(mx.load(str(tmp_path / "model.safetensors")))
    mx.eval(whole)
    (tmp_path / "model.safetensors").unlink()
    names, index = sorted(whole), {}
    for number, part in enumerate((names[::2], names[1::2])):
        file = f"model-{number + 1:05}-of-00002.safetensors"
        mx.save_safetensors(str(tmp_path / file), {name: whole[name] for name in part})
        index |= dict.fromkeys(part, file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    # A file that the index does not name is not part of the checkpoint.
    mx.save_safetensors(str(tmp_path / "optimizer.safetensors"), {"fc.weight": mx.zeros((3, 3))})
    found = checkpoint.inspect(tmp_path)
    assert found.config == twin.backbone
    drafter = checkpoint.load(found, "it", NumpyTables(VOCAB, HIDDEN))
    assert mx.array_equal(drafter.model.fc.weight, whole["fc.weight"])


def test_extra_tensors_are_left_aside_and_named(tmp_path: Path) -> None:
    twin = TWINS["dflash"]
    extra = {
        "rotary_emb.inv_freq": (12,),
        "layers.0.self_attn.rotary_emb.inv_freq": (12,),
        "value_head.w": (3,),
    }
    extra |= {"embed_tokens.weight": (VOCAB, HIDDEN), "t2d": (VOCAB,)}
    write_twin(tmp_path, Twin(**{**twin.__dict__, "shapes": twin.shapes | extra}))
    found = checkpoint.inspect(tmp_path)
    assert found.notes == (f"{tmp_path.name} holds tensors that are not used: value_head.w.",)
    checkpoint.load(found, "it", NumpyTables(VOCAB, HIDDEN))


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 200),
    st.just(10**400),
    st.floats(allow_nan=False, width=32),
    st.text(max_size=3),
    st.lists(st.integers(-1, 6) | st.text(max_size=2) | st.dictionaries(st.text(), st.none()), max_size=3),
    st.dictionaries(
        st.sampled_from(["rope_theta", "rope_type", "type", "factor", "full_attention", "block_size"]),
        st.integers() | st.sampled_from(["yarn", "default"]) | st.just({}),
        max_size=3,
    ),
)
PLACES = [
    ("deepspec gemma4", ()),
    ("deepspec gemma4", ("rope_parameters",)),
    ("deepspec gemma4", ("rope_parameters", "full_attention")),
    ("deepspec rnn", ()),
    ("dflash sliding", ()),
    ("dflash muse", ("dflash_config",)),
    ("dflash reduced", ()),
    ("dflash2", ()),
    ("speculators dspark sliding", ()),
    ("speculators dspark sliding", ("transformer_layer_config",)),
    ("speculators dspark, one row more", ("speculators_config",)),
    ("speculators dflash2", ()),
    ("specforge", ()),
    ("specforge", ("rope_scaling",)),
    ("specforge", ("dflash_config",)),
    ("liquid", ()),
]
ADDED = [
    "is_causal", "causal", "use_swa", "swa_window_size", "rope_scaling", "rope_parameters",
    "draft_vocab_size", "target_hidden_size", "sample_from_anchor", "logit_scale", "quantization",
    "mscale", "mscale_all_dim",
    "attention_factor", "truncate", "use_sliding_window", "max_window_layers", "projector_type",
]  # fmt: skip


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {name: tmp_path_factory.mktemp("odd") for name, _ in PLACES}
    for name, folder in folders.items():
        write_twin(folder, TWINS[name])
    return folders


@settings(max_examples=600, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_any_value_anywhere_is_read_or_refused(written: dict[str, Path], data: st.DataObject) -> None:
    name, path = data.draw(st.sampled_from(PLACES))
    config = copy.deepcopy(TWINS[name].config)
    place = config
    for key in path:
        place = place[key]
    place[data.draw(st.sampled_from([*place, *ADDED]))] = data.draw(ODD)
    (written[name] / "config.json").write_text(json.dumps(config))
    # Anything else than a refusal fails the test.
    with contextlib.suppress(CheckpointError):
        found = checkpoint.inspect(written[name])
        tables = NumpyTables(VOCAB, HIDDEN)
        if checkpoint.misfit(found, tables, TARGET) is None:
            checkpoint.load(found, "it", tables)
