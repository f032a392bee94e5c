/*
 * internal.h - what session/'s own files share.
 */
#ifndef TV_SESSION_INTERNAL_H
#define TV_SESSION_INTERNAL_H

#include "session/session.h"

/* A session that has nothing, not even an id, but is the table's. 0 or -ENOMEM. */
int tv_session_blank(const struct tv_sessions *table, struct tv_session **ret_session);
/* Does this call settle the round that is held now? */
int tv_session_settles(const struct tv_session *session, const struct tv_request *request);
/* A call that may run by its number: does a held round forbid it, or not bear its path? 0 or
 * -EINVAL with *problem. */
int tv_session_judge_held(const struct tv_session *session, const struct tv_request *request,
                          struct tv_problem *problem);

#endif
