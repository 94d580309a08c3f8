# Files, or with -v folders=1 folders, whose functions call each other both ways, from the symbols of their objects (nm -A -P).
# usage: nm -A -P OBJECTS | awk -v root=BUILD -v part=FOLDER/ -v pairs=LIMIT -v circle=LIMIT -f scripts/circles.awk
# part: a regular expression, without the files' names: 'kernels/.*' is the folder with those below it. -v list=1 prints every pair.
# A pair is two of them that use symbols of each other. A circle is a set; each member reaches every other.

function source(object,    path) {
	path = substr(object, length(root) + 2)
	sub(/CMakeFiles\/[^\/]*\.dir\//, "", path)
	sub(/\.o:?$/, "", path)
	return path
}

{
	file = source($1)
	if (file !~ "^" part "[^/]*$" || file ~ /__\//) next
	if (!(file in exists)) {
		exists[file] = (getline line < file) >= 0 # else the object of a file that has gone
		close(file)
	}
	if (!exists[file]) next
	if (folders) sub(/\/[^\/]*$/, "", file)
	if (!(file in number)) {
		number[file] = ++files
		name[files] = file
	}
	if ($3 == "U") uses[number[file] SUBSEP $2] = 1
	else if ($3 ~ /^[TDBRC]$/) home[$2] = number[file]
}

END {
	what = folders ? "folders" : "files"
	for (use in uses) {
		split(use, at, SUBSEP)
		if ((at[2] in home) && home[at[2]] != at[1]) reach[at[1], home[at[2]]] = 1
	}
	for (a = 1; a <= files; a++)
		for (b = a + 1; b <= files; b++)
			if ((a, b) in reach && (b, a) in reach) pair[++found] = name[a] " <-> " name[b]
	for (k = 1; k <= files; k++)
		for (a = 1; a <= files; a++)
			if ((a, k) in reach)
				for (b = 1; b <= files; b++)
					if ((k, b) in reach) reach[a, b] = 1
	for (a = 1; a <= files; a++) {
		if (a in taken) continue
		members = name[a]
		size = 1
		for (b = a + 1; b <= files; b++)
			if ((a, b) in reach && (b, a) in reach) {
				taken[b] = 1
				members = members " " name[b]
				size++
			}
		if (size > circle) print part ": circle of " size " " what ", at most " circle ": " members
	}
	if (!files) print part ": no objects: make build"
	if (found > pairs) print part ": " found " pairs of " what " call each other both ways, at most " pairs
	if (found > pairs || list)
		for (k = 1; k <= found; k++) print "  " pair[k]
}
