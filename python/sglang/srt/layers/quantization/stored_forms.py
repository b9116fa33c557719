"""Owns the forms in which an unquantized weight is stored, and which one suits a device and a type.

Read by `unquant.py`. It must not change values: every form multiplies the numbers of the checkpoint in the
model's type, with at least the precision of that type.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sglang.kernels.compiled import compiled_kernels
from sglang.srt.layers.quantization.base_config import StoredWeight
from sglang.srt.platforms import cpu_flags, cpu_has_bf16

#: Rows of input that the packed layout is asked to suit; measured best or equal from 2 to 256 rows.
_PACKED_ROWS = 32
#: A packed weight keeps a second form for single rows if that one takes at most this much.
_SINGLE_ROW_BYTES = 64 << 20
#: Outputs of one bag (see `BagWeight`): their sums fit in registers.
_BAG = 64


class RowMajorWeight(StoredWeight):
    """As the checkpoint has it, [out, in]."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, self.weight, bias)

    def unpack(self) -> torch.Tensor:
        return self.weight


class TransposedWeight(StoredWeight):
    """[in, out]: for a single row of float32 one thread reads it 1.3 times as fast as [out, in]."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.transposed = weight.t().contiguous()

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.mm(x, self.transposed) if bias is None else torch.addmm(bias, x, self.transposed)

    def unpack(self) -> torch.Tensor:
        return self.transposed.t().contiguous()


class SplitRowsWeight(StoredWeight):
    """[threads, out / threads, in], a view: for a single row of float32 each thread reads its own part.

    The plain product of one row hardly uses a second thread; this one reads 1.4 times as fast with two.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        threads = torch.get_num_threads()
        self.parts = weight.view(threads, weight.shape[0] // threads, weight.shape[1])

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows = x.expand(self.parts.shape[0], 1, self.parts.shape[2])
        out = torch.bmm(rows, self.parts.transpose(1, 2)).view(1, -1)
        return out if bias is None else out.add_(bias)

    def unpack(self) -> torch.Tensor:
        return self.parts.reshape(-1, self.parts.shape[2])


class BagWeight(StoredWeight):
    """A single row times 16-bit numbers, without a 16-bit product.

    y = sum of x[i] * weight[:, i] is a weighted embedding bag over the inputs, and that kernel (FBGEMM)
    widens on the way and sums in float32: 1.7 times as fast as the emulated product, with half the bytes of
    a widened weight. The outputs are cut into bags of 64, each of whose rows lie together.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        out, inner = weight.shape
        bags = out // _BAG
        # [out / _BAG * in, _BAG]
        self.table = weight.view(bags, _BAG, inner).transpose(1, 2).reshape(bags * inner, _BAG)
        self.indices = torch.arange(bags * inner, device=weight.device)
        self.offsets = torch.arange(bags, device=weight.device) * inner

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        weights = x.expand(len(self.offsets), -1).reshape(-1)
        out, *_ = torch._embedding_bag_forward_only(
            self.table, self.indices, self.offsets, False, 0, False, weights
        )
        out = out.view(1, -1)
        return out if bias is None else out.add_(bias)

    def unpack(self) -> torch.Tensor:
        bags = len(self.offsets)
        return self.table.view(bags, -1, _BAG).transpose(1, 2).reshape(bags * _BAG, -1)


class PackedWeight(StoredWeight):
    """float32 in oneDNN's blocked layout, for CPUs; 16-bit numbers are widened to it.

    A weight that is not too large keeps a second form for single rows. Against row-major float32, one thread,
    all weights of SmolLM2: 1.9 times as fast for 2 rows, 1.5 for 4 to 8, 1.3 for 16, equal from 64 on, and
    for one. An emulated 16-bit product takes 2 to 7 times as long as the float32 one. Sums are float32 in
    every case; only their order differs.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.dtype = weight.dtype
        self.blocks: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.float(), _PACKED_ROWS)
        self.single = _for_single_rows(weight)

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if x.shape[0] == 1 and self.single is not None:
            return self.single.apply(x, bias)
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x.float(), self.blocks, None, "none", [], "")
        out = out.to(x.dtype)
        return out if bias is None else out.add_(bias)

    def unpack(self) -> torch.Tensor:
        weight: torch.Tensor = self.blocks.to_dense()
        return weight.to(self.dtype)


class PanelWeight(StoredWeight):
    """Panels of 32 outputs, multiplied by the compiled kernels; one layout for one row and for many.

    float32 and bfloat16, without emulation on any processor. Every sum is float32 and runs over the inputs in
    their order, so a row gives the same bits alone and in a batch.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        kernels = compiled_kernels()
        assert kernels is not None  # whoever chose this form has asked
        self.outputs, self.inputs = weight.shape
        self.kernels, self.embedding = kernels.linear, kernels.embedding
        self.panels: torch.Tensor = self.kernels.pack_panels(weight)

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = x.new_empty(x.shape[0], self.outputs)
        self.kernels.linear_packed(x, self.panels, bias, out)
        return out

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(x.shape[0], self.outputs, dtype=torch.float32)
        self.kernels.linear_packed(x, self.panels, None, out)
        return out

    has_rows = True

    def rows(self, ids: torch.Tensor, out: torch.Tensor, first_id: int, is_share: bool) -> torch.Tensor:
        rows: torch.Tensor = self.embedding.embed_panels(
            ids, self.panels, out, self.outputs, first_id, is_share
        )
        return rows

    def unpack(self) -> torch.Tensor:
        weight: torch.Tensor = self.kernels.unpack_panels(self.panels, self.outputs, self.inputs)
        return weight


def _for_single_rows(weight: torch.Tensor) -> StoredWeight | None:
    """A second form of `weight` that is faster for one row of input; None where none pays."""
    if weight.nbytes > _SINGLE_ROW_BYTES:
        return None
    if weight.dtype == torch.float32:
        threads = torch.get_num_threads()
        splits = threads > 1 and weight.shape[0] % threads == 0
        return SplitRowsWeight(weight) if splits else TransposedWeight(weight)
    has_kernel = "fbgemm" in torch.backends.quantized.supported_engines
    return BagWeight(weight) if has_kernel and weight.shape[0] % _BAG == 0 else None


def _has_native_product(dtype: torch.dtype) -> bool:
    """Whether this processor multiplies the 16-bit type in hardware."""
    if dtype == torch.bfloat16:
        return cpu_has_bf16()
    return bool(cpu_flags() & {"avx512_fp16", "amx_fp16", "asimdhp"})


def fastest_form(
    dtype: torch.dtype, device: torch.device
) -> type[RowMajorWeight] | type[PackedWeight] | type[PanelWeight]:
    """The form that multiplies weights of this type fastest on this device."""
    if device.type != "cpu":
        return RowMajorWeight
    if dtype in (torch.float32, torch.bfloat16) and compiled_kernels() is not None:
        return PanelWeight
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return RowMajorWeight
    return PackedWeight if dtype == torch.float32 or not _has_native_product(dtype) else RowMajorWeight
