"""How the demo pair was made: the Python standard library's sources in, two model folders out.

In order, each a command `python -m specpipe.demo.training.<name>`:

1. `tokenizer` trains the BPE tokenizer and writes it, the model configs and the list of held-out files.
2. `tokens` encodes the corpus once.
3. `target` trains the target.
4. `own_text` lets the target write text of its own.
5. `distil` trains the draft to answer as the target does, on both kinds of text.
6. `export` writes the weights into the package.
7. `evaluate` measures loss and acceptance on the held-out files.

Needs no network. Everything random has a seed; the schedules follow a time budget, so the number of steps, and with
it the exact weights, depend on the machine. Checkpoints and logs go to `~/.cache/specpipe/demo_training`.
"""
