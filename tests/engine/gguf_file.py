"""A tiny llama GGUF, and a reader of its own: NumPy on the bytes as the GGUF specification describes them.

Shares nothing with the product: the reader gives the golden that the conversion is held against.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

F32, Q4_1, Q8_0 = 0, 3, 8
U32, FLOAT, INT32, STRING, ARRAY = 4, 6, 5, 8, 9
ALIGNMENT = 32

TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"


def string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(kind: int, content: Any) -> bytes:
    if kind == STRING:
        return string(content)
    if kind == ARRAY:
        inner, items = content
        return struct.pack("<IQ", inner, len(items)) + b"".join(value(inner, item) for item in items)
    return struct.pack({U32: "<I", FLOAT: "<f", INT32: "<i"}[kind], content)


def tiny(seed: int = 0, layers: int = 2, hidden: int = 64, heads: int = 4, kv_heads: int = 2) -> bytes:
    """A file with the layout of the demo target: Q4_1 matrices, a Q8_0 embedding, F32 norms, a tied head."""
    rng = np.random.default_rng(seed)
    words = [chr(0x100 + i) if i < 33 else chr(i) for i in range(127)] + ["he", "ll"]
    words = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *dict.fromkeys(words)]
    meta: list[tuple[str, int, Any]] = [
        ("general.architecture", STRING, "llama"),
        ("llama.block_count", U32, layers),
        ("llama.embedding_length", U32, hidden),
        ("llama.feed_forward_length", U32, 96),
        ("llama.attention.head_count", U32, heads),
        ("llama.attention.head_count_kv", U32, kv_heads),
        ("llama.attention.layer_norm_rms_epsilon", FLOAT, 1e-5),
        ("llama.rope.dimension_count", U32, hidden // heads),
        ("llama.rope.freq_base", FLOAT, 100000.0),
        ("llama.context_length", U32, 512),
        ("llama.vocab_size", U32, len(words)),
        ("tokenizer.ggml.model", STRING, "gpt2"),
        ("tokenizer.ggml.pre", STRING, "smollm"),
        ("tokenizer.ggml.tokens", ARRAY, (STRING, words)),
        ("tokenizer.ggml.token_type", ARRAY, (INT32, [3, 3, 3] + [1] * (len(words) - 3))),
        ("tokenizer.ggml.merges", ARRAY, (STRING, ["h e", "l l"])),
        ("tokenizer.ggml.bos_token_id", U32, 1),
        ("tokenizer.ggml.eos_token_id", U32, 2),
        ("tokenizer.ggml.unknown_token_id", U32, 0),
        ("tokenizer.ggml.padding_token_id", U32, 2),
        ("tokenizer.chat_template", STRING, TEMPLATE),
    ]
    kv = kv_heads * (hidden // heads)
    tensors = {"token_embd.weight": (Q8_0, (len(words), hidden)), "output_norm.weight": (F32, (hidden,))}
    for i in range(layers):
        shapes = {
            "attn_norm": (F32, (hidden,)),
            "attn_q": (Q4_1, (hidden, hidden)),
            "attn_k": (Q4_1, (kv, hidden)),
            "attn_v": (Q4_1, (kv, hidden)),
            "attn_output": (Q4_1, (hidden, hidden)),
            "ffn_norm": (F32, (hidden,)),
            "ffn_gate": (Q4_1, (96, hidden)),
            "ffn_up": (Q4_1, (96, hidden)),
            "ffn_down": (Q4_1, (hidden, 96)),
        }
        tensors |= {f"blk.{i}.{name}.weight": shape for name, shape in shapes.items()}
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(meta))
    head += b"".join(
        string(key) + struct.pack("<I", kind) + value(kind, content) for key, kind, content in meta
    )
    body = b""
    for name, (kind, shape) in tensors.items():
        sizes = tuple(reversed(shape))
        head += string(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, len(body))
        body += blocks(rng, kind, int(np.prod(shape)))
        body += b"\0" * (-len(body) % ALIGNMENT)
    return head + b"\0" * (-len(head) % ALIGNMENT) + body


def blocks(rng: np.random.Generator, kind: int, count: int) -> bytes:
    if kind == F32:
        return rng.normal(1.0, 0.1, count).astype(np.float16).astype("<f4").tobytes()
    out = []
    for _ in range(count // 32):
        scale = np.float16(rng.uniform(0.01, 0.1)).tobytes()
        if kind == Q4_1:
            low = np.float16(rng.uniform(-1, 0)).tobytes()
            out.append(scale + low + rng.integers(0, 256, 16, dtype=np.uint8).tobytes())
        else:
            out.append(scale + rng.integers(-127, 128, 32, dtype=np.int8).tobytes())
    return b"".join(out)


def write(path: Path, **options: Any) -> Path:
    path.write_bytes(tiny(**options))
    return path


# ---------------------------------------------------------------------------- the independent reader


class Reader:
    """Metadata and float32 tensors of a GGUF v3 file."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0
        assert self.take(4) == b"GGUF"
        version, tensors, entries = struct.unpack("<IQQ", self.take(20))
        assert version == 3
        self.meta = {}
        for _ in range(entries):
            key = self.text()
            self.meta[key] = self.value(*struct.unpack("<I", self.take(4)))
        self.places = {}
        for _ in range(tensors):
            name = self.text()
            (rank,) = struct.unpack("<I", self.take(4))
            sizes = struct.unpack(f"<{rank}Q", self.take(8 * rank))
            kind, offset = struct.unpack("<IQ", self.take(12))
            self.places[name] = (kind, tuple(reversed(sizes)), offset)
        self.base = self.at + (-self.at % ALIGNMENT)

    def take(self, count: int) -> bytes:
        piece = self.data[self.at : self.at + count]
        self.at += count
        return piece

    def text(self) -> str:
        (length,) = struct.unpack("<Q", self.take(8))
        return self.take(length).decode()

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            inner, length = struct.unpack("<IQ", self.take(12))
            return [self.value(inner) for _ in range(length)]
        form = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}[
            kind
        ]
        return struct.unpack("<" + form, self.take(struct.calcsize("<" + form)))[0]

    def tensor(self, name: str) -> np.ndarray:
        kind, shape, offset = self.places[name]
        start, count = self.base + offset, int(np.prod(shape))
        if kind == F32:
            return np.frombuffer(self.data, "<f4", count, start).reshape(shape)
        size = {Q4_1: 20, Q8_0: 34}[kind]
        raw = np.frombuffer(self.data, np.uint8, count // 32 * size, start).reshape(-1, size)
        scale = raw[:, :2].copy().view("<f2").astype(np.float32)
        if kind == Q8_0:
            return (raw[:, 2:].copy().view(np.int8).astype(np.float32) * scale).reshape(shape)
        low = raw[:, 2:4].copy().view("<f2").astype(np.float32)
        packed = raw[:, 4:]
        quants = np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.float32)
        return (quants * scale + low).reshape(shape)


def half_split(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k as rotary halves: undoes the converter's reshape(heads, 2, half).swapaxes(1, 2)."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
