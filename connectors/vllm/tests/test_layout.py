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
    text = layout.layout_text(pages[0], len(pages), heads, block_tokens)
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


class Structured(unittest.TestCase):
    def test_keys_then_values_token_by_token(self) -> None:
        page = layout.describe_layer(torch.zeros(B, 2, N, H, D, dtype=torch.bfloat16), B, N)
        self.assertEqual((page.kind, page.heads, page.k, page.v, page.dtype), (_kvd.KIND_KV_TOKEN_HEAD, H, D, D, "bf16"))
        self.assertIsNone(fits([page], H))
        self.assertIn("inner=split", layout.layout_text(page, 1, H, N))

    def test_head_by_head(self) -> None:
        page = layout.describe_layer(torch.zeros(B, H, N, 2 * D), B, N)
        self.assertEqual((page.kind, page.heads, page.k, page.v, page.dtype), (_kvd.KIND_HEAD_TOKEN_KV, H, D, D, "f32"))
        self.assertIsNone(fits([page], H))
        self.assertIn("inner=packed", layout.layout_text(page, 1, H, N))

    def test_head_by_head_in_name_and_token_by_token_in_memory_is_opaque(self) -> None:
        page = layout.describe_layer(torch.zeros(B, N, H, 2 * D).permute(0, 2, 1, 3), B, N)
        self.assertEqual(page.kind, _kvd.KIND_OPAQUE)
        self.assertIsNone(fits([page], 1))

    def test_one_latent_vector_a_token(self) -> None:
        page = layout.describe_layer(torch.zeros(B, N, 576, dtype=torch.float16), B, N)
        self.assertEqual((page.kind, page.heads, page.k, page.v), (_kvd.KIND_KV_TOKEN_HEAD, 1, 576, 0))
        self.assertIsNone(fits([page], 1))

    def test_one_tensor_for_all_layers(self) -> None:
        every = torch.zeros(B, L, 2, N, H, D)
        pages = layout.cross_layers(every, B, N)
        self.assertEqual([page.base for page in pages], [address(every, 0, i) for i in range(L)])
        self.assertEqual(pages[0].stride, L * 2 * N * H * D * 4)
        self.assertIsNone(fits(pages, H))
        with self.assertRaises(Declined):
            layout.cross_layers(torch.zeros(B, L, N, 576), B, N)

    def test_layers_of_different_shape_are_declined(self) -> None:
        pages = [layout.describe_layer(torch.zeros(B, 2, N, heads, D), B, N) for heads in (H, H // 2)]
        with self.assertRaises(Declined):
            layout.paged(pages, 0, 0)


class SelfTest(unittest.TestCase):
    """The proof itself, against copies that are wrong in every way it must notice."""

    def tensors(self) -> list[Any]:
        generator = torch.Generator().manual_seed(5)
        return [torch.randn(B, H, N, 2 * D, generator=generator) for _ in range(L)]

    def run_with(self, tensors: list[Any], copy: Any, status: int = _kvd.OK) -> None:
        def echo(group: int, source: int, target: int) -> int:
            copy(tensors, source, target)
            return status

        selftest.run(SimpleNamespace(echo=echo), 0, tensors, B)

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
