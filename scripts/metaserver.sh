#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Starts the metaserver: the address that clients use. --help shows every flag, its variable and its default.
set -euo pipefail
# shellcheck source=scripts/setup.sh
. "$(dirname "$0")/setup.sh"
# shellcheck source=scripts/options.sh
. "$(dirname "$0")/options.sh"

OPTIONS=(
  "host|PD_HOST|127.0.0.1|address that it binds; D engines must be able to reach it"
  "port|PD_METASERVER_PORT|8000|port"
  "prefill*|PD_PREFILL_URLS|http://127.0.0.1:8001|prefill engines"
  "decode*|PD_DECODE_URLS|http://127.0.0.1:8002|decode engines"
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
  local command word
  for word in "$@"; do
    case $word in
      --) break ;;
      -h | --help)
        help
        return 0
        ;;
    esac
  done
  options_parse "$@"
  options_need_number port
  if [ -n "${OPT[dry-run]}${OPT[no-setup]}" ]; then pd_choose_interpreter; else pd_setup run; fi
  command=("$PD_PYTHON" -m vllm_ascend_pd.cli metaserver --host "${OPT[host]}" --port "${OPT[port]}")
  local prefill decode
  read -ra prefill <<<"${OPT[prefill]}"
  read -ra decode <<<"${OPT[decode]}"
  command+=(--prefill "${prefill[@]}" --decode "${decode[@]}" "${REST[@]}")
  if [ -n "${OPT[dry-run]}" ]; then
    options_show "${command[@]}"
    return 0
  fi
  exec "${command[@]}"
}

main "$@"
