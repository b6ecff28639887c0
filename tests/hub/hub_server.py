"""A loopback server that speaks the part of the Hugging Face API that a pull needs."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "a" * 40


class HubServer(ThreadingHTTPServer):
    """`files` by name; `cut_after` bytes of a transfer close the connection, `n_cuts` times."""

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = files
        self.cut_after, self.n_cuts = 0, 0
        self.wrong_digest = False
        self.requests: list[tuple[str, str, str | None]] = []   # method, path, Range
        self.stall = threading.Event()      # set: the cut becomes an endless wait

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def sha256(self, name: str) -> str:
        return "f" * 64 if self.wrong_digest else hashlib.sha256(self.files[name]).hexdigest()

    def gets(self) -> list[str | None]:
        """The Range headers of the GET requests for files."""
        return [r for method, path, r in self.requests if method == "GET" and "/resolve/" in path]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def log_message(self, *_: object) -> None: ...

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = self.path.split("?")[0]
        self.server.requests.append((self.command, path, self.headers.get("Range")))
        if path == "/api/models/Owner/Toy-GGUF":
            siblings = [{"rfilename": name, "size": len(data), "blobId": "0",
                         "lfs": {"sha256": self.server.sha256(name), "size": len(data),
                                 "pointerSize": 134}}
                        for name, data in self.server.files.items()]
            self._send(json.dumps({"id": "Owner/Toy-GGUF", "modelId": "Owner/Toy-GGUF",
                                   "sha": COMMIT, "siblings": siblings}).encode(), {})
        elif (prefix := f"/Owner/Toy-GGUF/resolve/{COMMIT}/") and path.startswith(prefix) \
                and path.removeprefix(prefix) in self.server.files:
            name = path.removeprefix(prefix)
            self._send(self.server.files[name], {
                "ETag": f'"{self.server.sha256(name)}"', "X-Repo-Commit": COMMIT,
                "X-Linked-Size": str(len(self.server.files[name])), "Accept-Ranges": "bytes"})
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _send(self, body: bytes, headers: dict[str, str]) -> None:
        total, begin = len(body), 0
        if (wanted := self.headers.get("Range")) and self.command == "GET":
            begin = int(wanted.removeprefix("bytes=").split("-")[0])
            body = body[begin:]
            headers["Content-Range"] = f"bytes {begin}-{total - 1}/{total}"
        self.send_response(206 if begin else 200)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if "ETag" in headers and self.server.n_cuts:
            self.server.n_cuts -= 1
            self.wfile.write(body[:self.server.cut_after])
            self.wfile.flush()
            if self.server.stall.is_set():
                threading.Event().wait(30)
            self.close_connection = True
            return
        self.wfile.write(body)


@contextmanager
def serving(files: dict[str, bytes]) -> Iterator[HubServer]:
    server = HubServer(files)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
