"""What decides who may share a block, on configurations made by hand. Needs vLLM's classes and torch; no engine runs."""

from __future__ import annotations

import copy
import os
import pathlib
import re
import tempfile
import unittest
import unittest.mock
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec, UniformTypeKVCacheSpecs

from kvd_vllm import _kvd, compat, connector, identity, metrics, options
from kvd_vllm.errors import CircuitBreaker, Declined


def spec(kind: Any = FullAttentionSpec, **fields: Any) -> Any:
    return kind(**{**dict(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.float32), **fields})


def state_spec(**fields: Any) -> Any:
    """Of pages as large as spec()'s."""
    return MambaSpec(**{**dict(block_size=32, shapes=((3, 8), (2, 4, 4)), dtypes=(torch.float32,) * 2, mamba_cache_mode="align", page_size_padded=spec().page_size_bytes), **fields})


def cache_config(*groups: tuple[Any, int], num_blocks: int = 64) -> Any:
    made = [SimpleNamespace(layer_names=[f"layers.{g}.{i}" for i in range(n)], kv_cache_spec=s) for g, (s, n) in enumerate(groups)]
    return SimpleNamespace(kv_cache_groups=made, num_blocks=num_blocks)


def gpu_spec(kind: Any = FullAttentionSpec, **fields: Any) -> Any:
    return spec(kind, **{**dict(block_size=16, num_kv_heads=8, head_size=128, dtype=torch.bfloat16), **fields})


def half_of(**attributes: Any) -> Any:
    """A connector that has not started."""
    half = connector.KvdConnector.__new__(connector.KvdConnector)
    half.__dict__.update(_breaker=CircuitBreaker(connector.logger), **attributes)
    return half


class Configs(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = pathlib.Path(folder.name) / "tiny"
        self.path.mkdir()
        (self.path / "config.json").write_text("{}")
        (self.path / "model.safetensors").write_bytes(os.urandom(3 << 20))
        self.compat = compat.probe() | {"hash_sizes": None}  # takes a whole configuration

    def config(self, device: str = "cpu") -> Any:
        hf = SimpleNamespace(rope_theta=10000.0, max_position_embeddings=4096)
        return SimpleNamespace(
            model_config=SimpleNamespace(model=str(self.path), hf_config=hf, hf_text_config=hf, dtype=torch.float32, quantization=None, revision=None, seed=0, hf_overrides={}, max_model_len=2048),
            cache_config=SimpleNamespace(cache_dtype="auto", prefix_caching_hash_algo="sha256", calculate_kv_scales=False),
            parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1, decode_context_parallel_size=1),
            device_config=SimpleNamespace(device_type=device),
            load_config=SimpleNamespace(load_format="auto"),
            kv_transfer_config=SimpleNamespace(engine_id="engine"),
        )

    def describe(self, config: Any = None, cache: Any = None, **chosen: Any) -> identity.Space:
        values, complaints = options.parse(chosen)
        self.assertEqual(complaints, [])
        return identity.describe(config or self.config(), cache or cache_config((spec(), 4)), values, self.compat)

    def test_both_halves_compute_the_same(self) -> None:
        a, b = self.describe(), self.describe(copy.deepcopy(self.config()))
        self.assertEqual((a.identity, a.digest()), (b.identity, b.digest()))
        self.assertEqual(a.identity["groups"], "0:full:32")
        self.assertEqual(a.writers(), [(0, 0, 1, 0, 4)])

    def test_another_engine_id_is_no_other_space(self) -> None:
        other = self.config()
        other.kv_transfer_config.engine_id = "another"
        self.assertEqual(self.describe().digest(), self.describe(other).digest())
        self.assertNotEqual(identity.membership("engine"), identity.membership("another"))

    def test_everything_that_changes_values_changes_the_space(self) -> None:
        def whole(space: identity.Space) -> tuple[str, str]:
            return space.digest(), space.weights.fingerprint()

        here = whole(self.describe())
        for part, name, value in (
            ("model_config", "dtype", torch.bfloat16),
            ("model_config", "quantization", "fp8"),
            ("model_config", "hf_text_config", SimpleNamespace(rope_theta=5e5, max_position_embeddings=4096)),
            ("model_config", "hf_overrides", {"rope_theta": 1}),
            ("model_config", "quantization_config", {"ignore": ["lm_head"]}),
            ("model_config", "model_impl", "transformers"),
            ("model_config", "multimodal_config", SimpleNamespace(mm_processor_kwargs={"num_crops": 4})),
            ("model_config", "hf_config_path", "nobody/has-this"),
            ("cache_config", "cache_dtype", "fp8_e5m2"),
            ("cache_config", "prefix_caching_hash_algo", "sha256_cbor"),
            ("cache_config", "calculate_kv_scales", True),
            ("parallel_config", "tensor_parallel_size", 2),
            ("load_config", "load_format", "dummy"),
        ):
            config = self.config()
            setattr(getattr(config, part), name, value)
            try:
                changed = whole(self.describe(config))
            except NotImplementedError:  # vLLM has no FP8 cache on a CPU without AVX-512
                self.assertEqual(config.cache_config.cache_dtype, "fp8_e5m2")
                continue
            self.assertNotEqual(changed, here, name)
        for cache in (cache_config((spec(block_size=64), 4)), cache_config((spec(head_size=128), 4)), cache_config((spec(), 5))):
            self.assertNotEqual(whole(self.describe(cache=cache)), here)
        for chosen in ({"model": "other"}, {"weights": "w"}, {"hash": "own"}):
            self.assertNotEqual(whole(self.describe(**chosen)), here)

    def test_a_half_names_the_weights_later_and_both_know_which_they_are(self) -> None:
        space = self.describe()
        self.assertIsNone(space.identity["weights"])
        self.assertEqual([file.name for file in space.weights.files], ["0/config.json", "0/model.safetensors"])
        config = self.config()
        config.model_config.model = "nobody/has-this"
        self.assertIn("not in a folder", self.describe(config).weights.private)
        config.model_config.hf_config._commit_hash = "abc"
        self.assertIn("not in a folder", self.describe(config).weights.private)  # a commit is a claim
        self.assertEqual(self.describe(config, weights="revision").weights.text, "commit:abc")

    def test_ranks_that_see_other_files_than_the_scheduler_are_not_served(self) -> None:
        half = half_of(_space=self.describe())
        good = connector.KvdHandshake(space=half._space.digest(), files=half._space.weights.fingerprint())
        self.assertEqual(half._find_mismatch(good), "")
        os.utime(self.path / "config.json")
        self.assertIn("other weight files", half._find_mismatch(connector.KvdHandshake(space=good.space, files=self.describe().weights.fingerprint())))
        self.assertEqual(half._find_mismatch(connector.KvdHandshake(reason="no")), "no")
        self.assertEqual(half._find_mismatch(connector.KvdHandshake(space="x", files=good.files)), "another space")
        self.assertEqual(half._find_mismatch(None), "another space")

    def test_groups_become_rules(self) -> None:
        window = spec(SlidingWindowSpec, sliding_window=512)
        space = self.describe(cache=cache_config((spec(), 2), (window, 4), (window, 4)))
        self.assertEqual(space.identity["groups"], "0:full:32,1:window:32:511,2:window:32:511")
        self.assertEqual(re.findall(r"(\d)\*kvk1 heads=1 layers=(\d)", space.identity["layout"]), [("1", "2"), ("2", "4")])
        self.assertEqual(space.writers(), [(0, 0, 1, 0, 2), (0, 0, 1, 0, 4), (0, 0, 1, 0, 4)])
        for mixed in (((state_spec(), 3), (spec(), 1)), ((spec(), 1), (state_spec(), 3))):
            space = self.describe(cache=cache_config(*mixed))
            self.assertIn(space.identity["groups"], ("0:state:32,1:full:32", "0:full:32,1:state:32"))
            self.assertEqual([group.state for group in space.groups], [type(one) is MambaSpec for one, _ in mixed])

    def test_states_of_another_form_are_another_space(self) -> None:
        def page_format(**fields: Any) -> str:
            return str(self.describe(cache=cache_config((spec(), 1), (state_spec(**fields), 3))).identity["page_format"])

        formats = [page_format(), page_format(shapes=((8, 3), (2, 4, 4))), page_format(dtypes=(torch.bfloat16, torch.float32))]
        self.compat["conv_layout"] = lambda: "DS"
        self.assertEqual(len({*formats, page_format()}), 4)

    def gpu(self, ranks: int = 1, total: int = 8) -> Any:
        config = self.config("cuda")
        config.model_config.dtype = torch.bfloat16
        config.parallel_config.tensor_parallel_size = ranks
        config.model_config.get_total_num_kv_heads = lambda: total
        return config

    def test_on_a_gpu_blocks_have_real_heads_and_no_machine(self) -> None:
        space = self.describe(self.gpu(), cache_config((gpu_spec(), 32)))
        self.assertEqual(space.identity["layout"], "kvk1 heads=8 layers=32 tokens=16 k=128 v=128 dtype=bf16 inner=split page=0")
        self.assertEqual((space.identity["page_format"], space.device), ("canonical", "cuda"))
        self.assertEqual(space.writers(), [(0, 0, 8, 0, 32)])

    def test_ranks_of_a_gpu_engine_hold_heads_and_share_the_space_of_one(self) -> None:
        one = self.describe(self.gpu(), cache_config((gpu_spec(), 32)))
        two = self.describe(self.gpu(2), cache_config((gpu_spec(num_kv_heads=4), 32)))
        self.assertEqual(one.identity, two.identity)
        self.assertEqual(two.writers(), [(0, 0, 4, 0, 32), (1, 4, 4, 0, 32)])

    def test_ranks_that_hold_copies_share_the_space_and_save_each_byte_once(self) -> None:
        one = self.describe(self.gpu(1, 2), cache_config((gpu_spec(num_kv_heads=2), 32)))
        four = self.describe(self.gpu(4, 2), cache_config((gpu_spec(num_kv_heads=1), 32)))
        self.assertEqual(one.identity, four.identity)
        self.assertEqual([four.held(0, rank) for rank in range(4)], [(0, 0, 1, 0, 32), (1, 0, 1, 0, 32), (2, 1, 1, 0, 32), (3, 1, 1, 0, 32)])
        self.assertEqual(four.writers(), [(0, 0, 1, 0, 16), (1, 0, 1, 16, 16), (2, 1, 1, 0, 16), (3, 1, 1, 16, 16)])
        for ranks, heads, total, word in ((4, 1, 3, "for a model of 3"), (4, 1, 8, "for a model of 8"), (4, 2, 2, "for a model of 2"), (64, 1, 1, "more than there are layers")):
            with self.assertRaisesRegex(Declined, word):
                self.describe(self.gpu(ranks, total), cache_config((gpu_spec(num_kv_heads=heads), 32)))

    def test_latent_vectors_of_a_gpu_are_one_head(self) -> None:
        latent = gpu_spec(MLAAttentionSpec, block_size=64, num_kv_heads=1, head_size=576)
        self.assertIn("heads=1 layers=27 tokens=64 k=576 v=0 dtype=bf16", self.describe(self.gpu(), cache_config((latent, 27))).identity["layout"])
        two = self.describe(self.gpu(2), cache_config((latent, 27)))
        self.assertEqual(two.identity, self.describe(self.gpu(), cache_config((latent, 27))).identity)
        self.assertEqual([two.held(0, rank) for rank in range(2)], [(0, 0, 1, 0, 27), (1, 0, 1, 0, 27)])
        self.assertEqual(two.writers(), [(0, 0, 1, 0, 13), (1, 0, 1, 13, 14)])

    def test_quantised_caches_of_a_gpu_have_their_own_type(self) -> None:
        config = self.gpu()
        config.cache_config.cache_dtype = "fp8"
        byte = gpu_spec(dtype=torch.uint8)
        self.assertIn("dtype=fp8_e4m3", self.describe(config, cache_config((byte, 32))).identity["layout"])
        for config.cache_config.cache_dtype, word in (("nvfp4", "nvfp4"), ("auto", "holds more than")):
            with self.assertRaisesRegex(Declined, word):
                self.describe(config, cache_config((byte, 32)))

    def test_groups_of_a_gpu_have_heads_of_their_own(self) -> None:
        groups = cache_config((gpu_spec(), 4), (gpu_spec(SlidingWindowSpec, sliding_window=512, num_kv_heads=4, head_size=256), 6))
        space = self.describe(self.gpu(), groups)
        self.assertEqual(re.findall(r"heads=(\d) layers=(\d) tokens=16 k=(\d+)", space.identity["layout"]), [("8", "4", "128"), ("4", "6", "256")])
        self.assertEqual(space.writers(), [(0, 0, 8, 0, 4), (0, 0, 4, 0, 6)])
        single = cache_config((gpu_spec(), 4), (gpu_spec(SlidingWindowSpec, sliding_window=512, num_kv_heads=1), 6))
        with self.assertRaisesRegex(Declined, "may be a copy"):
            self.describe(self.gpu(2), single)

    def test_groups_that_do_not_fit_into_a_name_are_declined(self) -> None:
        window = gpu_spec(SlidingWindowSpec, sliding_window=512)
        self.describe(self.gpu(), cache_config(*[(window, 4)] * 15, (gpu_spec(), 5)))  # two runs
        with self.assertRaisesRegex(Declined, "name is too long"):
            self.describe(self.gpu(), cache_config(*[(window, 4), (gpu_spec(), 5)] * 8))

    def test_layers_with_pages_of_several_sizes_are_several_groups_over_the_same_blocks(self) -> None:
        """As DeepSeek-V3.2: latent vectors, and the keys of an indexer, of fewer layers."""
        latent = gpu_spec(MLAAttentionSpec, block_size=64, num_kv_heads=1, head_size=576)
        keys = gpu_spec(MLAAttentionSpec, block_size=64, num_kv_heads=1, head_size=132, dtype=torch.uint8)
        specs = {f"layers.{i}.attn": latent for i in range(5)} | {f"layers.{i}.indexer": keys for i in range(2)}
        group = SimpleNamespace(layer_names=sorted(specs), kv_cache_spec=UniformTypeKVCacheSpecs(block_size=64, kv_cache_specs=specs))
        space = self.describe(self.gpu(), SimpleNamespace(kv_cache_groups=[group], num_blocks=64))
        self.assertEqual([(one.number, one.table, len(one.layers)) for one in space.groups], [(0, 0, 5), (1, 0, 2)])
        self.assertEqual(space.identity["groups"], "0:full:64,1:full:64")
        self.assertEqual(re.findall(r"layers=(\d) tokens=64 k=(\d+) v=0 dtype=(\w+)", space.identity["layout"]), [("5", "576", "bf16"), ("2", "132", "byte")])

    def test_states_are_stored_without_what_pads_their_pages(self) -> None:
        padded = state_spec(page_size_padded=None).page_size_bytes  # none of it is padding
        space = self.describe(cache=cache_config((spec(), 1), (state_spec(), 3)))
        self.assertEqual([one.block.page_bytes for one in space.blocks], [spec().page_size_bytes, padded])
        self.assertLess(padded, spec().page_size_bytes)

    def test_states_of_a_gpu_are_served_where_they_are_asked_for(self) -> None:
        groups = cache_config((gpu_spec(), 2), (state_spec(block_size=16, page_size_padded=gpu_spec().page_size_bytes), 3))
        space = self.describe(self.gpu(), groups, gpu_states=True)
        two = self.gpu(2)
        self.assertIn("inner=opaque", space.identity["layout"])
        self.assertNotEqual(space.identity["page_format"], "canonical")
        self.assertEqual(space.writers(), [(0, 0, 8, 0, 2), (0, 0, 1, 0, 3)])
        space = self.describe(two, cache_config((gpu_spec(num_kv_heads=4), 2), (state_spec(block_size=16, page_size_padded=gpu_spec().page_size_bytes), 3)), gpu_states=True)
        self.assertEqual(space.writers(), [(0, 0, 4, 0, 2), (1, 4, 4, 0, 2), (0, 0, 1, 0, 3), (1, 0, 1, 3, 3)])  # each has states of its own

    def test_the_engine_is_asked_for_heads_first_where_that_helps(self) -> None:
        def asked(config: Any, **extra: Any) -> str | None:
            config.kv_transfer_config.kv_connector_extra_config = extra
            return connector.KvdConnector.get_required_kvcache_layout(config)

        with unittest.mock.patch.object(compat, "probe", return_value={"cross_layers": True}):
            self.assertEqual(asked(self.gpu()), "HND")
            self.assertEqual(asked(self.gpu(), arrange="heads"), "HND")
            self.assertIsNone(asked(self.gpu(), arrange="engine"))
            self.assertIsNone(asked(self.config()))
            latent = self.gpu()
            latent.model_config.use_mla = True
            self.assertIsNone(asked(latent))
        with unittest.mock.patch.object(compat, "probe", return_value={"cross_layers": False}):
            self.assertIsNone(asked(self.gpu()))

    def test_what_is_not_served_is_declined_with_a_reason(self) -> None:
        none, drafts, coarse = state_spec(mamba_cache_mode="none"), state_spec(num_speculative_blocks=1), state_spec(block_size=64)
        gpu = cache_config((gpu_spec(), 1), (state_spec(block_size=16, page_size_padded=gpu_spec().page_size_bytes), 3))
        plain = self.config()
        plain.cache_config.enable_prefix_caching = False
        for config, cache, word in (
            (self.config("xpu"), None, "xpu"),
            (None, cache_config((spec(), 2), (none, 2)), "mode none"),
            (None, cache_config((spec(), 2), (drafts, 2)), "drafts"),
            (None, cache_config((spec(), 2), (coarse, 2)), "prefixes of 32 tokens"),
            (self.gpu(), gpu, "states in memory of a GPU"),
            (None, cache_config(), "no KV cache"),
            (plain, None, "prefix caching"),
        ):
            with self.assertRaisesRegex(Declined, word):
                self.describe(config, cache)

    def test_several_groups_before_0_30_need_a_recovery_that_is_known(self) -> None:
        window = cache_config((spec(), 2), (spec(SlidingWindowSpec, sliding_window=512), 2))
        self.compat |= {"failed_recving": False, "recovers_groups": False}
        with self.assertRaisesRegex(Declined, "0.30"):
            self.describe(cache=window)
        self.compat["recovers_groups"] = True
        groups = self.describe(cache=window).groups
        self.assertTrue(identity.needs_recovery(groups, self.compat))
        self.assertFalse(identity.needs_recovery(groups[:1], self.compat))
        with self.assertRaisesRegex(Declined, "whose state"):
            self.describe(cache=cache_config((spec(), 2), (state_spec(), 2)))

    def test_hashes_of_the_engine_are_used_only_where_they_can_be(self) -> None:
        self.assertTrue(self.describe().foreign)
        self.assertTrue(self.describe().identity["hash"].startswith("vllm:sha256:"))
        config = self.config()
        config.cache_config.prefix_caching_hash_algo = "xxhash"
        self.assertFalse(self.describe(config).foreign)
        with self.assertRaisesRegex(Declined, "cryptographic"):
            self.describe(config, hash="engine")
        self.compat["none_hash"] = "environment"  # as before 0.30
        with unittest.mock.patch.dict(os.environ):
            os.environ.pop("PYTHONHASHSEED", None)
            self.assertIn("PYTHONHASHSEED", self.describe().hash_reason)
            os.environ["PYTHONHASHSEED"] = "0"
            self.assertTrue(self.describe().foreign)

    def test_long_values_stay_within_the_limit(self) -> None:
        config = self.config()
        config.model_config.hf_text_config.rope_scaling = {"rope_type": "longrope", "long_factor": [i / 7 for i in range(500)]}
        rope = self.describe(config).identity["rope"]
        self.assertLessEqual(len(rope), identity.MAX_VALUE)
        config.model_config.max_model_len = 9999
        self.assertNotEqual(self.describe(config).identity["rope"], rope)


class Rest(unittest.TestCase):
    def test_unknown_and_wrong_options_are_named_and_do_not_count(self) -> None:
        values, complaints = options.parse({"sockett": "x", "mode": "fast", "cost_model": "no", "threads": "3", "load_ms": -1})
        self.assertEqual((values["mode"], values["cost_model"], values["threads"], values["load_ms"]), ("auto", False, 3, 0))
        self.assertEqual(len(complaints), 3)
        self.assertIn("sockett", complaints[0])

    def test_the_page_has_every_option(self) -> None:
        page = (pathlib.Path(__file__).resolve().parents[3] / "docs" / "vllm-reference.md").read_text()
        self.assertIn(options.table(), page)

    def test_the_circuit_breaker_logs_each_kind_once_and_opens_once(self) -> None:
        said: list[str] = []
        offs: list[str] = []
        breaker = CircuitBreaker(SimpleNamespace(error=lambda *a, **k: said.append(a[1])), most=3)
        breaker.on_open = offs.append
        for hook in ("a", "a", "b", "b", "b"):
            breaker.error(hook, ValueError("x"))
        self.assertEqual((said, len(offs)), (["a", "b"], 1))
        breaker = CircuitBreaker(SimpleNamespace(error=lambda *a, **k: None), most=3)
        breaker.on_open = offs.append
        breaker.error("update_state_after_alloc", ValueError("x"))
        self.assertEqual(len(offs), 2)

    def test_extra_keys_have_one_form(self) -> None:
        self.assertEqual(identity._extra_bytes((b"\x01", ("mm", -3), "salt")), b'[{"bytes":"01"},["mm",-3],"salt"]')
        self.assertNotEqual(identity._extra_bytes(("01",)), identity._extra_bytes((b"\x01",)))

    def test_the_compatibility_line_has_every_row(self) -> None:
        line = compat.line(compat.probe())
        for name in compat.ROWS:
            self.assertIn(name + "=", line)

    def test_counters_have_one_name_and_a_help(self) -> None:
        names = [metrics.prometheus_name(name)[0] for name in metrics.TABLE]
        self.assertEqual(len(set(names)), len(names))
        self.assertEqual(metrics.prometheus_name("worker_load_ns")[0], "kvd:worker_load_seconds")
        total = metrics.KvdStats(data={"worker_loads": 1}).aggregate(metrics.KvdStats(data={"worker_loads": 2, "worker_saves": 1}))
        self.assertEqual(total.data, {"worker_loads": 3, "worker_saves": 1})
        for name in metrics.LOGGED:
            self.assertIn(name, metrics.TABLE)

    def test_counters_reach_prometheus_in_seconds(self) -> None:
        from prometheus_client import REGISTRY, Counter, Gauge, Histogram

        config = SimpleNamespace(kv_transfer_config=None)
        prom = metrics.KvdPromMetrics(config, {Gauge: Gauge, Counter: Counter, Histogram: Histogram}, ["engine"], {0: ["0"]})
        prom.observe({"worker_load_ns": 1500000000, "scheduler_matches": 2, "of a newer version": 1}, 0)
        prom.observe({"scheduler_matches": 1, "load_way_sync": 1, "load_way_prefetch": 0}, 0)
        self.assertEqual(REGISTRY.get_sample_value("kvd:worker_load_seconds_total", {"engine": "0"}), 1.5)
        self.assertEqual(REGISTRY.get_sample_value("kvd:scheduler_matches_total", {"engine": "0"}), 3)
        self.assertEqual([REGISTRY.get_sample_value(f"kvd:load_way_{way}", {"engine": "0"}) for way in ("sync", "prefetch")], [1, 0])

    def test_the_chosen_ways_are_told_once(self) -> None:
        half = half_of(_ways=compat.LoadWays(frozenset({"sync"}), "", False), _ways_told=False)
        self.assertEqual(half._scheduler_stats({"scheduler_matches": 1}).data, {"scheduler_matches": 1, "load_way_sync": 1, "load_way_layers": 0, "load_way_prefetch": 0})
        self.assertEqual(half._scheduler_stats({"scheduler_matches": 1}).data, {"scheduler_matches": 1})


if __name__ == "__main__":
    unittest.main()
