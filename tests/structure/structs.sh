#!/bin/bash
# Every struct of the installed headers begins with struct_size, or is listed here: structs.sh INCLUDE_DIR
set -euo pipefail
fixed="
kv_key kvc_key kvc_chain kvc_handle     plain values, which callers copy and send
kv_slice                                a plain value
kvc_group_info kvc_writer               passed in arrays
kvx_worker_group kvk_range kvx_device   likewise
kvc_key_source kvx_hashes               a function with its context
kvc_memory                              what the library passes to a function of the caller
kvk_layout kvk_geometry kvk_paged       of the kernels: compiled into both sides of a copy
"
reasoned=$(sed 's/   .*//' <<<"$fixed")
bad=0
all=$(find "$1" -name '*.h' -exec awk '
	name != "" {if (!/^[ \t]*size_t struct_size;/) print name; else print name, "grows"; name = ""}
	/^(typedef )?struct [a-z0-9_]+ \{$/ {name = $0; sub(/^(typedef )?struct /, "", name); sub(/ \{$/, "", name)}
	/^typedef struct \{/ {print "without_a_name"}' {} +)
for name in $(grep -v ' grows$' <<<"$all"); do
	if ! grep -qw "$name" <<<"$reasoned"; then
		echo "struct $name does not begin with struct_size, and $0 has no reason why not"
		bad=1
	fi
done
for name in $reasoned; do
	if ! grep -qx "$name" <<<"$all"; then
		echo "$0 lists $name, which no installed header has as a struct of fixed size"
		bad=1
	fi
done
if [ "$(grep -c ' grows$' <<<"$all")" -lt 30 ]; then
	echo "few structs were found in $1"
	bad=1
fi
exit $bad
