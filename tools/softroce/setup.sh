#!/bin/bash
# setup.sh [--force]: prepares this machine for run.sh and run2.sh.
#
# Installs the apt packages that are missing, then puts a guest kernel and a
# small initramfs into a cache folder ($SOFTROCE_CACHE, or ~/.cache/softroce).
# Does nothing when that is done already; --force fetches the newest kernel and
# builds again. The kernel is unpacked into the cache only, never installed.
# Exit status: 77 where QEMU or the kernel cannot be had (the reason is printed).
set -euo pipefail
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/common.sh"

PATH=$PATH:/usr/sbin:/sbin # depmod and modprobe

say() { printf 'softroce setup: %s\n' "$*"; }
die() { say "$*" >&2; exit 1; }
cannot() { say "cannot be had here: $*" >&2; exit 77; }

force=0
case ${1-} in
  '') ;;
  --force) force=1 ;;
  *) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"; exit 2 ;;
esac
[[ $(dpkg --print-architecture 2>/dev/null) == amd64 ]] || cannot "this needs Debian on amd64"

# One setup at a time; files are put into the cache when complete.
mkdir -p "$cache"
exec 9>"$cache/lock"
flock 9

# 1. Packages of the host. The guest uses the host's own files, so the verbs
#    library and its rxe driver (ibverbs-providers) must be on the host too.
packages=(qemu-system-x86 libibverbs-dev ibverbs-providers ibverbs-utils python3-pyverbs iproute2 kmod cpio xz-utils)
command -v cc >/dev/null || packages+=(gcc libc6-dev) # for selftest.sh
missing=()
for p in "${packages[@]}"; do
  [[ $(dpkg-query -W -f '${db:Status-Status}' "$p" 2>/dev/null) == installed ]] || missing+=("$p")
done
if ((${#missing[@]})); then
  ((EUID == 0)) || cannot "only root can install the packages: apt-get update && apt-get install --no-install-recommends ${missing[*]}"
  say "installing ${missing[*]}"
  apt-get update -qq || cannot "apt-get update failed"
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq -o DPkg::Lock::Timeout=300 --no-install-recommends "${missing[@]}" >/dev/null ||
    cannot "apt-get install failed: ${missing[*]}"
fi

# 2. The cache.
if ((!force)) && [[ -s $cache/kernel && -s $cache/initramfs && -r $cache/stamp && $(<"$cache/stamp") == "$(stamp)" ]]; then
  say "nothing to do: packages and $cache ($(<"$cache/version")) are ready"
  exit 0
fi
work=$(mktemp -d "$cache/build.XXXXXX")
trap 'rm -rf "$work"' EXIT
cd "$work"

# linux-image-amd64 only depends on the kernel of the day. The "cloud" kernel would lack rdma_rxe and 9p.
kernel_package() { apt-cache depends linux-image-amd64 2>/dev/null | awk '$1 == "Depends:" && /linux-image-[0-9]/ {print $2; exit}'; }
package=$(kernel_package)
if [[ -z $package ]] || ((force && EUID == 0)); then
  ((EUID == 0)) || cannot "no package lists: run apt-get update as root"
  apt-get update -qq || cannot "apt-get update failed"
  package=$(kernel_package)
fi
[[ $package ]] || cannot "apt knows no kernel package behind linux-image-amd64"

say "downloading $package and busybox-static (about 70 MB)"
apt-get download -qq -o APT::Sandbox::User=root "$package" busybox-static || cannot "the download of $package failed"
for deb in ./*.deb; do dpkg-deb -x "$deb" root; done
version=$(basename root/lib/modules/*)
image=root/boot/vmlinuz-$version
[[ -s $image ]] || die "no kernel image in $package"

# Unpacking the kernel inside the emulated machine would cost 6 s at each start,
# so do it now. Sizes and offsets: the kernel's x86 boot protocol.
field() { od -An -t "u$2" -j "$1" -N "$2" "$image" | tr -d ' '; }
start=$((($(field 497 1) + 1) * 512 + $(field 584 4)))
if dd if="$image" bs=1M iflag=skip_bytes,count_bytes skip="$start" count="$(field 588 4)" status=none |
  xz -dc --single-stream >kernel 2>/dev/null && [[ $(head -c 4 kernel) == $'\x7fELF' ]]; then
  say "unpacked the kernel image"
else
  say "kernel image is not xz: leaving it packed, starts will be slower"
  cp "$image" kernel
fi

# 3. The initramfs: busybox, guest/init, guest/stage2.sh and the kernel modules
#    in the order in which to load them. It holds no path of this machine.
say "building the initramfs for $version"
depmod -b root "$version"
mkdir -p ram/{bin,proc,sys,dev,lower,upper,new,mods}
cp root/bin/busybox ram/bin/
cp "$here/guest/init" "$here/guest/stage2.sh" ram/
chmod 755 ram/init
wanted=(virtio_pci 9pnet_virtio 9p overlay virtio_net crc32_generic rdma_rxe ib_uverbs rdma_ucm)
for m in "${wanted[@]}"; do # set -o pipefail ends the script on die
  modprobe -d "$PWD/root" -S "$version" --show-depends "$m" || die "kernel $version has no module $m"
done | awk '$1 == "insmod" && !seen[$2]++ {print $2}' >list
while read -r path; do
  name=$(basename "$path")
  case $name in
    *.ko) cp "$path" ram/mods/ ;;
    *.ko.xz) name=${name%.xz}; xz -dc "$path" >"ram/mods/$name" ;;
    *) die "cannot unpack module $name" ;;
  esac
  echo "$name" >>ram/mods/order
done <list
(cd ram && find . | cpio -o -H newc -R 0:0 --quiet | gzip -1) >initramfs

rm -f "$cache/stamp"
mv kernel "$cache/kernel"
mv initramfs "$cache/initramfs"
echo "$version" >"$cache/version"
stamp >"$cache/stamp"
say "done: $cache ($(du -sh --exclude='build.*' "$cache" | cut -f1))"
