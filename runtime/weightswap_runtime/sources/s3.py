"""Objects of S3 and compatible stores, through s3fs's client, which does not retry: `remote` does, with progress."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from typing import Any

import aiohttp
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError, IncompleteReadError

from weightswap_runtime.errors import WeightFileError

from .location import Url
from .remote import (
    HEAD_BYTES,
    ContentRange,
    ObjectPin,
    Opened,
    Transient,
    Write,
    changed,
    connection_lost,
    read_failed,
    status_error,
)

_CHUNK = 256 << 10  # bytes of a body that are read at once
_MISSING = frozenset({"404", "NoSuchKey", "NoSuchBucket", "NoSuchVersion"})
_SLOW = frozenset({"SlowDown", "RequestTimeout", "InternalError", "ServiceUnavailable", "ThrottlingException"})


class S3Object:
    """Transport for the version that the URL names, or else for the current one, pinned by its ETag."""

    def __init__(self, fs: Any, path: str, url: Url) -> None:
        self._fs = fs
        bucket, key, version = fs.split_path(path)
        self._names = {"Bucket": bucket, "Key": key, **({"VersionId": version} if version else {})}
        self._url = url
        self._where = str(url)

    async def open(self) -> Opened | None:
        try:
            async with self._call("get_object", Range=f"bytes=0-{HEAD_BYTES - 1}") as response:
                content_range = self._range(response)
                with closing(response["Body"]) as body:
                    head = await content_range.read_head(body.iter_chunks(_CHUNK), HEAD_BYTES)
        except _Missing:
            return None
        except _Unsatisfiable:
            return Opened(ObjectPin(0), b"")
        return Opened(ObjectPin(content_range.size, response.get("ETag", "")), head)

    async def fetch(self, pin: ObjectPin, start: int, stop: int, write: Write) -> None:
        try:
            async with self._call("get_object", Range=f"bytes={start}-{stop - 1}", IfMatch=pin.tag) as response:
                content_range = self._range(response)
                if pin.differs(ObjectPin(content_range.total or pin.size, response.get("ETag", ""))):
                    raise changed(self._where)
                content_range.check(start, stop)
                with closing(response["Body"]) as body:
                    async for data in body.iter_chunks(_CHUNK):
                        write(data)
        except (_Missing, _Unsatisfiable):
            raise changed(self._where) from None

    async def probe(self, pin: ObjectPin) -> ObjectPin | None:
        try:
            async with self._call("head_object") as response:
                return ObjectPin(response["ContentLength"], response.get("ETag", ""))
        except _Missing:
            return None

    async def replace(self, content: bytes, tag: str | None) -> bool:
        condition = {"IfNoneMatch": "*"} if tag is None else {"IfMatch": tag}
        try:
            async with self._call("put_object", Body=content, **condition):
                return True
        except _Conflict:
            return False
        except _Missing:
            if tag is None:  # no object is asked for, so it is the bucket
                raise WeightFileError(f"{self._where}: no such bucket; create it, or check the URL") from None
            return False

    def _range(self, response: dict[str, Any]) -> ContentRange:
        if "ContentRange" in response:
            return ContentRange.parse(response["ContentRange"], self._where)
        size = response["ContentLength"]  # the whole object
        return ContentRange(self._where, 0, size, size)

    @asynccontextmanager
    async def _call(self, name: str, **arguments: str | bytes) -> AsyncIterator[dict[str, Any]]:
        try:
            await self._fs.set_session()
            method = getattr(await self._fs.get_s3(self._names["Bucket"]), name)
            # adds the user's configuration: requester pays, encryption keys
            options = self._fs._get_s3_method_kwargs(method, **self._names, **arguments)
            yield await method(**options)
        except ClientError as error:
            raise self._translate(error) from None
        except (HTTPClientError, IncompleteReadError, aiohttp.ClientError, TimeoutError, OSError) as error:
            raise connection_lost(self._url, error) from None
        except (BotoCoreError, ValueError) as error:
            raise read_failed(self._url, error) from None

    def _translate(self, error: ClientError) -> Exception:
        response: dict[str, Any] = dict(error.response)
        code = str(response.get("Error", {}).get("Code", ""))
        facts = response.get("ResponseMetadata", {})
        status = int(facts.get("HTTPStatusCode", 0))
        if code in _MISSING or status == 404:
            return _Missing()
        if status == 416:
            return _Unsatisfiable()
        if status == 412:
            return _Conflict(str(changed(self._where)))
        if code in _SLOW or status == 409:  # another write was under way; whether it counts, the next attempt finds
            return Transient(code)
        return status_error(self._where, status, code, facts.get("HTTPHeaders", {}).get("retry-after"))


class _Missing(Exception):
    """Error for an object that does not exist."""


class _Unsatisfiable(Exception):
    """Error for an object without a byte in the range."""


class _Conflict(WeightFileError):
    """Error for an object that is not the requested one any more; a reader's error as it is."""
