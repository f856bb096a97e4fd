# SPDX-License-Identifier: Apache-2.0
"""Settings that vLLM needs on a CPU and not on an NPU, for the scripts and the tests.

    python -m tools.support.on_cpu environment           prints NAME=VALUE lines
    python -m tools.support.on_cpu arguments MODEL       prints vLLM's arguments, one word a line
                      [--pp N] [--compiled] [--graph-mode MODE]

Standard library only: it also runs before anything is installed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

# The default binding of threads to cores fails with two workers on one NUMA node.
ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
MLA_DRAFT = {"attention_backend": "CPU_MLA"}  # a draft model does not use the target's --attention-backend


# Instructions of x86 processors that vLLM's fp8 caches on a CPU need.
AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}


def no_fp8(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the reason why vLLM has no fp8 cache on this processor, or ""."""
    try:
        flags = {word for line in cpuinfo.read_text().splitlines() if line.startswith("flags") for word in line.split()}
    except OSError:
        flags = set()
    missing = sorted(AVX512 - flags)
    return f"vLLM's fp8 caches on a CPU need AVX-512: this processor has no {', '.join(missing)}" if missing else ""


def is_mla(model: Path) -> bool:
    """Return whether a model has MLA; False for a model that is not a local directory."""
    try:
        config = json.loads((model / "config.json").read_text())
    except OSError:
        return False
    return bool(config.get("kv_lora_rank"))


def arguments(*, mla: bool, pp: int, eager: bool, graph_mode: str = "") -> list[str]:
    """Return the arguments for the model's attention and pipeline stages.

    The graph mode is included because vLLM takes only one --compilation-config.
    """
    words: list[str] = []
    compilation: dict[str, Any] = {"cudagraph_mode": graph_mode} if graph_mode else {}
    if mla:
        # vLLM 0.32's kernel for it computes wrong values with MLA's strides
        compilation["custom_ops"] = ["-rotary_embedding"]
        # With AMX, vLLM would choose the AMX backend, which takes only bfloat16 and other block sizes.
        words += ["--attention-backend", "CPU_MLA"]
    if eager and pp > 1:
        compilation |= {"mode": 2, "backend": "eager"}  # a pipeline does not start with --enforce-eager
    elif eager:
        words += ["--enforce-eager"]
    return [*words, "--compilation-config", json.dumps(compilation)] if compilation else words


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    wanted = parser.add_subparsers(dest="wanted", required=True)
    wanted.add_parser("environment")
    of_model = wanted.add_parser("arguments")
    of_model.add_argument("model", type=Path)
    of_model.add_argument("--pp", type=int, default=1)
    of_model.add_argument("--compiled", action="store_true", help="not eager")
    of_model.add_argument("--graph-mode", default="")
    args = parser.parse_args()
    if args.wanted == "environment":
        lines = [f"{name}={value}" for name, value in ENVIRONMENT.items()]
    else:
        lines = arguments(mla=is_mla(args.model), pp=args.pp, eager=not args.compiled, graph_mode=args.graph_mode)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
