#!/usr/bin/env bash
# Make a gVisor build of today available as `runsc`. In this order, the first that works: a build kept in the cache; one compiled from
# gVisor's own Go module, where there is a Go new enough; gVisor's own release, with its checksum; Debian's build of 2024.
# Best effort: without any, whatever `runsc` there is stays, and `atoll doctor` says what it is.
# Usage: install-runsc.sh [install]       make it the `runsc` of this machine
#        install-runsc.sh fallback        fetch Debian's build of 2024 into the cache only, for the tests, and print where it is
# ATOLL_CACHE is the cache (default: ~/.cache/atoll); ATOLL_RUNSC_TARGET the directory to install in.
set -uo pipefail
export PATH="$PATH:/usr/local/go/bin:/usr/sbin:/sbin"

module=gvisor.dev/gvisor
version=v0.0.0-20260905035102-160fafc42237
sum=h1:AU5+CtCvnBnxdZRNcZt1NfSLqgkXZVT3N/u6u1aXg44= # of the module's files, as in a go.sum
releases=https://storage.googleapis.com/gvisor/releases/release/latest
wanted=20260905 # a build of this day or later is left as it is
cache=${ATOLL_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/atoll}
machine=$(uname -m)
kept=$cache/runsc-$version-$machine
fallback=$cache/runsc-2024-$machine
if [ -n "${ATOLL_RUNSC_TARGET:-}" ]; then target=$ATOLL_RUNSC_TARGET
elif [ "$(id -u)" = 0 ]; then target=/usr/local/bin
else target=$HOME/.local/bin; fi
work=$(mktemp -d) || exit 0
trap 'chmod -R u+w "$work" 2>/dev/null; rm -rf "$work"' EXIT
chmod 755 "$work"

say() { echo "gVisor: $*" >&2; }

# The day of a build: from what it says, or from the module's version inside it, which is all that `go install` leaves.
build_day() {
  local day
  day=$("$1" --version 2>/dev/null | sed -n 's/.*version .*\(20[0-9]\{6\}\).*/\1/p' | head -1)
  [ -n "$day" ] || day=$(grep -a -m1 -o $'mod\tgvisor.dev/gvisor\tv[0-9.]*-20[0-9]\{6\}' "$1" 2>/dev/null | sed 's/.*-//' | head -1)
  echo "${day:-0}"
}

# Whole or not at all: sandboxes may be starting meanwhile.
put() {
  mkdir -p "$(dirname "$2")" && cp "$1" "$2.new.$$" && chmod 0755 "$2.new.$$" && mv -f "$2.new.$$" "$2" || { rm -f "$2.new.$$"; return 1; }
}

keep() { # with its checksum, so that a half-written or changed one is not used
  (umask 077 && mkdir -p "$cache") && put "$1" "$kept" && (cd "$cache" && sha256sum "${kept##*/}" > "${kept##*/}.sha256")
}

from_cache() {
  [ -x "$kept" ] && [ -O "$kept" ] && (cd "$cache" && sha256sum --status -c "${kept##*/}.sha256") 2>/dev/null && cp "$kept" "$work/runsc"
}

from_module() {
  command -v go >/dev/null 2>&1 || { say "no Go here to compile it with"; return 1; }
  say "compiling $version (some minutes)"
  # With cgo it would be a dynamic program, which cannot start itself in its own empty root.
  (cd "$work" && CGO_ENABLED=0 GOBIN="$work" nice -n 10 go install -ldflags="-s -w" "$module/runsc@$version") > "$work/log" 2>&1 || {
    say "$(go version | cut -d' ' -f3) could not compile it: $(tail -n 1 "$work/log")"
    return 1
  }
  grep -a -q -F "$module"$'\t'"$version"$'\t'"$sum" "$work/runsc" || { say "what was compiled is not $version as it should be"; rm -f "$work/runsc"; return 1; }
  keep "$work/runsc" || say "it could not be kept in $cache"
}

from_release() {
  command -v curl >/dev/null 2>&1 || return 1
  local get=(curl -fsSL --proto =https --connect-timeout 10 --max-time 600)
  "${get[@]}" -o "$work/runsc" "$releases/$machine/runsc" 2>/dev/null \
    && "${get[@]}" -o "$work/runsc.sha512" "$releases/$machine/runsc.sha512" 2>/dev/null \
    && (cd "$work" && sha512sum --status -c runsc.sha512) || { rm -f "$work/runsc"; say "its release cannot be had here"; return 1; }
  chmod 755 "$work/runsc"
}

# Debian's next release packages one of 2024 as a static program, which runs on Debian 12 as well.
from_debian() {
  local file source_file="" name
  command -v apt-get >/dev/null 2>&1 || return 1
  . /etc/os-release
  [ "${ID:-}" = debian ] && [ "${VERSION_CODENAME:-}" = bookworm ] || return 1
  mkdir -p "$work"/{lists/partial,cache/archives/partial,out,x,etc}
  for file in /etc/apt/sources.list.d/debian.sources /etc/apt/sources.list; do
    [ -f "$file" ] || continue
    name=next.${file##*.}
    sed 's/bookworm/trixie/g' "$file" > "$work/etc/$name"
    source_file=$work/etc/$name
    break
  done
  [ -n "$source_file" ] || return 1
  local apt=(apt-get -qq -o "Dir::Etc::sourcelist=$source_file" -o Dir::Etc::sourceparts=- -o "Dir::State::lists=$work/lists" -o "Dir::Cache=$work/cache" -o APT::Sandbox::User=root)
  "${apt[@]}" update >/dev/null 2>&1 || return 1
  (cd "$work/out" && "${apt[@]}" download runsc >/dev/null 2>&1) || return 1
  dpkg -x "$work"/out/runsc_*.deb "$work/x" && cp "$work/x/usr/bin/runsc" "$work/runsc"
}

if [ "${1:-install}" = fallback ]; then
  if [ ! -x "$fallback/runsc" ]; then
    from_debian && (umask 077 && mkdir -p "$cache") && put "$work/runsc" "$fallback/runsc" || { say "Debian's build of 2024 cannot be had here"; exit 0; }
  fi
  echo "$fallback"
  exit 0
fi

current=$(command -v runsc || true)
day=0
[ -n "$current" ] && day=$(build_day "$current")
[ "$day" -ge "$wanted" ] && exit 0
from_cache || from_module || from_release || { [ "$day" -lt 20240101 ] && from_debian; } || {
  [ -n "$current" ] && say "the build of $day stays"
  exit 0
}
# The one that is replaced is what the tests of the fallback need.
[ "$day" -ge 20240101 ] && [ ! -x "$fallback/runsc" ] && (umask 077 && mkdir -p "$cache") && put "$current" "$fallback/runsc"
"$work/runsc" --version >/dev/null 2>&1 || { say "the new build does not run here"; exit 0; }
put "$work/runsc" "$target/runsc" && say "installed the build of $(build_day "$work/runsc") in $target"
exit 0
