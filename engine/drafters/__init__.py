"""Drafters: one file a method, each with its configuration, its modules and the drafter object."""
