"""What can go wrong with an update."""


class TransferError(RuntimeError):
    """An update that cannot be taken; the version before it is still whole."""
