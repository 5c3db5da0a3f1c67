"""The one registry of what a user can do.

Key bindings, the key line, the help screen and the command palette are all made from `ACTIONS`, so they
cannot drift apart. An action names a Textual action string; whether it does something now is decided from
a `Situation`. Nothing here imports textual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

Place: TypeAlias = Literal["app", "prompt", "transcript"]

NEVER_BOUND = frozenset(
    [
        "ctrl+b",
        "ctrl+s",
        "ctrl+h",
        "ctrl+i",
        "ctrl+m",
        "ctrl+left_square_bracket",
        "alt+enter",
        "ctrl+left",
        "ctrl+right",
        "ctrl+up",
        "ctrl+down",
        "ctrl+tab",
        "ctrl+comma",
        "ctrl+space",
        "ctrl+@",
        "f10",
        "f11",
        "f12",
    ]
) | {f"alt+{digit}" for digit in range(10)}
"""Keys that terminals, multiplexers or macOS keep for themselves or deliver as another key."""


@dataclass(frozen=True, slots=True)
class Situation:
    """What the actions need to know about the present moment."""

    answering: bool = False
    model_loaded: bool = False
    engine_gone: bool = False
    drafters: int = 0
    has_thinking: bool = False
    exchanges: int = 0


def _always(_: Situation) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Action:
    """One thing a user can do. `keys` are Textual key names, the first is the one that is shown.

    `footer` is the word in the key line (empty: not shown there). `palette` False keeps it out of the
    command palette: keys that only make sense as keys.
    """

    id: str
    title: str
    help: str
    keys: tuple[str, ...]
    run: str
    place: Place = "app"
    footer: str = ""
    palette: bool = True
    when: Callable[[Situation], bool] = _always


ACTIONS: tuple[Action, ...] = (
    Action(
        "help",
        "Help",
        "What the keys do here.",
        ("f1",),
        "app.help",
        footer="help",
    ),
    Action(
        "drafter.pick",
        "Choose the drafter",
        "All drafters of this model, with the reason when one cannot be used. The text stays.",
        ("f2",),
        "app.pick_drafter",
        footer="drafter",
        when=lambda now: now.model_loaded and not now.engine_gone,
    ),
    Action(
        "drafter.next",
        "Next drafter",
        "Switch to the next usable drafter at the next round, also in the middle of an answer.",
        ("ctrl+t",),
        "app.next_drafter",
        footer="next drafter",
        when=lambda now: now.drafters > 1 and not now.engine_gone,
    ),
    Action(
        "model.pick",
        "Choose the model",
        "Models on this machine, a folder, or a repository id.",
        ("f3",),
        "app.pick_model",
        footer="model",
        when=lambda now: not now.engine_gone,
    ),
    Action(
        "chat.new",
        "New chat",
        "Begin an empty conversation. The present one leaves the screen.",
        ("f4",),
        "app.new_chat",
        footer="new chat",
        when=lambda now: now.exchanges > 0,
    ),
    Action(
        "palette",
        "Commands",
        "Search all commands; (F5) marks those without a key.",
        ("f5",),
        "app.command_palette",
        footer="commands",
        palette=False,
    ),
    Action(
        "pane.next",
        "Next pane",
        "Move between the prompt and the transcript.",
        ("f6",),
        "app.next_pane",
        palette=False,
    ),
    Action(
        "metrics.cycle",
        "Metrics: full, strip, off",
        "Change how much of the speed is shown.",
        ("f7",),
        "app.cycle_metrics",
        footer="metrics",
    ),
    Action(
        "answer.stop",
        "Stop the answer",
        "Stop at the next round and keep the text.",
        (),
        "app.stop_answer",
        when=lambda now: now.answering,
    ),
    Action(
        "thinking.toggle",
        "Open or close thinking",
        "Show or fold what the model thought before its answers.",
        ("ctrl+o",),
        "app.toggle_thinking",
        when=lambda now: now.has_thinking,
    ),
    Action(
        "engine.restart",
        "Restart the engine",
        "Start the engine again and load the same model; the conversation goes on.",
        (),
        "app.restart_engine",
        when=lambda now: now.engine_gone,
    ),
    Action(
        "level.up",
        "One level up",
        "Close what is open, then go back to the prompt, then stop the answer. Deletes nothing.",
        ("escape",),
        "app.level_up",
        palette=False,
    ),
    Action(
        "interrupt",
        "Copy, stop, clear or quit",
        "Copies a selection; else stops an answer; else clears the prompt (↑ or ctrl+_ brings it back); else"
        " asks once more and quits.",
        ("ctrl+c",),
        "app.interrupt",
        palette=False,
    ),
    Action(
        "repaint",
        "Repaint the screen",
        "Draw everything again, when something else wrote on the terminal.",
        ("ctrl+l",),
        "app.repaint",
    ),
    Action(
        "suspend",
        "Suspend to the shell",
        "Come back with fg.",
        ("ctrl+z",),
        "app.suspend_process",
    ),
    Action(
        "quit",
        "Quit",
        "Ends the program; asks once more while an answer runs.",
        ("ctrl+q",),
        "app.ask_quit",
    ),
    Action(
        "prompt.send",
        "Send the prompt",
        "While an answer runs or the model loads, the prompt waits in a queue and is sent afterwards.",
        ("enter",),
        "send",
        place="prompt",
        palette=False,
    ),
    Action(
        "prompt.newline",
        "New line in the prompt",
        "Also \\ and Enter, and shift+enter where the terminal sends it.",
        ("ctrl+j", "shift+enter"),
        "newline",
        place="prompt",
        footer="newline",
        palette=False,
    ),
    Action(
        "prompt.older",
        "Previous prompt",
        "Also ↑ on the first line.",
        ("ctrl+p",),
        "older",
        place="prompt",
        palette=False,
    ),
    Action(
        "prompt.newer",
        "Next prompt",
        "Also ↓ on the last line.",
        ("ctrl+n",),
        "newer",
        place="prompt",
        palette=False,
    ),
    Action(
        "prompt.undo",
        "Undo in the prompt",
        "Also brings back a prompt that ctrl+c cleared.",
        ("ctrl+underscore",),
        "undo",
        place="prompt",
        palette=False,
    ),
    Action(
        "prompt.eof",
        "Delete right, or quit when empty",
        "With an empty prompt it asks once more and quits.",
        ("ctrl+d",),
        "delete_or_quit",
        place="prompt",
        palette=False,
    ),
    Action(
        "prompt.end",
        "End of the line, or follow again",
        "At the end of the prompt it follows the answer again.",
        ("ctrl+e", "end"),
        "end_or_follow",
        place="prompt",
        palette=False,
    ),
    Action(
        "scroll.up",
        "Scroll up",
        "The prompt keeps the focus.",
        ("pageup",),
        "app.scroll_transcript(-1)",
        palette=False,
    ),
    Action(
        "scroll.down",
        "Scroll down",
        "At the end the answer is followed again.",
        ("pagedown",),
        "app.scroll_transcript(1)",
        palette=False,
    ),
    Action(
        "transcript.down",
        "Line down",
        "In the transcript.",
        ("j",),
        "scroll_down",
        place="transcript",
        palette=False,
    ),
    Action(
        "transcript.up",
        "Line up",
        "In the transcript.",
        ("k",),
        "scroll_up",
        place="transcript",
        palette=False,
    ),
    Action(
        "transcript.top",
        "First message",
        "In the transcript.",
        ("g",),
        "scroll_home",
        place="transcript",
        palette=False,
    ),
    Action(
        "transcript.end",
        "Follow again",
        "In the transcript.",
        ("G", "end"),
        "follow",
        place="transcript",
        palette=False,
    ),
)

BY_ID = {action.id: action for action in ACTIONS}

_KEY_NAMES = {
    "ctrl+underscore": "ctrl+_",
    "escape": "esc",
    "pageup": "PageUp",
    "pagedown": "PageDown",
    "enter": "Enter",
    "end": "End",
}


def key_name(key: str) -> str:
    """A key as people write it: `F1`, `ctrl+_`, `esc`."""
    if key in _KEY_NAMES:
        return _KEY_NAMES[key]
    return key.upper() if key[0] == "f" and key[1:].isdigit() else key


def short_key(key: str) -> str:
    """A key for the key line: `^t` instead of `ctrl+t`."""
    return key_name(key).replace("ctrl+", "^")


def of_place(place: Place) -> Iterator[Action]:
    """The actions that belong to one place, in order."""
    return (action for action in ACTIONS if action.place == place)


def key_line(now: Situation) -> list[tuple[str, str]]:
    """Key and word of every action that the key line shows and that does something now."""
    return [
        (short_key(action.keys[0]), action.footer)
        for action in ACTIONS
        if action.footer and action.keys and action.when(now)
    ]


def commands(now: Situation) -> list[Action]:
    """What the command palette offers now."""
    return [action for action in ACTIONS if action.palette and action.when(now)]
