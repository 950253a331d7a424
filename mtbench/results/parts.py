"""Names of the parts into which conversations and contexts are divided."""


def turn_part(turn: int) -> str:
    """Return the part of a conversation that a turn is in, from 1: each of the first turns, then twice as many a part.

    >>> [turn_part(turn) for turn in (1, 4, 5, 8, 9, 17)]
    ['1', '4', '5–8', '5–8', '9–16', '17–32']
    """
    return str(turn) if turn <= 4 else _doubled(turn)


def context_part(tokens: int) -> str:
    """Return the part that a context of so many tokens is in: up to 128, then up to twice as many.

    >>> [context_part(tokens) for tokens in (3, 128, 129, 2048)]
    ['≤ 128', '≤ 128', '129–256', '1,025–2,048']
    """
    return "≤ 128" if tokens <= 128 else _doubled(tokens)


def _doubled(number: int) -> str:
    last = 1 << (number - 1).bit_length()
    return f"{last // 2 + 1:,}–{last:,}"
