# boot.sh - systemd as the first process of a machine that is only a few namespaces, for one script.
#
# usage: unshare --fork --pid --mount --uts --ipc --net --cgroup --kill-child bash boot.sh ROOT UNITS FILES
#
# ROOT is an empty folder to build the new root on. UNITS has all units there are: those of the host are not seen, so
# nothing of it is started. FILES is seen as /files, and /files/check.sh runs once; what it leaves there is the result.
# Nothing outside of the namespaces is changed: /usr is read-only, the rest is in memory.
set -eu
. "$(dirname "$0")/machine.sh"
root=$1 units=$2 files=$3

mount --make-rprivate /
mount -t tmpfs -o mode=755,size=64m tmpfs "$root"
cd "$root"
mkdir -p usr etc/systemd proc sys dev run tmp var/lib root files old
for folder in bin sbin lib lib64; do
    ln -s "usr/$folder" "$folder"
done
mount --bind /usr usr
mount -o remount,bind,ro usr
mount --bind "$files" files
cp -r "$units" etc/systemd/system
cp /etc/ld.so.cache etc/
printf 'root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534::/:/usr/sbin/nologin\n' >etc/passwd
printf 'root:x:0:\nnogroup:x:65534:\n' >etc/group
printf 'passwd: files systemd\ngroup: files systemd\n' >etc/nsswitch.conf
printf '0123456789abcdef0123456789abcdef\n' >etc/machine-id
touch etc/os-release

machine_mounts
machine_enter systemd
machine_systemd /etc/systemd/system
