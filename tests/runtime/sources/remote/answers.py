"""Faulty responses of a web server."""

from __future__ import annotations

import threading

from tests.support.servers import Answer, Content, Fault, Handler, Request

INDEX = "model.safetensors.index.json"


DATA_START = 4096  # data offset of a weight file in canonical layout


def is_data(request: Request) -> bool:
    return request.start >= DATA_START


def for_the_first(count: int, answer: Answer) -> Fault:
    """Answer the first requests for data with this fault; the client requests each range again."""
    lock = threading.Lock()
    remaining = [count]

    def fault(handler: Handler, request: Request) -> bool:
        with lock:
            remaining[0] -= is_data(request)
        if not is_data(request) or remaining[0] < 0:
            return False
        answer(handler, request)
        return True

    return fault


def always(answer: Answer) -> Fault:
    return for_the_first(1 << 30, answer)


def status(code: int, **headers: str) -> Answer:
    return lambda handler, request: handler.reply(
        code, headers={name.replace("_", "-"): value for name, value in headers.items()}
    )


def truncated(handler: Handler, request: Request) -> None:
    content = handler.web.contents[request.path]
    data = content.data[request.start : request.stop]
    handler.reply(206, data, handler.headers_of(content, request), cut=len(data) // 2)


def shorter_than_requested(handler: Handler, request: Request) -> None:
    """Send all that is announced, but less than the range."""
    content = handler.web.contents[request.path]
    data = content.data[request.start : request.stop][:-1]
    handler.reply(206, data, handler.headers_of(content, request))


def dropped(handler: Handler, request: Request) -> None:
    handler.reset()


def other_range(handler: Handler, request: Request) -> None:
    handler.serve(request._replace(start=request.start + 1, stop=request.stop + 1))


def everything(handler: Handler, request: Request) -> None:
    content = handler.web.contents[request.path]
    handler.reply(200, content.data, content.validators)


def too_much(handler: Handler, request: Request) -> None:
    content = handler.web.contents[request.path]
    handler.reply(206, content.data[request.start : request.stop] + b"x", handler.headers_of(content, request))


ENDLESS_PIECES, PIECE = 64, bytes(1 << 20)  # bytes of a response that would be endless if the client read on


def endless(handler: Handler, request: Request) -> None:
    """Send the requested range, and far more."""
    content = handler.web.contents[request.path]
    handler.send_response(206)
    for name, value in (handler.headers_of(content, request) | {"Transfer-Encoding": "chunked"}).items():
        handler.send_header(name, value)
    handler.end_headers()
    for _ in range(ENDLESS_PIECES):
        handler.wfile.write(b"%x\r\n%b\r\n" % (len(PIECE), PIECE))
        handler.web.sent += len(PIECE)
    handler.wfile.write(b"0\r\n\r\n")


def compressed(handler: Handler, request: Request) -> None:
    content = handler.web.contents[request.path]
    data = content.data[request.start : request.stop]
    handler.reply(206, data, handler.headers_of(content, request) | {"Content-Encoding": "gzip"})


def without_a_range(handler: Handler, request: Request) -> None:
    handler.reply(206, handler.web.contents[request.path].data[request.start : request.stop])


def stalled(handler: Handler, request: Request) -> None:
    """Send the header and one byte, then nothing until the test releases the response."""
    content = handler.web.contents[request.path]
    data = content.data[request.start : request.stop]
    handler.send_response(206)
    for name, value in (handler.headers_of(content, request) | {"Content-Length": str(len(data))}).items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(data[:1])
    handler.web.released.wait(120)
    handler.wfile.write(data[1:])


def changing(before: Content, after: Content, at: int) -> Fault:
    """Replace the content of `v.safetensors` at the `at`th request for data."""
    lock = threading.Lock()
    seen = [0]

    def fault(handler: Handler, request: Request) -> bool:
        with lock:
            seen[0] += is_data(request)
            handler.web.contents["/v.safetensors"] = after if seen[0] >= at else before
        return False

    return fault


def after_the_data(before: Content, after: Content) -> Fault:
    """Replace the content when the client checks whether it has changed."""

    def fault(handler: Handler, request: Request) -> bool:
        handler.web.contents["/v.safetensors"] = after if (request.start, request.stop) == (0, 1) else before
        return False

    return fault
