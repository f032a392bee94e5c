#!/bin/bash
# What a GPU has to tell about this tree, in order of value and within minutes: kernels against the reference, starts,
# every bundled checkpoint over HTTP, rounds that share and hold rows, oracles, sanitizers, then what it all costs.
#
# usage: session.sh BINARIES [OUTPUT_FOLDER] [--backend cuda|cpu] [--minutes 9] [--only PART]
#   BINARIES is a build folder or an archive of pack.sh. One line a step: PASS, FAIL, SKIP, its seconds. It goes on
#   after a failure; what does not fit into the minutes is skipped. OUTPUT_FOLDER (default: a new one, kept) gets
#   summary.txt, logs.tgz and *.json. --backend cpu runs what a processor can run, to try the script itself; --only
#   runs the steps whose name holds PART. Exit 1 when a step failed, 77 without a device.
# Needs python3 with numpy and yaml, for the attention's own checks torch. Prepare and run on a machine without packages:
#   tests/gpu/pack.sh build-cuda .carry/pack.tar.xz; then there: bash tests/gpu/session.sh .carry/pack.tar.xz "$OUT"
set -uo pipefail

backend=cuda minutes=9 only= names=()
while [ $# -gt 0 ]; do
    case $1 in
    --backend) backend=$2 && shift 2 ;;
    --minutes) minutes=$2 && shift 2 ;;
    --only) only=$2 && shift 2 ;;
    *) names+=("$1") && shift ;;
    esac
done
here=$(cd -- "$(dirname -- "$0")" && pwd)
source=$(cd -- "$here/../.." && pwd)
binaries=$(realpath -- "${names[0]}")
out=${names[1]:-$(mktemp -d)}
mkdir -p "$out"
out=$(realpath -- "$out")
logs=$(mktemp -d)
end=$((SECONDS + minutes * 60))
failed=0
if [ -f "$binaries" ]; then
    mkdir "$logs/.unpacked"
    tar -C "$logs/.unpacked" -xf "$binaries" || exit 1
    binaries=$logs/.unpacked
fi
export PYTHONPATH=$binaries/python${PYTHONPATH:+:$PYTHONPATH} PYTHONDONTWRITEBYTECODE=1
export TREEVERIFY_CUDA_LIB=$binaries/kernels/cuda/libtreeverify-cuda.so
daemon=$binaries/daemon/treeverifyd client=$binaries/clients/cli/treeverify
check=$binaries/tests/check/checkkern attn=$binaries/tests/kdtr/test_verify_attn
models=$source/tests/models configs=$source/tests/bench/configs text=$source/tests/golden/kjv_tail.txt
big=$models/kjv-mla-8m
# programs without the line of shell in front of them, for tools
plain=() bare_daemon=$daemon bare_check=$check
if [ -d "$binaries/bin" ]; then
    plain=(env "LD_LIBRARY_PATH=$binaries/lib") bare_daemon=$binaries/bin/treeverifyd bare_check=$binaries/bin/checkkern
fi
# what the black-box tests read: every daemon of theirs runs on this backend
export TREEVERIFYD=$daemon TREEVERIFYD_PLANTED=$binaries/tests/support/treeverifyd-planted TREEVERIFY=$client TV_MODEL_DIR=$big TV_GOLDEN_DIR=$source/tests/golden TV_SANITIZE=none
export TREEVERIFY_BACKEND=$backend TREEVERIFY_PAGES=2048

say() {
    echo "$*" | tee -a "$out/summary.txt"
}

# step NAME SECONDS COMMAND...: its log to logs/NAME.log, one line to the summary
step() {
    local name=$1 limit=$2 began=$SECONDS code=0
    shift 2
    [[ $name == *"$only"* ]] || return 0
    [ $((end - SECONDS)) -ge "$limit" ] || limit=$((end - SECONDS))
    if [ "$limit" -lt 5 ]; then
        say "SKIP $name: no time left"
        return 0
    fi
    timeout -k 5 "$limit" "$@" > "$logs/$name.log" 2>&1 || code=$?
    case $code in
    0) say "PASS $name $((SECONDS - began)) s: $(tail -n 1 "$logs/$name.log" | cut -c1-120)" ;;
    77) say "SKIP $name: needs what is not here" ;;
    124 | 137) say "FAIL $name: over $limit s" && failed=1 ;;
    *) say "FAIL $name ($code) $((SECONDS - began)) s: $(grep -v '^ok ' "$logs/$name.log" | tail -n 1 | cut -c1-160)" && failed=1 ;;
    esac
}

# cuda_step: one that the other backend has no part in
cuda_step() {
    [ "$backend" != cuda ] || step "$@"
}

# start [OPTION...]: a start with these, until it listens, and an orderly stop; prints what it said of the device
start() {
    local log=$logs/.start pid line
    "$daemon" --model "$big" --listen 127.0.0.1:0 --backend "$backend" "$@" > "$log" 2> "$log.err" &
    pid=$!
    for _ in $(seq 1200); do
        line=$(head -n 1 "$log")
        [ -z "$line" ] && kill -0 "$pid" 2> /dev/null || break
        sleep 0.05
    done
    [ -z "$line" ] || kill -TERM "$pid"
    wait "$pid"
    local code=$?
    cat "$log.err"
    echo "${line:-no start}, exit $code; $(grep -h 'device memory\|pages of' "$log.err" | tail -n 1)"
    [ -n "$line" ] && [ $code -eq 0 ]
}
export -f start
export logs daemon big backend

"$check" --backend "$backend" --only synthesize > "$logs/.probe" 2>&1
[ $? -ne 77 ] || { cat "$logs/.probe" && say "no device" && exit 77; }
nvidia-smi > "$logs/nvidia-smi.log" 2>&1 || true
say "$(date -u +%FT%TZ) backend $backend, $minutes minutes, $("$daemon" --version)"

# --- does it start, and is it right
step slots 60 "$check" --backend "$backend" --seed 1
cuda_step slots_maps_refused 60 "$check" --backend cuda --seed 2 --refuse-maps
step start_bf16 40 bash -c 'start --kv-dtype bf16'
cuda_step start_products 40 bash -c 'start --products bf16'
step start_f32 40 bash -c 'start --kv-dtype f32'
cuda_step start_all_pages 60 env -u TREEVERIFY_PAGES bash -c start
cuda_step start_share 60 env -u TREEVERIFY_PAGES bash -c 'start --pages-share 0.25'
step refs_bf16 60 python3 "$source/tests/parity/refs.py" "$daemon" "$models" --backend "$backend" --kv-dtype bf16 --page-sizes 64
cuda_step refs_products 60 python3 "$source/tests/parity/refs.py" "$daemon" "$models" --backend "$backend" --kv-dtype bf16 --products bf16 \
    --page-sizes 64
step refs_f32 60 python3 "$source/tests/parity/refs.py" "$daemon" "$models" --backend "$backend" --page-sizes 64
for dtype in bf16 f32; do
    step "rounds_$dtype" 40 python3 "$here/rounds.py" "$daemon" "$big" --backend "$backend" --kv-dtype $dtype
    step "batch_$dtype" 60 python3 "$source/tests/parity/batch.py" "$daemon" "$big" --backend "$backend" --kv-dtype $dtype --each 4 \
        --launch $([ "$backend" = cuda ] && echo 9 || echo 2)
done
cuda_step trees 150 python3 "$source/tests/parity/trees.py" "$daemon" "$models" --backend cuda --count 2000
step draft_rules 60 python3 "$source/tests/parity/draft_rules.py" "$daemon" "$big" "$text" --rounds 4 --backend "$backend"
for test in prefix rules model variants synthetic; do
    step "http_$test" 60 python3 "$source/tests/http/test_$test.py"
done
step http_hidden 60 env TREEVERIFY_KV_DTYPE=f32 python3 "$source/tests/http/test_hidden.py"
step http_planted 60 python3 "$source/tests/http/test_planted.py"
# random calls, each to a CPU's daemon as well; a router that cannot decide costs an oracle's time
step differential 110 python3 "$source/tests/parity/differential.py" "$daemon" "$models" --backend "$backend" --seconds 50
for dtype in bf16 f32; do
    step "lossless_$dtype" 90 env TV_TEST_SCALE=$([ "$backend" = cuda ] && echo 1 || echo 0.1) python3 "$source/tests/parity/lossless.py" "$daemon" \
        "$big" "$text" --backend "$backend" --kv-dtype $dtype
done

# --- bad accesses, end to end
memcheck() {
    cuda_step "memcheck_$1" 90 python3 "$here/sanitized.py" "$bare_daemon" "$client" "$models/v3" --backend cuda --kv-dtype "$1" \
        --tool "${plain[@]}" compute-sanitizer --tool memcheck --leak-check no --error-exitcode 9
}
memcheck bf16
[ "$backend" = cuda ] || step sanitized_itself 40 python3 "$here/sanitized.py" "$daemon" "$client" "$models/v3"

# --- what it costs
bench() {
    local name=$1 config=$2 contexts=$3 seconds=$4
    step "bench_$name" $((seconds + 40)) python3 "$source/tests/bench/bench_daemon.py" "$daemon" "$config" --backend "$backend" \
        --contexts "$contexts" --seconds "$seconds" --json "$out/bench_$name.json"
}
if [ "$backend" = cuda ]; then
    unset TREEVERIFY_PAGES
    bench moonlight "$configs/moonlight-16b-a3b" 1024,4096,8192,32768,131072,185000 90
    bench v3 "$configs/deepseek-v3-4layers" 1024,8192 40
    bench kimi "$configs/kimi-k2-4layers" 1024,8192 40
    step shapes 60 python3 "$here/check_verify_attn.py" "$TREEVERIFY_CUDA_LIB"
    memcheck f32
    step bench_slots 60 "$check" --backend cuda --bench
    step bench_attn 60 python3 "$here/bench_verify_attn.py" "$TREEVERIFY_CUDA_LIB" --extra --json "$out/bench_attn.json"
    for part in dense experts fused prefill draw; do
        step "memcheck_$part" 60 "${plain[@]}" compute-sanitizer --tool memcheck --error-exitcode 9 "$bare_check" --backend cuda --only $part
    done
else
    bench small "$models/v3" 64,256 10
fi

rm -rf "$logs/.unpacked"
tar -C "$logs" -czf "$out/logs.tgz" .
for log in "$logs"/bench_*.log; do
    [ ! -e "$log" ] || { echo "== $(basename "$log")" && cat "$log"; }
done
say "$(grep -c '^PASS' "$out/summary.txt") passed, $(grep -c '^FAIL' "$out/summary.txt") failed, $(grep -c '^SKIP' "$out/summary.txt") skipped"
exit $failed
