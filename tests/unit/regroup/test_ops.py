# SPDX-License-Identifier: Apache-2.0
"""The three ops against a byte-by-byte reference, and the input that they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unit.regroup import ops_reference as reference
from unit.regroup.ops_reference import LayerCaches, LayerLayout
from vllm_ascend_pd.errors import PdError
from vllm_ascend_pd.geometry.images import BUFFER_ROW, CACHE_ROW
from vllm_ascend_pd.geometry.layout import Region
from vllm_ascend_pd.regroup import ops

LAYOUTS = {
    "apart, token-major": LayerLayout(),
    "apart, head-major": LayerLayout(head_major=True),
    "packed, token-major": LayerLayout(packed=True),
    "packed, head-major, padded blocks": LayerLayout(packed=True, head_major=True, padding=24),
    "MLA": LayerLayout(mla=True),
    "opaque plane": LayerLayout(packed=True, head_major=True, opaque=True),
}
DTYPES = [torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn, torch.float32]


def views(cache: LayerCaches) -> list[torch.Tensor]:
    return [
        ops.cell_view(tensor, region, cache.heads, cache.tokens)
        for tensor, region in zip(cache.tensors, cache.regions, strict=True)
    ]


def random_rows(cache: LayerCaches, blocks: int, count: int, random: np.random.Generator) -> tuple[np.ndarray, int]:
    """Boxes of all kinds, written one after the other, with gaps, in either order of the axes."""
    rows, offset = [], 0
    for _ in range(count):
        region = int(random.integers(len(cache.regions)))
        cell = cache.regions[region].cell_bytes
        head, token = int(random.integers(cache.heads)), int(random.integers(cache.tokens))
        heads, tokens = (
            int(random.integers(1, cache.heads - head + 1)),
            int(random.integers(1, cache.tokens - token + 1)),
        )
        offset += int(random.integers(0, 70))
        pad = int(random.integers(0, 2)) * int(random.integers(0, 40))
        if random.integers(2):
            head_stride = cell + pad
            token_stride = heads * head_stride
        else:
            token_stride = cell + pad
            head_stride = tokens * token_stride
        block = int(random.integers(blocks))
        rows.append((region, block, head, token, heads, tokens, offset, head_stride, token_stride))
        offset += (heads - 1) * head_stride + (tokens - 1) * token_stride + cell
    return np.array(rows, dtype=np.int64).reshape(-1, 9), offset + 13


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_gather_copies_exactly_the_named_cells(layout: LayerLayout, dtype: torch.dtype) -> None:
    for seed in range(4):
        random = np.random.default_rng(seed)
        heads = 1 if layout.mla else 3
        cache = LayerCaches(layout, blocks=7, heads=heads, block=16, dim=20, dtype=dtype, seed=seed)
        rows, size = random_rows(cache, 7, 25, random)
        want = np.full(size, 0xA5, dtype=np.uint8)
        got = torch.from_numpy(want.copy())
        reference.gather(cache, rows, want)
        ops.gather(views(cache), torch.from_numpy(rows), got)
        np.testing.assert_array_equal(got.numpy(), want)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_scatter_is_the_inverse_of_gather_and_touches_nothing_else(layout: LayerLayout) -> None:
    heads = 1 if layout.mla else 2
    source = LayerCaches(layout, blocks=5, heads=heads, block=8, dim=16, dtype=torch.bfloat16, seed=1)
    target = LayerCaches(layout, blocks=5, heads=heads, block=8, dim=16, dtype=torch.bfloat16, seed=2)
    rows, size = random_rows(source, 5, 12, np.random.default_rng(3))
    buffer = torch.zeros(size, dtype=torch.uint8)
    ops.gather(views(source), torch.from_numpy(rows), buffer)
    before = [target.raw(region).copy() for region in range(len(target.regions))]
    ops.scatter(buffer, torch.from_numpy(rows), views(target))
    for region, block, head, token, heads_, tokens, *_ in rows.tolist():
        for h in range(heads_):
            for t in range(tokens):
                where = source.cell(region, block, head + h, token + t)
                np.testing.assert_array_equal(target.raw(region)[where], source.raw(region)[where])
                before[region][where] = source.raw(region)[where]
    for region, bytes_ in enumerate(before):
        np.testing.assert_array_equal(target.raw(region), bytes_)


@settings(max_examples=150)
@given(
    st.integers(1, 5),
    st.integers(1, 9),
    st.sampled_from([1, 7, 32, 64, 80, 128, 256, 320, 1024, 1100, 5000]),
    st.integers(0, 130),
    st.integers(0, 130),
    st.booleans(),
    st.booleans(),
)
def test_assemble_copies_boxes_of_any_width_and_alignment(
    heads: int, tokens: int, cell: int, src: int, dst: int, src_head_major: bool, dst_head_major: bool
) -> None:
    def strides(head_major: bool) -> tuple[int, int]:
        return (tokens * cell, cell) if head_major else (cell, heads * cell)

    size = heads * tokens * cell
    rows = np.array([[cell, heads, tokens, src, *strides(src_head_major), dst, *strides(dst_head_major)]])
    received = np.random.default_rng(5).integers(0, 256, src + size, dtype=np.uint8)
    want = np.full(dst + size + 3, 0x5A, dtype=np.uint8)
    got = torch.from_numpy(want.copy())
    reference.assemble(received, rows, want)
    ops.assemble(torch.from_numpy(received), torch.from_numpy(rows), got)
    np.testing.assert_array_equal(got.numpy(), want)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_every_number_of_threads_gives_the_same_bytes(threads: int) -> None:
    """Large enough that the threads' parts begin and end inside rows, runs and cache lines."""
    tokens, cell, sources = 1501, 328, 3
    received = torch.randint(0, 256, (sources * tokens * cell,), dtype=torch.uint8)
    rows = torch.tensor(
        [[cell, 1, tokens, s * tokens * cell, 0, cell, s * cell, 0, sources * cell] for s in range(sources)]
    )
    out = torch.zeros_like(received)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        ops.assemble(received, rows, out)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(out.view(tokens, sources, cell), received.view(sources, tokens, cell).transpose(0, 1))


def test_offsets_are_64_bit() -> None:
    """A cell beyond 2^32 bytes of a cache, to a place beyond 2^32 bytes of a buffer; only touched pages are real."""
    blocks, block_bytes = 5 << 10, 1 << 20
    cache = torch.empty(blocks * block_bytes, dtype=torch.uint8).view(blocks, 1, 1, block_bytes)
    out = torch.empty((4 << 30) + (3 << 20), dtype=torch.uint8)
    cache[blocks - 1] = 7
    rows = torch.tensor([[0, blocks - 1, 0, 0, 1, 1, (4 << 30) + 5, 0, 0]])
    ops.gather([cache], rows, out)
    assert int(out[(4 << 30) + 5]) == 7
    assert int(out[(4 << 30) + 5 + block_bytes - 1]) == 7
    out[(4 << 30) + 5 : (4 << 30) + 5 + block_bytes] = 9
    ops.scatter(out, rows, [cache])
    assert int(cache[blocks - 1, 0, 0, 77]) == 9
    small = torch.zeros(64, dtype=torch.uint8)
    ops.assemble(out, torch.tensor([[8, 1, 1, (4 << 30) + 6, 0, 0, 3, 0, 0]]), small)
    assert small.tolist() == [0] * 3 + [9] * 8 + [0] * 53


def test_no_rows_is_no_work() -> None:
    cache = torch.zeros(2, 1, 4, 8)
    out = torch.ones(16, dtype=torch.uint8)
    rows = torch.zeros((0, 9), dtype=torch.int64)
    ops.gather([cache], rows, out)
    ops.assemble(out, rows, out.clone())
    ops.scatter(out, rows, [cache])
    assert bool((out == 1).all())
    assert not bool(cache.any())


# ---- refusals: each names the row, the field and the value

GOOD = (1, 2, 1, 3, 2, 4, 32, 16, 32)  # of a cache [3 blocks, 4 heads, 8 tokens, 16 bytes]
BAD_CACHE_ROWS = [
    ({"region": 2}, "region = 2, but it must be in [0, 2)"),
    ({"region": -1}, "region = -1, but it must be in [0, 2)"),
    ({"block": 3}, "block = 3, but it must be in [0, 3)"),
    ({"block": -1}, "block = -1, but it must be in [0, 3)"),
    ({"block": 2**40}, "block = 1099511627776, but it must be in [0, 3)"),
    ({"head": 3}, "head = 3, heads = 2, but there are only 4"),
    ({"head": -1}, "head = -1, but it must be at least 0"),
    ({"heads": 0}, "heads = 0, but it must be at least 1"),
    ({"heads": 2**62}, "heads = 4611686018427387904, but there are only 4"),
    ({"token": 5}, "token = 5, tokens = 4, but there are only 8"),
    ({"tokens": -4}, "tokens = -4, but it must be at least 1"),
    ({"token": 2**62}, "token = 4611686018427387904, tokens = 4, but there are only 8"),
    ({"offset": -1}, "offset = -1, but it must be at least 0"),
    ({"offset": 2**63 - 1}, "ends past the 256 bytes there are"),
    ({"offset": 145}, "offset = 145, heads = 2 x head_stride = 16"),
    ({"token_stride": 2**62}, "tokens = 4 x token_stride = 4611686018427387904"),
    ({"token_stride": -32}, "token_stride = -32 is negative"),
]


@pytest.mark.parametrize("op", ["gather", "scatter"])
@pytest.mark.parametrize(("change", "words"), BAD_CACHE_ROWS, ids=[str(change) for change, _ in BAD_CACHE_ROWS])
def test_a_bad_cache_row_is_refused_with_the_value_named(op: str, change: dict[str, int], words: str) -> None:
    caches = [torch.zeros(3, 4, 8, 16, dtype=torch.uint8) for _ in range(2)]
    buffer = torch.zeros(256, dtype=torch.uint8)
    bad = [change.get(name, value) for name, value in zip(CACHE_ROW, GOOD, strict=True)]
    rows = torch.tensor([GOOD, bad])
    with pytest.raises(RuntimeError) as caught:
        if op == "gather":
            ops.gather(caches, rows, buffer)
        else:
            ops.scatter(buffer, rows, caches)
    assert f"{op}: rows[1]: " in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize(("head_stride", "token_stride"), [(8, 32), (16, 24), (0, 32), (16, 0)])
def test_cells_that_would_overlap_are_refused(head_stride: int, token_stride: int) -> None:
    cache = torch.zeros(3, 4, 8, 16, dtype=torch.uint8)
    rows = torch.tensor([[0, 0, 0, 0, 2, 4, 0, head_stride, token_stride]])
    with pytest.raises(RuntimeError, match=f"head_stride = {head_stride}, token_stride = {token_stride} make cells"):
        ops.gather([cache], rows, torch.zeros(256, dtype=torch.uint8))


BAD_BUFFER_ROWS = [
    ({"cell": 0}, "cell = 0, but it must be at least 1"),
    ({"heads": 0}, "heads = 0, but it must be at least 1"),
    ({"tokens": -1}, "tokens = -1, but it must be at least 1"),
    ({"source": 225}, "source offset = 225"),
    ({"source": -8}, "source offset = -8, but it must be at least 0"),
    ({"destination": 193}, "destination offset = 193"),
    ({"destination_token_stride": 8}, "destination head_stride = 8, token_stride = 8 make cells of 8 bytes overlap"),
    ({"cell": 2**63 - 1}, "cell = 9223372036854775807 ends past the 256 bytes there are"),
]


@pytest.mark.parametrize(("change", "words"), BAD_BUFFER_ROWS, ids=[str(change) for change, _ in BAD_BUFFER_ROWS])
def test_a_bad_buffer_row_is_refused_with_the_value_named(change: dict[str, int], words: str) -> None:
    good = (8, 2, 4, 0, 8, 16, 0, 8, 16)
    bad = [change.get(name, value) for name, value in zip(BUFFER_ROW, good, strict=True)]
    source, out = torch.zeros(256, dtype=torch.uint8), torch.zeros(256, dtype=torch.uint8)
    with pytest.raises(RuntimeError) as caught:
        ops.assemble(source, torch.tensor([bad]), out)
    assert "assemble: rows[0]: " in str(caught.value)
    assert words in str(caught.value)


def test_bad_tensors_are_refused_by_name() -> None:
    cache = torch.zeros(3, 4, 8, 16)
    rows = torch.tensor([GOOD])
    out = torch.zeros(4096, dtype=torch.uint8)

    def refuses(words: str, caches: list[torch.Tensor], rows: torch.Tensor, out: torch.Tensor) -> None:
        with pytest.raises(RuntimeError, match=words):
            ops.gather(caches, rows, out)

    refuses(r"0 caches, but there must be 1 to 8", [], rows, out)
    refuses(r"9 caches, but there must be 1 to 8", [cache] * 9, rows, out)
    refuses(r"caches\[1\] has 3 dimensions", [cache, cache[0]], rows, out)
    refuses(r"caches\[0\]: the last stride is 16", [cache.transpose(2, 3)], rows, out)
    refuses(r"caches\[0\]: token stride = 0.*cells overlap", [cache[:, :, :1].expand(3, 4, 8, 16)], rows, out)
    refuses(r"rows must be int64", [cache], rows.int(), out)
    refuses(r"rows has shape \[1, 8\]", [cache], rows[:, :8].contiguous(), out)
    refuses(r"rows has shape \[9\]", [cache], rows[0], out)
    refuses(r"rows must be contiguous", [cache], torch.zeros(9, 2, dtype=torch.int64).t(), out)
    refuses(r"out must be contiguous", [cache, cache], rows, out[::2])


def test_a_region_that_is_no_whole_number_of_elements_is_refused() -> None:
    with pytest.raises(PdError, match=r"PD-OPS-003.*'kv'.*3 bytes"):
        ops.cell_view(torch.zeros(4, 3, dtype=torch.float32), Region("kv", 12, 0, 3, 3), 1, 4)


def test_an_op_without_a_kernel_for_its_device_is_refused() -> None:
    assert ops.has_kernel("gather", "cpu")
    assert not ops.has_kernel("gather", "npu")
    with pytest.raises(PdError, match="PD-OPS-002: The op gather has no kernel of its own for device 'npu'"):
        ops.require_kernel("gather", "npu")


# ---- torch's own check of the schema


def test_what_the_ops_write_is_what_their_schema_says() -> None:
    """Nothing traces or compiles them: they run on threads of their own, or on a side stream."""

    def check(op: Any, arguments: tuple[Any, ...]) -> None:
        torch.library.opcheck(op, arguments, test_utils="test_schema")

    caches = [torch.rand(3, 4, 8, 16), torch.rand(3, 4, 8, 16)]
    rows = torch.tensor([[1, 2, 1, 3, 2, 4, 32, 64, 128], [0, 0, 0, 0, 1, 1, 1024, 0, 0]])
    buffer = torch.zeros(4096, dtype=torch.uint8)
    check(torch.ops.vllm_ascend_pd.gather, (caches, rows, buffer))
    check(torch.ops.vllm_ascend_pd.scatter, (buffer, rows, caches))
    boxes = torch.tensor([[8, 2, 4, 0, 8, 16, 0, 8, 16]])
    check(torch.ops.vllm_ascend_pd.assemble, (buffer, boxes, torch.zeros(256, dtype=torch.uint8)))


# ---- tables made ready once per step


def test_a_table_serves_layer_after_layer() -> None:
    rows = np.array([[1, 2, 1, 3, 2, 4, 32, 16, 32], [0, 0, 0, 0, 1, 1, 1024, 0, 0]])
    layers = [[torch.randint(0, 256, (3, 4, 8, 16), dtype=torch.uint8) for _ in range(2)] for _ in range(3)]
    work = ops.Gather(rows, layers[0], torch.empty(2048, dtype=torch.uint8))
    for caches in layers:
        out, wanted = torch.zeros(2048, dtype=torch.uint8), torch.zeros(2048, dtype=torch.uint8)
        work(caches, out)
        ops.gather(caches, torch.from_numpy(rows), wanted)
        assert torch.equal(out, wanted)
        assert bool(out.any())
    boxes = np.array([[8, 2, 4, 0, 8, 16, 64, 8, 16]])
    received, staged = torch.randint(0, 256, (256,), dtype=torch.uint8), torch.zeros(256, dtype=torch.uint8)
    ops.Assemble(boxes, received, staged)(received, staged)
    assert torch.equal(staged[64:128], received[:64])


VIEWS = [3, 4, 8, 16, 512, 128, 16]  # blocks, heads, tokens, cell, strides of block, head, token


def tile_gather(
    rows: torch.Tensor, program: torch.Tensor, *, views: list[int] | None = None, cores: int = 40, size: int = 4096
) -> int:
    return int(torch.ops.vllm_ascend_pd.tile_gather(VIEWS if views is None else views, rows, size, cores, program))


def test_a_launch_program_is_written_only_where_it_fits() -> None:
    rows = torch.tensor([[0, 2, 1, 0, 3, 8, 0, 128, 16]])
    short = torch.full((3, ops.PROGRAM_WORDS), 7)
    needed = tile_gather(rows, short)
    assert needed > 3
    assert bool((short == 7).all())
    program = torch.full((needed + 1, ops.PROGRAM_WORDS), 7)
    assert tile_gather(rows, program) == needed
    assert bool((program[needed] == 7).all())
    header, cores = program[0].tolist(), 40
    assert header[1] == cores
    assert header[2] == needed - header[3]
    assert header[4] == 3 * 8 * 16
    starts = program.flatten()[ops.PROGRAM_WORDS :][: cores + 1].tolist()
    assert starts == sorted(starts)
    assert (starts[0], starts[-1]) == (0, header[2])


def test_tiling_refuses_what_the_ops_refuse() -> None:
    good, program = torch.tensor([[0, 2, 1, 0, 3, 8, 0, 128, 16]]), torch.zeros((99, 12), dtype=torch.int64)
    bad = good.clone()
    bad[0, 1] = 3

    def refuses(words: str, rows: torch.Tensor = good, table: torch.Tensor = program, **changed: object) -> None:
        with pytest.raises(RuntimeError, match=words):
            tile_gather(rows, table, **changed)  # type: ignore[arg-type]

    refuses(r"rows\[0\]: block = 3, but it must be in \[0, 3\)", bad)
    refuses("ends past the 100 bytes there are", size=100)
    refuses("cores = 0, but it must be in", cores=0)
    refuses("8 numbers are no list of views", views=[*VIEWS, 1])
    refuses("0 caches, but there must be 1 to 8", views=[])
    refuses(r"caches\[0\]: token stride = 8.*cells overlap", views=[*VIEWS[:6], 8])
    refuses(r"rows has shape \[1, 8\], but it must be \[n, 9\]", good[:, :8].contiguous())
    refuses(r"rows has shape \[99, 9\], but it must be \[n, 12\]", table=torch.zeros((99, 9), dtype=torch.int64))
