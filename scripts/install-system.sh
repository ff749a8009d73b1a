#!/usr/bin/env bash
# Install the system packages atoll needs, when this user may; otherwise print the one line to run.
# Usage: install-system.sh [run|test|bench]: what running needs, or what the tests, or the peers of the benchmark, need on top of it.
set -euo pipefail

what=${1:-run}
declare -A run_commands=(
  [runc]=runc [runsc]=runsc [nft]=nftables [mkfs.ext4]=e2fsprogs [newuidmap]=uidmap [mmdebstrap]=mmdebstrap
  [node]=nodejs [git]=git [curl]=curl [cc]=gcc [make]=make
)
declare -A test_commands=([docker-registry]=docker-registry [bwrap]=bubblewrap [npm]=npm [ip]=iproute2 [setpriv]=util-linux [strace]=strace [systemd-socket-activate]=systemd [pg_ctlcluster]=postgresql
  [qemu-system-x86_64]=qemu-system-x86 [mkfs.erofs]=erofs-utils)
declare -A bench_commands=([podman]=podman [socat]=socat [rg]=ripgrep [firejail]=firejail [systemd-nspawn]=systemd-container)

export PATH="$PATH:/usr/sbin:/sbin"
missing=()
want() { command -v "$1" >/dev/null 2>&1 || missing+=("$2"); }
for c in "${!run_commands[@]}"; do want "$c" "${run_commands[$c]}"; done
if [ "$what" = test ] || [ "$what" = bench ]; then
  for c in "${!test_commands[@]}"; do want "$c" "${test_commands[$c]}"; done
fi
if [ "$what" = bench ]; then
  for c in "${!bench_commands[@]}"; do want "$c" "${bench_commands[$c]}"; done
  /usr/bin/python3 -c 'import numpy' >/dev/null 2>&1 || missing+=(python3-numpy)
fi
/usr/bin/python3 -c 'import ensurepip, venv' >/dev/null 2>&1 || missing+=(python3-venv)
[ -e /etc/ssl/certs/ca-certificates.crt ] || [ -e /etc/pki/tls/certs/ca-bundle.crt ] || missing+=(ca-certificates)
found=""
for f in /usr/lib/*/libnftables.so.1 /usr/lib64/libnftables.so.1 /usr/lib/libnftables.so.1; do [ -e "$f" ] && found=yes; done
[ -n "$found" ] || missing+=(libnftables1)
if ! command -v cargo >/dev/null 2>&1 && [ ! -x "$HOME/.cargo/bin/cargo" ]; then missing+=(cargo); fi

# TypeScript snippets need tsx, unless Node strips types by itself (22.6 and later). Best effort: without it only they are missing.
typescript() {
  command -v node >/dev/null 2>&1 && command -v npm >/dev/null 2>&1 || return 0
  command -v tsx >/dev/null 2>&1 && return 0
  node -e 'const [a, b] = process.versions.node.split("."); process.exit(a > 22 || (a == 22 && b >= 6) ? 0 : 1)' && return 0
  [ "$(id -u)" = 0 ] || { echo "TypeScript snippets need tsx: sudo npm install -g tsx" >&2; return 0; }
  npm install --global --silent --no-audit --no-fund tsx >/dev/null 2>&1 || echo "could not install tsx; TypeScript snippets will not run" >&2
}

if [ ${#missing[@]} -eq 0 ]; then typescript; exit 0; fi

if command -v apt-get >/dev/null 2>&1; then
  install="apt-get -o DPkg::Lock::Timeout=300 install -y --no-install-recommends ${missing[*]}"
  update="apt-get update"
elif command -v dnf >/dev/null 2>&1; then
  install="dnf install -y ${missing[*]}"; update=true
elif command -v pacman >/dev/null 2>&1; then
  install="pacman -S --noconfirm ${missing[*]}"; update=true
else
  echo "atoll needs these and found no package manager it knows: ${missing[*]}" >&2
  exit 1
fi
if [ "$(id -u)" = 0 ]; then sudo=""
elif sudo -n true 2>/dev/null; then sudo="sudo"
else
  echo "atoll needs: ${missing[*]}" >&2
  echo "Run this, then try again:  sudo $install" >&2
  exit 1
fi
echo "installing: ${missing[*]}" >&2
$sudo env DEBIAN_FRONTEND=noninteractive $update >/dev/null 2>&1 || true
# Packages a distribution does not have are tried one by one, so that one missing name does not stop the rest.
if ! $sudo env DEBIAN_FRONTEND=noninteractive $install >/dev/null 2>&1; then
  for p in "${missing[@]}"; do
    $sudo env DEBIAN_FRONTEND=noninteractive ${install%% "${missing[*]}"} "$p" >/dev/null 2>&1 || echo "could not install $p" >&2
  done
fi
typescript
