# shellcheck shell=sh
# Sourced by what lies in bin/: the bundle's libraries for one program. $bundle is where the bundle lies.
# libc is the machine's own: it belongs to its kernel and its name services, and a newer one runs what an older one has built.
needs='@GLIBC@'
have=$(getconf GNU_LIBC_VERSION 2>/dev/null)
have=${have#glibc }
if [ -n "$have" ] && [ "$(printf '%s\n%s\n' "$needs" "$have" | sort -V | sed -n 1p)" != "$needs" ]; then
	echo "kvd: this machine has glibc $have and the bundle needs $needs: make the bundle on an older system" >&2
	exit 69
fi

# The C++ library is the machine's own too, where there is one that is new enough: two in one process would quarrel.
# shellcheck disable=SC2154
cxx=$bundle/lib/cxx
for folder in /lib/@MULTIARCH@ /usr/lib/@MULTIARCH@ /lib64 /usr/lib64 /usr/lib; do
	if grep -qs '@GLIBCXX@' "$folder/libstdc++.so.6"; then
		cxx=
		break
	fi
done
LD_LIBRARY_PATH=$bundle/lib${cxx:+:$cxx}${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
KV_TEST_BIN=$bundle/libexec
export LD_LIBRARY_PATH KV_TEST_BIN
