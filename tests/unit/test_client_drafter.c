/*
 * test_client_drafter.c - the n-gram drafter: shape of its trees, merging, limits, real text.
 *
 * Needs TV_GOLDEN_DIR for kjv_tail.txt; writes nothing.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "clients/cli/drafter.h"

static void to_tokens(const char *text, int32_t *ret_tokens)
{
    for (size_t i = 0; text[i] != '\0'; i++) {
        ret_tokens[i] = (unsigned char)text[i];
    }
}

static struct tv_drafter *drafter_of(const char *store, const char *context)
{
    static int32_t tokens[4096];
    struct tv_drafter *drafter = NULL;
    to_tokens(store, tokens);
    assert_int_equal(tv_drafter_create(tokens, strlen(store), &drafter), 0);
    to_tokens(context, tokens);
    assert_int_equal(tv_drafter_append(drafter, tokens, strlen(context)), 0);
    return drafter;
}

/* A tree the server would take: parents before children, no duplicate siblings, depth kept. */
static void assert_tree(const struct tv_draft *draft, int32_t nodes_max, int32_t depth_max)
{
    int32_t depths[1024];
    assert_in_range(draft->count, 1, nodes_max);
    assert_int_equal(draft->parents[0], -1);
    depths[0] = 0;
    for (int32_t i = 1; i < draft->count; i++) {
        assert_in_range(draft->parents[i], 0, i - 1);
        depths[i] = depths[draft->parents[i]] + 1;
        assert_in_range(depths[i], 1, depth_max);
        for (int32_t j = 1; j < i; j++) {
            assert_false(draft->parents[j] == draft->parents[i] &&
                         draft->tokens[j] == draft->tokens[i]);
        }
    }
}

/* Tokens of the first-child path, as text. */
static void first_path(const struct tv_draft *draft, char *ret_text)
{
    int32_t here = 0;
    size_t bytes = 0;
    for (int32_t i = 1; i < draft->count; i++) {
        if (draft->parents[i] == here) {
            ret_text[bytes++] = (char)draft->tokens[i];
            here = i;
        }
    }
    ret_text[bytes] = '\0';
}

static void continues_what_followed(void **state)
{
    (void)state;
    char text[64];
    struct tv_draft draft;
    struct tv_drafter *drafter = drafter_of("the quick brown fox jumps over it", "see the quick");
    assert_int_equal(tv_drafter_draft(drafter, 32, 16, &draft), 0);
    assert_tree(&draft, 32, 16);
    assert_int_equal(draft.tokens[0], 'k');
    first_path(&draft, text);
    assert_string_equal(text, " brown fox jumps");
    tv_drafter_destroy(drafter);
}

static void own_context_alone(void **state)
{
    (void)state;
    char text[64];
    struct tv_draft draft;
    struct tv_drafter *drafter = drafter_of("", "abcdefgh, abcd");
    assert_int_equal(tv_drafter_draft(drafter, 8, 16, &draft), 0);
    assert_tree(&draft, 8, 16);
    first_path(&draft, text);
    assert_string_equal(text, "efgh, a");
    tv_drafter_destroy(drafter);
}

static void matches_merge_into_one_tree(void **state)
{
    (void)state;
    struct tv_draft draft;
    struct tv_drafter *drafter = drafter_of("say abc123. say abc124. say abc99", "x abc");
    assert_int_equal(tv_drafter_draft(drafter, 6, 3, &draft), 0);
    assert_tree(&draft, 6, 3);
    /* "1" and "2" stand once though two matches carry them; the more frequent comes first */
    assert_int_equal(draft.count, 6);
    assert_int_equal(draft.tokens[1], '1');
    assert_int_equal(draft.parents[1], 0);
    int32_t roots = 0;
    for (int32_t i = 1; i < draft.count; i++) {
        roots += draft.parents[i] == 0;
    }
    assert_int_equal(roots, 2);
    tv_drafter_destroy(drafter);
}

static void store_does_not_run_into_context(void **state)
{
    (void)state;
    char text[64];
    struct tv_draft draft;
    /* the only match ends the store: nothing follows it, least of all the context's first token */
    struct tv_drafter *drafter = drafter_of("uvwxyz", "zzz xyz");
    assert_int_equal(tv_drafter_draft(drafter, 16, 16, &draft), 0);
    first_path(&draft, text);
    assert_string_equal(text, "");
    tv_drafter_destroy(drafter);
}

static void nothing_known_is_a_root_alone(void **state)
{
    (void)state;
    struct tv_draft draft;
    struct tv_drafter *drafter = drafter_of("abcdef", "1");
    assert_int_equal(tv_drafter_draft(drafter, 64, 16, &draft), 0);
    assert_int_equal(draft.count, 1);
    tv_drafter_destroy(drafter);
}

static void refuses_what_is_out_of_range(void **state)
{
    (void)state;
    const int32_t negative[2] = {5, -1};
    struct tv_draft draft;
    struct tv_drafter *drafter = NULL;
    assert_int_equal(tv_drafter_create(negative, 2, &drafter), -EINVAL);
    assert_null(drafter);
    assert_int_equal(tv_drafter_create(NULL, 0, &drafter), 0);
    assert_int_equal(tv_drafter_draft(drafter, 8, 8, &draft), -EINVAL); /* empty context */
    assert_int_equal(tv_drafter_append(drafter, negative, 2), -EINVAL);
    assert_int_equal(tv_drafter_draft(drafter, 8, 8, &draft), -EINVAL); /* still empty */
    assert_int_equal(tv_drafter_append(drafter, negative, 1), 0);
    assert_int_equal(tv_drafter_draft(drafter, 0, 8, &draft), -EINVAL);
    assert_int_equal(tv_drafter_draft(drafter, 8, TV_DRAFTER_DEPTH_MAX + 1, &draft), -EINVAL);
    assert_int_equal(tv_drafter_draft(drafter, 1, 0, &draft), 0);
    assert_int_equal(draft.count, 1);
    tv_drafter_destroy(drafter);
    tv_drafter_destroy(NULL);
}

/* What was supposed and forgotten leaves no trace: the trees are those of a drafter that never had
 * it, also behind what comes next. */
static void what_is_forgotten_was_never_there(void **state)
{
    (void)state;
    static const char store[] = "abcabdabe the quick brown fox; the quick red fox; abcabc";
    const int32_t more[] = {'a', 'b', 'c', 'a', 'b', ' ', 't', 'h', 'e', ' ', 'q', 'u', 'i'};
    struct tv_drafter *one = drafter_of(store, "see the quick");
    struct tv_drafter *other = drafter_of(store, "see the quick");
    for (size_t count = 0; count <= sizeof(more) / sizeof(more[0]); count++) {
        struct tv_draft supposed, draft;
        int32_t tokens[64], parents[64];
        assert_int_equal(tv_drafter_append(one, more, count), 0);
        assert_int_equal(tv_drafter_draft(one, 32, 8, &supposed), 0);
        assert_int_equal(tv_drafter_forget(one, count), 0);
        assert_int_equal(tv_drafter_append(one, more, 3), 0);
        assert_int_equal(tv_drafter_append(other, more, 3), 0);
        assert_int_equal(tv_drafter_draft(other, 64, 8, &draft), 0);
        memcpy(tokens, draft.tokens, (size_t)draft.count * sizeof(*tokens));
        memcpy(parents, draft.parents, (size_t)draft.count * sizeof(*parents));
        int32_t drafts = draft.count;
        assert_int_equal(tv_drafter_draft(one, 64, 8, &draft), 0);
        assert_int_equal(draft.count, drafts);
        assert_memory_equal(draft.tokens, tokens, (size_t)drafts * sizeof(*tokens));
        assert_memory_equal(draft.parents, parents, (size_t)drafts * sizeof(*parents));
    }
    assert_int_equal(tv_drafter_forget(one, 100000), -EINVAL);
    tv_drafter_destroy(one);
    tv_drafter_destroy(other);
}

/* Half of the held-out text as store, the rest replayed as if a model wrote it: every tree is
 * valid, a larger budget accepts more, and the store helps. */
static double replay(const int32_t *text, size_t store_count, size_t from, int32_t nodes_max)
{
    enum { PROMPT = 200, LENGTH = 360 };
    struct tv_drafter *drafter = NULL;
    struct tv_draft draft;
    size_t rounds = 0;
    size_t at = PROMPT;
    assert_int_equal(tv_drafter_create(text, store_count, &drafter), 0);
    assert_int_equal(tv_drafter_append(drafter, text + from, PROMPT), 0);
    while (at < LENGTH) {
        assert_int_equal(tv_drafter_draft(drafter, nodes_max, 16, &draft), 0);
        assert_tree(&draft, nodes_max, 16);
        size_t taken = 0;
        int32_t here = 0;
        for (int32_t i = 1; i < draft.count; i++) {
            if (draft.parents[i] == here && draft.tokens[i] == text[from + at + taken]) {
                here = i;
                taken++;
            }
        }
        assert_int_equal(tv_drafter_append(drafter, text + from + at, taken + 1), 0);
        at += taken + 1;
        rounds++;
    }
    tv_drafter_destroy(drafter);
    return (double)(at - PROMPT) / (double)rounds;
}

static void real_text(void **state)
{
    (void)state;
    enum { BYTES = 140000 };
    static int32_t text[BYTES];
    char path[4096];
    const char *golden = getenv("TV_GOLDEN_DIR");
    assert_non_null(golden);
    (void)snprintf(path, sizeof(path), "%s/kjv_tail.txt", golden);
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    for (size_t i = 0; i < BYTES; i++) {
        int byte = fgetc(file);
        assert_int_not_equal(byte, EOF);
        text[i] = byte;
    }
    (void)fclose(file);
    double own = 0, small = 0, large = 0;
    for (size_t from = 100000; from < 130000; from += 3000) {
        own += replay(text, 0, from, 33) / 10;
        small += replay(text, 70000, from, 2) / 10;
        large += replay(text, 70000, from, 33) / 10;
    }
    print_message("tokens per round: own context %.2f, store %.2f, store with 1 draft %.2f\n", own,
                  large, small);
    assert_true(own > 1.15);
    assert_true(large > 1.8);
    assert_true(large > small && large > own && small > 1.15);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(continues_what_followed),
        cmocka_unit_test(own_context_alone),
        cmocka_unit_test(matches_merge_into_one_tree),
        cmocka_unit_test(store_does_not_run_into_context),
        cmocka_unit_test(nothing_known_is_a_root_alone),
        cmocka_unit_test(refuses_what_is_out_of_range),
        cmocka_unit_test(what_is_forgotten_was_never_there),
        cmocka_unit_test(real_text),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
