"""Named locks: leases with one random owner each and fencing tokens from one counter of the store."""

from __future__ import annotations

from attrs import frozen

from alkstore.sql.tx import Tx, lock_topic

__all__ = ["Grant", "acquire", "expiry", "release", "renew"]

FORGET_AFTER_MS = 86_400_000
"""An expired row is deleted after a day; its fencing token is safe, the counter is the store's."""

HOLDER = "SELECT owner, expires_at FROM __alkstore_locks WHERE name = :name"

LOCK = "SELECT name FROM __alkstore_locks WHERE name = :name /*for update*/"

LOCK_FENCE = "SELECT value FROM __alkstore_meta WHERE key = 'fencing_token' /*for update*/"

NEXT_FENCE = "UPDATE __alkstore_meta SET value = value + 1 WHERE key = 'fencing_token' RETURNING value"

TAKE = """
INSERT INTO __alkstore_locks (name, owner, fence, ttl, expires_at, acquired_at)
VALUES (:name, :owner, :fence, :ttl, :now + :ttl, :now)
ON CONFLICT (name) DO UPDATE SET owner = excluded.owner, fence = excluded.fence, ttl = excluded.ttl,
  expires_at = excluded.expires_at, acquired_at = excluded.acquired_at
WHERE __alkstore_locks.expires_at <= :now
RETURNING expires_at"""

# the guard: this acquisition's own random owner, and a lease that has not ended
RENEW = """
UPDATE __alkstore_locks SET expires_at = :now + COALESCE(:ttl, ttl), ttl = COALESCE(:ttl, ttl)
WHERE name = :name AND owner = :owner AND expires_at > :now
RETURNING ttl, expires_at"""

RELEASE = """
DELETE FROM __alkstore_locks WHERE name = :name AND owner = :owner AND expires_at > :now
RETURNING name"""

# rides on __alkstore_locks_expiry
LONG_EXPIRED = """
SELECT name FROM __alkstore_locks WHERE expires_at <= :before ORDER BY expires_at LIMIT 100 /*skip locked*/"""

FORGET = "DELETE FROM __alkstore_locks WHERE name = :name AND expires_at <= :before RETURNING name"


@frozen
class Grant:
    """A lock as it was acquired: who holds it, with which token, until when (ms)."""

    name: str
    owner: str
    fence: int
    ttl: int
    expires_at: int


def acquire(tx: Tx, name: str, owner: str, ttl: int) -> Grant | None:
    """Take the lock for `ttl` ms if it is free or its lease has ended; None: somebody holds it."""
    tx.lock(LOCK, {"name": name})
    holder = tx.one(HOLDER, {"name": name})
    if holder is not None and holder[1] > tx.now():
        return None
    before = tx.now() - FORGET_AFTER_MS
    tx.each(FORGET, [{"name": old, "before": before} for (old,) in tx.all(LONG_EXPIRED, {"before": before})])
    tx.lock(LOCK_FENCE)  # the lease begins when there is nothing more to wait for
    now = tx.now()
    token = tx.one(NEXT_FENCE)
    assert token is not None
    row = tx.one(TAKE, {"name": name, "owner": owner, "fence": token[0], "ttl": ttl, "now": now})
    return None if row is None else Grant(name, owner, token[0], ttl, row[0])


def renew(tx: Tx, name: str, owner: str, ttl: int | None) -> tuple[int, int] | None:
    """Extend the lease to now + `ttl` ms (None: as long as before), return its length and its end.

    None: it is not this owner's any more, nothing changed.
    """
    tx.lock(LOCK, {"name": name})
    row = tx.one(RENEW, {"name": name, "owner": owner, "ttl": ttl, "now": tx.now()})
    if row is not None and ttl is not None:  # it may end sooner now than those who wait for that know
        tx.touch(lock_topic(name))
    return None if row is None else (row[0], row[1])


def release(tx: Tx, name: str, owner: str) -> bool:
    """Give the lock up; False: not this owner's any more, nothing changed."""
    tx.lock(LOCK, {"name": name})
    if tx.one(RELEASE, {"name": name, "owner": owner, "now": tx.now()}) is None:
        return False
    tx.touch(lock_topic(name))
    return True


def expiry(tx: Tx, name: str) -> int | None:
    """Return when the present holder's lease ends (it may be over already); None: nobody holds the lock."""
    row = tx.one(HOLDER, {"name": name})
    return None if row is None else int(row[1])
