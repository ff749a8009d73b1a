#!/usr/bin/env bash
# Run every test. Python tests run side by side, then those marked `serial` alone. A test that failed is run once more, alone:
# these machines are noisy. What passed only then is listed as unsteady; what fails twice fails the run.
set -uo pipefail
failed=0

for crate in guest launcher; do
  (cd $crate && cargo test --release --locked --quiet) || failed=1
done

run() { .venv/bin/python -m pytest "$@"; local code=$?; [ $code = 5 ] && code=0; return $code; }

run -q -n "${JOBS:-2}" --dist loadgroup -m "not serial" -o cache_dir=.pytest_cache/side-by-side; first=$?
run -q -m serial -o cache_dir=.pytest_cache/serial; second=$?
for kind in side-by-side:$first serial:$second; do
  name=${kind%:*} code=${kind#*:}
  [ "$code" = 0 ] && continue
  if [ "$code" != 1 ]; then failed=1; continue; fi
  echo "== $name: running once more, alone, what failed"
  run -q --last-failed --last-failed-no-failures none -o cache_dir=.pytest_cache/$name || failed=1
done

if [ -f sdk/typescript/package.json ]; then (cd sdk/typescript && npm test --silent) || failed=1; fi
exit $failed
