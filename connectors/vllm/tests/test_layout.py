"""KV tensors of every backend's shape, as described to the C side. Needs torch and the package; no engine runs."""

from __future__ import annotations

import unittest
from types import SimpleNamespace
from typing import Any

import torch

from kvd_vllm import _kvd, layout, selftest
from kvd_vllm.errors import Declined

B, H, N, D, L = 6, 4, 32, 16, 3


def fits(pages: list[layout.Page], heads: int, block_tokens: int = N) -> str | None:
    """What the C side says of pages: opaque ones, or those of a rank that has `heads` heads."""
    first = pages[0]
    if first.kind == _kvd.KIND_OPAQUE:
        text = layout.opaque_text(len(pages), block_tokens, first.page)
    else:
        text = layout.layout_text(len(pages), heads, layout.Shape(block_tokens, heads, first.k, first.v, first.dtype))
    assert _kvd.check_layout(text) is None, text
    return _kvd.check_paged(layout.paged(pages, 0, 0, block_tokens=block_tokens), text)


def address(tensor: Any, *index: int) -> int:
    return tensor[index].data_ptr()


class Opaque(unittest.TestCase):
    def storage(self, shape: tuple[int, ...], order: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Any:
        """[L, B, H, N, C] in one allocation whose dimensions lie in `order`."""
        flat = torch.zeros([shape[i] for i in order], dtype=dtype)
        return flat.permute([order.index(i) for i in range(len(shape))])

    def test_a_layer_of_its_own_region(self) -> None:
        every = self.storage((L, B, H, N, 2 * D), (0, 1, 2, 3, 4))
        pages = [layout.opaque(every[i], B, H * N * 2 * D * 4) for i in range(L)]
        self.assertEqual([page.base for page in pages], [address(every, i) for i in range(L)])
        self.assertEqual(pages[0].stride, H * N * 2 * D * 4)
        self.assertIsNone(fits(pages, 1))

    def test_tokens_outside_of_heads_are_one_run_all_the_same(self) -> None:
        every = self.storage((L, B, H, N, 2 * D), (0, 1, 3, 2, 4))
        self.assertIsNone(fits([layout.opaque(every[i], B, H * N * 2 * D * 4) for i in range(L)], 1))

    def test_blocks_of_all_layers_together(self) -> None:
        for order in ((1, 0, 2, 3, 4), (1, 0, 3, 2, 4)):
            every = self.storage((L, B, H, N, 2 * D), order)
            pages = [layout.opaque(every[i], B, H * N * 2 * D * 4) for i in range(L)]
            self.assertEqual(pages[1].base - pages[0].base, H * N * 2 * D * 4)
            self.assertEqual(pages[0].stride, L * H * N * 2 * D * 4)
            self.assertIsNone(fits(pages, 1))

    def test_heads_outside_of_blocks_or_layers_are_declined(self) -> None:
        for order in ((0, 2, 1, 3, 4), (1, 2, 0, 3, 4)):
            every = self.storage((L, B, H, N, 2 * D), order)
            with self.assertRaises(Declined):
                layout.opaque(every[0], B, H * N * 2 * D * 4)

    def test_kernel_blocks_are_put_together_again(self) -> None:
        layer = torch.zeros(B * 4, H, N // 4, 2 * D)
        page = layout.opaque(layer, B, H * N * 2 * D * 4)
        self.assertEqual(page.stride, H * N * 2 * D * 4)

    def test_latent_pages_of_16_tokens(self) -> None:
        self.assertIsNone(fits([layout.opaque(torch.zeros(B, 16, 576), B, 16 * 576 * 4)], 1, 16))

    def test_half_types_have_half_the_bytes(self) -> None:
        self.assertEqual(layout.opaque(torch.zeros(B, H, N, 2 * D, dtype=torch.bfloat16), B, H * N * 2 * D * 2).stride, H * N * 2 * D * 2)

    def test_padded_pages_keep_their_distance(self) -> None:
        flat = torch.zeros(B, H * N * 2 * D + 64)
        layer = flat[:, : H * N * 2 * D].unflatten(1, (H, N, 2 * D))
        page = layout.opaque(layer, B, (H * N * 2 * D + 64) * 4)
        self.assertEqual((page.page, page.stride), ((H * N * 2 * D + 64) * 4,) * 2)
        with self.assertRaises(Declined):
            layout.opaque(layer, B, H * N * 2 * D * 4 - 4)
        with self.assertRaises(Declined):
            layout.opaque(layer, B, (H * N * 2 * D + 65) * 4)

    def test_blocks_that_are_not_the_first_dimension_are_declined(self) -> None:
        with self.assertRaises(Declined):
            layout.opaque(torch.zeros(2, B + 1, N, H, D), B, 4)


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


def model(page: layout.Page) -> tuple[Any, ...]:
    return page.kind, page.heads, page.k, page.v, page.stride, page.apart


class Structured(unittest.TestCase):
    """Shapes and strides as vLLM registers them (0.25.1 and 0.32), Llama 8B where nothing else is said: 8 heads of 128, 32 layers."""

    def test_layer_by_layer_tokens_first(self) -> None:
        pages = [layout.structured(Device((1000, 2, 16, 8, 128), at=0x7F0000000000 + i * 0x10000000), 1000, GQA) for i in range(32)]
        self.assertEqual(model(pages[0]), (_kvd.KIND_KV_TOKEN_HEAD, 8, 128, 128, 65536, 0))
        self.assertIsNone(fits(pages, 8, 16))

    def test_layer_by_layer_heads_first(self) -> None:
        tensor = Device((1000, 2, 8, 16, 128)).permute([0, 1, 3, 2, 4])
        self.assertEqual(tensor.shape, (1000, 2, 16, 8, 128))
        page = layout.structured(tensor, 1000, GQA)
        self.assertEqual(model(page), (_kvd.KIND_KV_HEAD_TOKEN, 8, 128, 128, 65536, 0))
        self.assertIsNone(fits([page], 8, 16))

    def test_one_tensor_for_all_layers_tokens_first(self) -> None:
        every = layout.of_all_layers(Device((1000, 32, 2, 16, 8, 128)), (1, 0, 2, 3, 4, 5))
        pages = [layout.structured(every[i], 1000, GQA) for i in range(32)]
        self.assertEqual(model(pages[0]), (_kvd.KIND_KV_TOKEN_HEAD, 8, 128, 128, 32 * 65536, 0))
        self.assertEqual(pages[3].base - pages[0].base, 3 * 65536)
        self.assertIsNone(fits(pages, 8, 16))

    def test_one_tensor_for_all_layers_heads_first_is_the_pools_own_block(self) -> None:
        every = layout.of_all_layers(Device((1000, 8, 32, 2, 16, 128)), (1, 4, 0, 2, 3, 5))
        self.assertEqual(every.shape, (32, 1000, 2, 16, 8, 128))
        pages = [layout.structured(every[i], 1000, GQA) for i in range(32)]
        self.assertEqual(model(pages[0]), (_kvd.KIND_HEAD_KV_TOKEN, 8, 128, 128, 2 << 20, 32 * 8192))
        self.assertEqual(pages[31].base - pages[0].base, 31 * 8192)
        self.assertIsNone(fits(pages, 8, 16))

    def test_an_order_that_is_none_is_declined(self) -> None:
        with self.assertRaises(Declined):
            layout.of_all_layers(Device((1000, 32, 2, 16, 8, 128)), (1, 0, 2, 3, 4))

    def test_one_latent_vector_a_token(self) -> None:
        page = layout.structured(Device((1000, 16, 576)), 1000, LATENT)
        self.assertEqual(model(page), (_kvd.KIND_KV_TOKEN_HEAD, 1, 576, 0, 18432, 0))
        self.assertIsNone(fits([page], 1, 16))
        packed = layout.structured(Device((1000, 64, 656), size=1), 1000, layout.Shape(64, 1, 656, 0, "byte"))
        self.assertIsNone(fits([packed], 1, 64))

    def test_latent_vectors_of_small_kernel_blocks_are_one_block(self) -> None:
        page = layout.structured(Device((4000, 16, 576)), 1000, layout.Shape(64, 1, 576, 0, "bf16"))
        self.assertEqual((page.stride, page.tokens), (73728, 64))
        self.assertIsNone(fits([page], 1, 64))

    def test_a_block_cut_into_pieces_of_keys_and_values_is_declined(self) -> None:
        with self.assertRaisesRegex(Declined, "cut"):
            layout.structured(Device((2000, 2, 16, 8, 128)), 1000, layout.Shape(32, 8, 128, 128, "bf16"))

    def test_groups_that_share_storages_lie_alike(self) -> None:
        shape = layout.Shape(16, 1, 256, 256, "bf16")
        groups = [[layout.structured(Device((500, 2, 16, 1, 256), at=0x7F0000000000 + s * 0x20000000), 500, shape) for s in range(2)] for _ in range(6)]
        for group in groups:
            self.assertIsNone(fits(group, 1, 16))
        self.assertEqual(len({page.base for group in groups for page in group}), 2)

    def test_padded_pages_keep_their_distance(self) -> None:
        page = layout.structured(Device((500, 2, 16, 8, 128), (40000, 16384, 1024, 128, 1)), 500, GQA)
        self.assertEqual(model(page), (_kvd.KIND_KV_TOKEN_HEAD, 8, 128, 128, 80000, 0))
        self.assertIsNone(fits([page], 8, 16))

    def test_all_orders_of_later_versions(self) -> None:
        sizes = {"L": 32, "B": 1000, "H": 8, "N": 16, "C": 256}
        expected = {
            "LBHNC": (_kvd.KIND_HEAD_TOKEN_KV, 65536, 0),
            "LBNHC": (_kvd.KIND_TOKEN_HEAD_KV, 65536, 0),
            "LHBNC": (_kvd.KIND_HEAD_TOKEN_KV, 8192, 8192000),
            "BLHNC": (_kvd.KIND_HEAD_TOKEN_KV, 2 << 20, 0),
            "BLNHC": (_kvd.KIND_TOKEN_HEAD_KV, 2 << 20, 0),
            "BHLNC": (_kvd.KIND_HEAD_TOKEN_KV, 2 << 20, 32 * 8192),
        }
        for order, (kind, stride, apart) in expected.items():
            every = Device(tuple(sizes[c] for c in order)).permute([order.index(c) for c in "LBHNC"])
            pages = [layout.structured(every[i], 1000, GQA) for i in range(32)]
            self.assertEqual((pages[0].kind, pages[0].stride, pages[0].apart), (kind, stride, apart), order)
            self.assertIsNone(fits(pages, 8, 16), order)

    def test_one_head_of_a_rank_has_whatever_stride(self) -> None:
        shape = layout.Shape(16, 1, 128, 128, "bf16")
        for tensor in (Device((64, 2, 16, 1, 128)), Device((64, 2, 1, 16, 128)).permute([0, 1, 3, 2, 4]), Device((64, 1, 16, 256))):
            self.assertIsNone(fits([layout.structured(tensor, 64, shape)], 1, 16))

    def test_a_rank_has_its_own_heads(self) -> None:
        shape = layout.Shape(16, 4, 128, 128, "bf16")
        page = layout.structured(Device((64, 2, 16, 4, 128)), 64, shape)
        text = layout.layout_text(1, 8, shape)
        for first in (0, 4):
            self.assertIsNone(_kvd.check_paged(layout.paged([page], 0, 0, first), text))
        self.assertIsNotNone(_kvd.check_paged(layout.paged([page], 0, 0, 5), text))

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
        ):
            with self.assertRaisesRegex(Declined, str(tensor.shape[0])):
                layout.structured(tensor, 1000, shape)

    def test_layers_of_different_shape_are_declined(self) -> None:
        pages = [layout.structured(tensor, 1000, GQA) for tensor in (Device((1000, 2, 16, 8, 128)), Device((1000, 2, 8, 16, 128)).permute([0, 1, 3, 2, 4]))]
        with self.assertRaises(Declined):
            layout.paged(pages, 0, 0)

    def test_the_log_says_how_it_lies(self) -> None:
        every = layout.of_all_layers(Device((1000, 8, 32, 2, 16, 128)), (1, 4, 0, 2, 3, 5))
        text = layout.sentence(layout.paged([layout.structured(every[i], 1000, GQA) for i in range(32)], 0, 0))
        self.assertIn("[head][keys, values][token], all layers of a block together; 32 layers, heads 0 to 7", text)


class SelfTest(unittest.TestCase):
    """The proof itself, against copies that are wrong in every way it must notice."""

    def tensors(self) -> list[Any]:
        generator = torch.Generator().manual_seed(5)
        return [torch.randn(B, H, N, 2 * D, generator=generator) for _ in range(L)]

    def run_with(self, tensors: list[Any], copy: Any, status: int = _kvd.OK) -> None:
        def echo(group: int, source: int, target: int) -> int:
            copy(tensors, source, target)
            return status

        selftest.run(SimpleNamespace(roundtrip_test=echo), 0, tensors, B)

    def right(self, tensors: list[Any], source: int, target: int) -> None:
        for tensor in tensors:
            tensor[target].copy_(tensor[source])

    def test_a_right_copy_passes_and_leaves_no_trace(self) -> None:
        tensors = self.tensors()
        self.run_with(tensors, self.right)
        for tensor, before in zip(tensors, self.tensors()):
            self.assertTrue(torch.equal(tensor, before))

    def test_every_wrong_copy_is_noticed_and_undone(self) -> None:
        def short_one(tensors: list[Any], source: int, target: int) -> None:
            self.right(tensors[:-1], source, target)

        def spills(tensors: list[Any], source: int, target: int) -> None:
            self.right(tensors, source, target)
            tensors[1][target + 1, 0, 0, 0] += 1

        def swaps(tensors: list[Any], source: int, target: int) -> None:
            tensors[0][target].copy_(tensors[1][source])
            tensors[1][target].copy_(tensors[0][source])
            tensors[2][target].copy_(tensors[2][source])

        def clears(tensors: list[Any], source: int, target: int) -> None:
            self.right(tensors, source, target)
            tensors[2][source].zero_()

        def one_byte(tensors: list[Any], source: int, target: int) -> None:
            self.right(tensors, source, target)
            tensors[2].view(torch.uint8)[target, H - 1, N - 1, -1] ^= 1

        for wrong in (short_one, spills, swaps, clears, one_byte, lambda *_: None):
            tensors = self.tensors()
            with self.assertRaises(Declined, msg=repr(wrong)):
                self.run_with(tensors, wrong)
            for tensor, before in zip(tensors, self.tensors()):
                self.assertTrue(torch.equal(tensor, before))

    def test_a_refusal_of_the_c_side_is_a_decline(self) -> None:
        with self.assertRaises(Declined):
            self.run_with(self.tensors(), self.right, -1)


if __name__ == "__main__":
    unittest.main()
