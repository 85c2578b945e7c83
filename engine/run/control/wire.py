"""Messages as bytes: msgpack, tagged by the name of a class of one closed table; no pickle.

Owns: the codec of events, instructions, requests and control messages. Does not own: the messages
(control.py, engine/run/control/host_messages.py), framing (control_socket.py).

    message   [name of its class, {field: value}]
              [name of its class, bytes], of rows to train on one of several ranks: these, deflated
    array     [dtype, bytes], of the dtypes below
              [dtype, bytes, columns], of two dimensions
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import numpy as np

from dataflow.errors import RunError
from engine.protocol.messages import Event, From, ToWorker, TrainPart, TrainStep, WorkerLost
from engine.protocol.workers import Ask
from engine.run.control import control
from engine.run.control import host_messages as hm

_DTYPES = {
    np.dtype(kind).str: np.dtype(kind)
    for kind in ("bool", "u1", "i1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8", "<f4", "<f8")
}
EVENTS: tuple[type, ...] = get_args(Event)
INSTRUCTIONS: tuple[type, ...] = get_args(ToWorker)
TO_WORKER: tuple[type, ...] = get_args(control.ToWorkerProcess)
TO_SUPERVISOR: tuple[type, ...] = get_args(control.ToSupervisor)
ASKS: tuple[type, ...] = get_args(Ask)
CONTROL: tuple[type, ...] = get_args(control.Control)
HOSTING: tuple[type, ...] = get_args(hm.Hosting)
_TABLE = (*EVENTS, From, *INSTRUCTIONS, *ASKS, *CONTROL, *HOSTING)
_CLASSES = {kind.__name__: kind for kind in _TABLE}
_INSIDE: dict[type, tuple[str, tuple[type, ...]]] = {
    From: ("event", EVENTS),
    control.Command: ("instruction", INSTRUCTIONS),
    control.Request: ("request", ASKS),
    control.WorkerUpdate: ("events", (From,)),
    hm.Relay: ("instruction", INSTRUCTIONS),
    hm.RelayRequest: ("requests", ASKS),
    hm.HostUpdate: ("events", (From, WorkerLost)),
}
"""Messages with a field that holds a message of several classes, or a tuple: field, classes."""
_DEFLATED = (TrainStep, TrainPart)
"""Messages with the keys of rows, of which each of perhaps a thousand ranks gets one."""
_INFLATED = 1 << 28
"""Bytes that deflated ones may become: 256 MiB, millions of rows. More are sent as they are."""
_WRONG = (
    *(msgspec.DecodeError, zlib.error),
    *(RecursionError, ValueError, TypeError, OverflowError),
)
"""All that bytes from outside can raise here."""


def encode_message(message: Any) -> bytes:
    """The bytes of a message. Raises RunError for a class outside the table, or a wrong value."""
    name = type(message).__name__
    if _CLASSES.get(name) is not type(message):
        problem = f"expected one of {', '.join(_CLASSES)}, found a {name}"
        raise RunError(f"control message: {problem}. Fix: put it in wire.py.")
    try:
        if isinstance(message, _DEFLATED) and message.mine is not None:
            return _ENCODER.encode((name, _deflate(_ENCODER.encode(message))))
        return _ENCODER.encode((name, _plain(message)))
    except (TypeError, ValueError, OverflowError) as error:
        fix = "Fix: see its class for what each field is."
        raise RunError(f"control message {name}: {error}. {fix}") from error


def decode_message(
    encoded: bytes | bytearray | memoryview, among: Sequence[type] | None = None
) -> Any:
    """The message, of one of these classes; arrays are views of the bytes. Raises RunError."""
    try:
        return _decode(encoded, among)
    except _WRONG as error:
        problem = f"expected one of the table in wire.py, found {error}"
        fix = "Fix: both ends have to be of the same version."
        raise RunError(f"control message of {len(encoded)} bytes: {problem}. {fix}") from error


def _decode(encoded: Any, among: Sequence[type] | None) -> Any:
    name, body = _OUTER.decode(encoded)
    kind = _CLASSES.get(name)
    if kind is None or (among is not None and kind not in among):
        raise ValueError(f"the class {name[:60]!r}")
    return _decoder(kind)(_inflate(body) if kind in _DEFLATED else body)


def _deflate(body: bytes) -> bytes | msgspec.Raw:
    """Deflate a message that goes to each of perhaps a thousand ranks: most of its bytes are zeros
    of small numbers and names that come again.
    """
    if len(body) > _INFLATED:  # the other end would refuse to inflate it
        return msgspec.Raw(body)
    return zlib.compress(body, 1)


def _inflate(body: msgspec.Raw) -> bytes | msgspec.Raw:
    """The fields. Raises ValueError for bytes that become too many, and what zlib raises."""
    if bytes(memoryview(body)[:1]) not in _BYTES:  # a map: it was sent as it is
        return body
    inflating = zlib.decompressobj()
    fields = inflating.decompress(msgspec.msgpack.decode(body, type=bytes), _INFLATED)
    if not inflating.eof:
        raise ValueError(f"deflated bytes that end too early or become more than {_INFLATED}")
    return fields


def _plain(message: Any) -> Any:
    """The message, or its fields where one of them holds messages of several classes."""
    if type(message) not in _INSIDE:
        return message
    field, _ = _INSIDE[type(message)]
    fields = {f.name: getattr(message, f.name) for f in dataclasses.fields(message)}
    held = fields[field]
    if isinstance(held, tuple):
        bodies = map(encode_message, held)
        fields[field] = tuple(map(msgspec.Raw, bodies))
    else:
        fields[field] = msgspec.Raw(encode_message(held))
    return fields


@cache
def _decoder(kind: type) -> Callable[[Any], Any]:
    """A function from the body of a message to a message of this class."""
    if kind not in _INSIDE:
        return msgspec.msgpack.Decoder(kind, dec_hook=_from_plain).decode
    field, among = _INSIDE[kind]
    # msgspec cannot tell the classes of that field apart, so it reads the field as bytes, in a
    # class with the same fields; then its name says which class each message in it has.
    hints = get_type_hints(kind)
    several = get_origin(hints[field]) is tuple
    hints[field] = list[msgspec.Raw] if several else msgspec.Raw
    mirror = msgspec.defstruct(kind.__name__, list(hints.items()), kw_only=True)
    read = msgspec.msgpack.Decoder(mirror, dec_hook=_from_plain).decode

    def read_fields(body: Any) -> dict[str, Any]:
        fields = msgspec.structs.asdict(read(body))
        held = fields[field]
        if several:
            fields[field] = tuple(_decode(each, among) for each in held)
        else:
            fields[field] = _decode(held, among)
        return fields

    return lambda body: kind(**read_fields(body))


def _to_plain(unknown: Any) -> Any:
    """Encode what msgspec does not know: arrays, NumPy numbers, paths."""
    if isinstance(unknown, np.ndarray):
        is_table = unknown.ndim == 2 and unknown.shape[1] > 0
        if not (unknown.ndim == 1 or is_table) or unknown.dtype.str not in _DTYPES:
            expected = f"expected an array of one or two dimensions of {', '.join(_DTYPES)}"
            raise TypeError(f"{expected}, found {unknown.dtype} {unknown.shape}")
        elements = np.ascontiguousarray(unknown).reshape(-1).data
        if is_table:
            return unknown.dtype.str, elements, unknown.shape[1]
        return unknown.dtype.str, elements
    if isinstance(unknown, np.generic):
        return unknown.item()
    if isinstance(unknown, Path):
        return str(unknown)
    raise TypeError(f"a {type(unknown).__name__} cannot be sent")


def _from_plain(kind: type, plain: Any) -> Any:
    if kind is Path:
        if not isinstance(plain, str):
            raise ValueError(f"expected a path, found a {type(plain).__name__}")
        return Path(plain)
    if kind is not np.ndarray:
        raise TypeError(f"a {kind.__name__} cannot be received")
    match plain:
        case [str() as name, bytes() as elements] if name in _DTYPES:
            return np.frombuffer(elements, _DTYPES[name])
        case [str() as name, bytes() as elements, int() as columns] if name in _DTYPES:
            return np.frombuffer(elements, _DTYPES[name]).reshape(-1, columns)
    raise ValueError("an array that is not of one or two dimensions and a known dtype")


_BYTES = (b"\xc4", b"\xc5", b"\xc6")
"""How bytes begin in msgpack."""
_ENCODER = msgspec.msgpack.Encoder(enc_hook=_to_plain)
_OUTER = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
