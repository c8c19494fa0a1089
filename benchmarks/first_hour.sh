#!/usr/bin/env bash
# The first half hour on a GPU, in the order in which it pays. Each step is one command with a limit of its own, at most
# nine minutes, and leaves what it measured and printed in the folder R; one that fails or is cut stops no other.
#
#   benchmarks/first_hour.sh           every step
#   benchmarks/first_hour.sh 4 5       some of them, one after the other
#   DRY=1 benchmarks/first_hour.sh     print the commands only
#   python3 -m benchmarks figures benchmarks/results/first-hour/*.json
#
# R: folder of the results (benchmarks/results/first-hour). PY: the interpreter (python3). DEVICE: cuda or cpu. COMMIT:
# what to record, not what git says. SMOKE=1: smallest shapes on a CPU, which show that all runs.
# CARRY: folder, in the checkout, of what a machine without a network lacks: wheels, gsm8k/ (CONTRIBUTING.md lists them).
set -u
cd "$(dirname "$0")/.."
R=${R:-benchmarks/results/first-hour}
PY=${PY:-python3}
SMOKE=${SMOKE:-}
DEVICE=${DEVICE:-${SMOKE:+cpu}}
DEVICE=${DEVICE:-cuda}
race="1.7B and 4x8 and 110" profile="1.7B and 8x8" jobs=12 tests="tests/ops tests/scoring tests/hf/test_lora.py"
[ -z "$SMOKE" ] || race="ours" profile="ours" jobs=0 tests="tests/ops/test_adapted_linear.py"
export PYTHONPATH=$PWD:${PYTHONPATH:-}
failed=()

if [ -n "${CARRY:-}" ]; then
  site=$(mktemp -d)
  trap 'rm -rf "$site"' EXIT
  "$PY" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$CARRY"/*.whl || exit 1
  export PYTHONPATH=$PYTHONPATH:$site
  if [ -d "$CARRY/gsm8k" ]; then GSM8K=$(realpath "$CARRY/gsm8k"); export GSM8K; fi
fi

bench() { # STEP SECONDS PART [OPTIONS]
  run "$1" "$2" "$PY" -m benchmarks speed --device "$DEVICE" --only "$3" --into "$R/$1.json" \
    ${COMMIT:+--commit "$COMMIT"} "${@:4}" ${SMOKE:+--smoke --rounds 1 --seconds 0}
}

run() { # STEP SECONDS COMMAND
  if [ -n "${DRY:-}" ]; then printf '%q ' timeout --kill-after=20 "${@:2}"; echo; return; fi
  mkdir -p "$R"
  # A slow machine may take its time to show that all runs: 0 is no limit.
  timeout --kill-after=20 "$([ -z "$SMOKE" ] && echo "$2" || echo 0)" "${@:3}" 2>&1 | tee "$R/$1.log"
  [ "${PIPESTATUS[0]}" -eq 0 ] || failed+=("$1")
}

step() {
  case $1 in
    1) bench 1 240 first-light ;;
    2) bench 2 330 rollouts --seconds 15 ;;
    3) bench 3 240 trainer-step --seconds 20 ;;
    4) bench 4 240 step --select "$race" --seconds 20 --peers 'TRL,"TRL, all rows at a time",ours,"ours counterfactual, one pass"' ;;
    5) bench 5 120 profile --select "$profile" ;;
    6) bench 6 240 kernels --select attention --seconds 5 ;;
    # shellcheck disable=SC2086
    7) run 7 300 "$PY" -m pytest -n "$jobs" -vv $tests -k "not aot and not wgmma" ;;
    *) echo "steps are 1 to 7, got $1" >&2; exit 2 ;;
  esac
}

[ $# -gt 0 ] || set -- 1 2 3 4 5 6 7
for one in "$@"; do step "$one"; done
[ ${#failed[@]} -eq 0 ] || { echo "failed: ${failed[*]}" >&2; exit 1; }
