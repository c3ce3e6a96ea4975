/* BlockMarks, compiled: the equivalent of `marks.PythonMarks`, which is its definition; the tests compare both.
 *
 * A hash table from block hashes to 32-bit marks: open addressing with linear probing; a deletion shifts back the slots that
 * follow, so that no tombstone is left. A slot takes 16 bytes and refers to no object. A replay of many workers has more
 * blocks than fit into the processor's caches, so the functions for a list request the slots of several hashes from memory
 * before they use the first.
 *
 * A hash is an integer from -2^64 to 2^64 - 1; a negative one differs from the positive one with the same 64 bits.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>

#define SMALLEST 64 /* Slots of a table that holds anything. */
#define AHEAD 16    /* Hashes whose slots are requested from memory at the same time. */

#if defined(__GNUC__) || defined(__clang__)
#define PREFETCH(address) __builtin_prefetch(address, 1)
#else
#define PREFETCH(address) ((void)(address))
#endif

enum { FREE, POSITIVE, NEGATIVE };

typedef struct {
    uint64_t key;
    int32_t mark;
    int32_t kind;
} Slot;

typedef struct {
    PyObject_HEAD
    Slot *slots;
    size_t mask; /* Number of slots less one; meaningless without slots. */
    size_t used;
} Marks;

typedef struct {
    uint64_t key;
    int32_t kind;
} Hash;

static int read_hash(PyObject *number, Hash *hash) {
    int overflow;
    long long value = PyLong_AsLongLongAndOverflow(number, &overflow);
    if (value == -1 && !overflow && PyErr_Occurred()) return -1;
    if (!overflow) {
        hash->key = (uint64_t)value;
        hash->kind = value < 0 ? NEGATIVE : POSITIVE;
        return 0;
    }
    hash->key = PyLong_AsUnsignedLongLongMask(number);
    hash->kind = overflow < 0 ? NEGATIVE : POSITIVE;
    return hash->key == UINT64_MAX && PyErr_Occurred() ? -1 : 0;
}

static int read_mark(PyObject *number, int32_t *mark) {
    long value = PyLong_AsLong(number);
    if (value == -1 && PyErr_Occurred()) return -1;
    if (value < INT32_MIN || value > INT32_MAX) {
        PyErr_SetString(PyExc_OverflowError, "a mark has 32 bits");
        return -1;
    }
    *mark = (int32_t)value;
    return 0;
}

static PyObject *number_of(const Slot *slot) {
    if (slot->kind == POSITIVE) return PyLong_FromUnsignedLongLong(slot->key);
    PyObject *inverse = PyLong_FromUnsignedLongLong(~slot->key), *found = NULL;
    if (inverse != NULL) found = PyNumber_Invert(inverse); /* -1 - inverse */
    Py_XDECREF(inverse);
    return found;
}

static inline size_t home(const Marks *self, uint64_t key) {
    return (size_t)((key * UINT64_C(0x9E3779B97F4A7C15)) >> 32) & self->mask;
}

/* The slot of a hash, or the free one where it would be. The table has slots. */
static inline Slot *seek(const Marks *self, Hash hash) {
    size_t at = home(self, hash.key);
    while (self->slots[at].kind != FREE && (self->slots[at].key != hash.key || self->slots[at].kind != hash.kind))
        at = (at + 1) & self->mask;
    return &self->slots[at];
}

static inline Slot *find(const Marks *self, Hash hash) {
    if (self->slots == NULL) return NULL;
    Slot *slot = seek(self, hash);
    return slot->kind == FREE ? NULL : slot;
}

/* Makes room for further hashes. */
static int reserve(Marks *self, size_t more) {
    size_t before = self->slots == NULL ? 0 : self->mask + 1, count = before ? before : SMALLEST;
    while ((self->used + more) * 4 > count * 3) count *= 2;
    if (count == before) return 0;
    Slot *old = self->slots, *fresh = calloc(count, sizeof(Slot));
    if (fresh == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    self->slots = fresh;
    self->mask = count - 1;
    for (size_t at = 0; at < before; at++)
        if (old[at].kind != FREE) *seek(self, (Hash){old[at].key, old[at].kind}) = old[at];
    free(old);
    return 0;
}

/* Sets the mark of a hash; the table has room for it. */
static inline void put(Marks *self, Hash hash, int32_t mark) {
    Slot *slot = seek(self, hash);
    if (slot->kind == FREE) {
        slot->key = hash.key;
        slot->kind = hash.kind;
        self->used++;
    }
    slot->mark = mark;
}

static void empty(Marks *self, Slot *slot) {
    Slot *slots = self->slots;
    size_t mask = self->mask, hole = (size_t)(slot - slots);
    for (size_t at = (hole + 1) & mask; slots[at].kind != FREE; at = (at + 1) & mask) {
        if (((at - home(self, slots[at].key)) & mask) >= ((at - hole) & mask)) { /* It may be moved to the hole. */
            slots[hole] = slots[at];
            hole = at;
        }
    }
    slots[hole].kind = FREE;
    self->used--;
}

/* Reads the hashes of a list from number `first` on, at most `AHEAD`, and requests their slots. Returns their number, or -1. */
static int read_some(const Marks *self, PyObject *list, Py_ssize_t first, Hash *hashes) {
    Py_ssize_t rest = PyList_GET_SIZE(list) - first;
    int count = rest < AHEAD ? (int)rest : AHEAD;
    for (int at = 0; at < count; at++) {
        if (read_hash(PyList_GET_ITEM(list, first + at), &hashes[at]) < 0) return -1;
        if (self->slots != NULL) PREFETCH(&self->slots[home(self, hashes[at].key)]);
    }
    return count;
}

static int is_list(PyObject *object) {
    if (PyList_Check(object)) return 1;
    PyErr_SetString(PyExc_TypeError, "expected a list of hashes");
    return 0;
}

static PyObject *marks_put_all(Marks *self, PyObject *const *args, Py_ssize_t nargs) {
    int32_t mark;
    if (nargs != 2) {
        PyErr_SetString(PyExc_TypeError, "put_all takes a list of hashes and a mark");
        return NULL;
    }
    if (!is_list(args[0]) || read_mark(args[1], &mark) < 0) return NULL;
    if (reserve(self, (size_t)PyList_GET_SIZE(args[0])) < 0) return NULL;
    for (Py_ssize_t first = 0; first < PyList_GET_SIZE(args[0]); first += AHEAD) {
        Hash hashes[AHEAD];
        int count = read_some(self, args[0], first, hashes);
        if (count < 0) return NULL;
        for (int at = 0; at < count; at++) put(self, hashes[at], mark);
    }
    Py_RETURN_NONE;
}

static PyObject *marks_marked(Marks *self, PyObject *const *args, Py_ssize_t nargs) {
    int32_t mark;
    if (nargs != 2) {
        PyErr_SetString(PyExc_TypeError, "marked takes a list of hashes and a mark");
        return NULL;
    }
    if (!is_list(args[0]) || read_mark(args[1], &mark) < 0) return NULL;
    PyObject *found = PyList_New(0);
    for (Py_ssize_t first = 0; found != NULL && first < PyList_GET_SIZE(args[0]); first += AHEAD) {
        Hash hashes[AHEAD];
        int count = read_some(self, args[0], first, hashes);
        for (int at = 0; at < count; at++) {
            Slot *slot = find(self, hashes[at]);
            if (slot == NULL || slot->mark != mark) continue;
            if (PyList_Append(found, PyList_GET_ITEM(args[0], first + at)) < 0) count = -1;
        }
        if (count < 0) Py_CLEAR(found);
    }
    return found;
}

static PyObject *marks_drop(Marks *self, PyObject *list) {
    if (!is_list(list)) return NULL;
    PyObject *found = PyList_New(0);
    for (Py_ssize_t first = 0; found != NULL && first < PyList_GET_SIZE(list); first += AHEAD) {
        Hash hashes[AHEAD];
        int count = read_some(self, list, first, hashes);
        for (int at = 0; at < count; at++) {
            PyObject *number = PyList_GET_ITEM(list, first + at);
            Slot *slot = find(self, hashes[at]);
            if (slot == NULL) {
                PyErr_SetObject(PyExc_KeyError, number);
                count = -1;
                break;
            }
            empty(self, slot);
            if (hashes[at].kind == POSITIVE && PyList_Append(found, number) < 0) count = -1;
        }
        if (count < 0) Py_CLEAR(found);
    }
    return found;
}

/* Whether a slot is of the kind that ends a count: 1, 0, or -1 with an exception. */
typedef int (*Ends)(const Slot *slot, PyObject *number);

static int is_unknown(const Slot *slot, PyObject *number) { return slot == NULL; }

static int known(const Slot *slot, PyObject *number) {
    if (slot == NULL) PyErr_SetObject(PyExc_KeyError, number);
    return slot == NULL ? -1 : 1;
}

static int is_idle(const Slot *slot, PyObject *number) { return known(slot, number) < 0 ? -1 : slot->mark <= 0; }

static int is_single(const Slot *slot, PyObject *number) { return known(slot, number) < 0 ? -1 : slot->mark == 1; }

/* The number of leading hashes before the first that ends the count, by binary search. */
static PyObject *leading(Marks *self, PyObject *list, Ends ends) {
    if (!is_list(list)) return NULL;
    Py_ssize_t low = 0, high = PyList_GET_SIZE(list);
    while (low < high) {
        Py_ssize_t middle = low + (high - low) / 2;
        PyObject *number = PyList_GET_ITEM(list, middle);
        Hash hash;
        if (read_hash(number, &hash) < 0) return NULL;
        int is_end = ends(find(self, hash), number);
        if (is_end < 0) return NULL;
        if (is_end) high = middle;
        else low = middle + 1;
    }
    return PyLong_FromSsize_t(low);
}

static PyObject *marks_known(Marks *self, PyObject *list) { return leading(self, list, is_unknown); }
static PyObject *marks_held(Marks *self, PyObject *list) { return leading(self, list, is_idle); }
static PyObject *marks_shared(Marks *self, PyObject *list) { return leading(self, list, is_single); }

static PyObject *marks_get(Marks *self, PyObject *number) {
    Hash hash;
    if (read_hash(number, &hash) < 0) return NULL;
    Slot *slot = find(self, hash);
    if (slot == NULL) Py_RETURN_NONE;
    return PyLong_FromLong(slot->mark);
}

static PyObject *marks_items(Marks *self, PyObject *unused) {
    PyObject *found = PyList_New(0);
    for (size_t at = 0; found != NULL && self->slots != NULL && at <= self->mask; at++) {
        if (self->slots[at].kind == FREE) continue;
        PyObject *number = number_of(&self->slots[at]), *pair = NULL;
        if (number != NULL) pair = Py_BuildValue("(Nl)", number, (long)self->slots[at].mark);
        if (pair == NULL || PyList_Append(found, pair) < 0) Py_CLEAR(found);
        Py_XDECREF(pair);
    }
    return found;
}

static Py_ssize_t marks_length(Marks *self) { return (Py_ssize_t)self->used; }

static int marks_contains(Marks *self, PyObject *number) {
    Hash hash;
    if (read_hash(number, &hash) < 0) return -1;
    return find(self, hash) != NULL;
}

static PyObject *marks_subscript(Marks *self, PyObject *number) {
    Hash hash;
    if (read_hash(number, &hash) < 0) return NULL;
    Slot *slot = find(self, hash);
    if (slot != NULL) return PyLong_FromLong(slot->mark);
    PyErr_SetObject(PyExc_KeyError, number);
    return NULL;
}

static int marks_assign(Marks *self, PyObject *number, PyObject *value) {
    Hash hash;
    int32_t mark;
    if (value == NULL) {
        PyErr_SetString(PyExc_TypeError, "use drop to remove hashes");
        return -1;
    }
    if (read_hash(number, &hash) < 0 || read_mark(value, &mark) < 0 || reserve(self, 1) < 0) return -1;
    put(self, hash, mark);
    return 0;
}

static void marks_dealloc(Marks *self) {
    free(self->slots);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef marks_methods[] = {
    {"get", (PyCFunction)marks_get, METH_O, "The mark of a hash; None without one."},
    {"items", (PyCFunction)marks_items, METH_NOARGS, "All hashes with their marks."},
    {"put_all", (PyCFunction)(void (*)(void))marks_put_all, METH_FASTCALL, "Set the mark of these hashes."},
    {"drop", (PyCFunction)marks_drop, METH_O, "Remove hashes and return those that are not negative."},
    {"marked", (PyCFunction)(void (*)(void))marks_marked, METH_FASTCALL, "The hashes of a list that have this mark."},
    {"known", (PyCFunction)marks_known, METH_O, "The number of leading hashes that have marks."},
    {"held", (PyCFunction)marks_held, METH_O, "The number of leading hashes with marks above zero."},
    {"shared", (PyCFunction)marks_shared, METH_O, "The number of leading hashes whose mark is not one."},
    {NULL},
};

static PySequenceMethods marks_sequence = {.sq_contains = (objobjproc)marks_contains};
static PyMappingMethods marks_mapping = {
    .mp_length = (lenfunc)marks_length,
    .mp_subscript = (binaryfunc)marks_subscript,
    .mp_ass_subscript = (objobjargproc)marks_assign,
};

static PyTypeObject marks_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "dynamo.mocker.simulation._marks.CompiledMarks",
    .tp_doc = "A table of block hashes and their marks.",
    .tp_basicsize = sizeof(Marks),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_dealloc = (destructor)marks_dealloc,
    .tp_methods = marks_methods,
    .tp_as_sequence = &marks_sequence,
    .tp_as_mapping = &marks_mapping,
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_marks",
    .m_doc = "The table of block marks, compiled.",
    .m_size = -1,
};

PyMODINIT_FUNC PyInit__marks(void) {
    if (PyType_Ready(&marks_type) < 0) return NULL;
    PyObject *made = PyModule_Create(&module);
    if (made == NULL) return NULL;
    if (PyModule_AddObjectRef(made, "CompiledMarks", (PyObject *)&marks_type) < 0) {
        Py_DECREF(made);
        return NULL;
    }
    return made;
}
