"""What a request's kv_transfer_params allow to load and to save. Needs neither vLLM nor the module."""

from __future__ import annotations

import pathlib
import sys
import unittest
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from kvd_vllm import limits  # noqa: E402
from kvd_vllm.limits import ALL  # noqa: E402


class Limits(unittest.TestCase):
    def test_keys_of_native_offloading_limit_loads_and_saves(self) -> None:
        cpu, storage, remote = {"medium": "CPU"}, {"medium": "storage", "locality": "LOCAL"}, {"locality": "remote"}
        for params, found in (
            (None, (ALL, ALL, False)),
            ({"max_load_tokens": 0, "max_offload_tokens": 100}, (0, 100, False)),
            ({"max_load_tokens": 2**40}, (ALL, ALL, False)),
            ({"skip_read": True}, (0, ALL, False)),
            ({"skip_write": True, "max_load_tokens": 5}, (5, 0, False)),
            ({"kv_load_tiers": [cpu]}, (ALL, ALL, True)),
            ({"kv_load_tiers": [storage, cpu]}, (ALL, ALL, False)),
            ({"kv_load_tiers": [{}]}, (ALL, ALL, False)),
            ({"kv_load_tiers": [storage]}, (0, ALL, False)),  # everything comes through the pool
            ({"kv_load_tiers": []}, (0, ALL, True)),
            ({"kv_load_tiers": [remote]}, (0, ALL, True)),
        ):
            self.assertEqual(limits.find(SimpleNamespace(kv_transfer_params=params)), found, params)

    def test_what_is_wrong_is_no_limit_and_is_said_a_few_times(self) -> None:
        wrong: list[Any] = [-1, True, "5", 1.5]
        with self.assertLogs("vllm.kvd", "WARNING") as log:
            for value in wrong * 5:
                params = {"max_load_tokens": value, "max_offload_tokens": value, "skip_read": 1}
                self.assertEqual(limits.find(SimpleNamespace(kv_transfer_params=params)), (ALL, ALL, False))
            for tiers in ("CPU", [5], [{"medium": "GPU"}], [{"locality": 3}]):
                self.assertEqual(limits.find(SimpleNamespace(kv_transfer_params={"kv_load_tiers": tiers})), (ALL, ALL, False))
        self.assertEqual(len(log.output), limits.MOST_COMPLAINTS)
        self.assertEqual(limits.find(SimpleNamespace(kv_transfer_params=["max_load_tokens"])), (ALL, ALL, False))


if __name__ == "__main__":
    unittest.main()
