"""Print the exact versions of everything that is installed here, as a pip constraints file.

Run it with the Python of an environment that holds the project and its `dev` extra (`make lock` does).
"""

from __future__ import annotations

import re
from importlib.metadata import distributions

_NOT_LOCKED = {"dspark-tui", "pip", "setuptools", "wheel"}
_BACKENDS = ("mlx-cpu", "mlx-metal", "mlx-cuda-12", "mlx-cuda-13")
"""Parts of MLX that other systems install; they carry MLX's own version."""

HEADER = """\
# Exact versions for `make demo` and `make test`, on every platform. Written by `make lock`.
"""


def lines() -> list[str]:
    """`name==version`, sorted by name."""
    versions = {}
    for distribution in distributions():
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"]).lower()
        if name not in _NOT_LOCKED:
            versions[name] = distribution.version
    for backend in _BACKENDS:
        versions[backend] = versions["mlx"]
    return [f"{name}=={version}" for name, version in sorted(versions.items())]


def main() -> None:
    """Write the file to standard output."""
    print(HEADER + "\n".join(lines()))


if __name__ == "__main__":
    main()
