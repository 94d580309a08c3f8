"""Engines that are not there: HTTP servers in threads that answer like vLLM, or as a test tells them to; and a proxy in front of them."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import select
import signal
import socket
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Callable

WAIT = 60.0  # longest wait for something that must come, on a machine with much to do


def wait_until(condition: Callable[[], Any], what: str, limit: float = WAIT) -> Any:
    end = time.monotonic() + limit
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.005)
    raise AssertionError(f"never: {what}")


class Transfers:
    """What prefill engines have handed over: stands for the daemon."""

    def __init__(self) -> None:
        self.ready: set[str] = set()
        self.changed = threading.Condition()

    def send(self, transfer: str) -> None:
        with self.changed:
            self.ready.add(transfer)
            self.changed.notify_all()

    def receive(self, transfer: str, limit: float) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: transfer in self.ready, limit)


class Engine:
    """One engine. `answer` is called with the handler and the body of each completion, in the connection's thread."""

    def __init__(self, transfers: Transfers, role: str, port: int = 0) -> None:
        self.transfers, self.role = transfers, role
        self.requests: list[dict[str, Any]] = []
        self.disconnects = 0
        self.tokens = 20  # of an answer
        self.token_time = 0.0
        self.prefill_time = 0.0
        self.params: dict[str, Any] = {}  # more of a prefill engine's answer
        self.answer: Callable[[Any, dict[str, Any]], None] = self.serve
        self.before_body: Callable[[Any], None] = lambda handler: None
        self.healthy = True
        self.looks = 0
        self.connections: set[socket.socket] = set()
        self.accepted = 0  # connections so far
        self.prompt_tokens: list[int] | None = None  # what /tokenize says; None: a 404
        engine = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def log_message(self, *args: Any) -> None:
                pass

            def handle(self) -> None:
                engine.connections.add(self.connection)
                engine.accepted += 1
                self.calls = 0  # of this connection
                try:
                    super().handle()
                except OSError:
                    pass  # the proxy has ended the call, or the engine stops
                engine.connections.discard(self.connection)

            def do_GET(self) -> None:
                if self.path != "/health":
                    return self.do_POST()
                engine.looks += 1
                self.calls += 1
                wait_until(lambda: engine.healthy is not None, "health")
                self.say(200 if engine.healthy else 503, b"")

            def do_POST(self) -> None:
                engine.before_body(self)
                data = self.rfile.read(int(self.headers["Content-Length"] or 0))
                body = json.loads(data) if self.headers["Content-Type"] == "application/json" else data
                if self.path == "/tokenize":
                    if engine.prompt_tokens is None:
                        self.say(404, b"{}")
                    else:
                        self.say(200, json.dumps({"count": len(engine.prompt_tokens), "tokens": engine.prompt_tokens}).encode())
                    return
                self.calls += 1
                engine.requests.append({"path": self.path, "id": self.headers["X-Request-Id"], "auth": self.headers["Authorization"], "body": body, "method": self.command, "headers": dict(self.headers)})
                try:
                    engine.answer(self, body)
                except ConnectionError:
                    engine.disconnects += 1
                    self.close_connection = True

            do_OPTIONS = do_PUT = do_DELETE = do_POST

            def say(self, status: int, body: bytes, kind: str = "application/json", headers: dict[str, str] | None = None) -> None:
                self.send_response(status)
                for name, value in {"Content-Type": kind, **(headers or {})}.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def chunk(self, data: bytes) -> None:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

            def begin_stream(self) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream; charset=utf-8")
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()

            def watch(self, seconds: float) -> None:
                """Compute for a while; the end of the connection ends it, as vLLM's does."""
                end = time.monotonic() + seconds
                while (left := end - time.monotonic()) > 0:
                    if select.select([self.connection], [], [], min(left, 0.02))[0] and not self.connection.recv(1, socket.MSG_PEEK):
                        raise ConnectionAbortedError

            def die(self) -> None:
                """The process ends: no proper end of the answer."""
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

        self.server = Server(("127.0.0.1", port), Handler)
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        for connection in list(self.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def serve(self, handler: Any, body: dict[str, Any]) -> None:
        params = body.get("kv_transfer_params") or {}
        handler.watch(self.prefill_time)
        if params.get("do_remote_decode"):
            transfer = params.get("transfer_id") or f"made-by-{self.port}-{len(self.requests)}"
            self.transfers.send(transfer)
            answer = {"choices": [{"text": "t0"}], "kv_transfer_params": {"do_remote_prefill": True, "transfer_id": transfer, "remote_block_ids": [[1, 2]], "x": None} | self.params}
            handler.say(200, json.dumps(answer).encode())
            return
        if params.get("do_remote_prefill"):
            end = time.monotonic() + WAIT
            while not self.transfers.receive(params["transfer_id"], 0.01):
                handler.watch(0.001)
                assert time.monotonic() < end
        self.decode(handler, body)

    def decode(self, handler: Any, body: dict[str, Any], upto: int | None = None) -> None:
        if not body.get("stream"):
            handler.watch(self.tokens * self.token_time)
            handler.say(200, json.dumps({"choices": [{"text": "".join(token(body, i) for i in range(self.tokens))}]}).encode())
            return
        handler.begin_stream()
        for i in range(self.tokens if upto is None else upto):
            handler.watch(self.token_time)
            handler.chunk(b"data: " + json.dumps({"choices": [{"text": token(body, i)}]}).encode() + b"\n\n")
        if upto is None:
            handler.chunk(b"data: [DONE]\n\n")
            handler.chunk(b"")


def packed(value: Any) -> bytes:
    """As msgpack; lists and maps of up to 65,535 elements."""
    if isinstance(value, dict):
        return b"\xde" + len(value).to_bytes(2, "big") + b"".join(packed(part) for pair in value.items() for part in pair)
    if isinstance(value, list):
        return b"\xdc" + len(value).to_bytes(2, "big") + b"".join(map(packed, value))
    if isinstance(value, str):
        return b"\xd9" + bytes([len(value)]) + value.encode()
    return b"\xc0" if value is None else b"\xcf" + value.to_bytes(8, "big")


class Events:
    """An engine's ZeroMQ PUB socket, for one subscriber at a time."""

    def __init__(self) -> None:
        self.server = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self.server.getsockname()[1]}"
        self.number = 0

    def accept(self) -> None:
        """The next subscriber, up to its subscription."""
        self.server.settimeout(WAIT)
        self.peer = self.server.accept()[0]
        self.peer.sendall(b"\xff" + bytes(7) + b"\x01\x7f\x03\x00NULL" + bytes(48) + b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03PUB")
        self.peer.settimeout(WAIT)
        said = b""
        while not said.endswith(b"\0\x01\x01"):
            piece = self.peer.recv(4096)
            assert piece, "the subscriber has gone"
            said += piece

    def publish(self, *events: dict[str, Any]) -> None:
        payload = packed([1, list(events), 0])
        self.peer.sendall(b"\x01\x00\x01\x08" + self.number.to_bytes(8, "big") + b"\x02" + len(payload).to_bytes(8, "big") + payload)
        self.number += 1

    def store(self, tokens: list[int], block: int) -> None:
        """All blocks of a prompt."""
        hashes = [hash(tuple(tokens[: i + block])) % 2**64 for i in range(0, len(tokens), block)]
        self.publish(dict(type="BlockStored", block_hashes=hashes, parent_block_hash=None, token_ids=tokens, block_size=block, medium="GPU"))

    def stop(self) -> None:
        self.peer.close()
        self.server.close()


def token(body: dict[str, Any], i: int) -> str:
    return f"{body.get('user', '')}:{i} "


def text_of(stream: bytes) -> str:
    """The text of a stream's whole events."""
    out = ""
    for event in stream.decode().split("\n\n"):
        if event.startswith("data: {") and "choices" in event:
            out += json.loads(event[6:])["choices"][0]["text"]
    return out


class Answer:
    def __init__(self, status: int, data: bytes, complete: bool, headers: dict[str, str]) -> None:
        self.status, self.data, self.complete, self.headers = status, data, complete, headers


class Proxy:
    def __init__(self, program: str, prefill: list[Engine], decode: list[Engine], *options: str, log: Any = None) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.process = subprocess.Popen(
            [
                program,
                f"--http.listen=127.0.0.1:{self.port}",
                "--prefill=" + ",".join(engine.url for engine in prefill),
                "--decode=" + ",".join(engine.url for engine in decode),
                "--health.interval=50ms",
                "--health.timeout=1m",  # played engines are slow on a machine with much to do
                "--engine.tokenize_timeout=1m",
                "--skip.tokens=8",
                "--tokenize=off",
                "--log.level=error",
                *options,
            ],
            stderr=log,
        )
        wait_until(self.listens, "the proxy listens")

    def listens(self) -> bool:
        assert self.process.poll() is None, "the proxy has ended"
        try:
            socket.create_connection(("127.0.0.1", self.port)).close()
        except OSError:
            return False
        return True

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(WAIT)

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT)

    def call(self, body: Any, path: str = "/v1/completions", method: str = "POST", headers: dict[str, str] | None = None) -> Answer:
        connection = self.connect()
        data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
        connection.request(method, path, data, headers or {})
        response = connection.getresponse()
        out, complete = b"", True
        try:
            while piece := response.read1(65536):
                out += piece
            complete = not response.length  # of Content-Length
        except (http.client.IncompleteRead, ConnectionError):
            complete = False
        connection.close()
        return Answer(response.status, out, complete, dict(response.getheaders()))

    def metric(self, name: str) -> float:
        match = re.search(rf"^{re.escape(name)} ([\d.]+)$", self.call(None, "/metrics", "GET").data.decode(), re.M)
        assert match, name
        return float(match[1]) if "." in match[1] else int(match[1])
