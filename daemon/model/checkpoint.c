/*
 * checkpoint.c - a Hugging Face folder as one table of tensors.
 *
 * Owns the open shards and the parsed JSON. Refuses a folder whose index and headers disagree: each
 * tensor must be in exactly the file the index names, and every tensor of a file in the index.
 */
#include "model/checkpoint.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "model/refuse.h"

#define SINGLE_FILE      "model.safetensors"
#define INDEX_FILE       "model.safetensors.index.json"
#define CONFIG_BYTES_MAX (4u << 20)
#define INDEX_BYTES_MAX  (256u << 20)
#define JSON_DEPTH       16
#define JSON_VALUES      4000000u
#define SHARDS_MAX       4096

int tv_checkpoint_file_read(int folder_fd, const char *name, size_t bytes_max, char **ret_data,
                            size_t *ret_bytes)
{
    int err = 0;
    char *data = NULL;
    size_t bytes = 0;
    struct stat info;
    /* not blocking: a FIFO in the place of a file is refused, not waited for */
    int fd = openat(folder_fd, name, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        return errno == ENOENT ? -ENOENT : -EIO;
    }
    if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
        err = -EIO;
        goto finish;
    }
    if ((uint64_t)info.st_size > bytes_max) {
        err = -EFBIG;
        goto finish;
    }
    data = malloc((size_t)info.st_size + 1);
    if (data == NULL) {
        err = -ENOMEM;
        goto finish;
    }
    while (bytes < (size_t)info.st_size) {
        ssize_t part = pread(fd, data + bytes, (size_t)info.st_size - bytes, (off_t)bytes);
        if (part < 0 && errno == EINTR) {
            continue;
        }
        if (part <=
            0) { /* an end before the size that the file had is no content to hash or parse */
            err = -EIO;
            goto finish;
        }
        bytes += (size_t)part;
    }
    *ret_data = data;
    *ret_bytes = bytes;
    data = NULL;

finish:
    free(data);
    (void)close(fd); /* only read from: nothing can be lost */
    return err;
}

/* A JSON object file of the folder. -ENOENT when it is not there. */
static int object_read(int folder_fd, const char *name, size_t bytes_max, struct tv_json **ret_doc,
                       struct tv_model_error *ret_error)
{
    char *text = NULL;
    size_t bytes = 0;
    int err = tv_checkpoint_file_read(folder_fd, name, bytes_max, &text, &bytes);
    if (err == -EFBIG) {
        return tv_model_refuse(ret_error, "%s is over %zu bytes", name, bytes_max);
    }
    if (err == -EIO) {
        return tv_model_refuse(ret_error, "%s is no regular file that can be read", name);
    }
    if (err != 0) {
        return err;
    }
    while (bytes > 0 && (text[bytes - 1] == '\n' || text[bytes - 1] == '\r')) {
        bytes--;
    }
    struct tv_json_limits limits = {.depth_max = JSON_DEPTH, .values_max = JSON_VALUES};
    struct tv_json_error json_error;
    struct tv_json *doc = NULL;
    err = tv_json_parse(text, bytes, &limits, &doc, &json_error);
    free(text);
    if (err == -EINVAL) {
        return tv_model_refuse(ret_error, "%s, byte %zu: %s", name, json_error.offset,
                               json_error.what);
    }
    if (err != 0) {
        return err;
    }
    if (tv_json_type(tv_json_root(doc)) != TV_JSON_OBJECT) {
        tv_json_destroy(doc);
        return tv_model_refuse(ret_error, "%s is not a JSON object", name);
    }
    *ret_doc = doc;
    return 0;
}

static int pointer_compare(const void *left, const void *right)
{
    const char *const *a = left, *const *b = right;
    return strcmp(*a, *b);
}

/* The distinct shard names of the index, sorted: *ret_names is malloc'd, its strings the index's.
 */
static int shard_names(const struct tv_json *index, const char ***ret_names, size_t *ret_count,
                       struct tv_model_error *ret_error)
{
    const struct tv_json_value *map = tv_json_member(tv_json_root(index), "weight_map");
    if (map == NULL || tv_json_type(map) != TV_JSON_OBJECT || tv_json_count(map) == 0) {
        return tv_model_refuse(ret_error, "%s has no weight_map", INDEX_FILE);
    }
    const char **names = calloc(tv_json_count(map), sizeof *names);
    if (names == NULL) {
        return -ENOMEM;
    }
    size_t listed = 0;
    for (const struct tv_json_value *v = tv_json_first(map); v != NULL; v = tv_json_next(v)) {
        const char *name = tv_json_string(v, NULL);
        if (name == NULL || name[0] == '\0' || name[0] == '.' || strchr(name, '/') != NULL) {
            free(names);
            return tv_model_refuse(ret_error, "%s maps tensor '%.200s' to no plain file name",
                                   INDEX_FILE, tv_json_name(v));
        }
        names[listed++] = name;
    }
    qsort(names, listed, sizeof *names, pointer_compare);
    size_t count = 0;
    for (size_t i = 0; i < listed; i++) {
        if (count == 0 || strcmp(names[i], names[count - 1]) != 0) {
            names[count++] = names[i];
        }
    }
    if (count > SHARDS_MAX) {
        free(names);
        return tv_model_refuse(ret_error, "%s names %zu files (at most %d)", INDEX_FILE, count,
                               SHARDS_MAX);
    }
    *ret_names = names;
    *ret_count = count;
    return 0;
}

/* A listed file that is not there: which tensors the index has in it says more than its name. */
static int absent_refuse(const struct tv_json *index, const char *absent,
                         struct tv_model_error *ret_error)
{
    const struct tv_json_value *map = tv_json_member(tv_json_root(index), "weight_map");
    const char *tensor = "";
    size_t count = 0;
    for (const struct tv_json_value *v = tv_json_first(map); v != NULL; v = tv_json_next(v)) {
        if (strcmp(tv_json_string(v, NULL), absent) == 0) {
            tensor = count++ == 0 ? tv_json_name(v) : tensor;
        }
    }
    return tv_model_refuse(ret_error,
                           "%s lists %zu tensors in %.100s, which is not in the folder; the first "
                           "is '%.200s'",
                           INDEX_FILE, count, absent, tensor);
}

static int files_open(struct tv_checkpoint *checkpoint, const char *const *names, size_t count,
                      struct tv_model_error *ret_error)
{
    checkpoint->files = calloc(count, sizeof *checkpoint->files);
    if (checkpoint->files == NULL) {
        return -ENOMEM;
    }
    for (size_t i = 0; i < count; i++) {
        enum tv_safetensors_fault fault;
        int err = tv_safetensors_open(checkpoint->folder_fd, names[i], &checkpoint->files[i],
                                      &fault, ret_error);
        if (err != 0) {
            return err;
        }
        checkpoint->file_count++;
    }
    return 0;
}

static int entry_compare(const void *left, const void *right)
{
    const struct tv_checkpoint_entry *a = left, *b = right;
    int order = strcmp(a->tensor->name, b->tensor->name);
    return order != 0 ? order : strcmp(a->file->name, b->file->name);
}

static int entries_set(struct tv_checkpoint *checkpoint)
{
    size_t count = 0;
    for (size_t i = 0; i < checkpoint->file_count; i++) {
        count += checkpoint->files[i].count;
    }
    checkpoint->entries = calloc(count + 1, sizeof *checkpoint->entries);
    if (checkpoint->entries == NULL) {
        return -ENOMEM;
    }
    for (size_t i = 0; i < checkpoint->file_count; i++) {
        const struct tv_safetensors *file = &checkpoint->files[i];
        for (size_t j = 0; j < file->count; j++) {
            checkpoint->entries[checkpoint->entry_count++] =
                (struct tv_checkpoint_entry){.file = file, .tensor = &file->tensors[j]};
        }
    }
    qsort(checkpoint->entries, count, sizeof *checkpoint->entries, entry_compare);
    return 0;
}

/* Of tensors without files, whose names all differ. */
static int invented_compare(const void *left, const void *right)
{
    const struct tv_checkpoint_entry *a = left, *b = right;
    return strcmp(a->tensor->name, b->tensor->name);
}

static int duplicates_check(const struct tv_checkpoint *checkpoint,
                            struct tv_model_error *ret_error)
{
    for (size_t i = 1; i < checkpoint->entry_count; i++) {
        const struct tv_checkpoint_entry *a = &checkpoint->entries[i - 1];
        const struct tv_checkpoint_entry *b = &checkpoint->entries[i];
        if (strcmp(a->tensor->name, b->tensor->name) == 0) {
            return tv_model_refuse(
                ret_error, "tensor '%.200s' is in %.100s (%lld bytes) and in %.100s (%lld bytes)",
                a->tensor->name, a->file->name, (long long)a->tensor->bytes, b->file->name,
                (long long)b->tensor->bytes);
        }
    }
    return 0;
}

/* Every listed tensor is in the file the index names, and nothing else is in the files. */
static int index_check(struct tv_checkpoint *checkpoint, struct tv_model_error *ret_error)
{
    const struct tv_json_value *map = tv_json_member(tv_json_root(checkpoint->index), "weight_map");
    for (const struct tv_json_value *v = tv_json_first(map); v != NULL; v = tv_json_next(v)) {
        const char *name = tv_json_name(v);
        const char *file = tv_json_string(v, NULL);
        struct tv_checkpoint_entry *entry = tv_checkpoint_find(checkpoint, name);
        if (entry == NULL) {
            return tv_model_refuse(ret_error,
                                   "%s lists tensor '%.200s' in %.100s, which does not hold it",
                                   INDEX_FILE, name, file);
        }
        if (strcmp(entry->file->name, file) != 0) {
            return tv_model_refuse(ret_error,
                                   "%s lists tensor '%.150s' in %.80s, but it is in %.80s",
                                   INDEX_FILE, name, file, entry->file->name);
        }
        entry->served = 1; /* only a mark until the end of this function */
    }
    int err = 0;
    for (size_t i = 0; i < checkpoint->entry_count; i++) {
        struct tv_checkpoint_entry *entry = &checkpoint->entries[i];
        if (!entry->served && err == 0) {
            err = tv_model_refuse(ret_error, "tensor '%.200s' of %.100s is not in %s",
                                  entry->tensor->name, entry->file->name, INDEX_FILE);
        }
        entry->served = 0;
    }
    return err;
}

static int shards_open(struct tv_checkpoint *checkpoint, struct tv_model_error *ret_error)
{
    static const char *const single[] = {SINGLE_FILE};
    int err = object_read(checkpoint->folder_fd, INDEX_FILE, INDEX_BYTES_MAX, &checkpoint->index,
                          ret_error);
    int has_single = faccessat(checkpoint->folder_fd, SINGLE_FILE, F_OK, 0) == 0;
    if (err == -ENOENT && !has_single) {
        return tv_model_refuse(ret_error, "neither %s nor %s is in the folder", SINGLE_FILE,
                               INDEX_FILE);
    }
    if (err == -ENOENT) {
        return files_open(checkpoint, single, 1, ret_error);
    }
    if (err != 0) {
        return err;
    }
    const char **names = NULL;
    size_t count = 0;
    err = shard_names(checkpoint->index, &names, &count, ret_error);
    if (err != 0) {
        return err;
    }
    /* One of the two is stale, and guessing which serves the wrong weights half of the time. */
    if (has_single && !(count == 1 && strcmp(names[0], SINGLE_FILE) == 0)) {
        err = tv_model_refuse(ret_error, "both %s and %s (with %zu files) are in the folder",
                              SINGLE_FILE, INDEX_FILE, count);
    }
    for (size_t i = 0; err == 0 && i < count; i++) {
        if (faccessat(checkpoint->folder_fd, names[i], F_OK, 0) != 0 && errno == ENOENT) {
            err = absent_refuse(checkpoint->index, names[i], ret_error);
        }
    }
    if (err == 0) {
        err = files_open(checkpoint, names, count, ret_error);
    }
    free(names);
    return err;
}

/* The folder and its config.json. */
static int folder_open(const char *dir, struct tv_checkpoint *checkpoint,
                       struct tv_model_error *ret_error)
{
    checkpoint->folder_fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (checkpoint->folder_fd < 0) {
        return tv_model_refuse(ret_error, "folder '%.300s': %s", dir, strerror(errno));
    }
    int err = object_read(checkpoint->folder_fd, "config.json", CONFIG_BYTES_MAX,
                          &checkpoint->config, ret_error);
    return err == -ENOENT ? tv_model_refuse(ret_error, "config.json is not in the folder") : err;
}

int tv_checkpoint_open(const char *dir, struct tv_checkpoint *ret_checkpoint,
                       struct tv_model_error *ret_error)
{
    struct tv_checkpoint checkpoint = {0};
    int err = folder_open(dir, &checkpoint, ret_error);
    if (err == 0) {
        err = shards_open(&checkpoint, ret_error);
    }
    if (err == 0) {
        err = entries_set(&checkpoint);
    }
    if (err == 0) {
        err = duplicates_check(&checkpoint, ret_error);
    }
    if (err == 0 && checkpoint.index != NULL) {
        err = index_check(&checkpoint, ret_error);
    }
    if (err != 0) {
        tv_checkpoint_finish(&checkpoint);
        return err;
    }
    *ret_checkpoint = checkpoint;
    return 0;
}

int tv_checkpoint_invent(const char *dir, uint64_t seed, struct tv_checkpoint *ret_checkpoint,
                         struct tv_model_error *ret_error)
{
    struct tv_checkpoint checkpoint = {.synthetic = 1, .seed = seed};
    int err = folder_open(dir, &checkpoint, ret_error);
    if (err != 0) {
        tv_checkpoint_finish(&checkpoint);
        return err;
    }
    *ret_checkpoint = checkpoint;
    return 0;
}

int tv_checkpoint_invent_tensor(struct tv_checkpoint *checkpoint, const char *name,
                                enum tv_dtype dtype, int32_t rows, int32_t cols,
                                uint32_t *ret_number)
{
    if (checkpoint->entry_count == checkpoint->invented_capacity) {
        size_t capacity =
            checkpoint->invented_capacity > 0 ? 2 * checkpoint->invented_capacity : 1024;
        struct tv_safetensors_tensor *grown =
            realloc(checkpoint->invented, capacity * sizeof *grown);
        if (grown == NULL) {
            return -ENOMEM;
        }
        checkpoint->invented = grown;
        checkpoint->invented_capacity = capacity;
    }
    char *copy = strdup(name);
    if (copy == NULL) {
        return -ENOMEM;
    }
    *ret_number = (uint32_t)checkpoint->entry_count;
    struct tv_safetensors_tensor tensor = {.name = copy,
                                           .dtype = dtype == TV_F32 ? "F32" : "BF16",
                                           .bits = 8 * (int32_t)tv_dtype_size(dtype),
                                           .rank = rows > 0 ? 2 : 1,
                                           .shape = {rows > 0 ? rows : cols, cols}};
    checkpoint->invented[checkpoint->entry_count++] = tensor;
    return 0;
}

int tv_checkpoint_invented(struct tv_checkpoint *checkpoint)
{
    checkpoint->entries = calloc(checkpoint->entry_count + 1, sizeof *checkpoint->entries);
    if (checkpoint->entries == NULL) {
        return -ENOMEM;
    }
    for (size_t i = 0; i < checkpoint->entry_count; i++) {
        checkpoint->entries[i] =
            (struct tv_checkpoint_entry){.tensor = &checkpoint->invented[i], .served = 1};
    }
    qsort(checkpoint->entries, checkpoint->entry_count, sizeof *checkpoint->entries,
          invented_compare);
    return 0;
}

void tv_checkpoint_finish(struct tv_checkpoint *checkpoint)
{
    for (size_t i = 0; checkpoint->invented != NULL && i < checkpoint->entry_count; i++) {
        free((void *)(uintptr_t)checkpoint->invented[i].name); /* made here */
    }
    free(checkpoint->invented);
    for (size_t i = 0; i < checkpoint->file_count; i++) {
        tv_safetensors_finish(&checkpoint->files[i]);
    }
    free(checkpoint->files);
    free(checkpoint->entries);
    tv_json_destroy(checkpoint->config);
    tv_json_destroy(checkpoint->index);
    if (checkpoint->folder_fd >= 0) {
        (void)close(checkpoint->folder_fd); /* a directory: nothing can be lost */
    }
    memset(checkpoint, 0, sizeof *checkpoint);
    checkpoint->folder_fd = -1;
}

struct tv_checkpoint_entry *tv_checkpoint_find(const struct tv_checkpoint *checkpoint,
                                               const char *name)
{
    size_t low = 0, high = checkpoint->entry_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        int order = strcmp(checkpoint->entries[middle].tensor->name, name);
        if (order == 0) {
            return &checkpoint->entries[middle];
        }
        if (order < 0) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return NULL;
}
