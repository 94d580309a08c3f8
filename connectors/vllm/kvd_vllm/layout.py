"""The layout of an engine's KV tensors, as kvk_paged_t describes it: address of each layer, strides, order inside a page; and of a block of the pool."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvd_vllm import _kvd
from kvd_vllm.errors import Declined

BYTES = {"f32": 4, "f16": 2, "bf16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1, "byte": 1}


@dataclass(frozen=True)
class Block:
    """kvk_layout_t: a block of the pool, the same whatever order an engine's own cache has."""

    heads: int
    layers: int
    block_tokens: int
    k_dim: int
    v_dim: int
    dtype: str
    inner: str = "split"
    page_bytes: int = 0  # opaque only

    def text(self) -> str:
        return f"kvk1 heads={self.heads} layers={self.layers} tokens={self.block_tokens} k={self.k_dim} v={self.v_dim} dtype={self.dtype} inner={self.inner} page={self.page_bytes}"

    def fields(self) -> dict[str, Any]:
        return {**vars(self), "dtype": getattr(_kvd, "DTYPE_" + self.dtype), "inner": getattr(_kvd, "INNER_" + self.inner)}


def text_of(blocks: Sequence[Block]) -> str:
    """Of the groups of a space: kvk_layouts_format()."""
    runs: list[tuple[Block, int]] = []
    for block in blocks:
        if runs and runs[-1][0] == block:
            runs[-1] = block, runs[-1][1] + 1
        else:
            runs.append((block, 1))
    return runs[0][0].text() if len(runs) == 1 else ";".join(f"{count}*{block.text()}" for block, count in runs)


def opaque_block(layers: int, tokens: int, page_bytes: int) -> Block:
    """Of pages as the engine has them."""
    return Block(1, layers, tokens, 0, 0, "byte", "opaque", page_bytes)


@dataclass(frozen=True)
class Page:
    """What kvk_paged_t says of one layer."""

    kind: int  # kvk_paged_kind_t
    heads: int
    block_tokens: int
    k_dim: int
    v_dim: int
    page_bytes: int  # opaque: of one block in this layer
    block_stride: int  # bytes from block to block
    base: int  # address of block 0
    blocks: int
    dtype: str
    head_stride: int = 0  # bytes from head to head; 0: one after another


def _block(tensor: Any, num_blocks: int) -> tuple[list[int], list[int], int]:
    """(shape of a block, its strides, elements from block to block). Kernel blocks smaller than the engine's are put together again."""
    shape, stride = list(tensor.shape), list(tensor.stride())
    if not shape or num_blocks < 1 or shape[0] % num_blocks != 0:
        raise Declined(f"a KV tensor of shape {tuple(shape)} for {num_blocks} blocks: blocks are not its first dimension")
    pieces = shape[0] // num_blocks
    if pieces == 1:
        return shape[1:], stride[1:], stride[0]
    return [pieces, *shape[1:]], stride, stride[0] * pieces


def opaque(tensor: Any, num_blocks: int, page_bytes: int) -> Page:
    """A page in the engine's own format. Its dimensions may have any order if a block of a layer is contiguous."""
    shape, stride, step = _block(tensor, num_blocks)
    size = tensor.element_size()
    run = 1 + sum((n - 1) * s for n, s in zip(shape, stride))
    count = math.prod(shape)
    if run != count:
        raise Declined(f"a block of a KV tensor of shape {tuple(tensor.shape)}, strides {tuple(tensor.stride())} is not contiguous")
    if count * size > page_bytes or step * size < page_bytes:
        raise Declined(f"a page has {count * size} bytes and blocks are {step * size} apart; the engine said {page_bytes} bytes a page")
    return Page(_kvd.KIND_OPAQUE, 1, 0, 0, 0, page_bytes, step * size, tensor.data_ptr(), num_blocks, "byte")


def states(tensors: Sequence[Any], num_blocks: int, page_bytes: int) -> Page:
    """A page of a layer that keeps states: parts of several kinds, each a tensor, one after another in the same page."""
    spans, steps = [], set()
    for tensor in tensors:
        shape, stride, step = _block(tensor, num_blocks)
        size, count = tensor.element_size(), math.prod(shape)
        if 1 + sum((n - 1) * s for n, s in zip(shape, stride)) != count:
            raise _refuse(tensor, "a state is not contiguous")
        spans.append((tensor.data_ptr(), count * size))
        steps.add(step * size)
    if len(steps) != 1 or min(steps) < page_bytes:
        raise Declined(f"the blocks of a layer's states are {steps} bytes apart, and a page has {page_bytes}")
    spans.sort()
    base = spans[0][0]
    if any(at + size > after for (at, size), (after, _) in zip(spans, spans[1:])) or sum(spans[-1]) - base > page_bytes:
        raise Declined(f"the states of a layer overlap, or are longer than the {page_bytes} bytes of a page")
    return Page(_kvd.KIND_OPAQUE, 1, 0, 0, 0, page_bytes, steps.pop(), base, num_blocks, "byte")


@dataclass(frozen=True)
class Shape:
    """A page by the engine's configuration: keys and values of this rank's heads. v 0: one vector a token (MLA)."""

    tokens: int
    heads: int
    k: int
    v: int
    dtype: str


@dataclass(frozen=True)
class _Steps:
    """Strides in elements: from head to head, from token to token, from keys to values, from block to block."""

    head: int
    token: int
    value: int
    block: int


def _refuse(tensor: Any, why: str) -> Declined:
    return Declined(f"a KV tensor of shape {tuple(tensor.shape)}, strides {tuple(tensor.stride())}: {why}")


def _steps(tensor: Any, num_blocks: int, want: Shape) -> _Steps:
    """Strides of the tensors that GPU backends have: (B, 2, N, H, D), (B, H, N, K + V), (B, N, H, K + V), and of latent vectors (B, N, K) or, from 0.32 on, (B, 1, N, K), in any physical order."""
    shape, stride = list(tensor.shape), list(tensor.stride())
    pieces = shape[0] // num_blocks if num_blocks > 0 and shape[0] % num_blocks == 0 else 0
    if pieces < 1 or want.tokens % pieces != 0:
        raise _refuse(tensor, f"its first dimension is not {num_blocks} blocks")
    if stride[-1] != 1 and shape[-1] != 1:
        raise _refuse(tensor, "the elements of a head are not one after another")

    tokens, both = want.tokens // pieces, want.k + want.v
    inner = tuple(shape[1:])
    if want.v and inner == (2, tokens, want.heads, want.k) and want.k == want.v:
        steps = _Steps(stride[3], stride[2], stride[1], stride[0])
    elif want.v and inner == (want.heads, tokens, both):
        steps = _Steps(stride[1], stride[2], want.k, stride[0])
    elif want.v and inner == (tokens, want.heads, both):
        steps = _Steps(stride[2], stride[1], want.k, stride[0])
    elif not want.v and want.heads == 1 and inner in ((tokens, want.k), (1, tokens, want.k)):
        steps = _Steps(0, stride[-2], 0, stride[0])
    else:
        raise _refuse(tensor, f"no known layout of {tokens} tokens, {want.heads} heads, {want.k} + {want.v} elements")
    if pieces > 1 and (steps.value >= steps.block or steps.block != tokens * steps.token):
        raise _refuse(tensor, f"the kernels cut a block of {want.tokens} tokens into {pieces}, whose strides are not those of one block")

    return _Steps(steps.head, steps.token, steps.value, steps.block * pieces)


ANY = -1  # a stride that kvk_paged_t states


def _kind(steps: _Steps, want: Shape) -> tuple[int, int] | None:
    """(kvk_paged_kind_t, elements from head to head or 0). The stride of a dimension of size 1 does not matter."""
    tokens, heads, k, v = want.tokens, want.heads, want.k, want.v
    both = k + v
    orders = (  # strides of each kind: from head to head, from token to token, from keys to values
        (_kvd.KIND_KV_TOKEN_HEAD, k, heads * k, tokens * heads * k),
        (_kvd.KIND_KV_HEAD_TOKEN, tokens * k, k, heads * tokens * k),
        (_kvd.KIND_HEAD_KV_TOKEN, ANY, k, tokens * k),
        (_kvd.KIND_TOKEN_HEAD_KV, both, heads * both, k),
        (_kvd.KIND_HEAD_TOKEN_KV, ANY, both, k),
    )
    apart = v not in (0, k)  # keys and values of different size: only side by side
    for kind, head, token, value in orders[3:] if apart else orders:
        if (heads == 1 or head in (ANY, steps.head)) and (tokens == 1 or steps.token == token) and (v == 0 or steps.value == value):
            return kind, steps.head if head == ANY and heads > 1 and steps.head != tokens * both else 0
    return None


def structured(tensor: Any, num_blocks: int, want: Shape) -> Page:
    """A layer with real heads, found from its strides. Declined: kvd does not know their order."""
    size = tensor.element_size()
    if size != BYTES[want.dtype]:
        raise _refuse(tensor, f"its elements have {size} bytes, those of {want.dtype} have {BYTES[want.dtype]}")
    steps = _steps(tensor, num_blocks, want)
    kind = _kind(steps, want)
    if kind is None:
        raise _refuse(tensor, "its heads and tokens are in no order kvd knows")
    return Page(kind[0], want.heads, want.tokens, want.k, want.v, 0, steps.block * size, tensor.data_ptr(), num_blocks, want.dtype, kind[1] * size)


def of_all_layers(tensor: Any, order: Sequence[int]) -> Any:
    """One tensor for all layers, in physical order, permuted to (layers, one layer's dimensions). `order`: which of those each physical dimension is."""
    if sorted(order) != list(range(tensor.dim())):
        raise Declined(f"a KV tensor of all layers of shape {tuple(tensor.shape)}, but its dimensions are in the order {tuple(order)}")
    return tensor.permute([order.index(i) for i in range(tensor.dim())])


def paged(pages: Sequence[Page], group: int, first_layer: int, first_head: int = 0, block_tokens: int | None = None) -> dict[str, Any]:
    """kvk_paged_t of a group as _kvd takes it. All layers must have the same layout."""
    first = pages[0]
    if any(replace(page, base=first.base) != first for page in pages):
        raise Declined("the layers of a group have different layouts")
    return {
        **vars(first),
        "group": group,
        "dtype": getattr(_kvd, "DTYPE_" + first.dtype),
        "layers": len(pages),
        "first_layer": first_layer,
        "first_head": first_head,
        "save_layer_first": first_layer,
        "save_layers": 0,  # all
        "block_tokens": block_tokens or first.block_tokens,
        "base": [page.base for page in pages],
    }


def describe(paged: dict[str, Any]) -> str:
    """A sentence for the log."""
    orders = {
        _kvd.KIND_KV_TOKEN_HEAD: "[keys, values][token][head]",
        _kvd.KIND_KV_HEAD_TOKEN: "[keys, values][head][token]",
        _kvd.KIND_HEAD_KV_TOKEN: "[head][keys, values][token]",
        _kvd.KIND_TOKEN_HEAD_KV: "[token][head][key, value]",
        _kvd.KIND_HEAD_TOKEN_KV: "[head][token][key, value]",
    }
    bases = sorted(paged["base"])
    beside = len(bases) > 1 and bases[-1] - bases[0] < paged["block_stride"]
    where = "all layers of a block together" if beside else "layer by layer"
    return f"the cache lies {orders.get(paged['kind'], 'in opaque pages')}, {where}; {paged['layers']} layers, heads {paged['first_head']} to {paged['first_head'] + paged['heads'] - 1}"
