/*
 * replay.c - runs a fuzz target over the files of a folder, without an engine.
 *
 * usage: replay_<target> FOLDER PREFIXES. Also feeds the first so many prefixes of each file, which
 * is where parsers break most often. Fails when the folder holds nothing.
 */
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"

#define FILE_BYTES_MAX (1u << 20)

static int run_file(const char *path, uint8_t *data, size_t prefixes)
{
    FILE *file = fopen(path, "rb");
    size_t bytes, prefix;

    if (file == NULL) {
        fprintf(stderr, "cannot open %s\n", path);
        return -1;
    }
    bytes = fread(data, 1, FILE_BYTES_MAX, file);
    fclose(file);
    for (prefix = 0; prefix < bytes && prefix < prefixes; prefix++) {
        (void)LLVMFuzzerTestOneInput(data, prefix); /* always 0; faults abort */
    }
    (void)LLVMFuzzerTestOneInput(data, bytes); /* the same */
    return 0;
}

int main(int argc, char **argv)
{
    uint8_t *data = malloc(FILE_BYTES_MAX);
    DIR *dir = argc == 3 ? opendir(argv[1]) : NULL;
    struct dirent *entry;
    char path[4096];
    int files = 0;

    if (dir == NULL || data == NULL) {
        fprintf(stderr, "usage: %s FOLDER PREFIXES\n", argv[0]);
        free(data);
        return 64;
    }
    while ((entry = readdir(dir)) != NULL) {
        if (entry->d_name[0] == '.') {
            continue;
        }
        (void)snprintf(path, sizeof(path), "%s/%s", argv[1], entry->d_name); /* cut: open fails */
        if (run_file(path, data, strtoul(argv[2], NULL, 10)) < 0) {
            break;
        }
        files++;
    }
    closedir(dir);
    free(data);
    printf("%d files\n", files);
    return entry != NULL || files == 0;
}
