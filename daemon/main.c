/*
 * main.c - arguments, signals, start order, stop order, exit code; the only file that may end the
 * process.
 *
 * Start: configuration, engine, shadow, sched, listeners; ready means bound. Stop: readiness fails,
 * a grace for balancers to notice, new work is refused, what runs is finished, everything ends in
 * reverse order. A second signal leaves the waiting out; an alarm ends what never ends.
 */
#include "main.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "gpu_watch.h"
#include "http/http.h"
#include "notify.h"
#include "sched/sched.h"
#include "shadow/shadow.h"
#include "state_dir.h"
#include "stats/stats.h"

#define SHADOW_QUEUE_BYTES (256u << 20)
#define QUIET_MS           1000 /* a connection without a request for this long is not in use */
#define DRAIN_TICK_MS      20
#define ABORT_S            5       /* after a second signal */
#define LOST_S             4       /* from a lost device to the end of the process, at most */
#define LOST_SERVE_MS      1000    /* of these, probes are answered at least so long */
#define LOST_FINISH_MS     2500    /* and refusals are waited for at most so long */
#define SAVE_SPARE_US      1000000 /* of a stop's time, for what follows the sessions */
#define RESTORE_TELL_US    2000000 /* from one word about a restore to the next */
#define RESTORE_EXTEND_US  30000000
#define STUCK_LOOKS        3
#define TICK_MS            1000    /* of the loop that looks after all this, at most */
#define GPU_LOOK_US        2000000 /* from one look at the GPU's counters to the next */

/* Written by the signal handler, which may run on any thread. */
static atomic_int loading = 1;    /* relaxed: a signal that comes meanwhile finds either */
static atomic_int stop_signals;   /* relaxed: the event descriptor orders it */
static atomic_int reload_signals; /* the same */
static int stop_event = -1;

struct service {
    struct tv_config config;
    struct tv_engine *engine;
    struct tv_shadow *shadow;
    struct tv_sched *sched;
    struct tv_http *http;
    struct tv_gpu_watch *gpu; /* NULL: no GPU, or nobody tells of it */
    int64_t gpu_looked_us;
    int stuck_looks; /* how many in turn have found an engine call that never ends */
    int argc;        /* main's, for a reload */
    char **argv;
    struct tv_http_sockets sockets; /* handed to the process, until the listeners take them over */
    struct tv_stats stats;          /* of sched and http, until both have ended */
    int64_t watchdog_us, fed_us;    /* time between two words to the watchdog, 0: none; the last */
    int moving;                     /* what it was told */
    int64_t started_unix_ms; /* leases count until then, and again from the end of the start */
    int64_t restore_told_us; /* when the manager last heard that a restore goes on */
    int64_t end_us;          /* when a stop is to be over; 0: it has not begun */
};

static void on_stop(int signal_number)
{
    (void)signal_number; /* SIGTERM and SIGINT mean the same */
    if (atomic_load_explicit(&loading, memory_order_relaxed)) {
        _exit(TV_EXIT_DRAINED); /* there are no sessions yet, so nothing can be lost */
    }
    const uint64_t one = 1;
    int saved = errno;
    (void)atomic_fetch_add_explicit(&stop_signals, 1, memory_order_relaxed);
    /* cannot be full: nobody sends 2^64 signals */
    ssize_t written = write(stop_event, &one, sizeof one);
    (void)written;
    errno = saved;
}

static void on_reload(int signal_number)
{
    const uint64_t one = 1;
    int saved = errno;
    (void)signal_number; /* only SIGHUP comes here */
    (void)atomic_fetch_add_explicit(&reload_signals, 1, memory_order_relaxed);
    /* as in on_stop */
    ssize_t written = write(stop_event, &one, sizeof one);
    (void)written;
    errno = saved;
}

/* The worker's, when the device is lost. */
static void on_lost(void *context)
{
    const uint64_t one = 1;
    (void)context;       /* there is one service */
    (void)alarm(LOST_S); /* in place of a drain's */
    /* as in on_stop */
    ssize_t written = write(stop_event, &one, sizeof one);
    (void)written;
}

static void on_alarm(int signal_number)
{
    static const char text[] = "<3>error: the stop took too long; ended with work unfinished\n";
    (void)signal_number; /* only SIGALRM comes here */
    ssize_t written = write(STDERR_FILENO, text, sizeof text - 1);
    (void)written; /* there is nobody left to tell */
    _exit(TV_EXIT_FAULT);
}

/* A descriptor from 0 to 2 that was closed would become a socket's, and the log would go there. */
static int streams_init(void)
{
    int fd;
    do {
        fd = open("/dev/null", O_RDWR);
        if (fd < 0) {
            return -errno;
        }
    } while (fd <= STDERR_FILENO);
    (void)close(fd); /* never written to */
    return 0;
}

static int signals_init(void)
{
    struct sigaction stop = {.sa_handler = on_stop, .sa_flags = SA_RESTART};
    struct sigaction reload = {.sa_handler = on_reload, .sa_flags = SA_RESTART};
    struct sigaction late = {.sa_handler = on_alarm};
    struct sigaction ignore = {.sa_handler = SIG_IGN};
    stop_event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (stop_event < 0 || sigaction(SIGTERM, &stop, NULL) != 0 ||
        sigaction(SIGINT, &stop, NULL) != 0 || sigaction(SIGALRM, &late, NULL) != 0 ||
        sigaction(SIGHUP, &reload, NULL) != 0 || sigaction(SIGPIPE, &ignore, NULL) != 0 ||
        sigaction(SIGXFSZ, &ignore, NULL) != 0) { /* a file over a limit is an error like another */
        return -errno;
    }
    return 0;
}

/* Wait for a signal or the time; the number of signals so far. */
static int await_stop(int timeout_ms)
{
    struct pollfd wait = {.fd = stop_event, .events = POLLIN};
    uint64_t count;
    if (poll(&wait, 1, timeout_ms) > 0) {
        ssize_t got = read(stop_event, &count, sizeof count);
        (void)got; /* only the descriptor's readiness is wanted; the counter is stop_signals */
    }
    return atomic_load_explicit(&stop_signals, memory_order_relaxed);
}

static void set_log_level(const char *name)
{
    static const char *const names[] = {
        [TV_LOG_ERROR] = "error",
        [TV_LOG_WARNING] = "warning",
        [TV_LOG_INFO] = "info",
        [TV_LOG_DEBUG] = "debug",
    };
    for (int i = 0; i <= TV_LOG_DEBUG; i++) {
        if (strcmp(name, names[i]) == 0) {
            tv_log_level_set((enum tv_log_level)i);
        }
    }
}

static int exit_code_of(int rc)
{
    switch (rc) {
    case 0:
        return TV_EXIT_DRAINED;
    case -ENOMEM:
    case -EAGAIN:
        return TV_EXIT_NO_MEMORY;
    default:
        return TV_EXIT_CONFIG;
    }
}

/* Where reproducers and sessions go: the configuration's word, else the system's. */
static void state_dir_settle(struct tv_config *config)
{
    char *dir = config->state_dir;
    if (dir[0] == '\0' && tv_state_dir_default(dir, sizeof config->state_dir) != 0) {
        dir[0] = '\0';
        tv_log(TV_LOG_WARNING, "no state folder (state_dir): violations that shadow mode finds are "
                               "listed without a reproducer, and sessions end with this process");
    } else {
        tv_log(TV_LOG_INFO, "reproducers of violations, and the sessions of a stop, go to %s", dir);
    }
}

/* The long part of a start, told to the service manager. */
static int engine_open(struct service *service, char *error, size_t error_bytes)
{
    struct tv_model_progress progress = {0};
    struct tv_herald herald;
    int rc = tv_herald_start(&herald, &progress, &tv_herald_usual);
    if (rc != 0) {
        (void)snprintf(error, error_bytes, "a thread cannot be started: %s", strerror(-rc));
        return exit_code_of(rc);
    }
    int code =
        tv_main_engine_open(&service->config, &progress, &service->engine, error, error_bytes);
    tv_herald_stop(&herald);
    return code;
}

/* A restore goes on: the manager gives it more time. 1: the process is to end. */
static int on_restore(void *context)
{
    struct service *service = context;
    int64_t now_us = tv_clock_us();
    if (now_us >= service->restore_told_us + RESTORE_TELL_US) {
        tv_notify_send("EXTEND_TIMEOUT_USEC=%lld\nSTATUS=restoring sessions",
                       (long long)RESTORE_EXTEND_US);
        service->restore_told_us = now_us;
    }
    return atomic_load_explicit(&stop_signals, memory_order_relaxed) > 0;
}

/* 0, or the exit code; what was opened is in *service either way. No http: it was told to end. */
static int service_start(struct service *service)
{
    char error[600] = "";
    const struct tv_config *config = &service->config;
    const char *dir = config->state_dir;
    int unusable = dir[0] == '\0' ? 0 : tv_state_dir_check(dir);
    if (unusable != 0) {
        tv_log(TV_LOG_ERROR, "state_dir %.400s: %s", dir, strerror(-unusable));
        return TV_EXIT_CONFIG;
    }
    int rc = tv_http_check(config, error, sizeof error);
    if (rc == 0) {
        rc = tv_http_probe(config, &service->sockets, error, sizeof error);
    }
    if (rc != 0) {
        tv_log(TV_LOG_ERROR, "%s", error);
        return exit_code_of(rc);
    }
    int code = engine_open(service, error, sizeof error);
    if (code != TV_EXIT_DRAINED) {
        tv_log(TV_LOG_ERROR, "%s", error);
        return code;
    }
    state_dir_settle(&service->config);
    struct tv_shadow_params shadow = {
        .probability = config->shadow,
        .path_probability = config->shadow_path,
        .queue_bytes_max = SHADOW_QUEUE_BYTES,
        .state_dir = config->state_dir[0] == '\0' ? NULL : config->state_dir,
        .device = service->engine->kernels,
        .judge_there = 1,
    };
    rc =
        tv_shadow_create(&shadow, service->engine->model, service->engine->cache, &service->shadow);
    if (rc != 0) {
        tv_log(TV_LOG_ERROR, "shadow cannot be started: %s", strerror(-rc));
        return exit_code_of(rc);
    }
    rc =
        tv_sched_create(config, service->engine, service->shadow, &service->stats, &service->sched);
    if (rc != 0) {
        tv_log(TV_LOG_ERROR, "the worker cannot be started: %s", strerror(-rc));
        return exit_code_of(rc);
    }
    tv_sched_lost_watch(service->sched, on_lost, NULL);
    atomic_store_explicit(&loading, 0, memory_order_relaxed);
    rc = tv_sched_restore(service->sched, config->state_dir, service->started_unix_ms, on_restore,
                          service);
    if (rc != 0) {
        return TV_EXIT_DRAINED;
    }
    rc = tv_http_create(config, &service->sockets, service->sched, &service->stats, &service->http,
                        error, sizeof error);
    if (rc != 0) { /* what was restored waits for another start */
        tv_log(TV_LOG_ERROR, "%s", error);
        service->end_us = tv_clock_us() + config->drain_max_s * 1000000LL;
    }
    return exit_code_of(rc);
}

/* Sessions into the state folder, as long as the stop may last. */
static void sessions_save(struct service *service)
{
    int64_t until_us = tv_clock_us() + service->config.snapshot_max_s * 1000000LL;
    int64_t end_us = service->end_us - SAVE_SPARE_US;
    tv_sched_end(service->sched);
    tv_sched_save(service->sched, until_us < end_us ? until_us : end_us);
}

/* What the driver says of the GPU, where the engine has one. */
static void gpu_watch(struct service *service)
{
    char reason[200] = "";
    if (service->engine->kernels == NULL || service->engine->kernels->device_memory == NULL) {
        return;
    }
    if (tv_gpu_watch_open(&service->gpu, reason, sizeof reason) != 0) {
        tv_log(TV_LOG_INFO, "the GPU's counters are not watched: %s", reason);
    }
}

static void gpu_look(struct service *service)
{
    struct tv_sched_gpu gpu;
    int64_t now_us = tv_clock_us();
    if (service->gpu != NULL && now_us >= service->gpu_looked_us + GPU_LOOK_US) {
        tv_gpu_watch_look(service->gpu, &gpu);
        tv_sched_gpu_tell(service->sched, &gpu);
        service->gpu_looked_us = now_us;
    }
}

/* Reverse order of the start; every part may be missing. */
static void service_stop(struct service *service)
{
    if (service->http != NULL) {
        tv_http_close(service->http);
    }
    if (service->end_us > 0) { /* it stops in order */
        sessions_save(service);
    }
    tv_sched_destroy(service->sched);
    tv_http_destroy(service->http);
    tv_gpu_watch_close(service->gpu);
    tv_shadow_destroy(service->shadow);
    tv_main_engine_close(service->engine);
}

/* Tell the manager's watchdog that the engine moves, when it is time to; one that stands still is
 * not told of, and ends the process. */
static void watchdog_feed(struct service *service)
{
    int64_t now_us = tv_clock_us();
    if (service->watchdog_us == 0 || now_us < service->fed_us + service->watchdog_us) {
        return;
    }
    int moving = tv_sched_moving(service->sched);
    if (moving) {
        tv_notify_send("WATCHDOG=1");
    }
    if (moving != service->moving) {
        tv_notify_send("STATUS=%s", moving ? "serving" : "the engine makes no progress");
    }
    service->moving = moving;
    service->fed_us = now_us;
}

/* Everything that can change while the service runs, as the files say now; or, with anything wrong
 * in one of them, nothing. */
static int reload(struct service *service)
{
    static struct tv_config fresh; /* large, and main's thread alone comes here */
    char error[600] = "", waiting[400];
    int rc = tv_config_load(&fresh, service->argc, service->argv, error, sizeof error);
    if (rc == 0) {
        rc = tv_http_reload(service->http, &fresh, error, sizeof error);
    }
    if (rc != 0) {
        tv_log(TV_LOG_ERROR, "reload: %s; everything stays as it was", error);
        tv_stats_add(&service->stats.reloads[1], 1);
        return rc;
    }
    tv_config_waiting(&service->config, &fresh, waiting, sizeof waiting);
    tv_sched_reload(service->sched, &service->config, &fresh);
    set_log_level(service->config.log_level);
    tv_log(TV_LOG_INFO, "reload: what the files say is in force");
    if (waiting[0] != '\0') {
        tv_log(TV_LOG_WARNING, "reload: %s changed too, which waits for a restart", waiting);
    }
    tv_stats_add(&service->stats.reloads[0], 1); /* who sees it counted, sees it done and said */
    return 0;
}

/* However many signals came. */
static void reload_when_asked(struct service *service)
{
    struct timespec now;
    if (atomic_exchange_explicit(&reload_signals, 0, memory_order_relaxed) == 0) {
        return;
    }
    (void)clock_gettime(CLOCK_MONOTONIC, &now); /* cannot fail */
    tv_notify_send("RELOADING=1\nMONOTONIC_USEC=%lld",
                   (long long)now.tv_sec * 1000000 + now.tv_nsec / 1000);
    int rc = reload(service);
    tv_notify_send("READY=1\nSTATUS=serving%s", rc == 0 ? "" : "; the last reload failed");
}

/* Where no manager's watchdog does it: in some looks one after the other, as a process that was
 * stopped and goes on finds an old call too. The worker never comes back: nothing can be closed. */
static void stuck_end(struct service *service)
{
    int stuck = service->watchdog_us == 0 && tv_sched_stuck(service->sched);
    service->stuck_looks = stuck ? service->stuck_looks + 1 : 0;
    if (service->stuck_looks >= STUCK_LOOKS) {
        tv_log(TV_LOG_ERROR, "ending: an engine call makes no progress any more");
        _exit(TV_EXIT_FAULT);
    }
}

/* Until the first signal, or the loss of the device. */
static void serve(struct service *service)
{
    service->watchdog_us = tv_notify_watchdog_us();
    service->moving = 1;
    int tick_ms = service->watchdog_us > 0 ? (int)(service->watchdog_us / 2000) + 1 : TICK_MS;
    gpu_watch(service);
    tick_ms = tick_ms < TICK_MS ? tick_ms : TICK_MS;
    tv_notify_send("READY=1\nSTATUS=serving on %s", tv_http_url(service->http, 0));
    while (await_stop(tick_ms) == 0 &&
           !tv_sched_is_lost(service->sched)) { /* serving is done by other threads */
        watchdog_feed(service);
        gpu_look(service);
        stuck_end(service);
        reload_when_asked(service);
    }
}

/* From the first signal until nothing is left to wait for. */
static void drain(struct service *service)
{
    const struct tv_config *config = &service->config;
    int64_t start_us = tv_clock_us();
    int64_t grace_us = start_us + config->drain_grace_s * 1000000LL;
    (void)alarm((unsigned int)config->drain_max_s); /* none was set before */
    service->end_us = start_us + config->drain_max_s * 1000000LL;
    tv_notify_send("STOPPING=1\nSTATUS=draining");
    tv_sched_drain(service->sched, 1, 0);
    tv_http_drain(service->http, tv_clock_unix_ms() + config->drain_max_s * 1000LL);
    tv_log(TV_LOG_INFO, "draining: not ready any more; new work is refused in %d s at the latest",
           config->drain_grace_s);
    int signals = 1;
    while (signals < 2 && tv_clock_us() < grace_us &&
           (tv_sched_in_flight(service->sched) > 0 ||
            tv_http_open_count(service->http, QUIET_MS) > 0)) {
        signals = await_stop(DRAIN_TICK_MS);
        watchdog_feed(service);
    }
    tv_sched_drain(service->sched, 1, 1);
    while (signals < 2 && tv_sched_in_flight(service->sched) > 0) {
        signals = await_stop(DRAIN_TICK_MS);
        watchdog_feed(service);
    }
    if (signals >= 2) {
        (void)alarm(ABORT_S); /* replaces the longer one */
        service->end_us = tv_clock_us() + ABORT_S * 1000000LL;
        tv_log(TV_LOG_WARNING,
               "second signal: waiting work is refused, rounds that run are finished");
    }
    tv_log(TV_LOG_INFO, "drained in %lld ms", (long long)(tv_clock_us() - start_us) / 1000);
}

/* From the loss of the device until everybody has been told. */
static void mourn(struct service *service)
{
    int64_t start_us = tv_clock_us(), lasted_us = 0;
    tv_notify_send("STOPPING=1\nSTATUS=the device is lost");
    while (lasted_us < LOST_SERVE_MS * 1000LL ||
           (lasted_us < LOST_FINISH_MS * 1000LL && tv_sched_in_flight(service->sched) > 0)) {
        (void)await_stop(DRAIN_TICK_MS); /* a signal asks for no more than what happens */
        lasted_us = tv_clock_us() - start_us;
    }
    tv_log(TV_LOG_ERROR, "ending: the device is lost");
}

static void announce(const struct service *service)
{
    const char *admin = tv_http_url(service->http, 1);
    if (service->config.api_key_file[0] == '\0') {
        tv_log(TV_LOG_INFO, "no keys: every route is open to every process of this machine");
    }
    /* The line that tests and supervisors wait for. */
    if (printf("listening %s admin %s\n", tv_http_url(service->http, 0),
               admin[0] == '\0' ? "off" : admin) < 0 ||
        fflush(stdout) != 0) {
        tv_log(TV_LOG_WARNING, "stdout cannot be written: %s", strerror(errno));
    }
}

/* What --check-config and --check-gpu say: the exit code. */
static int run_checks(const struct tv_config *config)
{
    char text[600] = "";
    int code = TV_EXIT_DRAINED;
    if (config->check_gpu) {
        code = tv_main_gpu_check(config, text, sizeof text);
    } else if (tv_http_check(config, text, sizeof text) != 0) {
        code = TV_EXIT_CONFIG;
    }
    if (code != TV_EXIT_DRAINED) {
        tv_log(TV_LOG_ERROR, "%s", text);
    } else {
        (void)printf("%s\n", config->check_gpu ? text : "the configuration is valid");
    }
    return code;
}

/* Options that print and end: 1 when one was given, with the exit code. */
static int run_print_options(const struct tv_config *config, int *ret_code)
{
    *ret_code = TV_EXIT_DRAINED;
    if (config->help) {
        tv_config_usage(stdout);
    } else if (config->version) {
        (void)printf("treeverifyd %s\n", TV_VERSION);
    } else if (config->print_only) {
        tv_config_print(config, stdout);
    } else if (config->check_only || config->check_gpu) {
        *ret_code = run_checks(config);
    } else {
        return 0;
    }
    if (fflush(stdout) != 0) {
        *ret_code = TV_EXIT_NO_MEMORY;
    }
    return 1;
}

int main(int argc, char **argv)
{
    static struct service service; /* large: the configuration's texts */
    char error[600] = "";
    service.started_unix_ms = tv_clock_unix_ms();
    int rc = streams_init();
    if (rc != 0) {
        return TV_EXIT_NO_MEMORY; /* and nowhere to say it */
    }
    rc = tv_config_load(&service.config, argc, argv, error, sizeof error);
    if (rc != 0) {
        tv_log(TV_LOG_ERROR, "%s", error);
        return rc == -EINVAL ? TV_EXIT_USAGE : TV_EXIT_CONFIG;
    }
    set_log_level(service.config.log_level);
    if (tv_log_is_journal()) {
        (void)tv_log_journal_open(NULL); /* else stderr leads there all the same */
    }
    int code;
    if (run_print_options(&service.config, &code)) {
        return code;
    }
    service.argc = argc;
    service.argv = argv;
    rc = signals_init();
    if (rc != 0) {
        tv_log(TV_LOG_ERROR, "signals cannot be set up: %s", strerror(-rc));
        return TV_EXIT_NO_MEMORY;
    }
    rc = tv_notify_sockets(&service.sockets.work, &service.sockets.admin, error, sizeof error);
    if (rc != 0) {
        tv_log(TV_LOG_ERROR, "%s", error);
        return TV_EXIT_CONFIG;
    }
    code = service_start(&service);
    if (code == TV_EXIT_DRAINED && service.http != NULL) {
        announce(&service);
        serve(&service);
        if (tv_sched_is_lost(service.sched)) {
            mourn(&service);
        } else {
            drain(&service);
        }
        code = tv_sched_is_lost(service.sched) ? TV_EXIT_FAULT : code;
    }
    service_stop(&service);
    return code;
}
