#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# First check on a host with Ascend NPUs: builds with CANN, runs the tests marked npu, writes one report file.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/setup.sh
. scripts/setup.sh

help() {
  cat <<'TEXT'
Checks this package on a host with Ascend NPUs and writes one report: out/npu-selfcheck/report.md.

usage: scripts/npu_selfcheck.sh [--dry-run] [--only STEP,…] [--out FOLDER]

  machine     driver, CANN, chips, versions of everything that takes part
  build       the package with its AscendC kernels (VLLM_ASCEND_PD_NPU=1: fails where they do not compile)
  load        the kernels' library loads, and every op is registered for the NPU
  ops         both paths on one NPU against the CPU's ops; GB/s
  exchange    gather, all-to-all over HCCL, assemble, among all local devices
  transfer    Mooncake's ascend protocol between two devices: checksums and GB/s
  revocation  a writer that is stopped in a write hits nothing when it wakes after access was revoked
  pair        real engines with a small model through vllm-ascend: tokens equal to a single engine's

  --dry-run    prints what would be run, and runs nothing
  --only       only these steps; the report names the others as not run
  --out        where report and logs go

Exit code: 0 if nothing failed (what needs more NPUs than there are is skipped, and the report says so), 1 if something
failed, 2 if this host cannot be checked at all.

Environment: PD_BASE_PYTHON or PD_PYTHON name the interpreter (see scripts/setup.sh); SOC_VERSION names the chip where
npu-smi does not show it. Source CANN's set_env.sh first.
TEXT
}

# ascend910b3 and similar names, from npu-smi's list of chips.
soc_version() {
  local chip
  command -v npu-smi >/dev/null || return 1
  chip=$(npu-smi info 2>/dev/null | sed -nE 's/^\| *[0-9]+ +(Ascend)?((910|310)[A-Za-z0-9_]*).*$/\2/p' | sed -n 1p)
  [ -n "$chip" ] || return 1
  printf 'ascend%s\n' "${chip,,}"
}

dry=
for word in "$@"; do
  case $word in
    -h | --help)
      help
      exit 0
      ;;
    --dry-run) dry=1 ;;
  esac
done

export VLLM_ASCEND_PD_NPU=1
if [ -z "${SOC_VERSION:-}" ] && SOC_VERSION=$(soc_version); then export SOC_VERSION; fi
if [ -n "$dry" ]; then
  PD_PYTHON=${PD_PYTHON:-$(command -v python3)}
else
  mkdir -p "$PD_CACHE"
  pd_choose_interpreter || exit 2
fi
export PD_PYTHON PD_DEVICE=npu PD_GIVEN=${PD_GIVEN:-}
exec "$PD_PYTHON" tools/npu_selfcheck.py "$@"
