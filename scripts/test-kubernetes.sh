#!/usr/bin/env bash
# Start the test cluster, run the tests marked `kubernetes` in it one after the other, take it away again.
# Words after the script's name go to pytest. ATOLL_K8S_KEEP=1 leaves the cluster running.
set -uo pipefail
cd "$(dirname "$0")/.."
cluster=tests/kubernetes/cluster/cluster.py
[ -n "${ATOLL_K8S_KEEP:-}" ] || trap '/usr/bin/python3 $cluster down' EXIT
/usr/bin/python3 $cluster up || exit 1
eval "$(/usr/bin/python3 $cluster env)"
ATOLL_TEST_CLUSTER=$PWD/$cluster .venv/bin/python -m pytest -q -m kubernetes tests/kubernetes tests/contract "$@"
