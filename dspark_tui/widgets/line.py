"""Plain text on the screen: foreign text is never parsed as markup, unchanged text is never written again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from textual.app import RenderResult
from textual.content import Content
from textual.geometry import Region, Size
from textual.strip import Strip
from textual.visual import Visual
from textual.widget import Widget
from textual.widgets import Static

from dspark_tui.text.lines import Line, Span, Style

STYLES: dict[Style, str] = {
    "": "",
    "muted": "$foreground 75%",
    "strong": "bold",
    "accent": "$text-accent",
    "good": "$text-success",
    "warn": "$text-warning",
    "bad": "$text-error",
}


def content(spans: Sequence[Span]) -> Content:
    """Spans as Textual content; the text is taken as it is."""
    return Content.assemble(*((text, STYLES[style]) for text, style in spans))


def lines_content(lines: Sequence[Line]) -> Content:
    """Several lines."""
    return Content("\n").join([content(line) for line in lines])


class Plain(Static):
    """A Static that takes text literally."""

    def __init__(
        self, text: str | Content = "", *, id: str | None = None, classes: str | None = None
    ) -> None:
        super().__init__(text, id=id, classes=classes, markup=False)
        self._shown: str | Content = text

    def show(self, text: str | Content) -> None:
        """Replace the text, if it is another one."""
        if text != self._shown:
            self._shown = text
            self.update(text)


class InfoLine(Widget):
    """One row whose text is made for the present width by `draw(width)`; `refresh_line` looks anew."""

    DEFAULT_CSS = "InfoLine { height: 1; width: 1fr; }"

    def __init__(self, draw: Callable[[int], Line], *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._draw = draw
        self._shown: Line | None = None

    def refresh_line(self) -> None:
        """Write the row when its text changed."""
        if self.size.width and self._draw(self.size.width) != self._shown:
            self.refresh()

    def render(self) -> RenderResult:
        """The row for the present width."""
        self._shown = self._draw(self.size.width)
        return content(self._shown)


class Rows(Widget):
    """Rows of text made by `draw(width)`; `refresh_rows` writes only the rows that changed."""

    def __init__(self, draw: Callable[[int], list[Line]], *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._draw = draw
        self._shown: list[Line] = []

    def refresh_rows(self) -> None:
        """Look anew and write what changed."""
        width = self.size.width
        if not width:
            return
        before, self._shown = self._shown, self._draw(width)
        count = max(len(before), len(self._shown))
        padded = [before + [()] * (count - len(before)), self._shown + [()] * (count - len(self._shown))]
        changed = [row for row, (old, new) in enumerate(zip(*padded, strict=True)) if old != new]
        if changed:
            self.refresh(*(Region(0, row, width, 1) for row in changed))

    def notify_style_update(self) -> None:
        """The theme changed."""
        super().notify_style_update()
        self.refresh()

    def on_resize(self) -> None:
        """Another width makes other rows."""
        self._shown = self._draw(self.size.width) if self.size.width else []
        self.refresh()

    def render_line(self, y: int) -> Strip:
        """Row `y`."""
        width = self.size.width
        style = self.visual_style
        if y >= len(self._shown):
            return Strip.blank(width, style.rich_style)
        strips = Visual.to_strips(self, content(self._shown[y]), width, 1, style)
        return strips[0].adjust_cell_length(width, style.rich_style) if strips else Strip.blank(width)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """As many rows as there are."""
        return len(self._draw(width))
