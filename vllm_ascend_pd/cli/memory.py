# SPDX-License-Identifier: Apache-2.0
"""Memory, for `vllm-ascend-pd plan`: what a rank of P allocates beside its cache, and what D's cache holds.

Counts blocks as vLLM does. Layers that keep the same tokens are divided into groups of equally many layers. All groups
take their blocks from one pool, so a block is as large as all layers of a group.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from vllm_ascend_pd.cli import compressed
from vllm_ascend_pd.cli.flag_values import positive, refuse
from vllm_ascend_pd.cli.shape import PlanInput
from vllm_ascend_pd.config import RegroupConfig
from vllm_ascend_pd.geometry.layout import CacheGeometry
from vllm_ascend_pd.geometry.pairing import exchanged
from vllm_ascend_pd.geometry.states import DELTA_NET
from vllm_ascend_pd.geometry.substeps import room_for_a_block
from vllm_ascend_pd.regroup.core.staging import exchanges_possible
from vllm_ascend_pd.regroup.core.world import EngineWorld, slot_bytes

GIB, MIB = 1 << 30, 1 << 20
_BUFFERS, _SLOTS = 2, 2  # buffers of the exchange, and the slots that each is as large as
_SHARE = 0.92  # vLLM's default


@dataclass(frozen=True, slots=True)
class BesideCache:
    """Bytes that a rank of P allocates when its cache exists: vLLM has not counted them."""

    slot: int  # of which staging and buffers are made; 0 if P's ranks have nothing to exchange
    hccl: int  # of the communicator for exchanges
    left: int = 0  # what vLLM leaves, if it is known

    @property
    def staging(self) -> int:
        config = RegroupConfig()
        return self.slot * (config.staging_slots * config.staging_destinations + _BUFFERS * _SLOTS)

    def no_exchange_reason(self, p: CacheGeometry, d: CacheGeometry) -> str:
        """Return why an engine pushes directly, whatever its spans are; "" if it may exchange."""
        if not self.slot:
            return "each prefill rank has all heads that it sends"
        needs = [room_for_a_block(pair.p, pair.d) for pair in exchanged(p, d)]
        if any(need.slot > self.slot or max(need.send, need.receive) > _SLOTS * self.slot for need in needs):
            return "one block of decode does not fit a staging slot"
        return ""

    def lines(self) -> Iterator[str]:
        if not self.slot:
            yield "staging on each prefill rank: 0.0 MiB, nothing is ever regrouped"
            return
        left = f", which leaves {self.left / MIB:.0f} MiB" if self.left else ""
        yield (
            f"staging on each prefill rank: {self.staging / MIB:.1f} MiB, and {self.hccl / MIB:.0f} MiB for HCCL's "
            f"communicator, beyond vLLM's share of the memory{left}"
        )


@dataclass(frozen=True, slots=True)
class DecodeRoom:
    """Contents of the cache of a rank of D. `tokens` are of prompts of the given length, if layers differ."""

    nbytes: int
    block_bytes: int
    blocks: int
    tokens: int
    prompts: int

    def lines(self, tokens: int) -> Iterator[str]:
        yield (
            f"cache of a decode rank: {self.nbytes / GIB:.2f} GiB are {self.blocks} blocks of "
            f"{self.block_bytes / MIB:.2f} MiB: {self.tokens} tokens, {self.prompts} prompts of {tokens} tokens at a time"
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kv-memory",
        type=float,
        metavar="GIB",
        help="memory of a decode rank for its cache: its log's Available KV cache memory",
    )
    parser.add_argument("--npu-memory", type=float, metavar="GIB", help="of an NPU, if --kv-memory is not known")
    parser.add_argument(
        "--weights",
        type=float,
        metavar="GIB",
        help="with --npu-memory: of a decode rank, with all else that is no cache (activations, HCCL's buffers)",
    )
    parser.add_argument(
        "--gpu-memory-utilization", type=float, default=_SHARE, help="share of it for vLLM (default: %(default)s)"
    )
    parser.add_argument(
        "--hccl-buffsize",
        type=int,
        default=200,
        metavar="MIB",
        help="HCCL_BUFFSIZE; a communicator takes it twice (default: %(default)s)",
    )


def of_cache(args: argparse.Namespace) -> int:
    """Return the bytes of a rank of D for its cache; 0 if they are not given."""
    if args.kv_memory is not None and args.npu_memory is not None:
        refuse("--kv-memory", args.kv_memory, "--npu-memory stands for it", "Give one of the two.")
    if args.kv_memory is not None:
        return int(positive("--kv-memory", args.kv_memory, "GiB") * GIB)
    if args.npu_memory is None:
        if args.weights is not None:
            refuse("--weights", args.weights, "--npu-memory is missing", "Give it, or --kv-memory instead.")
        return 0
    share = positive("--gpu-memory-utilization", args.gpu_memory_utilization, "a share, such as 0.9")
    if share > 1:
        refuse("--gpu-memory-utilization", share, "it is a share of the memory", "Give at most 1.")
    if args.weights is None:
        refuse("--npu-memory", args.npu_memory, "--weights is missing", "Give what of it is no cache.")
    left = positive("--npu-memory", args.npu_memory, "GiB") * share - positive("--weights", args.weights, "GiB")
    if left <= 0:
        why = f"vLLM takes {args.npu_memory * share:.2f} GiB, and nothing is left for the cache"
        refuse("--weights", args.weights, why, "Divide the weights among more ranks.")
    return int(left * GIB)


def beside_cache(p: CacheGeometry, args: argparse.Namespace) -> BesideCache:
    """Return what a rank of P allocates by default, whether the exchanges are with this D or not."""
    if not exchanges_possible(RegroupConfig(regroup=args.regroup), p, p.tp_size):
        return BesideCache(0, 0)
    slot = slot_bytes(p, EngineWorld(0, p.tp_size, 1, args.step_tokens))
    left = int(args.npu_memory * (1 - args.gpu_memory_utilization) * GIB) if args.npu_memory else 0
    return BesideCache(slot, 2 * args.hccl_buffsize * MIB, left)


def room(d: CacheGeometry, shape: PlanInput, nbytes: int) -> DecodeRoom:
    """Return what `nbytes` hold on each rank of D. Raise ConfigError for a cache whose blocks are not known here."""
    if shape.model.ratios:
        block_bytes, per_prompt = compressed.pool(d, shape.tokens)
        differ = True
    else:
        block_bytes, per_prompt, differ = _pool(d, shape, nbytes)
    blocks = nbytes // block_bytes
    prompts = max(0, blocks - 1) // per_prompt  # vLLM keeps one block as the empty one
    tokens = prompts * shape.tokens if differ else max(0, blocks - 1) * d.covers
    return DecodeRoom(nbytes, block_bytes, blocks, tokens, prompts)


def _pool(d: CacheGeometry, shape: PlanInput, nbytes: int) -> tuple[int, int, bool]:
    """Return the bytes of a block, the blocks of a prompt, and whether layers differ in the tokens that they keep."""
    model, item = shape.model, shape.item
    layer = sum(region.block_stride for kind in d.kinds if not kind.group.stateful for region in kind.regions)
    stages = [len([name for name in stage if name.endswith(".attn")]) for stage in d.stages]
    buckets = [max(stages) - len(model.windowed), len(model.windowed)]
    every = -(-shape.tokens // d.covers)
    wanted = [every, min(every, -(-(model.window - 1) // d.covers) + 1)]
    if (states := model.states) is not None:
        if states.recurrence != DELTA_NET or shape.block_size:
            why = "vllm-ascend has no such states" if states.recurrence != DELTA_NET else "--block-size is given"
            refuse("--kv-memory", f"{nbytes / GIB:g}", f"{why}: how long its blocks are is not known", "Leave it out.")
        # A draft layer drafts one token at a time: a row of the convolution more, and a state more for each request.
        conv = states.at(d.tp_size, item).nbytes[0]
        layer += conv * (states.rows + shape.drafts) // states.rows
        buckets.append(len(states.layers))
        wanted.append(1 + shape.drafts)
    # vLLM's groups are as large as the smallest bucket, unless the largest is not much larger.
    sizes = [count for count in buckets if count]
    group = max(sizes) if max(sizes) < 1.5 * min(sizes) else min(sizes)
    per_prompt = sum(-(-count // group) * blocks for count, blocks in zip(buckets, wanted, strict=True))
    return group * layer, per_prompt, len(sizes) > 1 or bool(model.windowed)
