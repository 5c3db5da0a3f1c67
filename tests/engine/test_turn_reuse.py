"""What a next turn computes again, on every kind of cache: counts exactly, and the text of a fresh start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from backend_harness import METHODS, SHAPE, VOCABULARY, Engine, prompt
from numpy_drafters import write_drafter
from tiny import CHAT_TEMPLATE, tiny_llama

from dspark_tui.engine.backend import Control
from dspark_tui.engine.protocol import AnyEvent, Prefill, Result, Rounds, Text
from dspark_tui.engine.session import Session

WINDOW = 16
CONTEXT = 600
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": {
        "query_pre_attn_scalar": 16,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
        "tied": True,
    },
    "qwen3_5": {
        "text_config": {
            "model_type": "qwen3_5_text",
            "hidden_size": 64,
            "num_hidden_layers": 4,
            "intermediate_size": 96,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rms_norm_eps": 1e-5,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": CONTEXT,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_conv_kernel_dim": 4,
            "full_attention_interval": 4,
            "tie_word_embeddings": True,
            "rope_parameters": {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        }
    },
}
UNCUT = ["gemma3_text", "qwen3_5"]
"""Families whose caches cannot be cut everywhere."""

STRIPPING = CHAT_TEMPLATE.replace(
    "{{ m['content'] }}",
    "{{ m['content'].split('x')[-1] if m['role'] == 'assistant' else m['content'] }}",
)
"""Takes everything up to the last x out of old answers, as others do with thoughts."""
REFUSING = "{% for m in messages %}{% if m['content'] in ('a', '1') %}{{ 1 / 0 }}{% endif %}{% endfor %}" + (
    CHAT_TEMPLATE
)
"""Raises at the conversations that the engine makes up to find the boundary."""


def write(folder: Path, family: str, template: str = CHAT_TEMPLATE) -> Path:
    settings = dict(FAMILIES[family])
    return tiny_llama(folder, VOCABULARY, architecture=family, context=CONTEXT, template=template, **settings)


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target of every family, under three templates, and a drafter of every method."""
    top = tmp_path_factory.mktemp("zoo")
    for family in FAMILIES:
        write(top / family, family)
        write(top / f"{family}-stripping", family, STRIPPING)
        write(top / f"{family}-refusing", family, REFUSING)
    for method in METHODS:
        write_drafter(top / method, method, SHAPE)
    return top


def start(zoo: Path, target: str, drafter: str = "none") -> Engine:
    engine = Engine()
    engine.load(zoo / target, drafter if drafter == "none" else str(zoo / drafter))
    return engine


def session_of(engine: Engine) -> Session:
    assert engine.backend.session is not None
    return engine.backend.session


def held(engine: Engine) -> list[int]:
    return list(session_of(engine).target.tokens)


def shared(one: list[int], other: list[int]) -> int:
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count


def computed(engine: Engine, result: Result) -> int:
    """Prompt tokens of the last answer that went through the target, by its progress events."""
    events = engine.of(Prefill)
    assert events[0].done == events[0].reused == result.reused_tokens
    assert events[-1].done == result.prompt_tokens
    return events[-1].done - events[0].done


def fresh(zoo: Path, target: str, *messages: str, count: int = 24) -> Result:
    """The same conversation with nothing kept from before, without a drafter."""
    return start(zoo, target).chat(*messages, max_tokens=count)


# ---------------------------------------------------------------------------- the next turn


@pytest.mark.parametrize("drafter", ["none", "dspark", "dflash2"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_and_third_turn_compute_only_what_is_new(zoo: Path, family: str, drafter: str) -> None:
    engine = start(zoo, family, drafter)
    first = engine.chat("hello, how is it?", max_tokens=40)
    assert computed(engine, first) == first.prompt_tokens == len(prompt("hello, how is it?"))
    turns = ["hello, how is it?", first.text, "and now"]
    for _ in range(2):
        before = held(engine)
        wanted = prompt(*turns)
        assert shared(before, wanted) == len(before), "the answer does not come again token for token"
        result = engine.chat(*turns, max_tokens=24)
        assert result.reused_tokens == len(before)
        assert computed(engine, result) == len(wanted) - len(before)
        assert result.token_ids == fresh(zoo, family, *turns).token_ids
        turns += [result.text, "more!"]


@pytest.mark.parametrize("drafter", ["none", "dflash"])
@pytest.mark.parametrize("family", FAMILIES)
def test_once_more_computes_the_last_token(zoo: Path, family: str, drafter: str) -> None:
    engine = start(zoo, family, drafter)
    first = engine.chat("tell me a tale", max_tokens=50)
    for _ in range(2):
        again = engine.chat("tell me a tale", max_tokens=50)
        assert computed(engine, again) == 1
        assert again.token_ids == first.token_ids
    # Also in a later turn.
    turns = ["tell me a tale", first.text, "another"]
    second = engine.chat(*turns, max_tokens=50)
    again = engine.chat(*turns, max_tokens=50)
    assert computed(engine, again) == 1
    assert again.token_ids == second.token_ids == fresh(zoo, family, *turns, count=50).token_ids


@pytest.mark.parametrize("family", FAMILIES)
def test_an_edit_of_the_last_message_keeps_the_turns_before(zoo: Path, family: str) -> None:
    engine = start(zoo, family, "dspark")
    first = engine.chat("hello", max_tokens=40)
    end = len(held(engine))
    turns = ["hello", first.text, "what is 1?"]
    old = prompt(*turns)
    engine.chat(*turns, max_tokens=30)
    turns[-1] = "who is 2?"
    edited = engine.chat(*turns, max_tokens=24)
    assert edited.reused_tokens == (shared(old, prompt(*turns)) if family == "llama" else end)
    assert computed(engine, edited) == edited.prompt_tokens - edited.reused_tokens
    assert edited.token_ids == fresh(zoo, family, *turns).token_ids


@pytest.mark.parametrize("family", FAMILIES)
def test_an_edit_of_the_first_message_keeps_what_it_can(zoo: Path, family: str) -> None:
    engine = start(zoo, family, "dflash")
    first = engine.chat("hello", max_tokens=40)
    engine.chat("hello", first.text, "more", max_tokens=30)
    edited = engine.chat("hullo", max_tokens=24)
    assert edited.reused_tokens == (shared(prompt("hello"), prompt("hullo")) if family == "llama" else 0)
    assert edited.token_ids == fresh(zoo, family, "hullo").token_ids
    assert session_of(engine).snapshots.lengths == ([] if family == "llama" else [len(prompt("hullo")) - 1])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_chat_keeps_a_long_system_prompt(zoo: Path, family: str) -> None:
    system = "be kind and brief, " * 6
    engine = start(zoo, family)
    first = engine.chat("hello", max_tokens=16, system=system)
    second = engine.chat("what is it?", max_tokens=16, system=system)
    # <|im_start|>system NEWLINE ... <|im_end|> NEWLINE <|im_start|>user NEWLINE
    assert second.reused_tokens == 1 + len("system\n") + len(system) + 2 + 1 + len("user\n")
    assert second.reused_tokens == first.prompt_tokens - len(prompt("hello")) + 1 + len("user\n")
    alone = start(zoo, family).chat("what is it?", max_tokens=16, system=system)
    assert second.token_ids == alone.token_ids


class StopAt:
    """Stops an answer once so many characters are there."""

    def __init__(self, length: int) -> None:
        self.control = Control()
        self.left = length

    def __call__(self, event: AnyEvent) -> None:
        if isinstance(event, Text):
            self.left -= len(event.text)
            if self.left <= 0:
                self.control.stop()


@pytest.mark.parametrize("drafter", ["none", "dspark"])
@pytest.mark.parametrize("family", FAMILIES)
def test_after_a_stop_the_next_turn_goes_on_from_there(zoo: Path, family: str, drafter: str) -> None:
    engine = start(zoo, family, drafter)
    stop = StopAt(20)
    first = engine.chat("hello", control=stop.control, emit=stop, max_tokens=200)
    assert first.finish_reason == "stopped"
    before = held(engine)
    turns = ["hello", first.text, "go on"]
    second = engine.chat(*turns, max_tokens=24)
    assert second.reused_tokens == len(before)
    assert second.token_ids == fresh(zoo, family, *turns).token_ids


# ---------------------------------------------------------------------------- templates


@pytest.mark.parametrize("drafter", ["none", "dflash2"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_template_that_strips_old_answers(zoo: Path, family: str, drafter: str) -> None:
    """The boundary before the answer survives; the stripped answer and the question are computed."""
    target = f"{family}-stripping"
    engine = start(zoo, target, drafter)
    first = engine.chat("hello", max_tokens=40)
    answer = first.text.replace("x", "y")
    answer = f"{answer[:12]}x{answer[12:]}"
    turns = ["hello", answer, "and now?"]
    wanted = prompt("hello", answer.split("x")[-1], "and now?")
    common = shared(held(engine), wanted)
    second = engine.chat(*turns, max_tokens=24)
    assert second.prompt_tokens == len(wanted)
    assert second.reused_tokens == (common if family == "llama" else len(prompt("hello")) - 1)
    assert computed(engine, second) == len(wanted) - second.reused_tokens
    assert second.token_ids == fresh(zoo, target, *turns).token_ids
    # And once more after that.
    turns += [second.text, "so?"]
    third = engine.chat(*turns, max_tokens=24)
    assert third.reused_tokens >= len(wanted) - 1
    assert third.token_ids == fresh(zoo, target, *turns).token_ids


@pytest.mark.parametrize("family", FAMILIES)
def test_a_template_that_raises_at_made_up_turns(zoo: Path, family: str) -> None:
    target = f"{family}-refusing"
    engine = start(zoo, target, "dspark")
    first = engine.chat("hello", max_tokens=40)
    before = held(engine)
    turns = ["hello", first.text, "and now?"]
    second = engine.chat(*turns, max_tokens=24)
    assert second.reused_tokens == len(before)
    again = engine.chat(*turns, max_tokens=24)
    assert computed(engine, again) == 1
    assert again.token_ids == second.token_ids == fresh(zoo, target, *turns).token_ids


# ---------------------------------------------------------------------------- what it costs


def test_plain_caches_take_no_snapshots(zoo: Path) -> None:
    engine = start(zoo, "llama")
    first = engine.chat("hello", max_tokens=20)
    engine.chat("hello", first.text, "more", max_tokens=20)
    assert session_of(engine).snapshots.lengths == []
    # And their prompts are not cut up for any.
    assert [event.done for event in engine.of(Prefill)][1:] == [engine.of(Prefill)[0].total]


@pytest.mark.parametrize("family", UNCUT)
def test_snapshots_stay_few(zoo: Path, family: str) -> None:
    engine = start(zoo, family)
    turns: list[str] = ["hi"]
    for _ in range(9):
        result = engine.chat(*turns, max_tokens=6)
        turns += [result.text, "on"]
    kept = session_of(engine).snapshots
    assert len(kept.lengths) == 8
    assert kept.lengths[0] == len(prompt("hi")) - 1
    assert kept.lengths[-1] == result.prompt_tokens - 1
    assert kept.bytes == sum(snapshot.bytes for snapshot in kept.kept) > 0


def test_memory_of_context_rows_is_told(zoo: Path) -> None:
    engine = start(zoo, "llama", "dspark")
    result = engine.chat("hello", max_tokens=20)
    session = session_of(engine)
    row = 4 * len(session.target.taps) * session.target.hidden_size
    assert row > 0
    assert engine.of(Rounds)[-1].context_rows_bytes == row * (result.prompt_tokens + 19)
    plain = start(zoo, "llama")
    plain.chat("hello", max_tokens=20)
    assert plain.of(Rounds)[-1].context_rows_bytes == 0


# ---------------------------------------------------------------------------- the context's end


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_ends_at_the_context_limit(zoo: Path, family: str) -> None:
    engine = start(zoo, family, "dflash2")
    text = "a" * (CONTEXT - 30)
    result = engine.chat(text)
    assert result.finish_reason in ("length", "stop")
    assert result.prompt_tokens + result.generated_tokens <= CONTEXT
    assert len(held(engine)) <= CONTEXT
    if result.finish_reason == "length":
        assert result.prompt_tokens + result.generated_tokens == CONTEXT
