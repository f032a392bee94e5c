/*
 * config.h - every setting of the daemon in one struct, with defaults and where it came from.
 *
 * Command line wins, then TREEVERIFY_ environment variables, then the drop-in files (the last by
 * name first), then the INI file. Unknown keys are refused. Values are checked here once; nobody
 * re-reads text later.
 */
#ifndef TV_CONFIG_CONFIG_H
#define TV_CONFIG_CONFIG_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "kernels/types.h"
#include "proto/limits.h"

/* At least the number of options; the table's own count is checked against it. */
#define TV_CONFIG_OPTIONS_MAX 64
/* Drop-in files beside the configuration file, and their names. */
#define TV_CONFIG_DROPINS_MAX 16
#define TV_CONFIG_NAME_BYTES  64

/* In ascending rank. */
enum tv_origin {
    TV_ORIGIN_DEFAULT = 0,
    TV_ORIGIN_FILE,
    TV_ORIGIN_ENVIRONMENT,
    TV_ORIGIN_COMMAND_LINE
};

/* Depths with a rate of their own under synthetic_acceptance. */
#define TV_CONFIG_SYNTHETIC_MAX 32

/* prefix_cache: off; pages that prefill wrote; those of rounds too. */
enum { TV_PREFIX_CACHE_OFF, TV_PREFIX_CACHE_ON, TV_PREFIX_CACHE_ROUNDS };

struct tv_config {
    char model[4096];
    char backend[8];      /* "cpu" or "cuda" */
    char listen_host[64]; /* numeric address or "localhost" */
    int32_t listen_port;  /* 0 = the system chooses */
    int admin_on;
    char admin_host[64];
    int32_t admin_port; /* default listen_port + 1 (0 when that is 0) */
    int32_t page_size;
    int64_t pages; /* 0: what a device has room for, else enough for 8 sequences of max_len */
    int64_t device_reserve; /* bytes of a device that stay free when pages is 0 */
    double pages_share;     /* of what is left then; in (0, 1] */
    int has_kv_dtype;
    enum tv_dtype kv_dtype; /* default f32 on cpu, bf16 on cuda */
    enum tv_products products;
    int prefix_cache; /* TV_PREFIX_CACHE_... */
    int32_t max_len;  /* 0 = the checkpoint's */
    int32_t max_nodes, max_depth;
    int32_t tap_count; /* 0: no hidden rows are handed out */
    int32_t taps[TV_TAPS_MAX];
    char taps_projection[4096];
    int32_t threads; /* 0 = processors online */
    double shadow;   /* 0 off, 1 all, else share */
    double shadow_path;
    char state_dir[4096];
    int64_t snapshot_bytes;             /* of the sessions kept for the next start; 0: none are */
    int32_t snapshot_max_s;             /* of a stop, for writing them */
    char api_key_file[4096];            /* as tv_config_path takes it; so are the next two */
    char tls_cert[4096], tls_key[4096]; /* both or none */
    int32_t tls_min;                    /* 12: TLS 1.2, 13: TLS 1.3 */
    char hosts[1024];                   /* names between commas, or "any"; "": none besides ours */
    int32_t max_sessions;
    int32_t queue_max;    /* waiting calls */
    int32_t launch_max_s; /* without progress in an engine call, before readiness fails; 0: auto */
    int32_t launch_rows;  /* of one launch; 0: the engine's */
    int32_t batch_window_us;
    int32_t principal_sessions, principal_pages, principal_nodes_s; /* 0: no limit */
    double principal_rejected;                                      /* a share; 0: no limit */
    int64_t body_bytes, body_bytes_large, inline_bytes, answers_bytes, fetch_bytes;
    int32_t connections_max, connections_per_address; /* per address 0: 64, off on loopback */
    int32_t event_readers_max;
    int32_t idle_pages_s; /* 0: as long as the lease */
    int32_t drain_grace_s, drain_max_s;
    int32_t http_threads;
    int32_t synthetic_acceptance_count; /* 0: off */
    double synthetic_acceptance[TV_CONFIG_SYNTHETIC_MAX];
    int poison; /* NaN in unused pages (tests) */
    int synthetic_weights;
    uint64_t synthetic_seed; /* of them */
    int synthetic_kv;        /* prompts are not computed */
    int check_only, check_gpu, print_only, help, version;
    char log_level[8];
    unsigned char origin[TV_CONFIG_OPTIONS_MAX];      /* enum tv_origin of each option's value */
    unsigned char origin_file[TV_CONFIG_OPTIONS_MAX]; /* 0: the file; n: dropins[n - 1] */
    char file[4096];                                  /* "": none was read */
    char dropins[TV_CONFIG_DROPINS_MAX][TV_CONFIG_NAME_BYTES]; /* of the folder <file>.d */
};

/* argv as main got it. 0; -EINVAL with text for exit 64 (usage); -EBADMSG with text for exit 78.
 * With help or version asked for, nothing else is checked. */
int tv_config_load(struct tv_config *ret_config, int argc, char **argv, char *error,
                   size_t error_bytes);
/* Effective values as a configuration file, each under a comment that names its origin. */
void tv_config_print(const struct tv_config *config, FILE *out);
void tv_config_usage(FILE *out);

/* paths.c. The file that an option names: "credential:NAME" is a file of what the service manager
 * keeps for this service ($CREDENTIALS_DIRECTORY), anything else a path. 0 or -EBADMSG with text.
 */
int tv_config_path(const char *text, char *ret_path, size_t path_bytes, char *error,
                   size_t error_bytes);

/* reload.c. Take over what another reading of the same files says, as far as a running daemon can.
 * waiting: names, with commas between, of the other options that differ: they wait for a restart.
 */
void tv_config_take(struct tv_config *config, const struct tv_config *fresh);
void tv_config_waiting(const struct tv_config *config, const struct tv_config *fresh,
                       char *ret_names, size_t names_bytes);

/* keys.c. Bearer keys; several of one name are a rotation. */
enum { TV_SCOPE_VERIFY = 1, TV_SCOPE_METRICS = 2, TV_SCOPE_ADMIN = 4 };
#define TV_KEYS_MAX             1024
#define TV_KEY_SECRET_BYTES_MAX 256
struct tv_key {
    char name[33];
    int scopes;      /* TV_SCOPE_... together */
    uint8_t sum[32]; /* SHA-256 of the secret */
};
struct tv_keys {
    struct tv_key *keys; /* owned */
    int32_t count;
};
/* The keys of the file that api_key_file names, at least one. -EBADMSG with text, which quotes no
 * line. */
int tv_keys_load(const char *text, struct tv_keys *ret_keys, char *error, size_t error_bytes);
void tv_keys_finish(struct tv_keys *keys);
/* The key of this secret, or NULL; takes as long for every secret of the same length. */
const struct tv_key *tv_keys_find(const struct tv_keys *keys, const char *secret, size_t bytes);

#endif
