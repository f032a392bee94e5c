# machine.sh - what every machine of a few namespaces has mounted, and how systemd starts in it. Sourced.
#
# The folder that one is in becomes the root; it has the folders proc, sys, dev, run, tmp and old. Nothing outside of the
# namespaces is changed: the kernel's settings are read-only, devices are the host's own few, the rest is in memory.

# The host's python3 brings loopback up (SIOCSIFFLAGS with IFF_UP), also where there is no ip(8).
machine_mounts() {
    local node
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
    python3 -c 'import fcntl, socket, struct; fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sh14x", b"lo", 1))'
}

# machine_enter plain|systemd: systemd has control groups
machine_enter() {
    [ "$1" = plain ] || mount -t cgroup2 cgroup2 sys/fs/cgroup
    pivot_root . old # a chroot could make no user namespaces
    umount -l /old
    rmdir /old
}

# machine_systemd UNIT-PATH: in the place of this shell
machine_systemd() {
    mount --make-rshared / # credentials come from the manager to a service through this
    export container=private SYSTEMD_UNIT_PATH=$1
    exec /lib/systemd/systemd --system --unit=default.target --log-target=null --show-status=0
}
