"""Reading the names that a shared library exports (64-bit little-endian ELF, as on x86-64 and arm64)."""

from __future__ import annotations

import struct
from pathlib import Path

_DYNSYM = 11
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")


def defined_symbols(library: Path) -> list[str]:
    """Names of all dynamic symbols that `library` defines, in the file's order.

    Raises OSError when the file cannot be read and ValueError when it is not such a library.
    """
    data = library.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"{library} is not a 64-bit little-endian ELF file.")
    try:
        (offset,) = struct.unpack_from("<Q", data, 40)
        size, count = struct.unpack_from("<HH", data, 58)
        sections = [_SECTION.unpack_from(data, offset + size * index) for index in range(count)]
        table = next(section for section in sections if section[1] == _DYNSYM)
        names = sections[table[6]][4]
        found = []
        for place in range(table[4], table[4] + table[5], _SYMBOL.size):
            name, _, _, section_index, _, _ = _SYMBOL.unpack_from(data, place)
            if section_index and name:
                start = names + name
                found.append(data[start : data.index(b"\0", start)].decode())
        return found
    except (struct.error, StopIteration, IndexError) as error:
        raise ValueError(f"{library} has no table of dynamic symbols.") from error
