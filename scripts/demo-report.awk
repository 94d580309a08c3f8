# What the demo says of its runs, each a line of kve-chat --json.
#   awk -v what=last|ranks|overlap|chart|verdict [-v block=#] -f demo-report.awk RESULTS        verdict: exit code 1 when nothing was found or an answer differs

function field(name, at) {
	at = index($0, "\"" name "\":")
	return at ? substr($0, at + length(name) + 3) + 0 : 0
}

{
	match($0, /"phase":"[^"]*"/)
	name[NR] = substr($0, RSTART + 9, RLENGTH - 10)
	found = 100 * (field("hit_cpu_tokens") + field("hit_disk_tokens")) / field("prompt_tokens")
	warm = field("ttft_warm_ns") / 1e6 # of prompts that were mostly found
	ms[NR] = warm ? warm : field("ttft_cold_ns") / 1e6
	most = ms[NR] > most ? ms[NR] : most
	different += field("different")
}

END {
	if (what == "last") {
		printf "   first token after %.1f ms", ms[NR]
		printf warm ? ", %.1f %% of the prompt tokens not computed again\n" : "\n", found
	} else if (what == "ranks") {
		if (field("dispatch_bytes"))
			printf "   %.1f MB of rows between ranks, %d of %d steps in two microbatches\n", (field("dispatch_bytes") + field("combine_bytes")) / 1e6, field("dbo_steps"), field("seq_steps") + field("dbo_steps")
	} else if (what == "overlap") {
		exit !field("dbo_steps")
	} else if (what == "chart") {
		for (i = 1; i <= NR; i++) {
			bar = ""
			for (n = 0; n < 50 * ms[i] / most; n++)
				bar = bar block
			printf "  %-24s %s %.1f ms\n", name[i], bar, ms[i]
		}
	} else {
		if (!warm || different)
			exit 1
		printf "\n%.0f x faster; %.0f %% of the prompt tokens not computed again; every token equal to the run without kvd.\n", ms[1] / warm, found
	}
}
