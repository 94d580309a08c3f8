# A front door, nothing more: the build is CMake's (CMakePresets.json), the work is in scripts/.
# `make help` says what there is. With everything installed no target but `install` needs root or the network.
PRESET ?= release
JOBS ?= $(shell nproc)
BUILD = build/$(PRESET)

.DEFAULT_GOAL := help
.PHONY: help deps configure build bundle demo demo-moe demo-pd demo-vllm test crashloop kills mutants test-engines check-engine bench bench-engines lint ci docs install clean

help: ## this text
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

deps: ## install the Debian packages that are missing
	@scripts/deps.sh build

configure: deps
	@cmake --preset $(PRESET) >$(PRESET).configure.log 2>&1 || { cat $(PRESET).configure.log; rm -f $(PRESET).configure.log; exit 1; }
	@rm -f $(PRESET).configure.log

build: configure ## configure and build (PRESET=release)
	@cmake --build $(BUILD) -j $(JOBS)

demo: configure ## a small transformer stops recomputing prompts it has seen (TRACE=file replays your own trace)
	@cmake --build $(BUILD) -j $(JOBS) --target kvd kvd-meta kvd-net kvctl kve-chat
	@scripts/demo.sh $(BUILD)

demo-moe: configure ## a mixture of experts on several ranks, whose prompts are found again on another number of them
	@cmake --build $(BUILD) -j $(JOBS) --target kvd kvd-meta kvd-net kvctl kve kve-chat
	@scripts/demo_moe.sh $(BUILD)

demo-pd: configure ## one engine computes prompts, another generates; the first is killed half way, and every token is equal
	@cmake --build $(BUILD) -j $(JOBS) --target kvd kvd-meta kvd-net kvctl kve-pd
	@scripts/demo_pd.sh $(BUILD)

demo-vllm: ## a real vLLM (CPU) finds its prompts again after it, and after the daemon, was restarted (makes a venv: 2.8 GB)
	@scripts/demo_vllm.sh

test: build ## every test
	@scripts/test.sh $(BUILD) -j $$((2 * $(JOBS)))

crashloop: build ## 1,000 rounds of faults of the disk, kills and losses of power, with every acknowledgement checked (ROUNDS=100)
	@$(BUILD)/bin/test_e2e_crashloop $(or $(ROUNDS),1000)

kills: build ## 300 hand-overs in which a process of either side is killed or stopped (ROUNDS=18)
	@$(BUILD)/bin/test_e2e_kills $(or $(ROUNDS),300)

mutants: deps ## rules broken one by one: some test must fail for each (MUTANTS=expression)
	@scripts/mutants.sh $(MUTANTS)

test-engines: ## every promise under a real vLLM (ENGINES=short: 8 minutes)
	@scripts/test_engines.sh $(or $(ENGINES),full) || [ $$? -eq 77 ]

check-engine: ## what kvd makes of a release of vLLM, from its source (VERSION=0.33.0, or its folder or archive)
	@python3 tests/engines/releases.py $(or $(VERSION),$(error VERSION=0.33.0))

bench: build ## every benchmark, one JSON object a line
	@scripts/deps.sh bench
	@$(BUILD)/bin/kvd-bench all --json

bench-engines: ## a real vLLM beside its alternatives, one JSON object a line (BENCH="--only ttft --lengths 1024")
	@python=$$(scripts/engines.sh) && $$python bench/engines/run.py $(BENCH)

lint: deps ## format, clang-tidy, structure
	@scripts/deps.sh lint
	@scripts/lint.sh

ci: deps ## lint, second compiler, fuzzing, sanitizers
	@scripts/ci.sh

docs: build ## write the generated documentation again
	@scripts/docs.sh $(BUILD)

bundle: build ## one file with what a machine without network needs (BUNDLE="--dev --tests -o kvd.tar.xz")
	@scripts/offline-bundle --build $(BUILD) $(BUNDLE)

install: build ## install below PREFIX (default /usr/local); DESTDIR is honoured
	@cmake --install $(BUILD) $(if $(PREFIX),--prefix $(PREFIX))

clean: ## remove the build folders
	@rm -rf build
