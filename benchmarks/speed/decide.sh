#!/usr/bin/env bash
# decide.sh OUT [OPTION...]: the races whose figures decide what is built next, in at most 530 s of a GPU.
#
# Result files, what each race printed, and predictions.txt with the decisions are written into OUT. OPTIONs go to every
# race (--commit ABC; --device cpu --smoke --rounds 1 tries them all). ANSWERS=1 runs the race of long answers instead,
# in at most 150 s. PYTHON is the interpreter, by default python3. WHEELS is a folder of wheels to install first into a
# folder of their own, for a machine without a network.
set -u
out=$(mkdir -p "$1" && cd "$1" && pwd) || exit 2
shift
cd "$(dirname "$0")/../.." || exit 2
python=${PYTHON:-python3}
export PYTHONUNBUFFERED=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
if [ -n "${WHEELS:-}" ]; then
  site=$(mktemp -d)
  "$python" -m pip install -q --no-index --no-deps --no-compile --target "$site" "$WHEELS"/*.whl || exit 2
  export PYTHONPATH=$PYTHONPATH:$site
fi

race() { # SECONDS FILE BLOCKS ROUNDS [OPTION...]
  local seconds=$1 file=$2 blocks=$3 rounds=$4
  shift 4
  timeout "$seconds" "$python" -m benchmarks speed ab --into "$out/$file.json" --budget $((seconds - 10)) \
    --blocks "$blocks" --rounds "$rounds" "$@" >"$out/$file.txt" 2>&1 || failed=1
  tail -n 40 "$out/$file.txt"
}

failed=0
if [ -n "${ANSWERS:-}" ]; then
  race 150 answers answers 4 "$@"
else
  race 160 python trl,profile 7 "$@"
  TORCHINDUCTOR_CPP_WRAPPER=1 race 150 cpp trl 5 "$@"
  race 130 trainer trainer 5 "$@"
  race 90 long long 3 "$@"
fi
"$python" -m benchmarks.speed.predictions "$out"/*.json | tee "$out/predictions.txt"
exit $failed
