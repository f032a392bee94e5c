/*
 * folder.c - folders for a test's files.
 */
#include "folder.h"

#include <dirent.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <cmocka.h>

void tv_tiny_folder_clear(const char *dir)
{
    DIR *folder = opendir(dir);
    assert_non_null(folder);
    for (struct dirent *entry = readdir(folder); entry != NULL; entry = readdir(folder)) {
        if (entry->d_name[0] != '.') {
            assert_int_equal(unlinkat(dirfd(folder), entry->d_name, 0), 0);
        }
    }
    assert_int_equal(closedir(folder), 0);
}

void tv_tiny_folder(char *ret_dir, size_t bytes)
{
    const char *base = getenv("TMPDIR");
    (void)snprintf(ret_dir, bytes, "%s/tv-tiny-XXXXXX", base != NULL ? base : "/tmp");
    assert_non_null(mkdtemp(ret_dir));
}

void tv_tiny_folder_remove(const char *dir)
{
    tv_tiny_folder_clear(dir);
    assert_int_equal(rmdir(dir), 0);
}
