# boot_root.sh - systemd, or one script alone, as the first process of a machine whose root is a folder.
#
# usage: unshare --fork --pid --mount --uts --ipc --net --cgroup --kill-child bash boot_root.sh ROOT FILES systemd|plain
#
# ROOT is a whole system, which is written to. FILES is seen as /files: /files/check.sh runs once, and what it says is
# in /files/said. With systemd, the units of FILES/units come before the system's own, so that only they are started.
# Nothing outside of the namespaces but ROOT and FILES is changed.
set -eu
. "$(dirname "$0")/../support/machine.sh"
root=$1 files=$2 how=$3

mount --make-rprivate /
mount --bind "$root" "$root"
cd "$root"
mkdir -p files old
mount --bind "$files" files
machine_mounts
machine_enter "$how"
if [ "$how" = plain ]; then
    exec /bin/bash /files/check.sh >/files/said 2>&1
fi
machine_systemd /files/units:/etc/systemd/system:/lib/systemd/system
