# Every target does the set-up it needs; the second time that is quick.
SHELL := /bin/bash
export PATH := $(PATH):$(HOME)/.cargo/bin:/usr/sbin:/sbin
PY := .venv/bin/python
BIN := src/atoll/_bin
.DEFAULT_GOAL := help

.PHONY: dist bundle docs help setup bytecode hello test test-newer-python test-long test-kubernetes lint lint-python lint-rust fmt bench bench-compare binaries system system-test system-bench clean lock pod-agent proto sdk

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

setup: system .venv/.done binaries bytecode ## system packages, .venv with atoll in it, guest agent and launcher

hello: setup ## run a Python hello in a sandbox
	@.venv/bin/atoll sandbox run "import platform; print('hello from', platform.node())" --lang python --raw

system:
	@scripts/install-system.sh run
	@scripts/install-runsc.sh

system-test:
	@scripts/install-system.sh test
	@scripts/install-runsc.sh fallback >/dev/null
	@scripts/install-kernel.sh

# What of this cannot be installed is a peer that is not run, not an error.
system-bench:
	@scripts/install-system.sh bench || true

.venv/.done: pyproject.toml requirements.lock | system
	@echo "setting up .venv" >&2
	@test -x .venv/bin/python || $$(command -v /usr/bin/python3 || command -v python3) -m venv .venv
	@.venv/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	@.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

# The command line starts three times slower when Python has to compile it each time.
bytecode: .venv/.done
	@$(PY) -m compileall -q src/atoll

binaries: $(BIN)/atoll-guest $(BIN)/atoll-launch

$(BIN)/atoll-guest: guest/Cargo.toml guest/Cargo.lock $(shell find guest/src guest/.cargo -type f 2>/dev/null) | system
	@echo "building the guest agent (a minute or two)" >&2
	@cd guest && cargo build --release --locked --quiet
	@mkdir -p $(BIN) && cp guest/target/release/atoll-guest $@.new && mv $@.new $@

# The agent of pods, for images of a cluster and for tests.
pod-agent: $(BIN)/atoll-guest-pod ## the guest agent for Kubernetes

$(BIN)/atoll-guest-pod: guest/Cargo.toml guest/Cargo.lock $(shell find guest/src guest/.cargo -type f 2>/dev/null) | system
	@echo "building the guest agent of pods (a minute or two)" >&2
	@cd guest && cargo build --release --locked --quiet --features pod --bin atoll-guest-pod
	@mkdir -p $(BIN) && cp guest/target/release/atoll-guest-pod $@.new && mv $@.new $@

$(BIN)/atoll-launch: launcher/Cargo.toml launcher/Cargo.lock $(shell find launcher/src launcher/.cargo -type f 2>/dev/null) | system
	@echo "building the launcher" >&2
	@cd launcher && cargo build --release --locked --quiet
	@mkdir -p $(BIN) && cp launcher/target/release/atoll-launch $@.new && mv $@.new $@

lint: lint-python lint-rust ## ruff, mypy --strict, who may import whom, clippy, dependencies
	@$(PY) scripts/check_dependencies.py

lint-python: setup
	@.venv/bin/ruff check . && .venv/bin/ruff format --check .
	@$(PY) scripts/unasync.py --check && $(PY) scripts/draw_architecture.py --check
	@$(PY) scripts/docs_site.py
	@.venv/bin/mypy
	@.venv/bin/lint-imports --no-cache --no-logo

lint-rust: system
	@cd guest && cargo clippy --quiet --all-targets --locked --features pod -- -D warnings
	@cd launcher && cargo clippy --quiet --all-targets --locked -- -D warnings

fmt: .venv/.done ## format everything
	@.venv/bin/ruff check --fix . ; .venv/bin/ruff format .
	@cd guest && cargo fmt; cd ../launcher && cargo fmt

test: setup system-test pod-agent ## every test: Rust, Python, TypeScript
	@scripts/test.sh

test-newer-python: setup system-test ## a part of the tests with Python 3.13 or 3.14, where one is installed
	@scripts/test-newer-python.sh

test-long: setup system-test pod-agent ## the same tests with the full counts
	@ATOLL_TEST_LONG=1 scripts/test.sh

test-kubernetes: setup pod-agent ## tests on a real cluster, made and removed here; building it once takes 15 minutes
	@scripts/test-kubernetes.sh

bench: setup system-bench ## timings beside bare-host figures and peers of the same run; about a quarter of an hour
	@$(PY) -m bench

bench-compare: setup ## OLD=rev NEW=rev [ROWS=a,b] [PAIRS=20] [MAX=1.10]: whether NEW is slower; about ten minutes
	@$(PY) -m bench.compare $(OLD) $(NEW) $(if $(ROWS),--rows $(ROWS)) $(if $(PAIRS),--pairs $(PAIRS)) $(if $(MAX),--max $(MAX))

docs: .venv/.done ## the documents as a site, in build/site, with every link checked
	@.venv/bin/mkdocs build --strict --quiet && echo "build/site/index.html" >&2

dist: .venv/.done ## wheels for x86_64 and aarch64, the client's wheel, the client as one file, sdist, SBOM and checksums, in dist/
	@$(PY) scripts/build_release.py
	@$(PY) scripts/build_standalone.py

bundle: dist ## dist/bundle: all that `install.sh --offline` needs on a machine like this one
	@rm -rf dist/bundle && mkdir -p dist/bundle/wheels
	@cp dist/atoll-*-manylinux2014_$$(uname -m).*.whl dist/bundle/wheels/ && cp dist/install.sh dist/bundle/
	@$(PY) -m pip download --quiet --disable-pip-version-check --dest dist/bundle/wheels --require-hashes -r requirements-run.lock
	@! command -v runsc >/dev/null || cp "$$(command -v runsc)" dist/bundle/runsc
	@cd dist/bundle && find . -type f ! -name SHA256SUMS -printf '%P\n' | sort | xargs sha256sum > SHA256SUMS && du -sh .

lock: ## write requirements.lock and requirements-run.lock (what an installation needs) anew, and that of the interpreter
	@.venv/bin/python -m pip install --quiet uv && .venv/bin/uv pip compile --quiet --no-header --no-emit-index-url --generate-hashes --extra dev --python-version 3.11 pyproject.toml --output-file requirements.lock scripts/build-requirements.in
	@.venv/bin/uv pip compile --quiet --no-header --no-emit-index-url --generate-hashes --universal --python-version 3.11 -c requirements.lock pyproject.toml --output-file requirements-run.lock
	@cd src/atoll/images/interpreter && ../../../../.venv/bin/uv pip compile --quiet --no-header --no-annotate --no-emit-index-url --generate-hashes --only-binary :all: --no-emit-package debugpy --python-version 3.11 --python-platform linux requirements.in --output-file requirements.lock

clean:
	rm -rf .venv guest/target launcher/target $(BIN) .mypy_cache .ruff_cache .pytest_cache
