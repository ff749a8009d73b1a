#!/bin/sh
# Install atoll on this Linux machine, or remove it. Run `sh install.sh --help`.
set -eu

# `make dist` fills in the version and the SHA-256 of its wheels: nothing else is then installed.
release="" release_sums=""

usage() {
  cat <<'TEXT'
Usage: sh install.sh [options]

  Installs atoll for this user, or for the machine when it runs as root: system packages, the
  program in a directory of its own, gVisor, subordinate ids, a service, shell completions.
  Running it again brings everything up to date.

  --yes            do not ask
  --dry-run        show what would be done, do nothing
  --no-service     install no service; the daemon starts at the first command
                   (--disable-sandbox-matrix is the same)
  --no-packages    install no system packages; say which are missing
  --no-gvisor      do not install gVisor
  --offline DIR    take everything from a bundle made by `make bundle`
  --wheel FILE     install this wheel (a file or an https URL) instead of the release this script belongs to;
                   a SHA256SUMS beside the file is checked
  --sha256 SUM     the wheel must have this checksum; needed with a URL
  --prefix DIR     where the program goes (root: /opt/atoll, user: ~/.local/share/atoll)
  --bin DIR        where the command goes (root: /usr/local/bin, user: ~/.local/bin)
  --uninstall      end every sandbox and remove all that was installed, with its data
  --keep-data      with --uninstall: leave the data (sandboxes' disks, images, keys)
  --help           this text
TEXT
}

say() { printf '%s\n' "$*"; }
fail() { printf 'install.sh: %s\n' "$1" >&2; [ $# -lt 2 ] || printf '  %s\n' "$2" >&2; exit 1; }

yes="" dry="" service=yes packages=yes gvisor=yes offline="" wheel="" sum="" prefix="" bin="" uninstall="" keep=""
while [ $# -gt 0 ]; do
  case $1 in
    --yes|-y) yes=yes ;;
    --dry-run) dry=yes ;;
    --no-service|--disable-sandbox-matrix) service="" ;;
    --no-packages) packages="" ;;
    --no-gvisor) gvisor="" ;;
    --offline|--wheel|--sha256|--prefix|--bin)
      [ $# -gt 1 ] || fail "$1 needs a value" "sh install.sh --help"
      case $1 in --offline) offline=$2 ;; --wheel) wheel=$2 ;; --sha256) sum=$2 ;; --prefix) prefix=$2 ;; --bin) bin=$2 ;; esac
      shift ;;
    --uninstall) uninstall=yes ;;
    --keep-data) keep=yes ;;
    --help|-h) usage; exit 0 ;;
    *) fail "unknown option $1" "sh install.sh --help" ;;
  esac
  shift
done

[ "$(uname -s)" = Linux ] || fail "sandboxes run on Linux, and this is $(uname -s)" \
  "the client alone: pip install atoll, then atoll --endpoint HOST:50051 ..."
machine=$(uname -m)
case $machine in x86_64|aarch64) ;; *) fail "no build for $machine" "x86_64 and aarch64 are supported" ;; esac
if [ "$(id -u)" = 0 ]; then
  prefix=${prefix:-/opt/atoll}; bin=${bin:-/usr/local/bin}
  unit=/etc/systemd/system/atoll.service; completions=/usr/local/share/bash-completion/completions
else
  prefix=${prefix:-${XDG_DATA_HOME:-$HOME/.local/share}/atoll}; bin=${bin:-$HOME/.local/bin}
  unit=${XDG_CONFIG_HOME:-$HOME/.config}/systemd/user/atoll.service
  completions=${XDG_DATA_HOME:-$HOME/.local/share}/bash-completion/completions
fi
case $prefix$bin$offline$wheel$sum in *"
"*) fail "a path with a line break cannot be used" ;; esac
data=${ATOLL_HOME:-$HOME/.atoll}
list=$prefix/installed        # every path outside the prefix that this script made, one per line

manager() { if [ "$(id -u)" = 0 ]; then systemctl "$@"; else systemctl --user "$@"; fi; }
has_systemd() { [ -d /run/systemd/system ] && manager show-environment >/dev/null 2>&1; }

# Removing

if [ -n "$uninstall" ]; then
  [ -e "$list" ] || fail "atoll was not installed by this script in $prefix" "name the place: --prefix DIR"
  say "This removes $prefix and:"; sed 's/^/  /' "$list"
  [ -n "$keep" ] || say "  $data (every sandbox, image and key)"
  [ -z "$dry" ] || exit 0
  if [ -z "$yes" ] && [ -t 0 ]; then printf 'Go on? [y/N] '; read -r answer; [ "$answer" = y ] || exit 1; fi
  if grep -qxF "$unit" "$list" && has_systemd; then manager disable --now atoll.socket atoll.service >/dev/null 2>&1 || true; fi
  if [ -e "$data/daemon.sock" ]; then
    "$prefix/venv/bin/atoll" daemon stop --force >/dev/null 2>&1 || fail "sandboxes could not be ended" \
      "$prefix/venv/bin/atoll daemon stop --force says why; nothing was removed"
  fi
  while IFS= read -r path; do rm -f -- "$path"; done < "$list"
  if has_systemd; then manager daemon-reload || true; fi
  rm -rf -- "$prefix"
  [ -n "$keep" ] || rm -rf -- "$data"
  say "atoll is removed. System packages stay: other programs may use them."
  exit 0
fi

# Looking

. /etc/os-release 2>/dev/null || true
python=""
for one in python3 python3.14 python3.13 python3.12 python3.11 /usr/bin/python3; do
  if command -v "$one" >/dev/null 2>&1 && "$one" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    python=$(command -v "$one"); break
  fi
done
find_packages() {  # of this package manager, the packages whose commands are missing
  PATH=$PATH:/usr/sbin:/sbin
  for pair in "$@"; do command -v "${pair%%=*}" >/dev/null 2>&1 || printf '%s ' "${pair#*=}"; done
  [ -n "$python" ] || printf '%s ' "$python_package"
  [ -z "$python" ] || "$python" -c 'import ensurepip, venv' >/dev/null 2>&1 || printf '%s ' "$venv_package"
}
python_package=python3 venv_package=python3
if command -v apt-get >/dev/null 2>&1; then
  venv_package=python3-venv; install="apt-get install -y --no-install-recommends"; refresh="apt-get update"
  missing=$(find_packages runc=runc newuidmap=uidmap nft=nftables mkfs.ext4=e2fsprogs mmdebstrap=mmdebstrap)
elif command -v dnf >/dev/null 2>&1; then
  install="dnf install -y"; refresh=true
  missing=$(find_packages runc=runc newuidmap=shadow-utils nft=nftables mkfs.ext4=e2fsprogs)
elif command -v zypper >/dev/null 2>&1; then
  python_package=python311 venv_package=python311; install="zypper --non-interactive install"; refresh=true
  missing=$(find_packages runc=runc newuidmap=shadow nft=nftables mkfs.ext4=e2fsprogs)
elif command -v pacman >/dev/null 2>&1; then
  python_package=python venv_package=python; install="pacman -S --noconfirm --needed"; refresh="pacman -Sy"
  missing=$(find_packages runc=runc newuidmap=shadow nft=nftables mkfs.ext4=e2fsprogs)
elif command -v apk >/dev/null 2>&1; then
  venv_package="py3-pip"; install="apk add"; refresh="apk update"
  missing=$(find_packages runc=runc newuidmap=shadow-uidmap nft=nftables mkfs.ext4=e2fsprogs)
else
  install=""; refresh=true; missing=$(find_packages runc=runc newuidmap=newuidmap nft=nftables mkfs.ext4=e2fsprogs)
fi
missing=${missing% }
become=""
if [ "$(id -u)" != 0 ]; then if command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then become=sudo; else become=none; fi; fi
ids=""
if [ "$(id -u)" != 0 ] && ! grep -qs "^$(id -un):" /etc/subuid; then ids=yes; fi
if [ -n "$offline" ]; then
  [ -d "$offline" ] || fail "$offline is no directory" "make one with: make bundle"
  offline=$(cd "$offline" && pwd)
  [ -e "$offline/SHA256SUMS" ] || fail "$offline is no bundle: SHA256SUMS is missing" "make one with: make bundle"
fi
case $sum in *[!0-9a-f]*) fail "$sum is no SHA-256" "64 characters of 0-9 and a-f" ;; esac
[ -z "$sum" ] || [ ${#sum} = 64 ] || fail "$sum is no SHA-256" "64 characters of 0-9 and a-f"
case $wheel in
  https://*) [ -n "$sum" ] || fail "a wheel from the network needs its checksum" "--sha256 SUM, as the release's SHA256SUMS has it" ;;
  *://*) fail "a wheel is taken over https only" "--wheel https://... --sha256 SUM" ;;
  "") [ -n "$offline$release$dry" ] || fail "this install.sh belongs to no release, so nothing says which program is the right one" \
    "take install.sh from a release, or build a wheel: make dist, then sh install.sh --wheel dist/atoll-...-$machine.whl" ;;
  *) [ -n "$sum" ] || sum=$(awk -v name="${wheel##*/}" '$2 == name { print $1 }' "$(dirname "$wheel")/SHA256SUMS" 2>/dev/null || true)
    [ ! -e "$wheel" ] || [ -z "$sum" ] || printf '%s  %s\n' "$sum" "$wheel" | sha256sum --status -c ||
      fail "$wheel has another checksum than it should have" "copy it again" ;;
esac
if [ -n "$gvisor" ] && command -v runsc >/dev/null 2>&1; then gvisor=""; fi
if [ -n "$service" ] && ! has_systemd; then service=""; no_systemd=yes; fi

# Telling

say "atoll will be installed on ${PRETTY_NAME:-this machine} ($machine) for $(id -un):"
[ -z "$missing" ] || { [ -n "$packages" ] && say "  system packages: $missing" || say "  (missing, not installed: $missing)"; }
[ -z "$ids" ] || say "  subordinate ids for $(id -un)"
say "  program:         $prefix"
say "  command:         $bin/atoll, $bin/k8e-sandbox"
[ -z "$gvisor" ] || say "  gVisor:          $bin/runsc"
[ -z "$service" ] || say "  service:         $unit, and its socket"
[ -z "${no_systemd:-}" ] || say "  no service: no systemd answers here; the daemon starts at the first command"
[ -z "$dry" ] || exit 0
if [ -z "$yes" ] && [ -t 0 ]; then printf 'Go on? [Y/n] '; read -r answer; case $answer in n*|N*) exit 1 ;; esac; fi

# Doing

step="checking" done_so_far=""
tell_what_is_left() {
  code=$?
  [ "$code" = 0 ] || { printf 'install.sh: failed while %s\n' "$step" >&2
    [ -z "$done_so_far" ] || printf '  done before that:%s\n' "$done_so_far" >&2
    printf '  run it again when the cause is mended, or: sh install.sh --uninstall --prefix %s\n' "$prefix" >&2; }
}
trap tell_what_is_left EXIT
trap 'exit 130' INT TERM

own() { grep -qxF "$1" "$list" 2>/dev/null || printf '%s\n' "$1" >> "$list"; }

if [ -n "$offline" ]; then
  step="checking the bundle"
  (cd "$offline" && sha256sum --quiet -c SHA256SUMS) || fail "files of the bundle are damaged" "copy it again"
  for file in "$offline"/wheels/* "$offline/runsc"; do
    [ ! -e "$file" ] || awk -v name="${file#"$offline"/}" '$2 == name { found = 1 } END { exit !found }' "$offline/SHA256SUMS" ||
      fail "$file is not in the bundle's SHA256SUMS" "copy the bundle again"
  done
fi
if [ -n "$missing" ] && [ -n "$packages" ]; then
  step="installing $missing"
  [ -n "$install" ] || fail "no package manager that is known here" "install these by hand: $missing"
  [ "$become" != none ] || fail "this needs root" "sudo $install $missing"
  # shellcheck disable=SC2086
  { $become env DEBIAN_FRONTEND=noninteractive $refresh && $become env DEBIAN_FRONTEND=noninteractive $install $missing; } >&2
  done_so_far="$done_so_far packages"
  python=${python:-$(command -v python3)}
fi
[ -n "$python" ] || fail "Python 3.11 or later is needed" "install it, or run this without --no-packages"
"$python" -c 'import ensurepip, venv' 2>/dev/null || fail "$python cannot make virtual environments" "$install $venv_package"
if [ -n "$ids" ]; then
  step="giving $(id -un) subordinate ids"
  [ "$become" != none ] || fail "this needs root" "sudo usermod --add-subuids 100000-165535 --add-subgids 100000-165535 $(id -un)"
  $become usermod --add-subuids 100000-165535 --add-subgids 100000-165535 "$(id -un)"
  done_so_far="$done_so_far ids"
fi

step="making $prefix"
mkdir -p "$prefix" "$bin"
touch "$list"
[ -x "$prefix/venv/bin/python" ] || "$python" -m venv "$prefix/venv"
done_so_far="$done_so_far $prefix"

step="installing the program"
pip() { "$prefix/venv/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }
if [ -n "$offline" ]; then pip install --upgrade --no-index --find-links "$offline/wheels" atoll
else
  case $wheel in  # of the program itself; pip compares what it downloads
    "") set -- "atoll==$release"; for one in $release_sums; do set -- "$@" "--hash=sha256:$one"; done ;;
    https://*) set -- "atoll @ $wheel" "--hash=sha256:$sum" ;;
    *) set -- "" ;;
  esac
  if [ -z "$1" ]; then pip install --upgrade --no-deps "$wheel"
  else
    printf '%s\n' "$*" > "$prefix/program.txt"
    pip install --upgrade --no-deps --only-binary :all: --require-hashes -r "$prefix/program.txt"
  fi
  # What it needs: versions and checksums that the wheel brings.
  needed=$("$prefix/venv/bin/python" -c 'import atoll, os; print(os.path.dirname(atoll.__file__))')/setup/requirements.lock
  [ -e "$needed" ] || fail "this wheel does not say which packages it needs" "take the wheel for $machine of a later release"
  pip install --upgrade --no-deps --require-hashes -r "$needed"
fi
for name in atoll k8e-sandbox; do
  [ ! -e "$bin/$name" ] || grep -qxF "$bin/$name" "$list" || fail "$bin/$name is there and is not ours" "choose another place: --bin DIR"
  ln -sf "$prefix/venv/bin/atoll" "$bin/$name"; own "$bin/$name"
done
done_so_far="$done_so_far program"

if [ -n "$gvisor" ]; then
  step="installing gVisor"
  if [ -n "$offline" ] && [ -e "$offline/runsc" ]; then
    install -m 0755 "$offline/runsc" "$bin/runsc" 2>/dev/null || { cp "$offline/runsc" "$bin/runsc"; chmod 755 "$bin/runsc"; }
    own "$bin/runsc"
  else
    helper=$("$prefix/venv/bin/python" -c 'import atoll, os; print(os.path.dirname(atoll.__file__))')/setup/install-runsc.sh
    bash "$helper" >&2 || true
    for made in /usr/local/bin/runsc "$HOME/.local/bin/runsc"; do [ ! -e "$made" ] || own "$made"; done
    command -v runsc >/dev/null 2>&1 || [ -e "$bin/runsc" ] || say "gVisor could not be had; the container runtime is used. Later: atoll doctor"
  fi
fi

step="writing completions"
if mkdir -p "$completions" 2>/dev/null; then
  "$prefix/venv/bin/atoll" completion bash > "$completions/atoll" && own "$completions/atoll"
fi

if [ -n "$service" ]; then
  step="starting the service"
  units=$("$prefix/venv/bin/python" -c 'import atoll, os; print(os.path.dirname(atoll.__file__))')/setup/systemd
  wanted=default.target; [ "$(id -u)" != 0 ] || wanted=multi-user.target
  mkdir -p "$(dirname "$unit")" "$data"
  chmod 711 "$data"
  # A daemon that was started on demand gives its home up; its sandboxes go on.
  if [ ! -e "$unit" ] && [ -e "$data/daemon.sock" ]; then "$prefix/venv/bin/atoll" daemon stop >/dev/null 2>&1 || true; fi
  for name in service socket; do
    sed -e "s|^ExecStart=.* serve|ExecStart=$prefix/venv/bin/atoll serve|" -e "s|%h/.atoll|$data|" \
      -e "s|^WantedBy=multi-user.target|WantedBy=$wanted|" "$units/atoll.$name" > "${unit%.service}.$name"
    own "${unit%.service}.$name"
  done
  manager daemon-reload
  manager enable --now atoll.socket >/dev/null 2>&1
  manager enable atoll.service >/dev/null 2>&1
  manager restart atoll.service
  done_so_far="$done_so_far service"
fi

step="trying it"
say "$("$prefix/venv/bin/atoll" version) is installed."
case ":$PATH:" in *":$bin:"*) ;; *) say "Add it to your PATH:  export PATH=\"$bin:\$PATH\"" ;; esac
say "Try:  atoll sandbox run \"print('hello')\" --lang python"
say "What works here, and mending what does not:  atoll doctor, atoll doctor --fix"
