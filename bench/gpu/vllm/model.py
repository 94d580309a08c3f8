"""Models without files from anywhere: a configuration, and weights drawn at random where the answer must depend on the KV cache."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def _llama(vocab: int, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, dim: int) -> dict[str, Any]:
    fixed = dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_act="silu", rms_norm_eps=1e-5, rope_theta=500000.0, max_position_embeddings=131072, torch_dtype="bfloat16")
    sizes = dict(vocab_size=vocab, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=dim)
    return {**fixed, **sizes, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2}


def _gemma(layers: int) -> dict[str, Any]:
    """Every sixth layer sees everything, the others 512 tokens: several KV groups."""
    kinds = ["full_attention" if number % 6 == 5 else "sliding_attention" for number in range(layers)]
    own = dict(architectures=["Gemma3ForCausalLM"], model_type="gemma3_text", layer_types=kinds, sliding_window=512, query_pre_attn_scalar=128, hidden_activation="gelu_pytorch_tanh")
    return {**_llama(32768, 1024, 4096, layers, 8, 4, 128), **own, "rms_norm_eps": 1e-6, "rope_local_base_freq": 10000.0, "tie_word_embeddings": True, "pad_token_id": 0}


SHAPES = {
    "tiny": _llama(4096, 512, 1024, 4, 8, 4, 64),
    "llama1b": _llama(128256, 2048, 8192, 16, 32, 8, 64),
    "llama8b": _llama(128256, 4096, 14336, 32, 32, 8, 128),
    "gemma": _gemma(12),
}


def _draw(folder: Path, c: dict[str, Any]) -> None:
    """Variances that keep attention sharp enough for a wrong block to change what comes out."""
    import torch
    from safetensors.torch import save_file

    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device=device).manual_seed(0)
    hidden, inner, dim = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    queries, keys = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim

    def weight(*shape: int) -> Any:
        return (torch.randn(*shape, generator=generator, device=device) / shape[-1] ** 0.5).to(torch.bfloat16).cpu()

    gemma = c["model_type"] == "gemma3_text"  # its embeddings are scaled by the model and are the head, its norms hold what is added to one
    tensors = {"model.embed_tokens.weight": weight(c["vocab_size"], hidden) * (1 if gemma else hidden**0.5)}
    if not gemma:
        tensors["lm_head.weight"] = weight(c["vocab_size"], hidden)
    norms = ["model.norm.weight"]
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}."
        kinds = ["input", "post_attention"] + ["pre_feedforward", "post_feedforward"] * gemma
        norms += [f"{at}{kind}_layernorm.weight" for kind in kinds]
        tensors.update((f"{at}self_attn.{name}.weight", torch.ones(dim, dtype=torch.bfloat16)) for name in ("q_norm", "k_norm") if gemma)
        for name, shape in {"q_proj": (queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden), "o_proj": (hidden, queries)}.items():
            tensors[f"{at}self_attn.{name}.weight"] = weight(*shape)
        for name, shape in {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}.items():
            tensors[f"{at}mlp.{name}.weight"] = weight(*shape)
    # What attention says outweighs the token itself, which the tied head would otherwise repeat for ever.
    gain = {name: 3.0 * ("post_attention" in name) if gemma else 1.0 for name in norms}
    tensors.update((name, torch.full((hidden,), value, dtype=torch.bfloat16)) for name, value in gain.items())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def folder_of(root: Path, shape: str, drawn: bool) -> Path:
    """Made when it is not there. Drawing is done in a process of its own: the engine must not inherit a CUDA context."""
    folder = root / f"{shape}_{'drawn' if drawn else 'dummy'}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[shape]))
    if drawn and not (folder / "done").exists():
        if os.fork() == 0:
            _draw(folder, SHAPES[shape])
            os._exit(0)
        if os.wait()[1] != 0:
            raise SystemExit("the weights could not be drawn")
        (folder / "done").touch()
    return folder


if __name__ == "__main__":
    folder_of(Path(sys.argv[1]), sys.argv[2], True)
