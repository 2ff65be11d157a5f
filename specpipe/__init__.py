"""specpipe: distributed, overlapped speculative decoding."""

import os

__version__ = "0.1.0"

# gRPC's C core reads this once, when it is first imported, and otherwise writes notes such as GOAWAY to stderr.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
