"""Each row of http_rows.py against kvd-pd-proxy, and against nginx as the reference. usage: test_http.py PROGRAM [unittest's arguments]"""

from __future__ import annotations

import sys

try:
    import contextlib
    import os
    import re
    import shutil
    import socket
    import subprocess
    import tempfile
    import threading
    import unittest

    import http_rows
    from http_rows import AWAIT_100, BODY_LIMIT, HALF_CLOSE, NOTHING, Row
    from rig import WAIT, wait_until
except ModuleNotFoundError as error:
    print(f"# SKIP: this Python has no standard library ({error})")
    sys.exit(77)

PROGRAM = ""
NGINX_WAIT = 2.0  # where it says nothing at all, which is only printed
PROBE = b"GET /v1/probe HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
DEFAULT = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


class Message:
    """One message of a stream, read as RFC 9112 has it and no other way: ValueError is a message that no strict reader takes."""

    def __init__(self, stream, is_answer: bool, method: bytes = b"") -> None:
        self.first = self.line(stream).split(b" ", 2)
        if len(self.first) != 3:
            raise ValueError(f"no first line: {self.first!r}")
        self.status = int(self.first[1]) if is_answer else 0
        self.headers: list[tuple[bytes, bytes]] = []
        while line := self.line(stream):
            match = re.fullmatch(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\0\r\n]*?)[ \t]*", line)
            if not match:
                raise ValueError(f"no header: {line!r}")
            self.headers.append((match[1].lower(), match[2]))
        self.complete, self.body = True, b""
        length, coding = self.get(b"content-length"), self.get(b"transfer-encoding")
        if (length is not None and coding is not None) or coding not in (None, b"chunked") or (length and not length.isdigit()):
            raise ValueError(f"framing: {length!r} {coding!r}")
        if is_answer and (method == b"HEAD" or self.status < 200 or self.status in (204, 304)):
            return
        if coding:
            self.chunks(stream)
        elif length is not None or not is_answer:
            self.body = stream.read(int(length or 0))
            self.complete = len(self.body) == int(length or 0)
        else:
            self.body = stream.read()

    def line(self, stream) -> bytes:
        line = stream.readline(1 << 20)
        if not line:
            raise EOFError
        if not line.endswith(b"\r\n") or b"\r" in line[:-2]:
            raise ValueError(f"no line: {line!r}")
        return line[:-2]

    def chunks(self, stream) -> None:
        try:
            while size := int(self.line(stream), 16):
                data = stream.read(size)
                self.body += data
                if len(data) < size or self.line(stream):
                    raise EOFError
            while self.line(stream):
                pass
        except EOFError:
            self.complete = False

    def get(self, name: bytes) -> bytes | None:
        values = [value for other, value in self.headers if other == name]
        return b", ".join(values) if values else None


class Played:
    """An engine behind both servers: keeps what it gets, and answers a row's bytes."""

    def __init__(self) -> None:
        self.got: list[Message] = []
        self.reply: bytes | None = None
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self.serve, args=(self.listener.accept()[0],), daemon=True).start()

    def serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as stream, contextlib.suppress(EOFError, OSError):
            more = True
            while more:
                more = self.answer(connection, stream)

    def answer(self, connection: socket.socket, stream) -> bool:
        """0: the connection ends."""
        try:
            message = Message(stream, False)
        except ValueError as error:
            print("# malformed at the engine:", error)
            message = None
        path = message.first[1] if message else b""
        if path == b"/health":
            connection.sendall(DEFAULT)
            return True
        if path != b"/v1/probe":
            self.got.append(message)
        if not message or not message.complete:
            return False
        if path == b"/v1/probe" or self.reply is None:
            connection.sendall(DEFAULT[: -2 if message.first[0] == b"HEAD" else None])
            return True
        connection.sendall(self.reply)
        return False


class Outcome:
    """What a client got, and the engine behind."""

    def __init__(self) -> None:
        self.answers: list[Message] = []
        self.interim: list[int] = []
        self.kept = False
        self.got: list[tuple[bytes, bytes, bytes]] = []
        self.heads: list[dict[bytes, bytes]] = []
        self.trouble = ""

    def __str__(self) -> str:
        statuses = [answer.status if answer.complete else f"{answer.status} cut short" for answer in self.answers]
        return f"{statuses} {'kept' if self.kept else 'closed'}, the engine has {[(one[0], one[1], len(one[2])) for one in self.got]} {self.trouble}".rstrip()

    def faults(self, row: Row) -> list[str]:
        """What differs from the row."""
        found = [self.trouble] if self.trouble else []
        statuses = [answer.status for answer in self.answers] or [NOTHING]
        if len(statuses) > len(row.answers) or not all(status in right for status, right in zip(statuses, row.answers)) or (statuses != [NOTHING] and len(statuses) < len(row.answers)):
            found.append(f"statuses {statuses}")
        wanted = row.got if statuses[0] == 200 or row.reply is not None else []
        if statuses[0] == NOTHING and row.half_closes:
            wanted = self.got if self.got == row.got else []  # it may have got there before the client's end
        if row.may_repeat and len(self.got) == 2:
            wanted = wanted * 2
        if [one[:2] for one in self.got] != [one[:2] for one in wanted] or any(there[2] not in (None, here[2]) for here, there in zip(self.got, wanted)):
            found.append(f"the engine has {self.got}")
        if row.kept is not None and self.kept != row.kept:
            found.append("the connection is " + ("kept" if self.kept else "closed"))
        if not found and row.check and not row.check(self):
            found.append("its check fails: " + repr([answer.headers for answer in self.answers]) + repr(self.heads))
        return found


def send(connection: socket.socket, piece: bytes | str, stream, outcome: Outcome) -> None:
    if piece == HALF_CLOSE:
        connection.shutdown(socket.SHUT_WR)
    elif piece == AWAIT_100:
        outcome.interim.append(Message(stream, True).status)
    else:
        connection.sendall(piece)


def read_answers(connection: socket.socket, stream, row: Row, outcome: Outcome, half_closed: bool) -> None:
    method = row.pieces[0].split(b" ", 1)[0]
    while len(outcome.answers) < len(row.answers):
        answer = Message(stream, True, method)
        if answer.status < 200 and answer.status != 101:
            outcome.interim.append(answer.status)
        else:
            outcome.answers.append(answer)
    try:
        if not half_closed:
            connection.sendall(PROBE)
        answer = Message(stream, True)
    except ConnectionError:
        raise EOFError  # closed, and the probe came late
    if answer.status == 200 and not half_closed:
        outcome.kept = True
        Message(stream, True)
    else:
        outcome.answers.append(answer)


def run_row(row: Row, port: int, engine: Played, limit: float = WAIT) -> Outcome:
    outcome = Outcome()
    engine.got, engine.reply = [], row.reply
    with socket.create_connection(("127.0.0.1", port), timeout=limit) as connection, connection.makefile("rb") as stream:
        try:
            for piece in row.pieces:
                send(connection, piece, stream, outcome)
            read_answers(connection, stream, row, outcome, row.half_closes)
        except EOFError:
            pass
        except (ValueError, OSError) as error:
            outcome.trouble = f"{type(error).__name__}: {error}"
    mine = [one for one in engine.got if http_rows.LATE in row.got or not one or one.first[1] != http_rows.LATE[1]]
    outcome.got = [(*one.first[:2], one.body) if one else (b"", b"malformed", b"") for one in mine]
    outcome.heads = [{name: one.get(name) for name, _ in one.headers} for one in mine if one]
    return outcome


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def await_port(process: subprocess.Popen, port: int) -> None:
    def listens() -> bool:
        assert process.poll() is None, "it has ended"
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port)).close()
            return True
        return False

    wait_until(listens, "it listens")


NGINX = """
daemon off; master_process off; pid {folder}/pid; error_log stderr crit;
events {{ }}
http {{
	access_log off; client_max_body_size {limit}; large_client_header_buffers 4 8k; keepalive_timeout 75s;
	client_body_temp_path {folder}/a; proxy_temp_path {folder}/b; fastcgi_temp_path {folder}/c; uwsgi_temp_path {folder}/d; scgi_temp_path {folder}/e;
	server {{
		listen 127.0.0.1:{port};
		location /health {{ return 200 ok; }}
		location / {{ proxy_pass http://127.0.0.1:{engine}; proxy_http_version 1.1; proxy_next_upstream off; }}
	}}
}}
"""


class Http(unittest.TestCase):
    def start(self, *command: str) -> int:
        port = int(command[1].rsplit(":", 1)[1]) if command[0] == PROGRAM else int(command[-1])
        process = subprocess.Popen(command if command[0] == PROGRAM else command[:-1])
        self.addCleanup(process.wait, WAIT)
        self.addCleanup(process.terminate)
        await_port(process, port)
        return port

    def setUp(self) -> None:
        self.engine = Played()
        self.addCleanup(self.engine.listener.close)
        self.proxy = self.start(PROGRAM, f"--http.listen=127.0.0.1:{free_port()}", f"--decode=http://127.0.0.1:{self.engine.port}", f"--limits.body={BODY_LIMIT}", "--limits.headers=8KiB", "--health.interval=1h", "--log.level=error")

    def start_nginx(self) -> int | None:
        nginx = shutil.which("nginx")
        if not nginx:
            print("# nginx is not installed (Debian package nginx; `make ci` fetches it): no reference")
            return None
        folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, folder)
        port = free_port()
        with open(f"{folder}/nginx.conf", "w") as file:
            file.write(("user root;" if os.geteuid() == 0 else "") + NGINX.format(folder=folder, limit=BODY_LIMIT, engine=self.engine.port, port=port))
        return self.start(nginx, "-p", folder, "-c", f"{folder}/nginx.conf", str(port))

    def run_table(self, rows: list[Row], with_reference: bool = True) -> None:
        nginx = self.start_nginx() if with_reference else None
        wrong = []
        for row in rows:
            mine = run_row(row, self.proxy, self.engine)
            if faults := mine.faults(row):
                wrong.append(f"RFC {row.section}: {row.what}: {'; '.join(faults)}")
            if nginx is None:
                continue
            other = run_row(row, nginx, self.engine, NGINX_WAIT)
            if str(other) != str(mine):
                print(f"\n# RFC {row.section}: {row.what}: here {mine}; nginx {other}{', against the RFC' if other.faults(row) else ''}")
        self.assertEqual(wrong, [], "\n" + "\n".join(wrong))

    def test_p6_lines_and_headers_are_read_as_rfc_9112_has_them(self) -> None:
        self.run_table(http_rows.SYNTAX)

    def test_p6_bodies_are_framed_as_rfc_9112_has_it(self) -> None:
        self.run_table(http_rows.FRAMING)

    def test_p6_connections_are_kept_and_closed_as_rfc_9112_has_it(self) -> None:
        self.run_table(http_rows.CONNECTIONS)

    def test_p6_answers_of_engines_are_passed_on_as_rfc_9112_has_them(self) -> None:
        self.run_table(http_rows.ANSWERS)

    def test_p1_json_is_read_as_rfc_8259_has_it_and_passed_on_byte_for_byte(self) -> None:
        self.run_table(http_rows.JSON, with_reference=False)  # nginx reads no JSON


if __name__ == "__main__":
    PROGRAM = os.environ.get("KV_TEST_BIN", "") and os.path.join(os.environ["KV_TEST_BIN"], os.path.basename(sys.argv[1])) or sys.argv[1]
    unittest.main(argv=sys.argv[:1] + sys.argv[2:], verbosity=2)
