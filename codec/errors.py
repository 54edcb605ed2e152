"""Errors of the codecs.

    CodecError
    ├── CorruptionError           the bytes are not what was written
    │   └── TruncatedError        there are fewer bytes than the header promises
    ├── UnknownCodecError         the frame names a codec or version this build does not know
    ├── CodecUnavailableError     known, but not usable on this machine
    ├── UnsupportedDtypeError     the codec cannot hold this dtype (also a TypeError)
    ├── NvcompError               nvCOMP refused a call (nvcomp.py)
    └── CudaError                 the CUDA driver refused a call (cuda_driver.py)
"""


class CodecError(Exception):
    """Base of all errors raised by `tidegate.codec`."""


class CorruptionError(CodecError):
    """The frame is damaged: a checksum, a length or a field does not hold."""


class TruncatedError(CorruptionError):
    """The frame ends before the length that its header promises."""


class UnknownCodecError(CodecError):
    """The frame, or the caller, names a codec or a version that this build does not know."""


class CodecUnavailableError(CodecError):
    """The codec is known but needs a package or a device that is not here."""


class UnsupportedDtypeError(CodecError, TypeError):
    """The codec cannot hold values of this dtype."""
