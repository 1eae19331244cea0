"""Faulty responses of a web server."""

from __future__ import annotations

import threading

from tests.support.servers import Answer, Asked, Content, Fault, Handler

INDEX = "model.safetensors.index.json"


DATA_START = 4096  # data offset of a weight file in canonical layout


def is_data(asked: Asked) -> bool:
    return asked.start >= DATA_START


def for_the_first(count: int, answer: Answer) -> Fault:
    """Answer the first requests for data with this fault; the client requests each range again."""
    lock = threading.Lock()
    left = [count]

    def fault(handler: Handler, asked: Asked) -> bool:
        with lock:
            left[0] -= is_data(asked)
        if not is_data(asked) or left[0] < 0:
            return False
        answer(handler, asked)
        return True

    return fault


def always(answer: Answer) -> Fault:
    return for_the_first(1 << 30, answer)


def status(code: int, **headers: str) -> Answer:
    return lambda handler, asked: handler.reply(
        code, headers={name.replace("_", "-"): value for name, value in headers.items()}
    )


def truncated(handler: Handler, asked: Asked) -> None:
    content = handler.web.contents[asked.path]
    data = content.data[asked.start : asked.stop]
    handler.reply(206, data, handler.headers_of(content, asked), cut=len(data) // 2)


def shorter_than_asked(handler: Handler, asked: Asked) -> None:
    """Send all that is announced, but less than the range."""
    content = handler.web.contents[asked.path]
    data = content.data[asked.start : asked.stop][:-1]
    handler.reply(206, data, handler.headers_of(content, asked))


def dropped(handler: Handler, asked: Asked) -> None:
    handler.reset()


def other_range(handler: Handler, asked: Asked) -> None:
    handler.serve(asked._replace(start=asked.start + 1, stop=asked.stop + 1))


def everything(handler: Handler, asked: Asked) -> None:
    content = handler.web.contents[asked.path]
    handler.reply(200, content.data, content.validators)


def too_much(handler: Handler, asked: Asked) -> None:
    content = handler.web.contents[asked.path]
    handler.reply(206, content.data[asked.start : asked.stop] + b"x", handler.headers_of(content, asked))


ENDLESS_PIECES, PIECE = 64, bytes(1 << 20)  # bytes of a response that would be endless if the client read on


def endless(handler: Handler, asked: Asked) -> None:
    """Send the requested range, and far more."""
    content = handler.web.contents[asked.path]
    handler.send_response(206)
    for name, value in (handler.headers_of(content, asked) | {"Transfer-Encoding": "chunked"}).items():
        handler.send_header(name, value)
    handler.end_headers()
    for _ in range(ENDLESS_PIECES):
        handler.wfile.write(b"%x\r\n%b\r\n" % (len(PIECE), PIECE))
        handler.web.sent += len(PIECE)
    handler.wfile.write(b"0\r\n\r\n")


def compressed(handler: Handler, asked: Asked) -> None:
    content = handler.web.contents[asked.path]
    data = content.data[asked.start : asked.stop]
    handler.reply(206, data, handler.headers_of(content, asked) | {"Content-Encoding": "gzip"})


def without_a_range(handler: Handler, asked: Asked) -> None:
    handler.reply(206, handler.web.contents[asked.path].data[asked.start : asked.stop])


def stalled(handler: Handler, asked: Asked) -> None:
    """Send the header and one byte, then nothing until the test releases the response."""
    content = handler.web.contents[asked.path]
    data = content.data[asked.start : asked.stop]
    handler.send_response(206)
    for name, value in (handler.headers_of(content, asked) | {"Content-Length": str(len(data))}).items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(data[:1])
    handler.web.released.wait(120)
    handler.wfile.write(data[1:])


def changing(before: Content, after: Content, at: int) -> Fault:
    """Replace the content of `v.safetensors` at the `at`th request for data."""
    lock = threading.Lock()
    seen = [0]

    def fault(handler: Handler, asked: Asked) -> bool:
        with lock:
            seen[0] += is_data(asked)
            handler.web.contents["/v.safetensors"] = after if seen[0] >= at else before
        return False

    return fault


def after_the_data(before: Content, after: Content) -> Fault:
    """Replace the content when the client checks whether it has changed."""

    def fault(handler: Handler, asked: Asked) -> bool:
        handler.web.contents["/v.safetensors"] = after if (asked.start, asked.stop) == (0, 1) else before
        return False

    return fault
