#!/usr/bin/env bash
# Run every test once: Rust and TypeScript in the background, Python side by side. Many tests wait more than they compute, so
# there are more processes than processors. What measures the machine (`serial`, in the long run only) runs alone at the end.
# With ATOLL_TEST_AGAIN, which CI sets on its shared machines, a test that failed is run once more, alone.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONDONTWRITEBYTECODE=  # what pytest has compiled of the tests serves all its processes
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
failed=0

check_rust() { for crate in guest launcher; do (cd $crate && cargo test --locked --quiet) || return 1; done; }
check_typescript() { [ ! -f sdk/typescript/package.json ] || (cd sdk/typescript && npm test --silent); }
run_pytest() { .venv/bin/python -m pytest -q "$@"; local code=$?; [ $code = 5 ] || return $code; }

check_others() {
  local bad=0
  check_rust > "$logs/rust" 2>&1 || bad=1
  check_typescript > "$logs/typescript" 2>&1 || bad=1
  return $bad
}

check_others &
others=$!
run_pytest --collect-only > "$logs/collected" 2>&1 || { cat "$logs/collected"; failed=1; }  # compiles them
run_pytest -n "${JOBS:-4}" --dist worksteal -m "not serial" -o cache_dir="$logs/cache"; side_by_side=$?
wait $others || failed=1
if [ $side_by_side = 1 ] && [ -n "${ATOLL_TEST_AGAIN:-}" ]; then
  echo "== running once more, alone, what failed; a test that passes now is unsteady and has to be repaired"
  run_pytest --last-failed --last-failed-no-failures none -o cache_dir="$logs/cache" || failed=1
elif [ $side_by_side != 0 ]; then
  failed=1
fi
cat "$logs/rust" "$logs/typescript" 2> /dev/null
if [ -n "${ATOLL_TEST_LONG:-}" ]; then run_pytest -m serial || failed=1; fi
exit $failed
