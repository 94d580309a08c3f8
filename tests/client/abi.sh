#!/bin/sh
# One ABI version: the header's, the soname's, the version node's and kvc_version()'s. One version of kvd: CMakeLists.txt's and the package's. abi.sh LIBRARY KVCTL SOURCES
set -eu
library=$1
kvctl=$2
sources=$3
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
dynamic=$(readelf -d "$library")
same soname "$(printf '%s\n' "$dynamic" | sed -n 's/.*SONAME.*\[\(.*\)\]/\1/p')" "libkvc.so.$abi"
symbols=$(nm -D --defined-only "$library")
same "version node" "$(printf '%s\n' "$symbols" | sed -n 's/.* kvc_attach@@//p')" "KVC_$abi"
said=$("$kvctl" version --socket /nonexistent | sed -n 's/^kvctl .*(\(kvc .*\) wire [0-9]*)$/\1/p')
same "kvc_version()" "$said" "kvc $version abi $abi"
same "version of kvd_vllm" "$package" "$version"
grep -q "^## $version" "$sources/CHANGELOG.md" || same "CHANGELOG.md" "no section" "$version"
exit $failed
