/*
 * fuzz.h - what every target has: its entry, and a check that also holds without assertions.
 */
#ifndef TV_TESTS_FUZZ_FUZZ_H
#define TV_TESTS_FUZZ_FUZZ_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

/* abort() is what libFuzzer takes for a finding. */
#define REQUIRE(condition)                                                                         \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                        \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

#endif
