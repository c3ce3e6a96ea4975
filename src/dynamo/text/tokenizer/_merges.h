/* Merges: the ids of a word by byte-level BPE. Of all pairs of neighbours, the one with the lowest rank is merged first. */

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#define SHORT_BYTES 64 /* Words up to this length are merged by a search of the lowest rank. */
#define NONE UINT32_MAX

typedef struct {
    uint32_t left, right, rank, made;
} Merge;

typedef struct {
    uint32_t byte_ids[256];
    Merge *table; /* Places of the merges; a free place has no rank. */
    uint32_t mask;
} Merges;

static inline uint32_t merge_place(uint32_t left, uint32_t right) {
    uint64_t key = ((uint64_t)left << 32 | right) * UINT64_C(0x9E3779B97F4A7C15);
    return (uint32_t)(key >> 32);
}

/* Rank of a pair of neighbours, and the token that replaces it; `NONE` without. */
static inline uint32_t rank_of(const Merges *merges, uint32_t left, uint32_t right, uint32_t *made) {
    for (uint32_t at = merge_place(left, right) & merges->mask;; at = (at + 1) & merges->mask) {
        const Merge *merge = &merges->table[at];
        if (merge->rank == NONE) return NONE;
        if (merge->left == left && merge->right == right) {
            *made = merge->made;
            return merge->rank;
        }
    }
}

/* Ids of a word of at most `SHORT_BYTES`. Of the pairs with the lowest rank, the first is merged, until there is none. */
static size_t merge_short(const Merges *merges, const uint8_t *word, size_t count, uint32_t *ids) {
    uint32_t ranks[SHORT_BYTES], made[SHORT_BYTES];
    for (size_t at = 0; at < count; at++) ids[at] = merges->byte_ids[word[at]];
    for (size_t at = 0; at + 1 < count; at++) ranks[at] = rank_of(merges, ids[at], ids[at + 1], &made[at]);
    for (;;) {
        uint32_t lowest = NONE;
        size_t best = 0;
        for (size_t at = 0; at + 1 < count; at++) {
            if (ranks[at] < lowest) lowest = ranks[best = at];
        }
        if (lowest == NONE) return count;
        ids[best] = made[best];
        count--;
        for (size_t at = best + 1; at < count; at++) {
            ids[at] = ids[at + 1];
            ranks[at - 1] = ranks[at];
            made[at - 1] = made[at];
        }
        if (best + 1 < count) ranks[best] = rank_of(merges, ids[best], ids[best + 1], &made[best]);
        if (best > 0) ranks[best - 1] = rank_of(merges, ids[best - 1], ids[best], &made[best - 1]);
    }
}

/* A pair of a long word, with its left neighbour's place; `rank` is `NONE` once it is merged into the one before it. */
typedef struct {
    uint32_t id, rank, made, next, before;
} Symbol;

typedef struct {
    uint64_t *items; /* Rank, then place: the lowest item is the pair to merge. */
    size_t count;
} Heap;

static void push(Heap *heap, uint32_t rank, uint32_t place) {
    uint64_t item = (uint64_t)rank << 32 | place;
    size_t at = heap->count++;
    for (size_t up; at > 0 && heap->items[up = (at - 1) / 2] > item; at = up) heap->items[at] = heap->items[up];
    heap->items[at] = item;
}

static uint64_t pop(Heap *heap) {
    uint64_t top = heap->items[0], last = heap->items[--heap->count];
    size_t at = 0;
    for (size_t down; (down = 2 * at + 1) < heap->count; at = down) {
        if (down + 1 < heap->count && heap->items[down + 1] < heap->items[down]) down++;
        if (heap->items[down] >= last) break;
        heap->items[at] = heap->items[down];
    }
    heap->items[at] = last;
    return top;
}

/* Looks up the pair that begins at a place, and adds it to the heap if there is a merge. */
static void look_up(const Merges *merges, Symbol *symbols, uint32_t place, Heap *heap) {
    Symbol *symbol = &symbols[place];
    symbol->rank = symbol->next == NONE ? NONE : rank_of(merges, symbol->id, symbols[symbol->next].id, &symbol->made);
    if (symbol->rank != NONE) push(heap, symbol->rank, place);
}

/* As `merge_short`, for a word of any length; the number of ids, -1 if there is no memory. */
static Py_ssize_t merge_long(const Merges *merges, const uint8_t *word, size_t count, uint32_t *ids) {
    if (count >= NONE / 4) return -1;
    Symbol *symbols = malloc(count * sizeof *symbols);
    Heap heap = {malloc(3 * count * sizeof *heap.items), 0}; /* One pair per symbol at first, and two new ones per merge. */
    if (symbols == NULL || heap.items == NULL) {
        free(symbols);
        free(heap.items);
        return -1;
    }
    for (size_t at = 0; at < count; at++) {
        symbols[at] = (Symbol){merges->byte_ids[word[at]], NONE, 0, at + 1 < count ? (uint32_t)at + 1 : NONE,
                               at > 0 ? (uint32_t)at - 1 : NONE};
    }
    for (size_t at = 0; at < count; at++) look_up(merges, symbols, (uint32_t)at, &heap);
    while (heap.count > 0) {
        uint64_t item = pop(&heap);
        uint32_t place = (uint32_t)item;
        Symbol *symbol = &symbols[place];
        if (symbol->rank != item >> 32) continue; /* Merged otherwise since it was added. */
        Symbol *right = &symbols[symbol->next];
        symbol->id = symbol->made;
        symbol->next = right->next;
        right->rank = NONE;
        if (symbol->next != NONE) symbols[symbol->next].before = place;
        look_up(merges, symbols, place, &heap);
        if (symbol->before != NONE) look_up(merges, symbols, symbol->before, &heap);
    }
    Py_ssize_t made = 0;
    for (uint32_t place = 0; place != NONE; place = symbols[place].next) ids[made++] = symbols[place].id;
    free(symbols);
    free(heap.items);
    return made;
}

/* Ids of a word of any length, at most one per byte; -1 if there is no memory. */
static Py_ssize_t merge(const Merges *merges, const uint8_t *word, size_t length, uint32_t *ids) {
    return length <= SHORT_BYTES ? (Py_ssize_t)merge_short(merges, word, length, ids) : merge_long(merges, word, length, ids);
}

/* Takes the ids of the left, the right and the joined token of every merge, in the order of their ranks. -1: no memory. */
static int begin_merges(Merges *merges, const uint32_t *triples, size_t count) {
    size_t places = 4;
    while (places < count + count / 2) places *= 2;
    merges->table = places > NONE / 2 ? NULL : malloc(places * sizeof *merges->table);
    if (merges->table == NULL) return -1;
    merges->mask = (uint32_t)places - 1;
    for (size_t at = 0; at < places; at++) merges->table[at].rank = NONE;
    for (size_t rank = 0; rank < count; rank++) {
        uint32_t left = triples[3 * rank], right = triples[3 * rank + 1], at = merge_place(left, right) & merges->mask;
        while (merges->table[at].rank != NONE && (merges->table[at].left != left || merges->table[at].right != right)) {
            at = (at + 1) & merges->mask;
        }
        merges->table[at] = (Merge){left, right, (uint32_t)rank, triples[3 * rank + 2]}; /* The last of equal pairs counts. */
    }
    return 0;
}
