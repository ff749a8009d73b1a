#!/usr/bin/env bash
# Run a part of the tests with Python 3.14 or 3.13, in an environment of its own that is removed at the end. The rest of the
# tests run with the Python of `make setup`. Where no such Python is installed, it says so and that is no failure.
set -euo pipefail
cd "$(dirname "$0")/.."

find_python() {
  local python
  for python in python3.14 python3.13 "$HOME"/.pyenv/versions/3.1[34].*/bin/python3; do
    if "$python" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 13), (3, 14)))' 2>/dev/null; then
      echo "$python"
      return
    fi
  done
}

python=$(find_python)
if [ -z "$python" ]; then
  echo "no Python 3.13 or 3.14 is installed: the tests were not run with one"
  exit 0
fi
echo "== tests with $("$python" -V)"
venv=$(mktemp -d)
trap 'rm -rf "$venv"' EXIT
"$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)
"${pip[@]}" --require-hashes -r requirements.lock
"${pip[@]}" --no-deps --no-build-isolation -e .
# The editable install of the set-up's own environment is left alone: this one is in another place.
"$venv/bin/python" -m pytest -q -n "${JOBS:-4}" --dist worksteal -o cache_dir="$venv/cache" \
  tests/sdk tests/guest tests/egress/test_broker.py tests/egress/test_parsers.py tests/mcp/test_stdio.py tests/core/test_commands.py \
  tests/core/test_metrics.py tests/cli/test_grammar.py tests/network/test_hosts.py tests/images/test_tar_reader.py
