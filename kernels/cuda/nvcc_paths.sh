#!/bin/sh
# Prints the include folder and the library folder of the toolkit that an nvcc belongs to, one a
# line, as nvcc itself would pass them on. Usage: nvcc_paths.sh NVCC
set -e
plan=$("$1" --dryrun -x cu -c /dev/null -o /dev/null 2>&1)
echo "$plan" | sed -n 's/^#\$ INCLUDES="-I\([^"]*\)".*/\1/p' | head -n 1
echo "$plan" | sed -n 's/^#\$ LIBRARIES=.*"-L\([^"]*\)" *$/\1/p' | head -n 1
