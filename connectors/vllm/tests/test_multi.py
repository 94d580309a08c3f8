"""kvd below vLLM's own MultiConnector, with a child that takes nothing foreign, as NixlConnector does. Needs vLLM's classes; no engine runs."""

from __future__ import annotations

import pickle
import unittest
from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from kvd_vllm import multi


class Said(KVConnectorHandshakeMetadata):
    """A rank's handshake."""

    def __init__(self, who: str, rank: int) -> None:
        self.who, self.rank = who, rank


class Child:
    """Of the scheduler and of a rank at once. A strict one takes no foreign handshake and no parameters that name another connector's hand-over."""

    def __init__(self, who: str, silent: bool = False) -> None:
        self.who, self.silent = who, silent
        self.rank = 0
        self.heard: list[dict[Any, Any]] = []
        self.asked: list[Any] = []

    def get_handshake_metadata(self) -> Said | None:
        return None if self.silent else Said(self.who, self.rank)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[Any, Any]) -> None:
        if any(said.who != self.who for said in metadata.values()):
            raise ValueError(f"{self.who} has got a foreign handshake")
        self.heard.append({rank: said.rank for rank, said in metadata.items()})

    set_xfer_handshake_metadata = set_xfer_handshake_metadata_pp_aware

    def on_new_request(self, request: Any) -> None:
        self.asked.append(request.kv_transfer_params)


def parent_of(*children: Child) -> Any:
    """vLLM's, without its constructor."""
    made = MultiConnector.__new__(MultiConnector)
    made._connectors = list(children)
    return made


def said_by_ranks(parent: Any, ranks: int) -> dict[tuple[int, int], Any]:
    """What the engine collects: it crosses processes."""
    out = {}
    for rank in range(ranks):
        for child in parent._connectors:
            child.rank = rank
        out[0, rank] = pickle.loads(pickle.dumps(parent.get_handshake_metadata()))
    return out


class Handshakes(unittest.TestCase):
    def test_each_child_hears_its_own_ranks_in_every_order(self) -> None:
        for order in (("kvd", "nixl"), ("nixl", "kvd"), ("other", "kvd", "nixl")):
            for ranks in (1, 4):
                children = [Child(who) for who in order]
                parent = parent_of(*children)
                self.assertTrue(multi.separate_children(parent, True))
                parent.set_xfer_handshake_metadata_pp_aware(said_by_ranks(parent, ranks))
                for child in children:
                    self.assertEqual(child.heard, [{(0, rank): rank for rank in range(ranks)}], order)

    def test_a_silent_child_hears_nothing_foreign(self) -> None:
        silent, loud = Child("silent", silent=True), Child("loud")
        parent = parent_of(silent, loud)
        self.assertTrue(multi.separate_children(parent, True))
        parent.set_xfer_handshake_metadata({rank: said for (_, rank), said in said_by_ranks(parent, 2).items()})
        self.assertEqual((silent.heard, loud.heard), ([{}], [{0: 0, 1: 1}]))

    def test_without_it_a_child_hears_foreign_ones(self) -> None:
        parent = parent_of(Child("kvd"), Child("nixl"))
        with self.assertRaises(ValueError):
            parent.set_xfer_handshake_metadata_pp_aware(said_by_ranks(parent, 1))

    def test_ranks_that_could_not_change_their_parent_are_heard_as_vllm_does_it(self) -> None:
        parent = parent_of(first := Child("nixl"), second := Child("nixl"))
        multi.separate_children(parent, True)
        parent.set_xfer_handshake_metadata_pp_aware({(0, 0): Said("nixl", 0)})
        self.assertEqual((first.heard, second.heard), ([{(0, 0): 0}], [{(0, 0): 0}]))

    def test_two_children_of_kvd_teach_their_parent_once(self) -> None:
        parent = parent_of(first := Child("kvd"), second := Child("kvd"))
        for _ in range(2):
            self.assertTrue(multi.separate_children(parent, True))
        parent.set_xfer_handshake_metadata_pp_aware(said_by_ranks(parent, 1))
        self.assertEqual((first.heard, second.heard), ([{(0, 0): 0}], [{(0, 0): 0}]))
        parent.on_new_request(request := SimpleNamespace(kv_transfer_params={"do_remote_decode": True, "transfer_id": "t"}))
        self.assertEqual(first.asked + second.asked, [{"transfer_id": "t", "transfer_sends": True}] * 2)
        self.assertIs(second.asked[0], request.kv_transfer_params)

    def test_a_parent_of_another_build_stays_as_it_is(self) -> None:
        parent = SimpleNamespace(children=[])
        with self.assertLogs(multi.logger, "WARNING"):
            self.assertFalse(multi.separate_children(parent, True))
        self.assertEqual(vars(parent), {"children": []})

    def test_a_parent_is_found_from_its_constructor_only(self) -> None:
        class Inner:
            def __init__(self) -> None:
                self.parent = multi.parent()

        class Other:
            def __init__(self) -> None:
                self.inner = Inner()

        made = type("MultiConnector", (), {"__init__": lambda self: setattr(self, "inner", Inner())})()
        self.assertIs(made.inner.parent, made)
        self.assertIsNone(Other().inner.parent)


class Requests(unittest.TestCase):
    def ask(self, params: Any, claims: bool = True) -> Any:
        """What the first child sees."""
        parent = parent_of(first := Child("nixl"), Child("kvd"))
        multi.separate_children(parent, claims)
        parent.on_new_request(SimpleNamespace(kv_transfer_params=params))
        return first.asked[0]

    def test_what_names_kvd_is_shown_to_no_other_child(self) -> None:
        theirs = {"remote_engine_id": "e", "remote_block_ids": [[1]], "remote_host": "h", "remote_port": 1}
        for sends in (True, False):
            given = {"do_remote_decode": sends, "do_remote_prefill": not sends, "transfer_id": "t", "transfer_peer": "n"} | theirs
            self.assertEqual(self.ask(dict(given)), {"transfer_id": "t", "transfer_peer": "n", "transfer_sends": sends})
            self.assertEqual(self.ask(dict(given), claims=False), given)

    def test_what_does_not_name_kvd_is_untouched(self) -> None:
        for params in (None, {}, {"do_remote_decode": True}, {"do_remote_prefill": True, "transfer_id": None, "remote_port": 1}, ["transfer_id"]):
            self.assertIs(self.ask(params), params)


if __name__ == "__main__":
    unittest.main()
