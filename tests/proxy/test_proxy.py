"""kvd-pd-proxy in front of engines that work, are slow, die, hang or answer nonsense. usage: test_proxy.py PROGRAM [unittest's arguments]"""

from __future__ import annotations

import sys

try:
    import concurrent.futures
    import contextlib
    import json
    import os
    import random
    import re
    import shutil
    import socket
    import subprocess
    import tempfile
    import threading
    import time
    import unittest
    from typing import Any

    from rig import WAIT, Engine, Events, Proxy, Transfers, text_of, token, wait_until
except ModuleNotFoundError as error:
    print(f"# SKIP: this Python has no standard library ({error})")
    sys.exit(77)

PROGRAM = ""
LONG = list(range(100, 164))  # a prompt that is handed over


def request(**more: object) -> dict[str, object]:
    return {"model": "m", "prompt": LONG, "stream": True, "max_tokens": 20, **more}


def expected(body: dict[str, object], n: int = 20) -> str:
    return "".join(token(body, i) for i in range(n))


class Case(unittest.TestCase):
    def setUp(self) -> None:
        self.transfers = Transfers()

    def engines(self, prefills: int, decodes: int) -> None:
        self.prefill = [Engine(self.transfers, "prefill") for _ in range(prefills)]
        self.decode = [Engine(self.transfers, "decode") for _ in range(decodes)]
        for engine in self.prefill + self.decode:
            self.addCleanup(engine.stop)

    def hold(self, engine: Engine) -> threading.Event:
        """It serves when the event is set."""
        go = threading.Event()
        engine.answer = lambda handler, body: go.wait(WAIT) and engine.serve(handler, body)
        return go

    def proxy(self, *options: str) -> Proxy:
        proxy = Proxy(PROGRAM, self.prefill, self.decode, *options)
        self.addCleanup(lambda: self.assertEqual(proxy.stop(), 0, "the proxy ends without an error"))
        return proxy

    def post(self, proxy: Proxy, data: bytes, upto: int | None = None) -> socket.socket:
        """A connection that has sent a completion, or so much of its body."""
        client = socket.create_connection(("127.0.0.1", proxy.port), WAIT)
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(data) + data[:upto])
        return client

    def serves(self, proxy: Proxy, **more: object) -> None:
        """A request is answered whole."""
        body = request(**more)
        self.check(proxy.call(body), body)

    def check(self, answer, body: dict[str, object], n: int = 20) -> None:
        self.assertEqual(answer.status, 200, answer.data)
        self.assertTrue(answer.complete)
        self.assertEqual(text_of(answer.data) if body["stream"] else json.loads(answer.data)["choices"][0]["text"], expected(body, n))


class HandOver(Case):
    def test_p1_both_sides_get_one_transfer_and_all_members(self) -> None:
        self.engines(1, 1)
        proxy = self.proxy()
        body = request(user="a/b", min_tokens=3, n=1, strange={"deep": [1.50, None, 18446744073709551615, "\u00e9/"]}, kv_transfer_params={"transfer_id": "stolen"})
        self.check(proxy.call(body, headers={"Authorization": "Bearer key"}), body)
        prefill, decode = self.prefill[0].requests, self.decode[0].requests
        self.assertEqual((len(prefill), len(decode)), (1, 1))
        transfer = prefill[0]["body"]["kv_transfer_params"]["transfer_id"]
        self.assertRegex(transfer, "^[0-9a-f]{32}$")
        self.assertEqual(decode[0]["body"]["kv_transfer_params"], {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": transfer})
        self.assertEqual({prefill[0]["id"], decode[0]["id"]}, {transfer})
        self.assertEqual({prefill[0]["auth"], decode[0]["auth"]}, {"Bearer key"})
        for side in (prefill[0]["body"], decode[0]["body"]):
            self.assertEqual((side["strange"], side["prompt"], side["user"]), (body["strange"], LONG, "a/b"))
        self.assertEqual((prefill[0]["body"]["max_tokens"], prefill[0]["body"]["stream"]), (1, False))
        self.assertNotIn("min_tokens", prefill[0]["body"])
        self.assertEqual((decode[0]["body"]["max_tokens"], decode[0]["body"]["min_tokens"]), (20, 3))

    def test_p1_a_decode_engine_is_told_the_node_of_its_prefill_engine(self) -> None:
        self.engines(2, 1)
        proxy = self.proxy("--kvd.peers=node0,node1")
        for i in range(4):
            body = request(seed=i)
            self.check(proxy.call(body), body)
        for node, engine in zip(("node0", "node1"), self.prefill):
            for sent in engine.requests:
                transfer = sent["body"]["kv_transfer_params"]["transfer_id"]
                self.assertNotIn("transfer_peer", sent["body"]["kv_transfer_params"])
                told = [one["body"]["kv_transfer_params"] for one in self.decode[0].requests if one["id"] == transfer]
                self.assertEqual(told, [{"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": transfer, "transfer_peer": node}])
        self.assertEqual(sum(len(engine.requests) for engine in self.prefill), 4)

    def test_p1_a_decode_engine_is_told_the_gpu_that_its_prefill_engine_has_named(self) -> None:
        self.engines(1, 1)
        self.decode[0].token_time = 0.02  # the end of its answer ends the call of the prefill engine
        proxy = self.proxy()
        told = []
        for i, named in enumerate(("GPU-1", None, "GPU-2", 'a"b', "x" * 64, 7, "")):
            self.prefill[0].params = {} if named is None else {"transfer_device": named}
            body = request(seed=i)
            self.check(proxy.call(body), body)
            wait_until(lambda: proxy.metric("kvd_pd_proxy_prefill_seconds_count") == i + 1, "the prefill engine has answered")
            told.append(self.decode[0].requests[-1]["body"]["kv_transfer_params"].get("transfer_device"))
        self.assertEqual(told, [None, "GPU-1", "GPU-1", "GPU-2", "GPU-2", "GPU-2", "GPU-2"])

    def test_p1_a_sequential_hand_over_passes_params_unchanged(self) -> None:
        self.engines(1, 1)
        proxy = self.proxy("--sequential")
        body = request(stream=False)
        self.check(proxy.call(body), body)
        self.assertIsNone(self.prefill[0].requests[0]["body"]["kv_transfer_params"]["remote_engine_id"])
        params = self.decode[0].requests[0]["body"]["kv_transfer_params"]
        self.assertEqual(params, {"do_remote_prefill": True, "transfer_id": params["transfer_id"], "remote_block_ids": [[1, 2]], "x": None})

    def test_p1_chat_goes_the_same_way(self) -> None:
        self.engines(1, 1)
        proxy = self.proxy()
        body = {"messages": [{"role": "user", "content": "x" * 400}], "stream": True, "max_completion_tokens": 20}
        self.check(proxy.call(body, "/v1/chat/completions"), body)
        self.assertEqual(self.prefill[0].requests[0]["path"], "/v1/chat/completions")
        self.assertEqual(self.prefill[0].requests[0]["body"]["max_completion_tokens"], 1)

    def test_p1_every_token_arrives_in_order_however_slow_the_client(self) -> None:
        self.engines(1, 1)
        self.decode[0].tokens = 40000
        proxy = self.proxy("--limits.stream=8KiB")
        body = request(user="x" * 40)
        connection = proxy.connect()
        connection.request("POST", "/v1/completions", json.dumps(body))
        response = connection.getresponse()
        data, rng = b"", random.Random(1)
        while piece := response.read1(rng.choice((1, 100, 65536))):
            data += piece
            if rng.random() < 0.01:
                time.sleep(0.002)
        connection.close()
        self.assertEqual(text_of(data), expected(body, 40000))

    def test_p1_tokens_are_asked_for_where_a_text_may_be_long(self) -> None:
        self.engines(1, 1)
        proxy = self.proxy("--tokenize=on")
        self.decode[0].prompt_tokens = [1, 2, 3]
        body = request(prompt="a text with more bytes than tokens")
        self.check(proxy.call(body), body)
        self.assertEqual(len(self.prefill[0].requests), 0)  # three tokens: short
        self.decode[0].prompt_tokens = LONG
        self.check(proxy.call(body), body)
        self.decode[0].prompt_tokens = None
        self.check(proxy.call(body), body)
        self.assertEqual(len(self.prefill[0].requests), 2)  # without an answer 34 bytes are 9 tokens
        self.assertEqual(proxy.metric('kvd_pd_proxy_failures_total{role="tokenize"}'), 1)


class Thresholds(Case):
    def test_p5_short_prompts_and_several_sequences_are_not_handed_over(self) -> None:
        self.engines(1, 1)
        proxy = self.proxy()
        for body in (request(prompt=[1] * 8), request(n=2), request(prompt=["a" * 99, "b" * 99]), request(prompt_logprobs=1), request(echo=True, logprobs=1)):
            self.check(proxy.call(body), body)
        self.assertEqual(self.prefill[0].requests, [])
        self.assertTrue(all("kv_transfer_params" not in sent["body"] for sent in self.decode[0].requests))
        self.assertEqual(proxy.metric('kvd_pd_proxy_decisions_total{choice="short"}'), 1)
        self.assertEqual(proxy.metric('kvd_pd_proxy_decisions_total{choice="several"}'), 4)

    def test_p5_a_long_queue_is_not_joined(self) -> None:
        self.engines(1, 1)
        go = self.hold(self.prefill[0])
        proxy = self.proxy("--skip.wait=1s", "--queue.deadline=1h", "--cost.fixed=600ms", "--engine.prefill_running=1")
        bodies = [request(user=str(i)) for i in range(6)]
        self.run_all(proxy, bodies, go, 1)
        self.assertEqual(proxy.metric('kvd_pd_proxy_decisions_total{choice="handover"}'), len(self.prefill[0].requests))
        self.assertGreater(proxy.metric('kvd_pd_proxy_decisions_total{choice="queue"}'), 0)
        self.assertGreater(len(self.prefill[0].requests), 0)

    def test_p5_a_request_leaves_the_queue_at_its_deadline(self) -> None:
        self.engines(1, 1)
        go = self.hold(self.prefill[0])
        proxy = self.proxy("--queue.deadline=200ms", "--skip.wait=1h", "--engine.prefill_running=1")
        first = threading.Thread(target=proxy.call, args=(request(user="first"),))
        first.start()
        wait_until(lambda: self.prefill[0].requests, "the first is being computed")
        started = time.monotonic()
        self.serves(proxy, user="second")
        self.assertGreater(time.monotonic() - started, 0.19)
        self.assertEqual(len(self.prefill[0].requests), 1)
        self.assertEqual(proxy.metric("kvd_pd_proxy_queue_expired_total"), 1)
        go.set()
        first.join()

    def test_p5_what_a_full_queue_does_not_take_is_computed_by_decode_engines(self) -> None:
        self.engines(1, 2)
        go = self.hold(self.prefill[0])
        proxy = self.proxy("--queue.max=1", "--skip.wait=1h", "--queue.deadline=1h", "--engine.prefill_running=1")
        self.run_all(proxy, [request(user=str(i)) for i in range(8)], go, 6)
        self.assertEqual(proxy.metric('kvd_pd_proxy_decisions_total{choice="queue"}'), 6)
        self.assertEqual(proxy.metric("kvd_pd_proxy_queue_requests"), 0)
        self.assertTrue(all(engine.requests for engine in self.decode))

    def test_p5_short_prompts_overtake_long_ones_in_the_queue(self) -> None:
        self.engines(1, 1)
        go = self.hold(self.prefill[0])
        proxy = self.proxy("--skip.wait=1h", "--queue.deadline=1h", "--engine.prefill_running=1", "--cost.tokens=1m")
        threads = []
        for n, length in enumerate((64, 600, 400, 20)):
            threads.append(threading.Thread(target=proxy.call, args=(request(user=str(n), prompt=[1] * length),)))
            threads[-1].start()
            wait_until(lambda: len(self.prefill[0].requests) == 1 and proxy.metric("kvd_pd_proxy_queue_requests") == n, "it is there")
        go.set()
        for thread in threads:
            thread.join()
        self.assertEqual([len(sent["body"]["prompt"]) for sent in self.prefill[0].requests], [64, 20, 400, 600])

    def run_all(self, proxy: Proxy, bodies: list[dict[str, object]], go: threading.Event, skipped: int) -> None:
        """All at once; the prefill engine serves when `skipped` are not handed over for the queue."""
        answers: dict[int, object] = {}
        threads = [threading.Thread(target=lambda i=i, body=body: answers.update({i: proxy.call(body)})) for i, body in enumerate(bodies)]
        for thread in threads:
            thread.start()
        wait_until(lambda: proxy.metric('kvd_pd_proxy_decisions_total{choice="queue"}') >= skipped, "the queue is not joined")
        go.set()
        for thread in threads:
            thread.join()
        for i, body in enumerate(bodies):
            self.check(answers[i], body)


class Failures(Case):
    def fails_first(self, how) -> None:
        """The prefill engine that is asked first fails."""
        for engine in self.prefill:
            engine.answer = lambda handler, body, engine=engine: how(handler) if sum(len(e.requests) for e in self.prefill) == 1 else engine.serve(handler, body)

    def test_p6_another_prefill_engine_is_asked_before_the_first_token(self) -> None:
        for name, how in (("status 500", lambda handler: handler.say(500, b"{}")), ("death", lambda handler: handler.die())):
            with self.subTest(name):
                self.engines(2, 1)
                self.fails_first(how)
                proxy = self.proxy()
                wait_until(lambda: all(engine.looks > 1 for engine in self.prefill), "a connection of a look is idle")
                body = request()
                self.check(proxy.call(body), body)
                sent = [engine.requests[0]["body"]["kv_transfer_params"]["transfer_id"] for engine in self.prefill]
                self.assertEqual(len(set(sent)), 2)  # a transfer id is one attempt's
                self.assertEqual(proxy.metric("kvd_pd_proxy_retries_total"), 1)
                self.assertIn(self.decode[0].requests[-1]["body"]["kv_transfer_params"]["transfer_id"], sent)

    def test_p6_the_only_engine_gets_a_request_again_whose_connection_it_had_ended(self) -> None:
        self.engines(1, 1)
        proxy = self.proxy("--sequential", "--health.interval=1h")
        body = request()
        self.check(proxy.call(body), body)
        for engine in self.prefill + self.decode:
            with self.subTest(engine.role):
                engine.answer = lambda handler, body, engine=engine: handler.die() if handler.calls > 1 else engine.serve(handler, body)

                def is_sent_twice() -> bool:  # not on a slow machine, where the proxy had given the connection up
                    first = len(engine.requests)
                    self.check(proxy.call(body), body)
                    return len(engine.requests) == first + 2

                wait_until(is_sent_twice, "a used connection")
                engine.answer = engine.serve

    def test_p6_nonsense_instead_of_params_is_a_failure(self) -> None:
        for text in (b"", b"<html>", b"[1]", b'{"kv_transfer_params":3}'):
            with self.subTest(text):
                self.engines(2, 1)
                self.fails_first(lambda handler, text=text: handler.say(200, text))
                proxy = self.proxy("--sequential")
                self.serves(proxy)
                self.assertEqual([len(engine.requests) for engine in self.prefill], [1, 1])

    def test_p6_without_a_prefill_engine_the_decode_engine_computes(self) -> None:
        self.engines(2, 1)
        for engine in self.prefill:
            engine.stop()
        proxy = self.proxy()
        for name in ("first", "second"):  # the second one finds the engines down
            body = request(user=name)
            self.check(proxy.call(body), body)
            sent = [sent["body"] for sent in self.decode[0].requests if sent["body"]["user"] == name]
            self.assertEqual(sum("kv_transfer_params" not in body for body in sent), 1)
        self.assertEqual(len(sent), 1)

    def test_p6_an_error_of_the_client_is_passed_on(self) -> None:
        self.engines(2, 2)
        for engine in self.prefill + self.decode:
            engine.answer = lambda handler, body: handler.say(400, b'{"error":{"message":"too long"}}')
        proxy = self.proxy()
        answer = proxy.call(request())
        self.assertEqual((answer.status, answer.data), (400, b'{"error":{"message":"too long"}}'))

    def test_p6_another_decode_engine_is_asked_before_the_first_token(self) -> None:
        self.engines(1, 2)
        self.decode[0].answer = lambda handler, body: handler.die()
        proxy = self.proxy()
        for stream in (True, False):
            self.serves(proxy, stream=stream)

    def test_p6_an_answer_cut_short_is_sent_again_when_nothing_was_streamed(self) -> None:
        self.engines(0, 2)

        def half(handler, body) -> None:
            handler.send_response(200)
            handler.send_header("Content-Type", "application/json")
            handler.send_header("Content-Length", "1000")
            handler.end_headers()
            handler.wfile.write(b'{"choices":')
            handler.die()

        self.decode[0].answer = half
        proxy = self.proxy()
        self.serves(proxy, stream=False)

    def test_p1_nothing_is_sent_again_after_the_first_token(self) -> None:
        self.engines(1, 2)

        def dies(engine):
            def answer(handler, body) -> None:
                wait_until(lambda: self.transfers.ready, "the hand-over")
                engine.decode(handler, body, 7)
                handler.die()

            return answer

        for engine in self.decode:
            engine.answer = dies(engine)
        proxy = self.proxy()
        body = request(user="once")
        answer = proxy.call(body)
        self.assertEqual(answer.status, 200)
        self.assertFalse(answer.complete)
        self.assertEqual(text_of(answer.data), expected(body, 7))
        self.assertIn(b'data: {"error":{"message":', answer.data)
        self.assertEqual(sum(len(engine.requests) for engine in self.decode), 1)
        self.assertEqual(proxy.metric('kvd_pd_proxy_requests_total{outcome="cut"}'), 1)

    def test_p5_a_hanging_prefill_engine_costs_its_deadline_at_most(self) -> None:
        self.engines(1, 1)
        self.prefill[0].answer = lambda handler, body: handler.watch(WAIT)
        proxy = self.proxy("--engine.prefill_timeout=300ms")
        started = time.monotonic()
        self.serves(proxy)
        self.assertGreater(time.monotonic() - started, 0.29)
        self.assertLess(time.monotonic() - started, WAIT / 2)
        wait_until(lambda: self.prefill[0].disconnects == 1, "the call is ended")

    def test_p5_an_engine_that_stands_still_is_found_by_its_health(self) -> None:
        self.engines(2, 1)
        proxy = self.proxy("--health.timeout=2s")
        name = f'kvd_pd_proxy_engine_up{{engine="{self.prefill[0].url}",role="prefill"}}'

        def stands_still(handler, body) -> None:
            self.prefill[0].healthy = None  # /health waits too
            handler.watch(WAIT)

        self.prefill[0].answer = stands_still
        self.prefill[1].prefill_time = 0.2
        body = request()
        started = time.monotonic()
        self.check(proxy.call(body), body)
        self.assertLess(time.monotonic() - started, WAIT / 2)  # the deadline of a prefill is a minute
        self.assertEqual(len(self.prefill[1].requests), 1)
        self.assertEqual(proxy.metric(name), 0)
        self.prefill[0].healthy = True
        self.prefill[0].answer = self.prefill[0].serve
        wait_until(lambda: proxy.metric(name) == 1, "it is back")

    def test_p5_looks_at_an_engine_that_stays_away_become_rarer(self) -> None:
        self.engines(0, 2)
        self.decode[1].healthy = False
        proxy = self.proxy("--health.interval=10ms", "--health.backoff=10s")
        wait_until(lambda: self.decode[0].looks > 150, "looks at the one that is up")
        self.assertLess(self.decode[1].looks, 30)
        self.assertEqual(proxy.metric(f'kvd_pd_proxy_engine_up{{engine="{self.decode[1].url}",role="decode"}}'), 0)

    def test_p6_an_engine_that_is_back_serves_the_next_request(self) -> None:
        self.engines(1, 1)
        proxy = self.proxy("--health.interval=1h", "--health.timeout=1m")
        name = 'kvd_pd_proxy_decisions_total{choice="handover"}'
        body = request()
        self.check(proxy.call(body), body)
        for engines, role in ((self.decode, "decode"), (self.prefill, "prefill")):
            engines[0].stop()
            answer = proxy.call(body)  # finds out
            self.assertEqual(answer.status, 502 if role == "decode" else 200)
            answer = proxy.call(body)
            self.assertEqual((answer.status, answer.headers.get("Retry-After")), (503, "1") if role == "decode" else (200, None))
            engines[0] = Engine(self.transfers, role, engines[0].port)
            self.addCleanup(engines[0].stop)
            self.check(proxy.call(body), body)
        self.decode[0].stop()
        proxy.call(body)
        self.assertEqual(proxy.call(None, "/health", "GET").status, 503)
        self.decode[0] = Engine(self.transfers, "decode", self.decode[0].port)
        self.addCleanup(self.decode[0].stop)
        wait_until(lambda: proxy.call(None, "/health", "GET").status == 200, "health knows")
        wait_until(lambda: proxy.metric(f'kvd_pd_proxy_engine_up{{engine="{self.prefill[0].url}",role="prefill"}}') == 1, "the last request has looked")
        handed_over = proxy.metric(name)
        self.check(proxy.call(body), body)
        self.assertEqual(proxy.metric(name), handed_over + 1)

    def test_p5_a_stream_that_stands_still_is_cut(self) -> None:
        self.engines(0, 1)

        def stalls(handler, body) -> None:
            self.decode[0].decode(handler, body, 3)
            handler.watch(WAIT)

        self.decode[0].answer = stalls
        proxy = self.proxy("--engine.decode_stall=2s")
        body = request()
        answer = proxy.call(body)
        self.assertFalse(answer.complete)
        self.assertEqual(text_of(answer.data), expected(body, 3))

    def test_p6_without_decode_engines_the_answer_is_503_and_health_says_so(self) -> None:
        self.engines(1, 1)
        proxy = self.proxy()
        self.assertEqual(proxy.call(None, "/health", "GET").status, 200)
        self.decode[0].healthy = False
        wait_until(lambda: proxy.call(None, "/health", "GET").status == 503, "health says so")
        answer = proxy.call(request())
        self.assertEqual((answer.status, answer.headers.get("Retry-After")), (503, "1"))
        self.assertIn("error", json.loads(answer.data))
        self.decode[0].healthy = True
        wait_until(lambda: proxy.call(None, "/health", "GET").status == 200, "it is back")
        self.serves(proxy)


def most_kib(proxy: Proxy) -> int:
    with open(f"/proc/{proxy.process.pid}/status") as file:
        return int(re.search(r"VmHWM:\s+(\d+) kB", file.read())[1])


class Clients(Case):
    def test_p5_requests_share_connections_to_engines(self) -> None:
        self.engines(1, 1)
        proxy = self.proxy("--health.interval=1h")
        for i in range(20):
            self.serves(proxy, user=str(i), stream=i % 2 == 0)
        self.assertEqual((len(self.prefill[0].requests), len(self.decode[0].requests)), (20, 20))
        self.assertLess(self.decode[0].accepted, 10)

    def test_p4_a_client_that_leaves_ends_both_sides(self) -> None:
        self.engines(1, 1)
        self.prefill[0].prefill_time = WAIT
        proxy = self.proxy()
        self.leave(proxy, lambda: self.prefill[0].requests and self.decode[0].requests)
        wait_until(lambda: self.prefill[0].disconnects == 1 and self.decode[0].disconnects == 1, "both engines see it")
        self.prefill[0].prefill_time = 0
        self.decode[0].token_time = 0.05
        self.decode[0].tokens = 10000
        self.leave(proxy, lambda: len(self.decode[0].requests) == 2, read=1)
        wait_until(lambda: self.decode[0].disconnects == 2, "the decode engine sees it")
        wait_until(lambda: proxy.metric("kvd_pd_proxy_requests") == 0, "no request is left")
        self.assertEqual(proxy.metric('kvd_pd_proxy_requests_total{outcome="aborted"}'), 2)
        self.assertEqual(proxy.metric(f'kvd_pd_proxy_engine_requests{{engine="{self.decode[0].url}",role="decode"}}'), 0)

    def leave(self, proxy: Proxy, when, read: int = 0) -> None:
        with self.post(proxy, json.dumps(request()).encode()) as client:
            wait_until(when, "the engines have the request")
            if read:
                self.assertTrue(client.recv(read))

    def test_p4_a_client_that_leaves_the_queue_is_forgotten(self) -> None:
        self.engines(1, 1)
        self.prefill[0].prefill_time = WAIT
        proxy = self.proxy("--engine.prefill_running=1", "--skip.wait=1h")
        with self.post(proxy, json.dumps(request()).encode()):
            wait_until(lambda: self.prefill[0].requests, "the first is being computed")
            self.leave(proxy, lambda: proxy.metric("kvd_pd_proxy_queue_requests") == 1)
            wait_until(lambda: proxy.metric("kvd_pd_proxy_queue_requests") == 0, "the queue is empty")

    def test_p5_more_requests_than_the_limit_get_503(self) -> None:
        self.engines(0, 1)
        self.decode[0].token_time = WAIT
        proxy = self.proxy("--limits.requests=2")
        clients = [self.post(proxy, json.dumps(request()).encode()) for _ in range(2)]
        wait_until(lambda: proxy.metric("kvd_pd_proxy_requests") == 2, "two run")
        answer = proxy.call(request())
        self.assertEqual(answer.status, 503)
        self.assertEqual(json.loads(answer.data)["error"]["type"], "overloaded_error")
        for client in clients:
            client.close()
        self.decode[0].token_time = 0
        wait_until(lambda: proxy.metric("kvd_pd_proxy_requests") == 0, "they have ended")
        self.serves(proxy)

    def test_p5_bodies_and_headers_end_at_their_limits(self) -> None:
        self.engines(0, 1)
        proxy = self.proxy("--limits.body=4KiB", "--limits.headers=4KiB")
        large = request(user="x" * 5000)
        self.assertEqual(proxy.call(large).status, 413)
        with contextlib.suppress(ConnectionError):
            self.assertEqual(proxy.call(request(user="x" * 5000000)).status, 413)
        connection = proxy.connect()
        connection.request("POST", "/v1/completions", iter([json.dumps(large).encode()]))  # no Content-Length
        self.assertEqual(connection.getresponse().status, 413)
        connection.close()
        with contextlib.suppress(ConnectionError):  # the connection may end before all of them are sent
            self.assertIn(proxy.call(request(), headers={"X-Large": "x" * 60000}).status, (413, 431))
        self.assertEqual(self.decode[0].requests, [])
        self.serves(proxy)

    def test_p5_unfinished_bodies_count_against_the_limit_of_all(self) -> None:
        self.engines(0, 1)
        proxy = self.proxy("--limits.bodies=256KiB", "--limits.body=128KiB")
        body = request(user="x" * 100_000)
        data = json.dumps(body).encode()
        clients = []
        for n in range(2):
            clients.append(self.post(proxy, data, -1))
            wait_until(lambda: proxy.metric("kvd_pd_proxy_body_bytes") >= (n + 1) * 100_000, "its body is kept")
        for _ in range(3):
            answer = proxy.call(body)
            self.assertEqual((answer.status, answer.headers.get("Retry-After")), (503, "1"))
            self.assertIn(b"limits.bodies", answer.data)
            self.assertLessEqual(proxy.metric("kvd_pd_proxy_body_bytes"), 256 << 10)
        clients[0].close()
        wait_until(lambda: proxy.metric("kvd_pd_proxy_body_bytes") <= 128 << 10, "a client that leaves makes room")
        self.check(proxy.call(body), body)
        with clients[1] as client:
            client.sendall(data[-1:])
            self.assertTrue(client.recv(4096).startswith(b"HTTP/1.1 200 "))
        wait_until(lambda: proxy.metric("kvd_pd_proxy_body_bytes") == 0, "nothing is kept")

    def test_p5_answers_of_all_requests_are_kept_within_a_limit(self) -> None:
        self.engines(0, 1)
        most, stream, n = 256 << 10, 4 << 10, 8
        proxy = self.proxy(f"--limits.answers={most}", "--limits.answer=128KiB", f"--limits.stream={stream}")
        data = random.Random(1).randbytes(100_000)
        go = threading.Event()

        def answer(handler: Any, body: Any) -> None:
            handler.send_response(200)
            handler.send_header("Content-Length", str(len(data)))
            handler.end_headers()
            handler.wfile.write(data[:-1])
            go.wait(WAIT)
            handler.wfile.write(data[-1:])

        self.decode[0].answer = answer
        with concurrent.futures.ThreadPoolExecutor(n) as pool:
            answers = [pool.submit(proxy.call, b"", "/v1/embeddings") for _ in range(n)]

            def is_full() -> bool:
                self.assertLessEqual(proxy.metric("kvd_pd_proxy_answer_bytes"), most + n * (stream + (16 << 10)))
                return proxy.metric("kvd_pd_proxy_answers_passed_early_total") >= n - 2

            wait_until(is_full, "what finds no room is passed on")
            go.set()
            for one in answers:
                self.assertEqual((one.result().status, one.result().data == data), (200, True))
        wait_until(lambda: proxy.metric("kvd_pd_proxy_answer_bytes") == 0, "nothing is kept")
        self.assertEqual(proxy.metric("kvd_pd_proxy_requests"), 0)

    def test_p1_what_was_passed_on_early_is_not_sent_again(self) -> None:
        self.engines(0, 2)
        proxy = self.proxy("--limits.answer=64KiB")
        long = b"x" * 3_000_000
        for engine in self.decode:
            engine.answer = lambda handler, body: handler.say(503, long)
        answer = proxy.call(b"", "/v1/embeddings")
        self.assertEqual((answer.status, answer.data), (503, long))
        self.assertEqual([len(engine.requests) for engine in self.decode], [1, 1], "a long error is one: another engine is asked")

        def end_early(handler: Any, body: Any) -> None:
            handler.send_response(200)
            handler.send_header("Content-Length", str(len(long) + 1))
            handler.end_headers()
            handler.wfile.write(long)
            handler.die()

        for engine in self.decode:
            engine.answer = end_early
        answer = proxy.call(b"", "/v1/embeddings")
        self.assertEqual((answer.status, answer.complete, answer.data), (200, False, long))
        self.assertEqual(sum(len(engine.requests) for engine in self.decode), 3)

    def test_p5_a_body_is_kept_until_the_first_token(self) -> None:
        self.engines(1, 1)
        go = threading.Event()
        self.decode[0].answer = lambda handler, body: go.wait(WAIT) and self.decode[0].decode(handler, body)
        proxy = self.proxy()
        body = json.dumps(request(user="x" * 100_000)).encode()
        with self.post(proxy, body) as client:
            wait_until(lambda: self.decode[0].requests, "the engine has it")
            self.assertEqual(proxy.metric("kvd_pd_proxy_body_bytes"), len(body))
            self.decode[0].tokens = 1 << 30  # a stream without end
            go.set()
            wait_until(lambda: proxy.metric("kvd_pd_proxy_body_bytes") == 0, "it is not needed")
            self.assertEqual(proxy.metric("kvd_pd_proxy_requests"), 1)

    def test_p5_a_body_is_kept_until_its_engine_has_read_it(self) -> None:
        self.engines(0, 1)
        go = threading.Event()

        def begin(handler: Any) -> None:
            handler.begin_stream()
            handler.chunk(b"data: x\n\n")
            go.wait(WAIT)

        self.decode[0].before_body = begin
        self.decode[0].answer = lambda handler, body: handler.watch(WAIT)
        proxy = self.proxy()
        body = json.dumps(request(user="x" * 15_000_000)).encode()
        with self.post(proxy, body) as client:
            self.assertIn(b" 200 ", client.recv(4096))
            self.assertEqual(proxy.metric("kvd_pd_proxy_body_bytes"), len(body))
            go.set()
            wait_until(lambda: proxy.metric("kvd_pd_proxy_body_bytes") == 0, "it is not needed")
            self.assertEqual(proxy.metric("kvd_pd_proxy_requests"), 1)

    def test_p5_a_large_prompt_of_token_ids_takes_little_memory(self) -> None:
        self.engines(0, 1)
        proxy = self.proxy("--limits.tokens=3000000")
        self.assertEqual(proxy.call(request(prompt="a" * 15_750_000)).status, 200)  # what a text of that size takes, with this build's overhead
        text = most_kib(proxy)
        body = request(prompt=[12345] * 2_250_000)
        self.check(proxy.call(body), body)
        self.assertLess(most_kib(proxy), 2 * text)
        body["prompt"] += [1] * 800_000
        self.assertEqual(proxy.call(body).status, 413)

    def test_p5_slow_connections_are_closed_and_make_room(self) -> None:
        self.engines(0, 1)
        proxy = self.proxy("--limits.connections=8", "--limits.receive_time=3s")
        slow = [socket.create_connection(("127.0.0.1", proxy.port)) for _ in range(30)]
        for client in slow:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost")
        self.serves(proxy)  # while they are there
        for client in slow:
            client.settimeout(WAIT)
            try:
                while client.recv(4096):
                    pass
            except ConnectionError:
                pass
            client.close()
        wait_until(lambda: proxy.metric("kvd_pd_proxy_connections") == 1, "they are gone")

    def test_p5_a_connection_waits_longer_for_a_request_than_for_the_rest_of_one(self) -> None:
        self.engines(0, 1)
        default = subprocess.run([PROGRAM, "--options-page"], capture_output=True, text=True, check=True).stdout
        self.assertEqual(re.search(r"`limits.idle_time` \(.*; `(.*)`\)", default)[1], "11m")  # load balancers keep theirs for up to 10 minutes
        proxy = self.proxy("--limits.receive_time=100ms", "--limits.idle_time=1h")
        ask = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
        with socket.create_connection(("127.0.0.1", proxy.port), WAIT) as idle, socket.create_connection(("127.0.0.1", proxy.port), WAIT) as slow:
            idle.sendall(ask)
            self.assertIn(b" 200 ", idle.recv(4096))
            slow.sendall(ask[:-1])
            self.assertEqual(slow.recv(1), b"")
            idle.sendall(ask)
            self.assertIn(b" 200 ", idle.recv(4096))
        proxy = self.proxy("--limits.idle_time=100ms")

        def is_served_and_closed() -> bool:
            with contextlib.suppress(ConnectionError), socket.create_connection(("127.0.0.1", proxy.port), WAIT) as idle:
                idle.sendall(ask)
                return b" 200 " in idle.recv(4096) and not idle.recv(1)
            return False

        wait_until(is_served_and_closed, "a connection serves, and is closed when it is idle")

    def test_p10_bad_bodies_get_400_in_the_form_of_openai(self) -> None:
        self.engines(1, 1)
        proxy = self.proxy()
        bad = (b"", b"{", b"[]", b"null", b'{"prompt":}', b'{"prompt":[-1]}', b'{"prompt":[1,"a"]}', b'{"prompt":{}}', b'{"model":"m"}', b'{"prompt":"a"} x', b'{"prompt":"a","stream":3}', b'{"prompt":"\xff"}', b"[" * 3000, b'{"a":' * 3000)
        for text in bad:
            answer = proxy.call(text)
            self.assertEqual(answer.status, 400, text)
            self.assertEqual(json.loads(answer.data)["error"]["type"], "invalid_request_error")
        self.assertEqual(proxy.call(b'{"messages":"a"}', "/v1/chat/completions").status, 400)
        self.assertEqual(proxy.call(b'{"messages":[1]}', "/v1/chat/completions").status, 400)
        self.assertEqual(proxy.metric('kvd_pd_proxy_requests_total{outcome="malformed"}'), len(bad) + 2)
        for text in (b'{"prompt":"a","stream":true,"stream":false}', b'{"prompt":"a","kv_transfer_params":{},"kv_transfer\\u005fparams":{}}'):
            answer = proxy.call(text)
            self.assertEqual((answer.status, b"twice" in answer.data), (400, True))
        for path in ("/else", "/sleep", "/v1", "/v1/../sleep", "/v1/%2e%2e/sleep", "/v1/load_lora_adapter"):
            self.assertEqual(proxy.call(b"{}", path).status, 404, path)
        self.assertEqual(proxy.call(None, "/v1/models#x", "GET").status, 400)
        self.assertEqual(proxy.call(b"", "/health").status, 405)
        self.assertEqual(self.prefill[0].requests + self.decode[0].requests, [])

    def test_p6_garbage_ends_only_its_own_connection(self) -> None:
        self.engines(0, 1)
        proxy = self.proxy()
        seed = int(os.environ.get("KVD_TEST_SEED", "1"), 0)
        print(f"# seed: KVD_TEST_SEED={seed:#x}")
        rng = random.Random(seed)
        for _ in range(100):
            with socket.create_connection(("127.0.0.1", proxy.port)) as client:
                client.sendall(rng.choice((b"", b"POST /v1/completions HTTP/1.1\r\n", b"POST /v1/completions HTTP/1.1\r\nContent-Length: 99\r\n\r\n{")) + rng.randbytes(rng.randrange(200)))
        self.serves(proxy)

    def test_p10_metrics_are_well_formed(self) -> None:
        self.engines(1, 1)
        proxy = self.proxy()
        self.serves(proxy)
        text = proxy.call(None, "/metrics", "GET").data
        for line in text.decode().splitlines():
            self.assertRegex(line, r'^(# (HELP|TYPE) kvd_[a-z_]+ .+|kvd_[a-z_]+(\{[a-z]+="[^"]*"(,[a-z]+="[^"]*")*\})? [0-9.]+)$')
        self.assertIn(b"kvd_pd_proxy_first_byte_seconds_count 1", text)
        if promtool := shutil.which("promtool"):
            checked = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True)
            self.assertEqual((checked.returncode, checked.stdout + checked.stderr), (0, b""))
        for name in re.findall(rb"# TYPE (\S+) counter", text):
            self.assertTrue(name.endswith(b"_total"), name)
        self.assertNotRegex(text, rb"# TYPE \S*(milli|micro|nano)seconds")  # base units


class Http(Case):
    def test_p1_what_is_not_handed_over_goes_to_a_decode_engine_as_it_is(self) -> None:
        self.engines(1, 1)
        proxy = self.proxy()
        self.decode[0].answer = lambda handler, body: handler.say(207, b"\0any bytes", "text/x", {"Allow": "*"})
        sent = ((None, "/v1/models?a=%2F&b=c/../d", "GET", {}), (b"\xff\0" * 50_000, "/v1/embeddings", "POST", {"Content-Type": "x/y", "Content-Encoding": "gzip"}), (b"", "/v1/responses", "POST", {}), (None, "/v1/chat/completions", "OPTIONS", {"Origin": "http://a"}), (b"a", "/v1/files/%61", "PUT", {}), (None, "/v1/files/a", "DELETE", {}))
        for data, path, method, headers in sent:
            answer = proxy.call(data, path, method, headers)
            self.assertEqual((answer.status, answer.data, answer.headers.get("Content-Type"), answer.headers.get("Allow")), (207, b"\0any bytes", "text/x", "*"), path)
            got = self.decode[0].requests[-1]
            self.assertEqual((got["path"], got["method"], got["body"]), (path, method, data or b""))
            self.assertEqual({name: got["headers"].get(name) for name in headers}, headers)
        self.assertNotIn("Content-Type", got["headers"])
        self.assertEqual(proxy.metric('kvd_pd_proxy_decisions_total{choice="as_it_is"}'), len(sent))
        self.decode[0].answer = self.decode[0].serve
        self.serves(proxy, prompt=None, prompt_embeds="AAAA" * 100)
        body = request(user="stream")
        self.check(proxy.call(body, "/v1/responses", headers={"Content-Type": "application/json"}), body)
        self.assertEqual(self.prefill[0].requests, [])

    def test_p1_a_stream_of_another_call_may_be_longer_than_an_answer(self) -> None:
        self.engines(0, 1)
        self.decode[0].tokens = 40_000
        proxy = self.proxy("--limits.answer=64KiB", "--limits.stream=64KiB")
        body = request()
        self.check(proxy.call(body, "/v1/responses", headers={"Content-Type": "application/json"}), body, 40_000)

    def test_p1_headers_pass_both_ways(self) -> None:
        self.engines(1, 1)
        back = {"Retry-After": "7", "WWW-Authenticate": 'Bearer realm="a"', "Content-Encoding": "gzip", "X-Request-Id": "mine", "X-Empty": "", "Set-Cookie": "a=b"}
        hop = {"Connection": "x-hop", "X-Hop": "1", "Keep-Alive": "timeout=5"}

        def refuse(handler: Any, body: dict[str, Any]) -> None:
            wait_until(lambda: self.prefill[0].requests, "the prefill engine has the request too, which the refusal ends")
            handler.say(401, b"\x1f\x8b", "a/b", back | hop)

        self.decode[0].answer = refuse
        proxy = self.proxy()
        there = {"X-Request-Id": "mine", "X-data-parallel-rank": "3", "Accept-Encoding": "gzip", "traceparent": "00-1", "Authorization": "Bearer key", "X-Empty": ""}
        answer = proxy.call(request(), headers=there | {"Connection": "x-hop, close", "X-Hop": "1", "TE": "trailers"})
        self.assertEqual((answer.status, answer.data, answer.headers.get("Content-Type")), (401, b"\x1f\x8b", "a/b"))
        self.assertEqual({name: answer.headers.get(name) for name in back if name != "X-Empty"}, {name: back[name] for name in back if name != "X-Empty"})
        self.assertFalse({"X-Hop", "Keep-Alive"} & set(answer.headers))
        for engine in self.prefill + self.decode:
            got = engine.requests[0]["headers"]
            self.assertEqual({name: got.get(name) for name in there}, there | ({"Accept-Encoding": None} if engine.role == "prefill" else {}))
            self.assertFalse({"X-Hop", "TE", "Expect"} & set(got))
            self.assertEqual((got["Content-Type"], got["Host"]), ("application/json", f"127.0.0.1:{engine.port}"))

    def test_p5_a_connection_serves_answers_of_the_proxy_itself_too(self) -> None:
        self.engines(0, 1)
        self.decode[0].healthy = False
        proxy = self.proxy()
        wait_until(lambda: proxy.call(None, "/health", "GET").status == 503, "it is down")
        connection = proxy.connect()
        connection.connect()
        first = connection.sock
        for method, path, status, kind in (("GET", "/health", 503, "application/json"), ("HEAD", "/health", 503, "application/json"), ("GET", "/metrics", 200, "text/plain; version=0.0.4; charset=utf-8"), ("GET", "/else", 404, "application/json"), ("POST", "/health", 405, "application/json"), ("GET", "/health", 503, "application/json")):
            connection.request(method, path)
            response = connection.getresponse()
            data = response.read()
            self.assertEqual((response.status, response.getheader("Content-Type")), (status, kind))
            if status == 503 and method == "GET":
                self.assertEqual(json.loads(data)["error"]["type"], "overloaded_error")
            self.assertIs(connection.sock, first, path)
        connection.close()

    def test_p6_a_daemon_that_cannot_be_reached_is_said(self) -> None:
        self.engines(0, 1)
        with tempfile.TemporaryFile() as log:
            proxy = Proxy(PROGRAM, [], self.decode, "--kvd.socket=/nonexistent/kvd.sock", "--log.level=warn", log=log)
            self.addCleanup(proxy.stop)
            said = lambda: os.pread(log.fileno(), 1 << 16, 0)
            wait_until(lambda: b"/nonexistent/kvd.sock cannot be reached" in said(), "it says so")
            self.serves(proxy)

    def test_p1_what_is_expected_is_served_or_refused(self) -> None:
        self.engines(0, 1)
        proxy = self.proxy("--limits.body=64KiB")
        data = json.dumps(request()).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nExpect: %s\r\nContent-Length: %d\r\n\r\n"
        for expect, length, status in ((b"100-continue", len(data), b"100"), (b"100-continue", 70_000, b"413"), (b"more", len(data), b"417")):
            with socket.create_connection(("127.0.0.1", proxy.port)) as client:
                client.settimeout(WAIT)
                client.sendall(head % (expect, length))
                self.assertEqual(client.recv(12), b"HTTP/1.1 " + status)
                if status == b"100":
                    client.sendall(data)
                    got = b""
                    while piece := client.recv(65536):
                        got += piece
                    self.assertIn(b"HTTP/1.1 200 ", got)
        answer = proxy.call(b"\x1f\x8b", headers={"Content-Encoding": "gzip"})
        self.assertEqual((answer.status, answer.headers.get("Accept-Encoding")), (415, "identity"))
        self.check(proxy.call(request(), headers={"Content-Encoding": "identity"}), request())


class Chaos(Case):
    def test_p1_p4_random_faults_give_exact_tokens_or_an_error(self) -> None:
        self.engines(3, 2)
        proxy = self.proxy("--engine.prefill_timeout=300ms", "--engine.decode_timeout=2s", "--engine.decode_whole=2s", "--engine.decode_stall=300ms", "--engine.prefill_running=2", "--queue.deadline=1s")
        seed = int(os.environ.get("KVD_TEST_SEED", "1"), 0)
        print(f"# seed: KVD_TEST_SEED={seed:#x}")
        rng = random.Random(seed)

        def mean(engine):
            def answer(handler, body) -> None:
                fate = rng.random()
                if fate < 0.1:
                    handler.die()
                elif fate < 0.2:
                    handler.say(rng.choice((500, 429, 404)), b'{"error":{}}')
                elif fate < 0.23:
                    handler.watch(WAIT)
                elif fate < 0.3 and body.get("stream"):
                    engine.decode(handler, body, rng.randrange(20))
                    handler.die()
                else:
                    engine.serve(handler, body)

            return answer

        for engine in self.prefill + self.decode:
            engine.answer = mean(engine)
        outcomes = {"whole": 0, "error": 0, "cut": 0, "left": 0}
        lock = threading.Lock()

        def client(n: int) -> None:
            try:
                send_all(n)
            except Exception as error:
                with lock:
                    outcomes[repr(error)] = 1

        def send_all(n: int) -> None:
            mine = random.Random(seed * 1000 + n)
            for i in range(25):
                body = request(user=f"{n}.{i}", stream=mine.random() < 0.7)
                if mine.random() < 0.1:
                    with self.post(proxy, json.dumps(body).encode()):
                        time.sleep(mine.random() * 0.05)
                    outcome = "left"
                else:
                    answer = proxy.call(body)
                    if answer.status != 200:
                        outcome = "error" if answer.status in (404, 429, 500, 502, 503) else f"status {answer.status}"
                    elif not answer.complete:
                        text = text_of(answer.data)
                        outcome = "cut" if expected(body).startswith(text) and body["stream"] else "wrong"
                    else:
                        text = text_of(answer.data) if body["stream"] else json.loads(answer.data)["choices"][0]["text"]
                        outcome = "whole" if text == expected(body) else f"wrong {text}"
                with lock:
                    outcomes[outcome] = outcomes.get(outcome, 0) + 1

        threads = [threading.Thread(target=client, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print("#", outcomes)
        self.assertEqual(set(outcomes), {"whole", "error", "cut", "left"})
        self.assertGreater(outcomes["whole"], 50)
        wait_until(lambda: proxy.metric("kvd_pd_proxy_requests") == 0, "no request is left")
        for engine in self.prefill + self.decode:
            name = f'{{engine="{engine.url}",role="{engine.role}"}}'
            self.assertEqual(proxy.metric("kvd_pd_proxy_engine_requests" + name), 0)
            self.assertEqual(proxy.metric("kvd_pd_proxy_engine_backlog_seconds" + name), 0)
        self.assertEqual(proxy.metric("kvd_pd_proxy_queue_requests"), 0)


class OwnCaches(Case):
    def test_p9_a_request_goes_where_its_prompt_is(self) -> None:
        self.engines(1, 2)
        events = [Events(), Events()]
        for one in events:
            self.addCleanup(one.stop)
        proxy = self.proxy("--events.decode=" + ",".join(one.endpoint for one in events))
        for one in events:
            one.accept()

        def engine_metric(i: int, name: str) -> int:
            return proxy.metric(f'kvd_pd_proxy_engine_{name}{{engine="{self.decode[i].url}",role="decode"}}')

        def send() -> tuple[int, int, int]:
            self.serves(proxy)
            return len(self.prefill[0].requests), *(len(engine.requests) for engine in self.decode)

        self.assertEqual(send(), (1, 1, 0), "handed over, to the first of two that are alike")
        events[1].store(LONG, 16)
        wait_until(lambda: engine_metric(1, "cached_blocks") == 4, "the events have come")
        self.assertEqual(send(), (1, 1, 1), "computed by the one that has it")
        self.assertEqual(proxy.metric("kvd_pd_proxy_own_hit_tokens_total"), len(LONG))
        events[0].store(LONG[:16], 16)
        events[1].publish(dict(type="AllBlocksCleared"))
        wait_until(lambda: engine_metric(0, "cached_blocks") == 1 and engine_metric(1, "cached_blocks") == 0, "they are gone")
        self.assertEqual(send(), (2, 2, 1))
        events[1].store(LONG, 16)
        wait_until(lambda: engine_metric(1, "cached_blocks") == 4, "there again")
        events[1].number += 1
        events[1].publish()
        wait_until(lambda: engine_metric(1, "event_gaps_total") == 1, "a gap")
        self.assertEqual(engine_metric(1, "cached_blocks"), 0)
        events[1].peer.sendall(b"\x00\x01x")  # a message of one frame
        wait_until(lambda: engine_metric(1, "events_malformed_total") == 1, "no event")
        events[0].peer.close()
        wait_until(lambda: engine_metric(0, "cached_blocks") == 0, "nothing is known without a connection")
        events[0].number = 0  # the engine was started again
        events[0].accept()
        events[0].store(LONG, 16)
        wait_until(lambda: engine_metric(0, "cached_blocks") == 4, "it is known again")
        self.assertEqual(send(), (2, 3, 1))
        self.decode[0].healthy = False
        wait_until(lambda: engine_metric(0, "up") == 0 and engine_metric(0, "cached_blocks") == 0, "nothing is known of an engine that is down")
        events[0].accept()


if __name__ == "__main__":
    PROGRAM = os.environ.get("KV_TEST_BIN", "") and os.path.join(os.environ["KV_TEST_BIN"], os.path.basename(sys.argv[1])) or sys.argv[1]
    unittest.main(argv=sys.argv[:1] + sys.argv[2:], verbosity=2)
