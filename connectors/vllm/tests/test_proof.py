"""When an engine's weights are compared, and what they are called then. Needs vLLM's classes and torch; no engine runs."""

from __future__ import annotations

import hashlib
import pickle
import time
import unittest
import unittest.mock
from types import SimpleNamespace
from typing import Any

import torch

from kvd_vllm import connector, memory, proof
from kvd_vllm.errors import CircuitBreaker
from kvd_vllm.proof import OTHER, SAME, UNKNOWN, Answer


def digest(ranges: list[tuple[int, int]]) -> list[bytes]:
    import ctypes

    return [hashlib.md5(ctypes.string_at(address, size)).digest() for address, size in ranges]


class CPUDNNLGEMMHandler:
    """As vLLM's: weights that are packed for a library of the CPU."""


class Model(torch.nn.Module):
    def __init__(self, packs: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = torch.nn.Embedding(100, 8)
        self.linear = torch.nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("moe_workspace", torch.zeros(4))
        if packs:
            self.pack()

    def pack(self) -> None:
        handler = CPUDNNLGEMMHandler()
        self.linear.cpu_linear = lambda x: (handler, x)
        self.linear.weight = torch.nn.Parameter(torch.empty(0))


def runner_of(model: torch.nn.Module, **attributes: Any) -> Any:
    return SimpleNamespace(get_model=lambda: model, **attributes)


def memory_of(model: torch.nn.Module, rank: int = 0, **options: Any) -> memory.Memory:
    return memory.Memory(options.pop("runner", runner_of(model)), rank, digest, options.pop("moves_experts", False), "cpu")


def prove(found: memory.Memory, number: int = 1) -> Answer:
    found.prove(number)
    end = time.monotonic() + 60
    while not found.proofs and time.monotonic() < end:
        time.sleep(0.001)
    return found.proofs.pop()


class Weights(unittest.TestCase):
    def test_p1_what_was_not_changed_is_the_same(self) -> None:
        model = Model()
        found = memory_of(model)
        model.moe_workspace += 1  # no weights
        model.kv_cache = torch.zeros(8)
        self.assertEqual(prove(found).kind, SAME)

    def test_p1_every_changed_tensor_is_noticed(self) -> None:
        for name in ("embed.weight", "linear.weight", "linear.bias", "scale"):
            model = Model()
            found = memory_of(model)
            tensor = dict([*model.named_parameters(), *model.named_buffers()])[name]
            before = tensor.detach().clone()
            tensor.data.view(-1)[-1] += 0.5
            self.assertEqual(prove(found).kind, OTHER, name)
            tensor.data.copy_(before)
            self.assertEqual(prove(found).kind, SAME, name)

    def test_p1_new_tensors_count_by_what_they_hold(self) -> None:
        model = Model()
        found = memory_of(model)
        model.linear.weight = torch.nn.Parameter(model.linear.weight.detach().clone())
        self.assertEqual(prove(found).kind, SAME)
        model.linear.weight = torch.nn.Parameter(model.linear.weight.detach().t().contiguous().t())  # the same values, laid out in another way
        self.assertEqual(prove(found).kind, OTHER)

    def test_p1_views_with_gaps_are_read_as_they_are_seen(self) -> None:
        model = Model()
        wide = torch.zeros(8, 16)
        model.linear.weight = torch.nn.Parameter(wide[:, :8])
        found = memory_of(model)
        wide[:, 8:] = 1
        self.assertEqual(prove(found).kind, SAME)
        wide[0, 0] = 1
        self.assertEqual(prove(found).kind, OTHER)

    def test_p1_replicas_updated_alike_say_the_same(self) -> None:
        answers = []
        for _ in range(2):
            model = Model()
            found = memory_of(model)
            model.embed.weight.data += 1
            answers.append(prove(found))
        self.assertEqual(answers[0], answers[1])

    def test_p1_a_draft_model_counts(self) -> None:
        draft = Model()
        found = memory_of(Model(), runner=runner_of(Model(), drafter=SimpleNamespace(model=draft)))
        draft.scale += 1
        self.assertEqual(prove(found).kind, OTHER)

    def test_p1_packed_weights_are_those_of_the_load_while_they_are_the_same_objects(self) -> None:
        model = Model(packs=True)
        found = memory_of(model)
        answer = prove(found)
        self.assertEqual((answer.kind, answer.unread), (SAME, True))
        model.embed.weight.data += 1
        answer = prove(found)
        self.assertEqual((answer.kind, answer.unread), (OTHER, True))
        model.pack()
        self.assertEqual(prove(found).kind, UNKNOWN)

    def test_p1_what_cannot_be_read_is_unknown(self) -> None:
        hidden = Model()
        hidden.linear.weight = torch.nn.Parameter(torch.empty(0))
        for found in (memory_of(hidden), memory_of(Model(), runner=None), memory_of(Model(), moves_experts=True), memory_of(Model().to("meta"))):
            self.assertNotEqual(found.reason, "")
            self.assertEqual(prove(found).kind, UNKNOWN)

    def test_p7_a_digest_that_fails_is_unknown(self) -> None:
        found = memory_of(Model())
        found.digest = unittest.mock.Mock(side_effect=ValueError("the device has failed"))
        answer = prove(found)
        self.assertEqual(answer.kind, UNKNOWN)
        self.assertIn("the device has failed", answer.reason)


class Names(unittest.TestCase):
    def test_p1_a_name_follows_from_all_ranks_and_what_they_could_not_read(self) -> None:
        same, other = [Answer(1, rank, SAME, "s") for rank in range(2)], [Answer(1, rank, OTHER, f"o{rank}") for rank in range(2)]

        def name(answers: list[Answer], base: str = "files:1", kind: str = "k") -> str:
            return proof.name_of(answers, base, kind).text

        self.assertEqual(name(same), "files:1")
        mixed = [same[0], other[1]]
        names = [name(other), name(mixed), name(other, kind="tp2"), name([Answer(1, 0, OTHER, "o0", unread=True), other[1]])]
        self.assertEqual(len(set(names)), 4)
        self.assertTrue(all(text.startswith("memory:") for text in names))
        self.assertEqual(name(other), name(other[::-1]))
        self.assertEqual(name(other), name(other, base="files:2"))  # all of it was read
        unread = [Answer(1, 0, OTHER, "o0", unread=True)]
        self.assertNotEqual(name(unread), name(unread, base="files:2"))

    def test_p1_what_is_unknown_gets_a_name_of_its_own(self) -> None:
        answers = [Answer(1, 0, SAME, "s"), Answer(1, 1, UNKNOWN, reason="packed")]
        first, second = (proof.name_of(answers, "files:1", "k") for _ in range(2))
        self.assertNotEqual(first.text, second.text)
        self.assertIn("packed", first.private)


class Engine:
    """vLLM's scheduler as far as it is watched, a scheduler half with a C half that only records, and ranks that answer."""

    def __init__(self, ranks: int = 1) -> None:
        self.c = unittest.mock.Mock()
        self.c.build_meta.side_effect = lambda out: connector.KvdMetadata(b"m")
        half = self.half = connector.KvdConnector.__new__(connector.KvdConnector)
        half.__dict__.update(_breaker=CircuitBreaker(connector.logger), _c=self.c, _reason="", _half="scheduler", _space=SimpleNamespace(foreign=False, device="cpu"), _seed_checked=False)
        half.__dict__.update(get_num_new_matched_tokens=self.c.match, build_connector_meta=self.c.build_meta, update_connector_output=self.c.take_output)
        self.naming = half._naming = proof.Naming(half, self.c, ranks, "k", connector.KvdProvingMetadata)
        self.pool = SimpleNamespace(reset_prefix_cache=lambda: True)
        self.bind()

    def set_pause_state(self, state: str) -> None:
        self.paused = state

    def bind(self) -> None:
        self.half.bind_gpu_block_pool(self.pool)

    def step(self, *answers: Answer) -> Any:
        meta = self.half.build_connector_meta(None)
        meta = pickle.loads(pickle.dumps(meta))
        self.half.update_connector_output(SimpleNamespace(kv_connector_worker_meta=connector.KvdReports([], list(answers)), invalid_block_ids=set()))
        return meta

    def names(self) -> list[str]:
        return [call.args[0] for call in self.c.set_weights.call_args_list]


class Proofs(unittest.TestCase):
    def setUp(self) -> None:
        self.engine = Engine()
        self.engine.naming.begin("files:1")

    def test_p1_the_first_request_after_a_reset_waits_for_a_proof(self) -> None:
        engine, request = self.engine, SimpleNamespace(is_finished=lambda: False)
        self.assertTrue(engine.pool.reset_prefix_cache())
        engine.c.suspend.assert_called_once_with()
        self.assertNotIsInstance(engine.step(), connector.KvdProvingMetadata)  # nobody has asked yet
        engine.half.on_new_request(request)
        engine.c.add_request.assert_not_called()
        self.assertEqual(engine.half.get_num_new_matched_tokens(request, 0), (None, False))
        meta = engine.step()
        self.assertEqual((type(meta), meta.message, meta.number), (connector.KvdProvingMetadata, b"m", 1))
        self.assertEqual(engine.half.get_num_new_matched_tokens(request, 0), (None, False))
        self.assertNotIsInstance(engine.step(Answer(1, 0, SAME, "s")), connector.KvdProvingMetadata)
        self.assertEqual(engine.names(), ["files:1", "files:1"])
        engine.c.add_request.assert_called_once_with(request)
        self.assertIs(engine.half.get_num_new_matched_tokens, engine.c.match)
        self.assertIs(engine.half.build_connector_meta, engine.c.build_meta)

    def test_p1_hooks_that_others_have_wrapped_stay_wrapped(self) -> None:
        half, seen = self.engine.half, []
        for name in ("get_num_new_matched_tokens", "build_connector_meta", "update_connector_output"):
            setattr(half, name, lambda *args, inner=getattr(half, name), name=name: seen.append(name) or inner(*args))
        before = half.get_num_new_matched_tokens
        for _ in range(2):
            self.engine.pool.reset_prefix_cache()
        half.get_num_new_matched_tokens(None, 0)
        self.engine.step()
        self.engine.step(Answer(1, 0, SAME, "s"))
        self.assertEqual(seen, ["build_connector_meta", "update_connector_output"] * 2)
        self.assertIs(half.get_num_new_matched_tokens, before)

    def test_p1_every_way_to_a_reset_is_seen(self) -> None:
        for cause in (lambda e: e.pool.reset_prefix_cache(), lambda e: e.set_pause_state("paused"), lambda e: e.half.reset_cache()):
            engine = Engine()
            engine.naming.begin("files:1")
            cause(engine)
            engine.c.suspend.assert_called_once_with()
        self.assertEqual(engine.half.reset_cache(), True)

    def test_p1_other_weights_get_the_name_of_what_they_are(self) -> None:
        engine = self.engine
        engine.pool.reset_prefix_cache()
        engine.half.get_num_new_matched_tokens(None, 0)
        engine.step(Answer(1, 0, OTHER, "o"))
        self.assertEqual(engine.names()[1], proof.name_of([Answer(1, 0, OTHER, "o")], "files:1", "k").text)
        engine.pool.reset_prefix_cache()  # and back
        engine.half.get_num_new_matched_tokens(None, 0)
        engine.step(Answer(2, 0, SAME, "s"))
        self.assertEqual(engine.names()[2], "files:1")

    def test_p1_an_answer_of_before_another_reset_does_not_count(self) -> None:
        engine = self.engine
        engine.pool.reset_prefix_cache()
        engine.half.get_num_new_matched_tokens(None, 0)
        engine.step()
        engine.pool.reset_prefix_cache()
        engine.step(Answer(1, 0, SAME, "s"))
        engine.half.get_num_new_matched_tokens(None, 0)
        self.assertEqual(engine.step(Answer(1, 0, SAME, "s")).number, 2)
        self.assertEqual(engine.names(), ["files:1"])
        engine.step(Answer(2, 0, SAME, "s"))
        self.assertEqual(engine.names(), ["files:1", "files:1"])

    def test_p1_all_ranks_must_answer(self) -> None:
        engine = Engine(ranks=2)
        engine.naming.begin("files:1")
        engine.pool.reset_prefix_cache()
        engine.half.get_num_new_matched_tokens(None, 0)
        engine.step(Answer(1, 1, SAME, "s"))
        self.assertEqual(engine.names(), ["files:1"])
        engine.step(Answer(1, 0, SAME, "s"))
        self.assertEqual(engine.names(), ["files:1", "files:1"])

    def test_p1_a_reset_before_the_files_are_digested_waits_for_both(self) -> None:
        engine = Engine()
        engine.pool.reset_prefix_cache()
        engine.half.get_num_new_matched_tokens(None, 0)
        engine.step(Answer(1, 0, SAME, "s"))
        self.assertEqual(engine.names(), [])
        engine.naming.begin("files:1")
        self.assertEqual(engine.names(), [])
        engine.step()
        self.assertEqual(engine.names(), ["files:1"])

    def test_p5_ranks_that_do_not_answer_cost_a_name_and_not_the_engine(self) -> None:
        engine = self.engine
        engine.c.match.return_value = (0, False)
        engine.pool.reset_prefix_cache()
        engine.half.get_num_new_matched_tokens(None, 0)
        with unittest.mock.patch.object(proof, "DEADLINE_S", 0.0):
            time.sleep(0.001)
            self.assertEqual(engine.half.get_num_new_matched_tokens("r", 7), (0, False))
        engine.c.match.assert_called_once_with("r", 7)
        self.assertTrue(engine.names()[1].startswith("unknown:"))

    def test_p7_a_request_that_has_ended_meanwhile_is_forgotten(self) -> None:
        engine = self.engine
        engine.pool.reset_prefix_cache()
        engine.half.on_new_request(SimpleNamespace(is_finished=lambda: True))
        engine.half.get_num_new_matched_tokens(None, 0)
        engine.step(Answer(1, 0, SAME, "s"))
        engine.c.add_request.assert_not_called()

    def test_p7_a_half_that_is_off_asks_for_nothing(self) -> None:
        engine = self.engine
        engine.half._reason = "another space"
        engine.pool.reset_prefix_cache()
        self.assertEqual(engine.half.get_num_new_matched_tokens(None, 0), (0, False))
        engine.half.on_new_request("r")
        self.assertEqual(engine.naming.waiting, [])

    def test_p7_an_error_is_never_raised_into_the_engine(self) -> None:
        engine = self.engine
        engine.c.suspend.side_effect = RuntimeError("broken")
        self.assertTrue(engine.pool.reset_prefix_cache())
        self.assertNotEqual(engine.half._reason, "")
        engine.c.set_enabled.assert_called_with(False)

    def test_p1_reports_of_ranks_are_gathered(self) -> None:
        first, second = (connector.KvdReports([bytes([rank])], [Answer(1, rank, SAME, "s")]) for rank in range(2))
        together = pickle.loads(pickle.dumps(first.aggregate(second)))
        self.assertEqual([answer.rank for answer in together.proofs], [0, 1])
        self.assertEqual(together.reports, [b"\0", b"\1"])


class Ranks(unittest.TestCase):
    def test_p1_a_rank_answers_once_when_it_is_asked(self) -> None:
        half = connector.KvdConnector.__new__(connector.KvdConnector)
        c = unittest.mock.Mock()
        c.take_report.return_value = None
        half.__dict__.update(_c=c, _loaded=memory_of(Model()), build_connector_worker_meta=c.take_report)
        half._prove(connector.KvdMetadata(b""))
        self.assertIs(half.build_connector_worker_meta, c.take_report)
        half._prove(connector.KvdProvingMetadata(b"", 7))
        end, report = time.monotonic() + 60, None
        while report is None and time.monotonic() < end:
            report = half.build_connector_worker_meta()
        self.assertEqual([(answer.number, answer.kind) for answer in report.proofs], [(7, SAME)])
        self.assertIs(half.build_connector_worker_meta, c.take_report)


if __name__ == "__main__":
    unittest.main()
