"""Where the layers of pipeline stages lie in a block, on configurations made by hand, grouped by vLLM itself. Needs vLLM's classes and torch; no engine runs."""

from __future__ import annotations

import os
import unittest
import unittest.mock
from types import SimpleNamespace
from typing import Any

import test_identity as made
import torch
from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowSpec

from kvd_vllm import connector, identity, proof
from kvd_vllm.errors import Declined

NAME = "model.layers.{}.self_attn.attn"
FULL, WINDOW = "full_attention", "sliding_attention"


class Stages(unittest.TestCase):
    setUp, describe = made.Configs.setUp, made.Configs.describe

    def config(self, layers: int, count: int, device: str = "cpu", ranks: int = 1, types: list[str] | None = None) -> Any:
        config = made.Configs.config(self, device)  # type: ignore[arg-type]
        config.parallel_config.pipeline_parallel_size, config.parallel_config.tensor_parallel_size = count, ranks
        config.model_config.get_total_num_hidden_layers = lambda: layers
        config.model_config.hf_text_config.layer_types = types
        config.model_config.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        config.speculative_config = None
        config.scheduler_config = SimpleNamespace(disable_hybrid_kv_cache_manager=False)
        config.cache_config.get_resolved_kv_cache_layout = lambda: SimpleNamespace(is_block_outermost=False)
        return config

    def caches(self, specs: list[Any], sizes: tuple[int, ...]) -> list[Any]:
        """Of each stage, as vLLM does it: groups of all layers, then of each those that the stage has."""
        groups = get_kv_cache_groups(self.config(len(specs), 1), {NAME.format(i): one for i, one in enumerate(specs)})
        found, first = [], 0
        for size in sizes:
            own = {NAME.format(i) for i in range(first, first + size)}
            parts = [SimpleNamespace(layer_names=[name for name in group.layer_names if name in own], kv_cache_spec=group.kv_cache_spec) for group in groups]
            found.append(SimpleNamespace(kv_cache_groups=parts, num_blocks=64))
            first += size
        return found

    def spaces(self, specs: list[Any], sizes: tuple[int, ...], device: str = "cpu", ranks: int = 1, types: list[str] | None = None, heads: int = 8) -> list[identity.Space]:
        """Of each stage. The scheduler half has that of the first."""
        config = self.config(len(specs), len(sizes), device, ranks, types)
        if device == "cuda":
            config.model_config.get_total_num_kv_heads = lambda: heads
        with unittest.mock.patch.dict(os.environ, VLLM_PP_LAYER_PARTITION=",".join(map(str, sizes))):
            found = [self.describe(config, cache) for cache in self.caches(specs, sizes)]
        self.assertEqual(len({space.digest() for space in found}), 1)
        self.assertEqual([space.stage for space in found], list(range(len(sizes))))
        return found

    def must_cover(self, space: identity.Space) -> None:
        """Every layer of every head has one writer, as the daemon demands; and each writes what it holds."""
        self.assertEqual(len(space.writers()), len(space.groups) * space.world)
        for group, blocks in enumerate(space.blocks):
            own = [space.saved(group, rank) for rank in range(space.world)]
            cells = [(head, layer) for _, head, heads, first, count in own for head in range(head, head + heads) for layer in range(first, first + count)]
            self.assertEqual(sorted(cells), [(head, layer) for head in range(blocks.block.heads) for layer in range(blocks.block.layers)])
            for rank, (_, head, heads, first, count) in enumerate(own):
                held = space.held(group, rank)
                self.assertEqual((head, heads), held[1:3])
                self.assertTrue(held[3] <= first and first + count <= sum(held[3:]))

    def test_stages_of_any_sizes_share_the_space_of_one(self) -> None:
        for device, one in (("cpu", made.spec()), ("cuda", made.gpu_spec())):
            whole = self.spaces([one] * 7, (7,), device)[0]
            for sizes, ranges in (((3, 4), [(0, 3), (3, 4)]), ((1, 6), [(0, 1), (1, 6)]), ((2, 3, 2), [(0, 2), (2, 3), (5, 2)])):
                space = self.spaces([one] * 7, sizes, device)[0]
                self.assertEqual(space.identity, whole.identity)
                self.assertEqual([space.held(0, rank)[3:] for rank in range(space.world)], ranges)
                self.assertEqual(space.world, len(sizes))
                self.must_cover(space)

    def test_a_rank_of_other_stages_than_the_scheduler_has_is_not_served(self) -> None:
        ours, theirs = self.spaces([made.spec()] * 6, (3, 3))[0], self.spaces([made.spec()] * 6, (2, 4))[1]
        self.assertEqual(ours.identity, theirs.identity)
        half = made.half_of(_space=ours)
        self.assertEqual(half._find_mismatch(connector.KvdHandshake(space=theirs.digest(), files=theirs.weights.fingerprint())), "another space")

    def test_a_rank_of_another_node_is_not_served(self) -> None:
        space = self.spaces([made.spec()] * 4, (2, 2))[0]
        half = made.half_of(_space=space)
        for node, word in ((connector._node(), ""), ("", ""), ("another", "another node")):
            said = half._find_mismatch(connector.KvdHandshake(space=space.digest(), files=space.weights.fingerprint(), node=node))
            self.assertTrue(said == "" if word == "" else word in said, said)

    def test_tensor_parallel_ranks_lie_within_stages(self) -> None:
        two = self.spaces([made.gpu_spec(num_kv_heads=4)] * 6, (2, 4), "cuda", 2)[1]
        self.assertEqual(two.identity, self.spaces([made.gpu_spec()] * 6, (6,), "cuda")[0].identity)
        self.assertEqual([two.held(0, rank)[1:] for rank in range(4)], [(0, 4, 0, 2), (4, 4, 0, 2), (0, 4, 2, 4), (4, 4, 2, 4)])
        self.must_cover(two)
        self.assertEqual((two.tensor_ranks, two.kind()), (2, "tp2 pp2"))
        for rank in (0, 1):
            with self.assertRaisesRegex(Declined, "stage 1"):
                two.check_rank(rank)
        two.check_rank(2)
        opaque = self.spaces([made.spec()] * 6, (2, 4), ranks=2)[0]
        self.assertEqual(opaque.identity, self.spaces([made.spec()] * 6, (6,), ranks=2)[0].identity)
        self.assertNotEqual(opaque.identity, self.spaces([made.spec()] * 6, (2, 4))[0].identity)
        self.assertEqual([opaque.held(0, rank)[3:] for rank in range(4)], [(0, 2), (6, 2), (2, 4), (8, 4)])
        self.must_cover(opaque)

    def test_ranks_that_hold_copies_share_out_the_layers_of_their_stage(self) -> None:
        four = self.spaces([made.gpu_spec(num_kv_heads=1)] * 7, (3, 4), "cuda", 4, heads=2)[0]
        self.assertEqual(four.identity, self.spaces([made.gpu_spec(num_kv_heads=2)] * 7, (7,), "cuda", heads=2)[0].identity)
        self.assertEqual([one[1:] for one in four.writers()], [(0, 1, 0, 1), (0, 1, 1, 2), (1, 1, 0, 1), (1, 1, 1, 2), (0, 1, 3, 2), (0, 1, 5, 2), (1, 1, 3, 2), (1, 1, 5, 2)])
        self.must_cover(four)
        latent = made.gpu_spec(MLAAttentionSpec, block_size=64, num_kv_heads=1, head_size=576)
        self.must_cover(self.spaces([latent] * 7, (2, 5), "cuda", 2)[0])
        with self.assertRaisesRegex(Declined, "layers of a stage"):
            self.spaces([latent] * 7, (1, 6), "cuda", 2)

    def windows(self, types: list[str], sizes: tuple[int, ...]) -> list[identity.Space]:
        kinds = {FULL: made.spec(), WINDOW: made.spec(SlidingWindowSpec, sliding_window=512)}
        return self.spaces([kinds[one] for one in types], sizes, types=types)

    def test_windows_share_the_space_of_one_stage(self) -> None:
        types = [WINDOW, WINDOW, FULL] * 4
        whole, halves = self.windows(types, (12,))[0], self.windows(types, (6, 6))
        self.assertEqual(whole.identity, halves[0].identity)
        self.assertEqual([blocks.counts for blocks in halves[1].blocks], [(2, 2)] * 3)
        self.assertEqual({group.layers for group in halves[1].groups}, {(NAME.format(i), NAME.format(i + 3)) for i in (6, 7, 8)})
        for sizes in ((5, 7), (4, 8)):
            cut = self.windows(types, sizes)[0]  # each group has its own number of layers in a stage
            self.assertEqual(cut.identity, whole.identity)
            self.must_cover(cut)
        self.assertEqual(sorted(blocks.counts for blocks in self.windows(types, (5, 7))[0].blocks), [(1, 3), (2, 2), (2, 2)])

    def test_groups_that_are_not_proved_are_declined(self) -> None:
        window, full = made.spec(SlidingWindowSpec, sliding_window=512), made.spec()
        six, types = [window, window, full] * 2, [WINDOW, WINDOW, FULL] * 2
        state = made.cache_config((made.spec(), 1), (made.state_spec(), 3))
        renamed, drafted, swapped = (self.caches([full] * 4, (2, 2))[0] for _ in range(3))
        renamed.kv_cache_groups[0].layer_names[1] = "model.1.layers.1.attn"
        drafted.kv_cache_groups[0].layer_names.append(NAME.format(4))
        swapped.kv_cache_groups[0].layer_names.reverse()
        own = self.caches(six, (3, 3))[0]
        own.kv_cache_groups[0], own.kv_cache_groups[1] = own.kv_cache_groups[1], own.kv_cache_groups[0]
        for config, cache, word in (
            (self.config(6, 2), self.caches(six, (3, 3))[0], "names the type of each layer"),
            (self.config(6, 2, types=types[::-1]), self.caches(six, (3, 3))[0], "of different kinds"),
            (self.config(6, 2, types=types), own, "groups of a pipeline stage"),
            (self.config(4, 2), renamed, "must have one number"),
            (self.config(4, 2), drafted, "not those which"),
            (self.config(4, 2), swapped, "groups of a pipeline stage"),
            (self.config(8, 2), self.caches([full] * 6, (3, 3))[0], "not those which"),
            (self.config(4, 2), state, "states are not served over"),
        ):
            with self.assertRaisesRegex(Declined, word):
                self.describe(config, cache)
        for sizes in ((2, 4), (4, 2)):  # the first stage itself, and another one
            with self.assertRaisesRegex(Declined, "no layer of some"):
                self.windows(types, sizes)
        contexts = self.config(4, 2)
        contexts.parallel_config.prefill_context_parallel_size = 2
        with self.assertRaisesRegex(Declined, "prefill_context_parallel_size"):
            self.describe(contexts, self.caches([full] * 4, (2, 2))[0])

    def test_ranks_are_counted_through_stages_and_not_through_replicas(self) -> None:
        config = self.config(4, 2, ranks=2)
        for rank, expected in ((0, 0), (3, 3), (4, 0), (7, 3)):
            config.parallel_config.rank = rank
            self.assertEqual(connector._rank(config), expected)

    def test_every_stage_must_say_what_its_weights_are(self) -> None:
        same = [proof.Answer(1, rank, proof.SAME, str(rank)) for rank in range(2)]
        self.assertEqual(proof.name_of(same, "files:a", "tp1 pp2").text, "files:a")
        other = [same[0], proof.Answer(1, 1, proof.OTHER, "x")]
        self.assertNotEqual(proof.name_of(other, "files:a", "tp1 pp2").text, proof.name_of(other, "files:a", "tp2").text)


if __name__ == "__main__":
    unittest.main()
