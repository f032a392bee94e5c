/*
 * test_checkpoint_headers.c - B38: hostile and broken safetensors headers.
 *
 * Each file is refused with a fault of its own and a sentence that names the file; legal oddities
 * are accepted.
 */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "model/safetensors.h"
#include "tiny_model.h"

#define FILE_NAME "model.safetensors"

/* header NULL: only the length and `data_bytes` bytes are written. */
struct header_case {
    const char *what;
    const char *header;
    size_t data_bytes;
    enum tv_safetensors_fault fault;
};

static enum tv_safetensors_fault file_open(const char *dir, struct tv_model_error *error)
{
    struct tv_safetensors file;
    enum tv_safetensors_fault fault = TV_SAFETENSORS_OK;
    int folder = open(dir, O_RDONLY | O_DIRECTORY);
    assert_true(folder >= 0);
    memset(error, 0, sizeof *error);
    int err = tv_safetensors_open(folder, FILE_NAME, &file, &fault, error);
    (void)close(folder);
    if (err == 0) {
        assert_int_equal(fault, TV_SAFETENSORS_OK);
        tv_safetensors_finish(&file);
        return fault;
    }
    assert_int_equal(err, -EBADMSG);
    assert_int_not_equal(fault, TV_SAFETENSORS_OK);
    assert_non_null(strstr(error->text, FILE_NAME)); /* the sentence names the file */
    return fault;
}

static void file_write(const char *dir, uint64_t length, const char *header, size_t header_bytes,
                       size_t data_bytes)
{
    size_t bytes = sizeof length + header_bytes + data_bytes;
    char *data = calloc(bytes, 1);
    assert_non_null(data);
    memcpy(data, &length, sizeof length);
    if (header_bytes > 0) {
        memcpy(data + sizeof length, header, header_bytes);
    }
    tv_tiny_file(dir, FILE_NAME, data, bytes);
    free(data);
}

static void case_check(const char *dir, const struct header_case *c)
{
    struct tv_model_error error;
    size_t bytes = strlen(c->header);
    file_write(dir, bytes, c->header, bytes, c->data_bytes);
    enum tv_safetensors_fault fault = file_open(dir, &error);
    if (fault != c->fault) {
        fail_msg("%s: fault %d, wanted %d: %s", c->what, (int)fault, (int)c->fault, error.text);
    }
}

#define T(shape, begin, end)                                                                       \
    "{\"dtype\":\"F32\",\"shape\":" shape ",\"data_offsets\":[" begin "," end "]}"

static const struct header_case cases[] = {
    {"not JSON", "garbage!", 0, TV_SAFETENSORS_JSON},
    {"cut JSON", "{\"a\":", 0, TV_SAFETENSORS_JSON},
    {"trailing garbage", "{}x", 0, TV_SAFETENSORS_JSON},
    {"second object", "{}{}", 0, TV_SAFETENSORS_JSON},
    {"trailing comma", "{\"a\":" T("[1]", "0", "4") ",}", 4, TV_SAFETENSORS_JSON},
    {"array", "[]", 0, TV_SAFETENSORS_NOT_OBJECT},
    {"number", "5", 0, TV_SAFETENSORS_NOT_OBJECT},
    {"null", "null", 0, TV_SAFETENSORS_NOT_OBJECT},
    {"invalid UTF-8 in a name", "{\"\xff\":" T("[1]", "0", "4") "}", 4, TV_SAFETENSORS_JSON},
    {"duplicate tensor", "{\"a\":" T("[1]", "0", "4") ",\"a\":" T("[1]", "4", "8") "}", 8,
     TV_SAFETENSORS_DUPLICATE},
    {"duplicate member of an entry",
     "{\"a\":{\"dtype\":\"F32\",\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4,
     TV_SAFETENSORS_DUPLICATE},
    {"metadata is an array", "{\"__metadata__\":[]}", 0, TV_SAFETENSORS_METADATA},
    {"metadata with a number", "{\"__metadata__\":{\"a\":1}}", 0, TV_SAFETENSORS_METADATA},
    {"metadata with null", "{\"__metadata__\":{\"a\":null}}", 0, TV_SAFETENSORS_METADATA},
    {"entry is a string", "{\"a\":\"F32\"}", 0, TV_SAFETENSORS_ENTRY},
    {"entry without offsets", "{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, TV_SAFETENSORS_ENTRY},
    {"entry without dtype", "{\"a\":{\"shape\":[1],\"data_offsets\":[0,4]}}", 4,
     TV_SAFETENSORS_ENTRY},
    {"entry without shape", "{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", 4,
     TV_SAFETENSORS_ENTRY},
    {"names in capitals", "{\"a\":{\"Dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4,
     TV_SAFETENSORS_ENTRY},
    {"fourth member",
     "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4],\"scale\":1}}", 4,
     TV_SAFETENSORS_ENTRY},
    {"dtype is a number", "{\"a\":{\"dtype\":1,\"shape\":[1],\"data_offsets\":[0,4]}}", 4,
     TV_SAFETENSORS_ENTRY},
    {"unknown dtype", "{\"a\":{\"dtype\":\"F31\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4,
     TV_SAFETENSORS_DTYPE},
    {"dtype in small letters", "{\"a\":{\"dtype\":\"f32\",\"shape\":[1],\"data_offsets\":[0,4]}}",
     4, TV_SAFETENSORS_DTYPE},
    {"negative extent", "{\"a\":" T("[-1]", "0", "4") "}", 4, TV_SAFETENSORS_SHAPE},
    {"fractional extent", "{\"a\":" T("[1.0]", "0", "4") "}", 4, TV_SAFETENSORS_SHAPE},
    {"extent 1e0", "{\"a\":" T("[1e0]", "0", "4") "}", 4, TV_SAFETENSORS_SHAPE},
    {"extent is a string", "{\"a\":" T("[\"1\"]", "0", "4") "}", 4, TV_SAFETENSORS_SHAPE},
    {"rank 9", "{\"a\":" T("[1,1,1,1,1,1,1,1,1]", "0", "4") "}", 4, TV_SAFETENSORS_SHAPE},
    {"shape product wraps", "{\"a\":" T("[4294967296,4294967296]", "0", "0") "}", 0,
     TV_SAFETENSORS_SHAPE_OVERFLOW},
    {"shape product wraps beside a zero", "{\"a\":" T("[4294967296,0,4294967296]", "0", "0") "}", 0,
     TV_SAFETENSORS_SHAPE_OVERFLOW},
    {"extent over int64", "{\"a\":" T("[99999999999999999999]", "0", "4") "}", 4,
     TV_SAFETENSORS_SHAPE},
    {"one offset", "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0]}}", 4,
     TV_SAFETENSORS_OFFSETS},
    {"three offsets", "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4,8]}}", 4,
     TV_SAFETENSORS_OFFSETS},
    {"negative offset", "{\"a\":" T("[1]", "-4", "0") "}", 4, TV_SAFETENSORS_OFFSETS},
    {"minus zero", "{\"a\":" T("[1]", "-0", "4") "}", 4, TV_SAFETENSORS_OFFSETS},
    {"fractional offset", "{\"a\":" T("[1]", "0.5", "4.5") "}", 8, TV_SAFETENSORS_OFFSETS},
    {"offset 4e0", "{\"a\":" T("[1]", "0", "4e0") "}", 4, TV_SAFETENSORS_OFFSETS},
    {"offset is a string", "{\"a\":" T("[1]", "\"0\"", "4") "}", 4, TV_SAFETENSORS_OFFSETS},
    {"begin behind end", "{\"a\":" T("[1]", "4", "0") "}", 4, TV_SAFETENSORS_OFFSETS_ORDER},
    {"end past the file", "{\"a\":" T("[2]", "0", "8") "}", 4, TV_SAFETENSORS_OFFSETS_END},
    {"end near 2^63", "{\"a\":" T("[1]", "9223372036854775803", "9223372036854775807") "}", 4,
     TV_SAFETENSORS_OFFSETS_END},
    {"fewer bytes than the shape", "{\"a\":" T("[2]", "0", "4") "}", 4, TV_SAFETENSORS_SIZE},
    {"more bytes than the shape", "{\"a\":" T("[1]", "0", "8") "}", 8, TV_SAFETENSORS_SIZE},
    {"shared range", "{\"a\":" T("[1]", "0", "4") ",\"b\":" T("[1]", "0", "4") "}", 4,
     TV_SAFETENSORS_OVERLAP},
    {"overlap by two", "{\"a\":" T("[1]", "0", "4") ",\"b\":" T("[1]", "2", "6") "}", 6,
     TV_SAFETENSORS_OVERLAP},
    {"gap at the start", "{\"a\":" T("[1]", "4", "8") "}", 8, TV_SAFETENSORS_GAP},
    {"gap in the middle", "{\"a\":" T("[1]", "0", "4") ",\"b\":" T("[1]", "8", "12") "}", 12,
     TV_SAFETENSORS_GAP},
    {"bytes behind the last", "{\"a\":" T("[1]", "0", "4") "}", 5, TV_SAFETENSORS_TAIL},
    {"data without tensors", "{}", 1, TV_SAFETENSORS_TAIL},
    /* legal */
    {"no tensor", "{}", 0, TV_SAFETENSORS_OK},
    {"padded with spaces", "{}      ", 0, TV_SAFETENSORS_OK},
    {"rank 0", "{\"a\":" T("[]", "0", "4") "}", 4, TV_SAFETENSORS_OK},
    {"empty tensor", "{\"a\":" T("[0]", "0", "0") ",\"b\":" T("[1]", "0", "4") "}", 4,
     TV_SAFETENSORS_OK},
    {"empty tensor at the end", "{\"b\":" T("[1]", "0", "4") ",\"a\":" T("[3,0]", "4", "4") "}", 4,
     TV_SAFETENSORS_OK},
    {"out of order", "{\"b\":" T("[1]", "4", "8") ",\"a\":" T("[1]", "0", "4") "}", 8,
     TV_SAFETENSORS_OK},
    {"names that differ by case", "{\"a\":" T("[1]", "0", "4") ",\"A\":" T("[1]", "4", "8") "}", 8,
     TV_SAFETENSORS_OK},
};

static void test_b38_headers(void **state)
{
    const char *dir = *state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        case_check(dir, &cases[i]);
    }
}

static void test_b38_lengths(void **state)
{
    const char *dir = *state;
    struct tv_model_error error;
    static const struct {
        uint64_t length;
        size_t bytes; /* behind the length */
        enum tv_safetensors_fault fault;
    } lengths[] = {
        {0, 0, TV_SAFETENSORS_HEADER_EMPTY},
        {0, 64, TV_SAFETENSORS_HEADER_EMPTY},
        {7, 2, TV_SAFETENSORS_HEADER_CUT},
        {1, 0, TV_SAFETENSORS_HEADER_CUT},
        {100000000, 8, TV_SAFETENSORS_HEADER_CUT},
        {100000001, 8, TV_SAFETENSORS_HEADER_LARGE},
        {1ull << 63, 8, TV_SAFETENSORS_HEADER_LARGE},
        {UINT64_MAX, 8, TV_SAFETENSORS_HEADER_LARGE},
        {UINT64_MAX - 7, 8, TV_SAFETENSORS_HEADER_LARGE},
    };
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        file_write(dir, lengths[i].length, NULL, 0, lengths[i].bytes);
        assert_int_equal(file_open(dir, &error), lengths[i].fault);
    }
    for (size_t bytes = 0; bytes < 8; bytes++) {
        tv_tiny_file(dir, FILE_NAME, "\2\0\0\0\0\0\0", bytes);
        assert_int_equal(file_open(dir, &error), TV_SAFETENSORS_SHORT);
    }
}

static void test_b38_nesting(void **state)
{
    const char *dir = *state;
    struct tv_model_error error;
    static const size_t depths[] = {9, 1000, 100000};
    for (size_t i = 0; i < 3; i++) {
        size_t depth = depths[i];
        char *header = malloc(depth + 1);
        assert_non_null(header);
        memset(header, '[', depth);
        file_write(dir, depth, header, depth, 0);
        assert_int_equal(file_open(dir, &error), TV_SAFETENSORS_JSON);
        free(header);
    }
}

static void test_unreadable(void **state)
{
    const char *dir = *state;
    struct tv_model_error error;
    char path[600];
    (void)snprintf(path, sizeof path, "%s/%s", dir, FILE_NAME);
    (void)unlink(path);
    assert_int_equal(file_open(dir, &error), TV_SAFETENSORS_UNREADABLE);
}

/* A file that shrinks after it was opened is an error, not a signal. */
static void test_shrunk_after_open(void **state)
{
    const char *dir = *state;
    static const char header[] = "{\"a\":" T("[4]", "0", "16") "}";
    struct tv_safetensors file;
    enum tv_safetensors_fault fault;
    struct tv_model_error error;
    char path[600];
    float values[4];
    file_write(dir, sizeof header - 1, header, sizeof header - 1, 16);
    int folder = open(dir, O_RDONLY | O_DIRECTORY);
    assert_int_equal(tv_safetensors_open(folder, FILE_NAME, &file, &fault, &error), 0);
    (void)close(folder);
    assert_int_equal(tv_safetensors_read(&file, &file.tensors[0], 0, values, 16, &error), 0);
    (void)snprintf(path, sizeof path, "%s/%s", dir, FILE_NAME);
    assert_int_equal(truncate(path, (off_t)(8 + sizeof header - 1 + 6)), 0);
    assert_int_equal(tv_safetensors_read(&file, &file.tensors[0], 0, values, 16, &error), -EBADMSG);
    assert_non_null(strstr(error.text, "6 of 16 bytes"));
    tv_safetensors_finish(&file);
}

static int folder_make(void **state)
{
    static char dir[512];
    tv_tiny_folder(dir, sizeof dir);
    *state = dir;
    return 0;
}

static int folder_remove(void **state)
{
    tv_tiny_folder_remove(*state);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_b38_headers),       cmocka_unit_test(test_b38_lengths),
        cmocka_unit_test(test_b38_nesting),       cmocka_unit_test(test_unreadable),
        cmocka_unit_test(test_shrunk_after_open),
    };
    return cmocka_run_group_tests(tests, folder_make, folder_remove);
}
