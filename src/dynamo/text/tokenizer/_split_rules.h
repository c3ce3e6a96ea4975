/* Split: a text into words, by a list of rules that stand for the alternatives of a split regex; and the classes of characters.
 *
 * A text is UTF-8 without errors. A character without a class is in no word: the place where it is has no rule.
 */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { OTHER = 1, LETTER = 2, NUMBER = 4, MARK = 8, SPACE = 16, NEWLINE = 32 }; /* Classes of characters; 0: unsettled. */
#define BLANK (SPACE | NEWLINE)
#define WIDE 128

/* Alternatives of split regexes; `compiled_words.ALTERNATIVES` has the same numbers. */
enum {
    CONTRACTION = 1,        /* 's|'t|'re|'ve|'m|'ll|'d */
    CONTRACTION_ANY_CASE,   /* (?i:'s|'t|'re|'ve|'m|'ll|'d) */
    LETTERS_AFTER_SPACE,    /*  ?\p{L}+ */
    LETTERS_AFTER_ANY,      /* [^\r\n\p{L}\p{N}]?\p{L}+ */
    MARKED_AFTER_ANY,       /* [^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+ */
    NUMBERS_AFTER_SPACE,    /*  ?\p{N}+ */
    ONE_NUMBER,             /* \p{N} */
    THREE_NUMBERS,          /* \p{N}{1,3} */
    OTHERS,                 /*  ?[^\s\p{L}\p{N}]+ */
    OTHERS_AND_NEWLINES,    /*  ?[^\s\p{L}\p{N}]+[\r\n]* */
    UNMARKED_AND_NEWLINES,  /*  ?[^\s\p{L}\p{M}\p{N}]+[\r\n]* */
    NEWLINES,               /* \s*[\r\n]+ */
    BLANKS_BUT_LAST,        /* \s+(?!\S) */
    BLANKS,                 /* \s+ */
    RULES_END
};
#define RULES_MAX 16

typedef struct {
    uint8_t rules[RULES_MAX];
    uint8_t kinds[256];       /* Class of an ASCII character, `WIDE` for the first byte of any other. */
    uint8_t first_rules[256]; /* Place of the first rule that a word with this first byte may follow. */
    const uint8_t *classes;   /* Class of each code point; kept by the owner. */
    size_t classes_count;
} Split;

/* ---- characters -------------------------------------------------------------------------------------------------- */

/* Class of the character at a place before the end, and its width in bytes. */
static inline uint8_t class_at(const Split *split, const uint8_t *text, size_t at, int *width) {
    uint8_t first = text[at];
    if (first < 0x80) {
        *width = 1;
        return split->classes[first];
    }
    uint32_t code;
    if (first < 0xE0) {
        *width = 2;
        code = (uint32_t)(first & 0x1F) << 6 | (text[at + 1] & 0x3F);
    } else if (first < 0xF0) {
        *width = 3;
        code = (uint32_t)(first & 0x0F) << 12 | (uint32_t)(text[at + 1] & 0x3F) << 6 | (text[at + 2] & 0x3F);
    } else {
        *width = 4;
        code = (uint32_t)(first & 0x07) << 18 | (uint32_t)(text[at + 1] & 0x3F) << 12 |
               (uint32_t)(text[at + 2] & 0x3F) << 6 | (text[at + 3] & 0x3F);
    }
    return code < split->classes_count ? split->classes[code] : 0;
}

/* End of the run of characters of these classes. */
static inline size_t run(const Split *split, const uint8_t *text, size_t at, size_t end, uint8_t classes) {
    for (;;) {
        while (at < end && split->kinds[text[at]] & classes) at++;
        int width;
        if (at == end || split->kinds[text[at]] != WIDE || !(class_at(split, text, at, &width) & classes)) return at;
        at += width;
    }
}

/* ---- rules ------------------------------------------------------------------------------------------------------- */

static size_t contraction(const uint8_t *text, size_t at, size_t end, uint8_t fold) {
    if (text[at] != '\'' || at + 1 >= end) return 0;
    uint8_t first = text[at + 1] | fold, second = at + 2 < end ? text[at + 2] | fold : 0;
    /* `fold` changes no other byte into one of these letters: they are 0x61 to 0x7A, and a capital lacks only that bit. */
    if (first == 's' || first == 't' || first == 'm' || first == 'd') return at + 2;
    if ((first == 'r' && second == 'e') || (first == 'v' && second == 'e') || (first == 'l' && second == 'l')) return at + 3;
    return 0;
}

/* A space if there is one, then a run of these classes. */
static inline size_t after_space(const Split *split, const uint8_t *text, size_t at, size_t end, uint8_t classes) {
    size_t from = at + (text[at] == ' '), to = run(split, text, from, end, classes);
    return to > from ? to : 0;
}

/* A character that is neither letter, number nor line end, if there is one, then a run of these classes. */
static inline size_t after_any(const Split *split, const uint8_t *text, size_t at, size_t end, uint8_t classes) {
    int width;
    uint8_t class = class_at(split, text, at, &width);
    if (class & (OTHER | MARK | SPACE)) {
        size_t to = run(split, text, at + width, end, classes);
        if (to > at + width) return to;
    }
    return class & classes ? run(split, text, at + width, end, classes) : 0;
}

/* End of the word that a rule finds at a place before the end; 0: none. */
static inline size_t apply(const Split *split, uint8_t rule, const uint8_t *text, size_t at, size_t end) {
    int width;
    size_t to;
    switch (rule) {
    case CONTRACTION:
        return contraction(text, at, end, 0);
    case CONTRACTION_ANY_CASE:
        return contraction(text, at, end, 0x20);
    case LETTERS_AFTER_SPACE:
        return after_space(split, text, at, end, LETTER);
    case LETTERS_AFTER_ANY:
        return after_any(split, text, at, end, LETTER);
    case MARKED_AFTER_ANY:
        return after_any(split, text, at, end, LETTER | MARK);
    case NUMBERS_AFTER_SPACE:
        return after_space(split, text, at, end, NUMBER);
    case ONE_NUMBER:
    case THREE_NUMBERS: {
        size_t from = at;
        for (int left = rule == ONE_NUMBER ? 1 : 3; left > 0 && at < end && class_at(split, text, at, &width) == NUMBER; left--) {
            at += width;
        }
        return at > from ? at : 0;
    }
    case OTHERS:
        return after_space(split, text, at, end, OTHER | MARK);
    case OTHERS_AND_NEWLINES:
    case UNMARKED_AND_NEWLINES:
        to = after_space(split, text, at, end, rule == OTHERS_AND_NEWLINES ? OTHER | MARK : OTHER);
        return to ? run(split, text, to, end, NEWLINE) : 0;
    case NEWLINES:
        to = run(split, text, at, end, BLANK);
        while (to > at && text[to - 1] != '\n' && text[to - 1] != '\r') to--; /* To the last line end of the run. */
        return to > at ? to : 0;
    case BLANKS_BUT_LAST:
        to = run(split, text, at, end, BLANK);
        if (to < end && to > at) {
            while ((text[--to] & 0xC0) == 0x80) continue; /* To the first byte of the last character. */
        }
        return to > at ? to : 0;
    case BLANKS:
        to = run(split, text, at, end, BLANK);
        return to > at ? to : 0;
    }
    return 0;
}

/* Whether a word that begins with an ASCII character of this class may follow a rule. */
static int may_begin(uint8_t rule, uint8_t byte, uint8_t class) {
    switch (rule) {
    case CONTRACTION:
    case CONTRACTION_ANY_CASE:
        return byte == '\'';
    case LETTERS_AFTER_SPACE:
        return class == LETTER || byte == ' ';
    case LETTERS_AFTER_ANY:
    case MARKED_AFTER_ANY:
        return !(class & (NUMBER | NEWLINE));
    case NUMBERS_AFTER_SPACE:
        return class == NUMBER || byte == ' ';
    case ONE_NUMBER:
    case THREE_NUMBERS:
        return class == NUMBER;
    case OTHERS:
    case OTHERS_AND_NEWLINES:
    case UNMARKED_AND_NEWLINES:
        return class & (OTHER | MARK) || byte == ' ';
    default:
        return class & BLANK;
    }
}

/* Prepares a list of rules for classes of at least 128 characters. 0: a rule is unknown, or there are too many. */
static int begin_split(Split *split, const uint8_t *rules, size_t count, const uint8_t *classes, size_t classes_count) {
    if (count >= RULES_MAX || classes_count < 0x80) return 0;
    memset(split, 0, sizeof *split);
    for (size_t at = 0; at < count; at++) {
        if (rules[at] == 0 || rules[at] >= RULES_END) return 0;
        split->rules[at] = rules[at];
    }
    split->classes = classes;
    split->classes_count = classes_count;
    for (int byte = 0; byte < 256; byte++) {
        split->kinds[byte] = byte < 0x80 ? classes[byte] : WIDE;
        uint8_t *first = &split->first_rules[byte];
        while (byte < 0x80 && *first < count && !may_begin(rules[*first], (uint8_t)byte, split->kinds[byte])) ++*first;
    }
    return 1;
}

/* End of the word at a place before the end; 0: no rule finds one. */
static inline size_t word_end(const Split *split, const uint8_t *text, size_t at, size_t end) {
    size_t to = 0;
    for (const uint8_t *rule = split->rules + split->first_rules[text[at]]; *rule != 0 && to == 0; rule++) {
        to = apply(split, *rule, text, at, end);
    }
    return to;
}
