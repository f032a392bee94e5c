/*
 * checkkern.c - every slot of an operation table against the reference.
 *
 *   checkkern [--backend cpu|ref|cuda] [--threads N] [--mask HEX] [--seed N] [--only PART]
 *             [--scale N] [--bench] [--peers FOLDER]
 *
 * Prints one line per part with its worst margin (error / bound) and exits 1 on any failure. --mask
 * lists the processor features that may be used (kernels/cpu_features.h). --bench measures instead,
 * on a device also at the points of the measurement plan, beside the peers in FOLDER (peer.h).
 */
#include <stdio.h>
#include <stdlib.h>

#include "tests/check/check.h"
#include "tests/support/backend.h"

struct part {
    const char *name;
    void (*run)(struct check *c);
};

static const struct part parts[] = {
    {"dense", check_dense},     {"experts", check_experts}, {"verify", check_verify},
    {"prefill", check_prefill}, {"draw", check_draw},       {"synthesize", check_synthesize},
    {"record", check_record},   {"copy", check_copy},       {"fused", check_fused},
    {"refused", check_refused},
};

static int usage(void)
{
    fprintf(stderr, "usage: checkkern [--backend cpu|ref|cuda] [--threads N] [--mask HEX] "
                    "[--seed N] [--only PART] [--scale N] [--bench] [--peers FOLDER]\n");
    return 64;
}

int main(int argc, char **argv)
{
    const char *backend = "cpu";
    const char *only = NULL, *peers = NULL;
    int bench = 0;
    struct tv_kernels_options options = {.threads = 2, .cpu_flags_mask = ~(uint64_t)0};
    struct check c = {.seed = 1, .scale = 1};
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--bench") == 0) {
            bench = 1;
            continue;
        }
        if (i + 1 == argc) {
            return usage();
        }
        const char *option = argv[i++];
        if (strcmp(option, "--backend") == 0) {
            backend = argv[i];
        } else if (strcmp(option, "--threads") == 0) {
            options.threads = atoi(argv[i]);
        } else if (strcmp(option, "--mask") == 0) {
            options.cpu_flags_mask = strtoull(argv[i], NULL, 16);
        } else if (strcmp(option, "--seed") == 0) {
            c.seed = strtoull(argv[i], NULL, 10);
        } else if (strcmp(option, "--scale") == 0) {
            c.scale = atoi(argv[i]);
        } else if (strcmp(option, "--only") == 0) {
            only = argv[i];
        } else if (strcmp(option, "--peers") == 0) {
            peers = argv[i];
        } else {
            return usage();
        }
    }
    if (tv_test_backend_open(backend, &options, &c.k) != 0 ||
        tv_test_backend_open("ref", NULL, &c.ref) != 0) {
        return strcmp(backend, "cuda") == 0 ? 77 : 2;
    }
    if (strcmp(backend, "cpu") == 0) {
        struct tv_kernels_options others = options;
        others.threads = options.threads == 1 ? 3 : 1;
        if (tv_test_backend_open("cpu", &others, &c.other) != 0) {
            return 2;
        }
    }
    printf("backend %s (%s), seed %llu\n", c.k->name, c.k->variant, (unsigned long long)c.seed);
    for (size_t i = 0; i < sizeof parts / sizeof parts[0] && !bench; i++) {
        if (only && strcmp(only, parts[i].name) != 0) {
            continue;
        }
        int32_t before = c.failures;
        c.name = parts[i].name;
        c.margin = 0.0;
        c.rng = c.seed * 1000003u + i;
        parts[i].run(&c);
        printf("%s %s worst margin %.3f\n", c.failures == before ? "PASS" : "FAIL", parts[i].name,
               c.margin);
        (void)fflush(stdout);
    }
    if (bench) {
        check_bench(&c, peers);
    }
    if (c.other) {
        c.other->destroy(c.other);
    }
    c.k->destroy(c.k);
    c.ref->destroy(c.ref);
    return c.failures ? 1 : 0;
}
