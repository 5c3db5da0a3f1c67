"""dspark-tui: local chat in the terminal, made fast by speculative decoding.

Every part of the program passes through this module, so it holds the version and imports nothing.
"""

__version__ = "0.1.0"
