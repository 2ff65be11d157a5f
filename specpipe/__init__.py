"""specpipe: distributed, overlapped speculative decoding."""
