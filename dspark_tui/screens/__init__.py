"""Screens: the chat and what opens over it."""
