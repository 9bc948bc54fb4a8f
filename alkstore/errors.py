"""The errors a caller can meet. A type is here only if a caller would act differently on it."""

from __future__ import annotations

__all__ = [
    "AlkstoreError",
    "Conflict",
    "InvalidName",
    "InvalidPayload",
    "InvalidSpec",
    "LeadershipLost",
    "LockLost",
    "MixedSQLite",
    "OutcomeUnknown",
    "ReservedName",
    "SchemaMissing",
    "SchemaTooNew",
    "StoreBusy",
    "StoreClosed",
    "StoreCorrupt",
    "StoreError",
    "StoreForeign",
    "StoreFull",
    "StoreReadOnly",
    "StoreUnavailable",
    "TransactionTimeout",
]


class AlkstoreError(Exception):
    """The root of every error that alkstore raises on purpose."""


class InvalidName(AlkstoreError, ValueError):
    """A name breaks the name rules (`alkstore.names`). Nothing was sent to the store."""


class ReservedName(AlkstoreError, ValueError):
    """A name belongs to the store itself: it begins with ``__alkstore_``. Choose another one."""


class InvalidPayload(AlkstoreError, ValueError):
    """A payload or a header is not JSON that comes back equal; the text names the path inside the value."""


class InvalidSpec(AlkstoreError, ValueError):
    """A schedule's spec does not parse. Nothing was sent to the store.

    `spec` is the text as it was given.
    """

    def __init__(self, spec: object, message: str) -> None:
        super().__init__(message)
        self.spec = spec


class Conflict(AlkstoreError):
    """A compare-and-set lost: somebody else changed the thing first. Read it again and decide anew."""


class LeadershipLost(AlkstoreError):
    """The runner of the schedules does not lead any more; it stopped before any further tick.

    Start it again (a supervisor does): it stands by until it can lead.
    """


class LockLost(AlkstoreError):
    """A held lock's lease ended or was taken while the body was running; the body was cancelled."""


class TransactionTimeout(AlkstoreError):
    """A transaction was left open for longer than `transaction_timeout`; it was rolled back."""


class StoreError(AlkstoreError):
    """Something is wrong with the store itself. The driver's own exception is the ``__cause__``."""


class StoreBusy(StoreError):
    """Somebody else held the database's write lock for the whole `busy_timeout`. Nothing happened; try later."""


class StoreFull(StoreError):
    """The disk or the database's page limit is full. The write was rolled back; make room and try again."""


class StoreReadOnly(StoreError):
    """The file or its directory cannot be written by this process."""


class StoreCorrupt(StoreError):
    """The file is damaged, or it is not a SQLite database at all."""


class StoreForeign(StoreError):
    """Tables with the store's names exist but are not the store's. They were not touched."""


class StoreUnavailable(StoreError):
    """The store cannot be reached now: its place does not exist, cannot be opened, or its server is away."""


class MixedSQLite(StoreError):
    """Two copies of SQLite have the same file open in one process, or one of its files was taken away or replaced.

    POSIX drops all of a process's locks on a file when any copy closes it, so going on would lose commits.
    """


class SchemaTooNew(StoreError):
    """A newer alkstore made this store. It was not touched; upgrade this program."""


class SchemaMissing(StoreError):
    """The store's tables are missing or old, and the options of `open_store` forbid making them."""


class StoreClosed(StoreError):
    """The store was closed, or its engine has failed; the operation had no effect."""


class OutcomeUnknown(StoreError):
    """A commit was sent and its answer was lost. Look whether it is there, or repeat it with the same `key`."""
