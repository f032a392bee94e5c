/*
 * process.c - the process_ families, by the names that every Prometheus client uses.
 *
 * Reads /proc/self and nothing else. What cannot be read is left out, never guessed.
 */
#include <dirent.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include "stats/stats.h"

static void sample(struct tv_stats_text *text, const char *name, const char *type, const char *help,
                   double value)
{
    tv_stats_family(text, name, type, help);
    tv_stats_sample(text, NULL, 0, value);
}

/* Fields 22 to 24 of /proc/self/stat: start in ticks since boot, virtual bytes, resident pages. */
static int read_stat(unsigned long long *ret_start, unsigned long long *ret_virtual,
                     long long *ret_pages)
{
    char line[1024];
    FILE *file = fopen("/proc/self/stat", "re");
    if (file == NULL) {
        return -1;
    }
    size_t bytes = fread(line, 1, sizeof line - 1, file);
    (void)fclose(file); /* only read */
    line[bytes] = '\0';
    char *at = strrchr(line, ')'); /* the name may have anything in it */
    for (int field = 2; at != NULL && field < 22; field++) {
        at = strchr(at + 1, ' ');
    }
    return at != NULL && sscanf(at, " %llu %llu %lld", ret_start, ret_virtual, ret_pages) == 3 ? 0
                                                                                               : -1;
}

static int64_t open_fds(void)
{
    DIR *folder = opendir("/proc/self/fd");
    int64_t count = 0;
    if (folder == NULL) {
        return -1;
    }
    for (const struct dirent *entry = readdir(folder); entry != NULL; entry = readdir(folder)) {
        count += entry->d_name[0] != '.';
    }
    (void)closedir(folder); /* only read */
    return count - 1;       /* the one that reads */
}

/* Seconds since the epoch at which the process began: its age is known in ticks since boot. */
static double started_at(unsigned long long start_ticks)
{
    struct timespec now, up;
    (void)clock_gettime(CLOCK_REALTIME, &now); /* neither can fail */
    (void)clock_gettime(CLOCK_BOOTTIME, &up);
    double boot = (double)(now.tv_sec - up.tv_sec) + (double)(now.tv_nsec - up.tv_nsec) * 1e-9;
    return boot + (double)start_ticks / (double)sysconf(_SC_CLK_TCK);
}

void tv_stats_process_write(struct tv_stats_text *text)
{
    unsigned long long start = 0, virtual_bytes = 0;
    long long pages = 0;
    struct timespec cpu;
    struct rlimit files;
    if (clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &cpu) == 0) {
        sample(text, "process_cpu_seconds_total", "counter",
               "Processor time of this process, user and system.",
               (double)cpu.tv_sec + (double)cpu.tv_nsec * 1e-9);
    }
    if (read_stat(&start, &virtual_bytes, &pages) == 0) {
        sample(text, "process_resident_memory_bytes", "gauge", "Resident memory.",
               (double)pages * (double)sysconf(_SC_PAGESIZE));
        sample(text, "process_virtual_memory_bytes", "gauge", "Virtual memory.",
               (double)virtual_bytes);
        sample(text, "process_start_time_seconds", "gauge",
               "Start of this process, in seconds since the epoch.", started_at(start));
    }
    int64_t fds = open_fds();
    if (fds >= 0) {
        sample(text, "process_open_fds", "gauge", "Open descriptors.", (double)fds);
    }
    if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
        sample(text, "process_max_fds", "gauge", "Descriptors that may be open.",
               (double)files.rlim_cur);
    }
}
