#!/usr/bin/env bash
# The first hour on a GPU, in the order in which it pays: each command ends within nine minutes and leaves what it
# measured in one result file, and each step says what was predicted and then what was found.
#
#   benchmarks/first_hour.sh           every step; stops where the first light is wrong
#   benchmarks/first_hour.sh 3 5       some of them
#   DRY=1 benchmarks/first_hour.sh     print the commands only
#
# PY: the interpreter (python3; no virtual environment is needed). R: the result file. COMMIT: what to record where
# there is no .git. PROCESSES: of the tests (12). DEVICE: cuda or cpu.
set -u
cd "$(dirname "$0")/.."

PY=${PY:-python3}
R=${R:-benchmarks/results/first-hour.json}
PROCESSES=${PROCESSES:-12}
DEVICE=${DEVICE:-cuda}
failed=()

run() {
  if [ -n "${DRY:-}" ]; then
    printf '%q ' "$@"
    printf '\n'
    return 0
  fi
  printf '$'
  printf ' %q' "$@"
  printf '\n'
  PYTHONPATH=$PWD "$@" && return
  local status=$?
  failed+=("step $step: status $status")
  return $status
}

# SIGTERM makes the benchmarks keep what they have; what is deaf to it is killed.
bench() {
  run timeout --kill-after=25 510 "$PY" -m benchmarks --device "$DEVICE" --into "$R" --limit 480 \
    ${COMMIT:+--commit "$COMMIT"} "$@"
}

tests() {
  bench --only tests -n "$PROCESSES" --timeout 120 "$@"
}

versions() {
  run timeout 60 nvidia-smi
  run timeout 120 "$PY" -c 'import sys, torch, triton, transformers; print(sys.version.split()[0], torch.__version__, triton.__version__, transformers.__version__, torch.version.cuda)'
}

step_peers='TRL,"TRL, fastest micro-batch",varlen without sharing,ours,"ours counterfactual, fused loss","ours counterfactual, one pass"'

step_1() { versions; bench --only first-light; }
step_2() { tests --tests tests/ops --select "not aot and not mutations and not wgmma"; }
step_3() {
  tests --tests tests/scoring --tests tests/hf/test_verify.py --tests tests/hf/test_liger.py \
    --tests tests/test_host_waits.py
}
step_4() {
  bench --only kernels --seconds 20 --select "not backward"
  bench --only kernels --seconds 20 --select "backward"
}
step_5() {
  bench --only step --select "1.7B and LoRA and mixed" --rounds 3 --seconds 30 --no-sampling --peers "$step_peers"
}
step_6() { bench --only profile --select "1.7B and LoRA and mixed"; }
step_7() {
  bench --only loss --select "8k and frozen" --seconds 20
  bench --only loss --select "8k and trains" --seconds 20
  bench --only loss --select "from_logits and 8k" --seconds 20
}
step_8() {
  bench --only scoring --select "1.7B and gsm8k" --rounds 3 --seconds 60 \
    --peers "per span,per span with logits_to_keep,best padded batch with logits_to_keep,KV reuse,ours"
}
step_9() {
  bench --only step --select "1.7B and LoRA and they" --rounds 3 --seconds 30 --no-sampling --peers "$step_peers"
  bench --only step --select "512" --rounds 3 --seconds 30 --no-sampling --peers "$step_peers"
  bench --only step --select "2.5 and LoRA and mixed" --rounds 3 --seconds 30 --no-sampling --peers "$step_peers"
  bench --only step --select "Llama and LoRA and mixed" --rounds 3 --seconds 30 --no-sampling --peers "$step_peers"
  bench --only host --seconds 20
  bench --only sweeps --seconds 60 --rounds 3
}

[ $# -gt 0 ] || set -- 1 2 3 4 5 6 7 8 9
for step in "$@"; do
  case $step in
    [1-9]) ;;
    *) echo "steps are 1 to 9, got $step" >&2; exit 2 ;;
  esac
done
for step in "$@"; do
  run timeout 60 "$PY" -m benchmarks.first_hour "$step"
  "step_$step"
  result=$?
  run timeout 60 "$PY" -m benchmarks.first_hour "$step" "$R"
  if [ "$step" = 1 ] && [ $result -ne 0 ] && [ $# -gt 1 ]; then
    echo "the first light is wrong: nothing else is worth measuring" >&2
    break
  fi
done
[ ${#failed[@]} -eq 0 ] || { printf '%s\n' "${failed[@]}" >&2; exit 1; }
