/*
 * terminal.c - what is drawn over and over on a terminal: a progress bar, a live line below text
 * that scrolls, and the pictures of a live view.
 *
 * Draws only where the caller has found a terminal; leaves it as it was, also when a signal ends
 * the program.
 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#include "clients/cli/cli.h"

#define BAR_WIDTH     30
#define LINE_ROWS_MIN 4 /* a smaller terminal has no row to spare */

void tv_cli_bar(char *ret_text, size_t bytes, const char *label, int64_t done, int64_t all)
{
    char bar[BAR_WIDTH + 1];
    int64_t part = all > 0 ? done * BAR_WIDTH / all : 0;
    int width = part < 0 ? 0 : part > BAR_WIDTH ? BAR_WIDTH : (int)part;
    memset(bar, '.', BAR_WIDTH);
    memset(bar, '#', (size_t)width);
    bar[BAR_WIDTH] = '\0';
    (void)snprintf(ret_text, bytes, "%s [%s] %lld of %lld", label, bar, (long long)done,
                   (long long)all); /* cut when long */
}

void tv_cli_progress(const char *label, int64_t done, int64_t all)
{
    char text[128];
    tv_cli_bar(text, sizeof(text), label, done, all);
    (void)fprintf(stderr, "\r\033[K%s", text);
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

static struct winsize line_size;
static char line_reset[64]; /* what gives the last row back to the text */
static size_t line_reset_bytes;

/* The terminal as it was, then what the signal does by itself. */
static void on_fatal_signal(int number)
{
    ssize_t written = write(STDERR_FILENO, line_reset, line_reset_bytes);
    (void)written; /* nobody is left to be told */
    (void)signal(number, SIG_DFL);
    (void)raise(number);
}

int tv_cli_line_begin(void)
{
    const struct sigaction action = {.sa_handler = on_fatal_signal, .sa_flags = SA_NODEFER};
    if (!isatty(STDERR_FILENO) || ioctl(STDERR_FILENO, TIOCGWINSZ, &line_size) != 0 ||
        line_size.ws_row < LINE_ROWS_MIN || line_size.ws_col < 2) {
        return 0;
    }
    line_reset_bytes = (size_t)snprintf(line_reset, sizeof(line_reset),
                                        "\0337\033[r\033[%d;1H\033[2K\0338", line_size.ws_row);
    (void)sigaction(SIGINT, &action, NULL); /* cannot fail for these */
    (void)sigaction(SIGTERM, &action, NULL);
    /* make room below, keep the last row out of scrolling, and stand above it */
    (void)fprintf(stderr, "\n\033[1A\0337\033[1;%dr\0338", line_size.ws_row - 1);
    (void)fflush(stderr);
    return 1;
}

void tv_cli_line_show(const char *text)
{
    (void)fprintf(stderr, "\0337\033[%d;1H\033[2K%.*s\0338", line_size.ws_row, line_size.ws_col - 1,
                  text);
    (void)fflush(stderr);
}

void tv_cli_line_end(void)
{
    (void)signal(SIGINT, SIG_DFL);
    (void)signal(SIGTERM, SIG_DFL);
    (void)fwrite(line_reset, 1, line_reset_bytes, stderr);
    (void)fflush(stderr);
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
