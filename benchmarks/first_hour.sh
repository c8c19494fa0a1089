#!/usr/bin/env bash
# The first hour on a GPU, in the order in which it pays. Each step is one command that ends within nine minutes and
# leaves what it measured and printed in the folder R; a step that fails does not stop the others.
#
#   benchmarks/first_hour.sh           every step
#   benchmarks/first_hour.sh 4a 5      some of them, one after the other
#   DRY=1 benchmarks/first_hour.sh     print the commands only
#
# R: folder of the results (benchmarks/results/first-hour). PY: the interpreter (python3). DEVICE: cuda or cpu. COMMIT:
# what to record where there is no .git. SMOKE=1: smallest shapes, which show that all runs.
set -u
cd "$(dirname "$0")/.."
R=${R:-benchmarks/results/first-hour}
PY=${PY:-python3}
DEVICE=${DEVICE:-cuda}
SMOKE=${SMOKE:-}
size="1.7B and LoRA and 220"
[ -z "$SMOKE" ] || size=""
failed=()

bench() { # STEP PART [OPTIONS]
  local part=$2 file="$R/$1.json"
  run "$1" "$PY" -m benchmarks speed --device "$DEVICE" --only "$part" --into "$file" ${COMMIT:+--commit "$COMMIT"} \
    ${SMOKE:+--smoke} "${@:3}"
}

run() { # STEP COMMAND
  if [ -n "${DRY:-}" ]; then printf '%q ' timeout --kill-after=20 510 "${@:2}"; echo; return; fi
  mkdir -p "$R"
  timeout --kill-after=20 510 env PYTHONPATH="$PWD" "${@:2}" 2>&1 | tee "$R/$1.log"
  [ "${PIPESTATUS[0]}" -eq 0 ] || failed+=("$1")
}

step() {
  case $1 in
    1) bench 1 first-light ;;
    2) bench 2 rollouts --seconds 20 ;;
    3) run 3 "$PY" -m trainer --device="$DEVICE" --max_steps=4 --output_dir="$R/demo" ;;
    4a) bench 4a step --select "$size" --seconds 30 ;;
    4b) bench 4b profile --select "$size" ;;
    5) bench 5 kernels --seconds 20 ;;
    6) bench 6 loss --seconds 10 ;;
    7) bench 7 scoring --seconds 30 --rounds 3 ;;
    8) run 8 "$PY" -m pytest -n 12 tests/ops tests/scoring -k "not aot and not wgmma" ;;
    *) echo "steps are 1 2 3 4a 4b 5 6 7 8, got $1" >&2; exit 2 ;;
  esac
}

[ $# -gt 0 ] || set -- 1 2 3 4a 4b 5 6 7 8
for one in "$@"; do step "$one"; done
[ ${#failed[@]} -eq 0 ] || { echo "failed: ${failed[*]}" >&2; exit 1; }
