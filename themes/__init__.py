"""Themes: one TOML file each, and the loader."""
