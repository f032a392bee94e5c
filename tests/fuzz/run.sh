#!/usr/bin/env bash
# run.sh - one libFuzzer target for TV_FUZZ_SECONDS (60), from its corpus, which it leaves as it is.
#
# usage: run.sh PROGRAM CORPUS
# The whole corpus is run first. What it finds is in TV_FUZZ_FOUND when that is a folder (else only
# in the log, as base64), and what was new and interesting with TV_FUZZ_KEEP, for the next corpus.
set -u
program=$1 corpus=$2
seconds=${TV_FUZZ_SECONDS:-60}
# in memory where that can be had: one target writes a file for every input
work=$(mktemp -d -p /dev/shm 2>/dev/null || mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/new" "$work/found"
export ASAN_OPTIONS="${ASAN_OPTIONS:-detect_leaks=1}:allocator_may_return_null=1"
export TMPDIR="$work"
# a finding's own exit code is 77, which would be a skipped test
"$program" -max_total_time="$seconds" -timeout=30 -rss_limit_mb=1024 -max_len=4096 -print_final_stats=1 -error_exitcode=1 \
    -verbosity="${TV_FUZZ_VERBOSITY:-1}" -artifact_prefix="$work/found/" "$work/new" "$corpus" \
    >"$work/log" 2>&1
code=$?
grep -E "^stat::number_of_executed|DONE|INITED|^#.*cov:" "$work/log" | tail -3
if [ "$code" != 0 ]; then
    tail -60 "$work/log"
    for found in "$work"/found/*; do
        [ -f "$found" ] || continue
        echo "$(basename "$found"): $(base64 -w0 "$found")"
    done
    [ -d "${TV_FUZZ_FOUND:-}" ] && cp -r "$work/found/." "$TV_FUZZ_FOUND"
fi
[ -d "${TV_FUZZ_KEEP:-}" ] && cp -r "$work/new/." "$TV_FUZZ_KEEP"
exit "$code"
