#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# From a clean clone to a prefill engine that pushes its KV cache into a decode engine while it computes:
# sets the environment up, starts a reference engine, a pair and a metaserver, compares tokens, prints what happened.
set -euo pipefail
# shellcheck source=scripts/setup.sh
. "$(dirname "$0")/setup.sh"
# shellcheck source=scripts/options.sh
. "$(dirname "$0")/options.sh"

OPTIONS=(
  "p-tp|PD_P_TP|2|tensor parallel size of the prefill engine (and of the reference)"
  "d-tp|PD_D_TP|1|tensor parallel size of the decode engine"
  "model|PD_MODEL||model directory; not set: a random 16-layer one, made once in models/"
  "port-base|PD_PORT_BASE||first port; not set: free ones"
  "keep!|||leave pair and metaserver running after the report, until ctrl-C"
  "dry-run!|||print what would be installed and started, and do nothing"
)

help() {
  cat <<'TEXT'
Starts one prefill and one decode engine and a metaserver on this host, sends requests, compares with one engine.

usage: scripts/quickstart.sh [flags]

The exit code is 0 only if every token is the single engine's and no process was left behind.

TEXT
  options_help
}

main() {
  local python arguments
  if pd_wants_help "$@"; then
    help
    return 0
  fi
  options_parse "$@"
  options_need_number p-tp d-tp
  arguments=(--p-tp "${OPT[p-tp]}" --d-tp "${OPT[d-tp]}")
  if [ -n "${OPT[model]}" ]; then arguments+=(--model "$(realpath -m "${OPT[model]}")"); fi
  if [ -n "${OPT[port-base]}" ]; then
    options_need_number port-base
    arguments+=(--port-base "${OPT[port-base]}")
  fi
  if [ -n "${OPT[keep]}" ]; then arguments+=(--keep); fi
  cd "$(dirname "$0")/.."
  if [ -n "${OPT[dry-run]}" ]; then
    pd_choose_interpreter
    python=$PD_PYTHON
    if ! "$python" -c '' 2>/dev/null; then
      printf 'would make .venv and install requirements/cpu-py311.txt, then build the package; then:\n'
      python=$(command -v python3)
    fi
    PD_DEVICE=$PD_DEVICE "$python" -m tools.quickstart --dry-run "${arguments[@]}"
    return 0
  fi
  pd_setup run
  export PD_DEVICE
  exec "$PD_PYTHON" -m tools.quickstart "${arguments[@]}"
}

main "$@"
