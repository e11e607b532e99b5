"""Errors and warnings of kedge."""


class KedgeError(Exception):
    """Base class of kedge's errors; the message says what to do."""


class InputError(KedgeError, ValueError):
    """An argument has the wrong shape, type, range or value."""


class NotReadyError(KedgeError, RuntimeError):
    """A step was skipped: anchors not set, detector not fitted or not calibrated."""


class ArchitectureError(KedgeError, ValueError):
    """A network cannot be anchored, converted or exported as it is."""


class FileFormatError(KedgeError, ValueError):
    """A file is damaged, was modified, or is of an unsupported version."""


class KedgeWarning(UserWarning):
    """Something works, but less well than the caller may expect."""


class NormalisationWarning(UserWarning):
    """A network may have been trained on normalised images, and kedge was not given their mean and deviation."""
