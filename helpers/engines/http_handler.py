"""What the course's own small HTTP servers share: JSON in and out, answers as server-sent events, threads on the loopback."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from helpers.engines.server_process import HOST


class JsonHandler(BaseHTTPRequestHandler):
    """Base of a server's handler class; nothing is logged."""

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""

    def body(self) -> dict[str, Any] | None:
        """The request's JSON object; None where it is none, and then status 400 has been answered."""
        try:
            value = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
            if not isinstance(value, dict):
                raise ValueError("it is no object")
        except ValueError as error:
            self.reply(400, {"error": {"message": f"The body is no JSON object: {error}"}})
            return None
        return value

    def reply(self, status: int, value: Any, kind: str = "application/json") -> None:
        """Answer with a text as it is, or with any other value as JSON."""
        data = value.encode() if isinstance(value, str) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def begin_stream(self) -> None:
        """Answer with a stream of events; `event` sends them, `end_stream` the last mark."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()

    def event(self, value: Any) -> None:
        """Send a value as one event. OSError where the reader is gone."""
        self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")

    def end_stream(self) -> None:
        """Send the mark without which a stream was broken off."""
        self.wfile.write(b"data: [DONE]\n\n")


def serve(handler: type[JsonHandler], port: int, name: str) -> ThreadingHTTPServer:
    """Answer on `port` of the loopback interface, in threads that end with the process, until ``shutdown``."""
    server = ThreadingHTTPServer((HOST, port), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.05,), name=name, daemon=True).start()
    return server
