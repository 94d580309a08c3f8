"""How an engine's KV tensors lie, as kvk_paged_t wants it: where each layer begins, from block to block, and what a page looks like inside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvd_vllm import _kvd
from kvd_vllm.errors import Declined
from kvd_vllm.identity import short


@dataclass(frozen=True)
class Page:
    """A layer's cache: `kind` of kvk_paged_kind_t and the dimensions that belong to it; bytes."""

    kind: int
    heads: int
    tokens: int
    k: int
    v: int
    page: int  # bytes of one block in this layer
    stride: int  # bytes from block to block
    base: int  # address of block 0
    blocks: int
    dtype: str


def _packed(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Elements lie one after another, last dimension fastest."""
    expect = 1
    for size, step in zip(reversed(shape), reversed(stride)):
        if size != 1 and step != expect:
            return False
        expect *= size
    return True


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
    """Pages whose inside is the engine's business. Any order of dimensions, as long as a block of a layer is one run of bytes."""
    shape, stride, step = _block(tensor, num_blocks)
    size = tensor.element_size()
    run = 1 + sum((n - 1) * s for n, s in zip(shape, stride))
    count = 1
    for n in shape:
        count *= n
    if run != count:
        raise Declined(f"a block of a KV tensor of shape {tuple(tensor.shape)}, strides {tuple(tensor.stride())} is not one run of bytes")
    if count * size > page_bytes or step * size < page_bytes:
        raise Declined(f"a page has {count * size} bytes and blocks are {step * size} apart; the engine said {page_bytes} bytes a page")
    return Page(_kvd.KIND_OPAQUE, 1, 0, 0, 0, page_bytes, step * size, tensor.data_ptr(), num_blocks, "byte")


def structured(tensor: Any, num_blocks: int, block_tokens: int) -> Page:
    """The layouts of GPU backends that kvd can split by head:

    (B, 2, N, H, D)  keys, then values, token by token (FlashAttention NHD)         [block][K|V][token][head][dim]
    (B, H, N, 2D)    head by head, key and value of a token together                [block][head][token][2 x dim]
    (B, N, D)        one latent vector a token (MLA)                                [block][token][dim]

    Others, (B, H, N, 2D) with tokens outside of heads among them, are described as opaque pages by the caller.
    """
    shape, stride, step = _block(tensor, num_blocks)
    size = tensor.element_size()
    common = {"stride": step * size, "base": tensor.data_ptr(), "blocks": num_blocks, "dtype": short(tensor.dtype)}
    if not _packed(shape, stride):
        raise Declined(f"strides {tuple(tensor.stride())} of a KV tensor of shape {tuple(tensor.shape)} are not those of a known layout")
    if len(shape) == 4 and shape[0] == 2 and shape[1] == block_tokens:
        _, tokens, heads, dim = shape
        return Page(_kvd.KIND_KV_TOKEN_HEAD, heads, tokens, dim, dim, 2 * tokens * heads * dim * size, **common)
    if len(shape) == 3 and shape[1] == block_tokens and shape[2] % 2 == 0:
        heads, tokens, both = shape
        return Page(_kvd.KIND_HEAD_TOKEN_KV, heads, tokens, both // 2, both // 2, heads * tokens * both * size, **common)
    if len(shape) == 2 and shape[0] == block_tokens:
        tokens, dim = shape
        return Page(_kvd.KIND_KV_TOKEN_HEAD, 1, tokens, dim, 0, tokens * dim * size, **common)
    raise Declined(f"a KV tensor of shape {tuple(tensor.shape)} is of no known layout")


def cross_layers(tensor: Any, num_blocks: int, block_tokens: int) -> list[Page]:
    """One tensor for all layers (B, L, 2, N, H, D): every layer is a view of it."""
    if tensor.dim() != 6:
        raise Declined(f"a KV tensor of all layers of shape {tuple(tensor.shape)} is of no known layout")
    return [structured(tensor[:, layer], num_blocks, block_tokens) for layer in range(tensor.shape[1])]


def describe_layer(tensor: Any, num_blocks: int, block_tokens: int) -> Page:
    """The layout that says most about a layer: by head where that is known, opaque otherwise."""
    try:
        return structured(tensor, num_blocks, block_tokens)
    except Declined:
        shape, _, _ = _block(tensor, num_blocks)
        count = 1
        for n in shape:
            count *= n
        return opaque(tensor, num_blocks, count * tensor.element_size())


def paged(pages: Sequence[Page], group: int, first_layer: int, first_head: int = 0, block_tokens: int | None = None) -> dict[str, Any]:
    """kvk_paged_t of a group as _kvd takes it. All layers must lie alike."""
    first = pages[0]
    alike = ("kind", "heads", "tokens", "k", "v", "page", "stride", "blocks", "dtype")
    for other in pages[1:]:
        if any(getattr(first, name) != getattr(other, name) for name in alike):
            raise Declined("the layers of a group do not lie alike")
    plain = first.kind == _kvd.KIND_OPAQUE
    return {
        "group": group,
        "kind": first.kind,
        "dtype": getattr(_kvd, "DTYPE_" + first.dtype),
        "blocks": first.blocks,
        "layers": len(pages),
        "first_layer": first_layer,
        "heads": first.heads,
        "first_head": first_head,
        "tokens": block_tokens or first.tokens,
        "k": first.k,
        "v": first.v,
        "page": first.page if plain else 0,
        "stride": first.stride,
        "base": [page.base for page in pages],
    }


def layout_text(page: Page, layers: int, heads: int, block_tokens: int) -> str:
    """Canonical text of the pool block that such pages of all ranks make up."""
    if page.kind == _kvd.KIND_OPAQUE:
        return f"kvk1 heads=1 layers={layers} tokens={block_tokens} k=0 v=0 dtype=byte inner=opaque page={page.page}"
    inner = "packed" if page.kind == _kvd.KIND_HEAD_TOKEN_KV else "split"
    return f"kvk1 heads={heads} layers={layers} tokens={block_tokens} k={page.k} v={page.v} dtype={page.dtype} inner={inner} page=0"
