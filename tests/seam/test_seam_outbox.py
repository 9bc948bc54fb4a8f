"""A message of an outbox through the embedder's own connection: it commits together with what it tells of."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy
from sqlalchemy import orm

from alkstore import InvalidName, InvalidPayload, Job, JobHandle, ReservedName, StopToken, open_store, seam
from tests.seam.embedders import KINDS, Embedder, Kind


async def messages(path: str, kind: Kind) -> list[Job]:
    async with open_store(path, inline=True, driver=kind.driver) as store:
        return await store.outbox("o")._queue.list()


async def test_it_is_committed_with_the_embedders_row(embedder: Embedder, path: str, kind: Kind) -> None:
    embedder.begin()
    embedder.order()
    id = seam.outbox_enqueue(embedder.conn, "o", {"order": 1})
    embedder.commit()
    assert [(job.id, job.payload) for job in await messages(path, kind)] == [(id, {"order": 1})]


async def test_it_is_rolled_back_with_the_embedders_row(embedder: Embedder, path: str, kind: Kind) -> None:
    embedder.begin()
    embedder.order()
    seam.outbox_enqueue(embedder.conn, "o", {"order": 1})
    embedder.rollback()
    assert await messages(path, kind) == []
    assert embedder.execute("SELECT * FROM orders") == []


NO_TRANSACTION = r"no transaction is open .* begin first \(BEGIN IMMEDIATE\)"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.never_alone], ids=lambda kind: kind.name)
def test_without_a_transaction_it_is_refused_and_says_why(embedder: Embedder) -> None:
    with pytest.raises(ValueError, match=NO_TRANSACTION):
        seam.outbox_enqueue(embedder.conn, "o", {"order": 1})
    embedder.begin()
    assert embedder.execute("SELECT count(*) FROM __alkstore_jobs") == [(0,)]
    embedder.order()
    seam.outbox_enqueue(embedder.conn, "o", 1)
    embedder.commit()
    with pytest.raises(ValueError, match=NO_TRANSACTION):
        seam.outbox_enqueue(embedder.conn, "o", 2)


async def test_a_message_has_the_derived_set_and_a_key_of_its_own(embedder: Embedder, path: str, kind: Kind) -> None:
    embedder.begin()
    embedder.order()
    seam.outbox_enqueue(embedder.conn, "o", 1)
    seam.outbox_enqueue(embedder.conn, "o", 2)
    embedder.commit()
    one, other = await messages(path, kind)
    assert (one.visibility, one.max_attempts, one.backoff, one.expires_at) == (60, 5, 5, None)
    assert None not in (one.key, other.key)
    assert one.key != other.key


async def test_a_message_takes_options(embedder: Embedder, path: str, kind: Kind) -> None:
    embedder.begin()
    embedder.order()
    id = seam.outbox_enqueue(embedder.conn, "o", 1, key="k", headers={"trace": "t"}, priority=3)
    assert seam.outbox_enqueue(embedder.conn, "o", 2, key="k") == id
    embedder.commit()
    (job,) = await messages(path, kind)
    assert (job.key, job.headers, job.priority, job.payload) == ("k", {"trace": "t"}, 3, 1)


async def test_a_deliverer_delivers_it(embedder: Embedder, path: str, kind: Kind) -> None:
    embedder.begin()
    embedder.order()
    seam.outbox_enqueue(embedder.conn, "o", {"order": 1})
    embedder.commit()
    stop, delivered = StopToken(), []

    async def delivery(handle: JobHandle) -> None:
        delivered.append(handle.payload)
        stop.stop()

    async with open_store(path, inline=True, driver=kind.driver) as store:
        await store.outbox("o").deliver(delivery, stop=stop)
    assert delivered == [{"order": 1}]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"name": "__alkstore_x"}, ReservedName),
        ({"name": ""}, InvalidName),
        ({"payload": {1}}, InvalidPayload),
        ({"key": " "}, InvalidName),
        ({"headers": {"a": 1}}, InvalidPayload),
        ({"delay": -1}, ValueError),
    ],
    ids=repr,
)
def test_a_wrong_argument_is_refused(embedder: Embedder, arguments: dict[str, Any], error: type[Exception]) -> None:
    embedder.begin()
    embedder.order()
    with pytest.raises(error):
        seam.outbox_enqueue(embedder.conn, **{"name": "o", "payload": 1, **arguments})


# ------------------------------------------------------------------------------------- the ways of SQLAlchemy's users


class _Base(orm.DeclarativeBase):
    pass


class _Order(_Base):
    __tablename__ = "orders"
    rowid: orm.Mapped[int] = orm.mapped_column(primary_key=True)
    total: orm.Mapped[int]


@pytest.fixture
def engine(path: str) -> Any:
    engine = sqlalchemy.create_engine(f"sqlite:///{path}")
    yield engine
    engine.dispose()


STDLIB = Kind("sqlalchemy", lambda path: pytest.fail("not used"))


async def test_engine_begin(engine: sqlalchemy.Engine, path: str) -> None:
    with engine.begin() as conn:
        seam.outbox_enqueue(conn, "o", 1)
        conn.execute(sqlalchemy.text("INSERT INTO orders VALUES (:total)"), {"total": 1})
    assert len(await messages(path, STDLIB)) == 1


async def test_engine_begin_that_raises(engine: sqlalchemy.Engine, path: str) -> None:
    def fail() -> None:
        with engine.begin() as conn:
            seam.outbox_enqueue(conn, "o", 1)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert await messages(path, STDLIB) == []


async def test_session_begin(engine: sqlalchemy.Engine, path: str) -> None:
    with orm.Session(engine) as session, session.begin():
        session.add(_Order(total=1))
        seam.outbox_enqueue(session, "o", 1)
    assert len(await messages(path, STDLIB)) == 1


async def test_a_session_that_has_begun_by_an_add(engine: sqlalchemy.Engine, path: str) -> None:
    with orm.Session(engine) as session:
        session.add(_Order(total=1))
        seam.outbox_enqueue(session, "o", 1)
        session.commit()
        assert [order.total for order in session.scalars(sqlalchemy.select(_Order))] == [1]
    assert len(await messages(path, STDLIB)) == 1


async def test_a_session_that_is_left_without_a_commit(engine: sqlalchemy.Engine, path: str) -> None:
    with orm.Session(engine) as session:
        session.add(_Order(total=1))
        seam.outbox_enqueue(session, "o", 1)
    assert await messages(path, STDLIB) == []


async def test_a_nested_transaction_of_a_session(engine: sqlalchemy.Engine, path: str) -> None:
    with orm.Session(engine) as session:
        session.add(_Order(total=1))
        session.flush()
        nested = session.begin_nested()
        seam.outbox_enqueue(session, "o", "undone")
        nested.rollback()
        seam.outbox_enqueue(session, "o", "kept")
        session.commit()
    assert [job.payload for job in await messages(path, STDLIB)] == ["kept"]
