"""Objects in a bucket of S3, or of a server that speaks its protocol."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from .base import ObjectStat
from .errors import InvalidKeyError, ObjectExistsError, ObjectNotFoundError, StorageError, StoreIOError
from .keys import check_key, check_new_key, check_prefix, is_reserved
from .s3_calls import Attempt, Calls
from .s3_checksum import Checksummer
from .s3_client import Answer, Client, check_boto3, endpoint_of, object_arguments, request_arguments
from .s3_conditions import Conditions
from .s3_debts import Debts
from .s3_object import ABORT_S
from .s3_opened import S3OpenObject
from .s3_options import S3Options, parse_s3_url, with_environment
from .s3_reader import S3Reader, age_s
from .s3_uploads import Uploads
from .s3_writer import S3Writer
from .workers import WorkerPool


class S3Store:
    """A store under a prefix of a bucket. Safe for threads, and for several processes and machines on one prefix.

    Opening it makes no call. What a server leaves of an unfinished write is an upload: `list` yields it under the name
    `.<name>.<random>.partial`, and `delete` of that aborts it.

    Args:
        bucket: The bucket; it is never made.
        prefix: What all keys begin with; "" for none.
        options: See there; what they leave open comes from the usual AWS environment.
        client: Used instead of a boto3 client of our own, which then stays open.

    Raises:
        StorageError: boto3, or what the checksum needs, is missing; or the prefix cannot be one.
    """

    def __init__(
        self, bucket: str, prefix: str = "", *, options: S3Options | None = None, client: Client | None = None
    ) -> None:
        check_boto3()
        prefix = prefix.strip("/")
        if prefix:
            check_key(prefix)
        self._options = with_environment(options or S3Options())
        if client is not None and self._options.endpoint_url is None:
            self._options = dataclasses.replace(self._options, endpoint_url=endpoint_of(client))
        self._checksummer = Checksummer(self._options.checksum)
        self._owns_client = client is None
        self._calls = Calls(self._options, bucket, prefix, client=client)
        self._abort_s = min(ABORT_S, self._options.deadline_s)
        self._pool = WorkerPool(self._options.concurrency, "tidegate-s3")
        self._reader = S3Reader(self._calls, self._pool)
        self._uploads = Uploads(self._calls)
        self._debts = Debts(self._calls, self._uploads)
        self._conditions = Conditions(self._calls)

    @classmethod
    def from_url(cls, url: str) -> S3Store:
        """Open `s3://bucket/prefix?option=value`; see `parse_s3_url`. Raises StorageError."""
        bucket, prefix, options = parse_s3_url(url)
        return cls(bucket, prefix, options=options)

    @property
    def url(self) -> str:
        """`s3://bucket/prefix`."""
        return self._calls.url

    @property
    def uploads(self) -> Uploads:
        """The uploads that are not completed."""
        return self._uploads

    @property
    def debts(self) -> Debts:
        """What failed writes may have left at the server."""
        return self._debts

    def prepare(self) -> list[str]:
        """Find out, once, what the server can do; see `PreparedStore.prepare`. Removes what failed writes have left."""
        self._debts.settle(self._abort_s)
        self._conditions.are_honoured()
        return self._conditions.take_notes()

    def create(self, key: str, *, size_hint_bytes: int = 0, replace: bool = False) -> S3Writer:
        """Start a new object; see `Store.create`. Makes no call yet, and the hint is of no use.

        Without `replace` a key is taken to be this store's alone to write: if the server did not answer when an upload
        of it was to be begun, all of its uploads are aborted later, but for those of writers that this store has then.
        """
        check_new_key(key)
        return S3Writer(
            self._calls,
            key,
            pool=self._pool,
            checksummer=self._checksummer,
            conditions=self._conditions,
            debts=self._debts,
            replace=replace,
            sealed=self._reader.forget,
        )

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        """Fill `out` from `offset` on; see `Store.read_into`. An object that changes between two reads is an error."""
        check_key(key)
        self._reader.read_into(key, offset, out)

    def open_reader(self, key: str) -> S3OpenObject:
        """Open an object for reading; see `OpeningStore.open_reader`. One call, and nothing to be closed.

        The object that it was then cannot be read any more once it is replaced or deleted: that is an error.
        """
        check_key(key)
        return S3OpenObject.look_up(self._reader, key)

    def read_all(self, key: str, *, limit_bytes: int) -> bytes:
        """Return a whole small object; see `Store.read_all`."""
        check_key(key)
        text, _ = self._reader.read_all(key, limit_bytes)
        if text is None:
            raise StoreIOError(f"{self.url}/{key} has more than the {limit_bytes} bytes that it may have", key=key)
        return text

    def stat(self, key: str) -> ObjectStat:
        """Tell an object's length and age, or an upload's; see `Store.stat`."""
        check_key(key)
        try:
            return self._reader.stat(key)
        except ObjectNotFoundError:
            if not is_reserved(key):
                raise
        return self._uploads.stat(key)

    def compare_and_put(self, key: str, data: bytes, *, expected: bytes | None) -> None:
        """Put a small object if the present one is `expected`; see `Store.compare_and_put`.

        Where the server does not honour conditional writes, another that puts between our look and our put is overrun.
        """
        check_new_key(key)
        condition = self._absent(key) if expected is None else self._unchanged(key, expected)
        if not self._conditions.are_honoured():
            condition = {}
        arguments = {**self._calls.at(key), **object_arguments(self._options), **condition, "Body": data}
        with memoryview(data) as view:
            arguments.update(self._checksummer.arguments((view,)))

        def put(attempt: Attempt) -> bool:
            attempt.client.put_object(**arguments)
            return True

        try:
            self._calls.run(put, action="put", key=key, recover=lambda error: self._recover(key, data))
        except (ObjectExistsError, ObjectNotFoundError) as exc:
            raise self._unexpected(key, "was put or deleted by another meanwhile") from exc
        finally:
            self._reader.forget(key)

    def list(self, prefix: str = "") -> Iterator[ObjectStat]:
        """Yield the objects under a prefix, and unfinished uploads as leftovers; see `Store.list`.

        Names that no key can have are not ours and are left out.
        """
        check_prefix(prefix)
        root = self._calls.name("")
        for page in self._pages(root + prefix):
            for entry in page.get("Contents", ()):
                key = str(entry["Key"])[len(root) :]
                if _is_plain(key):
                    yield ObjectStat(key, int(entry["Size"]), age_s(page, entry["LastModified"]))
        yield from self._uploads.stats(prefix)

    def folders(self) -> Iterator[str]:
        """Yield the first parts of keys that have several; see `FolderStore.folders`. One request tells 1,000."""
        root = self._calls.name("")
        for page in self._pages(root, Delimiter="/"):
            yield from (str(entry["Prefix"])[len(root) : -1] for entry in page.get("CommonPrefixes", ()))

    def delete(self, key: str) -> None:
        """Remove an object, or abort an upload that is named as a leftover; see `Store.delete`."""
        check_key(key)
        self._reader.forget(key)
        upload = self._uploads.find(key) if is_reserved(key) else None
        if upload is not None:
            self._uploads.abort(upload)
        else:
            self._calls.run(lambda at: at.client.delete_object(**self._calls.at(key)), action="delete", key=key)

    def close(self) -> None:
        """Finish what is queued, end the threads and close the connections. Blocks. May be called again.

        Removes what failed writes have left, for at most two times the lesser of 15 s and `deadline_s`, and one
        `timeout_s`. Where a request got no answer it also looks again for up to 3 s (`s3_debts.LATE_S`). So no upload
        is left of a failed write if the server answers by then, and takes up within those 3 s whatever it had still
        unread. Otherwise `debts.unpaid` names what may be left: it is tried again at the exit of the process, if this
        store is still referred to; then only `tidegate gc` removes it, by its age.
        """
        self._pool.close()
        self._debts.finish(self._abort_s)
        if self._owns_client:
            self._calls.close()

    def _absent(self, key: str) -> dict[str, object]:
        if not self._conditions.are_honoured():
            try:
                self._reader.head(key)
            except ObjectNotFoundError:
                return {}
            raise self._unexpected(key, "is there already")
        return {"IfNoneMatch": "*"}

    def _unchanged(self, key: str, expected: bytes) -> dict[str, object]:
        try:
            present, etag = self._reader.read_all(key, len(expected))
        except ObjectNotFoundError as exc:
            raise self._unexpected(key, "is absent") from exc
        if present != expected:
            raise self._unexpected(key, "is another one")
        return {"IfMatch": etag}

    def _unexpected(self, key: str, state: str) -> ObjectExistsError:
        return ObjectExistsError(f"{self.url}/{key} {state}, so it is not what was expected", key=key)

    def _recover(self, key: str, data: bytes) -> bool | None:
        """Whether an earlier attempt, whose answer was lost, has put the object after all."""
        try:
            present, _ = self._reader.read_all(key, len(data))
        except StorageError:
            return None
        return True if present == data else None

    def _pages(self, prefix: str, **arguments: str) -> Iterator[Answer]:
        def call(attempt: Attempt) -> Answer:
            return attempt.client.list_objects_v2(
                Bucket=self._calls.bucket, Prefix=prefix, **arguments, **request_arguments(self._options)
            )

        while True:
            page = self._calls.run(call, action="list", key="")
            yield page
            if not page.get("IsTruncated"):
                return
            arguments["ContinuationToken"] = page["NextContinuationToken"]


def _is_plain(key: str) -> bool:
    try:
        check_key(key)
    except InvalidKeyError:
        return False
    return True
