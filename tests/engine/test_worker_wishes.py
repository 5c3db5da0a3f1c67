"""What a request may wish for, through the backend: penalties, bias, thinking, effort; and refusals."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from backend_harness import METHODS, VOCABULARY, Engine, refusal
from numpy_sampling import adjusted
from tiny import CHAT_TEMPLATE, IM_END, tiny_llama, write_tokenizer
from tokenizers import AddedToken, Tokenizer

from dspark_tui.engine.protocol import Sampling, Text

START, END = 64, 65
"""`<think>` and `</think>`."""
SWITCH = (
    CHAT_TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}<think>\n</think>{% endif %}"
    "{% if reasoning_effort == 'high' %}!{% elif reasoning_effort == 'low' %}.{% endif %}"
)
OPENED = CHAT_TEMPLATE + "{% if add_generation_prompt %}<think>\n{% endif %}{# </think> #}"
BETWEEN = Sampling(1.0, seed=1, logit_bias={END: 3.0, START: -100.0, IM_END: -100.0})
"""Answers that leave the thinking now and then."""


def thinker(folder: Path, template: str) -> Path:
    """A tiny model whose vocabulary has the two markers."""
    tiny_llama(folder, 66, template=template)
    write_tokenizer(folder, 64, template)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def said(engine: Engine) -> tuple[str, str]:
    """Thinking and answer, from the events; all thinking must come first."""
    texts = engine.of(Text)
    assert [text.seq for text in texts] == list(range(len(texts)))
    kinds = [text.thinking for text in texts]
    assert kinds == sorted(kinds, reverse=True)
    return (
        "".join(text.text for text in texts if text.thinking),
        "".join(text.text for text in texts if not text.thinking),
    )


# ---------------------------------------------------------------------- thinking


def test_thinking_that_the_template_opened_comes_apart(engine: Engine, tmp_path: Path) -> None:
    loaded = engine.load(thinker(tmp_path / "opened", OPENED))
    assert loaded.model.thinks
    closed = 0
    for seed in range(4):
        sampling = Sampling(1.0, seed=seed, logit_bias=BETWEEN.logit_bias)
        result = engine.chat("hello", max_tokens=40, sampling=sampling)
        assert said(engine) == (result.thinking, result.text)
        tokenizer = engine.backend.session.target.tokenizer  # type: ignore[union-attr]
        # Tokens before the first marker, and those after it, decoded by the tokenizer at once.
        at = result.token_ids.index(END) if END in result.token_ids else len(result.token_ids)
        assert result.thinking == tokenizer.decode(result.token_ids[:at]).strip()
        assert result.text == tokenizer.decode(result.token_ids[at + 1 :]).lstrip()
        assert result.generated_tokens == len(result.token_ids) == 40
        closed += END in result.token_ids
    assert closed, "the marker must appear for this test to tell"


def test_thinking_that_never_ends_stays_thinking(engine: Engine, tmp_path: Path) -> None:
    engine.load(thinker(tmp_path / "opened", OPENED))
    result = engine.chat("hello", max_tokens=20, sampling=Sampling(logit_bias={END: -100.0, IM_END: -100.0}))
    assert result.finish_reason == "length"
    assert result.text == ""
    assert result.thinking
    assert said(engine) == (result.thinking, "")


def test_stop_texts_do_not_count_in_thinking(engine: Engine, tmp_path: Path) -> None:
    engine.load(thinker(tmp_path / "opened", OPENED))
    sampling = Sampling(logit_bias={END: -100.0, IM_END: -100.0})
    whole = engine.chat("hello", max_tokens=20, sampling=sampling)
    stopped = engine.chat("hello", max_tokens=20, sampling=sampling, stop=[whole.thinking[5:8]])
    assert stopped.thinking == whole.thinking
    assert stopped.finish_reason == "length"


def test_switch_and_effort_reach_the_template(engine: Engine, tmp_path: Path) -> None:
    loaded = engine.load(thinker(tmp_path / "switch", SWITCH))
    assert loaded.model.thinks
    assert loaded.model.efforts == ["low", "high"]
    plain = engine.chat("hello", max_tokens=1).prompt_tokens
    assert engine.chat("hello", max_tokens=1, thinking=True).prompt_tokens == plain
    # `<think>`, a newline and `</think>` are three tokens.
    assert engine.chat("hello", max_tokens=1, thinking=False).prompt_tokens == plain + 3
    assert engine.chat("hello", max_tokens=1, effort="high").prompt_tokens == plain + 1


def test_wishes_that_cannot_be_honoured_are_refused(engine: Engine, models: Path, tmp_path: Path) -> None:
    engine.load(models / "target")
    words = refusal(lambda: engine.chat("hi", thinking=True))
    assert words == "target does not think; leave thinking out."
    words = refusal(lambda: engine.chat("hi", effort="high"))
    assert words == "target knows no levels of effort; leave the effort out."
    engine.load(thinker(tmp_path / "opened", OPENED))
    words = refusal(lambda: engine.chat("hi", thinking=False))
    assert words == "opened always thinks: its chat template has no switch for it."
    assert engine.chat("hi", max_tokens=2, thinking=True).generated_tokens == 2


# ---------------------------------------------------------------------- penalties and bias


def test_a_bias_outside_the_vocabulary_is_refused(engine: Engine, models: Path) -> None:
    engine.load(models / "target", str(models / "dspark"))
    words = refusal(lambda: engine.chat("hi", sampling=Sampling(logit_bias={VOCABULARY: 1.0})))
    assert words == (
        f"logit bias names token {VOCABULARY}; this model's token ids go from 0 to {VOCABULARY - 1}."
    )
    assert engine.chat("hi", max_tokens=2).generated_tokens == 2


@pytest.mark.parametrize("drafter", ["none", "lookup", *METHODS])
def test_penalties_are_those_of_a_plain_loop(engine: Engine, models: Path, drafter: str) -> None:
    """From the template's prompt to the last token, in the second turn as in the first."""
    engine.load(models / "target", str(models / drafter) if drafter in METHODS else drafter)
    sampling = Sampling(
        repetition_penalty=1.2,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias={IM_END: -50.0, 9: 2.0},
    )
    first = engine.chat("hello", max_tokens=30, sampling=sampling)
    turns = [("hello",), ("hello", first.text, "more")]
    target = engine.backend.session.target  # type: ignore[union-attr]
    for messages in turns:
        result = engine.chat(*messages, max_tokens=30, sampling=sampling)
        history = [*target.tokens][: result.prompt_tokens]
        answer: list[int] = []
        for _ in range(30):
            logits = np.array(target.model(mx.array([[*history, *answer]]))[0, -1])
            target._taps.take()
            row = adjusted(
                logits, history, answer, repetition=1.2, presence=0.4, frequency=0.3, bias=sampling.logit_bias
            )
            answer.append(int(row.argmax()))
        assert result.token_ids == answer
