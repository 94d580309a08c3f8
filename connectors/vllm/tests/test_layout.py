"""KV tensors of every backend's shape, as described to the C side. Needs torch and the package; no engine runs."""

from __future__ import annotations

import unittest
from types import SimpleNamespace
from typing import Any

import torch

from kvd_vllm import _kvd, layout, self_test
from kvd_vllm.errors import Declined
from rig import common_config, worker_config

B, H, N, D, L = 6, 4, 32, 16, 3
SIZE = H * N * 2 * D  # elements of a block


def refusal(pages: list[layout.Page], block_tokens: int = N, heads: int = 0, first_head: int = 0) -> str:
    """Why a worker does not take these pages; empty: it does. heads: of the model, if it has more than the rank."""
    first = pages[0]
    if first.kind == _kvd.KIND_OPAQUE:
        block = layout.opaque_block(len(pages), block_tokens, first.page_bytes)
    else:
        block = layout.Block(heads or first.heads, len(pages), block_tokens, first.k_dim, first.v_dim, first.dtype)
    common = common_config("/nobody.sock", "layout", None, 1, layout=block.text(), groups=f"0:full:{block_tokens}", hash_tokens=block_tokens)
    paged = layout.paged(pages, 0, 0, first_head, block_tokens)
    try:
        _kvd.Worker(worker_config({**common, "layouts": [block.fields()]}, [], groups=[paged])).close()
    except ValueError as error:
        return str(error)
    return ""


def in_order(sizes: list[int], order: tuple[int, ...]) -> Any:
    """[L, B, H, N, C] in one allocation whose dimensions lie in `order`."""
    flat = torch.zeros([sizes[i] for i in order])
    return flat.permute([order.index(i) for i in range(len(sizes))])


class Opaque(unittest.TestCase):
    def opaque(self, tensor: Any, page_bytes: int = SIZE * 4) -> layout.Page:
        return layout.opaque(tensor, B, page_bytes)

    def test_every_order_whose_blocks_are_one_run_of_bytes(self) -> None:
        for order, stride, apart in (
            ((0, 1, 2, 3, 4), SIZE, B * SIZE),  # a layer of its own region
            ((0, 1, 3, 2, 4), SIZE, B * SIZE),  # tokens outside of heads
            ((1, 0, 2, 3, 4), L * SIZE, SIZE),  # blocks of all layers together
            ((1, 0, 3, 2, 4), L * SIZE, SIZE),
        ):
            every = in_order([L, B, H, N, 2 * D], order)
            pages = [self.opaque(every[i]) for i in range(L)]
            self.assertEqual([page.base for page in pages], [every.data_ptr() + i * apart * 4 for i in range(L)], order)
            self.assertEqual(pages[0].block_stride, stride * 4, order)
            self.assertEqual(refusal(pages), "", order)

    def test_heads_outside_of_blocks_or_layers_are_declined(self) -> None:
        for order in ((0, 2, 1, 3, 4), (1, 2, 0, 3, 4)):
            with self.assertRaises(Declined):
                self.opaque(in_order([L, B, H, N, 2 * D], order)[0])

    def test_kernel_blocks_are_put_together_again(self) -> None:
        self.assertEqual(self.opaque(torch.zeros(B * 4, H, N // 4, 2 * D)).block_stride, SIZE * 4)

    def test_latent_pages_of_16_tokens(self) -> None:
        self.assertEqual(refusal([self.opaque(torch.zeros(B, 16, 576), 16 * 576 * 4)], 16), "")

    def test_half_types_have_half_the_bytes(self) -> None:
        self.assertEqual(self.opaque(torch.zeros(B, H, N, 2 * D, dtype=torch.bfloat16), SIZE * 2).block_stride, SIZE * 2)

    def test_padded_pages_keep_their_distance(self) -> None:
        layer = torch.zeros(B, SIZE + 64)[:, :SIZE].unflatten(1, (H, N, 2 * D))
        page = self.opaque(layer, (SIZE + 64) * 4)
        self.assertEqual((page.page_bytes, page.block_stride), ((SIZE + 64) * 4,) * 2)
        for wrong in (SIZE * 4 - 4, (SIZE + 65) * 4):
            with self.assertRaises(Declined):
                self.opaque(layer, wrong)

    def test_states_of_a_layer_share_its_page(self) -> None:
        page, room = 1024, torch.zeros((B + 1) * 1024 // 4)

        def state(at: int, *shape: int, step: int = page // 4) -> Any:
            return room.as_strided((B, *shape), (step, *torch.empty(shape).stride()), at)

        first, second = state(0, 3, 8), state(24, 2, 4, 4)
        for parts in ([first, second], [second, first], [state(0, 1, 1, 56)]):
            found = layout.states(parts, B, page)
            self.assertEqual((found.kind, found.page_bytes, found.block_stride, found.base), (_kvd.KIND_OPAQUE, page, page, room.data_ptr()))
        for wrong in ([first, state(20, 2, 4, 4)], [first, state(24, 2, step=250)], [first.transpose(1, 2)[:, ::2]], [first, state(240, 40)], [state(0, 8)[1:]]):
            with self.assertRaises(Declined):
                layout.states(wrong, B, page)

    def test_blocks_that_are_not_the_first_dimension_are_declined(self) -> None:
        with self.assertRaises(Declined):
            self.opaque(torch.zeros(2, B + 1, N, H, D), 4)


class Device:
    """What a tensor in a GPU's memory says of itself. There is none here."""

    def __init__(self, shape: tuple[int, ...], stride: tuple[int, ...] | None = None, size: int = 2, at: int = 0x7F0000000000) -> None:
        self.shape, self._size, self._at = shape, size, at
        packed = [1]
        for n in reversed(shape[1:]):
            packed.insert(0, packed[0] * n)
        self._stride = tuple(stride if stride is not None else packed)

    def stride(self, i: int | None = None) -> Any:
        return self._stride if i is None else self._stride[i]

    def dim(self) -> int:
        return len(self.shape)

    def element_size(self) -> int:
        return self._size

    def data_ptr(self) -> int:
        return self._at

    def permute(self, order: list[int]) -> "Device":
        return Device(tuple(self.shape[i] for i in order), tuple(self._stride[i] for i in order), self._size, self._at)

    def __getitem__(self, i: int) -> "Device":
        return Device(self.shape[1:], self._stride[1:], self._size, self._at + i * self._stride[0] * self._size)


GQA = layout.Shape(16, 8, 128, 128, "bf16")
LATENT = layout.Shape(16, 1, 576, 0, "bf16")
FLASH = (0, 1, 3, 2, 4)  # heads before tokens, seen as (blocks, 2, tokens, heads, dim)


def pages_of(every: Device, shape: layout.Shape = GQA, blocks: int = 1000) -> list[layout.Page]:
    return [layout.structured(every[i], blocks, shape) for i in range(every.shape[0])]


class Structured(unittest.TestCase):
    """Shapes and strides as vLLM registers them (0.25.1 and 0.32), Llama 8B where nothing else is said: 8 heads of 128, 32 layers."""

    def check(self, pages: list[layout.Page], kind: int, block_stride: int, head_stride: int = 0, tokens: int = 16, message: Any = None) -> None:
        found = {(page.kind, page.block_stride, page.head_stride) for page in pages}
        self.assertEqual(found, {(kind, block_stride, head_stride)}, message)
        self.assertEqual(refusal(pages, tokens), "", message)

    def test_layer_by_layer(self) -> None:
        tokens_first = [Device((1000, 2, 16, 8, 128), at=0x7F0000000000 + i * 0x10000000) for i in range(32)]
        self.check([layout.structured(tensor, 1000, GQA) for tensor in tokens_first], _kvd.KIND_KV_TOKEN_HEAD, 65536)
        heads_first = Device((1000, 2, 8, 16, 128)).permute([*FLASH])
        self.assertEqual(heads_first.shape, (1000, 2, 16, 8, 128))
        self.check([layout.structured(heads_first, 1000, GQA)], _kvd.KIND_KV_HEAD_TOKEN, 65536)

    def test_one_tensor_for_all_layers(self) -> None:
        for shape, order, kind, head_stride, apart in (
            ((1000, 32, 2, 16, 8, 128), (1, 0, 2, 3, 4, 5), _kvd.KIND_KV_TOKEN_HEAD, 0, 65536),
            ((1000, 8, 32, 2, 16, 128), (1, 4, 0, 2, 3, 5), _kvd.KIND_HEAD_KV_TOKEN, 32 * 8192, 8192),  # the pool's own block
        ):
            every = layout.of_all_layers(Device(shape), order)
            self.assertEqual(every.shape, (32, 1000, 2, 16, 8, 128))
            pages = pages_of(every)
            self.check(pages, kind, 2 << 20, head_stride)
            self.assertEqual([page.base - pages[0].base for page in pages], [i * apart for i in range(32)])

    def test_an_order_that_is_none_is_declined(self) -> None:
        with self.assertRaises(Declined):
            layout.of_all_layers(Device((1000, 32, 2, 16, 8, 128)), (1, 0, 2, 3, 4))

    def test_one_latent_vector_a_token(self) -> None:
        for tensor, shape, stride in (
            (Device((1000, 16, 576)), LATENT, 18432),
            (Device((1000, 1, 16, 576)), LATENT, 18432),  # vLLM 0.32: with a dimension of its one head
            (Device((4000, 1, 16, 576)), layout.Shape(64, 1, 576, 0, "bf16"), 73728),
            (Device((1000, 64, 656), size=1), layout.Shape(64, 1, 656, 0, "byte"), 64 * 656),
            (Device((4000, 16, 576)), layout.Shape(64, 1, 576, 0, "bf16"), 73728),  # of kernel blocks of 16 tokens
        ):
            page = layout.structured(tensor, 1000, shape)
            self.check([page], _kvd.KIND_KV_TOKEN_HEAD, stride, tokens=shape.tokens)
            self.assertEqual((page.heads, page.block_tokens, page.v_dim), (1, shape.tokens, 0))

    def test_a_block_cut_into_pieces_of_keys_and_values_is_declined(self) -> None:
        with self.assertRaisesRegex(Declined, "cut"):
            layout.structured(Device((2000, 2, 16, 8, 128)), 1000, layout.Shape(32, 8, 128, 128, "bf16"))

    def test_groups_that_share_storages_lie_alike(self) -> None:
        shape = layout.Shape(16, 1, 256, 256, "bf16")
        groups = [[layout.structured(Device((500, 2, 16, 1, 256), at=0x7F0000000000 + s * 0x20000000), 500, shape) for s in range(2)] for _ in range(6)]
        for group in groups:
            self.assertEqual(refusal(group, 16), "")
        self.assertEqual(len({page.base for group in groups for page in group}), 2)

    def test_padded_pages_keep_their_distance(self) -> None:
        page = layout.structured(Device((500, 2, 16, 8, 128), (40000, 16384, 1024, 128, 1)), 500, GQA)
        self.check([page], _kvd.KIND_KV_TOKEN_HEAD, 80000)

    def test_all_orders_of_later_versions(self) -> None:
        sizes = {"L": 32, "B": 1000, "H": 8, "N": 16, "C": 256}
        for order, kind, stride, apart in (
            ("LBHNC", _kvd.KIND_HEAD_TOKEN_KV, 65536, 0),
            ("LBNHC", _kvd.KIND_TOKEN_HEAD_KV, 65536, 0),
            ("LHBNC", _kvd.KIND_HEAD_TOKEN_KV, 8192, 8192000),
            ("BLHNC", _kvd.KIND_HEAD_TOKEN_KV, 2 << 20, 0),
            ("BLNHC", _kvd.KIND_TOKEN_HEAD_KV, 2 << 20, 0),
            ("BHLNC", _kvd.KIND_HEAD_TOKEN_KV, 2 << 20, 32 * 8192),
        ):
            every = Device(tuple(sizes[c] for c in order)).permute([order.index(c) for c in "LBHNC"])
            self.check(pages_of(every), kind, stride, apart, message=order)

    def test_one_head_of_a_rank_has_whatever_stride(self) -> None:
        shape = layout.Shape(16, 1, 128, 128, "bf16")
        for tensor in (Device((64, 2, 16, 1, 128)), Device((64, 2, 1, 16, 128)).permute([*FLASH]), Device((64, 1, 16, 256))):
            self.assertEqual(refusal([layout.structured(tensor, 64, shape)], 16), "")

    def test_a_rank_has_its_own_heads(self) -> None:
        page = layout.structured(Device((64, 2, 16, 4, 128)), 64, layout.Shape(16, 4, 128, 128, "bf16"))
        for first, refused in ((0, False), (4, False), (5, True)):
            self.assertEqual(bool(refusal([page], 16, 8, first)), refused)

    def test_what_cannot_be_described_is_declined_with_its_shape(self) -> None:
        for tensor, shape in (
            (Device((2, 1000, 16, 8, 128)), GQA),  # keys of all blocks, then values: before 0.23
            (Device((1000, 2, 8, 128, 16)), GQA),
            (Device((1000, 2, 16, 8, 64)), GQA),
            (Device((1000, 2, 16, 8, 128), size=1), GQA),
            (Device((1000, 2, 16, 8, 128), (32768, 8, 2048, 256, 2)), GQA),
            (Device((1000, 2, 16, 8, 128), (32768, 64, 2048, 256, 1)), GQA),
            (Device((1000, 16, 576), (18432, 1152, 1)), LATENT),
            (Device((1000, 16, 512)), LATENT),
            (Device((1000, 2, 16, 576)), LATENT),
            (Device((1000, 16, 1, 576)), LATENT),
        ):
            with self.assertRaisesRegex(Declined, str(tensor.shape[0])):
                layout.structured(tensor, 1000, shape)

    def test_layers_of_different_shape_are_declined(self) -> None:
        pages = [layout.structured(tensor, 1000, GQA) for tensor in (Device((1000, 2, 16, 8, 128)), Device((1000, 2, 8, 16, 128)).permute([*FLASH]))]
        with self.assertRaises(Declined):
            layout.paged(pages, 0, 0)

    def test_the_log_says_how_it_lies(self) -> None:
        every = layout.of_all_layers(Device((1000, 8, 32, 2, 16, 128)), (1, 4, 0, 2, 3, 5))
        text = layout.describe(layout.paged(pages_of(every), 0, 0))
        self.assertIn("[head][keys, values][token], all layers of a block together; 32 layers, heads 0 to 7", text)


class SelfTest(unittest.TestCase):
    """The test itself, against copies that are wrong in every way it must notice."""

    def tensors(self) -> list[Any]:
        generator = torch.Generator().manual_seed(5)
        return [torch.randn(B * 2, H, N // 2, 2 * D, generator=generator) for _ in range(L)]  # kernel blocks of half the size

    def check(self, copy: Any, status: int = _kvd.OK) -> None:
        """Whatever comes of it, the cache has what it had."""
        tensors = self.tensors()

        def roundtrip(group: int, source: int, target: int) -> int:
            copy([tensor.unflatten(0, (B, 2)) for tensor in tensors], source, target)
            return status

        try:
            self_test.run(SimpleNamespace(roundtrip_test=roundtrip), 0, tensors, B)
        finally:
            for tensor, before in zip(tensors, self.tensors()):
                self.assertTrue(torch.equal(tensor, before))

    def right(self, tensors: list[Any], source: int, target: int) -> None:
        for tensor in tensors:
            tensor[target].copy_(tensor[source])

    def test_a_right_copy_passes_and_leaves_no_trace(self) -> None:
        self.check(self.right)

    def test_every_wrong_copy_is_noticed_and_undone(self) -> None:
        def short_one(tensors: list[Any], source: int, target: int) -> None:
            self.right(tensors[:-1], source, target)

        def spills(tensors: list[Any], source: int, target: int) -> None:
            self.right(tensors, source, target)
            tensors[1][target + 1, 0, 0, 0, 0] += 1

        def swaps(tensors: list[Any], source: int, target: int) -> None:
            for to, of in ((0, 1), (1, 0), (2, 2)):
                tensors[to][target].copy_(tensors[of][source])

        def clears(tensors: list[Any], source: int, target: int) -> None:
            self.right(tensors, source, target)
            tensors[2][source].zero_()

        def one_byte(tensors: list[Any], source: int, target: int) -> None:
            self.right(tensors, source, target)
            tensors[2].view(torch.uint8)[target, 1, H - 1, N // 2 - 1, -1] ^= 1

        for wrong in (short_one, spills, swaps, clears, one_byte, lambda *_: None):
            with self.assertRaises(Declined, msg=repr(wrong)):
                self.check(wrong)

    def test_a_refusal_of_the_c_side_is_a_decline(self) -> None:
        with self.assertRaises(Declined):
            self.check(self.right, -1)


if __name__ == "__main__":
    unittest.main()
