#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Metaserver, one prefill and one decode engine on this host, until ctrl-C. --help shows every flag.
set -euo pipefail
here=$(dirname "$0")
# shellcheck source=scripts/setup.sh
. "$here/setup.sh"
# shellcheck source=scripts/options.sh
. "$here/options.sh"

OPTIONS=(
  "model|PD_MODEL||model directory or Hugging Face name (required)"
  "p-tp|PD_P_TP|1|tensor parallel size of the prefill engine"
  "p-pp|PD_P_PP|1|pipeline parallel size of the prefill engine"
  "p-dp|PD_P_DP|1|data parallel size of the prefill engine"
  "d-tp|PD_D_TP|1|tensor parallel size of the decode engine"
  "d-pp|PD_D_PP|1|pipeline parallel size of the decode engine"
  "d-dp|PD_D_DP|1|data parallel size of the decode engine"
  "experts|PD_EXPERTS|off|on: experts are spread over all ranks of an engine"
  "p-graph-mode|PD_P_GRAPH_MODE||cudagraph_mode of the prefill engine: NONE or PIECEWISE; not set: vLLM's choice"
  "d-graph-mode|PD_D_GRAPH_MODE||cudagraph_mode of the decode engine, as FULL_DECODE_ONLY; not set: vLLM's choice"
  "p-speculative|PD_P_SPECULATIVE||JSON for the prefill engine's --speculative-config"
  "d-speculative|PD_D_SPECULATIVE||JSON for the decode engine's --speculative-config"
  "host|PD_HOST|127.0.0.1|address that all three bind"
  "port-base|PD_PORT_BASE|8000|the metaserver's port; prefill has the next one, decode the one after"
  "p-devices|PD_P_DEVICES|auto|NPU: devices of the prefill engine; auto: the first ones"
  "d-devices|PD_D_DEVICES|auto|NPU: devices of the decode engine; auto: those after the prefill engine's"
  "log-dir|PD_LOG_DIR|auto|where the three write their output; auto: out/1p1d-<time>"
  "secret-file|PD_SECRET_FILE|auto|shared secret, created with mode 0600 if it is not there; auto: in log-dir"
  "timeout|PD_READY_TIMEOUT|auto|seconds until all are ready; auto: 300 on CPU, 1800 on NPU"
  "grace|PD_GRACE|30|seconds that a process has to stop by itself"
  "dry-run!|||print the commands and do nothing"
)

help() {
  cat <<'TEXT'
Starts a metaserver, one prefill engine and one decode engine on this host, waits until they answer, prints the
address for clients, and stops all three on ctrl-C. Everything else of the engines (block size, dtype, …) is set by
the environment variables that scripts/prefill.sh --help and scripts/decode.sh --help name.

Each engine has one server, for all of its data-parallel ranks. Engines with several servers or hosts, and several
engines, are started by scripts/prefill.sh, decode.sh and metaserver.sh, once for each server: docs/operations.md has
the flags, examples/large-ep, two-hosts and 2p2d are written out.

usage: scripts/launch_1p1d.sh --model MODEL [flags]

TEXT
  options_help
}

# No external process, not even in a command substitution, may run here while signals can arrive: bash loses a SIGINT
# that arrives then, if the process ends with 0.
say() {
  local elapsed
  pd_elapsed "$PD_STARTED" elapsed
  printf '[%5s s] %s\n' "$elapsed" "$*"
}

exec {NOTHING}<> <(:)
pause() { read -rt "$1" -u "$NOTHING" || true; } # seconds

# ---- the three commands

device_list() { # first count
  seq -s , "$1" $(($1 + $2 - 1))
}

resolve() {
  METASERVER_PORT=${OPT[port-base]}
  PREFILL_PORT=$((METASERVER_PORT + 1))
  DECODE_PORT=$((METASERVER_PORT + 2))
  PORTS=([metaserver]=$METASERVER_PORT [prefill]=$PREFILL_PORT [decode]=$DECODE_PORT)
  if [ "${OPT[log-dir]}" = auto ]; then OPT[log-dir]=$PD_ROOT/out/1p1d-$(date +%Y%m%d-%H%M%S)-$$; fi
  if [ "${OPT[secret-file]}" = auto ]; then OPT[secret-file]=${OPT[log-dir]}/secret; fi
  local p_world=$((OPT[p-tp] * OPT[p-pp] * OPT[p-dp]))
  if [ "${OPT[p-devices]}" = auto ]; then OPT[p-devices]=$(device_list 0 "$p_world"); fi
  if [ "${OPT[d-devices]}" = auto ]; then OPT[d-devices]=$(device_list "$p_world" $((OPT[d-tp] * OPT[d-pp] * OPT[d-dp]))); fi
  if [ "${OPT[timeout]}" = auto ]; then
    if [ "$PD_DEVICE" = npu ]; then OPT[timeout]=1800; else OPT[timeout]=300; fi
  fi
}

role_command() { # role more-flags… : fills COMMAND
  local role=$1 host=${OPT[host]}
  shift
  COMMAND=("$here/$role.sh" --no-setup --host "$host")
  case $role in
    metaserver)
      COMMAND+=(--port "$METASERVER_PORT" --prefill "http://$host:$PREFILL_PORT" --decode "http://$host:$DECODE_PORT")
      ;;
    prefill)
      engine_flags p "$PREFILL_PORT"
      ;;
    decode)
      engine_flags d "$DECODE_PORT"
      COMMAND+=(--metaserver "http://$host:$METASERVER_PORT")
      ;;
  esac
  COMMAND+=("$@")
}

engine_flags() { # p or d, port: more of COMMAND
  local side=$1 flag
  COMMAND+=(--port "$2" --model "${OPT[model]}" --experts "${OPT[experts]}" --secret-file "${OPT[secret-file]}")
  for flag in tp pp dp devices graph-mode speculative; do
    if [ -n "${OPT[$side-$flag]}" ]; then COMMAND+=("--$flag" "${OPT[$side-$flag]}"); fi
  done
}

make_secret() {
  local file=${OPT[secret-file]}
  if [ -e "$file" ]; then
    [ "$(stat -c %a "$file")" = 600 ] || options_refuse "$file exists with mode $(stat -c %a "$file"): chmod 600 it"
    return 0
  fi
  mkdir -p "$(dirname "$file")"
  (umask 077 && od -An -tx1 -N32 /dev/urandom | tr -d ' \n' >"$file")
  say "secret created: $file (mode 0600)"
}

# ---- children: each the leader of its own session, which identifies its workers

declare -A PIDS=() LOGS=() PORTS=()

start() { # role
  role_command "$1"
  LOGS[$1]=${OPT[log-dir]}/$1.log
  setsid "${COMMAND[@]}" >"${LOGS[$1]}" 2>&1 </dev/null {NOTHING}>&- &
  PIDS[$1]=$!
  disown # else bash comments on every child that a signal ends
  say "$1 started: pid ${PIDS[$1]}, log ${LOGS[$1]}"
}

alive() { kill -0 "${PIDS[$1]}" 2>/dev/null; }

# LEFT are the running processes of the role's session, without zombies: a container's first process may never reap
# them.
session_pids() { # role
  local stat text fields
  LEFT=()
  for stat in /proc/[0-9]*/stat; do
    { IFS= read -r text <"$stat"; } 2>/dev/null || continue
    read -ra fields <<<"${text##*) }" # state, parent, process group, session, …
    if [ "${fields[3]}" = "${PIDS[$1]}" ] && [ "${fields[0]}" != Z ]; then LEFT+=("${text%% *}"); fi
  done
}

session_kill() { # role
  local pid
  session_pids "$1"
  for pid in "${LEFT[@]}"; do kill -KILL "$pid" 2>/dev/null || true; done
}

wait_gone() { # role seconds
  local end=$((SECONDS + $2))
  session_pids "$1"
  while [ ${#LEFT[@]} -gt 0 ]; do
    [ "$SECONDS" -lt "$end" ] || return 1
    pause 0.1
    session_pids "$1"
  done
}

# Ends every child and its descendants. Never by name: only sessions that start() made.
stop_all() {
  local role leaked=0 roles=()
  trap 'for role in "${roles[@]}"; do session_kill "$role"; done' INT TERM
  trap - EXIT
  for role in metaserver prefill decode; do
    if [ -n "${PIDS[$role]:-}" ]; then
      roles+=("$role")
      kill -TERM "${PIDS[$role]}" 2>/dev/null || true
    fi
  done
  if [ ${#roles[@]} -gt 0 ]; then say "stopping ${roles[*]} (again ctrl-C: at once)"; fi
  for role in "${roles[@]}"; do
    wait_gone "$role" "${OPT[grace]}" && continue
    say "$role or a process of it did not stop within ${OPT[grace]} s: killed (see ${LOGS[$role]})"
    leaked=1
    session_kill "$role"
    wait_gone "$role" 5 || say "$role: session ${PIDS[$role]} is still there"
  done
  if [ ${#roles[@]} -gt 0 ]; then say "stopped"; fi
  return "$leaked"
}

give_up() {
  say "$1"
  stop_all || true
  exit 1
}

# ---- readiness

answers() { # port path: does GET say 200? ANSWER is its last line: the body, where that is one line of JSON.
  local status='' line='' socket
  ANSWER=
  exec {socket}<>"/dev/tcp/${OPT[host]}/$1" || return 1
  if printf 'GET %s HTTP/1.0\r\nHost: %s\r\n\r\n' "$2" "${OPT[host]}" >&"$socket" &&
    IFS= read -r -t 2 -u "$socket" status; then
    while IFS= read -r -t 2 -u "$socket" line || [ -n "$line" ]; do
      ANSWER=$line
      line=
    done
  fi
  exec {socket}>&-
  [[ $status == 'HTTP/1.'[01]' 200'* ]]
} 2>/dev/null

check_children() {
  local role
  for role in "${!PIDS[@]}"; do
    if ! alive "$role"; then
      tail -n 20 "${LOGS[$role]}" | sed "s/^/  $role | /"
      give_up "$role has ended by itself; the end of its log is above"
    fi
  done
}

wait_answers() { # role… : until the /health of each says 200
  local waiting=("$@") still role shown=$SECONDS
  while [ ${#waiting[@]} -gt 0 ]; do
    check_children
    still=()
    for role in "${waiting[@]}"; do
      if answers "${PORTS[$role]}" /health; then say "$role answers"; else still+=("$role"); fi
    done
    waiting=("${still[@]}")
    if [ ${#waiting[@]} = 0 ]; then return 0; fi
    if [ "$SECONDS" -ge "$END" ]; then
      for role in "${waiting[@]}"; do tail -n 20 "${LOGS[$role]}" | sed "s/^/  $role | /"; done
      give_up "not ready after ${OPT[timeout]} s: ${waiting[*]}"
    fi
    if [ $((SECONDS - shown)) -ge 5 ]; then
      shown=$SECONDS
      say "waiting for ${waiting[*]}"
    fi
    pause 0.5
  done
}

# An engine that answers may still not reach the other one: ready means that a block has been moved.
wait_ready() {
  local shown=$SECONDS why
  until answers "$METASERVER_PORT" /readiness; do
    check_children
    why=${ANSWER#*'"last_error":"'}
    why=${why%%'"'*}
    if [ "$SECONDS" -ge "$END" ]; then give_up "no KV has come from prefill to decode after ${OPT[timeout]} s: $why"; fi
    if [ $((SECONDS - shown)) -ge 5 ]; then
      shown=$SECONDS
      say "waiting for the first block to move: $why"
    fi
    pause 0.5
  done
}

main() {
  local role
  if pd_wants_help "$@"; then
    help
    return 0
  fi
  options_parse "$@"
  [ -n "${OPT[model]}" ] || options_refuse "--model is required"
  options_need_number p-tp p-pp p-dp d-tp d-pp d-dp port-base grace
  if [ -n "${OPT[dry-run]}" ]; then
    pd_choose_interpreter
    resolve
    for role in metaserver prefill decode; do
      role_command "$role" --dry-run
      "${COMMAND[@]}"
    done
    return 0
  fi
  pd_setup run
  export PD_PYTHON PD_DEVICE
  resolve
  options_need_number timeout
  mkdir -p "${OPT[log-dir]}"
  make_secret
  trap 'give_up interrupted' INT TERM
  trap 'stop_all || true' EXIT
  for role in metaserver prefill decode; do
    if answers "${PORTS[$role]}" /health; then give_up "port ${PORTS[$role]} is already served by something else"; fi
  done
  for role in metaserver prefill decode; do start "$role"; done
  END=$((SECONDS + OPT[timeout]))
  wait_answers metaserver prefill decode
  wait_ready
  say "all ready: http://${OPT[host]}:$METASERVER_PORT — for example:"
  printf "  curl -s http://%s:%s/v1/completions -H 'Content-Type: application/json' -d '%s'\n" "${OPT[host]}" \
    "$METASERVER_PORT" "{\"model\": \"${PD_SERVED_NAME:-${OPT[model]}}\", \"prompt\": \"Hello\", \"max_tokens\": 16}"
  say "ctrl-C stops all"
  trap 'stop_all; exit $?' INT TERM
  while check_children; do pause 1; done
}

main "$@"
