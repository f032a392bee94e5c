#!/bin/sh
# Runs nvcc and keeps what it and its assembler say, the resources of every kernel included, which
# tests/gpu/check_spills.py reads. Usage: compile.sh REPORT NVCC ARGUMENT...
report=$1
shift
"$@" -Xptxas -v >"$report" 2>&1 || { status=$?; cat "$report" >&2; exit $status; }
