#!/usr/bin/env bash
# Install the Debian packages that kvd needs and that are missing; say what is done. Does nothing, and needs neither root nor network, when all are there.
# usage: scripts/deps.sh [build] [lint] [ci] [engines] [bench]
set -euo pipefail

declare -A groups=(
	[build]="gcc libc6-dev cmake ninja-build pkg-config liburing-dev librocksdb-dev libzmq3-dev libmsgpack-dev libxxhash-dev
		libssl-dev libmicrohttpd-dev libcurl4-openssl-dev libyaml-dev libjson-c-dev libucx-dev libcmocka-dev g++ python3 procps"
	[lint]="clang-14 clang-tidy-14 clang-format-14 shellcheck"
	[ci]="clang-14 libclang-rt-14-dev llvm-14 strace nftables iproute2"
	[engines]="python3 python3-venv python3-dev libnuma1 gcc g++ binutils"
	[bench]="fio e2fsprogs util-linux ucx-utils"
)

missing=()
for group in "${@:-build}"; do
	for package in ${groups[$group]:?unknown group $group}; do
		if [ "$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null)" != installed ]; then
			missing+=("$package")
		fi
	done
done
if [ ${#missing[@]} -eq 0 ]; then
	exit 0
fi

if ! command -v apt-get >/dev/null; then
	echo "deps: this is not Debian; please install the equivalents of: ${missing[*]}" >&2
	exit 1
fi
sudo=()
if [ "$(id -u)" -ne 0 ]; then
	if ! command -v sudo >/dev/null; then
		echo "deps: missing packages and neither root nor sudo: ${missing[*]}" >&2
		exit 1
	fi
	sudo=(sudo)
fi
echo "deps: installing ${missing[*]}"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
install=("${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${missing[@]}")
if ! { "${sudo[@]}" apt-get update && "${install[@]}"; } >"$log" 2>&1; then
	tail -n 20 "$log" >&2
	echo "deps: installation failed" >&2
	exit 1
fi
echo "deps: done"
