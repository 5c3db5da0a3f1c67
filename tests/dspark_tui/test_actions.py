"""The registry of actions: no forbidden key, no clash, nothing that leads nowhere."""

from dspark_tui.actions import ACTIONS, NEVER_BOUND, Situation, commands, key_line, key_name
from dspark_tui.app import DsparkApp
from dspark_tui.screens.help import help_text
from dspark_tui.widgets.prompt import Prompt
from dspark_tui.widgets.transcript import Transcript

OWNERS = {"app": DsparkApp, "prompt": Prompt, "transcript": Transcript}


def test_ids_are_unique_and_everything_has_words() -> None:
    assert len({action.id for action in ACTIONS}) == len(ACTIONS)
    for action in ACTIONS:
        assert action.title
        assert action.help.endswith(".")
        assert action.keys or action.palette, f"{action.id} cannot be reached"


def test_no_key_is_forbidden_or_taken_twice() -> None:
    for place in OWNERS:
        taken: dict[str, str] = {}
        for action in ACTIONS:
            if action.place not in ("app", place):
                continue
            for key in action.keys:
                assert key not in NEVER_BOUND, f"{action.id} is on {key}"
                other = taken.setdefault(key, action.id)
                assert other == action.id, f"{key} means both {other} and {action.id}"


def test_every_action_leads_to_a_method() -> None:
    for action in ACTIONS:
        name = action.run.removeprefix("app.").partition("(")[0]
        owner = DsparkApp if action.run.startswith("app.") else OWNERS[action.place]
        assert hasattr(owner, f"action_{name}"), action.id


def test_every_app_key_works_in_the_prompt_too() -> None:
    bound = {binding.key for binding in Prompt.BINDINGS}  # type: ignore[union-attr]
    for action in ACTIONS:
        if action.place == "app" and action.keys:
            assert ",".join(action.keys) in bound


def test_the_key_line_shows_only_what_does_something() -> None:
    words = dict(key_line(Situation()))
    assert words["F1"] == "help"
    assert "F2" not in words
    assert "F4" not in words
    assert dict(key_line(Situation(model_loaded=True, exchanges=1)))["F2"] == "drafter"
    assert not {"engine.restart", "answer.stop"} & {action.id for action in commands(Situation())}
    assert "engine.restart" in {action.id for action in commands(Situation(engine_gone=True))}


def test_help_names_every_action() -> None:
    text = help_text(Situation(), 400).plain
    for action in ACTIONS:
        assert action.title in text
        assert action.help in text
    assert "New chat  (not now)" in text
    assert [key_name(key) for key in ("f1", "ctrl+underscore", "escape")] == ["F1", "ctrl+_", "esc"]
