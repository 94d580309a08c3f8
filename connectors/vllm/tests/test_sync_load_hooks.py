"""When a hit is loaded synchronously: if no continuing request would wait for it (rig.py)."""

from __future__ import annotations

import unittest

from rig import Engines, Request, output, prompt


class Inside(Engines):
    def setUp(self) -> None:
        super().setUp()
        before = self.engine()
        if before.prefill(Request("stored", prompt(6, 128)), [1, 2, 3, 4]) == 0:  # of the first test
            before.saved(4)
        self.inner = self.engine(mode=0)
        self.asked = 0

    def inside(self) -> bool:
        """Of a hit that is refused again: it is in no step."""
        self.asked += 1
        request = Request(f"asks-{self.asked}", prompt(6, 128))
        tokens, is_async = self.inner.scheduler.match(request, 0)
        self.assertGreater(tokens, 0)
        self.inner.scheduler.finish_request(request, ([],))
        return not is_async

    def begin(self, *requests: Request) -> None:
        """The first 20 tokens of each: so few that the step is not timed, and any load may take longer than it."""
        for request in requests:
            self.assertEqual(self.inner.scheduler.match(request, 0), (0, False))
        self.inner.step(output(new=[(r.request_id, ([20 + i, 30 + i],), 0, 20) for i, r in enumerate(requests)]))

    def test_requests_wait_until_they_end(self) -> None:
        self.assertTrue(self.inside())
        running = [Request("one", prompt(60, 20)), Request("two", prompt(61, 20))]
        self.begin(*running)
        for request in running:
            self.assertFalse(self.inside())
            self.inner.scheduler.finish_request(request, ([],))
        self.assertTrue(self.inside())

    def test_a_request_for_one_token_waits_for_no_step_after_its_prompt(self) -> None:
        request = Request("single", prompt(62, 40), max_tokens=1)
        self.begin(request)
        self.assertFalse(self.inside())
        self.inner.step(output(cached=[("single", None, 20, 20)]))
        self.assertTrue(self.inside())
        self.inner.scheduler.finish_request(request, ([],))
        self.assertTrue(self.inside())

    def test_one_that_is_not_known_waits_as_others_do(self) -> None:
        self.inner.step(output(new=[("unknown", ([20, 30],), 0, 20)]))
        self.assertFalse(self.inside())
        self.inner.step(output())
        self.assertTrue(self.inside())


if __name__ == "__main__":
    unittest.main()
