"""vLLM's OpenAI servers, proxies in front of them, and requests to either. No dependency but the standard library."""
from __future__ import annotations

import concurrent.futures
import http.client
import http.server
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from typing import Any, Iterator, Sequence

import harness
from harness import BUILD, ENVIRONMENT, HERE, Answer, Bench, Engine, Failed, wait_for

Json = dict[str, Any]
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"  # a chat is the words of its messages
# What vLLM's own proxy asks the prefill engine (tests/v1/kv_connector/nixl_integration/toy_proxy_server.py).
TOY: Json = dict(do_remote_decode=True, do_remote_prefill=False, remote_engine_id=None, remote_block_ids=None, remote_host=None, remote_port=None)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def get(port: int, path: str) -> tuple[int, str]:
    """Status and text; 0: nobody answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    except (OSError, http.client.HTTPException):
        return 0, ""
    finally:
        connection.close()


def metric(port: int, name: str) -> float:
    """The sum of a metric's lines, or of the one line with these labels."""
    pattern = re.escape(name) + (r"(?:\{[^}]*\})?" if "{" not in name else "")
    return sum(float(value) for value in re.findall(rf"^{pattern} (\S+)$", get(port, "/metrics")[1], re.M))


class Server(Engine):
    """An engine behind vLLM's API server, in a process group of its own."""

    def __init__(self, bench: Bench, name: str, model: str, connector: Json | None, **options: Any) -> None:
        self.name, self.log, self.expected_dead = name, bench.path / f"{name}.log", False
        self.command_fd = self.answer_fd = -1
        self.port = free_port()
        template = bench.path / "chat.jinja"
        template.write_text(TEMPLATE)
        flags: Json = dict(model=model, served_model_name="tiny", host="127.0.0.1", port=self.port, dtype="float32", seed=0, generation_config="vllm",
                           chat_template=template) | harness.OPTIONS | options
        if connector:
            flags["kv_transfer_config"] = json.dumps(connector)
        arguments = [word for flag, value in flags.items() for word in ("--" + flag.replace("_", "-"), str(value))]
        path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, cwd=bench.path, preexec_fn=harness.die_with_parent,
                env=os.environ | ENVIRONMENT | dict(PYTHONPATH=path, TMPDIR=str(bench.path), XDG_CACHE_HOME=str(bench.path / "cache")))
        bench.engines.append(self)

    def wait_started(self) -> float:
        """Also for the digest of the weights, as for other engines."""
        def answers() -> bool:
            if self.process.poll() is not None:
                raise Failed(f"{self.name}: the server has ended\n{self.tail()}")
            return get(self.port, "/health")[0] == 200 and "kvd: weights " in self.log.read_text(errors="replace")
        wait_for(f"{self.name} to answer", harness.START_S, answers, 0.2)
        return 0.0

    def stop(self) -> None:
        self.kill()


class Proxy:
    """kvd-pd-proxy."""

    def __init__(self, bench: Bench, prefill: Sequence[Server], decode: Sequence[Server], *options: str) -> None:
        self.port = free_port()
        self.log = bench.path / f"proxy-{self.port}.log"
        urls = [",".join(f"http://127.0.0.1:{server.port}" for server in servers) for servers in (prefill, decode)]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KVD_")}
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [str(BUILD / "bin" / "kvd-pd-proxy"), f"--http.listen=127.0.0.1:{self.port}", f"--prefill={urls[0]}", f"--decode={urls[1]}", *options],
                stdout=log, stderr=log, env=environment, preexec_fn=harness.die_with_parent)
        wait_for("the proxy to answer", 20, lambda: get(self.port, "/health")[0] == 200)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60 * harness.SLOW)
        finally:
            self.process.kill()

    def metric(self, name: str) -> float:
        return metric(self.port, f"kvd_pd_proxy_{name}")


class ToyProxy:
    """What vLLM's toy proxy does: a request goes to P for one token, then to D with the kv_transfer_params that P has answered, unchanged."""

    def __init__(self, prefill: Server, decode: Server) -> None:
        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                first = body | dict(kv_transfer_params=TOY, stream=False, max_tokens=1)
                if "max_completion_tokens" in first:
                    first["max_completion_tokens"] = 1
                with send(prefill.port, self.path, first) as answer:
                    params = json.loads(answer.read())["kv_transfer_params"]
                with send(decode.port, self.path, body | dict(kv_transfer_params=params)) as answer:
                    self.send_response(answer.status)
                    self.send_header("Content-Type", answer.headers["Content-Type"])
                    self.end_headers()
                    while piece := answer.read1(65536):
                        self.wfile.write(piece)

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = int(self.server.server_address[1])
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def __enter__(self) -> ToyProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()


def send(port: int, path: str, body: Json) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=harness.ANSWER_S * harness.SLOW)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    return connection.getresponse()


def words(prompt: list[int]) -> str:
    return " ".join(f"w{token}" for token in prompt)


def request(prompt: list[int], chat: bool = False, stream: bool = False, text: bool = False) -> tuple[str, Json]:
    """Path and body; its prompt is token ids, text, or the message of a chat."""
    body: Json = dict(model="tiny", temperature=0, ignore_eos=True, max_tokens=16, stream=stream, return_token_ids=True)
    if chat:
        return "/v1/chat/completions", body | dict(messages=[dict(role="user", content=words(prompt))], logprobs=True, top_logprobs=0)
    return "/v1/completions", body | dict(prompt=words(prompt) if text else prompt, logprobs=0)


def events(stream: str) -> Iterator[Json]:
    """Of a whole stream."""
    pieces = [event.removeprefix("data: ") for event in stream.split("\n\n") if event]
    if pieces[-1:] != ["[DONE]"]:
        raise Failed(f"a stream has no end: {stream[-500:]}")
    yield from map(json.loads, pieces[:-1])


def answer_of(port: int, path: str, body: Json) -> Answer:
    """Send a request and read its answer, streamed or not."""
    with send(port, path, body) as response:
        text = response.read().decode()
    if response.status != 200:
        raise Failed(f"{path} is answered with {response.status}: {text}")
    out = Answer([], [], None, None, None, "")
    for piece in events(text) if body["stream"] else [json.loads(text)]:
        for choice in piece["choices"]:
            logprobs = choice.get("logprobs") or {}
            out.tokens += choice.get("token_ids") or []
            out.logprobs += logprobs.get("token_logprobs") or [one["logprob"] for one in logprobs.get("content") or []]
            out.finish = choice.get("finish_reason") or out.finish
    return out


class Answers:
    """Of requests that run at once."""

    def __init__(self, port: int, requests: Sequence[tuple[str, Json]]) -> None:
        self.threads = concurrent.futures.ThreadPoolExecutor(len(requests))
        self.futures = [self.threads.submit(answer_of, port, *one) for one in requests]

    def collect(self) -> list[Answer]:
        out = [future.result() for future in self.futures]
        self.threads.shutdown()
        return out
