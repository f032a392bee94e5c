/*
 * folder.h - folders for a test's files.
 */
#ifndef TV_TESTS_FOLDER_H
#define TV_TESTS_FOLDER_H

#include <stddef.h>

/* A new empty folder under TMPDIR; remove it with all files by tv_tiny_folder_remove. */
void tv_tiny_folder(char *ret_dir, size_t bytes);
void tv_tiny_folder_remove(const char *dir);
/* Only its files. */
void tv_tiny_folder_clear(const char *dir);

#endif
