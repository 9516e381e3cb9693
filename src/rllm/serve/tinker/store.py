"""What survives a restart: sessions, training runs, samplers and checkpoints in SQLite, and the folders that checkpoints are in.

A checkpoint is acknowledged after its files and its row are on the disk. Knows no tensors and no HTTP.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rllm.errors import UserError
from rllm.serve.tinker.errors import ApiError, OperationError

DATABASE = "tinker.sqlite"
FOLDERS = "checkpoints"
KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
"""Second part of a tinker path -> type of checkpoint."""
HIDDEN = "ephemeral"
"""Kind of the weights of a sampler that was made without a name: not listed, and gone with its session."""
SCHEME = "tinker://"
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=+-]{0,127}")
ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9:_-]{0,127}")
_TABLES = """
create table if not exists sessions (id text primary key, created real, seen real, finished text, about text);
create table if not exists runs (id text primary key, session text, created real, seen real, about text);
create table if not exists samplers (id text primary key, session text, created real, path text);
create table if not exists checkpoints (
  path text primary key, run text, kind text, name text, folder text, created real, expires real, public integer, bytes integer, about text);
create table if not exists results (request text primary key, created real, value text);
create index if not exists checkpoints_of_run on checkpoints (run);
"""


@dataclass(frozen=True)
class Checkpoint:
    """`about`: rank, alpha, seed, train_attn|mlp|unembed, optimizer (whether its state is there), user_metadata."""

    path: str
    run: str
    kind: str
    name: str
    folder: Path
    created: float
    expires: float | None
    public: bool
    bytes: int
    about: dict[str, Any]


def split_path(path: str) -> tuple[str, str, str]:
    """(run, kind, name) of ``tinker://run/kind/name``. Raises `ApiError`."""
    parts = path.removeprefix(SCHEME).split("/") if path.startswith(SCHEME) else []
    if (
        len(parts) != 3
        or parts[1] not in (*KINDS, HIDDEN)
        or not ID.fullmatch(parts[0])
        or not NAME.fullmatch(parts[2])
    ):
        raise ApiError(
            f"{path[:300]!r} is no checkpoint path; expected tinker://RUN/weights/NAME or tinker://RUN/sampler_weights/NAME"
        )
    return parts[0], parts[1], parts[2]


def check_name(name: Any, what: str = "path") -> str:
    """A name that may become part of a tinker path. Raises `ApiError`."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ApiError(
            f"{what}: {str(name)[:200]!r} cannot name a checkpoint; use 1 to 128 letters, digits and ._=+- (a letter, digit or _ first)"
        )
    return name


class Store:
    """One folder. Only one server may have it open; safe to use from several threads."""

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / FOLDERS).mkdir(parents=True, exist_ok=True)
        self._lock = threading.RLock()
        self.revision = 0
        """Another one after every change."""
        self._db = sqlite3.connect(folder / DATABASE, check_same_thread=False, isolation_level=None, timeout=2.0)
        try:
            self._db.execute("pragma locking_mode=exclusive")
            self._db.execute("pragma journal_mode=wal")
            self._db.execute("pragma synchronous=full")
            self._db.executescript(_TABLES)
            self._db.execute("insert or replace into results values ('', ?, '')", (time.time(),))
        except sqlite3.OperationalError as error:
            self._db.close()
            raise UserError(
                f"{folder / DATABASE} cannot be opened ({error}); is another server using this folder? Give --state another one"
            ) from error
        except sqlite3.DatabaseError as error:
            self._db.close()
            raise UserError(
                f"{folder / DATABASE} is no database of this server ({error}); give --state another folder"
            ) from error
        self._remove_strays()

    def close(self) -> None:
        with self._lock:
            self._db.close()

    # Sessions, runs, samplers

    def add_session(self, about: Mapping[str, Any]) -> str:
        session, now = uuid.uuid4().hex[:16], time.time()
        self._write("insert into sessions values (?, ?, ?, null, ?)", session, now, now, json.dumps(about))
        return session

    def session(self, session: str) -> dict[str, Any] | None:
        rows = self._read("select created, seen, finished, about from sessions where id = ?", session)
        if not rows:
            return None
        created, seen, finished, about = rows[0]
        return {"id": session, "created": created, "seen": seen, "finished": finished, **json.loads(about)}

    def sessions(self, limit: int, offset: int) -> list[str]:
        return [
            row[0]
            for row in self._read("select id from sessions order by created desc, id limit ? offset ?", limit, offset)
        ]

    def see_session(self, session: str) -> None:
        self._write("update sessions set seen = ? where id = ?", time.time(), session)

    def finish_session(self, session: str, why: Mapping[str, Any]) -> None:
        """The first reason stays."""
        self._write("update sessions set finished = ? where id = ? and finished is null", json.dumps(why), session)

    def silent_sessions(self, before: float) -> list[str]:
        """Open ones that were last heard of before then."""
        return [row[0] for row in self._read("select id from sessions where finished is null and seen < ?", before)]

    def add_run(self, run: str, session: str, about: Mapping[str, Any]) -> None:
        now = time.time()
        self._write("insert or replace into runs values (?, ?, ?, ?, ?)", run, session, now, now, json.dumps(about))

    def describe_run(self, run: str, about: Mapping[str, Any]) -> None:
        self._write("update runs set about = ? where id = ?", json.dumps(about), run)

    def see_run(self, run: str) -> None:
        self._write("update runs set seen = ? where id = ?", time.time(), run)

    def run(self, run: str) -> dict[str, Any] | None:
        rows = self._read("select id, session, created, seen, about from runs where id = ?", run)
        return _run(rows[0]) if rows else None

    def runs(self, limit: int, offset: int) -> tuple[list[dict[str, Any]], int]:
        rows = self._read(
            "select id, session, created, seen, about from runs order by created desc, id limit ? offset ?",
            limit,
            offset,
        )
        return [_run(row) for row in rows], self._read("select count(*) from runs")[0][0]

    def of_session(self, session: str) -> tuple[list[str], list[str]]:
        """(runs, samplers) of a session."""
        runs, samplers = (
            [row[0] for row in self._read(f"select id from {table} where session = ? order by created, id", session)]
            for table in ("runs", "samplers")
        )
        return runs, samplers

    def add_sampler(self, sampler: str, session: str, path: str | None) -> None:
        self._write("insert or replace into samplers values (?, ?, ?, ?)", sampler, session, time.time(), path)

    def sampler(self, sampler: str) -> tuple[str, str | None] | None:
        """(session, path) of a sampler; path None: the base."""
        rows = self._read("select session, path from samplers where id = ?", sampler)
        return (rows[0][0], rows[0][1]) if rows else None

    # Checkpoints

    def save(
        self,
        run: str,
        kind: str,
        name: str,
        write: Callable[[Path], None],
        about: Mapping[str, Any],
        *,
        ttl_s: float | None = None,
        overwrite: bool = False,
        request: tuple[str, Mapping[str, Any]] | None = None,
    ) -> Checkpoint:
        """Make a checkpoint of what `write` puts into a folder. `request`: id and result of the request for it, kept with it, so that the
        answer survives the server too. Raises `OperationError` if the name is taken and not to be overwritten."""
        path = f"{SCHEME}{run}/{kind}/{name}"
        earlier = self.find(path)
        if earlier is not None and not overwrite:
            raise OperationError(f"{path} exists; choose another name, or save with overwrite=True")
        label = re.sub(r"[^A-Za-z0-9_-]", "-", run)
        folder = self.folder / FOLDERS / f"{label}.{kind}.{name}.{uuid.uuid4().hex[:8]}"
        partial = folder.with_name(folder.name + ".partial")
        partial.mkdir()
        try:
            write(partial)
            for file in partial.iterdir():
                _flush(file)
            _flush(partial)
            partial.rename(folder)
            _flush(folder.parent)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        size, now = sum(file.stat().st_size for file in folder.iterdir()), time.time()
        found = Checkpoint(path, run, kind, name, folder, now, now + ttl_s if ttl_s else None, False, size, dict(about))
        row = (path, run, kind, name, folder.name, now, found.expires, 0, size, json.dumps(found.about))
        with self._transaction():
            self._db.execute("insert or replace into checkpoints values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
            if request is not None:
                self._db.execute(
                    "insert or replace into results values (?, ?, ?)", (request[0], now, json.dumps(request[1]))
                )
        if earlier is not None:
            shutil.rmtree(earlier.folder, ignore_errors=True)
        return found

    def find(self, path: str) -> Checkpoint | None:
        """The checkpoint of that path, unless it has expired."""
        rows = self._read(
            "select * from checkpoints where path = ? and (expires is null or expires > ?)", path, time.time()
        )
        return self._checkpoint(rows[0]) if rows else None

    def get(self, path: str) -> Checkpoint:
        """`find`; `ApiError` (404) if there is none."""
        split_path(path)
        found = self.find(path)
        if found is None:
            raise ApiError(f"there is no checkpoint {path}; it was never saved, was deleted or has expired", 404)
        return found

    def checkpoints(self, run: str | None = None, limit: int = -1, offset: int = 0) -> tuple[list[Checkpoint], int]:
        """Those of a run, or all, newest last; with how many there are in all."""
        where = "kind != ? and (expires is null or expires > ?)" + (" and run = ?" if run is not None else "")
        values = (HIDDEN, time.time(), *([run] if run is not None else []))
        rows = self._read(
            f"select * from checkpoints where {where} order by created, path limit ? offset ?", *values, limit, offset
        )
        return [self._checkpoint(row) for row in rows], self._read(
            f"select count(*) from checkpoints where {where}", *values
        )[0][0]

    def hidden(self, run: str) -> list[str]:
        """Paths of a run's unnamed weights, newest last."""
        return [
            row[0]
            for row in self._read(
                "select path from checkpoints where run = ? and kind = ? order by created, path", run, HIDDEN
            )
        ]

    def change(self, path: str, *, expires: float | None = None, public: bool | None = None) -> Checkpoint:
        """With `public` that alone is changed, else when it expires."""
        found = self.get(path)
        if public is not None:
            self._write("update checkpoints set public = ? where path = ?", int(public), path)
            return replace(found, public=public)
        self._write("update checkpoints set expires = ? where path = ?", expires, path)
        return replace(found, expires=expires)

    def delete(self, path: str) -> None:
        found = self.get(path)
        self._write("delete from checkpoints where path = ?", path)
        shutil.rmtree(found.folder, ignore_errors=True)

    def sweep(self) -> list[str]:
        """Delete what has expired, and unnamed weights of sessions that have ended; returns their paths."""
        gone = self._read(
            "select path, folder from checkpoints where expires <= ? or (kind = ? and exists (select 1 from runs, sessions where "
            "runs.id = checkpoints.run and sessions.id = runs.session and sessions.finished is not null))",
            time.time(),
            HIDDEN,
        )
        for path, folder in gone:
            self._write("delete from checkpoints where path = ?", path)
            shutil.rmtree(self.folder / FOLDERS / folder, ignore_errors=True)
        self._write("delete from results where request != '' and created < ?", time.time() - 86400)
        return [path for path, _ in gone]

    def result(self, request: str) -> dict[str, Any] | None:
        """The result of a saving request of an earlier life of the server."""
        rows = self._read("select value from results where request = ? and request != ''", request)
        return json.loads(rows[0][0]) if rows else None

    def _checkpoint(self, row: tuple[Any, ...]) -> Checkpoint:
        path, run, kind, name, folder, created, expires, public, size, about = row
        return Checkpoint(
            path,
            run,
            kind,
            name,
            self.folder / FOLDERS / folder,
            created,
            expires,
            bool(public),
            size,
            json.loads(about),
        )

    def _remove_strays(self) -> None:
        """Folders without a row: of saves that were cut short, or of deletes that were."""
        known = {row[0] for row in self._read("select folder from checkpoints")}
        for folder in (self.folder / FOLDERS).iterdir():
            if folder.name not in known:
                shutil.rmtree(folder, ignore_errors=True)

    def _read(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._db.execute(sql, values).fetchall()

    def _write(self, sql: str, *values: Any) -> None:
        with self._lock:
            self._db.execute(sql, values)
            self.revision += 1

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._lock:
            self._db.execute("begin immediate")
            try:
                yield
            except BaseException:
                self._db.execute("rollback")
                raise
            self._db.execute("commit")
            self.revision += 1


def _run(row: tuple[Any, ...]) -> dict[str, Any]:
    run, session, created, seen, about = row
    return {"id": run, "session": session, "created": created, "seen": seen, **json.loads(about)}


def _flush(path: Path) -> None:
    """Down to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
