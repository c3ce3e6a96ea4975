/* The token path, compiled: the twins of `token_path.python_on_token` and `python_write_waiting`, which are their
 * definition and their oracle in the tests.
 *
 * They work on the same objects as the Python functions: the attributes are `__slots__`, read at the offsets that the
 * classes' member descriptors have. An object of another form goes to the Python function. The interpreter lock is
 * kept during `write`: the socket does not block, and giving up the lock costs more than a thread gains.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <string.h>
#include <structmember.h>
#include <unistd.h>

#define CHUNK_BYTES 8192 /* Larger chunks are written by the Python function. */
#define PREFIX_BYTES 24  /* More than the size line of any such chunk. */
#define SLOTS_MAX 8

/* Offsets of the slots of one class; the latest class that was seen, with a reference. */
typedef struct {
    const char *const *names;
    PyTypeObject *type;
    Py_ssize_t offsets[SLOTS_MAX];
} Layout;

enum { G_CHOICE, G_TEXTS, G_RECEIVED, G_TOKENS };
static const char *const generation_names[] = {"_choice", "_texts", "received_ids", "tokens", NULL};
static Layout generation_layout = {generation_names};

enum { C_ANSWER, C_FRAME, C_IS_PLAIN, C_PIECES, C_QUEUE };
static const char *const choice_names[] = {"answer", "frame", "is_plain", "pieces", "queue", NULL};
static Layout choice_layout = {choice_names};

enum { F_EXCHANGE, F_HEAD, F_STATE, F_TAIL };
static const char *const frame_names[] = {"exchange", "head", "state", "tail", NULL};
static Layout frame_layout = {frame_names};

enum { E_DISCONNECTED, E_FD, E_IS_DIRECT, E_COMPLETE };
static const char *const exchange_names[] = {"disconnected", "fd", "is_direct", "response_complete", NULL};
static Layout exchange_layout = {exchange_names};

enum { S_LAST_S, S_METRICS };
static const char *const state_names[] = {"last_s", "metrics", NULL};
static Layout state_layout = {state_names};

static PyObject *name_touch, *name_slow_token, *name_write_chunk, *name_itl, *name_observe_many, *name_fail;

/* Reads the offsets of a class. 1: done, 0: it has not all of these slots. */
static int learn(Layout *layout, PyTypeObject *type) {
    for (int at = 0; layout->names[at] != NULL; at++) {
        PyObject *found = PyObject_GetAttrString((PyObject *)type, layout->names[at]);
        if (found == NULL) {
            PyErr_Clear();
            return 0;
        }
        PyMemberDef *member = Py_IS_TYPE(found, &PyMemberDescr_Type) ? ((PyMemberDescrObject *)found)->d_member : NULL;
        Py_DECREF(found);
        if (member == NULL || member->type != T_OBJECT_EX) return 0;
        layout->offsets[at] = member->offset;
    }
    Py_XSETREF(layout->type, (PyTypeObject *)Py_NewRef(type));
    return 1;
}

static inline int fits(Layout *layout, PyObject *object) {
    return Py_TYPE(object) == layout->type || learn(layout, Py_TYPE(object));
}

/* A slot of an object that fits; borrowed, NULL if it is not set. */
static inline PyObject **slot(const Layout *layout, PyObject *object, int which) {
    return (PyObject **)((char *)object + layout->offsets[which]);
}

static inline PyObject *get(const Layout *layout, PyObject *object, int which) {
    return *slot(layout, object, which);
}

static inline void set(const Layout *layout, PyObject *object, int which, PyObject *value) {
    PyObject **place = slot(layout, object, which);
    PyObject *before = *place;
    *place = Py_NewRef(value);
    Py_XDECREF(before);
}

/* Calls a method with one argument and drops its result. */
static int call(PyObject *object, PyObject *name, PyObject *argument) {
    PyObject *result = PyObject_CallMethodOneArg(object, name, argument);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

/* --- on_token ----------------------------------------------------------------------------------------------------- */

/* Adds a piece to the choice, which it gives to its response if it is the first since the last write. */
static int add_piece(PyObject *choice, PyObject *piece) {
    PyObject *pieces = get(&choice_layout, choice, C_PIECES);
    if (PyList_GET_SIZE(pieces) == 0) {
        PyObject *queue = get(&choice_layout, choice, C_QUEUE);
        if (queue != NULL && PyList_CheckExact(queue) && PyList_GET_SIZE(queue) > 0) {
            if (PyList_Append(queue, choice) < 0) return -1;
        } else {
            PyObject *answer = get(&choice_layout, choice, C_ANSWER);
            Py_INCREF(answer);
            int done = call(answer, name_touch, choice);
            Py_DECREF(answer);
            if (done < 0) return -1;
        }
        pieces = get(&choice_layout, choice, C_PIECES); /* The response may have replaced it. */
    }
    return PyList_Append(pieces, piece);
}

static PyObject *on_token(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 2) {
        PyErr_SetString(PyExc_TypeError, "on_token takes a token id");
        return NULL;
    }
    PyObject *self = args[0];
    if (!fits(&generation_layout, self)) {
        PyErr_Format(PyExc_TypeError, "on_token needs a generation, not %.100s", Py_TYPE(self)->tp_name);
        return NULL;
    }
    Py_ssize_t token = PyLong_AsSsize_t(args[1]);
    if (token == -1 && PyErr_Occurred()) return NULL;
    PyObject *tokens = get(&generation_layout, self, G_TOKENS), *received = get(&generation_layout, self, G_RECEIVED);
    PyObject *choice = get(&generation_layout, self, G_CHOICE), *texts = get(&generation_layout, self, G_TEXTS);
    if (tokens == NULL || received == NULL || choice == NULL || texts == NULL || !PyList_Check(texts) ||
        !fits(&choice_layout, choice)) {
        PyErr_SetString(PyExc_TypeError, "on_token needs a complete generation");
        return NULL;
    }
    Py_ssize_t count = PyLong_AsSsize_t(tokens);
    if (count == -1 && PyErr_Occurred()) return NULL;
    tokens = PyLong_FromSsize_t(count + 1);
    if (tokens == NULL) return NULL;
    set(&generation_layout, self, G_TOKENS, tokens);
    Py_DECREF(tokens);
    if (received != Py_None && PyList_Append(received, args[1]) < 0) return NULL;
    PyObject *pieces = get(&choice_layout, choice, C_PIECES);
    if (get(&choice_layout, choice, C_IS_PLAIN) == Py_True && pieces != NULL && PyList_CheckExact(pieces)) {
        if (token < 0 || token >= PyList_GET_SIZE(texts)) Py_RETURN_NONE;
        PyObject *piece = PyList_GET_ITEM(texts, token);
        if (PyBytes_CheckExact(piece)) {
            if (PyBytes_GET_SIZE(piece) == 0) Py_RETURN_NONE;
            Py_INCREF(choice);
            int done = add_piece(choice, piece);
            Py_DECREF(choice);
            if (done < 0) return NULL;
            Py_RETURN_NONE;
        }
    }
    Py_INCREF(choice);
    PyObject *result = PyObject_CallMethodObjArgs(self, name_slow_token, choice, args[1], NULL);
    Py_DECREF(choice);
    return result;
}

/* --- write_waiting ------------------------------------------------------------------------------------------------ */

/* Observations of one histogram that have the same time. */
typedef struct {
    PyObject *metrics; /* Metrics of the model; owned, NULL for none. */
    double since_s;
    Py_ssize_t together;
} Gaps;

static int observe(PyObject *metrics, double value, Py_ssize_t count) {
    PyObject *itl = PyObject_GetAttr(metrics, name_itl);
    if (itl == NULL) return -1;
    PyObject *value_object = PyFloat_FromDouble(value), *count_object = PyLong_FromSsize_t(count);
    PyObject *result = value_object == NULL || count_object == NULL
                           ? NULL
                           : PyObject_CallMethodObjArgs(itl, name_observe_many, value_object, count_object, NULL);
    Py_XDECREF(result);
    Py_XDECREF(value_object);
    Py_XDECREF(count_object);
    Py_DECREF(itl);
    return result == NULL ? -1 : 0;
}

static int close_gaps(Gaps *gaps, double now_s) {
    PyObject *metrics = gaps->metrics;
    if (metrics == NULL) return 0;
    gaps->metrics = NULL;
    int done = observe(metrics, now_s - gaps->since_s, gaps->together);
    Py_DECREF(metrics);
    return done;
}

/* Composes the chunk of a frame and its pieces; returns its length and sets `*start`, 0 if it is not all bytes or long. */
static Py_ssize_t compose(char *buffer, char **start, PyObject *frame, PyObject *pieces) {
    PyObject *head = get(&frame_layout, frame, F_HEAD), *tail = get(&frame_layout, frame, F_TAIL);
    if (head == NULL || tail == NULL || !PyBytes_CheckExact(head) || !PyBytes_CheckExact(tail)) return 0;
    Py_ssize_t head_size = PyBytes_GET_SIZE(head), tail_size = PyBytes_GET_SIZE(tail);
    if (head_size > CHUNK_BYTES / 4 || tail_size > CHUNK_BYTES / 4) return 0;
    char *at = buffer + PREFIX_BYTES;
    const char *end = buffer + CHUNK_BYTES - 2;
    for (Py_ssize_t number = 0; number < PyList_GET_SIZE(pieces); number++) {
        PyObject *piece = PyList_GET_ITEM(pieces, number);
        if (!PyBytes_CheckExact(piece)) return 0;
        Py_ssize_t size = PyBytes_GET_SIZE(piece);
        if (size > end - at - head_size - tail_size) return 0;
        memcpy(at, PyBytes_AS_STRING(head), head_size);
        memcpy(at + head_size, PyBytes_AS_STRING(piece), size);
        memcpy(at + head_size + size, PyBytes_AS_STRING(tail), tail_size);
        at += head_size + size + tail_size;
    }
    size_t size = (size_t)(at - buffer) - PREFIX_BYTES;
    char *first = buffer + PREFIX_BYTES;
    *--first = '\n';
    *--first = '\r';
    do *--first = "0123456789abcdef"[size & 15];
    while (size >>= 4);
    *at++ = '\r';
    *at++ = '\n';
    *start = first;
    return at - first;
}

/* Sends a chunk: on the socket if nothing is before it, else by the exchange. */
static int send_chunk(PyObject *exchange, const char *chunk, Py_ssize_t size) {
    if (get(&exchange_layout, exchange, E_IS_DIRECT) == Py_True) {
        int fd = (int)PyLong_AsLong(get(&exchange_layout, exchange, E_FD));
        if (fd == -1 && PyErr_Occurred()) return -1;
        ssize_t sent = write(fd, chunk, size);
        if (sent == size) return 0;
        set(&exchange_layout, exchange, E_IS_DIRECT, Py_False); /* The rest waits in the transport, or it meets the error. */
        if (sent > 0) chunk += sent, size -= sent;
    }
    PyObject *bytes = PyBytes_FromStringAndSize(chunk, size);
    if (bytes == NULL) return -1;
    int done = call(exchange, name_write_chunk, bytes);
    Py_DECREF(bytes);
    return done;
}

/* Writes one choice. 1: done, 0: for the Python function, -1: an exception is set. */
static int write_choice(PyObject *choice, PyObject *now, double now_s, Gaps *gaps) {
    if (!fits(&choice_layout, choice)) return 0;
    PyObject *frame = get(&choice_layout, choice, C_FRAME), *pieces = get(&choice_layout, choice, C_PIECES);
    if (frame == NULL || frame == Py_None || pieces == NULL || !PyList_CheckExact(pieces)) return 0;
    Py_ssize_t count = PyList_GET_SIZE(pieces);
    if (count == 0 || !fits(&frame_layout, frame)) return 0;
    PyObject *exchange = get(&frame_layout, frame, F_EXCHANGE), *state = get(&frame_layout, frame, F_STATE);
    if (exchange == NULL || state == NULL || !fits(&exchange_layout, exchange) || !fits(&state_layout, state)) return 0;
    if (get(&exchange_layout, exchange, E_DISCONNECTED) != Py_False) return 0;
    if (get(&exchange_layout, exchange, E_COMPLETE) != Py_False) return 0;
    PyObject *last = get(&state_layout, state, S_LAST_S), *metrics = get(&state_layout, state, S_METRICS);
    if (last == NULL || !PyFloat_CheckExact(last) || metrics == NULL) return 0;
    char buffer[CHUNK_BYTES], *start;
    Py_ssize_t size = compose(buffer, &start, frame, pieces);
    if (size == 0) return 0;
    Py_INCREF(exchange);
    Py_INCREF(state);
    Py_INCREF(metrics);
    Py_INCREF(pieces);
    double last_s = PyFloat_AS_DOUBLE(last);
    int done = send_chunk(exchange, start, size);
    if (done == 0) {
        set(&state_layout, state, S_LAST_S, now);
        if (count == 1 && metrics == gaps->metrics && last_s == gaps->since_s) {
            gaps->together++;
        } else {
            done = close_gaps(gaps, now_s);
            if (done == 0 && count == 1) {
                *gaps = (Gaps){Py_NewRef(metrics), last_s, 1};
            } else if (done == 0) {
                done = observe(metrics, (now_s - last_s) / (double)count, count);
            }
        }
        if (PyList_SetSlice(pieces, 0, PY_SSIZE_T_MAX, NULL) < 0) done = -1;
    }
    Py_DECREF(pieces);
    Py_DECREF(metrics);
    Py_DECREF(state);
    Py_DECREF(exchange);
    return done < 0 ? -1 : 1;
}

/* Ends the response of a choice with the exception that is set, unless it is not for responses. */
static int fail(PyObject *choice) {
    if (!PyErr_ExceptionMatches(PyExc_Exception) || !fits(&choice_layout, choice)) return -1;
    PyObject *kind, *error, *trace, *answer = get(&choice_layout, choice, C_ANSWER);
    PyErr_Fetch(&kind, &error, &trace);
    PyErr_NormalizeException(&kind, &error, &trace);
    if (trace != NULL) PyException_SetTraceback(error, trace);
    Py_INCREF(answer);
    int done = call(answer, name_fail, error);
    Py_DECREF(answer);
    Py_XDECREF(kind);
    Py_XDECREF(error);
    Py_XDECREF(trace);
    return done;
}

static PyObject *write_waiting(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 3 || !PyList_Check(args[0]) || !PyFloat_CheckExact(args[1])) {
        PyErr_SetString(PyExc_TypeError, "write_waiting takes a list of choices, a time, and a function for other choices");
        return NULL;
    }
    PyObject *waiting = args[0], *now = args[1];
    double now_s = PyFloat_AS_DOUBLE(now);
    Gaps gaps = {NULL, 0, 0};
    for (Py_ssize_t at = 0; at < PyList_GET_SIZE(waiting); at++) {
        PyObject *choice = Py_NewRef(PyList_GET_ITEM(waiting, at));
        int done = write_choice(choice, now, now_s, &gaps);
        if (done == 0) {
            PyObject *result = PyObject_CallFunctionObjArgs(args[2], choice, now, NULL);
            Py_XDECREF(result);
            done = result == NULL ? -1 : 0;
        } else if (done < 0) {
            done = fail(choice);
        }
        Py_DECREF(choice);
        if (done < 0) {
            Py_XDECREF(gaps.metrics);
            return NULL;
        }
    }
    if (close_gaps(&gaps, now_s) < 0) return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef on_token_def = {"on_token", (PyCFunction)(void (*)(void))on_token, METH_FASTCALL,
                                   "Handles one token of a generation."};

static PyMethodDef methods[] = {
    {"write_waiting", (PyCFunction)(void (*)(void))write_waiting, METH_FASTCALL,
     "Writes the pieces of choices; passes those that are not plain to a function."},
    {NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_token_path",
    .m_doc = "The token path, compiled.",
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__token_path(void) {
    name_touch = PyUnicode_InternFromString("touch");
    name_slow_token = PyUnicode_InternFromString("on_slow_token");
    name_write_chunk = PyUnicode_InternFromString("write_chunk");
    name_itl = PyUnicode_InternFromString("itl");
    name_observe_many = PyUnicode_InternFromString("observe_many");
    name_fail = PyUnicode_InternFromString("fail");
    if (!name_touch || !name_slow_token || !name_write_chunk || !name_itl || !name_observe_many || !name_fail) return NULL;
    PyObject *made = PyModule_Create(&module);
    if (made == NULL) return NULL;
    /* A built-in function is no method of the class that has it; this makes it one. */
    PyObject *function = PyCFunction_New(&on_token_def, NULL);
    PyObject *method = function == NULL ? NULL : PyInstanceMethod_New(function);
    Py_XDECREF(function);
    if (method == NULL || PyModule_AddObjectRef(made, "on_token", method) < 0) {
        Py_XDECREF(method);
        Py_DECREF(made);
        return NULL;
    }
    Py_DECREF(method);
    return made;
}
