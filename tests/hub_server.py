"""A Hugging Face hub with one model, over HTTP on a port that the system chooses: what it is asked for is counted."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

MODEL, COMMIT = "org/model", "c0ffee" + 34 * "0"


@dataclass
class Hub:
    """`given` counts the bytes of each file that went out. With `ranges` False it answers with whole files only."""

    folder: Path
    ranges: bool = True
    address: str = ""
    given: dict[str, int] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """What leads a process here and nowhere else."""
        direct = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
        return {"HF_ENDPOINT": self.address, "HF_HUB_DISABLE_PROGRESS_BARS": "1", **direct}

    def names(self) -> list[str]:
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file())


@contextmanager
def hub_of(folder: Path, *, ranges: bool = True) -> Iterator[Hub]:
    hub = Hub(folder, ranges)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            path = self.path.partition("?")[0]
            hub.asked.append(f"{self.command} {path}")
            if re.fullmatch(rf"/api/models/{MODEL}(/revision/(main|{COMMIT}))?", path):
                siblings = [{"rfilename": name} for name in hub.names()]
                self._send(200, json.dumps({"id": MODEL, "sha": COMMIT, "siblings": siblings}).encode(), body)
            elif re.fullmatch(rf"/api/models/{MODEL}/tree/(main|{COMMIT})", path):
                self._send(200, json.dumps([self._entry(name) for name in hub.names()]).encode(), body)
            elif match := re.fullmatch(rf"/{MODEL}/resolve/(?:main|{COMMIT})/(.+)", path):
                self._file(match[1], body)
            else:
                self._send(404, b"{}", body)

        def _entry(self, name: str) -> dict[str, object]:
            oid = hashlib.sha1(name.encode()).hexdigest()
            return {"type": "file", "path": name, "size": (hub.folder / name).stat().st_size, "oid": oid}

        def _file(self, name: str, body: bool) -> None:
            path = hub.folder / name
            if not path.is_file():
                self._send(404, b"", body)
                return
            size = path.stat().st_size
            headers = {"ETag": f'"{hashlib.sha256(name.encode()).hexdigest()}"', "X-Repo-Commit": COMMIT}
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            status, begin, end = 200, 0, size
            if asked is not None and hub.ranges:
                status, begin, end = 206, int(asked[1]), min(int(asked[2] or size - 1) + 1, size)
                headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
            with path.open("rb") as file:
                file.seek(begin)
                self._send(status, file.read(end - begin) if body else b"", body, headers, name, end - begin)

        def _send(
            self,
            status: int,
            content: bytes,
            body: bool,
            headers: dict[str, str] | None = None,
            name: str = "",
            length: int | None = None,
        ) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content) if length is None else length))
            for key, value in (headers or {}).items():
                self.send_header(key, value)
            self.end_headers()
            if body:
                try:
                    self.wfile.write(content)
                except ConnectionError:  # whoever asked has seen enough
                    return
                hub.given[name] = hub.given.get(name, 0) + len(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
