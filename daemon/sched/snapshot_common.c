/*
 * snapshot_common.c - what a snapshot's two ends share: whose rows they are, and the names of the
 * sessions that are lost.
 *
 * Refuses to leave a session out that is not named: one by one first, with the reason, then many in
 * a line, as the log takes only so many lines of a kind.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "sched/snapshot_common.h"
#include "sched/version.h"

int tv_sched_snapshot_layout(const struct tv_sched *sched, struct tv_snapshot_layout *ret_layout)
{
    struct tv_engine_facts facts;
    tv_engine_facts(sched->engine, &facts);
    memset(ret_layout, 0, sizeof *ret_layout);
    if (facts.pages == NULL || sched->engine->ops->context_seq == NULL) {
        return -ENOTSUP;
    }
    memcpy(ret_layout->model_id, facts.model_id, sizeof ret_layout->model_id);
    ret_layout->layers = facts.pages->layers;
    ret_layout->page_size = facts.pages->page_size;
    ret_layout->row_dim = facts.pages->row_dim;
    ret_layout->element = facts.pages->dtype == TV_BF16;
    ret_layout->vocab = sched->engine->vocab;
    const char *products = strcmp(facts.products, "exact") == 0 ? "" : " bf16-products";
    (void)snprintf(ret_layout->maker, sizeof ret_layout->maker, "%s %s%s %s", TV_VERSION,
                   facts.backend, products, facts.variant); /* a long one is told by what fits */
    return 0;
}

static void more_write(struct tv_sched_naming *naming)
{
    if (naming->more_count > 0) {
        tv_log(TV_LOG_WARNING, "%d more sessions are not %s:%s", naming->more_count, naming->what,
               naming->more);
    }
    naming->more_count = 0;
    naming->more_bytes = 0;
}

void tv_sched_name_lost(struct tv_sched_naming *naming, const char *id, int32_t len,
                        const char *why)
{
    if (naming->count++ < TV_SCHED_NAMED_MAX) {
        char text[32] = "";
        if (len > 0) {
            (void)snprintf(text, sizeof text, " of %d tokens", len); /* fits */
        }
        tv_log(TV_LOG_WARNING, "session %s%s is not %s: %s", id[0] != '\0' ? id : "?", text,
               naming->what, why);
        return;
    }
    int bytes = snprintf(naming->more + naming->more_bytes,
                         sizeof naming->more - (size_t)naming->more_bytes, " %s",
                         id[0] != '\0' ? id : "?"); /* fits: there is room for one more */
    naming->more_bytes += bytes;
    naming->more_count++;
    if ((size_t)naming->more_bytes + 2 + 32 > sizeof naming->more) {
        more_write(naming);
    }
}

void tv_sched_name_end(struct tv_sched_naming *naming)
{
    more_write(naming);
}
