/*
 * checkkern.c - every slot of an operation table against the reference.
 *
 *   checkkern [--backend cpu|ref|cuda] [--device N] [--threads N] [--mask HEX] [--seed N]
 *             [--only PART] [--scale N] [--refuse-maps] [--bench] [--peers FOLDER]
 *
 * Prints one line per part with its worst margin (error / bound) and exits 1 on any failure. --mask
 * lists the processor features that may be used (kernels/cpu_features.h). --bench measures instead,
 * on a device also at the points of the measurement plan, beside the peers in FOLDER (peer.h).
 * --device chooses one of cuda's. --refuse-maps: with a driver that refuses what Hopper's kernels
 * ask of it (device.h), where others must stand in for them.
 */
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>

#include "tests/check/check.h"
#ifdef TV_CHECK_DEVICE
#include "tests/check/device.h"
#endif
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

/* What was asked for. */
struct request {
    struct tv_kernels_options options;
    const char *backend, *only, *peers, *device;
    int bench, refuse_maps;
};

static int usage(void)
{
    fprintf(stderr, "usage: checkkern [--backend cpu|ref|cuda] [--device N] [--threads N] "
                    "[--mask HEX] [--seed N] [--only PART] [--scale N] [--refuse-maps] [--bench] "
                    "[--peers FOLDER]\n");
    return 64;
}

/* An option and what follows it; 0: there is none of that name. */
static int option_take(struct request *r, struct check *c, const char *option, const char *value)
{
    if (strcmp(option, "--backend") == 0) {
        r->backend = value;
    } else if (strcmp(option, "--device") == 0) {
        r->device = value;
    } else if (strcmp(option, "--threads") == 0) {
        r->options.threads = atoi(value);
    } else if (strcmp(option, "--mask") == 0) {
        r->options.cpu_flags_mask = strtoull(value, NULL, 16);
    } else if (strcmp(option, "--seed") == 0) {
        c->seed = strtoull(value, NULL, 10);
    } else if (strcmp(option, "--scale") == 0) {
        c->scale = atoi(value);
    } else if (strcmp(option, "--only") == 0) {
        r->only = value;
    } else if (strcmp(option, "--peers") == 0) {
        r->peers = value;
    } else {
        return 0;
    }
    return 1;
}

/* 0, or the status to end with: a device is cuda's, and one that there is. */
static int device_take(struct request *r)
{
    char *end = NULL;
    if (r->device == NULL) {
        return 0;
    }
    long device = strtol(r->device, &end, 10);
    if (end == r->device || *end != '\0' || device < 0 || device > INT_MAX) {
        fprintf(stderr, "checkkern: --device %s is no number of a device\n", r->device);
        return 64;
    }
    if (strcmp(r->backend, "cuda") != 0) {
        fprintf(stderr, "checkkern: the backend %s has no devices to choose from\n", r->backend);
        return 64;
    }
    r->options.device = (int32_t)device;
#ifdef TV_CHECK_DEVICE
    int count = device_count();
    if (count > 0 && device >= count) {
        fprintf(stderr, "checkkern: there is no device %ld; there are 0 to %d\n", device,
                count - 1);
        return 64;
    }
#endif
    return 0;
}

/* 0, or the status to end with. */
static int backends_open(const struct request *r, struct check *c)
{
    int cuda = strcmp(r->backend, "cuda") == 0;
    if (tv_test_backend_open(r->backend, &r->options, &c->k) != 0 ||
        tv_test_backend_open("ref", NULL, &c->ref) != 0) {
        return cuda ? 77 : 2;
    }
    c->taken = c->k->allocations ? c->k->allocations(c->k) : 0;
    if (strcmp(r->backend, "cpu") == 0) {
        struct tv_kernels_options others = r->options;
        others.threads = r->options.threads == 1 ? 3 : 1;
        if (tv_test_backend_open("cpu", &others, &c->other) != 0) {
            return 2;
        }
    }
#ifdef TV_CHECK_DEVICE
    if (cuda) {
        device_use(r->options.device);
    }
    if (cuda && r->refuse_maps) {
        device_maps_refuse(c->k);
        return 0;
    }
#endif
    if (r->refuse_maps) {
        fprintf(stderr, "checkkern: only cuda has maps, in a build that has it\n");
        return 64;
    }
    return 0;
}

static void parts_run(struct check *c, const char *only)
{
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
        if (only && strcmp(only, parts[i].name) != 0) {
            continue;
        }
        int32_t before = c->failures;
        c->name = parts[i].name;
        c->margin = 0.0;
        c->rng = c->seed * 1000003u + i;
        parts[i].run(c);
        printf("%s %s worst margin %.3f\n", c->failures == before ? "PASS" : "FAIL", parts[i].name,
               c->margin);
        (void)fflush(stdout);
    }
}

int main(int argc, char **argv)
{
    struct request r = {.backend = "cpu",
                        .options = {.threads = 2, .cpu_flags_mask = ~(uint64_t)0}};
    struct check c = {.seed = 1, .scale = 1};
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--bench") == 0) {
            r.bench = 1;
        } else if (strcmp(argv[i], "--refuse-maps") == 0) {
            r.refuse_maps = 1;
        } else if (i + 1 == argc || !option_take(&r, &c, argv[i], argv[i + 1])) {
            return usage();
        } else {
            i++;
        }
    }
    int status = device_take(&r);
    status = status != 0 ? status : backends_open(&r, &c);
    if (status != 0) {
        return status;
    }
    printf("backend %s (%s), seed %llu\n", c.k->name, c.k->variant, (unsigned long long)c.seed);
    if (r.bench) {
        check_bench(&c, r.peers);
    } else {
        parts_run(&c, r.only);
    }
#ifdef TV_CHECK_DEVICE
    if (r.refuse_maps) {
        printf("%llu maps were refused\n", (unsigned long long)device_maps_refused());
    }
#endif
    if (c.other) {
        c.other->destroy(c.other);
    }
    c.k->destroy(c.k);
    c.ref->destroy(c.ref);
    return c.failures ? 1 : 0;
}
