# SPDX-License-Identifier: Apache-2.0
"""Print the recipes of docs/recipes.md: a P and a D for each family of models of vllm-ascend's own configurations.

Sizes are those of one of these configurations (tests compare them); the commands are this package's. `plan` says what
is sent, with the sizes of tools/support/field_models.json.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tools.support import sdist
from tools.support.models import ROOT
from tools.support.pages import Marks
from vllm_ascend_pd.cli.__main__ import parser

PAGE = ROOT / "docs" / "recipes.md"
MARKS = Marks.of("python -m tools.recipes")
FACTS = json.loads((ROOT / "tools" / "support" / "field_models.json").read_text())
NPUS = 16  # of a host
SECRET, META = "/etc/vllm-ascend-pd/secret", "http://META_HOST:8000"


class Sized(NamedTuple):
    """The sizes of one role."""

    tp: int
    dp: int
    length: int
    tokens: int  # of a step
    requests: int
    memory: str
    buffer: int  # HCCL_BUFFSIZE
    drafts: int = 0
    prefixes: bool = False

    @property
    def hosts(self) -> int:
        return max(1, self.tp * self.dp // NPUS)


@dataclass(frozen=True)
class FieldRecipe:
    title: str
    model: str
    configuration: str  # of vllm-ascend, whose sizes these are
    in_small: str  # the set of engines that stands for it (docs/field.md)
    p: Sized
    d: Sized
    method: str = ""
    draft: str = ""
    flags: tuple[str, ...] = ()
    older: bool = False  # of the release before

    @property
    def family(self) -> dict[str, Any]:
        family: dict[str, Any] = FACTS["families"][FACTS["models"][self.model]["family"]]
        return family


RECIPES = (
    FieldRecipe("DeepSeek-V3.1", "Eco-Tech/DeepSeek-V3.1-Terminus-w8a8-mtp-QuaRot", "DeepSeek/DeepSeek_V3.1T_layerwise_PD", "field mtp dp 2to2",
        Sized(8, 2, 70000, 16384, 8, "0.9", 256, 1), Sized(1, 32, 70000, 256, 28, "0.92", 1100, 1), "deepseek_mtp"),
    FieldRecipe("DeepSeek-V3.2", "vllm-ascend/DeepSeek-V3.2-W8A8", "nightly/DeepSeek-V3_2-W8A8-EP", "",
        Sized(16, 2, 133000, 8192, 16, "0.90", 360, 2), Sized(4, 8, 133000, 42, 14, "0.90", 1100, 2), "deepseek_mtp",
        flags=("--tokenizer-mode", "deepseek_v32"), older=True),
    FieldRecipe("DeepSeek-V4", "Eco-Tech/DeepSeek-V4-Flash-w8a8-mtp", "DeepSeek/DeepSeek-V4-flash-w8a8-PD-prefix", "field dsv4 mtp dp 2to2 full graphs repaired",
        Sized(4, 4, 1048576, 8192, 16, "0.9", 1024, 1, True), Sized(1, 16, 1048576, 240, 60, "0.95", 1500, 3), "mtp",
        flags=("--block-size", "32", "--attention-config.indexer_kv_dtype", "int8", "--tokenizer-mode", "deepseek_v4")),
    FieldRecipe("GLM-5.1", "Eco-Tech/GLM-5.1-w8a8", "GLM/GLM5_1-W8A8-EP", "field dsa mtp dp 2to2",
        Sized(8, 4, 131072, 4096, 64, "0.95", 1024, 3, True), Sized(4, 8, 202752, 32, 8, "0.92", 1024, 3, True), "deepseek_mtp"),
    FieldRecipe("Kimi-K2.5", "Eco-Tech/Kimi-K2.5-W4A8", "Kimi/Kimi-K2.5-W4A8-16k-1k-TPOT50", "field eagle3 beside latents 2to1 dp 1to2 regrouped",
        Sized(8, 2, 32768, 16384, 8, "0.8", 256, 3), Sized(1, 32, 32768, 256, 48, "0.95", 1800, 3), "eagle3", "lightseekorg/kimi-k2.5-eagle3"),
    FieldRecipe("Qwen3-235B", "vllm-ascend/Qwen3-235B-A22B-W8A8", "Qwen/QWEN3_235B_PD_3_5K_1_5k", "field moe 2to1 dp 1to2 regrouped",
        Sized(8, 2, 36864, 16384, 16, "0.9", 256), Sized(1, 32, 36864, 4096, 15, "0.9", 1024)),
    FieldRecipe("Qwen3.5", "Eco-Tech/Qwen3.5-397B-A17B-w8a8-mtp", "Qwen/Qwen-3.5-397B-A17B-W8A8-PD", "field qwen3next mtp 2to1 dp 1to2 regrouped",
        Sized(8, 2, 67000, 16384, 16, "0.9", 1536, 3), Sized(1, 32, 34816, 128, 16, "0.95", 1536, 3), "qwen3_5_mtp"),
    FieldRecipe("MiniMax-M2", "vllm-ascend/MiniMax-M2.7-w8a8-QuaRot", "MiniMax/Minimax_m2.7_in3_5_tpot50", "field eagle3 2to1 dp 1to2 regrouped",
        Sized(8, 2, 40000, 16384, 300, "0.8", 1024, 3), Sized(2, 16, 40000, 16384, 75, "0.8", 2048, 3), "eagle3", "Eco-Tech/MiniMax-M2.7-eagle-model-short"),
)  # fmt: skip


# ---- commands


def commands(recipe: FieldRecipe) -> Iterator[str]:
    """Yield the commands of all hosts of a P and of a D."""
    for role, sized in (("P", recipe.p), ("D", recipe.d)):
        for host in range(sized.hosts):
            yield _command(recipe, role, sized, host)
    p, d = (_host(role, sized, 0) for role, sized in (("P", recipe.p), ("D", recipe.d)))
    yield f"vllm-ascend-pd metaserver --host META_HOST --port 8000 --prefill http://{p}:8100 --decode http://{d}:8200"


def _host(role: str, sized: Sized, host: int) -> str:
    return f"{role}_HOST_{host + 1}" if sized.hosts > 1 else f"{role}_HOST"


def _command(recipe: FieldRecipe, role: str, sized: Sized, host: int) -> str:
    first = _host(role, sized, 0)
    words = [f"--port {8100 if role == 'P' else 8200}"] if not host else ["--headless"]
    words += [f"--tensor-parallel-size {sized.tp}", f"--data-parallel-size {sized.dp}"]
    if sized.hosts > 1:
        local = sized.dp // sized.hosts
        words.append(
            f"--data-parallel-size-local {local} --data-parallel-address {first} --data-parallel-rpc-port 13345"
        )
        words += [f"--data-parallel-start-rank {host * local}"] if host else []
    words += ["--enable-expert-parallel --quantization ascend --trust-remote-code"]
    words += [f"--max-model-len {sized.length} --max-num-batched-tokens {sized.tokens} --max-num-seqs {sized.requests}"]
    words += [f"--gpu-memory-utilization {sized.memory}"]
    words += [] if sized.prefixes else ["--no-enable-prefix-caching"]
    words += [" ".join(recipe.flags)] if recipe.flags else []
    if recipe.method:
        drafts = {"method": recipe.method, "num_speculative_tokens": sized.drafts}
        words.append(_option("--speculative-config", {**drafts, **({"model": recipe.draft} if recipe.draft else {})}))
    if role == "P":
        words.append("--enforce-eager")
    else:
        words.append(_option("--compilation-config", {"cudagraph_mode": "FULL_DECODE_ONLY"}))
        words.append(_option("--additional-config", {"recompute_scheduler_enable": True}))
    words.append(_option("--kv-transfer-config", _transfer(role)))
    lines = [f"HCCL_BUFFSIZE={sized.buffer} VLLM_HOST_IP={_host(role, sized, host)} vllm serve {recipe.model}", *words]
    return " \\\n    ".join(lines)


def _option(flag: str, value: dict[str, Any]) -> str:
    return f"{flag} '{json.dumps(value)}'"


def _transfer(role: str) -> dict[str, Any]:
    keys: dict[str, Any] = {"secret_file": SECRET}
    if role == "P":
        return {"kv_connector": "AscendPushConnector", "kv_role": "kv_producer", "kv_connector_extra_config": keys}
    keys["metaserver_urls"] = [META]
    policy = {"kv_load_failure_policy": "recompute"}
    return {
        "kv_connector": "AscendPushConnector",
        "kv_role": "kv_consumer",
        **policy,
        "kv_connector_extra_config": keys,
    }


# ---- sizes


def config(family: dict[str, Any]) -> dict[str, Any]:
    """Return a family's config.json, as far as `plan` reads it."""
    made = {"num_hidden_layers": family["layers"], "hidden_size": family["hidden"], "num_attention_heads": 64}
    if family["mtp"]:
        made["num_nextn_predict_layers"] = family["mtp"]
    if "mla" in family:
        latent, rope, *index = family["mla"]
        made |= {"kv_lora_rank": latent, "qk_rope_head_dim": rope}
        return {**made, "index_head_dim": index[0], "index_topk": 2048} if index else made
    if "compressed" in family["caches"]:
        windows, layers = family["windows"], family["layers"]
        ratios = [0] * windows + [4 if n % 2 == 0 else 128 for n in range(layers - windows)]
        made |= {"model_type": "deepseek_v4", "compress_ratios": ratios, "index_topk": 512}
        return {**made, "head_dim": 512, "sliding_window": 128, "index_head_dim": 128}
    made |= {"num_key_value_heads": family["kv_heads"], "head_dim": family["head_dim"]}
    if "gdn" in family:
        keys, values, size, kernel = family["gdn"]
        heads = {"linear_num_key_heads": keys, "linear_num_value_heads": values, "linear_conv_kernel_dim": kernel}
        made |= {**heads, "linear_key_head_dim": size, "linear_value_head_dim": size, "full_attention_interval": 4}
    return made


def planned(recipe: FieldRecipe) -> dict[str, Any]:
    """Return what `plan` prints of a prompt of 4,096 tokens."""
    made = config(recipe.family)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as said:
        Path(folder, "config.json").write_text(json.dumps(made))
        args = parser().parse_args(["plan", *_plan_flags(recipe, folder), "--json"])
        if args.run(args):
            raise ValueError(f"plan fails for {recipe.title}")
    plan: dict[str, Any] = json.loads(said.getvalue())
    return plan


def _plan_flags(recipe: FieldRecipe, folder: str) -> list[str]:
    drafts = ["--draft-layers", "1"] if recipe.method and not recipe.draft else []
    drafts += recipe.flags[:2] if recipe.flags[:1] == ("--block-size",) else ()
    return ["--p-tp", str(recipe.p.tp), "--d-tp", str(recipe.d.tp), "--model", folder, *drafts]


def sizes(recipe: FieldRecipe) -> str:
    """Return a sentence with what a prompt of 4,096 tokens costs."""
    plan = planned(recipe)
    received: dict[int, list[int]] = {}
    for link in plan["links"]:
        received.setdefault(link["d"], []).append(link["bytes"])
    busiest = [plan[f"busiest_{side}_s"] * 1e3 for side in ("rank", "decode_rank")]
    words = [
        f"`vllm-ascend-pd plan {' '.join(_plan_flags(recipe, 'DIR'))}`: {plan['mode']};",
        f"{_each(sum(some) / (1 << 20) for some in received.values())} MiB for each D rank",
        f"over {_each(map(len, received.values()))} links;",
        f"busiest link of P {busiest[0]:.1f} ms, of D {busiest[1]:.1f} ms;",
        f"staging on a P rank {plan['staging'] / (1 << 20):.0f} MiB.",
    ]
    if recipe.draft:
        words.append("The draft's layer, with heads of its own, is not in it.")
    return " ".join(words)


def _each(values: Iterable[float]) -> str:
    rounded = sorted({round(value) for value in values})
    return str(rounded[0]) if len(rounded) == 1 else f"{rounded[0]} to {rounded[-1]}"


# ---- the page


def text(recipe: FieldRecipe) -> list[str]:
    """Return a recipe's lines of the page."""
    release = (sdist.OLDER if recipe.older else sdist.VLLM_ASCEND).version
    shown = f"`{recipe.in_small}`" if recipe.in_small else "none with these caches and drafts"
    said = f"{recipe.model}, sizes of `{recipe.configuration}` (vllm-ascend {release}): {_hosts(recipe)}. In small: {shown}."
    block = "\n".join(commands(recipe)).splitlines()
    return [f"## {recipe.title}", "", *_filled(said), "", *_filled(sizes(recipe)), "", "```", *block, "```", ""]


def _hosts(recipe: FieldRecipe) -> str:
    return ", ".join(
        f"{role} TP {one.tp} × DP {one.dp} on {one.hosts} host{'s' * (one.hosts > 1)}"
        for role, one in (("P", recipe.p), ("D", recipe.d))
    )


def _filled(said: str) -> list[str]:
    return textwrap.wrap(said, 120, break_long_words=False, break_on_hyphens=False)


def filled(page: str) -> str:
    """Return the page with today's recipes."""
    return MARKS.filled(page, ["", *(line for recipe in RECIPES for line in text(recipe))])


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked.add_argument("--write", action="store_true", help="put them into docs/recipes.md")
    if asked.parse_args().write:
        PAGE.write_text(filled(PAGE.read_text()))
    else:
        print("\n".join(line for recipe in RECIPES for line in text(recipe)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
