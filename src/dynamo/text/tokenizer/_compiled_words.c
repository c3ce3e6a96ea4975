/* Words: byte-level BPE of a text, the compiled form of `word_tokenizer.WordTokenizer`.
 *
 * A text is cut at its added tokens, split into words by a list of rules that stand for the alternatives of the split
 * regex, and every word is looked up in a cache or encoded with the merges. The text is processed as UTF-8. The result is
 * None where the library must decide: a character without a class, or a place where no rule matches.
 *
 * `encode` keeps the interpreter lock, which protects the cache of the object. `encode_long` releases it and uses a cache
 * of its own, so that neither waits for the other; the other members do not change after the construction.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "_merges.h"
#include "_split_rules.h"

#define KEY_BYTES_MAX 64     /* Longer words rarely repeat. */
#define PACKED_BYTES 8       /* Most words are shorter, and are found with one read of memory. */
#define PROBES 16            /* Slots that a lookup reads at most, whatever words a client has chosen. */
#define SLOTS_MIN 1024
#define POOL_ITEMS_MIN 4096
#define IDS_MAX (1 << 24)    /* Larger ids are an error of the file. */

/* `key` is the word itself up to `PACKED_BYTES`, a hash of a longer one. `value` is the id of a packed word of one token,
 * the place in the pool of any other word. A free slot has no length. */
typedef struct {
    uint64_t key;
    uint32_t value;
    uint8_t length, is_id;
} Slot;

/* Words and their ids. An entry of the pool is the number of ids, the ids, and the bytes of the word. */
typedef struct {
    Slot *slots;
    uint32_t mask, used;
    uint32_t *pool;
    size_t items, room;
    Py_ssize_t lookups, misses;
} Cache;

/* An added token, or a word that is a token although the merges do not lead to it. */
typedef struct {
    uint32_t id, length;
    const uint8_t *text;
} Token;

typedef struct {
    PyObject_HEAD
    Split split;
    Merges merges;
    uint8_t begins_added[256];   /* Whether an added token begins with this byte. */
    int only_first;              /* The byte with which all added tokens begin, if it is one; or -1. */
    PyObject *classes_bytes, *added_list;
    Token *added;                /* Sorted by first byte, longest first. */
    uint32_t added_from[257];    /* Place of the first added token by first byte. */
    Token *whole;                /* Places of words that are tokens; a free place has no length. NULL: there are none. */
    uint8_t *whole_texts;
    uint32_t whole_mask, slots_max;
    uint64_t seed;
    Cache cache;
    PyObject **numbers;          /* Ids that were returned: the lists of many requests share them. */
    uint32_t id_max;
} Words;

/* ---- cache ------------------------------------------------------------------------------------------------------- */

static inline uint64_t mixed(uint64_t left, uint64_t right) {
    uint64_t product = left * right;
    return product ^ product >> 32;
}

static inline uint64_t read8(const uint8_t *from) {
    uint64_t value;
    memcpy(&value, from, 8);
    return value;
}

static inline uint64_t read4(const uint8_t *from) {
    uint32_t value;
    memcpy(&value, from, 4);
    return value;
}

/* Bytes of a word of at most `PACKED_BYTES`, or a hash of a longer one. */
static inline uint64_t key_of(const uint8_t *word, size_t length, uint64_t seed) {
    if (length < 4) return word[0] | (uint64_t)word[length / 2] << 8 | (uint64_t)word[length - 1] << 16;
    if (length <= PACKED_BYTES) return read4(word) | read4(word + length - 4) << 32;
    const uint8_t *last = word + length - 8;
    for (; word < last; word += 8) seed = mixed(read8(word) ^ seed, UINT64_C(0xE7037ED1A0B428DB));
    return mixed(read8(last) ^ seed, UINT64_C(0xA0761D6478BD642F));
}

/* Number whose lowest bits are the first slot of a key. */
static inline uint32_t first_slot(uint64_t key, size_t length, uint64_t seed) {
    uint64_t hash = ((key ^ seed) + length) * UINT64_C(0x9E3779B97F4A7C15);
    return (uint32_t)((hash ^ hash >> 29) * UINT64_C(0xE7037ED1A0B428DB) >> 32);
}

static void clear(Cache *cache) {
    free(cache->slots);
    free(cache->pool);
    cache->slots = NULL;
    cache->pool = NULL;
    cache->used = 0;
    cache->items = cache->room = 0;
}

static int begin(Cache *cache) {
    if (cache->slots != NULL) return 0;
    cache->slots = calloc(SLOTS_MIN, sizeof *cache->slots);
    cache->pool = malloc(POOL_ITEMS_MIN * sizeof *cache->pool);
    if (cache->slots == NULL || cache->pool == NULL) {
        clear(cache);
        return -1;
    }
    cache->mask = SLOTS_MIN - 1;
    cache->room = POOL_ITEMS_MIN;
    return 0;
}

/* Doubles the slots; a cache that has `slots_max` is emptied instead. */
static int grow(const Words *self, Cache *cache) {
    uint32_t count = (cache->mask + 1) * 2;
    if (count > self->slots_max) {
        clear(cache);
        return begin(cache);
    }
    Slot *slots = calloc(count, sizeof *slots);
    if (slots == NULL) return -1;
    for (uint32_t at = 0; at <= cache->mask; at++) {
        Slot slot = cache->slots[at];
        if (slot.length == 0) continue;
        uint32_t first = first_slot(slot.key, slot.length, self->seed);
        for (uint32_t probe = 0; probe < PROBES; probe++) {
            Slot *place = &slots[(first + probe) & (count - 1)];
            if (place->length == 0) {
                *place = slot;
                break;
            }
        }
    }
    free(cache->slots);
    cache->slots = slots;
    cache->mask = count - 1;
    return 0;
}

/* Adds a word in a free slot. */
static int keep(Cache *cache, Slot *slot, uint64_t key, const uint8_t *word, size_t length, const uint32_t *ids, size_t count) {
    cache->used++;
    if (length <= PACKED_BYTES && count == 1) {
        *slot = (Slot){key, ids[0], (uint8_t)length, 1};
        return 0;
    }
    size_t items = 1 + count + (length + 3) / 4;
    if (cache->items + items > cache->room) {
        size_t room = 2 * cache->room;
        uint32_t *pool = realloc(cache->pool, room * sizeof *pool);
        if (pool == NULL) return -1;
        cache->pool = pool;
        cache->room = room;
    }
    uint32_t *entry = cache->pool + cache->items;
    entry[0] = (uint32_t)count;
    memcpy(entry + 1, ids, count * sizeof *ids);
    memcpy(entry + 1 + count, word, length);
    *slot = (Slot){key, (uint32_t)cache->items, (uint8_t)length, 0};
    cache->items += items;
    return 0;
}

/* Whether a word is a token although the merges do not lead to it, and its id. */
static int find_whole(const Words *self, uint64_t key, const uint8_t *word, size_t length, uint32_t *id) {
    if (self->whole == NULL) return 0;
    for (uint32_t at = first_slot(key, length, self->seed) & self->whole_mask;; at = (at + 1) & self->whole_mask) {
        const Token *token = &self->whole[at];
        if (token->length == 0) return 0;
        if (token->length == length && memcmp(token->text, word, length) == 0) {
            *id = token->id;
            return 1;
        }
    }
}

/* ---- a text ------------------------------------------------------------------------------------------------------ */

/* Writes the ids of a word, at most one per byte, and returns their end; NULL if there is no memory. */
static inline uint32_t *encode_word(const Words *self, Cache *cache, const uint8_t *word, size_t length, uint32_t *made) {
    uint64_t key = key_of(word, length, self->seed);
    cache->lookups++;
    if (length > KEY_BYTES_MAX) {
        cache->misses++;
        Py_ssize_t count = find_whole(self, key, word, length, made) ? 1 : merge(&self->merges, word, length, made);
        return count < 0 ? NULL : made + count;
    }
    uint32_t first = first_slot(key, length, self->seed);
    Slot *free_slot = NULL;
    for (uint32_t probe = 0; probe < PROBES; probe++) {
        Slot *slot = &cache->slots[(first + probe) & cache->mask];
        if (slot->length == 0) {
            free_slot = slot;
            break;
        }
        if (slot->key != key || slot->length != length) continue;
        if (slot->is_id) {
            made[0] = slot->value;
            return made + 1;
        }
        const uint32_t *entry = cache->pool + slot->value;
        uint32_t count = entry[0];
        if (length > PACKED_BYTES && memcmp(entry + 1 + count, word, length) != 0) continue;
        for (uint32_t at = 0; at < count; at++) made[at] = entry[1 + at];
        return made + count;
    }
    cache->misses++;
    size_t found = find_whole(self, key, word, length, made) ? 1 : merge_short(&self->merges, word, length, made);
    if (free_slot != NULL && keep(cache, free_slot, key, word, length, made, found) < 0) return NULL;
    if (cache->used > cache->mask / 2 && grow(self, cache) < 0) return NULL;
    return made + found;
}

/* Place of the next added token, `end` without; and which. */
static size_t find_added(const Words *self, const uint8_t *text, size_t at, size_t end, const Token **found) {
    for (;; at++) {
        if (self->only_first >= 0) {
            const uint8_t *next = memchr(text + at, self->only_first, end - at);
            at = next == NULL ? end : (size_t)(next - text);
        } else {
            while (at < end && !self->begins_added[text[at]]) at++;
        }
        if (at == end) return end;
        uint8_t first = text[at];
        for (uint32_t which = self->added_from[first]; which < self->added_from[first + 1]; which++) {
            const Token *added = &self->added[which];
            if (added->length <= end - at && memcmp(added->text, text + at, added->length) == 0) {
                *found = added;
                return at;
            }
        }
    }
}

/* Writes the ids of a text, at most one per byte. 1: done, 0: the library must encode it, -1: no memory. */
static int encode_text(const Words *self, Cache *cache, const uint8_t *text, size_t length, uint32_t *ids, size_t *count) {
    uint32_t *made = ids;
    if (begin(cache) < 0) return -1;
    for (size_t at = 0; at < length;) {
        const Token *added = NULL;
        size_t end = find_added(self, text, at, length, &added);
        while (at < end) {
            size_t to = word_end(&self->split, text, at, end);
            if (to == 0) return 0;
            made = encode_word(self, cache, text + at, to - at, made);
            if (made == NULL) return -1;
            at = to;
        }
        if (added != NULL) {
            *made++ = added->id;
            at += added->length;
        }
    }
    *count = made - ids;
    return 1;
}

/* UTF-8 of a text; `held` gets the object that has it, if it is another. 0: it has a surrogate. */
static int utf8_of(PyObject *text, const uint8_t **data, Py_ssize_t *length, PyObject **held) {
    if (!PyUnicode_Check(text)) {
        PyErr_SetString(PyExc_TypeError, "a text is a str");
        return -1;
    }
    *held = NULL;
    if (PyUnicode_IS_COMPACT_ASCII(text)) {
        *data = PyUnicode_1BYTE_DATA(text);
        *length = PyUnicode_GET_LENGTH(text);
        return 1;
    }
    *held = PyUnicode_AsUTF8String(text); /* Not `PyUnicode_AsUTF8`, whose result is kept as long as the text. */
    if (*held == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_UnicodeEncodeError)) return -1;
        PyErr_Clear();
        return 0;
    }
    *data = (const uint8_t *)PyBytes_AS_STRING(*held);
    *length = PyBytes_GET_SIZE(*held);
    return 1;
}

static PyObject *list_of(Words *self, const uint32_t *ids, size_t count) {
    PyObject *list = PyList_New((Py_ssize_t)count);
    if (list == NULL) return NULL;
    for (size_t at = 0; at < count; at++) {
        uint32_t id = ids[at];
        PyObject *number = self->numbers[id];
        if (number == NULL) {
            number = self->numbers[id] = PyLong_FromUnsignedLong(id);
            if (number == NULL) {
                Py_DECREF(list);
                return NULL;
            }
        }
        PyList_SET_ITEM(list, (Py_ssize_t)at, Py_NewRef(number));
    }
    return list;
}

static PyObject *encode(Words *self, PyObject *text) {
    const uint8_t *data;
    Py_ssize_t length;
    PyObject *held, *result = NULL;
    int done = utf8_of(text, &data, &length, &held);
    if (done <= 0) return done < 0 ? NULL : Py_NewRef(Py_None);
    uint32_t *ids = malloc((length + 1) * sizeof *ids);
    size_t count = 0;
    done = ids == NULL ? -1 : encode_text(self, &self->cache, data, length, ids, &count);
    if (done > 0) result = list_of(self, ids, count);
    else if (done == 0) result = Py_NewRef(Py_None);
    else PyErr_NoMemory();
    free(ids);
    Py_XDECREF(held);
    return result;
}

static PyObject *encode_long(Words *self, PyObject *text) {
    const uint8_t *data;
    Py_ssize_t length;
    PyObject *held, *result = NULL;
    int done = utf8_of(text, &data, &length, &held);
    if (done <= 0) return done < 0 ? NULL : Py_NewRef(Py_None);
    uint32_t *ids = NULL;
    size_t count = 0;
    Cache own = {0};
    Py_BEGIN_ALLOW_THREADS
    ids = malloc((length + 1) * sizeof *ids);
    done = ids == NULL ? -1 : encode_text(self, &own, data, length, ids, &count);
    clear(&own);
    Py_END_ALLOW_THREADS
    self->cache.lookups += own.lookups;
    self->cache.misses += own.misses;
    if (done > 0) result = PyBytes_FromStringAndSize((const char *)ids, (Py_ssize_t)(count * sizeof *ids));
    else if (done == 0) result = Py_NewRef(Py_None);
    else PyErr_NoMemory();
    free(ids);
    Py_XDECREF(held);
    return result;
}

/* ---- construction ------------------------------------------------------------------------------------------------ */

static int by_first_byte_then_longest(const void *one, const void *other) {
    const Token *left = one, *right = other;
    if (left->text[0] != right->text[0]) return left->text[0] < right->text[0] ? -1 : 1;
    return left->length == right->length ? 0 : left->length > right->length ? -1 : 1;
}

/* Takes a list of pairs of bytes and an id. */
static int take_added(Words *self, PyObject *list) {
    Py_ssize_t count = PyList_GET_SIZE(list);
    self->added_list = Py_NewRef(list);
    self->added = malloc((count + 1) * sizeof *self->added);
    if (self->added == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t at = 0; at < count; at++) {
        const char *text;
        Py_ssize_t length;
        unsigned int id;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(list, at), "y#I", &text, &length, &id)) return -1;
        if (length == 0) {
            PyErr_SetString(PyExc_ValueError, "an added token is empty");
            return -1;
        }
        self->added[at] = (Token){id, (uint32_t)length, (const uint8_t *)text};
        self->id_max = Py_MAX(self->id_max, id);
    }
    qsort(self->added, count, sizeof *self->added, by_first_byte_then_longest);
    Py_ssize_t at = 0;
    for (int first = 0; first < 256; first++) {
        self->added_from[first] = (uint32_t)at;
        while (at < count && self->added[at].text[0] == first) at++;
    }
    self->added_from[256] = (uint32_t)count;
    for (int first = 0; first < 256; first++) self->begins_added[first] = self->added_from[first] < self->added_from[first + 1];
    int is_one = count > 0 && self->added[0].text[0] == self->added[count - 1].text[0];
    self->only_first = is_one ? self->added[0].text[0] : -1;
    return 0;
}

/* Takes the tokens, pairs of bytes and an id, to which the merges do not lead. */
static int take_whole(Words *self, PyObject *list) {
    Py_ssize_t count = PyList_GET_SIZE(list), kept = 0;
    size_t bytes = 0, longest = 0, places = 4;
    for (Py_ssize_t at = 0; at < count; at++) {
        const char *text;
        Py_ssize_t length;
        unsigned int id;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(list, at), "y#I", &text, &length, &id)) return -1;
        longest = Py_MAX(longest, (size_t)length);
        self->id_max = Py_MAX(self->id_max, id);
    }
    uint32_t *ids = malloc((longest + 1) * sizeof *ids);
    Token *found = malloc((count + 1) * sizeof *found);
    for (Py_ssize_t at = 0; ids != NULL && found != NULL && at < count; at++) {
        PyObject *pair = PyList_GET_ITEM(list, at), *text = PyTuple_GET_ITEM(pair, 0);
        Token token = {(uint32_t)PyLong_AsUnsignedLongMask(PyTuple_GET_ITEM(pair, 1)), (uint32_t)PyBytes_GET_SIZE(text),
                       (const uint8_t *)PyBytes_AS_STRING(text)};
        if (token.length == 0 || (merge(&self->merges, token.text, token.length, ids) == 1 && ids[0] == token.id)) continue;
        found[kept++] = token;
        bytes += token.length;
    }
    while (places < 2 * (size_t)kept) places *= 2;
    self->whole = calloc(places, sizeof *self->whole);
    self->whole_texts = malloc(bytes + 1);
    self->whole_mask = (uint32_t)places - 1;
    int done = ids == NULL || found == NULL || self->whole == NULL || self->whole_texts == NULL ? -1 : 0;
    uint8_t *end = self->whole_texts;
    for (Py_ssize_t which = 0; done == 0 && which < kept; which++) {
        Token token = found[which];
        uint32_t at = first_slot(key_of(token.text, token.length, self->seed), token.length, self->seed);
        while (self->whole[at & self->whole_mask].length != 0) at++;
        memcpy(end, token.text, token.length);
        self->whole[at & self->whole_mask] = (Token){token.id, token.length, end};
        end += token.length;
    }
    free(ids);
    free(found);
    if (done < 0) PyErr_NoMemory();
    return done;
}

static int take(Words *self, PyObject *args) {
    const char *rules, *byte_ids, *triples;
    Py_ssize_t rules_count, byte_ids_bytes, triples_bytes;
    PyObject *classes, *added, *whole;
    unsigned int slots_max;
    unsigned long long seed;
    if (!PyArg_ParseTuple(args, "y#Sy#y#O!O!IK", &rules, &rules_count, &classes, &byte_ids, &byte_ids_bytes, &triples,
                          &triples_bytes, &PyList_Type, &added, &PyList_Type, &whole, &slots_max, &seed)) return -1;
    self->classes_bytes = Py_NewRef(classes);
    int is_sound = begin_split(&self->split, (const uint8_t *)rules, rules_count, (const uint8_t *)PyBytes_AS_STRING(classes),
                               PyBytes_GET_SIZE(classes));
    if (!is_sound || byte_ids_bytes != sizeof self->merges.byte_ids || triples_bytes % 12 != 0 || slots_max < SLOTS_MIN) {
        PyErr_SetString(PyExc_ValueError, "the parts of the tokenizer have the wrong form");
        return -1;
    }
    memcpy(self->merges.byte_ids, byte_ids, byte_ids_bytes);
    self->slots_max = slots_max;
    self->seed = seed;
    uint32_t *aligned = malloc(triples_bytes + 1);
    if (aligned != NULL) memcpy(aligned, triples, triples_bytes);
    int done = aligned == NULL ? -1 : begin_merges(&self->merges, aligned, triples_bytes / 12);
    for (Py_ssize_t at = 0; done == 0 && at < triples_bytes / 4; at++) self->id_max = Py_MAX(self->id_max, aligned[at]);
    free(aligned);
    if (done < 0) {
        PyErr_NoMemory();
        return -1;
    }
    if (take_added(self, added) < 0 || (PyList_GET_SIZE(whole) > 0 && take_whole(self, whole) < 0)) return -1;
    for (int byte = 0; byte < 256; byte++) self->id_max = Py_MAX(self->id_max, self->merges.byte_ids[byte]);
    if (self->id_max >= IDS_MAX) {
        PyErr_SetString(PyExc_OverflowError, "an id is too large");
        return -1;
    }
    self->numbers = calloc(self->id_max + 1, sizeof *self->numbers);
    if (self->numbers == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

static PyObject *make(PyTypeObject *type, PyObject *args, PyObject *names) {
    Words *self = (Words *)type->tp_alloc(type, 0);
    if (self != NULL && (names != NULL || take(self, args) < 0)) {
        if (names != NULL) PyErr_SetString(PyExc_TypeError, "Words takes no keyword arguments");
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}

static void end(Words *self) {
    clear(&self->cache);
    for (uint32_t id = 0; self->numbers != NULL && id <= self->id_max; id++) Py_XDECREF(self->numbers[id]);
    free(self->numbers);
    free(self->merges.table);
    free(self->added);
    free(self->whole);
    free(self->whole_texts);
    Py_XDECREF(self->classes_bytes);
    Py_XDECREF(self->added_list);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *counts(Words *self, PyObject *Py_UNUSED(none)) {
    const Cache *cache = &self->cache;
    Py_ssize_t bytes = cache->slots == NULL ? 0 : (cache->mask + 1) * sizeof(Slot) + cache->room * sizeof(uint32_t);
    return Py_BuildValue("nnnn", (Py_ssize_t)cache->used, bytes, cache->lookups - cache->misses, cache->misses);
}

static PyMethodDef words_methods[] = {
    {"encode", (PyCFunction)encode, METH_O, "Return the ids of a text; None if only the library may encode it."},
    {"encode_long", (PyCFunction)encode_long, METH_O,
     "As `encode`, while other threads run; return the ids as 32-bit numbers in a bytes object."},
    {"counts", (PyCFunction)counts, METH_NOARGS, "Return the entries of the cache, its bytes, its hits and its misses."},
    {NULL},
};

static PyTypeObject words_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "dynamo.text.tokenizer._compiled_words.Words",
    .tp_doc = "Words(rules, classes, byte_ids, merges, added, whole, slots_max, seed): text to ids for one tokenizer.",
    .tp_basicsize = sizeof(Words),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = make,
    .tp_dealloc = (destructor)end,
    .tp_methods = words_methods,
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_compiled_words",
    .m_doc = "Byte-level BPE, compiled.",
    .m_size = -1,
};

PyMODINIT_FUNC PyInit__compiled_words(void) {
    PyObject *made = PyModule_Create(&module);
    if (made == NULL || PyModule_AddType(made, &words_type) < 0) {
        Py_XDECREF(made);
        return NULL;
    }
    return made;
}
