"""Small models with seeded random weights, whose output depends on all of the context.

With the usual small weights greedy output hardly looks at the context, and a wrong cache goes unnoticed. So queries and keys are drawn 1.5 times as
large, values and outputs 3 times, the head 4 times: one token changed hundreds of positions back changes what is generated.

usage: models.py SHAPE DIR [SEED]
"""
import json
import os
import pathlib
import shutil
import sys
import tempfile
from typing import Any, Callable

import numpy
from safetensors.numpy import save_file

Config = dict[str, Any]
Weights = dict[str, numpy.ndarray]
VOCAB = 4096
IMAGE_TOKEN = 9  # where a prompt has an image; it becomes 16 tokens
FIRST_TOKEN = 10  # below are those that mean something


def llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int) -> Config:
    return dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_act="silu", rms_norm_eps=1e-5, rope_theta=10000.0,
                max_position_embeddings=32768, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, torch_dtype="float32",
                vocab_size=VOCAB, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
                num_key_value_heads=kv_heads, head_dim=hidden // heads)


def hybrid() -> Config:
    """Every third layer sees everything, the others 128 tokens: several KV groups."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    return dict(llama(256, 512, len(kinds), 8, 4), architectures=["Gemma3ForCausalLM"], model_type="gemma3_text", layer_types=kinds,
                hidden_activation="gelu_pytorch_tanh", rms_norm_eps=1e-6, sliding_window=128, query_pre_attn_scalar=32,
                rope_local_base_freq=10000.0, tie_word_embeddings=True, pad_token_id=0)


def mla() -> Config:
    """DeepSeek V2's attention, without experts."""
    return dict(llama(256, 512, 3, 4, 4), architectures=["DeepseekV2ForCausalLM"], model_type="deepseek_v2", kv_lora_rank=512, q_lora_rank=None,
                qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, head_dim=64, n_routed_experts=4, n_shared_experts=1,
                first_k_dense_replace=3, moe_intermediate_size=512, moe_layer_freq=1, num_experts_per_tok=1, topk_method="greedy", n_group=1,
                topk_group=1, routed_scaling_factor=1.0, scoring_func="softmax", norm_topk_prob=False)


def recurrent() -> Config:
    """Qwen3-Next's: three layers keep a state (gated delta net), the fourth sees everything, and has experts: each token asks all of them."""
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    return dict(llama(256, 512, len(kinds), 4, 2), architectures=["Qwen3NextForCausalLM"], model_type="qwen3_next", layer_types=kinds,
                rms_norm_eps=1e-6, torch_dtype="bfloat16", partial_rotary_factor=0.25, mlp_only_layers=[0, 1, 2], num_experts=2,
                num_experts_per_tok=2, decoder_sparse_step=1, moe_intermediate_size=128, shared_expert_intermediate_size=128, norm_topk_prob=True,
                linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_value_head_dim=128, linear_num_key_heads=1, linear_num_value_heads=1)


def llava() -> Config:
    """The GQA model with eyes: CLIP's, of images of 56 x 56 points."""
    vision = dict(model_type="clip_vision_model", hidden_act="quick_gelu", hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                  num_attention_heads=2, image_size=56, patch_size=14, projection_dim=64)
    return dict(architectures=["LlavaForConditionalGeneration"], model_type="llava", image_token_index=IMAGE_TOKEN, text_config=SHAPES["gqa"](),
                vision_config=vision, vision_feature_layer=-1, vision_feature_select_strategy="default", projector_hidden_act="gelu",
                tie_word_embeddings=False, torch_dtype="float32")


SHAPES: dict[str, Callable[[], Config]] = {
    "gqa": lambda: llama(256, 512, 4, 8, 2),
    "mha": lambda: llama(256, 512, 4, 4, 4),
    "hybrid": hybrid,
    "recurrent": recurrent,
    "mla": mla,
    "llava": llava,
    "bench": lambda: llama(512, 1536, 6, 8, 4),  # 23 M parameters; 12 KiB of fp32 cache a token
}


class Draw:
    """Weights of variance 1 / inputs, times a scale."""

    def __init__(self, seed: int) -> None:
        self.random = numpy.random.default_rng(seed)

    def matrix(self, outputs: int, inputs: int, scale: float = 1.0) -> numpy.ndarray:
        return self.random.standard_normal((outputs, inputs), dtype=numpy.float32) * numpy.float32(scale / inputs ** 0.5)


def attention(draw: Draw, c: Config, prefix: str) -> Weights:
    hidden, size = c["hidden_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * size, c["num_key_value_heads"] * size
    return {prefix + "q_proj.weight": draw.matrix(q, hidden, 2), prefix + "k_proj.weight": draw.matrix(kv, hidden, 2),
            prefix + "v_proj.weight": draw.matrix(kv, hidden, 2), prefix + "o_proj.weight": draw.matrix(hidden, q, 2)}


def latent_attention(draw: Draw, c: Config, prefix: str) -> Weights:
    hidden, heads, latent = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
    nope, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    return {prefix + "q_proj.weight": draw.matrix(heads * (nope + rope), hidden, 1.5),
            prefix + "kv_a_proj_with_mqa.weight": draw.matrix(latent + rope, hidden, 1.5),
            prefix + "kv_a_layernorm.weight": numpy.ones(latent, dtype=numpy.float32),
            prefix + "kv_b_proj.weight": draw.matrix(heads * (nope + value), latent, 1.5),
            prefix + "o_proj.weight": draw.matrix(hidden, heads * value, 3)}


def gated_attention(draw: Draw, c: Config, prefix: str) -> Weights:
    """Full attention of Qwen3-Next: the query's projection has its gate, too."""
    out, gates = attention(draw, c, prefix), draw.matrix(c["num_attention_heads"] * c["head_dim"], c["hidden_size"])
    heads = (c["num_attention_heads"], c["head_dim"], c["hidden_size"])
    both = numpy.stack([out[prefix + "q_proj.weight"].reshape(heads), gates.reshape(heads)], axis=1)
    out[prefix + "q_proj.weight"] = both.reshape(-1, c["hidden_size"])
    return out | {prefix + f"{name}.weight": numpy.full(c["head_dim"], 0.5, dtype=numpy.float32) for name in ("q_norm", "k_norm")}


def delta_net(draw: Draw, c: Config, prefix: str) -> Weights:
    """A state that forgets half of what it holds in some 350 tokens."""
    hidden, heads, width = c["hidden_size"], c["linear_num_value_heads"], c["linear_conv_kernel_dim"]
    keys, values = c["linear_num_key_heads"] * c["linear_key_head_dim"], heads * c["linear_value_head_dim"]
    return {prefix + "in_proj_qkvz.weight": draw.matrix(2 * keys + 2 * values, hidden, 2),
            prefix + "in_proj_ba.weight": draw.matrix(2 * heads, hidden),
            prefix + "conv1d.weight": draw.matrix(2 * keys + values, width, 2).reshape(-1, 1, width),
            prefix + "A_log": numpy.full(heads, -6.0, dtype=numpy.float32), prefix + "dt_bias": numpy.zeros(heads, dtype=numpy.float32),
            prefix + "norm.weight": numpy.ones(c["linear_value_head_dim"], dtype=numpy.float32),
            prefix + "out_proj.weight": draw.matrix(hidden, values, 2)}


def layer(draw: Draw, c: Config, number: int) -> Weights:
    prefix = f"model.layers.{number}."
    hidden, inner, gemma = c["hidden_size"], c["intermediate_size"], c["model_type"] == "gemma3_text"
    recurrent = c["model_type"] == "qwen3_next"
    one = numpy.zeros if gemma or recurrent else numpy.ones  # their norms hold what is added to one
    norms = ["input_layernorm", "post_attention_layernorm"] + (["pre_feedforward_layernorm", "post_feedforward_layernorm"] if gemma else [])
    out = {f"{prefix}{name}.weight": one(hidden, dtype=numpy.float32) for name in norms}
    if gemma:  # what attention says outweighs the token itself, which the tied head would otherwise repeat for ever
        out[prefix + "post_attention_layernorm.weight"] += 3
    if recurrent:
        full = c["layer_types"][number] == "full_attention"
        out |= gated_attention(draw, c, prefix + "self_attn.") if full else delta_net(draw, c, prefix + "linear_attn.")
    else:
        out |= (latent_attention if "kv_lora_rank" in c else attention)(draw, c, prefix + "self_attn.")
    if gemma:  # queries and keys are normalized: their scale is here
        out |= {f"{prefix}self_attn.{name}.weight": numpy.full(c["head_dim"], 1.0, dtype=numpy.float32) for name in ("q_norm", "k_norm")}
    if recurrent and number not in c["mlp_only_layers"]:
        return out | experts(draw, c, prefix + "mlp.")
    return out | mlp(draw, hidden, inner, prefix + "mlp.")


def mlp(draw: Draw, hidden: int, inner: int, prefix: str) -> Weights:
    sizes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    return {f"{prefix}{name}.weight": draw.matrix(*size) for name, size in sizes.items()}


def experts(draw: Draw, c: Config, prefix: str) -> Weights:
    hidden = c["hidden_size"]
    out = {prefix + "gate.weight": draw.matrix(c["num_experts"], hidden), prefix + "shared_expert_gate.weight": draw.matrix(1, hidden)}
    for name, inner in [(f"experts.{i}", c["moe_intermediate_size"]) for i in range(c["num_experts"])] + [("shared_expert", c["shared_expert_intermediate_size"])]:
        out |= mlp(draw, hidden, inner, f"{prefix}{name}.")
    return out


def eyes(draw: Draw, c: Config, hidden: int) -> Weights:
    """CLIP's tower, and what makes its vectors tokens of a model of that hidden size."""
    size, inner, patch = c["hidden_size"], c["intermediate_size"], c["patch_size"]
    places = (c["image_size"] // patch) ** 2 + 1
    out: Weights = {}

    def linear(name: str, outputs: int, inputs: int) -> None:
        out.update({name + ".weight": draw.matrix(outputs, inputs), name + ".bias": numpy.zeros(outputs, dtype=numpy.float32)})

    def norm(name: str) -> None:
        out.update({name + ".weight": numpy.ones(size, dtype=numpy.float32), name + ".bias": numpy.zeros(size, dtype=numpy.float32)})
    prefix = "vision_tower.vision_model."
    out[prefix + "embeddings.class_embedding"] = draw.matrix(1, size)[0]
    out[prefix + "embeddings.patch_embedding.weight"] = draw.matrix(size, 3 * patch * patch).reshape(size, 3, patch, patch)
    out[prefix + "embeddings.position_embedding.weight"] = draw.matrix(places, size)
    norm(prefix + "pre_layrnorm")
    norm(prefix + "post_layernorm")
    for i in range(c["num_hidden_layers"]):
        at = f"{prefix}encoder.layers.{i}."
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            linear(f"{at}self_attn.{name}", size, size)
        norm(at + "layer_norm1")
        norm(at + "layer_norm2")
        linear(at + "mlp.fc1", inner, size)
        linear(at + "mlp.fc2", size, inner)
    linear("multi_modal_projector.linear_1", hidden, size)
    linear("multi_modal_projector.linear_2", hidden, hidden)
    return out


def weights(c: Config, seed: int) -> Weights:
    if c["model_type"] == "llava":
        text = {f"language_model.{name}": value for name, value in weights(c["text_config"], seed).items()}
        return text | eyes(Draw(seed), c["vision_config"], c["text_config"]["hidden_size"])
    draw, hidden = Draw(seed), c["hidden_size"]
    gemma, recurrent = c["model_type"] == "gemma3_text", c["model_type"] == "qwen3_next"
    out = {"model.embed_tokens.weight": draw.matrix(c["vocab_size"], hidden, 2 if gemma else hidden ** 0.5),
           "model.norm.weight": (numpy.zeros if gemma or recurrent else numpy.ones)(hidden, dtype=numpy.float32)}
    if not c["tie_word_embeddings"]:
        out["lm_head.weight"] = draw.matrix(c["vocab_size"], hidden, 4)
    for i in range(c["num_hidden_layers"]):
        out |= layer(draw, c, i)
    return out


def processor(path: pathlib.Path) -> None:
    """What turns an image into points and places in the prompt."""
    text = json.loads((path / "tokenizer.json").read_text())
    words = text["model"]["vocab"]
    words["<image>"] = words.pop(f"w{IMAGE_TOKEN}")
    text["added_tokens"] = [dict(id=IMAGE_TOKEN, content="<image>", single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)]
    (path / "tokenizer.json").write_text(json.dumps(text))
    (path / "preprocessor_config.json").write_text(json.dumps(dict(
        image_processor_type="CLIPImageProcessor", do_resize=True, size=dict(shortest_edge=56), do_center_crop=True, crop_size=dict(height=56, width=56),
        do_rescale=True, rescale_factor=1 / 255, do_normalize=True, image_mean=[0.5] * 3, image_std=[0.5] * 3, resample=3)))
    (path / "processor_config.json").write_text(json.dumps(dict(
        processor_class="LlavaProcessor", image_token="<image>", patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1)))


def tokenizer(path: pathlib.Path) -> None:
    """Word "w123" is token 123. Special tokens are whole words: "w12" does not begin with "w1"."""
    words = {f"w{i}": i for i in range(VOCAB)}
    special = [dict(id=i, content=f"w{i}", single_word=True, lstrip=False, rstrip=False, normalized=False, special=True) for i in range(3)]
    model = dict(type="WordLevel", vocab=words, unk_token="w0")
    (path / "tokenizer.json").write_text(json.dumps(dict(
        version="1.0", truncation=None, padding=None, added_tokens=special, normalizer=None, pre_tokenizer=dict(type="WhitespaceSplit"),
        post_processor=None, decoder=None, model=model)))
    (path / "tokenizer_config.json").write_text(json.dumps(dict(
        tokenizer_class="PreTrainedTokenizerFast", unk_token="w0", bos_token="w1", eos_token="w2", model_max_length=32768)))


def make(shape: str, root: str, seed: int = 0) -> str:
    """The folder of the model; made when it is not there yet."""
    path = pathlib.Path(root) / f"{shape}-{seed}"
    if path.is_dir():
        return str(path)
    pathlib.Path(root).mkdir(parents=True, exist_ok=True)
    scratch = pathlib.Path(tempfile.mkdtemp(prefix=f"{shape}-", dir=root))
    config = SHAPES[shape]()
    (scratch / "config.json").write_text(json.dumps(config, indent=1))
    tokenizer(scratch)
    if "vision_config" in config:
        processor(scratch)
    save_file(weights(config, seed), str(scratch / "model.safetensors"), metadata=dict(format="pt"))
    os.rename(scratch, path)
    return str(path)


def changed(path: str, root: str) -> str:
    """A copy of the model under the same name, as large, with other weights in the middle of its file: more than 64 KiB from both ends, and nothing of 64
    pieces of 4 KiB at equal distances between them."""
    source = pathlib.Path(path)
    copy = pathlib.Path(root) / "changed" / source.name
    if copy.is_dir():
        return str(copy)
    shutil.copytree(source, copy)
    file = copy / "model.safetensors"
    data = numpy.fromfile(file, dtype=numpy.uint8)
    ends, piece, pieces = 64 << 10, 4 << 10, 64
    at = [ends + (data.size - 2 * ends - piece) * i // pieces for i in range(pieces)] + [data.size - ends]
    header = int.from_bytes(data[:8].tobytes(), "little") + 8
    for begin, end in zip(at, at[1:]):
        first = begin + piece + (header - begin - piece) % 4  # floats lie at multiples of four bytes behind the header
        data[first + 3 : end : 4] ^= 0x80  # the sign
    data.tofile(file)
    return str(copy)


def adapter(shape: str, root: str, seed: int, rank: int = 8) -> str:
    """The folder of a LoRA adapter for the attention of that shape, drawn so that its answers are others than the model's."""
    path = pathlib.Path(root) / f"{shape}-adapter-{seed}"
    path.mkdir(parents=True)
    draw, c = Draw(1000 + seed), SHAPES[shape]()
    hidden, size = c["hidden_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * size, c["num_key_value_heads"] * size
    out: Weights = {}
    for i in range(c["num_hidden_layers"]):
        for name, outputs, inputs in (("q_proj", q, hidden), ("k_proj", kv, hidden), ("v_proj", kv, hidden), ("o_proj", hidden, q)):
            prefix = f"base_model.model.model.layers.{i}.self_attn.{name}"
            out |= {prefix + ".lora_A.weight": draw.matrix(rank, inputs), prefix + ".lora_B.weight": draw.matrix(outputs, rank)}
    save_file(out, str(path / "adapter_model.safetensors"), metadata=dict(format="pt"))
    (path / "adapter_config.json").write_text(json.dumps(dict(
        peft_type="LORA", task_type="CAUSAL_LM", r=rank, lora_alpha=rank, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], bias="none")))
    return str(path)


if __name__ == "__main__":
    print(make(sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 0))
