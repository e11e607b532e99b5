"""Damage of bytes and of nested plain data, drawn from a generator."""

import json
import math

NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 2**63 - 1, 2**64 - 1)
VALUES = (
    None, True, False, 0, 1, -1, 7, 2**31, 2**63, -(2**63), 10**30, 0.5, 1e308, -1e-300, math.nan, math.inf, -math.inf,
    "", "x", "nan", "\ud800", "../../x", "a" * 5000, "=1+1", "\x1b[2J", [], {}, [[]], [None], {"x": {}}, [1, 2, 3],
)  # fmt: skip


def any_of(rng, values):
    return values[int(rng.integers(len(values)))]


def damaged(rng, data, others=(), head=160) -> bytes:
    """The bytes, cut, flipped, overwritten, spliced or repeated somewhere; heads more often than the rest."""
    data, others = bytearray(data), others or (data,)
    for _ in range(rng.integers(1, 4)):
        if not data:
            break
        at = int(rng.integers(min(len(data), head) if rng.random() < 0.5 else len(data)))
        other, width = any_of(rng, others), int(any_of(rng, (1, 2, 4, 8)))
        number = any_of(rng, NUMBERS) % 2 ** (8 * width)
        end, new = any_of(
            rng,
            [
                (len(data), b""),
                (at + 1, bytes([data[at] ^ 1 << int(rng.integers(8))])),
                (at + width, number.to_bytes(width, any_of(rng, ("big", "little")))),
                (at + int(rng.integers(1, 32)), b""),
                (at, other[int(rng.integers(len(other))) :][:64]),
                (at, data[at : at + 16] * int(rng.integers(1, 8))),
            ],
        )
        data[at:end] = new
    return bytes(data)


def altered(rng, value):
    """A copy of nested plain data with one place replaced, removed, repeated, moved or nested."""
    value = json.loads(json.dumps(value))
    places = []

    def walk(at):
        for key in list(at) if isinstance(at, dict) else range(len(at)):
            places.append((at, key))
            if isinstance(at[key], (dict, list)):
                walk(at[key])

    holder = [value]
    walk(holder)
    at, key = any_of(rng, places)
    kind = rng.integers(7)
    if kind < 3 or at is holder:
        at[key] = any_of(rng, VALUES)
    elif kind == 3:
        del at[key]
    elif kind == 4:
        other, place = any_of(rng, places)
        at[key] = json.loads(json.dumps(other[place]))
    elif kind == 5:
        nested = at[key]
        for _ in range(int(any_of(rng, (1, 3, 200)))):
            nested = [nested] if rng.random() < 0.5 else {"x": nested}
        at[key] = nested
    elif isinstance(at, dict):
        at[any_of(rng, ("x", "", "__class__", key + "x"))] = at.pop(key)
    else:
        at *= 3
    return holder[0]
