"""A request's trace as a picture: in a terminal, as SVG, as a page. Pure: spans in, text out.

`lay_out` makes a Timeline of a trace; `specpipe.timeline.terminal`, `.svg` and `.page` draw it. Must not know: where
traces come from, files, gRPC.
"""
