"""Sizes of arrays: how many blocks hold them, and how far they are rounded up."""


def divide_up(numerator: int, denominator: int) -> int:
    """Divides and rounds up."""
    return -(-numerator // denominator)


def power_of_two(number: int, least: int = 1) -> int:
    """Returns the smallest power of two that is at least `number`, or `least` if that is more.

    Array sizes are rounded up to it, so that few programs are compiled.
    """
    return max(least, 1 << (number - 1).bit_length())
