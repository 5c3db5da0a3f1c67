"""Files of saved contexts: one a chat and model, written whole or not at all, within a size cap.

A file is safetensors. Its arrays and facts are covered by a SHA-256, because a damaged number in a cache
would not crash: it would give wrong text.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from dspark_tui.engine.models.folder import weight_files, whole
from dspark_tui.engine.paths import cache_dir

CAP_VARIABLE = "DSPARK_TUI_CONTEXT_CAP"
CAP_BYTES = 20_000_000_000
"""All files together. 32,768 tokens of an 8B model with grouped keys take about 5 GB in 16 bits: the cap
holds four such chats, or some dozens of usual length."""

FORMAT = 1
_ENTRY = "dspark_tui"
_SUFFIX, _UNFINISHED = ".safetensors", ".part"
_STALE_SECONDS = 3600.0


class NothingKept(Exception):
    """No usable file; the text is the reason, without a full stop."""


class CannotKeep(Exception):
    """A context that is not written; the text is one sentence for the user."""


@dataclass(frozen=True)
class Key:
    """What a saved context belongs to; every part is compared when it is read."""

    model: str
    """Hash of config.json and of the weight files' headers (`model_hash`)."""
    template: str
    """Hash of the chat template."""
    numbers: str
    """How the cache's numbers are made: precision, bits of keys and values, version of the cache classes."""


def model_hash(folder: Path) -> str:
    """Says which model this is without reading its weights: config.json, and of every weight file its name,
    size and safetensors header. Raises OSError."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in weight_files(folder):
        digest.update(f"\n{path.name} {path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            length = file.read(8)
            digest.update(length + file.read(min(int.from_bytes(length, "little"), 100_000_000)))
    return digest.hexdigest()


def text_hash(text: str) -> str:
    """SHA-256 of a text, lone surrogates included."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def cap_bytes() -> int:
    """The size cap: the environment's, if it is a whole number from 0, else `CAP_BYTES`."""
    text = os.environ.get(CAP_VARIABLE, "").strip()
    return int(text) if text.isascii() and text.isdecimal() else CAP_BYTES


class ContextStore:
    """Saved contexts in `folder` (the user's cache folder when None), `cap` bytes at most."""

    def __init__(self, folder: Path | None = None, cap: int | None = None) -> None:
        self.folder = cache_dir() / "contexts" if folder is None else folder
        self.cap = cap_bytes() if cap is None else cap

    def path(self, chat: str, key: Key) -> Path:
        """Where the context of `chat` is kept. Names of chats are hashed: they may hold anything."""
        return self.folder / f"{text_hash(chat)[:32]}-{key.model[:16]}{_SUFFIX}"

    # ------------------------------------------------------------------ writing

    def save(self, chat: str, key: Key, arrays: dict[str, mx.array], facts: dict[str, Any]) -> int:
        """Write the context of `chat`, in place of the one before; the longest unused go when the cap is
        passed. `facts` is anything JSON takes. Returns the file's bytes. Raises `CannotKeep`."""
        size = sum(array.nbytes for array in arrays.values())
        if size > self.cap:
            raise CannotKeep(
                f"The context takes {_gigabytes(size)} and saved contexts may take {_gigabytes(self.cap)}: "
                f"set {CAP_VARIABLE} to more bytes."
            )
        arrays = {name: mx.contiguous(array) for name, array in arrays.items()}
        entry = {"format": FORMAT, "model": key.model, "template": key.template, "numbers": key.numbers}
        text = json.dumps({**entry, "facts": facts}, sort_keys=True)
        metadata = {_ENTRY: text, "sha256": _digest(text, arrays)}
        target = self.path(chat, key)
        try:
            self._make_folder()
            handle, name = tempfile.mkstemp(_SUFFIX + _UNFINISHED, target.stem, self.folder)
            with os.fdopen(handle, "wb") as file:
                try:
                    mx.save_safetensors(file, arrays, metadata)
                    file.flush()
                    os.fsync(file.fileno())
                    written = file.tell()
                    Path(name).replace(target)
                except BaseException:
                    Path(name).unlink(missing_ok=True)
                    raise
        except (OSError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or " ".join(str(error).split())
            raise CannotKeep(f"The context could not be saved in {self.folder}: {reason}.") from error
        self.tidy(keep=target)
        return written

    def _make_folder(self) -> None:
        self.folder.mkdir(parents=True, mode=0o700, exist_ok=True)
        self.folder.chmod(0o700)

    def tidy(self, keep: Path | None = None) -> None:
        """Remove the longest unused files until the cap holds (never `keep`), and what broke off in the
        writing an hour ago or more."""
        kept: list[tuple[float, int, Path]] = []
        with contextlib.suppress(OSError):
            for path in self.folder.iterdir():
                with contextlib.suppress(OSError):
                    facts = path.stat()
                    if path.suffix == _SUFFIX:
                        kept.append((facts.st_mtime, facts.st_size, path))
                    elif path.suffix == _UNFINISHED and facts.st_mtime < time.time() - _STALE_SECONDS:
                        path.unlink()
        total = sum(size for _, size, _ in kept)
        for _, size, path in sorted(kept):
            if total <= self.cap:
                return
            if path != keep:
                with contextlib.suppress(OSError):
                    path.unlink()
                    total -= size

    # ------------------------------------------------------------------ reading

    def load(self, chat: str, key: Key) -> tuple[dict[str, mx.array], dict[str, Any]]:
        """The arrays (evaluated) and facts that were saved. Raises `NothingKept`."""
        path = self.path(chat, key)
        try:
            if not path.is_file():
                raise NothingKept("nothing is kept for this chat and model")
            if not whole(path):
                raise NothingKept("the saved context is incomplete or damaged")
            arrays, metadata = _read(path)
            entry = json.loads(metadata[_ENTRY])
            made = Key(entry["model"], entry["template"], entry["numbers"])
            written, facts = entry["format"], entry["facts"]
        except NothingKept:
            raise
        except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
            raise NothingKept("the saved context is damaged or of another program") from error
        if written != FORMAT or not isinstance(facts, dict):
            raise NothingKept("the saved context is of another version of this program")
        if reason := _difference(made, key):
            raise NothingKept(reason)
        try:
            intact = _digest(metadata[_ENTRY], arrays) == metadata.get("sha256")
        except (RuntimeError, ValueError) as error:
            raise NothingKept("the saved context cannot be read") from error
        if not intact:
            raise NothingKept("the saved context is damaged: its checksum does not fit")
        with contextlib.suppress(OSError):
            os.utime(path)  # used now: others go before it
        return arrays, facts


def _read(path: Path) -> tuple[dict[str, mx.array], dict[str, str]]:
    loaded: Any = mx.load(str(path), return_metadata=True)
    arrays, metadata = loaded
    return arrays, metadata


def _difference(made: Key, wanted: Key) -> str | None:
    if made.model != wanted.model:
        return "the context was saved with another model"
    if made.template != wanted.template:
        return "the model's chat template has changed since the context was saved"
    if made.numbers != wanted.numbers:
        return f"the context was saved with other numbers ({made.numbers}; these are {wanted.numbers})"
    return None


def _digest(text: str, arrays: dict[str, mx.array]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"\n{name} {array.dtype} {array.shape}\n".encode())
        if array.size:
            # Raw bytes: there is no NumPy type for bfloat16.
            flat = array if array.ndim else array.reshape(1)
            raw: Any = flat.view(mx.uint8)
            digest.update(memoryview(raw).cast("B"))
    return digest.hexdigest()


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 10**8 else f"{size / 1e6:.1f} MB"
