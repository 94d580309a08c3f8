/* Made by golden_keys.py; pinned: keys are on disk and on other machines. */
/* clang-format off */
#ifndef GOLDEN_KEYS_H
#define GOLDEN_KEYS_H

#include <stdint.h>

/* SHA-256 of the identity text in test_identity.c, namespace "default". */
#define GOLDEN_ROOT "ac42083f3811549048434c63df9f23ba9d917a0170aa8f2f8a474442f060e976"

typedef struct golden_chain {
	uint32_t unit;
	uint64_t epoch;
	const char *keys[4];
} golden_chain_t;

/* Four units from that root; token i of the chain is (i * 2654435761 + 12345) % 151936. */
static const golden_chain_t golden_chains[] = {
	{16, 0,
	 {"8baf5e7e574f8d4daf453be36d7d9f89", "6bf25e2157fa463e18e4b3e53f7ad17f",
	  "bb7007194498a774924c28c30b292a69", "9bdeb4a128f13586fd1df108866da9c3"}},
	{16, 1,
	 {"8b369455e92d7c6675cb235d0baeb5f7", "c42c0c4c0f3c6f3821b4be77a19a9225",
	  "86a333eb82cc8545eef485f9ce034300", "da3216eaaa00db0ad76f58c74e5d0918"}},
	{16, 1099511627776,
	 {"2a4c50e1272524ae7ff0e45b2f0d56ae", "ed10832b973a9303e02f8f49d345167b",
	  "f27e53c9b7da9948312496c939bb2d73", "475a06453203a32b9deeb0816fafbd7a"}},
	{1, 0,
	 {"1cc724a8393b260c749f254aaccb869a", "905fb76156585358ae749d2e110a2144",
	  "63b11de6bc43e2826ae81bbbad421d4e", "5c99525f7761cae06df67adf67eb442e"}},
	{8, 0,
	 {"c6dd7bac70bb10d18ec697eb53f69f66", "ac29af6f6ab378d476f5854681eb437b",
	  "00080d82a35b07304666a111beb91489", "f7ccfa5ecd56621602027939a0556f02"}},
	{20, 0,
	 {"a56ee025592ef64572e785d71768e9e1", "4cad1239519056964dceb3738b9e7032",
	  "1583d90e885e8b8943e1df8a6be7b98d", "9a9851a6312e942d99330c4e40bc94c2"}},
	{32, 0,
	 {"67000c089476c28a48157a0f98e859b7", "3bd1ecbedcefc391fb31f78a0188545a",
	  "6204946dbcbd46f6e5740b4e34c669bb", "068dd215715801dfd9631c010663cda4"}},
	{4096, 7,
	 {"cdb5c3d22d344f490b3f52e83b66416f", "3aa47b2168e55d3837a012724fdffb33",
	  "92665c95ee1af7347e1438d6d38a7a75", "421f3f1137b6450f71bc4f90fdf264f5"}},
};

typedef struct golden_extra {
	uint32_t extra_len;
	uint32_t unit;
	const char *first;
	const char *second;
} golden_extra_t;

/* One unit with extra keys (byte i is (i * 7 + 3) % 256), then one without; epoch 0. */
static const golden_extra_t golden_extras[] = {
	{1, 16, "4dc81f96f109b1a645c7c8422777542c", "65404ea49dd0b8a7d355e8cd49552b76"},
	{1, 24, "fe92a4c17493050365e68f2402d9b812", "ae971e19defaa8b5f1353dbe7df4e1d6"},
	{8, 16, "ca4c274d0ec19e48dbbc62b89bfb3cfe", "704846c672a42970aa15dacbe00d8fc4"},
	{8, 24, "89ea7a35fa967ed62c57d476207b6ead", "fde6d5e998d91f6edcf3a4f6b4bd6122"},
	{55, 16, "90e3bf137a8f8ba3f55ad015b5e3ba9c", "3c1c9d4808a01ca1e188ac0a8e4688b4"},
	{55, 24, "f5c7dc4e32cc3fcc8747b666789fa0d2", "22541455aaed919cf6ebfaae65c2a798"},
	{56, 16, "72145fbe54bf4c4e14c214cc30f7d520", "b421a1c16ca3e1166112df2ee5c33c1c"},
	{56, 24, "c58fdab53e135c3461e00f2c52d23e25", "3678894b4281fc744b8e15e308645fab"},
	{57, 16, "a2efdf362de2c1e8358f582387c68f0c", "572fb4adb708eae9c0d52aac8b5787e0"},
	{57, 24, "336a410c12ad868e30b6a4c80ccadda6", "0042cc4a6a38a398f2f63f6e03b33e22"},
	{64, 16, "c40e4fd5b9db514f827b319ae6c88818", "c4d7d5925837492a8dbe0d37cf689c37"},
	{64, 24, "fee45aa05823cee07dd49e7682edbdfc", "0153c4035d413d15445f3146a1c5b3f1"},
	{120, 16, "cdf8ba3437ac5dfb89beaaf366f35f44", "b1d882b79a11167f328c2186beafdcef"},
	{120, 24, "06caa58a025c8cd58c141515f7bd3897", "c3149dac4ede485e689bf96705be8cf3"},
	{121, 16, "bb511237a9243688d58505a7b85112da", "83a9dc234a2e39c1c3598cb5a6826034"},
	{121, 24, "e57af09e8606ccbd4d8cd0a38f1d5018", "e8053b7f07ede50b3e5e27957f4a7462"},
	{200, 16, "7795d8d236a4a93ae3102f11ec305071", "c2d8007c98fdc514a72c9183b6b39729"},
	{200, 24, "edb8d770069239996e45e4d2415fbcf1", "8d681dc41256c806d3f704a69e4902b5"},
	{65536, 16, "475e2228af0253f38c468a39c92b5486", "b0df5bd655fca719c8f07d8bcc779d27"},
	{65536, 24, "66b9e36da3734e5baf1aac5d34c603f6", "1df61bacc190253c86420cc687608f24"},
};

typedef struct golden_bind {
	uint32_t len;
	const char *key;
} golden_bind_t;

/* Foreign hashes (byte i is (i * 7 + 3) % 256) bound to the root with 16 tokens a unit, epoch 0. */
static const golden_bind_t golden_binds[] = {
	{16, "c7811a8607f98e68189622c48d8335a4"},
	{20, "7ad72924ae2b2301fb5df6c0fcb8f37e"},
	{32, "9b4d97493ac49dc190fbb0948c177977"},
	{59, "4f34a940745f94e291493bc854b4eee8"},
	{60, "991a7e400f31da4f1e6c9930adff5ef5"},
};

#endif
