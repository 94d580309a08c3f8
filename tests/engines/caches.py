"""The KV cache groups that the installed vLLM makes of a public model, without the model or a GPU: get_kv_cache_spec() of its own layers on stand-ins that have the
numbers of the model's shape, blocks as its platform chooses them, layouts and groups by its own functions. As on a Hopper GPU, or a CPU without AMX.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace as Stand
from typing import Any
from unittest import mock

import torch
from vllm.config import KVTransferConfig
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.attention.chunked_local_attention import ChunkedLocalAttention
from vllm.model_executor.layers.attention.mla_attention import MLAAttention, MLACommonBackend
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateDtypeCalculator as Types
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache
from vllm.models.deepseek_v4.attention import DeepseekV4Attention, DeepseekV4IndexerCache
from vllm.models.deepseek_v4.compressor import CompressorBackend, CompressorStateCache
from vllm.models.deepseek_v4.sparse_mla import DeepseekV4FlashMLABackend
from vllm.models.kimi_k3.nvidia.mla import MultiHeadLatentAttention
from vllm.platforms.interface import Platform
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend
from vllm.v1.attention.backends.mla.flashattn_mla_sparse import FlashAttnMLASparseBackend
from vllm.v1.attention.backends.mla.indexer import DeepseekV4IndexerBackend, DeepseekV32IndexerBackend
from vllm.v1.attention.backends.mla.sparse_swa import DeepseekSparseSWABackend, DeepseekV4SWACache
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Kinds
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache, customize_attention_spec

Shape = dict[str, Any]
Layers = Iterator[tuple[str, Any, Any]]  # name, backend, spec
BLOCKS = 2
BF16 = torch.bfloat16


class FlashAttnMla(MLACommonBackend):
    """FLASH_ATTN_MLA, whose own module cannot be imported where there is no GPU."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(16)]


@dataclass
class Engine:
    shape: Shape
    device: str
    tp: int = 1
    config: Any = None
    backends: list[Any] = field(default_factory=list)

    def spec(self, layer: Any, **numbers: Any) -> Any:
        """What a layer with these numbers says of its cache."""
        return layer.get_kv_cache_spec(Stand(cache_config=self.config.cache_config, **numbers), self.config)

    def attention(self, layer: Any = Attention, **more: Any) -> Any:
        shape, heads = self.shape, max(1, self.shape["num_key_value_heads"] // self.tp)
        size = shape["head_dim"]
        common = dict(attn_type="decoder", attn_backend=self.backends[0], kv_cache_dtype="auto", kv_cache_torch_dtype=BF16, num_kv_heads=heads, head_size=size, head_size_v=size)
        return self.spec(layer, **common, **{"sliding_window": None, **more})

    def latent(self, layer: Any = MLAAttention, indexer: Any = None) -> Any:
        size = self.shape["kv_lora_rank"] + self.shape["qk_rope_head_dim"]
        return self.spec(layer, head_size=size, kv_cache_dtype="auto", sliding_window=None, indexer=indexer, non_causal_multi_token_decode=False)

    def state(self, kind: Any, shapes: Any, types: Any) -> Any:
        return self.spec(MambaBase, mamba_type=kind, is_kv_cache_tp_replicated=False, get_state_shape=lambda: shapes, get_state_dtype=lambda: types)


# ---- layers of a model, as its code in vLLM has them ---------------------------------------------------------------


def dense(engine: Engine) -> Layers:
    """Full attention, or every n-th layer full and the others with a window or a chunk."""
    shape, backend = engine.shape, engine.backends[0]
    window, chunk = shape.get("sliding_window"), shape.get("attention_chunk_size")
    every = shape.get("sliding_window_pattern") or shape.get("no_rope_layer_interval") or 1
    for i in range(shape["num_hidden_layers"]):
        name = f"model.layers.{i}.self_attn.attn"
        if (i + 1) % every == 0:
            yield name, backend, engine.attention()
        elif chunk:
            yield name, backend, engine.attention(ChunkedLocalAttention, attention_chunk_size=chunk)
        else:
            yield name, backend, engine.attention(sliding_window=window)


def delta_net(engine: Engine) -> Layers:
    """Qwen3-Next, Qwen3.5: three layers with a state, one with full attention."""
    shape = engine.shape
    sizes = [shape[f"linear_{name}"] for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")]
    made = Shapes.gated_delta_net_state_shape(engine.tp, *sizes), Types.gated_delta_net_state_dtype(BF16, "auto", shape.get("mamba_ssm_dtype", "auto"))
    for i in range(shape["num_hidden_layers"]):
        if (i + 1) % shape["full_attention_interval"] == 0:
            yield f"model.layers.{i}.self_attn.attn", engine.backends[0], engine.attention()
        else:
            yield f"model.layers.{i}.linear_attn", None, engine.state(Kinds.GDN_ATTN, *made)


def nemotron(engine: Engine) -> Layers:
    shape = engine.shape
    heads, dim = shape["mamba_num_heads"], shape["mamba_head_dim"]
    made = Shapes.mamba2_state_shape(engine.tp, heads * dim, shape["n_groups"], heads, dim, shape["ssm_state_size"], shape["conv_kernel"])
    for i, kind in enumerate(shape["hybrid_override_pattern"]):
        if kind == "*":
            yield f"model.layers.{i}.mixer.attn", engine.backends[0], engine.attention()
        elif kind == "M":
            yield f"model.layers.{i}.mixer", None, engine.state(Kinds.MAMBA2, made, Types.mamba2_state_dtype(BF16, "auto", shape["mamba_ssm_cache_dtype"]))


def kimi_linear(engine: Engine) -> Layers:
    linear = engine.shape["linear_attn_config"]
    made = Shapes.kda_state_shape(engine.tp, linear["num_heads"], linear["head_dim"], conv_kernel_size=linear["short_conv_kernel_size"]), Types.kda_state_dtype(BF16, "auto")
    for i in range(engine.shape["num_hidden_layers"]):
        if i + 1 in linear["full_attn_layers"]:
            yield f"model.layers.{i}.self_attn.attn", engine.backends[0], engine.latent(MultiHeadLatentAttention)
        else:
            yield f"model.layers.{i}.self_attn", None, engine.state(Kinds.GDN_ATTN, *made)


def indexer_width(shape: Shape) -> int:
    """Bytes of a key: FP8, and a scale of 4 bytes for 128 of them."""
    return int(shape["index_head_dim"] + shape["index_head_dim"] // 128 * 4)


def latent(engine: Engine) -> Layers:
    """DeepSeek-V3, Kimi K2; with an indexer DeepSeek-V3.2, GLM-5."""
    shape = engine.shape
    sparse = "index_topk" in shape
    for i in range(shape["num_hidden_layers"]):
        name = f"model.layers.{i}.self_attn"
        yield f"{name}.attn", engine.backends[0], engine.latent(indexer=object() if sparse else None)
        if sparse:
            yield f"{name}.indexer.k_cache", engine.backends[1], engine.spec(DeepseekV32IndexerCache, head_dim=indexer_width(shape), dtype=torch.uint8)


def compressor(engine: Engine, name: str, ratio: int, dim: int) -> tuple[str, Any, Any]:
    """States of a compressor; its __init__() has these numbers."""
    parts = 2 if ratio == 4 else 1
    numbers = dict(block_size=4 if ratio == 4 else 8, state_dim=2 * parts * dim, dtype=torch.float32, sliding_window=parts * ratio)
    return f"{name}.compressor.state_cache", CompressorBackend, engine.spec(CompressorStateCache, **numbers)


def deepseek_v4(engine: Engine) -> Layers:
    """A window in every layer, what was compressed, 4 or 128 tokens to one, and the states of the compressors."""
    shape = engine.shape
    main, indexer, window = engine.backends[:3]
    dim = shape["head_dim"]
    for i, ratio in enumerate(shape["compress_ratios"]):
        name = f"model.layers.{i}.attn"
        if ratio == 4:
            yield f"{name}.indexer.k_cache", indexer, engine.spec(DeepseekV4IndexerCache, head_dim=indexer_width(shape), dtype=torch.uint8, compress_ratio=ratio)
            yield compressor(engine, f"{name}.indexer", ratio, shape["index_head_dim"])
        numbers = dict(block_size=64, packed_bytes_per_token=584, packed_page_alignment=576, bounded_replay=False)
        yield f"{name}.swa_cache", window, engine.spec(DeepseekV4SWACache, head_dim=dim, window_size=shape["sliding_window"], dtype=torch.uint8, **numbers)
        if ratio > 1:
            yield name, main, engine.spec(DeepseekV4Attention, head_dim=dim, compress_ratio=ratio, kv_cache_dtype="fp8_ds_mla", kv_cache_torch_dtype=torch.uint8)
            yield compressor(engine, name, ratio, dim)


# ---- the engine ----------------------------------------------------------------------------------------------------

# A key that only such shapes have; its layers; the backends of its attention on GPUs and on CPUs.
MAKERS = (
    ("compress_ratios", deepseek_v4, *[[DeepseekV4FlashMLABackend, DeepseekV4IndexerBackend, DeepseekSparseSWABackend, CompressorBackend]] * 2),
    ("linear_attn_config", kimi_linear, [FlashAttnMla], [CPUMLABackend]),
    ("index_topk", latent, *[[FlashAttnMLASparseBackend, DeepseekV32IndexerBackend]] * 2),
    ("kv_lora_rank", latent, [FlashAttnMla], [CPUMLABackend]),
    ("hybrid_override_pattern", nemotron, [FlashAttentionBackend], [CPUAttentionBackend]),
    ("full_attention_interval", delta_net, [FlashAttentionBackend], [CPUAttentionBackend]),
    ("num_hidden_layers", dense, [FlashAttentionBackend], [CPUAttentionBackend]),
)


def maker(shape: Shape) -> Any:
    return next(row for row in MAKERS if row[0] in shape)


def engine_of(shape: Shape, device: str, tp: int = 1) -> Engine:
    engine = Engine(shape, device, tp)
    engine.backends = maker(shape)[2 if device == "cuda" else 3]
    engine.config = config_of(engine)
    choose_blocks(engine)
    return engine


def layers_of(engine: Engine) -> list[tuple[str, Any, Any]]:
    return list(maker(engine.shape)[1](engine))


def choose_blocks(engine: Engine) -> None:
    """As the platform: of the size that all kernels take; and so large that a state of the model fits into a page, to which it is padded."""

    class Chooser(Platform):
        @classmethod
        def _find_non_ssm_backends(cls, vllm_config: Any) -> Any:
            return engine.backends

    sizes = [Stand(page_size_bytes=spec.page_size_bytes) for _, backend, spec in layers_of(engine) if backend is None]
    engine.config.model_config.is_hybrid = bool(sizes)
    model = Stand(get_mamba_specs_from_config=lambda config: sizes)
    with (
        mock.patch("vllm.config.vllm.set_current_vllm_config", lambda config: contextlib.nullcontext()),
        mock.patch("vllm.model_executor.models.ModelRegistry.resolve_model_cls", lambda *args, **more: (model, "")),
    ):
        Chooser.update_block_size_for_backend(engine.config)


def cache_config(engine: Engine) -> Any:
    on_cpu, of_latents = engine.device == "cpu", "kv_lora_rank" in engine.shape
    cache = Stand(
        cache_dtype="fp8_ds_mla" if "compress_ratios" in engine.shape else "auto",
        block_size=(16 if of_latents else 128) if on_cpu else 16,
        user_specified_block_size=on_cpu,  # CpuPlatform has chosen it before
        prefix_match_unit=None,
        enable_prefix_caching=not (on_cpu and of_latents),
        prefix_caching_hash_algo="sha256",
        prefix_cache_retention_interval=None,
        num_gpu_blocks_override=None,
        kv_cache_layout=None,
        kv_cache_dtype_skip_layers=[],
        skip_page_size_padded=None,
        mamba_block_size=16,
        mamba_page_size_padded=None,
        mamba_cache_mode="align",
        use_replayssm=False,
        calculate_kv_scales=False,
    )
    cache.get_resolved_kv_cache_layout = lambda: KVCacheLayout[cache.kv_cache_layout]
    return cache


def config_of(engine: Engine) -> Any:
    """What of VllmConfig is read."""
    shape, hf = engine.shape, Stand(rope_theta=10000.0, max_position_embeddings=4096)
    heads, of_latents = shape.get("num_key_value_heads", 1), "kv_lora_rank" in shape
    model = Stand(
        model="public/" + shape["model"],
        hf_config=hf,
        hf_text_config=hf,
        dtype=BF16,
        quantization=None,
        revision=None,
        seed=0,
        hf_overrides={},
        max_model_len=4096,
        architecture="",
        use_mla=of_latents,
        get_total_num_kv_heads=lambda: heads,
        get_num_kv_heads=lambda parallel: max(1, heads // engine.tp),
        get_head_size=lambda: shape["kv_lora_rank"] + shape["qk_rope_head_dim"] if of_latents else shape["head_dim"],
    )
    return Stand(
        model_config=model,
        cache_config=cache_config(engine),
        parallel_config=Stand(tensor_parallel_size=engine.tp, pipeline_parallel_size=1, decode_context_parallel_size=1, prefill_context_parallel_size=1),
        device_config=Stand(device_type=engine.device),
        load_config=Stand(load_format="auto"),
        kv_transfer_config=KVTransferConfig(kv_connector="KvdConnector", kv_connector_module_path="kvd_vllm.connector", kv_role="kv_both"),
        scheduler_config=Stand(disable_hybrid_kv_cache_manager="attention_chunk_size" in shape),  # VllmConfig's own choice for chunks
        attention_config=Stand(hisparse_config=None),
        speculative_config=None,
        num_speculative_tokens=0,
    )


def cache_of(engine: Engine) -> KVCacheConfig:
    """Groups, and where their pages lie, for a cache of a few blocks."""
    specs = {name: spec if backend is None else customize_attention_spec(backend, spec) for name, backend, spec in layers_of(engine)}
    layouts = [layout.name for layout in get_supported_kv_cache_layouts(engine.backends)]
    resolve_kv_cache_layout(engine.config, [layouts], specs.values())
    engine.config.cache_config.num_gpu_blocks_override = BLOCKS
    return kv_cache_utils.get_kv_cache_config_from_groups(engine.config, kv_cache_utils.get_kv_cache_groups(engine.config, specs), 0)


def tensors_of(engine: Engine, cache: KVCacheConfig) -> dict[str, Any]:
    """The tensors that a connector is given, in memory of this process."""
    return allocate_kv_cache(cache, torch.device("cpu"), engine.config.cache_config.get_resolved_kv_cache_layout())
