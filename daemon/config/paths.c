/*
 * paths.c - which file an option names.
 *
 * A credential is found where the service manager says at this start; nothing else is looked up,
 * and a name that leads out of that folder is refused.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "config/config.h"

#define SCHEME "credential:"

int tv_config_path(const char *text, char *ret_path, size_t path_bytes, char *error,
                   size_t error_bytes)
{
    const size_t scheme_bytes = sizeof SCHEME - 1;
    int needed;
    if (strncmp(text, SCHEME, scheme_bytes) != 0) {
        needed = snprintf(ret_path, path_bytes, "%s", text);
    } else {
        const char *name = text + scheme_bytes;
        const char *folder = getenv("CREDENTIALS_DIRECTORY");
        if (folder == NULL || folder[0] != '/') {
            (void)snprintf(error, error_bytes,
                           "%.300s: the service manager has handed over no credentials", text);
            return -EBADMSG;
        }
        if (name[0] == '\0' || name[0] == '.' || strchr(name, '/') != NULL) {
            (void)snprintf(error, error_bytes, "%.300s: not the name of a credential", text);
            return -EBADMSG;
        }
        needed = snprintf(ret_path, path_bytes, "%s/%s", folder, name);
    }
    if (needed < 0 || (size_t)needed >= path_bytes) {
        (void)snprintf(error, error_bytes, "%.300s: the path is too long", text);
        return -EBADMSG;
    }
    return 0;
}
