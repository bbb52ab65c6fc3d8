"""A hub on the loopback: as much of the Hugging Face hub's HTTP as a snapshot needs."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_MODEL = "/api/models/acme/tiny"
_FILES = f"/acme/tiny/resolve/{COMMIT}/"


class HubServer:
    """Serves one repository, `acme/tiny`, from a directory. `served` lists files sent."""

    def __init__(self, directory: Path) -> None:
        self.served: list[str] = []
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.directory, self._server.served = directory, self.served
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    directory: Path
    served: list[str]


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_HEAD(self) -> None:
        self._answer(self.path.partition("?")[0])

    def do_GET(self) -> None:
        self._answer(self.path.partition("?")[0])

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self, path: str) -> None:
        if path.startswith(f"{_MODEL}/tree/"):
            self._send(200, json.dumps(_tree(self.server.directory)).encode())
        elif path in (_MODEL, f"{_MODEL}/revision/{COMMIT}"):
            self._send(200, json.dumps(_info(self.server.directory)).encode())
        elif path.startswith(_FILES):
            self._file(self.server.directory / path.removeprefix(_FILES))
        else:
            self._send(*_refusal(path))

    def _file(self, path: Path) -> None:
        data = path.read_bytes()
        if self.command == "GET":
            self.server.served.append(path.name)
        digest = hashlib.sha256(data).hexdigest()
        self._send(200, data, **{"ETag": f'"{digest}"', "X-Repo-Commit": COMMIT})

    def _send(self, status: int, data: bytes, error: str = "", **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        if error:
            self.send_header("X-Error-Code", error)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)


def _refusal(path: str) -> tuple[int, bytes, str]:
    if "acme/gated" in path:
        return 403, b"", "GatedRepo"
    return 404, b"", "RevisionNotFound" if "acme/tiny" in path else "RepoNotFound"


def _info(directory: Path) -> dict[str, Any]:
    files = [{"rfilename": path.name, "size": path.stat().st_size} for path in _files(directory)]
    return {"id": "acme/tiny", "sha": COMMIT, "siblings": files, "tags": [], "private": False}


def _tree(directory: Path) -> list[dict[str, Any]]:
    return [
        {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": "0" * 40}
        for path in _files(directory)
    ]


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if path.is_file())
