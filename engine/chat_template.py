"""From a conversation to the tokens of a prompt, by the template that the model's maker wrote.

What a template knows (a switch for thinking, levels of effort) is read from its source, never guessed from
the model's name. Text that a user typed stays text, also where it looks like one of the model's special
tokens.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jinja2 import Environment, TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from dspark_tui.engine.protocol import Message
from dspark_tui.engine.thinking import Markup, find_markup

_SWITCHES = ("enable_thinking", "thinking")
"""Variables that turn thinking on and off: Qwen, GLM, Gemma 4; DeepSeek, Granite."""
_EFFORT = "reasoning_effort"
_LEVELS = ("low", "medium", "high")
"""What a template that only prints the effort is trained on (OpenAI, harmony)."""


class TemplateError(Exception):
    """A prompt that cannot be made; the text is a sentence's end for the user."""


@dataclass(frozen=True)
class Prompt:
    """`tokens` of a prompt; `thinking` says that the template has begun the thinking at its end."""

    tokens: list[int]
    thinking: bool


class _Generation(Extension):
    """Hugging Face's block around what the model says: nothing but its body matters here."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The body alone."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Source:
    """What a template's source says about itself."""

    def __init__(self, source: str) -> None:
        try:
            reader = Environment(extensions=["jinja2.ext.loopcontrols", _Generation])
            # Looking for the variables changes the tree that is looked through.
            self.variables = meta.find_undeclared_variables(reader.parse(source))
            self._tree = reader.parse(source)
        except TemplateSyntaxError:  # it will say so itself when it is used
            self.variables = set()

    def values(self, variable: str) -> list[str]:
        """The strings that `variable` is compared with or set to, in order of appearance."""
        found: list[str] = []
        for node in self._tree.find_all((nodes.Compare, nodes.Assign)):
            if isinstance(node, nodes.Assign):
                parts: list[nodes.Node] = [node.target, node.node]
            else:
                assert isinstance(node, nodes.Compare)
                parts = [node.expr, *(operand.expr for operand in node.ops)]
            if any(_root_name(part) == variable for part in parts):
                constants = [c for part in parts for c in (part, *part.find_all(nodes.Const))]
                found += [
                    c.value for c in constants if isinstance(c, nodes.Const) and isinstance(c.value, str)
                ]
        return list(dict.fromkeys(value for value in found if value))

    def prints(self, variable: str) -> bool:
        """Whether `variable` itself appears in the prompt."""
        return any(
            name.name == variable for output in self._tree.find_all(nodes.Output) for name in _printed(output)
        )


def _root_name(node: nodes.Node | None) -> str | None:
    """The variable that `node` is, filters aside."""
    while isinstance(node, nodes.Filter):
        node = node.node
    return node.name if isinstance(node, nodes.Name) else None


def _printed(node: nodes.Node) -> list[nodes.Name]:
    """Names whose value is part of what `node` prints: not those of conditions."""
    if isinstance(node, nodes.Name):
        return [node]
    if isinstance(node, nodes.CondExpr):
        below: list[nodes.Node] = [part for part in (node.expr1, node.expr2) if part is not None]
    elif isinstance(node, nodes.Compare | nodes.Test):
        below = []
    else:
        below = list(node.iter_child_nodes())
    return [name for part in below for name in _printed(part)]


class ChatTemplate:
    """The template of one tokenizer (mlx-lm's wrapper)."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        text = _text(tokenizer)
        self.markup: Markup | None = find_markup(tokenizer, text)
        self._switch: str | None = None
        self.efforts: list[str] = []
        """Levels of effort that may be asked for."""
        if text is not None:
            source = _Source(text)
            self._switch = next((name for name in _SWITCHES if name in source.variables), None)
            if _EFFORT in source.variables:
                self.efforts = _in_order(source.values(_EFFORT), source.prints(_EFFORT))
        else:
            self._switch = next((name for name in _SWITCHES if name in _parameters(tokenizer)), None)
        mentioned = text is None or any(mark.strip() in text for mark in _stems(self.markup))
        self.thinks = self.markup is not None and (self._switch is not None or mentioned)
        """Whether its answers may have a thinking part."""
        self._special = _special(tokenizer, text or "", self.markup)

    def problem(self, thinking: bool | None, effort: str | None) -> str | None:
        """Why these wishes cannot be honoured, as the end of a sentence, or None when they can."""
        if thinking and not self.thinks:
            return "does not think; leave thinking out"
        if thinking is False and self.thinks and self._switch is None:
            return "always thinks: its chat template has no switch for it"
        if effort is not None and effort not in self.efforts:
            if not self.efforts:
                return "knows no levels of effort; leave the effort out"
            return f"knows the levels of effort {', '.join(self.efforts)}, not {effort[:40]!r}"
        return None

    def render(
        self, messages: Sequence[Message], thinking: bool | None = None, effort: str | None = None
    ) -> Prompt:
        """The prompt for an answer to `messages`. Raises TemplateError when the template refuses them."""
        wishes: dict[str, Any] = {}
        if thinking is not None and self._switch is not None:
            wishes[self._switch] = thinking
        if effort is not None:
            wishes[_EFFORT] = effort
        try:
            return self._render([{"role": m.role, "content": m.content} for m in messages], wishes)
        except Exception as error:  # a template is a program of the model's maker
            raise TemplateError(" ".join(str(error).split())[:300] or type(error).__name__) from error

    def _render(self, messages: list[dict[str, str]], wishes: dict[str, Any]) -> Prompt:
        if _text(self._tokenizer) is None:
            tokens = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, **wishes)
            ending = self._tokenizer.decode(tokens[-16:])
            return Prompt(list(tokens), self._opens(ending))
        marked, hidden = self._hide(messages)
        # The wrapper's own method would turn thinking on where nobody said so.
        text: str = self._tokenizer._tokenizer.apply_chat_template(
            marked, add_generation_prompt=True, tokenize=False, **wishes
        )
        tokens = self._encode(text)
        if hidden and (kept := self._keep_text(text, hidden)) is not None:
            tokens = kept
        elif hidden:
            tokens = self._encode(_revealed(text, hidden))
        return Prompt(tokens, self._opens(text))

    def _opens(self, ending: str) -> bool:
        return self.markup is not None and ending.rstrip().endswith(
            tuple(m.rstrip() for m in self.markup.starts)
        )

    def _encode(self, text: str) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False) if text else []
        return tokens

    # ------------------------------------------------------------------ text that looks like special tokens

    def _hide(self, messages: list[dict[str, str]]) -> tuple[list[dict[str, str]], dict[str, str]]:
        """`messages` with a stand-in for every special token's text in what people wrote, and what each
        stand-in stands for. Answers stay as they are: the model wrote them."""
        if self._special is None:
            return messages, {}
        everything = "".join(message["content"] for message in messages)
        if not self._special.search(everything):
            return messages, {}
        spare = (chr(code) for code in range(0xE000, 0xF8FF) if chr(code) not in everything)
        hidden: dict[str, str] = {}

        def stand_in(found: re.Match[str]) -> str:
            sign = known.get(found.group())
            if sign is None:
                sign = known[found.group()] = next(spare)
                hidden[sign] = found.group()
            return sign

        known: dict[str, str] = {}
        special = self._special
        marked = [
            m if m["role"] == "assistant" else {**m, "content": special.sub(stand_in, m["content"])}
            for m in messages
        ]
        return marked, hidden

    def _keep_text(self, text: str, hidden: dict[str, str]) -> list[int] | None:
        """Tokens of `text` in which the stand-ins are spelled out as ordinary text, or None when this
        tokenizer cannot do it without changing what the text says."""
        tokens: list[int] = []
        for part in re.split(f"([{''.join(hidden)}])", text):
            if part in hidden:
                # Neither half is a special token.
                tokens += self._encode(hidden[part][:1]) + self._encode(hidden[part][1:])
            else:
                tokens += self._encode(part)
        decoded = self._tokenizer.decode(
            tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        whole = _revealed(text, hidden)
        usual = self._tokenizer.decode(
            self._encode(whole), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return tokens if decoded == usual else None


@lru_cache(maxsize=1)
def chat_template(tokenizer: Any) -> ChatTemplate:
    """The template of `tokenizer`, read once."""
    return ChatTemplate(tokenizer)


def _revealed(text: str, hidden: dict[str, str]) -> str:
    for sign, special in hidden.items():
        text = text.replace(sign, special)
    return text


def _text(tokenizer: Any) -> str | None:
    """The source of the template; None when a program of mlx-lm's stands in for it."""
    if tokenizer._chat_template is not None:
        return None
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    return template if isinstance(template, str) else None


def _parameters(tokenizer: Any) -> set[str]:
    program = tokenizer._chat_template or tokenizer._tokenizer.apply_chat_template
    try:
        return set(inspect.signature(program).parameters)
    except (TypeError, ValueError):
        return set()


def _in_order(values: list[str], printed: bool) -> list[str]:
    """Levels from a template's source; one that only prints the value takes the usual ones."""
    usual = [level for level in _LEVELS if printed or level in values]
    return [*usual, *(value for value in values if value not in usual)]


def _stems(markup: Markup | None) -> list[str]:
    return [] if markup is None else [*markup.markers]


def _special(tokenizer: Any, source: str, markup: Markup | None) -> re.Pattern[str] | None:
    """Matches the text of tokens that mean something to the model: those flagged special, and further
    added ones that the template or the thinking is made of (not, say, a vocabulary's whole HTML)."""
    added = tokenizer.added_tokens_decoder.values()
    signs = {
        token.content
        for token in added
        if token.special or token.content in source or (markup and token.content in markup.markers)
    }
    known = sorted((sign for sign in signs if len(sign) > 1 and sign.strip()), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, known))) if known else None
