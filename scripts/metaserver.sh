#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Starts the metaserver: the address that clients use. --help shows every flag, its variable and its default.
set -euo pipefail
# shellcheck source=scripts/setup.sh
. "$(dirname "$0")/setup.sh"
# shellcheck source=scripts/options.sh
. "$(dirname "$0")/options.sh"

OPTIONS=(
  "host|PD_HOST||=--host"
  "port|PD_METASERVER_PORT||=--port"
  "prefill*|PD_PREFILL_URLS|http://127.0.0.1:8001|=--prefill"
  "decode*|PD_DECODE_URLS|http://127.0.0.1:8002|=--decode"
  "no-setup!|||do not check the installation first"
  "dry-run!|||print the command and do nothing"
)

help() {
  cat <<'TEXT'
Starts the metaserver in front of prefill and decode engines.

usage: scripts/metaserver.sh [flags] [-- more flags of vllm-ascend-pd metaserver]

TEXT
  options_help
}

main() {
  local command flag values
  if pd_wants_help "$@"; then
    help
    return 0
  fi
  options_parse "$@"
  if [ -n "${OPT[port]}" ]; then options_need_number port; fi
  if [ -n "${OPT[dry-run]}${OPT[no-setup]}" ]; then pd_choose_interpreter; else pd_setup run; fi
  command=("$PD_PYTHON" -m vllm_ascend_pd.cli metaserver)
  for flag in host port prefill decode; do
    read -ra values <<<"${OPT[$flag]}"
    if [ ${#values[@]} -gt 0 ]; then command+=("--$flag" "${values[@]}"); fi
  done
  command+=("${REST[@]}")
  if [ -n "${OPT[dry-run]}" ]; then
    options_show "${command[@]}"
    return 0
  fi
  exec "${command[@]}"
}

main "$@"
