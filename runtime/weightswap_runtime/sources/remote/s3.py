"""Objects of S3 and of what speaks its protocol, through s3fs's client. Retries are ours, not s3fs's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from typing import Any

import aiohttp
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError, IncompleteReadError

from weightswap_runtime.errors import WeightFileError
from weightswap_runtime.sources.location import Url

from .transport import (
    HEAD_BYTES,
    ContentRange,
    ObjectPin,
    Opened,
    Transient,
    Write,
    changed,
    check_range,
    failed,
    gather,
    lost,
    parse_content_range,
    refused,
    total_of,
)

CHUNK = 256 << 10
_MISSING = frozenset({"404", "NoSuchKey", "NoSuchBucket", "NoSuchVersion"})
_CONFLICTS = frozenset({"PreconditionFailed", "ConditionalRequestConflict"})
_SLOW = frozenset({"SlowDown", "RequestTimeout", "InternalError", "ServiceUnavailable", "ThrottlingException"})


class _Missing(Exception):
    """There is no such object."""


class S3Object:
    """A Transport. The version that the URL names is read, else what is current, pinned by its ETag."""

    def __init__(self, fs: Any, path: str, url: Url) -> None:
        self._fs = fs
        bucket, key, version = fs.split_path(path)
        self._names = {"Bucket": bucket, "Key": key, **({"VersionId": version} if version else {})}
        self._url = url
        self._where = str(url)

    async def open(self) -> Opened | None:
        try:
            async with self._call("get_object", Range=f"bytes=0-{HEAD_BYTES - 1}") as answer:
                found = self._range(answer)
                size = total_of(found, self._where)
                wanted = min(size, HEAD_BYTES)
                check_range(found, 0, wanted, self._where)
                with closing(answer["Body"]) as body:
                    head = await gather(body.iter_chunks(CHUNK), wanted, self._where)
        except _Missing:
            return None
        except _Unsatisfiable:
            return Opened(ObjectPin(0), b"")
        return Opened(ObjectPin(size, answer.get("ETag", "")), head)

    async def fetch(self, pin: ObjectPin, start: int, stop: int, write: Write) -> None:
        try:
            async with self._call("get_object", Range=f"bytes={start}-{stop - 1}", IfMatch=pin.tag) as answer:
                found = self._range(answer)
                if pin.differs(ObjectPin(found.total or pin.size, answer.get("ETag", ""))):
                    raise changed(self._where)
                check_range(found, start, stop, self._where)
                with closing(answer["Body"]) as body:
                    async for data in body.iter_chunks(CHUNK):
                        write(data)
        except (_Missing, _Unsatisfiable):
            raise changed(self._where) from None

    async def probe(self, pin: ObjectPin) -> ObjectPin | None:
        try:
            async with self._call("head_object") as answer:
                return ObjectPin(answer["ContentLength"], answer.get("ETag", ""))
        except _Missing:
            return None

    async def replace(self, content: bytes, tag: str | None) -> bool:
        condition = {"IfNoneMatch": "*"} if tag is None else {"IfMatch": tag}
        try:
            async with self._call("put_object", Body=content, **condition):
                return True
        except (_Missing, _Conflict):
            return False

    def _range(self, answer: dict[str, Any]) -> ContentRange:
        if "ContentRange" in answer:
            return parse_content_range(answer["ContentRange"], self._where)
        size = answer["ContentLength"]  # the whole object
        return ContentRange(0, size, size)

    @asynccontextmanager
    async def _call(self, name: str, **arguments: str | bytes) -> AsyncIterator[dict[str, Any]]:
        try:
            await self._fs.set_session()
            method = getattr(await self._fs.get_s3(self._names["Bucket"]), name)
            # what the user has configured: requester pays, encryption keys
            options = self._fs._get_s3_method_kwargs(method, **self._names, **arguments)
            yield await method(**options)
        except ClientError as error:
            raise self._meaning(error) from None
        except (HTTPClientError, IncompleteReadError, aiohttp.ClientError, TimeoutError, OSError) as error:
            raise lost(self._url, error) from None
        except (BotoCoreError, ValueError) as error:
            raise failed(self._url, error) from None

    def _meaning(self, error: ClientError) -> Exception:
        response: dict[str, Any] = dict(error.response)
        code = str(response.get("Error", {}).get("Code", ""))
        facts = response.get("ResponseMetadata", {})
        status = int(facts.get("HTTPStatusCode", 0))
        if code in _MISSING or status == 404:
            return _Missing()
        if status == 416:
            return _Unsatisfiable()
        if code in _CONFLICTS:
            return _Conflict(str(changed(self._where)))
        if code in _SLOW:
            return Transient(code)
        return refused(self._where, status, code, facts.get("HTTPHeaders", {}).get("retry-after"))


class _Conflict(WeightFileError):
    """Another object is there than the one that was asked for."""


class _Unsatisfiable(Exception):
    """The object has no byte in the range."""
