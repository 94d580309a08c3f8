#!/bin/sh
# One ABI version a library: the header's, the soname's, the version node's, and kvc_version()'s. One version of kvd: CMakeLists.txt's and the package's.
# abi.sh LIBKVC LIBKVX KVCTL SOURCES
set -eu
libkvc=$1
libkvx=$2
kvctl=$3
sources=$4
abi=$(sed -n 's/^#define KVC_ABI_VERSION //p' "$sources/client/include/kvc.h")
version=$(sed -n 's/^project(kvd VERSION \([0-9.]*\).*/\1/p' "$sources/CMakeLists.txt")
package=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' "$sources/connectors/vllm/kvd_vllm/__init__.py")
failed=0
same() {
	if [ "$2" != "$3" ]; then
		echo "$1: $2, not $3"
		failed=1
	fi
}
# LIBRARY NAME NODE FUNCTION ABI
library() {
	dynamic=$(readelf -d "$1")
	same "soname of $2" "$(printf '%s\n' "$dynamic" | sed -n 's/.*SONAME.*\[\(.*\)\]/\1/p')" "$2.so.$5"
	symbols=$(nm -D --defined-only "$1")
	same "version node of $2" "$(printf '%s\n' "$symbols" | sed -n "s/.* $4@@//p")" "$3_$5"
}
library "$libkvc" libkvc KVC kvc_attach "$abi"
library "$libkvx" libkvx KVX kvx_attach "$(sed -n 's/^#define KVX_ABI_VERSION //p' "$sources/connectors/include/kvx.h")"
said=$("$kvctl" version --socket /nonexistent | sed -n 's/^kvctl .*(\(kvc .*\) wire [0-9]*)$/\1/p')
same "kvc_version()" "$said" "kvc $version abi $abi"
same "version of kvd_vllm" "$package" "$version"
grep -q "^## $version" "$sources/CHANGELOG.md" || same "CHANGELOG.md" "no section" "$version"
exit $failed
