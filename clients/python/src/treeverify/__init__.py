"""treeverify: a client of treeverifyd, draft trees and drafters.

    from treeverify import Client, Sampling
    from treeverify.drafters import NgramDrafter

    with Client("http://127.0.0.1:8471") as client:
        with client.session(list(b"In the beginning"), sampling=Sampling(rule="greedy")) as session:
            for round in session.generate(NgramDrafter(), 100):
                print(bytes(round.new_tokens).decode(), end="", flush=True)

client.py and aio.py do input and output; session.py has the rules they share; tree.py is the draft tree, builders.py
makes trees from a drafter's distributions, drafters/ are drafters.
"""

from .aio import AsyncClient, AsyncSession
from .calls import Retry
from .client import Client, Session
from .digest import Digest
from .errors import (
    AccessError,
    BadRequestError,
    ConflictError,
    ContextFullError,
    ContractError,
    DesyncError,
    Error,
    FinishedError,
    GoneError,
    MovedError,
    NotFoundError,
    ParityMismatchError,
    ProblemError,
    ServerFaultError,
    TransportError,
    TreeRefusedError,
    UnavailableError,
)
from .events import Event
from .tree import Tree, TreeError
from .values import Hidden, HiddenWant, Hint, Logits, Model, Round, Sampling, Timing, TopK, Want

__version__ = "0.1.0"

__all__ = [
    "AccessError",
    "AsyncClient",
    "AsyncSession",
    "BadRequestError",
    "Client",
    "ConflictError",
    "ContextFullError",
    "ContractError",
    "DesyncError",
    "Digest",
    "Error",
    "Event",
    "FinishedError",
    "GoneError",
    "Hidden",
    "HiddenWant",
    "Hint",
    "Logits",
    "Model",
    "MovedError",
    "NotFoundError",
    "ParityMismatchError",
    "ProblemError",
    "Retry",
    "Round",
    "Sampling",
    "ServerFaultError",
    "Session",
    "Timing",
    "TopK",
    "TransportError",
    "Tree",
    "TreeError",
    "TreeRefusedError",
    "UnavailableError",
    "Want",
]
