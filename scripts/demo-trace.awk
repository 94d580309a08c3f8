# Writes a request trace in Mooncake's format: timestamp in ms, input_length and output_length in tokens, hash_ids of the prompt's 512-token blocks.
# Conversations share a few system prompts and grow turn by turn; the last, partial block of a prompt is replaced when the next turn goes on.
#   awk -v seed=1 [-v requests=600] -f demo-trace.awk

# Lehmer's generator; exact in doubles.
function draw(n) {
	state = (state * 16807) % 2147483647
	return state % n
}

# Start conversation c anew, from one of the system prompts.
function open_conversation(c, s, i) {
	s = draw(4)
	if (!(s in system_prompt)) {
		for (i = 0; i < 2 + 2 * s; i++) {
			system_prompt[s] = system_prompt[s] (i ? ", " : "") next_id++
		}
	}
	whole[c] = system_prompt[s]
	blocks[c] = 2 + 2 * s
	turns[c] = 1 + draw(8)
}

BEGIN {
	state = seed + 12345
	requests = requests ? requests : 600
	for (r = 0; r < requests; r++) {
		c = draw(24)
		if (turns[c] == 0) {
			open_conversation(c)
		}
		time += draw(400)
		tail = 1 + draw(511)
		printf "{\"timestamp\": %d, \"input_length\": %d, \"output_length\": %d, \"hash_ids\": [%s, %d]}\n",
			time, blocks[c] * 512 + tail, 16 + draw(480), whole[c], next_id++
		for (i = 1 + draw(3); i > 0; i--) {
			whole[c] = whole[c] ", " next_id++
			blocks[c]++
		}
		turns[c]--
	}
}
