# The language of comments, documents and names. usage: awk -f scripts/words.awk scripts/words.tsv scripts/words.allow FILES...
# words.tsv: a refused expression, a tab, what to write instead. words.allow: a file, a tab, the expression or word, a tab, why it may
# stand there; a folder and * for all in it. In comments of C, files, types and functions must exist, and no line exceeds 120 columns.

function complain(text) {
	print FILENAME ":" FNR ": " text
}

# The text of a C line outside comments goes to code, the rest to comment.
function split_c(line,    open, close_at, slashes) {
	code = comment = ""
	gsub(/"([^"\\]|\\.)*"/, "&", line)
	while (line != "") {
		if (in_comment) {
			close_at = index(line, "*/")
			comment = comment " " (close_at ? substr(line, 1, close_at - 1) : line)
			line = close_at ? substr(line, close_at + 2) : ""
			in_comment = !close_at
		} else {
			open = index(line, "/*")
			slashes = match(line, /(^|[^:"])\/\//) ? RSTART : 0
			if (slashes && (!open || slashes < open)) {
				code = code substr(line, 1, slashes)
				comment = comment substr(line, slashes + 2)
				line = ""
			} else if (open) {
				code = code substr(line, 1, open - 1)
				line = substr(line, open + 2)
				in_comment = 1
			} else {
				code = code line
				line = ""
			}
		}
	}
}

function remember(text,    word) {
	while (match(text, /[A-Za-z_][A-Za-z0-9_]*/)) {
		known[substr(text, RSTART, RLENGTH)] = 1
		text = substr(text, RSTART + RLENGTH)
	}
}

function refused(text,    k, lower) {
	lower = " " tolower(text) " "
	for (k = 1; k <= rules; k++)
		if (match(lower, "[^a-z0-9_]" rule[k] "[^a-z0-9_]") && !((FILENAME, rule[k]) in allowed)) complain("\"" substr(lower, RSTART + 1, RLENGTH - 2) "\": " instead[k])
}

function pending_file(    k) {
	for (k = 1; k <= pendings; k++) if (index(FILENAME, pending[k]) == 1) return 1
	return 0
}

# Is this the end of a known name?
function ends(tail,    name) {
	for (name in known)
		if (substr(name, length(name) - length(tail) + 1) == tail) return 1
	return 0
}

# Is this word of a comment, where it looks like the name of a function, type or file, one?
function exists(file, word) {
	if (word ~ /\*/ || (file, word) in allowed) return 1
	if (word ~ /^_.*\(\)$/) return ends(substr(word, 1, length(word) - 2))
	if (word ~ /\(\)$/) return substr(word, 1, length(word) - 2) in known
	if (word ~ /^[a-z0-9_]+_t$/) return word in known
	if (word !~ /^[A-Za-z0-9_][A-Za-z0-9_.\/-]*\.(c|h|cu|cuh|py|sh|md|awk)$/) return 1
	sub(/^.*\//, "", word)
	return word in base
}

FNR == 1 {
	part++
	in_comment = 0
	held = part > 2 && !pending_file()
	leaf = FILENAME
	sub(/^.*\//, "", leaf)
	base[leaf] = 1
}
/^#/ && part <= 2 { next }
part == 1 {
	split($0, field, "\t")
	rule[++rules] = field[1]
	instead[rules] = field[2]
	next
}
part == 2 {
	split($0, field, "\t")
	allowed[field[1], field[2]] = 1
	if (field[2] == "*") pending[++pendings] = field[1]
	next
}
FILENAME ~ /\.(c|h|cu|cuh)$/ {
	split_c($0)
	remember(code)
	if (comment != "") {
		if (FILENAME !~ /^tests\// && length($0) > 120) complain("comment of more than 120 columns")
		if ($0 ~ /^( \*|\/\/) ?----------/) complain("a separator is one line")
		file[++comments] = FILENAME
		place[comments] = FNR
		text[comments] = comment
	}
	if (held) refused($0)
	if (held && match($0, /^[a-z][a-z0-9_ *]*[ *](kv[a-z]?_)?(look|settle|turn|end|say|name|mend|note|pass|tell|keep|ask|take|give|leave|judge|hang|go|rest|again|beside|behind|within)\(/)) complain("a function's name is a verb and an object")
	next
}
{
	remember($0)
	if (held) refused($0)
}

END {
	for (k = 1; k <= comments; k++) {
		line = text[k]
		while (match(line, /[A-Za-z0-9_*.\/-]+(\(\))?/)) {
			word = substr(line, RSTART, RLENGTH)
			line = substr(line, RSTART + RLENGTH)
			if (!exists(file[k], word)) print file[k] ":" place[k] ": " word " does not exist"
		}
	}
}
