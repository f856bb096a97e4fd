#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Sets up if needed, then runs the test suite: integration, ascend_host, simulation, native, unit, in one pytest run.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/setup.sh
. scripts/setup.sh

help() {
  cat <<'TEXT'
Sets up if needed (scripts/setup.sh), then runs the tests: integration, ascend_host, simulation, native, unit, in this
order.

usage: scripts/test.sh [--ci | --all] [--no-setup] [path or pytest argument …]
       scripts/test.sh --parts [--no-setup] [--list] [--minutes M] [part …]

  --ci        also what is marked ci, and more seeds of the simulators: what every change must pass (.ci/run)
  --all       also what is marked slow, and all seeds: it does not fit the time of a CI run
  --parts     all tests, slow ones too, part by part; what is good on this commit does not run again (--parts --help)
  --no-setup  do not check the installation first

As root it installs with apt-get what some tests use and this host lacks: a browser for the status page (nginx for
others is only unpacked, into .cache); with --all,
cross-compiler and emulator for aarch64, and CMake. Elsewhere these tests say what they lack.

Without paths the tests run in one process more than there are cores, five at most: they often wait. Those of a folder
that starts engines run in one of them.
With paths (tests/unit, tests/unit/test_x.py::test_y) only those run, as with --ci, in one process, or with -n N in N.
Other arguments go to pytest as they are.
Tests marked npu are deselected where there is no NPU. With --ci, --all or a path a test may be skipped only for a
reason in tests/skips.py: for another one, such as a tool that is missing, the run fails (--skips any: it does not).
tests/ascend_host needs an environment of 8 GB, which is made with --ci, --all, or when these tests are named, on x86-64
with 20 GB free (docs/building.md); with --all and --parts one more, for the release of vllm-ascend before. Where they
cannot be made, these tests fail at once. PD_ASCEND_HOST=0 leaves them out on purpose; the last lines say so.
TEXT
}

# Compiles what stands in for CANN, for the torch_npu of both environments at once: takes a minute or two, once.
stand_ins() {
  local jobs=() job failed=0
  if [[ " ${paths[*]} " == *" tests/native"* ]]; then
    "$PD_PYTHON" tests/native/npu_build.py &
    jobs+=("$!")
  fi
  if [[ " ${paths[*]} " == *" tests/ascend_host"* ]] && [ -e .venv-ascend-host/.stamp ]; then
    .venv-ascend-host/bin/python tests/ascend_host/host_build.py &
    jobs+=("$!")
  fi
  for job in "${jobs[@]}"; do wait "$job" || failed=1; done
  return "$failed"
}

tier=
install=1
runs=1
all=
parts=
if [ "${1:-}" = --parts ]; then
  shift
  parts=1
  all=1
  tier=all
fi
paths=()
arguments=()
for word in "$@"; do
  case $word in
    -h | --help | --list)
      if [ -z "$parts" ]; then
        help
        exit 0
      fi
      arguments+=("$word")
      runs=
      ;;
    --ci) tier=ci ;;
    --all)
      tier=all
      all=1
      ;;
    --no-setup) install= ;;
    *) if [ -z "$parts" ] && [ -e "${word%%::*}" ]; then paths+=("$word"); else arguments+=("$word"); fi ;;
  esac
done
if [ ${#paths[@]} -gt 0 ]; then tier=${tier:-ci}; fi
case $tier in
  all) selection=(--skips listed) ;;
  ci) selection=(-m 'not slow' --seeds ci --skips listed) ;;
  *) selection=(-m 'not slow and not ci' --seeds few) ;;
esac
spread=()
# More threads than cores: those that wait for others of their operator leave the core to them.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
if [ ${#paths[@]} = 0 ]; then
  cores=$(nproc)
  spread=(-n "$((cores < 4 ? cores + 1 : 5))" --durations 15 --durations-min 20)
  # The longest first, so that the processes end together: each process with a file that starts engines stays busy all
  # the time.
  for part in integration ascend_host simulation native unit; do
    if [ "$part" = ascend_host ] && [ -z "$tier" ]; then continue; fi
    if [ -d "tests/$part" ]; then paths+=("tests/$part"); fi
  done
fi

# What is left out is the end of pytest's summary (tests/conftest.py): a run without these tests must not look whole.
PD_LEFT_OUT=
ascend_host=
releases=(0.30) # of vllm-ascend
case ${PD_ASCEND_HOST:-1} in
  0 | 1) ;;
  *) pd_fail "PD_ASCEND_HOST=$PD_ASCEND_HOST: 0 or 1 is wanted" ;;
esac
if [ -z "$runs" ] || [[ " ${paths[*]} " != *" tests/ascend_host"* ]]; then
  :
elif [ "${PD_ASCEND_HOST:-1}" = 0 ]; then
  PD_LEFT_OUT="tests/ascend_host, on purpose: PD_ASCEND_HOST=0 is set. Unset it to run these tests."
  rest=()
  for path in "${paths[@]}"; do if [[ $path != tests/ascend_host* ]]; then rest+=("$path"); fi; done
  paths=("${rest[@]}")
  [ ${#paths[@]} -gt 0 ] || pd_fail "nothing is left to run: $PD_LEFT_OUT"
else
  if [ -n "$all" ]; then releases+=(0.23); fi
  why=
  if [ -n "$install" ]; then
    for release in "${releases[@]}"; do why=${why:-$(tests/ascend_host/environment.sh --why-not "$release")}; done
  else
    if [ ! -e .venv-ascend-host/.stamp ]; then
      why="their environment is missing, and --no-setup makes none. Run tests/ascend_host/environment.sh"
    fi
  fi
  [ -z "$why" ] || pd_fail "tests/ascend_host: $why, or set PD_ASCEND_HOST=0 to leave these tests out on purpose"
  ascend_host=1
fi
export PD_LEFT_OUT

if [ -n "$install" ] && [ -n "$runs" ]; then
  pd_setup test
  pd_test_tools "$all"
  if [ -n "$ascend_host" ]; then
    for release in "${releases[@]}"; do tests/ascend_host/environment.sh "$release" >/dev/null; done
  fi
  if [[ " ${paths[*]} " =~ " tests/"(native|ascend_host) ]]; then
    pd_step "stand-ins for CANN, and the NPU binding over them" stand_ins
  fi
else
  pd_choose_interpreter
fi
if [ -n "$parts" ]; then exec "$PD_PYTHON" -m tools.parts "${arguments[@]}"; fi
# Nothing after this line: the summary of pytest is the end of the output.
exec "$PD_PYTHON" -m pytest "${selection[@]}" "${spread[@]}" "${arguments[@]}" "${paths[@]}"
