"""Widgets: renderers of text and snapshots. They never talk to the engine."""
