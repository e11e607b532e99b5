"""The errors and warnings that kedge raises itself."""


class KedgeError(Exception):
    """Base of every error that kedge raises on purpose; its message says what to do."""


class InputError(KedgeError, ValueError):
    """An argument has the wrong shape, type, range or value."""


class NotReadyError(KedgeError, RuntimeError):
    """A step was skipped: anchors not set, detector not fitted or not calibrated."""


class ArchitectureError(KedgeError, ValueError):
    """A network cannot be anchored as it stands."""


class FileFormatError(KedgeError, ValueError):
    """A file is damaged, was changed, or belongs to another version."""


class KedgeWarning(UserWarning):
    """Something works, but not as well as the caller may expect."""
