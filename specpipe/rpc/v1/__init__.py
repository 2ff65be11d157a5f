"""Generated from proto/specpipe/rpc/v1 by `make proto`; never edited."""
