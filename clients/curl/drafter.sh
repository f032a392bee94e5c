#!/bin/sh
# drafter.sh - a remote drafter with curl alone, for models whose tokens are bytes.
#
# usage: drafter.sh [URL [PROMPT [TOKENS]]]
# Guesses that what followed the last two tokens before follows them again, posts the guess as a chain, and prints the
# text. A request that gets no answer is sent again as it was: its seq makes that safe. Knows nothing of resync.
set -eu
url=${1:-http://127.0.0.1:8471}
prompt=${2:-Holy, holy, holy, holy}
count=${3:-60}

ask() { # PATH BODY
    curl -sS --fail-with-body --retry 5 --retry-connrefused --json "$2" "$url$1"
}
value() { # ANSWER MEMBER: a number or a string of an answer
    printf '%s' "$1" | sed -n "s/.*\"$2\":\"\{0,1\}\([^\",}]*\).*/\1/p"
}

text=$(printf '%s' "$prompt" | od -An -v -tu1 | tr -s ' \n' ',' | sed 's/^,//;s/,$//')
answer=$(ask /v1/sessions "{\"tokens\":[$text],\"sampling\":{\"rule\":\"greedy\"}}")
session=$(value "$answer" session)
epoch=$(value "$answer" epoch)
text="$text,$(value "$answer" pending)"
new=$(value "$answer" pending)

while [ "$(echo "$new" | tr ',' '\n' | wc -l)" -lt "$count" ]; do
    tree=$(echo "$text" | awk -F, '{
        for (at = NF - 1; at >= 2; at--) if ($at == $NF && $(at - 1) == $(NF - 1)) break
        tokens = $NF; parents = "-1" # node 0 is the pending token
        if (at >= 2) for (i = 1; i <= 6 && at + i <= NF; i++) {
            tokens = tokens "," $(at + i); parents = parents "," (i - 1)
        }
        printf "\"tokens\":[%s],\"parents\":[%s]", tokens, parents
    }')
    answer=$(ask "/v1/sessions/$session/verify" "{\"seq\":$(value "$answer" next_seq),\"epoch\":\"$epoch\",\
\"expected_len\":$(value "$answer" committed_len),\"tree\":{$tree}}")
    more=$(printf '%s' "$answer" | sed 's/.*"new_tokens":\[\([^]]*\)\].*/\1/')
    text="$text,$more"
    new="$new,$more"
done
curl -sS -X DELETE "$url/v1/sessions/$session"
echo "$new" | tr ',' '\n' | LC_ALL=C awk '{ printf "%c", $1 } END { print "" }'
