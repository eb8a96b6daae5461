"""Philox 4x32-7: random numbers that are a function of key, step, stream and place.

Source: Salmon et al., SC 2011, "Parallel random numbers: as easy as 1, 2, 3", section
    3.3: seven rounds pass every test of BigCrush; libraries' usual ten are a margin
    that a rounding needs not.
Differences: none in the generator. Its four words go to elements so that vectors need
    no shuffle: word w of counter c is the number of element 64 * (c // 16) + 16 * w + c
    % 16.
The counter is (c, c >> 32, step, stream); the key's low and high 32 bits are the
generator's key.
"""

import torch
from torch import Tensor

ROUNDS = 7
_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor],
    key: tuple[int, int],
    rounds: int = ROUNDS,
) -> list[Tensor]:
    """Four 32-bit words (in int64) for each counter of four such words.

    >>> zero = torch.zeros(1, dtype=torch.int64)
    >>> [hex(int(word)) for word in philox((zero, zero, zero, zero), (0, 0))]
    ['0x5f6fb709', '0xd893f64', '0x4f121f81', '0x4f730a48']
    """
    a, b, c, d = counter
    low, high = key
    for _ in range(rounds):
        # the low 64 bits of both
        first = a * _MULTIPLIERS[0]
        second = c * _MULTIPLIERS[1]
        a = ((second >> 32) & _MASK) ^ b ^ low
        b = second & _MASK
        c = ((first >> 32) & _MASK) ^ d ^ high
        d = first & _MASK
        low = (low + _WEYL[0]) & _MASK
        high = (high + _WEYL[1]) & _MASK
    return [a, b, c, d]


def uniform(place: Tensor, key: int, step: int, stream: int) -> Tensor:
    """Multiples of 2^-24 in [0, 1) for elements at these places (int64), as float32."""
    return (words(place, key, step, stream) >> 8).float() * 2.0**-24


def below(bound: Tensor, place: Tensor, key: int, step: int, stream: int) -> Tensor:
    """Whole numbers in [0, bound) for elements at these places (int64), as int32.

    The 32 bits times ``bound`` (at least 1), shifted: exact on every machine, and a
    number's chance is off by less than one part in 2^32 / bound.
    """
    return ((words(place, key, step, stream) * bound.long()) >> 32).int()


def words(place: Tensor, key: int, step: int, stream: int) -> Tensor:
    """The 32 random bits (in int64) of elements at these places."""
    counter = place // 64 * 16 + place % 16
    drawn = philox(
        (
            counter & _MASK,
            counter >> 32,
            torch.full_like(place, step & _MASK),
            torch.full_like(place, stream),
        ),
        (key & _MASK, key >> 32 & _MASK),
    )
    return torch.stack(drawn).gather(0, (place % 64 // 16)[None])[0]
