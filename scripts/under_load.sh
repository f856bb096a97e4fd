#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs a command repeatedly beside busy processes and counts failures: timing-dependent tests fail here.
set -euo pipefail
here=$(dirname "$0")
# shellcheck source=scripts/options.sh
. "$here/options.sh"

OPTIONS=(
  "runs||10|how often the command is run"
  "busy||4|processes beside it that do nothing but compute (nice 0)"
  "deadline||1800|seconds that one run may take; then its session is ended"
  "out|PD_LOAD_OUT|auto|where each run's output is kept; auto: out/under_load-<time>"
)

help() {
  cat <<'TEXT'
Runs a command several times beside busy processes; prints each run's exit code, seconds and last line, then how many
of them ended with 0. The exit code is 1 if one did not. Every run's whole output is kept.

usage: scripts/under_load.sh [flags] -- COMMAND [ARGUMENT …]
for example: scripts/under_load.sh --runs 10 --busy 4 -- ./scripts/quickstart.sh

TEXT
  options_help
}

busy=()
run=''

# By process id and session only, so that nothing else is ended.
clean() {
  trap '' INT TERM
  trap - EXIT
  if [ -n "$run" ]; then end_run; fi
  if [ ${#busy[@]} -gt 0 ]; then
    kill -KILL "${busy[@]}" 2>/dev/null || true
    wait "${busy[@]}" 2>/dev/null || true
  fi
  busy=()
}

# The run leads a process group. It has 90 s to stop its engines, then it is killed.
end_run() {
  local end=$((SECONDS + 90))
  kill -TERM -- "-$run" 2>/dev/null || true
  while kill -0 "$run" 2>/dev/null && [ "$SECONDS" -lt "$end" ]; do sleep 0.1; done
  kill -KILL -- "-$run" 2>/dev/null || true
}

one() { # number log: fills CODE
  local begun=$SECONDS shown=$SECONDS late=''
  setsid "${REST[@]}" >"$2" 2>&1 </dev/null &
  run=$!
  while kill -0 "$run" 2>/dev/null; do
    if [ $((SECONDS - begun)) -ge "${OPT[deadline]}" ]; then
      late=1
      end_run
      break
    fi
    if [ $((SECONDS - shown)) -ge 10 ]; then
      shown=$SECONDS
      printf '  run %s: %s s, %s\n' "$1" "$((SECONDS - begun))" "$(last_line "$2")"
    fi
    sleep 0.1
  done
  CODE=0
  wait "$run" 2>/dev/null || CODE=$?
  run=''
  if [ -n "$late" ]; then
    CODE=124
    printf '\nnot ended after %s s: ended by the deadline\n' "${OPT[deadline]}" >>"$2"
  fi
  TOOK=$((SECONDS - begun))
}

last_line() { # file: its last line that is not empty
  grep -a . "$1" | tail -n 1 | tr -d '\r' || true
}

main() {
  local word number good=0 log
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
  options_need_number runs busy deadline
  [ "${OPT[runs]}" -gt 0 ] || options_refuse "--runs ${OPT[runs]}: at least one is wanted"
  [ ${#REST[@]} -gt 0 ] || options_refuse "a command is wanted behind --"
  if [ "${OPT[out]}" = auto ]; then OPT[out]=$here/../out/under_load-$(date +%Y%m%d-%H%M%S)-$$; fi
  mkdir -p "${OPT[out]}"
  trap clean EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM
  for ((number = 0; number < OPT[busy]; number++)); do
    (
      trap - INT TERM EXIT
      while :; do :; done
    ) </dev/null >/dev/null 2>&1 &
    busy+=($!)
  done
  printf '%s runs beside %s busy processes%s; logs in %s\n' "${OPT[runs]}" "${OPT[busy]}" \
    "${busy[*]:+ (pids ${busy[*]})}" "${OPT[out]}"
  for ((number = 1; number <= OPT[runs]; number++)); do
    log=${OPT[out]}/run-$number.log
    one "$number" "$log"
    if [ "$CODE" = 0 ]; then good=$((good + 1)); fi
    printf 'run %s: exit code %s, %s s, %s\n' "$number" "$CODE" "$TOOK" "$(last_line "$log")"
  done
  printf '%s of %s\n' "$good" "${OPT[runs]}"
  [ "$good" = "${OPT[runs]}" ]
}

main "$@"
