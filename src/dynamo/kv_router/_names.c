/* CommonNames, compiled: the twin of `names.PythonNames`, which is its definition and its oracle in the tests.
 *
 * A hash table from 64-bit keys to objects, cut in 256 pieces so that none stands still for long when it grows. Each
 * piece is open addressing with linear probing; deletion shifts back what follows, so nothing is left behind. The table
 * owns a reference to each object for each key. It takes no part in garbage collection: what it refers to never refers
 * to it. Nor do its runs and their lists of keys, from `claim` on: a collection would visit each key of each young run,
 * 20 ms for 20,000 objects. They are freed by their reference counts; `RunTree` breaks the cycles between them.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <structmember.h>

#define SHARDS 256
#define SMALLEST 8 /* Slots of a piece that holds anything. */
#define AHEAD 16   /* Keys of a list whose slots are requested from memory at the same time: a large table is in no cache. */

#if defined(__GNUC__) || defined(__clang__)
#define PREFETCH(address) __builtin_prefetch(address, 1)
#else
#define PREFETCH(address) ((void)(address))
#endif

typedef struct {
    uint64_t key;
    PyObject *run; /* NULL: free. */
} Slot;

typedef struct {
    Slot *slots;
    size_t mask; /* Their number less one; meaningless without slots. */
    size_t used;
} Shard;

typedef struct {
    PyObject_HEAD
    Py_ssize_t size;
    Shard shards[SHARDS];
} Names;

static inline uint64_t mixed(uint64_t key) { return key * UINT64_C(0x9E3779B97F4A7C15); }

static inline Shard *shard_of(Names *self, uint64_t hash) { return &self->shards[hash >> 56]; }

static inline size_t home(const Shard *shard, uint64_t hash) { return (size_t)(hash >> 16) & shard->mask; }

/* The slot of a key, or the free one where it would be. The shard has slots. */
static inline Slot *seek(const Shard *shard, uint64_t key, uint64_t hash) {
    size_t at = home(shard, hash);
    while (shard->slots[at].run != NULL && shard->slots[at].key != key) at = (at + 1) & shard->mask;
    return &shard->slots[at];
}

static int resize(Shard *shard, size_t count) {
    Slot *old = shard->slots, *fresh = calloc(count, sizeof(Slot));
    size_t before = old == NULL ? 0 : shard->mask + 1;
    if (fresh == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    shard->slots = fresh;
    shard->mask = count - 1;
    for (size_t at = 0; at < before; at++)
        if (old[at].run != NULL) *seek(shard, old[at].key, mixed(old[at].key)) = old[at];
    free(old);
    return 0;
}

/* Gives one key to a run. 1: done, 0: it is taken, -1: an exception is set. */
static int give(Names *self, uint64_t key, PyObject *run) {
    uint64_t hash = mixed(key);
    Shard *shard = shard_of(self, hash);
    if (shard->slots == NULL) {
        if (resize(shard, SMALLEST) < 0) return -1;
    } else if ((shard->used + 1) * 4 > (shard->mask + 1) * 3 && resize(shard, (shard->mask + 1) * 2) < 0) {
        return -1;
    }
    Slot *slot = seek(shard, key, hash);
    if (slot->run != NULL) return 0;
    slot->key = key;
    slot->run = Py_NewRef(run);
    shard->used++;
    self->size++;
    return 1;
}

/* Takes one key back. 1: done, 0: it was nobody's, -1: an exception is set. */
static int take(Names *self, uint64_t key) {
    uint64_t hash = mixed(key);
    Shard *shard = shard_of(self, hash);
    if (shard->slots == NULL) return 0;
    Slot *slots = shard->slots, *slot = seek(shard, key, hash);
    PyObject *run = slot->run;
    if (run == NULL) return 0;
    size_t mask = shard->mask, hole = (size_t)(slot - slots);
    for (size_t at = (hole + 1) & mask; slots[at].run != NULL; at = (at + 1) & mask) {
        size_t from_home = (at - home(shard, mixed(slots[at].key))) & mask;
        if (from_home >= ((at - hole) & mask)) { /* It may stand in the hole. */
            slots[hole] = slots[at];
            hole = at;
        }
    }
    slots[hole].run = NULL;
    shard->used--;
    self->size--;
    Py_DECREF(run);
    if (shard->used == 0) {
        free(shard->slots);
        shard->slots = NULL;
    } else if (mask >= SMALLEST && shard->used * 8 < mask + 1) {
        return resize(shard, (mask + 1) / 2) < 0 ? -1 : 1;
    }
    return 1;
}

/* A key as 64 bits; negative ones are taken as the same bits. */
static inline int as_key(PyObject *number, uint64_t *key) {
    *key = PyLong_AsUnsignedLongLongMask(number);
    return *key == UINT64_MAX && PyErr_Occurred() ? -1 : 0;
}

/* Reads the keys of a list from number `first` on, at most `AHEAD` and below `count`, and requests their slots. Their number, or -1:
 * an exception is set. */
static int read_some(Names *self, PyObject *list, Py_ssize_t first, Py_ssize_t count, uint64_t *keys) {
    int some = count - first < AHEAD ? (int)(count - first) : AHEAD;
    for (int at = 0; at < some; at++) {
        if (as_key(PyList_GET_ITEM(list, first + at), &keys[at]) < 0) return -1;
        uint64_t hash = mixed(keys[at]);
        Shard *shard = shard_of(self, hash);
        if (shard->slots != NULL) PREFETCH(&shard->slots[home(shard, hash)]);
    }
    return some;
}

static int take_list(Names *self, PyObject *list, Py_ssize_t count) {
    for (Py_ssize_t first = 0; first < count; first += AHEAD) {
        uint64_t keys[AHEAD];
        int some = read_some(self, list, first, count, keys);
        if (some < 0) return -1;
        for (int at = 0; at < some; at++) {
            int done = take(self, keys[at]);
            if (done < 0) return -1;
            if (done == 0) {
                PyErr_SetObject(PyExc_KeyError, PyList_GET_ITEM(list, first + at));
                return -1;
            }
        }
    }
    return 0;
}

static PyObject *names_get(Names *self, PyObject *number) {
    uint64_t key;
    if (as_key(number, &key) < 0) return NULL;
    uint64_t hash = mixed(key);
    Shard *shard = shard_of(self, hash);
    PyObject *run = shard->slots == NULL ? NULL : seek(shard, key, hash)->run;
    return Py_NewRef(run == NULL ? Py_None : run);
}

static inline void exempt(PyObject *object) {
    if (PyObject_IS_GC(object)) PyObject_GC_UnTrack(object);
}

static PyObject *names_claim(Names *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 2 || !PyList_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "claim takes a list of keys and a run");
        return NULL;
    }
    Py_ssize_t count = PyList_GET_SIZE(args[0]);
    uint64_t keys[AHEAD];
    for (Py_ssize_t at = 0; at < count; at++) {
        int is_read = at % AHEAD != 0 || read_some(self, args[0], at, count, keys) >= 0;
        int done = is_read ? give(self, keys[at % AHEAD], args[1]) : -1;
        if (done == 1) continue;
        if (done == 0) return take_list(self, args[0], at) < 0 ? NULL : Py_NewRef(Py_False);
        PyObject *kind, *value, *trace;
        PyErr_Fetch(&kind, &value, &trace);
        if (take_list(self, args[0], at) < 0) PyErr_Clear();
        PyErr_Restore(kind, value, trace);
        return NULL;
    }
    exempt(args[0]);
    exempt(args[1]);
    Py_RETURN_TRUE;
}

static PyObject *names_release(Names *self, PyObject *keys) {
    if (!PyList_Check(keys)) {
        PyErr_SetString(PyExc_TypeError, "release takes a list of keys");
        return NULL;
    }
    if (take_list(self, keys, PyList_GET_SIZE(keys)) < 0) return NULL;
    Py_RETURN_NONE;
}

static Py_ssize_t names_length(Names *self) { return self->size; }

static void names_dealloc(Names *self) {
    for (int number = 0; number < SHARDS; number++) {
        Shard *shard = &self->shards[number];
        for (size_t at = 0; shard->slots != NULL && at <= shard->mask; at++) Py_XDECREF(shard->slots[at].run);
        free(shard->slots);
    }
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef names_methods[] = {
    {"get", (PyCFunction)names_get, METH_O, "The run of a key, which may be nobody's."},
    {"claim", (PyCFunction)(void (*)(void))names_claim, METH_FASTCALL,
     "Gives keys to a run: all of them, or none where one is taken or there twice."},
    {"release", (PyCFunction)names_release, METH_O, "Takes keys back, each of which must be given."},
    {NULL},
};

static PySequenceMethods names_sequence = {.sq_length = (lenfunc)names_length};

static PyTypeObject names_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "dynamo.kv_router._names.CompiledNames",
    .tp_doc = "A table of keys, each for one run.",
    .tp_basicsize = sizeof(Names),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_dealloc = (destructor)names_dealloc,
    .tp_methods = names_methods,
    .tp_as_sequence = &names_sequence,
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_names",
    .m_doc = "The table of common names, compiled.",
    .m_size = -1,
};

PyMODINIT_FUNC PyInit__names(void) {
    if (PyType_Ready(&names_type) < 0) return NULL;
    PyObject *made = PyModule_Create(&module);
    if (made == NULL) return NULL;
    if (PyModule_AddObjectRef(made, "CompiledNames", (PyObject *)&names_type) < 0) {
        Py_DECREF(made);
        return NULL;
    }
    return made;
}
