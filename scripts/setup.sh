#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Set-up shared by every script: which interpreter, Debian packages, pinned requirements, editable build.
#
#   scripts/setup.sh [run|test|dev|unbuilt]    as a command
#   . scripts/setup.sh; pd_setup LEVEL …       as a library; sets PD_PYTHON and PD_DEVICE (cpu or npu); … are the
#                                              script's arguments: with --help nothing is set up
#
# run: what engines need; test: and the test tools; dev: and the linters; unbuilt: as test, without this package's
# build, for tools that import it from the clone. A second run finds everything by its stamps in well under a second.
# Only one set-up of a clone runs at a time; a second one waits for it.
# Lines go to stderr, so that the output of the calling script stays its own.
#
# Environment: PD_PYTHON           use this interpreter as it is and install nothing
#              PD_BASE_PYTHON      make .venv from this Python 3.11
#              PD_TORCH_INDEX      where torch's CPU wheel is when pip does not find it by itself
#              VLLM_ASCEND_PD_NPU  auto (default), 0: CPU even where CANN is present, 1: fail without an NPU's software

PD_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
PD_VENV=$PD_ROOT/.venv
PD_CACHE=$PD_ROOT/.cache
PD_SETUP_LOG=$PD_CACHE/setup.log
PD_SETUP_LOCK_TIMEOUT=900
PD_TORCH_INDEX=${PD_TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
PD_STARTED=$EPOCHREALTIME

# ---- progress messages

pd_elapsed() { # seconds since $1 (an EPOCHREALTIME), one decimal; into the variable $2 if there is one
  local now=${EPOCHREALTIME/[.,]/} then=${1/[.,]/}
  local tenths=$(((now - then) / 100000))
  local text=$((tenths / 10)).$((tenths % 10))
  if [ -n "${2:-}" ]; then printf -v "$2" '%s' "$text"; else printf '%s' "$text"; fi
}

pd_say() { printf '[set-up] %s\n' "$*" >&2; }

pd_fail() {
  printf '[set-up] error: %s\n' "$*" >&2
  return 1
}

# pd_step TEXT COMMAND...: one line with the time it took; the command's own output goes to the log, and its end
# to the terminal if it fails. Where no terminal is, it is two lines: others may print between them.
pd_step() {
  local text=$1 began=$EPOCHREALTIME rc=0 line
  shift
  line="[set-up] $text …"
  if [ -t 2 ]; then printf '%s ' "$line" && line=; else printf '%s\n' "$line" && line+=' '; fi >&2
  printf '\n### %s: %s\n' "$text" "$*" >>"$PD_SETUP_LOG"
  "$@" >>"$PD_SETUP_LOG" 2>&1 </dev/null || rc=$?
  if [ "$rc" = 0 ]; then
    printf '%s%s s\n' "$line" "$(pd_elapsed "$began")" >&2
    return 0
  fi
  printf '%sfailed after %s s\n' "$line" "$(pd_elapsed "$began")" >&2
  tail -n 30 "$PD_SETUP_LOG" | sed 's/^/[set-up]   | /' >&2
  pd_fail "$text: exit code $rc; all of its output is in ${PD_SETUP_LOG#"$PD_ROOT"/}"
}

# ---- which interpreter

# Prints the interpreter behind $1 (a name or path) if the Python expression $2 is true in it.
pd_python_if() {
  "$1" -c "import importlib.util as u, sys; print(sys.executable); sys.exit(not ($2))" 2>/dev/null
}

pd_find_python311() {
  local candidate path
  for candidate in ${PD_BASE_PYTHON:+"$PD_BASE_PYTHON"} python3.11 python3 \
    /usr/bin/python3.11 /usr/local/bin/python3.11 "$HOME"/.pyenv/versions/3.11.*/bin/python; do
    if path=$(pd_python_if "$candidate" 'sys.version_info[:2] == (3, 11)'); then
      printf '%s\n' "$path"
      return 0
    fi
  done
  return 1
}

# Prints the first interpreter that has torch_npu and vllm_ascend installed. Looking is cheap; importing is not,
# and is left to pd_check_npu.
pd_find_npu_python() {
  local candidate path
  for candidate in ${PD_BASE_PYTHON:+"$PD_BASE_PYTHON"} python3 python python3.11 python3.10 python3.12 \
    /usr/local/python3*/bin/python3; do
    if path=$(pd_python_if "$candidate" 'u.find_spec("torch_npu") and u.find_spec("vllm_ascend")'); then
      printf '%s\n' "$path"
      return 0
    fi
  done
  return 1
}

# vllm-ascend must really import. That takes seconds, so the result is kept until the interpreter's packages change.
pd_check_npu() {
  local python=$1 seen=$PD_CACHE/npu-python now
  now="$python $(stat -c %Y "$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')")"
  if [ -f "$seen" ] && [ "$(<"$seen")" = "$now" ]; then return 0; fi
  pd_step "importing torch_npu and vllm_ascend in $python" "$python" -c 'import torch, torch_npu, vllm_ascend' || {
    pd_fail "$python has torch_npu and vllm_ascend, but they do not import. Load CANN first (source" \
      "/usr/local/Ascend/ascend-toolkit/set_env.sh), or set VLLM_ASCEND_PD_NPU=0 for a CPU environment in .venv."
    return 1
  }
  printf '%s\n' "$now" >"$seen"
}

pd_cann_present() { [ -e /dev/davinci_manager ] || [ -n "${ASCEND_HOME_PATH:-}${ASCEND_TOOLKIT_HOME:-}" ]; }

# Sets PD_PYTHON and PD_DEVICE without installing anything. On CPU, PD_PYTHON may not exist yet.
pd_choose_interpreter() {
  local wanted=${VLLM_ASCEND_PD_NPU:-auto}
  case $wanted in
    auto | 0 | 1) ;;
    *) pd_fail "VLLM_ASCEND_PD_NPU=$wanted: auto, 0 or 1 is wanted" || return 1 ;;
  esac
  if [ -n "${PD_PYTHON:-}" ]; then
    PD_GIVEN=1
    if [ -z "${PD_DEVICE:-}" ]; then
      PD_DEVICE=cpu
      if [ "$wanted" != 0 ] && pd_python_if "$PD_PYTHON" 'u.find_spec("vllm_ascend")' >/dev/null; then PD_DEVICE=npu; fi
    fi
    return 0
  fi
  PD_GIVEN=
  PD_DEVICE=cpu
  PD_PYTHON=$PD_VENV/bin/python
  if [ "$wanted" = 0 ] || { [ "$wanted" = auto ] && [ -d "$PD_VENV/.stamps" ]; }; then return 0; fi
  local npu
  if npu=$(pd_find_npu_python); then
    PD_DEVICE=npu
    PD_PYTHON=$npu
  elif [ "$wanted" = 1 ] || pd_cann_present; then
    PD_PYTHON=
    pd_fail "this host has CANN or an NPU (or VLLM_ASCEND_PD_NPU=1 is set), but no python3 here has torch_npu and" \
      "vllm_ascend. Install them, or name the interpreter with PD_BASE_PYTHON, or set VLLM_ASCEND_PD_NPU=0 for a" \
      "CPU environment in .venv."
  fi
}

# ---- Debian packages

pd_library_missing() { # soname
  local cache
  cache=$(PATH=$PATH:/sbin:/usr/sbin ldconfig -p 2>/dev/null) || return 0
  [[ $cache != *"$1 "* ]]
}

# Prints the Debian packages missing for interpreter $1 (empty: none exists yet), one a line.
pd_missing_packages() {
  local python=$1
  if [ -z "$python" ]; then
    printf 'python3.11\npython3.11-venv\npython3.11-dev\n'
  else
    "$python" -c 'import ensurepip, venv' 2>/dev/null || printf 'python3.11-venv\n'
    "$python" -c 'import pathlib, sys, sysconfig
sys.exit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").is_file())' || printf 'python3.11-dev\n'
  fi
  command -v "${CXX:-c++}" >/dev/null || printf 'g++\n'
  # Mooncake's shared libraries.
  if pd_library_missing libibverbs.so.1; then printf 'libibverbs1\n'; fi
  if pd_library_missing libnuma.so.1; then printf 'libnuma1\n'; fi
  if pd_library_missing libcurl.so.4; then printf 'libcurl4\n'; fi
}

# A fresh machine often upgrades itself just then, and holds dpkg's lock. One at a time: two set-ups of a clone may both
# miss something, and apt-get update does not wait for its lock.
pd_apt() {
  flock -o -w "$PD_SETUP_LOCK_TIMEOUT" "$PD_CACHE/apt.lock" \
    apt-get "$1" -q -o "DPkg::Lock::Timeout=$PD_SETUP_LOCK_TIMEOUT" "${@:2}"
}

pd_apt_install() {
  export DEBIAN_FRONTEND=noninteractive
  pd_apt install -y --no-install-recommends "$@" && return 0
  pd_apt update && pd_apt install -y --no-install-recommends "$@"
}

pd_debian() {
  local missing
  mapfile -t missing < <(pd_missing_packages "$1")
  if [ ${#missing[@]} = 0 ]; then return 0; fi
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    pd_fail "missing on this host: ${missing[*]}. As root: apt-get install ${missing[*]}"
    return 1
  fi
  pd_step "Debian packages: ${missing[*]}" pd_apt_install "${missing[@]}"
}

# nginx for the tests that put it before the metaserver: unpacked, not installed, as the package would start a service.
pd_unpack_nginx() {
  local folder=$PD_CACHE/nginx
  rm -rf "$folder" && mkdir -p "$folder" || return 1
  (cd "$folder" && { pd_apt download nginx || { pd_apt update && pd_apt download nginx; }; } &&
    dpkg-deb -x nginx_*.deb .) && "$folder/usr/sbin/nginx" -v
}

pd_nginx() {
  command -v nginx >/dev/null || "$PD_CACHE/nginx/usr/sbin/nginx" -v 2>/dev/null || {
    [ -z "$PD_GIVEN" ] && command -v apt-get >/dev/null && pd_step "nginx for tests, in .cache" pd_unpack_nginx
  } || pd_say "tests that need nginx will be skipped. As root: apt-get install nginx-light"
}

# Extra tools of some tests: a browser for the status page, nginx, nft; with --all, cross-compiled parts under emulation and
# the NPU library's CMake path. Without them the other tests run, and these report what is missing.
pd_test_tools() { # all, or nothing
  pd_nginx
  local missing=()
  command -v chromium-headless-shell chromium chromium-browser google-chrome >/dev/null ||
    missing+=(chromium-headless-shell)
  PATH=$PATH:/usr/sbin command -v nft >/dev/null || missing+=(nftables)
  if [ -n "${1:-}" ]; then
    command -v aarch64-linux-gnu-g++ >/dev/null || missing+=(g++-aarch64-linux-gnu)
    command -v qemu-aarch64 >/dev/null || command -v qemu-aarch64-static >/dev/null || missing+=(qemu-user)
    command -v cmake >/dev/null || missing+=(cmake)
  fi
  if [ ${#missing[@]} = 0 ]; then return 0; fi
  if [ -n "$PD_GIVEN" ] || [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null ||
    ! pd_step "Debian packages: ${missing[*]}" pd_apt_install "${missing[@]}"; then
    pd_say "tests that need ${missing[*]} will be skipped. As root: apt-get install ${missing[*]}"
  fi
}

# ---- stamps: a step is done when the hash of its inputs is recorded

pd_stamp_is() { [ -f "$PD_STAMPS/$1" ] && [ "$(<"$PD_STAMPS/$1")" = "$2" ]; }

pd_stamp() { printf '%s\n' "$2" >"$PD_STAMPS/$1"; }

pd_hash() { # of files and of the words after --
  local files=()
  while [ $# -gt 0 ] && [ "$1" != -- ]; do
    files+=("$1")
    shift
  done
  { (cd "$PD_ROOT" && sha256sum "${files[@]}") && printf '%s\n' "$@"; } | sha256sum | cut -c1-64
}

# ---- the CPU environment

# Installed with --no-compile: Python compiles what is imported, which of gigabytes is a small part.
pd_pip() { "$PD_PYTHON" -m pip --disable-pip-version-check --no-input "$@"; }

# torch's CPU wheel comes from pip's configured index, else from PyTorch's own.
pd_install_torch() {
  local pin
  pin=$(grep '^torch==' "$PD_ROOT/requirements/cpu-py311.txt") || return 1
  pd_pip install --no-deps --no-compile --progress-bar off "$pin" && return 0
  printf 'pip does not find %s by itself; trying %s\n' "$pin" "$PD_TORCH_INDEX"
  pd_pip install --no-deps --no-compile --progress-bar off --extra-index-url "$PD_TORCH_INDEX" "$pin"
}

pd_install_requirements() { # level
  local level=$1 file hash stale=() python_version
  python_version=$(sed -n 's/^version *= *//p' "$PD_VENV/pyvenv.cfg")
  if [[ $python_version != 3.11.* ]]; then
    pd_fail ".venv is Python $python_version, the pinned environment is for 3.11: move .venv away"
    return 1
  fi
  case $level in
    run) set -- cpu-py311 ;;
    test | unbuilt) set -- cpu-py311 test ;;
    dev) set -- cpu-py311 test dev ;;
  esac
  for file in "$@"; do
    hash=$(pd_hash "requirements/$file.txt" -- "$python_version")
    pd_stamp_is "$file" "$hash" || stale+=(-r "$PD_ROOT/requirements/$file.txt")
  done
  if [ ${#stale[@]} = 0 ]; then return 0; fi
  "$PD_PYTHON" -c 'import pip' 2>/dev/null || pd_step "pip for .venv" "$PD_PYTHON" -m ensurepip || return 1
  if [[ "${stale[*]}" == *cpu-py311* ]]; then
    pd_step "torch for CPU" pd_install_torch || return 1
    pd_step "vLLM, Mooncake and what they need (pinned; about a minute)" \
      pd_pip install --no-deps --no-compile --progress-bar off "${stale[@]}" || return 1
    pd_step "Mooncake loads" "$PD_PYTHON" -c 'import mooncake.engine' || return 1
  else
    pd_step "test and lint tools (pinned)" pd_pip install --no-deps --no-compile --progress-bar off "${stale[@]}" || return 1
  fi
  for file in "$@"; do pd_stamp "$file" "$(pd_hash "requirements/$file.txt" -- "$python_version")"; done
}

pd_cpu_environment() { # level
  local base=''
  if ! "$PD_VENV/bin/python" -c '' 2>/dev/null; then
    base=$(pd_find_python311) || base=''
    pd_debian "$base" || return 1
    if [ -z "$base" ]; then
      base=$(pd_find_python311) || {
        pd_fail "Python 3.11 is needed (the CPU build of vLLM's torch exists for it): install it, or set PD_BASE_PYTHON"
        return 1
      }
    fi
    pd_step ".venv from $base" "$base" -m venv --clear "$PD_VENV" || return 1
  fi
  PD_STAMPS=$PD_VENV/.stamps
  mkdir -p "$PD_STAMPS"
  if [ -z "$base" ] && [ ! -f "$PD_STAMPS/debian" ]; then pd_debian "$PD_PYTHON" || return 1; fi
  : >"$PD_STAMPS/debian"
  pd_install_requirements "$1"
}

# ---- the NPU environment: the interpreter of the CANN container stays what it is

pd_npu_environment() { # level
  pd_check_npu "$PD_PYTHON" || return 1
  pd_say "using $PD_PYTHON, in which vllm-ascend imports; no .venv is made"
  PD_STAMPS=$PD_CACHE/npu-stamps
  mkdir -p "$PD_STAMPS"
  "$PD_PYTHON" -c 'import mooncake.engine' 2>/dev/null ||
    pd_say "Mooncake does not import in it: engines need pip install mooncake-transfer-engine-npu"
  case $1 in
    test) PD_EXTRAS='[test]' ;;
    dev) PD_EXTRAS='[test,dev]' ;;
  esac
}

# ---- the package itself, editable: changed Python code needs no reinstallation

pd_build() {
  local sources hash torch
  mapfile -t sources < <(cd "$PD_ROOT" && find csrc -type f | LC_ALL=C sort)
  torch=$("$PD_PYTHON" -c 'import importlib.metadata as m, sys; print(m.version("torch"), *sys.version_info[:2])') ||
    torch='no torch'
  hash=$(pd_hash setup.py pyproject.toml "${sources[@]}" -- \
    "$torch" "$PD_ROOT" "${VLLM_ASCEND_PD_NPU:-auto}" "${ASCEND_HOME_PATH:-}" "${SOC_VERSION:-}" "${PD_EXTRAS:-}")
  if pd_stamp_is build "$hash" && compgen -G "$PD_ROOT/vllm_ascend_pd/_C*.so" >/dev/null; then return 0; fi
  # On an NPU host the extras may add test tools; packages of the container keep their versions.
  local how=(--no-deps)
  if [ -n "${PD_EXTRAS:-}" ]; then how=(--upgrade-strategy only-if-needed); fi
  if ! "$PD_PYTHON" -c 'import setuptools as s, sys; sys.exit(int(s.__version__.split(".")[0]) < 77)' 2>/dev/null; then
    : # pip's build isolation brings a setuptools that is new enough
  else
    how+=(--no-build-isolation)
  fi
  pd_step "vllm_ascend_pd and its extension (editable)" pd_pip install "${how[@]}" -e "$PD_ROOT${PD_EXTRAS:-}" || return 1
  pd_stamp build "$hash"
}

# ---- all of it

pd_setup_locked() { # level
  : >"$PD_SETUP_LOG"
  "pd_${PD_DEVICE}_environment" "$1" || return 1
  if [ "$1" != unbuilt ]; then pd_build; fi
}

PD_PARSERS_NEED='all(map(u.find_spec, ("httpx", "msgspec", "pytest", "torch", "vllm")))'

pd_wants_help() { # arguments
  local word
  for word in "$@"; do
    case $word in
      --) return 1 ;;
      -h | --help) return 0 ;;
    esac
  done
  return 1
}

pd_setup() { # level, arguments of the script
  local level=${1:-run} lock rc=0
  case $level in
    run | test | dev | unbuilt) ;;
    *) pd_fail "pd_setup $level: run, test, dev or unbuilt is wanted" || return 1 ;;
  esac
  if pd_wants_help "${@:2}"; then
    if pd_choose_interpreter 2>/dev/null && pd_python_if "$PD_PYTHON" "$PD_PARSERS_NEED" >/dev/null; then return 0; fi
    sed -n '3,/^set /s/^# \{0,1\}//p' "$PD_ROOT/scripts/${0##*/}"
    printf 'The flags are known once scripts/setup.sh %s has run.\n' "$level"
    exit 0
  fi
  mkdir -p "$PD_CACHE"
  pd_choose_interpreter || return 1
  if [ -n "$PD_GIVEN" ]; then
    pd_say "PD_PYTHON is set: using $PD_PYTHON as it is ($PD_DEVICE)"
    return 0
  fi
  exec {lock}>"$PD_CACHE/setup.lock"
  if ! flock -n "$lock"; then
    pd_say "another set-up of this clone is running; waiting for it"
    flock -w "$PD_SETUP_LOCK_TIMEOUT" "$lock" ||
      { pd_fail "it did not end within $PD_SETUP_LOCK_TIMEOUT s" || return 1; }
  fi
  pd_setup_locked "$level" || rc=1
  exec {lock}>&-
  if [ "$rc" != 0 ]; then return 1; fi
  pd_say "ready after $(pd_elapsed "$PD_STARTED") s: $PD_PYTHON ($PD_DEVICE)"
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
  set -euo pipefail
  case ${1:-} in
    -h | --help) sed -n '3,/^$/s/^# \{0,1\}//p' "$0" ;;
    *) pd_setup "${1:-run}" ;;
  esac
fi
