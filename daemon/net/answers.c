/* What the daemon is answered. */
#include "net/net.h"

#include <string.h>
#include <sys/socket.h>

void kvd_net_answer(kvd_net_t *net, uint64_t order, kv_status_t status)
{
	if (net->answer_count < KVD_NET_ASKED_MAX) { /* so it is: the daemon lets no more wait */
		net->answers[net->answer_count++] = (kvd_net_answer_t){.order = order, .status = status};
	}
}

void kvd_net_send_answers(kvd_net_t *net)
{
	while (net->answer_count > 0) {
		kvd_net_begun_t message = {.version = KVD_NET_WIRE, .verb = KVD_NET_VERB_BEGUN};

		message.count = net->answer_count < KVD_NET_BEGUN_MAX ? net->answer_count : KVD_NET_BEGUN_MAX;
		memcpy(message.answers, net->answers, message.count * sizeof message.answers[0]);
		if (send(KVD_NET_FD, &message, sizeof message, MSG_DONTWAIT | MSG_NOSIGNAL) < 0) {
			return; /* there is no room now; or the daemon has gone, which take_order() sees */
		}
		net->answer_count -= message.count;
		memmove(net->answers, net->answers + message.count, net->answer_count * sizeof net->answers[0]);
	}
}
