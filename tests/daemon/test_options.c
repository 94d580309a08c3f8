/* P10: a configuration that is not right is refused with a sentence that points at the place, before anything
 * starts. */
#include "daemon/raw.h"

#include "kvs/ledger.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>

static char out_[1 << 16];

static int run(const char *a, const char *b)
{
	const char *const args[] = {a, b, NULL};

	return raw_run(args, out_, sizeof out_);
}

static void refused(const char *a, const char *b, kv_status_t status, const char *sentence)
{
	assert_int_equal(run(a, b), kv_status_exit_code(status));
	if (!strstr(out_, sentence)) {
		fail_msg("\"%s\" is not in: %s", sentence, out_);
	}
}

KV_TEST(p10_a_misspelt_option_names_the_nearest_one)
{
	refused("--cpu.siez=1GiB", NULL, KV_ERR_CONFIG, "`cpu.size`");
	refused("--keeper", NULL, KV_ERR_CONFIG, "--keeper=VALUE");
	refused("status", NULL, KV_ERR_CONFIG, "--name=value");
}

KV_TEST(p10_a_typo_in_the_file_has_line_and_column)
{
	char dir[64], path[96], place[128];

	kv_test_dir_make(dir, sizeof dir);
	snprintf(path, sizeof path, "%s/kvd.conf", dir);
	snprintf(place, sizeof place, "%s:3:3:", path);
	kv_test_write(path, "# comment\ncpu:\n  siz: 1GiB\n");
	refused("--config", path, KV_ERR_CONFIG, place);
	assert_non_null(strstr(out_, "cpu.size"));
	kv_test_write(path, "cpu.size: lots\n");
	refused("--config", path, KV_ERR_CONFIG, ":1:11:");
	snprintf(path, sizeof path, "%s/missing", dir);
	refused("--config", path, KV_ERR_CONFIG, "missing: cannot read the file");
	assert_int_equal(run("--config", NULL), kv_status_exit_code(KV_ERR_CONFIG));
	kv_test_dir_remove(dir);
}

KV_TEST(p10_options_that_contradict_each_other_are_refused)
{
	const char *const small_disk[] = {"--nvme.path=/tmp", "--nvme.size=64MiB", "--check-config", NULL};

	refused("--cpu.size=8MiB", "--cpu.slab_size=16MiB", KV_ERR_CONFIG, "cpu.slab_size is larger");
	refused("--nvme.path=/tmp", "--nvme.file_size=16GiB", KV_ERR_CONFIG, "nvme.file_size is larger");
	/* defaults that are larger than the limit fit themselves in */
	assert_int_equal(run("--cpu.size=8MiB", "--check-config"), 0);
	assert_int_equal(raw_run(small_disk, out_, sizeof out_), 0);
	refused("--namespaces=a,b,a", NULL, KV_ERR_CONFIG, "there twice");
	refused("--namespaces=a/b", NULL, KV_ERR_CONFIG, "is not a name");
	refused("--sockets.mode=default=0770", NULL, KV_ERR_CONFIG, "a mode from 0600 to 0666");
	refused("--sockets.mode=default", NULL, KV_ERR_CONFIG, "sockets.mode: \"default=\"");
	refused("--sockets.mode=default=0600,default=0660", NULL, KV_ERR_CONFIG, "there twice");
	refused("--sockets.group=other=0", NULL, KV_ERR_CONFIG, "is not one of the namespaces");
	refused("--sockets.group=default=no-such-group", NULL, KV_ERR_CONFIG, "a group of this machine");
	refused("--share.max_cpu=other=10%", NULL, KV_ERR_CONFIG, "share.max_cpu: \"other=10%\" is not name=part");
	refused("--share.max_index=default=0", NULL, KV_ERR_CONFIG, "a number of blocks");
	refused("--share.cpu=default=50%", "--share.max_cpu=default=40%", KV_ERR_CONFIG,
		"less than its share (share.cpu)");
	refused("--nvme.path=/tmp", "--share.max_disk=default=1%", KV_ERR_CONFIG, "less than one slot file");
	refused("--share.cpu=default=100%", "--namespaces=default,b", KV_ERR_CONFIG,
		"leave nothing for other namespaces");
	refused("--policy=random", NULL, KV_ERR_CONFIG, "lru");
}

KV_TEST(p10_options_of_the_gpu_tier_fit_together)
{
	const char *const words[] = {"gpu-1", "GPU-", "GPU-a/b", "fake-8", "fake-01", "fake-", "ALL", "0"};
	char option[64];

	refused("--gpu.size=8MiB", "--gpu.slab_size=16MiB", KV_ERR_CONFIG, "gpu.slab_size is larger");
	refused("--gpu.size=8MiB", "--gpu.slab_size=3MiB", KV_ERR_CONFIG, "a multiple of 2MiB");
	refused("--gpu.size=1MiB", NULL, KV_ERR_CONFIG, "gpu.slab_size is larger");
	refused("--gpu.size=8MiB", "--gpu.devices=fake-0,fake-1,fake-0", KV_ERR_CONFIG, "there twice");
	refused("--gpu.size=8MiB", "--gpu.devices=all,fake-1", KV_ERR_CONFIG, "all stands alone");
	refused("--gpu.size=8MiB", "--gpu.devices=", KV_ERR_CONFIG, "1 to 8 devices");
	refused("--gpu.size=8MiB", "--gpu.devices=GPU-1,GPU-2,GPU-3,GPU-4,GPU-5,GPU-6,GPU-7,GPU-8,GPU-9", KV_ERR_CONFIG,
		"1 to 8 devices");
	for (size_t i = 0; i < KV_COUNT_OF(words); i++) {
		snprintf(option, sizeof option, "--gpu.devices=%s", words[i]);
		refused("--gpu.size=8MiB", option, KV_ERR_CONFIG, "is neither all nor a UUID");
	}
	/* a default that is larger than the size fits itself in */
	assert_int_equal(run("--gpu.size=9MiB", "--check-config"), 0);
}

KV_TEST(p10_a_socket_path_that_is_too_long_is_refused_at_the_start)
{
	char option[200] = "--run_dir=/tmp/";

	memset(option + strlen(option), 'x', 110);
	refused(option, NULL, KV_ERR_PATH, "choose a shorter run_dir");
}

KV_TEST(p10_a_topic_that_is_too_long_is_refused_at_the_start)
{
	char option[300] = "--events.publisher=";
	const char *const fits[] = {option, "--namespaces=b", "--check-config", NULL};

	memset(option + strlen(option), 'x', 255 - strlen("kv@@b"));
	assert_int_equal(raw_run(fits, out_, sizeof out_), 0);
	refused(option, "--namespaces=b,cc", KV_ERR_CONFIG, "events.topic: that of \"cc\" has 256 bytes, 255 fit");
}

KV_TEST(p8_http_is_not_reachable_from_outside_unless_said_twice)
{
	refused("--http.listen=0.0.0.0:9464", NULL, KV_ERR_CONFIG, "http.allow_remote");
	refused("--http.listen=[::]:9464", NULL, KV_ERR_CONFIG, "http.allow_remote");
	refused("--http.listen=9464", NULL, KV_ERR_CONFIG, "neither host:port");
	refused("--http.listen=127.0.0.1:99999", NULL, KV_ERR_CONFIG, "neither host:port");
	refused("--http.listen=127.0.0.1:http", NULL, KV_ERR_CONFIG, "neither host:port");
	const char *const both[] = {"--http.listen=0.0.0.0:9464", "--http.allow_remote=on", "--check-config", NULL};
	assert_int_equal(raw_run(both, out_, sizeof out_), 0);
}

KV_TEST(p10_the_last_source_wins)
{
	char dir[64], path[96], run_dir[96];
	const char *const args[] = {"--config", path, run_dir, "--http.listen=off", "--policy=nonsense", NULL};

	kv_test_dir_make(dir, sizeof dir);
	snprintf(path, sizeof path, "%s/kvd.conf", dir);
	snprintf(run_dir, sizeof run_dir, "--run_dir=%s", dir);
	kv_test_write(path, "policy: fifo\n");
	setenv("KVD_POLICY", "lru", 1);
	assert_int_equal(raw_run(args, out_, sizeof out_),
			 kv_status_exit_code(KV_ERR_CONFIG)); /* the command line has the last word */
	setenv("KVD_POLICY", "wrong", 1);
	refused("--config", path, KV_ERR_CONFIG, "KVD_POLICY");
	unsetenv("KVD_POLICY");
	const char *const good[] = {"--config", path, "--check-config", NULL};
	assert_int_equal(raw_run(good, out_, sizeof out_), 0);
	kv_test_dir_remove(dir);
}

KV_TEST(p6_what_is_exported_for_clients_and_scripts_stops_no_daemon)
{
	static const char *const names[] = {"KVD_SOCKET", "KVD_BUILD", "KVD_VENV", "KVD_PYTHON", "KVD_CUBLAS"};
	const char *const args[] = {"--check-config", NULL};

	for (size_t i = 0; i < KV_COUNT_OF(names); i++) {
		setenv(names[i], "/somewhere", 1);
		assert_int_equal(raw_run(args, out_, sizeof out_), 0);
		assert_null(strstr(out_, names[i]));
		unsetenv(names[i]);
	}
	setenv("KVD_POLICI", "fifo", 1);
	assert_int_equal(raw_run(args, out_, sizeof out_), 0);
	assert_non_null(strstr(out_, "KVD_POLICI is ignored; did you mean `KVD_POLICY`?"));
	unsetenv("KVD_POLICI");
}

KV_TEST(p10_help_and_version_start_nothing)
{
	assert_int_equal(run("--version", NULL), 0);
	assert_non_null(strstr(out_, "kvd " KVD_VERSION " (")); /* and the revision */
	assert_int_equal(run("--help", NULL), 0);
	assert_non_null(strstr(out_, "usage: kvd"));
}

static void same_as_file(const char *option, const char *path)
{
	static char text[1 << 16];

	assert_true(kv_test_read(path, text, sizeof text) > 0);
	assert_int_equal(run(option, NULL), 0);
	if (strcmp(text, out_) != 0) {
		fail_msg("%s is not what kvd %s prints: run scripts/docs.sh", path, option);
	}
}

KV_TEST(p10_sample_and_page_are_those_of_the_table)
{
	char option[512];

	same_as_file("--sample-config", RAW_SOURCE "/conf/kvd.conf");
	same_as_file("--options-page", RAW_SOURCE "/docs/options.md");
	snprintf(option, sizeof option, "--config=%s/conf/kvd.conf", RAW_SOURCE);
	assert_int_equal(run(option, "--check-config"), 0);
}

/* ---- the check of an upgrade ----------------------------------------------------------------- */

/* The exit code of the check of a keeper that keeps one thing of this name: a ledger of this version, with records of
 * that many bytes. `disk`: of the disk tier. `said`: the answer to the keeper. */
static int check_upgrade(const char *name, uint32_t version, uint32_t bytes, const char *disk, char said[97])
{
	const kvs_ledger_header_t header = {.magic = KVS_LEDGER_MAGIC, .version = version, .slot_record_bytes = bytes};
	const int list = memfd_create("list", 0), kept = memfd_create("ledger", 0);
	char argument[80];
	const char *const args[] = {"--check-config", argument, disk, NULL};
	int pair[2], code;
	ssize_t n;

	assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair), 0);
	assert_int_equal(write(kept, &header, sizeof header), sizeof header);
	assert_int_equal(ftruncate(kept, 4096), 0);
	assert_true(dprintf(list, "%d %s\n", kept, name) > 0);
	snprintf(argument, sizeof argument, "--kept=%d,0,0,-1,%d", pair[1], list);
	code = raw_run(args, out_, sizeof out_);
	n = recv(pair[0], said, 97, MSG_DONTWAIT);
	said[n > 0 ? n - 1 : 0] = '\0';
	close(list);
	close(kept);
	close(pair[0]);
	close(pair[1]);

	return code;
}

KV_TEST(p10_the_check_of_an_upgrade_reads_every_format)
{
	const uint32_t version = KVS_LEDGER_VERSION, bytes = sizeof(kvs_ledger_slot_t);
	char dir[64], path[96], disk[96], said[97];

	assert_int_equal(check_upgrade("fake-0.ledger", version, bytes, NULL, said), 0);
	assert_string_equal(said, "T1");
	assert_int_equal(check_upgrade("fake-0.ledger", version + 1, bytes, NULL, said), 78);
	assert_string_equal(said, "");
	assert_non_null(strstr(out_, "fake-0.ledger, which the keeper keeps, is not of this version: ledger version"));
	assert_int_equal(check_upgrade("fake-0.ledger", version, bytes + 8, NULL, said), 78);
	assert_int_equal(check_upgrade("fake-0.something", version, bytes, NULL, said), 78);
	assert_non_null(strstr(out_, "does not know: fake-0.something"));
	assert_int_equal(check_upgrade("pidfd.1.2.3.4", version, bytes, NULL, said), 0);

	kv_test_dir_make(dir, sizeof dir);
	snprintf(disk, sizeof disk, "--nvme.path=%s", dir);
	snprintf(path, sizeof path, "%s/superblock.0", dir);
	assert_int_equal(check_upgrade("config", version, bytes, disk, said), 0);
	kv_test_write(path, "of another version");
	assert_int_equal(check_upgrade("config", version, bytes, disk, said), 78);
	assert_string_equal(said, "");
	assert_non_null(strstr(out_, "has no superblock that this version reads"));
	kv_test_dir_remove(dir);
}
