/*
 * fuzz_safetensors.c - bytes to the reader of safetensors files.
 *
 * What is accepted must be what the format promises: tensors in order, without a gap or an overlap,
 * of the length of their shape, up to the last byte; and every one can be read to its ends. What is
 * refused has a fault and a sentence.
 */
#include <errno.h>
#include <stdint.h>
#include <string.h>

#include "fuzz.h"
#include "memory_file.h"
#include "model/safetensors.h"

static int folder = -1;

static void read_ends(const struct tv_safetensors *file, const struct tv_safetensors_tensor *tensor)
{
    struct tv_model_error error = {{0}};
    uint8_t bytes[16];
    size_t some = tensor->bytes < 16 ? (size_t)tensor->bytes : 16;

    REQUIRE(tv_safetensors_read(file, tensor, 0, bytes, some, &error) == 0);
    REQUIRE(tv_safetensors_read(file, tensor, tensor->bytes - (int64_t)some, bytes, some, &error) ==
            0);
}

static void check_accepted(const struct tv_safetensors *file, size_t bytes)
{
    int64_t end = 0;

    REQUIRE(file->file_bytes == (int64_t)bytes);
    REQUIRE(file->data_begin >= 10 && file->data_begin <= file->file_bytes);
    for (size_t i = 0; i < file->count; i++) {
        const struct tv_safetensors_tensor *tensor = &file->tensors[i];
        int64_t elements = 1;
        REQUIRE(tensor->name != NULL && tensor->dtype != NULL);
        REQUIRE(tensor->rank >= 0 && tensor->rank <= TV_SAFETENSORS_RANK_MAX);
        for (int32_t d = 0; d < tensor->rank; d++) {
            REQUIRE(tensor->shape[d] >= 0);
            elements *= tensor->shape[d];
        }
        REQUIRE(elements * tensor->bits == tensor->bytes * 8);
        REQUIRE(tensor->begin == end && tensor->bytes >= 0);
        end = tensor->begin + tensor->bytes;
        for (size_t j = 0; j < i; j++) {
            REQUIRE(strcmp(file->tensors[j].name, tensor->name) != 0);
        }
        read_ends(file, tensor);
    }
    REQUIRE(file->data_begin + end == file->file_bytes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    struct memory_file memory = memory_file_make(data, bytes);
    enum tv_safetensors_fault fault = TV_SAFETENSORS_OK;
    struct tv_model_error error = {{0}};
    struct tv_safetensors file;

    if (folder < 0) {
        folder = open("/proc/self/fd", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    }
    REQUIRE(folder >= 0);
    int rc = tv_safetensors_open(folder, memory.name, &file, &fault, &error);
    if (rc == 0) {
        REQUIRE(fault == TV_SAFETENSORS_OK);
        check_accepted(&file, bytes);
        tv_safetensors_finish(&file);
    } else {
        REQUIRE(rc == -EBADMSG && fault != TV_SAFETENSORS_OK && error.text[0] != '\0');
    }
    memory_file_drop(&memory);
    return 0;
}
