#!/usr/bin/env bash
# Format, clang-tidy and the rules of structure that a compiler does not know. Each finding is one line; the exit code says whether there was any.
# usage: scripts/lint.sh [format|tidy|size|includes|circles|metrics|words|shell ...]   (default: all)      LINT_THIRD=1: clang-tidy on a part of the files
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
failed=0

sources() { git ls-files --cached --others --exclude-standard -- "$@"; }
all_c() { sources 'common/*.[ch]' 'kernels/*.[ch]' 'storage/*.[ch]' 'daemon/*.[ch]' 'client/*.[ch]' 'connectors/*.[ch]' 'proxy/*.[ch]' 'engine/*.[ch]' 'bench/*.[ch]' 'examples/*.[ch]' 'tests/*.[ch]'; }
report() {
	if [ -n "$1" ]; then
		printf '%s\n' "$1"
		failed=1
	fi
}

lint_format() {
	report "$(all_c | grep -v -e metric_list.h -e metric_ns_list.h -e requests.h -e status.h | xargs clang-format-14 --dry-run -Werror 2>&1 | grep -E 'error:' | cut -d: -f1,2 | sort -u | sed 's/$/: not formatted (clang-format-14 -i)/' | sed -n 1,20p)"
}

# Of the files on standard input: what changed in the six hours up to the last commit and since, and a third of the rest, which that commit's hash chooses.
choose_third() {
	local commit third since
	commit=$(git rev-parse --short=7 HEAD)
	third=$((16#$commit % 3))
	since=$(($(git show -s --format=%ct HEAD) - 6 * 3600))
	echo "lint: clang-tidy on what changed in six hours, and on third $third of the rest (commit $commit)" >&2
	awk -v third=$third 'FILENAME != "-" { changed[$0]; next } $0 in changed || FNR % 3 == third' \
		<(git log --since=$since --diff-filter=AM --name-only --format= && git diff --name-only HEAD) -
}

# clang-tidy on what the release build compiles, tests left out. One file a process: clang 14's va_list checker remembers identifiers of the
# first file a process reads, and in the next takes whatever function lies at that address for va_start.
lint_tidy() {
	local out choose=cat
	[ "${LINT_THIRD:-0}" = 0 ] || choose=choose_third
	out=$(all_c | grep '\.c$' | grep -v '^tests/' | $choose | xargs -P "$(nproc)" -n 1 clang-tidy-14 -p build/release --quiet 2>/dev/null | grep -E '(warning|error):')
	report "$(printf '%s' "$out" | sort -u | sed -n 1,60p)"
}

# Functions of at most 70 lines and 6 parameters, files of at most 1,000 lines, folders of source of at most 25 files.
lint_size() {
	report "$({ all_c; sources '*.cu' '*.cuh'; } | xargs wc -l | awk '$2 != "total" && $1 > 1000 {print $2 ": file of " $1 " lines, at most 1,000"}')"
	report "$(all_c | grep -v '^tests/' | awk '{sub("/[^/]*$", ""); files[$0]++} END {for (folder in files) if (files[folder] > 25) print folder ": folder of " files[folder] " files, at most 25"}')"
	report "$(all_c | grep '\.c$' | xargs awk '
		FNR == 1 {inside = 0}
		/^\{/ {inside = 1; start = FNR}
		/^\}/ {if (inside && FNR - start + 2 > 72) print FILENAME ":" start ": function of " FNR - start - 1 " lines, at most 70"; inside = 0}')"
	report "$(all_c | grep -v '^tests/' | xargs awk '
		/^[a-z].*\($/ || /^(static |const |_Noreturn |inline )*[a-z_]+[a-z0-9_ *]*\**[a-z0-9_]+\(/ {sig = ""; collecting = 1; line = FNR}
		collecting {sig = sig $0; if ($0 ~ /[;{]$/ || $0 ~ /\)$/) {collecting = 0; if (sig ~ /\)$/ || sig ~ /\);$/) {n = gsub(/,/, ",", sig); if (n + 1 > 6 && sig !~ /\.\.\./) print FILENAME ":" line ": " n + 1 " parameters, at most 6"}}}' | sed -n 1,40p)"
}

# Who may include whom, and what the core may include.
allowed() {
	case $1 in
	common) echo 'kv|hash|option|wire' ;;
	kernels) echo 'kv|kvk|layout|cpu|cuda|ep|nn' ;;
	storage) echo 'kv|kvk|kvs|cpu|nvme|metadb' ;;
	daemon) echo 'kv|kvk|kvs|base|core|gpu|io|net|options' ;;
	client) echo 'kv|kvk|base|kvctl' ;;
	connectors) echo 'kv|kvk|kvx|common|inproc|scheduler|step|worker' ;;
	proxy) echo 'kv|base|events|http' ;;
	engine) echo 'kv|kvk|kve|bf16' ;;
	esac
}
lint_includes() {
	local part
	for part in common kernels storage daemon client connectors proxy engine; do
		report "$(sources "$part/*.[ch]" | xargs grep -nE '^#include "[a-z]+/' /dev/null | grep -vE "#include \"($(allowed $part))/" | sed 's/$/   <- this part may not know that one/')"
	done
	# daemon/net is a program on top: a member like any engine.
	report "$(sources 'daemon/*.[ch]' 'storage/*.[ch]' 'kernels/*.[ch]' 'common/*.[ch]' | grep -v '^daemon/net/' | xargs grep -nE '#include "kv[cx](\.h|/)' /dev/null | sed 's/$/   <- client and connectors are above this part/')"
	report "$(sources 'client/*.[ch]' | xargs grep -nE '#include "kvx' /dev/null)"
	report "$(sources 'engine/overlap/*.[ch]' engine/include/kve/{overlap,dbo,clock,span}.h | xargs grep -nE '^#include "' /dev/null | grep -vE '"(kv/|kve/(overlap|dbo|clock|span)\.h")' | sed 's/$/   <- overlap knows phases and streams: neither kernels, nor requests, nor the transport/')"
	report "$(sources 'daemon/core/*.[ch]' | xargs grep -nE '^#include <' | grep -vE '<(stdint|stddef|string|stdatomic|stdarg|stdio|inttypes|stdbool|limits)\.h>' | sed 's/$/   <- the core reaches the world through its ops only/')"
	report "$(sources 'daemon/core/*.[ch]' | xargs grep -nE '\b(malloc|calloc|realloc|free|printf|fprintf|time|clock_gettime|rand|getrandom)\(' | grep -vE '^[^:]*:[0-9]+:\s*(\*|/\*|//)' | sed 's/$/   <- the core reaches the world through its ops only/')"
}

# A metric nobody updates is a lie.
lint_metrics() {
	local name
	for name in $(sed -n 's/^\tX(\([A-Z_]*\),.*/KV_M_\1/p' common/include/kv/metric_list.h; sed -n 's/^\tX(\([A-Z_]*\),.*/KV_NM_\1/p' common/include/kv/metric_ns_list.h; sed -n '1,/ENGINE_METRIC_LIST/s/^\tX(\([A-Z_]*\),.*/KVP_M_\1/p' proxy/metric_list.h; sed -n '/ENGINE_METRIC_LIST/,$s/^\tX(\([A-Z_]*\),.*/KVP_EM_\1/p' proxy/metric_list.h); do
		if ! grep -rqE "$name\b" --include='*.c' common storage daemon proxy; then
			report "the metric $name is never updated"
		fi
	done
}

# Nothing of ours ends an engine's process: kv_holds() gives up and detaches.
lint_engine() {
	report "$(sources 'client/*.[ch]' 'connectors/*.[ch]' 'connectors/vllm/src/*.[ch]' 'kernels/*.[ch]' | grep -v '^client/kvctl/' | xargs grep -nE '\b(kv_assert|assert|abort|__builtin_trap|_exit|exit|raise)\(' | grep -vE '^[^:]*:[0-9]+:\s*(\*|/\*|//)' | sed 's/$/   <- inside an engine: kv_holds(), and give up/')"
}

# Files and folders that call each other both ways, from the objects of a build: pairs, and the greatest circle. Folders never do.
lint_circles() {
	local part pairs circle symbols build=${KVD_BUILD:-build/release}
	symbols=$(find "$build" -path '*/tests/*' -prune -o -name '*.c.o' -exec nm -A -P {} + 2>/dev/null)
	count() { printf '%s\n' "$symbols" | awk -v root="$build" -v part="$1" -v pairs="$2" -v circle="$3" -v folders="$4" -f scripts/circles.awk; }
	for part in common client engine kernels storage daemon connectors proxy; do
		report "$(count "$part/(.*/)?" 0 1 1)"
	done
	while read -r part pairs circle; do
		report "$(count "$part" "$pairs" "$circle" 0)"
	done <<-'END'
		common/.* 0 3
		client/.* 0 3
		engine/.* 0 3
		kernels/.* 0 1
		storage/.* 0 1
		daemon/core/.* 0 1
		daemon/gpu/.* 0 1
		daemon/io/.* 0 1
		daemon/net/.* 0 1
		daemon/ 0 1
		connectors/.* 0 3
		proxy/.* 0 1
	END
}

# The language of names, comments and documents: scripts/words.awk.
lint_words() {
	report "$(sources '*.[ch]' '*.cu' '*.cuh' '*.py' '*.sh' '*.awk' '*.md' '*.cmake' '*CMakeLists.txt' | xargs awk -f scripts/words.awk scripts/words.tsv scripts/words.allow)"
}

# A reader that stops early (grep -q, grep -m, head, sed q) ends its writer with SIGPIPE, which pipefail takes for a failure: now and then only.
shell_files() { sources 'scripts/*.sh' 'scripts/lines' 'scripts/gpu-x2' 'scripts/offline-bundle' 'scripts/bundle/[cprw]*' '.ci/run' 'tests/*.sh' 'bench/*.sh'; }
lint_shell() {
	report "$(shell_files | xargs shellcheck -S warning -f gcc 2>&1)"
	report "$(shell_files | xargs grep -nE '(^|[^|])\|[[:space:]]*(head|grep([[:space:]]+-[^[:space:]]+)*[[:space:]]+-[A-Za-z]*[qm]|sed[^|]*[[:space:]'\''0-9;/{]q['\'';}[:space:]])' /dev/null |
		grep -vE '^[^:]*:[0-9]+:[[:space:]]*#' | sed 's/$/   <- stops reading early: read all (sed -n 1p), or ask a variable/')"
}

[ $# -gt 0 ] || set -- format size includes circles metrics engine words shell tidy
for rule in "$@"; do
	if ! declare -F "lint_$rule" >/dev/null; then
		echo "lint: no rule is called $rule" >&2
		exit 64
	fi
	"lint_$rule"
done
[ $failed -eq 0 ] && echo "lint: clean ($*)"
exit $failed
