def sent(numel: int, ranks: int, block: int) -> int:
    length = -(-numel // ranks)
    message = 4 * -(-length // 4)
    return 2 * (ranks - 1) * message
