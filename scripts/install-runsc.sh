#!/usr/bin/env bash
# Make a gVisor build of 2024 or later available as `runsc`. Debian 12 packages one of 2022, which works but lacks systrap and
# much of the system call surface; the next Debian release packages a newer one as a static program, which runs here as well.
# Best effort: without it the older build, or no gVisor, is used, and `atoll doctor` says so.
set -uo pipefail
export PATH="$PATH:/usr/sbin:/sbin"

build_year() { "$1" --version 2>/dev/null | sed -n 's/.*version .*\(20[0-9][0-9]\)[0-9]\{4\}.*/\1/p' | head -1; }
current=$(command -v runsc || true)
if [ -n "$current" ]; then
  year=$(build_year "$current")
  { [ -z "$year" ] || [ "$year" -ge 2024 ]; } && exit 0
fi
command -v apt-get >/dev/null 2>&1 || exit 0
. /etc/os-release
[ "${ID:-}" = debian ] && [ "${VERSION_CODENAME:-}" = bookworm ] || exit 0
if [ "$(id -u)" = 0 ]; then target=/usr/local/bin; else target=$HOME/.local/bin; fi

work=$(mktemp -d) || exit 0
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"
mkdir -p "$work"/{lists/partial,cache/archives/partial,out,x,etc}
: > "$work/etc/sources.list"
for f in /etc/apt/sources.list.d/debian.sources /etc/apt/sources.list; do
  [ -f "$f" ] || continue
  name=next.${f##*.}
  sed 's/bookworm/trixie/g' "$f" > "$work/etc/$name"
  source_file=$work/etc/$name
  break
done
[ -n "${source_file:-}" ] || exit 0
apt=(apt-get -qq -o "Dir::Etc::sourcelist=$source_file" -o Dir::Etc::sourceparts=- -o "Dir::State::lists=$work/lists" -o "Dir::Cache=$work/cache" -o APT::Sandbox::User=root)
"${apt[@]}" update >/dev/null 2>&1 || exit 0
(cd "$work/out" && "${apt[@]}" download runsc >/dev/null 2>&1) || exit 0
dpkg -x "$work"/out/runsc_*.deb "$work/x" || exit 0
"$work/x/usr/bin/runsc" --version >/dev/null 2>&1 || exit 0
mkdir -p "$target" && install -m 0755 "$work/x/usr/bin/runsc" "$target/runsc" && echo "installed $("$target/runsc" --version | head -1) in $target" >&2
exit 0
