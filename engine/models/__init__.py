"""Finding, fetching and describing models; loading them is `target`'s work."""
