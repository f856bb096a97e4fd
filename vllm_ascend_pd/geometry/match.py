# SPDX-License-Identifier: Apache-2.0
"""Comparison of two engines' caches, field by field, and the check of a reservation's token range.

Sizes that may differ are not compared: tensor parallel size, strides, and the block size where tokens can be addressed
one by one (with a window, D's must divide P's). What must be equal: the layers, their number of KV heads, which tokens
matter, and what a cell contains (dtype, packing, the regions' names and cells); the draft model, if both have one.
"""

from __future__ import annotations

import msgspec

from vllm_ascend_pd.errors import PdError
from vllm_ascend_pd.geometry.context_parallel import MAX_RUNS, runs
from vllm_ascend_pd.geometry.layout import ALL, CacheGeometry, Region
from vllm_ascend_pd.geometry.pairing import pairings


class Mismatch(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One field that differs, with both values as a user sees them."""

    field: str
    prefill: str
    decode: str

    def __str__(self) -> str:
        return f"{self.field}: prefill {self.prefill}, decode {self.decode}"

    def error(self) -> PdError:
        if self.field.split()[0] == "block_size":
            return PdError("PD-GEO-002", prefill=self.prefill, decode=self.decode)
        return PdError("PD-GEO-001", field=self.field, prefill=self.prefill, decode=self.decode)


def mismatches(p: CacheGeometry, d: CacheGeometry) -> tuple[Mismatch, ...]:
    """Return every field in which the two caches do not fit; empty if P can push into D.

    With several kinds of layers, each field is named with the first layer in which it differs.
    """
    differences: list[Mismatch] = []
    some = pairings(p, d)
    for pair in some:
        where = f" of {next(name for name in p.layers if name in pair.layers)}" if len(some) > 1 else ""
        differences.extend(Mismatch(one.field + where, one.prefill, one.decode) for one in _fields(pair.p, pair.d))
    if p.targets != d.targets:
        differences.append(_layers("layers", p.targets, d.targets))
    if p.drafter and d.drafter:
        differences.extend(_drafts(p, d))
    return tuple(differences)


def _fields(p: CacheGeometry, d: CacheGeometry) -> list[Mismatch]:
    """Return the mismatches of one kind of layers."""
    differences = [
        Mismatch(field, str(ours), str(theirs))
        for field, ours, theirs in (
            ("dtype", p.dtype, d.dtype),
            ("kv_heads", p.kv_heads, d.kv_heads),
            ("packing", p.packing, d.packing),
            ("tokens that matter", _matters(p), _matters(d)),
        )
        if ours != theirs
    ]
    # P keeps a window from a border of its own blocks on, D wants it from a border of D's blocks on.
    unlike = p.block_size % d.block_size if p.group.partial else (p.opaque or d.opaque)
    if unlike and p.block_size != d.block_size:
        differences.append(Mismatch("block_size", str(p.block_size), str(d.block_size)))
    divided = max(p.ranks.world, d.ranks.world) > 1
    if divided and (
        p.opaque
        or d.opaque
        or p.group.matters != ALL
        or d.group.matters != ALL
        or runs(p.token_split, d.token_split) > MAX_RUNS
    ):
        differences.append(Mismatch("tokens of a block", _divided(p), _divided(d)))
    regions = _regions(p, d)
    # dtype and packing have a word for each region: where the number of regions differs, they say nothing more.
    if p.group.stateful and regions and regions[0].field == "regions":
        differences = [one for one in differences if one.field not in ("dtype", "packing")]
    return [*differences, *regions]


def require_match(p: CacheGeometry, d: CacheGeometry) -> None:
    """Raise the first mismatch of two caches of one kind, as an error of the catalogue. Layers are not compared."""
    differences = _fields(p, d)
    if differences:
        raise differences[0].error()


def _matters(geometry: CacheGeometry) -> str:
    group = geometry.group
    return f"{group.matters} {group.n}" if group.n else group.matters


def range_fault(d: CacheGeometry, first: int, end: int, *blocks: int) -> str:
    """Return why tokens [first, end) cannot be pushed into this many D blocks of each group; "" if they can.

    The first block of a group holds the group's first wanted token.
    """
    if not 0 <= first < end:
        return f"the token range [{first}, {end}) is empty or negative"
    if len(blocks) != len(d.tables):
        return f"blocks of {len(blocks)} groups are named where there are {len(d.tables)}"
    for group, count in zip(d.tables, blocks, strict=True):
        begin, wanted = group.begins(first, end), len(group.blocks(first, end))
        if d.opaque and not group.stateful and begin % group.covers:
            return f"token {begin} is inside a block of {group.covers}, and the token axis is opaque"
        if count != wanted:
            return f"{count} blocks are named where [{begin}, {end}) needs {wanted}"
    return ""


def _regions(p: CacheGeometry, d: CacheGeometry) -> list[Mismatch]:
    ours, theirs = ([region.name for region in side.regions] for side in (p, d))
    if ours != theirs:
        detail = [", ".join(map(side.region_label, range(len(side.regions)))) for side in (p, d)]
        return [Mismatch("regions", *detail)]
    differences = []
    for index, (a, b) in enumerate(zip(p.regions, d.regions, strict=True)):
        if a.opaque != b.opaque:
            differences.append(Mismatch(f"token axis of {p.region_label(index)}", _axis(a), _axis(b)))
        elif a.cell_bytes != b.cell_bytes and not (a.opaque and p.block_size != d.block_size):
            differences.append(Mismatch(f"cell bytes of {p.region_label(index)}", str(a.cell_bytes), str(b.cell_bytes)))
    return differences


def _divided(side: CacheGeometry) -> str:
    detail = "not addressable one by one" if side.opaque else f"in runs of {side.token_split.run}"
    return f"{side.block_size} on each of {side.ranks.world} parts, {detail}"


def _axis(region: Region) -> str:
    return "opaque" if region.opaque else "addressable"


def _drafts(p: CacheGeometry, d: CacheGeometry) -> list[Mismatch]:
    if p.drafter != d.drafter:
        return [Mismatch("draft model", p.drafter, d.drafter)]
    return [_layers("draft layers", p.drafts, d.drafts)] if p.drafts != d.drafts else []


def _layers(field: str, ours: tuple[str, ...], theirs: tuple[str, ...]) -> Mismatch:
    """Return a mismatch with the lengths of both lists and the first place where they differ: the lists are long."""
    for index in range(max(len(ours), len(theirs))):
        a, b = (names[index] if index < len(names) else "nothing" for names in (ours, theirs))
        if a != b:
            return Mismatch(field, f"{len(ours)} with {a} at {index}", f"{len(theirs)} with {b} at {index}")
    return Mismatch(field, str(len(ours)), str(len(theirs)))
