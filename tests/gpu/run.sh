#!/bin/bash
# Verify attention on a GPU, from the installed library's example to the peers, in one command and about five minutes:
# bundles, shapes, properties, every slot, sanitizers over the whole matrix, then the times.
#
# usage: run.sh BINARIES [OUTPUT_FOLDER] [--peers FOLDER] [--only PART] [--seconds N]
#   BINARIES is a build folder or an archive of pack.sh. One line a step: PASS, FAIL or SKIP, its seconds, what it ended
#   with. It goes on after a failure. OUTPUT_FOLDER (default: a new one, kept) gets summary.txt, a log for each step and
#   bench.json. --peers: libraries as tests/check/peer.h describes them and peers.py of bench_verify_attn.py; without it
#   their columns are published figures. --only runs the steps whose name the expression PART matches; --seconds (default 480)
#   end it all.
# Needs python3 with torch and numpy, and compute-sanitizer; exit 77 without a device.
set -uo pipefail

only='' peers='' seconds=480 names=()
while [ $# -gt 0 ]; do
    case $1 in
    --peers) peers=$(realpath -- "$2") && shift 2 ;;
    --only) only=$2 && shift 2 ;;
    --seconds) seconds=$2 && shift 2 ;;
    *) names+=("$1") && shift ;;
    esac
done
here=$(cd -- "$(dirname -- "$0")" && pwd)
source=$(cd -- "$here/../.." && pwd)
binaries=$(realpath -- "${names[0]}")
out=${names[1]:-$(mktemp -d)}
mkdir -p "$out"
out=$(realpath -- "$out")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
end=$((SECONDS + seconds))
failed=0
python3 -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else 77)' || exit 77

# programs and what was installed; bare: the program that a tool starts, without the line of shell that finds libraries
libraries=()
if [ -f "$binaries" ]; then
    tar -C "$work" -xf "$binaries" || exit 1
    usr=$work/usr attn=$work/tests/kdtr/test_verify_attn check=$work/tests/check/checkkern
    bare=$work/bin/test_verify_attn libraries=(--libraries "$work/lib")
else
    DESTDIR=$work/stage meson install -C "$binaries" --quiet --no-rebuild || exit 1
    usr=$(find "$work/stage" -name cuda.h | sed 's,/include/.*,,')
    attn=$usr/bin/test_verify_attn bare=$attn check=$binaries/tests/check/checkkern
fi
TREEVERIFY_CUDA_LIB=$(find "$usr" -type f -name 'libtreeverify-cuda.so*')
export TREEVERIFY_CUDA_LIB PYTHONDONTWRITEBYTECODE=1 OPENBLAS_NUM_THREADS=1
installed=$(dirname "$(find "$usr" -name 'libtreeverify-cuda.so.0')")

say() {
    echo "$*" | tee -a "$out/summary.txt"
}

# step NAME SECONDS COMMAND...: its log to NAME.log, one line to the summary
step() {
    local name=$1 limit=$2 began=$SECONDS code=0
    shift 2
    [[ $name =~ $only ]] || return 0
    [ $((end - SECONDS)) -ge "$limit" ] || limit=$((end - SECONDS))
    if [ "$limit" -lt 3 ]; then
        say "SKIP $name: no time left"
        failed=1
        return 0
    fi
    timeout -k 5 "$limit" "$@" > "$out/$name.log" 2>&1 || code=$?
    case $code in
    0) say "PASS $name $((SECONDS - began)) s: $(tail -n 1 "$out/$name.log" | cut -c1-150)" ;;
    124 | 137) say "FAIL $name: over $limit s" && failed=1 ;;
    *)
        local why
        why=$(grep -a FAIL "$out/$name.log" | tail -n 1)
        say "FAIL $name ($code) $((SECONDS - began)) s: $(echo "${why:-$(tail -n 1 "$out/$name.log")}" | cut -c1-150)"
        failed=1
        ;;
    esac
}

# one library, one command: the naive form over all bundles and, when it passed, the flash form
bundles() {
    TV_VERIFY_ATTN=$attn TV_KDTR_GEN=$source/tests/gen_verify_attn_refs.py PYTHON=python3 \
        TV_KDTR_GEN_ARGS="--big --jobs $(nproc)" "$source/tests/kdtr/treeverify-kdtr" "$work/kdtr" -- --backend cuda
    local code=$?
    echo "$(grep -c '^PASS .naive' "$out/bundles.log") naive, $(grep -c '^PASS .flash' "$out/bundles.log") flash of $(wc -l < "$work/kdtr/names")"
    return "$code"
}

# every_split FILE...: the flash form, split as it likes and as it is told
every_split() {
    local splits each=() code=0 logs
    logs=$(mktemp -d -p "$work")
    for splits in 0 1 2 3 7 16 64; do
        "$attn" "$@" --backend cuda --flash --splits "$splits" > "$logs/$splits" 2>&1 &
        each+=($!)
    done
    for splits in "${each[@]}"; do
        wait "$splits" || code=1
    done
    cat "$logs"/*
    echo "$(cat "$logs"/* | grep -c '^PASS') of $((7 * $#))"
    return "$code"
}

slots() {
    local seed each=() code=0
    for seed in 1 2 3 4; do
        "$check" --backend cuda --seed "$seed" > "$out/slots_$seed.log" 2>&1 &
        each+=($!)
    done
    for seed in "${each[@]}"; do
        wait "$seed" || code=1
    done
    cat "$out"/slots_*.log
    echo "$(cat "$out"/slots_*.log | grep -c '^PASS') parts of 4 seeds"
    return "$code"
}

export -f bundles every_split slots
export attn check work out source

nvidia-smi > "$out/nvidia-smi.log" 2>&1
say "$(date -u +%FT%TZ) $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2> /dev/null)"

step images 10 python3 "$here/check_images.py" "$TREEVERIFY_CUDA_LIB" 120 "$(ls "$source"/kernels/cuda/*_sm90.cu | wc -l)" 90 120
step example 60 env LD_LIBRARY_PATH="$installed" python3 "$usr/share/treeverify/examples/example_torch.py"
step bundles 120 bash -c bundles
step splits 120 bash -c 'every_split "$work"/kdtr/*.kdtr'
step shapes 90 python3 "$here/check_verify_attn.py" "$TREEVERIFY_CUDA_LIB"
# where the device has a kernel of its own, the one that runs everywhere must hold as well
portable=(env TREEVERIFY_CUDA_PORTABLE=1)
step splits_portable 120 "${portable[@]}" bash -c 'every_split "$work"/kdtr/*_bf16.kdtr'
step shapes_portable 90 "${portable[@]}" python3 "$here/check_verify_attn.py" "$TREEVERIFY_CUDA_LIB"
step slots 60 bash -c slots
left=$((end - SECONDS - 5))
step sanitizers 300 python3 "$here/sanitize.py" "$bare" "$work/kdtr" --seconds $((left < 290 ? left : 290)) --log "$out/found" "${libraries[@]}"
step bench_slots 120 "$check" --backend cuda --bench ${peers:+--peers "$peers"}
step bench 120 python3 "$here/bench_verify_attn.py" "$TREEVERIFY_CUDA_LIB" --extra --json "$out/bench.json" ${peers:+--peers "$peers"}
cat "$out"/bench_slots.log "$out"/bench.log 2> /dev/null
say "$(grep -c '^PASS' "$out/summary.txt") passed, $(grep -c '^FAIL' "$out/summary.txt") failed, $(grep -c '^SKIP' "$out/summary.txt") skipped"
exit $failed
