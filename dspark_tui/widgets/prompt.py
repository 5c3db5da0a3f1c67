"""The prompt: a small editor that sends on Enter and remembers what was sent."""

from __future__ import annotations

from textual import events
from textual.binding import Binding
from textual.message import Message
from textual.widgets import TextArea

from dspark_tui.actions import of_place
from dspark_tui.text.sanitize import sanitize


class Prompt(TextArea):
    """Posts `Sent`, `Eof`, `Follow` and `Page`; never loses text."""

    # Keys of the app are bound here too: a key that takes the way through the editor cannot overtake the
    # characters typed before it, and the editor's own meaning of it is replaced.
    BINDINGS = [
        *(
            Binding(",".join(action.keys), action.run, action.title, show=False, id=action.id)
            for action in (*of_place("prompt"), *of_place("app"))
            if action.keys and action.keys[0] != "enter"
        ),
        Binding("alt+b", "cursor_word_left", "Word left", show=False),
        Binding("alt+f", "cursor_word_right", "Word right", show=False),
        Binding("home,ctrl+a", "cursor_line_start", "Line start", show=False),
    ]

    class Sent(Message):
        """The user wants `text` answered."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    class Eof(Message):
        """ctrl+d on an empty prompt."""

    class Follow(Message):
        """End of the prompt reached again: follow the answer."""

    class Page(Message):
        """Scroll the transcript a page: -1 up, 1 down."""

        def __init__(self, direction: int) -> None:
            super().__init__()
            self.direction = direction

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(
            id=id,
            compact=True,
            highlight_cursor_line=False,
            placeholder="Ask something",
            tab_behavior="focus",
        )
        self.cursor_blink = False
        self._sent: list[str] = []
        self._sent_place = 0
        """Index in the history of what is shown; its length when it is a new prompt."""
        self._draft = ""

    # ------------------------------------------------------------------ text in and out

    def put(self, text: str) -> None:
        """Replace the content; undo brings the old one back."""
        self.replace(text, (0, 0), self.document.end)
        self.move_cursor(self.document.end)

    def put_before(self, text: str) -> None:
        """Put `text` before what is there."""
        self.put(f"{text}\n\n{self.text}" if self.text else text)

    def remember(self, text: str) -> None:
        """Make `text` the newest entry of the history."""
        if not self._sent or self._sent[-1] != text:
            self._sent.append(text)
        self._sent_place = len(self._sent)
        self._draft = ""

    def clear_prompt(self) -> None:
        """Empty the prompt; ↑ and undo bring the text back."""
        self.remember(self.text)
        self.put("")

    async def _on_paste(self, event: events.Paste) -> None:
        # Textual calls the handler of every class, so that the editor's own would insert the text once more.
        event.prevent_default()
        event.text = sanitize(event.text, keep_tabs=True)
        await super()._on_paste(event)

    # ------------------------------------------------------------------ keys

    async def _on_key(self, event: events.Key) -> None:
        if event.key == "enter":
            event.stop()
            event.prevent_default()
            self.action_send()
        else:
            await super()._on_key(event)

    def action_send(self) -> None:
        """Send, or make a new line after a backslash."""
        row, column = self.cursor_location
        if column and self.document[row][column - 1] == "\\" and self.selection.is_empty:
            self.replace("\n", (row, column - 1), (row, column))
            return
        text = self.text.strip("\n")
        if text.strip():
            self.remember(text)
            self.load_text("")
            self.post_message(self.Sent(text))

    def action_newline(self) -> None:
        """Break the line."""
        start, end = self.selection
        self._replace_via_keyboard("\n", start, end)

    def action_older(self) -> None:
        """Show the previous prompt."""
        if self._sent_place == 0:
            return
        if self._sent_place == len(self._sent):
            self._draft = self.text
        self._sent_place -= 1
        self.put(self._sent[self._sent_place])

    def action_newer(self) -> None:
        """Show the next prompt, at last what was being written."""
        if self._sent_place >= len(self._sent):
            return
        self._sent_place += 1
        self.put(self._draft if self._sent_place == len(self._sent) else self._sent[self._sent_place])

    def action_cursor_up(self, select: bool = False) -> None:
        """Up a row; on the first row the previous prompt."""
        if not select and self._row() == 0:
            self.action_older()
        else:
            super().action_cursor_up(select)

    def action_cursor_down(self, select: bool = False) -> None:
        """Down a row; on the last row the next prompt."""
        if not select and self._row() == self.wrapped_document.height - 1:
            self.action_newer()
        else:
            super().action_cursor_down(select)

    def _row(self) -> int:
        return self.wrapped_document.location_to_offset(self.cursor_location).y

    def action_delete_or_quit(self) -> None:
        """Delete to the right; leave when there is nothing."""
        if self.text:
            self.action_delete_right()
        else:
            self.post_message(self.Eof())

    def action_end_or_follow(self) -> None:
        """To the end of the line; when there already, follow the transcript."""
        if self.cursor_at_end_of_text:
            self.post_message(self.Follow())
        else:
            self.action_cursor_line_end()

    def action_cursor_page_up(self) -> None:
        """The page keys scroll the transcript."""
        self.post_message(self.Page(-1))

    def action_cursor_page_down(self) -> None:
        """The page keys scroll the transcript."""
        self.post_message(self.Page(1))
