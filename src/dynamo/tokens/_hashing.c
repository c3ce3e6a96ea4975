/* Block and sequence hashes, compiled: equivalents of functions of `hashing.py`, which are their definition and their reference in the tests.
 *
 * XXH3-64 with a seed (https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md), for inputs of at least four bytes,
 * over all blocks of a prompt in one call. Numbers are read as little-endian on every machine.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define SEED 1337 /* Upstream's constant, as in hashing.py. */
#define SECRET_BYTES 192
#define STRIPE 64
#define STRIPES_PER_BLOCK ((SECRET_BYTES - STRIPE) / 8)

static const uint64_t P32_1 = 0x9E3779B1u, P32_2 = 0x85EBCA77u, P32_3 = 0xC2B2AE3Du;
static const uint64_t P64_1 = UINT64_C(0x9E3779B185EBCA87), P64_2 = UINT64_C(0xC2B2AE3D27D4EB4F);
static const uint64_t P64_3 = UINT64_C(0x165667B19E3779F9), P64_4 = UINT64_C(0x85EBCA77C2B2AE63);
static const uint64_t P64_5 = UINT64_C(0x27D4EB2F165667C5);
static const uint64_t MX_1 = UINT64_C(0x165667919E3779F9), MX_2 = UINT64_C(0x9FB21C651E98DF25);

/* The specification's default secret. */
static const unsigned char SECRET[SECRET_BYTES] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static inline uint64_t swap64(uint64_t value) {
    value = ((value & UINT64_C(0x00FF00FF00FF00FF)) << 8) | ((value >> 8) & UINT64_C(0x00FF00FF00FF00FF));
    value = ((value & UINT64_C(0x0000FFFF0000FFFF)) << 16) | ((value >> 16) & UINT64_C(0x0000FFFF0000FFFF));
    return (value << 32) | (value >> 32);
}

static inline uint32_t swap32(uint32_t value) { return (uint32_t)(swap64(value) >> 32); }

static inline uint64_t little64(uint64_t value) {
#if PY_BIG_ENDIAN
    return swap64(value);
#else
    return value;
#endif
}

static inline uint32_t little32(uint32_t value) {
#if PY_BIG_ENDIAN
    return swap32(value);
#else
    return value;
#endif
}

static inline uint64_t read64(const unsigned char *at) {
    uint64_t value;
    memcpy(&value, at, 8);
    return little64(value);
}

static inline uint32_t read32(const unsigned char *at) {
    uint32_t value;
    memcpy(&value, at, 4);
    return little32(value);
}

static inline void write_big64(unsigned char *at, uint64_t value) {
    value = swap64(little64(value));
    memcpy(at, &value, 8);
}

static inline uint64_t rotated(uint64_t value, int bits) { return (value << bits) | (value >> (64 - bits)); }

/* Both halves of the 128-bit product, combined. */
static inline uint64_t folded(uint64_t left, uint64_t right) {
#ifdef __SIZEOF_INT128__
    unsigned __int128 product = (unsigned __int128)left * right;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
#else
    uint64_t low = (left & 0xFFFFFFFF) * (right & 0xFFFFFFFF), cross = (left >> 32) * (right & 0xFFFFFFFF);
    uint64_t other = (left & 0xFFFFFFFF) * (right >> 32), high = (left >> 32) * (right >> 32);
    uint64_t middle = (low >> 32) + (cross & 0xFFFFFFFF) + other;
    return ((middle << 32) | (low & 0xFFFFFFFF)) ^ ((cross >> 32) + (middle >> 32) + high);
#endif
}

static inline uint64_t avalanche(uint64_t hash) {
    hash = (hash ^ (hash >> 37)) * MX_1;
    return hash ^ (hash >> 32);
}

static inline uint64_t mixed16(const unsigned char *at, const unsigned char *secret, uint64_t seed) {
    return folded(read64(at) ^ (read64(secret) + seed), read64(at + 8) ^ (read64(secret + 8) - seed));
}

static inline uint64_t hash_4_to_8(const unsigned char *data, size_t size, uint64_t seed) {
    seed ^= (uint64_t)swap32((uint32_t)seed) << 32;
    uint64_t flip = (read64(SECRET + 8) ^ read64(SECRET + 16)) - seed;
    uint64_t hash = (read32(data + size - 4) + ((uint64_t)read32(data) << 32)) ^ flip;
    hash ^= rotated(hash, 49) ^ rotated(hash, 24);
    hash *= MX_2;
    hash ^= (hash >> 35) + size;
    hash *= MX_2;
    return hash ^ (hash >> 28);
}

static inline uint64_t hash_9_to_16(const unsigned char *data, size_t size, uint64_t seed) {
    uint64_t low = read64(data) ^ ((read64(SECRET + 24) ^ read64(SECRET + 32)) + seed);
    uint64_t high = read64(data + size - 8) ^ ((read64(SECRET + 40) ^ read64(SECRET + 48)) - seed);
    return avalanche(size + swap64(low) + high + folded(low, high));
}

static inline uint64_t hash_17_to_128(const unsigned char *data, size_t size, uint64_t seed) {
    uint64_t hash = size * P64_1;
    for (size_t pair = (size - 1) / 32 + 1; pair-- > 0;) {
        hash += mixed16(data + 16 * pair, SECRET + 32 * pair, seed);
        hash += mixed16(data + size - 16 * (pair + 1), SECRET + 32 * pair + 16, seed);
    }
    return avalanche(hash);
}

static inline uint64_t hash_129_to_240(const unsigned char *data, size_t size, uint64_t seed) {
    uint64_t hash = size * P64_1, end = 0;
    for (size_t part = 0; part < 8; part++) hash += mixed16(data + 16 * part, SECRET + 16 * part, seed);
    hash = avalanche(hash);
    for (size_t part = 8; part < size / 16; part++) end += mixed16(data + 16 * part, SECRET + 16 * (part - 8) + 3, seed);
    end += mixed16(data + size - 16, SECRET + 119, seed);
    return avalanche(hash + end);
}

static inline void accumulate(uint64_t *sums, const unsigned char *stripe, const unsigned char *secret) {
    for (int lane = 0; lane < 8; lane++) {
        uint64_t value = read64(stripe + 8 * lane), key = value ^ read64(secret + 8 * lane);
        sums[lane ^ 1] += value;
        sums[lane] += (key & 0xFFFFFFFF) * (key >> 32);
    }
}

static inline void scramble(uint64_t *sums, const unsigned char *secret) {
    for (int lane = 0; lane < 8; lane++)
        sums[lane] = (sums[lane] ^ (sums[lane] >> 47) ^ read64(secret + 8 * lane)) * P32_1;
}

/* The secret of inputs above 240 bytes, which depends on the seed. */
static void seeded(unsigned char *secret, uint64_t seed) {
    for (int at = 0; at < SECRET_BYTES; at += 16) {
        uint64_t first = little64(read64(SECRET + at) + seed), second = little64(read64(SECRET + at + 8) - seed);
        memcpy(secret + at, &first, 8);
        memcpy(secret + at + 8, &second, 8);
    }
}

static uint64_t hash_long(const unsigned char *data, size_t size, const unsigned char *secret) {
    uint64_t sums[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1}, hash = size * P64_1;
    size_t stripes = (size - 1) / STRIPE;
    for (size_t stripe = 0; stripe < stripes; stripe++) {
        accumulate(sums, data + STRIPE * stripe, secret + 8 * (stripe % STRIPES_PER_BLOCK));
        if (stripe % STRIPES_PER_BLOCK == STRIPES_PER_BLOCK - 1) scramble(sums, secret + SECRET_BYTES - STRIPE);
    }
    accumulate(sums, data + size - STRIPE, secret + SECRET_BYTES - STRIPE - 7);
    for (int pair = 0; pair < 4; pair++)
        hash += folded(sums[2 * pair] ^ read64(secret + 11 + 16 * pair), sums[2 * pair + 1] ^ read64(secret + 19 + 16 * pair));
    return avalanche(hash);
}

/* `secret` is used above 240 bytes. */
static inline uint64_t hashed(const unsigned char *data, size_t size, uint64_t seed, const unsigned char *secret) {
    if (size <= 8) return hash_4_to_8(data, size, seed);
    if (size <= 16) return hash_9_to_16(data, size, seed);
    if (size <= 128) return hash_17_to_128(data, size, seed);
    if (size <= 240) return hash_129_to_240(data, size, seed);
    return hash_long(data, size, secret);
}

/* An integer, or a number of another library that stands for one, as an unsigned 32-bit number; -1 with an exception set. */
static inline int as_token(PyObject *item, uint32_t *token) {
    PyObject *number = PyLong_Check(item) ? Py_NewRef(item) : PyNumber_Index(item);
    if (number == NULL) return -1;
    unsigned long value = PyLong_AsUnsignedLong(number);
    Py_DECREF(number);
    if (value == (unsigned long)-1 && PyErr_Occurred()) return -1;
    if (value > UINT32_MAX) {
        PyErr_Format(PyExc_OverflowError, "token %lu exceeds 32 bits", value);
        return -1;
    }
    *token = (uint32_t)value;
    return 0;
}

/* The tokens as little-endian 32-bit numbers, in memory of `malloc`; NULL with an exception set. */
static uint32_t *tokens_of(PyObject *tokens, Py_ssize_t *count) {
    PyObject *fast = PySequence_Fast(tokens, "tokens must be a sequence of integers");
    if (fast == NULL) return NULL;
    *count = PySequence_Fast_GET_SIZE(fast);
    uint32_t *numbers = malloc(*count > 0 ? (size_t)*count * 4 : 4);
    if (numbers == NULL) PyErr_NoMemory();
    for (Py_ssize_t at = 0; numbers != NULL && at < *count; at++) {
        uint32_t value;
        if (as_token(PySequence_Fast_GET_ITEM(fast, at), &value) < 0) {
            free(numbers);
            numbers = NULL;
        } else {
            numbers[at] = little32(value);
        }
    }
    Py_DECREF(fast);
    return numbers;
}

static PyObject *packed_block_hashes(PyObject *module, PyObject *args) {
    PyObject *tokens;
    Py_ssize_t block_size, count;
    unsigned long long seed = SEED;
    if (!PyArg_ParseTuple(args, "On|K:packed_block_hashes", &tokens, &block_size, &seed)) return NULL;
    if (block_size < 1 || block_size > PY_SSIZE_T_MAX / 4) return PyErr_Format(PyExc_ValueError, "block_size must be at least 1, not %zd", block_size);
    uint32_t *numbers = tokens_of(tokens, &count);
    if (numbers == NULL) return NULL;
    Py_ssize_t blocks = count / block_size;
    size_t width = (size_t)block_size * 4;
    unsigned char secret[SECRET_BYTES];
    if (width > 240) seeded(secret, seed);
    PyObject *result = PyBytes_FromStringAndSize(NULL, blocks * 8);
    if (result != NULL) {
        unsigned char *out = (unsigned char *)PyBytes_AS_STRING(result);
        for (Py_ssize_t block = 0; block < blocks; block++)
            write_big64(out + 8 * block, hashed((unsigned char *)numbers + width * (size_t)block, width, seed, secret));
    }
    free(numbers);
    return result;
}

static PyObject *packed_sequence_hashes(PyObject *module, PyObject *packed) {
    char *data;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(packed, &data, &size) < 0) return NULL;
    if (size % 8) return PyErr_Format(PyExc_ValueError, "packed hashes have 8 bytes each, not %zd in all", size);
    PyObject *result = PyBytes_FromStringAndSize(NULL, size);
    if (result == NULL) return NULL;
    unsigned char *out = (unsigned char *)PyBytes_AS_STRING(result);
    uint64_t previous = 0;
    for (Py_ssize_t at = 0; at < size; at += 8) {
        uint64_t hash = swap64(read64((unsigned char *)data + at)), pair[2] = {little64(previous), little64(hash)};
        previous = at == 0 ? hash : hash_9_to_16((unsigned char *)pair, 16, SEED);
        write_big64(out + at, previous);
    }
    return result;
}

static PyMethodDef methods[] = {
    {"packed_block_hashes", packed_block_hashes, METH_VARARGS, "See hashing.packed_block_hashes."},
    {"packed_sequence_hashes", packed_sequence_hashes, METH_O, "See hashing.packed_sequence_hashes."},
    {NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "dynamo.tokens._hashing", .m_size = 0, .m_methods = methods,
};

PyMODINIT_FUNC PyInit__hashing(void) { return PyModule_Create(&definition); }
