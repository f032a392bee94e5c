# boot_root.sh - systemd, or one script alone, as the first process of a machine whose root is a folder.
#
# usage: unshare --fork --pid --mount --uts --ipc --net --cgroup --kill-child bash boot_root.sh ROOT FILES systemd|plain
#
# ROOT is a whole system, which is written to. FILES is seen as /files: /files/check.sh runs once, and what it says is
# in /files/said. With systemd, the units of FILES/units come before the system's own, so that only they are started.
# Nothing outside of the namespaces but ROOT and FILES is changed: the kernel's settings are read-only.
set -eu
root=$1 files=$2 how=$3

mount --make-rprivate /
mount --bind "$root" "$root"
cd "$root"
mkdir -p files old
mount --bind "$files" files
mount -t proc proc proc
mount --bind proc/sys proc/sys
mount -o remount,bind,ro proc/sys
mount -t sysfs -o ro sysfs sys
mount -t tmpfs -o mode=755 tmpfs dev
mkdir dev/shm dev/pts
mount -t devpts -o newinstance,ptmxmode=0666 devpts dev/pts
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
for node in null zero full random urandom tty; do
    touch "dev/$node"
    mount --bind "/dev/$node" "dev/$node"
done
mount -t tmpfs -o mode=755 tmpfs run
mount -t tmpfs -o mode=1777 tmpfs tmp
# loopback up, also where there is no ip(8): SIOCSIFFLAGS with IFF_UP
python3 -c 'import fcntl, socket, struct; fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sh14x", b"lo", 1))'
[ "$how" = plain ] || mount -t cgroup2 cgroup2 sys/fs/cgroup

pivot_root . old # a chroot could make no user namespaces
umount -l /old
rmdir /old
if [ "$how" = plain ]; then
    exec /bin/bash /files/check.sh >/files/said 2>&1
fi
mount --make-rshared / # credentials come from the manager to a service through this
export container=private SYSTEMD_UNIT_PATH=/files/units:/etc/systemd/system:/lib/systemd/system
exec /lib/systemd/systemd --system --unit=default.target --log-target=null --show-status=0
