/*
 * terminal.c - what is drawn over and over on a terminal: a progress bar, and the pictures of a
 * live view.
 *
 * Draws only where the caller has found a terminal; leaves the cursor as it was.
 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "clients/cli/cli.h"

#define BAR_WIDTH 30

void tv_cli_progress(const char *label, int64_t done, int64_t all)
{
    char bar[BAR_WIDTH + 1];
    int64_t part = all > 0 ? done * BAR_WIDTH / all : 0;
    int width = part < 0 ? 0 : part > BAR_WIDTH ? BAR_WIDTH : (int)part;
    memset(bar, '.', BAR_WIDTH);
    memset(bar, '#', (size_t)width);
    bar[BAR_WIDTH] = '\0';
    (void)fprintf(stderr, "\r\033[K%s [%s] %lld of %lld", label, bar, (long long)done,
                  (long long)all);
    (void)fflush(stderr); /* a picture that does not come is no fault */
}

void tv_cli_progress_end(void)
{
    (void)fputs("\r\033[K", stderr);
    (void)fflush(stderr);
}

void tv_cli_print_safe(FILE *out, const char *text)
{
    for (; *text != '\0'; text++) {
        unsigned char c = (unsigned char)*text;
        (void)fputc(c < 0x20 || c == 0x7f ? '?' : c, out);
    }
}

static volatile sig_atomic_t interrupted;

static void on_signal(int number)
{
    (void)number;
    interrupted = 1;
}

void tv_cli_live_begin(void)
{
    struct sigaction action = {.sa_handler = on_signal}; /* no SA_RESTART: pauses end */
    (void)sigaction(SIGINT, &action, NULL);              /* cannot fail for these */
    (void)sigaction(SIGTERM, &action, NULL);
    (void)fputs("\033[?25l", stdout); /* no cursor in the picture */
}

void tv_cli_live_picture(void)
{
    (void)fputs("\033[H\033[J", stdout);
}

int tv_cli_live_pause(double seconds)
{
    struct timespec rest = {.tv_sec = (time_t)seconds};
    rest.tv_nsec = (long)((seconds - (double)rest.tv_sec) * 1e9);
    (void)fflush(stdout); /* checked at the end */
    while (!interrupted && nanosleep(&rest, &rest) != 0 && errno == EINTR) {
    }
    return interrupted;
}

void tv_cli_live_end(void)
{
    (void)fputs("\033[?25h\n", stdout);
}
