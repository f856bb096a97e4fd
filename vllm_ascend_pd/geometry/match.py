# SPDX-License-Identifier: Apache-2.0
"""Whether two engines' caches fit each other, field by field, and whether a reservation's range is possible.

Sizes that may differ (tensor parallel size, strides, and the block size where tokens can be addressed one by one) are
not compared. What a cell contains must be equal: dtype, packing, the regions' names and their cells.
"""

from __future__ import annotations

import msgspec

from vllm_ascend_pd.errors import PdError
from vllm_ascend_pd.geometry.layout import CacheGeometry, Region
from vllm_ascend_pd.geometry.pairing import pairings


class Mismatch(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One field that differs, with both values as a user should see them."""

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
    """Every field in which the two caches do not fit; empty when P can push into D. Where layers are unlike each other a field is
    told with the first layer in which it differs."""
    found: list[Mismatch] = []
    some = pairings(p, d)
    for pair in some:
        where = f" of {next(name for name in p.layers if name in pair.layers)}" if len(some) > 1 else ""
        found.extend(Mismatch(one.field + where, one.prefill, one.decode) for one in _fields(pair.p, pair.d))
    if p.targets != d.targets:
        found.append(_layers("layers", p.targets, d.targets))
    if p.drafter and d.drafter:
        found.extend(_drafts(p, d))
    return tuple(found)


def _fields(p: CacheGeometry, d: CacheGeometry) -> list[Mismatch]:
    """Of layers that are alike."""
    found = [
        Mismatch(field, str(ours), str(theirs))
        for field, ours, theirs in (
            ("dtype", p.dtype, d.dtype),
            ("kv_heads", p.kv_heads, d.kv_heads),
            ("packing", p.packing, d.packing),
            ("tokens that matter", _matters(p), _matters(d)),
        )
        if ours != theirs
    ]
    # What P keeps of a window begins at a border of its blocks, what D wants at one of D's.
    unlike = p.block_size % d.block_size if p.own.partial else (p.opaque or d.opaque)
    if unlike and p.block_size != d.block_size:
        found.append(Mismatch("block_size", str(p.block_size), str(d.block_size)))
    regions = _regions(p, d)
    if (
        p.own.stateful and regions and regions[0].field == "regions"
    ):  # words for each are told apart by their number alone
        found = [one for one in found if one.field not in ("dtype", "packing")]
    return [*found, *regions]


def require_match(p: CacheGeometry, d: CacheGeometry) -> None:
    """Raise the first difference as an error of the catalogue."""
    found = mismatches(p, d)
    if found:
        raise found[0].error()


def _matters(geometry: CacheGeometry) -> str:
    group = geometry.own
    return f"{group.matters} {group.n}" if group.n else group.matters


def range_fault(d: CacheGeometry, first: int, end: int, *blocks: int) -> str:
    """Why tokens [first, end) in so many D blocks of each group, the first of which holds the group's first wanted token, cannot be
    pushed; "" if they can."""
    if not 0 <= first < end:
        return f"the token range [{first}, {end}) is empty or negative"
    if len(blocks) != len(d.tables):
        return f"blocks of {len(blocks)} groups are named where there are {len(d.tables)}"
    for group, count in zip(d.tables, blocks, strict=True):
        begin = group.begins(first, end)
        if d.opaque and not group.stateful and begin % group.block_size:
            return f"token {begin} is inside a block of {group.block_size}, and the token axis is opaque"
        wanted = -(-end // group.block_size) - begin // group.block_size
        if count != wanted:
            return f"{count} blocks are named where [{begin}, {end}) needs {wanted}"
    return ""


def _regions(p: CacheGeometry, d: CacheGeometry) -> list[Mismatch]:
    ours, theirs = ([region.name for region in side.regions] for side in (p, d))
    if ours != theirs:
        return [Mismatch("regions", ", ".join(ours), ", ".join(theirs))]
    found = []
    for a, b in zip(p.regions, d.regions, strict=True):
        if a.opaque != b.opaque:
            found.append(Mismatch(f"token axis of {a.name}", _axis(a), _axis(b)))
        elif a.cell_bytes != b.cell_bytes and not (a.opaque and p.block_size != d.block_size):
            found.append(Mismatch(f"cell bytes of {a.name}", str(a.cell_bytes), str(b.cell_bytes)))
    return found


def _axis(region: Region) -> str:
    return "opaque" if region.opaque else "addressable"


def _drafts(p: CacheGeometry, d: CacheGeometry) -> list[Mismatch]:
    if p.drafter != d.drafter:
        return [Mismatch("draft model", p.drafter, d.drafter)]
    return [_layers("draft layers", p.drafts, d.drafts)] if p.drafts != d.drafts else []


def _layers(field: str, ours: tuple[str, ...], theirs: tuple[str, ...]) -> Mismatch:
    """Layer lists are long: tell their lengths and the first place where they part."""
    for index in range(max(len(ours), len(theirs))):
        a, b = (names[index] if index < len(names) else "nothing" for names in (ours, theirs))
        if a != b:
            return Mismatch(field, f"{len(ours)} with {a} at {index}", f"{len(theirs)} with {b} at {index}")
    return Mismatch(field, str(len(ours)), str(len(theirs)))
