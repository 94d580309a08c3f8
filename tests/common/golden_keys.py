#!/usr/bin/env python3
"""Golden vectors of block keys and of the root digest, from the words of kv/key.h and kv/identity.h alone.

Shares no code with kvd: SHA-256's compression is written out here. Run it to make golden_keys.h again:

    python3 golden_keys.py > golden_keys.h
"""
import struct

MASK = 0xFFFFFFFF


def primes(n):
    found = []
    candidate = 2
    while len(found) < n:
        if all(candidate % p for p in found):
            found.append(candidate)
        candidate += 1
    return found


def root_bits(value, degree):
    """First 32 bits of the fraction of value ** (1 / degree), exactly."""
    scaled = value << (32 * degree)
    low, high = 0, scaled
    while low < high:
        middle = (low + high + 1) // 2
        if middle ** degree <= scaled:
            low = middle
        else:
            high = middle - 1
    return low & MASK


IV = [root_bits(p, 2) for p in primes(8)]
K = [root_bits(p, 3) for p in primes(64)]


def rotate(x, n):
    return (x >> n | x << (32 - n)) & MASK


def compress(state, block):
    assert len(block) == 64
    w = list(struct.unpack(">16I", block))
    for i in range(16, 64):
        s0 = rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ w[i - 15] >> 3
        s1 = rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ w[i - 2] >> 10
        w.append((w[i - 16] + s0 + w[i - 7] + s1) & MASK)
    a, b, c, d, e, f, g, h = state
    for i in range(64):
        s1 = rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25)
        t1 = (h + s1 + (e & f ^ ~e & g) + K[i] + w[i]) & MASK
        s0 = rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22)
        t2 = (s0 + (a & b ^ a & c ^ b & c)) & MASK
        a, b, c, d, e, f, g, h = (t1 + t2) & MASK, a, b, c, (d + t1) & MASK, e, f, g
    return [(x + y) & MASK for x, y in zip(state, (a, b, c, d, e, f, g, h))]


def absorb(state, data):
    data += b"\0" * (-len(data) % 64)
    for i in range(0, len(data), 64):
        state = compress(state, data[i:i + 64])
    return state


def serialise(state):
    return struct.pack(">8I", *state)


def sha256(data):
    bits = len(data) * 8
    data += b"\x80"
    data += b"\0" * ((56 - len(data)) % 64) + struct.pack(">Q", bits)
    return serialise(absorb(IV, data))


def header(root, unit, epoch):
    return absorb(IV, root + struct.pack("<IIQ", unit, 1, epoch) + b"\0" * 16)


def unit_into(state, tokens, extra=b""):
    if extra:
        state = absorb(state, struct.pack("<II", 0xFFFFFFFF, len(extra)) + extra)
    return absorb(state, struct.pack("<%dI" % len(tokens), *tokens))


def key(state):
    return serialise(state)[:16].hex()


def token(i):
    return (i * 2654435761 + 12345) % 151936


def extra_bytes(n):
    return bytes((i * 7 + 3) % 256 for i in range(n))


TEXT = (b"model=llama 3%3D8b\nweights=sha256:0123\ndtype=bf16\nquantization=none\nrope=theta%3D500000\nlora=none\nhash=kv1\n"
        b"hash_tokens=16\ngroups=0:full:16\n"
        b"layout=kvk1 heads%3D8 layers%3D32 tokens%3D16 k%3D128 v%3D128 dtype%3Dbf16 inner%3Dsplit page%3D0\npage_format=plain\n")


def main():
    assert sha256(b"abc").hex() == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    root = sha256(b"kvd identity 1\nnamespace=default\n" + TEXT)
    print("/* Made by golden_keys.py; pinned: keys are on disk and on other machines. */")
    print("/* clang-format off */")
    print("#ifndef GOLDEN_KEYS_H\n#define GOLDEN_KEYS_H\n")
    print("#include <stdint.h>\n")
    print("/* SHA-256 of the identity text in test_identity.c, namespace \"default\". */")
    print('#define GOLDEN_ROOT "%s"\n' % root.hex())
    print("typedef struct golden_chain {\n\tuint32_t unit;\n\tuint64_t epoch;\n\tconst char *keys[4];\n} golden_chain_t;\n")
    print("/* Four units from that root; token i of the chain is (i * 2654435761 + 12345) % 151936. */")
    print("static const golden_chain_t golden_chains[] = {")
    for unit, epoch in ((16, 0), (16, 1), (16, 1 << 40), (1, 0), (8, 0), (20, 0), (32, 0), (4096, 7)):
        state = header(root, unit, epoch)
        keys = []
        for i in range(4):
            state = unit_into(state, [token(i * unit + j) for j in range(unit)])
            keys.append('"%s"' % key(state))
        print("\t{%d, %d,\n\t {%s,\n\t  %s}}," % (unit, epoch, ", ".join(keys[:2]), ", ".join(keys[2:])))
    print("};\n")
    print("typedef struct golden_extra {\n\tuint32_t extra_len;\n\tuint32_t unit;\n\tconst char *first;\n\tconst char *second;\n} golden_extra_t;\n")
    print("/* One unit with extra keys (byte i is (i * 7 + 3) % 256), then one without; epoch 0. */")
    print("static const golden_extra_t golden_extras[] = {")
    for n in (1, 8, 55, 56, 57, 64, 120, 121, 200, 65536):
        for unit in (16, 24):
            state = unit_into(header(root, unit, 0), [token(j) for j in range(unit)], extra_bytes(n))
            first = key(state)
            state = unit_into(state, [token(unit + j) for j in range(unit)])
            print('\t{%d, %d, "%s", "%s"},' % (n, unit, first, key(state)))
    print("};\n")
    print("typedef struct golden_bind {\n\tuint32_t len;\n\tconst char *key;\n} golden_bind_t;\n")
    print("/* Foreign hashes (byte i is (i * 7 + 3) % 256) bound to the root with 16 tokens a unit, epoch 0. */")
    print("static const golden_bind_t golden_binds[] = {")
    for n in (16, 20, 32, 59, 60):
        block = extra_bytes(n) + b"\0" * (60 - n) + struct.pack("<I", n)
        print('\t{%d, "%s"},' % (n, key(compress(header(root, 16, 0), block))))
    print("};\n\n#endif")


main()
