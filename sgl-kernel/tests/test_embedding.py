"""Rows of a table, and rows of a packed weight that is the table as well."""

import pytest
import torch

from sgl_kernel.embedding import embed_blocks, embed_panels, embed_rows, embed_rows_reference
from sgl_kernel.linear import BlockForm, BlockWeight, pack_blocks, pack_panels


def draw(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def draw_blocks(form, outputs, inputs):
    source = torch.Generator().manual_seed(1)
    numbers = torch.randint(form.lowest, form.highest + 1, (outputs, inputs), generator=source)
    numbers = numbers.to(torch.int8)
    scales = torch.randn(outputs, inputs // 32 * form.scales, generator=source).half()
    minima = torch.randn(outputs, inputs // 32, generator=source).half()
    return BlockWeight(form, numbers, scales, minima if form.has_minimum else None)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_rows_of_a_table_are_copied(dtype):
    table, ids = draw(11, 5, dtype=dtype), torch.tensor([3, 0, 10, 3])
    assert torch.equal(embed_rows(ids, table, table.new_empty(4, 5)), table[ids])
    assert torch.equal(embed_rows(ids, table, table.new_empty(4, 5)), embed_rows_reference(ids, table))


def test_a_share_of_a_table_gives_zeros_for_rows_of_others_and_a_whole_one_refuses_them():
    table, ids = draw(4, 6), torch.tensor([7, 8, 11, 12])
    found = embed_rows(ids, table, torch.empty(4, 6), 8, True)
    assert torch.equal(found, embed_rows_reference(ids, table, 8, True))
    assert not found[0].any() and torch.equal(found[1:3], table[[0, 3]])
    with pytest.raises(RuntimeError, match="id 7 of a table of 4"):
        embed_rows(ids, table, torch.empty(4, 6))
    with pytest.raises(ValueError, match="of a table of 4"):
        embed_rows_reference(ids, table)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("count", "hidden"), [(70, 6), (32, 5), (1, 1), (65, 64)])
def test_rows_come_out_of_panels_as_they_went_in(count, hidden, dtype):
    table, ids = draw(count, hidden, dtype=dtype), torch.tensor([count - 1, 0, count // 2, 0])
    found = embed_panels(ids, pack_panels(table), table.new_empty(4, hidden), count)
    assert torch.equal(found, embed_rows_reference(ids, table))
    assert embed_panels(ids[:0], pack_panels(table), table.new_empty(0, hidden), count).numel() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", list(BlockForm))
def test_rows_come_out_of_blocks_as_the_dequantized_table_has_them(form, dtype):
    for count, hidden in ((37, 96), (16, 32)):
        weight, ids = draw_blocks(form, count, hidden), torch.tensor([count - 1, 0, 5, 15])
        found = embed_blocks(ids, pack_blocks(weight), torch.empty(4, hidden, dtype=dtype), form, count)
        assert torch.equal(found, weight.dequantized().to(dtype)[ids])


def test_packed_shares_give_zeros_for_rows_of_others_and_whole_ones_refuse_them():
    """Also for ids in the padding behind the last row, which is packed and belongs to nobody."""
    table, blocks = draw(4, 32), draw_blocks(BlockForm.Q8, 4, 32)
    calls = {
        "panels": (
            table,
            lambda ids, *rest: embed_panels(ids, pack_panels(table), torch.ones(4, 32), 4, *rest),
        ),
        "blocks": (
            blocks.dequantized(),
            lambda ids, *rest: embed_blocks(
                ids, pack_blocks(blocks), torch.ones(4, 32), BlockForm.Q8, 4, *rest
            ),
        ),
    }
    for name, (rows, call) in calls.items():
        found = call(torch.tensor([7, 8, 11, 12]), 8, True)
        assert not found[[0, 3]].any() and torch.equal(found[1:3], rows[[0, 3]])
        with pytest.raises(RuntimeError, match=f"embed_{name}: id 4 of a table of 4"):
            call(torch.tensor([3, 4, 0, 0]))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda ids: embed_rows(ids, draw(3, 4), draw(2, 5)), "of its dtype"),
        (lambda ids: embed_rows(ids.int(), draw(3, 4), draw(2, 4)), "contiguous int64"),
        (lambda ids: embed_panels(ids, pack_panels(draw(3, 4)), draw(2, 4), 33), "number of rows than 33"),
        (lambda ids: embed_panels(ids, pack_panels(draw(3, 4)), draw(2, 5), 3), "length of one"),
        (lambda ids: embed_panels(ids, pack_panels(draw(3, 4)), draw(2, 4).bfloat16(), 3), "of its dtype"),
        (
            lambda ids: embed_blocks(
                ids, pack_blocks(draw_blocks(BlockForm.Q4, 3, 32)), draw(2, 32), BlockForm.Q8, 3
            ),
            "number of rows than 3",
        ),
        (
            lambda ids: embed_blocks(
                ids, pack_blocks(draw_blocks(BlockForm.Q4, 3, 32)), draw(2, 32).half(), BlockForm.Q4, 3
            ),
            "float32 or bfloat16",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(call, said):
    with pytest.raises(RuntimeError, match=said):
        call(torch.zeros(2).long())
