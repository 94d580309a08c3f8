#!/usr/bin/env bash
# Draw docs/ttft.svg from the first table of docs/figures.md: one panel a prompt length, one bar a row, each panel with a scale of its own.
# usage: scripts/figure.sh [--check]      --check: change nothing; exit 1 when the picture is not that of the table
set -euo pipefail
cd "$(dirname "$0")/.."

draw() {
	awk -F ' *[|] *' '
	function text(x, y, anchor, class, what) {printf "<text x=\"%g\" y=\"%g\" text-anchor=\"%s\" class=\"%s\">%s</text>\n", x, y, anchor, class, what}
	/^\| ms / {for (i = 3; i < NF; i++) panel[++panels] = $i; reading = 1; next}
	reading && !/^\|/ {exit}
	reading && !/^\|-/ {name[++rows] = $2; for (i = 1; i <= panels; i++) {value[i, rows] = $(i + 2); most[i] = value[i, rows] > most[i] ? value[i, rows] : most[i]}}
	END {
		left = 172; width = 190; gap = 20; bar = 18; step = 26; top = 34
		total = left + panels * (width + gap); height = top + rows * step + 8
		printf "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" width=\"%d\" height=\"%d\" role=\"img\" aria-label=\"Time to the first token in milliseconds\">\n", total, height, total, height
		print "<style>text{font:13px sans-serif;fill:#57606a}.head,.kvd{font-weight:bold}.bar{fill:#8c959f}.ours{fill:#1f883d}@media(prefers-color-scheme:dark){text{fill:#b1bac4}}</style>"
		for (r = 1; r <= rows; r++) text(left - 10, top + (r - 1) * step + 14, "end", name[r] == "kvd" ? "kvd" : "name", name[r])
		for (i = 1; i <= panels; i++) {
			x = left + (i - 1) * (width + gap)
			text(x, 20, "start", "head", panel[i])
			for (r = 1; r <= rows; r++) {
				y = top + (r - 1) * step
				long = (width - 60) * value[i, r] / most[i]
				printf "<rect x=\"%g\" y=\"%g\" width=\"%.1f\" height=\"%g\" class=\"%s\"/>\n", x, y, long < 1 ? 1 : long, bar, name[r] == "kvd" ? "ours" : "bar"
				text(x + long + 6, y + 14, "start", name[r] == "kvd" ? "kvd" : "ms", value[i, r] " ms")
			}
		}
		print "</svg>"
	}' docs/figures.md
}

if [ "${1:-}" = --check ]; then
	diff <(draw) docs/ttft.svg
else
	draw >docs/ttft.svg
fi
