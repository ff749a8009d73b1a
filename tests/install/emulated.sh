#!/bin/sh
# Run a command in which programs of arm64 start by themselves, under QEMU. Called by unshare in a user and mount namespace: the kernel
# keeps formats per user namespace, so the machine does not learn this one.
set -eu
mount -t binfmt_misc none /proc/sys/fs/binfmt_misc
magic='\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00'
mask='\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff'
printf '%s' ":arm64:M::$magic:$mask:$(command -v qemu-aarch64-static):F" > /proc/sys/fs/binfmt_misc/register
exec "$@"
