"""A drafter that knows a recorded text: for tests and for replaying a run."""

from __future__ import annotations

from collections.abc import Sequence

from ..tree import Tree


class TraceDrafter:
    """Drafts the recorded tokens at the same positions as a chain, with wrong guesses where it is told to.

    recorded: a whole sequence, prompt included. wrong_every n: the draft for every absolute position divisible by n
    carries `wrong` instead of the recorded token, and the recorded one stands beside it as a sibling when branch is
    true. So acceptance is known in advance.
    """

    def __init__(
        self, recorded: Sequence[int], *, wrong_every: int | None = None, wrong: int = 0, branch: bool = False
    ) -> None:
        if wrong_every is not None and wrong_every < 1:
            raise ValueError("wrong_every >= 1")
        self.recorded = list(recorded)
        self.wrong_every, self.wrong, self.branch = wrong_every, wrong, branch

    def draft(self, tokens: Sequence[int], nodes: int, depth: int) -> Tree:
        out, parents, tip = [int(tokens[-1])], [-1], 0
        for position in range(len(tokens), min(len(tokens) + depth, len(self.recorded))):
            token, at = self.recorded[position], tip
            spoiled = self.wrong_every is not None and position % self.wrong_every == 0 and token != self.wrong
            for guess in [self.wrong, token] if spoiled and self.branch else [self.wrong if spoiled else token]:
                if len(out) > nodes:
                    return Tree(out, parents)
                tip = len(out)
                out.append(guess)
                parents.append(at)
        return Tree(out, parents)
