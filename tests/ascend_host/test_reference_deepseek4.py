# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4's reference operators against other definitions: of a whole sequence without pages, or by loops.

As in test_reference.py, which looks in here for the tests of these operators.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import pytest
import torch
from ascend_host import compressed, hyper
from hypothesis import given, settings
from hypothesis import strategies as st
from test_reference import MANY, batch, close, each_query, few, paged, random, seeds, sizes, turned
from torch import Tensor

HIDDEN, WIDTH, ROTATED = 5, 8, 4  # channels of a hidden state and of an entry; the last so many are rotated
OVERLAP, APART = (4, 2), (128, 1)  # tokens of an entry, and how many entries a token is in
cuts = st.lists(st.integers(1, 9), min_size=1, max_size=9)  # lengths of a sequence's chunks


# ---- compressed entries


class ReferenceLayer:
    """A layer's weights, and what its entries are by definition: from all tokens of a sequence at once."""

    def __init__(self, seed: int, ratio: int, coff: int) -> None:
        self.ratio, self.coff = ratio, coff
        self.wkv, self.wgate = (random(seed + i, coff * WIDTH, HIDDEN) for i in range(2))
        self.ape, self.norm = random(seed + 2, ratio, coff * WIDTH), random(seed + 3, WIDTH)
        angles = torch.arange(400.0).unsqueeze(1) * torch.tensor([1.0, 0.1])
        self.angles, wide = angles, angles.repeat_interleave(2, -1)
        self.cos, self.sin = wide.cos(), wide.sin()

    def states(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return each token's value and score."""
        place = torch.arange(len(hidden)) % self.ratio
        return hidden @ self.wkv.t(), hidden @ self.wgate.t() + self.ape[place]

    def entry(self, hidden: Tensor, index: int) -> Tensor:
        """Return one entry, channel by channel."""
        values, scores = self.states(hidden)
        members = [(token, (self.coff - 1) * WIDTH) for token in range(index * self.ratio, (index + 1) * self.ratio)]
        if self.coff == 2:
            members += [(token, 0) for token in range((index - 1) * self.ratio, index * self.ratio) if token >= 0]
        pooled = torch.zeros(WIDTH)
        for channel in range(WIDTH):
            weights = [math.exp(scores[token, half + channel]) for token, half in members]
            terms = [
                w * float(values[token, half + channel]) for w, (token, half) in zip(weights, members, strict=True)
            ]
            pooled[channel] = sum(terms) / sum(weights)
        normed = torch.nn.functional.rms_norm(pooled, (WIDTH,), self.norm, 1e-6)
        normed[-ROTATED:] = turned(normed[-ROTATED:], self.angles[index * self.ratio], pairs=True)
        return normed

    def run(self, hidden: list[Tensor], starts: list[int], state: tuple[Tensor, Tensor], kept: Any) -> None:
        """Run the operators for the next tokens of some sequences, and put the entries into their cache."""
        (states, tables), (entries, entry_tables) = state, kept
        ends = torch.tensor([0, *accumulate(map(len, hidden))], dtype=torch.int32)
        begun = torch.tensor(starts, dtype=torch.int32)
        tokens = int(ends[-1])
        rows = min(tokens, tokens // self.ratio + len(hidden))
        size = entries.shape[1]
        cos, sin, slots = compressed.compressor_metadata(
            self.cos,
            self.sin,
            ends,
            begun,
            entry_tables,
            size,
            compressed.BLOCK_AND_OFFSET,
            self.ratio,
            rows,
            len(hidden),
        )
        made = compressed.compressor(
            torch.cat(hidden),
            self.wkv,
            self.wgate,
            states,
            self.ape,
            self.norm,
            sin.view(rows, -1),
            cos.view(rows, -1),
            tables,
            ends,
            None,
            begun,
            rope_head_dim=ROTATED,
            cmp_ratio=self.ratio,
            coff=self.coff,
            norm_eps=1e-6,
            rotary_mode=compressed.INTERLEAVED,
            cache_mode=compressed.PAGED,
        )
        compressed.scatter_nd_update_v2(entries, slots, made)


def paged_from_one(seed: int, counts: list[int], *shape: int) -> tuple[Tensor, Tensor]:
    """Return a cache and its table, in which no sequence has the null block."""
    cache, table = paged(seed, counts, *shape)
    return torch.cat((torch.full_like(cache[:1], math.nan), cache)), table + 1


def in_turn(lengths: list[list[int]]) -> Iterator[list[tuple[int, int, int]]]:
    """Yield steps: which sequences compute which tokens. Sequences of unequal numbers of chunks end one by one."""
    for step in range(max(map(len, lengths))):
        yield [(seq, sum(each[:step]), each[step]) for seq, each in enumerate(lengths) if step < len(each)]


@settings(MANY, deadline=None)  # some of its sequences have hundreds of tokens
@given(seeds, st.lists(cuts, min_size=1, max_size=3), st.sampled_from([OVERLAP, APART, (2, 1), (3, 2)]))
def test_compressor(seed: int, lengths: list[list[int]], kind: tuple[int, int]) -> None:
    """Chunk by chunk, some sequences side by side, as all at once."""
    layer, factor = ReferenceLayer(seed, *kind), 7 if kind == APART else 1
    lengths = [[factor * n for n in each] for each in lengths]
    counts = [sum(each) for each in lengths]
    hidden = [random(seed + 9 + i, n, HIDDEN) for i, n in enumerate(counts)]
    states, tables = paged_from_one(seed, counts, 2 * layer.coff * WIDTH)
    entries, entry_tables = paged_from_one(seed + 1, [max(1, n // layer.ratio) for n in counts], WIDTH)
    states, before = states.squeeze(-2), entries.clone()
    for step in in_turn(lengths):
        now = [hidden[seq][start : start + n] for seq, start, n in step]
        chosen = [seq for seq, _, _ in step]
        layer.run(now, [start for _, start, _ in step], (states, tables[chosen]), (entries, entry_tables[chosen]))
    for seq, count in enumerate(counts):
        made = [layer.entry(hidden[seq], index) for index in range(count // layer.ratio)]
        for index, entry in enumerate(made):
            close(entries[entry_tables[seq, index // 4], index % 4, 0], entry)
        for index in range(len(made), 4 * -(-len(made) // 4)):
            assert torch.equal(*(cache[entry_tables[seq, index // 4], index % 4] for cache in (entries, before)))
        close(
            torch.stack([states[tables[seq, token // 4], token % 4] for token in range(count)]),
            torch.cat(layer.states(hidden[seq]), -1),
        )


def test_a_state_is_not_written_into_the_null_block_and_only_the_last_entries_states_are_read() -> None:
    """Blocks behind the window are null: with overlap the entry before the token's, and its own, are enough."""
    layer, hidden = ReferenceLayer(1, *OVERLAP), random(2, 15, HIDDEN)
    states, table = paged_from_one(3, [15], 4 * WIDTH)
    entries, entry_table = paged_from_one(4, [3], WIDTH)
    states = states.squeeze(-2)
    layer.run([hidden[:10]], [0], (states, table), (entries, entry_table))
    table[0, 0] = compressed.NULL_BLOCK
    layer.run([hidden[10:]], [10], (states, table), (entries, entry_table))
    close(entries[entry_table[0, 0], 2, 0], layer.entry(hidden, 2))
    unkept = torch.full_like(states, 5.0)
    layer.run([hidden[:3]], [0], (unkept, table), (entries, entry_table))
    assert (unkept == 5).all()


@MANY
@given(seeds, few, st.integers(0, 9), st.integers(0, 2), sizes)
def test_compressor_metadata(seed: int, new: list[int], before: int, padding: int, ratio: int) -> None:
    starts = [before + 2 * i for i in range(len(new))]
    table = torch.randperm(30, generator=torch.Generator().manual_seed(seed))[: 10 * len(new)].view(len(new), 10).int()
    cos, sin = random(seed + 1, 40, 6), random(seed + 2, 40, 6)
    wanted = []
    for request, (start, n) in enumerate(zip(starts, new, strict=True)):
        ended = [token // ratio for token in range(start, start + n) if token % ratio == ratio - 1]
        wanted += [(cos[e * ratio], sin[e * ratio], [int(table[request, e // 3]), e % 3]) for e in ended]
    ends = torch.tensor([0, *accumulate(new)])
    rows = len(wanted) + padding
    got = compressed.compressor_metadata(cos, sin, ends, torch.tensor(starts), table, 3, 2, ratio, rows, len(new))
    assert [part.shape for part in got] == [(rows, 1, 1, 6), (rows, 1, 1, 6), (rows, 2)]
    wanted += [(torch.ones(6), torch.zeros(6), [-1, 2])] * padding
    for row, (c, s, slot) in enumerate(wanted):
        assert torch.equal(got[0][row, 0, 0], c) and torch.equal(got[1][row, 0, 0], s)
        assert got[2][row].tolist() == slot
    buffers = torch.empty(rows, 6), torch.empty(rows, 1, 1, 6), torch.empty(rows, 2, dtype=torch.int32)
    out = compressed.compressor_metadata_out(
        cos, sin, ends, torch.tensor(starts), table, 3, 2, ratio, len(new), *buffers
    )
    assert all(
        one is other and torch.equal(one.view_as(whole), whole)
        for one, other, whole in zip(out, buffers, got, strict=True)
    )


@MANY
@given(seeds, st.lists(st.integers(-1, 11), min_size=1, max_size=6, unique=True), st.booleans())
def test_scatter_nd_update_v2(seed: int, slots: list[int], flat: bool) -> None:
    cache, rows = random(seed, 3, 4, 1, 2), random(seed + 1, len(slots), 1, 2)
    strided = torch.zeros(3, 10)[:, :8].view(3, 4, 1, 2).copy_(cache)  # pages longer than what a layer has in them
    indices = torch.tensor([[place // 4, place % 4] for place in slots])
    compressed.scatter_nd_update_v2(strided, indices, rows.squeeze(1) if flat else rows)
    for place in range(12):
        wanted = rows[slots.index(place)] if place in slots else cache[place // 4, place % 4]
        assert torch.equal(strided[place // 4, place % 4], wanted)


@MANY
@given(seeds, sizes, sizes, sizes, st.integers(0, 3))
def test_inplace_partial_rotary_mul(seed: int, tokens: int, heads: int, planes: int, behind: int) -> None:
    x, angles = random(seed, tokens, 1, heads, 3 + 2 * planes + behind), random(seed + 1, tokens, 1, 1, planes)
    wanted, part = x.clone(), slice(3, 3 + 2 * planes)
    wanted[..., part] = turned(x[..., part], angles, pairs=True)
    wide = angles.repeat_interleave(2, -1)
    before, where = x.clone(), ("interleave", [part.start, part.stop])
    compressed.inplace_partial_rotary_mul(x, wide.cos(), wide.sin(), *where)
    close(x, wanted)
    compressed.inplace_partial_rotary_mul(x, wide.cos(), wide.sin(), *where, negate_sin=True)
    close(x, before)


# ---- which entries, and attention


@settings(MANY, deadline=None)
@given(seeds, few, st.lists(st.integers(0, 30), min_size=3, max_size=3), st.integers(1, 6), st.integers(1, 4))
def test_vllm_quant_lightning_indexer(seed: int, new: list[int], before: list[int], most: int, ratio: int) -> None:
    before = before[: len(new)]
    counts, lengths = batch(new, before)
    entries = [count // ratio for count in counts]
    keys, table = paged(seed, entries, 8)
    keys, scales = (20 * keys).to(torch.int8), random(seed + 1, *keys.shape[:2], 1).abs()
    query, asked = (20 * random(seed + 2, sum(new), 3, 8)).to(torch.int8), random(seed + 3, sum(new), 3).abs()
    weights = random(seed + 4, sum(new), 3)
    best, _ = compressed.vllm_quant_lightning_indexer(
        query,
        keys,
        weights,
        asked,
        scales,
        block_table=table,
        actual_seq_lengths_key=torch.tensor(counts),
        layout_key="PA_BSND",
        sparse_count=most,
        cmp_ratio=ratio,
        **lengths,
    )
    assert best.shape == (sum(new), 1, most)
    for row, sequence, seen in each_query(new, before):
        score = {}
        for entry in range(seen // ratio):
            at = int(table[sequence, entry // 4]), entry % 4
            whole = [
                float((query[row, h].float() * asked[row, h]) @ (keys[at][0].float() * scales[at])) for h in range(3)
            ]
            score[entry] = sum(float(weights[row, h]) * max(0.0, whole[h]) for h in range(3))
        wanted = sorted(score.values(), reverse=True)[:most]
        got = best[row, 0].tolist()
        assert got[len(wanted) :] == [-1] * (most - len(wanted))
        assert [score[entry] for entry in got[: len(wanted)]] == pytest.approx(wanted, rel=1e-4, abs=1e-3)
        assert len(set(got[: len(wanted)])) == len(wanted)


@pytest.mark.parametrize("ratio", [1, 4])
def test_quant_lightning_indexer_v2(ratio: int) -> None:
    """Two sequences whose last entries have one and no token behind them: an entry with a later token is not seen."""
    counts = [9 * ratio + ratio // 2, 4 * ratio]
    keys, table = paged(7, [count // ratio for count in counts], 8)
    keys, scales = (20 * keys).to(torch.int8), random(8, *keys.shape[:2], 1).abs()
    query, asked, weights = (20 * random(9, 4, 3, 8)).to(torch.int8), random(10, 4, 3).abs(), random(11, 4, 3)
    most = 5
    best, _ = compressed.quant_lightning_indexer_v2(
        query,
        keys,
        weights,
        asked,
        scales,
        most,
        2,
        cu_seqlens_q=torch.tensor([0, 3, 4]),
        seqused_k=torch.tensor([count // ratio for count in counts]),
        cmp_residual_k=torch.tensor([count % ratio for count in counts]),
        block_table=table,
        cmp_ratio=ratio,
    )
    for row, (sequence, seen) in enumerate([(0, counts[0] - 2), (0, counts[0] - 1), (0, counts[0]), (1, counts[1])]):
        at = [(int(table[sequence, entry // 4]), entry % 4) for entry in range(seen // ratio)]
        whole = torch.stack([keys[place][0].double() * scales[place].double() for place in at])
        parts = (whole @ query[row].double().t() * asked[row].double()).relu() * weights[row].double()
        order = parts.sum(-1).sort(descending=True).indices[:most].tolist()
        assert best[row, 0].tolist() == order + [-1] * (most - len(order))
    with pytest.raises(NotImplementedError, match="other scales"):
        compressed.quant_lightning_indexer_v2(query, keys, weights, asked, scales, most, 1)


def attended(query: Tensor, rows: list[Tensor], sink: float, scale: float) -> Tensor:
    """Return one head's attention over rows that are keys and values, beside a sink without a value."""
    weights = [math.exp(scale * float(query @ row)) for row in rows]
    total = sum(weights) + math.exp(sink)
    return torch.stack([row * (weight / total) for row, weight in zip(rows, weights, strict=True)]).sum(0)


@settings(MANY, deadline=None)
@given(seeds, few, st.lists(st.integers(0, 30), min_size=3, max_size=3), st.sampled_from(["window", "all", "chosen"]))
def test_sparse_attn_sharedkv(seed: int, new: list[int], before: list[int], kind: str) -> None:
    before = before[: len(new)]
    counts, _ = batch(new, before)
    ratio, left, heads, width = 4, 5, 3, 8
    (window, window_table), (entries, table) = (
        paged(seed, counts, width),
        paged(seed + 5, [n // 4 for n in counts], width),
    )
    q, sinks = random(seed + 2, sum(new), heads, width), random(seed + 3, heads)
    chance = torch.Generator().manual_seed(seed)
    chosen = torch.full((sum(new), 1, 6), -1, dtype=torch.int32)
    for row in chosen:  # also entries that the query must not see
        some = torch.randperm(9, generator=chance)[: int(torch.randint(0, 7, (), generator=chance))]
        row[0, : len(some)] = some
    given_entries: dict[str, Any] = {"cmp_kv": entries, "cmp_block_table": table} if kind != "window" else {}
    if kind == "chosen":
        given_entries["cmp_sparse_indices"] = chosen.clamp(max=max(0, min(counts) // ratio - 1))
    out, _ = compressed.sparse_attn_sharedkv(
        q,
        ori_kv=window,
        ori_block_table=window_table,
        cu_seqlens_q=torch.tensor([0, *accumulate(new)]),
        seqused_kv=torch.tensor(counts),
        sinks=sinks,
        softmax_scale=0.3,
        cmp_ratio=ratio,
        ori_win_left=left,
        layout_q="TND",
        **given_entries,
    )
    for row, sequence, seen in each_query(new, before):
        rows = [window[window_table[sequence, t // 4], t % 4, 0] for t in range(max(0, seen - 1 - left), seen)]
        ready = range(seen // ratio) if kind != "window" else ()
        taken = [e for e in ready if kind == "all" or e in given_entries["cmp_sparse_indices"][row, 0]]
        rows += [entries[table[sequence, e // 4], e % 4, 0] for e in taken]
        for head in range(heads):
            close(out[row, head], attended(q[row, head], rows, float(sinks[head]), 0.3))


def test_an_entry_with_a_token_behind_the_query_is_not_seen() -> None:
    """The second entry of four tokens ends at the eighth: the seventh query does not see it, the eighth does."""
    table, window, entries = torch.tensor([[1, 2]]), random(0, 3, 4, 1, 8), random(1, 3, 4, 1, 8)

    def run() -> Tensor:
        return compressed.sparse_attn_sharedkv(
            random(2, 8, 1, 8),
            ori_kv=window,
            ori_block_table=table,
            cmp_kv=entries,
            cmp_block_table=table,
            cu_seqlens_q=torch.tensor([0, 8]),
            seqused_kv=torch.tensor([8]),
            sinks=torch.zeros(1),
            softmax_scale=1.0,
            cmp_ratio=4,
            ori_win_left=7,
            layout_q="TND",
        )[0]

    before = run()
    entries[1, 1] += 1
    after = run()
    assert torch.equal(before[:7], after[:7]) and not torch.equal(before[7], after[7])


def test_shared_among_cores() -> None:
    """The metadata have the size that callers copy; what they say is for cores that are not here."""
    made = compressed.shared_among_cores(num_heads_q=4, cmp_ratio=4)
    assert (made.shape, made.dtype) == ((1024,), torch.int32)


# ---- streams, and experts by token


@MANY
@given(seeds, sizes, st.integers(2, 4), sizes, st.integers(1, 4))
def test_hc_pre_v2(seed: int, tokens: int, streams: int, width: int, rounds: int) -> None:
    mixes = (2 + streams) * streams
    x, fn = random(seed, tokens, streams, width, dtype=torch.bfloat16), random(seed + 1, mixes, streams * width)
    scale, base = random(seed + 2, 3), random(seed + 3, mixes)
    mixed, post, comb = hyper.hc_pre_v2(x, fn, scale, base, streams, rounds, 1e-6, 1e-3)
    assert (mixed.dtype, post.dtype, comb.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    for token in range(tokens):
        flat = torch.nn.functional.rms_norm(x[token].float().flatten(), (streams * width,), None, 1e-6)
        given = [float(fn[i] @ flat) for i in range(mixes)]

        def weight(i: int, size: int, given: list[float] = given) -> float:
            return given[i] * float(scale[size]) + float(base[i])

        into = [1 / (1 + math.exp(-weight(i, 0))) + 1e-3 for i in range(streams)]
        wanted = sum(into[i] * x[token, i].float() for i in range(streams))
        torch.testing.assert_close(mixed[token].float(), wanted, rtol=1e-2, atol=1e-2)
        close(post[token], torch.tensor([2 / (1 + math.exp(-weight(streams + i, 1))) for i in range(streams)]))
        square = [[math.exp(weight((2 + i) * streams + j, 2)) for j in range(streams)] for i in range(streams)]
        square = [[value / sum(row) + 1e-3 for value in row] for row in square]
        for _ in range(2 * rounds - 1):  # columns, then rows and columns in turn: what is next becomes lines
            square = [list(line) for line in zip(*square, strict=True)]
            square = [[value / (sum(line) + 1e-3) for value in line] for line in square]
        close(comb[token], torch.tensor(square).t())


@MANY
@given(seeds, sizes, st.integers(1, 4), sizes)
def test_hc_post(seed: int, tokens: int, streams: int, width: int) -> None:
    x, residual = random(seed, 1, tokens, width), random(seed + 1, 1, tokens, streams, width)
    post, comb = random(seed + 2, 1, tokens, streams), random(seed + 3, 1, tokens, streams, streams)
    out = hyper.hc_post(x, residual, post, comb)
    for token in range(tokens):
        for stream in range(streams):
            wanted = post[0, token, stream] * x[0, token]
            for old in range(streams):
                wanted = wanted + comb[0, token, old, stream] * residual[0, token, old]
            close(out[0, token, stream], wanted)


@MANY
@given(seeds, sizes, st.integers(2, 6), st.booleans())
def test_moe_gating_top_k_hash(seed: int, tokens: int, experts: int, by_token: bool) -> None:
    x, bias, k = random(seed, tokens, experts), random(seed + 1, experts), 2
    ids = torch.arange(tokens) * 3 % 7
    table = torch.stack([torch.randperm(experts, generator=torch.Generator().manual_seed(i))[:k] for i in range(7)])
    named: dict[str, Any] = {"input_ids": ids, "tid2eid": table.int()} if by_token else {"bias": bias}
    weights, chosen, _ = hyper.moe_gating_top_k_hash(x, k, routed_scaling_factor=1.5, norm_type=2, **named)
    assert chosen.dtype == torch.int32
    for row in range(tokens):
        scores = [math.sqrt(math.log(1 + math.exp(float(value)))) for value in x[row]]
        if by_token:
            wanted = table[ids[row]].tolist()
        else:
            wanted = sorted(range(experts), key=lambda e, scores=scores: -(scores[e] + float(bias[e])))[:k]
        assert chosen[row].tolist() == wanted
        total = sum(scores[expert] for expert in wanted)
        close(weights[row], torch.tensor([1.5 * scores[expert] / total for expert in wanted]))


# ---- all of a layer's attention, as vllm-ascend puts it together, against transformers' own


class Attention:
    """A layer of transformers, and its attention by the operators: chunk by chunk, over paged caches."""

    def __init__(self, layer: Any, ratio: int, tokens: int) -> None:
        self.layer, self.ratio, self.config = layer, ratio, layer.config
        self.window, self.window_table = paged_from_one(1, [tokens], 32)
        self.entries, self.table = paged_from_one(2, [max(1, tokens // ratio)] if ratio else [1], 32)
        wide = self.config.rope_parameters["compress" if ratio else "main"]["rope_theta"]
        angles = torch.outer(torch.arange(400.0), wide ** (-torch.arange(0, 8, 2) / 8)).repeat_interleave(2, -1)
        self.cos, self.sin = angles.cos(), angles.sin()
        coff = 2 if ratio == 4 else 1
        self.states, self.state_table = paged_from_one(3, [tokens], 2 * coff * 32)
        self.keys, self.key_table = paged_from_one(4, [max(1, tokens // ratio)] if ratio else [1], 16)
        self.key_states, self.key_state_table = paged_from_one(5, [tokens], 4 * 16)

    def run(self, hidden: Tensor, start: int) -> Tensor:
        layer, count = self.layer, start + len(hidden)
        at = slice(start, count)
        self.turning = [part[at].view(-1, 1, 1, 8) for part in (self.cos, self.sin)]
        asked = layer.q_a_norm(layer.q_a_proj(hidden))
        q = layer.q_b_norm(layer.q_b_proj(asked).unflatten(-1, (-1, 32)))
        kv = layer.kv_norm(layer.kv_proj(hidden)).unsqueeze(1)
        for x in (q, kv):
            self.turn(x, 32)
        tokens = torch.arange(start, count)
        slots = torch.stack((self.window_table[0, tokens // 4], (tokens % 4).int()), -1)
        compressed.scatter_nd_update_v2(self.window, slots, kv)
        named: dict[str, Any] = {}
        if self.ratio:
            made = (self.entries, self.table, self.states, self.state_table)
            self.compress(layer.compressor, hidden, start, *made)
            named = {"cmp_kv": self.entries, "cmp_block_table": self.table}
        if self.ratio == 4:
            named["cmp_sparse_indices"] = self.choose(layer.compressor.indexer, hidden, asked, start)
        out, _ = compressed.sparse_attn_sharedkv(
            q,
            ori_kv=self.window,
            ori_block_table=self.window_table,
            cu_seqlens_q=torch.tensor([0, len(hidden)]),
            seqused_kv=torch.tensor([count]),
            sinks=layer.sinks,
            softmax_scale=32**-0.5,
            cmp_ratio=max(1, self.ratio),
            ori_win_left=self.config.sliding_window - 1,
            layout_q="TND",
            **named,
        )
        self.turning[1] = -self.turning[1]
        self.turn(out, 32)
        return layer.o_b_proj(layer.o_a_proj(out.flatten(1).unflatten(1, (2, -1))).flatten(1))

    def turn(self, x: Tensor, width: int) -> None:
        compressed.inplace_partial_rotary_mul(x.unsqueeze(1), *self.turning, "interleave", [width - 8, width])

    def compress(
        self, part: Any, hidden: Tensor, start: int, cache: Tensor, table: Tensor, states: Tensor, state_table: Tensor
    ) -> None:
        ends, begun = torch.tensor([0, len(hidden)]), torch.tensor([start])
        rows = min(len(hidden), len(hidden) // self.ratio + 1)
        cos, sin, slots = compressed.compressor_metadata(
            self.cos, self.sin, ends, begun, table, 4, compressed.BLOCK_AND_OFFSET, self.ratio, rows, 1
        )
        weights = (part.kv_proj.weight, part.gate_proj.weight)
        rest = (part.position_bias, part.kv_norm.weight, sin.view(rows, -1), cos.view(rows, -1))
        coff = 2 if self.ratio == 4 else 1
        view = states.squeeze(-2)
        how = (8, self.ratio, coff, 1e-6, compressed.INTERLEAVED, compressed.PAGED)
        made = compressed.compressor(hidden, *weights, view, *rest, state_table, ends, None, begun, *how)
        compressed.scatter_nd_update_v2(cache, slots, made)

    def choose(self, indexer: Any, hidden: Tensor, asked: Tensor, start: int) -> Tensor:
        """Return the indexer's choice, with keys and queries in full instead of int8."""
        self.compress(indexer, hidden, start, self.keys, self.key_table, self.key_states, self.key_state_table)
        query = indexer.q_b_proj(asked).unflatten(-1, (-1, 16))
        self.turn(query, 16)
        scorer = indexer.scorer
        weights = scorer.weights_proj(hidden) * (scorer.softmax_scale * scorer.weights_scaling)
        return compressed.vllm_quant_lightning_indexer(
            query,
            self.keys,
            weights,
            torch.ones(query.shape[:2]),
            torch.ones(self.keys.shape[:3]),
            actual_seq_lengths_query=torch.tensor([len(hidden)]),
            actual_seq_lengths_key=torch.tensor([start + len(hidden)]),
            block_table=self.key_table,
            layout_query="TND",
            layout_key="PA_BSND",
            sparse_count=self.config.index_topk,
            cmp_ratio=4,
        )[0]


@pytest.mark.parametrize("ratio", [0, 4, 128])
@pytest.mark.parametrize("chunks", [[300], [127, 1, 1, 2, 126, 43], [5, 3, 4, 1, 100, 15, 128, 44]])
def test_a_whole_layer_attends_as_transformers_does(ratio: int, chunks: list[int]) -> None:
    library: Any = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    config = importlib.import_module("transformers").DeepseekV4Config(
        hidden_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        head_dim=32,
        q_lora_rank=12,
        o_groups=2,
        o_lora_rank=8,
        index_n_heads=24,  # so many that no entry is at zero for all, where the choice would be arbitrary
        index_head_dim=16,
        index_topk=9,
        sliding_window=20,
        compress_ratios=[ratio],
        qk_rope_head_dim=8,
        max_position_embeddings=400,
    )
    config.rope_parameters["compress"]["partial_rotary_factor"] = 0.25
    config._attn_implementation = "eager"
    torch.manual_seed(ratio)
    layer, tokens = library.DeepseekV4Attention(config, 0).eval(), sum(chunks)
    for name, weight in layer.named_parameters():
        weight.data = 1 + 0.1 * torch.randn(weight.shape) if "norm" in name else 0.4 * torch.randn(weight.shape)
    hidden, positions = torch.randn(tokens, 24), torch.arange(tokens).unsqueeze(0)
    ahead = torch.arange(tokens) - torch.arange(tokens).unsqueeze(1)
    mask = torch.zeros(tokens, tokens).masked_fill((ahead > 0) | (ahead <= -20), -math.inf).view(1, 1, tokens, tokens)
    rotary = library.DeepseekV4RotaryEmbedding(config)
    turning = {kind: rotary(hidden, positions, kind) for kind in ("main", "compress")}
    with torch.no_grad():
        wanted, _ = layer(hidden.unsqueeze(0), turning, positions, mask)
        ours, start, got = Attention(layer, ratio, tokens), 0, []
        for length in chunks:
            got.append(ours.run(hidden[start : start + length], start))
            start += length
    torch.testing.assert_close(torch.cat(got), wanted[0], rtol=1e-4, atol=1e-4)
