/*
 * safetensors.c - strict reader of one safetensors file.
 *
 * Owns the descriptor and the parsed header. Reads with pread, never maps: a file that shrinks is
 * an error here and not a signal.
 */
#include "model/safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "model/refuse.h"

#define LENGTH_BYTES      8
#define HEADER_DEPTH_MAX  8
#define HEADER_VALUES_MAX 20000000u

/* A header being checked. */
struct check {
    struct tv_safetensors *file;
    enum tv_safetensors_fault fault;
    struct tv_model_error *error;
};

static const struct {
    const char *name;
    int32_t bits;
} dtypes[] = {
    {"BOOL", 8},    {"U8", 8},    {"I8", 8},      {"F8_E5M2", 8}, {"F8_E4M3", 8},
    {"F8_E8M0", 8}, {"F4", 4},    {"F6_E2M3", 6}, {"I16", 16},    {"U16", 16},
    {"F16", 16},    {"BF16", 16}, {"F6_E3M2", 6}, {"I32", 32},    {"U32", 32},
    {"F32", 32},    {"F64", 64},  {"I64", 64},    {"U64", 64},    {"C64", 64},
};

#define PART_BYTES ((size_t)64 << 20) /* of one read: so that progress is seen */

/* Remember which fault the sentence just written is about. */
#define FAULT(check, kind, ...)                                                                    \
    ((check)->fault = (kind), tv_model_refuse((check)->error, __VA_ARGS__))

static int bytes_read(int fd, void *buffer, size_t bytes, int64_t offset, _Atomic int64_t *progress,
                      size_t *ret_got)
{
    char *next = buffer;
    size_t got = 0;
    while (got < bytes) {
        size_t left = bytes - got < PART_BYTES ? bytes - got : PART_BYTES;
        ssize_t part = pread(fd, next + got, left, (off_t)offset + (off_t)got);
        if (part < 0 && errno == EINTR) {
            continue;
        }
        if (part < 0) {
            return -errno;
        }
        if (part == 0) {
            break;
        }
        got += (size_t)part;
        if (progress != NULL) {
            (void)atomic_fetch_add_explicit(progress, part, memory_order_relaxed);
        }
    }
    *ret_got = got;
    return 0;
}

/* An exact integer >= 0; -EINVAL for everything else. */
static int count_read(const struct tv_json *doc, const struct tv_json_value *value, int64_t *ret)
{
    int64_t number;
    if (tv_json_int(doc, value, &number) != 0 || number < 0) {
        return -EINVAL;
    }
    *ret = number;
    return 0;
}

static int metadata_check(struct check *check, const struct tv_json_value *metadata)
{
    int bad = tv_json_type(metadata) != TV_JSON_OBJECT;
    for (const struct tv_json_value *v = bad ? NULL : tv_json_first(metadata); v != NULL;
         v = tv_json_next(v)) {
        bad |= tv_json_type(v) != TV_JSON_STRING;
    }
    if (bad) {
        return FAULT(check, TV_SAFETENSORS_METADATA,
                     "%.100s: __metadata__ is not an object of strings", check->file->name);
    }
    return 0;
}

static int dtype_set(struct check *check, const struct tv_json_value *value,
                     struct tv_safetensors_tensor *tensor)
{
    const char *name = tv_json_string(value, NULL);
    for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++) {
        if (strcmp(name, dtypes[i].name) == 0) {
            tensor->dtype = dtypes[i].name;
            tensor->bits = dtypes[i].bits;
            return 0;
        }
    }
    return FAULT(check, TV_SAFETENSORS_DTYPE, "%.100s: tensor '%.200s' has unknown dtype '%.32s'",
                 check->file->name, tensor->name, name);
}

static int shape_set(struct check *check, const struct tv_json_value *value,
                     struct tv_safetensors_tensor *tensor)
{
    const char *file = check->file->name;
    if (tv_json_count(value) > TV_SAFETENSORS_RANK_MAX) {
        return FAULT(check, TV_SAFETENSORS_SHAPE,
                     "%.100s: tensor '%.200s' has rank %zu (at most %d)", file, tensor->name,
                     tv_json_count(value), TV_SAFETENSORS_RANK_MAX);
    }
    int64_t bits = tensor->bits;
    for (const struct tv_json_value *v = tv_json_first(value); v != NULL; v = tv_json_next(v)) {
        int64_t *extent = &tensor->shape[tensor->rank++];
        if (count_read(check->file->header, v, extent) != 0) {
            return FAULT(check, TV_SAFETENSORS_SHAPE,
                         "%.100s: tensor '%.200s': shape is not an array of exact integers >= 0",
                         file, tensor->name);
        }
    }
    /* Multiplied before a zero extent can hide the overflow of the others. */
    int empty = 0;
    for (int32_t i = 0; i < tensor->rank; i++) {
        int64_t extent = tensor->shape[i];
        empty |= extent == 0;
        if (__builtin_mul_overflow(bits, extent == 0 ? 1 : extent, &bits)) {
            return FAULT(check, TV_SAFETENSORS_SHAPE_OVERFLOW,
                         "%.100s: tensor '%.200s': size of its shape overflows", file,
                         tensor->name);
        }
    }
    tensor->bytes = empty ? 0 : bits / 8;
    if (!empty && bits % 8 != 0) {
        return FAULT(check, TV_SAFETENSORS_SIZE, "%.100s: tensor '%.200s' does not end at a byte",
                     file, tensor->name);
    }
    return 0;
}

static int offsets_set(struct check *check, const struct tv_json_value *value,
                       struct tv_safetensors_tensor *tensor)
{
    const struct tv_safetensors *file = check->file;
    const struct tv_json_value *first = tv_json_first(value);
    int64_t begin, end;
    if (tv_json_count(value) != 2 || first == NULL ||
        count_read(file->header, first, &begin) != 0 ||
        count_read(file->header, tv_json_next(first), &end) != 0) {
        return FAULT(check, TV_SAFETENSORS_OFFSETS,
                     "%.100s: tensor '%.200s': data_offsets are not two exact integers >= 0",
                     file->name, tensor->name);
    }
    if (begin > end) {
        return FAULT(check, TV_SAFETENSORS_OFFSETS_ORDER,
                     "%.100s: tensor '%.200s' begins at %lld, behind its end %lld", file->name,
                     tensor->name, (long long)begin, (long long)end);
    }
    if (end > file->file_bytes - file->data_begin) {
        return FAULT(check, TV_SAFETENSORS_OFFSETS_END,
                     "%.100s: tensor '%.200s' ends at byte %lld of the data, the file has %lld",
                     file->name, tensor->name, (long long)end,
                     (long long)(file->file_bytes - file->data_begin));
    }
    if (end - begin != tensor->bytes) {
        return FAULT(check, TV_SAFETENSORS_SIZE,
                     "%.100s: tensor '%.200s' has %lld bytes, its shape and dtype need %lld",
                     file->name, tensor->name, (long long)(end - begin), (long long)tensor->bytes);
    }
    tensor->begin = begin;
    return 0;
}

static int entry_read(struct check *check, const struct tv_json_value *entry,
                      struct tv_safetensors_tensor *tensor)
{
    memset(tensor, 0, sizeof *tensor);
    tensor->name = tv_json_name(entry);
    const struct tv_json_value *dtype = tv_json_member(entry, "dtype");
    const struct tv_json_value *shape = tv_json_member(entry, "shape");
    const struct tv_json_value *offsets = tv_json_member(entry, "data_offsets");
    if (tv_json_type(entry) != TV_JSON_OBJECT || tv_json_count(entry) != 3 || dtype == NULL ||
        shape == NULL || offsets == NULL || tv_json_type(dtype) != TV_JSON_STRING ||
        tv_json_type(shape) != TV_JSON_ARRAY || tv_json_type(offsets) != TV_JSON_ARRAY) {
        return FAULT(check, TV_SAFETENSORS_ENTRY,
                     "%.100s: entry '%.200s' is not {dtype, shape, data_offsets}",
                     check->file->name, tensor->name);
    }
    int err = dtype_set(check, dtype, tensor);
    if (err == 0) {
        err = shape_set(check, shape, tensor);
    }
    if (err == 0) {
        err = offsets_set(check, offsets, tensor);
    }
    return err;
}

static int tensor_compare(const void *left, const void *right)
{
    const struct tv_safetensors_tensor *a = left, *b = right;
    if (a->begin != b->begin) {
        return a->begin < b->begin ? -1 : 1;
    }
    return a->bytes == b->bytes ? strcmp(a->name, b->name) : (a->bytes < b->bytes ? -1 : 1);
}

/* Sorted by begin, the tensors must tile the data area exactly. */
static int tiling_check(struct check *check)
{
    const struct tv_safetensors *file = check->file;
    int64_t end = 0;
    for (size_t i = 0; i < file->count; i++) {
        const struct tv_safetensors_tensor *tensor = &file->tensors[i];
        if (tensor->begin < end) {
            return FAULT(
                check, TV_SAFETENSORS_OVERLAP,
                "%.100s: tensor '%.150s' begins at byte %lld of the data, inside '%.150s', "
                "which ends at %lld",
                file->name, tensor->name, (long long)tensor->begin, file->tensors[i - 1].name,
                (long long)end);
        }
        if (tensor->begin > end) {
            return FAULT(check, TV_SAFETENSORS_GAP,
                         "%.100s: %lld bytes before tensor '%.200s' belong to no tensor",
                         file->name, (long long)(tensor->begin - end), tensor->name);
        }
        end += tensor->bytes;
    }
    int64_t data_bytes = file->file_bytes - file->data_begin;
    if (end != data_bytes) {
        return FAULT(check, TV_SAFETENSORS_TAIL,
                     "%.100s: tensors end at byte %lld of the data, the "
                     "file has %lld",
                     file->name, (long long)end, (long long)data_bytes);
    }
    return 0;
}

static int header_check(struct check *check)
{
    struct tv_safetensors *file = check->file;
    const struct tv_json_value *root = tv_json_root(file->header);
    if (tv_json_type(root) != TV_JSON_OBJECT) {
        return FAULT(check, TV_SAFETENSORS_NOT_OBJECT, "%.100s: header is not a JSON object",
                     file->name);
    }
    file->tensors = calloc(tv_json_count(root) + 1, sizeof *file->tensors);
    if (file->tensors == NULL) {
        return -ENOMEM;
    }
    for (const struct tv_json_value *v = tv_json_first(root); v != NULL; v = tv_json_next(v)) {
        int err;
        if (strcmp(tv_json_name(v), "__metadata__") == 0) {
            err = metadata_check(check, v);
        } else {
            err = entry_read(check, v, &file->tensors[file->count]);
            file->count += err == 0;
        }
        if (err != 0) {
            return err;
        }
    }
    qsort(file->tensors, file->count, sizeof *file->tensors, tensor_compare);
    return tiling_check(check);
}

/* The name whose second use was refused: the scanner stops behind its closing quote. */
static int duplicate_refuse(struct check *check, const char *text, size_t offset)
{
    size_t end = offset > 0 ? offset - 1 : 0, begin = end;
    while (begin > 0 && text[begin - 1] != '"') {
        begin--;
    }
    size_t bytes = end - begin < 200 ? end - begin : 200;
    return FAULT(check, TV_SAFETENSORS_DUPLICATE, "%.100s: '%.*s' is twice in the header, byte %zu",
                 check->file->name, (int)bytes, text + begin, begin);
}

static int header_parse(struct check *check, const char *text, size_t bytes)
{
    struct tv_safetensors *file = check->file;
    while (bytes > 0 && text[bytes - 1] == ' ') {
        bytes--; /* the format's padding */
    }
    struct tv_json_limits limits = {.depth_max = HEADER_DEPTH_MAX, .values_max = HEADER_VALUES_MAX};
    struct tv_json_error json_error;
    int err = tv_json_parse(text, bytes, &limits, &file->header, &json_error);
    if (err != -EINVAL) {
        return err;
    }
    if (strstr(json_error.what, "duplicate") != NULL && json_error.offset <= bytes) {
        return duplicate_refuse(check, text, json_error.offset);
    }
    return FAULT(check, TV_SAFETENSORS_JSON, "%.100s: header, byte %zu: %s", file->name,
                 json_error.offset, json_error.what);
}

/* The length field, checked against the format's limit and the file. */
static int header_length_read(struct check *check, size_t *ret_bytes)
{
    struct tv_safetensors *file = check->file;
    uint8_t raw[LENGTH_BYTES];
    size_t got = 0;
    int err = bytes_read(file->fd, raw, sizeof raw, 0, NULL, &got);
    if (err != 0) {
        return FAULT(check, TV_SAFETENSORS_UNREADABLE, "%.100s: %s", file->name, strerror(-err));
    }
    if (got < sizeof raw) {
        return FAULT(check, TV_SAFETENSORS_SHORT, "%.100s: %zu bytes, too short for a header",
                     file->name, got);
    }
    uint64_t length = 0;
    for (int i = LENGTH_BYTES - 1; i >= 0; i--) {
        length = length << 8 | raw[i];
    }
    if (length == 0) {
        return FAULT(check, TV_SAFETENSORS_HEADER_EMPTY, "%.100s: header length is 0", file->name);
    }
    if (length > TV_SAFETENSORS_HEADER_BYTES_MAX) {
        return FAULT(check, TV_SAFETENSORS_HEADER_LARGE,
                     "%.100s: header length %llu is over the limit of %u", file->name,
                     (unsigned long long)length, TV_SAFETENSORS_HEADER_BYTES_MAX);
    }
    if ((int64_t)length > file->file_bytes - LENGTH_BYTES) {
        return FAULT(check, TV_SAFETENSORS_HEADER_CUT,
                     "%.100s: header of %llu bytes runs past the end of the file (%lld bytes)",
                     file->name, (unsigned long long)length, (long long)file->file_bytes);
    }
    *ret_bytes = (size_t)length;
    return 0;
}

static int file_open(struct check *check, int folder_fd)
{
    struct tv_safetensors *file = check->file;
    struct stat info;
    /* not blocking: a FIFO in the place of a file is refused, not waited for */
    file->fd = openat(folder_fd, file->name, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (file->fd < 0 || fstat(file->fd, &info) != 0) {
        return FAULT(check, TV_SAFETENSORS_UNREADABLE, "%.100s: %s", file->name, strerror(errno));
    }
    if (!S_ISREG(info.st_mode)) {
        return FAULT(check, TV_SAFETENSORS_UNREADABLE, "%.100s: not a regular file", file->name);
    }
    file->file_bytes = info.st_size;
    return 0;
}

int tv_safetensors_open(int folder_fd, const char *name, struct tv_safetensors *ret_file,
                        enum tv_safetensors_fault *ret_fault, struct tv_model_error *ret_error)
{
    struct tv_safetensors file = {.fd = -1, .name = strdup(name)};
    struct check check = {.file = &file, .error = ret_error};
    char *text = NULL;
    size_t bytes = 0, got = 0;
    int err = file.name == NULL ? -ENOMEM : file_open(&check, folder_fd);
    if (err != 0) {
        goto finish;
    }
    err = header_length_read(&check, &bytes);
    if (err != 0) {
        goto finish;
    }
    file.data_begin = LENGTH_BYTES + (int64_t)bytes;
    text = malloc(bytes);
    if (text == NULL) {
        err = -ENOMEM;
        goto finish;
    }
    if (bytes_read(file.fd, text, bytes, LENGTH_BYTES, NULL, &got) != 0 || got != bytes) {
        err = FAULT(&check, TV_SAFETENSORS_UNREADABLE, "%.100s: cannot read the header's %zu bytes",
                    name, bytes);
        goto finish;
    }
    err = header_parse(&check, text, bytes);
    if (err == 0) {
        err = header_check(&check);
    }

finish:
    free(text);
    *ret_fault = check.fault;
    if (err != 0) {
        tv_safetensors_finish(&file);
        return err;
    }
    *ret_file = file;
    return 0;
}

void tv_safetensors_finish(struct tv_safetensors *file)
{
    if (file->fd >= 0) {
        (void)close(file->fd); /* only read from: nothing can be lost */
    }
    free(file->tensors);
    tv_json_destroy(file->header);
    free(file->name);
    memset(file, 0, sizeof *file);
    file->fd = -1;
}

int tv_safetensors_read(const struct tv_safetensors *file,
                        const struct tv_safetensors_tensor *tensor, int64_t offset, void *buffer,
                        size_t bytes, struct tv_model_error *ret_error)
{
    size_t got = 0;
    int err = bytes_read(file->fd, buffer, bytes, file->data_begin + tensor->begin + offset,
                         file->bytes_read, &got);
    if (err != 0) {
        return -EIO;
    }
    if (got != bytes) {
        return tv_model_refuse(ret_error, "%.100s: tensor '%.200s': %zu of %zu bytes are there",
                               file->name, tensor->name, got, bytes);
    }
    return 0;
}
