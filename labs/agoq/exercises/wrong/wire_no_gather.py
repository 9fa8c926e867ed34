def sent(numel: int, ranks: int, block: int) -> int:
    length = -(-numel // ranks)
    message = 4 * -(-length // block) + 4 * -(-length // 4)
    return (ranks - 1) * message
