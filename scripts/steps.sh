# shellcheck shell=bash
# For sourcing: the steps of a long check and the seconds of each, through all scripts of one run (CHECK_STEPS: the file with the moments).
if [ -z "${CHECK_STEPS:-}" ]; then
	mkdir -p build
	export CHECK_STEPS=$PWD/build/steps.tsv
	: >"$CHECK_STEPS"
fi

# step NAME: this one begins here, and the one before has ended.
step() {
	printf '%s\t%s\n' "$(date +%s)" "$1" >>"$CHECK_STEPS"
	printf '\n== %s\n' "$1"
}

# The table. A check of more than 2,100 s warns, because 2,400 are what it may take on two cores.
steps_table() {
	awk -F '\t' -v now="$(date +%s)" '
		function end(at) { if (name != "") printf "%6d s  %s\n", at - start, name }
		NR == 1 { first = $1 }
		{ end($1); start = $1; name = $2 }
		END {
			end(now)
			printf "%6d s  all\n", now - first
			if (now - first > 2100) print "warning: the check takes more than 2,100 s"
		}' "$CHECK_STEPS"
}
