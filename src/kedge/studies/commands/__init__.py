"""The commands that run studies: ``kedge demo``, ``kedge reproduce`` and ``kedge bench``."""
