"""A prompt and its answer in the transcript: finished blocks as Markdown, the open tail as plain text."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widget import Widget

from dspark_tui.conversation import Answer, AnswerState, Exchange
from dspark_tui.text.format import count, plural, seconds
from dspark_tui.text.lines import Line, Span, justify
from dspark_tui.text.sanitize import Sanitizer, one_line, sanitize
from dspark_tui.text.splitter import Block, Splitter
from dspark_tui.widgets.line import InfoLine, Plain, lines_content


class ExchangeView(Vertical):
    """Shows an `Exchange`. `flush` brings new text on the screen; nothing is drawn before it is called."""

    def __init__(self, exchange: Exchange, *, thinking_open: bool = False) -> None:
        super().__init__()
        self.exchange = exchange
        self.rich = True
        """Whether the answer is live Markdown (False: folded into one widget)."""
        self._thinking_open = thinking_open
        self._taken = 0
        self._thoughts_taken = 0
        self._thought_parts: list[str] = []
        self._thought_words = 0
        self._sanitizer = Sanitizer()
        self._thought_sanitizer = Sanitizer()
        self._splitter = Splitter()
        self._blocks: list[Block] = []
        self._ended = False
        self._known = (exchange.answer.state, len(exchange.answer.marks))
        self._header = InfoLine(self._header_line, id="header")
        self._thinking = Plain(classes="thinking")
        self._tail = Plain(classes="tail")
        self._foot = Plain(classes="foot")

    def compose(self) -> ComposeResult:
        """The parts, top to bottom."""
        yield Plain("you", classes="who")
        yield Plain(sanitize(self.exchange.prompt), classes="prompt")
        yield self._header
        yield self._thinking
        yield self._tail
        yield self._foot

    def on_mount(self) -> None:
        """Show what is known already."""
        self.refresh_facts()

    # ------------------------------------------------------------------ text

    @property
    def stale(self) -> bool:
        """Whether `flush` has something to do."""
        answer = self.exchange.answer
        return (
            self._taken < len(answer.pieces)
            or self._thoughts_taken < len(answer.thoughts)
            or self._known != (answer.state, len(answer.marks))
        )

    async def flush(self) -> None:
        """Show the pieces that came since the last call; at the end of the answer, its final form."""
        answer = self.exchange.answer
        known = (answer.state, len(answer.marks))
        if known != self._known:
            self._known = known
            self.refresh_facts()
        self._take_thoughts(answer)
        pieces = answer.pieces[self._taken :]
        self._taken += len(pieces)
        closed = self._splitter.feed(self._sanitizer.feed("".join(pieces))) if pieces else []
        if answer.state.over and not self._ended:
            self._ended = True
            closed += self._splitter.finish()
            await self._finish(closed)
            return
        if not pieces:
            return
        await self._mount_blocks(closed)
        self._show_tail()

    def _show_tail(self) -> None:
        """The open tail as plain text; inside a fence already on the ground that code will have."""
        tail = self._splitter.tail.strip("\n")
        is_code = self._splitter.open_fence
        self._tail.set_class(is_code, "-code")
        self._tail.show(tail.partition("\n")[2] if is_code else tail)
        self._tail.display = bool(tail.strip())

    async def _mount_blocks(self, blocks: list[Block]) -> None:
        self._blocks += blocks
        visible = [block for block in blocks if block.text.strip()]
        if visible:
            from dspark_tui.widgets.markdown import AnswerMarkdown

            await self.mount_all([AnswerMarkdown(block) for block in visible], before=self._tail)

    async def _finish(self, closed: list[Block]) -> None:
        """Mount the last blocks; when the pieces look unlike the whole, put the whole in their place."""
        from dspark_tui.widgets.markdown import AnswerMarkdown, same_picture

        self._tail.display = False
        text = "".join(block.text for block in [*self._blocks, *closed])
        if same_picture([*self._blocks, *closed], text):
            await self._mount_blocks(closed)
        else:
            self._blocks = [Block(text)]
            old = list(self.query(AnswerMarkdown))
            await self.mount(AnswerMarkdown(self._blocks[0]), before=self._tail)
            for widget in old:
                await widget.remove()
        self.refresh_facts()

    def _take_thoughts(self, answer: Answer) -> None:
        pieces = answer.thoughts[self._thoughts_taken :]
        if not pieces and not answer.thoughts:
            return
        self._thoughts_taken += len(pieces)
        if pieces:
            self._thought_parts.append(self._thought_sanitizer.feed("".join(pieces)))
            self._thought_words += sum(len(piece.split()) for piece in pieces)
        self._show_thinking()

    # ------------------------------------------------------------------ facts

    def refresh_facts(self) -> None:
        """Show the header, the fold and the marks as they stand."""
        self._header.refresh_line()
        marks = self._marks()
        self._foot.show(lines_content(marks))
        self._foot.display = bool(marks)
        self._show_thinking()
        self.set_class(not (self.exchange.answer.pieces or self.exchange.answer.thoughts or marks), "-empty")
        if not self._splitter.tail.strip():
            self._tail.display = False

    def open_thinking(self, is_open: bool) -> None:
        """Unfold or fold the thinking."""
        self._thinking_open = is_open
        self._show_thinking()

    def _show_thinking(self) -> None:
        answer = self.exchange.answer
        self._thinking.display = bool(answer.thoughts)
        if not answer.thoughts:
            return
        sign = "▾" if self._thinking_open else "▸"
        how_long = "…" if answer.thinking_seconds is None else f" for {seconds(answer.thinking_seconds)}"
        verb = "thinking" if answer.thinking_seconds is None else "thought"
        hint = "closes" if self._thinking_open else "opens"
        text = f"{sign} {verb}{how_long}, {plural(self._thought_words, 'word')}  (ctrl+o {hint})"
        if self._thinking_open:
            text += "\n" + "".join(self._thought_parts).strip("\n")
        self._thinking.show(text)

    def _header_line(self, width: int) -> Line:
        answer = self.exchange.answer
        if answer.state is AnswerState.WAITING:
            return (("waiting", "muted"),)
        names = " → ".join(one_line(name) for name in answer.drafters)
        left: list[Span] = [(names, "accent"), (" · ", "muted"), (one_line(answer.model), "muted")]
        right: list[Span] = []
        result = answer.result
        if result is not None:
            total = result.seconds.first_token + result.seconds.decode
            right = [(f"{count(result.generated_tokens)} tok · {seconds(total)}", "muted")]
        return justify(left, right, width)

    def _marks(self) -> list[Line]:
        answer = self.exchange.answer
        marks: list[Line] = [(("⇄ ", "accent"), (one_line(mark), "muted")) for mark in answer.marks]
        result = answer.result
        generated = result.generated_tokens if result is not None else None
        match answer.state:
            case AnswerState.STOPPED:
                marks.append(
                    (("■ ", "warn"), (f"stopped after {_tokens(generated)}; the text is kept", "muted"))
                )
            case AnswerState.LENGTH:
                words = f"cut at {_tokens(generated)}: the context is full; F4 begins a new chat"
                marks.append((("■ ", "warn"), (words, "muted")))
            case AnswerState.FAILED:
                after = f" after {_tokens(generated)}" if generated else ""
                marks.append((("✗ ", "bad"), (f"failed{after}: {one_line(answer.failure)}", "bad")))
        if answer.state.over and not answer.text and answer.state is not AnswerState.DONE:
            marks.append(
                (("  ", ""), ("There is no text, so the model will not see this prompt again.", "muted"))
            )
        return marks

    # ------------------------------------------------------------------ window

    async def fold(self) -> None:
        """Replace the live Markdown by one cheap widget."""
        if not self.rich or not self._ended:
            return
        from dspark_tui.widgets.markdown import AnswerMarkdown, folded

        self.rich = False
        old: list[Widget] = list(self.query(AnswerMarkdown))
        if old:
            await self.mount(folded("".join(block.text for block in self._blocks)), before=self._tail)
            for widget in old:
                await widget.remove()


def _tokens(number: int | None) -> str:
    return (
        "an unknown number of tokens"
        if number is None
        else f"{count(number)} token{'' if number == 1 else 's'}"
    )
