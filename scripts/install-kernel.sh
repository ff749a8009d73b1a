#!/usr/bin/env bash
# Unpack a kernel for virtual machines: the distribution's kernel for clouds, from its own package, checked by apt as every package is.
# It is not installed, and this machine never starts it. Best effort: without one `atoll doctor` says that microvm has no kernel.
# ATOLL_KERNEL_TARGET is the directory (default: /usr/local/lib/atoll/kernel).
set -uo pipefail
target=${ATOLL_KERNEL_TARGET:-/usr/local/lib/atoll/kernel}
say() { echo "kernel for microvm: $*" >&2; }

compgen -G "$target/boot/vmlinuz-*" >/dev/null && exit 0
[ "$(id -u)" = 0 ] || { say "run this as root to have one"; exit 0; }
[ "$(uname -m)" = x86_64 ] || { say "there is none for $(uname -m)"; exit 0; }
command -v apt-get >/dev/null 2>&1 || { say "no apt-get here: one in /boot with virtio, erofs and overlay will do"; exit 0; }

work=$(mktemp -d) || exit 0
trap 'rm -rf "$work"' EXIT
package=$(apt-cache depends linux-image-cloud-amd64 2>/dev/null | sed -n 's/^ *Depends: \(linux-image-[0-9].*\)/\1/p' | head -1)
[ -n "$package" ] || package=linux-image-virtual # Ubuntu
cd "$work" && apt-get -qq -o APT::Sandbox::User=root download "$package" >/dev/null 2>&1 || { say "$package cannot be had here"; exit 0; }
dpkg-deb -x ./*.deb "$work/x" || exit 0
mkdir -p "$work/new/boot" "$work/new/lib/modules"
cp "$work"/x/boot/vmlinuz-* "$work/new/boot/" || { say "$package has no kernel in it"; exit 0; }
# Debian of today has /usr/lib in its packages.
for modules in "$work"/x/lib/modules/* "$work"/x/usr/lib/modules/*; do
  [ -d "$modules/kernel" ] && cp -r "$modules" "$work/new/lib/modules/"
done
mkdir -p "${target%/*}" && rm -rf "$target.new" && cp -r "$work/new" "$target.new" && rm -rf "$target" && mv "$target.new" "$target" \
  && say "unpacked $package in $target"
exit 0
