/* kvctl peers: the daemons of other nodes, as the net process sees them. */
#include "kvctl.h"

#include "kv/units.h"

#include <stdio.h>
#include <string.h>

static void print_peer(struct json_object *peer)
{
	const uint64_t failed = kvctl_u64(peer, "fetch_failed") + kvctl_u64(peer, "serve_failed");
	char in[32], out[32], moving[32], address[96];

	snprintf(address, sizeof address, "%.70s:%llu", kvctl_str(peer, "address"),
		 (unsigned long long)kvctl_u64(peer, "port"));
	printf("%-16s %-21s %-8s %-5s %-8s %-4s %9s %9s %9s %8llu %8llu %6llu ", kvctl_str(peer, "name"), address,
	       kvctl_str(peer, "state"), kvctl_str(peer, "bytes"), kvctl_str(peer, "key"),
	       kvctl_bool(peer, "asks", 0) ? "yes" : "no", kv_format_size(kvctl_u64(peer, "bytes_in"), in, sizeof in),
	       kv_format_size(kvctl_u64(peer, "bytes_out"), out, sizeof out),
	       kv_format_size(kvctl_u64(peer, "in_flight_bytes"), moving, sizeof moving),
	       (unsigned long long)kvctl_u64(peer, "fetched"), (unsigned long long)kvctl_u64(peer, "served"),
	       (unsigned long long)failed);
	kvctl_print_text(kvctl_str(peer, "error"));
	putchar('\n');
}

static void print_net(struct json_object *net)
{
	if (!net) {
		puts("no peers are configured (peers.addresses)");
		return;
	}
	printf("name %s, net process %s", kvctl_str(net, "name"), kvctl_bool(net, "running", 0) ? "running" : "off");
	if (kvctl_u64(net, "restarts") > 0) {
		printf(" (restarted %llu times)", (unsigned long long)kvctl_u64(net, "restarts"));
	}
	if (kvctl_u64(net, "crashes") > 0) {
		printf(", crashed %llu times (%s)", (unsigned long long)kvctl_u64(net, "crashes"),
		       kvctl_str(net, "crash"));
	}
	if (kvctl_str(net, "ucx")[0]) {
		printf(", UCX %s", kvctl_str(net, "ucx"));
	} else if (kvctl_str(net, "ucx_error")[0]) {
		printf(", no UCX: ");
		kvctl_print_text(kvctl_str(net, "ucx_error"));
	}
	if (kvctl_str(net, "listen_error")[0]) {
		printf(", ");
		kvctl_print_text(kvctl_str(net, "listen_error"));
	}
	putchar('\n');
}

int kvctl_peers(const kvctl_t *ctl)
{
	struct json_object *json = NULL, *peers;
	int code = kvctl_document(ctl, KVC_DOC_PEERS, 0, &json, NULL);
	size_t count;

	if (code != 0) {
		return code;
	}
	if (ctl->json) {
		kvctl_print_json(json);
		json_object_put(json);
		return 0;
	}
	peers = kvctl_member(json, "peers");
	count = json_object_is_type(peers, json_type_array) ? json_object_array_length(peers) : 0;
	print_net(kvctl_member(json, "net"));
	if (count > 0) {
		printf("%s%-16s %-21s %-8s %-5s %-8s %-4s %9s %9s %9s %8s %8s %6s %s%s\n", kvctl_tone(ctl, KVCTL_BOLD),
		       "PEER", "ADDRESS", "STATE", "OVER", "KEY", "ASKS", "IN", "OUT", "MOVING", "FETCHED", "SERVED",
		       "FAILED", "LAST ERROR", kvctl_tone_end(ctl));
	}
	for (size_t i = 0; i < count; i++) {
		print_peer(json_object_array_get_idx(peers, i));
	}
	json_object_put(json);

	return 0;
}
